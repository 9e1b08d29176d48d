"""Load a checkpoint with its weights in the format of an engine, as a folder for the engine would hold them."""

from __future__ import annotations

from typing import NamedTuple

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.preset import PRESETS
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.run import jobs
from ...engine.run.memory import private_array
from ...engine.run.progress import Progress, reporter
from ...models.choosing import choose
from ...packed.in_memory import names_of, packing_of
from ..sources.catalog import Catalog, read_values
from ..sources.description import TensorDescription
from .encoding import Encoding, encode, largest_in
from .engine_layout import arranged
from .engine_rules import EngineRules, nothing_left
from .weights import ScratchBuffers, Weights, weights_in


class EncodedTensors(NamedTuple):
    """The result of `load_encoded`."""

    tensors: dict[str, QuantizedTensor | Array]
    quantized: dict[str, str]  # the format of each quantized tensor
    kept: dict[str, str]  # why each other tensor is unquantized
    abouts: dict[str, TensorDescription]  # of the source


def load_encoded(catalog: Catalog, rules: EngineRules, threads: int | None, progress: Progress) -> EncodedTensors:
    """Load and quantize tensors, one after another."""
    catalog = arranged(catalog, rules.preset)
    choice = choose(catalog.config, catalog.format, dict.fromkeys(catalog).keys())
    schema = None if choice is None else choice.schema
    rules.set_model(schema, catalog, chosen=catalog.config is None)
    abouts = {name: catalog.about(name) for name in catalog if not rules.drops(name)}
    rules.kept.check(abouts)
    plans = {name: rules.plan(name, about) for name, about in abouts.items()}
    quantized = {name: plan.scheme for name, plan in plans.items() if plan.scheme is not None}
    if not quantized:
        raise nothing_left(rules.preset, {name: plan.reason for name, plan in plans.items()})
    total, done = sum(about.nbytes for about in abouts.values()), 0
    tensors: dict[str, QuantizedTensor | Array] = {}
    with reporter(progress, total) as report:
        loader = _EngineLoader(catalog, rules, abouts, quantized, threads=threads)
        for name, about in abouts.items():
            tensors[name] = loader.encoded(name) if name in quantized else loader.kept(name)
            done += about.nbytes
            report(done)
    kept = {name: plan.reason for name, plan in plans.items() if plan.scheme is None}
    return EncodedTensors(tensors, quantized, kept, abouts)


class _EngineLoader:
    def __init__(
        self,
        catalog: Catalog,
        rules: EngineRules,
        abouts: dict[str, TensorDescription],
        quantized: dict[str, str],
        *,
        threads: int | None,
    ) -> None:
        self._catalog, self._rules, self._abouts, self._threads = catalog, rules, abouts, threads
        self._quantized, self._quantization = quantized, rules.quantization(quantized)
        self._maxima: dict[tuple[str, ...], float] = {}
        self._buffers = ScratchBuffers()

    def encoded(self, name: str) -> QuantizedTensor:
        """Return a quantized weight."""
        about, preset = self._abouts[name], PRESETS[self._quantized[name]]
        row = self._rules.weight_dtype(about, None)
        encoding = Encoding(name, preset, about.shape, row)
        largest = None
        if packing.GLOBAL in preset.parts:
            partners = self._rules.partners(name, self._quantized)
            if partners not in self._maxima:
                encodings = [Encoding(partner, preset, self._abouts[partner].shape, row) for partner in partners]
                self._maxima[partners] = max(
                    largest_in(each, self._weights(each.name, row), self._threads) for each in encodings
                )
            largest = self._maxima[partners]
        parts = encode(encoding, self._weights(name, row), largest=largest, threads=self._threads)
        parts = {role: jobs.native_order(part) for role, part in {**parts, **encoding.constants()}.items()}
        return QuantizedTensor.of_parts(
            packing_of(preset, name, parts, self._quantization), names_of(preset, name), parts
        )

    def kept(self, name: str) -> Array:
        """Return an unquantized tensor."""
        about = self._abouts[name]
        row = self._rules.kept_dtype(about, None)
        if row is None or not (about.floating or about.scheme is not None):
            value = self._catalog.value(name, self._threads)
            assert not isinstance(value, QuantizedTensor)
            return value
        return self._values(name, row)

    def _weights(self, name: str, row: dtypes.Dtype) -> Weights:
        return weights_in(self._catalog, name, row, self._buffers, private_array, threads=self._threads)

    def _values(self, name: str, row: dtypes.Dtype) -> Array:
        array = private_array(self._abouts[name].shape, dtypes.array_dtype(row.number))
        value = self._catalog.restoring(name) or self._catalog.source(name)
        return read_values(value, row, array, self._threads)
