"""`safeload.scan` and `safeload scan`: every pickle is found and judged, nothing runs, and nothing takes for ever."""

import bz2
import collections
import datetime
import decimal
import functools
import gzip
import io
import json
import lzma
import os
import pickle
import pickletools
import random
import struct
import sys
import tarfile
import time
import zipfile
import zlib

import numpy as np
import pytest
from builders import inside
from builders.inside import main
from builders.paths import ROOT
from builders.thorough import examples

import safeload
from safeload.numpy import save

pytestmark = pytest.mark.no_core


def call(name, argument="echo owned", protocol=0):
    """A pickle that calls a function with a text."""
    module, _, function = name.rpartition(".")
    if protocol == 0:
        return f"c{module}\n{function}\n(V{argument}\ntR.".encode()
    texts = [text.encode() for text in (module, function, argument)]
    pushed = [b"\x8c" + bytes([len(text)]) + text + b"\x94" for text in texts]
    return b"\x80\x04" + pushed[0] + pushed[1] + b"\x93" + pushed[2] + b"\x85R."


EVIL, EVIL0 = call("os.system", protocol=4), call("os.system")
FINE = pickle.dumps({"a": [1, 2.5, "x"]}, 4)


def zipped(entries, method=zipfile.ZIP_STORED, prefix=b""):
    memory = io.BytesIO(prefix)
    memory.seek(len(prefix))
    with zipfile.ZipFile(memory, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return memory.getvalue()


def tarred(entries, mode="w"):
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode=mode) as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def npy(content):
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def legacy(content):
    parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(part, 2) for part in parts) + content + pickle.dumps([], 2)


def hidden_from_the_directory(content):
    """An archive of two entries, of which the directory lists one."""
    data = bytearray(zipped({"data.pkl": FINE, "other.pkl": content}))
    end = data.rindex(b"PK\x05\x06")
    second = data.rindex(b"PK\x01\x02")
    size, _ = struct.unpack_from("<II", data, end + 12)
    struct.pack_into("<HHI", data, end + 8, 1, 1, size - (end - second))
    del data[second:end]
    return bytes(data)


def marked_as_encrypted(content):
    data = bytearray(zipped({"data.pkl": content}, zipfile.ZIP_DEFLATED))
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(magic) + at] |= 1
    return bytes(data)


RAW = random.Random(1).randbytes(5000).replace(b"\x80", b"\x81")

PLACES = {
    "a pickle": ("x.pkl", lambda p: p, ""),
    "any suffix": ("x.txt", lambda p: p, ""),
    "no suffix": ("x", lambda p: p, ""),
    "safetensors by name only": ("x.safetensors", lambda p: p, ""),
    "a torch archive": ("x.pt", lambda p: zipped({"x/data.pkl": p, "x/data/0": RAW, "x/version": b"3"}), "x/data.pkl"),
    "a legacy torch file": ("x.pt", lambda p: legacy(p) + RAW, ""),
    "an old torch file": ("x.pt", lambda p: tarred({"sys_info": FINE, "pickle": p}), "pickle"),
    "an npy file": ("x.npy", npy, ""),
    "an npz file": ("x.npz", lambda p: zipped({"a.npy": npy(p)}, zipfile.ZIP_DEFLATED), "a.npy"),
    "gzip": ("x.pkl.gz", gzip.compress, ""),
    "zlib, as joblib": ("x.joblib", lambda p: zlib.compress(p, 3), ""),
    "bzip2": ("x.joblib", bz2.compress, ""),
    "xz": ("x.joblib", lzma.compress, ""),
    "lzma": ("x.joblib", lambda p: lzma.compress(p, lzma.FORMAT_ALONE), ""),
    "two streams of gzip": ("x.gz", lambda p: gzip.compress(gzip.compress(p)), ""),
    "a nemo file": ("x.nemo", lambda p: tarred({"m": b"a: 1", "w": zipped({"w/data.pkl": p})}), "w/w/data.pkl"),
    "a compressed nemo file": ("x.nemo", lambda p: tarred({"./w.ckpt": p}, "w:gz"), "./w.ckpt"),
    "a keras file": ("x.keras", lambda p: zipped({"config.json": b"{}", "x.pkl": p}), "x.pkl"),
    "a torch package": ("x.pt", lambda p: zipped({"x/.data/version": b"6", "x/model/m": p}), "x/model/m"),
    "archives in archives": ("x", lambda p: zipped({"a.tar": tarred({"b.zip": zipped({"c": p})})}), "a.tar/b.zip/c"),
    "an entry without a suffix": ("x.zip", lambda p: zipped({"weights": p}), "weights"),
    "bzip2 in zip": ("x.zip", lambda p: zipped({"a": p}, zipfile.ZIP_BZIP2), "a"),
    "an entry that the directory hides": ("x.zip", hidden_from_the_directory, "other.pkl"),
    "an entry marked as encrypted": ("x.zip", marked_as_encrypted, "data.pkl"),
    "an archive after other bytes": ("x.zip", lambda p: zipped({"a": p}, prefix=RAW), "a"),
    "a truncated archive": ("x.zip", lambda p: zipped({"a.pkl": p})[:-30], "a.pkl"),
    "after another pickle": ("x.pkl", lambda p: FINE + p, ""),
    "after five others": ("x.pkl", lambda p: FINE * 5 + p + FINE, ""),
    "a broken pickle after it": ("x.pkl", lambda p: p + b"\x80\x04\xff", ""),
    "before an archive": ("x.bin", lambda p: p + zipped({"data.pkl": FINE}), ""),
}  # fmt: skip


