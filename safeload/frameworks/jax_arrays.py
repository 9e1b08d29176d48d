"""Convert NumPy arrays to JAX and back: on one device or several, and never over memory that may still change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..base.arrays import Array as NumpyArray
from ..base.arrays import check_mapping, not_an_array
from ..base.runtime import not_installed
from ..base.text import error_about, show, tensor_named
from ..engine.codes.quantized_tensor import QuantizedTensor
from ..engine.read.tensors import Lazy
from ..engine.run.memory import POOLED_BELOW
from ..errors import RangeError, UnsupportedError

try:
    import jax as jax  # the other module imports it from here, so that both share the error below
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
# Values of JAX's transfer guard with which `jnp.array` may copy from the host.
_UNGUARDED = (None, "allow")
# On a CPU, XLA aliases host memory with this alignment.
_ALIGNMENT = 64


def as_place(place: Any) -> Place:
    """Check the type of a place."""
    if place is None or isinstance(place, (jax.sharding.Sharding, jax.Device)):
        return place
    message = f"sharding must be a jax.sharding.Sharding, a device or None, got {show(place)}"
    if is_part_of_sharding(place):
        message += ": combine mesh and spec with jax.sharding.NamedSharding(mesh, spec)"
    raise TypeError(message)


def is_part_of_sharding(value: Any) -> bool:
    """Return whether a value is a component of shardings, some of which are callable."""
    return isinstance(value, (jax.sharding.Mesh, jax.sharding.PartitionSpec, type))


def jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return JAX's dtype for an array: without ``jax_enable_x64`` it has no 64-bit types."""
    narrowed: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return narrowed


def check_target(dtype: np.dtype[Any]) -> None:
    """Refuse a target dtype that JAX lacks."""
    if jax_dtype(dtype) != dtype:
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


def several_devices(place: Place) -> bool:
    """Return whether a place has several devices."""
    return isinstance(place, jax.sharding.Sharding) and len(place.device_set) > 1


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


def covered(slices: Iterable[Bounds], shape: tuple[int, ...]) -> bool:
    """Return whether non-overlapping slices cover an array."""
    return sum(math.prod(stop - start for start, stop in bounds) for bounds in slices) == math.prod(shape)


# ---- to JAX ----


def put(arrays: Sequence[NumpyArray], place: Place, *, borrowed: bool) -> list[Array]:
    """Start to copy host arrays to one device; until they are ready, they must not change.

    On a CPU, XLA uses aligned memory as it is, even if ``may_alias`` is False. Such memory is copied if it is borrowed.
    It is also copied below `POOLED_BELOW` bytes, because a small array would keep a whole pool alive.

    Memory that is ``borrowed`` may change later.
    """
    small = [k for k, array in enumerate(arrays) if array.nbytes < _COPIED_BELOW] if place is None else []
    if len(small) == len(arrays):
        return _copies(arrays)
    copies = dict(zip(small, _copies([arrays[k] for k in small]), strict=True))
    large = [k for k in range(len(arrays)) if k not in copies]
    with jax.ensure_compile_time_eval():  # arrays have values even inside a traced function
        copies.update(zip(large, jax.device_put([arrays[k] for k in large], place), strict=True))
        if next(iter(copies[large[0]].devices())).platform == "cpu":
            for k in large:
                array = arrays[k]
                if not array.nbytes or not (borrowed or array.nbytes < POOLED_BELOW):
                    continue
                if copies[k].unsafe_buffer_pointer() == array.__array_interface__["data"][0]:
                    copies[k] = jax.device_put(array.copy(), place)
    return [copies[k] for k in range(len(arrays))]


def _copies(arrays: Sequence[NumpyArray]) -> list[Array]:
    """Copy arrays to JAX's default device."""
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


def put_each(arrays: Sequence[tuple[NumpyArray, Any]]) -> list[Array]:
    """Start to copy each array to its device, or divide it among several; the caller gives the arrays up."""
    with jax.ensure_compile_time_eval():
        results: list[Array] = jax.device_put([values for values, _ in arrays], [place for _, place in arrays])
    return results


def partly_aliased(views: Sequence[NumpyArray], place: Any) -> bool:
    """Return whether only some slices of an array would alias its memory: one alias would keep it all alive.

    See `put` for the conditions of aliasing.
    """
    if next(iter(place.device_set)).platform != "cpu":
        return False
    aligned = [view.flags.c_contiguous and view.__array_interface__["data"][0] % _ALIGNMENT == 0 for view in views]
    return any(aligned) and not all(aligned)


def joined(shape: tuple[int, ...], dtype: np.dtype[Any], place: Any, slices: Sequence[Array]) -> Array:
    """Join slices on devices into an array."""
    result: Array = jax.make_array_from_single_device_arrays(shape, place, slices, dtype=jax_dtype(dtype))
    return result


# ---- from JAX ----


def to_write(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of the safetensors writer; JAX arrays are copied to the host one at a time."""
    check_mapping(tensors, "tensors")
    return {name: _to_write(name, value) for name, value in tensors.items()}


def _to_write(name: str, value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic, QuantizedTensor)):
        return value
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):  # variables of flax.nnx
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
    copied = set()
    for shard in array.addressable_shards:
        if (bounds := str(shard.index)) not in copied:
            copied.add(bounds)
            whole[shard.index] = _fetched(shard.data)
    return whole


def _fetched(array: Any) -> NumpyArray:
    """Return the values of an array on one device, through a temporary: JAX caches `numpy.asarray` in the array."""
    array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
    values: NumpyArray = jax.device_get(array)  # `jax.transfer_guard` may forbid implicit transfers
    return values
