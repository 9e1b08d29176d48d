"""Grids of scales: which block of a tensor each scale belongs to, from shapes and descriptions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.packing import Grid
from .quantization import is_length

# A block_structure of early compressed-tensors, such as "128x128".
_STRUCTURE = re.compile("[0-9]{1,9}x[0-9]{1,9}", re.ASCII)


class Misfit(Exception):  # noqa: N818 - not a failure: another family may fit
    """Stored tensors do not form a packed tensor of a family."""


class Refused(Misfit):
    """Stored tensors form an unsupported packed tensor; they appear as stored."""


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


# ---- from shapes ----


def whole_grid(shape: tuple[int, ...], row_block: int, column_block: int) -> Grid:
    """Return the grid of blocks over the matrices of a shape, ragged at the edges."""
    rows, columns = (1, 1, *shape)[-2:]
    return Grid(row_block, column_block, -(-rows // row_block), -(-columns // column_block))


def grid_of(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], *, exact: bool = False) -> Grid:
    """Return the grid of scales of this shape over a tensor, as PyTorch's writers mean it.

    A single element is the scale of the whole tensor; [rows] or [rows, 1] has an element per row; an axis of 1 is
    broadcast; an axis of ceil(length / block) has an element per block. Experts have a leading axis in both tensors.

    An ``exact`` block comes from the configuration, and contradicts scales per row or column.
    """
    rows, columns = (1, 1, *shape)[-2:]
    whole = Grid(max(1, rows), max(1, columns), 1, 1)
    if math.prod(scale) == 1:
        return whole._replace(shared=True)
    lead = shape[:-2]
    if len(scale) == 4 and len(shape) == 2 and scale[1] == scale[3] == 1:  # modelopt's blocks: [rows, 1, columns, 1]
        scale = (scale[0], scale[2])
    own = scale
    if lead:
        experts = math.prod(lead)
        if scale == lead or (scale[:1] == (experts,) and math.prod(scale) == experts):
            return whole
        if scale[: len(lead)] != lead:
            raise Misfit(f"scales {list(scale)} and codes {list(shape)} have different numbers of experts")
        own = scale[len(lead) :]
    expected = -(-rows // block[0]), -(-columns // block[1])
    misfit = (
        f"scales {list(scale)} do not fit {list(shape)} in blocks of {block[0]} x {block[1]}: expected "
        f"{[*lead, *expected]}"
    )
    if exact and own not in (expected, (1, 1)) and (own, 1) != (expected[:1], expected[1]):
        raise Misfit(misfit)
    if len(own) == 1:
        if own[0] != rows:
            raise Misfit(f"{own[0]} scales for {rows} rows of {list(shape)}")
        if lead and rows == columns:
            raise Misfit(f"scales {list(scale)} can be per row or per column of {list(shape)}")
        return Grid(1, max(1, columns), rows, 1)
    if len(own) != 2:
        raise Misfit(f"scales {list(scale)} do not fit {list(shape)}")
    if lead and own[1] == 1 and own[0] == columns != 1 and own[0] != rows and own[0] != -(-rows // block[0]):
        return Grid(max(1, rows), 1, 1, columns)  # Llama 4's down_proj: [experts, columns, 1]
    down, across = _axis(own[0], rows, block[0]), _axis(own[1], columns, block[1])
    if down is None or across is None:
        raise Misfit(misfit)
    return Grid(down, across, own[0], own[1])


def _axis(scales: int, length: int, block: int) -> int | None:
    """Return the elements per scale along an axis; None if no reading fits."""
    if scales == -(-length // block):
        return block
    if scales == 1:
        return max(1, length)
    return 1 if scales == length else None


def has_halves(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Return True if each expert is two matrices, its gate and up projections, each with its own grid."""
    if len(shape) != 3 or len(scale) != 3 or shape[1] % 2 or scale[1] % 2 or scale[1] == -(-shape[1] // block[0]):
        return False
    half = shape[1] // 2, shape[2]
    return scale[1] // 2 in (1, -(-half[0] // block[0])) and scale[1] != shape[1]


# ---- from descriptions in config_groups ----


def described_grid(
    described: Sequence[Mapping[str, Any]], shape: tuple[int, ...], scale: tuple[int, ...]
) -> Grid | None:
    """Return the grid of the fitting description; None if a description does not define a grid."""
    grids = [grid for grid in (_grid_of_strategy(weights, shape) for weights in described) if grid is not None]
    if not grids or len(grids) < len(described):
        return None
    fitting = [grid for grid in grids if _is_shape_of(scale, grid, shape)]
    rows, columns = (1, 1, *shape)[-2:]
    if len({(min(grid.row_block, rows), min(grid.column_block, columns)) for grid in fitting}) == 1:
        return fitting[0]._replace(shared=math.prod(scale) == 1 < math.prod(shape[:-2]))
    strategies = ", ".join(dict.fromkeys(_strategy_text(weights) for weights in described))
    if fitting:
        raise Misfit(f"scales {list(scale)} of {list(shape)} fit more than one of config_groups: {strategies}")
    expected = " or ".join(str([*shape[:-2], grid.rows, grid.columns]) for grid in dict.fromkeys(grids))
    raise Misfit(f"scales {list(scale)} do not fit {list(shape)}: expected {expected} for {strategies} (config_groups)")


def _strategy_text(weights: Mapping[str, Any]) -> str:
    structure, size = _structure_of(weights), weights.get("group_size")
    if structure is not None:
        return f"blocks of {structure[0]} x {structure[1]}"
    return f"groups of {size}" if is_length(size) else f"strategy {weights.get('strategy')}"


def _structure_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of ``block_structure``."""
    structure = weights.get("block_structure")
    if isinstance(structure, str) and _STRUCTURE.fullmatch(structure):
        structure = [int(side) for side in structure.split("x")]
    if isinstance(structure, list) and len(structure) == 2 and all(map(is_length, structure)):
        return structure[0], structure[1]
    return None


def _grid_of_strategy(weights: Mapping[str, Any], shape: tuple[int, ...]) -> Grid | None:
    """Return the grid of a description; None if its strategy is missing or unknown."""
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
    """Return True if scales of this shape fill a grid over each matrix; an axis of 1 can be missing."""
    if (grid.rows, grid.columns) == (1, 1) and (math.prod(scale) == 1 or scale == shape[:-2]):
        return True
    expected = (*shape[:-2], grid.rows, grid.columns)
    return scale == expected or (grid.columns == 1 and scale == expected[:-1])
