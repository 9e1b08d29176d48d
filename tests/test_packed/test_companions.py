"""Tensors beside codes that their family does not read: scales are an error by name, bookkeeping is not."""

import json
import shutil
import time

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main
from builders.quantized import FIXTURES, IN_GGUF, each_kind, each_kind_with

import safeload
from safeload import QuantizedTensor, UnsupportedError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

F8 = ml_dtypes.float8_e4m3fn
X = "model.layers.0.mlp.down_proj"
CODES, ROWS = np.ones((64, 32), F8), np.full((64, 1), 2, np.float32)
FP8 = {f"{X}.weight": CODES, f"{X}.weight_scale": ROWS}


def folder_of(path, tensors, config=None):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors", durable=False)
    if config is not None:
        (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return path


def with_companion(fixture, path, suffix):
    """A copy of a fixture with one more tensor beside one of its packed tensors: the name of the latter."""
    shutil.copytree(fixture.folder, path)
    with safeload.open(path) as opened:
        packed = [name for name, info in opened.tensors.items() if len(info.parts) > 1 and name.endswith(".weight")]
    if not packed:
        return None
    name = packed[0].removesuffix(".weight") + suffix
    file = next(file for file in sorted(path.glob("*.safetensors")))
    with safeload.open(file, stored=True) as opened:
        tensors, metadata = {key: np.array(value) for key, value in opened.load().items()}, opened.metadata
    file.unlink()
    save_file({**tensors, name: np.float32([3])}, file, metadata, durable=False)
    for index in path.glob("*.index.json"):
        read = json.loads(index.read_text())
        read["weight_map"][name] = file.name
        index.write_text(json.dumps(read))
    return packed[0]


SUFFIXES = [
    ".weight_smoothing", ".rotation_matrix", ".weight.second_scale", ".weight_scale.second", ".weight_offset",
    ".outlier_values",
]  # fmt: skip


@each_kind_with("suffix", {suffix: suffix for suffix in SUFFIXES}, *IN_GGUF)
def test_a_family_that_does_not_read_a_companion_refuses_that_module_alone(fixture, suffix, tmp_path):
    path = tmp_path / "x"
    name = with_companion(fixture, path, suffix)
    if name is None:
        pytest.skip("its packed tensors have no module of their own")
    want = fixture.expected()
    with safeload.open(path) as opened:
        packed = [key for key, value in opened.load().items() if isinstance(value, QuantizedTensor)]
        assert name not in packed
        others = [key for key in want if key in opened and key != name]
        for key, array in opened.load(others, dtype="float32").items():
            np.testing.assert_array_equal(array, want[key])
        with pytest.raises(UnsupportedError, match=f"does not dequantize it: '{suffix.lstrip('._')}' beside its codes"):
            opened.load(dtype="float32")
    with safeload.open(path, stored=True) as opened:
        assert name.removesuffix(".weight") + suffix in opened


@each_kind(*IN_GGUF)
def test_companions_of_activations_change_nothing(fixture, tmp_path):
    for number, suffix in enumerate((".input_scale", ".output_zero_point", ".k_scale", ".activation_scaling_factor")):
        path = tmp_path / str(number)
        if with_companion(fixture, path, suffix) is not None:
            got = safeload.load(path, dtype="float32")
            for key, array in fixture.expected().items():
                np.testing.assert_array_equal(got[key], array)


@pytest.mark.parametrize(
    "more",
    [
        "weight_scale_2", "weight_scale_inv", "pre_quant_scale", "weight_global_scale", "smooth_factor", "SCB",
        "weight_zp", "input_rotation", "hadamard", "perm", "weight_g_idx", "svdquant_lora_a", "weight.absmax", "qzeros",
        "weight_quantizer.1.scale", "biases", "act_pre_scale", "weight_zeros",
    ],
)  # fmt: skip
def test_fp8_with_a_second_scale(more, tmp_path):
    folder_of(tmp_path, {**FP8, f"{X}.{more}": np.float32([3])}, {"quant_method": "modelopt", "quant_algo": "FP8"})
    stored = safeload.load(tmp_path)
    assert set(stored) == {*FP8, f"{X}.{more}"}
    for operation in (
        lambda: safeload.load(tmp_path, dtype="float32"),
        lambda: safeload.load(tmp_path / "model.safetensors", dtype="bfloat16"),
        lambda: safeload.stats(tmp_path),
        lambda: safeload.diff(tmp_path, tmp_path),
        lambda: safeload.load_quantized(tmp_path, "int8"),
        lambda: safeload.convert(tmp_path, tmp_path / "x.npz", dtype="float32"),
        lambda: safeload.open(tmp_path).get_slice(f"{X}.weight", dtype="float32"),
    ):
        with pytest.raises(UnsupportedError, match=r"holds F8_E4M3 codes"):
            operation()


@pytest.mark.parametrize(
    "more",
    [
        "input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "input_global_scale",
        "input_zero_point", "gate_up_proj_input_scale", "down_proj_input_scale",
        "input_scale_ub", "activation_scale", "qscale_act", "scale_input",
        "gate_up_proj_activation_scale", "down_proj_activation_scale", "_weight_act_quant_scale",
        "_gate_up_proj_act_quant_scale", "_down_proj_act_quant_scale",
        "_weight_act_quant_zero_point", "input_activation_scale", "output_activation_scale", "output_zero_point",
        "input_scale_2", "output_scale_2", "q_zero_point", "k_zero_point", "v_zero_point",
        "bias_scale", "bias", "embed_scale",
    ],
)  # fmt: skip
def test_fp8_with_a_companion_that_leaves_weights_alone(more, tmp_path):
    folder_of(tmp_path, {**FP8, f"{X}.{more}": np.float32([3])}, {"quant_method": "modelopt", "quant_algo": "FP8"})
    np.testing.assert_array_equal(safeload.load(tmp_path, dtype="float32")[f"{X}.weight"], np.full((64, 32), 2))


@pytest.mark.parametrize("more", ["_scale_2", "_zero_point", "_smooth_factor", "_rotation", "_scales.second"])
def test_a_scale_beside_the_module_is_a_companion_too(more, tmp_path):
    folder_of(tmp_path, {**FP8, f"{X}{more}": np.float32([3])}, {"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match=r"beside its codes"):
        safeload.load(tmp_path, dtype="float32")


def test_scales_of_other_modules_are_not_companions(tmp_path):
    others = {
        name: np.float32([3])
        for name in (
            "model.layers.0.mlp.scale", "model.layers.0.mlp.down_proj_norm.scale", f"{X}.norm.scale", "logit_scale",
            "model.layers.0.mlp.down_projection_scale", f"{X}.input_quantizer.scale", f"{X}_norm_scale",
        )
    }  # fmt: skip
    folder_of(tmp_path, {**FP8, **others}, {"quant_method": "modelopt", "quant_algo": "FP8"})
    got = safeload.load(tmp_path, dtype="float32")
    np.testing.assert_array_equal(got[f"{X}.weight"], np.full((64, 32), 2))
    assert others.keys() <= got.keys()


def test_info_says_why(tmp_path, capsys):
    folder_of(
        tmp_path, {**FP8, f"{X}.pre_quant_scale": ROWS[:32, 0]}, {"quant_method": "modelopt", "quant_algo": "FP8"}
    )
    assert main(["info", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not dequantized: 1 tensor: 'pre_quant_scale' beside its codes can change their values" in said


@pytest.mark.parametrize("more", ["weights_scaling_factor", "per_channel_scale", "my_scale", "weight_smooth"])
def test_fp8_beside_a_scale_of_an_unknown_kind_is_no_plain_tensor(more, tmp_path):
    save_file({"a.weight": CODES, f"a.{more}": np.float32([3])}, tmp_path / "x.safetensors")
    assert set(safeload.load(tmp_path / "x.safetensors")) == {"a.weight", f"a.{more}"}
    for stored in (False, True):
        with pytest.raises(UnsupportedError, match=rf"whose scale is 'a.{more}'"):
            safeload.load(tmp_path / "x.safetensors", dtype="float32", stored=stored)
    with pytest.raises(UnsupportedError, match="whose scale is"):
        safeload.numpy.load_file(tmp_path / "x.safetensors", dtype="float32")


def test_fp8_beside_other_tensors_is_a_plain_tensor(tmp_path):
    tensors = {"a.weight": CODES, "a.bias": CODES[0], "a.input_scale": np.float32([3]), "a.norm.scale": CODES[0]}
    save_file(tensors, tmp_path / "x.safetensors")
    assert safeload.load(tmp_path / "x.safetensors", dtype="float32")["a.weight"].max() == 1


@pytest.mark.parametrize("algorithm", ["FP8", "W8A8_SQ_PER_CHANNEL", "INT4_AWQ"])
@pytest.mark.parametrize("dtype", [F8, np.int8], ids=["fp8", "int8"])
def test_folders_of_tensorrt_llm_are_refused_by_name(algorithm, dtype, tmp_path):
    save_file(
        {f"{X}.weight": CODES.astype(dtype), f"{X}.weights_scaling_factor": np.float32([0.003])},
        tmp_path / "rank0.safetensors",
    )
    config = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(safeload.load(tmp_path)) == 2
    with pytest.raises(UnsupportedError, match=r"This is TensorRT-LLM's"):
        safeload.load(tmp_path, dtype="float32")


def test_long_names_take_linear_time(tmp_path):
    """A name of many parts is compared with a few names only."""
    long = "a" + "_b." * 300_000 + "scale"
    folder_of(tmp_path, {**FP8, long: np.float32([1])}, {"quant_method": "modelopt", "quant_algo": "FP8"})
    begin = time.perf_counter()
    safeload.load(tmp_path, dtype="float32")
    assert time.perf_counter() - begin < 5


def test_the_configuration_decides_for_one_of_many_modules(tmp_path):
    tensors = {f"m.{k}.weight": CODES for k in range(200)} | {f"m.{k}.weight_scale": ROWS for k in range(200)}
    folder_of(tmp_path, {**tensors, "m.7.weight_scale_2": np.float32([2])}, {"quant_method": "fp8"})
    with safeload.open(tmp_path) as opened:
        assert sum(len(info.parts) > 1 for info in opened.tensors.values()) == 199
        with pytest.raises(UnsupportedError, match=r"'m.7.weight' holds"):
            opened.load(["m.6.weight", "m.7.weight"], dtype="float32")
        assert len(opened.load(["m.6.weight", "m.8.weight"], dtype="float32")) == 2


def test_fixtures_have_no_unread_companions():
    for fixture in FIXTURES.values():
        with safeload.open(fixture.path) as opened:
            assert opened.load(dtype="float32").keys() == safeload.stats(opened).keys() == {*opened}, fixture.name


def test_a_module_may_have_a_telling_name(tmp_path):
    """Its bias and its neighbours are no companions of its codes."""
    fixture, path = FIXTURES["ct_fp8_channel"], tmp_path / "x"
    shutil.copytree(fixture.folder, path)
    stored = {name.replace("down_proj", "scale_offset"): np.array(value) for name, value in fixture.stored().items()}
    module = next(name for name in stored if name.endswith("scale_offset.weight")).removesuffix(".weight")
    stored |= {f"{module}.bias": np.ones(3, np.float32), f"{module}.norm.weight": np.ones(3, np.float32)}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, path / "model.safetensors", durable=False)
    want = fixture.expected()
    got = safeload.load(path, dtype="float32")
    for name, values in want.items():
        np.testing.assert_array_equal(got[name.replace("down_proj", "scale_offset")], values)
