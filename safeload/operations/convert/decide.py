"""Decide how each tensor is converted, and record the decisions in plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.scheme import INT8, SCHEMES
from ...formats.registry import KERAS, SAFETENSORS
from ...models.diffusion import model_of
from ...models.layout import Layout, StackedTensor
from ...packed import finder
from ..folders.shards import config_with
from ..quantize.checkpoint import ModelRules, Rules, Summary, described
from ..quantize.engine_rules import EngineRules, nothing_left
from ..quantize.file_types import FileTypeRules
from ..quantize.keeping import Planned
from ..quantize.stack import Stack, plan
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from ..sources.restructured import RestructuredCatalog
from .request import ConvertRequest

_F32 = dtypes.BY_CODE["F32"]
# Stands for the dtype number of a tensor that is copied.
AS_STORED = -1


class Decision(NamedTuple):
    """How a tensor of the result is made."""

    sources: tuple[str, ...]  # names in the source: a single tensor, or the layers to stack
    dtype: str | None = None  # code of the dtype to convert to; None leaves the tensor as stored
    scheme: str | None = None  # scheme to quantize to
    kept: str | None = None  # why ``quantize`` leaves the tensor unquantized
    stack: StackedTensor | None = None  # entry of the layout; `dtype` is never None with it
    partners: tuple[str, ...] = ()  # weights in the source that share a scale with it, itself included

    @property
    def reads(self) -> tuple[str, ...]:
        """Names in the source of all tensors that the result depends on."""
        return tuple(dict.fromkeys((*self.sources, *self.partners)))


class Decider:
    """Decides how tensors are converted, and keeps a record for the summary."""

    def __init__(self, catalog: Catalog, request: ConvertRequest, rules: Rules | EngineRules | None) -> None:
        self._catalog = catalog
        self._target = request.target
        self._format = request.format
        self._rules = rules  # None quantizes nothing
        self._diffusion = model_of(catalog.metadata) is not None
        self._kept_f32 = catalog.kept_f32 if isinstance(catalog, RestructuredCatalog) else frozenset()
        options = request.options
        names, only, drop = options.get("names"), options.get("only"), options.get("drop")
        model = ModelRules.of(catalog)
        self._engine = rules if isinstance(rules, EngineRules) else None
        if self._engine is not None:
            chosen_by = names is not None or only is not None
            self._engine.set_model(model.schema, catalog, chosen=chosen_by)
        # llama.cpp and engines tie the head themselves, and a restored model has all of its tensors.
        ties = not isinstance(rules, (FileTypeRules, EngineRules)) and not isinstance(catalog, RestructuredCatalog)
        tied = model.tied_heads() if rules is not None and names is None and ties else {}
        chosen = dict.fromkeys(catalog.choose(names, only, drop, [*tied, *catalog.ignored]))
        #: Entries other than tensors, with their types. Selecting such an entry by its exact name is an error.
        self.left_out = {}
        if names is None:
            unknown = catalog.unknown().items()
            self.left_out = {name: one.label for name, one in unknown if name in chosen and not one.is_tensor}
        chosen = {name: None for name in chosen if name not in self.left_out}
        self.descriptions = {name: catalog.about(name) for name in chosen if name in catalog}
        self._heads = {head: embedding for head, embedding in tied.items() if head in chosen}
        self.ignored = [name for name in catalog.ignored if name in chosen]
        self._quantized: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self.fallbacks: Counter[tuple[str, str]] = Counter()  # matrices by requested scheme and its fallback
        if isinstance(rules, Rules):
            rules.schema = model.schema
        if isinstance(rules, FileTypeRules):
            rules.prepare(self.descriptions)
        if self._engine is not None:
            self.descriptions = {k: v for k, v in self.descriptions.items() if not self._engine.drops(k)}
        unnamed = catalog.format == KERAS and not options.get("raw")  # in a copy nothing would tell codes from weights
        if self._target is not None or rules is not None or self._format != SAFETENSORS or unnamed:
            cause = f"the format {self._format}" if self._target is None else "dtype="
            cause = cause if rules is None else "quantize="
            finder.refuse(catalog.codes, self.descriptions, f"convert with {cause}")

    @property
    def names(self) -> list[str]:
        """Source names of the tensors to convert, and of tied heads that can be added."""
        return [*self.descriptions, *self._heads]

    def config(self, schemes: Collection[str], names: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the ``config.json`` of the result, or None if the source has none; ``names`` maps old to new names."""
        config = config_with(self._catalog.config, self._target, restored=self.restored, schemes=schemes)
        return config if self._engine is None else self._engine.config(config, self._quantized, self._kept, names)

    @property
    def restored(self) -> bool:
        """True if packed tensors are dequantized."""
        converts = self._target is not None or self._rules is not None
        return converts and any(tensor.packed for tensor in self.descriptions.values())

    def summary(self, nbytes: int) -> Summary | None:
        """Return the summary of quantized and kept tensors, or None without ``quantize``."""
        if self._rules is None:
            return None
        before = sum(tensor.nbytes for tensor in self.descriptions.values())
        heads = {head: self._catalog.about(embedding) for head, embedding in self._heads.items()}
        tensors = described({**self.descriptions, **{head: heads[head] for head in heads if head in self._quantized}})
        return Summary(before, nbytes, self._quantized, self._kept, tensors)

    def planned_summary(self, nbytes: int, decisions: Mapping[str, Decision]) -> dict[str, Any] | None:
        """Return the part of the summary that is not in pieces with these decisions."""
        summary = self.summary(nbytes)
        if summary is None:
            return None
        in_pieces = {name for name, decision in decisions.items() if decision.kept is not None}
        kept = {name: reason for name, reason in summary.kept.items() if name not in in_pieces}
        return {"before": summary.bytes_before, "kept": kept}

    def of_tensors(self) -> dict[str, Decision]:
        """Decide about tensors under their own names, and about tied heads."""
        self._catalog.refuse_unknown(self.descriptions)
        names: Iterable[str] = self.descriptions
        if isinstance(self._rules, FileTypeRules):
            names = self._rules.ordered(names)
        decisions = {name: self._decide(name, self.descriptions[name]) for name in names}
        if self._engine is not None:
            return self._with_partners(decisions, self._engine)
        if self._rules is None and self._target is None and self._format in (SAFETENSORS, "gguf"):
            decisions.update((name, Decision((name,))) for name in self.ignored)  # activation scales: all stays packed
        for head, embedding in self._heads.items():
            tensor = self._catalog.about(embedding)
            if tensor.quantized or not tensor.floating:
                continue
            scheme = self._planned(head, tensor).scheme
            if scheme is not None:
                decisions[head] = Decision((embedding,), scheme=scheme)
            elif embedding not in self.descriptions:  # a reader has no embedding in the result to tie the head to
                decisions[head] = self._decide(embedding, tensor)
        return decisions

    def _with_partners(self, decisions: dict[str, Decision], engine: EngineRules) -> dict[str, Decision]:
        """Let weights that the engine fuses share a scale."""
        if not self._quantized:
            raise nothing_left(engine.preset, self._kept)
        for name in self._quantized:
            partners = engine.partners(name, self._quantized)
            decisions[name] = decisions[name]._replace(partners=partners if len(partners) > 1 else ())
        return decisions

    def of_layout(self, layout: Layout) -> dict[str, Decision]:
        """Decide about the tensors of a layout."""
        decisions: dict[str, Decision] = {}
        for stack in plan(self.descriptions, layout, self._target):
            name = stack.entry.name
            finder.refuse(self._catalog.codes, stack.names, "convert with layout=")
            planned = None if self._rules is None else self._planned(name, _description_of(stack))
            scheme, kept = (None, None) if planned is None else (planned.scheme, planned.reason or None)
            decisions[name] = Decision(tuple(stack.names), stack.row.code, scheme, kept, stack.entry)
        return decisions

    def _planned(self, name: str, tensor: TensorDescription) -> Planned:
        """Apply the rules to a tensor and record the outcome for the summary."""
        assert self._rules is not None
        planned = self._rules.plan(name, tensor)
        if planned.scheme is None:
            self._kept[name] = planned.reason
        else:
            self._quantized[name] = planned.scheme
            if planned.requested is not None:
                self.fallbacks[planned.requested, planned.scheme] += 1
        return planned

    def _decide(self, name: str, tensor: TensorDescription) -> Decision:
        row = tensor.row
        planned = None if self._rules is None else self._planned(name, tensor)
        kept = None if planned is None else planned.reason or None
        if self._engine is not None and planned is not None:
            if planned.scheme is not None:
                weight = self._engine.weight_dtype(tensor, self._target)
                return Decision((name,), weight.code, planned.scheme)
            target = self._engine.kept_dtype(tensor, self._target)
            changes = target is not None and (tensor.floating or tensor.scheme is not None) and target is not row
            return Decision((name,), target.code if changes and target is not None else None, kept=kept)
        if planned is not None and planned.scheme is not None:
            return Decision((name,), scheme=planned.scheme)
        if planned is not None and planned.dtype is not None:
            return Decision((name,), planned.dtype, kept=kept)
        if tensor.packed:
            if self._target is None and self._rules is None:
                return Decision((name,))
            row = _F32
        elif tensor.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return Decision((name,), kept=kept)
        if self._target is not None and (row.floating or tensor.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and row.block_bytes > 1 and self._is_kept_f32(name, tensor):
            row = _F32  # the writer still refuses unsupported dtypes
        unchanged = row is tensor.row and tensor.scheme is None
        if unchanged and self._format == SAFETENSORS and row not in dtypes.SAFETENSORS:
            raise dtypes.not_stored(row.name, name)
        return Decision((name,), None if unchanged else row.code, kept=kept)

    def _is_kept_f32(self, name: str, tensor: TensorDescription) -> bool:
        """Return True if a tensor of a GGUF file is float32 whatever dtype is requested."""
        if name in self._kept_f32:
            return True
        # llama.cpp aborts on norms of any other dtype, ComfyUI does not.
        return len(tensor.shape) < 2 and (not self._diffusion or tensor.row is _F32)


def _description_of(stack: Stack) -> TensorDescription:
    row, shape = stack.row, stack.shape
    return TensorDescription(stack.entry.name, row.name, shape, row.nbytes(math.prod(shape)), row, row.floating)


# ---- in plans ----


def runs_of(decisions: Mapping[str, Decision]) -> list[dict[str, Any]]:
    """Return decisions as plain data, with a single run for neighbours with equal decisions."""
    runs = []
    for _, items in groupby(decisions.items(), key=_run_key):
        group = list(items)
        name, first = group[0]
        run = {
            "names": [*first.sources] if first.stack is not None else [name for name, _ in group],
            "dtype": first.dtype,
            "scheme": first.scheme,
            "kept": first.kept,
            "stack": first.stack and [first.stack.name, first.stack.source, first.stack.transpose],
            "of": first.sources[0] if first.stack is None and first.sources != (name,) else None,
            "partners": [*first.partners],
        }
        runs.append({key: value for key, value in run.items() if value})
    return runs


def _run_key(item: tuple[str, Decision]) -> tuple[Any, ...]:
    """Return the key of a decision's run; a stacked or renamed tensor has its own run."""
    name, decision = item
    alone = None if decision.sources == (name,) and decision.stack is None else name
    return decision.dtype, decision.scheme, decision.kept, alone, decision.partners


def decisions_of(runs: Iterable[Mapping[str, Any]]) -> dict[str, Decision]:
    """Return the decisions of `runs_of`."""
    decisions: dict[str, Decision] = {}
    for run in runs:
        dtype, scheme, kept, of = (run.get(key) for key in ("dtype", "scheme", "kept", "of"))
        if "stack" in run:
            stack = StackedTensor(*run["stack"])
            decisions[stack.name] = Decision(tuple(run["names"]), dtype, scheme, kept, stack)
            continue
        partners = tuple(run.get("partners", ()))
        for name in run["names"]:
            decisions[name] = Decision((of or name,), dtype, scheme, kept, partners=partners)
    return decisions


def runs_of_casts(names: Sequence[str], sources: Array, targets: Array) -> list[dict[str, Any]]:
    """Return tensors that are copied or cast, by their dtype numbers, like `runs_of`."""
    casts = np.where(sources == targets, AS_STORED, targets.astype(np.int16))
    begins = [0, *(np.flatnonzero(casts[1:] != casts[:-1]) + 1).tolist()] if len(casts) else []
    codes = [None if number == AS_STORED else dtypes.BY_NUMBER[number].code for number in casts[begins].tolist()]
    ends = [*begins[1:], len(casts)]
    return [
        {"names": [*names[begin:end]], **({} if code is None else {"dtype": code})}
        for begin, end, code in zip(begins, ends, codes, strict=False)
    ]


def target_of(code: str | None, scheme: str | None) -> int | None:
    """Return the dtype number that the core converts to, or `AS_STORED`; None unless a single conversion is enough."""
    if scheme is None:
        return AS_STORED if code is None else dtypes.BY_CODE[code].number
    return SCHEMES[scheme].target(None) if scheme in SCHEMES and scheme != INT8 else None


def casts_of(piece: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the `target_of` each tensor, or None unless each tensor has it."""
    if piece["adapters"] or piece["recipes"]:
        return None
    casts: dict[str, int] = {}
    for run in piece["tensors"]:
        target = target_of(run.get("dtype"), run.get("scheme"))
        if target is None or not run.keys().isdisjoint(("stack", "of", "partners")):
            return None
        casts.update(dict.fromkeys(run["names"], target))
    return casts
