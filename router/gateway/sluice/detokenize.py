"""Token ids to text while they stream: every character as soon as it is complete, never half of
one, and in the end exactly what decoding all ids at once gives.

A byte-level BPE token is a run of bytes that may begin or end amid a UTF-8 character, so tokens
are turned into bytes first and an incremental UTF-8 decoder holds what is incomplete. Bytes that
can never become a character turn into U+FFFD at once. Other tokenizers go through the
library's own stream, which re-decodes a few tokens back.
"""
import codecs
import json
import pathlib

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def byte_alphabet():
    """Byte-level BPE writes each byte as one printable character: printable Latin-1 as itself, the
    rest as the characters from U+0100 on, in byte order. Returns character -> byte."""
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    return table | {chr(0x100 + n): b for n, b in enumerate(others)}


def _is_byte_level(decoder):
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


class Detokenizer:
    """One stream of ids. push() returns the text that has become certain; finish() the rest."""

    def __init__(self, tokenizer, skip_special_tokens=True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._added = tokenizer.get_added_tokens_decoder()
        self._bytes = None
        if _is_byte_level(json.loads(tokenizer.to_str()).get("decoder")):
            self._bytes = byte_alphabet()
            self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        else:
            self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
            self._ids = []
            self._text = ""

    def push(self, token_ids):
        if self._bytes is not None:
            return "".join(self._utf8.decode(self._token_bytes(t)) for t in token_ids)
        pieces = []
        for token_id in token_ids:
            self._ids.append(token_id)
            pieces.append(self._stream.step(self._tokenizer, token_id) or "")
        self._text += "".join(pieces)
        return "".join(pieces)

    def finish(self):
        if self._bytes is not None:
            return self._utf8.decode(b"", final=True)
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        return whole[len(self._text):] if whole.startswith(self._text) else ""

    def _token_bytes(self, token_id):
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special and self._skip else added.content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # an id the model has and the tokenizer does not
            return b""
        return bytes(self._bytes[c] for c in token)


def load(path):
    """The tokenizer of a tokenizer.json, or of a checkpoint folder that holds one."""
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    return Tokenizer.from_file(str(path))
