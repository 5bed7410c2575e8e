"""The asyncio client: the same calls as client.Client, as coroutines of one event loop."""
import asyncio
import sys
import time

import zmq
import zmq.asyncio

from . import mux, protocol
from .connection import is_disconnect, open_dealer
from .errors import ConnectionLost, ConnectTimeout, RequestTimeout, SluiceError

DRAIN_FRAMES = 256     # frames read at most before others of the loop get their turn
SEND_TIMEOUT_S = 10.0  # what waiting for a link takes at most where the caller sets no time


class AsyncStream(mux.StreamBase):
    """Events of one request, in order; `async for` once. Leaving `async with` early cancels it."""

    def __init__(self, client, request, timeout_s):
        super().__init__(client, request, asyncio.Queue(), timeout_s)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._ended:
            raise StopAsyncIteration
        return self._take(await self._next_event())

    async def _next_event(self):
        if self._deadline_s is None or not self._events.empty():
            return await self._events.get()
        try:
            return await asyncio.wait_for(self._events.get(), self._left_s())
        except asyncio.TimeoutError:
            await self.cancel()
            return self._timed_out()

    async def result(self):
        """Reads the rest of the stream; returns the whole result or raises what ended it."""
        async for _ in self:
            pass
        return self._request.result()

    async def cancel(self):
        """As client.Stream.cancel. Does not wait."""
        if not self._request.closed:
            await self._client.cancel(self.id)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        if self._left_early:
            await self.cancel()


class AsyncClient:
    """`async with AsyncClient(address) as client`. See client.Client for what the calls do."""

    def __init__(self, address, connect_timeout_s=10.0):
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._ids = mux.IdSource()
        self._mux = mux.Mux(self._start_cancel)
        self._unsent = set()  # futures of frames that wait for the link
        self._context = None
        self._tasks = []
        self._failure = None  # why nothing is read any more

    async def connect(self):
        self._context = zmq.asyncio.Context()
        try:
            self._socket, self._monitor = open_dealer(self._context, self.address)
        except zmq.ZMQError as error:
            self._context.term()
            self._context = None
            raise ValueError(f"router address {self.address!r}: {error}") from error
        self._plain = zmq.Socket.shadow(self._socket.underlying)
        self._tasks = [asyncio.create_task(self._guard(work))
                       for work in (self._read(), self._watch_link())]
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
        """Starts a request and returns its AsyncStream. Waits for a link where there is none, for
        `timeout_s` or else SEND_TIMEOUT_S at most. Where it raises, the request does not run."""
        sampling = mux.sampling_of(sampling, options)
        request = mux.new_request(self._ids, sampling, request_id)
        frame = protocol.generate_frame(request.id, tokens, sampling)
        stream = AsyncStream(self, request, timeout_s)
        self._mux.open(request, stream._events.put_nowait)
        try:
            sent = self._start_send(frame)
            await self._settle(sent, SEND_TIMEOUT_S if timeout_s is None else timeout_s)
        except asyncio.CancelledError:
            never_sent = sent.cancelled() or request.closed
            (self._mux.forget if never_sent else self._mux.give_up)(request.id)
            raise
        except BaseException:
            self._mux.forget(request.id)
            raise
        return stream

    async def cancel(self, request_id):
        """Does not wait: where there is no link, the cancel goes out once there is one."""
        self._start_cancel(request_id)

    async def status(self, timeout_s=10.0):
        return await self._ask("status", timeout_s)

    async def info(self, timeout_s=10.0):
        return await self._ask("info", timeout_s)

    async def send_raw(self, frame):
        await self._settle(self._start_send(frame), SEND_TIMEOUT_S)

    async def close(self):
        if self._context is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._take_back_unsent()
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

    def _start_send(self, frame):
        """A future that is done once the frame is on its way: at once where the link is up and has
        room. Canceling it takes the frame back, which a disconnect does too."""
        if self._context is None:
            raise ConnectionLost(f"the client of {self.address} is not connected")
        if self._failure is not None:
            raise ConnectionLost(self._failure)
        sent = self._socket.send(frame)
        if not sent.done():
            self._unsent.add(sent)
            sent.add_done_callback(self._unsent.discard)
        return sent

    def _start_cancel(self, request_id):
        self._start_send(protocol.cancel_frame(request_id))

    async def _settle(self, sent, timeout_s):
        """Waits for a frame to be on its way. One that is not in time never will be."""
        late = False
        if not sent.done():
            try:
                await asyncio.wait([sent], timeout=timeout_s)
            finally:
                late = sent.cancel()
        if late:
            raise RequestTimeout(f"nothing could be sent to {self.address} within {timeout_s} s")
        if sent.cancelled():
            raise ConnectionLost(f"connection to {self.address} was lost, nothing was sent")
        sent.result()

    def _take_back_unsent(self):
        for sent in list(self._unsent):
            sent.cancel()

    async def _ask(self, kind, timeout_s):
        answer = asyncio.get_running_loop().create_future()

        def deliver(value):
            if not answer.done():
                answer.set_result(value)
        sent = self._start_send(protocol.encode(kind))
        self._mux.ask(kind + "_reply", deliver)
        try:
            await asyncio.wait([answer], timeout=timeout_s)
        finally:
            if sent.cancel():
                self._mux.unask(kind + "_reply", deliver)
        if not answer.done():
            raise RequestTimeout(f"no {kind} from {self.address} within {timeout_s} s")
        value = answer.result()
        if isinstance(value, SluiceError):
            raise value
        return value

    async def _guard(self, work):
        try:
            await work
        except Exception as error:  # a mistake of ours: whoever waits must still be told
            self._failure = f"the client of {self.address} failed: {error!r}"
            self._take_back_unsent()
            self._mux.fail_all(ConnectionLost(self._failure))

    async def _read(self):
        """Takes what has arrived by batches: waking costs more than a frame does."""
        while True:
            frames = await self._socket.recv_multipart()
            self._mux.receive(b"".join(frames), time.monotonic())
            self._drain(DRAIN_FRAMES)
            # Awaiting a frame that is there already does not yield.
            await asyncio.sleep(0)

    def _drain(self, frames_max=sys.maxsize):
        """Reads what has already arrived, past the asyncio wrapper."""
        for _ in range(frames_max):
            try:
                frames = self._plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._mux.receive(b"".join(frames), time.monotonic())

    async def _watch_link(self):
        while True:
            if is_disconnect(await self._monitor.recv_multipart()):
                self._drain()  # what arrived before the link broke still counts
                self._take_back_unsent()
                self._mux.fail_all(ConnectionLost(f"connection to {self.address} was lost"))
