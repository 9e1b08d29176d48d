"""Files of pickle.dump with NumPy arrays in dicts, lists and tuples: one pickle per file, of any protocol.

PaddlePaddle's ``.pdparams`` and ``.pdopt``: pickles of dicts of NumPy arrays, as `paddle.save` writes them.

1. The dict of a state has the key ``StructuredToParameterName@@``: names of parameters by names of tensors.
2. Paddle has no 16-bit unsigned integers: NumPy's uint16 stands for bfloat16, without a mark.
3. Below protocol 4, arrays of more than 2^30 - 1 bytes are stored as flat parts ``NAME@@.0``, ``NAME@@.1``, ..., and
   ``UnpackBigParamInfor@@`` maps NAME to ``OriginShape`` and the names of its parts, ``slices``. They are joined as
   they are read.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, TypeAlias

from ..core import dtypes
from ..core.files import LocalStore
from ..core.foreign import HEAD_SIZE
from ..core.registry import Candidate, Content, OpenRequest
from ..core.table import ListedTable
from ..core.text import clip, error_about, printable, show
from ..core.weight_file import WeightFile
from ..errors import ForbiddenError, FormatError, SafeloadError, UnsupportedError
from . import unpickle as unpickler
from .boxed import BoxedListing, Region, boxed_file, in_one_box, in_pieces
from .torch.file import pickle_at, storage_in
from .torch.globals import ALLOWED, TENSOR, NumpyArray, Storage, read_persistent_id
from .torch.tensors import content_of, make_tables
from .unpickle import Fault, Foreign, Global, Inert, Unpickled, check_foreign, describe

# The function that pickle calls for the storage of a tensor: its argument is a torch file of the format before 1.6.
_LOAD = "torch.storage._load_from_bytes"


def _load_from_bytes(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or type(args[0]) is not bytes:
        raise Fault(f"{_LOAD} takes bytes of at most {unpickler.MAX_PICKLE} bytes, got {describe(args)}")
    try:
        return storage_in(args[0], _LOAD)
    except SafeloadError as error:
        raise Fault(str(error), UnsupportedError) from None


# `scan` does not know the last row, because torch itself executes the pickle in the bytes.
_TABLE = {**ALLOWED, _LOAD: Global(_LOAD, TENSOR, _load_from_bytes, copies=True)}

# Functions that make an object of their first argument, in pickles of protocols 0 and 1.
_RECONSTRUCTORS = ("copy_reg._reconstructor", "copyreg._reconstructor")
# The first class of scikit-learn in a pickle: module and class are two strings, or two lines of protocol 0.
_ESTIMATOR = re.compile(rb"sklearn\.[\w.]+(?:\x94\x8c.|\n)(\w+)", re.DOTALL)


def _locate(storage: Storage) -> int:
    raise UnsupportedError(f"storage {show(storage.key)} is not in a pickle")


def read(candidate: Candidate, request: OpenRequest, begin: int = 0) -> Content:
    """Read the table of an open file from ``begin`` on; the bytes before belong to an object array of `numpy.save`."""
    return content_of(candidate.file, request, lambda request: _read_tables(candidate.file, request, begin))


def _read_tables(file: WeightFile, request: OpenRequest, begin: int) -> Content:
    path = file.path
    pickled = _unpickle(file, request, begin)
    if type(pickled.value) is NumpyArray and pickled.value.items is not None:
        items, shape = pickled.value.items, pickled.value.shape
        pickled = pickled._replace(value=items[0] if shape == () and len(items) == 1 else items)
    value = pickled.value
    is_paddle = type(value) is dict and (NAMES in value or PARTS in value or path.endswith(_SUFFIXES))
    if is_paddle:
        _plain(pickled.value)
    content = make_tables(pickled, request, file, _locate)
    if is_paddle:
        content = _adapt(pickled.value, content, whole=request.root is None)
    if not content.names:
        kind = f"a pickle that torch.save did not write (it holds {describe(pickled.value)}), without NumPy arrays"
        text = f"this is {kind}; only tensors and arrays can be read from pickles"
        raise error_about(UnsupportedError, text, path=path)
    if (end := begin + pickled.size) < file.size:
        text = f"{file.size - end} bytes follow the pickle, which ends at byte {end}"
        raise error_about(UnsupportedError, f"{text}; files of several pickles are not supported", path=path)
    return content


def _run(file: WeightFile, begin: int, *, inert: bool) -> Unpickled:
    """Run the pickle of a file. A pickle that is too large for memory is mapped, and its arrays stay where they are."""
    store, data = file.store, None
    if file.size > unpickler.MAX_PICKLE and not begin and isinstance(store, LocalStore) and os.name != "nt":
        with suppress(OSError, ValueError):
            data = store.use(partial(mmap.mmap, access=mmap.ACCESS_READ), 0)
    if data is not None:
        return unpickler.unpickle(data, _TABLE, partial(read_persistent_id, storages=None), path=file.path, inert=inert)
    return pickle_at(file, begin, None, inert, _TABLE, whole=True)


def _unpickle(file: WeightFile, request: OpenRequest, begin: int) -> Unpickled:
    """Run the pickle of a file, with errors that name its kind if it has unknown globals."""
    path = file.path
    try:
        return _run(file, begin, inert=False)
    except ForbiddenError as error:
        if "joblib.numpy_pickle" in str(error):
            model = _ESTIMATOR.search(file.read_at(0, HEAD_SIZE))
            kind = f"a joblib file with a scikit-learn model ({model[1].decode()})" if model else "a joblib file"
            text = f"this is {kind}, which stores arrays between the opcodes of a pickle; "
            advice = "load it with joblib and save the arrays with numpy.savez or as safetensors"
            raise error_about(UnsupportedError, text + advice, path=path) from None
        try:
            pickled = _run(file, begin, inert=True)
        except SafeloadError:
            if request.inert:
                raise
            raise error from None
    root = pickled.value
    clause = "the pickle references"
    if type(root) in (Inert, Foreign):
        if root.name in _RECONSTRUCTORS and root.args and type(root.args[0]) is Foreign:  # protocols 0 and 1
            root = root.args[0]
        name = clip(printable(root.name), 200)
        clause = f"this is a pickle of {name}, not of weights alone: it references"
        if name.startswith("sklearn."):
            clause = f"this is a scikit-learn model ({name.rpartition('.')[2]}), not weights: it references"
    check_foreign(pickled.foreign, path, request.inert, clause)
    return pickled


NAMES, PARTS = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_SUFFIXES = (".pdparams", ".pdopt")


# The file of an array, and its position in the table.
_Place: TypeAlias = tuple[WeightFile, int]


def _plain(value: Any) -> None:
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


def _adapt(value: Mapping[Any, Any], content: Content, *, whole: bool) -> Content:
    """Return the content of a dict as Paddle means it: bfloat16 by its name, and large arrays joined."""
    # A container selected in the dict is not `whole` and has no parts to join.
    file, further, names, notes = content
    sources = (file, *further)
    for source in sources:
        if isinstance(source.table, ListedTable):
            source.table.replace_rows(dtypes.BY_CODE["U16"], dtypes.BY_CODE["BF16"])
    if not whole or PARTS not in value:
        return content
    places = {name: (source, k) for source in sources for k, name in enumerate(source.table.names)}
    listings = dict(_joined(value[PARTS], places, names, file.path))
    beside = boxed_file(file, listings, [source.store for source in sources])
    beside.stand_for(file)
    metadata = {key: value for key, value in (file.table.metadata() or {}).items() if key != PARTS}
    file.table = ListedTable([], metadata, named_globals=file.table.named_globals)
    return Content(file, (beside,), list(listings), notes)


def _joined(
    about: Any, places: Mapping[str, _Place], names: Sequence[str], path: str
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


def _join(name: str, parts: list[_Place], shape: tuple[int, ...], path: str) -> BoxedListing:
    """Describe a tensor as consecutive parts of a vector."""
    file, position = parts[0]
    row = file.table.row(position)
    pieces: list[tuple[Any, int]] = []
    for place in parts:
        part = _alone(name, place, path)
        if part.unknown is not None:
            return part._replace(unknown=part.unknown._replace(shape=shape))
        if part.row is not row or len(part.shape) != 1:
            text = f": a part is {part.row.code} of shape {list(part.shape)}, expected a vector of {row.code}"
            raise error_about(FormatError, text, path=path, tensor=name)
        pieces.append((part.boxes[0].stored, part.shape[0]))
    if (total := sum(count for _, count in pieces)) != prod(shape):
        text = f": its parts have {total:,} elements, but shape {list(shape)} has {prod(shape):,}"
        raise error_about(FormatError, text, path=path, tensor=name)
    return in_pieces(row, shape, pieces)


def _alone(name: str, place: _Place, path: str) -> BoxedListing:
    """Describe an array as a single box, or an entry that cannot be read as such."""
    file, index = place
    table = file.table
    if (unknown := table.unknown.get(table.names[index])) is not None:
        return BoxedListing(table.row(index), (0,), [], unknown=unknown)
    if index in table.big_endian:
        raise error_about(UnsupportedError, "is big-endian, beside arrays in parts", path=path, tensor=name)
    stored = Region(file.store, table.byte_range(index)[0], table.strides.get(index))
    return in_one_box(table.row(index), table.shape(index), stored)
