"""Reads past the page cache: the same bytes and errors as through it, and nothing left in it."""

import contextlib
import ctypes
import mmap
import os
import re
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from builders.http_server import Server
from builders.inside import jobs, thread_count
from builders.random import rng

import safeload
from safeload.errors import FormatError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.any_python

CHUNK, PAGE = 3 << 20, 4096
# Around what reads past the cache move: pages and chunks; below 1 MiB tensors share memory.
SIZES = [1, PAGE - 1, PAGE, PAGE + 1, (1 << 20) - 1, (1 << 20) + 5, CHUNK - 3, CHUNK, 2 * CHUNK + 1, 0]


@pytest.fixture(params=["disk", "tmpfs"], scope="module")
def folder(request, tmp_path_factory):
    """A folder on the disk of pytest's own, and one in memory."""
    if request.param == "disk":
        yield tmp_path_factory.mktemp("direct")
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def path(folder):
    path = folder / "model.safetensors"
    tensors = {f"bytes.{size}": rng.integers(0, 256, size, np.uint8) for size in SIZES}
    tensors["f32"] = rng.standard_normal((1100, 1000), np.float32)
    tensors["bf16"] = rng.standard_normal((2300, 1001), np.float32).astype(ml_dtypes.bfloat16)
    save_file(tensors, path, durable=True)  # pages that are written are not dropped
    return path


@pytest.fixture
def on_disk(path):
    """The file, if its file system lets reads past the page cache, and tells what the cache holds."""
    with safeload.open(path) as checkpoint:
        checkpoint.load(backend="direct")
        if checkpoint.last_load.backend != "direct":
            pytest.skip("needs O_DIRECT")
    drop(path)
    if cached(path):
        pytest.skip("a file system that keeps its files in memory")
    return path


