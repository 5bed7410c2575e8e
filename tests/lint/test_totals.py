"""The run's total must never be better than the run."""
import pytest

import totals

OK = '<testsuite><testcase name="a"/><testcase name="b" status="run"/></testsuite>'
BAD = ('<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>'
       '<testcase name="c"><error/></testcase><testcase name="d"><skipped/></testcase>'
       '<testcase name="e" status="fail"/></testsuite></testsuites>')


def run(folder, capsys, **steps):
    """steps: name=(exit code, report or None). Returns (exit code, last line)."""
    for name, (code, report) in steps.items():
        (folder / f"{name}.code").write_text(str(code))
        if report is not None:
            (folder / f"{name}.xml").write_text(report)
    code = totals.main(folder)
    return code, capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("steps, code, line", [
    ({"a": (0, OK), "build_b": (0, None)}, 0, "2 passed, 0 failed"),
    ({"a": (0, OK), "build_b": (1, None)}, 1, "2 passed, 1 failed"),
    ({"a": (0, OK), "b": (0, None)}, 1, "2 passed, 1 failed"),
    ({"a": (8, BAD), "b": (0, OK)}, 1, "3 passed, 3 failed, 1 skipped"),
    ({"a": (124, OK)}, 1, "2 passed, 1 failed"),          # hung after its report
    ({"a": (0, OK), "b": (124, None)}, 1, "2 passed, 1 failed"),
    ({"a": (0, OK), "b": (1, "<testsu")}, 1, "2 passed, 1 failed"),
    ({"a": (0, "<testsuite/>")}, 1, "0 passed, 2 failed"),   # nothing ran
    ({}, 1, "0 passed, 1 failed"),
])
def test_totals(tmp_path, capsys, steps, code, line):
    assert run(tmp_path, capsys, **steps) == (code, line)
