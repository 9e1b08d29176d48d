"""Grids of scales: which block of a tensor each scale belongs to, from two shapes."""

from __future__ import annotations

import math

from ..base.packing import Grid


class Misfit(Exception):  # noqa: N818 - not a failure: another family may fit
    """Why stored tensors are not a packed one."""


class Refused(Misfit):
    """Why stored tensors are packed in a way that is not dequantized: they appear as they are stored."""


def whole_grid(shape: tuple[int, ...], row_block: int, column_block: int) -> Grid:
    """The grid of blocks that divides the matrices of a shape, ragged at the edges."""
    rows, columns = (1, 1, *shape)[-2:]
    return Grid(row_block, column_block, -(-rows // row_block), -(-columns // column_block))


def grid_of(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], *, exact: bool = False) -> Grid:
    """The grid of scales of this shape over a tensor, as PyTorch's writers mean it.

    One element is the scale of all; [rows] or [rows, 1] has one for each row; an axis of 1 is broadcast; an axis of
    ceil(length / block) has one for each block. Experts have a leading axis in both.

    Args:
        shape: of the codes.
        scale: of the scales.
        block: rows and columns of a block.
        exact: whether the configuration has this block, so that scales of rows or of columns contradict it.

    Raises:
        Misfit: no reading fits, or more than one does.
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
            raise Misfit(f"scales {list(scale)} have other experts than {list(shape)}")
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
            raise Misfit(f"scales {list(scale)} may be those of rows or of columns of {list(shape)}")
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
    """Elements that share a scale along an axis; None if no reading fits."""
    if scales == -(-length // block):
        return block
    if scales == 1:
        return max(1, length)
    return 1 if scales == length else None


def has_halves(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether each expert is two matrices (its gate and its up projection), each with a grid of its own."""
    if len(shape) != 3 or len(scale) != 3 or shape[1] % 2 or scale[1] % 2 or scale[1] == -(-shape[1] // block[0]):
        return False
    half = shape[1] // 2, shape[2]
    return scale[1] // 2 in (1, -(-half[0] // block[0])) and scale[1] != shape[1]
