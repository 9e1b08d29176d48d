"""Reads small tensors of an open file one by one; those that are asked for in the order of the file are read ahead."""

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

# Bytes that are read ahead, and the largest tensor that is copied from them. A call of the system takes as long as
# copying 8 KiB.
_SIZE = 64 << 10
_LARGEST = 16 << 10


# First byte of a window in the file, one past the last, and memory that holds them.
_Held = tuple[int, int, Any]


class Window:
    """Small tensors of a file whose table is `Table.plain`. Any thread may use it.

    Once a tensor begins where the one before it ended, or if little follows it, a window of the file is read, and what
    lies in it is copied from there. It does not keep the file open.
    """

    def __init__(self) -> None:
        self._held: _Held = 0, 0, None  # replaced as a whole: other threads see one or the other
        self._next = -1  # where a tensor that follows the last one begins

    def tensor(self, file: WeightFile, index: int, entry: Entry) -> Array:
        """One tensor in memory of its own.

        Args:
            file: the same in every call.
            index: of the tensor.
            entry: that of the table.

        Raises:
            FormatError: the file ends too early.
            OSError: the file cannot be read.
        """
        number, shape, begin, end = entry
        held = self._held
        follows, self._next = begin == self._next, end
        if not (held[0] <= begin and end <= held[1]):
            rest = file.size - begin
            if end - begin > _LARGEST or not (follows or end - begin < rest <= _SIZE):
                return read_plain(file, index, entry)
            read = _read(file, begin)
            if read is None:
                return read_plain(file, index, entry)
            held = self._held = read
        shown = array_over(held[2], dtypes.array_dtype(number), shape, begin - held[0])
        return np.array(shown)


def _read(file: WeightFile, begin: int) -> _Held | None:
    """A window that begins with a tensor; None where it cannot be read."""
    store = file.store
    if not isinstance(store, LocalStore):
        return None
    begin -= begin % ALIGNMENT  # what is aligned in the file is aligned in the window
    memory = np.empty(min(_SIZE, file.size - begin), np.uint8)
    address = pointer(ffi.from_buffer(memory))
    if short.sl_file_read(store.descriptor, begin, address, memory.size, None) != lib.SL_OK:
        return None
    return begin, begin + memory.size, memory
