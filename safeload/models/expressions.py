"""Integer expressions over the keys of a config, for sizes and conditions.

- names, digits, ``+ - * // %`` and parentheses;
- ``== != < <= > >= and or not``, with the result 1 or 0;
- ``len(key, 2)``: the number of items of a list or an object, 2 if the key is missing;
- ``item(key, 1)``: item 1 of a list; a single number stands for every item;
- ``contains(key, 3)``: 1 if a list contains the number;
- ``starts(key, gated)``: 1 if a string starts with the word;
- ``times(key, 64)``: the product with a number that can have a fraction, rounded towards 0.

The grammar is a subset of Python's. ``ast`` parses an expression, and only these constructs are evaluated, because a
schema can come from an untrusted source.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from ..base.text import show

# Maximum length and nesting of an expression: more than real shapes need, but below recursion limits.
MAX_LENGTH = 1000
MAX_DEPTH = 50
# Values must fit into a signed 64-bit integer, like shapes.
LIMIT = 1 << 63
# Longest list to search: every layer searches it again.
_ITEMS = 10_000

# Anything except names, decimal integers and operators. Python would accept "0x10" and "1_000".
_FOREIGN = re.compile(r"\b[0-9]+[A-Za-z_]|[^A-Za-z0-9_.\s+\-*/%()=!<>,]", re.ASCII)
_COMPARISONS: dict[type[ast.AST], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

Lookup = Callable[[str], int]
Values = Callable[[str], Any]


class ExpressionError(ValueError):
    """An expression is malformed or has no value; the message quotes it and says why."""


def evaluate(text: str, lookup: Lookup, values: Values | None = None) -> int:
    """Evaluate an expression.

    Args:
        text: such as ``num_key_value_heads * head_dim``.
        lookup: returns the integer of a name, or raises.
        values: returns the argument of a function: a list, an object, a string, a number, or None for a missing key.
            The default is ``lookup``.

    Raises:
        ExpressionError: bad syntax, division by zero, a value beyond 64 bits, a key of the wrong kind for a function,
            or a ``lookup`` that evaluates nested expressions too deeply.
    """
    try:
        return _compiled(text).run(lookup, values or lookup)
    except RecursionError:
        raise ExpressionError(f"{text[:200]!r}: the expressions of its names are nested too deeply") from None


def names_in(text: str) -> list[str]:
    """Return the names in an expression, in order.

    Raises:
        ExpressionError: bad syntax.
    """
    return list(_compiled(text).names)


_Run = Callable[[Lookup, Values], int]


class _Compiled(NamedTuple):
    names: tuple[str, ...]
    run: _Run


@lru_cache(maxsize=1024)
def _compiled(text: str) -> _Compiled:
    compiler = _Compiler(text)
    run = compiler.condition(compiler.parse())
    return _Compiled(tuple(compiler.names), run)


class _Compiler:
    """Compiles the syntax tree of an expression into nested functions."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.names: list[str] = []  # in order

    def _error(self, reason: str) -> ExpressionError:
        return ExpressionError(f"{self._text[:200]!r}: {reason}")

    def _unexpected(self, node: ast.AST) -> ExpressionError:
        return self._error(f"{(ast.get_source_segment(self._text.strip(), node) or '')[:200]!r} is not supported")

    def parse(self) -> ast.expr:
        text = self._text.strip()
        if not text:
            raise self._error("the expression is empty")
        if len(text) > MAX_LENGTH:
            raise self._error(f"expected at most {MAX_LENGTH} characters, got {len(text)}")
        if (foreign := _FOREIGN.search(text)) is not None:
            raise self._error(f"{foreign[0]!r} is neither a name, an integer, nor an operator")
        if max(accumulate({"(": 1, ")": -1}.get(character, 0) for character in text)) > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} nested parentheses")
        try:
            return ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise self._error(f"invalid syntax at character {error.offset or len(text)}") from None

    def condition(self, node: ast.expr) -> _Run:
        """Compile ``and``, ``or``, ``not`` and comparisons."""
        if isinstance(node, ast.BoolOp):
            runs = [self.condition(operand) for operand in node.values]
            combine = all if isinstance(node.op, ast.And) else any
            return lambda lookup, values: int(combine(run(lookup, values) for run in runs))
        if isinstance(node, ast.UnaryOp):
            if not isinstance(node.op, ast.Not):
                raise self._unexpected(node)
            run = self.condition(node.operand)
            return lambda lookup, values: int(not run(lookup, values))
        if isinstance(node, ast.Compare):
            if len(node.ops) > 1 or type(node.ops[0]) not in _COMPARISONS:
                raise self._unexpected(node)
            compare = _COMPARISONS[type(node.ops[0])]
            left, right = self.condition(node.left), self.condition(node.comparators[0])
            return lambda lookup, values: int(compare(left(lookup, values), right(lookup, values)))
        return self._arithmetic(node)

    def _arithmetic(self, node: ast.expr) -> _Run:
        """Compile operations from left to right in a loop: a chain of 500 operations nests 500 deep on the left."""
        chain = []
        while isinstance(node, ast.BinOp):
            if type(node.op) not in _ARITHMETIC:
                raise self._unexpected(node)
            chain.append(node)
            node = node.left
        first = self._atom(node)
        rest = [(_ARITHMETIC[type(link.op)], self.condition(link.right)) for link in reversed(chain)]
        if not rest:
            return first

        def run(lookup: Lookup, values: Values) -> int:
            value = first(lookup, values)
            try:
                for operation, operand in rest:
                    value = self._checked(operation(value, operand(lookup, values)))
            except ZeroDivisionError:
                raise self._error("division by zero") from None
            return value

        return run

    def _atom(self, node: ast.expr) -> _Run:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            number = node.value
            return lambda lookup, values: self._checked(number)
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = self._name(node)
            return lambda lookup, values: self._checked(lookup(name))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.BoolOp, ast.Compare, ast.UnaryOp)):
            return self.condition(node)
        raise self._unexpected(node)

    def _name(self, node: ast.expr) -> str:
        """Return a key, possibly with dots: "text.dim" is in a nested object."""
        name = self._word(node)
        self.names.append(name)
        return name

    def _word(self, node: ast.expr) -> str:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._error(
                "a function takes the name of a key" if not parts else "a name must consist of words and dots"
            )
        return ".".join((node.id, *reversed(parts)))

    def _call(self, node: ast.Call) -> _Run:
        function = self._word(node.func)
        if function not in _FUNCTIONS and function != _STARTS:
            raise self._error(f"unknown function {function[:200]!r}, expected one of {_LISTED}")
        if len(node.args) != 2 or node.keywords:
            raise self._error(f"{function} takes two arguments")
        key = self._name(node.args[0])
        if function == _STARTS:
            word = self._word(node.args[1])
            return lambda lookup, values: self._of(key, values, lambda value: _starts(value, word))
        number, call = self.condition(node.args[1]), _FUNCTIONS[function]
        return lambda lookup, values: self._of(key, values, lambda value: call(value, number(lookup, values)))

    def _of(self, key: str, values: Values, call: Callable[[Any], int]) -> int:
        value = values(key)
        try:
            return self._checked(call(value))
        except _WrongKindError as wrong:
            raise self._error(f"{show(key)} in the config is {show(value)}, expected {wrong}") from None

    def _checked(self, value: int) -> int:
        if not -LIMIT < value < LIMIT:
            raise self._error("a value beyond 64 bits")
        return value


