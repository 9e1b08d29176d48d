"""HTTP connections, pooled by urllib3. Another thread can abort a connect, a handshake or a read."""

from __future__ import annotations

import errno
import http.client
import logging
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.wait import wait_for_write

from ..base.forking import ProcessLock
from ..base.url import UrlError, WebUrl, divided, web_url
from ..errors import UnsupportedError
from . import dialing
from .http_framing import BadResponse, Response
from .stop import Stopped, current
from .thread_group import begin

# Idle connections kept per host: as many as there are requests in flight while headers are read.
_IDLE = 32
# Connections opened before an answer that leads to several requests, and seconds that a request waits for one of them
# before it opens its own.
_AHEAD, _PATIENCE = 8, 0.25
# Connections of a process that have no request yet: programs that open many checkpoints at once need their descriptors.
_MOST_AHEAD = 32
# Seconds after which unused connections are closed: a server with a single thread serves no other until then.
_IMPATIENCE = 2.0
# An unused body of at most this size is read to make its connection reusable.
_DRAINED = 16 << 10
# Seconds after which draining a body costs more than a new connection.
_DRAINING = 1.0
# Seconds to wait for the end of a body after its last expected byte.
_ENDING = 0.2
_PENDING = {errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}
# Seconds between the checks of a waiting thread on Windows: whether to continue, and signals.
SLICE = 0.1

# Python's texts for Winsock errors, which strerror does not know.
_TEXTS: Mapping[int, str] = getattr(socket, "errorTab", {})
# Winsock does not wake a thread that waits for bytes when another thread shuts the connection down.
_SHUT_WAKES = os.name != "nt"

_Result = TypeVar("_Result")

_of_thread = threading.local()


def _exchange() -> Exchange | None:
    """Return this thread's current exchange, or None."""
    exchange: Exchange | None = getattr(_of_thread, "exchange", None)
    return exchange


def _is_foreign(record: logging.LogRecord) -> bool:
    """Filter urllib3's log records of our requests: they contain URLs with queries, which may be secret."""
    return _exchange() is None


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_name).addFilter(_is_foreign)


# ---- abortable sockets ----


class _Line:
    """A second descriptor of a connected socket: it can shut the connection down in any state."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected.dup()
        # Not by __del__: in a reference cycle the socket may be finalized first, and warn.
        weakref.finalize(self, self._socket.close).atexit = False

    def shut(self) -> None:
        """End all reads and writes of the connection, in all threads; a `SlicedSocket` ends by itself."""
        with suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)


class SlicedSocket(socket.socket):
    """A socket that waits in short slices, for Windows: its reads end with `stop.current` and Ctrl-C."""

    def recv(self, *arguments: Any) -> bytes:
        return _in_slices(self, super().recv, *arguments)

    def recv_into(self, *arguments: Any) -> int:
        return _in_slices(self, super().recv_into, *arguments)


class SlicedTlsSocket(SlicedSocket, ssl.SSLSocket):
    """A `SlicedSocket` for TLS, including the handshake. OpenSSL keeps a partial record between slices."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            _in_slices(self, super().do_handshake, block)
        except (Stopped, KeyboardInterrupt):  # `ssl` closes the socket only after other errors
            self.close()
            raise


def _in_slices(waiting: socket.socket, call: Callable[..., _Result], *arguments: Any) -> _Result:
    """Repeat a blocking call with short timeouts until the socket's own timeout has passed."""
    timeout = waiting.gettimeout()
    if timeout == 0:  # it never waits
        return call(*arguments)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    try:
        while (left := deadline - time.monotonic()) > 0:
            waiting.settimeout(min(SLICE, left))
            # TLS raises SSLWantReadError if the wait ends at exactly the deadline.
            with suppress(TimeoutError, ssl.SSLWantReadError):
                return call(*arguments)
            current().check()
        raise TimeoutError("timed out")
    finally:
        waiting.settimeout(timeout)


def _connect(host: str, port: int, timeout: float, options: Any) -> socket.socket:
    """Connect to a host, trying its addresses in order."""
    connected = dialing.take(host, port, timeout, options)
    if connected is not None:
        return connected
    failure = OSError(errno.EADDRNOTAVAIL, "the host has no address")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    for family, kind, protocol, _, address in addresses:
        current().check()
        connecting = None
        try:
            connecting = (socket.socket if _SHUT_WAKES else SlicedSocket)(family, kind, protocol)
            for option in options:
                connecting.setsockopt(*option)
            connecting.setblocking(False)
            code = connecting.connect_ex(address)
            if code in _PENDING:
                code = _wait_connected(connecting, timeout)
            if code:
                raise OSError(code, _TEXTS.get(code, "").rstrip(".") or os.strerror(code))
            connecting.settimeout(timeout)
        except BaseException as error:
            if connecting is not None:
                connecting.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return connecting
    try:
        raise failure
    finally:
        del failure  # it refers to this frame


