"""Stores that the caller has opened: filesystems of fsspec, stores of obstore, UPath and OpenFile, four members."""

import doctest
import hashlib
import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

fsspec = pytest.importorskip("fsspec")

from builders.inside import local, thread_group  # noqa: E402
from fsspec.implementations.dirfs import DirFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

import safeload  # noqa: E402
import safeload.numpy  # noqa: E402
import safeload.remote  # noqa: E402
from safeload import FormatError, UnsupportedError  # noqa: E402
from safeload.errors import RemoteError, RemotePermissionError  # noqa: E402
from safeload.remote import of_fsspec, of_obstore  # noqa: E402

pytestmark = pytest.mark.store_packages

CONTENT = hashlib.shake_256(b"weights").digest(1_000_000)
WEIGHTS = safeload.numpy.save({"w": np.frombuffer(CONTENT, np.uint8)})
SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


def read(store):
    memory = bytearray(store.size)
    store.read_into(0, memory)
    if not isinstance(store, local.LocalStore):
        store.confirm()
    return bytes(memory)


def content(given):
    """The bytes of the only tensor of what a caller has opened."""
    return safeload.load(given)["w"].tobytes()


def opened(place):
    return place.files.open(place.path)


@pytest.fixture
def weights(folder):
    """The path of a file of WEIGHTS beside it."""
    MemoryFileSystem().pipe_file(f"{folder}/model.safetensors", WEIGHTS)
    return f"{folder}/model.safetensors"


@pytest.fixture
def folder():
    """A folder of fsspec's memory with one file, which belongs to this test."""
    fs = MemoryFileSystem()
    folder = f"/objects-{threading.get_ident()}"
    fs.pipe_file(f"{folder}/model.bin", CONTENT)
    yield folder
    fs.rm(folder, recursive=True)


# ---- fsspec ----


@pytest.mark.parametrize("form", ["{}", "memory:/{}"])
def test_a_path_in_a_filesystem(form, folder):
    place = of_fsspec(MemoryFileSystem(), form.format(folder) + "/model.bin")
    assert read(opened(place)) == CONTENT
    assert str(place).startswith("memory://")
    assert place.files.remote


def test_a_folder_in_a_filesystem(folder):
    place = of_fsspec(MemoryFileSystem(), folder)
    assert place.files.is_folder(place.path)
    assert place.files.listing(place.path) == [("model.bin", False)]
    assert read(opened(place / "model.bin")) == CONTENT


def test_a_local_filesystem_leads_to_files_of_this_machine(tmp_path):
    (tmp_path / "model.bin").write_bytes(CONTENT)
    store = opened(of_fsspec(fsspec.filesystem("file"), str(tmp_path / "model.bin")))
    assert isinstance(store, local.LocalStore)
    assert read(store) == CONTENT


def test_a_filesystem_in_a_filesystem(folder):
    assert read(opened(of_fsspec(DirFileSystem(folder, MemoryFileSystem()), "model.bin"))) == CONTENT


def test_a_path_in_memory_can_be_pickled(folder):
    place = pickle.loads(pickle.dumps(of_fsspec(MemoryFileSystem(), f"{folder}/model.bin")))
    assert read(opened(place)) == CONTENT


def test_a_pickle_of_a_filesystem_has_no_secret(folder):
    fs = MemoryFileSystem(password=SECRET, endpoint_url="https://example.org", skip_instance_cache=True)
    place = of_fsspec(fs, f"{folder}/model.bin")
    content = pickle.dumps(place)
    assert SECRET.encode() not in content
    assert b"example.org" in content
    assert SECRET not in f"{place!r}{place}{place.files!r}{place.files.backend(place.path)!r}"


@pytest.mark.parametrize("value", ["path", None, 3, object()])
def test_what_is_no_filesystem_is_refused(value):
    with pytest.raises(TypeError, match="fs must be an fsspec filesystem"):
        of_fsspec(value, "x")
    with pytest.raises(TypeError, match="store must be an obstore store"):
        of_obstore(value, "x")


def test_a_path_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="path must be a str"):
        of_fsspec(MemoryFileSystem(), Path("x"))


def test_nothing_is_read_offline(folder, monkeypatch):
    place = of_fsspec(MemoryFileSystem(), f"{folder}/model.bin")
    monkeypatch.setenv("SAFELOAD_OFFLINE", "1")
    assert read(opened(place)) == CONTENT  # memory is here
    pytest.importorskip("s3fs")
    with pytest.raises(UnsupportedError, match="SAFELOAD_OFFLINE"):
        opened(of_fsspec(fsspec.filesystem("s3", anon=True), "s3://bucket/x"))


# ---- objects with a filesystem and a path ----


def test_an_open_file_names_its_path(weights):
    assert content(fsspec.open(f"memory:/{weights}")) == CONTENT


