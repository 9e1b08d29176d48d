"""Schemas of architectures: JSON files that map tensor names to shapes over the keys of a config.

A schema is data, see ``safeload/models/schemas``::

    {"name": "tiny", "architectures": ["TinyForCausalLM"], "model_types": ["tiny"], "layers": "num_hidden_layers",
     "prefixes": ["model.", ""], "defaults": {"head_dim": "hidden_size // num_attention_heads"},
     "tensors": {"{prefix}layers.{}.attn.weight": {"shape": ["3 * hidden_size", "hidden_size"]}, ...}}

- ``{}`` in a name is the layer number, ``{prefix}`` one of ``prefixes``: the one that matches the most names.
- A shape is a list of `safeload.models.expressions` over config keys, "?" for any size; null for any shape.
- ``defaults``: values of keys that the config omits or has as null: a number or an expression.
- ``role`` is "embedding", "norm", "bias", "head" or "buffer"; a tensor without one is a weight.
- ``optional``: the tensor may be absent. ``when``: an expression; the tensor exists if its value is not 0.
- ``tied``: the tensor that this one is tied to if ``tied_when`` is not 0; then it may be absent.
- ``also``: alternative names. ``formats``: file formats that the schema applies to if there is no config.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..base.paths import PathLike
from ..base.text import show
from ..errors import FormatError
from .expressions import ExpressionError, evaluate, names_in

ROLES = ("embedding", "norm", "bias", "head", "buffer")
WEIGHT = "weight"

# More layers than this are a mistake in a config; expanding them would exhaust memory.
MAX_LAYERS = 100_000

# A layer number: at most 4300 digits, the limit of ``int``.
NUMBER = "0|[1-9][0-9]{0,4299}"

# Placeholders in names for the layer number and for one of the prefixes.
_LAYER, PREFIX = "{}", "{prefix}"
_FOLDER = Path(__file__).parent / "schemas"
_FIELDS = {
    *("name", "about", "architectures", "model_types", "formats"),
    *("prefixes", "layers", "defaults", "tensors"),
}
_ENTRY_FIELDS = {"shape", "role", "optional", "when", "tied", "tied_when", "also"}


class ConfigError(ValueError):
    """A config lacks a key that a schema needs, or has a wrong value there."""


class Entry(NamedTuple):
    """One tensor of a schema, or one of each layer; the module docstring describes the fields."""

    name: str
    shape: tuple[str, ...] | None
    role: str
    optional: bool
    when: str | None
    tied: str | None
    tied_when: str | None
    also: tuple[str, ...]


class Wanted(NamedTuple):
    """One tensor that a model with a given config is expected to have.

    Attributes:
        name: its name.
        shape: its shape; None for any shape, or in it for any size.
        layer: its layer number, None outside of layers.
        required: whether it must be present.
        entry: the entry of the schema.
        tied: name of the tensor that this one is tied to, None for none.
    """

    name: str
    shape: tuple[int | None, ...] | None
    layer: int | None
    required: bool
    entry: Entry
    tied: str | None


class Schema(NamedTuple):
    """The tensors of an architecture. Made by `parse` and `load`."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    formats: tuple[str, ...]
    prefixes: tuple[str, ...]
    layers: str | None
    defaults: Mapping[str, int | str]
    entries: tuple[Entry, ...]
    pattern: re.Pattern[str]

    def find(self, name: str) -> tuple[Entry, int | None] | None:
        """The entry that matches a name, and its layer number; None if the architecture does not have the name."""
        found = self.pattern.fullmatch(name)
        if found is None or found.lastgroup is None:
            return None
        number = found[f"l{found.lastgroup[1:]}"] if f"l{found.lastgroup[1:]}" in self.pattern.groupindex else None
        return self.entries[int(found.lastgroup[1:].partition("_")[0])], None if number is None else int(number)

    def role(self, name: str) -> str | None:
        """The role of a tensor, "weight" by default; None for an unknown name."""
        found = self.find(name)
        return None if found is None else found[0].role

    def tied(self, names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, str]:
        """Absent tensors that are tied to another: name of the head to name of the embedding.

        Raises:
            ConfigError, ExpressionError: the condition cannot be evaluated.
        """
        keys = Config(config, self.defaults)
        result = {}
        for entry in self.entries:
            if entry.tied is None or entry.optional or _LAYER in entry.name:
                continue
            if entry.tied_when is not None and evaluate(entry.tied_when, keys) == 0:
                continue
            for prefix in self.prefixes:
                name, other = entry.name.replace(PREFIX, prefix), entry.tied.replace(PREFIX, prefix)
                if name not in names and other in names:
                    result[name] = other
                    break
        return result

    def expand(self, config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, Wanted]:
        """All tensors of a model with this config, by name, in the order of the schema.

        Args:
            config: parsed config.json; None for defaults only.
            names: names of the tensors of the model; they select the prefix and alternative names.

        Raises:
            ConfigError: a required key is missing or not an integer.
            ExpressionError: an expression cannot be evaluated.
        """
        keys = Config(config, self.defaults)
        count = 0
        if self.layers is not None:
            count = evaluate(self.layers, keys)
            if not 0 <= count <= MAX_LAYERS:
                raise ConfigError(f"{self.layers} is {count}, but a model has 0 to {MAX_LAYERS} layers")
        known = names if isinstance(names, (set, frozenset, dict, Mapping)) else set(names)
        choices = [self._expand_with(prefix, keys, count, known) for prefix in self.prefixes]
        return max(choices, key=lambda wanted: sum(name in known for name in wanted))

    def _expand_with(self, prefix: str, keys: Config, count: int, known: Collection[str]) -> dict[str, Wanted]:
        result = {}
        for entry in self.entries:
            if entry.when is not None and evaluate(entry.when, keys) == 0:
                continue
            shape = None
            if entry.shape is not None:
                shape = tuple(None if size == "?" else _size(size, keys) for size in entry.shape)
            tied = None if entry.tied is None else entry.tied.replace(PREFIX, prefix)
            if tied is not None and entry.tied_when is not None and evaluate(entry.tied_when, keys) == 0:
                tied = None
            required = not entry.optional and tied is None
            for layer in range(count) if _LAYER in entry.name else (None,):
                spellings = [_spell(text, prefix, layer) for text in (entry.name, *entry.also)]
                name = next((text for text in spellings if text in known), spellings[0])
                result[name] = Wanted(name, shape, layer, required, entry, tied)
        return result


