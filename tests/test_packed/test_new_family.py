"""A new family of quantized tensors is one module and its name in one list: it is read, shown, sliced and converted.

So is a format that we write for an engine.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import safeload

FAMILY = """
from ..core import packing
from ..core.native import lib
from .families import Engine, Family, Preset, parts_of
from .packed_group import Misfit, whole_grid
from .quantization import with_quantization


def nibbles(group):
    rows, stored = group.stored
    if group.scales not in ((rows,), (rows, 1)):
        raise Misfit(f"steps {list(group.scales)} do not fit {rows} rows")
    shape = (rows, 2 * stored)
    return group.packing("toy", "toy4 row", shape, 4, "offset", grid=whole_grid(shape, 1, shape[1]))


def lay_out(preset, config, left, exceptions):
    return with_quantization(config, {"toy_bits": preset.bits, "plain": sorted(left)})


PARTS = parts_of(".nibbles", "U8", ".step", "F32")
PRESETS = [Preset("toy4", Engine("toys"), lib.SL_ENCODE_INT, 4, None, PARTS, lay_out)]
FAMILIES = [Family("toy", ".nibbles", frozenset(("U8",)), {packing.SCALE: (".step",)}, nibbles, logical=".weight")]
"""

USE = """
import json
import sys

import numpy as np

folder = sys.argv[1]
sys.path.insert(0, folder)

import safeload
from safeload.numpy import save_file

assert safeload.__file__.startswith(folder)
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

weights = {"a.weight": values, "b.weight": values}
loaded = safeload.load_quantized(weights, "toy4", keep="b")
assert loaded.summary.quantized == {"a.weight": "toy4"}, loaded.summary
assert loaded["a.weight"].scheme == "toy4 row"
assert np.abs(loaded["a.weight"].dequantize() - values).max() <= steps.max() / 2
save_file(weights, f"{folder}/weights.safetensors")
safeload.convert(f"{folder}/weights.safetensors", f"{folder}/out", quantize="toy4", ignore="b", only="*")
with open(f"{folder}/out/config.json") as file:
    assert json.load(file) == {"quantization_config": {"toy_bits": 4, "plain": ["b"]}}
with safeload.open(f"{folder}/out") as checkpoint:
    assert checkpoint.tensors["a.weight"].dtype == "toy4 row"
    opened = checkpoint.load(dtype="float32")
assert (opened["a.weight"] == loaded["a.weight"].dequantize()).all() and (opened["b.weight"] == values).all()
"""


def test_a_family_is_a_module_and_a_name(tmp_path):
    """Written into a copy of the package."""
    package = Path(safeload.__file__).parent
    shutil.copytree(package, tmp_path / "safeload", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "safeload" / "quant"
    (folder / "toy.py").write_text(FAMILY)
    text = (folder / "families.py").read_text("utf-8")
    assert text.count("\nMODULES = [\n") == 1
    (folder / "families.py").write_text(text.replace("\nMODULES = [\n", '\nMODULES = [\n    "toy",\n'), "utf-8")
    subprocess.run([sys.executable, "-c", USE, str(tmp_path)], check=True, cwd=tmp_path, timeout=120)
