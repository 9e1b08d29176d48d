"""Schemas of architectures: JSON files that map tensor names to shapes over the keys of a config.

A schema is data, see ``safeload/models/schemas``::

    {"name": "tiny", "architectures": ["TinyForCausalLM"], "model_types": ["tiny"], "layers": "num_hidden_layers",
     "prefixes": ["model.", ""], "defaults": {"head_dim": "hidden_size // num_attention_heads"},
     "tensors": {"{prefix}layers.{}.attn.weight": {"shape": ["3 * hidden_size", "hidden_size"]}, ...}}

- ``{}`` in a name is the layer number, from 0 up to ``layers``; ``{expert}`` is a number up to ``counts["expert"]``.
  The first number of a name is that of its layer. ``{prefix}`` is one of ``prefixes``: the one that matches the most
  names.
- A shape is a list of `safeload.models.expressions` over config keys, "?" for any size; null for any shape. A size that
  ends in "?" is any size if the config lacks a key of it, or if it is negative.
- ``defaults``: values of keys that the config omits or has as null: a number or an expression.
- ``role`` is "embedding", "norm", "bias", "head" or "buffer"; a tensor without one is a weight.
- ``optional``: the tensor may be absent. ``when``: an expression; the tensor exists if its value is not 0. In it
  ``layer`` is the number of the layer.
- ``architectures`` of a tensor: class names, or shell patterns of them: it exists in these only, and with ``optional``
  it may be in others. The first of the schema's ``architectures`` is that of a config without any.
- ``tied``: the tensor that this one is tied to if ``tied_when`` is not 0; then it may be absent.
- ``also``: alternative names.
- ``more_layers``: number of layers after the others, each of which may be absent with all its tensors.
- ``extends``: another schema, with whose tensors, ``defaults``, ``counts`` and other fields this one begins, except for
  ``about``, ``architectures``, ``model_types``, ``formats`` and ``keys``. Fields of a tensor replace those of the same
  name, where null removes one; ``without`` is a list of names, or shell patterns of them, that are left out.
- ``formats``: file formats that the schema applies to if there is no config. ``keys``: a config without
  ``architectures`` and ``model_type`` that has all of these keys selects the schema. ``config``: the name of its file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..base.cached import cached_property
from .config import Config, ConfigError
from .expressions import names_in

ROLES = ("embedding", "norm", "bias", "head", "buffer")
WEIGHT = "weight"

# More layers or experts than this are a mistake in a config, and so are more tensors: expanding them would exhaust
# memory. Published models have at most 100,000 tensors.
MAX_LAYERS = 10_000
MAX_TENSORS = 500_000

# Most architectures of a config that are compared: models have one.
MAX_LISTED = 100

# A layer number: at most 4300 digits, the limit of ``int``.
NUMBER = "0|[1-9][0-9]{0,4299}"
_DIGITS = 4300

# Placeholders in names for one of the prefixes, for the layer number, and for any number.
PREFIX, LAYER = "{prefix}", "{}"
PLACEHOLDER = re.compile(r"\{([a-z_]*)\}", re.ASCII)
# Any size, and the end of one that may be.
ANY = "?"
_NUMBERS = re.compile(r"([0-9]+)", re.ASCII)
_SLOTS = re.compile(r"(\{[a-z_]*\}|[0-9]+)", re.ASCII)


class SchemaEntry(NamedTuple):
    """One tensor of a schema, or one of each layer; the module docstring describes the fields."""

    name: str
    shape: tuple[str, ...] | None
    role: str
    optional: bool
    when: str | None
    tied: str | None
    tied_when: str | None
    also: tuple[str, ...]
    architectures: tuple[str, ...]


class ExpectedTensor(NamedTuple):
    """One tensor that a model with a given config is expected to have.

    Attributes:
        name: its name.
        shape: its shape; None for any shape, or in it for any size.
        stack: its name up to its layer number; "" outside of layers.
        layer: its layer number, None outside of layers.
        required: whether it must be present.
        entry: the entry of the schema.
        tied: name of the tensor that this one is tied to, None for none.
    """

    name: str
    shape: tuple[int | None, ...] | None
    stack: str
    layer: int | None
    required: bool
    entry: SchemaEntry
    tied: str | None


class SchemaMatch(NamedTuple):
    """The entry of a name.

    Attributes:
        entry: the entry.
        prefix: the prefix of the name, None if its entry has none.
        stack: the name up to its layer number; all of it outside of layers.
        numbers: the numbers in it: first that of the layer.
    """

    entry: SchemaEntry
    prefix: str | None
    stack: str
    numbers: tuple[int, ...]

    @property
    def layer(self) -> int | None:
        """The layer number; None outside of layers."""
        return self.numbers[0] if self.numbers else None


@dataclass(frozen=True)
class Schema:
    """The tensors of an architecture. Made by `safeload.models.reading`; the module docstring describes the fields."""

    name: str
    about: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    formats: tuple[str, ...]
    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    layers: str | None
    more_layers: str | None
    counts: Mapping[str, str]
    defaults: Mapping[str, int | str]
    config: str
    entries: tuple[SchemaEntry, ...]

    @cached_property
    def _places(self) -> dict[str, list[tuple[SchemaEntry, str | None, tuple[str, ...]]]]:
        """Names without their numbers, to entry, prefix, and the numbers; "" for those of a placeholder."""
        places: dict[str, list[tuple[SchemaEntry, str | None, tuple[str, ...]]]] = {}
        for entry in self.entries:
            for text in (entry.name, *entry.also):
                for prefix in self.prefixes if PREFIX in text else (None,):
                    parts = _SLOTS.split(text.replace(PREFIX, prefix or ""))
                    slots = tuple("" if slot[0] == "{" else slot for slot in parts[1::2])
                    places.setdefault("#".join(parts[::2]), []).append((entry, prefix, slots))
        return places

    def find(self, name: str) -> SchemaMatch | None:
        """The entry that matches a name; None if the architecture does not have the name."""
        parts = _NUMBERS.split(name)
        numbers = parts[1::2]
        for entry, prefix, slots in self._places.get("#".join(parts[::2]), ()):
            own = _own_numbers(numbers, slots)
            if own is not None:
                stack = name if not own else "".join(parts[: 2 * slots.index("") + 1])
                return SchemaMatch(entry, prefix, stack, own)
        return None

    def role(self, name: str) -> str | None:
        """The role of a tensor, "weight" by default; None for an unknown name."""
        found = self.find(name)
        return None if found is None else found.entry.role

    def architecture(self, config: Mapping[str, Any] | None) -> str | None:
        """The architecture of a model: the first of the config that the schema lists, None if it lists none of them.

        The first of the schema for a config without architectures.
        """
        listed = None if config is None else config.get("architectures")
        if not isinstance(listed, list) or not listed:
            return next(iter(self.architectures), None)
        return next(
            (text for text in listed[:MAX_LISTED] if isinstance(text, str) and text in self.architectures), None
        )

    def tied(self, names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, str]:
        """Return the required tensors that are absent because they are tied: name of the head to the embedding.

        Raises:
            ConfigError, ExpressionError: the condition cannot be evaluated.
        """
        pairs = self.pairs(names, config).items()
        return {head: embedding for head, (embedding, optional) in pairs if not optional and head not in names}

    def pairs(self, names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, tuple[str, bool]]:
        """Return the tied tensors, stored or not: name of the head to the embedding and whether the head is optional.

        Raises:
            ConfigError, ExpressionError: the condition cannot be evaluated.
        """
        keys = Config(config, self.defaults, self.config)
        architecture = self.architecture(config)
        result = {}
        for entry in self.entries:
            if entry.tied is None or not _in(entry, architecture) or PLACEHOLDER.search(_bare(entry)):
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
        """All tensors of a model with this config, by name, in the order of the schema.

        Args:
            config: parsed config.json; None for defaults only.
            names: names of the tensors of the model; they select the prefix, alternative names and ``more_layers``.

        Raises:
            ConfigError: a required key is missing or not an integer, or there are more than `MAX_TENSORS`.
            ExpressionError: an expression cannot be evaluated.
        """
        known = names if isinstance(names, (Set, Mapping)) else set(names)
        return _Expansion(self, config, known).run()

    def prefix_of(self, names: Iterable[str]) -> str:
        """The prefix that matches the most names, or the first."""
        if len(self.prefixes) == 1:
            return self.prefixes[0]
        found = Counter(one.prefix for one in map(self.find, names) if one is not None)
        return max(self.prefixes, key=lambda prefix: found[prefix])


def _own_numbers(numbers: list[str], slots: tuple[str, ...]) -> tuple[int, ...] | None:
    """The numbers of a name that stand for placeholders; None if the others are not those of the schema."""
    if len(numbers) != len(slots):  # a name may have the character that stands for numbers
        return None
    own = []
    for number, slot in zip(numbers, slots, strict=True):
        if slot:
            if number != slot:
                return None
        elif (number[0] == "0" and number != "0") or len(number) > _DIGITS:
            return None
        else:
            own.append(int(number))
    return tuple(own)


def _bare(entry: SchemaEntry) -> str:
    """The name of an entry without its prefix."""
    return entry.name.removeprefix(PREFIX)


def _in(entry: SchemaEntry, architecture: str | None) -> bool:
    """Whether an architecture has an entry."""
    if not entry.architectures:
        return True
    return architecture is not None and any(fnmatchcase(architecture, text) for text in entry.architectures)


class _Expansion:
    """One expansion of a schema, see `Schema.expand`."""

    def __init__(self, schema: Schema, config: Mapping[str, Any] | None, known: Collection[str]) -> None:
        self._schema = schema
        self._keys = Config(config, schema.defaults, schema.config)
        self._known = known
        self._architecture = schema.architecture(config)
        self._prefix = schema.prefix_of(known)
        self._counts: dict[str, int] = {}
        self._held: dict[str, bool | dict[int, bool]] = {}
        self._total = 0

    def run(self) -> dict[str, ExpectedTensor]:
        result: dict[str, ExpectedTensor] = {}
        first = next(iter(self._schema.architectures), None)
        for entry in self._schema.entries:
            optional = entry.optional
            if entry.architectures and not _in(entry, self._architecture):
                # An architecture that the schema does not list may have the usual head.
                usual = self._architecture is None and _in(entry, first)
                if not optional and not usual:
                    continue
                optional = True
            elif entry.architectures:
                optional = False
            for wanted in self._tensors(entry, optional=optional):
                result[wanted.name] = wanted
        return self._without_absent(result)

    def _tensors(self, entry: SchemaEntry, *, optional: bool) -> Iterator[ExpectedTensor]:
        slots = PLACEHOLDER.findall(entry.name.replace(PREFIX, self._prefix))
        layers = self._layers(entry, slots)
        inner = self._count(slots[1]) if len(slots) > 1 and layers else 1
        self._total += len(layers) * inner
        if self._total > MAX_TENSORS:
            counts = " and ".join(f"{self._text(slot)} is {self._counts[slot]}" for slot in slots) or "the schema"
            raise ConfigError(f"{counts}: more than {MAX_TENSORS:,} tensors are not supported")
        if not layers:
            return
        shape = None if entry.shape is None else tuple(map(self._size, entry.shape))
        tied = None if entry.tied is None else entry.tied.replace(PREFIX, self._prefix)
        if tied is not None and entry.tied_when is not None and self._keys.evaluate(entry.tied_when) == 0:
            tied = None
        required = not optional and tied is None
        spellings = [PLACEHOLDER.split(text.replace(PREFIX, self._prefix)) for text in (entry.name, *entry.also)]
        stack = spellings[0][0] if slots else ""
        for layer in layers:
            for number in range(inner):
                name = _spell(spellings[0], layer, number)
                if len(spellings) > 1:
                    names = (_spell(parts, layer, number) for parts in spellings)
                    name = next((text for text in names if text in self._known), name)
                yield ExpectedTensor(name, shape, stack, layer, required, entry, tied)

    def _layers(self, entry: SchemaEntry, slots: list[str]) -> list[int | None]:
        """The layers that have an entry; [None] if it is outside of them and exists."""
        layers = range(self._count(slots[0]) + (self._more() if slots[0] == "" else 0)) if slots else (None,)
        when = entry.when
        if when is None:
            return list(layers)
        return [layer for layer in layers if self._holds(when, layer)]

    def _holds(self, when: str, layer: int | None) -> bool:
        if layer is None:
            return self._keys.evaluate(when) != 0
        held = self._held.get(when)
        if isinstance(held, bool):
            return held
        if held is None or layer not in held:
            here, depends = self._keys.holds(when, layer)
            if not depends:
                self._held[when] = here
                return here
            held = {} if held is None else held
            held[layer] = here
            self._held[when] = held
        return held[layer]

    def _text(self, slot: str) -> str:
        return (self._schema.layers or "") if slot == "" else self._schema.counts[slot]

    def _count(self, slot: str) -> int:
        if slot not in self._counts:
            count = self._keys.evaluate(self._text(slot))
            if not 0 <= count <= MAX_LAYERS:
                what = f"a model has 0 to {MAX_LAYERS} layers" if slot == "" else f"expected 0 to {MAX_LAYERS}"
                raise ConfigError(f"{self._text(slot)} is {count}, but {what}")
            self._counts[slot] = count
        return self._counts[slot]

    def _more(self) -> int:
        text = self._schema.more_layers
        count = 0 if text is None else self._keys.evaluate(text)
        if not 0 <= count <= MAX_LAYERS:
            raise ConfigError(f"{text} is {count}, but a model has 0 to {MAX_LAYERS} layers")
        return count

    def _size(self, text: str) -> int | None:
        if text == ANY:
            return None
        bare = text.removesuffix(ANY)
        if bare != text and any(self._keys.value(name) is None for name in names_in(bare)):
            return None
        value = self._keys.evaluate(bare)
        if value < 0:
            if bare != text:
                return None
            raise ConfigError(f"{text} is {value}, but a size is at least 0")
        return value

    def _without_absent(self, result: dict[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
        """Without those of ``more_layers`` of which the model has no tensor."""
        if self._schema.more_layers is None:
            return result
        usual = self._counts.get("", 0)
        beyond = [one for one in result.values() if one.layer is not None and one.layer >= usual and _in_layers(one)]
        absent = {one.layer for one in beyond} - {one.layer for one in beyond if one.name in self._known}
        return {name: one for name, one in result.items() if not (one.layer in absent and _in_layers(one))}


def _in_layers(wanted: ExpectedTensor) -> bool:
    """Whether the layer number of a tensor is one of ``layers``."""
    return _bare(wanted.entry).find(LAYER) == _bare(wanted.entry).find("{")


def _spell(parts: list[str], layer: int | None, number: int) -> str:
    """A name from its parts: texts with the names of placeholders between them."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 3:
        return f"{parts[0]}{layer}{parts[2]}"
    return f"{parts[0]}{layer}{parts[2]}{number}{parts[4]}"
