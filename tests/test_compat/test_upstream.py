"""Upstream's own tests for numpy, torch and flax, run with safeload under the name of safetensors."""

import os
import subprocess
import sys

import pytest
from builders.paths import TESTS

pytestmark = pytest.mark.no_core

RUNNER = TESTS / "upstream" / "run.py"


def outcome_of(module, framework, folder):
    """The last line of a run."""
    sdist = os.environ.get("SAFELOAD_UPSTREAM_SDIST")
    if not sdist:
        pytest.skip("SAFELOAD_UPSTREAM_SDIST does not name the sdist of safetensors 0.8.0 (tests/upstream/fetch.py)")
    done = subprocess.run(
        [sys.executable, RUNNER, sdist, module, framework], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("module", ["safeload", "safetensors"])
def test_upstreams_own_numpy_tests_pass(module, tmp_path):
    assert "18 passed, 1 skipped, 15 deselected" in outcome_of(module, "numpy", tmp_path)


@pytest.mark.parametrize("module", ["safeload", "safetensors"])
def test_upstreams_own_torch_tests_pass(module, tmp_path):
    """Without a GPU: 13 tests ask for one of several kinds, one for S3."""
    torch = pytest.importorskip("torch")
    last = outcome_of(module, "torch", tmp_path)
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        assert "66 passed, 14 skipped" in last


@pytest.mark.parametrize("module", ["safeload", "safetensors"])
def test_upstreams_own_flax_tests_pass(module, tmp_path):
    pytest.importorskip("flax")
    assert "4 passed" in outcome_of(module, "flax", tmp_path)
