"""Models of text and images for llama.cpp: the language model alone, whatever the version that wrote the model."""

import json
import logging

import numpy as np
import pytest
from builders import llama_models

import safeload
from safeload import gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("tokenizers")

ALL = llama_models.listed()
MODELS = {name: model for name, model in ALL.items() if name not in llama_models.plain()}
# Models with a language model of a class of its own.
WITH_CLASS = {
    "llava": "llama",
    "mistral3": "mistral",
    "ministral3_images": "ministral3",
    "llama4_images": "llama4_text",
    "gemma3_vision": "gemma3_text",
    "gemma4_vision": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
}
# Models whose language model has no class with a head: the family that computes texts alike.
ALIKE = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


def write(folder, name, *, config=None, rename=None, without=""):
    """Write a model with another config and other names, without tensors with a prefix."""
    tensors = llama_models.tensors_of(MODELS[name])
    tensors = {key: array for key, array in tensors.items() if not (without and key.startswith(without))}
    if rename is not None:
        tensors = {rename(key): array for key, array in tensors.items()}
    model = {**MODELS[name], "config": MODELS[name]["config"] if config is None else config}
    return llama_models.write_folder(folder / name, model, tensors)


def converted(source, path):
    safeload.convert(source, path)
    return llama_models.described(path)


def flat(config):
    """The config as transformers 4 wrote it: the keys of the language model beside ``vision_config``."""
    rope = dict(config["text_config"]["rope_parameters"])
    theta = rope.pop("rope_theta")
    outer = {key: value for key, value in config.items() if key != "text_config"}
    text = {key: value for key, value in config["text_config"].items() if key not in ("rope_parameters", "model_type")}
    return {**text, **outer, "rope_theta": theta, "rope_scaling": {**rope, "type": "mrope", "rope_type": "default"}}


@pytest.mark.parametrize("name", MODELS)
def test_towers_are_left_out_with_a_line(name, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "safeload"):
        safeload.convert(write(tmp_path, name), tmp_path / "x.gguf")
    (line,) = caplog.messages
    assert "left out (language model only): " in line
    assert any(part in line for part in ("visual.", "multi_modal_projector.", "vision"))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("qwen2")])
def test_a_flat_config_gives_the_bytes_of_a_nested_one(name, tmp_path):
    nested = write(tmp_path / "nested", name)
    older = write(tmp_path / "flat", name, config=flat(MODELS[name]["config"]))
    assert converted(nested, tmp_path / "nested.gguf") == converted(older, tmp_path / "flat.gguf")
    for end in ("nested", "flat"):
        with safeload.open(tmp_path / f"{end}.gguf") as file:
            metadata = {key: value for key, value in file.metadata.items() if key != "safeload.source.config"}
            gguf.save_file(file.load(), tmp_path / f"{end}-bare.gguf", metadata)
    assert (tmp_path / "nested-bare.gguf").read_bytes() == (tmp_path / "flat-bare.gguf").read_bytes()


# Prefixes of the language model, of its head and of the rest, as versions of transformers write them.
SPELLINGS = {
    "llava": [("language_model.model.", "language_model.", ""), ("model.language_model.", "", "model.")],
    "mistral3": [("language_model.model.", "language_model.", ""), ("model.language_model.", "", "model.")],
    "llama4_images": [("language_model.model.", "language_model.", "")],
    "qwen2_vl": [("model.", "", ""), ("model.language_model.", "", "model.")],
    "qwen2_5_vl": [("model.", "", ""), ("model.language_model.", "", "model.")],
    "qwen3_vl": [("model.language_model.", "", "model.")],
}


@pytest.mark.parametrize(
    ("name", "spelling"), [(name, each) for name, several in SPELLINGS.items() for each in several]
)
def test_old_and_new_names_give_the_same_file(name, spelling, tmp_path):
    model, head, rest = spelling

    def rename(key):
        tower = "visual." in key or "vision_" in key or "projector." in key
        bare = key.replace("language_model.", "").removeprefix("model.")
        return f"{rest if tower else head if bare.startswith('lm_head') else model}{bare}"

    # The values of the fixtures follow from names, so both files are made of the same tensors.
    source = write(tmp_path / "a", name, rename=rename)
    assert converted(source, tmp_path / "a.gguf") == converted(write(tmp_path / "b", name), tmp_path / "b.gguf")