def scanned(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return safeload.scan(tmp_path / name)


@pytest.mark.parametrize("payload", [EVIL, EVIL0], ids=["protocol 4", "protocol 0"])
@pytest.mark.parametrize("case", PLACES)
def test_a_pickle_is_found_wherever_it_is(case, payload, tmp_path):
    name, wrap, place = PLACES[case]
    report = scanned(tmp_path, name, wrap(payload))
    assert report.verdict == "dangerous", report
    assert ("os.system", place) in {(f.name, f.place) for f in report.findings}
    assert {f.name for f in report.findings} == {"os.system"}
    assert report.status == 2
    assert not report


@pytest.mark.parametrize(
    "case", [case for case in PLACES if "truncated" not in case and "broken" not in case and "encrypted" not in case]
)
def test_a_harmless_pickle_is_harmless_wherever_it_is(case, tmp_path):
    name, wrap, _ = PLACES[case]
    report = scanned(tmp_path, name, wrap(FINE))
    assert (report.verdict, report.unreadable, report.status, bool(report)) == ("harmless", [], 0, True)
    assert report.pickles > 0


def test_a_binary_pickle_at_an_offset_is_found(tmp_path):
    report = scanned(tmp_path, "x.dat", RAW + EVIL + RAW)
    [finding] = report.findings
    assert (finding.verdict, finding.offset) == ("dangerous", len(RAW))
    report = scanned(tmp_path, "y.dat", RAW + EVIL0 + RAW)
    [finding] = report.findings
    assert (finding.verdict, finding.offset) == ("dangerous", len(RAW))


def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


# Ways to name os.system, and what a list of them must say.
TRICKS = {
    "from the memo": short("os") + b"\x94" + short("system") + b"\x940" + b"0h\x00h\x01\x93",
    "from a far memo": short("os") + b"r\xff\xff\xff\x7f" + short("system") + b"q\x0500j\xff\xff\xff\x7fh\x05\x93",
    "from a memo number as text": short("os") + b"p99\n" + short("system") + b"p98\n00g99\ng98\n\x93",
    "a memo number that changes": short("x") + b"q\x000" + short("os") + b"q\x00" + short("system") + b"\x93",
    "by a duplicate": short("system") + b"0" + short("os") + short("system") + b"2" + b"0\x93",
    "behind a mark": b"(" + short("a") + b"1" + short("os") + short("system") + b"\x93",
    "in strings of Python 2": b"S'o\\x73'\nU\x06system\x93",
    "in unicode lines": b"Vo\\u0073\nVsystem\n\x93",
    "in long texts": b"X\x02\0\0\0os\x8d\x06\0\0\0\0\0\0\0system\x93",
    "in frames": b"\x95\x05\0\0\0\0\0\0\0" + short("os") + b"\x95\0\0\0\0\0\0\0\0" + short("system") + b"\x93",
    "by INST": b"(ios\nsystem\n",
    "by OBJ": b"(cos\nsystem\n" + short("x") + b"o",
    "after an empty stack": b"0000" + short("os") + short("system") + b"\x93",
    "after memo numbers that were never set": b"h\x07" + short("os") + short("system") + b"\x93",
    "after buffers": b"\x97\x98" + short("os") + short("system") + b"\x93",
    "after a persistent id": b"Pxyz\n" + short("os") + short("system") + b"\x93",
}  # fmt: skip


@pytest.mark.parametrize("case", TRICKS)
@pytest.mark.parametrize("proto", [b"", b"\x80\x04"], ids=["bare", "with a protocol"])
def test_no_trick_hides_a_name(case, proto, tmp_path):
    report = scanned(tmp_path, "x.pkl", proto + TRICKS[case] + b".")
    assert ("os.system", "dangerous") in [(f.name, f.verdict) for f in report.findings]


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        (b"K\x2a" + short("os") + b"\x93.", "dangerous"),  # a module that is a number
        (b"ccopy\ncopy\n" + short("os") + b"\x85R" + short("system") + b"\x93.", "dangerous"),  # computed
        (b"\x82\x07.", "unknown"),
        (b"\x83\x07\x07.", "unknown"),
        (b"\x84\x07\x07\x07\x07.", "unknown"),
        (b"cbuiltins\ngetattr\n(cos\npath\nVsep\ntR.", "dangerous"),  # a module is a reason in itself
        (b"cbuiltins\ngetattr\n(cmy.module\nOuter\nVInner\ntR.", "unknown"),  # how nested classes are pickled
        (b"cbuiltins\ngetattr\n(cmy.module\nf\nV__globals__\ntR.", "dangerous"),
        (b"cbuiltins\ngetattr\n(cmy.module\nos\nVsystem\ntR.", "dangerous"),
        (b"cbuiltins\nmap\n(cbuiltins\ngetattr\n]tR.", "dangerous"),  # getattr handed on
        (b"clogging\nos.system\n.", "dangerous"),
        (b"ctorch._utils\n_rebuild_tensor.__globals__\n.", "dangerous"),
        (b"cnumpy\nmemmap\n.", "harmless"),
        (b"cnumpy\nmemmap\n(V/tmp/x\nVu1\nVw+\ntR.", "dangerous"),  # creates a file
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(cnumpy\nmemmap\nctorch\nTensor\n(V/x\nVu1\nVw+\nt}tR.", "dangerous"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nctorch\nTensor\n(]t}tR.", "harmless"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(Nctorch\nTensor\n)}tR.", "dangerous"),  # hides what it calls
        (b"ctorch._tensor\n_rebuild_from_type_v2\n)R.", "dangerous"),
        (b"ccollections\nOrderedDict\n)R.", "harmless"),
        (b"ccollections\nCounter\n)R.", "harmless"),
        (b"ccollections\ndeque\n)R.", "unknown"),
        (b"csklearn.svm._classes\nSVC\n)\x81.", "unknown"),
        (b"N.", "harmless"),
    ],
)
def test_what_a_pickle_names_has_the_right_verdict(content, verdict, tmp_path):
    assert scanned(tmp_path, "x.pkl", content).verdict == verdict


