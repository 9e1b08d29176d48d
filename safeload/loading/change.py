"""What an adapter changes in one tensor of a base, with shapes that fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..base import dtypes
from ..base.messages import error_about
from ..base.text import show
from ..errors import FormatError, UnsupportedError
from .adapter import BIAS, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, VALUE, A, Adapter, B
from .adapter_base import AdapterTarget
from .adapter_fit import Fit


class Change(NamedTuple):
    """What an adapter changes in one tensor.

    Attributes:
        adapter: the adapter.
        parts: names of its tensors by what they are.
        scaling: factor of the product; the weight is in it.
        by_columns: whether rows of the tensor are columns of A.
        stacked: whether the tensor is a stack of matrices, such as experts, each with a change of its own.
        matrices: of the stack that the change is of.
        part: of a tensor that holds a part of a stack, the number of the matrix and its rows there; else None.
    """

    adapter: Adapter
    parts: Mapping[str, str]
    scaling: float
    by_columns: bool = False
    stacked: bool = False
    matrices: int = 1
    part: tuple[int, slice] | None = None


class _Given(NamedTuple):
    """The parts of a change, and what they belong to."""

    adapter: Adapter
    parts: Mapping[str, str]
    target: AdapterTarget
    base: str

    def shape(self, part: str) -> tuple[int, ...]:
        """Shape of a part."""
        return self.adapter.shape(self.parts[part])

    def unfit(self, part: str, wanted: str) -> FormatError:
        """The error for a part of the wrong shape."""
        name, target = self.parts[part], self.target
        return error_about(
            FormatError,
            f"of the adapter is {list(self.shape(part))}, but {show(target.name)} of {self.base} is "
            f"{list(target.shape)}: it needs {wanted}",
            path=self.adapter.checkpoint.path,
            tensor=name,
        )


def change_of(
    adapter: Adapter, module: str, parts: Mapping[str, str], target: AdapterTarget, base: str, fit: Fit
) -> Change:
    """Checks the shapes of a change.

    Args:
        adapter: the adapter.
        module: that it changes.
        parts: names of the adapter's tensors for this tensor of the base, by what they are.
        target: the tensor of the base.
        base: its path, for messages.
        fit: see `Fit`.

    Raises:
        FormatError: shapes that do not fit.
        UnsupportedError: a part that is not floating, or that cannot be merged.
    """
    given = _Given(adapter, parts, target, base)
    for name in parts.values():
        info = adapter.checkpoint.tensors[name]
        if not dtypes.parse(info.dtype).floating:
            text = f"of the adapter is {info.dtype}: it must be floating"
            raise error_about(UnsupportedError, text, path=adapter.checkpoint.path, tensor=name)
    if VALUE in parts:
        return _of_value(given)
    if module in fit.parameters:
        return _of_parameter(given, module in fit.transposed)
    if BIAS in parts:
        return _of_bias(given, module)
    return _of_weight(given, module, module in fit.transposed)


def _of_value(given: _Given) -> Change:
    adapter, target, name = given.adapter, given.target, given.parts[VALUE]
    if given.shape(VALUE) != target.shape:
        raise given.unfit(VALUE, "the same shape, because it replaces it")
    if adapter.weight != 1:
        raise error_about(
            UnsupportedError,
            f"of the adapter replaces {show(target.name)}: the weight of its adapter must be 1, not {adapter.weight:g}",
            path=adapter.checkpoint.path,
            tensor=name,
        )
    return Change(adapter, given.parts, 1.0)


def _of_bias(given: _Given, module: str) -> Change:
    if given.shape(BIAS) != given.target.shape:
        raise given.unfit(BIAS, "the same shape, because it is added to it")
    return Change(given.adapter, given.parts, _scaling(given, A, module, given.shape(A)[:1]))


def _of_weight(given: _Given, module: str, transposed: bool) -> Change:
    """Of a linear layer, a convolution or an embedding."""
    target, parts = given.target, given.parts
    rows, columns = target.shape[0] if target.shape else 1, math.prod(target.shape[1:])
    mlx, embedding = given.adapter.settings.mlx, EMBEDDING_A in parts
    wanted_a: tuple[int, ...]
    wanted_b: tuple[int, ...]
    a, b = (EMBEDDING_A, EMBEDDING_B) if embedding else (A, B)
    _check_axes(given, a, b)
    rank = given.shape(a)[1 if mlx else 0]
    by_columns = embedding or (transposed and len(target.shape) == 2)
    if mlx:  # [in, r] and [r, out]; of an embedding [vocabulary, r] and [r, dim]
        by_columns = given.shape(a) != (columns, rank) and given.shape(a) == (rows, rank)
        wanted_a, wanted_b = ((rows if by_columns else columns), rank), (rank, columns if by_columns else rows)
    else:
        inner, outer = (rows, columns) if by_columns else (columns, rows)
        convolution = len(target.shape) > 2
        wanted_a = (rank, *target.shape[1:]) if convolution else (rank, inner)
        wanted_b = (outer, rank, *(1 for _ in target.shape[2:])) if convolution else (outer, rank)
    if len(target.shape) < 2:
        raise given.unfit(a, "a base of two axes or more")
    _check_shapes(given, {a: wanted_a, b: wanted_b})
    if MAGNITUDE in parts:
        wanted = columns if by_columns else rows
        if math.prod(given.shape(MAGNITUDE)) != wanted:
            raise given.unfit(MAGNITUDE, f"{wanted} norms")
    return Change(given.adapter, parts, _scaling(given, a, module, (rank,)), by_columns)


def _of_parameter(given: _Given, transposed: bool) -> Change:
    """Of a tensor that ``target_parameters`` names: a matrix, or a stack of matrices."""
    target, name = given.target, given.parts[A]
    if given.adapter.settings.dora or BIAS in given.parts:
        raise error_about(
            UnsupportedError,
            f"of the adapter changes {show(target.name)}, a parameter: PEFT has neither DoRA nor lora_bias of these",
            path=given.adapter.checkpoint.path,
            tensor=name,
        )
    _check_axes(given, A, B)
    if len(target.shape) not in (2, 3):
        raise given.unfit(A, "a base of two or three axes")
    count = target.shape[0] if len(target.shape) == 3 else 1
    all_ranks = given.shape(A)[0]
    if count == 0 or all_ranks % count:
        raise given.unfit(A, f"a multiple of {count} rows, as many for each matrix")
    rows, columns = target.shape[-2:]
    inner, outer = (rows, columns) if transposed else (columns, rows)
    _check_shapes(given, {A: (all_ranks, inner), B: (outer, all_ranks)})
    scaling = _scaling(given, A, target.name, (all_ranks // count,))
    return Change(given.adapter, given.parts, scaling, transposed, len(target.shape) == 3, count)


def _check_axes(given: _Given, *parts: str) -> None:
    for part in parts:
        if len(given.shape(part)) < 2:
            raise given.unfit(part, "two axes")


def _check_shapes(given: _Given, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for part, shape in wanted.items():
        if given.shape(part) != shape:
            raise given.unfit(part, str(list(shape)))


def _scaling(given: _Given, part: str, module: str, rank: tuple[int, ...]) -> float:
    """The factor of a change; the rank is empty where A has no axes."""
    found = given.adapter.settings.scaling(module, sum(rank), given.parts[part])
    return found * given.adapter.weight
