"""Integer expressions over the keys of a config, for the sizes and conditions of schemas.

- names, integers, ``+ - * // %`` and parentheses; ``text.dim`` is the key ``dim`` in the object ``text``;
- ``== > >= <= and or not``, with the result 1 or 0;
- ``len(key, 2)``: the number of items of a list or an object, 2 if the key is missing;
- ``item(key, 1)``: item 1 of a list; a single number stands for every item;
- ``contains(key, 3)``: 1 if a list contains the number;
- ``starts(key, gated)``: 1 if a string starts with the word;
- ``times(key, 64)``: the product with a number that can have a fraction, rounded towards 0.

The expressions are our own and well-formed (a test parses them all). The values of a config can be anything.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ..base.text import show

# The name of the layer number in a condition.
LAYER_NUMBER = "layer"
# Values must fit into a signed 64-bit integer, like shapes.
_LIMIT = 1 << 63
# Longest list to search: every layer searches it again.
_ITEMS = 10_000

_NAMES = re.compile(r"(?!(?:and|or|not)\b)\b[a-z][\w.]*\b(?!\()", re.ASCII)
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
    return _NAMES.findall(size)


@lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class Config:
    """The values of a config as integers, with a schema's defaults for missing keys."""

    def __init__(
        self, values: Mapping[str, Any] | None, defaults: Mapping[str, int | str], file: str = "config.json"
    ) -> None:
        self._values = values  # parsed config.json; None without one
        self._defaults = defaults  # numbers and expressions
        self._file = file  # name of the config's file, for messages
        self._cache: dict[tuple[str, int | None], int] = {}  # values of defaults by layer

    def evaluate(self, text: str, layer: int | None = None) -> int:
        """Return the value of an expression, for a condition in a layer.

        Raises:
            ConfigError: a key is missing or has a value of the wrong kind, or the result is not a 64-bit integer.
        """
        try:
            return self._run(_tree(text), layer)
        except ZeroDivisionError:
            raise ConfigError(f"{text!r}: division by zero") from None
        except _NoValueError as problem:
            raise ConfigError(f"{text!r}: {problem}") from None

    def value(self, name: str, layer: int | None = None) -> Any:
        """Return the value of a key as it is in the config, or its default, or None."""
        value: Any = self._values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
        default = self._defaults.get(name)
        if not isinstance(default, str):
            return default
        if (name, layer) not in self._cache:
            self._cache[name, layer] = self.evaluate(default, layer)
        return self._cache[name, layer]

    def _integer(self, name: str, layer: int | None) -> int:
        value = layer if name == LAYER_NUMBER else self.value(name, layer)
        if value is None:
            where = f"there is no {self._file}" if self._values is None else f"{self._file} lacks it"
            raise ConfigError(f"{show(name)} is required, but {where}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int):
            raise ConfigError(f"{show(name)} in {self._file} is {show(value)}, expected an integer")
        return int(value)

    def _run(self, node: Any, layer: int | None) -> int:
        """Return the value of a node of a syntax tree."""
        if isinstance(node, ast.Constant):
            number: Any = node.value
            return int(number)
        if isinstance(node, ast.BoolOp):
            values = (self._run(operand, layer) for operand in node.values)
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
        if isinstance(node, ast.UnaryOp):
            return int(not self._run(node.operand, layer))
        if isinstance(node, ast.BinOp):
            value = _OPERATORS[type(node.op)](self._run(node.left, layer), self._run(node.right, layer))
        elif isinstance(node, ast.Compare):
            left, right = self._run(node.left, layer), self._run(node.comparators[0], layer)
            value = int(_OPERATORS[type(node.ops[0])](left, right))
        elif isinstance(node, ast.Call):
            value = self._function(node, layer)
        else:
            value = self._integer(_name(node), layer)
        if not -_LIMIT < value < _LIMIT:
            raise _NoValueError("a value beyond 64 bits")
        return value

    def _function(self, node: Any, layer: int | None) -> int:
        function, key, argument = node.func.id, _name(node.args[0]), node.args[1]
        value = self.value(key, layer)
        other: Any = argument.id if function == "starts" else self._run(argument, layer)
        listed = isinstance(value, (list, tuple))
        if value is None and function not in ("item", "times"):
            return int(other) if function == "len" else 0
        if function == "len":
            expected = "a list or an object"
            if listed or isinstance(value, Mapping):
                return len(value)
        elif function == "item":
            expected = f"an integer, or a list of integers with item {other}"
            item = value[other] if listed and other < len(value) else value
            if isinstance(item, int):
                return int(item)
        elif function == "contains":
            expected = f"a list of at most {_ITEMS} items"
            if listed and len(value) <= _ITEMS:
                return int(other in value)
        elif function == "starts":
            expected = "a string"
            if isinstance(value, str):
                return int(value.startswith(other))
        else:
            expected = "a number"
            if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
                # A product of large numbers is refused as a value beyond 64 bits, before it overflows.
                return int(value * other) if -_LIMIT < value < _LIMIT else _LIMIT
        raise _NoValueError(f"{show(key)} in the config is {show(value)}, expected {expected}")


def _name(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else f"{_name(node.value)}.{node.attr}"
