"""Sources of a model for llama.cpp: the file is that of the plain folder of the values, whatever holds them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders import llama_models
from builders.dcp_build import Checkpoint, grid
from builders.http_server import CERTIFICATE, Server
from builders.hub import Hub, Repository
from builders.packed_codes import words
from builders.random import rng
from builders.thorough import dealt
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

pytest.importorskip("tokenizers")

MODELS = llama_models.listed()
GROUP = 32
# Matrices that quantizers for other engines change: those of layers, but not routers.
BITS = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "quant_method": "gptq"}


def is_linear(name, array):
    return array.ndim == 2 and "layers." in name and not name.endswith("block_sparse_moe.gate.weight")


def write(folder, name, tensors, **config):
    """Write a model with other tensors and fields of the config."""
    return llama_models.write_folder(folder, {**MODELS[name], "config": {**MODELS[name]["config"], **config}}, tensors)


def gptq(rows, columns):
    """A matrix of 4-bit codes as AutoGPTQ packs it, by suffix."""
    groups = columns // GROUP
    codes, zeros = (rng.integers(0, 16, (1, *shape)) for shape in ((rows, columns), (groups, rows)))
    order = list(range(8))
    return {
        "qweight": words(codes, 4, order).view("<i4")[0].T.copy(),
        "qzeros": words(zeros, 4, order).view("<i4")[0],
        "scales": rng.uniform(0.01, 0.03, (groups, rows)).astype(np.float16),
        "g_idx": (np.arange(columns) // GROUP).astype(np.int32),
    }


def gptq_folder(folder, name):
    tensors = {}
    for key, array in llama_models.tensors_of(MODELS[name]).items():
        parts = gptq(*array.shape) if is_linear(key, array) else None
        module = key.removesuffix(".weight")
        tensors.update({key: array} if parts is None else {f"{module}.{part}": a for part, a in parts.items()})
    return write(folder, name, tensors, quantization_config=BITS)


def fp8_folder(folder, name):
    tensors = {}
    for key, array in llama_models.tensors_of(MODELS[name]).items():
        if not is_linear(key, array):
            tensors[key] = array
            continue
        scale = rng.uniform(0.001, 0.002, (-(-array.shape[0] // 128), -(-array.shape[1] // 128)))
        tensors[key] = (array.astype(np.float32) / scale[:1, :1]).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scale.astype(np.float32)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return write(folder, name, tensors, quantization_config=quantization)


def dcp_folder(folder, name):
    """A checkpoint of four processes, with the model's files beside it."""
    checkpoint = Checkpoint()
    files = [f"__{rank}_0.distcp" for rank in range(4)]
    for key, array in llama_models.tensors_of(MODELS[name]).items():
        boxes = grid(array.shape, (4,) + (1,) * (array.ndim - 1))
        checkpoint.tensor(key, array, boxes, files=files)
    write(folder, name, {})
    (folder / "model.safetensors").unlink()
    return checkpoint.write(folder)


def torch_folder(folder, name):
    write(folder, name, {})
    (folder / "model.safetensors").unlink()
    weights = llama_models.tensors_of(MODELS[name])
    entries = {key: tensor(Storage(str(k), a.ravel()), a.shape) for k, (key, a) in enumerate(weights.items())}
    (folder / "pytorch_model.bin").write_bytes(zip_file(entries))
    return folder


def sharded_folder(folder, name):
    """Every layer in all shards, which the index lists from the last to the first."""
    write(folder, name, {})
    (folder / "model.safetensors").unlink()
    tensors = [*llama_models.tensors_of(MODELS[name]).items()]
    shards = [dict(tensors[k::5]) for k in range(5)]
    weight_map = {}
    for k, shard in reversed([*enumerate(shards)]):
        file = f"model-{k + 1:05}-of-00005.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def plain(folder, name, source, dtype):
    """A folder with the values of another."""
    return write(folder, name, dict(safeload.load(source, dtype=dtype)))


def described(path):
    """A file without the title, which is that of the folder."""
    facts = llama_models.described(path)
    facts["metadata"].pop("general.name", None)
    return facts


