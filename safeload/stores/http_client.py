"""HTTP requests over urllib3: options shared by files, pools, proxies, and where URLs and headers may be sent."""

from __future__ import annotations

import base64
import errno
import logging
import math
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import urllib3

from .._version import __version__
from ..base import url as urls
from ..base.absent import not_installed
from ..base.forking import ProcessLock, making_context
from ..base.text import show
from ..base.url import UrlError, WebUrl, divided
from ..base.url import web_url as parse_web
from ..errors import RemoteError, UnsupportedError
from .retries import RETRIES, TRANSPORT_ERRORS, Failure
from .sockets import POOLS, BadResponse, SlicedTlsSocket, socks_pools

# Seconds without a byte after which a request fails, and seconds after which a connect fails.
TIMEOUT, CONNECT_TIMEOUT = 30.0, 10.0

_KNOWN = ("connect_timeout", "headers", "retries", "ssl_context", "timeout", "verify")
# Idle connections kept per host: as many as there are requests in flight while headers are read.
_IDLE = 32
# Bytes received at once.
_PIECE = 512 << 10
# What a server may send for each byte of a body, and beside it: sizes of chunks, and trailers.
_PER_BYTE, _BESIDE = 8, 1 << 20
# An unused body of at most this size is read to make its connection reusable.
_DRAINED = 16 << 10
# Seconds after which draining a body costs more than a new connection.
_DRAINING = 1.0
# Seconds to wait for the end of a body after its last expected byte.
_ENDING = 0.2
# Headers for the bytes of a range and their encoding, set by `HttpStore`.
_OWN_HEADERS = frozenset(("accept-encoding", "if-match", "if-range", "if-none-match", "range"))
# The end of a message if access is refused.
_CREDENTIALS = (
    "a token may be missing or wrong (storage_options={'headers': {'Authorization': ...}}), or a signed URL has expired"
)


class RequestTarget(NamedTuple):
    """The URL of a file and the headers to send there."""

    url: WebUrl  # its query may be secret
    headers: Mapping[str, str]  # may be secret: they are sent to the origin of the URL only

    def __repr__(self) -> str:
        return f"<Target {self.url.shown}>"

    def headers_at(self, url: WebUrl) -> dict[str, str]:
        """Return the headers of a request to a URL, which may be behind a redirect."""
        headers = dict(self.headers) if url.origin == self.url.origin else {}
        if "user-agent" not in map(str.lower, headers):
            headers["User-Agent"] = f"safeload/{__version__}"
        headers["Accept-Encoding"] = "identity"
        return headers


class _Scope:
    """A user of connections while it opens files."""


_of_thread = threading.local()


def _is_foreign(record: logging.LogRecord) -> bool:
    """Filter urllib3's log records of our requests: they contain URLs with queries, which may be secret."""
    return not getattr(_of_thread, "ours", False)


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_name).addFilter(_is_foreign)


class Exchange:
    """A response while its body is received."""

    def __init__(self, response: Any) -> None:
        self._body, self._wire = response.body, response.wire
        self.status: int = response.status
        self.headers = response.headers  # names in any case

    def receive(self, memory: memoryview) -> int:
        """Fill the beginning of memory with arrived bytes of the body; return their number, 0 at the end."""
        memory = memory[:_PIECE]
        self._wire.left = _PER_BYTE * len(memory) + _BESIDE
        return int(self._body.arrived(memory))

    def finish(self) -> None:
        """Read the end of a body after its last expected byte; one that does not come only costs the connection."""
        with suppress(TimeoutError), self._hurried(_ENDING):
            if self._body.arrived(memoryview(bytearray(1))):
                raise BadResponse("the response has more bytes than its range")

    def drain(self) -> None:
        """Read a short, unused body to make the connection reusable; errors only prevent reuse."""
        memory, deadline = memoryview(bytearray(_DRAINED)), time.monotonic() + _DRAINING
        if (self._body.length or 0) <= len(memory):
            with suppress(*TRANSPORT_ERRORS), self._hurried(_DRAINING):
                while memory and time.monotonic() < deadline and (count := self._body.arrived(memory)):
                    memory = memory[count:]

    @contextmanager
    def _hurried(self, seconds: float) -> Iterator[None]:
        """Limit the wait for bytes to this many seconds."""
        timeout = self._wire.gettimeout()
        self._wire.left = _BESIDE
        with suppress(OSError):  # the connection may be closed
            self._wire.settimeout(min(seconds, timeout or seconds))
        try:
            yield
        finally:
            with suppress(OSError):
                self._wire.settimeout(timeout)


