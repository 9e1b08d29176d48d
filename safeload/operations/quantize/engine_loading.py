"""Load a checkpoint with its weights in the format of an engine, as a folder for the engine would hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...base import dtypes, packing
from ...base.arrays import Array
from ...base.packing import Packing
from ...base.preset import PRESETS, Preset
from ...engine.codes.quantized_tensor import QuantizedTensor
from ...engine.run import jobs
from ...engine.run.memory import private_array
from ...engine.run.progress import Progress, reporter
from ...models.choosing import choose
from ...packed.families import Stored, families
from ...packed.grid import Misfit
from ...packed.packed_group import GroupContext, PackedGroup
from ...packed.quantization import Quantization
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
            _packing_of(preset, name, parts, self._quantization), _names_of(preset, name), parts
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


# ---- packings ----


class _Contents:
    """The contents of small parts; see `contents.PackedContents`."""

    def __init__(self, parts: Mapping[str, Array]) -> None:
        self._parts = parts

    def __call__(self, name: str) -> bytes:
        return self._parts[name].tobytes()

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(self._parts[name].tolist())

    def note(self, name: str, key: str) -> str | None:
        return None


def _names_of(preset: Preset, name: str) -> dict[str, str]:
    """Return the names of the parts of a weight by role, and its own under `packing.NAME`."""
    module = name.removesuffix(".weight")
    return {packing.NAME: name, **{role: module + part.suffix for role, part in preset.parts.items()}}


def _packing_of(preset: Preset, name: str, parts: Mapping[str, Array], quantization: Quantization) -> Packing:
    """Return the packing of a weight."""
    names = _names_of(preset, name)
    stored, contents = {}, {}
    for role, array in parts.items():
        row = dtypes.BY_CODE[preset.parts[role].dtype or dtypes.row_of(array.dtype).code]  # type: ignore[union-attr]
        stored[names[role]] = Stored(row, array.shape)
        contents[names[role]] = array
    context = GroupContext(stored, quantization, quantization.text(), _Contents(contents))  # type: ignore[arg-type]
    codes = names[packing.CODES]
    own = {role: text for role, text in names.items() if role != packing.NAME}
    for family in families():
        if family.describe is None or stored[codes].row.code not in family.dtypes or not codes.endswith(family.main):
            continue
        if family.method not in (None, quantization.method) or family.parts_beside(codes, stored) is None:
            continue
        try:
            return PackedGroup(codes, name, own, context).described(family)
        except Misfit:
            continue
    raise AssertionError(f"no family reads {preset.name}")
