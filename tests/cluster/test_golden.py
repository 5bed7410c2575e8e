"""Through the whole cluster, tokens and logits equal Hugging Face transformers', for every family,
pool layout, attention mode, prefill mode, and with prompts in one piece or in chunks.

Each family runs with every combination of them. Decode schedules asynchronously in half of them:
those with unabsorbed prefill, which is no matter of the decode pool's.
"""
import itertools
import json
import shutil

import pytest

import build
import goldens

# The groups of each pool, by size. The last one has two groups in each pool, of unequal sizes.
LAYOUTS = {
    "1to1": ([1], [1]), "2to1": ([2], [1]), "1to2": ([1], [2]), "2to2": ([2], [2]),
    "4to2": ([4], [2]), "two_groups": ([2, 1], [1, 2]),
}
CHUNKED, WHOLE = 64, 2048
PLAIN = (WHOLE, "dp", "unabsorbed")
EVERY = list(itertools.product((WHOLE, CHUNKED), ("dp", "tp"), ("unabsorbed", "absorbed")))


def combinations():
    for model, layout, mode in itertools.product(("lite", "v2", "v3"), LAYOUTS, EVERY):
        yield model, layout, mode
    for mode in (PLAIN, (CHUNKED, "tp", "absorbed")):
        yield "odd", "2to2", mode


def case_id(combination):
    model, layout, (budget, attention, mla) = combination
    return f"{model}-{layout}-{'chunked' if budget == CHUNKED else 'whole'}-{attention}-{mla}"


def run_cases(cluster, cases):
    """All at once, so that prompts of all lengths share forward passes and batches."""
    timeout_s = 60 * build.patience()
    streams = [goldens.start(cluster.client, case, timeout_s) for case in cases]
    problems, worst = [], 0.0
    for case, stream in zip(cases, streams):
        more, difference = goldens.compare(case, stream.result())
        problems += more
        worst = max(worst, difference)
    print(f"largest difference of a logprob: {worst:.2g}")
    assert problems == []


def start(start_cluster, model, layout, mode, folder=None):
    prefill, decode = LAYOUTS[layout]
    budget, attention, mla = mode
    return start_cluster(folder or goldens.GOLDEN / model, prefill=prefill, decode=decode,
                         attention=attention, mla_prefill=mla, token_budget=budget,
                         async_scheduling="on" if mla == "unabsorbed" else "off")


@pytest.mark.parametrize("combination", list(combinations()), ids=case_id)
def test_golden(start_cluster, combination):
    model, layout, mode = combination
    cluster = start(start_cluster, model, layout, mode)
    run_cases(cluster, goldens.load(goldens.GOLDEN / model))
    if layout == "two_groups":
        check_both_groups_worked(cluster)


def check_both_groups_worked(cluster):
    """Every group of each pool has produced tokens or computed prompts."""
    status = cluster.wait_idle()
    for pool in ("prefill", "decode"):
        steps = {}
        for rank in status.ranks:
            if rank.pool == pool:
                steps[rank.group] = max(steps.get(rank.group, 0), rank.progress)
        assert len(steps) == 2 and all(steps.values()), f"{pool}: steps by group {steps}"


@pytest.mark.parametrize("case", goldens.load(goldens.GOLDEN / "lite"), ids=lambda c: c.name)
def test_one_request_alone_on_idle_ranks(start_cluster, case):
    """With one request in the whole cluster all other ranks join every step as idle."""
    cluster = start(start_cluster, "lite", "4to2", PLAIN)
    run_cases(cluster, [case])


def test_golden_with_other_rope_mscale(start_cluster, tmp_path):
    """cos and sin are scaled only when the config's two mscales differ."""
    source = goldens.GOLDEN / "lite"
    shutil.copy(source / "model.safetensors", tmp_path)
    config = json.loads((source / "config.json").read_text())
    overrides = json.loads((source / "golden-mscale.json").read_text())["config_overrides"]
    (tmp_path / "config.json").write_text(json.dumps(config | overrides))
    cluster = start(start_cluster, "lite", "1to1", PLAIN, folder=tmp_path)
    run_cases(cluster, goldens.load(source, "golden-mscale.json"))


@pytest.mark.tsan
def test_many_at_once_for_the_thread_sanitizer(start_cluster):
    """Two ranks a pool, all cases, a cancel and a failed request: every thread has met the others.
    """
    cluster = start(start_cluster, "v2", "2to2", PLAIN)
    canceled = cluster.client.generate([5] * 100, max_tokens=400, ignore_eos=True)
    next(canceled)
    canceled.cancel()
    run_cases(cluster, goldens.load(goldens.GOLDEN / "v2"))
