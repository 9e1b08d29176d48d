"""Files of llama.cpp become folders that transformers loads: files of ours exactly, others as far as they say."""

import json
import shutil

import numpy as np
import pytest
from builders import llama_models
from builders.thorough import part_of

import safeload
from safeload import gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("tokenizers")

MODELS = llama_models.plain()
# Models of which llama.cpp stores some matrices multiplied: only a file of f32 has their values.
MULTIPLIED = ("falcon_h1",)


@pytest.fixture
def written(tmp_path):
    """A function that converts a model to GGUF and changes the file; a foreign file has no keys of ours."""

    def write(name, *, own=False, metadata=(), tensors=(), **options):
        source = llama_models.write_folder(tmp_path / name, MODELS[name])
        path = tmp_path / f"{name}.gguf"
        safeload.convert(source, path, **options)
        with safeload.open(path) as file:
            kept = {key: value for key, value in file.metadata.items() if own or not key.startswith("safeload.")}
            changed = {**{key: np.array(array) for key, array in file.load().items()}, **dict(tensors)}
        kept.update(dict(metadata))
        final = tmp_path / "model.gguf"
        gguf.save_file(
            {key: value for key, value in changed.items() if value is not None},
            final,
            {key: value for key, value in kept.items() if value is not None},
        )
        return final

    return write


def json_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_identity(name, tmp_path):
    source = llama_models.write_folder(tmp_path / name, MODELS[name])
    safeload.convert(source, tmp_path / "x.gguf", dtype="float32" if name in MULTIPLIED else None)
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    before, after = safeload.load(source), safeload.load(tmp_path / "back")
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        assert array.dtype == after[tensor].dtype, tensor
        assert array.tobytes() == after[tensor].tobytes(), tensor
    assert json_of(tmp_path / "back" / "config.json") == MODELS[name]["config"]
    if (source / "tekken.json").exists():
        assert (tmp_path / "back" / "tokenizer.json").exists()  # the form that transformers reads
        return
    assert json_of(tmp_path / "back" / "tokenizer_config.json") == json_of(source / "tokenizer_config.json")
    if (source / "tokenizer.json").exists():
        assert json_of(tmp_path / "back" / "tokenizer.json") == json_of(source / "tokenizer.json")
    else:
        assert (tmp_path / "back" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    ("name", "class_name", "model_type"),
    [("llama2", "InternLM3ForCausalLM", "internlm3"), ("llama_model", "LlamaBidirectionalModel", "llama_bidirec")],
)
def test_there_and_back_of_classes_outside_of_transformers(name, class_name, model_type, tmp_path):
    model = MODELS[name]
    config = {**model["config"], "architectures": [class_name], "model_type": model_type}
    source = llama_models.write_folder(tmp_path / name, {**model, "config": config})
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    assert json_of(tmp_path / "back" / "config.json") == config
    assert safeload.diff(source, tmp_path / "back").same


def test_every_family_goes_there_and_back():
    models = llama_models.listed().values()
    types = {
        language.get("model_type")
        for each in models
        for language in (each["config"], each["config"].get("text_config", {}))
    }
    missing = [each.name for each in safeload.families() if each.gguf and not types & {*each.model_types}]
    assert missing == ["internlm3", "llama_embed"]  # see above


@pytest.mark.parametrize("name", part_of([*MODELS], 1, 3))
def test_there_and_back_in_float32(name, tmp_path):
    """Sums and powers, which llama.cpp stores of some tensors, are rounded."""
    random = np.random.default_rng(0)
    shapes = MODELS[name]["tensors"].items()
    tensors = {tensor: random.standard_normal(shape, dtype=np.float32) for tensor, shape in shapes}
    source = llama_models.write_folder(tmp_path / name, MODELS[name], tensors)
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    after = safeload.load(tmp_path / "back")
    assert tensors.keys() == after.keys()
    for tensor, array in tensors.items():
        assert after[tensor].dtype == np.float32
        exact = name not in MULTIPLIED and "norm" not in tensor and "A_log" not in tensor
        np.testing.assert_allclose(after[tensor], array, rtol=0, atol=0 if exact else 5e-7, err_msg=tensor)


