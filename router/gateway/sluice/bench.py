"""`sluice bench`: random prompts at a rate and a concurrency, and how fast the answers came.

Flags, printed lines and JSON keys carry the names of SGLang's bench_serving, so that figures can
be laid side by side. Prompts are random token ids and tokens are counted as ids, so "retokenized"
equals what was generated. Requests are greedy, ignore the model's end tokens, and count as failed
unless exactly the tokens asked for arrive.

    TTFT   first tokens' arrival minus sending (waiting for --max-concurrency does not count)
    E2E    last tokens' arrival minus sending
    TPOT   (E2E - TTFT) / (tokens - 1)
    ITL    time between two events of a request; one of n tokens counts as n gaps of a nth each

Arrival is stamped as frames leave the socket. The client runs on one core. Against the fake router
of tests/cluster (64 streams, one token an event, both programs on two shared cores of an EPYC) it
took 45 000 to 90 000 tokens/s, at 8 us of its own CPU time each. A run that kept it busy most of
the time says so at its end, for then the client may be what was measured, not the server.
"""
import argparse
import asyncio
import dataclasses
import gc
import json
import math
import random
import sys
import time

from .aio import AsyncClient
from .errors import ConnectionLost, SluiceError
from .protocol import SamplingParams

BACKEND, DATASET = "sluice", "random-ids"
WIDTH = 50
BUSY_FRACTION = 0.8       # of a core, from which on the client warns of itself
ERRORS_SHOWN = 5
PLOT_BINS, PLOT_SLICES = 60, 100


# ---- flags ----

def number(kind, low, high=math.inf):
    """A type for argparse: a number of this kind between two bounds, both included."""
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            bounds = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r:.40}: a number {bounds} expected")
        return value
    return parse


def rate(text):
    value = number(float, 0)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("a rate above 0, or inf, expected")
    return value


def add_flags(parser):
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=number(int, 1), default=1000, metavar="N",
                      help="requests (default: %(default)s)")
    for side in ("input", "output"):
        load.add_argument(f"--random-{side}-len", type=number(int, 1), default=1024, metavar="N",
                          help=f"{side} tokens of a request at most (default: %(default)s)")
    load.add_argument("--random-range-ratio", type=number(float, 0, 1), default=0.0, metavar="R",
                      help="lengths are drawn from R times the longest to the longest; 1 is fixed "
                           "(default: %(default)s)")
    load.add_argument("--request-rate", type=rate, default=math.inf, metavar="R",
                      help="requests a second, with Poisson arrivals; inf sends all at once "
                           "(default: %(default)s)")
    load.add_argument("--max-concurrency", type=number(int, 1), metavar="N",
                      help="requests in flight at most (default: no limit)")
    load.add_argument("--warmup-requests", type=number(int, 0), default=1, metavar="N",
                      help="requests before the clock starts (default: %(default)s)")
    load.add_argument("--seed", type=int, default=1, metavar="N",
                      help="same seed, same prompts, lengths and arrivals (default: %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--output-file", metavar="JSONL", help="append the result as a JSON line")
    output.add_argument("--output-details", action="store_true",
                        help="with every request's lengths, times and error in that line")
    output.add_argument("--plot", metavar="FILE.png",
                        help="draw TTFT, ITL and throughput over time (needs matplotlib)")


# ---- load ----

@dataclasses.dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    output_len: int


def make_prompts(count, input_len, output_len, ratio, vocab_size, rng):
    """Uniform lengths between `ratio` times the longest (at least 1) and the longest."""
    def length(longest):
        return rng.randint(max(1, int(longest * ratio)), longest)
    ids = range(vocab_size)
    return [Prompt(rng.choices(ids, k=length(input_len)), length(output_len))
            for _ in range(count)]


def arrival_offsets(count, request_rate, rng):
    """Seconds after the start at which each request is due: a Poisson process, first at 0."""
    offsets = [0.0] * count
    if request_rate != math.inf:
        for i in range(1, count):
            offsets[i] = offsets[i - 1] + rng.expovariate(request_rate)
    return offsets


