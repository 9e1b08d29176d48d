"""The stored tensors of a packed tensor, as families read them, its grid of scales, and the checks of every packing."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from ..core import dtypes, jobs, memory, native, packing
from ..core.arrays import Array
from ..core.files import parse_json
from ..core.packing import Grid, Packing, Part, Zeros
from ..core.text import show
from ..core.weight_file import WeightFile
from ..errors import FormatError
from .families import FP8, Family, Stored, families
from .quantization import UNCONFIGURED, Quantization, brief, is_length, overrides_key

# Methods with descriptions of weights in ``config_groups``.
_IN_GROUPS = frozenset(("compressed-tensors", "modelopt"))
NUMBERS = frozenset(("F32", "F16", "BF16"))
# Dtypes of the parts by role. U8 holds the bits of a float8 if the packing names its dtype.
_NUMBERS = (packing.GLOBAL, packing.BIAS, packing.FACTORS, packing.TABLE, packing.NESTED, packing.NESTED_TABLE)
_DTYPES = {
    **dict.fromkeys(_NUMBERS, NUMBERS),
    packing.SCALE: NUMBERS | {"F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"},
    packing.ZERO: NUMBERS | {"I8", "U8", "I32", "F8_E4M3"},
}
# Values of `Packing.numbers` with zero points.
_INTEGERS = frozenset(("I8", "U8", "offset", "signed", "unsigned"))
# Settings of codes with zero points.
_ASYMMETRIC = (("symmetric", False), ("sym", False), ("zero_point", True))
# Bytes of a description; bitsandbytes' longest has about 250.
LONGEST = 1024
# Values of a shape.
MOST_AXES = 8
_MOST_BYTES = {"U8": LONGEST, "I32": 4 * MOST_AXES, "I64": 8 * MOST_AXES}
# Bytes of a batch of descriptions.
_BATCH = 64 << 20
# Maximum number of elements, counting empty axes as 1: numpy and the C core count bytes of float64 in 63 bits.
MOST = 1 << 59
# A block_structure of early compressed-tensors, such as "128x128".
_STRUCTURE = re.compile("[0-9]{1,9}x[0-9]{1,9}", re.ASCII)


class Misfit(Exception):  # noqa: N818 - not a failure: another family may fit
    """Stored tensors do not form a packed tensor of a family."""


class Refused(Misfit):
    """Stored tensors form an unsupported packed tensor; they appear as stored."""


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
        self.places, self._suffixes = places, suffixes
        self._ranges = cache(lambda file: file.table.byte_ranges())
        columns = {file: (file.table.rows, file.table.shapes) for file in dict(places.values())}
        self.tensors = {
            name: Stored(columns[file][0][index], columns[file][1][index]) for name, (file, index) in places.items()
        }
        self.arrays: dict[str, Array] | None = None
        self.metadata = cache(lambda file: file.table.metadata() or {})

    def part(self, name: str) -> Part | None:
        """Return a tensor as a part; None if its bytes are not in C order and little-endian."""
        file, index = self.places[name]
        table = file.table
        if table.shaped and (table.strides.get(index) is not None or index in table.big_endian):
            return None
        return Part(name, file, *self.tensors[name], *self._ranges(file)[index])

    def content(self, name: str) -> Array | None:
        """Return a small tensor; None if it is too large or of a dtype that describes nothing."""
        if self.arrays is None:
            self.arrays = self._read(name for name in self.places if name.endswith(self._suffixes))
        if name not in self.arrays:
            self.arrays.update(self._read((name,)))
        return self.arrays.get(name)

    def _read(self, names: Iterable[str]) -> dict[str, Array]:
        """Read the small ones of these tensors together, as many as fit into a batch."""
        parts = [part for part in map(self.part, names) if part is not None]
        small = [part for part in parts if part.end - part.begin <= _MOST_BYTES.get(part.row.code, -1)]
        sizes = accumulate((part.end - part.begin for part in small), initial=0)
        batch = [part for part, before in zip(small, sizes, strict=False) if before < _BATCH]
        read = [(part, memory.empty_array((part.end - part.begin,), np.dtype(np.uint8))) for part in batch]
        jobs.Batch(
            jobs.Job(
                part.file, part.begin, native.address_of(array), array.size, origin=jobs.Origin(part.name, part.shape)
            )
            for part, array in read
            if array.size
        ).run()
        return {part.name: jobs.native_order(array.view(part.row.name)) for part, array in read}


class PackedGroup:
    """The stored tensors of a packed tensor."""

    # Only of this group: a description that reads any of these does not hold for groups with equal parts.
    codes: str
    logical: str
    names: Mapping[str, str]  # by role
    module: str  # the name of the weight's module
    context: GroupContext

    def __init__(self, codes: str, logical: str, names: Mapping[str, str], context: GroupContext) -> None:
        module = logical.removesuffix(".weight")
        self._only = {"codes": codes, "logical": logical, "names": names, "module": module, "context": context}
        self._text = context.text
        self.is_alike = True  # False once a description has read what only this group has
        self.config = config = context.quantization
        self.method = config.method  # ``quant_method``
        self.is_configured = config is not UNCONFIGURED
        self.parts = {role: context.tensors[name] for role, name in names.items()}  # by role
        self.row, self.stored = self.parts[packing.CODES]
        self.prefix = "fp8" if self.row.code in FP8 else "int8"  # of labels of 8-bit codes
        scale = self.parts.get(packing.SCALE)
        self.scale_code, self.scales = ("", ()) if scale is None else (scale.row.code, scale.shape)
        self.weights = config.weights(module)  # the descriptions in ``config_groups``
        self._own = {} if config.is_uniform else config.own(module)
        # What groups with equal parts and settings share; None if a module can have its own settings.
        self.kind = (*self.parts.items(), *map(id, self.weights)) if config.is_uniform else None

    def __getattr__(self, name: str) -> Any:
        only = vars(self).get("_only", {})  # missing in a new copy
        if name not in only:
            raise AttributeError(name)
        self.is_alike = False
        return only[name]

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the module: the shared settings and its own."""
        if self._own is None:
            key = overrides_key(self.config)
            raise Misfit(f"its module has codes, but {key} excludes the module from quantization")
        return {**self.config.values, **self._own} if self._own else self.config.values

    def unknown(self) -> str | None:
        """Return a setting with an unknown effect on the values, as text, or None."""
        why = self.config.unknown_of(self._own, self.weights if self.method in _IN_GROUPS else [])
        if why is None and self.method == "compressed-tensors":
            kind = "int" if self.row.code in ("I8", "I32") else "float"
            kinds = [str(weights["type"]) for weights in self.weights if weights.get("type") is not None]
            if kinds and kind not in kinds:
                why = f"type {kinds[0]} of {self.row.code} codes"
        return why

    def packing(
        self, family: str, label: str, shape: tuple[int, ...], bits: int, numbers: str, **fields: object
    ) -> Packing:
        """Return a `Packing` of rows; ``row_bytes`` defaults to the rows of the stored tensor.

        ``scale_dtype`` is a float8 whose bits U8 scales hold; other scales ignore it.
        """
        matrices, rows, columns = matrices_of(shape)
        fields = {
            "matrices": matrices, "rows": rows, "columns": columns, "layout": packing.ROWS, "config": self._text,
            "row_bytes": self.row.nbytes(self.stored[-1]) if self.stored else 1, **fields,
            "scale_dtype": fields.get("scale_dtype") if self.scale_code == "U8" else None,
        }  # fmt: skip
        return Packing(family, label, shape, bits=bits, numbers=numbers, **fields)  # type: ignore[arg-type]

    def in_bytes(self, grid: Grid, *, label: str = "", zeros: bool = False, **fields: object) -> Packing:
        """Return a `Packing` of 8-bit codes in the order of the values."""
        label = label or label_of(self.prefix, grid, self.stored, zeros)
        return self.packing(self.prefix, label, self.stored, 8, self.row.code, grid=grid, **fields)

    def transposed(
        self, family: str, label: str, shape: tuple[int, int], bits: int, numbers: str, *, size: int, **fields: object
    ) -> Packing:
        """Return a `Packing` of a matrix stored as columns by rows, with scales for groups of ``size`` columns."""
        (rows, columns), grid = shape, Grid(size, 1, self.scales[0], self.scales[1])
        return self.packing(
            family, label, shape, bits, numbers, transpose=True, rows=columns, columns=rows, grid=grid, **fields
        )

    def has_zeros(self) -> bool:
        """Return True if there are zero points; refuse another shape than that of the scales."""
        zeros, scales = self.parts.get(packing.ZERO), self.parts[packing.SCALE]
        if zeros is not None and zeros.shape != scales.shape:
            raise Misfit(f"zero points {list(zeros.shape)} do not fit scales {list(scales.shape)}")
        return zeros is not None

    def packed_zeros(self, packed: Zeros, shape: tuple[int, ...]) -> Zeros | None:
        """Return how zero points are packed; None if they are missing, or plain numbers in the shape of the scales."""
        if packing.ZERO not in self.parts:
            return None
        row, own = self.parts[packing.ZERO]
        zeros, expected = (packed, shape) if row.code == "I32" else (None, self.scales)
        if own != expected:
            raise Misfit(f"zero points are {list(own)}, expected {list(expected)}")
        return zeros

    def check_form(self, role: str, name: str, codes: Sequence[str], *shapes: tuple[int, ...], of: str = "") -> None:
        """Refuse a part of another dtype or shape; the usual ones come first."""
        row, own = self.parts[role]
        if row.code not in codes or own not in shapes:
            raise Misfit(f"{name} is {row.code} {list(own)}, expected {codes[0]} {list(shapes[0])}{of}")

    def check_shared(self, packed: Packing) -> Packing:
        """Return the packing if its factors are one per column, and its global scales fit.

        There is a global scale per tensor, per expert, or per equal share of an expert's rows.
        """
        scales, factors = self.parts.get(packing.GLOBAL), self.parts.get(packing.FACTORS)
        size = 1 if scales is None else math.prod(scales.shape)
        values = packed.matrices * packed.rows
        if size != 1 and not (size and packed.matrices and size % packed.matrices == 0 == values % size):
            assert scales is not None
            raise Misfit(f"global scales {list(scales.shape)} do not fit {list(packed.shape)}")
        if factors is not None and factors.shape != (packed.columns,):
            raise Misfit(f"pre_quant_scale {list(factors.shape)} does not fit rows of {packed.columns}")
        return packed

    def content(self, role: str, codes: Collection[str], expected: str) -> Array:
        """Return the values of a small part; refuse other dtypes and more values."""
        name = self.names[role]
        array = self.context.content(name)
        if array is None or self.parts[role].row.code not in codes:
            raise Misfit(f"{show(name)} must {expected}")
        return array

    # ---- descriptions in config_groups ----

    def configured(self, key: str, strategy: str | None = None) -> int | None:
        """Return an integer on which all descriptions (of a strategy) agree, or None."""
        values = [weights.get(key) for weights in self.weights if strategy in (None, weights.get("strategy"))]
        first = values[0] if values else None
        return first if type(first) is int and values.count(first) == len(values) else None

    def configured_grid(self, shape: tuple[int, ...]) -> Grid | None:
        """Return the grid of the fitting description for codes of a shape; None if a description defines no grid."""
        if self.method != "compressed-tensors":
            return None
        scale, pairs = self.scales, [_strategy_of(weights, shape) for weights in self.weights]
        grids = [grid for _, grid in pairs if grid is not None]
        if not grids or len(grids) < len(pairs):
            return None
        fitting = [grid for grid in grids if _is_shape_of(scale, grid, shape)]
        rows, columns = (1, 1, *shape)[-2:]
        if len({(min(grid.row_block, rows), min(grid.column_block, columns)) for grid in fitting}) == 1:
            return fitting[0]._replace(shared=math.prod(scale) == 1 < math.prod(shape[:-2]))
        strategies = ", ".join(dict.fromkeys(text for text, _ in pairs))
        if fitting:
            raise Misfit(f"scales {list(scale)} of {list(shape)} fit more than one of config_groups: {strategies}")
        expected = " or ".join(str([*shape[:-2], grid.rows, grid.columns]) for grid in dict.fromkeys(grids))
        raise Misfit(
            f"scales {list(scale)} do not fit {list(shape)}: expected {expected} for {strategies} (config_groups)"
        )