def test_a_upath_names_its_path(weights):
    upath = pytest.importorskip("upath")
    assert content(upath.UPath(f"memory:/{weights}")) == CONTENT


def test_what_looks_like_a_upath_names_its_path(weights):
    looks_so = SimpleNamespace(fs=MemoryFileSystem(), path=weights)
    assert content(looks_so) == CONTENT


def test_a_compressed_file_is_refused(weights):
    with pytest.raises(UnsupportedError, match="compress"):
        safeload.open(fsspec.open(f"memory:/{weights}", compression="gzip"))


@pytest.mark.parametrize("value", [None, 3, {}, SimpleNamespace(fs=None, path="x")])
def test_other_objects_are_nothing_of_ours(value):
    with pytest.raises(TypeError, match=f"expected .* store .*, got {type(value).__name__}"):
        safeload.open(value)


def test_a_remote_path_names_itself(weights):
    assert content(of_fsspec(MemoryFileSystem(), weights)) == CONTENT


# ---- obstore ----


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    obstore = pytest.importorskip("obstore.store")
    store = obstore.MemoryStore() if request.param == "memory" else obstore.LocalStore(tmp_path)
    store.put("folder/model.bin", CONTENT)
    return store


def test_the_bytes_of_an_obstore_are_right(store):
    place = of_obstore(store, "folder/model.bin")
    opened_store = opened(place)
    assert opened_store.size == len(CONTENT)
    assert read(opened_store) == CONTENT
    memory = [bytearray(10), bytearray(20)]
    opened_store.read_spans([local.Span(500_000, memoryview(memory[0])), local.Span(500_100, memoryview(memory[1]))])
    assert memory == [CONTENT[500_000:500_010], CONTENT[500_100:500_120]]
    assert str(place).endswith("folder/model.bin")


class Counting:
    """A store of obstore that counts requests, and answers as a test has it."""

    def __init__(self, store):
        self.store, self.calls, self.answer = store, [], lambda answer: answer

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append(name)
            return self.answer(getattr(self.store, name)(*arguments, **named))

        return call


def test_a_range_of_an_obstore_takes_one_request(store):
    counting = Counting(store)
    opened_store = opened(of_obstore(counting, "folder/model.bin"))
    opened_store.read_at(0, 100)
    opened_store.read_at(100, 100)
    opened_store.read_into(200_000, bytearray(100_000))
    assert counting.calls == ["head", "get", "get"]


@pytest.mark.parametrize("same_size", [True, False])
def test_an_object_of_an_obstore_that_is_replaced_midway_is_an_error(same_size, store):
    place = of_obstore(store, "folder/model.bin")
    opened_store = opened(place)
    opened_store.read_at(0, 100)
    store.put("folder/model.bin", CONTENT[::-1][not same_size :])
    memory = bytearray(100)
    with pytest.raises(FormatError, match="changed since it was opened") as caught:
        opened_store.read_spans([local.Span(500_000, memoryview(memory))])
    assert (caught.value.path, memory) == (place.path, bytes(100))


def test_short_answers_of_an_obstore_never_fill_memory(store):
    counting = Counting(store)
    opened_store = opened(of_obstore(counting, "folder/model.bin"))
    counting.answer = lambda answer: SimpleNamespace(meta=answer.meta, bytes=lambda: bytes(answer.bytes())[:-1])
    memory = bytearray(100)
    with pytest.raises(RemoteError, match=r"expected 100 bytes, got 99 .*bytes \[0, 100\)"):
        opened_store.read_into(0, memory)
    assert memory == bytes(100)


def test_an_obstore_is_listed(store):
    store.put("folder/sub/x.bin", b"x")
    place = of_obstore(store, "folder")
    assert place.files.listing(place.path) == [("model.bin", False), ("sub", True)]
    root = of_obstore(store, "")
    assert root.files.listing(root.path) == [("folder", True)]
    assert root.files.is_folder(root.path)
    assert root.files.is_folder(root.files.join(root.path, "folder"))
    assert not root.files.is_folder((place / "model.bin").path)
    assert read(opened(place / "model.bin")) == CONTENT


def test_what_is_missing_in_an_obstore_is_not_found(store):
    place = of_obstore(store, "folder/none.bin")
    with pytest.raises(FileNotFoundError, match=r"none\.bin") as caught:
        opened(place)
    assert caught.value.__context__ is None


def test_many_threads_read_an_obstore_at_once(store):
    opened_store = opened(of_obstore(store, "folder/model.bin"))
    result = bytearray(len(CONTENT))
    view = memoryview(result)
    parts = [local.Span(k, view[k : k + 50_000]) for k in range(0, len(CONTENT), 50_000)]
    thread_group.run((lambda part=part: opened_store.read_spans([part]) for part in parts), 16)
    assert result == CONTENT


