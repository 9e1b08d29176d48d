"""Predict the memory that a loaded checkpoint takes, by dtype and quantization scheme, without reading its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, cast

from ...base import dtypes
from ...base.names import NUMBER
from ...base.scheme import ENGINE_FORMATS, SCHEMES, usual_axis
from ...engine.codes.quantized_tensor import storage_of
from ...errors import FormatError, UnsupportedError
from ...models.schema import Schema
from ...packed.families import presets
from ..quantize.checkpoint import ModelRules, Rules, check_restorable, heads_to_quantize
from ..quantize.encoding import Encoding
from ..quantize.engine_layout import arranged
from ..quantize.engine_rules import EngineRules
from ..quantize.quantize import SchemeName
from ..sources.catalog import Catalog, Given, RestructuredCatalog, TensorDescription

#: The dtypes to predict sizes for.
DTYPES = ("float32", "float16", "bfloat16")


class Sizes(NamedTuple):
    """Bytes of all arrays of a loaded checkpoint. Loading takes up to 256 MiB more.

    A dtype or scheme is missing if the checkpoint cannot be loaded as such, because it holds codes that cannot be
    dequantized or blocks of a type without a kernel.
    """

    stored: int  # bytes of the stored tensors, as `safeload.load` loads them without ``dtype``
    dtypes: Mapping[str, int]  # bytes that `safeload.load` needs with this ``dtype``: "float32", "float16", "bfloat16"
    # Bytes that `load_quantized` needs with this scheme and no other arguments. Embeddings, norms and biases are then
    # float32, and a tied head is a separate tensor.
    schemes: Mapping[str, int]


class _Kind(NamedTuple):
    """Tensors of equal dtype, shape and role."""

    name: str  # of the first tensor
    about: TensorDescription  # of the first tensor
    number: int  # of tensors


def sizes(source: Given) -> Sizes:
    """Predict the memory of a checkpoint, as stored, converted and quantized, from names and shapes alone."""
    with Catalog.of(source) as catalog:
        model = ModelRules.of(catalog)
        kinds = _kinds(catalog, model.schema)
        stored = sum(kind.number * kind.about.nbytes for kind in kinds)
        if catalog.codes or catalog.unknown():
            return Sizes(stored, {}, {})

        def converted(dtype: str) -> int:
            return sum(kind.number * _converted(kind, dtypes.BY_NAME[dtype]) for kind in kinds)

        def quantized(scheme: str) -> int:
            rules = Rules(cast(SchemeName, scheme), None)
            rules.schema = model.schema
            heads = heads_to_quantize(model, rules, catalog.about)
            untied = [_Kind(head, catalog.about(embedding), 1) for head, embedding in heads.items()]
            return sum(kind.number * _quantized(kind, rules) for kind in (*kinds, *untied))

        def encoded(preset: str) -> int:
            layout = arranged(catalog, presets()[preset])
            own = kinds if layout is catalog else [_Kind(name, layout.about(name), 1) for name in layout]
            return _encoded(own, EngineRules(presets()[preset], None), model, layout)

        schemes = {**_totals(SCHEMES, quantized), **_totals(ENGINE_FORMATS, encoded)}
        return Sizes(stored, _totals(DTYPES, converted), schemes)


def _totals(names: Iterable[str], total: Callable[[str], int]) -> dict[str, int]:
    totals = {}
    for name in names:
        with suppress(UnsupportedError, FormatError):  # blocks without a kernel, or experts that no engine loads
            totals[name] = total(name)
    return totals


def _kinds(catalog: Catalog, schema: Schema | None) -> list[_Kind]:
    """Group tensors by shape and role, so that the rules need not decide about each of 100,000 expert weights."""
    alike = schema is None or not _has_number(schema)
    columns = {f: (f.table.numbers, f.table.shapes) for f in catalog.weight_files if not f.table.quantized}
    groups: dict[tuple[str, Hashable], list[str]] = {}
    entries = catalog.entries()
    for name, file, index in entries:
        text = NUMBER.sub("0", name) if alike else name
        plain = columns.get(file)
        kind = catalog.about(name)._replace(name="") if plain is None else (plain[0][index], plain[1][index])
        groups.setdefault((text, kind), []).append(name)
    kinds = [_Kind(names[0], catalog.about(names[0]), len(names)) for names in groups.values()]
    in_files = {name for name, _, _ in entries} if len(entries) < len(catalog) else catalog
    return kinds + [_Kind(name, catalog.about(name), 1) for name in catalog if name not in in_files]


def _has_number(schema: Schema) -> bool:
    """True if any name in the schema contains a number other than the layer."""
    texts = (text for entry in schema.entries for text in (entry.name, *entry.also))
    return any(NUMBER.search(text) for text in (*texts, *schema.prefixes))


def _converted(kind: _Kind, target: dtypes.Dtype) -> int:
    """Return the bytes of a tensor that is converted to a dtype, if it has real numbers."""
    about = kind.about
    if about.scheme is None and not about.floating:
        return about.nbytes
    if about.scheme is not None and not about.packed:
        check_restorable(kind.name, about.scheme)
    return target.nbytes(math.prod(about.shape))


def _encoded(kinds: Iterable[_Kind], rules: EngineRules, model: ModelRules, catalog: Catalog) -> int:
    """Return the bytes of all tensors in the format of an engine; the catalog has the names of the engine."""
    schema = ModelRules.of(catalog).schema if isinstance(catalog, RestructuredCatalog) else model.schema
    rules.set_model(schema, catalog, chosen=model.config is None)
    total, quantized = 0, False
    for name, about, number in kinds:
        if rules.drops(name):
            continue
        scheme = rules.plan(name, about).scheme
        if scheme is not None:
            quantized = True
            total += number * Encoding(name, presets()[scheme], about.shape, rules.weight_dtype(about, None)).nbytes
            continue
        row = rules.kept_dtype(about, None)
        total += number * (about.nbytes if row is None else row.nbytes(math.prod(about.shape)))
    if not quantized:
        raise UnsupportedError(f"{rules.preset.name}: no tensor is left to quantize")
    return total


def _quantized(kind: _Kind, rules: Rules) -> int:
    """Return the bytes of a tensor as `load_quantized` returns it."""
    about, plan = kind.about, rules.plan(kind.name, kind.about)
    if plan.scheme is not None:
        stored = storage_of(plan.scheme, about.shape, usual_axis(plan.scheme, about.shape))
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in filter(None, stored))
    if about.scheme is not None and not about.packed:
        return about.nbytes  # blocks and int8 stay as stored
    return _converted(kind, dtypes.BY_CODE["F32"])
