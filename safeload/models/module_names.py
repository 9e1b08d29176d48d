"""Module names added by wrappers, and the tensor names that identify adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..core.text import show
from ..errors import FormatError, UnsupportedError

# Modules that torch.compile, DataParallel, FSDP and activation checkpointing put around another module.
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPED = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPERS)})\.", re.ASCII)

_LEADING = re.compile(rf"^(?:(?:{'|'.join(WRAPPERS)})\.)+", re.ASCII)


def unwrapped(name: str) -> str:
    """Return the name of a tensor or module without wrappers, at any place."""
    return _WRAPPED.sub("", name)


def wrapped_inside(name: str) -> bool:
    """Return whether a wrapper stands elsewhere than at the start of a name."""
    return _WRAPPED.search(_LEADING.sub("", name)) is not None


def surely_wrapped(name: str) -> bool:
    """Return whether a name has a wrapper other than ``module``, which is also a module of some models (Levit)."""
    return any(part in WRAPPERS and part != "module" for part in name.split("."))


def stored_names(names: Iterable[str], path: str) -> dict[str, str]:
    """Return the stored name of each tensor, by its name without wrappers."""
    stored: dict[str, str] = {}
    for name in names:
        other = stored.setdefault(unwrapped(name), name)
        if other != name:
            text = f"tensors {show(other)} and {show(name)} have one name without their wrappers"
            raise FormatError(f"{text} ({', '.join(WRAPPERS)})", path, tensor=name)
    return stored


# ---- adapters ----

_OF_LLAMA_CPP = "a LoRA adapter of llama.cpp (GGUF)"  # merged if it is a GGUF file, which has its settings
# The method or tool of an adapter by the names of its tensors: the first match decides.
_KINDS = tuple(
    (re.compile(pattern, re.ASCII), kind)
    for pattern, kind in (
        (r"^base_model\.model\..*\.hada_(?:w[12]|t[12])", "a LoHa adapter (PEFT)"),
        (r"^base_model\.model\..*\.lokr_(?:w[12]|t2)", "a LoKr adapter (PEFT)"),
        (r"^base_model\.model\..*\.ia3_l", "an IA3 adapter (PEFT)"),
        (r"^base_model\.(?:model\..*\.vera_lambda_|vera_[AB])", "a VeRA adapter (PEFT)"),
        (r"^base_model\.model\..*\.boft_[Rs]", "a BOFT adapter (PEFT)"),
        (r"^base_model\.model\..*\.oft_(?:R|embedding_R|r|s)(?:\.|$)", "an OFT adapter (PEFT)"),
        (r"^base_model\.model\..*\.lora_E(?:\.|$)", "an AdaLoRA adapter (PEFT)"),
        (r"(?:^|[._])hada_(?:w[12]|t[12])", "a LoHa adapter (LyCORIS)"),
        (r"(?:^|[._])lokr_(?:w[12]|t2)", "a LoKr adapter (LyCORIS)"),
        (r"(?:^|[._])ia3_l|\.on_input$", "an IA3 adapter"),
        (r"(?:^|[._])(?:vera_lambda|vera_[AB])", "a VeRA adapter"),
        (r"(?:^|[._])boft_[RSs]", "a BOFT adapter"),
        (r"(?:^|[._])(?:oft_[RrQqSs]|oft_blocks|oft_diag)", "an OFT adapter"),
        (r"\.lora_E(?:\.|$)|\.ranknum(?:\.|$)", "an AdaLoRA adapter"),
        (r"^base_model\.(?:.*[._])?(?:adamss|adaption_prompt|beft|bone|c3a|cartridge|deft|delora|fourierft|frod|glora"
         r"|gralora|hira|hra|lily|ln_tuning|miss|osf|peanut|poly|psoft|pvera|randlora|road|shadow|shira|supertuning"
         r"|tinylora|unilora|vblora|waveft|xlora)_", "an adapter of another method of PEFT than LoRA"),
        (r"^(?:prompt_embeddings|prompt_encoder\.|base_model\.prompt_encoder\.)", "a trained prompt"),
        (r"^lora_(?:unet|te[0-9]?|transformer|prior|text)_", "a LoRA adapter of kohya"),
        (r"^diffusion_model\..*\.lora_", "a LoRA adapter of ComfyUI"),
        (r"^(?:blk\..*|token_embd|output)\.weight\.lora_[ab]$", _OF_LLAMA_CPP),
        (r"\.processor\.(?:qkv|proj)_lora[12]?\.(?:down|up)\.", "a LoRA adapter of XLabs"),
        (r"[._]lora\.(?:down|up)\.|_lora\.(?:down|up)\.|lora_linear_layer\.", "a LoRA adapter of diffusers"),
        (r"^(?:transformer|unet|text_encoder(?:_[23])?|controlnet|prior)\..*\.lora_[AB]\.",
         "a LoRA adapter of diffusers"),
        (r"\.lora_(?:down|up)(?:\.|$)", "a LoRA adapter of kohya or ComfyUI"),
        (r"^lycoris_", "a LyCORIS adapter"),
        (r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?:\.|$)", "a LoRA adapter (PEFT)"),
        (r"\.lora_[ab]$", "a LoRA adapter (MLX)"),
        (r"\.trainable_tokens_delta(?:\.|$)", "an adapter with trained token embeddings"),
    )
)  # fmt: skip
# A name without any of these parts matches no pattern: the usual case, told by a single search.
_PARTS = re.compile(
    "lora|hada|lokr|ia3|on_input|vera|oft_|ranknum|base_model|prompt_e|lycoris|trainable_tokens", re.ASCII
)
_OF_PEFT = ("a LoRA", "an AdaLoRA", "a VeRA", "a LoHa", "a LoKr", "an IA3", "an OFT", "a BOFT")
_MERGED = (
    *(f"{kind} adapter (PEFT" for kind in _OF_PEFT),
    "a LoRA adapter (MLX",
    "an adapter with trained token",
    "a LoHa adapter (LyCORIS)",
    "a LoKr adapter (LyCORIS)",
    "a LoRA adapter of kohya",
    "a LoRA adapter of ComfyUI",
    "a LoRA adapter of XLabs",
    "a LoRA adapter of diffusers",
)  # a rank can follow: "(PEFT, r 8)"
# Tensors that accompany an adapter's.
_BESIDE = re.compile(
    r"^base_model\.model\.(?!.*\.base_layer\.)|\.(?:alpha|dora_scale|diff|diff_b|m|magnitude)$", re.ASCII
)


def _kind(name: str) -> str | None:
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), None) if _PARTS.search(name) else None


def foreign_kind(name: str) -> str | None:
    """Return the method or tool of an unsupported adapter with a tensor of this name."""
    kind = _kind(name)
    return None if kind is None or kind.startswith(_MERGED) else kind


# The ends of the kinds of files for diffusion models, which have no configuration.
_OF_DIFFUSION = ("kohya", "ComfyUI", "XLabs", "diffusers", "LyCORIS adapter", "(LyCORIS)")


def diffusion_writer(name: str) -> str | None:
    """Return the tool whose adapters of diffusion models have a tensor of this name."""
    kind = _kind(name)
    if kind is None or not kind.endswith(_OF_DIFFUSION):
        return None
    return "LyCORIS" if "LyCORIS" in kind else kind.removeprefix("a LoRA adapter of ")


def adapter_kind(names: Iterable[str]) -> str | None:
    """Return what adapter tensors of these names make up, such as "a LoRA adapter of kohya"; None for no adapter.

    Every tensor must belong to the adapter, so the first tensor of a model decides.
    """
    kinds: set[str | None] = set()
    for name in map(unwrapped, names):
        kind = _kind(name)
        if kind is None and not _BESIDE.search(name):
            return None
        kinds.add(kind)
    return next((kind for _, kind in _KINDS if kind in kinds), None)


def adapter_note(kind: str) -> str:
    """Return the note about an adapter opened as a checkpoint."""
    return f"{kind}: changes to the weights of a base model, not a complete model; {_advice(kind)}"


def is_merged(kind: str | None) -> bool:
    """Return whether adapters of this kind can be merged."""
    return kind is not None and kind.startswith((*_MERGED, _OF_LLAMA_CPP))


def _advice(kind: str) -> str:
    return "pass it as adapters= with its base" if is_merged(kind) else "safeload does not merge it"


def refuse_adapters(sources: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[str, str]]:
    """Return the path and kind of each adapter among sources, pairs of a path and names."""
    kinds = [(path, adapter_kind(names)) for path, names in sources]
    adapters = [(path, kind) for path, kind in kinds if kind is not None]
    if 0 < len(adapters) < len(kinds):
        path, kind = adapters[0]
        text = f"{path} is {kind}, whose tensors change those of the model beside it: {_advice(kind)}"
        raise UnsupportedError(text, path=path)
    return adapters
