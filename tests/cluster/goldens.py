"""Reads tests/golden/*/golden.json and compares results with it; formats in tests/golden/README."""
import json
from dataclasses import dataclass
from pathlib import Path

import build

GOLDEN = build.ROOT / "tests" / "golden"
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    name: str
    prompt: list
    tokens: list
    top: list             # a step: [(id, logprob), ...] best first
    prompt_logprobs: list  # or None where the file has none


def load(folder, file="golden.json"):
    data = json.loads((Path(folder) / file).read_text())
    cases = []
    for c in data["cases"]:
        top = [[(i, logit - lse) for i, logit in zip(ids, logits)]
               for ids, logits, lse in zip(c["top_ids"], c["top_logits"], c["logsumexp"])]
        cases.append(Case(c["name"], c["prompt"], c["tokens"], top, c.get("prompt_logprobs")))
    return cases


def options(case):
    """What to ask for so that everything the file holds can be compared."""
    asked = {"temperature": 0.0, "max_tokens": len(case.tokens), "ignore_eos": True,
             "logprobs": len(case.top[0])}
    if case.prompt_logprobs is not None:
        asked["prompt_logprobs"] = 0
    return asked


def start(client, case, timeout_s, **more):
    return client.generate(case.prompt, timeout_s=timeout_s, **(options(case) | more))


def worst_top(expected, found):
    """Largest difference of a step's best logprobs: by place, and by id where both list the id.
    Two ids with nearly equal values may change places at the end of the list."""
    by_place = max(abs(e[1] - f[1]) for e, f in zip(expected, found))
    found_by_id = dict(found)
    by_id = max(abs(p - found_by_id.get(i, p)) for i, p in expected)
    return max(by_place, by_id)


def compare(case, result):
    """Problems as texts, and the largest difference of a logprob."""
    problems = []
    if result.tokens != case.tokens:
        first = next((i for i, (a, b) in enumerate(zip(result.tokens, case.tokens)) if a != b),
                     min(len(result.tokens), len(case.tokens)))
        found, expected = result.tokens[first:first + 4], case.tokens[first:first + 4]
        problems.append(f"{case.name}: tokens differ from output {first} on: {found}, {expected} "
                        "expected")
        return problems, float("inf")
    worst = 0.0
    for step, (expected, entry) in enumerate(zip(case.top, result.logprobs)):
        difference = max(worst_top(expected, entry.top), abs(entry.logprob - expected[0][1]))
        if difference > LOGIT_TOLERANCE:
            problems.append(f"{case.name}: step {step}: logprobs differ by {difference:.2g}: "
                            f"{entry.top[:3]}, {expected[:3]} expected")
        worst = max(worst, difference)
    if case.prompt_logprobs is not None:
        more, difference = compare_prompt(case, result)
        problems += more
        worst = max(worst, difference)
    return problems, worst


def compare_prompt(case, result):
    if len(result.prompt_logprobs) != len(case.prompt):
        return [f"{case.name}: {len(result.prompt_logprobs)} prompt logprobs, "
                f"{len(case.prompt)} expected"], float("inf")
    problems, worst = [], 0.0
    for place, (expected, entry) in enumerate(zip(case.prompt_logprobs, result.prompt_logprobs)):
        if expected is None or entry.logprob is None:
            if expected is not entry.logprob:
                problems.append(f"{case.name}: prompt logprob {place} is {entry.logprob}, "
                                f"{expected} expected")
            continue
        difference = abs(expected - entry.logprob)
        worst = max(worst, difference)
        if difference > LOGIT_TOLERANCE:
            problems.append(f"{case.name}: prompt logprob {place} is {entry.logprob}, {expected} "
                            "expected")
    return problems, worst
