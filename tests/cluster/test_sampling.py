"""Sampling through the whole cluster: what each parameter promises."""
import math

import pytest

import build
import goldens
import sluice

LITE = goldens.GOLDEN / "lite"
PROMPT = goldens.load(LITE)[1].prompt
EOS = 1


@pytest.fixture
def client(start_cluster):
    return start_cluster(LITE, prefill=[1], decode=[2]).client


def run(client, prompt=None, **options):
    options = {"max_tokens": 24, "ignore_eos": True} | options
    return client.generate(prompt or PROMPT, timeout_s=60 * build.patience(), **options).result()


@pytest.fixture
def greedy(client):
    return run(client, temperature=0.0).tokens


def test_same_seed_same_tokens(client):
    first, again = (run(client, temperature=1.0, seed=7).tokens for _ in range(2))
    assert first == again


def test_same_seed_same_tokens_in_a_crowd(client):
    """Randomness depends on seed and position alone, not on what shares the batch."""
    alone = run(client, temperature=1.0, seed=7).tokens
    streams = [client.generate(PROMPT, temperature=1.0, seed=7 if n % 2 else n, max_tokens=24,
                               ignore_eos=True) for n in range(16)]
    crowd = [stream.result().tokens for stream in streams]
    assert all(tokens == alone for tokens in crowd[1::2])


def test_other_seeds_give_other_tokens(client):
    assert len({tuple(run(client, temperature=1.0, seed=n).tokens) for n in range(8)}) > 6


def test_without_seed_every_run_differs(client):
    assert len({tuple(run(client, temperature=1.5).tokens) for _ in range(5)}) > 3


@pytest.mark.parametrize("options", [
    {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0}, {"temperature": 0.0, "seed": 3},
    {"temperature": 1e-4, "seed": 3},
])
def test_ways_to_be_greedy(client, greedy, options):
    assert run(client, **options).tokens == greedy


def test_top_k_keeps_to_the_best(client):
    result = run(client, temperature=2.0, top_k=3, seed=5, logprobs=3)
    for token, entry in zip(result.tokens, result.logprobs):
        assert token in [i for i, _ in entry.top]


def test_top_p_and_min_p_keep_to_the_likely(client):
    result = run(client, temperature=1.0, top_p=0.5, seed=5, logprobs=20)
    for token, entry in zip(result.tokens, result.logprobs):
        before = 0.0
        for token_id, logprob in entry.top:
            if token_id == token:
                break
            before += math.exp(logprob)
        assert before < 0.5 + 1e-5
    result = run(client, temperature=1.0, min_p=0.2, seed=5, logprobs=1)
    for entry in result.logprobs:
        assert entry.logprob >= entry.top[0][1] + math.log(0.2) - 1e-5


def test_high_temperature_spreads(client):
    cold = {t for n in range(10) for t in run(client, temperature=0.3, seed=n).tokens}
    hot = {t for n in range(10) for t in run(client, temperature=3.0, seed=n).tokens}
    assert len(hot) > len(cold)


def test_first_token_follows_the_distribution(client):
    """400 seeds: the frequency of the likeliest first token is its probability, within five
    standard errors."""
    top = run(client, temperature=0.0, max_tokens=1, logprobs=1).logprobs[0].top[0]
    streams = [client.generate(PROMPT, temperature=1.0, seed=n, max_tokens=1, ignore_eos=True)
               for n in range(400)]
    hits = sum(s.result().tokens[0] == top[0] for s in streams)
    p = math.exp(top[1])
    assert abs(hits / 400 - p) < 5 * math.sqrt(p * (1 - p) / 400) + 1e-3


def test_max_tokens(client, greedy):
    for count in (1, 2, 23):
        result = run(client, temperature=0.0, max_tokens=count)
        assert result.tokens == greedy[:count]
        assert result.finish_reason == "length"


