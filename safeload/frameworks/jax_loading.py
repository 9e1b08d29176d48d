"""Load file tensors as JAX arrays: in groups of bounded size, and only the slices that local devices hold."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base import dtypes
from ..base.arrays import Array as NumpyArray
from ..base.text import clip, printable, show
from ..checkpoint import tensors_of
from ..engine.codes.pieces import Meter
from ..engine.codes.restore import rows_apart
from ..engine.read.load import load_tensors
from ..engine.read.tensors import FileTensor, Tensors, entries_of, materialize
from ..engine.run.cast import astype
from ..engine.run.memory import POOLED_BELOW
from ..engine.run.progress import Progress
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from ..loading.merge import Merge
from . import jax_arrays
from .checkpoints import Selected
from .jax_arrays import Array, Place, Slice, jax

# Bytes of arrays to load together. Host memory holds two groups at a time: one is read while the previous one is copied
# to its devices. A larger tensor is read alone and, if several devices hold it, in the sharding's ranges of its first
# axis.
GROUP = 128 << 20

# The `sharding` argument of `load_file` and `load_checkpoint`.
Sharding: TypeAlias = Place | Mapping[str, Place] | Callable[[str, Any], Place]


class PlacedTensor(NamedTuple):
    """A tensor to load."""

    part: FileTensor
    dtype: np.dtype[Any]  # of the array
    shape: tuple[int, ...]
    place: Place

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.part[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Options(NamedTuple):
    """How to load tensors."""

    lazy: Callable[[str, Any], Any]  # (name, dtype) -> lazy tensor, like `Checkpoint.get_slice`
    sharding: Any = None
    backend: str = "mmap"  # for tensors on a single device; tensors on several devices are always read
    checked: bool = True  # refuse integers that JAX cannot represent, instead of wrapping around like JAX
    threads: int | None = None
    merge: Merge | None = None  # adapters to merge; tensors they change are read whole


def load(
    groups: Sequence[tuple[Sequence[FileTensor], dtypes.Dtype | None]], options: Options, progress: Progress
) -> dict[str, Array]:
    """Load arrays by name and wait for their values."""
    loaders = [_Loader(parts, target, options) for parts, target in groups]
    meter = Meter(progress, sum(tensor.nbytes for loader in loaders for tensor in loader.tensors))
    arrays: dict[str, Array] = {}
    started: deque[list[Array]] = deque()
    for loader in loaders:
        for group, nbytes in loader.run():
            arrays.update(group)
            started.append(list(group.values()))
            if len(started) > 1:
                jax.block_until_ready(started.popleft())
            meter.add(nbytes)
    jax.block_until_ready(list(started))
    return {tensor.name: arrays[tensor.name] for loader in loaders for tensor in loader.tensors}


class _Loader:
    """Load tensors with a common target dtype."""

    def __init__(self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, options: Options) -> None:
        self._target = None if target is None else target.name
        self._options = options
        if target is not None:
            jax_arrays.check_target(dtypes.array_dtype(target.number))
        self.tensors = [
            PlacedTensor(part, entry.dtype, entry.shape, None)
            for part, entry in zip(parts, entries_of(parts, target), strict=True)
        ]
        if options.sharding is not None:
            self.tensors = [tensor._replace(place=_place_of(tensor, options.sharding)) for tensor in self.tensors]
            for tensor in self.tensors:
                jax_arrays.check_fits(tensor.place, tensor.shape, tensor.name)
        self._mappings: dict[WeightFile, Any] = {}
        self._reading = "pread" if options.backend == "mmap" else options.backend  # of tensors that are not mapped

    def run(self) -> Iterator[tuple[dict[str, Array], int]]:
        """Yield groups of arrays by name, possibly still without values, with the bytes of each group."""
        group: list[PlacedTensor] = []
        size = 0
        for tensor in self.tensors:
            if jax_arrays.several_devices(tensor.place):
                slices = jax_arrays.slices(tensor.place, tensor.shape)
                if tensor.nbytes > GROUP or not tensor.place.is_fully_addressable:
                    yield {tensor.name: self._by_slices(tensor, slices)}, tensor.nbytes
                    continue
            if group and size + tensor.nbytes > GROUP:
                yield self._together(group), size
                group, size = [], 0
            group.append(tensor)
            size += tensor.nbytes
        if group:
            yield self._together(group), size

    def _read(self, tensors: Sequence[PlacedTensor], backend: str) -> list[NumpyArray]:
        """Return the values of whole tensors."""
        threads, merge = self._options.threads, self._options.merge
        changed = {tensor.name for tensor in tensors if merge is not None and tensor.name in merge}
        parts = [tensor.part for tensor in tensors if tensor.name not in changed]
        loaded, _ = load_tensors(
            Tensors.of(parts), backend=backend, dtype=self._target, threads=threads, mappings=self._mappings
        )
        for name in changed:
            assert merge is not None
            loaded[name] = merge.values(name, merge.target_row(name, self._target), threads=threads)
        arrays = [loaded[tensor.name] for tensor in tensors]
        if self._options.checked:
            for tensor, array in zip(tensors, arrays, strict=True):
                jax_arrays.check_values(tensor.name, array)
        return arrays

    def _together(self, group: Sequence[PlacedTensor]) -> dict[str, Array]:
        """Return whole tensors as arrays by name."""
        batches: dict[tuple[Any, str], list[PlacedTensor]] = {}
        spread = []
        for tensor in group:
            if jax_arrays.several_devices(tensor.place):
                spread.append(tensor)
            else:
                batches.setdefault((tensor.place, self._backend_of(tensor)), []).append(tensor)
        arrays = self._on_several(spread) if spread else {}
        for (place, backend), tensors in batches.items():
            copies = jax_arrays.put(self._read(tensors, backend), place, borrowed=backend == "mmap")
            arrays.update(zip((tensor.name for tensor in tensors), copies, strict=True))
        return {tensor.name: arrays[tensor.name] for tensor in group}

    def _backend_of(self, tensor: PlacedTensor) -> str:
        """Return how to read a tensor for one device: mapped, or into memory if it is large and stays on a CPU.

        JAX then keeps this memory, in huge pages. XLA's own copy would take several times as long.
        """
        if self._options.backend == "mmap" and (tensor.nbytes < POOLED_BELOW or not jax_arrays.on_cpu(tensor.place)):
            return "mmap"
        return self._reading

    def _on_several(self, tensors: Sequence[PlacedTensor]) -> dict[str, Array]:
        """Put whole tensors on several devices."""
        arrays: dict[str, Array] = {}
        undivided: list[tuple[PlacedTensor, NumpyArray]] = []
        for tensor, values in zip(tensors, self._read(tensors, self._reading), strict=True):
            slices = jax_arrays.slices(tensor.place, tensor.shape)
            views = [values[_inside((), part)] for part in slices]
            if jax_arrays.partly_aliased(views, tensor.place):
                pieces = jax_arrays.put_slices(
                    [(self._own(view), part) for view, part in zip(views, slices, strict=True)]
                )
                arrays[tensor.name] = jax_arrays.joined(tensor.shape, tensor.dtype, tensor.place, pieces)
            else:
                undivided.append((tensor, values))
        places = [tensor.place for tensor, _ in undivided]
        divided = jax_arrays.put_on_several([values for _, values in undivided], places)
        arrays.update(zip((tensor.name for tensor, _ in undivided), divided, strict=True))
        return arrays

    def _own(self, view: NumpyArray) -> NumpyArray:
        """Return a copy of the values."""
        return astype(view, view.dtype, threads=self._options.threads)

    def _by_slices(self, tensor: PlacedTensor, slices: Sequence[Slice]) -> Array:
        """Load a large or partly local tensor, one range of its first axis after another."""
        bands: dict[tuple[tuple[int, int], ...], list[Slice]] = {}
        for part in slices:
            bands.setdefault(part.bounds[:1], []).append(part)
        pieces: list[tuple[Any, Array]] = []
        started: list[tuple[Any, Array]] = []
        for band in self._values(tensor, bands):
            if self._options.checked:
                for values, _ in band:
                    jax_arrays.check_values(tensor.name, values)
            jax.block_until_ready([array for _, array in started])
            started = jax_arrays.put_slices(band)
            pieces += started
            del band  # frees host memory
        return jax_arrays.joined(tensor.shape, tensor.dtype, tensor.place, pieces)

    def _values(
        self, tensor: PlacedTensor, bands: Mapping[tuple[tuple[int, int], ...], list[Slice]]
    ) -> Iterator[list[tuple[NumpyArray, Slice]]]:
        """Yield the values of each range of the first axis, divided into slices.

        If this process holds all columns of a range, or the tensor is packed, its rows are read together and each byte
        once. Otherwise slices are copied from the mapped file, which touches only their pages.
        """
        name, file, index = tensor.part
        changed = self._options.merge is not None and name in self._options.merge
        if changed or _only_whole(file, index, self._target):
            values: Any = self._read([tensor], self._reading)[0]
            together = True
        else:
            values = self._options.lazy(name, self._target)
            together = file.table.is_quantized(index)
        for rows, slices in bands.items():
            shape = (*(stop - start for start, stop in rows), *tensor.shape[1:])
            if together or jax_arrays.covered(slices, shape):
                block = values[_items(rows)]
                views = [block[_inside(rows, part)] for part in slices]
                if jax_arrays.partly_aliased(views, tensor.place):
                    views = list(map(self._own, views))
                yield list(zip(views, slices, strict=True))
            else:
                view = load_tensors(Tensors.of([tensor.part]), backend="mmap", mappings=self._mappings)[0][name]
                for part in slices:
                    yield [(astype(view[_items(part.bounds)], tensor.dtype, threads=self._options.threads), part)]


def _items(bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _inside(rows: Sequence[tuple[int, int]], part: Slice) -> tuple[Any, ...]:
    """Return the index of a slice inside its rows; the ellipsis keeps a scalar an array."""
    return (*(slice(None) for _ in rows), *_items(part.bounds[len(rows) :]), Ellipsis)


def _only_whole(file: WeightFile, index: int, target: str | None) -> bool:
    """Return whether the values of a tensor can only be read all at once."""
    packed = file.table.packed.get(index)
    if packed is not None:
        return len(packed.packing.shape) < 2 or not (len(packed.packing.shape) > 2 or rows_apart(packed.packing))
    return target is not None and file.table.row(index).packed


def _place_of(tensor: PlacedTensor, sharding: Any) -> Place:
    """Return the place of a tensor."""
    if isinstance(sharding, Mapping):
        if tensor.name not in sharding:
            raise ValueError(f"sharding has no entry for tensor {show(tensor.name)}: use None for JAX's default device")
        sharding = sharding[tensor.name]
    elif callable(sharding) and not jax_arrays.is_part_of_sharding(sharding):
        sharding = sharding(tensor.name, jax.ShapeDtypeStruct(tensor.shape, jax_arrays.jax_dtype(tensor.dtype)))
    return jax_arrays.as_place(sharding)


def load_selected(selected: Selected, sharding: Any, *, threads: int | None, progress: Progress) -> dict[str, Array]:
    """Load the selected tensors of a checkpoint."""
    checkpoint, merge, names, groups = selected
    options = Options(
        lambda name, dtype: checkpoint.get_slice(name, dtype=dtype), sharding, threads=threads, merge=merge
    )
    arrays = load([(tensors_of(checkpoint, members), target) for members, target in groups], options, progress)
    return arrays if len(groups) == 1 else {name: arrays[name] for name in names}


def copied(arrays: Mapping[str, NumpyArray]) -> dict[str, Array]:
    """Return JAX arrays that share no memory with these NumPy arrays."""
    copies = jax_arrays.put([*arrays.values()], None, borrowed=True)
    jax.block_until_ready(copies)
    return dict(zip(arrays, copies, strict=True))


def to_numpy(arrays: Mapping[str, Any]) -> dict[str, NumpyArray]:
    """Return NumPy arrays that may share memory with these JAX arrays."""
    return {name: materialize(value) for name, value in jax_arrays.to_write(arrays).items()}


class JaxHandle:
    """The `Handle` for JAX. ``backend`` is ignored, because all arrays have memory of their own."""

    def __init__(self, device: Any, backend: str) -> None:
        if device not in ("cpu", None):
            raise SafetensorError(
                f"Device {clip(printable(str(device)), 200)} is not supported for framework jax; to choose "
                "devices, pass sharding= to safeload.jax.load_file or load_checkpoint"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return JaxHandle, ("cpu", "mmap")

    def tensor(self, part: FileTensor, read: Callable[[], NumpyArray]) -> Array:
        arrays, _ = load_tensors(Tensors.of([part]), backend="pread")  # a view of the file would have to be copied
        return jax_arrays.put([arrays[part[0]]], None, borrowed=False)[0]

    def tensors(
        self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, NumpyArray]]
    ) -> dict[str, Array]:
        if target is not None:
            jax_arrays.check_target(dtypes.array_dtype(target.number))
        return copied(read())

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], NumpyArray]) -> Array:
        return jax_arrays.put([select(key)], None, borrowed=False)[0]