# Globals that public scanners call dangerous, by their own test suites.
LISTED = [
    "__builtin__.eval", "builtins.exec", "builtins.compile", "builtins.open", "builtins.breakpoint",
    "builtins.__import__", "posix.system", "nt.system", "subprocess.run", "socket.create_connection", "sys.exit",
    "runpy._run_code", "pickle.loads", "_pickle.loads", "bdb.Bdb", "pip.main", "pydoc.pipepager", "venv.create",
    "httplib.HTTPSConnection", "requests.api.get", "aiohttp.client.ClientSession", "operator.attrgetter",
    "_operator.methodcaller", "torch._inductor.codecache.compile_file", "torch.serialization.load",
    "types.CodeType", "ctypes.CDLL", "cProfile.run", "profile.Profile.run",
    "idlelib.pyshell.ModifiedInterpreter.runcode", "trace.Trace.run", "code.InteractiveInterpreter.runcode",
    "doctest.debug_script", "torch.utils.collect_env.run", "numpy.f2py.crackfortran.getlincoef",
    "numpy.testing._private.utils.runstring", "timeit.timeit", "pty.spawn", "distutils.file_util.write_file",
    "lib2to3.pgen2.grammar.Grammar.loads", "pkgutil.resolve_name", "ensurepip._run_pip", "_io.FileIO",
    "torch.utils._config_module.ConfigModule.load_config", "urllib.request.urlopen", "logging.FileHandler",
    "imaplib.IMAP4_stream", "uuid._get_command_stdout", "_osx_support._read_output",
    "_aix_support._read_cmd_output", "_pyrepl.pager.pipe_pager", "ssl.get_server_certificate",
    "test.support.script_helper.assert_python_ok", "asyncio.unix_events._UnixSubprocessTransport._start",
    "shutil.rmtree", "webbrowser.open", "cloudpickle.cloudpickle._make_function",
    "torch.jit.unsupported_tensor_ops.execWrapper", "torch._dynamo.guards.GuardBuilder.get"
]  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_what_public_scanners_call_dangerous_is_dangerous(name, tmp_path):
    for protocol in (0, 4):
        report = scanned(tmp_path, "x.pkl", call(name, protocol=protocol))
        assert [(f.name, f.verdict) for f in report.findings] == [(name, "dangerous")]
        assert report.findings[0].reason


class Colour(__import__("enum").Flag):
    RED = 1
    BLUE = 2


class Outer:
    class Inner:
        pass

    def method(self):
        pass


SOUND = [
    {"a": np.arange(5), "b": np.float32(2)}, np.array([1, None, "x"], object), functools.partial(max, 1), Outer.Inner,
    Outer().method, Colour.RED | Colour.BLUE, collections.Counter("abc"), datetime.datetime(2020, 1, 1),
    decimal.Decimal("1.5"),
    {frozenset((1, 2)): bytearray(b"x"), 3.5: {4, 5}}, [2**100, -1, "é" * 300, b"\x80\x04" * 50],
    np.random.default_rng(0),
]  # fmt: skip


class Recording(pickle.Unpickler):
    """Python's own reader, which says what it looks up."""

    def __init__(self, file):
        super().__init__(file)
        self.names = set()

    def find_class(self, module, name):
        self.names.add(f"{module}.{name}")
        return super().find_class(module, name)


