"""Files of fsspec's filesystems: ranges, versions, faults, caches, folders and uploads."""

import gc
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from builders import inside
from builders.http_server import Server
from builders.terminal import press_ctrl_c

fsspec = pytest.importorskip("fsspec")
from builders.inside import RemoteFiles, local, thread_group  # noqa: E402
from fsspec.implementations.dirfs import DirFileSystem  # noqa: E402
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

import safeload.remote  # noqa: E402
from safeload import FormatError, UnsupportedError  # noqa: E402
from safeload.errors import RemoteError, RemotePermissionError, RemoteTimeoutError  # noqa: E402

CONTENT = hashlib.shake_256(b"weights").digest(3_000_000)
SECRET = "s3cr3t-of-the-caller"


# fsspec's block cache leaves it to Python to close its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*cache:pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file:ResourceWarning"
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    inside.tune(monkeypatch, retry_pause=0.001)


@pytest.fixture
def memory():
    """A folder of fsspec's memory with one file, which belongs to this test."""
    fs = MemoryFileSystem()
    folder = f"memory://{threading.get_ident()}-{time.monotonic_ns()}"
    fs.pipe_file(f"{folder}/model.bin", CONTENT)
    yield folder
    fs.rm(folder, recursive=True)


def beneath(chain, memory, tmp_path):
    """The URL of the same file in a chain: fsspec's block cache knows files of its own kind, and local ones."""
    if chain != "blockcache::":
        return f"{chain}{memory}/model.bin"
    (tmp_path / "model.bin").write_bytes(CONTENT)
    return chain + (tmp_path / "model.bin").as_uri()


class Faulty(MemoryFileSystem):
    """Memory whose reads go wrong in the way that a test asks for; it counts them."""

    cachable = False

    def __init__(self, **options):
        super().__init__(**options)
        self.reads, self.infos = [], 0
        self.before = lambda fs: None
        self.change = lambda content: content

    def cat_file(self, path, start=None, end=None, **options):
        self.reads.append((start, end))
        self.before(self)
        return self.change(super().cat_file(path, start=start, end=end))

    def info(self, path, **options):
        self.infos += 1
        return super().info(path, **options)


@pytest.fixture
def faulty():
    fs = Faulty(password=SECRET)
    fs.store, fs.pseudo_dirs = {}, [""]  # not those of all memory
    fs.pipe_file("/m/model.bin", CONTENT)
    return fs


def opened(fs, path):
    """Open a file of a filesystem of the caller's."""
    location = safeload.remote.of_fsspec(fs, path)
    return location.files.open(location.path)


def assert_reads(store):
    memory = bytearray(len(CONTENT))
    store.read_into(0, memory)
    assert memory == CONTENT
    gap = [local.Span(10, memoryview(bytearray(5))), local.Span(1000, memoryview(bytearray(7)))]
    if not isinstance(store, local.LocalStore):
        store.read_spans(gap)
        assert [bytes(span.memory) for span in gap] == [CONTENT[10:15], CONTENT[1000:1007]]
        store.confirm()


@pytest.mark.parametrize("chain", ["", "blockcache::", "filecache::", "simplecache::"])
def test_the_bytes_are_right(chain, memory, tmp_path):
    options = {"cache_storage": str(tmp_path / "cache")} if chain else None
    url = beneath(chain, memory, tmp_path)
    store = RemoteFiles(options).open(url)
    assert store.size == len(CONTENT) == store.version[0]
    assert store.path == url
    assert isinstance(store, local.LocalStore) == (chain in ("filecache::", "simplecache::"))
    assert_reads(store)
    store.close()


