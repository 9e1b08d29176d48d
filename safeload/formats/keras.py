"""Keras weights in HDF5: ``.weights.h5``, and ``.h5`` of Keras 2.

1. Keras 3 stores a variable as a dataset ``layers/NAME/vars/NUMBER``, of the optimizer as ``optimizer/vars/NUMBER``. A
   group ``vars`` can have the attribute ``name``, the layer's.
2. Keras 2 (and ``model.save("model.h5")``) stores ``model_weights/LAYER/WEIGHT`` and ``optimizer_weights``. If the file
   holds only weights, the layers are at the top. Attributes list names in order: ``layer_names`` of the layers'
   group, ``weight_names`` of each layer, divided into ``layer_names0``, ``layer_names1``, ... if they are long. The
   root has the attributes ``keras_version``, ``backend``, ``model_config`` and ``training_config`` (JSON).
3. A tensor's name is its path, joined with dots. Listed weights must exist, and come first, in the order of the list.
4. bfloat16 is an opaque type of 2 bytes with the attribute ``dtype`` = "bfloat16". Other opaque types, such as 8-bit
   floats, have no mark: they are unreadable, as are text, references and compounds.
5. Booleans are an enumeration of FALSE = 0 and TRUE = 1; complex numbers a compound of ``r`` and ``i``.
6. Datasets are contiguous, at a place in the file, in every release of Keras since 0.2.0. Datasets that other programs
   have divided into chunks, or stored in the header of an object, are unreadable.

Keras' quantized layers open as stored: integers and their scales, under the paths that they have.

A ``.keras`` archive is a zip archive of ``config.json``, ``metadata.json`` and ``model.weights.h5``:

1. The weights are a file of HDF5. Keras stores it uncompressed; then it is read in place. Compressed weights
   are unpacked into a temporary file.
2. ``metadata.json`` (``keras_version``, ``date_saved``) becomes the metadata, with ``config.json`` as its key "config".
   Layers in the config are not made, so nothing in it runs; ``safeload scan`` judges Lambda layers.
3. Other entries, such as ``assets/``, are not read. ``model.weights.npz`` holds pickled dicts of arrays: it is refused.

The structure of an HDF5 file is found by h5py; no dataset is read then:

1. h5py (libhdf5) parses the file through a stream of ours, so it opens no other file. It is closed before a tensor is
   read: values are read by ranges.
2. Only hard links are followed. Soft links, external links and links of other kinds are listed as unreadable, as are
   datasets with external or virtual storage. Groups that are linked twice are refused.
3. Storage must exist: unwritten datasets, which would read as a fill value, are unreadable.
4. Bounds: `MAX_OBJECTS`, `MAX_DEPTH`, `MAX_PATH`. All datasets together have at most the bytes of the file.

Attributes that hold text are read without libhdf5, which trusts lengths and loops over malformed heaps:

1. The header of an object, version 1: 1, 0, number of messages (2 bytes), references (4), size (4), 4 bytes; then
   messages of type (2), size (2), flags (1), 3 bytes and data. Version 2: "OHDR", 2, flags (1), times (16 if flags &
   32), limits (4 if flags & 16), size (1 << (flags & 3) bytes); then messages of type (1), size (2), flags (1), order
   (2 if flags & 4) and data, and a checksum (4).
2. Message 16 continues a header elsewhere: offset (8), size (8). In version 2 "OCHK" begins such a block.
3. Message 12 is an attribute: version (1 to 3), flags (1), sizes of name, type and space (2 each), an encoding (1;
   version 3 only), then these three, filled up to multiples of 8 in version 1, then the value.
4. A type: class in the low 4 bits, 3 bytes of properties, size (4). Class 3 is a text of this size, class 9 a text in a
   heap: length (4), offset of the heap (8), index (4).
5. A space: version (1), axes (1), ...; its dims follow at byte 8 in version 1, at byte 4 in version 2.
6. A heap: "GCOL", 1, 3 bytes, size (8), then objects of index (2), references (2), 4 bytes, size (8) and data, filled
   up to a multiple of 8. Index 0 is free space, whose size includes its header.

Attributes outside of the header (more than 8, or of more than 64 KiB) are not found, as if there were none.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any

from ..core import dtypes
from ..core.arrays import array_fits
from ..core.files import parse_json
from ..core.names import names_below
from ..core.registry import Candidate, Content, Opened, OpenRequest, check_whole, find_row, opened_file
from ..core.table import ListedTable, Listing, Unknown, unreadable
from ..core.text import error_about, listed, needed, show
from ..core.weight_file import WeightFile
from ..core.zip import STORED, unpacked
from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError
from .archives import open_members

# Attributes of the root that become metadata.
_METADATA = ("keras_version", "backend", "model_config", "training_config")


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the structure of a file, without its datasets."""
    file = candidate.file
    structure = Structure(file)
    paths: dict[str, tuple[str, ...]] = {}
    for steps in structure.datasets:
        if paths.setdefault(".".join(steps), steps) is not steps:
            raise FormatError(f"two datasets are named {show('.'.join(steps))}", file.path)
    names = names_below(paths, request.root, file.path)
    listings = [_listing(name, structure.datasets[paths[full]]) for full, name in names.items()]
    # Attributes of the root, or of ``model_weights``; objects in JSON are parsed.
    texts = {**structure.attributes.get(("model_weights",), {}), **structure.attributes.get((), {})}
    metadata: dict[str, Any] = {key: texts[key] for key in _METADATA if key in texts}
    for key, text in metadata.items():
        if text.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                metadata[key] = json.loads(text)
    file.table = ListedTable(listings, metadata)
    return Content(file)


