"""Arrays of JAX from numpy's and back: on one device or several, and never over memory that may still change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..base.arrays import Array as NumpyArray
from ..base.arrays import check_mapping, not_an_array
from ..base.text import show
from ..engine.codes.quantized_tensor import QuantizedTensor
from ..engine.read.lazy import Lazy
from ..engine.run.memory import POOLED_BELOW
from ..errors import RangeError, UnsupportedError
from .absent import not_installed

try:
    import jax
    import jax.core
    import jax.numpy as jnp
except ImportError as error:
    raise not_installed(error, "jax", "JAX") from error.__cause__

Array: TypeAlias = jax.Array
# Where an array goes: a sharding or a device, for which pyright finds no type; None for JAX's default device.
Place: TypeAlias = jax.sharding.Sharding | Any

# Up to this size `jnp.array` takes less time than a transfer.
_COPIED_BELOW = 64 << 10
# XLA uses memory of the host at multiples of this on a CPU.
_ALIGNMENT = 64


class Slice(NamedTuple):
    """What one or several devices hold of an array.

    Attributes:
        bounds: start and stop along each axis.
        devices: the devices of this process that hold it.
    """

    bounds: tuple[tuple[int, int], ...]
    devices: list[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its number of elements along each axis."""
        return tuple(stop - start for start, stop in self.bounds)


def as_place(place: Any) -> Place:
    """Checks the place of an array.

    Raises:
        TypeError: neither a sharding nor a device.
    """
    if place is None or isinstance(place, (jax.sharding.Sharding, jax.Device)):
        return place
    what = f"sharding must be a jax.sharding.Sharding, a device or None, not {show(place)}"
    if is_part_of_sharding(place):
        what += ": jax.sharding.NamedSharding(mesh, spec) makes one of mesh and spec"
    raise TypeError(what)


def is_part_of_sharding(value: Any) -> bool:
    """Whether a value is what shardings are made of: some of these can be called."""
    return isinstance(value, (jax.sharding.Mesh, jax.sharding.PartitionSpec, type))