@pytest.mark.parametrize("cache", ["blockcache", "filecache", "simplecache"])
def test_a_cache_of_https_which_lists_no_folders(cache, tmp_path):
    pytest.importorskip("aiohttp")
    with Server({"/model.bin": CONTENT}) as server:
        files = RemoteFiles({cache: {"cache_storage": str(tmp_path / "cache")}})
        store = files.open(f"{cache}::{server.url('/model.bin')}")
        assert_reads(store)
        store.close()
        with pytest.raises(FileNotFoundError, match=r"none\.bin"):
            files.open(f"{cache}::{server.url('/none.bin')}")


def test_a_read_takes_one_call(faulty):
    store = opened(faulty, "memory://m/model.bin")
    assert (faulty.reads, faulty.infos) == ([], 2)  # once more to tell fields that differ from call to call
    store.read_at(0, 8)
    store.read_at(100, 1000)
    assert faulty.reads == [(0, 128 << 10)]
    spans = [local.Span(200_000, memoryview(bytearray(10))), local.Span(200_100, memoryview(bytearray(10)))]
    store.read_spans(spans)
    assert faulty.reads[1:] == [(200_000, 200_110)]
    store.confirm()
    assert faulty.infos == 3


def test_a_version_can_be_kept_as_json(memory):
    store = RemoteFiles().open(f"{memory}/model.bin")
    assert (
        tuple(json.loads(json.dumps(store.version)))
        == store.version
        == RemoteFiles().open(f"{memory}/model.bin").version
    )


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_that_is_replaced_midway_is_an_error(same_size, memory):
    store = RemoteFiles().open(f"{memory}/model.bin")
    MemoryFileSystem().pipe_file(f"{memory}/model.bin", bytes(len(CONTENT) - (not same_size)))
    with pytest.raises(FormatError, match="changed since it was opened") as caught:
        store.confirm()
    assert caught.value.path == f"{memory}/model.bin"
    if not same_size:
        with pytest.raises(FormatError, match="changed since it was opened"):
            store.read_into(0, bytearray(len(CONTENT)))


def test_a_file_that_is_gone_midway_is_missing(memory):
    store = RemoteFiles().open(f"{memory}/model.bin")
    MemoryFileSystem().pipe_file(f"{memory}/other.bin", b"")
    MemoryFileSystem().rm_file(f"{memory}/model.bin")
    for read in (store.confirm, lambda: store.read_into(0, bytearray(9))):
        with pytest.raises(FileNotFoundError, match=r"model\.bin"):
            read()


@pytest.mark.parametrize("chain", ["", "blockcache::", "filecache::", "simplecache::"])
def test_a_missing_file_is_not_found(chain, memory, tmp_path):
    files = RemoteFiles({"cache_storage": str(tmp_path)} if chain else None)
    with pytest.raises(FileNotFoundError, match=r"none\.bin") as caught:
        files.open(f"{chain}{memory}/none.bin")
    assert caught.value.filename == f"{chain}{memory}/none.bin"


def test_a_folder_is_not_a_file(memory):
    with pytest.raises(FormatError, match="folder"):
        RemoteFiles().open(memory)