@dataclasses.dataclass
class Outcome:
    """What became of one request. Times in seconds of the monotonic clock."""

    input_len: int
    output_len: int  # tokens asked for
    sent_s: float | None = None
    times_s: list[float] = dataclasses.field(default_factory=list)  # of each event
    counts: list[int] = dataclasses.field(default_factory=list)     # its tokens
    error: str = "not finished"  # "": all went well

    @property
    def tokens(self):
        return sum(self.counts)

    @property
    def ttft_s(self):
        return self.times_s[0] - self.sent_s if self.times_s else None

    @property
    def latency_s(self):
        return self.times_s[-1] - self.sent_s if self.times_s else None

    @property
    def tpot_s(self):
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl_s(self):
        gaps = []
        for before, now, count in zip(self.times_s, self.times_s[1:], self.counts[1:]):
            gaps += [(now - before) / count] * count
        return gaps


# ---- running ----

class Runner:
    """Sends prompts at their times, no more than `max_concurrency` at once. One run."""

    def __init__(self, client, max_concurrency=None):
        self._client = client
        self._gate = asyncio.Semaphore(max_concurrency or sys.maxsize)
        self._open = set()  # ids the router works on
        self._tasks = []
        self._lost = None   # the error of the lost connection
        self.start_s = self.duration_s = self.busy_s = 0.0

    async def run(self, prompts, offsets):
        """Outcomes in the order of the prompts. A cancellation is passed on to the router."""
        outcomes = [Outcome(len(p.tokens), p.output_len) for p in prompts]
        busy_s = time.thread_time()
        self.start_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._one(*work))
                       for work in zip(prompts, outcomes, offsets)]
        try:
            await asyncio.gather(*self._tasks)
        except asyncio.CancelledError:
            await self._cancel_open()
            raise
        self.duration_s = time.monotonic() - self.start_s
        self.busy_s = time.thread_time() - busy_s
        return outcomes

    async def _one(self, prompt, outcome, offset_s):
        try:
            await asyncio.sleep(max(0.0, self.start_s + offset_s - time.monotonic()))
            async with self._gate:
                await self._request(prompt, outcome)
        except ConnectionLost as error:
            outcome.error = str(error)
            self._give_up(error)
        except SluiceError as error:
            outcome.error = str(error)
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            outcome.error = str(self._lost)

    async def _request(self, prompt, outcome):
        sampling = SamplingParams(temperature=0.0, max_tokens=prompt.output_len, ignore_eos=True)
        stream = await self._client.generate(prompt.tokens, sampling)
        outcome.sent_s = stream.timings.sent_s
        self._open.add(stream.id)
        try:
            async for event in stream:
                outcome.times_s.append(event.received_s)
                outcome.counts.append(len(event.tokens))
        except SluiceError:
            self._open.discard(stream.id)
            raise
        self._open.discard(stream.id)
        done = outcome.tokens == prompt.output_len
        outcome.error = "" if done else (f"{outcome.tokens} of {prompt.output_len} tokens, then "
                                         f"{stream.finish_reason}")

    def _give_up(self, error):
        """Without a link nothing more can be sent, and waiting for one would never end."""
        if self._lost is None:
            self._lost = error
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _cancel_open(self):
        for request_id in self._open:
            await self._client.cancel(request_id)


def check_lengths(args, info):
    if info.vocab_size == 0:
        raise SluiceError("no rank has registered with the router: nothing to measure yet")
    longest = args.random_input_len + args.random_output_len
    if args.random_input_len > info.max_prompt_len:
        raise ValueError(f"--random-input-len {args.random_input_len}: the cluster takes prompts "
                         f"of {info.max_prompt_len} tokens at most")
    if longest > info.max_model_len:
        raise ValueError(f"--random-input-len and --random-output-len add up to {longest}, the "
                         f"cluster's max_model_len is {info.max_model_len}")


async def warm_up(client, args, info):
    """Other prompts than the measured ones, of the same lengths."""
    rng = random.Random(f"{args.seed} warm-up")
    prompts = make_prompts(args.warmup_requests, args.random_input_len, args.random_output_len,
                           args.random_range_ratio, info.vocab_size, rng)
    runner = Runner(client, args.max_concurrency)
    for outcome in await runner.run(prompts, [0.0] * len(prompts)):
        if outcome.error:
            raise SluiceError(f"a warm-up request failed: {outcome.error}")