def test_experts_are_read_as_published_and_as_transformers_saves_them(tmp_path):
    source = write(tmp_path / "a", "qwen3_vl_moe")
    tensors = safeload.load(source)
    saved = {key: x.swapaxes(1, 2).copy() if ".mlp.experts." in key else x for key, x in tensors.items()}
    other = llama_models.write_folder(tmp_path / "b" / "qwen3_vl_moe", MODELS["qwen3_vl_moe"], saved)
    assert converted(source, tmp_path / "a.gguf") == converted(other, tmp_path / "b.gguf")


def test_a_nested_config_can_lack_what_its_class_has_by_default(tmp_path):
    """The config of LLaVA 1.5 7B has no sizes of its language model."""
    text = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
            "rms_norm_eps": 1e-05, "vocab_size": 32064}  # fmt: skip
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    source = write(tmp_path, "llava", config=config)
    with pytest.raises(safeload.FormatError, match=r"k_proj.weight' .32, 64. does not have 32 heads"):
        safeload.convert(source, tmp_path / "x.gguf")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 453}
    del text["max_position_embeddings"]
    (source / "config.json").write_text(json.dumps({**config, "text_config": {**text, **sizes}}))
    safeload.convert(source, tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        assert file.metadata["llama.context_length"] == 2048


def test_the_type_of_the_language_model_chooses_the_family(tmp_path):
    """Without a class of the language model, its type does."""
    for kind, architecture in (("llama", "llama"), ("mistral", "llama"), ("unknown", "llama")):
        config = json.loads(json.dumps(MODELS["llava"]["config"]))
        config["text_config"]["model_type"] = kind
        config["text_config"].pop("architectures", None)
        safeload.convert(write(tmp_path / kind, "llava", config=config), tmp_path / "x.gguf", overwrite=True)
        with safeload.open(tmp_path / "x.gguf") as file:
            assert file.metadata["general.architecture"] == architecture
    config["text_config"]["model_type"] = "gemma2"
    with pytest.raises(safeload.SafeloadError, match="activation 'silu' for gemma2"):
        safeload.convert(write(tmp_path / "gemma2", "llava", config=config), tmp_path / "y.gguf")


def test_a_language_model_in_llm_config(tmp_path):
    """As InternVLChatModel has it."""
    model = ALL["qwen2"]
    config = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": model["config"],
              "vision_config": {"model_type": "intern_vit_6b"}}  # fmt: skip
    tensors = llama_models.tensors_of(model)
    plain = llama_models.write_folder(tmp_path / "a" / "qwen2", model)
    tensors = {f"language_model.{key}": x for key, x in tensors.items()}
    towers = ("vision_model.encoder.layers.0.attn.qkv.weight", "mlp1.1.weight")
    tensors |= {key: np.zeros((2, 2), np.float32) for key in towers}
    wrapped = llama_models.write_folder(tmp_path / "b" / "qwen2", {**model, "config": config}, tensors)
    assert converted(wrapped, tmp_path / "b.gguf") == converted(plain, tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("qwen2_vl", {"rope_parameters": {"rope_theta": 1e6}}, "rope.mrope_section is missing"),
        ("qwen2_vl", {"rope_parameters": {"mrope_section": [1] * 5}}, "mrope_section must be of type array of numbers"),
        ("qwen2_vl", {"rope_parameters": {"mrope_section": [2, 3, 3], "new": 1}}, "rope parameter 'new'"),
        ("qwen2_5_vl", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
         None),
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_vl_moe", {"num_experts_per_tok": 5}, "5 of 4 experts are used"),
        ("qwen3_vl_moe", {"moe_intermediate_size": 30}, "ffn_down_exps.weight' has the shape"),
        ("ministral3_images", {"rope_parameters": {"mscale": 1.0}}, "llama_4_scaling_beta is missing"),
        ("llama4_images", {"attention_chunk_size": 64}, "attention_chunk_size is 64"),
        ("llama4_images", {"no_rope_layers": [1, 1, 1, 1]}, r"no_rope_layers is \[1, 1, 1, 1\]"),
        ("llama4_images", {"layer_types": ["full_attention"] * 4}, "uses full attention in every layer number 4"),
        ("llama4_images", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("llama4_images", {"attn_temperature_tuning": False}, "attn_temperature_tuning is False"),
        ("llama4_images", {"interleave_moe_layer_step": 2}, "llama.cpp needs 'blk.0.ffn_gate.weight'"),
    ],
)  # fmt: skip
def test_settings_are_refused_by_name(name, text, match, tmp_path, caplog):
    config = json.loads(json.dumps(MODELS[name]["config"]))
    config["text_config"] |= text
    source = write(tmp_path, name, config=config)
    if match is None:  # llama.cpp ignores windows
        safeload.convert(source, tmp_path / "x.gguf")
        assert "no sliding windows in llama.cpp" in caplog.text
        return
    with pytest.raises(safeload.SafeloadError, match=match):
        safeload.convert(source, tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("rope", "match"), [({"mscale": 2.0}, "rope.mscale is 2.0"), ({"mscale": None}, "rope.mscale")]
)
def test_a_scale_that_llama_cpp_does_not_read_is_refused(rope, match, tmp_path):
    config = json.loads(json.dumps(MODELS["ministral3_images"]["config"]))
    config["text_config"]["rope_parameters"] |= rope
    with pytest.raises(safeload.SafeloadError, match=match):
        safeload.convert(write(tmp_path, "ministral3_images", config=config), tmp_path / "x.gguf")


