"""Merge adapters into base tensors, tile by tile: W + s * (B @ A) in float32, rounded once.

The C core merges as it reads the base (`lib.SL_OP_MERGE`). NumPy merges into float64, DoRA, which needs norms, and the
kinds of adapters whose changes are no products of two factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..core import dtypes, registry
from ..core.arrays import Array, check_disjoint, check_fits, check_out_names, index_of
from ..core.cast import astype, target_array
from ..core.checkpoint import Checkpoint, chosen, refuse_codes, tensors_of, with_aliases
from ..core.files import Access
from ..core.jobs import Batch, Job, Origin, Update, Updates, native_order, panels_of
from ..core.load import access_of, freeze, load_tensors, parse_target, refuse_own_files
from ..core.names import Patterns
from ..core.native import address_of, lib
from ..core.progress import Progress, reporter
from ..core.restore import rows_apart
from ..core.source import Source, in_file
from ..core.text import error_about, show, similar, warning
from ..errors import FormatError, SafeloadError, TensorNotFoundError, UnsupportedError
from ..models.renamed import Divided
from . import kinds
from .adapter import CONFIG, Adapter, Fit, in_gguf, listed, opened
from .base import AdapterTarget, Apart, Base, Heads, fitted, heads_of, modules_by_tensor
from .diffusion import Assembled
from .kinds import Place, Step

# Elements of a tile. The tile's height depends on the tensor's shape alone, which makes sums reproducible.
_TILE = 1 << 22
# Rows of a tall tile are a multiple of this, because blocks of scales have at most this many rows.
_BLOCK = 128
# Elements of a product B A. Its buffer is reused and should stay in the cache.
_PRODUCT = 1 << 20
# Elements that other kinds of adapters change at a time, with buffers of as many.
_CHANGED = 1 << 17
# Limit on problems with a list of similar names: comparing thousands of names takes milliseconds.
_MAX_COMPARED = 3
# Name endings of the weights a head may be tied to.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
# Stacks whose factors stay in memory if experts are stored separately: enough for a layer or two.
_CACHED_STACKS = 4
_F32 = dtypes.BY_CODE["F32"]

# ---- bases ----


def target_of(checkpoint: Checkpoint, name: str) -> AdapterTarget:
    """Return a tensor of an open checkpoint as a target."""
    refuse_codes(checkpoint, [name], "adapters=")
    ((_, file, index),) = tensors_of(checkpoint, [name])
    packed, row = file.table.packed.get(index), file.table.row(index)
    shape = tuple(file.table.shape(index) if packed is None else packed.packing.shape)
    quantized = packed is not None or file.table.is_quantized(index)
    if not quantized:
        check_floating(name, row, checkpoint.path)
    work = np.dtype(np.float64 if row.code == "F64" and not quantized else np.float32)
    source = None if quantized else in_rows(in_file(checkpoint, name, file, index), work)
    if row.packed and not quantized:  # elements share bytes, so they are decoded together
        whole = partial(checkpoint.load, [name], dtype="float32", backend="pread")
        return AdapterTarget(name, shape, None, work, lambda rows: whole()[name][rows], True, source)
    together = packed is not None and len(shape) < 3 and not (len(shape) == 2 and rows_apart(packed.packing))
    read = checkpoint.get_slice(name, dtype=work.name).__getitem__
    return AdapterTarget(name, shape, None if quantized else row, work, read, together, source)


def in_rows(source: Source | None, work: np.dtype[Any]) -> Source | None:
    """Return a source if jobs can read its rows as float32, `work`; remote files are fetched tile by tile instead."""
    if source is None or source.packed is not None or (source.file is not None and source.file.remote):
        return None
    whole_rows = math.prod(source.shape[1:]) % source.row.block == 0
    return source if whole_rows and work == np.float32 and source.row.converts_to(_F32) else None


def check_floating(name: str, row: dtypes.Dtype, path: str | None) -> None:
    """Refuse integers."""
    if not row.floating:
        text = f"of the base is {row.code}, which no adapter can change; an integer base is quantized and needs its "
        raise error_about(UnsupportedError, f"{text}config.json", path=path, tensor=name)


# ---- changes of a base ----


class Change(NamedTuple):
    """An adapter's change of a base tensor, with fitting shapes."""

    adapter: Adapter
    parts: Mapping[str, str]  # role -> tensor name
    scaling: float = 1.0  # factor of the product, including the adapter's weight
    by_columns: bool = False  # rows of the tensor are columns of A
    stacked: bool = False  # the tensor is a stack of matrices (experts), each with its own factors
    matrices: int = 1  # number of matrices in the stack
    part: tuple[int, slice] | None = None  # matrix number and rows, if the tensor holds part of a stack
    divided: Divided | None = None  # the rows of the tensor to change, if not all
    step: Callable[[Mapping[str, Array]], Step] | None = None  # of the tensors of another kind than LoRA


