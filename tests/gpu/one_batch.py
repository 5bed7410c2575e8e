"""bench_one_batch over a list of configurations in one go: a table, the ratios between runs that
differ in one thing only, and one JSON file.

    SLUICE_BUILD_DIR=sluice/bin python3 tests/gpu/one_batch.py --plan lite,coder15 \\
        [--commit HASH] [--json FILE] [-- "FLAGS OF A CONFIGURATION" ...]

A configuration is a line of bench_one_batch's flags; --model may be a name under
tests/bench/configs. A plan is one of those below or a file with a configuration a line. The JSON is
written anew after each configuration, so that what was measured stays if the rest is cut off.
"""
import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cluster")]

import build  # noqa: E402

CONFIGS = ROOT / "tests" / "bench" / "configs"

LITE = "--model deepseek-v2-lite --device cuda"
# 15 of 60 layers on two GPUs: the work of each GPU when the whole model runs on eight.
CODER = "--model deepseek-coder-v2 --num-hidden-layers 15 --device cuda --tp 2"
PREFILL = "--phase prefill --batch-size 128 --input-len 512 --output-len 1"
DECODE = "--phase decode --batch-size 1,16,64,256 --input-len 1024 --output-len 32"
LARGEST = "--phase decode --batch-size 0 --max-batch 8192 --input-len 1,1024 --output-len 512"
PLANS = {
    "lite": [
        f"{LITE} {PREFILL}",
        f"{LITE} {PREFILL} --mla-prefill absorbed",
        f"{LITE} {DECODE} --max-rows 32k",
    ],
    "coder15": [
        f"{CODER} --attention dp {PREFILL} --max-rows 32k",
        f"{CODER} --attention dp {PREFILL} --max-rows 32k --mla-prefill absorbed",
        f"{CODER} --attention tp {PREFILL} --max-rows 64k",
        f"{CODER} --attention dp {DECODE} --max-rows 16k",
        f"{CODER} --attention tp {DECODE} --max-rows 16k",
    ],
    "coder15-largest": [
        f"{CODER} --attention dp {LARGEST} --max-rows 8k",
        f"{CODER} --attention tp {LARGEST} --max-rows 8k",
    ],
}


def program():
    """In a bundle beside the other programs, in a build folder under tests/."""
    places = [build.build_dir() / name for name in ("bench_one_batch", "tests/bench_one_batch")]
    for place in places:
        if place.exists():
            return place
    sys.exit(f"no bench_one_batch in {build.build_dir()}: set SLUICE_BUILD_DIR, and build the "
             "benches")


