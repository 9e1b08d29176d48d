"""Adapters trained after tokens were added: embeddings and heads of another size, rows of tokens, and task heads."""

import json

import numpy as np
import pytest
from builders.adapters import assert_same, pair, write
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

EMBEDDING, HEAD, Q = "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"
DELTA = "token_adapter.trainable_tokens_delta"
TIE = "tie_word_embeddings"


def full(rows, value=1.0, columns=4):
    return np.full((rows, columns), value, np.float32)


def base_of(folder, tied=False, stored=True, rows=8, dtype=None, **config):
    """A small Llama, whose head is stored or not."""
    folder.mkdir()
    shapes = {f"{EMBEDDING}.weight": (rows, 4), f"{Q}.weight": (4, 4)}
    shapes.update({f"{HEAD}.weight": (rows, 4)} if stored else {})
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if tied and stored:
        weights[f"{HEAD}.weight"] = weights[f"{EMBEDDING}.weight"]
    save_file(weights, folder / "model.safetensors", durable=False)
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": rows, TIE: tied, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    if dtype is not None:
        safeload.convert(folder, folder.parent / dtype, dtype=dtype)
        return folder.parent / dtype
    return folder


def every_way(base, adapter, tmp_path):
    """The merged tensors and the config, by `load`, `convert` and a conversion in pieces."""
    merged = safeload.load(base, adapters=adapter)
    safeload.convert(base, tmp_path / "out", adapters=adapter)
    assert_same(safeload.load(tmp_path / "out"), merged)
    plan = safeload.plan_convert(base, tmp_path / "pieces", adapters=adapter, max_shard_size=70)
    assert len(plan.pieces) > 1
    for piece in json.loads(json.dumps(plan))["pieces"]:
        assert safeload.run_piece(piece)
    safeload.finalize(plan, [safeload.run_piece(piece) for piece in plan.pieces])
    assert_same(safeload.load(tmp_path / "pieces"), merged)
    texts = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "pieces")]
    assert texts[0] == texts[1]
    return merged, texts[0]


@pytest.mark.parametrize("rows", [10, 6])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("names", ["tied", "tied, both", "not tied"])
def test_a_vocabulary_of_another_size(rows, dtype, names, tmp_path):
    tied = names != "not tied"
    base = base_of(tmp_path / "base", tied, stored=not tied, dtype=dtype)
    parts = {**pair(4, 4, module=Q), f"{EMBEDDING}.weight": full(rows)}
    if names != "tied":
        parts[f"{HEAD}.weight"] = full(rows, 1 if tied else 2)
    merged, config = every_way(base, write(tmp_path / "lora", parts), tmp_path)
    assert np.array_equal(merged[f"{EMBEDDING}.weight"], full(rows))
    assert (f"{HEAD}.weight" in merged) == (not tied)
    assert tied or np.array_equal(merged[f"{HEAD}.weight"], full(rows, 2))
    assert {str(value.dtype) for value in merged.values()} == {dtype or "float32"}
    assert (config["vocab_size"], config[TIE]) == (rows, tied)


def test_a_stored_head_follows_the_embedding_it_is_tied_to(tmp_path):
    base = base_of(tmp_path / "base", tied=True, text_config={"vocab_size": 8})
    merged, config = every_way(base, write(tmp_path / "lora", {f"{EMBEDDING}.weight": full(10)}), tmp_path)
    assert np.array_equal(merged[f"{HEAD}.weight"], full(10))
    assert config["vocab_size"] == config["text_config"]["vocab_size"] == 10


def test_factors_on_a_larger_embedding(tmp_path):
    """PEFT saves the base of the module beside its factors; a tied head gets that base."""
    parts = {
        f"{EMBEDDING}.base_layer.weight": full(10),
        f"{EMBEDDING}.lora_embedding_A": np.ones((2, 10), np.float32),
        f"{EMBEDDING}.lora_embedding_B": np.ones((4, 2), np.float32),
    }
    base = base_of(tmp_path / "base", tied=True, stored=False)
    merged, config = every_way(base, write(tmp_path / "lora", parts), tmp_path)
    assert np.array_equal(merged[f"{EMBEDDING}.weight"], full(10, 5))
    assert np.array_equal(merged[f"{HEAD}.weight"], full(10))
    assert (config["vocab_size"], config[TIE]) == (10, False)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("LORA", [DELTA]), ("LORA", [f"{DELTA}.default"]), ("TRAINABLE_TOKENS", ["trainable_tokens_delta"])],
)
@pytest.mark.parametrize("tied", ["not tied", "tied", "tied and stored"])
def test_rows_of_tokens(kind, names, tied, tmp_path):
    base = base_of(tmp_path / "base", tied != "not tied", stored=tied != "tied")
    before = safeload.load(base)
    key = "trainable_token_indices" if kind == "LORA" else "token_indices"
    parts = {f"{EMBEDDING}.{name}": np.stack([full(1, 7)[0], full(1, 9)[0]]) for name in names}
    adapter = write(tmp_path / "lora", parts, {"peft_type": kind, key: [5, 1]})
    merged, config = every_way(base, adapter, tmp_path)
    expected = before[f"{EMBEDDING}.weight"].copy()
    expected[[5, 1]] = [[7] * 4, [9] * 4]
    assert np.array_equal(merged[f"{EMBEDDING}.weight"], expected)
    if tied != "tied":
        assert np.array_equal(merged[f"{HEAD}.weight"], expected if tied != "not tied" else before[f"{HEAD}.weight"])
    assert config["vocab_size"] == 8


