"""Base tensors to merge adapters into: their shapes, and their rows as floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.messages import error_about
from ..checkpoint import Checkpoint, codes_of, tensors_of
from ..engine.codes.code_ranges import rows_apart
from ..engine.codes.source import Source, in_file
from ..errors import UnsupportedError
from ..packed import finder

_F32 = dtypes.BY_CODE["F32"]


class AdapterTarget(NamedTuple):
    """A base tensor to merge into."""

    name: str
    shape: tuple[int, ...]
    row: dtypes.Dtype | None  # the dtype to keep without dtype=; None if the tensor is packed
    work: np.dtype[Any]  # the dtype to merge in
    # Values as `work`, at a range of the first axis. If rows are plain, also at (integer, range of the second axis).
    read: Callable[[Any], Array]
    together: bool = False  # values can only be read all at once
    source: Source | None = None  # the plain values, if jobs can read them a few rows at a time


class Base(NamedTuple):
    """The tensors of a model to merge adapters into."""

    title: str  # the path, for messages
    names: Collection[str]
    config: Mapping[str, Any] | None
    shape: Callable[[str], tuple[int, ...]]
    target: Callable[[str], AdapterTarget]

    @property
    def model_type(self) -> str | None:
        """``model_type`` in ``config.json``."""
        model_type = (self.config or {}).get("model_type")
        return model_type if isinstance(model_type, str) else None


def base_of(checkpoint: Checkpoint) -> Base:
    """Return an open checkpoint as a base."""

    def shape(name: str) -> tuple[int, ...]:
        return checkpoint.tensors[name].shape

    return Base(checkpoint.path, checkpoint, checkpoint.config, shape, partial(target_of, checkpoint))


def target_of(checkpoint: Checkpoint, name: str) -> AdapterTarget:
    """Return a tensor of an open checkpoint as a target."""
    finder.refuse(codes_of(checkpoint), [name], "adapters=", checkpoint.path)
    ((_, file, index),) = tensors_of(checkpoint, [name])
    packed, row = file.table.packed(index), file.table.row(index)
    shape = tuple(file.table.shape(index) if packed is None else packed.packing.shape)
    quantized = packed is not None or file.table.is_quantized(index)
    if not quantized:
        check_floating(name, row, checkpoint.path)
    work = np.dtype(np.float64 if row.code == "F64" and not quantized else np.float32)
    source = None if quantized else plain_source(checkpoint, name, work)
    if row.packed and not quantized:  # elements share bytes, so they are decoded together
        return AdapterTarget(name, shape, None, work, partial(_decoded, checkpoint, name), True, source)
    together = packed is not None and len(shape) < 3 and not (len(shape) == 2 and rows_apart(packed.packing))
    read = checkpoint.get_slice(name, dtype=work.name).__getitem__
    return AdapterTarget(name, shape, None if quantized else row, work, read, together, source)


def plain_source(checkpoint: Checkpoint, name: str, work: np.dtype[Any]) -> Source | None:
    """Return a plain tensor of an open checkpoint as a source; see `in_rows`."""
    ((_, file, index),) = tensors_of(checkpoint, [name])
    return in_rows(in_file(checkpoint, name, file, index), work)


def in_rows(source: Source | None, work: np.dtype[Any]) -> Source | None:
    """Return a source if jobs can read its rows as float32, `work`; remote files are fetched tile by tile instead."""
    if source is None or source.packed is not None or (source.file is not None and source.file.remote):
        return None
    if work != np.float32 or math.prod(source.shape[1:]) % source.row.block or not source.row.converts_to(_F32):
        return None
    return source


def check_floating(name: str, row: dtypes.Dtype, path: str | None) -> None:
    """Refuse integers."""
    if not row.floating:
        text = (
            f"of the base is {row.code}, which no adapter can change; an integer base is quantized and needs its "
            "config.json"
        )
        raise error_about(UnsupportedError, text, path=path, tensor=name)


def _decoded(checkpoint: Checkpoint, name: str, rows: Any) -> Array:
    values: Array = checkpoint.load([name], dtype="float32", backend="pread")[name][rows]
    return values