def _spell(text: str, prefix: str, layer: int | None) -> str:
    text = text.replace(PREFIX, prefix)
    return text if layer is None else text.replace(_LAYER, str(layer))


def _size(text: str, keys: Config) -> int:
    value = evaluate(text, keys)
    if value < 0:
        raise ConfigError(f"{text} is {value}, but a size is at least 0")
    return value


class Config:
    """The values of a config as integers, with a schema's defaults for missing keys.

    Args:
        values: parsed config.json; None without one.
        defaults: name to number or expression.
    """

    def __init__(self, values: Mapping[str, Any] | None, defaults: Mapping[str, int | str]) -> None:
        self._values = values
        self._defaults = defaults
        self._open: list[str] = []

    def __call__(self, name: str) -> int:
        """The value of a key; "text.dim" is the key "dim" in the object "text".

        Raises:
            ConfigError: the key is missing, or its value is not an integer.
        """
        value: Any = self._values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None and name in self._defaults:
            value = self._defaults[name]
            if isinstance(value, str):
                if name in self._open:
                    raise ConfigError(
                        f"the default of {show(name)} depends on itself: {' -> '.join([*self._open, name])}"
                    )
                self._open.append(name)
                value = evaluate(value, self)
                self._open.pop()
        if value is None:
            where = "there is no config.json" if self._values is None else "config.json lacks it"
            raise ConfigError(f"{show(name)} is required, but {where}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int):
            raise ConfigError(f"{show(name)} in config.json is {str(value)[:60]!r}, expected an integer")
        return int(value)


# ---- reading ----


def parse(content: Mapping[str, Any], path: str | None = None) -> Schema:
    """Makes a schema from the parsed content of its JSON file.

    Raises:
        FormatError: the content is not a schema; the message says what is wrong.
    """

    def texts(field: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        value = content.get(field, default)
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            raise FormatError(f"schema: {field} must be a list of strings", path)
        return tuple(value)

    if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
        raise FormatError('a schema must be {"name": string, "tensors": {...}, ...}', path)
    unknown = sorted(content.keys() - _FIELDS)
    if unknown:
        raise FormatError(
            f"schema: unknown field {show(unknown[0])}, expected one of {', '.join(sorted(_FIELDS))}", path
        )
    tensors, defaults, layers = content.get("tensors"), content.get("defaults", {}), content.get("layers")
    if not isinstance(tensors, Mapping) or not tensors:
        raise FormatError("schema: tensors must be a nonempty object", path)
    if not isinstance(defaults, Mapping) or not all(isinstance(value, (int, str)) for value in defaults.values()):
        raise FormatError("schema: defaults must be an object of integers and expressions", path)
    entries = tuple(_entry(name, entry, path) for name, entry in tensors.items())
    for text in (layers, *(value for value in defaults.values() if isinstance(value, str))):
        if text is not None:
            _check_expression(text, "layers or defaults", path)
    if layers is None and any(_LAYER in entry.name for entry in entries):
        raise FormatError("schema: names have {}, but layers does not give their number", path)
    prefixes = texts("prefixes", ("",)) or ("",)
    if any(_LAYER in prefix for prefix in prefixes):
        raise FormatError("schema: prefixes must not have {}, which belongs in names", path)
    pattern = names_pattern(entries, prefixes)
    return Schema(
        content["name"],
        texts("architectures"),
        texts("model_types"),
        texts("formats"),
        prefixes,
        layers,
        dict(defaults),
        entries,
        pattern,
    )


def _entry(name: str, entry: Any, path: str | None) -> Entry:
    """Makes an entry from its JSON.

    Raises:
        FormatError: it is not an entry of a schema; the message says what is wrong.
    """
    if not isinstance(entry, Mapping) or entry.keys() - _ENTRY_FIELDS or "shape" not in entry:
        fields = ", ".join(sorted(_ENTRY_FIELDS))
        raise FormatError(f"schema: {show(name)} must be an object with shape, and no fields other than {fields}", path)
    shape, role, also = entry["shape"], entry.get("role", WEIGHT), entry.get("also", ())
    if shape is not None and not isinstance(shape, (list, tuple)):
        raise FormatError(f"schema: the shape of {show(name)} must be a list of expressions or null", path)
    if role not in (*ROLES, WEIGHT):
        raise FormatError(f"schema: the role of {show(name)} is {show(role)}, expected one of {', '.join(ROLES)}", path)
    if not isinstance(entry.get("optional", False), bool):
        raise FormatError(f"schema: optional of {show(name)} must be true or false", path)
    if not isinstance(also, (list, tuple)) or not all(isinstance(text, str) for text in (name, *also)):
        raise FormatError(f"schema: also of {show(name)} must be a list of names", path)
    if not isinstance(entry.get("tied"), (str, type(None))):
        raise FormatError(f"schema: tied of {show(name)} must be a name", path)
    if any(text.count(_LAYER) != name.count(_LAYER) or text.count(_LAYER) > 1 for text in (name, *also)):
        raise FormatError(
            f"schema: {show(name)} and its other names must have the same number of {{}}, at most one", path
        )
    sizes = None if shape is None else tuple(str(size) if type(size) is int else size for size in shape)
    for text in (*(sizes or ()), entry.get("when"), entry.get("tied_when")):
        if text not in (None, "?"):
            _check_expression(text, repr(name), path)
    return Entry(
        name,
        sizes,
        role,
        entry.get("optional", False),
        entry.get("when"),
        entry.get("tied"),
        entry.get("tied_when"),
        tuple(also),
    )


def _check_expression(text: Any, what: str, path: str | None) -> None:
    if not isinstance(text, str):
        raise FormatError(f"schema: {what}: {show(text)} is not an expression", path)
    try:
        names_in(text)
    except ExpressionError as error:
        raise FormatError(f"schema: {what}: {error}", path) from None


def names_pattern(entries: Iterable[Entry], prefixes: Iterable[str]) -> re.Pattern[str]:
    """One regex for all names: group ``e<entry>_<spelling>``, inside it ``l<entry>_<spelling>`` for the layer."""
    prefix = f"(?:{'|'.join(map(re.escape, prefixes))})"
    parts = []
    for k, entry in enumerate(entries):
        for n, text in enumerate((entry.name, *entry.also)):
            escaped = re.escape(text).replace(re.escape(PREFIX), prefix)
            escaped = escaped.replace(re.escape(_LAYER), f"(?P<l{k}_{n}>{NUMBER})")
            parts.append(f"(?P<e{k}_{n}>{escaped})")
    return re.compile("|".join(parts), re.ASCII)


def load(source: str | PathLike | Mapping[str, Any]) -> Schema:
    """Loads a schema: a built-in one by name, from a JSON file, or from its parsed content.

    Raises:
        ValueError: the name is unknown.
        FormatError: the file does not hold a schema.
        OSError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        return parse(source)
    text = os.fspath(source)
    if text in built_in():
        return built_in()[text]
    if not text.endswith(".json") and os.sep not in text:
        raise ValueError(f"schema {show(text)} is neither a file.json nor one of {', '.join(built_in())}")
    from ..stores.json_file import read_json

    return parse(read_json(text, "the schema"), text)


@cache
def built_in() -> dict[str, Schema]:
    """The built-in schemas, by name."""
    import json

    paths = sorted(_FOLDER.glob("*.json"))
    return {path.stem: parse(json.loads(path.read_text("utf-8")), str(path)) for path in paths}
