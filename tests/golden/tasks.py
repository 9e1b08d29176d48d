"""All parts of the golden run, and how one is run: in a folder of its own, with rows that no machine changes."""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from . import commands, errors, fixtures, reads, reports, writes
from .rows import Rows, escaped, normalised, of_error

# Optional packages that `.[test]` does not bring: with them some texts differ.
ABSENT = (
    "torch",
    "jax",
    "flax",
    "distributed",
    "obstore",
    "s3fs",
    "moto",
    "pandas",
    "polars",
    "IPython",
    "joblib",
    "model_signing",
    "OpenSSL",
)
ENVIRONMENT = {"COLUMNS": "80", "LINES": "24", "NO_COLOR": "1", "PYTHON_COLORS": "0", "TERM": "dumb"}
OTHERS = (
    "PYTHONDONTWRITEBYTECODE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "OLLAMA_MODELS",
    "PYTEST_ADDOPTS",
    "PYTHONWARNINGS",
)


class Task(NamedTuple):
    """A function of a folder whose rows have keys that begin with a prefix."""

    prefix: str
    rows: Callable[[Path], Rows]


@cache
def all_tasks() -> list[Task]:
    """Those that take longest first."""
    return [
        *(Task(errors.prefix_of(path), partial(errors.of_tests, path=path)) for path in errors.TESTS),
        Task("commands/", commands.of_calls),
        Task("commands/", commands.of_help),
        Task("errors/safetensors/", errors.of_cases),
        *(Task(f"writes/{case.name}", partial(writes.of_case, case)) for case in writes.all_cases()),
        *(Task(f"reads/{row.name}", partial(reads.of_fixture, row)) for row in (*fixtures.REAL, *fixtures.BUILT)),
        *(Task(f"reads/{row.name}", partial(reads.of_model, row)) for row in fixtures.MODELS),
        *(Task(f"reads/lora/{name}", partial(reads.of_adapter, name)) for name in fixtures.ADAPTERS),
        *(Task(f"reports/{name}/", partial(reports.of_fixture, name)) for name in reports.NAMES),
        *(Task(f"reports/damaged/{d.__name__}/", partial(reports.of_damage, d)) for d in reports.DAMAGES),
        *(Task(f"reports/{name}/", function) for name, function in reports.OTHERS.items()),
    ]


def begin() -> None:
    """Make a process ready: nothing of the user's settings, no waiting for the disk."""
    for name in OTHERS:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]
    os.fsync = os.fdatasync = lambda descriptor: None


def run(number: int, folder: str) -> list[tuple[str, str]]:
    """The rows of a task."""
    task = all_tasks()[number]
    work = Path(tempfile.mkdtemp(dir=folder)).resolve()
    os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = str(work / "home")
    os.chdir(work)
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("safeload").handlers[:] = [handler]
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found += task.rows(work)
        except Exception as error:
            found.append((f"{task.prefix}/failed", of_error(error)))
    told += [f"{entry.category.__name__}: {entry.message}" for entry in caught if entry.category is not ResourceWarning]
    found += [(f"{task.prefix.rstrip('/')}/told/{k}", text) for k, text in enumerate(dict.fromkeys(told), 1)]
    os.chdir(folder)
    return [(escaped(normalised(key, work)), escaped(normalised(value, work))) for key, value in found]
