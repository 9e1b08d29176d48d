"""Answers byte for byte: which bodies are taken, which are refused, and what a server cannot hold up."""

import os
import time
from contextlib import suppress

import pytest
from builders import inside
from builders.http_faults import Fault
from builders.http_server import Server
from builders.remote import WINDOW, read

from safeload.errors import RemoteError

pytest.importorskip("urllib3")
RemoteFiles = inside.RemoteFiles

pytestmark = [pytest.mark.inner, pytest.mark.usefixtures("quick_web")]

CONTENT = os.urandom(1 << 20)
CHUNKED = "Transfer-Encoding: chunked"


def in_chunks(body, size=10_000, extension=b"", last=b"0\r\n\r\n"):
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + last


def answering(*fields, frame=bytes, before="", status="206 Partial Content", first=1, stalled=0, **when):
    """Answer a range with exactly these fields and this framing of its bytes; close after ``stalled`` seconds."""

    def change(answer, request):
        begin, end = request.range
        body = CONTENT[begin:end]
        place = f"Content-Range: bytes {begin}-{begin + len(body) - 1}/{len(CONTENT)}"
        head = "\r\n".join((f"HTTP/1.1 {status}", place, *(f.replace("SIZE", str(len(body))) for f in fields), "", ""))
        answer.raw, answer.stalled = before.encode() + head.encode("latin-1") + frame(body), stalled

    return Fault(change, first=first, **when)


def read_through(fault, **options):
    with Server({"/a": CONTENT}, etag=None, modified=False, faults=[fault]) as there:
        store = RemoteFiles({"timeout": 5, "retries": 1, **options}).open(there.url("/a"))
        try:
            return read(store) == CONTENT[WINDOW:], [request.range for request in there.requests]
        finally:
            store.close()


@pytest.mark.parametrize(
    ("fields", "frame"),
    [
        (["Content-Length: SIZE"], bytes),
        (["Content-Length:SIZE  "], bytes),
        ([], bytes),
        ([CHUNKED], in_chunks),
        ([CHUNKED], lambda body: in_chunks(body, 1_000_000)),
        ([CHUNKED], lambda body: in_chunks(body, 7_001, b" ; name=value")),
        ([CHUNKED], lambda body: in_chunks(body, last=b"000\r\nX-Digest: 1\r\n\r\n")),
        (["transfer-encoding:CHUNKED \t"], in_chunks),
        (["Transfer-Encoding:  Chunked", "X-Unused: \xe9"], in_chunks),
        (["X-Unused: 1,\r\n 2", "Content-Length: SIZE"], bytes),
    ],
)
def test_every_sound_framing_gives_the_bytes(fields, frame):
    assert read_through(answering(*fields, frame=frame))[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["Transfer-Encoding: gzip, chunked"], "other than chunked"),
        (["Transfer-Encoding: identity, chunked"], "other than chunked"),
        (["Transfer-Encoding: chunked, identity"], "other than chunked"),
        (["Transfer-Encoding: identity"], "other than chunked"),
        (["Transfer-Encoding: chunked;q=1"], "other than chunked"),
        (["Transfer-Encoding: xchunked"], "other than chunked"),
        (["Transfer-Encoding:"], "other than chunked"),
        (["Transfer-Encoding: \x0bchunked"], "other than chunked"),
        (["Transfer-Encoding:\r\n chunked"], "other than chunked"),
        (["Transfer-Encoding: identity,\r\n\tchunked"], "other than chunked"),
        (["Content-Length:\r\n SIZE"], "not a single number"),
        (["Content-Length: SIZE\r\n 7"], "not a single number"),
        ([CHUNKED, CHUNKED], "other than chunked"),
        ([CHUNKED, "Transfer-Encoding: identity"], "other than chunked"),
        ([CHUNKED, "Content-Length: SIZE"], "both Transfer-Encoding and Content-Length"),
        (["Content-Length: SIZE", CHUNKED], "both Transfer-Encoding and Content-Length"),
        (["Transfer-Encoding : chunked"], "not a header field"),
        (["Transfer Encoding: chunked"], "not a header field"),
        (["Transfer-Encoding:\r chunked"], "other than chunked"),
        (["Content-Length: SIZE", "Content-Length: SIZE"], "not a single number"),
        (["Content-Length: SIZE", "Content-Length: 7"], "not a single number"),
        (["Content-Length: +SIZE"], "not a single number"),
        (["Content-Length: -1"], "not a single number"),
        (["Content-Length: 1_000"], "not a single number"),
        (["Content-Length: SIZE, SIZE"], "not a single number"),
        (["Content-Length: " + "9" * 5000], r"is 9{40}\.\.\., more than 18 digits"),
        ([f"Content-Length: {2**62}"], "is 4611686018427387904, more than 18 digits"),
        (["Content-Encoding: gzip", "Content-Length: SIZE"], "compressed"),
        (["Content-Encoding: identity", "Content-Encoding: br", "Content-Length: SIZE"], "compressed"),
        ([CHUNKED, "Content-Encoding: x-gzip"], "compressed"),
    ],
)
@pytest.mark.parametrize("frame", [bytes, in_chunks], ids=["plain", "in chunks"])
def test_framing_that_may_be_misread_is_refused_at_once(fields, message, frame):
    with Server({"/a": CONTENT}, faults=[answering(*fields, frame=frame)]) as there:
        store = RemoteFiles({"timeout": 5}).open(there.url("/a"))
        memory = bytearray(len(CONTENT) - WINDOW)
        with pytest.raises(RemoteError, match=message):
            store.read_into(WINDOW, memory)
        assert not any(memory)
        assert len(there.requests) == 2
        store.close()


