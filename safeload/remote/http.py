"""Files behind https and http URLs, over urllib3: sockets, failures and retries, clients, and reads by ranges.

Sockets stop waiting when their call ends: a wait is divided into short slices, between which it looks whether its call
continues. That works for connects, handshakes, heads and bodies alike, and on Windows, where neither a shutdown nor
Ctrl-C wakes a waiting thread.
"""

from __future__ import annotations

import base64
import email.errors
import errno
import http.client
import logging
import math
import os
import random
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.wait import wait_for_write

from .._version import __version__
from ..core.files import WINDOW, Span, compare
from ..core.forking import ProcessLock, making_context
from ..core.text import debug, needed, show
from ..core.thread_group import Stopped, current
from ..errors import RemoteError, RemotePermissionError, RemoteTimeoutError, UnsupportedError, missing_file
from . import url as urls
from .foreign import is_weak, requested_wait
from .remote_store import Backend, RemoteStore

# ---- sockets ----

# Seconds between the checks of a waiting thread: whether to continue, and signals.
SLICE = 0.1
# Bytes that a server may send before the body of a response: endless "100 Continue" and header fields end here.
_HEAD = 256 << 10
_PENDING = {errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}
# Python's texts for Winsock errors, which strerror does not know.
_TEXTS: dict[int, str] = getattr(socket, "errorTab", {})
# Python stops reading header fields at a malformed line, and reports it only by these defects.
_LOST = (email.errors.MissingHeaderBodySeparatorDefect, email.errors.FirstHeaderLineIsContinuationDefect)
# Bytes of a body received at once, and over TLS, where an error loses no more.
_PIECE, _RECORDS = 512 << 10, 128 << 10
# What a server may send for each byte of a body, and beside it: sizes of chunks, and trailers.
_PER_BYTE, _BESIDE = 8, 1 << 20
# An unused body of at most this size is read to make its connection reusable, for at most this many seconds.
_DRAINED, _DRAINING = 16 << 10, 1.0
# Seconds to wait for the end of a body after its last expected byte.
_ENDING = 0.2
# Maximum number of characters of a header in a message.
_SHOWN = 40

# Exceptions of requests.
TRANSPORT_ERRORS = (OSError, urllib3.exceptions.HTTPError, http.client.HTTPException)

_Result = TypeVar("_Result")


class BadResponse(http.client.HTTPException):
    """A response that breaks HTTP's framing rules. The message never quotes a header that may echo a secret."""


