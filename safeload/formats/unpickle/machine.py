"""The values and opcodes of pickles.

Two machines run the opcodes: `Builder` (run.py) builds inert values and ends at the first fault, `Tracer` (trace.py)
lists globals and continues as lenient readers do. Each has the methods that the opcodes call.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ...base.text import show
from ...errors import FormatError, UnsupportedError

# Function of torch that calls its first argument with its third, and sets attributes of the resulting tensor.
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Longest line with a name or a number, and longest line of text. Real names have about 100 characters.
MAX_LINE = 10_000
MAX_TEXT_LINE = 1 << 30
# Memo numbers up to this distance from the number of entries count as consecutive.
NEAR = 8


# ---- values ----


class Global(NamedTuple):
    """A row of the table of harmless globals."""

    name: str  # "module.name"
    kind: str  # for readers of listings
    build: Callable[[tuple[Any, ...]], Any] | None = None  # makes a value of arguments; None if it cannot be called
    code: str | None = None  # of a storage or dtype in the table of dtypes; None if no array can represent it
    itemsize: int = 0  # bytes of an element, for a storage or dtype
    copies: bool = False  # True if the built value holds copies of the arguments


class Built:
    """Base class of values with a BUILD state."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Set the state, or raise `Fault`."""
        raise NotImplementedError


class LargeBytes:
    """Bytes that stay in a mapped pickle."""

    __slots__ = ("_data", "_size", "at")

    def __init__(self, data: Any, at: int, size: int) -> None:
        self._data, self.at, self._size = data, at, size  # `at`: of the first byte in the pickle

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"<{self._size:,} bytes>"

    def __bytes__(self) -> bytes:
        content: bytes = self._data[self.at : self.at + self._size]
        return content


class Foreign:
    """The name of a global outside the table."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Inert:
    """A placeholder for the result of calling a `Foreign`: a record of the call."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name  # of the global
        self.args = args
        self.items: dict[Any, Any] = {}  # set or appended by the pickle
        self.state: Any = None  # set by BUILD


class Fault(Exception):  # noqa: N818 - becomes a FormatError or `kind` once the position is known
    """A fault at the current opcode."""

    def __init__(self, message: str, kind: type[Exception] = FormatError) -> None:
        super().__init__(message)
        self.kind = kind


def describe(value: Any) -> str:
    """Return a short and harmless text of a value for messages."""
    if type(value) in (Global, Foreign, Inert):
        return show(value.name)
    if type(value) in (str, bytes):
        return show(value[:100])
    if type(value) in (int, float, bool) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return type(value).__name__.lower()


# Escapes in strings of protocol 0; a backslash before any other character stands for itself.
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|([^x]))?", re.DOTALL)
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v", b"\n": b""}
_ESCAPES |= {quoted: quoted for quoted in (b"\\", b"'", b'"')}


def unescaped(text: bytes) -> bytes:
    """Return the bytes of a string of protocol 0, as `codecs.escape_decode` does, which warns of some."""
    return _ESCAPE.sub(_unescaped, text)


def _unescaped(match: re.Match[bytes]) -> bytes:
    hexadecimal, octal, other = match.groups()
    if hexadecimal is not None:
        return bytes((int(hexadecimal, 16),))
    if octal is not None:
        return bytes((int(octal, 8) & 0xFF,))
    if other is None:
        raise Fault("a string with a bad escape")
    return _ESCAPES.get(other, match[0])


# ---- opcodes ----


