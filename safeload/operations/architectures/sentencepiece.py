"""Read and write the vocabularies of SentencePiece, ``tokenizer.model``.

The file is a message of protocol buffers, ``ModelProto`` of sentencepiece_model.proto:

1. A message is a list of fields: a varint key (field number * 8 + wire type), then a varint (wire type 0), 8 bytes (1),
   a varint length with as many bytes (2), or 4 bytes (5).
2. Field 1 of the model, repeated: a piece. In it: 1 the text in UTF-8, 2 the score as f32, 3 the type: 1 normal (the
   default), 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
3. Field 2 of the model: the trainer's settings. In it, 3 is the type of the model: 1 unigram (the default), 2 BPE.
4. Field 3 of the model: the normalizer's settings. In it: 2 a map of characters, empty for none; 3 add_dummy_prefix and
   4 remove_extra_whitespaces, both true by default.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...base.text import encode
from ...errors import FormatError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
# Ids that llama.cpp assumes in a file without them.
USUAL_IDS = {"unk": 0, "bos": 1, "eos": 2}
# Published vocabularies have up to 262,208 pieces.
MAX_PIECES = 4 << 20
# Largest file in bytes; published ones have up to 5 MB.
MAX_BYTES = 256 << 20
# Characters of a token that merges form; published ones have up to 48. Looking for its parts takes time that grows with
# the square of its length.
MAX_MERGED = 1024
_F32 = struct.Struct("<f")
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10


class VocabularyPiece(NamedTuple):
    """A token."""

    text: str
    score: float
    type: int


class SentencePieceModel(NamedTuple):
    """The content of a ``tokenizer.model``."""

    pieces: list[VocabularyPiece]
    kind: int  # UNIGRAM, BPE, ...
    add_prefix: bool  # a text begins with a space
    trims: bool  # several spaces become one
    maps: bool  # characters are replaced by others


def parse(content: bytes, path: str) -> SentencePieceModel:
    """Parse a ``tokenizer.model``."""
    pieces: list[VocabularyPiece] = []
    kind, prefix, trims, maps = UNIGRAM, True, True, False
    for number, value, at in _fields(content, path, 0):
        if number == 1 and isinstance(value, bytes):
            if len(pieces) >= MAX_PIECES:
                raise FormatError(f"more than {MAX_PIECES:,} pieces", path, at)
            pieces.append(_piece(value, path, at))
        elif number in (2, 3) and isinstance(value, bytes):
            settings: dict[int, Any] = {key: inner for key, inner, _ in _fields(value, path, at)}
            if number == 2:
                kind = settings.get(3, UNIGRAM)
                kind = kind if isinstance(kind, int) else 0
            else:
                prefix, trims, maps = bool(settings.get(3, 1)), bool(settings.get(4, 1)), bool(settings.get(2))
    if not pieces:
        raise FormatError("not a model of SentencePiece: it has no pieces", path)
    return SentencePieceModel(pieces, kind, prefix, trims, maps)


def _piece(content: bytes, path: str, base: int) -> VocabularyPiece:
    text, score, kind = "", 0.0, NORMAL
    for number, value, at in _fields(content, path, base):
        if number == 1 and isinstance(value, bytes):
            try:
                text = value.decode()
            except UnicodeDecodeError:
                raise FormatError("a piece is not UTF-8", path, at) from None
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not NORMAL <= kind <= BYTE:
        raise FormatError(f"a piece has the unknown type {kind}", path, base)
    if not math.isfinite(score):
        raise FormatError(f"a piece has the score {score}", path, base)
    return VocabularyPiece(text, score, kind)


def _fields(content: bytes, path: str, base: int) -> Iterator[tuple[int, int | float | bytes, int]]:
    """Yield number, value and position of each field in the message at ``base``; 8 bytes are skipped, 4 are a float."""
    at = 0
    while at < len(content):
        begin = at
        key, at = _varint(content, at, path, base)
        kind = key & 7
        if kind not in (_VARINT, _BYTES, _EIGHT, _FOUR):
            raise FormatError(f"wire type {kind} is unknown: not a model of SentencePiece", path, base + begin)
        number, size = 0, {_EIGHT: 8, _FOUR: 4}.get(kind, 0)
        if kind in (_VARINT, _BYTES):
            number, at = _varint(content, at, path, base)
            size = number if kind == _BYTES else 0
        if size > len(content) - at:
            field = f"a field of {size} bytes" if kind == _BYTES else "a field"
            raise FormatError(f"{field} exceeds the message", path, base + begin)
        data = content[at : at + size]
        at += size
        yield key >> 3, data if kind == _BYTES else _F32.unpack(data)[0] if kind == _FOUR else number, base + begin


def _varint(content: bytes, at: int, path: str, base: int) -> tuple[int, int]:
    value = 0
    for k in range(_LONGEST_VARINT):
        if at + k >= len(content):
            break
        byte = content[at + k]
        value |= (byte & 0x7F) << (7 * k)
        if byte < 0x80:
            return value, at + k + 1
    raise FormatError("a number is cut off or too long: not a model of SentencePiece", path, base + at)


# Fields of the trainer's settings: ids of special tokens, and whether bytes stand for unknown characters.
_ID_FIELDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
_NO_ID = (1 << 64) - 1  # -1
_BYTE_FALLBACK = 35


def serialized(pieces: Sequence[VocabularyPiece], add_prefix: bool, ids: Mapping[str, int]) -> bytes:
    """Return a ``tokenizer.model`` of type BPE; ``ids`` of special tokens have the keys of `_ID_FIELDS`."""
    result = bytearray()
    for piece in pieces:
        text = encode(piece.text, "token")
        content = _field(1, text) + bytes([2 << 3 | _FOUR]) + _F32.pack(piece.score) + _number(3, piece.type)
        result += _field(1, content)
    settings = _number(3, BPE) + _number(4, len(pieces))
    settings += _number(_BYTE_FALLBACK, int(any(piece.type == BYTE for piece in pieces)))
    for name, field in _ID_FIELDS.items():
        settings += _number(field, ids.get(name, _NO_ID))
    normalizer = _field(1, b"identity") + _number(3, int(add_prefix)) + _number(4, 0) + _number(5, 1)
    return bytes(result + _field(2, settings) + _field(3, normalizer))


def _encoded(number: int) -> bytes:
    """Return a varint."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(field: int, value: int) -> bytes:
    return _encoded(field << 3 | _VARINT) + _encoded(value)


def _field(field: int, content: bytes) -> bytes:
    return _encoded(field << 3 | _BYTES) + _encoded(len(content)) + content
