"""Writes GGUF files, as llama.cpp and related programs read them. `safeload.open` reads them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base.arrays import Array
from .base.paths import PathLike
from .engine.codes.quantized_tensor import QuantizedTensor
from .formats.gguf import write as gguf_writing

__all__ = ["save_file"]


def save_file(
    tensors: Mapping[str, Array | QuantizedTensor],
    path: PathLike,
    metadata: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes a GGUF file (version 3) in the order of ``tensors``, atomically and without a second copy of the data.

    Metadata from a GGUF file (``Checkpoint.metadata``, or a dict of its items) keeps its types. Other values are
    written as these types:

    - str: string; bool: bool;
    - int: the first of i32, u32, i64, u64 that can represent it. llama.cpp expects u32 for most of its keys:
      ``np.uint32(32)``;
    - float: f32 if that is exact, else f64;
    - numpy scalars: their own type;
    - 1-D numpy arrays, lists and tuples: arrays of one of the above, the first type that can represent all elements;
      lists of these: arrays of arrays. An empty list is an array of strings.

    Args:
        tensors: name (at most 127 bytes of UTF-8; llama.cpp reads at most 63) to an array of at most 4 dims and of
            float32, float16, bfloat16, float64, int8, int16, int32 or int64, or to a `QuantizedTensor` in blocks, or
            packed as GGUF files pack tensors.
        path: see `safeload.numpy.save_file`.
        metadata: key to value. "general.alignment" (a power of two, by default 32) is the alignment of tensors.
        overwrite: False to raise FileExistsError if the path exists.
        durable: False to skip the fsync of file and folder; nothing else changes.

    Raises:
        UnsupportedError: a dtype or a scheme that GGUF does not have.
        SafeloadError: a name, a shape or a number that GGUF does not have.
        TypeError: a value that is not an array, or metadata of a type that GGUF does not have.
        OSError: the file cannot be written; the old one is still there.

    Example:
        >>> import numpy as np, safeload
        >>> from safeload import gguf
        >>> gguf.save_file({"w": np.ones((2, 3), np.float16)}, "w.gguf", {"general.architecture": "llama"})
        >>> safeload.open("w.gguf").metadata["general.architecture"]
        'llama'
    """
    gguf_writing.save(tensors, path, metadata, overwrite=overwrite, durable=durable)


def __dir__() -> list[str]:
    return __all__