PASSING = [
    ConnectionResetError("reset"),
    OSError(5, "EIO"),
    TimeoutError(),
    type("ClientPayloadError", (Exception,), {})(),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_errors_that_pass_are_tried_again(error, faulty):
    def twice(fs):
        if len(fs.reads) < 3:
            raise error

    faulty.before = twice
    store = opened(faulty, "memory://m/model.bin")
    memory = bytearray(100)
    store.read_into(50, memory)
    assert memory == CONTENT[50:150]
    assert faulty.reads == [(50, 150)] * 3


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_errors_that_stay_end_with_url_and_bytes(error, faulty):
    def always(fs):
        raise error

    store = opened(faulty, "memory://m/model.bin")
    faulty.before = always
    with pytest.raises(RemoteError, match=r"\(memory://m/model\.bin, bytes \[50, 150\)\)") as caught:
        store.read_into(50, bytearray(100))
    assert (caught.value.path, caught.value.begin, caught.value.end) == ("memory://m/model.bin", 50, 150)
    assert isinstance(caught.value, RemoteTimeoutError) == isinstance(error, TimeoutError)
    assert len(faulty.reads) == 4


def failure(fs, error, expected):
    """What a read raises of which each attempt raises an error."""

    def always(fs):
        raise error

    store = opened(fs, "memory://m/model.bin")
    fs.before = always
    with pytest.raises(expected) as caught:
        store.read_into(0, bytearray(10))
    return caught.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError("no"), RemotePermissionError),
        (type("NoCredentialsError", (Exception,), {})("none"), RemotePermissionError),
        (FileNotFoundError(), FileNotFoundError),
        (OSError(22, "bad request"), RemoteError),
        (NotImplementedError("ranges"), UnsupportedError),
        (KeyError("x"), RemoteError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_other_errors_are_not_tried_again(error, expected, faulty):
    raised = failure(faulty, error, expected)
    assert type(raised) is expected or expected is FileNotFoundError
    assert len(faulty.reads) == 1
    assert raised.__cause__ is None
    assert raised.__context__ is None


def test_short_answers_are_tried_again_and_never_fill_memory(faulty):
    store = opened(faulty, "memory://m/model.bin")
    faulty.change = lambda content: content[:-1]
    memory = bytearray(100)
    with pytest.raises(RemoteError, match="expected 100 bytes, got 99"):
        store.read_into(0, memory)
    assert memory == bytes(100)
    assert len(faulty.reads) == 4
    faulty.change = lambda content: content[: 90 if len(faulty.reads) % 2 else 100]
    store.read_into(0, memory)
    assert memory == CONTENT[:100]


def test_a_store_that_ignores_ranges_is_refused(faulty):
    store = opened(faulty, "memory://m/model.bin")
    faulty.change = lambda content: CONTENT
    with pytest.raises(UnsupportedError, match="ranges"):
        store.read_into(0, bytearray(10))
    assert len(faulty.reads) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"cannot log in with {SECRET}",
        f"https://user:{SECRET}@host/key?X-Amz-Signature=abc{SECRET}",
        "denied: AKIAIOSFODNN7EXAMPLE",
        "Authorization: Bearer abcdefgh.ijkl",
        "token hf_abcdefghijklmnop is wrong",
        "account=x&sig=abc%2Bdef",
    ],
)
def test_no_secret_is_in_any_text(text, faulty, caplog):
    caplog.set_level(logging.DEBUG, logger="safeload")

    def always(fs):
        raise OSError(text)

    faulty.pipe_file("/m/model.bin?key=hidden-word", CONTENT)
    location = safeload.remote.of_fsspec(faulty, "memory://m/model.bin?key=hidden-word")
    store = location.files.open(location.path)
    faulty.before = always
    with pytest.raises(RemoteError) as caught:
        store.read_into(0, bytearray(10))
    texts = [str(caught.value), repr(caught.value), repr(location), repr(location.files), repr(store), caplog.text]
    texts += [repr(pickle.dumps(caught.value)), repr(RemoteFiles({"password": SECRET}))]
    texts += [repr(pickle.dumps(RemoteFiles({"password": SECRET, "x": {"secret": SECRET}})))]
    assert caplog.text
    for secret in (SECRET, "AKIAIOSFODNN7EXAMPLE", "abcdefgh", "hidden-word", "abc%2Bdef"):
        assert secret not in "".join(texts)


def refusal(fs, error):
    """The reason that is given for an error of a read."""

    text, found, _ = str(failure(fs, error, RemoteError)).partition(" (memory://m/model.bin, bytes [0, 10))")
    assert found
    return text.removeprefix(f"the store cannot be read: {type(error).__name__}: ")


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "a://" * 250_000, "a" * 31 + "://" + "b:" * 500_000, "AKIA" * 250_000]
)
def test_a_long_error_takes_linear_time(text, faulty):
    begun = time.perf_counter()
    assert len(refusal(faulty, RuntimeError(text))) <= 500
    assert time.perf_counter() - begun < 1


