"""What `safe_open` gives for JAX: arrays on its default device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base import dtypes
from ..base.arrays import Array as NumpyArray
from ..base.text import clip, printable
from ..engine.read.load import load_tensors
from ..engine.read.tensors import FileTensor, Tensors
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from . import jax_arrays, jax_loading
from .jax_arrays import Array


class JaxHandle:
    """Gives the tensors of one open file as arrays of JAX; see `Handle`.

    Args:
        device: "cpu" or None, as safetensors takes it for JAX: arrays go to JAX's default device.
        backend: not needed, as whatever is returned has memory of its own.

    Raises:
        SafetensorError: another device.
    """

    def __init__(self, device: Any, backend: str) -> None:
        if device not in ("cpu", None):
            raise SafetensorError(
                f"Device {clip(printable(str(device)), 200)} is not supported for framework jax, whose arrays go to "
                "its default device: safeload.jax.load_file and load_checkpoint take sharding="
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return JaxHandle, ("cpu", "mmap")

    def tensor(self, part: FileTensor, read: Callable[[], NumpyArray]) -> Array:
        """One tensor; see `Handle.tensor`. It is read: a view of the mapped file would have to be copied."""
        arrays, _ = load_tensors(Tensors.of([part]), backend="pread")
        return jax_arrays.put([arrays[part[0]]], None, borrowed=False)[0]

    def tensors(
        self, parts: Sequence[FileTensor], target: dtypes.Dtype | None, read: Callable[[], dict[str, NumpyArray]]
    ) -> dict[str, Array]:
        """Several tensors; see `Handle.tensors`."""
        if target is not None:
            jax_arrays.check_target(dtypes.array_dtype(target.number))
        return jax_loading.copied(read())

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], NumpyArray]) -> Array:
        """The selected elements; see `Handle.item`."""
        return jax_arrays.put([select(key)], None, borrowed=False)[0]