@pytest.mark.parametrize(
    ("kind", "name"),
    dealt([gptq_folder, fp8_folder, dcp_folder, torch_folder, sharded_folder], ["llama3", "mixtral"]),
)
def test_the_file_is_that_of_the_plain_folder(kind, name, tmp_path):
    """Values that were dequantized are rounded to the dtype of the config only if they are stored."""
    source = kind(tmp_path / "source", name)
    coded = kind in (gptq_folder, fp8_folder)
    again = {"quantize": "q5_0", "requantize": True} if coded else {"quantize": "q4_k_m"}  # no codes move to q5_0
    for options, dtype in (({}, "bfloat16"), (again, "float32"), ({"dtype": "float32"}, "float32")):
        reference = plain(tmp_path / f"plain-{len(options)}-{dtype}-{len(str(options))}", name, source, dtype)
        safeload.convert(source, tmp_path / "source.gguf", overwrite=True, **options)
        safeload.convert(reference, tmp_path / "plain.gguf", overwrite=True, **options)
        assert described(tmp_path / "source.gguf") == described(tmp_path / "plain.gguf")


def test_a_model_behind_https(tmp_path):
    source = sharded_folder(tmp_path / "source", "llama3")
    safeload.convert(source, tmp_path / "local.gguf", quantize="q4_k_m")
    with Server(source, tls=True) as server:
        url = server.url("/model.safetensors.index.json")
        options = {"verify": str(CERTIFICATE)}
        safeload.convert(url, tmp_path / "remote.gguf", quantize="q4_k_m", storage_options=options)
        weights = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        beside = sum(file.stat().st_size for file in source.glob("*.json"))
        assert server.sent < weights + 5 * (12 << 10) + 3 * beside  # 5 first requests, each for an estimate of a header
    assert described(tmp_path / "remote.gguf") == described(tmp_path / "local.gguf")


@pytest.mark.store_packages
def test_a_model_of_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    for key in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    source = sharded_folder(tmp_path / "source", "qwen3")
    safeload.convert(source, tmp_path / "local.gguf")
    with Hub() as hub:
        hub.repositories["owner/name"] = Repository()
        hub.repositories["owner/name"].commit({file.name: file.read_bytes() for file in source.iterdir()})
        options = {"endpoint": hub.url(), "token": hub.token}
        safeload.convert("hf://owner/name", tmp_path / "remote.gguf", storage_options=options)
    assert described(tmp_path / "remote.gguf") == described(tmp_path / "local.gguf")


# ---- models at the edge ----


def single_expert(tensors):
    """Experts without a choice."""
    kept = {key: array for key, array in tensors.items() if ".experts." not in key or ".experts.0." in key}
    return {key: array[:1] if key.endswith("block_sparse_moe.gate.weight") else array for key, array in kept.items()}


def test_a_single_layer_and_a_single_expert(tmp_path):
    tensors = llama_models.tensors_of(MODELS["mixtral"])
    first = {key: array for key, array in tensors.items() if ".layers.1." not in key}
    fields = {"num_local_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    source = write(tmp_path / "source", "mixtral", single_expert(first), **fields)
    safeload.convert(source, tmp_path / "x.gguf", quantize="q4_k_m")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["llama.block_count"] == file.metadata["llama.expert_count"] == 1
        assert file.tensors["blk.0.ffn_up_exps.weight"].shape == (1, 96, 64)
    assert safeload.check(tmp_path / "x.gguf").errors == []


def test_a_value_that_is_not_finite_is_told_by_its_name_in_the_result(tmp_path):
    tensors = llama_models.tensors_of(MODELS["llama3"])
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    source = write(tmp_path / "source", "llama3", tensors)
    with pytest.raises(safeload.RangeError, match=r"'blk.1.ffn_up.weight': element \[3, 5\] is nan"):
        safeload.convert(source, tmp_path / "x.gguf", quantize="q4_k_m")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_gets_the_bytes_of_the_file(tmp_path):
    source = write(tmp_path / "source", "llama3", llama_models.tensors_of(MODELS["llama3"]))
    safeload.convert(source, tmp_path / "x.gguf", quantize="q4_k_m")
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit((tmp_path / "pipe").read_bytes)
        safeload.convert(source, tmp_path / "pipe", format="gguf", quantize="q4_k_m", overwrite=True)
        assert content.result(60) == (tmp_path / "x.gguf").read_bytes()