def _wait_connected(connecting: socket.socket, timeout: float) -> int:
    """Wait until a connect has finished, and return its error code, or 0."""
    deadline = time.monotonic() + timeout
    while not wait_for_write(connecting, max(0.0, min(SLICE, deadline - time.monotonic()))):
        current().check()
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout:g} s")
    return connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


# ---- urllib3's classes, made to report to the exchange ----


class _Body(Response):
    """A response registered as the body of its thread's exchange."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange = _exchange()
        if exchange is not None:
            self.tls = exchange.tls
            exchange.body = self


class _Abortable:
    """Mixin: register the connection's socket with the current `Exchange`, so that `abort` can shut it down."""

    response_class = _Body
    _line: _Line | None = None

    def _new_conn(self: Any) -> socket.socket:
        connected = _connect(getattr(self, "_dns_host", self.host), self.port, self.timeout, self.socket_options or ())
        self._line = _Line(connected)
        self._attach()
        followed: Callable[[], None] | None = _of_thread.__dict__.pop("followed", None)
        if followed is not None:
            followed()
        return connected

    def _attach(self) -> None:
        exchange = _exchange()
        if exchange is not None and self._line is not None:
            exchange.attach(self._line)

    def request(self, *arguments: Any, **options: Any) -> Any:
        self._attach()
        return super().request(*arguments, **options)  # type: ignore[misc]

    def getresponse(self: Any) -> Any:
        if self.sock is None:  # urllib3 ignores a reset while the request is sent, but has closed the connection
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return super().getresponse()  # type: ignore[misc]

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self._line = None


class _PlainConnection(_Abortable, HTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Abortable, HTTPSConnection):  # type: ignore[misc]
    pass


class _EarlyConnection:
    """A connection that is opened before there is a request for it."""

    unclaimed: ClassVar[weakref.WeakSet[_EarlyConnection]] = weakref.WeakSet()  # of all hosts

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._done = threading.Event()
        self._connection: Any = None
        self._claimed = False
        self.unclaimed.add(self)

    def open(self, connection: Any) -> None:
        """Connect, with the TLS handshake; in a thread that may be stopped."""
        exchange = Exchange()
        _of_thread.exchange = exchange
        try:
            with current().aborting(exchange.abort):
                connection.connect()
            with self._lock.own:
                if not self._claimed:
                    self._connection, connection = connection, None
        finally:
            _of_thread.exchange = None
            self._done.set()
            if connection is not None:
                connection.close()

    def claim(self, seconds: float = 0.0) -> Any:
        """Return the connection if it is open within this time, else None; it belongs to the caller."""
        self._done.wait(seconds)
        with self._lock.own:
            self._claimed = True
            connection, self._connection = self._connection, None
        self.unclaimed.discard(self)
        return connection


