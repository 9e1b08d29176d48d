"""Sets of files with numbers in their names: ``P-00001-of-00003.safetensors``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

# A name in a set: what comes before the numbers, the number, the number of files, the suffix.
PART = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})(\.[a-z]+)", re.ASCII | re.DOTALL)
# A set with more missing files is not listed: its names are wrong.
MOST_MISSING = 10_000


class NumberedFiles(NamedTuple):
    """Files with numbers in their names: ``P-00001-of-00003.safetensors``."""

    stem: str  # before the numbers
    total: str  # expected number of files, as the names give it
    suffix: str  # after the numbers
    files: dict[int, str]  # name by number

    @property
    def complete(self) -> bool:
        return len(self.files) == max(self.files) == int(self.total) and min(self.files) == 1

    def missing(self, limit: int = MOST_MISSING) -> list[str]:
        """Return the names of the first missing files."""
        width = len(self.total) if len(self.total) < 5 else 5
        numbers = (k for k in range(1, int(self.total) + 1) if k not in self.files)
        return [f"{self.stem}-{k:0{width}}-of-{self.total}{self.suffix}" for k in islice(numbers, limit)]

    @property
    def in_order(self) -> list[str]:
        return [self.files[number] for number in sorted(self.files)]


def sets_of(names: Sequence[str]) -> list[NumberedFiles]:
    """Group files with numbers in their names."""
    sets: dict[tuple[str, str, str], NumberedFiles] = {}
    for name in names:
        match = PART.fullmatch(name)
        if match is not None and int(match[3]) > 0:
            key = match[1], match[3], match[4]
            sets.setdefault(key, NumberedFiles(*key, {})).files[int(match[2])] = name
    return list(sets.values())
