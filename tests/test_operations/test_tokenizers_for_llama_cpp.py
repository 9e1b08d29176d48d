"""Tokenizers as metadata of llama.cpp: SentencePiece in its forms, and the names of pre-tokenizers."""

import json

import numpy as np
import pytest
from builders import llama_models
from builders.inside import model_families, tokenizer

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

tokenizers = pytest.importorskip("tokenizers")

MODELS = llama_models.listed()
SPACE = "\u2581"


def metadata_of(source, tmp_path):
    """The keys of the tokenizer, without their prefix."""
    safeload.convert(source, tmp_path / "x.gguf", overwrite=True)
    with safeload.open(tmp_path / "x.gguf") as file:
        keys = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    return {key.removeprefix("tokenizer.").removeprefix("ggml."): value for key, value in keys.items()}


# ---- SentencePiece as tokenizer.json ----


def merged(pieces):
    """The pairs that form pieces, the highest score first."""
    ids = {piece.text: k for k, piece in enumerate(pieces)}
    formed = sorted((piece for piece in pieces if piece.type == 1), key=lambda piece: -piece.score)
    cuts = [(piece.text[:k], piece.text[k:]) for piece in formed for k in range(1, len(piece.text))]
    return [[left, right] for left, right in cuts if left in ids and right in ids]


def sentencepiece_json(folder, normalizers, pre_tokenizer):
    """A `tokenizer.json` of the pieces in a folder."""
    pieces = tokenizer.parse_model((folder / "tokenizer.model").read_bytes(), "x").pieces
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True,
            "vocab": {piece.text: k for k, piece in enumerate(pieces)}, "merges": merged(pieces),
        },
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_spaces_that_are_replaced_before_metaspace(scheme, tmp_path):
    """As transformers 5 saves SentencePiece: Metaspace finds no spaces any more, and only adds the first."""
    source = llama_models.write_folder(tmp_path / "m", MODELS["llama2"])
    replaced = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    expected = metadata_of(source, tmp_path)
    content = sentencepiece_json(source, replaced, metaspace)
    (source / "tokenizer.model").unlink()
    (source / "tokenizer.json").write_text(json.dumps(content))
    own = metadata_of(source, tmp_path)
    assert own.pop("add_space_prefix") is (scheme != "never")
    assert own["model"] == "llama"
    assert own["tokens"] == expected["tokens"]
    assert own["token_type"].tolist() == expected["token_type"].tolist()


# ---- names of pre-tokenizers ----

TABLE = llama_models.pre_tokenizers()


def byte_level(tmp_path, steps, ignore_merges):
    """A model with a tokenizer that cuts texts in these steps."""
    source = llama_models.write_folder(tmp_path / "m", MODELS["qwen2"])
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    content = json.loads(tokenizer.to_str())  # as the library writes it
    content["model"]["ignore_merges"] = ignore_merges
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizers.Tokenizer.from_str(json.dumps(content)).save(str(source / "tokenizer.json"))
    return source


@pytest.mark.parametrize("number", range(len(TABLE["by_steps"])))
def test_every_pre_tokenizer_has_its_name(number, tmp_path):
    row = TABLE["by_steps"][number]
    source = byte_level(tmp_path, row["pretokenizers"], row["ignore_merges"])
    assert metadata_of(source, tmp_path)["pre"] == row["name"]


def test_names_are_told_apart():
    steps = [(json.dumps(row["pretokenizers"]), row["ignore_merges"]) for row in TABLE["by_steps"]]
    assert len({*steps}) == len(steps)
    alike = [name for row in TABLE["by_steps"] for name in row.get("like", ())]
    assert len({*alike}) == len(alike)
    assert {*alike}.isdisjoint(row["name"] for row in TABLE["by_steps"])


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": False},
        {"type": "UnicodeScripts"},
        {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False},
    ],
    ids=lambda step: step["type"],
)
def test_another_step_is_another_pre_tokenizer(step, tmp_path):
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    with pytest.raises(safeload.UnsupportedError, match="a pre-tokenizer that llama"):
        metadata_of(byte_level(tmp_path, [step, words], False), tmp_path)


