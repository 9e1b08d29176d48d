"""Quantized tensors in safetensors files: plain tensors with a description in the metadata.

``__metadata__["safeload.quantized"]`` is JSON that maps names to {"scheme", "shape", "axis"}. An int8 tensor is stored
as ``<name>`` (I8) and ``<name>_scale`` (F32), the names of compressed-tensors; in folders, where other libraries would
load the codes as weights, as ``<name>.codes`` and ``<name>_scale``, with the name of the codes in "codes". Blocks are
stored as U8, and their last axis counts bytes.

Packed tensors of published checkpoints keep their bytes and the names of their parts. Their descriptions have "parts"
instead of "axis", and ``safeload.quantization`` holds the quantization of the original ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import FormatError, SafetensorError
from . import dtypes
from .arrays import check_mapping
from .packing import CODES, CONFIG_KEY, GGUF, KEY, NAME
from .quantized_tensor import QuantizedTensor, storage_of
from .table import ListedTable, Listing, Scale
from .tensors import LazyParts
from .text import error_about, show, tensor_named
from .weight_file import WeightFile

SCALE_SUFFIX = "_scale"
CODES_SUFFIX = ".codes"

QUANTIZED = (QuantizedTensor, LazyParts)


def pack(
    tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, in_folder: bool = False
) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
    """Divide quantized tensors into plain tensors, which the metadata describes.

    In a folder, int8 codes are named ``<name>.codes``.
    """
    check_mapping(tensors, "tensors")
    if metadata is not None:
        check_mapping(metadata, "metadata", "str to str")
    if not any(isinstance(value, QUANTIZED) for value in tensors.values()):
        return tensors, texts_with(metadata, {})
    packed: dict[str, Any] = {}
    described: dict[str, Any] = {}
    configs = set()

    def add(name: str, stored: str, part: Any, owner: str) -> None:
        if stored in packed or (stored != name and stored in tensors):
            raise error_about(SafetensorError, f"has the name of {owner} tensor {show(name)}", tensor=stored)
        packed[stored] = part

    for name, value in tensors.items():
        if not isinstance(value, QUANTIZED):
            packed[name] = value
        elif isinstance(value, LazyParts) and value.encoded:  # for an engine, as its ``config.json`` says
            module = name.removesuffix(".weight")
            if module == name:
                raise error_about(SafetensorError, f"is {value.scheme}: its name must end in .weight", tensor=name)
            for suffix, part in value.roles.items():
                add(name, module + suffix, part, f"a part of {value.scheme}")
        elif value.packing is not None:
            if value.packing.flat and value.packing.family == GGUF:
                text = f"is {value.scheme} of a GGUF file, and blocks cross its rows: dequantize it, or pass dtype="
                raise SafetensorError(f"{tensor_named(name)} {text}", tensor=name)
            parts = {role: _name_of(name, value.names, role) for role in value.roles}
            for role, array in value.roles.items():
                add(name, parts[role], array, "a part of packed")
            described[name] = {"scheme": value.scheme, "shape": list(value.shape), "parts": parts}
            configs.add(value.packing.config)
        else:
            described[name] = {"scheme": value.scheme, "shape": list(value.shape), "axis": value.axis}
            stored = name
            if in_folder and value.scale is not None:
                stored = described[name]["codes"] = name + CODES_SUFFIX
            add(name, stored, value.data, "the codes of int8")
            if value.scale is not None:
                add(name, name + SCALE_SUFFIX, value.scale, "the scale of int8")
    if len(configs) > 1:
        raise SafetensorError("the packed tensors come from checkpoints with different quantization configurations")
    return packed, texts_with(metadata, described, configs.pop() if configs else None) or None


def texts_with(
    metadata: Mapping[str, str] | None, described: Mapping[str, Any], config: str | None = None
) -> Mapping[str, str] | None:
    """Return metadata with the description of a file's quantized tensors instead of another file's."""
    texts = metadata
    if metadata is not None and not {KEY, CONFIG_KEY}.isdisjoint(metadata):
        texts = {key: value for key, value in metadata.items() if key not in (KEY, CONFIG_KEY)}
    if not described:
        return texts
    import json  # would add a millisecond to every import

    # The config is written even if empty, because the file may be moved beside another config.json.
    configs = {} if config is None else {CONFIG_KEY: config or "{}"}
    return {**(texts or {}), **configs, KEY: json.dumps(described, sort_keys=True)}


def _name_of(name: str, names: Mapping[str, str], role: str) -> str:
    """Return the name of a part: its stored name, renamed with its tensor, or a name built from the tensor's."""
    stored, own = names.get(role), names.get(NAME, name)
    if stored is None:
        return name if role == CODES else f"{name}_{role}"
    stem, new = own.removesuffix(".weight"), name.removesuffix(".weight")
    if own != name and ((stem == own) != (new == name) or not stored.startswith(stem)):
        ending = "ends" if stem != own else "does not end"
        text = f"is packed and was stored as {show(own)}: readers find its parts only if the name {ending} in .weight"
        raise error_about(SafetensorError, text, tensor=name)
    return new + stored[len(stem) :]


