"""Optional packages: one that is installed, but cannot be imported, is not called missing."""

import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from builders.paths import DATA
from builders.thorough import dealt, part_of

import safeload

# What safeload does, by the package that it needs for that.
USES = {
    "urllib3": 'safeload.open("https://127.0.0.1:1/a.safetensors")',
    "fsspec": 'safeload.open("memory://a.safetensors")',
    "huggingface_hub": 'safeload.open("hf://o/n/a.safetensors", storage_options={"endpoint": "http://127.0.0.1:1"})',
    "s3fs": 'safeload.open("s3://bucket/a.safetensors")',
    "aiohttp": 'safeload.open("simplecache::http://127.0.0.1:1/a.safetensors", storage_options={})',
    "h5py": "safeload.open(folder + '/a.h5')",
    "model_signing": "safeload.verify(folder, safeload.Signature(folder + '/model.sig', key=folder + '/key'))",
    "torch": "import safeload.torch; safeload.torch.load_file(folder + '/a.safetensors')",
    "jax": "import safeload.jax; safeload.jax.load_file(folder + '/a.safetensors')",
    "idna": 'safeload.open("https://m\\u00f6del.example/a.safetensors")',
}
# Failures of an import: as the loader says it under a memory limit, and others.
FAILURES = {
    "a library that is not mapped": 'ImportError("libx.so: failed to map segment from shared object")',
    "a name of the package": 'ImportError("cannot import name x", name=name)',
    "no memory": "MemoryError()",
    "a system error": 'OSError(12, "Cannot allocate memory")',
    "another package": 'ModuleNotFoundError("No module named x", name="x")',
}
CODE = """
import importlib.abc, importlib.machinery, sys
import safeload
name, folder = sys.argv[1], sys.argv[2]
class Broken(importlib.abc.Loader):
    def create_module(self, spec):
        raise {failure}
    def exec_module(self, module):
        pass
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname == name:
            return importlib.machinery.ModuleSpec(fullname, Broken(), is_package=True)
sys.meta_path.insert(0, Finder())
for key in [key for key in sys.modules if key.partition(".")[0] == name]:
    del sys.modules[key]
try:
    {use}
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def folder(tmp_path):
    safeload.numpy.save_file({"a": np.zeros(4, np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(2000))
    shutil.copy(DATA / "signatures" / "files.sig", tmp_path / "model.sig")
    shutil.copy(DATA / "signatures" / "test-key.pub", tmp_path / "key")
    return tmp_path


def said(package, use, failure, folder):
    code = CODE.format(use=textwrap.dedent(use), failure=failure)
    done = subprocess.run(
        # In a folder where no `safeload/` lies, which would be imported in place of the installed package.
        [sys.executable, "-c", code, package, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return done.stdout


@pytest.mark.parametrize(("package", "failure"), part_of(dealt(USES, FAILURES), 0, 2))
def test_a_package_that_fails_to_import_is_not_called_missing(package, failure, folder):
    if package == "model_signing":
        pytest.importorskip("OpenSSL", reason="which model_signing needs, and whose absence is told")
    text = said(package, USES[package], FAILURES[failure], folder)
    assert text
    assert "pip install" not in text
    assert "not installed" not in text
    assert "nstall " not in text


@pytest.mark.parametrize(
    "package", part_of(["urllib3", "fsspec", "huggingface_hub", "h5py", "model_signing", "torch", "jax"], 1, 2)
)
def test_a_package_that_is_missing_is_named_with_its_command(package, folder):
    use = f"sys.modules[name] = None\n    {USES[package]}"
    text = said(package, use, "ImportError()", folder)
    assert text.startswith("ModuleNotFoundError")
    assert "not installed: pip install " in text
