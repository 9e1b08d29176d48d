"""Importing safeload against importing numpy, and the start of the command, in fresh interpreters."""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compare import Comparison

ROUNDS = 40
COMMAND = Path(sys.executable).with_name("safeload")

_TIMED = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


@pytest.fixture(autouse=True)
def _byte_code(tmp_path_factory, monkeypatch):
    """Interpreters find byte code that the first of them has written: outside of the source tree."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp() / "byte-code"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Not in the repository, where the source tree would be found first.
    return subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, cwd=Path(sys.executable).parent
    )


def _seconds(module: str) -> float:
    """The import statement alone, as the interpreter's start is the same for both."""
    return float(_python("-c", _TIMED.format(module)).stdout)


def test_import(table, report) -> None:
    samples: dict[str, list[float]] = {"safeload": [], "numpy": []}
    for module in samples:
        _seconds(module)  # byte code written, files in the page cache
    order = list(samples)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for module in order:
            samples[module].append(_seconds(module))
    row = table.add("import safeload", "import numpy", Comparison(samples["safeload"], samples["numpy"]), at_most=1.15)
    report(lambda: _seconds("safeload"), [row], rounds=5)


def test_importtime(table) -> None:
    """The same by -X importtime, and what of ours is dear."""
    samples: dict[str, list[float]] = {"safeload": [], "numpy": []}
    parts: dict[str, list[int]] = {}
    for _ in range(ROUNDS // 2):
        for module, seconds in samples.items():
            text = _python("-X", "importtime", "-c", f"import {module}").stderr
            found = {name: int(total) for total, name in re.findall(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)", text)}
            seconds.append(found[module] / 1e6)
            for name in _outside_numpy(text) if module == "safeload" else ():
                parts.setdefault(name, []).append(found[name])
    comparison = Comparison(samples["safeload"], samples["numpy"])
    table.add("import safeload, -X importtime", "import numpy, -X importtime", comparison, at_most=1.15)
    dearest = sorted(((statistics.median(times), name) for name, times in parts.items()), reverse=True)[:12]
    print("\ncumulative us of what safeload imports beside numpy:", *(f"\n  {t:8.0f}  {name}" for t, name in dearest))


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not installed beside the interpreter")
@pytest.mark.parametrize(("arguments", "seconds"), [("--version", 0.12), ("--help", 0.12), ("info", 0.2)])
def test_the_start_of_the_command(table, n300, arguments, seconds) -> None:
    """The whole process, against a limit and beside Python with numpy, which `info` needs."""
    commands = {
        "ours": [str(COMMAND), arguments, *([str(n300)] if arguments == "info" else [])],
        "numpy": [sys.executable, "-c", "import numpy"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(ROUNDS // 2 + 1):
        for name in random.sample(list(commands), 2):
            started = time.perf_counter()
            subprocess.run(commands[name], check=True, stdout=subprocess.DEVNULL, cwd=os.sep)
            if turn:  # in the first round byte code is written
                samples[name].append(time.perf_counter() - started)
    job = f"safeload {arguments}" + (" of a file with 300 tensors" if arguments == "info" else "")
    limit = [seconds] * len(samples["ours"])
    table.add(job, f"limit: {seconds} s", Comparison(samples["ours"], limit), at_most=1)
    table.add(job, "limit: python -c 'import numpy'", Comparison(samples["ours"], samples["numpy"]))


def _outside_numpy(text: str) -> set[str]:
    """Modules that are imported below safeload but not below numpy. A module's line follows those of its imports."""
    found: set[str] = set()
    below: int | None = None  # numpy's indent while within its imports
    for indent, name in reversed(re.findall(r"\| +\d+ \| (\s*)(\S+)$", text, re.MULTILINE)):
        if below is not None and len(indent) <= below:
            below = None
        if name == "numpy":
            below = len(indent)
        if below is None:
            found.add(name)
    return found
