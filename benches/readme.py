"""Writes the measured rows of README.md from BENCHMARKS.md, so that no number stands in two places by hand.

python benches/readme.py         # after report.py; tests/test_readme.py fails where this has been forgotten
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Job, as a shell pattern, and peer of a row of BENCHMARKS.md, and what README.md calls them ("": as there). One of them
# is a loss.
ROWS = (
    (
        "load 2.5 GB bf16 as f32",
        "safetensors.numpy.load_file, astype",
        "load 2.5 GB of bf16 as f32",
        "safetensors, astype",
    ),
    (
        "1 GB of an fp8 folder as f32",
        "numpy.memmap, astype, times the scales",
        "1 GB of fp8 with block scales as f32",
        "numpy",
    ),
    (
        "2.5 GB bf16 folder to q4_0",
        "safetensors.numpy, astype, gguf-py quantize",
        "2.5 GB of bf16 to Q4_0",
        "safetensors, gguf-py",
    ),
    (
        "load_file of 100,000 tensors, mmap",
        "safetensors.numpy.load_file",
        "load 100,000 tensors",
        "safetensors",
    ),
    ("the worst of * cells: *", "safetensors", "", "safetensors"),
)
BEGIN, END = "<!-- measured: benches/readme.py -->", "<!-- end -->"


def table(benchmarks: str) -> str:
    """The rows as a table of Markdown.

    Raises:
        KeyError: BENCHMARKS.md has no such row.
    """
    found = {}
    for line in benchmarks.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7:
            found.setdefault((cells[0], cells[2]), cells)

    def row(pattern: str, peer: str) -> list[str]:
        for (job, whose), cells in found.items():
            if whose == peer and fnmatchcase(job, pattern):
                return cells
        raise KeyError(pattern)

    lines = ["| job | safeload | peer | | ratio |", "|---|---|---|---|---|"]
    for job, peer, text, short in ROWS:
        cells = row(job, peer)
        lines.append(f"| {text or cells[0]} | {cells[1]} | {short} | {cells[3]} | {cells[4].partition(' (')[0]}x |")
    return "\n".join(lines)


def updated(readme: str, benchmarks: str) -> str:
    """README.md with new rows."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table(benchmarks)}\n\n{END}", readme)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text("utf-8"), (ROOT / "BENCHMARKS.md").read_text("utf-8")), "utf-8")