def test_a_long_error_is_cut_between_words(faulty):
    secret = "https://host/?signature=" + "s3cr3t" * 3000
    for text in (f"{'x ' * 100}{secret}", secret, f"{'https://host/?y ' * 1020}{secret}"):
        assert "s3cr3t" not in refusal(faulty, RuntimeError(text))
        faulty.before = lambda fs: None


def test_options_stay_as_they_are(memory, tmp_path):
    options = {"cache_storage": str(tmp_path), "memory": {"x": {"y": 1}}, "filecache": {"cache_check": 5}}
    before = json.dumps(options)
    RemoteFiles(options).open(f"filecache::{memory}/model.bin").close()
    assert json.dumps(options) == before


def test_a_scheme_may_be_in_upper_case(memory, tmp_path):
    url = f"{memory}/model.bin".replace("memory:", "MEMORY:")
    assert_reads(RemoteFiles().open(url))
    assert_reads(RemoteFiles({"cache_storage": str(tmp_path)}).open(f"filecache::{url}"))


def test_threads_share_one_filesystem(memory, tmp_path):
    """fsspec would give each thread one of its own: and each a cache of its own."""
    for k in range(20):
        MemoryFileSystem().pipe_file(f"{memory}/{k}.bin", CONTENT[k:])
    files = RemoteFiles({})
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda k: files.open(f"filecache::{memory}/{k}.bin"), range(20)))
        again = list(pool.map(lambda k: files.open(f"filecache::{memory}/{k}.bin"), range(20)))
    assert len({os.path.dirname(store.place) for store in stores}) == 1
    assert [store.place for store in stores] == [store.place for store in again]
    assert [store.size for store in stores] == [len(CONTENT) - k for k in range(20)]


@pytest.mark.parametrize("chain", ["", "blockcache::"])
def test_many_threads_read_at_once(chain, memory, tmp_path):
    options = {"cache_storage": str(tmp_path / "cache")} if chain else None
    store = RemoteFiles(options).open(beneath(chain, memory, tmp_path))
    result = bytearray(len(CONTENT))
    view = memoryview(result)
    parts = [local.Span(k, view[k : k + 50_000]) for k in range(0, len(CONTENT), 50_000)]
    thread_group.run((lambda part=part: store.read_spans([part]) for part in parts), 16)
    assert result == CONTENT


def test_nothing_is_written_once_a_call_has_ended(faulty):
    entered, leave, stop = threading.Event(), threading.Event(), thread_group.Stop()

    def wait(fs):
        entered.set()
        leave.wait()

    store = opened(faulty, "memory://m/model.bin")
    faulty.before = wait
    memory, raised = bytearray(100), []

    def read():
        with thread_group.belonging(stop):
            try:
                store.read_into(0, memory)
            except BaseException as error:
                raised.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    entered.wait()
    stop.stop()
    leave.set()
    thread.join()
    assert (memory, raised) == (bytes(100), [thread_group.Stopped])


# ---- caches ----


def test_a_block_cache_forgets_the_blocks_of_another_version(memory, tmp_path):
    options = {"cache_storage": str(tmp_path / "cache"), "cache_check": 0}
    url = beneath("blockcache::", memory, tmp_path)
    store = RemoteFiles(options).open(url)
    store.read_into(0, bytearray(10))
    store.close()
    gc.collect()  # fsspec leaves its copy mapped until then, and Windows removes no such file
    other = CONTENT[::-1]
    (tmp_path / "model.bin").write_bytes(other)
    again = RemoteFiles(options).open(url)
    memory_of = bytearray(len(other))
    again.read_into(0, memory_of)
    again.confirm()
    assert memory_of == other