def named_parts(family: Family, codes: str, tensors: Collection[str]) -> tuple[str, dict[str, str]] | None:
    """Return the name of a packed tensor, and names of its parts by role; None if a required part is missing."""
    if not codes.endswith(family.main):
        return None
    stem, names = codes[: len(codes) - len(family.main)], {packing.CODES: codes}
    for role, suffixes in (*family.required.items(), *family.optional.items()):
        for suffix in suffixes:
            if stem + suffix in tensors:
                names[role] = stem + suffix
                break
        else:
            if role in family.required:
                return None
    logical = codes if family.logical is None else stem + family.logical
    if family.private:
        module, dot, parameter = logical.rpartition(".")
        return (f"{module}{dot}{parameter[1:]}", names) if parameter.startswith("_") else None
    return logical, names


def packing_of(context: GroupContext, name: str, names: Mapping[str, str], parts: Mapping[str, Array]) -> Packing:
    """Return the packing of a weight that we have written, as a reader would find it; both mappings are by role."""
    context.arrays = {names[role]: array for role, array in parts.items()}
    context.tensors = {
        stored: Stored(dtypes.row_of(array.dtype), array.shape)  # type: ignore[arg-type]
        for stored, array in context.arrays.items()
    }
    codes, methods = names[packing.CODES], (None, context.quantization.method)
    for family in families():
        fits = family.describe is not None and context.tensors[codes].row.code in family.dtypes
        if fits and family.method in methods and named_parts(family, codes, context.tensors) is not None:
            with suppress(Misfit):
                return described(family, PackedGroup(codes, name, names, context))
    raise AssertionError(f"no family reads {context.quantization}")


