"""Models of transformers as files that llama.cpp runs, compared with what its own converter writes."""

import json
import logging
import shutil
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from builders import llama_models

import safeload
from safeload import gguf
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("tokenizers")

MODELS = llama_models.listed()
KINDS = MODELS["gemma4"]["config"]["layer_types"]
# Keys of the converter that safeload leaves out.
OMITTED = {
    "qwen3_moe": {"qwen3moe.expert_shared_feed_forward_length"},
    "gemma": {"tokenizer.ggml.eot_token_id"},
    "nemotron": {"nemotron.attention.layer_norm_rms_epsilon", "nemotron.rope.scaling.type"},
    "falcon": {"falcon.tensor_data_layout"},
    "falcon_new": {"falcon.tensor_data_layout"},
}

# Keys that the converter leaves out.
ADDED = {"gpt_neox": {"general.file_type"}, "gpt_neox_sequential": {"general.file_type"}}


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model, with changes to its config, its tensors and its files."""

    def write(name, *, tensors=None, files=(), **config):
        model = MODELS[name]
        changed = {key: value for key, value in {**model["config"], **config}.items() if value != "absent"}
        own = {**llama_models.tensors_of(model), **(tensors or {})}
        own = {key: value for key, value in own.items() if value is not None}
        path = llama_models.write_folder(tmp_path / name, {**model, "config": changed}, own)
        for file, content in dict(files).items():
            (path / file).unlink(missing_ok=True) if content is None else (path / file).write_text(content)
        return path

    return write


def refused(source, match, error=safeload.SafeloadError, **options):
    destination = source.parent / "refused.gguf"
    with pytest.raises(error, match=match):
        safeload.convert(source, destination, **options)
    assert not destination.exists()


@pytest.mark.parametrize("name", MODELS)
def test_metadata_and_tensors_are_those_of_llama_cpp(name, folder, tmp_path):
    safeload.convert(folder(name), tmp_path / "x.gguf", dtype="float32")
    own, reference = llama_models.described(tmp_path / "x.gguf"), MODELS[name]["reference"]
    expected = {key: value for key, value in reference["metadata"].items() if key not in OMITTED.get(name, ())}
    assert own["metadata"].keys() - expected.keys() == ADDED.get(name, set())
    assert {key: value for key, value in own["metadata"].items() if key in expected} == expected
    assert llama_models.without_last_bits(own["tensors"], reference["tensors"]) == reference["tensors"]


@pytest.mark.parametrize("name", MODELS)
def test_the_result_passes_check(name, folder, tmp_path):
    safeload.convert(folder(name), tmp_path / "x.gguf")
    assert safeload.check(tmp_path / "x.gguf").errors == []


@pytest.mark.parametrize("name", MODELS)
def test_unknown_tensors_are_refused_by_name(name, folder):
    refused(
        folder(name, tensors={"model.layers.0.x.weight": np.zeros((2, 2), np.float32)}), "'model.layers.0.x.weight'"
    )


@pytest.mark.parametrize("heads", [1, 2])
def test_check_reports_a_wrong_number_of_heads(heads, folder, tmp_path):
    safeload.convert(folder("llama3"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        gguf.save_file(
            file.load(), tmp_path / "wrong.gguf", {**file.metadata, "llama.attention.head_count": np.uint32(heads)}
        )
    assert any(
        f"attention_head_count {heads}" in str(finding) for finding in safeload.check(tmp_path / "wrong.gguf").errors
    )


def test_matrices_keep_their_dtype_and_vectors_become_f32(folder, tmp_path):
    safeload.convert(folder("qwen3_moe"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        dtypes = {name: str(tensor.dtype) for name, tensor in file.tensors.items()}
        assert file.metadata["general.file_type"] == 32
    assert dtypes["blk.0.ffn_gate_exps.weight"] == dtypes["token_embd.weight"] == "BF16"
    assert dtypes["blk.0.ffn_gate_inp.weight"] == dtypes["blk.0.attn_q_norm.weight"] == "F32"


@pytest.mark.parametrize("name", ["llama2", "qwen2", "ernie4_5"])
def test_an_embedding_has_a_row_for_each_token(name, folder):
    (embedding,) = (key for key in MODELS[name]["tensors"] if key.endswith("embed_tokens.weight"))
    rows, columns = MODELS[name]["tensors"][embedding]
    source = folder(name, tensors={embedding: np.ones((rows - 1, columns), np.float32)})
    refused(source, f"'{embedding}' has {rows - 1} rows, but vocab_size is {rows}")


@pytest.mark.parametrize("name", ["mistral_tekken", "gemma4", "llama2"])
def test_shards_keep_the_tokenizer(name, folder, tmp_path):
    source = folder(name)
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(source, tmp_path / "shards/", max_shard_size="50KB")
    safeload.convert(tmp_path / "shards", tmp_path / "y.gguf")
    one, two = (llama_models.described(tmp_path / f"{file}.gguf") for file in "xy")
    one["metadata"].pop("general.name"), two["metadata"].pop("general.name")
    assert one == two


@pytest.mark.parametrize("name", ["qwen2_moe", "gemma4_moe"])
@pytest.mark.parametrize("scheme", ["nvfp4", {"*": "q8_0"}])
def test_routers_stay_float32(scheme, name, folder, tmp_path):
    safeload.convert(folder(name), tmp_path / "x.gguf", quantize=scheme)
    with safeload.open(tmp_path / "x.gguf") as file:
        dtypes = {key: tensor.dtype for key, tensor in file.tensors.items()}
    assert {dtype for key, dtype in dtypes.items() if "gate_inp" in key} == {"F32"}
    assert dtypes["blk.0.attn_q.weight"] == ("NVFP4" if scheme == "nvfp4" else "Q8_0")


def test_fused_and_single_experts_give_the_same_file(folder, tmp_path):
    tensors = llama_models.tensors_of(MODELS["mixtral"])
    fused = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in range(2):
        block, together = f"model.layers.{layer}.block_sparse_moe.experts.", f"model.layers.{layer}.mlp.experts."
        gate, down, up = (np.stack([tensors[f"{block}{k}.w{n}.weight"] for k in range(4)]) for n in (1, 2, 3))
        fused[f"{together}gate_up_proj"], fused[f"{together}down_proj"] = np.concatenate([gate, up], 1), down
    safeload.convert(folder("mixtral"), tmp_path / "single.gguf")
    source = llama_models.write_folder(tmp_path / "fused" / "mixtral", MODELS["mixtral"], fused)
    safeload.convert(source, tmp_path / "fused.gguf")
    single, other = (llama_models.described(tmp_path / f"{name}.gguf")["tensors"] for name in ("single", "fused"))
    assert single == other


def test_the_config_of_the_source_is_kept(folder, tmp_path):
    safeload.convert(folder("llama3"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert json.loads(file.metadata["safeload.source.config"]) == MODELS["llama3"]["config"]


def test_raw_writes_tensors_under_their_own_names(folder, tmp_path, caplog):
    safeload.convert(folder("llama3"), tmp_path / "x.gguf", raw=True, only="*.q_proj.weight")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert list(file) == [f"model.layers.{k}.self_attn.q_proj.weight" for k in range(2)]
    assert "no engine will load this file" in caplog.text


def test_a_model_is_written_whole(folder):
    source = folder("llama2")
    for option in ({"only": "*q_proj*"}, {"drop": "lm_head*"}, {"names": ["lm_head.weight"]}, {"rename": {"a": "b"}}):
        refused(source, "no complete model", ValueError, **option)
    refused(source, "drop= would leave no complete model: .*lm_head.weight.* is missing", ValueError, drop="lm_head*")
    missing = "tensors are missing: llama.cpp needs 'blk.1.ffn_up.weight' .*; pass raw=True"
    refused(source, missing, ValueError, drop="*.1.mlp.up_proj.weight")
    refused(source, "llama.cpp needs 'token_embd.weight'", ValueError, drop="*embed_tokens*")
    refused(folder("mixtral"), "expert 2 is missing", ValueError, drop="*.1.*.experts.2.w1.weight")
    refused(source, "matches none of", safeload.SafeloadError, drop="mtp*")


def test_a_selection_may_leave_a_complete_model(folder, tmp_path):
    safeload.convert(folder("qwen3_5", tensors=dict.fromkeys(MTP)), tmp_path / "without.gguf")
    tensors = llama_models.tensors_of(MODELS["qwen3_5"])
    source = llama_models.write_folder(tmp_path / "all" / "qwen3_5", MODELS["qwen3_5"], tensors)
    selections = ({"drop": "mtp*"}, {"only": "model.*"}, {"names": [name for name in tensors if name not in MTP]})
    for option in selections:
        safeload.convert(source, tmp_path / "x.gguf", overwrite=True, **option)
        assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "without.gguf").read_bytes()
    safeload.convert(source, tmp_path / "x.gguf", overwrite=True, drop="mtp*", quantize={"*attn_q*": "q8_0", "*": None})
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.tensors["blk.3.attn_q.weight"].dtype == "Q8_0"


def test_scales_of_the_cache_and_buffers_are_left_out(folder, tmp_path, caplog):
    """The converter leaves out the first for some quantizations, and the second always."""
    scale, layer = np.ones(1, np.float32), "model.layers.0.self_attn."
    extra = {f"{layer}k_scale": scale, f"{layer}v_scale": scale, f"{layer}attn.kv_scale": scale}
    extra |= {f"{layer}k_cache_scale": scale, f"{layer}rotary_emb.inv_freq": scale}
    safeload.convert(folder("qwen3"), tmp_path / "plain.gguf")
    source = llama_models.write_folder(
        tmp_path / "more" / "qwen3", MODELS["qwen3"], llama_models.tensors_of(MODELS["qwen3"]) | extra
    )
    safeload.convert(source, tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert "left out (scales of the KV cache)" in caplog.text


@pytest.mark.parametrize("name", ["v_head.summary.weight", "score.weight"])
def test_other_heads_are_refused_but_can_be_dropped(name, folder, tmp_path):
    source = folder("llama3", tensors={name: np.zeros((1, 64), np.float32)})
    refused(source, f"'{name}': llama.cpp's llama has no such tensor; drop= leaves tensors out")
    safeload.convert(source, tmp_path / "x.gguf", drop=name)
    assert safeload.check(tmp_path / "x.gguf").errors == []


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "'OPTForCausalLM' cannot be converted for llama.cpp"),
        ({"architectures": "absent", "model_type": "opt"}, "model_type 'opt'"),
        ({"hidden_act": "relu"}, "no activation 'relu'"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size must be an integer"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 3}, "tensors are missing: llama.cpp needs 'blk.2.attn_norm.weight"),
        ({"num_hidden_layers": 1}, "has no tensor .blk.1"),
        ({"intermediate_size": 100}, "ffn_down.weight' has the shape|ffn_gate.weight has the shape"),
        ({"num_attention_heads": 5}, "does not have 5 heads"),
        ({"intermediate_size": "absent"}, "intermediate_size is missing"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps must be a number"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope parameter factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 2.0}}, "rope parameter 'mscale' of type yarn"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "no rope type"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": None, "rope_scaling": {"type": "stretched"}}, "no rope type 'stretched'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling differ in 'type'"),
        ({"rope_theta": 0, "rope_parameters": {"rope_type": "llama3"}}, "rope_theta must be above 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope parameter factor is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 2 items"),
        ({"is_causal": False}, "is_causal is False"),
    ],
)
def test_configs_are_refused_by_name(config, match, folder):
    refused(folder("llama3", **config), match)


HYBRIDS = [
    ("nemotron_h", {"mlp_hidden_act": "silu"}, {}, "no activation 'silu'"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, {}, "mamba_hidden_act is 'gelu'"),
    ("nemotron_h", {"hybrid_override_pattern": "M-*"}, {}, "expected a list or a string with item 3"),
    ("nemotron_h", {"hybrid_override_pattern": "M-**"}, {}, "'blk.3.attn_q.weight"),
    ("nemotron_h", {"hybrid_override_pattern": "ME*M"}, {}, "'moe_intermediate_size' is required"),
    ("nemotron_h", {"hybrid_override_pattern": 4}, {}, "'hybrid_override_pattern' in the config is 4"),
    ("nemotron_h", {"ssm_state_size": 8}, {}, "'blk.0.ssm_.*' has the shape"),
    ("nemotron_h", {"intermediate_size": 95}, {}, "'blk.1.ffn_.*' has the shape"),
    ("nemotron_h", {"num_key_value_heads": 1}, {}, "'blk.2.attn_k.weight' has the shape"),
    ("nemotron_h", {"layer_norm_epsilon": "absent"}, {}, "layer_norm_epsilon is missing"),
    ("nemotron_h", {"num_hidden_layers": 1 << 40}, {}, "num_hidden_layers must be a positive integer"),
    ("nemotron_h", {}, {"mixer.A_log": None}, "llama.cpp needs 'blk.0.ssm_a'"),
    ("nemotron_h", {}, {"mixer.D": (4,)}, "'blk.0.ssm_d' has the shape .4, 1."),
    ("nemotron_h", {}, {"mixer.conv1d.weight": (192, 1, 3)}, "'blk.0.ssm_conv1d.weight' has the shape"),
    ("nemotron_h", {}, {"mixer.extra": (2,)}, "nemotron_h has no such tensor"),
    ("nemotron_h_moe", {"n_shared_experts": 2}, {}, "n_shared_experts is 2"),
    ("nemotron_h_moe", {"hybrid_override_pattern": "M-*"}, {}, "llama.cpp needs .blk.1.ffn_up.weight"),
    ("nemotron_h_moe", {"moe_latent_size": 16}, {}, "blk.1.ffn_latent_down.weight"),
    ("nemotron_h_mtp", {"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers is 2"),
    ("nemotron_h_mtp", {"num_nextn_predict_layers": 0}, {}, "nemotron_h_moe has no tensor 'blk.3."),
    ("lfm2", {"conv_bias": True}, {}, "conv_bias is True"),
    ("lfm2", {"layer_types": ["conv", "sliding_attention"]}, {}, "llama.cpp has only full_attention and conv"),
    ("lfm2", {"layer_types": ["conv"]}, {}, "layer_types must be a list of 2 items"),
    ("lfm2", {"layer_types": "absent"}, {}, "llama.cpp needs 'blk.1.shortconv.conv.weight'"),
    ("lfm2", {"block_multiple_of": 64}, {}, "'blk.0.ffn_.*' has the shape"),
    ("lfm2", {"block_multiple_of": 0}, {}, "division by zero"),
    ("lfm2", {"conv_L_cache": 4}, {}, "'blk.0.shortconv.conv.weight' has the shape"),
    ("lfm2", {}, {"conv.in_proj.weight": None}, "llama.cpp needs 'blk.0.shortconv.in_proj.weight'"),
    ("lfm2_moe", {"routed_scaling_factor": 2.0}, {}, "routed_scaling_factor is 2.0"),
    ("lfm2_moe", {"use_expert_bias": False}, {}, "use_expert_bias is False"),
    ("lfm2_moe", {"num_dense_layers": 2}, {}, "tensors are missing|has no tensor"),
    ("lfm2_moe", {"num_experts": 3}, {}, "needs 3 experts"),
    ("granite_hybrid", {"position_embedding_type": "rope"}, {}, "position_embedding_type is 'rope'"),
    ("granite_hybrid", {"mamba_expand": 4}, {}, "mamba_expand is 4"),
    ("granite_hybrid", {"shared_intermediate_size": 90}, {}, "'blk.0.ffn_.*' has the shape"),
    ("granite_hybrid", {"shared_intermediate_size": 900}, {}, "rows or columns, from which"),
    ("granite_hybrid", {"layer_types": ["mamba", "mamba"]}, {}, "llama.cpp needs 'blk.1.ssm_in.weight'"),
    ("granite_hybrid_moe", {"num_local_experts": 5}, {}, "'blk.0.ffn_.*' has the shape"),
    ("granite_hybrid_moe", {}, {"shared_mlp.output_linear.weight": None}, "needs 'blk.0.ffn_down_shexp.weight'"),
    ("falcon_h1", {"tie_word_embeddings": True}, {}, "tie_word_embeddings is True"),
    ("falcon_h1", {"mlp_multipliers": [1.5]}, {}, "mlp_multipliers.1 must be a number, got None"),
    ("falcon_h1", {"key_multiplier": "1"}, {}, "key_multiplier must be a number"),
    ("falcon_h1", {"key_multiplier": 0.0}, {}, "key_multiplier is 0.0"),
    ("falcon_h1", {"mamba_d_head": "auto"}, {}, "'mamba_d_head' in config.json is 'auto', expected an integer"),
    ("falcon_h1", {"mamba_d_ssm": 80}, {}, "'blk.0.ssm_.*' has the shape"),
    ("falcon_h1", {}, {"feed_forward.up_proj.bias": (96,)}, "has no such tensor"),
    ("mamba", {"expand": 4}, {}, "expand is 4"),
    ("mamba", {"use_bias": True}, {}, "use_bias is True"),
    ("mamba", {"time_step_rank": 3}, {}, "'blk.0.ssm_.*' has the shape"),
    ("mamba", {}, {"mixer.conv1d.bias": None}, "llama.cpp needs 'blk.0.ssm_conv1d.bias'"),
    ("mamba2", {"head_dim": 0}, {}, "division by zero"),
    ("mamba2", {"n_groups": 3}, {}, "cannot be .3, 42."),
    ("mamba2", {"n_groups": "absent"}, {}, "n_groups is missing"),
    ("falcon_h1_norm", {"mamba_norm_before_gate": True}, {}, "'model.layers.0.mamba.norm.weight': .* no such tensor"),
    ("granite_hybrid_dense", {"position_embedding_type": "nope"}, {}, "position_embedding_type is 'nope'"),
]


def test_square_experts_that_may_be_transposed_are_refused(folder):
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    inner = {**MODELS["qwen3_vl_moe"]["config"]["text_config"], "moe_intermediate_size": 32}
    source = folder("qwen3_vl_moe", text_config=inner, tensors={name: np.ones((4, 64, 64), np.float32)})
    refused(source, f"'{name}' .* does not show whether it is transposed")


@pytest.mark.parametrize(("name", "config", "tensors", "match"), HYBRIDS)
def test_hybrid_models_are_refused_by_name(name, config, tensors, match, folder):
    own = next(tensor for tensor in MODELS[name]["tensors"] if ".layers.0." in tensor).partition(".layers.0.")[0]
    full = {f"{own}.layers.0.{tensor}": shape and np.zeros(shape, np.float32) for tensor, shape in tensors.items()}
    refused(folder(name, tensors=full, **config), match)


def test_layers_with_windows_are_not_listed_before_they_are_counted(folder):
    refused(folder("gpt_oss", num_hidden_layers=4_294_967_295, layer_types="absent"), "block_count must be 0 to 10000")


@pytest.mark.parametrize("shape", [(), (64,), (1 << 40, 0)])
def test_rows_of_the_embedding_are_counted_before_tokens_are_listed(shape, folder):
    tensors = {"model.embed_tokens.weight": np.zeros(shape, np.float32)}
    refused(folder("llama3", tensors=tensors), "'model.embed_tokens.weight' has the shape .*, expected 2 axes")


def test_experts_are_not_listed_before_they_are_counted(folder):
    tensors = {"model.layers.0.mlp.experts.down_proj": np.zeros((1 << 40, 0, 4), np.float32)}
    refused(folder("gpt_oss", tensors=tensors), "has no such tensor")


def test_no_more_experts_are_used_than_there_are(folder):
    refused(folder("mixtral", num_experts_per_tok=5), "5 of 4 experts are used")


def test_a_separate_head_must_be_there(folder):
    refused(folder("llama2", tensors={"lm_head.weight": None}), "'lm_head.weight' is missing")


def test_further_tensors_are_refused(folder):
    extra = {"model.layers.0.self_attn.new.weight": np.zeros((2, 2), np.float32)}
    refused(
        folder("llama3", tensors=extra), "'model.layers.0.self_attn.new.weight': llama.cpp's llama has no such tensor"
    )


def test_the_gate_of_shared_experts_has_a_single_row(folder):
    tensors = {"model.layers.0.mlp.shared_expert_gate.weight": np.zeros((2, 64), np.float32)}
    refused(folder("qwen2_moe", tensors=tensors), "must have the shape .1, 64., got .2, 64.")


MTP = [name for name in MODELS["qwen3_5"]["tensors"] if name.startswith("mtp.")]


@pytest.mark.parametrize(
    ("name", "config", "tensors", "match"),
    [
        ("qwen3_5", {"linear_value_head_dim": 8}, {}, "linear_key_head_dim and linear_value_head_dim differ"),
        ("qwen3_5", {"linear_num_key_heads": 4}, {}, "A_log' has 6 rows or columns, which cannot be divided as .4, 1"),
        ("qwen3_5", {"linear_num_key_heads": 0}, {}, "A_log' has 6 rows or columns, which cannot be divided as .0, 6"),
        ("qwen3_5", {"linear_num_value_heads": "absent"}, {}, "linear_num_value_heads is missing"),
        ("qwen3_5", {"linear_conv_kernel_dim": 3}, {}, "conv1d.weight' .160, 1, 4. cannot be"),
        ("qwen3_5_moe", {"head_dim": 31}, {}, "llama.cpp needs an mrope_section of 3 .* at most head_dim"),
        (
            "qwen3_5",
            {"attention_bias": True},
            {},
            "attention_bias is True, but llama.cpp computes qwen35 as with False",
        ),
        ("qwen3_5", {"attn_output_gate": False}, {}, "attn_output_gate is False"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, {}, "layer_types must be a list of 4 items"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, {}, "missing: llama.cpp needs 'blk.3.attn_qkv.weight'"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, {}, "only full_attention and linear_attention here"),
        ("qwen3_5", {"rope_parameters": {"mrope_section": [2, 0, 2]}}, {}, "llama.cpp needs an mrope_section of 3 "),
        ("qwen3_5", {"rope_parameters": {"mrope_section": 4}}, {}, "'rope.mrope_section' in the config is 4"),
        ("qwen3_5", {"rope_parameters": {"partial_rotary_factor": "x"}}, {}, "'rope.partial_rotary_factor' in the"),
        ("qwen3_5", {}, {"mtp.fc.weight": None}, "missing: llama.cpp needs 'blk.4.nextn.eh_proj.weight'"),
        ("qwen3_5", {}, {name: None for name in MTP if ".layers." in name}, "no tensor 'blk.4.nextn.eh_proj.weight'"),
        ("qwen3_5", {}, {"mtp.embed_tokens.weight": np.zeros((2, 2), np.float32)}, "qwen35 has no such tensor"),
        (
            "qwen3_5",
            {},
            {"model.layers.0.linear_attn.A_log": np.zeros(5, np.float32)},
            "has 5 rows or columns, which cannot be",
        ),
        ("qwen3_5", {}, {"model.layers.4.mlp.up_proj.weight": np.zeros(5, np.float32)}, "are both 'model.layers.4"),
        ("qwen3_next", {"norm_topk_prob": False}, {}, "norm_topk_prob is False"),
        ("qwen3_next", {"mlp_only_layers": [1]}, {}, "mlp_only_layers is .1."),
        ("qwen3_next", {"linear_num_value_heads": 5}, {}, "'blk.0.ssm_a' has the shape .6., but .* need .5."),
    ],
)
def test_gated_delta_nets_are_refused_by_name(name, config, tensors, match, folder):
    refused(folder(name, tensors=tensors, **config), match)


@pytest.mark.parametrize("added", [{}, {"mtp_num_hidden_layers": 0}, {"mtp_num_hidden_layers": "absent"}])
def test_layers_for_multi_token_prediction_are_counted_by_their_tensors(added, folder, tmp_path):
    safeload.convert(folder("qwen3_5", tensors=dict.fromkeys(MTP), **added), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["qwen35.block_count"] == 4
        assert "qwen35.nextn_predict_layers" not in file.metadata
        assert file.metadata["qwen35.attention.recurrent_layers"].tolist() == [True, True, True, False]


def test_linear_attention_follows_from_the_interval(folder, tmp_path):
    safeload.convert(folder("qwen3_5", layer_types=None), tmp_path / "x.gguf", dtype="float32")
    own, reference = llama_models.described(tmp_path / "x.gguf"), MODELS["qwen3_5"]["reference"]
    assert own == reference
    assert safeload.check(tmp_path / "x.gguf").errors == []


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_model_of_images_is_written(name, tmp_path, caplog):
    model = MODELS[name]
    kind = model["config"]["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    inner = {key: value for key, value in model["config"].items() if key != "architectures"}
    config = {"architectures": [kind], "model_type": name, "text_config": inner, "vision_config": {"depth": 1}}
    tensors = {"model.visual.blocks.0.attn.qkv.weight": np.ones((3, 3), np.float32)}
    for text, array in llama_models.tensors_of(model).items():
        tensors[text.replace("model.", "model.language_model.")] = array
    source = llama_models.write_folder(tmp_path / "x" / name, {**model, "config": config}, tensors)
    safeload.convert(source, tmp_path / "x.gguf", dtype="float32")
    assert "left out (language model only): 'model.visual.blocks.0" in caplog.text
    assert llama_models.described(tmp_path / "x.gguf") == model["reference"]
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", dtype="bfloat16")
    back, before = safeload.load(tmp_path / "back"), llama_models.tensors_of(model)
    assert {key: array.tobytes() for key, array in back.items()} == {k: x.tobytes() for k, x in before.items()}
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == model["config"]


def test_experts_of_layers_are_all_fused_or_none(folder):
    block = "model.layers.1.mlp.experts."
    experts = {f"{block}{name}": None for name in ("gate_up_proj", "down_proj")}
    for k, name, shape in product(range(3), ("gate", "up", "down"), [(48, 64)]):
        experts[f"{block}{k}.{name}_proj.weight"] = np.zeros(shape if name != "down" else shape[::-1], np.float32)
    refused(folder("qwen3_5_moe", tensors=experts), "some layers have fused experts and some do not")


def test_integers_are_refused(folder):
    tensors = {"model.norm.weight": np.zeros(64, np.int32)}
    refused(folder("llama3", tensors=tensors), "is int32, expected floating-point numbers")


def test_other_layers_with_windows_are_refused(folder):
    kinds = ["full_attention"] * 2
    refused(folder("gemma2", layer_types=kinds), "layer_types: llama.cpp uses full attention in every layer number 2")


@pytest.mark.parametrize(
    ("name", "key", "usual"),
    [
        ("deepseek_v3", "num_experts_per_tok", 8),
        ("gpt2", "layer_norm_epsilon", 1e-05),
        ("gpt_neox", "layer_norm_eps", 1e-05),
        ("granite", "rms_norm_eps", 1e-06),
        ("lfm2", "conv_L_cache", 3),
        ("lfm2", "rope_parameters", {"rope_theta": 1000000.0, "rope_type": "default"}),
        ("lfm2_moe", "norm_eps", 1e-05),
        ("mistral3", "rope_parameters", {"rope_theta": 10000.0, "rope_type": "default"}),
        ("olmo2", "rms_norm_eps", 1e-05),
        ("olmo3", "sliding_window", 4096),
        ("qwen2_5_vl", "rms_norm_eps", 1e-05),
        ("qwen3_5", "linear_conv_kernel_dim", 4),
        ("qwen3_next", "num_key_value_heads", 2),
        ("qwen3_vl", "rms_norm_eps", 1e-06),
    ],
)
def test_what_a_config_lacks_is_that_of_transformers(name, key, usual, tmp_path):
    model = MODELS[name]
    inner = model["config"].get("text_config")
    files = []
    for label, change in (("stated", {key: usual}), ("lacking", {})):
        values = {**{k: v for k, v in (inner or model["config"]).items() if k != key}, **change}
        config = {**model["config"], "text_config": values} if inner else values
        sizes = {"num_experts_per_tok": {"n_routed_experts": 8}}.get(key, {})
        source = llama_models.write_folder(tmp_path / label / name, {**model, "config": {**config, **sizes}})
        safeload.convert(source, tmp_path / f"{label}.gguf")
        files.append(llama_models.described(tmp_path / f"{label}.gguf"))
    assert files[0] == files[1]


def test_layers_with_a_window_in_olmo_3_have_the_base_of_the_others(folder, tmp_path):
    rope = MODELS["olmo3"]["config"]["rope_parameters"]["full_attention"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    source = folder("olmo3", rope_parameters="absent", rope_theta=500000, rope_scaling=scaling)
    safeload.convert(source, tmp_path / "x.gguf", dtype="float32")
    assert llama_models.described(tmp_path / "x.gguf")["metadata"] == MODELS["olmo3"]["reference"]["metadata"]


def test_gemma_3_can_have_a_head_of_its_own(folder, tmp_path):
    head = np.ones((453, 64), np.float32)
    source = folder("gemma3", tie_word_embeddings=False, tensors={"lm_head.weight": head})
    safeload.convert(source, tmp_path / "x.gguf")
    assert (safeload.load(tmp_path / "x.gguf")["output.weight"] == head).all()
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    assert (safeload.load(tmp_path / "back")["lm_head.weight"] == head).all()
    refused(folder("gemma2", tie_word_embeddings=False, tensors={"lm_head.weight": head}), "no separate head")


@pytest.mark.parametrize("name", ["gemma", "mistral3"])
def test_further_tensors_of_families_without_a_schema_are_refused(name, folder):
    source = folder(name, tensors={"model.layers.0.new.weight": np.zeros(2, np.float32)})
    refused(source, "'model.layers.0.new.weight': llama.cpp's .* has no such tensor")


def test_layers_with_linear_attention_follow_from_their_distance(folder, tmp_path):
    safeload.convert(folder("qwen3_next", layer_types="absent", full_attention_interval=2), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["qwen3next.attention.recurrent_layers"].tolist() == [True, False]


def test_another_scale_of_attention_is_refused(folder):
    refused(folder("gemma3", query_pre_attn_scalar=100), "query_pre_attn_scalar is 100, but llama.cpp uses 24")


def test_the_scale_of_attention_that_transformers_assumes_is_compared(folder):
    refused(folder("gemma3", query_pre_attn_scalar="absent"), "query_pre_attn_scalar is 256, but llama.cpp uses 24")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"layer_types": [*KINDS[:2], "chunked", KINDS[1]]}, "layer_types: llama.cpp's gemma4 has no 'chunked'"),
        ({"num_kv_shared_layers": 1}, "gemma4 needs a layer with a sliding window and one without it before those"),
        ({"num_kv_shared_layers": 3}, "gemma4 needs a layer with a sliding window"),
        ({"num_kv_shared_layers": 4}, "layer_types. in the config is .*, expected a list or a string with item -1"),
        ({"num_kv_shared_layers": 0}, "tensors are missing: llama.cpp needs 'blk.2.attn_k.weight'"),
        ({"per_layer_config": {"1": {"head_dim": 24}}}, "has the shape .*, but the sizes of the model need"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 1}}}, "per_layer_config: .*gemma4 has no 'rms_norm_eps' by layer"),
        ({"per_layer_config": {"1": 3}}, "per_layer_config must map layers to objects"),
        ({"per_layer_config": [3]}, "per_layer_config must map layers to objects"),
        ({"hidden_size_per_layer_input": 0}, "llama.cpp's gemma4 has no tensor 'per_layer_token_embd.weight'"),
        ({"use_double_wide_mlp": False}, "'blk.2.ffn_.*' has the shape|blk.2.ffn_.* has the shape"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": "absent"}, "llama.cpp has no rope type 'default' for gemma4"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
         "partial_rotary_factor must be 0 to 1, got 2"),
    ],
)  # fmt: skip
def test_configs_of_gemma_4_are_refused_by_name(config, match, folder):
    refused(folder("gemma4", **config), match)


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("cohere", {"use_qk_norm": True}, "needs norms of queries and keys .* exactly if there are 64 layers or more"),
        ("cohere", {"attention_bias": True}, "attention_bias is True"),
        ("cohere", {"rope_scaling": {"rope_type": "default", "factor": 1.0}}, "differ in 'factor'"),
        ("cohere", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "no rope.rope_type 'linear'"),
        ("cohere2", {"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "full attention in every layer number 4"),
        ("cohere2", {"head_dim": 8}, "has the shape .*, but the sizes of the model need"),
        ("cohere2", {"logit_scale": "1"}, "logit_scale must be a number"),
    ],
)
def test_configs_of_cohere_are_refused_by_name(name, config, match, folder):
    refused(folder(name, **config), match)


@pytest.mark.parametrize("key", ["attention.head_count_kv", "feed_forward_length", "attention.sliding_window_pattern"])
@pytest.mark.parametrize("value", [np.float32(2), np.arange(2, dtype=np.int32), np.ones(4, np.float32), "x"])
def test_check_reports_sizes_of_layers_that_are_not_a_number_for_each(key, value, folder, tmp_path):
    safeload.convert(folder("gemma4"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        gguf.save_file(file.load(), tmp_path / "wrong.gguf", {**file.metadata, f"gemma4.{key}": value})
    report = safeload.check(tmp_path / "wrong.gguf")
    assert report.errors


def test_kinds_of_heads_stand_in_two_forms_of_a_config(folder, tmp_path):
    """Published models name the heads of layers without a window, and transformers saves each layer's."""
    by_layer = MODELS["gemma4_moe"]["config"]
    published = {"per_layer_config": "absent", "global_head_dim": 32, "num_global_key_value_heads": 1}
    assert "global_head_dim" not in by_layer
    safeload.convert(folder("gemma4_moe", **published), tmp_path / "x.gguf", dtype="float32")
    described = llama_models.described(tmp_path / "x.gguf")
    assert described == {key: MODELS["gemma4_moe"]["reference"][key] for key in described}


