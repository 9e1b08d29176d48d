"""What a build needs and says, what goes into the source distribution, and versions that stand in two places."""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import PurePosixPath

import pytest
from builders.paths import ROOT

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MANIFEST = (ROOT / "MANIFEST.in").read_text("utf-8")
# What tests and builds leave in these folders.
LEFT_BEHIND = {".pyc", ".so", ".pyd"}
LEFT_FOLDERS = {"_build", "__pycache__", ".pytest_cache", ".hypothesis"}


@pytest.mark.skipif(sys.platform == "win32", reason="MSVC is found by setuptools, which has a message of its own")
@pytest.mark.parametrize("compiler", ["/nonexistent", "false"], ids=["no compiler", "a compiler that fails"])
def test_a_build_without_a_compiler_ends_by_saying_what_to_install(tmp_path, compiler):
    command = ["setup.py", "build", "--build-base", tmp_path]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "CC": compiler},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1
    assert "copying" not in done.stdout
    lines = done.stderr.strip().splitlines()
    assert any(line.startswith("error: ") and compiler in line for line in lines)
    assert any(line.startswith("safeload was not built: ") and "a C compiler" in line for line in lines)
    assert any("apt install gcc" in line for line in lines)
    assert "Traceback" not in done.stderr


def _taken(path):
    """Whether a rule of MANIFEST.in takes a file."""
    for line in MANIFEST.splitlines():
        rule, *patterns = line.split()
        if rule == "include" and any(path.match(f"/{pattern}") for pattern in patterns):
            return True
        below = rule == "recursive-include" and path.is_relative_to(f"/{patterns[0]}")
        if below and any(path.match(pattern) for pattern in patterns[1:]):
            return True
    return False


@pytest.mark.parametrize("folder", ["tests", "benches", "csrc", "docs"])
def test_the_source_distribution_takes_every_kind_of_file(folder):
    files = [path for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    kept = [path for path in files if path.suffix not in LEFT_BEHIND and not LEFT_FOLDERS & {*path.parts}]
    assert kept
    assert [path.name for path in kept if not _taken(PurePosixPath("/", path.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "path", ["/docs/_build/index.html", "/tests/__pycache__/conftest.pyc", "/safeload/_core.abi3.so"]
)
def test_the_source_distribution_takes_nothing_that_was_built(path):
    assert not _taken(PurePosixPath(path))


def test_an_installed_package_has_every_data_file_of_the_tree():
    folder = ROOT / "safeload"
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    patterns = re.search(r"package-data\]\nsafeload = (.*)\n", settings)[1]
    packaged = {path for pattern in json.loads(patterns) for path in folder.glob(pattern)}
    left = {*LEFT_BEHIND, ".py", ".md"}  # a README is for those who have the tree
    data = {path for path in folder.rglob("*.*") if path.suffix not in left and path.is_file()}
    assert packaged == data
    assert packaged
    installed = files("safeload")
    assert [path for path in sorted(data) if not (installed / path.relative_to(folder).as_posix()).is_file()] == []


def test_no_object_of_a_data_file_has_a_key_twice():
    def unique(pairs):
        assert len(dict(pairs)) == len(pairs), [key for key, _ in pairs]
        return dict(pairs)

    for path in (ROOT / "safeload").rglob("*.json"):
        assert isinstance(json.loads(path.read_text("utf-8"), object_pairs_hook=unique), dict)


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {safeload.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_style_of_c_is_checked_by_one_version_of_clang_format():
    if not (ROOT / ".ci").is_dir():
        pytest.skip("not in the source distribution")
    pins = [
        re.findall(r"clang-format==([\d.]+)", (ROOT / name).read_text("utf-8"))
        for name in (".ci/run", ".pre-commit-config.yaml")
    ]
    assert len(pins[0]) == 1
    assert pins[0] == pins[1]
