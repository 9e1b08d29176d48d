"""Drop-in replacement for ``safetensors.numpy``: the same names, argument positions, defaults and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core import resident
from .core.arrays import Array
from .core.memory import Backend, Cache, check_backend
from .core.runtime import SHARED, imported
from .core.text import PathLike
from .errors import public

if TYPE_CHECKING:
    from .compat.safe_open import safe_open as safe_open
    from .compat.serialize import TensorSpec as TensorSpec
    from .compat.serialize import deserialize as deserialize
    from .compat.serialize import serialize as serialize
    from .compat.serialize import serialize_file as serialize_file
    from .core.progress import Progress

__all__ = ["load", "load_file", "save", "save_file"]

# Further names that other libraries import from safetensors.numpy.
_LATER = {
    **SHARED,
    "_TYPES": ("compat.specs", "TYPES"),
    "_flatten": ("compat.specs", "flatten"),
    "_getdtype": ("compat.specs", "getdtype"),
    "_is_little_endian": ("compat.specs", "is_little_endian"),
    "_view2np": ("compat.specs", "view2np"),
}
_NAMESPACE = globals()


@public
def save(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialize arrays to the bytes of a safetensors file.

    Args:
        tensor_dict: arrays by name, of any layout: arrays that are not C-contiguous or not little-endian are converted
            while they are written. A `QuantizedTensor` is written as its data (and, for int8, ``<name>_scale``), with a
            metadata key from which `safeload.open` restores it.
        metadata: str to str, for the header. Keys are sorted.

    Returns:
        The file's content.

    Raises:
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        SafetensorError: the format lacks a dtype or cannot store a name.

    Example:
        >>> import numpy as np
        >>> from safeload.numpy import load, save
        >>> load(save({"weight": np.ones((2, 2), np.float32)}))["weight"].sum()
        np.float32(4.0)
    """
    return _part("safetensors").writer(tensor_dict, metadata).to_bytes()  # type: ignore[no-any-return]


