"""The `sluice` command: `generate` streams a completion, `status` shows the cluster, `bench`
measures it.

Exit codes: 0 done; 1 the request or the connection failed; 2 wrong usage; 130 interrupted.
"""
import argparse
import dataclasses
import difflib
import json
import os
import sys
import threading
import time

from . import bench, detokenize, table
from .client import Client
from .errors import RequestError, SluiceError
from .protocol import SamplingParams

READY_LOOK_S = 0.05
DEFAULT_ROUTER = "tcp://127.0.0.1:5550"


class UsageError(Exception):
    """Wrong input on the command line, found after parsing."""


class Parser(argparse.ArgumentParser):
    """Flags are written out, and an unknown one is answered with the nearest known one."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        known = self._option_string_actions
        commands = self._subparsers is not None
        for arg in [] if commands else args or []:
            flag = arg.split("=")[0]
            if flag.startswith("--") and flag not in known:
                near = difflib.get_close_matches(flag, known, n=1, cutoff=0.4)
                hint = f", did you mean {near[0]}?" if near else ""
                self.error(f"unknown flag {flag}{hint}")
        return super().parse_known_args(args, namespace)


def id_list(text):
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60}: token ids expected, such as 1,2,3") from None


def add_generate_flags(parser):
    group = parser.add_argument_group("prompt (one of)")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt as text")
    source.add_argument("--token-ids", type=id_list, metavar="IDS", help="the prompt as token ids")
    source.add_argument("--file", metavar="PATH", help="the prompt is this file's text; - is stdin")
    parser.add_argument("--tokenizer", metavar="PATH",
                        help="tokenizer.json or its folder (default: the served checkpoint's)")
    add_sampling_flags(parser.add_argument_group("sampling (defaults are the router's)"))
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after this long")
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object at the end instead of streaming")


def add_sampling_flags(group):
    group.add_argument("--max-tokens", type=int, metavar="N", help="output tokens at most")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no stop before this many")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    group.add_argument("--top-p", type=float, metavar="P", help="1 is off")
    group.add_argument("--min-p", type=float, metavar="P", help="0 is off")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens")
    group.add_argument("--stop-token-ids", type=id_list, metavar="IDS",
                       help="end after one of these")
    group.add_argument("--ignore-eos", action="store_true", default=None,
                       help="the model's end tokens do not end the request")
    group.add_argument("--logprobs", type=int, metavar="K",
                       help="each token's log probability and those of the K best")
    group.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt")


def make_parser():
    parser = Parser(prog="sluice", description="Talk to a Sluice cluster.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    generate = commands.add_parser("generate", help="complete a prompt, streaming")
    status = commands.add_parser("status", help="show pools, groups, ranks, pages and queues")
    load = commands.add_parser("bench", help="measure latency and throughput under random load")
    for command in (generate, status, load):
        command.add_argument("--router", metavar="ADDRESS",
                             default=os.environ.get("SLUICE_ROUTER", DEFAULT_ROUTER),
                             help="the router's client socket (default: $SLUICE_ROUTER or "
                                  "%(default)s)")
        command.add_argument("--connect-timeout", type=float, default=10.0, metavar="S",
                             help="seconds to wait for the router (default: %(default)s)")
    add_generate_flags(generate)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument("--watch", nargs="?", type=float, const=1.0, metavar="S",
                        help="print again every S seconds (default 1) until interrupted")
    status.add_argument("--until-ready", type=int, metavar="N",
                        help="print nothing until N ranks are ready")
    status.add_argument("--timeout", type=float, default=60.0, metavar="S",
                        help="wait for --until-ready at most this long (default: %(default)s)")
    bench.add_flags(load)
    generate.set_defaults(run=connected(run_generate))
    status.set_defaults(run=connected(run_status))
    load.set_defaults(run=bench.run)
    return parser


def connected(run):
    """run(args, client) as run(args)."""
    def run_with_client(args):
        with Client(args.router, args.connect_timeout) as client:
            return run(args, client)
    return run_with_client


# ---- generate ----

def read_prompt(args):
    if args.file is None:
        return args.prompt
    if args.file == "-":
        return sys.stdin.read()
    try:
        with open(args.file, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file {args.file}: {error}") from error


def find_tokenizer(args, info):
    """The named one, or the checkpoint's; None only where ids are enough."""
    path = args.tokenizer or info.tokenizer_path
    if not path:
        if args.token_ids is not None:
            return None
        raise UsageError("the served checkpoint has no tokenizer.json: give --tokenizer PATH, "
                         "or the prompt as --token-ids")
    try:
        return detokenize.load(path)
    except Exception as error:
        if args.tokenizer is None and args.token_ids is not None:
            return None  # the ranks' path need not exist on this machine
        raise UsageError(f"tokenizer {path}: {error}") from error


