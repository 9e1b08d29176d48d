"""The tokenizer of a model as metadata of llama.cpp.

llama.cpp has two kinds. "llama" is SentencePiece: it merges the neighbours that form the token of the highest score.
"gpt2" is byte-level BPE: it cuts a text into words, and merges bytes in each. The files are those of transformers:

1. ``tokenizer.model``: a vocabulary of SentencePiece, see `sentencepiece`.
2. ``tokenizer.json``: the format of the library tokenizers. ``model`` has ``type`` "BPE", ``vocab`` (token to id),
   ``merges`` ("a b" or ["a", "b"], in order) and ``byte_fallback``; ``added_tokens`` has objects with ``id``,
   ``content``, ``special`` and ``normalized``.
3. ``tokenizer_config.json``, ``added_tokens.json``, ``chat_template.jinja``: see `special_tokens`.

llama.cpp has names for the ways to cut a text into words before byte pairs are merged (``pre_tokenizers.json``). A name
is chosen by the token ids of a test text, which tell published vocabularies apart, or else by the pre-tokenizer in
``tokenizer.json`` and its ``ignore_merges``: true if whole words are tokens whatever the merges are. The keys of
``by_hash`` are SHA-256 of the list of token ids, as Python writes it. Sources: llama.cpp, conversion/base.py (hashes,
2026-11) and src/llama-vocab.cpp (expressions).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...base import log
from ...base.forking import cached_property
from ...base.runtime import needed, read_data
from ...base.text import plural, show
from ...errors import FormatError, SafeloadError, UnsupportedError
from ...stores.files import Location
from ...stores.json_file import MAX_JSON, is_missing, read_if_there
from ...stores.store import read_at
from . import sentencepiece
from .sentencepiece import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED

JSON, CONFIG, MODEL = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
KEPT = "safeload.source."  # prefix of safeload's keys, before the name of a file
ADDED, TEMPLATE, OLD_TEMPLATE = "added_tokens.json", "chat_template.jinja", "chat_template.json"
SPACE = "\u2581"  # of SentencePiece
_PADDING_SCORE, _ADDED_SCORE = -10000.0, -1000.0
# Texts of tokens that are control tokens although their tokenizer does not say so.
_CONTROLS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
# GPT-2 writes a space as this character.
_BYTE_SPACE = "\u0120"
# Steps of published pre-tokenizers are at most this many.
_MOST_STEPS = 16
_ADVICE = "raw=True writes the tensors without a tokenizer"


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

    @cached_property
    def json(self) -> dict[str, Any] | None:
        """The parsed ``tokenizer.json``."""
        return self._read(JSON)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The parsed ``tokenizer_config.json``."""
        return self._read(CONFIG)

    @cached_property
    def model(self) -> sentencepiece.SentencePieceModel | None:
        """The parsed ``tokenizer.model``; None without one."""
        content = self.content(MODEL, sentencepiece.MAX_BYTES)
        return None if content is None else sentencepiece.parse(content, (self.folder / MODEL).shown)

    def _read(self, name: str) -> dict[str, Any] | None:
        return read_if_there((self.folder / name).path, name, self.folder.files)

    def content(self, name: str, limit: int = MAX_JSON) -> bytes | None:
        """Return the bytes of a file, or None if there is none."""
        place = self.folder / name
        if is_missing(place.path, place.files):
            return None
        try:
            store = place.files.open(place.path)
        except FileNotFoundError:
            return None
        except PermissionError:
            if place.files.remote:
                return None
            raise
        with closing(store):
            if store.size > limit:
                raise FormatError(f"{name} has {store.size:,} bytes, but the limit is {limit:,}", place.shown)
            return read_at(store, 0, store.size)

    @cached_property
    def added_in_json(self) -> list[AddedToken]:
        """The added tokens of ``tokenizer.json``."""
        items = (self.json or {}).get("added_tokens") or []
        if not isinstance(items, list):
            raise self.fault(JSON, "added_tokens must be a list")
        return [self._added(JSON, item.get("id") if isinstance(item, dict) else None, item) for item in items]

    @cached_property
    def added_elsewhere(self) -> list[AddedToken]:
        """The added tokens of ``added_tokens.json``, then the tokens of ``tokenizer_config.json``."""
        tokens = []
        for text, number in (self._read(ADDED) or {}).items():
            tokens.append(self._added(ADDED, number, {"content": text}))
        decoder = (self.config or {}).get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise self.fault(CONFIG, "added_tokens_decoder must be an object")
        for key, item in decoder.items():
            number = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else None
            tokens.append(self._added(CONFIG, number, item))
        return tokens

    def _added(self, name: str, number: Any, item: Any) -> AddedToken:
        text = item.get("content") if isinstance(item, dict) else None
        if isinstance(number, bool) or not isinstance(number, int) or number < 0 or not isinstance(text, str):
            raise self.fault(name, f"invalid added token {show(item)}")
        return AddedToken(number, text, item.get("special") is True, item.get("normalized") is not False)

    def fault(self, name: str, text: str) -> FormatError:
        """Return an error about a file."""
        return FormatError(f"{name}: {text}", self.folder.shown)

    def unsupported(self, text: str) -> UnsupportedError:
        """Return an error about a tokenizer that llama.cpp does not have."""
        return UnsupportedError(f"{self.folder.shown}: {text}; {_ADVICE}")


