"""Packed quantization codes, and the values that they stand for, in plain numpy: nothing of safeload's is used."""

import gguf
import numpy as np

ROWS, COLUMNS, WORDS, PLANES, BLOCKS, MASKED = range(6)
# Column of a word that each of its eight nibbles holds, from the lowest up.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Prepared:
    """Fields of an ``sl_packed``, as a job takes them."""

    cost = 0

    def __init__(self, fields):
        self.fields = fields

    def prepare(self):
        return self.fields

    def stored(self):
        return {}


def stream(codes, bits):
    """The last axis as a little-endian bit stream."""
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(each.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1, bitorder="little")


def words(codes, bits, order):
    """The last axis as words of as many codes as ``order`` has: code ``order[k]`` of these comes k-th."""
    per_word = len(order)
    padded = np.pad(codes, [(0, 0), (0, 0), (0, -codes.shape[-1] % per_word)]).astype(np.uint32)
    each = (
        padded.reshape(*codes.shape[:-1], padded.shape[-1] // per_word, per_word)[..., order]
        << np.arange(per_word, dtype=np.uint32) * bits
    )
    return np.ascontiguousarray(np.bitwise_or.reduce(each, axis=-1).astype("<u4")).view(np.uint8)


def planes(codes, bits, high_first, interleaved):
    """Rows of bytes that each hold codes of several rows."""
    matrices, rows, columns = codes.shape
    count = 8 // bits
    if interleaved:
        each = codes.reshape(matrices, rows // count, count, columns)
    else:
        each = codes.reshape(matrices, count, rows // count, columns).swapaxes(1, 2)
    shifts = np.arange(count, dtype=np.uint8) * bits
    return np.bitwise_or.reduce(each << (shifts[::-1] if high_first else shifts)[:, None], axis=2)


def pack(codes, layout, bits, word_codes=0, high_first=False, interleaved=False, gap=0):
    """Stored rows of bytes, with ``gap`` bytes after each."""
    if layout == COLUMNS:
        stored = stream(np.ascontiguousarray(codes.swapaxes(1, 2)), bits).view("<u4").swapaxes(1, 2)
        stored = np.ascontiguousarray(stored).view(np.uint8)
    elif layout == WORDS:
        stored = words(codes, 4, AWQ_ORDER)
    elif layout == PLANES:
        stored = planes(codes, bits, high_first, interleaved)
    elif word_codes:
        stored = words(codes, bits, list(range(word_codes)))
    else:
        stored = stream(codes, bits)
        stored = stored >> 4 | stored << 4 if high_first else stored
    return np.ascontiguousarray(np.pad(stored, [(0, 0), (0, 0), (0, gap)], constant_values=0xEE))


def nvfp4(blocks):
    """The values of blocks of 36 bytes, along the last axis."""
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)


def i2_s(blocks):
    """The values of blocks of 32 bytes, along the last axis: four planes of 32, the first in the high bits."""
    codes = blocks.reshape(*blocks.shape[:-1], -1, 1, 32) >> np.array([[6], [4], [2], [0]], np.uint8) & 3
    return codes.reshape(*blocks.shape[:-1], -1).astype(np.float32) - np.float32(1)


def spread(grid, blocks, groups, by_row, shape):
    """The element of the grid of each code."""
    matrices, rows, columns = shape
    down, across = np.arange(rows) // blocks[0], np.arange(columns) // blocks[1]
    if groups is not None and by_row:
        down = groups
    elif groups is not None:
        across = groups
    return np.broadcast_to(grid, (matrices, *grid.shape[1:]))[:, down[:, None], across]


class Case:
    """Random codes with random scales: their bytes, fields and values.

    Args:
        layout, bits: of the codes.
        shape: matrices, rows, columns.
        blocks: rows and columns of a block of the grid; None: no scales.
        kinds: which of "zeros", "biases", "factors", "groups", "shared" there are; "sequence": the numbers of the table
            follow each other; "divide": scales divide.
        numbers: the number and the numpy dtype that 8 bits are; of blocks the number of their dtype, elements, bytes
            and the function that restores them; None: a table.
        transpose, word_codes, high_first, interleaved, gap: as in ``sl_packed``; gap: unused bytes after a row.
    """

    def __init__(self, layout, bits, shape, blocks=None, kinds=(), *, seed=0, numbers=None, transpose=None, **more):
        rng = np.random.default_rng([seed, layout, bits, *shape])
        matrices, rows, columns = shape
        by_row = layout == COLUMNS or (layout == WORDS and transpose is not False)
        self.shape, self.transpose = shape, by_row if transpose is None else transpose
        if layout == BLOCKS:
            number, block, size, values_of = numbers
            numbers = (number, None)
            codes = rng.integers(0, 256, (matrices, rows, columns // block * size), dtype=np.uint8)
            self.codes = np.pad(codes, [(0, 0), (0, 0), (0, more.pop("gap", 0))])
            values = values_of(codes)
        else:
            values = self._coded(layout, bits, shape, numbers, rng, more, "sequence" in kinds)
        self.fields = {
            "layout": layout,
            "bits": bits,
            "transpose": self.transpose,
            "forbidden": -1,
            "size": self.codes.nbytes,
            "matrices": matrices,
            "rows": rows,
            "columns": columns,
            "row_bytes": self.codes.shape[-1],
            **more,
        }
        self.fields |= {"table": self.table} if numbers is None else {"codes": numbers[0]}
        if blocks is not None:
            values = self._scale(values, blocks, set(kinds), by_row, rng)
        if "factors" in kinds:
            factors = rng.standard_normal(rows if by_row else columns).astype(np.float32)
            self.fields["factors"] = factors
            values = values * (factors[:, None] if by_row else factors)
        values = values.swapaxes(1, 2) if self.transpose else values
        self.values = np.ascontiguousarray(values)

    def _coded(self, layout, bits, shape, numbers, rng, more, sequence):
        """Random codes, and the numbers of the table that they stand for."""
        codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
        table = rng.standard_normal(1 << bits).astype(np.float32)
        if sequence:
            table = np.arange(1 << bits, dtype=np.float32) - np.float32(rng.integers(9))
        if numbers is not None:
            codes[~np.isfinite(codes.view(numbers[1]).astype(np.float32))] = 1
            table = np.arange(256, dtype=np.uint8).view(numbers[1]).astype(np.float32)
        self.codes = pack(codes, layout, bits, **more)
        more.pop("gap", None)
        self.table = table
        return table[codes]

    def _scale(self, values, blocks, kinds, by_row, rng):
        matrices, rows, columns = self.shape
        sizes = [-(-rows // blocks[0]), -(-columns // blocks[1])]
        groups = None
        if "groups" in kinds:
            sizes[0 if by_row else 1] = 5
            groups = self.fields["groups"] = rng.integers(0, 5, rows if by_row else columns).astype(np.uint32)
        count = 1 if "shared" in kinds else matrices
        scales = rng.standard_normal((count, *sizes)).astype(np.float32)
        zeros = rng.integers(-8, 8, scales.shape).astype(np.float32) if "zeros" in kinds else None
        biases = rng.standard_normal(scales.shape).astype(np.float32) if "biases" in kinds else None
        self.fields |= {
            "row_block": blocks[0],
            "column_block": blocks[1],
            "grid_rows": sizes[0],
            "grid_columns": sizes[1],
            "grid_step": 0 if count == 1 else sizes[0] * sizes[1],
            "scales": scales,
            "zeros": zeros,
            "biases": biases,
        }
        if zeros is not None:
            values = values - spread(zeros, blocks, groups, by_row, self.shape)
        if "divide" in kinds:
            self.fields["divide"] = True
            return values / spread(scales, blocks, groups, by_row, self.shape)
        values = values * spread(scales, blocks, groups, by_row, self.shape)
        return values if biases is None else values + spread(biases, blocks, groups, by_row, self.shape)

    def prepared(self):
        return Prepared(self.fields)


class Masked(Case):
    """Random values in random places, with random scales.

    Args:
        numbers: the number and the numpy dtype of the values.
        shape, blocks, kinds: as in `Case`.
        share: of the values that are not zero.
        mask_columns: columns of a row that share an element of ``starts``; None: all.
    """

    def __init__(self, numbers, shape, blocks=None, kinds=(), *, share=0.5, mask_columns=None, seed=0):
        rng = np.random.default_rng([seed, *shape])
        matrices, rows, columns = self.shape = shape
        self.transpose = False
        self.places = rng.random(shape) < share
        self.places[:, :1] = False  # a row of nothing else, and one of nothing
        self.places[:, 1:2] = True
        dense = np.where(self.places, rng.integers(1, 120, shape), 0).astype(np.uint8)
        dense = dense.view(numbers[1]) if np.dtype(numbers[1]).itemsize == 1 else dense.astype(numbers[1]) / 8
        self.codes = np.ascontiguousarray(dense[self.places]).astype(np.dtype(numbers[1]).newbyteorder("<"))
        step = mask_columns or max(1, columns)
        counts = [self.places[..., k : k + step].sum(-1) for k in range(0, columns, step)] or [0]
        counts = np.stack(np.broadcast_arrays(*counts), -1).reshape(-1)
        self.fields = {
            "layout": MASKED,
            "bits": 8,
            "codes": numbers[0],
            "forbidden": -1,
            "size": self.codes.nbytes,
            "matrices": matrices,
            "rows": rows,
            "columns": columns,
            "mask": np.packbits(self.places, axis=-1, bitorder="little"),
            "starts": np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64),
            "mask_columns": step,
        }
        values = dense.astype(np.float32)
        if blocks is not None:
            values = self._scale(values, blocks, set(kinds), False, rng)
        if "factors" in kinds:
            factors = self.fields["factors"] = rng.standard_normal(columns).astype(np.float32)
            values = values * factors
        self.values = np.ascontiguousarray(values)