def test_the_whole_model_says_whether_the_head_is_tied(tmp_path):
    """The class of transformers for text alone ties the head, and the model of text and images does not."""
    config = MODELS["qwen3_vl_moe"]["config"]
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, True)
    source = write(tmp_path, "qwen3_vl_moe", without="lm_head.")
    with pytest.raises(safeload.FormatError, match=r"'lm_head.weight' is missing, and tie_word_embeddings is not true"):
        safeload.convert(source, tmp_path / "x.gguf")


def test_a_missing_tensor_of_the_language_model_is_refused(tmp_path):
    source = write(tmp_path, "qwen3_vl", without="model.language_model.layers.1.self_attn.q_norm")
    with pytest.raises(safeload.FormatError, match=r"llama.cpp needs 'blk.1.attn_q_norm.weight'"):
        safeload.convert(source, tmp_path / "x.gguf")


# ---- the way back ----


@pytest.mark.parametrize("name", WITH_CLASS)
def test_the_way_back_is_the_language_model(name, tmp_path):
    source = write(tmp_path, name)
    safeload.convert(source, tmp_path / "x.gguf")
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back/", dtype="bfloat16")
    before, after = safeload.load(source), safeload.load(tmp_path / "back")
    names = {key: key.replace("language_model.", "") for key in before if "language_model." in key or "lm_head" in key}
    assert after.keys() == {*names.values()}
    assert all(after[new].tobytes() == before[old].tobytes() for old, new in names.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == WITH_CLASS[name]
    assert config["architectures"][0].endswith("ForCausalLM")
    assert config["num_hidden_layers"] == MODELS[name]["config"]["text_config"]["num_hidden_layers"]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ALIKE)
def test_a_language_model_without_a_class_becomes_one_that_computes_alike(name, own, tmp_path, caplog):
    config = flat(MODELS[name]["config"]) if name == "qwen2_vl" else None
    first = converted(write(tmp_path, name, config=config), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        metadata = {key: value for key, value in file.metadata.items() if own or not key.startswith("safeload.")}
        gguf.save_file(file.load(), tmp_path / "y.gguf", metadata)
    caplog.clear()
    safeload.convert(tmp_path / "y.gguf", tmp_path / "back/")
    made = json.loads((tmp_path / "back" / "config.json").read_text())
    assert made["model_type"] == ALIKE[name]
    assert f"the folder has the language model, {made['architectures'][0]}" in caplog.text
    rope = made.get("rope_parameters", made.get("rope_scaling"))
    assert {*rope} <= {"rope_type", "type", "rope_theta"}
    assert rope.get("type", "default") == "default"
    assert "vision_config" not in made
    assert made["tie_word_embeddings"] is ("lm_head.weight" not in safeload.load(tmp_path / "back"))
    again = converted(tmp_path / "back", tmp_path / "again.gguf")
    assert again["tensors"] == first["tensors"]


def test_a_language_model_of_an_unknown_type_has_no_way_back(tmp_path):
    config = json.loads(json.dumps(MODELS["mistral3"]["config"]))
    config["text_config"]["model_type"] = "unknown"
    safeload.convert(write(tmp_path, "mistral3", config=config), tmp_path / "x.gguf")
    with pytest.raises(safeload.UnsupportedError, match="Mistral3ForConditionalGeneration, which has no class of its"):
        safeload.convert(tmp_path / "x.gguf", tmp_path / "back/")


def test_a_foreign_file_becomes_a_class_with_the_same_computation(tmp_path):
    safeload.convert(write(tmp_path, "mistral3"), tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as file:
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith("safeload.")}
        gguf.save_file(file.load(), tmp_path / "y.gguf", metadata)
    safeload.convert(tmp_path / "y.gguf", tmp_path / "back/")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
