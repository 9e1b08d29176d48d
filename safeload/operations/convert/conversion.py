"""What becomes of each tensor when a checkpoint is converted: the decisions of `convert`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...base import dtypes
from ...base.selecting import Patterns
from ...models.layout import Layout
from ...packed import codes_without_scale
from ..folders.shards import config_with
from ..quantize.checkpoint import ModelRules, Planned, Rules, Summary
from ..quantize.stack import Stack, plan
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from .decisions import Decision

_F32 = dtypes.BY_CODE["F32"]


class Some(NamedTuple):
    """Which tensors to convert.

    Attributes:
        names: exact names; None for all.
        only: patterns of the names to take, instead of ``names``.
        drop: patterns of the names to leave out.
    """

    names: Iterable[str] | None = None
    only: Patterns = None
    drop: Patterns = None


class Conversion:
    """Decides about each tensor; a `Maker` makes them.

    Args:
        catalog: the tensors.
        some: which of them to convert.
        target: dtype for floating tensors; None to leave it.
        rules: decide which tensors are quantized; None to quantize none.
        format: of the result.

    Raises:
        TensorNotFoundError: an unknown name, or a pattern that matches none.
        UnsupportedError: a tensor that holds codes would be treated as numbers.
    """

    def __init__(
        self,
        catalog: Catalog,
        some: Some,
        target: dtypes.Dtype | None,
        rules: Rules | None,
        format: str,
    ) -> None:
        self._catalog = catalog
        model = ModelRules.of(catalog)
        tied = {} if rules is None or some.names is not None else model.tied_heads()
        chosen = dict.fromkeys(catalog.choose(some.names, some.only, some.drop, [*tied, *catalog.ignored]))
        self._abouts = {name: catalog.about(name) for name in chosen if name in catalog}
        self._heads = {head: embedding for head, embedding in tied.items() if head in chosen}
        self._ignored = {name: part for name, part in catalog.ignored.items() if name in chosen}
        self._before = sum(about.nbytes for about in self._abouts.values())
        self._target = target
        self._format = format
        self._rules = rules
        if self._rules is not None:
            self._rules.schema = model.schema
        self._quantized_to: dict[str, str] = {}
        self._kept_because: dict[str, str] = {}
        if target is not None or rules is not None or format != "safetensors":
            what = "quantize=" if rules is not None else "dtype=" if target is not None else f"the format {format}"
            codes_without_scale.refuse(catalog.codes, self._abouts, f"convert with {what}")

    @property
    def names(self) -> list[str]:
        """The tensors to convert, by their names in the source, and the heads that are made."""
        return [*self._abouts, *self._heads]

    def config(self) -> dict[str, Any] | None:
        """The ``config.json`` of the result; None without one."""
        return config_with(self._catalog.config, self._target, restored=self.restored)

    @property
    def restored(self) -> bool:
        """Whether packed tensors are dequantized."""
        converts = self._target is not None or self._rules is not None
        return converts and any(about.packed for about in self._abouts.values())

    def summary(self, nbytes: int) -> Summary | None:
        """Which tensors were quantized, and why the others were not; None without ``quantize``.

        Args:
            nbytes: bytes of the result.
        """
        if self._rules is None:
            return None
        return Summary(self._before, nbytes, self._quantized_to, self._kept_because)

    def of_tensors(self) -> dict[str, Decision]:
        """Each tensor under its own name; tied heads, made of their embedding; activation scales if all stay packed."""
        self._catalog.refuse_unknown(self._abouts)
        decisions = {name: self._decide(name, about) for name, about in self._abouts.items()}
        if self._rules is None and self._target is None and self._format in ("safetensors", "gguf"):
            decisions.update((name, Decision((name,))) for name in self._ignored)
        for head, embedding in self._heads.items():
            about = self._catalog.about(embedding)
            if about.quantized or not about.floating:
                continue
            scheme = self._planned(head, about).scheme
            if scheme is not None:
                decisions[head] = Decision((embedding,), scheme=scheme)
            elif embedding not in self._abouts:  # the embedding that a reader would tie it to is not in the result
                decisions[head] = self._decide(embedding, about)
        return decisions

    def _planned(self, name: str, about: TensorDescription) -> Planned:
        """The decision about one tensor, recorded for `summary`."""
        assert self._rules is not None
        planned = self._rules.plan(name, about)
        if planned.scheme is None:
            self._kept_because[name] = planned.reason
        else:
            self._quantized_to[name] = planned.scheme
        return planned

    def of_layout(self, layout: Layout) -> dict[str, Decision]:
        """The tensors of a layout."""
        decisions: dict[str, Decision] = {}
        for planned in plan(self._abouts, layout, self._target):
            name = planned.entry.name
            codes_without_scale.refuse(self._catalog.codes, planned.names, "convert with layout=")
            quantized = None if self._rules is None else self._planned(name, _about_of(planned))
            scheme, kept = (None, None) if quantized is None else (quantized.scheme, quantized.reason or None)
            decisions[name] = Decision(tuple(planned.names), planned.row.code, scheme, kept, planned.entry)
        return decisions

    def _decide(self, name: str, about: TensorDescription) -> Decision:
        row = about.row
        planned = None if self._rules is None else self._planned(name, about)
        kept = None if planned is None else planned.reason or None
        if planned is not None and planned.scheme is not None:
            return Decision((name,), scheme=planned.scheme)
        if about.packed:
            if self._target is None and self._rules is None:
                return Decision((name,))
            row = _F32
        elif about.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return Decision((name,), kept=kept)
        if self._target is not None and (row.floating or about.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and len(about.shape) < 2 and row.block_bytes > 1:
            row = _F32  # llama.cpp aborts on norms of any other dtype; a dtype that GGUF lacks is still refused
        same = row is about.row and about.scheme is None
        return Decision((name,), None if same else row.code, kept=kept)


def _about_of(planned: Stack) -> TensorDescription:
    """Describes a tensor that is stacked when it is written."""
    row, shape = planned.row, planned.shape
    return TensorDescription(planned.entry.name, row.name, shape, row.nbytes(math.prod(shape)), row, row.floating)