def abstract(shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array that does not exist yet."""
    return jax.ShapeDtypeStruct(shape, jax_dtype(dtype))


def jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that JAX gives an array: unless ``jax_enable_x64`` is set it has no types of 64 bits."""
    narrowed: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return narrowed


def check_target(dtype: np.dtype[Any]) -> None:
    """Refuses a dtype that the caller asks for and JAX does not have.

    Raises:
        UnsupportedError: float64 without ``jax_enable_x64``.
    """
    if jax_dtype(dtype) != dtype:
        raise UnsupportedError(f'JAX has {dtype} only with jax.config.update("jax_enable_x64", True)')


def check_values(name: str, array: NumpyArray) -> None:
    """Refuses integers that JAX would wrap around.

    Raises:
        RangeError: a value of 64 bits, and ``jax_enable_x64`` is not set.
    """
    narrow = jax_dtype(array.dtype)
    if array.dtype.kind not in "iu" or narrow == array.dtype or not array.size:
        return
    limits = np.iinfo(narrow)
    for value in (int(array.min()), int(array.max())):
        if not limits.min <= value <= limits.max:
            raise RangeError(
                f"tensor {show(name)}: JAX would make it {narrow}, which cannot represent {value}: set "
                'jax.config.update("jax_enable_x64", True), or leave it out with drop=',
                tensor=name,
            )


def several_devices(place: Place) -> bool:
    """Whether an array may be divided among devices, or copied to several."""
    return isinstance(place, jax.sharding.Sharding) and len(place.device_set) > 1


def all_here(place: Any) -> bool:
    """Whether all devices of a sharding belong to this process."""
    here: bool = place.is_fully_addressable
    return here


def check_fits(place: Place, shape: tuple[int, ...], name: str) -> None:
    """Refuse a sharding that cannot hold a tensor, before anything is read.

    Raises:
        ValueError: the sharding has more axes than the tensor, or does not divide its axes evenly.
    """
    if not isinstance(place, jax.sharding.Sharding):
        return
    check_rank = getattr(place, "check_compatible_aval", None)  # `shard_shape` ignores axes that are not divided
    try:
        if check_rank is not None:
            check_rank(shape)
        place.shard_shape(shape)
    except (ValueError, IndexError) as error:
        raise _misfit(place, shape, name, error) from None


def _misfit(place: Any, shape: tuple[int, ...], name: str, error: Exception) -> ValueError:
    """Return the error for a sharding that does not fit a tensor, with the tensor, its shape and the spec."""
    spec = getattr(place, "spec", None)
    reason = str(error)
    if spec is not None and len(spec) > len(shape):
        axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
        reason = (
            f"{spec} is for at least {len(spec)} axes, the tensor has {axes}. Pass sharding= a mapping of names, or a "
            "function of name and shape, that returns a spec for each tensor"
        )
    elif isinstance(error, IndexError):
        reason = f"{place} has more axes"
    return ValueError(f"tensor {show(name)} {show(list(shape))}: {reason}")


def slices(place: Any, shape: tuple[int, ...]) -> list[Slice]:
    """Return the distinct slices of an array on this process's devices; the sharding must fit, see `check_fits`."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [Slice(bounds, holders) for bounds, holders in devices.items()]


def covered(parts: Sequence[Slice], shape: tuple[int, ...]) -> bool:
    """Whether slices that do not overlap are together all of an array."""
    return sum(math.prod(part.shape) for part in parts) == math.prod(shape)


# ---- to JAX ----


def put(arrays: Sequence[NumpyArray], place: Place, *, borrowed: bool) -> list[Array]:
    """Copies arrays to one device, or starts to; until `wait` returns, they must not change.

    XLA uses memory that is aligned for an array on a CPU, even if ``may_alias`` is False. Such arrays are copied first
    if they are borrowed, and if they have less than `POOLED_BELOW`: they may share a pool, which a single one would
    keep alive.

    Args:
        arrays: in the memory of the host.
        place: a sharding of one device, a device, or None.
        borrowed: whether their memory may change later.
    """
    with jax.ensure_compile_time_eval():  # arrays with values also where a function is traced
        made, large = _put(arrays, place)
        if not large or next(iter(made[large[0]].devices())).platform != "cpu":
            return made
        for k in large:
            array = arrays[k]
            if not array.nbytes or not (borrowed or array.nbytes < POOLED_BELOW):
                continue
            if made[k].unsafe_buffer_pointer() == array.__array_interface__["data"][0]:
                made[k] = jax.device_put(array.copy(), place)
    return made


def on_cpu(place: Place) -> bool:
    """Whether a device is a CPU, whose memory is that of the host."""
    if isinstance(place, jax.sharding.Sharding):
        place = next(iter(place.device_set))
    device = place or jax.config.jax_default_device or jax.local_devices()[0]
    return bool(getattr(device, "platform", device) == "cpu")


def _put(arrays: Sequence[NumpyArray], place: Place) -> tuple[list[Any], Sequence[int]]:
    """The arrays on the device, and the positions of those that may be over the memory of theirs."""
    made: list[Any] = [None] * len(arrays)
    large: Sequence[int] = range(len(arrays))
    if place is None:
        large = [k for k, array in enumerate(arrays) if array.nbytes >= _COPIED_BELOW]
        # Guards refuse transfers that are not asked for: this one is.
        with jax.transfer_guard_host_to_device("allow"):
            for k, array in enumerate(arrays):
                if array.nbytes < _COPIED_BELOW:
                    made[k] = jnp.array(array)
    if large:
        for k, moved in zip(large, jax.device_put([arrays[k] for k in large], place), strict=True):
            made[k] = moved
    return made, large


def put_on_several(arrays: Sequence[NumpyArray], places: Sequence[Any]) -> list[Array]:
    """Divides arrays among devices, or starts to; the caller gives them up."""
    # One that is part of a pool would keep all of it alive.
    own = [array.copy() if array.nbytes < POOLED_BELOW else array for array in arrays]
    with jax.ensure_compile_time_eval():
        made: list[Array] = jax.device_put(own, list(places))
    return made


def partly_aliased(views: Sequence[NumpyArray], place: Any) -> bool:
    """Whether some slices of an array would be over its memory, and others copied: a part would keep all of it alive.

    See `put`.
    """
    if next(iter(place.device_set)).platform != "cpu":
        return False
    aligned = [view.flags.c_contiguous and view.__array_interface__["data"][0] % _ALIGNMENT == 0 for view in views]
    return any(aligned) and not all(aligned)


def put_slices(pieces: Sequence[tuple[NumpyArray, Slice]]) -> list[tuple[Any, Array]]:
    """Copies slices to their devices, or starts to; the caller gives them up.

    Returns:
        Devices and the arrays on them.
    """
    targets = [(values, device) for values, part in pieces for device in part.devices]
    with jax.ensure_compile_time_eval():
        made = jax.device_put([values for values, _ in targets], [device for _, device in targets])
    return list(zip((device for _, device in targets), made, strict=True))


def joined(shape: tuple[int, ...], dtype: np.dtype[Any], place: Any, pieces: Sequence[tuple[Any, Array]]) -> Array:
    """The array that slices on devices are together."""
    made: Array = jax.make_array_from_single_device_arrays(
        shape, place, [array for _, array in pieces], dtype=jax_dtype(dtype)
    )
    return made


def wait(arrays: Any) -> None:
    """Waits until arrays have their values."""
    jax.block_until_ready(arrays)


# ---- from JAX ----


def to_write(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as the writer of safetensors takes them; those of JAX come to the host one at a time.

    Raises:
        TypeError: a value is not an array, or has random keys.
        ValueError: an array that was donated or deleted, or that has slices on other processes.
    """
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
        raise not_an_array(f"tensor {show(name)}", value, "an array of JAX or numpy", safetensors=True)
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"tensor {show(name)} is traced: arrays are saved outside of jit, grad and vmap")
    if value.is_deleted():
        raise ValueError(f"tensor {show(name)} has been deleted or donated")
    if not isinstance(value.dtype, np.dtype):
        raise TypeError(f"tensor {show(name)} holds random keys: jax.random.key_data(keys) gives their numbers")
    devices = value.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return np.asarray(value)  # the same memory
    if not value.is_fully_addressable and not value.is_fully_replicated:
        raise ValueError(
            f"tensor {show(name)} is divided among processes: "
            "jax.experimental.multihost_utils.process_allgather(x, tiled=True) brings it together"
        )
    return Lazy(value.dtype, value.shape, lambda: to_numpy(value))


def to_numpy(array: Any) -> NumpyArray:
    """The values of an array, in C order; what is copied to the host for that does not stay there."""
    if array.is_fully_replicated:
        return np.ascontiguousarray(_fetched(array.addressable_data(0)))
    whole = np.empty(array.shape, array.dtype)
    fetched = set()
    for shard in array.addressable_shards:
        if (where := str(shard.index)) not in fetched:
            fetched.add(where)
            whole[shard.index] = _fetched(shard.data)
    return whole


def _fetched(array: Any) -> NumpyArray:
    """The values of an array on one device: an array of JAX keeps the copy that `numpy.asarray` makes of a GPU's."""
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array]))
