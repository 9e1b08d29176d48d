"""Integer expressions over the keys of a config: names, digits, ``+ - * //`` and parentheses.

``eval`` is not used: a schema may come from an untrusted source.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# Most characters and nested parentheses of an expression: beyond any real shape, below any recursion limit.
MAX_LENGTH = 1000
MAX_DEPTH = 50
# Values must fit in a signed 64-bit integer, as shapes do.
LIMIT = 1 << 63

# A name may contain dots, for keys of nested objects: "text.dim".
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)|([0-9]+)|(//|[-+*()]))", re.ASCII)

Lookup = Callable[[str], int]


class ExpressionError(ValueError):
    """An expression that is malformed or has no value; the message quotes it and says why."""


def evaluate(text: str, lookup: Lookup) -> int:
    """Evaluates an expression.

    Args:
        text: the expression, such as ``num_key_value_heads * head_dim``.
        lookup: returns the value of a name, or raises.

    Raises:
        ExpressionError: bad syntax, division by zero, a value beyond 64 bits, or a ``lookup`` that evaluates nested
            expressions too deeply.
    """
    try:
        return _Parser(text, lookup).parse()
    except RecursionError:
        raise ExpressionError(
            f"{text[:200]!r}: its names are defined by expressions that are nested too deep"
        ) from None


def names_in(text: str) -> list[str]:
    """The names in an expression, in order.

    Raises:
        ExpressionError: bad syntax.
    """
    parser = _Parser(text, lambda name: 1)
    parser.parse(dry=True)
    return [token for token in parser.tokens if token[0].isalpha() or token[0] == "_"]


class _Parser:
    """Recursive descent: sums of products of atoms."""

    def __init__(self, text: str, lookup: Lookup) -> None:
        self.text = text
        self.lookup = lookup
        self.tokens = self._tokenize()
        self.at = 0
        self.depth = 0
        self.dry = False

    def _fail(self, reason: str) -> ExpressionError:
        return ExpressionError(f"{self.text[:200]!r}: {reason}")

    def _tokenize(self) -> list[str]:
        if len(self.text) > MAX_LENGTH:
            raise self._fail(f"{len(self.text)} characters, but at most {MAX_LENGTH} are supported")
        tokens, at = [], 0
        end = len(self.text.rstrip())
        while at < end:
            found = _TOKEN.match(self.text, at)
            if found is None:
                character = self.text[at:].lstrip()[:1]
                raise self._fail(f"{character!r} is neither a name, an integer, nor one of + - * // ( )")
            tokens.append(found[found.lastindex or 0])
            at = found.end()
        return tokens

    def parse(self, *, dry: bool = False) -> int:
        self.dry = dry  # syntax only: values are ignored
        if not self.tokens:
            raise self._fail("it is empty")
        value = self._sum()
        if self.at < len(self.tokens):
            raise self._fail(f"{self.tokens[self.at][:200]!r} is not expected there")
        return value

    def _next(self, *wanted: str) -> str | None:
        """Consumes and returns the next token if it is in ``wanted``."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def _sum(self) -> int:
        value = self._product()
        while (operator := self._next("+", "-")) is not None:
            other = self._product()
            value = self._checked(value + other if operator == "+" else value - other)
        return value

    def _product(self) -> int:
        value = self._atom()
        while (operator := self._next("*", "//")) is not None:
            other = self._atom()
            if operator == "*":
                value = self._checked(value * other)
            elif other != 0:
                value //= other
            elif not self.dry:
                raise self._fail("division by zero")
        return value

    def _atom(self) -> int:
        if self._next("(") is not None:
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self._fail(f"more than {MAX_DEPTH} nested parentheses")
            value = self._sum()
            if self._next(")") is None:
                raise self._fail("a parenthesis is not closed")
            self.depth -= 1
            return value
        if self.at == len(self.tokens):
            raise self._fail("it ends where a value is expected")
        token = self.tokens[self.at]
        self.at += 1
        if token[0].isdigit():
            return self._checked(int(token) if len(token) < 20 else LIMIT)
        if token[0].isalpha() or token[0] == "_":
            return self._checked(self.lookup(token))
        raise self._fail(f"{token[:200]!r} stands where a value is expected")

    def _checked(self, value: int) -> int:
        if not -LIMIT < value < LIMIT and not self.dry:
            raise self._fail("a value beyond 64 bits")
        return value
