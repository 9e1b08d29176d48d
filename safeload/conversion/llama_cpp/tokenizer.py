"""The tokenizer of a model as metadata of llama.cpp; `tokenizer_files` makes the files again.

llama.cpp has four kinds. "llama" is SentencePiece: it merges the neighbours that form the token of the highest score.
"gpt2" is byte-level BPE: it cuts a text into words, and merges bytes in each. "gemma4" merges characters in lines.
"bert" is WordPiece: it takes the longest token from the front of each word. The files are those of transformers:

1. ``tokenizer.model``: a vocabulary of SentencePiece.
2. ``tokenizer.json``: the format of the library tokenizers. ``model`` has ``type`` "BPE", ``vocab`` (token to id),
   ``merges`` ("a b" or ["a", "b"], in order) and ``byte_fallback``; ``added_tokens`` has objects with ``id``,
   ``content``, ``special`` and ``normalized``.
3. ``tekken.json``, if there is no ``tokenizer.json``: byte-level BPE of Mistral. ``vocab`` has objects with ``rank``
   and ``token_bytes``, in base64, in order; ``special_tokens`` come first and have ``rank`` and ``token_str``.
   In ``config``: ``pattern``, ``version``, ``default_vocab_size`` and ``default_num_special_tokens``.
4. ``tokenizer_config.json``, ``added_tokens.json``, ``chat_template.jinja``: see `special_keys`.

llama.cpp has names for the ways to cut a text into words before byte pairs are merged (``pre_tokenizers.json``). A name
is chosen by the token ids of a test text, which tell published vocabularies apart, or else by the pre-tokenizer in
``tokenizer.json`` and its ``ignore_merges``: true if whole words are tokens whatever the merges are. The keys of
``by_hash`` are SHA-256 of the list of token ids, as Python writes it. ``like`` are further names for the same cuts.
Sources: llama.cpp, conversion/base.py (hashes, 2026-11) and src/llama-vocab.cpp (expressions).
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...core.files import MAX_JSON, Location, content_if_there, is_missing, parse_json, read_data, read_if_there
from ...core.forking import cached_property
from ...core.text import needed, plural, show, warning
from ...errors import FormatError, SafeloadError, UnsupportedError
from ...formats import gguf
from ...models.family import GgufForm
from .sentencepiece import (
    BPE,
    BYTE,
    CONTROL,
    MAX_PIECES,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    parse_model,
)
from .settings import ModelConfig

JSON, CONFIG, MODEL, TEKKEN = "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"
TIKTOKEN, GENERATION = "tiktoken.model", "generation_config.json"
KEPT = "safeload.source."  # prefix of safeload's keys, before the name of a file
PREFIX = "tokenizer.ggml."
TOKENS = f"{PREFIX}tokens"
ADDED, TEMPLATE, OLD_TEMPLATE = "added_tokens.json", "chat_template.jinja", "chat_template.json"
SPACE = "\u2581"  # of SentencePiece
_PADDING_SCORE, _ADDED_SCORE = -10000.0, -1000.0
# Texts of tokens that are control tokens although their tokenizer does not say so.
_CONTROLS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_FENCES = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))  # around the texts of other such tokens
# Control tokens of Gemma 4 that llama.cpp shows.
_VISIBLE = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
# GPT-2 writes a space as this character.
_BYTE_SPACE = "\u0120"
# Names with which llama.cpp begins a text with the first token if a file does not say whether.
ADDS_BOS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
# Steps of published pre-tokenizers are at most this many.
_MOST_STEPS = 16
# Keys that the files do not give, by the rows of the embedding: of Code Llama, and of SmolLM and Granite.
_LIKE_LLAMA = ("llama", "granite", "granitemoe", "smollm3", "arcee", "llama-embed")
_BY_ROWS = {32016: {f"{PREFIX}eot_token_id": gguf.U32(32010)}, 49152: {f"{PREFIX}add_bos_token": False}}
_ADVICE = "raw=True writes the tensors without a tokenizer"

# Ids that llama.cpp assumes in a file without them.
USUAL_IDS = {"unk": 0, "bos": 1, "eos": 2}
# Largest file in bytes; published ones have up to 5 MB.
MAX_BYTES = 256 << 20
# Characters of a token that merges form; published ones have up to 48. Looking for its parts takes time that grows with
# the square of its length.
MAX_MERGED = 1024


class AddedToken(NamedTuple):
    """A token outside the base vocabulary, or with another treatment."""

    id: int
    text: str
    special: bool
    normalized: bool = True


class TokenizerFiles:
    """The tokenizer's files in a folder."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.json, self.config = self.read(JSON), self.read(CONFIG)  # None without the file

    @cached_property
    def model(self) -> SentencePieceModel | None:
        """The parsed ``tokenizer.model``; None without one."""
        content = self.content(MODEL, MAX_BYTES)
        return None if content is None else parse_model(content, (self.folder / MODEL).shown)

    @cached_property
    def tekken(self) -> dict[str, Any] | None:
        """The content of ``tekken.json`` in a folder without ``tokenizer.json``; None without one."""
        return self.read(TEKKEN) if self.json is None else None

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of ``generation_config.json``; empty without one."""
        return self.read(GENERATION) or {}

    def read(self, name: str) -> dict[str, Any] | None:
        return read_if_there((self.folder / name).path, name, self.folder.files)

    def content(self, name: str, limit: int = MAX_JSON) -> bytes | None:
        return content_if_there((self.folder / name).path, name, self.folder.files, limit)

    @cached_property
    def added_in_json(self) -> list[AddedToken]:
        items = (self.json or {}).get("added_tokens") or []
        if not isinstance(items, list):
            raise self.fault(JSON, "added_tokens must be a list")
        return [self._added(JSON, item.get("id") if isinstance(item, dict) else None, item) for item in items]

    @cached_property
    def added_elsewhere(self) -> list[AddedToken]:
        """The added tokens of ``added_tokens.json``, then the tokens of ``tokenizer_config.json``."""
        tokens = [self._added(ADDED, number, {"content": text}) for text, number in (self.read(ADDED) or {}).items()]
        decoder = (self.config or {}).get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise self.fault(CONFIG, "added_tokens_decoder must be an object")
        numbers = {key: int(key) for key in decoder if key.isascii() and key.isdigit() and len(key) < 10}
        return [*tokens, *(self._added(CONFIG, numbers.get(key), item) for key, item in decoder.items())]

    def _added(self, name: str, number: Any, item: Any) -> AddedToken:
        text = item.get("content") if isinstance(item, dict) else None
        if type(number) is not int or number < 0 or not isinstance(text, str):
            raise self.fault(name, f"invalid added token {show(item)}")
        return AddedToken(number, text, item.get("special") is True, item.get("normalized") is not False)

    def fault(self, name: str, text: str) -> FormatError:
        return FormatError(f"{name}: {text}", self.folder.shown)

    def unsupported(self, text: str) -> UnsupportedError:
        """Return an error about a tokenizer that llama.cpp does not have."""
        return UnsupportedError(f"{self.folder.shown}: {text}; {_ADVICE}")


class Vocabulary:
    """The tokens of a model in llama.cpp's form, with ids up to the ``rows`` of the embedding filled up."""

    def __init__(self, kind: str, rows: int) -> None:
        self.kind = kind  # "llama", "gpt2", "gemma4" or "bert"
        self.pre: str | None = "default"  # None leaves the key out
        self.texts = [f"[PAD{k}]" for k in range(rows)]
        self.types, self.scores = [UNUSED] * rows, [_PADDING_SCORE] * rows
        self.merges: list[str] | None = None
        self.add_space_prefix: bool | None = None  # None leaves the key out
        self.by_steps = False  # True if the steps of the pre-tokenizer gave its name
        self.beyond = 0  # ids beyond the embedding, which are skipped

    def put(self, number: int, text: str, kind: int, score: float = 0.0) -> None:
        if number < len(self.texts):
            self.texts[number], self.scores[number], self.types[number] = text, score, kind
        else:
            self.beyond += 1

    def add(self, token: AddedToken) -> None:
        """Set an added token, which can be a control token by its text."""
        text = token.text
        fenced = any(text.startswith(begin) and text.endswith(end) for begin, end in _FENCES)
        if token.special or fenced or text in _CONTROLS:
            self.put(token.id, text, CONTROL, _ADDED_SCORE)
        else:
            self.put(token.id, text.replace(SPACE, " "), USER_DEFINED, _ADDED_SCORE)

    def keys(self) -> dict[str, Any]:
        keys = {
            "model": self.kind,
            "pre": self.pre,
            "tokens": self.texts,
            "scores": np.array(self.scores, np.float32) if self.kind not in ("gpt2", "bert") else None,
            "token_type": np.array(self.types, np.int32),
            "merges": self.merges,
            "add_space_prefix": self.add_space_prefix,
        }
        return {f"{PREFIX}{key}": value for key, value in keys.items() if value is not None}