def test_an_output_without_soft_capping_stays_so(folder, tmp_path):
    """Without the key llama.cpp takes 30."""
    safeload.convert(folder("gemma4", final_logit_softcapping=None), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["gemma4.final_logit_softcapping"] == 0


def test_tokens_that_are_not_to_be_generated_are_listed(folder, tmp_path):
    files = {"generation_config.json": '{"suppress_tokens": [5, 6]}'}
    safeload.convert(folder("gemma4_unified", files=files), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["tokenizer.ggml.suppress_tokens"].tolist() == [5, 6]


@pytest.mark.parametrize("tokens", ["[-1]", "3", '["a"]'])
def test_tokens_that_are_not_to_be_generated_are_ids(tokens, folder):
    files = {"generation_config.json": f'{{"suppress_tokens": {tokens}}}'}
    refused(folder("gemma4_unified", files=files), "suppress_tokens must be a list of ids")


def test_rows_beyond_the_vocabulary_of_gemma_3_are_cut(folder, tmp_path):
    name = "model.embed_tokens.weight"
    usual = llama_models.tensors_of(MODELS["gemma3"])[name]
    safeload.convert(folder("gemma3", tensors={name: np.concatenate([usual, usual[:7]])}), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file["token_embd.weight"].tobytes() == usual.tobytes()
        assert len(file.metadata["tokenizer.ggml.tokens"]) == len(usual)


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers is .1, 1, 0, 1., unlike in smollm3"),
        (
            "smollm3",
            {"no_rope_layers": [1, 1]},
            "no_rope_layers. in the config is .1, 1., expected an integer, or a list",
        ),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 3},
            "no_rope_layer_interval is 3, unlike in smollm3",
        ),
        ("smollm3", {"num_hidden_layers": 1 << 40}, "num_hidden_layers must be a positive integer"),
        ("granite", {"head_dim": 32}, "head_dim is 32, unlike in granite"),
        ("granite", {"attention_multiplier": "1"}, "attention_multiplier must be a number"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling must be a number"),
        ("olmo3", {"sliding_window": None}, "sliding_window is missing"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must be a list of 4 items"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 5e5}}},
            "has the rope_theta 500000.0 in layers with a sliding window too",
        ),
        ("exaone4", {"sliding_window": 16}, "sliding_window is 16, unlike in exaone4"),
        ("ernie4_5", {"use_bias": True}, "use_bias is True"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index is 1, unlike in ernie4_5-moe"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2, unlike in ernie4_5-moe"),
        ("ernie4_5_moe", {"moe_num_experts": "absent"}, "moe_num_experts is missing"),
        ("hunyuan_v1_dense", {"max_position_embeddings": 4096}, "max_position_embeddings is 4096, unlike in hunyuan"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic"}}, "rope parameter alpha is missing"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 5.0}},
            "rope_theta is 5.0, but llama.cpp stretches 10000.0",
        ),
        ("glm4", {"head_dim": 32}, "head_dim is 32, unlike in glm4"),
        ("arcee", {"hidden_act": "silu"}, "no activation 'silu' for arcee"),
        ("olmo", {"attention_bias": True}, "attention_bias is True"),
        ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("mellum", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types is .*, unlike in mellum"),
        ("mellum", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ("granitemoeshared", {"shared_intermediate_size": 64}, "ffn_up_shexp.weight' has the shape .96, 64."),
    ],
)
def test_settings_that_llama_cpp_assumes_otherwise_are_refused(name, config, match, folder):
    refused(folder(name, **config), match)


def test_windows_that_llama_cpp_ignores_are_a_warning(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "safeload"):
        safeload.convert(folder("mistral", sliding_window=64), tmp_path / "x.gguf")
    assert "llama has no sliding windows in llama.cpp" in caplog.text


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_dynamic_scaling_of_rotations_counts_only_beyond_the_context(name, folder, tmp_path, caplog):
    """As in InternLM3: transformers changes no rotation of a text that fits, and llama.cpp has no other rotations."""
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    safeload.convert(folder(name, rope_parameters=rope), tmp_path / "plain.gguf")
    shutil.rmtree(tmp_path / name)
    older = {"type": "dynamic", "factor": 6.0}
    source = folder(name, rope_parameters=None, rope_theta=50000.0, rope_scaling=older)
    safeload.convert(source, tmp_path / "dynamic.gguf")
    files = [llama_models.described(tmp_path / f"{file}.gguf") for file in ("plain", "dynamic")]
    assert files[0] == files[1]
    assert "texts longer than 512 tokens give other results than transformers" in caplog.text
    assert "llama.cpp has no dynamic scaling of rotations" in caplog.text
    safeload.convert(tmp_path / "dynamic.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"] == older


def test_a_note_that_a_model_was_trained_with_yarn_changes_nothing(folder, tmp_path):
    """``finetuned``, as in Yarn-Mistral-7b-128k."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for name, more in (("plain", {}), ("noted", {"finetuned": True})):
        source = folder("mistral", rope_parameters=None, rope_theta=10000.0, rope_scaling={**scaling, **more})
        safeload.convert(source, tmp_path / f"{name}.gguf")
        shutil.rmtree(source)
    assert llama_models.described(tmp_path / "plain.gguf") == llama_models.described(tmp_path / "noted.gguf")


def test_rows_without_a_token_are_padding(folder, tmp_path):
    safeload.convert(folder("qwen2"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    rows = MODELS["qwen2"]["tensors"]["model.embed_tokens.weight"][0]
    assert len(tokens) == len(types) == rows
    assert tokens[-1] == f"[PAD{rows - 1}]"
    assert types[-1] == 5


def test_the_layer_for_multi_token_prediction_follows_the_layers_of_exaone(folder, tmp_path, caplog):
    safeload.convert(folder("exaone4"), tmp_path / "text.gguf")
    model = MODELS["exaone4"]
    tensors = llama_models.tensors_of(model)
    whole = {name.replace("model.", "model.language_model."): array for name, array in tensors.items()}
    first = "model.layers.0."
    whole |= {f"mtp.layers.0.{name[len(first) :]}": x for name, x in tensors.items() if name.startswith(first)}
    vectors = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    whole |= {f"{name}.weight": np.ones(64, np.float32) for name in vectors}
    whole |= {"mtp.fc.weight": np.ones((64, 128), np.float32), "model.visual.x.weight": np.ones(2, np.float32)}
    config = {
        "architectures": ["Exaone4_5_ForConditionalGeneration"],
        "text_config": {**model["config"], "architectures": None, "num_nextn_predict_layers": 1},
    }
    source = llama_models.write_folder(tmp_path / "whole", {**model, "config": config}, whole)
    safeload.convert(source, tmp_path / "whole.gguf")
    assert "left out (language model only): 'model.visual.x.weight'" in caplog.text
    text, own = (llama_models.described(tmp_path / f"{name}.gguf") for name in ("text", "whole"))
    assert own["tensors"].items() >= text["tensors"].items()
    more = own["tensors"].keys() - text["tensors"].keys()
    assert {name for name in more if ".nextn." not in name} == {
        name.replace(".0.", ".2.") for name in text["tensors"] if ".0." in name
    }
    assert own["metadata"]["exaone4.block_count"] == ["u32", 3]
    assert own["metadata"]["exaone4.nextn_predict_layers"] == ["u32", 1]
    refused(
        llama_models.write_folder(
            tmp_path / "text",
            {**model, "config": {**config, "text_config": {**config["text_config"], "num_nextn_predict_layers": 2}}},
            whole,
        ),
        "num_nextn_predict_layers is 2",
    )


# ---- models for embeddings ----

POOLING = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ({"pooling_mode_mean_tokens": True}, 1),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, 2),
        ({"pooling_mode_lasttoken": True}, 3),
        ({"pooling_mode": "lasttoken"}, 3),
    ],
)
def test_the_pooling_of_embeddings_is_written(content, number, folder, tmp_path, caplog):
    source = folder("qwen3")
    (source / "modules.json").write_text(json.dumps(POOLING))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps(content))
    safeload.convert(source, tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["qwen3.pooling_type"] == number
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    assert "not recovered: modules.json, the pooling of embeddings" in caplog.text


@pytest.mark.parametrize(
    ("modules", "content", "match"),
    [
        ("{", {}, "modules.json: invalid JSON"),
        (json.dumps([{"type": "Pooling", "path": "../x"}]), {}, "modules.json: invalid path '../x'"),
        (
            json.dumps(POOLING),
            {"pooling_mode_max_tokens": True},
            "no such pooling, expected one of mean, cls, lasttoken",
        ),
    ],
)
def test_other_pooling_is_refused(modules, content, match, folder):
    source = folder("qwen3", files={"modules.json": modules})
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps(content))
    refused(source, match)


def test_names_without_a_prefix_are_of_a_model_without_a_head(folder, tmp_path):
    tensors = llama_models.tensors_of(MODELS["qwen3"])
    bare = {name.removeprefix("model."): array for name, array in tensors.items() if name != "lm_head.weight"}
    source = folder("qwen3", tensors={**dict.fromkeys(tensors), **bare})
    safeload.convert(source, tmp_path / "x.gguf")
    assert "output.weight" not in safeload.load(tmp_path / "x.gguf")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    assert safeload.load(tmp_path / "back").keys() == bare.keys()


# ---- tokenizers ----


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (None, "tokenizer.json does not exist, but llama.cpp needs it"),
        ({"byte_fallback": False}, "has no bytes for unknown characters"),
        ({"type": "Unigram"}, "a model of type 'Unigram'"),
        ({"merges": [["a"]]}, "invalid merge"),
        ({"vocab": {"a": -1}}, "token 'a' has the id -1"),
        ({"vocab": {"a": 453}}, "token 'a' has the id 453, but the embedding has 453 rows"),
    ],
)
def test_a_tokenizer_of_gemma_4_that_llama_cpp_does_not_have(change, match, folder):
    content = tokenizer("gemma4")
    content["model"].update(change or {})
    refused(folder("gemma4", files={"tokenizer.json": change and json.dumps(content)}), match)


def tokenizer(name):
    return json.loads((llama_models.DATA / name / "tokenizer.json").read_text(encoding="utf-8"))


def changed(name="llama3", **fields):
    content = tokenizer(name)
    for key, value in fields.items():
        outer, _, inner = key.partition("__")
        if inner:
            content[outer][inner] = value
        else:
            content[outer] = value
    return {"tokenizer.json": json.dumps(content)}


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"tokenizer.json": None}, "neither tokenizer.model nor tokenizer.json exists"),
        ({"tokenizer.json": "{"}, "tokenizer.json is not JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json must be a JSON object"),
        (changed(model={"type": "WordPiece"}), "a model of type 'WordPiece'"),
        (changed(model=None), "a model of type None"),
        (changed(decoder=None), "a decoder of type None"),
        (changed(normalizer={"type": "Lowercase"}), "a normalizer 'Lowercase'"),
        (changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}), "pre-tokenizer"),
        (changed(model__vocab={"a": 1, "b": 1}), "two tokens of model.vocab have the same id"),
        (changed(model__vocab={"a": -1}), "token 'a' has the id -1"),
        (changed(model__vocab={}), "model.vocab must be an object"),
        (changed(model__merges=[["a"]]), "invalid merge|refuses it"),
        (changed(model__merges=3), "refuses it|model.merges must be a list"),
        (changed(model__vocab={"a": 4000}), "token 'a' has the id 4000, but the embedding has 405 rows"),
        (changed(added_tokens=[{"id": 4000, "content": "x"}]), "has the id 4000|refuses it"),
        (changed(added_tokens=[{"id": "1"}]), "invalid added token|refuses it"),
        (changed(added_tokens=3), "added_tokens must be a list|refuses it"),
        (changed(model__dropout=0.1), "has the dropout 0.1, which llama.cpp does not have"),
        (changed(model__continuing_subword_prefix="x"), "has the continuing_subword_prefix 'x'"),
        (changed(model__end_of_word_suffix="</w>"), "has the end_of_word_suffix '</w>'"),
        (changed(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "", "type_id": 0}}],
                                 "pair": [], "special_tokens": {}}), "refuses it"),
        (changed(post_processor={"type": "Bert"}), "refuses it|a post-processor"),
        ({"tokenizer.model": "not a model"}, "not a model of SentencePiece"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": {}}}', "tokenizer.json": None,
          "tokenizer.model": "\n\x03\n\x01a"}, "is of type unigram"),
        ({"tokenizer_config.json": '{"chat_template": [1]}'}, "invalid chat_template"),
        ({"generation_config.json": '{"top_p": NaN}'}, "top_p must be a number, got nan"),
    ],
)  # fmt: skip
def test_tokenizers_are_refused_by_name(files, match, folder):
    refused(folder("llama3", files=files), match)


def test_scores_of_pieces_are_finite(folder):
    source = folder("llama2")
    piece = b"\x0a\x01a\x15" + np.float32(np.nan).tobytes()
    (source / "tokenizer.model").write_bytes(b"\x0a" + bytes([len(piece)]) + piece)
    refused(source, "a piece has the score nan")


def varint(number):
    """A number in protocol buffers."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (lambda wrap: b"\x0a" + varint(3 + wrap) + b"\x0a\x01a", "a number is cut off or too long"),
        (lambda wrap: b"\x0a" + varint(2 + len(varint(1 + wrap))) + b"\x0a" + varint(1 + wrap) + b"a", "too long"),
        (lambda wrap: b"\x0a" + varint(4 + len(varint(1 + wrap))) + b"\x0a\x01a\x18" + varint(1 + wrap), "too long"),
        (lambda wrap: varint(10 + wrap) + b"\x03\x0a\x01a", "too long"),
    ],
    ids=["piece", "text", "type", "key"],
)
def test_numbers_of_tokenizer_models_have_64_bits(folder, content, match):
    """A longer number is not cut, as the length or the type of another piece."""
    source = folder("llama2")
    (source / "tokenizer.model").write_bytes(content(0))
    refused(source, "is of type unigram")
    (source / "tokenizer.model").write_bytes(content(1 << 64))
    refused(source, match)


