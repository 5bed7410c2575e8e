"""Many requests over one connection, without the connection: bookkeeping both clients share.

A client hands every received frame to `Mux.receive` and every outgoing one comes from here.
Waiters are told through callables, so that threads and asyncio can each bring their own:
`deliver(event_or_exception)`. Used by one thread at a time (the client's I/O thread or loop).
"""
import collections
import os
import threading

from . import protocol
from .errors import ProtocolError, RequestError, SluiceError
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


class Mux:
    def __init__(self):
        self._open = {}  # request id -> (Request, deliver)
        self._questions = {"status_reply": collections.deque(), "info_reply": collections.deque()}
        # What the router sent that belongs to no open request; errors, newest last.
        self.unattributed = collections.deque(maxlen=UNATTRIBUTED_MAX)

    def open(self, request, deliver):
        if request.id in self._open:
            raise ValueError(f"request id {request.id!r} is in use on this connection")
        self._open[request.id] = (request, deliver)

    def ask(self, reply_type, deliver):
        """Replies of one type come in the order of their questions."""
        self._questions[reply_type].append(deliver)

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
        deliver(event)

    def fail_all(self, error):
        """Tells every waiter; nothing is open afterwards."""
        waiting = [deliver for _, deliver in self._open.values()]
        for questions in self._questions.values():
            waiting += questions
            questions.clear()
        self._open.clear()
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
