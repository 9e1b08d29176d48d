"""`open` and `load`: open a checkpoint of any format, or load its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from ..errors import public
from .arrays import Array
from .checkpoint import Checkpoint
from .files import Located
from .load import Backend, DtypeLike, LoadOptions
from .names import Patterns
from .opening import Paths, open_paths
from .paths import PathLike
from .progress import Progress
from .registry import FormatName, UnknownGlobals, part

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .signature import Verify

__all__ = ["load", "open"]


# The `adapters=` argument: a path, a path with its weight, or a sequence of these in order.
One = PathLike | Located | tuple[PathLike | Located, float]
Adapters = One | Sequence[One] | None


class OpenOptions(LoadOptions, total=False):
    """Options of `load`: options of `Checkpoint.load` and of `open`."""

    format: FormatName | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool
    adapters: Any
    storage_options: Mapping[str, Any] | None
    verify: Verify


@public
def open(
    path: Paths,
    *,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    verify: Verify = None,
) -> Checkpoint:
    """Open a weight file, a folder of weight files, an ``index.json`` or a list of files. No tensor is read.

    No code in a file is executed. Pickles of torch checkpoints are read by an interpreter limited to plain values and
    tensor descriptions. Nested containers become dotted names: ``{"model": {"w": ...}}`` holds "model.w", and the third
    item of a list is "2". If the whole content is a single array, its name is "tensor".

    Args:
        path: a path, a URL ("hf://owner/name", "s3://bucket/folder", "https://..."), a path or store of another
            library (see `safeload.remote`), or a file object opened in binary mode, such as `io.BytesIO`. From a URL,
            bytes are fetched when they are needed. A file object is read from its current position to its end; it stays
            open, and its position is restored. Pipes and decompressors such as `gzip.GzipFile` are first copied to a
            temporary file. The format is recognized by content, not by suffix. A list opens the union of its files;
            two files must not share a name. Any part of a split GGUF file opens all parts.
        format: required format, such as "safetensors", "gguf" or "torch" ("torch zip" or "torch legacy"). The guide and
            the error for an unknown value list all formats.
        root: nested container to take tensors and metadata from, such as "state_dict" or "model.ema" in a torch
            checkpoint, "params" in an Orbax checkpoint, or a model in an archive. Names omit it.
        unknown_globals: how to treat a pickle that names classes or functions outside the allowlist. "refuse" raises an
            error with all their names. "inert" replaces them by placeholders, which are never imported or called, and
            reads the tensors. Inside a placeholder, tensor names contain ``<state>`` or ``<args>``.
        stored: True shows tensors as the files name them. Otherwise a packed weight of a quantized checkpoint appears
            once, under its logical name, as a `QuantizedTensor` with its scales inside.
        storage_options: options of the filesystem behind a URL, as fsspec takes them (keys, ``endpoint_url``,
            ``token``, ...); for https also ``headers``, ``timeout`` and ``retries``. A dict, even an empty one, also
            allows schemes other than https, http, hf, s3, gs, az, file, memory and ollama, and chains such as
            ``filecache::s3://...``.
        verify: what to verify files against, see `load`. Each file is read whole and hashed before its first tensor is
            returned. Until then, names, shapes and metadata of large safetensors and GGUF files are not verified.

    Returns:
        The open checkpoint. ``with safeload.open(path) as checkpoint:`` closes it.

    Raises:
        FormatError: the file breaks its format, or an index does not match its folder.
        ForbiddenError: a pickle names globals outside the allowlist.
        UnsupportedError: safeload cannot read the format or a tensor, or a folder has no weights.
        LimitError: a named limit is exceeded.
        TensorNotFoundError: ``root`` does not exist; the message lists the existing roots.
        VerificationError: there is nothing to verify against, or a file is not covered or differs.
        RemoteError: the network or the server of a URL fails.
        OSError: a system error, such as FileNotFoundError or PermissionError.
        ImportError: a URL needs a package that is not installed.
        TypeError, ValueError: invalid arguments, such as a text file or a closed file object.

    Example:
        >>> import safeload
        >>> with safeload.open("model.safetensors") as checkpoint:
        ...     checkpoint.tensors["conv1.bias"].dtype, checkpoint["conv1.bias"].shape
        ('F32', (128,))
    """
    opened = open_paths(path, format, root, unknown_globals, stored, storage_options=storage_options, verify=verify)
    return Checkpoint(opened)


def check_unadapted(verify: Verify) -> None:
    """Refuse ``verify=`` with adapters, which no manifest of the model covers."""
    if verify is not None and verify is not False:
        raise ValueError("verify= does not cover adapters: merge them in a separate call, or verify them by themselves")


@overload
def load(
    path: Paths, names: Iterable[str] | None = None, *, dtype: None = None, **options: Unpack[OpenOptions]
) -> dict[str, Any]: ...
@overload
def load(
    path: Paths, names: Iterable[str] | None = None, *, dtype: DtypeLike, **options: Unpack[OpenOptions]
) -> dict[str, Array]: ...
@public
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
    verify: Verify = None,
) -> dict[str, Any]:
    """Load the tensors of a checkpoint of any format as NumPy arrays.

    Packed weights of quantized checkpoints are dequantized if ``dtype`` is given, and `QuantizedTensor` otherwise. No
    code in a file is executed.

    Args:
        path: a weight file, a folder of weight files, an ``index.json``, a URL of any of these, a file object opened in
            binary mode (see `open`), or a list of files. The format is recognized by content, not by suffix.
        names: exact names of the tensors to load; None loads all.
        only: shell pattern, or several, of the names to load, such as ``"model.layers.0.*"``. Cannot be combined with
            ``names``.
        drop: shell pattern, or several, of the names to skip.
        format: required format, such as "safetensors", "gguf" or "torch"; None accepts any.
        root: nested container to take tensors from, such as "state_dict", see `open`.
        unknown_globals: how to treat a pickle that names classes or functions outside the allowlist: "refuse" it, or
            read its tensors with "inert" placeholders for the unknown objects.
        stored: True loads stored tensors as they are: codes and scales of packed weights separately.
        adapters: LoRA adapters (PEFT or MLX) to merge while loading: a path, a pair (path, weight), or a list of these,
            merged in order. Sums are computed in float32 and rounded once, to ``dtype`` or to the tensor's dtype.
            Changes of packed tensors need ``dtype``.
        storage_options: options of the filesystem behind a URL, see `open`.
        dtype: dtype to convert floating tensors and dequantize packed tensors to, while they are read: "float32",
            "bf16", a NumPy or ml_dtypes type, ... None converts nothing. Integer, bool and complex tensors keep their
            dtype.
        backend: "mmap" returns copy-on-write views unless a tensor is converted. "pread" reads into private memory
            on all cores. "direct" also bypasses the page cache, for weights outside the cache that will not be read
            again soon; it falls back to "pread" if the system has no direct I/O (some network file systems, Windows,
            macOS). URLs are always read.
        out: arrays to fill, by name. Each must be C-contiguous and have its tensor's dtype and shape.
        threads: number of reading threads; None chooses it.
        progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).
        verify: the path of a manifest (``safeload check --write-manifest``) or a `Signature` to compare every file
            with, in the pass that reads it. Tensors are returned only if all files match. True uses the manifest next
            to the files, or the digests of the Hub's cache or of ollama. The files that hold the tensors are read whole
            into private memory, whatever ``backend`` and ``only`` say. Cannot be combined with ``adapters``.

    Returns:
        Arrays by name. They are writable, and C-contiguous except for strided torch tensors.

    Raises:
        FormatError: a file breaks its format or ends too early; the message has path and byte.
        ForbiddenError: a pickle names globals outside the allowlist.
        UnsupportedError: safeload does not support the format, a tensor or a conversion.
        TensorNotFoundError: a name or ``root`` does not exist, a pattern matches no name, or the checkpoint lacks a
            module of an adapter.
        VerificationError: a file differs or is not covered; there is nothing to verify against, or no key.
        ValueError: an array in ``out`` does not fit, both ``names`` and ``only`` are given, a file object is closed, or
            ``verify`` and ``adapters`` are given.
        TypeError: ``path`` is neither a path nor a binary file.
        RemoteError: the network or the server of a URL fails.
        OSError: a system error, such as FileNotFoundError.

    Example:
        >>> import safeload
        >>> weights = safeload.load("tiny-llama", only="*norm.weight", dtype="float32")
        >>> weights["model.norm.weight"].dtype
        dtype('float32')
    """
    if adapters is not None:
        check_unadapted(verify)
    with open(
        path,
        format=format,
        root=root,
        unknown_globals=unknown_globals,
        stored=stored,
        storage_options=storage_options,
        verify=verify,
    ) as checkpoint:
        load_from: Callable[..., dict[str, Any]] = checkpoint.load
        if adapters is not None:
            load_from = partial(part("merging").load_with_adapters, checkpoint, adapters, storage_options)
        return load_from(
            names=names, only=only, drop=drop, dtype=dtype, backend=backend, out=out, threads=threads, progress=progress
        )
