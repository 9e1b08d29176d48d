"""Schemas: published names of tensors, and shapes over the keys of a config.

They are fields of a family's file. ``FAMILIES.md`` describes them and their expressions, which are our own and
well-formed (a test parses them all). The values of a config may be anything.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.forking import cached_property
from ..core.text import show

WEIGHT = "weight"

# A config with more layers, experts or tensors is a mistake, and expanding it would exhaust memory. Published models
# have at most 100,000 tensors.
MAX_LAYERS = 10_000
MAX_TENSORS = 500_000
# Experts of a layer; published models have at most 512.
MAX_EXPERTS = 1 << 16

# Maximum number of architectures of a config to compare.
MAX_LISTED = 100

# Keys of the language model in the config of a multi-modal model, which are tried before other keys.
LANGUAGE = ("text_config", "llm_config", "language_config")

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

# The name of the layer number in a condition.
LAYER_NUMBER = "layer"
# Values must fit into a signed 64-bit integer, like shapes.
_LIMIT = 1 << 63
# Longest list to search: every layer searches it again.
_ITEMS = 10_000

_KEYS = re.compile(r"(?!(?:and|or|not)\b)\b[a-z][\w.]*\b(?!\()", re.ASCII)
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}


class ConfigError(ValueError):
    """A config lacks a key of a schema, or has a value there from which no size follows."""


class _NoValueError(Exception):
    """An expression has no value; the message says why."""


def names_in(size: str) -> list[str]:
    """Return the keys in the expression of a size, in order."""
    return _KEYS.findall(size)


@lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def listed_in(config: Mapping[str, Any] | None) -> list[Any]:
    """Return the architectures that a config lists, as many as are compared."""
    listed = (config or {}).get("architectures")
    return listed[:MAX_LISTED] if isinstance(listed, list) else []


def language_of(config: Mapping[str, Any], usual: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """Return the config of the language model of a multi-modal model, over the keys of the whole model.

    ``usual`` has the values of keys that the config of the language model lacks.
    """
    inner = next((value for key in LANGUAGE if isinstance(value := config.get(key), Mapping)), None)
    return config if inner is None else {**config, **usual, **inner}


class Config:
    """The values of a config as integers, with a schema's defaults for missing keys."""

    def __init__(
        self, values: Mapping[str, Any] | None, defaults: Mapping[str, int | str], file: str = "config.json"
    ) -> None:
        self._values = values  # parsed config.json; None without one
        self._defaults = defaults  # numbers and expressions
        self._file = file  # name of the config's file, for messages
        self._cache: dict[tuple[str, int | None], int] = {}  # values of defaults by layer
        layers = values.get("per_layer_config") if isinstance(values, Mapping) else None
        self._layers: Mapping[str, Any] = layers if isinstance(layers, Mapping) else {}  # by layer number

    def evaluate(self, text: str, layer: int | None = None) -> int:
        """Return the value of an expression, for a condition in a layer."""
        try:
            return self._run(_tree(text), layer)
        except ZeroDivisionError:
            raise ConfigError(f"{text!r}: division by zero") from None
        except _NoValueError as problem:
            raise ConfigError(f"{text!r}: {problem}") from None

    def value(self, name: str, layer: int | None = None) -> Any:
        """Return the value of a key as it is in the config, or its default, or None."""
        value: Any = self._values
        own = self._layers.get(str(layer)) if self._layers else None
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(own, Mapping) and own.get(name) is not None:
            value = own[name]
        if value is not None:
            return value
        default = self._defaults.get(name)
        if not isinstance(default, str):
            return default
        if (name, layer) not in self._cache:
            self._cache[name, layer] = self.evaluate(default, layer)
        return self._cache[name, layer]

    def varies(self, text: str) -> bool:
        """Return True if the value of an expression can depend on the layer."""
        names = {*names_in(text)}
        defaults = (default for name in names if isinstance(default := self._defaults.get(name), str))
        return bool(self._layers) or LAYER_NUMBER in names or any(map(self.varies, defaults))

    def _integer(self, name: str, layer: int | None) -> int:
        value = layer if name == LAYER_NUMBER else self.value(name, layer)
        if value is None:
            where = f"there is no {self._file}" if self._values is None else f"{self._file} lacks it"
            raise ConfigError(f"{show(name)} is required, but {where}")
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            return int(value)
        raise ConfigError(f"{show(name)} in {self._file} is {show(value)}, expected an integer")

    def _run(self, node: Any, layer: int | None) -> int:
        value: Any
        if isinstance(node, ast.Constant):
            value = node.value
        elif isinstance(node, ast.BoolOp):
            values = (self._run(operand, layer) for operand in node.values)
            value = all(values) if isinstance(node.op, ast.And) else any(values)
        elif isinstance(node, ast.UnaryOp):
            value = not self._run(node.operand, layer)
        elif isinstance(node, ast.BinOp):
            value = _OPERATORS[type(node.op)](self._run(node.left, layer), self._run(node.right, layer))
        elif isinstance(node, ast.Compare):
            left, right = self._run(node.left, layer), self._run(node.comparators[0], layer)
            value = _OPERATORS[type(node.ops[0])](left, right)
        else:
            value = self._function(node, layer) if isinstance(node, ast.Call) else self._integer(_name(node), layer)
        if not -_LIMIT < value < _LIMIT:
            raise _NoValueError("a value beyond 64 bits")
        return int(value)

    def _function(self, node: Any, layer: int | None) -> int:
        function, key, argument = node.func.id, _name(node.args[0]), node.args[1]
        if function == "at":
            return self._integer(key, self._run(argument, layer))
        value = self.value(key, layer)
        word = function == "starts" or (isinstance(argument, ast.Constant) and isinstance(argument.value, str))
        counted = function == "len" and value is not None  # then the number is not needed
        other: Any = _word(argument) if word else 0 if counted else self._run(argument, layer)
        listed, result, expected = isinstance(value, (list, tuple)), None, "a number"
        if value is None and function == "root":
            value = other
        if value is None and function not in ("item", "times"):
            return int(other) if function in ("len", "largest") else 0
        if function == "len":
            result, expected = len(value) if listed or isinstance(value, Mapping) else None, "a list or an object"
        elif function == "item":
            item = value[other] if listed and other < len(value) else value
            result = item if isinstance(item, int) else None
            expected = f"an integer, or a list of integers with item {other}"
        elif function == "largest":
            items = value if listed and value else [value]
            result = max(items) if all(isinstance(item, int) for item in items) else None
            expected = "an integer, or a list of integers"
        elif function == "contains":
            listed = listed or (word and isinstance(value, str))
            result = other in value if listed and len(value) <= _ITEMS else None
            expected = f"a list of at most {_ITEMS} items"
        elif function == "kind":
            listed = listed or isinstance(value, str)
            result = value[other] == _word(node.args[2]) if listed and 0 <= other < len(value) else None
            expected = f"a list or a string with item {other}"
        elif function == "starts":
            result, expected = value.startswith(other) if isinstance(value, str) else None, "a string"
        elif function == "root":
            result = math.isqrt(value) if isinstance(value, int) and 0 <= value < _LIMIT else None
            expected = "an integer of at least 0"
        elif isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            # A product of large numbers is refused as a value beyond 64 bits, before it overflows.
            result = value * other if -_LIMIT < value < _LIMIT else _LIMIT
        if result is None:
            raise _NoValueError(f"{show(key)} in the config is {show(value)}, expected {expected}")
        return int(result)


