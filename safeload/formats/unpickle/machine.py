"""State and values of the pickle machine; run.py describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...base.text import show
from ...errors import FormatError, LimitError

# Longest integer in bytes, as for LONG1 of protocol 2, because printing an integer takes quadratic time. Real integers
# have 8 bytes, states of random generators 16.
MAX_INT_BYTES = 255
# Longest line with a name or a number. Real names have about 100 characters.
MAX_LINE = 10_000
# Maximum number of bytes to copy per byte of the pickle read so far: a few bytes can request a copy again and again
# (joined text, a list made into a tuple, combined arguments). Real pickles copy fewer bytes than they have.
MAX_COPIED = 50
# Memo numbers up to this distance from the number of entries count as consecutive.
NEAR = 8
# Function of torch that calls its first argument with its third, and sets attributes of the resulting tensor.
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Bytes that a pickle of any size can copy.
_COPIED_FREE = 1 << 16


class Global:
    """A row of the table of harmless globals."""

    __slots__ = ("build", "code", "copies", "itemsize", "kind", "name")

    def __init__(
        self,
        name: str,
        kind: str,
        build: Callable[[tuple[Any, ...]], Any] | None = None,
        *,
        code: str | None = None,
        itemsize: int = 0,
        copies: bool = False,
    ) -> None:
        self.name = name  # "module.name"
        self.kind = kind  # for readers of listings
        self.build = build  # makes a value from a tuple of arguments; None if the global cannot be called
        self.code = code  # of a storage or dtype in the table of dtypes; None if no array can represent it
        self.itemsize = itemsize  # bytes of an element, for a storage or dtype
        self.copies = copies  # True if the built value holds copies of the arguments


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


class PickleEnd(Exception):  # noqa: N818 - not an error
    """The pickle's end."""


class Machine:
    """State of one run; the opcodes work on it."""

    __slots__ = (
        *("at", "data", "foreign", "harmless", "marks", "memo", "persistent", "places", "stack", "table", "watched"),
        *("_copied", "far"),
    )

    def __init__(self, data: bytes, table: Mapping[str, Global], persistent: Callable[[Any], Any]) -> None:
        self.data = data
        self.at = 0  # position of the next byte to read
        self.stack: list[Any] = []  # values since the last mark
        self.marks: list[list[Any]] = []  # the stacks below the last mark
        self.memo: dict[int, Any] = {}  # values by number, for numbers in order
        self.table = table  # the harmless globals by name
        self.persistent = persistent  # returns the value for a persistent id
        self.harmless: dict[str, Global] = {}  # globals of the pickle in the table
        self.foreign: dict[str, Foreign] = {}  # globals of the pickle outside the table
        self.watched: dict[int, Any] = {}  # tables of dicts and sets with keys of predictable hashes
        self.places: dict[int, int] = {}  # position of bytes objects in the data, by id, which can be reused since
        self._copied = 0
        self.far: dict[str, Any] = {}  # values by the text of their number, for all other numbers

    def charge(self, size: int) -> None:
        """Count bytes before copying them from values that the pickle can refer to again."""
        self._copied += size
        if self._copied > MAX_COPIED * self.at + _COPIED_FREE:
            raise Fault(f"copied values take more than {MAX_COPIED} times the pickle's own bytes", LimitError)

    def remember(self, number: int, value: Any) -> None:
        """Set a memo entry."""
        if number <= len(self.memo) + NEAR:
            self.memo[number] = value
        else:  # str keys have random hashes; ints out of order could be chosen to collide
            self.far[str(number)] = value

    def recall(self, number: int) -> Any:
        """Return a memo entry, or raise KeyError if it was never set."""
        if number in self.memo:
            return self.memo[number]
        value = self.far.get(str(number), self)
        if value is self:
            raise KeyError(number)
        return value

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        at = self.at
        self.at = at + size
        if self.at > len(self.data):
            raise IndexError
        return self.data[at : self.at]

    def line(self, limit: int = MAX_LINE) -> bytes:
        """Return the bytes up to a newline, and skip the newline."""
        end = self.data.find(b"\n", self.at, self.at + limit + 1)
        if end < 0:
            if len(self.data) - self.at > limit:
                raise Fault(f"a line of more than {limit} bytes", LimitError)
            self.at = len(self.data) + 1
            raise IndexError
        line = self.data[self.at : end]
        self.at = end + 1
        return line

    def pop_mark(self) -> list[Any]:
        """Return the values since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def global_named(self, name: str) -> Global | Foreign:
        """Return the value for a global and record the global."""
        known = self.table.get(name)
        if known is not None:
            self.harmless[name] = known
            return known
        foreign = self.foreign.get(name)
        if foreign is None:
            self.charge(len(name))  # the pickle can combine modules and names in many ways
            foreign = self.foreign[name] = Foreign(name)
        return foreign

    def call(self, function: Any, args: Any) -> Any:
        """Return the result of a call: the value of the row's function, or a record of the call."""
        if type(args) is not tuple:
            raise Fault(f"arguments must be a tuple, got {describe(args)}")
        if type(function) is Global and function.build is not None:
            if function.copies and args:
                self.charge(_copied_size(args))
            return function.build(args)
        if type(function) in (Foreign, Inert):
            return Inert(function.name, args)
        raise Fault(f"{describe(function)} cannot be called")


def _copied_size(args: tuple[Any, ...]) -> int:
    """Return an upper bound for the bytes of copied arguments: 100 per item, which can become a dict entry."""
    size = 0
    for arg in args:
        if type(arg) is str or type(arg) is bytes:
            size += 4 * len(arg)
        elif type(arg) in (list, tuple, dict):
            size += 100 * len(arg)
    return size


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
