"""safeload info: layers in one row, the tree, what is selected, several paths, what else is said of a model."""

import json
import os
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from builders.commands import run
from builders.models import small, write_folder
from builders.quantized import FOLDER
from builders.terminal import on_terminal

import safeload
from safeload.numpy import save_file


def rows(out):
    """The cells of the listing, the last block."""
    return [line.split() for line in out.rstrip("\n").rpartition("\n\n")[2].splitlines()][1:]


def names(out):
    return [row[0] for row in rows(out)]


LAYERS = {f"model.layers.{k}.mlp.up_proj.weight": np.zeros((8, 4), ml_dtypes.bfloat16) for k in range(12)}
ODD = {"model.layers.1.mlp.up_proj.weight": np.zeros((8, 5), ml_dtypes.bfloat16)}
EXPERTS = {f"model.layers.{k}.experts.{j}.w": np.zeros(3, np.float32) for k in (3, 2) for j in range(4)}
OTHERS = {"model.embed.weight": np.zeros((100, 4), np.float16), "model.norm.weight": np.ones(4, np.float32)}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({**LAYERS, **ODD, **EXPERTS, **OTHERS}, "x.safetensors", durable=False)
    return "x.safetensors"


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal, as wide as it is told."""

    def make(columns):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return make


# ---- rows ----


def test_layers_that_are_alike_share_a_row(path, capsys):
    _, out, _ = run(capsys, "info", path)
    assert sorted(map(tuple, rows(out))) == [
        ("model.embed.weight", "F16", "[100,", "4]", "800", "B"),
        ("model.layers.1.mlp.up_proj.weight", "BF16", "[8,", "5]", "80", "B"),
        ("model.layers.{0,2..11}.mlp.up_proj.weight", "BF16", "[8,", "4]", "x", "11", "704", "B"),
        ("model.layers.{2..3}.experts.{0..3}.w", "F32", "[3]", "x", "8", "96", "B"),
        ("model.norm.weight", "F32", "[4]", "16", "B"),
    ]


def test_all_lists_every_tensor_in_natural_order(path, capsys):
    _, out, _ = run(capsys, "info", path, "--all")
    assert names(out) == [
        "model.embed.weight",
        *(f"model.layers.{k}.mlp.up_proj.weight" for k in range(2)),
        *(f"model.layers.2.{rest}" for rest in (*(f"experts.{j}.w" for j in range(4)), "mlp.up_proj.weight")),
        *(f"model.layers.3.{rest}" for rest in (*(f"experts.{j}.w" for j in range(4)), "mlp.up_proj.weight")),
        *(f"model.layers.{k}.mlp.up_proj.weight" for k in range(4, 12)),
        "model.norm.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("name", "model.embed.weight"),
        ("size", "model.embed.weight"),
        ("parameters", "model.embed.weight"),
        ("dtype", "model.layers.1.mlp.up_proj.weight"),
        ("shape", "model.embed.weight"),
    ],
)
def test_rows_are_sorted(key, first, path, capsys):
    _, out, _ = run(capsys, "info", path, "--sort", key, "--limit", "2")
    assert names(out)[0] == first
    assert len(rows(out)) == 3
    assert out.splitlines()[-1].endswith(" tensors more")
    _, out, _ = run(capsys, "info", path, "--sort", key, "--json")
    assert len(json.loads(out)["tensors"]) == 22


def test_only_selects_by_pattern(path, capsys):
    _, out, _ = run(capsys, "info", path, "--only", "*.layers.[23].*", "--only", "*norm*")
    assert "\nselected: 11 of 22 tensors, 92 parameters, 240 B\n" in out
    assert sorted(names(out)) == [
        "model.layers.{2..3}.experts.{0..3}.w",
        "model.layers.{2..3}.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    found = json.loads(run(capsys, "info", path, "--only", "*NORM*", "--only", "*norm*", "--json")[1] or "null")
    assert found is None  # case counts, and a pattern that matches nothing is an error
    found = json.loads(run(capsys, "info", path, "--only", "*norm*", "--json")[1])
    assert [tensor["name"] for tensor in found["tensors"]] == ["model.norm.weight"]
    assert found["selected"] == {"tensor_count": 1, "parameters": 4, "nbytes": 16}
    assert found["tensor_count"] == 22
    status, out, err = run(capsys, "info", path, "--only", "norm")
    assert (status, out, err) == (
        2,
        "",
        "safeload: --only 'norm' matches none of 22 names, because it must match whole names; '*norm*' matches 1\n",
    )


def test_the_tree_has_sums(path, capsys):
    _, out, _ = run(capsys, "info", path, "--tree", "--sort", "name")
    assert [(line.split()[0], line.split()[-3:]) for line in out.rpartition("\n\n")[2].splitlines()[1:4]] == [
        ("model", ["820", "1.66", "KiB"]),
        ("embed.weight", ["400", "800", "B"]),
        ("layers", ["416", "880", "B"]),
    ]
    assert "    {0,2..11}.mlp.up_proj.weight" in out
    assert "    {2..3}.experts.{0..3}.w" in out
    _, out, _ = run(capsys, "info", path, "--depth", "1")
    assert names(out) == ["model"]
    assert rows(out) == [["model", "820", "1.66", "KiB"]]
    assert names(run(capsys, "info", path, "--tree", "--depth", "2", "--sort", "size")[1]) == [
        "model", "layers", "embed.weight", "norm.weight"
    ]  # fmt: skip
    assert run(capsys, "info", path, "--tree", "--limit", "2")[1].endswith("... and 5 rows more\n")


def test_names_with_any_dots_make_a_tree(tmp_path, capsys):
    tensors = {
        name: np.zeros(1) for name in ("", ".", "a..b", "a.", ".a", "a", "a.b", "...", "x." * 500 + "y", "/", "0")
    }
    save_file(tensors, tmp_path / "x", durable=False)
    for more in (["--tree"], ["--depth", "1"], ["--tree", "--all", "--sort", "name"], []):
        status, out, err = run(capsys, "info", tmp_path / "x", *more)
        assert (status, err) == (0, "")
    assert len(rows(out)) >= 10


# ---- widths ----


def test_nothing_is_cut_in_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "model.layers.x." + "very_long_part." * 80 + "weight"
    save_file(
        {name: np.zeros((3, 4)), **{f"t{k:03}": np.zeros(1) for k in range(150)}}, tmp_path / "x", {"k": "v" * 3000}
    )
    _, out, _ = run(capsys, "info", tmp_path / "x")
    assert name in out
    assert "v" * 3000 in out
    assert "t149" in out
    assert max(len(line) for line in out.splitlines() if name not in line and "vvv" not in line) < 200


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_rows_fit_a_terminal_and_differ(columns, path, capsys, terminal):
    terminal(columns)
    for more in ([], ["--all"], *([["--tree"]] if columns > 40 else [])):
        _, out, _ = run(capsys, "info", path, *more)
        assert all(len(line) <= columns for line in out.splitlines())
    _, out, _ = run(capsys, "info", path)
    listed = [line for line in out.splitlines() if line.startswith("mode")]
    assert len(set(listed)) == 5


def test_a_terminal_shows_100_rows_unless_all_is_asked_for(tmp_path, capsys, terminal):
    save_file({f"t{k:03}": np.zeros(1) for k in range(150)}, tmp_path / "x", durable=False)
    terminal(80)
    _, out, _ = run(capsys, "info", tmp_path / "x")
    assert out.endswith("... and 50 tensors more; pass --all to list all\n")
    assert "t099" in out
    assert "t100" not in out
    assert "t149" in run(capsys, "info", tmp_path / "x", "--all")[1]
    assert len(rows(run(capsys, "info", tmp_path / "x", "--all", "--limit", "120")[1])) == 121


@pytest.mark.skipif(os.name == "nt", reason="no pseudoterminals")
def test_a_real_terminal_has_its_own_width_and_colours(path):
    _, shown = on_terminal("info", path, columns=60, NO_COLOR=None)
    assert "\x1b[1mtensor " in shown
    assert "…" in shown
    assert all(len(line) <= 60 for line in shown.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines())
    _, shown = on_terminal("info", path, columns=60, TERM="dumb")
    assert "\x1b" not in shown


# ---- several paths, JSON ----


def test_several_paths_are_a_block_each(path, tmp_path, capsys):
    save_file({"w": np.zeros(3)}, "y.safetensors", durable=False)
    (tmp_path / "bad.safetensors").write_bytes(b"\x08")
    status, out, err = run(capsys, "info", "bad.safetensors", path, "--limit", "1", "gone", "y.safetensors")
    assert status == 1
    assert [line.rpartition(", ")[0] for line in out.splitlines() if ": safetensors, " in line] == [
        "x.safetensors: safetensors, 22 tensors, 820 parameters",
        "y.safetensors: safetensors, 1 tensor, 3 parameters",
    ]
    assert err.splitlines()[-1] == "safeload: No such file or directory: gone"
    assert "bad.safetensors" in err.splitlines()[0]
    status, out, err = run(capsys, "info", "--json", path, "bad.safetensors", "y.safetensors")
    found = [json.loads(line) for line in out.splitlines()]
    assert [(one["path"], len(one["tensors"])) for one in found] == [(path, 22), ("y.safetensors", 1)]
    assert (status, err.count("\n")) == (1, 1)


def test_json_has_a_line_for_each_tensor(path, capsys):
    _, out, _ = run(capsys, "info", path, "--json")
    found = json.loads(out)
    lines = [line for line in out.splitlines() if line.startswith('  {"name": ')]
    assert [json.loads(line.rstrip(",")) for line in lines] == found["tensors"]
    assert found["memory"]["float32"] == 4 * found["parameters"]
    assert found["header_nbytes"] == min(tensor["offset"] for tensor in found["tensors"])
    save_file({}, "empty.safetensors", durable=False)
    found = json.loads(run(capsys, "info", "empty.safetensors", "--json")[1])
    assert (found["tensors"], found["parameters"]) == ([], 0)


def test_patterns_of_paths_are_expanded_where_the_shell_does_not(path, capsys, monkeypatch):
    from builders.inside import cli_common as common

    monkeypatch.setattr(common, "SHELL_EXPANDS", False)
    save_file({"w": np.zeros(3)}, "[y].safetensors", durable=False)
    _, out, _ = run(capsys, "*.safetensors", "gone.*", "--limit", "1")
    assert "[y].safetensors: safetensors, 1 tensor, " in out
    assert "x.safetensors: safetensors, 22 tensors, " in out
    assert run(capsys, "[y].safetensors")[1].startswith("[y].safetensors: ")  # it exists
    said = "No such file or directory: gone.*; patterns are not expanded, and no file matches this pattern"
    assert run(capsys, "gone.*") == (1, "", f"safeload: {said}\n")


# ---- what else is said ----


def test_a_folder_is_titled_by_its_name_and_described_by_its_config(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "Llama-0.1M"
    folder.mkdir()
    config, tensors = small("llama-gqa")
    write_folder(folder, {**config, "torch_dtype": "bfloat16"}, tensors)
    title = "Llama-0.1M: 2 files, safetensors, 30 tensors, 123,328 parameters, "
    for given in (folder, f"{folder}{os.sep}"):
        _, out, _ = run(capsys, "info", given)
        assert out.startswith(title)
    monkeypatch.chdir(folder)
    assert run(capsys, "info", ".")[1].startswith(title)
    assert "\nllama, 3 layers, hidden 64, vocabulary 96, bfloat16\n" in out
    assert "memory:" not in out
    lines = run(capsys, "info", folder, "--memory")[1].splitlines()
    memory = next(line for line in lines if line.startswith("memory: as float32 482 KiB, float16 241 KiB, "))
    assert f"q4_0 {safeload.load_quantized(folder, 'q4_0').summary.bytes_after / 1024:.3g} KiB" in memory


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": 7, "num_hidden_layers": "12", "hidden_size": [1], "vocab_size": None, "torch_dtype": {}},
        {"model_type": "\x1b[31mx\u202e" * 1000, "hidden_size": 10**4000, "num_hidden_layers": -1, "n_layer": True},
        {"text_config": ["x"], "architectures": 3},
        {},
    ],
    ids=["types", "sizes", "nested", "empty"],
)
def test_a_config_of_any_kind_is_no_failure(config, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors", durable=False)
    status, out, err = run(capsys, "info", tmp_path)
    assert (status, err) == (0, "")
    assert all(c.isprintable() or c == "\n" for c in out)
    assert all(len(line) < 300 for line in out.splitlines())


def test_a_multi_modal_config_is_that_of_its_language_model(tmp_path, capsys):
    config = {"model_type": "llava", "text_config": {"hidden_size": 64, "num_local_experts": 8, "dtype": "float16"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros(3)}, tmp_path / "model.safetensors", durable=False)
    assert "\nllava, 8 experts, hidden 64, float16\n" in run(capsys, "info", tmp_path)[1]


def test_a_gguf_file_is_described_by_its_metadata(tmp_path, capsys):
    metadata = {"general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 32}
    save = {"blk.0.attn_q.weight": np.zeros((32, 32), np.float32)}
    safeload.gguf.save_file(save, tmp_path / "x.gguf", metadata)
    assert "\nllama, 1 layer, hidden 32\n" in run(capsys, "info", tmp_path / "x.gguf")[1]


def test_packed_tensors_have_their_logical_shapes(capsys):
    _, out, _ = run(capsys, "info", FOLDER / "fp8_block")
    assert "quantized: fp8 128x128" in out
    _, stored, _ = run(capsys, "info", FOLDER / "fp8_block", "--stored", "--memory")
    assert "weight_scale_inv" in stored
    assert "memory:" not in stored
    assert "cannot dequantize" in stored


# ---- many tensors ----


def test_100_000_tensors_take_little_time(tmp_path, capsys):
    count = 100_000
    tensors = {f"model.layers.{k // 500}.mlp.experts.{k % 500}.w": np.zeros(2, np.float16) for k in range(count)}
    save_file(tensors, tmp_path / "x", durable=False)
    started = time.process_time()
    with safeload.open(tmp_path / "x") as opened:
        assert len(opened.tensors) == count
    opening = time.process_time() - started
    started = time.process_time()
    _, out, _ = run(capsys, "info", tmp_path / "x")
    assert time.process_time() - started < opening + 2
    assert names(out) == ["model.layers.{0..199}.mlp.experts.{0..499}.w"]
