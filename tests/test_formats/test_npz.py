"""npz archives: numpy's own, faults, and what is written."""

import errno
import io
import os
import struct
import tracemalloc
import zipfile
import zlib

import ml_dtypes
import numpy as np
import pytest
from builders.inside import npy, zips
from builders.random import rng
from builders.thorough import dealt
from builders.torch_build import Storage, tensor, zip_file

import safeload


def arrays():
    return {
        "f": rng.standard_normal((5, 7)).astype(np.float32),
        "half": rng.standard_normal(9).astype(np.float16),
        "fortran": np.asfortranarray(rng.standard_normal((4, 6, 3))),
        "scalar": np.float64(3.5),
        "empty": np.zeros((0, 4), np.int32),
        "flags": np.array([True, False, True]),
        "z": (rng.standard_normal(4) + 1j).astype(np.complex64),
        "ünï/x": np.arange(5, dtype=np.uint64),
        "one": np.asfortranarray(np.ones((1, 3), np.int8)),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.npz"


def same(got, want):
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == np.asarray(array).dtype.newbyteorder("="), name
        assert got[name].shape == np.asarray(array).shape, name
        np.testing.assert_array_equal(got[name], array)
        assert got[name].flags.aligned
        assert got[name].flags.writeable


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, lambda path, **a: npy.write_archive(a, None, path)])
def test_every_way_to_read_it(path, save):
    want = arrays()
    save(path, **want)
    with safeload.open(path) as opened:
        assert (opened.format, opened.files, len(opened)) == ("npz", [str(path)], len(want))
        same(dict(opened), want)
        same(opened.load(), want)
        same(opened.load(backend="pread"), want)
        np.testing.assert_array_equal(opened.get_slice("fortran")[1:3, ::2, -1], want["fortran"][1:3, ::2, -1])
        converted = opened.load(["fortran", "half"], dtype="bfloat16")
        np.testing.assert_array_equal(converted["fortran"], want["fortran"].astype(ml_dtypes.bfloat16))
        opened["f"][0, 0] = 77
    assert np.load(path)["f"][0, 0] != 77


def test_stored_members_are_views(path):
    np.savez(path, a=np.arange(1000.0))
    with safeload.open(path) as opened:
        assert opened["a"] is opened["a"]
        assert not opened["a"].flags.owndata or opened.tensors["a"].offset % 8


def test_numpy_reads_what_is_written(path):
    want = arrays()
    npy.write_archive(want, None, path)
    with np.load(path) as got:
        assert list(got) == list(want)
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    first = path.read_bytes()
    npy.write_archive(want, None, path)
    assert path.read_bytes() == first
    with pytest.raises(FileExistsError):
        npy.write_archive(want, None, path, overwrite=False)


def test_big_endian(path):
    np.savez(path, a=np.arange(5, dtype=">f4"), b=np.arange(3, dtype=np.int8))
    same(safeload.load(path), {"a": np.arange(5, dtype=np.float32), "b": np.arange(3, dtype=np.int8)})


BOTH_ORDERS = {
    **{f"{order}{code}": np.arange(30).reshape(5, 6).astype(f"{order}{code}") for order in "<>"
       for code in ("f2", "f4", "f8", "i2", "u4", "i8", "c8")},
    "turned": np.arange(30, dtype=">f4").reshape(6, 5).T,
    "bytes": np.arange(30, dtype="u1").reshape(5, 6),
    "empty": np.zeros((0, 6), ">f4"),
    "scalar": np.array(7, ">f8"),
}  # fmt: skip


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("backwards", [False, True])
def test_both_byte_orders(path, tmp_path, save, backwards):
    arrays = dict(sorted(BOTH_ORDERS.items(), reverse=backwards))
    save(path, **arrays)
    want = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    for backend in ("mmap", "pread", "direct"):
        same(safeload.load(path, backend=backend), want)
    with safeload.open(path) as opened:
        same(dict(opened.stream()), want)
        for name in (name for name in want if want[name].ndim == 2):
            same({"": opened.get_slice(name)[1:4, ::2]}, {"": want[name][1:4, ::2]})
        out = {name: np.empty_like(array, order="C") for name, array in want.items()}
        same(opened.load(out=out), want)
    for name, array in safeload.load(path, dtype="float32").items():
        np.testing.assert_array_equal(array, want[name])
    assert safeload.diff(path, want).same
    assert safeload.stats(path)[">f8"].max == 29
    safeload.convert(path, tmp_path / "y.safetensors")
    written = safeload.load(tmp_path / "y.safetensors")
    same({name: written[name] for name in want}, want)


