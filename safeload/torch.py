"""Drop-in replacement for ``safetensors.torch``, and checkpoints of any format as torch tensors.

Importing this module does not import torch; its functions do, and raise ImportError if torch is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .core import dtypes, resident, runtime, safetensors
from .core.arrays import check_mapping
from .core.files import caching
from .core.load import load_all, load_tensors, parse_target
from .core.memory import Backend, Cache, check_backend
from .core.names import Patterns
from .core.opening import Paths, Verify
from .core.progress import Progress
from .core.registry import FormatName, UnknownGlobals
from .core.tensors import entries_of
from .core.text import PathLike, clip, native_path, printable, show
from .errors import public

if TYPE_CHECKING:
    from .compat.safe_open import safe_open as safe_open
    from .compat.serialize import TensorSpec as TensorSpec
    from .compat.serialize import deserialize as deserialize
    from .compat.serialize import serialize as serialize
    from .compat.serialize import serialize_file as serialize_file
    from .frameworks.torch_arrays import Device, Module, Tensor
    from .frameworks.torch_ranks import DeviceMesh

__all__ = ["load", "load_checkpoint", "load_file", "load_model", "save", "save_file", "save_model"]

# Further names that other libraries import from safetensors.torch.
_LATER = {
    **runtime.SHARED,
    "_SIZE": ("frameworks.torch_arrays", "SIZES"),
    "_TYPES": ("frameworks.torch_arrays", "TYPES"),
    "_evaluate_tensors_for_save": ("frameworks.torch_arrays", "check_tensors_apart"),
    "_float4_e2m1_x2": ("frameworks.torch_arrays", "TYPES", "F4"),
    "_float8_e4m3fn": ("frameworks.torch_arrays", "TYPES", "F8_E4M3"),
    "_float8_e4m3fnuz": ("frameworks.torch_arrays", "TYPES", "F8_E4M3FNUZ"),
    "_float8_e5m2": ("frameworks.torch_arrays", "TYPES", "F8_E5M2"),
    "_float8_e5m2fnuz": ("frameworks.torch_arrays", "TYPES", "F8_E5M2FNUZ"),
    "_float8_e8m0": ("frameworks.torch_arrays", "TYPES", "F8_E8M0"),
    "_end_ptr": ("frameworks.torch_arrays", "end_ptr"),
    "_filter_shared_not_shared": ("frameworks.torch_arrays", "filter_shared_not_shared"),
    "_find_shared_tensors": ("frameworks.torch_arrays", "find_shared_tensors"),
    "_flatten_as_ptr": ("compat.specs", "flatten_as_ptr"),
    "_getdtype": ("frameworks.torch_arrays", "getdtype"),
    "_is_complete": ("frameworks.torch_arrays", "is_complete"),
    "_remove_duplicate_names": ("frameworks.torch_arrays", "remove_duplicate_names"),
    "_to_ndarray": ("compat.specs", "to_ndarray"),
    "_view2torch": ("compat.specs", "view2torch"),
    "storage_ptr": ("frameworks.torch_arrays", "storage_ptr"),
    "storage_size": ("frameworks.torch_arrays", "storage_size"),
}

# `frameworks.torch_arrays` after the first call that needs it: the import statement would take a tenth of a small load.
_arrays: Any = None


def _imported() -> Any:
    global _arrays
    from .frameworks import torch_arrays

    _arrays = torch_arrays
    return torch_arrays


# The function that loads folders.
_FOLDERS = "safeload.torch.load_checkpoint"

# Limit on names in a message.
_MAX_LISTED = 100


@public
def load_file(
    filename: PathLike,
    device: str | int | Device = "cpu",
    *,
    backend: Backend = "mmap",
    cache: Cache = "keep",
    dtype: Any = None,
    names: Iterable[str] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file.

    Args:
        filename: path of the file.
        device: device of the tensors, as torch takes it. On "meta" tensors have only dtype and shape, and nothing is
            read.
        backend: "mmap" returns copy-on-write views of one private mapping. Loading takes microseconds, each page is
            read on first use, and writing to a tensor does not change the file. "pread" reads everything now, on all
            cores. "direct" also bypasses the page cache, and "auto" chooses (see `safeload.load`). Other devices than
            the CPU always read, through the page cache.
        cache: "drop" reads into private memory and drops the file's pages behind reads, see `safeload.load`.
        dtype: dtype to convert floating tensors to while they are read, in one pass: float64, float32, float16,
            bfloat16, float8_e4m3fn or float8_e5m2, as a torch dtype, a name ("bf16") or a NumPy type. F4 and F6 tensors
            are decoded. Integer, bool and complex tensors keep their dtype.
        names: exact names of the tensors to load; None loads all.
        threads: number of reading threads; None chooses it.
        progress: True shows a progress bar while reading. A callable gets (bytes_done, bytes_total).

    Returns:
        Tensors by name, in file order or in the order of ``names``. Each is contiguous and has its own storage. F4
        tensors have torch's packed dtype, which counts pairs along the last axis. Copies to a device are complete.

    Raises:
        FileNotFoundError: the file does not exist.
        FormatError: the file breaks the format; the message has the byte.
        TensorNotFoundError: a name does not exist.
        UnsupportedError: the device is not available (also a RuntimeError); torch lacks a dtype (such as F6, which
            ``dtype`` decodes); the conversion is not supported; ``dtype`` is given for fp8 with a separate scale, which
            needs `load_checkpoint`.
        SafeloadError: ``device`` (also a RuntimeError and ValueError) or ``backend`` is invalid.
        ImportError: torch is not installed.

    Example:
        >>> from safeload.torch import load_file
        >>> weights = load_file("model.safetensors", dtype="bfloat16", names=["conv1.bias"])
        >>> weights["conv1.bias"].dtype, weights["conv1.bias"].shape
        (torch.bfloat16, torch.Size([128]))
    """
    from .frameworks import torch_arrays, torch_devices

    on_cpu = device is None or (isinstance(device, str) and device == "cpu")
    everything = names is None and dtype is None and threads is None and progress is None
    if on_cpu and everything and cache == "keep" and backend in ("mmap", "pread", "auto"):
        opened = resident.load_or_open(filename, backend, _FOLDERS)
        if isinstance(opened, resident.Resident):
            return torch_arrays.from_table(*opened)
        try:
            return torch_arrays.from_table(opened.table, load_all(opened, backend))
        finally:
            opened.close()
    with caching(cache):
        file = safetensors.open_file(filename, brief=on_cpu, folders=_FOLDERS)
    try:
        place = torch_arrays.device_of(device)
        check_backend(backend)
        tensors = safetensors.chosen(file, names, dtype, "load_file")
        if place is None:
            arrays, _ = load_tensors(tensors, backend=backend, dtype=dtype, threads=threads, progress=progress)
            packed = dtype is None and dtypes.holds_packed(file.table.numbers)
            return torch_arrays.from_arrays(arrays, torch_arrays.raw_of(tensors) if packed else None)
        entries = entries_of(tensors, parse_target(dtype))
        if place.type == "meta":
            return torch_arrays.without_data(entries)
        return torch_devices.load(entries, place, threads=threads, progress=progress)
    finally:
        file.close()


