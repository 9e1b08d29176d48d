"""`safeload.scan` never calls a file harmless that runs code when its library reads it, nor work without measure."""

import bz2
import contextlib
import copyreg
import gzip
import io
import json
import lzma
import pickle
import random
import struct
import sys
import tarfile
import time
import types
import zipfile
import zlib

import numpy as np
import pytest
from builders.thorough import THOROUGH

import safeload

pytestmark = pytest.mark.no_core

NAME = "scan_attack_marker"
EXTENSION = 0x70F1F2F3


class Stated:
    def __setstate__(self, state):
        sys.modules[NAME].ran.append(state)


class Made:
    def __new__(cls, *args, **keywords):
        sys.modules[NAME].ran.append(args)
        return object.__new__(cls)


class Items:
    def __setitem__(self, *pair):
        sys.modules[NAME].ran.append(pair)

    extend = __setitem__


@pytest.fixture
def ran(monkeypatch):
    """The calls of a module that no list of names has."""
    module = types.ModuleType(NAME)
    module.ran = []
    module.run = lambda *args: module.ran.append(args)
    module.me, module.Stated, module.Made, module.items = module, Stated, Made, Items()
    setattr(module, "a run", module.run)
    monkeypatch.setitem(sys.modules, NAME, module)
    copyreg.add_extension(NAME, "run", EXTENSION)
    yield module.ran
    copyreg.remove_extension(NAME, "run", EXTENSION)


class Reader(pickle._Unpickler):
    """Python's own reader, with persistent ids."""

    def persistent_load(self, pid):
        return pid


class FastReader(pickle.Unpickler):
    def persistent_load(self, pid):
        return pid


def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def text(content):
    return b"X" + struct.pack("<I", len(content)) + content.encode()


GLOBAL = f"c{NAME}\nrun\n".encode()
CALL0 = GLOBAL + b"(I1\ntR"
CALL4 = short(NAME) + short("run") + b"\x93K\x01\x85R"
FAR = "me." * 4000 + "run"

# Pickles that call a function of a module which no list has; what follows the call is not read.
CALLS = {
    "text": CALL0 + b".",
    "text that ends in a fault": CALL0 + b"\xff",
    "text that ends with the bytes": CALL0,
    "text before a name that is no module": CALL0 + b"c!!\n!!\n.",
    "text before an empty stack": CALL0 + b"000000.",
    "INST": f"(I1\ni{NAME}\nrun\n\xff".encode("latin-1"),
    "OBJ": b"(" + GLOBAL + b"I1\no\xff",
    "protocol 2": b"\x80\x02" + CALL0 + b".",
    "protocol 4": b"\x80\x04" + CALL4 + b".",
    "protocol 4 without its mark": CALL4 + b"\xff",
    "protocol 4 that ends in a fault": b"\x80\x04" + CALL4 + b"\xff",
    "in a frame": b"\x80\x04\x95" + struct.pack("<Q", len(CALL4)) + CALL4 + b"\xff",
    "names in the memo": short("run") + b"p0\n" + short(NAME) + b"q\x0100h\x01g0\n\x93" + b"I1\n\x85R\xff",
    "memo numbers with a sign": b"(lp+5\n0g 5\n0" + CALL0 + b"\xff",
    "memo numbers with lines": b"(lp1_0\n0g10\n0" + CALL0 + b"\xff",
    "a function in the memo": GLOBAL + b"r\xff\xff\xff\x7f0j\xff\xff\xff\x7f)R\xff",
    "a duplicate": GLOBAL + b"2)R\xff",
    "names with escapes": b"V" + NAME.replace("s", "\\u0073").encode() + b"\nS'r\\x75n'\n\x93)R\xff",
    "Python 2's strings": b"U" + bytes([len(NAME)]) + NAME.encode() + b"T\x03\0\0\0run\x93)R\xff",
    "a name of many dots": b"\x80\x04" + short(NAME) + text(FAR) + b"\x93)R\xff",
    "a line of many dots": b"\x80\x04" + f"c{NAME}\n{FAR}\n".encode() + b")R\xff",
    "NEWOBJ": f"c{NAME}\nMade\n".encode() + b")\x81\xff",
    "NEWOBJ_EX": f"c{NAME}\nMade\n".encode() + b")}\x92\xff",
    "BUILD": f"c{NAME}\nStated\n".encode() + b")\x81K\x01b\xff",
    "SETITEM": f"c{NAME}\nitems\n".encode() + b"I1\nI2\ns\xff",
    "APPENDS": f"c{NAME}\nitems\n".encode() + b"(I1\ne\xff",
    "a name with a space": f"c{NAME}\na run\n".encode() + b")R\xff",
    "an extension code": b"\x84" + struct.pack("<I", EXTENSION) + b")R\xff",
    "after a persistent id": b"Px\n0" + CALL0 + b"\xff",
    "after a persistent id that is no text": b"K\x01Q0" + CALL0 + b"\xff",
    "after bytes": b"B" + struct.pack("<I", 5000) + bytes(5000) + b"0" + CALL0 + b"\xff",
    "after long numbers": b"\x8a\xff" + bytes(255) + b"L" + b"9" * 3000 + b"L\n" + b"00" + CALL0 + b"\xff",
    "after a text with line ends": b"X\x03\0\0\0\n\n\n0" + CALL0 + b"\xff",
    "in a list in a dict": b"}X\x01\0\0\0a(" + CALL0 + b"lsu\xff",
}  # fmt: skip

