"""One prefill and one decode rank against a scripted router: what a rank does with messages the
real router would not send, or not in that order."""
import re
import time

import build
import msgpack
import pytest
import zmq
from goldens import GOLDEN
from processes import Program, wait_until
from sluice.protocol import VERSION

SAMPLING = {"seed": 1, "max_tokens": 8, "temperature": 0.0}


class ScriptedRouter:
    def __init__(self, group_pages=0):
        self.group_pages = group_pages
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.hello, self.keys, self.ready, self.log = {}, {}, set(), []

    def close(self):
        self.context.destroy(linger=0)

    def send(self, pool, kind, **fields):
        frame = msgpack.packb({"v": VERSION, "type": kind, **fields})
        self.socket.send_multipart([self.keys[pool], frame])

    def take(self):
        """Handles one message, if one comes soon: membership here, the rest goes to the log."""
        if not self.socket.poll(20):
            return
        key, frame = self.socket.recv_multipart()
        message = msgpack.unpackb(frame)
        kind = message["type"]
        if kind == "hello":
            pool, incarnation = message["rank"]["pool"], message["rank"]["incarnation"]
            self.hello[pool], self.keys[pool] = message, key
            self.send(pool, "welcome", incarnation=incarnation, heartbeat_ms=100, lease_ms=5000)
            self.send(pool, "group", incarnations=[incarnation],
                      addresses=[message["group_address"]], pages=self.group_pages)
            return
        pool = next(p for p, k in self.keys.items() if k == key)
        if kind == "heartbeat":
            self.send(pool, "heartbeat_ack", sequence=message["sequence"])
        if kind == "ready":
            self.ready.add(pool)
        self.log.append((pool, message))

    def introduce(self):
        for pool, other in (("prefill", "decode"), ("decode", "prefill")):
            hello = self.hello[other]
            self.send(pool, "peer", rank=hello["rank"], alive=True, tp=1, attention="dp",
                      transfer_address=hello["transfer_address"])

    def of(self, pool, kind, attempt):
        return [m for p, m in self.log
                if p == pool and m["type"] == kind and m.get("attempt") == attempt]

    def free_pages(self, pool):
        beats = [m for p, m in self.log if p == pool and m["type"] == "heartbeat"]
        return beats[-1]["pages_free"] if beats else None


class Rig:
    def __init__(self, folder, attention="dp", group_pages=0):
        self.router = ScriptedRouter(group_pages)
        self.attention = attention
        self.ranks = [Program(pool, self._command(pool), folder / f"{pool}.log",
                              build.environment()) for pool in ("prefill", "decode")]

    def _command(self, pool):
        argv = [build.program(f"sluice-{pool}"), "--router", self.router.address,
                "--model", str(GOLDEN / "lite"), "--pages", "64", "--attention", self.attention]
        return argv + (["--token-budget", "256"] if pool == "prefill" else ["--max-batch", "8"])

    def wait(self, condition, what):
        def look():
            self.router.take()
            return condition()
        return wait_until(look, 30 * build.patience(), what, self.ranks)

    def wait_message(self, pool, kind, attempt):
        return self.wait(lambda: self.router.of(pool, kind, attempt),
                         f"{kind} of attempt {attempt} from {pool}")

    def wait_ignored(self, kind, attempt):
        """A rank has said in its log that it has had such a message before."""
        words = f"ignored a second {kind} of attempt {attempt}"
        self.wait(lambda: any(words in rank.log() for rank in self.ranks), words)

    def wait_free(self, pages=64):
        """Every page of both ranks free, by heartbeats from now on."""
        self.router.log = [(p, m) for p, m in self.router.log if m["type"] != "heartbeat"]
        self.wait(lambda: all(self.router.free_pages(p) == pages for p in ("prefill", "decode")),
                  f"{pages} free pages on both ranks")

    def check_alive(self):
        for rank in self.ranks:
            assert rank.exit_code is None, rank.tail()
            assert not rank.reports(), rank.reports()

    def prefill(self, attempt, tokens=(1, 2, 3), **changes):
        decode = self.router.hello["decode"]["rank"]
        self.router.send("prefill", "prefill", attempt=attempt, decode=decode,
                         tokens=list(tokens), **(SAMPLING | changes))

    def reserve(self, attempt, prompt_len=3, **changes):
        prefill = self.router.hello["prefill"]["rank"]
        self.router.send("decode", "reserve", attempt=attempt, prefill=prefill,
                         prompt_len=prompt_len, **(SAMPLING | changes))

    def close(self):
        for rank in self.ranks:
            rank.kill()
            rank.release()
        self.router.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("ranks"))
    try:
        rig.wait(lambda: len(rig.router.ready) == 2, "both ranks ready")
        rig.router.introduce()
        yield rig
    finally:
        rig.close()


@pytest.fixture
def attempts(rig):
    """Increasing ids, as a router gives them; afterwards both ranks hold nothing."""
    base = time.monotonic_ns()
    yield iter(range(base, base + 100))
    rig.check_alive()
    rig.wait_free()


def finish(rig, attempt, prompt_len=3):
    rig.reserve(attempt, prompt_len)
    rig.prefill(attempt, [n % 256 for n in range(prompt_len)])
    rig.wait_message("decode", "released", attempt)
    rig.wait_message("prefill", "released", attempt)
    messages = [m for pool in ("prefill", "decode") for m in rig.router.of(pool, "tokens", attempt)]
    tokens = [m["tokens"] for m in messages]
    assert sum(len(t) for t in tokens) == SAMPLING["max_tokens"]


