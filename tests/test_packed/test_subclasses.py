"""quanto and torchao: what their fixtures do not show, and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest

import safeload
from safeload import QuantizedTensor, UnsupportedError
from safeload.numpy import save_file

F8, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
CODES = np.arange(-96, 96, dtype=np.int8)


def opened(tmp_path, tensors, metadata=None):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"  # Windows does not replace mapped files
    save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, path, metadata)
    return safeload.load(path)


@pytest.mark.parametrize(
    ("shape", "scale", "label"),
    [
        ((2, 8, 12), (2, 8, 1), "int8 row"),
        ((2, 8, 12), (2, 2, 3), "int8 4x4"),
        ((16, 12), (2, 3), "int8 8x4"),
        ((16, 12), (1, 12), "int8 column"),
        ((16, 12), (1, 1), "int8 tensor"),
        ((16, 12), (), "int8 tensor"),
    ],
)
def test_torchao_divides_each_axis_into_equal_blocks(shape, scale, label, tmp_path):
    rng = np.random.default_rng(5)
    codes, scales = CODES.reshape(shape), rng.random(scale, np.float32)
    got = opened(tmp_path, {"a._weight_qdata": codes, "a._weight_scale": scales})["a.weight"]
    spread = scales
    for axis, length in enumerate(shape if scale else ()):
        spread = spread.repeat(length // scale[axis], axis)
    assert got.scheme == label
    np.testing.assert_array_equal(got.dequantize(), codes.astype(np.float32) * spread)


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"a._weight_scale": np.ones((16, 1), np.float32)}, "Int4TilePackedTo4dTensor"),
        ({"a._weight_scale": np.ones((16, 1), np.float32)}, None),
        ({"a._weight_scale": np.ones((16, 1), np.float32)}, "{"),
        ({"a._weight_scale": np.ones((16, 6), E8M0)}, "Int8Tensor"),
        ({"a._weight_scale": np.ones((5, 1), np.float32)}, "Int8Tensor"),
        (
            {"a._weight_scale": np.ones((16, 1), np.float32), "a._weight_zero_point": np.zeros((16, 2), np.int8)},
            "Int8Tensor",
        ),
        (
            {"a._weight_scale": np.ones((16, 1), np.float32), "a._weight_act_pre_scale": np.ones(12, np.float32)},
            "Int8Tensor",
        ),
    ],
    ids=["tiles", "no type", "no JSON", "exponents", "scales", "zero points", "factors"],
)
def test_other_types_of_torchao_open_as_stored(more, kind, tmp_path):
    tensors = {"a._weight_qdata": CODES.reshape(16, 12), **more}
    text = kind if kind == "{" else json.dumps({"_type": kind, "_data": {}})
    assert opened(tmp_path, tensors, {"a.weight": text}).keys() == tensors.keys()
    with pytest.raises(UnsupportedError, match=r"'a._weight_qdata' holds I8 codes, whose scale is 'a._weight_scale'"):
        safeload.load(tmp_path / "0.safetensors", dtype="float32")


@pytest.mark.parametrize("key", ["weights", "weights_dtype"])
def test_quanto_has_a_key_of_transformers_or_of_diffusers(key, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    tensors = {"w._data": CODES.reshape(16, 12), "w._scale": np.float32(0.5)}
    save_file({name: np.asarray(one) for name, one in tensors.items()}, folder / "model.safetensors")
    for value, refused in (("int8", False), ("int8_log", True)):
        settings = {"quant_method": "quanto", "modules_to_not_convert": None, key: value}
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
        if refused:
            with pytest.raises(UnsupportedError, match=f"{key} int8_log"):
                safeload.load(folder, dtype="float32")
        else:
            np.testing.assert_array_equal(safeload.load(folder, dtype="float32")["w"], tensors["w._data"] * 0.5)


def test_quanto_has_a_scale_for_all_or_for_each_index_of_the_first_axis(tmp_path):
    codes = CODES[:72].reshape(4, 2, 3, 3)
    for scale in (np.float32([[[[1]]], [[[2]]], [[[3]]], [[[0.1]]]]), np.ones((4, 2, 1, 1), np.float32)):
        got = opened(tmp_path, {"conv.weight._data": codes, "conv.weight._scale": scale})
        if scale.size == 8:
            assert got.keys() == {"conv.weight._data", "conv.weight._scale"}
            continue
        packed = got["conv.weight"]
        assert isinstance(packed, QuantizedTensor)
        np.testing.assert_array_equal(packed.dequantize(), codes.astype(np.float32) * scale)
        np.testing.assert_array_equal(packed[1:3].dequantize(), (codes.astype(np.float32) * scale)[1:3])
    whole = opened(
        tmp_path, {"w._data": CODES.reshape(16, 12).astype(np.float32).astype(F8), "w._scale": np.float32(2)}
    )
    assert whole["w"].scheme == "fp8 tensor"


def experts(tmp_path, name, *, more=None):
    codes, scales = CODES.reshape(2, 8, 12), np.linspace(0.5, 2, 16, dtype=np.float32).reshape(2, 8, 1)
    tensors = {f"{name}_qdata": codes, f"{name}_scale": scales, **(more or {})}
    return opened(tmp_path, tensors), codes.astype(np.float32) * scales


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj", "weight", "w1", "x_scale", "_odd", "bias"])
def test_torchao_names_codes_by_their_parameter(parameter, tmp_path):
    got, want = experts(tmp_path, f"m.experts._{parameter}")
    np.testing.assert_array_equal(got[f"m.experts.{parameter}"].dequantize(), want)


def test_torchao_parameters_of_the_model_itself_are_named(tmp_path):
    got, want = experts(tmp_path, "_gate_up_proj")
    assert list(got) == ["gate_up_proj"]
    np.testing.assert_array_equal(got["gate_up_proj"].dequantize(), want)


def test_codes_of_a_public_name_are_not_torchaos(tmp_path):
    got, _ = experts(tmp_path, "m.experts.gate_up_proj")
    assert sorted(got) == ["m.experts.gate_up_proj_qdata", "m.experts.gate_up_proj_scale"]


def test_scales_of_activations_beside_experts_change_the_values(tmp_path):
    scaled, _ = experts(tmp_path, "e._down_proj", more={"e._down_proj_act_pre_scale": np.ones(12, np.float32)})
    assert "e.down_proj" not in scaled
    quantized, want = experts(tmp_path, "e._down_proj", more={"e._down_proj_act_quant_scale": np.ones(1, np.float32)})
    np.testing.assert_array_equal(quantized["e.down_proj"].dequantize(), want)