def test_no_first_token_without_a_post_processor(tmp_path):
    """llama.cpp would add it for this name."""
    source = llama_models.write_folder(tmp_path / "m", MODELS["llama3"])
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    (source / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    assert metadata_of(source, tmp_path)["add_bos_token"] is False


@pytest.mark.parametrize("name", ["deepseek-v3", "falcon", "dbrx", "falcon3", "glm4"])
def test_a_foreign_file_gets_the_steps_back(name, tmp_path):
    source = llama_models.write_folder(tmp_path / "m", MODELS["qwen2"])
    safeload.convert(source, tmp_path / "x.gguf")
    left_out = ("safeload.", "tokenizer.ggml.add_bos_token")
    with safeload.open(tmp_path / "x.gguf") as file:
        own = {key: value for key, value in file.metadata.items() if not key.startswith(left_out)}
        own["tokenizer.ggml.bos_token_id"] = np.uint32(5)
        tensors = {key: file[key] for key in file}
    safeload.gguf.save_file(tensors, tmp_path / "y.gguf", {**own, "tokenizer.ggml.pre": name})
    safeload.convert(tmp_path / "y.gguf", tmp_path / "back/")
    row = next(row for row in TABLE["by_steps"] if name == row["name"] or name in row.get("like", ()))
    content = json.loads((tmp_path / "back" / "tokenizer.json").read_text())
    assert content["pre_tokenizer"]["pretokenizers"] == row["pretokenizers"]
    assert (content["post_processor"]["type"] == "Sequence") is (name == "falcon3")  # llama.cpp adds the first token


# ---- tekken.json ----


def tekken(**fields):
    content = json.loads((llama_models.DATA / "tekken" / "tekken.json").read_text())
    return {**content, **{key: value for key, value in fields.items() if key in content}, "config": {
        **content["config"], **{key: value for key, value in fields.items() if key not in content}}}  # fmt: skip


TOKENS = tekken()["vocab"]


def write_tekken(tmp_path, content):
    source = llama_models.write_folder(tmp_path / "m", MODELS["mistral_tekken"])
    (source / "tekken.json").write_text(json.dumps(content))
    return source


def test_special_tokens_of_old_versions_of_tekken_are_known(tmp_path):
    source = llama_models.write_folder(tmp_path / "m", MODELS["mistral_tekken"])
    expected = metadata_of(source, tmp_path)
    content = tekken()
    content["special_tokens"] = None
    (source / "tekken.json").write_text(json.dumps(content))
    own = metadata_of(source, tmp_path)
    assert own["tokens"] == expected["tokens"]
    assert own["padding_token_id"] == 11
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert metadata_of(source, tmp_path)["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (tekken(pattern="."), "tekken.json has a pattern that llama"),
        (tekken(default_vocab_size=99), "99 tokens, 24 of them special; the embedding has 424 rows"),
        (tekken(default_num_special_tokens=-1), "424 tokens, -1 of them special"),
        (tekken(default_num_special_tokens=23), "expected 424 different tokens, got 423"),
        (tekken(vocab=None), "vocab and special_tokens must be lists"),
        (tekken(vocab=TOKENS[::-1]), "token 0 must have its rank and a token_bytes"),
        (tekken(vocab=[{"rank": 0, "token_bytes": "!"}]), "token 0 is not base64"),
        (tekken(vocab=[{"rank": 0, "token_bytes": ""}]), "token 0 has 0 bytes"),
        (tekken(vocab=[*TOKENS[:399], {"rank": 399, "token_bytes": "AAEC"}]), "token 399 does not consist of two"),
        (tekken(vocab=[*TOKENS[:399], {"rank": 399, "token_bytes": "AA=="}]), "got 423"),
        (tekken(special_tokens=[{"rank": 0, "token_str": "<s>"}]), "no special token '</s>'"),
    ],
    ids=["pattern", "size", "negative", "count", "list", "order", "base64", "empty", "parts", "twice", "special"],
)  # fmt: skip
def test_tekken_is_refused_by_name(content, match, tmp_path):
    with pytest.raises(safeload.SafeloadError, match=match):
        metadata_of(write_tekken(tmp_path, content), tmp_path)
    assert not (tmp_path / "x.gguf").exists()


# ---- special tokens of a family ----


