"""Convert NumPy arrays to JAX and back: on one device or several, and never over memory that may still change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..adapters.merge import Merge
from ..core import cast, dtypes, memory, opening, quantized_tensor, registry, restore, weight_file
from ..core.arrays import Array as NumpyArray
from ..core.arrays import check_mapping, not_an_array
from ..core.checkpoint import Checkpoint, slice_of, tensors_of
from ..core.load import automatic, load_tensors, parse_target
from ..core.progress import Meter, Progress
from ..core.tensors import Entry, FileTensor, Lazy, Tensors, entries_of, materialize
from ..core.text import clip, error_about, not_installed, printable, show, tensor_named
from ..errors import RangeError, SafetensorError, UnsupportedError
from .checkpoints import selecting

try:
    import jax
    import jax.core
    import jax.numpy as jnp
except ImportError as error:
    text = "safeload.jax needs JAX, which is not installed: pip install jax"
    raise not_installed(error, text, "jax") from error.__cause__

Array: TypeAlias = jax.Array
# The place of an array: a sharding or a device (which has no type for pyright); None for JAX's default device.
Place: TypeAlias = jax.sharding.Sharding | Any
# Start and stop along each axis of a slice.
Bounds: TypeAlias = tuple[tuple[int, int], ...]

# Below this size `jnp.array` is faster than a transfer.
_COPIED_BELOW = 64 << 10
_NBYTES = attrgetter("nbytes")
# Values of JAX's transfer guard with which `jnp.array` may copy from the host.
_UNGUARDED = (None, "allow")
# On a CPU, XLA aliases host memory with this alignment.
_ALIGNMENT = 64


def jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return JAX's dtype for an array: without ``jax_enable_x64`` it has no 64-bit types."""
    narrowed: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return narrowed


def check_target(target: dtypes.Dtype | None) -> None:
    """Refuse a target dtype that JAX lacks."""
    dtype = None if target is None else dtypes.array_dtype(target.number)
    if dtype is not None and jax_dtype(dtype) != dtype:
        raise UnsupportedError(f'JAX has {dtype} only after jax.config.update("jax_enable_x64", True)')


def check_values(name: str, array: NumpyArray) -> None:
    """Refuse integers that JAX would wrap around."""
    narrow = jax_dtype(array.dtype)
    if array.dtype.kind not in "iu" or narrow == array.dtype or not array.size:
        return
    limits = np.iinfo(narrow)
    for value in (int(array.min()), int(array.max())):
        if not limits.min <= value <= limits.max:
            text = (
                f": JAX would make it {narrow}, which cannot represent {value}: set "
                'jax.config.update("jax_enable_x64", True), or skip the tensor with drop='
            )
            raise error_about(RangeError, text, tensor=name)


def check_fits(place: Place, shape: tuple[int, ...], name: str) -> None:
    """Refuse a sharding that does not fit a tensor, before anything is read."""
    if not isinstance(place, jax.sharding.Sharding):
        return
    check_rank = getattr(place, "check_compatible_aval", None)  # `shard_shape` ignores undivided axes
    try:
        if check_rank is not None:
            check_rank(shape)
        place.shard_shape(shape)
    except (ValueError, IndexError) as error:
        spec = getattr(place, "spec", None)
        reason = f"{place} has more axes" if isinstance(error, IndexError) else str(error)
        if spec is not None and len(spec) > len(shape):
            axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
            reason = (
                f"{spec} is for at least {len(spec)} axes, the tensor has {axes}. As sharding=, pass a mapping by "
                "name, or a function of name and shape, to choose a spec for each tensor"
            )
        raise ValueError(f"tensor {show(name)} {show(list(shape))}: {reason}") from None


