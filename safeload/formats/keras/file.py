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
6. Contiguous datasets lie at a place in the file. Chunks are boxes, unpacked one at a time.

Chunks are unpacked without libhdf5:

1. A chunk holds a whole box of the dataset's chunk shape, also at the edges, where the rest is filling.
2. Filters were applied in order, so they are undone from the last to the first. A bit of the chunk's mask skips one.
3. shuffle (2): byte k of all elements, for each k. The value of the filter is the bytes of an element; the rest, less
   than an element, follows unchanged.
4. deflate (1): a stream of zlib. fletcher32 (3): a checksum of 4 bytes, little-endian, follows the data.

Keras' quantized layers open as stored: integers and their scales, under the paths that they have.

A ``.keras`` archive is a zip archive of ``config.json``, ``metadata.json`` and ``model.weights.h5``:

1. The weights are a file of HDF5. Keras stores it uncompressed; then it is read in place. Compressed weights
   are unpacked into a temporary file.
2. ``metadata.json`` (``keras_version``, ``date_saved``) becomes the metadata, with ``config.json`` as its key "config".
   Layers in the config are not made, so nothing in it runs; ``safeload scan`` judges Lambda layers.
3. Other entries, such as ``assets/``, are not read. ``model.weights.npz`` holds pickled dicts of arrays: it is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from ...base.arrays import Array, c_strides
from ...base.listed_table import ListedTable, Listing, unreadable
from ...base.messages import error_about
from ...base.text import show
from ...engine.run.atomic_file import reserve
from ...engine.run.weight_file import WeightFile, open_temporary
from ...errors import FormatError, LimitError, UnsupportedError
from ...stores.json_file import parse_json
from ...stores.members import Member, MemberFiles
from ..boxed import Box, BoxedListing, Region, Stored, boxed_file, in_one_box
from ..metadata import names_below
from ..opening import open_members
from ..registry import Candidate, Content, Opened, OpenRequest, check_whole, find_row, opened_file
from ..zip import STORED, Archive
from .hdf5 import DEFLATE, FLETCHER32, SHUFFLE, Dataset, FileChunk, Structure, read_structure

# Largest chunk in memory, and largest ratio of deflate.
MAX_CHUNK = 1 << 30
MAX_RATIO = 1032

