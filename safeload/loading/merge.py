"""Merge adapters into base tensors, tile by tile: W + s * (B @ A) in float32, rounded once.

The C core merges as it reads the base (`lib.SL_OP_MERGE`). NumPy merges into float64, and DoRA, which needs norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base import dtypes, log
from ..base.arrays import Array
from ..base.messages import error_about
from ..base.native import lib
from ..base.selecting import Patterns
from ..base.table import similar
from ..base.text import show
from ..checkpoint import Checkpoint, chosen, with_aliases
from ..engine.read.delivery import check_fits, refuse_own_files
from ..engine.read.load import check_backend, check_out_names, parse_target
from ..engine.run.cast import astype, target_array
from ..engine.run.job import Job, Origin, Update, Updates, panels_of
from ..engine.run.jobs import Batch, native_order
from ..engine.run.memory import address_of, check_disjoint
from ..engine.run.progress import Progress, reporter
from ..engine.run.threads import check_threads
from ..errors import FormatError, SafeloadError, TensorNotFoundError, UnsupportedError
from .adapter import BIAS, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, VALUE, A, Adapter, B, listed, opened
from .adapter_base import AdapterTarget, Base, CheckpointBase, plain_source
from .adapter_fit import Fit, Heads, fitted, heads_of, tensor_of

# Elements of a tile. The tile's height depends on the tensor's shape alone, which makes sums reproducible.
_TILE = 1 << 22
# Rows of a tall tile are a multiple of this, because blocks of scales have at most this many rows.
_BLOCK = 128
# Elements of a product B A. Its buffer is reused and should stay in the cache.
_PRODUCT = 1 << 20
# Limit on problems with a list of similar names: comparing thousands of names takes milliseconds.
_MAX_COMPARED = 3
# Name endings of the weights a head may be tied to.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_NO_HEADS = Heads({}, {})
# Stacks whose factors stay in memory if experts are stored separately: enough for a layer or two.
_CACHED_STACKS = 4
_F32 = dtypes.BY_CODE["F32"]

# ---- changes of a tensor ----


class Change(NamedTuple):
    """An adapter's change of a base tensor, with fitting shapes."""

    adapter: Adapter
    parts: Mapping[str, str]  # role -> tensor name
    scaling: float  # factor of the product, including the adapter's weight
    by_columns: bool = False  # rows of the tensor are columns of A
    stacked: bool = False  # the tensor is a stack of matrices (experts), each with its own factors
    matrices: int = 1  # number of matrices in the stack
    part: tuple[int, slice] | None = None  # matrix number and rows, if the tensor holds part of a stack


