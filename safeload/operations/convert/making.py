"""Makes the tensors of a conversion as decided, each when a writer reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.scheme import usual_axis
from ...base.text import show
from ...engine.codes.quantized_tensor import QuantizedTensor, storage_of
from ...engine.codes.source import Source
from ...engine.read.lazy import Lazy, LazyPacked, LazyQuantized, Staged
from ...engine.read.plan import Entry
from ...engine.run import jobs
from ...engine.run.memory import address_of, private_array
from ...errors import UnsupportedError
from ...models.layout import Layout
from ..folders.shards import Output
from ..quantize.quantize import Rounding, quantize_source
from ..quantize.stack import fill, plan
from ..sources.catalog import Catalog
from ..sources.description import TensorDescription
from .decisions import Decision
from .outputs import Scratch, itself, lazy_part, not_none


class Maker:
    """Turns decisions into lazy outputs.

    Args:
        catalog: the tensors.
        decisions: what becomes of them, by the name of each in messages.
        format: of the result.
        threads: for reading and converting; None: chosen automatically.
    """

    def __init__(self, catalog: Catalog, decisions: Mapping[str, Decision], format: str, threads: int | None) -> None:
        self._catalog = catalog
        self._decisions = decisions
        self._format = format
        self._rounding: Rounding | None = "ggml" if format == "gguf" else None
        self._threads = threads
        self._scratch = Scratch()
        self._entries: dict[str | None, dict[str, Entry]] = {}

    def outputs(self) -> dict[str, Output]:
        """All tensors, in the order of the decisions.

        Raises:
            UnsupportedError: a tensor that numpy or the format does not support.
        """
        return {name: self._output(name, decision) for name, decision in self._decisions.items()}

    def _output(self, name: str, decision: Decision) -> Output:
        if decision.stack is not None:
            return self._stacked(name, decision)
        (source,) = decision.sources
        if source not in self._catalog:
            return lazy_part(self._catalog.ignored[source], self._threads)
        about = self._catalog.about(source)
        if decision.scheme is not None:
            return self._quantized(decision.scheme, about.shape, partial(self._values, source, name))
        if decision.dtype is None and about.packed:
            return self._packed(source, about)
        if decision.dtype is None and about.scheme is not None:
            return self._kept(source, about)
        row = about.row if decision.dtype is None else dtypes.BY_CODE[decision.dtype]
        if row.packed:
            raise UnsupportedError(f"tensor {show(source)} is {row.code}, which numpy does not support: pass dtype=")
        dtype, shape = dtypes.array_dtype(row.number), about.shape
        staged = self._staged(source, decision.dtype, row)
        return Lazy(dtype, shape, lambda: self._read(source, dtype, shape, row), staged)

    def _values(self, source: str, name: str) -> Source | QuantizedTensor:
        """A tensor's values; packed ones are dequantized by the jobs that read them."""
        return self._catalog.restoring(source, name) or self._catalog.source(source, name)

    def _staged(self, source: str, code: str | None, row: dtypes.Dtype) -> Staged | None:
        """How the writer of safetensors reads a tensor of a file as another dtype."""
        if self._format != "safetensors":
            return None
        if code not in self._entries:  # together: one by one would take longer than reading small tensors
            plain = (one for one in self._decisions.values() if one.scheme is None and one.stack is None)
            names = [one.sources[0] for one in plain if one.dtype == code and one.sources[0] in self._catalog]
            self._entries[code] = self._catalog.described(names, None if code is None else dtypes.BY_CODE[code])
        entry = self._entries[code].get(source)
        return None if entry is None or entry.target != row.number else Staged(entry, self._threads)

    def _read(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], row: dtypes.Dtype) -> Array:
        array = self._scratch.array(shape, dtype)
        if self._catalog.fill(name, row, array, self._threads):
            return array
        value = self._values(name, name)
        if isinstance(value, QuantizedTensor):
            return value.dequantize(dtype, out=array, threads=self._threads)
        if value.size:
            batch = jobs.Batch(value.jobs(address_of(array), row.number))
            batch.run(threads=self._threads)
        return jobs.native_order(array)

    def _stacked(self, name: str, decision: Decision) -> Output:
        assert decision.stack is not None
        assert decision.dtype is not None
        known = {source: self._catalog.about(source) for source in decision.sources}
        (planned,) = plan(known, Layout(name, [decision.stack]), dtypes.BY_CODE[decision.dtype])

        def make() -> Array:
            array = self._scratch.array(planned.shape, dtypes.array_dtype(planned.row.number))
            fill(self._catalog, [(planned, array)], threads=self._threads)
            return array

        if decision.scheme is not None:
            return self._quantized(decision.scheme, planned.shape, make)
        return Lazy(dtypes.array_dtype(planned.row.number), planned.shape, make)

    def _quantized(self, scheme: str, shape: tuple[int, ...], value: Callable[[], Any]) -> LazyQuantized:
        """A tensor that is quantized when it is written."""
        axis = usual_axis(scheme, shape)
        (data_dtype, data_shape), scale = storage_of(scheme, shape, axis)

        def make() -> QuantizedTensor:
            given = value()
            # A stacked array is in the scratch memory itself.
            stacked = isinstance(given, np.ndarray)
            data = private_array(data_shape, data_dtype) if stacked else self._scratch.array(data_shape, data_dtype)
            rounding = self._rounding if scheme == "q4_0" else None
            return quantize_source(given, scheme, axis=axis, rounding=rounding, data=data, threads=self._threads)

        scales = None
        if scale is not None:
            scales = Lazy(scale[0], scale[1], lambda: not_none(make().scale))
        return LazyQuantized(scheme, shape, Lazy(data_dtype, data_shape, lambda: make().data), scales, axis)

    def _packed(self, name: str, about: TensorDescription) -> LazyPacked:
        """A packed tensor, as it is stored."""
        place = self._catalog.place(name)
        packed = None if place.file is None else place.file.table.packed(place.number)
        value = None if packed is not None else self._catalog.value(name)
        assert value is None or isinstance(value, QuantizedTensor)
        means = packed.packing if packed is not None else None if value is None else value.packing
        assert means is not None
        if self._format != "safetensors" and (self._format, means.family) != ("gguf", packing.GGUF):
            raise UnsupportedError(
                f"tensor {show(name)} is {about.scheme}, which {self._format} files do not hold: pass dtype="
            )
        if packed is not None:  # read in chunks, never mapped
            lazy = {role: lazy_part(part, self._threads) for role, part in packed.parts.items()}
            return LazyPacked(packed.packing, packed.names(name), lazy)
        assert value is not None
        parts = {role: Lazy(part.dtype, part.shape, partial(itself, part)) for role, part in value.roles.items()}
        return LazyPacked(means, value.names, parts)

    def _kept(self, name: str, about: TensorDescription) -> LazyQuantized:
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
