"""Ranks of a group killed and stopped amid streams, on GPUs: the group's other rank must leave its
collectives and exit, clients must be told, the other pool's ranks must live on, and a restarted
group must serve again. A group told to stop amid streams, or one rank of it, must end in order. And
a rank that does not fit in memory must say so.

    SLUICE_BUILD_DIR=sluice/bin python3 tests/gpu/kill_rank.py [--gpus N] [--tp 1|2]
        [--attention dp|tp] [--device cpu] [--json FILE]

Each pool is one group, of as many ranks as there are GPUs unless --tp says otherwise; two ranks may
share a GPU. A rank that is hung in its driver after a failure is ended by its alarm, which the rows
tell; one that was told to stop must not need it.
"""
import argparse
import json
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

NOTICE_S = 5    # a stopped rank is noticed by then, a killed one sooner
FAILED_S = 4.5  # a rank must have exited so long after its group was lost, at worst by its alarm
ORDERLY_S = 7   # and so long after it was told to stop
STREAMS, STREAM_TOKENS = 8, 1900
LATE, LATE_TOKENS = 4, 16
LONG = 1000              # tokens of a prompt that takes prefill a while
STEP_TOKENS = 1024       # of a prefill step, which a rank that is told to stop finishes
TOO_MANY_PAGES = 1 << 24  # terabytes; the most that --pages takes
# Each rank counts its pages by the memory it finds free; four of them may start at once on a GPU.
OWN_COUNT = {"pages": 0, "mem_fraction": 0.1}


class Table:
    """Lines of results, printed as they come."""

    def __init__(self):
        self.rows = []

    def row(self, what, figure, good):
        self.rows.append({"what": what, "figure": figure, "ok": bool(good)})
        print(f"{what:<50} {figure:<40} {'ok' if good else 'FAILED'}", flush=True)

    @property
    def failed(self):
        return not all(row["ok"] for row in self.rows)


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


def names_group(errors, pool):
    """Whether each error names a rank of the pool's group: the router writes decode/0/1, the
    transfer engine decode 0/1."""
    wrong = [e for e in errors if not re.search(rf"\b{pool}[/ ]0/\d", e.message)]
    for error in wrong:
        print(f"names no rank of {pool}/0: {error}")
    return not wrong


def wait_exits(programs, since_s, bound_s):
    """(exit codes, whether an alarm ended one of them, the figure of a row). A program that still
    ran when the bound was passed has no code."""
    for program in programs:
        program.wait(since_s + bound_s - time.monotonic())
    took_s, codes = time.monotonic() - since_s, [p.exit_code for p in programs]
    by_alarm = any(p.ended_by_alarm() for p in programs)
    for program in programs:
        if program.exit_code is None or program.exit_code < 0:
            print(program.tail())
    return codes, by_alarm, (f"after {took_s:.2f} s, exit code {', '.join(map(str, codes))}"
                             f"{', by the alarm' if by_alarm else ''}")


def check_others(cluster, lost, since_s, bound_s, name, table):
    """The other ranks of a group that has lost one."""
    others = [p for place, p in cluster.nodes.items() if place[:2] == lost[:2] and place != lost]
    if others:
        codes, _, figure = wait_exits(others, since_s, bound_s)
        # A negative code is a signal: it has been aborted and has not left by itself.
        table.row(f"{name}: the other rank exits", figure,
                  all(code is not None and code > 0 for code in codes))


def check_told(streams, since_s, name, table):
    """Streams that the decode group was running."""
    finished, errors = ends(streams)
    table.row(f"{name}: clients are told", f"{len(errors)} of {STREAMS} failed, within "
              f"{time.monotonic() - since_s:.2f} s",
              finished == 0 and names_group(errors, "decode"))
    print(f"    {errors[0] if errors else 'no error'}")


def lose_rank(cluster, rank, number, table):
    """A killed rank is noticed by its connection, a stopped one by its silence."""
    client, prefill = cluster.client, cluster.group("prefill", 0)
    lost, killed = Place("decode", 0, rank), number == signal.SIGKILL
    name = f"decode/0/{rank} {'killed' if killed else 'stopped'}"
    streams = start_streams(client)
    cluster.signal(*lost, number)
    since_s = time.monotonic()
    late = [client.generate([n + 9] * 100, temperature=0.0, max_tokens=LATE_TOKENS,
                            ignore_eos=True, timeout_s=TIMEOUT_S) for n in range(LATE)]
    check_others(cluster, lost, since_s, FAILED_S + (0 if killed else NOTICE_S), name, table)
    check_told(streams, since_s, name, table)
    restart(cluster, "decode", table, name)
    finished, errors = ends(late)
    table.row(f"{name}: later requests", f"{finished} ran, {len(errors)} failed",
              names_group(errors, "decode"))
    table.row(f"{name}: prefill lives on", f"exit codes {[p.exit_code for p in prefill]}",
              all(p.exit_code is None for p in prefill))