# ---- checks ----


def parsed(text: bytes, title: str) -> dict[str, Any]:
    """Return a description in JSON."""
    try:
        return parse_json(text, title, "")
    except FormatError as error:
        raise Misfit(str(error.args[0])) from None


def described(family: Family, group: PackedGroup) -> Packing:
    """Return the packing of a group as a family describes it, if all parts fit it in size and dtype."""
    assert family.describe is not None
    packed = family.describe(group)
    for role, part in group.parts.items():
        if role in _DTYPES and part.row.code not in _DTYPES[role]:
            raise Misfit(f"{group.names[role]} is {part.row.code}, expected one of {', '.join(sorted(_DTYPES[role]))}")
    if group.scale_code == "U8" and packed.scale_dtype is None and packed.scale_rule != packing.NESTED_RULE:
        raise Misfit("its scales are U8, and nothing says which float8 they hold")
    if max(1, packed.matrices) * max(1, packed.rows) * max(1, packed.columns) >= MOST:
        raise Misfit(f"shape {list(packed.shape)} has too many elements")
    if _code_bytes(packed) > group.row.nbytes(math.prod(group.stored)):
        raise Misfit(f"codes {list(group.stored)} are too few for {list(packed.shape)}")
    grid = packed.grid
    if grid is not None:
        count = (1 if grid.shared else packed.matrices) * grid.rows * grid.columns
        for role in (packing.SCALE, packing.BIAS, *(() if packed.zeros is not None else (packing.ZERO,))):
            if role in group.parts and math.prod(group.parts[role].shape) != count:
                raise Misfit(f"{role} {list(group.parts[role].shape)} must have {count} elements to fit its codes")
    widths = [weights["num_bits"] for weights in group.weights if weights.get("num_bits") is not None]
    fitting = range(1, 9) if packed.numbers in ("I8", "U8") else (packed.bits,)  # a byte can hold fewer bits
    fits = any(type(bits) is int and bits in fitting for bits in widths)
    if widths and not fits and packed.numbers not in NUMBERS:  # else values of sparse tensors
        raise Misfit(f"its codes have {packed.bits} bits, but num_bits is {brief(show(widths[0]))} (config_groups)")
    symmetry = [weights.get("symmetric") for weights in group.weights]
    if packing.ZERO in group.parts:
        return packed._replace(symmetric=True) if symmetry and all(each is True for each in symmetry) else packed
    setting = None
    if symmetry:
        setting = "symmetric is false in config_groups" if all(each is False for each in symmetry) else None
    elif packed.numbers in _INTEGERS and packing.BIAS not in group.parts:
        values = group.config.values
        setting = next((f"{key} is {value}" for key, value in _ASYMMETRIC if values.get(key) is value), None)
    if setting is not None:
        raise Misfit(f"its zero points are missing, but {setting}")
    return packed


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


