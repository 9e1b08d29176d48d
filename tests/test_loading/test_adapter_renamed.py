"""Adapters name modules as transformers 5 holds them in memory; files have other names, and other divisions."""

import json

import numpy as np
import pytest
from builders.adapters import assert_merged, assert_same, pair, write
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

Q = "layers.0.self_attn.q_proj"
OLD, NEW = f"language_model.model.{Q}", f"model.language_model.{Q}"
OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"


def base_of(folder, shapes, model_type, architecture, **config):
    folder.mkdir()
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", durable=False)
    text = json.dumps({"model_type": model_type, "architectures": [architecture], **config})
    (folder / "config.json").write_text(text)
    return folder, weights


# The type, class and stored name of a base, and the name in memory.
ROWS = [
    ("qwen2_vl", "Qwen2VLForConditionalGeneration", f"model.{Q}", NEW),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", f"model.{Q}", NEW),
    ("qwen2_5_omni_thinker", OMNI, f"thinker.model.{Q}", NEW),
    ("gemma3", "Gemma3ForConditionalGeneration", OLD, NEW),
    ("gemma3", "Gemma3ForConditionalGeneration", OLD, f"model.{Q}"),  # trained as Gemma3ForCausalLM
    ("gemma3", "Gemma3ForConditionalGeneration", NEW, OLD),  # trained with transformers 4
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", NEW, f"model.{Q}"),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", f"model.{Q}", NEW),
    ("paligemma", "PaliGemmaForConditionalGeneration", OLD, NEW),
    ("internvl", "InternVLForConditionalGeneration", OLD, NEW),
    ("qwen2_audio", "Qwen2AudioForConditionalGeneration", f"audio_tower.{Q}", f"model.audio_tower.{Q}"),
    ("nemotron_h", "NemotronHForCausalLM", "backbone.layers.0.mixer.q_proj", "model.layers.0.mixer.q_proj"),
    (
        "vit",
        "ViTForImageClassification",
        "vit.encoder.layer.0.attention.attention.query",
        "vit.layers.0.attention.q_proj",
    ),
    ("vit", "ViTModel", "encoder.layer.0.attention.attention.query", "layers.0.attention.q_proj"),
    (
        "dinov2",
        "Dinov2ForImageClassification",
        "dinov2.encoder.layer.0.attention.attention.query",
        "dinov2.encoder.layer.0.attention.q_proj",
    ),
    (
        "segformer",
        "SegformerForSemanticSegmentation",
        "segformer.encoder.block.1.0.attention.self.query",
        "segformer.stages.1.blocks.0.attention.q_proj",
    ),
    # classes without a head, and the other way
    ("gpt2", "GPT2LMHeadModel", "h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),
    ("bert", "BertModel", "bert.encoder.layer.0.output.dense", "encoder.layer.0.output.dense"),
    # the second name of the file is the first name in memory
    (
        "kimi_k25",
        "KimiK25ForConditionalGeneration",
        "vision_tower.encoder.blocks.3.mlp.fc0",
        "model.vision_tower.layers.3.mlp.fc1",
    ),
]


@pytest.mark.parametrize(
    ("model_type", "architecture", "stored", "module"), ROWS, ids=[f"{k} {row[0]}" for k, row in enumerate(ROWS)]
)
def test_names_in_memory(model_type, architecture, stored, module, tmp_path):
    shapes = {f"{stored}.weight": (6, 5), f"{stored.replace('fc0', 'fc1')}.weight": (6, 5), "x.weight": (6, 5)}
    base, before = base_of(tmp_path / "base", shapes, model_type, architecture)
    adapter = write(tmp_path / "lora", pair(module=module))
    a, b = pair().values()
    merged = safeload.load(base, adapters=adapter)
    before[f"{stored}.weight"] += 2 * (b @ a)
    for name, value in before.items():
        assert_merged(merged[name], value, 3)
    safeload.convert(base, tmp_path / "out", adapters=adapter)
    assert_same(safeload.load(tmp_path / "out"), merged)


NOMIC = ("nomic_bert", "NomicBertForMaskedLM")
QKV, LAYER = "encoder.layers.0.attn.Wqkv", "nomic_bert.layers.0.self_attn"


