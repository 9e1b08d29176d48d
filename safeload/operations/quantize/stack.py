"""Stack the layers of each kind of weight into one tensor, transposed if the layout requests it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, check_mapping
from ...base.showing import dict_repr
from ...base.text import error_about, show
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.codes.source import of_array
from ...engine.read.load import parse_target, refuse_own_files
from ...engine.run.cast import target_array
from ...engine.run.jobs import Batch, JobGrid
from ...engine.run.memory import check_disjoint, check_threads, overlapping, private_array
from ...engine.run.progress import Progress
from ...errors import SafeloadError, TensorNotFoundError, UnsupportedError, exported, public
from ...models.layout import LAYER, Layout, StackedTensor
from ..sources.catalog import Catalog, Given, TensorDescription, read_values

_MAX_DIGITS = 18  # of a layer number, because ``int`` refuses more than 4300


@exported()
class StackedDict(dict[str, Array]):
    """Name to stacked array, in the order of the layout.

    Attributes:
        left_out: names of the tensors that the layout does not use.

    Example:
        >>> import safeload
        >>> norms = safeload.StackedTensor("norm", "model.layers.{}.input_layernorm.weight")
        >>> stacked = safeload.stack("tiny-llama", safeload.Layout("norms", [norms]))
        >>> stacked["norm"].shape, len(stacked.left_out)
        ((3, 64), 27)
    """

    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return dict_repr("StackedDict", self)


class Stack(NamedTuple):
    """A planned tensor of the result."""

    entry: StackedTensor
    names: list[str]  # the layers in order; a single tensor if there is no layer axis
    layer: tuple[int, ...]  # shape of a layer in the source
    shape: tuple[int, ...]  # shape of the result
    row: dtypes.Dtype  # dtype of the result


@public
def stack(
    source: Given,
    layout: Layout,
    *,
    dtype: Any = None,
    out: Mapping[str, Array] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> StackedDict:
    """Arrange the tensors of a checkpoint by a layout: read, convert, transpose and stack them in one pass.

    Args:
        source: path or URL of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.
        layout: the layout of the result; see `safeload.layouts`.
        dtype: dtype for floating tensors; None leaves it unchanged. Required if tensors are quantized.
        out: arrays to fill, by name. Each must be C-contiguous and have the dtype and shape of the result; all are
            checked before the first byte is written. Arrays can overlap those of the source, but must not map its
            files.
        storage_options: for URLs: options of the filesystem behind the URL, see `open`.
        threads: None: chosen automatically.
        progress: True for a bar, or a callable that gets (bytes_done, bytes_total).

    Returns:
        Name to array in the order of the layout; ``left_out`` names the tensors that the layout does not use.

    Raises:
        TensorNotFoundError: a source or a layer is missing; the message names layer and tensor.
        SafeloadError: layers differ in shape or dtype; the message names two layers.
        UnsupportedError: a tensor to transpose is not a matrix, the conversion is not supported, or a tensor holds
            codes that cannot be dequantized, such as EXL2, or was opened as stored.
        ValueError: an array of ``out`` does not match.
        FormatError, OSError: see `safeload.open`.

    Example:
        >>> import numpy as np
        >>> from safeload import Layout, StackedTensor, stack
        >>> layers = {f"h.{k}.w": np.ones((2, 3), np.float16) for k in range(4)}
        >>> stack(layers, Layout("tiny", [StackedTensor("w", "h.{}.w", transpose=True)]), dtype="float32")["w"].shape
        (4, 3, 2)
    """
    check_threads(threads)
    target = parse_target(dtype)
    if out is not None:
        check_mapping(out, "out")
    with Catalog.of(source, storage_options) as catalog:
        plans = plan({name: catalog.about(name) for name in catalog}, layout, target)
        used = {name for stack in plans for name in stack.names}
        catalog.refuse_codes(used, "stack")
        result = _targets(plans, out)
        refuse_own_files(result if out is not None else {}, catalog.weight_files)
        filled = dict(result)
        for name in overlapping(result if out is not None else {}, catalog.memory_of(used)):
            filled[name] = private_array(result[name].shape, result[name].dtype)
        fill(catalog, [(stack, filled[stack.entry.name]) for stack in plans], threads=threads, progress=progress)
        for name, array in filled.items():
            if array is not result[name]:
                np.copyto(result[name], array)
        result.left_out = tuple(name for name in catalog if name not in used)
    return result


def _targets(plans: Sequence[Stack], out: Mapping[str, Array] | None) -> StackedDict:
    """Return the arrays to fill: ``out`` if given, else new arrays."""
    result = StackedDict()
    unknown = sorted(set(out or ()) - {p.entry.name for p in plans}, key=str)
    if unknown:
        raise ValueError(f"out: {show(unknown[0])} is not a tensor of this layout")
    for stack in plans:
        dtype, name = dtypes.array_dtype(stack.row.number), stack.entry.name
        if out is not None and name not in out:
            raise ValueError(f"out: no array for {show(name)}")
        try:
            result[name] = target_array(stack.shape, dtype, None if out is None else out[name])
        except ValueError as error:
            raise ValueError(f"{show(name)}: {error}") from None
    if out is not None:
        check_disjoint(result)
    return result


# ---- plan ----


def plan(tensors: Mapping[str, TensorDescription], layout: Layout, target: dtypes.Dtype | None) -> list[Stack]:
    """Plan the tensors of a layout, checking every name and shape."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a safeload.Layout, got {type(layout).__name__}")
    layers = {entry.source: _layers_of(tensors, entry) for entry in layout.tensors if entry.stacked}
    counts: dict[str, int] = {}
    for source, numbers in layers.items():
        prefix = source.split(LAYER)[0]
        counts[prefix] = max(counts.get(prefix, 0), 1 + max(numbers, default=-1))
    return [_plan_entry(entry, tensors, layers.get(entry.source), counts, target) for entry in layout.tensors]