def test_dtypes_of_the_source_come_back(tmp_path):
    model = MODELS["deepseek_v3"]
    tensors = llama_models.tensors_of(model)
    name = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    tensors[name] = tensors[name].astype(np.float32) + np.float32(1e-6)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    source = llama_models.write_folder(tmp_path / "m", model, tensors)
    for dtype in (None, "float32"):
        safeload.convert(source, tmp_path / "x.gguf", dtype=dtype, overwrite=True)
        safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", overwrite=True)
        after = safeload.load(tmp_path / "back")
        assert all(after[key].dtype == x.dtype and after[key].tobytes() == x.tobytes() for key, x in tensors.items())
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", dtype="float32", overwrite=True)
    assert {x.dtype for x in safeload.load(tmp_path / "back").values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kept", ["[]", '{"*": []}', '{"*": "F8_E4M3", "blk.0.attn_norm.weight": {}}'])
def test_unknown_dtypes_of_the_source_are_ignored_or_refused(kept, written, tmp_path):
    path = written("llama3", own=True, metadata={"safeload.source.dtypes": kept})
    if kept == "[]":
        refused(path, "safeload.source.dtypes must be a JSON object")
        return
    safeload.convert(path, tmp_path / "back/")
    assert safeload.load(tmp_path / "back")["model.norm.weight"].dtype == np.float32


# Classes without state-space layers and experts compute the same, so the file has fewer keys.
OTHER_CLASS = ("granite_hybrid_dense",)


@pytest.mark.parametrize("name", part_of([name for name in MODELS if name not in OTHER_CLASS], 0, 2))
def test_a_foreign_file_becomes_the_same_file_again(name, written, tmp_path, caplog):
    dtype = "float32" if name in MULTIPLIED else "bfloat16"
    path = written(name, dtype=dtype)
    safeload.convert(path, tmp_path / "back/", dtype=dtype)
    assert "not recovered: the dtype of the weights before conversion" in caplog.text
    if "the tokenizer, whose" in caplog.text:
        shutil.copytree(llama_models.DATA / MODELS[name]["tokenizer"], tmp_path / "back", dirs_exist_ok=True)
    safeload.convert(tmp_path / "back", tmp_path / "again.gguf", dtype="float32")
    safeload.convert(
        llama_models.write_folder(tmp_path / "x" / name, MODELS[name]), tmp_path / "first.gguf", dtype="float32"
    )
    first, again = (llama_models.described(tmp_path / f"{part}.gguf") for part in ("first", "again"))
    assert first["tensors"] == again["tensors"]
    # Texts and ids are equal; scores and flags of added tokens can be stored in another way.
    for key, value in first["metadata"].items():
        if key not in ("general.name", "tokenizer.ggml.scores") and not key.startswith("tokenizer.ggml.add_"):
            assert again["metadata"].get(key) == value, key


@pytest.mark.parametrize("name", OTHER_CLASS)
def test_a_foreign_file_becomes_a_class_with_the_same_computation(name, written, tmp_path):
    safeload.convert(written(name), tmp_path / "back/", dtype="bfloat16")
    assert json_of(tmp_path / "back" / "config.json")["architectures"] == ["GraniteForCausalLM"]
    safeload.convert(tmp_path / "back", tmp_path / "again.gguf")
    assert described_tensors(tmp_path / "again.gguf") == described_tensors(tmp_path / f"{name}.gguf")


def described_tensors(path):
    return llama_models.described(path)["tensors"]


def test_blocks_are_dequantized(tmp_path):
    source = llama_models.write_folder(tmp_path / "qwen3", MODELS["qwen3"])
    safeload.convert(source, tmp_path / "x.gguf", quantize={"*ffn_up*": "q8_0", "*attn_q.*": "q8_0"})
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    name = "model.layers.0.mlp.up_proj.weight"
    with safeload.open(tmp_path / "x.gguf") as file:
        expected = file.load(["blk.0.ffn_up.weight"], dtype="bfloat16")["blk.0.ffn_up.weight"]
    assert safeload.load(tmp_path / "back")[name].tobytes() == expected.tobytes()


def test_rows_of_quantized_q_go_back(tmp_path):
    source = llama_models.write_folder(tmp_path / "llama2", MODELS["llama2"])
    safeload.convert(source, tmp_path / "x.gguf", quantize={"*attn_q.*": "q8_0"})
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", dtype="float32")
    name = "model.layers.1.self_attn.q_proj.weight"
    before, after = (safeload.load(path, [name], dtype="float32")[name] for path in (source, tmp_path / "back"))
    assert 0 < np.abs(before - after).max() < 0.01


def test_shards_and_existing_folders(tmp_path):
    source = llama_models.write_folder(tmp_path / "qwen2", MODELS["qwen2"])
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", max_shard_size="50KB")
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    before = len([*(tmp_path / "back").iterdir()])
    with pytest.raises(FileExistsError):
        safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", max_shard_size="50KB")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", max_shard_size="50KB", overwrite=True)
    assert len([*(tmp_path / "back").iterdir()]) == before
    assert safeload.load(tmp_path / "back").keys() == safeload.load(source).keys()


