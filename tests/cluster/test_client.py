"""The client library against a scripted router: numbering, errors, timeouts, many streams."""
import asyncio
import contextlib
import socket
import threading

import pytest

import sluice
from fake_router import FakeRouter, echo


def rank_entry(**changes):
    entry = {"rank": {"pool": "prefill", "group": 0, "rank": 0, "incarnation": 7}, "tp": 1,
             "state": "ready", "pages_total": 10, "pages_free": 9, "pages_quiescing": 0,
             "running": 1, "queued_tokens": 5, "progress": 3, "tokens_out": 2,
             "heartbeat_age_ms": 12}
    return entry | changes


STATUS = {"model": "fake", "uptime_ms": 1500, "requests_waiting": 1, "requests_running": 2,
          "requests_finished": 3, "requests_failed": 4, "requests_canceled": 5,
          "requests_refused": 6, "ranks": [rank_entry()]}


def run_one(script, **options):
    """The result of one request against `script`."""
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        return client.generate([5, 6, 7], timeout_s=10, **options).result()


def test_events_in_order_and_result():
    with FakeRouter(echo) as router, sluice.Client(router.address) as client:
        stream = client.generate([5, 6, 7], max_tokens=3)
        events = list(stream)
        assert [e.tokens for e in events] == [(5,), (6,), (7,)]
        assert [e.finish_reason for e in events] == [None, None, "length"]
        result = stream.result()
        assert (result.tokens, result.finish_reason) == ([5, 6, 7], "length")
        assert result.logprobs is None and result.prompt_logprobs is None
        assert 0 < result.timings.ttft_s <= result.timings.e2e_s
        assert result.timings.count == 3


def test_only_given_sampling_fields_travel():
    with FakeRouter(echo) as router, sluice.Client(router.address) as client:
        client.generate([1], temperature=0.5, stop_token_ids=(3, 4), ignore_eos=True).result()
        sent = [m for m in router.received if m["type"] == "generate"][0]
        assert sent["temperature"] == 0.5 and sent["stop_token_ids"] == [3, 4]
        assert sent["ignore_eos"] is True
        assert set(sent) == {"v", "type", "id", "tokens", "temperature", "stop_token_ids",
                             "ignore_eos"}


def test_sampling_given_twice_is_refused():
    with FakeRouter(echo) as router, sluice.Client(router.address) as client:
        with pytest.raises(TypeError, match="max_tokens"):
            client.generate([1], sluice.SamplingParams(), max_tokens=1)
        with pytest.raises(TypeError, match="temprature"):
            client.generate([1], temprature=1)


def test_logprobs_reach_the_result():
    def script(router, peer, message):
        entries = [[None, []], [-1.5, [[9, -0.5], [6, -1.5]]]]
        router.send(peer, "prompt_logprobs", id=message["id"], seq=0, index=0, entries=entries)
        router.tokens(peer, message["id"], 1, 0, [8, 9], "stop",
                      logprobs=[[-0.25, [[8, -0.25]]], [float("nan"), []]])
    result = run_one(script, logprobs=1, prompt_logprobs=2)
    assert [e.logprob for e in result.prompt_logprobs] == [None, -1.5]
    assert result.prompt_logprobs[1].top == ((9, -0.5), (6, -1.5))
    assert [e.logprob for e in result.logprobs] == [-0.25, None]


@pytest.mark.parametrize("seqs, indices, text", [
    ([0, 2], [0, 1], "events lost: tokens has seq 2, 1 expected"),
    ([0, 0], [0, 1], "events repeated: tokens has seq 0, 1 expected"),
    ([1], [0], "events lost: tokens has seq 1, 0 expected"),
    ([0, 1], [0, 2], "tokens from position 2, 1 expected"),
    ([0, 1], [0, 0], "tokens from position 0, 1 expected"),
])
def test_gaps_and_repeats_raise(seqs, indices, text):
    def script(router, peer, message):
        for seq, index in zip(seqs, indices):
            router.tokens(peer, message["id"], seq, index, [1])
    with pytest.raises(sluice.ProtocolError, match=text):
        run_one(script)