def tokenizer_keys(files: TokenizerFiles, config: ModelConfig, form: GgufForm, rows: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer, for an embedding with so many rows."""
    if files.tekken is not None:
        return _tekken_keys(files, files.tekken, rows)
    vocabulary = {"gemma4": _gemma4, "bert": _word_pieces}.get(form.tokenizer or "", vocabulary_of)(files, rows)
    if not form.add_space_prefix and files.model is not None:
        vocabulary.add_space_prefix = False
    keys = {**vocabulary.keys(), **dict(special_keys(files, config, vocabulary.texts))}
    keys |= {f"{PREFIX}{kind}_token_id": gguf.U32(number) for kind, number in form.tokens.items()}
    if vocabulary.by_steps and vocabulary.pre in ADDS_BOS:
        keys.setdefault(f"{PREFIX}add_bos_token", False)
    if form.end_of_turn in vocabulary.texts:  # the tokenizer does not name it
        keys[f"{PREFIX}eot_token_id"] = gguf.U32(vocabulary.texts.index(form.end_of_turn))
    if vocabulary.kind == "gemma4":
        keys[f"{PREFIX}add_bos_token"] = True
    if vocabulary.kind == "bert":
        normalizer = next(_steps((files.json or {}).get("normalizer"), "normalizers"))
        flags = {key: normalizer.get(key) for key in ("lowercase", "strip_accents")}
        keys |= {f"{PREFIX}normalizer.{key}": flag for key, flag in flags.items() if isinstance(flag, bool)}
        keys[f"{PREFIX}token_type_count"] = gguf.U32(config.integer("type_vocab_size"))
    ends = files.generation.get("eos_token_id") if form.end_of_turn_listed else None
    if isinstance(ends, list) and len(ends) > 1 and type(ends[0]) is int and 0 <= ends[0] < rows:
        keys[f"{PREFIX}eot_token_id"] = gguf.U32(ends[0])
    if form.end_of_text is not None:
        number = config.values.get(form.end_of_text)
        if form.end_of_text in vocabulary.texts and f"{PREFIX}eos_token_id" in keys:
            number = vocabulary.texts.index(form.end_of_text)
        if type(number) is int and 0 <= number < rows:
            keys[f"{PREFIX}eos_token_id"] = gguf.U32(number)
    for kind, text in form.special_tokens.items():
        if text not in vocabulary.texts:
            raise files.unsupported(f"the tokenizer has no {show(text)}, which {form.architecture} needs")
        keys.setdefault(f"{PREFIX}{TYPES[kind]}_token_id", gguf.U32(vocabulary.texts.index(text)))
    alike = form.architecture in _LIKE_LLAMA  # by the same function of the converter
    return {**keys, **(_BY_ROWS.get(rows, {}) if alike else {})}


def vocabulary_of(files: TokenizerFiles, rows: int) -> Vocabulary:
    """Return the vocabulary of a model."""
    if files.model is not None:
        return _from_pieces(files, files.model, rows)
    if files.json is None:
        missing = f"neither {MODEL} nor {JSON} exists, but llama.cpp needs a tokenizer"
        if not is_missing((files.folder / TIKTOKEN).path, files.folder.files):
            missing = f"{TIKTOKEN} is not supported, and {missing}: write {JSON} with transformers"
        raise files.unsupported(missing)
    model, decodes = _bpe(files, files.json), object_at(files.json, "decoder").get("type")
    if model.get("byte_fallback") is True and decodes == "Sequence":
        return _from_merges(files, files.json, rows)
    if decodes != "ByteLevel":
        raise files.unsupported(f"{JSON} has a decoder of type {show(decodes)}, expected 'ByteLevel' or 'Sequence'")
    return _byte_level(files, files.json, rows)


def _bpe(files: TokenizerFiles, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model of a ``tokenizer.json``, and refuse settings that llama.cpp does not have."""
    model = object_at(content, "model")
    kind = model.get("type", "BPE" if "merges" in model else None)  # files of 2020, such as GPT-2's, have no type
    if kind != "BPE":
        raise files.unsupported(f"{JSON} has a model of type {show(kind)}, expected 'BPE'")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key) not in (None, "", 0):
            raise files.unsupported(f"{JSON} has the {key} {show(model[key])}, which llama.cpp does not have")
    return model