class _Sliced:
    """Mixin: a socket that waits in slices, and receives at most `left` bytes."""

    left = math.inf
    _limit: float | None = None  # seconds that a wait may take

    def settimeout(self: Any, value: float | None) -> None:
        self._limit = value
        super().settimeout(SLICE if value is None or value > SLICE else value)  # type: ignore[misc]

    def gettimeout(self) -> float | None:
        return self._limit

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def recv(self, *arguments: Any) -> bytes:
        data: bytes = self._in_slices(super().recv, *arguments)  # type: ignore[misc]
        self._count(len(data))
        return data

    def recv_into(self, *arguments: Any) -> int:
        count: int = self._in_slices(super().recv_into, *arguments)  # type: ignore[misc]
        self._count(count)
        return count

    def sendall(self: Any, *arguments: Any) -> None:
        super().settimeout(self._limit)  # type: ignore[misc]
        try:
            super().sendall(*arguments)  # type: ignore[misc]
        finally:
            self.settimeout(self._limit)

    def _count(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise BadResponse("the server sends more bytes than the response can have")

    def _in_slices(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Repeat a call that ends after a slice until the socket's own timeout has passed."""
        limit, begun = self._limit, time.monotonic()
        while limit != 0:
            with suppress(TimeoutError, ssl.SSLWantReadError):  # TLS raises the second at exactly the deadline
                return call(*arguments)
            current().check()
            if limit is not None and time.monotonic() - begun >= limit:
                raise TimeoutError("timed out")
        return call(*arguments)


class SlicedSocket(_Sliced, socket.socket):
    """A socket that waits in slices."""


class SlicedTlsSocket(_Sliced, ssl.SSLSocket):
    """A socket for TLS that waits in slices, also for the handshake; OpenSSL keeps a partial record between them."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            self._in_slices(super().do_handshake, block)
        except (Stopped, KeyboardInterrupt):  # `ssl` closes the socket only after other errors
            self.close()
            raise


def connect(host: str, port: int, timeout: float, options: Any) -> socket.socket:
    """Connect to a host, trying its addresses in order."""
    failure = [OSError(errno.EADDRNOTAVAIL, "the host has no address")]
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(errno.EINVAL, "not a host name") from None
    for family, kind, protocol, _, address in addresses:
        connecting = SlicedSocket(family, kind, protocol)
        try:
            for option in options:
                connecting.setsockopt(*option)
            connecting.setblocking(False)
            code, deadline = connecting.connect_ex(address), time.monotonic() + timeout
            if code in _PENDING:
                while not wait_for_write(connecting, max(0.0, min(SLICE, deadline - time.monotonic()))):
                    current().check()
                    if time.monotonic() >= deadline:
                        raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout:g} s")
                code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, _TEXTS.get(code, "").rstrip(".") or os.strerror(code))
            connecting.settimeout(timeout)
            return connecting
        except BaseException as error:
            connecting.close()
            if not isinstance(error, OSError):
                raise
            failure[0] = error
    raise failure.pop()  # which refers to this frame


class Exchange(http.client.HTTPResponse):
    """A response with a head that leaves no doubt about the end of the body, while its body is received."""

    wire: Any  # its socket
    headers: Any
    broken = False  # the connection cannot be used again, though http.client takes the body for ended

    def _read_status(self) -> Any:
        """Skip 1xx responses, which a server may send unasked before the final response (RFC 9110, 15.2)."""
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not http.client.CONTINUE < status < http.client.OK:  # http.client skips 100
                return version, status, reason
            if status == http.client.SWITCHING_PROTOCOLS:
                raise BadResponse("the server switched protocols (101) without being asked to")
            http.client.parse_headers(self.fp)

    def begin(self) -> None:
        super().begin()
        if self.status in (http.client.NO_CONTENT, http.client.NOT_MODIFIED):  # no body, whatever the fields say
            return
        codings, lengths = self.headers.get_all("Transfer-Encoding", []), self.headers.get_all("Content-Length", [])
        if any(isinstance(defect, _LOST) for defect in self.headers.defects):
            raise BadResponse("the head of the response has a line that is not a header field")
        if codings and [coding.strip(" \t").lower() for coding in codings] != ["chunked"]:
            raise BadResponse("the response has a Transfer-Encoding other than chunked")
        if codings and lengths:
            raise BadResponse("the response has both Transfer-Encoding and Content-Length")
        if codings:  # http.client compares it with white space
            self.chunked, self.chunk_left, self.length = True, None, None
        length = lengths[0].strip(" \t") if lengths else "0"
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]+", length):
            raise BadResponse("the Content-Length of the response is not a single number")
        if len(length) > 18:
            digits = f"{length[:_SHOWN]}..." if len(length) > _SHOWN else length
            raise BadResponse(f"the Content-Length of the response is {digits}, more than 18 digits")

    def receive(self, memory: memoryview) -> int:
        """Fill the beginning of memory with bytes of the body, without a copy; return their number, 0 at the end."""
        try:
            return self._receive(memory)
        except BaseException:
            self.broken = True
            raise

    def _receive(self, memory: memoryview) -> int:
        memory = memory[:_PIECE]
        self.wire.left = _PER_BYTE * len(memory) + _BESIDE
        if self.fp is None:
            return 0
        if self.chunked:
            data = self.read1(len(memory))
            if len(data) > len(memory):
                raise BadResponse("a chunk of the response has no size")
            memory[: len(data)] = data
            return len(data)
        memory = memory if self.length is None else memory[: self.length]
        # TLS has records of 16 KiB, which C collects faster; without it, an error loses no byte.
        tls = isinstance(self.wire, ssl.SSLSocket)
        count: int = self.fp.readinto(memory[:_RECORDS]) if tls else self.fp.readinto1(memory)
        if self.length is not None:
            self.length -= count
            if not self.length:
                self.close()
        return count

    def finish(self) -> None:
        """Read the end of a body after its last expected byte; one that does not come only costs the connection."""
        with suppress(TimeoutError):
            if self._rest(1, _ENDING):
                raise BadResponse("the response has more bytes than its range")

    def drain(self) -> None:
        """Read a short, unused body to make the connection reusable; errors only prevent reuse."""
        if (self.length or 0) <= _DRAINED:
            with suppress(*TRANSPORT_ERRORS):
                self._rest(_DRAINED, _DRAINING)

    def _rest(self, most: int, seconds: float) -> int:
        """Receive and discard a number of bytes, at most, for a number of seconds; return how many have come."""
        memory, deadline, timeout = memoryview(bytearray(most)), time.monotonic() + seconds, self.wire.gettimeout()
        with suppress(OSError):  # the connection may be closed
            self.wire.settimeout(min(seconds, timeout or seconds))
        try:
            while memory and time.monotonic() < deadline and (count := self.receive(memory)):
                memory = memory[count:]
        finally:
            with suppress(OSError):
                self.wire.settimeout(timeout)
        return most - len(memory)


class _Strict:
    """Mixin: a connection of urllib3 that checks heads, and limits their size."""

    response_class = Exchange

    def getresponse(self: Any) -> Any:
        wire = self.sock
        if wire is None:  # urllib3 ignores a reset while the request is sent, but has closed the connection
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        wire.left = _HEAD
        response = super().getresponse()  # type: ignore[misc]
        body = response._original_response
        # In these headers equal fields are joined, so that none is overlooked.
        body.wire, body.headers = wire, response.headers
        return response


class _Connects:
    """Mixin: a connection of urllib3 over a sliced socket."""

    def _new_conn(self: Any) -> socket.socket:
        return connect(getattr(self, "_dns_host", self.host), self.port, self.timeout, self.socket_options or ())


def _pool(base: Any, *connection: Any) -> Any:
    """Return a pool of urllib3 with another class of connections."""
    return type(base.__name__, (base,), {"ConnectionCls": type(connection[-1].__name__, connection, {})})


POOLS = {
    "http": _pool(HTTPConnectionPool, _Strict, _Connects, HTTPConnection),
    "https": _pool(HTTPSConnectionPool, _Strict, _Connects, HTTPSConnection),
}


# ---- failures and retries ----

# Maximum number of consecutive retries of a range without progress.
RETRIES = 4
# Receiving this many bytes resets the count: a range of n MiB is requested at most n + RETRIES + 1 times.
PROGRESS = 1 << 20
# Upper bound of the first wait in seconds, which doubles with each retry up to the second number. The wait itself is
# random, so that refused clients do not all return at once.
_BACKOFF, _BACKOFF_MOST = 0.5, 10.0
# A server may ask for at most this many seconds of waiting.
RETRY_AFTER_MOST = 60
# Status codes of a busy or failing server.
_TRANSIENT = frozenset((408, 429, 500, 502, 503, 504))


class Failure(Exception):  # noqa: N818  callers see its error
    """A failed request. Its error is raised after the last try, unchained: the text of a cause may hold a secret."""

    # the requested URL, and the URL behind its redirects that was refused: another URL of the file may be accepted
    refused: tuple[urls.WebUrl, urls.WebUrl] | None = None

    def __init__(self, error: Exception, transient: bool = False, wait: float = 0.0) -> None:
        self.error = error
        self.transient = transient  # whether to retry
        self.wait = wait  # seconds requested by the server

    def noted(self, note: str) -> Failure:
        """Return the failure with a note at the end of its text."""
        text, *rest = self.error.args
        self.error.args = (f"{text}{note}", *rest)
        return self


def retried(
    attempt: Callable[[], _Result],
    retries: int,
    mended: Callable[[Failure], object],
    at: Callable[[], int] = lambda: 0,
) -> _Result:
    """Repeat an attempt at reading from byte ``at()`` on, while it fails for a `mended` (true) or transient reason."""
    begin, consecutive, total = at(), 0, 0
    while True:
        try:
            return attempt()
        except Failure as caught:
            failure = caught
        try:
            if mended(failure):
                continue
            if at() - begin >= PROGRESS:
                begin, consecutive = at(), 0
            consecutive, total = consecutive + 1, total + 1
            if not failure.transient or consecutive > retries:
                if total > 1:
                    failure.noted(f"; tried {total} times")
                raise failure.error
            longest = min(_BACKOFF_MOST, _BACKOFF * 2.0 ** (consecutive - 1))
            current().sleep(failure.wait + random.uniform(0, longest))
        finally:
            del failure  # its error refers to this frame


def of_status(exchange: Exchange, path: str) -> Failure:
    """Return the failure for the status code of a response."""
    status = exchange.status
    what = f"the server returned {status} {http.client.responses.get(status, '')}".rstrip()
    if status not in _TRANSIENT:
        return Failure(RemoteError(what, path))
    wait = requested_wait(exchange.headers, quota=status == http.client.TOO_MANY_REQUESTS)
    if wait > RETRY_AFTER_MOST:
        text = f"{what} and asks to wait {wait:.0f} s, which is more than the limit of {RETRY_AFTER_MOST} s"
        return Failure(RemoteError(text, path))
    return Failure((RemoteTimeoutError if status in (408, 504) else RemoteError)(what, path), True, wait)


def of_error(error: BaseException, path: str, timeout: float) -> Failure:
    """Return the failure for an exception; it is not chained, because urllib3's texts include URLs with queries."""
    proxy = "the proxy: " if isinstance(error, urllib3.exceptions.ProxyError) else ""
    while isinstance(error, urllib3.exceptions.HTTPError):  # around another exception
        inner = next((argument for argument in error.args if isinstance(argument, BaseException)), None)
        if inner is None:
            break
        error = inner
    name, kind, transient = type(error).__name__, RemoteError, True
    if isinstance(error, (TimeoutError, urllib3.exceptions.TimeoutError)):
        kind, what = RemoteTimeoutError, getattr(error, "strerror", None) or f"no byte for {timeout:g} s"
    elif isinstance(error, ssl.CertificateError) or name == "CertificateError":  # urllib3's, if it is for another host
        why = getattr(error, "verify_message", None) or "it is for another host"
        advice = "pass storage_options={'verify': PATH} to trust another certificate"
        what, transient = f"the server's certificate is not trusted: {why}; {advice}", False
    elif isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)):
        what = "the TLS connection was closed"
    elif isinstance(error, ssl.SSLError):
        what, transient = f"TLS failed: {getattr(error, 'reason', None) or 'no reason given'}", False
    elif isinstance(error, socket.gaierror):
        what, transient = f"the host name cannot be resolved: {error.strerror}", error.errno == socket.EAI_AGAIN
    elif isinstance(error, http.client.RemoteDisconnected):
        what = "the connection was closed without a response"
    elif isinstance(error, http.client.IncompleteRead):
        return broken_off(path)
    elif isinstance(error, BadResponse):
        what, transient = str(error), False
    elif isinstance(error, (http.client.HTTPException, urllib3.exceptions.ProtocolError)):
        what = "the response is not HTTP"
    elif isinstance(error, OSError) and (tunnel := re.match(r"Tunnel connection failed: ([0-9]{3})\b", str(error))):
        kind = RemotePermissionError if tunnel[1] == "407" else RemoteError
        what, transient = f"the proxy refused the connection: {tunnel[1]}", tunnel[1][0] == "5"
    elif isinstance(error, OSError):
        what = f"the connection failed: {error.strerror or name}"
    else:
        what, transient = f"the request failed: {name}", False
    return Failure(kind(f"{proxy}{what}", path), transient)


