"""Bad input of every kind ends in an error that names the thing and what was expected, and
disturbs nothing else: after each test a normal request still gives the golden tokens."""
import re
import signal
import struct

import msgpack
import pytest

import build
import checkpoints
import goldens
import sluice
from harness import START_S, Cluster, Place
from processes import Program

LITE = goldens.GOLDEN / "lite"
WORD = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def cluster(start_cluster):
    """Two ranks a pool; afterwards it still answers as before."""
    cluster = start_cluster(LITE, prefill=[2], decode=[2], prefill_pages=64, decode_pages=64)
    yield cluster
    case = goldens.load(LITE)[2]
    timeout_s = 30 * build.patience()
    assert goldens.compare(case, goldens.start(cluster.client, case, timeout_s).result())[0] == []


def refusal(cluster, tokens=(1, 2, 3), **options):
    with pytest.raises(sluice.RequestError) as caught:
        cluster.client.generate(tokens, timeout_s=30 * build.patience(),
                                **(WORD | options)).result()
    return caught.value


# ---- requests ----

@pytest.mark.parametrize("tokens, options, code, names", [
    ([], {}, "invalid", ["tokens"]),
    ([1, 256, 2], {}, "invalid", [r"tokens\[1\]", "256"]),
    ([1, -1], {}, "invalid", ["tokens", "-1"]),
    ([1, 2 ** 31], {}, "invalid", ["tokens", "2147483648"]),
    ([1] * 5120, {}, "limit", ["5120", "max_model_len"]),
    ([1] * 4100, {"max_tokens": 8}, "limit", ["4100", "65 pages", "64"]),
    ([1], {"max_tokens": 4096}, "limit", ["4096", "65 pages", "64"]),
    ([1], {"max_tokens": 2 ** 32 - 1}, "limit", ["4294967295"]),
    ([1], {"max_tokens": 0}, "invalid", ["max_tokens", "1"]),
    ([1], {"max_tokens": -1}, "invalid", ["max_tokens"]),
    ([1], {"max_tokens": 2 ** 32}, "invalid|limit", ["max_tokens", "4294967296"]),
    ([1], {"temperature": float("nan")}, "invalid", ["temperature", "finite"]),
    ([1], {"temperature": float("inf")}, "invalid", ["temperature", "finite"]),
    ([1], {"temperature": -0.5}, "invalid", ["temperature", "-0.5"]),
    ([1], {"temperature": "hot"}, "invalid", ["temperature", "hot|string"]),
    ([1], {"top_p": 0.0}, "invalid", ["top_p"]),
    ([1], {"top_p": 1.5}, "invalid", ["top_p", "1.5"]),
    ([1], {"min_p": -0.1}, "invalid", ["min_p"]),
    ([1], {"top_k": -1}, "invalid", ["top_k"]),
    ([1], {"min_tokens": 5, "max_tokens": 4}, "invalid", ["min_tokens", "max_tokens"]),
    ([1], {"logprobs": 21}, "invalid|limit", ["logprobs", "20"]),
    ([1], {"prompt_logprobs": 21}, "invalid|limit", ["prompt_logprobs", "20"]),
    ([1], {"stop_token_ids": range(65)}, "invalid|limit", ["stop_token_ids", "64"]),
    ([1], {"stop_token_ids": [256]}, "invalid", ["stop_token_ids", "256"]),
    ([1], {"seed": -1}, "invalid", ["seed"]),
    ([1], {"ignore_eos": 1}, "invalid", ["ignore_eos"]),
    ([1], {"request_id": "x" * 64}, "invalid|limit", ["id", "63"]),
    ([1], {"request_id": ""}, None, None),
])
def test_bad_request(cluster, tokens, options, code, names):
    if names is None:  # the client draws an id where it is given none; the raw form is below
        assert len(cluster.client.generate([1], **WORD, **options).result().tokens) == 4
        return
    if len(options.get("request_id", "")) > 63:
        error = unattributed(cluster, "generate", id=options["request_id"], tokens=tokens)
    else:
        error = refusal(cluster, tokens, **options)
    assert re.fullmatch(code, error["code"] if isinstance(error, dict) else error.code)
    text = error["message"] if isinstance(error, dict) else error.message
    for name in names:
        assert re.search(name, text), f"{name} is not in: {text}"


