"""Schemas: published names of tensors, and shapes over the keys of a config.

They are fields of a family's file, see `safeload.models.family`::

    {"layers": "num_hidden_layers", "prefixes": ["model.", ""], "defaults": {"head_dim": "hidden_size // num_heads"},
     "tensors": {"{prefix}layers.{}.attn.weight": {"shape": ["3 * hidden_size", "hidden_size"]}, ...}}

- ``{}`` in a name is the layer number, from 0 up to ``layers``; ``{expert}`` is a number up to ``counts["expert"]``.
  The first number of a name must be its layer number. ``{prefix}`` is the item of ``prefixes`` with the most matching
  names.
- A shape is a list of `safeload.models.expressions` over config keys, with "?" for any size; null means any shape. A
  size with a final "?" can be any size if the config lacks a key of the expression, or if the value is negative.
- ``defaults``: a number or an expression for each key that the config can omit or set to null.
- ``role`` is "embedding", "norm", "bias", "head" or "buffer"; the default is a weight.
- ``optional``: the tensor can be absent. ``when``: an expression, in which ``layer`` is the layer number; the tensor
  exists if the value is not 0.
- ``architectures`` of a tensor: class names or shell patterns; the tensor exists only in these architectures. With
  ``optional``, it can exist in any architecture. The first of the schema's ``architectures`` is the default.
- ``tied``: the tensor whose weights this tensor shares if ``tied_when`` is not 0; the tensor can then be absent.
- ``also``: alternative names.
- ``more_layers``: the number of additional layers at the end; each of these layers can be absent as a whole.
- ``formats``: file formats of the schema if there is no config. ``keys``: a config with all of these keys selects the
  schema if it has neither ``architectures`` nor ``model_type``. ``config``: the file name of the config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from ..base.cached import cached_property
from .expressions import Config, ConfigError, names_in

WEIGHT = "weight"

# A config with more layers, experts or tensors is a mistake, and expanding it would exhaust memory. Published models
# have at most 100,000 tensors.
MAX_LAYERS = 10_000
MAX_TENSORS = 500_000
# Experts of a layer; published models have at most 512.
MAX_EXPERTS = 1 << 16

# Maximum number of architectures of a config to compare; models usually have only one.
MAX_LISTED = 100

# A layer number. ``int`` accepts at most 4300 digits.
NUMBER = "0|[1-9][0-9]{0,4299}"
_COUNT = re.compile(NUMBER)

# Placeholders in names: a prefix, the layer number, and any number.
PREFIX, LAYER = "{prefix}", "{}"
PLACEHOLDER = re.compile(r"\{([a-z_]*)\}", re.ASCII)
# Any size; also the suffix of an expression that can be any size.
ANY = "?"
_NUMBERS = re.compile(r"([0-9]+)", re.ASCII)
_SLOTS = re.compile(r"(\{[a-z_]*\}|[0-9]+)", re.ASCII)


class SchemaEntry(NamedTuple):
    """A tensor of a schema, or a tensor of each layer; the module docstring describes the fields."""

    name: str
    shape: tuple[str, ...] | None = None
    role: str = WEIGHT
    optional: bool = False
    when: str | None = None
    tied: str | None = None
    tied_when: str | None = None
    also: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


class ExpectedTensor(NamedTuple):
    """An expected tensor of a model with a known config."""

    name: str
    shape: tuple[int | None, ...] | None  # None for any shape; a size of None for any size
    stack: str  # the name up to the layer number; "" outside of layers
    layer: int | None  # None outside of layers
    required: bool
    entry: SchemaEntry
    tied: str | None  # the tensor that shares its weights


class SchemaMatch(NamedTuple):
    """The entry of a name."""

    entry: SchemaEntry
    prefix: str | None  # None if the entry has no prefix
    stack: str  # the name up to the layer number; the whole name outside of layers
    numbers: tuple[int, ...]  # in the name, layer number first

    @property
    def layer(self) -> int | None:
        """The layer number; None outside of layers."""
        return self.numbers[0] if self.numbers else None


@dataclass(frozen=True)
class Schema:
    """The tensors of a family; the module docstring describes the fields."""

    name: str
    entries: tuple[SchemaEntry, ...]
    architectures: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    layers: str | None = None
    more_layers: str | None = None
    counts: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int | str] = field(default_factory=dict)
    config: str = "config.json"

    @classmethod
    def of(cls, name: str, content: Mapping[str, Any]) -> Schema:
        """Make the schema of a family from its JSON; ``from`` is for llama.cpp, see `safeload.models.gguf`."""
        tensors = content["tensors"].items()
        entries = (SchemaEntry(key, **{k: v for k, v in entry.items() if k != "from"}) for key, entry in tensors)
        fields = {key: content[key] for key in cls.__dataclass_fields__ if key in content}
        return cls(**{**fields, "name": name, "entries": tuple(entries)})

    @cached_property
    def _places(self) -> dict[str, list[tuple[SchemaEntry, str | None, tuple[str, ...]]]]:
        """Entry, prefix and expected numbers by name without numbers; a number of "" is a placeholder."""
        places: dict[str, list[tuple[SchemaEntry, str | None, tuple[str, ...]]]] = {}
        for entry in self.entries:
            for text in (entry.name, *entry.also):
                for prefix in self.prefixes if PREFIX in text else (None,):
                    parts = _SLOTS.split(text.replace(PREFIX, prefix or ""))
                    slots = tuple("" if slot[0] == "{" else slot for slot in parts[1::2])
                    places.setdefault("#".join(parts[::2]), []).append((entry, prefix, slots))
        return places

    def find(self, name: str) -> SchemaMatch | None:
        """Return the entry of a name, or None if the architecture has no such tensor."""
        parts = _NUMBERS.split(name)
        for entry, prefix, slots in self._places.get("#".join(parts[::2]), ()):
            numbers = parts[1::2]
            if len(numbers) != len(slots):  # the name contains the character that replaces numbers
                continue
            pairs = [*zip(numbers, slots, strict=True)]
            if all(number == slot if slot else _COUNT.fullmatch(number) for number, slot in pairs):
                own = tuple(int(number) for number, slot in pairs if not slot)
                stack = name if not own else "".join(parts[: 2 * slots.index("") + 1])
                return SchemaMatch(entry, prefix, stack, own)
        return None

    def role(self, name: str) -> str | None:
        """Return the role of a tensor, "weight" by default; None for an unknown name."""
        match = self.find(name)
        return None if match is None else match.entry.role

    def architecture(self, config: Mapping[str, Any] | None) -> str | None:
        """Return the first architecture of the config in the schema, or None.

        If the config has no architectures, return the first of the schema.
        """
        listed = None if config is None else config.get("architectures")
        if not isinstance(listed, list) or not listed:
            return next(iter(self.architectures), None)
        return next(
            (text for text in listed[:MAX_LISTED] if isinstance(text, str) and text in self.architectures), None
        )

    def pairs(self, names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, tuple[str, bool]]:
        """Return the embeddings of tied heads, stored or not, by head, and True if the head is optional.

        Raises:
            ConfigError: the condition has no value in this config.
        """
        keys = Config(config, self.defaults, self.config)
        architecture = self.architecture(config)
        result = {}
        for entry in self.entries:
            if entry.tied is None or not _in(entry, architecture) or _slots(entry):
                continue
            if entry.tied_when is not None and keys.evaluate(entry.tied_when) == 0:
                continue
            for prefix in self.prefixes:
                name, other = entry.name.replace(PREFIX, prefix), entry.tied.replace(PREFIX, prefix)
                if other in names:
                    result[name] = other, entry.optional
                    break
        return result

    def expand(self, config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, ExpectedTensor]:
        """Return all tensors of a model with this config by name, in the order of the schema.

        Args:
            config: parsed config.json; None for defaults only.
            names: the tensors of the model, which select the prefix, alternative names and ``more_layers``.

        Raises:
            ConfigError: a size has no value in this config, or the model exceeds `MAX_TENSORS`.
        """
        known = names if isinstance(names, (Set, Mapping)) else set(names)
        keys, prefix = Config(config, self.defaults, self.config), self.prefix_of(known)
        architecture, usual = self.architecture(config), next(iter(self.architectures), None)
        counts = {"": self.layers or "", **self.counts}  # expressions by placeholder

        def count_of(text: str | None) -> int:
            count = 0 if text is None else keys.evaluate(text)
            if not 0 <= count <= MAX_LAYERS:
                raise ConfigError(f"{text} must be 0 to {MAX_LAYERS}, got {count}")
            return count

        @cache
        def holds(condition: str | None, layer: int | None) -> bool:
            return condition is None or keys.evaluate(condition, layer) != 0

        def size_of(text: str) -> int | None:
            bare = text.removesuffix(ANY)
            if bare != text and (not bare or any(keys.value(name) is None for name in names_in(bare))):
                return None
            value = keys.evaluate(bare)
            if value < 0 and bare == text:
                raise ConfigError(f"the size {text} must be >= 0, got {value}")
            return value if value >= 0 else None

        expected: dict[str, ExpectedTensor] = {}
        total = 0
        for entry in self.entries:
            required, slots = not entry.optional, _slots(entry)
            if not _in(entry, architecture):
                # An architecture outside the schema can have the usual head.
                if required and (architecture is not None or not _in(entry, usual)):
                    continue
                required = False
            elif entry.architectures:
                required = True
            layers: Iterable[int | None] = (None,)
            if slots:
                layers = range(count_of(counts[slots[0]]) + (count_of(self.more_layers) if slots[0] == "" else 0))
            layers = [layer for layer in layers if holds(entry.when, layer)]
            inner = count_of(counts[slots[1]]) if len(slots) > 1 and layers else 1
            total += len(layers) * inner
            if total > MAX_TENSORS:
                texts = " and ".join(f"{counts[slot]} is {count_of(counts[slot])}" for slot in slots) or "the schema"
                raise ConfigError(f"{texts}: a model can have at most {MAX_TENSORS:,} tensors")
            if not layers:
                continue
            shape = None if entry.shape is None else tuple(map(size_of, entry.shape))
            tied = None if entry.tied is None else entry.tied.replace(PREFIX, prefix)
            if tied is not None and not holds(entry.tied_when, None):
                tied = None
            spellings = [PLACEHOLDER.split(text.replace(PREFIX, prefix)) for text in (entry.name, *entry.also)]
            stack = spellings[0][0] if slots else ""
            for layer in layers:
                for number in range(inner):
                    spelled = [_spell(parts, layer, number) for parts in spellings]
                    name = next((text for text in spelled if text in known), spelled[0]) if entry.also else spelled[0]
                    needed = required and tied is None
                    expected[name] = ExpectedTensor(name, shape, stack, layer, needed, entry, tied)
        if self.more_layers is None:
            return expected
        # Additional layers without any tensor in the model are absent.
        usual_layers = count_of(self.layers)
        in_layers = [tensor for tensor in expected.values() if _slots(tensor.entry)[:1] == [""]]
        present = {tensor.layer for tensor in in_layers if tensor.name in known}
        for tensor in in_layers:
            if tensor.layer is not None and tensor.layer >= usual_layers and tensor.layer not in present:
                del expected[tensor.name]
        return expected

    def prefix_of(self, names: Iterable[str]) -> str:
        """Return the prefix with the most matching names, or the first prefix."""
        if len(self.prefixes) == 1:
            return self.prefixes[0]
        counts = Counter(match.prefix for match in map(self.find, names) if match is not None)
        return max(self.prefixes, key=lambda prefix: counts[prefix])


def _slots(entry: SchemaEntry) -> list[str]:
    """Return the placeholders of an entry without their braces: "" for the layer number."""
    return PLACEHOLDER.findall(entry.name.removeprefix(PREFIX))


def _in(entry: SchemaEntry, architecture: str | None) -> bool:
    """Return True if an architecture has an entry."""
    if not entry.architectures:
        return True
    return architecture is not None and any(fnmatchcase(architecture, text) for text in entry.architectures)


def _spell(parts: list[str], layer: int | None, number: int) -> str:
    """Return a name from its parts: texts alternating with placeholders."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 3:
        return f"{parts[0]}{layer}{parts[2]}"
    return f"{parts[0]}{layer}{parts[2]}{number}{parts[4]}"
