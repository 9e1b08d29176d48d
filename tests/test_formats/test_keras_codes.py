"""Quantized layers of Keras: their codes are never taken for weights."""

import shutil

import numpy as np
import pytest
from builders.paths import ROOT

import safeload
from safeload import UnsupportedError

pytest.importorskip("h5py")

CODES, SCALE = "layers.dense.vars.0", "layers.dense.vars.1"


@pytest.fixture
def path(tmp_path):
    """A Dense layer of 16 inputs and 4 units after quantize("int8"), by Keras 3.15.1."""
    return shutil.copy(ROOT / "tests" / "data" / "keras" / "int8.keras", tmp_path / "m.keras")


USES = {
    "load": lambda path, out: safeload.load(path, dtype="float32"),
    "stream": lambda path, out: [*safeload.open(path).stream(dtype="bfloat16")],
    "take": lambda path, out: safeload.open(path).take(CODES, [0], dtype="float32"),
    "stats": lambda path, out: safeload.stats(path),
    "diff": lambda path, out: safeload.diff(path, path),
    "convert": lambda path, out: safeload.convert(path, out, dtype="bfloat16"),
    "copy": lambda path, out: safeload.convert(path, out),
    "copy to a folder": lambda path, out: safeload.convert(path, f"{out.with_suffix('')}/"),
    "copy in pieces": lambda path, out: safeload.convert(path, f"{out.with_suffix('')}/", max_shard_size=100),
    "quantize": lambda path, out: safeload.convert(path, out, quantize="int8"),
}


@pytest.mark.parametrize("use", USES)
def test_codes_are_no_weights(use, path, tmp_path):
    with pytest.raises(UnsupportedError, match=rf"'{CODES}' holds I8 codes, whose scale is '{SCALE}'.*layer of Keras"):
        USES[use](path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_codes_open_as_stored(path):
    loaded = safeload.load(path)
    assert loaded[CODES].dtype == np.int8
    assert loaded[SCALE].dtype == np.float32
    assert loaded[CODES][0, :2].tolist() == [-75, -12]
    assert safeload.load(path, [SCALE], dtype="float16")[SCALE].dtype == np.float16
    assert safeload.stats(path, only=SCALE)


def test_codes_are_copied_on_request_only(path, tmp_path):
    for options in ({"raw": True}, {"drop": CODES}, {"names": [SCALE]}):
        safeload.convert(path, tmp_path / "out.safetensors", overwrite=True, **options)
        assert (CODES in safeload.open(tmp_path / "out.safetensors")) == ("raw" in options)


def test_check_leaves_codes_out_by_name(path):
    report = safeload.check(path)
    assert report.ok
    assert [finding.code for finding in report.notes] == ["quantization.unchecked"]
    assert CODES not in report.stats


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "legacy.h5", "sharded.weights.json"])
def test_integers_of_other_layers_are_values(name):
    folder = ROOT / "tests" / "data" / "keras"
    assert safeload.load(folder / name, dtype="float32")
    assert safeload.stats(folder / name)
