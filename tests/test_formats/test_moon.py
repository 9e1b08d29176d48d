"""MOON files: written, read, and each fault by itself."""

import math
import os
import struct
import tracemalloc

import numpy as np
import pytest
from builders import inside
from builders.random import rng

import safeload
from safeload import FormatError, moon

pytestmark = pytest.mark.any_python

HEAD = struct.pack("<II", 0x4D4F4F4E, 2)


def entry(name=b"a", dims=(2, 3), count=None, data=None, *, rank=None, name_size=None):
    count = math.prod(dims) if count is None else count
    head = struct.pack(
        "<III", len(name) if name_size is None else name_size, len(dims) if rank is None else rank, count
    )
    return head + name + struct.pack(f"<{len(dims)}Q", *dims) + (b"\0" * 2 * count if data is None else data)


def tensors():
    return {
        "word": rng.standard_normal((20, 8)).astype(np.float16),
        "odd": rng.standard_normal((3,)).astype(np.float16),
        "ünï": rng.standard_normal((2, 1, 2, 2)).astype(np.float16),
        "empty": np.zeros((0, 5), np.float16),
        "scalar": np.float16(2.5).reshape(()),
        "x" * 256: np.ones((1,), np.float16),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.bin"


def test_written_and_read_again(path):
    want = tensors()
    moon.save_file(want, path)
    for got in (
        moon.load_file(path),
        safeload.load(path),
        dict(safeload.open(path)),
        safeload.load(path, backend="pread"),
    ):
        assert list(got) == list(want)
        for name, array in want.items():
            assert got[name].dtype == np.float16
            assert got[name].flags.aligned
            np.testing.assert_array_equal(got[name], array)
    with safeload.open(path) as opened:
        assert opened.format == "moon"
        np.testing.assert_array_equal(opened.get_slice("word")[3:5, ::2], want["word"][3:5, ::2])
        assert opened.load(["odd"], dtype="float32")["odd"].dtype == np.float32
    if os.name != "nt":  # Windows replaces no file that is mapped
        moon.save_file(got, path)  # over the file that its arrays show
        np.testing.assert_array_equal(moon.load_file(path)["word"], want["word"])


def test_the_bytes_are_the_format(path):
    moon.save_file({"ab": np.float16([[1, 2, 3]]), "c": np.float16([4])}, path)
    first = struct.pack("<III", 2, 2, 3) + b"ab" + struct.pack("<QQ", 1, 3) + np.float16([1, 2, 3]).tobytes()
    second = struct.pack("<III", 1, 1, 1) + b"c" + struct.pack("<Q", 1) + np.float16([4]).tobytes()
    assert path.read_bytes() == b"NOOM\2\0\0\0" + first + second


def test_arrays_of_any_layout(path):
    x = rng.standard_normal((6, 4)).astype(np.float16)
    moon.save_file({"t": x.T, "n": x[::-1], "big": x.astype(">f2"), "fortran": np.asfortranarray(x)}, path)
    got = moon.load_file(path)
    np.testing.assert_array_equal(got["t"], x.T)
    np.testing.assert_array_equal(got["n"], x[::-1])
    np.testing.assert_array_equal(got["big"], x)
    np.testing.assert_array_equal(got["fortran"], x)


def test_no_tensors(path):
    moon.save_file({}, path)
    assert path.read_bytes() == HEAD
    assert moon.load_file(path) == {}


@pytest.mark.parametrize(
    ("given", "kind", "fragment"),
    [
        ({"a": np.zeros(2, np.float32)}, safeload.UnsupportedError, r"'a' is float32; .* pass dtype=\"float16\""),
        ({"a": np.zeros(2, np.int16)}, safeload.UnsupportedError, r"int16; .* leave it out"),
        ({"a": safeload.quantize(np.zeros(32), "q4_0")}, safeload.UnsupportedError, "'a' is q4_0; MOON"),
        ({"a": [1.0]}, TypeError, "'a' is a list, not a NumPy array"),
        ({3: np.zeros(2, np.float16)}, TypeError, "int"),
        ({"": np.zeros(2, np.float16)}, safeload.SafeloadError, "0 bytes"),
        ({"é" * 129: np.zeros(2, np.float16)}, safeload.SafeloadError, "258 bytes"),
        ({"a": np.zeros((1,) * 5, np.float16)}, safeload.SafeloadError, "5 dims"),
        (
            {"a": np.broadcast_to(np.float16(1), (1 << 16, 1 << 16))},
            safeload.SafeloadError,
            "4294967296 elements, .* at most 4294967295",
        ),
    ],
)
def test_what_the_format_does_not_have(path, given, kind, fragment):
    path.write_bytes(b"old")
    with pytest.raises(kind, match=fragment):
        moon.save_file(given, path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_overwrite(path):
    moon.save_file({}, path, durable=False)
    with pytest.raises(FileExistsError):
        moon.save_file({}, path, overwrite=False)


# ---- faults ----


@pytest.mark.parametrize(
    ("data", "offset", "fragment"),
    [
        (struct.pack("<II", 0x4D4F4F4F, 2), 0, "no known weight format starts with 4f 4f 4f 4d"),
        (struct.pack("<II", 0x4D4F4F4E, 3), 4, "version is 3, but only 2"),
        (HEAD[:6], 0, "the MOON header needs 8 bytes, but the file ends after 6"),
        (HEAD + entry(name=b""), 8, "a name of 0 bytes"),
        (HEAD + entry(name=b"x" * 257), 8, "a name of 257 bytes"),
        (HEAD + entry(name_size=2**32 - 1), 8, "a name of 4294967295 bytes"),
        (HEAD + entry(dims=(1,) * 5), 12, "a tensor of 5 dims"),
        (HEAD + entry(rank=2**32 - 1), 12, "a tensor of 4294967295 dims"),
        (HEAD + entry(count=7), 16, r"7 elements, but the product of \[2, 3\] is 6"),
        (HEAD + entry(count=12), 16, "12 elements, .* it looks like a byte count"),
        (HEAD + entry(dims=(2**32, 2**32), count=0, data=b""), 16, "is 18446744073709551616"),
        (HEAD + entry(dims=(0, 2**63), count=0, data=b""), 21, "no array can have the shape"),
        (HEAD + entry(dims=(0, 2**31, 2**32), count=0, data=b""), 21, "no array can have the shape"),
        (HEAD + entry(name=b"a\xff"), 21, "not UTF-8"),
        (HEAD + entry(data=b"\0" * 11), 37, r"F16 \[2, 3\] needs 12 bytes, but 11 are left"),
        (HEAD + entry(dims=(2**16, 2**15), data=b""), 37, "needs 4294967296 bytes"),
        (HEAD + entry() + b"\0", 49, "the head of a tensor needs 12 bytes, but the file ends after 1"),
        (HEAD + entry() + entry(b"b") + entry(), 90, "duplicate tensor 'a'"),
    ],
)
def test_one_fault_at_a_time(path, data, offset, fragment):
    path.write_bytes(data)
    with pytest.raises(FormatError, match=fragment) as caught:
        safeload.open(path, format="moon")
    assert (caught.value.path, caught.value.offset) == (str(path), offset)


def test_truncated_at_every_byte(path):
    moon.save_file({k: v for k, v in tensors().items() if k != "x" * 256}, path)
    whole = path.read_bytes()
    complete = 0
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        try:
            safeload.open(path)
            complete += 1  # where the file ends between two tensors
        except safeload.SafeloadError:
            pass
    assert complete == 5


# ---- many tensors ----


@pytest.mark.no_core
def test_many_tiny_tensors_take_little_memory(path):
    count = 15_000
    path.write_bytes(HEAD + b"".join(entry(b"%06x" % k, ()) for k in range(count)))
    size = path.stat().st_size
    safeload.open(path)
    tracemalloc.start()
    opened = safeload.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(opened) == count
    assert peak < 10 * size
    assert opened["0000ff"].shape == ()
    assert opened.tensors["0000ff"].offset == 8 + 20 * 0xFF + 18


def test_the_number_of_tensors_is_limited(path, monkeypatch):
    path.write_bytes(HEAD + b"".join(entry(b"%06x" % k, ()) for k in range(11)))
    inside.tune(monkeypatch, moon_tensors=11)
    assert len(safeload.open(path)) == 11
    inside.tune(monkeypatch, moon_tensors=10)
    with pytest.raises(safeload.LimitError, match="more than 10 tensors"):
        safeload.open(path)


@pytest.mark.parametrize("size", [1, 2000, 4070, 4071, 4072, 4080, 8192])
def test_heads_that_straddle_what_is_read_at_a_time(path, size):
    want = {name: np.full(k, k, np.float16) for k, name in enumerate(("a" * 200, "b", "c" * 256, "d"), size)}
    moon.save_file(want, path)
    got = moon.load_file(path)
    assert list(got) == list(want)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def test_a_lone_surrogate_is_refused(path):
    with pytest.raises(safeload.SafeloadError, match=r"'\\ud800' contains a lone surrogate"):
        moon.save_file({"\ud800": np.ones(2, np.float16)}, path)
    assert not path.exists()


def test_a_nul_in_a_name_is_kept(path):
    moon.save_file({"a\0b": np.ones(2, np.float16)}, path)
    assert list(moon.load_file(path)) == ["a\0b"]
