"""Random data for tests: one generator, which tests/conftest.py seeds with the id of each test, fixture and module."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

# Names to seed with, the innermost last, and the generators of those that have drawn a number.
_seeds: list[str] = [""]
_generators: list[np.random.Generator | None] = [None]


class _Seeded:
    """NumPy's generator of the innermost name; made when it first draws, because few of the many names ever do."""

    def __getattr__(self, name: str) -> Any:
        generator = _generators[-1]
        if generator is None:
            generator = _generators[-1] = np.random.Generator(np.random.PCG64(zlib.crc32(_seeds[-1].encode())))
        return getattr(generator, name)


if TYPE_CHECKING:
    rng = np.random.default_rng()
else:
    rng = _Seeded()


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed the generator with a name, and return to the numbers of the outer name at the end."""
    _seeds.append(name)
    _generators.append(None)
    try:
        yield
    finally:
        _seeds.pop()
        _generators.pop()
