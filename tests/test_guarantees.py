"""docs/guarantees.md: every row is complete, every test that it names exists. And that no framework is imported."""

import ast
import re
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from builders.paths import DATA, ROOT, TESTS

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

PAGE = ROOT / "docs" / "guarantees.md"
HEAD = ["guarantee", "scope", "test"]
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows_of(page):
    """The cells of each row of the page's tables, and the names of their columns."""
    rows, heads, previous = [], [], ""
    for line in page.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not previous:
                heads.append(cells)
            elif set(line) - set("|-"):
                rows.append(cells)
        previous = line.strip()
    return heads, rows


def faults_of(page):
    """What is wrong with the page: rows that lack something, tests that there are not, rows that are there twice."""
    heads, rows = rows_of(page)
    faults = [f"columns {head}" for head in heads if head != HEAD]
    seen = set()
    for cells in rows:
        if len(cells) != 3 or not all(cells):
            faults.append(f"not three cells: {cells}")
            continue
        named = TEST.findall(cells[2])
        if TEST.sub("", cells[2]).strip(", ") or not named:
            faults.append(f"not only tests: {cells[2]}")
        faults += [f"no such test: {file}::{name}" for file, name in named if name not in names_in(file)]
        if cells[2] in seen:
            faults.append(f"twice: {cells[2]}")
        seen.add(cells[2])
    return faults


@cache
def names_in(file):
    path = TESTS / file
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_guarantee_has_a_scope_and_a_test_that_exists():
    page = PAGE.read_text("utf-8")
    heads, rows = rows_of(page)
    assert len(heads) == len(re.findall("^## ", page, re.MULTILINE))
    assert len(rows) > 40
    assert faults_of(page) == []


GOOD = "`test_guarantees.py::test_a_bad_page_is_seen`"
TABLE = f"\n| {' | '.join(HEAD)} |\n|---|---|---|\n"


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (f"{TABLE}| a | b | {GOOD} |\n", None),
        (f"{TABLE}| a | | {GOOD} |\n", "not three cells"),
        (f"{TABLE}| a | {GOOD} |\n", "not three cells"),
        (f"{TABLE}| a | b | |\n", "not three cells"),
        (f"{TABLE}| a | b | by hand |\n", "not only tests"),
        (f"{TABLE}| a | b | {GOOD} and by hand |\n", "not only tests"),
        (f"{TABLE}| a | b | `test_guarantees.py::test_that_is_not_there` |\n", "no such test"),
        (f"{TABLE}| a | b | `test_nowhere.py::test_x` |\n", "no such test"),
        (f"{TABLE}| a | b | {GOOD} |\n| c | d | {GOOD} |\n", "twice"),
        ("\n| promise | test |\n|---|---|\n", "columns"),
    ],
)
def test_a_bad_page_is_seen(page, fault):
    found = faults_of(page)
    assert bool(found) == (fault is not None), found
    assert fault is None or fault in found[0]


ASKED = """
import sys
class Watch:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.split(".")[0])
sys.meta_path.insert(0, Watch())
import safeload
for path in sys.argv[1:]:
    with safeload.open(path) as checkpoint:
        assert checkpoint.load(backend="pread"), path
        for name in checkpoint:
            checkpoint[name]
print(*Watch.asked)
"""


def test_no_framework_is_imported(tmp_path):
    """Nor asked for: the machine that runs this has no torch."""
    array = np.ones((2, 32), np.float32)
    for suffix in ("safetensors", "gguf", "npz"):
        safeload.convert({"w": array}, tmp_path / f"x.{suffix}")
    safeload.convert({"w": array.astype(np.float16)}, tmp_path / "x.bin", format="moon")
    np.save(tmp_path / "x.npy", array)
    files = [*tmp_path.iterdir(), DATA / "torch" / "checkpoint.pt", DATA / "torch" / "simple_legacy.pt"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", ASKED, *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    asked = set(done.stdout.split())
    assert "numpy" in asked
    assert not asked & {"torch", "jax", "jaxlib", "tensorflow", "safetensors", "gguf", "transformers"}
