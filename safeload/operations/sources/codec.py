"""Converts frozen dataclasses to plain data, as JSON has it, and checks plain data while it converts it back.

A dataclass is an object without its optional fields that are empty; a NamedTuple is a list. Plain data comes from files
and from other processes, so `decode` checks every field and names the first one that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ...base.text import show
from ...errors import FormatError

_T = TypeVar("_T")

_KINDS: Mapping[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    NoneType: "null",
}


def encode(value: Any) -> Any:
    """Return a record, or a container of records, as plain data."""
    if is_dataclass(value):
        content = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: encode(item) for field, item in content if item or item != _default(field)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(cls: type[_T], plain: Any, what: str, *, extra: bool = False) -> _T:
    """Return the record that `encode` wrote.

    Args:
        cls: a dataclass or a NamedTuple.
        plain: untrusted plain data.
        what: begins messages: "invalid plan".
        extra: whether unknown fields are ignored, as in records of later releases.

    Raises:
        FormatError: a field is missing, unknown, or of the wrong type.
    """
    record: _T = _Decoder(what, extra).value(cls, plain, "")
    return record


class _Decoder:
    """Decodes values by the annotations of their fields.

    Args:
        what: see `decode`.
        extra: see `decode`.
    """

    def __init__(self, what: str, extra: bool) -> None:
        self._what = what
        self._extra = extra

    def value(self, kind: Any, value: Any, path: str) -> Any:
        """Return a value of a kind.

        Args:
            kind: a class, or what an annotation makes of classes.
            value: plain data.
            path: leads to the value: "sources[0].files".
        """
        if kind is Any or (kind in _SCALARS and _is_scalar(kind, value)):
            return value
        origin = get_origin(kind) or kind
        if origin in (Union, UnionType):
            return self._union(kind, value, path)
        if origin in (list, tuple) and isinstance(value, (list, tuple)):
            return self._items(origin, get_args(kind), value, path)
        if origin is dict and isinstance(value, Mapping):
            each = (get_args(kind) or (str, Any))[1]
            return {self._key(key, path): self.value(each, item, f"{path}[{show(key)}]") for key, item in value.items()}
        if is_dataclass(kind) and isinstance(value, Mapping):
            return self._object(kind, value, path)
        if _is_row(kind) and isinstance(value, (list, tuple)):
            return self._row(kind, value, path)
        raise self._error(path, kind, value)

    def _union(self, kind: Any, value: Any, path: str) -> Any:
        """Return a value of the first kind that has its form, so that messages name a field of that kind."""
        kinds = get_args(kind)
        for each in kinds:
            if _has_form(each, value):
                return self.value(each, value, path)
        raise self._error(path, kind, value)

    def _items(self, origin: Callable[[Any], Any], kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        if origin is tuple and kinds and kinds[-1] is not ...:
            if len(kinds) != len(value):
                raise self._fail(path, f"must have {len(kinds)} items, got {show(value)}")
            pairs = zip(kinds, value, strict=True)
            return tuple(self.value(each, item, f"{path}[{k}]") for k, (each, item) in enumerate(pairs))
        kind = kinds[0] if kinds else Any
        if kind is Any or (kind in _SCALARS and all(_is_scalar(kind, item) for item in value)):
            return origin(value)
        return origin(self.value(kind, item, f"{path}[{k}]") for k, item in enumerate(value))

    def _key(self, key: Any, path: str) -> str:
        if not isinstance(key, str):
            raise self._fail(path, f"must have strings as keys, got {show(key)}")
        return key

    def _object(self, cls: Any, value: Mapping[Any, Any], path: str) -> Any:
        kinds, required = _fields_of(cls)
        before = f"{path}." if path else ""
        unknown = None if self._extra else next((key for key in value if key not in kinds), None)
        if unknown is not None:
            raise self._fail(path, f"unknown field {show(unknown)}")
        missing = next((key for key in required if key not in value), None)
        if missing is not None:
            raise self._fail(before + missing, "is missing")
        content = {key: self.value(kind, value[key], before + key) for key, kind in kinds.items() if key in value}
        try:
            return cls(**content)
        except FormatError:
            raise
        except (TypeError, ValueError) as error:  # of __post_init__
            raise self._fail(path, str(error)) from None

    def _row(self, cls: Any, value: Any, path: str) -> Any:
        kinds, required = _fields_of(cls)
        if not len(required) <= len(value) <= len(kinds):
            raise self._error(path, cls, value)
        pairs = zip(kinds.items(), value, strict=False)
        return cls(*[self.value(kind, item, f"{path}.{key}") for (key, kind), item in pairs])

    def _error(self, path: str, kind: Any, value: Any) -> FormatError:
        return self._fail(path, f"must be {_described(kind)}, got {show(value)}")

    def _fail(self, path: str, text: str) -> FormatError:
        return FormatError(f"{self._what}: {path} {text}" if path else f"{self._what}: {text}")


_SCALARS = frozenset((str, int, float, bool, NoneType))
_LARGEST_FLOAT = 1 << 1023


def _is_scalar(kind: Any, value: Any) -> bool:
    """Whether a value is of a scalar kind; an integer is a number, a bool is not."""
    if kind is float and type(value) is int:
        return abs(value) <= _LARGEST_FLOAT
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_row(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@cache
def _fields_of(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The kinds of the fields, and the names of those without a default value."""
    hints = get_type_hints(cls)
    if _is_row(cls):
        return {name: hints[name] for name in cls._fields}, cls._fields[: len(cls._fields) - len(cls._field_defaults)]
    kinds = {field.name: hints[field.name] for field in fields(cls)}
    return kinds, tuple(field.name for field in fields(cls) if _default(field) is MISSING)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _has_form(kind: Any, value: Any) -> bool:
    origin = get_origin(kind) or kind
    if kind is Any:
        return True
    if kind in _SCALARS:
        return _is_scalar(kind, value)
    if origin is dict or is_dataclass(kind):
        return isinstance(value, Mapping)
    return isinstance(value, (list, tuple))


def _described(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        *some, last = map(_described, get_args(kind))
        return f"{', '.join(some)} or {last}"
    if _is_row(kind):
        return f"[{', '.join(kind._fields)}]"
    return _KINDS.get(origin, "an object")
