"""Schemes that only the configuration tells from others with the same names and shapes."""

import json
import pickle

import ml_dtypes
import numpy as np
import pytest
from builders.random import rng

import safeload
from safeload import FormatError, QuantizedTensor, UnsupportedError
from safeload.numpy import save_file

F8 = ml_dtypes.float8_e4m3fn
X = "model.layers.0.mlp.down_proj"


def folder_of(path, tensors, config):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", durable=False)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return path


def load(path, tensors, config):
    return safeload.load(folder_of(path, tensors, config), dtype="float32")[f"{X}.weight"]


# ---- GPTQModel's fp8: scales divide ----

# As GPTQModel 7.7 serializes an FP8Config with defaults.
GPTQMODEL_FP8 = {
    "bits": 8, "group_size": -1, "desc_act": False, "lm_head": False, "method": "fp8", "quant_method": "fp8",
    "format": "float8_e4m3fn", "checkpoint_format": "float8_e4m3fn", "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "weight_scale_method": "row", "weight_scale_semantics": "inverse",
}  # fmt: skip
CODES = rng.integers(0, 126, (64, 48)).astype(np.uint8).view(F8)
SCALES = {
    "row": rng.uniform(100, 9000, 64).astype(np.float32),
    "tensor": np.float32(1234.567),
    "block": rng.uniform(100, 9000, (4, 3)).astype(np.float32),
}
FP8 = {method: {f"{X}.weight": CODES, f"{X}.weight_scale_inv": np.asarray(scales)} for method, scales in SCALES.items()}


def said(method):
    block = {"weight_block_size": [16, 16]} if method == "block" else {}
    return {**GPTQMODEL_FP8, "weight_scale_method": method, **block}


def quotients(method):
    scales = SCALES[method]
    if method == "block":
        scales = scales.repeat(16, 0).repeat(16, 1)
    return CODES.astype(np.float32) / (scales[:, None] if method == "row" else scales)


@pytest.mark.parametrize("method", SCALES)
def test_codes_of_gptqmodel_are_divided_with_one_rounding(method, tmp_path):
    np.testing.assert_array_equal(load(tmp_path, FP8[method], said(method)), quotients(method))
    want = quotients(method)
    with safeload.open(tmp_path) as opened:
        packed = opened[f"{X}.weight"]
        assert isinstance(packed, QuantizedTensor)
        np.testing.assert_array_equal(packed[16:32].dequantize(), want[16:32])
        np.testing.assert_array_equal(opened.get_slice(f"{X}.weight", dtype="float32")[3:40, 5:], want[3:40, 5:])
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(packed)).dequantize(), want)
    safeload.convert(tmp_path, tmp_path / "one.safetensors")
    np.testing.assert_array_equal(safeload.load(tmp_path / "one.safetensors", dtype="float32")[f"{X}.weight"], want)
    assert safeload.stats(tmp_path)[f"{X}.weight"].max == want.max()


def test_without_semantics_scales_multiply(tmp_path):
    config = {key: value for key, value in GPTQMODEL_FP8.items() if key != "weight_scale_semantics"}
    want = CODES.astype(np.float32) * SCALES["row"][:, None]
    np.testing.assert_array_equal(load(tmp_path, FP8["row"], config), want)


def test_dynamic_has_semantics_of_single_modules(tmp_path):
    config = {key: value for key, value in GPTQMODEL_FP8.items() if key != "weight_scale_semantics"}
    config["dynamic"] = {r"+:.*\.down_proj": {"weight_scale_semantics": "inverse"}}
    other = {name.replace("down", "up"): value for name, value in FP8["row"].items()}
    folder_of(tmp_path, {**FP8["row"], **other}, config)
    got = safeload.load(tmp_path, dtype="float32")
    np.testing.assert_array_equal(got[f"{X}.weight"], quotients("row"))
    assert got[f"{X}.weight".replace("down", "up")].max() > 1000


def test_a_scale_of_0_that_divides_is_refused(tmp_path):
    scales = SCALES["row"].copy()
    scales[7] = 0
    with pytest.raises(FormatError, match=r"its scale is 0\.0 at \[7, 0\]"):
        load(tmp_path, {**FP8["row"], f"{X}.weight_scale_inv": scales}, GPTQMODEL_FP8)


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point"])
def test_semantics_of_other_parts_are_refused(part, tmp_path):
    parts = dict(FP8["row"])
    if part == "weight_scale":
        parts[f"{X}.weight_scale"] = parts.pop(f"{X}.weight_scale_inv")
    else:
        parts[f"{X}.{part}"] = np.zeros(64, np.float32)
    folder_of(tmp_path, parts, GPTQMODEL_FP8)
    assert set(safeload.load(tmp_path)) == set(parts)
    with pytest.raises(UnsupportedError, match="its weight_scale_semantics apply only to a weight_scale_inv"):
        safeload.load(tmp_path, dtype="float32")


# ---- auto-round: MXINT4 has the names of MXFP4 ----

