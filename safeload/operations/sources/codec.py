"""Convert frozen dataclasses to plain data, as JSON has it, and back.

A dataclass becomes an object, without optional fields that are empty; a NamedTuple becomes a list. Plain data comes
from files and other processes and cannot be trusted, so `decode` checks every field and names the first wrong field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

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
    if type(value) in _SCALARS:
        return value
    cls: Any = type(value)
    if _form_of(cls)[0] is Mapping:
        content = ((name, getattr(value, name), default) for name, default in _defaults_of(cls))
        return {name: encode(item) for name, item, default in content if item or item != default}
    if isinstance(value, (list, tuple)):
        if _SCALARS.issuperset(map(type, value)):
            return list(value)
        return [item if type(item) in _SCALARS else encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(cls: type[_T], plain: Any, prefix: str, *, extra: bool = False) -> _T:
    """Return a record from plain data; the inverse of `encode`. Records of later releases can have ``extra`` fields."""
    # Fields can be str, int, float, bool, Any, list, tuple, dict, unions and other dataclasses and NamedTuples.
    record: _T = _Decoder(prefix, extra).value(cls, plain, "")
    return record


class _Decoder:
    """Decodes values by the annotations of their fields; see `decode`."""

    def __init__(self, prefix: str, extra: bool) -> None:
        self._prefix = prefix
        self._extra = extra

    def value(self, kind: Any, value: Any, path: str) -> Any:
        """Return a decoded value; ``path`` is its place in the record, such as "sources[0].files"."""
        form, arguments = _form_of(kind)
        if form is Any:
            return value
        if form is object:
            if type(value) is kind or _is_scalar(kind, value):
                return value
        elif form is Union:
            return self._union(arguments, value, path)
        elif form is dict and isinstance(value, Mapping):
            each = arguments[1]
            items = value.items()
            return {self._key(key, path): self.value(each, item, f"{path}[{show(key)}]") for key, item in items}
        elif form is Mapping and isinstance(value, Mapping):
            return self._object(kind, value, path)
        elif form is NamedTuple and isinstance(value, (list, tuple)):
            return self._row(kind, value, path)
        elif form in (list, tuple) and isinstance(value, (list, tuple)):
            return self._items(form, arguments, value, path)
        raise self._error(path, kind, value)

    def _union(self, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        """Decode as the first kind with the right form: messages should name its fields."""
        for kind in kinds:
            if _has_form(kind, value):
                return self.value(kind, value, path)
        raise self._error(path, Union[kinds], value)  # noqa: UP007 # a tuple of kinds

    def _items(self, origin: Callable[[Any], Any], kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        if origin is tuple and kinds and kinds[-1] is not ...:
            if len(kinds) != len(value):
                raise self._fail(path, f"must have {len(kinds)} items, got {show(value)}")
            pairs = zip(kinds, value, strict=True)
            return tuple(self.value(each, item, f"{path}[{k}]") for k, (each, item) in enumerate(pairs))
        kind = kinds[0] if kinds else Any
        if kind is Any or (kind in _SCALARS and set(map(type, value)) <= {kind}):
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
            raise self._fail("", f"unknown field {show(f'{before}{unknown}')}")
        missing = next((key for key in required if key not in value), None)
        if missing is not None:
            raise self._fail(before + missing, "is missing")
        content = {key: self.value(kind, value[key], before + key) for key, kind in kinds.items() if key in value}
        try:
            return cls(**content)
        except FormatError:
            raise
        except (TypeError, ValueError) as error:  # of __post_init__
            raise self._fail(f"{path}:" if path else "", str(error)) from None

    def _row(self, cls: Any, value: Any, path: str) -> Any:
        kinds, required = _fields_of(cls)
        if not len(required) <= len(value) <= len(kinds):
            raise self._error(path, cls, value)
        pairs = zip(kinds.items(), value, strict=False)
        return cls(*[self.value(kind, item, f"{path}.{key}") for (key, kind), item in pairs])

    def _error(self, path: str, kind: Any, value: Any) -> FormatError:
        return self._fail(path, f"must be {_described(kind)}, got {show(value)}")

    def _fail(self, path: str, text: str) -> FormatError:
        return FormatError(f"{self._prefix}: {path} {text}" if path else f"{self._prefix}: {text}")


_SCALARS = frozenset((str, int, float, bool, NoneType))
_LARGEST_FLOAT = 1 << 1023


def _is_scalar(kind: Any, value: Any) -> bool:
    """Return True if a value has a scalar type: an int is also a float, but a bool is not an int."""
    if kind is float and type(value) is int:
        return abs(value) <= _LARGEST_FLOAT
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@cache
def _form_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the form of a kind, and its arguments: object for scalars, Mapping for dataclasses, or the kind itself."""
    origin = get_origin(kind) or kind
    if kind is Any:
        return Any, ()
    if kind in _SCALARS:
        return object, ()
    if origin in (Union, UnionType):
        return Union, get_args(kind)
    if origin is dict:
        return dict, get_args(kind) or (str, Any)
    if is_dataclass(kind):
        return Mapping, ()
    if hasattr(kind, "_fields"):
        return NamedTuple, ()
    return origin, get_args(kind)


@cache
def _fields_of(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the annotations of all fields, and the names of the required fields."""
    hints = get_type_hints(cls)
    if _form_of(cls)[0] is NamedTuple:
        return {name: hints[name] for name in cls._fields}, cls._fields[: len(cls._fields) - len(cls._field_defaults)]
    kinds = {field.name: hints[field.name] for field in fields(cls)}
    return kinds, tuple(name for name, default in _defaults_of(cls) if default is MISSING)


@cache
def _defaults_of(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Return the name and the default value of each field of a dataclass; MISSING if the field is required."""
    return tuple(
        (field.name, field.default if field.default_factory is MISSING else field.default_factory())
        for field in fields(cls)
    )


def _has_form(kind: Any, value: Any) -> bool:
    """Return True if a value has the type of a kind, whatever its content."""
    form, _ = _form_of(kind)
    if form is object:
        return type(value) is kind or _is_scalar(kind, value)
    if form in (dict, Mapping):
        return isinstance(value, Mapping)
    return form is Any or isinstance(value, (list, tuple))


def _described(kind: Any) -> str:
    form, arguments = _form_of(kind)
    if form is Union:
        *first, last = map(_described, arguments)
        return f"{', '.join(first)} or {last}"
    if form is NamedTuple:
        return f"[{', '.join(kind._fields)}]"
    return _KINDS.get(kind if form is object else form, "an object")