def broken_off(path: str) -> Failure:
    """Return the failure for an incomplete body."""
    return Failure(RemoteError("the connection broke off before the end of the response", path), True)


# ---- clients ----

# Seconds without a byte after which a request fails, and seconds after which a connect fails.
TIMEOUT, CONNECT_TIMEOUT = 30.0, 10.0

_KNOWN = ("connect_timeout", "headers", "retries", "ssl_context", "timeout", "verify")
# Idle connections kept per host: as many as there are requests in flight while headers are read.
_IDLE = 32
# Headers for the bytes of a range and their encoding, set by `HttpStore`.
_OWN_HEADERS = frozenset(("accept-encoding", "if-match", "if-range", "if-none-match", "range"))


class RequestTarget(NamedTuple):
    """The URL of a file and the headers to send there."""

    url: urls.WebUrl  # its query may be secret
    headers: Mapping[str, str]  # may be secret: they are sent to the origin of the URL only

    def __repr__(self) -> str:
        return f"<Target {self.url.shown}>"

    def headers_at(self, url: urls.WebUrl) -> dict[str, str]:
        """Return the headers of a request to a URL, which may be behind a redirect."""
        headers = dict(self.headers) if url.origin == self.url.origin else {}
        if "user-agent" not in map(str.lower, headers):
            headers["User-Agent"] = f"safeload/{__version__}"
        headers["Accept-Encoding"] = "identity"
        return headers


