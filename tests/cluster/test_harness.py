"""The harness's own checks must be able to fail."""
import signal

import pytest

import build
import goldens
from harness import Cluster
from processes import HarnessError, Program, wait_until

LITE = goldens.GOLDEN / "lite"


def test_a_rank_that_died_is_found(built):
    with Cluster(LITE) as cluster:
        rank = cluster.group("decode", 0)[0]
        rank.signal(signal.SIGKILL)
        rank.wait(30)
        with pytest.raises(HarnessError, match="decode-0-0-0 ended with -9"):
            cluster.check()
        rank.may_die = True


def test_a_request_left_over_is_found(built, monkeypatch):
    """It waits for a decode pool that is not there."""
    monkeypatch.setattr("harness.IDLE_S", 0.3)
    with Cluster(LITE, decode=[]) as cluster:
        with cluster.client.generate([1]):
            with pytest.raises(HarnessError, match="idle cluster(.|\n)*last status"):
                cluster.wait_idle()
        monkeypatch.undo()
        cluster.check()


@pytest.mark.parametrize("line", [
    "==12==ERROR: AddressSanitizer: heap-use-after-free", "WARNING: ThreadSanitizer: data race",
    "a.c:3:4: runtime error: signed integer overflow", "==1==ERROR: LeakSanitizer: detected",
    "assertion failed: x > 0 at a.c:3 in f",
    "[host:1 :0:1] wireup_ep.c:241  Assertion `pending == 0' failed",
])
def test_reports_in_logs_are_found(tmp_path, line):
    program = Program("p", ["sh", "-c", f"echo fine; echo '{line.replace(chr(39), chr(34))}'"],
                      tmp_path / "p.log", build.environment())
    assert program.wait(30) == 0
    assert len(program.reports()) == 1
    program.release()


def test_wait_until_gives_up_and_notices_deaths(tmp_path):
    program = Program("p", ["sh", "-c", "echo last words; exit 3"], tmp_path / "p.log",
                      build.environment())
    program.wait(30)
    with pytest.raises(HarnessError, match="ended with 3 while waiting for rain(.|\n)*last words"):
        wait_until(lambda: False, 30, "rain", [program])
    program.release()
    with pytest.raises(HarnessError, match="waited 0 s for rain"):
        wait_until(lambda: False, 0.1, "rain")
