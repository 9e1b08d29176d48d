"""Layers stacked into one tensor for each kind of weight, transposed where an engine wants it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import checkpoint as checkpoints
from ..base import dtypes
from ..base.arrays import as_array, check_mapping
from ..base.file import Array, PathLike, WeightFile
from ..checkpoint import Checkpoint
from ..engine import jobs
from ..engine import source as sources
from ..engine.cast import target_array
from ..engine.jobs import Batch, Grid, Progress
from ..engine.load import parse_target
from ..engine.quantized_tensor import INT8, QuantizedTensor
from ..engine.source import Source
from ..errors import FormatError, SafeloadError, TensorNotFoundError, UnsupportedError
from . import catalog

_LAYER = "{}"

# Digits of a layer's number: Python itself reads no numbers of more than some thousands.
_MAX_DIGITS = 18


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a `Layout`.

    Attributes:
        name: what it is called in the result.
        source: where it comes from: the name of a tensor, or one with ``{}`` where the number of the layer stands; then
            the result is [layers, ...].
        transpose: whether each layer (a matrix) is transposed.

    Raises:
        ValueError: ``{}`` is there twice.
    """

    name: str
    source: str
    transpose: bool = False

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("source", self.source)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{what} must be a text that is not empty, not {value!r}")
        if not isinstance(self.transpose, bool):
            raise ValueError(f"{self.name!r}: transpose must be true or false, not {self.transpose!r}")
        if self.source.count(_LAYER) > 1:
            raise ValueError(f"{self.name!r}: {self.source!r} has more than one place for a layer's number")

    @property
    def stacked(self) -> bool:
        """Whether it has a layer axis."""
        return _LAYER in self.source


@dataclass(frozen=True)
class Layout:
    """What an engine wants its weights to look like: its tensors, in the order of the result.

    Attributes:
        name: of the layout.
        tensors: what is in it.

    Raises:
        TypeError: something else among them than a `StackedTensor`.
        ValueError: a name is there twice.

    Example:
        >>> Layout("tiny", [StackedTensor("ffn", "layers.{}.mlp.weight", transpose=True)]).tensors[0].stacked
        True
    """

    name: str
    tensors: Sequence[StackedTensor]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        for tensor in self.tensors:
            if not isinstance(tensor, StackedTensor):
                raise TypeError(f"layout {self.name!r} is made of StackedTensor, not of {type(tensor).__name__}")
        names = [tensor.name for tensor in self.tensors]
        twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
        if twice is not None:
            raise ValueError(f"layout {self.name!r}: {twice!r} is there twice")

    @classmethod
    def from_json(cls, source: PathLike | Mapping[str, Any]) -> Layout:
        """A layout from a JSON file, or from what such a file holds.

        ``{"name": "tiny", "tensors": [{"name": "ffn", "source": "layers.{}.mlp.weight", "transpose": true}, ...]}``

        Raises:
            FormatError: it is no such JSON.
            OSError: the file cannot be read.
        """
        path = None if isinstance(source, Mapping) else os.fspath(source)
        content = source if isinstance(source, Mapping) else _read_json(os.fspath(source))
        entries = content.get("tensors")
        if not isinstance(content.get("name"), str) or not isinstance(entries, list) or content.keys() - _FIELDS:
            raise FormatError('a layout is {"name": text, "tensors": [...]}', path)
        tensors = []
        for k, entry in enumerate(entries):
            if (
                not isinstance(entry, Mapping)
                or entry.keys() - _TENSOR_FIELDS
                or not {"name", "source"} <= entry.keys()
            ):
                raise FormatError(f'tensors[{k}] must be {{"name": text, "source": text, "transpose": bool}}', path)
            try:
                tensors.append(StackedTensor(**entry))
            except ValueError as error:
                raise FormatError(f"tensors[{k}]: {error}", path) from None
        try:
            return cls(content["name"], tensors)
        except ValueError as error:
            raise FormatError(str(error), path) from None

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes, for ``json.dump``."""
        return {
            "name": self.name,
            "tensors": [{"name": t.name, "source": t.source, "transpose": t.transpose} for t in self.tensors],
        }


_FIELDS = {"name", "tensors"}
_TENSOR_FIELDS = {"name", "source", "transpose"}


def _read_json(path: str) -> dict[str, Any]:
    from ..base.json_file import read_json

    content: dict[str, Any] = read_json(path, "the layout")
    return content


class StackedDict(dict[str, Array]):
    """Name to stacked array, in the order of the layout.

    Attributes:
        left_out: names of tensors that no entry of the layout named.
    """

    left_out: tuple[str, ...] = ()


class Known(NamedTuple):
    """What is known of a tensor before it is read.

    Attributes:
        row: row of the dtype table.
        shape: logical shape.
        scheme: of a quantized tensor, else None.
        axis: of int8 with a scale for each of its elements, else None.
    """

    row: dtypes.Dtype
    shape: tuple[int, ...]
    scheme: str | None = None
    axis: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements as they are stored, without the scale of int8."""
        return self.row.nbytes(math.prod(self.shape))


