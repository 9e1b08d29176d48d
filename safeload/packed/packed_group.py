"""The stored tensors of one packed tensor, for the functions that describe it."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base import dtypes, packing
from ..base.packing import Grid, Packing
from .config import Quantization, is_length
from .contents import PackedContents
from .grid import Misfit, whole_grid

FP8 = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
# Methods with descriptions of weights in ``config_groups``.
_IN_GROUPS = frozenset(("compressed-tensors", "modelopt"))
# A block_structure of early compressed-tensors, such as "128x128".
_STRUCTURE = re.compile("[0-9]{1,9}x[0-9]{1,9}", re.ASCII)


class Stored(NamedTuple):
    """A tensor as a file stores it.

    Attributes:
        row: row of the dtype table.
        shape: logical shape.
    """

    row: dtypes.Dtype
    shape: tuple[int, ...]


class PackedGroup:
    """The stored tensors of one packed tensor.

    Args:
        codes: name of the codes.
        logical: name of the packed tensor.
        names: names of all parts by role.
        tensors: all tensors of the checkpoint.
        config: the quantization of ``config.json``; None without one.
        config_text: the configuration as JSON, for `Packing.config`.
        contents: reads small tensors and metadata.
    """

    def __init__(
        self,
        codes: str,
        logical: str,
        names: Mapping[str, str],
        tensors: Mapping[str, Stored],
        config: Quantization | None,
        config_text: str,
        contents: PackedContents,
    ) -> None:
        self.codes, self.logical, self.names, self.config = codes, logical, names, config
        self._tensors, self._config_text, self._contents = tensors, config_text, contents
        self._weights: list[Mapping[str, Any]] | None = None
        self._layer: list[Mapping[str, Any] | None] = []  # what the configuration says of the module, once it is read

    @property
    def module(self) -> str:
        """Name of the module that the weight belongs to."""
        return self.logical.removesuffix(".weight")

    @property
    def method(self) -> str | None:
        """``quant_method`` of the configuration."""
        return None if self.config is None else self.config.method

    def weights(self) -> list[Mapping[str, Any]]:
        """What ``config_groups`` of the configuration says of the weights of the module.

        Raises:
            UnsupportedError: a target is a pattern that is not supported.
        """
        if self._weights is None:
            self._weights = [] if self.config is None else self.config.weights(self.module)
        return self._weights

    def _own(self) -> Mapping[str, Any] | None:
        if not self._layer:
            self._layer.append({} if self.config is None else self.config.of_layer(self.module))
        return self._layer[0]

    def said(self) -> Mapping[str, Any]:
        """The configuration of the module: what holds for all, and its own overrides (GPTQModel, auto-round).

        Raises:
            Misfit: the module is not quantized.
            UnsupportedError: a pattern that is not supported.
        """
        if self.config is None:
            return {}
        if self.config.is_uniform:
            return self.config.values
        own = self._own()
        if own is None:
            raise Misfit(f"its module has codes, but {self.config.overrides} of its quantization says that it has none")
        return {**self.config.values, **own}

    def setting(self, key: str) -> Any:
        """A value of `said`; None if it is missing."""
        return self.said().get(key)

    def unknown(self) -> str | None:
        """A setting of the configuration that may change the values in an unknown way, as text.

        Raises:
            UnsupportedError: a pattern that is not supported.
        """
        config = self.config
        if config is None:
            return None
        if config.is_uniform:
            why = config.unknown
        else:
            described = self.weights() if config.method in _IN_GROUPS else []
            why = config.unknown_of(self.module, self._own(), described)
        if why is None and config.method == "compressed-tensors":
            kind = "int" if self.dtype() in ("I8", "I32") else "float"
            kinds = {str(weights["type"]) for weights in self.weights() if weights.get("type") is not None}
            if kinds and kind not in kinds:
                why = f"type {kinds.pop()} of {self.dtype()} codes"
        return why

    def of_shape(self, shape: tuple[int, ...]) -> PackedGroup:
        """The same group, as if codes of this shape were stored."""
        row = self._tensors[self.codes].row
        tensors = ChainMap({self.codes: Stored(row, shape)}, self._tensors)  # type: ignore[arg-type]
        return PackedGroup(
            self.codes, self.logical, self.names, tensors, self.config, self._config_text, self._contents
        )

    def has(self, role: str) -> bool:
        """Whether there is such a part."""
        return role in self.names

    def has_beside(self, suffix: str) -> bool:
        """Whether the module has another tensor with this suffix."""
        return f"{self.module}{suffix}" in self._tensors

    def shape(self, role: str = packing.CODES) -> tuple[int, ...]:
        """Shape of a part."""
        return self._tensors[self.names[role]].shape

    def dtype(self, role: str = packing.CODES) -> str:
        """Code of the dtype of a part."""
        return self._tensors[self.names[role]].row.code

    def nbytes(self) -> int:
        """Bytes of the codes."""
        stored = self._tensors[self.codes]
        return stored.row.nbytes(math.prod(stored.shape))

    def element_bytes(self) -> int:
        """Bytes of an element of the codes."""
        return self._tensors[self.codes].row.block_bytes

    def content(self, role: str) -> bytes:
        """Bytes of a small part.

        Raises:
            Misfit: it is too long, or not U8.
        """
        return self._contents(self.names[role])

    def note(self) -> str | None:
        """What the metadata of its file says under its name; None if that is nothing."""
        return self._contents.note(self.codes, self.logical)

    def integers(self, role: str) -> tuple[int, ...]:
        """Values of a small part.

        Raises:
            Misfit: it is too long, or of another dtype.
        """
        return self._contents.integers(self.names[role])

    def packing(
        self, family: str, label: str, shape: tuple[int, ...], bits: int, numbers: str, **more: object
    ) -> Packing:
        """A `Packing` of rows; ``row_bytes`` are those of the stored tensor."""
        matrices, rows, columns = matrices_of(shape)
        stored = self.shape()
        row_bytes = self._tensors[self.codes].row.nbytes(stored[-1]) if stored else 1
        fields = {
            "matrices": matrices, "rows": rows, "columns": columns, "layout": packing.ROWS, "row_bytes": row_bytes,
            "config": self._config_text, **more,
        }  # fmt: skip
        return Packing(family, label, shape, bits=bits, numbers=numbers, **fields)  # type: ignore[arg-type]

    def scale_dtype(self, bits: str) -> str | None:
        """The dtype of scales that are stored as U8: ``bits`` says which float8 they are."""
        return bits if self.dtype(packing.SCALE) == "U8" else None


def matrices_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Number, rows and columns of the matrices of a shape."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def label_of(prefix: str, grid: Grid, shape: tuple[int, ...], zeros: bool = False, grouped: bool = False) -> str:
    """The label of a scheme: "fp8 128x128", "int4 g32", "fp8 row", "int8 tensor asym"."""
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


def said_bits(group: PackedGroup) -> int | None:
    """The ``num_bits`` of the configuration, if it has a single one."""
    only = _only(group, "num_bits")
    return only if only is not None and 1 <= only <= 8 else None


def said_group(group: PackedGroup) -> int | None:
    """The ``group_size`` of the configuration, if it has a single one."""
    only = _only(group, "group_size", "group")
    return only if only is not None and only > 0 else None


def _only(group: PackedGroup, key: str, strategy: str | None = None) -> int | None:
    """An integer of the descriptions of weights (of a strategy); None if it is missing, or they differ."""
    if not group.weights():
        return None
    values = [
        weights.get(key) for weights in group.weights() if strategy is None or weights.get("strategy") == strategy
    ]
    first = values[0] if values else None
    return first if type(first) is int and all(value == first for value in values) else None


def said_grid(group: PackedGroup, shape: tuple[int, ...]) -> Grid | None:
    """The grid of scales that ``config_groups`` describes for codes of a shape, or None if it does not say.

    Raises:
        Misfit: the scales have another shape.
    """
    if group.config is None or group.config.method != "compressed-tensors":
        return None
    described, scale = group.weights(), group.shape(packing.SCALE)
    if len(described) != 1:
        return _grid_among(described, shape, scale)
    key, known = (id(described[0]), shape, scale), group.config.grids
    if key not in known:  # thousands of experts have the shapes of the first
        known[key] = _grid_among(described, shape, scale)
    return known[key]


def _grid_among(described: Sequence[Mapping[str, Any]], shape: tuple[int, ...], scale: tuple[int, ...]) -> Grid | None:
    """The grid of the description that scales of a shape fit; None if there is none, or one does not say."""
    grids = [grid for grid in (_grid_of_strategy(weights, shape) for weights in described) if grid is not None]
    if not grids or len(grids) < len(described):
        return None
    fitting = [grid for grid in grids if _is_shape_of(scale, grid, shape)]
    rows, columns = (1, 1, *shape)[-2:]
    if len({(min(grid.row_block, rows), min(grid.column_block, columns)) for grid in fitting}) == 1:
        return fitting[0]._replace(shared=math.prod(scale) == 1 < math.prod(shape[:-2]))
    strategies = ", ".join(dict.fromkeys(_strategy(weights) for weights in described))
    if fitting:
        raise Misfit(f"scales {list(scale)} of {list(shape)} fit several config_groups: {strategies}")
    expected = " or ".join(str([*shape[:-2], grid.rows, grid.columns]) for grid in dict.fromkeys(grids))
    raise Misfit(f"scales {list(scale)} do not fit {list(shape)}: expected {expected} for {strategies} (config_groups)")


def _strategy(weights: Mapping[str, Any]) -> str:
    """The strategy of a description and the length that belongs to it, for messages."""
    structure, size = _structure_of(weights), weights.get("group_size")
    if structure is not None:
        return f"blocks of {structure[0]} x {structure[1]}"
    return f"groups of {size}" if is_length(size) else f"strategy {weights.get('strategy')}"


def _structure_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of ``block_structure``; None without one."""
    structure = weights.get("block_structure")
    if isinstance(structure, str) and _STRUCTURE.fullmatch(structure):
        structure = [int(side) for side in structure.split("x")]
    if isinstance(structure, list) and len(structure) == 2 and all(map(is_length, structure)):
        return structure[0], structure[1]
    return None


