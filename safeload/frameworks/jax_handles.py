"""Give the tensors of `safe_open` as JAX arrays on the default device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..base import dtypes
from ..base.arrays import Array as NumpyArray
from ..base.text import clip, printable
from ..engine.read.load import load_tensors
from ..engine.read.tensors import FileTensor, Tensors
from ..engine.run.weight_file import WeightFile
from ..errors import SafetensorError
from . import jax_arrays, jax_loading
from .handle import NO_PREFETCH
from .jax_arrays import Array


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
        return jax_loading.copied(read())

    def item(self, file: WeightFile, index: int, key: Any, select: Callable[[Any], NumpyArray]) -> Array:
        return jax_arrays.put([select(key)], None, borrowed=False)[0]

    def arrivals(self, *arguments: Any) -> NoReturn:
        raise SafetensorError(NO_PREFETCH)
