"""SentencePiece's ``tokenizer.model``, read and written.

A file is protocol buffers (see `safeload.formats.onnx`), a ``ModelProto`` of sentencepiece_model.proto:

1. Field 1 of the model, repeated: a piece. In it: 1 the text in UTF-8, 2 the score as f32, 3 the type: 1 normal (the
   default), 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
2. Field 2 of the model: the trainer's settings. In it, 3 is the type of the model: 1 unigram (the default), 2 BPE.
3. Field 3 of the model: the normalizer's settings. In it: 2 a map of characters, empty for none; 3 add_dummy_prefix and
   4 remove_extra_whitespaces, both true by default.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.text import encode
from ...errors import FormatError
from ...formats.onnx import BYTES, FOUR, MAX_VARINT, SIZES, VARINT, varint

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
# Published vocabularies have up to 262,208 pieces.
MAX_PIECES = 4 << 20
_F32 = struct.Struct("<f")


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
    maps: bool  # the tokenizer replaces characters


def parse_model(content: bytes, path: str) -> SentencePieceModel:
    """Parse a ``tokenizer.model``."""
    pieces: list[VocabularyPiece] = []
    settings: dict[int, dict[int, Any]] = {2: {}, 3: {}}  # of the trainer and of the normalizer
    for number, value, at in _fields(content, path, 0):
        if number == 1 and isinstance(value, bytes):
            if len(pieces) >= MAX_PIECES:
                raise FormatError(f"more than {MAX_PIECES:,} pieces", path, at)
            pieces.append(_piece(value, path, at))
        elif number in settings and isinstance(value, bytes):
            settings[number] = {key: inner for key, inner, _ in _fields(value, path, at)}
    if not pieces:
        raise FormatError("not a model of SentencePiece: it has no pieces", path)
    kind, normalizer = settings[2].get(3, UNIGRAM), settings[3]
    flags = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)), bool(normalizer.get(2))
    return SentencePieceModel(pieces, kind if isinstance(kind, int) else 0, *flags)


def _piece(content: bytes, path: str, base: int) -> VocabularyPiece:
    # Fields of another type than these are skipped, and the last of several counts.
    fields: dict[Any, Any] = {(key, type(value)): (value, at) for key, value, at in _fields(content, path, base)}
    text, at = fields.get((1, bytes), (b"", base))
    score, _ = fields.get((2, float), (0.0, base))
    kind, _ = fields.get((3, int), (NORMAL, base))
    try:
        piece = VocabularyPiece(text.decode(), score, kind)
    except UnicodeDecodeError:
        raise FormatError("a piece is not UTF-8", path, at) from None
    if not NORMAL <= kind <= BYTE:
        raise FormatError(f"a piece has the unknown type {kind}", path, base)
    if not math.isfinite(score):
        raise FormatError(f"a piece has the score {score}", path, base)
    return piece


def _fields(content: bytes, path: str, base: int) -> Iterator[tuple[int, int | float | bytes, int]]:
    """Yield number, value and position of each field in the message at ``base``; 8 bytes are skipped, 4 are a float."""

    def take(at: int) -> tuple[int, int]:
        value, end = varint(content, at)  # only the lower 64 bits: a longer number would pass for another
        if not end or (end - at == MAX_VARINT and content[end - 1] > 1):
            raise FormatError("a number is cut off or too long: not a model of SentencePiece", path, base + at)
        return value, end

    at = 0
    while at < len(content):
        begin, number = at, 0
        key, at = take(begin)
        kind = key & 7
        if kind not in SIZES:
            raise FormatError(f"wire type {kind} is unknown: not a model of SentencePiece", path, base + begin)
        if kind in (VARINT, BYTES):
            number, at = take(at)
        size = number if kind == BYTES else SIZES[kind]
        if size > len(content) - at:
            field = f"a field of {size} bytes" if kind == BYTES else "a field"
            raise FormatError(f"{field} exceeds the message", path, base + begin)
        data = content[at : at + size]
        at += size
        yield key >> 3, data if kind == BYTES else _F32.unpack(data)[0] if kind == FOUR else number, base + begin


# Fields of the trainer's settings: ids of special tokens, and whether bytes stand for unknown characters.
_ID_FIELDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
_NO_ID = (1 << 64) - 1  # -1
_BYTE_FALLBACK = 35


def serialized(pieces: Sequence[VocabularyPiece], add_prefix: bool, ids: Mapping[str, int]) -> bytes:
    """Return a ``tokenizer.model`` of type BPE; ``ids`` of special tokens have the keys of `_ID_FIELDS`."""
    result = bytearray()
    for piece in pieces:
        score = bytes([2 << 3 | FOUR]) + _F32.pack(piece.score)
        result += _field(1, _field(1, encode(piece.text, "token")) + score + _numbers({3: piece.type}))
    falls_back = any(piece.type == BYTE for piece in pieces)
    special = {field: ids.get(name, _NO_ID) for name, field in _ID_FIELDS.items()}
    settings = _numbers({3: BPE, 4: len(pieces), _BYTE_FALLBACK: int(falls_back), **special})
    normalizer = _field(1, b"identity") + _numbers({3: int(add_prefix), 4: 0, 5: 1})
    return bytes(result + _field(2, settings) + _field(3, normalizer))


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def _numbers(values: Mapping[int, int]) -> bytes:
    return b"".join(_varint(field << 3 | VARINT) + _varint(value) for field, value in values.items())


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | BYTES) + _varint(len(content)) + content
