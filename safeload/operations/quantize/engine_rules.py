"""Select the weights that an engine's own tool would quantize, and present a model as the engine loads it.

Transformers stores experts one by one, or fused: ``gate_up_proj`` [experts, 2 * width, columns] and ``down_proj``.
llm-compressor divides fused experts; mlx-lm stacks separate experts. Source: mlx-lm ``models/*.py``, ``sanitize``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...base import dtypes, packing
from ...base.text import error_about, show, subject
from ...errors import FormatError, UnsupportedError
from ...models.choosing import STACK, TIE, dtype_in, tied_heads
from ...models.family import MlxExperts, changed_by_mlx, engine_model_types, mlx_experts_of
from ...models.schema import MAX_EXPERTS, Schema
from ...packed.conv1d import conv1d_model, is_named_conv1d
from ...packed.families import IS_EXPERT, IS_HEAD, Preset, presets
from ...packed.quantization import Quantization, quantization_of
from ..sources.catalog import Catalog, Move, RestructuredCatalog, TensorDescription, TensorRecipe, TensorView
from .encoding import WEIGHTS
from .rules import Keep, Kept, Planned

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


class EngineRules:
    """Select the weights that an engine's tool would quantize."""

    def __init__(
        self,
        preset: Preset,
        keep: Keep,
        catalog: Catalog,  # the model, arranged for the engine
        schema: Schema | None,
        *,
        chosen: bool,  # True if the caller has chosen the tensors: any model is supported
    ) -> None:
        self.preset, self.engine = preset, preset.engine
        self._config = config = catalog.config
        self.kept = Kept(keep)
        if isinstance(catalog, RestructuredCatalog) and catalog.for_engine:
            self.kept = Kept(keep, catalog.sources_of)
        model_type = None if config is None else config.get("model_type")
        supported = schema is not None and model_type in engine_model_types()
        if not supported and not chosen:
            known = ", ".join(sorted(engine_model_types()))
            fault = f"does not support model_type {show(model_type)} (supported: {known}): "
            if model_type is None:
                fault = "needs a config.json with a model_type: pass the folder that has it, or "
            advice = "choose the tensors to convert with only=, and pass ignore= for those to leave unquantized"
            raise UnsupportedError(f"{preset.name} {fault}{advice}")
        if self.engine.stacks_experts and changed_by_mlx(config):
            raise UnsupportedError(f"{self.preset.name}: {not_as_in_mlx(model_type)}")
        self.schema = schema if supported else None
        self._tied = tied_heads(config, dict.fromkeys(catalog).keys())
        self._experts = mlx_experts_of(model_type) if self.engine.stacks_experts and supported else None

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
            text = f"{what}, and {preset.name} quantizes the 2-D weights of linear modules: "
            text += "pass ignore= with its name to leave it unquantized"
            raise error_about(UnsupportedError, text, tensor=name)
        if any(side % preset.sides for side in shape):
            return Planned(None, f"has a side that is not a multiple of {preset.sides}")
        if self.engine.stacks_experts and preset.group is not None and shape[-1] % preset.group:
            return Planned(None, f"has rows of {shape[-1]} elements, not whole groups of {preset.group}")
        if self._experts is not None and self._experts.router is not None and _ROUTER.search(name):
            preset = presets()[self._experts.router]
        group = preset.group
        if group is not None and not preset.flat and preset.row_block == 1 and shape[-1] % group:
            text = f"{preset.name} has blocks of {group} columns, and rows of {shape[-1]:,} are not whole blocks: "
            text += "pass ignore= with its name to leave it unquantized"
            raise UnsupportedError(subject(name) + text, tensor=name)  # the engine's kernels do not support them
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