@public
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
    verify: Verify = None,
    cache: Cache = "keep",
    mesh: DeviceMesh | None = None,
    placements: str | Mapping[str, Any] | None = None,
    local: bool = False,
    broadcast: bool = False,
) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint of any format, dequantized if they are quantized.

    With a ``mesh``, all of its processes call the function, and each reads only its own parts of the tensors: of a
    quantized matrix the blocks that hold its part. Tensors that an adapter changes, and packed tensors without
    separate rows or columns (BitNet, experts in a single tensor), are read as whole tensors or rows.

    Args:
        path: a weight file, a folder of weight files, an ``index.json``, a URL or a list of files; see `safeload.open`.
        device: device of the tensors, as torch takes it. On "meta" tensors have only dtype and shape, and nothing is
            read.
        dtype: floating dtype to convert floating tensors and dequantize quantized tensors to, while they are read. None
            keeps the dtype of plain tensors, and gives quantized tensors the dtype in ``config.json``.
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
        progress: True shows a progress bar while reading. A callable gets (bytes_done, bytes_total).
        verify: True, the path of a manifest, or a `safeload.Signature` to verify files against; see `safeload.load`.
        cache: "drop" reads into private memory and drops the files' pages behind reads, see `safeload.load`.
        mesh: the processes that divide the tensors. ``device`` must be of its type; "cpu" stands for the process's own
            device of the mesh.
        placements: a mapping of shell patterns of names to ``Shard`` or ``Replicate`` of ``torch.distributed.tensor``,
            to a list with one for each dimension of the mesh, or to "tp"; the first matching pattern wins, and tensors
            without one are replicated. "tp" is the tensor-parallel plan of the model's family, along the dimension
            "tp" of the mesh or its only one; alone it stands for ``{"*": "tp"}``.
        local: True returns the parts as plain tensors instead of as DTensors. Tensors that hold several matrices, such
            as ``qkv_proj``, need it with "tp".
        broadcast: True reads replicated parts in the first process along a dimension of the mesh only, which sends
            these on.

    Returns:
        Tensors by name, in the order of the checkpoint or of ``names``. On the CPU, tensors that keep their dtype are
        copy-on-write views of the mapped files. With a mesh, DTensors of the whole shape. A part has the size that
        ``torch.chunk`` gives: ``ceil(size / ranks)`` along a sharded dimension, less or 0 in the last ranks.

    Raises:
        FormatError: a file breaks its format or ends too early; the message has path and byte.
        ForbiddenError: a pickle names globals outside the allowlist.
        UnsupportedError: the format, a tensor, the device or a conversion is not supported, or neither ``dtype`` nor a
            config gives the dtype of quantized tensors. With "tp", the family is unknown or has no plan, or its
            heads cannot be divided among the ranks.
        TensorNotFoundError: a name does not exist, or a pattern matches none.
        VerificationError: see `safeload.load`.
        SafeloadError: loading failed in another process of the mesh.
        TypeError: ``placements`` is of another type, or has another placement, such as ``Partial``.
        ValueError: both ``names`` and ``only`` are given, a sharded dimension does not exist, or a mesh has more or
            fewer dimensions than placements.
        OSError: a system error, such as FileNotFoundError.
        ImportError: torch is not installed.

    Example:
        >>> from safeload.torch import load_checkpoint
        >>> weights = load_checkpoint("tiny-llama", only="*norm.weight", dtype="float32")
        >>> weights["model.norm.weight"].dtype
        torch.float32
    """
    options = dict(locals())
    divided = {key: options.pop(key) for key in ("mesh", "placements", "local", "broadcast")}
    with caching(options.pop("cache")):
        if mesh is None:
            if placements is not None or local or broadcast:
                raise ValueError("placements=, local= and broadcast= need mesh=")
            return _load_selected(**options)
        from .frameworks import torch_ranks

        tensors: dict[str, Tensor] = torch_ranks.load(
            **options, **{**divided, "placements": {} if placements is None else placements}
        )
        return tensors


def _load_selected(
    path: Paths,
    device: Any,
    *,
    backend: Backend = "mmap",
    threads: int | None = None,
    progress: Progress = None,
    **selection: Any,
) -> dict[str, Tensor]:
    """Load the tensors that `selecting` selects.

    Progress is that of the last group, which takes the time: an earlier group is not converted.
    """
    from .adapters.merge import load_merged
    from .core.checkpoint import chosen, tensors_of
    from .frameworks import checkpoints, torch_arrays, torch_devices

    place = torch_arrays.device_of(device)
    check_backend(backend)
    with checkpoints.selecting(path, **selection) as selected:
        if place is not None:
            return torch_devices.load_selected(selected, place, threads=threads, progress=progress)
        checkpoint, merge, names, groups = selected

        def load_members(members: Any, **how: Any) -> dict[str, Any]:
            if merge is not None:
                return load_merged(checkpoint, merge, members, **how)
            return load_tensors(chosen(checkpoint, members, None, None, how["dtype"]), **how)[0]

        arrays: dict[str, Any] = {}
        raw: dict[str, Any] = {}
        for number, (members, dtype) in enumerate(groups, 1):
            if dtype is None and any(dtypes.holds_packed(file.table.numbers) for file in checkpoint.weight_files):
                raw = torch_arrays.raw_of(tensors_of(checkpoint, members))
            shown = progress if number == len(groups) else None
            arrays.update(load_members(members, dtype=dtype, backend=backend, threads=threads, progress=shown))
        if len(groups) > 1:
            arrays = {name: arrays[name] for name in names}
        return torch_arrays.from_arrays(arrays, raw)


@public
def load(data: bytes) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file in memory, onto the CPU.

    Args:
        data: the file's content, in any C-contiguous bytes-like object. It is copied.

    Returns:
        Tensors by name, in file order.

    Raises:
        FormatError: the bytes break the format.
        TypeError: ``data`` is a path, which `load_file` and `load_checkpoint` take.
        UnsupportedError: torch lacks a dtype.
        ImportError: torch is not installed.

    Example:
        >>> from pathlib import Path
        >>> from safeload.torch import load
        >>> load(Path("model.safetensors").read_bytes())["conv1.bias"].shape
        torch.Size([128])
    """
    torch_arrays = _arrays or _imported()
    if type(data) is not bytes and isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"load takes the content of a file, got {show(data)}; pass paths to safeload.torch.load_file or "
            "safeload.torch.load_checkpoint"
        )
    arrays, table = resident.parse(data, copy=True)
    tensors: dict[str, Tensor]
    tensors = torch_arrays.from_arrays(arrays) if table is None else torch_arrays.from_table(table, arrays)
    return tensors