# ---- functions ----


class _WrongKindError(Exception):
    """A key has a value of the wrong kind for a function; the message names the expected kind."""


def _len(value: Any, otherwise: int) -> int:
    if value is None:
        return otherwise
    if not isinstance(value, (list, tuple, Mapping)):
        raise _WrongKindError("a list or an object")
    return len(value)


def _item(value: Any, index: int) -> int:
    if isinstance(value, (list, tuple)) and 0 <= index < len(value):
        value = value[index]
    if not isinstance(value, int):
        raise _WrongKindError(f"an integer, or a list of integers with item {index}")
    return int(value)


def _contains(value: Any, number: int) -> int:
    if value is None:
        return 0
    if not isinstance(value, (list, tuple)) or len(value) > _ITEMS:
        raise _WrongKindError(f"a list of at most {_ITEMS} items")
    return int(number in value)


def _times(value: Any, number: int) -> int:
    if not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise _WrongKindError("a number")
    if not -LIMIT < value < LIMIT:
        return LIMIT  # which is refused as a value beyond 64 bits
    return int(value * number)


def _starts(value: Any, word: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, str):
        raise _WrongKindError("a string")
    return int(value.startswith(word))


_STARTS = "starts"
_FUNCTIONS = {"len": _len, "item": _item, "contains": _contains, "times": _times}
_LISTED = ", ".join(sorted([*_FUNCTIONS, _STARTS]))