@public
def save_file(
    tensor_dict: Mapping[str, Any],
    filename: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Write a safetensors file atomically: after a crash there is either the old file or the new file.

    Args:
        tensor_dict: arrays by name, see `save`. Their data is not copied in memory.
        filename: a new file gets mode 0666 less the umask, an existing file keeps its mode. Symbolic links are
            followed; devices and pipes are written to directly.
        metadata: str to str, for the header. Keys are sorted.
        overwrite: False raises FileExistsError if the path exists.
        durable: False skips the fsync of file and folder.

    Raises:
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        SafetensorError: the format lacks a dtype or cannot store a name.
        OSError: the file cannot be written (PermissionError, disk full, ...), and the old file is still there. Also a
            SafetensorError.

    Example:
        >>> import numpy as np
        >>> from safeload.numpy import load_file, save_file
        >>> save_file({"weight": np.ones((2, 2), np.float32)}, "ones.safetensors", {"made by": "hand"})
        >>> load_file("ones.safetensors")["weight"].sum()
        np.float32(4.0)
    """
    _part("safetensors").writer(tensor_dict, metadata).to_file(filename, overwrite=overwrite, durable=durable)


@public
def load(data: Any, *, copy: bool = True) -> dict[str, Array]:
    """Load the tensors of a safetensors file in memory.

    Args:
        data: the file's content, in any C-contiguous bytes-like object: bytes, bytearray, memoryview, mmap, uint8
            array.
        copy: False returns views of ``data``, which are read-only if ``data`` is.

    Returns:
        Arrays by name, in file order. F4 and F6 tensors are raw uint8.

    Raises:
        FormatError: the bytes break the format.

    Example:
        >>> from pathlib import Path
        >>> from safeload.numpy import load
        >>> load(Path("model.safetensors").read_bytes())["conv1.bias"].shape
        (128,)
    """
    arrays, _ = resident.parse(data, copy=copy)
    if "_TYPES" in _NAMESPACE:  # a program may have changed the dict, which upstream's load honors
        from .compat import specs

        return specs.retyped(data, arrays, _NAMESPACE["_TYPES"])
    return arrays


@cache  # a call takes a tenth of the time of an import statement
def _part(module: str) -> Any:
    """Import a module of the core when it is first used: a program that loads small files needs few of them."""
    return import_module(f".core.{module}", __package__)


@public
def load_file(
    filename: PathLike,
    *,
    backend: Backend = "mmap",
    cache: Cache = "keep",
    writable: bool = True,
    dtype: Any = None,
    names: Iterable[str] | None = None,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Array]:
    """Load the tensors of a safetensors file.

    Args:
        filename: path of the file.
        backend: "mmap" returns copy-on-write views of one private mapping. Loading takes microseconds, each page is
            read on first use, and writing to an array does not change the file. "pread" reads everything now, on all
            cores, into private memory that later changes to the file cannot affect; you should use it if another
            program may truncate the file. "direct" also bypasses the page cache, if system and disk support it, and
            "auto" chooses; see `safeload.load`.
        cache: "drop" reads into private memory and drops the file's pages behind reads, see `safeload.load`.
        writable: False returns read-only arrays: views of read-only mappings, which no limit of memory counts. True
            does so, too, and logs a warning, if the system refuses writable mappings and has no memory for a copy.
        dtype: dtype to convert floating tensors to while they are read, in one pass: float64, float32, float16,
            bfloat16, float8_e4m3fn or float8_e5m2, as a NumPy, ml_dtypes, torch or JAX type, a name ("bf16") or a code.
            F4 and F6 tensors are decoded. Integer, bool and complex tensors keep their dtype.
        names: exact names of the tensors to load; None loads all.
        out: arrays to fill, by name, so that a service can reload weights without allocating memory. Each must be
            C-contiguous, have its tensor's dtype and shape, and share no memory with another. All are checked before
            the first byte is written; if reading fails, some may be partly filled.
        threads: number of reading threads; None chooses it.
        progress: True shows a progress bar while reading. A callable gets (bytes_done, bytes_total).

    Returns:
        Arrays by name, in file order or in the order of ``names``: writable by default, aligned, C-contiguous. BF16 and
        F8 tensors have ml_dtypes dtypes. F4 and F6 tensors are raw uint8 unless ``dtype`` decodes them.

    Raises:
        FileNotFoundError: the file does not exist.
        FormatError: the file breaks the format; the message has the byte.
        TensorNotFoundError: a name does not exist.
        UnsupportedError: the conversion is not supported, or ``dtype`` is given for fp8 with a separate scale, which
            needs `safeload.load`.
        ValueError: an array in ``out`` does not fit.

    Example:
        >>> from safeload.numpy import load_file
        >>> weights = load_file("model.safetensors", dtype="float16", names=["conv1.bias", "conv1.weight"])
        >>> weights["conv1.bias"].dtype
        dtype('float16')
    """
    check_backend(backend)
    plain = cache == "keep" and writable and names is None and dtype is None
    if plain and out is None and threads is None and progress is None:
        opened = resident.load_or_open(filename, backend)
        if isinstance(opened, resident.Resident):
            return opened.arrays
        try:
            return _part("load").load_all(opened, backend, "write")  # type: ignore[no-any-return]
        except MemoryError:  # the system refuses a writable mapping, and there is no memory for a copy
            if backend != "mmap":
                raise
            return _part("load").load_all(opened, backend, "either")  # type: ignore[no-any-return]
        finally:
            opened.close()
    from .core import safetensors
    from .core.files import caching
    from .core.load import access_of, load_tensors

    access = access_of(writable, out)
    with caching(cache):
        file = safetensors.open_file(filename, brief=True)
    try:
        tensors = safetensors.chosen(file, names, dtype, "load_file")
        how: Any = {"backend": backend, "dtype": dtype, "out": out, "threads": threads, "progress": progress}
        if access == "either" and backend == "mmap":
            try:
                return load_tensors(tensors, access="write", **how)[0]
            except MemoryError:
                pass
        return load_tensors(tensors, access=access, **how)[0]
    finally:
        file.close()


def __getattr__(name: str) -> Any:
    return imported(_NAMESPACE, _LATER, name)


def __dir__() -> list[str]:
    return __all__
