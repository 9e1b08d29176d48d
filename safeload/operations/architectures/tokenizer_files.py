"""The files of a tokenizer from the metadata of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...base.text import encode, show
from ...errors import FormatError
from ...stores.json_file import parse_json
from ..sources.catalog import Catalog
from . import sentencepiece
from .sentencepiece import CONTROL, NORMAL, UNUSED, USER_DEFINED, VocabularyPiece
from .settings import text_at
from .special_tokens import TYPES, USUAL
from .tokenizer import CONFIG, JSON, KEPT, MODEL, TEMPLATE, pre_tokenizer_named

_PREFIX = "tokenizer.ggml."
_MOST_SCORE = 1 << 127  # scores are f32


def tokenizer_files(catalog: Catalog, name: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a model's tokenizer, by name, and the settings that are not recovered."""
    kind = text_at(catalog, f"{_PREFIX}model")
    if kind not in ("llama", "gpt2"):
        return {}, [f"the tokenizer, of type {show(kind)}"]
    tokens = _Tokens(catalog, scored=kind == "llama")
    kept, config = kept_json(catalog, JSON), kept_json(catalog, CONFIG)
    files: dict[str, bytes] = {}
    notes: list[str] = []
    if tokens.scored and kept is None:
        files[MODEL] = tokens.sentencepiece()
    else:
        content = tokens.json(kept)
        if content is None:
            return {}, [f"the tokenizer, whose pre-tokenizer is {show(tokens.pre)}"]
        files[JSON] = _encoded(JSON, content)
    template = text_at(catalog, "tokenizer.chat_template")
    if config is None:
        notes.append("settings of the tokenizer that llama.cpp has no key for")
        config = tokens.config(name)
        if template is not None:
            config["chat_template"] = template
    elif template is not None and config.get("chat_template") != template:
        files[TEMPLATE] = encode(template, TEMPLATE)
    files[CONFIG] = _encoded(CONFIG, config)
    return files, notes


def kept_json(catalog: Catalog, name: str) -> dict[str, Any] | None:
    """Return settings that `llama_cpp` has kept in metadata, or None in a foreign file."""
    key = f"{KEPT}{name}"
    text = catalog.metadata.get(key)
    return parse_json(text.encode("utf-8", "surrogateescape"), key, catalog.title) if isinstance(text, str) else None


def _encoded(name: str, content: Mapping[str, Any]) -> bytes:
    return encode(json.dumps(content, ensure_ascii=False, indent=2) + "\n", name)