def _word(node: Any) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else _name(node)


def _name(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else f"{_name(node.value)}.{node.attr}"


class SchemaEntry(NamedTuple):
    """A tensor of a schema, or a tensor of each layer."""

    name: str
    shape: tuple[str, ...] | None = None
    role: str = WEIGHT
    optional: bool | str = False
    when: str | None = None
    tied: str | None = None
    tied_when: str | None = None
    also: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


def wrong_axes(shape: tuple[int, ...], sizes: tuple[int | None, ...] | None) -> list[int]:
    """Return the axes with another size than expected, where None is any; [-1] if the number of axes differs."""
    if sizes is None or len(shape) != len(sizes):
        return [] if sizes is None else [-1]
    return [k for k, size in enumerate(sizes) if size not in (None, shape[k])]


class ExpectedTensor(NamedTuple):
    """An expected tensor of a model with a known config."""

    name: str
    shape: tuple[int | None, ...] | None  # None for any shape; a size of None for any size
    stack: str  # the name up to the layer number; "" outside of layers
    layer: int | None  # None outside of layers
    required: bool
    entry: SchemaEntry
    tied: str | None  # the tensor that shares its weights

    def wrong_axes(self, shape: tuple[int, ...]) -> list[int]:
        """Return the axes of a shape with another size; see `wrong_axes`."""
        return wrong_axes(shape, self.shape)


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
    """The published tensors of a family, or those of another form."""

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
        """Make the schema of a family from its JSON; ``from`` is for llama.cpp."""
        fields = {key: content[key] for key in cls.__dataclass_fields__ if key in content}
        entries = (
            SchemaEntry(key, **{k: v for k, v in entry.items() if k != "from"})
            for key, entry in content.get("tensors", {}).items()
        )
        return cls(**{**fields, "name": name, "entries": tuple(entries)})

    def with_also(self, names: Mapping[str, str]) -> Schema:
        """Return a schema with additional names of tensors, by their names in it."""
        entries = (e._replace(also=(*e.also, names[e.name])) if e.name in names else e for e in self.entries)
        return replace(self, entries=tuple(entries))

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
            pairs = [*zip(parts[1::2], slots, strict=False)]
            fits = all(number == slot if slot else _COUNT.fullmatch(number) for number, slot in pairs)
            if fits and len(parts) == 2 * len(slots) + 1:  # else the name contains the character that replaces numbers
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
        return next((name for name in listed_in(config) or self.architectures if name in self.architectures), None)

    def pairs(self, names: Collection[str], config: Mapping[str, Any] | None) -> dict[str, tuple[str, bool]]:
        """Return the embeddings of tied heads, stored or not, by head, and True if the head is optional."""
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
                    result[name] = other, bool(entry.optional)
                    break
        return result

    def expand(self, config: Mapping[str, Any] | None, names: Collection[str]) -> dict[str, ExpectedTensor]:
        """Return all tensors of a model with this config by name, in the order of the schema.

        The names of its tensors select the prefix, alternative names and ``more_layers``.
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

        def size_of(text: str, layer: int | None = None) -> int | None:
            bare = text.removesuffix(ANY)
            names = [name for name in names_in(bare) if name != LAYER_NUMBER]
            if bare != text and (not bare or any(keys.value(name, layer) is None for name in names)):
                return None
            value = keys.evaluate(bare, layer)
            if value < 0 and bare == text:
                raise ConfigError(f"the size {text} must be >= 0, got {value}")
            return value if value >= 0 else None

        expected: dict[str, ExpectedTensor] = {}
        total = 0
        for entry in self.entries:
            required, slots = entry.optional is not True, _slots(entry)
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
            varies = entry.shape is not None and None not in layers and any(map(keys.varies, entry.shape))
            shape = None if entry.shape is None or varies else tuple(map(size_of, entry.shape))
            tied = entry.tied.replace(PREFIX, prefix) if entry.tied and holds(entry.tied_when, None) else None
            spellings = [PLACEHOLDER.split(text.replace(PREFIX, prefix)) for text in (entry.name, *entry.also)]
            stack = spellings[0][0] if slots else ""
            for layer, number in product(layers, range(inner)):
                if varies and number == 0:
                    shape = tuple(size_of(text, layer) for text in entry.shape or ())
                needed = (
                    required and tied is None and not (isinstance(entry.optional, str) and holds(entry.optional, layer))
                )
                spelled = [_spell(parts, layer, number) for parts in spellings]
                # The last, with the longest prefix: Sam 3 has a ``text_projection`` beside that of its text encoder.
                name = next((text for text in reversed(spelled) if text in known), spelled[0])
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
    patterns = entry.architectures
    return not patterns or (architecture is not None and any(fnmatchcase(architecture, text) for text in patterns))


def _spell(parts: list[str], layer: int | None, number: int) -> str:
    """Return a name from its parts: texts alternating with placeholders."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 3:
        return f"{parts[0]}{layer}{parts[2]}"
    return f"{parts[0]}{layer}{parts[2]}{number}{parts[4]}"
