"""Tracebacks of safeload's errors end at the public function: no frame inside the package follows."""

import io
import traceback

import numpy as np
import pytest

import safeload
from safeload import cluster, gguf, moon
from safeload.numpy import load, load_file, save, save_file

pytestmark = pytest.mark.no_core

W = np.ones((4, 64), np.float32)


@pytest.fixture
def good(tmp_path, monkeypatch):
    """A good file, a file that is cut, and a page."""
    monkeypatch.chdir(tmp_path)
    save_file({"w": W, "i": np.arange(3)}, "good.safetensors", durable=False)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-8])
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html>")
    return tmp_path


def opened():
    return safeload.open("good.safetensors")


def closed():
    with safeload.safe_open("good.safetensors", "np") as file:
        return file


def quantized():
    return safeload.quantize(W, "q8_0")


# For each public function, a call that fails.
CALLS = {
    "open": lambda: safeload.open("page.safetensors"),
    "open of an object": lambda: safeload.open(io.BytesIO(b"<!DOCTYPE html>")),
    "load": lambda: safeload.load("cut.safetensors"),
    "load of a name": lambda: safeload.load("good.safetensors", ["v"]),
    "load of a pattern": lambda: safeload.load("good.safetensors", only="v*"),
    "Checkpoint": lambda: opened()["v"],
    "Checkpoint.get_slice": lambda: opened().get_slice("v"),
    "Checkpoint.take": lambda: opened().take("v", [0]),
    "Checkpoint.load": lambda: opened().load(["v"]),
    "Checkpoint.stream": lambda: opened().stream(["v"]),
    "numpy.load": lambda: load(b"<!DOCTYPE html>"),
    "numpy.load_file": lambda: load_file("page.safetensors"),
    "numpy.load_file of a name": lambda: load_file("good.safetensors", names=["v"]),
    "numpy.save": lambda: save({"w": np.array(["text"])}),
    "numpy.save_file": lambda: save_file({"w": np.array(["text"])}, "x.safetensors"),
    "safe_open": lambda: safeload.safe_open("page.safetensors"),
    "safe_open.get_tensor": lambda: safeload.safe_open("good.safetensors").get_tensor("v"),
    "safe_open.get_slice": lambda: safeload.safe_open("good.safetensors").get_slice("v"),
    "safe_open.keys": lambda: closed().keys(),
    "deserialize": lambda: safeload.deserialize(b"<!DOCTYPE html>"),
    "info": lambda: safeload.info("page.safetensors"),
    "info of a pattern": lambda: safeload.info("good.safetensors", only="v*"),
    "check of a pattern": lambda: safeload.check("good.safetensors", only="v*"),
    "stats": lambda: safeload.stats("page.safetensors"),
    "diff": lambda: safeload.diff("good.safetensors", "page.safetensors"),
    "diff of a pattern": lambda: safeload.diff({"w": W}, {"w": W}, only="v*"),
    "quantize": lambda: safeload.quantize(W * np.nan, "q8_0"),
    "quantization_error": lambda: safeload.quantization_error({}, {"w": quantized()}),
    "load_quantized": lambda: safeload.load_quantized({"w": W * np.inf}),
    "QuantizedTensor.dequantize": lambda: safeload.QuantizedTensor(
        "q1_0", (2, 256), np.zeros((2, 36), np.uint8)
    ).dequantize(),
    "convert": lambda: safeload.convert("good.safetensors", "x.moon"),
    "convert to a folder": lambda: safeload.convert("page.safetensors", "out", max_shard_size="1GB"),
    "plan_convert": lambda: cluster.plan_convert("page.safetensors", "out", max_shard_size="1GB"),
    "save": lambda: safeload.save({"w": np.array(["text"])}, "x.safetensors"),
    "save of a generator": lambda: safeload.save(iter([("w", np.array(["text"]))]), "x.safetensors"),
    "Writer.add": lambda: safeload.Writer("x.safetensors").add("w", np.array(["text"])),
    "edit": lambda: safeload.edit("page.safetensors"),
    "make_patch": lambda: safeload.make_patch("page.safetensors", "good.safetensors", "p.safetensors"),
    "apply_patch": lambda: safeload.apply_patch("good.safetensors", "page.safetensors"),
    "moon.save_file": lambda: moon.save_file({"w": W}, "x.moon"),
    "moon.load_file": lambda: moon.load_file("page.safetensors"),
    "gguf.save_file": lambda: gguf.save_file({"w": np.ones(3, np.uint64)}, "x.gguf"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_last_frame_is_the_public_function(name, good):
    with pytest.raises(safeload.SafeloadError) as caught:
        CALLS[name]()
    frames = traceback.extract_tb(caught.value.__traceback__)
    inside = [frame for frame in frames if frame.filename.startswith(safeload.__path__[0])]
    assert len(inside) == 1, inside
    assert frames[-1] is inside[0]
    assert inside[0].line != "raise"  # the line that failed, not the one that raised again


def test_a_stream_is_cut_where_it_fails(good):
    (good / "cut.safetensors").write_bytes((good / "good.safetensors").read_bytes())
    stream = safeload.open("cut.safetensors").stream()
    with open("cut.safetensors", "r+b") as file:
        file.truncate(200)
    with pytest.raises(safeload.SafeloadError) as caught:
        list(stream)
    inside = [
        f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename.startswith(safeload.__path__[0])
    ]
    assert [frame.name for frame in inside] == ["__next__"]


def test_other_errors_keep_their_frames(good):
    with pytest.raises(FileNotFoundError) as caught:
        safeload.open("missing.safetensors")
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 2


def test_frames_of_the_caller_stay(good):
    def outer():
        return inner()

    def inner():
        return safeload.load("page.safetensors")

    with pytest.raises(safeload.UnsupportedError) as caught:
        outer()
    assert [f.name for f in traceback.extract_tb(caught.value.__traceback__)][-3:] == ["outer", "inner", "load"]
