"""A router that stands still for a while (stopped, swapped out, a frozen virtual machine) and goes
on: its own pause is held against nobody."""
import signal
import time

import build
import goldens
import sluice
from harness import Cluster

LITE = goldens.GOLDEN / "lite"
PAUSE_S = 2


def pause_router(cluster, seconds=PAUSE_S):
    """Holds the router stopped; fails at once when a rank ends meanwhile."""
    cluster.router.signal(signal.SIGSTOP)
    try:
        until_s = time.monotonic() + seconds
        cluster.wait(lambda: time.monotonic() >= until_s, "the end of the router's pause")
    finally:
        cluster.router.signal(signal.SIGCONT)


def check_golden(cluster):
    for case in goldens.load(LITE)[:4]:
        result = goldens.start(cluster.client, case, 60 * build.patience()).result()
        assert goldens.compare(case, result)[0] == []


def test_pause_while_idle(built):
    with Cluster(LITE, prefill=[2], decode=[1, 1]) as cluster:
        pause_router(cluster)
        cluster.wait_ready()  # by heartbeats that came after the pause
        check_golden(cluster)
        assert "the router itself paused" in cluster.router.log()
        cluster.check()


def test_pause_while_tokens_stream(built):
    """Within the lease nothing is lost: what the ranks send meanwhile waits, in order."""
    tokens = 600
    with Cluster(LITE, prefill=[1], decode=[1, 1]) as cluster:
        streams = [cluster.client.generate([n + 2] * 40, temperature=0.0, max_tokens=tokens,
                                           ignore_eos=True, timeout_s=100 * build.patience())
                   for n in range(4)]
        for stream in streams:
            next(stream)
            next(stream)
        pause_router(cluster)
        for stream in streams:
            assert len(stream.result().tokens) == tokens
        check_golden(cluster)
        cluster.check()


def test_pause_beyond_the_lease_under_load(built):
    """The ranks give up waiting for the router and register again: requests that were under way may
    end with an error, but no rank does, and nothing of them is left behind."""
    lease_ms = 500 * build.patience()
    with Cluster(LITE, prefill=[1], decode=[1, 1], router_flags={"lease_ms": lease_ms}) as cluster:
        streams = [cluster.client.generate([n + 2] * 40, temperature=0.0, max_tokens=1500,
                                           ignore_eos=True, timeout_s=200 * build.patience())
                   for n in range(12)]
        for stream in streams:
            next(stream)
        pause_router(cluster, 2 * lease_ms / 1000 + 1)
        errors = []
        for stream in streams:
            try:
                assert len(stream.result().tokens) == 1500
            except sluice.RequestError as error:
                errors.append(error)
        assert errors, "the pause was too short to be noticed"
        assert all(error.code == "unreachable" for error in errors), errors
        assert "registers again" in cluster.router.log()
        cluster.wait_ready()
        check_golden(cluster)
        cluster.check()