def test_default_max_tokens_is_16(client):
    result = client.generate(PROMPT, temperature=0.0, ignore_eos=True).result()
    assert len(result.tokens) == 16


def first_at(tokens, least):
    """A place from `least` on whose token has not come before."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("least", [0, 1, 5])
def test_stop_token_ends_the_request(client, greedy, least):
    """The stop token itself is the last one given. Place 0 is the prefill rank's own token."""
    place = first_at(greedy, least)
    result = run(client, temperature=0.0, stop_token_ids=[greedy[place]])
    assert result.tokens == greedy[:place + 1]
    assert result.finish_reason == "stop"


def test_min_tokens_masks_stop_tokens(client, greedy):
    place = first_at(greedy, 3)
    stop = greedy[place]
    result = run(client, temperature=0.0, stop_token_ids=[stop], min_tokens=place + 4)
    assert result.tokens[:place] == greedy[:place]
    assert stop not in result.tokens[:place + 4]
    assert len(result.tokens) >= place + 4


def eos_prompt(client):
    """A prompt after which the model's greedy output has its EOS within 24 tokens."""
    for n in range(300):
        prompt = [(n * 37 + i * i * 11 + 5) % 256 for i in range(12)]
        tokens = run(client, prompt, temperature=0.0).tokens
        if EOS in tokens[1:]:
            return prompt, tokens
    pytest.fail("no prompt whose output holds EOS")


def test_eos_ends_the_request_unless_ignored(client):
    prompt, tokens = eos_prompt(client)
    place = tokens.index(EOS)
    result = run(client, prompt, temperature=0.0, ignore_eos=False)
    assert result.tokens == tokens[:place + 1]
    assert result.finish_reason == "stop"
    assert len(tokens) == 24  # ignored, it was an ordinary token
    masked = run(client, prompt, temperature=0.0, ignore_eos=False, min_tokens=place + 2)
    assert EOS not in masked.tokens[:place + 2]


def test_logprobs_are_a_distribution(client):
    result = run(client, temperature=1.0, seed=3, logprobs=20, prompt_logprobs=20)
    assert len(result.logprobs) == len(result.tokens)
    assert len(result.prompt_logprobs) == len(PROMPT)
    assert result.prompt_logprobs[0].logprob is None
    chosen = list(zip(result.tokens, result.logprobs)) \
        + list(zip(PROMPT[1:], result.prompt_logprobs[1:]))
    for token, entry in chosen:
        values = [p for _, p in entry.top]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        assert len({i for i, _ in entry.top}) == 20
        assert 0 < sum(math.exp(p) for p in values) < 1 + 1e-5
        listed = dict(entry.top).get(token)
        assert listed is None and entry.logprob <= values[-1] + 1e-5 \
            or listed is not None and abs(listed - entry.logprob) < 1e-6


def test_logprobs_do_not_depend_on_temperature(client):
    cold = run(client, temperature=0.0, max_tokens=1, logprobs=5).logprobs[0]
    hot = run(client, temperature=2.0, top_k=2, max_tokens=1, seed=1, logprobs=5).logprobs[0]
    for (a, p), (b, q) in zip(cold.top, hot.top):
        assert a == b and abs(p - q) < 1e-5


def test_logprobs_zero_gives_the_chosen_token_s_alone(client):
    result = run(client, temperature=0.0, logprobs=0, max_tokens=3)
    assert [entry.top for entry in result.logprobs] == [(), (), ()]
    assert all(entry.logprob < 0 for entry in result.logprobs)


def test_prompt_logprobs_come_before_the_first_token(client):
    stream = client.generate(PROMPT, temperature=0.0, max_tokens=2, prompt_logprobs=1,
                             ignore_eos=True)
    kinds = [type(event) for event in stream]
    assert kinds == sorted(kinds, key=lambda k: k is not sluice.PromptLogprobsEvent)
    assert kinds[0] is sluice.PromptLogprobsEvent
