"""Drop-in replacement for ``safetensors.torch``, and checkpoints of every format as tensors of torch.

Importing this module does not import torch; its functions do. Without torch they raise an ImportError with the command
that installs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .base.paths import PathLike
from .base.selecting import Patterns
from .compat.names import SHARED, imported
from .engine.read.load import Backend
from .engine.run.progress import Progress
from .formats.opening import Paths, UnknownGlobals
from .formats.registry import FormatName

if TYPE_CHECKING:
    from .compat.safe_open import safe_open as safe_open
    from .compat.serialize import TensorSpec as TensorSpec
    from .compat.serialize import deserialize as deserialize
    from .compat.serialize import serialize as serialize
    from .compat.serialize import serialize_file as serialize_file
    from .frameworks.torch_arrays import Device, Module, Tensor

__all__ = ["load", "load_checkpoint", "load_file", "load_model", "save", "save_file", "save_model"]

# Names besides the functions below that other libraries import from safetensors.torch.
_LATER = {
    **SHARED,
    "_SIZE": ("frameworks.torch_arrays", "SIZES"),
    "_TYPES": ("frameworks.torch_arrays", "TYPES"),
    "_evaluate_tensors_for_save": ("frameworks.torch_files", "check_tensors_apart"),
    "_float4_e2m1_x2": ("compat.torch_specs", "FLOAT4_E2M1_X2"),
    "_float8_e4m3fn": ("compat.torch_specs", "FLOAT8_E4M3FN"),
    "_float8_e4m3fnuz": ("compat.torch_specs", "FLOAT8_E4M3FNUZ"),
    "_float8_e5m2": ("compat.torch_specs", "FLOAT8_E5M2"),
    "_float8_e5m2fnuz": ("compat.torch_specs", "FLOAT8_E5M2FNUZ"),
    "_float8_e8m0": ("compat.torch_specs", "FLOAT8_E8M0"),
    "_end_ptr": ("frameworks.torch_shared", "end_ptr"),
    "_filter_shared_not_shared": ("frameworks.torch_shared", "filter_shared_not_shared"),
    "_find_shared_tensors": ("frameworks.torch_shared", "find_shared_tensors"),
    "_flatten_as_ptr": ("compat.torch_specs", "flatten_as_ptr"),
    "_getdtype": ("compat.torch_specs", "getdtype"),
    "_is_complete": ("frameworks.torch_shared", "is_complete"),
    "_remove_duplicate_names": ("frameworks.torch_shared", "remove_duplicate_names"),
    "_to_ndarray": ("compat.torch_specs", "to_ndarray"),
    "_view2torch": ("compat.torch_specs", "view2torch"),
    "storage_ptr": ("frameworks.torch_shared", "storage_ptr"),
    "storage_size": ("frameworks.torch_shared", "storage_size"),
}


def load_file(
    filename: PathLike,
    device: str | int | Device = "cpu",
    *,
    backend: Backend = "mmap",
    dtype: Any = None,
    names: Iterable[str] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Tensor]:
    """Loads the tensors of a safetensors file, as they are stored.

    Args:
        filename: path of the file.
        device: of the tensors, as torch takes it. On "meta" they have dtype and shape only, and nothing is read.
        backend: on the CPU, "mmap" for copy-on-write views of one private mapping: loading takes microseconds, each
            page is read when it is first touched, and writing into a tensor changes no file. "pread" to read everything
            now, on all cores, "direct" to do so past the page cache (see `safeload.load`). What goes to another device
            is always read, through the page cache.
        dtype: dtype that floating tensors are converted to while they are read, in one pass: float64, float32, float16,
            bfloat16, float8_e4m3fn or float8_e5m2, as dtype of torch, name ("bf16") or type of numpy. Integer, bool and
            complex tensors are not converted; F4 and F6 tensors are decoded.
        names: exact names of the tensors to load; None for all.
        threads: for reading; None: chosen automatically.
        progress: for reading: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to tensor, in the order of the bytes or of ``names``: contiguous, each with a storage of its own. F4
        tensors have torch's packed dtype, whose last axis counts pairs. On a device all copies are done.

    Raises:
        FileNotFoundError: the file does not exist.
        FormatError: the file breaks the format, with the byte where it does.
        TensorNotFoundError: an unknown name.
        UnsupportedError: a device that is not available, which is a RuntimeError too; a dtype that torch does not have
            (F6, unless ``dtype`` decodes it), an unsupported conversion; ``dtype`` for fp8 with a separate scale, which
            only `load_checkpoint` brings together.
        SafeloadError: ``device`` or ``backend`` is invalid; a device is a RuntimeError and a ValueError too.
        ImportError: torch is not installed.

    Example:
        >>> from safeload.torch import load_file
        >>> weights = load_file("model.safetensors", dtype="bfloat16", names=["conv1.bias"])
        >>> weights["conv1.bias"].dtype, weights["conv1.bias"].shape
        (torch.bfloat16, torch.Size([128]))
    """
    from .frameworks import torch_files

    return torch_files.load_file(
        filename, device, backend=backend, dtype=dtype, names=names, threads=threads, progress=progress
    )


def load_checkpoint(
    path: Paths,
    *,
    device: str | int | Device = "cpu",
    dtype: Any = None,
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
) -> dict[str, Tensor]:
    """Loads the tensors of a checkpoint of any format, with their true values where they are quantized.

    Args:
        path: a weight file, a folder of them, an ``index.json``, a URL or a list of files; see `safeload.open`.
        device: of the tensors, as torch takes it. On "meta" they have dtype and shape only, and nothing is read.
        dtype: floating dtype that floating tensors are converted to, and quantized ones dequantized to, while they are
            read. None: plain tensors keep theirs, and quantized ones get the one that ``config.json`` names.
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
        progress: for reading: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to tensor, in the order of the checkpoint or of ``names``. On the CPU those that are not converted are
        copy-on-write views of the mapped files.

    Raises:
        FormatError: a file breaks its format or ends too early, with path and byte.
        ForbiddenError: a pickle names globals off the list of harmless ones.
        UnsupportedError: a format, a tensor, a device or a conversion that is not supported; without ``dtype``,
            quantized tensors whose dtype no config names.
        TensorNotFoundError: an unknown name, or a pattern that matches none.
        ValueError: both ``names`` and ``only``.
        OSError: a system error, such as FileNotFoundError.
        ImportError: torch is not installed.

    Example:
        >>> from safeload.torch import load_checkpoint
        >>> weights = load_checkpoint("tiny-llama", only="*norm.weight", dtype="float32")
        >>> weights["model.norm.weight"].dtype
        torch.float32
    """
    from .frameworks import torch_files

    return torch_files.load_checkpoint(
        path,
        device=device,
        dtype=dtype,
        names=names,
        only=only,
        drop=drop,
        format=format,
        root=root,
        unknown_globals=unknown_globals,
        stored=stored,
        adapters=adapters,
        storage_options=storage_options,
        threads=threads,
        progress=progress,
    )


def load(data: bytes) -> dict[str, Tensor]:
    """Loads the tensors of a safetensors file in memory, onto the CPU.

    Args:
        data: the content: any C-contiguous bytes-like object. It is copied.

    Returns:
        Name to tensor, in the order of the bytes.

    Raises:
        FormatError: the bytes break the format.
        TypeError: a path: `load_file` and `load_checkpoint` take these.
        UnsupportedError: a dtype that torch does not have.
        ImportError: torch is not installed.

    Example:
        >>> from pathlib import Path
        >>> from safeload.torch import load
        >>> load(Path("model.safetensors").read_bytes())["conv1.bias"].shape
        torch.Size([128])
    """
    from .frameworks import torch_files

    return torch_files.load(data)


def save(tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serializes tensors to the bytes of a safetensors file.

    Args:
        tensors: name to dense, contiguous tensor on any device, of which no two share memory.
        metadata: text to text for the header, written in ascending order of keys.

    Returns:
        The file's content.

    Raises:
        ValueError: not a dict of tensors, a sparse tensor, or one that is not contiguous.
        RuntimeError: tensors share memory; `save_model` saves these.
        NotImplementedError: a tensor on the device "meta".
        SafetensorError: a dtype or a name that the format does not have; for a dtype it is a KeyError too.
        TypeError: a name or the metadata is not text.
        ImportError: torch is not installed.

    Example:
        >>> import torch
        >>> from safeload.torch import load, save
        >>> load(save({"weight": torch.ones(2, 2)}))["weight"].sum()
        tensor(4.)
    """
    from .frameworks import torch_files

    return torch_files.save(tensors, metadata)