class _Match(NamedTuple):
    """Adapter tensors and the base tensor they change; shapes are not checked yet."""

    adapter: Adapter
    parts: Mapping[str, str]
    target: AdapterTarget
    base: str  # path of the base, for messages

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of an adapter tensor."""
        return self.adapter.shape(self.parts[part])

    def misfit(self, part: str, requirement: str) -> FormatError:
        """Return the error for an adapter tensor of the wrong shape."""
        target = self.target
        text = (
            f"of the adapter is {list(self.shape(part))}, but {show(target.name)} of {self.base} is "
            f"{list(target.shape)}: it needs {requirement}"
        )
        return error_about(FormatError, text, path=self.adapter.checkpoint.path, tensor=self.parts[part])


def change_of(
    adapter: Adapter, module: str, parts: Mapping[str, str], *, target: AdapterTarget, base: str, fit: Fit
) -> Change:
    """Return the change of a base tensor by a module of an adapter."""
    match = _Match(adapter, parts, target, base)
    for name in parts.values():
        info = adapter.checkpoint.tensors[name]
        if not dtypes.parse(info.dtype).floating:
            text = f"of the adapter is {info.dtype}: it must be floating"
            raise error_about(UnsupportedError, text, path=adapter.checkpoint.path, tensor=name)
    if VALUE in parts:
        return _replacement(match)
    if module in fit.parameters and not adapter.settings.mlx:
        return _parameter_change(match, module in fit.transposed)
    if BIAS in parts:
        return _bias_change(match, module)
    return _weight_change(match, module, module in fit.transposed)


def _replacement(match: _Match) -> Change:
    adapter, target, name = match.adapter, match.target, match.parts[VALUE]
    if match.shape(VALUE) != target.shape:
        raise match.misfit(VALUE, "an equal shape, because it replaces the base tensor")
    if adapter.weight != 1:
        text = (
            f"of the adapter replaces {show(target.name)}: the weight of its adapter must be 1, not {adapter.weight:g}"
        )
        raise error_about(UnsupportedError, text, path=adapter.checkpoint.path, tensor=name)
    return Change(adapter, match.parts, 1.0)


def _bias_change(match: _Match, module: str) -> Change:
    if match.shape(BIAS) != match.target.shape:
        raise match.misfit(BIAS, "an equal shape, because it is added to the base tensor")
    return Change(match.adapter, match.parts, _scaling(match, A, module, match.shape(A)[:1]))


def _weight_change(match: _Match, module: str, transposed: bool) -> Change:
    """Return the change of a linear layer, a convolution or an embedding."""
    target, parts = match.target, match.parts
    rows, columns = target.shape[0] if target.shape else 1, math.prod(target.shape[1:])
    mlx, embedding = match.adapter.settings.mlx, EMBEDDING_A in parts
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    a, b = (EMBEDDING_A, EMBEDDING_B) if embedding else (A, B)
    _check_axes(match, a, b)
    if mlx and len(target.shape) == 3:
        return _stack_change(match, module)
    rank = match.shape(a)[1 if mlx else 0]
    by_columns = embedding or (transposed and len(target.shape) == 2)
    if mlx:  # [in, r] and [r, out]; for an embedding [vocabulary, r] and [r, dim]
        linear = match.shape(a) == (columns, rank) and not target.name.endswith(_EMBEDDINGS)
        by_columns = match.shape(a) == (rows, rank) and not linear
        shape_a, shape_b = ((rows if by_columns else columns), rank), (rank, columns if by_columns else rows)
    else:
        inner, outer = (rows, columns) if by_columns else (columns, rows)
        convolution = len(target.shape) > 2
        shape_a = (rank, *target.shape[1:]) if convolution else (rank, inner)
        shape_b = (outer, rank, *(1 for _ in target.shape[2:])) if convolution else (outer, rank)
    if len(target.shape) < 2:
        raise match.misfit(a, "a base of two axes or more")
    _check_shapes(match, {a: shape_a, b: shape_b})
    if MAGNITUDE in parts:
        count = columns if by_columns and not mlx else rows
        if math.prod(match.shape(MAGNITUDE)) != count:
            raise match.misfit(MAGNITUDE, f"{count} norms")
    return Change(match.adapter, parts, _scaling(match, a, module, (rank,)), by_columns)


def _stack_change(match: _Match, module: str) -> Change:
    """Return the change of MLX's stack of experts, by [experts, r, in] and [experts, out, r]."""
    (count, rows, columns), rank = match.target.shape, match.shape(A)[1]
    if MAGNITUDE in match.parts:
        text = f"of the adapter changes the stack {show(match.target.name)}, for which MLX has no DoRA"
        path = match.adapter.checkpoint.path
        raise error_about(UnsupportedError, text, path=path, tensor=match.parts[MAGNITUDE])
    _check_shapes(match, {A: (count, rank, columns), B: (count, rows, rank)})
    scaling = _scaling(match, A, module, (rank,))
    return Change(match.adapter, match.parts, scaling, stacked=True, matrices=count)


