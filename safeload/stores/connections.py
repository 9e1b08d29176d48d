"""Connections over HTTP, pooled by urllib3, that another thread can end: in connect, in a handshake, in a read."""

from __future__ import annotations

import errno
import http.client
import logging
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.request import getproxies, proxy_bypass

from ..base.url import UrlError, WebUrl, divided, web_url
from ..errors import UnsupportedError
from .http_framing import BadAnswer, Response
from .sliced_sockets import SLICE, SlicedSocket, SlicedTlsSocket
from .stop import current

try:
    import urllib3
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.util.wait import wait_for_write
except ImportError as error:
    if error.name != "urllib3":  # it is there, but broken
        raise
    raise ModuleNotFoundError(
        "reading https needs urllib3, which is not installed: pip install urllib3", name="urllib3"
    ) from None

# Idle connections kept for each host: as many as there are requests in flight, while headers are read.
_IDLE = 32
# A body that is of no use is read, so that its connection can be used again, if it has at most this many bytes.
_DRAINED = 16 << 10
# Seconds after which a body is not worth its connection.
_DRAINING = 1.0
# Seconds to wait for the end of a body whose bytes have all arrived.
_ENDING = 0.2
_PENDING = {errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}

# Python's text for an error of Winsock, of which strerror knows none.
_TEXTS: Mapping[int, str] = getattr(socket, "errorTab", {})
# Winsock does not wake a thread that waits for bytes when another one shuts the connection.
_SHUT_WAKES = os.name != "nt"

_of_thread = threading.local()


def _exchange() -> Exchange | None:
    """What this thread has in progress."""
    found: Exchange | None = getattr(_of_thread, "exchange", None)
    return found


def _is_of_others(record: logging.LogRecord) -> bool:
    """A filter: urllib3 logs URLs with their queries, which may be secret."""
    return _exchange() is None


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_name).addFilter(_is_of_others)


class _Line:
    """A second descriptor of a connected socket, to end it by: wherever the first one is, in whatever state."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected.dup()
        # Not by __del__: in a circle of references the socket may be finalized before it, and warn.
        weakref.finalize(self, self._socket.close).atexit = False

    def shut(self) -> None:
        """Ends all reads and writes of the connection, in whatever threads they wait; `SlicedSocket` needs none."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)