def save_file(tensors: dict[str, Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, atomically: a crash at any moment leaves the old file or the new one.

    Args:
        tensors: name to dense, contiguous tensor, see `save`; those on the CPU are not copied.
        filename: a new file gets mode 0666 less the umask, an existing one keeps its mode, a symbolic link is
            followed, a device or pipe is written through.
        metadata: text to text for the header, written in ascending order of keys.

    Raises:
        ValueError: not a dict of tensors, a sparse tensor, or one that is not contiguous.
        RuntimeError: tensors share memory; `save_model` saves these.
        NotImplementedError: a tensor on the device "meta".
        SafetensorError: a dtype or a name that the format does not have; for a dtype it is a KeyError too.
        TypeError: a name or the metadata is not text.
        OSError: the file cannot be written (PermissionError, no space, ...); the old one is still there. It is a
            SafetensorError too.
        ImportError: torch is not installed.

    Example:
        >>> import torch
        >>> from safeload.torch import load_file, save_file
        >>> save_file({"weight": torch.ones(2, 2)}, "ones.safetensors", {"made by": "hand"})
        >>> load_file("ones.safetensors")["weight"].sum()
        tensor(4.)
    """
    from .frameworks import torch_files

    torch_files.save_file(tensors, filename, metadata)


def save_model(
    model: Module, filename: PathLike, metadata: Mapping[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Saves the state of a model; of parameters that share memory, such as tied embeddings, only one is written.

    Args:
        model: a ``torch.nn.Module``.
        filename: see `save_file`.
        metadata: text to text for the header. Each name that is left out is added, with the name that has its values.
        force_contiguous: False to refuse parameters that are not contiguous; True to save them in C order.

    Raises:
        RuntimeError: none of the tensors that share memory covers all of it.
        ValueError: the state holds something else than dense tensors; a tensor that is not contiguous.
        SafetensorError, NotImplementedError, OSError, ImportError: see `save_file`.

    Example:
        >>> import torch
        >>> from safeload.torch import load_model, save_model
        >>> model = torch.nn.Linear(2, 2)
        >>> save_model(model, "linear.safetensors")
        >>> load_model(model, "linear.safetensors")
        (set(), [])
    """
    from .frameworks import torch_models

    torch_models.save_model(model, filename, metadata, force_contiguous)


def load_model(
    model: Module,
    filename: PathLike,
    strict: bool = True,
    device: str | int | Device = "cpu",
    *,
    backend: Backend = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a file into a model; of parameters that share memory the file may have either name.

    Args:
        model: a ``torch.nn.Module``, whose parameters are overwritten.
        filename: path of the file.
        strict: False to accept a file that lacks parameters or has others.
        device: that the file is loaded onto before parameters are overwritten; these stay where they are.
        backend: see `load_file`.

    Returns:
        Names of the model that the file lacks, and names of the file that were not used.

    Raises:
        RuntimeError: with ``strict`` names that are missing or unexpected; shapes that differ.
        FormatError, SafeloadError, OSError, ImportError: see `load_file`.

    Example:
        >>> import torch
        >>> from safeload.torch import load_model, save_model
        >>> save_model(torch.nn.Linear(2, 2), "linear.safetensors")
        >>> load_model(torch.nn.Linear(2, 2, bias=False), "linear.safetensors", strict=False)
        (set(), ['bias'])
    """
    from .frameworks import torch_models

    return torch_models.load_model(model, filename, strict, device, backend=backend)


def __getattr__(name: str) -> Any:
    return imported(globals(), _LATER, name)


def __dir__() -> list[str]:
    return __all__
