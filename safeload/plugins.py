"""Write a format of your own: a distribution with an entry point of the group ``safeload.formats``.

The name of the entry point is the name of the format, and its object is a `Format`. safeload asks it for files that no
format of its own claims, or if you pass ``format=NAME``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from .core.arrays import Array
from .core.atomic_file import AtomicFile
from .core.registry import Candidate, Content, Format, OpenRequest, StoredTensor
from .core.tensors import materialize
from .core.text import PathLike, error_about
from .errors import UnsupportedError, public

__all__ = ["Candidate", "Content", "Format", "OpenRequest", "StoredTensor", "as_array", "atomic_file"]


@public
def as_array(value: Any) -> Array:
    """Return the elements of a tensor that `convert` passes to ``write``, in C order.

    Args:
        value: of the mapping. It has ``dtype`` and ``shape``; its elements are read or computed now.

    Raises:
        UnsupportedError: the tensor is quantized.
        SafeloadError, OSError: the source cannot be read.
    """
    if hasattr(value, "scheme"):
        text = f'a tensor is {value.scheme}, which this format does not store: pass dtype="float32"'
        raise error_about(UnsupportedError, text)
    array: Array = np.ascontiguousarray(materialize(value)).reshape(value.shape)
    return array


@contextmanager
@public
def atomic_file(path: PathLike, *, overwrite: bool = True, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file for ``write``. It appears when the block ends; after an exception, an older file is unchanged.

    Args:
        path: the destination.
        overwrite: False to raise FileExistsError if the destination exists.
        durable: False to skip the fsync of file and folder.

    Returns:
        A context manager of a binary stream.

    Raises:
        OSError: the file cannot be written.
    """
    with AtomicFile(path, 0, overwrite=overwrite, durable=durable) as file, file.stream() as stream:
        yield stream


def __dir__() -> list[str]:
    return __all__
