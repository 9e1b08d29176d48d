"""The speed gate: the working tree against a commit, row by row.

    python benches/gate.py afac4402                     # all rows, about twelve minutes
    python benches/gate.py HEAD --rows 'open*' 'GPTQ'   # the rows that a change touches
    python benches/gate.py HEAD --plant 0.25            # every row of the tree slower by a quarter: each must lose

Both sides are built beside each other from what git tracks. A row runs in 12 fresh processes a side, alternately; each
reports the least of five repeats, and the least of a side counts. A row loses if the tree takes more than its limit
(1.05 if bound by calls, 1.15 by memory or disk) and more than 3 microseconds longer; a loser is measured again with 24
processes a side, and counts if it loses again. Rows of the Hub also compare requests and bytes, which may not grow.

Exits with 1 if a row lost.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gate_inputs
from gate_rows import REPOSITORY, ROWS, SLACK, Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = ("safeload", "csrc", "setup.py", "pyproject.toml", "README.md")
PROCESSES, AGAIN = 12, 24
LATENCY = 0.005  # seconds before each answer of the Hub
PROCESSOR = 1.15  # limit of the processor time of a remote row


def git(*arguments: str) -> bytes:
    """Return the output of git, run in the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def build(name: str, commit: str | None) -> Path:
    """Make a side: the sources of a commit, or of the working tree, with a C core of their own."""
    folder = gate_inputs.FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if commit is None:
        listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES).split(b"\0")
        names = [os.fsdecode(entry) for entry in listed if entry and (ROOT / os.fsdecode(entry)).exists()]
        for entry in names:
            (folder / entry).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / entry, folder / entry)
    else:
        archive = git("archive", commit, "--", *SOURCES)
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    digest = hashlib.sha256((folder / "setup.py").read_bytes())
    for path in sorted((folder / "csrc").rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    kept = gate_inputs.FOLDER / "cores" / digest.hexdigest()[:16]
    if not kept.is_dir():
        build_ext = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build_ext, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kept.mkdir(parents=True)
        for library in (folder / "safeload").glob("_core.*"):
            shutil.copy2(library, kept)
    for library in kept.iterdir():
        shutil.copy2(library, folder / "safeload")
    compileall.compile_dir(folder / "safeload", quiet=1)
    return folder


@contextmanager
def hub(folder: Path) -> Iterator[Any]:
    """Serve a folder as a model of the tests' Hub; yield a function that returns the counts since its last call."""
    environment = {**os.environ, "PYTHONPATH": f"{gate_inputs.FOLDER / 'base'}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "builders.hub", str(folder), REPOSITORY]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    os.environ["GATE_HUB"] = server.stdout.readline().strip()

    def counted() -> dict[str, int]:
        server.stdin.write(json.dumps({"latency": LATENCY}) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    try:
        yield counted
    finally:
        server.stdin.close()
        server.wait(10)


def run(row: Row, side: Path, counted: Any, planted: float) -> dict[str, float]:
    """Measure a row once, in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(side), "GATE_PLANT": str(planted), "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(HERE / "gate_rows.py"), row.name, str(gate_inputs.FOLDER / "inputs")]
    if "Hub" in row.name:
        counted()
    # Not in the repository, where the working tree would be found first.
    done = subprocess.run(command, env=environment, cwd=os.sep, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    if "Hub" in row.name:
        counts = counted()
        result |= {key: counts[key] / result["calls"] for key in ("requests", "sent")}
    return result


def compare(row: Row, sides: dict[str, Path], processes: int, counted: Any, planted: float) -> dict[str, Any]:
    """Run both sides of a row alternately and return the least figures of each, and why the tree loses."""
    least: dict[str, dict[str, float]] = {name: {} for name in sides}
    for turn in range(processes):
        for name in sorted(sides, reverse=turn % 2 == 1):
            result = run(row, sides[name], counted, planted if name == "tree" else 0.0)
            for figure, value in result.items():
                least[name][figure] = min(value, least[name].get(figure, value))
    base, tree = least["base"], least["tree"]
    lost = []
    if tree["seconds"] > base["seconds"] * row.limit and tree["seconds"] - base["seconds"] > SLACK:
        lost.append("time")
    if "requests" in tree:
        lost += [figure for figure in ("requests", "sent") if tree[figure] > base[figure] * 1.001]
        if tree["processor"] > base["processor"] * PROCESSOR:
            lost.append("processor time")
    return {"row": row.name, "limit": row.limit, "base": base, "tree": tree, "lost": lost}


def line(result: dict[str, Any]) -> str:
    """A row of the table."""
    base, tree = result["base"]["seconds"], result["tree"]["seconds"]
    text = f"{result['row']:<28} {base * 1e6:12.1f} {tree * 1e6:12.1f} us  {tree / base:6.3f}  <= {result['limit']:.2f}"
    if "requests" in result["tree"]:
        for figure in ("requests", "sent", "processor"):
            text += f"  {figure} {result['base'][figure]:.4g} {result['tree'][figure]:.4g}"
    return text + (f"  LOST: {', '.join(result['lost'])}" if result["lost"] else "")


def main() -> int:
    """Build both sides, run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="what the tree is compared with (default: HEAD)")
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", default=["*"], help="names of rows, or shell patterns")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"a side, at first (default: {PROCESSES})")
    parser.add_argument("--plant", type=float, default=0.0, metavar="SHARE", help="make the tree slower by this share")
    parser.add_argument("--itself", action="store_true", help="compare the commit with itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all rows")
    options = parser.parse_args()
    rows = [row for row in ROWS if any(fnmatchcase(row.name, pattern) for pattern in options.rows)]
    if not rows:
        parser.error(f"no row is called {', '.join(options.rows)}; rows: {', '.join(row.name for row in ROWS)}")
    started = time.monotonic()
    sides = {"base": build("base", options.commit), "tree": build("tree", options.commit if options.itself else None)}
    gate_inputs.make(sides["tree"])  # the builders of the tests know the modules of the tree alone
    results, lost = [], []
    with hub(gate_inputs.FOLDER / "inputs" / "hub") as counted:
        for row in rows:
            if row.needs and find_spec(row.needs) is None:
                print(f"{row.name:<28} not measured: {row.needs} is not installed", flush=True)
                continue
            result = compare(row, sides, options.processes, counted, options.plant)
            print(line(result), flush=True)
            if result["lost"]:
                result = compare(row, sides, AGAIN, counted, options.plant)
                print(line(result) + "  (again)", flush=True)
            results.append(result)
            lost += [row.name] if result["lost"] else []
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    minutes = (time.monotonic() - started) / 60
    print(f"{len(results)} rows, {len(lost)} lost, {minutes:.1f} minutes" + "".join(f"\n  {name}" for name in lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
