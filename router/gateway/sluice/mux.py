"""Many requests over one connection, without the connection: bookkeeping both clients share.

A client hands every received frame to `Mux.receive` and every outgoing one comes from here.
Waiters are told through callables, so that threads and asyncio can each bring their own:
`deliver(event_or_exception)`. Used by one thread at a time (the client's I/O thread or loop).
"""
import collections
import os
import threading
import time

from . import protocol
from .errors import ProtocolError, RequestError, RequestTimeout, SluiceError
from .request import Request

UNATTRIBUTED_MAX = 64


class IdSource:
    """Request ids that no other client of the router draws: 64 random bits and a count."""

    def __init__(self):
        self._prefix = os.urandom(8).hex()
        self._count = 0
        self._lock = threading.Lock()

    def next(self):
        with self._lock:
            self._count += 1
            return f"{self._prefix}-{self._count}"


class StreamBase:
    """What both clients' streams know. `events` is the queue that the request is delivered to."""

    def __init__(self, client, request, events, timeout_s):
        self._client = client
        self._request = request
        self._events = events
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

    @property
    def _ended(self):
        """Nothing more will come. Raises again what ended the stream, if it was an error."""
        if self._error is not None:
            raise self._error
        return self._done

    @property
    def _left_early(self):
        return not self._done and self._error is None

    def _left_s(self):
        return max(0.0, self._deadline_s - time.monotonic())

    def _take(self, event):
        """The event that came next, raised if it is an error."""
        if isinstance(event, SluiceError):
            self._error = event
            raise event
        self._done = getattr(event, "finish_reason", None) is not None
        return event

    def _timed_out(self):
        return RequestTimeout(f"request {self.id}: not finished in time, canceled")


class Mux:
    """`send_cancel(request_id)` must not block; it is called by whoever calls into the mux."""

    def __init__(self, send_cancel):
        self._send_cancel = send_cancel
        self._open = {}  # request id -> (Request, deliver)
        self._given_up = set()  # ids that nobody waits for, until the router has ended them
        self._questions = {"status_reply": collections.deque(), "info_reply": collections.deque()}
        # What the router sent that belongs to no open request; errors, newest last.
        self.unattributed = collections.deque(maxlen=UNATTRIBUTED_MAX)

    def open(self, request, deliver):
        if request.id in self._open or request.id in self._given_up:
            raise ValueError(f"request id {request.id!r} is in use on this connection")
        self._open[request.id] = (request, deliver)

    def ask(self, reply_type, deliver):
        """Replies of one type come in the order of their questions."""
        self._questions[reply_type].append(deliver)

    def unask(self, reply_type, deliver):
        """Takes a question back that was never sent: no reply will come for it."""
        if deliver in self._questions[reply_type]:
            self._questions[reply_type].remove(deliver)

    def forget(self, request_id):
        """Of a request that was never sent."""
        self._open.pop(request_id, None)

    def give_up(self, request_id):
        """Has the router end a request that nobody waits for, and ignores what still comes."""
        self._open.pop(request_id, None)
        self._given_up.add(request_id)
        self._send_cancel(request_id)

    @property
    def open_count(self):
        return len(self._open)

    def receive(self, frame, received_s):
        try:
            message = protocol.decode(frame)
            kind = message["type"]
            if kind in self._questions:
                self._answer(kind, message)
            elif kind in ("tokens", "prompt_logprobs", "failed"):
                self._event(message, received_s)
            else:
                raise ProtocolError(f"unexpected message type {kind!r}")
        except SluiceError as error:
            self.unattributed.append(error)

    def _answer(self, kind, message):
        if not self._questions[kind]:
            raise ProtocolError(f"{kind} that nobody asked for")
        deliver = self._questions[kind].popleft()
        parse = protocol.parse_status if kind == "status_reply" else protocol.parse_info
        try:
            deliver(parse(message))
        except ProtocolError as error:
            deliver(error)

    def _event(self, message, received_s):
        request_id = protocol.field(message, "id", str)
        if request_id in self._given_up:
            if message["type"] == "failed":  # the answer to a cancel, whatever crossed it
                self._given_up.discard(request_id)
            return
        if request_id not in self._open:
            if message["type"] == "failed":
                raise RequestError(protocol.field(message, "code", str),
                                   protocol.field(message, "message", str), request_id)
            raise ProtocolError(f"{message['type']} for request {request_id!r}, which is not open")
        request, deliver = self._open[request_id]
        try:
            event = request.feed(message, received_s)
        except SluiceError as error:
            request.closed = True
            event = error
        if request.closed:
            del self._open[request_id]
        if isinstance(event, ProtocolError) and message["type"] != "failed":
            self.give_up(request_id)  # or it would run on at the router
        deliver(event)

    def fail_all(self, error):
        """Tells every waiter; nothing is open afterwards."""
        waiting = []
        for request, deliver in self._open.values():
            request.closed = True
            waiting.append(deliver)
        for questions in self._questions.values():
            waiting += questions
            questions.clear()
        self._open.clear()
        self._given_up.clear()
        for deliver in waiting:
            deliver(error)


def new_request(ids, sampling, request_id):
    wants = [value is not None and value >= 0
             for value in (sampling.logprobs, sampling.prompt_logprobs)]
    return Request(request_id or ids.next(), *wants)


def sampling_of(sampling, options):
    """generate(tokens, SamplingParams(...)) or generate(tokens, max_tokens=16, ...)."""
    if sampling is None:
        return protocol.SamplingParams(**options)
    if options:
        raise TypeError(f"give sampling or single options, not both: {', '.join(options)}")
    return sampling
