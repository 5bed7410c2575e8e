"""The asyncio client: the same calls as client.Client, as coroutines of one event loop."""
import asyncio
import collections
import time

import zmq
import zmq.asyncio

from . import mux, protocol
from .connection import is_disconnect, open_dealer
from .errors import ConnectionLost, ConnectTimeout, RequestTimeout, SluiceError


class AsyncStream:
    """Events of one request, in order; `async for` once. Leaving `async with` early cancels it."""

    def __init__(self, client, request, timeout_s):
        self._client = client
        self._request = request
        self._events = asyncio.Queue()
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._done = False
        self._error = None

    @property
    def id(self):
        return self._request.id

    @property
    def timings(self):
        return self._request.timings

    @property
    def finish_reason(self):
        return self._request.finish_reason

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._error is not None:
            raise self._error
        if self._done:
            raise StopAsyncIteration
        event = await self._next_event()
        if isinstance(event, SluiceError):
            self._error = event
            raise event
        self._done = getattr(event, "finish_reason", None) is not None
        return event

    async def _next_event(self):
        if self._deadline_s is None or not self._events.empty():
            return await self._events.get()
        try:
            left_s = max(0.0, self._deadline_s - time.monotonic())
            return await asyncio.wait_for(self._events.get(), left_s)
        except asyncio.TimeoutError:
            await self.cancel()
            return RequestTimeout(f"request {self.id}: not finished in time, canceled")

    async def result(self):
        """Reads the rest of the stream; returns the whole result or raises what ended it."""
        async for _ in self:
            pass
        return self._request.result()

    async def cancel(self):
        await self._client.cancel(self.id)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        if not self._done and self._error is None:
            await self.cancel()


class AsyncClient:
    """`async with AsyncClient(address) as client`. See client.Client for what the calls do."""

    def __init__(self, address, connect_timeout_s=10.0):
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._ids = mux.IdSource()
        self._mux = mux.Mux()
        self._context = None
        self._tasks = []

    async def connect(self):
        self._context = zmq.asyncio.Context()
        try:
            self._socket, self._monitor = open_dealer(self._context, self.address)
        except zmq.ZMQError as error:
            self._context.term()
            self._context = None
            raise ValueError(f"router address {self.address!r}: {error}") from error
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch_link())]
        try:
            await self.info(self._connect_timeout_s)
        except RequestTimeout as error:
            await self.close()
            raise ConnectTimeout(f"no router answered at {self.address} within "
                                 f"{self._connect_timeout_s} s") from error
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def unattributed(self):
        return list(self._mux.unattributed)

    async def generate(self, tokens, sampling=None, *, request_id=None, timeout_s=None, **options):
        """Starts a request and returns its AsyncStream."""
        sampling = mux.sampling_of(sampling, options)
        request = mux.new_request(self._ids, sampling, request_id)
        stream = AsyncStream(self, request, timeout_s)
        self._mux.open(request, stream._events.put_nowait)
        await self._send(protocol.generate_frame(request.id, tokens, sampling))
        return stream

    async def cancel(self, request_id):
        await self._send(protocol.encode("cancel", id=request_id))

    async def status(self, timeout_s=10.0):
        return await self._ask("status", timeout_s)

    async def info(self, timeout_s=10.0):
        return await self._ask("info", timeout_s)

    async def send_raw(self, frame):
        await self._send(frame)

    async def close(self):
        if self._context is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mux.fail_all(ConnectionLost(f"the client of {self.address} was closed"))
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        self._context = None

    async def __aenter__(self):
        return await self.connect()

    async def __aexit__(self, *_):
        await self.close()

    async def _send(self, frame):
        if self._context is None:
            raise ConnectionLost(f"the client of {self.address} is not connected")
        await self._socket.send(frame)

    async def _ask(self, kind, timeout_s):
        answer = asyncio.get_running_loop().create_future()

        def deliver(value):
            if not answer.done():
                answer.set_result(value)
        self._mux.ask(kind + "_reply", deliver)

        async def send_and_wait():
            await self._send(protocol.encode(kind))
            return await answer
        try:
            value = await asyncio.wait_for(send_and_wait(), timeout_s)
        except asyncio.TimeoutError:
            raise RequestTimeout(f"no {kind} from {self.address} within {timeout_s} s") from None
        if isinstance(value, SluiceError):
            raise value
        return value

    async def _read(self):
        while True:
            frames = await self._socket.recv_multipart()
            self._mux.receive(b"".join(frames), time.monotonic())

    def _drain_now(self):
        """Reads what has already arrived, past the asyncio wrapper."""
        plain = zmq.Socket.shadow(self._socket.underlying)
        frames = collections.deque()
        while True:
            try:
                frames.append(plain.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        for parts in frames:
            self._mux.receive(b"".join(parts), time.monotonic())

    async def _watch_link(self):
        while True:
            if is_disconnect(await self._monitor.recv_multipart()):
                self._drain_now()
                self._mux.fail_all(ConnectionLost(f"connection to {self.address} was lost"))
