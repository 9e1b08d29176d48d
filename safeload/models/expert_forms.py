"""Adapt a schema to the experts of a model: stored one by one, fused by transformers, or stacked by mlx-lm."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from .schema import Schema, SchemaEntry

# More experts than this in a layer are a mistake; published models have at most 512.
MAX_EXPERTS = 1 << 16

_COUNT = "expert"
_ONE = ".experts.{expert}."
# Transformers holds gate and up of all experts in one tensor.
_FUSED_BLOCK = ".mlp.experts"
_GATE_UP, _DOWN = f"{_FUSED_BLOCK}.gate_up_proj", f"{_FUSED_BLOCK}.down_proj"
# A part of the names of mlx-lm's stacks.
STACK = ".switch_mlp."
# The block of Mixtral's experts in its files, and the experts' in transformers 5.
_MIXTRAL_BLOCK, _NEW = ".block_sparse_moe.", ".mlp.experts."
# The names of Mixtral's modules in mlx-lm and in transformers 5.
_RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# mlx-lm divides the up-projection of latent attention by heads.
_HEADS, _EMBED, _UNEMBED = ".self_attn.kv_b_proj.weight", ".self_attn.embed_q.weight", ".self_attn.unembed_out.weight"


def with_expert_form(schema: Schema, names: Collection[str]) -> Schema:
    """Return the schema of a model with these names, or the schema itself if its experts are stored one by one."""
    if _COUNT not in schema.counts:
        return schema
    schema = _as_linearized(schema, names)
    fused = any(name.endswith((_GATE_UP, _DOWN)) for name in names)
    stacked = not fused and any(STACK in name for name in names)
    heads = any(name.endswith(_EMBED) for name in names)
    if not (fused or stacked or heads):
        return schema
    entries: list[SchemaEntry] = []
    for entry in schema.entries:
        if fused and _ONE in entry.name:
            entries += _fused(entry, schema.counts[_COUNT])
        elif stacked and _ONE in entry.name:
            entries.append(_stacked(entry, schema.counts[_COUNT]))
        elif heads and entry.name.endswith(_HEADS):
            entries += _divided(entry)
        else:
            entries.append(entry)
    return replace(schema, entries=tuple(entries))


def _as_linearized(schema: Schema, names: Collection[str]) -> Schema:
    """Return Mixtral's schema under the names of transformers 5, in which llm-compressor also stores experts."""
    if not any(_MIXTRAL_BLOCK in entry.name for entry in schema.entries) or not any(_NEW in name for name in names):
        return schema
    linear = any(_NEW in name and name.endswith(".gate_proj.weight") for name in names)
    fused = any(name.endswith((_GATE_UP, _DOWN)) for name in names)

    def renamed(entry: SchemaEntry) -> SchemaEntry:
        name = entry.name.replace(_MIXTRAL_BLOCK, ".mlp.")
        block, one, module = name.partition(_ONE)
        inner, _, suffix = module.partition(".")
        if one and (linear or fused):
            name = f"{block}{one}{_RENAMED.get(inner, inner)}.{suffix}"
        return entry._replace(name=name)

    return replace(schema, entries=tuple(map(renamed, schema.entries)))


def _fused(entry: SchemaEntry, count: str) -> Iterator[SchemaEntry]:
    block, _, module = entry.name.partition(_ONE)
    if f"{block}.experts".endswith(_FUSED_BLOCK) and entry.shape is not None and module.startswith(("gate", "down")):
        rows, columns = entry.shape
        gate = module.startswith("gate")
        name = f"{block}.experts.{'gate_up_proj' if gate else 'down_proj'}"
        yield entry._replace(name=name, shape=(count, f"2 * ({rows})" if gate else rows, columns))


def _stacked(entry: SchemaEntry, count: str) -> SchemaEntry:
    block, _, module = entry.name.partition(_ONE)
    inner, _, suffix = module.partition(".")
    shape = None if entry.shape is None else (count, *entry.shape)
    return entry._replace(name=f"{block}{STACK}{_RENAMED.get(inner, inner)}.{suffix}", shape=shape)


def _divided(entry: SchemaEntry) -> Iterator[SchemaEntry]:
    stem = entry.name.removesuffix(_HEADS)
    yield entry._replace(name=stem + _EMBED, shape=("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim"))
    yield entry._replace(name=stem + _UNEMBED, shape=("num_attention_heads", "v_head_dim", "kv_lora_rank"))