def slices(place: Any, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    """Return this process's devices for each slice of an array; the sharding must fit, see `check_fits`."""
    devices: dict[Bounds, list[Any]] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return devices


# ---- to JAX ----


def put(arrays: Sequence[NumpyArray], place: Place, *, borrowed: bool) -> list[Array]:
    """Start to copy host arrays to one device; until they are ready, they must not change.

    On a CPU, XLA uses aligned memory as it is, even if ``may_alias`` is False. Such memory is copied if it is borrowed.
    It is also copied below `POOLED_BELOW` bytes, because a small array would keep a whole pool alive.

    Memory that is ``borrowed`` may change later.
    """
    if not arrays or (place is None and max(map(_NBYTES, arrays)) < _COPIED_BELOW):
        return _copies(arrays)
    small = [k for k, array in enumerate(arrays) if array.nbytes < _COPIED_BELOW] if place is None else []
    copies = dict(zip(small, _copies([arrays[k] for k in small]), strict=True))
    large = [k for k in range(len(arrays)) if k not in copies]
    with jax.ensure_compile_time_eval():  # arrays have values even inside a traced function
        copies.update(zip(large, jax.device_put([arrays[k] for k in large], place), strict=True))
        if next(iter(copies[large[0]].devices())).platform == "cpu":
            for k in large:
                array = arrays[k]
                must_own = array.nbytes and (borrowed or array.nbytes < memory.POOLED_BELOW)
                if must_own and copies[k].unsafe_buffer_pointer() == array.__array_interface__["data"][0]:
                    copies[k] = jax.device_put(array.copy(), place)
    return [copies[k] for k in range(len(arrays))]


def _copies(arrays: Sequence[NumpyArray]) -> list[Array]:
    if not arrays:
        return []
    if jax.config.jax_transfer_guard_host_to_device in _UNGUARDED:
        first = jnp.array(arrays[0])
        if not isinstance(first, jax.core.Tracer):
            return [first, *map(jnp.array, arrays[1:])]
    # Inside a traced function arrays would have no values. The guard does not apply: the caller asked for the copies.
    with jax.ensure_compile_time_eval(), jax.transfer_guard_host_to_device("allow"):
        return list(map(jnp.array, arrays))


def on_cpu(place: Place) -> bool:
    """Return whether a place is a CPU, which shares the host's memory."""
    if isinstance(place, jax.sharding.Sharding):
        place = next(iter(place.device_set))
    device = place or jax.config.jax_default_device or jax.local_devices()[0]
    return bool(getattr(device, "platform", device) == "cpu")


def partly_aliased(views: Sequence[NumpyArray], place: Any) -> bool:
    """Return whether only some slices of an array would alias its memory (see `put`), and keep it all alive."""
    if next(iter(place.device_set)).platform != "cpu":
        return False
    aligned = [view.flags.c_contiguous and view.__array_interface__["data"][0] % _ALIGNMENT == 0 for view in views]
    return any(aligned) and not all(aligned)


def joined(entry: Entry, place: Any, slices: Sequence[Array]) -> Array:
    """Join the slices of a tensor on devices into an array."""
    return jax.make_array_from_single_device_arrays(entry.shape, place, slices, dtype=jax_dtype(entry.dtype))


# ---- from JAX ----


def to_write(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of the safetensors writer; JAX arrays are copied to the host one at a time."""
    check_mapping(tensors, "tensors")
    return {name: value_of(name, value) for name, value in tensors.items()}


def value_of(name: str, value: Any) -> Any:
    """Return the writer's input for a JAX or NumPy array."""
    if isinstance(value, (np.ndarray, np.generic, quantized_tensor.QuantizedTensor)):
        return value
    if not isinstance(value, jax.Array):
        if hasattr(value, "__jax_array__"):  # variables of flax.nnx
            value = value.__jax_array__()
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(f"tensor {show(name)} is a jax.ShapeDtypeStruct, which has no values")
        if not isinstance(value, jax.Array):
            raise not_an_array(tensor_named(name), value, "a JAX or NumPy array", safetensors=True)
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"tensor {show(name)} is traced: save it outside of jit, grad and vmap")
    if value.is_deleted():
        raise ValueError(f"tensor {show(name)} has been deleted or donated")
    if not isinstance(value.dtype, np.dtype):
        raise TypeError(f"tensor {show(name)} holds random keys: save their data with jax.random.key_data(keys)")
    devices = value.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return np.asarray(value)  # shares memory
    if not value.is_fully_addressable and not value.is_fully_replicated:
        raise ValueError(
            f"tensor {show(name)} is sharded across processes: gather it with "
            "jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
        )
    return Lazy(value.dtype, value.shape, lambda: to_numpy(value))


def to_numpy(array: Any) -> NumpyArray:
    """Return the values of an array in C order; no copy stays on the host."""
    if array.is_fully_replicated:
        return np.ascontiguousarray(_fetched(array.addressable_data(0)))
    whole = np.empty(array.shape, array.dtype)
    shards = {str(shard.index): shard for shard in array.addressable_shards}  # equal shards once
    for shard in shards.values():
        whole[shard.index] = _fetched(shard.data)
    return whole


def _fetched(array: Any) -> NumpyArray:
    """Return the values of an array on one device, through a temporary: JAX caches `numpy.asarray` in the array."""
    array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    values: NumpyArray = jax.device_get(array)  # `jax.transfer_guard` may forbid implicit transfers
    return values


# ---- loading ----


# Bytes of arrays to load together. Host memory holds two groups at a time: the next is read while a group is copied
# to its devices. A larger tensor is read alone and, if several devices hold it, in the sharding's ranges of its first
# axis.
GROUP = 128 << 20

# The `sharding` argument of `load_file` and `load_checkpoint`.
Sharding: TypeAlias = Place | Mapping[str, Place] | Callable[[str, Any], Place]


class PlacedTensor(NamedTuple):
    """A tensor to load."""

    entry: Entry
    target: str | None  # name of the dtype to convert to
    place: Place = None
    divided: bool = False  # True if it goes to several devices
    sliced: bool = False  # True if it is read slice by slice: it is large, or not all devices are this process's


def load(
    groups: Sequence[tuple[Iterable[FileTensor], Any]],
    sharding: Any = None,
    *,
    progress: Progress = None,
    backend: str = "mmap",
    checked: bool = True,
    threads: int | None = None,
    checkpoint: Checkpoint | None = None,
    merge: Merge | None = None,
) -> dict[str, Array]:
    """Load arrays by name and wait for their values; a group is tensors and their target dtype.

    ``backend`` is for tensors on a single device; tensors on several devices are always read. ``checked`` refuses
    integers that JAX cannot represent, instead of wrapping around like JAX. Tensors that ``merge`` changes are read
    whole.
    """
    tensors = [tensor for parts, dtype in groups for tensor in _placed(parts, dtype, sharding)]
    if backend == "auto":  # decided once: a tensor is mapped only if JAX copies it
        backend, _, threads = automatic(Tensors.of(tensor.entry.tensor for tensor in tensors), threads)
    loader = _Loader(backend, checked, threads, checkpoint, merge)
    meter = Meter(progress, sum(tensor.entry.nbytes for tensor in tensors))
    arrays: dict[str, Array] = {}
    started: list[Array] = []
    for group, nbytes in loader.run(tensors):
        arrays.update(group)
        jax.block_until_ready(started)
        started = list(group.values())
        meter.add(nbytes)
    jax.block_until_ready(started)
    return {tensor.entry.name: arrays[tensor.entry.name] for tensor in tensors}


def _placed(parts: Iterable[FileTensor], dtype: Any, sharding: Any) -> list[PlacedTensor]:
    """Return the tensors to load as a dtype, after checking that JAX has the dtype and that their shardings fit."""
    target = parse_target(dtype)
    check_target(target)
    name, tensors = None if target is None else target.name, []
    for entry in entries_of(parts, target):
        place: Any = None if sharding is None else _place_of(entry, sharding)
        divided = isinstance(place, jax.sharding.Sharding) and len(place.device_set) > 1
        sliced = divided and (entry.nbytes > GROUP or not place.is_fully_addressable)
        tensors.append(PlacedTensor(entry, name, place, divided, sliced))
    return tensors


def _place_of(entry: Entry, sharding: Any) -> Place:
    """Return the place of a tensor, after checking that the tensor fits it."""
    part_of_sharding = (jax.sharding.Mesh, jax.sharding.PartitionSpec, type)  # some are callable
    if isinstance(sharding, Mapping):
        if entry.name not in sharding:
            raise ValueError(f"sharding has no entry for tensor {show(entry.name)}: use None for JAX's default device")
        sharding = sharding[entry.name]
    elif callable(sharding) and not isinstance(sharding, part_of_sharding):
        sharding = sharding(entry.name, jax.ShapeDtypeStruct(entry.shape, jax_dtype(entry.dtype)))
    if sharding is not None and not isinstance(sharding, (jax.sharding.Sharding, jax.Device)):
        message = f"sharding must be a jax.sharding.Sharding, a device or None, got {show(sharding)}"
        if isinstance(sharding, part_of_sharding):
            message += ": combine mesh and spec with jax.sharding.NamedSharding(mesh, spec)"
        raise TypeError(message)
    check_fits(sharding, entry.shape, entry.name)
    return sharding


@dataclass
class _Loader:
    """Load tensors group by group; see `load` for the arguments."""

    backend: str
    checked: bool
    threads: int | None
    checkpoint: Checkpoint | None
    merge: Merge | None
    mappings: dict[weight_file.WeightFile, Any] = field(default_factory=dict)

    def run(self, tensors: Sequence[PlacedTensor]) -> Iterator[tuple[dict[str, Array], int]]:
        """Yield groups of arrays by name, possibly still without values, with the bytes of each group."""
        for group in memory.windows(tensors, GROUP, lambda tensor: tensor.entry.nbytes, attrgetter("sliced")):
            if group[0].sliced:
                yield from (({tensor.entry.name: self._by_slices(tensor)}, tensor.entry.nbytes) for tensor in group)
            else:
                yield self._together(group), sum(tensor.entry.nbytes for tensor in group)

    def _read(self, tensors: Sequence[PlacedTensor], *, mapped: bool = False) -> list[NumpyArray]:
        """Return the values of whole tensors with a common target."""
        merge, target = self.merge, tensors[0].target
        loaded, _ = load_tensors(
            Tensors.of([tensor.entry.tensor for tensor in tensors if not merge or tensor.entry.name not in merge]),
            backend="mmap" if mapped else "pread" if self.backend == "mmap" else self.backend,
            dtype=target,
            threads=self.threads,
            mappings=self.mappings,
        )
        arrays = []
        for tensor in tensors:
            name = tensor.entry.name
            if merge and name in merge:
                loaded[name] = merge.values(name, merge.target_row(name, target), threads=self.threads)
            arrays.append(loaded[name])
            if self.checked:
                check_values(name, arrays[-1])
        return arrays

    def _together(self, group: Sequence[PlacedTensor]) -> dict[str, Array]:
        """Return whole tensors as arrays by name.

        A tensor for one device is mapped, or read into memory if it is large and stays on a CPU: JAX then keeps this
        memory, in huge pages. XLA's own copy would take several times as long.
        """
        batches: dict[tuple[bool, Place, bool, str | None], list[PlacedTensor]] = {}
        for tensor in group:
            place = None if tensor.divided else tensor.place
            mapped = self.backend == "mmap" and not tensor.divided
            mapped = mapped and (tensor.entry.nbytes < memory.POOLED_BELOW or not on_cpu(place))
            batches.setdefault((tensor.divided, place, mapped, tensor.target), []).append(tensor)
        arrays: dict[str, Array] = {}
        for (divided, place, mapped, _), tensors in batches.items():
            if divided:
                arrays.update(self._on_several(tensors))
            else:
                copies = put(self._read(tensors, mapped=mapped), place, borrowed=mapped)
                arrays.update(zip((tensor.entry.name for tensor in tensors), copies, strict=True))
        return arrays

    def _on_several(self, tensors: Sequence[PlacedTensor]) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        undivided: dict[str, tuple[NumpyArray, Place]] = {}
        for (entry, _, place, *_), values in zip(tensors, self._read(tensors), strict=True):
            parts = slices(place, entry.shape)
            views = [values[_inside(0, bounds)] for bounds in parts]
            if partly_aliased(views, place):
                copies = [cast.astype(view, view.dtype, threads=self.threads) for view in views]
                arrays[entry.name] = joined(entry, place, _put(zip(copies, parts.values(), strict=True)))
            else:  # a small array would keep its whole pool alive
                undivided[entry.name] = values.copy() if values.nbytes < memory.POOLED_BELOW else values, place
        whole = _put((values, [place]) for values, place in undivided.values())
        return {**arrays, **dict(zip(undivided, whole, strict=True))}

    def _by_slices(self, tensor: PlacedTensor) -> Array:
        """Load a large or partly local tensor, one range of its first axis after another."""
        pieces: list[Array] = []
        started: list[Array] = []
        for band in self._bands(tensor):
            if self.checked:
                for values, _ in band:
                    check_values(tensor.entry.name, values)
            jax.block_until_ready(started)
            started = _put(band)
            pieces += started
            del band  # frees host memory
        return joined(tensor.entry, tensor.place, pieces)

    def _bands(self, tensor: PlacedTensor) -> Iterator[list[tuple[NumpyArray, list[Any]]]]:
        """Yield the values of each range of the first axis, divided into slices with their devices.

        If this process holds all columns of a range, or the tensor is packed, its rows are read together and each byte
        once. Otherwise slices are copied from the mapped file, which touches only their pages.
        """
        (entry, target, place, *_), (name, file, index) = tensor, tensor.entry.tensor
        packed = file.table.packed.get(index)
        only_whole = target is not None and file.table.row(index).packed
        if packed is not None:
            only_whole = len(entry.shape) < 2 or (len(entry.shape) == 2 and not restore.rows_apart(packed.packing))
        if only_whole or (self.merge and name in self.merge):
            values: Any = self._read([tensor])[0]
            together = True
        else:
            values = slice_of(file, index, registry.OpenRequest(), target, self.checkpoint)
            together = file.table.is_quantized(index)
        bands: dict[Bounds, dict[Bounds, list[Any]]] = {}
        for bounds, devices in slices(place, entry.shape).items():
            bands.setdefault(bounds[:1], {})[bounds] = devices
        for rows, parts in bands.items():
            size = math.prod(stop - start for start, stop in rows) * math.prod(entry.shape[1:])
            if together or size == sum(math.prod(stop - start for start, stop in bounds) for bounds in parts):
                block = values[_items(rows)]
                views = [block[_inside(len(rows), bounds)] for bounds in parts]
                if partly_aliased(views, place):
                    views = [cast.astype(view, view.dtype, threads=self.threads) for view in views]
                yield list(zip(views, parts.values(), strict=True))
            else:
                view = load_tensors(Tensors.of([entry.tensor]), backend="mmap", mappings=self.mappings)[0][name]
                for bounds, devices in parts.items():
                    yield [(cast.astype(view[_items(bounds)], entry.dtype, threads=self.threads), devices)]


def _put(slices: Iterable[tuple[NumpyArray, Sequence[Any]]]) -> list[Array]:
    """Start to copy arrays to each of their devices or shardings; the caller gives the arrays up."""
    pairs = [(values, place) for values, places in slices for place in places]
    with jax.ensure_compile_time_eval():
        results: list[Array] = jax.device_put([values for values, _ in pairs], [place for _, place in pairs])
    return results


def _items(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _inside(axes: int, bounds: Bounds) -> tuple[Any, ...]:
    """Return the index of a slice inside its range of the first axes; the ellipsis keeps a scalar an array."""
    return (*[slice(None)] * axes, *_items(bounds[axes:]), Ellipsis)


def load_checkpoint(
    path: opening.Paths, *, sharding: Any, threads: int | None, progress: Progress, **selection: Any
) -> dict[str, Array]:
    """Load the tensors that `selecting` selects."""
    memory.check_threads(threads)
    with selecting(path, **selection) as (checkpoint, merge, names, selected):
        groups = [(tensors_of(checkpoint, members), dtype) for members, dtype in selected]
        arrays = load(groups, sharding, progress=progress, threads=threads, checkpoint=checkpoint, merge=merge)
        return {name: arrays[name] for name in names}


def copied(arrays: Mapping[str, NumpyArray]) -> dict[str, Array]:
    """Return JAX arrays that share no memory with these NumPy arrays."""
    copies = put([*arrays.values()], None, borrowed=True)
    for copy in copies:
        copy.block_until_ready()
    return dict(zip(arrays, copies, strict=True))


def as_numpy(arrays: Mapping[str, Any]) -> dict[str, NumpyArray]:
    """Return NumPy arrays that may share memory with these JAX arrays."""
    return {name: materialize(value) for name, value in to_write(arrays).items()}


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
        return put([arrays[part[0]]], None, borrowed=False)[0]

    def tensors(
        self, parts: Iterable[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, NumpyArray]]
    ) -> dict[str, Array]:
        check_target(target)
        return copied(read())

    def item(self, file: weight_file.WeightFile, index: int, key: Any, select: Callable[[Any], NumpyArray]) -> Array:
        return put([select(key)], None, borrowed=False)[0]