class Vocabulary:
    """The tokens of a model in llama.cpp's form, with ids up to the ``rows`` of the embedding filled up."""

    def __init__(self, kind: str, rows: int) -> None:
        self.kind, self.pre = kind, "default"  # "llama" or "gpt2"
        self.texts = [f"[PAD{k}]" for k in range(rows)]
        self.types = [UNUSED] * rows
        self.scores = [_PADDING_SCORE] * rows
        self.merges: list[str] | None = None
        self.add_space_prefix: bool | None = None  # None leaves the key out
        self.beyond = 0  # ids beyond the embedding, which are skipped

    def put(self, number: int, text: str, kind: int, score: float = 0.0) -> None:
        """Set a token."""
        if number >= len(self.texts):
            self.beyond += 1
            return
        self.texts[number], self.scores[number], self.types[number] = text, score, kind

    def add(self, token: AddedToken) -> None:
        """Set an added token, which can be a control token by its text."""
        text, fences = token.text, (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
        special = token.special or text in _CONTROLS
        if special or any(text.startswith(begin) and text.endswith(end) for begin, end in fences):
            self.put(token.id, text, CONTROL, _ADDED_SCORE)
        else:
            self.put(token.id, text.replace(SPACE, " "), USER_DEFINED, _ADDED_SCORE)

    def keys(self) -> Iterator[tuple[str, Any]]:
        """Yield the metadata keys."""
        yield "tokenizer.ggml.model", self.kind
        yield "tokenizer.ggml.pre", self.pre
        yield "tokenizer.ggml.tokens", self.texts
        if self.merges is None:
            yield "tokenizer.ggml.scores", np.array(self.scores, np.float32)
        yield "tokenizer.ggml.token_type", np.array(self.types, np.int32)
        if self.merges is not None:
            yield "tokenizer.ggml.merges", self.merges
        if self.add_space_prefix is not None:
            yield "tokenizer.ggml.add_space_prefix", self.add_space_prefix


def vocabulary_of(files: TokenizerFiles, rows: int) -> Vocabulary:
    """Return the vocabulary of a model."""
    if files.model is not None:
        return _from_pieces(files, files.model, rows)
    if files.json is None:
        raise files.unsupported(f"neither {MODEL} nor {JSON} exists, but llama.cpp needs a tokenizer")
    model = files.json.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind != "BPE":
        raise files.unsupported(f"{JSON} has a model of type {show(kind)}, expected 'BPE'")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key) not in (None, "", 0):
            raise files.unsupported(f"{JSON} has the {key} {show(model[key])}, which llama.cpp does not have")
    decoder = files.json.get("decoder")
    decodes = decoder.get("type") if isinstance(decoder, dict) else None
    if model.get("byte_fallback") is True and decodes == "Sequence":
        return _from_merges(files, model, rows)
    if decodes != "ByteLevel":
        raise files.unsupported(f"{JSON} has a decoder of type {show(decodes)}, expected 'ByteLevel' or 'Sequence'")
    return _byte_level(files, model, rows)


# ---- SentencePiece ----