def test_an_attempt_runs(rig, attempts):
    finish(rig, next(attempts))


def test_cancel_of_a_computed_prompt_without_a_grant(rig, attempts):
    attempt = next(attempts)
    rig.prefill(attempt)
    rig.wait_message("prefill", "tokens", attempt)
    rig.router.send("prefill", "cancel_attempt", attempt=attempt)
    rig.wait_message("prefill", "released", attempt)
    finish(rig, next(attempts))


def test_unknown_decode_rank_is_refused_and_its_grant_released(rig, attempts):
    attempt = next(attempts)
    stranger = dict(rig.router.hello["decode"]["rank"], incarnation=12345)
    rig.reserve(attempt)
    rig.router.send("prefill", "prefill", attempt=attempt, decode=stranger, tokens=[1, 2, 3],
                    **SAMPLING)
    failed = rig.wait_message("prefill", "failed", attempt)[0]
    assert failed["code"] == "unreachable" and "12345" in failed["message"]
    rig.wait_message("prefill", "released", attempt)
    rig.wait_message("decode", "released", attempt)


@pytest.mark.parametrize("fault, words", [
    ({"tokens": [1, 2, 256]}, "prefill.tokens[2]: expected an id below 256, found 256"),
    ({"tokens": [5] * 5119, "max_tokens": 2}, "5119 and 2"),
    ({"tokens": [5] * 6000}, "6000 and 8"),
    ({"tokens": [5] * 4200}, "needs 66 pages: expected 1 to 64"),
], ids=["id", "length", "prompt", "pages"])
def test_bad_prefill(rig, attempts, fault, words):
    attempt = next(attempts)
    rig.prefill(attempt, **fault)
    failed = rig.wait_message("prefill", "failed", attempt)[0]
    assert failed["code"] == "invalid" and words in failed["message"]
    rig.wait_message("prefill", "released", attempt)


def test_bad_reserve(rig, attempts):
    attempt = next(attempts)
    rig.reserve(attempt, prompt_len=5119, max_tokens=2)
    failed = rig.wait_message("decode", "failed", attempt)[0]
    assert failed["code"] == "invalid" and "5119 and 2" in failed["message"]
    rig.wait_message("decode", "released", attempt)


def test_no_pages_holds_nothing(rig, attempts):
    attempt = next(attempts)
    rig.reserve(attempt, prompt_len=4200, max_tokens=1)
    rig.wait_message("decode", "no_pages", attempt)
    assert not rig.router.of("decode", "released", attempt)


@pytest.mark.parametrize("repeated, other", (("reserve", "prefill"), ("prefill", "reserve")))
def test_repeated_messages_count_once(rig, attempts, repeated, other):
    """While the attempt lives, which it does until the other rank has its part too."""
    attempt = next(attempts)
    getattr(rig, repeated)(attempt)
    getattr(rig, repeated)(attempt)
    rig.wait_ignored(repeated, attempt)
    getattr(rig, other)(attempt)
    rig.wait_message("decode", "released", attempt)
    rig.wait_message("prefill", "released", attempt)
    finish(rig, next(attempts))
    assert len(rig.router.of("prefill", "released", attempt)) == 1
    assert len(rig.router.of("decode", "released", attempt)) == 1


def test_group_of_fewer_pages(tmp_path):
    """TP attention: what a rank has beyond the group's pages is never given out."""
    rig = Rig(tmp_path, "tp", 40)
    try:
        rig.wait(lambda: len(rig.router.ready) == 2, "both ranks ready")
        rig.router.introduce()
        rig.wait_free(40)
        rig.reserve(1, prompt_len=40 * 64 - 7)
        rig.wait_message("decode", "no_pages", 1)
        rig.prefill(2, [5] * (40 * 64 + 1))
        failed = rig.wait_message("prefill", "failed", 2)[0]
        assert "needs 41 pages: expected 1 to 40" in failed["message"]
        finish(rig, 3, 40 * 64 - 8)
        rig.wait_free(40)
        rig.check_alive()
    finally:
        rig.close()


@pytest.mark.parametrize("attention, pages, expected", [
    ("tp", 65, "1 to 64"), ("tp", 0, "1 to 64"), ("dp", 64, "0 to 0")])
def test_group_of_impossible_pages(tmp_path, attention, pages, expected):
    rig = Rig(tmp_path, attention, pages)
    try:
        for rank in rig.ranks:
            rank.may_die = True
        rig.wait(lambda: all(rank.exit_code is not None for rank in rig.ranks), "both ranks' ends")
        for rank in rig.ranks:
            assert rank.exit_code == 1
            assert f"group with {pages} pages a rank: expected {expected} on this one" in rank.log()
    finally:
        rig.close()


@pytest.mark.parametrize("index", (0, 1), ids=("prefill", "decode"))
def test_table_of_memory(rig, index):
    """The rows add up, and the pages are those asked for."""
    rows = dict(re.findall(r"memory: (\D+?) +([\d.]+) MiB", rig.ranks[index].log()))
    sizes = {what: float(mib) for what, mib in rows.items()}
    total = sizes.pop("all of these")
    assert sizes.pop("free at start") >= total
    assert sizes.pop("free now") > 0
    assert {"weights", "attention", "experts", "latent pages"} <= sizes.keys()
    assert abs(sum(sizes.values()) - total) < 0.1 * (len(sizes) + 1)
    assert "64 pages of" in rig.ranks[index].log()
