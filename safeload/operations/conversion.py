"""What becomes of each tensor when a checkpoint is converted: the decisions of `convert`, as outputs made on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array
from ..base.scheme import usual_axis
from ..base.selecting import Patterns
from ..base.text import show
from ..engine import jobs
from ..engine.entries import Entry
from ..engine.lazy import Lazy, LazyPacked, LazyQuantized, Staged
from ..engine.quantized_tensor import QuantizedTensor, storage_of
from ..engine.source import Source
from ..errors import UnsupportedError
from ..models.layout import Layout
from ..packed import grouping
from .about import About
from .catalog import Catalog
from .outputs import Scratch, itself, lazy_part, not_none
from .quantize import Rounding, quantize_source
from .quantize_checkpoint import Model, Planned, Rules, Summary
from .shards import Output, config_with
from .stack import Stack, fill, plan

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
    """Decides about each tensor, and gives lazy outputs that are made when a writer reaches them.

    Args:
        catalog: the tensors.
        some: which of them to convert.
        target: dtype for floating tensors; None to leave it.
        rules: decide which tensors are quantized; None to quantize none.
        format: of the result.
        threads: for reading and converting; None: chosen automatically.

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
        threads: int | None,
    ) -> None:
        self._catalog = catalog
        model = Model.of(catalog)
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
        self._rounding: Rounding | None = "ggml" if format == "gguf" else None
        self._threads = threads
        self._scratch = Scratch()
        self._entries: dict[str, Entry] | None = None
        self._quantized_to: dict[str, str] = {}
        self._kept_because: dict[str, str] = {}
        if target is not None or rules is not None or format != "safetensors":
            what = "quantize=" if rules is not None else "dtype=" if target is not None else f"the format {format}"
            grouping.refuse(catalog.codes, self._abouts, f"convert with {what}")

    @property
    def names(self) -> list[str]:
        """The tensors to convert, by their names in the source, and the heads that are made."""
        return [*self._abouts, *self._heads]

    def config(self) -> dict[str, Any] | None:
        """The ``config.json`` of the result; None without one."""
        converts = self._target is not None or self._rules is not None
        restored = converts and any(about.packed for about in self._abouts.values())
        return config_with(self._catalog.config, self._target, restored=restored)

    def summary(self, nbytes: int) -> Summary | None:
        """Which tensors were quantized, and why the others were not; None without ``quantize``.

        Args:
            nbytes: bytes of the result.
        """
        if self._rules is None:
            return None
        return Summary(self._before, nbytes, self._quantized_to, self._kept_because)

    def of_tensors(self) -> dict[str, Output]:
        """Each tensor under its own name; tied heads, made of their embedding; activation scales if all stay packed."""
        outputs = {name: self._output(name, about) for name, about in self._abouts.items()}
        if self._rules is None and self._target is None and self._format == "safetensors":
            outputs.update((name, lazy_part(part)) for name, part in self._ignored.items())
        for head, embedding in self._heads.items():
            about = self._catalog.about(embedding)
            if about.quantized or not about.floating:
                continue
            scheme = self._planned(head, about).scheme
            if scheme is not None:
                outputs[head] = self._quantized(scheme, about.shape, partial(self._catalog.source, embedding, head))
            elif embedding not in self._abouts:  # the embedding that a reader would tie it to is not in the result
                outputs[head] = self._output(embedding, about)
        return outputs

    def _planned(self, name: str, about: About) -> Planned:
        """The decision about one tensor, recorded for `summary`."""
        assert self._rules is not None
        planned = self._rules.plan(name, about)
        if planned.scheme is None:
            self._kept_because[name] = planned.reason
        else:
            self._quantized_to[name] = planned.scheme
        return planned

    def of_layout(self, layout: Layout) -> dict[str, Output]:
        """The tensors of a layout."""
        outputs: dict[str, Output] = {}
        for planned in plan(self._abouts, layout, self._target):
            name, row = planned.entry.name, planned.row
            grouping.refuse(self._catalog.codes, planned.names, "convert with layout=")

            def make(planned: Stack = planned) -> Array:
                array = self._scratch.array(planned.shape, dtypes.array_dtype(planned.row.number))
                fill(self._catalog, [(planned, array)], threads=self._threads)
                return array

            scheme = None if self._rules is None else self._planned(name, _about_of(planned)).scheme
            if scheme is None:
                outputs[name] = Lazy(dtypes.array_dtype(row.number), planned.shape, make)
            else:
                outputs[name] = self._quantized(scheme, planned.shape, make)
        return outputs

    def _output(self, name: str, about: About) -> Output:
        row, shape = about.row, about.shape
        planned = None if self._rules is None else self._planned(name, about)
        if planned is not None and planned.scheme is not None:
            return self._quantized(planned.scheme, shape, partial(self._values, name))
        if about.packed:
            if self._target is None and self._rules is None:
                return self._packed(name, about)
            row = _F32
        elif about.scheme is not None and (self._target is None or (planned is not None and planned.already)):
            return self._kept(name, about)
        if self._target is not None and (row.floating or about.scheme is not None):
            row = self._target
        if self._format == "gguf" and row.floating and len(shape) < 2 and row.block_bytes > 1:
            row = _F32  # llama.cpp aborts on norms of any other dtype; a dtype that GGUF lacks is still refused
        if row.packed:
            raise UnsupportedError(f"tensor {show(name)} is {row.code}, which numpy does not support: pass dtype=")
        dtype = dtypes.array_dtype(row.number)
        return Lazy(dtype, shape, lambda: self._read(name, dtype, shape, row), self._staged(name, row))

    def _values(self, name: str) -> Source | QuantizedTensor:
        """A tensor's values; packed ones are dequantized by the jobs that read them."""
        return self._catalog.restoring(name) or self._catalog.source(name)

    def _staged(self, name: str, row: dtypes.Dtype) -> Staged | None:
        """How the writer of safetensors reads a tensor of a file as another dtype."""
        if self._format != "safetensors":
            return None
        if self._entries is None:  # together: one by one would take longer than reading small tensors
            plain = (name for name, about in self._abouts.items() if about.scheme is None)
            self._entries = self._catalog.described(plain, self._target)
        entry = self._entries.get(name) or self._catalog.described([name], self._target).get(name)
        return None if entry is None or entry.target != row.number else Staged(entry, self._threads)

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], row: dtypes.Dtype) -> Array:
        value = self._values(name)
        array = self._scratch.array(shape, dtype)
        if isinstance(value, QuantizedTensor):
            return value.dequantize(dtype, out=array, threads=self._threads)
        if value.size:
            jobs.Batch(value.jobs(jobs.address_of(array), row.number)).run(threads=self._threads)
        return jobs.native_order(array)

    def _quantized(self, scheme: str, shape: tuple[int, ...], value: Callable[[], Any]) -> LazyQuantized:
        """A tensor that is quantized when it is written."""
        axis = usual_axis(scheme, shape)
        (data_dtype, data_shape), scale = storage_of(scheme, shape, axis)

        def make() -> QuantizedTensor:
            given = value()
            # A stacked array is in the scratch memory itself.
            stacked = isinstance(given, np.ndarray)
            data = (
                jobs.private_array(data_shape, data_dtype) if stacked else self._scratch.array(data_shape, data_dtype)
            )
            rounding = self._rounding if scheme == "q4_0" else None
            return quantize_source(given, scheme, axis=axis, rounding=rounding, data=data, threads=self._threads)

        scales = None
        if scale is not None:
            scales = Lazy(scale[0], scale[1], lambda: not_none(make().scale))
        return LazyQuantized(scheme, shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)

    def _packed(self, name: str, about: About) -> LazyPacked:
        """A packed tensor, as it is stored."""
        if self._format != "safetensors":
            raise UnsupportedError(
                f"tensor {show(name)} is {about.scheme}, which {self._format} files do not hold: pass dtype="
            )
        value = self._catalog.value(name)
        assert isinstance(value, QuantizedTensor)
        assert value.packing is not None
        parts = {role: Lazy(part.dtype, part.shape, partial(itself, part)) for role, part in value.roles.items()}
        return LazyPacked(value.packing, value.names, parts)

    def _kept(self, name: str, about: About) -> LazyQuantized:
        """A quantized tensor, unchanged."""

        def make() -> QuantizedTensor:
            value = self._catalog.source(name)
            assert isinstance(value, QuantizedTensor)
            return value

        axis = about.axis
        assert about.scheme is not None
        (data_dtype, data_shape), scale = storage_of(about.scheme, about.shape, axis)
        scales = None if scale is None else Lazy(scale[0], scale[1], lambda: not_none(make().scale))
        return LazyQuantized(about.scheme, about.shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)


def _about_of(planned: Stack) -> About:
    """Describes a tensor that is stacked when it is written."""
    row, shape = planned.row, planned.shape
    return About(planned.entry.name, row.name, shape, row.nbytes(math.prod(shape)), row, row.floating)