@pytest.mark.parametrize(
    "size", [b"", b"-5", b"+5", b"0x5", b"1_0", b" 5", b"5 5", b"g", b"\xd9\xa3", b"f" * 16, b"5" * 5000]
)
def test_a_chunk_without_a_size_is_refused(size):
    with pytest.raises(RemoteError, match=r"has no size|broke off before the end"):
        read_through(answering(CHUNKED, frame=lambda body: size + b"\r\n" + body))


@pytest.mark.parametrize("first", [0, 1], ids=["while it is opened", "while it is read"])
@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (lambda body: in_chunks(b"!" + body), "more bytes than its range"),
        (lambda body: in_chunks(body + b"!", 1 << 20), "more bytes than its range"),
        (lambda body: in_chunks(body, last=b"1\r\n!\r\n0\r\n\r\n"), "more bytes than its range"),
        (lambda body: in_chunks(body, 1 << 20).replace(b"\r\n", b"\r\n!", 1), "broke off before the end"),
        (lambda body: in_chunks(body, last=b"zz\r\n\r\n"), "broke off before the end"),
    ],
    ids=["before", "in the chunk", "in the last chunk", "beyond the chunk", "no last chunk"],
)
def test_chunks_that_hold_more_than_the_range_are_refused(frame, message, first):
    with pytest.raises(RemoteError, match=message):
        read_through(answering(CHUNKED, frame=frame, first=first))


@pytest.mark.parametrize("size", [10_000, 1 << 20], ids=["at the end", "in a chunk"])
def test_a_connection_with_a_broken_frame_is_not_used_again(size):
    """The server does not close it at once."""

    def frame(body):
        return in_chunks(body, size, last=b"zz\r\n\r\n")

    with pytest.raises(RemoteError, match="broke off before the end"):
        read_through(answering(CHUNKED, frame=frame, stalled=2))


@pytest.mark.parametrize("first", [0, 1], ids=["while it is opened", "while it is read"])
@pytest.mark.parametrize(
    "frame",
    [lambda body: b"\r\n" + body, lambda body: body + b"!", in_chunks, lambda body: body * 3],
    ids=["shifted", "one more", "chunks without their field", "all the rest"],
)
def test_a_body_without_a_length_that_holds_more_than_the_range_is_refused(frame, first):
    with pytest.raises(RemoteError, match="more bytes than its range"):
        read_through(answering("Connection: close", frame=frame, first=first))


def test_a_last_chunk_that_never_comes_is_not_waited_for_long():
    def hold_up(answer, request):
        begin, end = request.range
        part = CONTENT[begin:end]
        answer.headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(CONTENT)}", "Transfer-Encoding": "chunked"}
        answer.content = b"%x\r\n%s\r\n" % (len(part), part)
        answer.begin, answer.end = 0, len(answer.content)

    with Server({"/a": CONTENT}, etag=None, modified=False, faults=[Fault(hold_up, first=1)]) as there:
        store, begun = RemoteFiles({"timeout": 30}).open(there.url("/a")), time.monotonic()
        assert read(store) == CONTENT[WINDOW:]
        assert time.monotonic() - begun < 10
        store.close()


def test_a_connection_is_reused_after_chunked_ranges():
    def in_pieces(answer, request):
        begin, end = request.range
        answer.headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(CONTENT)}", "Transfer-Encoding": "chunked"}
        answer.content = in_chunks(CONTENT[begin:end])
        answer.begin, answer.end = 0, len(answer.content)

    with Server({"/a": CONTENT}, etag=None, modified=False, faults=[Fault(in_pieces)]) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert [read(store), read(store)] == [CONTENT[WINDOW:]] * 2
        assert (there.connections, len(there.requests)) == (1, 3)
        store.close()


def test_a_last_chunk_that_is_missing_is_asked_for_again():
    fault = answering(CHUNKED, frame=lambda body: in_chunks(body, last=b""), times=1)
    sound, ranges = read_through(fault)
    assert sound
    assert [begin for begin, _ in ranges] == [0, WINDOW, WINDOW]