PAX = tarfile.PAX_FORMAT
FINE = pickle.dumps({"a": [1, 2.5, "x"]}, 4)


def zipped(entries, method=zipfile.ZIP_STORED):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return memory.getvalue()


def entry(name):
    return lambda content: zipfile.ZipFile(io.BytesIO(content)).read(name)


def tarred(content, **fields):
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=fields.pop("format", tarfile.GNU_FORMAT)) as archive:
        for name in ("a", "model"):
            info = tarfile.TarInfo(name)
            for key, value in {**fields, "size": len(content)}.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def member(content):
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.extractfile(archive.getmembers()[-1]).read()


def without_magic(content):
    """A tar archive as before POSIX: its headers have no magic number."""
    content = bytearray(content)
    for at in range(0, len(content), 512):
        if content[at + 257 : at + 262] == b"ustar":
            content[at + 257 : at + 265] = bytes(8)
            total = sum(content[at : at + 148]) + 256 + sum(content[at + 156 : at + 512])
            content[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(content)


def npy(descr, content, shape="()"):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def two_directories(content):
    """An archive in the comment of another, which other readers take for the archive."""
    first = zipped({"model": content}, zipfile.ZIP_DEFLATED)
    second = zipped({"fine": FINE})
    return first[:-2] + struct.pack("<H", len(second)) + second


def first_directory(content):
    end = content.index(b"PK\x05\x06")
    return entry("model")(content[: end + 20] + b"\0\0")


def in_the_gap(content):
    """An entry whose header only readers of streams see."""
    packed = zlib.compress(content)[2:-4]
    sizes = zlib.crc32(content), len(packed), len(content)
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 8, 0, 0, *sizes, 5, 0)
    return header + b"model" + packed + zipped({"fine": FINE})


def from_stream(content):
    return zlib.decompressobj(-15).decompress(content[35:])


def lzma_alone(content, **options):
    return lzma.compress(content, lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, **options}])


def small_window(content):
    machine = zlib.compressobj(9, zlib.DEFLATED, 12)
    return machine.compress(content) + machine.flush()


def same(content):
    return content


def gguf(content):
    return b"GGUF\x03\0\0\0\x01" + content


def like_safetensors(content):
    """A valid safetensors file: to pickle, its header is a text in the argument of an opcode."""
    data = b"\n" + content
    head = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", 0x156) + head.ljust(0x156) + data