@pytest.mark.parametrize("protocol", range(6))
def test_the_names_are_those_that_python_looks_up(protocol, tmp_path):
    for value in SOUND:
        content = pickle.dumps(value, protocol)
        reader = Recording(io.BytesIO(content))
        reader.load()
        report = scanned(tmp_path, "x.pkl", content)
        names = {finding.name for finding in report.findings} - {f"{__name__}.Outer.Inner"}  # by getattr
        assert names == reader.names - {f"{__name__}.Outer.Inner"}
        assert report.verdict in ("harmless", "unknown")
        assert report.unreadable == []


def with_length(width):
    """A length and as many bytes of ASCII, which pickletools decodes."""

    def make(rng):
        size = int(rng.choice((0, 3, 40) if width == 1 else (0, 3, 2000)))
        return size.to_bytes(width, "little") + b"." * size

    return make


ARGUMENTS = {
    **{f"uint{width}": lambda rng, width=width: rng.bytes(width) for width in (1, 2, 4, 8)},
    **{f"{kind}1": with_length(1) for kind in ("long", "string", "bytes", "unicodestring")},
    **{f"{kind}4": with_length(4) for kind in ("long", "string", "bytes", "unicodestring")},
    **{f"{kind}8": with_length(8) for kind in ("bytes", "bytearray", "unicodestring")},
    "int4": lambda rng: rng.bytes(4),
    "float8": lambda rng: rng.bytes(8),
    "floatnl": lambda rng: b"1.5\n",
    "decimalnl_short": lambda rng: b"%d\n" % rng.integers(0, 100),
    "decimalnl_long": lambda rng: b"%dL\n" % rng.integers(-100, 100),
    "stringnl": lambda rng: b"'a\\n\\'%d'\n" % rng.integers(0, 100),
    "stringnl_noescape": lambda rng: b"id%d\n" % rng.integers(0, 100),
    "stringnl_noescape_pair": lambda rng: b"m%d\nf\n" % rng.integers(0, 100),
    "unicodestringnl": lambda rng: b"\\u1234 %d\n" % rng.integers(0, 100),
    None: lambda rng: b"",
}


def test_any_opcodes_are_decoded_as_the_standard_library_does(tmp_path):
    """Only a reader that finds the end of each argument meets the globals of pickletools and no others."""
    rng = np.random.default_rng(7)
    opcodes = [opcode for opcode in pickletools.opcodes if opcode.name not in ("STOP", "PROTO")]
    for _ in range(examples(150)):
        content = b"\x80\x04"
        for k in rng.integers(0, len(opcodes), 30):
            content += opcodes[k].code.encode("latin-1") + ARGUMENTS[opcodes[k].arg and opcodes[k].arg.name](rng)
        content += b"cwitness\nlast\n."
        expected = {
            argument.replace(" ", ".")
            for opcode, argument, _ in pickletools.genops(content)
            if opcode.name in ("GLOBAL", "INST")
        }
        report = scanned(tmp_path, "x.pkl", content)
        others = ("extension code", "<computed>", "<not text>")  # named by other opcodes
        assert {f.name for f in report.findings if not f.name.startswith(others)} == expected, content


def test_files_of_joblib_are_followed_through_their_arrays(tmp_path):
    joblib = pytest.importorskip("joblib")
    value = {"a": np.ones((3, 4), np.float32), "o": np.array([{"x": np.ones(3)}], object), "s": np.array(["a", "bc"])}
    for compress in (0, 3, ("bz2", 3), ("xz", 3), ("gzip", 3)):
        joblib.dump([value, Outer.Inner], tmp_path / "x.joblib", compress=compress)
        report = safeload.scan(tmp_path / "x.joblib")
        assert (report.verdict, report.unreadable) == ("unknown", [])
        assert f"{__name__}.Outer.Inner" in {f.name for f in report.findings}  # it comes after the arrays


def wrapped_array(array, protocol=4):
    """What joblib writes for an array: its description, then its bytes between the opcodes."""
    state = {"shape": array.shape, "dtype": array.dtype, "numpy_array_alignment_bytes": 16}
    described = pickle.dumps(state, protocol)
    body = described[2:-1] if protocol < 4 else described[11:-1]
    return b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81" + body + b"b" + b"\x03\xff\xff\xff" + array.tobytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_follows_an_array_of_joblib_is_judged(protocol, tmp_path):
    array = np.frombuffer(b"." * 64, np.float64)  # bytes that would end the pickle if they were opcodes
    content = b"\x80" + bytes([protocol]) + wrapped_array(array, protocol) + b"0" + EVIL0
    assert scanned(tmp_path, "x.joblib", content).findings[0].name == "os.system"


def wrapped_state(items, name=b"joblib.numpy_pickle\nNumpyArrayWrapper"):
    """The description of an array by its attributes, each a pickle of protocol 2 without its frame."""
    pairs = b"".join(b"U%c%s%s" % (len(name), name, value) for name, value in items.items())
    return b"\x80\x02c" + name + b"\n)\x81}(" + pairs + b"ub"


def bare(value):
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