def test_a_real_file(shared):
    path = shared / "npz/checkpoint20.npz"
    with np.load(path) as want:
        same(safeload.load(path), dict(want))


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (np.array([1, "a", None], object), "tensor 'bad': Python objects are pickled"),
        (np.array(["a", "b"]), "tensor 'bad': <U1 is not a dtype of weights"),
        (np.ones(3, ml_dtypes.bfloat16), "NumPy files lose bfloat16"),
        (np.ones(3, np.longdouble), "is not a dtype of weights"),
        (np.zeros(3, [("a", "f4")]), "not a dtype of weights"),
    ],
)
def test_arrays_that_are_refused(path, value, fragment):
    np.savez(path, fine=np.ones(3), bad=value)
    with safeload.open(path) as opened:
        assert opened.tensors["bad"].shape == value.shape
        np.testing.assert_array_equal(opened["fine"], np.ones(3))
        with pytest.raises(safeload.UnsupportedError, match=fragment):
            opened.load()


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (np.ones(3, ml_dtypes.bfloat16), "'a' is bfloat16, .* pass dtype="),
        (np.ones(3, ml_dtypes.float8_e5m2), "float8_e5m2"),
        (safeload.quantize(np.ones(32), "q4_0"), "'a' is q4_0"),
        (np.array([None]), "object"),
    ],
)
def test_what_npz_does_not_have(path, value, fragment):
    with pytest.raises(safeload.UnsupportedError, match=fragment):
        npy.write_archive({"a": value}, None, path)
    assert not path.exists()


# ---- faults ----


def header(text, version=b"\1\0"):
    data = text.encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(data)) + data


def archive(members, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return bytearray(out.getvalue())


def good(shape="(2,)", descr="'<f4'", data=bytes(8)):
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}") + data


