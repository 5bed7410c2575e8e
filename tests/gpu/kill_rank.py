"""Ranks of a group killed and stopped amid streams, on GPUs: the group's other rank must leave its
collectives and exit, clients must be told, the other pool's ranks must live on, and a restarted
group must serve again. A group told to stop amid streams must end in order. And a rank
that does not fit in memory must say so.

    SLUICE_BUILD_DIR=sluice/bin python3 tests/gpu/kill_rank.py [--gpus N] [--tp 1|2]
        [--attention dp|tp] [--device cpu]

Each pool is one group, of as many ranks as there are GPUs unless --tp says otherwise; two ranks may
share a GPU.
"""
import argparse
import os
import re
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cluster"), str(ROOT / "tests" / "gpu"),
                str(ROOT / "router" / "gateway")]

import sluice  # noqa: E402
from harness import Place  # noqa: E402
from tiny_coder import MODEL, TIMEOUT_S, GpuCluster, check_greedy  # noqa: E402

NOTICE_S = 5             # a stopped rank is noticed by then, a killed one sooner
EXIT_S = NOTICE_S + 2    # a rank whose group is gone must have exited
STREAMS, STREAM_TOKENS = 8, 1900
LATE, LATE_TOKENS = 4, 16
LONG = 1000              # tokens of a prompt that takes prefill a while
TOO_MANY_PAGES = 1 << 24  # terabytes; the most that --pages takes
# Each rank counts its pages by the memory it finds free; four of them may start at once on a GPU.
OWN_COUNT = {"pages": 0, "mem_fraction": 0.1}


class Table:
    """Lines of results, printed as they come."""

    def __init__(self):
        self.failed = False

    def row(self, what, figure, good):
        self.failed = self.failed or not good
        print(f"{what:<46} {figure:<40} {'ok' if good else 'FAILED'}", flush=True)


def start_streams(client):
    """Streams that would last, each past the tokens that the prefill rank has sampled."""
    streams = [client.generate([n + 5] * 40, temperature=0.0, max_tokens=STREAM_TOKENS,
                               ignore_eos=True, timeout_s=TIMEOUT_S) for n in range(STREAMS)]
    for stream in streams:
        next(stream)
        next(stream)
    return streams


def ends(streams):
    """(streams that finished, errors of the others)."""
    finished, errors = 0, []
    for stream in streams:
        try:
            stream.result()
            finished += 1
        except sluice.RequestError as error:
            errors.append(error)
    return finished, errors


def names_group(errors):
    """Whether each error names a rank of the decode group: the router writes decode/0/1, the
    transfer engine decode 0/1."""
    wrong = [e for e in errors if not re.search(r"\bdecode[/ ]0/\d", e.message)]
    for error in wrong:
        print(f"names no rank of the group: {error}")
    return not wrong


def wait_exits(programs, since_s):
    """(seconds until all had ended or the bound was passed, exit codes)."""
    for program in programs:
        program.wait(since_s + EXIT_S - time.monotonic())
    return time.monotonic() - since_s, [p.exit_code for p in programs]


def lose_rank(cluster, rank, number, table):
    """A killed rank is noticed by its connection, a stopped one by its silence."""
    client, prefill = cluster.client, cluster.group("prefill", 0)
    lost = Place("decode", 0, rank)
    others = [p for place, p in cluster.nodes.items() if place.pool == "decode" and place != lost]
    streams = start_streams(client)
    cluster.signal(*lost, number)
    since_s = time.monotonic()
    late = [client.generate([n + 9] * 100, temperature=0.0, max_tokens=LATE_TOKENS,
                            ignore_eos=True, timeout_s=TIMEOUT_S) for n in range(LATE)]
    name = f"decode/0/{rank} {'killed' if number == signal.SIGKILL else 'stopped'}"
    if others:
        took_s, codes = wait_exits(others, since_s)
        # A negative code is a signal: it has been aborted and has not left by itself.
        table.row(f"{name}: the other rank exits", f"after {took_s:.2f} s, exit code {codes[0]}",
                  all(code is not None and code > 0 for code in codes))
    finished, errors = ends(streams)
    told_s = time.monotonic() - since_s
    table.row(f"{name}: clients are told", f"{len(errors)} of {STREAMS} failed, within "
              f"{told_s:.2f} s", len(errors) == STREAMS and names_group(errors))
    print(f"    {errors[0] if errors else 'no error'}")
    restart(cluster, "decode", table, name)
    finished, errors = ends(late)
    table.row(f"{name}: later requests", f"{finished} ran, {len(errors)} failed",
              names_group(errors))
    table.row(f"{name}: prefill lives on", f"exit codes {[p.exit_code for p in prefill]}",
              all(p.exit_code is None for p in prefill))


