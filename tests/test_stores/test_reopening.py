"""Files that are opened once more: copies, pickles, more shards than descriptors."""

import concurrent.futures
import copy
import gc
import json
import multiprocessing
import operator
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from builders import torch_build
from builders.inside import local, open_without_table
from builders.thorough import part_of

import safeload
from safeload import FormatError, safe_open
from safeload.numpy import save_file

needs_limits = pytest.mark.skipif(os.name == "nt", reason="no limit of descriptors here")
COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle 2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
WEIGHTS = {"w": np.arange(1000, dtype=np.float32), "v": np.arange(6, dtype=np.int32).reshape(2, 3)}


def write_torch(folder, file):
    value = {
        "model": {k: torch_build.tensor(torch_build.Storage(k, array), array.shape) for k, array in WEIGHTS.items()}
    }
    path = folder / "model.pt"
    path.write_bytes(file(value))
    return path


def write(kind, folder):
    """Weights in a file or a folder of each kind: what to open, and how."""
    folder.mkdir()
    path = folder / "model.safetensors"
    if kind == "safetensors":
        save_file(WEIGHTS, path, durable=False)
    elif kind == "quantized":
        path = folder / "q.safetensors"
        matrix = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
        safeload.convert({**WEIGHTS, "m.weight": matrix}, path, quantize="int8")
    elif kind in ("npz", "npz compressed"):
        path = folder / "model.npz"
        (np.savez if kind == "npz" else np.savez_compressed)(path, **WEIGHTS)
    elif kind in ("moon", "gguf"):
        path = folder / f"model.{kind}"
        halves = {name: array.astype(np.float16) for name, array in WEIGHTS.items()}  # all that MOON holds
        safeload.convert(halves if kind == "moon" else WEIGHTS, path)
    elif kind == "torch zip":
        return write_torch(folder, torch_build.zip_file), {"root": "model"}
    elif kind == "torch legacy":
        return write_torch(folder, torch_build.legacy_file), {"root": "model", "format": "torch"}
    else:
        for name, array in WEIGHTS.items():
            save_file({name: array}, folder / f"{name}.safetensors", durable=False)
        weight_map = {name: f"{name}.safetensors" for name in WEIGHTS}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        path = {"folder": folder, "index": index, "list": [folder / name for name in weight_map.values()]}[kind]
    return path, {}


KINDS = ["safetensors", "quantized", "npz", "npz compressed", "moon", "gguf", "torch zip", "torch legacy"]
KINDS += ["folder", "index", "list"]


@pytest.fixture
def opened(request, tmp_path):
    path, options = write(request.param, tmp_path / "model")
    with safeload.open(path, **options) as opened:
        yield opened


def assert_right(checkpoint):
    for name, array in WEIGHTS.items():
        for backend in ("mmap", "pread", "direct"):
            assert np.array_equal(checkpoint.load([name], backend=backend)[name], array)
        assert np.array_equal(checkpoint[name], array)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("opened", KINDS, indirect=True)
def test_a_copy_is_a_checkpoint_of_its_own(how, opened, monkeypatch, tmp_path):
    twin = COPIES[how](opened)
    assert twin is not opened
    assert (list(twin), twin.format, twin.nbytes) == (list(opened), opened.format, opened.nbytes)
    assert [os.path.abspath(path) for path in opened.files] == twin.files
    assert_right(twin)
    del twin
    gc.collect()
    intruder = os.open(__file__, os.O_RDONLY)  # any file that the program opens now
    assert_right(opened)
    os.close(intruder)
    again = COPIES[how](opened)
    opened.close()
    assert_right(again)
    again.close()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("opened", [kind for kind in KINDS if kind != "quantized"], indirect=True)
def test_a_copied_slice_reads_for_itself(how, opened):
    original = opened.get_slice("v")
    twin = COPIES[how](original)
    assert np.array_equal(twin[1:, ::2], WEIGHTS["v"][1:, ::2])
    assert (twin.shape, twin.dtype) == (original.shape, original.dtype)
    opened.close()
    assert np.array_equal(twin[...], WEIGHTS["v"])
    del twin
    gc.collect()
    with pytest.raises(ValueError, match="is closed"):
        pickle.dumps(original)


@pytest.mark.parametrize("how", COPIES)
def test_handles_and_their_slices_likewise(how, tmp_path):
    save_file(WEIGHTS, tmp_path / "a.safetensors", durable=False)
    with safe_open(tmp_path / "a.safetensors", "np") as handle:
        original = handle.get_slice("v")
        assert np.array_equal(COPIES[how](handle).get_tensor("w"), WEIGHTS["w"])
    twin = COPIES[how](original)
    assert np.array_equal(twin[1], WEIGHTS["v"][1])
    assert twin.get_dtype() == "I32"


def test_the_options_are_kept(tmp_path):
    path, options = write("torch zip", tmp_path / "model")
    opened = safeload.open(path, **options, unknown_globals="inert")
    twin = pickle.loads(pickle.dumps(opened))
    assert twin._recipe == opened._recipe
    assert set(twin) == set(WEIGHTS)