@pytest.mark.parametrize("kind", ["filecache", "simplecache"])
def test_a_download_that_breaks_off_is_not_kept(kind, faulty, tmp_path):
    cache = fsspec.filesystem(kind, fs=faulty, cache_storage=str(tmp_path))

    def half(rpath, lpath, **options):
        Path(lpath).write_bytes(CONTENT[:1000])
        raise ConnectionResetError("reset")

    faulty.get_file = half
    with pytest.raises(RemoteError, match="reset"):
        opened(cache, "memory://m/model.bin")
    del faulty.get_file
    assert opened(cache, "memory://m/model.bin").size == len(CONTENT)


def test_half_of_a_file_in_a_cache_is_found_out(memory, tmp_path):
    files = RemoteFiles({"cache_storage": str(tmp_path)})
    files.open(f"simplecache::{memory}/model.bin").close()
    [copy] = tmp_path.iterdir()
    copy.write_bytes(CONTENT[:1000])  # what a killed process leaves
    with pytest.raises(FormatError, match="copy in the cache has 1,000 bytes, and the file 3,000,000"):
        files.open(f"simplecache::{memory}/model.bin")


# ---- folders ----


@pytest.mark.parametrize("chain", ["", "blockcache::", "filecache::"])
def test_a_folder_is_listed(chain, memory, tmp_path):
    fs = MemoryFileSystem()
    fs.pipe({f"{memory}/sub/x.bin": b"x", f"{memory}/.hidden": b"", f"{memory}/a b%.bin": b"y"})
    files = RemoteFiles({"cache_storage": str(tmp_path)} if chain else None)
    folder = f"{chain}{memory}"
    expected = [("a b%.bin", False), ("model.bin", False), ("sub", True)]
    assert files.listing(folder) == files.listing(folder + "/") == expected
    assert [files.is_folder(files.join(folder, name)) for name, _ in expected] == [False, False, True]
    assert not files.is_folder(folder + "/none")
    assert files.is_folder(folder)
    with pytest.raises(FileNotFoundError):
        files.listing(folder + "/none")


def test_file_urls_are_files_of_this_machine(tmp_path):
    path = tmp_path / "a b%23.bin"
    path.write_bytes(CONTENT)
    files = RemoteFiles()
    url = path.as_uri()
    store = files.open(url)
    assert isinstance(store, local.LocalStore)
    assert (store.path, store.size) == (url, len(CONTENT))
    assert files.listing(tmp_path.as_uri()) == [("a b%23.bin", False)]
    assert files.is_folder(tmp_path.as_uri())
    with pytest.raises(UnsupportedError, match="three slashes"):
        files.open("file://other" + str(path))
    with pytest.raises(FileNotFoundError):
        files.open((tmp_path / "none").as_uri())


def test_a_local_filesystem_object_opens_files_of_this_machine(tmp_path):
    (tmp_path / "model.bin").write_bytes(CONTENT)
    store = opened(LocalFileSystem(), (tmp_path / "model.bin").as_uri())
    assert isinstance(store, local.LocalStore)
    assert_reads(store)


def test_a_part_of_a_filesystem_is_a_filesystem(memory):
    part = DirFileSystem(path=memory, fs=MemoryFileSystem())
    assert_reads(opened(part, "dir://model.bin"))


# ---- uploads ----


def uploads(kind, folder, tmp_path):
    return {
        "memory": (RemoteFiles().backend(folder), folder),
        "file": (RemoteFiles().backend("file:///"), (tmp_path / "out").as_uri()),
        "local": (safeload.remote.of_fsspec(LocalFileSystem(), "/").files.backend("/"), (tmp_path / "out").as_uri()),
        "chain": (RemoteFiles({}).backend(f"simplecache::{folder}"), f"simplecache::{folder}"),
    }[kind]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(CONTENT[::-1])
    return str(path)