def start_long(client):
    """Prompts that keep prefill at work."""
    return [client.generate([n + 9] * LONG, temperature=0.0, max_tokens=LATE_TOKENS,
                            ignore_eos=True, timeout_s=TIMEOUT_S) for n in range(4 * STREAMS)]


def lose_prefill(cluster, rank, table):
    """The first of many prompts has been computed, the others are being computed or wait."""
    lost = Place("prefill", 0, rank)
    decode = cluster.group("decode", 0)
    others = [p for place, p in cluster.nodes.items() if place.pool == "prefill" and place != lost]
    streams = start_long(cluster.client)
    next(streams[0])
    cluster.signal(*lost, signal.SIGKILL)
    since_s = time.monotonic()
    name = f"prefill/0/{rank} killed"
    if others:
        took_s, codes = wait_exits(others, since_s)
        table.row(f"{name}: the other rank exits", f"after {took_s:.2f} s, exit code {codes[0]}",
                  all(code is not None and code > 0 for code in codes))
    finished, errors = ends(streams)
    table.row(f"{name}: clients are told", f"{finished} ran, {len(errors)} failed, within "
              f"{time.monotonic() - since_s:.2f} s", all("prefill" in e.message for e in errors))
    restart(cluster, "prefill", table, name)
    table.row(f"{name}: decode lives on", f"exit codes {[p.exit_code for p in decode]}",
              all(p.exit_code is None for p in decode))


def stop_group(cluster, pool, table):
    """SIGTERM to the ranks of a group amid streams: any of them may go first."""
    group, client = cluster.group(pool, 0), cluster.client
    streams = start_streams(client)
    waiting = start_long(client)
    since_s = time.monotonic()
    for program in group:
        program.signal(signal.SIGTERM)
    took_s, codes = wait_exits(group, since_s)
    name = f"{pool}/0 told to stop"
    table.row(f"{name}: its ranks exit", f"after {took_s:.2f} s, exit codes {codes}",
              all(code == 0 for code in codes))
    for stream in streams + waiting:  # decode may go on with them
        stream.cancel()
    restart(cluster, pool, table, name)


def restart(cluster, pool, table, name):
    for program in cluster.group(pool, 0):
        program.kill()
    since_s = time.monotonic()
    cluster.start_group(pool, 0)
    cluster.wait_ready()
    ready_s = time.monotonic() - since_s
    compared, differ = check_greedy(cluster.client)
    table.row(f"{name}: restarted in {ready_s:.1f} s, serves",
              f"greedy {compared} equal, {differ} wrong", compared > 0 and differ == 0)


def check_pages(cluster, table):
    """With TP attention the ranks of a group use equally many, whatever each has counted."""
    status = cluster.wait_idle()
    for pool in ("prefill", "decode"):
        pages = [r.pages_total for r in status.ranks if r.pool == pool]
        shared = cluster.flags[pool]["attention"] == "tp"
        table.row(f"pages of the {pool} ranks", ", ".join(map(str, pages)),
                  min(pages) > 0 and (not shared or len(set(pages)) == 1))


def check_too_large(cluster, table):
    """A rank of a group of its own with more pages than any GPU holds."""
    flags = cluster.node_flags(Place("decode", 0, 0), group=1, rank=0, tp=1, attention="dp",
                               pages=TOO_MANY_PAGES)
    program = cluster.start_program("too-large", "decode", flags)
    try:
        code = program.wait(TIMEOUT_S)
        lines = [line for line in program.log().splitlines() if "cannot start" in line]
        table.row("a rank that does not fit exits", f"exit code {code}",
                  code == 1 and len(lines) == 1 and "latent pages" in lines[0] and
                  "--pages of at most" in lines[0])
        print(f"    {lines[-1] if lines else program.tail()}")
    finally:
        program.kill()
        program.release()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tp", type=int, choices=(1, 2))
    parser.add_argument("--attention", choices=("dp", "tp"), default="dp")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    tp, table = args.tp or min(args.gpus, 2), Table()
    with GpuCluster(args.gpus, MODEL, device=args.device, prefill=[tp], decode=[tp],
                    attention=args.attention, prefill_flags=OWN_COUNT,
                    decode_flags=OWN_COUNT) as cluster:
        check_pages(cluster, table)
        compared, differ = check_greedy(cluster.client)
        table.row(f"tp {tp}, attention {args.attention}: serves",
                  f"greedy {compared} equal, {differ} wrong", compared > 0 and differ == 0)
        for rank in reversed(range(tp)):
            lose_rank(cluster, rank, signal.SIGKILL, table)
        lose_rank(cluster, tp - 1, signal.SIGSTOP, table)
        for rank in range(tp):
            lose_prefill(cluster, rank, table)
        stop_group(cluster, "decode", table)
        stop_group(cluster, "prefill", table)
        check_too_large(cluster, table)
        cluster.wait_idle()
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