# File name, the content that hides a pickle, and what its library does before it unpickles.
PLACES = {
    "a text file": ("x.txt", same, same),
    "any file": ("x.weights", same, same),
    "a pickle": ("x.pkl", same, same),
    "safetensors by name": ("x.safetensors", same, same),
    "an array file by name": ("x.bin", same, same),
    "GGUF by magic": ("x.gguf", gguf, same),
    "valid safetensors": ("x.safetensors", like_safetensors, same),
    "zip by magic": ("x.zip", lambda p: b"PK\x03\x04\n" + p, same),
    "after a pickle": ("x.pt", lambda p: FINE + p, lambda content: content[len(FINE) :]),
    "gzip, the second member": ("x.gz", lambda p: gzip.compress(b"") + gzip.compress(p), gzip.decompress),
    "gzip, over two members": ("x.gz", lambda p: gzip.compress(p[:3]) + gzip.compress(p[3:]), gzip.decompress),
    "bzip2, the second stream": ("x.bz2", lambda p: bz2.compress(b"") + bz2.compress(p), bz2.decompress),
    "xz, the third stream": ("x", lambda p: lzma.compress(b"") * 2 + lzma.compress(p), lzma.decompress),
    "lzma of a small dictionary": ("x", lambda p: lzma_alone(p, dict_size=4096), lzma.decompress),
    "lzma of other properties": ("x", lambda p: lzma_alone(p, dict_size=65536, lc=0, lp=0, pb=0), lzma.decompress),
    "zlib of a small window": ("x", small_window, zlib.decompress),
    "compressed twice": ("x", lambda p: gzip.compress(bz2.compress(p)), lambda c: bz2.decompress(gzip.decompress(c))),
    "gzip after a pickle": ("x", lambda p: FINE + gzip.compress(p), lambda c: gzip.decompress(c[len(FINE) :])),
    "zip, deflated": ("x.zip", lambda p: zipped({"model": p}, zipfile.ZIP_DEFLATED), entry("model")),
    "zip, bzip2": ("x.zip", lambda p: zipped({"model": p}, zipfile.ZIP_BZIP2), entry("model")),
    "zip, lzma": ("x.zip", lambda p: zipped({"model": p}, zipfile.ZIP_LZMA), entry("model")),
    "zip, named as a folder": ("x.zip", lambda p: zipped({"model/": p}), entry("model/")),
    "zip, named as a tensor": ("x.pt", lambda p: zipped({"a/data.pkl": FINE, "b/data/0": p}), entry("b/data/0")),
    "zip, as a tensor": ("x.pt", lambda p: zipped({"a/data.pkl": FINE, "a/data/0": p}), entry("a/data/0")),
    "zip, of two directories": ("x.zip", two_directories, first_directory),
    "zip, in a gap": ("x.zip", in_the_gap, from_stream),
    "tar": ("x.tar", tarred, member),
    "tar of an unknown kind": ("x", lambda p: tarred(p, type=b"Z"), member),
    "tar with sizes by pax": ("x", lambda p: tarred(p, format=PAX, pax_headers={"size": str(len(p))}), member),
    "tar after a pickle": ("x.pt", lambda p: FINE + tarred(p, format=PAX), lambda c: member(c[len(FINE) :])),
    "tar before POSIX": ("x", lambda p: without_magic(tarred(p)), member),
    "tar in gzip": ("x", lambda p: gzip.compress(tarred(p)), lambda c: member(gzip.decompress(c))),
    "the name of a tar member": ("x", lambda p: p.ljust(99, b".") + tarred(b"x")[99:], same),
}  # fmt: skip
EVERYWHERE = ("any file", "valid safetensors", "gzip, over two members", "zip, deflated")


def unpickle(content):
    """Unpickle with both of Python's readers, up to the fault."""
    for reader in (Reader, FastReader):
        with contextlib.suppress(Exception):
            reader(io.BytesIO(content)).load()


