"""Select the weights that an engine's own tool would quantize."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from ...base import dtypes, packing
from ...base.messages import error_about
from ...base.text import show
from ...errors import UnsupportedError
from ...models.config_dtype import dtype_in
from ...models.family import MlxExperts, changed_by_mlx, engine_model_types, mlx_experts_of
from ...models.schema import Schema
from ...models.tied import KEY as TIE
from ...models.tied import tied_heads
from ...packed.conv1d import conv1d_model, is_named_conv1d
from ...packed.families import IS_EXPERT, IS_HEAD, Preset, presets
from ...packed.quantization import Quantization, quantization_of
from ..sources.catalog import Catalog, RestructuredCatalog, TensorDescription
from .encoding import WEIGHTS, check_columns
from .keeping import Keep, Kept, Planned

_F32 = dtypes.BY_CODE["F32"]
_WEIGHT = ".weight"
# Why a linear module stays unquantized, so that the config must name it.
_IS_CONV1D = "is a Conv1D, stored as [in, out]"
_LINEAR = (IS_HEAD, "is a router", IS_EXPERT, _IS_CONV1D, "keep=", "excluded by keep=", "has a side")
# Modules that choose experts. Engines compute these in full precision, although they are linear.
_ROUTER = re.compile(r"\.(?:gate|router|shared_expert_gate)\.weight\Z")
# Experts, which transformers holds as 3-D parameters; bitsandbytes quantizes only linear modules.
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)\Z")
# Weights of several matrices, as mlx-lm names them.
_STACKED = re.compile(r"\.(?:switch_mlp\.[a-z_]+|self_attn\.embed_q|self_attn\.unembed_out)\.weight\Z")
# Modules that engines merge into a single matrix, so that they must share NVFP4's global scale. Source: llmcompressor
# 0.14 ``entrypoints/model_free``.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a_with_mqa"),
)


# The names in `presets`; MLX's formats have groups of 64 by default.
EngineFormat: TypeAlias = Literal[
    "w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block", "nvfp4a16", "mxfp4a16", "deepseek_fp8",
    "mlx2", "mlx3", "mlx4", "mlx5", "mlx6", "mlx8", "mlx2-g32", "mlx2-g64", "mlx2-g128", "mlx3-g32", "mlx3-g64",
    "mlx3-g128", "mlx4-g32", "mlx4-g64", "mlx4-g128", "mlx5-g32", "mlx5-g64", "mlx5-g128", "mlx6-g32", "mlx6-g64",
    "mlx6-g128", "mlx8-g32", "mlx8-g64", "mlx8-g128", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8", "bnb_nf4", "bnb_fp4",
]  # fmt: skip


class EngineRules:
    """Select the weights that an engine's tool would quantize."""

    def __init__(self, preset: Preset, keep: Keep) -> None:
        self.preset, self.engine = preset, preset.engine
        self._keep = keep
        self.kept = Kept(keep)
        self.schema: Schema | None = None  # None if the caller has chosen the tensors
        self._config: Mapping[str, Any] | None = None
        self._experts: MlxExperts | None = None
        self._tied: Collection[str] = ()

    def set_model(self, schema: Schema | None, catalog: Catalog, *, chosen: bool) -> None:
        """Set the model, arranged for the engine; any model is supported if the caller has ``chosen`` the tensors."""
        self._config = config = catalog.config
        if isinstance(catalog, RestructuredCatalog) and catalog.for_engine:
            self.kept = Kept(self._keep, catalog.sources_of)
        model_type = None if config is None else config.get("model_type")
        supported = schema is not None and model_type in engine_model_types()
        if not supported and not chosen:
            raise self._unsupported(model_type)
        if self.engine.stacks_experts and changed_by_mlx(config):
            raise UnsupportedError(f"{self.preset.name}: {not_as_in_mlx(model_type)}")
        self.schema = schema if supported else None
        self._tied = tied_heads(config, dict.fromkeys(catalog).keys())
        self._experts = mlx_experts_of(model_type) if self.engine.stacks_experts and supported else None

    def _unsupported(self, model_type: object) -> UnsupportedError:
        advice = "choose the tensors to convert with only=, and pass ignore= for those to leave unquantized"
        if model_type is None:
            return UnsupportedError(
                f"{self.preset.name} needs a config.json with a model_type: pass the folder that has it, or {advice}"
            )
        supported = ", ".join(sorted(engine_model_types()))
        return UnsupportedError(
            f"{self.preset.name} does not support model_type {show(model_type)} (supported: {supported}): {advice}"
        )

    def plan(self, name: str, about: TensorDescription) -> Planned:
        """Decide about a tensor."""
        if not about.floating and about.scheme is None:
            return Planned(None, f"is {about.dtype}, not floating")
        reason = self._reason(name, about.shape)
        if reason is not None:
            return Planned(None, reason)
        preset, shape = self.preset, about.shape
        stacked = self._experts is not None and _STACKED.search(name) is not None
        if len(shape) != 2 + stacked or not name.endswith(_WEIGHT):
            what = f"is {len(shape)}-D" if len(shape) != 2 else f"has a name that does not end in {_WEIGHT}"
            text = (
                f"{what}, and {preset.name} quantizes the 2-D weights of linear modules: pass ignore= with its name to "
                "leave it unquantized"
            )
            raise error_about(UnsupportedError, text, tensor=name)
        if any(side % preset.sides for side in shape):
            return Planned(None, f"has a side that is not a multiple of {preset.sides}")
        if self.engine.stacks_experts and preset.group is not None and shape[-1] % preset.group:
            return Planned(None, f"has rows of {shape[-1]} elements, not whole groups of {preset.group}")
        if self._experts is not None and self._experts.router is not None and _ROUTER.search(name):
            preset = presets()[self._experts.router]
        check_columns(name, preset, shape)
        return Planned(preset.name)

    def _reason(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return why a floating tensor stays unquantized, or None."""
        if 0 in shape:
            return "is empty"
        kept = self.kept.reason(name)
        if kept is not None:
            return kept
        if is_named_conv1d(name) and conv1d_model(self._config) is not None:
            return _IS_CONV1D  # engines quantize linear modules, or these as [out, in]
        role = "weight" if self.schema is None else self.schema.role(name)
        ends = {"embedding": "is an embedding", "head": IS_HEAD}
        if role in ends and not self.engine.quantizes_ends:
            return ends[role]
        if role in ("norm", "bias", "buffer"):
            return f"is a {role}"
        fused = _FUSED_EXPERTS.search(name) is not None
        if not self.engine.quantizes_experts and (fused or _EXPERT.search(name)):
            return IS_EXPERT
        if role is None:
            return None if fused else "is not in the schema of the model"  # `plan` refuses the axes of fused experts
        if self.schema is not None and len(shape) == 1:
            return "is 1-D, not 2-D"
        quantizes_routers = self._experts is not None and not self._experts.keeps_routers
        return "is a router" if _ROUTER.search(name) and not quantizes_routers else None

    def drops(self, name: str) -> bool:
        """Return True for a stored tensor that the engine's tool leaves out."""
        tied = self.engine.stacks_experts and name in self._tied
        return tied or name.endswith(self.engine.dropped or "\0")

    def weight_dtype(self, about: TensorDescription, target: dtypes.Dtype | None) -> dtypes.Dtype:
        """Return the dtype of a weight before it is quantized: as requested, else the config's, else its own."""
        row = target or self._usual_dtype() or (about.row if about.scheme is None else _F32)
        return row if row.code in WEIGHTS else _F32

    def kept_dtype(self, about: TensorDescription, target: dtypes.Dtype | None) -> dtypes.Dtype | None:
        """Return the dtype for an unquantized tensor; None leaves it as it is."""
        if self._experts is not None and about.name.endswith(self._experts.uncast or "\0") and about.scheme is None:
            return None
        if target is None and (about.scheme is not None or self.engine.casts):
            return self._usual_dtype() or (None if about.scheme is None else _F32)
        return target

    def _usual_dtype(self) -> dtypes.Dtype | None:
        """Return the dtype of weights in the config, or None if engines do not quantize from it."""
        row = dtype_in(self._config)
        return row if row is not None and row.code in WEIGHTS else None

    def partners(self, name: str, quantized: Collection[str]) -> tuple[str, ...]:
        """Return the weights that share a global scale with a quantized weight, itself included; () for none."""
        if packing.GLOBAL not in self.preset.parts:
            return ()
        parent, _, module = name.removesuffix(_WEIGHT).rpartition(".")
        fused = next((modules for modules in _FUSED if module in modules), (module,))
        partners = (f"{parent}.{other}{_WEIGHT}" for other in fused) if len(fused) > 1 else (name,)
        return tuple(other for other in partners if other in quantized)

    def config(
        self,
        config: Mapping[str, Any] | None,  # of the source, with the dtype of the result
        quantized: Mapping[str, str],  # format of each quantized tensor, by name before `rename`
        kept: Mapping[str, str],  # why each other tensor was kept, by name before `rename`
        names: Mapping[str, str],  # in the result, by name before `rename`
    ) -> dict[str, Any]:
        """Return the ``config.json`` of the folder."""
        left = {
            names.get(name, name).removesuffix(_WEIGHT): reason
            for name, reason in kept.items()
            if reason.startswith(_LINEAR) and name.endswith(_WEIGHT)
        }
        for head in self._tied:
            if head not in kept:
                module = head.removesuffix(_WEIGHT)  # transformers has the head beside the model
                left |= {module: IS_HEAD, module.rpartition(".")[2]: IS_HEAD}
        if self.engine.stacks_experts and self.schema is not None and TIE not in (config or {}):
            has_head = any(self.schema.role(name) == "head" for name in (*quantized, *kept))
            config = {**(config or {}), TIE: not has_head}  # mlx-lm's default is not that of transformers
        return self.preset.lay_out(self.preset, config or {}, left, self._exceptions(quantized, names))

    def quantization(self, quantized: Mapping[str, str]) -> Quantization:
        """Return the quantization of a folder with these formats by name, as its reader would parse it."""
        quantization = quantization_of(self.preset.lay_out(self.preset, {}, {}, self._exceptions(quantized, {})))
        assert quantization is not None
        return quantization

    def _exceptions(self, quantized: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Preset]:
        """Return the modules with another format than the usual one."""
        return {
            names.get(name, name).removesuffix(_WEIGHT): presets()[scheme]
            for name, scheme in quantized.items()
            if scheme != self.preset.name
        }


def not_as_in_mlx(model_type: object) -> str:
    """Return why a model's tensors of MLX are not those of transformers."""
    return (
        f"mlx-lm does not store {show(model_type)} as transformers does (norms + 1, axes of convolutions, names), and "
        "safeload does not know the differences"
    )


def nothing_left(preset: Preset, kept: Mapping[str, str]) -> UnsupportedError:
    """Return the error for a conversion that quantizes nothing."""
    name, reason = next(iter(kept.items()), ("", ""))
    why = f": tensor {show(name)} {'is kept by ' if reason.startswith('keep=') else ''}{reason}" if reason else ""
    return UnsupportedError(f"{preset.name}: no tensor is left to quantize{why}")
