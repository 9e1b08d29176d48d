"""State and values of the pickle machine, which unpickler.py describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import FormatError, LimitError

# Longest integer: what LONG1 of protocol 2 can hold. Real ones have 8 bytes, states of random generators 16. Longer
# ones take quadratic time to print.
MAX_INT_BYTES = 255
# Longest line of a name or a number. Real names have some 100 characters.
MAX_LINE = 10_000
# Values in one dict key or set element; hashing a tuple visits each. Real keys are strings and integers.
MAX_KEY_VALUES = 100


class Global:
    """A row of the table of harmless globals.

    Attributes:
        name: "module.name".
        kind: what it is, for people.
        build: makes a value of a tuple of arguments; None for what cannot be called.
        code: of a storage or dtype the code in the table of dtypes; None when no array can show it.
        itemsize: bytes of an element of a storage or dtype.
    """

    __slots__ = ("build", "code", "itemsize", "kind", "name")

    def __init__(
        self,
        name: str,
        kind: str,
        build: Callable[[tuple[Any, ...]], Any] | None = None,
        code: str | None = None,
        itemsize: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self.build = build
        self.code = code
        self.itemsize = itemsize


class Foreign:
    """A global that is not in the table: its name and nothing else."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Inert:
    """What calling a `Foreign` would have made: an account of what the pickle said.

    Attributes:
        name: of the global.
        args: what it would have been called with.
        items: what would have been set in it or appended to it.
        state: what BUILD would have given it; None for nothing.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.items: dict[Any, Any] = {}
        self.state: Any = None


class Fault(Exception):  # noqa: N818 - becomes a FormatError or `kind` once the place is known
    """What is wrong at the opcode that is being worked on."""

    def __init__(self, message: str, kind: type[Exception] = FormatError) -> None:
        super().__init__(message)
        self.kind = kind


class Stop(Exception):  # noqa: N818 - no error
    """The pickle's end."""


class Machine:
    """State of one run; the opcodes work on it.

    Attributes:
        data: the bytes.
        at: position of the next byte to read.
        stack: values since the last mark.
        marks: the stacks below it.
        memo: values by number.
        table: the harmless globals by name.
        persistent: what a persistent id stands for.
        harmless: globals in the table that were named.
        foreign: globals not in it that were named.
    """

    __slots__ = ("at", "data", "foreign", "harmless", "marks", "memo", "persistent", "stack", "table")

    def __init__(self, data: bytes, start: int, table: Mapping[str, Global], persistent: Callable[[Any], Any]) -> None:
        self.data = data
        self.at = start
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.table = table
        self.persistent = persistent
        self.harmless: dict[str, Global] = {}
        self.foreign: dict[str, Foreign] = {}

    def take(self, size: int) -> bytes:
        """The next bytes."""
        at = self.at
        self.at = at + size
        if self.at > len(self.data):
            raise IndexError
        return self.data[at : self.at]

    def line(self, most: int = MAX_LINE) -> bytes:
        """The bytes up to a newline, which is skipped."""
        end = self.data.find(b"\n", self.at, self.at + most + 1)
        if end < 0:
            if len(self.data) - self.at > most:
                raise Fault(f"a line of more than {most} bytes", LimitError)
            self.at = len(self.data) + 1
            raise IndexError
        line = self.data[self.at : end]
        self.at = end + 1
        return line

    def pop_mark(self) -> list[Any]:
        """The values since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def global_named(self, name: str) -> Global | Foreign:
        """What stands for a global; it is remembered as asked for."""
        known = self.table.get(name)
        if known is not None:
            self.harmless[name] = known
            return known
        return self.foreign.setdefault(name, Foreign(name))

    def call(self, function: Any, args: Any) -> Any:
        """What a call gives: a row's own value, or an account of the call."""
        if type(args) is not tuple:
            raise Fault(f"arguments must be a tuple, found {describe(args)}")
        if type(function) is Global and function.build is not None:
            return function.build(args)
        if type(function) in (Foreign, Inert):
            return Inert(function.name, args)
        raise Fault(f"{describe(function)} cannot be called")


def describe(value: Any) -> str:
    """A value as messages show it: short and harmless."""
    if type(value) in (Global, Foreign, Inert):
        return show(value.name)
    if type(value) in (str, bytes):
        return show(value[:100])
    if type(value) in (int, float, bool) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return type(value).__name__.lower()


def show(text: str | bytes) -> str:
    """Text of a file as messages show it."""
    return ascii(text if len(text) <= 200 else text[:200])


def as_key(value: Any) -> Any:
    """A value that may be a dict key or set element: the same, or a `Fault`."""
    kind = type(value)
    if kind is str or kind is bool or kind is float or kind is bytes or value is None:
        return value
    if kind is int:
        if not -(1 << 63) <= value < 1 << 64:  # wider ones can be made to collide
            raise Fault("an integer of more than 64 bits as a key", LimitError)
        return value
    if kind is tuple or kind is frozenset:
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
                    as_key(item)
        return value
    if kind in (list, dict, set, bytearray):
        raise Fault(f"a {kind.__name__} as a key")
    return value  # ours, with the identity as its hash


def put(into: Any, pairs: list[Any]) -> None:
    """Sets items (key, value, key, value, ...) of a dict or of what is inert."""
    items = into.items if type(into) is Inert else into
    if type(items) is not dict:
        raise Fault(f"items set in {describe(into)}, which is no dict")
    if len(pairs) % 2:
        raise Fault(f"{len(pairs)} keys and values, which is no even number")
    expected = len(items) + len(pairs) // 2
    for k in range(0, len(pairs), 2):
        key = pairs[k]
        items[key if type(key) is str else as_key(key)] = pairs[k + 1]
    if len(items) != expected:
        raise Fault(f"a key is there twice in a dict, between {describe(pairs[0])} and {describe(pairs[-2])}")
