"""What Windows does with files and names in its own way: drives, shares, long paths, devices, locks, mappings."""

import ctypes
import gc
import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders.holes import extend
from builders.quantized import FIXTURES

import safeload
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.skipif(sys.platform != "win32", reason="Windows only")

TENSORS = {"a": np.arange(30_000, dtype=np.float32).reshape(100, 300), "b": np.ones(7, np.int64)}
LARGE = {"a": np.arange(1_000_000)}
NEW = {"a": np.zeros(3, np.float32)}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", durable=False)
    return tmp_path / "model.safetensors"


def same(found, want=TENSORS):
    return sorted(found) == sorted(want) and all(np.array_equal(found[name], want[name]) for name in want)


# ---- names ----


def other_case(path):
    return str(path).swapcase()


def of_drive(path):
    """Relative to the folder that is current on the drive, as "C:model.safetensors"."""
    os.chdir(path.parent)
    return path.drive + path.name


@pytest.mark.parametrize(
    "spelled",
    [
        other_case,
        of_drive,
        Path.as_posix,
        lambda path: rf"\\?\{path}",
        lambda path: rf"\\.\{path}",
        lambda path: str(path)[2:],  # of the drive that is current
        lambda path: rf"{path.parent}\\.\nowhere\..\{path.name}",
        lambda path: os.fsencode(path),
    ],
    ids=["case", "drive", "slashes", "verbatim", "device", "root", "dots", "bytes"],
)
def test_a_path_may_be_spelled_in_many_ways(spelled, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    text = spelled(path)
    assert same(safeload.load(text))
    assert same(load_file(text, backend="pread"))
    with safeload.open(text) as opened:
        monkeypatch.chdir(path.parent.parent)
        assert opened.files == [text if isinstance(text, str) else os.fsdecode(text)]
        assert same(opened.load())
    gc.collect()
    monkeypatch.chdir(path.parent)
    save_file(NEW, text)
    assert same(load_file(path), NEW)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("prefix", ["", "\\\\?\\"], ids=["plain", "verbatim"])
def test_a_folder_of_shards(prefix, path, tmp_path):
    folder = rf"{prefix}{tmp_path}\made"
    safeload.convert(path, folder, max_shard_size="100KB")
    for place in (folder, rf"{folder}\model.safetensors.index.json"):
        assert same(safeload.load(place))
    assert safeload.check(folder).ok


def test_long_paths(path, tmp_path):
    """Each folder has a name of 100 characters; with the prefix Windows takes 32,767 of them whatever its settings."""
    deep = rf"\\?\{tmp_path}"
    for _ in range(5):
        deep = os.path.join(deep, "d" * 100)
        os.mkdir(deep)
    target = os.path.join(deep, "m" * 200 + ".safetensors")
    save_file(TENSORS, target)
    assert same(load_file(target))
    with safeload.open(target) as opened:
        assert same({name: opened.get_slice(name)[...] for name in opened})
    gc.collect()
    safeload.convert(target, os.path.join(deep, "made"), max_shard_size="100KB")
    assert safeload.load(os.path.join(deep, "made"))["b"].tolist() == [1] * 7
    assert sorted(os.listdir(deep)) == ["made", os.path.basename(target)]
    with pytest.raises(FileNotFoundError) as caught:
        safeload.open(os.path.join(deep, "nothing"))
    assert caught.value.filename == os.path.join(deep, "nothing")


def test_a_share_that_is_not_there():
    for place in (r"\\localhost\no share of this name\model.safetensors", "//localhost/no share of this name/x.npz"):
        with pytest.raises(OSError, match="no share of this name") as caught:
            safeload.open(place)
        assert caught.value.filename == place


@pytest.mark.parametrize("name", ["NUL", "nul", "CON", "PRN", "AUX", "COM9", "LPT9", "NUL.safetensors", "C:NUL"])
def test_names_of_devices_are_no_weights(name, tmp_path, monkeypatch):
    """Whether a device is there depends on the machine, and whether one with a suffix is a file on the version."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((safeload.FormatError, OSError)) as caught:
        safeload.open(name)
    assert name in str(caught.value)


def test_what_goes_to_the_null_device_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(TENSORS, "NUL")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a<b", "a|b", "a?b", "a*b", 'a"b', "a\tb", "nowhere:\\b"])
def test_names_that_windows_forbids(name, tmp_path):
    target = tmp_path / f"{name}.safetensors" if ":" not in name else name
    with pytest.raises(OSError, match="b") as caught:
        safeload.open(target)
    assert caught.value.filename == str(target)
    with pytest.raises(OSError, match="b") as caught:
        save_file(TENSORS, target)
    assert caught.value.filename == str(target)
    assert os.listdir(tmp_path) == []


# ---- files that are in use ----


@pytest.fixture
def locked(path):
    """Open elsewhere, and shared with nobody."""
    import ctypes

    kernel = ctypes.WinDLL("kernel32")
    kernel.CreateFileW.restype = ctypes.c_void_p
    handle = kernel.CreateFileW(str(path), 0x80000000, 0, None, 3, 0, None)
    assert handle not in (None, ctypes.c_void_p(-1).value)
    yield path
    kernel.CloseHandle(ctypes.c_void_p(handle))


def test_a_file_that_another_program_shares_with_nobody(locked):
    with pytest.raises(PermissionError) as caught:
        safeload.open(locked)
    assert caught.value.filename == str(locked)
    with pytest.raises(PermissionError, match="does not replace a file that is mapped or open") as caught:
        save_file(NEW, locked)
    assert caught.value.filename == str(locked)
    assert os.listdir(locked.parent) == [locked.name]


def test_a_file_that_is_in_use_for_a_moment_is_replaced(path):
    opened = safeload.open(path)
    timer = threading.Timer(0.1, opened.close)
    timer.start()
    save_file(NEW, path)
    timer.join()
    assert same(load_file(path), NEW)


@pytest.fixture
def large(path):
    """Large enough to be mapped."""
    save_file(LARGE, path, durable=False)
    return path


def test_a_mapped_file_is_replaced_once_its_arrays_are_gone(large):
    path, arrays = large, load_file(large)
    with pytest.raises(PermissionError, match="delete the arrays that were loaded from it, or load"):
        save_file(NEW, path)
    assert same(arrays, LARGE)
    assert os.listdir(path.parent) == [path.name]
    del arrays
    gc.collect()
    save_file(NEW, path)
    assert same(load_file(path), NEW)


def test_a_read_only_file_is_named_as_such(path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Access is denied", source)

    path.chmod(0o444)
    with monkeypatch.context() as windows:
        windows.setattr(os, "replace", refuse)  # Wine replaces it
        with pytest.raises(PermissionError, match="read-only") as caught:
            save_file(NEW, path)
    assert caught.value.filename == str(path)
    path.chmod(0o666)
    assert same(load_file(path, backend="pread"))
    assert os.listdir(path.parent) == [path.name]


def test_an_open_file_may_be_moved_and_deleted(path, tmp_path):
    with safeload.open(path) as opened:
        os.rename(path, tmp_path / "moved")
        assert same(opened.load(backend="pread"))
        os.unlink(tmp_path / "moved")
        assert same(opened.load(backend="pread"))
    assert os.listdir(tmp_path) == []


# ---- onto itself ----


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".gguf"])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_file_is_converted_onto_itself(suffix, dtype, path, tmp_path):
    target = tmp_path / f"x{suffix}"
    safeload.convert(path, target, only="a")
    for place in (str(target), other_case(target)):
        safeload.convert(place, target, dtype=dtype, overwrite=True)
    assert np.array_equal(safeload.load(target, dtype="float32")["a"], TENSORS["a"].astype(dtype or "f4").astype("f4"))


@pytest.mark.parametrize("name", ["awq4_gemm", "bnb_nf4_nested", "ct_mixed"])
def test_a_packed_checkpoint_is_converted_onto_itself(name, tmp_path):
    fixture = FIXTURES[name]
    want = safeload.load(fixture.path, dtype="float32")
    safeload.convert(fixture.path, tmp_path / "made", max_shard_size="30KB")
    for dtype in (None, "float32"):
        safeload.convert(tmp_path / "made", tmp_path / "made", dtype=dtype, max_shard_size="30KB", overwrite=True)
        found = safeload.load(tmp_path / "made", dtype="float32")
        assert sorted(found) == sorted(want)
        assert all(np.array_equal(found[name], want[name]) for name in want)
        del found


def test_a_source_that_the_caller_has_open_is_not_replaced(path):
    with safeload.open(path) as opened:
        with pytest.raises(PermissionError, match="close open checkpoints"):
            safeload.convert(opened, path, dtype="float16", overwrite=True)
        assert same(opened.load(backend="pread"))
    assert os.listdir(path.parent) == [path.name]


def test_a_mapped_source_stays_as_it_is(large):
    path, arrays = large, load_file(large)
    with pytest.raises(PermissionError, match="delete the arrays"):
        safeload.convert(path, path, dtype="float16", overwrite=True)
    assert same(arrays, LARGE)
    assert same(load_file(path), LARGE)
    assert os.listdir(path.parent) == [path.name]


# ---- reading ----


def test_threads_read_from_one_handle_at_the_same_time(tmp_path):
    arrays = {str(k): np.random.default_rng(k).integers(0, 256, 300_000 + k, np.uint8) for k in range(24)}
    save_file(arrays, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as opened, ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(opened.load, backend="pread", threads=4) for _ in range(16)]
        slices = [pool.submit(opened.get_slice(name).__getitem__, slice(7, None, 3)) for name in arrays]
        assert all(same(read.result(), arrays) for read in reads)
        assert all(np.array_equal(part.result(), arrays[name][7::3]) for name, part in zip(arrays, slices, strict=True))


def test_beyond_four_gigabytes(tmp_path):
    """Offsets of more than 32 bits, in a file that is one hole but for its last bytes."""
    hole, last = (5 << 30) + 3, np.arange(1000, dtype=np.uint8)
    sizes = {"hole": hole, "last": last.size}
    ends = itertools.accumulate(sizes.values())
    header = ",".join(
        f'"{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{end - size},{end}]}}'
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    )
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((len(header) + 2).to_bytes(8, "little") + f"{{{header}}}".encode())
        extend(file, 10 + len(header) + hole)
        file.seek(0, os.SEEK_END)
        file.write(last)
    with safeload.open(path) as opened:
        for backend in ("mmap", "pread"):
            assert np.array_equal(opened.load(["last"], backend=backend)["last"], last)
        part = opened.get_slice("hole")
        assert part[(1 << 32) - 5 : (1 << 32) + 5].tolist() == [0] * 10
        assert part[:: 1 << 30].tolist() == [0] * 6
        assert np.array_equal(opened.get_slice("last")[::-1], last[::-1])
        (name, found), *rest = opened.stream(only="last")
        assert (name, rest) == ("last", [])
        assert np.array_equal(found, last)
    safeload.convert(path, tmp_path / "last.npz", only="last")
    assert np.array_equal(safeload.load(tmp_path / "last.npz")["last"], last)


class Region(ctypes.Structure):
    """MEMORY_BASIC_INFORMATION of 64-bit Windows."""

    _fields_ = (
        ("base", ctypes.c_void_p), ("allocation", ctypes.c_void_p), ("allowed", ctypes.c_uint32),
        ("partition", ctypes.c_uint16), ("size", ctypes.c_size_t), ("state", ctypes.c_uint32),
        ("protection", ctypes.c_uint32), ("kind", ctypes.c_uint32),
    )  # fmt: skip


def allowed(array):
    """What the pages of an array were allocated for: PAGE_READONLY is 2, PAGE_READWRITE 4, PAGE_WRITECOPY 8."""
    region, query = Region(), ctypes.windll.kernel32.VirtualQuery
    query.argtypes, query.restype = (ctypes.c_void_p, ctypes.POINTER(Region), ctypes.c_size_t), ctypes.c_size_t
    assert query(array.ctypes.data, region, ctypes.sizeof(region)) == ctypes.sizeof(region)
    return region.allowed


@pytest.mark.parametrize("load", [safeload.load, load_file, safeload.open])
def test_read_only_views_charge_no_memory(tmp_path, load):
    """Windows charges the commit of a whole copy-on-write view, and nothing for a view that is read-only."""
    save_file({"a": np.arange(1 << 22)}, tmp_path / "model.safetensors", durable=False)
    assert allowed(load(tmp_path / "model.safetensors")["a"]) == 8
    array = load(tmp_path / "model.safetensors", writable=False)["a"]
    assert allowed(array) == 2
    assert not array.flags.writeable
