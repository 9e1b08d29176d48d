"""Compute the SHA-256 of a file on a separate thread while the file is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from ...base.native import ffi

# Hashing fewer bytes takes less time than handing them to a thread.
_ALONE = 1 << 20


class Digest:
    """SHA-256 of consecutive memory. Leaving the ``with`` block ends its thread."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "safeload-digest")  # starts with the first large memory
        self._running: Future[None] | None = None

    def begin(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Add memory, as pairs of address and size in bytes. It must not change until `wait` returns."""
        if sum(size for _, size in pieces) < _ALONE:
            self._add(pieces)
            return
        self._running = self._thread.submit(self._add, pieces)

    def _add(self, pieces: Sequence[tuple[int, int]]) -> None:
        for address, size in pieces:
            if size:
                self._digest.update(ffi.buffer(ffi.cast("char *", address), size))

    def wait(self) -> None:
        """Wait until all memory is hashed."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal digits."""
        self.wait()
        return self._digest.hexdigest()

    def __enter__(self) -> Digest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
