"""Folders of torch.distributed.checkpoint made without torch: what its writer would have written, and bent versions."""

import contextlib
import itertools
import struct
from pathlib import Path

import numpy as np

from builders.torch_build import Call, Ref, Storage, dump, tensor, zip_archive, zip_entries, zip_file

MODULE = "torch.distributed.checkpoint.metadata"
OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"


def record(name, state, module=MODULE):
    """An object of a dataclass."""
    return Call(Ref(module, name), state=state)


def size(values):
    return Call(Ref("torch", "Size"), tuple(values))


def properties(dtype, module=MODULE):
    layout = Call(Ref("torch.serialization", "_get_layout"), "torch.strided")
    encoding = Call(Ref(MODULE, "_MEM_FORMAT_ENCODING"), 0)
    return record("TensorProperties", (Ref("torch", dtype), layout, False, encoding, False), module)


def archive(array):
    """The bytes of a chunk."""
    return zip_file(tensor(Storage("0", array.ravel()), array.shape), align=64)


def value_archive(value):
    """The bytes of a value other than a tensor."""
    return zip_archive(zip_entries(value), align=64)


def cuts(length, parts):
    """Positions that divide an axis as torch.chunk does."""
    step = max(1, -(-length // parts))
    return [min(k * step, length) for k in range(parts)] + [length]


def grid(shape, parts):
    """Offsets and sizes of a mesh of chunks; empty ones too."""
    edges = [cuts(length, n) for length, n in zip(shape, parts, strict=True)]
    for index in itertools.product(*map(range, parts)):
        offsets = tuple(edges[axis][k] for axis, k in enumerate(index))
        yield offsets, tuple(edges[axis][k + 1] - edges[axis][k] for axis, k in enumerate(index))


class Checkpoint:
    """A checkpoint to write, with each part open to change before `write`.

    Attributes:
        about: fields of ``state_dict_metadata`` by name.
        chunks: for each stored chunk or value: [name, offsets or None, file, offset, length, transforms].
        files: content of each data file.
        paths: ``planner_data``.
    """

    def __init__(self, old=False):
        self.about, self.chunks, self.files, self.paths = {}, [], {}, {}
        self.old = old

    def _store(self, name, offsets, file, content, transforms=None):
        data = self.files.setdefault(file, bytearray())
        self.chunks.append([name, offsets, file, len(data), len(content), transforms])
        data += content

    def tensor(self, name, array, boxes=None, *, files=("__0_0.distcp",), pack=None, path=None, shape=None):
        """Add a tensor, its boxes dealt out to the files."""
        boxes = [((0,) * array.ndim, array.shape)] if boxes is None else list(boxes)
        for k, (offsets, sizes) in enumerate(boxes):
            part = array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            content = archive(np.ascontiguousarray(part).reshape(part.shape))
            packed = content if pack is None else pack(content)
            self._store(name, offsets, files[k % len(files)], packed, None if pack is None else ["stream.zstd/1"])
        shape = array.shape if shape is None else shape
        self.about[name] = [array.dtype.name, tuple(shape), boxes]
        self.paths[name] = tuple(name.split(".")) if path is None else path
        return self

    def value(self, name, value, *, file="__0_0.distcp", path=None):
        self._store(name, None, file, value_archive(value))
        self.about[name] = None
        self.paths[name] = tuple(name.split(".")) if path is None else path
        return self

    def metadata(self, names=None):
        """The object of ``.metadata``."""
        described = {}
        for name, about in self.about.items():
            if about is None:
                described[name] = record("BytesStorageMetadata", {})
                continue
            dtype, shape, boxes = about
            chunks = [record("ChunkStorageMetadata", {"offsets": size(o), "sizes": size(n)}) for o, n in boxes]
            module = OLD_MODULE if self.old else MODULE
            fields = {"properties": properties(dtype, module), "size": size(shape), "chunks": chunks}
            described[name] = record("TensorStorageMetadata", fields)
        numbers = {}
        pairs = []
        for name, offsets, file, offset, length, transforms in self.chunks:
            number = numbers[name] = numbers.get(name, -1) + 1
            at = None if offsets is None else size(offsets)
            key = record("MetadataIndex", {"fqn": name, "offset": at, "index": None if at is None else number})
            info = {"relative_path": file, "offset": offset, "length": length}
            if not self.old:
                info["transform_descriptors"] = transforms
            pairs.append((key, record("_StorageInfo", info, "torch.distributed.checkpoint.filesystem")))
        fields = {"state_dict_metadata": described, "planner_data": self.paths, "storage_data": _Pairs(pairs)}
        if not self.old:
            path = Call(Ref("pathlib", "PosixPath"), "/", "tmp", "x")
            meta = {"checkpoint_id": path, "save_id": None, "load_id": None, "modules": []}
            fields |= {"storage_meta": record("StorageMeta", meta), "version": "1.0.0"}
        return record("Metadata", fields)

    def write(self, folder, name=".metadata"):
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        for file, content in self.files.items():
            (folder / file).write_bytes(content)
        (folder / name).write_bytes(dump(self.metadata(), 2 if self.old else 4))
        return folder


class _Pairs(dict):
    """A dict whose keys need no hash: they are only written."""

    def __init__(self, pairs):
        super().__init__()
        self._pairs = pairs

    def items(self):
        return self._pairs

    def __len__(self):
        return len(self._pairs)

    def __reduce_ex__(self, protocol):
        return Ref("collections", "OrderedDict"), (), None, None, iter(self._pairs)


def sparse(folder, *, tensors, chunks, rows, columns, files=4):
    """Write a checkpoint of float32 zeros that take no place on the disk: chunks of ``rows`` in each tensor."""
    folder.mkdir()
    made = Checkpoint()
    count = rows * columns
    pickled = dump(tensor(Storage("0", np.zeros(1, np.float32), count=count), (rows, columns)))
    archived = zip_archive({"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", "data/0": b""})
    directory = archived.index(b"PK\x01\x02")
    end = bytearray(archived[directory:])
    struct.pack_into("<II", end, end.rindex(b"PK\x01\x02") + 20, 4 * count, 4 * count)
    struct.pack_into("<I", end, end.rindex(b"PK\x05\x06") + 16, directory + 4 * count)
    length = directory + 4 * count + len(end)
    boxes = [((k * rows, 0), (rows, columns)) for k in range(chunks)]
    with contextlib.ExitStack() as stack:
        names = [f"__{k}_0.distcp" for k in range(files)]
        outs = [stack.enter_context((folder / name).open("wb")) for name in names]
        for number in range(tensors):
            name = f"model.layers.{number}.weight"
            made.about[name] = ["float32", (chunks * rows, columns), boxes]
            made.paths[name] = tuple(name.split("."))
            for k, (offsets, _) in enumerate(boxes):
                out = outs[k % files]
                made.chunks.append([name, offsets, names[k % files], out.tell(), length, None])
                out.write(archived[:directory])
                out.seek(4 * count, 1)
                out.write(end)
    return made.write(folder)


def sample():
    """A small checkpoint of two data files."""
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    made = Checkpoint().tensor("w", array, grid((6, 4), (2, 1)), files=("__0_0.distcp", "__1_0.distcp"))
    return made.tensor("b", np.ones(3, np.float32)).value("step", 3)


def single(weights, path):
    """Write one checkpoint whose metadata is the file at ``path``, beside its data."""
    made = Checkpoint()
    for name, array in weights.items():
        made.tensor(name, array)
    made.write(path.parent, path.name)
