"""Read the built-in schemas."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ..base.data import read_data
from ..base.text import show
from .schema import WEIGHT, Schema, SchemaEntry

_FOLDER = Path(__file__).parent / "schemas"
# Fields that a schema does not inherit.
_OWN = {"name", "about", "architectures", "model_types", "formats", "keys", "extends", "without"}

_Content = Mapping[str, Any]


@cache
def names() -> tuple[str, ...]:
    """Return the names of the built-in schemas."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@cache
def built_in() -> dict[str, Schema]:
    """Return the built-in schemas by name."""
    return {name: parse(_content(name)) for name in names()}


def load(name: Any) -> Schema:
    """Return a built-in schema by name.

    Raises:
        ValueError: there is no such schema, or the name is a path or the content of a schema.
    """
    listed = ", ".join(names())
    if not isinstance(name, str):
        raise ValueError(f"schema must be the name of a built-in schema, got {show(name)}; expected one of {listed}")
    if name in names():
        return built_in()[name]
    is_path = name.endswith(".json") or not {"/", "\\"}.isdisjoint(name)
    advice = ": only built-in schemas are supported, no files" if is_path else _nearest(name)
    raise ValueError(f"unknown schema {show(name)}{advice}; expected one of {listed}")


def _nearest(text: str) -> str:
    """Suggest the built-in schema with the nearest name, as a question."""
    import difflib  # imported here, because few calls need it

    plain = text.lower().replace("-", "_").replace(".", "_")
    close = difflib.get_close_matches(plain[:100], names(), n=1)
    return f", did you mean {show(close[0])}?" if close else ""


@cache
def _content(name: str) -> _Content:
    """Return the JSON of a built-in schema, merged with the schema that it extends."""
    content: _Content = read_data(__name__, f"schemas/{name}.json")
    if "extends" not in content:
        return content
    inherited = _content(content["extends"])
    without = content.get("without", ())
    tensors = {
        name: entry
        for name, entry in inherited["tensors"].items()
        if not any(name == pattern or fnmatchcase(name, pattern) for pattern in without)
    }
    for name, entry in content.get("tensors", {}).items():
        tensors[name] = {**tensors.get(name, {}), **entry}
    return {
        **{key: value for key, value in inherited.items() if key not in _OWN},
        **content,
        **{key: {**inherited.get(key, {}), **content.get(key, {})} for key in ("defaults", "counts")},
        "tensors": tensors,
    }


def parse(content: _Content) -> Schema:
    """Make a schema from its JSON."""
    return Schema(
        name=content["name"],
        about=content.get("about", ""),
        architectures=tuple(content.get("architectures", ())),
        model_types=tuple(content.get("model_types", ())),
        formats=tuple(content.get("formats", ())),
        keys=tuple(content.get("keys", ())),
        prefixes=tuple(content.get("prefixes", ())) or ("",),
        layers=content.get("layers"),
        more_layers=content.get("more_layers"),
        counts=content.get("counts", {}),
        defaults=content.get("defaults", {}),
        config=content.get("config", "config.json"),
        entries=tuple(_entry(name, entry) for name, entry in content["tensors"].items()),
    )


def _entry(name: str, entry: _Content) -> SchemaEntry:
    shape = entry["shape"]
    return SchemaEntry(
        name,
        None if shape is None else tuple(shape),
        entry.get("role", WEIGHT),
        entry.get("optional", False),
        entry.get("when"),
        entry.get("tied"),
        entry.get("tied_when"),
        tuple(entry.get("also", ())),
        tuple(entry.get("architectures", ())),
    )