F8, TWO, FOUR = bare(np.dtype("f8")), bare((2,)), bare((4,))
HIDING = {  # attributes of 32 bytes of elements, by the rules of joblib and NumPy
    "an alignment that is not an integer": {b"dtype": F8, b"shape": FOUR, b"numpy_array_alignment_bytes": b"F16.0\n"},
    "fields with objects": {b"dtype": bare(np.dtype([("a", "O")])), b"shape": FOUR},
    "a flag of objects": {b"dtype": F8.replace(b"K\0tb", b"K\x3ftb"), b"shape": FOUR},
    "another size": {b"dtype": bare(np.dtype("S8")).replace(b"K\x08K\1K\0", b"K\x10K\1K\0"), b"shape": TWO},
    "a key that equals a text": {b"dtype": F8, b"shape": TWO + bare(np.str_("shape")) + FOUR},
    "many items": {
        b"dtype": F8,
        b"shape": TWO + b"u(" + b"".join(b"I%d\nN" % k for k in range(17)) + b"U\5shape" + FOUR,
    },
}


@pytest.mark.parametrize("case", HIDING)
def test_the_size_of_an_array_of_joblib_is_that_of_its_readers(case, tmp_path):
    """16 bytes that a scan of 16 bytes skips, then opcodes that end a pickle unless they are elements too."""
    hidden = EVIL[2:-1] + b"0N." if "object" in case else b"." * 16 + EVIL[2:]
    padding = b"\0" if "alignment" in case else b""
    content = wrapped_state(HIDING[case]) + padding + b"." * 16 * ("object" not in case) + hidden
    report = scanned(tmp_path, "x.joblib", content)
    assert report.unreadable or "os.system" in {f.name for f in report.findings}, report


def test_arrays_of_any_module_that_has_the_class_of_joblib_are_skipped(tmp_path):
    for name in (b"joblib.numpy_pickle\nNumpyArrayWrapper", b"joblib._store_backends\nnumpy_pickle.NumpyArrayWrapper"):
        content = wrapped_state({b"dtype": F8, b"shape": TWO}, name) + b"0N." + b"." * 13 + b"0" + EVIL[2:]
        assert "os.system" in {f.name for f in scanned(tmp_path, "x.joblib", content).findings}


@pytest.mark.parametrize("alignment", [b"N", b"K\x10"])
def test_an_array_of_joblib_is_also_read_as_the_opcodes_that_pickle_takes_it_for(alignment, tmp_path):
    items = {b"dtype": F8, b"shape": FOUR, b"numpy_array_alignment_bytes": alignment}
    content = wrapped_state(items) + b"0N" * (alignment != b"N") + EVIL0.ljust(80, b".")
    assert "os.system" in {f.name for f in scanned(tmp_path, "x.pkl", content).findings}


def test_structured_arrays_of_joblib_are_skipped(tmp_path):
    joblib = pytest.importorskip("joblib")
    for dtype in ([("a", "<f4"), ("b", "S3")], [("a", "O"), ("b", "<i4")], "S5", "U3", ">i2"):
        joblib.dump([np.zeros(3, dtype), Outer.Inner], tmp_path / "x.joblib")
        report = safeload.scan(tmp_path / "x.joblib")
        assert report.unreadable == []
        assert f"{__name__}.Outer.Inner" in {f.name for f in report.findings}


def test_a_torch_file_inside_a_pickle_is_judged(tmp_path):
    inner = zipped({"x/data.pkl": EVIL})
    content = b"\x80\x04ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(inner)) + inner + b"\x85R."
    report = scanned(tmp_path, "x.pkl", content)
    assert {(f.name, f.verdict) for f in report.findings} == {
        ("torch.storage._load_from_bytes", "unknown"),
        ("os.system", "dangerous"),
    }


@pytest.mark.parametrize("name", ["x.keras", "saved_model.pb", "config.json", "x.h5"])
def test_lambda_layers_of_keras_are_code(name, tmp_path):
    config = b'{"class_name": "Sequential", "config": {"layers": [{"class_name": "Lambda", "config": {}}]}}'
    content = zipped({"config.json": config}) if name == "x.keras" else config
    content = b"\x89HDF\r\n\x1a\n" + bytes(100) + config if name == "x.h5" else content
    report = scanned(tmp_path, name, content)
    assert (report.verdict, report.findings[0].name) == ("dangerous", "a Keras Lambda layer, which holds code")
    assert scanned(tmp_path, name, content.replace(b"Lambda", b"Dense!")).verdict == "harmless"


