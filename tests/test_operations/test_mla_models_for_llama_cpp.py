"""DeepSeek, GLM and MiniMax for llama.cpp: further layers, wrappers, and settings that are refused."""

import json

import numpy as np
import pytest
from builders import llama_models

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("tokenizers")

MODELS = llama_models.listed()


def write(path, name, *, tensors=None, prefix="", **config):
    """Write a model with changes to its config and its tensors."""
    model = MODELS[name]
    changed = {key: value for key, value in {**model["config"], **config}.items() if value != "absent"}
    own = {prefix + key: array for key, array in llama_models.tensors_of(model).items()}
    own = {key: array for key, array in {**own, **(tensors or {})}.items() if array is not None}
    return llama_models.write_folder(path, {**model, "config": changed}, own)


def refused(source, match):
    with pytest.raises(safeload.SafeloadError, match=match):
        safeload.convert(source, source.parent / "refused.gguf")
    assert not (source.parent / "refused.gguf").exists()


def tensors_in(path):
    return llama_models.described(path)["tensors"]


def prediction_layer(layer=3):
    """The tensors of a layer for multi-token prediction."""
    begin = f"model.layers.{layer}."
    last = {
        name: array for name, array in llama_models.tensors_of(MODELS["deepseek_v3"]).items() if "layers.2." in name
    }
    more = {f"{begin}{name}.weight": np.ones(64, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{begin}eh_proj.weight"] = np.ones((64, 128), np.float32)
    return {**{name.replace("model.layers.2.", begin): array for name, array in last.items()}, **more}


def test_layers_for_multi_token_prediction_are_left_out(tmp_path, caplog):
    safeload.convert(write(tmp_path / "a" / "x", "deepseek_v3"), tmp_path / "a.gguf")
    tensors = prediction_layer()
    source = write(tmp_path / "b" / "x", "deepseek_v3", tensors=tensors, num_nextn_predict_layers=1)
    safeload.convert(source, tmp_path / "b.gguf")
    assert "left out (llama.cpp has 3 layers): 'model.layers.3." in caplog.text
    assert tensors_in(tmp_path / "a.gguf") == tensors_in(tmp_path / "b.gguf")


PREDICTING = {
    "deepseek_v32": "deepseek32",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
}


@pytest.mark.parametrize("name", PREDICTING)
def test_layers_for_multi_token_prediction_are_whole_or_absent(name, tmp_path):
    architecture = PREDICTING[name]
    layers = MODELS[name]["config"]["num_hidden_layers"]
    further = [tensor for tensor in MODELS[name]["tensors"] if tensor.startswith(f"model.layers.{layers}.")]
    safeload.convert(write(tmp_path / "a" / "x", name, tensors=dict.fromkeys(further)), tmp_path / "a.gguf")
    with safeload.open(tmp_path / "a.gguf") as file:
        assert file.metadata[f"{architecture}.block_count"] == layers + 1
        assert not any(tensor.startswith(f"blk.{layers}.") for tensor in file)
    assert safeload.check(tmp_path / "a.gguf").errors == []
    refused(
        write(tmp_path / "b" / "x", name, tensors={f"model.layers.{layers}.eh_proj.weight": None}),
        f"tensors are missing: llama.cpp needs 'blk.{layers}.nextn.eh_proj.weight'",
    )
    refused(
        write(tmp_path / "c" / "x", name, num_nextn_predict_layers=0),
        f"llama.cpp's {architecture} has no tensor 'blk.{layers}.",
    )


@pytest.mark.parametrize("name", ["KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"])
def test_the_language_model_of_kimi_is_that_of_deepseek(name, tmp_path, caplog):
    safeload.convert(write(tmp_path / "a" / "x", "deepseek_v3"), tmp_path / "a.gguf")
    towers = {"vision_tower.patch_embed.proj.weight": np.ones((4, 4)), "mm_projector.proj.0.weight": np.ones((4, 4))}
    outer = dict.fromkeys(MODELS["deepseek_v3"]["config"], "absent")
    inner = {**MODELS["deepseek_v3"]["config"], "model_type": "kimi_k2"}
    outer |= {"architectures": [name], "model_type": "kimi_k25", "text_config": inner, "vision_config": {}}
    source = write(tmp_path / "b" / "x", "deepseek_v3", tensors=towers, prefix="language_model.", **outer)
    safeload.convert(source, tmp_path / "b.gguf")
    assert "left out (language model only): 'mm_projector" in caplog.text
    a, b = (llama_models.described(tmp_path / f"{part}.gguf") for part in "ab")
    assert a == b


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("deepseek_v2", {"n_group": 2}, "n_group is above 1"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek_v2", {"q_lora_rank": None}, "q_lora_rank: llama.cpp needs it"),
        ("deepseek_v2", {"num_hidden_layers": 27}, "q_lora_rank: llama.cpp needs it"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads differs from num_attention_heads"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v2", {"kv_lora_rank": 30}, "'model.layers.0.self_attn.kv_a_layernorm|attn_k"),
        ("deepseek_v2", {"qk_nope_head_dim": 13}, "kv_b_proj.weight. has 28 rows or columns"),
        ("deepseek_v2", {"v_head_dim": "absent"}, "v_head_dim is missing"),
        ("deepseek_v2", {"n_routed_experts": "absent"}, "n_routed_experts is missing"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group less than n_group"),
        ("deepseek_v3", {"n_group": 8}, "n_group must be less than n_routed_experts"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v32", {"index_head_dim": 96}, "index_head_dim must be a multiple of 64"),
        ("deepseek_v32", {"index_n_heads": 4}, "blk.0.indexer.proj.weight. has the shape"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek_v32", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_window is 8"),
        ("glm4_moe", {"topk_group": 2, "n_group": 2}, "topk_group less than n_group"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("glm4_moe", {"head_dim": 20}, "attn_q|attn_k"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "default"}}, "partial_rotary_factor. in the config is None"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.5, "mscale": 2}}, "rope parameter 'mscale'"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list has layers without full attention"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        ("minimax_m2", {"head_dim": 20}, "attn_"),
        ("minimax_m2", {"rotary_dim": -2}, "rotary_dim must be an integer from 0"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "'indexer_types' in the config is"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 3}, "'model.layers.1.self_attn.indexer.wq_b.weight' is missing"),
        ("glm_moe_dsa", {"indexer_types": "absent", "index_topk_freq": 4}, "indexer_types is missing"),
        *(
            (name, {"mlp_layer_types": kinds}, "mlp_layer_types is .*, but llama.cpp has first_k_dense_replace dense")
            for name, kinds in (
                ("deepseek_v32", ["sparse", "dense"]),
                ("glm_moe_dsa", ["dense", "sparse", "dense"]),
                ("glm4_moe_lite", ["dense"] * 2),
            )
        ),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ("glm4_moe_lite", {"q_lora_rank": None}, "q_lora_rank: llama.cpp needs it"),
        ("glm4_moe_lite", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "tensors are missing: llama.cpp needs 'blk.1.ffn_gate.weight'"),
    ],
)
def test_configs_are_refused_by_name(name, config, match, tmp_path):
    refused(write(tmp_path / "x", name, **config), match)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"mscale": 0.707}, "mscale and mscale_all_dim must be equal"),
        ({"mscale": None, "mscale_all_dim": None}, "mscale and mscale_all_dim must be equal and above 0 with yarn"),
        ({"attention_factor": 1.5}, "rope.attention_factor is 1.5"),
        ({"partial_rotary_factor": 0.5}, "rope.partial_rotary_factor is 0.5"),
        ({"factor": None}, "rope parameter factor is missing"),
    ],
)
def test_rotations_are_refused_by_name(parameters, match, tmp_path):
    rope = {**MODELS["deepseek_v3"]["config"]["rope_parameters"], **parameters}
    rope = {key: value for key, value in rope.items() if value is not None}
    refused(write(tmp_path / "x", "deepseek_v3", rope_parameters=rope), match)


