"""Tokenizers as metadata of llama.cpp: SentencePiece in its forms, and the names of pre-tokenizers."""

import json

import pytest
from builders import llama_models

import safeload
from safeload.conversion.llama_cpp import tokenizer as tokenizers_of_llama_cpp

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

pytest.importorskip("tokenizers")

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
    """The pairs that form pieces, those of the highest score first."""
    ids = {piece.text: k for k, piece in enumerate(pieces)}
    formed = sorted((piece for piece in pieces if piece.type == 1), key=lambda piece: -piece.score)
    cuts = [(piece.text[:k], piece.text[k:]) for piece in formed for k in range(1, len(piece.text))]
    return [[left, right] for left, right in cuts if left in ids and right in ids]


def sentencepiece_json(folder, normalizers, pre_tokenizer):
    """A `tokenizer.json` of the pieces in a folder."""
    pieces = tokenizers_of_llama_cpp.parse_model((folder / "tokenizer.model").read_bytes(), "x").pieces
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
