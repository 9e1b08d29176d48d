"""Special tokens and the chat template of a model, as llama.cpp's converter derives them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...base.text import show
from ...errors import FormatError
from ...formats.gguf import values
from ...stores.json_file import parse_json
from .sentencepiece import USUAL_IDS
from .settings import ModelConfig
from .tokenizer import CONFIG, JSON, OLD_TEMPLATE, TEMPLATE, TokenizerFiles, Vocabulary

# Types of special tokens, with the words of llama.cpp's keys.
TYPES = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls", "mask": "mask",
    "eot": "eot", "eom": "eom",
}  # fmt: skip
USUAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Flags of llama.cpp: whether a text gets this token.
_FLAGS = ("bos", "eos", "sep")
_MOST_PROCESSORS = 16


class SpecialTokens:
    """The ids and flags of special tokens."""

    def __init__(self, files: TokenizerFiles, config: ModelConfig, vocabulary: Vocabulary) -> None:
        self._files = files
        self._size = len(vocabulary.texts)
        self._ids: dict[str, int] = {}
        self._adds: dict[str, bool] = {}
        self._types = list(USUAL)
        self._config = dict(files.config or {})
        if files.json is not None:
            self._read_processor(files.json.get("post_processor"))
        if files.config is not None:
            numbers: dict[str | None, int] = {token.text: token.id for token in reversed(files.added_in_json)}
            for kind in self._types:
                flag = self._config.get(f"add_{kind}_token")
                if isinstance(flag, bool):
                    self._adds.setdefault(kind, flag)
                self._set(kind, numbers.get(_text(self._config.get(f"{kind}_token"))))
        for kind in self._types:
            self._set(kind, config.values.get(f"{kind}_token_id"))
        if files.json is None:
            numbers = {text: number for number, text in enumerate(vocabulary.texts)}
            for kind in USUAL:
                number = numbers.get(_text(self._config.get(f"{kind}_token")))
                if number != USUAL_IDS.get(kind):  # llama.cpp assumes that one
                    self._set(kind, number)

    def keys(self) -> Iterator[tuple[str, Any]]:
        """Yield the metadata keys."""
        for kind, number in self._ids.items():
            yield f"tokenizer.ggml.{TYPES[kind]}_token_id", values.U32(number)
        for kind, flag in self._adds.items():
            if kind in _FLAGS:
                yield f"tokenizer.ggml.add_{kind}_token", flag
        yield from self._templates()

    def _set(self, kind: str, number: Any) -> None:
        whole = isinstance(number, int) and not isinstance(number, bool)
        if whole and kind not in self._ids and 0 <= number < self._size:
            self._ids[kind] = number

    def _read_processor(self, processor: Any) -> None:
        """Read which tokens the post-processor of ``tokenizer.json`` adds to a text."""
        tokens = self._config
        for kind, other in (("bos", "cls"), ("eos", "sep")):
            if not tokens.get(f"{kind}_token") and tokens.get(f"{other}_token"):
                tokens[f"{kind}_token"] = tokens[f"{other}_token"]
        if processor is None:
            return
        if not isinstance(processor, dict):
            raise self._files.fault(JSON, f"post_processor must be an object, got {show(processor)}")
        inner = processor.get("processors", [processor])
        for step in inner[:_MOST_PROCESSORS] if isinstance(inner, list) else [None]:
            name = step.get("type") if isinstance(step, dict) else None
            if name == "ByteLevel":
                self._adds.setdefault("bos", False)
                self._adds.setdefault("eos", False)
            elif name == "TemplateProcessing":
                assert isinstance(step, dict)
                self._read_template(_pieces(step.get("single")), _pieces(step.get("pair")))
            else:
                raise self._files.unsupported(f"{JSON} has a post-processor {show(name)}, which is unknown")

    def _read_template(self, single: list[tuple[str, str]], pair: list[tuple[str, str]]) -> None:
        """Read the tokens before and after a text, and between two texts."""
        tokens = self._config
        known = self._files.config is not None
        bos, eos, first, last = _text(tokens.get("bos_token")), _text(tokens.get("eos_token")), None, None
        cls, sep = _text(tokens.get("cls_token")), _text(tokens.get("sep_token"))
        if len(single) > 1 and single[0][0] == "SpecialToken":
            first = single[0][1]
            if not known:
                bos = first
            elif first not in (bos, cls):
                bos, cls = bos or first, cls or first
                tokens["bos_token"], tokens["cls_token"] = bos, cls
            self._adds["bos"] = first in (bos, cls)
        if len(single) > 1 and single[-1][0] == "SpecialToken":
            last = single[-1][1]
            if known and last != eos:
                for kind in [kind for kind in ("eot", "eom") if kind not in self._types][:1]:
                    self._types.append(kind)
                    tokens[f"{kind}_token"] = eos
                tokens["eos_token"] = last
            eos = last
            self._adds["eos"] = True
        begin = 1 if first is not None and pair[:1] == [("SpecialToken", first)] else 0
        end = len(pair) - 1 if last is not None and pair[-1:] == [("SpecialToken", last)] else len(pair)
        inner = pair[begin:end]
        if len(inner) < 3 or inner[0] != ("Sequence", "A") or inner[-1] != ("Sequence", "B"):
            return
        middle = inner[1:-1]
        separates = [kind == "SpecialToken" and text in (sep, eos) for kind, text in middle[:2]]
        add = (separates[0] and last is None) or (len(middle) == 2 and separates[1])
        self._adds["sep"] = add
        if add and not tokens.get("sep_token") and known:
            tokens["sep_token"] = eos

    def _templates(self) -> Iterator[tuple[str, Any]]:
        """Yield the chat template, or several by name."""
        content = self._files.content(TEMPLATE)
        template: Any = None
        if content is not None:
            try:
                template = content.decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{TEMPLATE} is not UTF-8: {error.reason}", self._files.folder.shown) from None
        elif (old := self._files.content(OLD_TEMPLATE)) is not None:
            template = parse_json(old, OLD_TEMPLATE, self._files.folder.shown).get("chat_template")
        template = self._config.get("chat_template", template)
        if isinstance(template, str):
            yield "tokenizer.chat_template", template
        elif isinstance(template, list):
            named = {}
            for item in template:
                name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
                if not isinstance(name, str) or not isinstance(text, str):
                    raise self._files.fault(CONFIG, f"invalid chat_template {show(item)}")
                named["".join(c if c.isascii() and (c.isalnum() or c in "_") else "" for c in name)] = text
            if "default" in named:
                yield "tokenizer.chat_template", named.pop("default")
            if named:
                yield "tokenizer.chat_templates", list(named)
            for name, text in named.items():
                yield f"tokenizer.chat_template.{name}", text


def _text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def _pieces(template: Any) -> list[tuple[str, str]]:
    """Return kind and id of the pieces of a template."""
    pieces = []
    for item in template if isinstance(template, list) else []:
        for kind in ("SpecialToken", "Sequence"):
            inner = item.get(kind) if isinstance(item, Mapping) else None
            if isinstance(inner, Mapping) and isinstance(inner.get("id"), str):
                pieces.append((kind, inner["id"]))
    return pieces


def skeleton(files: TokenizerFiles) -> dict[str, str]:
    """Return the settings that the way back needs and the metadata lacks: JSON by file of the tokenizer."""
    parts: dict[str, str] = {}
    if files.json is not None:
        model = files.json.get("model")
        model = model if isinstance(model, dict) else {}
        vocab = model.get("vocab")
        added = {token.text for token in files.added_in_json}
        inner = {key: value for key, value in model.items() if key != "merges"}
        inner["vocab"] = {text: k for text, k in vocab.items() if text in added} if isinstance(vocab, dict) else {}
        parts[JSON] = json.dumps({**files.json, "model": inner}, ensure_ascii=False)
    if files.config is not None:
        parts[CONFIG] = json.dumps(files.config, ensure_ascii=False)
    return parts