def load_arrays(content):
    """Load every array of a file, and those that follow it."""
    file = io.BytesIO(content)
    with contextlib.suppress(Exception):
        for _ in range(3):
            loaded = np.load(file, allow_pickle=True)
            for name in getattr(loaded, "files", ()):
                with contextlib.suppress(Exception):
                    loaded[name]


def missed(cases, ran, tmp_path):
    """The cases that run code and are harmless to scan, and those that run none."""
    harmless, idle = [], []
    for label, name, content, load in cases:
        ran.clear()
        load(content)
        if not ran:
            idle.append(label)
        (tmp_path / name).write_bytes(content)
        if safeload.scan(tmp_path / name).verdict == "harmless":
            harmless.append(label)
    return harmless, idle


def test_no_file_that_runs_code_is_harmless(ran, tmp_path):
    cases = [
        (f"{place}: {call}", name, wrap(pickled), lambda content, read=read: unpickle(read(content)))
        for k, (place, (name, wrap, read)) in enumerate(PLACES.items())
        for j, (call, pickled) in enumerate(CALLS.items())
        if place in EVERYWHERE or (j + k) % (1 if THOROUGH else 9) == 0
    ]
    assert len(cases) > 200
    assert missed(cases, ran, tmp_path) == ([], [])


DESCRS = (
    "'|O'", "'object'", r"'|\x4f'", "'=O'", "'O8'", "('|O', (1,))", "[('a', '<f4'), ('b', '|O')]",
    r"[('b', [('c', '\x4f', (2,))])]"
)  # fmt: skip
ONLY_PYTHON = ("after a persistent id", "after a persistent id that is no text", "a function in the memo")
ENTRIES = ("w.npy", "w", "x/data/0", "w.npy/", "config.json")


@pytest.mark.filterwarnings("ignore")  # numpy warns of headers of Python 2
def test_no_array_that_runs_code_is_harmless(ran, tmp_path):
    plain = npy("'<f4'", bytes(8), "(2,)")
    files = {
        **{descr: lambda p, descr=descr: npy(descr, p) for descr in DESCRS},
        **{name: lambda p, name=name: zipped({"x/data.pkl": FINE, name: npy("'object'", p)}) for name in ENTRIES},
        "a header of Python 2": lambda p: npy("'object'", p, "(1L,)"),
        "a second array": lambda p: plain + npy("'object'", p),
        "a pickle after an array": lambda p: plain + p,
        "a pickle after objects and an array": lambda p: npy("'|O'", FINE) + plain + p,
        "an array after a pickle": lambda p: FINE + npy("'object'", p),
    }
    cases = [
        (f"{label}: {call}", "x.npy", wrap(pickled), load_arrays)
        for k, (label, wrap) in enumerate(files.items())
        for j, (call, pickled) in enumerate(CALLS.items())
        if call not in ONLY_PYTHON and (j + k) % (1 if THOROUGH else 6) == 0
    ]
    assert missed(cases, ran, tmp_path) == ([], [])


def sequential(*layers):
    return json.dumps({"module": "keras", "class_name": "Sequential", "config": {"layers": layers}})


def layer(module, name, **config):
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


def function(module, name):
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


