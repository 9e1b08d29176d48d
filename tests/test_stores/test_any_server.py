"""Whatever a server does with connections and framing: the right tensors or an error, in bounded requests."""

import json
import threading
from http.server import HTTPServer

import numpy as np
import pytest
from builders import http_faults
from builders.http_faults import Fault
from builders.http_server import CERTIFICATE, Server
from builders.threads import await_no_threads, threads, until

import safeload
from safeload.errors import RemoteError
from safeload.numpy import save

pytest.importorskip("urllib3")

pytestmark = pytest.mark.usefixtures("quick_web")

INDEX = "/model.safetensors.index.json"
SHARDS = [f"/model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]
VALUES = {path: np.arange(100_000, dtype=np.float32) * k for k, path in enumerate(SHARDS, 1)}
FILES = {path: save({path: array}) for path, array in VALUES.items()}
FILES[INDEX] = json.dumps({"weight_map": {path: path[1:] for path in SHARDS}}).encode()
CHUNKED = "Transfer-Encoding: chunked"


def load(server, path=INDEX, **options):
    return safeload.load(server.url(path), storage_options={"verify": str(CERTIFICATE), **options})


def right(loaded, names=SHARDS):
    return sorted(loaded) == names and all(np.array_equal(loaded[name], VALUES[name]) for name in names)


# ---- connections ----


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_a_folder_takes_two_requests_a_shard_and_leaves_nothing(tls):
    """And one for its index, and one for its config.json."""
    with Server(FILES, tls=tls) as server:
        for _ in range(3):
            assert right(load(server))
            assert threads() == []
        assert len(server.requests) <= 3 * (2 + 2 * len(SHARDS))
        until(lambda: not server._sockets)


def test_a_server_with_one_thread_and_no_reuse_answers_all_requests(monkeypatch):
    with Server(FILES) as server:
        monkeypatch.setattr(type(server._server), "process_request", HTTPServer.process_request)
        monkeypatch.setattr(server._server.RequestHandlerClass, "protocol_version", "HTTP/1.0")
        assert all(right(load(server)) for _ in range(2))


def test_threads_load_at_once():
    results = []
    with Server(FILES) as server:
        workers = [threading.Thread(target=lambda: results.append(right(load(server)))) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert results == [True] * 8
        await_no_threads()
        assert threads() == []


@pytest.mark.parametrize("path", [INDEX, SHARDS[1]])
@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_refused_file_is_an_error_that_leaves_no_thread(status, path):
    with Server(FILES) as server:
        server.faults = [http_faults.status(status, path=path)]
        with pytest.raises(OSError, match=f"{status}|No such file"):
            load(server)
        await_no_threads()
        assert threads() == []


def test_a_proxy_of_the_environment_gets_every_connection(monkeypatch):
    with Server({}) as proxy, Server(FILES) as server:
        monkeypatch.setattr(proxy, "content", lambda path: FILES.get(path.removeprefix(server.url())))
        monkeypatch.setenv("http_proxy", proxy.url())
        assert right(load(server))
        assert server.connections == 0
        assert proxy.connections


@pytest.mark.parametrize("option", [{"verify": 7}, {"headers": 7}, {"retries": -1}, {"nothing": 1}])
def test_a_wrong_option_is_named_without_a_request(option):
    with Server(FILES) as server:
        with pytest.raises((ValueError, TypeError), match=next(iter(option))):
            load(server, **option)
        assert server.requests == []


def test_a_host_that_refuses_connections_is_a_remote_error():
    with Server(FILES) as server:
        url = server.url(INDEX)
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1"):
        safeload.load(url, storage_options={"retries": 1})
    assert threads() == []


# ---- framing ----


# The answers below have no version marks, and a mark that is gone is a change.
UNMARKED = {"etag": None, "modified": False}


def in_chunks(body, size=10_000, extension=b"", last=b"0\r\n\r\n"):
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + last


def answering(*fields, frame=bytes, before="", **when):
    """Answer ranges with exactly these fields and this framing of their bytes."""

    def change(answer, request):
        content = FILES[request.path]
        begin, end = request.range or (0, len(content))
        body = content[begin:end]
        place = f"Content-Range: bytes {begin}-{begin + len(body) - 1}/{len(content)}"
        fields_of_body = (field.replace("SIZE", str(len(body))) for field in fields)
        head = "\r\n".join(("HTTP/1.1 206 Partial Content", place, *fields_of_body, "", ""))
        answer.raw = before.encode() + head.encode("latin-1") + frame(body)

    return Fault(change, path=SHARDS[0], **when)


SOUND = {
    "length": (["Content-Length: SIZE"], bytes, ""),
    "no length": ([], bytes, ""),
    "chunks": ([CHUNKED], in_chunks, ""),
    "a chunk": ([CHUNKED], lambda body: in_chunks(body, 1 << 20), ""),
    "extensions": ([CHUNKED], lambda body: in_chunks(body, 7001, b" ; name=value"), ""),
    "trailers": ([CHUNKED], lambda body: in_chunks(body, last=b"0\r\nX-Digest: 1\r\n\r\n"), ""),
    "interim answers": (["Content-Length: SIZE", "Connection: close"], bytes, "HTTP/1.1 103 Early Hints\r\n\r\n" * 3),
}


@pytest.mark.parametrize("first", [0, 1], ids=["while it is opened", "while it is read"])
@pytest.mark.parametrize("framing", SOUND)
def test_every_sound_framing_gives_the_tensors(framing, first):
    fields, frame, before = SOUND[framing]
    with Server(FILES, **UNMARKED, faults=[answering(*fields, frame=frame, before=before, first=first)]) as server:
        assert right(load(server, SHARDS[0]), SHARDS[:1])


BROKEN = {
    "both lengths": ([CHUNKED, "Content-Length: SIZE"], bytes),
    "two lengths": (["Content-Length: SIZE", "Content-Length: 7"], bytes),
    "a negative length": (["Content-Length: -1"], bytes),
    "another coding": (["Transfer-Encoding: gzip, chunked"], in_chunks),
    "compressed": (["Content-Encoding: gzip", "Content-Length: SIZE"], bytes),
    "no chunks": ([CHUNKED], bytes),
    "a chunk too long": ([CHUNKED], lambda body: b"5\r\n" + body),
    "bytes before": ([CHUNKED], lambda body: in_chunks(b"!" + body)),
    "bytes after": ([CHUNKED], lambda body: in_chunks(body + b"!", 1 << 20)),
    "shifted": ([], lambda body: b"\r\n" + body),
    "cut": (["Content-Length: SIZE", "Connection: close"], lambda body: body[:-1]),
    "cut in a chunk": ([CHUNKED, "Connection: close"], lambda body: in_chunks(body)[:-100]),
    "empty": ([CHUNKED, "Connection: close"], lambda body: b""),
}


@pytest.mark.parametrize("first", [0, 1], ids=["while it is opened", "while it is read"])
@pytest.mark.parametrize("framing", BROKEN)
def test_framing_that_breaks_gives_an_error_or_the_right_tensors(framing, first):
    """What was cut may be asked for again; nothing else is taken for the bytes of a tensor."""
    fields, frame = BROKEN[framing]
    with Server(FILES, **UNMARKED, faults=[answering(*fields, frame=frame, first=first)]) as server:
        try:
            loaded = load(server, SHARDS[0], retries=1, timeout=5)
        except RemoteError:
            pass
        else:
            assert framing.startswith("cut")
            assert right(loaded, SHARDS[:1])
        assert len(server.requests) <= 8
    await_no_threads()
    assert threads() == []


@pytest.mark.parametrize("reached", [0, 1, 50_000])
def test_a_cut_answer_continues_at_the_byte_reached(reached):
    cut = answering("Content-Length: SIZE", "Connection: close", frame=lambda body: body[:reached], first=1, times=1)
    with Server(FILES, **UNMARKED, faults=[cut]) as server:
        assert right(load(server, SHARDS[0]), SHARDS[:1])
        begins = [request.range[0] for request in server.requests]
        assert begins[2] == begins[1] + reached