def _parameter_change(match: _Match, transposed: bool) -> Change:
    """Return the change of a matrix or stack of matrices named by ``target_parameters``."""
    target, name = match.target, match.parts[A]
    if match.adapter.settings.dora or BIAS in match.parts:
        text = (
            f"of the adapter changes the parameter {show(target.name)}, for which PEFT has neither DoRA nor lora_bias"
        )
        raise error_about(UnsupportedError, text, path=match.adapter.checkpoint.path, tensor=name)
    _check_axes(match, A, B)
    if len(target.shape) not in (2, 3):
        raise match.misfit(A, "a base of two or three axes")
    count = target.shape[0] if len(target.shape) == 3 else 1
    all_ranks = match.shape(A)[0]
    if count == 0 or all_ranks % count:
        raise match.misfit(A, f"a multiple of {count} rows, equally many for each matrix")
    rows, columns = target.shape[-2:]
    inner, outer = (rows, columns) if transposed else (columns, rows)
    _check_shapes(match, {A: (all_ranks, inner), B: (outer, all_ranks)})
    scaling = _scaling(match, A, target.name, (all_ranks // count,))
    return Change(match.adapter, match.parts, scaling, transposed, len(target.shape) == 3, count)


def _check_axes(match: _Match, *parts: str) -> None:
    for part in parts:
        if len(match.shape(part)) < 2:
            raise match.misfit(part, "two axes")


def _check_shapes(match: _Match, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for part, shape in shapes.items():
        if match.shape(part) != shape:
            raise match.misfit(part, str(list(shape)))


def _scaling(match: _Match, part: str, module: str, rank: tuple[int, ...]) -> float:
    """Return the factor of a change; ``rank`` is empty if A has no axes."""
    return match.adapter.settings.scaling(module, sum(rank), match.parts[part]) * match.adapter.weight


# ---- changes of a base ----


class Merge:
    """Adapters fitted to a base.

    ``among`` limits it to these base tensors; otherwise each module of an adapter needs one. Without ``problems`` the
    first misfit is raised.
    """

    changes: dict[str, list[Change]]  # by base tensor, in order; untied heads are included even if unchanged
    fits: Sequence[Fit]  # per adapter
    heads: Heads

    def __init__(
        self,
        base: Base,
        adapters: Sequence[Adapter],
        *,
        among: Container[str] | None = None,
        fits: Sequence[Fit] | None = None,
        problems: list[SafeloadError] | None = None,
        heads: Heads = _NO_HEADS,
    ) -> None:
        self._base = base
        self._problems = [] if problems is None else problems
        self.changes = {head: [] for head in heads.untied if among is None or head in among}
        self._stack_factors: _StackFactors = lru_cache(_CACHED_STACKS)(_stack_factors)
        self.heads = heads
        self.fits = [fitted(adapter, base, heads) for adapter in adapters] if fits is None else fits
        for adapter, fit in zip(adapters, self.fits, strict=True):
            mirrored = {name: {VALUE: value} for name, value in fit.mirrored.items()}
            for module, parts in (*adapter.modules.items(), *mirrored.items()):
                with _collected(problems):
                    self._fit(adapter, module, parts, among, fit)

    def __contains__(self, name: object) -> bool:
        return name in self.changes

    def _fit(
        self, adapter: Adapter, module: str, parts: Mapping[str, str], among: Container[str] | None, fit: Fit
    ) -> None:
        """Add the changes of a module."""
        if module in fit.unclear and VALUE not in parts:
            raise UnsupportedError(fit.unclear[module], path=adapter.checkpoint.path, tensor=next(iter(parts.values())))
        if VALUE in parts:
            targets = {module: {VALUE: parts[VALUE]}}
        elif fit.parameters.get(module) in fit.apart:
            self._fit_apart(adapter, module, parts, among, fit)
            return
        elif module in fit.parameters:
            targets = {fit.parameters[module]: dict(parts)}
        else:
            bias = {role: parts[role] for role in (BIAS,) if role in parts}
            targets = {tensor_of(module, {}): {role: name for role, name in parts.items() if role not in bias}}
            if bias:
                targets[f"{module}.bias"] = {**bias, A: parts[A]}
        for model_name, roles in targets.items():
            name = fit.renamed.get(model_name, model_name)
            if among is not None and name not in among:
                continue
            if name not in self._base and name in fit.redundant:
                continue
            if name not in self._base:
                raise self._missing(adapter, name, next(iter(roles.values())))
            target = self._base.target(name)._replace(name=model_name)  # patterns match the names of the model
            self._add(name, change_of(adapter, module, roles, target=target, base=self._base.title, fit=fit))

    def _add(self, name: str, change: Change) -> None:
        changes = self.changes.setdefault(name, [])
        if VALUE in change.parts:  # PEFT can write a value after the factors of its module
            factors = (k for k, earlier in enumerate(changes) if earlier.adapter is change.adapter)
            changes.insert(next(factors, len(changes)), change)
            return
        if any(VALUE not in earlier.parts and earlier.stacked != change.stacked for earlier in changes):
            raise UnsupportedError(
                f"{show(name)} is a stack of matrices for one change and not for another", tensor=name
            )
        changes.append(change)

    def _fit_apart(
        self, adapter: Adapter, module: str, parts: Mapping[str, str], among: Container[str] | None, fit: Fit
    ) -> None:
        """Like `_fit`, for a stacked adapter weight with separate experts in the base."""
        stack = fit.parameters[module]
        apart = fit.apart[stack]
        change: Change | None = None
        for name, expert, begin in apart.tensors():
            if among is not None and name not in among:
                continue
            target = self._base.target(name)
            if target.shape != (apart.rows, apart.columns):  # a plan can say anything
                text = f"is {list(target.shape)}, but the stack {show(stack)} needs {[apart.rows, apart.columns]}"
                raise error_about(FormatError, text, path=self._base.title, tensor=name)
            if change is None:
                whole = target._replace(name=stack, shape=apart.shape)
                change = change_of(adapter, module, parts, target=whole, base=self._base.title, fit=fit)
                change = change._replace(stacked=False)
            part = (expert, slice(begin, begin + apart.rows))
            self.changes.setdefault(name, []).append(change._replace(part=part))

    def _missing(self, adapter: Adapter, name: str, tensor: str) -> TensorNotFoundError:
        text = f"of the adapter belongs to {show(name)}, which {self._base.title} does not have"
        near = similar(name, list(self._base)) if len(self._problems) < _MAX_COMPARED else []
        first_expert = f"{name.rpartition('.')[0]}.0."
        if name == "lm_head.weight" and any(stored.endswith(_EMBEDDINGS) for stored in self._base):
            text += ": it has no head, and its config does not tie one to the embedding"
        elif adapter.settings.parameters and any(stored.startswith(first_expert) for stored in self._base):
            text += ": its experts are stored one by one, under names that are not known to make that stack"
        elif name.endswith(".bias"):
            text += ": the layer has no bias in the base"
        elif near:
            text += f"; similar names: {', '.join(near)}"
        return error_about(TensorNotFoundError, text, path=adapter.checkpoint.path, tensor=tensor)

    def target_row(self, name: str, dtype: Any) -> dtypes.Dtype:
        """Return the dtype of a merged tensor: ``dtype``, or the tensor's own."""
        row = parse_target(dtype) or self._base.target(name).row
        if row is None:
            text = (
                'is packed, and an adapter changes it: pass dtype=, such as dtype="bfloat16", to merge its true values'
            )
            raise error_about(UnsupportedError, text, path=self._base.title, tensor=name)
        return row

    def values(self, name: str, row: dtypes.Dtype, out: Array | None = None, threads: int | None = None) -> Array:
        """Return a merged tensor."""
        target, changes = self._base.target(name), self.changes[name]
        result = target_array(target.shape, dtypes.array_dtype(row.number), out)
        last = max((k for k, change in enumerate(changes) if VALUE in change.parts), default=-1)
        if last >= 0:  # the replacement discards earlier changes
            target, changes = _replaced(target, changes[last]), changes[last + 1 :]
        stacked = any(change.stacked for change in changes)
        flat = result.reshape(_flat(target.shape, 2 if stacked else 1))
        for first, matrix, steps in (_matrices if stacked else _matrix)(target, changes, self._stack_factors):
            part = flat[first : first + _flat(matrix.shape)[0]]
            if _in_core(matrix, steps, row):
                _merge_in_core(matrix, steps, part, row, threads)
                continue
            for begin, tile in _changed_tiles(matrix, steps):
                astype(tile, result.dtype, out=part[begin : begin + len(tile)], threads=threads)
        return result


@contextmanager
def _collected(problems: list[SafeloadError] | None) -> Iterator[None]:
    try:
        yield
    except SafeloadError as error:
        if problems is None:
            raise
        problems.append(error)


# ---- values ----


class _Factors(NamedTuple):
    """A change with its tensors in memory: rows a to b get scaling * (left[a:b] @ right)."""

    left: Array  # [rows, r]
    right: Array  # [r, columns]
    scaling: float
    magnitude: Array | None = None  # new norms of the rows, or columns
    by_columns: bool = False  # the magnitude belongs to columns
    norms: Array | None = None  # current norms of the columns, if the magnitude belongs to columns


class _Stack(NamedTuple):
    """The key under which `Merge` caches the factors of a stack of matrices."""

    adapter: Adapter
    a: str
    b: str
    matrices: int
    by_columns: bool


_StackFactors: TypeAlias = Callable[[_Stack, str], tuple[Array, Array]]


def _flat(shape: tuple[int, ...], axes: int = 1) -> tuple[int, int]:
    """Return a shape as a matrix, with the first axes joined into rows."""
    return math.prod(shape[:axes]), math.prod(shape[axes:])


def _replaced(target: AdapterTarget, change: Change) -> AdapterTarget:
    """Return the target with the adapter's values in place of its own."""
    checkpoint, name = change.adapter.checkpoint, change.parts[VALUE]
    lazy = checkpoint.get_slice(name, dtype=target.work.name)
    return target._replace(read=lazy.__getitem__, together=False, source=plain_source(checkpoint, name, target.work))


def _matrix(
    target: AdapterTarget, changes: Sequence[Change], stack_factors: _StackFactors
) -> Iterator[tuple[int, AdapterTarget, list[_Factors]]]:
    """Yield a tensor as a matrix with its changes; see `_matrices`."""
    steps: list[_Factors] = []
    for change in changes:
        step = _factors(change, target) if change.part is None else _expert_factors(change, target, stack_factors)
        if step.magnitude is not None and step.by_columns:
            squares = np.zeros(step.right.shape[1])
            for _, tile in _changed_tiles(target, [*steps, step._replace(magnitude=None)]):
                squares += np.einsum("ij,ij->j", tile, tile, dtype=np.float64)
            step = step._replace(norms=np.sqrt(squares))
        steps.append(step)
    yield 0, target, steps


def _matrices(
    target: AdapterTarget, changes: Sequence[Change], stack_factors: _StackFactors
) -> Iterator[tuple[int, AdapterTarget, list[_Factors]]]:
    """Yield the matrices of a stack with their first rows in the flattened stack, and their changes."""
    count, rows, columns = target.shape
    factors = [(*stack_factors(_stack_of(change), target.work.name), change.scaling) for change in changes]
    source = target.source
    whole = target.read(slice(0, count)) if target.together and source is None else None
    for k in range(count):
        matrix = target._replace(shape=(rows, columns), together=target.row is None)
        if source is not None:
            offset = source.offset + k * source.row.nbytes(rows * columns)
            matrix = matrix._replace(source=source._replace(shape=(rows, columns), offset=offset))
        if whole is not None:
            matrix = matrix._replace(read=whole[k].__getitem__)
        elif target.row is None:  # its rows cannot be dequantized alone
            matrix = matrix._replace(read=partial(_matrix_rows, target, k))
        else:
            matrix = matrix._replace(read=partial(_rows, target, k))
        yield k * rows, matrix, [_Factors(left[k], right[k], scaling) for left, right, scaling in factors]


def _matrix_rows(target: AdapterTarget, k: int, rows: slice) -> Array:
    values: Array = target.read(slice(k, k + 1))[0][rows]
    return values


def _rows(target: AdapterTarget, k: int, rows: slice) -> Array:
    return target.read((k, rows))


def _tiles(target: AdapterTarget) -> Iterator[tuple[int, Array]]:
    """Yield the tiles [rows, columns] of a tensor with their first rows."""
    rows, columns = _flat(target.shape)
    height = rows if target.together else max(1, _TILE // max(1, columns))
    if _BLOCK < height < rows:
        height -= height % _BLOCK
    for begin in range(0, rows, height) if rows and columns else ():
        end = min(rows, begin + height)
        values = target.read(slice(begin, end) if target.shape else ...)
        yield begin, values.reshape(end - begin, columns)


def _changed_tiles(target: AdapterTarget, steps: Sequence[_Factors]) -> Iterator[tuple[int, Array]]:
    """Like `_tiles`, with changes added by NumPy."""
    rows, columns = _flat(target.shape)
    product = np.empty((min(rows, max(1, _PRODUCT // max(1, columns))), columns), target.work)
    for begin, tile in _tiles(target):
        with np.errstate(all="ignore"):
            for step in steps:
                _apply(step, tile, begin, product)
        yield begin, tile


def _in_core(target: AdapterTarget, steps: Sequence[_Factors], row: dtypes.Dtype) -> bool:
    """Return True if the C core computes these changes."""
    narrows = row.floating and not row.packed and (row is _F32 or _F32.converts_to(row))
    return narrows and target.work == np.float32 and all(step.magnitude is None for step in steps)


def _merge_in_core(
    target: AdapterTarget, steps: Sequence[_Factors], out: Array, row: dtypes.Dtype, threads: int | None
) -> None:
    """Fill rows of the result with a matrix and its changes."""
    columns = out.shape[1]
    if not out.size:
        return
    assert all(len(step.left) == len(out) and step.right.shape[1] == columns for step in steps)
    with np.errstate(over="ignore"):  # a scaling beyond float32 gives infinity
        scalings = [float(np.float32(step.scaling)) for step in steps]
    updates = [
        Update(step.left, panels_of(step.right), scaling)
        for step, scaling in zip(steps, scalings, strict=True)
        if step.left.shape[1]  # MLX's rank can be 0
    ]
    origin = Origin(target.name, target.shape)

    def job(part: Array) -> Job:
        return Job(None, 0, address_of(part), 0, _F32.number, row.number, lib.SL_OP_MERGE, origin=origin)

    if target.source is not None:
        source, merge = target.source, Updates(columns, updates)
        file, size = source.file, source.size
        whole = job(out)._replace(file=file, offset=source.offset, size=size, source=source.row.number, merge=merge)
        _run(whole, out, threads)
        return
    for begin, values in _tiles(target):
        part, tile = out[begin : begin + len(values)], native_order(np.ascontiguousarray(values))
        merge = Updates(columns, [update._replace(left=update.left[begin:]) for update in updates])
        _run(job(part)._replace(offset=address_of(tile), size=tile.nbytes, merge=merge), part, threads)


def _run(job: Job, out: Array, threads: int | None) -> None:
    batch = Batch([job])
    batch.results([out])
    batch.run(threads=threads)


def _apply(step: _Factors, tile: Array, begin: int, product: Array) -> None:
    """Change a tile in place. The rows of ``product`` limit how many rows change at a time."""
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
    """Read the tensors of a change."""
    parts, mlx = change.parts, change.adapter.settings.mlx
    names = [name for part, name in parts.items() if part != A or BIAS not in parts]
    arrays = change.adapter.checkpoint.load(names, dtype=target.work.name, backend="pread")
    if BIAS in parts:
        return _Factors(arrays[parts[BIAS]].reshape(-1, 1), np.ones((1, 1), target.work), change.scaling)
    a, b = (arrays[parts[part]] for part in ((EMBEDDING_A, EMBEDDING_B) if EMBEDDING_A in parts else (A, B)))
    if mlx:
        a, b = a.T, b.T
    a, b = a.reshape(_flat(a.shape)), b.reshape(_flat(b.shape))
    left, right = (a.T, b.T) if change.by_columns else (b, a)
    magnitude = arrays[parts[MAGNITUDE]].reshape(-1).astype(np.float64) if MAGNITUDE in parts else None
    by_columns = change.by_columns and not mlx  # MLX has a norm for each row of an embedding
    return _Factors(np.ascontiguousarray(left), np.ascontiguousarray(right), change.scaling, magnitude, by_columns)


def _expert_factors(change: Change, target: AdapterTarget, stack_factors: _StackFactors) -> _Factors:
    """Return the factors of a base tensor that holds part of a stacked adapter weight."""
    assert change.part is not None
    matrix, rows = change.part
    left, right = stack_factors(_stack_of(change), target.work.name)
    return _Factors(left[matrix, rows], right[matrix], change.scaling)


def _stack_of(change: Change) -> _Stack:
    return _Stack(change.adapter, change.parts[A], change.parts[B], change.matrices, change.by_columns)


def _stack_factors(stack: _Stack, dtype: str) -> tuple[Array, Array]:
    """Return the factors of a stack, [matrices, rows, r] and [matrices, r, columns].

    PEFT stores the rows of A matrix by matrix, and the columns of B rank by rank; MLX stores stacks.
    """
    count = stack.matrices
    arrays = stack.adapter.checkpoint.load([stack.a, stack.b], dtype=dtype, backend="pread")
    a, b = arrays[stack.a], arrays[stack.b]
    if not stack.adapter.settings.mlx:
        rank = len(a) // count
        a, b = a.reshape(count, rank, a.shape[1]), b.reshape(len(b), rank, count).transpose(2, 0, 1)
    left, right = (a.transpose(0, 2, 1), b.transpose(0, 2, 1)) if stack.by_columns else (b, a)
    return np.ascontiguousarray(left), np.ascontiguousarray(right)


# ---- loading ----


@contextmanager
def merging(
    checkpoint: Checkpoint, adapters: Any, storage_options: Mapping[str, Any] | None = None
) -> Iterator[tuple[Checkpoint, Merge | None]]:
    """Open adapters, and fit these to a base."""
    weighted = listed(adapters)
    if not weighted:
        yield checkpoint, None
        return
    with ExitStack() as stack:
        base, merge = fit(checkpoint, opened(stack, weighted, storage_options))
        warn_of_untied(merge.heads, checkpoint.config)
        yield base, merge


def fit(
    checkpoint: Checkpoint, adapters: Sequence[Adapter], problems: list[SafeloadError] | None = None
) -> tuple[Checkpoint, Merge]:
    """Fit open adapters to a base; see `merging`, and `Merge` for the list of problems."""
    heads = heads_of(adapters, checkpoint.config, checkpoint)
    absent = {head: embedding for head, embedding in heads.untied.items() if head not in checkpoint}
    base = with_aliases(checkpoint, absent) if absent else checkpoint
    return base, Merge(CheckpointBase(base), adapters, problems=problems, heads=heads)


def warn_of_untied(heads: Heads, config: Mapping[str, Any] | None) -> None:
    """Warn if the merged tensors need a config other than the base's."""
    for head, embedding in heads.untied.items():
        place = "config" if config is None else "config.json"
        log.warning(
            "the adapter gives %s and %s different values: load them into a model whose %s has "
            '"tie_word_embeddings": false',
            show(head),
            show(embedding),
            place,
        )


def load_with_adapters(
    checkpoint: Checkpoint, adapters: Any, storage_options: Mapping[str, Any] | None, **options: Any
) -> dict[str, Any]:
    """Like `Checkpoint.load`, with the adapters in ``adapters=`` merged."""
    with merging(checkpoint, adapters, storage_options) as (base, merge):
        return base.load(**options) if merge is None else load_merged(base, merge, **options)


def load_merged(
    checkpoint: Checkpoint,
    merge: Merge,
    names: Iterable[str] | None = None,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    dtype: Any = None,
    backend: Any = "mmap",
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Like `Checkpoint.load`, with adapters merged."""
    check_backend(backend)
    check_threads(threads)
    all_names = [part[0] for part in chosen(checkpoint, names, only, drop, dtype)]
    rows = {name: merge.target_row(name, dtype) for name in all_names if name in merge}
    shapes = {name: tuple(checkpoint.tensors[name].shape) for name in rows}
    merged: dict[str, Array] = {}
    plain_out = None
    if out is not None:
        check_out_names(out, all_names, "load")
        refuse_own_files(out, checkpoint.weight_files)
        for name, row in rows.items():
            check_fits(name, dtypes.array_dtype(row.number), shapes[name], out)
            merged[name] = out[name]
        check_disjoint(
            {name: array for name, array in out.items() if isinstance(array, np.ndarray) and array.flags.c_contiguous}
        )
        plain_out = {name: array for name, array in out.items() if name not in rows}
    plain = [name for name in all_names if name not in rows]
    sizes = [rows[name].nbytes(math.prod(shapes[name])) for name in rows]
    arrays = checkpoint.load(plain, dtype=dtype, backend=backend, out=plain_out, threads=threads)
    done = sum(array.nbytes for array in arrays.values())
    with reporter(progress, done + sum(sizes)) as report:
        report(done)
        for (name, row), size in zip(rows.items(), sizes, strict=True):
            merged[name] = merge.values(name, row, merged.get(name), threads)
            done += size
            report(done)
    return {name: merged[name] if name in merged else arrays[name] for name in all_names}
