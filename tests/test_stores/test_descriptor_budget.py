"""All threads, checkpoints and forked children share one budget: half of the descriptors that the system allows."""

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import inside
from builders.inside import local
from builders.thorough import THOROUGH, part_of

import safeload
from safeload.numpy import save_file

resource = pytest.importorskip("resource")
pytestmark = [
    pytest.mark.any_python,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_NOFILE and /proc as Linux has them"),
]

SHARDS, REPEATS = 120, 3 if THOROUGH else 2

PROLOGUE = inside.program(f"""
import os, resource, sys, threading, time, warnings
import numpy as np, safeload
from builders.inside import local
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
folder, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
SHARDS = {SHARDS}
def right(loaded, count=SHARDS):
    assert len(loaded) == count, len(loaded)
    assert all((np.asarray(array) == int(name[1:])).all() for name, array in loaded.items())
def count(): return len(os.listdir("/proc/self/fd")) - 1
most = [0]
def together(*works, repeat={REPEATS}):
    errors, left = [], [len(works)]
    def run(work):
        try:
            for _ in range(repeat): work()
        except BaseException as error:
            errors.append(repr(error))
        finally:
            left[0] -= 1
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads: thread.start()
    while left[0]:
        most[0] = max(most[0], len(local._open))
        time.sleep(0.001)
    for thread in threads: thread.join()
    assert not errors, errors[:3]
before = count()
""")

