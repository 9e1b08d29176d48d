"""Integer expressions over the keys of a config, for sizes and conditions.

- names, digits, ``+ - * // %`` and parentheses;
- ``== != < <= > >= and or not`` give 1 or 0;
- ``len(key, 2)``: the number of items of a list or an object, 2 if the key is missing;
- ``item(key, 1)``: item 1 of a list; a single number stands for each item;
- ``contains(key, 3)``: 1 if a list has the number;
- ``starts(key, gated)``: 1 if a string begins with the word;
- ``times(key, 64)``: the product with a number that may have a fraction, rounded towards 0.

The grammar is a subset of Python's. ``ast`` parses, and only the nodes of this list are evaluated: a schema may come
from an untrusted source.
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

# Most characters and nested parentheses of an expression: beyond any real shape, below any recursion limit.
MAX_LENGTH = 1000
MAX_DEPTH = 50
# Values must fit in a signed 64-bit integer, as shapes do.
LIMIT = 1 << 63
# Longest list that is searched; each layer searches it again.
_ITEMS = 10_000

# Anything but names, decimal integers and operators: "0x10" and "1_000" too, which Python accepts.
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
    """An expression that is malformed or has no value; the message quotes it and says why."""


def evaluate(text: str, lookup: Lookup, values: Values | None = None) -> int:
    """Evaluate an expression.

    Args:
        text: such as ``num_key_value_heads * head_dim``.
        lookup: returns the integer of a name, or raises.
        values: returns a function's argument: a list, an object, a string, a number, or None for a missing key.
            None stands for ``lookup``.

    Raises:
        ExpressionError: bad syntax, division by zero, a value beyond 64 bits, a key of the wrong kind for a function,
            or a ``lookup`` that evaluates nested expressions too deeply.
    """
    try:
        return _compiled(text).run(lookup, values or lookup)
    except RecursionError:
        raise ExpressionError(
            f"{text[:200]!r}: its names are defined by expressions that are nested too deep"
        ) from None


def names_in(text: str) -> list[str]:
    """The names in an expression, in order.

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
    """Turns the syntax tree of an expression into nested functions."""

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
            raise self._error("it is empty")
        if len(text) > MAX_LENGTH:
            raise self._error(f"{len(text)} characters, but at most {MAX_LENGTH} are supported")
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
        """Compile operations from left to right: a chain of 500 nests 500 deep on the left."""
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
        """A key, which may have dots: "text.dim" is in a nested object."""
        name = self._word(node)
        self.names.append(name)
        return name

    def _word(self, node: ast.expr) -> str:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise self._error("a function takes the name of a key" if not parts else "a name has only words and dots")
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
    """The value of a key is not what a function takes; says what that is."""


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
        return LIMIT  # refused as a value beyond 64 bits
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
