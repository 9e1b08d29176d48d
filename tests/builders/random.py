"""Random data for tests: one generator, which tests/conftest.py seeds with the id of each test, fixture and module."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

rng = np.random.default_rng()


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed the generator with a name, and restore its state at the end."""
    state = rng.bit_generator.state
    rng.bit_generator.state = np.random.PCG64(zlib.crc32(name.encode())).state
    try:
        yield
    finally:
        rng.bit_generator.state = state
