"""The files of a tokenizer from metadata of llama.cpp, see `safeload.conversion.llama_cpp.tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from ...core.files import parse_json
from ...core.text import encode, show
from ...errors import FormatError
from ...models.family import TEXT
from ..catalog import Catalog
from .sentencepiece import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, VocabularyPiece, serialized
from .settings import value_at
from .tokenizer import (
    ADDS_BOS,
    CONFIG,
    JSON,
    KEPT,
    MAX_MERGED,
    MODEL,
    PREFIX,
    SPACE,
    TEMPLATE,
    TOKENS,
    TYPES,
    USUAL,
    USUAL_IDS,
    object_at,
    pre_tokenizers,
)

_MOST_SCORE = 1 << 127  # scores are f32


def tokenizer_files(catalog: Catalog, name: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a model's tokenizer, by name, and the settings that are not recovered."""
    kind = value_at(catalog, f"{PREFIX}model", TEXT)
    kept, config = kept_json(catalog, JSON), kept_json(catalog, CONFIG)
    if kind not in ("llama", "gpt2", "gemma4", "bert"):
        return {}, [f"the tokenizer, of type {show(kind)}"]
    tokens = _Tokens(catalog, scored=kind == "llama")
    if kind == "bert":
        tokens.restore_word_pieces()
        if kept is None and (kept := tokens.word_pieces()) is None:
            return {}, ["the tokenizer, whose special tokens have no ids"]
    files: dict[str, bytes] = {}
    notes: list[str] = []
    if tokens.scored and kept is None:
        files[MODEL] = tokens.model()
    else:
        content = tokens.json(kept)
        if content is None:
            return {}, [f"the tokenizer, whose pre-tokenizer is {show(tokens.pre)}"]
        files[JSON] = _json_bytes(JSON, content)
    template = value_at(catalog, "tokenizer.chat_template", TEXT)
    if config is None:
        notes.append("settings of the tokenizer that llama.cpp has no key for")
        config = tokens.config(name)
        if template is not None:
            config["chat_template"] = template
    elif template is not None and config.get("chat_template") != template:
        files[TEMPLATE] = encode(template, TEMPLATE)
    files[CONFIG] = _json_bytes(CONFIG, config)
    return files, notes


def kept_json(catalog: Catalog, name: str) -> dict[str, Any] | None:
    """Return settings that `llama_cpp` has kept in metadata, or None in a foreign file."""
    key = f"{KEPT}{name}"
    text = catalog.metadata.get(key)
    return parse_json(text.encode("utf-8", "surrogateescape"), key, catalog.title) if isinstance(text, str) else None


def _json_bytes(name: str, content: Mapping[str, Any]) -> bytes:
    return encode(json.dumps(content, ensure_ascii=False, indent=2) + "\n", name)


