"""Quantized tensors in safetensors files: plain tensors, and a metadata key that describes them.

``__metadata__["safeload.quantized"]`` is JSON that maps names to {"scheme", "shape", "axis"}. An int8 tensor is stored
as ``<name>`` (I8) and ``<name>_scale`` (F32), as compressed-tensors names them; blocks are stored as U8, and their last
axis counts bytes.

A packed tensor of a published checkpoint is stored as it was, under the names that its parts had: its description has
"parts" in place of "axis", and ``safeload.quantization`` holds the quantization of the ``config.json`` it came with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import check_mapping
from ...base.listed_table import ListedTable, Listing
from ...base.packing import CODES, CONFIG_KEY, NAME
from ...base.table import Scale
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor, storage_of
from ...engine.read.lazy import LazyPacked, LazyQuantized
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, SafetensorError

KEY = "safeload.quantized"
SCALE_SUFFIX = "_scale"

_QUANTIZED = (QuantizedTensor, LazyQuantized, LazyPacked)


def pack(
    tensors: Mapping[str, Any], metadata: Mapping[str, str] | None
) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
    """Converts tensors and metadata to the form that a file holds.

    Raises:
        TypeError: one of them is not a mapping.
        SafetensorError: the scale of an int8 tensor would have the name of another tensor.
    """
    check_mapping(tensors, "tensors")
    if metadata is not None:
        check_mapping(metadata, "metadata", "text to text")
    if not any(isinstance(value, _QUANTIZED) for value in tensors.values()):
        if metadata is not None and not {KEY, CONFIG_KEY}.isdisjoint(metadata):  # of another file, and wrong here
            metadata = {key: value for key, value in metadata.items() if key not in (KEY, CONFIG_KEY)}
        return tensors, metadata
    import json  # imported where needed: it takes a millisecond, which every import would pay

    packed: dict[str, Any] = {}
    described: dict[str, Any] = {}
    configs = set()
    for name, value in tensors.items():
        if not isinstance(value, _QUANTIZED):
            packed[name] = value
            continue
        packing = None if isinstance(value, LazyQuantized) else value.packing
        if packing is not None:
            assert not isinstance(value, LazyQuantized)
            _add_parts(packed, tensors, name, value)
            described[name] = {
                "scheme": value.scheme,
                "shape": list(value.shape),
                "parts": {role: _name_of(name, value.names, role) for role in value.roles},
            }
            configs.add(packing.config)
            continue
        assert isinstance(value, (QuantizedTensor, LazyQuantized))
        described[name] = {"scheme": value.scheme, "shape": list(value.shape), "axis": value.axis}
        packed[name] = value.data
        if value.scale is not None:
            if name + SCALE_SUFFIX in tensors:
                raise SafetensorError(
                    f"tensor {show(name + SCALE_SUFFIX)} has the name of the scale of int8 tensor {show(name)}"
                )
            packed[name + SCALE_SUFFIX] = value.scale
    if len(configs) > 1:
        raise SafetensorError("the packed tensors come from checkpoints with different quantization configurations")
    texts = {key: value for key, value in (metadata or {}).items() if key not in (KEY, CONFIG_KEY)}
    if configs:  # also of a checkpoint without: another config.json may come to stand beside the file
        texts[CONFIG_KEY] = configs.pop() or "{}"
    return packed, {**texts, KEY: json.dumps(described, sort_keys=True)}


def _name_of(name: str, names: Mapping[str, str], role: str) -> str:
    """The name of a part in a file: the one that it had, renamed with its tensor, or one made of the tensor's.

    Raises:
        SafetensorError: the new name would not be recognised: it ends in another way than the old one.
    """
    stored, own = names.get(role), names.get(NAME, name)
    if stored is None:
        return name if role == CODES else f"{name}_{role}"
    stem, new = own.removesuffix(".weight"), name.removesuffix(".weight")
    if own != name and ((stem == own) != (new == name) or not stored.startswith(stem)):
        raise SafetensorError(
            f"packed tensor {show(name)} was stored as {show(own)}: its parts are found again only under a name that "
            f"{'ends' if stem != own else 'does not end'} in .weight",
            tensor=name,
        )
    return new + stored[len(stem) :]


def _add_parts(
    packed: dict[str, Any], tensors: Mapping[str, Any], name: str, value: QuantizedTensor | LazyPacked
) -> None:
    """Adds the parts of a packed tensor under the names that they had."""
    for role, part in value.roles.items():
        stored = _name_of(name, value.names, role)
        if stored in packed or (stored != name and stored in tensors):
            raise SafetensorError(f"tensor {show(stored)} has the name of a part of packed tensor {show(name)}")
        packed[stored] = part


def unpack(file: WeightFile) -> bool:
    """Gives an open safetensors file the table that its metadata describes.

    Returns:
        Whether the metadata describes quantized tensors.

    Raises:
        FormatError: the description is malformed, or does not match the tensors in the file.
    """
    table = file.table
    metadata = table.metadata() or {}
    text = metadata.get(KEY)
    if text is None:
        return False
    described = _parse(text, file.path)
    listings = {}
    scales = set()
    for name, row, shape, (begin, end) in zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True):
        listings[name] = Listing(name, row, shape, begin, end)
    for name, entry in described.items():
        if isinstance(entry, dict) and isinstance(entry.get("parts"), dict):
            continue  # found by the names and shapes of its parts, as in the checkpoint that it came from
        stored = listings.get(name)
        if stored is None:
            raise FormatError(f"{KEY} describes tensor {show(name)}, which is not in the file", file.path)
        scheme, shape, axis = _entry(name, entry, file.path)
        try:
            data, scale = storage_of(scheme, shape, axis)
        except ValueError as error:
            raise FormatError(f"{KEY}: tensor {show(name)}: {error}", file.path) from None
        _expect(stored, data, name, file.path)
        row = dtypes.BLOCK_TYPES.get(scheme, stored.row)
        described_scale = None
        if scale is not None:
            held = listings.get(name + SCALE_SUFFIX)
            if held is None:
                raise FormatError(f"{KEY}: int8 tensor {show(name)} has no {show(name + SCALE_SUFFIX)}", file.path)
            _expect(held, scale, name + SCALE_SUFFIX, file.path)
            described_scale = Scale(axis, held.shape, held.begin, held.end)
            scales.add(name + SCALE_SUFFIX)
        listings[name] = stored._replace(row=row, shape=shape, scale=described_scale)
    both = scales & described.keys()
    if both:
        raise FormatError(f"{KEY}: {show(min(both))} is a scale and a quantized tensor", file.path)
    rest = {key: value for key, value in metadata.items() if key != KEY}
    file.table = ListedTable([entry for name, entry in listings.items() if name not in scales], rest)
    return True


def _parse(text: str, path: str) -> dict[str, Any]:
    import json  # as in `pack`

    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{KEY} is not JSON: {error}", path) from None
    if not isinstance(described, dict):
        raise FormatError(f"{KEY} must be a JSON object, found {type(described).__name__}", path)
    return described


def _entry(name: str, entry: Any, path: str) -> tuple[str, tuple[int, ...], int | None]:
    wanted = 'must be {"scheme": text, "shape": [integers], "axis": integer or null}'
    if not isinstance(entry, dict) or not isinstance(entry.get("scheme"), str):
        raise FormatError(f"{KEY}: the entry of {show(name)} {wanted}", path)
    shape, axis = entry.get("shape"), entry.get("axis")
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape):
        raise FormatError(f"{KEY}: the entry of {show(name)} {wanted}", path)
    if axis is not None and type(axis) is not int:
        raise FormatError(f"{KEY}: the entry of {show(name)} {wanted}", path)
    return entry["scheme"], tuple(shape), axis


def _expect(stored: Listing, wanted: tuple[np.dtype[Any], tuple[int, ...]], name: str, path: str) -> None:
    row = dtypes.BY_NAME[wanted[0].name]
    if (stored.row, stored.shape) != (row, wanted[1]):
        raise FormatError(
            f"{KEY}: tensor {show(name)} is {stored.row.code} {show(list(stored.shape))}, but its description needs "
            f"{row.code} {show(list(wanted[1]))}",
            path,
        )


def unpack_all(
    files: list[WeightFile], where: dict[str, tuple[WeightFile, int]] | None
) -> dict[str, tuple[WeightFile, int]] | None:
    """Finds the quantized tensors that safetensors files describe; their scales are then not listed as tensors."""
    changed = {file for file in files if KEY in (file.table.metadata() or {}) and unpack(file)}
    if where is None or not changed:
        return where
    found = ((name, file, file.table.find(name) if file in changed else index) for name, (file, index) in where.items())
    return {name: (file, index) for name, file, index in found if index >= 0}
