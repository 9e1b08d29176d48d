"""Conversions into folders of a store: the bytes of a local one, and never a mixture, whatever fails or is killed."""

import io
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from builders import inside
from builders.clusters import usual, waiting
from builders.executors import echoed, processes, settled
from builders.thorough import part_of

pytest.importorskip("fsspec")

from builders.inside import main
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import safeload
import safeload.remote
from safeload import FormatError, UnsupportedError
from safeload.errors import RemotePermissionError
from safeload.numpy import save_file

RESUME, INDEX, SINGLE = ".safeload-resume", "model.safetensors.index.json", "model.safetensors"
LIMIT = "60KB"
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
BUCKET = "written"

# fsspec and aiobotocore leave sockets to Python when an event loop ends.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
    pytest.mark.any_python,
    pytest.mark.no_core,
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    inside.tune(monkeypatch, retry_pause=0.001)


@pytest.fixture(autouse=True)
def _nothing_stays_here(monkeypatch, tmp_path):
    """Shards wait in temporary folders, which are gone whatever has happened."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def endpoint():
    moto_server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(endpoint):
    """Options of an empty bucket."""
    import s3fs

    options = {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": "eu-central-1"}}
    fs = s3fs.S3FileSystem(**options)
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    yield options
    fs.invalidate_cache()
    for path in fs.find(BUCKET):
        fs.rm_file(path)


class Memory(MemoryFileSystem):
    """Memory of its own, which counts what changes it, and fails or dies at the k-th of these calls."""

    cachable = False

    def __init__(self, **options):
        super().__init__(**options)
        self.store, self.pseudo_dirs = {}, [""]
        self.calls, self.fails_at, self.error = 0, None, OSError(28, "the store is full")

    def _count(self):
        self.calls += 1
        if self.fails_at is not None and self.calls >= self.fails_at:
            raise self.error

    def put_file(self, *arguments, **options):
        self._count()
        return super().put_file(*arguments, **options)

    def mv(self, *arguments, **options):
        self._count()
        return super().mv(*arguments, **options)

    def rm_file(self, path):
        self._count()
        return super().rm_file(path)

    def copy_of(self):
        made = Memory()
        made.store, made.pseudo_dirs = dict(self.store), list(self.pseudo_dirs)
        return made

    def at(self, path="/model"):
        return safeload.remote.of_fsspec(self, path)


class Killed(BaseException):
    """What a signal would do: no handler of errors runs for it, and nothing is written after it."""


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.store_packages)])
def place(request, tmp_path):
    """A destination, the options for it, its filesystem and its path there."""
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        import s3fs

        return f"s3://{BUCKET}/a/model/", options, s3fs.S3FileSystem(**options), f"{BUCKET}/a/model"
    fs = Memory() if request.param == "memory" else LocalFileSystem()
    path = "/model" if request.param == "memory" else f"{tmp_path.as_posix()}/there/model"
    return safeload.remote.of_fsspec(fs, path), None, fs, path


def contents(fs, path, *, records=False):
    """What a listing shows: name to bytes."""
    fs.invalidate_cache()
    found = fs.find(path) if fs.exists(path) else []
    names = {one.rpartition("/")[2]: one for one in found if records or f"/{RESUME}/" not in one}
    return {name: fs.cat_file(one) for name, one in names.items() if not name.startswith(".")}


def of_folder(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def want(model, tmp_path_factory):
    """The same conversion on this machine."""
    folder = tmp_path_factory.mktemp("want") / "made"
    safeload.convert(model, folder, dtype="f16", max_shard_size=LIMIT)
    return of_folder(folder)


HALF = {"dtype": "f16", "max_shard_size": LIMIT}


def tensors(path, **options):
    with safeload.open(path, **options) as opened:
        return {name: np.array(opened[name]) for name in opened}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def state(fs, old, new, path="/model", *, fresh=False):
    """Which checkpoint a reader finds: "old", "new" or "none"; anything else is a mixture."""
    try:
        found = tensors(safeload.remote.of_fsspec(fs, path))
    except (FormatError, UnsupportedError, FileNotFoundError):
        return "none"
    dtypes = {str(array.dtype) for array in found.values()}
    which, wanted = ("new", new) if dtypes == {"float16"} else ("old", old)
    assert_same(found, wanted)
    config = json.loads(contents(fs, path).get("config.json", b"{}"))
    assert config.get("dtype", config.get("torch_dtype")) in (None, {"new": "float16", "old": "bfloat16"}[which])
    assert config or fresh  # in a new folder, config.json comes after the shards
    return which


# ---- the same bytes ----


@pytest.mark.parametrize("how", ["at once", "resume", "executor", "plan"])
def test_the_result_is_that_on_this_machine(how, model, want, place):
    dst, options, fs, path = place
    given = {**HALF, "storage_options": options}
    if how == "plan":
        plan = json.loads(json.dumps(safeload.plan_convert(model, dst, **given)))
        # Of a filesystem of the caller's nothing but its public options is in a plan.
        if not isinstance(dst, str) and isinstance(fs, Memory):
            pytest.skip("this memory is the test's alone")
        results = [safeload.run_piece(json.loads(json.dumps(one)), storage_options=options) for one in plan["pieces"]]
        report = safeload.finalize(plan, json.loads(json.dumps(results)), storage_options=options)
    elif how == "executor":
        with ThreadPoolExecutor(3) as executor:
            report = safeload.convert(model, dst, executor=executor, **given)
    else:
        report = safeload.convert(model, dst, resume=how == "resume", **given)
    assert contents(fs, path) == want
    assert [name.rpartition("/")[2] for name in report.files] == sorted(n for n in want if n.endswith("safetensors"))
    assert report.nbytes == sum(len(content) for name, content in want.items() if name.endswith("safetensors"))
    assert (report.format, report.tensors) == ("safetensors", 30)
    assert str(report).startswith(f"{dst}: safetensors, 30 tensors")
    assert contents(fs, path, records=True).keys() == want.keys()
    assert not fs.exists(f"{path}/{RESUME}")
    assert_same(tensors(dst, storage_options=options), safeload.load(model, dtype="f16"))


def test_tensors_in_memory(tmp_path):
    fs = Memory()
    arrays = {"w": np.arange(6, dtype=np.float32), "empty": np.zeros((0, 3), np.float16)}
    report = safeload.convert(arrays, fs.at(), metadata={"a": "b"})
    assert report.destination == "memory:///model"
    assert_same(tensors(fs.at()), arrays)
    assert set(contents(fs, "/model")) == {"model.safetensors"}
    with pytest.raises(ValueError, match="only in this process"):
        safeload.convert(arrays, fs.at("/other"), resume=True)


def test_nothing_at_all():
    fs = Memory()
    with pytest.raises(safeload.SafeloadError, match="no tensor to convert"):
        safeload.convert({}, fs.at())
    assert not fs.store
    safeload.save({}, fs.at())
    assert len(safeload.open(fs.at())) == 0


def test_quantized_and_stacked(model, tmp_path):
    fs = Memory()
    options = {"quantize": "int8", "max_shard_size": LIMIT, "rename": [(r"^model\.", "")], "extras": False}
    report = safeload.convert(model, fs.at(), resume=True, **options)
    other = safeload.convert(model, tmp_path / "want", **options)
    assert contents(fs, "/model") == of_folder(tmp_path / "want")
    assert report.summary == other.summary._replace(tensors=None)  # which pieces do not report


def test_one_shard_at_a_time_waits_on_this_machine(model, monkeypatch):
    fs, waiting = Memory(), []

    def put_file(source, *arguments, **options):
        waiting.append(sum(path.stat().st_size for path in Path(tempfile.gettempdir()).rglob("*.safetensors")))
        return Memory.put_file(fs, source, *arguments, **options)

    monkeypatch.setattr(fs, "put_file", put_file)
    report = safeload.convert(model, fs.at(), **HALF)
    assert max(waiting) == max(fs.size(f"/model/{name.rpartition('/')[2]}") for name in report.files)


# ---- what a destination is ----


REFUSED = [
    ("memory://a/x.pt", ValueError, "the suffix must be one of"),
    ("memory://user:password@b/x.pth", ValueError, "'memory://b/x.pth': the suffix must be one of"),
    ("https://example.org/x/", UnsupportedError, "https is read-only"),
    ("http://example.org/x.safetensors", UnsupportedError, "https is read-only"),
    ("memory://a/b?x=secret", UnsupportedError, r"memory://a/b: expected .* without \? and #"),
    ("zip://a::memory://b", UnsupportedError, "needs storage_options="),
    ("ftp://host/a", UnsupportedError, "needs storage_options="),
    (Path("s3://bucket/model"), ValueError, "pathlib drops a slash"),
    (7, TypeError, "got int"),
    (b"abc\0", TypeError, "expected a path, got the content"),
]


@pytest.mark.parametrize(("url", "error", "message"), REFUSED, ids=[str(row[0]) for row in REFUSED])
@pytest.mark.parametrize("call", [safeload.convert, safeload.plan_convert], ids=["convert", "plan_convert"])
def test_what_is_refused_before_anything_is_read(call, url, error, message):
    if str(url).startswith("s3://"):
        pytest.importorskip("s3fs")
    with pytest.raises(error, match=message) as caught:
        call("no such source", url)
    assert "secret" not in str(caught.value)
    assert "password" not in str(caught.value)


def test_a_plan_has_no_file_object_as_destination():
    with pytest.raises(TypeError, match="the destination must be a path, a URL or a store here, got BytesIO"):
        safeload.plan_convert("no such source", io.BytesIO())


def test_a_slash_makes_a_folder_of_any_name(model):
    with pytest.raises(ValueError, match="suffix of a file"):
        safeload.convert(model, "memory://slash/x.safetensors", max_shard_size=LIMIT)
    safeload.convert(model, "memory://slash/x.safetensors/")
    assert len(safeload.open("memory://slash/x.safetensors/")) == 30
    MemoryFileSystem().rm("/slash", recursive=True)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "model.NPZ"])
def test_a_suffix_makes_a_file(name, model):
    dtype = "float32"  # which every format holds
    report = safeload.convert(model, f"memory://file/{name}", raw=True, dtype=dtype)
    assert report.files == [f"memory://file/{name}"]
    with safeload.open(report.files[0]) as checkpoint:
        assert (len(checkpoint), checkpoint.format) == (30, report.format)
    with pytest.raises(FileExistsError):
        safeload.convert(model, f"memory://file/{name}", raw=True, dtype=dtype)
    with pytest.raises(ValueError, match="written at once"):
        safeload.convert(model, f"memory://file/{name}", raw=True, dtype=dtype, resume=True)
    safeload.convert(model, f"memory://file/{name}", raw=True, dtype=dtype, only="*norm*", overwrite=True)
    assert len(safeload.load(report.files[0])) == 7
    assert MemoryFileSystem().ls("/file", detail=False) == [f"/file/{name}"]
    MemoryFileSystem().rm("/file", recursive=True)


def test_a_file_that_an_index_would_hide_is_refused(model):
    safeload.convert(model, "memory://hidden/", max_shard_size=LIMIT)
    with pytest.raises(FileExistsError, match="would be read instead"):
        safeload.convert(model, "memory://hidden/model.safetensors", overwrite=True)
    MemoryFileSystem().rm("/hidden", recursive=True)


def test_offline(model, monkeypatch):
    monkeypatch.setenv("SAFELOAD_OFFLINE", "1")
    with pytest.raises(UnsupportedError, match="SAFELOAD_OFFLINE is set"):
        safeload.convert(model, "s3://bucket/model")


def test_file_urls_are_this_machine(model, tmp_path, want):
    safeload.convert(model, f"{tmp_path.as_uri()}/a b", **HALF)
    assert of_folder(tmp_path / "a b") == want
    assert safeload.convert(model, f"{tmp_path.as_uri()}/x.gguf", dtype="f16", raw=True).destination == str(
        tmp_path / "x.gguf"
    )
    with pytest.raises(FileExistsError):
        safeload.convert(model, f"{tmp_path.as_uri()}/a b", **HALF)
    report = safeload.convert(model, f"{tmp_path.as_uri()}/folder/")
    assert report.files == [str(tmp_path / "folder" / "model.safetensors")]


def test_a_relative_path_of_this_machine(model, want, tmp_path, monkeypatch):
    """Its shards stay, also where the plan names the folder by its absolute path."""
    monkeypatch.chdir(tmp_path)
    plan = safeload.plan_convert(model, "made", **HALF)
    for piece in plan.pieces:
        safeload.run_piece(piece)
    times = {path.name: path.stat().st_ino for path in waiting(tmp_path / "made").glob("*.safetensors")}
    for overwrite in (False, True):
        report = safeload.convert(model, "made", resume=True, overwrite=overwrite, **HALF)
        assert (report.destination, os.path.dirname(report.files[0])) == ("made", "made")
        assert usual(of_folder(tmp_path / "made")) == want
        assert {file: os.stat(f"made/{file}").st_ino for file in times} == times  # they are the same already


def test_a_filesystem_that_only_reads(model):
    http = pytest.importorskip("fsspec.implementations.http")
    path = safeload.remote.of_fsspec(http.HTTPFileSystem(), "https://example.org/a/")
    with pytest.raises(UnsupportedError, match="http has no standard way to write files"):
        safeload.convert(model, path)


def test_a_store_that_may_not_be_listed(model, monkeypatch):
    """What is there would be replaced unseen."""
    fs = Memory()

    def ls(*arguments, **options):
        raise PermissionError("no")

    monkeypatch.setattr(fs, "ls", ls)
    with pytest.raises(RemotePermissionError):
        safeload.convert(model, fs.at())
    assert fs.store == {}


def test_a_file_of_that_name(model):
    fs = Memory()
    fs.pipe_file("/model", b"mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="This is a file, but shards need a folder"):
            safeload.convert(model, fs.at(), overwrite=overwrite)
    assert fs.cat_file("/model") == b"mine"


def test_a_disk_without_space(model, monkeypatch):

    def full(self, pieces):
        raise OSError(28, "No space left on device", self.path)

    monkeypatch.setattr(inside.atomic_file.AtomicFile, "write", full)
    fs = Memory()
    with pytest.raises(OSError, match=r"No space for .* to be uploaded from here; set TMPDIR") as caught:
        safeload.convert(model, fs.at())
    assert caught.value.filename == tempfile.gettempdir()
    assert contents(fs, "/model") == {}


# ---- what is there ----


def test_a_folder_with_content_is_kept(model, want):
    fs = Memory()
    fs.pipe_file("/model/notes.txt", b"mine")
    for options in ({}, {"resume": True}):
        with pytest.raises(FileExistsError):
            safeload.convert(model, fs.at(), **HALF, **options)
    assert contents(fs, "/model", records=True) == {"notes.txt": b"mine"}
    safeload.convert(model, fs.at(), overwrite=True, **HALF)
    assert contents(fs, "/model") == {**want, "notes.txt": b"mine"}


@pytest.mark.parametrize("resume", [False, True])
def test_shards_that_replace_others_have_other_names(resume, model, want):
    fs = Memory()
    safeload.convert(model, fs.at(), max_shard_size=LIMIT)
    for _ in range(2):
        safeload.convert(model, fs.at(), overwrite=True, resume=resume, **HALF)
        found = contents(fs, "/model")
        shards = sorted(name for name in found if name.endswith("safetensors"))
        assert len(found) == len(want)
        assert all(re.fullmatch(r"model-\d{5}-of-0000[56]\.safetensors", name) for name in shards)
        assert [found[name] for name in shards] == [want[name] for name in sorted(want) if name.endswith("safetensors")]
        assert sorted(set(json.loads(found[INDEX])["weight_map"].values())) == shards
        assert found["config.json"] == want["config.json"]
    assert state(fs, {}, safeload.load(model, dtype="f16")) == "new"


def test_a_checkpoint_converted_onto_itself(model):
    fs = Memory()
    safeload.convert(model, fs.at(), max_shard_size=LIMIT)
    with pytest.raises(FileExistsError):
        safeload.convert(fs.at(), fs.at(), **HALF)
    safeload.convert(fs.at(), fs.at(), overwrite=True, **HALF)
    assert state(fs, {}, safeload.load(model, dtype="f16")) == "new"
    assert "tokenizer.json" in contents(fs, "/model")


@pytest.mark.parametrize("there", [None, "index", "single"])
@pytest.mark.parametrize("resume", [False, True])
def test_never_a_mixture_wherever_it_is_killed(there, resume, model):
    """A reader finds the old checkpoint, the new one or none; the same call again completes it."""
    old, new = tensors(model), safeload.load(model, dtype="f16")
    before = Memory()
    if there == "index":
        safeload.convert(model, before.at(), max_shard_size=LIMIT)
    elif there == "single":
        source = Path(tempfile.mkdtemp(dir=Path(tempfile.gettempdir()).parent))
        safeload.convert(model, source / "model.safetensors")
        before.pipe_file("/model/model.safetensors", (source / "model.safetensors").read_bytes())
        before.pipe_file("/model/config.json", (model / "config.json").read_bytes())
    options = {**HALF, "overwrite": there is not None, "resume": resume}
    whole = before.copy_of()
    safeload.convert(model, whole.at(), **options)
    # Each of these six has a few of the places, others than the rest, and the first and the last.
    place = 2 * [None, "index", "single"].index(there) + resume
    counts = range(1, whole.calls + 1)
    seen = []
    for count in sorted({1, *part_of(list(counts), 4 * place, 24), whole.calls}):
        fs = before.copy_of()
        fs.fails_at, fs.error = count, Killed()
        with pytest.raises(Killed):
            safeload.convert(model, fs.at(), **options)
        fs.fails_at = None
        seen.append(state(fs, old, new, fresh=there is None))
        safeload.convert(model, fs.at(), **{**options, "overwrite": True})
        assert state(fs, old, new) == "new"
    # From what was there to what is wanted, once, with nothing in between but a moment without an index.
    assert seen == sorted(seen, key=["none" if there is None else "old", "none", "new"].index)
    assert seen[0] == ("none" if there is None else "old")
    assert seen.count("none") <= 6 or there is None


OLD = {name: np.zeros(200, np.float32) for name in "abcd"}


def replacing(old, new):
    """A store with an old model, and the tensors and config.json of a new one to be converted into it."""
    fs, source = Memory(), Path(tempfile.mkdtemp(dir=Path(tempfile.gettempdir()).parent))
    safeload.save(OLD, source / "old", max_shard_size=None if old == "single" else 1000)
    if old == "set without index":
        (source / "old" / INDEX).unlink()
    (source / "old" / "config.json").write_text('{"version": 0}')
    fs.put(str(source / "old"), "/model", recursive=True)
    fs.calls = 0
    save_file({name: array + 1 for name, array in OLD.items()}, source / "model.safetensors")
    (source / "config.json").write_text('{"version": 1}')
    return fs, partial(safeload.convert, source, fs.at(), overwrite=True, max_shard_size=new)


def version(fs):
    """The version that a reader finds, which has its own config; None for an error."""
    try:
        found = {float(array[0]) for array in tensors(fs.at()).values()}
    except (FormatError, UnsupportedError, FileNotFoundError):
        return None
    (value,) = found
    assert json.loads(contents(fs, "/model")["config.json"])["version"] == value
    return value


def files_of_model(fs):
    found = contents(fs, "/model")
    return {"config.json", *([INDEX, *json.loads(found[INDEX])["weight_map"].values()] if INDEX in found else [SINGLE])}


@pytest.mark.parametrize("old", ["shards", "single", "set without index"])
@pytest.mark.parametrize("new", [1000, None])
def test_codes_are_never_without_their_config(old, new):
    whole, convert = replacing(old, new)
    convert()
    assert contents(whole, "/model").keys() == files_of_model(whole)
    for count in part_of([*range(1, whole.calls + 1)], len(old) + bool(new), 8 if new is None else 14):
        fs, convert = replacing(old, new)
        fs.fails_at, fs.error = count, Killed()
        with pytest.raises(Killed):
            convert()
        fs.fails_at = None
        assert version(fs) in (0, 1, None)
        convert()
        assert version(fs) == 1
        assert contents(fs, "/model").keys() == files_of_model(fs)


def test_a_failed_call_leaves_the_old_model(caplog):
    """If the store works again after the error; what cannot be removed of the old model after the end is a warning."""
    whole, convert = replacing("shards", 1000)
    convert()
    old = contents(replacing("shards", 1000)[0], "/model")
    for count in range(whole.calls, 0, -1):
        fs, convert = replacing("shards", 1000)
        counted = fs._count

        def fails_once(fs=fs, counted=counted, count=count):
            counted()
            if fs.calls == count:
                raise fs.error

        fs._count = fails_once
        caplog.clear()
        try:
            convert()
        except OSError:
            assert contents(fs, "/model") == old
        else:
            assert version(fs) == 1
            assert "cannot delete" in caplog.text


def test_new_shards_have_numbers_only():
    fs, convert = replacing("shards", 1000)
    convert()
    names = [name for name in contents(fs, "/model") if name.endswith(".safetensors")]
    assert names
    assert all(re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) for name in names)


def test_a_new_folder_has_no_weights_without_their_config(model):
    whole = Memory()
    safeload.convert(model, whole.at(), **HALF)
    for count in range(whole.calls, 0, -1):
        fs = Memory()
        fs.fails_at, fs.error = count, Killed()
        with pytest.raises(Killed):
            safeload.convert(model, fs.at(), **HALF)
        fs.fails_at = None
        state(fs, tensors(model), safeload.load(model, dtype="f16"))


@pytest.mark.parametrize("resume", [False, True])
def test_wherever_it_fails_there_is_no_index(resume, model):
    """In one go nothing stays but what cannot be removed; with resume=True what is whole."""
    for count in (1, 2, 4, 9, 10, 11, 12):
        fs = Memory()
        done = fs.fails_at = count
        once = Memory._count

        def failing(fs=fs, done=done):
            fs.calls += 1
            if fs.calls == done:
                raise fs.error

        fs._count = failing
        with pytest.raises(OSError, match="the store is full"):
            safeload.convert(model, fs.at(), resume=resume, **HALF)
        left = contents(fs, "/model", records=True)
        assert INDEX not in left
        if not resume:
            assert not [name for name in left if name.endswith("safetensors")] or count > 10
        assert once is Memory._count


# ---- resuming ----


def test_what_is_whole_is_neither_read_nor_written_again(model, want):
    fs = Memory()
    fs.fails_at = 11
    with pytest.raises(OSError, match="the store is full"):
        safeload.convert(model, fs.at(), resume=True, **HALF)
    fs.fails_at = None
    first = contents(fs, "/model", records=True)
    assert 0 < len(first) < len(want)
    written, read = [], []
    put_file, cat_file = fs.put_file, fs.cat_file
    fs.put_file = lambda source, *rest, **more: (written.append(Path(source).name), put_file(source, *rest, **more))[1]
    fs.cat_file = lambda path, *rest, **more: (read.append(path), cat_file(path, *rest, **more))[1]
    safeload.convert(model, fs.at(), resume=True, **HALF)
    fs.cat_file = cat_file
    assert contents(fs, "/model") == want
    assert not {name for name in written if name + ".json" in first}


@pytest.mark.parametrize("change", ["gone", "shorter", "other bytes", "no version"])
def test_an_object_that_is_not_what_its_record_says(change, model, want):
    fs = Memory()
    fs.fails_at = 31  # after the shards and their records
    with pytest.raises(OSError, match="the store is full"):
        safeload.convert(model, fs.at(), resume=True, **HALF)
    fs.fails_at = None
    name = "/model/model-00002-of-00005.safetensors"
    content = fs.cat_file(name)
    if change == "gone":
        fs.rm_file(name)
    elif change == "no version":
        (path,) = (one for one in fs.find(f"/model/{RESUME}") if one.endswith(f"{name[7:]}.json"))
        fs.pipe_file(path, json.dumps({**json.loads(fs.cat_file(path)), "object": 7}).encode())
    else:
        fs.pipe_file(name, content[:-1] if change == "shorter" else content[:-1] + b"x")
    written, put_file = [], fs.put_file
    fs.put_file = lambda source, *rest, **more: (written.append(Path(source).name), put_file(source, *rest, **more))[1]
    safeload.convert(model, fs.at(), resume=True, **HALF)
    assert contents(fs, "/model") == want
    assert [one for one in written if one.endswith("safetensors")] == [name[7:]] * (change != "no version")


def test_a_shard_that_was_replaced_before_the_end(model):
    plan = safeload.plan_convert(model, "memory://replaced", **HALF)
    fs = MemoryFileSystem()
    try:
        results = [safeload.run_piece(piece) for piece in plan.pieces]
        name = f"/replaced/{results[1]['file']}"
        content = fs.cat_file(name)
        fs.pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(FormatError, match="not what its piece wrote: run its piece again") as caught:
            safeload.finalize(plan, results)
        assert caught.value.path == f"memory://replaced/{results[1]['file']}"
        assert not fs.exists(f"/replaced/{INDEX}")
        assert safeload.run_piece(plan.pieces[1])["written"]
        fs.pipe_file(name, content)  # as a second worker would: the same bytes, another version
        safeload.finalize(plan, results)
        fs.rm_file(name)
        with pytest.raises(FormatError, match="the shard is gone"):
            safeload.finalize(plan, results)
    finally:
        fs.rm("/replaced", recursive=True)


def test_two_plans_in_one_folder(model):
    try:
        plans = [safeload.plan_convert(model, "memory://twice", dtype=d, max_shard_size=LIMIT) for d in ("bf16", "f16")]
        results = [safeload.run_piece(piece) for piece in plans[1].pieces]
        with pytest.raises(FormatError, match="another conversion has written the shard: plan again"):
            safeload.run_piece(plans[0].pieces[0])
        with pytest.raises(ValueError, match=r"resume: 'memory://twice/.*' was written with dtype='float16'"):
            safeload.plan_convert(model, "memory://twice", dtype="bf16", max_shard_size=LIMIT, resume=True)
        with pytest.raises(FileExistsError, match="An unfinished conversion: 5 of 5 shards are there"):
            safeload.plan_convert(model, "memory://twice", **HALF)
        safeload.finalize(plans[1], results)
        for piece in [plans[0].pieces[0], plans[1].pieces[0]]:  # a late one replaces no shard
            with pytest.raises(FileExistsError, match="A finished checkpoint has a shard of this name"):
                safeload.run_piece(piece)
        with pytest.raises(FileExistsError, match="File exists; pass overwrite=True"):
            safeload.plan_convert(model, "memory://twice", **HALF)
    finally:
        MemoryFileSystem().rm("/twice", recursive=True)


@pytest.mark.parametrize("name", ["../x.safetensors", "a/b", "", "a\\b"], ids=repr)
@pytest.mark.parametrize("key", ["file", "extras"])
def test_a_plan_writes_and_removes_only_in_its_folder(key, name, model):
    plan = safeload.plan_convert(model, "memory://bare", **HALF)
    if key == "file":
        calls = [partial(safeload.run_piece, {**piece, "file": name}) for piece in plan.pieces]
    else:
        result = {"plan": plan.id, "size": 1, "sha256": "", "seconds": 1}
        results = [{**result, "file": piece["file"]} for piece in plan.pieces]
        calls = [partial(safeload.finalize, {**plan, key: {name: "x"}}, results)]
    for call in calls:
        with pytest.raises(FormatError, match="bare names"):
            call()
    assert not MemoryFileSystem().exists("/bare")


# ---- other processes ----


@pytest.mark.store_packages
def test_processes_write_to_s3(model, want, s3, monkeypatch):
    """Their keys come from the environment: a plan and a pickle have none."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    import s3fs

    with processes() as pool:
        safeload.convert(model, f"s3://{BUCKET}/pool", executor=pool, storage_options=s3, **HALF)
    assert contents(s3fs.S3FileSystem(**s3), f"{BUCKET}/pool") == want


