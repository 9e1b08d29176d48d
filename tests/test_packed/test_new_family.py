"""A new family of quantized tensors is one module and its name in one list: it is read, shown, sliced and converted."""

import subprocess
import sys

from builders.paths import ROOT

FAMILY = """
from ..base import packing
from .families import Family
from .grid import Misfit, whole_grid


def nibbles(group):
    rows, stored = group.shape()
    if group.shape(packing.SCALE) != (rows,):
        raise Misfit(f"steps {list(group.shape(packing.SCALE))} do not fit {rows} rows")
    shape = (rows, 2 * stored)
    return group.packing("toy", "toy4 row", shape, 4, "offset", grid=whole_grid(shape, 1, shape[1]))


FAMILIES = [Family("toy", ".nibbles", frozenset(("U8",)), {packing.SCALE: (".step",)}, nibbles, logical=".weight")]
"""

USE = """
import sys

import numpy as np
from builders.inside import families, family_modules

import safeload
from safeload.numpy import save_file

folder = sys.argv[1]
sys.modules[families.__module__.rpartition(".")[0]].__path__.append(folder)
family_modules.append("toy")
codes = np.arange(48, dtype=np.uint8).reshape(4, 12)
steps = np.array([1, 2, 4, 8], np.float32)
path = f"{folder}/model.safetensors"
save_file({"a.nibbles": codes, "a.step": steps, "b": np.ones(3, np.float32)}, path)
values = np.stack([codes & 15, codes >> 4], -1).reshape(4, 24).astype(np.float32) - 8
values *= steps[:, None]
with safeload.open(path) as checkpoint:
    assert sorted(checkpoint) == ["a.weight", "b"]
    assert checkpoint.tensors["a.weight"].dtype == "toy4 row"
    assert checkpoint.get_slice("a.weight", dtype="float32")[1:3].tolist() == values[1:3].tolist()
assert safeload.load(path, dtype="float32")["a.weight"].tolist() == values.tolist()
safeload.convert(path, f"{folder}/out.npz", dtype="float32")
assert safeload.load(f"{folder}/out.npz")["a.weight"].tolist() == values.tolist()
try:
    safeload.load(path, stored=True, dtype="float32")
except safeload.UnsupportedError as error:
    assert "'a.nibbles' holds U8 codes, whose scale is 'a.step'" in str(error), error
else:
    raise AssertionError
"""


def test_a_family_is_a_module_and_a_name(tmp_path):
    (tmp_path / "toy.py").write_text(FAMILY)
    subprocess.run([sys.executable, "-c", USE, str(tmp_path)], check=True, cwd=ROOT / "tests", timeout=120)