NIBBLES = rng.integers(0, 16, (8, 64)).astype(np.uint8)
WORDS = {
    f"{X}.weight_packed": NIBBLES[:, ::2] | NIBBLES[:, 1::2] << 4,
    f"{X}.weight_scale": rng.integers(120, 130, (8, 2)).astype(np.uint8),
}
EXPONENTS = np.exp2(WORDS[f"{X}.weight_scale"].astype(np.float32) - 127).repeat(32, 1)
INTEGERS = np.float32([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75])
FLOATS = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "act_bits": 4, "act_dynamic": True,
    "act_group_size": 32, "act_sym": True, "enable_quanted_input": True, "autoround_version": "0.16.1",
    "block_name_to_quantize": "model.layers", "iters": 0,
}  # fmt: skip


def microscaled(table):
    return np.concatenate([table, -table])[NIBBLES] * EXPONENTS


@pytest.mark.parametrize(("kind", "backend"), [("mx_int", "auto_round"), ("mx_int4", "auto_round:mx_int")])
def test_mxint4(kind, backend, tmp_path):
    config = {**AUTO_ROUND, "data_type": kind, "act_data_type": kind, "packing_format": backend}
    np.testing.assert_array_equal(load(tmp_path, WORDS, config), microscaled(INTEGERS))
    with safeload.open(tmp_path) as opened:
        assert opened[f"{X}.weight"].scheme == "mxint4"
    safeload.convert(tmp_path, tmp_path / "one.safetensors")
    got = safeload.load(tmp_path / "one.safetensors", dtype="bfloat16")[f"{X}.weight"]
    np.testing.assert_array_equal(got.astype(np.float32), microscaled(INTEGERS))


@pytest.mark.parametrize("kind", ["mx_fp", "mx_fp4", "mx_fp_rceil"])
def test_mxfp4_of_auto_round(kind, tmp_path):
    config = {**AUTO_ROUND, "data_type": kind, "act_data_type": kind, "packing_format": "auto_round:llm_compressor"}
    np.testing.assert_array_equal(load(tmp_path, WORDS, config), microscaled(FLOATS))


def test_extra_config_has_the_data_type_of_single_modules(tmp_path):
    config = {**AUTO_ROUND, "data_type": "mx_fp", "extra_config": {X: {"data_type": "mx_int"}}}
    other = {name.replace("down", "up"): value for name, value in WORDS.items()}
    folder_of(tmp_path, {**WORDS, **other}, config)
    got = safeload.load(tmp_path, dtype="float32")
    np.testing.assert_array_equal(got[f"{X}.weight"], microscaled(INTEGERS))
    np.testing.assert_array_equal(got[f"{X}.weight".replace("down", "up")], microscaled(FLOATS))


@pytest.mark.parametrize(("size", "count"), [(16, 4), (32, 2), (64, 1)])
def test_fp8_in_groups_has_a_list_of_scales(size, count, tmp_path):
    """auto-round's export_to_fp8 flattens scales [rows, groups]."""
    codes = rng.integers(0, 0x7E, (8, 64)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = rng.random((8, count), np.float32).astype(ml_dtypes.bfloat16)
    config = {**AUTO_ROUND, "bits": 8, "group_size": size, "data_type": "fp", "fmt": "e4m3", "act_bits": 16}
    tensors = {f"{X}.weight": codes, f"{X}.weight_scale": scales.reshape(-1)}
    want = codes.astype(np.float32) * scales.astype(np.float32).repeat(size, 1)
    np.testing.assert_array_equal(load(tmp_path, tensors, config), want)
    with pytest.raises(safeload.FormatError, match="scales"):
        load(tmp_path, {**tensors, f"{X}.weight_scale": np.ones(7, np.float32)}, config)


# ---- modelopt: SmoothQuant ----

INT8 = rng.integers(-127, 128, (16, 8)).astype(np.int8)
ROWS, COLUMNS = rng.random(16, np.float32), rng.random(8, np.float32) + 1
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL", "producer": {"name": "modelopt"}}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_smoothing_multiplies_the_columns(dtype, tmp_path):
    factors = COLUMNS.astype(dtype)
    tensors = {f"{X}.weight": INT8, f"{X}.weight_scale": ROWS, f"{X}.pre_quant_scale": factors}
    want = INT8.astype(np.float32) * ROWS[:, None] * factors.astype(np.float32)
    np.testing.assert_array_equal(load(tmp_path, {**tensors, f"{X}.input_scale": np.float32(1)}, MODELOPT), want)
    with safeload.open(tmp_path) as opened:
        np.testing.assert_array_equal(opened[f"{X}.weight"][4:9].dequantize(), want[4:9])
    assert len(safeload.load(tmp_path, stored=True)) == 4


@pytest.mark.parametrize("shape", [(16,), (1,), (2, 4), (8, 1)])
def test_smoothing_of_another_shape_is_refused(shape, tmp_path):
    tensors = {f"{X}.weight": INT8, f"{X}.weight_scale": ROWS, f"{X}.pre_quant_scale": np.ones(shape, np.float32)}
    folder_of(tmp_path, tensors, MODELOPT)
    with pytest.raises(FormatError, match="pre_quant_scale"):
        safeload.open(tmp_path)
    assert len(safeload.load(tmp_path, stored=True)) == 3
