"""One stream through a whole cluster: where the time of a token goes.

    SLUICE_BUILD_DIR=build/release python tests/bench/stream.py [--model DIR] [--json FILE]

Starts a router, a prefill group and a decode group on this machine, streams completions one after
another, and sets the time of a token beside the time the decode rank spent in its forward pass and
in its whole step, and beside the same decode loop in one process without any service around it
(build/.../tests/bench_decode, built by `ninja benches`).
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cluster"), str(ROOT / "router" / "gateway")]

import build  # noqa: E402
from harness import Cluster  # noqa: E402

STOPPED = re.compile(r"after (\d+) steps: ([\d.]+) s issuing forward passes, ([\d.]+) s in steps")


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit():
    return subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], check=True,
                          capture_output=True, text=True).stdout.strip()


def one_process_us(args):
    program = build.build_dir() / "tests" / "bench_decode"
    out = subprocess.run([program, args.model, str(args.input_len), str(args.output_len)],
                         check=True, capture_output=True, text=True).stdout
    return float(out.split()[1])


def stream(cluster, args):
    """TTFT and mean time of a further token, in seconds."""
    started = time.perf_counter()
    first = None
    count = 0
    prompt = [5 + i % 200 for i in range(args.input_len)]
    for event in cluster.client.generate(prompt, max_tokens=args.output_len, temperature=0,
                                         ignore_eos=True):
        tokens = getattr(event, "tokens", None) or []
        if tokens and first is None:
            first = time.perf_counter()
        count += len(tokens)
    return first - started, (time.perf_counter() - first) / (count - 1)


def decode_steps_us(folder):
    """Mean forward pass and mean step of decode rank 0, by its own account."""
    for log in sorted(folder.glob("decode-0-0-*.log")):
        match = STOPPED.search(log.read_text())
        if match:
            steps = int(match[1])
            return 1e6 * float(match[2]) / steps, 1e6 * float(match[3]) / steps
    raise SystemExit("the decode rank logged no figures")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "deploy" / "models" / "tiny-coder"))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with Cluster(args.model, prefill=[args.tp], decode=[args.tp]) as cluster:
        stream(cluster, args)  # warm
        runs = [stream(cluster, args) for _ in range(args.repeat)]
        cluster.wait_idle()
        cluster.stop()
        forward_us, step_us = decode_steps_us(cluster.folder)
    token_us = 1e6 * statistics.median(tpot for _, tpot in runs)
    floor_us = one_process_us(args)
    result = {
        "bench": "stream", "model": Path(args.model).name, "tp": args.tp,
        "input_len": args.input_len, "output_len": args.output_len,
        "processor": processor(), "cores": os.cpu_count(), "commit": commit(),
        "build": build.build_dir().name,
        "ttft_ms": round(1e3 * statistics.median(ttft for ttft, _ in runs), 2),
        "output_throughput": round(1e6 / token_us, 1),
        "token_us": round(token_us), "decode_step_us": round(step_us),
        "decode_forward_us": round(forward_us), "service_us": round(token_us - step_us),
        "one_process_us": round(floor_us), "token_over_one_process": round(token_us / floor_us, 3),
    }
    for key, value in result.items():
        print(f"{key:<24} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
