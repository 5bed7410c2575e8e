"""`sluice bench` against a cluster of DeepSeek-V2-Lite's shape with made-up weights: prefill on the
first GPU, decode on the last.

    SLUICE_BUILD_DIR=sluice/bin python3 tests/gpu/serve_lite.py --gpus 2 [-- BENCH FLAGS]
"""
import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cluster"), str(ROOT / "tests" / "gpu"),
                str(ROOT / "router" / "gateway")]

from tiny_coder import GpuCluster  # noqa: E402

MODEL = ROOT / "tests" / "bench" / "configs" / "deepseek-v2-lite"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("bench", nargs="*", help="flags for sluice bench")
    args = parser.parse_args()
    dummy = {"load_format": "dummy"}
    with GpuCluster(args.gpus, MODEL, prefill=[1], decode=[1], token_budget=32768,
                    prefill_pages=4096, decode_pages=16384, prefill_flags=dummy,
                    decode_flags=dummy | {"max_batch": 256}) as cluster:
        code = subprocess.run([sys.executable, "-m", "sluice", "bench", "--router",
                               cluster.client_address, *args.bench],
                              cwd=ROOT / "router" / "gateway").returncode
        cluster.wait_idle()
    sys.exit(code)


if __name__ == "__main__":
    main()
