"""The arithmetic of each format in numpy alone: what the result of its own reader must be equal to.

Bytes come in as numpy arrays of unsigned integers and values of float8 as their bytes (`raw` makes them of torch's
tensors). Every function returns float32 unless it says codes. Each product and sum is rounded to float32 by itself, in
the order written.
"""

import numpy as np
import torch

# float4 E2M1: bit 3 is the sign, so code 8 is -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _e2m3(code: int) -> float:
    sign, exponent, mantissa = (-1) ** (code >> 5), code >> 3 & 3, code & 7
    return sign * (mantissa / 8 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 1))


E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)
# float6, of which bit 5 is the sign.
E2M3 = np.array([_e2m3(code) for code in range(64)], np.float32)


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The stored bits of a tensor as unsigned integers; f32 and integers as they are."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return tensor.view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def widened(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of f32, f16 or bf16 as f32, which is exact."""
    if tensor.dtype == torch.bfloat16:
        return (raw(tensor).astype(np.uint32) << 16).view(np.float32)
    assert tensor.dtype in (torch.float32, torch.float16), tensor.dtype
    return raw(tensor).astype(np.float32)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """Powers of two: 2^(code - 127), of which code 0 is a subnormal float32."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127)


def bits(words: np.ndarray, width: int, count: int) -> np.ndarray:
    """``count`` codes of ``width`` bits from each row, which is one little-endian stream of bits."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    stream = stream[..., : count * width].reshape(*words.shape[:-1], count, width)
    return (stream.astype(np.int32) << np.arange(width, dtype=np.int32)).sum(-1, dtype=np.int32)


def words_alone(words: np.ndarray, width: int, count: int) -> np.ndarray:
    """``count`` codes from each row, ``32 // width`` of them in each word and the top bits of it unused."""
    shifts = np.arange(32 // width, dtype=np.uint32) * np.uint32(width)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << width) - 1)
    return codes.reshape(*words.shape[:-1], -1)[..., :count].astype(np.int32)


def spread(grid: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """A grid with an entry for each block of the last two axes, repeated to ``shape``, ragged at the edge."""
    rows, columns = shape[-2:]
    assert grid.shape[-2:] == (-(-rows // block[0]), -(-columns // block[1])), (grid.shape, shape, block)
    return grid.repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]


def groups(grid: np.ndarray, columns: int) -> np.ndarray:
    """A grid with one entry for each group along a row, repeated to the length of the row."""
    assert columns % grid.shape[-1] == 0, (grid.shape, columns)
    return grid.repeat(columns // grid.shape[-1], -1)
