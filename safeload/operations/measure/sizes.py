"""Memory that a checkpoint takes when it is loaded, by dtype and by quantization scheme, without reading its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, cast

from ...base import dtypes
from ...base.names import NUMBER
from ...base.scheme import SCHEMES, usual_axis
from ...engine.codes.quantized_tensor import storage_of
from ...errors import UnsupportedError
from ...models.schema import Schema
from ..quantize.checkpoint import ModelRules, Rules, check_restorable, heads_to_quantize
from ..quantize.quantize import SchemeName
from ..sources.catalog import Catalog, Given
from ..sources.description import TensorDescription

#: The dtypes that sizes are given for.
DTYPES = ("float32", "float16", "bfloat16")
_F32_BYTES = 4


class Sizes(NamedTuple):
    """Bytes of all arrays of a checkpoint in memory. While it is loaded, at most 256 MiB more are in use.

    A dtype or a scheme is missing where loading as it is refused: the checkpoint holds codes of a family that is not
    dequantized, or blocks of a type without a kernel.

    Attributes:
        stored: bytes of the tensors as they are stored: what `safeload.load` takes without ``dtype``.
        dtypes: what `safeload.load` takes with this ``dtype``: "float32", "float16", "bfloat16".
        schemes: what `load_quantized` takes with this scheme and no other argument. Embeddings, norms and biases are
            float32 there, and a tied head is a tensor of its own.
    """

    stored: int
    dtypes: Mapping[str, int]
    schemes: Mapping[str, int]


class _Kind(NamedTuple):
    """Tensors that take the same space: of one dtype, shape and role.

    Attributes:
        name: of the first of them.
        about: description of the first.
        number: how many there are.
    """

    name: str
    about: TensorDescription
    number: int


def sizes(source: Given) -> Sizes:
    """Calculates the memory that a checkpoint takes as stored, converted and quantized, from names and shapes alone.

    Args:
        source: path of a file, a folder or an index.json; an open `Checkpoint`; or a dict of arrays.

    Returns:
        The sizes.

    Raises:
        SafeloadError, OSError: see `safeload.open`.

    Example:
        >>> import numpy as np
        >>> from safeload.operations.measure.sizes import sizes
        >>> sizes({"weight": np.ones((64, 64), np.float16)}).schemes["q8_0"]
        4352
    """
    with Catalog.of(source) as catalog:
        model = ModelRules.of(catalog)
        kinds = _kinds(catalog, model.schema)
        stored = sum(kind.number * kind.about.nbytes for kind in kinds)
        if catalog.codes or catalog.unknown():
            return Sizes(stored, {}, {})

        def converted(dtype: str) -> int:
            width = dtypes.BY_NAME[dtype].bits // 8
            return sum(kind.number * _converted(kind, width) for kind in kinds)

        def quantized(scheme: str) -> int:
            rules = Rules(cast(SchemeName, scheme), None)
            rules.schema = model.schema
            heads = heads_to_quantize(model, rules, catalog.about)
            made = [_Kind(head, catalog.about(embedding), 1) for head, embedding in heads.items()]
            return sum(kind.number * _quantized(kind, rules) for kind in (*kinds, *made))

        return Sizes(stored, _totals(DTYPES, converted), _totals(SCHEMES, quantized))


def _totals(names: Iterable[str], total: Callable[[str], int]) -> dict[str, int]:
    found = {}
    for name in names:
        with suppress(UnsupportedError):  # there are blocks without a kernel
            found[name] = total(name)
    return found


def _kinds(catalog: Catalog, schema: Schema | None) -> list[_Kind]:
    """The tensors in few groups: the rules decide about 100,000 names of experts as about those of one."""
    alike = schema is None or not _has_number(schema)
    columns = {f: (f.table.numbers, f.table.shapes) for f in catalog.weight_files if not f.table.quantized}
    found: dict[tuple[str, Hashable], list[str]] = {}
    entries = catalog.entries()
    for name, file, index in entries:
        text = NUMBER.sub("0", name) if alike else name
        plain = columns.get(file)
        kind = catalog.about(name)._replace(name="") if plain is None else (plain[0][index], plain[1][index])
        found.setdefault((text, kind), []).append(name)
    kinds = [_Kind(names[0], catalog.about(names[0]), len(names)) for names in found.values()]
    in_files = {name for name, _, _ in entries} if len(entries) < len(catalog) else catalog
    return kinds + [_Kind(name, catalog.about(name), 1) for name in catalog if name not in in_files]


def _has_number(schema: Schema) -> bool:
    """Whether a name of the schema has a number that is not that of a layer."""
    texts = (text for entry in schema.entries for text in (entry.name, *entry.also))
    return any(NUMBER.search(text) for text in (*texts, *schema.prefixes))


def _converted(kind: _Kind, width: int) -> int:
    """Bytes of one tensor when real numbers take ``width`` bytes each."""
    about = kind.about
    if about.scheme is None and not about.floating:
        return about.nbytes
    if about.scheme is not None and not about.packed:
        check_restorable(kind.name, about.scheme)
    return width * math.prod(about.shape)


def _quantized(kind: _Kind, rules: Rules) -> int:
    """Bytes of one tensor as `load_quantized` returns it."""
    about, planned = kind.about, rules.plan(kind.name, kind.about)
    if planned.scheme is not None:
        stored = storage_of(planned.scheme, about.shape, usual_axis(planned.scheme, about.shape))
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in filter(None, stored))
    if about.scheme is not None and not about.packed:
        return about.nbytes  # blocks, and int8: they are left as they are
    return _converted(kind, _F32_BYTES)
