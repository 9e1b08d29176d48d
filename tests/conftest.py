"""Fixtures of all tests, and what a parametrized case is called."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.paths import DATA, SHARED


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell has background jobs ignore SIGINT, and so would the tests of Ctrl-C and the programs they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not here: the larger real files live outside the repository")
    return SHARED


# Ids of cases: readable in a terminal, and the same in every run; test_suite.py holds them to a line.
MOST_OF_A_TEXT = 32
MOST_BYTES = 12


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Long texts and bytes are cut; where that makes two ids the same, pytest numbers them."""
    if isinstance(val, bytes | bytearray) and len(val) > MOST_BYTES:
        return f"{argname} of {len(val)} bytes"
    if isinstance(val, str) and len(text := ascii(val)[1:-1]) > MOST_OF_A_TEXT:
        return f"{text[: MOST_OF_A_TEXT - 3]}..."
    return None


def pass_over() -> None:
    """What was made so far stays to the end: collections of garbage, of which some tests ask for many, pass it over."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    pass_over()


@pytest.fixture(scope="module", autouse=True)
def pass_over_reports() -> Iterator[None]:
    """pytest keeps a report of every test, and there are 15,000."""
    yield
    pass_over()