@pytest.mark.parametrize("fields, text", [
    ({"tokens": []}, "at least one"),
    ({"tokens": "abc"}, "list expected"),
    ({"index": None}, "index is None"),
    ({"finish_reason": "tired"}, "tired"),
    ({"logprobs": [[-1.0, []]]}, "1 logprobs for 1 tokens, asked for: False"),
])
def test_wrong_fields_raise(fields, text):
    def script(router, peer, message):
        good = {"id": message["id"], "seq": 0, "index": 0, "tokens": [1], "finish_reason": ""}
        router.send(peer, "tokens", **(good | fields))
    with pytest.raises(sluice.ProtocolError, match=text):
        run_one(script)


def test_failed_is_request_error_with_code():
    def script(router, peer, message):
        router.tokens(peer, message["id"], 0, 0, [1])
        router.send(peer, "failed", id=message["id"], seq=1, code="unreachable",
                    message="decode/0/1 is lost")
    with pytest.raises(sluice.RequestError) as caught:
        run_one(script)
    assert caught.value.code == "unreachable"
    assert caught.value.message == "decode/0/1 is lost"


def test_unattributed_errors_are_kept_and_disturb_nothing():
    def script(router, peer, message):
        if message["type"] == "generate":
            router.send(peer, "failed", id="", seq=0, code="invalid", message="not msgpack")
            router.send_bytes(peer, b"\xdd\xff\x00\x00\x00")
            router.tokens(peer, "nobody", 0, 0, [1])
            echo(router, peer, message)
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        assert client.generate([4, 5]).result().tokens == [4, 5]
        kinds = [type(e) for e in client.unattributed]
        assert kinds == [sluice.RequestError, sluice.ProtocolError, sluice.ProtocolError]


def test_many_streams_interleaved_from_many_threads():
    """The router holds all prompts back, then answers token by token across all of them."""
    held = []

    def script(router, peer, message):
        held.append((peer, message))
        if len(held) == 40:
            for i in range(5):
                for who, m in held:
                    router.tokens(who, m["id"], i, i, [m["tokens"][i]], "length" if i == 4 else "")
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        results = {}

        def ask(n):
            prompt = [n, n + 1, n + 2, n + 3, n + 4]
            results[n] = client.generate(prompt, timeout_s=20).result()
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(results[n].tokens == list(range(n, n + 5)) for n in range(40))
        assert len({r.id for r in results.values()}) == 40
        assert client.unattributed == []


def test_cancel_is_sent_and_ends_the_stream():
    def script(router, peer, message):
        if message["type"] == "generate":
            router.tokens(peer, message["id"], 0, 0, [1])
        elif message["type"] == "cancel":
            router.send(peer, "failed", id=message["id"], seq=1, code="canceled", message="asked")
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        stream = client.generate([1])
        assert next(stream).tokens == (1,)
        stream.cancel()
        with pytest.raises(sluice.RequestError) as caught:
            next(stream)
        assert caught.value.code == "canceled"
        with pytest.raises(sluice.RequestError):  # an ended stream stays ended
            next(stream)


def broken_stream(canceled):
    """A script: a gap in the events, then more of them; the cancel's answer, and one more."""
    def script(router, peer, message):
        if message["type"] == "generate" and message["tokens"] == [1]:
            for seq, index in ((0, 0), (2, 2), (3, 3)):
                router.tokens(peer, message["id"], seq, index, [1])
        elif message["type"] == "cancel":
            canceled.append(message["id"])
            router.tokens(peer, message["id"], 4, 4, [1])
            router.send(peer, "failed", id=message["id"], seq=5, code="canceled", message="asked")
        else:
            echo(router, peer, message)
    return script


def test_a_broken_stream_is_canceled():
    canceled = []
    with FakeRouter(broken_stream(canceled)) as router, sluice.Client(router.address) as client:
        stream = client.generate([1], request_id="broken", timeout_s=10)
        with stream, pytest.raises(sluice.ProtocolError, match="lost"):
            stream.result()
        stream.cancel()  # has ended: no second one
        assert client.generate([3], timeout_s=10).result().tokens == [3]
        assert canceled == ["broken"] and client.unattributed == []
        # The router has ended it by now, so its id is free.
        assert client.generate([4], request_id="broken", timeout_s=10).result().tokens == [4]


