"""Copies of the package without a folder: they read and write safetensors, and an error names what is gone."""

import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from builders.paths import ROOT

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# Folders and modules that may be missing, and what then needs them.
GONE = {
    "adapters": "safeload.load('plain.safetensors', adapters='adapter')",
    "checking": "safeload.check('plain.safetensors')",
    "cli": None,
    "compat": "safeload.safe_open('plain.safetensors', 'np')",
    "conversion": "safeload.convert('plain.safetensors', 'half.safetensors', dtype='float16')",
    "editing": "safeload.edit('plain.safetensors', metadata={})",
    "formats": "safeload.open('.')",
    "formats/gguf.py": "safeload.open('model.gguf')",
    "formats/torch formats/unpickle.py": "safeload.open('model.pt')",
    "frameworks": "safeload.torch.load_file('plain.safetensors')",
    "models": "safeload.open('.')",
    "quant": "safeload.open('codes.safetensors')",
    "remote": "safeload.open('https://localhost:1/model.safetensors')",
    "remote/http.py": "safeload.open('https://localhost:1/model.safetensors')",
    "trust": "safeload.open('plain.safetensors', verify=True)",
}
GONE[" ".join(name for name in GONE if "/" not in name)] = "safeload.open('.')"
PROGRAM = """
import sys
import numpy as np
import safeload, safeload.numpy
tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int64)}
safeload.numpy.save_file(tensors, "plain.safetensors", {"by": "hand"})
loaded = safeload.numpy.load_file("plain.safetensors")
assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
with safeload.open("plain.safetensors") as checkpoint:
    assert checkpoint.metadata == {"by": "hand"} and checkpoint.notes == []
    assert checkpoint.load(dtype="float16")["a"].dtype == np.float16
    assert checkpoint.get_slice("a")[1:].tolist() == [[3, 4, 5]]
assert np.array_equal(safeload.load("plain.safetensors")["a"], tensors["a"])
safeload.numpy.save_file(tensors, "again.safetensors")
try:
    safeload.load("missing.safetensors")
except FileNotFoundError:
    pass
assert safeload.__file__.startswith(sys.argv[1])
if len(sys.argv) > 2:
    try:
        eval(sys.argv[2])
    except (safeload.UnsupportedError, ModuleNotFoundError) as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    codes = np.ones((2, 4), np.uint8)
    safeload.numpy.save_file(
        {"w.weight": codes, "w.weight_scale": np.ones(2, np.float32)}, folder / "codes.safetensors"
    )
    (folder / "model.pt").write_bytes(pickle.dumps({"a": codes}, protocol=2))
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    return folder


@pytest.mark.parametrize("gone", GONE)
def test_what_remains_reads_safetensors(gone, files, tmp_path):
    package = tmp_path / "safeload"
    # With its bytecode, or each copy would be compiled; Windows has no links for everybody.
    copy = shutil.copy2 if os.name == "nt" else os.symlink
    shutil.copytree(ROOT / "safeload", package, copy_function=copy)
    for name in gone.split():
        path = package / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    arguments = [tmp_path, *filter(None, [GONE[gone]])]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=files, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if GONE[gone] is not None:
        named = [f"safeload.{name.removesuffix('.py').replace('/', '.')}" for name in gone.split()]
        assert done.stdout.startswith(("UnsupportedError", "ModuleNotFoundError")), done.stdout
        assert any(name in done.stdout for name in named), done.stdout
