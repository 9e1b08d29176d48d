"""Drop-in replacement for ``safetensors.flax``, and `load_checkpoint` for every other format, as arrays of JAX.

The names, argument positions and defaults are those of ``safetensors.flax``. JAX is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .base.arrays import Array as NumpyArray
from .base.paths import PathLike
from .base.selecting import Patterns
from .compat.names import imported
from .compat.safe_open import safe_open as safe_open  # as in safetensors.flax
from .engine.read.load import Backend, check_backend, parse_target
from .engine.read.tensors import Tensors
from .engine.run.progress import Progress
from .engine.run.threads import check_threads
from .formats.opening import Paths, UnknownGlobals
from .formats.registry import FormatName, OpenRequest
from .formats.safetensors import file as safetensors
from .formats.safetensors import quantized
from .formats.tensor_slice import slice_of

if TYPE_CHECKING:
    from .frameworks.jax_arrays import Array as Array
    from .frameworks.jax_loading import Sharding

__all__ = ["load", "load_checkpoint", "load_file", "save", "save_file"]

# A name of safetensors.flax that needs JAX.
_LATER = {"Array": ("frameworks.jax_arrays", "Array")}


def load_file(
    filename: PathLike,
    *,
    backend: Backend = "mmap",
    dtype: Any = None,
    names: Iterable[str] | None = None,
    sharding: Sharding = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Array]:
    """Loads the tensors of a safetensors file as arrays of JAX.

    As everywhere in JAX, tensors of 64 bits become 32-bit arrays unless ``jax_enable_x64`` is set; integers that do not
    fit are wrapped around. `load_checkpoint` refuses these.

    Args:
        filename: path of the file.
        backend: "mmap" to copy from the mapped file to the device, "pread" to read into private memory first, on all
            cores, "direct" to do so past the page cache. On a CPU that memory is the array's, and large tensors are
            always read.
        dtype: dtype that floating tensors are converted to while they are read, see `safeload.numpy.load_file`.
        names: exact names of the tensors to load; None for all.
        sharding: where arrays go, see `load_checkpoint`.
        threads: for reading; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array, in the order of the bytes or of ``names``. F4 and F6 tensors are raw uint8 unless ``dtype``
        decodes them. Later changes to the file do not affect the arrays.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        FileNotFoundError: the file does not exist.
        FormatError: the file breaks the format, with the byte where it does.
        TensorNotFoundError: an unknown name.
        UnsupportedError: an unsupported conversion; ``dtype`` for fp8 with a separate scale, which only
            `load_checkpoint` brings together.
        ValueError: a sharding that does not fit a tensor.

    Example:
        >>> from safeload.jax import load_file
        >>> load_file("model.safetensors")["conv1.bias"].shape
        (128,)
    """
    from .frameworks import jax_loading

    check_backend(backend)
    check_threads(threads)
    target = parse_target(dtype)
    file = safetensors.open_file(filename)
    try:
        parts = Tensors.in_file(file, names)
        if target is not None:
            from .packed import codes_without_scale  # only here: most loads do not need it

            codes_without_scale.refuse_floating(file, parts, "load_file")
        options = jax_loading.Options(
            lambda name, dtype: slice_of(file, file.table.index(name), OpenRequest(), dtype, None),
            sharding,
            backend,
            checked=False,
            threads=threads,
        )
        return jax_loading.load([(parts, target)], options, progress)
    finally:
        file.close()


def load(data: Any) -> dict[str, Array]:
    """Loads the tensors of a safetensors file in memory as arrays of JAX.

    Args:
        data: any C-contiguous bytes-like object: bytes, bytearray, memoryview, mmap, uint8 array. Later changes to it
            do not affect the arrays.

    Returns:
        Name to array, in the order of the bytes. F4 and F6 tensors are raw uint8.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        TypeError: a path, or anything else that is not bytes.
        FormatError: the bytes break the format.

    Example:
        >>> from pathlib import Path
        >>> from safeload.jax import load
        >>> load(Path("model.safetensors").read_bytes())["conv1.bias"].shape
        (128,)
    """
    from .frameworks import jax_loading

    return jax_loading.load_bytes(data)


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
) -> dict[str, Array]:
    """Loads a checkpoint of any format as arrays of JAX, packed weights with their true values.

    Host memory stays bounded: beside arrays that are on a CPU, at most 256 MiB are in use, or what is read at once of a
    larger tensor.

    With a sharding over several devices each process reads the slices that its own devices hold, each of them once,
    however many devices share it. Of packed tensors it reads the rows that hold them; tensors whose rows are not stored
    apart (BitNet) and F4 and F6 tensors that are decoded are read whole.

    Args:
        path: what `safeload.open` takes: a weight file, a folder of them, an ``index.json``, a URL or a list of files.
        dtype: dtype that floating tensors are converted to, and packed ones dequantized to, while they are read:
            "bfloat16", "float32", ``jnp.bfloat16``, ... None to leave plain tensors as they are, and for packed ones
            the dtype that ``config.json`` names. Integer, bool and complex tensors are not converted.
        sharding: where arrays go: a ``jax.sharding.Sharding`` or a device for all of them; a mapping of names to these;
            or a function of a tensor's name and its ``jax.ShapeDtypeStruct`` that returns one. None, also as one of
            these values, is JAX's default device.
        names: exact names of the tensors to load; None for all.
        only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``; instead of ``names``.
        drop: shell pattern, or several, of names to leave out.
        format: requires a format, such as "safetensors", "gguf" or "torch"; None for any.
        root: name of the nested dict of a torch checkpoint to take tensors from, such as "state_dict".
        unknown_globals: what to do with a pickle that names classes or functions off the list of harmless ones:
            "refuse" it, or keep them "inert", as placeholders, and read the tensors around them.
        stored: True for the tensors as the files name them: codes and scales of packed weights apart.
        adapters: LoRA adapters to merge while loading: a path, a pair (path, weight), or a list of these, see
            `safeload.load`.
        storage_options: for URLs: options of the filesystem that a URL leads to, see `safeload.open`.
        threads: for reading; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array, in the order of the checkpoint or of ``names``. F4 and F6 tensors are raw uint8 unless ``dtype``
        decodes them. Unless ``jax_enable_x64`` is set, tensors of 64 bits become 32-bit arrays. All values have
        arrived.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        FormatError: a file breaks its format or ends too early, with path and byte.
        ForbiddenError: a pickle names globals off the list of harmless ones.
        RangeError: an integer that does not fit 32 bits, without ``jax_enable_x64``.
        UnsupportedError: a format, a tensor or a conversion that this version does not support; a packed tensor
            without ``dtype`` whose dtype no config names; float64 without ``jax_enable_x64``.
        TensorNotFoundError: an unknown name, or a pattern that matches no name.
        ValueError: a sharding that does not fit a tensor, or has nothing for it; both ``names`` and ``only``.
        OSError: a system error, such as FileNotFoundError.

    Example:
        >>> from safeload.jax import load_checkpoint
        >>> weights = load_checkpoint("tiny-llama", only="*norm.weight", dtype="bfloat16")
        >>> weights["model.norm.weight"].dtype
        dtype(bfloat16)
    """
    from .frameworks import jax_loading
    from .frameworks.checkpoints import open_checkpoint, select
    from .loading.merge import merging

    check_threads(threads)
    with (
        open_checkpoint(
            path,
            format=format,
            root=root,
            unknown_globals=unknown_globals,
            stored=stored,
            storage_options=storage_options,
        ) as opened,
        merging(opened, adapters, storage_options) as (checkpoint, merge),
    ):
        chosen = select(checkpoint, names=names, only=only, drop=drop, dtype=dtype)
        return jax_loading.load_selected(checkpoint, chosen, sharding, threads, progress, merge)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serializes arrays of JAX to the bytes of a safetensors file.

    Args:
        tensors: name to array of JAX or numpy, or variable of ``flax.nnx``. It is not changed, and arrays of JAX come
            to the host one at a time, also from several devices.
        metadata: text to text for the header, written in ascending order of keys.

    Returns:
        The file's content.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        TypeError: a name is not a str, a value is not an array, or metadata is not text.
        ValueError: an array that was deleted or donated, or that is divided among processes.
        SafetensorError: a dtype or a name that the format does not have.

    Example:
        >>> import jax.numpy as jnp
        >>> from safeload.jax import load, save
        >>> load(save({"weight": jnp.ones((2, 2))}))["weight"].sum()
        Array(4., dtype=float32)
    """
    from .frameworks import jax_arrays

    return safetensors.Writer(*quantized.pack(jax_arrays.to_write(tensors), metadata)).to_bytes()