def test_a_wrong_failed_needs_no_cancel():
    def script(router, peer, message):
        if message.get("tokens") == [1]:
            router.send(peer, "failed", id=message["id"], seq=0, code=7, message="")
        else:
            echo(router, peer, message)
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        with pytest.raises(sluice.ProtocolError):
            client.generate([1], timeout_s=10).result()
        assert client.generate([3], timeout_s=10).result().tokens == [3]
        assert [m["type"] for m in router.received] == ["info", "generate", "generate"]


def test_leaving_a_refused_duplicate_spares_the_first():
    with FakeRouter() as router, sluice.Client(router.address) as client:
        client.generate([1], request_id="same")
        with client.generate([1], request_id="same") as second:
            with pytest.raises(sluice.SluiceError):
                next(second)
        with client.generate([1], request_id="same"):
            client.info()  # the refusal has come, unread
        client.info()
        assert "cancel" not in [m["type"] for m in router.received]


def test_leaving_the_block_early_cancels():
    cancels = threading.Event()

    def script(router, peer, message):
        if message["type"] == "generate":
            router.tokens(peer, message["id"], 0, 0, [1])
        elif message["type"] == "cancel":
            cancels.set()
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        with client.generate([1]) as stream:
            next(stream)
        assert cancels.wait(10)


def test_request_timeout_cancels():
    cancels = threading.Event()

    def script(_router, _peer, message):
        if message["type"] == "cancel":
            cancels.set()
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        with pytest.raises(sluice.RequestTimeout, match="canceled"):
            client.generate([1], timeout_s=0.2).result()
        assert cancels.wait(10)


def test_connect_timeout_names_the_address():
    with pytest.raises(sluice.ConnectTimeout, match="tcp://127.0.0.1:1 within 0.2 s"):
        sluice.Client("tcp://127.0.0.1:1", connect_timeout_s=0.2)


def test_wrong_address_is_value_error():
    with pytest.raises(ValueError, match="nonsense"):
        sluice.Client("nonsense")


def test_router_that_goes_away_fails_open_streams_and_reconnects():
    router = FakeRouter()
    client = sluice.Client(router.address)
    with client:
        stream = client.generate([1])
        port = router.port
        router.close()
        with pytest.raises(sluice.ConnectionLost):
            next(stream)
        with FakeRouter(echo, port=port):
            assert client.generate([3], timeout_s=20).result().tokens == [3]


def test_duplicate_request_id_is_refused_locally():
    with FakeRouter() as router, sluice.Client(router.address) as client:
        client.generate([1], request_id="same")
        with pytest.raises(sluice.SluiceError, match="same.*in use"):
            client.generate([1], request_id="same").result()


def test_status_and_info_are_typed():
    def script(router, peer, message):
        router.send(peer, "status_reply", **STATUS)
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        status = client.status()
        assert status.requests_refused == 6
        assert status.ranks[0].name == "prefill/0/0" and status.ranks[0].incarnation == 7
        assert client.info().vocab_size == 256


def test_status_with_a_missing_field_raises():
    def script(router, peer, message):
        router.send(peer, "status_reply", **(STATUS | {"ranks": [rank_entry(tp=None)]}))
    with FakeRouter(script) as router, sluice.Client(router.address) as client:
        with pytest.raises(sluice.ProtocolError, match="field tp is None, int expected"):
            client.status()


def test_close_ends_open_streams():
    with FakeRouter() as router:
        client = sluice.Client(router.address)
        stream = client.generate([1])
        client.close()
        client.close()
        with pytest.raises(sluice.ConnectionLost, match="closed"):
            next(stream)
        with pytest.raises(sluice.ConnectionLost):
            client.generate([1])


