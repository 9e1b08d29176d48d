"""`load`: the entry point from a path to a dict of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from .base.arrays import Array
from .base.selecting import Patterns
from .checkpoint import open
from .engine.load import Backend, DtypeLike
from .engine.progress import Progress
from .formats.opening import OpenOptions, Paths, UnknownGlobals
from .formats.registry import FormatName

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["load"]


@overload
def load(
    path: Paths,
    names: Iterable[str] | None = None,
    *,
    dtype: None = None,
    **options: Unpack[OpenOptions],
) -> dict[str, Any]: ...
@overload
def load(
    path: Paths,
    names: Iterable[str] | None = None,
    *,
    dtype: DtypeLike,
    **options: Unpack[OpenOptions],
) -> dict[str, Array]: ...
def load(
    path: Paths,
    names: Iterable[str] | None = None,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    dtype: Any = None,
    backend: Backend = "mmap",
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Opens a checkpoint of any format, loads its tensors as numpy arrays and closes it.

    Packed weights of quantized checkpoints get their true values with ``dtype``; without it they are
    `QuantizedTensor`. No code in a file is executed.

    Args:
        path: a weight file, a folder of them, an ``index.json`` or a list of files. The format is recognised by the
            content, not by the suffix.
        names: exact names of the tensors to load; None for all.
        only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``; instead of ``names``.
        drop: shell pattern, or several, of names to leave out.
        format: requires a format, such as "safetensors", "gguf" or "torch"; None for any.
        root: name of the nested dict of a torch checkpoint to take tensors from, such as "state_dict".
        unknown_globals: what to do with a pickle that names classes or functions off the list of harmless ones:
            "refuse" it, or keep them "inert", as placeholders, and read the tensors around them.
        stored: True for the tensors as the files name them: codes and scales of packed weights apart.
        dtype: dtype that floating tensors are converted to, and packed ones dequantized to, while they are read:
            "float32", "bf16", a numpy or ml_dtypes type, ...; None to convert nothing. Integer, bool and complex
            tensors are not converted.
        backend: "mmap" for copy-on-write views of tensors that are not converted, "pread" to read into private memory
            on all cores.
        out: arrays to fill, by name, each C-contiguous and of the dtype and shape of its tensor.
        threads: for reading; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array: writable, and C-contiguous except for strided tensors of torch.

    Raises:
        FormatError: a file breaks its format or ends too early, with path and byte.
        ForbiddenError: a pickle names globals off the list of harmless ones.
        UnsupportedError: a format, a tensor or a conversion that this version does not support.
        TensorNotFoundError: an unknown name or ``root``, or a pattern that matches no name.
        ValueError: an array of ``out`` that does not fit; both ``names`` and ``only``.
        OSError: a system error, such as FileNotFoundError.

    Example:
        >>> import safeload
        >>> weights = safeload.load("tiny-llama", only="*norm.weight", dtype="float32")
        >>> weights["model.norm.weight"].dtype
        dtype('float32')
    """
    with open(path, format=format, root=root, unknown_globals=unknown_globals, stored=stored) as checkpoint:
        return checkpoint.load(
            names, only=only, drop=drop, dtype=dtype, backend=backend, out=out, threads=threads, progress=progress
        )