LAMBDA = sequential(layer("keras.layers", "Lambda"))
RUNNING = {
    "an escape in a value": LAMBDA.replace("Lambda", r"\u004Cambda"),
    "an escape in a key": LAMBDA.replace("class_name", r"cl\u0061ss\u005fname"),
    "spaces": json.dumps(json.loads(LAMBDA), indent=9).replace(":", " \n:"),
    "a text before it": "\n\n \t" + LAMBDA,
    "a key twice": '{"module": "keras.layers", "class_name": "Dense", "class_name": "Lambda", "config": {}}',
    "a number that is none in JSON": '{"a": NaN, "class_name": "Lambda"}',
    "a function": sequential(layer("keras.layers", "Dense", activation=function("os", "system"))),
    "a builtin": sequential(layer("keras.layers", "Dense", activation=function("builtins", "exec"))),
    "marshalled code": sequential(layer("keras.layers", "Dense", activation={"class_name": "__lambda__"})),
    "another module": sequential(layer("subprocess", "Popen", args=["id"])),
    "an unknown module": sequential(layer("my_layers", "Layer")),
    "a function that loads": sequential(layer("keras.utils", "get_file")),
    "a setting": sequential(function("keras.config", "enable_unsafe_deserialization")),
    "a layer that loads": sequential(layer("keras.layers", "TFSMLayer", filepath="/x")),
    "a file of words": sequential(layer("keras.layers", "StringLookup", vocabulary="/etc/passwd")),
    "a function of TensorFlow": json.dumps({"class_name": "TFOpLambda", "config": {"function": "io.read_file"}}),
    "an optimizer": json.dumps({"compile_config": {"optimizer": layer("my_module", "Adam")}}),
}
SOUND = {
    "layers": sequential(layer("keras.layers", "Dense", kernel=layer("keras.initializers", "Zeros", seed=None))),
    "functions": sequential(layer("keras.layers", "Dense", activation=function("builtins", "swish"))),
    "operations": json.dumps(layer("keras.src.models.functional", "Functional", x=layer("keras.src.ops.numpy", "Add"))),
    "Keras 2": json.dumps([{"class_name": "Model"}, {"class_name": "TFOpLambda", "config": {"function": "math.add"}}]),
    "words": sequential(layer("keras.layers", "StringLookup", vocabulary=["a"])),
}  # fmt: skip
HDF5 = b"\x89HDF\r\n\x1a\n\0"
CARRIERS = {
    "Keras 3": ("x.keras", lambda text: zipped({"config.json": text, "metadata.json": "{}"}, zipfile.ZIP_DEFLATED)),
    "JSON": ("config.json", str.encode),
    "UTF-16": ("x", lambda text: text.encode("utf-16")),
    "HDF5": ("x", lambda text: HDF5 + bytes(3000) + text.encode() + bytes(10)),
    "HDF5 after a user block": ("x.h5", lambda text: b"{[".ljust(512) + HDF5 + text.encode() + bytes(10)),
    "a protobuf": ("keras_metadata.pb", lambda text: b"\x08\x01\x12{" + text.encode() + b"\x1a\x03abc"),
}  # fmt: skip


