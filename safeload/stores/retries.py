"""What goes wrong on a network: what passes, and is tried again after a while, and what each failure is called."""

from __future__ import annotations

import email.utils
import http.client
import random
import re
import socket
import ssl
import time
from typing import NamedTuple

import urllib3

from ..errors import RemoteError, RemotePermissionError, RemoteTimeoutError
from .http_framing import BadAnswer
from .stop import current

# How often in a row a range is tried again that brings nothing.
RETRIES = 4
# A try that brought this many bytes begins a new row: a range of n MiB is tried at most n + RETRIES + 1 times.
PROGRESS = 1 << 20
# Seconds of the first wait at most; each further one may be twice as long, up to the second number. How long it is
# within that is chance, so that those who were refused together do not come back together.
_BACKOFF, _BACKOFF_MOST = 0.5, 10.0
# Most seconds that a server may ask to wait.
RETRY_AFTER_MOST = 60
# Answers of a server that is busy or in trouble.
_PASSING = frozenset((408, 429, 500, 502, 503, 504))

# What requests raise.
TRANSPORT_ERRORS = (OSError, urllib3.exceptions.HTTPError, http.client.HTTPException)


class Failure(NamedTuple):
    """What became of a request that brought nothing.

    Attributes:
        error: to raise if it is not tried again. It holds no other error, whose text might have a secret.
        passes: whether to try again.
        wait: seconds that the server asks to wait.
        refused: whether access was refused: another URL for the same file may be accepted.
    """

    error: Exception
    passes: bool = False
    wait: float = 0.0
    refused: bool = False


class Tries:
    """Counts the tries of one range."""

    def __init__(self, retries: int, at: int = 0) -> None:
        self._retries = retries
        self._at = at
        self._row = 0
        self._all = 0

    def failed(self, failure: Failure, at: int = 0) -> None:
        """Waits until the next try.

        Args:
            failure: of the last one.
            at: the byte that has been reached.

        Raises:
            Exception: the failure's, if there is no further try.
        """
        if at - self._at >= PROGRESS:
            self._at, self._row = at, 0
        self._row += 1
        self._all += 1
        if failure.passes and self._row <= self._retries:
            most = min(_BACKOFF_MOST, _BACKOFF * 2.0 ** (self._row - 1))
            current().sleep(failure.wait + random.uniform(0, most))
            return
        if self._all > 1:
            failure.error.args = (f"{failure.error.args[0]}; tried {self._all} times", *failure.error.args[1:])
        try:
            raise failure.error
        finally:
            del failure  # whose error refers to this frame


def of_status(status: int, retry_after: str | None, path: str) -> Failure:
    """The failure that an answer's status says."""
    name = http.client.responses.get(status, "")
    what = f"the server answers {status} {name}".rstrip()
    if status not in _PASSING:
        return Failure(RemoteError(what, path))
    wait = seconds_of(retry_after)
    if wait > RETRY_AFTER_MOST:
        text = f"{what} and asks to wait {wait:.0f} s, more than the limit of {RETRY_AFTER_MOST} s"
        return Failure(RemoteError(text, path))
    return Failure((RemoteTimeoutError if status in (408, 504) else RemoteError)(what, path), True, wait)


def seconds_of(retry_after: str | None) -> float:
    """The seconds of a Retry-After header, which has them or a date; 0 without one that can be read."""
    text = (retry_after or "").strip()
    if re.fullmatch(r"[0-9]{1,12}", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0


def of_error(error: BaseException, path: str, timeout: float) -> Failure:
    """The failure that an error of a request is. Errors of urllib3 show URLs with their queries: it holds none."""
    proxy = "the proxy: " if isinstance(error, urllib3.exceptions.ProxyError) else ""
    inner = _innermost(error)
    if isinstance(inner, (TimeoutError, urllib3.exceptions.TimeoutError)):
        what = getattr(inner, "strerror", None) or f"no byte for {timeout:g} s"
        return Failure(RemoteTimeoutError(f"{proxy}{what}", path), True)
    if isinstance(inner, ssl.SSLError) or _is_of_certificate(inner):
        return _of_tls(inner, proxy, path)
    if isinstance(inner, socket.gaierror):
        what = f"the name of the host cannot be resolved: {inner.strerror}"
        return Failure(RemoteError(f"{proxy}{what}", path), inner.errno == socket.EAI_AGAIN)
    if isinstance(inner, http.client.RemoteDisconnected):
        return Failure(RemoteError(f"{proxy}the connection was closed without an answer", path), True)
    if isinstance(inner, http.client.IncompleteRead):
        return broken_off(path)
    if isinstance(inner, BadAnswer):
        return Failure(RemoteError(f"{proxy}{inner}", path))
    if isinstance(inner, (http.client.HTTPException, urllib3.exceptions.ProtocolError)):
        return Failure(RemoteError(f"{proxy}the answer is not HTTP", path), True)
    if isinstance(inner, OSError):
        tunnel = re.match(r"Tunnel connection failed: ([0-9]{3})\b", str(inner))
        if tunnel:
            kind = RemotePermissionError if tunnel[1] == "407" else RemoteError
            return Failure(kind(f"the proxy refuses the connection: {tunnel[1]}", path), tunnel[1][0] == "5")
        what = inner.strerror or type(inner).__name__
        return Failure(RemoteError(f"{proxy}the connection failed: {what}", path), True)
    return Failure(RemoteError(f"{proxy}the request failed: {type(inner).__name__}", path))


def broken_off(path: str) -> Failure:
    """The failure of a body that is shorter than its answer says."""
    return Failure(RemoteError("the connection broke off before the end of the answer", path), True)


def _innermost(error: BaseException) -> BaseException:
    """The error that urllib3 has wrapped in its own."""
    while isinstance(error, urllib3.exceptions.HTTPError):
        found = [one for one in error.args if isinstance(one, BaseException)]
        if not found:
            break
        error = found[0]
    return error


def _is_of_certificate(error: BaseException) -> bool:
    """Whether an error says that a server is another one. urllib3 1 has a class of its own, in varying places."""
    return isinstance(error, ssl.CertificateError) or type(error).__name__ == "CertificateError"


def _of_tls(error: BaseException, proxy: str, path: str) -> Failure:
    if _is_of_certificate(error):
        why = getattr(error, "verify_message", None) or "it is for another host"
        text = (
            f"{proxy}the server's certificate is not trusted: {why}; storage_options={{'verify': PATH}} trusts another"
        )
        return Failure(RemoteError(text, path))
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)):
        return Failure(RemoteError(f"{proxy}the TLS connection was closed", path), True)
    return Failure(RemoteError(f"{proxy}TLS fails: {getattr(error, 'reason', None) or 'no reason is given'}", path))
