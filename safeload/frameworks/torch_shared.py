"""Tensors of torch that share memory: which ones they are, and under which names they are saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.text import show

# Most names, and most groups of them, that a message lists.
_NAMED = 10


def storage_ptr(tensor: Any) -> int:
    """Address of the storage of a tensor; 0 without memory."""
    return int(tensor.untyped_storage().data_ptr())


def storage_size(tensor: Any) -> int:
    """Bytes of the storage of a tensor."""
    return int(tensor.untyped_storage().nbytes())


def end_ptr(tensor: Any) -> int:
    """Address after the last element of a tensor."""
    begin = int(tensor.data_ptr())
    if not tensor.nelement():
        return begin
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin + (int(reach) + 1) * int(tensor.element_size())


def is_complete(tensor: Any) -> bool:
    """Whether a tensor covers all of its storage."""
    nbytes = tensor.nelement() * tensor.element_size()
    return bool(tensor.data_ptr() == storage_ptr(tensor) and nbytes == storage_size(tensor))


def find_shared_tensors(state_dict: Mapping[str, Any]) -> list[set[str]]:
    """Names grouped by the memory that their tensors share; names of tensors that share none are alone.

    Tensors without memory, empty ones and those on the device "meta", are left out.

    Raises:
        RuntimeError: a tensor has no memory of its own.
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
                    f"tensor {show(name)} is a {type(tensor).__name__}, whose values are in other tensors: save these, "
                    "or x.full_tensor() of a DTensor"
                ) from error
            if key[1] and key[2]:
                storages.setdefault(key, set()).add(name)
    return filter_shared_not_shared(list(storages.values()), state_dict)


def filter_shared_not_shared(groups: Sequence[set[str]], state_dict: Mapping[str, Any]) -> list[set[str]]:
    """Divides groups of names with one storage each into those whose tensors overlap.

    In the order of their addresses a tensor is compared with the one before it only, as upstream does: which name a
    file keeps depends on it.
    """
    found: list[set[str]] = []
    for group in groups:
        if len(group) < 2:
            found.append(group)
            continue
        areas = sorted((int(state_dict[name].data_ptr()), end_ptr(state_dict[name]), name) for name in group)
        last = -1
        for start, stop, name in areas:
            if start >= last:
                found.append({name})
            else:
                found[-1].add(name)
            last = stop
    return found


def remove_duplicate_names(
    state_dict: Mapping[str, Any],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
    partial: bool = False,
) -> dict[str, list[str]]:
    """Which names to leave out of a file because another one has their memory.

    Of the names that share memory, those are candidates whose tensors cover all of their storage. The first of
    ``preferred_names`` is kept, else the first that is not in ``discard_names``, else the first.

    Args:
        state_dict: name to tensor.
        preferred_names: names to keep if possible, such as those in a file that is being loaded.
        discard_names: names to leave out if possible.
        partial: whether tensors are candidates too that cover what a group shares, though not their storage: of the
            weights of an LSTM on a GPU each is a part of one storage.

    Returns:
        Each kept name that has duplicates, with these, in ascending order.

    Raises:
        RuntimeError: a group has no candidate.
    """
    preferred, discard = set(preferred_names or ()), set(discard_names or ())

    def choice(candidates: set[str]) -> str:
        return min(candidates & preferred or candidates - discard or candidates)

    removed: dict[str, list[str]] = {}
    complete: dict[Any, tuple[str, set[str]]] = {}  # by storage: the kept name, and the group
    incomplete = []
    for group in find_shared_tensors(state_dict):
        candidates = {name for name in group if is_complete(state_dict[name])}
        if not candidates:
            incomplete.append(group)
            continue
        complete[_storage(state_dict, group)] = choice(candidates), set(group)
    kept_parts: list[tuple[str, set[str]]] = []
    for group in incomplete:
        # Upstream refuses a part of a tensor that another part stands before. The whole tensor is among the names.
        whole = complete.get(_storage(state_dict, group))
        if whole is not None:
            whole[1].update(group)
        elif partial and (candidates := _covering(state_dict, group)):
            kept_parts.append((choice(candidates), group))
        else:
            raise RuntimeError(
                f"no name to keep: none of {listed(sorted(group))} covers all of the memory that they share, a storage "
                f"of {storage_size(state_dict[min(group)]):,} bytes. x.clone() makes a tensor of its own"
            )
    for kept, group in (*complete.values(), *kept_parts):
        if len(group) > 1:
            removed[kept] = sorted(group - {kept})
    return removed


def _storage(state_dict: Mapping[str, Any], group: Iterable[str]) -> Any:
    tensor = state_dict[next(iter(group))]
    return tensor.device, storage_ptr(tensor)


def _covering(state_dict: Mapping[str, Any], group: Iterable[str]) -> set[str]:
    """The names of a group whose tensors have all elements from the first that any has to the last."""
    areas = {name: (int(state_dict[name].data_ptr()), end_ptr(state_dict[name])) for name in group}
    begin, end = min(start for start, _ in areas.values()), max(stop for _, stop in areas.values())
    return {
        name
        for name, area in areas.items()
        if area == (begin, end) and state_dict[name].nelement() * state_dict[name].element_size() == end - begin
    }


def check_not_shared(state_dict: Mapping[str, Any]) -> None:
    """Refuses tensors that share memory.

    Raises:
        RuntimeError: some do.
    """
    shared = [group for group in find_shared_tensors(state_dict) if len(group) > 1]
    if shared:
        groups = "; ".join(listed(sorted(group)) for group in shared[:_NAMED])
        raise RuntimeError(
            f"tensors share memory, and would be stored and loaded apart: {groups}. safeload.torch.save_model stores "
            "one of each group, x.clone() makes a tensor of its own"
        )


def listed(names: Sequence[str]) -> str:
    """The first of several names, and how many there are besides."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(show, names[:_NAMED])) + more