@pytest.mark.parametrize("carrier", CARRIERS)
def test_configs_of_keras_are_parsed(carrier, tmp_path):
    name, wrap = CARRIERS[carrier]
    for label, text in {**RUNNING, **SOUND}.items():
        (tmp_path / name).write_bytes(wrap(text))
        report = safeload.scan(tmp_path / name)
        assert (label, report.ok) == (label, label in SOUND), report


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.gz", gzip.compress(FINE) + b"other bytes", "cannot be unpacked"),
        ("x.gz", gzip.compress(FINE)[:-4], "cut off"),
        ("x.lz", b"LZIP\x01" + bytes(50), "lzip"),
        ("x", b"\x52\x2a\x4d\x18\x02\0\0\0ab\x28\xb5\x2f\xfd", "in frames"),
        ("x.tar", tarred(FINE, type=tarfile.LNKTYPE), "readers disagree"),
        ("x.tar", tarred(FINE, type=tarfile.GNUTYPE_SPARSE), "sparse"),
        ("x.tar", tarred(FINE, format=PAX, pax_headers={"GNU.sparse.size": "9"}), "sparse"),
        ("x.npy", npy("'nonsense'", FINE), "the header of its array cannot be read"),
        ("x.zip", zipped({"a": FINE}, zipfile.ZIP_LZMA), "compression method 14"),
        ("x.dat", b"N0p" + b"1" * 20_000 + b"\n.", "digits"),
    ],
)
def test_what_readers_may_see_otherwise_is_unknown(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    report = safeload.scan(tmp_path / name)
    assert report.verdict == "unknown"
    assert any(reason in fault for _, fault in report.unreadable), report


def test_a_pickle_that_sets_attributes_of_a_class_is_dangerous(tmp_path):
    (tmp_path / "x.pkl").write_bytes(b"ccollections\nOrderedDict\nN}K\x01Ns\x86b.")
    assert safeload.scan(tmp_path / "x.pkl").verdict == "dangerous"


NOISE = random.Random(5).randbytes(3000)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"cat\ndog\nmouse\n"), ("x.md", b"coco\n====\n\nmodel\n"), ("x.txt", b"(hello)\nisk\nx\n"),
        ("x.safetensors", struct.pack("<Q", 0x178) + b'{"__metadata__":{}}'.ljust(0x178)),  # begins as zlib does
        ("x.safetensors", struct.pack("<Q", 0x170) + b'{"__metadata__":{}}'.ljust(0x170)),  # begins as PUT does
        ("x.gguf", b"GGUF\x03\0\0\0" + struct.pack("<QQ", 3, 5) + bytes(99)),
        ("x.npy", npy("'<i8'", bytes(16), "(2L,)")), ("x.npy", npy("[('a', '<f4'), ('Object', '<i4')]", bytes(8))),
        ("x.npy", npy("'<f4'", b"\x93\x93\x93\x93")),
        ("x.npz", zipped({"a.npy": npy("'<f4'", bytes(4)), "b.npy": npy("'<U3'", bytes(12))}, zipfile.ZIP_DEFLATED)),
        ("x.zip", zipped({})),
        ("x.pt", zipped({"x/data.pkl": FINE, "x/data/0": NOISE, "x/data/1": b"\0cos\nsystem\n)R."})),
        ("x.tar", tarred(FINE, format=PAX, mtime=1.5)), ("x.tar", tarred(b"", type=tarfile.SYMTYPE, linkname="a")),
        ("x.gz", gzip.compress(FINE) + bytes(100)), ("x.bin", b"\x0d" + bytes(100)), ("x.bin", NOISE),
        ("x.json", b'{"class_name": "cat", "model": ["dog"]}'), ("x.msgpack", b"\x84\xa5\xa4" + NOISE),
    ],
)  # fmt: skip
def test_files_that_only_resemble_code_stay_harmless(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    report = safeload.scan(tmp_path / name)
    assert report.ok, report


def local_headers(count):
    return struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, *[0] * 9) * count