@pytest.mark.parametrize(
    ("member", "fragment"),
    [
        (b"", "npy header cannot be read"),
        (b"\x93NUMPX\1\0", "npy header cannot be read"),
        (b"\x93NUMPY\4\0" + bytes(20), "npy version 4"),
        (b"\x93NUMPY\1\0\xff\xff{", "npy header cannot be read"),
        (header("{'descr': '<f4'}"), "npy header cannot be read"),
        (header("[" * 5000), "npy header cannot be read"),
        (header("__import__('os')"), "npy header cannot be read"),
        (good(shape="(3,)"), r"F32 \[3\] needs 12 bytes, but its entry has 8"),
        (good(shape="(1,)"), "needs 4 bytes, but its entry has 8"),
        (good(shape="(-2,)"), "no array can have the shape"),
        (good(shape=f"({1 << 62}, 8)"), "needs 147573952589676412928 bytes"),
        (good(shape=f"(0, {1 << 70})", data=b""), "no array can have the shape"),
        (good(shape=f"(0, {1 << 62})", data=b""), "no array can have the shape"),
        (good(shape="(True, 2)"), "no array can have the shape"),
        (good(descr="'|O'"), "Python objects"),
        (good(descr="'<f4, <f4'"), "npy header cannot be read"),
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_that_are_no_arrays(path, member, fragment, method):
    path.write_bytes(archive({"ok.npy": good(), "bad.npy": member}, method))
    with pytest.raises(safeload.SafeloadError, match=fragment) as caught:
        safeload.load(path)
    assert str(path) in str(caught.value)


def test_a_name_that_is_there_twice(path):
    data = archive({"a.npy": good(), "b.npy": good()})
    path.write_bytes(data.replace(b"b.npy", b"a.npy"))
    with pytest.raises(safeload.FormatError, match="duplicate zip entry"):
        safeload.open(path)


def test_a_damaged_stream(path):
    data = archive({"a.npy": good(shape="(9000,)", data=rng.bytes(36000))}, zipfile.ZIP_DEFLATED)
    data[20_000:20_010] = bytes(10)
    data[60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(safeload.FormatError, match=r"damaged|inflates"):
        safeload.open(path)


def test_a_member_that_unfolds_to_more_than_it_says(path):
    member = good(shape="(2,)")
    data = archive({"a.npy": member + bytes(100_000)}, zipfile.ZIP_DEFLATED)
    place = data.rindex(b"PK\1\2")
    data[place + 24 : place + 28] = struct.pack("<I", len(member))
    data[22:26] = struct.pack("<I", len(member))
    path.write_bytes(data)
    with pytest.raises(safeload.FormatError, match="inflates to more than"):
        safeload.open(path)


def test_other_entries_are_left_out(path):
    path.write_bytes(archive({"a.npy": good(), "readme.txt": b"hello"}))
    assert list(safeload.open(path)) == ["a"]


# ---- compressed archives ----

MEBI = 1 << 20


def test_output_that_zlib_holds_back_is_asked_for(path):
    """It may have taken all input and still hold output, just past a multiple of what is asked for at a time."""
    for size in [
        k * MEBI - 128 + extra for k in (1, 2) for extra in (-1, 0, 1, 2, 17, 32, 127, 128, 129, 200, 258, 259)
    ]:
        np.savez_compressed(path, a=np.zeros(size, np.uint8), empty=np.zeros(0))
        assert safeload.open(path)["a"].shape == (size,), size
    assert safeload.check(path).ok


@pytest.mark.parametrize(("size", "level"), dealt([0, 1, 1000, MEBI - 128, MEBI, MEBI + 1, 3 * MEBI + 7], [0, 1, 9]))
def test_every_size_level_and_stream(path, size, level):
    """Random bytes do not deflate. What goes to a stream that cannot seek gets data descriptors."""
    array = rng.integers(0, 256, size, np.uint8)
    entry = io.BytesIO()
    np.save(entry, array)

    class Pipe(io.RawIOBase):
        def __init__(self):
            self.data = b""

        def writable(self):
            return True

        def write(self, data):
            self.data += bytes(data)
            return len(data)

    pipe, plain = Pipe(), io.BytesIO()
    for out in (pipe, plain):
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as file:
            with file.open("a.npy", "w", force_zip64=out is pipe) as member:
                member.write(entry.getvalue())
            file.comment = b"a comment" if out is plain else b""
    for data in (pipe.data, plain.getvalue()):
        path.write_bytes(data)
        np.testing.assert_array_equal(safeload.load(path)["a"], array)
        assert safeload.check(path).ok


def overlapping(count, kernel):
    """Entries each of which ends with all that follow it, so that one compressed piece serves all."""
    names = [b"%03d.npy" % k for k in range(count)]

    def head(size):
        return header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}")

    def local(k):
        fields = (20, 0, 8, 0, 0, 0, packed[k], sizes[k], len(names[k]), 0)
        return struct.pack("<4s5H3I2H", b"PK\3\4", *fields) + names[k]

    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    last = head(kernel) + bytes(kernel)
    streams = [b""] * (count - 1) + [machine.compress(last) + machine.flush()]
    packed, sizes, crc = [len(streams[-1])] * count, [len(last)] * count, zlib.crc32(last)
    for k in reversed(range(count - 1)):
        after = local(k + 1)
        body = head(len(after) + sizes[k + 1])
        length = len(body) + len(after)
        streams[k] = b"\0" + struct.pack("<HH", length, length ^ 0xFFFF) + body
        packed[k], sizes[k] = len(streams[k]) + len(after) + packed[k + 1], length + sizes[k + 1]
    out, directory = b"", b""
    for k in range(count):
        fields = (20, 20, 0, 8, 0, 0, crc, packed[k], sizes[k], len(names[k]), 0, 0, 0, 0, 0, len(out))
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields) + names[k]
        out += local(k) + streams[k]
    return out + directory + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(out), 0)