class _Tokens:
    """The vocabulary of a file."""

    def __init__(self, catalog: Catalog, *, scored: bool) -> None:
        self._metadata, self._title = catalog.metadata, catalog.title
        self.scored = scored  # a vocabulary of SentencePiece
        self.pre = text_at(catalog, f"{_PREFIX}pre")
        texts = self._metadata.get(f"{_PREFIX}tokens")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise FormatError(f"key {_PREFIX}tokens must be an array of strings", self._title)
        self.texts: list[str] = texts
        self.types: list[int] = self._numbers("token_type", NORMAL, "iu")
        usual = sentencepiece.USUAL_IDS.items() if scored else ()
        self.ids = {name: number for name, number in usual if number < len(texts)}
        for kind, word in TYPES.items():
            number = self._metadata.get(f"{_PREFIX}{word}_token_id")
            if kind in USUAL and isinstance(number, int) and 0 <= number < len(texts):
                self.ids[kind] = int(number)

    def _numbers(self, key: str, default: float, kinds: str) -> list[Any]:
        array = self._metadata.get(f"{_PREFIX}{key}")
        if array is None:
            return [default] * len(self.texts)
        if not isinstance(array, np.ndarray) or len(array) != len(self.texts) or array.dtype.kind not in kinds:
            expected = f"{len(self.texts)} {'floats' if kinds == 'f' else 'integers'}"
            raise FormatError(f"key {_PREFIX}{key} must have {expected}", self._title)
        numbers: list[Any] = array.tolist()
        return numbers

    def _scores(self) -> list[float]:
        scores = self._numbers("scores", 0.0, "f")
        bad = next((k for k, score in enumerate(scores) if not abs(score) < _MOST_SCORE), None)
        if bad is not None:
            raise FormatError(f"key {_PREFIX}scores: score {bad} is {scores[bad]}, expected a finite f32", self._title)
        return scores

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"{_PREFIX}{key}", default)
        return value if isinstance(value, bool) else default

    def _pads(self, number: int) -> bool:
        """Return True for the filler of an id without a token."""
        return self.types[number] == UNUSED and self.texts[number] == f"[PAD{number}]"

    def _added(self) -> list[int]:
        return [k for k, kind in enumerate(self.types) if kind in (CONTROL, USER_DEFINED)]

    def sentencepiece(self) -> bytes:
        """Return the vocabulary as a ``tokenizer.model``, without fillers at its end."""
        scores, count = self._scores(), len(self.texts)
        while count and self._pads(count - 1):
            count -= 1
        pieces = []
        for text, score, kind in zip(self.texts[:count], scores, self.types, strict=False):
            text = text.replace(" ", "\u2581") if kind == USER_DEFINED else text
            kind = kind if NORMAL <= kind <= sentencepiece.BYTE else NORMAL
            pieces.append(VocabularyPiece(text, score, kind))
        return sentencepiece.serialized(pieces, self._flag("add_space_prefix", True), self.ids)

    def json(self, kept: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a ``tokenizer.json``; None if its pre-tokenizer is unknown."""
        content = self._template() if kept is None else kept  # our own metadata keep all but vocabulary and merges
        if content is None:
            return None
        model = content.get("model")
        model = model if isinstance(model, dict) else {}
        listed = content.get("added_tokens")
        items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        added = {number for item in items if isinstance(number := item.get("id"), int)}
        vocab = {text: k for k, text in enumerate(self.texts) if k not in added and not self._pads(k)}
        own = model.get("vocab")
        if isinstance(own, dict):  # added tokens that the vocabulary has too
            bad = next((text for text, k in own.items() if type(k) is not int or not 0 <= k < len(self.texts)), None)
            if bad is not None:
                raise FormatError(f"key {KEPT}{JSON}: token {show(bad)} has the id {show(own[bad])}", self._title)
            vocab.update(own)
        vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        if self.scored:
            pairs = self._scored_merges(vocab)
        else:
            merges = self._metadata.get(f"{_PREFIX}merges")
            if not isinstance(merges, list):
                raise FormatError(f"key {_PREFIX}merges is missing", self._title)
            pairs = [merge.split(" ") if isinstance(merge, str) else [] for merge in merges]
            if any(len(pair) != 2 for pair in pairs):
                raise FormatError(f"key {_PREFIX}merges must have pairs of tokens", self._title)
        return {**content, "model": {**model, "vocab": vocab, "merges": pairs}}

    def _scored_merges(self, vocab: Mapping[str, int]) -> list[list[str]]:
        """Return the merges that form tokens, those of the highest score first."""
        scores = self._scores()
        formed = [text for text, k in vocab.items() if self.types[k] == NORMAL and scores[k] < 0]
        formed.sort(key=lambda text: -scores[vocab[text]])
        merges = []
        for text in formed:
            if len(text) > sentencepiece.MAX_MERGED:
                raise FormatError(f"token {vocab[text]} has {len(text):,} characters, too many to merge", self._title)
            cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            pairs = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
            merges += [list(pair) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
        return merges

    def _template(self) -> dict[str, Any] | None:
        """Return a ``tokenizer.json`` without vocabulary for a foreign file."""
        steps = pre_tokenizer_named(self.pre or "")
        if steps is None:
            return None
        pre_tokenizer, ignore_merges = steps
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [self._entry(k) for k in self._added()],
            "normalizer": None,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self._processor(byte_level),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
            },
        }  # fmt: skip

    def _entry(self, number: int) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        special = self.types[number] == CONTROL
        return {"id": number, "content": self.texts[number], **flags, "special": special}

    def _processor(self, byte_level: dict[str, Any]) -> dict[str, Any]:
        """Return the post-processor, which puts the first token before a text."""
        bos, usual = self.ids.get("bos"), self.pre in ("llama-bpe", "tekken")  # llama.cpp adds it even without the key
        if bos is None or not self._flag("add_bos_token", usual):
            return byte_level
        text = self.texts[bos]
        first = {"SpecialToken": {"id": text, "type_id": 0}}
        a, b = ({"Sequence": {"id": name, "type_id": k}} for k, name in enumerate("AB"))
        template = {
            "type": "TemplateProcessing",
            "single": [first, a],
            "pair": [first, a, {"SpecialToken": {"id": text, "type_id": 1}}, b],
            "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
        }
        return {"type": "Sequence", "processors": [byte_level, template]}

    def config(self, name: str) -> dict[str, Any]:
        """Return a ``tokenizer_config.json`` for a foreign file."""
        own = "GemmaTokenizer" if name.startswith("Gemma") else "LlamaTokenizer"
        config: dict[str, Any] = {"tokenizer_class": own if self.scored else "PreTrainedTokenizerFast"}
        config.update((f"{kind}_token", self.texts[number]) for kind, number in self.ids.items())
        config["clean_up_tokenization_spaces"] = False
        if self.scored:
            config.update(
                add_bos_token=self._flag("add_bos_token", True), add_eos_token=self._flag("add_eos_token", False)
            )
            config["legacy"] = False
            config["added_tokens_decoder"] = {
                str(k): {key: value for key, value in self._entry(k).items() if key != "id"} for k in self._added()
            }
        return config
