"""How llama.cpp has a family: the field ``gguf`` of its file, in both directions.

- ``architecture``: in metadata. ``chosen_by``: the family has files of the architecture with a number at this key.
- ``keys``: metadata keys without the architecture, each with the ``types`` that llama.cpp accepts, of which the first
  is written; the keys of ``config`` that hold the value, in order of preference; a ``default``; and ``optional``.
- ``required``: keys without which llama.cpp refuses a file, beyond `REQUIRED`.
- ``tensors``: in files of llama.cpp, by name, as the tensors of `safeload.models.schema` are written. In shapes, keys
  have underscores instead of dots: ``llama.attention.head_count`` is ``attention_head_count``. ``from``: the published
  tensor, or an object of published tensors with their layouts, the fields of `GgufLayout`. ``defaults``: of sizes.
- ``assumes``: values of config keys that llama.cpp computes with; null for an absent key. ``restores``: those of them
  that a config made from a file names. ``activations``: the ``values`` of the ``config`` keys that it has.
- ``windows``: ``full_every``, the distance of layers without a sliding window; or ``ignored``, true if llama.cpp
  attends to all positions. ``query_scale_by_width``: layers of the model that it scales by the width of a head.
- ``rope``: the fields of `GgufRope`. ``tied``: true if llama.cpp has no head of its own. ``add_space_prefix``: false if
  no text begins with a space. ``end_of_turn``: a token.

Source: llama.cpp, conversion/, src/llama-model.cpp, src/llama-vocab.cpp and src/models/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..base.forking import cached_property
from .schema import Schema

# What messages call the metadata.
METADATA = "metadata"
U32, F32, BOOL, TEXT, TEXTS, NUMBERS = "u32", "f32", "bool", "string", "array of strings", "array of numbers"

# Keys for the names and shapes of all tensors.
SIZES = ("block_count", "embedding_length", "attention.head_count")
# Keys without which llama.cpp refuses a file: those without a part in names and shapes, then those with one.
REQUIRED = ("context_length", "attention.layer_norm_rms_epsilon", *SIZES)
# Types of keys of every file.
GENERAL_TYPES = {
    "general.architecture": TEXT,
    "general.name": TEXT,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.scores": NUMBERS,
    "tokenizer.ggml.token_type": NUMBERS,
    "tokenizer.ggml.merges": TEXTS,
    "tokenizer.ggml.bos_token_id": U32,
    "tokenizer.ggml.eos_token_id": U32,
    "tokenizer.ggml.unknown_token_id": U32,
    "tokenizer.ggml.padding_token_id": U32,
    "tokenizer.ggml.add_bos_token": BOOL,
    "tokenizer.ggml.add_eos_token": BOOL,
}
# Values of ``tokenizer.ggml.model``.
TOKENIZERS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "no_vocab", "none", "gemma4", "hybriddna")
NO_TOKENS = ("no_vocab", "none")

# llama.cpp's base of rotations for a file without ``rope.freq_base``.
USUAL_BASE = 10_000.0

# Numbers in names, at most one of a layer and one of an expert.
_NUMBERS = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,9})(?=\.)", re.ASCII)
PLACE = "{}"


class GgufKey(NamedTuple):
    """A metadata key."""

    types: tuple[str, ...]
    config: tuple[str, ...] = ()
    default: Any = None
    optional: bool = False


class GgufLayout(NamedTuple):
    """How a tensor of llama.cpp holds the values of a published tensor."""

    heads: tuple[str, ...] = ()  # keys of the number of heads: the rows of each half of a head alternate
    add: float = 0.0  # to each value
    stack: bool = False  # the published tensor is one of the experts
    part: tuple[int, int] | None = None  # number of the part of the rows of each expert, and of the parts
    interleaved: bool = False  # rows of the parts alternate
    transposed: bool = False  # the published matrix of each expert is transposed
    row: bool = False  # the published tensor has an axis of size 1 more


class GgufRope(NamedTuple):
    """Rotary embeddings."""

    types: tuple[str, ...]
    base: float = USUAL_BASE  # of a config without a base
    unless: float | None = None  # the base that is not written
    dimensions: str | None = None  # number of rotated elements to write: "head" for all of a head, "partial"
    sliding: bool = False  # layers with a sliding window have a base of their own


class GgufForm:
    """How llama.cpp has a family."""

    def __init__(self, content: Mapping[str, Any], class_name: str, model_type: str) -> None:
        self._content = content
        self.class_name, self.model_type = class_name, model_type  # of transformers
        self.architecture: str = content["architecture"]
        self.keys = {key: GgufKey(**fields) for key, fields in content["keys"].items()}
        self.required: tuple[str, ...] = content["required"]
        self.assumes: Mapping[str, tuple[Any, ...]] = content["assumes"]
        self.rope = GgufRope(**content["rope"])
        self.full_every: int | None = content["windows"].get("full_every")
        self.ignores_windows: bool = content["windows"].get("ignored", False)
        self.activations: Mapping[str, tuple[str, ...]] = content["activations"]
        self.query_scale_by_width: int | None = content.get("query_scale_by_width")
        self.restores: tuple[str, ...] = content.get("restores", ())
        self.chosen_by: str | None = content.get("chosen_by")
        self.adds_space: bool = content.get("add_space_prefix", True)
        self.end_of_turn: str | None = content.get("end_of_turn")
        self.tied: bool = content.get("tied", False)

    @cached_property
    def schema(self) -> Schema:
        """The tensors of a file."""
        fields = {key: self._content[key] for key in ("defaults", "tensors")}
        return Schema.of(f"gguf:{self.architecture}", {"config": METADATA, "layers": "block_count", **fields})

    @cached_property
    def layouts(self) -> dict[str, dict[str, GgufLayout]]:
        """Published tensors of each tensor of a file, with their layouts; ``{}`` stands for numbers."""
        result = {}
        for name, entry in self._content["tensors"].items():
            sources = entry.get("from", {})
            sources = {sources: {}} if isinstance(sources, str) else sources
            result[name] = {source: GgufLayout(**fields) for source, fields in sources.items()}
        return result

    @cached_property
    def targets(self) -> dict[str, list[tuple[str, GgufLayout]]]:
        """The tensors of a file that each published tensor becomes a part of."""
        result: dict[str, list[tuple[str, GgufLayout]]] = {}
        for name, sources in self.layouts.items():
            for source, layout in sources.items():
                result.setdefault(source, []).append((name, layout))
        return result

    def sizes(self, metadata: Mapping[Any, Any], names: Iterable[str], tokens: int | None) -> dict[str, int]:
        """Return the integers of a file's metadata under the names of its schema."""
        values = {key: metadata.get(f"{self.architecture}.{key}") for key in self.keys}
        whole = {key: value for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
        sizes = {key.replace(".", "_"): int(value) for key, value in whole.items()}
        if tokens is not None:
            sizes["vocab_size"] = tokens
        # Some files have the projections of q, k and v in a single matrix.
        sizes["attn_qkv"] = int(any(name.endswith(".attn_qkv.weight") for name in names))
        return sizes


def without_numbers(name: str) -> tuple[str, list[str]]:
    """Return a name with ``{}`` for each number, and the numbers."""
    return _NUMBERS.sub(PLACE, name), _NUMBERS.findall(name)


def is_kept_f32(name: str) -> bool:
    """Return True if llama.cpp's converter writes a tensor of any number of axes as f32."""
    return name.endswith(("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")) or not name.endswith(
        ".weight"
    )
