"""What becomes of each tensor when a checkpoint is converted, in memory and as the plain data of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.scheme import SCHEMES
from ...base.text import show
from ...errors import FormatError
from ...models.layout import StackedTensor
from ..sources.plan import field, texts


class Decision(NamedTuple):
    """What becomes of one tensor, or of the layers that are stacked into one.

    Attributes:
        sources: names in the source: one, or those of the layers.
        dtype: code of the dtype that it is converted to; None to leave it as it is stored.
        scheme: scheme that it is quantized to, else None.
        kept: why ``quantize`` leaves it unquantized; None without ``quantize``, and if it is quantized.
        stack: the entry of the layout that it is made by; None without a layout. Its ``dtype`` is never None.
    """

    sources: tuple[str, ...]
    dtype: str | None = None
    scheme: str | None = None
    kept: str | None = None
    stack: StackedTensor | None = None


def runs_of(decisions: Mapping[str, Decision]) -> list[dict[str, Any]]:
    """Decisions as plain data: neighbours with the same decision stand together."""
    runs = []
    for (how, _), several in groupby(decisions.items(), key=lambda item: (_how(*item), _alone(*item))):
        group = list(several)
        name, first = group[0]
        run: dict[str, Any] = dict(how)
        if first.stack is not None:
            run["stack"] = {"name": name, "source": first.stack.source, "transpose": first.stack.transpose}
            run["names"] = list(first.sources)
        elif first.sources != (name,):
            run.update(names=[name], of=first.sources[0])
        else:
            run["names"] = [name for name, _ in group]
        runs.append(run)
    return runs


def _how(name: str, decision: Decision) -> tuple[tuple[str, str], ...]:
    how = {"dtype": decision.dtype, "scheme": decision.scheme, "kept": decision.kept}
    return tuple((key, value) for key, value in how.items() if value is not None)


def _alone(name: str, decision: Decision) -> str | None:
    """A tensor that makes a run of its own has a key of its own."""
    return None if decision.sources == (name,) and decision.stack is None else name


def decisions_of(piece: Mapping[str, Any]) -> dict[str, Decision]:
    """The inverse of `runs_of`."""
    found: dict[str, Decision] = {}
    for run in field(piece, "tensors", list):
        names = texts(run, "names")
        dtype, scheme, kept = (None if run.get(key) is None else field(run, key, str) for key in _HOW)
        if dtype is not None:
            dtype = row_of(dtype).code
        if scheme is not None and scheme not in SCHEMES:
            raise FormatError(f"a piece of a plan quantizes to a scheme, found {show(scheme)}")
        if "stack" in run:
            entry = field(run, "stack", dict)
            try:
                stack = StackedTensor(**entry)
            except (TypeError, ValueError) as error:
                raise FormatError(f"a piece of a plan stacks layers: {error}") from None
            if dtype is None:
                raise FormatError(f"a piece of a plan stacks layers of a dtype, {show(stack.name)} without one")
            found[stack.name] = Decision(tuple(names), dtype, scheme, kept, stack)
            continue
        for name in names:
            found[name] = Decision((field(run, "of", str) if "of" in run else name,), dtype, scheme, kept)
    return found


def row_of(code: str) -> dtypes.Dtype:
    """The dtype that a plan names.

    Raises:
        FormatError: there is no such dtype.
    """
    if code not in dtypes.BY_CODE:
        raise FormatError(f"a plan converts to a dtype, found {show(code)}")
    return dtypes.BY_CODE[code]


_HOW = ("dtype", "scheme", "kept")
