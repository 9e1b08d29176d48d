"""Codes of a published model that stay in a GGUF file, compared with what llama.cpp's own converter writes."""

import json

import numpy as np
import pytest
from builders import llama_models

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("tokenizers")

MODELS = llama_models.listed("packed.json")


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model, with changes to its tensors."""

    def write(name, tensors=None):
        return llama_models.write_folder(
            tmp_path / name, MODELS[name], {**llama_models.tensors_of(MODELS[name]), **(tensors or {})}
        )

    return write


def values_of(path):
    with safeload.open(path) as checkpoint:
        return dict(checkpoint.load(dtype="float32"))


@pytest.mark.parametrize("name", MODELS)
def test_metadata_and_tensors_are_those_of_llama_cpp(name, folder, tmp_path):
    safeload.convert(folder(name), tmp_path / "x.gguf")
    own, reference = llama_models.described(tmp_path / "x.gguf"), MODELS[name]["reference"]
    left_out = {"qwen3moe.expert_shared_feed_forward_length"}
    assert own["metadata"] == {key: value for key, value in reference["metadata"].items() if key not in left_out}
    assert own["tensors"] == reference["tensors"]
    assert safeload.check(tmp_path / "x.gguf").errors == []


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_source(name, folder, tmp_path):
    """The factor of an NVFP4 tensor is multiplied at another place, which rounds otherwise."""
    source = folder(name)
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(source, tmp_path / "plain.gguf", dtype="float32")
    blocks, plain = values_of(tmp_path / "x.gguf"), values_of(tmp_path / "plain.gguf")
    assert blocks.keys() == plain.keys()
    for key, array in plain.items():
        np.testing.assert_allclose(blocks[key], array, rtol=3e-7 if "nvfp4" in name else 0, atol=0)


def test_the_way_back_has_the_values(folder, tmp_path):
    for name in MODELS:
        source = folder(name)
        safeload.convert(source, tmp_path / f"{name}.gguf")
        safeload.convert(tmp_path / f"{name}.gguf", tmp_path / f"{name}-back", dtype="float32")
        there, back = values_of(source), values_of(tmp_path / f"{name}-back")
        assert there.keys() == back.keys()
        for key, array in there.items():
            np.testing.assert_allclose(back[key], array, rtol=3e-7 if "nvfp4" in name else 0, atol=0)


def compressed_mxfp4(folder):
    """A model in mxfp4-pack-quantized, which llama.cpp's converter refuses, and one of its matrices."""
    model = MODELS["llama_nvfp4"]
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "float"}
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": weights}
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
    config = {**model["config"], "quantization_config": {**quantization, "config_groups": {"group_0": group}}}
    tensors = {}
    for name, array in llama_models.tensors_of(model).items():
        if array.dtype == np.uint8:
            shape = (array.shape[0], array.shape[1] // 16)
            tensors |= {f"{name}_packed": array, f"{name}_scale": llama_models.codes(f"{name}_scale", "U8", shape)}
        elif not name.endswith("scale") and "scale_" not in name:
            tensors[name] = array
    return llama_models.write_folder(folder, {**model, "config": config}, tensors)


def test_mxfp4_of_compressed_tensors(tmp_path):
    source = compressed_mxfp4(tmp_path / "source")
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(source, tmp_path / "plain.gguf", dtype="float32")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].dtype == file.tensors["blk.1.ffn_up.weight"].dtype == "MXFP4"
        assert file.metadata["general.file_type"] == 38
    blocks, plain = values_of(tmp_path / "x.gguf"), values_of(tmp_path / "plain.gguf")
    assert all(np.array_equal(blocks[name], plain[name]) for name in plain)