class _Tokens:
    """The vocabulary of a file."""

    def __init__(self, catalog: Catalog, *, scored: bool) -> None:
        self._metadata, self._title = catalog.metadata, catalog.title
        self.scored = scored  # a vocabulary of SentencePiece
        self.pre = value_at(catalog, f"{PREFIX}pre", TEXT)
        texts = self._metadata.get(TOKENS)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise FormatError(f"key {TOKENS} must be an array of strings", self._title)
        self.texts: list[str] = texts
        self.types: list[int] = self._numbers("token_type", NORMAL, "iu")
        self.scores: list[float] = self._numbers("scores", 0.0, "f") if scored else []
        bad = next((k for k, score in enumerate(self.scores) if not abs(score) < _MOST_SCORE), None)
        if bad is not None:
            text = f"key {PREFIX}scores: score {bad} is {self.scores[bad]}, expected a finite f32"
            raise FormatError(text, self._title)
        self.ids = {name: number for name, number in USUAL_IDS.items() if scored and number < len(texts)}
        for kind, word in TYPES.items():
            number = self._metadata.get(f"{PREFIX}{word}_token_id")
            if kind in USUAL and isinstance(number, int) and 0 <= number < len(texts):
                self.ids[kind] = int(number)

    def restore_word_pieces(self) -> None:
        """Write "##" before the rest of a word again, and no space before its beginning."""
        texts = [f"##{text}" if text[:1] != SPACE else text[1:] for text in self.texts]
        kept = zip(self.texts, texts, self.types, strict=True)
        self.texts = [stored if kind == CONTROL else text for stored, text, kind in kept]

    def word_pieces(self) -> dict[str, Any] | None:
        """Return a ``tokenizer.json`` of WordPiece without vocabulary for a foreign file; None without its tokens."""
        if not {"bos", "sep", "unk"} <= self.ids.keys():
            return None
        flags = {key: self._metadata.get(f"{PREFIX}normalizer.{key}") for key in ("lowercase", "strip_accents")}
        special = {self.texts[k]: k for k, kind in enumerate(self.types) if kind == CONTROL}
        return self._frame() | {
            "normalizer": {
                "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                "strip_accents": flags["strip_accents"], "lowercase": flags["lowercase"] is not False,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": self._processing("bos A sep", "bos A sep B:1 sep:1"),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece", "unk_token": self.texts[self.ids["unk"]], "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": special,
            },
        }  # fmt: skip

    def _numbers(self, key: str, default: float, kinds: str) -> list[Any]:
        array = self._metadata.get(f"{PREFIX}{key}")
        if array is None:
            return [default] * len(self.texts)
        if not isinstance(array, np.ndarray) or len(array) != len(self.texts) or array.dtype.kind not in kinds:
            expected = f"{len(self.texts)} {'floats' if kinds == 'f' else 'integers'}"
            raise FormatError(f"key {PREFIX}{key} must have {expected}", self._title)
        return [*array.tolist()]

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"{PREFIX}{key}", default)
        return value if isinstance(value, bool) else default

    def _pads(self, number: int) -> bool:
        """Return True for the filler of an id without a token."""
        return self.types[number] == UNUSED and self.texts[number] == f"[PAD{number}]"

    def _added(self) -> list[dict[str, Any]]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = ((k, kind == CONTROL) for k, kind in enumerate(self.types) if kind in (CONTROL, USER_DEFINED))
        return [{"id": k, "content": self.texts[k], **flags, "special": special} for k, special in added]

    def model(self) -> bytes:
        """Return the vocabulary as a ``tokenizer.model``, without fillers at its end."""
        count = len(self.texts)
        while count and self._pads(count - 1):
            count -= 1
        texts = (t.replace(" ", SPACE) if k == USER_DEFINED else t for t, k in zip(self.texts, self.types, strict=True))
        types = (kind if NORMAL <= kind <= BYTE else NORMAL for kind in self.types)
        pieces = [*map(VocabularyPiece, islice(texts, count), self.scores, types)]
        return serialized(pieces, self._flag("add_space_prefix", True), self.ids)

    def json(self, kept: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a ``tokenizer.json``; None if its pre-tokenizer is unknown."""
        content = self._template() if kept is None else kept  # our own metadata keep all but vocabulary and merges
        if content is None:
            return None
        model, listed = object_at(content, "model"), content.get("added_tokens")
        items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        added = {number for item in items if isinstance(number := item.get("id"), int)}
        vocab = {text: k for k, text in enumerate(self.texts) if k not in added and not self._pads(k)}
        own = object_at(model, "vocab")  # added tokens that the vocabulary has too
        bad = next((text for text, k in own.items() if type(k) is not int or not 0 <= k < len(self.texts)), None)
        if bad is not None:
            raise FormatError(f"key {KEPT}{JSON}: token {show(bad)} has the id {show(own[bad])}", self._title)
        vocab = dict(sorted({**vocab, **own}.items(), key=lambda item: item[1]))
        if model.get("type") == "WordPiece":
            return {**content, "model": {**model, "vocab": vocab}}
        if self.scored:
            pairs = self._scored_merges(vocab)
        else:
            merges = self._metadata.get(f"{PREFIX}merges")
            if not isinstance(merges, list):
                raise FormatError(f"key {PREFIX}merges is missing", self._title)
            pairs = [merge.split(" ") if isinstance(merge, str) else [] for merge in merges]
            if any(len(pair) != 2 for pair in pairs):
                raise FormatError(f"key {PREFIX}merges must have pairs of tokens", self._title)
        return {**content, "model": {**model, "vocab": vocab, "merges": pairs}}

    def _scored_merges(self, vocab: Mapping[str, int]) -> list[list[str]]:
        """Return the merges that form tokens, those of the highest score first."""
        formed = [text for text, k in vocab.items() if self.types[k] == NORMAL and self.scores[k] < 0]
        merges = []
        for text in sorted(formed, key=lambda text: -self.scores[vocab[text]]):
            if len(text) > MAX_MERGED:
                raise FormatError(f"token {vocab[text]} has {len(text):,} characters, too many to merge", self._title)
            cuts = ([text[:cut], text[cut:]] for cut in range(1, len(text)))
            pairs = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
            merges += sorted(pairs, key=lambda pair: [vocab[part] for part in pair])
        return merges

    def _template(self) -> dict[str, Any] | None:
        """Return a ``tokenizer.json`` without vocabulary for a foreign file."""
        rows = pre_tokenizers()["by_steps"]
        row = next((row for row in rows if self.pre == row["name"] or self.pre in row.get("like", ())), None)
        if row is None:
            return None
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return self._frame() | {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*row["pretokenizers"]]},
            "post_processor": self._processor(byte_level),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                "ignore_merges": row["ignore_merges"],
            },
        }  # fmt: skip

    def _frame(self) -> dict[str, Any]:
        """Return the parts that all kinds of ``tokenizer.json`` have alike."""
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added()}

    def _processor(self, byte_level: dict[str, Any]) -> dict[str, Any]:
        """Return the post-processor, which puts the first token before a text."""
        if "bos" not in self.ids or not self._flag("add_bos_token", self.pre in ADDS_BOS):
            return byte_level
        return {"type": "Sequence", "processors": [byte_level, self._processing("bos A", "bos A bos:1 B:1")]}

    def _processing(self, single: str, pair: str) -> dict[str, Any]:
        """Return a post-processor from templates for a text and for two, with the words of special tokens."""

        def pieces(template: str) -> Iterator[dict[str, Any]]:
            for word, _, number in (piece.partition(":") for piece in template.split()):
                kind, name = ("Sequence", word) if word in "AB" else ("SpecialToken", self.texts[self.ids[word]])
                yield {kind: {"id": name, "type_id": int(number or 0)}}

        special = {self.texts[k]: k for word, k in self.ids.items() if word in single.split()}
        tokens = {text: {"id": text, "ids": [k], "tokens": [text]} for text, k in special.items()}
        return {
            "type": "TemplateProcessing",
            "single": [*pieces(single)],
            "pair": [*pieces(pair)],
            "special_tokens": tokens,
        }

    def config(self, name: str) -> dict[str, Any]:
        """Return a ``tokenizer_config.json`` for a foreign file."""
        own = "GemmaTokenizer" if name.startswith("Gemma") else "LlamaTokenizer"
        config: dict[str, Any] = {"tokenizer_class": own if self.scored else "PreTrainedTokenizerFast"}
        config.update((f"{kind}_token", self.texts[number]) for kind, number in self.ids.items())
        config["clean_up_tokenization_spaces"] = False
        if self.scored:
            config.update((key, self._flag(key, key == "add_bos_token")) for key in ("add_bos_token", "add_eos_token"))
            config["legacy"] = False
            config["added_tokens_decoder"] = {str(entry.pop("id")): entry for entry in self._added()}
        return config
