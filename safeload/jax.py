"""Drop-in replacement for ``safetensors.flax``, and checkpoints of any format as JAX arrays.

Names, argument positions and defaults match ``safetensors.flax``. Importing this module does not import JAX; its
functions do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from .compat.safe_open import safe_open as safe_open  # as in safetensors.flax
from .core import resident, runtime, safetensors
from .core.arrays import Array as NumpyArray
from .core.arrays import as_array
from .core.files import caching
from .core.load import parse_target
from .core.memory import Backend, Cache, check_backend, check_threads
from .core.names import Patterns
from .core.opening import Paths, Verify
from .core.progress import Progress
from .core.registry import FormatName, UnknownGlobals
from .core.text import PathLike
from .errors import public

if TYPE_CHECKING:
    from .frameworks.jax_arrays import Array as Array
    from .frameworks.jax_arrays import Sharding

__all__ = ["load", "load_checkpoint", "load_file", "save", "save_file"]

# The function that loads folders, for errors.
_FOLDERS = "safeload.jax.load_checkpoint"
# Names of safetensors.flax that need JAX.
_LATER = {"Array": ("frameworks.jax_arrays", "Array"), "_jnp2np": ("frameworks.jax_arrays", "as_numpy")}


@cache  # a call takes a tenth of the time of an import statement
def _arrays() -> Any:
    """Import the functions that need JAX."""
    from .frameworks import jax_arrays

    return jax_arrays


@public
def load_file(
    filename: PathLike,
    *,
    backend: Backend = "mmap",
    cache: Cache = "keep",
    dtype: Any = None,
    names: Iterable[str] | None = None,
    sharding: Sharding = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Array]:
    """Load the tensors of a safetensors file as JAX arrays.

    As everywhere in JAX, 64-bit tensors become 32-bit arrays unless ``jax_enable_x64`` is set, and integers wrap
    around. `load_checkpoint` refuses integers that do not fit.

    Args:
        filename: path of the file.
        backend: "mmap" copies from the mapped file to the device. "pread" reads into private memory first, on all
            cores; "direct" also bypasses the page cache, and "auto" chooses. On a CPU the array keeps this memory, and
            large tensors are always read.
        cache: "drop" drops the file's pages from the page cache behind reads, see `safeload.load`.
        dtype: dtype to convert floating tensors to while they are read, see `safeload.numpy.load_file`.
        names: exact names of the tensors to load; None loads all.
        sharding: where arrays go, see `load_checkpoint`.
        threads: number of reading threads; None chooses it.
        progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).

    Returns:
        Arrays by name, in file order or in the order of ``names``. F4 and F6 tensors are raw uint8 unless ``dtype``
        decodes them. Later changes to the file do not affect the arrays.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        FileNotFoundError: the file does not exist.
        FormatError: the file breaks the format; the message has the byte.
        TensorNotFoundError: a name does not exist.
        UnsupportedError: the conversion is not supported, or ``dtype`` is given for fp8 with a separate scale, which
            needs `load_checkpoint`.
        ValueError: a sharding does not fit a tensor.

    Example:
        >>> from safeload.jax import load_file
        >>> load_file("model.safetensors")["conv1.bias"].shape
        (128,)
    """
    from .frameworks import jax_arrays

    check_backend(backend)
    check_threads(threads)
    parse_target(dtype)  # refuses other dtypes before anything is opened
    everything = names is None and dtype is None and threads is None and progress is None
    if everything and sharding is None and cache == "keep" and backend in ("mmap", "pread", "auto"):
        file = resident.load_or_open(filename, backend, _FOLDERS)
        if isinstance(file, resident.Resident):
            return jax_arrays.copied(file.arrays)
    else:
        with caching(cache):
            file = safetensors.open_file(filename, folders=_FOLDERS)
    try:
        groups = [(safetensors.chosen(file, names, dtype, "load_file"), dtype)]
        return jax_arrays.load(groups, sharding, progress=progress, backend=backend, checked=False, threads=threads)
    finally:
        file.close()


@public
def load(data: Any) -> dict[str, Array]:
    """Load the tensors of a safetensors file in memory as JAX arrays.

    Args:
        data: the file's content, in any C-contiguous bytes-like object: bytes, bytearray, memoryview, mmap, uint8
            array. Later changes to it do not affect the arrays.

    Returns:
        Arrays by name, in file order. F4 and F6 tensors are raw uint8.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        TypeError: ``data`` is a path, or anything else but bytes.
        FormatError: the bytes break the format.

    Example:
        >>> from pathlib import Path
        >>> from safeload.jax import load
        >>> load(Path("model.safetensors").read_bytes())["conv1.bias"].shape
        (128,)
    """
    if type(data) is not bytes and isinstance(data, (str, os.PathLike)):  # the latter is a check in Python
        raise TypeError("load takes the content of a file, as bytes; pass paths to load_file or load_checkpoint")
    return _arrays().copied(resident.parse(data, copy=False)[0])  # type: ignore[no-any-return]


@public
def load_checkpoint(
    path: Paths,
    *,
    dtype: Any = None,
    sharding: Sharding = None,
    names: Iterable[str] | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    adapters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
    verify: Verify = None,
    cache: Cache = "keep",
) -> dict[str, Array]:
    """Load a checkpoint of any format as JAX arrays, dequantized if it is quantized.

    Host memory stays bounded: besides arrays on a CPU, at most 256 MiB are in use, or the part of a larger tensor that
    is read at once.

    With a sharding over several devices, each process reads the slices on its own devices, and each slice only once
    even if several devices share it. For packed tensors it reads the rows around these slices. If rows are not stored
    separately (BitNet), or F4 or F6 elements are decoded, a tensor is read whole.

    Args:
        path: a weight file, a folder of weight files, an ``index.json``, a URL or a list of files; see `safeload.open`.
        dtype: dtype to convert floating tensors and dequantize packed tensors to, while they are read: "bfloat16",
            "float32", ``jnp.bfloat16``, ... None keeps the dtype of plain tensors, and gives packed tensors the dtype
            in ``config.json``. Integer, bool and complex tensors keep their dtype.
        sharding: where arrays go: a ``jax.sharding.Sharding`` or a device for all; a mapping of tensor names to these;
            or a function that returns either for a name and a ``jax.ShapeDtypeStruct``. None, even in a mapping or as a
            function's result, means JAX's default device.
        names: exact names of the tensors to load; None loads all.
        only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``; not with ``names``.
        drop: shell pattern, or several, of the names to skip.
        format: required format, such as "safetensors", "gguf" or "torch"; None accepts any.
        root: nested container to take tensors from, such as "state_dict", see `safeload.open`.
        unknown_globals: how to treat a pickle that names classes or functions outside the allowlist: "refuse" it, or
            read its tensors with "inert" placeholders for the unknown objects.
        stored: True loads stored tensors as they are: codes and scales of packed weights separately.
        adapters: LoRA adapters to merge: a path, a pair (path, weight), or a list of these; see `safeload.load`.
        storage_options: options of the filesystem behind a URL, see `safeload.open`.
        threads: number of reading threads; None chooses it.
        progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).
        verify: True, the path of a manifest, or a `safeload.Signature` to verify files against; see `safeload.load`.
        cache: "drop" reads into private memory and drops the files' pages behind reads, see `safeload.load`.

    Returns:
        Arrays by name, in the order of the checkpoint or of ``names``, with all values in place. F4 and F6 tensors are
        raw uint8 unless ``dtype`` decodes them. 64-bit tensors become 32-bit arrays unless ``jax_enable_x64`` is set.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        FormatError: a file breaks its format or ends too early; the message has path and byte.
        ForbiddenError: a pickle names globals outside the allowlist.
        RangeError: an integer does not fit 32 bits, and ``jax_enable_x64`` is not set.
        UnsupportedError: the format, a tensor or a conversion is not supported; neither ``dtype`` nor a config gives
            the dtype of a packed tensor; ``dtype`` is float64 and ``jax_enable_x64`` is not set.
        TensorNotFoundError: a name does not exist, or a pattern matches none.
        VerificationError: see `safeload.load`.
        ValueError: a sharding does not fit a tensor, a mapping lacks a tensor, or both ``names`` and ``only`` are
            given.
        OSError: a system error, such as FileNotFoundError.

    Example:
        >>> from safeload.jax import load_checkpoint
        >>> weights = load_checkpoint("tiny-llama", only="*norm.weight", dtype="bfloat16")
        >>> weights["model.norm.weight"].dtype
        dtype(bfloat16)
    """
    options = dict(locals())
    from .frameworks import jax_arrays

    with caching(options.pop("cache")):
        return jax_arrays.load_checkpoint(**options)


@public
def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialize JAX arrays to the bytes of a safetensors file.

    Args:
        tensors: JAX arrays, NumPy arrays or ``flax.nnx`` variables by name. JAX arrays, also on several devices, are
            copied to the host one at a time.
        metadata: str to str, for the header. Keys are sorted.

    Returns:
        The file's content.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        ValueError: an array was deleted or donated, or is sharded across processes.
        SafetensorError: the format lacks a dtype or cannot store a name.

    Example:
        >>> import jax.numpy as jnp
        >>> from safeload.jax import load, save
        >>> load(save({"weight": jnp.ones((2, 2))}))["weight"].sum()
        Array(4., dtype=float32)
    """
    return safetensors.writer(_arrays().to_write(tensors), metadata).to_bytes()


