"""What files that are read over HTTP with the same options share, and where their URLs and headers may go."""

from __future__ import annotations

import base64
import errno
import math
import os
import re
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import urllib3

from ..base.text import show
from ..base.url import UrlError, WebUrl, divided
from ..base.url import web_url as parse_web
from ..errors import RemoteError
from . import url as urls
from .connections import Connections
from .retries import RETRIES, Failure

# Seconds without a byte after which a request is given up, and seconds that a connect may take.
TIMEOUT, CONNECT_TIMEOUT = 30.0, 10.0

_KNOWN = ("connect_timeout", "headers", "retries", "ssl_context", "timeout", "verify")
# Headers that say which bytes are wanted, and how.
_OWN_HEADERS = frozenset(("accept-encoding", "if-match", "if-range", "if-none-match", "range"))
# What could be missing where access is refused.
_CREDENTIALS = (
    "a token may be missing or wrong (storage_options={'headers': {'Authorization': ...}}), or a signed URL has expired"
)


class RequestTarget(NamedTuple):
    """Where a file is.

    Attributes:
        url: to read it from; its query may be secret, and so may the headers.
        headers: of requests to the origin of the URL, and to no other.
    """

    url: WebUrl
    headers: Mapping[str, str]

    def __repr__(self) -> str:
        return f"<Target {self.url.shown}>"


class Client:
    """What the files that are opened with the same options share: connections, headers, limits.

    Args:
        options: ``headers`` (a mapping, for the host of each URL only), ``timeout`` (seconds without a byte),
            ``connect_timeout`` (seconds), ``retries`` (how often a range is tried again that brings nothing),
            ``verify`` (False: any certificate will do; a path: of the certificates to trust) or ``ssl_context``.
        scheme: in errors.
        credentials: which may be missing where access is refused, as a sentence of an error.
        others: options that the caller takes itself, for errors.

    Attributes:
        headers: of the caller.
        credentials: see above.
        timeout: in seconds.
        retries: see above.
        connections: of all files.

    Raises:
        TypeError, ValueError: an option is unknown, or wrong.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        scheme: str = "https",
        credentials: str = _CREDENTIALS,
        others: tuple[str, ...] = (),
    ) -> None:
        for key in options:
            if key not in _KNOWN:
                known = ", ".join(sorted((*_KNOWN, *others)))
                raise TypeError(f"{scheme}: unknown storage option {show(key)}; known are {known}")
        self.credentials = credentials
        self.headers = checked_headers(options.get("headers") or {})
        self.timeout = _seconds(options, "timeout", TIMEOUT)
        self.retries = options.get("retries", RETRIES)
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise ValueError(f"retries: a number of at least 0 is wanted, found {show(self.retries)}")
        connect_timeout = _seconds(options, "connect_timeout", CONNECT_TIMEOUT)
        self.connections = Connections(_context_of(options), self.timeout, connect_timeout)

    def __repr__(self) -> str:
        return "<Client>"  # headers are secrets


def checked_headers(headers: Any) -> dict[str, str]:
    """Headers of the caller's.

    Raises:
        TypeError, ValueError: they are not headers, or of those that reading sets itself. No value is in the message.
    """
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers: a mapping is wanted, found {type(headers).__name__}")
    found: dict[str, str] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError("headers: names and values are texts")
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError("headers: a name has characters that no name of a header can have")
        if not all(" " <= char <= "\xff" or char == "\t" for char in value) or "\x7f" in value:
            raise ValueError(f"headers: the value of {name} has a character that no header can have")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"headers: {name} is set by safeload itself")
        found[name] = value
    return found


def _seconds(options: Mapping[str, Any], key: str, default: float) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{key}: a number of seconds above 0 is wanted, found {show(value)}")
    return float(value)


def _context_of(options: Mapping[str, Any]) -> Callable[[], ssl.SSLContext]:
    """What makes the context for TLS."""
    given, verify = options.get("ssl_context"), options.get("verify", True)
    if given is not None:
        if not isinstance(given, ssl.SSLContext) or "verify" in options:
            raise TypeError("ssl_context: an ssl.SSLContext is wanted, without verify beside it")
        return lambda: given
    if not isinstance(verify, (bool, str, os.PathLike)):
        raise TypeError(f"verify: a bool, or a path of certificates, is wanted, found {show(verify)}")
    if not isinstance(verify, bool) and not os.path.exists(verify):
        raise FileNotFoundError(errno.ENOENT, "verify: no such file of certificates", os.fspath(verify))
    return partial(_context, verify)


def _context(verify: bool | str | os.PathLike[str]) -> ssl.SSLContext:
    if verify is True:
        return _system_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    if not verify:
        context = ssl.create_default_context()
    else:
        path = os.fspath(verify)
        folder = os.path.isdir(path)
        context = ssl.create_default_context(cafile=None if folder else path, capath=path if folder else None)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return _with_names(context)


@lru_cache(maxsize=2)
def _system_context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """That of the system's certificates, which take 20 to 30 ms to read: as long as many an open takes.

    Args:
        file: the environment's SSL_CERT_FILE, which OpenSSL reads itself.
        folder: its SSL_CERT_DIR.
    """
    return _with_names(ssl.create_default_context())


def _with_names(context: ssl.SSLContext) -> ssl.SSLContext:
    """A context as urllib3 needs it, to compare the names of hosts."""
    if urllib3.__version__.startswith("1."):
        context.check_hostname = False  # urllib3 compares the name itself: this one refuses all addresses without names
    return context


def web_url(url: str) -> tuple[WebUrl, tuple[str, str] | None]:
    """Return the URL to connect to, and user and password if the URL has them.

    Raises:
        RemoteError: servers and libraries may read it in different ways, or it has no host.
    """
    try:
        return parse_web(divided(url))
    except UrlError as error:
        raise RemoteError(f"this URL cannot be opened: {error}", urls.shown(url)) from None


def target_of(url: str, headers: Mapping[str, str]) -> RequestTarget:
    """Return where a file is; user and password of its URL become a header.

    Raises:
        RemoteError: see `web_url`.
    """
    web, credentials = web_url(url)
    if credentials is None:
        return RequestTarget(web, headers)
    secret = base64.b64encode(":".join(credentials).encode("utf-8", "surrogateescape")).decode("ascii")
    return RequestTarget(web, {**headers, "Authorization": f"Basic {secret}"})


def redirected(url: WebUrl, location: str | None, path: str) -> WebUrl | Failure:
    """Return the URL that a redirect leads to.

    Args:
        url: that was redirected.
        location: the header of the answer.
        path: the URL as messages show it.
    """
    try:
        target = (location or "").encode("latin-1").decode()  # as http.client decodes headers, and as browsers do
    except UnicodeError:
        target = location or ""
    target = target.strip(" \t")
    try:
        if not target:
            raise UrlError("it is not http or https")
        following = url.redirected(target)
    except UrlError as error:
        return Failure(RemoteError(f"the server redirects to what is not a URL of http or https: {error}", path))
    if url.scheme == "https" and following.scheme != "https":
        text = f"the server redirects from https to http ({following.shown}), which is refused"
        return Failure(RemoteError(text, path))
    return following
