"""Values and faults of the pickle machines; opcodes.py has their opcodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...base.text import show
from ...errors import FormatError

# Function of torch that calls its first argument with its third, and sets attributes of the resulting tensor.
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"


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
