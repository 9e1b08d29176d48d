"""Merges adapters into tensors of a base, tile by tile: W + s * (B @ A) in float32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.messages import error_about
from ..base.table import similar
from ..base.text import show
from ..engine.read.load import parse_target
from ..engine.run.cast import astype, target_array
from ..errors import SafeloadError, TensorNotFoundError, UnsupportedError
from .adapter import BIAS, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, VALUE, A, Adapter, B
from .adapter_base import AdapterTarget, Base
from .adapter_fit import Fit, fitted, tensor_of
from .adapter_heads import Heads
from .change import Change, change_of

# Elements of a tile. Its size follows from the shape of the tensor alone, so that its sums do too.
_TILE = 1 << 22
# Rows of a tile are a multiple of this where there are as many: blocks of scales have at most so many rows.
_BLOCK = 128


# Elements of a product B A: its memory is used again before it leaves the cache.
_PRODUCT = 1 << 20
# Most problems whose messages have similar names.
_MOST_COMPARED = 3


# Ends of the names of weights that a head may be tied to.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_NO_HEADS = Heads({}, {})
# Stacks of factors that are held for what is stored of their stack in several tensors: of a layer or two.
_HELD = 4
_Stacks: TypeAlias = Callable[..., tuple[Array, Array]]


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
        fits: how each adapter belongs to the base; None to find it, for which the base must be whole.
        problems: a list that gets the errors of modules that do not fit, which are then left out; None to raise the
            first.
        heads: the tied heads; the base has those of `Heads.untied` under names of their own.

    Attributes:
        changes: by name of the base's tensor, in order. A head that was tied is here even if no adapter changes it.
        fits: how each adapter belongs to the base.
        heads: the tied heads.

    Raises:
        TensorNotFoundError: the base lacks a module of an adapter.
        FormatError: shapes that do not fit.
        UnsupportedError: a tensor that cannot be merged.
    """

    def __init__(
        self,
        base: Base,
        adapters: Sequence[Adapter],
        among: Container[str] | None = None,
        fits: Sequence[Fit] | None = None,
        problems: list[SafeloadError] | None = None,
        heads: Heads = _NO_HEADS,
    ) -> None:
        self._base = base
        self._problems = [] if problems is None else problems
        self.changes: dict[str, list[Change]] = {}
        # Experts that are stored one by one share factors.
        self._stacks: _Stacks = lru_cache(_HELD)(_stacks)
        self.heads = heads
        self.changes.update({head: [] for head in heads.untied if among is None or head in among})
        self.fits = [fitted(one, base, heads) for one in adapters] if fits is None else fits
        for adapter, fit in zip(adapters, self.fits, strict=True):
            mirrored = {name: {VALUE: value} for name, value in fit.mirrored.items()}
            for module, parts in (*adapter.modules.items(), *mirrored.items()):
                with _gathered(problems):
                    self._fit(adapter, module, parts, among, fit)

    def __contains__(self, name: object) -> bool:
        return name in self.changes

    def _fit(
        self, adapter: Adapter, module: str, parts: Mapping[str, str], among: Container[str] | None, fit: Fit
    ) -> None:
        if module in fit.unclear and VALUE not in parts:
            raise UnsupportedError(fit.unclear[module], path=adapter.checkpoint.path, tensor=next(iter(parts.values())))
        if VALUE in parts:
            wanted = {module: {VALUE: parts[VALUE]}}
        elif fit.parameters.get(module) in fit.apart:
            self._fit_apart(adapter, module, parts, among, fit)
            return
        elif module in fit.parameters:
            wanted = {fit.parameters[module]: dict(parts)}
        else:
            bias = {key: parts[key] for key in (BIAS,) if key in parts}
            wanted = {tensor_of(module, {}): {key: name for key, name in parts.items() if key not in bias}}
            if bias:
                wanted[f"{module}.bias"] = {**bias, A: parts[A]}
        for called, some in wanted.items():
            name = fit.renamed.get(called, called)
            if among is not None and name not in among:
                continue
            if name not in self._base and name in fit.redundant:
                continue
            if name not in self._base:
                raise self._missing(adapter, name, next(iter(some.values())))
            target = self._base.target(name)._replace(name=called)  # patterns match the names of the model
            change = change_of(adapter, module, some, target, self._base.title, fit)
            several = self.changes.setdefault(name, [])
            if any(VALUE not in one.parts and one.stacked != change.stacked for one in several) and VALUE not in some:
                raise UnsupportedError(
                    f"{show(name)} is a stack of matrices for one change and not for another", tensor=name
                )
            if VALUE in some:  # PEFT may write it after the factors of the same module
                at = next((k for k, one in enumerate(several) if one.adapter is adapter), len(several))
                several.insert(at, change)
            else:
                several.append(change)

    def _fit_apart(
        self, adapter: Adapter, module: str, parts: Mapping[str, str], among: Container[str] | None, fit: Fit
    ) -> None:
        """The same of a stack whose matrices the base stores one by one, or in parts."""
        stack = fit.parameters[module]
        apart = fit.apart[stack]
        change: Change | None = None
        for name, expert, begin in apart.tensors():
            if among is not None and name not in among:
                continue
            target = self._base.target(name)
            if change is None:
                as_stack = target._replace(name=stack, shape=apart.shape)
                change = change_of(adapter, module, parts, as_stack, self._base.title, fit)._replace(stacked=False)
            part = (expert, slice(begin, begin + apart.rows))
            self.changes.setdefault(name, []).append(change._replace(part=part))

    def _missing(self, adapter: Adapter, name: str, tensor: str) -> TensorNotFoundError:
        message = f"of the adapter belongs to {show(name)}, which {self._base.title} does not have"
        # To compare with thousands of names takes milliseconds.
        near = similar(name, list(self._base)) if len(self._problems) < _MOST_COMPARED else []
        apart = f"{name.rpartition('.')[0]}.0."
        if name == "lm_head.weight" and any(one.endswith(_EMBEDDINGS) for one in self._base):
            message += ": it has no head, and its config does not tie one to the embedding"
        elif adapter.settings.parameters and any(one.startswith(apart) for one in self._base):
            message += ": its experts are stored one by one, under names that are not known to make that stack"
        elif name.endswith(".bias"):
            message += ": the layer has no bias in the base"
        elif near:
            message += f"; close to it: {', '.join(near)}"
        return error_about(TensorNotFoundError, message, path=adapter.checkpoint.path, tensor=tensor)

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
            raise error_about(
                UnsupportedError,
                'is packed, and an adapter changes it: pass dtype=, such as dtype="bfloat16", to merge its true values',
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
        target, changes = self._base.target(name), self.changes[name]
        result = target_array(target.shape, dtypes.array_dtype(row.number), out)
        last = max((k for k, one in enumerate(changes) if VALUE in one.parts), default=-1)
        if last >= 0:  # what came before is replaced
            target, changes = _replaced(target, changes[last]), changes[last + 1 :]
        stacked = any(one.stacked for one in changes)
        flat = result.reshape(_flat(target.shape, 2 if stacked else 1))
        for begin, tile in (_matrices if stacked else _merged)(target, changes, self._stacks):
            astype(tile, result.dtype, out=flat[begin : begin + len(tile)], threads=threads)
        return result


@contextmanager
def _gathered(problems: list[SafeloadError] | None) -> Iterator[None]:
    try:
        yield
    except SafeloadError as error:
        if problems is None:
            raise
        problems.append(error)


def _flat(shape: tuple[int, ...], axes: int = 1) -> tuple[int, int]:
    """The shape as that of a matrix, whose rows are the indices of the first axes."""
    return math.prod(shape[:axes]), math.prod(shape[axes:])


# ---- the values ----


def _replaced(target: AdapterTarget, change: Change) -> AdapterTarget:
    """The tensor with the values that an adapter has for it."""
    lazy = change.adapter.checkpoint.get_slice(change.parts[VALUE], dtype=target.work.name)
    return target._replace(read=lazy.__getitem__, together=False)


def _merged(target: AdapterTarget, changes: Sequence[Change], stacks: _Stacks) -> Iterator[tuple[int, Array]]:
    """The tiles of a merged tensor as [rows, columns], each with its first row; the memory is used again."""
    steps: list[_Factors] = []
    for change in changes:
        step = _factors(change, target) if change.part is None else _part(change, target, stacks)
        if step.magnitude is not None and step.by_columns:
            squares = np.zeros(step.right.shape[1])
            for _, tile in _tiles(target, [*steps, step._replace(magnitude=None)]):
                squares += np.einsum("ij,ij->j", tile, tile, dtype=np.float64)
            step = step._replace(norms=np.sqrt(squares))
        steps.append(step)
    yield from _tiles(target, steps)


def _matrices(target: AdapterTarget, changes: Sequence[Change], stacks: _Stacks) -> Iterator[tuple[int, Array]]:
    """The tiles of a stack of merged matrices, of one after the other; see `_merged`."""
    count, rows, columns = target.shape
    factors = [(*stacks(*_stack_of(change), target.work.name), change.scaling) for change in changes]
    whole = target.read(slice(0, count)) if target.together else None
    for k in range(count):
        matrix = target._replace(shape=(rows, columns), together=target.row is None)
        if whole is not None:
            matrix = matrix._replace(read=whole[k].__getitem__)
        elif target.row is None:  # its rows cannot be dequantized alone
            matrix = matrix._replace(read=partial(_matrix, target, k))
        else:
            matrix = matrix._replace(read=partial(_rows, target, k))
        for begin, tile in _tiles(matrix, [_Factors(left[k], right[k], scaling) for left, right, scaling in factors]):
            yield k * rows + begin, tile


def _matrix(target: AdapterTarget, k: int, rows: slice) -> Array:
    values: Array = target.read(slice(k, k + 1))[0][rows]
    return values


def _rows(target: AdapterTarget, k: int, rows: slice) -> Array:
    return target.read((k, rows))


def _tiles(target: AdapterTarget, steps: Sequence[_Factors]) -> Iterator[tuple[int, Array]]:
    rows, columns = _flat(target.shape)
    height = rows if target.together else max(1, _TILE // max(1, columns))
    if _BLOCK < height < rows:
        height -= height % _BLOCK
    product = np.empty((min(rows, max(1, _PRODUCT // max(1, columns))), columns), target.work)
    for begin in range(0, rows, height) if rows and columns else ():
        end = min(rows, begin + height)
        read = target.read(slice(begin, end) if target.shape else ...)
        tile = read.reshape(end - begin, columns)
        with np.errstate(all="ignore"):
            for step in steps:
                _apply(step, tile, begin, product)
        yield begin, tile


def _apply(step: _Factors, tile: Array, begin: int, product: Array) -> None:
    """Changes a tile in place, in parts whose products fit the given memory.

    Args:
        step: the change.
        tile: rows of the tensor.
        begin: the first of them.
        product: memory of some rows.
    """
    for first in range(begin, begin + len(tile), len(product)):
        part = tile[first - begin : first - begin + len(product)]
        last = first + len(part)
        change = np.matmul(step.left[first:last], step.right, out=product[: len(part)])
        change *= step.scaling
        part += change
        if step.magnitude is None:
            continue
        if step.norms is not None:
            part *= (step.magnitude / step.norms).astype(part.dtype)
        else:
            norms = np.sqrt(np.einsum("ij,ij->i", part, part, dtype=np.float64))
            part *= (step.magnitude[first:last] / norms).astype(part.dtype)[:, None]


def _factors(change: Change, target: AdapterTarget) -> _Factors:
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


def _part(change: Change, target: AdapterTarget, stacks: _Stacks) -> _Factors:
    """The factors of a tensor that holds a part of a stack."""
    assert change.part is not None
    matrix, rows = change.part
    left, right = stacks(*_stack_of(change), target.work.name)
    return _Factors(left[matrix, rows], right[matrix], change.scaling)


def _stack_of(change: Change) -> tuple[Adapter, str, str, int, bool]:
    """What the factors of a stack depend on."""
    return change.adapter, change.parts[A], change.parts[B], change.matrices, change.by_columns


def _stacks(
    adapter: Adapter, name_a: str, name_b: str, count: int, by_columns: bool, dtype: str
) -> tuple[Array, Array]:
    """The factors of a stack of matrices, [count, rows, r] and [count, r, columns].

    PEFT has the rows of A matrix by matrix, and the columns of B rank by rank.
    """
    read = adapter.checkpoint.load([name_a, name_b], dtype=dtype, backend="pread")
    a, b = read[name_a], read[name_b]
    rank = len(a) // count
    a, b = a.reshape(count, rank, a.shape[1]), b.reshape(len(b), rank, count).transpose(2, 0, 1)
    left, right = (a.transpose(0, 2, 1), b.transpose(0, 2, 1)) if by_columns else (b, a)
    return np.ascontiguousarray(left), np.ascontiguousarray(right)
