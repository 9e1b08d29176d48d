"""Network failures: which are transient, how long to wait before the next attempt, and what messages say."""

from __future__ import annotations

import email.utils
import http.client
import random
import re
import socket
import ssl
import time
from collections.abc import Mapping
from typing import NamedTuple

import urllib3

from ..base.url import WebUrl
from ..errors import RemoteError, RemotePermissionError, RemoteTimeoutError
from .sockets import BadResponse
from .thread_group import current

# Maximum number of consecutive retries of a range without progress.
RETRIES = 4
# Receiving this many bytes resets the count: a range of n MiB is requested at most n + RETRIES + 1 times.
PROGRESS = 1 << 20
# Upper bound of the first wait in seconds, which doubles with each retry up to the second number. The wait itself is
# random, so that refused clients do not all return at once.
_BACKOFF, _BACKOFF_MOST = 0.5, 10.0
# A server may ask for at most this many seconds of waiting.
RETRY_AFTER_MOST = 60
# Longer waits are shown as this one: a server can send thousands of digits.
_WAIT_SHOWN = 1e12
# A quota, of the Hub for example, is used up, and renewed after this many seconds.
_QUOTA = re.compile(r"\br=0;\s*t=([0-9]+)\s*$")
# Status codes of a busy or failing server.
_TRANSIENT = frozenset((408, 429, 500, 502, 503, 504))

# Exceptions of requests.
TRANSPORT_ERRORS = (OSError, urllib3.exceptions.HTTPError, http.client.HTTPException)


class Failure(NamedTuple):
    """The outcome of a failed request."""

    error: Exception  # to raise if there is no retry; never chained, because the text of a cause may hold a secret
    transient: bool = False  # whether to retry
    wait: float = 0.0  # seconds requested by the server
    refused: WebUrl | None = None  # the refused URL: another URL for the same file may be accepted


class Tries:
    """Counts the attempts to read a range."""

    def __init__(self, retries: int, at: int = 0) -> None:
        self._retries = retries
        self._at = at
        self._consecutive = 0
        self._total = 0

    def failed(self, failure: Failure, at: int = 0) -> None:
        """Wait for the next attempt."""
        if at - self._at >= PROGRESS:
            self._at, self._consecutive = at, 0
        self._consecutive += 1
        self._total += 1
        if failure.transient and self._consecutive <= self._retries:
            longest = min(_BACKOFF_MOST, _BACKOFF * 2.0 ** (self._consecutive - 1))
            current().sleep(failure.wait + random.uniform(0, longest))
            return
        if self._total > 1:
            failure.error.args = (f"{failure.error.args[0]}; tried {self._total} times", *failure.error.args[1:])
        try:
            raise failure.error
        finally:
            del failure  # its error refers to this frame


def of_status(status: int, retry_after: str | None, path: str) -> Failure:
    """Return the failure for a status code."""
    name = http.client.responses.get(status, "")
    what = f"the server returned {status} {name}".rstrip()
    if status not in _TRANSIENT:
        return Failure(RemoteError(what, path))
    wait = seconds_of(retry_after)
    if wait > RETRY_AFTER_MOST:
        text = f"{what} and asks to wait {wait:.0f} s, which is more than the limit of {RETRY_AFTER_MOST} s"
        return Failure(RemoteError(text, path))
    return Failure((RemoteTimeoutError if status in (408, 504) else RemoteError)(what, path), True, wait)


def requested_wait(status: int, headers: Mapping[str, str]) -> str | None:
    """Return the wait that a response asks for, as in Retry-After."""
    quota = _QUOTA.search(headers.get("RateLimit", "")) if status == http.client.TOO_MANY_REQUESTS else None
    return headers.get("Retry-After") or (None if quota is None else quota[1])


def seconds_of(retry_after: str | None) -> float:
    """Parse a Retry-After header, which holds seconds or a date; return 0 if it cannot be parsed."""
    text = (retry_after or "").strip()
    if re.fullmatch(r"[0-9]+", text):
        return min(float(text), _WAIT_SHOWN)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0


def of_error(error: BaseException, path: str, timeout: float) -> Failure:
    """Return the failure for an exception; it is not chained, because urllib3's texts include URLs with queries."""
    proxy = "the proxy: " if isinstance(error, urllib3.exceptions.ProxyError) else ""
    inner = _innermost(error)
    if isinstance(inner, (TimeoutError, urllib3.exceptions.TimeoutError)):
        what = getattr(inner, "strerror", None) or f"no byte for {timeout:g} s"
        return Failure(RemoteTimeoutError(f"{proxy}{what}", path), True)
    if isinstance(inner, ssl.SSLError) or _is_certificate_error(inner):
        return _of_tls(inner, proxy, path)
    if isinstance(inner, socket.gaierror):
        what = f"the host name cannot be resolved: {inner.strerror}"
        return Failure(RemoteError(f"{proxy}{what}", path), inner.errno == socket.EAI_AGAIN)
    if isinstance(inner, http.client.RemoteDisconnected):
        return Failure(RemoteError(f"{proxy}the connection was closed without a response", path), True)
    if isinstance(inner, http.client.IncompleteRead):
        return broken_off(path)
    if isinstance(inner, BadResponse):
        return Failure(RemoteError(f"{proxy}{inner}", path))
    if isinstance(inner, (http.client.HTTPException, urllib3.exceptions.ProtocolError)):
        return Failure(RemoteError(f"{proxy}the response is not HTTP", path), True)
    if isinstance(inner, OSError):
        tunnel = re.match(r"Tunnel connection failed: ([0-9]{3})\b", str(inner))
        if tunnel:
            kind = RemotePermissionError if tunnel[1] == "407" else RemoteError
            return Failure(kind(f"the proxy refused the connection: {tunnel[1]}", path), tunnel[1][0] == "5")
        what = inner.strerror or type(inner).__name__
        return Failure(RemoteError(f"{proxy}the connection failed: {what}", path), True)
    return Failure(RemoteError(f"{proxy}the request failed: {type(inner).__name__}", path))


def broken_off(path: str) -> Failure:
    """Return the failure for an incomplete body."""
    return Failure(RemoteError("the connection broke off before the end of the response", path), True)


def _innermost(error: BaseException) -> BaseException:
    """Unwrap the exception inside urllib3's."""
    while isinstance(error, urllib3.exceptions.HTTPError):
        inner = next((argument for argument in error.args if isinstance(argument, BaseException)), None)
        if inner is None:
            break
        error = inner
    return error


def _is_certificate_error(error: BaseException) -> bool:
    """Return whether the server's certificate was rejected; urllib3 has a class of its own for other hosts."""
    return isinstance(error, ssl.CertificateError) or type(error).__name__ == "CertificateError"


def _of_tls(error: BaseException, proxy: str, path: str) -> Failure:
    if _is_certificate_error(error):
        why = getattr(error, "verify_message", None) or "it is for another host"
        text = (
            f"{proxy}the server's certificate is not trusted: {why}; "
            "pass storage_options={'verify': PATH} to trust another certificate"
        )
        return Failure(RemoteError(text, path))
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)):
        return Failure(RemoteError(f"{proxy}the TLS connection was closed", path), True)
    return Failure(RemoteError(f"{proxy}TLS failed: {getattr(error, 'reason', None) or 'no reason given'}", path))
