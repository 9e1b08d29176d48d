"""Read schemas from JSON: built-in ones and files of the caller."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ..base.data import read_data
from ..base.paths import PathLike
from ..base.text import show
from ..errors import FormatError
from ..stores.json_file import read_json
from .expressions import ExpressionError, names_in
from .schema import ANY, PLACEHOLDER, PREFIX, ROLES, WEIGHT, Schema, SchemaEntry

_FOLDER = Path(__file__).parent / "schemas"
# Maximum length of a chain of extensions.
_MAX_BASES = 8
# Maximum number of placeholders in a name: layer and expert.
_MAX_NUMBERS = 2
# A placeholder beside a digit or another placeholder: the boundary between the numbers would be ambiguous.
_AMBIGUOUS = re.compile(r"[0-9}]\{|\}[0-9]", re.ASCII)
_LISTS = ("architectures", "model_types", "formats", "keys", "prefixes", "without")
_OBJECTS = ("defaults", "counts", "tensors")
_EXPRESSIONS = ("layers", "more_layers")
_FIELDS = {"name", "about", "extends", "config", *_LISTS, *_OBJECTS, *_EXPRESSIONS}
# Fields that a schema does not inherit.
_OWN = {"name", "about", "architectures", "model_types", "formats", "keys", "extends", "without"}
_ENTRY_FIELDS = {"shape", "role", "optional", "when", "tied", "tied_when", "also", "architectures"}

_Content = Mapping[str, Any]


def load(source: str | PathLike | _Content) -> Schema:
    """Load a schema by the name of a built-in one, from a JSON file, or from its parsed content.

    Raises:
        ValueError: the name is unknown.
        FormatError: the file is not a schema.
        OSError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        return parse(source)
    text = os.fspath(source)
    if text in names():
        return _built_in(text)
    if not text.endswith(".json") and os.sep not in text:
        raise ValueError(f"unknown schema {show(text)}{_nearest(text)}; expected a JSON file or one of {_list()}")
    return parse(read_json(text, "the schema"), text)


