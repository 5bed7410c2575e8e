#!/usr/bin/env python3
"""Adds up the JUnit reports of a run: a line a report, then `N passed, N failed` alone.

    python3 tests/totals.py FOLDER

FOLDER holds NAME.code (a step's exit code) and NAME.xml, save for steps named build-*. A step that
ended badly without a failed test in its report, or that ran no test, counts as one failed test.
"""
import sys
import xml.etree.ElementTree as xml
from pathlib import Path


def count_report(path):
    """(passed, failed, skipped) of a report; a file that is no report holds nothing."""
    passed = failed = skipped = 0
    try:
        cases = list(xml.parse(path).getroot().iter("testcase"))
    except (OSError, xml.ParseError):
        return 0, 0, 0
    for case in cases:
        tags = {child.tag for child in case}
        if tags & {"failure", "error"} or case.get("status") in ("fail", "disabled"):
            failed += 1
        elif "skipped" in tags or case.get("status") == "notrun":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def count_step(folder, name):
    passed, failed, skipped = count_report(folder / f"{name}.xml")
    code = int((folder / f"{name}.code").read_text() or 1)
    ran_nothing = passed == 0 and not name.startswith("build")
    if failed == 0 and (code != 0 or ran_nothing):
        failed = 1
    return passed, failed, skipped


def main(folder):
    names = sorted((p.stem for p in folder.glob("*.code")),
                   key=lambda name: (folder / f"{name}.code").stat().st_mtime_ns)
    total = [0, 0, 0]
    for name in names:
        counts = count_step(folder, name)
        print(f"{name:16} {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
        total = [a + b for a, b in zip(total, counts)]
    passed, failed, skipped = total
    if passed == 0:
        failed += 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
