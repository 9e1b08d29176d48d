"""Conversion while loading, the kernels in memory, and files of 100,000 tiny tensors that are converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from bench_load import prepare, threads
from builders import ggml_reference
from compare import Comparison, race, release, same_bytes
from limits import read_and_store, stream

import safeload
import safeload.numpy

ROUNDS = 5
PEER = "safetensors.numpy.load_file, astype"
SAVE = "safetensors.numpy load_file, save_file"


def _content(path: Path) -> tuple[Any, bytes]:
    """The header and the data of a file; `convert` leaves room behind the header, for edits in place."""
    read = path.read_bytes()
    end = 8 + int.from_bytes(read[:8], "little")
    return json.loads(read[8:end]), read[end:]


@pytest.fixture(scope="session")
def llama_f16() -> Path:
    """The Llama file's shapes as F16, 2.47 GB."""
    return files.make("llama-1b-f16", [entry._replace(dtype="F16") for entry in files.llama_1b()])


def _as_f32(path: Path) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: {name: a.astype(np.float32) for name, a in safetensors.numpy.load_file(path).items()}


def _quiet_nans(ours: Any, theirs: Any) -> None:
    """Random bits hold signalling NaNs, which we quiet and ml_dtypes does not: compared as values."""
    if not isinstance(theirs, dict):
        return
    for name, array in ours.items():
        other = theirs[name]
        assert array.dtype == other.dtype == np.float32
        assert np.array_equal(array[..., ::7], other[..., ::7], equal_nan=True), name


def _race(job: str, path: Path, target: float, table, report) -> None:
    plain = safeload.numpy.load_file(path, dtype="float32")
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: safeload.numpy.load_file(path, dtype="float32"),
        PEER: _as_f32(path),
        "ours with out=": lambda: safeload.numpy.load_file(path, dtype="float32", out=plain),
    }
    limit = "limit: read the file, store its bytes twice in fresh memory"
    sides[limit] = read_and_store(path, 2, threads())
    samples = race(sides, files.LARGE_ROUNDS, check=_quiet_nans, prepare=prepare(path, 2))
    rows = [table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), target=target)]
    rows.append(table.add(job, limit, Comparison(samples["ours"], samples[limit]), target=0.9))
    rows.append(table.add(f"{job}, out=", PEER, Comparison(samples["ours with out="], samples[PEER])))
    report(sides["ours"], rows, rounds=1, prepare=prepare(path, 2))


def test_bf16_to_f32_while_loading(llama: Path, table, report) -> None:
    _race("load 2.5 GB bf16 as f32", llama, 6, table, report)


def test_f16_to_f32_while_loading(llama_f16: Path, table, report) -> None:
    _race("load 2.5 GB f16 as f32", llama_f16, 8, table, report)


