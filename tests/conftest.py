import signal
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell has background jobs ignore SIGINT, and so would the tests of Ctrl-C and the programs they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data() -> Path:
    return HERE / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = HERE.parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here: the larger real files live outside the repository")
    return folder