def test_a_tokenizer_from_before_is_a_warning(written, tmp_path, caplog):
    safeload.convert(written("llama3"), tmp_path / "back/")
    safeload.convert(written("llama2"), tmp_path / "back/", overwrite=True)
    assert (tmp_path / "back" / "tokenizer.model").exists()
    assert "'tokenizer.json' stays from before" in caplog.text
    caplog.clear()
    safeload.convert(tmp_path / "model.gguf", tmp_path / "other/")
    safeload.convert(tmp_path / "model.gguf", tmp_path / "other/", overwrite=True)
    assert "stays from before" not in caplog.text


def test_raw_keeps_the_names_of_llama_cpp(written, tmp_path):
    safeload.convert(written("llama3"), tmp_path / "back/", raw=True)
    assert "blk.0.attn_q.weight" in safeload.load(tmp_path / "back")


def test_single_files_keep_the_names_of_llama_cpp(written, tmp_path):
    safeload.convert(written("llama3"), tmp_path / "x.safetensors")
    assert "blk.0.attn_q.weight" in safeload.load(tmp_path / "x.safetensors")


def refused(path, match, error=safeload.SafeloadError, **options):
    with pytest.raises(error, match=match):
        safeload.convert(path, path.parent / "refused/", **options)
    assert not (path.parent / "refused").exists()


def test_pieces_and_parts_are_refused(written):
    path = written("llama3")
    refused(path, "written at once, without resume=", resume=True)
    refused(path, "no complete model", ValueError, only="blk.0.*")


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"general.architecture": "t5"}, "architecture 't5' cannot become"),
        ({"llama.block_count": None}, "key llama.block_count is missing"),
        ({"llama.block_count": "2"}, "key llama.block_count must be a number of at least 0 without a fraction"),
        ({"llama.block_count": np.uint32(0)}, "num_hidden_layers must be a positive integer"),
        ({"llama.block_count": np.uint32(4_000_000_000)}, "block_count must be 0 to 10000"),
        ({"llama.block_count": np.uint32(3)}, "tensors are missing: llama.cpp needs 'blk.2"),
        ({"llama.attention.head_count": np.uint32(0)}, "head_count must be a positive integer|num_attention_heads"),
        ({"llama.attention.head_count": np.uint32(5)}, "does not have 5 heads|unknown settings"),
        ({"llama.block_count": np.float32(2)}, "block_count must be a number of at least 0 without a fraction"),
        ({"llama.expert_count": np.arange(2)}, "key llama.expert_count must be a number"),
        ({"llama.rope.scaling.type": "new"}, "rope scaling of type 'new'"),
        ({"llama.rope.scaling.type": np.arange(2)}, "rope.scaling.type must be a string"),
        ({"llama.rope.freq_base": np.float32(0)}, "rope_theta must be above 0"),
        ({"llama.rope.freq_base": np.float64(1e300)}, "rope_theta must be a number, got inf"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id must be a number"),
        ({"tokenizer.ggml.bos_token_id": np.arange(2)}, "bos_token_id must be a number"),
        ({"tokenizer.ggml.bos_token_id": np.float32(np.nan)}, "bos_token_id must be a number"),
        ({"tokenizer.ggml.model": np.arange(2)}, "key tokenizer.ggml.model must be a string"),
        ({"tokenizer.ggml.pre": ["a"]}, "key tokenizer.ggml.pre must be a string"),
        ({"tokenizer.chat_template": b"\xff".decode("utf-8", "surrogateescape")}, "contains a lone surrogate"),
        ({"llama.rope.freq_base": "x"}, "rope.freq_base must be a number"),
        ({"tokenizer.ggml.tokens": None}, "tokens must be an array of strings"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "token_type must have"),
        ({"tokenizer.ggml.token_type": np.zeros(405, np.float32)}, "token_type must have 405 integers"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["a"]}, "merges must have pairs"),
        ({"safeload.source.config": "{"}, "safeload.source.config is not JSON"),
        ({"safeload.source.config": '{"architectures": ["Qwen2ForCausalLM"]}'}, "of architecture llama"),
        ({"safeload.source.config": '{"architectures": [{}]}'}, "of architecture llama"),
        ({"safeload.source.tokenizer.json": "[]"}, "must be a JSON object"),
        ({"safeload.source.tokenizer.json": '{"added_tokens": [{"id": []}], "model": {"vocab": {"a": 405}}}'},
         "token 'a' has the id 405"),
    ],
)  # fmt: skip
def test_metadata_is_refused_by_name(metadata, match, written):
    refused(written("llama3", metadata=metadata), match)


