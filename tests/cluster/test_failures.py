"""Ranks that die, hang or come back, a router that restarts: whoever waits is told, the rest goes
on, and a restarted group takes its old place."""
import re
import signal

import pytest

import build
import goldens
import sluice
from harness import Cluster

LITE = goldens.GOLDEN / "lite"
DEAD_MS = 1000


@pytest.fixture
def cluster(built):
    """Of its own for each test, since each breaks it. Two groups a pool; the decode groups have
    one rank and two, so that a group's other rank is seen to end with it."""
    with Cluster(LITE, prefill=[1, 2], decode=[2, 1], router_flags=flags()) as cluster:
        yield cluster
        cluster.check()
        check_golden(cluster)
        cluster.check()


def flags():
    scale = build.patience()
    return {"dead_ms": DEAD_MS * scale, "lease_ms": DEAD_MS * scale, "stuck_ms": 20000 * scale}


def check_golden(cluster):
    for case in goldens.load(LITE)[:4]:
        result = goldens.start(cluster.client, case, 60 * build.patience()).result()
        assert goldens.compare(case, result)[0] == []


def start_many(cluster, count=8, max_tokens=1500):
    """Long greedy streams over both decode groups, each past its first tokens."""
    streams = [cluster.client.generate([n + 2] * 40, temperature=0.0, max_tokens=max_tokens,
                                       ignore_eos=True, timeout_s=200 * build.patience())
               for n in range(count)]
    for stream in streams:
        next(stream)
        next(stream)
    return streams


def ends(streams, max_tokens=1500):
    """(finished, RequestErrors) of all streams."""
    finished, errors = 0, []
    for stream in streams:
        try:
            assert len(stream.result().tokens) == max_tokens
            finished += 1
        except sluice.RequestError as error:
            errors.append(error)
    return finished, errors


def names(error, pool, group):
    """The router writes decode/0/1, the transfer layer decode 0/1."""
    return re.search(rf"\b{pool}[/ ]{group}\b", error.message)


def gone(cluster, pool, group):
    """Waits until the group is no longer ready for the router."""
    cluster.wait_status(
        lambda s: not any(r.pool == pool and r.group == group and r.state == "ready"
                          for r in s.ranks), f"{pool}/{group} to be given up", 60)


def group_ends(cluster, pool, group):
    """All of the group's processes end by themselves."""
    for program in cluster.group(pool, group):
        assert program.wait(60 * build.patience()) is not None, program.tail()


def restart(cluster, pool, *groups):
    for group in groups:
        cluster.start_group(pool, group)
    cluster.wait_ready()


@pytest.mark.parametrize("rank", [0, 1])
def test_decode_rank_killed_mid_stream(cluster, rank):
    streams = start_many(cluster)
    cluster.signal("decode", 0, rank, signal.SIGKILL)
    finished, errors = ends(streams)
    assert finished > 0 and errors
    for error in errors:
        assert names(error, "decode", 0), error
        assert error.code in ("unreachable", "stale", "timeout"), error
    group_ends(cluster, "decode", 0)
    gone(cluster, "decode", 0)
    check_golden(cluster)  # by the other group alone
    restart(cluster, "decode", 0)


def test_prefill_rank_killed_mid_request(cluster):
    """Long prompts are queued on both prefill groups when one of them dies."""
    streams = [cluster.client.generate([7] * 2000, temperature=0.0, max_tokens=2, ignore_eos=True,
                                       timeout_s=200 * build.patience()) for _ in range(12)]
    cluster.wait_status(lambda s: all(
        any(r.queued_tokens > 0 for r in s.ranks if (r.pool, r.group) == ("prefill", g))
        for g in (0, 1)), "prompts queued on both prefill groups")
    cluster.signal("prefill", 1, 0, signal.SIGKILL)
    finished, errors = ends(streams, 2)
    assert finished > 0
    for error in errors:
        assert names(error, "prefill", 1), error
    group_ends(cluster, "prefill", 1)
    gone(cluster, "prefill", 1)
    check_golden(cluster)
    restart(cluster, "prefill", 1)


@pytest.mark.parametrize("pool, group", [("decode", 0), ("decode", 1), ("prefill", 1)])
def test_stopped_rank_is_detected_by_its_silence(cluster, pool, group):
    streams = start_many(cluster) if pool == "decode" else []
    cluster.signal(pool, group, 0, signal.SIGSTOP)
    gone(cluster, pool, group)
    finished, errors = ends(streams)
    if pool == "decode":
        assert finished > 0 and errors
    for error in errors:
        assert names(error, pool, group), error
    check_golden(cluster)
    # Awake again, it learns that it was given up and ends; its place can then be taken.
    cluster.signal(pool, group, 0, signal.SIGCONT)
    group_ends(cluster, pool, group)
    restart(cluster, pool, group)


def test_group_restarted_before_its_silence_is_noticed(cluster):
    """A new incarnation at once after the old one's death: the old one's requests fail, the new
    one is not taken for an intruder for ever."""
    cluster.signal("decode", 1, 0, signal.SIGKILL)
    cluster.group("decode", 1)[0].wait(60)
    restart(cluster, "decode", 1)


def test_last_group_of_a_pool_dies_and_comes_back(cluster):
    """Requests wait for a pool that has no group, and run once it is back."""
    for group in (0, 1):
        cluster.signal("decode", group, 0, signal.SIGKILL)
        group_ends(cluster, "decode", group)
        gone(cluster, "decode", group)
    case = goldens.load(LITE)[2]
    stream = goldens.start(cluster.client, case, 200 * build.patience())
    cluster.wait_status(lambda s: s.requests_waiting == 1, "a waiting request")
    restart(cluster, "decode", 0, 1)
    assert goldens.compare(case, stream.result())[0] == []


def test_router_restarts(cluster):
    """Its ranks register again with the next router at the same address; open streams are told."""
    streams = start_many(cluster, 4)
    old = cluster.router
    client, node = cluster.client_address, cluster.node_address
    old.may_die = True
    old.signal(signal.SIGKILL)
    for stream in streams:
        with pytest.raises(sluice.ConnectionLost):
            stream.result()
    assert old.wait(30) == -signal.SIGKILL  # only then its ports are free
    cluster.start_router(client_bind=client, node_bind=node)
    cluster.wait_ready()


def test_orderly_goodbye_of_a_group(cluster):
    """SIGTERM to one group amid requests: it exits 0, and nothing is lost without a word."""
    streams = start_many(cluster, 6, 300)
    programs = cluster.group("decode", 0)
    for program in programs:
        program.may_die = True
        program.signal(signal.SIGTERM)
    finished, errors = ends(streams, 300)
    assert finished + len(errors) == 6
    for program in programs:
        assert program.wait(60 * build.patience()) == 0, program.tail()
    gone(cluster, "decode", 0)
    restart(cluster, "decode", 0)