def test_merges_form_no_endless_tokens(folder):
    """Looking for the parts of a token takes time that grows with the square of its length."""
    long = "a" * 100_000
    model = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, long: 1, long + "a": 2}, "merges": [[long, "a"]]}
    content = {"model": model, "decoder": {"type": "Sequence"}, "added_tokens": []}
    files = {"tokenizer.model": None, "tokenizer.json": json.dumps(content)}
    refused(folder("llama2", files=files), "token 2 has 100,001 characters")


def test_an_unknown_hash_falls_back_to_the_expression(folder, tmp_path):
    source = folder("llama3")
    for ignored, name in ((True, "llama-bpe"), (False, "smaug-bpe")):
        (source / "tokenizer.json").write_text(changed(model__ignore_merges=ignored)["tokenizer.json"])
        safeload.convert(source, tmp_path / "x.gguf", overwrite=True)
        with safeload.open(tmp_path / "x.gguf") as file:
            assert file.metadata["tokenizer.ggml.pre"] == name


def test_families_say_which_tokens_end_texts_and_turns(folder, tmp_path):
    ends = {"generation_config.json": json.dumps({"eos_token_id": [401, 400]})}
    safeload.convert(folder("hunyuan_v1_dense", files=ends), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["tokenizer.ggml.eos_token_id"] == 400
        assert file.metadata["tokenizer.ggml.eot_token_id"] == 401
    settings = (llama_models.DATA / "pieces" / "tokenizer_config.json").read_text(encoding="utf-8")
    files = {"tokenizer_config.json": settings.replace("<|im_start|>", "<|im_end|>")}
    source = folder("llama2", files=files, architectures=["InternLM3ForCausalLM"], eos_token_id=2)
    safeload.convert(source, tmp_path / "x.gguf", overwrite=True)
    with safeload.open(tmp_path / "x.gguf") as file:
        number = file.metadata["tokenizer.ggml.eos_token_id"]
        assert file.metadata["tokenizer.ggml.tokens"][number] == "<|im_end|>"


def test_tokens_that_a_family_needs_are_in_its_tokenizer(folder):
    content = tokenizer("glm")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|user|>"]
    refused(folder("glm4", files={"tokenizer.json": json.dumps(content)}), r"no '<\|user\|>', which glm4 needs")


# ---- sources, options ----


def test_a_sharded_source_and_a_single_file_give_the_same_bytes(folder, tmp_path):
    source = folder("qwen2")
    safeload.convert(source, tmp_path / "a.gguf")
    safeload.convert(source, tmp_path / "shards", max_shard_size="40KB")
    (tmp_path / "shards" / "config.json").write_text(json.dumps(MODELS["qwen2"]["config"]))
    (tmp_path / "shards").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "shards")
    safeload.convert(tmp_path / "shards", tmp_path / "b.gguf", metadata={"general.name": "Qwen2"})
    a, b = (llama_models.described(tmp_path / f"{name}.gguf") for name in "ab")
    assert a["tensors"] == b["tensors"]
    assert a["metadata"] == b["metadata"]