def test_close_amid_traffic():
    """Closing races with arriving tokens and with the router's end; it must never hang."""
    for n in range(60):
        router = FakeRouter(echo)
        client = sluice.Client(router.address)
        streams = [client.generate([1, 2, 3]) for _ in range(8)]
        first, second = (router, client) if n % 2 else (client, router)
        first.close()
        second.close()
        for stream in streams:
            try:
                assert stream.result().tokens == [1, 2, 3]
            except sluice.ConnectionLost:
                pass


def test_a_mistake_in_the_io_thread_is_told(monkeypatch):
    def broken(*_):
        raise RuntimeError("planted")
    with FakeRouter(echo) as router, sluice.Client(router.address) as client:
        monkeypatch.setattr(client._mux, "receive", broken)
        with pytest.raises(sluice.ConnectionLost, match="planted"):
            client.generate([1]).result()
        with pytest.raises(sluice.ConnectionLost):
            client.generate([1])


def test_raw_connection_takes_any_bytes():
    def script(router, peer, message):
        router.send(peer, "failed", id="x", seq=0, code="invalid", message=str(message["type"]))
    with FakeRouter(script) as router, sluice.RawConnection(router.address) as raw:
        raw.send(b"\x82\xa1v\x02\xa4type\xa3abc")
        assert raw.receive()["message"] == "abc"
        with pytest.raises(sluice.RequestTimeout):
            raw.receive(0.05)


@pytest.mark.asyncio
async def test_async_streams_interleave():
    with FakeRouter(echo) as router:
        async with sluice.AsyncClient(router.address) as client:
            async def ask(n):
                stream = await client.generate([n, n + 1], timeout_s=20)
                return [e.tokens[0] async for e in stream], await stream.result()
            answers = await asyncio.gather(*[ask(n) for n in range(30)])
            assert [tokens for tokens, _ in answers] == [[n, n + 1] for n in range(30)]
            assert all(result.finish_reason == "length" for _, result in answers)
            assert client.unattributed == []


@pytest.mark.asyncio
async def test_async_errors():
    def script(router, peer, message):
        if message["type"] == "cancel":
            router.send(peer, "failed", id=message["id"], seq=0, code="canceled", message="asked")
    with FakeRouter(script) as router:
        async with sluice.AsyncClient(router.address) as client:
            async with await client.generate([1]) as stream:
                await stream.cancel()
                with pytest.raises(sluice.RequestError, match="canceled"):
                    await stream.result()
            with pytest.raises(sluice.RequestTimeout):
                await (await client.generate([1], timeout_s=0.1)).result()
            with pytest.raises(sluice.RequestTimeout):
                await client.status(timeout_s=0.1)
    with pytest.raises(sluice.ConnectTimeout):
        await sluice.AsyncClient("tcp://127.0.0.1:1", connect_timeout_s=0.1).connect()


@pytest.mark.asyncio
async def test_async_router_that_goes_away():
    router = FakeRouter()
    async with sluice.AsyncClient(router.address) as client:
        stream = await client.generate([1])
        await asyncio.get_running_loop().run_in_executor(None, router.close)
        with pytest.raises(sluice.ConnectionLost):
            await stream.result()


@contextlib.asynccontextmanager
async def without_router():
    """(client, port) of a client whose router has just gone away, and may come back."""
    router = FakeRouter()
    async with sluice.AsyncClient(router.address) as client:
        stream = await client.generate([0])
        await asyncio.to_thread(router.close)
        with pytest.raises(sluice.ConnectionLost):
            await stream.result()
        yield client, router.port


async def prompts_seen_on_return(client, port):
    """What a new router gets, up to a prompt of [3] that it answers."""
    with FakeRouter(echo, port=port) as router:
        stream = await client.generate([3], timeout_s=20)
        assert (await stream.result()).tokens == [3]
        assert client.unattributed == []
        return [m.get("tokens", m["type"]) for m in router.received]