@pytest.mark.parametrize("opened", ["safetensors", "folder", "list"], indirect=True)
def test_a_closed_checkpoint_is_not_copied(opened):
    opened.close()
    for how in COPIES.values():
        with pytest.raises(ValueError, match="is closed"):
            how(opened)


def test_files_and_stores_are_never_copied(tmp_path):
    save_file(WEIGHTS, tmp_path / "a.safetensors", durable=False)
    file = open_without_table(tmp_path / "a.safetensors")
    for how in COPIES.values():
        for thing in (file, file.store):
            with pytest.raises(TypeError, match="cannot be copied"):
                how(thing)


def test_a_pickle_holds_an_absolute_path(tmp_path, monkeypatch):
    save_file(WEIGHTS, tmp_path / "a.safetensors", durable=False)
    monkeypatch.chdir(tmp_path)
    opened, handle = safeload.open("a.safetensors"), safe_open("a.safetensors", "np")
    slices = opened.get_slice("w"), handle.get_slice("w")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for how in COPIES.values():
        assert_right(how(opened))
        assert how(handle).get_tensor("w")[3] == 3
        assert [how(one)[3] for one in slices] == [3, 3]


# ---- changes ----


def rewrite(path):
    """Other bytes, of the same size, in the same file."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def replace(path):
    """Another file of the same size and time."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def extend(path):
    with path.open("ab") as file:
        file.write(b"more")


def remake(path):
    save_file({"w": np.zeros(3)}, path, durable=False)


@pytest.mark.parametrize("change", [rewrite, replace, extend, remake])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("opened", ["safetensors", "npz compressed", "folder", "list"], indirect=True)
def test_a_file_that_has_changed_is_not_opened_again(how, change, opened):
    slice_ = opened.get_slice(next(name for name, info in opened.tensors.items() if info.file == opened.files[0]))
    if os.name == "nt" and opened.format == "safetensors":  # the others here are not open, and replaced
        opened.weight_files[0].store.release()
    change(Path(opened.files[0]))
    if change is replace and how.startswith("pickle"):  # in another process an inode means nothing
        assert_right(COPIES[how](opened))
        return
    for thing in (opened, slice_):
        with pytest.raises(FormatError, match="changed since it was opened"):
            COPIES[how](thing)


@pytest.mark.parametrize("how", COPIES)
def test_a_changed_handle_likewise(how, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(WEIGHTS, path, durable=False)
    with safe_open(path, "np") as handle:
        slice_ = handle.get_slice("w")
        rewrite(path)
        for thing in (handle, slice_):
            with pytest.raises(FormatError, match="changed since it was opened"):
                COPIES[how](thing)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("opened", ["folder", "index"], indirect=True)
def test_a_folder_that_has_changed_is_not_opened_again(how, opened):
    index = Path(opened.files[0]).parent / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text + " ")
    with pytest.raises(FormatError, match="changed since it was opened") as caught:
        COPIES[how](opened)
    assert caught.value.path == str(index)
    index.write_text(json.dumps({"weight_map": {"w": "w.safetensors"}}))
    with pytest.raises(FormatError, match="changed since it was opened"):
        COPIES[how](opened)


@pytest.mark.parametrize("opened", ["safetensors"], indirect=True)
def test_unpickling_where_the_file_is_gone_is_file_not_found(opened):
    data = pickle.dumps(opened)
    opened.close()  # Windows keeps what is open
    os.unlink(opened.files[0])
    with pytest.raises(FileNotFoundError):
        pickle.loads(data)


# ---- other processes ----


@pytest.mark.parametrize("start", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("opened", ["folder", "torch zip", "list"], indirect=True)
def test_checkpoints_go_to_other_processes(start, opened):
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} here")
    context = multiprocessing.get_context(start)
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        for get, thing in (("w", opened), (..., opened.get_slice("w"))):
            found = pool.submit(operator.itemgetter(get), thing).result(timeout=120)
            assert np.array_equal(found, WEIGHTS["w"])


# ---- more shards than descriptors ----


def write_shards(folder, count):
    folder.mkdir()
    for k in range(count):
        name = f"model-{k + 1:05}-of-{count:05}.safetensors"
        save_file({f"t{k:04}": np.full(5, k, np.float32)}, folder / name, durable=False)
    return folder


