"""Conversions keep the scales beside codes that they copy, and name the scales that they leave out."""

import json

import numpy as np
import pytest
from builders.paths import DATA
from builders.quantized import FIXTURES

import safeload
from safeload import QuantizedTensor, gguf
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

WEIGHT, EXPERTS, PLAIN = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "blk.0.attn_v.weight"
SCALES = {"blk.0.attn_q.input_scale": np.float32([0.5]), "blk.0.ffn_up_exps.input_scale": np.float32([0.5, 0.25, 2])}
FACTORS = {"blk.0.attn_q.scale", "blk.0.ffn_up_exps.scale"}
PATHS = ["x.gguf", "x.safetensors"]


@pytest.fixture
def blocks(tmp_path):
    """A GGUF file of NVFP4 with the factors of weights and of their activations, and a matrix of float32."""
    with safeload.open(DATA / "quantized/gguf_nvfp4/model.gguf", stored=True) as source:
        tensors, metadata = dict(source.load()), dict(source.metadata)
    tensors |= {**SCALES, PLAIN: np.random.default_rng(0).standard_normal((32, 256), np.float32)}
    gguf.save_file(tensors, tmp_path / "source.gguf", metadata)
    return tmp_path / "source.gguf"


def stored(path):
    with safeload.open(path, stored=True) as opened:
        return dict(opened.load())


def check_copied(path, source):
    """Weights in blocks have the bytes of the source, and everything that belongs to them."""
    own, theirs = stored(path), stored(source)
    for name in (*FACTORS, *SCALES):
        np.testing.assert_array_equal(own[name], theirs[name])
    with safeload.open(path) as a, safeload.open(source) as b:
        for name in (WEIGHT, EXPERTS):
            assert a[name].scheme == "nvfp4"
            assert np.asarray(a[name].data).tobytes() == np.asarray(b[name].data).tobytes()
    values, expected = (safeload.load(each, dtype="float32") for each in (path, source))
    for name in (WEIGHT, EXPERTS):
        np.testing.assert_array_equal(values[name], expected[name])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"quantize": "nvfp4"},
        {"quantize": "nvfp4", "dtype": "bfloat16"},
        {"quantize": "nvfp4", "keep": "*"},
        {"quantize": {PLAIN: "q8_0"}},
        {"quantize": {PLAIN: "q8_0", "*": None}},
        {"quantize": "q8_0", "keep": [WEIGHT, EXPERTS]},
        {"only": "*.weight"},
        {"names": [WEIGHT, EXPERTS]},
        {"drop": PLAIN},
    ],
    ids=lambda how: " ".join(how) or "copied",
)
def test_blocks_that_are_copied_keep_their_scales(blocks, tmp_path, path, how):
    report = safeload.convert(blocks, tmp_path / path, **how)
    assert report.left_out == ()
    check_copied(tmp_path / path, blocks)
    safeload.convert(tmp_path / path, tmp_path / f"again_{path}", quantize="nvfp4")
    check_copied(tmp_path / f"again_{path}", blocks)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", [{"dtype": "float32"}, {"quantize": "q8_0", "requantize": True}], ids=str)
def test_scales_of_blocks_that_change_are_named(blocks, tmp_path, path, how):
    report = safeload.convert(blocks, tmp_path / path, **how)
    (line,) = report.left_out
    assert line.startswith("2 scales of activations left out, such as 'blk.0.attn_q.input_scale': ")
    assert not {*SCALES, *FACTORS} & stored(tmp_path / path).keys()


@pytest.mark.parametrize("path", PATHS)
def test_one_of_two_weights_changes(blocks, tmp_path, path):
    report = safeload.convert(blocks, tmp_path / path, quantize={WEIGHT: "q8_0"}, requantize=True)
    assert report.left_out[0].startswith("1 scale of activations left out, such as 'blk.0.attn_q.input_scale': ")
    assert SCALES.keys() & stored(tmp_path / path).keys() == {"blk.0.ffn_up_exps.input_scale"}


