"""Torch checkpoints made without torch: what torch.save would have written for described tensors, and bent versions."""

import io
import pickle
import struct
import sys
import zipfile

import ml_dtypes
import numpy as np

MAGIC = 0x1950A86A20F9469CFC6C


class Ref:
    """A global by its name, whatever there is under it."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self):
        raise AssertionError("a Ref is only written")


OD = Ref("collections", "OrderedDict")
REBUILD = Ref("torch._utils", "_rebuild_tensor_v2")
REBUILD_V1 = Ref("torch._utils", "_rebuild_tensor")
REBUILD_V3 = Ref("torch._utils", "_rebuild_tensor_v3")
PARAMETER = Ref("torch._utils", "_rebuild_parameter")
UNTYPED = Ref("torch.storage", "UntypedStorage")
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class Call:
    """A REDUCE."""

    def __init__(self, function, *args, state=None):
        self.function, self.args, self.state = function, args, state


class Storage:
    """A persistent id: bytes under a key. ``count`` and ``type`` may lie."""

    def __init__(self, key, array, *, type=None, count=None, part=None):
        self.key = key
        self.array = np.ascontiguousarray(array).reshape(-1)
        name = STORAGES.get(self.array.dtype.name)
        self.type = type or (Ref("torch", name) if name else UNTYPED)
        self.count = count if count is not None else self.array.nbytes if self.type is UNTYPED else self.array.size
        self.part = part

    def id(self, legacy):
        return ("storage", self.type, self.key, "cpu", self.count, *((self.part,) if legacy else ()))


def tensor(storage, shape=None, strides=None, offset=0, *more):
    """The REDUCE of a tensor over a storage, all of it without a shape."""
    shape = storage.array.shape if shape is None else shape
    if strides is None:
        strides = tuple(int(np.prod(shape[k + 1 :])) for k in range(len(shape)))
    if storage.type is UNTYPED:
        dtype = Ref("torch", storage.array.dtype.name)
        return Call(REBUILD_V3, storage, offset, tuple(shape), tuple(strides), False, Call(OD), dtype, *more)
    return Call(REBUILD, storage, offset, tuple(shape), tuple(strides), False, Call(OD), *more)


def ordered(items, state=None):
    """An OrderedDict with attributes."""
    made = Call(OD, state=state)
    made.items = list(items.items())
    return made


class _Pickler(pickle._Pickler):
    def __init__(self, out, protocol, legacy=False):
        super().__init__(out, protocol)
        self.legacy = legacy

    def persistent_id(self, value):
        return value.id(self.legacy) if isinstance(value, Storage) else None

    def reducer_override(self, value):
        if isinstance(value, Call):
            return value.function, value.args, value.state, None, iter(getattr(value, "items", ())) or None
        return NotImplemented

    def save_ref(self, value):
        if self.proto >= 4:
            self.save(value.module)
            self.save(value.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    dispatch = {**pickle._Pickler.dispatch, Ref: save_ref}  # noqa: RUF012 - as in its base


def dump(value, protocol=2, *, legacy=False):
    out = io.BytesIO()
    _Pickler(out, protocol, legacy).dump(value)
    return out.getvalue()


def storages_of(value, found=None):
    """Storages in a value by key."""
    found = {} if found is None else found
    if isinstance(value, Storage):
        found.setdefault(value.key, value)
    elif isinstance(value, Call):
        for item in (*value.args, *getattr(value, "items", ()), value.state):
            storages_of(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            storages_of(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            storages_of(item, found)
    return found


def in_order(array, order):
    """An array's bytes; those of ml_dtypes before 0.5.4 swap none of bfloat16."""
    if (order == "big") == (sys.byteorder == "big"):
        return array.tobytes()
    return (array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array).byteswap().tobytes()


def zip_entries(value, *, protocol=2, order="little"):
    """Name and bytes of each entry but for the prefix."""
    entries = {"data.pkl": dump(value, protocol), "byteorder": order.encode()}
    for key, storage in storages_of(value).items():
        entries[f"data/{key}"] = in_order(storage.array, order)
    entries["version"] = b"3\n"
    return entries


def zip_archive(entries, *, prefix="archive/", align=64, shift=0, deflate=()):
    """A zip archive with the data of each entry aligned, as torch does it, or so many bytes after that."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in entries.items():
            info = zipfile.ZipInfo(prefix + name)
            info.compress_type = zipfile.ZIP_DEFLATED if name in deflate else zipfile.ZIP_STORED
            padding = (shift - (out.tell() + 30 + len((prefix + name).encode()) + 4)) % align
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            archive.writestr(info, data)
    return out.getvalue()


def zip_file(value, *, protocol=2, order="little", **options):
    return zip_archive(zip_entries(value, protocol=protocol, order=order), **options)


def legacy_file(value, *, protocol=2, keys=None, counts=None, more=b""):
    """Five pickles and the storages."""
    storages = storages_of(value)
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    parts = [pickle.dumps(x, protocol) for x in (MAGIC, 1001, facts)]
    parts.append(dump(value, protocol, legacy=True))
    keys = sorted(storages) if keys is None else keys
    parts.append(pickle.dumps(keys, protocol))
    for key in keys:
        storage = storages[key]
        count = (counts or {}).get(key, storage.count)
        parts.append(struct.pack("<q", count) + in_order(storage.array, "little"))
    return b"".join(parts) + more
