"""The stored tensors of a packed tensor, as families read them, and the checks of every packing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from itertools import accumulate
from typing import Any

import numpy as np

from ..base import dtypes, packing
from ..base.arrays import Array, empty_array
from ..base.packing import Grid, Packing, Part
from ..base.text import show
from ..engine.run import jobs
from ..engine.run.job import Job, Origin
from ..engine.run.memory import address_of
from ..engine.run.weight_file import WeightFile
from .families import Family, Stored, families
from .grid import Misfit, described_grid, matrices_of
from .quantization import UNCONFIGURED, Quantization, brief, overrides_key

# Methods with descriptions of weights in ``config_groups``.
_IN_GROUPS = frozenset(("compressed-tensors", "modelopt"))
NUMBERS = frozenset(("F32", "F16", "BF16"))
# Dtypes of the parts by role. U8 holds the bits of a float8 if the packing names its dtype.
_DTYPES = {
    packing.SCALE: NUMBERS | {"F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"},
    packing.GLOBAL: NUMBERS,
    packing.BIAS: NUMBERS,
    packing.FACTORS: NUMBERS,
    packing.TABLE: NUMBERS,
    packing.NESTED: NUMBERS,
    packing.NESTED_TABLE: NUMBERS,
    packing.ZERO: NUMBERS | {"I8", "U8", "I32", "F8_E4M3"},
}
# Values of `Packing.numbers` with zero points.
_INTEGERS = frozenset(("I8", "U8", "offset", "signed", "unsigned"))
# Settings of codes with zero points.
_ASYMMETRIC = (("symmetric", False), ("sym", False), ("zero_point", True))
# Bytes of a description; bitsandbytes' longest has about 250.
_LONGEST = 1024
# Values of a shape.
_MOST_AXES = 8
_MOST_BYTES = {"U8": _LONGEST, "I32": 4 * _MOST_AXES, "I64": 8 * _MOST_AXES}
# Bytes of a batch of descriptions.
_BATCH = 64 << 20
# Maximum number of elements, counting empty axes as 1: numpy and the C core count bytes of float64 in 63 bits.
MOST = 1 << 59


class GroupContext:
    """The stored tensors of a checkpoint and its quantization; small tensors are read in a batch on first use."""

    def __init__(
        self,
        places: Mapping[str, tuple[WeightFile, int]],
        quantization: Quantization,
        model_type: str | None = None,  # of a model with Conv1D layers
        suffixes: tuple[str, ...] = (),  # of small tensors with descriptions: a remote model can have hundreds
    ) -> None:
        self.quantization = quantization
        self.text = quantization.text(model_type)  # for `Packing.config`
        self._places, self._suffixes = places, suffixes
        columns = {file: (file.table.rows, file.table.shapes) for file in {file for file, _ in places.values()}}
        self._ranges: dict[WeightFile, list[tuple[int, int]]] = {}
        self.tensors = {
            name: Stored(columns[file][0][index], columns[file][1][index]) for name, (file, index) in places.items()
        }
        self.arrays: dict[str, Array] | None = None
        self._metadata: dict[WeightFile, Mapping[str, Any]] = {}
        # Of `configured_grid`, because thousands of experts have the shapes of the first.
        self.grids: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Grid | None] = {}

    def part(self, name: str) -> Part | None:
        """Return a tensor as a part; None if its bytes are not in C order and little-endian."""
        file, index = self._places[name]
        table = file.table
        if table.shaped and (table.strides.get(index) is not None or index in table.big_endian):
            return None
        if file not in self._ranges:
            self._ranges[file] = table.byte_ranges()
        return Part(name, file, *self.tensors[name], *self._ranges[file][index])

    def content(self, name: str) -> Array | None:
        """Return a small tensor; None if it is too large or of a dtype that describes nothing."""
        if self.arrays is None:
            described = (name for name in self._places if name.endswith(self._suffixes))
            small = [part for part in map(self._small, described) if part is not None]
            sizes = accumulate((part.end - part.begin for part in small), initial=0)
            self.arrays = _contents([part for part, before in zip(small, sizes, strict=False) if before < _BATCH])
        if name not in self.arrays and (part := self._small(name)) is not None:
            self.arrays.update(_contents([part]))
        return self.arrays.get(name)

    def _small(self, name: str) -> Part | None:
        part = self.part(name)
        return part if part is not None and part.end - part.begin <= _MOST_BYTES.get(part.row.code, -1) else None

    def note(self, name: str, key: str) -> str | None:
        """Return the text under a key in the metadata of a tensor's file, or None."""
        file = self._places[name][0]
        if file not in self._metadata:
            self._metadata[file] = file.table.metadata() or {}
        text = self._metadata[file].get(key)
        return text if isinstance(text, str) else None