@pytest.mark.parametrize("path", PATHS)
def test_a_weight_that_is_left_out_takes_its_scales_with_it(blocks, tmp_path, path):
    for drop in ("*attn_q*", WEIGHT):
        safeload.convert(blocks, tmp_path / path, drop=drop, overwrite=True)
        assert SCALES.keys() & stored(tmp_path / path).keys() == {"blk.0.ffn_up_exps.input_scale"}
    safeload.convert(blocks, tmp_path / path, drop="*input_scale", overwrite=True)
    assert stored(tmp_path / path).keys() > FACTORS
    assert not SCALES.keys() & stored(tmp_path / path).keys()


def test_blocks_in_memory_stay_if_they_have_the_scheme(blocks, tmp_path):
    expected = safeload.load(blocks)
    safeload.convert(blocks, tmp_path / "x.safetensors")
    for source in (blocks, tmp_path / "x.safetensors"):
        quantized = safeload.load_quantized(source, "nvfp4")
        assert all(quantized[name] == expected[name] for name in (WEIGHT, EXPERTS))
        assert quantized.summary.kept[WEIGHT] == "is already nvfp4"
    weights = {name: value for name, value in expected.items() if isinstance(value, QuantizedTensor)}
    safeload.convert(weights, tmp_path / "x.gguf", quantize="nvfp4")
    assert all(safeload.load(tmp_path / "x.gguf")[name] == value for name, value in weights.items())


WITH_SCALES = {
    kind: FIXTURES[kind]
    for kind in ("ct_fp8_tensor", "ct_nvfp4", "fp8_autofp8", "modelopt_fp8", "modelopt_nvfp4", "modelopt_fp8_llama4")
}


@pytest.mark.parametrize("kind", WITH_SCALES)
def test_folders_keep_or_name_them(tmp_path, kind):
    source = WITH_SCALES[kind].path
    with safeload.open(source) as opened:
        scales = [name for name in opened.ignored if name.endswith(("input_scale", "input_global_scale"))]
        packed = [name for name, value in opened.items() if isinstance(value, QuantizedTensor)]
    for how in ({}, {"only": "*"}, {"only": packed}, {"names": packed}):
        report = safeload.convert(source, tmp_path / "copy", **how, overwrite=True)
        kept = stored(tmp_path / "copy")
        assert {*scales} <= kept.keys()
        assert not report.left_out
    for how in ({"dtype": "bfloat16"}, {"quantize": "q8_0", "requantize": True}):
        report = safeload.convert(source, tmp_path / "other", **how, overwrite=True)
        assert not {*scales} & stored(tmp_path / "other").keys()
        assert any(f"of activations left out, such as {min(scales)!r}: " in line for line in report.left_out)


def test_a_config_of_fp8_with_static_activations_stays_whole(tmp_path):
    """Marks of ComfyUI, which belong to weights too, are kept beside them and are no scales to name."""
    source = FIXTURES["comfy_quant_fp8"].path
    safeload.convert(source, tmp_path / "copy.safetensors", only="*.weight")
    assert any(name.endswith(".comfy_quant") for name in load_file(tmp_path / "copy.safetensors"))
    report = safeload.convert(source, tmp_path / "plain.safetensors", dtype="float32")
    assert [line.split(",")[0] for line in report.left_out] == ["2 scales of activations left out"]


def test_sglangs_w4afp8_is_named(tmp_path):
    """It has no codes that move, because safeload reads none of them."""
    experts = "model.layers.3.mlp.experts.0.up_proj.weight"
    tensors = {experts: np.zeros((128, 128), np.int8), f"{experts}_scale_inv": np.ones((128, 2), np.float32)}
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "w4afp8"}}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(safeload.UnsupportedError, match=r"W4AFP8, which mixes .* SGLang reads it"):
        safeload.convert(tmp_path / "model", tmp_path / "out", quantize="w4a16", only="*")