def _layers_of(tensors: Mapping[str, TensorDescription], entry: StackedTensor) -> set[int]:
    """Return the numbers of the layers that match an entry."""
    prefix, suffix = entry.source.split(LAYER)
    pattern = re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix)}", re.ASCII)
    layers = set()
    for name, digits in ((match[0], match[1]) for match in map(pattern.fullmatch, tensors) if match is not None):
        if len(digits) > _MAX_DIGITS:
            shown = repr(name if len(name) <= 40 else f"{name[:40]}...")
            raise SafeloadError(f"{show(entry.name)}: {shown} has a layer number with {len(digits)} digits")
        if digits != str(int(digits)):
            text = f"{show(name)} has a layer number with leading zeros: {show(digits)}"
            raise SafeloadError(f"{show(entry.name)}: {text}")
        layers.add(int(digits))
    return layers


def _plan_entry(
    entry: StackedTensor,
    tensors: Mapping[str, TensorDescription],
    layers: set[int] | None,  # that match the entry; None if it has no layer axis
    counts: Mapping[str, int],  # of layers, by the prefix of their names, over all entries
    target: dtypes.Dtype | None,
) -> Stack:
    """Plan an entry of a layout."""
    names, at = [entry.source], f"{show(entry.name)}: "
    if layers is not None:
        prefix, suffix = entry.source.split(LAYER)
        if not layers:
            raise TensorNotFoundError(f"{at}no tensor matches {show(entry.source)} with a layer number")
        count = counts[prefix]
        if len(layers) < count:  # checked before the names are built, because a large number can imply any count
            missing = next(k for k in range(count) if k not in layers)
            name = show(f"{prefix}{missing}{suffix}")
            raise TensorNotFoundError(f"{at}layer {missing} of {count} is missing: no tensor {name}")
        names = [f"{prefix}{k}{suffix}" for k in range(count)]
    elif entry.source not in tensors:
        raise TensorNotFoundError(f"{at}no tensor {show(entry.source)}")
    shape, shown = tensors[names[0]].shape, show(names[0])
    for name in names[1:]:
        if tensors[name].shape != shape:
            text = f"{shown} has shape {list(shape)}, but {show(name)} has {list(tensors[name].shape)}"
            raise SafeloadError(at + text, tensor=name)
    rows = [_result_row(name, tensors[name], target) for name in names]
    for name, row in zip(names, rows, strict=True):
        if row is not rows[0]:
            text = f"{shown} is {rows[0].name}, but {show(name)} is {row.name}: pass dtype="
            raise SafeloadError(at + text, tensor=name)
    if entry.transpose and len(shape) != 2:
        text = f"{shown} has shape {list(shape)}: only matrices can be transposed"
        raise UnsupportedError(at + text, tensor=names[0])
    layer = shape[::-1] if entry.transpose else shape
    return Stack(entry, names, shape, (len(names), *layer) if entry.stacked else layer, rows[0])


def _result_row(name: str, tensor: TensorDescription, target: dtypes.Dtype | None) -> dtypes.Dtype:
    if target is not None and (tensor.row.floating or tensor.scheme is not None):
        return target
    if tensor.scheme is not None or tensor.row.packed:
        text = f"is {tensor.scheme or tensor.row.name}: pass dtype= to stack its values"
        raise error_about(UnsupportedError, text, tensor=name)
    return tensor.row


# ---- fill ----


def fill(
    catalog: Catalog,
    targets: Sequence[tuple[Stack, Array]],
    *,
    threads: int | None = None,
    progress: Progress = None,
) -> None:
    """Fill C-contiguous arrays as planned, all in one run."""
    batch = Batch()
    for stack, array in targets:
        size = math.prod(stack.layer) * array.dtype.itemsize
        begin = batch.into(array)
        grid: JobGrid | None = None
        for k, name in enumerate(stack.names):
            origin = catalog.source(name)
            if isinstance(origin, QuantizedTensor) or origin.row.packed:  # a strided copy needs whole-byte elements
                decoded = private_array(origin.shape, array.dtype)
                origin = of_array("", read_values(origin, stack.row, decoded, threads))
            if origin.size == 0:
                continue
            element, item = origin.row.block_bytes, array.dtype.itemsize
            if stack.entry.transpose and (grid is None or grid.strides[1] != element):  # layers of different dtypes
                rows, columns = stack.layer
                grid = JobGrid(rows, columns, (columns * element, element, item, rows * item))
            batch.add(origin.job(begin + k * size, stack.row.number, grid=grid))
    batch.run(threads=threads, progress=progress)