class Client:
    """Connections, headers and limits shared by files opened with the same options, from any thread."""

    def __init__(
        self,
        options: Mapping[str, Any],
        scheme: str = "https",
        *,
        credentials: str = _CREDENTIALS,
        other_options: tuple[str, ...] = (),
    ) -> None:
        for key in options:
            if key not in _KNOWN:
                known = ", ".join(sorted((*_KNOWN, *other_options)))
                raise TypeError(f"{scheme}: unknown storage option {show(key)}, expected one of {known}")
        self.credentials = credentials
        self.headers = checked_headers(options.get("headers") or {})
        self.timeout = _seconds(options, "timeout", TIMEOUT)
        self.retries = options.get("retries", RETRIES)
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise ValueError(f"retries must be >= 0, got {show(self.retries)}")
        connect_timeout = _seconds(options, "connect_timeout", CONNECT_TIMEOUT)
        self._timeout = urllib3.Timeout(connect=connect_timeout, read=self.timeout)
        self._make_context = _context_maker(options)
        self._context: ssl.SSLContext | None = None
        self._proxies: dict[tuple[str, str], str | None] = {}
        # By process, scheme and proxy: a fork copies the parent's sockets, and locks in whatever state they are.
        self._managers: dict[tuple[int, str, str | None], Any] = {}
        self._lock = ProcessLock()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, _close, self._managers)

    def __repr__(self) -> str:
        return "<Client>"  # headers are secret

    @contextmanager
    def exchange(self, url: WebUrl, headers: Mapping[str, str]) -> Iterator[Exchange]:
        """Send a request and yield the response once its head has been read."""
        manager = self._manager(url)
        _of_thread.ours = True
        try:
            response = manager.urlopen(
                "GET", url.text, headers=dict(headers), timeout=self._timeout, retries=False, redirect=False,
                preload_content=False, decode_content=False,
            )  # fmt: skip
        finally:
            _of_thread.ours = False
        try:
            yield Exchange(response)
        finally:
            if not response.closed:  # a part of the body is unread
                response.close()
            response.release_conn()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep idle connections while the block opens one file after another."""
        scope = _Scope()
        self._users.add(scope)
        try:
            yield
        finally:
            self.leave(scope)

    def join(self, user: object) -> None:
        """Register an open file."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Unregister a file; close all idle connections after the last file."""
        self._users.discard(user)
        if not self._users:
            _close(self._managers)

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
        if proxy is not None and proxy.startswith("socks"):
            return _socks(proxy, {**options, **(self._tls() if scheme == "https" else {})})
        via, credentials = (None, None) if proxy is None else _parsed_proxy(proxy)
        if scheme == "https" or (via is not None and via.scheme == "https"):
            options.update(self._tls())
        if via is None:
            manager = urllib3.PoolManager(**options)
        else:
            if credentials is not None:
                options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=":".join(credentials))
            options["proxy_ssl_context"] = options.get("ssl_context")
            manager = urllib3.ProxyManager(f"{via.scheme}://{via.place}", **options)
        manager.pool_classes_by_scheme = POOLS
        return manager

    def _tls(self) -> dict[str, Any]:
        context = self._context = self._context or self._make_context()
        if context.sslsocket_class is ssl.SSLSocket:  # otherwise the caller's class is kept
            context.sslsocket_class = SlicedTlsSocket
        return {
            "ssl_context": context,
            "cert_reqs": "CERT_NONE" if context.verify_mode == ssl.CERT_NONE else "CERT_REQUIRED",
        }


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
        raise UnsupportedError(f"proxies must use http, https or socks, got {url.scheme or 'no scheme'}")
    try:
        return parse_web(url)
    except UrlError as error:
        raise UnsupportedError(f"the proxy {url.shown} cannot be used: {error}") from None


