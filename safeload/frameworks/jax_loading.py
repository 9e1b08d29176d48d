"""Load file tensors as JAX arrays: in groups of bounded size, and only the slices that local devices hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..base import dtypes
from ..base.arrays import Array as NumpyArray
from ..base.text import clip, printable, show
from ..checkpoint import Checkpoint, slice_of, tensors_of
from ..engine.codes.restore import rows_apart
from ..engine.codes.source import Meter
from ..engine.read.load import load_tensors
from ..engine.read.tensors import Entry, FileTensor, Tensors, entries_of, materialize
from ..engine.run.cast import astype
from ..engine.run.memory import POOLED_BELOW
from ..engine.run.progress import Progress
from ..engine.run.threads import check_threads
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from ..formats.opening import Paths
from ..formats.registry import OpenRequest
from ..loading.merge import Merge
from . import jax_arrays
from .checkpoints import selecting
from .jax_arrays import Array, Bounds, Place, jax

# Bytes of arrays to load together. Host memory holds two groups at a time: one is read while the previous one is copied
# to its devices. A larger tensor is read alone and, if several devices hold it, in the sharding's ranges of its first
# axis.
GROUP = 128 << 20

# The `sharding` argument of `load_file` and `load_checkpoint`.
Sharding: TypeAlias = Place | Mapping[str, Place] | Callable[[str, Any], Place]


class PlacedTensor(NamedTuple):
    """A tensor to load."""

    entry: Entry
    target: str | None  # name of the dtype to convert to
    place: Place


def load(
    groups: Sequence[tuple[Sequence[FileTensor], dtypes.Dtype | None]],
    sharding: Any = None,
    *,
    progress: Progress = None,
    backend: str = "mmap",
    checked: bool = True,
    threads: int | None = None,
    checkpoint: Checkpoint | None = None,
    merge: Merge | None = None,
) -> dict[str, Array]:
    """Load arrays by name and wait for their values.

    ``backend`` is for tensors on a single device; tensors on several devices are always read. ``checked`` refuses
    integers that JAX cannot represent, instead of wrapping around like JAX. Tensors that ``merge`` changes are read
    whole.
    """
    tensors = [tensor for parts, target in groups for tensor in _placed(parts, target, sharding)]
    loader = _Loader(backend, checked, threads, checkpoint, merge)
    meter = Meter(progress, sum(tensor.entry.nbytes for tensor in tensors))
    arrays: dict[str, Array] = {}
    started: deque[list[Array]] = deque()
    for group, nbytes in loader.run(tensors):
        arrays.update(group)
        started.append(list(group.values()))
        if len(started) > 1:
            jax.block_until_ready(started.popleft())
        meter.add(nbytes)
    jax.block_until_ready(list(started))
    return {tensor.entry.name: arrays[tensor.entry.name] for tensor in tensors}


def _placed(parts: Sequence[FileTensor], target: dtypes.Dtype | None, sharding: Any) -> list[PlacedTensor]:
    """Return the tensors to load as a dtype, after checking that JAX has the dtype and that their shardings fit."""
    if target is not None:
        jax_arrays.check_target(dtypes.array_dtype(target.number))
    name = None if target is None else target.name
    entries = entries_of(parts, target)
    if sharding is None:
        return [PlacedTensor(entry, name, None) for entry in entries]
    tensors = [PlacedTensor(entry, name, _place_of(entry, sharding)) for entry in entries]
    for entry, _, place in tensors:
        jax_arrays.check_fits(place, entry.shape, entry.name)
    return tensors


def _place_of(entry: Entry, sharding: Any) -> Place:
    """Return the place of a tensor."""
    if isinstance(sharding, Mapping):
        if entry.name not in sharding:
            raise ValueError(f"sharding has no entry for tensor {show(entry.name)}: use None for JAX's default device")
        sharding = sharding[entry.name]
    elif callable(sharding) and not jax_arrays.is_part_of_sharding(sharding):
        sharding = sharding(entry.name, jax.ShapeDtypeStruct(entry.shape, jax_arrays.jax_dtype(entry.dtype)))
    return jax_arrays.as_place(sharding)


class _Loader:
    """Load tensors group by group; see `load` for the arguments."""

    def __init__(
        self, backend: str, checked: bool, threads: int | None, checkpoint: Checkpoint | None, merge: Merge | None
    ) -> None:
        self._backend = backend
        self._reading = "pread" if backend == "mmap" else backend  # of tensors that are not mapped
        self._checked = checked
        self._threads = threads
        self._checkpoint = checkpoint
        self._merge = merge
        self._mappings: dict[WeightFile, Any] = {}

    def run(self, tensors: Sequence[PlacedTensor]) -> Iterator[tuple[dict[str, Array], int]]:
        """Yield groups of arrays by name, possibly still without values, with the bytes of each group."""
        group: list[PlacedTensor] = []
        size = 0
        for tensor in tensors:
            entry, _, place = tensor
            if jax_arrays.several_devices(place) and (entry.nbytes > GROUP or not place.is_fully_addressable):
                yield {entry.name: self._by_slices(tensor)}, entry.nbytes
                continue
            if group and size + entry.nbytes > GROUP:
                yield self._together(group), size
                group, size = [], 0
            group.append(tensor)
            size += entry.nbytes
        if group:
            yield self._together(group), size

    def _read(self, tensors: Sequence[PlacedTensor], backend: str) -> list[NumpyArray]:
        """Return the values of whole tensors with a common target."""
        merge, target = self._merge, tensors[0].target
        parts = [entry.tensor for entry, _, _ in tensors if merge is None or entry.name not in merge]
        loaded, _ = load_tensors(
            Tensors.of(parts), backend=backend, dtype=target, threads=self._threads, mappings=self._mappings
        )
        arrays = []
        for entry, _, _ in tensors:
            if merge is not None and entry.name in merge:
                loaded[entry.name] = merge.values(
                    entry.name, merge.target_row(entry.name, target), threads=self._threads
                )
            arrays.append(loaded[entry.name])
            if self._checked:
                jax_arrays.check_values(entry.name, arrays[-1])
        return arrays

    def _together(self, group: Sequence[PlacedTensor]) -> dict[str, Array]:
        """Return whole tensors as arrays by name.

        A tensor for one device is mapped, or read into memory if it is large and stays on a CPU: JAX then keeps this
        memory, in huge pages. XLA's own copy would take several times as long.
        """
        batches: dict[tuple[Any, str | None, str], list[PlacedTensor]] = {}
        for tensor in group:
            entry, target, place = tensor
            backend = self._reading
            if jax_arrays.several_devices(place):
                place = _SEVERAL
            elif self._backend == "mmap" and (entry.nbytes < POOLED_BELOW or not jax_arrays.on_cpu(place)):
                backend = "mmap"
            batches.setdefault((place, target, backend), []).append(tensor)
        arrays: dict[str, Array] = {}
        for (place, _, backend), tensors in batches.items():
            if place is _SEVERAL:
                arrays.update(self._on_several(tensors))
            else:
                copies = jax_arrays.put(self._read(tensors, backend), place, borrowed=backend == "mmap")
                arrays.update(zip((tensor.entry.name for tensor in tensors), copies, strict=True))
        return {tensor.entry.name: arrays[tensor.entry.name] for tensor in group}

    def _on_several(self, tensors: Sequence[PlacedTensor]) -> dict[str, Array]:
        """Put whole tensors on several devices."""
        arrays: dict[str, Array] = {}
        undivided: dict[str, tuple[NumpyArray, Place]] = {}
        for (entry, _, place), values in zip(tensors, self._read(tensors, self._reading), strict=True):
            slices = jax_arrays.slices(place, entry.shape)
            views = [values[_inside(0, bounds)] for bounds in slices]
            if jax_arrays.partly_aliased(views, place):
                copies = _put(list(zip(map(self._own, views), slices.values(), strict=True)))
                arrays[entry.name] = jax_arrays.joined(entry.shape, entry.dtype, place, copies)
            else:  # a small array would keep its whole pool alive
                undivided[entry.name] = values.copy() if values.nbytes < POOLED_BELOW else values, place
        arrays.update(zip(undivided, jax_arrays.put_each([*undivided.values()]), strict=True))
        return arrays

    def _own(self, view: NumpyArray) -> NumpyArray:
        """Return a copy of the values."""
        return astype(view, view.dtype, threads=self._threads)

    def _by_slices(self, tensor: PlacedTensor) -> Array:
        """Load a large or partly local tensor, one range of its first axis after another."""
        entry, _, place = tensor
        pieces: list[Array] = []
        started: list[Array] = []
        for band in self._bands(tensor):
            if self._checked:
                for values, _ in band:
                    jax_arrays.check_values(entry.name, values)
            jax.block_until_ready(started)
            started = _put(band)
            pieces += started
            del band  # frees host memory
        return jax_arrays.joined(entry.shape, entry.dtype, place, pieces)

    def _bands(self, tensor: PlacedTensor) -> Iterator[list[tuple[NumpyArray, list[Any]]]]:
        """Yield the values of each range of the first axis, divided into slices with their devices.

        If this process holds all columns of a range, or the tensor is packed, its rows are read together and each byte
        once. Otherwise slices are copied from the mapped file, which touches only their pages.
        """
        (entry, target, place), (name, file, index) = tensor, tensor.entry.tensor
        if (self._merge is not None and name in self._merge) or _only_whole(file, index, target):
            values: Any = self._read([tensor], self._reading)[0]
            together = True
        else:
            if self._checkpoint is None:
                values = slice_of(file, index, OpenRequest(), target, None)
            else:
                values = self._checkpoint.get_slice(name, dtype=target)
            together = file.table.is_quantized(index)
        bands: dict[Bounds, dict[Bounds, list[Any]]] = {}
        for bounds, devices in jax_arrays.slices(place, entry.shape).items():
            bands.setdefault(bounds[:1], {})[bounds] = devices
        for rows, slices in bands.items():
            shape = (*(stop - start for start, stop in rows), *entry.shape[1:])
            if together or jax_arrays.covered(slices, shape):
                block = values[_items(rows)]
                views = [block[_inside(len(rows), bounds)] for bounds in slices]
                if jax_arrays.partly_aliased(views, place):
                    views = list(map(self._own, views))
                yield list(zip(views, slices.values(), strict=True))
            else:
                view = load_tensors(Tensors.of([entry.tensor]), backend="mmap", mappings=self._mappings)[0][name]
                for bounds, devices in slices.items():
                    yield [(astype(view[_items(bounds)], entry.dtype, threads=self._threads), devices)]


# The place of all batches of tensors on several devices.
_SEVERAL = object()


def _put(slices: Sequence[tuple[NumpyArray, list[Any]]]) -> list[Array]:
    """Start to copy slices to all their devices; the caller should drop the slices."""
    return jax_arrays.put_each([(values, device) for values, devices in slices for device in devices])


def _items(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _inside(axes: int, bounds: Bounds) -> tuple[Any, ...]:
    """Return the index of a slice inside its range of the first axes; the ellipsis keeps a scalar an array."""
    return (*[slice(None)] * axes, *_items(bounds[axes:]), Ellipsis)


def _only_whole(file: WeightFile, index: int, target: str | None) -> bool:
    """Return whether the values of a tensor can only be read all at once."""
    packed = file.table.packed.get(index)
    if packed is not None:
        return len(packed.packing.shape) < 2 or not (len(packed.packing.shape) > 2 or rows_apart(packed.packing))
    return target is not None and file.table.row(index).packed


def load_checkpoint(
    path: Paths, *, sharding: Any, threads: int | None, progress: Progress, **selection: Any
) -> dict[str, Array]:
    """Load the tensors that `selecting` selects."""
    check_threads(threads)
    with selecting(path, **selection) as (checkpoint, merge, names, selected):
        groups = [(tensors_of(checkpoint, members), target) for members, target in selected]
        arrays = load(groups, sharding, progress=progress, threads=threads, checkpoint=checkpoint, merge=merge)
        return {name: arrays[name] for name in names}


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