def _from_pieces(files: TokenizerFiles, model: sentencepiece.SentencePieceModel, rows: int) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.model``."""
    if model.kind != sentencepiece.BPE:
        algorithm = {sentencepiece.UNIGRAM: "unigram"}.get(model.kind, str(model.kind))
        raise files.unsupported(f"{MODEL} is of type {algorithm}, expected BPE: llama.cpp would cut texts otherwise")
    if model.maps or model.trims:
        setting = "replaces characters" if model.maps else "removes spaces"
        raise files.unsupported(f"{MODEL} {setting} before it cuts a text, which llama.cpp does not do")
    scored = Vocabulary("llama", rows)
    for number, piece in enumerate(model.pieces):
        scored.put(number, piece.text, NORMAL if piece.type == USER_DEFINED else piece.type, piece.score)
    return _with_added(files, scored, None if model.add_prefix else False)


def _from_merges(files: TokenizerFiles, model: Mapping[str, Any], rows: int) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.json`` that was made from SentencePiece: scores fall with the merge."""
    vocab, merges = _vocab(files, model), list(_pairs(files, model))
    scored = Vocabulary("llama", rows)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    _check_scores(files, vocab, merges, ranks)
    unknown = model.get("unk_token")
    for text, number in vocab.items():
        byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = BYTE if byte else sentencepiece.UNKNOWN if text == unknown else NORMAL
        scored.put(number, text, kind, 0.0 if text not in ranks else -1.0 - ranks[text])
    for token in files.added_in_json:
        if token.text != unknown:
            scored.add(token)
    return _with_added(files, scored, _space_prefix(files))


def _with_added(files: TokenizerFiles, scored: Vocabulary, space_prefix: bool | None) -> Vocabulary:
    for token in files.added_elsewhere:
        scored.add(token)
    for token in files.added_in_json:  # llama.cpp's converter reads these for some models only
        beyond = token.id >= len(scored.texts)
        if beyond or (scored.types[token.id] == UNUSED and scored.texts[token.id] != token.text):
            scored.add(token)
    if scored.beyond:
        log.warning(
            "%s: %s beyond the %d rows of the embedding left out",
            files.folder.shown,
            plural(scored.beyond, "token"),
            len(scored.texts),
        )
    stated = (files.config or {}).get("add_prefix_space")
    scored.add_space_prefix = stated if space_prefix is None and isinstance(stated, bool) else space_prefix
    return scored


def _check_scores(
    files: TokenizerFiles, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], ranks: Mapping[str, int]
) -> None:
    """Refuse merges that scores cannot express."""
    pairs, last, seen = set(merges), "", set()
    for left, right in merges:
        text = left + right
        if text != last:
            if text in seen:
                raise files.unsupported(f"{JSON}: merges of {show(text)} stand apart, so scores cannot express them")
            seen.add(text)
            last = text
    for text in ranks:
        if text not in vocab:
            raise files.fault(JSON, f"a merge forms {show(text)}, which model.vocab does not have")
        if len(text) > sentencepiece.MAX_MERGED:
            raise files.fault(JSON, f"token {vocab[text]} has {len(text):,} characters, too many to merge")
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            reachable = all(part in vocab and (len(part) == 1 or part in ranks) for part in (left, right))
            if reachable and (left, right) not in pairs:
                raise files.unsupported(
                    f"{JSON}: {show(left)} and {show(right)} form a token without a merge, so scores cannot express "
                    f"its merges; add {MODEL}"
                )