def _socks(proxy: str, options: Mapping[str, Any]) -> Any:
    try:
        pools = socks_pools()
    except ImportError as error:
        text = "SOCKS proxies need PySocks, which is not installed: pip install pysocks"
        raise not_installed(error, text, "socks") from None
    from urllib3.contrib.socks import SOCKSProxyManager

    manager = SOCKSProxyManager(proxy, **options)
    manager.pool_classes_by_scheme = pools
    return manager


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


def _context_maker(options: Mapping[str, Any]) -> Callable[[], ssl.SSLContext]:
    """Return a factory for the TLS context."""
    context, verify = options.get("ssl_context"), options.get("verify", True)
    if context is not None:
        if not isinstance(context, ssl.SSLContext):
            raise TypeError(f"ssl_context must be an ssl.SSLContext, got {type(context).__name__}")
        if "verify" in options:
            raise TypeError("ssl_context and verify exclude each other: pass only one of them")
        return lambda: context
    if not isinstance(verify, (bool, str, os.PathLike)):
        raise TypeError(f"verify must be a bool or a path to certificates, got {show(verify)}")
    if not isinstance(verify, bool) and not os.path.exists(verify):
        raise FileNotFoundError(errno.ENOENT, "verify: no such certificate file or folder", os.fspath(verify))
    return partial(_context, verify)


def _context(verify: bool | str | os.PathLike[str]) -> ssl.SSLContext:
    if verify is True:
        return _system_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    if not verify:
        context = _default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    path = os.fspath(verify)
    folder = os.path.isdir(path)
    return _default_context(None if folder else path, path if folder else None)


def _default_context(file: str | None = None, folder: str | None = None) -> ssl.SSLContext:
    with making_context:
        return ssl.create_default_context(cafile=file, capath=folder)


@lru_cache(maxsize=2)
def _system_context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Create a context with the system's certificates; cached, because they take long to read."""
    return _default_context()


def web_url(url: str) -> tuple[WebUrl, tuple[str, str] | None]:
    """Return the URL to connect to, and the user and password if the URL has them."""
    try:
        return parse_web(divided(url))
    except UrlError as error:
        raise RemoteError(f"this URL cannot be opened: {error}", urls.shown(url)) from None


def target_of(url: str, headers: Mapping[str, str]) -> RequestTarget:
    """Return the target of a URL; its user and password become a header."""
    web, credentials = web_url(url)
    if credentials is None:
        return RequestTarget(web, headers)
    secret = base64.b64encode(":".join(credentials).encode("utf-8", "surrogateescape")).decode("ascii")
    rest = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    return RequestTarget(web, {**rest, "Authorization": f"Basic {secret}"})


def redirected(url: WebUrl, location: str | None, path: str) -> WebUrl | Failure:
    """Return the target of a redirect."""
    try:
        target = (location or "").encode("latin-1").decode()  # as http.client decodes headers, and as browsers do
    except UnicodeError:
        target = location or ""
    target = target.strip(" \t")
    if not target:
        return Failure(RemoteError("the server redirects without a Location header", path))
    try:
        following = url.redirected(target)
    except UrlError as error:
        return Failure(RemoteError(f"the server redirects to an invalid http or https URL: {error}", path))
    if url.scheme == "https" and following.scheme != "https":
        text = f"the server redirects from https to http ({following.shown}), which is refused"
        return Failure(RemoteError(text, path))
    return following
