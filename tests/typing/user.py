"""What people write with safeload. Type checkers accept every line; tests run none of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import safeload
from safeload import Checkpoint, QuantizedTensor, gguf, moon
from safeload.numpy import load_file, save_file


def look(path: Path) -> int:
    with safeload.open(path) as opened:
        for name, info in opened.tensors.items():
            print(name, info.dtype, info.shape, info.size, info.np_dtype, info.nbytes, info.parts)
        first = opened["model.norm.weight"].astype("float32")
        scaled = opened["model.norm.weight"] * 2
        rows = opened.get_slice("model.embed_tokens.weight")[:4]
        print(first.max(), scaled.sum(), rows.shape, opened.metadata.get("format"), opened.config)
    return len(opened)


def load(path: str, names: list[str], dtype: str | None) -> dict[str, NDArray[np.float32]]:
    weights: dict[str, NDArray[np.float32]] = safeload.load(path, dtype="float32", only="model.layers.*")
    more = safeload.load([path, Path(path)], names, dtype=np.float32, backend="pread", progress=True, threads=2)
    either = safeload.load(path, dtype=dtype, drop=["*norm*", "*bias"])
    bfloat = safeload.load(path, dtype=ml_dtypes.bfloat16)
    stored = safeload.load(path, stored=True)
    print(stored["q"].dequantize(), len(either), bfloat["w"].view(np.uint16), stored["w"].T)
    weights["w"] += more["w"]
    tree = safeload.nest(weights)
    return {**safeload.flatten(tree), **more}


def quantize(path: str, x: NDArray[np.float32]) -> float:
    q = safeload.quantize(x, "q8_0")
    int8 = safeload.quantize(x, "int8", axis=0)
    loaded = safeload.load_quantized(path, {"*": "q4_0", "lm_head.weight": None}, keep=lambda name: "norm" in name)
    print(loaded.summary.quantized, np.asarray(q).shape, q.dequantize()[0] * 2, q[:2].nbytes, int8.scheme)
    for name, value in loaded.items():
        if isinstance(value, QuantizedTensor):
            print(name, value.scheme, value.parts)
        else:
            print(name, value.dtype)
    return safeload.quantization_error(x, q).snr_db


def numbers(path: str, x: NDArray[np.float64]) -> tuple[float, int]:
    one = safeload.stats(x)
    each = safeload.stats(path, only="*.weight")
    listed = safeload.stats({"x": x}, names=["x"])
    return one.absmax + listed["x"].std, sum(s.nan for s in each.values())


def change(path: str, done: Callable[[int, int], object]) -> bool:
    made = safeload.convert(path, "x.safetensors", dtype="bfloat16", only=["model.*"], rename=[(r"^model\.", "")])
    print(made.nbytes, made.files[0], made.summary)
    safeload.convert([path, "y.gguf"], "z", max_shard_size="5GB", metadata={"license": None}, progress=done)
    safeload.convert({"x": np.ones(3)}, Path("x.npz"), rename={"x": "y"}, overwrite=True)
    report = safeload.validate(path, limits={"low": -1.0, "high": 1.0}, drop="*.bias")
    for finding in report.errors + report.warnings:
        print(finding.severity, finding.code, finding.tensor, finding.message)
    return report.ok and safeload.diff(path, "x.safetensors").same


def drop_in(path: str) -> None:
    weights = load_file(path)
    weights["a"] *= 2
    save_file(weights, "b.safetensors", metadata={"format": "np"})
    with safeload.safe_open(path, framework="numpy") as f:
        print({key: f.get_tensor(key).shape for key in f.keys()}, f.metadata())  # noqa: SIM118 - as is usual
    gguf.save_file(weights, "x.gguf", {"general.name": "x"})
    moon.save_file({"w": weights["a"].astype(np.float16)}, "x.moon")


def errors(path: str) -> str | None:
    try:
        opened: Checkpoint = safeload.open(path, unknown_globals="inert")
        opened.close()
    except safeload.FormatError as error:
        return f"{error.path} {error.offset} {error.tensor}"
    except (safeload.SafeloadError, OSError):
        return None
    return opened.format