def save_file(
    tensors: Mapping[str, Any],
    filename: PathLike,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = True,
    durable: bool = True,
) -> None:
    """Writes arrays of JAX to a safetensors file, atomically: a crash leaves the old file or the new one.

    Args:
        tensors: name to array of JAX or numpy, see `save`. A nested dict is saved by way of `safeload.flatten`.
        filename: see `safeload.numpy.save_file`.
        metadata: text to text for the header, written in ascending order of keys.
        overwrite: False to raise FileExistsError if the path exists.
        durable: False to skip the fsync of file and folder; nothing else changes.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        TypeError, ValueError, SafetensorError: see `save`.
        OSError: the file cannot be written (PermissionError, no space, ...); the old one is still there. It is a
            SafetensorError too.

    Example:
        >>> import jax.numpy as jnp
        >>> from safeload.jax import load_file, save_file
        >>> save_file({"weight": jnp.ones((2, 2), jnp.bfloat16)}, "ones.safetensors")
        >>> load_file("ones.safetensors")["weight"].dtype
        dtype(bfloat16)
    """
    from .frameworks import jax_arrays

    writer = safetensors.Writer(*quantized.pack(jax_arrays.to_write(tensors), metadata))
    writer.to_file(filename, overwrite=overwrite, durable=durable)


def _np2jnp(numpy_dict: Mapping[str, NumpyArray]) -> dict[str, Array]:
    """Arrays of numpy as those of JAX, which share no memory with them."""
    from .frameworks import jax_loading

    return jax_loading.copied(numpy_dict)


def _jnp2np(jnp_dict: Mapping[str, Any]) -> dict[str, NumpyArray]:
    """Arrays of JAX as those of numpy, which may share memory with them."""
    from .frameworks import jax_loading

    return jax_loading.to_numpy(jnp_dict)


def __getattr__(name: str) -> Any:
    return imported(globals(), _LATER, name)


def __dir__() -> list[str]:
    return __all__
