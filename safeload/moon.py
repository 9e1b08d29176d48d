"""Read and write MOON files: f16 tensors in a format that an inference engine can read in a simple loop.

Little-endian: u32 magic 0x4D4F4F4E, u32 version 2; then for each tensor u32 bytes of its name, u32 dims, u32 elements,
the name in UTF-8, the dims as u64 (outermost first), the elements as f16.
"""

from __future__ import annotations

from collections.abc import Mapping

from .core.arrays import Array
from .core.checkpoint import load
from .core.text import PathLike
from .errors import public
from .formats import moon

__all__ = ["load_file", "save_file"]


@public
def save_file(tensors: Mapping[str, Array], path: PathLike, *, overwrite: bool = True, durable: bool = True) -> None:
    """Write a MOON file (version 2) in the order of ``tensors``, atomically.

    Args:
        tensors: float16 arrays by name. Names have 1 to 256 bytes of UTF-8, arrays at most 4 dims and 2^32 - 1
            elements.
        path: see `safeload.numpy.save_file`.
        overwrite: False raises FileExistsError if the path exists.
        durable: False skips the fsync of file and folder.

    Raises:
        UnsupportedError: an array is not float16; convert it with `safeload.astype`.
        SafeloadError: the format cannot store a name, a shape or a size.
        OSError: the file cannot be written, and the old file is still there.

    Example:
        >>> import numpy as np
        >>> from safeload import moon
        >>> moon.save_file({"w": np.ones((2, 3), np.float16)}, "w.moon")
        >>> moon.load_file("w.moon")["w"].shape
        (2, 3)
    """
    moon.write(tensors, None, path, overwrite=overwrite, durable=durable)


@public
def load_file(path: PathLike) -> dict[str, Array]:
    """Load the float16 tensors of a MOON file, in file order; `safeload.open` has more options.

    Args:
        path: of the file.

    Returns:
        Arrays by name: copy-on-write views of the mapped file, as from `safeload.load`.

    Raises:
        FormatError: the file breaks its format; the message has the byte.
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