_of_thread = threading.local()


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    # These records of our requests contain URLs with queries, which may be secret.
    logging.getLogger(_name).addFilter(lambda record: not getattr(_of_thread, "ours", False))


class Client:
    """Connections, headers and limits shared by files opened with the same options, from any thread."""

    def __init__(
        self, options: Mapping[str, Any], scheme: str = "https", *, other_options: tuple[str, ...] = ()
    ) -> None:
        for key in options:
            if key not in _KNOWN:
                known = ", ".join(sorted((*_KNOWN, *other_options)))
                raise TypeError(f"{scheme}: unknown storage option {show(key)}, expected one of {known}")
        self.headers = checked_headers(options.get("headers") or {})
        self.timeout = _seconds(options, "timeout", TIMEOUT)
        self.retries = options.get("retries", RETRIES)
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise ValueError(f"retries must be >= 0, got {show(self.retries)}")
        connect_timeout = _seconds(options, "connect_timeout", CONNECT_TIMEOUT)
        self._timeout = urllib3.Timeout(connect=connect_timeout, read=self.timeout)
        context, verify = options.get("ssl_context"), options.get("verify", True)
        if context is not None and not isinstance(context, ssl.SSLContext):
            raise TypeError(f"ssl_context must be an ssl.SSLContext, got {type(context).__name__}")
        if context is not None and "verify" in options:
            raise TypeError("ssl_context and verify exclude each other: pass only one of them")
        if not isinstance(verify, (bool, str, os.PathLike)):
            raise TypeError(f"verify must be a bool or a path to certificates, got {show(verify)}")
        if not isinstance(verify, bool) and not os.path.exists(verify):
            raise FileNotFoundError(errno.ENOENT, "verify: no such certificate file or folder", os.fspath(verify))
        self._context: ssl.SSLContext | None = context
        self._verify = verify
        # By process, scheme and host: a fork copies the parent's sockets, and locks in whatever state they are.
        self._managers: dict[tuple[int, str, str], Any] = {}
        self._lock = ProcessLock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # open files
        weakref.finalize(self, _close, self._managers)

    @contextmanager
    def exchange(self, url: urls.WebUrl, headers: Mapping[str, str]) -> Iterator[Exchange]:
        """Send a request and yield the response once its head has been read."""
        key = os.getpid(), url.scheme, url.place
        manager = self._managers.get(key)
        if manager is None:
            with self._lock.own:  # reading certificates is slow, and so can be asking the system for proxies
                manager = self._managers.get(key) or self._managers.setdefault(key, self._make(url))
        _of_thread.ours = True
        try:
            response = manager.urlopen(
                "GET", url.text, headers=dict(headers), timeout=self._timeout, retries=False, redirect=False,
                preload_content=False, decode_content=False,
            )  # fmt: skip
        finally:
            _of_thread.ours = False
        try:
            yield response._original_response
        finally:
            if response._original_response.broken or not response.closed:  # a part of the body is unread
                response.close()
            response.release_conn()

    def leave(self, user: object = None) -> None:
        """Forget an open file, if it is one; close all idle connections unless other files are open."""
        if user is not None:
            self.users.discard(user)
        if not self.users:
            _close(self._managers)

    def _make(self, url: urls.WebUrl) -> Any:
        proxies, options = getproxies(), dict[str, Any](maxsize=_IDLE, timeout=self._timeout)
        proxy = proxies.get(url.scheme) or proxies.get("all") or ""
        proxy = "" if not proxy or proxy_bypass(url.place) else proxy if "://" in proxy else f"http://{proxy}"
        via: urls.WebUrl | None = None
        pools, is_socks = POOLS, proxy.startswith("socks")
        if proxy and not is_socks:
            # On Windows the user may contain a backslash, after a domain.
            place = urls.divided(proxy.replace("\\", "%5C"))
            if place.scheme not in ("http", "https"):
                raise UnsupportedError(f"proxies must use http, https or socks, got {place.scheme or 'no scheme'}")
            try:
                via, credentials = urls.web_url(place)
            except urls.UrlError as error:
                raise UnsupportedError(f"the proxy {place.shown} cannot be used: {error}") from None
        if url.scheme == "https" or (via is not None and via.scheme == "https"):
            context = self._context = self._context or _context(self._verify)
            if context.sslsocket_class is ssl.SSLSocket:  # otherwise the caller's class is kept
                context.sslsocket_class = SlicedTlsSocket
            options["ssl_context"] = context
            options["cert_reqs"] = "CERT_NONE" if context.verify_mode == ssl.CERT_NONE else "CERT_REQUIRED"
        if is_socks:
            needed("socks", "SOCKS proxies need PySocks", "pysocks")  # without which urllib3 would warn too
            from urllib3.contrib import socks

            pools = {  # whose connects do not wait in slices
                "http": _pool(socks.SOCKSHTTPConnectionPool, _Strict, socks.SOCKSConnection),
                "https": _pool(socks.SOCKSHTTPSConnectionPool, _Strict, socks.SOCKSHTTPSConnection),
            }
            manager: Any = socks.SOCKSProxyManager(proxy, **options)
        elif via is None:
            manager = urllib3.PoolManager(**options)
        else:
            if credentials is not None:
                options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=":".join(credentials))
            options["proxy_ssl_context"] = options.get("ssl_context")
            manager = urllib3.ProxyManager(f"{via.scheme}://{via.place}", **options)
        manager.pool_classes_by_scheme = pools
        return manager


