"""Keys of dicts and elements of sets in a pickle: the allowed values, and a limit for the time they take.

CPython's dicts and sets are tables with open addressing. Hashes of text and bytes depend on a random seed. Hashes of
numbers, and of tuples and frozensets of numbers, do not, so a file can choose colliding keys: their hashes are equal,
or share the bits that select a slot. A dict of n such keys takes n**2 steps.

This module limits the sum of these steps. Once a table has more than a few entries and a key has a predictable hash, we
maintain a copy of the table without keys and values, count each step in it, and refuse more than `MAX_STEPS` per key.
Integers in order (0, 1, 2, ...) never collide and cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import LimitError
from .machine import Fault, Inert, describe

# Maximum number of values in a dict key or set element: hashing a tuple visits each. Real keys are str and int.
MAX_KEY_VALUES = 100
# Tables up to this size are not watched, because the square of their size is small.
MAX_UNWATCHED = 64
# Maximum number of steps in a table per entry. Random hashes need 2, the worst regular hashes 57 (multiples of powers
# of two, fractions and addresses, 300,000 keys each).
MAX_STEPS = 100

_64_BITS = (1 << 64) - 1
# Linear probes before the next jump, in CPython's sets.
_LINEAR = 9

# The watched tables, by the id of their dict or set.
Watched = dict[int, "KeyTable"]


class KeyTable:
    """The occupied slots of a dict or set, as in Objects/dictobject.c and Objects/setobject.c."""

    __slots__ = ("_hashes", "_is_set", "_of", "_steps", "_used")

    def __init__(self, of: Any) -> None:
        self._of = of  # keeps the id from being reused
        self._is_set = type(of) is set
        self._hashes: list[int] = []
        self._used = bytearray(8)
        self._steps = 0
        for key in of:
            self.add(key)

    def add(self, key: Any, *, known: bool = False) -> None:
        """Count the steps of inserting a key; a ``known`` key takes steps but no slot."""
        hashed = hash(key) & _64_BITS
        slot = self._find(hashed)
        if self._steps > MAX_STEPS * (len(self._hashes) + MAX_UNWATCHED):
            raise Fault(f"keys with colliding hashes, after {len(self._hashes)} in one container", LimitError)
        if known:
            return
        self._used[slot] = 1
        self._hashes.append(hashed)
        count, size = len(self._hashes), len(self._used)
        if self._is_set:
            if count * 5 >= (size - 1) * 3:
                self._grow(count * (2 if count > 50_000 else 4) + 1)
        elif count >= size * 2 // 3:
            self._grow(count * 3)

    def _find(self, hashed: int) -> int:
        """Find the free slot for a hash, and count the steps."""
        used, mask = self._used, len(self._used) - 1
        slot, rest, steps = hashed & mask, hashed, 1
        while used[slot]:
            if self._is_set and slot + _LINEAR <= mask:
                free = used.find(0, slot, slot + _LINEAR + 1)
                if free >= 0:
                    slot = free
                    break
            rest >>= 5
            slot = (slot * 5 + rest + 1) & mask
            steps += 1
        self._steps += steps
        return slot

    def _grow(self, least: int) -> None:
        size = 8
        while size < least:
            size *= 2
        self._used = used = bytearray(size)
        before = self._steps  # CPython compares no keys when it resizes, and at least doubles the size
        for hashed in self._hashes:
            used[self._find(hashed)] = 1
            if self._steps - before > MAX_STEPS * (len(self._hashes) + MAX_UNWATCHED):
                raise Fault(f"keys with colliding hashes, {len(self._hashes)} in one container", LimitError)
        self._steps = before


def check_key(value: Any) -> bool:
    """Return True if the hash of a key or set element is predictable; raise `Fault` if the value cannot be a key."""
    kind = type(value)
    if kind is str or kind is bytes or kind is bool or value is None:
        return False
    if kind is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise Fault("an integer of more than 64 bits as a key", LimitError)
        return True
    if kind is float or kind is complex:
        return True
    if kind is tuple or kind is frozenset:
        _check_nested(value)
        return True
    if kind in (list, dict, set, bytearray):
        raise Fault(f"a {kind.__name__} as a key")
    return False  # an object of this package, hashed by its id


def _check_nested(value: Any) -> None:
    left, waiting = MAX_KEY_VALUES, [value]
    while waiting:
        inner = waiting.pop()
        left -= len(inner)
        if left < 0:
            raise Fault(f"a key of more than {MAX_KEY_VALUES} values", LimitError)
        for item in inner:
            if type(item) is tuple or type(item) is frozenset:
                left -= 1
                waiting.append(item)
            else:
                check_key(item)


def _watch(items: Any, key: Any, watched: Watched) -> None:
    """Check a key before it is put into a dict or set."""
    in_order = type(key) is int and 0 <= key < len(items) + 8
    predictable = not in_order and check_key(key)
    table = watched.get(id(items))
    if table is None:
        if not predictable or len(items) < MAX_UNWATCHED:
            return
        table = watched[id(items)] = KeyTable(items)
    table.add(key, known=type(items) is set and key in items)


def put(into: Any, pairs: list[Any], watched: Watched) -> None:
    """Set items (key, value, key, value, ...) of a dict or of an `Inert`."""
    items = into.items if type(into) is Inert else into
    if type(items) is not dict:
        raise Fault(f"items set in {describe(into)}, which is not a dict")
    if len(pairs) % 2:
        raise Fault(f"{len(pairs)} keys and values, which is an odd number")
    expected = len(items) + len(pairs) // 2
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if watched or type(key) is not str:
            _watch(items, key, watched)
        items[key] = value
    if len(items) != expected:
        raise Fault(f"a duplicate key in a dict, between {describe(pairs[0])} and {describe(pairs[-2])}")


def add(into: set[Any], values: Iterable[Any], watched: Watched) -> None:
    """Add elements to a set."""
    for value in values:
        _watch(into, value, watched)
        into.add(value)
