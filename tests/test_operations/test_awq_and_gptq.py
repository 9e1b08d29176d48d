"""Folders in the layouts of AWQ and GPTQ, scales of the KV cache, and scales of float32."""

import json
import re

import numpy as np
import pytest
from builders import code_layouts as layouts
from builders import llama_models
from builders.engine_models import tensors, write_experts, write_model
from builders.inside import main
from builders.packed_codes import AWQ_ORDER
from builders.paths import DATA

import safeload
from safeload.errors import UnsupportedError
from safeload.numpy import load_file, save_file

AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
GPTQ = {"desc_act": False, "group_size": 128, "lm_head": False, "pack_dtype": "int32", "quant_method": "gptq"}
CONFIGS = {
    "awq": {**AWQ, "modules_to_not_convert": ["lm_head"]},
    "gptq": {**GPTQ, "bits": 4, "sym": True, "checkpoint_format": "gptq"},
    "gptq_asym": {**GPTQ, "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq8": {**GPTQ, "bits": 8, "sym": True, "checkpoint_format": "gptq"},
}
# The format of compressed-tensors with the codes, scales and zero points of each.
EQUAL = {"awq": "w4a16_asym", "gptq": "w4a16", "gptq_asym": "w4a16_asym", "gptq8": "w8a16"}
UP = "model.layers.0.mlp.up_proj"
CACHE = {f"model.layers.0.self_attn.{name}": np.float32([0.5]) for name in ("k_scale", "v_scale")}


def quantization(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama") / "source", "float16")


def fields(words, bits):
    """The codes in words, from the lowest bits on: an axis more."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)


def dequantized(name, parts):
    """The weight as AutoAWQ's and AutoGPTQ's formulas give it: (code - zero) * scale, transposed."""
    words, zeros = parts[f"{UP}.qweight"], parts[f"{UP}.qzeros"]
    if name == "awq":
        order = np.argsort(AWQ_ORDER)
        codes, zeros = (fields(x, 4)[..., order].reshape(len(x), -1) for x in (words, zeros))
    else:
        bits = CONFIGS[name]["bits"]
        codes = np.moveaxis(fields(words, bits), -1, 1).reshape(-1, words.shape[1])
        added = int(CONFIGS[name]["checkpoint_format"] == "gptq")
        zeros = fields(zeros, bits).reshape(len(zeros), -1) + added
        np.testing.assert_array_equal(parts[f"{UP}.g_idx"], np.arange(len(codes)) // 128)
    spread = np.arange(len(codes)) // 128
    scales = parts[f"{UP}.scales"].astype(np.float32)
    return ((codes.astype(np.float32) - zeros.astype(np.float32)[spread]) * scales[spread]).T


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formulas_of_the_format_give_the_values_of_compressed_tensors(llama, tmp_path, name):
    safeload.convert(llama, tmp_path / "out", quantize=name)
    safeload.convert(llama, tmp_path / "equal", quantize=EQUAL[name])
    expected = safeload.load(tmp_path / "equal", dtype="float32")
    parts = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_array_equal(dequantized(name, parts), expected[f"{UP}.weight"])
    read = safeload.load(tmp_path / "out", dtype="float32")
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[key], expected[key]) for key in read)
    assert quantization(tmp_path / "out") == CONFIGS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_codes_move_from_compressed_tensors_and_back(llama, tmp_path, name):
    safeload.convert(llama, tmp_path / "out", quantize=name)
    safeload.convert(llama, tmp_path / "equal", quantize=EQUAL[name])
    for source, target, asked in (("equal", "out", name), ("out", "equal", EQUAL[name])):
        safeload.convert(tmp_path / source, tmp_path / f"from-{source}", quantize=asked, exact=True)
        assert contents(tmp_path / f"from-{source}") == contents(tmp_path / target)


@pytest.mark.parametrize("name", [*CONFIGS, "awq-channel", "gptq-g32", "w4afp8", "mxfp8a16"])
def test_the_proof_accepts_the_format(tmp_path, name, capsys):
    source = write_model(tmp_path / "source", "bfloat16")
    rng = np.random.default_rng(1)
    weights = {k: (rng.standard_normal(v.shape) * 0.05).astype(v.dtype) for k, v in tensors("bfloat16").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    out = str(tmp_path / "out")
    assert main(["convert", str(source), out, "--quantize", name, "--check-result"]) == 0
    assert main(["check", out, "--source", str(source)]) == 0
    parts = load_file(tmp_path / "out/model.safetensors")
    key = next(key for key in parts if key.startswith(f"{UP}.") and key.endswith(("qweight", "packed", "weight")))
    parts[key] = np.ascontiguousarray(parts[key][::-1])
    save_file(parts, tmp_path / "out/model.safetensors")
    assert main(["check", out, "--source", str(source)]) == 1
    assert "source." in capsys.readouterr().out


def test_ignored_modules_and_routers_are_named_as_the_engines_read_them(tmp_path):
    source = write_experts(tmp_path / "source", "qwen3_moe")
    for name in ("awq", "gptq"):
        safeload.convert(source, tmp_path / name, quantize=name, ignore="*.layers.0.self_attn.q_proj")
        assert safeload.check(tmp_path / name).ok
        kept = safeload.open(tmp_path / name).tensors
        assert kept["model.layers.0.self_attn.q_proj.weight"].dtype == "BF16"
        assert kept["model.layers.0.mlp.experts.2.up_proj.weight"].dtype.startswith(f"{name}4")
    modules = ["model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"]
    assert quantization(tmp_path / "awq")["modules_to_not_convert"] == ["lm_head", *modules]
    patterns = {f"-:.*{re.escape(module)}$": {} for module in modules}
    assert quantization(tmp_path / "gptq")["dynamic"] == patterns


def test_a_side_that_fills_no_word_stays_unquantized(tmp_path):
    save_file({"a.weight": np.ones((8, 128), np.float32), "b.weight": np.ones((9, 128), np.float32)}, tmp_path / "x.st")
    for name in CONFIGS:
        report = safeload.convert(tmp_path / "x.st", tmp_path / name, quantize=name, only="*")
        assert report.summary.kept == {"b.weight": "has a side that is not a multiple of 8"}


# ---- codes by other writers ----


@pytest.mark.parametrize(("kind", "name"), [("awq4_gemm", "awq-g32"), ("gptq4_g32_asym", "gptq_asym-g32")])
def test_weights_of_autoawq_and_gptqmodel_keep_their_values(tmp_path, kind, name):
    source, folders = DATA / "quantized" / kind, []
    values = safeload.load(source, dtype="float32")
    group = name.partition("-")[2]
    for target in (name, "w4a16_asym-" + group if group else "w4a16_asym", name):
        folders.append(tmp_path / str(len(folders)))
        safeload.convert([source, *folders][len(folders) - 1], folders[-1], quantize=target, only="*", exact=True)
        read = safeload.load(folders[-1], dtype="float32")
        assert all(np.array_equal(read[key], values[key]) for key in values)
    first, last = (load_file(folder / "model.safetensors") for folder in (folders[0], folders[-1]))
    assert all(np.array_equal(first[key], last[key]) for key in first)


def test_codes_in_the_order_of_activations_are_only_copied(tmp_path):
    made = layouts.gptq("F16", 32, 1, (64, 256), zero=8, order="reversed")
    layouts.write(tmp_path / "source", made)
    report = safeload.convert(tmp_path / "source", tmp_path / "out", quantize="gptq-g32")
    assert report.summary.kept[f"{layouts.NAME}.weight"] == "is already gptq-g32"
    assert quantization(tmp_path / "out")["desc_act"] is True
    np.testing.assert_array_equal(safeload.load(tmp_path / "out", dtype="float32")[f"{layouts.NAME}.weight"], made[2])
    with pytest.raises(UnsupportedError, match="act-order"):
        safeload.convert(tmp_path / "source", tmp_path / "x", quantize="gptq_asym-g32")


def test_a_copy_beside_an_ignored_weight_keeps_the_order_in_its_config(tmp_path):
    made = layouts.gptq("F16", 32, 1, (64, 256), zero=8, order="reversed")
    layouts.write(tmp_path / "source", made)
    weights = load_file(tmp_path / "source/model.safetensors")
    other = {name.replace("up_proj", "gate_proj"): array for name, array in weights.items() if "up_proj" in name}
    save_file({**weights, **other}, tmp_path / "source/model.safetensors")
    safeload.convert(tmp_path / "source", tmp_path / "out", quantize="gptq-g32", ignore="*gate_proj")
    settings = quantization(tmp_path / "out")
    assert settings["desc_act"] is True
    assert list(settings["dynamic"]) == [r"-:.*model\.layers\.0\.mlp\.gate_proj$"]
    np.testing.assert_array_equal(safeload.load(tmp_path / "out", dtype="float32")[f"{layouts.NAME}.weight"], made[2])


def test_zero_points_other_than_the_middle_need_the_asymmetric_format(tmp_path):
    layouts.write(tmp_path / "source", layouts.awq("F16", 32, 1, (64, 256)))
    with pytest.raises(UnsupportedError, match="not all of its zero points are 8"):
        safeload.convert(tmp_path / "source", tmp_path / "x", quantize="gptq-g32")
    safeload.convert(tmp_path / "source", tmp_path / "out", quantize="gptq_asym-g32")
    assert (load_file(tmp_path / "out/model.safetensors")[f"{layouts.NAME}.qzeros"] & 15 == 0).any()


# ---- the KV cache ----


def with_cache(folder, settings, names=None):
    """A w4a16 folder with scales of the KV cache."""
    safeload.convert(write_model(folder / "float", "bfloat16"), folder / "source", quantize="w4a16")
    weights = load_file(folder / "source/model.safetensors")
    save_file({**weights, **(CACHE if names is None else names)}, folder / "source/model.safetensors")
    config = json.loads((folder / "source/config.json").read_text())
    config["quantization_config"].update(settings)
    (folder / "source/config.json").write_text(json.dumps(config))
    return folder / "source"


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["w4a16", "w4a16-g32", "w4afp8", "deepseek_fp8"])
def test_scales_of_the_kv_cache_stay_where_engines_read_them(tmp_path, name, resume):
    source = with_cache(tmp_path, {"kv_cache_scheme": SCHEME})
    report = safeload.convert(source, tmp_path / "out", quantize=name, requantize=True, resume=resume)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert {key: weights[key].tolist() for key in CACHE} == {key: [0.5] for key in CACHE}
    assert report.left_out == ()
    if name != "deepseek_fp8":
        assert quantization(tmp_path / "out")["kv_cache_scheme"].items() >= SCHEME.items()
    assert safeload.check(tmp_path / "out").ok


@pytest.mark.parametrize("settings", [{"kv_cache_scheme": "static"}, {"kv_cache_quant_algo": "FP8"}])
def test_other_words_for_the_cache_become_those_of_compressed_tensors(tmp_path, settings):
    old = {f"model.layers.0.self_attn.{part}_proj.output_scale": np.float32([2]) for part in "kv"}
    source = with_cache(tmp_path, settings, old)
    safeload.convert(source, tmp_path / "out", quantize="w4a16-g32")
    assert old.keys() <= load_file(tmp_path / "out/model.safetensors").keys()
    assert quantization(tmp_path / "out")["kv_cache_scheme"].items() >= SCHEME.items()


@pytest.mark.parametrize("how", [{"quantize": "awq"}, {"quantize": "mlx4"}, {"dtype": "bfloat16"}])
def test_a_result_without_a_place_for_the_scales_names_them(tmp_path, how, caplog):
    source = with_cache(tmp_path, {"kv_cache_scheme": SCHEME})
    report = safeload.convert(source, tmp_path / "out", **how)
    assert not CACHE.keys() & load_file(tmp_path / "out/model.safetensors").keys()
    (line,) = report.left_out
    assert line.startswith("2 scales of the KV cache left out, such as 'model.layers.0.self_attn.k_scale': ")
    assert line in str(report)
    assert line in caplog.text
    assert "kv_cache_scheme" not in (quantization(tmp_path / "out") or {})


def test_llama_cpp_has_no_place_for_the_scales(tmp_path):
    pytest.importorskip("tokenizers")
    model = llama_models.listed()["llama3"]
    source = llama_models.write_folder(tmp_path / "float", model, llama_models.tensors_of(model))
    safeload.convert(source, tmp_path / "source", quantize="w4a16-g32", dtype="float16")
    weights = load_file(tmp_path / "source/model.safetensors")
    save_file({**weights, **CACHE}, tmp_path / "source/model.safetensors")
    for how in ({}, {"quantize": "q4_0"}):
        report = safeload.convert(tmp_path / "source", tmp_path / "x.gguf", **how, overwrite=True)
        (line,) = report.left_out
        assert line.endswith("llama.cpp has no place for them")


def test_a_scheme_without_scales_or_of_another_kind_is_not_carried(tmp_path):
    source = with_cache(tmp_path, {"kv_cache_scheme": SCHEME}, {})
    safeload.convert(source, tmp_path / "out", quantize="w4a16-g32")
    assert quantization(tmp_path / "out")["kv_cache_scheme"] is None
    other = with_cache(tmp_path / "other", {"kv_cache_quant_algo": "NVFP4"})
    report = safeload.convert(other, tmp_path / "x", quantize="w4a16-g32")
    assert "left out" in report.left_out[0]
    assert quantization(tmp_path / "x")["kv_cache_scheme"] is None


# ---- scales of float32 ----


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8_dynamic", "awq", "gptq", "mlx4"])
def test_scales_of_float32_on_request(llama, tmp_path, name):
    out = tmp_path / "out"
    assert main(["convert", str(llama), str(out), "--quantize", name, "--scale-dtype", "float32"]) == 0
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    parts = load_file(out / "model.safetensors")
    scales = [key for key in parts if key.startswith(UP) and key.endswith(("_scale", ".scales"))]
    assert [parts[key].dtype for key in scales] == [np.float32]
    assert parts["model.norm.weight"].dtype == np.float16
    safeload.convert(llama, tmp_path / "wide", dtype="float32")
    safeload.convert(tmp_path / "wide", tmp_path / "expected", quantize=name)
    expected = load_file(tmp_path / "expected/model.safetensors")
    assert all(np.array_equal(parts[key], expected[key]) for key in parts if key.startswith(UP))


def test_copied_and_moved_scales_become_float32_too(llama, tmp_path):
    safeload.convert(llama, tmp_path / "source", quantize="w4a16")
    values = safeload.load(tmp_path / "source", dtype="float32")
    for name in ("w4a16", "gptq"):
        safeload.convert(tmp_path / "source", tmp_path / name, quantize=name, scale_dtype="float32", exact=True)
        read = safeload.load(tmp_path / name, dtype="float32")
        assert all(np.array_equal(read[key], values[key]) for key in values)
        parts = load_file(tmp_path / name / "model.safetensors")
        assert {str(parts[key].dtype) for key in parts if key.endswith(("_scale", ".scales"))} == {"float32"}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"quantize": "nvfp4a16", "scale_dtype": "float32"}, "such as w4a16, got 'nvfp4a16'"),
        ({"quantize": "q4_0", "scale_dtype": "float32"}, "such as w4a16, got 'q4_0'"),
        ({"quantize": "mlx", "scale_dtype": "float32"}, "such as w4a16, got 'mlx'"),
        ({"quantize": "w4a16", "scale_dtype": "float16"}, "scale_dtype must be float32, got 'float16'"),
        ({"dtype": "float16", "scale_dtype": "float32"}, "pass quantize= too"),
    ],
)
def test_scales_of_float32_are_refused_where_the_format_fixes_them(llama, tmp_path, how, message):
    with pytest.raises(ValueError, match=message):
        safeload.convert(llama, tmp_path / "out", **how)