# ---- blocks of scales, from shapes ----


def matrices_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number, rows and columns of the matrices of a shape."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def label_of(prefix: str, grid: Grid, shape: tuple[int, ...], zeros: bool = False, grouped: bool = False) -> str:
    """Return the label of a scheme: "fp8 128x128", "int4 g32", "fp8 row", "int8 tensor asym"."""
    if grid.row_block == 1 and grid.columns == 1 and grouped:
        kind = f"g{shape[-1]}"
    elif grid.rows == 1 and grid.columns == 1:
        kind = "tensor"
    elif grid.row_block == 1 and grid.columns == 1:
        kind = "row"
    elif grid.column_block == 1 and grid.rows == 1:
        kind = "column"
    elif grid.row_block == 1:
        kind = f"g{grid.column_block}"
    else:
        kind = f"{grid.row_block}x{grid.column_block}"
    return f"{prefix} {kind}{' asym' if zeros else ''}"


def whole_grid(shape: tuple[int, ...], row_block: int, column_block: int) -> Grid:
    """Return the grid of blocks over the matrices of a shape, ragged at the edges."""
    rows, columns = (1, 1, *shape)[-2:]
    return Grid(row_block, column_block, -(-rows // row_block), -(-columns // column_block))


def one_scale(shape: tuple[int, ...], *, shared: bool = False) -> Grid:
    """Return the grid of a scale per matrix, or of a scale for all matrices."""
    rows, columns = (1, 1, *shape)[-2:]
    return Grid(max(1, rows), max(1, columns), 1, 1, shared=shared)


# ---- from descriptions in config_groups ----


def _strategy_of(weights: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[str, Grid | None]:
    """Return the strategy of a description as text, and its grid; None if its strategy is missing or unknown."""
    strategy, size, structure = weights.get("strategy"), weights.get("group_size"), weights.get("block_structure")
    if isinstance(structure, str) and _STRUCTURE.fullmatch(structure):
        structure = [int(side) for side in structure.split("x")]
    if not isinstance(structure, list) or len(structure) != 2 or not all(map(is_length, structure)):
        structure = None
    text = f"groups of {size}" if is_length(size) else f"strategy {strategy}"
    if structure is not None:
        text = f"blocks of {structure[0]} x {structure[1]}"
    rows, columns = (max(1, length) for length in (1, 1, *shape)[-2:])
    block = None
    if strategy == "tensor":
        block = rows, columns
    elif strategy == "channel" or (strategy is None and size == -1):
        block = 1, columns
    elif strategy in ("group", "tensor_group", None) and is_length(size):
        block = 1, min(size, columns)
    elif strategy in ("block", None) and structure is not None:
        block = structure[0], structure[1]
    return text, None if block is None else whole_grid(shape, *block)


def _is_shape_of(scale: tuple[int, ...], grid: Grid, shape: tuple[int, ...]) -> bool:
    """Return True if scales of this shape fill a grid over each matrix; an axis of 1 can be missing."""
    if (grid.rows, grid.columns) == (1, 1) and (math.prod(scale) == 1 or scale == shape[:-2]):
        return True
    expected = (*shape[:-2], grid.rows, grid.columns)
    return scale == expected or (grid.columns == 1 and scale == expected[:-1])
