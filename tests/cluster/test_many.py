"""A thousand requests of mixed lengths at concurrency 64, some canceled: each finished one equals
its own single run, every page comes back, and a second thousand costs no memory."""
import asyncio
import random

import pytest

import build
import goldens
import sluice

MODEL = goldens.GOLDEN / "v2"
REQUESTS, CONCURRENCY, DISTINCT = 1000, 64, 60
# Tokens are compared only where the runner-up is this far behind: sums in another order may
# change a logit in its last digits, and with it the choice between two equals.
CLEAR = 1e-3


def make_request(rng):
    length = rng.choice((1, 2, 7, 30, 63, 64, 65, 128, 200, 320))
    options = {"temperature": 0.0, "max_tokens": rng.choice((1, 2, 5, 16, 40)),
               "ignore_eos": True, "logprobs": 2}
    return [rng.randrange(256) for _ in range(length)], options


def is_clear(result):
    return all(e.top[0][1] - e.top[1][1] > CLEAR for e in result.logprobs)


@pytest.fixture
def cluster(start_cluster):
    """Small pools: requests wait for pages and for room in the batch all the time."""
    return start_cluster(MODEL, prefill=[2], decode=[1, 1], prefill_pages=48, decode_pages=60,
                         token_budget=256, decode_flags={"max_batch": 16})


def single_runs(cluster):
    """Distinct requests with their results, each run alone."""
    rng, runs = random.Random(11), []
    while len(runs) < DISTINCT:
        prompt, options = make_request(rng)
        stream = cluster.client.generate(prompt, timeout_s=60 * build.patience(), **options)
        result = stream.result()
        if is_clear(result):
            runs.append((prompt, options, result.tokens))
    return runs


async def one(client, run, cancel_after, gate):
    """"finished" or "canceled"; raises where a token differs."""
    prompt, options, expected = run
    async with gate:
        stream = await client.generate(prompt, timeout_s=300 * build.patience(), **options)
        if cancel_after == 0:
            await stream.cancel()
        got = []
        try:
            async for event in stream:
                got += event.tokens
                if len(got) >= cancel_after > 0:
                    cancel_after = -1
                    await stream.cancel()
        except sluice.RequestError as error:
            assert error.code == "canceled", error
            assert got == expected[:len(got)]
            return "canceled"
        assert got == expected
        return "finished"


async def thousand(address, runs, seed):
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)
    async with sluice.AsyncClient(address) as client:
        jobs = [one(client, rng.choice(runs), rng.choice((-1, -1, -1, -1, -1, -1, 0, 1, 3)), gate)
                for _ in range(REQUESTS)]
        outcomes = await asyncio.gather(*jobs)
        violations = [e for e in client.unattributed if isinstance(e, sluice.ProtocolError)]
    assert violations == []
    return outcomes.count("finished"), outcomes.count("canceled")


def memory(cluster):
    return {p.name: p.memory_bytes() for p in cluster.programs()}


@pytest.mark.timeout(1200)
def test_two_thousand_requests(cluster):
    runs = single_runs(cluster)
    before = cluster.wait_idle()
    finished, canceled = asyncio.run(thousand(cluster.client_address, runs, 1))
    assert finished + canceled == REQUESTS
    assert canceled > 50 and finished > 600
    after = cluster.wait_idle()
    assert after.requests_finished - before.requests_finished == finished
    assert after.requests_canceled - before.requests_canceled == canceled
    assert after.requests_failed == before.requests_failed

    settled = memory(cluster)
    finished, canceled = asyncio.run(thousand(cluster.client_address, runs, 2))
    assert finished + canceled == REQUESTS
    cluster.wait_idle()
    for name, now in memory(cluster).items():
        allowed = max(4 << 20, settled[name] // 20)
        assert now - settled[name] < allowed, \
            f"{name} grew from {settled[name]} to {now} bytes in the second thousand"


def test_large_and_small_do_not_block_each_other(cluster):
    """While a request that needs most of a pool waits or runs, small ones finish; and it does not
    wait for ever while small ones keep coming."""
    client, timeout_s = cluster.client, 120 * build.patience()
    large = [client.generate([3] * 2000, temperature=0.0, max_tokens=1000, ignore_eos=True,
                             timeout_s=timeout_s) for _ in range(3)]
    small = [client.generate([n], temperature=0.0, max_tokens=8, ignore_eos=True,
                             timeout_s=timeout_s) for n in range(60)]
    assert all(len(s.result().tokens) == 8 for s in small)
    assert all(len(s.result().tokens) == 1000 for s in large)
