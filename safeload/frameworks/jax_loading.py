"""Loads tensors of open files as arrays of JAX: in groups of bounded size, and of each only what its devices hold."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base import dtypes
from ..base.arrays import Array as NumpyArray
from ..base.arrays import as_array
from ..base.text import show
from ..checkpoint import Checkpoint
from ..engine.codes import code_ranges
from ..engine.codes.pieces import Meter
from ..engine.read.lazy import materialize
from ..engine.read.load import load_tensors
from ..engine.read.plan import entries_of
from ..engine.read.tensors import FileTensor, Tensors
from ..engine.run.cast import astype
from ..engine.run.memory import POOLED_BELOW
from ..engine.run.progress import Progress
from ..engine.run.weight_file import WeightFile
from ..formats.safetensors import file as safetensors
from ..loading.merge import Merge
from . import jax_arrays
from .checkpoints import Selected
from .jax_arrays import Array, Place, Slice

# Bytes of arrays that are loaded together. Two such groups are in the host's memory at a time: one is read while the
# one before is copied to its devices. A larger tensor is read alone, and where several devices hold it, by those ranges
# of its first axis that its sharding makes.
GROUP = 128 << 20

# What `load_file` and `load_checkpoint` take as ``sharding``.
Sharding: TypeAlias = Place | Mapping[str, Place] | Callable[[str, Any], Place]


class PlacedTensor(NamedTuple):
    """A tensor to load.

    Attributes:
        part: name, file and index in the file's table.
        dtype: of the array.
        shape: of the array.
        place: where it goes.
    """

    part: FileTensor
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    place: Place

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Options(NamedTuple):
    """How tensors are loaded.

    Attributes:
        lazy: the lazy tensor of a name, converted to a dtype; see `Checkpoint.get_slice`.
        sharding: where the arrays go.
        backend: for tensors that go to a single device; those of several are always read.
        checked: whether integers that JAX cannot represent are refused, or wrapped around as JAX does.
        threads: for reading.
        merge: adapters that are merged; a tensor that they change is read whole.
    """

    lazy: Callable[[str, Any], Any]
    sharding: Any = None
    backend: str = "mmap"
    checked: bool = True
    threads: int | None = None
    merge: Merge | None = None


def load(
    groups: Sequence[tuple[Sequence[FileTensor], dtypes.Dtype | None]], options: Options, progress: Progress
) -> dict[str, Array]:
    """Arrays by name, which have their values when this returns.

    Args:
        groups: tensors, and the dtype that they are converted to.
        options: how to load them.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Raises:
        ValueError, TypeError: a sharding that does not fit.
        RangeError: an integer that JAX cannot represent.
        SafeloadError, OSError: see `load_tensors`.
    """
    loaders = [_Loader(parts, target, options) for parts, target in groups]
    meter = Meter(progress, sum(loader.nbytes for loader in loaders))
    arrays: dict[str, Array] = {}
    started: deque[list[Array]] = deque()
    for loader in loaders:
        for made, nbytes in loader.run():
            arrays.update(made)
            started.append(list(made.values()))
            if len(started) > 1:
                jax_arrays.wait(started.popleft())
            meter.add(nbytes)
    jax_arrays.wait(list(started))
    return {name: arrays[name] for loader in loaders for name in loader.names}


class _Loader:
    """Loads tensors that are converted to the same dtype."""

    def __init__(self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, options: Options) -> None:
        self._target = None if target is None else target.name
        self._options = options
        if target is not None:
            jax_arrays.check_target(dtypes.array_dtype(target.number))
        entries = entries_of(parts, target)
        self._tensors = [
            PlacedTensor(part, one.dtype, one.shape, None) for part, one in zip(parts, entries, strict=True)
        ]
        if options.sharding is not None:
            choose = _chooser(options.sharding)
            self._tensors = [one._replace(place=choose(one)) for one in self._tensors]
            for tensor in self._tensors:
                jax_arrays.check_fits(tensor.place, tensor.shape, tensor.part[0])
        self._mappings: dict[WeightFile, Any] = {}

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in order."""
        return _names(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(one.nbytes for one in self._tensors)

    def run(self) -> Iterator[tuple[dict[str, Array], int]]:
        """Arrays by name, which may not have their values yet, and the bytes of the group."""
        group: list[PlacedTensor] = []
        size = 0
        for one in self._tensors:
            if jax_arrays.several_devices(one.place):
                parts = jax_arrays.slices(one.place, one.shape)
                if one.nbytes > GROUP or not jax_arrays.all_here(one.place):
                    yield {one.part[0]: self._by_slices(one, parts)}, one.nbytes
                    continue
            if group and size + one.nbytes > GROUP:
                yield self._together(group), size
                group, size = [], 0
            group.append(one)
            size += one.nbytes
        if group:
            yield self._together(group), size

    @property
    def _reading(self) -> str:
        """The backend of tensors that are not mapped."""
        return "pread" if self._options.backend == "mmap" else self._options.backend

    def _read(self, tensors: Sequence[PlacedTensor], backend: str) -> list[NumpyArray]:
        """The values of whole tensors."""
        threads, merge = self._options.threads, self._options.merge
        changed = {one.part[0]: one for one in tensors if merge is not None and one.part[0] in merge}
        parts = [one.part for one in tensors if one.part[0] not in changed]
        loaded, _ = load_tensors(
            Tensors.of(parts), backend=backend, dtype=self._target, threads=threads, mappings=self._mappings
        )
        for name in changed:
            assert merge is not None
            loaded[name] = merge.values(name, merge.target_row(name, self._target), threads=threads)
        arrays = [loaded[name] for name in _names(tensors)]
        if self._options.checked:
            for one, array in zip(tensors, arrays, strict=True):
                jax_arrays.check_values(one.part[0], array)
        return arrays

    def _together(self, group: Sequence[PlacedTensor]) -> dict[str, Array]:
        """The arrays of whole tensors by name."""
        single: dict[Any, list[PlacedTensor]] = {}
        spread = []
        for one in group:
            if jax_arrays.several_devices(one.place):
                spread.append(one)
            else:
                single.setdefault(one.place, []).append(one)
        made: dict[str, Array] = {}
        for place, tensors in single.items():
            made.update(self._on_one(tensors, place))
        if spread:
            made.update(self._on_several(spread))
        return {name: made[name] for name in _names(group)}

    def _on_one(self, tensors: Sequence[PlacedTensor], place: Place) -> dict[str, Array]:
        """Whole tensors on one device, by name: copied from the mapped file, except for large ones of a CPU.

        What is read for these is their memory, in huge pages; XLA takes several times as long for a copy.
        """
        mapped, read = list(tensors), []
        if self._options.backend != "mmap":
            mapped, read = [], mapped
        elif jax_arrays.on_cpu(place):
            read = [one for one in tensors if one.nbytes >= POOLED_BELOW]
            mapped = [one for one in tensors if one.nbytes < POOLED_BELOW]
        made: dict[str, Array] = {}
        for some, backend in ((mapped, "mmap"), (read, self._reading)):
            if some:
                arrays = jax_arrays.put(self._read(some, backend), place, borrowed=backend == "mmap")
                made.update(zip(_names(some), arrays, strict=True))
        return made

    def _on_several(self, tensors: Sequence[PlacedTensor]) -> dict[str, Array]:
        """Whole tensors on several devices, by name."""
        made: dict[str, Array] = {}
        undivided: list[tuple[PlacedTensor, NumpyArray]] = []
        for one, array in zip(tensors, self._read(tensors, self._reading), strict=True):
            parts = jax_arrays.slices(one.place, one.shape)
            views = [array[_inside((), part)] for part in parts]
            if jax_arrays.partly_aliased(views, one.place):
                pieces = [(self._own(view), part) for view, part in zip(views, parts, strict=True)]
                made[one.part[0]] = jax_arrays.joined(one.shape, one.dtype, one.place, jax_arrays.put_slices(pieces))
            else:
                undivided.append((one, array))
        arrays = jax_arrays.put_on_several([array for _, array in undivided], [one.place for one, _ in undivided])
        made.update(zip((one.part[0] for one, _ in undivided), arrays, strict=True))
        return made

    def _own(self, view: NumpyArray) -> NumpyArray:
        """The values in memory of their own."""
        return astype(view, view.dtype, threads=self._options.threads)

    def _by_slices(self, one: PlacedTensor, parts: Sequence[Slice]) -> Array:
        """A tensor of which this process holds a part, or that is large: range after range of its first axis."""
        bands: dict[tuple[tuple[int, int], ...], list[Slice]] = {}
        for part in parts:
            bands.setdefault(part.bounds[:1], []).append(part)
        pieces: list[tuple[Any, Array]] = []
        started: list[tuple[Any, Array]] = []
        for band in self._values(one, bands):
            if self._options.checked:
                for values, _ in band:
                    jax_arrays.check_values(one.part[0], values)
            jax_arrays.wait([array for _, array in started])
            started = jax_arrays.put_slices(band)
            pieces += started
            del band  # which is the host's memory
        return jax_arrays.joined(one.shape, one.dtype, one.place, pieces)

    def _values(
        self, one: PlacedTensor, bands: Mapping[tuple[tuple[int, int], ...], list[Slice]]
    ) -> Iterator[list[tuple[NumpyArray, Slice]]]:
        """The values of each range of the first axis, divided into slices.

        Rows of which this process holds all columns are read together, each byte once; so are rows of packed tensors.
        Others are copied from the mapped file, of which only their pages are read.
        """
        name, file, index = one.part
        changed = self._options.merge is not None and name in self._options.merge
        if changed or _only_whole(file, index, self._target):
            values: Any = self._read([one], self._reading)[0]
            together = True
        else:
            values = self._options.lazy(name, self._target)
            together = file.table.is_quantized(index)
        for rows, parts in bands.items():
            shape = (*(stop - start for start, stop in rows), *one.shape[1:])
            if together or jax_arrays.covered(parts, shape):
                block = values[_items(rows)]
                views = [block[_inside(rows, part)] for part in parts]
                if jax_arrays.partly_aliased(views, one.place):
                    views = list(map(self._own, views))
                yield list(zip(views, parts, strict=True))
            else:
                view = load_tensors(Tensors.of([one.part]), backend="mmap", mappings=self._mappings)[0][name]
                for part in parts:
                    yield [(astype(view[_items(part.bounds)], one.dtype, threads=self._options.threads), part)]


def _items(bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in bounds)


def _inside(rows: Sequence[tuple[int, int]], part: Slice) -> tuple[Any, ...]:
    """A slice as an index of its rows; the ellipsis makes an array of a scalar."""
    return (*(slice(None) for _ in rows), *_items(part.bounds[len(rows) :]), Ellipsis)


def _names(tensors: Sequence[PlacedTensor]) -> list[str]:
    return [one.part[0] for one in tensors]


def _only_whole(file: WeightFile, index: int, target: str | None) -> bool:
    """Whether the values of a tensor can only be read together."""
    packed = file.table.packed(index)
    if packed is not None:
        return len(packed.packing.shape) < 2 or not (
            len(packed.packing.shape) > 2 or code_ranges.rows_apart(packed.packing)
        )
    return target is not None and file.table.row(index).packed


def _chooser(sharding: Any) -> Callable[[PlacedTensor], Place]:
    """Gives the place of a tensor."""
    if isinstance(sharding, Mapping):

        def named(one: PlacedTensor) -> Place:
            name = one.part[0]
            if name not in sharding:
                raise ValueError(f"sharding has nothing for tensor {show(name)}: None means JAX's default device")
            return jax_arrays.as_place(sharding[name])

        return named
    if callable(sharding) and not jax_arrays.is_part_of_sharding(sharding):
        return lambda one: jax_arrays.as_place(sharding(one.part[0], jax_arrays.abstract(one.shape, one.dtype)))
    place = jax_arrays.as_place(sharding)
    return lambda one: place


# ---- what safeload.jax calls ----


def load_selected(
    checkpoint: Checkpoint,
    chosen: Selected,
    sharding: Any,
    threads: int | None,
    progress: Progress,
    merge: Merge | None = None,
) -> dict[str, Array]:
    """The tensors of a checkpoint that `select` has chosen.

    Raises:
        See `load`.
    """
    groups = [(checkpoint.entries(group.names), group.dtype) for group in chosen.groups]
    options = Options(
        lambda name, dtype: checkpoint.get_slice(name, dtype=dtype), sharding, threads=threads, merge=merge
    )
    arrays = load(groups, options, progress)
    return arrays if len(groups) == 1 else {name: arrays[name] for name in chosen.names}


def load_bytes(data: Any) -> dict[str, Array]:
    """The tensors of a safetensors file in memory.

    Raises:
        FormatError: the bytes break the format.
        TypeError: no bytes.
    """
    if isinstance(data, (str, os.PathLike)):
        raise TypeError("load takes the content of a file, as bytes: load_file and load_checkpoint take a path")
    return copied(safetensors.parse(data, copy=False))


def copied(arrays: Mapping[str, NumpyArray]) -> dict[str, Array]:
    """Arrays of JAX that share no memory with those of numpy."""
    given = [as_array(value, name) for name, value in arrays.items()]
    made = jax_arrays.put(given, None, borrowed=True)
    jax_arrays.wait(made)
    return dict(zip(arrays, made, strict=True))


def to_numpy(arrays: Mapping[str, Any]) -> dict[str, NumpyArray]:
    """Arrays of numpy that may share memory with those of JAX.

    Raises:
        TypeError, ValueError: see `jax_arrays.to_write`.
    """
    return {name: materialize(value) for name, value in jax_arrays.to_write(arrays).items()}
