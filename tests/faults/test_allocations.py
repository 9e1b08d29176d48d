"""Each allocation of the C core in turn fails, as Python sees it. The core alone: tests/sanitizers/allocations.c."""

import os

import numpy as np
import pytest
from builders.thorough import THOROUGH
from faults.reads import CASES, WORK
from faults.saves import NEW, SAVES, Save
from faults.shim import ALLOCATE, FAIL, sweep

from safeload.numpy import save_file

pytestmark = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's allocator stands before the shim's"
)

STEP = 1 if THOROUGH else 17


def refuse_each(operation, folder, expected):
    failures = 0
    for shot, result, error in sweep(operation, folder, ALLOCATE, FAIL, step=STEP):
        if error is None:
            assert result == expected  # with fewer threads, or read where a mapping was refused
            continue
        if not isinstance(error, MemoryError):
            raise error
        assert shot.hit
        assert "cannot allocate" in str(error)
        failures += 1
    assert failures


# Formats that are read in Python need no memory of the core's to be listed.
IN_C = ("safetensors", "long header", "gguf", "shards")


@pytest.mark.parametrize("case", [c for c in CASES if c[0] in IN_C or c[1] != "list"], ids=" - ".join)
def test_a_load_without_memory_is_a_memory_error(case, files):
    format, name = case

    def operation():
        return WORK[name](files[format])

    refuse_each(operation, files[format].parent, operation())


def _large(version):
    return {"w": np.arange(version, version + (1 << 18), dtype=np.float64).reshape(512, 512)}


# The core writes a small file without memory of its own: a larger one in its place.
ALLOCATING = {name: save for name, save in SAVES.items() if name != "moon"} | {
    "safetensors": Save("a.safetensors", lambda path, v: save_file(_large(v), path, {"version": str(v)})),
    "safetensors, strided": Save("a.safetensors", lambda path, v: save_file({"w": _large(v)["w"].T}, path)),
    "safetensors, not durable": Save("a.safetensors", lambda path, v: save_file(_large(v), path, durable=False)),
}


@pytest.mark.parametrize("save", ALLOCATING.values(), ids=ALLOCATING)
def test_a_save_without_memory_is_a_memory_error_and_leaves_nothing(save, tmp_path):
    path = tmp_path / save.name
    save.write(path, NEW)
    expected = path.read_bytes()

    def operation():
        path.unlink(missing_ok=True)
        try:
            save.write(path, NEW)
        except MemoryError:
            assert not any(tmp_path.iterdir())
            raise
        return path.read_bytes()

    refuse_each(operation, tmp_path, expected)
