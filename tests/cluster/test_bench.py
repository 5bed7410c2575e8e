"""`sluice bench`: its load, its figures and its output, against the fake router; once for real."""
import argparse
import asyncio
import itertools
import json
import math
import random
import signal
import subprocess
import sys
import threading

import pytest

import build
import fake_router
import goldens
from sluice import AsyncClient, aio, bench, cli

MAX_MODEL_LEN = fake_router.INFO["max_model_len"]
SGLANG_KEYS = [
    "backend", "dataset_name", "request_rate", "max_concurrency", "random_input_len",
    "random_output_len", "random_range_ratio", "duration", "completed", "total_input_tokens",
    "total_output_tokens", "total_output_tokens_retokenized", "request_throughput",
    "input_throughput", "output_throughput", "concurrency", "accept_length",
] + [f"{key}_{name}_ms" for key in ("mean", "median", "std", "p99")
     for name in ("e2e_latency", "ttft", "tpot", "itl")]
TABLE = """\
============ Serving Benchmark Result ============
Backend:                                 sluice
Traffic request rate:                    2.5
Max request concurrency:                 not set
Successful requests:                     2
Failed requests:                         1
Benchmark duration (s):                  4.00
Total input tokens:                      30
Total generated tokens:                  8
Total generated tokens (retokenized):    8
Request throughput (req/s):              0.50
Input token throughput (tok/s):          7.50
Output token throughput (tok/s):         2.00
Total token throughput (tok/s):          9.50
Concurrency:                             1.00
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   2000.00
Median E2E Latency (ms):                 2000.00
P90 E2E Latency (ms):                    2800.00
P99 E2E Latency (ms):                    2980.00
---------------Time to First Token----------------
Mean TTFT (ms):                          750.00
Median TTFT (ms):                        750.00
P90 TTFT (ms):                           950.00
P99 TTFT (ms):                           995.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          375.00
Median TPOT (ms):                        375.00
P90 TPOT (ms):                           475.00
P99 TPOT (ms):                           497.50
---------------Inter-Token Latency----------------
Mean ITL (ms):                           416.67
Median ITL (ms):                         350.00
P90 ITL (ms):                            650.00
P95 ITL (ms):                            725.00
P99 ITL (ms):                            785.00
Max ITL (ms):                            800.00
=================================================="""


def answer(router, peer, message):
    """As many tokens as were asked for, one an event."""
    if message["type"] == "generate":
        for i in range(message["max_tokens"]):
            last = i == message["max_tokens"] - 1
            router.tokens(peer, message["id"], i, i, [i % 256], "length" if last else "")


def command(router, *flags):
    """The exit code; warm-up only where it is asked for."""
    argv = ["bench", "--router", router.address, "--warmup-requests", 0, "--random-input-len", 12,
            "--random-output-len", 6, "--num-prompts", 10, *flags]
    return cli.main([str(a) for a in argv])


async def run_prompts(router, count, *, output_len=2, max_concurrency=None, offsets=None):
    """(runner, outcomes) of prompts of four tokens."""
    prompts = [bench.Prompt([1, 2, 3, 4], output_len)] * count
    async with AsyncClient(router.address) as client:
        runner = bench.Runner(client, max_concurrency)
        return runner, await runner.run(prompts, offsets or [0.0] * count)


def known_outcomes():
    """Two requests whose figures can be worked out by hand, and a failed one."""
    return [bench.Outcome(10, 3, 100.0, [100.5, 101.0], [1, 2], ""),
            bench.Outcome(20, 5, 100.0, [101.0, 101.3, 101.8, 102.2, 103.0], [1] * 5, ""),
            bench.Outcome(40, 5, 100.0, [101.0], [1], "overloaded: no room")]


def known_result():
    args = argparse.Namespace(request_rate=2.5, max_concurrency=None, num_prompts=3, seed=1,
                              random_input_len=40, random_output_len=5, random_range_ratio=0.0,
                              warmup_requests=0)
    info = argparse.Namespace(model="known")
    return bench.settings(args, info) | bench.summarize(known_outcomes(), 4.0)