def object_at(holder: Any, key: str) -> Mapping[str, Any]:
    """Return the object at a key of an object, or an empty object."""
    value = holder.get(key) if isinstance(holder, Mapping) else None
    return value if isinstance(value, Mapping) else {}


# ---- SentencePiece ----


def _from_pieces(files: TokenizerFiles, model: SentencePieceModel, rows: int) -> Vocabulary:
    if model.kind != BPE:
        algorithm = "unigram" if model.kind == UNIGRAM else model.kind
        raise files.unsupported(f"{MODEL} is of type {algorithm}, expected BPE: llama.cpp would cut texts otherwise")
    if model.maps or model.trims:
        setting = "replaces characters" if model.maps else "removes spaces"
        raise files.unsupported(f"{MODEL} {setting} before it cuts a text, which llama.cpp does not do")
    scored = Vocabulary("llama", rows)
    for number, piece in enumerate(model.pieces):
        scored.put(number, piece.text, NORMAL if piece.type == USER_DEFINED else piece.type, piece.score)
    return _with_added(files, scored, None if model.add_prefix else False)


def _from_merges(files: TokenizerFiles, content: Mapping[str, Any], rows: int) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.json`` that was made from SentencePiece: scores fall with the merge."""
    vocab, merges = _vocab(files, content["model"]), list(_pairs(files, content["model"]))
    scored = Vocabulary("llama", rows)
    ranks: dict[str, int] = {}
    last = ""
    for rank, (left, right) in enumerate(merges):
        text = left + right
        if text in ranks and text != last:
            raise files.unsupported(f"{JSON}: merges of {show(text)} stand apart, so scores cannot express them")
        ranks.setdefault(text, rank)
        last = text
    pairs = {*merges}
    for text in ranks:
        if text not in vocab:
            raise files.fault(JSON, f"a merge forms {show(text)}, which model.vocab does not have")
        if len(text) > MAX_MERGED:
            raise files.fault(JSON, f"token {vocab[text]} has {len(text):,} characters, too many to merge")
        for pair in ((text[:cut], text[cut:]) for cut in range(1, len(text))):
            if pair not in pairs and all(part in vocab and (len(part) == 1 or part in ranks) for part in pair):
                parts = " and ".join(map(show, pair))
                text = f"{JSON}: {parts} form a token without a merge, so scores cannot express its merges; add {MODEL}"
                raise files.unsupported(text)
    unknown = content["model"].get("unk_token")
    for text, number in vocab.items():
        kind = BYTE if _is_byte(text) else UNKNOWN if text == unknown else NORMAL
        scored.put(number, text, kind, -1.0 - ranks[text] if text in ranks else 0.0)
    for token in files.added_in_json:
        if token.text != unknown:
            scored.add(token)
    return _with_added(files, scored, _space_prefix(files, content))


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _gemma4(files: TokenizerFiles, rows: int) -> Vocabulary:
    """Return the vocabulary of Gemma 4: merges of characters as in byte-level BPE, with SentencePiece's spaces."""
    content = files.json
    if content is None:
        raise files.unsupported(f"{JSON} does not exist, but llama.cpp needs it")
    model = _bpe(files, content)
    if model.get("byte_fallback") is not True or _space_prefix(files, content):
        raise files.unsupported(f"{JSON} puts a space before texts, or has no bytes for unknown characters")
    result, vocab, special = Vocabulary("gemma4", rows), _vocab(files, model), _special_texts(files.config or {})
    result.pre, result.add_space_prefix = None, False
    added = {token.text: token.id for token in (*files.added_elsewhere, *files.added_in_json)}
    for text, number in {**added, **vocab}.items():
        if number >= rows:
            raise files.fault(JSON, f"token {show(text)} has the id {number}, but the embedding has {rows} rows")
        kind = CONTROL if text in special else NORMAL if text in vocab else USER_DEFINED
        visible = text in _VISIBLE  # chat templates need it in texts
        result.put(number, text, BYTE if _is_byte(text) else USER_DEFINED if visible else kind, _ADDED_SCORE)
    result.merges = _spaced(_pairs(files, model))
    return result