def sampling_from(args):
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(SamplingParams)}
    return SamplingParams(**values)


def milliseconds(seconds):
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def print_timings(timings):
    rate = "-" if timings.tokens_per_s is None else f"{timings.tokens_per_s:.1f}"
    print(f"TTFT {milliseconds(timings.ttft_s)}  TPOT {milliseconds(timings.tpot_s)}  "
          f"{rate} tok/s  ({timings.count} tokens)", file=sys.stderr)


def format_logprobs(token_id, entry, tokenizer):
    def name(i):
        return str(i) if tokenizer is None else f"{i} {tokenizer.decode([i], False)!r}"
    own = "-" if entry.logprob is None else f"{entry.logprob:.4f}"
    best = "  ".join(f"{name(i)} {p:.4f}" for i, p in entry.top)
    return f"{name(token_id)}  {own}" + (f"  | {best}" if best else "")


def stream_text(stream, tokenizer, out):
    """Writes text as it comes (ids where there is no tokenizer); returns the result."""
    text = detokenize.Detokenizer(tokenizer) if tokenizer else None
    for event in stream:
        if not hasattr(event, "tokens"):
            continue
        piece = text.push(event.tokens) if text else "".join(f"{t} " for t in event.tokens)
        out.write(piece)
        out.flush()
    out.write((text.finish() if text else "") + "\n")
    out.flush()
    return stream.result()


def print_logprob_lines(prompt, result, tokenizer):
    for title, ids, entries in (("prompt logprobs", prompt, result.prompt_logprobs),
                                ("logprobs", result.tokens, result.logprobs)):
        if entries:
            print(f"{title}:", file=sys.stderr)
            for token_id, entry in zip(ids, entries):
                print("  " + format_logprobs(token_id, entry, tokenizer), file=sys.stderr)


def logprobs_json(entries):
    if entries is None:
        return None
    return [{"logprob": e.logprob, "top": [list(pair) for pair in e.top]} for e in entries]


def result_json(prompt, result, tokenizer):
    text = None
    if tokenizer is not None:
        text = tokenizer.decode(result.tokens)
    return {"id": result.id, "prompt_tokens": prompt, "tokens": result.tokens, "text": text,
            "finish_reason": result.finish_reason, "logprobs": logprobs_json(result.logprobs),
            "prompt_logprobs": logprobs_json(result.prompt_logprobs),
            "ttft_s": result.timings.ttft_s, "tpot_s": result.timings.tpot_s,
            "tokens_per_s": result.timings.tokens_per_s}


def run_generate(args, client):
    tokenizer = find_tokenizer(args, client.info())
    prompt = args.token_ids
    if prompt is None:
        prompt = tokenizer.encode(read_prompt(args)).ids
    with client.generate(prompt, sampling_from(args), timeout_s=args.timeout) as stream:
        if args.json:
            result = stream.result()
            print(json.dumps(result_json(prompt, result, tokenizer)))
        else:
            result = stream_text(stream, tokenizer, sys.stdout)
            print_logprob_lines(prompt, result, tokenizer)
    print_timings(result.timings)
    return 0


# ---- status ----

def wait_ready(args, client):
    """Asks again, at a polite pace, until enough ranks are ready."""
    deadline_s, pause = time.monotonic() + args.timeout, threading.Event()
    while True:
        ready = sum(r.state == "ready" for r in client.status().ranks)
        if ready >= args.until_ready:
            return
        if time.monotonic() > deadline_s:
            raise SluiceError(f"{ready} of {args.until_ready} ranks are ready after "
                              f"{args.timeout:g} s")
        pause.wait(READY_LOOK_S)


def run_status(args, client):
    forever = threading.Event()
    if args.until_ready is not None:
        wait_ready(args, client)
    while True:
        status = client.status()
        if args.json:
            print(json.dumps(dataclasses.asdict(status)), flush=True)
        else:
            print(table.format_status(status), flush=True)
        if args.watch is None:
            return 0
        forever.wait(args.watch)
        if not args.json:
            print(flush=True)


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except UsageError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 2
    except RequestError as error:
        print(f"sluice: request failed: {error}", file=sys.stderr)
        return 1
    except SluiceError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our stdout has gone; Python must not complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
