"""Files and checkpoints as tensors of torch, and tensors as files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike as OsPathLike
from typing import Any

from ..base import dtypes
from ..base.paths import PathLike
from ..base.selecting import Patterns
from ..base.table import Table
from ..base.text import clip, printable, show
from ..engine.read import in_memory
from ..engine.read.load import check_backend, load_all, load_tensors, parse_target
from ..engine.read.plan import entries_of
from ..engine.read.tensors import Tensors
from ..engine.run.progress import Progress
from ..formats.opening import Paths
from ..formats.safetensors import file as safetensors
from ..loading.merge import merging
from . import torch_arrays, torch_devices
from .checkpoints import load_arrays, open_checkpoint, select, unconverted
from .torch_arrays import torch
from .torch_shared import check_not_shared, listed


def load_file(
    filename: PathLike,
    device: Any = "cpu",
    *,
    backend: Any = "mmap",
    dtype: Any = None,
    names: Iterable[str] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Loads the tensors of a safetensors file; see `safeload.torch.load_file`."""
    on_cpu = device is None or (isinstance(device, str) and device == "cpu")
    whole = names is None and dtype is None and threads is None and progress is None
    if on_cpu and whole and backend in ("mmap", "pread"):
        return _load_all(filename, backend)
    file = safetensors.open_file(filename, brief=on_cpu)
    try:
        place = torch_arrays.device_of(device)
        check_backend(backend)
        parts = Tensors.in_file(file, names)
        if dtype is not None:
            from ..packed import codes_without_scale  # only here: most loads do not need it

            codes_without_scale.refuse_floating(file, parts, "load_file")
        if place is None:
            arrays, _ = load_tensors(parts, backend=backend, dtype=dtype, threads=threads, progress=progress)
            raw = None
            if dtype is None and dtypes.holds_packed(file.table.numbers):
                raw = torch_arrays.raw_of((n, f.table, i) for n, f, i in parts)
            return torch_arrays.from_arrays(arrays, raw)
        entries = entries_of(parts, parse_target(dtype))
        if place.type == "meta":
            return torch_arrays.without_data(entries)
        return torch_devices.load(entries, place, threads=threads, progress=progress)
    finally:
        file.close()


def _load_all(filename: PathLike, backend: str) -> dict[str, Any]:
    """All tensors of a file on the CPU, not converted."""
    found = safetensors.load_or_open(filename, backend)
    if isinstance(found, safetensors.Resident):
        return _tensors(*found)
    try:
        return _tensors(found.table, load_all(found, backend))
    finally:
        found.close()


def _tensors(table: Table, arrays: dict[str, Any]) -> dict[str, Any]:
    """All tensors of a file from its arrays."""
    if table.plain or not dtypes.holds_packed(table.numbers):
        return torch_arrays.from_arrays(arrays)
    raw = torch_arrays.raw_of((name, table, index) for index, name in enumerate(table.names))
    return torch_arrays.from_arrays(arrays, raw)


def load_checkpoint(
    path: Paths,
    *,
    device: Any,
    dtype: Any,
    names: Iterable[str] | None,
    only: Patterns,
    drop: Patterns,
    adapters: Any,
    storage_options: Mapping[str, Any] | None,
    threads: int | None,
    progress: Progress,
    **opening: Any,
) -> dict[str, Any]:
    """Loads the tensors of a checkpoint of any format; see `safeload.torch.load_checkpoint`."""
    place = torch_arrays.device_of(device)
    with (
        open_checkpoint(path, storage_options=storage_options, **opening) as opened,
        merging(opened, adapters, storage_options) as (checkpoint, merge),
    ):
        selected = select(checkpoint, names=names, only=only, drop=drop, dtype=dtype)
        if place is None:
            raw = torch_arrays.raw_of(unconverted(checkpoint, selected))
            arrays = load_arrays(checkpoint, selected, merge=merge, threads=threads, progress=progress)
            return torch_arrays.from_arrays(arrays, raw)
        groups = (entries_of(checkpoint.entries(group.names), group.dtype) for group in selected.groups)
        by_name = {entry.name: entry for group in groups for entry in group}
        entries = [by_name[name] for name in selected.names]
        if place.type == "meta":
            return torch_arrays.without_data(entries)
        if merge is None:
            return torch_devices.load(entries, place, threads=threads, progress=progress)
        plain = [entry for entry in entries if entry.name not in merge]
        found = torch_devices.load(plain, place, threads=threads, progress=progress)
        for group in selected.groups:
            for name in (name for name in group.names if name in merge):  # one at a time in the host's memory
                array = merge.values(name, merge.target_row(name, group.dtype), threads=threads)
                found[name] = torch_arrays.from_arrays({name: array})[name].to(place)
        return {name: found[name] for name in selected.names}


