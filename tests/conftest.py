import signal
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
