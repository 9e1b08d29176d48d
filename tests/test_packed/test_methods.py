"""Settings of configurations: those of real writers are read or ignored, unknown ones make values an error by name."""

import json
import shutil
import subprocess
import sys
import time
from importlib.resources import files

import numpy as np
import pytest
from builders.inside import main, quantization_of
from builders.paths import DATA
from builders.quantized import FIXTURES, IN_GGUF, each_kind_with

import safeload
import safeload.numpy
from safeload import FormatError, QuantizedTensor, UnsupportedError


def changed(fixture, path, change):
    """A copy of a fixture with another quantization; False if it has none."""
    shutil.copytree(fixture.folder, path)
    file = path / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    said = quantization_of(config)
    if said is None or not said.method:
        return False
    change(said.values)
    if said.method == "mlx":  # its writer stores two copies
        config.update(dict.fromkeys(("quantization", "quantization_config") & config.keys(), said.values))
    file.write_text(json.dumps(config))
    return True


def assert_expected(path, fixture):
    got = safeload.load(path, dtype="float32")
    for name, values in fixture.expected().items():
        np.testing.assert_array_equal(got[name], values)


def assert_refused(path, what, stored):
    assert not any(isinstance(value, QuantizedTensor) for value in safeload.load(path).values())
    assert set(safeload.load(path, stored=True)) == set(stored)
    for operation in (
        lambda: safeload.load(path, dtype="float32"),
        lambda: safeload.stats(path),
        lambda: safeload.convert(path, path / "x.npz", dtype="float32"),
    ):
        with pytest.raises(UnsupportedError, match=what):
            operation()
    assert main(["info", str(path)]) == 0


@each_kind_with(
    "value", {"true": True, "2": 2, "text": "yes", "list": [1], "mapping": {"a": 1}}, *IN_GGUF, "bitnet_online"
)
def test_a_key_that_no_writer_has_is_refused(fixture, value, tmp_path):
    path = tmp_path / "x"
    if not changed(fixture, path, lambda said: said.update(inverse_weight_scaling=value)):
        pytest.skip("it has no configuration of its own")
    if fixture.name.startswith("mlx") and value is True:
        pytest.skip("this is an entry of a module")
    with pytest.raises(UnsupportedError, match=r" holds .*inverse_weight_scaling"):
        safeload.load(path, dtype="float32")


@each_kind_with("value", {"null": None, "false": False, "no text": "", "no list": [], "no mapping": {}}, *IN_GGUF)
def test_a_key_that_is_not_set_is_not_refused(fixture, value, tmp_path):
    if changed(fixture, tmp_path / "x", lambda said: said.update(inverse_weight_scaling=value)):
        assert_expected(tmp_path / "x", fixture)


# ---- settings below the top level, and settings that contradict the codes ----


def _groups(said):
    return list(said["config_groups"].values())


def _preset(said):
    said["config_groups"] = {"W8A8": ["Linear"]}


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("ct_fp8_channel", lambda said: _groups(said)[0].update(rotated="yes"), "rotated yes"),
        ("ct_pack_w4_g32_sym", lambda said: _groups(said)[0].update(scale_factor=2), "scale_factor 2"),
        ("ct_fp8_channel", _preset, r"config_groups W8A8 \['Linear'\]"),
        ("modelopt_nvfp4", lambda said: _groups(said)[0].update(smoothing={"alpha": 1}), "smoothing"),
        ("quark_floats", lambda said: said["export"].update(weight_format="fake_quantized"), "weight_format fake"),
        ("quark_integers", lambda said: said["export"].update(inverse_scales=True), "inverse_scales True"),
    ],
    ids=["group", "packed group", "preset", "modelopt group", "export format", "export key"],
)
def test_an_unknown_setting_below_the_top_level_is_refused(name, change, what, tmp_path):
    path = tmp_path / "x"
    assert changed(FIXTURES[name], path, change)
    assert_refused(path, what, FIXTURES[name].stored())


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("ct_fp8_channel", lambda said: _groups(said)[0]["weights"].update(num_bits=4), "8 bits, but num_bits is 4"),
        ("ct_fp8_block", lambda said: _groups(said)[0]["weights"].update(num_bits="8"), "8 bits, but num_bits is '8'"),
        ("ct_mxfp4", lambda said: _groups(said)[0]["weights"].update(num_bits=8), "4 bits, but num_bits is 8"),
        ("ct_mxfp6", lambda said: _groups(said)[0]["weights"].update(num_bits=4), "6 bits, but num_bits is 4"),
        ("ct_pack_w5_g32", lambda said: _groups(said)[0]["weights"].update(num_bits=10), "5 bits, but num_bits is 10"),
        ("ct_int8_channel", lambda said: _groups(said)[0]["weights"].update(num_bits=9), "8 bits, but num_bits is 9"),
        ("ct_nvfp4", lambda said: _groups(said)[0]["weights"].update(group_size=17), "of 16, but group_size is 17"),
        ("modelopt_nvfp4", lambda said: _groups(said)[0]["weights"].update(group_size=32), "but group_size is 32"),
        ("mlx_affine5_g64", lambda said: said.update(bits=10), "unknown bits 10"),
    ],
)
def test_bits_and_groups_that_contradict_the_codes_are_an_error(name, change, what, tmp_path):
    path = tmp_path / "x"
    assert changed(FIXTURES[name], path, change)
    with pytest.raises(FormatError, match=what):
        safeload.load(path, dtype="float32")
    assert set(safeload.load(path, stored=True)) == set(FIXTURES[name].stored())