def _close(managers: dict[tuple[int, str, str], Any]) -> None:
    for key in [key for key in managers if key[0] == os.getpid()]:
        manager = managers.pop(key, None)
        if manager is not None:
            manager.clear()


def checked_headers(headers: Any) -> dict[str, str]:
    """Validate the caller's headers; no message contains a value."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a mapping, got {type(headers).__name__}")
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError("headers must map str to str")
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError("headers: a name contains characters not allowed in header names")
        if not all(" " <= char <= "\xff" or char == "\t" for char in value) or "\x7f" in value:
            raise ValueError(f"headers: the value of {name} contains a character that is not allowed in headers")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"headers: {name} is set by safeload itself")
        checked[name] = value
    return checked


def _seconds(options: Mapping[str, Any], key: str, default: float) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a number of seconds > 0, got {show(value)}")
    return float(value)


def _context(verify: bool | str | os.PathLike[str]) -> ssl.SSLContext:
    if verify is True:
        return _system_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    path = os.fspath(verify) if verify else None
    folder = path if path and os.path.isdir(path) else None
    with making_context:
        context = ssl.create_default_context(cafile=None if folder else path, capath=folder)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@lru_cache(maxsize=2)
def _system_context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Create a context with the system's certificates; cached, because they take long to read."""
    with making_context:
        return ssl.create_default_context()