def _special_texts(config: Mapping[str, Any]) -> set[str | None]:
    """Return the tokens that a ``tokenizer_config.json`` names, or that its class names if it does not."""
    named = dict.fromkeys(("bos", "eos", "unk", "pad", "mask")) if "Gemma" in str(config.get("tokenizer_class")) else {}
    entries = [config.get(f"{kind}_token", f"<{kind}>") for kind in named]
    entries += [value for key, value in config.items() if key.endswith("_token")]
    for key in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
        more = config.get(key)
        entries += more.values() if isinstance(more, Mapping) else more if isinstance(more, list) else ()
    return {*map(_text, entries)}


def _with_added(files: TokenizerFiles, scored: Vocabulary, space_prefix: bool | None) -> Vocabulary:
    for token in files.added_elsewhere:
        scored.add(token)
    rows = len(scored.texts)
    for token in files.added_in_json:  # llama.cpp's converter reads these for some models only
        if token.id >= rows or (scored.types[token.id] == UNUSED and scored.texts[token.id] != token.text):
            scored.add(token)
    if scored.beyond:
        beyond = plural(scored.beyond, "token")
        warning("%s: %s beyond the %d rows of the embedding left out", files.folder.shown, beyond, rows)
    stated = (files.config or {}).get("add_prefix_space")
    scored.add_space_prefix = stated if space_prefix is None and isinstance(stated, bool) else space_prefix
    return scored


