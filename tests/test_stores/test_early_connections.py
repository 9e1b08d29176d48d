"""Connections that are opened before an index or a list of files has come: for its shards, and for nothing else."""

import json
import ssl
import threading
import time
from functools import partial
from http.server import HTTPServer

import numpy as np
import pytest
from builders import http_faults, inside
from builders.http_server import CERTIFICATE, Server
from builders.hub import Hub
from builders.threads import await_no_threads, threads, until

import safeload
from safeload.numpy import save

pytest.importorskip("urllib3")
connections = inside.http_connections

pytestmark = [
    pytest.mark.inner,
    pytest.mark.usefixtures("quick_web"),
    # Python leaves a TLS socket that is reset before its handshake to be closed with its last reference.
    pytest.mark.filterwarnings(r"ignore:Exception ignored in. <ssl\.SSLSocket:pytest.PytestUnraisableExceptionWarning"),
]

INDEX = "/model.safetensors.index.json"
SHARDS = [f"/model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]
FILES = {path: save({path: np.arange(300, dtype=np.float32)}) for path in SHARDS}
FILES[INDEX] = json.dumps({"weight_map": {path: path[1:] for path in SHARDS}}).encode()
# Seconds: a moment on a machine of any speed.
SOON = 15
AHEAD = connections._AHEAD


def after(condition, path=INDEX):
    """The answer to a path is sent once the condition holds."""
    return http_faults.Fault(lambda *_: until(condition), path)


def listing(server, path=INDEX, **options):
    with safeload.open(server.url(path), storage_options={"verify": str(CERTIFICATE), **options}) as checkpoint:
        return sorted(checkpoint.keys())


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_shards_are_read_over_connections_opened_while_the_index_was_awaited(tls):
    with Server(FILES, tls=tls) as server:
        server.faults = [after(lambda: server.connections >= AHEAD)]
        options = {"verify": str(CERTIFICATE)}
        with safeload.open(server.url(INDEX), storage_options=options) as checkpoint:
            assert sorted(checkpoint.keys()) == SHARDS
            await_no_threads()
            assert not threads()
            used = server.connections
            assert used in (AHEAD, 1 + AHEAD)  # the index may have been requested over one of them
            until(lambda: len(server._sockets) <= (2 if tls else 1) * 5)  # the others are closed
            assert checkpoint[SHARDS[0]].sum() == 299 * 150
            assert server.connections == used
        until(lambda: not server._sockets)


def test_a_thread_that_is_stopped_before_it_lists_its_connection_leaves_none(monkeypatch):
    """As on a busy machine, where `open` can end before each thread has run."""
    late = threading.Event()
    begin = connections.begin

    def begin_late(tasks):
        stop = begin([lambda task=task: (late.wait(SOON), task()) for task in tasks])
        return lambda: (stop(), late.set())

    monkeypatch.setattr(connections, "begin", begin_late)
    connections._EarlyConnection.unclaimed.clear()
    with Server(FILES) as server, safeload.open(server.url(INDEX)) as checkpoint:
        until(lambda: not threads())
        assert not [*connections._EarlyConnection.unclaimed]
        assert sorted(checkpoint.keys()) == SHARDS


def test_a_single_file_takes_a_single_connection():
    with Server(FILES) as server:
        assert listing(server, SHARDS[0]) == SHARDS[:1]
        assert server.connections == 1


class Odd(Server):
    """A server that treats its second to ninth connection, which are opened early, in another way."""

    def __init__(self, treat, monkeypatch, **options):
        super().__init__(FILES, faults=[after(lambda: self.count >= 1 + AHEAD)], **options)
        self.treat, self.count = treat, 0
        begin = connections.begin
        monkeypatch.setattr(connections, "begin", lambda tasks: begin([partial(self.second, task) for task in tasks]))

    def second(self, task):
        until(lambda: self.count >= 1)
        task()

    def opened(self, connection):
        super().opened(connection)
        if isinstance(connection, ssl.SSLSocket):  # after its handshake
            return
        with self._lock:
            self.count += 1
            number = self.count
        if 2 <= number <= 1 + AHEAD:
            self.treat(self)


def test_connections_that_are_never_answered_delay_nobody_for_long(monkeypatch):
    with Odd(lambda server: server.ended.wait(60), monkeypatch, tls=True) as server:
        begun = time.monotonic()
        assert listing(server) == SHARDS
        assert time.monotonic() - begun < SOON
        await_no_threads()
        assert not threads()


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_connections_that_are_refused_are_opened_again(tls, monkeypatch):
    def refuse(server):
        raise OSError

    with Odd(refuse, monkeypatch, tls=tls) as server:
        assert listing(server) == SHARDS
        await_no_threads()
        assert not threads()


def test_a_server_with_a_single_thread_answers_all_requests(monkeypatch):
    """The index has the first connection, and its answer, which closes it, the connections without a request."""
    monkeypatch.setattr(connections, "_IMPATIENCE", 2 * SOON)
    with Server(FILES) as server:
        monkeypatch.setattr(type(server._server), "process_request", HTTPServer.process_request)
        monkeypatch.setattr(server._server.RequestHandlerClass, "protocol_version", "HTTP/1.0")
        begun = time.monotonic()
        assert [listing(server) for _ in range(4)] == [SHARDS] * 4
        assert time.monotonic() - begun < SOON


def test_a_request_waits_for_a_single_connection(monkeypatch):
    """Slow connections are left to the requests that follow."""
    monkeypatch.setattr(connections, "_PATIENCE", 0.01)
    pool = connections._PlainPool("127.0.0.1", 1)
    slow = [connections._EarlyConnection() for _ in range(3)]
    pool._early.extend(slow)
    assert pool._new_conn().sock is None
    assert list(pool._early) == slow[1:]
    pool.close_ahead()


def test_a_process_has_few_connections_without_a_request(monkeypatch):
    monkeypatch.setattr(connections, "_MOST_AHEAD", 2)
    with Server(FILES) as server:
        server.faults = [after(lambda: server.connections == 3)]
        assert listing(server) == SHARDS
    assert not connections._EarlyConnection.unclaimed
    monkeypatch.setattr(connections, "_MOST_AHEAD", 0)
    monkeypatch.setattr(connections, "begin", None)
    with Server(FILES) as server:
        assert listing(server) == SHARDS


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_no_thread_outlives_the_opening(tls):
    with Server(FILES, tls=tls) as server:
        for _ in range(10):
            with safeload.open(server.url(INDEX), storage_options={"verify": str(CERTIFICATE)}):
                assert not threads()


def test_unused_connections_are_closed_if_the_answer_takes_long(monkeypatch):
    monkeypatch.setattr(connections, "_IMPATIENCE", 0.2)
    with Server(FILES) as server:
        server.faults = [after(lambda: server.connections >= AHEAD and len(server._sockets) == 1)]
        assert listing(server) == SHARDS


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_index_that_is_refused_ends_all_connections(status):
    with Server(FILES) as server:
        server.faults = [http_faults.status(status)]
        with pytest.raises(OSError, match=str(status)):
            listing(server)
        await_no_threads()
        assert not threads()
        until(lambda: not server._sockets)


def test_a_proxy_gets_no_early_connection(monkeypatch):
    monkeypatch.setattr(connections, "begin", None)
    with Server({}) as proxy, Server(FILES) as server:
        proxy.files = {server.url(path): content for path, content in FILES.items()}
        monkeypatch.setattr(proxy, "content", lambda path: FILES.get(path.removeprefix(server.url())))
        monkeypatch.setenv("http_proxy", proxy.url())
        assert listing(server) == SHARDS
        assert not server.connections


def test_checkpoints_may_be_opened_at_once():
    results = []
    with Server(FILES) as server:
        workers = [threading.Thread(target=lambda: results.append(listing(server))) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SOON)
        assert results == [SHARDS] * 8
        await_no_threads()
        assert not threads()
        until(lambda: not server._sockets)


@pytest.mark.store_packages
def test_connections_to_the_hub_are_opened_while_the_api_is_asked(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for variable in ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    with Hub() as server:
        server.add("owner/name", {path[1:]: content for path, content in FILES.items()})
        api = "/api/models/owner/name"
        server.faults = [after(lambda: server.connections >= 1 + AHEAD, api)]
        options = {"endpoint": server.url(), "token": False}
        with safeload.open("hf://owner/name", storage_options=options) as checkpoint:
            assert sorted(checkpoint.keys()) == SHARDS
        assert server.connections == 1 + AHEAD
        before = server.connections
        server.faults = []
        with safeload.open(f"hf://owner/name{SHARDS[0]}", storage_options=options):
            assert server.connections <= before + 2
        await_no_threads()
        assert not threads()