def test_quantize_asks_for_more(folder, tmp_path):
    """Blocks that a request does not name stay; the others are made of the values."""
    for name, part, kind in (("gpt_oss_mxfp4", "ffn_gate_exps", "MXFP4"), ("llama_nvfp4", "ffn_gate", "nvfp4")):
        source = folder(name)
        safeload.convert(
            source,
            tmp_path / "few.gguf",
            quantize={"*ffn_down*weight": "q8_0", "*": None},
            requantize=True,
            overwrite=True,
        )
        safeload.convert(source, tmp_path / "plain.gguf", dtype="float32", overwrite=True)
        safeload.convert(
            tmp_path / "plain.gguf", tmp_path / "two.gguf", quantize={"*ffn_down*weight": "q8_0"}, overwrite=True
        )
        with safeload.open(tmp_path / "few.gguf") as few, safeload.open(tmp_path / "two.gguf") as two:
            down = part.replace("gate", "down")
            assert few.tensors[f"blk.0.{part}.weight"].dtype == kind
            assert few[f"blk.0.{down}.weight"] == two[f"blk.0.{down}.weight"]
            assert not any("ffn_down.scale" in key or "ffn_down.input_scale" in key for key in few.ignored)
        assert safeload.check(tmp_path / "few.gguf").errors == []


def test_a_mixture_gives_the_bytes_of_two_steps(folder, tmp_path):
    source = folder("llama_nvfp4")
    safeload.convert(source, tmp_path / "one.gguf", quantize="q4_k_m", requantize=True)
    safeload.convert(source, tmp_path / "plain.gguf", dtype="float32")
    safeload.convert(tmp_path / "plain.gguf", tmp_path / "two.gguf", quantize="q4_k_m")
    one, two = (llama_models.described(tmp_path / f"{step}.gguf") for step in ("one", "two"))
    assert one["tensors"] == two["tensors"]
    assert one["metadata"]["general.file_type"] == two["metadata"]["general.file_type"]


def test_the_file_type_of_experts_keeps_their_codes(folder, tmp_path):
    source = folder("gpt_oss_mxfp4")
    safeload.convert(source, tmp_path / "x.gguf", quantize="mxfp4_moe")
    safeload.convert(source, tmp_path / "blocks.gguf")
    with safeload.open(tmp_path / "x.gguf") as file, safeload.open(tmp_path / "blocks.gguf") as blocks:
        assert file["blk.0.ffn_up_exps.weight"] == blocks["blk.0.ffn_up_exps.weight"]
        assert file.tensors["blk.0.attn_q.weight"].dtype == "Q8_0"


@pytest.mark.parametrize(("name", "code"), [("gpt_oss_mxfp4", 255), ("llama_nvfp4", 0x7F), ("llama_nvfp4", 0x81)])
def test_scales_that_blocks_cannot_hold_are_refused(name, code, folder, tmp_path):
    stored = next(key for key in MODELS[name]["tensors"] if key.endswith(("weight_scale", "_scales")))
    scales = llama_models.tensors_of(MODELS[name])[stored]
    scales.view(np.uint8).reshape(-1)[3] = code
    source = folder(name, {stored: scales})
    with pytest.raises(safeload.SafeloadError, match="has the scale of a block that is negative or no number"):
        safeload.convert(source, tmp_path / "x.gguf")


