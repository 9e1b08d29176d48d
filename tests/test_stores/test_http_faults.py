"""Servers that fail: each fault ends in the right bytes or the right error, after a bounded number of tries."""

import email.utils
import os
import time

import pytest
from builders import http_faults as server
from builders import inside
from builders.http_server import CERTIFICATE, Server
from builders.inside import RemoteFiles, local
from builders.remote import WINDOW, read

from safeload import FormatError, UnsupportedError
from safeload.errors import RemoteError, RemotePermissionError, RemoteTimeoutError

pytest.importorskip("urllib3")
retries = inside.http_client

pytestmark = pytest.mark.usefixtures("quick_web")

MIB = 1 << 20
CONTENT = os.urandom(3 * MIB)
SIZE = len(CONTENT)
SMALL = b"small" * 100
FILES = {"/a": CONTENT, "/small": SMALL, "/empty": b""}
# Windows has words of its own for it, in the user's language; Wine may report the end of the stream instead.
RESET = "the connection failed: Connection reset" if os.name != "nt" else "the connection (failed|broke off)"


def serve(*faults, files=FILES, **options):
    return Server(files, faults=faults, **options)


# ---- what passes ----


@pytest.mark.parametrize(
    "fault",
    [
        server.reset(),
        server.reset(100_000),
        server.short(),
        server.short(100_000),
        server.short(1),
        server.silent(),
        server.stall(100_000),
        server.status(408),
        server.status(429),
        server.status(429, retry_after=0),
        server.status(429, retry_after="soon"),
        server.status(500),
        server.status(502),
        server.status(503, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"),
        server.status(504),
        server.garbage(),
        server.garbage(b"HTTP/1.1 twohundred OK\r\n\r\n"),
        server.garbage(b""),
    ],
)
@pytest.mark.parametrize("first", [0, 1], ids=["while it is opened", "while it is read"])
def test_what_passes_is_tried_again(fault, first):
    fault.first, fault.times = first, 1
    fault.seen = server.itertools.count()
    with serve(fault) as there:
        store = RemoteFiles({"timeout": 0.3}).open(there.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        assert store.read_at(0, 10) == CONTENT[:10]
        assert len(there.requests) == 3
        store.close()


def test_reading_goes_on_at_the_byte_that_was_reached():
    faults = server.short(MIB, first=1, times=1), server.short(MIB + 7, first=2, times=1)
    with serve(*faults) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert read(store, 0) == CONTENT
        begins = [0, 0, MIB, 2 * MIB + 7]
        assert [request.range[0] for request in there.requests] == begins
        assert {request.range[1] for request in there.requests[1:]} == {len(CONTENT)}
        assert all(request.headers["if-match"] == store.version[1] for request in there.requests[1:])
        store.close()


@pytest.mark.parametrize("fault", [server.short, server.reset, server.stall])
def test_reading_over_tls_goes_on_near_the_byte_that_was_reached(fault):
    with serve(fault(MIB, first=1, times=1), tls=True) as there:
        store = RemoteFiles({"verify": CERTIFICATE, "timeout": 0.3}).open(there.url("/a", "localhost"))
        assert read(store, 0) == CONTENT
        assert len(there.requests) == 3
        if fault is not server.reset:  # which may overtake the bytes before it
            assert MIB - (128 << 10) <= there.requests[2].range[0] <= MIB
        store.close()


def test_a_range_that_moves_on_may_break_off_more_often_than_one_that_does_not():
    with serve(server.short(MIB, first=1)) as there:
        store = RemoteFiles({"retries": 1}).open(there.url("/a"))
        assert read(store, 0) == CONTENT
        store.close()
    with serve(server.short(MIB // 8, first=1)) as there:
        store = RemoteFiles({"retries": 3}).open(there.url("/a"))
        with pytest.raises(RemoteError, match=r"broke off .* tried 4 times"):
            read(store, 0)
        assert len(there.requests) == 5
        store.close()


@pytest.mark.parametrize(
    ("fault", "timeout", "error", "message"),
    [
        (server.reset(), 60, RemoteError, RESET),
        (server.short(5), 60, RemoteError, "broke off"),
        (server.silent(), 0.5, RemoteTimeoutError, r"no byte for 0\.5 s"),
        (server.stall(5), 0.5, RemoteTimeoutError, r"no byte for 0\.5 s"),
        (server.status(503), 60, RemoteError, "returned 503 Service Unavailable"),
        (server.status(504), 60, RemoteTimeoutError, "returned 504"),
        (server.garbage(), 60, RemoteError, "not HTTP"),
        (server.garbage(b""), 60, RemoteError, "closed without a response"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_pass_ends_after_some_tries(fault, timeout, error, message):
    for first in (0, 1):
        fault.first, fault.seen = first, server.itertools.count()
        with serve(fault) as there:
            with pytest.raises(error, match=message) as caught:
                read(RemoteFiles({"timeout": timeout, "retries": 2}).open(there.url("/a")))
            assert len(there.requests) == first + 3
            assert caught.value.path == there.url("/a")
            begin, end = caught.value.begin, caught.value.end
            assert begin - there.requests[-1].range[0] in (0, 5)
            assert str(caught.value).endswith(f"; tried 3 times ({there.url('/a')}, bytes [{begin}, {end}))")


# ---- what does not ----


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (server.whole(), "returned the whole file"),
        (server.moved(1), "another range"),
        (server.moved(-1), "another range"),
        (server.header("Content-Range", None), "another range"),
        (server.header("Content-Range", "bytes */3145728"), "another range"),
        (server.header("Content-Range", "octets 131072-3145727/3145728"), "another range"),
        (server.header("Content-Range", "bytes 131072-3145726/3145728"), "another range"),
        (server.header("Content-Range", "bytes 131072-99999999999999999999999/3145728"), "another range"),
        (server.header("Content-Length", "7"), "returned '7' bytes"),
        (server.header("Content-Type", "multipart/byteranges; boundary=x"), "several parts"),
        (server.header("Content-Encoding", "gzip"), "compressed"),
        (server.status(418), "returned 418"),
        (server.status(204), "returned 204"),
        (server.status(999), "returned 999"),
        (server.status(416), "returned 416"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_other_bytes_than_those_asked_for_are_never_taken(fault, message):
    fault.first, fault.seen = 1, server.itertools.count()
    with serve(fault) as there:
        store = RemoteFiles({"timeout": 0.3, "retries": 2}).open(there.url("/a"))
        memory = bytearray(len(CONTENT) - WINDOW)
        with pytest.raises(RemoteError, match=message):
            store.read_into(WINDOW, memory)
        assert not any(memory)
        assert len(there.requests) == 2
        store.close()


def test_a_body_without_a_length_ends_where_the_range_does():
    with serve(server.header("Content-Length", None, first=1)) as there:
        store = RemoteFiles({"timeout": 5}).open(there.url("/a"))
        assert [read(store), read(store, 0)] == [CONTENT[WINDOW:], CONTENT]
        assert there.connections == 2  # nothing tells where the next answer begins
        store.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (server.total(5), "it had 3,145,728 bytes, but now has 5"),
        (server.header("ETag", '"other"'), "modified or replaced"),
        (server.status(412), "modified or replaced"),
        (server.status(416, headers={"Content-Range": "bytes */17"}), "but now has 17"),
    ],
    ids=["another size", "another ETag", "412", "416"],
)
def test_a_file_that_has_changed_is_an_error(fault, message):
    fault.first, fault.seen = 1, server.itertools.count()
    with serve(fault) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        with pytest.raises(FormatError, match=f"has changed since it was opened: .*{message}"):
            read(store)
        store.close()


@pytest.mark.parametrize("etag", ["strong", "weak", None])
def test_a_file_that_is_replaced_is_an_error(etag):
    with serve(etag=etag) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert store.version[0] == len(CONTENT)
        there.files["/a"] = CONTENT[::-1]
        if etag is None:
            there.faults.append(server.header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"))
        with pytest.raises(FormatError, match="has changed"):
            read(store)
        store.close()


def test_an_empty_etag_is_none():
    with serve(server.header("ETag", "")) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        assert store.version[1].endswith("GMT")
        assert not any("if-match" in request.headers for request in there.requests)
        store.close()


def test_heads_without_end_before_an_answer_are_an_error():
    """http.client would skip them for ever."""
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000
    with serve(server.garbage(raw)) as there, pytest.raises(RemoteError, match="sends more bytes than the response"):
        RemoteFiles({}).open(there.url("/a"))


def test_a_weak_etag_is_not_sent_back():
    with serve(etag="weak") as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        assert "if-match" not in there.requests[-1].headers
        store.close()


def test_without_etag_and_time_the_size_is_compared():
    with serve(etag=None, modified=False) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert store.version == (len(CONTENT), None)
        assert read(store) == CONTENT[WINDOW:]
        there.files["/a"] = CONTENT + b"1"
        with pytest.raises(FormatError, match="but now has 3,145,729"):
            read(store)
        store.close()


@pytest.mark.parametrize(("code", "error"), [(404, FileNotFoundError), (410, FileNotFoundError)])
def test_a_missing_file_is_one(code, error):
    with serve(server.status(code)) as there, pytest.raises(error) as caught:
        RemoteFiles({}).open(there.url("/a?key=secret"))
    assert caught.value.filename == there.url("/a")
    assert len(there.requests) == 1


@pytest.mark.parametrize("code", [401, 403])
def test_refused_access_is_named_at_once(code):
    with serve(server.status(code)) as there, pytest.raises(RemotePermissionError, match="token") as caught:
        RemoteFiles({}).open(there.url("/a"))
    assert isinstance(caught.value, PermissionError)
    assert len(there.requests) == 1


# ---- waiting ----


def test_a_server_that_asks_to_wait_too_long_is_not_waited_for():
    for asked in ("3600", email.utils.formatdate(time.time() + 3600, usegmt=True)):
        with serve(server.status(429, retry_after=asked)) as there:
            with pytest.raises(RemoteError, match=r"asks to wait 3\d\d\d s, which is more than the limit of 60 s"):
                RemoteFiles({}).open(there.url("/a"))
            assert len(there.requests) == 1


def test_a_wait_of_any_length_is_refused():
    for asked, shown in ((10**11, "100000000000"), (10**15, "1000000000000"), ("9" * 5000, "1000000000000")):
        with serve(server.status(503, retry_after=asked)) as there:
            with pytest.raises(RemoteError, match=f"asks to wait {shown} s"):
                RemoteFiles({}).open(there.url("/a"))
            assert len(there.requests) == 1


def test_a_refusal_is_named_before_the_end_of_its_body():
    for fault in (server.status(404), server.redirect("/b")):
        begun = time.monotonic()
        with serve(fault, server.stall()) as there, pytest.raises((FileNotFoundError, RemoteError)):
            RemoteFiles({"retries": 0, "timeout": 20}).open(there.url("/a"))
        assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "fault",
    [server.status(503, retry_after=1, times=1), server.status(429, headers={"RateLimit": '"a";r=0;t=1'}, times=1)],
)
def test_a_server_that_asks_to_wait_is_waited_for(fault):
    with serve(fault) as there:
        RemoteFiles({}).open(there.url("/a")).close()
        assert there.requests[1].time - there.requests[0].time >= 1


def test_waits_grow_and_are_left_to_chance(monkeypatch):
    asked = []
    inside.tune(monkeypatch, retry_pause=0.5)
    monkeypatch.setattr(retries.random, "uniform", lambda least, most: asked.append((least, most)) or 0.0)
    with serve(server.status(500)) as there, pytest.raises(RemoteError):
        RemoteFiles({"retries": 6}).open(there.url("/a"))
    assert asked == [(0, 0.5), (0, 1), (0, 2), (0, 4), (0, 8), (0, 10)]


def test_no_connection_is_an_error_that_says_so():
    with serve() as there:
        url = there.url("/a")
    with pytest.raises(RemoteError, match=r"the connection failed: .*refused.*tried 2 times"):
        RemoteFiles({"retries": 1}).open(url)
    with pytest.raises(RemoteError, match="cannot be resolved"):
        RemoteFiles({"retries": 0}).open("http://name.invalid/a")
    # An address that is set aside for documentation: nothing answers, or there is no way to it.
    with pytest.raises(RemoteError, match=r"no connection within|the connection failed"):
        RemoteFiles({"retries": 0, "connect_timeout": 0.2}).open("http://192.0.2.1/a")


# ---- sizes ----


def test_an_empty_file_is_opened_whatever_the_server_says_of_it():
    for options in ({}, {"ranges": False}):
        with serve(**options) as there:
            store = RemoteFiles({}).open(there.url("/empty"))
            assert (store.size, store.read_at(0, 10)) == (0, b"")
            store.read_spans([])
            store.close()


def test_a_small_file_is_read_in_one_request():
    with serve() as there:
        store = RemoteFiles({}).open(there.url("/small"))
        assert read(store, 0, len(SMALL)) == SMALL
        assert (read(store, 1, 4), read(store, 10, 14)) == (SMALL[1:4], SMALL[10:14])
        assert len(there.requests) == 1
        store.close()


@pytest.mark.parametrize("length", ["present", "missing"])
def test_a_server_without_ranges_gives_small_files(length):
    faults = [] if length == "present" else [server.header("Content-Length", None), server.short(len(CONTENT))]
    with serve(*faults, ranges=False) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        store.settle()
        assert read(store, 0) == CONTENT
        assert len(there.requests) == 1
        store.close()


@pytest.mark.parametrize("length", ["present", "missing"])
def test_a_server_without_ranges_does_not_give_large_files(length):
    size = (16 << 20) + 1
    faults = [] if length == "present" else [server.header("Content-Length", None), server.short(size)]
    with serve(*faults, files={"/a": bytes(size)}, ranges=False) as there:
        with pytest.raises(UnsupportedError, match=r"does not support ranges.* filecache::URL with storage_options"):
            RemoteFiles({}).open(there.url("/a"))
        assert len(there.requests) == 1


def test_a_file_without_a_size_is_refused():
    fault = server.header("Content-Range", "bytes 0-131071/*")
    with serve(fault) as there, pytest.raises(RemoteError, match=r"file size \(Content-Range: 'bytes 0-131071/\*'\)"):
        RemoteFiles({}).open(there.url("/a"))


def test_reading_past_the_end_is_an_error():
    with serve() as there:
        store = RemoteFiles({}).open(there.url("/a"))
        with pytest.raises(FormatError, match="the file ends at byte 3145728"):
            store.read_into(len(CONTENT) - 1, bytearray(2))
        store.close()


def test_gaps_between_spans_are_thrown_away():
    places = [(WINDOW, 1), (WINDOW + 1, 5), (WINDOW + 100, 300_000), (2 * MIB, 0), (2 * MIB + 1, MIB - 1)]
    with serve(server.short(200_000, first=1, times=2)) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        memories = [bytearray(size) for _, size in places]
        store.read_spans([local.Span(at, memoryview(m)) for (at, _), m in zip(places, memories, strict=True)])
        assert [bytes(m) for m in memories] == [CONTENT[at : at + size] for at, size in places]
        assert [request.range[0] for request in there.requests] == [0, WINDOW, WINDOW + 200_000, WINDOW + 400_000]
        store.close()