@pytest.mark.parametrize("frame", [bytes, in_chunks], ids=["plain", "in chunks"])
@pytest.mark.parametrize(
    "field", ["X-Unused: 1\rTransfer-Encoding: chunked", "X-Unused: 1\r 2"], ids=["a field", "a continuation"]
)
def test_a_line_that_readers_divide_in_different_ways_gives_the_bytes_or_an_error(field, frame):
    with suppress(RemoteError):
        assert read_through(answering(field, "Connection: close", frame=frame))[0]


def test_a_chunk_longer_than_its_size_is_refused():
    with pytest.raises(RemoteError, match="broke off before the end"):
        read_through(answering(CHUNKED, frame=lambda body: b"5\r\n" + body))


@pytest.mark.parametrize(
    ("length", "reached"),
    [(7, 0), (8, 1), (100_000, 99_993), (100_008, 100_000), (100_012, 100_000), (100_020, 100_004)],
)
def test_a_chunked_range_that_breaks_off_continues_at_the_byte_reached(length, reached):
    cut = answering(CHUNKED, frame=lambda body: in_chunks(body, 100_000)[:length], times=1)
    sound, ranges = read_through(cut)
    assert sound
    assert [begin for begin, _ in ranges] == [0, WINDOW, WINDOW + reached]


def test_a_chunked_range_that_never_moves_on_ends_after_some_tries():
    for frame in (lambda body: b"", lambda body: b"10", lambda body: b"10\r\n"):
        with pytest.raises(RemoteError, match=r"broke off .* tried 2 times"):
            read_through(answering(CHUNKED, frame=frame))


@pytest.mark.parametrize("first", [0, 1], ids=["while it is opened", "while it is read"])
@pytest.mark.parametrize("interim", ["100 Continue", "102 Processing", "103 Early Hints", "199 Other"])
def test_interim_answers_are_skipped(interim, first):
    before = f"HTTP/1.1 {interim}\r\nLink: </style.css>; rel=preload\r\nContent-Length: 7\r\n\r\n" * 3
    fault = answering("Content-Length: SIZE", "Connection: close", before=before, first=first)
    assert read_through(fault, retries=0)[0]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n", r"switched protocols \(101\)"),
        ("HTTP/1.1 102 Processing\r\n\r\n" * 20_000, "sends more bytes than the response can have"),
        ("HTTP/1.1 103 Early Hints\r\n" + "Link: x\r\n" * 20_000 + "\r\n", "not HTTP"),
        ("HTTP/1.1 103 Early Hints\r\nLink: " + "x" * 200_000 + "\r\n\r\n", "not HTTP"),
    ],
)
def test_interim_answers_that_lead_to_none_are_refused(before, message):
    for first in (0, 1):
        with pytest.raises(RemoteError, match=message):
            read_through(answering("Content-Length: SIZE", before=before, first=first))


@pytest.mark.parametrize("status", ["404 Not Found", "403 Forbidden", "500 Oops", "302 Found", "200 OK"])
@pytest.mark.parametrize("trailers", [b"X-More: 1\r\n" * 1_000_000, b"X" * 11_000_000], ids=["many", "long"])
def test_trailers_without_end_hold_nothing(status, trailers):
    fault = answering(CHUNKED, status=status, frame=lambda _: b"4\r\nnone\r\n0\r\n" + trailers, first=0)
    begun = time.monotonic()
    expected = FileNotFoundError if status.startswith("404") else RemoteError
    with pytest.raises(expected):
        read_through(fault, retries=0)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("frame", [lambda _: b"zz\r\n", lambda _: b"5\r\nx", in_chunks, lambda _: b"0\r\nX"])
def test_a_broken_error_body_leaves_the_status(frame):
    fault = answering(CHUNKED, status="404 Not Found", frame=frame, first=0)
    with pytest.raises(FileNotFoundError):
        read_through(fault, retries=0)


def test_a_connection_is_reused_after_a_chunked_error():
    def refuse(answer, request):
        answer.status, answer.headers = 503, {"Transfer-Encoding": "chunked", "Retry-After": "0"}
        answer.content, answer.begin, answer.end = b"4\r\nbusy\r\n0\r\nX: 1\r\n\r\n", 0, 21

    with Server({"/a": CONTENT}, faults=[Fault(refuse, first=1, times=2)]) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        assert (there.connections, len(there.requests)) == (1, 4)
        store.close()


def test_a_small_file_in_chunks_is_read_to_its_end():
    for fault in (
        answering(CHUNKED, status="200 OK", frame=in_chunks, first=0),
        answering(CHUNKED, status="200 OK", frame=lambda body: in_chunks(body)[:-7], first=0, times=1),
    ):
        with Server({"/a": CONTENT}, faults=[fault], ranges=False) as there:
            store = RemoteFiles({"retries": 1}).open(there.url("/a"))
            assert store.size in (len(CONTENT), WINDOW)
            assert store.read_at(0, WINDOW) == CONTENT[:WINDOW]
            store.close()
