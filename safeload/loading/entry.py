"""`open` and `load`: the entry points from a path to a checkpoint, or to a dict of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from ..base.arrays import Array
from ..base.selecting import Patterns
from ..checkpoint import Checkpoint
from ..engine.read.load import Backend, DtypeLike
from ..engine.run.progress import Progress
from ..formats.opening import OpenOptions, Paths, UnknownGlobals, open_paths
from ..formats.registry import FormatName

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .adapter import Adapters

__all__ = ["load", "open"]


def open(
    path: Paths,
    *,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Opens a weight file, a folder of them, an ``index.json`` or a list of files; no tensor is read.

    No code in a file is executed: an interpreter that builds only plain values and descriptions of tensors reads the
    pickle of a torch checkpoint. Nested containers give names with dots: ``{"model": {"w": ...}}`` gives "model.w", the
    third item of a list is "2". An array that is the whole content is named "tensor", whatever the format.

    Args:
        path: what to open: a path, a URL ("hf://owner/name", "s3://bucket/folder", "https://..."), whose bytes are read
            when they are needed, or a path or store of another library, see `safeload.remote`. The format is recognised
            by the content, not by the suffix. A list opens the union of its files; a name that two of them have is an
            error. Any part of a split GGUF file opens all of them.
        format: requires a format, such as "safetensors", "gguf" or "torch" (either of "torch zip" and "torch legacy");
            the guide lists all values, as does the error for an unknown one.
        root: name of the nested dict to take tensors and metadata from, such as "state_dict" or "model.ema"; names
            leave it out. For torch checkpoints.
        unknown_globals: what to do with a pickle that names classes or functions off the list of harmless ones:
            "refuse" it with an error that names them all, or keep them "inert", as placeholders, and read the tensors
            around them. They are neither imported nor called. In the names of tensors inside a placeholder its state
            appears as ``<state>``, its arguments as ``<args>``.
        stored: whether to show the tensors as the files name them. Otherwise tensors are what they mean: a packed
            weight of a quantized checkpoint appears once, under its logical name, as a `QuantizedTensor`, and its
            scales vanish into it.
        storage_options: for URLs: options of the filesystem that a URL leads to, as fsspec takes them (keys,
            ``endpoint_url``, ``token``, ...); for https ``headers``, ``timeout``, ``retries`` and others. Options, also
            empty ones, allow schemes beyond https, http, hf, s3, gs, az, file and memory, and chains such as
            ``filecache::s3://...``.

    Returns:
        The open checkpoint; ``with safeload.open(path) as checkpoint:`` closes it.

    Raises:
        FormatError: the file breaks its format, or an index does not match its folder.
        ForbiddenError: a pickle names globals off the list of harmless ones.
        UnsupportedError: a format or a tensor that this version does not read, or a folder without weights.
        LimitError: a named limit is exceeded.
        TensorNotFoundError: an unknown ``root``; the message lists the existing ones.
        RemoteError: the network, or the server of a URL, fails.
        OSError: a system error, such as FileNotFoundError or PermissionError.
        ImportError: a URL needs a package that is not installed.

    Example:
        >>> import safeload
        >>> with safeload.open("model.safetensors") as checkpoint:
        ...     checkpoint.tensors["conv1.bias"].dtype, checkpoint["conv1.bias"].shape
        ('F32', (128,))
    """
    return Checkpoint(open_paths(path, format, root, unknown_globals, stored, storage_options=storage_options))


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
    adapters: Adapters = None,
    storage_options: Mapping[str, Any] | None = None,
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
        path: a weight file, a folder of them, an ``index.json``, a URL of any of these, or a list of files. The format
            is recognised by the content, not by the suffix.
        names: exact names of the tensors to load; None for all.
        only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``; instead of ``names``.
        drop: shell pattern, or several, of names to leave out.
        format: requires a format, such as "safetensors", "gguf" or "torch"; None for any.
        root: name of the nested dict of a torch checkpoint to take tensors from, such as "state_dict".
        unknown_globals: what to do with a pickle that names classes or functions off the list of harmless ones:
            "refuse" it, or keep them "inert", as placeholders, and read the tensors around them.
        stored: True for the tensors as the files name them: codes and scales of packed weights apart.
        adapters: LoRA adapters to merge while loading: the path of one (PEFT's or MLX's), a pair (path, weight), or a
            list of these, which are merged in order. Sums are made in float32 and rounded once, to ``dtype`` or to the
            dtype of the tensor; packed tensors that an adapter changes need ``dtype``.
        storage_options: for URLs: options of the filesystem that a URL leads to, see `open`.
        dtype: dtype that floating tensors are converted to, and packed ones dequantized to, while they are read:
            "float32", "bf16", a numpy or ml_dtypes type, ...; None to convert nothing. Integer, bool and complex
            tensors are not converted.
        backend: "mmap" for copy-on-write views of tensors that are not converted, "pread" to read into private memory
            on all cores, "direct" to do so past the page cache, for weights that are not in it and will not soon be
            read again. What the system cannot read so (some network file systems, Windows, macOS) is read as by
            "pread". From URLs all read.
        out: arrays to fill, by name, each C-contiguous and of the dtype and shape of its tensor.
        threads: for reading; None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array: writable, and C-contiguous except for strided tensors of torch.

    Raises:
        FormatError: a file breaks its format or ends too early, with path and byte.
        ForbiddenError: a pickle names globals off the list of harmless ones.
        UnsupportedError: a format, a tensor or a conversion that this version does not support.
        TensorNotFoundError: an unknown name or ``root``, a pattern that matches no name, or an adapter for a module
            that the checkpoint does not have.
        ValueError: an array of ``out`` that does not fit; both ``names`` and ``only``.
        RemoteError: the network, or the server of a URL, fails.
        OSError: a system error, such as FileNotFoundError.

    Example:
        >>> import safeload
        >>> weights = safeload.load("tiny-llama", only="*norm.weight", dtype="float32")
        >>> weights["model.norm.weight"].dtype
        dtype('float32')
    """
    with open(
        path,
        format=format,
        root=root,
        unknown_globals=unknown_globals,
        stored=stored,
        storage_options=storage_options,
    ) as checkpoint:
        if adapters is not None:
            from .merge import load_merged, merging  # only here: most programs merge nothing

            with merging(checkpoint, adapters, storage_options) as (base, merge):
                if merge is not None:
                    return load_merged(
                        base,
                        merge,
                        names,
                        only=only,
                        drop=drop,
                        dtype=dtype,
                        backend=backend,
                        out=out,
                        threads=threads,
                        progress=progress,
                    )
        return checkpoint.load(
            names, only=only, drop=drop, dtype=dtype, backend=backend, out=out, threads=threads, progress=progress
        )