@pytest.mark.asyncio
async def test_async_without_a_router_times_out_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(sluice.aio, "SEND_TIMEOUT_S", 0.1)
    async with without_router() as (client, port):
        for options in ({"timeout_s": 0.05}, {}):
            with pytest.raises(sluice.RequestTimeout, match="nothing could be sent"):
                await client.generate([1], **options)
        with pytest.raises(sluice.RequestTimeout):
            await client.send_raw(b"x")
        with pytest.raises(sluice.RequestTimeout):
            await client.info(timeout_s=0.05)
        assert client._mux.open_count == 0
        assert await prompts_seen_on_return(client, port) == [[3]]


@pytest.mark.asyncio
async def test_async_question_after_one_that_was_never_sent():
    async with without_router() as (client, port):
        with pytest.raises(sluice.RequestTimeout):
            await client.info(timeout_s=0.05)
        with FakeRouter(port=port):
            assert (await client.info(timeout_s=20)).vocab_size == 256


@pytest.mark.asyncio
async def test_async_canceled_while_waiting_for_a_link():
    async with without_router() as (client, port):
        task = asyncio.create_task(client.generate([1], timeout_s=20))
        await asyncio.sleep(0)  # it runs up to its wait
        assert client._mux.open_count == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client._mux.open_count == 0
        assert await prompts_seen_on_return(client, port) == [[3]]


@pytest.mark.asyncio
async def test_async_disconnect_takes_unsent_frames_back():
    """A link that breaks before it was usable: what waited for it must not go out on the next."""
    async with without_router() as (client, port):
        waiting = asyncio.create_task(client.generate([1], timeout_s=20))
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.settimeout(20)
            link, _ = await asyncio.to_thread(listener.accept)
            link.close()
            with pytest.raises(sluice.ConnectionLost):
                await waiting
        assert await prompts_seen_on_return(client, port) == [[3]]


@pytest.mark.asyncio
async def test_async_close_ends_a_waiting_send():
    async with without_router() as (client, _):
        waiting = asyncio.create_task(client.generate([1], timeout_s=20))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(sluice.ConnectionLost):
            await waiting
        with pytest.raises(sluice.ConnectionLost):
            await client.generate([1])


@pytest.mark.asyncio
async def test_async_broken_stream_is_canceled():
    canceled = []
    with FakeRouter(broken_stream(canceled)) as router:
        async with sluice.AsyncClient(router.address) as client:
            async with await client.generate([1], request_id="broken", timeout_s=10) as stream:
                with pytest.raises(sluice.ProtocolError, match="lost"):
                    await stream.result()
            assert (await (await client.generate([3], timeout_s=10)).result()).tokens == [3]
            assert canceled == ["broken"] and client.unattributed == []


@pytest.mark.asyncio
async def test_async_reading_lets_others_run_between_batches(monkeypatch):
    """All frames are there before the first is read; the consumer is not kept to the end."""
    batch, count = 8, 400
    monkeypatch.setattr(sluice.aio, "DRAIN_FRAMES", batch)
    sent = threading.Event()

    def script(router, peer, message):
        for i in range(count):
            router.tokens(peer, message["id"], i, i, [i % 256], "length" if i == count - 1 else "")
        sent.set()
    with FakeRouter(script) as router:
        async with sluice.AsyncClient(router.address) as client:
            stream = await client.generate([1], timeout_s=20)
            assert sent.wait(20)  # the loop stands still meanwhile
            behind = []
            async for _ in stream:
                behind.append(stream._events.qsize())
            assert len(behind) == count and max(behind) < count / 4


@pytest.mark.asyncio
async def test_async_mistake_of_ours_is_told_to_all(monkeypatch):
    """Whoever waits hears of it at once, and so does whoever asks later."""
    with FakeRouter(echo) as router:
        async with sluice.AsyncClient(router.address) as client:
            def break_down(*_):
                raise ZeroDivisionError("of the test")
            monkeypatch.setattr(client._mux, "receive", break_down)
            stream = await client.generate([5, 6, 7], max_tokens=3)
            with pytest.raises(sluice.ConnectionLost, match="ZeroDivisionError.*of the test"):
                await stream.result()
            with pytest.raises(sluice.ConnectionLost, match="ZeroDivisionError.*of the test"):
                await client.status()