def load(data: Any) -> dict[str, Any]:
    """Loads the tensors of a safetensors file in memory; see `safeload.torch.load`."""
    if type(data) is not bytes and isinstance(data, (str, OsPathLike)):
        raise TypeError(
            f"load takes the content of a file, not {show(data)}: safeload.torch.load_file and "
            "safeload.torch.load_checkpoint take a path"
        )
    view, table = safetensors.parse_table(data)
    return _tensors(table, in_memory.copies_of(table, view))


def save(tensors: Any, metadata: Mapping[str, str] | None) -> bytes:
    """Serializes tensors to the bytes of a safetensors file; see `safeload.torch.save`."""
    keep: list[Any] = []
    return safetensors.Writer(to_write(tensors, keep), metadata).to_bytes()


def save_file(tensors: Any, filename: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file; see `safeload.torch.save_file`."""
    keep: list[Any] = []
    safetensors.Writer(to_write(tensors, keep), metadata).to_file(filename)


def to_write(tensors: Any, keep: list[Any]) -> dict[str, Any]:
    """What the writer takes for each tensor of a dict.

    Args:
        tensors: dict of name to dense, contiguous tensor, of which no two share memory.
        keep: gets what must live until all is written.

    Raises:
        ValueError: not a dict of tensors, a sparse tensor, or one that is not contiguous.
        RuntimeError: tensors share memory.
        UnsupportedDtypeError, NotImplementedError: see `torch_arrays.memory_of`.
    """
    check_tensors_apart(tensors)
    entries = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor {show(name)} is not contiguous: x.contiguous() makes one that is. If it is a view of a tensor "
                "that is saved too, save that one alone"
            )
        entries[name] = torch_arrays.memory_of(name, tensor, keep)
    return entries


def check_tensors_apart(tensors: Any) -> None:
    """Refuse all but a dict of dense tensors that share no memory.

    Raises:
        ValueError, RuntimeError: see `to_write`.
    """
    check_tensors(tensors)
    check_not_shared(tensors)


def check_tensors(tensors: Any) -> None:
    """Refuses what is not a dict of dense tensors.

    Raises:
        ValueError: see `to_write`.
    """
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(_not_a_tensor(name, tensor))
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(  # in the words that upstream's tests assert
            f"You are trying to save a sparse tensors: `[{listed(sparse)}]` which this library does not support. You "
            "can make it a dense tensor before saving with `.to_dense()` but be aware this might make a much larger "
            "file than needed."
        )


def _not_a_tensor(name: object, value: Any) -> str:
    message = f"Key `{clip(printable(str(name)), 200)}` is invalid, expected torch.Tensor but received {type(value)}"
    if isinstance(value, Mapping) and any(isinstance(inner, (Mapping, torch.Tensor)) for inner in value.values()):
        return f"{message}: safeload.flatten(tree) makes names with dots of nested dicts"
    library = type(value).__module__.partition(".")[0]
    return f"{message}: safeload.numpy.save_file saves numpy arrays" if library == "numpy" else message