# ---- what writers set ----

OPTIMUM = {
    "tokenizer": None, "dataset": None, "damp_percent": 0.1, "act_group_aware": True, "true_sequential": True,
    "format": "gptq", "meta": None, "backend": "auto", "model_seqlen": None, "block_name_to_quantize": None,
    "module_name_preceding_first_block": None, "batch_size": 1, "pad_token_id": None, "max_input_length": None,
    "cache_block_outputs": True, "modules_in_block_to_quantize": None, "checkpoint_format": "gptq",
}  # fmt: skip
AUTO_GPTQ = {
    "damp_percent": 0.01, "static_groups": False, "true_sequential": True, "model_name_or_path": "a/b",
    "model_file_base_name": "model", "is_marlin_format": False, "use_exllama": True, "exllama_config": {"version": 1},
}  # fmt: skip
GPTQMODEL = {
    "lm_head": False, "method": "gptq", "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "uri": "https://github.com/modelcloud/gptqmodel", "mse": 0.0,
             "hessian": {"staging_dtype": "float32"}, "gptaq": None, "fallback": {"strategy": "rtn", "smooth": None}},
}  # fmt: skip
AUTO_ROUND = {
    "act_bits": 16, "data_type": "int", "act_data_type": "int", "act_group_size": 32, "act_sym": True,
    "act_dynamic": True, "amp": False, "batch_size": 4, "enable_minmax_tuning": True, "enable_norm_bias_tuning": True,
    "enable_quanted_input": True, "gradient_accumulate_steps": 2, "iters": 0, "lr": 0.1, "low_gpu_mem_usage": True,
    "minmax_lr": 0.1, "nsamples": 512, "scale_dtype": "torch.float32", "seqlen": 512, "super_bits": 6,
    "super_group_size": 8, "static_kv_dtype": "fp8", "static_kv_granularity": "tensor", "autoround_version": "0.16.1",
    "block_name_to_quantize": "model.layers", "dataset": "x", "provider": "auto-round",
}  # fmt: skip
COMPRESSED = {
    "global_compression_ratio": 1.5, "quantization_status": "frozen", "version": "0.9.0",
    "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "moe_sparsity_config": {"method": "prune"},
    "provider": "auto-round", "attention_input_activations": {"targets": []}, "run_compressed": True,
}  # fmt: skip
FINEGRAINED = {
    "fmt": "float8_e4m3fn", "scale_fmt": "ue8m0", "expert_dtype": "fp8", "dequantize": True,
    "activation_scheme": "static", "ignored_layers": ["lm_head"], "modules_to_convert": ["a"],
    "kv_cache_scheme": "static", "kv_cache_quant_targets": ["k_proj"], "packed_modules_mapping": {},
}  # fmt: skip
AUTO_ROUND_FP8 = {
    "bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp", "act_bits": 8, "act_data_type": "fp",
    "act_group_size": 128, "act_sym": True, "act_dynamic": True, "fmt": "e4m3", "activation_scheme": "dynamic",
    "iters": 0, "enable_quanted_input": False, "autoround_version": "0.15.1", "ignored_layers": ["lm_head"],
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float", "act_bits": 16}},
}  # fmt: skip
# llm-compressor's SpinQuant merges R1 and R2 into weights; R3 rotates queries and keys, R4 the input of a layer.
SPINQUANT = {
    "R1": {"type": "hadamard", "apply": [{"targets": ["re:.*q_proj$"], "location": "weight_input", "inverse": True},
                                         {"targets": ["re:.*o_proj$"], "location": "weight_output"}]},
    "R3": {"type": "hadamard", "apply": [{"targets": ["re:.*self_attn$"], "location": "q_attn"},
                                         {"targets": ["re:.*self_attn$"], "location": "k_cache"}]},
}  # fmt: skip
WRITERS = [
    ("gptq4_g32_asym", OPTIMUM), ("gptq4_g32_asym", AUTO_GPTQ), ("gptq4_g32_asym", GPTQMODEL),
    ("gptq_dynamic_raw_zeros", GPTQMODEL), ("gptq4_g32_asym", AUTO_ROUND), ("autoround_gptq", AUTO_ROUND),
    ("autoround_raw_zeros", {"act_bits": 16, "data_type": "int", "seed": 42, "train_bs": 1, "sampler": "rand"}),
    ("awq4_gemm", {"backend": "autoawq", "do_fuse": False, "fuse_max_seq_len": 512, "modules_to_fuse": {"a": 1}}),
    ("awq4_gemm", {**GPTQMODEL, "method": "awq", "quant_method": "awq", "format": "gemm", "checkpoint_format": "gemm"}),
    ("awq4_gemm", AUTO_ROUND), ("awq4_gemm", {"version": "GEMM"}),
    ("ct_pack_w4_g32_sym", COMPRESSED), ("ct_fp8_channel", COMPRESSED), ("ct_nvfp4", COMPRESSED),
    ("ct_int8_channel", {**COMPRESSED, "bits": 8, "data_type": "int", "sym": True, "iters": 0}),
    ("fp8_block", FINEGRAINED), ("fp8_autofp8", FINEGRAINED), ("fp8_experts", FINEGRAINED),
    ("fbgemm", {"activation_scale_ub": 1000, "dequantize": True}),
    ("modelopt_nvfp4", {"group_size": 16, "has_zero_point": False, "pre_quant_scale": True, "lora_rank": 32}),
    ("modelopt_nvfp4", {"quant_algo": "W4A16_NVFP4"}),
    ("modelopt_fp8", {"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], "quantized_layers": {}}),
    ("bitnet_times", {"use_rms_norm": True, "rms_norm_eps": 1e-6}),
    ("bnb_nf4", {"bnb_4bit_blocksize": 64, "llm_int8_threshold": 3.0, "quant_method": "bitsandbytes"}),
    ("mlx_affine4_g64", {"lm_head": False, "model.norm": {"bits": 4, "group_size": 64}}),
    ("mlx_affine4_g64", {"bits": 8, "group_size": 32, "model.embed_tokens": {"bits": 4, "group_size": None},
                         "model.layers.0.self_attn.q_proj": {"mode": "affine"}}),  # mlx-lm's recipes; MLX's defaults
    ("gpt_oss", {"dequantize": True}),
    ("quark_floats", {"kv_cache_group": ["*k_proj"], "shared_scale_groups": [["a"]], "keep_prequantized_layers": True}),
    ("mxfp8", FINEGRAINED),
    ("fp8_block", AUTO_ROUND_FP8), ("ct_pack_w4_g32_sym", {"transform_config": {"config_groups": SPINQUANT}}),
    ("ct_fp8_channel", {"transform_config": {"config_groups": {}}}),
    ("ct_pack_w4_g32_sym", {"format": "fakequant"}), ("ct_fp8_block", {"format": "fakequant"}),
    ("modelopt_nvfp4", {"quant_type": "NVFP4"}),
    ("modelopt_nvfp4", {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION",
                        "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16}}}),
    ("modelopt_nvfp4", {"config_groups": None, "weights": {"num_bits": 4, "type": "float", "group_size": 16}}),
    ("autoround_gptq", {"model_free": True, "data_type": "int"}),
    ("mlx_affine4_g64", {"quant_method": "auto-round", "packing_format": "mlx", "sym": True, "mode": None}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), WRITERS)
def test_settings_of_real_writers_are_known(name, settings, tmp_path):
    assert changed(FIXTURES[name], tmp_path / "x", lambda said: said.update(settings))
    assert_expected(tmp_path / "x", FIXTURES[name])


ROTATED = {
    "input": [{"location": "input"}, {"location": "weight_input", "inverse": True}], "output": [{"location": "output"}],
    "keys alone": [{"location": "k_cache"}], "unknown": [{"location": "bias"}], "no location": [{}], "no list": 1,
}  # fmt: skip


@pytest.mark.parametrize("steps", ROTATED.values(), ids=ROTATED)
def test_a_transform_at_run_time_is_refused(steps, tmp_path):
    groups = {**SPINQUANT, "R4": {"type": "hadamard", "apply": steps}}
    fixture = FIXTURES["ct_pack_w4_g32_sym"]
    assert changed(fixture, tmp_path / "x", lambda said: said.update(transform_config={"config_groups": groups}))
    assert_refused(tmp_path / "x", r"rotated basis \(transform_config\)", fixture.stored())


SPELLINGS = [
    ("fp8_block", "FP8"), ("fbgemm", "FBGEMM_FP8"), ("mxfp8", "MXFP8"), ("gptq4_g32_asym", "GPTQ"),
    ("awq4_gemm", "AWQ"), ("autoround_gptq", "Auto-Round"), ("bitnet_times", "BitNet"), ("gpt_oss", "MXFP4"),
    ("quark_floats", "Quark"), ("ct_pack_w4_g32_sym", "compressed_tensors"), ("ct_pack_w4_g32_sym", "sparseml"),
    ("ct_nvfp4", "Compressed-Tensors"), ("bnb_nf4", "bitsandbytes_4bit"), ("bnb_int8", "bitsandbytes_8bit"),
    ("modelopt_fp8", "ModelOpt"), ("modelopt_nvfp4", "modelopt_fp4"), ("modelopt_nvfp4", "MODELOPT_FP4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "method"), SPELLINGS)
def test_methods_are_known_in_the_spellings_of_other_readers(name, method, tmp_path):
    assert changed(FIXTURES[name], tmp_path / "x", lambda said: said.update(quant_method=method))
    assert_expected(tmp_path / "x", FIXTURES[name])


@pytest.mark.parametrize("method", ["compressed_tensors", "sparseml", None])
def test_another_spelling_hides_no_contradiction(method, tmp_path):
    def change(said):
        said["quant_method"] = method
        said["config_groups"]["group_0"]["weights"]["block_structure"] = [64, 64]

    assert changed(FIXTURES["ct_fp8_block"], tmp_path / "x", change)
    with pytest.raises(FormatError, match=r"expected .* for blocks of 64 x 64"):
        safeload.open(tmp_path / "x")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("name", ["modelopt_fp8", "modelopt_nvfp4"])
def test_modelopt_settings_as_in_hf_quant_config(name, key, tmp_path):
    """Some tools copy hf_quant_config.json into config.json, whole or in part."""
    path = tmp_path / "x"
    shutil.copytree(FIXTURES[name].folder, path)
    inner = {"quant_algo": name[9:].upper(), "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    wrapped = {"producer": {"name": "modelopt"}, "quantization": inner}
    (path / "config.json").write_text(json.dumps({key: inner if key == "quantization" else wrapped}))
    assert_expected(path, FIXTURES[name])


@pytest.mark.parametrize(
    "copy", [{"bits": 8, "group_size": 128}, {"quant_method": "fp8", "weight_block_size": [128, 128]}]
)
def test_mlx_settings_win_over_a_copy_that_differs(copy, tmp_path):
    """Readers of MLX take "quantization"; early converters left the source's quantization_config in place."""
    fixture, path = FIXTURES["mlx_affine4_g64"], tmp_path / "x"
    shutil.copytree(fixture.folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": copy}))
    assert_expected(path, fixture)


# ---- unknown values ----

UNKNOWN = [
    ("fp8_block", {"scale_fmt": "ue5m3"}, "scale_fmt ue5m3"),
    ("fp8_block", {"fmt": "e3m4"}, "fmt e3m4"),
    ("fp8_block", {"weight_scale_semantics": "logarithm"}, "weight_scale_semantics logarithm"),
    ("fp8_block", {"expert_dtype": "int3"}, "expert_dtype int3"),
    ("fp8_block", {"bits": 6}, "bits 6"),
    ("fp8_block", {"quant_method": "fp8_squared"}, "quant_method fp8_squared"),
    ("fp8_autofp8", {"rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config"),
    ("bitnet_times", {"linear_class": "trilinear"}, "linear_class trilinear"),
    ("bitnet_times", {"quantization_mode": "sideways"}, "quantization_mode sideways"),
    ("gptq4_g32_asym", {"checkpoint_format": "gptq_v3"}, "checkpoint_format gptq_v3"),
    ("gptq4_g32_asym", {"format": "gptq_p"}, "format gptq_p"),
    ("gptq4_g32_asym", {"rotation": "hadamard"}, "rotation hadamard"),
    ("gptq4_g32_asym", {"data_type": "int_asym_float_zp"}, "data_type int_asym_float_zp"),
    ("gptq4_g32_asym", {"is_marlin_format": True}, "is_marlin_format"),
    ("awq4_gemm", {"version": "gemx"}, "version gemx"),
    ("awq4_gemm", {"quant_method": "paroquant"}, "quant_method paroquant"),
    ("autoround_gptq", {"data_type": "int_sym_dq"}, "data_type int_sym_dq"),
    ("autoround_gptq", {"spinquant_config": {"r1": True}}, "spinquant_config"),
    ("ct_fp8_channel", {"format": "float-squared"}, "format float-squared"),
    ("ct_nvfp4", {"format": "nvfp4-e5m3-pack-quantized"}, "format nvfp4-e5m3-pack-quantized"),
    ("ct_pack_w4_g32_sym", {"sparsity_config": {"format": "sparse-25"}}, "sparsity_config format sparse-25"),
    ("ct_fp8_channel", {"fp8_dtype_flavor": "float8_e4m3fnuz"}, "fp8_dtype_flavor float8_e4m3fnuz"),
    ("modelopt_fp8", {"quant_algo": "FP8_LOG"}, "quant_algo FP8_LOG"),
    ("modelopt_fp8", {"quant_method": None, "quant_algo": "FP8_LOG"}, "quant_algo FP8_LOG"),
    ("modelopt_nvfp4", {"moe_quant_algo": "NVFP5"}, "moe_quant_algo NVFP5"),
    ("modelopt_nvfp4", {"swap_weight_nibbles": True}, "swap_weight_nibbles True"),
    ("modelopt_nvfp4", {"config_groups": None, "weights": {"type": "log"}}, "type log"),
    ("ct_fp8_channel", {"quant_method": "COMPRESSED_TENSORS", "format": "float-squared"}, "format float-squared"),
    ("mlx_affine4_g64", {"mode": "codebook"}, "mode codebook"),
    ("mlx_affine4_g64", {"rotation": {"kind": "hadamard"}}, "rotation"),
    ("bnb_nf4", {"bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type nf5"),
    ("gemma", {"mode": 3}, "mode 3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "what"), [one for one in UNKNOWN if one[0] in FIXTURES])
def test_an_unknown_value_is_refused_by_name(name, settings, what, tmp_path, capsys):
    fixture, path = FIXTURES[name], tmp_path / "x"
    assert changed(fixture, path, lambda said: said.update(settings))
    assert_refused(path, what, fixture.stored())


WEIGHTS = [
    ("ct_fp8_channel", {"type": "complex"}, "type complex"),
    ("ct_fp8_channel", {"type": "int"}, "type int of F8_E4M3 codes"),
    ("ct_int8_channel", {"type": "float"}, "type float of I8 codes"),
    ("ct_pack_w4_g32_sym", {"strategy": "diagonal"}, "strategy diagonal"),
    ("ct_pack_w4_g32_sym", {"actorder": "random"}, "actorder random"),
    ("ct_int8_channel", {"dynamic": True}, "dynamic True"),
    ("ct_nvfp4", {"second_scale": 4}, "second_scale 4"),
    ("modelopt_nvfp4", {"type": "logarithmic"}, "type logarithmic"),
]


@pytest.mark.parametrize(("name", "settings", "what"), WEIGHTS)
def test_an_unknown_description_of_weights_is_refused(name, settings, what, tmp_path):
    def change(said):
        for group in said["config_groups"].values():
            group["weights"].update(settings)

    path = tmp_path / "x"
    assert changed(FIXTURES[name], path, change)
    assert_refused(path, what, FIXTURES[name].stored())


def test_only_modules_that_the_setting_targets_are_refused(tmp_path):
    """Of two groups of modules one has an unknown strategy."""
    fixture, path = FIXTURES["ct_mixed"], tmp_path / "x"
    assert changed(fixture, path, lambda said: said["config_groups"]["group_1"]["weights"].update(observed=3))
    want = fixture.expected()
    with safeload.open(path) as opened:
        packed = {name for name, value in opened.load().items() if isinstance(value, QuantizedTensor)}
        assert packed
        assert all("self_attn" in name for name in packed)
        for name, values in opened.load(list(packed), dtype="float32").items():
            np.testing.assert_array_equal(values, want[name])
        with pytest.raises(UnsupportedError, match="observed 3"):
            opened.load(dtype="float32")


def is_refused(opened, name):
    try:
        opened.load([name], dtype="float32")
    except UnsupportedError as error:
        return f"'{name}' holds " in str(error)
    return False


@pytest.mark.parametrize(
    ("name", "key", "module", "setting"),
    [
        ("gptq_dynamic_raw_zeros", "dynamic", r"+:.*\.down_proj$", {"bits": 8, "group_size": 64, "rotation": "x"}),
        ("autoround_raw_zeros", "extra_config", ".*mlp\\.down_proj.*", {"bits": 7, "data_type": "int_asym_dq"}),
        ("mlx_experts", None, "model.embed_tokens", {"group_size": 64, "bits": 8, "mode": "affine", "sign": 1}),
    ],
)
def test_settings_of_single_modules_concern_them_alone(name, key, module, setting, tmp_path):
    def change(said):
        own = said if key is None else said[key]
        if key == "dynamic":
            said[key] = {module: setting, **own}
        else:
            own[module] = setting

    path = tmp_path / "x"
    assert changed(FIXTURES[name], path, change)
    with safeload.open(path) as opened:
        assert sum(is_refused(opened, one) for one in opened) == 1
        others = [name for name, info in opened.tensors.items() if len(info.parts) > 1]
        assert others
        want = FIXTURES[name].expected()
        for one, values in opened.load(others, dtype="float32").items():
            np.testing.assert_array_equal(values, want[one])


@pytest.mark.parametrize("algorithm", ["W4A8_NVFP4_FP8", "w4a8_awq", "NVFP5"])
@pytest.mark.parametrize("depth", [0, 1], ids=["layer", "holder"])
def test_modelopt_names_the_algorithm_of_each_layer(algorithm, depth, tmp_path):
    """Codes that another algorithm stores have the names of NVFP4: only the entry of the layer tells."""
    fixture, path = FIXTURES["modelopt_nvfp4"], tmp_path / "x"
    with safeload.open(fixture.folder) as opened:
        name = next(name for name, info in opened.tensors.items() if len(info.parts) > 1)
    layer = name.removesuffix(".weight").rsplit(".", depth)[0]
    layers = {layer: {"quant_algo": algorithm}}
    assert changed(fixture, path, lambda said: said.update(quant_algo="MIXED_PRECISION", quantized_layers=layers))
    with pytest.raises(UnsupportedError, match=f"(?i){algorithm}"):
        safeload.load(path, only=name, dtype="float32")
    others = [other for other in fixture.expected() if not other.startswith(layer)]
    got = safeload.load(path, only=others, dtype="float32")
    for other in others:
        np.testing.assert_array_equal(got[other], fixture.expected()[other])


def test_an_unknown_layout_does_not_keep_a_folder_closed(tmp_path):
    """Its codes contradict what the settings would mean if they were known."""

    def change(said):
        said["format"] = "int-squared"
        said["config_groups"]["group_0"]["weights"].update(num_bits=5, group_size=64)

    fixture = FIXTURES["ct_pack_w4_g32_sym"]
    assert changed(fixture, tmp_path / "x", change)
    assert_refused(tmp_path / "x", "format int-squared", fixture.stored())


@pytest.mark.parametrize("algorithm", ["MXFP4", "W4A16_AWQ"])
@pytest.mark.parametrize("mixed", [False, True])
def test_algorithms_without_a_family_keep_the_folder_open(algorithm, mixed, tmp_path):
    module = "model.layers.0.mlp.up_proj"
    arrays = {f"{module}.weight": np.ones((32, 32), np.uint8), f"{module}.weight_scale": np.ones((32, 2), np.uint8)}
    safeload.numpy.save_file(arrays, tmp_path / "model.safetensors")
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" if mixed else algorithm}
    said["quantized_layers"] = {module: {"quant_algo": algorithm}} if mixed else {}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    assert_refused(tmp_path, "holds U8 codes", arrays)


def test_settings_of_many_layers_take_linear_time(tmp_path):
    """auto-round names each layer that it left alone; tried one by one for each layer, they would take minutes."""
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    said["extra_config"] = {f"model.layers.{i}.a": {"bits": 16, "data_type": "float"} for i in range(20_000)}
    quantization = quantization_of({"quantization_config": said})
    begin = time.process_time()
    assert all(quantization.own(f"model.layers.{i}.b") == {} for i in range(20_000))
    assert time.process_time() - begin < 10  # sanitizers on a slow machine take one


def test_keys_of_layers_can_be_parts_of_names():
    """auto-round without a model writes its layer_config as it is, and searches names for its keys."""
    extra = {
        "mlp": {},
        "k_proj": {"bits": 8},
        "layers.1": {"bits": 3},
        ".*v_proj": {"bits": 2},
        "model.a.v_proj": {"bits": 6},
    }
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "extra_config": extra}
    quantization = quantization_of({"quantization_config": settings})
    expected = {
        "model.layers.0.mlp.k_proj": 8, "model.layers.1.k_proj": 8, "model.layers.1.v_proj": 3, "model.a.v_proj": 6,
        "model.layers.0.v_proj": 2, "k_proj": 8, "model.layers.11.q_proj": None, "model.mlp.xk_proj": None,
        f"{'a.' * 100_000}k_proj": None,
    }  # fmt: skip
    assert {name: quantization.own(name).get("bits") for name in expected} == expected


@pytest.mark.parametrize("name", IN_GGUF)
def test_the_method_of_our_own_copies_is_known(name, tmp_path):
    """Blocks of GGUF in a safetensors file have a configuration by safeload."""
    safeload.convert(FIXTURES[name].path, tmp_path / "x.safetensors")
    assert_expected(tmp_path / "x.safetensors", FIXTURES[name])


def test_rows_have_each_name_and_each_key_once():
    table = json.loads((files("safeload") / "quant/methods.json").read_text("utf-8"))
    names = [name for row in table["methods"] for name in (*row.get("names", ()), *row.get("aliases", ()))]
    assert len(names) == len(set(names))
    used = set()
    for row in (*table["methods"], *table["parts"].values()):
        values, read, ignored = row.get("values", {}), row.get("read", []), row.get("ignored", [])
        assert not values.keys() & set(read)
        assert not set(read) & set(ignored)
        texts = [text for supported in values.values() for text in supported]
        assert all(text == text.lower() for text in texts)
        used.update(text[1:] for text in (*texts, *ignored, *row.get("aliases", ())) if text.startswith("@"))
    assert used | {"anywhere"} == table["lists"].keys()


FIRST_USE = """
import sys, threading
import numpy as np
import safeload

paths = sys.argv[1:] * 4
begin, results = threading.Barrier(len(paths)), [None] * len(paths)

def load(k):
    begin.wait()
    results[k] = safeload.load(paths[k], dtype="float32")

threads = [threading.Thread(target=load, args=(k,)) for k in range(len(paths))]
for thread in threads: thread.start()
for thread in threads: thread.join()
for path, got in zip(paths, results, strict=True):
    for name, values in safeload.load(path, dtype="float32").items():
        assert np.array_equal(got[name], values), name
"""


def test_threads_that_need_the_tables_first_read_the_same(tmp_path):
    folders = [str(FIXTURES[name].folder) for name in ("gptq4_g32_asym", "ct_mixed", "quark_integers", "fp8_block")]
    command = [sys.executable, "-c", FIRST_USE, *folders, str(DATA / "torch" / "bfloat16.pt")]
    subprocess.run(command, check=True)