class _OpensAhead:
    """Mixin: a pool that can open connections before there are requests for them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._early: deque[_EarlyConnection] = deque()

    def _new_conn(self) -> Any:
        for early in _popped(self._early):
            connection = early.claim(_PATIENCE)
            if connection is None:
                break  # the rest may be as slow: later requests try them
            if _is_idle(connection.sock):
                return connection
            connection.close()
        return super()._new_conn()  # type: ignore[misc]

    def open_ahead(self) -> None:
        """Open a connection for a later request."""
        early = _EarlyConnection()
        self._early.append(early)
        try:
            early.open(super()._new_conn())  # type: ignore[misc]
        except BaseException:  # among them, the thread was stopped before the connection was listed
            with suppress(ValueError):
                self._early.remove(early)
            early.claim()
            raise

    def close_ahead(self) -> None:
        """Close the connections that no request has used."""
        for early in _popped(self._early):
            connection = early.claim()
            if connection is not None:
                connection.close()


def _popped(early: deque[_EarlyConnection]) -> Iterator[_EarlyConnection]:
    """Yield connections as they are removed, from any thread."""
    with suppress(IndexError):
        while True:
            yield early.popleft()


def _is_idle(connected: socket.socket) -> bool:
    """Return whether a connection is open and has received nothing but TLS session tickets."""
    timeout = connected.gettimeout()
    try:
        connected.settimeout(0)
        connected.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    finally:
        connected.settimeout(timeout)
    return False  # closed, or a server that speaks first


class _PlainPool(_OpensAhead, HTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _PlainConnection


class _TlsPool(_OpensAhead, HTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


# ---- requests ----


class Exchange:
    """A request and its response, in one thread; only `abort` may be called from other threads."""

    status: int
    headers: Mapping[str, str]  # names in any case

    def __init__(self) -> None:
        self.body: _Body | None = None  # of the response, or of the proxy's response before it
        self.tls = False  # whether bytes arrive in TLS records
        self._response: Any = None
        self._line: _Line | None = None
        self._aborted = False

    def attach(self, line: _Line) -> None:
        """Note the connection in use."""
        self._line = line
        if self._aborted:
            line.shut()

    def abort(self) -> None:
        """Make the exchange fail; called from another thread."""
        self._aborted = True
        if self._line is not None:
            self._line.shut()

    def begin(self, manager: Any, url: WebUrl, headers: Mapping[str, str], timeout: Any) -> None:
        """Send the request and read the head of the response."""
        self.tls = url.scheme == "https"
        _of_thread.exchange = self
        try:
            self._response = manager.urlopen(
                "GET", url.text, headers=dict(headers), timeout=timeout, retries=False, redirect=False,
                preload_content=False, decode_content=False,
            )  # fmt: skip
        finally:
            _of_thread.exchange = None
        self.status, self.headers = self._response.status, self._response.headers

    def receive(self, memory: memoryview) -> int:
        """Fill the beginning of memory with arrived bytes of the body; return their number, 0 at the end."""
        assert self.body is not None
        return self.body.receive(memory)

    def finish(self) -> None:
        """Read the end of a body without a length; if the end does not come, only the connection is lost."""
        body = self.body
        if body is None or body.isclosed():
            return
        try:
            with body.hurried(_ENDING):
                count = body.receive(memoryview(bytearray(1)))
        except BadResponse:
            raise
        except (OSError, http.client.HTTPException):
            current().check()
            return
        if count:
            raise BadResponse("the response has more bytes than its range")

    def drain(self) -> None:
        """Read a short, unused body to make the connection reusable; errors only prevent reuse."""
        if self.body is None or (self.body.length or 0) > _DRAINED:
            return
        memory, deadline = memoryview(bytearray(_DRAINED)), time.monotonic() + _DRAINING
        try:
            with self.body.hurried(_DRAINING):
                while memory and time.monotonic() < deadline and (count := self.body.receive(memory)):
                    memory = memory[count:]
        except (OSError, http.client.HTTPException):
            current().check()

    def end(self) -> None:
        """Return the connection to its pool, or close it if part of the body is unread."""
        response, self._response = self._response, None
        if response is not None:
            if self.body is None or not self.body.isclosed() or self._aborted:
                response.close()
            response.release_conn()


class _Scope:
    """A user of connections while it opens files."""


class Connections:
    """The connections shared by all files opened with the same options. Safe to use from any thread."""

    def __init__(self, make_context: Callable[[], ssl.SSLContext], timeout: float, connect_timeout: float) -> None:
        self._make_context = make_context
        self._context: ssl.SSLContext | None = None
        self._timeout = urllib3.Timeout(connect=connect_timeout, read=timeout)
        # By process, scheme and proxy: a fork copies the parent's sockets, and locks in whatever state they are.
        self._managers: dict[tuple[int, str, str | None], Any] = {}
        self._proxies: dict[tuple[str, str], str | None] = {}
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = ProcessLock()
        self._scopes: dict[int, int] = {}  # how often `kept` is active, by process
        self._ahead: list[tuple[int, Callable[[], None], Callable[[], None]]] = []  # process, stop, close
        weakref.finalize(self, _close, self._managers)

    @contextmanager
    def exchange(self, url: WebUrl, headers: Mapping[str, str]) -> Iterator[Exchange]:
        """Send a request and yield the exchange once the head of the response has been read."""
        exchange = Exchange()
        with current().aborting(exchange.abort):
            try:
                exchange.begin(self._manager(url), url, headers, self._timeout)
                if self._ahead and exchange.body is not None and exchange.body.will_close:
                    self._end_ahead()  # the server may have a single thread, which an idle connection would hold up
                yield exchange
            finally:
                exchange.end()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep idle connections while the block opens one file after another, and let `ahead` open more."""
        scope, process = _Scope(), os.getpid()
        self.join(scope)
        with self._lock.own:
            self._scopes[process] = self._scopes.get(process, 0) + 1
        try:
            yield
        finally:
            with self._lock.own:
                self._scopes[process] -= 1
            if not self._scopes[process]:
                self._end_ahead()
            self.leave(scope)

    @contextmanager
    def followed(self, url: WebUrl) -> Iterator[None]:
        """Call `ahead` once the block has connected to the host, so that its request is the first to be served."""
        _of_thread.followed = partial(self.ahead, url)
        try:
            yield
        finally:
            _of_thread.__dict__.pop("followed", None)

    def ahead(self, url: WebUrl) -> None:
        """Begin to open connections to a host, before an answer that leads to several requests.

        Only inside `kept`, which closes unused connections. A proxy gets none: it may allow few.
        """
        if not self._scopes.get(os.getpid()) or self._proxy_of(url) is not None:
            return

        count = min(_AHEAD, _MOST_AHEAD - len(_EarlyConnection.unclaimed))
        if count <= 0:
            return

        def open_one() -> None:
            self._manager(url).connection_from_url(url.text).open_ahead()

        def close() -> None:
            manager = self._managers.get((os.getpid(), url.scheme, None))
            if manager is not None:
                manager.connection_from_url(url.text).close_ahead()

        def close_later() -> None:
            while True:
                current().sleep(_IMPATIENCE)
                close()

        self._ahead.append((os.getpid(), begin([*[open_one] * count, close_later]), close))

    def _end_ahead(self) -> None:
        with suppress(IndexError):
            while True:
                process, stop, close = self._ahead.pop()
                if process == os.getpid():
                    stop()
                    close()

    def _manager(self, url: WebUrl) -> Any:
        key = os.getpid(), url.scheme, self._proxy_of(url)
        manager = self._managers.get(key)
        if manager is None:
            with self._lock.own:  # reading certificates is slow
                manager = self._managers.get(key)
                if manager is None:
                    manager = self._managers[key] = self._make(*key[1:])
        return manager

    def _proxy_of(self, url: WebUrl) -> str | None:
        key = url.scheme, url.place
        if key not in self._proxies:  # asking the system can be slow
            self._proxies[key] = _proxy_of(*key)
        return self._proxies[key]

    def _make(self, scheme: str, proxy: str | None) -> Any:
        options: dict[str, Any] = {"maxsize": _IDLE, "timeout": self._timeout}
        via, credentials = (None, None) if proxy is None else _parsed_proxy(proxy)
        if scheme == "https" or (via is not None and via.scheme == "https"):
            context = self._context = self._context or self._make_context()
            if not _SHUT_WAKES and context.sslsocket_class is ssl.SSLSocket:
                context.sslsocket_class = SlicedTlsSocket
            verified = "CERT_NONE" if context.verify_mode == ssl.CERT_NONE else "CERT_REQUIRED"
            options.update(ssl_context=context, cert_reqs=verified)
        if via is None:
            manager = urllib3.PoolManager(**options)
        else:
            if credentials is not None:
                options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=":".join(credentials))
            options["proxy_ssl_context"] = options.get("ssl_context")
            manager = urllib3.ProxyManager(f"{via.scheme}://{via.place}", **options)
        manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _TlsPool}
        return manager

    def join(self, user: object) -> None:
        """Register an open file."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Unregister a file; close all idle connections after the last file."""
        self._users.discard(user)
        if not self._users:
            _close(self._managers)


def _close(managers: dict[tuple[int, str, str | None], Any]) -> None:
    """Close this process's connections."""
    for key in [key for key in managers if key[0] == os.getpid()]:
        manager = managers.pop(key, None)
        if manager is not None:
            manager.clear()


def _proxy_of(scheme: str, place: str) -> str | None:
    """Return the proxy for a host, from the environment or the system."""
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or proxy_bypass(place):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _parsed_proxy(proxy: str) -> tuple[WebUrl, tuple[str, str] | None]:
    """Parse the URL of a proxy. On Windows its user may contain a backslash, after a domain."""
    url = divided(proxy.replace("\\", "%5C"))
    if url.scheme not in ("http", "https"):
        raise UnsupportedError(f"proxies must use http or https, got {url.scheme or 'no scheme'}")
    try:
        return web_url(url)
    except UrlError as error:
        raise UnsupportedError(f"the proxy {url.shown} cannot be used: {error}") from None