@pytest.mark.parametrize("kind", ["q", "k and v", "dora", "saved", "bfloat16"])
def test_rows_of_a_stored_tensor(kind, tmp_path):
    """NomicBERT's file holds the rows of three modules in one tensor: rows without a change keep their bytes."""
    base, before = base_of(tmp_path / "base", {f"{QKV}.weight": (18, 5), f"{QKV}.bias": (18,)}, *NOMIC)
    if kind == "bfloat16":
        safeload.convert(base, tmp_path / "narrow", dtype="bfloat16")
        base, before = tmp_path / "narrow", safeload.load(tmp_path / "narrow", dtype="float32")
    weight = before[f"{QKV}.weight"].copy()
    q, k, v = np.split(weight, 3)
    a, b = pair().values()
    parts, config = pair(module=f"{LAYER}.q_proj"), {}
    if kind == "k and v":
        parts = {**pair(module=f"{LAYER}.k_proj"), **pair(module=f"{LAYER}.v_proj", seed=1)}
        v += 2 * np.matmul(*[*pair(seed=1).values()][::-1])
        k += 2 * (b @ a)
    elif kind == "saved":
        parts = {
            f"{LAYER}.v_proj.weight": np.full((6, 5), 3, np.float32),
            f"{LAYER}.v_proj.bias": np.zeros(6, np.float32),
        }
        config, v[:] = {"modules_to_save": ["v_proj"]}, 3
    else:
        q += 2 * (b @ a)
    if kind == "dora":
        parts[f"{LAYER}.q_proj.lora_magnitude_vector"] = np.arange(1, 7, dtype=np.float32)
        config = {"use_dora": True}
        q *= (np.arange(1, 7) / np.linalg.norm(q, axis=1)).astype(np.float32)[:, None]
    adapter = write(tmp_path / "lora", parts, **config)
    merged = safeload.load(base, adapters=adapter)
    found = merged[f"{QKV}.weight"].astype(np.float32)
    if kind == "bfloat16":
        np.testing.assert_allclose(found, weight, rtol=2**-8)
    else:
        assert_merged(found, weight, 8)
    same = np.all(weight == before[f"{QKV}.weight"], axis=1)
    assert np.array_equal(found[same], before[f"{QKV}.weight"][same])
    assert np.array_equal(merged[f"{QKV}.bias"][12:] == 0, np.full(6, kind == "saved"))
    plan = safeload.plan_convert(base, tmp_path / "out", adapters=adapter, max_shard_size=200)
    pieces = json.loads(json.dumps(plan))["pieces"]
    safeload.finalize(plan, [safeload.run_piece(piece) for piece in pieces])
    assert_same(safeload.load(tmp_path / "out"), merged)


def test_adapters_of_parts_and_of_the_whole_tensor(tmp_path):
    base, _ = base_of(tmp_path / "base", {f"{QKV}.weight": (18, 5)}, *NOMIC)
    part = write(tmp_path / "part", pair(module=f"{LAYER}.q_proj"))
    whole = write(tmp_path / "whole", pair(18, module=QKV))
    safeload.load(base, adapters=whole)
    with pytest.raises(safeload.UnsupportedError, match="as a whole by one adapter and in parts by another"):
        safeload.load(base, adapters=[part, whole])


def test_a_layer_of_the_model_that_files_hold_in_two(tmp_path):
    stem = "language_model.model.layers.0.mlp"
    shapes = {f"{stem}.{name}.weight": (6, 5) for name in ("gate_proj", "up_proj")}
    base, before = base_of(tmp_path / "base", shapes, "minimax_m3_vl", "MiniMaxM3VLForConditionalGeneration")
    module = "model.language_model.layers.0.mlp.gate_up_proj"
    merged = safeload.load(base, adapters=write(tmp_path / "lora", pair(12, module=module)))
    a, b = pair(12).values()
    for (name, value), change in zip(before.items(), np.split(2 * (b @ a), 2), strict=True):
        assert_merged(merged[name], value + change, 3)


@pytest.mark.parametrize(
    ("model", "shapes", "module", "words"),
    [
        # rows that transformers puts into another order
        (
            ("kimi_k25", "KimiK25ForConditionalGeneration"),
            {"vision_tower.encoder.blocks.0.wqkv.weight": (18, 5)},
            "model.vision_tower.layers.0.attn.q_proj",
            ["wqkv.weight", "in a way that is not supported"],
        ),
        (NOMIC, {f"{QKV}.weight": (17, 5)}, f"{LAYER}.q_proj", ["does not consist of 3 equal parts"]),
        # two tensors of the file for one of the model
        (
            ("gemma3", "Gemma3ForConditionalGeneration"),
            {f"{OLD}.weight": (6, 5), f"{NEW}.weight": (6, 5)},
            NEW,
            ["more than one tensor is"],
        ),
        (
            ("mine", "Mine"),
            {f"model.{Q}.weight": (6, 5), f"model.language_model.{Q}.weight": (6, 5)},
            Q,
            ["does not have"],
        ),
        (("vit", "ViTModel"), {"a" * 1001 + ".weight": (6, 5)}, "b" * 1001, ["does not have"]),
    ],
    ids=["another order", "unequal", "twice", "unclear", "long"],
)
def test_what_has_no_place_is_refused_by_name(model, shapes, module, words, tmp_path):
    base, _ = base_of(tmp_path / "base", shapes, *model)
    adapter = write(tmp_path / "lora", pair(module=module))
    with pytest.raises(safeload.SafeloadError) as caught:
        safeload.load(base, adapters=adapter)
    assert all(word in str(caught.value) for word in [module[:30], *words]), caught.value


