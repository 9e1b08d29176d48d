"""The architectures of GGUF files that are checked against llama.cpp, a row per architecture.

A row names tensors with their shapes, outermost axis first, and metadata keys. In shapes, a key has underscores
instead of dots and no architecture: ``llama.attention.head_count`` is ``attention_head_count``. Source: llama.cpp,
src/llama-model.cpp, src/llama-vocab.cpp and src/models/.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from .reading import parse
from .schema import Schema

# What messages call the metadata.
METADATA = "metadata"
# Set if the file has the projections of q, k and v in one matrix.
FUSED = "attn_qkv"

U32, F32, BOOL, TEXT, TEXTS, NUMBERS = "u32", "f32", "bool", "string", "array of strings", "array of numbers"

# Keys for the names and shapes of all tensors.
SIZES = ("block_count", "embedding_length", "attention.head_count")

# Types of keys that every architecture reads, without the architecture; "/" separates the types that llama.cpp accepts.
KEY_TYPES = {
    "context_length": U32,
    "embedding_length": U32,
    "block_count": U32,
    "feed_forward_length": f"{U32}/{NUMBERS}",
    "expert_count": U32,
    "expert_used_count": f"{U32}/{NUMBERS}",
    "attention.head_count": f"{U32}/{NUMBERS}",
    "attention.head_count_kv": f"{U32}/{NUMBERS}",
    "attention.key_length": U32,
    "attention.value_length": U32,
    "attention.layer_norm_rms_epsilon": F32,
    "rope.dimension_count": U32,
    "rope.freq_base": F32,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": F32,
    "rope.scaling.attn_factor": F32,
    "rope.scaling.original_context_length": U32,
}
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
# Keys without which llama.cpp refuses a file: those without a part in names and shapes, then those with one.
REQUIRED = ("context_length", "attention.layer_norm_rms_epsilon", *SIZES)
# Values of ``tokenizer.ggml.model``.
TOKENIZERS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "no_vocab", "none", "gemma4", "hybriddna")
NO_TOKENS = ("no_vocab", "none")

_Tensors = Mapping[str, Mapping[str, Any]]

_WIDTH, _VOCABULARY = "embedding_length", "vocab_size?"
_KEYS, _VALUES = "attention_key_length", "attention_value_length"
_Q, _K = f"attention_head_count * {_KEYS}", f"attention_head_count_kv * {_KEYS}"
_V, _O = f"attention_head_count_kv * {_VALUES}", f"attention_head_count * {_VALUES}"
_FF, _EXPERT_FF = "feed_forward_length", "expert_feed_forward_length"
_SHARED_FF, _EXPERTS = "expert_shared_feed_forward_length", "expert_count"
_SIZES = f"{U32}/{NUMBERS}"
_SLIDING = {
    "attention.sliding_window": U32,
    "attn_logit_softcapping": F32,
    "final_logit_softcapping": F32,
    "rope.freq_base_swa": F32,
}


def _weight(*shape: str, **fields: Any) -> dict[str, Any]:
    return {"shape": list(shape), **fields}


def _sized(shape: tuple[str, ...], *, norm: bool = False, **fields: Any) -> dict[str, Any]:
    """Return the entry of a tensor in layers, whose sizes can differ between layers if a key is an array."""
    role = {"role": "norm"} if norm else {}
    return {"shape": [size if size == _WIDTH else f"{size}?" for size in shape], **role, **fields}


def _norms(*names: str) -> _Tensors:
    return {f"blk.{{}}.{name}.weight": _sized((_WIDTH,), norm=True) for name in names}


_ENDS: _Tensors = {
    "token_embd.weight": _weight(_VOCABULARY, _WIDTH, role="embedding"),
    "output_norm.weight": _weight(_WIDTH, role="norm"),
}
_HEAD: _Tensors = {"output.weight": _weight(_VOCABULARY, _WIDTH, role="head")}
_TIED: _Tensors = {"output.weight": _weight(_VOCABULARY, _WIDTH, optional=True)}
_BIASES: _Tensors = {
    f"blk.{{}}.attn_{name}.bias": _sized((size,), role="bias", optional=True)
    for name, size in (("q", _Q), ("k", _K), ("v", _V))
}
_OUTPUT_BIAS: _Tensors = {"blk.{}.attn_output.bias": _sized((_WIDTH,), role="bias", optional=True)}
_ATTENTION: _Tensors = {
    "blk.{}.attn_qkv.weight": _sized((f"({_Q}) + ({_K}) + ({_V})", _WIDTH), when=FUSED),
    "blk.{}.attn_qkv.bias": _sized((f"({_Q}) + ({_K}) + ({_V})",), role="bias", when=FUSED, optional=True),
    **{
        f"blk.{{}}.attn_{name}.weight": _sized((size, _WIDTH), when=f"not {FUSED}")
        for name, size in (("q", _Q), ("k", _K), ("v", _V))
    },
    "blk.{}.attn_output.weight": _sized((_WIDTH, _O)),
    **_BIASES,
}
_HEAD_NORMS: _Tensors = {f"blk.{{}}.attn_{name}_norm.weight": _sized((_KEYS,), norm=True) for name in "qk"}
_MLP: _Tensors = {
    "blk.{}.ffn_gate.weight": _sized((_FF, _WIDTH)),
    "blk.{}.ffn_up.weight": _sized((_FF, _WIDTH)),
    "blk.{}.ffn_down.weight": _sized((_WIDTH, _FF)),
}
_MLP_BIASES: _Tensors = {
    f"blk.{{}}.ffn_{name}.bias": _sized((size,), role="bias", optional=True)
    for name, size in (("gate", _FF), ("up", _FF), ("down", _WIDTH))
}


def _experts(ff: str) -> _Tensors:
    return {
        "blk.{}.ffn_gate_inp.weight": _sized((_EXPERTS, _WIDTH)),
        "blk.{}.ffn_gate_exps.weight": _sized((_EXPERTS, ff, _WIDTH)),
        "blk.{}.ffn_up_exps.weight": _sized((_EXPERTS, ff, _WIDTH)),
        "blk.{}.ffn_down_exps.weight": _sized((_EXPERTS, _WIDTH, ff)),
    }


def _when(tensors: _Tensors, condition: str) -> _Tensors:
    return {name: {**entry, "when": condition} for name, entry in tensors.items()}


_FREQUENCIES: _Tensors = {"rope_freqs.weight": {"shape": ["?"], "role": "buffer", "optional": True}}
_LONG_FACTORS: _Tensors = {
    f"rope_factors_{name}.weight": {"shape": ["?"], "role": "buffer", "optional": True} for name in ("long", "short")
}
_NORMS = _norms("attn_norm", "ffn_norm")
_GEMMA_NORMS = _norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


class GgufArchitecture(NamedTuple):
    """A row: an architecture."""

    tensors: _Tensors
    keys: tuple[str, ...] = (_FF,)  # required beyond `REQUIRED`
    types: Mapping[str, str] = {}  # types of keys that not every architecture reads


ARCHITECTURES = {
    "llama": GgufArchitecture(
        {
            **_ENDS,
            **_TIED,
            **_NORMS,
            **_ATTENTION,
            **_when(_MLP, f"{_EXPERTS} == 0"),
            **_when(_MLP_BIASES, f"{_EXPERTS} == 0"),
            **_when(_experts(_FF), f"{_EXPERTS} > 0"),
            **_OUTPUT_BIAS,
            **_FREQUENCIES,
            **_LONG_FACTORS,
        },
        types={"vocab_size": U32},
    ),
    "qwen2": GgufArchitecture(
        {
            **_ENDS,
            **_TIED,
            "output.bias": {"shape": ["?"], "role": "bias", "optional": True},
            **_NORMS,
            **_ATTENTION,
            **_MLP,
        }
    ),
    "qwen2moe": GgufArchitecture(
        {
            **_ENDS,
            **_HEAD,
            **_NORMS,
            **_ATTENTION,
            **_experts(_EXPERT_FF),
            "blk.{}.ffn_gate_inp_shexp.weight": {"shape": None},  # the width, with or without an axis of size 1
            "blk.{}.ffn_gate_shexp.weight": _sized((_SHARED_FF, _WIDTH)),
            "blk.{}.ffn_up_shexp.weight": _sized((_SHARED_FF, _WIDTH)),
            "blk.{}.ffn_down_shexp.weight": _sized((_WIDTH, _SHARED_FF)),
        },
        ("expert_count", "expert_used_count"),
        {_EXPERT_FF: _SIZES, _SHARED_FF: U32},
    ),
    "qwen3": GgufArchitecture(
        {
            **_ENDS,
            **_TIED,
            "cls.output.weight": {"shape": None, "optional": True},
            **_NORMS,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
        }
    ),
    "qwen3moe": GgufArchitecture(
        {**_ENDS, **_TIED, **_NORMS, **_ATTENTION, **_HEAD_NORMS, **_experts(_EXPERT_FF)},
        ("expert_count", "expert_used_count"),
        {_EXPERT_FF: _SIZES},
    ),
    "gemma": GgufArchitecture({**_ENDS, **_NORMS, **_ATTENTION, **_MLP}),
    "gemma2": GgufArchitecture({**_ENDS, **_GEMMA_NORMS, **_ATTENTION, **_MLP}, types=_SLIDING),
    "gemma3": GgufArchitecture(
        {
            **_ENDS,
            **_TIED,
            "dense_2.weight": {"shape": None, "optional": True},
            "dense_3.weight": {"shape": None, "optional": True},
            **_GEMMA_NORMS,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
        },
        types=_SLIDING,
    ),
    "phi3": GgufArchitecture(
        {
            **_ENDS,
            **_TIED,
            **_NORMS,
            **_ATTENTION,
            "blk.{}.ffn_up.weight": _sized((f"2 * {_FF}", _WIDTH)),
            "blk.{}.ffn_down.weight": _sized((_WIDTH, _FF)),
            **_LONG_FACTORS,
        },
        types={"attention.sliding_window": U32},
    ),
    "gpt-oss": GgufArchitecture(
        {
            **_ENDS,
            **_HEAD,
            **_norms("attn_norm", "post_attention_norm"),
            **_ATTENTION,
            "blk.{}.attn_output.bias": _sized((_WIDTH,), role="bias"),
            "blk.{}.attn_sinks.weight": _sized(("attention_head_count",), role="buffer"),
            **_experts(_EXPERT_FF),
            "blk.{}.ffn_gate_inp.bias": _sized((_EXPERTS,), role="bias"),
            "blk.{}.ffn_gate_exps.bias": _sized((_EXPERTS, _EXPERT_FF), role="bias"),
            "blk.{}.ffn_up_exps.bias": _sized((_EXPERTS, _EXPERT_FF), role="bias"),
            "blk.{}.ffn_down_exps.bias": _sized((_EXPERTS, _WIDTH), role="bias"),
        },
        ("expert_count", "expert_used_count", _EXPERT_FF, "attention.sliding_window"),
        {_EXPERT_FF: _SIZES, "attention.sliding_window": U32, "rope.freq_base_swa": F32},
    ),
}


def is_kept_f32(name: str) -> bool:
    """Return True if llama.cpp's converter writes a tensor of any number of axes as f32."""
    return name.endswith(("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")) or not name.endswith(
        ".weight"
    )


@cache
def schema_of(name: str) -> Schema:
    """Return the schema of an architecture."""
    head = "embedding_length // attention_head_count"
    return parse(
        {
            "name": f"gguf:{name}",
            "about": f"GGUF files of llama.cpp's architecture {name}",
            "config": METADATA,
            "layers": "block_count",
            "defaults": {
                "attention_head_count_kv": "attention_head_count",
                _KEYS: head,
                _VALUES: head,
                _EXPERTS: 0,
                _EXPERT_FF: f"{_FF} // expert_used_count",
                _SHARED_FF: _FF,
                FUSED: 0,
            },
            "tensors": dict(ARCHITECTURES[name].tensors),
        }
    )
