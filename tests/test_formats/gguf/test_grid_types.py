"""A file whose matrices ggml put into grids (tests/data/gguf) opens as what gguf-py makes of it, by every way."""

import copy
import pickle

import gguf
import numpy as np
import pytest
from builders import gguf_build as g
from builders.inside import dtypes
from builders.iq_weights import METADATA, TYPES, weights
from builders.paths import DATA

import safeload
from safeload import QuantizedTensor

pytestmark = pytest.mark.any_python

PATH = DATA / "gguf" / "iq.gguf"


@pytest.fixture(scope="module")
def expected():
    """Every tensor as gguf-py restores it."""
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(PATH).tensors}


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in got.items():
        assert (array.dtype, array.shape) == (want[name].dtype, want[name].shape)
        np.testing.assert_array_equal(array.view(f"u{array.itemsize}"), want[name].view(f"u{array.itemsize}"), name)


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_as_f32(expected, backend):
    same(safeload.load(PATH, dtype="float32", backend=backend), expected)


def test_as_f16_in_stream_and_rows(expected):
    want = {name: array.astype(np.float16) for name, array in expected.items()}
    same(safeload.load(PATH, dtype="float16", threads=3), want)
    with safeload.open(PATH) as opened:
        same(dict(opened.stream(dtype="float16")), want)
        for name in TYPES:
            rows = opened.get_slice(name)
            assert rows.shape == (3, 512)
            np.testing.assert_array_equal(rows[1:], expected[name][1:])
            np.testing.assert_array_equal(rows[2, 250:300:7], expected[name][2, 250:300:7])


def test_as_stored():
    blocks = {tensor.name: tensor.data for tensor in gguf.GGUFReader(PATH).tensors}
    with safeload.open(PATH) as opened:
        assert dict(opened.metadata) == METADATA
        for name, scheme in TYPES.items():
            value = opened[name]
            assert isinstance(value, QuantizedTensor)
            assert (value.scheme, value.shape) == (scheme, (3, 512))
            assert value.data.tobytes() == blocks[name].tobytes()
            assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value


def test_values_are_near_the_weights_that_ggml_quantized(expected):
    """Grids of 1 to 3 bits: a wrong index, sign or scale leaves more than half of the energy."""
    for name, x in weights().items():
        error = np.square(expected[name] - x).sum() / np.square(x).sum()
        assert error < (0.3 if name in TYPES else 1e-12), name


def test_operations_take_the_values(expected, tmp_path):
    assert not safeload.check(PATH, schema=None).errors
    for name, one in safeload.stats(PATH).items():
        want = safeload.stats(expected[name])
        assert one[1:-1] == want[1:-1]  # without the bytes that they take
    report = safeload.diff(PATH, expected)
    assert report.tensors.keys() == expected.keys()
    assert not any(one.unequal for one in report.tensors.values())
    safeload.convert(PATH, tmp_path / "f32.safetensors", dtype="float32")
    same(safeload.load(tmp_path / "f32.safetensors"), expected)
    safeload.convert(PATH, tmp_path / "same.gguf")
    with safeload.open(tmp_path / "same.gguf") as copied, safeload.open(PATH) as opened:
        assert all(copied[name] == opened[name] for name in TYPES)
    safeload.convert(PATH, tmp_path / "q8.gguf", quantize="q8_0", requantize=True)
    with safeload.open(tmp_path / "q8.gguf") as opened:
        for name in TYPES:
            assert opened[name] == safeload.quantize(expected[name], "q8_0", rounding="ggml")


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path):
    """Two rows of 128, and not one of 256."""
    path = tmp_path / "half.gguf"
    for scheme in TYPES.values():
        row = dtypes.BLOCK_TYPES[scheme]
        with pytest.raises(ValueError, match="256"):
            QuantizedTensor(scheme, (2, 128), np.zeros((2, row.block_bytes // 2), np.uint8))
        path.write_bytes(g.build((), [g.tensor("w", (128, 2), row.ggml, 0)], bytes(row.block_bytes)))
        with pytest.raises(safeload.FormatError, match=rf"'w': the rows of {row.code} \[2, 128\] are not a whole"):
            safeload.open(path)
