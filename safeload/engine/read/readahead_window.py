"""Read small tensors of an open file one at a time, reading ahead if they are requested in the order of the file."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, array_over
from ...base.native import ffi, lib, pointer, short
from ...base.table import Entry
from ...stores.local import LocalStore
from ..run.jobs import read_plain
from ..run.memory import ALIGNMENT
from ..run.weight_file import WeightFile

# Bytes to read ahead, and the largest tensor to copy from the window. A system call takes as long as copying 8 KiB.
_SIZE = 64 << 10
_LARGEST = 16 << 10


# First byte of a window in the file, one past the last, and its memory.
_Content = tuple[int, int, Any]


class Window:
    """Small tensors of a file with a `Table.plain` table. Any thread may use it.

    If a tensor begins at the end of the last tensor, or near the end of the file, a window of the file is read, and
    tensors are copied from the window. It does not keep the file open.
    """

    def __init__(self) -> None:
        self._content: _Content = 0, 0, None  # replaced as a whole, so that other threads never see a mixture
        self._next = -1  # end of the last tensor

    def tensor(self, file: WeightFile, index: int, entry: Entry) -> Array:
        """Return a tensor in its own memory; the file must not change between calls.

        Raises:
            FormatError: the file ends too early.
            OSError: the file cannot be read.
        """
        number, shape, begin, end = entry
        content = self._content
        follows, self._next = begin == self._next, end
        if not (content[0] <= begin and end <= content[1]):
            rest = file.size - begin
            if end - begin > _LARGEST or not (follows or end - begin < rest <= _SIZE):
                return read_plain(file, index, entry)
            window = _read(file, begin)
            if window is None:
                return read_plain(file, index, entry)
            content = self._content = window
        return np.array(array_over(content[2], dtypes.array_dtype(number), shape, begin - content[0]))


def _read(file: WeightFile, begin: int) -> _Content | None:
    """Read the window that begins with a tensor; None if it cannot be read."""
    store = file.store
    if not isinstance(store, LocalStore):
        return None
    begin -= begin % ALIGNMENT  # aligned tensors of the file are aligned in the window
    memory = np.empty(min(_SIZE, file.size - begin), np.uint8)
    address = pointer(ffi.from_buffer(memory))
    if short.sl_file_read(store.descriptor, begin, address, memory.size, None) != lib.SL_OK:
        return None
    return begin, begin + memory.size, memory
