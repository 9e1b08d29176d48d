"""Codes of quantized models in conversions to other formats: copied as they are."""

import json

import numpy as np
import pytest
from builders.engine_models import DTYPES, write_experts, write_model
from builders.paths import DATA
from builders.schemes import ENGINE_FORMATS

import safeload
from safeload.numpy import load_file

FORMATS = [*ENGINE_FORMATS, *(f"mlx{bits}-g{group}" for bits in (2, 3, 8) for group in (32, 128))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense = {dtype: write_model(folder / dtype, dtype) for dtype in DTYPES}
    return {**dense, "qwen3_moe": write_experts(folder / "experts", "qwen3_moe")}


# ---- the same format ----


@pytest.mark.parametrize("model", [*DTYPES, "qwen3_moe"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_format_a_folder_has_already_changes_no_byte(models, tmp_path, name, model):
    if model == "qwen3_moe" and name in ("mlx2-g128", "mlx3-g128", "mlx8-g128"):
        pytest.skip("its experts have too few columns")
    safeload.convert(models[model], tmp_path / "first", quantize=name)
    report = safeload.convert(tmp_path / "first", tmp_path / "second", quantize=name)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    assert not report.summary.quantized
    assert f"kept: is already {name}" in str(report)
    safeload.convert(tmp_path / "first", tmp_path / "pieces", quantize=name, resume=True)
    assert contents(tmp_path / "pieces") == contents(tmp_path / "first")
    stored = safeload.load(tmp_path / "first")
    for key, value in safeload.load_quantized(tmp_path / "first", name).items():
        equal = value == stored[key]
        assert equal if isinstance(equal, bool) else equal.all(), key


@pytest.mark.parametrize("name", ["w4a16", "mlx4", "bnb_nf4", "deepseek_fp8"])
def test_what_the_first_conversion_has_ignored_stays_so(models, tmp_path, name):
    safeload.convert(models["bfloat16"], tmp_path / "first", quantize=name, ignore="*q_proj")
    report = safeload.convert(tmp_path / "first", tmp_path / "second", quantize=name)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    reason = f"is not quantized in the folder, which is already {name}"
    assert report.summary.kept["model.layers.0.self_attn.q_proj.weight"] == reason


def test_a_weight_that_is_ignored_now_is_dequantized(models, tmp_path):
    safeload.convert(models["bfloat16"], tmp_path / "first", quantize="w4a16")
    safeload.convert(tmp_path / "first", tmp_path / "second", quantize="w4a16", ignore="*q_proj")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert second.keys() - first.keys() == {"model.layers.0.self_attn.q_proj.weight"}
    assert all(np.array_equal(first[key], second[key]) for key in first.keys() & second.keys())
    ignored = json.loads((tmp_path / "second/config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored
    safeload.convert(tmp_path / "first", tmp_path / "plain", dtype="bfloat16")
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(second[name], load_file(tmp_path / "plain/model.safetensors")[name])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ct_pack_w4_g128_asym", "w4a16_asym"), ("ct_fp8_channel", "fp8_dynamic"), ("ct_fp8_block", "fp8_block"),
        ("ct_nvfp4", "nvfp4a16"), ("ct_mxfp4", "mxfp4a16"), ("ct_int8_channel", "w8a8"), ("fp8_block", "deepseek_fp8"),
        ("mlx_affine4_g64", "mlx4"), ("mlx_affine4_g128", "mlx4-g128"), ("mlx_affine8_g32", "mlx8-g32"),
        ("mlx_mxfp4", "mlx-mxfp4"), ("mlx_mxfp8", "mlx-mxfp8"), ("mlx_nvfp4", "mlx-nvfp4"),
    ],
)  # fmt: skip
def test_weights_by_the_real_writers_are_copied(tmp_path, kind, name):
    source = DATA / "quantized" / kind
    report = safeload.convert(source, tmp_path / "out", quantize=name, only="*")
    copied = [key for key, why in report.summary.kept.items() if why == f"is already {name}"]
    assert copied
    ours, theirs = safeload.load(tmp_path / "out", stored=True), safeload.load(source, stored=True)
    for key in ours:
        if key.startswith(tuple(name.removesuffix("weight") for name in copied)):
            assert ours[key].dtype == theirs[key].dtype
            assert ours[key].tobytes() == theirs[key].tobytes()
