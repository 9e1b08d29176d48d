"""Fixtures: the files, and the table that the terminal shows at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import files
import pytest
from compare import Comparison

PACKAGES = (
    "safeload",
    "safetensors",
    "numpy",
    "ml_dtypes",
    "torch",
    "gguf",
    "pywhispercpp",
    "runai-model-streamer",
    "fastsafetensors",
    "instanttensor",
    "huggingface_hub",
    "fsspec",
    "urllib3",
    "obstore",
)

_table = pytest.StashKey["Table"]()


class Table:
    """The rows of a run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []

    def point(self, picture: str, side: str, x: float, samples: list[float]) -> None:
        """Adds seconds of one side at one place of a picture (see report.py)."""
        self.points.append({"picture": picture, "side": side, "x": x, "samples": samples})

    def add(
        self,
        job: str,
        peer: str,
        comparison: Comparison,
        *,
        target: float | None = None,
        at_most: float | None = None,
        within: float | None = None,
        by: str = "median",
        unit: str = "s",
    ) -> dict[str, Any]:
        """Adds a row.

        Args:
            job: what was done.
            peer: against what; "limit: ..." for what the machine gives.
            comparison: samples of both.
            target: theirs by ours to be reached.
            at_most: ours by theirs not to be passed, where that is how one says it; the ratio is shown that way too.
            within: with a target of 1, seconds by which ours may be slower; 5 % it may be in any case. Of calls that
                take microseconds.
            by: "median" or "mean".
            unit: "s", or "B" for bytes.
        """
        ratio = comparison.ratio(by)
        low, high = comparison.spread
        reached = None
        if target is not None:
            reached = ratio >= target
        if within is not None:
            ours, theirs = (getattr(statistics, by)(side) for side in (comparison.ours, comparison.theirs))
            reached = ours <= max(theirs * 1.05, theirs + within)
        if at_most is not None:
            ratio, low, high = 1 / ratio, 1 / high, 1 / low
            reached = ratio <= at_most
        row = {
            "job": job,
            "ours": getattr(statistics, by)(comparison.ours),
            "peer": peer,
            "theirs": getattr(statistics, by)(comparison.theirs),
            "ratio": ratio,
            "spread": [low, high],
            "target": target if at_most is None else at_most,
            "at_most": at_most is not None,
            "within": within,
            "by": by,
            "unit": unit,
            "rounds": len(comparison.ours),
            "reached": reached,
            "samples": {"ours": comparison.ours, "theirs": comparison.theirs},
        }
        self.rows.append(row)
        return row

    def markdown(self) -> str:
        """The rows as a table."""
        head = ("job", "ours", "peer", "theirs", "ratio", "quartiles", "target", "reached")
        lines = [head, tuple("-" * len(title) for title in head)]
        for row in self.rows:
            sign = "<= " if row["at_most"] else ""
            lines.append(
                (
                    row["job"] + (" (mean)" if row["by"] == "mean" else ""),
                    _quantity(row["ours"], row["unit"]),
                    row["peer"],
                    _quantity(row["theirs"], row["unit"]),
                    "" if row["unit"] == "B" else _number(row["ratio"]),
                    "" if row["unit"] == "B" else "..".join(map(_number, row["spread"])),
                    "" if row["target"] is None else f"{sign}{row['target']:g}",
                    {True: "yes", False: "NO", None: ""}[row["reached"]],
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )


def _number(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _quantity(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / (1 << 20):.1f} MiB"
    for scale, name in ((1, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="file for rows and samples, instead of one named by the time")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_table] = Table()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[_table]
    if not table.rows and not table.points:
        return
    machine = _machine()
    text = table.markdown()
    terminalreporter.section("ours against peers (ratio: theirs / ours; with <= ours / theirs)")
    terminalreporter.write_line(", ".join(f"{key} {value}" for key, value in machine.items()))
    terminalreporter.write_line(text)
    path = config.getoption("--results") or files.CACHE / "results" / time.strftime("%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": table.rows, "points": table.points}, indent=1))
    terminalreporter.write_line(f"written to {path}")


def _machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                found["cpu"] = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    found["memory touched before each sample of a row of gigabytes"] = f"{files.hot_memory() / 1e9:.0f} GB"
    found["cpus"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    if hasattr(os, "getloadavg"):
        found["load average"] = f"{os.getloadavg()[0]:.1f}"
    return found | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    return request.config.stash[_table]


@pytest.fixture
def report(table: Table, benchmark: Any) -> Callable[..., None]:
    """Gives our side to pytest-benchmark too, so that its files and comparisons work, with our rows beside it."""

    def report(
        ours: Callable[[], Any],
        rows: list[dict[str, Any]],
        *,
        rounds: int,
        number: int = 1,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        for row in rows:
            kept = {key: value for key, value in row.items() if key not in ("samples", "job")}
            benchmark.extra_info[f"{row['job']} / {row['peer']} / {row['by']}"] = kept
        if prepare is None:
            benchmark.pedantic(ours, rounds=rounds, iterations=number)
        else:
            benchmark.pedantic(ours, setup=lambda: prepare() and None, rounds=rounds)

    return report


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    """Nothing that a bench times may write byte code into the source tree or warm up on the first use of clocks."""
    sys.dont_write_bytecode = True


@pytest.fixture(scope="session")
def n300() -> Path:
    return files.make("n300", files.small(300))


@pytest.fixture(scope="session")
def n100k() -> Path:
    return files.make("n100k", files.small(100_000))


@pytest.fixture(scope="session")
def n100k_by_layer() -> Path:
    return files.make("n100k-by-layer", files.small(100_000, by_name=False))


@pytest.fixture(scope="session")
def llama() -> Path:
    """2.47 GB of BF16."""
    path = files.make("llama-1b-bf16", files.llama_1b())
    if files.available_memory() < 4 * path.stat().st_size:
        pytest.skip("needs four times 2.5 GB of memory: the page cache, one result of each side, and room")
    files.warm(path)
    return path