def unattributed(cluster, kind, **fields):
    """The failed message that answers a frame of a connection of its own."""
    with sluice.RawConnection(cluster.client_address) as raw:
        raw.send_message(kind, **fields)
        return raw.receive_until(lambda m: m["type"] == "failed", 30 * build.patience())


def test_id_in_use(cluster):
    with sluice.RawConnection(cluster.client_address) as raw:
        request = {"id": "same", "tokens": [1, 2], "max_tokens": 300, "ignore_eos": True}
        raw.send_message("generate", **request)
        raw.send_message("generate", **request)
        failed = raw.receive_until(lambda m: m["type"] == "failed", 30 * build.patience())
        # Without the id: the request that holds it goes on, and its stream must not seem to end.
        assert failed["id"] == "" and "same" in failed["message"]
        raw.receive_until(lambda m: m.get("finish_reason") == "length", 60 * build.patience())


# ---- frames ----

def nested(depth):
    frame = b"\x01"
    for _ in range(depth):
        frame = b"\x91" + frame
    return frame


def packed(**fields):
    return msgpack.packb(fields)


BAD_FRAMES = {
    "not_msgpack": (b"\xc1\xc1\xc1", "invalid", ""),
    "empty": (b"", "invalid", ""),
    "text": (b"GET / HTTP/1.1\r\n\r\n", "invalid", "map|trailing"),
    "array_of_four_billion": (b"\xdd\xff\x00\x00\x00", "invalid|limit", ""),
    "map_of_four_billion": (b"\xdf\xff\xff\xff\xff", "invalid|limit", ""),
    "string_of_four_billion": (b"\xdb\xff\xff\xff\xff", "invalid|limit", ""),
    "inside_a_message": (packed(v=2, type="generate")[:-9] + b"\xdd\xff\x00\x00\x00",
                         "invalid|limit", ""),
    "cut_short": (packed(v=2, type="generate", id="a", tokens=[1, 2, 3])[:-1], "invalid", ""),
    "trailing": (packed(v=2, type="status") + b"\x00", "invalid", "trailing"),
    "too_deep": (packed(v=2, type="generate", id="a")[:-1] + b"a" + nested(1000),
                 "invalid|limit", ""),
    "deep_value": (b"\x83\xa1v\x02\xa4type\xa8generate\xa6tokens" + nested(50), "invalid|limit",
                   "level|deep|nest"),
    "a_number": (b"\x07", "invalid", "map"),
    "no_version": (packed(type="status"), "invalid", "v"),
    "other_version": (packed(v=1, type="status"), "invalid", "version"),
    "no_type": (packed(v=2), "invalid", "type"),
    "unknown_type": (packed(v=2, type="frobnicate"), "invalid", "frobnicate"),
    "unknown_key": (packed(v=2, type="cancel", id="a", why="x"), "invalid", "why"),
    "a_rank_s_type": (packed(v=2, type="heartbeat_ack", sequence=1), "invalid", "heartbeat_ack"),
    "double_key": (b"\x84\xa1v\x02\xa4type\xa6cancel\xa2id\xa1a\xa2id\xa1b", "invalid", "id"),
    "nan_key": (b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01", "invalid", ""),
    "extension": (packed(v=2, type="cancel", id=msgpack.ExtType(5, b"x")), "invalid", "exten|id"),
    "wrong_kind": (packed(v=2, type="generate", id="a", tokens={"a": 1}), "invalid", "tokens"),
    "no_tokens": (packed(v=2, type="generate", id="a"), "invalid", "tokens"),
    "empty_id": (packed(v=2, type="generate", id="", tokens=[1]), "invalid", "id"),
    "id_with_a_zero": (packed(v=2, type="cancel", id="a\0b"), "invalid", "id"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frame(cluster, name):
    frame, code, text = BAD_FRAMES[name]
    with sluice.RawConnection(cluster.client_address) as raw:
        raw.send(frame)
        failed = raw.receive(30 * build.patience())
        assert failed["type"] == "failed"
        assert re.fullmatch(code, failed["code"]), failed
        assert re.search(text, failed["message"], re.I), failed
        raw.send_message("info")  # the same connection goes on
        assert raw.receive(30 * build.patience())["type"] == "info_reply"


def test_too_large_a_frame(cluster):
    """A frame over the limit is answered; the connection and everybody else's go on."""
    with sluice.RawConnection(cluster.client_address) as raw:
        raw.send(b"\xc6" + struct.pack(">I", 17 << 20) + bytes(17 << 20))
        failed = raw.receive(60 * build.patience())
        assert failed["code"] == "limit"
        assert str(16 << 20) in failed["message"]


def test_several_frames_in_one_message(cluster):
    with sluice.RawConnection(cluster.client_address) as raw:
        raw.send(packed(v=2, type="status"), packed(v=2, type="status"))
        failed = raw.receive(30 * build.patience())
        assert failed["type"] == "failed" and "one part" in failed["message"]


def test_bad_frames_to_the_nodes_socket(cluster):
    """The ranks' socket takes the same frames without harm. What it answers is its own matter."""
    with sluice.RawConnection(cluster.node_address) as raw:
        for frame, _, _ in BAD_FRAMES.values():
            raw.send(frame)
        raw.send_message("tokens", attempt=1, index=0, tokens=[1])
        raw.send_message("goodbye")
    cluster.wait_ready()


def test_cancel_of_an_unknown_id(cluster):
    failed = unattributed(cluster, "cancel", id="never-seen")
    assert failed["code"] == "not_found" and "never-seen" in failed["message"]


# ---- clients ----

@pytest.mark.parametrize("when", ["waiting", "streaming"])
def test_client_that_vanishes(cluster, when):
    """Its requests are canceled once the router cannot reach it; pages come back (checked after
    every test), and nobody else notices."""
    before = cluster.status()
    raw = sluice.RawConnection(cluster.client_address)
    for n in range(6):
        raw.send_message("generate", id=f"r{n}", tokens=[1] * 600, max_tokens=2000,
                         ignore_eos=True)
    if when == "streaming":
        raw.receive_until(lambda m: m["type"] == "tokens", 30 * build.patience())
    else:
        raw.send_message("info")
        raw.receive_until(lambda m: m["type"] == "info_reply", 30 * build.patience())
    raw.close()
    status = cluster.wait_status(lambda s: s.requests_canceled - before.requests_canceled == 6,
                                 "six canceled requests", 60)
    assert status.requests_failed == before.requests_failed


def test_client_that_does_not_read(cluster):
    """A stream that nobody reads ends at the peer's bound or waits; others go on meanwhile."""
    with sluice.RawConnection(cluster.client_address) as raw:
        raw.send_message("generate", id="unread", tokens=[1, 2, 3], max_tokens=1500,
                         ignore_eos=True)
        case = goldens.load(LITE)[1]
        for _ in range(3):
            result = goldens.start(cluster.client, case, 60 * build.patience()).result()
            assert result.tokens == case.tokens
        raw.receive_until(lambda m: m.get("finish_reason") == "length", 120 * build.patience())


# ---- programs: flags ----

def run_argv(cluster, name, argv):
    """Runs a program that must end by itself, with an error; returns its log."""
    log = cluster.folder / f"{name}-{len(list(cluster.folder.iterdir()))}.out"
    program = Program(name, argv, log, build.environment())
    try:
        assert program.wait(START_S * build.patience()) is not None, program.tail()
        assert program.exit_code > 0, program.tail()
        assert program.reports() == []
        return program.log()
    finally:
        program.kill()
        program.release()


@pytest.mark.parametrize("kind, argv, names", [
    ("router", ["--client-bnd", "x"], ["--client-bnd", "--client-bind"]),
    ("prefill", ["--token-buget=64"], ["--token-buget", "--token-budget"]),
    ("decode", ["--max-bacth", "3"], ["--max-bacth", "--max-batch"]),
    ("router", ["--heartbeat-ms", "soon"], ["heartbeat-ms", "soon"]),
    ("prefill", ["--token-budget", "100", "--model", "x"], ["token-budget", "64"]),
    ("prefill", ["--mla-prefill", "other", "--model", "x"], ["mla-prefill", "unabsorbed", "other"]),
    ("decode", ["--tp", "0", "--model", "x"], ["tp", "1"]),
    ("decode", [], ["model"]),
    ("router", ["stray"], ["stray"]),
])
def test_bad_flag(cluster, kind, argv, names):
    log = run_argv(cluster, f"flag-{kind}", [build.program(f"sluice-{kind}"), *argv])
    for name in names:
        assert name in log, log


def test_unknown_config_key(cluster, tmp_path):
    config = tmp_path / "router.conf"
    config.write_text("# a comment\nheartbeet_ms = 100\n")
    log = run_argv(cluster, "config", [build.program("sluice-router"), "--config", config])
    assert "heartbeet_ms" in log and "heartbeat_ms" in log


def test_port_in_use(cluster):
    """The client socket, then the node socket."""
    for flag, taken in (("client_bind", cluster.client_address),
                        ("node_bind", cluster.node_address)):
        other = "node_bind" if flag == "client_bind" else "client_bind"
        argv = cluster.command("router", {flag: taken, other: "tcp://127.0.0.1:0"})
        log = run_argv(cluster, f"port-{flag}", argv)
        assert taken in log and "in use" in log


def rank_argv(cluster, place, **changes):
    return cluster.command(place.pool, cluster.node_flags(place, **changes))


SPARE = Place("prefill", 0, 0)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_cuda_without_cuda(cluster, kind):
    log = run_argv(cluster, f"cuda-{kind}", rank_argv(cluster, Place(kind, 0, 0), device="cuda"))
    # A build without the backend names those it has; one with it names the GPU it did not find.
    assert ('no device backend "cuda"' in log and "cpu" in log) or "cuda device 0: " in log


def test_router_that_is_not_there(cluster):
    argv = rank_argv(cluster, SPARE, router="tcp://127.0.0.1:1", register_timeout_ms=300)
    log = run_argv(cluster, "nobody", argv)
    assert "tcp://127.0.0.1:1" in log and "300 ms" in log


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_second_rank_for_a_taken_place(cluster, pool):
    log = run_argv(cluster, f"second-{pool}", rank_argv(cluster, Place(pool, 0, 1)))
    assert f"{pool}/0/1" in log and re.search("refused|held", log)
    cluster.wait_ready()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_pools_with_different_models(cluster, pool):
    """As a new group, so that its place is free; the refusal gives both models and layouts."""
    place = Place(pool, 0, 0)
    argv = rank_argv(cluster, place, model=goldens.GOLDEN / "v2", group=7, tp=1, rank=0)
    log = run_argv(cluster, f"other-model-{pool}", argv)
    refusal = next(line for line in log.splitlines() if "refused" in line)
    assert f"{pool}/7/0" in refusal
    assert len(set(re.findall(r'model "(\w+-[0-9a-f]{16})"', refusal))) == 2
    assert len(set(re.findall(r"layout [0-9a-f]{16}", refusal))) == 2


def test_rank_outside_its_group(cluster):
    log = run_argv(cluster, "outside", rank_argv(cluster, SPARE, group=7, tp=2, rank=2))
    assert re.search("rank", log) and "2" in log


# ---- programs: checkpoints ----

BAD_CHECKPOINTS = {
    "missing_tensor": (checkpoints.drop_tensor, [checkpoints.NORM, r"\[32\]"]),
    "wrong_shape": (checkpoints.reshape, [checkpoints.NORM, r"\[32\]", r"\[2, 16\]"]),
    "wrong_dtype": (checkpoints.retype, [checkpoints.NORM, "F32", "I32"]),
    "truncated": (checkpoints.truncate, ["model.safetensors", "truncated"]),
    "truncated_header": (checkpoints.truncate_header, ["model.safetensors", "truncated"]),
    "overlapping": (checkpoints.overlap, ["model.safetensors", "overlaps"]),
    "model_type": (lambda f: checkpoints.change_config(f, model_type="llama"),
                   ["model_type", "deepseek_v2", "llama"]),
    "quantisation": (lambda f: checkpoints.change_config(
        f, quantization_config={"quant_method": "fp8"}), ["quantization_config", "fp8"]),
    "no_config": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "config_not_json": (lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
    "topk_method": (lambda f: checkpoints.change_config(f, topk_method="lucky"),
                    ["topk_method", "lucky", "greedy"]),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors"]),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint(cluster, tmp_path, name):
    change, texts = BAD_CHECKPOINTS[name]
    folder = checkpoints.copy(tmp_path / "spoilt")
    change(folder)
    log = run_argv(cluster, f"checkpoint-{name}",
                   rank_argv(cluster, SPARE, model=folder, group=7, tp=1))
    for text in texts:
        assert re.search(text, log), f"{text} is not in:\n{log}"


def test_index_that_names_an_absent_shard(cluster, tmp_path):
    folder = checkpoints.absent_shard(checkpoints.copy(tmp_path / "spoilt", checkpoints.SHARDED))
    log = run_argv(cluster, "absent-shard", rank_argv(cluster, SPARE, model=folder, group=7, tp=1))
    assert "model-00002-of-00002.safetensors" in log and "no such file" in log


def test_missing_model_folder(cluster, tmp_path):
    log = run_argv(cluster, "no-model",
                   rank_argv(cluster, SPARE, model=tmp_path / "nothing", group=7, tp=1))
    assert "nothing" in log and "no such file" in log.lower()


# ---- limits of queues ----

def test_requests_beyond_the_waiting_limit(start_cluster):
    """Two may wait; all others are told at once, and the accepted ones finish."""
    cluster = start_cluster(LITE, decode_pages=24, router_flags={"max_waiting": 2})
    streams = [cluster.client.generate([1] * 100, max_tokens=600, ignore_eos=True)
               for _ in range(12)]
    codes = []
    for stream in streams:
        try:
            codes.append(stream.result().finish_reason)
        except sluice.RequestError as error:
            assert "--max-waiting" in error.message
            codes.append(error.code)
    assert set(codes) == {"length", "limit"}
    assert codes[:2] == ["length", "length"]


def test_no_ready_group_is_told(start_cluster):
    """Without a pool a request is not left waiting for ever."""
    cluster = start_cluster(LITE, prefill=[1], decode=[], router_flags={"place_timeout_ms": 200})
    with pytest.raises(sluice.RequestError) as caught:
        cluster.client.generate([1], timeout_s=60).result()
    assert "decode" in caught.value.message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_programs_end_on_signals(built, number):
    """A cluster told to stop, all at once and amid a request, ends with exit code 0 everywhere."""
    with Cluster(LITE, prefill=[2], decode=[2]) as cluster:
        stream = cluster.client.generate([1] * 10, max_tokens=3000, ignore_eos=True)
        next(stream)
        for program in cluster.programs():
            program.signal(number)
        for program in cluster.programs():
            assert program.wait(30 * build.patience()) == 0, program.tail()
        with pytest.raises(sluice.SluiceError):
            stream.result()
