"""Select the tensors that `load_checkpoint` loads, and their dtypes: shared by all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from ..adapters.merge import Merge, merging
from ..core import load, opening
from ..core.checkpoint import Checkpoint, check_unadapted, chosen, open
from ..core.names import Patterns
from ..core.text import error_about
from ..errors import UnsupportedError
from ..models.choosing import dtype_in

# Names, and the dtype that their tensors are converted and dequantized to, by its name; None converts nothing.
Group: TypeAlias = tuple[Sequence[str], str | None]
# The tensors to load: the checkpoint, adapters to merge, names in the order of the result, and groups of these names.
Selected: TypeAlias = tuple[Checkpoint, Merge | None, Sequence[str], Sequence[Group]]


@contextmanager
def selecting(
    path: opening.Paths,
    *,
    names: Iterable[str] | None = None,
    only: Patterns = None,
    drop: Patterns = None,
    dtype: Any = None,
    adapters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    verify: Any = None,
    **options: Any,
) -> Iterator[Selected]:
    """Open a checkpoint and its adapters, and select tensors; packed tensors get the dtype in the config by default."""
    if adapters is not None:
        check_unadapted(verify)
    with (
        open(path, storage_options=storage_options, verify=verify, **options) as opened,
        merging(opened, adapters, storage_options) as (checkpoint, merge),
    ):
        target = load.parse_target(dtype)
        tensors = chosen(checkpoint, names, only, drop, target)
        all_names = [name for name, _, _ in tensors]
        groups: list[Group] = [(all_names, None if target is None else target.name)]
        grown = {} if merge is None else merge.base.grown
        if target is None and (grown or any(file.table.quantized for file in checkpoint.weight_files)):
            by_dtype: dict[str | None, list[str]] = {None: []}
            packed: list[str] = []
            for name, file, index in tensors:
                file.table.refuse_unknown([index], file.path)
                row = grown[name].row if name in grown else None
                quantized = row is None if name in grown else file.table.is_quantized(index)
                names_alike = packed if quantized else by_dtype.setdefault(row.name if row else None, [])
                names_alike.append(name)
            groups = [(members, dtype) for dtype, members in by_dtype.items() if members]
            if packed:
                groups.append((packed, _dtype_of(checkpoint, packed[0])))
        yield checkpoint, merge, all_names, groups


def _dtype_of(checkpoint: Checkpoint, name: str) -> str:
    """Return the dtype in the config, for a packed tensor."""
    target = dtype_in(checkpoint.config)
    if target is None:
        text = (
            f"is stored as {checkpoint.tensors[name].dtype}, and no config.json says which dtype its values have: "
            'pass dtype=, such as dtype="bfloat16"'
        )
        raise error_about(UnsupportedError, text, path=checkpoint.path, tensor=name)
    return target.name
