"""Sockets that stop waiting when their call ends, and urllib3's connections over them.

A wait is divided into short slices, between which it looks whether its call continues. That works for connects,
handshakes, heads and bodies alike, and on Windows, where neither a shutdown nor Ctrl-C wakes a waiting thread.
"""

from __future__ import annotations

import errno
import http.client
import math
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from email import errors
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.wait import wait_for_write

from .thread_group import Stopped, current

# Seconds between the checks of a waiting thread: whether to continue, and signals.
SLICE = 0.1
# Bytes that a server may send before the body of a response: endless "100 Continue" and header fields end here.
_HEAD = 256 << 10
_PENDING = {errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EWOULDBLOCK)}
# Python's texts for Winsock errors, which strerror does not know.
_TEXTS: dict[int, str] = getattr(socket, "errorTab", {})
_LENGTH = re.compile(r"[0-9]{1,18}")
# Python stops reading header fields at a malformed line, and reports it only by these defects.
_LOST = (errors.MissingHeaderBodySeparatorDefect, errors.FirstHeaderLineIsContinuationDefect)
# Bytes of a body over TLS received at once: an error loses no more.
_RECORDS = 128 << 10
# Maximum number of characters of a header in a message.
_SHOWN = 40

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
    failure = OSError(errno.EADDRNOTAVAIL, "the host has no address")
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
            code = connecting.connect_ex(address)
            if code in _PENDING:
                code = _wait_connected(connecting, timeout)
            if code:
                raise OSError(code, _TEXTS.get(code, "").rstrip(".") or os.strerror(code))
            connecting.settimeout(timeout)
            return connecting
        except BaseException as error:
            connecting.close()
            if not isinstance(error, OSError):
                raise
            failure = error
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


class _Response(http.client.HTTPResponse):
    """A response with a head that leaves no doubt about the end of the body."""

    tls = False  # whether bytes arrive in TLS records

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
        if not _LENGTH.fullmatch(length):
            digits = f"{length[:_SHOWN]}..." if len(length) > _SHOWN else length
            raise BadResponse(f"the Content-Length of the response is {digits}, more than 18 digits")

    def arrived(self, memory: memoryview) -> int:
        """Fill the beginning of memory with bytes of the body, without a copy; return their number, 0 at the end."""
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
        count: int = self.fp.readinto(memory[:_RECORDS]) if self.tls else self.fp.readinto1(memory)
        if self.length is not None:
            self.length -= count
            if not self.length:
                self.close()
        return count


class _Strict:
    """Mixin: a connection of urllib3 that checks heads, and limits their size."""

    def response_class(self, *arguments: Any, **options: Any) -> _Response:
        self._body = _Response(*arguments, **options)
        return self._body

    def getresponse(self: Any) -> Any:
        wire = self.sock
        if wire is None:  # urllib3 ignores a reset while the request is sent, but has closed the connection
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        wire.left = _HEAD
        response = super().getresponse()  # type: ignore[misc]
        response.wire, response.body, self._body.tls = wire, self._body, isinstance(wire, ssl.SSLSocket)
        return response


class _Connects:
    """Mixin: a connection of urllib3 over a sliced socket."""

    def _new_conn(self: Any) -> socket.socket:
        return connect(getattr(self, "_dns_host", self.host), self.port, self.timeout, self.socket_options or ())


class _PlainConnection(_Strict, _Connects, HTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Strict, _Connects, HTTPSConnection):  # type: ignore[misc]
    pass


class _PlainPool(HTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _PlainConnection


class _TlsPool(HTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


POOLS = {"http": _PlainPool, "https": _TlsPool}


@lru_cache(maxsize=1)
def socks_pools() -> dict[str, Any]:
    """Return the pools for SOCKS proxies; connects through them do not wait in slices."""
    import_module("socks")  # PySocks, without which urllib3 would warn too
    from urllib3.contrib import socks

    class Plain(_Strict, socks.SOCKSConnection):  # type: ignore[misc]
        pass

    class Tls(_Strict, socks.SOCKSHTTPSConnection):  # type: ignore[misc]
        pass

    class PlainPool(socks.SOCKSHTTPConnectionPool):  # type: ignore[misc]
        ConnectionCls = Plain

    class TlsPool(socks.SOCKSHTTPSConnectionPool):  # type: ignore[misc]
        ConnectionCls = Tls

    return {"http": PlainPool, "https": TlsPool}
