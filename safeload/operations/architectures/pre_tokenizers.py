"""llama.cpp's names of the ways to cut a text into words before byte pairs are merged (``pre_tokenizers.json``).

A name is chosen by the token ids of a test text, which tell published vocabularies apart, or else by the pre-tokenizer
in ``tokenizer.json`` and its ``ignore_merges``: true if whole words are tokens whatever the merges are. The keys of
``by_hash`` are SHA-256 of the list of token ids, as Python writes it. Sources: llama.cpp, conversion/base.py (hashes,
2026-11) and src/llama-vocab.cpp (expressions).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ...base.data import read_data

# Steps of published tokenizers are at most this many.
_MOST_STEPS = 16


def _data() -> dict[str, Any]:
    return read_data(__name__, "pre_tokenizers.json")


def probe_text() -> str:
    """Return the text to encode for `name_of`."""
    text: str = _data()["probe_text"]
    return text


def name_of(ids: list[int], pre_tokenizer: Any, ignore_merges: bool) -> str | None:
    """Return the name for the token ids of `probe_text`, or else for the pre-tokenizer of a ``tokenizer.json``."""
    name: str | None = _data()["by_hash"].get(hashlib.sha256(str(ids).encode()).hexdigest())
    if name is not None:
        return name
    steps = _steps(pre_tokenizer)
    rows = (row for row in _data()["by_steps"] if row["ignore_merges"] == ignore_merges)
    return next((row["name"] for row in rows if _steps({"type": "Sequence", **row}) == steps), None)


def steps_of(name: str) -> tuple[dict[str, Any], bool] | None:
    """Return the pre-tokenizer with this name, and ``ignore_merges``; None if it is unknown."""
    for row in _data()["by_steps"]:
        if row["name"] == name:
            return {"type": "Sequence", "pretokenizers": [*row["pretokenizers"]]}, row["ignore_merges"]
    return None


def _steps(pre_tokenizer: Any) -> list[tuple[Any, ...] | None]:
    """Return what decides about words in each step; None for an unknown step."""
    steps = [pre_tokenizer]
    if isinstance(pre_tokenizer, Mapping) and pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer.get("pretokenizers") or [None]
    return [_step(step) for step in steps[:_MOST_STEPS]] if isinstance(steps, (list, tuple)) else [None]


def _step(step: Any) -> tuple[Any, ...] | None:
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