def start_long(client):
    """Prompts that keep prefill at work: the first has been computed, the others are being
    computed or wait."""
    streams = [client.generate([n + 9] * LONG, temperature=0.0, max_tokens=LATE_TOKENS,
                               ignore_eos=True, timeout_s=TIMEOUT_S) for n in range(2 * STREAMS)]
    next(streams[0])
    return streams


def lose_prefill(cluster, rank, table):
    lost, decode = Place("prefill", 0, rank), cluster.group("decode", 0)
    name = f"prefill/0/{rank} killed"
    streams = start_long(cluster.client)
    cluster.signal(*lost, signal.SIGKILL)
    since_s = time.monotonic()
    check_others(cluster, lost, since_s, FAILED_S, name, table)
    finished, errors = ends(streams)
    table.row(f"{name}: clients are told", f"{finished} ran, {len(errors)} failed, within "
              f"{time.monotonic() - since_s:.2f} s",
              len(errors) > 0 and names_group(errors, "prefill"))
    restart(cluster, "prefill", table, name)
    table.row(f"{name}: decode lives on", f"exit codes {[p.exit_code for p in decode]}",
              all(p.exit_code is None for p in decode))


def check_cut_off(waiting, name, table):
    """Canceled prompts. One that prefill was at work with has been told of the group by then, and
    so shows that the group was at work when it was told to stop."""
    told = [e for e in ends(waiting)[1] if e.code != "canceled"]
    table.row(f"{name}: prompts under way are told", f"{len(told)} of {len(waiting)} failed",
              len(told) > 0 and names_group(told, "prefill"))


def stop_group(cluster, pool, table):
    """SIGTERM to the ranks of a group amid streams: any of them may go first."""
    group, client, name = cluster.group(pool, 0), cluster.client, f"{pool}/0 told to stop"
    streams = start_streams(client)
    waiting = start_long(client)
    since_s = time.monotonic()
    for program in group:
        program.signal(signal.SIGTERM)
    codes, by_alarm, figure = wait_exits(group, since_s, ORDERLY_S)
    table.row(f"{name}: its ranks exit", figure,
              all(code == 0 for code in codes) and not by_alarm)
    if pool == "decode":
        check_told(streams, since_s, name, table)
    for stream in streams + waiting:  # decode may go on with them
        stream.cancel()
    if pool == "prefill":
        check_cut_off(waiting, name, table)
    restart(cluster, pool, table, name)


def stop_rank(cluster, rank, table):
    """SIGTERM to one rank of the decode group: both leave."""
    told, name = cluster.nodes[Place("decode", 0, rank)], f"decode/0/{rank} told to stop"
    group = cluster.group("decode", 0)
    streams = start_streams(cluster.client)
    told.signal(signal.SIGTERM)
    since_s = time.monotonic()
    codes, by_alarm, figure = wait_exits(group, since_s, ORDERLY_S)
    table.row(f"{name}: both ranks exit", figure,
              all(code == 0 for code in codes) and not by_alarm)
    check_told(streams, since_s, name, table)
    restart(cluster, "decode", table, name)


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


def check_failures(cluster, tp, table):
    for rank in reversed(range(tp)):
        lose_rank(cluster, rank, signal.SIGKILL, table)
    lose_rank(cluster, tp - 1, signal.SIGSTOP, table)
    for rank in range(tp):
        lose_prefill(cluster, rank, table)
    for rank in range(tp) if tp > 1 else ():
        stop_rank(cluster, rank, table)
    stop_group(cluster, "decode", table)
    stop_group(cluster, "prefill", table)
    check_too_large(cluster, table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tp", type=int, choices=(1, 2))
    parser.add_argument("--attention", choices=("dp", "tp"), default="dp")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    tp, table = args.tp or min(args.gpus, 2), Table()
    with GpuCluster(args.gpus, MODEL, device=args.device, prefill=[tp], decode=[tp],
                    attention=args.attention, token_budget=STEP_TOKENS, prefill_flags=OWN_COUNT,
                    decode_flags=OWN_COUNT) as cluster:
        check_pages(cluster, table)
        compared, differ = check_greedy(cluster.client)
        table.row(f"tp {tp}, attention {args.attention}: serves",
                  f"greedy {compared} equal, {differ} wrong", compared > 0 and differ == 0)
        check_failures(cluster, tp, table)
        cluster.wait_idle()
    if args.json:
        report = {"gpus": args.gpus, "tp": tp, "attention": args.attention,
                  "device": args.device, "rows": table.rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