class Twice:
    """Does each piece at once and twice; they and the function travel."""

    def submit(self, call, function, piece, *rest):
        call(function, echoed(piece), *rest)
        return settled(lambda: echoed(call(function, echoed(piece), *rest)))


@pytest.mark.store_packages
def test_an_executor_whose_pieces_go_through_json_and_come_twice(model, want, s3):
    import s3fs

    safeload.convert(model, f"s3://{BUCKET}/plain", executor=Twice(), storage_options=s3, **HALF)
    assert contents(s3fs.S3FileSystem(**s3), f"{BUCKET}/plain") == want


@pytest.mark.store_packages
def test_a_store_of_this_process(model, want):
    """Threads write to it, and no plan names it."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    path = safeload.remote.of_obstore(store, "a/model")
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(model, path, executor=executor, **HALF)
    found = {name: path.files.open((path / name).path) for name in want}
    assert {name: bytes(one.read_at(0, one.size)) for name, one in found.items()} == want
    with pytest.raises(UnsupportedError, match="a plan cannot include it"):
        safeload.plan_convert(model, safeload.remote.of_obstore(store, "b"), **HALF)
    safeload.convert(model, path, overwrite=True, max_shard_size=LIMIT)
    assert {array.dtype.name for array in tensors(path).values()} == {"bfloat16"}
    with processes(1) as pool, pytest.raises(TypeError, match="cannot be pickled"):
        safeload.convert(model, path, overwrite=True, executor=pool, **HALF)


@pytest.mark.store_packages
def test_secrets_are_nowhere(model, s3, caplog, capsys):
    import s3fs

    caplog.set_level(logging.DEBUG, "safeload")
    url = f"s3://{BUCKET}/secret"
    plan = safeload.plan_convert(model, url, storage_options=s3, **HALF)
    assert plan["storage_options"] == {key: s3[key] for key in ("endpoint_url", "client_kwargs")}
    results = [safeload.run_piece(piece, storage_options=s3) for piece in plan.pieces]
    report = safeload.finalize(plan, results, storage_options=s3)
    tasks = []

    class Asked(ThreadPoolExecutor):
        """Notes what it is given, as a pool of processes would pickle it."""

        def submit(self, *task):
            tasks.append(task)
            return super().submit(*task)

    with Asked(1) as executor:
        safeload.convert(model, f"s3://{BUCKET}/asked", executor=executor, storage_options=s3, **HALF)
    assert tasks
    written = contents(s3fs.S3FileSystem(**s3), f"{BUCKET}/secret", records=True).values()
    told = [plan, results, report, str(report), *tasks, *written]
    told += [pickle.dumps(one).decode("latin-1") for one in (plan, *tasks)]
    assert any(f"{BUCKET}/asked" in one for one in told if isinstance(one, str))  # the folder is in the tasks
    with pytest.raises(OSError, match="bucket") as caught:
        safeload.convert(model, "s3://no-such-bucket/x", storage_options=s3, **HALF)
    told += [caught.value, caught.value.__cause__, caught.value.__context__, *capsys.readouterr()]
    told += [record.getMessage() for record in caplog.records if record.name == "safeload"]
    for one in told:
        assert KEY not in repr(one)
        assert SECRET not in repr(one)


# Makes a folder of one shard of 24 MB, sent in parts of 5 MiB, and dies when the third one goes out.
DIES = """
import os, signal, sys, json
import s3fs.core
s3fs.core.calculate_chunksize = lambda size, chunksize=None: 5 << 20
call, sent = s3fs.core.S3FileSystem._call_s3, []
async def counted(self, method, *arguments, **options):
    if method == "upload_part":
        sent.append(1)
        if len(sent) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return await call(self, method, *arguments, **options)