@public
def save_file(
    tensors: Mapping[str, Any],
    filename: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Write JAX arrays to a safetensors file atomically: after a crash there is either the old file or the new file.

    Args:
        tensors: arrays by name, see `save`. Flatten nested dicts with `safeload.flatten`.
        filename: see `safeload.numpy.save_file`.
        metadata: str to str, for the header. Keys are sorted.
        overwrite: False raises FileExistsError if the path exists.
        durable: False skips the fsync of file and folder.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        TypeError, ValueError, SafetensorError: see `save`.
        OSError: the file cannot be written (PermissionError, disk full, ...), and the old file is still there. Also a
            SafetensorError.

    Example:
        >>> import jax.numpy as jnp
        >>> from safeload.jax import load_file, save_file
        >>> save_file({"weight": jnp.ones((2, 2), jnp.bfloat16)}, "ones.safetensors")
        >>> load_file("ones.safetensors")["weight"].dtype
        dtype(bfloat16)
    """
    writer = safetensors.writer(_arrays().to_write(tensors), metadata)
    writer.to_file(filename, overwrite=overwrite, durable=durable)


def _np2jnp(numpy_dict: Mapping[str, NumpyArray]) -> dict[str, Array]:
    """Return JAX arrays that share no memory with NumPy arrays."""
    return _arrays().copied({name: as_array(value, name) for name, value in numpy_dict.items()})  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    return runtime.imported(globals(), _LATER, name)


def __dir__() -> list[str]:
    return __all__
