"""Tensors of a base that adapters change: their shapes, and their rows as floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.messages import error_about
from ..checkpoint import Checkpoint
from ..engine.codes.code_ranges import rows_apart
from ..engine.run.weight_file import WeightFile
from ..errors import UnsupportedError
from ..packed import codes_without_scale


class AdapterTarget(NamedTuple):
    """A tensor of the base.

    Attributes:
        name: of the tensor.
        shape: of its values.
        row: dtype that it keeps where none is asked for; None if it is packed.
        work: dtype that it is merged in.
        read: its values in that dtype, at an index: a range of the first axis or, where its rows are plain, an integer
            and a range of the second one.
        together: whether its values can only be read all at once.
    """

    name: str
    shape: tuple[int, ...]
    row: dtypes.Dtype | None
    work: np.dtype[Any]
    read: Callable[[Any], Array]
    together: bool = False


class Base(Protocol):
    """What adapters are merged into."""

    @property
    def title(self) -> str:
        """Its path, for messages."""

    @property
    def model_type(self) -> str | None:
        """What its ``config.json`` says; None without one."""

    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one of its tensors."""

    def target(self, name: str) -> AdapterTarget:
        """One of its tensors."""


class CheckpointBase:
    """An open checkpoint as a base."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.title = checkpoint.path
        self.model_type = model_type_of(checkpoint.config)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the checkpoint."""
        ((_, file, index),) = self._checkpoint.entries([name])
        return shape_of(file, index)

    def target(self, name: str) -> AdapterTarget:
        """A tensor of the checkpoint.

        Raises:
            UnsupportedError: it is not floating, or holds codes of a family that is not dequantized.
        """
        ((_, file, index),) = self._checkpoint.entries([name])
        return of_file(self._checkpoint, name, file, index)


def model_type_of(config: Mapping[str, Any] | None) -> str | None:
    """The architecture that a configuration names; None without one."""
    found = (config or {}).get("model_type")
    return found if isinstance(found, str) else None


def shape_of(file: WeightFile, index: int) -> tuple[int, ...]:
    """The shape of the values of a tensor in a file."""
    packed = file.table.packed(index)
    return tuple(file.table.shape(index) if packed is None else packed.packing.shape)


def of_file(checkpoint: Checkpoint, name: str, file: WeightFile, index: int) -> AdapterTarget:
    """A tensor of an open checkpoint.

    Raises:
        UnsupportedError: see `CheckpointBase.target`.
    """
    codes_without_scale.refuse(checkpoint.codes(), [name], "adapters=", checkpoint.path)
    packed, row = file.table.packed(index), file.table.row(index)
    shape = shape_of(file, index)
    quantized = packed is not None or file.table.is_quantized(index)
    if not quantized:
        check_floating(name, row, checkpoint.path)
    work = np.dtype(np.float64 if row.code == "F64" and not quantized else np.float32)
    if row.packed and not quantized:  # elements that share bytes are decoded together
        whole = partial(_whole, checkpoint, name)
        return AdapterTarget(name, shape, None, work, whole, True)
    together = packed is not None and len(shape) < 3 and not (len(shape) == 2 and rows_apart(packed.packing))
    lazy = checkpoint.get_slice(name, dtype=work.name)
    return AdapterTarget(name, tuple(lazy.shape), None if quantized else row, work, lazy.__getitem__, together)


def check_floating(name: str, row: dtypes.Dtype, path: str | None) -> None:
    """Refuses integers.

    Raises:
        UnsupportedError: the dtype is not floating.
    """
    if not row.floating:
        raise error_about(
            UnsupportedError,
            f"of the base is {row.code}, which no adapter can change: a base in integers is quantized, and needs its "
            "config.json",
            path=path,
            tensor=name,
        )


def _whole(checkpoint: Checkpoint, name: str, rows: Any) -> Array:
    values: Array = checkpoint.load([name], dtype="float32", backend="pread")[name][rows]
    return values
