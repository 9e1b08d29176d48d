"""What fsspec filesystems, obstore stores and callers' own stores report of files: version marks, sizes and names."""

import datetime
import itertools
import os
import random
import threading
import time
import uuid
import zipfile
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from builders.http_server import Answer, Server
from builders.hub import Hub
from builders.terminal import press_ctrl_c

fsspec = pytest.importorskip("fsspec")

from fsspec.implementations.dirfs import DirFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

import safeload  # noqa: E402
import safeload.remote  # noqa: E402
from safeload import FormatError  # noqa: E402
from safeload.remote import of_fsspec, of_obstore  # noqa: E402

pytestmark = pytest.mark.store_packages

COUNT = 100_000  # numbers in a tensor, so that the tensors are not read with the header
ARRAYS = {name: np.arange(k, COUNT + k, dtype=np.float32) for k, name in enumerate("ab")}
MODEL = safeload.numpy.save(ARRAYS)
CHANGED = "changed since it was opened"


class Reporting(MemoryFileSystem):
    """Memory that reports name, size and type of a file, and the fields that a test adds."""

    cachable = False

    def __init__(self, fields=dict, **options):
        super().__init__(**options)
        self.store, self.pseudo_dirs = {}, [""]
        self.fields = fields
        self.pipe_file("/m.safetensors", MODEL)

    def info(self, path, **options):
        info = super().info(path, **options)
        info.pop("created", None)
        return {**info, **self.fields()}


def same(arrays):
    return all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)


# ---- marks of filesystems ----

