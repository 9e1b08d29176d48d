"""Makes the table of a torch pickle; every tensor is checked against its storage first.

A tensor of shape n and strides s, in elements, uses the elements of its storage from ``offset`` to
``offset + sum((n - 1) * s)``; the arithmetic uses Python integers, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.arrays import MAX_ARRAY, array_fits, c_strides
from ...base.gc_pause import paused
from ...base.listed_table import ListedTable, Listing
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import ForbiddenError, FormatError, LimitError, SafeloadError, UnsupportedError
from ..registry import Content, OpenRequest
from ..unpickle.machine import Global, describe
from ..unpickle.numpy_arrays import Arrays
from ..unpickle.numpy_globals import NumpyArray
from ..unpickle.run import ADVICE, Unpickled
from .flatten import Tree
from .globals import PickledTensor, Storage

# numpy 2 allows 64 axes (NPY_MAXDIMS), as does the C core (SL_MAX_RANK).
MAX_RANK = 64
# Most bytes of a tensor that is larger than its storage because it repeats elements (a stride of 0). Real ones are
# masks and positions of some MiB; a converted or copied tensor takes its full size in memory.
MAX_REPEATED = 1 << 32


class Made(NamedTuple):
    """The tables of a pickle.

    Attributes:
        table: table of the file.
        beside: a temporary file with the arrays that cannot be read from the file directly; None if there are none.
        names: names of the tensors of both, in the order of the pickle.
    """

    table: ListedTable
    beside: WeightFile | None
    names: list[str]


def content_of(file: WeightFile, wanted: OpenRequest, read: Callable[[OpenRequest], Made]) -> Content:
    """The result of a reader of pickles. An error recommends ``unknown_globals="inert"`` only if that works."""
    try:
        with paused(file.size):  # an object or so for each byte of a pickle
            made = read(wanted)
    except (ForbiddenError, UnsupportedError) as error:
        if ADVICE not in str(error) or _helps(read, wanted._replace(inert=True)):
            raise
        raise type(error)(str(error).replace(ADVICE, "")) from None
    file.table = made.table
    if made.beside is not None:
        made.beside.stand_for(file)
    return Content(file, made.beside, made.names)


def _helps(read: Callable[[OpenRequest], Made], wanted: OpenRequest) -> bool:
    try:
        return bool(read(wanted).names)
    except (SafeloadError, OSError):
        return False


def make_table(
    found: Unpickled,
    wanted: OpenRequest,
    path: str,
    locate: Callable[[Storage], int],
    *,
    big_endian: bool = False,
) -> Made:
    """The table of a file.

    Args:
        found: the pickle.
        wanted: options.
        path: for messages.
        locate: returns the offset of a storage in the file; raises `FormatError` and other errors of this package.
        big_endian: byte order of elements.

    Raises:
        FormatError: a tensor does not fit its storage, or two tensors have the same name.
        UnsupportedError: a tensor that no array can represent.
        LimitError: a limit is exceeded.
        TensorNotFoundError: there is no ``wanted.root``.
    """
    tree = Tree(found.value, path, found.size)
    root = None if wanted.root is None else tree.select(wanted.root)
    places: dict[int, Listing] = {}
    listings: dict[str, Listing | None] = {}
    arrays = Arrays(found, path, big_endian=big_endian)
    for name, tensor in tree.tensors(root):
        if name in listings:
            raise FormatError(f"two tensors are named {show(name)}", path)
        if isinstance(tensor, NumpyArray):
            try:
                listings[name] = arrays.place(name, tensor)
            except UnsupportedError as error:
                if not wanted.inert:
                    raise UnsupportedError(f'{error}; unknown_globals="inert" leaves it out') from None
            continue
        place = places.get(id(tensor))
        if place is None:
            listings[name] = places[id(tensor)] = _place(name, tensor, path, locate)
        else:
            listings[name] = place._replace(name=name)
    named = dict.fromkeys(found.harmless, True) | dict.fromkeys(found.foreign, False)
    inside = [listing for listing in listings.values() if listing is not None]
    table = ListedTable(inside, tree.metadata(root), big_endian=big_endian, named_globals=named)
    return Made(table, arrays.beside(), list(listings))


def _place(name: str, tensor: PickledTensor, path: str, locate: Callable[[Storage], int]) -> Listing:
    """Checks one tensor against its storage and describes it."""
    storage, offset = tensor.storage, tensor.offset
    type_ = tensor.dtype or storage.type
    row = _row(name, tensor, type_, path)
    itemsize = type_.itemsize
    count = _plain_count(tensor)
    if count and storage.part is None and (offset + count) * itemsize <= storage.nbytes:
        begin = _locate(name, storage, locate) + offset * itemsize
        end = begin + count * itemsize
        if row.packed:
            return _listing(name, row, tensor.shape, begin, end, None, path)
        return Listing(name, row, tensor.shape, begin, end)
    shape = _integers(tensor.shape, "the shape", name, path)
    strides = _integers(tensor.strides, "the strides", name, path)
    (offset,) = _integers((offset,), "the offset", name, path)
    if len(shape) != len(strides) or len(shape) > MAX_RANK:
        message = f"{len(shape)} axes and {len(strides)} strides; expected equal numbers of at most {MAX_RANK}"
        raise _refusal(name, message, path)
    begin = _locate(name, storage, locate)
    first, size = (0, storage.nbytes) if storage.part is None else (x * storage.type.itemsize for x in storage.part)
    begin += first
    if not array_fits(shape, itemsize):
        raise _refusal(name, f"shape {list(shape)} has more bytes than memory can have", path)
    if 0 in shape:
        return _listing(name, row, shape, begin, begin, None, path)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if (last + 1) * itemsize > size:
        raise _refusal(
            name,
            f"shape {list(shape)} with strides {list(strides)} from element {offset} uses "
            f"{(last + 1) * itemsize} bytes of storage {show(storage.key)}, which has {size}",
            path,
        )
    count = prod(shape)
    if count * itemsize > max(size, MAX_REPEATED):
        message = f"tensor {show(name)}: shape {list(shape)} repeats {size} bytes to {count * itemsize}"
        raise LimitError(f"{path}: {message}, the most is {MAX_REPEATED}")
    steps = tuple(stride * itemsize for stride in strides)
    if max((0, *steps)) > MAX_ARRAY:  # possible on an axis of one element, whose stride is never used
        raise _refusal(name, f"strides {list(strides)} are more than memory can have", path)
    begin += offset * itemsize
    plain = steps == c_strides(shape, itemsize)
    end = begin + (last + 1 - offset) * itemsize
    return _listing(name, row, shape, begin, end, None if plain else steps, path)


def _plain_count(tensor: PickledTensor) -> int:
    """The number of elements of a tensor in C order, as nearly all are; 0 where anything is unusual about it."""
    shape, strides, offset = tensor.shape, tensor.strides, tensor.offset
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MAX_RANK:
        return 0
    if type(offset) is not int or offset < 0:
        return 0
    count, axis = 1, len(shape)
    while axis:
        axis -= 1
        n, stride = shape[axis], strides[axis]
        if type(n) is not int or n <= 0 or type(stride) is not int or stride != count:
            return 0
        count *= n
    return count


def _locate(name: str, storage: Storage, locate: Callable[[Storage], int]) -> int:
    try:
        return locate(storage)
    except (FormatError, UnsupportedError) as error:
        raise _with_name(error, name) from None


def _listing(
    name: str,
    row: dtypes.Dtype,
    shape: tuple[int, ...],
    begin: int,
    end: int,
    strides: tuple[int, ...] | None,
    path: str,
) -> Listing:
    if row.packed:  # two elements in a byte: the last axis counts bytes in torch
        if not shape or strides is not None:
            raise UnsupportedError(
                f"{path}: tensor {show(name)}: {row.code} with strides or without an axis", path=path, tensor=name
            )
        shape = (*shape[:-1], shape[-1] * 8 // row.bits)
    return Listing(name, row, shape, begin, end, strides)


def _row(name: str, tensor: PickledTensor, type_: Global, path: str) -> dtypes.Dtype:
    """The row of a tensor's dtype."""
    if type_.code is None:
        raise UnsupportedError(
            f"{path}: tensor {show(name)} is of {type_.name}, for which there is no array", path=path, tensor=name
        )
    pending = tensor.pending
    if pending is not None and isinstance(pending, Mapping) and any(pending.get(bit) for bit in ("conj", "neg")):
        raise UnsupportedError(
            f"{path}: tensor {show(name)} was saved with its conjugation or negation pending; save it after "
            "resolve_conj() and resolve_neg()",
            path=path,
            tensor=name,
        )
    return dtypes.BY_CODE[type_.code]


def _integers(values: Any, what: str, name: str, path: str) -> tuple[int, ...]:
    if type(values) not in (tuple, list):
        raise _refusal(name, f"{what} must be a tuple of integers, found {describe(values)}", path)
    for value in values:
        if type(value) is not int:
            raise _refusal(name, f"{what} must be integers, found {describe(value)}", path)
        if value < 0:
            raise _refusal(name, f"{what} must not be negative, found {describe(value)}", path)
        if value > MAX_ARRAY:
            raise _refusal(name, f"{what}: {describe(value)} is more than memory can have", path)
    return tuple(values)


def _refusal(name: str, message: str, path: str) -> FormatError:
    return FormatError(f"tensor {show(name)}: {message}", path)


def _with_name(error: FormatError | UnsupportedError, name: str) -> Exception:
    if isinstance(error, FormatError):
        return FormatError(f"tensor {show(name)}: {error.args[0]}", error.path, error.offset)
    return UnsupportedError(f"{error} (of tensor {show(name)})")
