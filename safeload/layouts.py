"""Layouts of engines, for `safeload.stack` and `safeload.convert`."""

from __future__ import annotations

from collections.abc import Iterator

from .operations.stack import Layout, StackedTensor

__all__ = ["MOONDREAM2"]


def _pair(name: str, source: str, *, transpose: bool = False, bias: str | None = None) -> Iterator[StackedTensor]:
    yield StackedTensor(f"{name}_w", f"{source}.weight", transpose)
    yield StackedTensor(bias or f"{name}_b", f"{source}.bias")


def _moondream2() -> Iterator[StackedTensor]:
    """In the order of the file that the engine's own converter writes."""
    text, vision = "model.text.blocks.{}.", "model.vision.blocks.{}."
    yield StackedTensor("word_token_embedding", "model.text.wte")
    yield from _pair("t_ln", f"{text}ln")
    yield from _pair("t_Wqkv", f"{text}attn.qkv")
    yield from _pair("t_out_proj", f"{text}attn.proj", bias="t_out_proj_bias")
    yield from _pair("t_fc1", f"{text}mlp.fc1")
    yield from _pair("t_fc2", f"{text}mlp.fc2")
    yield from _pair("t_linear", "model.text.lm_head")
    yield from _pair("t_ln_out", "model.text.post_ln")
    yield from _pair("v_patch_embedding_linear", "model.vision.patch_emb", transpose=True)
    yield StackedTensor("v_pos_embedding", "model.vision.pos_emb")
    yield from _pair("v_Wqkv", f"{vision}attn.qkv", transpose=True)
    yield from _pair("v_out_proj", f"{vision}attn.proj", transpose=True)
    yield from _pair("v_fc1", f"{vision}mlp.fc1", transpose=True)
    yield from _pair("v_fc2", f"{vision}mlp.fc2", transpose=True)
    yield from _pair("v_norm1", f"{vision}ln1")
    yield from _pair("v_norm2", f"{vision}ln2")
    yield from _pair("v_norm_out", "model.vision.post_ln")
    fc1, fc2 = (list(_pair(f"v_proj_{k}", f"model.vision.proj_mlp.{k}", transpose=True)) for k in ("fc1", "fc2"))
    yield from (fc1[0], fc2[0], fc1[1], fc2[1])


#: Moondream 2 for engines in C, Zig and the like: 24 text and 27 vision layers, matrices of the vision tower
#: transposed.
MOONDREAM2 = Layout("moondream2", tuple(_moondream2()))