def target_of(url: str, headers: Mapping[str, str]) -> RequestTarget:
    """Return the target of a URL; its user and password become a header."""
    try:
        web, credentials = urls.web_url(urls.divided(url))
    except urls.UrlError as error:
        raise RemoteError(f"this URL cannot be opened: {error}", urls.shown(url)) from None
    if credentials is None:
        return RequestTarget(web, headers)
    secret = base64.b64encode(":".join(credentials).encode("utf-8", "surrogateescape")).decode("ascii")
    rest = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    return RequestTarget(web, {**rest, "Authorization": f"Basic {secret}"})


# ---- files ----

# Maximum number of redirects per request.
MOST_REDIRECTS = 10
# A server without range support returns whole files: files up to this size are kept in memory.
WHOLE = 16 << 20

# States the commit of a branch or tag, also in a redirect.
_COMMIT = "X-Repo-Commit"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
# A signature or a redirect may have expired: each store has another status for that. 407 is the proxy's.
_REFUSED = frozenset(range(400, 500)) - {407}
# The end of a message if access is refused.
_ADVICE = (
    "a token may be missing or wrong (storage_options={'headers': {'Authorization': ...}}), or a signed URL has expired"
)
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)")
# Bytes between two spans are received and discarded in pieces of this size.
_SCRATCH = 64 << 10
# Bytes of a whole file received at once.
_WHOLE_PIECE = 256 << 10


class Web(Backend):
    """Files behind https and http URLs."""

    no_folders = "https has no folders: open an index (model.safetensors.index.json), one file, or a list of URLs"
    read_only = "https is read-only: write to a local folder, s3, gs or az"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._client = Client(options)

    def open(self, url: str, window: int = WINDOW) -> HttpStore:
        """Open a file. The user and password of a URL are sent only to its host."""
        return HttpStore(urls.shown(url), lambda: target_of(url, self._client.headers), self._client, window)


