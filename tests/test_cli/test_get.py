"""``safeload get``: the values of a tensor, in text and JSON."""

import json
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main
from builders.quantized import each_kind
from builders.random import rng

import safeload
from safeload.numpy import save_file

TENSORS = {
    "matrix": rng.standard_normal((40, 33)).astype(np.float32),
    "bf16": rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16),
    "fp8": rng.standard_normal(9).astype(ml_dtypes.float8_e4m3fn),
    "half": np.array([1.0, np.nan, -np.inf, 65504, 6e-8], np.float16),
    "double": np.array([[1 / 3, 1e300]]),
    "scalar": np.array(1.5, np.float32),
    "empty": np.zeros((0, 4), np.int8),
    "hollow": np.zeros((3, 0), np.int8),
    "wide": np.array([2**63 - 1, -(2**63)], np.int64),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j, -1j], np.complex64),
    "deep": np.arange(2 * 3 * 2 * 2, dtype=np.int16).reshape(2, 3, 2, 2),
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", durable=False)
    return tmp_path / "x.safetensors"


def run(capsys, *arguments):
    status = main(["get", *map(str, arguments)])
    return status, *capsys.readouterr()


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal."""

    def make():
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")

    return make


def parsed(text, dtype):
    """Return the printed values; every decimal is exact in the dtype."""
    return np.array([np.dtype(dtype).type(word) for word in text.split()])


@pytest.mark.parametrize("name", ["matrix", "bf16", "fp8", "half", "double", "scalar", "empty", "hollow", "wide"])
def test_a_pipe_gets_every_value_exactly(name, path, capsys):
    status, out, err = run(capsys, path, name)
    tensor = TENSORS[name]
    assert (status, err) == (0, "")
    np.testing.assert_array_equal(parsed(out, tensor.dtype), tensor.reshape(-1))
    if name == "matrix":
        assert len(out.splitlines()) == 40
    elif tensor.ndim == 1:
        assert len(out.splitlines()) == tensor.size


def test_other_dtypes_are_printed_as_numpy_prints_them(path, capsys):
    assert run(capsys, path, "bool")[1] == "True\nFalse\n"
    assert run(capsys, path, "complex")[1] == "(1+2j)\n(-0-1j)\n"


def test_an_empty_line_separates_matrices(path, capsys):
    out = run(capsys, path, "deep")[1]
    matrices = out.split("\n\n")
    assert len(matrices) == 6
    assert matrices[4] == "16 17\n18 19"


@pytest.mark.parametrize(
    ("rows", "want"),
    [("3", slice(3, 4)), ("-1", slice(39, 40)), ("38:", slice(38, 40)), (":2", slice(0, 2)), ("-2:-1", slice(38, 39))],
)
def test_rows(rows, want, path, capsys):
    _, out, _ = run(capsys, path, "matrix", f"--rows={rows}")
    np.testing.assert_array_equal(parsed(out, np.float32), TENSORS["matrix"][want].reshape(-1))
    found = json.loads(run(capsys, path, "matrix", f"--rows={rows}", "--json")[1])
    assert found["rows"] == [want.start, want.stop]
    assert found["shape"] == [want.stop - want.start, 33]
    assert np.float32(found["values"]).tobytes() == TENSORS["matrix"][want].tobytes()


def test_rows_outside_the_tensor(path, capsys):
    assert run(capsys, path, "matrix", "--rows", "50:60") == (0, "", "")
    assert run(capsys, path, "matrix", "--rows", "9:3") == (0, "", "")
    for row in ("40", "-41"):
        status, _, err = run(capsys, path, "matrix", f"--rows={row}")
        assert (status, err) == (2, f"safeload: --rows {row}: 'matrix' has 40 rows\n")
    assert run(capsys, path, "scalar", "--rows", "0")[2] == "safeload: --rows: 'scalar' is a scalar\n"


@pytest.mark.parametrize("rows", ["", ":x", "1:2:3", "1.5", "\x1b"])
def test_rows_that_are_none(rows, path, capsys):
    with pytest.raises(SystemExit):
        run(capsys, path, "matrix", f"--rows={rows}")
    assert "expected A:B or A, such as 0:10, got" in capsys.readouterr().err


def test_a_name_that_is_not_there(path, capsys):
    status, _, err = run(capsys, path, "matrx")
    assert status == 1
    assert "similar names: matrix" in err


@pytest.mark.parametrize("name", TENSORS)
def test_json(name, path, capsys):
    _, out, _ = run(capsys, path, name, "--json")
    found, tensor = json.loads(out), TENSORS[name]
    assert found["shape"] == list(tensor.shape)
    if name == "half":
        assert found["values"][:3] == [1.0, "nan", "-inf"]
    elif name == "complex":
        assert found["values"] == [[1.0, 2.0], [-0.0, -1.0]]
    else:
        np.testing.assert_array_equal(np.array(found["values"], tensor.dtype).reshape(tensor.shape), tensor)


@each_kind()
def test_rows_of_a_quantized_checkpoint_are_its_true_weights(fixture, capsys):
    with safeload.open(fixture.path) as opened:
        info = next(info for info in opened.tensors.values() if info.ndim > 1)
        want = opened.load([info.name], dtype="float32")[info.name][1:3]
    _, out, _ = run(capsys, fixture.path, info.name, "--rows", "1:3")
    np.testing.assert_array_equal(parsed(out, np.float32), want.reshape(-1))


def test_dtype_and_stored(path, capsys, data):
    _, out, _ = run(capsys, path, "matrix", "--dtype", "float16", "--rows", "0")
    np.testing.assert_array_equal(parsed(out, np.float16), TENSORS["matrix"][0].astype(np.float16))
    folder = data / "quantized" / "fp8_block"
    with safeload.open(folder, stored=True) as opened:
        scale = next(name for name in opened if name.endswith("weight_scale_inv"))
        want = opened[scale]
    _, out, _ = run(capsys, folder, scale, "--stored")
    np.testing.assert_array_equal(parsed(out, want.dtype), np.asarray(want).reshape(-1))


def test_elements_below_a_byte_are_values(tmp_path, capsys):
    text = json.dumps({"x": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes([0x21, 0x43, 0x65, 0x87]))
    _, out, _ = run(capsys, tmp_path / "x.safetensors", "x", "--rows", "1")
    assert out == "3.0 4.0 6.0 -0.0\n"


def test_a_terminal_abbreviates_long_tensors(path, capsys, terminal):
    terminal()
    _, out, _ = run(capsys, path, "matrix")
    title, *lines = out.splitlines()
    assert title == "matrix: F32 [40, 33]"
    assert lines == str(TENSORS["matrix"]).splitlines()
    assert "..." in out
    _, out, _ = run(capsys, path, "matrix", "--rows", "0:2")
    assert out == f"matrix: F32 [40, 33], rows 0:2\n{np.array2string(TENSORS['matrix'][:2], max_line_width=80)}\n"
    assert len(run(capsys, path, "matrix", "--all")[1].splitlines()) == 41
    assert run(capsys, path, "scalar")[1] == "scalar: F32 []\n1.5\n"
    assert run(capsys, path, "empty")[1] == "empty: I8 [0, 4]\n[]\n"


def test_a_terminal_reads_only_the_shown_rows(tmp_path, capsys, terminal, monkeypatch):
    terminal()
    save_file({"x": np.zeros((1000, 100), np.float32)}, tmp_path / "x.safetensors", durable=False)
    read = []
    get_slice = safeload.Checkpoint.get_slice

    def counting(self, name, **options):
        tensor = get_slice(self, name, **options)

        class Counted:
            shape, dtype = tensor.shape, tensor.dtype

            def __getitem__(self, index):
                read.append(index)
                return tensor[index]

        return Counted()

    monkeypatch.setattr(safeload.Checkpoint, "get_slice", counting)
    assert run(capsys, tmp_path / "x.safetensors", "x")[0] == 0
    assert read == [slice(0, 4), slice(997, 1000)]
