"""The connections of files behind https: how long they live, in forks, and that the end of a call ends them."""

import functools
import gc
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from builders import http_faults as server
from builders import inside
from builders.http_server import CERTIFICATE, Server
from builders.inside import RemoteFiles, local, thread_group
from builders.remote import WINDOW, read
from builders.threads import threads

from safeload.errors import RemoteError

urllib3 = pytest.importorskip("urllib3")
retries = inside.http_client

pytestmark = pytest.mark.usefixtures("quick_web")

MIB = 1 << 20
CONTENT = os.urandom(MIB)
SIZE = len(CONTENT)
# Seconds: a moment on a machine of any speed. Without an end there would be one after 30 s, or the faults' 50 and 60.
SOON = 15
FILES = {"/a": CONTENT, "/b": CONTENT, "/c": CONTENT}


def serve(*faults, files=FILES, **options):
    return Server(files, faults=faults, **options)


def test_connections_are_kept_until_the_last_file_is_closed():
    with serve() as there:
        web = RemoteFiles({})
        one, two = web.open(there.url("/a")), web.open(there.url("/b"))
        one.close()
        assert read(two) == CONTENT[WINDOW:]
        assert there.connections == 1
        two.close()
        web.open(there.url("/a")).close()
        assert there.connections == 2


def test_a_connection_that_the_server_has_closed_is_made_again():
    with serve() as there:
        store = RemoteFiles({"retries": 0}).open(there.url("/a"))
        for one in list(there._sockets):
            one.shutdown(socket.SHUT_RDWR)
        time.sleep(0.05)
        assert read(store) == CONTENT[WINDOW:]
        assert (there.connections, len(there.requests)) == (2, 2)
        store.close()


@pytest.mark.skipif(os.name != "posix", reason="whether a request meets the reset depends on the system")
def test_a_connection_that_is_reset_at_once_is_an_error_that_names_the_url():
    """Also if the reset arrives before the request has been sent."""
    with serve() as there:

        def refuse(request, address):
            request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.close()

        there._server.process_request = refuse
        for _ in range(30):
            with pytest.raises(RemoteError, match=r"connection.*127"):
                RemoteFiles({"retries": 0}).open(there.url("/a"))


def test_many_threads_read_at_once():
    with serve(latency=0.05) as there:
        store = RemoteFiles({}).open(there.url("/a"))
        memory = bytearray(len(CONTENT))
        view, step = memoryview(memory), len(CONTENT) // 64
        tasks = [
            functools.partial(store.read_spans, [local.Span(at, view[at : at + step])])
            for at in range(0, len(CONTENT), step)
        ]
        thread_group.run(tasks, 16)
        assert memory == CONTENT
        assert 4 <= there.most_in_flight <= 16
        assert there.connections <= 17
        store.close()