class _Transfer:
    """The state of a read: the missing bytes, and the memory for them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._k = 0
        self._scratch = memoryview(b"")
        self.at, self.end = spans[0].offset, spans[-1].end  # the range of missing bytes

    def memory(self) -> memoryview:
        while self.at >= self._spans[self._k].end:
            self._k += 1
        span = self._spans[self._k]
        if self.at >= span.offset:
            return span.memory[self.at - span.offset :]
        self._scratch = self._scratch or memoryview(bytearray(_SCRATCH))
        return self._scratch[: span.offset - self.at]

    def receive(self, exchange: Exchange, path: str) -> None:
        """Receive the whole body of a response."""
        begin = self.at
        with current().filling():
            while self.at < self.end:
                count = exchange.receive(self.memory())
                if not count:
                    raise broken_off(path)
                self.at += count
        try:
            exchange.finish()
        except TRANSPORT_ERRORS:  # chunks with a wrong size: no byte of the response is certain
            self.at, self._k = begin, 0
            raise


@contextmanager
def _answered(
    client: Client,
    target: RequestTarget,
    url: urls.WebUrl,
    path: str,
    commits: set[str],  # gets those that the host of the target states
    *,
    what: str = "",  # for the log
    more: Callable[[urls.WebUrl], Mapping[str, str]] = lambda url: {},  # returns further headers
) -> Iterator[tuple[Exchange, urls.WebUrl]]:
    """Send a request, follow redirects, and yield the last response and its URL; errors are a `Failure`."""
    seen = set[urls.WebUrl]()
    while url not in seen:
        if len(seen) > MOST_REDIRECTS:
            raise Failure(RemoteError(f"the server redirects more than {MOST_REDIRECTS} times", path))
        seen.add(url)
        try:
            with client.exchange(url, {**target.headers_at(url), **more(url)}) as exchange:
                debug("%s: %s: %d", path, what or url.shown, exchange.status)
                commit = exchange.headers.get(_COMMIT)
                if commit is not None and url.origin == target.url.origin:
                    commits.add(commit)
                if exchange.status not in _REDIRECTS:
                    yield exchange, url
                    return
                exchange.drain()
                location = exchange.headers.get("Location") or ""
        except TRANSPORT_ERRORS as error:
            suffix = "" if url.origin == target.url.origin else f", after a redirect to {url.place}"
            raise of_error(error, path, client.timeout).noted(suffix) from None
        with suppress(UnicodeError):  # in UTF-8, as browsers do
            location = location.encode("latin-1").decode()
        location = location.strip(" \t")
        if not location:
            raise Failure(RemoteError("the server redirects without a Location header", path))
        try:
            following = url.redirected(location)
        except urls.UrlError as error:
            text = f"the server redirects to an invalid http or https URL: {error}"
            raise Failure(RemoteError(text, path)) from None
        if url.scheme == "https" and following.scheme != "https":
            text = f"the server redirects from https to http ({following.shown}), which is refused"
            raise Failure(RemoteError(text, path))
        url = following
    raise Failure(RemoteError("the server redirects in a loop", path))


def request(client: Client, target: RequestTarget, path: str, use: Callable[[Exchange], _Result]) -> _Result:
    """Request a whole response, and return the result of ``use``; transient failures are retried."""

    def attempt() -> _Result:
        with _answered(client, target, target.url, path, set()) as (exchange, _):
            return use(exchange)

    try:
        return retried(attempt, client.retries, lambda failure: debug("%s: %s", path, failure.error))
    finally:
        client.leave()


class HttpStore(RemoteStore):
    """A file read by GET requests for ranges."""

    def __init__(self, path: str, resolve: Callable[[], RequestTarget], client: Client, window: int = WINDOW) -> None:
        super().__init__(path, (0, None), window)  # the version of an empty file, until the file is open
        self.commits: set[str] = set()  # of the Hub, as the host of the URL states them
        self._resolve = resolve  # called from any thread, and again if access to its URL is refused
        self._client = client
        self._renewing = ProcessLock()
        self._marks: tuple[str | None, str | None] | None = None  # until the file is open
        client.users.add(self)
        try:
            self._target = resolve()
            self._route = self._target.url  # after redirects
            self._proven: urls.WebUrl | None = None  # has served bytes of the opened version
            self._persist(_Transfer([Span(0, memoryview(bytearray(window)))]))
        except BaseException:
            client.leave(self)
            raise

    def close(self) -> None:
        super().close()
        self._client.leave(self)

    def read_spans(self, spans: Sequence[Span]) -> None:
        spans = [span for span in spans if len(span.memory)]
        if spans:
            self._persist(_Transfer(spans))

    # ---- requests ----

    def _persist(self, transfer: _Transfer) -> None:
        """Request the missing bytes until all have arrived; errors are never chained to urllib3's."""
        renewed = False  # a URL is resolved again once

        def mended(failure: Failure) -> bool:
            nonlocal renewed
            if isinstance(failure.error, RemoteError):
                failure.error.begin, failure.error.end = transfer.at, transfer.end
            debug("%s: bytes [%d, %d): %s", self.path, transfer.at, transfer.end, failure.error.args[0])
            if failure.refused is None or renewed or not self._renew(*failure.refused):
                return False
            renewed = True
            current().sleep(failure.wait)
            return True

        retried(lambda: self._request(transfer), self._client.retries, mended, lambda: transfer.at)

    def _request(self, transfer: _Transfer) -> None:
        """Request the missing bytes once."""
        route, target, (etag, _) = self._route, self._target, self._marks or (None, None)
        what = f"bytes [{transfer.at}, {transfer.end})"

        def more(url: urls.WebUrl) -> dict[str, str]:
            headers = {"Range": f"bytes={transfer.at}-{transfer.end - 1}"}
            # Other servers along the redirects may have another ETag for the same file.
            if etag and not is_weak(etag) and url == self._proven:
                headers["If-Match"] = etag
            return headers

        with _answered(self._client, target, route, self.path, self.commits, what=what, more=more) as (exchange, url):
            try:
                check_accepted(exchange, self.path)
                if self._marks is None:
                    self._opened(exchange, url)
                else:
                    self._read(exchange, url, transfer)
            except Failure as failure:
                failure.refused = (route, url) if exchange.status in _REFUSED else None
                raise

    def _renew(self, seen: urls.WebUrl, refused: urls.WebUrl) -> bool:
        """Resolve the URL again, in a single thread, and return whether there is another URL to try."""
        lock = self._renewing.own
        while not lock.acquire(timeout=0.1):
            current().check()
        try:
            if self._route != seen:  # another thread was faster
                return True
            moved = refused != self._target.url
            if self._marks is None and not moved:  # it has just been resolved
                return False
            target = self._resolve()
            if target == self._target and not moved:
                return False
            self._target, self._route = target, target.url
            return True
        finally:
            lock.release()

    # ---- responses ----

    def _opened(self, exchange: Exchange, url: urls.WebUrl) -> None:
        """Take the size, the version and the first window from the response to the first request."""
        status, total = exchange.status, _total(exchange)
        if status == 200:  # a server without range support
            window = whole_body(exchange, WHOLE, self.path)
            if window is None:
                advice = "open filecache::URL with storage_options={}, which lets fsspec download it"
                text = f"this server does not support ranges: download the file, or {advice}"
                raise Failure(UnsupportedError(f"{self.path}: {text}"))
            total = len(window)
        elif status == 416 and total == 0:
            window = b""
        elif status != 206:
            raise of_status(exchange, self.path)
        elif total is None:
            place = show(exchange.headers.get("Content-Range"))
            text = f"the server does not report the file size (Content-Range: {place})"
            raise Failure(RemoteError(text, self.path))
        else:
            memory = bytearray(min(self.window, total))
            _check_range(exchange, 0, len(memory), self.path)
            _Transfer([Span(0, memoryview(memory))]).receive(exchange, self.path)
            window = bytes(memory)
        self.size = total
        self._marks = _marks_of(exchange)
        self.version = (self.size, " ".join(filter(None, self._marks)) or None)
        self._route = self._proven = url
        self.keep(0, window)

    def _read(self, exchange: Exchange, url: urls.WebUrl, transfer: _Transfer) -> None:
        """Take the missing bytes from a response."""
        total = _total(exchange)
        if total is not None:
            compare((total,), self.version[:1], self.path)
        other_version = exchange.status == 206 and _marks_of(exchange) != self._marks
        if exchange.status == 412 or other_version or len(self.commits) > 1:
            compare((self.size, ""), (self.size, "another"), self.path)
        _check_range(exchange, transfer.at, transfer.end, self.path)
        self._route = self._proven = url
        transfer.receive(exchange, self.path)


