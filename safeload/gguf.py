"""Write GGUF files for llama.cpp and related programs; `safeload.open` reads such files.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .core.arrays import Array
from .core.quantized_tensor import QuantizedTensor
from .core.text import PathLike
from .errors import public
from .formats import gguf as gguf_format

__all__ = ["save_file"]


@public
def save_file(
    tensors: Mapping[str, Array | QuantizedTensor],
    path: PathLike,
    metadata: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Write a GGUF file (version 3) in the order of ``tensors``, atomically and without a second copy of the data.

    Metadata from a GGUF file (``Checkpoint.metadata``, or a dict of its items) keeps its types. Other values get these
    types:

    - str: string; bool: bool
    - int: the first of i32, u32, i64, u64 that can represent it. llama.cpp expects u32 for most of its keys:
      ``np.uint32(32)``
    - float: f32 if that is exact, else f64
    - NumPy scalars: their own type
    - 1-D NumPy arrays, lists and tuples: arrays of the first type above that can represent all elements. Lists of lists
      are arrays of arrays. An empty list is an array of strings.

    Args:
        tensors: arrays by name. Names have at most 127 bytes of UTF-8 (llama.cpp reads at most 63). Arrays have at most
            4 dims and are float32, float16, bfloat16, float64, int8, int16, int32 or int64. A `QuantizedTensor` must be
            in blocks, or packed in GGUF's layout.
        path: see `safeload.numpy.save_file`.
        metadata: values by key. "general.alignment" (a power of two, 32 by default) sets the alignment of tensors.
        overwrite: False raises FileExistsError if the path exists.
        durable: False skips the fsync of file and folder.

    Raises:
        UnsupportedError: GGUF lacks a dtype or a scheme.
        SafeloadError: GGUF cannot store a name, a shape or a number.
        TypeError: a value is not an array, or GGUF lacks the type of a metadata value.
        OSError: the file cannot be written, and the old file is still there.

    Example:
        >>> import numpy as np, safeload
        >>> from safeload import gguf
        >>> gguf.save_file({"w": np.ones((2, 3), np.float16)}, "w.gguf", {"general.architecture": "llama"})
        >>> safeload.open("w.gguf").metadata["general.architecture"]
        'llama'
    """
    gguf_format.save(tensors, path, metadata, overwrite=overwrite, durable=durable)


def __dir__() -> list[str]:
    return __all__