def test_rows_of_a_larger_embedding_and_of_a_head(tmp_path):
    parts = {
        f"{EMBEDDING}.token_adapter.base_layer.weight": full(10),
        f"{EMBEDDING}.{DELTA}": full(1, 3),
        f"{HEAD}.token_adapter.base_layer.weight": full(10, 2),
        f"{HEAD}.{DELTA}": full(2, 4),
    }
    tokens = {"embed_tokens": [9], "lm_head": [0, 8]}
    merged, _ = every_way(
        base_of(tmp_path / "base"), write(tmp_path / "lora", parts, trainable_token_indices=tokens), tmp_path
    )
    assert merged[f"{EMBEDDING}.weight"][:, 0].tolist() == [1] * 9 + [3]
    assert merged[f"{HEAD}.weight"][:, 0].tolist() == [4, *[2] * 7, 4, 2]


@pytest.mark.parametrize("tied", [True, False])
def test_task_heads(tied, tmp_path):
    """They are added, in their own dtype."""
    base = base_of(tmp_path / "base", tied, stored=not tied, dtype="bfloat16")
    parts = {
        **pair(4, 4, module=Q),
        "score.weight": full(3, 2),
        "classifier.dense.weight": full(4, 3),
        "classifier.dense.bias": np.ones(4, np.float64),
    }
    adapter = write(tmp_path / "lora", parts, modules_to_save=["classifier", "score"])
    merged, config = every_way(base, adapter, tmp_path)
    for name, value in list(parts.items())[2:]:
        assert np.array_equal(merged[name], value)
        assert merged[name].dtype == value.dtype
    assert config == json.loads((base / "config.json").read_text())
    assert safeload.load(base, ["score.weight"], adapters=adapter).keys() == {"score.weight"}
    assert safeload.load(base, adapters=adapter, dtype="float16")["score.weight"].dtype == np.float16


def test_without_a_config_a_warning_says_what_to_set(tmp_path, caplog):
    base = base_of(tmp_path / "base") / "model.safetensors"
    adapter = write(tmp_path / "lora", {f"{EMBEDDING}.weight": full(10), f"{HEAD}.weight": full(10)})
    assert safeload.load(base, adapters=adapter)[f"{HEAD}.weight"].shape == (10, 4)
    assert 'a vocabulary of 10: set "vocab_size"' in caplog.text


def test_a_packed_base(tmp_path):
    base = base_of(tmp_path / "base", rows=64, stored=False, tied=True)
    safeload.convert(base, tmp_path / "q", quantize="int8")
    adapter = write(tmp_path / "lora", {f"{EMBEDDING}.weight": full(70)})
    merged = safeload.load(tmp_path / "q", adapters=adapter, dtype="float32")
    assert np.array_equal(merged[f"{EMBEDDING}.weight"], full(70))
    safeload.convert(tmp_path / "q", tmp_path / "out", adapters=adapter, dtype="float16")
    assert safeload.load(tmp_path / "out")[f"{EMBEDDING}.weight"].shape == (70, 4)


def test_info_says_that_it_fits(tmp_path):
    parts = {f"{EMBEDDING}.weight": full(10), f"{HEAD}.weight": full(10), "score.weight": full(3)}
    adapter = write(tmp_path / "lora", parts, modules_to_save=["score"])
    found = safeload.info(adapter, base=base_of(tmp_path / "base")).to_dict()["adapter"]["base"]
    assert (found["fits"], found["changed"], found["total"]) == (True, 3, 3)


TOKENS = {"trainable_token_indices": [1, 2]}


