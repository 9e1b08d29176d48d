"""State and values of the pickle machine, which run.py describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...base.text import show
from ...errors import FormatError, LimitError

# Longest integer in bytes: the limit of LONG1 of protocol 2. Real ones have 8 bytes, states of random generators 16.
# Printing an integer takes quadratic time.
MAX_INT_BYTES = 255
# Longest line of a name or a number. Real names have about 100 characters.
MAX_LINE = 10_000
# Bytes that may be copied for each byte of the pickle read so far: a few bytes can request, again and again, a value
# that is built by copying others (joined text, a list made into a tuple, combined arguments). Real pickles copy fewer
# bytes than they have.
MAX_COPIED = 50
# Memo numbers at most this far beyond the count of entries are in order.
NEAR = 8
# Bytes that any pickle may copy, whatever its size.
_COPIED_FREE = 1 << 16


class Global:
    """A row of the table of harmless globals.

    Attributes:
        name: "module.name".
        kind: what it is, for readers of listings.
        build: makes a value from a tuple of arguments; None for a global that cannot be called.
        code: for a storage or dtype, the code in the table of dtypes; None if no array can represent it.
        itemsize: for a storage or dtype, the bytes of an element.
        copies: whether the value that it builds holds copies of its arguments.
    """

    __slots__ = ("build", "code", "copies", "itemsize", "kind", "name")

    def __init__(
        self,
        name: str,
        kind: str,
        build: Callable[[tuple[Any, ...]], Any] | None = None,
        code: str | None = None,
        itemsize: int = 0,
        *,
        copies: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.build = build
        self.code = code
        self.itemsize = itemsize
        self.copies = copies


class Built:
    """Base class of values whose state BUILD sets."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Sets the state, or raises `Fault`."""
        raise NotImplementedError


class Foreign:
    """A global that is not in the table: only its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Inert:
    """A placeholder for the result of calling a `Foreign`: a record of what the pickle said.

    Attributes:
        name: of the global.
        args: arguments of the call.
        items: items that the pickle sets in it or appends to it.
        state: state that BUILD sets; None without one.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.items: dict[Any, Any] = {}
        self.state: Any = None


class Fault(Exception):  # noqa: N818 - becomes a FormatError or `kind` once the position is known
    """A fault at the current opcode."""

    def __init__(self, message: str, kind: type[Exception] = FormatError) -> None:
        super().__init__(message)
        self.kind = kind


class PickleEnd(Exception):  # noqa: N818 - not an error
    """The pickle's end."""


class Machine:
    """State of one run; the opcodes work on it.

    Attributes:
        data: the bytes.
        at: position of the next byte to read.
        stack: values since the last mark.
        marks: the stacks below it.
        memo: values by number, for numbers in order.
        far: values by the text of their number, for other numbers.
        table: the harmless globals by name.
        persistent: returns the value for a persistent id.
        harmless: globals named by the pickle that are in the table.
        foreign: globals named by the pickle that are not in the table.
        places: position of bytes objects in the data, by their id, which may have been reused since.
        watched: tables of dicts and sets whose keys could be chosen to collide.
    """

    __slots__ = (
        *("at", "data", "foreign", "harmless", "marks", "memo", "persistent", "places", "stack", "table", "watched"),
        *("_copied", "far"),
    )

    def __init__(self, data: bytes, table: Mapping[str, Global], persistent: Callable[[Any], Any]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.table = table
        self.persistent = persistent
        self.harmless: dict[str, Global] = {}
        self.foreign: dict[str, Foreign] = {}
        self.watched: dict[int, Any] = {}
        self.places: dict[int, int] = {}
        self._copied = 0
        self.far: dict[str, Any] = {}

    def charge(self, size: int) -> None:
        """Counts bytes about to be copied from values that the pickle may refer to again."""
        self._copied += size
        if self._copied > MAX_COPIED * self.at + _COPIED_FREE:
            raise Fault(
                f"values copied from others take more than {MAX_COPIED} times the pickle's own bytes", LimitError
            )

    def remember(self, number: int, value: Any) -> None:
        """Sets a memo entry.

        Numbers in order are used as keys. Others could be chosen to collide in the dict: the key is their text, whose
        hash is randomised.
        """
        if number <= len(self.memo) + NEAR:
            self.memo[number] = value
        else:
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
        """The value for a global, which is recorded as named."""
        known = self.table.get(name)
        if known is not None:
            self.harmless[name] = known
            return known
        made = self.foreign.get(name)
        if made is None:
            self.charge(len(name))  # module and name, which the pickle may combine in many ways
            made = self.foreign[name] = Foreign(name)
        return made

    def call(self, function: Any, args: Any) -> Any:
        """The result of a call: the value that the row builds, or a record of the call."""
        if type(args) is not tuple:
            raise Fault(f"arguments must be a tuple, found {describe(args)}")
        if type(function) is Global and function.build is not None:
            if function.copies and args:
                self.charge(_copied_size(args))
            return function.build(args)
        if type(function) in (Foreign, Inert):
            return Inert(function.name, args)
        raise Fault(f"{describe(function)} cannot be called")


def _copied_size(args: tuple[Any, ...]) -> int:
    """Upper bound of the bytes that copies of arguments take: 100 for an item, which may become a dict entry."""
    size = 0
    for arg in args:
        if type(arg) is str or type(arg) is bytes:
            size += 4 * len(arg)
        elif type(arg) in (list, tuple):
            size += 100 * len(arg)
    return size


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
