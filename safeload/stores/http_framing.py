"""Strict parsing of HTTP/1.1 responses: any ambiguity about where a body begins or ends is an error."""

from __future__ import annotations

import http.client
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import errors
from typing import Any

from urllib3.util.wait import wait_for_read

# A server may send 1xx responses forever; give up after this many heads.
_HEADS = 10
# Maximum size of the header fields after a 1xx response and of the trailers after a chunked body.
_FIELDS = 64 << 10
# Maximum length of the line before a chunk: its size and extensions, which are ignored.
_LINE = 4096
# Over TLS a single receive returns at most a record of 16 KiB; C gathers records faster than a Python loop.
_RECORDS = 128 << 10
# A thread sleeps until this many bytes have arrived, or for this many seconds: otherwise it wakes up for every few
# packets, which takes much of the processor's time if a slow link has many connections.
_BATCH, _PATIENCE = 256 << 10, 0.05
# With TLS, part of a record may already be inside OpenSSL; a batch leaves room for it.
_RECORD = 32 << 10
# Linux observes the option while it waits; other systems may only observe it while they receive.
_BATCHES = sys.platform == "linux"

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_DIGITS, _LENGTH = re.compile(r"[0-9]+"), re.compile(r"[0-9]{1,18}")
# Maximum number of digits in a message.
_SHOWN = 40
# Header fields that decide where a body ends.
_FRAMING = (b"transfer-encoding", b"content-length")
# Python stops reading header fields at a malformed line, and reports it only by these defects.
_LOST = (errors.MissingHeaderBodySeparatorDefect, errors.FirstHeaderLineIsContinuationDefect)


_slots: dict[int, threading.BoundedSemaphore] = {}


@contextmanager
def _decrypting() -> Iterator[None]:
    """Hold one of this process's slots for threads that decrypt: as many as processors.

    More threads would contend for the GIL at each record. A thread waits only a moment for a slot, because a server
    that sends tiny records can make others hold theirs for long. A forked child has slots of its own.
    """
    process = os.getpid()
    slots = _slots.get(process) or _slots.setdefault(process, threading.BoundedSemaphore(os.cpu_count() or 1))
    held = slots.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if held:
            slots.release()


def _arrived(connected: socket.socket) -> int:
    """Return the number of bytes that a read of a socket would return without waiting, on Linux."""
    from fcntl import ioctl  # not on Windows
    from termios import FIONREAD

    return int.from_bytes(ioctl(connected, FIONREAD, bytes(4)), sys.byteorder)


class BadResponse(http.client.HTTPException):
    """A response that breaks HTTP's framing rules. The message never quotes a header, because it may echo a secret."""


class _Head:
    """The stream of a head, which notes lines that Python and other readers may divide into fields differently."""

    def __init__(self, stream: Any) -> None:
        self.stream, self._name = stream, b""
        self.folded = (
            False  # a field of `_FRAMING` continues: some releases of Python keep the line break, others do not
        )
        self.divided = False  # a line has a carriage return inside, which ends a line for Python alone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def readline(self, limit: int = -1) -> bytes:
        """Read a line."""
        line: bytes = self.stream.readline(limit)
        self.divided |= b"\r" in line[:-2]
        if line[:1] in (b" ", b"\t"):
            self.folded |= self._name in _FRAMING
        else:
            self._name = line.partition(b":")[0].rstrip().lower()
        return line


