import os
import subprocess
import sys

import pytest
from builders.paths import TESTS

RUNNER = TESTS / "upstream" / "run.py"


@pytest.mark.parametrize("module", ["safeload", "safetensors"])
def test_upstreams_own_numpy_tests_pass(module, tmp_path):
    sdist = os.environ.get("SAFELOAD_UPSTREAM_SDIST")
    if not sdist:
        pytest.skip("SAFELOAD_UPSTREAM_SDIST does not name the sdist of safetensors 0.8.0 (tests/upstream/fetch.py)")
    done = subprocess.run(
        [sys.executable, RUNNER, sdist, module], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "18 passed, 1 skipped, 15 deselected" in done.stdout
