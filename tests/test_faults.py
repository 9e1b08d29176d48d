"""Runs tests/faults under its shim: system calls that fail, at every place where they can."""

import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
from builders.paths import ROOT

FAULTS = ROOT / "tests" / "faults"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the shim knows Linux's system calls"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the shim stands in for glibc's functions"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the shim is C, and there is no cc"),
    pytest.mark.any_python,
]


# Modules that run in one process: each takes a moment to start.
RUNS = ("test_reads test_allocations", "test_shards", "test_folders test_repeats test_edits test_saves")
# pytest loads a dozen otherwise, and does not know their options then.
WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}


def run(folder, modules):
    """Runs modules under the shim."""
    shim = folder / "shim.so"
    subprocess.run(["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", FAULTS / "shim.c", "-o", shim], check=True)
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(shim)]))
    files = [FAULTS / f"{module}.py" for module in modules.split()]
    options = ["-q", "--capture=sys", "--tb=short", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    options += ["-o", "addopts=--import-mode=importlib --strict-markers"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--basetemp", folder / "base", *files],
        env={**os.environ, **WITHOUT_PLUGINS, "LD_PRELOAD": preload, "SAFELOAD_FAULT_SHIM": str(shim)},
        cwd=folder,  # not the source tree, whose safeload is not built
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.ahead(function=run)
@pytest.mark.parametrize("modules", RUNS)
def test_under_the_shim(modules, begun_ahead):
    done = begun_ahead
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    if not re.search(r"\b[1-9][0-9]* passed\b", done.stdout):
        assert re.search(r"\b[1-9][0-9]* skipped\b", done.stdout), done.stdout
        pytest.skip("all of it is skipped: see `pytest -rs` there")


def test_every_module_runs():
    assert sorted(" ".join(RUNS).split()) == sorted(path.stem for path in FAULTS.glob("test_*.py"))