def test_deepseek_32_has_a_single_scale(tmp_path):
    rope = {**MODELS["deepseek_v32"]["config"]["rope_parameters"], "mscale": 0.707, "mscale_all_dim": 0.707}
    refused(
        write(tmp_path / "x", "deepseek_v32", rope_parameters=rope), "mscale and mscale_all_dim must be 1 with yarn"
    )


def test_older_names_of_settings_give_the_same_file(tmp_path):
    rope = dict(MODELS["deepseek_v3"]["config"]["rope_parameters"])
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    safeload.convert(write(tmp_path / "a" / "x", "deepseek_v3"), tmp_path / "a.gguf")
    safeload.convert(write(tmp_path / "b" / "x", "deepseek_v3", rope_parameters="absent", **older), tmp_path / "b.gguf")
    a, b = (llama_models.described(tmp_path / f"{part}.gguf") for part in "ab")
    assert a == b


def test_what_transformers_assumes_is_written(tmp_path):
    """llama.cpp would take a file without the function of the router for one of DeepSeek-V2."""
    safeload.convert(write(tmp_path / "x", "deepseek_v3", scoring_func="absent"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["deepseek2.expert_gating_func"] == 2


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek_v3", "mlp.gate.e_score_correction_bias"),
        ("glm4_moe", "self_attn.q_norm.weight"),
        ("glm4_moe", "self_attn.k_proj.bias"),
        ("glm_moe_dsa", "self_attn.indexer.k_norm.bias"),
    ],
)
def test_what_only_llama_cpp_can_do_without_is_not_missing(name, tensor, tmp_path):
    layer = 2 if name == "glm_moe_dsa" else 1
    tensors = {f"model.layers.{layer}.{tensor}": None}
    refused(write(tmp_path / "x", name, tensors=tensors), f"'model.layers.{layer}.{tensor}' is missing")


