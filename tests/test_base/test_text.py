"""Values in messages: escaped, short, never the content of a file."""

import json
import os
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
from builders.inside import main

import safeload
from safeload import safe_open
from safeload.numpy import load_file, save_file


def shown(value, folder):
    """A value as messages have it."""
    with pytest.raises(TypeError, match=r"^rename must be \(expression, replacement\) pairs") as caught:
        safeload.convert({"w": np.ones(1)}, folder / "x.npz", rename=[value])
    return str(caught.value).partition(", got ")[2]


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        b"x" * 10**6,
        "\x1b[31m" * 100,
        "\u202e\ud800",
        10**6000,
        -(10**300),
        list(range(10**5)),
        {str(k): "v" * 10**5 for k in range(100)},
        [["y" * 10**6] * 100] * 100,
        np.zeros(10**6),
        Rude(),
        Rude,
        np.dtype([(f"f{k}", "f4") for k in range(500)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_shown_value_is_short_and_printable(value, tmp_path):
    text = shown(value, tmp_path)
    assert 0 < len(text) <= 200
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("value", ["", "a", "it's", b"\0", 3, 2.5, None, True, [1, "a"], {"k": 1}, (1,)])
def test_a_short_value_is_shown_as_its_repr(value, tmp_path):
    assert shown(value, tmp_path) == repr(value)


CONTENTS = {
    "safetensors": lambda path: save_file({"secret": np.zeros(3)}, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"secret": list(range(3000))})),
    "text": lambda path: path.write_text("secret" * 10_000),
}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    "call", [safeload.open, safeload.load, load_file, safe_open, lambda path: safeload.open([path])]
)
def test_content_is_not_taken_for_a_path_nor_shown(call, content, kind, tmp_path):
    path = tmp_path / "x"
    CONTENTS[content](path)
    with pytest.raises(TypeError, match=r"safeload\.numpy\.load\(data\)") as caught:
        call(kind(path.read_bytes()))
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_short_path_may_be_bytes(tmp_path):
    save_file({"w": np.zeros(3)}, tmp_path / "x")
    assert set(safeload.open(os.fsencode(tmp_path / "x"))) == {"w"}


@pytest.mark.parametrize("call", [safeload.open, load_file, safe_open])
def test_a_very_long_path_is_not_shown_whole(call):
    for path in ("x" * 10**6, "x\0" * 10**6):
        with pytest.raises((OSError, ValueError)) as caught:
            call(path)
        assert len(str(caught.value)) < 500


LONG = "n" * 100_000


@pytest.mark.parametrize(
    "call",
    [
        lambda path: safeload.open(path, format=LONG),
        lambda path: safeload.open(path, unknown_globals=LONG),
        lambda path: safeload.load(path, dtype=LONG),
        lambda path: safeload.load(path, backend=LONG),
        lambda path: safeload.load(path, [LONG]),
        lambda path: safeload.load(path, out={LONG: np.zeros(3)}),
        lambda path: safeload.load(path, threads=10**4000, dtype="float16"),
        lambda path: safe_open(path, backend=LONG),
        lambda path: safe_open(path).get_tensor(LONG),
        lambda path: safe_open(path, LONG),
        lambda path: safe_open(path, device=LONG),
        lambda path: save_file({LONG: 3}, path),
        lambda path: save_file({"a": np.zeros(2)}, path, {LONG: "\ud800"}),
        lambda path: save_file({LONG + "\ud800": np.zeros(2)}, path),
        lambda path: safeload.open(path).get_slice(LONG),
    ],
)
def test_messages_clip_what_they_were_given(call, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros(3)}, path)
    with pytest.raises((ValueError, TypeError, safeload.SafeloadError)) as caught:
        call(path)
    assert len(str(caught.value)) < 1000 + len(str(path))


@pytest.mark.parametrize("setting", ["x" * 10_000, "9" * 10_000, "99999999999", "0", "-1", "1.5", "²"])
def test_a_setting_that_is_no_number_of_threads(setting, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros(3)}, path)
    monkeypatch.setenv("SAFELOAD_NUM_THREADS", setting)
    with pytest.raises(ValueError, match="SAFELOAD_NUM_THREADS must be a number from 1 to 4,096, got '") as caught:
        safeload.load(path, dtype="float16")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "threads", [0, -1, 4097, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**5000], ids=lambda n: f"{n:#x}"[:20]
)
def test_a_number_of_threads_has_bounds(threads, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros(3)}, path)
    for call in (
        lambda: safeload.load(path, dtype="float16", threads=threads),
        lambda: safeload.load(path, threads=threads),
        lambda: safeload.convert(path, tmp_path / "y.npz", threads=threads),
        lambda: safeload.astype(np.zeros(3), "float16", threads=threads),
        lambda: safeload.stats(path, threads=threads),
        lambda: safeload.diff(path, path, threads=threads),
        lambda: safeload.check(path, threads=threads),
        lambda: safeload.load_quantized(path, threads=threads),
    ):
        with pytest.raises(ValueError, match=r"threads must be [<>]= [\d,]+, got"):
            call()