def _space_prefix(files: TokenizerFiles, content: Mapping[str, Any]) -> bool:
    """Return True if a text begins with a space, and refuse normalizers that llama.cpp does not have."""
    prefix, replaces = False, False
    for step in _steps(content.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step.get("type") == "Replace" and step.get("content") == SPACE and _is_at_spaces(step):
            replaces = True
        else:
            raise files.unsupported(f"{JSON} has a normalizer {show(step.get('type'))}, which llama.cpp does not have")
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("replacement") == SPACE:
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            if step.get("split", True) is True:
                raise files.unsupported(f"{JSON} cuts texts at spaces, which llama.cpp does not do")
            prefix, replaces = prefix or scheme != "never", True
        elif not (step.get("type") == "Split" and _is_at_spaces(step) and replaces):  # finds no space any more
            raise files.unsupported(
                f"{JSON} has a pre-tokenizer {show(step.get('type'))}, which llama.cpp does not have"
            )
    if not replaces:
        raise files.unsupported(f"{JSON} does not write spaces as {SPACE}")
    return prefix


def _is_at_spaces(step: Mapping[str, Any]) -> bool:
    return object_at(step, "pattern").get("String") == " "


def _steps(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer; a step that is no object has no type."""
    if step is None:
        return
    nested = step.get(inner) if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    for item in nested if isinstance(nested, (list, tuple)) else [{}]:
        yield item if isinstance(item, dict) else {}


# ---- byte-level BPE and WordPiece ----


def _unscored(kind: str, files: TokenizerFiles, model: Mapping[str, Any], rows: int) -> Vocabulary:
    """Return a vocabulary without scores, with the pre-tokenizer that the token ids of the probe text show, or None."""
    result = Vocabulary(kind, rows)
    tokens = (*_vocab(files, model).items(), *((token.text, token.id) for token in files.added_in_json))
    for text, number in tokens:
        if number >= rows:
            raise files.fault(JSON, f"token {show(text)} has the id {number}, but the embedding has {rows} rows")
        result.put(number, text, NORMAL)
    ids, decoded = _by_library(files, [token.text for token in files.added_in_json if not token.normalized])
    parts = iter(decoded)
    for token in files.added_in_json:
        result.add(token if token.normalized else token._replace(text=next(parts)))
    result.pre = pre_tokenizers()["by_hash"].get(hashlib.sha256(str(ids).encode()).hexdigest())
    return result


def _word_pieces(files: TokenizerFiles, rows: int) -> Vocabulary:
    """Return a vocabulary of WordPiece; in llama.cpp beginnings of words have a space, and the rest has no "##"."""
    if files.json is None:
        raise files.unsupported(f"{JSON} does not exist, but llama.cpp needs it: write it with transformers")
    model, (normalizer,) = object_at(files.json, "model"), _only(files, "normalizer", "normalizers", "BertNormalizer")
    if model.get("type") != "WordPiece" or model.get("continuing_subword_prefix") != "##":
        algorithm = f"{show(model.get('type'))} with the prefix {show(model.get('continuing_subword_prefix'))}"
        raise files.unsupported(f"{JSON} has a model of type {algorithm}, expected 'WordPiece' with '##'")
    _only(files, "pre_tokenizer", "pretokenizers", "BertPreTokenizer")
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key) is not True:
            raise files.unsupported(f"{JSON} has {key} {show(normalizer.get(key))}, but llama.cpp has true")
    result = _unscored("bert", files, model, rows)
    result.pre = result.pre or "default"  # unused
    for k, (text, kind) in enumerate(zip(result.texts, result.types, strict=True)):
        if kind != CONTROL:
            result.texts[k] = text[2:] if text.startswith("##") else SPACE + text
    return result


def _only(files: TokenizerFiles, key: str, inner: str, expected: str) -> list[Mapping[str, Any]]:
    """Return the only step, which must be of a type."""
    steps = list(islice(_steps((files.json or {}).get(key), inner), _MOST_STEPS))
    if [step.get("type") for step in steps] != [expected]:
        types = ", ".join(show(step.get("type")) for step in steps) or "none"
        raise files.unsupported(f"{JSON} has the {key} {types}, but llama.cpp has {expected}")
    return steps


def _byte_level(files: TokenizerFiles, content: Mapping[str, Any], rows: int) -> Vocabulary:
    model = content["model"]
    for step in _steps(content.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":
            raise files.unsupported(f"{JSON} has a normalizer {show(step.get('type'))}, which llama.cpp does not have")
    result = _unscored("gpt2", files, model, rows)
    if result.pre is None:  # llama.cpp's name by the steps of the pre-tokenizer
        steps, ignore_merges = _cuts(content.get("pre_tokenizer")), model.get("ignore_merges") is True
        choices = (row for row in pre_tokenizers()["by_steps"] if row["ignore_merges"] == ignore_merges)
        result.pre = next((row["name"] for row in choices if _cuts({"type": "Sequence", **row}) == steps), None)
        result.by_steps = True
    if result.pre is None:
        raise files.unsupported(f"{JSON} has a pre-tokenizer that llama.cpp does not have, or safeload does not know")
    result.merges = _spaced(_pairs(files, model))
    return result


def _spaced(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [" ".join(part.replace(" ", _BYTE_SPACE) for part in pair) for pair in pairs]


def _by_library(files: TokenizerFiles, texts: list[str]) -> tuple[list[int], list[str]]:
    """Return the ids of the probe text, and texts after they are encoded and decoded, by the library tokenizers."""
    tokenizers = needed("tokenizers", f"{JSON} needs the library tokenizers")
    try:
        library = tokenizers.Tokenizer.from_str((files.content(JSON) or b"").decode())
        ids = (library.encode(text, add_special_tokens=False).ids for text in texts)
        decoded = [library.decode(each, skip_special_tokens=False) for each in ids]
        return library.encode(pre_tokenizers()["probe_text"], add_special_tokens=True).ids, decoded
    except (KeyboardInterrupt, SystemExit, MemoryError, SafeloadError, OSError):
        raise
    except BaseException as error:  # it is written in Rust, and panics are not Exceptions
        raise files.fault(JSON, f"the library tokenizers refuses it: {show(str(error))[1:-1]}") from None


def _vocab(files: TokenizerFiles, model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise files.fault(JSON, "model.vocab must be an object")
    for text, number in vocab.items():
        if type(number) is not int or not 0 <= number < MAX_PIECES:
            raise files.fault(JSON, f"token {show(text)} has the id {show(number)}")
    if len(set(vocab.values())) < len(vocab):
        raise files.fault(JSON, "two tokens of model.vocab have the same id")
    return vocab


def _pairs(files: TokenizerFiles, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise files.fault(JSON, "model.merges must be a list")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise files.fault(JSON, f"invalid merge {show(merge)}")
        yield pair[0], pair[1]


# ---- tekken.json ----

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# Characters that stand for bytes in byte-level BPE, by the character of latin-1: a byte that prints stands for itself.
_LETTERS = {byte: byte for byte in _PRINTED} | {
    byte: 0x100 + k for k, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTED)
}


def _tekken_keys(files: TokenizerFiles, content: Mapping[str, Any], rows: int) -> dict[str, Any]:
    settings, table = object_at(content, "config"), pre_tokenizers()["tekken"]
    row = next(row for row in pre_tokenizers()["by_steps"] if row["name"] == "tekken")
    if settings.get("pattern") != row["pretokenizers"][0]["pattern"]["Regex"]:
        raise files.unsupported(f"{TEKKEN} has a pattern that llama.cpp does not have, or safeload does not know")
    size, count = settings.get("default_vocab_size"), settings.get("default_num_special_tokens")
    if size != rows or type(count) is not int or not 0 <= count <= rows:
        raise files.fault(TEKKEN, f"{show(size)} tokens, {show(count)} of them special; the embedding has {rows} rows")
    special = content.get("special_tokens")
    if special is None:  # in old versions
        special = [{"rank": k, "token_str": text} for k, text in enumerate(table["special"])]
    ranks: dict[bytes, int] = {}
    result = Vocabulary("gpt2", rows)
    for number in range(count):
        result.put(number, f"<SPECIAL_{number}>", CONTROL)
    for number, text in _ranked(files, special, "token_str", count):
        result.put(number, text, CONTROL)
    for rank, text in _ranked(files, content.get("vocab"), "token_bytes", rows - count):
        try:
            token = b64decode(text, validate=True)
        except ValueError:
            raise files.fault(TEKKEN, f"token {rank} is not base64: {show(text)}") from None
        if not 0 < len(token) <= MAX_MERGED:
            raise files.fault(TEKKEN, f"token {rank} has {len(token):,} bytes, expected 1 to {MAX_MERGED:,}")
        ranks[token] = rank
        result.put(count + rank, token.decode("latin-1").translate(_LETTERS), NORMAL)
    different = len({*result.texts[:count]}) + len(ranks)
    if different != rows:
        raise files.fault(TEKKEN, f"expected {rows} different tokens, got {different}")
    result.pre, result.merges = "tekken", []
    for token in ranks:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = sorted((ranks[left], ranks[right]) for left, right in cuts if left in ranks and right in ranks)
        if not pairs and len(token) > 1:
            raise files.fault(TEKKEN, f"token {ranks[token]} does not consist of two tokens")
        result.merges += (f"{result.texts[count + left]} {result.texts[count + right]}" for left, right in pairs)
    ids = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>", "padding": "<pad>"}
    missing = [text for text in ids.values() if text not in result.texts[:count]]
    if missing:
        raise files.fault(TEKKEN, f"no special token {show(missing[0])}")
    keys = {f"{kind}_token_id": gguf.U32(result.texts.index(text)) for kind, text in ids.items()}
    keys |= {"scores": np.zeros(rows, np.int32), "add_bos_token": True, "add_eos_token": False}  # i32 as in llama.cpp
    named = table["templates"].get(settings.get("version"))  # of a template in llama.cpp
    templates = dict(_templates(files)) or ({"tokenizer.chat_template": named} if named is not None else {})
    return {**result.keys(), **{f"{PREFIX}{key}": value for key, value in keys.items()}, **templates}


def _ranked(files: TokenizerFiles, items: Any, key: str, count: int) -> Iterator[tuple[int, str]]:
    """Yield ranks and texts of at most so many tokens, which are in order."""
    if not isinstance(items, list):
        raise files.fault(TEKKEN, "vocab and special_tokens must be lists")
    for rank, item in enumerate(islice(items, count)):
        text = item.get(key) if isinstance(item, dict) and item.get("rank") == rank else None
        if not isinstance(text, str):
            raise files.fault(TEKKEN, f"token {rank} must have its rank and a {key}, got {show(item)}")
        yield rank, text


# ---- pre-tokenizers ----

pre_tokenizers = partial(read_data, __name__, "pre_tokenizers.json")


def _cuts(pre_tokenizer: Any) -> list[tuple[Any, ...] | None]:
    """Return the rule of each step for splitting words; None for an unknown step."""
    return [_cut(step) for step in islice(_steps(pre_tokenizer, "pretokenizers"), _MOST_STEPS)]


def _cut(step: Mapping[str, Any]) -> tuple[Any, ...] | None:
    kind = step.get("type")
    if kind == "ByteLevel" and step.get("add_prefix_space") is False:
        return kind, step.get("use_regex", True) is not False
    if kind == "Digits":
        return kind, step.get("individual_digits") is True
    if kind == "Punctuation":
        return kind, step.get("behavior", "Isolated")
    if kind == "Split" and isinstance(step.get("pattern"), Mapping):
        # Matches are words of their own; without gaps, removing the gaps does the same.
        isolated = step.get("behavior") == "Isolated" and not step.get("invert")
        if isolated or (step.get("behavior") == "Removed" and step.get("invert") is True):
            return kind, step["pattern"].get("Regex")
    return None


# ---- special tokens ----

# Types of special tokens, with the words of llama.cpp's keys.
TYPES = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls", "mask": "mask",
    "eot": "eot", "eom": "eom",
}  # fmt: skip
USUAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Flags of llama.cpp: whether a text gets this token.
_FLAGS = ("bos", "eos", "sep")
_MOST_PROCESSORS = 16


def special_keys(files: TokenizerFiles, config: ModelConfig, texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the metadata keys of special tokens among ``texts``: ids, flags and chat templates."""
    tokens, adds, types = dict(files.config or {}), dict[str, bool](), [*USUAL]
    if files.json is not None:
        _read_processor(files, files.json.get("post_processor"), tokens, adds, types)
    ids: dict[str, int] = {}

    def put(kind: str, number: Any) -> None:
        if type(number) is int and kind not in ids and 0 <= number < len(texts):
            ids[kind] = number

    numbers: dict[str | None, int] = {token.text: token.id for token in reversed(files.added_in_json)}
    for kind in types:
        flag = tokens.get(f"add_{kind}_token")
        if isinstance(flag, bool):
            adds.setdefault(kind, flag)
        put(kind, numbers.get(_text(tokens.get(f"{kind}_token"))))
    for kind in types:
        key = f"{kind}_token_id"
        put(kind, config.values.get(key) if config.whole.get(key) is None else config.whole[key])
    if files.json is None:
        numbers = {text: number for number, text in enumerate(texts)}
        for kind in USUAL:
            number = numbers.get(_text(tokens.get(f"{kind}_token")))
            if number != USUAL_IDS.get(kind):  # llama.cpp assumes the usual number
                put(kind, number)
    ids.pop("cls", None)  # llama.cpp takes the first token for it
    yield from ((f"{PREFIX}{TYPES[kind]}_token_id", gguf.U32(number)) for kind, number in ids.items())
    yield from ((f"{PREFIX}add_{kind}_token", flag) for kind, flag in adds.items() if kind in _FLAGS)
    yield from _templates(files)


def _read_processor(
    files: TokenizerFiles, processor: Any, tokens: dict[str, Any], adds: dict[str, bool], types: list[str]
) -> None:
    """Read which tokens the post-processor of ``tokenizer.json`` adds to a text."""
    for kind, other in (("bos", "cls"), ("eos", "sep")):
        if not tokens.get(f"{kind}_token") and tokens.get(f"{other}_token"):
            tokens[f"{kind}_token"] = tokens[f"{other}_token"]
    if processor is None:
        return
    if not isinstance(processor, dict):
        raise files.fault(JSON, f"post_processor must be an object, got {show(processor)}")
    inner = processor.get("processors", [processor])
    for step in inner[:_MOST_PROCESSORS] if isinstance(inner, list) else [None]:
        name = step.get("type") if isinstance(step, dict) else None
        if name == "ByteLevel":
            adds.setdefault("bos", False)
            adds.setdefault("eos", False)
        elif isinstance(step, dict) and name == "TemplateProcessing":
            _read_template(step, tokens, adds, None if files.config is None else types)
        else:
            raise files.unsupported(f"{JSON} has a post-processor {show(name)}, which is unknown")


def _read_template(step: Any, tokens: dict[str, Any], adds: dict[str, bool], types: list[str] | None) -> None:
    """Read the tokens before and after a text, and between two; without a ``tokenizer_config.json`` types are None."""
    single, pair = _pieces(step.get("single")), _pieces(step.get("pair"))
    bos, eos, cls, sep = (_text(tokens.get(f"{kind}_token")) for kind in ("bos", "eos", "cls", "sep"))
    first = single[0][1] if len(single) > 1 and single[0][0] == "SpecialToken" else None
    last = single[-1][1] if len(single) > 1 and single[-1][0] == "SpecialToken" else None
    if first is not None:
        if types is None:
            bos = first
        elif first not in (bos, cls):
            bos, cls = bos or first, cls or first
            tokens["bos_token"], tokens["cls_token"] = bos, cls
        adds["bos"] = first in (bos, cls)
    if last is not None:
        if types is not None and last != eos:
            for kind in [kind for kind in ("eot", "eom") if kind not in types][:1]:
                types.append(kind)
                tokens[f"{kind}_token"] = eos
            tokens["eos_token"] = last
        eos = last
        adds["eos"] = True
    begin, end = pair[:1] == [("SpecialToken", first)], len(pair) - (pair[-1:] == [("SpecialToken", last)])
    inner = pair[begin:end]
    if len(inner) < 3 or inner[0] != ("Sequence", "A") or inner[-1] != ("Sequence", "B"):
        return
    middle = inner[1:-1]
    separates = [kind == "SpecialToken" and text in (sep, eos) for kind, text in middle[:2]]
    adds["sep"] = (separates[0] and last is None) or (len(middle) == 2 and separates[1])
    if adds["sep"] and not tokens.get("sep_token") and types is not None:
        tokens["sep_token"] = eos


def _templates(files: TokenizerFiles) -> Iterator[tuple[str, Any]]:
    """Yield the chat template, or several by name."""
    content = files.content(TEMPLATE)
    template: Any = None
    if content is not None:
        try:
            template = content.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{TEMPLATE} is not UTF-8: {error.reason}", files.folder.shown) from None
    elif (old := files.content(OLD_TEMPLATE)) is not None:
        template = parse_json(old, OLD_TEMPLATE, files.folder.shown).get("chat_template")
    template = (files.config or {}).get("chat_template", template)
    if isinstance(template, str):
        yield "tokenizer.chat_template", template
    elif isinstance(template, list):
        named = {}
        for item in template:
            name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(text, str):
                raise files.fault(CONFIG, f"invalid chat_template {show(item)}")
            named["".join(c for c in name if c.isascii() and (c.isalnum() or c == "_"))] = text
        if "default" in named:
            yield "tokenizer.chat_template", named.pop("default")
        if named:
            yield "tokenizer.chat_templates", list(named)
        yield from ((f"tokenizer.chat_template.{name}", text) for name, text in named.items())


def _text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def _pieces(template: Any) -> list[tuple[str, str]]:
    """Return kind and id of the pieces of a template."""
    items, kinds = template if isinstance(template, list) else [], ("SpecialToken", "Sequence")
    pieces = ((kind, object_at(item, kind).get("id")) for item in items for kind in kinds)
    return [(kind, name) for kind, name in pieces if isinstance(name, str)]


def skeleton(files: TokenizerFiles) -> dict[str, str]:
    """Return the settings that the way back needs and the metadata lacks: JSON by file of the tokenizer."""
    parts: dict[str, str] = {}
    if files.json is not None:
        model, added = object_at(files.json, "model"), {token.text for token in files.added_in_json}
        inner = {key: value for key, value in model.items() if key != "merges"}
        inner["vocab"] = {text: k for text, k in object_at(model, "vocab").items() if text in added}
        parts[JSON] = json.dumps({**files.json, "model": inner}, ensure_ascii=False)
    if files.config is not None:
        parts[CONFIG] = json.dumps(files.config, ensure_ascii=False)
    return parts
