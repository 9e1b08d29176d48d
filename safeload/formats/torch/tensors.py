"""Make the table of a torch pickle, after checking every tensor against its storage.

A tensor of shape n and strides s, in elements, uses the elements of its storage from ``offset`` to
``offset + sum((n - 1) * s)``. The arithmetic uses Python integers, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

from ...base import dtypes
from ...base.arrays import MAX_ARRAY, array_fits, c_strides
from ...base.gc_pause import paused
from ...base.messages import error_about
from ...base.table import ListedTable, Listing, unreadable
from ...base.text import plural, show
from ...engine.run.weight_file import WeightFile
from ...errors import ForbiddenError, FormatError, LimitError, SafeloadError, UnsupportedError
from ..registry import Content, OpenRequest
from ..unpickle.machine import ADVICE, Global, Unpickled, describe
from ..unpickle.numpy_arrays import ArrayPlaces, NumpyArray
from .flatten import Tree
from .globals import ALLOWED, PickledTensor, Storage

# numpy 2 allows 64 axes (NPY_MAXDIMS), as does the C core (SL_MAX_RANK).
MAX_RANK = 64
# Maximum size in bytes of a tensor that exceeds its storage by repeating elements (stride 0). Real examples are masks
# and positions of a few MiB. A converted or copied tensor takes its full size in memory.
MAX_REPEATED = 1 << 32

# Dtypes with the size of torch dtypes unknown to NumPy.
STAND_INS = {row.itemsize: row for row in map(ALLOWED.__getitem__, ("torch.uint8", "torch.uint16", "torch.uint32"))}


def content_of(file: WeightFile, request: OpenRequest, read: Callable[[OpenRequest], Content]) -> Content:
    """Run a pickle reader. Errors recommend ``unknown_globals="inert"`` only if that works."""
    try:
        with paused(file.size):  # a pickle can make an object per byte
            return read(request)
    except (ForbiddenError, UnsupportedError) as error:
        text, helps = str(error), False
        if ADVICE in text:
            with suppress(SafeloadError, OSError):
                helps = bool(read(request._replace(inert=True)).names)
        if helps or ADVICE not in text:
            raise
        raise type(error)(text.replace(ADVICE, ""), path=error.path) from None


def make_tables(
    pickled: Unpickled,
    request: OpenRequest,
    file: WeightFile,
    locate: Callable[[Storage], int],  # returns the offset of a storage in the file
    *,
    big_endian: bool = False,
) -> Content:
    """Give a file the table of its pickle; arrays that it cannot provide directly are in a temporary file beside it."""
    path = file.path
    tree = Tree(pickled.value, path, pickled.size, pickled.members)
    root = None if request.root is None else tree.select(request.root)
    by_id: dict[int, Listing] = {}
    listings: dict[str, Listing | None] = {}
    notes: list[str] = []
    tensors, arrays = TensorPlaces(path, locate), ArrayPlaces(pickled, path, big_endian=big_endian)
    embedded = TensorPlaces(path, lambda storage: arrays.put(storage.raw or b"", 1))
    for name, tensor in tree.tensors(root):
        if name in listings:
            raise FormatError(f"two tensors are named {show(name)}", path)
        if isinstance(tensor, NumpyArray):
            listing = arrays.place(name, tensor)
            if request.inert and listing is not None and listing.unknown is not None and not listing.unknown.is_tensor:
                notes.append(f"{show(name)} is left out: {listing.unknown.label} are no tensor")
            else:
                listings[name] = listing
        elif type(tensor.storage) is Storage and tensor.storage.raw is not None:
            listings[name] = None
            arrays.listings.append(embedded.place(name, tensor))
        elif (listing := by_id.get(id(tensor))) is not None:
            listings[name] = listing._replace(name=name)
        else:
            listings[name] = by_id[id(tensor)] = tensors.place(name, tensor)
    outside = dict.fromkeys(tree.outside(by_id))
    if outside:
        shown = f"{plural(len(outside), 'tensor')} that the state dict of its module does not have"
        notes.append(f"left out: {shown}, such as {show(next(iter(outside)))}")
    named_globals = dict.fromkeys(pickled.harmless, True) | dict.fromkeys(pickled.foreign, False)
    in_file = [listing for listing in listings.values() if listing is not None]
    file.table = ListedTable(in_file, tree.metadata(root), big_endian=big_endian, named_globals=named_globals)
    beside = arrays.beside()
    if beside is not None:
        beside.stand_for(file)
    return Content(file, () if beside is None else (beside,), list(listings), notes)


class TensorPlaces:
    """The places of a pickle's tensors in their storages."""

    def __init__(self, path: str, locate: Callable[[Storage], int]) -> None:
        self._path = path
        self._storage_begin = locate

    def place(self, name: str, tensor: PickledTensor) -> Listing:
        """Check a tensor against its storage and describe it."""
        storage, offset = tensor.storage, tensor.offset
        if type(tensor.pending) is str:
            shape: tuple[int, ...] = ()
            with suppress(FormatError):
                shape = self._integers(tensor.shape, "the shape", name)
            if len(shape) > MAX_RANK or not array_fits(shape, 1):
                shape = ()
            reason = "makes the tensor, and is unknown to safeload; save the values as a plain tensor"
            reason = storage if type(storage) is str else reason
            return unreadable(name, tensor.pending, shape, reason, is_missing=reason.startswith("has no values"))
        type_ = tensor.dtype or storage.type
        if type_.code is None or tensor.pending is not None:
            return self._special(name, tensor, type_)
        row = dtypes.BY_CODE[type_.code]
        itemsize = type_.itemsize
        count = _plain_count(tensor)
        if count and storage.part is None and (offset + count) * itemsize <= storage.nbytes:
            begin = self._locate(name, storage) + offset * itemsize
            listing = Listing(name, row, tensor.shape, begin, begin + count * itemsize)
            return self._logical(listing) if row.packed else listing
        shape = self._integers(tensor.shape, "the shape", name)
        strides = self._integers(tensor.strides, "the strides", name)
        (offset,) = self._integers((offset,), "the offset", name)
        if len(shape) != len(strides) or len(shape) > MAX_RANK:
            text = f"{len(shape)} axes and {len(strides)} strides; expected equal numbers of at most {MAX_RANK}"
            raise self._refusal(name, text)
        begin = self._locate(name, storage)
        first, size = (0, storage.nbytes) if storage.part is None else (x * storage.type.itemsize for x in storage.part)
        begin += first
        if not array_fits(shape, itemsize):
            raise self._refusal(name, f"shape {list(shape)} needs more bytes than any memory has")
        if 0 in shape:
            return self._logical(Listing(name, row, shape, begin, begin))
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if (last + 1) * itemsize > size:
            text = f"shape {list(shape)} with strides {list(strides)} from element {offset} uses "
            text += f"{(last + 1) * itemsize} bytes of storage {show(storage.key)}, which has {size}"
            raise self._refusal(name, text)
        full = prod(shape) * itemsize
        if full > max(size, MAX_REPEATED):
            text = f": shape {list(shape)} repeats {size} bytes to {full}, the limit is {MAX_REPEATED}"
            raise error_about(LimitError, text, path=self._path, tensor=name)
        steps = tuple(stride * itemsize for stride in strides)
        if max((0, *steps)) > MAX_ARRAY:  # possible on an axis of one element, which never uses its stride
            raise self._refusal(name, f"strides {list(strides)} need more bytes than any memory has")
        begin += offset * itemsize
        end = begin + (last + 1 - offset) * itemsize
        in_order = steps == c_strides(shape, itemsize)
        return self._logical(Listing(name, row, shape, begin, end, None if in_order else steps))

    def _locate(self, name: str, storage: Storage) -> int:
        try:
            return self._storage_begin(storage)
        except FormatError as error:
            text = f": {error.args[0]}"
            raise error_about(FormatError, text, path=error.path, offset=error.offset, tensor=name) from None
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} (of tensor {show(name)})", path=error.path, tensor=name) from None

    def _logical(self, listing: Listing) -> Listing:
        """Return a listing with its logical shape: torch counts the bytes of the last axis if elements share them."""
        row, shape = listing.row, listing.shape
        if not row.packed:
            return listing
        if not shape or listing.strides is not None:
            text = "with strides or without an axis cannot be represented by an array"
            return unreadable(listing.name, row.code, shape, text, begin=listing.begin, end=listing.end)
        return listing._replace(shape=(*shape[:-1], shape[-1] * 8 // row.bits))

    def _special(self, name: str, tensor: PickledTensor, type_: Global) -> Listing:
        """Describe a tensor of a dtype unknown to NumPy, or with pending operations."""
        pending, label = tensor.pending, type_.name.removeprefix("torch.")
        reason = "cannot be represented by an array"
        if type_.code is not None:
            reason = "with a pending conjugation or negation must be saved after resolve_conj() and resolve_neg()"
            if not isinstance(pending, Mapping) or not any(pending.get(bit) for bit in ("conj", "neg")):
                reason = ""
            label = dtypes.BY_CODE[type_.code].name
        stand_in = type_ if type_.code is not None else STAND_INS[type_.itemsize]
        args = tensor.storage, tensor.offset, tensor.shape, tensor.strides
        listing = self.place(name, PickledTensor(*args, dtype=stand_in, pending=None))
        if not reason:
            return listing
        return unreadable(name, label, listing.shape, reason, begin=listing.begin, end=listing.end)

    def _integers(self, values: Any, label: str, name: str) -> tuple[int, ...]:
        if type(values) not in (tuple, list):
            raise self._refusal(name, f"{label} must be a tuple of integers, got {describe(values)}")
        for value in values:
            if type(value) is not int:
                raise self._refusal(name, f"{label} must be integers, got {describe(value)}")
            if value < 0:
                raise self._refusal(name, f"{label} must not be negative, got {describe(value)}")
            if value > MAX_ARRAY:
                raise self._refusal(name, f"{label}: {describe(value)} needs more bytes than any memory has")
        return tuple(values)

    def _refusal(self, name: str, text: str) -> FormatError:
        return error_about(FormatError, f": {text}", path=self._path, tensor=name)


def _plain_count(tensor: PickledTensor) -> int:
    """Return the number of elements of a tensor in C order, as nearly all are; 0 if it has anything unusual."""
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