# ---- load ----

def test_prompts_follow_the_ratio_and_the_seed():
    def make(ratio, seed=3):
        return bench.make_prompts(300, 40, 10, ratio, 256, random.Random(seed))
    for ratio, low_in, low_out in ((1, 40, 10), (0.5, 20, 5), (0, 1, 1)):
        prompts = make(ratio)
        inputs = {len(p.tokens) for p in prompts}
        outputs = {p.output_len for p in prompts}
        assert (min(inputs), max(inputs)) == (low_in, 40)
        assert (min(outputs), max(outputs)) == (low_out, 10)
    ids = [t for p in make(1) for t in p.tokens]
    assert (min(ids), max(ids)) == (0, 255)
    assert make(0.5) == make(0.5) != make(0.5, seed=4)


def test_arrivals_are_a_seeded_poisson_process():
    offsets = bench.arrival_offsets(20001, 50.0, random.Random(7))
    assert offsets == bench.arrival_offsets(20001, 50.0, random.Random(7))
    assert offsets[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)  # as exponential gaps have it
    assert bench.arrival_offsets(3, math.inf, random.Random(7)) == [0.0] * 3


@pytest.mark.asyncio
async def test_nothing_is_sent_before_it_is_due():
    offsets = bench.arrival_offsets(20, 100.0, random.Random(5))
    with fake_router.FakeRouter(answer) as router:
        runner, outcomes = await run_prompts(router, 20, offsets=offsets)
    late = [o.sent_s - runner.start_s - due for o, due in zip(outcomes, offsets)]
    assert all(0 <= seconds < 5 * build.patience() for seconds in late)
    assert runner.duration_s >= offsets[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize("limit, peak", [(4, 4), (1, 1), (None, 12)])
async def test_concurrency_is_reached_and_never_exceeded(limit, peak):
    """The router answers nobody before as many wait as may."""
    waiting, left = [], [12]

    def script(router, peer, message):
        waiting.append((peer, message))
        if len(waiting) == min(peak, left[0]):
            answer(router, *waiting.pop(0))
            left[0] -= 1
            while len(waiting) == left[0] > 0:
                answer(router, *waiting.pop(0))
                left[0] -= 1
    with fake_router.FakeRouter(script) as router:
        _, outcomes = await run_prompts(router, 12, max_concurrency=limit)
    assert not any(o.error for o in outcomes)
    # An end before a start at the same instant: that is how the place becomes free.
    changes = sorted([(o.sent_s, 1) for o in outcomes] + [(o.times_s[-1], -1) for o in outcomes])
    assert max(itertools.accumulate(step for _, step in changes)) == peak


@pytest.mark.asyncio
async def test_bursts_longer_than_one_reading():
    count = 3 * aio.DRAIN_FRAMES
    with fake_router.FakeRouter(answer) as router:
        _, (outcome,) = await run_prompts(router, 1, output_len=count)
    assert outcome.error == "" and outcome.counts == [1] * count
    assert outcome.times_s == sorted(outcome.times_s)


def test_what_is_sent(capsys):
    with fake_router.FakeRouter(answer) as router:
        assert command(router, "--warmup-requests", 2, "--random-range-ratio", 1) == 0
        sent = [m for m in router.received if m["type"] == "generate"]
    assert len(sent) == 12
    assert all(len(m["tokens"]) == 12 and m["max_tokens"] == 6 and m["ignore_eos"] is True
               and m["temperature"] == 0 for m in sent)
    assert len({tuple(m["tokens"]) for m in sent}) == 12  # the warm-up leaves nothing to reuse


# ---- figures ----

def test_percentiles():
    assert [bench.percentile([1, 2, 3, 4], p) for p in (0, 50, 90, 100)] == [1, 2.5, 3.7, 4]
    assert bench.percentile(list(range(101)), 99) == 99
    assert bench.percentile([8.0], 90) == 8.0


def test_figures_of_known_requests():
    outcomes = known_outcomes()
    assert outcomes[0].itl_s == [0.25, 0.25]  # two tokens came at once
    assert outcomes[1].tpot_s == pytest.approx(0.5)
    result = known_result()
    assert result["std_ttft_ms"] == pytest.approx(250)
    assert result["concurrency"] == pytest.approx((1 + 3) / 4)
    assert set(SGLANG_KEYS) <= set(result)
    assert bench.throughput_over_time(outcomes[:2], 100.0, 4.0, slices=4) == (
        [0.5, 1.5, 2.5, 3.5], [1, 5, 1, 1])


def test_table_of_known_requests():
    table = bench.format_table(known_result())
    assert [line.rstrip() for line in table.splitlines()] == TABLE.splitlines()
    assert all(len(line) >= bench.WIDTH for line in table.splitlines())


def test_nothing_to_measure_is_no_number():
    """Outputs of one token have no TPOT and no ITL."""
    single = [bench.Outcome(1, 1, 1.0, [2.0], [1], "")]
    result = known_result() | bench.summarize(single, 1.0)
    assert result["mean_ttft_ms"] == 1000 and result["mean_tpot_ms"] is None
    lines = [line.split() for line in bench.format_table(result).splitlines()]
    assert ["Mean", "TPOT", "(ms):", "-"] in lines and ["Max", "ITL", "(ms):", "-"] in lines
    json.dumps(result, allow_nan=False)


def test_result_lines_are_appended(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    with fake_router.FakeRouter(answer) as router:
        assert command(router, "--output-file", file, "--max-concurrency", 3) == 0
        assert command(router, "--output-file", file, "--output-details", "--request-rate",
                       1000) == 0
    short, long = (json.loads(line) for line in file.read_text().splitlines())
    assert set(SGLANG_KEYS) <= set(short) and set(short) < set(long)
    assert (short["request_rate"], short["max_concurrency"]) == ("inf", 3)
    assert (long["request_rate"], long["max_concurrency"]) == (1000, None)
    for result in (short, long):
        assert (result["backend"], result["completed"], result["failed"]) == ("sluice", 10, 0)
        assert result["model"] == "fake" and result["duration"] > 0
        assert result["total_throughput"] == pytest.approx(
            result["input_throughput"] + result["output_throughput"])
    # The seed gives both runs the same prompts; details and sums agree.
    assert short["total_input_tokens"] == sum(long["input_lens"])
    assert short["total_output_tokens"] == sum(long["output_lens"])
    assert [len(itl) + 1 for itl in long["itls"]] == long["output_lens"]
    assert long["errors"] == [""] * 10 and min(long["ttfts"]) > 0
    assert capsys.readouterr().out.count(" Serving Benchmark Result ") == 2


# ---- failures ----

def test_failed_requests_are_counted_and_shown(tmp_path, capsys):
    """Every second one is refused, one ends early; the figures are those of the others."""
    numbers, file = itertools.count(), tmp_path / "results.jsonl"

    def script(router, peer, message):
        number = next(numbers)
        if number % 2:
            router.send(peer, "failed", id=message["id"], seq=0, code="overloaded",
                        message="no room")
        elif number == 4:
            router.tokens(peer, message["id"], 0, 0, [7], "stop")
        else:
            answer(router, peer, message)
    with fake_router.FakeRouter(script) as router:
        assert command(router, "--random-range-ratio", 1, "--output-file", file) == 1
    out, err = capsys.readouterr()
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (4, 6)
    assert result["total_output_tokens"] == 4 * 6
    assert "Failed requests:                         6" in out
    assert "5 of 10 requests failed: overloaded: no room" in err
    assert "1 of 10 requests failed: 1 of 6 tokens, then stop" in err


def test_failed_warm_up_measures_nothing(capsys):
    def script(router, peer, message):
        router.send(peer, "failed", id=message["id"], seq=0, code="invalid", message="not that")
    with fake_router.FakeRouter(script) as router:
        assert command(router, "--warmup-requests", 1) == 1
    out, err = capsys.readouterr()
    assert out == "" and "warm-up request failed: invalid: not that" in err


@pytest.mark.asyncio
async def test_lost_connection_ends_the_run():
    """Running, waiting and future requests all end, though no router ever comes back."""
    seen = threading.Semaphore(0)
    router = fake_router.FakeRouter(lambda *_: seen.release())
    offsets = [0.0] * 4 + [3600.0]
    run = asyncio.create_task(run_prompts(router, 5, max_concurrency=2, offsets=offsets))
    for _ in range(2):
        await asyncio.to_thread(seen.acquire)
    await asyncio.to_thread(router.close)
    _, outcomes = await run
    assert len(outcomes) == 5 and all("was lost" in o.error for o in outcomes)
    assert bench.summarize(outcomes, 1.0)["failed"] == 5


def test_interrupt_cancels_what_runs():
    started, canceled = threading.Semaphore(0), threading.Semaphore(0)

    def script(router, peer, message):
        {"generate": started, "cancel": canceled}[message["type"]].release()
    with fake_router.FakeRouter(script) as router:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice", "bench", "--router", router.address,
             "--max-concurrency", "3", "--warmup-requests", "0", "--random-input-len", "4",
             "--random-output-len", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3):
            assert started.acquire(timeout=30 * build.patience())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30 * build.patience())
        assert (process.returncode, out, err) == (130, b"", b"")
        for _ in range(3):
            assert canceled.acquire(timeout=30 * build.patience())


