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
of the time; machine.py has every opcode.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.gc_pause import paused
from ...base.messages import error_about
from ...base.text import show
from ...errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from .machine import (
    MAX_LINE,
    NEAR,
    OPCODES,
    Built,
    Fault,
    Foreign,
    Global,
    Inert,
    LargeBytes,
    Machine,
    describe,
    unescaped,
)

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
# Bytes of a mapped pickle that are not copied.
_LARGE = 1 << 16
# Bytes of arguments, for opcodes with a case in `_run`.
_ARGUMENT = {0x4B: 1, 0x4D: 2, 0x58: 4, 0x68: 1, 0x71: 1, 0x72: 4, 0x8C: 1}
_CLAUSE = "the pickle references"
# Added to the message if unknown globals are the only fault of the pickle.
ADVICE = '; unknown_globals="inert" reads the tensors around them'
# Maximum number of names in a message.
MAX_SHOWN = 100


_U32 = struct.Struct("<I").unpack_from
_NO_ELEMENTS: frozenset[Any] = frozenset()


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
        at = self.at
        self.at = at + size
        if self.at > len(self.data):
            raise IndexError
        return self.data[at : self.at]

    def line(self, limit: int = MAX_LINE) -> bytes:
        end = self.data.find(b"\n", self.at, self.at + limit + 1)
        if end < 0:
            if len(self.data) - self.at > limit:
                raise Fault(f"a line of more than {limit} bytes", LimitError)
            self.at = len(self.data) + 1
            raise IndexError
        line = self.data[self.at : end]
        self.at = end + 1
        return line

    def name(self) -> str:
        return self.line().decode()

    def frame(self, size: int) -> None:  # only a hint for readers of streams
        if size > len(self.data) - self.at:
            self.at = len(self.data) + 1
            raise IndexError

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
        data = self.take(size)
        value = data if kind is bytes else bytearray(data)
        if value:
            self.places[id(value)] = at
        return value

    # ---- containers ----

    def new(self, kind: type, items: list[Any]) -> Any:
        if kind is list:
            return items
        if kind is dict:
            pairs: dict[Any, Any] = {}
            if items:
                put_items(pairs, items, self.watched)
            return pairs
        if kind is frozenset:
            elements: set[Any] = set()
            add_elements(elements, items, {})
            return frozenset(elements) if elements else _NO_ELEMENTS
        return kind(items)

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
        known = self.table.get(name)
        if known is not None:
            self.harmless[name] = known
            return known
        foreign = self.foreign.get(name)
        if foreign is None:
            self.charge(len(name))  # the pickle can combine modules and names in many ways
            foreign = self.foreign[name] = Foreign(name)
        return foreign

    def extension(self, number: int) -> Global | Foreign:
        return self._global(f"extension code {number} of copyreg")

    def call(self, function: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise Fault(f"arguments must be a tuple, got {describe(args)}")
        if type(function) is Global and function.build is not None:
            if function.copies and args:
                self.charge(_copied_size(args))
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


def _copied_size(args: tuple[Any, ...]) -> int:
    """Return an upper bound for the bytes of copied arguments: 100 per item, which can become a dict entry."""
    size = 0
    for arg in args:
        if type(arg) is str or type(arg) is bytes:
            size += 4 * len(arg)
        elif type(arg) in (list, tuple, dict):
            size += 100 * len(arg)
    return size


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
    except TruncatedError:
        if complete:
            check_foreign(sorted(machine.foreign), path, inert, _CLAUSE, ", and is cut off")
        raise
    except (FormatError, LimitError, UnsupportedError) as error:
        check_foreign(sorted(machine.foreign), path, inert, _CLAUSE, f", and is malformed after that: {error}")
        raise
    harmless, foreign = sorted(machine.harmless), sorted(machine.foreign)
    check_foreign(foreign, path, inert, _CLAUSE)
    return Unpickled(value, machine.at, harmless, foreign, data, machine.places, base)


def check_foreign(names: Sequence[str], path: str, inert: bool, clause: str, fault: str = "") -> None:
    """Refuse globals outside the table, unless ``inert``; ``clause`` begins the message, ``fault`` names a fault."""
    if inert or not names:
        return
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:MAX_SHOWN])
    if len(names) > MAX_SHOWN:
        shown += f" and {len(names) - MAX_SHOWN} more"
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
                case 0x71:  # BINPUT
                    number = data[at + 1]
                    if number <= room or number <= (room := len(memo) + NEAR):
                        memo[number] = stack[-1]
                    else:
                        machine.remember(number, stack[-1])
                    at += 2
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
        if self._is_set:
            if count * 5 >= (size - 1) * 3:
                self._grow(count * (2 if count > 50_000 else 4) + 1)
        elif count >= size * 2 // 3:
            self._grow(count * 3)

    def _find(self, hashed: int) -> int:
        """Find the free slot for a hash, and count the steps."""
        used, mask = self._used, len(self._used) - 1
        slot, rest, steps = hashed & mask, hashed, 1
        while used[slot]:
            if self._is_set and slot + _LINEAR <= mask:
                free = used.find(0, slot, slot + _LINEAR + 1)
                if free >= 0:
                    slot = free
                    break
            rest >>= 5
            slot = (slot * 5 + rest + 1) & mask
            steps += 1
        self._steps += steps
        return slot

    def _grow(self, least: int) -> None:
        size = 8
        while size < least:
            size *= 2
        self._used = used = bytearray(size)
        before = self._steps  # CPython compares no keys when it resizes, and at least doubles the size
        for hashed in self._hashes:
            used[self._find(hashed)] = 1
            if self._steps - before > MAX_STEPS * (len(self._hashes) + MAX_UNWATCHED):
                raise Fault(f"keys with colliding hashes, {len(self._hashes)} in one container", LimitError)
        self._steps = before


def check_key(value: Any) -> bool:
    """Return True if the hash of a key or set element is predictable; raise `Fault` if the value cannot be a key."""
    kind = type(value)
    if kind is str or kind is bytes or kind is bool or value is None:
        return False
    if kind is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise Fault("an integer of more than 64 bits as a key", LimitError)
        return True
    if kind is float or kind is complex:
        return True
    if kind is tuple or kind is frozenset:
        _check_nested(value)
        return True
    if kind in (list, dict, set, bytearray):
        raise Fault(f"a {kind.__name__} as a key")
    return False  # an object of this package, hashed by its id


def _check_nested(value: Any) -> None:
    left, waiting = MAX_KEY_VALUES, [value]
    while waiting:
        inner = waiting.pop()
        left -= len(inner)
        if left < 0:
            raise Fault(f"a key of more than {MAX_KEY_VALUES} values", LimitError)
        for item in inner:
            if type(item) is tuple or type(item) is frozenset:
                left -= 1
                waiting.append(item)
            else:
                check_key(item)


def _watch(items: Any, key: Any, watched: dict[int, KeyTable]) -> None:
    """Check a key before it is put into a dict or set."""
    in_order = type(key) is int and 0 <= key < len(items) + 8
    predictable = not in_order and check_key(key)
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
