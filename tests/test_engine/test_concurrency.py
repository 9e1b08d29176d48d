"""Many threads over one checkpoint, and processes that fork around loads."""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders import inside, torch_build
from builders.random import rng
from builders.thorough import THOROUGH

import safeload
from safeload.numpy import load_file, save_file

THREADS = 8
TENSORS = {
    f"layer.{k}.weight": rng.standard_normal((64 + k, 1000), np.float32).astype(ml_dtypes.bfloat16) for k in range(12)
}
AS_F32 = {name: array.astype(np.float32) for name, array in TENSORS.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "model.safetensors"
    save_file(TENSORS, path, durable=False)
    return path


@pytest.fixture(autouse=True)
def _switching_often():
    """Threads take turns a hundred times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    yield
    sys.setswitchinterval(interval)


def together(work, count=THREADS):
    """Runs work(number) in threads that start at one moment; raises what any of them raises."""
    barrier = threading.Barrier(count)

    def start(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def same(loaded, expected):
    return loaded.keys() == expected.keys() and all(np.array_equal(loaded[name], expected[name]) for name in expected)


def test_threads_do_different_things_with_one_checkpoint(path):
    names = list(TENSORS)

    with safeload.open(path) as checkpoint:

        def work(number):
            for k in range(20):
                name = names[(number + k) % len(names)]
                match (number + k) % 5:
                    case 0:
                        assert np.array_equal(checkpoint[name], TENSORS[name])
                    case 1:
                        assert same(checkpoint.load(dtype="float32", threads=2), AS_F32)
                    case 2:
                        assert np.array_equal(checkpoint.get_slice(name)[3:5, ::7], TENSORS[name][3:5, ::7])
                    case 3:
                        assert same(checkpoint.load(backend="pread", threads=2), TENSORS)
                    case _:
                        assert [*checkpoint.tensors] == list(checkpoint)
                        assert checkpoint.tensors[name].shape == TENSORS[name].shape

        together(work)


def test_one_tensor_is_the_same_memory_for_every_thread(path):
    for _ in range(20):
        with safeload.open(path) as checkpoint:
            first, *others = together(lambda number: checkpoint["layer.3.weight"])
            assert all(other is first for other in others)


def test_tied_tensors_share_memory_whichever_thread_asks_first(tmp_path):
    storage = torch_build.Storage("0", np.arange(6000, dtype=np.float32))
    names = [f"tied.{k}" for k in range(200)]
    tied = torch_build.ordered({name: torch_build.tensor(storage) for name in names})
    (tmp_path / "tied.pt").write_bytes(torch_build.legacy_file(tied))  # in which nothing is aligned: each load copies
    sys.setswitchinterval(1e-6)
    for _ in range(50 if THOROUGH else 20):
        with safeload.open(tmp_path / "tied.pt") as checkpoint:
            arrays = together(lambda number: [checkpoint[name] for name in names[number::THREADS]])
            assert len({array.ctypes.data for part in arrays for array in part}) == 1


def test_two_handles_never_hand_out_the_same_memory_twice(path):
    for _ in range(20):
        with safeload.safe_open(path) as file:
            arrays = together(lambda number: file.get_tensor("layer.3.weight"))
            assert len({array.ctypes.data for array in arrays}) == THREADS


def test_closing_while_others_read_gives_the_whole_or_says_that_it_is_closed(path):
    for _ in range(20):
        checkpoint = safeload.open(path)

        def work(number, checkpoint=checkpoint):
            if number == 0:
                time.sleep(0.001)
                checkpoint.close()
                return
            with contextlib.suppress(ValueError):  # from when it is closed on
                for k in range(50):
                    name = f"layer.{k % 12}.weight"
                    if number % 3 == 0:
                        assert same(checkpoint.load(dtype="float32", threads=2), AS_F32)
                    elif number % 3 == 1:
                        assert np.array_equal(checkpoint[name], TENSORS[name])
                    else:
                        assert np.array_equal(checkpoint.get_slice(name)[7], TENSORS[name][7])

        together(work)
        with pytest.raises(ValueError, match="closed"):
            checkpoint["layer.1.weight"]


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_load_reads_its_own_file_although_it_is_closed_and_another_one_opened_meanwhile(tmp_path, monkeypatch, dtype):
    """The system gives the number of a closed descriptor to the next file."""
    inside.tune(monkeypatch, job_slice_ms=1)
    for value in (1, 2):
        save_file({"x": np.full(20_000_000, value, np.float16)}, tmp_path / str(value), durable=False)
    checkpoint, opened = safeload.open(tmp_path / "1"), []

    def interfere(done, total):
        if not opened and done < total:
            checkpoint.close()
            opened.append(safeload.open(tmp_path / "2"))

    loaded = checkpoint.load(backend="pread", dtype=dtype, threads=1, progress=interfere)
    assert opened
    assert (loaded["x"] == 1).all()
    opened[0].close()


def test_a_closed_checkpoint_has_closed_its_files(path):
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    checkpoint = safeload.open(path)
    checkpoint.load(backend="pread")
    view = checkpoint["layer.3.weight"]
    checkpoint.close()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before
    assert np.array_equal(view, TENSORS["layer.3.weight"])


def test_saves_beside_loads_give_the_old_or_the_new_file(tmp_path):
    path = tmp_path / "x"
    save_file({"x": np.zeros(300_000, np.float32)}, path, durable=False)

    def work(number):
        for k in range(20):
            if number == 0:
                # Windows refuses while others have it open all the time.
                with contextlib.suppress(PermissionError) if os.name == "nt" else contextlib.nullcontext():
                    save_file({"x": np.full(300_000, k, np.float32)}, path, durable=False)
            else:
                loaded = load_file(path, backend="pread")["x"]
                assert (loaded == loaded[0]).all()

    together(work)


# ---- fork ----

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# Python 3.12 warns of fork beside threads; that no thread of ours is there is what these tests show.
quiet = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(work, seconds=60):
    """Runs work() in a forked process, which must end well and in time."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(seconds)
            assert work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@forks
@quiet
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="its allocator may stay locked in a child")
def test_a_fork_beside_threads_that_load(path):
    """A child has only the thread that forked: whatever the others held must not be missing there."""
    stop = threading.Event()

    def load():
        while not stop.is_set():
            assert same(checkpoint.load(dtype="float32", threads=3), AS_F32)

    with safeload.open(path) as checkpoint, ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load) for _ in range(2)]
        try:
            for _ in range(10 if THOROUGH else 5):
                in_child(lambda: same(checkpoint.load(dtype="float32", threads=3), AS_F32))
                in_child(lambda: same(load_file(path), TENSORS))
        finally:
            stop.set()
        for done in loads:
            done.result()


def test_loads_of_an_open_checkpoint_import_no_module_of_safeload(path):
    """A child that is forked while a thread imports a module would wait for it for ever."""
    code = f"""
import sys
import safeload
with safeload.open({str(path)!r}) as checkpoint:
    before = set(sys.modules)
    checkpoint.load(dtype="float32", threads=3)
    checkpoint.load(backend="pread")
    print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    # ml_dtypes imports numpy._core, which numpy 1 has only for such.
    assert [name for name in done.stdout.split() if not name.startswith(("ml_dtypes", "numpy._core"))] == []


@quiet
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_processes_load_after_their_parent_has_loaded(path, method):
    load = functools.partial(load_file, dtype="float32", threads=2)
    assert same(load(path), AS_F32)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert all(same(loaded, AS_F32) for loaded in pool.map(load, [path] * 4))
    assert same(load(path), AS_F32)
