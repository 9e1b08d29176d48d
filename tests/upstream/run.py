"""Runs upstream's own tests of numpy, torch or flax with safeload standing in for safetensors.

    python tests/upstream/run.py SDIST [safeload|safetensors] [numpy|torch|flax]

SDIST is the .tar.gz of safetensors 0.8.0 or 0.9.0rc1, or its unpacked folder. With "safetensors" as second argument
upstream itself is run, in the same way, for comparison. For numpy torch is absent: it and safetensors.torch are mocked.
For torch it is the real one, and no test is left out.
"""

import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest

COMMON = ("test_simple", "test_handle", "test_multithreaded", "test_threadable", "test_pread_backend")
FILES = {
    "numpy": COMMON,
    "torch": ("test_pt_comparison", "test_pt_model", *COMMON),
    "flax": ("test_flax_comparison",),
}

# Tests of torch's path, which mocks cannot stand in for. Upstream itself fails these, since no file is written or the
# tensors that come back are mocks.
FAIL_UNDER_MOCKS = (
    "test_simple.py::TestCase::test_accept_path",
    "test_simple.py::TestCase::test_pt_sf_save_model_overlapping_storage",
    "test_simple.py::WindowsTestCase::test_get_correctly_dropped",
    "test_simple.py::ReadmeTestCase::test_torch_example",
    "test_simple.py::ReadmeTestCase::test_torch_slice",
    "test_pread_backend.py::PreadBackendTests::test_default_backend_unchanged",
    "test_pread_backend.py::PreadBackendTests::test_get_slice",
    "test_pread_backend.py::PreadBackendTests::test_get_tensors_round_trip",
    "test_pread_backend.py::PreadBackendTests::test_load_file_round_trip",
    "test_pread_backend.py::PreadBackendTests::test_load_model",
    "test_pread_backend.py::PreadBackendTests::test_get_tensor_meta_matches_header",
    "test_pread_backend.py::PreadBackendTests::test_prefetch_device_overrides_the_handle",
    "test_pread_backend.py::PreadBackendTests::test_prefetch_plan_rejects_bad_entries",
    "test_pread_backend.py::PreadBackendTests::test_prefetch_rejects_unsupported_dtype",
    "test_pread_backend.py::PreadBackendTests::test_prefetch_requires_cuda",
    "test_pread_backend.py::PreadBackendTests::test_prefetch_requires_pt",
    "test_pread_backend.py::PreadBackendTests::test_prefetch_works_from_any_backend",
    "test_pread_backend.py::PreadBackendTests::test_safe_open_round_trip",
    "test_pread_backend.py::PreadBackendTests::test_truncated_header_is_rejected",
)

# Likewise torch's, but these pass under mocks whatever is under test: the first works on mocks alone, the others ask
# for any exception at all of framework "pt".
PASS_UNDER_MOCKS = (
    "test_multithreaded.py::test_multithreaded_roundtripping_torch",
    "test_pread_backend.py::PreadBackendTests::test_data_offset_overflow_is_rejected",
    "test_pread_backend.py::PreadBackendTests::test_invalid_backend_string_raises",
)


def main() -> int:
    sdist = Path(sys.argv[1]).resolve()
    module, framework = [*sys.argv[2:], *("safeload", "numpy")[len(sys.argv) - 2 :]]
    with tempfile.TemporaryDirectory() as folder:
        if sdist.is_file():
            with tarfile.open(sdist) as archive:
                filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # PEP 706: 3.11.4, 3.10.12
                archive.extractall(Path(folder) / "sdist", **filtered)
            sdist = next((Path(folder) / "sdist").iterdir())
        tests = Path(folder) / "tests"
        (tests / "tests" / "data").mkdir(parents=True)  # they write files here too
        for name in FILES[framework]:
            shutil.copy(sdist / "bindings/python/tests" / f"{name}.py", tests)
        if module != "safetensors":
            import safeload

            safeload.install_as_safetensors()
        left_out: tuple[str, ...] = ()
        if framework == "numpy":
            torch = sys.modules["torch"] = sys.modules["safetensors.torch"] = MagicMock()
            torch.cuda.device_count.return_value, torch.cuda.is_available.return_value = 0, False
            left_out = FAIL_UNDER_MOCKS + PASS_UNDER_MOCKS
        os.chdir(tests)  # they write files where they stand
        arguments = ["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(tests), "-c", os.devnull]
        return int(pytest.main([*arguments, *(f"--deselect={name}" for name in left_out), str(tests)]))


if __name__ == "__main__":
    sys.exit(main())