class _Body(Response):
    """An answer that tells the exchange of its thread where its body is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange = _exchange()
        if exchange is not None:
            self.tls = exchange.tls
            exchange.body = self


class _Ended:
    """A connection that a thread can be told of."""

    response_class = _Body
    _line: _Line | None = None

    def _new_conn(self: Any) -> socket.socket:
        connected = _connect(getattr(self, "_dns_host", self.host), self.port, self.timeout, self.socket_options or ())
        self._line = _Line(connected)
        self._tell()
        return connected

    def _tell(self) -> None:
        exchange = _exchange()
        if exchange is not None and self._line is not None:
            exchange.attach(self._line)

    def request(self, *arguments: Any, **options: Any) -> Any:
        self._tell()
        return super().request(*arguments, **options)  # type: ignore[misc]

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self._line = None


class _PlainConnection(_Ended, HTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Ended, HTTPSConnection):  # type: ignore[misc]
    pass


class _PlainPool(HTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _PlainConnection


class _TlsPool(HTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


def _connect(host: str, port: int, timeout: float, options: Any) -> socket.socket:
    """A socket connected to the first address of a host that takes it."""
    failure = OSError(errno.EADDRNOTAVAIL, "the host has no address")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    for family, kind, protocol, _, address in found:
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
        del failure  # which refers to this frame


def _wait_connected(connecting: socket.socket, timeout: float) -> int:
    """Waits for the end of a connect. Returns its error, 0 if there is none."""
    until = time.monotonic() + timeout
    while not wait_for_write(connecting, max(0.0, min(SLICE, until - time.monotonic()))):
        current().check()
        if time.monotonic() >= until:
            raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout:g} s")
    return connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


class Exchange:
    """A request and its answer, in one thread; only `abort` may be called in others.

    Attributes:
        status: of the answer.
        headers: of the answer, by name in any case.
        body: of the answer, or of the proxy's before it.
        tls: whether the bytes come in records of TLS.
    """

    status: int
    headers: Mapping[str, str]

    def __init__(self) -> None:
        self.body: _Body | None = None
        self.tls = False
        self._response: Any = None
        self._line: _Line | None = None
        self._aborted = False

    def attach(self, line: _Line) -> None:
        """Says which connection is used."""
        self._line = line
        if self._aborted:
            line.shut()

    def abort(self) -> None:
        """Makes the exchange fail, in another thread."""
        self._aborted = True
        if self._line is not None:
            self._line.shut()

    def begin(self, manager: Any, url: WebUrl, headers: Mapping[str, str], timeout: Any) -> None:
        """Sends the request, and reads the head of the answer."""
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
        """Fills the beginning of memory with what has arrived of the body. Returns its size, 0 at the end."""
        assert self.body is not None
        return self.body.receive(memory)

    def finish(self) -> None:
        """Read the end of a body without a length behind its range; a missing end only costs the connection.

        Raises:
            BadAnswer: the body has more bytes than the range.
        """
        body = self.body
        if body is None or body.isclosed():
            return
        try:
            with body.hurried(_ENDING):
                count = body.receive(memoryview(bytearray(1)))
        except BadAnswer:
            raise
        except (OSError, http.client.HTTPException):
            current().check()
            return
        if count:
            raise BadAnswer("the answer has more bytes than its range")

    def drain(self) -> None:
        """Read a short, unused body so that the connection can be reused. Errors only prevent that."""
        if self.body is None or (self.body.length or 0) > _DRAINED:
            return
        memory, until = memoryview(bytearray(_DRAINED)), time.monotonic() + _DRAINING
        try:
            while memory and time.monotonic() < until and (count := self.body.receive(memory)):
                memory = memory[count:]
        except (OSError, http.client.HTTPException):
            current().check()

    def end(self) -> None:
        """Gives the connection back; closes it if the body was not read to its end."""
        response, self._response = self._response, None
        if response is not None:
            if self.body is None or not self.body.isclosed() or self._aborted:
                response.close()
            response.release_conn()


class Connections:
    """The connections of all files that are opened with the same options. Any thread may use it.

    Args:
        context: makes that for TLS, when it is first needed: to read the system's certificates takes long.
        timeout: seconds without a byte after which an answer is given up.
        connect_timeout: seconds after which a connect is.
    """

    def __init__(self, context: Callable[[], ssl.SSLContext], timeout: float, connect_timeout: float) -> None:
        self._make_context = context
        self._context: ssl.SSLContext | None = None
        self._timeout = urllib3.Timeout(connect=connect_timeout, read=timeout)
        # By process, scheme and proxy: the sockets that a fork copies are the parent's, and so are locks that are held.
        self._managers: dict[tuple[int, str, str | None], Any] = {}
        self._proxies: dict[tuple[str, str], str | None] = {}
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, _close, self._managers)

    @contextmanager
    def exchange(self, url: WebUrl, headers: Mapping[str, str]) -> Iterator[Exchange]:
        """Sends a request; gives its answer, of which only the head has been read."""
        exchange = Exchange()
        with current().aborting(exchange.abort):
            try:
                exchange.begin(self._manager(url), url, headers, self._timeout)
                yield exchange
            finally:
                exchange.end()

    def _manager(self, url: WebUrl) -> Any:
        key = os.getpid(), url.scheme, self._proxy_of(url)
        found = self._managers.get(key)
        if found is None:
            found = self._managers.setdefault(key, self._make(*key[1:]))
        return found

    def _proxy_of(self, url: WebUrl) -> str | None:
        key = url.scheme, url.place
        if key not in self._proxies:  # to ask the system may take long
            self._proxies[key] = _proxy_of(*key)
        return self._proxies[key]

    def _make(self, scheme: str, proxy: str | None) -> Any:
        options: dict[str, Any] = {"maxsize": _IDLE}
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
        """Says that a file is open."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Says that a file is closed; with the last one, connections that are not in use are closed."""
        self._users.discard(user)
        if not self._users:
            _close(self._managers)


def _close(managers: dict[tuple[int, str, str | None], Any]) -> None:
    """Closes the connections of this process."""
    for key in [key for key in managers if key[0] == os.getpid()]:
        manager = managers.pop(key, None)
        if manager is not None:
            manager.clear()


def _proxy_of(scheme: str, place: str) -> str | None:
    """The proxy that the environment, or the system, has for a host."""
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or proxy_bypass(place):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _parsed_proxy(proxy: str) -> tuple[WebUrl, tuple[str, str] | None]:
    """Divide the URL of a proxy, whose user may have a backslash: Windows has domains before it."""
    url = divided(proxy.replace("\\", "%5C"))
    if url.scheme not in ("http", "https"):
        raise UnsupportedError(f"a proxy by {url.scheme or 'no scheme'} is not supported: only by http and https")
    try:
        return web_url(url)
    except UrlError as error:
        raise UnsupportedError(f"the proxy {url.shown} cannot be used: {error}") from None