@pytest.mark.parametrize(
    ("name", "key", "value", "match"),
    [
        ("mamba", "ssm.dt_b_c_rms", True, "ssm.dt_b_c_rms is True, but MambaForCausalLM has False"),
        (
            "granite_hybrid",
            "ssm.inner_size",
            np.uint32(96),
            "inner_size is 96, but GraniteMoeHybridForCausalLM has 128",
        ),
        ("lfm2_moe", "expert_gating_func", np.uint32(1), "expert_gating_func is 1, but Lfm2MoeForCausalLM has 2"),
        ("gemma4", "attention.value_length_swa", np.uint32(8), "value_length_swa is 8, but Gemma4ForCausalLM has 24"),
        ("gemma4_moe", "attention.head_count_kv", np.int32([2, 1, 1, 1]), r"head_count_kv is \[2, 1, 1, 1\], but"),
        ("nemotron_h", "feed_forward_length", np.int32([0, 96]), "does not have|expected an integer, or a list"),
        ("nemotron_h", "feed_forward_length", np.int32([0, 96, 9, 0]), "is 3, which means no known kind of layer"),
        ("nemotron_h", "feed_forward_length", np.int32([]), "expected an integer, or a list of integers"),
    ],
)
def test_another_model_is_refused(name, key, value, match, written):
    architecture = MODELS[name]["reference"]["metadata"]["general.architecture"][1]
    refused(written(name, metadata={f"{architecture}.{key}": value}), match)


def test_biases_without_a_setting_are_refused_by_name(written):
    bias = {"blk.0.ffn_down.bias": np.ones(64, np.float32)}
    refused(written("llama3", tensors=bias), "'model.layers.0.mlp.down_proj.bias': a config of LlamaForCausalLM made")


LARGE_AND_NEGATIVE = [
    ("hunyuan_v1_dense", "hunyuan-dense.rope.freq_base", np.float32(-1), "rope.freq_base must be above 0, got -1"),
    ("hunyuan_v1_dense", "hunyuan-dense.rope.freq_base", np.float32(0), "rope.freq_base must be above 0, got 0"),
    ("mixtral", "llama.expert_count", np.uint64(2**64 - 1), "'expert_count': a value beyond 64 bits"),
    ("glm4_moe_lite", "deepseek2.expert_group_used_count", np.float64(1e300), "group_used_count must be a nu"),
    ("falcon_new", "falcon.attention.head_count", np.uint32(2**32 - 1), "'blk.0.attn_qkv.weight' .* cannot be div"),
]


@pytest.mark.parametrize(
    ("name", "key", "value", "match"), LARGE_AND_NEGATIVE, ids=[f"{row[0]}-{row[2]}" for row in LARGE_AND_NEGATIVE]
)
def test_large_and_negative_numbers_are_refused_by_name(name, key, value, match, written):
    refused(written(name, metadata={key: value}), match)


@pytest.mark.parametrize("count", [4_294_967_295, 10_001])
def test_layers_with_windows_are_not_listed_before_they_are_counted(count, written):
    refused(written("gpt_oss", metadata={"gpt-oss.block_count": np.uint32(count)}), "block_count must be 0 to 10000")


@pytest.mark.parametrize(
    ("scores", "match"),
    [
        (np.full(453, np.nan, np.float32), "score 0 is nan, expected a finite f32"),
        (np.full(453, 1e300), "score 0 is 1e[+]300, expected a finite f32"),
        (np.zeros(453, np.int32), "scores must have 453 floats"),
    ],
)
def test_scores_are_finite(scores, match, written):
    refused(written("llama2", metadata={"tokenizer.ggml.scores": scores}), match)


def test_pieces_are_utf_8(written):
    with safeload.open(written("llama2", own=True)) as file:
        tokens = [*file.metadata["tokenizer.ggml.tokens"]]
    tokens[7] = "\udcff"
    refused(written("mistral", metadata={"tokenizer.ggml.tokens": tokens}), "token '.udcff' contains a lone surrogate")