def check_accepted(exchange: Exchange, path: str) -> None:
    """Refuse a response that holds no bytes of the file."""
    status = exchange.status
    if status in (200, 206, 412, 416):
        encoding = exchange.headers.get("Content-Encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return
        text = f"the server sent the file compressed ({show(encoding)}), although the request refused compression"
        raise Failure(RemoteError(text, path))
    exchange.drain()
    if status in (404, 410):
        like_folder = path.startswith("http") and "." not in path.partition("?")[0].rpartition("/")[2]
        advice = f"; {Web.no_folders}" if like_folder else ""
        raise Failure(missing_file(path, f"No such file: {path} (the server returned {status}){advice}"))
    if status in (401, 403):
        raise Failure(RemotePermissionError(f"the server refuses access ({status}): {_ADVICE}", path))
    if status == 407:
        raise Failure(RemotePermissionError("the proxy requires a user and a password", path))
    raise of_status(exchange, path)


def whole_body(exchange: Exchange, limit: int, path: str) -> bytes | None:
    """Return the body of a response, or None if it has more bytes than the limit."""
    content, memory = bytearray(), memoryview(bytearray(_WHOLE_PIECE))
    while (exchange.length or 0) <= limit and len(content) <= limit:  # the length is None if the server does not tell
        count = exchange.receive(memory)
        if not count:
            if exchange.length:  # bytes that have not arrived
                raise broken_off(path)
            return bytes(content)
        content += memory[:count]
    return None


def _check_range(exchange: Exchange, begin: int, end: int, path: str) -> None:
    """Refuse a response that does not hold exactly the bytes [begin, end)."""
    headers = exchange.headers
    place = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip().lower())
    length = headers.get("Content-Length")
    if exchange.status == 200:
        what = "the server returned the whole file instead of a range"
    elif exchange.status != 206:
        raise of_status(exchange, path)
    elif headers.get("Content-Type", "").strip().lower().startswith("multipart/"):
        what = "the server returned several parts instead of one range"
    elif place is None or place[1] is None or (int(place[1]), int(place[2]) + 1) != (begin, end):
        what = f"the server returned another range ({show(headers.get('Content-Range'))})"
    elif length is not None and length.strip() != str(end - begin):
        what = f"the server returned {show(length)} bytes, expected {end - begin}"
    else:
        return
    raise Failure(RemoteError(what, path))


def _marks_of(exchange: Exchange) -> tuple[str | None, str | None]:
    """Return the marks whose difference is a change: the ETag, and the time unless a strong ETag decides alone."""
    etag, modified = exchange.headers.get("ETag") or None, exchange.headers.get("Last-Modified") or None
    return etag, modified if etag is None or is_weak(etag) else None


def _total(exchange: Exchange) -> int | None:
    """Return the size of the file as the response states it, or None."""
    place = _CONTENT_RANGE.fullmatch(exchange.headers.get("Content-Range", "").strip().lower())
    return None if place is None or place[3] == "*" else int(place[3])
