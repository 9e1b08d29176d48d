"""Which tensors the caller keeps unquantized: ``keep=``, which engines call ``ignore=``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ...base.selecting import check_matches
from ...base.text import show
from ...errors import TensorNotFoundError, UnsupportedError

Keep = str | Iterable[str] | Callable[[str], object] | None

# Begins a regular expression, which must match a name from its start, as in compressed-tensors.
_EXPRESSION = "re:"


class Planned(NamedTuple):
    """The decision about one tensor."""

    scheme: str | None  # None leaves the tensor unquantized
    reason: str = ""  # why it is left unquantized
    already: bool = False  # True if it has the requested scheme already
    requested: str | None = None  # the requested scheme, if the rows of the tensor need its fallback
    dtype: str | None = None  # code of the dtype to convert to instead


class Kept:
    """The tensors to leave unquantized, by patterns of tensor or module names or by a function.

    They may also select all tensors of the source that an engine stores as one: ``sources_of`` returns their names.
    """

    def __init__(self, keep: Keep, sources_of: Callable[[str], Sequence[str]] = lambda name: ()) -> None:
        self._sources_of = sources_of
        patterns = () if keep is None or callable(keep) else (keep,) if isinstance(keep, str) else tuple(keep)
        self._tests = {pattern: _test_of(pattern) for pattern in patterns}
        self._function = keep if callable(keep) else None

    def reason(self, name: str) -> str | None:
        """Return why a tensor is kept, or None."""
        for pattern, test in self._tests.items():
            if self._selects(test, name):
                return f"keep={show(pattern)}"
        return "excluded by keep=" if self._function is not None and self._selects(self._function, name) else None

    def _selects(self, test: Callable[[str], object], name: str) -> bool:
        """Return True if a test selects a name, or all of its sources."""
        if test(name):
            return True
        sources = self._sources_of(name)
        left = [source for source in sources if not test(source)]
        if left and len(left) < len(sources):
            raise UnsupportedError(
                f"keep= selects {show(next(s for s in sources if s not in left))} and not {show(left[0])}, but "
                f"the engine stores both in {show(name)}: select all or none",
                tensor=name,
            )
        return bool(sources) and not left

    def check(self, names: Collection[Any]) -> None:
        """Refuse patterns that match neither a tensor nor a module."""
        texts = [text for name in names if isinstance(name, str) for text in (name, *self._sources_of(name))]
        both = {*texts, *(text.removesuffix(".weight") for text in texts)} if self._tests else ()
        expressions = [pattern for pattern in self._tests if _is_expression(pattern)]
        check_matches("keep", [pattern for pattern in self._tests if pattern not in expressions], both)
        for pattern in expressions:
            if not any(map(self._tests[pattern], both)):
                raise TensorNotFoundError(f"keep={show(pattern)} matches no tensor")


def _is_expression(pattern: object) -> bool:
    return isinstance(pattern, str) and pattern.startswith(_EXPRESSION)


def _test_of(pattern: str) -> Callable[[str], bool]:
    """Return the function that tells if a pattern matches the name of a tensor, or of its module."""
    if not _is_expression(pattern):
        return lambda name: fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)
    try:
        match = re.compile(pattern.removeprefix(_EXPRESSION)).match
    except re.error as error:
        raise ValueError(f"keep={show(pattern)} is not a regular expression: {error}") from None
    return lambda name: match(name) is not None or match(name.removesuffix(".weight")) is not None
