"""The blocking client. One I/O thread owns the socket; any number of threads may call.

Calls put work on a queue and ring the I/O thread through an inproc socket pair; the I/O thread
stamps arrivals and puts events on the queue of the stream they belong to. So a slow reader of one
stream delays no other stream and no timing.
"""
import collections
import queue
import threading
import time

import zmq

from . import mux, protocol
from .connection import is_disconnect, open_dealer
from .errors import ConnectionLost, ConnectTimeout, RequestTimeout, SluiceError


class Stream(mux.StreamBase):
    """Events of one request, in order; iterate once. Leaving a `with` block early cancels it."""

    def __init__(self, client, request, timeout_s):
        super().__init__(client, request, queue.SimpleQueue(), timeout_s)

    def __iter__(self):
        return self

    def __next__(self):
        if self._ended:
            raise StopIteration
        return self._take(self._next_event())

    def _next_event(self):
        if self._deadline_s is None:
            return self._events.get()
        try:
            return self._events.get(timeout=self._left_s())
        except queue.Empty:
            self.cancel()
            return self._timed_out()

    def result(self):
        """Reads the rest of the stream; returns the whole result or raises what ended it."""
        for _ in self:
            pass
        return self._request.result()

    def cancel(self):
        """Asks the router to give the request up. The stream then ends with code "canceled",
        unless its last token was already on the way. Nothing is sent where it has ended."""
        if not self._request.closed:
            self._client.cancel(self.id)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._left_early:
            self.cancel()


class Client:
    """A connection to one router. Raises ConnectTimeout if none answers at the address.

    `unattributed` holds errors that belong to no open request, newest last.
    """

    def __init__(self, address, connect_timeout_s=10.0):
        self.address = address
        self._ids = mux.IdSource()
        self._unsent = collections.deque()  # frames, of the I/O thread
        self._mux = mux.Mux(lambda name: self._unsent.append(protocol.cancel_frame(name)))
        self._commands = collections.deque()
        self._context = zmq.Context()
        self._closing = False  # no more commands; the I/O thread ends or has ended
        self._closed = False   # close() was called
        try:
            self._socket, self._monitor = open_dealer(self._context, address)
        except zmq.ZMQError as error:
            self._context.term()
            raise ValueError(f"router address {address!r}: {error}") from error
        self._bell_in = self._context.socket(zmq.PAIR)
        self._bell_in.bind("inproc://bell")
        self._bell_out = self._context.socket(zmq.PAIR)
        self._bell_out.connect("inproc://bell")
        self._bell_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sluice-client", daemon=True)
        self._thread.start()
        self._greet(connect_timeout_s)

    def _greet(self, timeout_s):
        try:
            self.info(timeout_s)
        except RequestTimeout as error:
            self.close()
            raise ConnectTimeout(f"no router answered at {self.address} within {timeout_s} s") \
                from error
        except BaseException:
            self.close()
            raise

    @property
    def unattributed(self):
        return list(self._mux.unattributed)

    def generate(self, tokens, sampling=None, *, request_id=None, timeout_s=None, **options):
        """Starts a request and returns its Stream. `tokens` are prompt token ids; `options` are the
        fields of SamplingParams. After `timeout_s` the request is canceled."""
        sampling = mux.sampling_of(sampling, options)
        request = mux.new_request(self._ids, sampling, request_id)
        frame = protocol.generate_frame(request.id, tokens, sampling)
        stream = Stream(self, request, timeout_s)

        def start():
            try:
                self._mux.open(request, stream._events.put)
            except ValueError as error:
                request.closed = True  # a cancel would hit the other one
                stream._events.put(SluiceError(str(error)))
                return None
            return frame
        self._submit(start)
        return stream

    def cancel(self, request_id):
        self._submit(lambda: protocol.cancel_frame(request_id))

    def status(self, timeout_s=10.0):
        return self._ask("status", timeout_s)

    def info(self, timeout_s=10.0):
        return self._ask("info", timeout_s)

    def send_raw(self, frame):
        """Sends any bytes as one frame; what comes back is in `unattributed`, or in a stream."""
        self._submit(lambda: frame)

    def close(self):
        """Closes the socket at once; open streams end with ConnectionLost. Idempotent."""
        with self._bell_lock:
            if self._closed:
                return
            self._closed = self._closing = True
            self._ring()
        self._thread.join()
        self._bell_out.close(0)
        self._context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _ask(self, kind, timeout_s):
        answers = queue.SimpleQueue()

        def start():
            self._mux.ask(kind + "_reply", answers.put)
            return protocol.encode(kind)
        self._submit(start)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RequestTimeout(f"no {kind} from {self.address} within {timeout_s} s") from None
        if isinstance(answer, SluiceError):
            raise answer
        return answer

    def _submit(self, command):
        """Runs command() on the I/O thread; the frame it returns, if any, is sent."""
        with self._bell_lock:
            if self._closing:
                raise ConnectionLost(f"the client of {self.address} is closed")
            self._commands.append(command)
            self._ring()

    def _ring(self):
        """Wakes the I/O thread. Never blocks: where the pipe is full a ring is under way already,
        and where its other end is closed the thread has seen `_closing` by itself."""
        try:
            self._bell_out.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            pass

    # ---- I/O thread ----

    def _run(self):
        why = "was closed"
        try:
            self._loop()
        except Exception as error:  # a mistake of ours: whoever waits must still be told
            why = f"failed: {error!r}"
        with self._bell_lock:
            self._closing = True
        self._take_commands()  # none can follow: _submit() looks at _closing
        self._flush()
        self._mux.fail_all(ConnectionLost(f"the client of {self.address} {why}"))
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._bell_in.close(0)

    def _loop(self):
        poller = zmq.Poller()
        for socket in (self._socket, self._bell_in, self._monitor):
            poller.register(socket, zmq.POLLIN)
        while not self._closing:
            poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))
            ready = dict(poller.poll())
            if self._monitor in ready:  # first: what it takes back must not be flushed
                self._watch_link()
            if self._bell_in in ready:
                self._take_commands()
            self._flush()
            if ready.get(self._socket, 0) & zmq.POLLIN:
                self._drain()

    def _take_commands(self):
        while self._bell_in.poll(0):
            self._bell_in.recv()
        while self._commands:
            frame = self._commands.popleft()()
            if frame is not None:
                self._unsent.append(frame)

    def _flush(self):
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _drain(self):
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._mux.receive(b"".join(frames), time.monotonic())

    def _watch_link(self):
        if is_disconnect(self._monitor.recv_multipart()):
            self._drain()  # what arrived before the link broke still counts
            self._unsent.clear()
            self._mux.fail_all(ConnectionLost(f"connection to {self.address} was lost"))