def test_nothing_is_imported_or_run(tmp_path):
    (tmp_path / "scan_me_not.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    sys.path.insert(0, str(tmp_path))
    try:
        report = scanned(tmp_path, "a.pkl", call("scan_me_not.f", protocol=4))
        report.add(scanned(tmp_path, "b.pkl", call("os.system", f"touch {tmp_path / 'run'}")))
    finally:
        sys.path.remove(str(tmp_path))
    assert report.verdict == "dangerous"
    assert "scan_me_not" not in sys.modules
    assert sorted(os.listdir(tmp_path)) == ["a.pkl", "b.pkl", "scan_me_not.py"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.pkl", EVIL[:-5].replace(b"os", b"xx"), "malformed"),
        ("x.pkl", b"\x80\x04\xff.", "0xff is not an opcode"),
        ("x.pkl", b"\x80\x04B\xff\xff\xff\xff", "extends past the end"),
        ("x.pkl", b"\x80\x04]r", "end before"),
        ("x.7z", b"7z\xbc\xaf\x27\x1c" + bytes(50), "a 7z archive"),
        ("x.rar", b"Rar!\x1a\x07\x00" + bytes(50), "a RAR archive"),
        ("x.zst", b"\x28\xb5\x2f\xfd" + bytes(50), "zstd"),
        ("x.gz", gzip.compress(FINE)[:-20], ""),
        ("x.gz", b"\x1f\x8b\x08" + bytes(30), "cannot be unpacked"),
        ("x.zip", marked_as_encrypted(b"hello"), "it is encrypted"),
        ("x.zip", zipped({"a.txt": b"hello" * 50})[:200], "no directory"),
        ("x.npy", npy(b"\x80\x04\xff"), "malformed"),
        ("x.tar", tarred({"a": b"x"})[:124] + b"zzzzzzzzzzzz" + tarred({"a": b"x"})[136:], "malformed header"),
    ],
)
def test_what_cannot_be_judged_is_unknown(name, content, reason, tmp_path):
    report = scanned(tmp_path, name, content)
    assert (report.verdict, report.status) == ("unknown", 1)
    assert reason in report.unreadable[0][1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"import os\nimport sys\ncos\nsin\n"), ("x.md", b"(hello)\n" * 99), ("x.bin", bytes(9999)),
        ("x.bin", RAW), ("x.safetensors", save({"a": np.frombuffer(EVIL * 4, np.uint8)})), ("x", b""),
        ("x.pkl.txt", b"}"), ("x.npy", npy(FINE)),
        ("x.pkl", b"S'\\q\\777'\n."),
        ("x.json", b'{"a": 1}'), ("x.gguf", b"GGUF" + EVIL), ("x.dat", b"\x80\x81" * 500), ("x.bin", b".\n" * 500),
    ],
)  # fmt: skip
def test_other_files_are_harmless(name, content, tmp_path):
    report = scanned(tmp_path, name, content)
    assert (report.verdict, report.findings, report.unreadable) == ("harmless", [], [])


# ---- bounds ----


def test_a_million_opcodes_take_seconds_and_little_memory(tmp_path):
    begun = time.perf_counter()
    report = scanned(tmp_path, "x.pkl", b"\x80\x04" + b"K\x01\x94" * 500_000 + EVIL[2:])
    assert report.verdict == "dangerous"
    assert time.perf_counter() - begun < 30


def test_opcodes_are_bounded(tmp_path, monkeypatch):
    inside.tune(monkeypatch, scan_traced=1000)
    report = scanned(tmp_path, "x.pkl", b"\x80\x04" + b"N0" * 1000 + EVIL[2:])
    assert report.verdict == "unknown"
    assert "more than 1,000 opcodes" in report.unreadable[0][1]


def test_texts_in_the_memo_are_bounded(tmp_path, monkeypatch):
    inside.tune(monkeypatch, scan_texts=100)
    content = b"\x80\x04" + b"".join(b"K\x01r" + struct.pack("<I", 7 * k) for k in range(200)) + b"."
    report = scanned(tmp_path, "x.pkl", content)
    assert report.verdict == "unknown"
    assert "more than 100 values" in report.unreadable[0][1]


@pytest.mark.parametrize("sign", [1, -1])
def test_memo_numbers_cannot_collide(sign, tmp_path):
    step = (1 << 61) - 1
    content = b"".join(b"K\x01p%d\n0" % (sign * (k * step + 5)) for k in range(30_000))
    begun = time.process_time()
    assert scanned(tmp_path, "x.pkl", content + EVIL[2:]).verdict == "dangerous"
    assert time.process_time() - begun < 3


def test_a_memo_number_is_one_entry_far_and_near(tmp_path):
    """Far from the others when it is first used, and among them when it is used again."""
    content = b"\x80\x04\x8c\x02osr\x40\0\0\0" + b"".join(b"K\x01q%c0" % k for k in range(60))
    content += b"\x8c\x06systemr\x40\0\0\0\x8c\x02os\x940h\x3dh\x40\x93."
    assert [f.name for f in scanned(tmp_path, "x.pkl", content).findings] == ["os.system"]


def colliding_entries(count):
    """A file with directories whose pairs of an offset and a shift have one hash."""
    first, second, fifth, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    inverse, at, pairs = pow(second, -1, 1 << 64), 0, []
    while len(pairs) < count:
        mixed = (fifth + at * second) & mask
        mixed = ((mixed << 31) | (mixed >> 33)) * first & mask
        shift = (0x123456789ABCDEF - mixed) * inverse & mask
        shift -= (shift >> 63) << 64
        pairs += [(at, shift)] * (abs(shift) < (1 << 61) - 1)
        at += 46 if pairs and pairs[-1][0] == at else 1
    assert len(set(map(hash, pairs))) == 1
    content = bytearray(at)
    for at, _ in pairs:
        content[at : at + 46] = b"PK\x01\x02" + bytes(42)
    for at, shift in pairs:
        end = len(content)
        content += struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, end - at, (at - shift) & mask)
        content += struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
        content += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return bytes(content)


