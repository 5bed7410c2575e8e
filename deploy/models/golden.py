#!/usr/bin/env python3
"""What transformers says about tiny-coder, in fp32 from its bf16 weights, for Sluice's tests.

    python3 golden.py --model tiny-coder --data corpus --out ../../tests/golden/tiny-coder

Writes
  greedy.json           20 code prompts with 64 greedy tokens each. A prompt on which the two best
                        logits of any step come within MIN_GAP, a gate's choice hangs on less than
                        MIN_MARGIN of probability, or <|end|> comes up is passed over, so that
                        another engine's rounding cannot change a token.
  held_out_tokens.u16   20 windows of 1,000 token ids, little-endian uint16, one after another:
                        <|begin|> and the first 999 tokens of a held-out file.
  perplexity.json       what those windows cost.
"""

import argparse
import json
import math
import pathlib

import numpy as np
import torch
import transformers

import corpus
import evaluation

NEW_TOKENS, PROMPTS_WANTED = 64, 20
MIN_GAP, MIN_MARGIN = 2e-3, 2e-6
WINDOWS, WINDOW_TOKENS = 20, 1000
LONG_PROMPTS = (120, 250, 500, 900)  # tokens, from held-out files
LONG_TRIES = 15

PROMPTS = [
    "def fibonacci(n):\n",
    "def is_prime(n):",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\ndef read_config(path):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Node:\n    def __init__(self, value, parent=None):\n",
    "def test_empty_list():\n",
    "from collections import defaultdict\n\n\ndef count_words(text):\n",
    "async def fetch(session, url):\n",
    "class Config(object):\n    \"\"\"",
    "def merge(left, right):\n    result = []\n    while left and right:\n",
    "import numpy as np\n\n\ndef softmax(x, axis=-1):\n",
    "with open(filename, 'rb') as f:\n",
    "try:\n    import simplejson as json\nexcept ImportError:\n",
    "def __eq__(self, other):\n",
    "class TestParser(unittest.TestCase):\n    def setUp(self):\n",
    "parser = argparse.ArgumentParser(description=",
    "@property\ndef name(self):\n",
    "def read_lines(path, encoding=\"utf-8\"):\n    \"\"\"Read a text file",
    "if __name__ == \"__main__\":\n",
    "logger = logging.getLogger(__name__)\n\n\nclass Worker(threading.Thread):\n",
    "def gcd(a, b):\n    while b:\n",
    "class HTTPError(Exception):\n",
    "for key, value in sorted(d.items()):\n",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n",
    "import re\n\nEMAIL = re.compile(",
    "def matrix_multiply(a, b):\n    \"\"\"Multiply two matrices.\"\"\"\n",
    "x",
]


def candidates(tokenizer, data):
    """(kind, text, ids), the long prompts first; of one kind, the first that will do is kept."""
    documents = corpus.read_documents(data / "held_out.jsonl")
    for length in LONG_PROMPTS:
        tries = 0
        for _, text in documents:
            ids = tokenizer.encode(text).ids[:length]
            cut = tokenizer.decode(ids, skip_special_tokens=True)
            if tries < LONG_TRIES and len(ids) == length and tokenizer.encode(cut).ids == ids:
                tries += 1
                yield f"{length} tokens of a held-out file", cut, ids
    for text in PROMPTS:
        yield text, text, tokenizer.encode(text).ids


def route_margin(config, outputs):
    """The least probability by which any gate chose: between the last group kept and the first
    one dropped, and between the last expert kept and the first one dropped within them."""
    least = 1.0
    for logits, _, _ in outputs:
        scores = logits.double().softmax(-1)
        groups = scores.view(len(scores), config.n_group, -1)
        best, order = groups.max(-1).values.sort(-1, descending=True)
        keep = config.topk_group
        least = min(least, float((best[:, keep - 1] - best[:, keep]).min()))
        kept = torch.gather(groups, 1, order[:, :keep, None].expand(-1, -1, groups.shape[-1]))
        ranked = kept.flatten(1).sort(-1, descending=True).values
        k = config.num_experts_per_tok
        if ranked.shape[1] > k:
            least = min(least, float((ranked[:, k - 1] - ranked[:, k]).min()))
    return least


