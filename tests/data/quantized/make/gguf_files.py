"""GGUF files whose tensors have a scale beside their blocks, or behind them."""

import importlib.util
from ctypes import CDLL, c_int64, c_void_p
from pathlib import Path

import gguf
import numpy as np
from gguf.gguf_writer import TensorInfo

from .checkpoint import Checkpoint, fixture
from .restated import E2M1, E4M3

NVFP4 = gguf.GGMLQuantizationType.NVFP4
# The number of I2_S, and what tells it from the type that ggml had under this number.
I2_S, FILE_TYPE = 36, 40


def ggml() -> CDLL:
    """ggml's C, as the wheel of pywhispercpp holds it."""
    found = importlib.util.find_spec("pywhispercpp")
    assert found is not None
    assert found.origin is not None
    (path,) = Path(found.origin).parents[1].glob("pywhispercpp.libs/libggml-base*")
    return CDLL(str(path))


def write(ckpt: Checkpoint, architecture: str, tensors: dict, file_type: int) -> None:
    """Writes ``model.gguf``: arrays, or (bytes, logical shape, type)."""
    writer = gguf.GGUFWriter(ckpt.folder / "model.gguf", architecture)
    writer.add_file_type(file_type)
    writer.add_block_count(1)
    for name, value in tensors.items():
        if isinstance(value, tuple):  # gguf-py has no number for I2_S, and no sizes
            data, shape, kind = value
            writer.tensors[0][name] = TensorInfo(shape=shape, dtype=kind, nbytes=data.nbytes, tensor=data)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- NVFP4 ----


def nvfp4_blocks(weight: np.ndarray) -> np.ndarray:
    """Blocks as ggml makes them: rows of bytes."""
    rows = np.ascontiguousarray(weight.reshape(-1, weight.shape[-1]))
    out = np.empty((len(rows), weight.shape[-1] // 64 * 36), np.uint8)
    quantize = ggml().quantize_row_nvfp4_ref
    quantize.argtypes, quantize.restype = [c_void_p, c_void_p, c_int64], None
    quantize(rows.ctypes.data, out.ctypes.data, rows.size)
    return out.reshape(*weight.shape[:-1], -1)


def nvfp4_values(stored: np.ndarray) -> np.ndarray:
    """Four scales, then four runs of 16 codes: the first eight in the low nibbles of 8 bytes."""
    blocks = stored.reshape(-1, 36)
    nibbles = blocks[:, 4:].reshape(-1, 4, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & 15
    values = E2M1[nibbles].reshape(-1, 4, 16) * E4M3[blocks[:, :4] & 127][:, :, None]
    return values.reshape(*stored.shape[:-1], -1)


@fixture(
    "gguf_nvfp4",
    writer="ggml 0.13.1 `quantize_row_nvfp4_ref`, gguf 0.19.0 `GGUFWriter`, under the names of llama.cpp's converter",
    reader="gguf 0.19.0 `dequantize`, times `X.scale` in f32",
    shows="`X.scale` [1], or one for each expert; `X.input_scale` to ignore",
)
def gguf_nvfp4(ckpt: Checkpoint) -> None:
    tensors: dict = {}
    for module, shape in {"blk.0.attn_q": (24, 64), "blk.0.ffn_up_exps": (3, 8, 128)}.items():
        weight = ckpt.normal(*shape).numpy()
        axes = tuple(range(1, 3)) if len(shape) == 3 else None
        scale = np.atleast_1d(np.abs(weight).max(axis=axes) / np.float32(6 * 448)).astype(np.float32)
        each = scale.reshape(-1, *[1] * (len(shape) - 1)) if len(shape) == 3 else scale
        stored = nvfp4_blocks(weight / each)
        tensors[f"{module}.weight"] = (stored, shape, NVFP4)
        tensors[f"{module}.scale"] = scale
        tensors[f"{module}.input_scale"] = np.full(scale.shape, 0.125, np.float32)
        ckpt.expect(f"{module}.weight", gguf.dequantize(stored, NVFP4) * each, nvfp4_values(stored) * each)
    norm = ckpt.plain("output_norm.weight", ckpt.norm(64).float())
    write(ckpt, "llama", {**tensors, "output_norm.weight": norm.numpy()}, gguf.LlamaFileType.MOSTLY_NVFP4)


# ---- I2_S ----


def i2_s(values: np.ndarray, scale: np.float32) -> np.ndarray:
    """Ternary values as the converter of microsoft/BitNet lays them out, and the scale in 32 bytes behind them."""
    out = bytearray()
    flat = (values + 1).astype(np.uint8).ravel()
    for begin in range(0, flat.size, 128):
        for place in range(begin, begin + 32):
            out.append(flat[place] << 6 | flat[place + 32] << 4 | flat[place + 64] << 2 | flat[place + 96])
    return np.frombuffer(bytes(out) + scale.tobytes() + bytes(28), np.uint8)


def i2_s_values(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    scale = stored[-32:-28].view(np.float32)
    codes = stored[:-32].reshape(-1, 1, 32) >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3
    return (codes.astype(np.float32).reshape(shape) - 1) * scale


@fixture(
    "gguf_i2_s",
    writer="I2_S of microsoft/BitNet restated, gguf 0.19.0 `GGUFWriter`",
    reader="restated: ternary value times the scale, as transformers' `autobitlinear` has it",
    shows="type 36 under `general.file_type` 40: codes of 2 bits, and behind them the scale of all",
)
def gguf_i2_s(ckpt: Checkpoint) -> None:
    tensors: dict = {}
    for module, shape in {"blk.0.attn_q": (24, 128), "blk.0.ffn_down": (10, 384)}.items():
        weight = ckpt.normal(*shape).numpy()
        scale = np.abs(weight).mean()
        values = np.clip(np.rint(weight / scale), -1, 1)
        stored = i2_s(values, scale)
        tensors[f"{module}.weight"] = (stored, shape, I2_S)
        ckpt.expect(f"{module}.weight", values * scale, i2_s_values(stored, shape))
    norm = ckpt.plain("output_norm.weight", ckpt.norm(64).float())
    write(ckpt, "bitnet-b1.58", {**tensors, "output_norm.weight": norm.numpy()}, FILE_TYPE)
