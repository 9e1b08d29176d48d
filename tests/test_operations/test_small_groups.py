"""Small tensors are quantized in groups or columns; files and errors are those of tensor by tensor."""

import numpy as np
import pytest
from builders import inside
from builders.calls import count_calls
from builders.random import rng
from builders.thorough import dealt

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.inner, pytest.mark.no_core]

SHAPES = [(32, 64), (3, 5), (2, 8, 32), (1, 32), (0, 64), (300, 96), (64,)]


def weights(count=200):
    arrays = {f"x{k}.{end}": rng.standard_normal(SHAPES[k % 7], np.float32) for k in range(count) for end in "ab"}
    return {**arrays, **{f"x{k}": rng.standard_normal((4, 32)).astype(np.float16) for k in range(count)}}


def outcome(path, out, **options):
    try:
        safeload.convert(path, out, overwrite=True, **options)
    except Exception as error:  # compared below
        return type(error), str(error), out.exists()
    return out.read_bytes()


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    ("quantize", "bad"),
    dealt(["int8", "q8_0", {"*1*": "int8", "*.a": "q4_0", "*": "mxfp4"}], [None, np.nan, 3e38]),
)
def test_files_and_errors_are_those_of_tensor_by_tensor(tmp_path, monkeypatch, suffix, quantize, bad):
    tensors = weights()
    for name in ("x190", "x140.b", "x7.a") if bad is not None else ():
        tensors[name] = np.full((4, 32), bad, np.float32)
    save_file(tensors, tmp_path / "x.safetensors")
    outcomes = []
    for alone in (False, True):
        if alone:
            inside.tune(monkeypatch, small_tensor=-1, spans_of=lambda *_: None)
        out = tmp_path / f"out.{suffix}"
        outcomes.append(outcome(tmp_path / "x.safetensors", out, quantize=quantize, raw=suffix == "gguf"))
        out.unlink(missing_ok=True)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("scheme", "suffix"), [("int8", "safetensors"), ("q8_0", "gguf")])
def test_a_group_takes_fewer_steps(tmp_path, monkeypatch, scheme, suffix):
    path, out = tmp_path / "x.safetensors", tmp_path / f"out.{suffix}"
    save_file({f"x{k}.weight": np.ones((4, 32), np.float32) for k in range(300)}, path)
    steps = []
    for alone in (False, True):
        if alone:
            inside.tune(monkeypatch, small_tensor=-1)
        safeload.convert(path, out, quantize=scheme, overwrite=True)
        steps.append(count_calls(lambda: safeload.convert(path, out, quantize=scheme, overwrite=True)))
    assert steps[0] < 0.75 * steps[1]