def drop(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached(path):
    """Bytes of a file in the page cache, as mincore(2) sees them."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    held = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        call = ctypes.CDLL(None, use_errno=True).mincore
        assert call(ctypes.byref(first), ctypes.c_size_t(len(mapped)), held) == 0, ctypes.get_errno()
        del first
    return sum(one & 1 for one in held) * mmap.PAGESIZE


def same(loaded, want):
    assert list(loaded) == list(want)
    for name, array in want.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape), name
        assert loaded[name].tobytes() == array.tobytes(), name
        assert loaded[name].flags.writeable
        assert loaded[name].flags.aligned


@pytest.mark.parametrize("threads", [None, 1, 3, 20])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_the_bytes_are_those_of_pread(path, dtype, threads):
    same(load_file(path, backend="direct", dtype=dtype, threads=threads), load_file(path, backend="pread", dtype=dtype))


def test_every_tensor_alone_and_into_given_arrays(path):
    want = load_file(path, backend="pread")
    for name, array in want.items():
        same(load_file(path, backend="direct", names=[name]), {name: array})
    for shift in (0, 1, 8, 64):  # to places that are not those of the file, and one that may be
        raw = {name: np.zeros(array.nbytes + 64 + PAGE, np.uint8) for name, array in want.items()}
        out = {}
        for name, array in want.items():
            begin = -raw[name].ctypes.data % 64 + shift * array.itemsize
            out[name] = np.ndarray(array.shape, array.dtype, raw[name], begin)
        same(load_file(path, backend="direct", out=out), want)
        for name, array in want.items():
            inside = np.shares_memory(out[name], raw[name]) or not array.size
            assert inside
            out[name][...] = np.zeros((), array.dtype)
            assert not raw[name].any(), "bytes beside the array were written"


def test_statistics_of_a_file_that_is_read_past_the_cache(path):
    """Operations on values take what was read as if it were in memory."""
    with safeload.open(path) as checkpoint:
        want = safeload.stats(checkpoint, histogram=True)
    original = jobs.run_jobs

    def direct(*arguments, **options):
        return original(*arguments, **{**options, "direct": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "run_jobs", direct)
        found = safeload.stats(path, histogram=True)
    for name, one in want.items():
        assert found[name]._replace(histogram=None) == one._replace(histogram=None)
        assert (found[name].histogram == one.histogram).all()


def test_nothing_of_a_large_load_stays_in_the_cache(on_disk):
    load_file(on_disk, backend="direct", names=[f"bytes.{2 * CHUNK + 1}", f"bytes.{CHUNK}", "f32", "bf16"])
    assert cached(on_disk) <= 1 << 20  # the header, and what is read ahead with it
    load_file(on_disk, backend="pread")
    assert cached(on_disk) >= 3 * CHUNK


def test_what_was_written_and_not_yet_stored_is_read(folder):
    path = folder / "new.safetensors"
    for value in range(3):
        array = np.full(5_000_000, value, np.uint8)
        save_file({"x": array}, path, durable=False)
        same(load_file(path, backend="direct"), {"x": array})


def test_last_load_says_which_it_was(on_disk, monkeypatch):
    with safeload.open(on_disk) as checkpoint:
        checkpoint.load(backend="direct")
        assert checkpoint.last_load.backend == "direct"
        checkpoint.load(["f32"], out={"f32": np.empty((1100, 1000), np.float32)}, backend="direct")
        assert checkpoint.last_load.backend == "direct"
        monkeypatch.setattr(jobs.short, "sl_file_open_direct", lambda handle: 0)
        want = checkpoint.load(backend="pread")
        same(checkpoint.load(backend="direct"), want)
        assert checkpoint.last_load.backend == "pread"


@pytest.mark.skipif(os.name == "nt", reason="needs a descriptor")
@pytest.mark.parametrize("how", ["a pipe", "closed", "another file"])
def test_a_disk_that_refuses_while_it_is_read_is_read_through_the_cache(path, monkeypatch, how, tmp_path):
    """Such a handle fails like one of a file system that takes O_DIRECT when a file is opened, and no read."""
    reading, writing = os.pipe()
    empty = tmp_path / "empty"
    empty.touch()
    other = os.open(empty, os.O_RDONLY)
    number = {"a pipe": reading, "closed": 1 << 20, "another file": other}[how]
    monkeypatch.setattr(jobs.short, "sl_file_open_direct", lambda handle: number if how == "closed" else os.dup(number))
    same(load_file(path, backend="direct"), load_file(path, backend="pread"))
    same(load_file(path, backend="direct", dtype="f4"), load_file(path, backend="pread", dtype="f4"))
    for descriptor in (reading, writing, other):
        os.close(descriptor)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not truncate open files")
@pytest.mark.parametrize("backend", ["pread", "direct"])
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_file_that_shrinks_names_tensor_and_byte(folder, backend, dtype):
    path = folder / "shrinks.safetensors"
    save_file({"a": np.ones(1_000_000, np.float32), "b": np.ones(1_000_001, np.float32)}, path, durable=False)
    with safeload.open(path) as checkpoint:
        os.truncate(path, 5_000_001)
        with pytest.raises(FormatError, match="'b': the file ends at byte 5000001") as caught:
            checkpoint.load(backend=backend, dtype=dtype)
    assert (caught.value.tensor, caught.value.offset) == ("b", 5_000_001)


def test_progress_reaches_the_end_once(path):
    with safeload.open(path) as checkpoint:
        calls = []
        checkpoint.load(backend="direct", progress=lambda done, total: calls.append((done, total)))
        total = sum(array.nbytes for array in checkpoint.load().values())
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
    assert len(calls) == 1 or calls[-2][0] < total


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors")
def test_no_descriptor_is_left(path):
    load_file(path, backend="direct")
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        load_file(path, backend="direct")
        with contextlib.suppress(ZeroDivisionError):
            load_file(path, backend="direct", progress=lambda done, total: 1 // 0)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_without_a_second_descriptor_it_is_read_through_the_cache(path):
    code = """
import os, resource, sys
import safeload
with safeload.open(sys.argv[1]) as checkpoint:
    want = checkpoint.load(backend="pread")
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, used - 1))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    got = checkpoint.load(backend="direct")
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)
    print(checkpoint.last_load.backend)
"""
    result = subprocess.run([sys.executable, "-I", "-c", code, path], capture_output=True, text=True, timeout=120)
    assert result.stdout == "pread\n", result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors of Linux")
def test_standard_input_may_be_closed(path):
    """Its number goes to the next file that is opened; 0 means that there is none."""
    code = """
import os, sys
import safeload
with safeload.open(sys.argv[1]) as checkpoint:
    want = checkpoint.load(backend="pread")
    os.close(0)
    got = checkpoint.load(backend="direct")
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)
    try:
        os.fstat(0)
    except OSError:
        print("free", checkpoint.last_load.backend)
"""
    result = subprocess.run([sys.executable, "-I", "-c", code, path], capture_output=True, text=True, timeout=120)
    assert result.stdout in ("free direct\n", "free pread\n"), result.stderr


def test_many_threads_load_one_checkpoint(path):
    want = load_file(path, backend="pread")
    failed = []
    with safeload.open(path) as checkpoint:

        def work(number):
            try:
                for _ in range(3):
                    same(checkpoint.load(backend=("direct", "pread")[number % 2], threads=2), want)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_more_readers_than_processors_but_not_for_little(capsys):
    safeload.show_config()
    (cpus,) = re.findall(r"^threads +(\d+) at most", capsys.readouterr().out, re.M)
    assert thread_count(1 << 30, None, direct=True) == min(max(int(cpus), 8), 16)
    assert thread_count(3 << 20, None, direct=True) == 1
    assert thread_count(1 << 30, 3, direct=True) == 3


def test_a_url_is_read_as_ever(path):
    with Server(path.parent) as server:
        same(safeload.load(server.url(f"/{path.name}"), backend="direct"), load_file(path, backend="pread"))
