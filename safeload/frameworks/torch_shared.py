"""Find torch tensors that share memory, and choose the names to save them under."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.text import show

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
    """Group names by shared memory; a tensor that shares none has its own group.

    Tensors without memory (empty, or on the device "meta") are skipped.
    """
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

    removed: dict[str, list[str]] = {}
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
                f"cannot choose a name to keep: none of {listed(sorted(group))} covers all of their shared memory, "
                f"a storage of {storage_size(state_dict[min(group)]):,} bytes. Copy a tensor with x.clone()"
            )
    for kept, group in (*complete.values(), *kept_parts):
        if len(group) > 1:
            removed[kept] = sorted(group - {kept})
    return removed


def _storage(state_dict: Mapping[str, Any], group: Iterable[str]) -> Any:
    tensor = state_dict[next(iter(group))]
    return tensor.device, storage_ptr(tensor)


def _covering(state_dict: Mapping[str, Any], group: Iterable[str]) -> set[str]:
    """Return the names of a group whose tensors cover the memory of the whole group."""
    areas = {name: (int(state_dict[name].data_ptr()), end_ptr(state_dict[name])) for name in group}
    begin, end = min(start for start, _ in areas.values()), max(stop for _, stop in areas.values())
    return {
        name
        for name, area in areas.items()
        if area == (begin, end) and state_dict[name].nelement() * state_dict[name].element_size() == end - begin
    }


def check_not_shared(state_dict: Mapping[str, Any]) -> None:
    """Refuse tensors that share memory."""
    shared = [group for group in find_shared_tensors(state_dict) if len(group) > 1]
    if shared:
        groups = "; ".join(listed(sorted(group)) for group in shared[:_MAX_LISTED])
        raise RuntimeError(
            f"tensors share memory, but would be stored and loaded separately: {groups}. Save one tensor of each group "
            "with safeload.torch.save_model, or copy tensors with x.clone()"
        )


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the rest."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(map(show, names[:_MAX_LISTED])) + more