# Attributes of the root that become metadata.
_METADATA = ("keras_version", "backend", "model_config", "training_config")
_MODEL_WEIGHTS = "model_weights"


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the structure of a file, without its datasets."""
    file = candidate.file
    structure = read_structure(file)
    datasets = _named(structure, request.root, file.path)
    direct: list[Listing] = []
    boxed: dict[str, BoxedListing] = {}
    for name, dataset in datasets.items():
        if dataset.unknown is not None:
            label, shape, reason, is_tensor, _ = dataset.unknown
            direct.append(unreadable(name, label, shape, reason, is_tensor=is_tensor))
        elif dataset.begin is not None:
            end = dataset.begin + dataset.nbytes
            direct.append(Listing(name, dataset.row, dataset.shape, dataset.begin, end, big_endian=dataset.swap > 1))
        else:
            try:
                boxed[name] = _boxed(name, dataset, file)
            except UnsupportedError as error:
                direct.append(unreadable(name, dataset.row.name, dataset.shape, str(error)))
    file.table = ListedTable(direct, _metadata(structure))
    if not boxed:
        return Content(file)
    return Content(file, (boxed_file(file, boxed, [file.store]),), list(datasets))


def _named(structure: Structure, root: str | None, path: str) -> dict[str, Dataset]:
    """Return the datasets below a container by their names there."""
    paths: dict[str, tuple[str, ...]] = {}
    for steps in structure.datasets:
        if paths.setdefault(".".join(steps), steps) is not steps:
            raise FormatError(f"two datasets are named {show('.'.join(steps))}", path)
    return {known: structure.datasets[paths[name]] for name, known in names_below(paths, root, path).items()}


def _boxed(name: str, dataset: Dataset, file: WeightFile) -> BoxedListing:
    """Return a dataset with its chunks."""
    value = dataset.value
    if value is not None:
        return in_one_box(dataset.row, dataset.shape, lambda: value)
    _check_filters(dataset, file.path, name)
    strides = c_strides(dataset.chunk_shape, dataset.itemsize)
    boxes: list[Box] = []
    for chunk in dataset.chunks:
        sizes = tuple(min(c, n - o) for c, n, o in zip(dataset.chunk_shape, dataset.shape, chunk.offsets, strict=True))
        stored: Stored = partial(_unpacked_chunk, file, name, dataset, chunk, sizes)
        if dataset.swap == 1 and not chunk.filters:
            stored = Region(file.store, chunk.begin, strides)
        boxes.append(Box(chunk.offsets, sizes, stored))
    return BoxedListing(dataset.row, dataset.shape, boxes)


def _check_filters(dataset: Dataset, path: str, name: str) -> None:
    """Refuse a dataset whose chunks could not be unpacked, or only into more memory than they justify."""
    nbytes = dataset.chunk_nbytes
    if nbytes > MAX_CHUNK:
        text = f": its chunks have {nbytes:,} bytes, the limit is {MAX_CHUNK:,}"
        raise error_about(LimitError, text, path=path, tensor=name)
    cut = any(n % count for n, count in zip(dataset.shape, dataset.chunk_shape, strict=True))
    for chunk in dataset.chunks:
        text, stored = "", nbytes + 4 * chunk.filters.count(FLETCHER32)
        if DEFLATE in chunk.filters:
            if nbytes > chunk.size * MAX_RATIO:
                text = f": {chunk.size:,} bytes cannot inflate to a chunk of {nbytes:,}"
        elif chunk.size != stored:
            text = f": the chunk at {list(chunk.offsets)} has {chunk.size:,} bytes, expected {stored:,}"
        elif cut and chunk.filters == (SHUFFLE,):
            raise UnsupportedError("is shuffled but not compressed, and its last chunks may be unfiltered")
        if text:
            raise error_about(FormatError, text, path=path, offset=chunk.begin, tensor=name)


def _unpacked_chunk(file: WeightFile, name: str, dataset: Dataset, chunk: FileChunk, sizes: tuple[int, ...]) -> Array:
    """Return the elements of a chunk, of which ``sizes`` are inside the dataset, in C order."""

    def damaged(text: str) -> FormatError:
        where, at = f": the chunk at {list(chunk.offsets)} {text}", min(chunk.begin, file.size)
        return error_about(FormatError, where, path=file.path, offset=at, tensor=name)

    content: Array = np.empty(chunk.size, np.uint8)
    file.store.read_into(chunk.begin, content)
    expected = dataset.chunk_nbytes
    for kind in reversed(chunk.filters):
        if kind == FLETCHER32:
            if len(content) < 4:
                raise damaged("has no checksum")
            content, stored = content[:-4], int.from_bytes(content[-4:].tobytes(), "little")
            checksum = fletcher32(content)
            if checksum != stored:
                raise damaged(f"has the checksum {checksum:08x}, expected {stored:08x}")
        elif kind == DEFLATE:
            machine = zlib.decompressobj()
            room = expected + 4  # a checksum may be inside
            try:
                inflated = machine.decompress(content.data, room + 1)
            except zlib.error as error:
                raise damaged(f"cannot be inflated: {error}") from None
            if len(inflated) > room or not machine.eof:
                raise damaged(f"inflates to more than {expected:,} bytes, or is cut off")
            content = np.frombuffer(inflated, np.uint8)
        else:
            whole = len(content) // dataset.shuffled * dataset.shuffled
            elements = content[:whole].reshape(dataset.shuffled, -1).T
            content = np.concatenate([elements.reshape(-1), content[whole:]])
    if len(content) != expected:
        raise damaged(f"has {len(content):,} bytes, expected {expected:,}")
    elements = content.reshape(*dataset.chunk_shape, dataset.itemsize)[tuple(map(slice, sizes))]
    if dataset.swap > 1:
        elements = np.ascontiguousarray(elements).reshape(-1, dataset.swap)[:, ::-1]
    return np.ascontiguousarray(elements)


def fletcher32(content: Array) -> int:
    """Return HDF5's checksum: two sums of big-endian 16-bit words modulo 65535; 0 only if all bits are 0."""
    words = np.zeros(-(-len(content) // 2), np.uint64)
    even = content[: len(content) // 2 * 2].reshape(-1, 2)
    words[: len(even)] = (even[:, 0].astype(np.uint64) << np.uint64(8)) | even[:, 1]
    if len(content) % 2:
        words[-1] = np.uint64(int(content[-1]) << 8)
    if not words.any():
        return 0
    places = np.arange(len(words), 0, -1, dtype=np.uint64) % np.uint64(65535)
    first = (int(words.sum()) - 1) % 65535 + 1
    second = (int((places * words).sum()) - 1) % 65535 + 1
    return second << 16 | first


def _metadata(structure: Structure) -> Mapping[str, Any]:
    """Return the attributes of the root, or of ``model_weights``; objects in JSON are parsed."""
    texts = {**structure.attributes.get((_MODEL_WEIGHTS,), {}), **structure.attributes.get((), {})}
    metadata: dict[str, Any] = {key: texts[key] for key in _METADATA if key in texts}
    for key, text in metadata.items():
        if text.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                metadata[key] = json.loads(text)
    return metadata


WEIGHTS = "model.weights.h5"
_NPZ = "model.weights.npz"
_CONFIG, _ARCHIVE_METADATA = "config.json", "metadata.json"


def enter(candidate: Candidate, request: OpenRequest) -> Opened:
    """Open the weights of an archive."""
    file, archive = candidate.file, candidate.archive
    if WEIGHTS not in archive.entries:
        text = f"the weights are {_NPZ}, an npz of pickled dicts: save the model again with h5py installed"
        raise error_about(UnsupportedError, text, path=file.path)
    metadata: dict[str, Any] = {}
    for name in (_ARCHIVE_METADATA, _CONFIG):
        if name in archive.entries:
            value = parse_json(archive.read(name)[0], name, file.path)
            metadata.update({"config": value} if name == _CONFIG else value)
    entry = archive.entries[WEIGHTS]
    if entry.method == STORED:
        archive.check_stored(WEIGHTS)
        members = {WEIGHTS: Member(archive.locate(WEIGHTS), entry.size)}
        archive.check_overlap()
        opened = open_members(file, MemberFiles(file.store, file.path, members), request, kind="a Keras archive")
    else:
        opened = _unpacked(file, archive, request)
    table = opened.file.table
    assert isinstance(table, ListedTable)
    table.add_metadata(metadata)
    return opened._replace(metadata=table.metadata() or {}, notes=[*opened.notes, *_archive_notes(archive)])


def _unpacked(file: WeightFile, archive: Archive, request: OpenRequest) -> Opened:
    """Open compressed weights, unpacked into a temporary file."""
    check_whole(file, "compressed weights of a .keras archive must be unpacked as a whole")
    archive.check_packed(WEIGHTS)

    def write(out: BinaryIO, path: str) -> None:
        reserve(out.fileno(), archive.entries[WEIGHTS].size, path)
        for chunk in archive.inflate(WEIGHTS):
            out.write(chunk)

    temporary = open_temporary("safeload-keras-", write, shown=file.path)
    try:
        unpacked = Candidate(temporary)
        row = find_row(unpacked, request)
        content = row.load().read(unpacked, request)
        for part in (content.file, *content.others):
            part.stand_for(file)
    except BaseException:
        temporary.close()
        raise
    file.close()
    return opened_file(row.name, content)._replace(title=file.path)


def _archive_notes(archive: Archive) -> list[str]:
    known = {WEIGHTS, _CONFIG, _ARCHIVE_METADATA}
    skipped = [name for name in archive.entries if name not in known and not name.endswith("/")]
    if not skipped:
        return []
    more = f" and {len(skipped) - 1:,} more" if len(skipped) > 1 else ""
    return [f"not read: {show(skipped[0])[1:-1]}{more}"]
