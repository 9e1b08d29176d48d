"""A pickle machine that builds inert values: it neither imports nor calls the globals of a pickle.

Opcodes of protocols 0 to 5 (https://github.com/python/cpython/blob/main/Lib/pickletools.py describes each) work on a
stack as in CPython, with these differences:

1. Globals are looked up in the caller's table. A function of this package builds the value of a row. Any other name
   becomes a `Foreign`, and a call of it an `Inert`.
2. Persistent ids are passed to the caller.
3. Dict keys and set elements are scalars or small tuples of scalars. Keys are unique: no entry hides another.
   Colliding keys (`KeyTable`) and keys with slow hashes are refused.
4. Every length is checked against the bytes left before anything is allocated. Bytes copied from values that the pickle
   can refer to again are counted (`Builder.charge`).

Values are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, the values of rows and
persistent ids, `Global`, `Foreign` and `Inert`. `_run` runs the opcodes of tensors without calls, which takes a quarter
of the time; `OPCODES` has every opcode.

`Tracer` (trust/trace.py) runs the same opcodes, lists globals and continues as lenient readers do.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.runtime import paused
from ..core.text import error_about, listed, show
from ..errors import ForbiddenError, FormatError, LimitError, UnsupportedError

# Function of torch that calls its first argument with its third, and sets attributes of the resulting tensor.
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Longest line with a name or a number, and longest line of text. Real names have about 100 characters.
MAX_LINE = 10_000
MAX_TEXT_LINE = 1 << 30
# Memo numbers up to this distance from the number of entries count as consecutive.
NEAR = 8
# 50 times the opcodes of the largest known real file (400,000). An opcode allocates at most 216 bytes (an empty set)
# beyond the bytes copied from the file. The worst case is a list of sets as metadata: about 340 bytes per byte of the
# pickle.
MAX_OPCODES = 20_000_000
# Bytes of a pickle, which is read into memory. The largest real pickles have about 10 MB: tensors are stored elsewhere.
MAX_PICKLE = 1 << 30
# Longest integer in bytes, as for LONG1 of protocol 2, because printing an integer takes quadratic time. Real integers
# have 8 bytes, states of random generators 16.
MAX_INT_BYTES = 255
# Maximum number of bytes to copy per byte of the pickle read so far, and bytes that a pickle of any size can copy: a
# few bytes can request a copy again and again (joined text, a list made into a tuple, combined arguments). Real pickles
# copy fewer bytes than they have.
MAX_COPIED = 50
_COPIED_FREE = 1 << 16
# An upper bound for the bytes of a copied item, which can become an entry of a dict.
_COPIED_BYTES: dict[type[Any], int] = {str: 4, bytes: 4, list: 100, tuple: 100, dict: 100}
# Bytes of a mapped pickle that are not copied.
_LARGE = 1 << 16
# Bytes of arguments, for opcodes with a case in `_run`.
_ARGUMENT = {0x4B: 1, 0x4D: 2, 0x58: 4, 0x68: 1, 0x72: 4, 0x8C: 1}
# Added to the message if unknown globals are the only fault of the pickle.
ADVICE = '; unknown_globals="inert" reads the tensors around them'
# Maximum number of names in a message.
MAX_SHOWN = 100
_U32 = struct.Struct("<I").unpack_from
_NO_ELEMENTS: frozenset[Any] = frozenset()


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


@dataclass(slots=True, eq=False)
class LargeBytes:
    """Bytes that stay in a mapped pickle."""

    data: Any
    at: int  # of the first byte in the pickle
    size: int

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<{self.size:,} bytes>"

    def __bytes__(self) -> bytes:
        return bytes(self.data[self.at : self.at + self.size])


@dataclass(slots=True, eq=False, repr=False)
class Foreign:
    """The name of a global outside the table."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Inert:
    """A placeholder for the result of calling a `Foreign`: a record of the call."""

    name: str  # of the global
    args: tuple[Any, ...]
    items: dict[Any, Any] = field(default_factory=dict)  # set or appended by the pickle
    state: Any = None  # set by BUILD


