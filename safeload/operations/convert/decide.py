"""Decide how each tensor is converted."""

from __future__ import annotations

import math
from typing import Any

from ...base import dtypes
from ...formats.registry import SAFETENSORS
from ...models.layout import Layout
from ...packed import codes_without_scale
from ..folders.shards import config_with
from ..quantize.checkpoint import ModelRules, Planned, Rules, Summary
from ..quantize.stack import Stack, plan
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from .decisions import Decision
from .request import ConvertRequest

_F32 = dtypes.BY_CODE["F32"]


class Decider:
    """Decides how tensors are converted, and keeps a record for the summary.

    Args:
        rules: select the tensors to quantize; None quantizes nothing.

    Raises:
        TensorNotFoundError: a name is unknown, or a pattern matches no tensor.
        UnsupportedError: a tensor that holds codes would be converted as if it held numbers.
    """

    def __init__(self, catalog: Catalog, request: ConvertRequest, rules: Rules | None) -> None:
        self._catalog = catalog
        self._target = request.target
        self._format = request.format
        self._rules = rules
        options = request.options
        names, only, drop = options.get("names"), options.get("only"), options.get("drop")
        model = ModelRules.of(catalog)
        tied = {} if rules is None or names is not None else model.tied_heads()
        chosen = dict.fromkeys(catalog.choose(names, only, drop, [*tied, *catalog.ignored]))
        self.descriptions = {name: catalog.about(name) for name in chosen if name in catalog}
        self._heads = {head: embedding for head, embedding in tied.items() if head in chosen}
        self._ignored = [name for name in catalog.ignored if name in chosen]
        self._quantized: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        if rules is not None:
            rules.schema = model.schema
        if self._target is not None or rules is not None or self._format != SAFETENSORS:
            cause = f"the format {self._format}" if self._target is None else "dtype="
            cause = cause if rules is None else "quantize="
            codes_without_scale.refuse(catalog.codes, self.descriptions, f"convert with {cause}")

    @property
    def names(self) -> list[str]:
        """Source names of the tensors to convert, and the tied heads that the result may get."""
        return [*self.descriptions, *self._heads]

    def config(self) -> dict[str, Any] | None:
        """Return the ``config.json`` of the result, or None if the source has none."""
        return config_with(self._catalog.config, self._target, restored=self.restored)

    @property
    def restored(self) -> bool:
        """True if packed tensors are dequantized."""
        converts = self._target is not None or self._rules is not None
        return converts and any(tensor.packed for tensor in self.descriptions.values())

    def summary(self, nbytes: int) -> Summary | None:
        """Return the summary of quantized and kept tensors, or None without ``quantize``.

        Args:
            nbytes: bytes of the result.
        """
        if self._rules is None:
            return None
        before = sum(tensor.nbytes for tensor in self.descriptions.values())
        return Summary(before, nbytes, self._quantized, self._kept)

    def of_tensors(self) -> dict[str, Decision]:
        """Decide about tensors that keep their names, tied heads included.

        Activation scales are copied only if all tensors stay packed.
        """
        self._catalog.refuse_unknown(self.descriptions)
        decisions = {name: self._decide(name, tensor) for name, tensor in self.descriptions.items()}
        if self._rules is None and self._target is None and self._format in (SAFETENSORS, "gguf"):
            decisions.update((name, Decision((name,))) for name in self._ignored)
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

    def of_layout(self, layout: Layout) -> dict[str, Decision]:
        """Decide about the tensors of a layout."""
        decisions: dict[str, Decision] = {}
        for stack in plan(self.descriptions, layout, self._target):
            name = stack.entry.name
            codes_without_scale.refuse(self._catalog.codes, stack.names, "convert with layout=")
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
        return planned

    def _decide(self, name: str, tensor: TensorDescription) -> Decision:
        row = tensor.row
        planned = None if self._rules is None else self._planned(name, tensor)
        kept = None if planned is None else planned.reason or None
        if planned is not None and planned.scheme is not None:
            return Decision((name,), scheme=planned.scheme)
        if tensor.packed:
            if self._target is None and self._rules is None:
                return Decision((name,))
            row = _F32
        elif tensor.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return Decision((name,), kept=kept)
        if self._target is not None and (row.floating or tensor.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and len(tensor.shape) < 2 and row.block_bytes > 1:
            row = _F32  # llama.cpp aborts on norms of any other dtype; the writer still refuses unsupported dtypes
        unchanged = row is tensor.row and tensor.scheme is None
        return Decision((name,), None if unchanged else row.code, kept=kept)


def _description_of(stack: Stack) -> TensorDescription:
    row, shape = stack.row, stack.shape
    return TensorDescription(stack.entry.name, row.name, shape, row.nbytes(math.prod(shape)), row, row.floating)
