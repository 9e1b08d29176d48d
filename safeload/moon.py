"""MOON files: f16 tensors in a format that an inference engine can read in a simple loop.

Little-endian: u32 magic 0x4D4F4F4E, u32 version 2; then for each tensor u32 bytes of its name, u32 dims, u32 elements,
the name in UTF-8, the dims as u64 (outermost first), the elements as f16.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base.arrays import Array
from .base.paths import PathLike
from .formats import moon
from .loading.entry import load

__all__ = ["load_file", "save_file"]


def save_file(tensors: Mapping[str, Array], path: PathLike, *, overwrite: bool = True, durable: bool = True) -> None:
    """Writes a MOON file (version 2) in the order of ``tensors``, atomically.

    Args:
        tensors: name (1 to 256 bytes of UTF-8) to float16 array of at most 4 dims and 2^32 - 1 elements.
        path: see `safeload.numpy.save_file`.
        overwrite: False to raise FileExistsError if the path exists.
        durable: False to skip the fsync of file and folder; nothing else changes.

    Raises:
        UnsupportedError: an array that is not float16; `safeload.astype` converts.
        SafeloadError: a name, a shape or a size that the format does not have.
        OSError: the file cannot be written; the old one is still there.

    Example:
        >>> import numpy as np
        >>> from safeload import moon
        >>> moon.save_file({"w": np.ones((2, 3), np.float16)}, "w.moon")
        >>> moon.load_file("w.moon")["w"].shape
        (2, 3)
    """
    moon.save(tensors, path, overwrite=overwrite, durable=durable)


def load_file(path: PathLike) -> dict[str, Array]:
    """Loads the tensors of a MOON file, as float16, in file order; `safeload.open` has more options.

    Args:
        path: of the file.

    Returns:
        Name to array: copy-on-write views of the mapped file, as `safeload.load` gives them.

    Raises:
        FormatError: the file breaks its format, with the byte where it does.
        OSError: the file does not exist, or cannot be read.

    Example:
        >>> import safeload
        >>> from safeload import moon
        >>> safeload.convert("model.safetensors", "model.moon", dtype="float16")
        <ConvertReport 'model.moon': moon, 15 tensors, 605 KiB>
        >>> moon.load_file("model.moon")["conv1.bias"].dtype
        dtype('float16')
    """
    return load(path, format="moon")


def __dir__() -> list[str]:
    return __all__