@pytest.mark.parametrize("turned", [False, True])
def test_experts_without_a_gate_have_the_order_of_nemotron_h(turned, tmp_path):
    """Shapes do not tell up_proj from down_proj; PEFT's order does, and older versions of PEFT exchange in and out."""
    stem, module = "backbone.layers.0.mixer.experts", "model.layers.0.mixer.experts"
    shapes = {
        f"{stem}.{k}.{name}.weight": shape
        for k in (0, 1)
        for name, shape in (("up_proj", (6, 5)), ("down_proj", (5, 6)))
    }
    base, before = base_of(tmp_path / "base", shapes, "nemotron_h", "NemotronHForCausalLM")
    sizes = [(5, 6), (6, 5)] if not turned else [(6, 5), (5, 6)]
    parts = {**pair(*sizes[0], rank=4, module=module), **pair(*sizes[1], rank=4, module=f"{module}.base_layer", seed=1)}
    adapter = write(tmp_path / "lora", parts, target_parameters=["experts.down_proj", "experts.up_proj"])
    merged = safeload.load(base, adapters=adapter)
    for seed, name, (rows, columns) in ((0, "down_proj", sizes[0]), (1, "up_proj", sizes[1])):
        a, b = pair(rows, columns, rank=4, seed=seed).values()
        change = 2 * np.einsum("ore,eri->eoi", b.reshape(rows, 2, 2), a.reshape(2, 2, columns))
        for k, matrix in enumerate(change.swapaxes(1, 2) if turned else change):
            assert_merged(merged[f"{stem}.{k}.{name}.weight"], before[f"{stem}.{k}.{name}.weight"] + matrix, 4)


def test_a_saved_stack_that_files_hold_transposed_is_refused(tmp_path):
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    base, _ = base_of(tmp_path / "base", {name: (3, 5, 5)}, "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration")
    adapter = write(tmp_path / "lora", {name: np.zeros((3, 5, 5), np.float32)}, modules_to_save=["experts"])
    with pytest.raises(safeload.UnsupportedError, match="stores transposed"):
        safeload.load(base, adapters=adapter)


def test_a_nested_config_chooses_the_rules_of_its_model(tmp_path):
    """LLaVA with another vision model than CLIP, and with experts in its language model."""
    tower = "encoder.layers.0.mlp.fc1.weight"
    stored = {f"vision_tower.vision_model.{tower}": (6, 5)}
    for kind, module in (("siglip_vision_model", "model.vision_tower"), ("mine", "model.vision_tower.vision_model")):
        folder = tmp_path / kind
        config = {"vision_config": {"model_type": kind}}
        base, before = base_of(folder, stored, "llava", "LlavaForConditionalGeneration", **config)
        lora = write(tmp_path / f"{kind}-lora", pair(module=f"{module}.{tower.removesuffix('.weight')}"))
        ((name, value),) = safeload.load(base, adapters=lora).items()
        assert not np.array_equal(value, before[name])


def test_a_tied_head_inside_a_model_of_models(tmp_path):
    """The embedding is changed alone, so the head keeps the base's."""
    stem = "language_model.model.embed_tokens"
    text = {"model_type": "gemma3_text", "hidden_size": 5, "num_hidden_layers": 1, "vocab_size": 6}
    shapes = {f"{stem}.weight": (6, 5)}
    architecture = "Gemma3ForConditionalGeneration"
    base, before = base_of(
        tmp_path / "base", shapes, "gemma3", architecture, text_config=text, tie_word_embeddings=True
    )
    module = "model.language_model.embed_tokens"
    parts = {
        f"{module}.lora_embedding_A": np.ones((2, 6), np.float32),
        f"{module}.lora_embedding_B": np.ones((5, 2), np.float32),
    }
    merged = safeload.load(base, adapters=write(tmp_path / "lora", parts))
    assert_merged(merged[f"{stem}.weight"], before[f"{stem}.weight"] + 4, 3)
    assert np.array_equal(merged["language_model.lm_head.weight"], before[f"{stem}.weight"])