def test_layers_share_an_index(tmp_path):
    safeload.convert(write(tmp_path / "a" / "x", "glm_moe_dsa"), tmp_path / "a.gguf")
    with safeload.open(tmp_path / "a.gguf") as file:
        assert file.metadata["glm-dsa.attention.indexer.types"].tolist() == [True, False, True]
        assert not any(name.startswith("blk.1.indexer") for name in file)
    assert foreign(write(tmp_path / "b" / "x", "glm_moe_dsa"), tmp_path)["indexer_types"] == ["full", "shared", "full"]


@pytest.mark.parametrize(
    ("tensor", "value", "match"),
    [
        ("model.layers.1.self_attn.kv_b_proj.weight", None, "tensors are missing: llama.cpp needs 'blk.1.attn_k_b"),
        (
            "model.layers.1.self_attn.kv_b_proj.weight",
            np.ones((113, 32), np.float32),
            "cannot be divided|cannot be taken",
        ),
        ("model.layers.1.self_attn.kv_b_proj.weight", np.ones(112, np.float32), "expected more axes"),
        ("model.layers.1.self_attn.o_proj.bias", np.ones(64, np.float32), "has no such tensor"),
        ("model.layers.1.mlp.experts.0.up_proj.weight", None, "blk.1.ffn_up_exps.weight|expert"),
    ],
)
def test_tensors_are_refused_by_name(tensor, value, match, tmp_path):
    refused(write(tmp_path / "x", "deepseek_v3", tensors={tensor: value}), match)


def test_a_tokenizer_of_tiktoken_is_refused_by_name(tmp_path):
    source = write(tmp_path / "x", "deepseek_v3")
    (source / "tokenizer.json").rename(source / "tiktoken.model")
    refused(source, "tiktoken.model is not supported, and neither tokenizer.model nor tokenizer.json exists")


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        ("deepseek_v2", "attention.kv_lora_rank", None, "key_length is 40, but DeepseekV2ForCausalLM has 520"),
        ("deepseek_v2", "attention.key_length_mla", None, "attention_key_length_mla"),
        ("deepseek_v3", "expert_weights_norm", "yes", "expert_weights_norm must be a bool, got 'yes'"),
        ("deepseek_v3", "expert_gating_func", "sigmoid", "expert_gating_func must be a number"),
    ],
)
def test_foreign_files_are_refused_by_name(name, key, value, match, tmp_path):
    safeload.convert(write(tmp_path / "x", name), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        metadata = {text: item for text, item in file.metadata.items() if not text.startswith("safeload.")}
        metadata[f"deepseek2.{key}"] = value
        safeload.gguf.save_file(
            file.load(), tmp_path / "y.gguf", {text: item for text, item in metadata.items() if item is not None}
        )
    with pytest.raises(safeload.SafeloadError, match=match):
        safeload.convert(tmp_path / "y.gguf", tmp_path / "back/")


def foreign(source, tmp_path):
    """Return the config that a model gets from its file without keys of ours."""
    safeload.convert(source, tmp_path / "own.gguf", overwrite=True)
    with safeload.open(tmp_path / "own.gguf") as file:
        metadata = {text: item for text, item in file.metadata.items() if not text.startswith("safeload.")}
        safeload.gguf.save_file(file.load(), tmp_path / "foreign.gguf", metadata, overwrite=True)
    safeload.convert(tmp_path / "foreign.gguf", tmp_path / "back/", overwrite=True)
    return json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(("name", "expected"), [("deepseek_v2", "V2"), ("deepseek_v3", "V3")])
def test_a_foreign_file_names_the_class_of_its_router(name, expected, tmp_path):
    config = foreign(write(tmp_path / "x", name), tmp_path)
    assert config["architectures"] == [f"Deepseek{expected}ForCausalLM"]
    assert config["rope_parameters"]["mscale"] == MODELS[name]["config"]["rope_parameters"]["mscale"]


def test_a_foreign_file_says_if_queries_have_norms(tmp_path):
    norms = [name for name in MODELS["glm4_moe"]["tensors"] if name.endswith(("q_norm.weight", "k_norm.weight"))]
    for tensors, expected in (({}, True), (dict.fromkeys(norms), False)):
        source = write(tmp_path / str(expected), "glm4_moe", tensors=tensors, use_qk_norm=expected)
        config = foreign(source, tmp_path)
        assert config["use_qk_norm"] is expected
        assert config["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_minimax_can_state_the_share_of_rotations(tmp_path):
    safeload.convert(write(tmp_path / "x", "minimax_m2", rotary_dim="absent"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["minimax-m2.rope.dimension_count"] == 12


def test_minimax_has_a_bias_of_the_router_and_a_head(tmp_path):
    for name in ("lm_head.weight", "model.layers.1.block_sparse_moe.e_score_correction_bias"):
        refused(write(tmp_path / name, "minimax_m2", tensors={name: None}), "is missing|tensors are missing")
