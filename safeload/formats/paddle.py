"""PaddlePaddle's ``.pdparams`` and ``.pdopt``: pickles of dicts of NumPy arrays, as `paddle.save` writes them.

1. The dict of a state has the key ``StructuredToParameterName@@``: names of parameters by names of tensors.
2. Paddle has no 16-bit unsigned integers: NumPy's uint16 stands for bfloat16, without a mark.
3. Below protocol 4, arrays of more than 2^30 - 1 bytes are stored as flat parts ``NAME@@.0``, ``NAME@@.1``, ..., and
   ``UnpackBigParamInfor@@`` maps NAME to ``OriginShape`` and the names of its parts, ``slices``. They are joined as
   they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.listed_table import ListedTable
from ..base.messages import error_about
from ..base.text import show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, UnsupportedError
from .boxed import Box, BoxedListing, InFile, boxed_file
from .torch.tensors import PickleTables
from .unpickle.machine import describe
from .unpickle.numpy_arrays import NumpyArray

NAMES, PARTS = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_SUFFIXES = (".pdparams", ".pdopt")


class _StoredArray(NamedTuple):
    """An array of the pickle, and where it is."""

    file: WeightFile
    position: int  # in its table


def is_paddle(value: Any, path: str) -> bool:
    """Return True if Paddle has written a pickle, judging by its keys or its suffix."""
    return type(value) is dict and (NAMES in value or PARTS in value or path.endswith(_SUFFIXES))


def plain(value: Any) -> None:
    """Put arrays in the place of tensors, which `paddle.save` writes as tuples of a name and an array."""
    todo, seen = [value], set[int]()
    while todo:
        container = todo.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for key, item in list(container.items() if type(container) is dict else enumerate(container)):
            if type(item) is tuple and len(item) == 2 and type(item[0]) is str and type(item[1]) is NumpyArray:
                container[key] = item[1]
            elif type(item) in (dict, list):
                todo.append(item)


def adapt(value: Mapping[Any, Any], tables: PickleTables, file: WeightFile, *, whole: bool) -> PickleTables:
    """Return the tables of a dict as Paddle means them: bfloat16 by its name, and large arrays joined."""
    # A container selected in the dict is not `whole` and has no parts to join.
    for table in (tables.table, None if tables.beside is None else tables.beside.table):
        if isinstance(table, ListedTable):
            table.replace_rows(dtypes.BY_CODE["U16"], dtypes.BY_CODE["BF16"])
    if not whole or PARTS not in value:
        return tables
    sources = [file] if tables.beside is None else [file, tables.beside]
    places: dict[str, _StoredArray] = {}
    for source, table in zip(sources, [tables.table, *(s.table for s in sources[1:])], strict=True):
        places.update({name: _StoredArray(source, position) for position, name in enumerate(table.names)})
    file.table = tables.table
    listings = dict(_joined(value[PARTS], places, tables.names, file.path))
    beside = boxed_file(file, file.path, listings, [source.store for source in sources])
    named = tables.table.named_globals
    metadata = {key: value for key, value in (tables.table.metadata() or {}).items() if key != PARTS}
    table = ListedTable([], metadata, named_globals=named)
    return PickleTables(table, beside, list(listings), tables.notes)


def _joined(
    about: Any, places: Mapping[str, _StoredArray], names: list[str], path: str
) -> Iterator[tuple[str, BoxedListing]]:
    """Yield all tensors: large ones in the place of their first part."""
    if type(about) is not dict:
        raise FormatError(f"{PARTS} must be a dict, got {describe(about)}", path)
    firsts: dict[str, tuple[str, list[str], tuple[int, ...]]] = {}
    used: set[str] = set()
    for name, fields in about.items():
        slices: Any = fields.get("slices") if type(fields) is dict else None
        shape: Any = fields.get("OriginShape") if type(fields) is dict else None
        known = type(name) is str and type(slices) is list and bool(slices) and all(type(s) is str for s in slices)
        if not known or type(shape) not in (tuple, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise FormatError(f"{PARTS}[{show(name)}] must have slices and OriginShape, got {describe(fields)}", path)
        for part in slices:
            if part not in places or part in used:
                text = f": its part {show(part)} {'is used twice' if part in used else 'does not exist'}"
                raise error_about(FormatError, text, path=path, tensor=name)
            used.add(part)
        firsts[slices[0]] = name, slices, tuple(shape)
    for part in names:
        if part in firsts:
            name, slices, shape = firsts[part]
            if name in places and name not in used:
                raise error_about(FormatError, "is stored whole and in parts", path=path, tensor=name)
            yield name, _join(name, [places[piece] for piece in slices], shape, path)
        elif part not in used:
            yield part, _alone(part, places[part], path)


def _join(name: str, parts: list[_StoredArray], shape: tuple[int, ...], path: str) -> BoxedListing:
    """Describe a tensor as consecutive parts of a vector."""
    row = parts[0].file.table.row(parts[0].position)
    boxes, at = [], 0
    for place in parts:
        part = _alone(name, place, path)
        count = prod(part.shape)
        if part.row is not row or len(part.shape) != 1:
            text = f": a part is {part.row.code} of shape {list(part.shape)}, expected a vector of {row.code}"
            raise error_about(FormatError, text, path=path, tensor=name)
        boxes.append(Box((at,), (count,), part.boxes[0].stored))
        at += count
    if at != prod(shape):
        text = f": its parts have {at:,} elements, but shape {list(shape)} has {prod(shape):,}"
        raise error_about(FormatError, text, path=path, tensor=name)
    return BoxedListing(row, shape, boxes, flat=True)


def _alone(name: str, place: _StoredArray, path: str) -> BoxedListing:
    """Describe an array as a single box."""
    table, index = place.file.table, place.position
    if table.big_endian(index):
        raise error_about(UnsupportedError, "is big-endian, beside arrays in parts", path=path, tensor=name)
    shape = table.shape(index)
    stored = InFile(place.file.store, table.byte_range(index)[0], table.strides(index))
    return BoxedListing(table.row(index), shape, [Box((0,) * len(shape), shape, stored)])
