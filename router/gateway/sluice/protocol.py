"""The client's side of the wire: dicts to msgpack frames and back, and typed replies.

One frame is one msgpack map with "v", "type" and the fields of the message; see
router/PROTOCOL.md. Nothing here touches a socket.
"""
import dataclasses
import math

import msgpack

from .errors import ProtocolError

VERSION = 2
REQUEST_ID_BYTES = 63
# A reply holds at most one array per token or rank; this bounds what a broken peer can cost.
FRAME_BYTES_MAX = 256 << 20


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. None: the router's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def to_wire(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields = {name: value for name, value in fields.items() if value is not None}
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = list(fields["stop_token_ids"])
        return fields


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural logs of the model's own softmax: of the token itself and of the best tokens."""

    logprob: float | None  # None for the first prompt token, which has no prefix
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Info:
    """What a client must know to check a request itself; zeros while no rank has registered."""

    model: str
    vocab_size: int
    max_model_len: int
    max_prompt_len: int
    tokenizer_path: str


@dataclasses.dataclass(frozen=True)
class RankStatus:
    pool: str
    group: int
    rank: int
    incarnation: int
    tp: int
    state: str
    pages_total: int
    pages_free: int
    pages_quiescing: int
    running: int
    queued_tokens: int
    progress: int
    tokens_out: int
    heartbeat_age_ms: int

    @property
    def name(self):
        return f"{self.pool}/{self.group}/{self.rank}"


@dataclasses.dataclass(frozen=True)
class Status:
    model: str
    uptime_ms: int
    requests_waiting: int
    requests_running: int
    requests_finished: int
    requests_failed: int
    requests_canceled: int
    requests_refused: int
    ranks: tuple[RankStatus, ...]


def encode(kind, **fields):
    """One frame. float32 fields of the wire accept a msgpack double or integer."""
    return msgpack.packb({"v": VERSION, "type": kind, **fields}, use_bin_type=True)


def generate_frame(request_id, tokens, sampling):
    return encode("generate", id=request_id, tokens=[int(t) for t in tokens], **sampling.to_wire())


def cancel_frame(request_id):
    return encode("cancel", id=request_id)


def decode(frame):
    """A frame from the router as a dict with a known version and a "type"."""
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {len(frame)} bytes, at most {FRAME_BYTES_MAX} expected")
    try:
        message = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except Exception as error:
        raise ProtocolError(f"frame of {len(frame)} bytes is not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"frame is a {type(message).__name__}, a map was expected")
    if message.get("v") != VERSION:
        raise ProtocolError(f"protocol version {message.get('v')!r}, {VERSION} expected")
    if not isinstance(message.get("type"), str):
        raise ProtocolError(f"message type is {message.get('type')!r}, a string was expected")
    return message


def field(message, name, kind):
    """A required field of the given Python type; bool is no int here."""
    value = message.get(name)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if not isinstance(value, kind) or wrong_bool:
        raise ProtocolError(f"{message['type']}: field {name} is {value!r}, "
                            f"{kind.__name__} expected")
    return value


def token_list(message):
    tokens = field(message, "tokens", list)
    if not tokens or not all(isinstance(t, int) and t >= 0 for t in tokens):
        raise ProtocolError(f"{message['type']}: tokens must be ids, at least one: {tokens!r:.80}")
    return tokens


def _one_logprobs(entry):
    try:
        logprob, top = entry
        if logprob is not None and math.isnan(logprob):
            logprob = None
        return Logprobs(logprob, tuple((int(i), float(p)) for i, p in top))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"logprobs entry {entry!r:.80}: [number or nil, [[id, number], ...]] "
                            "expected") from error


def logprobs_list(entries):
    return [_one_logprobs(entry) for entry in entries]


def _typed(cls, source, kind):
    """A reply dataclass out of a map, with every field checked."""
    values = {}
    for f in dataclasses.fields(cls):
        if f.name not in source:
            raise ProtocolError(f"{kind}: field {f.name} is missing")
        if not isinstance(source[f.name], f.type) or isinstance(source[f.name], bool):
            raise ProtocolError(f"{kind}: field {f.name} is {source[f.name]!r}, "
                                f"{f.type.__name__} expected")
        values[f.name] = source[f.name]
    return cls(**values)


def parse_info(message):
    return _typed(Info, message, "info_reply")


def parse_status(message):
    ranks = []
    for entry in field(message, "ranks", list):
        if not isinstance(entry, dict) or not isinstance(entry.get("rank"), dict):
            raise ProtocolError(f"status_reply: rank entry {entry!r:.80}, a map expected")
        ranks.append(_typed(RankStatus, entry | entry["rank"], "status_reply"))
    names = [f.name for f in dataclasses.fields(Status) if f.name not in ("ranks", "model")]
    numbers = {name: field(message, name, int) for name in names}
    return Status(model=field(message, "model", str), ranks=tuple(ranks), **numbers)