async def measure(args):
    """(info, runner after its run, outcomes)"""
    async with AsyncClient(args.router, args.connect_timeout) as client:
        info = await client.info()
        check_lengths(args, info)
        # Separate generators: the same prompts at every rate.
        prompts = make_prompts(args.num_prompts, args.random_input_len, args.random_output_len,
                               args.random_range_ratio, info.vocab_size,
                               random.Random(f"{args.seed} prompts"))
        offsets = arrival_offsets(args.num_prompts, args.request_rate,
                                  random.Random(f"{args.seed} arrivals"))
        await warm_up(client, args, info)
        gc.collect()
        gc.freeze()  # collections during the run need not look at the prompts
        runner = Runner(client, args.max_concurrency)
        return info, runner, await runner.run(prompts, offsets)


# ---- figures ----

def percentile(values, percent):
    """Interpolated linearly between the two nearest ranks; `values` sorted and not empty."""
    position = (len(values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def spread(name, seconds, percents=(90, 99)):
    """{"mean_NAME_ms": ...}; None for each where there is nothing to measure."""
    values = sorted(s * 1000 for s in seconds)
    figures = dict.fromkeys(["mean", "median", "std", *(f"p{p}" for p in percents), "max"])
    if values:
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
        figures |= {"mean": mean, "median": percentile(values, 50), "std": math.sqrt(variance)}
        figures |= {f"p{p}": percentile(values, p) for p in percents}
        figures["max"] = values[-1]
    return {f"{key}_{name}_ms": value for key, value in figures.items()}


def summarize(outcomes, duration_s):
    """All figures of a run. Requests that failed count only as such."""
    done = [o for o in outcomes if not o.error]
    tokens_in, tokens_out = sum(o.input_len for o in done), sum(o.tokens for o in done)
    figures = {
        "duration": duration_s, "completed": len(done), "failed": len(outcomes) - len(done),
        "total_input_tokens": tokens_in, "total_output_tokens": tokens_out,
        "total_output_tokens_retokenized": tokens_out,
        "request_throughput": len(done) / duration_s,
        "input_throughput": tokens_in / duration_s,
        "output_throughput": tokens_out / duration_s,
        "total_throughput": (tokens_in + tokens_out) / duration_s,
        "concurrency": sum(o.latency_s for o in done) / duration_s,
        "accept_length": None,  # of speculative decoding, which there is none of
    }
    figures |= spread("e2e_latency", [o.latency_s for o in done])
    figures |= spread("ttft", [o.ttft_s for o in done])
    figures |= spread("tpot", [o.tpot_s for o in done if o.tokens > 1])
    figures |= spread("itl", [gap for o in done for gap in o.itl_s], (90, 95, 99))
    return figures


def settings(args, info):
    rate_name = "inf" if args.request_rate == math.inf else args.request_rate
    return {"backend": BACKEND, "dataset_name": DATASET, "model": info.model,
            "request_rate": rate_name, "max_concurrency": args.max_concurrency,
            "num_prompts": args.num_prompts, "random_input_len": args.random_input_len,
            "random_output_len": args.random_output_len,
            "random_range_ratio": args.random_range_ratio, "seed": args.seed,
            "warmup_requests": args.warmup_requests}


def details(outcomes, start_s):
    """Lists by request, in order; seconds. `start_times` count from the start of the run."""
    return {"input_lens": [o.input_len for o in outcomes],
            "output_lens": [o.tokens for o in outcomes],
            "start_times": [None if o.sent_s is None else o.sent_s - start_s for o in outcomes],
            "ttfts": [o.ttft_s for o in outcomes],
            "latencies": [o.latency_s for o in outcomes],
            "itls": [o.itl_s for o in outcomes],
            "errors": [o.error for o in outcomes]}


# ---- printing ----

def rule(title="", fill="-"):
    return f"{title:{fill}^{WIDTH}}"


def line(label, value):
    if value is None:
        value = "-"
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


SECTIONS = (("End-to-End Latency", "E2E Latency", "e2e_latency", ("p90", "p99")),
            ("Time to First Token", "TTFT", "ttft", ("p90", "p99")),
            ("Time per Output Token (excl. 1st token)", "TPOT", "tpot", ("p90", "p99")),
            ("Inter-Token Latency", "ITL", "itl", ("p90", "p95", "p99", "max")))


def format_table(result):
    """`result`: settings and figures."""
    limit = result["max_concurrency"]
    lines = [rule(" Serving Benchmark Result ", "="),
             line("Backend:", result["backend"]),
             line("Traffic request rate:", str(result["request_rate"])),
             line("Max request concurrency:", "not set" if limit is None else limit)]
    for label, key in (("Successful requests:", "completed"), ("Failed requests:", "failed"),
                       ("Benchmark duration (s):", "duration"),
                       ("Total input tokens:", "total_input_tokens"),
                       ("Total generated tokens:", "total_output_tokens"),
                       ("Total generated tokens (retokenized):",
                        "total_output_tokens_retokenized"),
                       ("Request throughput (req/s):", "request_throughput"),
                       ("Input token throughput (tok/s):", "input_throughput"),
                       ("Output token throughput (tok/s):", "output_throughput"),
                       ("Total token throughput (tok/s):", "total_throughput"),
                       ("Concurrency:", "concurrency")):
        lines.append(line(label, result[key]))
    for title, label, name, tails in SECTIONS:
        lines.append(rule(title))
        for key in ("mean", "median", *tails):
            lines.append(line(f"{key.capitalize()} {label} (ms):", result[f"{key}_{name}_ms"]))
    return "\n".join(lines + [rule(fill="=")])


def print_errors(outcomes):
    """The first few texts, each with how often it came."""
    counts = {}
    for outcome in outcomes:
        if outcome.error:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    for error, count in list(counts.items())[:ERRORS_SHOWN]:
        print(f"sluice: {count} of {len(outcomes)} requests failed: {error}", file=sys.stderr)
    if len(counts) > ERRORS_SHOWN:
        print(f"sluice: and {len(counts) - ERRORS_SHOWN} other errors", file=sys.stderr)


# ---- plot ----

def load_pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'sluice[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def throughput_over_time(outcomes, start_s, duration_s, slices=PLOT_SLICES):
    """(middles in s, output tokens/s) of equal slices of the run."""
    width_s = duration_s / slices
    tokens = [0] * slices
    for outcome in outcomes:
        for when_s, count in zip(outcome.times_s, outcome.counts):
            tokens[min(slices - 1, int((when_s - start_s) / width_s))] += count
    return [(i + 0.5) * width_s for i in range(slices)], [t / width_s for t in tokens]


def draw_distribution(axes, name, seconds):
    values = sorted(s * 1000 for s in seconds)
    axes.set(title=name, xlabel=f"{name} (ms)", ylabel="count")
    if not values:
        return
    axes.hist(values, bins=PLOT_BINS)
    axes.set_yscale("log")  # the tail is a handful among thousands
    for percent, style in ((50, "-"), (90, "--"), (99, ":")):
        value = percentile(values, percent)
        axes.axvline(value, color="black", linestyle=style, label=f"p{percent} {value:.2f} ms")
    axes.legend()


def draw(path, pyplot, outcomes, start_s, duration_s):
    done = [o for o in outcomes if not o.error]
    figure, (ttft, itl, flow) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    draw_distribution(ttft, "TTFT", [o.ttft_s for o in done])
    draw_distribution(itl, "ITL", [gap for o in done for gap in o.itl_s])
    flow.plot(*throughput_over_time(outcomes, start_s, duration_s))
    flow.set(title="Output throughput", xlabel="time (s)", ylabel="tokens/s")
    flow.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---- the command ----

def check_writable(flag, path):
    """Finds out before the run, not after it."""
    try:
        open(path, "a").close()
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error


def run(args):
    """0, or 1 where a request failed."""
    pyplot = load_pyplot() if args.plot else None
    for flag, path in (("--output-file", args.output_file), ("--plot", args.plot)):
        if path:
            check_writable(flag, path)
    info, runner, outcomes = asyncio.run(measure(args))
    busy = runner.busy_s / runner.duration_s
    result = settings(args, info) | summarize(outcomes, runner.duration_s)
    result["client_cpu_fraction"] = busy
    print(format_table(result))
    print_errors(outcomes)
    if busy > BUSY_FRACTION:
        print(f"sluice: the client itself was busy {busy:.0%} of the time: these figures may be "
              "its own limit", file=sys.stderr)
    if args.output_file:
        extra = details(outcomes, runner.start_s) if args.output_details else {}
        with open(args.output_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(result | extra) + "\n")
    if args.plot:
        draw(args.plot, pyplot, outcomes, runner.start_s, runner.duration_s)
    return 1 if result["failed"] else 0
