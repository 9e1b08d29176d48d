"""Weight files of tensors that are stored in several boxes, read by ranges as one file.

A training process, or a chunk of an array store, holds a box of a tensor: offsets and sizes along each axis. An
`AssembledStore` presents such tensors as a file: the bytes of each tensor in C order, tensor after tensor. Nothing
is copied or joined beforehand. A read finds the boxes that it touches and reads only their bytes, so every operation
that reads tensors by ranges also reads tensors in boxes, in bounded memory.

1. The shape of a tensor here only says where the boxes are. A tensor divided as a flat vector has one axis.
2. The bytes of an element are the last axis, because requests may begin and end inside an element.
3. Boxes must not overlap, and must cover the tensor unless the rest of it is zeros. Equal boxes are replicas; the first
   is read.
4. The elements of a box lie in a store, with any strides, or must be unpacked. Boxes that cannot be read row by row
   are unpacked whole and kept for the following reads: at most `_KEPT` bytes, or as many as lie side by side. Opening a
   checkpoint reads no box, so formats that look for the elements in it have a function for the first use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial, reduce
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, array_fits, c_strides, index_of
from ..core.files import ByteStore, Span
from ..core.forking import ProcessLock, cached_property
from ..core.registry import Content
from ..core.table import ListedTable, Listing, Unknown, unreadable
from ..core.text import error_about
from ..core.thread_group import current
from ..core.weight_file import WeightFile
from ..errors import FormatError, LimitError, SafeloadError, missing_file
from ..remote.remote_store import RemoteStore

# Tensors begin at multiples of this many bytes.
ALIGNMENT = 64
# Unpacked boxes to keep.
_KEPT = 32 << 20
# Bytes of a read with gaps, over the network and here. Up to _NEAR bytes are read with any gaps, larger reads if a
# quarter of them is used.
_REMOTE_BLOCK, _BLOCK, _NEAR = 4 << 20, 256 << 10, 64 << 10
# Boxes that no cut along an axis separates are compared pairwise, up to this many. Meshes of processes never interlock.
MAX_INTERLOCKED = 2_048
# Cuts in a row to separate boxes; meshes take a few for each axis.
_MAX_CUTS = 128
# Axes of a tensor: NumPy 1 allows 32, and the bytes of an element are another axis.
MAX_RANK = 31

_Error = TypeVar("_Error", bound=SafeloadError)


class Region(NamedTuple):
    """Elements at a place in a store."""

    store: ByteStore
    begin: int  # first byte
    strides: tuple[int, ...] | None = None  # bytes between neighbours along each axis; None for C order


# The place of the elements, or a function that unpacks them: in C order, as uint8 of any shape.
Stored: TypeAlias = "Region | Callable[[], Array]"


class Box(NamedTuple):
    """A part of a tensor that is stored in one piece."""

    offsets: tuple[int, ...]  # of its first element, along each axis
    sizes: tuple[int, ...]  # elements along each axis
    stored: Stored | None = None
    locate: Callable[[], Stored] | None = None  # returns `stored` on first use, if it is None


class BoxedTensor:
    """A tensor of boxes that cover it, but for ``zeros``, without overlap; replicas and empty boxes are dropped."""

    def __init__(
        self, name: str, shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box], path: str, *, zeros: bool = False
    ) -> None:
        error = partial(error_about, path=path, tensor=name)
        if len(shape) > MAX_RANK:
            raise error(LimitError, f"has {len(shape)} axes, more than {MAX_RANK}")
        if not array_fits(shape, itemsize):
            raise error(LimitError, f": shape {list(shape)} needs more bytes than any memory has")
        distinct: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}
        for box in boxes:
            offsets, sizes = box.offsets, box.sizes
            edges = zip(offsets, sizes, shape, strict=False)
            outside = any(offset < 0 or count < 0 or offset + count > n for offset, count, n in edges)
            if outside or not len(offsets) == len(sizes) == len(shape):
                raise error(
                    FormatError, f": a chunk of {list(sizes)} at {list(offsets)} is not inside shape {list(shape)}"
                )
            if 0 not in sizes:
                distinct.setdefault((offsets, sizes), box)
        if len(distinct) > 1:
            begins, lengths = (np.array(column, np.int64) for column in zip(*distinct, strict=True))
            text = f": more than {MAX_INTERLOCKED:,} of its chunks interlock, so no cut along an axis separates them"
            clash = _overlapping(begins, begins + lengths, partial(error, LimitError, text))
            if clash is not None:
                (first, size_a), (second, size_b) = (list(distinct)[k] for k in clash)
                text = f": chunks overlap: {list(size_a)} at {list(first)} and {list(size_b)} at {list(second)}"
                raise error(FormatError, text)
        size, total = prod(shape), sum(prod(sizes) for _, sizes in distinct)
        if total != size and not zeros:
            text = f": {size - total:,} of {size:,} elements are in none of its {len(distinct):,} chunks"
            raise error(FormatError, f"{text}; is a file missing?")
        self.name = name
        self.gaps = total != size  # elements in no box, which are zeros
        self.shape = (*shape, itemsize)
        self.nbytes = prod(self.shape)
        self.begin = 0  # in the assembled file
        self.boxes = sorted(distinct.values(), key=lambda box: box.offsets)
        self._begins = [box.offsets[0] if box.offsets else 0 for box in self.boxes]
        self._longest = max((box.sizes[0] if box.sizes else 1 for box in self.boxes), default=1)

    @cached_property
    def abreast(self) -> int:
        """Most bytes of boxes side by side, which a reader of rows needs at a time."""
        for axis in range(len(self.shape) - 1):
            sizes: dict[int, int] = {}
            for box in self.boxes:
                sizes[box.offsets[axis]] = sizes.get(box.offsets[axis], 0) + prod(box.sizes)
            if len(sizes) > 1:
                return max(sizes.values()) * self.shape[-1]
        return self.nbytes

    @cached_property
    def _edges(self) -> tuple[Array, Array]:
        """First elements of the boxes, and the end after the last."""
        begins = np.array([box.offsets for box in self.boxes], np.int64)
        return begins, begins + np.array([box.sizes for box in self.boxes], np.int64)

    def touched(self, low: Sequence[int], high: Sequence[int]) -> list[Box]:
        """Return the boxes that overlap a box of the tensor, given without the axis of bytes."""
        if len(self.boxes) < 2:
            return self.boxes
        first = bisect_right(self._begins, low[0] - self._longest)
        last = bisect_right(self._begins, high[0] - 1)
        if last - first < 2:
            return self.boxes[first:last]
        begins, ends = (edges[first:last] for edges in self._edges)
        overlap = ((begins < np.array(high, np.int64)) & (ends > np.array(low, np.int64))).all(axis=1)
        return [self.boxes[first + k] for k in np.flatnonzero(overlap).tolist()]


def _overlapping(begins: Array, ends: Array, interlocked: Callable[[], LimitError]) -> tuple[int, int] | None:
    """Return two boxes that overlap, or None; raise ``interlocked`` if that takes too long to find out.

    Cuts along one axis after another separate the boxes into groups, until each group is a single box. A box of a
    tensor without axes overlaps any other.
    """
    groups = [(np.arange(len(begins)), 0, 0)]  # boxes, the next axis to cut, axes in a row without a cut
    axes = begins.shape[1]
    for _ in range(_MAX_CUTS):
        if not groups:
            return None
        below: list[tuple[Array, int, int]] = []
        for which, axis, failed in groups:
            if failed >= axes:
                if len(which) > MAX_INTERLOCKED:
                    raise interlocked()
                for k, box in enumerate(which.tolist()):
                    rest = which[k + 1 :]
                    overlap = ((begins[rest] < ends[box]) & (ends[rest] > begins[box])).all(axis=1)
                    if overlap.any():
                        return box, int(rest[overlap.argmax()])
                continue
            order = which[np.argsort(begins[which, axis], kind="stable")]
            reach = np.maximum.accumulate(ends[order, axis])
            cuts = np.flatnonzero(begins[order[1:], axis] >= reach[:-1]) + 1
            tries = 0 if len(cuts) else failed + 1
            below += [(part, (axis + 1) % axes, tries) for part in np.split(order, cuts) if len(part) > 1]
        groups = below
    raise interlocked()


class AssembledStore(RemoteStore):
    """A file of tensors in boxes; see the module. ``stores`` hold the boxes, and are closed with this store."""

    here = True

    def __init__(
        self, path: str, tensors: Sequence[BoxedTensor], stores: Sequence[ByteStore], version: tuple[Any, ...]
    ) -> None:
        self.stores = stores
        self._tensors = [tensor for tensor in tensors if tensor.nbytes]
        at = 0
        for tensor in tensors:
            tensor.begin = at
            at += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        self._places = [tensor.begin for tensor in self._tensors]
        self._located: dict[int, Stored] = {}  # by id of the box
        from hashlib import sha256  # only here: most programs need none

        digest = sha256(repr((version, [tuple(store.version)[:2] for store in stores])).encode()).hexdigest()
        super().__init__(path, (at, digest))
        self._unpacked: OrderedDict[int, Array] = OrderedDict()  # elements of boxes by id, those used last at the end
        self._kept = 0  # bytes of these elements
        self._turn = ProcessLock()

    def close(self) -> None:
        super().close()
        self._unpacked = OrderedDict()  # a thread may still be using the old dict
        for store in self.stores:
            store.close()

    def confirm(self) -> None:
        for store in self.stores:
            if isinstance(store, RemoteStore):
                store.confirm()

    def read_at(self, offset: int, size: int) -> bytes:
        memory = bytearray(max(0, min(size, self.size - offset)))
        self.read_into(offset, memory)
        return bytes(memory)

    def read_spans(self, spans: Sequence[Span]) -> None:
        for begin, memory in spans:
            target = np.frombuffer(memory, np.uint8)
            at, end = begin, begin + len(target)
            for k in range(self._index_at(begin), len(self._tensors)):
                tensor = self._tensors[k]
                if tensor.begin >= end:
                    break
                first, last = max(at, tensor.begin), min(end, tensor.begin + tensor.nbytes)
                target[at - begin : first - begin] = 0  # between tensors
                at = first
                for low, sizes in _divided(tensor.shape, first - tensor.begin, last - tensor.begin):
                    part = target[at - begin : at - begin + prod(sizes)]
                    self._read_box(tensor, low, part.reshape(sizes))
                    at += part.size
            target[at - begin :] = 0

    def has_boxes(self, begin: int, shape: tuple[int, ...]) -> bool:
        """Return True if `read_box` can read the tensor here: its boxes divide these axes, not a flat vector."""
        return self._tensors[self._index_at(begin)].shape[:-1] == shape

    def _index_at(self, begin: int) -> int:
        return max(0, bisect_right(self._places, begin) - 1)

    def read_box(self, begin: int, low: Sequence[int], target: Array) -> None:
        self.check_open()
        self._read_box(self._tensors[self._index_at(begin)], (*low, 0), target)

    def _read_box(self, tensor: BoxedTensor, low: tuple[int, ...], target: Array) -> None:
        high = tuple(first + count for first, count in zip(low, target.shape, strict=True))
        if tensor.gaps:
            target[...] = 0
        for box in tensor.touched(low[:-1], high[:-1]):
            offsets, sizes = (*box.offsets, 0), (*box.sizes, tensor.shape[-1])
            first = tuple(map(max, low, offsets))
            last = tuple(min(stop, offset + count) for stop, offset, count in zip(high, offsets, sizes, strict=True))
            if any(map(int.__ge__, first, last)):
                continue
            inside = tuple(map(slice, map(int.__sub__, first, low), map(int.__sub__, last, low)))
            try:
                self._read_part(tensor, box, tuple(map(int.__sub__, first, offsets)), target[inside])
            except SafeloadError as error:
                if error.tensor is None:
                    error.tensor = tensor.name
                raise

    def _read_part(self, tensor: BoxedTensor, box: Box, first: tuple[int, ...], target: Array) -> None:
        sizes = *box.sizes, tensor.shape[-1]
        stored = box.stored or self._located.get(id(box))
        if stored is None:
            assert box.locate is not None
            stored = self._located.setdefault(id(box), box.locate())
        if isinstance(stored, Region):
            strides = c_strides(sizes, 1) if stored.strides is None else (*stored.strides, 1)
            long = [(count, stride) for count, stride in zip(sizes, strides, strict=True) if count > 1]
            # By rows if the axes are in the order of the tensor, and rows are apart.
            if all(stride >= count * below for (_, stride), (count, below) in pairwise([*long, (1, 1)])):
                _copy(stored.store, stored.begin + sum(map(int.__mul__, first, strides)), strides, target)
                return
        whole = self._whole(tensor, box, stored).reshape(sizes)
        with current().filling():
            target[...] = whole[tuple(slice(k, k + count) for k, count in zip(first, target.shape, strict=True))]

    def _whole(self, tensor: BoxedTensor, box: Box, stored: Stored) -> Array:
        """Return all elements of a box in C order; boxes are unpacked one at a time."""
        with self._turn.own:
            unpacked = self._unpacked
            whole = unpacked.get(id(box))
            if whole is None:
                whole = _gathered(stored, (*box.sizes, tensor.shape[-1])) if isinstance(stored, Region) else stored()
                while unpacked and self._kept + whole.nbytes > max(_KEPT, tensor.abreast):
                    self._kept -= unpacked.popitem(last=False)[1].nbytes
                unpacked[id(box)] = whole
                self._kept += whole.nbytes
            unpacked.move_to_end(id(box))
            return whole


def _divided(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide consecutive bytes of a tensor into boxes in order: the first element and the sizes of each."""
    strides = c_strides(shape, 1)
    while begin < end:
        index = index_of(begin, shape)
        # The outermost axis such that whole steps along it begin here and do not reach beyond the end.
        axis = len(shape) - 1
        while axis and index[axis] == 0 and begin + strides[axis - 1] <= end:
            axis -= 1
        count = min(shape[axis] - index[axis], (end - begin) // strides[axis])
        yield index, (*(1,) * axis, count, *shape[axis + 1 :])
        begin += count * strides[axis]


def _gathered(region: Region, shape: tuple[int, ...]) -> Array:
    """Read all elements of a box in any order of axes."""
    assert region.strides is not None
    strides = (*region.strides, 1)
    memory = np.empty(sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + 1, np.uint8)
    region.store.read_into(region.begin, memory)
    return np.ascontiguousarray(np.ndarray(shape, np.uint8, memory, 0, strides))


def _copy(store: ByteStore, begin: int, strides: Sequence[int], target: Array) -> None:
    """Read elements with strides into an array, in reads of bounded size."""
    shape = target.shape
    extent = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + 1
    if extent == target.size and target.flags.c_contiguous:
        with nullcontext() if isinstance(store, RemoteStore) else current().filling():
            store.read_into(begin, target.reshape(-1))
        return
    block = _REMOTE_BLOCK if isinstance(store, RemoteStore) else _BLOCK
    if extent <= block and extent <= max(_NEAR, 4 * target.size):
        memory = np.empty(extent, np.uint8)
        store.read_into(begin, memory)
        with current().filling():
            target[...] = np.ndarray(shape, np.uint8, memory, 0, tuple(strides))
        return
    axis = next(k for k, count in enumerate(shape) if count > 1)
    half = shape[axis] // 2
    for k, part in zip((0, half), np.split(target, [half], axis), strict=True):
        _copy(store, begin + k * strides[axis], strides, part)


# ---- files ----


class BoxedListing(NamedTuple):
    """A tensor of a file with boxes."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # as torch counts: bytes on the last axis if elements share them
    boxes: list[Box]
    flat: bool = False  # boxes divide the elements as a vector, not the axes
    unknown: Unknown | None = None  # the tensor cannot be read, and has no boxes
    zeros: bool = False  # elements in no box are zeros


def in_one_box(row: dtypes.Dtype, shape: tuple[int, ...], stored: Stored) -> BoxedListing:
    """Return a tensor that is stored as a whole."""
    return BoxedListing(row, shape, [Box((0,) * len(shape), shape, stored)])


def in_pieces(row: dtypes.Dtype, shape: tuple[int, ...], pieces: Iterable[tuple[Stored, int]]) -> BoxedListing:
    """Return a tensor of consecutive pieces, given with their numbers of elements."""
    boxes: list[Box] = []
    at = 0
    for stored, count in pieces:
        boxes.append(Box((at,), (count,), stored))
        at += count
    return BoxedListing(row, shape, boxes, flat=True)


def itemsize_of(row: dtypes.Dtype) -> int:
    """Return the bytes of an element as torch counts them: a byte if several elements share it."""
    return max(1, row.bits // 8)


def logical_shape(row: dtypes.Dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in elements, of a shape with bytes on its last axis if elements share them."""
    return (*shape[:-1], shape[-1] * 8 // row.bits) if row.packed and shape else shape


def boxed_file(
    file: WeightFile, tensors: Mapping[str, BoxedListing], stores: Sequence[ByteStore], path: str = "", **table: Any
) -> WeightFile:
    """Return a file of tensors in boxes, which stands for ``file``; ``path`` names it in messages.

    Args:
        table: more arguments of the `ListedTable`.
    """
    path = path or file.path
    boxed = [
        BoxedTensor(name, (prod(shape),) if flat else shape, itemsize_of(row), boxes, path, zeros=zeros)
        for name, (row, shape, boxes, flat, _, zeros) in tensors.items()
    ]
    store = AssembledStore(path, boxed, stores, file.identity)
    opened = WeightFile(path, store, ListedTable(map(_listing, tensors.values(), boxed), **table))
    opened.stand_for(file, unpacked=False)
    return opened


def _listing(tensor: BoxedListing, boxed: BoxedTensor) -> Listing:
    begin, end = boxed.begin, boxed.begin + boxed.nbytes
    if tensor.unknown is None:
        return Listing(boxed.name, tensor.row, logical_shape(tensor.row, tensor.shape), begin, end)
    return unreadable(boxed.name, tensor.unknown, begin, end)


class DataFolder(ExitStack):
    """The folder of a checkpoint, for which a file in it stands, and its open files; leaving with an error closes them.

    ``needed`` says in messages why its files must exist.
    """

    def __init__(self, file: WeightFile, needed: str = "") -> None:
        super().__init__()
        self.file, self.files, self.needed = file, file.files, needed
        self.path = self.files.split(file.place)[0]
        self.shown = self.files.shown(self.path)
        self.stores: dict[str, ByteStore] = {}  # the open files, by their paths in the folder
        self.named_globals: dict[str, bool] = {}  # see `Table`
        self.push(lambda kind, *_: None if kind is None else self._close_files())

    @cached_property
    def names(self) -> list[str]:
        return [name for name, is_folder in self.files.listing(self.path) if not is_folder]

    def join(self, name: str) -> str:
        """Return the path of a file, with its parts separated by slashes."""
        return reduce(self.files.join, name.split("/"), self.path)

    def path_of(self, name: str) -> str:
        """Return the path of a file for messages."""
        return self.files.shown(self.join(name))

    def open(self, name: str) -> ByteStore:
        """Open a file, which the caller closes."""
        try:
            return self.files.open(self.join(name))
        except FileNotFoundError as error:
            raise missing_file(error.filename, f"No such file or directory: {error.filename}; {self.needed}") from None

    def store(self, name: str) -> ByteStore:
        """Open a file once, and keep it open."""
        if name not in self.stores:
            self.stores[name] = self.open(name)
        return self.stores[name]

    def error(self, kind: type[_Error], text: str, tensor: str | None = None) -> _Error:
        """Return an error about the checkpoint, or about a tensor of it."""
        return error_about(kind, text, path=self.shown, tensor=tensor)

    def _close_files(self) -> None:
        for store in self.stores.values():
            store.close()

    def joined(
        self, tensors: Mapping[str, BoxedListing], metadata: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> Content:
        """Return the tensors of all files in place of the file that was opened."""
        table = {"metadata": metadata, "named_globals": self.named_globals}
        whole = boxed_file(self.file, tensors, list(self.stores.values()), self.shown, **table)
        self.file.close()
        return Content(whole, notes=notes)
