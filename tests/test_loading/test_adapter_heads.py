"""Adapters of models whose head is tied to the embedding: a module that PEFT trains alone gets weights of its own."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from builders.adapters import assert_same, write
from builders.inside import choosing, main
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

EMBED, HEAD, OTHER = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
W, NEW, NEWER = (rng.standard_normal((12, 8), np.float32) for _ in range(3))
A, B = rng.standard_normal((2, 8), np.float32), rng.standard_normal((12, 2), np.float32)
EMBED_A, EMBED_B = rng.standard_normal((2, 12), np.float32), rng.standard_normal((8, 2), np.float32)
LORA_HEAD = {"lm_head.lora_A.weight": A, "lm_head.lora_B.weight": B}
LORA_EMBED = {"model.embed_tokens.lora_embedding_A": EMBED_A, "model.embed_tokens.lora_embedding_B": EMBED_B}
WITH_HEAD, WITH_EMBED = W + 2 * (B @ A), W + 2 * (EMBED_B @ EMBED_A).T
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}


def base_of(folder, config=LLAMA, more=(), prefix="", **tensors):
    folder.mkdir(exist_ok=True)
    weights = {prefix + EMBED: W, OTHER: np.ones(8, np.float32), **dict(more), **tensors}
    save_file(weights, folder / "model.safetensors", durable=False)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


CASES = {
    "saved embedding": ({EMBED: NEW}, {"modules_to_save": ["embed_tokens"]}, NEW, W),
    "saved head": ({HEAD: NEW}, {"modules_to_save": ["lm_head"]}, W, NEW),
    "both saved": ({EMBED: NEW, HEAD: NEWER}, {"modules_to_save": ["embed_tokens", "lm_head"]}, NEW, NEWER),
    "both saved, equal": ({EMBED: NEW, HEAD: NEW}, {"modules_to_save": ["embed_tokens", "lm_head"]}, NEW, NEW),
    "old names": ({"model.embed_tokens.modules_to_save.weight": NEW}, {}, NEW, W),
    "tied copies": (
        {EMBED: NEW, HEAD: NEW},
        {"modules_to_save": ["model.embed_tokens"], "ensure_weight_tying": True},
        NEW,
        None,
    ),
    "tied copies that differ": (
        {EMBED: NEW, HEAD: NEWER},
        {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        NEW,
        NEWER,
    ),
    "LoRA of the head": (LORA_HEAD, {}, W, WITH_HEAD),
    "LoRA of the embedding": (LORA_EMBED, {}, WITH_EMBED, W),
    "LoRA of both": (LORA_HEAD | LORA_EMBED, {"ensure_weight_tying": True}, WITH_EMBED, WITH_HEAD),
    "LoRA of the embedding, saved head": (
        LORA_EMBED | {HEAD: NEW},
        {"modules_to_save": ["lm_head"]},
        WITH_EMBED,
        NEW,
    ),
    "new weights below LoRA": (
        LORA_HEAD | {"lm_head.base_layer.weight": NEW, "model.embed_tokens.base_layer.weight": NEW},
        {"ensure_weight_tying": True},
        NEW,
        NEW + WITH_HEAD - W,
    ),
    "new weights below LoRA of one": (
        LORA_HEAD | {"lm_head.base_layer.weight": NEW},
        {},
        NEW,
        NEW + WITH_HEAD - W,
    ),
    "new weights of both": ({EMBED: NEW, HEAD: NEW}, {}, NEW, None),
    "new weights of the embedding": ({EMBED: NEW}, {}, NEW, None),
    "new weights of the head": ({HEAD: NEW}, {}, NEW, None),
    "a parameter": (LORA_HEAD, {"target_parameters": ["lm_head.weight"]}, W, WITH_HEAD),
    "neither": ({OTHER: np.zeros(8, np.float32)}, {}, W, None),
}


@pytest.mark.parametrize("case", CASES)
def test_as_the_trained_model_computes(case, tmp_path):
    """Loaded, converted at once and in pieces: the weights, and what the config says of them."""
    tensors, config, embedding, head = CASES[case]
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", tensors, **config)
    merged = safeload.load(base, adapters=adapter)
    np.testing.assert_allclose(merged[EMBED], embedding, rtol=0, atol=1e-5)
    assert (HEAD in merged) == (head is not None)
    if head is not None:
        np.testing.assert_allclose(merged[HEAD], head, rtol=0, atol=1e-5)
    safeload.convert(base, tmp_path / "once", adapters=adapter, max_shard_size="5GB")
    plan = safeload.plan_convert(base, tmp_path / "pieces", adapters=adapter, max_shard_size=300)
    plan = safeload.Plan(json.loads(json.dumps(plan)))
    safeload.finalize(plan, [safeload.run_piece(piece) for piece in plan.pieces])
    for folder in (tmp_path / "once", tmp_path / "pieces"):
        assert_same(safeload.load(folder), merged)
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == (head is None)
        assert safeload.check(folder, schema=None).ok


def test_several_adapters(tmp_path):
    """One unties the head; what the other changes below both reaches both."""
    base = base_of(tmp_path / "base")
    both = write(tmp_path / "both", {EMBED: NEW})
    head = write(tmp_path / "head", LORA_HEAD)
    merged = safeload.load(base, adapters=[both, head])
    assert np.array_equal(merged[EMBED], NEW)
    np.testing.assert_allclose(merged[HEAD], NEW + WITH_HEAD - W, rtol=0, atol=1e-5)
    half = safeload.load(base, adapters=[(head, 0.5)])
    np.testing.assert_allclose(half[HEAD], (W + WITH_HEAD) / 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_a_head_that_no_adapter_changes_keeps_its_bytes(dtype, tmp_path):
    base = base_of(tmp_path / "base", more={EMBED: W.astype(ml_dtypes.bfloat16)})
    adapter = write(tmp_path / "lora", {EMBED: NEW}, modules_to_save=["embed_tokens"])
    merged = safeload.load(base, adapters=adapter, dtype=dtype)
    assert_same({HEAD: merged[HEAD]}, {HEAD: safeload.load(base, dtype=dtype)[EMBED]})


def test_selections_know_the_new_name(tmp_path):
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", LORA_HEAD)
    merged = safeload.load(base, [HEAD], adapters=adapter)
    assert list(merged) == [HEAD]
    assert_same(safeload.load(base, only="lm_*", adapters=adapter), merged)
    assert HEAD not in safeload.load(base, drop="lm_head*", adapters=adapter)
    out = {HEAD: np.zeros((12, 8), np.float32)}
    assert safeload.load(base, [HEAD], adapters=adapter, out=out)[HEAD] is out[HEAD]
    assert_same(out, merged)
    safeload.convert(base, tmp_path / "one.npy", only=HEAD, adapters=adapter)
    assert np.array_equal(np.load(tmp_path / "one.npy"), merged[HEAD])
    with pytest.raises(safeload.TensorNotFoundError):
        safeload.load(base, [HEAD])


def test_other_destinations(tmp_path):
    """Quantized, renamed, from memory, from an open checkpoint, which stays as it was."""
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", LORA_HEAD)
    merged = safeload.load(base, adapters=adapter)
    with safeload.open(base) as opened:
        safeload.convert(opened, tmp_path / "a.npz", adapters=adapter)
        assert HEAD not in opened
    safeload.convert(safeload.load(base), tmp_path / "b.npz", adapters=adapter)
    for name in ("a.npz", "b.npz"):
        assert_same(safeload.load(tmp_path / name), merged)
    safeload.convert(base, tmp_path / "q", adapters=adapter, quantize="int8", max_shard_size="5GB")
    assert safeload.open(tmp_path / "q")[HEAD].scheme == "int8"
    np.testing.assert_allclose(safeload.load(tmp_path / "q", dtype="float32")[HEAD], WITH_HEAD, atol=0.2)
    safeload.convert(base, tmp_path / "r.npz", adapters=adapter, rename={"^lm_head": "head"})
    assert "head.weight" in safeload.open(tmp_path / "r.npz")


def test_a_stored_head_is_untied_in_the_config(tmp_path):
    """Engines that tie by the config would overwrite it."""
    base = base_of(tmp_path / "base", more={HEAD: W})
    adapter = write(tmp_path / "lora", LORA_HEAD)
    safeload.convert(base, tmp_path / "out", adapters=adapter, max_shard_size="5GB")
    np.testing.assert_allclose(safeload.load(tmp_path / "out")[HEAD], WITH_HEAD, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("config", "prefix", "head"),
    [
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, "", HEAD),
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "", HEAD),
        ({"architectures": ["NewForCausalLM"], "model_type": "new", "tie_word_embeddings": True}, "", HEAD),
        (
            {
                "architectures": ["NewForConditionalGeneration"],
                "text_config": {"model_type": "qwen2", "tie_word_embeddings": True},
                "vision_config": {"model_type": "v"},
            },
            "language_model.",
            "language_model.lm_head.weight",
        ),
        (None, "", HEAD),
    ],
)
def test_who_is_tied(config, prefix, head, tmp_path):
    """By the schema and its defaults, by the config of a nested language model, and by names."""
    base = base_of(tmp_path / "base", config, prefix=prefix)
    module = head.removesuffix(".weight")
    adapter = write(tmp_path / "lora", {f"{module}.lora_A.weight": A, f"{module}.lora_B.weight": B})
    merged = safeload.load(base, adapters=adapter)
    np.testing.assert_allclose(merged[head], WITH_HEAD, rtol=0, atol=1e-5)
    if config is not None:
        changed = choosing.untied(config)
        assert changed["tie_word_embeddings"] is False
        assert all(changed[key]["tie_word_embeddings"] is False for key in changed if key == "text_config")


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "tie_word_embeddings": False},
        {"architectures": ["LlamaModel"], "model_type": "llama", "tie_word_embeddings": True},
        {"architectures": ["NewForCausalLM"], "tie_word_embeddings": False},
        {"architectures": ["NewForSequenceClassification"]},
        {"architectures": "Llama", "model_type": 3},
        {},
    ],
)
def test_who_is_not(config, tmp_path):
    base = base_of(tmp_path / "base", config)
    adapter = write(tmp_path / "lora", {EMBED: NEW}, modules_to_save=["embed_tokens"])
    assert HEAD not in safeload.load(base, adapters=adapter)
    with pytest.raises(safeload.TensorNotFoundError, match="lm_head"):
        safeload.load(base, adapters=write(tmp_path / "head", LORA_HEAD))


def test_an_embedding_of_encoder_and_decoder_is_refused(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    save_file({"shared.weight": W}, base / "model.safetensors", durable=False)
    config = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(safeload.UnsupportedError, match="encoder, decoder and head share"):
        safeload.load(base, adapters=write(tmp_path / "head", LORA_HEAD))
    both = write(tmp_path / "both", {"shared.weight": NEW})
    assert np.array_equal(safeload.load(base, adapters=both)["shared.weight"], NEW)


def test_an_unknown_embedding_of_a_tied_head_is_refused(tmp_path):
    base = base_of(tmp_path / "base", {"architectures": ["NewForCausalLM"], "tie_word_embeddings": True}, prefix="a.")
    save_file({"a.words.weight": W, "a.up.weight": W}, base / "model.safetensors", durable=False)
    parts = {name.replace("model.embed_tokens", "a.words"): value for name, value in LORA_EMBED.items()}
    with pytest.raises(safeload.UnsupportedError, match=r"'a\.words'.* their names are not known"):
        safeload.load(base, adapters=write(tmp_path / "lora", parts))
    other = {name.replace("lm_head", "a.up"): value for name, value in LORA_HEAD.items()}
    np.testing.assert_allclose(
        safeload.load(base, adapters=write(tmp_path / "other", other))["a.up.weight"], WITH_HEAD, rtol=0, atol=1e-5
    )


def test_values_that_contradict_the_tie_are_refused(tmp_path):
    adapter = write(tmp_path / "lora", {EMBED: NEW, HEAD: NEWER})
    with pytest.raises(safeload.FormatError, match="differ, but the base ties them"):
        safeload.load(base_of(tmp_path / "base"), adapters=adapter)


def test_embeddings_of_mlx_stay_their_own_heads(tmp_path):
    base, adapter = base_of(tmp_path / "base"), tmp_path / "mlx"
    adapter.mkdir()
    parts = {"model.embed_tokens.lora_a": EMBED_A.T.copy(), "model.embed_tokens.lora_b": EMBED_B.T.copy()}
    save_file(parts, adapter / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 2.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    merged = safeload.load(base, adapters=adapter)
    assert HEAD not in merged
    np.testing.assert_allclose(merged[EMBED], WITH_EMBED, rtol=0, atol=1e-5)


def test_results_without_a_config_are_warned_of(tmp_path, caplog):
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", LORA_HEAD)
    with caplog.at_level(logging.WARNING, "safeload"):
        safeload.convert(base, tmp_path / "out", adapters=adapter, max_shard_size="5GB")
        assert not caplog.text
        safeload.load(base, adapters=adapter)
        assert '"tie_word_embeddings": false' in caplog.text
        caplog.clear()
        safeload.convert(base, tmp_path / "out.safetensors", adapters=adapter)
        assert '"tie_word_embeddings": false' in caplog.text


def test_info_says_that_it_fits(tmp_path, capsys):
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", LORA_HEAD)
    assert main(["info", str(adapter), "--base", str(base)]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize("untied", [3, {HEAD: 3}, {HEAD: "gone.weight"}])
def test_damaged_pieces_are_refused(untied, tmp_path):
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", LORA_HEAD)
    plan = safeload.plan_convert(base, tmp_path / "out", adapters=adapter, max_shard_size="1MB")
    plan.pieces[0]["adapters"][0]["untied"] = untied
    with pytest.raises(safeload.SafeloadError):
        safeload.run_piece(plan.pieces[0])


@pytest.mark.parametrize(
    ("names", "config", "pairs"),
    [
        (["gpt_neox.embed_in.weight"], {}, {HEAD: "gpt_neox.embed_in.weight"}),
        (["backbone.embeddings.weight"], {}, {HEAD: "backbone.embeddings.weight"}),
        (["embed_tokens.weight"], {}, {HEAD: "embed_tokens.weight"}),
        (["transformer.word_embeddings.weight", HEAD], {}, {}),
        (
            ["transformer.word_embeddings.weight", HEAD],
            {"tie_word_embeddings": True},
            {HEAD: "transformer.word_embeddings.weight"},
        ),
        (
            ["model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"],
            {},
            {HEAD: "model.shared.weight"},
        ),
        (["a.embed_tokens.weight", "b.embed_tokens.weight"], {}, {}),
        (["model.embed_positions.weight", "model.unshared.weight"], {}, {}),
        (["model.embed_tokens.weight"], {"text_config": {"tie_word_embeddings": False}}, {}),
        ([], {"tie_word_embeddings": True}, {}),
        (["model.embed_tokens.weight"], {"tie_word_embeddings": "yes", "text_config": 3}, {HEAD: EMBED}),
    ],
)
def test_names_of_models_without_a_schema(names, config, pairs):
    assert choosing.tied_heads({"architectures": ["NewForCausalLM"], **config}, names) == pairs