def test_many_threads_work(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": np.arange(300_000, dtype=np.float32)}, path)
    assert safeload.load(path, dtype="float64", threads=4096)["w"][-1] == 299_999


LONG = "n" * 100_000


@pytest.mark.parametrize(
    "call",
    [
        lambda path, out: safeload.load_quantized(path, LONG),
        lambda path, out: safeload.load_quantized(path, {LONG: "no scheme"}),
        lambda path, out: safeload.quantize(np.zeros((32, 32), np.float32), LONG),
        lambda path, out: safeload.convert(path, out / "x.npz", names=[LONG]),
        lambda path, out: safeload.convert(path, out / "x", max_shard_size=LONG),
        lambda path, out: safeload.convert(path, out / LONG),
        lambda path, out: safeload.convert([{LONG: np.zeros(2)}, {LONG: np.zeros(2)}], out / "x.npz"),
        lambda path, out: safeload.convert({LONG: np.zeros(2, ml_dtypes.bfloat16)}, out / "x.npz"),
        lambda path, out: safeload.convert({LONG: np.zeros(2)}, out / "x.moon"),
        lambda path, out: safeload.convert({LONG: np.zeros(2, np.complex64)}, out / "x.gguf"),
        lambda path, out: safeload.stack(path, safeload.Layout(LONG, [safeload.StackedTensor(LONG, LONG)])),
        lambda path, out: safeload.stack(path, safeload.Layout(LONG, [safeload.StackedTensor("a", LONG + "{}")])),
        lambda path, out: safeload.check(path, schema=LONG),
        lambda path, out: safeload.check(path, limits={LONG: 1}),
        lambda path, out: safeload.stats({LONG: np.ma.array([1.0], mask=[True])}),
        lambda path, out: safeload.stats({LONG: np.zeros(2, ml_dtypes.float8_e4m3fn), LONG + "_scale": 1.0}),
        lambda path, out: safeload.open(path, root=LONG),
        lambda path, out: safeload.open([path, LONG]),
    ],
)
def test_no_message_holds_a_long_value(call, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros((2, 2), np.float32)}, path)
    with pytest.raises((safeload.SafeloadError, ValueError, TypeError, OSError, KeyError)) as caught:
        call(path, tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.fixture
def shorten(monkeypatch):
    """Gives the names of a narrow table: each has its line."""
    monkeypatch.setenv("COLUMNS", "80")

    def shortened(names, columns):
        _, *lines = safeload.stats(dict.fromkeys(names, WIDE)).lines(columns)
        return [line.split("\n")[0] if "\n" in line else line.split("  ")[0] for line in lines]

    return shortened


WIDE = np.array([-1.23e-05, -9.87e10, 2.22e-07])  # its numbers take much of a line


def test_shortened_names_keep_what_tells_them_apart(shorten):
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    names = [*(f"model.layers.{{0..31}}.{kind}.weight" for kind in kinds), "model.norm.weight"]
    for columns in range(22, 50):
        shown = shorten(names, columns)
        assert all(len(name) <= columns for name in shown)
        assert max(map(len, shown)) == min(columns, max(map(len, names)))
        assert len(set(shown)) == len(names)
        assert all(kind.partition(".")[2] in name for kind, name in zip(kinds, shown, strict=False))
    assert shorten(names, None) == shorten(names, 100) == names


@pytest.mark.parametrize("columns", [1, 2, 6, 20])
def test_names_of_any_kind_fit(columns, shorten):
    names = ["", "a" * 100, "." * 100, "a." * 100_000, "{0..31}." * 9, "x.weight", "x.bias"]
    assert [len(name) <= columns for name in shorten(names, columns)] == [True] * len(names)


def test_a_table_without_a_width_is_not_cut(tmp_path, capsys):
    shape, path = [1] * 60, tmp_path / "x.safetensors"
    header = {"n" * 500: {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}
    header["m"] = {"dtype": "I8", "shape": shape, "data_offsets": [3, 4]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert main(["info", str(path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split() for line in lines] == [
        ["n" * 500, "I8", "[3]", "3", "B"],
        ["m", "I8", *str(shape).split(), "1", "B"],
    ]
    assert len(head) < 250
    assert len(lines[1]) < 500


def test_a_narrow_table_gives_names_a_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tensors = {f"model.layers.{k}.self_attn.q_proj.weight": np.array([1, 3], np.float32) for k in range(3)}
    lines = safeload.stats(tensors).lines(40)
    assert lines[0] == "tensor\n  min  max  mean  std  bad"
    assert [line.splitlines()[1] for line in lines[1:]] == ["    1    3     2    1"] * 3
    assert len({line.splitlines()[0] for line in lines[1:]}) == 3
    assert all(len(part) <= 40 for line in lines for part in line.splitlines())
    assert safeload.stats({}).lines(40) == ["tensor  min  max  mean  std  bad"]
    monkeypatch.setenv("COLUMNS", "200")  # with the shapes
    _, line = safeload.stats({"w": np.ones((1,) * 32, np.float32)}).lines(60)
    (shape,) = re.findall(r"\[1.*?(?=  )", line)
    assert len(shape) == 30


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 values"),
        (1, "1 value"),
        (999_999, "999,999 values"),
        (1_000_000, "1 M values"),
        (42_123_456, "42.1 M values"),
        (999_999_999, "1,000 M values"),
        (1_235_814_400, "1.24 B values"),
        (671_026_419_200, "671 B values"),
        (1_040_000_000_000, "1.04 T values"),
        (10**20, "100,000,000 T values"),
    ],
)
def test_quantities(count, text):
    report = safeload.check({"w": np.ones(2, np.float32)}, values=True)
    assert report.checked == "1 name, 2 values"
    report.stats["w"] = report.stats["w"]._replace(count=count)
    assert report.checked == f"1 name, {text}"