@torch.no_grad()
def greedy(model, tap, ids):
    """64 tokens by the cache, checked against one pass over the whole sequence."""
    cache, tokens, step_input = None, [], torch.tensor([ids])
    for _ in range(NEW_TOKENS):
        out = model(input_ids=step_input, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        step_input = torch.tensor([[tokens[-1]]])
    tap.drain()
    logits = model(input_ids=torch.tensor([ids + tokens[:-1]]), use_cache=False).logits[0]
    margin = route_margin(model.config, tap.drain())
    rows = logits[len(ids) - 1:]
    assert rows.argmax(-1).tolist() == tokens, "cached and uncached passes differ"
    top = rows.topk(2).values
    logprobs = rows.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return {"tokens": tokens, "gaps": [round(g, 6) for g in (top[:, 0] - top[:, 1]).tolist()],
            "logprobs": [round(x, 6) for x in logprobs.tolist()], "route_margin": margin}


def write_greedy(model, tokenizer, data, out):
    tap, found, kinds = evaluation.RouterTap(model), [], set()
    for kind, text, ids in candidates(tokenizer, data):
        if kind in kinds or len(found) == PROMPTS_WANTED:
            continue
        result = greedy(model, tap, ids)
        why = [name for name, bad in (
            ("gap", min(result["gaps"]) < MIN_GAP), ("margin", result["route_margin"] < MIN_MARGIN),
            ("end", corpus.EOS_ID in result["tokens"])) if bad]
        print(f"{len(ids):4d} tokens, gap {min(result['gaps']):.4f}, margin "
              f"{result['route_margin']:.1e} {'passed over: ' + why[0] if why else ''}")
        if not why:
            kinds.add(kind)
            found.append({"text": text, "prompt_ids": ids, **result,
                          "completion": tokenizer.decode(result["tokens"])})
    if len(found) < PROMPTS_WANTED:
        raise SystemExit(f"only {len(found)} prompts without near-ties, "
                         f"expected {PROMPTS_WANTED}: add candidates")
    header = {"transformers": transformers.__version__, "torch": torch.__version__,
              "arithmetic": "fp32 from bf16 weights", "new_tokens": NEW_TOKENS,
              "min_gap": min(min(f["gaps"]) for f in found),
              "min_route_margin": min(f["route_margin"] for f in found)}
    lines = ",\n".join(json.dumps(f) for f in found)
    (out / "greedy.json").write_text(
        json.dumps(header, indent=1)[:-2] + ',\n "prompts": [\n' + lines + "\n ]\n}\n")


@torch.no_grad()
def write_perplexity(model, data, out):
    stream = np.load(data / "held_out.npz")
    windows, end = [], 0
    for length in stream["lengths"]:
        end += length
        if length > WINDOW_TOKENS and len(windows) < WINDOWS:
            windows.append(stream["tokens"][end - length:end - length + WINDOW_TOKENS])
    if len(windows) < WINDOWS:
        raise SystemExit(f"only {len(windows)} held-out files of {WINDOW_TOKENS} tokens, "
                         f"expected {WINDOWS}")
    ids = np.stack(windows).astype("<u2")
    ids.tofile(out / "held_out_tokens.u16")
    sums = []
    for row in torch.from_numpy(ids.astype(np.int64)):
        logprobs = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        sums.append(-float(logprobs.gather(1, row[1:, None]).double().sum()))
    count = WINDOWS * (WINDOW_TOKENS - 1)
    (out / "perplexity.json").write_text(json.dumps({
        "transformers": transformers.__version__, "torch": torch.__version__,
        "arithmetic": "fp32 from bf16 weights",
        "tokens_file": "held_out_tokens.u16", "windows": WINDOWS,
        "window_tokens": WINDOW_TOKENS,
        "method": "Each window is a prompt of its own. Its tokens 1 to 999 are scored, each given "
                  "all tokens before it in the window; token 0 is <|begin|> and not scored. "
                  "nll_sum is minus the sum of the natural log-probabilities of all scored tokens; "
                  "perplexity is exp(nll_sum / scored_tokens).",
        "scored_tokens": count, "window_nll": [round(s, 4) for s in sums],
        "nll_sum": sum(sums), "perplexity": math.exp(sum(sums) / count)}, indent=1) + "\n")
    print(f"perplexity {math.exp(sum(sums) / count):.5f} on {count} tokens")


def main():
    from tokenizers import Tokenizer
    here = pathlib.Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, default=here / "tiny-coder")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="train.py's corpus folder")
    parser.add_argument("--out", type=pathlib.Path, default=here / "../../tests/golden/tiny-coder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    write_greedy(model, tokenizer, args.data, args.out)
    write_perplexity(model, args.data, args.out)


if __name__ == "__main__":
    main()