@pytest.mark.parametrize("kind", ["memory", "file", "local", "chain"])
def test_an_upload_is_seen_when_it_is_complete(kind, memory, source, tmp_path, monkeypatch):
    backend, folder = uploads(kind, memory, tmp_path)
    url = f"{folder}/new/model.bin"
    for content in (CONTENT[::-1], CONTENT):  # written twice: the second replaces the first
        Path(source).write_bytes(content)
        backend.upload(source, url)
        with closing(backend.open(url if kind == "chain" else url.replace("simplecache::", ""))) as store:
            assert store.read_at(0, 100) == content[:100] if kind == "memory" else store.size == len(content)
        assert [name for name, _ in backend.listing(f"{folder}/new")] == ["model.bin"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["OSError", "KeyboardInterrupt"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_upload_that_is_broken_off_leaves_nothing(kind, error, memory, source, tmp_path, monkeypatch):
    backend, folder = uploads(kind, memory, tmp_path)
    backend.upload(source, f"{folder}/old.bin")
    before = backend.listing(folder)

    def half(fs, lpath, rpath, **options):
        fs.pipe_file(rpath, CONTENT[:1000])
        raise error

    def half_a_copy(source, begin, nbytes, target, at):
        os.write(target, CONTENT[:1000])
        raise error

    monkeypatch.setattr(MemoryFileSystem, "put_file", half)
    monkeypatch.setattr(inside.atomic_file, "copy_range", half_a_copy)
    for name in ("old.bin", "new.bin"):
        with pytest.raises(type(error)):
            backend.upload(source, f"{folder}/{name}")
    assert backend.listing(folder) == before
    store = backend.open(f"{folder}/old.bin")
    memory_of = bytearray(store.size)
    store.read_into(0, memory_of)
    assert memory_of == CONTENT[::-1]


def test_nobody_sees_half_an_upload(memory, source, monkeypatch):
    backend, seen = RemoteFiles().backend(memory), []
    write = MemoryFileSystem.put_file

    def watched(fs, lpath, rpath, **options):
        write(fs, lpath, rpath, **options)
        seen.append(fs.exists(f"{memory}/model2.bin"))

    monkeypatch.setattr(MemoryFileSystem, "put_file", watched)
    backend.upload(source, f"{memory}/model2.bin")
    assert seen == [False]
    assert MemoryFileSystem().exists(f"{memory}/model2.bin")


# ---- schemes and packages ----


def test_unknown_schemes_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(UnsupportedError, match="does not know the scheme nothing"):
        RemoteFiles({}).open("nothing://x/y")

    def missing(scheme):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install gcsfs"):
        RemoteFiles().open("gs://bucket/key")


def test_without_fsspec_the_error_says_what_to_type(monkeypatch, tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ModuleNotFoundError, match="pip install fsspec"):
        RemoteFiles().open("memory://x")
    assert RemoteFiles().open((tmp_path / "x").as_uri()).size == 1


# ---- processes ----


def _read_in_child(store, queue):
    memory = bytearray(store.size)
    store.read_into(0, memory)
    store.confirm()
    queue.put(hashlib.sha256(memory).hexdigest())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("chain", ["", "blockcache::", "filecache::"])
def test_a_forked_process_reads_on(chain, memory, tmp_path):
    options = {"cache_storage": str(tmp_path / "cache")} if chain else None
    store = RemoteFiles(options).open(beneath(chain, memory, tmp_path))
    store.read_into(0, bytearray(10))
    if chain == "filecache::":
        store.confirm = lambda: None
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, queue))
    child.start()
    assert queue.get(timeout=20) == hashlib.sha256(CONTENT).hexdigest()
    child.join()


def test_ctrl_c_ends_a_read(faulty):
    store = opened(faulty, "memory://m/model.bin")
    late = threading.Event()
    faulty.before = lambda fs: late.wait(30)
    timer = threading.Timer(0.2, press_ctrl_c)
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread_group.run([lambda: store.read_into(0, bytearray(10))], 1)
        assert time.monotonic() - begin < 5
    finally:
        late.set()  # the read itself cannot be interrupted