def test_bf16_to_f32_against_torch(llama: Path, table, report) -> None:
    pytest.importorskip("torch", reason="torch is absent")
    import safetensors.torch

    peer = "safetensors.torch.load_file, float()"
    sides = {
        "ours": lambda: safeload.numpy.load_file(llama, dtype="float32"),
        peer: lambda: {name: t.float() for name, t in safetensors.torch.load_file(llama).items()},
    }

    def check(ours: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
        assert sorted(ours) == sorted(theirs)
        for name, array in ours.items():
            assert np.array_equal(array[..., ::7], theirs[name].numpy()[..., ::7], equal_nan=True), name

    samples = race(sides, files.LARGE_ROUNDS, check=check, prepare=prepare(llama, 2))
    row = table.add("load 2.5 GB bf16 as f32", peer, Comparison(samples["ours"], samples[peer]), target=1.5)
    report(sides["ours"], [row], rounds=1, prepare=prepare(llama, 2))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_kernels_to_f32_in_memory(name: str, table, report) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    count = 128 << 20
    source = np.resize(np.random.default_rng(5).integers(0, 256, 1 << 20, np.uint8), count * dtype.itemsize).view(dtype)
    target = np.ones(count, np.float32)
    limit = "limit: memcpy of as many bytes"
    sides = {
        "ours": lambda: safeload.astype(source, "float32", out=target),
        "ml_dtypes": lambda: source.astype(np.float32),
        limit: stream(source.nbytes + target.nbytes, threads()),
    }

    def check(ours: np.ndarray, theirs: np.ndarray) -> None:
        if theirs.dtype == np.float32:
            assert np.array_equal(ours[::7], theirs[::7], equal_nan=True)

    samples = race(sides, ROUNDS, check=check)
    job = f"{name} to f32, 128 Mi elements in memory"
    rows = [
        table.add(job, "numpy's astype", Comparison(samples["ours"], samples["ml_dtypes"])),
        table.add(job, limit, Comparison(samples["ours"], samples[limit]), target=0.8),
    ]
    report(sides["ours"], rows, rounds=3)
    assert same_bytes(target, safeload.astype(source, "float32"))


@pytest.mark.parametrize(
    ("function", "source", "target"),
    [
        ("ggml_bf16_to_fp32_row", "bfloat16", "float32"),
        ("ggml_fp16_to_fp32_row", "float16", "float32"),
        ("ggml_fp32_to_bf16_row", "float32", "bfloat16"),
        ("ggml_fp32_to_fp16_row", "float32", "float16"),
    ],
)
def test_rows_against_ggml_in_one_thread(function: str, source: str, target: str, table, report) -> None:
    library = ggml_reference.load()
    if library is None:
        pytest.skip("pywhispercpp, whose wheel holds ggml, is not installed")
    count = 64 << 20
    values = np.resize(np.random.default_rng(6).standard_normal(1 << 20, np.float32), count)
    x = values if source == "float32" else safeload.astype(values, source)
    wanted = np.dtype(getattr(ml_dtypes, target, target))
    ours, theirs = np.ones(count, wanted), np.ones(count, wanted)
    sides = {
        "ours": lambda: safeload.astype(x, target, out=ours, threads=1),
        function: lambda: ggml_reference.convert_row(library, function, x, theirs),
    }

    def check(a: np.ndarray, b: np.ndarray) -> None:
        assert same_bytes(a, b)

    samples = race(sides, ROUNDS, check=check)
    job = f"{source} to {target}, 64 Mi elements in memory, one thread"
    rows = [table.add(job, function, Comparison(samples["ours"], samples[function]))]
    report(sides["ours"], rows, rounds=3)


@pytest.mark.parametrize("order", ["by name", "by layer"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"], ids=["copied", "bfloat16"])
def test_a_file_of_tiny_tensors(order: str, dtype: str | None, tmp_path: Path, table, report) -> None:
    """Both sides wait for the disk: `convert` always does, the peer's file and folder are synced after it."""
    path = files.CACHE / f"tiny-{order.replace(' ', '-')}-v{files.VERSION}.safetensors"
    if not path.exists():
        entries = files.small(100_000, by_name=order == "by name")
        values = np.random.default_rng(23).standard_normal((len(entries), *entries[0].shape), np.float32)
        files.write(path, dict(zip((entry.name for entry in entries), values, strict=True)))

    def ours() -> Path:
        safeload.convert(path, tmp_path / "ours.safetensors", dtype=dtype, overwrite=True)
        return tmp_path / "ours.safetensors"

    def theirs() -> Path:
        found = safetensors.numpy.load_file(path)
        if dtype is not None:
            found = {name: array.astype(ml_dtypes.bfloat16) for name, array in found.items()}
        safetensors.numpy.save_file(found, tmp_path / "theirs.safetensors")
        return tmp_path / "theirs.safetensors"

    def theirs_synced() -> Path:
        out = theirs()
        files.sync(out)
        return out

    def limit() -> None:
        out = tmp_path / "limit.safetensors"
        out.write_bytes(path.read_bytes())
        files.sync(out)

    def check(one: Path, other: Path | None) -> None:
        assert other is None or _content(one) == _content(other)

    names = {
        f"{SAVE}, fsync of file and folder": theirs_synced,
        SAVE: theirs,
        "limit: copying the file, fsync": limit,
    }
    samples = race({"ours": ours, **names}, ROUNDS, check=check, prepare=release)
    job = f"convert 100,000 tiny tensors {order}, {'as they are' if dtype is None else f'f32 to {dtype}'}"
    rows = [
        table.add(job, name, Comparison(samples["ours"], samples[name]), target=1 if name.startswith(SAVE) else None)
        for name in names
    ]
    report(ours, rows, rounds=3)
