"""Drop-in replacement for ``safetensors.numpy``: the same names, argument positions, defaults and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .base.arrays import Array
from .base.paths import PathLike
from .compat.names import SHARED, imported
from .engine.read.load import Backend, check_backend, load_all, load_tensors
from .engine.read.tensors import Tensors
from .engine.run.progress import Progress
from .formats.safetensors import file as safetensors
from .formats.safetensors import quantized

if TYPE_CHECKING:
    from .compat.safe_open import safe_open as safe_open
    from .compat.serialize import TensorSpec as TensorSpec
    from .compat.serialize import deserialize as deserialize
    from .compat.serialize import serialize as serialize
    from .compat.serialize import serialize_file as serialize_file

__all__ = ["load", "load_file", "save", "save_file"]

# Names besides the functions below that other libraries import from safetensors.numpy.
_LATER = {
    **SHARED,
    "_TYPES": ("compat.numpy_specs", "TYPES"),
    "_flatten": ("compat.numpy_specs", "flatten"),
    "_getdtype": ("compat.numpy_specs", "getdtype"),
    "_is_little_endian": ("compat.numpy_specs", "is_little_endian"),
    "_view2np": ("compat.numpy_specs", "view2np"),
}
_NAMESPACE = globals()


def save(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serializes tensors to the bytes of a safetensors file.

    Args:
        tensor_dict: name to array of any layout: arrays that are not C-contiguous or not little-endian are converted
            while they are written. A `QuantizedTensor` is written as its data (and, for int8, ``<name>_scale``) with a
            metadata key that lets `safeload.open` rebuild it.
        metadata: text to text for the header, written in ascending order of keys.

    Returns:
        The file's content.

    Raises:
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        SafetensorError: a dtype or a name that the format does not have.

    Example:
        >>> import numpy as np
        >>> from safeload.numpy import load, save
        >>> load(save({"weight": np.ones((2, 2), np.float32)}))["weight"].sum()
        np.float32(4.0)
    """
    return safetensors.Writer(*quantized.pack(tensor_dict, metadata)).to_bytes()


def save_file(
    tensor_dict: Mapping[str, Any],
    filename: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes a safetensors file, atomically: a crash at any moment leaves the old file or the new one.

    Args:
        tensor_dict: name to array of any layout or `QuantizedTensor`, see `save`; the data is not copied in memory.
        filename: a new file gets mode 0666 less the umask, an existing one keeps its mode, a symbolic link is
            followed, a device or pipe is written through.
        metadata: text to text for the header, written in ascending order of keys.
        overwrite: False to raise FileExistsError if the path exists.
        durable: False to skip the fsync of file and folder; nothing else changes.

    Raises:
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        SafetensorError: a dtype or a name that the format does not have.
        OSError: the file cannot be written (PermissionError, no space, ...); the old one is still there. It is a
            SafetensorError too.

    Example:
        >>> import numpy as np
        >>> from safeload.numpy import load_file, save_file
        >>> save_file({"weight": np.ones((2, 2), np.float32)}, "ones.safetensors", {"made by": "hand"})
        >>> load_file("ones.safetensors")["weight"].sum()
        np.float32(4.0)
    """
    safetensors.Writer(*quantized.pack(tensor_dict, metadata)).to_file(filename, overwrite=overwrite, durable=durable)


def load(data: Any, *, copy: bool = True) -> dict[str, Array]:
    """Loads the tensors of a safetensors file in memory.

    Args:
        data: any C-contiguous bytes-like object: bytes, bytearray, memoryview, mmap, uint8 array.
        copy: False for views of ``data``, read-only if ``data`` is.

    Returns:
        Name to array, in the order of the bytes. F4 and F6 tensors are raw uint8.

    Raises:
        FormatError: the bytes break the format.

    Example:
        >>> from pathlib import Path
        >>> from safeload.numpy import load
        >>> load(Path("model.safetensors").read_bytes())["conv1.bias"].shape
        (128,)
    """
    arrays = safetensors.parse(data, copy=copy)
    if "_TYPES" in _NAMESPACE:  # a program that asks for the dict may have changed it, and upstream's load follows it
        from .compat import numpy_specs

        return numpy_specs.retyped(data, arrays, _NAMESPACE["_TYPES"])
    return arrays


def load_file(
    filename: PathLike,
    *,
    backend: Backend = "mmap",
    dtype: Any = None,
    names: Iterable[str] | None = None,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Array]:
    """Loads the tensors of a safetensors file.

    Args:
        filename: path of the file.
        backend: "mmap" for copy-on-write views of one private mapping: loading takes microseconds, each page is read
            when it is first touched, and writing into an array changes no file. "pread" to read everything now, on all
            cores, into private memory that later changes to the file cannot affect. "direct" to do so past the page
            cache, where system and disk allow it: see `safeload.load`.
        dtype: dtype that floating tensors are converted to while they are read, in one pass: float64, float32, float16,
            bfloat16, float8_e4m3fn or float8_e5m2, as type of numpy, ml_dtypes, torch or JAX, name ("bf16") or code.
            Integer, bool and complex tensors are not converted; F4 and F6 tensors are decoded.
        names: exact names of the tensors to load; None for all.
        out: arrays to fill, by name, each C-contiguous and of the dtype and shape of its tensor: a service can reload
            weights without allocating memory. All are checked before the first byte is written; if reading fails they
            may be partly filled.
        threads: for reading; None: chosen automatically.
        progress: for reading: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array, in the order of the bytes or of ``names``: writable, aligned, C-contiguous. BF16 and F8 tensors
        have ml_dtypes dtypes; F4 and F6 tensors are raw uint8 unless ``dtype`` decodes them.

    Raises:
        FileNotFoundError: the file does not exist.
        FormatError: the file breaks the format, with the byte where it does.
        TensorNotFoundError: an unknown name.
        UnsupportedError: an unsupported conversion; ``dtype`` for fp8 with a separate scale, which only `safeload.load`
            brings together.
        ValueError: an array of ``out`` that does not fit.

    Example:
        >>> from safeload.numpy import load_file
        >>> weights = load_file("model.safetensors", dtype="float16", names=["conv1.bias", "conv1.weight"])
        >>> weights["conv1.bias"].dtype
        dtype('float16')
    """
    check_backend(backend)
    if names is None and dtype is None and out is None and threads is None and progress is None:
        found = safetensors.load_or_open(filename, backend)
        if isinstance(found, safetensors.Resident):
            return found.arrays
        try:
            return load_all(found, backend)
        finally:
            found.close()
    file = safetensors.open_file(filename, brief=True)
    try:
        tensors = Tensors.in_file(file, names)
        if dtype is not None:
            from .packed import codes_without_scale  # only here: most loads do not need it

            codes_without_scale.refuse_floating(file, tensors, "load_file")
        return load_tensors(tensors, backend=backend, dtype=dtype, out=out, threads=threads, progress=progress)[0]
    finally:
        file.close()


def __getattr__(name: str) -> Any:
    return imported(_NAMESPACE, _LATER, name)


def __dir__() -> list[str]:
    return __all__
