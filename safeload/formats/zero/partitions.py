"""Boxes of parameters in flat vectors: a parameter is a range of a vector that lies in several pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...stores.store import ByteStore
from ..boxed import Box, InFile


class FlatPiece(NamedTuple):
    """Consecutive elements of a vector."""

    store: ByteStore
    begin: int  # first byte in the store
    length: int  # in elements


class FlatVector:
    """A vector of elements in pieces, one after another."""

    def __init__(self, pieces: Sequence[FlatPiece], itemsize: int) -> None:
        self._pieces = [piece for piece in pieces if piece.length]
        self._itemsize = itemsize
        self._starts: list[int] = []
        self.count = 0
        for piece in self._pieces:
            self._starts.append(self.count)
            self.count += piece.length

    def boxes(self, first: int, count: int, at: int = 0) -> Iterator[Box]:
        """Yield the boxes of elements [first, first + count) of the vector; elements beyond its end have none."""
        end = first + count  # `at` is the position of `first` in the parameter
        k = max(0, bisect_right(self._starts, first) - 1)
        while first < end and k < len(self._pieces):
            store, begin, size = self._pieces[k]
            skipped = first - self._starts[k]
            part = min(end - first, size - skipped)
            if part > 0:
                yield Box((at,), (part,), InFile(store, begin + skipped * self._itemsize))
                first += part
                at += part
            k += 1
