"""Orbax checkpoints made without Orbax: databases of OCDBT, arrays of zarr, and bent versions of both."""

import itertools
import json
import struct

import numpy as np

from builders.inside import ocdbt as databases

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def varint(number):
    """LEB128."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)


def column(numbers):
    return b"".join(map(varint, numbers))


def texts(values):
    """Lengths of shared prefixes, lengths of the rests, and the rests."""
    prefixes, rests = [], []
    before = b""
    for value in values:
        shared = 0
        while shared < min(len(before), len(value)) and before[shared] == value[shared]:
            shared += 1
        prefixes.append(shared)
        rests.append(value[shared:])
        before = value
    return prefixes[1:], list(map(len, rests)), b"".join(rests)


def table(files):
    """The table of data files: (base path, path below it)."""
    prefixes, rests, content = texts([(base + path).encode() for base, path in files])
    prefixes = [0] * len(prefixes)  # allowed, and simple
    content = b"".join((base + path).encode() for base, path in files)
    rests = [len((base + path).encode()) for base, path in files]
    return varint(len(files)) + column(prefixes) + column(rests) + column(len(b.encode()) for b, _ in files) + content


def framed(magic, body, compress=None):
    """A manifest or node around a body."""
    data = bytes(1) + (bytes(1) + body if compress is None else b"\1" + compress(body))
    head = struct.pack(">I", magic) + struct.pack("<Q", 12 + len(data) + 4)
    return head + data + struct.pack("<I", databases.crc32c(head + data))


def leaf(entries, files):
    """The body of a node of height 0: (key, value), where a value is bytes or (file, offset, length)."""
    prefixes, rests, content = texts([key.encode() for key, _ in entries])
    kinds = bytes(not isinstance(value, bytes) for _, value in entries)
    lengths = [len(value) if isinstance(value, bytes) else value[2] for _, value in entries]
    outside = [value for _, value in entries if not isinstance(value, bytes)]
    inside = b"".join(value for _, value in entries if isinstance(value, bytes))
    return b"".join(
        [
            b"\0", table(files), varint(len(entries)), column(prefixes), column(rests), content, column(lengths), kinds,
            column(value[0] for value in outside), column(value[1] for value in outside), inside,
        ]
    )  # fmt: skip


def interior(height, children, files):
    """The body of a node above others: (first key, length of the common prefix, file, offset, length)."""
    prefixes, rests, content = texts([key.encode() for key, *_ in children])
    fields = [column(child[k] for child in children) for k in (1, 2, 3, 4)]
    statistics = column([1] * (3 * len(children)))
    return b"".join(
        [
            bytes([height]), table(files), varint(len(children)), column(prefixes), column(rests), fields[0], content,
            *fields[1:], statistics,
        ]
    )  # fmt: skip


def manifest_body(root, files, height=0, kind=0, generation=1):
    """The body of a manifest: ``root`` is (file, offset, length)."""
    versions = varint(1) + varint(generation) + bytes([height]) + column(root) + column([1, 1, 1]) + bytes(8)
    config = bytes(16) + varint(kind) + varint(1024) + varint(100_000_000) + b"\4" + b"\0"
    return config + table(files) + versions + varint(0)


class OrbaxCheckpoint:
    """A checkpoint to write, with each part open to change before `write`.

    Attributes:
        metadata: ``_METADATA``.
        arrays: ``.zarray`` or ``zarr.json`` by name.
        chunks: the stored bytes by key.
        strings: ``_strings.json``.
    """

    def __init__(self, version=2, *, compress=None, **switches):
        self.version = version
        self.compress = compress
        self.metadata = {
            "tree_metadata": {},
            "use_ocdbt": True,
            "use_zarr3": version == 3,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
            **switches,
        }
        self.arrays, self.chunks, self.strings = {}, {}, {}

    def leaf(self, steps, kind):
        """Add a leaf to the tree: ``steps`` are keys, or indices of lists."""
        keys = [{"key": str(step), "key_type": 1 if isinstance(step, int) else 2} for step in steps]
        value = {"value_type": kind, "skip_deserialize": kind in ("None", "Dict", "List", "Tuple")}
        self.metadata["tree_metadata"][str(tuple(map(str, steps)))] = {"key_metadata": keys, "value_metadata": value}
        return self

    def string(self, steps, text):
        self.strings[".".join(map(str, steps))] = text
        return self.leaf(steps, "string")

    def described(self, array, chunks, **fields):
        """The metadata of an array."""
        if self.version == 2:
            code = array.dtype.str if array.dtype.isbuiltin == 1 else array.dtype.name
            compressor = None if self.compress is None else {"id": "zstd", "level": 1}
            whole = {
                "chunks": chunks,
                "compressor": compressor,
                "dimension_separator": ".",
                "dtype": code,
                "order": "C",
            }
            whole |= {"fill_value": None, "filters": None, "shape": list(array.shape), "zarr_format": 2}
            return whole | fields
        steps = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.compress is not None:
            steps.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
        grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
        whole = {"zarr_format": 3, "node_type": "array", "shape": list(array.shape), "data_type": array.dtype.name}
        whole |= {"chunk_grid": grid, "chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": steps}
        return whole | fields

    def encoded(self, chunk):
        """The stored bytes of a whole chunk."""
        return chunk.tobytes() if self.compress is None else self.compress(chunk.tobytes())

    def tensor(self, name, array, chunks=None, inner=None, steps=None, **fields):
        """Add an array, divided into chunks; ``inner`` divides each of them again, as a shard of version 3."""
        chunks = [max(1, n) for n in array.shape] if chunks is None else list(chunks)
        self.leaf(name.split(".") if steps is None else steps, "jax.Array")
        described = self.described(array, chunks, **fields)
        if inner is not None:
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            configuration = {"chunk_shape": list(inner), "codecs": described["codecs"], "index_codecs": index}
            described["codecs"] = [{"name": "sharding_indexed", "configuration": configuration}]
        self.arrays[name] = described
        stem = f"{name}/" if name else ""
        for index, chunk in divided(array, chunks):
            key = ".".join(map(str, index)) or "0"
            if self.version == 3:
                key = "/".join(["c", *map(str, index)])
            self.chunks[stem + key] = self.encoded(chunk) if inner is None else self.shard(chunk, inner)
        return self

    def shard(self, chunk, inner):
        """The stored bytes of a shard."""
        content, index = b"", b""
        for _, part in divided(chunk, inner):
            data = self.encoded(part)
            index += struct.pack("<QQ", len(content), len(data))
            content += data
        return content + index + struct.pack("<I", databases.crc32c(index))

    def values(self):
        """All keys of the store with their bytes."""
        base = ".zarray" if self.version == 2 else "zarr.json"
        described = {f"{name}/{base}" if name else base: json.dumps(a).encode() for name, a in self.arrays.items()}
        return described | self.chunks

    def write(self, folder, name="_METADATA", *, leaves=1, inline=100, data="d/0", part=""):
        """Write everything.

        Args:
            leaves: nodes of height 0; more than one are below a root.
            inline: largest inline value.
            data: path of the data file, below ``part``.
            part: path of a database in the folder, with a slash at the end.
        """
        folder.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(json.dumps(self.metadata), encoding="utf-8")
        if self.strings:
            (folder / "_strings.json").write_text(json.dumps(self.strings), encoding="utf-8")
        if not self.metadata["use_ocdbt"]:
            for key, content in self.values().items():
                path = folder / key
                path.parent.mkdir(exist_ok=True, parents=True)
                path.write_bytes(content)
            return
        files = ocdbt(self.values(), leaves=leaves, inline=inline, data=data, part=part, compress=self.compress)
        for path, content in files.items():
            (folder / path).parent.mkdir(exist_ok=True, parents=True)
            (folder / path).write_bytes(content)


def ocdbt(values, *, leaves=1, inline=100, data="d/0", part="", compress=None):
    """The files of a database: values and nodes in one data file, and the manifest beside ``part``."""
    content, entries = bytearray(), []
    for key, value in sorted(values.items(), key=lambda pair: pair[0].encode()):
        if len(value) > inline:
            entries.append((key, (0, len(content), len(value))))
            content += value
        else:
            entries.append((key, value))
    files = [(part, data)]
    below = [("", data)]
    children = []
    step = max(1, -(-len(entries) // leaves))
    for begin in range(0, len(entries), step):
        group = entries[begin : begin + step]
        first = group[0][0]
        common = len(first.encode()) if len(group) == 1 else 0
        group = [(key[len(first) :] if common else key, value) for key, value in group]
        node = framed(NODE, leaf(group, below), compress)
        children.append((first, common, 0, len(content), len(node)))
        content += node
    root, height = (0, *children[0][3:]) if children else (0, 2**64 - 1, 2**64 - 1), 0
    if len(children) > 1:
        node = framed(NODE, interior(1, children, below), compress)
        root, height = (0, len(content), len(node)), 1
        content += node
    elif children and children[0][1]:  # a root has no prefix
        return ocdbt(values | {"~": b""}, leaves=1, inline=inline, data=data, part=part, compress=compress)
    manifest = framed(MANIFEST, manifest_body(root, files, height), compress)
    return {part + data: bytes(content), "manifest.ocdbt": manifest}


def divided(array, chunks):
    """Index and elements of each chunk; those at the border are padded."""
    counts = [-(-n // chunk) for n, chunk in zip(array.shape, chunks, strict=True)]
    for index in itertools.product(*map(range, counts)):
        part = array[tuple(slice(k * n, (k + 1) * n) for k, n in zip(index, chunks, strict=True))]
        padding = [(0, n - have) for n, have in zip(chunks, part.shape, strict=True)]
        yield index, np.pad(part.astype(array.dtype), padding) if array.ndim else array


def single(weights, path):
    """Write one checkpoint whose metadata is the file at ``path``, beside its database."""
    made = OrbaxCheckpoint()
    for name, array in weights.items():
        made.tensor(name, array, steps=(name,))
    made.write(path.parent, path.name)


def sample():
    """A small checkpoint with chunks in a data file and in a node."""
    made = OrbaxCheckpoint()
    made.tensor("w", np.arange(48, dtype=np.float32).reshape(12, 4), (6, 4)).tensor("b", np.arange(3, dtype=np.float32))
    return made.string(("note",), "text").leaf(("empty", 0), "None")