def _contents(parts: Iterable[Part]) -> dict[str, Array]:
    arrays = {part.name: (part, empty_array((part.end - part.begin,), np.dtype(np.uint8))) for part in parts}
    batch = jobs.Batch(
        Job(part.file, part.begin, address_of(array), array.size, origin=Origin(part.name, part.shape))
        for part, array in arrays.values()
        if array.size
    )
    batch.run()
    return {name: jobs.native_order(array.view(part.row.name)) for name, (part, array) in arrays.items()}


class PackedGroup:
    """The stored tensors of a packed tensor."""

    def __init__(self, codes: str, logical: str, names: Mapping[str, str], context: GroupContext) -> None:
        self.codes, self.logical, self.names = codes, logical, names
        self.module = logical.removesuffix(".weight")  # the name of the weight's module
        self.config = context.quantization
        self.method = self.config.method  # ``quant_method``
        self.parts = {role: context.tensors[name] for role, name in names.items()}  # by role
        self.row, self.stored = self.parts[packing.CODES]
        scale = self.parts.get(packing.SCALE)
        self.scale_code, self.scales = ("", ()) if scale is None else (scale.row.code, scale.shape)
        self.weights = self.config.weights(self.module)  # the descriptions in ``config_groups``
        self._own = {} if self.config.is_uniform else self.config.own(self.module)
        self.context = context

    # ---- configuration ----

    @property
    def is_configured(self) -> bool:
        """True if the checkpoint has a configuration."""
        return self.config is not UNCONFIGURED

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the module: the shared settings and its own."""
        if self.config.is_uniform:
            return self.config.values
        if self._own is None:
            key = overrides_key(self.config)
            raise Misfit(f"its module has codes, but {key} excludes the module from quantization")
        return {**self.config.values, **self._own}

    def unknown(self) -> str | None:
        """Return a setting with an unknown effect on the values, as text, or None."""
        if self.config.is_uniform:
            why = self.config.unknown
        else:
            why = self.config.unknown_of(self._own, self.weights if self.method in _IN_GROUPS else [])
        if why is None and self.method == "compressed-tensors":
            kind = "int" if self.row.code in ("I8", "I32") else "float"
            kinds = {str(weights["type"]) for weights in self.weights if weights.get("type") is not None}
            if kinds and kind not in kinds:
                why = f"type {kinds.pop()} of {self.row.code} codes"
        return why

    # ---- stored tensors ----

    def of_shape(self, shape: tuple[int, ...]) -> PackedGroup:
        """Return the group as if its codes had this shape."""
        group = copy(self)
        group.stored = shape
        return group

    def has_beside(self, suffix: str) -> bool:
        """Return True if the module has another tensor with this suffix."""
        return f"{self.module}{suffix}" in self.context.tensors

    def content(self, role: str) -> bytes:
        """Return the bytes of a small part."""
        array = self.context.content(self.names[role])
        if array is None or self.parts[role].row.code != "U8":
            raise Misfit(f"{show(self.names[role])} must be U8 and have at most {_LONGEST:,} bytes")
        return array.tobytes()

    def integers(self, role: str) -> tuple[int, ...]:
        """Return the values of a small part."""
        array = self.context.content(self.names[role])
        if array is None or self.parts[role].row.code == "U8" or len(self.parts[role].shape) != 1:
            raise Misfit(f"{show(self.names[role])} must be a list of at most {_MOST_AXES} integers")
        return tuple(array.tolist())

    # ---- packing ----

    def packing(
        self, family: str, label: str, shape: tuple[int, ...], bits: int, numbers: str, **fields: object
    ) -> Packing:
        """Return a `Packing` of rows; ``row_bytes`` defaults to the rows of the stored tensor."""
        matrices, rows, columns = matrices_of(shape)
        row_bytes = self.row.nbytes(self.stored[-1]) if self.stored else 1
        fields = {
            "matrices": matrices, "rows": rows, "columns": columns, "layout": packing.ROWS, "row_bytes": row_bytes,
            "config": self.context.text, **fields,
        }  # fmt: skip
        return Packing(family, label, shape, bits=bits, numbers=numbers, **fields)  # type: ignore[arg-type]

    def transposed(
        self, family: str, label: str, shape: tuple[int, int], bits: int, numbers: str, *, size: int, **fields: object
    ) -> Packing:
        """Return a `Packing` of a matrix stored as columns by rows, with scales for groups of ``size`` columns."""
        (rows, columns), scales = shape, self.scales
        grid = Grid(size, 1, scales[0], scales[1])
        return self.packing(
            family, label, shape, bits, numbers, transpose=True, rows=columns, columns=rows, grid=grid, **fields
        )

    def has_zeros(self) -> bool:
        """Return True if there are zero points; refuse another shape than that of the scales."""
        zeros, scales = self.parts.get(packing.ZERO), self.parts[packing.SCALE]
        if zeros is not None and zeros.shape != scales.shape:
            raise Misfit(f"zero points {list(zeros.shape)} do not fit scales {list(scales.shape)}")
        return zeros is not None

    def check_form(self, role: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Refuse a part of another dtype or shape."""
        row, own = self.parts[role]
        if (row.code, own) != (dtype, shape):
            raise Misfit(f"{name} is {row.code} {list(own)}, expected {dtype} {list(shape)}")

    def described(self, family: Family) -> Packing:
        """Return the checked packing of the group as a family describes it."""
        assert family.describe is not None
        return check(self, family.describe(self))

    def scale_dtype(self, dtype: str) -> str | None:
        """Return ``dtype``, a float8, if the scales store its bits as U8."""
        return dtype if self.scale_code == "U8" else None


