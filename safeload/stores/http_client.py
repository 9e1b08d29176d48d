"""HTTP options shared by files, and the rules on where URLs and headers may be sent."""

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

from .._version import __version__
from ..base.forking import making_context
from ..base.text import show
from ..base.url import UrlError, WebUrl, divided
from ..base.url import web_url as parse_web
from ..errors import RemoteError
from . import url as urls
from .connections import Connections
from .retries import RETRIES, Failure

# Seconds without a byte after which a request fails, and seconds after which a connect fails.
TIMEOUT, CONNECT_TIMEOUT = 30.0, 10.0

_KNOWN = ("connect_timeout", "headers", "retries", "ssl_context", "timeout", "verify")
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


class Client:
    """Connections, headers and limits shared by files opened with the same options."""

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
        self.connections = Connections(_context_maker(options), self.timeout, connect_timeout)

    def __repr__(self) -> str:
        return "<Client>"  # headers are secret


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
    context = _default_context(None if folder else path, path if folder else None)
    return _with_names(context)


def _default_context(file: str | None = None, folder: str | None = None) -> ssl.SSLContext:
    with making_context:
        return ssl.create_default_context(cafile=file, capath=folder)


@lru_cache(maxsize=2)
def _system_context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Create a context with the system's certificates; cached, because they take long to read."""
    return _with_names(_default_context())


def _with_names(context: ssl.SSLContext) -> ssl.SSLContext:
    """Let urllib3 1 compare host names itself: OpenSSL's check would refuse IP addresses without a name."""
    if urllib3.__version__.startswith("1."):
        context.check_hostname = False
    return context


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