def test_a_scale_of_minus_zero_is_zero(folder, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    scales = llama_models.tensors_of(MODELS["llama_nvfp4"])[f"{name}_scale"]
    scales.view(np.uint8)[0, 0] = 0x80
    safeload.convert(folder("llama_nvfp4", {f"{name}_scale": scales}), tmp_path / "x.gguf")
    assert not values_of(tmp_path / "x.gguf")["blk.0.ffn_up.weight"][0, :16].any()


def test_columns_that_are_not_whole_blocks_are_dequantized(tmp_path):
    """Rows of 96 codes have no whole blocks of 64."""
    model = MODELS["llama_nvfp4"]
    tensors = llama_models.tensors_of(model)
    for name in [name for name in tensors if ".mlp." in name]:
        if name.endswith(("weight", "weight_scale")):
            array = tensors[name].view(np.uint8)
            narrow = array[:, : array.shape[1] * 3 // 4] if "down_proj" in name else array[:96]
            tensors[name] = np.ascontiguousarray(narrow).view(tensors[name].dtype)
    config = {**model["config"], "intermediate_size": 96}
    source = llama_models.write_folder(tmp_path / "source", {**model, "config": config}, tensors)
    safeload.convert(source, tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.tensors["blk.0.ffn_down.weight"].dtype == "BF16"
        assert file.tensors["blk.0.ffn_up.weight"].dtype == "nvfp4"


def test_shards_and_single_files_give_the_same_file(folder, tmp_path):
    source = folder("qwen3_moe_nvfp4")
    safeload.convert(source, tmp_path / "one.gguf")
    (file,) = source.glob("*.safetensors")
    tensors = [*llama_models.tensors_of(MODELS["qwen3_moe_nvfp4"]).items()]
    file.unlink()
    weight_map = {}
    for k in range(3):
        save_file(dict(tensors[k::3]), source / f"model-{k + 1:05}-of-00003.safetensors")
        weight_map |= dict.fromkeys((name for name, _ in tensors[k::3]), f"model-{k + 1:05}-of-00003.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    safeload.convert(source, tmp_path / "shards.gguf")
    one, shards = (llama_models.described(tmp_path / f"{name}.gguf") for name in ("one", "shards"))
    assert one == shards


def test_a_scale_that_is_no_factor_of_blocks_keeps_its_matrix(tmp_path):
    """Gemma 4 has one for each expert, under the name that blocks have theirs."""
    tensors = {"a.weight": np.ones((4, 64), np.float32), "a.scale": np.arange(4, dtype=np.float32)}
    safeload.save({**tensors, "b.weight": tensors["a.weight"]}, tmp_path / "x.safetensors")
    safeload.convert(tmp_path / "x.safetensors", tmp_path / "x.gguf", quantize={"*.weight": "nvfp4"}, keep=())
    with safeload.open(tmp_path / "x.gguf") as file:
        dtypes = [file.tensors[name].dtype for name in ("a.weight", "a.scale", "b.weight")]
        assert dtypes == ["F32", "F32", "NVFP4"]
        assert (file["a.scale"] == tensors["a.scale"]).all()


def test_nvfp4_is_a_target(folder, tmp_path):
    """Codes of the source are copied, what it has in full precision is rounded."""
    source = folder("llama_nvfp4")
    safeload.convert(source, tmp_path / "blocks.gguf")
    safeload.convert(source, tmp_path / "all.gguf", quantize="nvfp4")
    safeload.convert(source, tmp_path / "plain.gguf", dtype="float32")
    with safeload.open(tmp_path / "blocks.gguf") as blocks, safeload.open(tmp_path / "all.gguf") as file:
        assert file["blk.1.ffn_up.weight"] == blocks["blk.1.ffn_up.weight"]
        head = safeload.load(tmp_path / "plain.gguf")["output.weight"]
        assert file["output.weight"] == safeload.quantize(head, "nvfp4")
        assert file.metadata["general.file_type"] == 39
    assert safeload.check(tmp_path / "all.gguf").errors == []


def test_factors_that_llama_cpp_ignores_are_multiplied_before(tmp_path, caplog):
    """Its graph of Qwen 2 computes without factors."""
    model, other = MODELS["qwen3_w4a16_nvfp4"], llama_models.listed()["qwen2"]
    tensors = {name: x for name, x in llama_models.tensors_of(model).items() if "q_norm" not in name}
    tensors = {name: x for name, x in tensors.items() if "k_norm" not in name and name != "lm_head.weight"}
    tensors |= {
        f"model.layers.{k}.self_attn.{part}_proj.bias": np.ones(rows, np.float32)
        for k in range(2)
        for part, rows in (("q", 128), ("k", 64), ("v", 64))
    }
    fields = {key: model["config"][key] for key in ("quantization_config", "intermediate_size", "head_dim")}
    config = {**other["config"], **fields, "hidden_size": 64}
    source = llama_models.write_folder(tmp_path / "source", {**other, "config": config}, tensors)
    safeload.convert(source, tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.tensors["blk.0.ffn_up.weight"].dtype == "BF16"
        assert file.metadata["general.file_type"] == 32
    assert "ignores the factors of NVFP4: 'blk.0." in caplog.text


@pytest.mark.parametrize("count", [0, 2])
def test_an_expert_has_one_factor_of_activations(count, folder, tmp_path):
    name = "model.layers.0.mlp.experts.1.down_proj.input_global_scale"
    source = folder("qwen3_moe_nvfp4", {name: np.ones(count, np.float32)})
    with pytest.raises(safeload.FormatError, match=f"'{name}' has the shape .{count}., expected one number"):
        safeload.convert(source, tmp_path / "x.gguf")