def unpack(file: WeightFile) -> dict[str, str]:
    """Replace the table of an open file by the table in its metadata; return tensor names by names of their codes."""
    table = file.table
    metadata = table.metadata() or {}
    text = metadata.get(KEY)
    if text is None:
        return {}
    import json  # as in `texts_with`

    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{KEY} is not JSON: {error}", file.path) from None
    if not isinstance(described, dict):
        raise FormatError(f"{KEY} must be a JSON object, got {type(described).__name__}", file.path)
    columns = zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True)
    listings = {name: Listing(name, row, shape, *place) for name, row, shape, place in columns}
    scales = set()
    named: dict[str, str] = {}  # only tensors with another name than their codes
    for name, entry in described.items():
        if isinstance(entry, dict) and isinstance(entry.get("parts"), dict):
            continue  # a packed tensor, recognised by the names and shapes of its parts as in a published checkpoint
        scheme, shape, axis, codes = _entry(name, entry, file.path)
        stored = listings.get(codes)
        if stored is None:
            raise FormatError(f"{KEY} describes {show(codes)}, which is not in the file", file.path)
        if codes != name:
            if name in listings:
                text = f"{KEY}: {show(codes)} holds the codes of {show(name)}, which is stored too"
                raise FormatError(text, file.path)
            named[codes] = name
        try:
            data, scale = storage_of(scheme, shape, axis)
        except ValueError as error:
            raise error_about(FormatError, f": {error} ({KEY})", path=file.path, tensor=name) from None
        _expect(stored, data, codes, file.path)
        row = dtypes.BLOCK_TYPES.get(scheme, stored.row)
        described_scale = None
        if scale is not None:
            scales_listing = listings.get(name + SCALE_SUFFIX)
            if scales_listing is None:
                raise FormatError(f"{KEY}: int8 tensor {show(name)} has no {show(name + SCALE_SUFFIX)}", file.path)
            _expect(scales_listing, scale, name + SCALE_SUFFIX, file.path)
            described_scale = Scale(axis, scales_listing.shape, scales_listing.begin, scales_listing.end)
            scales.add(name + SCALE_SUFFIX)
        listings[codes] = stored._replace(name=name, row=row, shape=shape, scale=described_scale)
    both = (scales & described.keys()) | (scales & named.keys()) | (named.keys() & described.keys())
    if both:
        raise FormatError(f"{KEY}: {show(min(both))} is part of a quantized tensor and a quantized tensor", file.path)
    rest = {key: value for key, value in metadata.items() if key != KEY}
    file.table = ListedTable([entry for name, entry in listings.items() if name not in scales], rest)
    return named


def _entry(name: str, entry: Any, path: str) -> tuple[str, tuple[int, ...], int | None, str]:
    """Return scheme, shape, axis and the stored name of the codes."""
    if isinstance(entry, dict):
        scheme, shape, axis = map(entry.get, ("scheme", "shape", "axis"))
        codes = entry.get("codes", name)
        if (
            isinstance(scheme, str)
            and isinstance(shape, list)
            and all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape)
            and (axis is None or type(axis) is int)
            and codes in (name, name + CODES_SUFFIX)
        ):
            return scheme, tuple(shape), axis, codes
    expected = f'{{"scheme": text, "shape": [integers], "axis": integer or null, "codes": name + "{CODES_SUFFIX}"}}'
    raise FormatError(f"{KEY}: the entry of {show(name)} must be {expected}", path)


def _expect(stored: Listing, expected: tuple[np.dtype[Any], tuple[int, ...]], name: str, path: str) -> None:
    row, shape = dtypes.row_of(expected[0]), expected[1]
    assert row is not None
    if (stored.row, stored.shape) != (row, shape):
        needed = f"{row.code} {show(list(shape))} ({KEY})"
        text = f"is {stored.row.code} {show(list(stored.shape))}, but its description needs {needed}"
        raise error_about(FormatError, text, path=path, tensor=name)


def unpack_all(
    files: list[WeightFile], where: dict[str, tuple[WeightFile, int]] | None
) -> dict[str, tuple[WeightFile, int]] | None:
    """List the quantized tensors of safetensors files, and no longer list their scales as tensors."""
    changed = {file: unpack(file) for file in files if KEY in (file.table.metadata() or {})}
    if where is None or not changed:
        return where
    places: dict[str, tuple[WeightFile, int]] = {}
    for stored, (file, index) in where.items():
        name = stored
        if file in changed:
            name = changed[file].get(stored, stored)
            index = file.table.find(name)
        if index < 0:
            continue
        if name in places:
            raise FormatError(f"{show(places[name][0].path)} has a tensor {show(name)} too", file.path)
        places[name] = (file, index)
    return places