s3fs.core.S3FileSystem._call_s3 = counted
import safeload
safeload.convert(sys.argv[1], sys.argv[2], max_shard_size="30MB", resume=True, storage_options=json.loads(sys.argv[3]))
"""


@pytest.fixture
def large(tmp_path):
    """Two shards of 24 MB."""
    folder = tmp_path / "large"
    folder.mkdir()
    rng = np.random.default_rng(20)
    save_file({f"w{k}": rng.random((1500, 2000), np.float32) for k in range(4)}, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.store_packages
def test_a_process_that_is_killed_while_it_uploads(large, s3, tmp_path):
    import s3fs

    fs = s3fs.S3FileSystem(**s3)
    url = f"s3://{BUCKET}/killed"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", DIES, large, url, json.dumps(s3)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert contents(fs, f"{BUCKET}/killed", records=True) == {}
    assert len(fs.call_s3("list_multipart_uploads", Bucket=BUCKET)["Uploads"]) == 1  # of which no listing tells
    safeload.convert(large, url, max_shard_size="30MB", resume=True, storage_options=s3)
    assert_same(tensors(url, storage_options=s3), tensors(large))


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.store_packages
def test_ctrl_c_while_a_shard_is_uploaded(large, s3):
    import s3fs

    fs = s3fs.S3FileSystem(**s3)
    began, call = [], s3fs.S3FileSystem._call_s3

    async def slow(self, method, *arguments, **options):
        import asyncio

        if method == "put_object":
            if not began:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            began.append(time.monotonic())
            await asyncio.sleep(20)
        return await call(self, method, *arguments, **options)

    s3fs.S3FileSystem._call_s3 = slow
    try:
        with pytest.raises(KeyboardInterrupt):
            safeload.convert(large, f"s3://{BUCKET}/ctrl", max_shard_size="30MB", storage_options=s3)
        assert time.monotonic() - began[0] < 15  # of 20
    finally:
        s3fs.S3FileSystem._call_s3 = call
    assert contents(fs, f"{BUCKET}/ctrl") == {}


# ---- the Hub, the command line ----


@pytest.mark.store_packages
def test_the_hub(model, want, monkeypatch):
    pytest.importorskip("huggingface_hub")
    from builders.hub import Hub

    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as server:  # its token begins with "hf_", as all do
        repository = server.add("owner/name", {".gitattributes": b"*"})
        options = {"endpoint": server.url(), "token": server.token}
        with pytest.raises(FileNotFoundError):
            safeload.convert(model, "hf://owner/other", storage_options=options)
        safeload.convert(model, "hf://owner/name", storage_options=options, **HALF)
        found = repository.files("main")[1]
        assert {name: found[name] for name in want} == want
        safeload.convert(
            model, "hf://owner/name", storage_options=options, resume=True, overwrite=True, max_shard_size=LIMIT
        )
        assert_same(tensors("hf://owner/name", storage_options=options), tensors(model))
        assert len(repository.files("main")[1]) == len(want) + 1


def test_the_command_line(model, want, capsys):
    fs = MemoryFileSystem()
    try:
        arguments = ["convert", str(model), "memory://cli/model", "--dtype", "f16", "--max-shard-size", LIMIT]
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("memory://cli/model: safetensors, 30 tensors")
        assert contents(fs, "/cli/model") == want
        assert main(arguments) == 1
        assert "pass --overwrite to replace it" in capsys.readouterr().err
        assert main([*arguments, "--resume", "--overwrite", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["files"][0].startswith("memory://cli/model/model-")
        assert main(["convert", str(model), "memory://cli/x.safetensors"]) == 0
        assert main(["convert", str(model), "memory://cli/x.safetensors", "--resume"]) == 2
        assert "only folders of shards can be resumed" in capsys.readouterr().err
        assert main(["convert", str(model), "memory://cli/other", "--resume"]) == 0
    finally:
        fs.rm("/cli", recursive=True)