def test_scores_form_no_endless_tokens(written):
    """Looking for the parts of a token takes time and memory that grow with the square of its length."""
    with safeload.open(written("llama2", own=True)) as file:
        keys = {key: file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")}
    number = next(k for k, score in enumerate(keys["scores"]) if score < 0 and keys["token_type"][k] == 1)
    texts = ["a" * 100_000 if k == number else text for k, text in enumerate(keys["tokens"])]
    content = json.dumps({"model": {"type": "BPE"}, "decoder": {"type": "Sequence"}})
    metadata = {"tokenizer.ggml.tokens": texts, "safeload.source.tokenizer.json": content}
    refused(written("mistral", own=True, metadata=metadata), f"token {number} has 100,000 characters")


def test_ids_beyond_the_vocabulary_are_no_tokens(written, tmp_path):
    path = written("llama3", metadata={"tokenizer.ggml.eos_token_id": np.uint32(4_294_967_295)})
    safeload.convert(path, tmp_path / "back/")
    assert json_of(tmp_path / "back" / "config.json")["eos_token_id"] is None


@pytest.mark.parametrize(
    ("name", "tensors", "match"),
    [
        (
            "llama3",
            {"blk.0.new.weight": np.zeros(3, np.float32)},
            "'blk.0.new.weight': transformers has no such tensor",
        ),
        ("llama3", {"token_embd.weight": None}, "'token_embd.weight' is missing"),
        ("llama3", {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}, "factors of rotations"),
        ("qwen3_moe", {"blk.0.ffn_up_exps.weight": np.zeros((3, 3), np.float32)}, "does not hold experts"),
        ("gpt_oss", {"blk.0.ffn_up_exps.weight": None}, "is missing or differs"),
        ("gpt_oss", {"blk.0.ffn_down_exps.weight": np.float32(1)}, "does not hold experts"),
        ("gpt_oss", {"blk.0.ffn_gate_exps.weight": None}, "'blk.0.ffn_gate_exps.weight' is missing"),
        ("llama3", {"token_embd.weight": np.ones(4, np.float32)}, "has the shape .4., expected 2 axes"),
        ("llama3", {"rope_freqs.weight": np.ones(1 << 17, np.float32)}, "has 131,072 factors of rotations"),
        ("llama3", {"rope_factors_short.weight": np.ones(8, np.float32)}, "factors of rotations need unknown settings"),
        ("phi3_long", {"rope_factors_short.weight": None}, "factors of rotations need unknown settings"),
        ("stablelm_parallel", {"blk.0.attn_q_norm.weight": np.float32(1)}, "does not hold a stack"),
        ("gpt2", {"token_embd.weight": np.ones((160, 64), np.float32)}, "'token_embd.weight' has the shape .160, 64."),
        (
            "qwen3_next",
            {"blk.0.ffn_gate_inp_shexp.weight": np.ones((2, 64), np.float32)},
            "'blk.0.ffn_gate_inp_shexp.weight' must have the shape .1, 64., got .2, 64.",
        ),
        ("qwen2", {"blk.1.attn_k.bias": None}, "the config needs 'model.layers.1.self_attn.k_proj.bias'"),
    ],
)
def test_tensors_are_refused_by_name(name, tensors, match, written):
    refused(written(name, tensors=tensors), match)


def test_windows_that_llama_cpp_lacks_are_no_warning_on_the_way_back(tmp_path, caplog):
    model = MODELS["mistral"]
    source = llama_models.write_folder(tmp_path / "m", {**model, "config": {**model["config"], "sliding_window": 16}})
    safeload.convert(source, tmp_path / "x.gguf")
    assert "sliding windows" in caplog.text
    caplog.clear()
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")
    assert "sliding windows" not in caplog.text


@pytest.mark.parametrize("name", ["mistral", "llama3"])
def test_rotations_that_the_kept_config_does_not_have_are_refused(name, written):
    refused(written(name, own=True, tensors={"rope_freqs.weight": np.full(8, 2, np.float32)}), "factors of rotations")


@pytest.mark.parametrize(
    ("name", "tensor", "published"),
    [
        ("gpt2_untied", "output.weight", "lm_head.weight"),
        ("seed_oss", "output.weight", "lm_head.weight"),
        ("falcon_new", "blk.0.attn_norm_2.weight", "transformer.h.0.ln_attn.weight"),
        ("granite_hybrid", "blk.0.ssm_conv1d.bias", "model.layers.0.mamba.conv1d.bias"),
    ],
)
def test_a_tensor_that_the_config_needs_is_missing(name, tensor, published, written):
    """llama.cpp needs none of these, but transformers would take random numbers."""
    refused(written(name, own=True, tensors={tensor: None}), f"tensors are missing: the config needs '{published}'")


def test_an_unknown_tokenizer_is_left_out(written, tmp_path, caplog):
    safeload.convert(written("llama3", metadata={"tokenizer.ggml.pre": "afmoe"}), tmp_path / "back/")
    assert "the tokenizer, whose pre-tokenizer is 'afmoe'" in caplog.text
    assert not (tmp_path / "back" / "tokenizer.json").exists()