@contextmanager
def collecting(problems: list[SafeloadError] | None) -> Iterator[None]:
    """Add an error to problems, or raise it if there is no list."""
    try:
        yield
    except SafeloadError as error:
        if problems is None:
            raise
        problems.append(error)


class Merge:
    """Adapters fitted to a base, or with ``fits`` to a part of it, which may lack tensors of their modules."""

    def __init__(
        self,
        base: Base,
        adapters: Sequence[Adapter],
        heads: Heads,
        *,
        fits: Sequence[Fit] | None = None,
        problems: list[SafeloadError] | None = None,  # gets all misfits; None raises the first
    ) -> None:
        self.base, self.adapters, self.heads = base, adapters, heads
        self._problems = [] if problems is None else problems
        self._cached_factors = lru_cache(_CACHED_STACKS)(_factors)
        # Changes by base tensor, in order; untied heads are included even if unchanged.
        self.changes: dict[str, list[Change]] = {head: [] for head in heads.untied}
        tied = [two for pair in heads.pairs.items() for two in (pair, pair[::-1])]
        modules = [self._with_tied(adapter, tied) for adapter in adapters]
        with collecting(problems):
            for adapter, own in zip(adapters, modules, strict=True):
                if not base.is_part:
                    adapter.leave_out(own, base.diffusion, base.title)
            base.grow(zip(adapters, modules, strict=True), heads)
        self.fits = [fitted(adapter, base) for adapter in adapters] if fits is None else fits
        for adapter, fit, own in zip(adapters, self.fits, modules, strict=True):
            for module, parts in own.items():
                with collecting(problems):
                    self._fit(adapter, fit, module, parts)

    def __contains__(self, name: object) -> bool:
        return name in self.changes

    def _with_tied(self, adapter: Adapter, tied: Iterable[tuple[str, str]]) -> dict[str, Mapping[str, str]]:
        """Return modules: a tensor or rows that replace one of two tied tensors replace both."""
        modules: dict[str, Mapping[str, str]] = {**adapter.modules}
        own = modules_by_tensor(adapter, self.base.find) if tied else {}
        for name, other in tied:
            for module in own.get(name, ()) if other not in own and other in self.base.names else ():
                if kinds.VALUE in modules[module] and not adapter.is_copy(module):
                    modules[other] = modules[module]
                elif kinds.TOKENS in modules[module]:
                    modules[other.removesuffix(".weight")] = {kinds.TOKENS: modules[module][kinds.TOKENS]}
        return modules

    def _fit(self, adapter: Adapter, fit: Fit, module: str, parts: Mapping[str, str]) -> None:
        """Add the changes of a module."""
        if module in fit.unclear and kinds.VALUE not in parts:
            raise UnsupportedError(fit.unclear[module], path=adapter.checkpoint.path, tensor=next(iter(parts.values())))
        base, targets = self.base, {fit.parameters.get(module, f"{module}.weight"): dict(parts)}
        if kinds.VALUE in parts:
            targets = {module: {kinds.VALUE: parts[kinds.VALUE]}}
        elif kinds.BIAS in parts and module not in fit.parameters:
            weight = {role: name for role, name in parts.items() if role != kinds.BIAS}
            bias = {kinds.BIAS: parts[kinds.BIAS], kinds.A: parts[kinds.A]}
            targets = {f"{module}.weight": weight, f"{module}.bias": bias}
        elif "ia3_l" in parts and not kinds.feeds_forward(adapter.shape(parts["ia3_l"]), module, adapter.settings):
            bias_name = f"{module}.bias"  # a part of the outputs
            if base.find(bias_name) is not None or bias_name in base.unmapped:
                targets[bias_name] = dict(parts)
        for model_name, roles in targets.items():  # patterns match the names of the model
            place = base.find(model_name)
            if kinds.VALUE in roles and model_name in base.turned:
                text = f"of the adapter replaces {show(model_name)}, which {base.title} stores transposed"
                raise error_about(UnsupportedError, text, path=adapter.checkpoint.path, tensor=roles[kinds.VALUE])
            alone = not isinstance(place, Apart) or (not place.experts and bool(kinds.changing(roles)))
            if isinstance(place, (Apart, Assembled)) and (alone or module in fit.parameters):
                change = None
                # The other tensors belong to another piece.
                for stored, shape, part, divided in (each for each in place.tensors() if each[0] in base.names):
                    target = base.target(stored)
                    if target.shape != shape:  # a plan can say anything
                        which = f"the stack {show(model_name)}" if isinstance(place, Apart) else show(model_name)
                        text = f"is {list(target.shape)}, but {which} needs {list(shape)}"
                        raise error_about(FormatError, text, path=base.title, tensor=stored)
                    if change is None:
                        whole = target._replace(name=model_name, shape=tuple(place.shape))
                        change = self._change(adapter, fit, module, roles, whole)
                    self._add(stored, change._replace(stacked=False, part=part, divided=divided))
            elif isinstance(place, Divided):
                if place.stored in base.names:
                    target = base.target(place.stored)
                    rows = [*target.shape, 0][0]
                    if not 0 <= place.number < place.parts or rows % place.parts:  # a plan can say anything
                        text = f"has {rows} rows, which are no {place.parts} parts"
                        raise error_about(FormatError, text, path=base.title, tensor=place.stored)
                    target = target._replace(name=model_name, shape=(rows // place.parts, *target.shape[1:]))
                    change = self._change(adapter, fit, module, roles, target)
                    self._add(place.stored, change._replace(divided=place))
            elif isinstance(place, str) and (place in base.names or place in base.grown):
                target = base.target(place)._replace(name=model_name)
                self._add(place, self._change(adapter, fit, module, roles, target))
            elif not base.is_part and not (place in self.heads.pairs and roles.keys() & {kinds.VALUE, kinds.TOKENS}):
                raise self._missing(adapter, model_name, next(iter(roles.values())))

    def _change(
        self, adapter: Adapter, fit: Fit, module: str, parts: Mapping[str, str], target: AdapterTarget
    ) -> Change:
        """Return the change of a base tensor by a module of an adapter; refuse shapes that do not fit."""
        shape, path = target.shape, adapter.checkpoint.path
        shapes = adapter.shapes(parts)

        def refused(part: str, text: str) -> UnsupportedError:
            return error_about(UnsupportedError, f"of the adapter {text}", path=path, tensor=parts[part])

        def need(fits: bool, part: str, requirement: str) -> None:
            if not fits:
                text = f"of the adapter is {list(shapes[part])}, but {show(target.name)} of {self.base.title} is "
                text += f"{list(shape)}: it needs {requirement}"
                raise error_about(FormatError, text, path=path, tensor=parts[part])

        for part, dtype in ((part, adapter.checkpoint.tensors[name].dtype) for part, name in parts.items()):
            if not dtypes.parse(dtype).floating:
                raise refused(part, f"is {dtype}: it must be floating")
        if kinds.VALUE in parts:
            need(shapes[kinds.VALUE] == shape, kinds.VALUE, "an equal shape, because it replaces the base tensor")
            if adapter.weight != 1:
                text = f"replaces {show(target.name)}: the weight of its adapter must be 1, not {adapter.weight:g}"
                raise refused(kinds.VALUE, text)
            return Change(adapter, parts)
        if kinds.TOKENS in parts:
            tokens = adapter.tokens[parts[kinds.TOKENS]]
            need(len(shape) == 2, kinds.TOKENS, "a base of two axes")
            need(
                shapes[kinds.TOKENS] == (len(tokens), shape[1]),
                kinds.TOKENS,
                f"{len(tokens)} rows, those of {CONFIG}",
            )
            if adapter.weight != 1 or max(tokens, default=0) >= shape[0]:
                text = f"replaces rows of {show(target.name)}: the weight of its adapter must be 1"
                if adapter.weight == 1:
                    text = f"has token {max(tokens)}, but {show(target.name)} of {self.base.title} has {shape[0]} rows"
                raise refused(kinds.TOKENS, text)
            return Change(adapter, parts)
        parameter = module in fit.parameters and adapter.joins_stacks
        if parameter and (adapter.dora or kinds.BIAS in parts):
            text = f"changes the parameter {show(target.name)}, for which PEFT has neither DoRA nor lora_bias"
            raise refused(kinds.A, text)
        if kinds.SCALE in parts:
            (rows, inner), scale = [*shape, 0, 0][:2], shapes[kinds.SCALE]
            by_rows = math.prod(scale) == rows == [*scale, 0][0]
            by_inner = math.prod(scale) == inner and scale[:1] == (1,)
            need(by_rows or by_inner, kinds.SCALE, f"norms of rows, [{rows}, 1], or of columns, [1, {inner}]")
        kind = kinds.kind_of(parts)
        if kind is not None and kind.needs is not None and kind.step is not None:
            role = min(kinds.changing(parts))
            need(len(shape) > 1 or target.name == f"{module}.bias", role, "a base of two axes or more")
            if not kind.scales and adapter.weight != 1:
                text = f"multiplies {show(target.name)}: the weight of its adapter must be 1, not {adapter.weight:g}"
                raise refused(role, text)
            place = Place(shape, module in fit.transposed and len(shape) == 2, adapter.settings, module)
            for part, expected in kind.needs(shapes, place).items():
                need(shapes[part] == expected, part, str(list(expected)))
            scaling = adapter.scaling(module, kinds.rank_of(shapes), parts[role])
            return Change(adapter, parts, scaling, place.by_columns, step=partial(kind.step, place, scaling))
        if kinds.BIAS in parts:
            need(shapes[kinds.BIAS] == shape, kinds.BIAS, "an equal shape, because it is added to the base tensor")
            return Change(adapter, parts, adapter.scaling(module, sum(shapes[kinds.A][:1]), parts[kinds.A]))
        a, b = (kinds.EMBEDDING_A, kinds.EMBEDDING_B) if kinds.EMBEDDING_A in parts else (kinds.A, kinds.B)
        for part in (a, b):
            need(len(shapes[part]) > 1, part, "two axes")
        need(not parameter or len(shape) in (2, 3), a, "a base of two or three axes")
        need(len(shape) > 1, a, "a base of two axes or more")
        turned = a == kinds.EMBEDDING_A or (module in fit.transposed and (parameter or len(shape) == 2))
        stacked, by_columns, *needed = adapter.expected(
            shape, shapes[a], parameter=parameter, turned=turned, embeds=target.name.endswith(_EMBEDDINGS)
        )
        count, (rows, columns) = (shape[0], shape[1:]) if stacked else (1, _flat(shape))
        total = adapter.rank(module)
        divides = not parameter or (count > 0 and total % count == 0)
        need(divides, kinds.A, f"a multiple of {count} rows, equally many for each matrix")
        if kinds.MAGNITUDE in parts and stacked:
            raise refused(kinds.MAGNITUDE, f"changes the stack {show(target.name)}, for which MLX has no DoRA")
        rank, ones = total // count if parameter else total, tuple(1 for _ in shape[2:])
        if kinds.CORE in parts:  # LyCORIS's Tucker decomposition
            needed = [(rank, shape[1], *ones), (shape[0], rank, *ones)]
        for part, expected in zip((a, b), needed, strict=True):
            need(shapes[part] == expected, part, str(list(expected)))
        if kinds.CORE in parts:
            core = (rank, rank, *shape[2:])
            need(len(shape) > 2 and shapes[kinds.CORE] == core, kinds.CORE, f"{list(core)}, and a convolution")
        if kinds.MAGNITUDE in parts:
            norms = columns if by_columns and adapter.norms_of_outputs else rows
            need(math.prod(shapes[kinds.MAGNITUDE]) == norms, kinds.MAGNITUDE, f"{norms} norms")
        scaling = adapter.scaling(target.name if parameter else module, rank, parts[a])
        return Change(adapter, parts, scaling, by_columns, stacked, count)

    def _add(self, name: str, change: Change) -> None:
        changes = self.changes.setdefault(name, [])
        if kinds.VALUE in change.parts:  # replaces earlier changes; PEFT can write it after the factors of its module
            elsewhere = [earlier for earlier in changes if earlier.divided != change.divided]
            own = [earlier for earlier in changes if earlier.adapter is change.adapter and earlier not in elsewhere]
            # An adapter can have values under two names of a tensor: the first is taken.
            changes[:] = [*elsewhere, *(own if own and kinds.VALUE in own[0].parts else [change, *own])]
        elif kinds.TOKENS not in change.parts and any(kinds.TOKENS in earlier.parts for earlier in changes):
            raise UnsupportedError(f"{show(name)} is changed after some of its rows were replaced", tensor=name)
        elif any((earlier.divided is None) != (change.divided is None) for earlier in changes):
            text = f"{show(name)} is changed as a whole by one adapter and in parts by another"
            raise UnsupportedError(text, tensor=name)
        elif any(kinds.VALUE not in earlier.parts and earlier.stacked != change.stacked for earlier in changes):
            text = f"{show(name)} is a stack of matrices for one change and not for another"
            raise UnsupportedError(text, tensor=name)
        else:
            changes.append(change)

    def _missing(self, adapter: Adapter, name: str, tensor: str) -> SafeloadError:
        if name in self.base.unmapped:
            text = f"of the adapter changes {show(name)} of {self.base.title}: {self.base.unmapped[name]}"
            return error_about(UnsupportedError, text, path=adapter.checkpoint.path, tensor=tensor)
        text = f"of the adapter belongs to {show(name)}, which {self.base.title} does not have"
        first_expert = f"{name.rpartition('.')[0]}.0."
        if name == "lm_head.weight" and any(stored.endswith(_EMBEDDINGS) for stored in self.base.names):
            text += ": it has no head, and its config does not tie one to the embedding"
        elif adapter.parameters and any(stored.startswith(first_expert) for stored in self.base.names):
            text += ": its experts are stored one by one, under names that are not known to make that stack"
        elif name.endswith(".bias"):
            text += ": the layer has no bias in the base"
        elif len(self._problems) < _MAX_COMPARED and (near := similar(name, list(self.base.names))):
            text += f"; similar names: {', '.join(near)}"
        return error_about(TensorNotFoundError, text, path=adapter.checkpoint.path, tensor=tensor)

    def target_row(self, name: str, dtype: Any) -> dtypes.Dtype:
        """Return the dtype of a merged tensor: ``dtype``, or the tensor's own."""
        row = parse_target(dtype) or self.base.target(name).row
        if row is None:
            text = 'is packed, and an adapter changes it: pass dtype=, such as dtype="bfloat16", to merge its true '
            raise error_about(UnsupportedError, f"{text}values", path=self.base.title, tensor=name)
        return row

    def values(self, name: str, row: dtypes.Dtype, out: Array | None = None, threads: int | None = None) -> Array:
        target, changes = self.base.target(name), self.changes[name]
        result = target_array(target.shape, dtypes.array_dtype(row.number), out)
        divided = next((change.divided for change in changes if change.divided is not None), None)
        for number in range(1 if divided is None else divided.parts):
            part, rows = target, slice(None)
            if divided is not None:
                rows = slice(number * len(result) // divided.parts, (number + 1) * len(result) // divided.parts)
                part = _rows_of(target, rows)
            own = [change for change in changes if change.divided is None or change.divided.number == number]
            self._fill(result[rows] if divided else result, part, own, row, threads)
        return result

    def _fill(
        self, result: Array, target: AdapterTarget, changes: Sequence[Change], row: dtypes.Dtype, threads: int | None
    ) -> None:
        """Fill an array with a tensor, or with some of its rows, and its changes."""
        if changes and kinds.VALUE in changes[0].parts:  # the adapter's values are in place of the tensor's own
            checkpoint, stored = changes[0].adapter.checkpoint, changes[0].parts[kinds.VALUE]
            ((_, file, index),) = tensors_of(checkpoint, [stored])
            source = in_rows(in_file(checkpoint, stored, file, index), target.work)
            read = checkpoint.get_slice(stored, dtype=target.work.name).__getitem__
            target, changes = target._replace(read=read, together=False, source=source), changes[1:]
        tokens = [change for change in changes if kinds.TOKENS in change.parts]
        changes = [change for change in changes if kinds.TOKENS not in change.parts]
        stacked = any(change.stacked for change in changes)
        makers = [self._steps_of(change, target.work.name) for change in changes]
        narrows = row.floating and not row.packed and (row is _F32 or _F32.converts_to(row))
        in_core = narrows and target.work == np.float32
        parts = result.reshape(target.shape if stacked else (1, *_flat(target.shape)))
        for k, (matrix, part) in enumerate(zip(_matrices(target) if stacked else (target,), parts, strict=True)):
            steps: list[Step] = []
            for change, maker in zip(changes, makers, strict=True):
                number, rows = change.part or (k, slice(0, None))
                step = maker(number)._replace(first=rows.start)
                dora = change.parts.keys() & {kinds.MAGNITUDE, kinds.SCALE}
                steps.append(_with_norms(step, change, matrix, steps, threads) if dora else step)
            if in_core and all(step.change is None and step.norms is step.columns is None for step in steps):
                _merge_in_core(matrix, steps, part, row, threads)
            else:
                for begin, tile in _changed_tiles(matrix, steps, threads):
                    astype(tile, result.dtype, out=part[begin : begin + len(tile)], threads=threads)
        for adapter, name in ((change.adapter, change.parts[kinds.TOKENS]) for change in tokens):
            (trained,) = _values(adapter, [name], target.work.name)
            result[[*adapter.tokens[name]]] = astype(trained, result.dtype)

    def factors_of(self, change: Change, dtype: str) -> tuple[Array, Array]:
        """Return the factors of a change; the factors of a stack stay in memory for its other parts."""
        parts = change.parts
        a, b = (kinds.EMBEDDING_A, kinds.EMBEDDING_B) if kinds.EMBEDDING_A in parts else (kinds.A, kinds.B)
        read = _factors if change.part is None else self._cached_factors
        return read(change.adapter, parts[a], parts[b], dtype, count=change.matrices, by_columns=change.by_columns)

    def _steps_of(self, change: Change, dtype: str) -> Callable[[int], Step]:
        """Return the step of each matrix of a change; the factors of a stack stay in memory for its other parts."""
        parts = change.parts

        def load(*roles: str) -> dict[str, Array]:
            return dict(zip(roles, _values(change.adapter, [parts[role] for role in roles], dtype), strict=True))

        if change.step is not None:
            with np.errstate(all="ignore"):
                step = change.step(load(*kinds.changing(parts)))
            return lambda number: step
        if kinds.BIAS in parts:
            bias = load(kinds.BIAS)[kinds.BIAS].reshape(-1, 1)
            return lambda number: Step(((bias, np.ones((1, 1), dtype)),), change.scaling)
        left, right = self.factors_of(change, dtype)
        if kinds.CORE in parts:
            right = kinds.with_core(load(kinds.CORE)[kinds.CORE], right[0])[None]
        return lambda number: Step(((left[number], right[number]),), change.scaling)


# ---- values ----


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as a matrix, with the other axes joined into columns."""
    return shape[0] if shape else 1, math.prod(shape[1:])


def _with_norms(
    step: Step, change: Change, target: AdapterTarget, earlier: Sequence[Step], threads: int | None
) -> Step:
    """Return a step of DoRA, which gives rows or columns new norms."""
    role = kinds.SCALE if kinds.SCALE in change.parts else kinds.MAGNITUDE
    name = change.parts[role]
    (magnitude,) = _values(change.adapter, [name], target.work.name)
    by_columns = change.by_columns and change.adapter.norms_of_outputs
    if role == kinds.SCALE:
        by_columns = magnitude.shape[:1] == (1,) != target.shape[:1]
    magnitude = magnitude.reshape(-1).astype(np.float64)
    tiny = float(np.finfo(target.work).eps) if role == kinds.SCALE else 0.0
    if not by_columns:
        return step._replace(norms=magnitude, tiny=tiny)
    if change.part is not None:
        text = f"of the adapter has norms of columns, but {show(target.name)} has only a part of their rows"
        raise error_about(UnsupportedError, text, path=change.adapter.checkpoint.path, tensor=name)
    squares = np.zeros(_flat(target.shape)[1])
    for _, tile in _changed_tiles(target, [*earlier, step], threads):
        squares += np.einsum("ij,ij->j", tile, tile, dtype=np.float64)
    with np.errstate(all="ignore"):
        norms = np.sqrt(squares.reshape(len(magnitude), -1).sum(axis=1)) + tiny
        factors = np.repeat(magnitude / norms, len(squares) // max(1, len(magnitude)))
        return step._replace(columns=factors.astype(target.work))


def _rows_of(target: AdapterTarget, rows: slice) -> AdapterTarget:
    """Return some rows of a tensor as a tensor."""
    shape, source = (rows.stop - rows.start, *target.shape[1:]), target.source
    if source is not None:
        offset = source.offset + source.row.nbytes(rows.start * math.prod(shape[1:]))
        source = source._replace(shape=shape, offset=offset)

    def read(at: slice) -> Array:
        if target.together:
            return target.read(slice(0, target.shape[0]))[rows][at]
        return target.read(slice(rows.start + at.start, rows.start + at.stop))

    return target._replace(shape=shape, read=read, source=source)


def _matrices(target: AdapterTarget) -> Iterator[AdapterTarget]:
    count, rows, columns = target.shape
    matrix = target._replace(shape=(rows, columns), together=target.row is None)
    source = target.source
    whole = target.read(slice(0, count)) if target.together and source is None else None

    def read(k: int, rows: slice) -> Array:
        if whole is not None:
            return whole[k, rows]
        # A matrix of packed values cannot be dequantized in parts.
        values: Array = target.read((k, rows)) if target.row is not None else target.read(slice(k, k + 1))[0][rows]
        return values

    for k in range(count):
        if source is not None:
            offset = source.offset + k * source.row.nbytes(rows * columns)
            matrix = matrix._replace(source=source._replace(shape=(rows, columns), offset=offset))
        yield matrix._replace(read=partial(read, k))


def _tiles(target: AdapterTarget, size: int, threads: int | None) -> Iterator[tuple[int, Array]]:
    """Yield the tiles [rows, columns] of a tensor with their first rows; a tile may replace the one before."""
    rows, columns = _flat(target.shape)
    jobs = target.source is not None and len(target.shape) > 1
    height = rows if target.together and not jobs else min(rows, max(1, size // max(1, columns)))
    if _BLOCK < height < rows:
        height -= height % _BLOCK
    # New memory for each tile would take as long as reading it.
    buffer = np.empty((height, columns) if jobs else 0, target.work)
    for begin in range(0, rows, height) if rows and columns else ():
        end = min(rows, begin + height)
        if jobs:
            _merge_in_core(_rows_of(target, slice(begin, end)), [], buffer[: end - begin], _F32, threads)
            yield begin, buffer[: end - begin]
            continue
        yield begin, target.read(slice(begin, end) if target.shape else ...).reshape(end - begin, columns)


def _changed_tiles(target: AdapterTarget, steps: Sequence[Step], threads: int | None) -> Iterator[tuple[int, Array]]:
    """Like `_tiles`, with changes added by NumPy, as many rows at a time as its buffer has."""
    rows, columns = _flat(target.shape)
    changes = any(step.change is not None for step in steps)
    height = min(rows, max(1, (_CHANGED if changes else _PRODUCT) // max(1, columns)))
    buffer = np.empty((height, columns), target.work)
    for begin, tile in _tiles(target, _PRODUCT if changes else _TILE, threads):
        end = begin + len(tile)
        for first in range(begin, end, height):
            last = min(end, first + height)
            part = tile[first - begin : last - begin]
            for step in steps:
                with np.errstate(all="ignore"):
                    _apply(step, part, first + step.first, buffer[: len(part)])
        yield begin, tile


def _apply(step: Step, rows: Array, first: int, buffer: Array) -> None:
    """Change rows of a matrix; ``first`` is the number of the first."""
    last = first + len(rows)
    if step.change is not None:
        step.change(rows, first, buffer)
    if step.products:
        np.matmul(step.products[0][0][first:last], step.products[0][1], out=buffer)
        buffer *= step.scaling
        for left, right in step.products[1:]:
            buffer *= left[first:last] @ right
        rows += buffer
    if step.columns is not None:
        rows *= step.columns
    if step.norms is not None:
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64)) + step.tiny
        rows *= (step.norms[first:last] / norms).astype(rows.dtype)[:, None]


def _merge_in_core(
    target: AdapterTarget, steps: Sequence[Step], out: Array, row: dtypes.Dtype, threads: int | None
) -> None:
    """Fill rows of the result with a matrix and its changes."""
    columns = out.shape[1]
    if not out.size:
        return
    updates: list[Update] = []
    with np.errstate(over="ignore"):  # a scaling beyond float32 gives infinity
        for step in steps:
            for number, (factor, right) in enumerate(step.products, 1):
                left, scaling = factor[step.first :][: len(out)], float(np.float32(step.scaling))
                assert (len(left), right.shape[1]) == out.shape
                if left.shape[1]:  # MLX's rank can be 0
                    times = number < len(step.products)
                    updates.append(Update(left, panels_of(right), scaling if number == 1 else 1.0, times))
    job = Job(None, 0, 0, 0, _F32.number, row.number, lib.SL_OP_MERGE, origin=Origin(target.name, target.shape))
    source = target.source
    for begin, values in _tiles(target, _TILE, threads) if source is None else [(0, out)]:
        part = out[begin : begin + len(values)]
        if source is not None:
            job = job._replace(file=source.file, offset=source.offset, size=source.size, source=source.row.number)
        else:
            tile = native_order(np.ascontiguousarray(values))
            job = job._replace(offset=address_of(tile), size=tile.nbytes)
        merge = Updates(columns, [update._replace(left=update.left[begin:]) for update in updates])
        batch = Batch([job._replace(memory=address_of(part), merge=merge)])
        batch.results([part])
        batch.run(threads=threads)


def _values(adapter: Adapter, names: Sequence[str], dtype: str) -> list[Array]:
    """Read tensors of an adapter, and warn of a NaN or an infinity."""
    arrays = adapter.checkpoint.load(names, dtype=dtype, backend="pread")
    for name, array in arrays.items():
        finite = np.isfinite(array)
        if not finite.all():
            at, path = [*index_of(int(finite.argmin()), array.shape)], adapter.checkpoint.path
            text = "%s: tensor %s of the adapter has a NaN or an infinity at %s, which reaches the merged weights"
            warning(text, path, show(name), at)
    return [arrays[name] for name in names]


def _factors(
    adapter: Adapter, name_a: str, name_b: str, dtype: str, *, count: int, by_columns: bool
) -> tuple[Array, Array]:
    """Return the factors of a number of matrices, [matrices, rows, r] and [matrices, r, columns]."""
    a, b = _values(adapter, [name_a, name_b], dtype)
    a, b = adapter.matrices(a, b, count)
    left, right = (a.transpose(0, 2, 1), b.transpose(0, 2, 1)) if by_columns else (b, a)
    return np.ascontiguousarray(left), np.ascontiguousarray(right)


# ---- loading ----


@contextmanager
def merging(
    checkpoint: Checkpoint, adapters: Any, storage_options: Mapping[str, Any] | None
) -> Iterator[tuple[Checkpoint, Merge | None]]:
    """Open adapters, and fit these to a base."""
    with ExitStack() as stack:
        if weighted := listed(adapters):
            base, merge = fit(checkpoint, opened(stack, weighted, storage_options))
            warn_of_config(merge, checkpoint.config)
            yield base, merge
        else:
            yield checkpoint, None


def fit(
    checkpoint: Checkpoint, adapters: Sequence[Adapter], problems: list[SafeloadError] | None = None
) -> tuple[Checkpoint, Merge]:
    """Fit open adapters to a base; see `merging`, and `Merge` for the list of problems."""
    if checkpoint.format == registry.GGUF or any(map(in_gguf, adapters)):
        adapters = registry.part("adapter forms").for_base(adapters, checkpoint, problems)
    heads = heads_of(adapters, checkpoint.config, checkpoint)
    absent = {head: embedding for head, embedding in heads.untied.items() if head not in checkpoint}
    view = with_aliases(checkpoint, absent) if absent else checkpoint
    base = Base(
        view.path,
        view,
        view.config,
        lambda name: view.tensors[name].shape,
        partial(target_of, view),
        heads=heads.pairs,
    )
    merge = Merge(base, adapters, heads, problems=problems)
    brought = {name: merge.changes[name][0] for name in merge.base.grown if merge.changes.get(name)}
    places = {name: (change.adapter.checkpoint, change.parts[kinds.VALUE]) for name, change in brought.items()}
    return with_aliases(view, {}, places) if places else view, merge


def warn_of_config(merge: Merge, config: Mapping[str, Any] | None) -> None:
    """Warn if the merged tensors need a config other than the base's."""
    sizes = vocabulary_of(merge)
    if sizes is not None:
        warning('the adapter has a vocabulary of %d: set "vocab_size" to it in the config of the model', sizes[1])
    for head, embedding in merge.heads.untied.items():
        pair, place = f"{show(head)} and {show(embedding)}", "config" if config is None else "config.json"
        advice = f'load them into a model whose {place} has "tie_word_embeddings": false'
        warning("the adapter gives %s different values: %s", pair, advice)


def vocabulary_of(merge: Merge) -> tuple[int, int] | None:
    """Return the number of rows of the base's vocabulary, and of the vocabulary of the adapters if it is another."""
    base = merge.base
    pairs = ((base.rows_before[name], base.grown[name].shape[0]) for name in base.rows_before if name in merge)
    return next(pairs, None)


def load_with_adapters(
    checkpoint: Checkpoint,
    adapters: Any,
    storage_options: Mapping[str, Any] | None,
    *,
    writable: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Like `Checkpoint.load`, with the adapters in ``adapters=`` merged."""
    with merging(checkpoint, adapters, storage_options) as (base, merge):
        if merge is None:
            return base.load(writable=writable, **options)
        return load_merged(base, merge, access=access_of(writable, options["out"]), **options)


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
    access: Access = "write",
) -> dict[str, Any]:
    """Like `Checkpoint.load`, with adapters merged."""
    all_names = [part[0] for part in chosen(checkpoint, names, only, drop, dtype)]
    rows = {name: merge.target_row(name, dtype) for name in all_names if name in merge}
    shapes = {name: tuple(checkpoint.tensors[name].shape) for name in rows}
    plain = [name for name in all_names if name not in rows]
    if out is not None:
        check_out_names(out, all_names, "load")
        refuse_own_files(out, checkpoint.weight_files)
        for name, row in rows.items():
            check_fits(name, dtypes.array_dtype(row.number), shapes[name], out)
        check_disjoint({k: v for k, v in out.items() if isinstance(v, np.ndarray) and v.flags.c_contiguous})
    plain_out = None if out is None else {name: array for name, array in out.items() if name not in rows}
    sizes = {name: row.nbytes(math.prod(shapes[name])) for name, row in rows.items()}
    parts = chosen(checkpoint, plain, None, None, dtype)
    arrays, _ = load_tensors(parts, backend=backend, dtype=dtype, out=plain_out, threads=threads, access=access)
    done = sum(array.nbytes for array in arrays.values())
    with reporter(progress, done + sum(sizes.values())) as report:
        report(done)
        for name, row in rows.items():
            arrays[name] = merge.values(name, row, None if out is None else out[name], threads)
            done += sizes[name]
            report(done)
    if access == "read":
        freeze(arrays.values())
    return {name: arrays[name] for name in all_names}
