"""s3:// URLs, with s3fs on moto's server: presigned URLs with If-Match, s3fs where those are refused, uploads."""

import dataclasses
import hashlib
import logging
import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("urllib3")
moto_server = pytest.importorskip("moto.server")

from builders import inside  # noqa: E402
from builders.inside import (  # noqa: E402
    RemoteFiles,
    http_client,
    local,
    thread_group,
)

from safeload import FormatError  # noqa: E402
from safeload.errors import RemoteError, RemotePermissionError  # noqa: E402

CONTENT = hashlib.shake_256(b"weights").digest(2_000_000)
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
BUCKET = "weights"
FILE = f"s3://{BUCKET}/folder/model.bin"

# fsspec and aiobotocore leave sockets to Python when an event loop ends.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
    pytest.mark.store_packages,
]


@pytest.fixture(scope="session")
def endpoint():
    """moto's server: it takes a second to start, so all tests share it."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def options(endpoint):
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": "eu-central-1"}}


@pytest.fixture
def fs(options, monkeypatch):
    inside.tune(monkeypatch, retry_pause=0.001)
    fs = s3fs.S3FileSystem(**options)
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    fs.pipe_file(FILE, CONTENT)
    yield fs
    fs.rm(f"s3://{BUCKET}/folder", recursive=True)


@pytest.fixture
def signed(monkeypatch):
    """The URLs that s3fs signs."""
    sign, made = s3fs.S3FileSystem._url, []

    async def counted(self, *arguments, **named):
        made.append(await sign(self, *arguments, **named))
        return made[-1]

    monkeypatch.setattr(s3fs.S3FileSystem, "_url", counted)
    return made


@pytest.fixture
def ranges(monkeypatch):
    """What s3fs itself reads of objects, which it does not while URLs that it has signed are read."""
    call, made = s3fs.S3FileSystem._call_s3, []

    async def counted(self, method, *arguments, **named):
        if method == "get_object":
            made.append(named.get("Range"))
        return await call(self, method, *arguments, **named)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    return made


def refuse_signed(monkeypatch):
    """Let s3fs sign URLs that nobody answers."""
    sign = s3fs.S3FileSystem._url

    async def broken(self, path, **named):
        return (await sign(self, path, **named)).replace("/folder/", "/%zz/").replace("http://", "http://127.0.0.1:9/")

    monkeypatch.setattr(s3fs.S3FileSystem, "_url", broken)


@pytest.fixture(params=["presigned", "s3fs"])
def files(request, fs, options, monkeypatch):
    """The two ways to read: the second where URLs are refused."""
    if request.param == "s3fs":
        refuse_signed(monkeypatch)
    return RemoteFiles(options)


def read(store):
    memory = bytearray(store.size)
    store.read_into(0, memory)
    store.confirm()
    return bytes(memory)


def test_the_bytes_are_right_either_way(files, request, ranges):
    store = files.open(FILE)
    assert (store.path, store.size) == (FILE, len(CONTENT))
    assert read(store) == CONTENT
    memory = [bytearray(10), bytearray(20)]
    store.read_spans([local.Span(500_000, memoryview(memory[0])), local.Span(500_100, memoryview(memory[1]))])
    assert memory == [CONTENT[500_000:500_010], CONTENT[500_100:500_120]]
    assert bool(ranges) == ("s3fs" in request.node.callspec.id)


def test_both_ways_know_the_same_version(fs, options, ranges, monkeypatch):
    signed = RemoteFiles(options).open(FILE)
    assert (read(signed), ranges) == (CONTENT, [])
    refuse_signed(monkeypatch)
    other = RemoteFiles(options).open(FILE)
    assert read(other) == CONTENT
    assert ranges
    assert signed.version == other.version


@pytest.mark.parametrize("same_size", [True, False])
def test_an_object_that_is_replaced_midway_is_an_error(same_size, files, fs):
    store = files.open(FILE)
    store.read_at(0, 1000)
    other = hashlib.shake_256(b"others").digest(len(CONTENT) - (not same_size))
    fs.pipe_file(FILE, other)

    def read_late():
        store.read_spans([local.Span(1_000_000, memoryview(bytearray(1000)))])
        store.confirm()

    with pytest.raises(FormatError, match="changed since it was opened") as caught:
        read_late()
    assert caught.value.path == FILE


def test_a_version_of_an_object_is_read_by_its_id(fs, options):
    fs.call_s3("put_bucket_versioning", Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    try:
        fs.pipe_file(FILE, CONTENT)
        old = fs.call_s3("head_object", Bucket=BUCKET, Key="folder/model.bin")["VersionId"]
        fs.pipe_file(FILE, CONTENT[::-1])
        files = RemoteFiles({**options, "version_aware": True})
        assert read(files.open(f"{FILE}?versionId={old}")) == CONTENT
        assert read(files.open(FILE)) == CONTENT[::-1]
    finally:
        fs.call_s3("put_bucket_versioning", Bucket=BUCKET, VersioningConfiguration={"Status": "Suspended"})


def test_a_signed_url_that_has_expired_is_made_anew(fs, options, monkeypatch, signed):
    store = RemoteFiles(options).open(FILE)
    assert len(signed) == 1
    expired = store._request
    refused = []

    def refuse_once(*arguments, **named):
        if not refused:
            refused.append(True)
            failure = http_client.Failure(RemotePermissionError("expired", FILE))
            failure.refused = store._route, store._route
            raise failure
        return expired(*arguments, **named)

    monkeypatch.setattr(store, "_request", refuse_once)
    url = store._target.url
    url = dataclasses.replace(url, query=url.query.replace("X-Amz-Date=2", "X-Amz-Date=1"))
    store._target = store._target._replace(url=url)
    assert read(store) == CONTENT
    assert len(signed) == 2


@pytest.mark.parametrize("region", [None, "us-east-1", "eu-central-1"])
def test_urls_are_signed_as_aws_accepts_them(region, options, fs, signed, ranges):
    """AWS takes version 4 alone for new buckets; without a region, or in the oldest ones, botocore takes version 2."""
    more = {key: value for key, value in options.items() if key != "client_kwargs"}
    store = RemoteFiles({**more, "client_kwargs": {"region_name": region} if region else {}}).open(FILE)
    assert (read(store), ranges) == (CONTENT, [])  # of the URL
    assert [url for url in signed if "X-Amz-Algorithm=AWS4-HMAC-SHA256" in url] == signed != []
    store.close()


@pytest.mark.parametrize(
    "extra",
    [
        {"requester_pays": True},
        {"version_aware": True},
        {"config_kwargs": {"signature_version": "s3v4"}},
        {"config_kwargs": {"proxies": {}}},
        {"use_ssl": False},
        {"anon": True, "key": None, "secret": None},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "x" * 32}},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_settings_of_s3fs_hold(extra, fs, options, ranges):
    if extra.get("anon"):
        fs.call_s3("put_object_acl", Bucket=BUCKET, Key="folder/model.bin", ACL="public-read")
    files = RemoteFiles({**options, **extra})
    store = files.open(FILE)
    assert read(store) == CONTENT
    assert bool(ranges) == ("s3_additional_kwargs" in extra or "proxies" in str(extra))


def test_where_a_signed_url_is_refused_s3fs_reads(fs, options, monkeypatch, ranges):
    refuse_signed(monkeypatch)
    assert read(RemoteFiles(options).open(FILE)) == CONTENT
    assert ranges


def test_what_is_missing_is_not_found(files):
    for url in (f"s3://{BUCKET}/none", "s3://no-such-bucket/none"):
        with pytest.raises(FileNotFoundError, match=url) as caught:
            files.open(url)
        assert caught.value.__context__ is None


def test_folders_are_listed(fs, files):
    fs.pipe(
        {f"s3://{BUCKET}/folder/sub/x.bin": b"x", f"s3://{BUCKET}/folder/": b"", f"s3://{BUCKET}/folder/b.bin": b""}
    )
    folder = f"s3://{BUCKET}/folder"
    assert files.listing(folder) == files.listing(folder + "/") == [
        ("b.bin", False), ("model.bin", False), ("sub", True),
    ]  # fmt: skip
    assert [files.is_folder(url) for url in (folder, FILE, f"{folder}/none", f"s3://{BUCKET}")] == [
        True,
        False,
        False,
        True,
    ]
    s3fs.S3FileSystem(**fs.storage_options, skip_instance_cache=True).pipe_file(f"{folder}/later.bin", b"x")
    assert ("later.bin", False) in files.listing(folder)  # no cache hides it


def test_an_empty_object_is_empty(fs, files):
    fs.pipe_file(f"s3://{BUCKET}/folder/empty.bin", b"")
    store = files.open(f"s3://{BUCKET}/folder/empty.bin")
    assert (store.size, store.read_at(0, 10)) == (0, b"")


@pytest.mark.parametrize("name", ["a b.bin", "100%.bin", "plus+.bin", "ä.bin", "a%20b.bin"])
def test_names_with_other_characters(name, fs, files):
    fs.pipe_file(f"s3://{BUCKET}/folder/{name}", CONTENT[:3000])
    assert read(files.open(f"s3://{BUCKET}/folder/{name}")) == CONTENT[:3000]


def test_many_threads_read_at_once(files):
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda k: files.open(FILE), range(8)))
    result = bytearray(len(CONTENT))
    view = memoryview(result)
    parts = [local.Span(k, view[k : k + 250_000]) for k in range(0, len(CONTENT), 250_000)]
    thread_group.run((lambda k=k, part=part: stores[k].read_spans([part]) for k, part in enumerate(parts)), 8)
    assert result == CONTENT


def test_no_secret_is_in_any_text(files, fs, caplog, monkeypatch):
    for name in ("safeload", "urllib3"):
        caplog.set_level(logging.DEBUG, logger=name)
    store = files.open(FILE)
    read(store)
    errors = []
    for url in (f"s3://{BUCKET}/none", "s3://no-such-bucket/none"):
        with pytest.raises(OSError, match="s3://") as caught:
            files.open(url)
        errors.append(caught.value)
    fs.rm_file(FILE)
    with pytest.raises(OSError, match="s3://") as caught:
        store.read_into(0, bytearray(store.size))
    fs.pipe_file(FILE, CONTENT)
    errors.append(caught.value)
    texts = [repr(value) for value in (files, files.backend(FILE), store, pickle.dumps(files))]
    texts += [f"{error}{error!r}{error.__dict__}{pickle.dumps(error)!r}" for error in errors]
    logged = [r.getMessage() for r in caplog.records if r.name.partition(".")[0] in ("safeload", "urllib3")]
    assert logged
    for secret in (KEY, SECRET, "X-Amz-Signature", "Signature="):
        assert secret not in "".join([*texts, *logged])


def test_an_endpoint_that_nobody_reaches_is_an_error(options):
    files = RemoteFiles(
        {**options, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 1}}}
    )
    with pytest.raises(RemoteError, match=FILE) as caught:
        files.open(FILE)
    assert KEY not in str(caught.value)


# ---- uploads ----


def test_an_upload_is_seen_when_it_is_complete(files, fs, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(CONTENT[::-1])
    files.backend(FILE).upload(str(source), f"s3://{BUCKET}/folder/new.bin")
    assert read(files.open(f"s3://{BUCKET}/folder/new.bin")) == CONTENT[::-1]


def test_a_large_upload_that_is_broken_off_leaves_nothing(fs, options, tmp_path, monkeypatch):
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(120 << 20)  # in parts
    uploaded = s3fs.S3FileSystem._call_s3

    async def second_part_fails(self, method, *arguments, **named):
        if method == "upload_part" and named["PartNumber"] == 2:
            raise OSError("the connection was lost")
        return await uploaded(self, method, *arguments, **named)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", second_part_fails)
    files = RemoteFiles(options)
    with pytest.raises(RemoteError, match="connection was lost"):
        files.backend(FILE).upload(str(source), f"s3://{BUCKET}/folder/new.bin")
    monkeypatch.undo()
    assert files.listing(f"s3://{BUCKET}/folder") == [("model.bin", False)]
    assert not fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads")


def test_an_upload_that_is_interrupted_does_not_go_on(fs, options, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    begun, ended = threading.Event(), threading.Event()

    async def slow(self, lpath, rpath, **named):
        import asyncio

        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", slow)
    files = RemoteFiles(options)

    def interrupt():
        begun.wait()
        raise KeyboardInterrupt

    tasks = [lambda: files.backend(FILE).upload(str(source), f"s3://{BUCKET}/folder/new.bin"), interrupt]
    with pytest.raises(KeyboardInterrupt):
        thread_group.run(tasks, 2)
    assert ended.wait(5)


# ---- processes ----


def _read_in_child(store, queue):
    queue.put(hashlib.sha256(read(store)).hexdigest())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_reads_on(files):
    store = files.open(FILE)
    read(store)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, queue))
    child.start()
    assert queue.get(timeout=30) == hashlib.sha256(CONTENT).hexdigest()
    child.join()


def test_a_whole_file_cache_is_a_local_file(fs, options, tmp_path):
    files = RemoteFiles({"s3": options, "filecache": {"cache_storage": str(tmp_path)}})
    store = files.open(f"filecache::{FILE}")
    assert Path(store.place).parent == tmp_path
    assert read(store) if hasattr(store, "confirm") else store.size == len(CONTENT)


def test_a_block_cache_reads_ranges(fs, options, tmp_path, ranges):
    files = RemoteFiles({"s3": options, "blockcache": {"cache_storage": str(tmp_path)}})
    store = files.open(f"blockcache::{FILE}")
    store.read_at(1_000_000, 10)
    assert len(ranges) == 1
    assert ranges[0].startswith("bytes=")
    assert read(store) == CONTENT
    store.close()
    fs.pipe_file(FILE, CONTENT[::-1])
    assert read(files.open(f"blockcache::{FILE}")) == CONTENT[::-1]