# ---- configs ----

# The name of the layer number in a condition.
LAYER_NUMBER = "layer"


class ConfigError(ValueError):
    """A config lacks a key of a schema, or has a wrong value."""


class Config:
    """The values of a config as integers, with a schema's defaults for missing keys.

    Args:
        values: parsed config.json; None without one.
        defaults: numbers and expressions by name.
        file: the name of the config's file, for messages.
    """

    def __init__(
        self, values: Mapping[str, Any] | None, defaults: Mapping[str, int | str], file: str = "config.json"
    ) -> None:
        self._values = values
        self._defaults = defaults
        self._file = file
        self._open: list[str] = []  # defaults under evaluation
        self._layer: int | None = None
        self._depends = False  # the value depends on the layer
        self._cache: dict[tuple[str, int | None], tuple[int, bool]] = {}  # value of a default, and if layers differ

    def evaluate(self, text: str) -> int:
        """Return the value of an expression over the config.

        Raises:
            ConfigError: a key is missing, or its value is not an integer.
            ExpressionError: the expression has no value.
        """
        return evaluate(text, self, self.value)

    def holds(self, text: str, layer: int) -> tuple[bool, bool]:
        """Return if a condition holds in a layer, and if other layers can differ."""
        self._layer, self._depends = layer, False
        try:
            return self.evaluate(text) != 0, self._depends
        finally:
            self._layer = None

    def _default(self, name: str, text: str) -> int:
        """Return the value of a default, evaluated once per layer."""
        key = name, self._layer
        if key not in self._cache:
            self._open.append(name)
            depends, self._depends = self._depends, False
            self._cache[key] = self.evaluate(text), self._depends
            self._depends |= depends
            self._open.pop()
        value, depends = self._cache[key]
        self._depends |= depends
        return value

    def value(self, name: str) -> Any:
        """Return the unconverted value of a key, or its default, or None."""
        value = self._find(name)
        default = self._defaults.get(name)
        if value is not None or default is None:
            return value
        return self(name) if isinstance(default, str) else default

    def _find(self, name: str) -> Any:
        value: Any = self._values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def __call__(self, name: str) -> int:
        """Return the value of a key; "text.dim" is the key "dim" in the object "text".

        Raises:
            ConfigError: the key is missing, or its value is not an integer.
        """
        if name == LAYER_NUMBER:
            if self._layer is None:
                raise ConfigError(f"{name!r} is defined only in the condition of a tensor with a number in its name")
            self._depends = True
            return self._layer
        value = self._find(name)
        if value is None and name in self._defaults:
            value = self._defaults[name]
            if isinstance(value, str):
                if name in self._open:
                    raise ConfigError(
                        f"the default of {show(name)} depends on itself: {' -> '.join([*self._open, name])}"
                    )
                value = self._default(name, value)
        if value is None:
            where = f"there is no {self._file}" if self._values is None else f"{self._file} lacks it"
            raise ConfigError(f"{show(name)} is required, but {where}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int):
            raise ConfigError(f"{show(name)} in {self._file} is {show(value)}, expected an integer")
        return int(value)