def _space_prefix(files: TokenizerFiles) -> bool:
    """Return True if a text begins with a space, and refuse normalizers that llama.cpp does not have."""
    assert files.json is not None
    prefix, replaces = False, False
    for step in _steps(files.json.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step.get("type") == "Replace" and step.get("content") == SPACE and _literal(step) == " ":
            replaces = True
        else:
            raise files.unsupported(f"{JSON} has a normalizer {show(step.get('type'))}, which llama.cpp does not have")
    for step in _steps(files.json.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("replacement") == SPACE and not replaces:
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            if step.get("split", True) is True:
                raise files.unsupported(f"{JSON} cuts texts at spaces, which llama.cpp does not do")
            prefix, replaces = prefix or scheme != "never", True
        elif not (step.get("type") == "Split" and _literal(step) == " " and replaces):  # finds no space any more
            raise files.unsupported(
                f"{JSON} has a pre-tokenizer {show(step.get('type'))}, which llama.cpp does not have"
            )
    if not replaces:
        raise files.unsupported(f"{JSON} does not write spaces as {SPACE}")
    return prefix


def _literal(step: Mapping[str, Any]) -> Any:
    pattern = step.get("pattern")
    return pattern.get("String") if isinstance(pattern, dict) else None


def _steps(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer; a step that is no object has no type."""
    if step is None:
        return
    nested = step.get(inner) if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    for item in nested if isinstance(nested, list) else [{}]:
        yield item if isinstance(item, dict) else {}


# ---- byte-level BPE ----


def _byte_level(files: TokenizerFiles, model: Mapping[str, Any], rows: int) -> Vocabulary:
    assert files.json is not None
    vocab = _vocab(files, model)
    for step in _steps(files.json.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":
            raise files.unsupported(f"{JSON} has a normalizer {show(step.get('type'))}, which llama.cpp does not have")
    result = Vocabulary("gpt2", rows)
    for text, number in (*vocab.items(), *((token.text, token.id) for token in files.added_in_json)):
        if number >= rows:
            raise files.fault(JSON, f"token {show(text)} has the id {number}, but the embedding has {rows} rows")
        result.put(number, text, NORMAL)
    ids, decoded = _by_library(files, [token.text for token in files.added_in_json if not token.normalized])
    parts = iter(decoded)
    for token in files.added_in_json:
        result.add(token if token.normalized else token._replace(text=next(parts)))
    pre = _name_of(ids, files.json.get("pre_tokenizer"), model.get("ignore_merges") is True)
    if pre is None:
        raise files.unsupported(f"{JSON} has a pre-tokenizer that llama.cpp does not have, or safeload does not know")
    result.pre = pre
    result.merges = [" ".join(part.replace(" ", _BYTE_SPACE) for part in pair) for pair in _pairs(files, model)]
    return result


def _by_library(files: TokenizerFiles, texts: list[str]) -> tuple[list[int], list[str]]:
    """Return the ids of the probe text, and texts after they are encoded and decoded, by the library tokenizers."""
    tokenizers = needed("tokenizers", f"{JSON} needs the library tokenizers")
    try:
        library = tokenizers.Tokenizer.from_str((files.content(JSON) or b"").decode())
        decoded = []
        for text in texts:
            ids = library.encode(text, add_special_tokens=False).ids
            decoded.append(library.decode(ids, skip_special_tokens=False))
        return library.encode(_pre_tokenizers()["probe_text"], add_special_tokens=True).ids, decoded
    except (KeyboardInterrupt, SystemExit, MemoryError, SafeloadError, OSError):
        raise
    except BaseException as error:  # it is written in Rust, and panics are not Exceptions
        raise files.fault(JSON, f"the library tokenizers refuses it: {show(str(error))[1:-1]}") from None


def _vocab(files: TokenizerFiles, model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise files.fault(JSON, "model.vocab must be an object")
    for text, number in vocab.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < sentencepiece.MAX_PIECES:
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


# ---- pre-tokenizers ----

_pre_tokenizers = partial(read_data, __name__, "pre_tokenizers.json")


def _name_of(ids: list[int], pre_tokenizer: Any, ignore_merges: bool) -> str | None:
    """Return llama.cpp's name by the token ids of the probe text, or else by a ``tokenizer.json``."""
    name: str | None = _pre_tokenizers()["by_hash"].get(hashlib.sha256(str(ids).encode()).hexdigest())
    if name is not None:
        return name
    steps = _cuts(pre_tokenizer)
    rows = (row for row in _pre_tokenizers()["by_steps"] if row["ignore_merges"] == ignore_merges)
    return next((row["name"] for row in rows if _cuts({"type": "Sequence", **row}) == steps), None)


def pre_tokenizer_named(name: str) -> tuple[dict[str, Any], bool] | None:
    """Return the pre-tokenizer with this name, and ``ignore_merges``; None if it is unknown."""
    row = next((row for row in _pre_tokenizers()["by_steps"] if row["name"] == name), None)
    if row is None:
        return None
    return {"type": "Sequence", "pretokenizers": [*row["pretokenizers"]]}, row["ignore_merges"]


def _cuts(pre_tokenizer: Any) -> list[tuple[Any, ...] | None]:
    """Return what decides about words in each step; None for an unknown step."""
    steps = [pre_tokenizer]
    if isinstance(pre_tokenizer, Mapping) and pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer.get("pretokenizers") or [None]
    return [_cut(step) for step in steps[:_MOST_STEPS]] if isinstance(steps, (list, tuple)) else [None]


def _cut(step: Any) -> tuple[Any, ...] | None:
    kind = step.get("type") if isinstance(step, Mapping) else None
    if kind == "ByteLevel" and step.get("add_prefix_space") is False:
        return kind, step.get("use_regex", True) is not False
    if kind == "Digits" and step.get("individual_digits") is True:
        return (kind,)
    if kind == "Split" and isinstance(step.get("pattern"), Mapping):
        # Matches are words of their own; without gaps, removing the gaps does the same.
        isolated = step.get("behavior") == "Isolated" and not step.get("invert")
        if isolated or (step.get("behavior") == "Removed" and step.get("invert") is True):
            return kind, step["pattern"].get("Regex")
    return None