@pytest.mark.skipif(sys.hash_info.width != 64, reason="hashes of 64 bits")
def test_entries_of_zip_archives_cannot_collide(tmp_path):
    content = colliding_entries(8_000)
    begun = time.process_time()
    scanned(tmp_path, "x.bin", content)
    assert time.process_time() - begun < 3


def test_many_beginnings_take_bounded_time(tmp_path, monkeypatch):
    inside.tune(monkeypatch, scan_opcodes=100_000)
    begun = time.perf_counter()
    for content in (
        b"x\x80\x02\xff" * 100_000,
        b"x\x80\x02V" * 100_000,
        b"x" + b"\x80\x02" * 200_000,
        b"xcos\nsystem\n" * 30_000,
    ):
        report = scanned(tmp_path, "x.dat", content)
        assert report.verdict in ("unknown", "dangerous")
        assert "more than 100,000 opcodes" in report.unreadable[-1][1]
    assert time.perf_counter() - begun < 30


@pytest.mark.parametrize(
    "wrap", [gzip.compress, bz2.compress, lzma.compress, lambda p: zipped({"a": p}, zipfile.ZIP_DEFLATED)]
)
def test_bombs_are_unpacked_up_to_a_limit(wrap, tmp_path, monkeypatch):
    inside.tune(monkeypatch, scan_unpacked=1 << 20)
    report = scanned(tmp_path, "x.gz", wrap(EVIL + bytes(20 << 20)))
    assert report.verdict == "dangerous"  # it comes first
    assert any("more than 1,048,576 bytes" in reason for _, reason in report.unreadable)


def test_all_unpacked_contents_together_are_bounded(tmp_path, monkeypatch):
    inside.tune(monkeypatch, scan_total=3 << 20)
    report = scanned(tmp_path, "x.zip", zipped({f"{k}": bytes(1 << 20) for k in range(9)}, zipfile.ZIP_DEFLATED))
    assert report.verdict == "unknown"


def test_nesting_is_bounded(tmp_path):
    content = EVIL
    for _ in range(30):
        content = zipped({"a.zip": content})
    report = scanned(tmp_path, "x.zip", content)
    assert "nested more than 8 levels" in report.unreadable[0][1]


def test_members_are_bounded(tmp_path, monkeypatch):
    inside.tune(monkeypatch, scan_members=10)
    report = scanned(tmp_path, "x.zip", zipped({f"{k}": b"x" for k in range(50)}))
    assert report.verdict == "unknown"
    assert "more than 10 members" in report.unreadable[-1][1]


def test_archives_one_after_another_are_each_entered_once(tmp_path):
    archive = zipped(
        {f"archive/{name}": content for name, content in {"data.pkl": FINE, "data/0": b"\0" + EVIL}.items()}
    )
    report = scanned(tmp_path, "x.distcp", archive * 300)
    assert (report.verdict, report.pickles, report.unreadable) == ("harmless", 300, [])
    report = scanned(tmp_path, "x.distcp", archive * 100 + zipped({"archive/data.pkl": EVIL}) + archive * 100)
    assert (report.verdict, report.pickles, report.unreadable) == ("dangerous", 201, [])


@pytest.mark.parametrize("fixture", ["plain_4", "separate_2", "old_2", "safetensors_4"])
def test_checkpoints_of_torch_distributed_are_harmless(fixture):
    report = safeload.scan(ROOT / "tests" / "data" / "dcp" / fixture)
    assert report.ok, report
    with safeload.open(ROOT / "tests" / "data" / "dcp" / fixture) as opened:
        assert 0 < report.pickles < 4 * (len(opened) + 10)


def local_headers(count, method):
    """Local headers of a zip archive that no directory lists, each before bytes that cannot be inflated."""
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, method, 0, 0, 0, 0, 0, 1, 0)
    return (header + b"a" + b"\xff" * 8) * count


def test_hidden_headers_take_bounded_time(tmp_path, monkeypatch):
    began = time.process_time()
    report = scanned(tmp_path, "x.zip", local_headers(20_000, zipfile.ZIP_DEFLATED))
    assert time.process_time() - began < 5
    assert len(report.unreadable) > 20_000
    inside.tune(monkeypatch, scan_members=10)
    report = scanned(tmp_path, "x.zip", local_headers(1000, zipfile.ZIP_DEFLATED))
    assert len(report.unreadable) < 20
    inside.tune(monkeypatch, scan_members=10_000)
    began = time.process_time()
    report = scanned(tmp_path, "x.zip", local_headers(1000, zipfile.ZIP_STORED))  # each lies in all before it
    assert time.process_time() - began < 2
    assert len(report.unreadable) < 5