@pytest.mark.parametrize(
    ("parts", "config", "words"),
    [
        ({f"{EMBEDDING}.weight": full(10)}, {}, ["10 rows instead of 8, but 'lm_head.weight' has 8"]),
        ({f"{EMBEDDING}.weight": full(10), f"{HEAD}.weight": full(11)}, {}, ["11 rows instead of 8", "has 10"]),
        ({f"{EMBEDDING}.weight": full(10, columns=5)}, {}, ["[10, 5]", "[8, 4]", "an equal shape"]),
        ({f"{Q}.weight": full(5)}, {}, ["[5, 4]", "[4, 4]", "an equal shape"]),
        ({f"{EMBEDDING}.weight": np.ones((10, 4), np.int32)}, {}, ["is I32: it must be floating"]),
        ({"score.weight": full(3)}, {}, ["'score.weight'", "does not have"]),
        ({"model.score.weight": full(3)}, {"modules_to_save": ["score"]}, ["'model.score.weight'", "does not have"]),
        ({"score.weight": np.ones(3, np.int64)}, {"modules_to_save": ["score"]}, ["score.weight", "does not have"]),
        ({f"{EMBEDDING}.{DELTA}": full(2)}, {}, ["[2, 4]", "0 rows, those of adapter_config.json"]),
        ({f"{EMBEDDING}.{DELTA}": full(3)}, TOKENS, ["[3, 4]", "2 rows"]),
        ({f"{EMBEDDING}.{DELTA}": full(2, columns=5)}, TOKENS, ["[2, 5]", "2 rows"]),
        ({f"{EMBEDDING}.{DELTA}": full(1)}, {"trainable_token_indices": [8]}, ["has token 8", "has 8 rows"]),
        ({f"{EMBEDDING}.{DELTA}": full(1)}, {"trainable_token_indices": {"lm_head": [1]}}, ["0 rows"]),
        ({f"{EMBEDDING}.{DELTA}": full(2)}, {"trainable_token_indices": [1, 1]}, ["different token numbers"]),
        ({f"{EMBEDDING}.{DELTA}": full(2)}, {"trainable_token_indices": [1, -1]}, ["different token numbers"]),
        ({f"{EMBEDDING}.{DELTA}": full(2)}, {"trainable_token_indices": [1, True]}, ["different token numbers"]),
        ({f"{EMBEDDING}.{DELTA}": full(2)}, {"trainable_token_indices": {"a": "b"}}, ["different token numbers"]),
        ({f"{EMBEDDING}.{DELTA}": full(2)}, {"trainable_token_indices": 3}, ["different token numbers"]),
        ({f"{EMBEDDING}.{DELTA}": np.ones((2, 4), np.int8)}, TOKENS, ["must be floating"]),
        ({f"other.{DELTA}": full(2)}, TOKENS, ["'other.weight'", "does not have"]),
        ({f"{EMBEDDING}.token_adapter.else": full(2)}, TOKENS, ["'model.embed_tokens.else'", "does not have"]),
    ],
)
def test_what_does_not_fit_is_named(parts, config, words, tmp_path):
    base, adapter = base_of(tmp_path / "base"), write(tmp_path / "lora", parts, **config)
    for call in (
        lambda: safeload.load(base, adapters=adapter),
        lambda: safeload.convert(base, tmp_path / "out", adapters=adapter),
    ):
        with pytest.raises(safeload.SafeloadError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value


def test_several_adapters_and_weights(tmp_path):
    base = base_of(tmp_path / "base")
    tokens = write(tmp_path / "tokens", {f"{EMBEDDING}.{DELTA}": full(2)}, **TOKENS)
    factors = {
        f"{EMBEDDING}.lora_embedding_A": np.ones((2, 8), np.float32),
        f"{EMBEDDING}.lora_embedding_B": np.ones((4, 2), np.float32),
    }
    lora = write(tmp_path / "lora", factors)
    merged = safeload.load(base, adapters=[lora, tokens])[f"{EMBEDDING}.weight"]
    assert np.array_equal(merged[1:3], full(2))
    with pytest.raises(safeload.UnsupportedError, match="is changed after some of its rows were replaced"):
        safeload.load(base, adapters=[tokens, lora])
    with pytest.raises(safeload.UnsupportedError, match="the weight of its adapter must be 1"):
        safeload.load(base, adapters=(tokens, 0.5))
    tied = base_of(tmp_path / "tied", tied=True, stored=False)
    parts = {f"{EMBEDDING}.{DELTA}": full(2), f"{HEAD}.{DELTA}": full(2, 3)}
    with pytest.raises(safeload.UnsupportedError, match="different rows, but the base ties them"):
        safeload.load(tied, adapters=write(tmp_path / "both", parts, **TOKENS))
    merged = safeload.load(tied, adapters=write(tmp_path / "equal", {**parts, f"{HEAD}.{DELTA}": full(2)}, **TOKENS))
    assert np.array_equal(merged[f"{EMBEDDING}.weight"][1:3], full(2))
