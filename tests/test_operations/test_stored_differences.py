"""Differences between what files store: codes, scales and blocks, not the values that they stand for."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.inside import main
from builders.quantized import FIXTURES

import safeload
from safeload.errors import UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.any_python


def changed(fixture, folder, name, at=0):
    """A copy of a fixture with another code in a tensor."""
    shutil.copytree(fixture.folder, folder)
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = {key: array.copy() for key, array in load_file(file).items()}
    raw = tensors[name].reshape(-1).view(np.uint8)
    raw[at] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("way", ["paths", "checkpoints", "stored checkpoints", "arrays", "executor"])
@pytest.mark.parametrize(
    "kind", ["awq4_gemm", "ct_pack_w4_g128_asym", "gptq4_g32_asym", "ct_int8_channel", "mlx_affine4_g64"]
)
def test_a_changed_code_is_named(tmp_path, kind, way):
    fixture = FIXTURES[kind]
    codes = ("qweight", "weight_packed", ".weight")
    name = next(key for end in codes for key in fixture.stored() if key.endswith(end) and "norm" not in key)
    a, b = fixture.folder, changed(fixture, tmp_path / "b", name)
    if way == "checkpoints":
        a, b = safeload.open(a), safeload.open(b)
    elif way == "stored checkpoints":
        a, b = safeload.open(a, stored=True), safeload.open(b, stored=True)
    elif way == "arrays":
        a, b = safeload.load(a), safeload.load(b)
    how = {"executor": ThreadPoolExecutor(1)} if way == "executor" else {}
    report = safeload.diff(a, b, stored=True, **how)
    assert report.tensors.keys() == fixture.stored().keys()
    assert [*report.unequal] == [name]
    assert report.unequal[name].unequal == 1
    same = safeload.diff(a, a, stored=True, **how)
    assert same.same
    assert same.tensors.keys() == fixture.stored().keys()


def test_codes_of_checkpoints_opened_as_stored_need_the_flag():
    folder = FIXTURES["awq4_gemm"].folder
    with safeload.open(folder, stored=True) as a, pytest.raises(UnsupportedError, match="holds I32 codes"):
        safeload.diff(a, a)


def test_blocks_are_compared_by_their_bytes(tmp_path):
    values = {"w": np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)}
    safeload.convert(values, tmp_path / "a.gguf", quantize="q4_0", raw=True)
    blocks = safeload.load(tmp_path / "a.gguf")["w"]
    blocks.data[2, 20] ^= 0x80
    safeload.convert({"w": blocks}, tmp_path / "b.gguf", raw=True)
    report = safeload.diff(tmp_path / "a.gguf", tmp_path / "b.gguf", stored=True)
    assert (report.tensors["w"].max, report.tensors["w"].index, report.tensors["w"].unequal) == (128, (2, 20), 1)
    pieces = safeload.diff(tmp_path / "a.gguf", tmp_path / "b.gguf", stored=True, executor=ThreadPoolExecutor(1))
    assert pieces.tensors == report.tensors
    first = safeload.load(tmp_path / "a.gguf")
    assert safeload.diff(first, {"w": blocks}, stored=True).tensors["w"] == report.tensors["w"]
    other = {"w": safeload.quantize(values["w"], "q8_0")}
    assert safeload.diff(tmp_path / "a.gguf", tmp_path / "a.gguf", stored=True).same
    assert not safeload.diff(first, other, stored=True).same


def test_the_command(tmp_path, capsys):
    fixture = FIXTURES["awq4_gemm"]
    name = next(key for key in fixture.stored() if key.endswith("qzeros"))
    other = changed(fixture, tmp_path / "b", name)
    assert main(["diff", str(fixture.folder), str(fixture.folder), "--stored"]) == 0
    capsys.readouterr()
    assert main(["diff", str(fixture.folder), str(other), "--stored", "--json"]) == 1
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert [key for key, row in tensors.items() if row["unequal"]] == [name]