def _listing(name: str, dataset: Listing | Unknown) -> Listing:
    return unreadable(name, dataset) if isinstance(dataset, Unknown) else dataset._replace(name=name)


WEIGHTS = "model.weights.h5"
_CONFIG, _ARCHIVE_METADATA = "config.json", "metadata.json"


def enter(candidate: Candidate, request: OpenRequest) -> Opened:
    """Open the weights of an archive."""
    file, archive = candidate.file, candidate.archive
    if WEIGHTS not in archive.entries:
        text = "the weights are model.weights.npz, an npz of pickled dicts: save the model again with h5py installed"
        raise error_about(UnsupportedError, text, path=file.path)
    metadata: dict[str, Any] = {}
    for name in (_ARCHIVE_METADATA, _CONFIG):
        if name in archive.entries:
            value = parse_json(archive.read(name)[0], name, file.path)
            metadata.update({"config": value} if name == _CONFIG else value)
    entry = archive.entries[WEIGHTS]
    if entry.method == STORED:
        archive.check_stored(WEIGHTS)
        members = {WEIGHTS: (archive.locate(WEIGHTS), entry.size)}
        archive.check_overlap()
        opened = open_members(file, members, request, kind="a Keras archive")
    else:
        check_whole(file, "compressed weights of a .keras archive must be unpacked as a whole")
        with unpacked(archive, [WEIGHTS], file, "safeload-keras-") as (copy, _):
            inner = Candidate(copy)
            row = find_row(inner, request)
            content = row.load().read(inner, request)
            for part in (content.file, *content.others):
                part.stand_for(file)
        opened = opened_file(row.name, content)._replace(title=file.path)
    known = {WEIGHTS, _CONFIG, _ARCHIVE_METADATA}
    skipped = [name for name in archive.entries if name not in known and not name.endswith("/")]
    notes = [f"not read: {listed((show(name)[1:-1] for name in skipped), 1)}"] if skipped else []
    return opened._replace(metadata={**opened.metadata, **metadata}, notes=[*opened.notes, *notes])


# ---- the structure of a file ----


# Groups and datasets of a file, groups in a path, characters of a path.
MAX_OBJECTS = 200_000
MAX_DEPTH = 64
MAX_PATH = 4096

# Errors of h5py for malformed files.
_ERRORS = (SafeloadError, OSError, KeyError, ValueError, RuntimeError, TypeError, OverflowError, MemoryError)
# Sizes and fields of floats: sign, exponent, bits of the exponent, mantissa, bits of the mantissa; bias.
_FLOATS = {
    (2, (15, 10, 5, 0, 10), 15): "F16",
    (2, (15, 7, 8, 0, 7), 127): "BF16",
    (4, (31, 23, 8, 0, 23), 127): "F32",
    (8, (63, 52, 11, 0, 52), 1023): "F64",
}
# Classes of types, for messages.
_TITLES = {
    "STRING": "text",
    "COMPOUND": "a compound",
    "REFERENCE": "a reference",
    "ENUM": "an enumeration",
    "VLEN": "a sequence of variable length",
    "ARRAY": "an array type",
    "INTEGER": "an unusual integer",
    "FLOAT": "an unusual float",
    "TIME": "a time",
    "BITFIELD": "a bit field",
    "OPAQUE": "opaque data",
}
_LISTS = ("layer_names", "weight_names")
_GROUP_TEXTS = frozenset((*_LISTS, *_METADATA))
_MARK = frozenset(("dtype",))


