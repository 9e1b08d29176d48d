"""Merges adapters into tensors of a base, tile by tile: W + s * (B @ A) in float32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.table import similar
from ..base.text import show
from ..engine.cast import astype, target_array
from ..engine.load import parse_target
from ..errors import FormatError, TensorNotFoundError, UnsupportedError
from .adapter import BIAS, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, VALUE, A, Adapter, B
from .adapter_base import Base, Target

# Elements of a tile. Its size follows from the shape of the tensor alone, so that its sums do too.
_TILE = 1 << 22
# Rows of a tile are a multiple of this where there are as many: blocks of scales have at most so many rows.
_BLOCK = 128


class Change(NamedTuple):
    """What an adapter changes in one tensor.

    Attributes:
        adapter: the adapter.
        parts: names of its tensors by what they are.
        scaling: factor of the product; the weight is in it.
        by_columns: whether rows of the tensor are columns of A.
    """

    adapter: Adapter
    parts: Mapping[str, str]
    scaling: float
    by_columns: bool = False


class _Factors(NamedTuple):
    """A change with its tensors in memory: the tile [a, b) gets scaling * (left[a:b] @ right).

    Attributes:
        left: [rows, r].
        right: [r, columns].
        scaling: factor of the product.
        magnitude: norms that rows, or columns, get; None to leave them.
        by_columns: whether the magnitude belongs to columns.
        norms: those of the columns, where the magnitude belongs to them.
    """

    left: Array
    right: Array
    scaling: float
    magnitude: Array | None = None
    by_columns: bool = False
    norms: Array | None = None


class Merge:
    """Adapters that fit a base.

    Args:
        base: the base.
        adapters: in the order in which they are merged.
        among: names of the base's tensors to consider; None for all, and then every tensor of an adapter must have its
            place.

    Attributes:
        changes: by name of the base's tensor, in order.

    Raises:
        TensorNotFoundError: the base lacks a module of an adapter.
        FormatError: shapes that do not fit.
        UnsupportedError: a tensor that cannot be merged.
    """

    def __init__(self, base: Base, adapters: Sequence[Adapter], among: Container[str] | None = None) -> None:
        self._base = base
        self.changes: dict[str, list[Change]] = {}
        for adapter in adapters:
            for module, parts in adapter.modules.items():
                self._fit(adapter, module, parts, among)

    def __contains__(self, name: object) -> bool:
        return name in self.changes

    def _fit(self, adapter: Adapter, module: str, parts: Mapping[str, str], among: Container[str] | None) -> None:
        if VALUE in parts:
            wanted = {module: {VALUE: parts[VALUE]}}
        else:
            bias = {key: parts[key] for key in (BIAS,) if key in parts}
            wanted = {f"{module}.weight": {key: name for key, name in parts.items() if key not in bias}}
            if bias:
                wanted[f"{module}.bias"] = {**bias, A: parts[A]}
        for name, some in wanted.items():
            if among is not None and name not in among:
                continue
            if name not in self._base:
                raise self._missing(adapter, name, next(iter(some.values())))
            change = _change(adapter, module, some, self._base.target(name), self._base.title)
            several = self.changes.setdefault(name, [])
            if VALUE in some:  # PEFT may write it after the factors of the same module
                at = next((k for k, one in enumerate(several) if one.adapter is adapter), len(several))
                several.insert(at, change)
            else:
                several.append(change)

    def _missing(self, adapter: Adapter, name: str, tensor: str) -> TensorNotFoundError:
        message = (
            f"tensor {show(tensor)} of the adapter belongs to {show(name)}, which {self._base.title} does not have"
        )
        near = similar(name, list(self._base))
        if name == "lm_head.weight" and any(one.endswith("embed_tokens.weight") for one in self._base):
            message += ": its head is tied to the embedding, and has no weights of its own to change"
        elif name.endswith(".bias"):
            message += ": the layer has no bias in the base"
        elif near:
            message += f"; close to it: {', '.join(near)}"
        return TensorNotFoundError(message, path=adapter.checkpoint.path, tensor=tensor)

    def target_row(self, name: str, dtype: Any) -> dtypes.Dtype:
        """The dtype of a merged tensor.

        Args:
            name: of the tensor.
            dtype: that is asked for; None to keep its own.

        Raises:
            UnsupportedError: it is packed, and no dtype is asked for.
        """
        row = parse_target(dtype) or self._base.target(name).row
        if row is None:
            raise UnsupportedError(
                f"tensor {show(name)} is packed, and an adapter changes it: pass dtype=, such as "
                'dtype="bfloat16", to merge its true values',
                path=self._base.title,
                tensor=name,
            )
        return row

    def values(self, name: str, row: dtypes.Dtype, out: Array | None = None, threads: int | None = None) -> Array:
        """A merged tensor.

        Args:
            name: one of `changes`.
            row: its dtype.
            out: an array of that dtype and of its shape to fill; None for a new one.
            threads: for rounding; None: chosen automatically.

        Raises:
            FormatError, OSError: a file cannot be read.
            ValueError: ``out`` does not fit.
        """
        target = self._base.target(name)
        result = target_array(target.shape, dtypes.array_dtype(row.number), out)
        flat = result.reshape(_flat(target.shape))
        for begin, tile in _merged(target, self.changes[name]):
            astype(tile, result.dtype, out=flat[begin : begin + len(tile)], threads=threads)
        return result


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _change(adapter: Adapter, module: str, parts: Mapping[str, str], target: Target, base: str) -> Change:
    """Checks the shapes of a change."""
    rows, columns = _flat(target.shape)
    shapes = {part: adapter.shape(name) for part, name in parts.items()}

    def unfit(part: str, wanted: str) -> FormatError:
        return FormatError(
            f"tensor {show(parts[part])} of the adapter is {list(shapes[part])}, but {show(target.name)} of {base} is "
            f"{list(target.shape)}: it needs {wanted}",
            adapter.checkpoint.path,
            tensor=parts[part],
        )

    for name in parts.values():
        info = adapter.checkpoint.tensors[name]
        if not dtypes.parse(info.dtype).floating:
            raise UnsupportedError(
                f"tensor {show(name)} of the adapter is {info.dtype}: it must be floating", tensor=name
            )
    if VALUE in parts:
        if shapes[VALUE] != target.shape:
            raise unfit(VALUE, "the same shape, because it replaces it")
        if adapter.weight != 1:
            raise UnsupportedError(
                f"tensor {show(parts[VALUE])} of the adapter replaces {show(target.name)}: the weight of its adapter "
                f"must be 1, not {adapter.weight:g}",
                path=adapter.checkpoint.path,
                tensor=parts[VALUE],
            )
        return Change(adapter, parts, 1.0)
    if BIAS in parts:
        rank = shapes[A][0]
        if shapes[BIAS] != target.shape:
            raise unfit(BIAS, "the same shape, because it is added to it")
        return Change(adapter, parts, adapter.settings.scaling(module, rank, parts[A]) * adapter.weight)
    mlx, embedding = adapter.settings.mlx, EMBEDDING_A in parts
    wanted_a: tuple[int, ...]
    wanted_b: tuple[int, ...]
    a, b = (EMBEDDING_A, EMBEDDING_B) if embedding else (A, B)
    if len(shapes[a]) < 2 or len(shapes[b]) < 2:
        raise unfit(a if len(shapes[a]) < 2 else b, "two axes")
    rank = shapes[a][1] if mlx else shapes[a][0]
    by_columns = embedding or (adapter.settings.transposed and len(target.shape) == 2)
    if mlx:  # [in, r] and [r, out]; of an embedding [vocabulary, r] and [r, dim]
        by_columns = shapes[a] != (columns, rank) and shapes[a] == (rows, rank)
        wanted_a, wanted_b = ((rows if by_columns else columns), rank), (rank, columns if by_columns else rows)
    else:
        inner, outer = (rows, columns) if by_columns else (columns, rows)
        convolution = len(target.shape) > 2
        wanted_a = (rank, *target.shape[1:]) if convolution else (rank, inner)
        wanted_b = (outer, rank, *(1 for _ in target.shape[2:])) if convolution else (outer, rank)
    if len(target.shape) < 2:
        raise unfit(a, "a base of two axes or more")
    if shapes[a] != wanted_a:
        raise unfit(a, str(list(wanted_a)))
    if shapes[b] != wanted_b:
        raise unfit(b, str(list(wanted_b)))
    if MAGNITUDE in parts:
        wanted = columns if by_columns else rows
        if math.prod(shapes[MAGNITUDE]) != wanted:
            raise unfit(MAGNITUDE, f"{wanted} norms")
    scaling = adapter.settings.scaling(module, rank, parts[a]) * adapter.weight
    return Change(adapter, parts, scaling, by_columns)


# ---- the values ----


def _merged(target: Target, changes: Sequence[Change]) -> Iterator[tuple[int, Array]]:
    """The tiles of a merged tensor as [rows, columns], each with its first row; the memory is used again."""
    first = max((k for k, one in enumerate(changes) if VALUE in one.parts), default=-1)
    if first >= 0:  # what came before is replaced
        one = changes[first]
        lazy = one.adapter.checkpoint.get_slice(one.parts[VALUE], dtype=target.work.name)
        target = target._replace(read=lazy.__getitem__, together=False)
    steps: list[_Factors] = []
    for change in changes[first + 1 :]:
        step = _factors(change, target)
        if step.magnitude is not None and step.by_columns:
            squares = np.zeros(step.right.shape[1])
            for _, tile in _tiles(target, [*steps, step._replace(magnitude=None)]):
                squares += np.einsum("ij,ij->j", tile, tile, dtype=np.float64)
            step = step._replace(norms=np.sqrt(squares))
        steps.append(step)
    yield from _tiles(target, steps)


def _tiles(target: Target, steps: Sequence[_Factors]) -> Iterator[tuple[int, Array]]:
    rows, columns = _flat(target.shape)
    height = rows if target.together else max(1, _TILE // max(1, columns))
    if _BLOCK < height < rows:
        height -= height % _BLOCK
    for begin in range(0, rows, height) if rows and columns else ():
        end = min(rows, begin + height)
        read = target.read(slice(begin, end) if target.shape else ...)  # type: ignore[arg-type]
        tile = read.reshape(end - begin, columns)
        with np.errstate(all="ignore"):
            for step in steps:
                _apply(step, tile, begin, end)
        yield begin, tile


def _apply(step: _Factors, tile: Array, begin: int, end: int) -> None:
    """Changes the rows [begin, end) of a tensor in place, in parts that bound the memory of the product."""
    height = max(1, _TILE // max(1, tile.shape[1]))
    for first in range(begin, end, height):
        last = min(end, first + height)
        part = tile[first - begin : last - begin]
        change = step.left[first:last] @ step.right
        change *= step.scaling
        part += change
        if step.magnitude is None:
            continue
        if step.norms is not None:
            part *= (step.magnitude / step.norms).astype(part.dtype)
        else:
            norms = np.sqrt(np.einsum("ij,ij->i", part, part, dtype=np.float64))
            part *= (step.magnitude[first:last] / norms).astype(part.dtype)[:, None]


def _factors(change: Change, target: Target) -> _Factors:
    """Reads the tensors of a change."""
    parts, mlx = change.parts, change.adapter.settings.mlx
    wanted = [name for part, name in parts.items() if part != A or BIAS not in parts]
    read = change.adapter.checkpoint.load(wanted, dtype=target.work.name, backend="pread")
    if BIAS in parts:
        return _Factors(read[parts[BIAS]].reshape(-1, 1), np.ones((1, 1), target.work), change.scaling)
    a, b = (read[parts[part]] for part in ((EMBEDDING_A, EMBEDDING_B) if EMBEDDING_A in parts else (A, B)))
    if mlx:
        a, b = a.T, b.T
    a, b = a.reshape(_flat(a.shape)), b.reshape(_flat(b.shape))
    left, right = (a.T, b.T) if change.by_columns else (b, a)
    magnitude = read[parts[MAGNITUDE]].reshape(-1).astype(np.float64) if MAGNITUDE in parts else None
    return _Factors(
        np.ascontiguousarray(left), np.ascontiguousarray(right), change.scaling, magnitude, change.by_columns
    )
