"""Upstream's own tests for numpy, torch and flax, run with safeload under the name of safetensors."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from builders.paths import TESTS

pytestmark = pytest.mark.no_core

RUNNER = TESTS / "upstream" / "run.py"
RUNS = [(module, release) for release in ("0.8.0", "0.9.0rc1") for module in ("safeload", "safetensors")]


def outcome_of(module, release, framework, folder):
    """The last line of a run."""
    sdists = os.environ.get("SAFELOAD_UPSTREAM_SDISTS")
    if not sdists:
        pytest.skip("SAFELOAD_UPSTREAM_SDISTS names no folder with the sdists of safetensors (tests/upstream/fetch.py)")
    if module == "safetensors" and version(module) != release:
        pytest.skip(f"safetensors {release} is not installed")
    sdist = Path(sdists) / f"safetensors-{release}.tar.gz"
    done = subprocess.run(
        [sys.executable, RUNNER, sdist, module, framework], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("module", "release"), RUNS)
def test_upstreams_own_numpy_tests_pass(module, release, tmp_path):
    passed = {"0.8.0": "18 passed, 1 skipped, 15 deselected", "0.9.0rc1": "19 passed, 26 skipped, 22 deselected"}
    assert passed[release] in outcome_of(module, release, "numpy", tmp_path)


@pytest.mark.parametrize(("module", "release"), RUNS)
def test_upstreams_own_torch_tests_pass(module, release, tmp_path):
    """Without a GPU: 13 tests of 0.8.0 and 38 of 0.9.0rc1 ask for one of several kinds, one for S3."""
    torch = pytest.importorskip("torch")
    last = outcome_of(module, release, "torch", tmp_path)
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        assert {"0.8.0": "66 passed, 14 skipped", "0.9.0rc1": "74 passed, 39 skipped"}[release] in last


@pytest.mark.parametrize(("module", "release"), RUNS)
def test_upstreams_own_flax_tests_pass(module, release, tmp_path):
    pytest.importorskip("flax")
    assert "4 passed" in outcome_of(module, release, "flax", tmp_path)