@cache
def names() -> tuple[str, ...]:
    """Return the names of the built-in schemas."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@cache
def built_in() -> dict[str, Schema]:
    """Return the built-in schemas by name."""
    return {name: _built_in(name) for name in names()}


@cache
def _built_in(name: str) -> Schema:
    return parse(_content(name), _path(name))


def _content(name: str) -> _Content:
    return read_data(__name__, f"schemas/{name}.json")


def _path(name: str) -> str:
    return str(_FOLDER / f"{name}.json")


def _list() -> str:
    return ", ".join(names())


def _nearest(text: str) -> str:
    """Suggest the built-in schema with the nearest name, as a question."""
    import difflib  # imported here, because few calls need it

    plain = text.lower().replace("-", "_").replace(".", "_")
    close = difflib.get_close_matches(plain[:100], names(), n=1)
    return f", did you mean {show(close[0])}?" if close else ""


# ---- extensions ----


def _extended(content: Any, path: str | None, chain: tuple[str, ...] = ()) -> _Content:
    """Return the content of a schema, merged with the schemas that it extends.

    Raises:
        FormatError: a schema does not exist or extends itself.
    """
    _check_fields(content, path)
    base = content.get("extends")
    if base is None:
        if content.get("without"):
            raise FormatError("schema: without requires extends", path)
        return {**content, "tensors": dict(content.get("tensors", {}))}
    base_content, file = _base(base, path)
    chain = (*chain, file)
    if file in chain[:-1] or len(chain) > _MAX_BASES:
        bases = " -> ".join(show(os.path.basename(link)) for link in chain)
        reason = "is a cycle" if file in chain[:-1] else f"is longer than {_MAX_BASES}"
        raise FormatError(f"schema: extends: {bases} {reason}", path)
    inherited = _extended(base_content, file, chain)
    tensors = dict(inherited["tensors"])
    for pattern in content.get("without", ()):
        excluded = [name for name in tensors if name == pattern or fnmatchcase(name, pattern)]
        if not excluded:
            raise FormatError(f"schema: without: {show(pattern)} matches no tensor of schema {show(base)}", path)
        for name in excluded:
            del tensors[name]
    for name, entry in content.get("tensors", {}).items():
        tensors[name] = _merged(tensors[name], entry) if name in tensors else entry
    merged = {key: value for key, value in inherited.items() if key not in _OWN} | dict(content) | {"tensors": tensors}
    for key in ("defaults", "counts"):
        merged[key] = {**inherited.get(key, {}), **content.get(key, {})}
    return merged


def _base(base: Any, path: str | None) -> tuple[_Content, str]:
    """Return the content and path of a built-in schema, or of a file beside the extending file.

    Raises:
        FormatError: neither exists.
    """
    if isinstance(base, str) and base in names():
        return _content(base), _path(base)
    if path is not None and isinstance(base, str) and base.endswith(".json") and not set(base) & set("/\\:"):
        file = os.path.join(os.path.dirname(path), base)
        if os.path.isfile(file):
            return read_json(file, "the schema"), file
    near = _nearest(base) if isinstance(base, str) else ""
    where = "a file.json beside this one" if path is not None else "a built-in schema"
    raise FormatError(f"schema: extends is {show(base)}, expected {where}, or one of {_list()}{near}", path)


def _merged(inherited: Any, entry: Any) -> Any:
    """Merge the fields of a tensor with its inherited fields; null removes a field."""
    if not isinstance(entry, Mapping):
        return entry
    removed = {key for key, value in entry.items() if value is None and key != "shape"}
    return {key: value for key, value in {**inherited, **entry}.items() if key not in removed}


# ---- parsing ----


def parse(content: _Content, path: str | None = None) -> Schema:
    """Make a schema from the parsed content of its JSON file.

    Raises:
        FormatError: the content is not a schema.
    """
    whole = _extended(content, path)
    tensors, layers, counts = whole["tensors"], whole.get("layers"), whole.get("counts", {})
    if not tensors:
        raise FormatError("schema: tensors must be a nonempty object", path)
    defaults = whole.get("defaults", {})
    if not all(isinstance(value, (int, str)) for value in defaults.values()):
        raise FormatError("schema: defaults must be an object of integers and expressions", path)
    texts = [layers, whole.get("more_layers"), *counts.values()]
    for text in (*texts, *(value for value in defaults.values() if isinstance(value, str))):
        if text is not None:
            _check_expression(text, "layers, counts or defaults", path)
    prefixes = tuple(whole.get("prefixes", ())) or ("",)
    if any("{" in prefix for prefix in prefixes):
        raise FormatError("schema: prefixes must not contain {}, which belongs in names", path)
    slots = {*counts, *([""] if layers is not None else [])} - {"prefix"}
    return Schema(
        name=whole["name"],
        about=whole.get("about", ""),
        architectures=tuple(whole.get("architectures", ())),
        model_types=tuple(whole.get("model_types", ())),
        formats=tuple(whole.get("formats", ())),
        keys=tuple(whole.get("keys", ())),
        prefixes=prefixes,
        layers=layers,
        more_layers=whole.get("more_layers"),
        counts=dict(counts),
        defaults=dict(defaults),
        config=whole.get("config", "config.json"),
        entries=tuple(_entry(name, entry, slots, path) for name, entry in tensors.items()),
    )


def _check_fields(content: Any, path: str | None) -> None:
    """Check the types of the fields of a schema."""
    if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
        raise FormatError('a schema must be {"name": string, "tensors": {...}, ...}', path)
    unknown = sorted(content.keys() - _FIELDS)
    if unknown:
        raise FormatError(
            f"schema: unknown field {show(unknown[0])}, expected one of {', '.join(sorted(_FIELDS))}", path
        )
    for field in _LISTS:
        if not _are_texts(content.get(field, ())):
            raise FormatError(f"schema: {field} must be a list of strings", path)
    for field in _OBJECTS:
        if not isinstance(content.get(field, {}), Mapping):
            expected = "a nonempty object" if field == "tensors" else "an object"
            raise FormatError(f"schema: {field} must be {expected}", path)
    for field in ("about", "config"):
        if not isinstance(content.get(field, ""), str):
            raise FormatError(f"schema: {field} must be a string", path)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _entry(name: str, entry: Any, slots: set[str], path: str | None) -> SchemaEntry:
    """Make an entry from its JSON."""
    if not isinstance(entry, Mapping) or entry.keys() - _ENTRY_FIELDS or "shape" not in entry:
        fields = ", ".join(sorted(_ENTRY_FIELDS))
        raise FormatError(f"schema: {show(name)} must be an object with shape, and no fields except {fields}", path)
    shape, role, also = entry["shape"], entry.get("role", WEIGHT), entry.get("also", ())
    if shape is not None and not isinstance(shape, (list, tuple)):
        raise FormatError(f"schema: the shape of {show(name)} must be a list of expressions or null", path)
    if role not in (*ROLES, WEIGHT):
        raise FormatError(f"schema: the role of {show(name)} is {show(role)}, expected one of {', '.join(ROLES)}", path)
    if not isinstance(entry.get("optional", False), bool):
        raise FormatError(f"schema: optional must be true or false for {show(name)}", path)
    for field in ("also", "architectures"):
        if not _are_texts(entry.get(field, ())):
            raise FormatError(f"schema: {field} must be a list of names for {show(name)}", path)
    if not isinstance(entry.get("tied"), (str, type(None))):
        raise FormatError(f"schema: tied must be a name for {show(name)}", path)
    for text in (name, *also):
        _check_name(text, name, slots, path)
    sizes = None if shape is None else tuple(str(size) if type(size) is int else size for size in shape)
    for size in sizes or ():
        if size != ANY:
            _check_expression(size.removesuffix(ANY) if isinstance(size, str) else size, repr(name), path)
    for text in (entry.get("when"), entry.get("tied_when")):
        if text is not None:
            _check_expression(text, repr(name), path)
    return SchemaEntry(
        name,
        sizes,
        role,
        entry.get("optional", False),
        entry.get("when"),
        entry.get("tied"),
        entry.get("tied_when"),
        tuple(also),
        tuple(entry.get("architectures", ())),
    )


def _check_name(text: str, name: str, slots: set[str], path: str | None) -> None:
    """Check the placeholders of a name or an alternative name."""
    placeholders = PLACEHOLDER.findall(text.replace(PREFIX, ""))
    if placeholders != PLACEHOLDER.findall(name.replace(PREFIX, "")) or len(placeholders) > _MAX_NUMBERS:
        raise FormatError(
            f"schema: {show(name)} and its other names must have the same number of {{}}, at most {_MAX_NUMBERS}", path
        )
    for slot in placeholders:
        if slot not in slots:
            missing = "layers is missing" if slot == "" else f"counts has no {slot}"
            raise FormatError(f"schema: {show(name)} has {{{slot}}}, but {missing}", path)
    if _AMBIGUOUS.search(text.replace(PREFIX, "")):
        raise FormatError(f"schema: {show(name)} has two adjacent numbers", path)


def _check_expression(text: Any, where: str, path: str | None) -> None:
    if not isinstance(text, str):
        raise FormatError(f"schema: {where}: expected an expression, got {show(text)}", path)
    try:
        names_in(text)
    except ExpressionError as error:
        raise FormatError(f"schema: {where}: {error}", path) from None
