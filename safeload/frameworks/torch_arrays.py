"""Convert NumPy arrays to torch tensors and tensors to memory to write, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..core import dtypes, safetensors
from ..core.arrays import Array, foreign_order
from ..core.table import Table
from ..core.tensors import Entry, FileTensor, Lazy
from ..core.text import clip, error_about, listed, not_installed, printable, show
from ..errors import InvalidDeviceError, MissingDeviceError, UnsupportedDtypeError, UnsupportedError

try:
    import torch as torch  # other modules import it from here, so that all share the error below
except ImportError as error:
    text = "safeload.torch needs PyTorch, which is not installed: pip install torch"
    raise not_installed(error, text, "torch") from error.__cause__

Tensor = torch.Tensor
Device = torch.device
Module = torch.nn.Module

# Torch's name of a dtype, if it differs from the table's. An element of this dtype is a pair.
_NAMES = {"float4_e2m1fn": "float4_e2m1fn_x2"}

# Torch's dtypes by safetensors code; older versions of torch lack some.
TYPES: dict[str, Any] = {
    row.code: dtype
    for row in dtypes.SAFETENSORS
    if isinstance(dtype := getattr(torch, _NAMES.get(row.name, row.name), None), torch.dtype)
}
getdtype = TYPES.__getitem__  # of safetensors.torch
# Bytes per element; per pair for the packed dtype.
SIZES: dict[Any, int] = {dtype: max(1, dtypes.BY_CODE[code].bits // 8) for code, dtype in TYPES.items()}
_ROWS: dict[Any, dtypes.Dtype] = {dtype: dtypes.BY_CODE[code] for code, dtype in TYPES.items()}
_WHOLE_ROWS = {dtype: row for dtype, row in _ROWS.items() if not row.packed}
# Classes whose tensors have memory of their own, unless torch wraps them for tracing; other subclasses may have none.
_OWN_MEMORY = frozenset((Tensor, torch.nn.Parameter))

# `torch.from_numpy` refuses ml_dtypes: such arrays are viewed as integers of equal size first.
_INTEGERS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16)}
_OF_NUMPY = frozenset("?bBhHiIlLqQefdFD")

# How arrays of a dtype become tensors: the integer dtype to view them as (or None), and the torch dtype.
_Views = tuple["np.dtype[Any] | None", Any]
_views: dict[np.dtype[Any], _Views] = {}


# ---- from arrays ----


def from_table(table: Table, arrays: dict[str, Array]) -> dict[str, Any]:
    """Return all tensors of a file from its arrays."""
    raw = None
    if not table.plain and dtypes.holds_packed(table.numbers):
        rows = zip(table.names, table.rows, table.shapes, strict=True)
        raw = {name: described(name, row, shape)[1] for name, row, shape in rows if row.packed}
    return from_arrays(arrays, raw)


def from_arrays(arrays: Mapping[str, Array], raw: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return CPU tensors over writable arrays, each with its own storage; ``raw`` is as in `raw_of`."""
    from_numpy, views = torch.from_numpy, _views
    tensors = {}
    for name, array in arrays.items():
        view = views.get(array.dtype)
        if view is None or not array.size or raw:
            tensors[name] = from_array(array, name, raw.get(name) if raw else None)
        elif view[0] is None:
            tensors[name] = from_numpy(array)
        else:
            tensors[name] = from_numpy(array.view(view[0])).view(view[1])
    return tensors


def from_array(array: Array, name: str, raw: Any = None) -> Any:
    """Return a CPU tensor over an array, or over a copy if it is read-only; ``raw`` is torch's dtype of raw bytes."""
    view = (array.dtype, raw) if raw is not None else _views.get(array.dtype)
    if view is None:
        integers = None if array.dtype.char in _OF_NUMPY else _INTEGERS[array.dtype.itemsize]
        view = integers, described(name, dtypes.BY_NAME[array.dtype.name], array.shape)[1]
        _views[array.dtype] = view
    if not array.size:  # `from_numpy` would give it strides of 0
        return torch.empty(array.shape, dtype=view[1], device="cpu")
    if not array.flags.writeable:
        array = array.copy()
    if view[0] is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(view[0])).view(view[1])