def known_of_file(file: WeightFile, index: int) -> Known:
    """What is known of a tensor in a file."""
    row, shape, scale = file.table.row(index), file.table.shape(index), file.table.scale(index)
    if scale is not None:
        return Known(row, shape, INT8, scale.axis)
    return Known(row, shape, row.name if row.blocked else None)


def known_of_value(name: str, value: Any) -> Known:
    """What is known of a tensor in memory.

    Raises:
        SafeloadError: it has no dtype of weights.
    """
    if isinstance(value, QuantizedTensor):
        row = dtypes.BLOCK_TYPES.get(value.scheme, dtypes.BY_CODE["I8"])
        return Known(row, value.shape, value.scheme, value.axis)
    array = as_array(value, name)
    return Known(dtypes.of_array(array, name), array.shape)


class Stack(NamedTuple):
    """One tensor of the result, planned.

    Attributes:
        entry: of the layout.
        names: of its layers, in order; the one tensor where there is no layer axis.
        layer: shape of a layer in the source.
        shape: of the result.
        row: dtype of the result.
    """

    entry: StackedTensor
    names: list[str]
    layer: tuple[int, ...]
    shape: tuple[int, ...]
    row: dtypes.Dtype


def stack(
    source: PathLike | Checkpoint | Mapping[str, Any],
    layout: Layout,
    *,
    dtype: Any = None,
    out: Mapping[str, Array] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> StackedDict:
    """The tensors of a checkpoint as a layout wants them, read, converted, transposed and placed in one pass.

    Args:
        source: path of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        layout: what to make; see `safeload.layouts`.
        dtype: what floating tensors become; None for what they are. Quantized tensors need one.
        out: arrays to fill, by name, each C-contiguous and of the dtype and shape it shall get; all are checked before
            the first byte is written.
        threads: None for what helps.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array in the order of the layout; what was not named is its ``left_out``.

    Raises:
        TensorNotFoundError: a source that is missing, or a hole in the layers, with layer and tensor.
        SafeloadError: layers of different shape or dtype, with the names of two.
        UnsupportedError: a transposed tensor that is no matrix, no such conversion, or a tensor that holds codes, such
            as fp8 with a scale beside it.
        ValueError: an array of ``out`` that does not fit.
        FormatError, OSError: see `safeload.open`.

    Example:
        >>> import numpy as np
        >>> from safeload import Layout, StackedTensor, stack
        >>> layers = {f"h.{k}.w": np.ones((2, 3), np.float16) for k in range(4)}
        >>> stack(layers, Layout("tiny", [StackedTensor("w", "h.{}.w", transpose=True)]), dtype="float32")["w"].shape
        (4, 3, 2)
    """
    if not isinstance(source, Mapping):
        with checkpoints.open(source) as opened:
            return stack(opened, layout, dtype=dtype, out=out, threads=threads, progress=progress)
    jobs.check_threads(threads)
    if out is not None:
        check_mapping(out, "out")
    plans = plan(source, layout, dtype)
    named = {name for planned in plans for name in planned.names}
    catalog.refuse_codes(source, named, "stack")
    result = StackedDict()
    unknown = sorted(set(out or ()) - {p.entry.name for p in plans})
    if unknown:
        raise ValueError(f"out: {unknown[0]!r} is no tensor of this layout")
    for planned in plans:
        wanted = dtypes.array_dtype(planned.row.number)
        name = planned.entry.name
        if out is not None and name not in out:
            raise ValueError(f"out: no array for {name!r}")
        try:
            result[name] = target_array(planned.shape, wanted, None if out is None else out[name])
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    fill(source, [(planned, result[planned.entry.name]) for planned in plans], threads=threads, progress=progress)
    result.left_out = tuple(name for name in source if name not in named)
    return result


# ---- plan ----


def plan(source: Checkpoint | Mapping[str, Any], layout: Layout, dtype: Any) -> list[Stack]:
    """What `fill` is to make, every name and shape checked.

    Raises:
        TensorNotFoundError, SafeloadError, UnsupportedError: see `stack`.
    """
    if isinstance(source, Checkpoint):
        known = {name: known_of_file(file, index) for name, file, index in source._parts()}
    else:
        known = {name: known_of_value(name, value) for name, value in source.items()}
    return plan_known(known, layout, parse_target(dtype))


def plan_known(known: Mapping[str, Known], layout: Layout, target: dtypes.Dtype | None) -> list[Stack]:
    """`plan` from what is known of the tensors."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a safeload.Layout, not {type(layout).__name__}")
    found = {entry.source: _layers_of(known, entry) for entry in layout.tensors if entry.stacked}
    counts: dict[str, int] = {}
    for source, layers in found.items():
        prefix = source.split(_LAYER)[0]
        counts[prefix] = max(counts.get(prefix, 0), *(k + 1 for k in layers), 0)
    return [_plan_one(entry, known, found.get(entry.source), counts, target) for entry in layout.tensors]


def _layers_of(known: Mapping[str, Known], entry: StackedTensor) -> set[int]:
    """The layers that an entry finds.

    Raises:
        SafeloadError: a number that no layer has: with leading zeros, or too long for any model.
    """
    prefix, suffix = entry.source.split(_LAYER)
    pattern = re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix)}", re.ASCII)
    layers = set()
    for name in known:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        digits = match[1]
        if len(digits) > _MAX_DIGITS:
            raise SafeloadError(f"{entry.name!r}: {_clipped(name)} has a layer's number of {len(digits)} digits")
        if digits != str(int(digits)):
            raise SafeloadError(f"{entry.name!r}: {name!r} has a layer's number with leading zeros: {digits!r}")
        layers.add(int(digits))
    return layers


def _clipped(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


def _plan_one(
    entry: StackedTensor,
    known: Mapping[str, Known],
    layers: set[int] | None,
    counts: Mapping[str, int],
    target: dtypes.Dtype | None,
) -> Stack:
    names = [entry.source]
    if layers is not None:
        prefix, suffix = entry.source.split(_LAYER)
        if not layers:
            raise TensorNotFoundError(f"{entry.name!r}: no tensor is called {entry.source!r} with a layer's number")
        count = counts[prefix]
        if len(layers) < count:  # which one, before as many names are made as a single number may ask for
            missing = next(k for k in range(count) if k not in layers)
            name = f"{prefix}{missing}{suffix}"
            raise TensorNotFoundError(
                f"{entry.name!r}: layer {missing} of {count} is missing: there is no tensor {name!r}"
            )
        names = [f"{prefix}{k}{suffix}" for k in range(count)]
    elif entry.source not in known:
        raise TensorNotFoundError(f"{entry.name!r}: there is no tensor {entry.source!r}")
    first = known[names[0]]
    for name in names[1:]:
        if known[name].shape != first.shape:
            shape = list(known[name].shape)
            raise SafeloadError(f"{entry.name!r}: {names[0]!r} has shape {list(first.shape)}, but {name!r} has {shape}")
    rows = [_result_row(name, known[name], target) for name in names]
    for name, row in zip(names, rows, strict=True):
        if row is not rows[0]:
            raise SafeloadError(
                f"{entry.name!r}: {names[0]!r} is {rows[0].name}, but {name!r} is {row.name}: pass dtype="
            )
    layer = first.shape
    if entry.transpose:
        if len(layer) != 2:
            raise UnsupportedError(
                f"{entry.name!r}: {names[0]!r} has shape {list(layer)}: only matrices are transposed"
            )
        layer = layer[::-1]
    return Stack(entry, names, first.shape, (len(names), *layer) if entry.stacked else layer, rows[0])


def _result_row(name: str, known: Known, target: dtypes.Dtype | None) -> dtypes.Dtype:
    if target is not None and (known.row.floating or known.scheme is not None):
        return target
    if known.scheme is not None or known.row.packed:
        raise UnsupportedError(
            f"tensor {name!r} is {known.scheme or known.row.name}: pass a dtype= to stack its values"
        )
    return known.row


# ---- fill ----


def fill(
    source: Checkpoint | Mapping[str, Any],
    wanted: Sequence[tuple[Stack, Array]],
    *,
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """Fills C-contiguous arrays with what is planned, all in one run.

    Raises:
        FormatError, OSError: a file cannot be read.
    """
    fill_from(_values(source), wanted, threads=threads, progress=progress)


def fill_from(
    values: Callable[[str], Source | QuantizedTensor],
    wanted: Sequence[tuple[Stack, Array]],
    *,
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """`fill` from a function that finds a tensor by its name."""
    batch = Batch()
    for planned, array in wanted:
        size = math.prod(planned.layer) * array.dtype.itemsize
        begin = batch.into(array)
        grid: Grid | None = None
        for k, name in enumerate(planned.names):
            origin = _convertible(values(name), planned.row, threads)
            if origin.size == 0:
                continue
            element, item = origin.row.block_bytes, array.dtype.itemsize
            if planned.entry.transpose and (grid is None or grid.strides[1] != element):  # layers of different dtypes
                rows, columns = planned.layer
                grid = Grid(rows, columns, (columns * element, element, item, rows * item))
            batch.add(origin.job(begin + k * size, planned.row.number, grid=grid))
    batch.run(threads=threads, progress=progress)


def _values(source: Checkpoint | Mapping[str, Any]) -> Callable[[str], Source | QuantizedTensor]:
    """A function that finds a tensor by its name."""
    if not isinstance(source, Checkpoint):

        def of_dict(name: str) -> Source | QuantizedTensor:
            value = source[name]
            return value if isinstance(value, QuantizedTensor) else sources.of_array(name, value)

        return of_dict
    opened = source
    places = {name: (file, index) for name, file, index in opened._parts()}
    return lambda name: catalog.of_file(opened, name, *places[name])


def _convertible(value: Source | QuantizedTensor, row: dtypes.Dtype, threads: int | None) -> Source:
    """A source of whole bytes that a grid can take: restored or decoded first where it is none."""
    if isinstance(value, QuantizedTensor):
        return sources.of_array("", value.dequantize(dtypes.element_dtype(row.number), threads=threads))
    if not value.row.packed:
        return value
    decoded = jobs.private_array(value.shape, dtypes.array_dtype(row.number))
    if value.size:
        Batch([value.job(jobs.address_of(decoded), row.number)]).run(threads=threads)
    return sources.of_array(value.name, jobs.native_order(decoded))
