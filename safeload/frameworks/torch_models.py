"""Models of torch saved and loaded with one copy of each parameter, however many names it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.arrays import check_mapping
from ..base.paths import PathLike
from ..base.text import clip, printable
from . import torch_files
from .torch_shared import remove_duplicate_names

# Most names that a message lists.
_NAMED = 100


def save_model(model: Any, filename: PathLike, metadata: Mapping[str, str] | None, force_contiguous: bool) -> None:
    """Saves the state of a model; see `safeload.torch.save_model`."""
    if metadata is not None:
        check_mapping(metadata, "metadata", "text to text")
    state = dict(model.state_dict())
    torch_files.check_tensors(state)
    texts = dict(metadata or {})
    for kept, removed in remove_duplicate_names(state, partial=True).items():
        for name in removed:
            texts.setdefault(name, kept)  # the caller's own text is not replaced
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        torch_files.save_file(state, filename, texts if texts or metadata is not None else None)
    except ValueError as error:
        if force_contiguous:
            raise
        raise ValueError(f"{error}; or use save_model(..., force_contiguous=True)") from None


def load_model(
    model: Any, filename: PathLike, strict: bool, device: Any, *, backend: Any
) -> tuple[set[str], list[str]]:
    """Loads a file into a model; see `safeload.torch.load_model`."""
    tensors = torch_files.load_file(filename, device, backend=backend)
    removed = remove_duplicate_names(model.state_dict(), preferred_names=tensors.keys(), partial=True)
    missing_names, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(missing_names)
    for name in (name for names in removed.values() for name in names):
        # It is filled through the name that was kept. A file that has both is not one that save_model wrote.
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        if missing:
            lines.append(f"    Missing key(s) in state_dict: {_quoted(missing)}")
        if unexpected:
            lines.append(f"    Unexpected key(s) in state_dict: {_quoted(unexpected)}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _quoted(names: set[str] | list[str]) -> str:
    found = [f'"{clip(printable(name), 200)}"' for name in sorted(names)[:_NAMED]]
    return ", ".join([*found, f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else found)