class Machine:
    """The stack and the memo of a pickle."""

    __slots__ = ("at", "marks", "memo", "stack")

    def __init__(self, at: int) -> None:
        self.at = at  # position of the next byte
        self.stack: list[Any] = []  # values since the last mark
        self.marks: list[list[Any]] = []  # the stacks below the last mark
        self.memo: dict[int | str, Any] = {}  # values by `key`

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        raise NotImplementedError

    def number(self, width: int, *, signed: bool = False) -> int:
        """Read an integer of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little", signed=signed)

    def push(self, value: Any) -> None:
        """Push a value if a mark may have been popped for it, so that ``stack`` is another list now."""
        self.stack.append(value)

    def pop(self) -> Any:
        """Pop the top value."""
        return self.stack.pop()

    def top(self) -> Any:
        """Return the top value."""
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Pop the values since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def key(self, number: int) -> int | str:
        """Return the key of a memo entry: ints out of order could be chosen to collide, str have random hashes."""
        if number in self.memo:
            return number
        text = str(number)
        return number if 0 <= number <= len(self.memo) + NEAR and text not in self.memo else text


Opcode = Callable[[Any], object]  # of a machine


def unknown(m: Any) -> None:
    """Refuse a byte that is not an opcode."""
    raise Fault("unknown opcode")


def _proto(m: Any) -> None:
    protocol = m.number(1)
    if protocol > 5:
        raise Fault(f"protocol {protocol}, but the newest is 5", UnsupportedError)


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _int(m: Any) -> None:
    line = m.line()
    m.push(line == b"01" if line in (b"00", b"01") else m.integer(line))


def _binstring(m: Any) -> None:
    size = m.number(4, signed=True)
    if size < 0:
        raise Fault(f"a string of {size} bytes")
    m.push(m.string(size))


def _obj(m: Any) -> None:
    function, *args = m.pop_mark() or [None]
    m.push(m.call(function, m.new(tuple, args)))


# Arguments are evaluated from left to right, and keywords in the order in which they are written. Each machine ends at
# STOP itself.
_TABLE: dict[bytes, Opcode] = {
    b"\x80": _proto,
    b"\x95": lambda m: m.frame(m.number(8)),  # FRAME
    # the stack and the memo
    b"(": _mark,
    b"0": lambda m: m.stack.pop() if m.stack else m.pop_mark(),  # POP
    b"1": lambda m: m.pop_mark(),  # POP_MARK
    b"2": lambda m: m.stack.append(m.top()),  # DUP
    b"g": lambda m: m.stack.append(m.recall(m.index())),  # GET
    b"h": lambda m: m.stack.append(m.recall(m.number(1))),  # BINGET
    b"j": lambda m: m.stack.append(m.recall(m.number(4))),  # LONG_BINGET
    b"p": lambda m: m.remember(m.index(), m.top()),  # PUT
    b"q": lambda m: m.remember(m.number(1), m.top()),  # BINPUT
    b"r": lambda m: m.remember(m.number(4), m.top()),  # LONG_BINPUT
    b"\x94": lambda m: m.memoize(),  # MEMOIZE
    # numbers
    b"N": lambda m: m.stack.append(None),  # NONE
    b"\x88": lambda m: m.stack.append(True),  # NEWTRUE
    b"\x89": lambda m: m.stack.append(False),  # NEWFALSE
    b"K": lambda m: m.stack.append(m.number(1)),  # BININT1
    b"M": lambda m: m.stack.append(m.number(2)),  # BININT2
    b"J": lambda m: m.stack.append(m.number(4, signed=True)),  # BININT
    b"I": _int,
    b"L": lambda m: m.stack.append(m.integer(m.line().removesuffix(b"L"))),  # LONG
    b"\x8a": lambda m: m.stack.append(m.long(m.number(1))),  # LONG1
    b"\x8b": lambda m: m.stack.append(m.long(m.number(4, signed=True))),  # LONG4
    b"G": lambda m: m.stack.extend(struct.unpack(">d", m.take(8))),  # BINFLOAT
    b"F": lambda m: m.stack.append(m.real(m.line())),  # FLOAT
    # text and bytes
    b"\x8c": lambda m: m.stack.append(m.text(m.number(1))),  # SHORT_BINUNICODE
    b"X": lambda m: m.stack.append(m.text(m.number(4))),  # BINUNICODE
    b"\x8d": lambda m: m.stack.append(m.text(m.number(8))),  # BINUNICODE8
    b"V": lambda m: m.stack.append(m.escaped(m.line(MAX_TEXT_LINE))),  # UNICODE
    b"C": lambda m: m.stack.append(m.content(m.number(1))),  # SHORT_BINBYTES
    b"B": lambda m: m.stack.append(m.content(m.number(4))),  # BINBYTES
    b"\x8e": lambda m: m.stack.append(m.content(m.number(8))),  # BINBYTES8
    b"\x96": lambda m: m.stack.append(m.content(m.number(8), bytearray)),  # BYTEARRAY8
    b"U": lambda m: m.stack.append(m.string(m.number(1))),  # SHORT_BINSTRING
    b"T": _binstring,
    b"S": lambda m: m.stack.append(m.quoted(m.line(MAX_TEXT_LINE).strip())),  # STRING
    # containers
    b")": lambda m: m.stack.append(()),  # EMPTY_TUPLE
    b"\x85": lambda m: m.push(m.new(tuple, [m.pop()])),  # TUPLE1
    b"\x86": lambda m: m.push(m.new(tuple, [m.pop(), m.pop()][::-1])),  # TUPLE2
    b"\x87": lambda m: m.push(m.new(tuple, [m.pop(), m.pop(), m.pop()][::-1])),  # TUPLE3
    b"t": lambda m: m.push(m.new(tuple, m.pop_mark())),  # TUPLE
    b"]": lambda m: m.stack.append(m.new(list, [])),  # EMPTY_LIST
    b"l": lambda m: m.push(m.new(list, m.pop_mark())),  # LIST
    b"a": lambda m: m.extend([m.pop()]),  # APPEND
    b"e": lambda m: m.extend(m.pop_mark()),  # APPENDS
    b"}": lambda m: m.stack.append(m.new(dict, [])),  # EMPTY_DICT
    b"d": lambda m: m.push(m.new(dict, m.pop_mark())),  # DICT
    b"s": lambda m: m.set_items([m.pop(), m.pop()][::-1]),  # SETITEM
    b"u": lambda m: m.set_items(m.pop_mark()),  # SETITEMS
    b"\x8f": lambda m: m.stack.append(m.new(set, [])),  # EMPTY_SET
    b"\x90": lambda m: m.extend(m.pop_mark(), set),  # ADDITEMS
    b"\x91": lambda m: m.push(m.new(frozenset, m.pop_mark())),  # FROZENSET
    # globals and calls
    b"c": lambda m: m.stack.append(m.named(m.name(), m.name())),  # GLOBAL
    b"\x93": lambda m: m.push(m.named(name=m.pop(), module=m.pop())),  # STACK_GLOBAL
    b"\x82": lambda m: m.stack.append(m.extension(m.number(1))),  # EXT1
    b"\x83": lambda m: m.stack.append(m.extension(m.number(2))),  # EXT2
    b"\x84": lambda m: m.stack.append(m.extension(m.number(4, signed=True))),  # EXT4
    b"R": lambda m: m.push(m.call(args=m.pop(), function=m.pop())),  # REDUCE
    b"\x81": lambda m: m.push(m.call(args=m.pop(), function=m.pop())),  # NEWOBJ
    b"\x92": lambda m: m.push(m.call(args=m.joined(keywords=m.pop(), args=m.pop()), function=m.pop())),  # NEWOBJ_EX
    b"i": lambda m: m.push(m.call(m.named(m.name(), m.name()), tuple(m.pop_mark()))),  # INST
    b"o": _obj,
    b"b": lambda m: m.build(m.pop()),  # BUILD
    # data outside the pickle
    b"P": lambda m: m.stack.append(m.stored(m.line(), is_line=True)),  # PERSID
    b"Q": lambda m: m.push(m.stored(m.pop())),  # BINPERSID
    b"\x97": lambda m: m.stack.append(m.buffer(None)),  # NEXT_BUFFER
    b"\x98": lambda m: m.push(m.buffer(m.pop())),  # READONLY_BUFFER
}
OPCODES = [_TABLE.get(bytes((code,)), unknown) for code in range(256)]
