"""Integer expressions over the keys of a config, for sizes and conditions.

- names, digits, ``+ - * // %`` and parentheses;
- ``== != < <= > >= and or not`` give 1 or 0;
- ``len(key, 2)``: the number of items of a list or an object, 2 if there is none;
- ``item(key, 1)``: item 1 of a list; a single number stands for each item;
- ``contains(key, 3)``: whether a list has a number;
- ``starts(key, gated)``: whether a text begins with a word;
- ``times(key, 64)``: the product with a number that may have a fraction, rounded towards 0.

``eval`` is not used: a schema may come from an untrusted source.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ..base.text import show

# Most characters and nested parentheses of an expression: beyond any real shape, below any recursion limit.
MAX_LENGTH = 1000
MAX_DEPTH = 50
# Values must fit in a signed 64-bit integer, as shapes do.
LIMIT = 1 << 63
# Most items of a list that is searched, once for each layer.
_ITEMS = 10_000

# A name may contain dots, for keys of nested objects: "text.dim".
_TOKEN = re.compile(
    r"\s*(?:([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)|([0-9]+)|(//|[=!<>]=|[-+*()%<>,]))", re.ASCII
)
_WORDS = ("and", "or", "not")
_COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_PRODUCTS = {"*": operator.mul, "//": operator.floordiv, "%": operator.mod}
_SUMS = {"+": operator.add, "-": operator.sub}

Lookup = Callable[[str], int]
Values = Callable[[str], Any]


class ExpressionError(ValueError):
    """An expression that is malformed or has no value; the message quotes it and says why."""


def evaluate(text: str, lookup: Lookup, values: Values | None = None) -> int:
    """Evaluates an expression.

    Args:
        text: the expression, such as ``num_key_value_heads * head_dim``.
        lookup: returns the value of a name, or raises.
        values: returns what a function gets for a key: a list, an object, a text, a number, or None for a missing key.
            None: ``lookup``.

    Raises:
        ExpressionError: bad syntax, division by zero, a value beyond 64 bits, a key of the wrong kind for a function,
            or a ``lookup`` that evaluates nested expressions too deeply.
    """
    try:
        return _parsed(text).run(lookup, values or lookup)
    except RecursionError:
        raise ExpressionError(
            f"{text[:200]!r}: its names are defined by expressions that are nested too deep"
        ) from None


def names_in(text: str) -> list[str]:
    """The names in an expression, in order.

    Raises:
        ExpressionError: bad syntax.
    """
    return list(_parsed(text).names)


_Run = Callable[[Lookup, Values], int]


class _Parsed(NamedTuple):
    """An expression that can be evaluated: its names, and a function of what they stand for."""

    names: tuple[str, ...]
    run: _Run


@lru_cache(maxsize=1024)
def _parsed(text: str) -> _Parsed:
    parser = _Parser(text)
    return _Parsed(tuple(parser.names), parser.run)


class _Parser:
    """Recursive descent: alternatives of conditions, of comparisons, of sums, of products, of atoms.

    Attributes:
        names: the names, in order.
        run: evaluates the expression.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize()
        self._at = 0
        self._depth = 0
        self.names: list[str] = []
        if not self._tokens:
            raise self._fail("it is empty")
        self.run = self._either()
        if self._at < len(self._tokens):
            raise self._fail(f"{self._tokens[self._at][:200]!r} is not expected there")

    def _fail(self, reason: str) -> ExpressionError:
        return ExpressionError(f"{self._text[:200]!r}: {reason}")

    def _tokenize(self) -> list[str]:
        if len(self._text) > MAX_LENGTH:
            raise self._fail(f"{len(self._text)} characters, but at most {MAX_LENGTH} are supported")
        tokens, at = [], 0
        end = len(self._text.rstrip())
        while at < end:
            found = _TOKEN.match(self._text, at)
            if found is None:
                character = self._text[at:].lstrip()[:1]
                raise self._fail(f"{character!r} is neither a name, an integer, nor an operator")
            tokens.append(found[found.lastindex or 0])
            at = found.end()
        return tokens

    def _next(self, *wanted: str) -> str | None:
        """Consumes and returns the next token if it is in ``wanted``."""
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _either(self) -> _Run:
        runs = [self._both()]
        while self._next("or") is not None:
            runs.append(self._both())
        return runs[0] if len(runs) == 1 else lambda lookup, values: int(any(run(lookup, values) for run in runs))

    def _both(self) -> _Run:
        runs = [self._negated()]
        while self._next("and") is not None:
            runs.append(self._negated())
        return runs[0] if len(runs) == 1 else lambda lookup, values: int(all(run(lookup, values) for run in runs))

    def _negated(self) -> _Run:
        negations = 0
        while self._next("not") is not None:
            negations += 1
        run = self._comparison()
        if negations == 0:
            return run
        return lambda lookup, values: int((run(lookup, values) != 0) == (negations % 2 == 0))

    def _comparison(self) -> _Run:
        left = self._sum()
        found = self._next(*_COMPARISONS)
        if found is None:
            return left
        right, compare = self._sum(), _COMPARISONS[found]
        return lambda lookup, values: int(compare(left(lookup, values), right(lookup, values)))

    def _sum(self) -> _Run:
        return self._chain(_SUMS, self._product)

    def _product(self) -> _Run:
        return self._chain(_PRODUCTS, self._atom)

    def _chain(self, operations: Mapping[str, Callable[[int, int], int]], operand: Callable[[], _Run]) -> _Run:
        """Operands with operations between them, from left to right."""
        first, rest = operand(), []
        while (found := self._next(*operations)) is not None:
            rest.append((operations[found], operand()))
        if not rest:
            return first

        def run(lookup: Lookup, values: Values) -> int:
            value = first(lookup, values)
            try:
                for operation, other in rest:
                    value = self._checked(operation(value, other(lookup, values)))
            except ZeroDivisionError:
                raise self._fail("division by zero") from None
            return value

        return run

    def _atom(self) -> _Run:
        if self._next("(") is not None:
            return self._nested(self._either)
        if self._at == len(self._tokens):
            raise self._fail("it ends where a value is expected")
        token = self._tokens[self._at]
        self._at += 1
        if token[0].isdigit():
            value = int(token) if len(token) < 20 else LIMIT
            return lambda lookup, values: self._checked(value)
        if token in _WORDS or not (token[0].isalpha() or token[0] == "_"):
            raise self._fail(f"{token[:200]!r} stands where a value is expected")
        if self._next("(") is not None:
            return self._nested(lambda: self._call(token))
        self.names.append(token)
        return lambda lookup, values: self._checked(lookup(token))

    def _nested(self, parse: Callable[[], _Run]) -> _Run:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._fail(f"more than {MAX_DEPTH} nested parentheses")
        run = parse()
        if self._next(")") is None:
            raise self._fail("a parenthesis is not closed")
        self._depth -= 1
        return run

    def _call(self, function: str) -> _Run:
        """A call of a function: a key, and a number or for ``starts`` a word."""
        if function not in _FUNCTIONS and function != _STARTS:
            raise self._fail(f"unknown function {function[:200]!r}, expected one of {_LISTED}")
        key = self._word()
        self.names.append(key)
        if self._next(",") is None:
            raise self._fail(f"{function} takes two arguments")
        if function == _STARTS:
            word = self._word()
            return lambda lookup, values: self._of(key, values, lambda value: _starts(value, word))
        number, call = self._either(), _FUNCTIONS[function]
        return lambda lookup, values: self._of(key, values, lambda value: call(value, number(lookup, values)))

    def _word(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not (token[:1].isalpha() or token[:1] == "_"):
            raise self._fail("a function takes the name of a key")
        self._at += 1
        return token

    def _of(self, key: str, values: Values, call: Callable[[Any], int]) -> int:
        value = values(key)
        try:
            return self._checked(call(value))
        except _WrongKindError as wrong:
            raise self._fail(f"{show(key)} in the config is {show(value)}, expected {wrong}") from None

    def _checked(self, value: int) -> int:
        if not -LIMIT < value < LIMIT:
            raise self._fail("a value beyond 64 bits")
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