_FEW = """
import copy, os, pickle, resource, sys, threading
import numpy as np, safeload
folder, limit, shards = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
def check(found):
    assert len(found) == shards
    for k, (name, array) in enumerate(sorted(found.items())):
        assert name == f"t{k:04}" and (np.asarray(array) == k).all(), name
def count(): return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
with safeload.open(folder) as opened:
    assert len(opened) == shards
    check(dict(opened))
    for backend in ("mmap", "pread", "direct"):
        check(opened.load(backend=backend))
        check(opened.load(backend=backend, dtype="float64", threads=3))
    assert count() < limit * 3 // 4 + 8, count()
    seen = []
    opened.load(backend="pread", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (20 * shards, 20 * shards), seen[-3:]
    slices = [opened.get_slice(name) for name in opened]
    check({name: part[1:] for name, part in zip(opened, slices)})
    twin = pickle.loads(pickle.dumps(opened))
    faults = []
    def work(start):
        try:
            for _ in range(3):
                for k in range(shards):
                    j = (k * 7 + start) % shards
                    assert (slices[j][:] == j).all()
                    assert (twin.load([f"t{j:04}"], backend="pread")[f"t{j:04}"] == j).all()
        except BaseException as error:
            faults.append(repr(error))
    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, shards, shards // 4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not faults, faults
    assert len(safeload.stats(opened)) == shards
    assert safeload.check(opened).ok
    safeload.convert(opened, folder + "-again", max_shard_size=20)
    check(safeload.load(folder + "-again"))
    safeload.convert(folder, folder + "-one.safetensors")
    check(safeload.load(folder + "-one.safetensors"))
    assert safeload.diff(folder, folder + "-one.safetensors").same
handles = [safeload.safe_open(path, "np") for path in opened.files]
kept = []
for handle in handles:
    with handle: kept.append(handle.get_slice(handle.keys()[0]))
assert [int(part[0]) for part in kept] == list(range(shards))
print("fine", count())
"""


@needs_limits
@pytest.mark.parametrize(("limit", "shards"), [(64, 100), *part_of([(256, 300)], 1, 2)])
def test_more_shards_than_descriptors(limit, shards, tmp_path):
    folder = write_shards(tmp_path / "model", shards)
    done = subprocess.run(
        [sys.executable, "-c", _FEW, str(folder), str(limit), str(shards)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("fine"), done.stderr


_OWN = """
import os, resource, sys
import numpy as np, safeload
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
opened = safeload.open(sys.argv[1])
own = []
try:
    while True: own.append(os.open(sys.argv[1], os.O_RDONLY))
except OSError: pass
assert len(opened.load(backend="pread")) == 60
again = safeload.open(opened.files[0])
assert (again.load(backend="pread")["t0000"] == 0).all()
print("fine")
"""


@needs_limits
def test_descriptors_are_let_go_where_the_program_has_taken_all(tmp_path):
    folder = write_shards(tmp_path / "model", 60)
    done = subprocess.run(
        [sys.executable, "-c", _OWN, str(folder)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.fixture
def tiny_budget(monkeypatch):
    if os.name == "nt":
        pytest.skip("nothing is let go here")
    monkeypatch.setattr(local, "_UNCHECKED", 2)
    monkeypatch.setattr(local, "_budget", lambda: 2)
    gc.collect()


@pytest.mark.parametrize("change", [rewrite, replace, remake, os.unlink])
def test_a_file_that_only_its_descriptor_leads_to_is_kept(change, tiny_budget, tmp_path):
    folder = write_shards(tmp_path / "model", 12)
    for k in range(12):
        with safeload.open(folder / f"model-{k + 1:05}-of-00012.safetensors") as first:
            change(Path(first.files[0]))
            others = [safeload.open(path) for path in sorted(folder.glob("*.safetensors"))[k + 2 :]]
            values = first.load(backend="pread")[f"t{k:04}"]
            assert (values[:4] == k).all()
            del others


def test_a_file_that_was_let_go_and_changed_is_refused(tiny_budget, tmp_path):
    folder = write_shards(tmp_path / "model", 12)
    for change in (rewrite, replace, remake):
        with safeload.open(folder) as opened:
            part = opened.get_slice("t0000")
            safeload.load(folder, backend="pread")
            store = opened.weight_files[0].store
            assert store.release() or store._descriptor is None
            change(Path(opened.files[0]))
            for call in (part.__getitem__, lambda _, opened=opened: opened.load(backend="pread"), opened.get):
                with pytest.raises(FormatError, match="changed since it was opened") as caught:
                    call("t0000" if call == opened.get else ...)
                assert caught.value.path == opened.files[0]
        save_file({"t0000": np.full(5, 0, np.float32)}, opened.files[0], durable=False)


def test_a_compressed_npz_that_was_unpacked_is_never_let_go(tiny_budget, tmp_path):
    path, _ = write("npz compressed", tmp_path / "npz")
    folder = write_shards(tmp_path / "model", 12)
    with safeload.open(path) as opened, safeload.open(folder) as other:
        other.load(backend="pread")
        assert_right(opened)


def test_threads_that_open_and_close_disturb_nobody(tiny_budget, tmp_path):
    folder = write_shards(tmp_path / "model", 8)
    faults = []

    def work(start):
        try:
            for round in range(40):
                with safeload.open(folder) as opened:
                    name = f"t{(start + round) % 8:04}"
                    assert (opened.load([name], backend="pread")[name] == (start + round) % 8).all()
                    assert len(opened.load(backend="pread")) == 8
        except BaseException as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