def output_of(*command):
    """What a command prints; "" where there is no such command or it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def hardware():
    found = {"date": datetime.date.today().isoformat()}
    query = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version",
                      "--format=csv,noheader").strip()
    if not query:
        model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        return found | {"cpu": model.group(1) if model else "unknown"}
    lines = query.splitlines()
    gpu, driver = lines[0].rsplit(", ", 1)
    found |= {"gpu": gpu, "gpus": len(lines), "driver": driver}
    cuda = re.search(r"CUDA Version: ([\d.]+)", output_of("nvidia-smi"))
    link = re.search(r"\bNV\d+\b", output_of("nvidia-smi", "topo", "-m"))
    return found | ({"cuda": cuda.group(1)} if cuda else {}) | \
        ({"link": f"NVLink {link.group()}"} if link else {})


def read_plans(names):
    lines = []
    for name in filter(None, names.split(",")):
        text = PLANS[name] if name in PLANS else Path(name).read_text().splitlines()
        lines += [line for line in text if line.strip() and not line.lstrip().startswith("#")]
    return lines


def flags_of(line):
    flags = shlex.split(line)
    for i, flag in enumerate(flags[:-1]):
        if flag == "--model" and (CONFIGS / flags[i + 1]).is_dir():
            flags[i + 1] = str(CONFIGS / flags[i + 1])
    return flags


def run(line):
    """The results of a configuration's cases, and whether all went well."""
    print(f"\n# {line}", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        code = subprocess.run([program(), *flags_of(line), "--result-filename", file.name],
                              env=build.environment()).returncode
        results = [json.loads(row) for row in file.read().splitlines()]
    for result in results:
        result["flags"] = line
    return results, code == 0


def shape(result):
    """All that two runs must have in common to be compared, but attention and prefill mode."""
    batch = "largest" if result["batch_limited_by"] else result["batch_size"]
    return (result["model"], result["device"], result["layers"], result["tp"], batch,
            result["input_len"], result["output_len"])


def rates(result):
    found = {"prefill": result["prefill_throughput"], "decode": result["median_decode_throughput"]}
    return {phase: rate for phase, rate in found.items() if rate > 0}


def ratios(results):
    """Throughput unabsorbed / absorbed and dp / tp of runs that are alike otherwise. The prefill
    mode is none of decode's: its cache is filled without absorption."""
    found = []
    for a in results:
        for b in results:
            if shape(a) != shape(b):
                continue
            for phase in rates(a).keys() & rates(b).keys():
                modes = (a["mla_prefill"], b["mla_prefill"])
                what = None
                if a["attention"] == b["attention"] and phase == "prefill" and \
                        modes == ("unabsorbed", "absorbed"):
                    what = "unabsorbed / absorbed"
                elif (a["attention"], b["attention"]) == ("dp", "tp") and \
                        (phase == "decode" or modes[0] == modes[1]):
                    what = "dp / tp"
                if what:
                    found.append({
                        "what": what, "phase": phase, "model": a["model"], "layers": a["layers"],
                        "tp": a["tp"], "attention": [a["attention"], b["attention"]],
                        "mla_prefill": list(modes),
                        "batch_size": [a["batch_size"], b["batch_size"]],
                        "input_len": a["input_len"], "output_len": a["output_len"],
                        "ratio": round(rates(a)[phase] / rates(b)[phase], 4)})
    return found


def print_tables(results, compared):
    print(f"\n{'model':<20} {'tp':>2} {'att':<4} {'prefill':<11} {'batch':>6} {'in':>6} {'out':>5} "
          f"{'prefill tok/s':>14} {'TFLOPS':>8} {'%':>6} {'decode ms':>10} {'tok/s':>11} "
          f"{'GB/s':>7} {'%':>6}")
    for r in results:
        step_s = r["median_decode_latency"]
        rate = r["decode_gbytes_a_device"] / step_s if step_s > 0 else 0
        print(f"{r['model'] + ' x' + str(r['layers']):<20} {r['tp']:>2} {r['attention']:<4} "
              f"{r['mla_prefill']:<11} {r['batch_size']:>6} {r['input_len']:>6} "
              f"{r['output_len']:>5} {r['prefill_throughput']:>14.1f} "
              f"{r['prefill_tflops_a_device']:>8.1f} {r['prefill_percent_of_product']:>6.1f} "
              f"{1e3 * step_s:>10.3f} {r['median_decode_throughput']:>11.1f} {rate:>7.0f} "
              f"{r['decode_percent_of_memory']:>6.1f}")
    for c in compared:
        batch = " : ".join(map(str, dict.fromkeys(c["batch_size"])))
        print(f"{c['what']:<22} {c['phase']:<8} {c['model']} x{c['layers']}, tp {c['tp']}, "
              f"{'/'.join(dict.fromkeys(c['attention']))}, batch {batch}, "
              f"{c['input_len']}/{c['output_len']}: {c['ratio']:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plan", default="", help=f"{', '.join(PLANS)} or files, a list")
    parser.add_argument("--commit", default="unknown", help="what the programs were built from")
    parser.add_argument("--json", type=Path)
    parser.add_argument("configurations", nargs="*", help="flags of bench_one_batch, in quotes")
    args = parser.parse_args()
    lines = read_plans(args.plan) + args.configurations
    if not lines:
        parser.error("no configuration: give --plan, or flags in quotes after --")
    results, failed, machine = [], [], hardware()
    for line in lines:
        found, good = run(line)
        results += found
        failed += [] if good else [line]
        if args.json:
            args.json.write_text(json.dumps({
                "bench": "bench_one_batch", "hardware": machine, "commit": args.commit,
                "runs": results, "ratios": ratios(results), "failed": failed}, indent=1) + "\n")
    print_tables(results, ratios(results))
    for line in failed:
        print(f"FAILED: {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