def packing_of(context: GroupContext, name: str, names: Mapping[str, str], parts: Mapping[str, Array]) -> Packing:
    """Return the packing of a weight that we have written, as a reader would find it; both mappings are by role."""
    arrays = {names[role]: array for role, array in parts.items()}
    context.arrays = arrays
    context.tensors = {
        stored: Stored(dtypes.row_of(array.dtype), array.shape)  # type: ignore[arg-type]
        for stored, array in arrays.items()
    }
    codes = names[packing.CODES]
    for family in families():
        fits = family.describe is not None and context.tensors[codes].row.code in family.dtypes
        if not fits or not codes.endswith(family.main) or family.method not in (None, context.quantization.method):
            continue
        if family.parts_beside(codes, context.tensors) is None:
            continue
        try:
            return PackedGroup(codes, name, names, context).described(family)
        except Misfit:
            continue
    raise AssertionError(f"no family reads {context.quantization}")


# ---- settings of config_groups ----


def configured_group_size(group: PackedGroup) -> int | None:
    """Return the ``group_size`` of the configuration if all descriptions in groups agree."""
    size = configured(group, "group_size", "group")
    return size if size is not None and size > 0 else None


def configured(group: PackedGroup, key: str, strategy: str | None = None) -> int | None:
    """Return an integer on which all descriptions (of a strategy) agree, or None."""
    if not group.weights:
        return None
    values = [weights.get(key) for weights in group.weights if strategy is None or weights.get("strategy") == strategy]
    first = values[0] if values else None
    return first if type(first) is int and values.count(first) == len(values) else None


def configured_grid(group: PackedGroup, shape: tuple[int, ...]) -> Grid | None:
    """Return the grid of scales in ``config_groups`` for codes of a shape, or None."""
    if group.method != "compressed-tensors":
        return None
    described, scale = group.weights, group.scales
    if len(described) != 1:
        return described_grid(described, shape, scale)
    key, grids = (id(described[0]), shape, scale), group.context.grids
    if key not in grids:
        grids[key] = described_grid(described, shape, scale)
    return grids[key]


# ---- checks ----


def check_global(group: PackedGroup, packed: Packing) -> Packing:
    """Return the packing if its global scales fit: per tensor, per expert, or per equal share of an expert's rows."""
    size = math.prod(group.parts[packing.GLOBAL].shape)
    fits = size == 1 or (
        size > 0 and packed.matrices > 0 and not size % packed.matrices and not packed.matrices * packed.rows % size
    )
    if not fits:
        raise Misfit(f"global scales {list(group.parts[packing.GLOBAL].shape)} do not fit {list(packed.shape)}")
    return packed