def test_an_upload_to_an_obstore(store, tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "source"
    source.write_bytes(CONTENT[::-1])
    place = of_obstore(store, "folder/new.bin")
    place.files.backend(place.path).upload(str(source), place.path)
    assert read(opened(place)) == CONTENT[::-1]


def test_an_obstore_stays_in_its_process(store):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(of_obstore(store, "folder/model.bin"))


def test_no_key_of_an_obstore_is_in_any_text():
    obstore = pytest.importorskip("obstore.store")
    store = obstore.S3Store(
        "bucket",
        prefix="a/b",
        endpoint="http://127.0.0.1:9",
        access_key_id="AKIAIOSFODNN7EXAMPLE",
        secret_access_key=SECRET,
        region="eu-central-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    place = of_obstore(store, "x/model.bin")
    assert str(place) == "s3://bucket/a/b/x/model.bin"
    with pytest.raises(RemoteError) as caught:
        opened(place)
    error = caught.value
    texts = f"{error}{error!r}{error.__dict__}{place!r}{place.files.backend(place.path)!r}{pickle.dumps(error)!r}"
    assert error.path == str(place)
    assert error.__context__ is None
    assert "AKIA" not in texts
    assert SECRET not in texts


def test_an_obstore_on_s3():
    obstore, moto = pytest.importorskip("obstore.store"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        s3 = pytest.importorskip("s3fs").S3FileSystem(
            key="a", secret="b", endpoint_url=endpoint, client_kwargs={"region_name": "eu-central-1"}
        )
        s3.mkdir("obstore-bucket")
        s3.pipe_file("obstore-bucket/folder/model.bin", CONTENT)
        store = obstore.S3Store(
            "obstore-bucket",
            prefix="folder",
            endpoint=endpoint,
            access_key_id="a",
            secret_access_key="b",
            region="eu-central-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        opened_store = opened(of_obstore(store, "model.bin"))
        assert read(opened_store) == CONTENT
        s3.pipe_file("obstore-bucket/folder/model.bin", CONTENT[::-1])
        with pytest.raises(FormatError, match="changed since it was opened"):
            opened_store.read_into(0, bytearray(10))
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PermissionDeniedError", RemotePermissionError),
        ("UnauthenticatedError", RemotePermissionError),
        ("NotSupportedError", UnsupportedError),
        ("GenericError", RemoteError),
        ("NotFoundError", FileNotFoundError),
    ],
)
def test_errors_of_obstore_are_in_our_words(name, expected, store):
    exceptions = pytest.importorskip("obstore.exceptions")
    counting, tries = Counting(store), []
    opened_store = opened(of_obstore(counting, "folder/model.bin"))

    def refuse(answer):
        tries.append(answer)
        raise getattr(exceptions, name)("no\n\nDebug source:\nGeneric { secret }")

    counting.answer = refuse
    with pytest.raises(expected) as caught:
        opened_store.read_into(0, bytearray(10))
    assert "secret" not in str(caught.value)
    assert len(tries) == 1  # obstore has tried again itself


# ---- the four members ----


class Four:
    """A store of the caller's."""

    def __init__(self, content, version):
        self.content, self.version, self.closed = content, version, False

    @property
    def size(self):
        return len(self.content)

    def read_into(self, offset, memory):
        if offset + len(memory) > len(self.content):
            raise FormatError("too short", "four")
        memory[:] = self.content[offset : offset + len(memory)]

    def close(self):
        self.closed = True


@pytest.mark.parametrize("version", [None, "v1", (1_000_000, "v1")])
def test_four_members_are_a_store(version):
    four = Four(WEIGHTS, version)
    with safeload.open(four) as checkpoint:
        assert checkpoint["w"].tobytes() == CONTENT
        assert checkpoint.get_slice("w")[5:15].tobytes() == CONTENT[5:15]
        four.version = "v2"
        with pytest.raises(FormatError, match="changed since it was opened"):
            checkpoint.load()
    assert four.closed


# ---- processes, examples ----


def _read_in_child(place, store, queue):
    for use in (lambda: read(store), lambda: opened(place), lambda: place.files.is_folder(place.path)):
        with pytest.raises(UnsupportedError) as caught:
            use()
        queue.put(str(caught.value))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_told_that_obstore_cannot_be_used(tmp_path):
    """Its threads are those of the parent: a read would never end."""
    obstore = pytest.importorskip("obstore.store")
    store = obstore.LocalStore(tmp_path)
    store.put("model.bin", CONTENT)
    place = of_obstore(store, "model.bin")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(place, opened(place), queue))
    child.start()
    assert all("spawn" in queue.get(timeout=10) for _ in range(3))
    child.join()


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(CONTENT)
    (tmp_path / "models").mkdir()
    found = doctest.testmod(safeload.remote, optionflags=doctest.ELLIPSIS)
    assert (found.failed, found.attempted > 3) == (0, True)