def read_in_child(store, pipe):
    try:
        pipe.send(read(store) == CONTENT[WINDOW:])
    except BaseException as error:
        pipe.send(repr(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_makes_connections_of_its_own():
    with serve() as there:
        store = RemoteFiles({}).open(there.url("/a"))
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(store, theirs))
        child.start()
        assert read(store) == CONTENT[WINDOW:]
        assert ours.poll(60)
        assert ours.recv() is True
        child.join(60)
        assert read(store) == CONTENT[WINDOW:]
        assert there.connections == 2
        store.close()


# ---- the end of a call ----


class EndError(Exception):
    pass


def interrupt_when(condition):
    begun = time.monotonic()

    def tick():
        if condition():
            raise EndError
        assert time.monotonic() - begun < SOON

    return tick


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("where", ["before the answer", "in the body", "between tries"])
def test_a_read_ends_at_once(where, tls):
    fault = {
        "before the answer": server.silent(first=1),
        "in the body": server.stall(100_000, first=1),
        "between tries": server.status(503, retry_after=50, first=1),
    }[where]
    with serve(fault, tls=tls) as there:
        store = RemoteFiles({"verify": CERTIFICATE} if tls else {}).open(there.url("/a", "localhost"))
        memory = bytearray(len(CONTENT))
        tasks = [functools.partial(store.read_spans, [local.Span(WINDOW, memoryview(memory)[WINDOW:])])] * 4
        until = [None]

        def ready():
            if len(there.requests) < 5:
                return False
            until[0] = until[0] or time.monotonic() + 0.2
            return time.monotonic() > until[0]

        with pytest.raises(EndError):
            thread_group.run(tasks, 4, interrupt_when(ready))
        assert time.monotonic() - until[0] < SOON
        assert not threads()
        memory[:] = bytes(len(memory))
        time.sleep(0.1)
        assert not any(memory)
        there.faults.clear()
        assert read(store) == CONTENT[WINDOW:]  # in connections that work
        store.close()


@pytest.mark.parametrize("stage", ["connect", "handshake"])
def test_an_opening_ends_at_once(stage):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        place = f"127.0.0.1:{deaf.getsockname()[1]}"
        waiting = []
        if stage == "connect":  # the queue of connections is full, where the system has one
            for _ in range(4):
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(deaf.getsockname())
                waiting.append(one)
        task = functools.partial(RemoteFiles({"connect_timeout": 30}).open, f"https://{place}/a")
        begun = time.monotonic()
        with pytest.raises(EndError):
            thread_group.run([task], 1, interrupt_when(lambda: time.monotonic() > begun + 0.3))
        assert time.monotonic() - begun < SOON
        assert not threads()
        for one in waiting:
            one.close()


@pytest.mark.skipif(os.name == "nt", reason="no signal to one process here")
def test_ctrl_c_ends_an_opening_in_the_main_thread():
    code = inside.program("""
import sys, time
from builders.inside import RemoteFiles
try:
    RemoteFiles({}).open(sys.argv[1])
except KeyboardInterrupt:
    print("ended")
""")
    with serve(server.silent()) as there:
        child = subprocess.Popen([sys.executable, "-I", "-c", code, there.url("/a")], stdout=subprocess.PIPE, text=True)
        while not there.requests:
            assert child.poll() is None
            time.sleep(0.01)
        pressed = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60)[0] == "ended\n"
        assert time.monotonic() - pressed < SOON


def test_an_open_file_leaves_nothing_behind(recwarn):
    with serve() as there, serve(tls=True) as secure:
        for url in (there.url("/a"), secure.url("/a", "localhost")):
            store = RemoteFiles({"verify": CERTIFICATE}).open(url)
            line = weakref.ref(store)
            del store
            gc.collect()
            assert line() is None
            until = time.monotonic() + SOON
            while (there if url.startswith("http:") else secure)._sockets:
                assert time.monotonic() < until
                time.sleep(0.01)
    assert [str(one.message) for one in recwarn] == []


def test_a_read_goes_on_where_another_thread_closes_the_last_file(monkeypatch):
    pools = urllib3.connectionpool.HTTPConnectionPool
    with serve() as there:
        store = RemoteFiles({}).open(there.url("/a"))
        close = functools.partial(inside.http_client._close, store._client._managers)
        closing, urlopen = iter([close]), pools.urlopen

        def late(self, *arguments, **options):
            next(closing, lambda: None)()
            return urlopen(self, *arguments, **options)

        monkeypatch.setattr(pools, "urlopen", late)
        assert read(store) == CONTENT[WINDOW:]
        assert len(there.requests) == 2
        store.close()


def test_a_server_of_http_1_0_is_understood(tmp_path):
    """Python's own, which has no ranges and closes each connection."""
    (tmp_path / "a").write_bytes(CONTENT)
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as there:
        threading.Thread(target=there.serve_forever, args=(0.02,)).start()
        store = RemoteFiles({}).open(f"http://127.0.0.1:{there.server_address[1]}/a")
        assert read(store, 0) == CONTENT
        store.close()
        there.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass


def test_the_first_error_ends_all_reads():
    with serve(server.stall(1000, first=1, path="/a"), server.status(404, first=1, path="/b")) as there:
        web = RemoteFiles({})
        slow, bad = web.open(there.url("/a")), web.open(there.url("/b"))
        begun = time.monotonic()
        with pytest.raises(FileNotFoundError):
            thread_group.run([functools.partial(read, slow)] * 3 + [functools.partial(read, bad)], 4)
        assert time.monotonic() - begun < SOON
        slow.close()
        bad.close()
