"""Predict the memory that a loaded checkpoint takes, by dtype and quantization scheme, without reading its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

from ..conversion.catalog import Catalog, Given, TensorDescription
from ..conversion.forms import arranged
from ..conversion.quantize import WEIGHTS, Encoding, SchemeName
from ..conversion.rules import EngineRules, Rules, check_restorable, schema_of, tied_heads
from ..core import dtypes
from ..core.names import NUMBER, grouped
from ..core.packing import ENGINE_FORMATS, SCHEMES, usual_axis
from ..core.quantized_tensor import storage_of
from ..errors import FormatError, UnsupportedError
from ..models.schema import Schema
from ..quant import codes
from ..quant.families import presets

#: The dtypes to predict sizes for.
DTYPES = ("float32", "float16", "bfloat16")


class Sizes(NamedTuple):
    """Bytes of all arrays of a loaded checkpoint (loading takes up to 256 MiB more), as far as it can be loaded so."""

    stored: int  # bytes of the stored tensors, as `safeload.load` loads them without ``dtype``
    dtypes: Mapping[str, int]  # bytes that `safeload.load` needs with this ``dtype``: "float32", "float16", "bfloat16"
    # Bytes that `load_quantized` needs with this scheme and no other arguments. Embeddings, norms and biases are then
    # float32, and a tied head is a separate tensor.
    schemes: Mapping[str, int]

    @property
    def smaller(self) -> dict[str, int]:
        """The schemes that quantize a tensor."""
        return {name: nbytes for name, nbytes in self.schemes.items() if nbytes != self.dtypes.get("float32")}


def sizes(source: Given) -> Sizes:
    """Predict the memory of a checkpoint, as stored, converted and quantized, from names and shapes alone."""
    with Catalog.of(source) as catalog:
        schema = schema_of(catalog)
        kinds = _kinds(catalog, schema)
        stored = sum(number * about.nbytes for about, number in kinds)
        if catalog.codes or catalog.unknown():
            return Sizes(stored, {}, {})
        tied = ((head, catalog.about(embedding)) for head, embedding in tied_heads(catalog, schema).items())
        heads = [(about._replace(name=head), 1) for head, about in tied if about.floating and not about.quantized]

        def converted(dtype: str) -> int:
            return sum(number * _converted(about, dtypes.BY_NAME[dtype]) for about, number in kinds)

        def quantized(scheme: str) -> int:
            rules = Rules(cast(SchemeName, scheme), None)
            rules.schema = schema
            total = 0
            for about, number in (*kinds, *heads):
                plan = rules.plan(about.name, about)
                if plan.scheme is None and (about, number) in heads:
                    continue  # stays tied
                if plan.scheme is not None:
                    parts = storage_of(plan.scheme, about.shape, usual_axis(plan.scheme, about.shape))
                    nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in filter(None, parts))
                elif about.codes is not None:
                    nbytes = about.nbytes  # blocks and int8 stay as stored
                else:
                    nbytes = _converted(about, dtypes.BY_CODE["F32"])
                total += number * nbytes
            return total

        def encoded(preset: str) -> int:
            layout, own_schema, own = arranged(catalog, presets()[preset], told=False), schema, kinds
            if layout is not catalog:  # it has the names of the engine
                own_schema = schema_of(layout)
                own = _kinds(layout, own_schema)
            rules = EngineRules(presets()[preset], None, layout, own_schema, chosen=layout.config is None)
            total, is_quantized = 0, False
            for about, number in own:
                name = about.name
                if rules.drops(name):
                    continue
                plan = rules.plan(name, about)
                scheme = plan.scheme
                is_quantized |= plan.already or scheme is not None
                if plan.already:
                    total += number * about.nbytes
                elif scheme is None:
                    row = rules.kept_dtype(about, None)
                    total += number * (about.nbytes if row is None else row.nbytes(math.prod(about.shape)))
                else:
                    row = rules.weight_dtype(about, None)
                    if layout.scheme(name) is not None:
                        with suppress(codes.Immovable):  # scales keep their dtype if codes move
                            scale = codes.plan(layout.coded(name), codes.holds(scheme)).scale
                            row = dtypes.BY_CODE[scale] if scale in WEIGHTS else row
                    encoding = Encoding(name, presets()[scheme], about.shape, row)
                    total += number * encoding.nbytes
            if not is_quantized:
                raise UnsupportedError(f"{rules.preset.name}: no tensor is left to quantize")
            return total

        def totals(names: Iterable[str], total: Callable[[str], int]) -> dict[str, int]:
            known = {}
            for name in names:
                with suppress(UnsupportedError, FormatError):  # blocks without a kernel, experts that no engine loads
                    known[name] = total(name)
            return known

        return Sizes(stored, totals(DTYPES, converted), totals(SCHEMES, quantized) | totals(ENGINE_FORMATS, encoded))


def _kinds(catalog: Catalog, schema: Schema | None) -> list[tuple[TensorDescription, int]]:
    """Return a tensor of each shape and role, and their number: the rules need not decide about 100,000 experts."""
    entries = () if schema is None else schema.entries
    texts = [text for entry in entries for text in (entry.name, *entry.also)]
    # Unless a name in the schema contains a number other than the layer.
    alike = schema is None or not any(map(NUMBER.search, (*texts, *schema.prefixes)))

    def kind_of(about: TensorDescription) -> tuple[Any, ...]:
        return NUMBER.sub("0", about.name) if alike else about.name, *about[1:4], about.scheme, about.axis

    groups = grouped(catalog.descriptions([*catalog]).values(), kind_of)
    return [(abouts[0], len(abouts)) for abouts in groups.values()]


def _converted(about: TensorDescription, target: dtypes.Dtype) -> int:
    """Return the bytes of a tensor that is converted to a dtype, if it has real numbers."""
    if about.scheme is None and not about.floating:
        return about.nbytes
    if about.scheme is not None and not about.packed:
        check_restorable(about.name, about.scheme)
    return target.nbytes(math.prod(about.shape))
