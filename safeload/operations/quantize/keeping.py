"""Which tensors the caller keeps unquantized: ``keep=``, which engines call ``ignore=``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...base.selecting import check_matches
from ...base.text import show
from ...errors import TensorNotFoundError

Keep = str | Iterable[str] | Callable[[str], object] | None

# Begins a regular expression, which must match a name from its start, as in compressed-tensors.
EXPRESSION = "re:"


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that begins with `EXPRESSION`."""
    try:
        return re.compile(pattern.removeprefix(EXPRESSION))
    except re.error as error:
        raise ValueError(f"keep={show(pattern)} is not a regular expression: {error}") from None


class Planned(NamedTuple):
    """The decision about one tensor."""

    scheme: str | None  # None leaves the tensor unquantized
    reason: str = ""  # why it is left unquantized
    already: bool = False  # True if it has the requested scheme already
    requested: str | None = None  # the requested scheme, if the rows of the tensor need its fallback
    dtype: str | None = None  # code of the dtype to convert to instead


class Kept:
    """The tensors to leave unquantized, by patterns of tensor or module names or by a function."""

    def __init__(self, keep: Keep) -> None:
        self._function = keep if callable(keep) else None
        patterns = () if keep is None or callable(keep) else (keep,) if isinstance(keep, str) else tuple(keep)
        self._patterns = patterns
        self._expressions: dict[str, re.Pattern[str]] = {}
        for pattern in patterns:
            if isinstance(pattern, str) and pattern.startswith(EXPRESSION):
                self._expressions[pattern] = compiled(pattern)

    def reason(self, name: str) -> str | None:
        """Return why a tensor is kept, or None."""
        pattern = next((pattern for pattern in self._patterns if self._matches(pattern, name)), None)
        if pattern is not None:
            return f"keep={show(pattern)}"
        return "excluded by keep=" if self._function is not None and self._function(name) else None

    def check(self, names: Collection[Any]) -> None:
        """Refuse patterns that match neither a tensor nor a module."""
        both = {alias for name in names if isinstance(name, str) for alias in (name, name.removesuffix(".weight"))}
        check_matches("keep", [text for text in self._patterns if text not in self._expressions], both)
        for pattern, expression in self._expressions.items():
            if not any(map(expression.match, both)):
                raise TensorNotFoundError(f"keep={show(pattern)} matches no tensor")

    def _matches(self, pattern: str, name: str) -> bool:
        module = name.removesuffix(".weight")
        expression = self._expressions.get(pattern)
        if expression is not None:
            return expression.match(name) is not None or expression.match(module) is not None
        return fnmatchcase(name, pattern) or fnmatchcase(module, pattern)