# ---- tensors as an engine loads them ----

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,9})\.", re.ASCII)
# Fused experts of a layer, and the separate experts in it.
_FUSED_WEIGHT = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)", re.ASCII)
_FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED_TYPES = frozenset(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"))


def arranged(catalog: Catalog, preset: Preset, *, whole: bool = True) -> Catalog:
    """Return the tensors as an engine loads them; the catalog itself if names and shapes stay.

    The layers are complete only if the catalog has the ``whole`` model.
    """
    model_type = None if catalog.config is None else catalog.config.get("model_type")
    if not isinstance(model_type, str):
        return catalog
    experts = mlx_experts_of(model_type) if preset.engine.stacks_experts else None
    divides = preset.engine.quantizes_experts and model_type in _FUSED_TYPES
    if experts is None and not (divides and any(map(_FUSED_WEIGHT.fullmatch, catalog))):
        return catalog
    catalog.refuse_codes(catalog, f"convert to {preset.name}")
    parts = _parts(catalog, divides=divides)
    recipes = parts if experts is None else _stacked(catalog, preset, experts, parts)
    if whole and experts is not None:
        _check_layers(recipes, _size(catalog, "num_hidden_layers"), preset, experts)
    return RestructuredCatalog(
        catalog, recipes, metadata=catalog.metadata, config=catalog.config, format=catalog.format, for_engine=True
    )


def like(catalog: Catalog, other: Catalog) -> Catalog:
    """Return the tensors with experts as the other catalog stores them: stacked or separate."""
    names, theirs = ([name for name in each if isinstance(name, str)] for each in (catalog, other))
    if any(STACK in name for name in theirs) and not any(STACK in name for name in names):
        return arranged(catalog, presets()["mlx4"])
    if any(map(_FUSED_WEIGHT.fullmatch, names)) and not any(map(_FUSED_WEIGHT.fullmatch, theirs)):
        return arranged(catalog, presets()["w4a16"])
    return catalog


def _parts(catalog: Catalog, *, divides: bool) -> dict[str, TensorRecipe]:
    """Return all tensors of a model, with separate experts."""
    parts = {}
    for name in catalog:
        shape = tuple(catalog.about(name).shape)
        match = _FUSED_WEIGHT.fullmatch(name) if divides else None
        if match is None or len(shape) != 3:
            parts[name] = TensorRecipe(shape, (Move(name),))
            continue
        modules = _FUSED_PARTS[match[2]]
        if shape[1] % len(modules) or not 0 < shape[0] <= MAX_EXPERTS:
            raise error_about(FormatError, f"{list(shape)} does not hold experts", tensor=name)
        rows = shape[1] // len(modules)
        for expert in range(shape[0]):
            for k, module in enumerate(modules):
                part = slice(None) if len(modules) == 1 else slice(k * rows, (k + 1) * rows)
                full = f"{match[1]}.{expert}.{module}{_WEIGHT}"
                if full in catalog:
                    raise error_about(FormatError, f"is also a part of {show(name)}", tensor=full)
                parts[full] = TensorRecipe((rows, shape[2]), (Move(name, TensorView(expert, part)),))
    return parts


# ---- mlx-lm ----


def _stacked(
    catalog: Catalog, preset: Preset, experts: MlxExperts, parts: Mapping[str, TensorRecipe]
) -> dict[str, TensorRecipe]:
    """Return the recipes of a model for mlx-lm, in the order of their first source."""
    names = "|".join(map(re.escape, experts.modules))
    expert = re.compile(
        rf"(model\.layers\.[0-9]+\.{re.escape(experts.block)})\.experts\.(0|[1-9][0-9]{{0,9}})\.({names})\.weight",
        re.ASCII,
    )
    recipes: dict[str, TensorRecipe] = {}
    stacks: dict[str, dict[int, TensorRecipe]] = {}
    for name, part in parts.items():
        match, layer = expert.fullmatch(name), _LAYER.match(name)
        dropped = layer is not None and experts.dropped is not None and name.startswith(experts.dropped)
        if dropped and layer is not None and int(layer[1]) >= _size(catalog, "num_hidden_layers"):
            continue  # mlx-lm leaves out layers beyond the last
        if match is not None:
            stack = f"{match[1]}{STACK}{experts.modules[match[3]]}{_WEIGHT}"
            recipes.setdefault(stack, TensorRecipe((), ()))
            stacks.setdefault(stack, {})[int(match[2])] = part
        elif experts.split_heads and name.endswith(".self_attn.kv_b_proj.weight"):
            recipes.update(_heads(catalog, name, part))
        elif ".experts." in name:
            raise UnsupportedError(f"{preset.name}: mlx-lm has no tensor {show(name)}", tensor=name)
        else:
            recipes[name] = part
    for stack, members in stacks.items():
        recipes[stack] = _stack(catalog, experts, stack, members)
    return recipes


def _stack(catalog: Catalog, experts: MlxExperts, stack: str, members: Mapping[int, TensorRecipe]) -> TensorRecipe:
    renamed = experts.renamed
    count = _size(catalog, renamed if renamed is not None and renamed in (catalog.config or {}) else experts.experts)
    missing = next((k for k in range(count) if k not in members), None)
    if missing is not None or len(members) != count:
        fault = f"expert {missing} is missing" if missing is not None else f"it has {len(members)}"
        raise error_about(FormatError, f"needs {count} experts, but {fault}", path=catalog.title, tensor=stack)
    shapes = {part.shape for part in members.values()}
    if len(shapes) > 1:
        text = "is a stack of experts, but these have different shapes"
        raise error_about(FormatError, text, path=catalog.title, tensor=stack)
    moves = (members[k].moves[0]._replace(written=TensorView(k)) for k in range(count))
    return TensorRecipe((count, *shapes.pop()), tuple(moves))


def _heads(catalog: Catalog, name: str, part: TensorRecipe) -> dict[str, TensorRecipe]:
    """Divide the up-projection of latent attention by heads."""
    sizes = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    heads, keys, values = (_size(catalog, key) for key in sizes)
    if len(part.shape) != 2 or heads > MAX_EXPERTS or part.shape[0] != heads * (keys + values):
        text = f"{list(part.shape)} does not have {heads} heads of {keys} + {values} rows"
        raise error_about(FormatError, text, tensor=name)
    module, columns, source = name.removesuffix("kv_b_proj.weight"), part.shape[1], part.moves[0].source
    embed, unembed = [], []
    for k in range(heads):
        begin = k * (keys + values)
        middle, end = begin + keys, begin + keys + values
        embed.append(Move(source, TensorView(rows=slice(begin, middle)), TensorView(k, transposed=True)))
        unembed.append(Move(source, TensorView(rows=slice(middle, end)), TensorView(k)))
    return {
        f"{module}embed_q.weight": TensorRecipe((heads, columns, keys), tuple(embed)),
        f"{module}unembed_out.weight": TensorRecipe((heads, values, columns), tuple(unembed)),
    }


def _check_layers(recipes: Iterable[str], count: int, preset: Preset, experts: MlxExperts) -> None:
    """Refuse layers that mlx-lm's model does not have."""
    layers = {int(match[1]): name for name in recipes if (match := _LAYER.match(name))}
    beyond = next((layer for layer in sorted(layers) if layer >= count), None)
    if beyond is not None:
        text = f"{preset.name}: mlx-lm does not load layer {beyond}, because the config has {count} layers: "
        text += f"leave it out in a conversion before this one, with drop= and model.layers.{beyond}.*"
        raise UnsupportedError(text, tensor=layers[beyond])
    sparse = {int(match[1]) for name in recipes if STACK in name and (match := _LAYER.match(name))}
    dense = next((layer for layer in sorted(layers) if layer not in sparse), None)
    if experts.in_every_layer and dense is not None:
        text = f"{preset.name}: layer {dense} has no experts, and mlx-lm expects experts in every layer"
        raise UnsupportedError(text, tensor=layers[dense])


def _size(catalog: Catalog, key: str) -> int:
    value = (catalog.config or {}).get(key)
    if type(value) is not int or value <= 0:
        raise FormatError(f"config.json: {key} must be a positive integer, got {show(value)}", catalog.title)
    return value