TIME = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)
CHANGES = {
    "a field of no known name": ({"revision": 1}, {"revision": 2}),
    "a field that is gone": ({"revision": 1}, {}),
    "a field that appears": ({}, {"hash": "a"}),
    "another field": ({"mtime": 1.0}, {"md5": "a"}),
    "one of two fields": ({"generation": 7, "crc": "a"}, {"generation": 7, "crc": "b"}),
    "a date": ({"modified": TIME}, {"modified": TIME + datetime.timedelta(microseconds=1)}),
    "a time that became a number": ({"mtime": "1"}, {"mtime": 1}),
    "a nested value": ({"checksums": {"sha256": "a"}}, {"checksums": {"sha256": "b"}}),
    "a list": ({"versions": ["a"]}, {"versions": ["b", "a"]}),
    "bytes": ({"digest": b"a"}, {"digest": b"b"}),
    "an ETag": ({"ETag": '"a"'}, {"ETag": '"b"'}),
    "an ETag that is gone": ({"ETag": '"a"', "mtime": 1}, {"mtime": 1}),
    "an ETag that appears": ({"mtime": 1}, {"etag": '"a"', "mtime": 1}),
    "an ETag that turns weak": ({"etag": '"a"'}, {"etag": 'W/"a"'}),
    "a weak ETag of another time": ({"ETag": 'W/"a"', "mtime": 1}, {"ETag": 'W/"a"', "mtime": 2}),
    "a zero that is gone": ({"generation": 0}, {}),
}
VOLATILE = {
    "no field": dict,
    "a time of access": lambda: {"mtime": 1, "atime": time.time()},
    "SFTP's time of access": lambda: {"mtime": 1, "time": time.time()},
    "HDFS's time of access": lambda: {"modificationTime": 1, "accessTime": time.time_ns()},
    "an identifier of the request": lambda: {"mtime": 1, "request": str(uuid.uuid4())},
    "a counter": (lambda numbers: lambda: {"calls": next(numbers)})(itertools.count()),
    "a signed URL": lambda: {"mtime": 1, "downloadUrl": f"https://host/{random.random()}"},
    "links to the file": lambda: {"mtime": 1, "nlink": random.randrange(9)},
    "an object without a text": lambda: {"mtime": 1, "lease": object()},
    "a strong ETag and a random field": lambda: {"ETag": '"a"', "x": random.random()},
    "a value within itself": lambda: (lambda value: value.append(value) or {"mtime": 1, "tags": value})([]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_any_reported_field_that_differs_is_a_change(case):
    first, later = CHANGES[case]
    fs = Reporting(lambda: first)
    with safeload.open(of_fsspec(fs, "/m.safetensors")) as opened:
        fs.fields = lambda: later
        with pytest.raises(FormatError, match=CHANGED):
            opened["a"]
        with pytest.raises(FormatError, match=CHANGED):
            list(opened.stream())


@pytest.mark.parametrize("case", VOLATILE)
def test_fields_that_say_nothing_of_the_content_are_no_marks(case, tmp_path):
    place = of_fsspec(Reporting(VOLATILE[case]), "/m.safetensors")
    assert same(safeload.load(place))
    safeload.convert(place, tmp_path / "m.safetensors")
    assert same(safeload.load(tmp_path / "m.safetensors"))


def test_a_change_beside_a_volatile_field_is_found():
    revision = [1]
    fs = Reporting(lambda: {"revision": revision[0], "request": random.random()})
    with safeload.open(of_fsspec(fs, "/m.safetensors")) as opened:
        assert np.array_equal(opened["a"], ARRAYS["a"])
        revision[0] = 2
        with pytest.raises(FormatError, match=CHANGED):
            opened["b"]


def test_a_file_that_changes_while_it_is_opened_does_not_hide_its_mark():
    """The mark differs between two of the calls of `open`; it is a mark all the same."""
    revisions = iter([1, 2, 2, 3])
    fs = Reporting(lambda: {"revision": next(revisions, 3)})
    with safeload.open(of_fsspec(fs, "/m.safetensors")) as opened, pytest.raises(FormatError, match=CHANGED):
        opened["a"]


@pytest.mark.parametrize("kind", ["fixed", "changes", "random", "fails"])
def test_a_ukey_is_a_mark_unless_it_is_random_or_fails(kind):
    keys = {"fixed": lambda: "k", "changes": lambda: current[0], "random": random.random, "fails": lambda: 1 // 0}
    current = ["k"]

    class Keyed(Reporting):
        def ukey(self, path):
            return keys[kind]()

    with safeload.open(of_fsspec(Keyed(), "/m.safetensors")) as opened:
        current[0] = "other"
        if kind == "changes":
            with pytest.raises(FormatError, match=CHANGED):
                opened["a"]
        else:
            assert same(opened.load())


@pytest.mark.parametrize("kind", ["memory", "dir", "zip", "reference", "simplecache", "http"])
def test_filesystems_of_fsspec_are_read(kind, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(MODEL)
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("m.safetensors", MODEL)
    with Server(tmp_path) as server:
        if kind == "http":
            pytest.importorskip("aiohttp")
        place = {
            "memory": lambda: of_fsspec(Reporting(), "/m.safetensors"),
            "dir": lambda: of_fsspec(DirFileSystem(str(tmp_path), fsspec.filesystem("file")), "m.safetensors"),
            "zip": lambda: of_fsspec(fsspec.filesystem("zip", fo=str(tmp_path / "m.zip")), "m.safetensors"),
            "reference": lambda: of_fsspec(
                fsspec.filesystem("reference", fo={"m.safetensors": [str(tmp_path / "m.safetensors")]},
                                  fs=fsspec.filesystem("file"), skip_instance_cache=True), "m.safetensors"
            ),
            "simplecache": lambda: of_fsspec(
                fsspec.filesystem("simplecache", fs=fsspec.filesystem("file"), cache_storage=str(tmp_path / "c")),
                str(tmp_path / "m.safetensors"),
            ),
            "http": lambda: of_fsspec(
                fsspec.filesystem("http", skip_instance_cache=True), server.url("/m.safetensors")
            ),
        }[kind]()  # fmt: skip
        assert same(safeload.load(place))


def test_permissions_and_links_of_a_local_file_are_no_marks(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(MODEL)
    place = of_fsspec(DirFileSystem(str(tmp_path), fsspec.filesystem("file")), "m.safetensors")
    with safeload.open(place) as opened:
        os.chmod(tmp_path / "m.safetensors", 0o600)
        os.link(tmp_path / "m.safetensors", tmp_path / "n.safetensors")
        assert np.array_equal(opened["a"], ARRAYS["a"])
        (tmp_path / "o.safetensors").write_bytes(MODEL)
        os.replace(tmp_path / "o.safetensors", tmp_path / "m.safetensors")
        with pytest.raises(FormatError, match=CHANGED):
            opened["b"]


# ---- stores with obstore's methods, and callers' own ----


class Objects:
    """A store with obstore's methods and a single object."""

    def __init__(self, **fields):
        self.fields = {"path": "m.safetensors", "size": len(MODEL), **fields}
        self.got = self.fields
        self.listed = [self.fields]

    def head(self, path):
        return self.fields

    def get(self, path, options):
        begin, end = options["range"]
        return SimpleNamespace(meta=self.got, bytes=lambda: MODEL[begin:end])

    def list_with_delimiter(self, prefix):
        return {"objects": self.listed, "common_prefixes": []}


OBJECTS = {
    "the ETag is gone": ({"e_tag": '"a"', "last_modified": TIME}, {"last_modified": TIME}),
    "an ETag appears": ({"last_modified": TIME}, {"e_tag": '"a"', "last_modified": TIME}),
    "the ETag turns weak": ({"e_tag": '"a"'}, {"e_tag": 'W/"a"'}),
    "another ETag": ({"e_tag": '"a"'}, {"e_tag": '"b"'}),
    "another ETag of the same version": ({"version": "1", "e_tag": '"a"'}, {"version": "1", "e_tag": '"b"'}),
    "the version is gone": ({"version": "1"}, {}),
    "a version appears": ({}, {"version": "1"}),
    "a weak ETag of another time": ({"e_tag": 'W/"a"', "last_modified": TIME}, {"e_tag": 'W/"a"'}),
    "another field": ({"checksum": "a"}, {"checksum": "b"}),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_an_object_whose_mark_differs_from_that_of_its_head_is_a_change(case):
    first, later = OBJECTS[case]
    store = Objects(**first)
    store.got = Objects(**later).fields
    with pytest.raises(FormatError, match=CHANGED):
        safeload.load(of_obstore(store, "m.safetensors"))
    store.got = store.fields
    assert same(safeload.load(of_obstore(store, "m.safetensors")))


# ---- sizes and names ----


class Four:
    """A store with the four members."""

    version = None

    def __init__(self, size):
        self.size = size

    def read_into(self, offset, memory):
        memory[:] = MODEL[offset : offset + len(memory)]

    def close(self):
        pass


WAYS = {
    "fsspec": lambda size: of_fsspec(Reporting(lambda: {"size": size}), "/m.safetensors"),
    "obstore": lambda size: of_obstore(Objects(size=size), "m.safetensors"),
    "members": Four,
}
SIZES = [-1, -(2**63), 2**63, 2**64, 2**70, 10**30, 10**5000, None, 1e3, float("nan"), True, "8", b"8", [8], {}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: repr(size) if not isinstance(size, int) else hex(size)[:20])
def test_an_absurd_size_is_refused_by_name(size, way):
    with pytest.raises(FormatError, match="the store reports a size of ") as caught:
        safeload.open(WAYS[way](size))
    assert caught.value.path
    if size != 10**5000:
        assert repr(size) in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_an_integer_of_numpy_is_a_size(way):
    assert same(safeload.load(WAYS[way](np.int64(len(MODEL)))))


@pytest.mark.parametrize("way", WAYS)
def test_the_largest_size_takes_no_memory(way):
    with pytest.raises((safeload.SafeloadError, OSError)):
        safeload.load(WAYS[way](2**63 - 1))


NAMES = ["a\udcff.safetensors", "\ud800", "a\0b.safetensors", b"m.safetensors", None, 7, ["m"]]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_undecodable_name_is_refused_by_name(name):
    class Listing(Reporting):
        def isdir(self, path):
            return True

        def ls(self, path, detail=True, **options):
            return [{"name": name, "size": 1, "type": "file"}]

    with pytest.raises(FormatError, match="the store lists a name that is no text") as caught:
        safeload.open(of_fsspec(Listing(), "/"))
    assert repr(name) in str(caught.value)
    store = Objects()
    store.listed = [{"path": name, "size": 1}]
    with pytest.raises(FormatError, match="the store lists a name that is no text"):
        safeload.open(of_obstore(store, ""))


@pytest.mark.parametrize("value", [None, 7, "info", [1]])
def test_properties_that_are_none_are_refused(value):
    class Odd(Reporting):
        def info(self, path, **options):
            return value

    with pytest.raises(FormatError, match="instead of the properties of a file"):
        safeload.open(of_fsspec(Odd(), "/m.safetensors"))


# ---- Ctrl-C ----


class Stalling:
    """Waits, once a test says so, as a library does that no signal interrupts."""

    def __init__(self):
        self.stalls, self.released = False, threading.Event()

    def wait(self):
        if self.stalls:
            self.reached()
            while not self.released.is_set():
                with suppress(KeyboardInterrupt):  # code in C would not see it
                    self.released.wait(20)

    def reached(self):
        threading.Timer(0.05, press_ctrl_c).start()
        self.reached = lambda: None


def stalling_fsspec(stalling):
    class Slow(Reporting):
        def info(self, path, **options):
            stalling.wait()
            return super().info(path, **options)

        def cat_file(self, path, start=None, end=None, **options):
            stalling.wait()
            return super().cat_file(path, start=start, end=end)

    return of_fsspec(Slow(), "/m.safetensors")


def stalling_obstore(stalling):
    class Slow(Objects):
        def head(self, path):
            stalling.wait()
            return super().head(path)

        def get(self, path, options):
            stalling.wait()
            return super().get(path, options)

    return of_obstore(Slow(), "m.safetensors")


def stalling_members(stalling):
    class Slow(Four):
        def read_into(self, offset, memory):
            stalling.wait()
            super().read_into(offset, memory)

    return Slow(len(MODEL))


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
@pytest.mark.parametrize("when", ["opening", "reading", "streaming"])
@pytest.mark.parametrize("make", [stalling_fsspec, stalling_obstore, stalling_members])
def test_ctrl_c_ends_a_call_that_no_signal_interrupts(make, when):
    stalling = Stalling()
    place = make(stalling)
    calls = {"opening": lambda: safeload.open(place)}
    if when != "opening":
        opened = safeload.open(place)
        calls["reading"], calls["streaming"] = opened.load, lambda: list(opened.stream())
    stalling.stalls, begin = True, time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            calls[when]()
        assert time.monotonic() - begin < 1
    finally:
        stalling.released.set()


# ---- uploads ----


def upload_to_fsspec(stalling):
    class Slow(Reporting):
        def put_file(self, lpath, rpath, **options):
            stalling.wait()
            raise OSError("ended")

    return of_fsspec(Slow(), "/new")


def upload_to_obstore(stalling):
    class Slow(Objects):
        def list_with_delimiter(self, prefix):
            return {"objects": [], "common_prefixes": []}

        def head(self, path):
            raise FileNotFoundError(path)

        def put(self, path, file):
            stalling.wait()
            raise OSError("ended")

    return of_obstore(Slow(), "new")


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
@pytest.mark.parametrize("make", [upload_to_fsspec, upload_to_obstore])
def test_ctrl_c_ends_an_upload_that_no_signal_interrupts(make, tmp_path):
    safeload.numpy.save_file(ARRAYS, tmp_path / "m.safetensors")
    stalling = Stalling()
    place = make(stalling)
    stalling.stalls = True
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            safeload.convert(tmp_path / "m.safetensors", place / "m.safetensors")
        assert time.monotonic() - begin < 1.5
    finally:
        stalling.released.set()


@pytest.fixture
def silent_hub(tmp_path, monkeypatch):
    """A Hub that answers no upload, and the seconds that one may take."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("urllib3")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub() as hub:
        hub.add("o/n", {"README.md": b"# n"})
        reached = threading.Event()

        released = threading.Event()

        def write(request, body):
            reached.set()
            released.wait(20)
            return Answer(403, {"Content-Length": "0"})

        hub.write = write
        hub.reached = reached
        yield hub
        released.set()
        for thread in threading.enumerate():
            if thread.name == "safeload":
                thread.join(20)


def test_an_upload_to_a_silent_hub_ends_within_its_limit(silent_hub, tmp_path):
    safeload.numpy.save_file({"a": np.zeros(4, np.float32)}, tmp_path / "m.safetensors")
    options = {"endpoint": silent_hub.url(), "token": silent_hub.token, "timeout": 0.1}
    begin = time.monotonic()
    with pytest.raises(safeload.RemoteError, match=r"has not completed a write of .* within 1 s") as caught:
        safeload.convert(tmp_path / "m.safetensors", "hf://o/n/m.safetensors", storage_options=options)
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - begin < 5


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_ends_an_upload_to_a_silent_hub(silent_hub, tmp_path):
    safeload.numpy.save_file({"a": np.zeros(4, np.float32)}, tmp_path / "m.safetensors")
    pressed = []

    def press():
        silent_hub.reached.wait(20)
        pressed.append(time.monotonic())
        press_ctrl_c()

    threading.Thread(target=press).start()
    options = {"endpoint": silent_hub.url(), "token": silent_hub.token}
    with pytest.raises(KeyboardInterrupt):
        safeload.convert(tmp_path / "m.safetensors", "hf://o/n/m.safetensors", storage_options=options)
    assert time.monotonic() - pressed[0] < 1