def overlapping(count):
    """Entries of a zip archive that begin together and end one after another."""
    content = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, *[0] * 9) + b"\x80\x04" + b"N0" * 10_000
    listed = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 9000 + k, 0, *[0] * 7) for k in range(count)
    )
    return content + listed + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(listed), len(content), 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.pt", local_headers(1000)), ("x.zip", overlapping(300)),
        ("x.zip", zipped({"a": FINE}) + zipped({})[-22:] * 3000), ("x.bin", b"x" + b"\x80\x02" * 10_000),
        ("x.json", b'[{"class_name": 1},' * 10_000), ("x.json", (b"{" * 60 + b'{"class_name": 1}') * 1000),
        ("x.gz", gzip.compress(b"") * 10_000), ("x.npy", npy("'<f4'", bytes(4)) * 2000),
        ("x.bin", b"xcos\nsystem\n" * 5000),
    ],
)  # fmt: skip
def test_work_is_in_proportion_to_the_file(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    safeload.scan(io.BytesIO(b""))
    began = time.process_time()
    report = safeload.scan(tmp_path / name)
    assert time.process_time() - began < 0.5 + len(content) / 20_000
    assert len(report.unreadable) < 2500


FRAME = b"\x95" + bytes(8)


@pytest.mark.parametrize("before", [b"", b"x"])
@pytest.mark.parametrize("unit", [b"\x80\x04", b"\x80\x02\x80\x05", b"\x80\x04" + FRAME, FRAME + b"\x80\x03"])
def test_a_run_of_protocols_is_followed_once(unit, before, tmp_path):
    (tmp_path / "x.bin").write_bytes(before + unit * 2000)
    report = safeload.scan(tmp_path / "x.bin")
    assert not [fault for _, fault in report.unreadable if "opcodes" in fault]
    (tmp_path / "x.bin").write_bytes(before + unit * 2000 + b"cos\nsystem\n(S'true'\ntR." + unit * 10)
    assert safeload.scan(tmp_path / "x.bin").verdict == "dangerous"
    (tmp_path / "x.bin").write_bytes(before + unit * 2000 + b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.")
    assert safeload.scan(tmp_path / "x.bin").verdict == "dangerous"


def test_tensors_of_any_values_are_harmless(tmp_path):
    values = np.random.default_rng(3)
    drawn = values.standard_normal((600, 50)), values.integers(0, 50_000, (600, 50)), values.integers(0, 127, (600, 50))
    dtypes = ("<f4", "<f2"), ("<i8", "<u2"), ("u1", "<i4")
    tensors = [
        row.astype(dtype).tobytes()
        for rows, kinds in zip(drawn, dtypes, strict=True)
        for dtype in kinds
        for row in rows
    ]
    zipped_tensors = zipped({"x/data.pkl": FINE, **{f"x/data/{k}": content for k, content in enumerate(tensors)}})
    for name, content in {
        "x.pt": zipped_tensors,
        "x.bin": b"".join(tensors),
        "x.gguf": gguf(b"".join(tensors)),
    }.items():
        (tmp_path / name).write_bytes(content)
        report = safeload.scan(tmp_path / name)
        assert report.ok, report


@pytest.mark.parametrize(
    "source",
    [
        "collections.py",
        "collections/__init__.py",
        "collections/abc.py",
        "torch/_utils.py",
        "torch/__init__.py",
        "numpy/core/multiarray.py",
        "builtins.py",
        "__builtin__.py",
        "_codecs.py",
        "pathlib.py",
    ],
)
@pytest.mark.parametrize("listing", ["extern_modules", "EXTERN_MODULES"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_packages_that_replace_an_allowed_module_are_not_harmless(source, listing, method, tmp_path):
    entries = {f"x/.data/{listing}": b"", f"x/{source}": b"pass\n", "x/m/m.pkl": FINE}
    for name, content in {"x.pt": zipped(entries, method), "x.tar": tarred(zipped(entries, method))}.items():
        (tmp_path / name).write_bytes(content)
        report = safeload.scan(tmp_path / name)
        assert report.verdict == "unknown", report
        assert source.split("/")[0].removesuffix(".py") in str(report)


@pytest.mark.parametrize("source", ["helpers.py", "model/torch.py", "collections/data.txt", "collections2.py"])
def test_packages_with_other_sources_are_judged_by_their_pickles(source, tmp_path):
    entries = {"x/.data/extern_modules": b"", f"x/{source}": b"pass\n", "x/m/m.pkl": FINE}
    (tmp_path / "x.pt").write_bytes(zipped(entries))
    assert safeload.scan(tmp_path / "x.pt").ok


def test_sources_outside_a_package_replace_no_module(tmp_path):
    (tmp_path / "x.pt").write_bytes(zipped({"x/collections.py": b"pass\n", "x/m/m.pkl": FINE}))
    assert safeload.scan(tmp_path / "x.pt").ok


def test_a_text_of_many_names_takes_time_in_proportion(tmp_path):
    """Each name begins a text that does what the text before it has done."""
    (tmp_path / "x").write_bytes(b"cos\nx\n" * 10_000 + b"cos\nsystem\n(Vecho\ntR")
    began = time.process_time()
    assert safeload.scan(tmp_path / "x").verdict == "dangerous"
    assert time.process_time() - began < 3