def _grid_of_strategy(weights: Mapping[str, Any], shape: tuple[int, ...]) -> Grid | None:
    """The grid of a description; None if its strategy is missing or unknown."""
    rows, columns = (max(1, length) for length in (1, 1, *shape)[-2:])
    strategy, size, structure = weights.get("strategy"), weights.get("group_size"), _structure_of(weights)
    if strategy == "tensor":
        return whole_grid(shape, rows, columns)
    if strategy == "channel" or (strategy is None and size == -1):
        return whole_grid(shape, 1, columns)
    if strategy in ("group", "tensor_group", None) and is_length(size):
        return whole_grid(shape, 1, min(size, columns))
    if strategy in ("block", None) and structure is not None:
        return whole_grid(shape, *structure)
    return None


def _is_shape_of(scale: tuple[int, ...], grid: Grid, shape: tuple[int, ...]) -> bool:
    """Whether scales of this shape are those of a grid over each matrix. An axis of 1 may be missing."""
    if (grid.rows, grid.columns) == (1, 1) and (math.prod(scale) == 1 or scale == shape[:-2]):
        return True
    expected = (*shape[:-2], grid.rows, grid.columns)
    return scale == expected or (grid.columns == 1 and scale == expected[:-1])


def check_global(group: PackedGroup, packed: Packing) -> Packing:
    """The packing, if it has a global scale for the whole tensor, for each expert, or for equal parts of their rows."""
    size = math.prod(group.shape(packing.GLOBAL))
    if size == 0 or (size != 1 and not packed.matrices):
        raise Misfit(f"global scales {list(group.shape(packing.GLOBAL))} do not fit {list(packed.shape)}")
    if size != 1 and (size % packed.matrices or packed.matrices * packed.rows % size):
        raise Misfit(f"global scales {list(group.shape(packing.GLOBAL))} do not fit {list(packed.shape)}")
    return packed