def _deflated(content, names):
    """An archive with these entries in blocks of deflate that hold their bytes as they are."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w") as archive:
        for info in source.infolist():
            method = zipfile.ZIP_DEFLATED if info.filename.endswith(names) else zipfile.ZIP_STORED
            archive.writestr(info.filename, source.read(info), method, compresslevel=0)
    return out.getvalue()


def test_a_changed_byte_that_still_inflates_is_found_by_its_crc(path):
    out = io.BytesIO()
    np.savez(out, a=np.arange(1000, 1100, dtype="<u4"))
    torch = zip_file({"a": tensor(Storage("a", np.float32([1, 2, 3])), (1, 3))})
    cases = (out.getvalue(), ".npy", struct.pack("<I", 1042), 0), (torch, ".pkl", b"K\x01K\x03\x86", 3)
    for content, names, changed, at in cases:
        data = bytearray(_deflated(content, names))
        path.write_bytes(data)
        assert list(safeload.load(path)) == ["a"]
        data[data.index(changed) + at] -= 1
        path.write_bytes(data)
        with pytest.raises(
            safeload.FormatError, match=f"{names}' is damaged: its CRC-32 is [0-9a-f]{{8}}, but the dir"
        ):
            safeload.load(path)
        assert not safeload.check(path).ok


def test_entries_that_share_compressed_bytes_are_refused_before_anything_is_unpacked(path, monkeypatch):
    path.write_bytes(overlapping(1, 1000))
    assert safeload.load(path)["000"].size == 1000
    monkeypatch.setattr("tempfile.mkstemp", None)
    path.write_bytes(overlapping(3, 1000))
    with pytest.raises(safeload.FormatError, match=r"zip entry '001\.npy' begins within '000\.npy'"):
        safeload.open(path)


def test_deflate_makes_at_most_1032_bytes_of_one(path, monkeypatch):
    np.savez_compressed(path, a=np.zeros(16 * MEBI, np.uint8))
    assert safeload.open(path).nbytes == 16 * MEBI
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2")
    (packed,) = struct.unpack_from("<I", data, at + 20)
    said = struct.pack("<I", packed * 1032 + 1)
    data[at + 24 : at + 28] = said
    if data[22:26] != b"\xff" * 4:  # older zipfile says the size in the local header, too
        data[22:26] = said
    path.write_bytes(data)
    monkeypatch.setattr("tempfile.mkstemp", None)
    with pytest.raises(safeload.FormatError, match=f"{packed} bytes cannot inflate to the {packed * 1032 + 1}"):
        safeload.open(path)


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="without room that can be asked for")
def test_a_full_disk_says_so_before_it_is_filled(path, monkeypatch):
    np.savez_compressed(path, a=np.zeros(1000, np.uint8))

    def full(descriptor, size, path):
        assert size >= 1000
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(zips, "reserve", full)
    with pytest.raises(OSError, match="No space left") as caught:
        safeload.open(path)
    assert not os.path.exists(caught.value.filename)


def test_no_arrays(path):
    np.savez(path)
    assert path.read_bytes()[:4] == b"PK\5\6"
    with safeload.open(path) as opened:
        assert (opened.format, len(opened), opened.load()) == ("npz", 0, {})
    with pytest.raises(safeload.SafeloadError, match="no tensor to convert"):
        safeload.convert(path, path.with_suffix(".safetensors"))
    path.write_bytes(path.read_bytes() + bytes(30))
    with pytest.raises(safeload.FormatError, match="continues after"):
        safeload.open(path)


@pytest.mark.parametrize("content", [b"", b"x" * 30, b"PK\1\2" * 20])
@pytest.mark.parametrize("end", [b"PK\5\6", b"PK\5\6" + bytes(17), bytes(20) + b"PK\5\6" + bytes(17)])
def test_an_end_that_is_cut_off(path, content, end):
    path.write_bytes(b"PK\3\4" + content + end)
    with pytest.raises(safeload.FormatError, match="directory cannot be read"):
        safeload.open(path)
    path.write_bytes(end)
    with pytest.raises(safeload.SafeloadError):
        safeload.open(path)


# ---- names ----


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("a\0b", r"'a\\x00b' contains NUL"),
        ("\0", "contains NUL"),
        ("\ud800", "contains a lone surrogate"),
        ("x" * 65_532, "has a name of 65532 bytes, but npz allows at most 65531"),
        ("é" * 32_766, "has a name of 65532 bytes"),
    ],
)
def test_names_that_zip_cannot_hold(path, name, fragment):
    path.write_bytes(b"old")
    with pytest.raises(safeload.SafeloadError, match=fragment):
        npy.write_archive({"fine": np.ones(2), name: np.ones(2)}, None, path)
    assert path.read_bytes() == b"old"


def test_names_that_look_strange(path):
    names = [
        "",
        ".npy",
        "a",
        "a.npy",
        "a.pkl",
        "../up",
        "/root",
        "C:\\x",
        "a\\b",
        "a/b",
        "\n",
        "é",
        "e\u0301",
        "x" * 65_531,
    ]
    want = {name: np.full(2, k) for k, name in enumerate(names)}
    npy.write_archive(want, None, path)
    same(safeload.load(path), want)


def test_backslashes_stay_where_they_separate_folders(path, monkeypatch):
    monkeypatch.setattr(zipfile.os, "sep", "\\")  # as on Windows
    want = {"a\\b": np.ones(2), "a/b": np.zeros(2)}
    npy.write_archive(want, None, path)
    same(safeload.load(path), want)


def test_many_empty_arrays_take_little(path):
    count = 5000
    path.write_bytes(archive({f"{k}.npy": good("(0,)", data=b"") for k in range(count)}))
    tracemalloc.start()
    opened = safeload.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(opened) == count
    assert peak < 10 * path.stat().st_size