def check_factors(group: PackedGroup, packed: Packing) -> Packing:
    """Return the packing if its factors, if any, are one per column."""
    factors = group.parts.get(packing.FACTORS)
    if factors is not None and factors.shape != (packed.columns,):
        raise Misfit(f"pre_quant_scale {list(factors.shape)} does not fit rows of {packed.columns}")
    return packed


def check(group: PackedGroup, packed: Packing) -> Packing:
    """Return the packing if all parts fit it in size and dtype."""
    for role, part in group.parts.items():
        if role in _DTYPES and part.row.code not in _DTYPES[role]:
            expected = ", ".join(sorted(_DTYPES[role]))
            raise Misfit(f"{group.names[role]} is {part.row.code}, expected one of {expected}")
    if group.scale_code == "U8" and packed.scale_dtype is None and packed.scale_rule != packing.NESTED_RULE:
        raise Misfit("its scales are U8, and nothing says which float8 they hold")
    if max(1, packed.matrices) * max(1, packed.rows) * max(1, packed.columns) >= MOST:
        raise Misfit(f"shape {list(packed.shape)} has too many elements")
    if _code_bytes(packed) > group.row.nbytes(math.prod(group.stored)):
        raise Misfit(f"codes {list(group.stored)} are too few for {list(packed.shape)}")
    if packed.grid is not None:
        _check_grid(group, packed)
    described = group.weights
    _check_bits(packed, described)
    if packing.ZERO not in group.parts:
        _check_symmetric(group, packed, described)
    elif described and all(weights.get("symmetric") is True for weights in described):
        return packed._replace(symmetric=True)
    return packed


def _check_bits(packed: Packing, described: list[Mapping[str, Any]]) -> None:
    """Refuse codes of other bits than ``num_bits``. A byte per code can hold an integer of fewer bits."""
    if packed.numbers in NUMBERS:
        return  # values of compressed-tensors' sparse tensors
    configured = [weights["num_bits"] for weights in described if weights.get("num_bits") is not None]
    fitting = range(1, 9) if packed.numbers in ("I8", "U8") else (packed.bits,)
    if configured and not any(type(bits) is int and bits in fitting for bits in configured):
        raise Misfit(f"its codes have {packed.bits} bits, but num_bits is {brief(show(configured[0]))} (config_groups)")


def _check_symmetric(group: PackedGroup, packed: Packing, described: list[Mapping[str, Any]]) -> None:
    """Refuse codes without zero points if the configuration requires zero points."""
    setting = None
    if described:
        if all(weights.get("symmetric") is False for weights in described):
            setting = "symmetric is false in config_groups"
    elif packed.numbers in _INTEGERS and packing.BIAS not in group.parts:
        values = group.config.values
        setting = next((f"{key} is {value}" for key, value in _ASYMMETRIC if values.get(key) is value), None)
    if setting is not None:
        raise Misfit(f"its zero points are missing, but {setting}")


def _code_bytes(packed: Packing) -> int:
    if packed.layout == packing.MASKED:
        return packed.rows * packed.row_bytes
    if packed.layout == packing.PLANES:
        per_row, rows = packed.columns, packed.rows * packed.bits // 8
    elif packed.layout == packing.COLUMNS:
        per_row, rows = packed.columns * 4, packed.rows * packed.bits // 32
    elif packed.word_codes:
        per_row, rows = -(-packed.columns // packed.word_codes) * 4, packed.rows
    else:
        per_row, rows = -(-packed.columns * packed.bits // 8), packed.rows
    return packed.matrices * rows * max(per_row, packed.row_bytes)


def _check_grid(group: PackedGroup, packed: Packing) -> None:
    grid = packed.grid
    assert grid is not None
    count = (1 if grid.shared else packed.matrices) * grid.rows * grid.columns
    roles = (packing.SCALE, packing.BIAS) if packed.zeros is not None else (packing.SCALE, packing.BIAS, packing.ZERO)
    for role in roles:
        if role in group.parts and math.prod(group.parts[role].shape) != count:
            raise Misfit(f"{role} {list(group.parts[role].shape)} must have {count} elements to fit its codes")
