"""What `load_checkpoint` of every framework has in common: which tensors are loaded, and with which dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.selecting import Patterns
from ..base.table import Table
from ..base.text import show
from ..checkpoint import Checkpoint, chosen
from ..engine.read.load import parse_target
from ..engine.run.progress import Progress
from ..errors import UnsupportedError
from ..formats.opening import Paths, UnknownGlobals
from ..formats.registry import FormatName
from ..loading.entry import open
from ..loading.merge import Merge, load_merged
from ..models.config_dtype import dtype_in


class DtypeGroup(NamedTuple):
    """Tensors that one call of `Checkpoint.load` loads.

    Attributes:
        names: their names, in the order of the result.
        dtype: what floating tensors are converted to and packed ones dequantized to; None to convert nothing.
    """

    names: Sequence[str]
    dtype: dtypes.Dtype | None


class Selected(NamedTuple):
    """The tensors that `load_checkpoint` loads.

    Attributes:
        names: all names, in the order of the result.
        groups: the same tensors, by the dtype that they are loaded with.
    """

    names: Sequence[str]
    groups: Sequence[DtypeGroup]


def open_checkpoint(
    path: Paths,
    *,
    format: FormatName | None,
    root: str | None,
    unknown_globals: UnknownGlobals,
    stored: bool,
    storage_options: Mapping[str, Any] | None,
) -> Checkpoint:
    """Opens what `load_checkpoint` was given.

    Args:
        path: see `safeload.open`.
        format: see `safeload.open`.
        root: see `safeload.open`.
        unknown_globals: see `safeload.open`.
        stored: see `safeload.open`.
        storage_options: see `safeload.open`.

    Raises:
        SafeloadError, OSError: what `safeload.open` raises.
    """
    return open(
        path,
        format=format,
        root=root,
        unknown_globals=unknown_globals,
        stored=stored,
        storage_options=storage_options,
    )


def select(
    checkpoint: Checkpoint, *, names: Iterable[str] | None, only: Patterns, drop: Patterns, dtype: Any
) -> Selected:
    """The tensors to load, by the dtype that they are loaded with.

    Without ``dtype`` plain tensors keep theirs, and packed ones get the dtype that the config names.

    Args:
        checkpoint: an open one.
        names: exact names; None for all.
        only: patterns of the names to take, instead of ``names``.
        drop: patterns of the names to leave out.
        dtype: floating dtype; None for that of each tensor.

    Raises:
        TensorNotFoundError: an unknown name, or a pattern that matches none.
        ValueError: both ``names`` and ``only``.
        TypeError: an unknown dtype.
        UnsupportedError: an unsupported dtype; ``dtype`` for codes of a family that is not dequantized; a packed tensor
            whose dtype neither ``dtype`` nor the config gives.
    """
    target = parse_target(dtype)
    entries = chosen(checkpoint, names, only, drop, target)
    every = [name for name, _, _ in entries]
    if target is not None or not any(file.table.quantized for file in checkpoint.weight_files):
        return Selected(every, [DtypeGroup(every, target)])
    plain: list[str] = []
    packed: list[str] = []
    for name, file, index in entries:
        file.table.refuse_unknown([index], file.path)
        (packed if file.table.is_quantized(index) else plain).append(name)
    if not packed:
        return Selected(every, [DtypeGroup(every, None)])
    target = dtype_in(checkpoint.config)
    if target is None:
        label = checkpoint.tensors[packed[0]].dtype
        raise UnsupportedError(
            f"tensor {show(packed[0])} is stored as {label}, and no config.json says which dtype its values have: "
            'pass dtype=, such as dtype="bfloat16"',
            path=checkpoint.path,
            tensor=packed[0],
        )
    return Selected(
        every, [DtypeGroup(plain, None), DtypeGroup(packed, target)] if plain else [DtypeGroup(packed, target)]
    )


def unconverted(checkpoint: Checkpoint, selected: Selected) -> Iterator[tuple[str, Table, int]]:
    """Name, table and index there of tensors that are not converted; none where no elements share bytes."""
    packed = any(dtypes.holds_packed(file.table.numbers) for file in checkpoint.weight_files)
    for group in selected.groups:
        if packed and group.dtype is None:
            yield from ((name, file.table, index) for name, file, index in checkpoint.entries(group.names))


def load_arrays(
    checkpoint: Checkpoint, selected: Selected, *, merge: Merge | None = None, threads: int | None, progress: Progress
) -> dict[str, Any]:
    """The arrays by name. F4 and F6 tensors that are not converted are raw uint8.

    Args:
        checkpoint: an open one.
        selected: see `select`.
        merge: adapters that are merged.
        threads: for reading.
        progress: of the last group, which takes the time: others are views.

    Raises:
        SafeloadError, OSError: see `Checkpoint.load`.
    """
    arrays: dict[str, Any] = {}
    for group in selected.groups:
        dtype = None if group.dtype is None else group.dtype.name
        shown = progress if group is selected.groups[-1] else None
        if merge is None:
            arrays.update(checkpoint.load(group.names, dtype=dtype, threads=threads, progress=shown))
        else:
            arrays.update(load_merged(checkpoint, merge, group.names, dtype=dtype, threads=threads, progress=shown))
    return arrays if len(selected.groups) == 1 else {name: arrays[name] for name in selected.names}
