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
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from ...base.listed_table import ListedTable, Listing, unreadable
from ...base.messages import error_about
from ...base.text import show
from ...engine.run.atomic_file import reserve
from ...engine.run.weight_file import WeightFile, open_temporary
from ...errors import FormatError, UnsupportedError
from ...stores.json_file import parse_json
from ...stores.members import Member, MemberFiles
from ..boxed import Box, BoxedListing, InFile, boxed_file
from ..opening import names_below, open_members
from ..registry import Candidate, Content, Opened, OpenRequest, check_whole, find_row, opened_file
from ..zip import STORED, Archive
from .chunks import InMemory, StoredBlock, check_filters
from .hdf5 import Dataset, Structure, read_structure

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
                boxed[name] = BoxedListing(dataset.row, dataset.shape, list(_boxes(name, dataset, file)))
            except UnsupportedError as error:
                direct.append(unreadable(name, dataset.row.name, dataset.shape, str(error)))
    file.table = ListedTable(direct, _metadata(structure))
    if not boxed:
        return Content(file, notes=structure.notes)
    beside = boxed_file(file, file.path, boxed, [file.store])
    return Content(file, (beside,), list(datasets), structure.notes)


def _named(structure: Structure, root: str | None, path: str) -> dict[str, Dataset]:
    """Return the datasets below a container by their names there."""
    paths: dict[str, tuple[str, ...]] = {}
    for steps in structure.datasets:
        name = ".".join(steps)
        if name in paths:
            raise FormatError(f"two datasets are named {show(name)}", path)
        paths[name] = steps
    return {known: structure.datasets[paths[name]] for name, known in names_below(paths, root, path).items()}


def _boxes(name: str, dataset: Dataset, file: WeightFile) -> Iterator[Box]:
    """Yield the chunks of a dataset."""
    if dataset.value is not None:
        yield Box((0,) * len(dataset.shape), dataset.shape, InMemory(dataset.value))
        return
    itemsize = dataset.itemsize
    check_filters(dataset, file.path, name)
    strides = [itemsize]
    for count in reversed(dataset.chunk_shape[1:]):
        strides.insert(0, strides[0] * count)
    plain = dataset.swap == 1
    for chunk in dataset.chunks:
        sizes = tuple(min(c, n - o) for c, n, o in zip(dataset.chunk_shape, dataset.shape, chunk.offsets, strict=True))
        if plain and not chunk.filters:
            yield Box(chunk.offsets, sizes, InFile(file.store, chunk.begin, tuple(strides)))
        else:
            yield Box(chunk.offsets, sizes, StoredBlock(file, name, dataset, chunk, sizes))


def _metadata(structure: Structure) -> Mapping[str, Any]:
    """Return the attributes of the root, or of ``model_weights``; JSON is parsed."""
    metadata: dict[str, Any] = {}
    for key in _METADATA:
        for steps in ((), (_MODEL_WEIGHTS,)):
            value = structure.attributes.get(steps, {}).get(key)
            if value is not None and key not in metadata:
                metadata[key] = _parsed(value)
    return metadata


def _parsed(text: str) -> Any:
    """Return the object in a text of JSON, or the text."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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