def described(name: str, row: dtypes.Dtype, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype of the torch tensor with a dtype of the table and this logical shape."""
    dtype = torch.complex128 if row.code == "C128" else TYPES.get(row.code)
    if dtype is None:
        text = f'is {row.code}, which torch {torch.__version__} does not support: pass dtype="float32" to decode it'
        raise error_about(UnsupportedError, text, tensor=name)
    if not row.packed:
        return shape, dtype
    if not shape or shape[-1] % row.block:
        text = (
            f"is {row.code} {list(shape)}, but torch packs pairs of {row.code} along the last axis: "
            'pass dtype="float32" to decode it'
        )
        raise error_about(UnsupportedError, text, tensor=name)
    return (*shape[:-1], shape[-1] // row.block), dtype


def raw_of(tensors: Iterable[FileTensor]) -> dict[str, Any]:
    """Return torch's dtypes of the tensors that arrays show as raw bytes, by name."""
    rows = ((name, file.table.row(index), file.table.shape(index)) for name, file, index in tensors)
    return {name: described(name, row, shape)[1] for name, row, shape in rows if row.packed}


def of_entry(entry: Entry) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype of an entry's tensor, which can be rows of the tensor in the file."""
    assert entry.target is not None
    row = dtypes.BY_NUMBER[entry.target]
    logical = entry.file.table.shape(entry.at) if row.bits < 8 else entry.shape
    return entry.shape, described(entry.name, row, logical)[1]


def without_data(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return tensors on the device "meta", with dtype and shape only."""
    tensors = {}
    for entry in entries:
        shape, dtype = of_entry(entry)
        tensors[entry.name] = torch.empty(shape, dtype=dtype, device="meta")
    return tensors


# ---- to memory ----


def to_write(tensors: Any, keep: list[Any]) -> dict[str, Any]:
    """Return the input of the safetensors writer; ``keep`` receives objects that must live until all is written."""
    if isinstance(tensors, dict):  # a subclass can make its tensors when asked, and another thread can replace them
        tensors = dict(tensors.items())
    entries = _plain_memory(tensors)
    if entries is not None:
        keep.extend(tensors.values())
        return entries
    check_tensors_apart(tensors)
    entries = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor {show(name)} is not contiguous; copy it with x.contiguous(). If it is a view of another "
                "tensor to save, save only that tensor"
            )
        entries[name] = memory_of(name, tensor, keep)
    return entries


def _plain_memory(tensors: Any) -> dict[str, Any] | None:
    """Return the memory of plain CPU tensors with disjoint addresses, or None if any needs the checks of `to_write`."""
    if sys.byteorder != "little" or not isinstance(tensors, dict):
        return None
    entries: dict[str, Any] = {}
    areas = []
    try:
        for name, tensor in tensors.items():
            row = _WHOLE_ROWS.get(tensor.dtype) if type(tensor) in _OWN_MEMORY else None
            if row is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
                return None
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                return None
            begin, nbytes = tensor.data_ptr(), tensor.numel() * SIZES[tensor.dtype]
            if not begin or _beyond(tensor, nbytes):  # empty, or without memory
                return None
            entries[name] = safetensors.TensorToWrite(row, tensor.shape, nbytes, None, begin)
            areas.append((begin, begin + nbytes))
    except RuntimeError:  # a tensor without memory
        return None
    areas.sort()
    return entries if all(end <= begin for (_, end), (begin, _) in pairwise(areas)) else None


def _beyond(tensor: Any, nbytes: int) -> bool:
    """Return True if the storage ends before this many bytes of a tensor, as FSDP leaves it between two passes."""
    return bool(tensor.storage_offset() * tensor.element_size() + nbytes > tensor.untyped_storage().nbytes())


def value_of(name: str, tensor: Any, keep: list[Any]) -> safetensors.TensorToWrite | Array | Lazy:
    """Return the writer's input for a dense tensor with any strides; see `memory_of`."""
    check_tensors({name: tensor})
    if tensor.device.type != "cpu" or tensor.is_contiguous():
        return memory_of(name, tensor, keep)
    if row_of(name, tensor).packed:
        return memory_of(name, tensor.contiguous(), keep)
    return to_array(resolved(tensor))


def check_tensors_apart(tensors: Any) -> None:
    """Refuse anything but a dict of dense tensors without shared memory."""
    check_tensors(tensors)
    shared = [group for group in find_shared_tensors(tensors) if len(group) > 1]
    if shared:
        groups = "; ".join(listed(map(show, sorted(group)), _MAX_LISTED) for group in shared[:_MAX_LISTED])
        raise RuntimeError(
            f"tensors share memory, but would be stored and loaded separately: {groups}. Save one tensor of each group "
            "with safeload.torch.save_model, or copy tensors with x.clone()"
        )


def check_tensors(tensors: Any) -> None:
    """Refuse anything but a dict of dense tensors."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            continue
        text = f"Key `{clip(printable(str(name)), 200)}` is invalid, expected torch.Tensor but received {type(value)}"
        if isinstance(value, Mapping) and any(isinstance(inner, (Mapping, torch.Tensor)) for inner in value.values()):
            text += ": flatten nested dicts to dotted names with safeload.flatten(tree)"
        elif type(value).__module__.partition(".")[0] == "numpy":
            text += ": save NumPy arrays with safeload.numpy.save_file"
        raise ValueError(text)
    sparse = [show(name) for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(  # upstream's tests assert these words
            f"You are trying to save a sparse tensors: `[{listed(sparse, _MAX_LISTED)}]` which this library does not "
            "support. You can make it a dense tensor before saving with `.to_dense()` but be aware this might make a "
            "much larger file than needed."
        )


def memory_of(name: str, tensor: Any, keep: list[Any]) -> safetensors.TensorToWrite | Array | Lazy:
    """Return the writer's input for a contiguous tensor, as it shows values; a device tensor is copied when written."""
    row = row_of(name, tensor)
    if tensor.device.type != "cpu" and not row.packed:
        return Lazy(dtypes.array_dtype(row.number), tuple(tensor.shape), lambda: to_array(resolved(tensor.to("cpu"))))
    tensor = resolved(tensor.to("cpu"))
    keep.append(tensor)
    if foreign_order(False) and row.swap > 1:
        return to_array(tensor)  # the writer swaps its bytes
    nbytes = tensor.numel() * SIZES[tensor.dtype]
    if tensor.data_ptr() and nbytes and _beyond(tensor, nbytes):
        stored = tensor.untyped_storage().nbytes()
        raise RuntimeError(
            f"tensor {show(name)}: its memory was freed: the storage has {stored} bytes, but the tensor needs {nbytes} "
            f"from element {tensor.storage_offset()} on"
        )
    shape = tuple(tensor.shape)
    if row.packed and shape:
        shape = (*shape[:-1], shape[-1] * row.block)
    return safetensors.TensorToWrite(row, shape, nbytes, None, tensor.data_ptr())


def row_of(name: str, tensor: Any) -> dtypes.Dtype:
    """Return the row of the dtype table for a tensor with values."""
    row = _ROWS.get(tensor.dtype)
    if row is None:
        message = dtypes.not_stored(str(tensor.dtype).removeprefix("torch."), name).args[0]
        raise UnsupportedDtypeError(message, tensor=name)
    if tensor.device.type == "meta":
        raise NotImplementedError(f"tensor {show(name)}: Cannot copy out of meta tensor, which has no values")
    return row


def resolved(tensor: Any) -> Any:
    """Return a tensor without conjugate and negative bits: its memory holds the values it shows."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def to_array(tensor: Any) -> Array:
    """Return an array over the memory of a CPU tensor of a safetensors dtype. F4 becomes raw uint8."""
    row = _ROWS[tensor.dtype]
    dtype = dtypes.array_dtype(row.number)
    tensor = tensor.detach()
    if dtype.char not in _OF_NUMPY or row.packed:
        tensor = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    array: Array = tensor.numpy()
    return array if array.dtype == dtype else array.view(dtype)


def putter(name: str, tensor: Any) -> Callable[[Array, Array], None]:
    """Return a function that puts unsigned integers of the element's size at flat indices of a dense tensor."""
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        raise error_about(UnsupportedError, "must be contiguous to change in place", tensor=name)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = flat.view(-1).view(width)

    def put(indices: Array, values: Array) -> None:
        places = torch.from_numpy(indices.astype(np.int64)).to(flat.device)
        flat[places] = torch.from_numpy(values.view(f"i{values.dtype.itemsize}").copy()).to(flat.device)

    return put


def same_bytes(first: Any, second: Any) -> bool:
    """Return whether two tensors have equal dtypes, shapes and bytes."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    codes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return bool(torch.equal(*codes))


# ---- devices ----


def device_of(device: Any) -> Any:
    """Return the `torch.device` for an argument, like `parsed_device`, after making sure that it is available."""
    parsed = parsed_device(device)
    if parsed is not None and parsed.type != "meta":
        try:
            torch.empty(0, device=parsed)
        except Exception as error:  # an AssertionError if torch was built without the backend
            shown = clip(printable(str(device)), 200)
            raise MissingDeviceError(f"device {shown} is not available: {_first_sentence(error)}") from None
    return parsed


def parsed_device(device: Any) -> Any:
    """Return the `torch.device` for an argument, available or not; None for the CPU."""
    if device is None or (isinstance(device, str) and device == "cpu"):
        return None
    shown = clip(printable(str(device)), 200)
    if isinstance(device, bool) or not isinstance(device, (str, int, Device)):
        raise InvalidDeviceError(f"device {shown} is invalid: expected a name, a number or a torch.device")
    try:
        parsed = torch.device(device)
    except (RuntimeError, OverflowError, ValueError) as error:
        if isinstance(device, int) and device >= 0:
            raise MissingDeviceError(f"device {shown} is not available: {_first_sentence(error)}") from None
        raise InvalidDeviceError(f"device {shown} is invalid: {_first_sentence(error)}") from None
    if parsed.type == "cpu" and parsed.index:
        raise InvalidDeviceError(f"device {shown} is invalid: the CPU has no numbered devices")
    return None if parsed.type == "cpu" else parsed


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of a message; torch appends advice about builds and lists of backends."""
    return clip(printable(str(error).strip().partition("\n")[0].partition(". ")[0]), 200) or type(error).__name__


# ---- memory that tensors share ----


# Limit on names, and on groups of names, in a message.
_MAX_LISTED = 10


def storage_ptr(tensor: Any) -> int:
    """Return the address of a tensor's storage, or 0 if it has no memory."""
    return int(tensor.untyped_storage().data_ptr())


def storage_size(tensor: Any) -> int:
    """Return the size of a tensor's storage in bytes."""
    return int(tensor.untyped_storage().nbytes())


def end_ptr(tensor: Any) -> int:
    """Return the address after a tensor's last element."""
    begin = int(tensor.data_ptr())
    if not tensor.nelement():
        return begin
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin + (int(reach) + 1) * int(tensor.element_size())


def is_complete(tensor: Any) -> bool:
    """Return whether a tensor covers its whole storage."""
    nbytes = tensor.nelement() * tensor.element_size()
    return bool(tensor.data_ptr() == storage_ptr(tensor) and nbytes == storage_size(tensor))


def find_shared_tensors(state_dict: Mapping[str, Any]) -> list[set[str]]:
    """Group names by shared memory; tensors without memory have no group."""
    storages: dict[Any, set[str]] = {}
    for name, tensor in state_dict.items():
        device = tensor.device
        if device.type != "meta":
            try:
                storage = tensor.untyped_storage()
                key = device, storage.data_ptr(), storage.nbytes()
            except RuntimeError as error:  # a DTensor, a masked or a nested tensor
                raise RuntimeError(
                    f"tensor {show(name)} is a {type(tensor).__name__}, which keeps its values in other tensors: save "
                    "these instead, or x.full_tensor() of a DTensor"
                ) from error
            if key[1] and key[2]:
                storages.setdefault(key, set()).add(name)
    return filter_shared_not_shared(list(storages.values()), state_dict)


def filter_shared_not_shared(groups: Sequence[set[str]], state_dict: Mapping[str, Any]) -> list[set[str]]:
    """Split groups of names with a common storage into groups of overlapping tensors.

    Tensors are sorted by address and compared with their predecessor only, like upstream's: the name to keep in a file
    depends on it.
    """
    overlapping: list[set[str]] = []
    for group in groups:
        if len(group) < 2:
            overlapping.append(group)
            continue
        areas = sorted((int(state_dict[name].data_ptr()), end_ptr(state_dict[name]), name) for name in group)
        last = -1
        for start, stop, name in areas:
            if start >= last:
                overlapping.append({name})
            else:
                overlapping[-1].add(name)
            last = stop
    return overlapping


def remove_duplicate_names(
    state_dict: Mapping[str, Any],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
    partial: bool = False,
) -> dict[str, list[str]]:
    """Choose the names to leave out of a file because another name has their memory.

    In each group, the candidates to keep are tensors that cover their whole storage. The first candidate in
    ``preferred_names`` is kept, else the first outside ``discard_names``, else the first.

    ``partial`` accepts tensors that cover a group's memory together: on a GPU the weights of an LSTM are parts of one
    storage.
    """
    preferred, discard = set(preferred_names or ()), set(discard_names or ())

    def choice(candidates: set[str]) -> str:
        return min(candidates & preferred or candidates - discard or candidates)

    groups = find_shared_tensors(state_dict)
    complete: dict[Any, tuple[str, set[str]]] = {}  # by storage: the kept name, and the group
    for group in groups:
        if candidates := {name for name in group if is_complete(state_dict[name])}:
            complete[_storage(state_dict, group)] = choice(candidates), set(group)
    kept_parts: list[tuple[str, set[str]]] = []
    for group in groups:
        # Upstream refuses such a group even if the whole tensor is among the names.
        whole = complete.get(_storage(state_dict, group))
        if whole is not None:
            whole[1].update(group)
        elif partial and (candidates := _covering(state_dict, group)):
            kept_parts.append((choice(candidates), group))
        else:
            raise RuntimeError(
                f"cannot choose a name to keep: none of {listed(map(show, sorted(group)), _MAX_LISTED)} covers all of "
                f"their shared memory, a storage of {storage_size(state_dict[min(group)]):,} bytes. Copy a tensor with "
                "x.clone()"
            )
    return {kept: sorted(group - {kept}) for kept, group in (*complete.values(), *kept_parts) if len(group) > 1}


def _storage(state_dict: Mapping[str, Any], group: Iterable[str]) -> Any:
    tensor = state_dict[next(iter(group))]
    return tensor.device, storage_ptr(tensor)


def _covering(state_dict: Mapping[str, Any], group: Iterable[str]) -> set[str]:
    """Return the names of tensors in a group that cover the memory of the whole group."""
    areas = {name: (int(state_dict[name].data_ptr()), end_ptr(state_dict[name])) for name in group}
    begin, end = min(start for start, _ in areas.values()), max(stop for _, stop in areas.values())
    return {
        name
        for name, area in areas.items()
        if area == (begin, end) and state_dict[name].nelement() * state_dict[name].element_size() == end - begin
    }