def class_of(value: Any) -> str:
    """Return the name of a placeholder without its module, which has changed over time; "" for other values."""
    return str(value.name.rpartition(".")[2]) if type(value) in (Inert, Foreign) else ""


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
        raise NotImplementedError

    def number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def push(self, value: Any) -> None:
        """Push a value if a mark may have been popped for it, so that ``stack`` is another list now."""
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def top(self) -> Any:
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def key(self, number: int) -> int | str:
        """Return the key of a memo entry: ints out of order could be chosen to collide, str have random hashes."""
        if number in self.memo:
            return number
        text = str(number)
        return number if 0 <= number <= len(self.memo) + NEAR and text not in self.memo else text


def unknown(m: Any) -> None:
    """Refuse a byte that is not an opcode."""
    raise Fault("unknown opcode")


def _proto(m: Any) -> None:
    if (protocol := m.number(1)) > 5:
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
_TABLE: dict[bytes, Callable[[Any], object]] = {  # of a machine
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


# ---- the machine that builds values ----


class Builder(Machine):
    """The machine that builds values.

    It raises IndexError if the stack is empty or the bytes end (``at`` is then past the end), ValueError if text cannot
    be decoded.
    """

    __slots__ = ("_copied", "data", "foreign", "harmless", "persistent", "places", "table", "watched")

    def __init__(self, data: bytes, table: Mapping[str, Global], persistent: Callable[[Any], Any]) -> None:
        super().__init__(0)
        self.data = data
        self.table = table  # the harmless globals by name
        self.persistent = persistent  # returns the value for a persistent id
        self.harmless: dict[str, Global] = {}  # globals of the pickle in the table
        self.foreign: dict[str, Foreign] = {}  # globals of the pickle outside the table
        self.watched: dict[int, KeyTable] = {}  # by id of their dict or set, for keys of predictable hashes
        self.places: dict[int, int] = {}  # position of bytes objects in the data, by id, which can be reused since
        self._copied = 0

    def charge(self, size: int) -> None:
        """Count the bytes of a copy of values that the pickle can refer to again."""
        self._copied += size
        if self._copied > MAX_COPIED * self.at + _COPIED_FREE:
            raise Fault(f"copied values take more than {MAX_COPIED} times the pickle's own bytes", LimitError)

    # ---- bytes ----

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - size : self.at]

    def line(self, limit: int = MAX_LINE) -> bytes:
        end = self.data.find(b"\n", self.at, self.at + limit + 1)
        if end < 0 and len(self.data) - self.at > limit:
            raise Fault(f"a line of more than {limit} bytes", LimitError)
        line = self.take((end if end >= 0 else len(self.data) + 1) - self.at)
        self.at += 1
        return line

    def name(self) -> str:
        return self.line().decode()

    def frame(self, size: int) -> None:  # only a hint for readers of streams
        if size > len(self.data) - self.at:
            self.take(size)

    # ---- the memo ----

    def recall(self, number: int) -> Any:
        key = self.key(number)
        if key not in self.memo:
            raise Fault(f"memo entry {describe(number)} was never set")
        return self.memo[key]

    def remember(self, number: int, value: Any) -> None:
        self.memo[self.key(number)] = value

    def index(self) -> int:
        return self.integer(self.line())

    # ---- values ----

    def integer(self, digits: bytes) -> int:
        if len(digits) > MAX_INT_BYTES * 5 // 2 or not re.fullmatch(rb"-?[0-9]+", digits):
            raise Fault(f"{describe(digits)} is not an integer, or is too long")
        return int(digits)

    def long(self, size: int) -> int:
        if not 0 <= size <= MAX_INT_BYTES:
            raise Fault(f"an integer of {size} bytes, the limit is {MAX_INT_BYTES}", LimitError)
        return self.number(size, signed=True)

    def real(self, digits: bytes) -> float:
        if len(digits) > 100:
            raise Fault(f"{describe(digits)} is too long for a float")
        return float(digits)

    def text(self, size: int) -> str:
        return str(self.take(size), "utf-8", "surrogatepass")

    def string(self, size: int) -> str | bytes:
        return _python2(self.take(size))

    def quoted(self, line: bytes) -> str | bytes:
        if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
            raise Fault(f"{describe(line)} is not a quoted string")
        return _python2(unescaped(line[1:-1]))

    def escaped(self, line: bytes) -> str:
        return str(line, "raw-unicode-escape")

    def content(self, size: int, kind: type = bytes) -> Any:
        at = self.at
        if kind is bytes and size >= _LARGE and type(self.data) is not bytes and size <= len(self.data) - at:
            self.at = at + size
            return LargeBytes(self.data, at, size)
        value = kind(self.take(size))
        if value:
            self.places[id(value)] = at
        return value

    # ---- containers ----

    def new(self, kind: type, items: list[Any]) -> Any:
        if kind is list:
            return items
        value: Any = {} if kind is dict else set()
        if kind is dict and items:
            put_items(value, items, self.watched)
        elif kind is frozenset:
            add_elements(value, items, {})
            value = frozenset(value) if value else _NO_ELEMENTS
        return tuple(items) if kind is tuple else value

    def extend(self, values: list[Any], kind: type = list) -> None:
        into = self.stack[-1]
        actual = type(into)
        if actual is Inert:
            put_items(into, [x for pair in enumerate(values, len(into.items)) for x in pair], self.watched)
        elif actual is not kind:
            verb = "appending" if kind is list else "adding"
            raise Fault(f"{verb} to {describe(into)}, which is not a {kind.__name__}")
        elif kind is list:
            into.extend(values)
        else:
            add_elements(into, values, self.watched)

    def set_items(self, pairs: list[Any]) -> None:
        into = self.stack[-1]
        if pairs:
            put_items(into, pairs, self.watched)

    def build(self, state: Any) -> None:
        into = self.stack[-1]
        if type(into) is Inert:
            into.state = state if into.state is None else (into.state, state)
        elif isinstance(into, Built):
            into.build(state)
        # The state of an OrderedDict is its attributes, which are not items: torch sets `_metadata` (module versions).
        elif type(into) is not dict and type(into) is not Foreign:
            raise Fault(f"a state set on {describe(into)}")

    # ---- globals, calls, and data outside the pickle ----

    def named(self, module: Any, name: Any) -> Global | Foreign:
        if type(module) is not str or type(name) is not str:
            raise Fault(f"a global must be named by two strings, got {describe(module)} and {describe(name)}")
        if len(module) + len(name) > 1000:
            raise Fault(f"a global's name of {len(module) + len(name)} characters, the limit is 1000", LimitError)
        return self._global(f"{module}.{name}")

    def _global(self, name: str) -> Global | Foreign:
        if name in self.table:
            return self.harmless.setdefault(name, self.table[name])
        if name not in self.foreign:
            self.charge(len(name))  # the pickle can combine modules and names in many ways
            self.foreign[name] = Foreign(name)
        return self.foreign[name]

    def extension(self, number: int) -> Global | Foreign:
        return self._global(f"extension code {number} of copyreg")

    def call(self, function: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise Fault(f"arguments must be a tuple, got {describe(args)}")
        if type(function) is Global and function.build is not None:
            if function.copies and args:
                self.charge(sum(_COPIED_BYTES[type(arg)] * len(arg) for arg in args if type(arg) in _COPIED_BYTES))
            return function.build(args)
        if type(function) in (Foreign, Inert):
            return Inert(function.name, args)
        raise Fault(f"{describe(function)} cannot be called")

    def joined(self, args: Any, keywords: Any) -> Any:
        if keywords and type(args) is tuple:
            self.charge(8 * len(args))
            return (*args, keywords)
        return args

    def stored(self, key: Any, *, is_line: bool = False) -> Any:
        return self.persistent(key.decode() if is_line else key)

    def buffer(self, value: Any) -> Any:
        raise Fault("a buffer outside the pickle", UnsupportedError)


def _python2(text: bytes) -> str | bytes:
    """Convert a str of Python 2: text if it is UTF-8, else bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


class TruncatedError(FormatError):
    """The bytes end before the pickle ends."""


class Unpickled(NamedTuple):
    """The result of running a pickle."""

    value: Any
    size: int  # in bytes, up to its STOP
    harmless: list[str]  # names of its globals in the table
    foreign: list[str]  # names of its globals outside the table
    data: Any = b""  # the bytes that hold it
    places: Mapping[int, int] = MappingProxyType({})  # see `Builder`
    base: int | None = None  # offset of `data` in the file; None if the file stores it compressed
    members: Mapping[str, Collection[str]] = MappingProxyType({})  # see `Tree` of torch


def unpickle(
    data: Any,  # bytes that begin with the pickle, or a mapping, in which large bytes stay
    table: Mapping[str, Global],
    persistent: Callable[[Any], Any],  # returns the value for a persistent id, or raises `Fault`
    *,
    path: str,
    base: int | None = 0,  # offset of `data` in the file; None if the file stores it compressed
    inert: bool = False,
    complete: bool = True,  # False if the file has more bytes to read after a `TruncatedError`
) -> Unpickled:
    """Run a pickle; if ``inert``, unknown globals become placeholders instead of a `ForbiddenError` that lists all."""
    machine = Builder(data, table, persistent)
    try:
        with paused(len(data)):  # a pickle can make an object per byte
            value = _run(machine, path, base)
    except (FormatError, LimitError, UnsupportedError) as error:
        cut = isinstance(error, TruncatedError)
        if complete or not cut:
            fault = ", and is cut off" if cut else f", and is malformed after that: {error}"
            check_foreign(sorted(machine.foreign), path, inert, fault=fault)
        raise
    harmless, foreign = sorted(machine.harmless), sorted(machine.foreign)
    check_foreign(foreign, path, inert)
    return Unpickled(value, machine.at, harmless, foreign, data, machine.places, base)


def check_foreign(
    names: Sequence[str], path: str, inert: bool, clause: str = "the pickle references", fault: str = ""
) -> None:
    """Refuse globals outside the table, unless ``inert``; ``clause`` begins the message, ``fault`` names a fault."""
    if inert or not names:
        return
    shown = listed((name if name.isprintable() else ascii(name) for name in names), MAX_SHOWN)
    globals_ = "a global that is" if len(names) == 1 else f"{len(names)} globals that are"
    advice = "" if fault else ADVICE
    text = f"{clause} {globals_} not on the allowlist: {shown}{fault}. Nothing was imported or called{advice}"
    raise error_about(ForbiddenError, text, path=path)


def _run(machine: Builder, path: str, base: int | None) -> Any:
    """Run the opcodes, return the value on the stack, and turn exceptions into errors with a position."""
    data, size = machine.data, len(machine.data)
    stack, marks, memo = machine.stack, machine.marks, machine.memo
    call, persistent = machine.call, machine.persistent
    at = room = 0
    kind: type[Exception] = FormatError
    message = ""
    try:
        for _ in repeat(None, MAX_OPCODES):
            match data[at]:  # an IndexError at the end
                case 0x72:  # LONG_BINPUT
                    number = _U32(data, at + 1)[0]
                    if number <= room or number <= (room := len(memo) + NEAR):
                        memo[number] = stack[-1]
                    else:
                        machine.remember(number, stack[-1])
                    at += 5
                case 0x4B:  # BININT1
                    stack.append(data[at + 1])
                    at += 2
                case 0x68:  # BINGET
                    number = data[at + 1]
                    stack.append(memo[number] if number in memo else machine.recall(number))
                    at += 2
                case 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                    at += 1
                case 0x74:  # TUPLE
                    value = tuple(stack)
                    stack = marks.pop()
                    stack.append(value)
                    at += 1
                case 0x86:  # TUPLE2
                    value = stack.pop()
                    stack[-1] = (stack[-1], value)
                    at += 1
                case 0x58:  # BINUNICODE
                    end = at + 5 + _U32(data, at + 1)[0]
                    if end > size:
                        machine.at = end
                        raise IndexError
                    text = data[at + 5 : end]
                    stack.append(text.decode() if text.isascii() else str(text, "utf-8", "surrogatepass"))
                    at = end
                case 0x52 | 0x81:  # REDUCE; NEWOBJ, which makes an object without calling its class
                    value = stack.pop()
                    machine.at = at + 1
                    stack[-1] = call(stack[-1], value)
                    at += 1
                case 0x51:  # BINPERSID
                    stack[-1] = persistent(stack[-1])
                    at += 1
                case 0x89:  # NEWFALSE
                    stack.append(False)
                    at += 1
                case 0x29:  # EMPTY_TUPLE
                    stack.append(())
                    at += 1
                case 0x4D:  # BININT2
                    stack.append(data[at + 1] | data[at + 2] << 8)
                    at += 3
                case 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    at += 1
                case 0x8C:  # SHORT_BINUNICODE
                    end = at + 2 + data[at + 1]
                    if end > size:
                        machine.at = end
                        raise IndexError
                    stack.append(str(data[at + 2 : end], "utf-8", "surrogatepass"))
                    at = end
                case 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                    at += 1
                case 0x2E:  # STOP
                    machine.at = at + 1
                    break
                case code:
                    machine.at = at + 1
                    machine.stack = stack
                    OPCODES[code](machine)
                    stack, at = machine.stack, machine.at
        else:
            raise error_about(LimitError, f"the pickle has more than {MAX_OPCODES} opcodes", path=path)
    except Fault as fault:
        fault_text, kind = str(fault), fault.kind
    except (IndexError, struct.error):
        fault_text = "the stack is empty"
        if at >= size:
            message, kind = "the pickle ends without STOP", TruncatedError
        elif max(machine.at, at + 1 + _ARGUMENT.get(data[at], 0)) > size:
            fault_text, kind = "its argument extends past the end", TruncatedError
    except ValueError as error:  # text that is not UTF-8, or invalid digits
        fault_text = show(str(error))
    else:
        if not marks and len(stack) == 1:
            return stack[0]
        message = "the pickle stops with values left on its stack"
    if not message:
        opcode = ascii(chr(data[at])) if 32 <= data[at] < 127 else f"0x{data[at]:02x}"
        message = f"pickle opcode {opcode}: {fault_text}"
    place = None if base is None else base + at
    raise kind(message, path, place) if issubclass(kind, FormatError) else kind(str(FormatError(message, path, place)))


# ---- keys of dicts and elements of sets ----

# CPython's dicts and sets are tables with open addressing. Hashes of text and bytes depend on a random seed. Hashes of
# numbers, and of tuples and frozensets of numbers, do not, so a file can choose colliding keys: their hashes are equal,
# or share the bits that select a slot. A dict of n such keys takes n**2 steps, so we limit the sum of these steps: once
# a table has more than a few entries and a key has a predictable hash, we maintain a copy of the table without keys and
# values, count each step in it, and refuse more than `MAX_STEPS` per key. Integers in order (0, 1, 2, ...) never
# collide and cost nothing here.

# Maximum number of values in a dict key or set element: hashing a tuple visits each. Real keys are str and int.
MAX_KEY_VALUES = 100
# Tables up to this size are not watched, because the square of their size is small.
MAX_UNWATCHED = 64
# Maximum number of steps in a table per entry. Random hashes need 2, the worst regular hashes 57 (multiples of powers
# of two, fractions and addresses, 300,000 keys each).
MAX_STEPS = 100

_64_BITS = (1 << 64) - 1
# Linear probes before the next jump, in CPython's sets.
_LINEAR = 9


class KeyTable:
    """The occupied slots of a dict or set, as in Objects/dictobject.c and Objects/setobject.c."""

    __slots__ = ("_hashes", "_is_set", "_of", "_steps", "_used")

    def __init__(self, of: Any) -> None:
        self._of = of  # keeps the id from being reused
        self._is_set = type(of) is set
        self._hashes: list[int] = []
        self._used = bytearray(8)
        self._steps = 0
        for key in of:
            self.add(key)

    def add(self, key: Any, *, known: bool = False) -> None:
        """Count the steps of inserting a key; a ``known`` key takes steps but no slot."""
        hashed = hash(key) & _64_BITS
        slot = self._find(hashed)
        if self._steps > MAX_STEPS * (len(self._hashes) + MAX_UNWATCHED):
            raise Fault(f"keys with colliding hashes, after {len(self._hashes)} in one container", LimitError)
        if known:
            return
        self._used[slot] = 1
        self._hashes.append(hashed)
        count, size = len(self._hashes), len(self._used)
        if self._is_set and count * 5 >= (size - 1) * 3:
            self._grow(count * (2 if count > 50_000 else 4) + 1)
        elif not self._is_set and count >= size * 2 // 3:
            self._grow(count * 3)

    def _find(self, hashed: int) -> int:
        """Find the free slot for a hash, and count the steps."""
        used, mask = self._used, len(self._used) - 1
        slot, rest, steps = hashed & mask, hashed, 1
        while used[slot]:
            if self._is_set and slot + _LINEAR <= mask and (free := used.find(0, slot, slot + _LINEAR + 1)) >= 0:
                slot = free
                break
            rest >>= 5
            slot = (slot * 5 + rest + 1) & mask
            steps += 1
        self._steps += steps
        return slot

    def _grow(self, least: int) -> None:
        self._used = used = bytearray(max(8, 1 << (least - 1).bit_length()))
        before = self._steps  # CPython compares no keys when it resizes, and at least doubles the size
        for hashed in self._hashes:
            used[self._find(hashed)] = 1
            if self._steps - before > MAX_STEPS * (len(self._hashes) + MAX_UNWATCHED):
                raise Fault(f"keys with colliding hashes, {len(self._hashes)} in one container", LimitError)
        self._steps = before


def _check_key(key: Any) -> bool:
    """Return True if the hash of a key or set element is predictable; raise `Fault` if the value cannot be a key."""
    left, waiting = MAX_KEY_VALUES, [key]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is tuple or kind is frozenset:
            left -= len(value) + (value is not key)
            if left < 0:
                raise Fault(f"a key of more than {MAX_KEY_VALUES} values", LimitError)
            waiting += value
        elif kind is int and not -(1 << 63) <= value < 1 << 64:
            raise Fault("an integer of more than 64 bits as a key", LimitError)
        elif kind in (list, dict, set, bytearray):
            raise Fault(f"a {kind.__name__} as a key")
    return type(key) in (int, float, complex, tuple, frozenset)  # objects of this package are hashed by their id


def _watch(items: Any, key: Any, watched: dict[int, KeyTable]) -> None:
    """Check a key before it is put into a dict or set."""
    in_order = type(key) is int and 0 <= key < len(items) + 8
    predictable = not in_order and _check_key(key)
    table = watched.get(id(items))
    if table is None:
        if not predictable or len(items) < MAX_UNWATCHED:
            return
        table = watched[id(items)] = KeyTable(items)
    table.add(key, known=type(items) is set and key in items)


def put_items(into: Any, pairs: list[Any], watched: dict[int, KeyTable]) -> None:
    """Set items (key, value, key, value, ...) of a dict or of an `Inert`."""
    items = into.items if type(into) is Inert else into
    if type(items) is not dict:
        raise Fault(f"items set in {describe(into)}, which is not a dict")
    if len(pairs) % 2:
        raise Fault(f"{len(pairs)} keys and values, which is an odd number")
    expected = len(items) + len(pairs) // 2
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if watched or type(key) is not str:
            _watch(items, key, watched)
        items[key] = value
    if len(items) != expected:
        raise Fault(f"a duplicate key in a dict, between {describe(pairs[0])} and {describe(pairs[-2])}")


def add_elements(into: set[Any], values: Iterable[Any], watched: dict[int, KeyTable]) -> None:
    """Add elements to a set."""
    for value in values:
        _watch(into, value, watched)
        into.add(value)
