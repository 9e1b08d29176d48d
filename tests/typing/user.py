"""What people write with safeload. Type checkers accept every line; tests run none of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import safeload
from safeload import Checkpoint, QuantizedTensor, cluster, gguf, moon
from safeload.numpy import load_file, save_file


def look(path: Path) -> int:
    with safeload.open(path) as opened:
        for name, info in opened.tensors.items():
            print(name, info.dtype, info.shape, info.size, info.np_dtype, info.nbytes, info.parts)
        norm = opened["model.norm.weight"]
        first = np.asarray(norm, dtype="float32")
        scaled = np.asarray(norm) * 2
        rows = opened.get_slice("model.embed_tokens.weight")[:4]
        few = opened.take("model.embed_tokens.weight", [1, 5, 9], dtype="float32")
        print(norm.shape, norm.dtype, norm.nbytes, norm.ndim, norm[:2], few.mean())
        print(first.max(), scaled.sum(), rows.shape, opened.metadata.get("format"), opened.config)
    return len(opened)


def describe(path: Path, data: io.BytesIO) -> list[dict[str, Any]]:
    info: safeload.Info = safeload.info(path, only="*.weight")
    print(info, info.model, info.memory["float32"], info.tensors["w"].dtype, safeload.info(data).to_dict())
    report: safeload.CheckReport = safeload.report(path, "report.html", quantize="q4_0", overwrite=True)
    checked = safeload.check(path)
    assert isinstance(checked, safeload.CheckReport)
    return info.rows() + report.rows() + checked.stats.rows() + checked.stats["w"].rows()


def in_turn(path: Path) -> float:
    total = 0.0
    with safeload.open(path) as opened:
        for name, array in opened.stream(dtype="float32", only="*.weight"):
            total += float(array.sum()) + len(name)
        for _, tensor in opened.stream():
            total += tensor.size
            if isinstance(tensor, QuantizedTensor):
                total += float(tensor.dequantize().sum())
        for layer, arrays in opened.stream(by_layer=True, dtype=np.float32):
            total += sum(float(array.max()) for array in arrays.values()) + len(layer)
        for _, tensors in opened.stream(by_layer=True):
            total += sum(tensor.nbytes for tensor in tensors.values())
    return total


def on_a_cluster(path: Path) -> str:
    plan = cluster.plan_convert(path, "half/", dtype="float16", max_shard_size="5GB")
    results = [cluster.run_piece(piece) for piece in plan.pieces]
    return str(cluster.finalize(plan, results).rows())


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
    errors = safeload.quantization_error(path, loaded)
    print(errors, errors.rows(), errors["w"].snr_db, loaded.summary.rows())
    return safeload.quantization_error(x, q).snr_db


def numbers(path: str, x: NDArray[np.float64]) -> tuple[float, int]:
    one = safeload.stats(x)
    each = safeload.stats(path, only="*.weight")
    listed = safeload.stats({"x": x}, names=["x"])
    print(each, each.rows(), each.to_dict(), one.rows())
    return one.absmax + listed["x"].std, sum(s.nan for s in each.values())


def change(path: str, done: Callable[[int, int], object]) -> bool:
    made = safeload.convert(path, "x.safetensors", dtype="bfloat16", only=["model.*"], rename=[(r"^model\.", "")])
    print(made.nbytes, made.files[0], made.summary)
    safeload.convert([path, "y.gguf"], "z", max_shard_size="5GB", metadata={"license": None}, progress=done)
    safeload.convert({"x": np.ones(3)}, Path("x.npz"), rename={"x": "y"}, overwrite=True)
    report = safeload.check(path, limits={"low": -1.0, "high": 1.0}, drop="*.bias")
    for finding in report.errors + report.warnings:
        print(finding.severity, finding.code, finding.tensor, finding.message)
    adapter = safeload.extract(path, {"x": np.ones(3)}, Path("lora"), rank=8, only="*.weight", progress=done)
    print(adapter.kept, adapter.ranks["x"] + adapter.errors["x"], adapter.left_out.values(), adapter.rows())
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