def test_a_family_names_special_tokens_that_the_tokenizer_does_not(tmp_path, monkeypatch):
    source = llama_models.write_folder(tmp_path / "m", MODELS["qwen2"])
    before = metadata_of(source, tmp_path)
    form = model_families.gguf_forms()["Qwen2ForCausalLM"]
    monkeypatch.setattr(form, "special_tokens", {"eos": "<tool>", "eot": "<|im_end|>", "eom": "<|im_start|>"})
    after = metadata_of(source, tmp_path)
    assert after.pop("eot_token_id") == after["tokens"].index("<|im_end|>")
    assert after.pop("eom_token_id") == after["tokens"].index("<|im_start|>")
    assert after["eos_token_id"] == before["eos_token_id"]
    assert after.keys() == before.keys()
    monkeypatch.setattr(form, "special_tokens", {"bos": "[gMASK]"})
    with pytest.raises(safeload.UnsupportedError, match=r"the tokenizer has no '\[gMASK\]', which qwen2 needs"):
        metadata_of(source, tmp_path)


@pytest.mark.parametrize(
    ("name", "rows", "key", "value"),
    [("llama2", 32016, "eot_token_id", 32010), ("llama3", 49152, "add_bos_token", False)],
)
def test_vocabularies_that_are_known_by_their_size(name, rows, key, value, tmp_path):
    tensors = {**MODELS[name]["tensors"], "model.embed_tokens.weight": [rows, 64]}
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = [rows, 64]
    model = {**MODELS[name], "config": {**MODELS[name]["config"], "vocab_size": rows}, "tensors": tensors}
    source = llama_models.write_folder(tmp_path / "m", model)
    assert metadata_of(source, tmp_path)[key] == value


# ---- WordPiece ----


def test_word_pieces_return_and_say_where_words_begin(tmp_path):
    source = llama_models.write_folder(tmp_path / "m", MODELS["bert_model"])
    keys = metadata_of(source, tmp_path)
    stored = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, special = stored["model"]["vocab"], {token["content"] for token in stored["added_tokens"]}
    rest = {text for text in vocab if text.startswith("##")}
    expected = {text if text in special else text[2:] if text in rest else SPACE + text for text in vocab}
    assert rest
    assert set(keys["tokens"]) == expected
    assert (keys["model"], keys["normalizer.lowercase"], keys["token_type_count"]) == ("bert", True, 2)
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "tokenizer.json").read_text(encoding="utf-8")) == stored


@pytest.mark.parametrize(
    ("part", "key", "value", "match"),
    [
        ("model", "type", "WordLevel", "a model of type 'WordLevel' with the prefix '##', expected 'WordPiece'"),
        ("model", "continuing_subword_prefix", "@@", "the prefix '@@', expected 'WordPiece' with '##'"),
        ("normalizer", "type", "Lowercase", "has the normalizer 'Lowercase', but llama.cpp has BertNormalizer"),
        ("normalizer", "clean_text", False, "has clean_text False, but llama.cpp has true"),
        ("normalizer", "handle_chinese_chars", False, "has handle_chinese_chars False, but llama.cpp has true"),
        ("pre_tokenizer", "type", "Whitespace", "'Whitespace', but llama.cpp has BertPreTokenizer"),
    ],
)
def test_other_word_pieces_are_refused(part, key, value, match, tmp_path):
    source = llama_models.write_folder(tmp_path / "m", MODELS["bert_model"])
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    content[part][key] = value
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(safeload.UnsupportedError, match=match):
        metadata_of(source, tmp_path)
    (source / "tokenizer.json").unlink()
    with pytest.raises(safeload.UnsupportedError, match=r"tokenizer.json does not exist, but llama.cpp needs it"):
        metadata_of(source, tmp_path)


# ---- Unigram ----


def test_unigram_models_are_refused(tmp_path):
    source = llama_models.write_folder(tmp_path / "m", MODELS["llama2"])
    content = (source / "tokenizer.model").read_bytes()
    (source / "tokenizer.model").write_bytes(content + b"\x12\x02\x18\x01")  # later fields count
    with pytest.raises(safeload.UnsupportedError, match="is of type unigram, expected BPE"):
        metadata_of(source, tmp_path)
    (source / "tokenizer.model").unlink()
    (source / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0]]}}))
    with pytest.raises(safeload.UnsupportedError, match="a model of type 'Unigram', expected 'BPE'"):
        metadata_of(source, tmp_path)


# ---- files ----


def test_a_link_to_a_missing_vocabulary_is_an_error(tmp_path):
    """A folder of a cache whose download broke off must not become a file with another tokenizer, or none."""
    source = llama_models.write_folder(tmp_path / "m", MODELS["llama2"])
    (source / "tokenizer.model").unlink()
    (source / "tokenizer.model").symlink_to(tmp_path / "blobs" / "0")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model"):
        metadata_of(source, tmp_path)
    assert not (tmp_path / "x.gguf").exists()