@public
def save(tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialize tensors to the bytes of a safetensors file.

    Args:
        tensors: dense, contiguous tensors by name, on any device. They must not share memory.
        metadata: str to str, for the header. Keys are sorted.

    Returns:
        The file's content.

    Raises:
        ValueError: not a dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: tensors share memory; use `save_model`.
        NotImplementedError: a tensor is on the device "meta".
        SafetensorError: the format lacks a dtype (also a KeyError) or cannot store a name.
        TypeError: a name or the metadata is not text.
        ImportError: torch is not installed.

    Example:
        >>> import torch
        >>> from safeload.torch import load, save
        >>> load(save({"weight": torch.ones(2, 2)}))["weight"].sum()
        tensor(4.)
    """
    torch_arrays = _arrays or _imported()
    keep: list[Any] = []
    return safetensors.FileWriter(torch_arrays.to_write(tensors, keep), metadata).to_bytes()


@public
def save_file(tensors: dict[str, Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically: after a crash there is either the old file or the new file.

    Args:
        tensors: dense, contiguous tensors by name, see `save`. Tensors on the CPU are not copied.
        filename: a new file gets mode 0666 less the umask, an existing file keeps its mode. Symbolic links are
            followed; devices and pipes are written to directly.
        metadata: str to str, for the header. Keys are sorted.

    Raises:
        ValueError: not a dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: tensors share memory; use `save_model`.
        NotImplementedError: a tensor is on the device "meta".
        SafetensorError: the format lacks a dtype (also a KeyError) or cannot store a name.
        TypeError: a name or the metadata is not text.
        OSError: the file cannot be written (PermissionError, disk full, ...), and the old file is still there. Also a
            SafetensorError.
        ImportError: torch is not installed.

    Example:
        >>> import torch
        >>> from safeload.torch import load_file, save_file
        >>> save_file({"weight": torch.ones(2, 2)}, "ones.safetensors", {"made by": "hand"})
        >>> load_file("ones.safetensors")["weight"].sum()
        tensor(4.)
    """
    from .frameworks import torch_arrays

    keep: list[Any] = []
    safetensors.FileWriter(torch_arrays.to_write(tensors, keep), metadata).to_file(filename)


@public
def save_model(
    model: Module, filename: PathLike, metadata: Mapping[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Save the state of a model. Parameters that share memory, such as tied embeddings, are written once.

    Args:
        model: a ``torch.nn.Module``.
        filename: see `save_file`.
        metadata: str to str, for the header. For each omitted name, the name with its values is added.
        force_contiguous: True saves parameters in C order. False refuses parameters that are not contiguous.

    Raises:
        RuntimeError: tensors share memory, and none covers all of it.
        ValueError: the state holds anything but dense tensors, or a tensor is not contiguous.
        SafetensorError, NotImplementedError, OSError, ImportError: see `save_file`.

    Example:
        >>> import torch
        >>> from safeload.torch import load_model, save_model
        >>> model = torch.nn.Linear(2, 2)
        >>> save_model(model, "linear.safetensors")
        >>> load_model(model, "linear.safetensors")
        (set(), [])
    """
    from .frameworks import torch_arrays

    if metadata is not None:
        check_mapping(metadata, "metadata", "str to str")
    state = dict(model.state_dict())
    torch_arrays.check_tensors(state)
    texts = dict(metadata or {})
    for kept, removed in torch_arrays.remove_duplicate_names(state, partial=True).items():
        for name in removed:
            texts.setdefault(name, kept)  # the caller's metadata wins
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(state, filename, texts if texts or metadata is not None else None)
    except ValueError as error:
        if force_contiguous:
            raise
        raise ValueError(f"{error}; or use save_model(..., force_contiguous=True)") from None


@public
def load_model(
    model: Module,
    filename: PathLike,
    strict: bool = True,
    device: str | int | Device = "cpu",
    *,
    backend: Backend = "mmap",
    dtype: Any = None,
    verify: Verify = None,
) -> tuple[set[str], list[str]]:
    """Load a file, or a folder of weight files, into a model.

    For parameters that share memory, the file or folder can have any of their names. A folder can also have several, if
    their values are equal.

    Args:
        model: a ``torch.nn.Module``. Its parameters are overwritten, and keep their dtypes and devices.
        filename: path of a safetensors file, or of a folder or ``index.json``. A folder can be of any format that
            `load_checkpoint` loads, and quantized weights in it are dequantized.
        strict: False accepts missing and unexpected names.
        device: device to load onto before parameters are overwritten.
        backend: see `load_file`.
        dtype: dtype to convert floating tensors to while they are read, see `load_file`. Quantized weights need it if
            the folder's ``config.json`` has no dtype.
        verify: see `load_checkpoint`.

    Returns:
        Names of the model that the file or folder lacks, and names of the file or folder that the model lacks.

    Raises:
        RuntimeError: shapes differ, or names are missing or unexpected (if ``strict``).
        FormatError, SafeloadError, OSError, ImportError: see `load_file` and `load_checkpoint`.

    Example:
        >>> import torch
        >>> from safeload.torch import load_model, save_model
        >>> save_model(torch.nn.Linear(2, 2), "linear.safetensors")
        >>> load_model(torch.nn.Linear(2, 2, bias=False), "linear.safetensors", strict=False)
        (set(), ['bias'])
    """
    from .frameworks import torch_arrays

    path = native_path(filename)[0]
    folder = path.endswith(".index.json") or os.path.isdir(path)
    if folder or verify:
        tensors = _load_selected(path, device, dtype=dtype, backend=backend, verify=verify)
    else:
        tensors = load_file(filename, device, backend=backend, dtype=dtype)
    removed = torch_arrays.remove_duplicate_names(model.state_dict(), preferred_names=tensors.keys(), partial=True)
    missing_names, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(missing_names)
    for kept, names in removed.items():
        for name in names:
            if name in missing:  # it was filled through the kept name
                missing.remove(name)
            elif not folder or not torch_arrays.same_bytes(tensors[name], tensors[kept]):
                unexpected.append(name)  # save_model writes only one of them
    if strict and (missing or unexpected):
        where = f" from {path}" if folder else ""
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}{where}:"]
        if missing:
            lines.append(f"    Missing key(s) in state_dict: {_quoted(missing)}")
        if unexpected:
            lines.append(f"    Unexpected key(s) in state_dict: {_quoted(unexpected)}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _quoted(names: Iterable[str]) -> str:
    ordered = sorted(names)
    quoted = [f'"{clip(printable(name), 200)}"' for name in ordered[:_MAX_LISTED]]
    rest = len(ordered) - _MAX_LISTED
    return ", ".join([*quoted, f"and {rest} more"] if rest > 0 else quoted)


def __getattr__(name: str) -> Any:
    return runtime.imported(globals(), _LATER, name)


def __dir__() -> list[str]:
    return __all__
