"""Random data for tests: one generator, which tests/conftest.py seeds with the id of each test, fixture and module."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

# Names to seed with, the innermost last; a name that has drawn a number has made way for its generator.
_seeds: list[str | np.random.Generator] = [""]


class _Seeded:
    """NumPy's generator of the innermost name; made when it first draws, because few of the many names ever do."""

    def __getattr__(self, name: str) -> Any:
        seed = _seeds[-1]
        if isinstance(seed, str):
            seed = _seeds[-1] = np.random.Generator(np.random.PCG64(zlib.crc32(seed.encode())))
        return getattr(seed, name)


if TYPE_CHECKING:
    rng = np.random.default_rng()
else:
    rng = _Seeded()


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed the generator with a name, and return to the numbers of the outer name at the end."""
    _seeds.append(name)
    try:
        yield
    finally:
        _seeds.pop()
