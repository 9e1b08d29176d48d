"""Folders for engines from every kind of source, and to stores: the bytes of the local conversion."""

import json
import os
import shutil
import time

import ml_dtypes
import numpy as np
import pytest
from builders import dcp_build, llama_models
from builders.engine_models import config, expert_model, fused_experts, write_experts, write_model
from builders.http_server import Server
from builders.inside import presets
from builders.models import small, write_folder
from builders.paths import DATA

import safeload
from safeload.errors import RangeError, UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]  # test_engine_formats.py runs the same C

FORMATS = ["nvfp4a16", "mlx4"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A model of two shards, with experts and without a tokenizer, which https cannot list."""
    settings, weights = expert_model("qwen3_moe")
    return write_folder(tmp_path_factory.mktemp("qwen"), settings, weights)


@pytest.fixture(scope="module")
def expected(qwen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    for name in FORMATS:
        safeload.convert(qwen, folder / name, quantize=name)
    return {name: contents(folder / name) for name in FORMATS}


@pytest.fixture
def memory():
    fs = pytest.importorskip("fsspec").filesystem("memory")
    folder = f"/engines-{time.monotonic_ns()}"
    yield fs, folder
    fs.rm(folder, recursive=True)


# ---- sources ----


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_https(qwen, expected, tmp_path, name, resume):
    pytest.importorskip("urllib3")
    with Server(qwen) as server:
        source = server.url("/model.safetensors.index.json")
        safeload.convert(source, tmp_path / "out", quantize=name, resume=resume)
    assert contents(tmp_path / "out") == expected[name]


@pytest.mark.parametrize("name", FORMATS)
def test_stores(qwen, expected, tmp_path, memory, name):
    fs, folder = memory
    fs.put(str(qwen), f"{folder}/source", recursive=True)
    safeload.convert(f"memory:/{folder}/source", tmp_path / "out", quantize=name)
    assert contents(tmp_path / "out") == expected[name]
    safeload.convert(qwen, f"memory:/{folder}/out/", quantize=name)
    stored = {path.rpartition("/")[2]: fs.cat(path) for path in fs.find(f"{folder}/out")}
    assert stored == expected[name]
    assert safeload.check(f"memory:/{folder}/out").ok


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_training_checkpoints(tmp_path, name, resume):
    fused = write_experts(tmp_path / "fused", "qwen3_moe", fused=True)
    safeload.convert(fused, tmp_path / "expected", quantize=name)
    made = dcp_build.Checkpoint()
    for key, array in load_file(fused / "model.safetensors").items():
        made.tensor(key, array, files=("__0_0.distcp", "__1_0.distcp"))
    source = made.write(tmp_path / "dcp")
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(fused / file, source)
    safeload.convert(source, tmp_path / "out", quantize=name, resume=resume)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize("name", ["w8a8", "mlx-nvfp4"])
@pytest.mark.parametrize(("kind", "fused"), [("llama3", False), ("qwen3_moe", False), ("qwen3_moe", True)])
def test_models_of_llama_cpp(tmp_path, kind, fused, name):
    pytest.importorskip("tokenizers")
    model = llama_models.listed()[kind]
    weights = llama_models.tensors_of(model)
    source = llama_models.write_folder(tmp_path / "source", model, fused_experts(weights) if fused else weights)
    safeload.convert(source, tmp_path / "model.gguf", dtype="bfloat16")
    safeload.convert(tmp_path / "model.gguf", tmp_path / "plain")
    assert any("gate_up_proj" in key for key in safeload.open(tmp_path / "plain")) == fused
    safeload.convert(tmp_path / "plain", tmp_path / "expected", quantize=name)
    safeload.convert(tmp_path / "model.gguf", tmp_path / "out", quantize=name)
    ours, theirs = contents(tmp_path / "out"), contents(tmp_path / "expected")
    assert ours.keys() == theirs.keys()
    for file in theirs:
        assert file.endswith(".safetensors") or json.loads(ours[file]) == json.loads(theirs[file])
    assert safeload.diff(tmp_path / "out", tmp_path / "expected").same


@pytest.mark.parametrize("kind", ["gptq4_g32_asym", "gptq3_act_order", "awq4_gemm", "modelopt_nvfp4_awq"])
def test_quantized_checkpoints_are_dequantized_first(tmp_path, kind):
    source = DATA / "quantized" / kind
    safeload.convert(source, tmp_path / "plain", dtype="float16")
    safeload.convert(tmp_path / "plain", tmp_path / "expected", quantize="bnb_nf4", only="*")
    safeload.convert(source, tmp_path / "out", quantize="bnb_nf4", only="*", dtype="float16", requantize=True)
    assert safeload.diff(tmp_path / "out", tmp_path / "expected").same
    assert read_config(tmp_path / "out")["quantization_config"]["quant_method"] == "bitsandbytes"


def test_a_file_alone_needs_only(tmp_path):
    source = write_model(tmp_path / "source", "bfloat16")
    safeload.convert(source, tmp_path / "expected", quantize="w4a16")
    alone = shutil.copy(source / "model.safetensors", tmp_path)
    with pytest.raises(
        UnsupportedError, match="pass the folder that has it, or choose the tensors to convert with only="
    ):
        safeload.convert(alone, tmp_path / "out", quantize="w4a16")
    safeload.convert(alone, tmp_path / "out", quantize="w4a16", only="*_proj.weight")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "expected"))
    assert len(ours) == 21
    assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())


# ---- what lies in folders ----


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege")
def test_linked_files_of_a_cache_are_copied(tmp_path):
    source = write_model(tmp_path / "snapshots", "bfloat16")
    (tmp_path / "blobs").mkdir()
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        shutil.move(source / file, tmp_path / "blobs" / file)
        (source / file).symlink_to(f"../blobs/{file}")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    safeload.convert(source, tmp_path / "out", quantize="mlx4")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out/generation_config.json").read_text() == '{"eos_token_id": 2}'


def test_an_index_with_a_wrong_size_is_not_copied(tmp_path):
    source = write_folder(tmp_path, *small("llama"))
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / "model.safetensors.index.json").write_text(json.dumps({**index, "metadata": {"total_size": 7}}))
    safeload.convert(source, tmp_path / "out", quantize="mlx4")
    written = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["metadata"]
    stored = load_file(tmp_path / "out/model.safetensors")
    assert written["total_size"] == sum(array.nbytes for array in stored.values())


def test_a_quantization_that_the_weights_do_not_have_is_replaced(tmp_path):
    source = write_model(tmp_path / "source", "bfloat16")
    (source / "config.json").write_text(
        json.dumps({**config("bfloat16"), "quantization_config": {"quant_method": "x"}})
    )
    safeload.convert(source, tmp_path / "out", quantize="w4a16")
    assert read_config(tmp_path / "out")["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_config_without_a_dtype_keeps_that_of_the_weights(tmp_path):
    source = write_model(tmp_path / "source", "float32")
    settings = config("float32")
    del settings["torch_dtype"]
    (source / "config.json").write_text(json.dumps(settings))
    safeload.convert(source, tmp_path / "out", quantize="w4a16")
    scales = load_file(tmp_path / "out/model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    assert scales.dtype == np.float32


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_mlx_gets_the_keys_of_transformers_4(tmp_path, model_type):
    source = tmp_path / "source"
    if model_type == "llama":
        write_model(source, "bfloat16")
    else:
        write_experts(source, model_type)
    older = read_config(source)
    older |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}
    newer = {name: value for name, value in older.items() if name not in ("rope_theta", "rope_scaling", "num_experts")}
    newer |= {"rope_parameters": older["rope_scaling"]}
    newer |= {"num_local_experts": older["num_experts"]} if model_type == "qwen3_moe" else {}
    (source / "config.json").write_text(json.dumps(newer))
    safeload.convert(source, tmp_path / "out", quantize="mlx4")
    written = read_config(tmp_path / "out")
    older["rope_scaling"]["type"] = "llama3"  # that of some models in mlx-lm
    assert {name: written[name] for name in older} == older
    safeload.convert(source, tmp_path / "other", quantize="fp8_dynamic")
    assert read_config(tmp_path / "other").keys() == newer.keys() | {"quantization_config"}


@pytest.mark.parametrize(
    ("model_type", "newer", "older"),
    [
        ("gpt2", {"n_positions": 64}, {"n_ctx": 64}),
        ("lfm2", {"hidden_size": 8}, {"block_dim": 8}),
        ("exaone4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"rope_scaling": None}),
        ("glm4_moe", {"rope_scaling": {"factor": 2.0}}, {"rope_scaling": {"factor": 2.0}}),
    ],
)
def test_mlx_gets_keys_without_which_mlx_lm_refuses_a_model(model_type, newer, older):
    mlx4 = presets()["mlx4"]
    written = mlx4.lay_out(mlx4, {"model_type": model_type, **newer}, {}, {})
    assert {key: written[key] for key in older} == older


def test_mlx_gets_the_rotations_of_each_kind_of_layer():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}
    mlx4 = presets()["mlx4"]
    written = mlx4.lay_out(mlx4, {"model_type": "gemma3_text", "rope_parameters": rope}, {}, {})
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (2e6, 3e4)
    assert written["rope_scaling"] == {**full, "type": "linear"}
    for damaged in (None, 3, [], {}, {"full_attention": 3, "sliding_attention": []}):
        written = mlx4.lay_out(mlx4, {"model_type": "gemma3_text", "rope_parameters": damaged}, {}, {})
        assert not written.keys() & {"rope_theta", "rope_local_base_freq", "rope_scaling"}


def test_a_value_that_is_not_finite_matters_only_in_a_quantized_weight(tmp_path):
    source = write_model(tmp_path / "source", "bfloat16")
    weights = load_file(source / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight"):
        weights[name] = weights[name].copy()
        weights[name].reshape(-1)[3] = ml_dtypes.bfloat16("inf")
    save_file(weights, source / "model.safetensors")
    safeload.convert(source, tmp_path / "out", quantize="w4a16")
    assert np.isinf(load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]).any()
    with pytest.raises(RangeError, match=r"'lm_head.weight': element \[0, 3\] is inf"):
        safeload.convert(source, tmp_path / "mlx", quantize="mlx4")
    assert not (tmp_path / "mlx").exists()


@pytest.mark.parametrize("name", ["w8a8", "fp8_dynamic", "fp8_block", "bnb_nf4", "bnb_fp4"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 1 << 18), (1 << 16, 1)])
def test_the_smallest_and_the_widest_matrix(tmp_path, name, shape):
    weights = {"x.weight": np.resize(np.array([0.5, -2.0, 1.0], np.float32), shape)}
    safeload.convert(weights, tmp_path / "out", quantize=name, only="*")
    values = safeload.load(tmp_path / "out", dtype="float32")["x.weight"]
    assert values.shape == shape
    np.testing.assert_allclose(values, weights["x.weight"], atol=0.15)
