"""tiny-coder through a whole cluster on GPUs, against transformers in fp32.

    SLUICE_BUILD_DIR=sluice/bin python3 tests/gpu/tiny_coder.py [--gpus N] [--json FILE]

On one GPU groups of two ranks share it: correct, but no measure of speed (their collectives cross
sockets, and the processes take turns on the GPU).

bf16 arithmetic moves logits, so greedy tokens are compared up to the first step at which
transformers' own two best logits lie closer than the noise allows; the perplexity of the held-out
sample must be within 0.5 %.
"""
import argparse
import array
import json
import math
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cluster"), str(ROOT / "router" / "gateway")]

from harness import Cluster  # noqa: E402

MODEL = ROOT / "deploy" / "models" / "tiny-coder"
GOLDEN = ROOT / "tests" / "golden" / "tiny-coder"
GAP = 0.15          # logits; below it bf16 may choose the other token
PERPLEXITY = 5e-3   # relative
TIMEOUT_S = 120
SHAPES = {1: [("tp1 -> tp1, one GPU", [1], [1]), ("tp2 -> tp2, one GPU", [2], [2])],
          2: [("tp1 -> tp1, a GPU each", [1], [1]), ("tp2 -> tp2 over both", [2], [2])]}


class GpuCluster(Cluster):
    """Places ranks on GPUs: alone in its pool, prefill takes the first and decode the last; several
    ranks of a pool spread over all. With another device all of them are on the host."""

    def __init__(self, gpus, *args, device="cuda", **options):
        super().__init__(*args, **options)
        self.gpus, self.device = gpus, device

    def node_flags(self, place, **changes):
        if self.device != "cuda":
            return super().node_flags(place, device=self.device, **changes)
        alone = sum(self.sizes[place.pool]) == 1
        last = self.gpus - 1 if place.pool == "decode" else 0
        index = last if alone else place.rank % self.gpus
        return super().node_flags(place, device="cuda", device_index=index, **changes)

    def node_environment(self, place):
        """NCCL refuses two ranks on one GPU of one host, but takes them as being on two hosts."""
        shared = self.sizes[place.pool][place.group] > self.gpus
        return super().node_environment(place) | (
            {"NCCL_HOSTID": f"rank-{place.rank}"} if shared else {})


def check_greedy(client):
    """(tokens compared, tokens that differ)."""
    prompts = json.loads((GOLDEN / "greedy.json").read_text())["prompts"]
    streams = [client.generate(p["prompt_ids"], temperature=0.0, ignore_eos=True,
                               max_tokens=len(p["tokens"]), timeout_s=TIMEOUT_S) for p in prompts]
    compared = differ = 0
    for prompt, stream in zip(prompts, streams):
        found = list(stream.result().tokens)
        for i, (expected, gap) in enumerate(zip(prompt["tokens"], prompt["gaps"])):
            if found[i] != expected:
                if gap > GAP:
                    differ += 1
                    print(f"step {i}: {found[i]}, expected {expected}, gap {gap}")
                break
            compared += 1
    return compared, differ


def check_perplexity(client):
    golden = json.loads((GOLDEN / "perplexity.json").read_text())
    tokens = array.array("H")
    tokens.frombytes((GOLDEN / golden["tokens_file"]).read_bytes())
    size = golden["window_tokens"]
    streams = [client.generate(list(tokens[i:i + size]), max_tokens=1, temperature=0.0,
                               prompt_logprobs=0, timeout_s=TIMEOUT_S)
               for i in range(0, len(tokens), size)]
    nll = [-e.logprob for s in streams for e in s.result().prompt_logprobs[1:]]
    return math.exp(math.fsum(nll) / len(nll)), golden["perplexity"]


def stream_rate(client):
    """Tokens a second of one stream."""
    best = 0.0
    for _ in range(3):
        first = None
        for event in client.generate(list(range(5, 69)), max_tokens=400, temperature=0.0,
                                     ignore_eos=True, timeout_s=TIMEOUT_S):
            if first is None and getattr(event, "tokens", None):
                first = time.perf_counter()
        best = max(best, 399 / (time.perf_counter() - first))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    results, failed = [], False
    for name, prefill, decode in SHAPES[args.gpus]:
        with GpuCluster(args.gpus, MODEL, prefill=prefill, decode=decode,
                        decode_pages=512) as cluster:
            compared, differ = check_greedy(cluster.client)
            found, expected = check_perplexity(cluster.client)
            rate = stream_rate(cluster.client)
            cluster.wait_idle()
        bad = differ > 0 or abs(found / expected - 1) > PERPLEXITY
        failed = failed or bad
        results.append({"shape": name, "greedy_tokens_equal": compared,
                        "greedy_tokens_wrong": differ,
                        "perplexity": found, "perplexity_transformers": expected,
                        "one_stream_tok_s": round(rate, 1)})
        print(f"{name:<26} greedy {compared} equal, {differ} wrong; perplexity {found:.4f} "
              f"(transformers {expected:.4f}); one stream {rate:.0f} tok/s; "
              f"{'FAILED' if bad else 'ok'}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