def test_quantized_sources_are_dequantized(folder, tmp_path):
    source = folder("llama3")
    safeload.convert(source, tmp_path / "int8", quantize="int8")
    safeload.convert(tmp_path / "int8", tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file, safeload.open(tmp_path / "int8") as quantized:
        name = "model.layers.0.mlp.up_proj.weight"
        expected = quantized.load([name], dtype="bfloat16")[name]
        assert np.array_equal(file["blk.0.ffn_up.weight"], expected)
        assert file["blk.0.ffn_up.weight"].dtype == ml_dtypes.bfloat16


def test_quantize_names_blocks_of_llama_cpp(folder, tmp_path):
    report = safeload.convert(folder("qwen3"), tmp_path / "x.gguf", quantize={"*ffn_up*": "q8_0", "*": None})
    assert set(report.summary.quantized) == {f"blk.{k}.ffn_up.weight" for k in range(2)}


def test_patterns_can_match_names_of_the_source(folder, tmp_path):
    source = folder("qwen3")
    both = {"*.down_proj.*": "q8_0", "*attn_q.*": "q4_0", "*": None}
    report = safeload.convert(source, tmp_path / "x.gguf", quantize=both, keep="*layers.1.mlp.down_proj.weight")
    assert report.summary.quantized == {
        "blk.0.ffn_down.weight": "q8_0",
        "blk.0.attn_q.weight": "q4_0",
        "blk.1.attn_q.weight": "q4_0",
    }
    refused(source, "matches none of", quantize={"*.no_proj.*": "q8_0"})


@pytest.mark.parametrize("name", ["llama2", "mixtral", "gemma3", "gpt_oss"])
def test_a_mixture_gives_the_bytes_of_two_steps(name, folder, tmp_path):
    source = folder(name)
    safeload.convert(source, tmp_path / "one.gguf", quantize="q4_k_m")
    safeload.convert(source, tmp_path / "plain.gguf")
    safeload.convert(tmp_path / "plain.gguf", tmp_path / "two.gguf", quantize="q4_k_m")
    one, two = (llama_models.described(tmp_path / f"{step}.gguf") for step in ("one", "two"))
    assert one == two
    assert one["metadata"]["general.file_type"] == ["u32", 15]


def test_a_tied_head_stays_tied(folder, tmp_path):
    safeload.convert(folder("gemma2"), tmp_path / "x.gguf", quantize="q8_0")
    assert "output.weight" not in safeload.load(tmp_path / "x.gguf")


def test_other_dtypes_are_refused(folder):
    source = folder("llama3")
    for dtype in ("float64", "float8_e4m3fn"):
        refused(source, "llama.cpp does not compute with", dtype=dtype)


def test_an_existing_file_is_not_replaced(folder, tmp_path):
    source = folder("qwen2")
    (tmp_path / "x.gguf").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        safeload.convert(source, tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == b"mine"
    safeload.convert(source, tmp_path / "x.gguf", overwrite=True)
    first = (tmp_path / "x.gguf").read_bytes()
    safeload.convert(source, tmp_path / "x.gguf", overwrite=True)
    assert (tmp_path / "x.gguf").read_bytes() == first


WRAPPED = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "compiled layers": lambda name: name.replace("self_attn.", "_orig_mod.self_attn."),
    "activation checkpointing": lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "FSDP": lambda name: "_fsdp_wrapped_module." + name.replace(".mlp.", "._fsdp_wrapped_module.mlp."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_of_modules_are_left_out(wrapper, folder, tmp_path):
    source = folder("llama3")
    safeload.convert(source, tmp_path / "plain.gguf")
    (file,) = source.glob("*.safetensors")
    save_file({WRAPPED[wrapper](name): x.copy() for name, x in safeload.load(file).items()}, file)
    safeload.convert(source, tmp_path / "wrapped.gguf")
    plain, wrapped = (llama_models.described(tmp_path / f"{name}.gguf") for name in ("plain", "wrapped"))
    assert dict(wrapped["tensors"]) == dict(plain["tensors"])
    assert wrapped["metadata"] == plain["metadata"]
    report = safeload.check(source)
    assert [finding.code for finding in (*report.errors, *report.warnings)] == ["schema.prefix"]
    assert report.compared == len(safeload.open(source))


def test_names_that_differ_in_wrappers_only_are_refused(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    wrapped = "model.layers.0._orig_mod.mlp.up_proj.weight"
    source = folder("llama3", tensors={wrapped: llama_models.tensors_of(MODELS["llama3"])[name]})
    refused(source, f"'{name}' and '{wrapped}' have one name without their wrappers|'{wrapped}' and '{name}' have one")
    assert "schema.names" in [finding.code for finding in safeload.check(source).errors]


@pytest.mark.parametrize(
    ("name", "key", "match"),
    [
        ("deepseek_v2", "qk_nope_head_dim", "cannot be taken"),
        ("gemma4", "intermediate_size", "must be at most 2147483647"),
        ("lfm2", "num_key_value_heads", "must be at most 2147483647"),
    ],
)
def test_sizes_of_31_bits_are_refused_before_memory_is_taken(name, key, match, folder):
    refused(folder(name, **{key: 1 << 31}), match)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_large_matrices_of_gpt2_are_transposed(dtype, folder, tmp_path):
    """From 8 MiB on, and in memory that earlier matrices have used, values are stored past the cache."""
    model, width = MODELS["gpt2"], 731  # no multiple of a cache line
    entry = {**model, "config": {**model["config"], "n_embd": width, "n_head": 1}}
    sizes = {64: width, 192: 3 * width, 256: 4 * width}
    values = np.random.default_rng(0).integers(-1000, 1000, 4 * width * width).astype(np.float32).astype(dtype)
    tensors = {
        name: values[-int(np.prod(wide)) :].reshape(wide)
        for name, shape in model["tensors"].items()
        for wide in [[sizes.get(side, side) for side in shape]]
    }
    safeload.convert(llama_models.write_folder(tmp_path / "wide", entry, tensors), tmp_path / "x.gguf", dtype="float32")
    with safeload.open(tmp_path / "x.gguf") as file:
        for layer in range(2):
            for name, own in {"ffn_up": "c_fc", "ffn_down": "c_proj"}.items():
                expected = tensors[f"transformer.h.{layer}.mlp.{own}.weight"].T
                assert np.array_equal(file[f"blk.{layer}.{name}.weight"], expected.astype(np.float32))
