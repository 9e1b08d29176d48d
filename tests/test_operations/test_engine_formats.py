"""Folders for vLLM, transformers and mlx-lm, against what the engines' own tools write."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.adapters import pair
from builders.adapters import write as write_adapter
from builders.engine_models import (
    ANY_SHAPE,
    DTYPES,
    EXPERTS,
    RAGGED,
    USUAL,
    config,
    described,
    expert_model,
    fused_experts,
    matrix,
    tensors,
    write_experts,
    write_model,
)
from builders.inside import main, presets, sizes
from builders.models import small, write_folder
from builders.paths import ROOT
from builders.remote import Served
from builders.schemes import ENGINE_FORMATS
from builders.thorough import dealt

import safeload
from safeload.errors import FormatError, RangeError, TensorNotFoundError, UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.any_python

EXPECTED = json.loads((ROOT / "tests/data/engines/expected.json").read_text())
ALL = [(name, *case.split("/")[:2]) for case in EXPECTED for name in [case.split("/")[2]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    kinds = {"usual": USUAL, "ragged": RAGGED}
    dense = {(kind, type): write_model(folder / kind / type, type, kinds[kind]) for kind in kinds for type in DTYPES}
    return {**dense, **{(kind, "bfloat16"): write_experts(folder / kind, kind) for kind in EXPERTS}}


@pytest.fixture
def llama(models):
    return models["usual", "bfloat16"]


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("name", "kind", "dtype"), ALL)
def test_folders_hold_what_the_engines_tool_writes(models, tmp_path, name, kind, dtype):
    out, expected = tmp_path / "out", EXPECTED[f"{kind}/{dtype}/{name}"]
    safeload.convert(models[kind, dtype], out, quantize=name)
    assert described(out / "model.safetensors") == expected["tensors"]
    assert (out / "tokenizer.json").read_text() == "{}"
    if "index" in expected:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == expected["index"]
        assert index["weight_map"] == dict.fromkeys(sorted(expected["tensors"]), "model.safetensors")
    if "quantization_config" in expected:
        ours, theirs = read_config(out)["quantization_config"], expected["quantization_config"]
        if "config_groups" in theirs:  # names that no reader looks at, and modules as names instead of expressions
            theirs = {**theirs, "config_groups": {"group_0": theirs["config_groups"][name.upper()]}}
            theirs = {**theirs, "ignore": ["lm_head"], "sparsity_config": {}}
        assert ours == theirs


@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_readers_give_the_values_in_memory(llama, tmp_path, name):
    safeload.convert(llama, tmp_path / "out", quantize=name)
    assert safeload.check(tmp_path / "out").ok
    quantized, stored = safeload.load_quantized(llama, name), safeload.load(tmp_path / "out")
    assert quantized.keys() == stored.keys()
    for key, value in quantized.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value.view(np.uint8), stored[key].view(np.uint8))
        else:
            assert value == stored[key]
    assert safeload.quantization_error(llama, quantized) == safeload.quantization_error(llama, tmp_path / "out")


@pytest.mark.parametrize("name", ["w4a16_asym", "nvfp4a16", "deepseek_fp8", "mlx3", "bnb_nf4"])
def test_pieces_write_the_folder_of_one_process(llama, tmp_path, name):
    safeload.convert(llama, tmp_path / "at-once", quantize=name, max_shard_size="100KB")
    safeload.convert(llama, tmp_path / "resumed", quantize=name, max_shard_size="100KB", resume=True)
    files = {path.name: path.read_bytes() for path in (tmp_path / "at-once").iterdir()}
    assert len(files) > 4
    assert {path.name: path.read_bytes() for path in (tmp_path / "resumed").iterdir()} == files


def test_an_interrupted_conversion_continues(llama, tmp_path, monkeypatch):
    arguments = {"quantize": "nvfp4a16", "max_shard_size": "100KB"}
    safeload.convert(llama, tmp_path / "whole", **arguments)
    done = 0

    def interrupt(now, total):
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        safeload.convert(llama, tmp_path / "out", **arguments, resume=True, progress=interrupt)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    safeload.convert(llama, tmp_path / "out", **arguments, resume=True)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_scales_are_computed_again_if_they_take_much_memory(llama, tmp_path, monkeypatch):
    safeload.convert(llama, tmp_path / "kept", quantize="mlx4")
    inside.tune(monkeypatch, kept_output=0)
    safeload.convert(llama, tmp_path / "again", quantize="mlx4")
    assert described(tmp_path / "again/model.safetensors") == described(tmp_path / "kept/model.safetensors")


@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_strips_and_threads_do_not_change_the_result(name, monkeypatch, tmp_path):
    weights = {"x.weight": matrix(264 if name.startswith(("awq", "gptq")) else 260, 256, 5)}
    if name in ANY_SHAPE:
        weights["y.weight"] = matrix(131, 77, 6)
    if name == "deepseek_fp8":
        weights["x.weight"] = matrix(384, 256, 5)
    save_file(weights, tmp_path / "x.safetensors")
    whole = safeload.load_quantized(weights, name)
    monkeypatch.setattr(inside.quantizing, "_LOCAL", 2000)
    for threads in (1, 3):
        assert safeload.load_quantized(weights, name, threads=threads) == whole
        assert safeload.load_quantized(tmp_path / "x.safetensors", name, threads=threads) == whole


@pytest.mark.parametrize("name", ["w8a8", "fp8_block", "nvfp4a16", "mlx3", "bnb_fp4"])
def test_strips_from_a_network_do_not_change_the_result(name, monkeypatch, llama, tmp_path):
    monkeypatch.setattr(inside.quantizing, "_REMOTE", 20000)
    there = Served.folder(llama)
    safeload.convert(there.at("mem://model/model.safetensors"), tmp_path / "out", quantize=name, only="*_proj.weight")
    safeload.convert(llama / "model.safetensors", tmp_path / "expected", quantize=name, only="*_proj.weight")
    assert described(tmp_path / "out/model.safetensors") == described(tmp_path / "expected/model.safetensors")
    assert there.most <= 32


@pytest.mark.parametrize("columns", [4096 + 1, 4096 + 63, 3 * 4096 + 9, 64, 63, 1])
def test_the_last_block_of_bitsandbytes_may_be_small(columns):
    weights = matrix(12, columns, 7)[9:10]
    parts = safeload.load_quantized({"x.weight": weights}, "bnb_nf4")["x.weight"].roles
    blocks = np.zeros((-(-columns // 64), 64), np.float32)
    blocks.reshape(-1)[:columns] = weights
    scales = np.abs(blocks).max(1)
    np.testing.assert_array_equal(parts["scale"], scales)
    table = np.array(presets()["bnb_nf4"].table, np.float32)
    bounds = (table[1:] + table[:-1]) / 2
    factors = np.float32(1) / scales
    scaled = blocks * factors[:, None]
    if columns % 64:  # only whole blocks are multiplied by the reciprocal
        scaled[-1] = blocks[-1] / scales[-1]
    codes = np.searchsorted(bounds, scaled.reshape(-1)[:columns]).astype(np.uint8)
    codes = np.append(codes, np.uint8(7))[: columns + columns % 2]  # the code of 0
    np.testing.assert_array_equal(parts["codes"].reshape(-1), codes[::2] << 4 | codes[1::2])


@pytest.mark.parametrize("name", ["w4a16", "nvfp4a16", "mlx4"])
def test_adapters_are_merged_first(llama, tmp_path, name):
    adapter = write_adapter(tmp_path / "adapter", pair(384, 256, module="model.layers.0.mlp.up_proj"))
    safeload.convert(llama, tmp_path / "merged", adapters=adapter)
    safeload.convert(tmp_path / "merged", tmp_path / "expected", quantize=name)
    safeload.convert(llama, tmp_path / "out", quantize=name, adapters=adapter, dtype="bfloat16")
    ours, theirs = (described(tmp_path / folder / "model.safetensors") for folder in ("out", "expected"))
    assert {key for key in ours if ours[key] != theirs[key]} <= {key for key in ours if "up_proj" in key}
    error = safeload.quantization_error(tmp_path / "merged", tmp_path / "out")
    assert error["model.layers.0.mlp.up_proj.weight"].snr_db > 10


def test_processes_write_the_folder_of_one(llama, tmp_path):
    arguments = {"quantize": "nvfp4a16", "max_shard_size": "100KB"}
    safeload.convert(llama, tmp_path / "one", **arguments)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        safeload.convert(llama, tmp_path / "out", **arguments, executor=executor)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_plan_with_another_dtype_or_scheme_is_refused(llama, tmp_path):
    plan = safeload.cluster.plan_convert(llama, tmp_path / "out", quantize="w4a16")
    piece = json.loads(json.dumps(dict(plan.pieces[0])))
    run = next(run for run in piece["tensors"] if run.get("scheme"))
    for change in ({"dtype": "I32"}, {"dtype": None}, {"scheme": "w3a16"}, {"partners": ["nothing"]}):
        forged = {**piece, "tensors": [{**run, **change}]}
        with pytest.raises((FormatError, TensorNotFoundError)):
            safeload.cluster.run_piece(forged)


def test_the_command_takes_engine_formats(llama, tmp_path, capsys):
    arguments = ["convert", str(llama), str(tmp_path / "out"), "--quantize", "W4A16", "--ignore", "*.down_proj"]
    assert main(arguments) == 0
    assert "6 quantized to w4a16" in capsys.readouterr().out
    assert main(["info", "--memory", str(llama)]) == 0
    assert "mlx-mxfp4" in capsys.readouterr().out


def test_fused_weights_share_a_global_scale(llama):
    weights = safeload.load_quantized(llama, "nvfp4a16")
    layer = "model.layers.0."

    def scale(module):
        return weights[f"{layer}{module}.weight"].parts[f"{layer}{module}.weight_global_scale"][0]

    assert scale("self_attn.q_proj") == scale("self_attn.k_proj") == scale("self_attn.v_proj")
    assert scale("mlp.gate_proj") == scale("mlp.up_proj")


def test_partners_may_lie_in_other_shards(tmp_path):
    weights = tensors("bfloat16")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 16
    source = write_model(tmp_path / "source", "bfloat16")
    save_file(weights, source / "model.safetensors")
    safeload.convert(source, tmp_path / "one", quantize="nvfp4a16")
    safeload.convert(source, tmp_path / "shards", quantize="nvfp4a16", max_shard_size="40KB", resume=True)
    assert safeload.diff(tmp_path / "one", tmp_path / "shards").same


# ---- experts ----


@pytest.mark.parametrize("kind", EXPERTS)
def test_stacked_experts_are_read_checked_and_measured(models, tmp_path, kind):
    source = models[kind, "bfloat16"]
    report = safeload.convert(source, tmp_path / "out", quantize="mlx4")
    assert safeload.check(tmp_path / "out").ok
    quantized, stored = safeload.load_quantized(source, "mlx4"), safeload.load(tmp_path / "out")
    assert quantized.keys() == stored.keys()
    for key, value in quantized.items():
        assert np.array_equal(value, stored[key]) if isinstance(value, np.ndarray) else value == stored[key]
    errors = safeload.quantization_error(source, tmp_path / "out")
    assert errors.keys() == report.summary.quantized.keys()
    assert min(error.snr_db for error in errors.values()) > 10
    assert sizes(source).schemes["mlx4"] == sum(value.nbytes for value in quantized.values())


@pytest.mark.parametrize(
    ("name", "kind"),
    dealt(["mlx4", "w4a16", "fp8_block", "nvfp4a16", "deepseek_fp8"], ["qwen2_moe", "qwen3_moe", "deepseek_v3"]),
)
def test_fused_experts_give_the_folder_of_separate_ones(models, tmp_path, kind, name):
    fused = write_experts(tmp_path / "fused", kind, fused=True)
    safeload.convert(models[kind, "bfloat16"], tmp_path / "expected", quantize=name)
    safeload.convert(fused, tmp_path / "out", quantize=name)
    assert described(tmp_path / "out/model.safetensors") == described(tmp_path / "expected/model.safetensors")
    assert read_config(tmp_path / "out") == read_config(tmp_path / "expected")
    assert sizes(fused).schemes[name] == sizes(models[kind, "bfloat16"]).schemes[name]
    expected = safeload.quantization_error(models[kind, "bfloat16"], tmp_path / "out")
    assert safeload.quantization_error(fused, tmp_path / "out") == expected


def test_bitsandbytes_leaves_fused_experts(tmp_path):
    fused = write_experts(tmp_path / "fused", "qwen3_moe", fused=True)
    report = safeload.convert(fused, tmp_path / "out", quantize="bnb_nf4")
    assert report.summary.kept["model.layers.0.mlp.experts.gate_up_proj"] == "is an expert"
    assert safeload.check(tmp_path / "out").ok


@pytest.mark.parametrize("name", ["mlx4", "nvfp4a16"])
def test_pieces_write_experts_as_one_process(tmp_path, name):
    fused = write_experts(tmp_path / "fused", "qwen3_moe", fused=True)
    arguments = {"quantize": name, "max_shard_size": "60KB"}
    safeload.convert(fused, tmp_path / "one", **arguments)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        safeload.convert(fused, tmp_path / "out", **arguments, executor=executor)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert len(files) > 6
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files


@pytest.mark.parametrize("first", ["w8a16", "fp8_block", "mlx8", "int8"])
def test_quantized_experts_are_dequantized_first(models, tmp_path, first, caplog):
    source = models["qwen3_moe", "bfloat16"]
    safeload.convert(source, tmp_path / "first", quantize=first)
    safeload.convert(tmp_path / "first", tmp_path / "plain", dtype="bfloat16")
    safeload.convert(tmp_path / "plain", tmp_path / "expected", quantize="mlx4")
    caplog.clear()
    safeload.convert(tmp_path / "first", tmp_path / "out", quantize="mlx4", requantize=first == "int8")
    assert not caplog.messages
    ours, theirs, before = (described(tmp_path / name / "model.safetensors") for name in ("out", "expected", "first"))
    routers = {key for key in ours if ".mlp.gate." in key and first == "mlx8"}  # 8 bits in every format of MLX
    assert {key: ours[key] for key in routers} == {key: before[key] for key in routers}
    assert {key: ours[key] for key in ours.keys() - routers} == {key: theirs[key] for key in theirs.keys() - routers}
    assert read_config(tmp_path / "out") == read_config(tmp_path / "expected")


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_make_the_items_of_a_stack(models, threads):
    expected = safeload.load_quantized(models["deepseek_v3", "bfloat16"], "mlx3")
    actual = safeload.load_quantized(models["deepseek_v3", "bfloat16"], "mlx3", threads=threads)
    for key, value in actual.items():
        assert np.array_equal(value, expected[key]) if isinstance(value, np.ndarray) else value == expected[key]


def test_adapters_are_merged_into_experts_first(models, tmp_path):
    source = models["qwen3_moe", "bfloat16"]
    adapter = write_adapter(tmp_path / "adapter", pair(128, 128, module="model.layers.0.mlp.experts.1.up_proj"))
    safeload.convert(source, tmp_path / "merged", adapters=adapter, dtype="bfloat16")
    safeload.convert(tmp_path / "merged", tmp_path / "expected", quantize="mlx4")
    safeload.convert(source, tmp_path / "out", quantize="mlx4", adapters=adapter)
    safeload.convert(source, tmp_path / "pieces", quantize="mlx4", adapters=adapter, resume=True)
    ours, theirs = (described(tmp_path / folder / "model.safetensors") for folder in ("out", "expected"))
    assert {key for key in ours if ours[key] != theirs[key]} <= {key for key in ours if "switch_mlp.up_proj" in key}
    assert described(tmp_path / "pieces/model.safetensors") == ours


def test_a_stack_is_ignored_as_a_whole(models, tmp_path):
    source, stack = models["qwen3_moe", "bfloat16"], "model.layers.0.mlp.switch_mlp.up_proj.weight"
    for ignore in ("*.switch_mlp.up_proj", "*.experts.*.up_proj", "re:.*experts.*up_proj"):
        report = safeload.convert(source, tmp_path / "out", quantize="mlx4", ignore=ignore, overwrite=True)
        reasons = {name: reason for name, reason in report.summary.kept.items() if "switch_mlp" in name}
        assert reasons == {stack: f"keep='{ignore}'"}
        assert safeload.load(tmp_path / "out")[stack].shape == (3, 128, 128)
    with pytest.raises(UnsupportedError, match="select all or none") as caught:
        safeload.convert(source, tmp_path / "out", quantize="mlx4", ignore="*.experts.1.*", overwrite=True)
    assert "switch_mlp" in caught.value.tensor
    kept = safeload.load_quantized(source, "mlx4", keep=lambda name: ".experts." in name).summary.kept
    assert sum("switch_mlp" in name for name in kept) == 3
    assert kept[stack] == "excluded by keep="
    names = []
    safeload.load_quantized(source, "mlx4", keep=names.append)
    assert stack in names
    assert all(name.endswith(".weight") for name in names)  # of tensors, not of modules


def broken_experts(fault):
    settings, weights = expert_model("qwen2_moe")
    first = "model.layers.0.mlp.experts.0.up_proj.weight"
    if fault == "missing":
        del weights[first]
    elif fault == "shape":
        weights[first] = weights[first][:64]
    elif fault == "dense":
        weights = {name: array for name, array in weights.items() if ".layers.1.mlp.experts." not in name}
    elif fault == "count":
        settings["num_experts"] = "3"
    elif fault == "layer":
        weights["model.layers.2.mlp.gate.weight"] = weights["model.layers.1.mlp.gate.weight"]
    elif fault == "bias":
        weights["model.layers.0.mlp.experts.0.up_proj.bias"] = weights["model.norm.weight"]
    elif fault == "width":
        weights = fused_experts(weights)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        weights[name] = weights[name][:, 1:]
    return settings, weights


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "needs 3 experts, but expert 0 is missing"),
        ("shape", "have different shapes"),
        ("dense", "layer 1 has no experts"),
        ("count", "num_experts must be a positive integer"),
        ("layer", "mlx-lm does not load layer 2"),
        ("bias", "mlx-lm has no such tensor"),
        ("width", "does not hold gate and up of experts"),
    ],
)
def test_experts_that_mlx_does_not_load_are_refused(tmp_path, fault, message):
    source = write_folder(tmp_path, *broken_experts(fault), shards=1)
    for convert in (
        lambda: safeload.convert(source, tmp_path / "out", quantize="mlx4"),
        lambda: safeload.load_quantized(source, "mlx4"),
    ):
        with pytest.raises((FormatError, UnsupportedError), match=message) as caught:
            convert()
        assert fault == "count" or caught.value.tensor is not None
    assert "mlx4" not in sizes(source).schemes
    assert not (tmp_path / "out").exists()


def test_groups_that_do_not_divide_a_router_are_refused(tmp_path):
    settings, weights = expert_model("qwen3_moe")
    gate = "model.layers.0.mlp.gate.weight"
    source = write_folder(tmp_path, settings, {**weights, gate: weights[gate][:, :96]}, shards=1)
    with pytest.raises(UnsupportedError, match="blocks of 64 columns") as caught:
        safeload.convert(source, tmp_path / "out", quantize="mlx-nvfp4")
    assert caught.value.tensor == gate


@pytest.mark.parametrize(("name", "message"), [("w4a16", r"experts\.[a-z_]+' is 3-D"), ("mlx4", "gpt_oss")])
def test_experts_without_a_row_are_refused(tmp_path, name, message):
    source = write_folder(tmp_path, *small("gpt_oss"))
    with pytest.raises(UnsupportedError, match=message):
        safeload.convert(source, tmp_path / "out", quantize=name)


def test_experts_that_are_stored_twice_are_refused(tmp_path):
    settings, weights = expert_model("mixtral")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = write_folder(tmp_path, settings, {**weights, name: np.ones((3, 256, 128), np.float32)}, shards=1)
    for quantize, message in (("w4a16", f"is also a part of '{name}'"), ("mlx4", "some layers have fused experts")):
        with pytest.raises(FormatError, match=message):
            safeload.convert(source, tmp_path / "out", quantize=quantize)


def test_pieces_arrange_experts_as_the_whole_model_does(models, tmp_path):
    """A piece has no recipe of its tensors, but the config that says how the engine stores experts."""
    source = models["mixtral", "bfloat16"]
    plan = safeload.cluster.plan_convert(source, tmp_path / "out", quantize="mlx4", max_shard_size="60KB")
    plan = json.loads(json.dumps(plan))
    assert len(plan["pieces"]) > 2
    safeload.cluster.finalize(plan, map(safeload.cluster.run_piece, plan["pieces"]))
    safeload.convert(source, tmp_path / "whole", quantize="mlx4", max_shard_size="60KB")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    piece = {**plan["pieces"][0], "arranged_from": {"model_type": "mixtral"}}
    with pytest.raises(FormatError, match="changed since it was planned"):
        safeload.cluster.run_piece(piece)


# ---- choices ----


def test_ignored_tensors_stay_and_the_config_names_them(llama, tmp_path):
    report = safeload.convert(llama, tmp_path / "out", quantize="w4a16", ignore=["*.mlp.down_proj", "re:.*k_proj"])
    kept = report.summary.kept
    assert kept["model.layers.0.mlp.down_proj.weight"] == "keep='*.mlp.down_proj'"
    left = {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj", "lm_head"}
    assert set(read_config(tmp_path / "out")["quantization_config"]["ignore"]) == left


@pytest.mark.parametrize("pattern", ["*.experts.*", "re:.*experts"])
def test_a_pattern_that_matches_nothing_is_an_error(llama, tmp_path, pattern):
    with pytest.raises(TensorNotFoundError, match="matches no"):
        safeload.convert(llama, tmp_path / "out", quantize="w4a16", ignore=pattern)
    assert not (tmp_path / "out").exists()


def test_routers_and_the_tied_head_stay(tmp_path):
    source = write_folder(tmp_path, *small("qwen3_moe"))
    report = safeload.convert(source, tmp_path / "out", quantize="fp8_dynamic")
    router = "model.layers.0.mlp.gate.weight"
    assert report.summary.kept[router] == "is a router"
    assert router.removesuffix(".weight") in read_config(tmp_path / "out")["quantization_config"]["ignore"]


def test_bitsandbytes_skips_routers(models, tmp_path):
    """transformers would hold codes for the gate of shared experts, a linear module, but not for experts."""
    safeload.convert(models["qwen2_moe", "bfloat16"], tmp_path / "out", quantize="bnb_nf4")
    gates = [f"model.layers.{k}.mlp.{name}" for k in range(2) for name in ("gate", "shared_expert_gate")]
    assert read_config(tmp_path / "out")["quantization_config"]["llm_int8_skip_modules"] == ["lm_head", *gates]


def test_mlx_is_told_if_the_head_is_tied(llama, tmp_path):
    """mlx-lm ties it by default, transformers does not."""
    weights = load_file(llama / "model.safetensors")
    for case, (stored, said, expected) in enumerate(
        [(1, None, False), (0, None, True), (1, False, False), (0, True, True)]
    ):
        source = tmp_path / f"source{case}"
        source.mkdir()
        settings = {name: value for name, value in config("bfloat16").items() if name != "tie_word_embeddings"}
        settings |= {} if said is None else {"tie_word_embeddings": said}
        (source / "config.json").write_text(json.dumps(settings))
        save_file(
            {name: x for name, x in weights.items() if stored or name != "lm_head.weight"}, source / "model.safetensors"
        )
        safeload.convert(source, tmp_path / f"out{case}", quantize="mlx4")
        assert read_config(tmp_path / f"out{case}")["tie_word_embeddings"] is expected


@pytest.mark.parametrize("name", ["w8a8", "bnb_nf4"])
def test_modules_of_a_vision_model_are_left_under_the_names_of_transformers(tmp_path, name):
    """transformers has the head beside the model, and the parts of the model under "model."."""
    text = "language_model.model."
    shapes = {
        text + "embed_tokens.weight": (64, 32),
        text + "layers.0.self_attn.q_proj.weight": (32, 32),
        "vision_tower.layers.0.fc1.weight": (32, 32),
    }
    source = tmp_path / "source"
    source.mkdir()
    save_file({each: matrix(*shape, 0) for each, shape in shapes.items()}, source / "model.safetensors")
    nested = {"text_config": {"model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32}}
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **nested}
    (source / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    safeload.convert(source, tmp_path / "out", quantize=name, only="*", ignore=["*embed_tokens*", "vision*"])
    said = read_config(tmp_path / "out")["quantization_config"]
    left = said["ignore"] if name == "w8a8" else said["llm_int8_skip_modules"]
    assert {"lm_head", "vision_tower.layers.0.fc1"} <= set(left)
    assert (r"re:.*vision_tower\.layers\.0\.fc1$" in left) == (name == "w8a8")


def test_sides_that_are_not_whole_blocks_stay_in_deepseek_fp8(tmp_path):
    source = write_model(tmp_path / "source", "bfloat16", {**USUAL, "intermediate_size": 320})
    safeload.convert(source, tmp_path / "out", quantize="deepseek_fp8")
    left = read_config(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert set(left) == {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")} | {"lm_head"}
    assert safeload.open(tmp_path / "out").tensors["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"


def test_the_dtype_before_quantizing_is_the_requested_one_or_the_configs(tmp_path):
    source = write_model(tmp_path / "source", "float32")
    (source / "config.json").write_text(json.dumps(config("bfloat16")))
    safeload.convert(source, tmp_path / "config", quantize="w4a16")
    safeload.convert(source, tmp_path / "asked", quantize="w4a16", dtype="float16")
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    assert load_file(tmp_path / "config/model.safetensors")[scale].dtype == ml_dtypes.bfloat16
    assert load_file(tmp_path / "asked/model.safetensors")[scale].dtype == np.float16
    assert read_config(tmp_path / "asked")["torch_dtype"] == "float16"


@pytest.mark.parametrize("first", ["w8a16", "deepseek_fp8", "bnb_nf4", "int8"])
def test_quantized_sources_are_dequantized_first(llama, tmp_path, first):
    safeload.convert(llama, tmp_path / "first", quantize=first)
    safeload.convert(tmp_path / "first", tmp_path / "plain", dtype="bfloat16")
    safeload.convert(tmp_path / "first", tmp_path / "out", quantize="mlx4", requantize=first == "bnb_nf4")
    safeload.convert(tmp_path / "plain", tmp_path / "expected", quantize="mlx4")
    assert described(tmp_path / "out/model.safetensors") == described(tmp_path / "expected/model.safetensors")
    assert read_config(tmp_path / "out")["quantization_config"] == {"bits": 4, "group_size": 64, "mode": "affine"}


def test_renamed_modules_have_their_new_names_in_the_config(llama, tmp_path):
    safeload.convert(llama, tmp_path / "out", quantize="w4a16", rename={r"^lm_head": "model.lm_head"})
    assert read_config(tmp_path / "out")["quantization_config"]["ignore"] == ["model.lm_head"]


def test_arrays_in_memory_need_only(tmp_path):
    weights = {"a.weight": matrix(16, 256, 0), "b.weight": matrix(16, 128, 1)}
    with pytest.raises(UnsupportedError, match="only="):
        safeload.convert(weights, tmp_path / "out", quantize="w4a16")
    safeload.convert(weights, tmp_path / "out", quantize="w4a16", only="*")
    assert {info.dtype for info in safeload.open(tmp_path / "out").tensors.values()} == {"int4 g128"}


# ---- refusals ----


@pytest.mark.parametrize(
    ("shape", "name", "message"),
    [
        ((256,), "w4a16", "is 1-D, and w4a16 quantizes"),
        ((2, 16, 128), "w4a16", "is 3-D"),
        ((16, 100), "w4a16", "rows of 100 are not whole blocks"),
        ((16, 24), "nvfp4a16", "blocks of 16 columns"),
        ((16, 48), "mxfp4a16", "blocks of 32 columns"),
    ],
)
def test_shapes_that_an_engine_does_not_support_are_refused_by_name(tmp_path, shape, name, message):
    weights = {"x.weight": np.ones(shape, np.float32), "y.weight": np.ones((16, 128), np.float32)}
    with pytest.raises(UnsupportedError, match=message) as caught:
        safeload.convert(weights, tmp_path / "out", quantize=name, only="*")
    assert caught.value.tensor == "x.weight"
    safeload.convert(weights, tmp_path / "out", quantize=name, only="*", ignore="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantize": "mlx4-g48"}, "mlx4 has groups of 32, 64 or 128"),
        ({"quantize": "w8a16-g32"}, "no choice of groups"),
        ({"quantize": {"*": "w4a16"}}, "for whole models"),
        ({"quantize": "w4a16", "keep": "a", "ignore": "b"}, "another name of keep"),
        ({"quantize": "w4a16", "dtype": "float64"}, "float32, float16 or bfloat16"),
        ({"quantize": "w4a16", "ignore": "re:("}, "not a regular expression"),
        ({"quantize": "w4a16", "format": "gguf"}, "folder|file"),
        ({"quantize": "w4a17"}, "did you mean 'w4a16', "),
        ({"quantize": "mlx4", "layout": safeload.layouts.MOONDREAM2}, "layout= does not apply"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(llama, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        safeload.convert(llama, tmp_path / "out", **arguments)


def test_an_array_alone_is_refused():
    with pytest.raises(ValueError, match="is for whole models"):
        safeload.quantize(np.ones((16, 128), np.float32), "w4a16")


@pytest.mark.parametrize("model_type", [["llama"], {}, 3, None])
def test_a_config_without_a_model_is_refused(llama, tmp_path, model_type):
    source = write_model(tmp_path / "source", "bfloat16")
    (source / "config.json").write_text(json.dumps({**config("bfloat16"), "model_type": model_type}))
    with pytest.raises(UnsupportedError, match="only="):
        safeload.convert(source, tmp_path / "out", quantize="w4a16")


@pytest.mark.parametrize("options", [{}, {"resume": True}])
def test_a_folder_can_replace_itself(tmp_path, options):
    source = write_model(tmp_path / "source", "bfloat16")
    safeload.convert(source, tmp_path / "expected", quantize="mlx4")
    safeload.convert(source, source, quantize="mlx4", overwrite=True, **options)
    assert described(source / "model.safetensors") == described(tmp_path / "expected/model.safetensors")
    assert read_config(source) == read_config(tmp_path / "expected")
    assert (source / "model.safetensors.index.json").exists()


def test_a_message_says_why_nothing_is_left(tmp_path):
    for weights, message in (
        ({"x.weight": np.ones((16, 101), np.float32)}, "'x.weight' has rows of 101 elements, not whole groups of 64"),
        ({"x.weight": np.ones((16, 128), np.int32)}, "'x.weight' is int32, not floating"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            safeload.convert(weights, tmp_path / "out", quantize="mlx4", only="*")
        with pytest.raises(UnsupportedError, match=message):
            safeload.load_quantized(weights, "mlx4")


def test_a_file_is_refused(llama, tmp_path):
    with pytest.raises(ValueError, match="writes a folder for vLLM"):
        safeload.convert(llama, tmp_path / "out.safetensors", quantize="w4a16")


def test_an_existing_folder_is_replaced_only_with_overwrite(llama, tmp_path):
    safeload.convert(llama, tmp_path / "out", quantize="mlx4")
    with pytest.raises(FileExistsError):
        safeload.convert(llama, tmp_path / "out", quantize="mlx8")
    safeload.convert(llama, tmp_path / "out", quantize="w4a16", overwrite=True)
    assert safeload.check(tmp_path / "out").ok
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    safeload.convert(llama, tmp_path / "out", quantize="mlx8", overwrite=True)
    assert safeload.open(tmp_path / "out").tensors["lm_head.weight"].dtype == "mlx8 g64"


def test_models_that_an_engine_does_not_have_are_refused(tmp_path):
    refused = (("bert", "mlx4", "bert"), ("gpt2", "w4a16", "left to quantize.*c_attn.weight' is a Conv1D"))
    for model, name, message in refused:
        (tmp_path / model).mkdir()
        source = write_folder(tmp_path / model, *small(model))
        with pytest.raises(UnsupportedError, match=message):
            safeload.convert(source, tmp_path / "out", quantize=name)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_values_that_are_not_finite_are_refused(name, value):
    weights = {"x.weight": np.ones((256, 256), np.float32)}
    weights["x.weight"][130, 200] = value
    with pytest.raises(RangeError, match=r"'x.weight'.*\[130, 200\] is|\"x.weight\".*\[130, 200\] is"):
        safeload.load_quantized(weights, name)


def test_a_scale_beyond_the_dtype_is_refused():
    weights = {"x.weight": np.full((16, 128), 6e4, np.float16)}
    weights["x.weight"][3, ::2] *= -1
    with pytest.raises(RangeError, match=r"scale of the block at \[3, 0\] does not fit float16"):
        safeload.load_quantized(weights, "w4a16_asym")


@pytest.mark.parametrize("name", ENGINE_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_stay_finite(name, dtype):
    largest = 6e4 if dtype == "float16" else 3e38 / 4
    weights = np.zeros((256, 256), DTYPES[dtype])
    weights[0], weights[1], weights[2, 0] = largest, -largest, largest
    weights[3], weights[4, 5] = np.finfo(np.float32).smallest_subnormal, -np.float32(1e-38)
    if name == "w4a16_asym":
        weights[:3] /= 2
    for value in safeload.load_quantized({"x.weight": weights}, name).values():
        restored = np.asarray(value)
        assert np.isfinite(restored).all()
        if name != "mlx-nvfp4":  # MLX has no scale of the tensor: its largest number is 2688
            assert abs(restored[0, 0] - np.float32(weights[0, 0])) <= 0.2 * np.float32(weights[0, 0])


@pytest.mark.parametrize("name", ["w4a16", "mlx3", "nvfp4a16", "deepseek_fp8", "bnb_fp4"])
def test_threads_do_not_change_the_result(name):
    weights = {"x.weight": matrix(1280, 2048, 3)}
    one, three = (safeload.load_quantized(weights, name, threads=threads)["x.weight"] for threads in (1, 3))
    assert one == three
