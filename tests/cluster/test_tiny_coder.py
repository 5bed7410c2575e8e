"""The small trained model through tp2 -> tp2: completions and perplexity equal transformers'."""
import array
import json
import math
import sys

import pytest

import build
import goldens
from sluice import detokenize

MODEL = build.ROOT / "deploy" / "models" / "tiny-coder"
GOLDEN = goldens.GOLDEN / "tiny-coder"
PERPLEXITY_TOLERANCE = 1e-3  # of transformers' figure
LOGPROB_TOLERANCE = 1e-4
WINDOW_TOLERANCE = 1e-4      # of a window's sum: no window may be wrong and hide in the mean


@pytest.fixture
def cluster(start_cluster):
    return start_cluster(MODEL, prefill=[2], decode=[2], token_budget=2048, prefill_pages=256,
                         push_layers=None)


def greedy_cases():
    return json.loads((GOLDEN / "greedy.json").read_text())["prompts"]


def test_completions_equal_transformers(cluster):
    """All at once; text to ids, ids to text and the tokens between are compared."""
    tokenizer = detokenize.load(MODEL)
    cases = greedy_cases()
    assert len(cases) == 20
    streams = []
    for case in cases:
        assert tokenizer.encode(case["text"]).ids == case["prompt_ids"]
        streams.append(cluster.client.generate(
            case["prompt_ids"], temperature=0.0, max_tokens=len(case["tokens"]), logprobs=2,
            timeout_s=60 * build.patience()))
    wrong, worst = [], 0.0
    for case, stream in zip(cases, streams):
        text = detokenize.Detokenizer(tokenizer)
        pieces = [text.push(event.tokens) for event in stream]
        result = stream.result()
        if result.tokens != case["tokens"]:
            place = next(i for i, (a, b) in enumerate(zip(result.tokens, case["tokens"])) if a != b)
            wrong.append(f"{case['text']!r:.60}: from token {place} on "
                         f"{result.tokens[place:place + 3]}, {case['tokens'][place:place + 3]} "
                         f"expected; best two {result.logprobs[place].top}")
        else:
            worst = max(worst, *(abs(entry.logprob - expected) for entry, expected in
                                 zip(result.logprobs, case["logprobs"])))
        assert "".join(pieces) + text.finish() == tokenizer.decode(result.tokens)
    print(f"largest difference of a token's logprob: {worst:.2g}")
    assert wrong == []
    assert worst < LOGPROB_TOLERANCE


def read_windows(golden):
    tokens = array.array("H", (GOLDEN / golden["tokens_file"]).read_bytes())
    if sys.byteorder == "big":
        tokens.byteswap()
    count, size = golden["windows"], golden["window_tokens"]
    assert len(tokens) == count * size
    return [list(tokens[n * size:(n + 1) * size]) for n in range(count)]


def test_perplexity_equals_transformers(cluster):
    golden = json.loads((GOLDEN / "perplexity.json").read_text())
    streams = [cluster.client.generate(window, temperature=0.0, max_tokens=1, prompt_logprobs=0,
                                       timeout_s=120 * build.patience())
               for window in read_windows(golden)]
    losses = []
    for stream in streams:
        entries = stream.result().prompt_logprobs
        assert entries[0].logprob is None
        losses.append(-sum(entry.logprob for entry in entries[1:]))
    for n, (found, expected) in enumerate(zip(losses, golden["window_nll"])):
        assert abs(found / expected - 1) < WINDOW_TOLERANCE, f"window {n}: {found}, {expected}"
    perplexity = math.exp(sum(losses) / golden["scored_tokens"])
    print(f"perplexity {perplexity:.6f}, {golden['perplexity']:.6f} by transformers")
    assert abs(perplexity / golden["perplexity"] - 1) < PERPLEXITY_TOLERANCE