class _Hdf5Stream(io.RawIOBase):
    """A file as a stream for libhdf5."""

    def __init__(self, file: WeightFile) -> None:
        self.failures: list[Exception] = []  # of reads, which libhdf5 reports as an invalid file
        self._file = file
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, memory: Any) -> int:
        """Fill memory; zeros follow the end of the file, because libhdf5 would take any bytes there for the file's."""
        try:
            data = self._file.read_at(self._at, len(memory))
        except (OSError, SafeloadError) as error:
            self.failures.append(error)
            raise
        memory[:] = data.ljust(len(memory), b"\0")
        return len(memory)


class Structure:
    """The content of a file, found by a walk over its hard links."""

    def __init__(self, file: WeightFile) -> None:
        self.datasets: dict[tuple[str, ...], Listing | Unknown] = {}  # by the names of a path
        self.attributes: dict[tuple[str, ...], dict[str, str]] = {}  # texts, by path of the group
        self._file, self._path = file, file.path
        self._groups: set[int] = set()  # addresses
        self._known: dict[int, Listing | Unknown] = {}  # by address
        self._objects = self._stored = 0
        self._h5py: Any = needed("h5py", "Keras files (HDF5) need h5py")
        stream = _Hdf5Stream(file)
        try:
            with self._h5py.File(stream, "r") as opened:
                plist = opened.id.get_create_plist()
                if plist.get_userblock() or tuple(plist.get_sizes()) != (8, 8):
                    text = "the HDF5 file has a user block, or addresses of another size than 8 bytes"
                    raise error_about(UnsupportedError, text, path=file.path)
                self._read(opened.id)
        except _ERRORS as error:
            if stream.failures:
                raise stream.failures.pop() from None
            if isinstance(error, SafeloadError):
                raise
            cause = show(str(error))[1:-1] if str(error) else type(error).__name__
            raise FormatError(f"this is an HDF5 file that libhdf5 cannot read: {cause}", file.path, 0) from None

    def _read(self, root: Any) -> None:
        h5l, h5o = self._h5py.h5l, self._h5py.h5o
        waiting: list[tuple[tuple[str, ...], Any, bytes]] = [((), root, b"")]
        while waiting:  # instead of recursion: files choose the depth
            path, item, name = waiting.pop()
            if name:
                try:
                    path = (*path, name.decode())
                except UnicodeDecodeError:
                    raise FormatError(f"the name of a link is not UTF-8: {show(name)}", self._path) from None
                if sum(map(len, path)) + len(path) > MAX_PATH:
                    raise self._limit(f"a path is longer than {MAX_PATH:,} characters")
                kind = item.links.get_info(name).type
                kinds = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}
                item = h5o.open(item, name) if kind == h5l.TYPE_HARD else kinds.get(kind, "a link of an unknown kind")
            if isinstance(item, self._h5py.h5g.GroupID):
                address = h5o.get_info(item).addr
                if address in self._groups:
                    raise self._unsupported(path, "is a group that is linked twice")
                self._groups.add(address)
                if len(path) > MAX_DEPTH:
                    raise self._limit(f"groups are nested more than {MAX_DEPTH} deep")
                waiting += [(path, item, inner) for inner in reversed(self._names(path, item))]
            elif isinstance(item, str):
                self.datasets[path] = Unknown(item, (), "is not followed")
            elif isinstance(item, self._h5py.h5d.DatasetID):
                self.datasets[path] = self._dataset(path, item)
            elif not isinstance(item, self._h5py.h5t.TypeID):  # named types hold no values
                raise self._unsupported(path, "is neither a group nor a dataset")
        if self._stored > self._file.size:
            text = f"its datasets need {self._stored:,} bytes, but it has {self._file.size:,}: they overlap"
            raise FormatError(text, self._path)

    def _unsupported(self, path: tuple[str, ...], text: str) -> UnsupportedError:
        return error_about(UnsupportedError, f"{show('/'.join(path))} {text}", path=self._path)

    def _limit(self, text: str) -> LimitError:
        return error_about(LimitError, text, path=self._path)

    # ---- groups ----

    def _names(self, path: tuple[str, ...], group: Any) -> list[bytes]:
        """Read the attributes of a group, and return its names: those that its lists name first."""
        names: list[bytes] = []

        def add(name: bytes) -> bool | None:
            names.append(name)
            self._objects += 1
            return True if self._objects > MAX_OBJECTS else None

        group.links.iterate(add)
        if self._objects > MAX_OBJECTS:
            raise self._limit(f"the file has more than {MAX_OBJECTS:,} objects")
        attributes = texts_of(self._file, self._h5py.h5o.get_info(group).addr, _GROUP_TEXTS)
        texts = {key: value.decode("utf-8", "replace") for key, value in attributes.items() if type(value) is bytes}
        if texts and len(path) < 2:
            self.attributes[path] = texts
        known = dict.fromkeys(names)
        first: dict[bytes, None] = {}
        for key in _LISTS:  # a list, or its numbered parts
            parts = [key] if key in attributes else [f"{key}{number}" for number in range(len(attributes))]
            values = [value for part in parts if isinstance(value := attributes.get(part), list)]
            for entry in chain.from_iterable(values):
                top = entry.split(b"/")[0]
                if top not in known or not self._h5py.h5l.LinkProxy.exists(group.links, top):
                    text = f"{key} lists {show(entry)}, which is not in {show('/'.join(path) or '/')}"
                    raise FormatError(text, self._path)
                self._check_listed(group, entry, key)
                first[top] = None
        return [*first, *(name for name in names if name not in first)]

    def _check_listed(self, group: Any, listed: bytes, key: str) -> None:
        """Refuse a list that names an object below the group which does not exist."""
        steps = listed.split(b"/")
        if len(steps) > MAX_DEPTH:
            raise self._limit(f"groups are nested more than {MAX_DEPTH} deep")
        for k in range(1, len(steps)):
            parent, name = b"/".join(steps[:k]), steps[k]
            if group.links.get_info(parent).type != self._h5py.h5l.TYPE_HARD:
                raise self._unsupported((parent.decode("utf-8", "replace"),), "is a link of another kind than hard")
            below = self._h5py.h5o.open(group, parent)
            if not isinstance(below, self._h5py.h5g.GroupID) or not below.links.exists(name):
                raise FormatError(f"{key} lists {show(listed)}, which does not exist", self._path)

    # ---- datasets ----

    def _dataset(self, path: tuple[str, ...], item: Any) -> Listing | Unknown:
        address = self._h5py.h5o.get_info(item).addr
        dataset = self._known.get(address)
        if dataset is not None:
            return dataset
        shape, kind = tuple(item.shape or ()), item.get_type()
        titles = {getattr(self._h5py.h5t, name): title for name, title in _TITLES.items()}
        label = titles.get(kind.get_class(), "an unknown type")
        try:
            if item.shape is None:
                raise UnsupportedError("has no shape (a null dataspace)")
            row, big_endian = self._row(item, kind)
            label = row.name
            if not array_fits(shape, row.bits // 8):
                raise UnsupportedError(f"of shape {list(shape)} needs more bytes than any memory has")
            begin, end = self._locate(path, item, row.nbytes(prod(shape)))
            dataset = Listing("", row, shape, begin, end, big_endian=big_endian)
        except UnsupportedError as error:
            dataset = Unknown(label, shape, str(error), kind.get_class() != self._h5py.h5t.STRING)
        self._known[address] = dataset
        return dataset

    def _row(self, item: Any, kind: Any) -> tuple[dtypes.Dtype, bool]:
        """Return the dtype of a dataset, and True for big-endian numbers."""
        h5t = self._h5py.h5t
        mark = texts_of(self._file, self._h5py.h5o.get_info(item).addr, _MARK).get("dtype")
        if isinstance(kind, h5t.TypeOpaqueID):
            if mark == b"bfloat16" and kind.get_size() == 2:
                return dtypes.BY_CODE["BF16"], False
            raise UnsupportedError(f"of {kind.get_size()} bytes, dtype {show(mark)}, has unknown values")
        code = self._code(kind)
        if code is None:
            raise UnsupportedError("cannot be represented by an array of weights")
        if mark == b"bfloat16" and code != "BF16":
            raise UnsupportedError(f"is {code}, but its attribute says bfloat16")
        number = kind.get_member_type(0) if isinstance(kind, h5t.TypeCompoundID) else kind
        return dtypes.BY_CODE[code], number.get_size() > 1 and number.get_order() == h5t.ORDER_BE

    def _code(self, kind: Any) -> str | None:
        """Return the code of the type with exactly the values of a dtype."""
        h5t = self._h5py.h5t
        size = kind.get_size()
        if isinstance(kind, h5t.TypeFloatID):
            return _FLOATS.get((size, kind.get_fields(), kind.get_ebias())) if _usual(h5t, kind) else None
        if isinstance(kind, h5t.TypeEnumID):
            members = {kind.get_member_name(k): kind.get_member_value(k) for k in range(min(3, kind.get_nmembers()))}
            return "BOOL" if size == 1 and members == {b"FALSE": 0, b"TRUE": 1} else None
        if isinstance(kind, h5t.TypeIntegerID):
            whole = kind.get_precision() == 8 * size and kind.get_offset() == 0
            letter = "I" if kind.get_sign() == h5t.SGN_2 else "U"
            return f"{letter}{8 * size}" if whole and size in (1, 2, 4, 8) and _usual(h5t, kind) else None
        if isinstance(kind, h5t.TypeCompoundID) and size in (8, 16) and kind.get_nmembers() == 2:
            places = {kind.get_member_name(k): kind.get_member_offset(k) for k in range(2)}
            parts = [kind.get_member_type(k) for k in range(2)]
            usual = all(isinstance(part, h5t.TypeFloatID) and self._code(part) == f"F{size * 4}" for part in parts)
            alike = usual and parts[0].get_order() == parts[1].get_order()
            return f"C{size * 8}" if [*places.items()] == [(b"r", 0), (b"i", size // 2)] and alike else None
        return None

    def _locate(self, path: tuple[str, ...], item: Any, nbytes: int) -> tuple[int, int]:
        """Return the bytes of a dataset in the file, and count them."""
        plist, h5d = item.get_create_plist(), self._h5py.h5d
        if plist.get_external_count():
            raise UnsupportedError("is stored in another file")
        if plist.get_layout() in (h5d.CHUNKED, h5d.COMPACT):
            raise UnsupportedError("is stored in chunks or in an object's header, not in one piece as by Keras")
        if plist.get_layout() != h5d.CONTIGUOUS:
            raise UnsupportedError("is virtual: its values are in other datasets")
        begin = item.get_offset() if nbytes else 0
        if begin is None:
            raise UnsupportedError("was never written, so it has no values of its own")
        end = begin + nbytes
        if end > self._file.size:
            text = f"{show('/'.join(path))} reaches to byte {end:,}, but the file has {self._file.size:,}"
            raise FormatError(text, self._path, min(begin, self._file.size))
        self._stored += nbytes
        return begin, end


def _usual(h5t: Any, kind: Any) -> bool:
    """Return True if the bytes of a number are in either of the usual orders."""
    return kind.get_size() == 1 or kind.get_order() in (h5t.ORDER_LE, h5t.ORDER_BE)


# ---- attributes ----


# Bytes of all texts of an attribute, blocks and bytes of a header, and bytes of a heap.
MAX_ATTRIBUTE = 64 << 20
MAX_BLOCKS = 1024
MAX_HEADER = 16 << 20
MAX_HEAP = 256 << 20

_ATTRIBUTE, _CONTINUATION = 12, 16
_TEXT, _VARIABLE = 3, 9
_SHARED = 2  # flag of a message whose data is elsewhere
_REFERENCE, _OBJECT = struct.Struct("<IQI"), struct.Struct("<HH4xQ")


def texts_of(file: WeightFile, address: int, names: frozenset[str]) -> dict[str, bytes | list[bytes]]:
    """Return the attributes that hold a text or a list of texts; a number can follow a name, as in ``layer_names0``."""
    attributes: dict[str, bytes | list[bytes]] = {}
    for message, flags, data in _messages(file, address):
        if message != _ATTRIBUTE or flags & _SHARED or len(data) < 8:
            continue
        if data[0] not in (1, 2, 3) or (data[0] > 1 and data[1]):  # flags say that type or space are elsewhere
            continue
        parts, at = [], 9 if data[0] == 3 else 8
        for size in struct.unpack_from("<HHH", data, 2):
            parts.append(data[at : at + size])
            at += size + (-size % 8 if data[0] == 1 else 0)
        name = parts[0].partition(b"\0")[0].decode("utf-8", "replace")
        if name.rstrip("0123456789") in names:
            value = _value_of(file, parts[1], parts[2], data[at:], name)
            if value is not None:
                attributes[name] = value
    return attributes


def _messages(file: WeightFile, address: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the kind, the flags and the data of the messages of a header."""
    head = file.read_at(address, 64)
    if head[:4] == b"OHDR":
        flags = head[5] if len(head) > 5 else 0
        at = 6 + 16 * bool(flags & 32) + 4 * bool(flags & 16)
        width = 1 << (flags & 3)
        begin, size = address + at + width, int.from_bytes(head[at : at + width], "little")
        version, layout, length = 2, "<BHB", 6 if flags & 4 else 4
    elif head[:1] == b"\1" and len(head) >= 16:
        begin, size = address + 16, int.from_bytes(head[8:12], "little")
        version, layout, length = 1, "<HHB", 8
    else:
        raise FormatError("the header of an HDF5 object is malformed", file.path, min(address, file.size))
    blocks = [(begin, size)]
    total = 0
    for count, (begin, size) in enumerate(blocks):  # grows
        total += size
        if count >= MAX_BLOCKS or total > MAX_HEADER:
            raise error_about(LimitError, "the header of an HDF5 object is too large", path=file.path)
        data = file.read_at(begin, size)
        if len(data) < size:
            raise FormatError("the header of an HDF5 object is cut off", file.path, min(begin, file.size))
        if version == 2 and count:
            data = data[4:-4]  # "OCHK" and the checksum
        at = 0
        while at + length <= len(data):  # less than a message is filling
            kind, size, flags = struct.unpack_from(layout, data, at)
            content = data[at + length : at + length + size]
            if kind == _CONTINUATION and len(content) >= 16:
                blocks.append(struct.unpack_from("<QQ", content))
            yield kind, flags, content
            at += length + size


def _value_of(file: WeightFile, kind: bytes, space: bytes, value: bytes, name: str) -> bytes | list[bytes] | None:
    """Return the text or texts of an attribute; None if it holds something else."""
    if len(kind) < 8 or len(space) < 4:
        return None
    rank = space[1]
    at = 8 if space[0] == 1 else 4
    if rank > 1 or len(space) < at + 8 * rank or (space[0] == 2 and space[3] == 2):
        return None
    count = prod(struct.unpack_from(f"<{rank}Q", space, at))
    variable = kind[0] & 15 == _VARIABLE and kind[1] & 15 == 1
    if kind[0] & 15 != _TEXT and not variable:
        return None
    width = _REFERENCE.size if variable else int.from_bytes(kind[4:8], "little")
    if not width or count * width > len(value):
        text = f"the attribute {show(name)} has {count:,} texts of {width:,} bytes, but {len(value):,} bytes"
        raise FormatError(text, file.path, 0)
    pieces = [value[k * width : (k + 1) * width] for k in range(count)]
    texts = [piece.rstrip(b"\0") for piece in (_from_heaps(file, pieces, name) if variable else pieces)]
    return texts if rank else texts[0]


def _from_heaps(file: WeightFile, references: list[bytes], name: str) -> list[bytes]:
    """Return the texts that references lead to."""
    heaps: dict[int, dict[int, bytes]] = {}
    texts, total = [], 0
    for reference in references:
        length, begin, index = _REFERENCE.unpack(reference)
        total += length
        if total > MAX_ATTRIBUTE:
            text = f"the attribute {show(name)} has more than {MAX_ATTRIBUTE:,} bytes"
            raise error_about(LimitError, text, path=file.path)
        if length and begin not in heaps:
            heaps[begin] = dict(_objects(file, begin))
        text_bytes = heaps[begin].get(index) if length else b""
        if text_bytes is None or len(text_bytes) < length:
            text = f"the attribute {show(name)} has a text that is not in its heap"
            raise FormatError(text, file.path, min(begin, file.size))
        texts.append(text_bytes[:length])
    return texts


def _objects(file: WeightFile, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the objects of a heap by index."""
    head = file.read_at(begin, 16)
    size = int.from_bytes(head[8:16], "little")
    if head[:5] != b"GCOL\1" or begin + size > file.size:
        raise FormatError("a global heap of HDF5 is malformed", file.path, min(begin, file.size))
    if size > MAX_HEAP:
        raise error_about(LimitError, f"a global heap of {size:,} bytes", path=file.path)
    data = file.read_at(begin, size)
    at = 16
    while at + _OBJECT.size <= size:
        index, _, length = _OBJECT.unpack_from(data, at)
        if index == 0:  # free space ends the heap
            return
        end = at + _OBJECT.size + length
        if end > size:
            raise FormatError("a text reaches beyond its global heap", file.path, begin + at)
        yield index, data[at + _OBJECT.size : end]
        at = end + -length % 8
