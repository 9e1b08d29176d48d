"""Rows of errors: what the tests of malformed files and of mistakes catch, and malformed safetensors files directly."""

import json
import os
import subprocess
import sys
from pathlib import Path

from builders import malformed
from builders.paths import ROOT

import safeload
import safeload.numpy

from .rows import Rows, of_error

TESTS = ("tests/test_mistakes.py", "tests/malformed")
# Its cases depend on the order of sets, and its errors are another reader's.
RANDOM = "tests/malformed/test_differential.py"


def prefix_of(path: str) -> str:
    """How keys of a test file or folder begin."""
    return f"errors/{path.removeprefix('tests/').removesuffix('.py')}/"


def of_tests(work: Path, path: str) -> Rows:
    """Rows that `recorder` writes while these tests run."""
    rows, folder = work / "rows", work / "tests"
    search = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "GOLDEN_ROWS": str(rows), "GOLDEN_FOLDER": str(folder), "PYTHONPATH": search}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "golden.recorder", f"--basetemp={folder}"]
    command += ["-p", "no:cacheprovider", f"--ignore={RANDOM}", path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    yield f"{prefix_of(path)}outcome", "passed" if done.returncode == 0 else done.stdout[-1500:]
    if rows.exists():
        for line in rows.read_text(encoding="utf-8").splitlines():
            yield tuple(json.loads(line))


def of_cases(work: Path) -> Rows:
    """Each malformed safetensors file through each door; the first says it, the others only where they differ."""
    path = work / "model.safetensors"
    doors = {
        "open": lambda: safeload.open(path),
        "load_file": lambda: safeload.numpy.load_file(path),
        "safe_open": lambda: safeload.safe_open(path, "np"),
        "load": lambda: safeload.numpy.load(path.read_bytes()),
        "deserialize": lambda: safeload.deserialize(path.read_bytes()),
    }
    for case in malformed.CASES:
        path.write_bytes(case.content)
        first = None
        for door, call in doors.items():
            text = caught(call)
            if text != first:
                yield f"errors/safetensors/{case.name}/{door}", text
            first = first or text


def caught(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{of_error(error)} offset {getattr(error, 'offset', None)}"
    return "no error"
