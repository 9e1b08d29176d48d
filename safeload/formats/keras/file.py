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
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...base.listed_table import ListedTable, Listing, unreadable
from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import FormatError, UnsupportedError
from ..boxed import Box, BoxedListing, InFile, boxed_file
from ..opening import names_below
from ..registry import Candidate, Content, OpenRequest
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