class Response(http.client.HTTPResponse):
    """A response that receives its body piece by piece, so that an error loses no bytes."""

    tls = False  # whether bytes arrive in TLS records
    _heads = 0
    _left: int | None = None  # bytes left in the current chunk; None before the first chunk

    def _read_status(self) -> Any:
        """Skip 1xx responses, which a server may send unasked before the final response (RFC 9110, 15.2)."""
        while True:
            self._heads += 1
            if self._heads > _HEADS:
                raise http.client.HTTPException(f"more than {_HEADS} heads before the final response")
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200:
                return version, status, reason
            if status == http.client.SWITCHING_PROTOCOLS:
                raise BadResponse("the server switched protocols (101) without being asked to")
            self._skip_fields("a 1xx response")

    def begin(self) -> None:
        """Read the head and determine the length of the body."""
        if self.headers is not None:
            return
        head = self.fp = _Head(self.fp)
        try:
            super().begin()
        finally:
            if self.fp is head:  # neither closed nor replaced
                self.fp = head.stream
        if head.divided or any(isinstance(defect, _LOST) for defect in self.headers.defects):
            raise BadResponse("the head of the response has a line that is not a header field")
        codings, lengths = self.headers.get_all("Transfer-Encoding", []), self.headers.get_all("Content-Length", [])
        if self.status in (http.client.NO_CONTENT, http.client.NOT_MODIFIED):  # no body, whatever the fields say
            self.chunked = False
        elif head.folded:
            raise BadResponse("the Transfer-Encoding or Content-Length of the response is folded over several lines")
        elif codings:
            if [coding.strip(" \t").lower() for coding in codings] != ["chunked"]:
                raise BadResponse("the response has a Transfer-Encoding other than chunked")
            if lengths:
                raise BadResponse("the response has both Transfer-Encoding and Content-Length")
            self.chunked, self.length = True, None
        elif lengths:
            self._check_length(lengths)

    def _check_length(self, lengths: list[str]) -> None:
        length = lengths[0].strip(" \t")
        if len(lengths) > 1 or not _DIGITS.fullmatch(length):
            raise BadResponse("the Content-Length of the response is not a single number")
        if not _LENGTH.fullmatch(length):
            digits = f"{length[:_SHOWN]}..." if len(length) > _SHOWN else length
            raise BadResponse(f"the Content-Length of the response is {digits}, more than 18 digits")

    def receive(self, memory: memoryview) -> int:
        """Fill the beginning of memory with arrived bytes; return their number, 0 at the end."""
        if self.fp is None:
            return 0
        if self.chunked:
            return self._receive_chunked(memory)
        if self.length is None:
            count = self._receive(memory)
        else:
            memory = memory[: self.length]
            arrived = self._await_batch(len(memory))
            if self.tls and arrived > _RECORDS:
                with _decrypting():
                    count = self.fp.readinto(memory[: arrived - _RECORD])
            else:
                count = self._receive(memory)
        if self.length is not None:
            self.length -= count
            if not self.length:
                self.close()
        return count

    @contextmanager
    def hurried(self, seconds: float) -> Iterator[None]:
        """Limit the wait for bytes to this many seconds."""
        connected = self._connected()
        before = None if connected is None else connected.gettimeout()
        if connected is not None:
            connected.settimeout(seconds if before is None else min(seconds, before))
        try:
            yield
        finally:
            if connected is not None:
                connected.settimeout(before)

    def _connected(self) -> socket.socket | None:
        connected: socket.socket | None = getattr(getattr(self.fp, "raw", None), "_sock", None)
        return connected

    def _await_batch(self, size: int) -> int:
        """Wait a moment for a batch, if the next ``size`` bytes of the body are so many; return what has arrived."""
        connected = self._connected() if _BATCHES and size >= _BATCH + _RECORD else None
        # TLS to a proxy inside TLS has a socket-like object without options.
        if not isinstance(connected, socket.socket) or not connected.gettimeout():
            return 0
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _BATCH)
        try:
            wait_for_read(connected, _PATIENCE)
        finally:  # reads wait for any byte
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return _arrived(connected) if self.tls else 0

    def _receive(self, memory: memoryview) -> int:
        count: int = self.fp.readinto(memory[:_RECORDS]) if self.tls else self.fp.readinto1(memory)
        return count

    def _receive_chunked(self, memory: memoryview) -> int:
        if not self._left:
            self._left = self._next_chunk()
            if not self._left:
                self._skip_fields("the trailers of the response")
                self.close()
                return 0
        count = self._receive(memory[: self._left])
        if not count:
            raise http.client.IncompleteRead(b"")
        self._left -= count
        return count

    def _next_chunk(self) -> int:
        """Return the size of the next chunk, 0 after the last chunk."""
        if self._left is not None:
            end = self.fp.read(2)
            if len(end) < 2:
                raise http.client.IncompleteRead(b"")
            if end != b"\r\n":
                raise BadResponse("a chunk of the response is longer than its size")
        line = self.fp.readline(_LINE + 1)
        if not line.endswith(b"\n") and len(line) <= _LINE:
            raise http.client.IncompleteRead(b"")
        size = _SIZE.fullmatch(line)
        if size is None:
            raise BadResponse("a chunk of the response has no size")
        return int(size[1], 16)

    def _skip_fields(self, owner: str) -> None:
        """Skip lines up to and including an empty line."""
        left = _FIELDS
        while True:
            line = self.fp.readline(left + 1)
            left -= len(line)
            if left < 0:
                raise BadResponse(f"{owner}: more than {_FIELDS:,} bytes of header fields")
            if line in (b"\r\n", b"\n"):
                return
            if not line.endswith(b"\n"):
                raise http.client.IncompleteRead(b"")