@pytest.mark.parametrize("flags, words", [
    (["--random-input-len", 1001], "prompts of 1000 tokens at most"),
    (["--random-input-len", 1000, "--random-output-len", 25], f"max_model_len is {MAX_MODEL_LEN}"),
    (["--output-file", "/nowhere/results.jsonl"], "/nowhere/results.jsonl: No such file"),
    (["--plot", "/nowhere/plot.png"], "--plot"),
])
def test_wrong_values(flags, words, capsys):
    with fake_router.FakeRouter(answer) as router:
        assert command(router, *flags) == 2
        assert not any(m["type"] == "generate" for m in router.received)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flags", [
    ["--request-rate", "0"], ["--request-rate", "nan"], ["--random-range-ratio", "1.1"],
    ["--num-prompts", "0"], ["--max-concurrency", "0"], ["--random-output-len", "x"],
    ["--num-prompt", "5"]])
def test_wrong_flags(flags, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *flags])
    assert end.value.code == 2 and flags[0] in capsys.readouterr().err


def test_no_rank_yet(monkeypatch, capsys):
    monkeypatch.setitem(fake_router.INFO, "vocab_size", 0)
    with fake_router.FakeRouter(answer) as router:
        assert command(router) == 1
    assert "no rank has registered" in capsys.readouterr().err


