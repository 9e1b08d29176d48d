"""HTTP/1.1 answers, read strictly: whatever leaves open where a body begins or ends is an error."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from contextlib import contextmanager
from email import errors
from typing import Any

# A server may send 1xx answers forever; give up after this many heads.
_HEADS = 10
# Bytes of the fields behind a 1xx answer, and of the trailers behind a chunked body.
_FIELDS = 64 << 10
# Bytes of the line before a chunk: its size and extensions, which are ignored.
_LINE = 4096
# One receive over TLS returns a record of at most 16 KiB; C collects several of them faster than a Python loop.
_RECORDS = 128 << 10

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LENGTH = re.compile(r"[0-9]{1,18}")
# Python stops reading the fields at a line that is not one, and says so only here.
_LOST = (errors.MissingHeaderBodySeparatorDefect, errors.FirstHeaderLineIsContinuationDefect)


class BadAnswer(http.client.HTTPException):
    """An answer that breaks HTTP's rules on framing. Its text quotes no header, which may echo a secret."""


class Response(http.client.HTTPResponse):
    """An answer whose body is received piece by piece, so that an error loses nothing that has arrived."""

    tls = False  # whether bytes arrive in records
    _heads = 0
    _left: int | None = None  # bytes of the current chunk; None before the first one

    def _read_status(self) -> Any:
        """Skip 1xx answers, which may precede the answer although no request asks for them (RFC 9110, 15.2)."""
        while True:
            self._heads += 1
            if self._heads > _HEADS:
                raise http.client.HTTPException(f"more than {_HEADS} heads before the answer")
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200:
                return version, status, reason
            if status == http.client.SWITCHING_PROTOCOLS:
                raise BadAnswer("the server switches protocols (101), although it was not asked to")
            self._skip_fields("a 1xx answer")

    def begin(self) -> None:
        """Read the head, and find out how long the body is."""
        if self.headers is not None:
            return
        super().begin()
        if any(isinstance(defect, _LOST) for defect in self.headers.defects):
            raise BadAnswer("the head of the answer has a line without a header field")
        codings, lengths = self.headers.get_all("Transfer-Encoding", []), self.headers.get_all("Content-Length", [])
        if self.status in (http.client.NO_CONTENT, http.client.NOT_MODIFIED):  # no body, whatever the fields say
            self.chunked = False
        elif codings:
            if [coding.strip(" \t").lower() for coding in codings] != ["chunked"]:
                raise BadAnswer("the answer has a Transfer-Encoding other than chunked")
            if lengths:
                raise BadAnswer("the answer has both Transfer-Encoding and Content-Length")
            self.chunked, self.length = True, None
        elif lengths and (len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0].strip(" \t"))):
            raise BadAnswer("the Content-Length of the answer is not one number")

    def receive(self, memory: memoryview) -> int:
        """Fill the beginning of memory with bytes that have arrived and return their number, 0 at the end."""
        if self.fp is None:
            return 0
        if self.chunked:
            return self._receive_chunked(memory)
        count = self._receive(memory if self.length is None else memory[: self.length])
        if self.length is not None:
            self.length -= count
            if not self.length:
                self.close()
        return count

    @contextmanager
    def hurried(self, seconds: float) -> Iterator[None]:
        """Wait for bytes at most this long."""
        socket = getattr(getattr(self.fp, "raw", None), "_sock", None)
        before = None if socket is None else socket.gettimeout()
        if socket is not None:
            socket.settimeout(seconds if before is None else min(seconds, before))
        try:
            yield
        finally:
            if socket is not None:
                socket.settimeout(before)

    def _receive(self, memory: memoryview) -> int:
        count: int = self.fp.readinto(memory[:_RECORDS]) if self.tls else self.fp.readinto1(memory)
        return count

    def _receive_chunked(self, memory: memoryview) -> int:
        if not self._left:
            self._left = self._next_chunk()
            if not self._left:
                self._skip_fields("the trailers of the answer")
                self.close()
                return 0
        count = self._receive(memory[: self._left])
        if not count:
            raise http.client.IncompleteRead(b"")
        self._left -= count
        return count

    def _next_chunk(self) -> int:
        """Return the size of the next chunk, 0 behind the last one."""
        if self._left is not None:
            end = self.fp.read(2)
            if len(end) < 2:
                raise http.client.IncompleteRead(b"")
            if end != b"\r\n":
                raise BadAnswer("a chunk of the answer is longer than its size says")
        line = self.fp.readline(_LINE + 1)
        if not line.endswith(b"\n") and len(line) <= _LINE:
            raise http.client.IncompleteRead(b"")
        size = _SIZE.fullmatch(line)
        if size is None:
            raise BadAnswer("a chunk of the answer has no size")
        return int(size[1], 16)

    def _skip_fields(self, owner: str) -> None:
        """Read lines up to an empty one."""
        left = _FIELDS
        while True:
            line = self.fp.readline(left + 1)
            left -= len(line)
            if left < 0:
                raise BadAnswer(f"{owner}: more than {_FIELDS:,} bytes of header fields")
            if line in (b"\r\n", b"\n"):
                return
            if not line.endswith(b"\n"):
                raise http.client.IncompleteRead(b"")
