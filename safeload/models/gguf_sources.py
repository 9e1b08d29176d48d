"""The classes of transformers that llama.cpp runs, a row per class.

A row says how llama.cpp stores the class: names of modules, rows of q and k, stacked experts, and metadata keys. What
llama.cpp requires of the result is a row of `gguf_architectures`. Source: llama.cpp, conversion/ and src/models/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .gguf_architectures import F32, U32

# Roles of values in `GgufKey.source`: names of a key in config.json, in order of preference.
Names = tuple[str, ...]

# Names outside of layers, without the prefix of the model.
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Suffixes of buffers that llama.cpp computes itself.
BUFFERS = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")

_LAYERS: Names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
WIDTH: Names = ("hidden_size", "n_embd", "dim")
HEADS: Names = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS: Names = ("num_key_value_heads", "n_kv_heads")
CONTEXT: Names = (
    "max_position_embeddings",
    "n_ctx",
    "n_positions",
    "max_length",
    "max_sequence_length",
    "model_max_length",
)
EXPERTS: Names = ("num_local_experts", "num_experts", "n_routed_experts")
_USED: Names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
# llama.cpp's base of rotations for a file without ``rope.freq_base``.
USUAL_BASE = 10_000.0


class GgufKey(NamedTuple):
    """A metadata key that has the value of a config key."""

    key: str  # without the architecture
    kind: str  # U32, F32, ...
    source: Names
    default: Any = None
    required: bool = True  # False to omit the key if the config has no value


_COMMON = (
    GgufKey("block_count", U32, _LAYERS),
    GgufKey("context_length", U32, CONTEXT),
    GgufKey("embedding_length", U32, WIDTH),
    GgufKey("feed_forward_length", U32, ("intermediate_size", "n_inner", "hidden_dim")),
    GgufKey("attention.head_count", U32, HEADS),
    GgufKey("attention.head_count_kv", U32, KV_HEADS, required=False),
    GgufKey("attention.layer_norm_rms_epsilon", F32, ("rms_norm_eps", "norm_eps")),
)
_HEAD_DIM = (
    GgufKey("attention.key_length", U32, ("head_dim",), required=False),
    GgufKey("attention.value_length", U32, ("head_dim",), required=False),
)
_EXPERT_COUNTS = (GgufKey("expert_count", U32, EXPERTS), GgufKey("expert_used_count", U32, _USED))
_QWEN_COUNTS = (_EXPERT_COUNTS[0]._replace(source=(EXPERTS[1], EXPERTS[0], *EXPERTS[2:])), _EXPERT_COUNTS[1])
_EXPERT_FF = GgufKey("expert_feed_forward_length", U32, ("moe_intermediate_size",))

# Modules of a layer, and of a block of llama.cpp.
_ATTENTION = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
_MLP = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS = {f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"}
_GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class Experts(NamedTuple):
    """How a class stores the experts of a layer: each alone, or together.

    The placeholder ``{}`` in a name is the number of the expert.
    """

    single: Mapping[str, str] = {}  # ``experts.{}.w1`` -> ``ffn_gate_exps``
    fused: str | None = None  # [experts, 2 * ff, width], gate first
    interleaved: bool = False  # the fused matrices are transposed, and gate and up alternate
    down: str | None = None  # [experts, width, ff], beside `fused`


_QWEN_EXPERTS = Experts(
    {f"mlp.experts.{{}}.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    "mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
)
_MIXTRAL_EXPERTS = Experts(
    {
        f"block_sparse_moe.experts.{{}}.{name}": f"ffn_{role}_exps"
        for name, role in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
    "mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
)


class GgufSource(NamedTuple):
    """A row: a class of transformers."""

    architecture: str  # of llama.cpp
    model_type: str
    modules: Mapping[str, str]
    keys: Sequence[GgufKey] = (*_COMMON, *_HEAD_DIM)
    permuted: bool = False  # llama.cpp rotates neighbouring pairs in q and k, so their rows change places
    norm_shift: bool = False  # norms store their weight - 1
    tied: bool = False  # llama.cpp has no head of its own
    experts: Experts | None = None
    always: Mapping[str, Any] = {}  # values that llama.cpp assumes, with the values of a config without the key
    activations: Names = ("silu", "swish")
    rope_default: float = USUAL_BASE  # base of rotations of a config without one
    rope_base: bool = True  # False to write ``rope.freq_base`` only if it is not 10,000
    pattern: int | None = None  # llama.cpp takes every layer of this number for one without a sliding window
    attention_scale: int | None = None  # layers of the model that llama.cpp scales by its width
    window_ignored: bool = False  # llama.cpp attends to all positions even if the config has a window


# Values of keys that change the computation in a way that llama.cpp has no key for.
_PLAIN: dict[str, tuple[Any, ...]] = {"is_causal": (True,), "use_bidirectional_attention": (False, None)}
_LLAMA_MODULES = {**_ATTENTION, **_MLP, **_NORMS}
_LLAMA_KEYS = (*_COMMON, *_HEAD_DIM, GgufKey("vocab_size", U32, ("vocab_size",)))
_QWEN = GgufSource("qwen2", "qwen2", _LLAMA_MODULES, always=_PLAIN, window_ignored=True)
_SPARSE: dict[str, tuple[Any, ...]] = {**_PLAIN, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_LLAMA = GgufSource("llama", "llama", _LLAMA_MODULES, _LLAMA_KEYS, permuted=True, always=_PLAIN, window_ignored=True)

_QWEN_MOE = _QWEN._replace(
    modules={**_ATTENTION, **_NORMS, "mlp.gate": "ffn_gate_inp"},
    experts=_QWEN_EXPERTS,
)
_GEMMA_2 = GgufSource(
    "gemma2",
    "gemma2",
    {**_ATTENTION, **_MLP, **_GEMMA_NORMS},
    (
        *_COMMON,
        *(key._replace(required=True) for key in _HEAD_DIM),
        GgufKey("attn_logit_softcapping", F32, ("attn_logit_softcapping",)),
        GgufKey("final_logit_softcapping", F32, ("final_logit_softcapping",)),
        GgufKey("attention.sliding_window", U32, ("sliding_window",)),
    ),
    norm_shift=True,
    tied=True,
    always=_PLAIN,
    activations=("gelu_pytorch_tanh",),
    rope_base=False,
    pattern=2,
    attention_scale=46,
)
_GPT_OSS_MODULES = {
    **_ATTENTION,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}

SOURCES: dict[str, GgufSource] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA._replace(model_type="mistral"),
    "MixtralForCausalLM": _LLAMA._replace(
        model_type="mixtral",
        modules={**_ATTENTION, **_NORMS, "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp"},
        keys=(*_LLAMA_KEYS, *_EXPERT_COUNTS),
        experts=_MIXTRAL_EXPERTS,
        rope_default=1_000_000.0,
    ),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN_MOE._replace(
        architecture="qwen2moe",
        model_type="qwen2_moe",
        modules={
            **_QWEN_MOE.modules,
            **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        },
        keys=(
            *_QWEN.keys,
            *_QWEN_COUNTS,
            _EXPERT_FF,
            GgufKey("expert_shared_feed_forward_length", U32, ("shared_expert_intermediate_size",)),
        ),
        always={**_SPARSE, "norm_topk_prob": (False, None)},
    ),
    "Qwen3ForCausalLM": _QWEN._replace(
        architecture="qwen3", model_type="qwen3", modules={**_LLAMA_MODULES, **_HEAD_NORMS}
    ),
    "Qwen3MoeForCausalLM": _QWEN_MOE._replace(
        architecture="qwen3moe",
        model_type="qwen3_moe",
        modules={**_QWEN_MOE.modules, **_HEAD_NORMS},
        keys=(*_QWEN.keys, *_QWEN_COUNTS, _EXPERT_FF),
        always={**_SPARSE, "norm_topk_prob": (True,)},
    ),
    "GemmaForCausalLM": _GEMMA_2._replace(
        architecture="gemma",
        model_type="gemma",
        modules=_LLAMA_MODULES,
        keys=(*_COMMON, *(key._replace(required=True) for key in _HEAD_DIM)),
        activations=("gelu", "gelu_pytorch_tanh"),
        pattern=None,
        attention_scale=None,
    ),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_2._replace(
        architecture="gemma3",
        model_type="gemma3_text",
        modules={**_GEMMA_2.modules, **_HEAD_NORMS},
        keys=(
            *_COMMON,
            *(key._replace(required=True) for key in _HEAD_DIM),
            GgufKey("final_logit_softcapping", F32, ("final_logit_softcapping",), required=False),
            GgufKey("attention.sliding_window", U32, ("sliding_window",)),
        ),
        always={**_PLAIN, "attn_logit_softcapping": (None,)},
        rope_default=1_000_000.0,
        rope_base=True,
        pattern=6,
        attention_scale=62,
    ),
    "Phi3ForCausalLM": GgufSource(
        "phi3",
        "phi3",
        {
            **_NORMS,
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        (
            *_COMMON,
            GgufKey("attention.sliding_window", U32, ("sliding_window",), default=0),
        ),
        always=_PLAIN,
        window_ignored=True,
    ),
    "GptOssForCausalLM": GgufSource(
        "gpt-oss",
        "gpt_oss",
        _GPT_OSS_MODULES,
        (
            *_COMMON,
            *_HEAD_DIM,
            *_EXPERT_COUNTS,
            GgufKey("expert_feed_forward_length", U32, ("intermediate_size",)),
            GgufKey("attention.sliding_window", U32, ("sliding_window",)),
        ),
        always={**_PLAIN, "swiglu_limit": (7.0,)},
        rope_default=150_000.0,
        pattern=2,
        experts=Experts(fused="mlp.experts.gate_up_proj", interleaved=True, down="mlp.experts.down_proj"),
    ),
}


def model_types() -> dict[str, str]:
    """Return the class of each model type."""
    return {source.model_type: name for name, source in SOURCES.items()}