# ---- plot ----

def test_plot_without_matplotlib(monkeypatch, tmp_path, capsys):
    """Said before the run, not after it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with fake_router.FakeRouter(answer) as router:
        assert command(router, "--plot", tmp_path / "plot.png") == 2
        assert not router.received
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    with fake_router.FakeRouter(answer) as router:
        assert command(router, "--plot", plot) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


# ---- a real cluster ----

def test_real_cluster(start_cluster, tmp_path, capsys):
    cluster = start_cluster(goldens.GOLDEN / "lite", prefill=[1], decode=[1])
    file = tmp_path / "results.jsonl"
    code = cli.main(["bench", "--router", cluster.client_address, "--num-prompts", "12",
                     "--random-input-len", "24", "--random-output-len", "10",
                     "--random-range-ratio", "0.5", "--request-rate", "100", "--max-concurrency",
                     "4", "--output-file", str(file), "--output-details"])
    out, err = capsys.readouterr()
    assert code == 0, err
    result = json.loads(file.read_text())
    assert result["completed"] == 12 and result["concurrency"] <= 4.0
    assert all(5 <= n <= 10 for n in result["output_lens"])
    assert 0 < result["mean_ttft_ms"] < result["mean_e2e_latency_ms"]
    assert result["median_itl_ms"] <= result["p99_itl_ms"] <= result["max_itl_ms"]
    assert "Successful requests:                     12" in out