CASES = {
    "one checkpoint, 8 threads": """
shared = safeload.open(folder)
together(*[lambda: right(shared.load(dtype="float64", threads=1))] * 8)
""",
    "a checkpoint for each of 8 threads": """
def work():
    with safeload.open(folder) as own: right(own.load(backend="pread"))
together(*[work] * 8)
""",
    "many checkpoints of few files": """
files = sorted(os.scandir(folder), key=lambda entry: entry.name)
groups = [[entry.path for entry in files[k * 14 : k * 14 + 14]] for k in range(8)]
opened = [safeload.open(group) for group in groups]
together(*[lambda one=one: right(one.load(dtype="float64"), 14) for one in opened] * 2, repeat=10)
""",
    "more threads than the budget has descriptors": """
shared = safeload.open(folder)
together(*[lambda: right(shared.load(dtype="float64", threads=1))] * 40, repeat=1)
""",
    "past the page cache": """
shared = safeload.open(folder)
together(*[lambda: right(shared.load(backend="direct", threads=1))] * 8)
""",
    "different calls": """
shared, slices = safeload.open(folder), {}
def by_slices(): right({name: shared.get_slice(name)[:] for name in shared})
def by_files():
    for entry in os.scandir(folder): right(safeload.numpy.load_file(entry.path, dtype="float64"), 1)
def by_handles():
    for entry in os.scandir(folder):
        with safeload.safe_open(entry.path, "np") as file: right(file.get_tensors(), 1)
def by_stats(): assert len(safeload.stats(shared)) == SHARDS
def by_streams(): right(dict(shared.stream(dtype="float64")))
def mapped(): right(shared.load())
together(by_slices, by_files, by_handles, by_stats, by_streams, mapped, by_streams, by_stats)
""",
    "streams in streams": """
shared, again = safeload.open(folder), safeload.open(folder)
def work():
    for k, (name, array) in enumerate(shared.stream(dtype="float64")):
        if k % 40 == 0:
            for j, (inner, values) in enumerate(again.stream(dtype="float64")):
                if j % 60 == 0: right(again.load(dtype="float32", threads=1))
together(*[work] * 3, repeat=1)
""",
    "a load in the progress of a load": """
shared, again = safeload.open(folder), safeload.open(folder)
def work():
    right(shared.load(dtype="float64", progress=lambda done, total: right(again.load(dtype="float64", threads=1))))
together(*[work] * 4, repeat=1)
""",
    "a program that leaves few": """
shared, own = safeload.open(folder), []
try:
    while True: own.append(os.open(folder, os.O_RDONLY))
except OSError: pass
local._release(1000)
for _ in range(3): os.close(own.pop())
together(*[lambda: right(shared.load(dtype="float64", threads=1))] * 8, repeat=1)
for descriptor in own: os.close(descriptor)
""",
    "forked children": """
shared = safeload.open(folder)
stop = threading.Event()
def work():
    while not stop.is_set(): right(shared.load(dtype="float64", threads=1))
threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
for generation in range(3):
    child = os.fork()
    if child == 0:
        try:
            together(*[lambda: right(shared.load(dtype="float64", threads=1))] * 8, repeat=1)
            if generation == 2:
                together(lambda: right(safeload.open(folder).load(dtype="float64")), repeat=1)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads: thread.join()
""",
    "conversions": """
shared = safeload.open(folder)
def work(k):
    safeload.convert(shared, f"{folder}-{k}", max_shard_size=200, overwrite=True)
    right(safeload.load(f"{folder}-{k}", dtype="float64"))
together(*[lambda k=k: work(k) for k in range(4)], repeat=1)
""",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget") / "model"
    folder.mkdir()
    for k in range(SHARDS):
        name = f"model-{k + 1:05}-of-{SHARDS:05}.safetensors"
        save_file({f"t{k}": np.full(40, k, np.float32)}, folder / name, durable=False)
    return folder


# With few and with many to share; every second case has one of them unless there is time.
LIMITS = [(case, limit) for k, case in enumerate(part_of([*CASES], 0, 2)) for limit in part_of([64, 256], k, 2)]


@pytest.mark.parametrize(("case", "limit"), LIMITS)
def test_threads_stay_within_half_of_the_descriptors(case, limit, shards, tmp_path):
    folder = tmp_path / "model"
    folder.symlink_to(shards)
    # Each thread may have opened one more before it closes another.
    within = "assert most[0] <= limit * 3 // 4, most\nassert count() - before == len(local._open)\nprint('fine')"
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROLOGUE + CASES[case] + within, str(folder), str(limit)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.fixture
def store(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "a.safetensors", durable=False)
    with contextlib.closing(local.open_local(tmp_path / "a.safetensors")) as store:
        yield store


def is_open(number):
    return os.path.exists(f"/proc/self/fd/{number}")


def test_a_thread_closes_idle_files_of_another(tmp_path):
    for k in range(3):
        save_file({"a": np.full(2, k, np.float32)}, tmp_path / f"{k}.safetensors", durable=False)
    with ThreadPoolExecutor(1) as pool:
        opened = list(pool.map(safeload.open, (tmp_path / f"{k}.safetensors" for k in range(3))))
    stores = [checkpoint.weight_files[0].store for checkpoint in opened]
    numbers = [store.use(int) for store in stores]
    assert local._release(sys.maxsize)
    assert not any(map(is_open, numbers))
    assert [float(checkpoint["a"][0]) for checkpoint in opened] == [0, 1, 2]  # opened again, here


@pytest.mark.parametrize("end", ["close", "release"])
@pytest.mark.parametrize("use", ["a call", "a job"])
def test_a_descriptor_in_use_stays_open_and_the_last_user_of_a_closed_file_closes_it_at_once(end, use, store):
    before, checked = len(local._open), []

    def in_use(number):
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(local._release, sys.maxsize).result()
            pool.submit(getattr(store, end)).result()
            assert not pool.submit(local._release, sys.maxsize).result()
        assert is_open(number)
        assert len(local._open) == before  # as a job might still read it
        checked.append(number)
        raise KeyboardInterrupt

    def in_job():
        try:
            in_use(store.begin_use())
        finally:
            store.end_use()

    with pytest.raises(KeyboardInterrupt) as caught:  # its traceback refers to everything
        store.use(lambda number: store.use(in_use)) if use == "a call" else in_job()
    assert caught.tb
    assert is_open(*checked) == (end == "release")
    assert store.release() == (end == "release")
    assert not is_open(*checked)
    assert len(local._open) == before - 1
    assert not local._used


def test_threads_that_open_a_file_again_leave_one_descriptor(store):
    before = len(local._open)
    start = threading.Barrier(8)

    def read():
        for _ in range(50):
            start.wait()
            store.release()
            store.read_into(0, bytearray(8))

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(read) for _ in range(8)]:
            done.result()
    store.read_into(0, bytearray(8))
    assert len(local._open) == before


def test_a_file_closed_while_it_is_opened_again_leaves_none(store, monkeypatch):
    before, opened = len(local._open), local._opened
    assert store.release()
    monkeypatch.setattr(local, "_opened", lambda path: (store.close(), opened(path))[1])
    store.read_into(0, bytearray(8))
    assert len(local._open) == before - 1
    with pytest.raises(ValueError, match="is closed"):
        store.read_into(0, bytearray(8))


def test_a_file_that_nothing_refers_to_is_closed(store, tmp_path):
    before = len(local._open)
    number = local.open_local(tmp_path / "a.safetensors").use(int)
    assert not is_open(number)
    assert len(local._open) == before


def test_a_forked_child_closes_what_a_thread_of_its_parent_used(store):
    used, done = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.use, lambda number: (used.set(), done.wait()))
        used.wait()
        store.release()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = os.fork()
        if child == 0:
            os._exit(not local._release(sys.maxsize))
        status = os.waitpid(child, 0)[1]
        done.set()
        call.result()
    assert status == 0
