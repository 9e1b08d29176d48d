"""zstd frames (RFC 8878) in stores: unpacked whole, or read forward in bounded memory.

Needs Python 3.14's `compression.zstd` or the package ``zstandard``; both are imported on first use.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..core.files import ByteStore, Memory
from ..core.forking import ProcessLock
from ..core.text import error_about, needed, show
from ..errors import FormatError, LimitError

# Bytes that a byte of a frame can stand for: blocks of 128 KiB take at least 4 bytes.
MAX_RATIO = 32_768
# Bytes of a frame, or of its content, read at a time; a read over the network is a request.
_STEP, _REMOTE_STEP = 256 << 10, 8 << 20
# Seconds to wait for the reader of earlier bytes, which usually comes at once.
_PATIENCE = 0.01
# Decompressors to keep, of any tensors.
_KEPT = 8


class _FrameBytes:
    """The bytes of a frame as a stream for a decompressor."""

    def __init__(self, store: ByteStore, begin: int, size: int) -> None:
        self._store = store
        self._at = begin
        self._end = begin + size
        self._step = _STEP if getattr(store, "here", True) else _REMOTE_STEP
        self._ahead = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        if not self._ahead and self._at < self._end:
            memory = bytearray(min(self._step, self._end - self._at))
            self._store.read_into(self._at, memory)
            self._at += len(memory)
            self._ahead = memoryview(memory)
        size = len(self._ahead) if size < 0 else size
        data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        return data


def reader() -> tuple[Callable[[Any], Any], tuple[type[Exception], ...]]:
    """Return a function from a stream to its decompressed stream, and its errors; ImportError without the package."""
    try:
        if sys.version_info >= (3, 14):
            from compression.zstd import ZstdError, ZstdFile

            return ZstdFile, (ZstdError, EOFError)
    except ImportError:
        pass  # a Python built without zstd
    zstandard = needed("zstandard", "checkpoints compressed with zstd need zstandard")
    return lambda stream: zstandard.ZstdDecompressor().stream_reader(stream), (zstandard.ZstdError,)


def decompressed(
    store: ByteStore, begin: int, size: int, limit: int, path: str, *, name: str | None = None
) -> bytearray:
    """Return the content of a frame."""
    read, errors = reader()
    content = bytearray()
    try:
        stream = read(_FrameBytes(store, begin, size))
        while piece := stream.read(min(_STEP, limit + 1 - len(content))):
            content += piece
            if len(content) > limit:
                text = f"its zstd frame holds more than {limit:,} bytes, the most that its shape needs"
                raise error_about(LimitError, text if name is None else f": {text}", path=path, tensor=name)
    except errors as error:
        raise _malformed(error, path, begin, name) from None
    return content


def _malformed(error: Exception, path: str, begin: int, name: str | None) -> FormatError:
    text = f": its zstd frame cannot be read: {show(str(error))}"
    return error_about(FormatError, text if name is not None else text[6:], path=path, offset=begin, tensor=name)


class _FrameReader:
    """A decompressor, its position, and the threads that wait for it."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.at = 0  # next byte of the stream
        self._turn = threading.Condition()
        self._busy = False
        self._waiting: list[int] = []  # offsets
        self._last = 0  # the thread that read before

    @contextmanager
    def turn(self, offset: int, size: int) -> Iterator[None]:
        """Wait until no other thread reads, and threads that read earlier bytes have read them."""
        with self._turn:
            self._waiting.append(offset)
            patient = self._last != threading.get_ident()
            try:
                while self._busy or offset != min(self._waiting) or (offset > self.at and patient):
                    before = self.at
                    if not self._turn.wait(_PATIENCE) and not self._busy and self.at == before:
                        patient = False
            finally:
                self._waiting.remove(offset)
            self._busy = True
            self._last = threading.get_ident()
        done = False
        try:
            yield
            done = True
        finally:
            with self._turn:
                if not done or self.at == size:
                    self.stream, self.at = None, 0
                self._busy = False
                self._turn.notify_all()

    def release(self) -> None:
        """Forget the decompressor unless it is in use; the next read begins again."""
        with self._turn:
            if not self._busy:
                self.stream, self.at = None, 0


class FrameStore:
    """The content (``size`` bytes) of a frame (``stored`` bytes) as a store, if it should not be in memory as a whole.

    Reads in ascending order decompress each byte once. A read of earlier bytes begins again at the start of the frame.
    Threads that read neighbouring parts take their turns in the order of the parts.
    """

    def __init__(
        self, store: ByteStore, begin: int, stored: int, size: int, path: str, *, kept: KeptFrames | None = None
    ) -> None:
        self.size = size
        self.version = (size,)
        self._frame = store, begin, stored
        self._path = path
        self._kept = kept
        self._readers: dict[int, _FrameReader] = {}  # by process, as `ProcessLock`

    @property
    def _own(self) -> _FrameReader:
        return self._readers.setdefault(os.getpid(), _FrameReader())

    def close(self) -> None:
        """Forget the decompressor unless a thread reads; the next read begins again."""
        self._own.release()

    def read_into(self, offset: int, memory: Memory) -> None:
        if self._kept is not None:
            self._kept.use(self)
        target = memoryview(memory).cast("B")  # type: ignore[arg-type]
        read, errors = reader()
        path, begin, own = self._path, self._frame[1], self._own
        with own.turn(offset, self.size):
            try:
                if own.stream is None or offset < own.at:
                    own.stream, own.at = read(_FrameBytes(*self._frame)), 0
                skipped = memoryview(bytearray(min(_STEP, max(0, offset - own.at))))
                while (filled := own.at - offset) < len(target):
                    into = skipped[:-filled] if filled < 0 else target[filled : filled + _STEP]
                    count = own.stream.readinto(into)
                    if not count:
                        raise FormatError(f"its zstd frame ends after {own.at:,} of {self.size:,} bytes", path, begin)
                    own.at += count
                if own.at == self.size and own.stream.read(1):
                    raise FormatError(f"its zstd frame holds more than {self.size:,} bytes", path, begin)
            except errors as error:
                raise _malformed(error, path, begin, None) from None


class KeptFrames:
    """Drops the decompressor unused for longest if a checkpoint has more than `_KEPT`."""

    def __init__(self) -> None:
        self._frames: OrderedDict[FrameStore, None] = OrderedDict()
        self._lock = ProcessLock()

    def use(self, frame: FrameStore) -> None:
        """Keep the state of a decompressor."""
        with self._lock.own:
            self._frames[frame] = None
            self._frames.move_to_end(frame)
            oldest = self._frames.popitem(last=False)[0] if len(self._frames) > _KEPT else None
        if oldest is not None:
            oldest.close()
