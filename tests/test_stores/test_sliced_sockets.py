"""Sockets whose reads end with their call: soon, and otherwise like any other."""

import socket
import ssl
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
from builders import http_faults as server
from builders import inside
from builders.http_server import CERTIFICATE, Server
from builders.inside import thread_group
from builders.remote import WINDOW, read
from builders.terminal import press_ctrl_c
from builders.threads import threads

pytest.importorskip("urllib3")
from builders.inside import http_client

pytestmark = pytest.mark.inner

# Seconds: a moment on a machine of any speed, far below the timeouts of the sockets.
SOON = 15


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch):
    monkeypatch.setattr(inside.http_client, "SLICE", 0.01)


@contextmanager
def pair(timeout=60.0):
    """A sliced socket, and what it is connected to."""
    ours, theirs = socket.socketpair()
    with http_client.SlicedSocket(ours.family, ours.type, ours.proto, ours.detach()) as ours, theirs:
        ours.settimeout(timeout)
        yield ours, theirs


def client():
    context = ssl.create_default_context(cafile=CERTIFICATE)
    context.sslsocket_class = http_client.SlicedTlsSocket
    return context


@contextmanager
def tls_pair(timeout=60.0, send=socket.socket.sendall):
    """The same over TLS. The other end sends by a function, from a thread of its own, what it takes from a list."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = context.wrap_bio(incoming, outgoing, server_side=True)
    with ExitStack() as stack:
        ours, theirs = stack.enter_context(pair(timeout))

        def shake():
            for last in (False, True):  # it takes two messages of the client's
                incoming.write(theirs.recv(1 << 16))
                with nullcontext() if last else pytest.raises(ssl.SSLWantReadError):
                    serving.do_handshake()
                send(theirs, outgoing.read())

        thread = threading.Thread(target=shake)
        thread.start()
        secure = stack.enter_context(client().wrap_socket(ours, server_hostname="localhost"))
        thread.join()

        def answer(data):
            serving.write(data)
            send(theirs, outgoing.read())

        yield secure, answer


def dribble(receiver, data):
    """Sends in pieces, each some slices after the one before."""
    for at in range(0, len(data), 700):
        receiver.sendall(data[at : at + 700])
        time.sleep(0.03)


@contextmanager
def stopped_meanwhile():
    stop = thread_group.Stop()
    timer = threading.Timer(0.03, stop.stop)
    timer.start()
    begun = time.monotonic()
    with thread_group.belonging(stop):
        yield
    assert time.monotonic() - begun < SOON
    timer.join()


@pytest.mark.parametrize(
    "call", [lambda one: one.recv(5), lambda one: one.recv_into(bytearray(5))], ids=["recv", "recv_into"]
)
@pytest.mark.parametrize("made", [pair, tls_pair], ids=["plain", "TLS"])
def test_a_read_ends_when_it_is_stopped(made, call):
    with made() as (ours, _), stopped_meanwhile():
        with pytest.raises(thread_group.Stopped):
            call(ours)
        assert ours.gettimeout() == 60


def test_a_handshake_ends_when_it_is_stopped():
    with pair() as (ours, _), stopped_meanwhile(), pytest.raises(thread_group.Stopped):
        client().wrap_socket(ours, server_hostname="localhost")


def test_ctrl_c_ends_a_read():
    with pair() as (ours, _):
        threading.Timer(0.03, press_ctrl_c).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ours.recv(5)
        assert time.monotonic() - begun < SOON


@pytest.mark.parametrize("timeout", [0.005, 0.035])
@pytest.mark.parametrize("made", [pair, tls_pair], ids=["plain", "TLS"])
def test_a_read_waits_as_long_as_its_socket_should(made, timeout):
    with made() as (ours, _):
        ours.settimeout(timeout)
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            ours.recv_into(bytearray(5))
        assert timeout * 0.9 <= time.monotonic() - begun < SOON
        assert ours.gettimeout() == timeout


@pytest.mark.parametrize("timeout", [60.0, None])
def test_bytes_that_come_slowly_come_whole(timeout):
    """Records of TLS too, and the messages of its handshake, which come in more pieces than slices."""
    content = bytes(range(256)) * 8
    with tls_pair(timeout, dribble) as (ours, answer):
        thread = threading.Thread(target=answer, args=(content,))
        thread.start()
        stream = ours.makefile("rb")
        assert stream.read(len(content)) == content
        thread.join()
        assert ours.gettimeout() == timeout
        stream.close()


def test_a_socket_that_never_waits_never_does():
    with pair(0.0) as (ours, theirs):
        with pytest.raises(BlockingIOError):
            ours.recv(5)
        theirs.close()
        ours.setblocking(True)
        assert ours.recv(5) == b""
    with tls_pair() as (ours, _):
        ours.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            ours.recv_into(bytearray(5))


# ---- in connections ----


class EndError(Exception):
    pass


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.usefixtures("quick_web")
def test_a_read_ends_with_its_call(tls):
    content = bytes(range(256)) * 1024
    with Server({"/a": content}, faults=[server.stall(1000, first=1, times=1)], tls=tls) as there:
        web = inside.RemoteFiles({"verify": CERTIFICATE} if tls else {})
        store = web.open(there.url("/a", "localhost"))
        begun = time.monotonic()

        def tick():
            assert time.monotonic() - begun < SOON
            if len(there.requests) == 2:
                raise EndError

        with pytest.raises(EndError):
            thread_group.run([lambda: read(store)], 1, tick)
        assert time.monotonic() - begun < SOON
        assert not threads()
        assert read(store) == content[WINDOW:]
        store.close()


def test_a_class_that_the_caller_has_given_its_context_is_kept():
    class Own(ssl.SSLSocket):
        pass

    for cls in (Own, ssl.SSLSocket):
        context = client()
        context.sslsocket_class = cls
        url = http_client.target_of("https://localhost", {}).url
        inside.http_client.Client({"ssl_context": context})._make(url).clear()
        assert context.sslsocket_class is (Own if cls is Own else http_client.SlicedTlsSocket)
