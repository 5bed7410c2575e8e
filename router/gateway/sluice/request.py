"""One request as the client sees it: checks the numbering of its events and collects them.

No socket and no thread: a client feeds decoded messages to `Request.feed`, which returns the event
to hand on, or raises ProtocolError (a gap, a repeat) or RequestError (`failed`).
"""
import dataclasses
import time

from . import protocol
from .errors import ProtocolError, RequestError


@dataclasses.dataclass(frozen=True)
class TokensEvent:
    """Some tokens, in order. `index` is the output position of tokens[0]."""

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[protocol.Logprobs, ...] | None
    finish_reason: str | None  # "stop" or "length" with the last tokens
    received_s: float          # time.monotonic() of arrival


@dataclasses.dataclass(frozen=True)
class PromptLogprobsEvent:
    """Logprobs of prompt tokens from position `index` on; they come before the first token."""

    index: int
    entries: tuple[protocol.Logprobs, ...]
    received_s: float


@dataclasses.dataclass
class Timings:
    """Times by the client's monotonic clock, in seconds. None: has not happened."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    count: int = 0

    @property
    def ttft_s(self):
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self):
        """Mean time of an output token after the first."""
        return None if self.count < 2 else (self.last_s - self.first_s) / (self.count - 1)

    @property
    def e2e_s(self):
        return None if self.last_s is None else self.last_s - self.sent_s

    @property
    def tokens_per_s(self):
        """Rate after the first token, as TPOT has it."""
        return None if not self.tpot_s else 1.0 / self.tpot_s


@dataclasses.dataclass
class Result:
    """A finished request."""

    id: str
    tokens: list[int]
    logprobs: list[protocol.Logprobs] | None
    prompt_logprobs: list[protocol.Logprobs] | None
    finish_reason: str
    timings: Timings


class Request:
    """Collects the events of one request. Used by one thread at a time."""

    def __init__(self, request_id, wants_logprobs=False, wants_prompt_logprobs=False):
        self.id = request_id
        self.timings = Timings(sent_s=time.monotonic())
        self.finish_reason = None
        self.closed = False
        self.tokens = []
        self.logprobs = [] if wants_logprobs else None
        self.prompt_logprobs = [] if wants_prompt_logprobs else None
        self._next_seq = 0

    def feed(self, message, received_s):
        """Takes one message of this request; returns its event."""
        kind = message["type"]
        seq = protocol.field(message, "seq", int)
        if seq != self._next_seq:
            word = "repeated" if seq < self._next_seq else "lost"
            self.closed = True
            raise ProtocolError(f"request {self.id}: events {word}: {kind} has seq {seq}, "
                                f"{self._next_seq} expected")
        self._next_seq += 1
        if kind == "tokens":
            return self._feed_tokens(message, received_s)
        if kind == "prompt_logprobs":
            return self._feed_prompt(message, received_s)
        self.closed = True
        raise RequestError(protocol.field(message, "code", str),
                           protocol.field(message, "message", str), self.id)

    def _feed_tokens(self, message, received_s):
        tokens = protocol.token_list(message)
        index = protocol.field(message, "index", int)
        if index != len(self.tokens):
            self.closed = True
            raise ProtocolError(f"request {self.id}: tokens from position {index}, "
                                f"{len(self.tokens)} expected")
        logprobs = self._event_logprobs(message, tokens)
        finish = message.get("finish_reason") or None
        if finish not in (None, "stop", "length"):
            raise ProtocolError(f"request {self.id}: finish_reason is {finish!r}, stop or length "
                                "expected")
        self.tokens += tokens
        self.timings.first_s = self.timings.first_s or received_s
        self.timings.last_s = received_s
        self.timings.count = len(self.tokens)
        self.finish_reason = finish
        self.closed = finish is not None
        return TokensEvent(index, tuple(tokens), logprobs, finish, received_s)

    def _event_logprobs(self, message, tokens):
        if message.get("logprobs") is None:
            if self.logprobs is not None:
                raise ProtocolError(f"request {self.id}: tokens came without their logprobs")
            return None
        logprobs = protocol.logprobs_list(protocol.field(message, "logprobs", list))
        if self.logprobs is None or len(logprobs) != len(tokens):
            raise ProtocolError(f"request {self.id}: {len(logprobs)} logprobs for {len(tokens)} "
                                f"tokens, asked for: {self.logprobs is not None}")
        self.logprobs += logprobs
        return tuple(logprobs)

    def _feed_prompt(self, message, received_s):
        entries = protocol.logprobs_list(protocol.field(message, "entries", list))
        index = protocol.field(message, "index", int)
        known = None if self.prompt_logprobs is None else len(self.prompt_logprobs)
        if self.tokens or index != known:
            self.closed = True
            raise ProtocolError(f"request {self.id}: prompt logprobs from position {index}, "
                                f"{known} expected, before any token")
        self.prompt_logprobs += entries
        return PromptLogprobsEvent(index, tuple(entries), received_s)

    def result(self):
        """Everything collected, once the last event has been fed."""
        return Result(self.id, self.tokens, self.logprobs, self.prompt_logprobs,
                      self.finish_reason, self.timings)
