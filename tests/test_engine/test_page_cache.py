"""The system's page cache: ``cache="drop"`` leaves little behind, and ``backend="auto"`` asks what is there."""

import ctypes
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from builders.inside import local, main
from builders.random import rng

import safeload
import safeload.numpy
from safeload.errors import SafeloadError, UnsupportedError

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise") or sys.platform != "linux", reason="posix_fadvise")

MIB, BLOCK = 1 << 20, 4 << 20


def fsync(descriptor):
    """As os.fsync, which the other tests do not wait for: only pages that are on the disk can be dropped."""
    assert ctypes.CDLL(None).fsync(descriptor) == 0


@pytest.fixture(autouse=True)
def _waits_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of 30 MiB on a disk, of several blocks of the cache, with tensors that share memory when they are read."""
    path = tmp_path_factory.mktemp("cached") / "model.safetensors"
    tensors = {
        "large": rng.standard_normal((1300, 4001), np.float32),
        "half": rng.standard_normal((2000, 1001), np.float32).astype(ml_dtypes.bfloat16),
        "bytes": rng.integers(0, 256, 5 * MIB + 3, np.uint8),
        **{f"small.{k}": rng.standard_normal(1000 + k, np.float32) for k in range(20)},
    }
    safeload.save(tensors, path)
    drop(path)
    if cached(path):
        pytest.skip("a file system that keeps its files in memory")
    return path


@pytest.fixture
def cold(path):
    drop(path)
    return path


def drop(path, begin=0, size=0):
    with open(path, "rb") as file:
        fsync(file.fileno())
        os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)


def cached(path, begin=0, size=None):
    store = local.open_local(str(path))
    try:
        resident = store.resident(begin, store.size - begin if size is None else size)
    finally:
        store.close()
    if resident is None:
        pytest.skip("the system does not say what is in the page cache")
    return resident


def warm(path, begin=0, size=None):
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        file.seek(begin)
        size = os.path.getsize(path) - begin if size is None else size
        while size and (data := file.read(min(size, MIB))):
            size -= len(data)


def same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name].view(np.uint8), array.view(np.uint8)), name


# ---- cache="drop" ----

LOADS = {
    "load": lambda path, **how: safeload.load(path, cache="drop", **how),
    "load_file": lambda path, **how: safeload.numpy.load_file(path, cache="drop", **how),
    "open": lambda path, **how: safeload.open(path, cache="drop").load(**how),
    "a pickle": lambda path, **how: pickle.loads(pickle.dumps(safeload.open(path, cache="drop"))).load(**how),
}


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct", "auto"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_load_has_the_same_arrays_and_leaves_nothing(cold, load, backend):
    loaded = load(cold, backend=backend)
    assert cached(cold) < MIB
    same(loaded, safeload.load(cold, backend="pread"))
    assert all(array.flags.writeable and not mapped(array) for array in loaded.values())


def mapped(array):
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, _, last = line.partition(" ")[0].partition("-")
            if last and int(first, 16) <= array.ctypes.data < int(last, 16):
                return "model.safetensors" in line
    return False


def test_converted_tensors_leave_nothing(cold):
    loaded = safeload.load(cold, dtype="float16", cache="drop")
    assert cached(cold) < MIB
    same(loaded, safeload.load(cold, dtype="float16"))


@pytest.mark.parametrize("scheme", ["int8", "q8_0"])
def test_codes_and_scales_leave_nothing(cold, tmp_path, scheme):
    quantized = tmp_path / "quantized.safetensors"
    safeload.convert({"w": rng.standard_normal((2048, 6400), np.float32)}, quantized, quantize=scheme)
    drop(quantized)
    for dtype in ("float32", None):
        expected = safeload.load(quantized, dtype=dtype, backend="pread")
        drop(quantized)
        found = safeload.load(quantized, dtype=dtype, cache="drop")
        assert cached(quantized) < MIB
        for name, value in expected.items():
            for k, array in {"": value}.items() if dtype else value.parts.items():
                assert np.array_equal(array, found[name] if dtype else found[name].parts[k])


def test_a_verified_load_leaves_nothing(cold, tmp_path):
    manifest = tmp_path / "manifest.json"
    assert main(["verify", str(cold), "--write", str(manifest), "--cache", "drop"]) == 0
    assert cached(cold) < MIB
    loaded = safeload.load(cold, verify=manifest, cache="drop")
    assert cached(cold) < MIB
    same(loaded, safeload.load(cold, backend="pread"))


def test_a_tensor_alone_and_a_slice_leave_nothing_once_the_checkpoint_is_closed(cold):
    with safeload.open(cold, cache="drop") as checkpoint:
        large, part = checkpoint["large"], checkpoint.get_slice("half")[5:700, 3]
        assert checkpoint["large"] is large
        assert dict(checkpoint.stream())["bytes"].size == 5 * MIB + 3
    assert cached(cold) < MIB
    assert np.array_equal(large, safeload.load(cold)["large"])
    assert np.array_equal(part, safeload.load(cold)["half"][5:700, 3])


def test_a_file_that_was_cached_stays(cold):
    warm(cold)
    safeload.load(cold, cache="drop")
    safeload.stats(cold, cache="drop")
    assert cached(cold) >= os.path.getsize(cold)


def test_only_blocks_that_were_cached_stay(cold):
    warm(cold, 2 * BLOCK, BLOCK)
    warm(cold, 4 * BLOCK, BLOCK // 4)  # less than half of a block is not worth keeping
    safeload.load(cold, cache="drop")
    assert cached(cold, 2 * BLOCK, BLOCK) == BLOCK
    assert cached(cold) < BLOCK + MIB


def test_a_conversion_leaves_neither_source_nor_result(cold, tmp_path):
    plain, dropped = tmp_path / "plain.safetensors", tmp_path / "dropped.safetensors"
    for dtype in (None, "float16"):
        safeload.convert(cold, plain, dtype=dtype, overwrite=True)
        drop(cold)
        safeload.convert(cold, dropped, dtype=dtype, overwrite=True, cache="drop")
        assert cached(cold) < MIB
        assert cached(dropped) < MIB
        assert dropped.read_bytes() == plain.read_bytes()


def test_a_conversion_to_shards_and_its_repeat_leave_nothing(cold, tmp_path):
    for resume in (False, True):
        drop(cold)
        folder = tmp_path / f"{resume}"
        safeload.convert(cold, f"{folder}/", max_shard_size="10MB", resume=resume, cache="drop")
        assert sum(map(cached, folder.glob("*.safetensors"))) < MIB
        assert cached(cold) < MIB
        expected = safeload.load(cold, backend="pread")
        same(dict(sorted(safeload.load(folder).items())), dict(sorted(expected.items())))


def test_the_cache_stays_small_while_a_conversion_lasts(path, tmp_path):
    size, sparse, folder = 64 * MIB, tmp_path / "sparse.safetensors", tmp_path / "out"
    spans = {f"w.{k}": [k * size, (k + 1) * size] for k in range(5)}
    head = json.dumps(
        {name: {"dtype": "F16", "shape": [size // 2], "data_offsets": span} for name, span in spans.items()}
    )
    with open(sparse, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head.encode())
        file.truncate(8 + len(head) + 5 * size)
    folder.mkdir()
    seen = []

    def progress(done, total):
        seen.append((done, cached(sparse) + sum(map(cached, folder.iterdir()))))

    safeload.convert(sparse, folder / "all.safetensors", dtype="bfloat16", cache="drop", threads=2, progress=progress)
    assert max(done for done, _ in seen) == 5 * size
    assert len(seen) > 5
    assert (
        max(pages for _, pages in seen) < 160 * MIB
    )  # 64 read ahead, 48 being written, and what the system reads ahead
    assert cached(sparse) < MIB


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_a_save_leaves_nothing(path, tmp_path, durable, background):
    tensors, saved = safeload.load(path, backend="pread"), tmp_path / "saved.safetensors"
    future = safeload.save(tensors, saved, cache="drop", durable=durable, background=background)
    if background:
        future.result()
    assert cached(saved) < MIB
    found = safeload.load(saved)
    same({name: found[name] for name in tensors}, tensors)


def test_a_generator_is_saved_and_its_own_files_are_as_it_opens_them(cold, tmp_path):
    saved = tmp_path / "saved.safetensors"

    def tensors():
        yield from safeload.load(cold).items()

    safeload.save(tensors(), saved, cache="drop")
    assert cached(saved) < MIB
    assert cached(cold) > 20 * MIB


READS = {
    "check": lambda path: safeload.check(path, cache="drop"),
    "stats": lambda path: safeload.stats(path, cache="drop"),
    "diff": lambda path: safeload.diff(path, path, cache="drop"),
    "check --cache drop": lambda path: main(["check", str(path), "--cache", "drop"]),
    "stats --cache drop": lambda path: main(["stats", str(path), "--cache", "drop"]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_all_values_leaves_nothing(cold, read):
    read(cold)
    assert cached(cold) < MIB


def test_verify_leaves_nothing_whatever_the_number_of_files(cold, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        shutil.copy(cold, folder / name)
    first, manifest = folder / name, tmp_path / "manifest.json"
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert main(["verify", str(first), "--write", str(manifest)]) == 0
    drop(first)
    assert safeload.verify(first, manifest, cache="drop").ok
    assert cached(first) < MIB
    assert main(["verify", str(first), "--against", str(manifest), "--cache", "drop"]) == 0
    assert cached(first) < MIB


def test_threads_that_hash_files_drop_too(cold, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    files = [folder / f"model-{k:05}-of-00002.safetensors" for k in (1, 2)]
    for file in files:
        shutil.copy(cold, file)
        drop(file)
    manifest = tmp_path / "manifest.json"
    assert main(["verify", str(folder), "--write", str(manifest), "--cache", "drop"]) == 0
    assert [cached(file) < MIB for file in files] == [True, True]
    other = shutil.copytree(folder, tmp_path / "other")
    for file in [*files, *other.iterdir()]:
        drop(file)
    assert safeload.verify(folder, other, cache="drop").ok
    assert [cached(file) < MIB for file in [*files, *other.iterdir()]] == [True] * 4
    drop(cold)  # which was read to copy it
    safeload.convert(cold, tmp_path / "result.safetensors", record=True, cache="drop")
    assert cached(cold) < MIB


def test_other_processes_drop_too(cold):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        safeload.stats(cold, executor=executor, cache="drop")
    assert cached(cold) < MIB


@pytest.mark.parametrize("call", [safeload.load, safeload.open, safeload.numpy.load_file, safeload.check])
def test_another_value_is_refused(path, call):
    with pytest.raises(ValueError, match=r"cache must be .*, got 'evict'"):
        call(path, cache="evict")


def without(monkeypatch, function):
    """As on a system where a function of the C core answers that it cannot."""
    unsupported = staticmethod(lambda *_: 8)  # SL_E_UNSUPPORTED
    monkeypatch.setattr(local, "short", type("short", (local.short,), {function: unsupported}))


def test_a_system_that_cannot_drop_says_so(path, tmp_path, monkeypatch):
    without(monkeypatch, "sl_file_drop")
    for call in (safeload.load, safeload.open, safeload.stats):
        with pytest.raises(UnsupportedError, match='cache="drop"'):
            call(path, cache="drop")
    with pytest.raises(UnsupportedError, match='cache="drop"'):
        safeload.save({}, tmp_path / "none.safetensors", cache="drop")
    assert not any(tmp_path.iterdir())
    same(safeload.load(path, cache="keep"), safeload.load(path))


# ---- backend="auto" ----


def auto(path, names=None, **how):
    """The statistics of a load, whose arrays are those of "pread"."""
    with safeload.open(path) as checkpoint:
        loaded = checkpoint.load(names, backend="auto", **how)
        stats = checkpoint.last_load
        same(loaded, checkpoint.load(names, backend="pread", **how))
    return stats


def test_cold_files_are_read_past_the_cache(cold):
    stats = auto(cold)
    assert stats.backend in ("direct", "pread")  # without O_DIRECT
    assert stats.reason.startswith("0% of the bytes are in the page cache")
    assert (stats.backend == "direct") == (stats.reason == "0% of the bytes are in the page cache")


def test_warm_files_are_mapped(cold):
    warm(cold)
    stats = auto(cold)
    assert (stats.backend, stats.reason) == ("mmap", "100% of the bytes are in the page cache")
    stats = auto(cold, dtype="float16")
    assert stats.backend == "mmap"


def test_files_that_are_partly_cached_are_read_through_the_cache(cold):
    warm(cold, 0, os.path.getsize(cold) // 2)
    stats = auto(cold)
    assert stats.backend == "pread"
    assert 30 < int(stats.reason.partition("%")[0]) < 70


def test_only_the_bytes_of_the_requested_tensors_count(cold):
    with safeload.open(cold) as checkpoint:
        info = checkpoint.tensors["bytes"]
    warm(cold, info.offset, info.nbytes)
    assert auto(cold, ["bytes"]).backend == "mmap"


@pytest.mark.parametrize("name", ["NFS", "FUSE"])
def test_network_file_systems_are_read(cold, monkeypatch, name):
    store = local.open_local(str(cold))
    magic = store.use(local.short.sl_file_system)
    store.close()
    monkeypatch.setitem(local.NETWORKS, magic, name)
    warm(cold)
    stats = auto(cold)
    assert stats.backend == "pread"
    assert stats.reason == f"{cold} is on {name}, which is read in large pieces"


def test_a_system_that_does_not_say_what_is_cached(cold, monkeypatch):
    without(monkeypatch, "sl_file_resident")
    stats = auto(cold)
    assert (stats.backend, stats.reason) == ("pread", "the system does not tell which pages are in its cache")
    safeload.load(cold, cache="drop")  # then nothing counts as another program's


def test_other_backends_have_no_reason(path):
    with safeload.open(path) as checkpoint:
        checkpoint.load()
        assert checkpoint.last_load.reason == ""


def test_every_door_takes_it(path):
    expected = safeload.load(path, backend="pread")
    same(safeload.numpy.load_file(path, backend="auto"), expected)
    same(safeload.numpy.load_file(path, backend="auto", names=["half"]), {"half": expected["half"]})
    with safeload.safe_open(path, backend="auto") as file:
        same({name: file.get_tensor(name) for name in expected}, expected)
        same(file.get_tensors(), expected)
    into = {name: np.empty_like(array) for name, array in expected.items()}
    same(safeload.load(path, backend="auto", out=into), expected)
    assert safeload.load(path, backend="auto", writable=False)["half"].flags.writeable is False
    with pytest.raises(SafeloadError, match='expected one of: "mmap", "pread", "direct", "auto"'):
        safeload.load(path, backend="uring")


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct", "auto"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_take_both(cold, framework, backend):
    pytest.importorskip(framework)
    load_file = importlib.import_module(f"safeload.{framework}").load_file
    loaded = load_file(cold, backend=backend, cache="drop")
    assert cached(cold) < MIB
    expected = safeload.load(cold, backend="pread")
    for arrays in (loaded, load_file(cold, backend=backend)):
        assert np.array_equal(np.asarray(arrays["large"]), expected["large"])
        assert np.array_equal(np.asarray(arrays["bytes"]), expected["bytes"])
        assert sorted(arrays) == sorted(expected)


# cachestat(2) as before Linux 6.5; mincore(2) answers for files of this user.
OLD_KERNEL = """
#include <errno.h>
#include <stdarg.h>
#define _GNU_SOURCE
#include <dlfcn.h>
long syscall(long number, ...) {
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == 451) { errno = ENOSYS; return -1; }
    long (*next)(long, ...) = (long (*)(long, ...))dlsym((void *)-1l, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_checkpoints_of_frameworks_leave_nothing(cold, framework):
    door = pytest.importorskip(f"safeload.{framework}")
    pytest.importorskip(framework)
    expected = door.load_checkpoint(cold)
    drop(cold)
    found = door.load_checkpoint(cold, cache="drop")
    assert cached(cold) == 0
    assert found.keys() == expected.keys()
    assert all(bool((found[name] == array).all()) for name, array in expected.items())
    with pytest.raises(ValueError, match="cache must be"):
        door.load_checkpoint(cold, cache="other")


def test_before_linux_6_5_pages_are_counted_through_a_mapping(cold, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None or "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("needs a C compiler, and a process without other preloaded libraries")
    (tmp_path / "old.c").write_text(OLD_KERNEL)
    library = tmp_path / "old.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "old.c", "-ldl"], check=True)
    script = """
        import sys, safeload
        with safeload.open(sys.argv[1]) as checkpoint:
            for _ in range(2):
                checkpoint.load(backend="auto")
                print(checkpoint.last_load.reason)
                checkpoint.load(backend="pread")
        safeload.load(sys.argv[1], cache="drop")
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(script), str(cold)],
        env={**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("0% of the bytes")
    assert second == "100% of the bytes are in the page cache"
    assert cached(cold) >= os.path.getsize(cold)