def test_zeros_after_a_tar_archive_are_skipped_and_bounded(tmp_path, monkeypatch):
    content = tarred({"a.pkl": FINE}) + bytes(3 << 20) + tarred({"b.pkl": EVIL})
    report = scanned(tmp_path, "x.tar", content)
    assert (report.verdict, report.pickles, report.unreadable) == ("dangerous", 2, [])
    path = tmp_path / "sparse.tar"
    path.write_bytes(tarred({"a.pkl": FINE}))
    os.truncate(path, 1 << 40)
    inside.tune(monkeypatch, scan_searched=8 << 20)
    report = safeload.scan(path)
    assert report.verdict == "unknown"
    assert "searched for members up to byte" in report.unreadable[0][1]


def test_globals_are_bounded(tmp_path):
    content = b"".join(f"cm\nf{k}\n0".encode() for k in range(12_000))
    report = scanned(tmp_path, "x.pkl", b"\x80\x02" + content + EVIL[2:])
    assert report.verdict == "dangerous"
    assert len(report.findings) <= 10_000
    assert "more than 10,000 globals" in report.unreadable[0][1]


def test_any_bytes_give_a_report(tmp_path):
    chance = random.Random(7)
    samples = [wrap(EVIL if k % 2 else FINE) for k, (_, wrap, _) in enumerate(PLACES.values())]
    for k in range(400):
        content = bytearray(chance.choice(samples))
        for _ in range(chance.randrange(1, 8)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        report = scanned(
            tmp_path,
            f"x{chance.choice(['.pkl', '.zip', '.tar', '.npy', ''])}",
            bytes(content[: chance.choice([None, k + 1])]),
        )
        assert report.files == 1


# ---- folders, results, the command ----


def test_folders_are_searched_and_hidden_files_too(tmp_path):
    root = tmp_path / "models"
    for name, content in {"a/x.pkl": FINE, "a/.hidden/y.pkl": EVIL, "b.bin": b"x"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    if sys.platform != "win32":
        os.symlink(root, root / "a" / "loop")
        os.mkfifo(root / "pipe.pkl")
    report = safeload.scan(root)
    assert [os.path.relpath(f.path, root) for f in report.findings] == [os.path.join("a", ".hidden", "y.pkl")]
    assert report.files == 3
    assert len(report.unreadable) == (sys.platform != "win32")
    assert safeload.scan([root / "a" / "x.pkl", root / "b.bin"]).ok
    with pytest.raises(FileNotFoundError):
        safeload.scan(root / "none")
    with pytest.raises(TypeError):
        safeload.scan(5)


def test_stores_and_file_objects_are_scanned():
    filesystem = pytest.importorskip("fsspec").filesystem("memory")
    for name, content in {"a/x.pkl": EVIL, "b.bin": b"x"}.items():
        with filesystem.open(f"/scanned/{name}", "wb") as file:
            file.write(content)
    report = safeload.scan("memory://scanned")
    assert [(finding.path, finding.name) for finding in report.findings] == [("memory://scanned/a/x.pkl", "os.system")]
    assert report.files == 2
    assert safeload.scan(io.BytesIO(EVIL)).verdict == "dangerous"


def test_the_result_has_plain_rows(tmp_path, capsys):
    (tmp_path / "\x1b[1m<b>.pkl").write_bytes(call("os.system", protocol=4) + b"ccollections\nOrderedDict\n.")
    report = safeload.scan(tmp_path)
    assert [list(row) for row in report.rows()] == [["path", "place", "offset", "name", "verdict", "reason"]] * 2
    assert {type(value) for row in report.rows() for value in row.values()} == {str, int}
    assert json.loads(json.dumps(report.to_dict()))["findings"] == report.rows()
    assert [row["verdict"] for row in report.rows()] == ["dangerous", "harmless"]
    for text in (str(report), report._repr_html_(), repr(report)):
        assert "\x1b" not in text
        assert "dangerous: 2 pickles in 1 file" in text
    assert "<b>" not in report._repr_html_()
    assert main(["scan", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "os.system" in out
    assert "OrderedDict" not in out
    assert main(["scan", str(tmp_path), "--all"]) == 2
    assert "collections.OrderedDict" in capsys.readouterr().out
    assert main(["scan", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == report.to_dict()


def test_the_exit_status_is_the_worst(tmp_path, capsys):
    for name, content in {
        "fine.pkl": FINE,
        "unknown.pkl": call("m.f"),
        "evil.pkl": EVIL,
        "cut.pkl": b"\x80\x04",
    }.items():
        (tmp_path / name).write_bytes(content)
    path = {name: str(tmp_path / f"{name}.pkl") for name in ("fine", "unknown", "evil", "cut", "none")}
    for names, status in {
        "fine": 0,
        "unknown": 1,
        "evil": 2,
        "cut": 1,
        "none": 1,
        "fine unknown": 1,
        "evil fine": 2,
        "none evil": 2,
    }.items():
        assert main(["scan", *(path[name] for name in names.split())]) == status
    capsys.readouterr()
    for arguments in ([], [path["fine"], "--none"], ["\0"], [path["fine"], "--storage-option", "x"]):
        try:
            status = main(["scan", *arguments])
        except SystemExit as stop:
            status = stop.code
        assert status == 64
        assert capsys.readouterr().err
