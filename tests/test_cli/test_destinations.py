"""Where ``safeload convert`` writes: folders, single shards, schemes by pattern, and files that stay."""

import json
import os

import numpy as np
import pytest
from builders.inside import main, registry

import safeload
from safeload.numpy import load_file, save_file

POSIX = pytest.mark.skipif(os.name == "nt", reason="not on Windows")
WEIGHTS = {
    f"model.layers.{k}.mlp.{n}_proj.weight": np.random.default_rng(k).normal(size=(4, 256)).astype("f4")
    for k in range(2)
    for n in ("up", "down")
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a conversion of ``s``, a folder; its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("s")
    save_file(WEIGHTS, "s/model.safetensors", durable=False)
    (tmp_path / "s" / "config.json").write_text('{"model_type": "other"}')

    def convert(*arguments):
        try:
            status = main(["convert", "s", *map(str, arguments)])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return convert


# ---- folders ----


@pytest.mark.parametrize("path", ["out", "out/", "a/b/out", "Qwen2.5-7B", "Llama-3.2-1B/", "v1.0/", "x.safetensors/"])
def test_a_path_without_suffix_or_with_a_slash_is_a_folder(run, path):
    status, out, err = run(path)
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: safetensors, 4 tensors, ")
    assert sorted(os.listdir(path)) == ["config.json", SINGLE]
    assert load_file(os.path.join(path, SINGLE)).keys() == WEIGHTS.keys()


@pytest.mark.parametrize("path", ["there", "there.gguf", "there.unknown", pytest.param("link.npz", marks=POSIX)])
def test_an_existing_folder_is_a_folder(run, path):
    os.mkdir("there" if path.startswith("link") else path)
    if path.startswith("link"):
        os.symlink("there", path)
    assert run(path)[::2] == (0, "")
    assert sorted(os.listdir(path)) == ["config.json", SINGLE]


def test_several_shards_have_an_index(run):
    assert run("out", "--max-shard-size", "5KB")[0] == 0
    assert INDEX in os.listdir("out")
    assert SINGLE not in os.listdir("out")
    assert run("out", "--overwrite")[0] == 0
    assert sorted(os.listdir("out")) == ["config.json", SINGLE]
    assert run("out", "--overwrite", "--max-shard-size", "5KB", "--resume")[0] == 0
    assert len(os.listdir("out")) == 6
    assert len(safeload.load("out")) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("x.unknown",),
            f"the suffix must be one of {', '.join(registry.SUFFIXES)}; for a folder, end the path",
        ),
        (("out/", "--format", "gguf"), "'out/' becomes a folder of safetensors shards, got --format gguf; pass a file"),
        (("x.npz", "--resume"), "--resume needs a folder as destination, got 'x.npz'"),
        (("x.safetensors", "--max-shard-size", "1GB"), "--max-shard-size writes a folder, but"),
    ],
)
def test_what_cannot_be_a_destination(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert os.listdir() == ["s"]


def test_another_format_needs_no_suffix(run):
    assert run("out", "--format", "gguf", "--raw")[0] == 0
    assert os.path.isfile("out")


# ---- schemes by pattern ----


def schemes(path):
    with safeload.open(path) as opened:
        return [getattr(opened[name], "scheme", None) for name in sorted(WEIGHTS)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["q8_0"], ["q8_0"] * 4),
        (["q4_k", "*.down_proj.*=q6_k"], ["q6_k", "q4_k"] * 2),
        (["*.down_proj.*=q6_k", "q4_k"], ["q6_k", "q4_k"] * 2),
        (["*.0.*=q8_0", "*.down_proj.*=q6_k"], ["q8_0", "q8_0", "q6_k", None]),
        (["*.down_proj.*=q6_k", "*.0.*=Q8_0"], ["q6_k", "q8_0", "q6_k", None]),
        (["*.0.*=none", "int8"], [None, None, "int8", "int8"]),
        (["model.layers.[0-1].mlp.up_proj.weight=q5_1"], [None, "q5_1"] * 2),
        (["*=q8_0"], ["q8_0"] * 4),
    ],
    ids=["one for all", "alone first", "alone last", "order", "other order", "none", "a class", "a star"],
)
def test_the_first_pattern_wins_and_a_scheme_alone_is_for_the_rest(run, options, expected):
    arguments = [text for option in options for text in ("--quantize", option)]
    assert run("q", *arguments)[0] == 0
    assert schemes("q") == expected
    by_pattern = [option.rpartition("=")[::2] for option in options if "=" in option]
    rest = [("*", option) for option in options if "=" not in option]
    scheme = {pattern: None if name == "none" else name for pattern, name in [*by_pattern, *rest]}
    safeload.convert("s", "python", quantize=scheme)
    assert (load_bytes("python"), schemes("python")) == (load_bytes("q"), expected)


def load_bytes(folder):
    with open(os.path.join(folder, SINGLE), "rb") as file:
        return file.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["*.donw_proj.*=q6_k"], "--quantize '*.donw_proj.*' matches none of 4 names; similar names: model.layers."),
        (["q4_k", "q6_k"], "--quantize has a scheme for all matrices twice"),
        (["q4_k", "*=q6_k"], "--quantize has a scheme for all matrices twice"),
        (["*.0.*=q4_k", "*.0.*=q6_k"], "--quantize has pattern '*.0.*' twice"),
        (["=q4_k"], "--quantize '=q4_k': expected SCHEME or PATTERN=SCHEME"),
        (["*.0.*="], "--quantize '*.0.*=': expected SCHEME or PATTERN=SCHEME"),
        ([""], "--quantize '': expected SCHEME or PATTERN=SCHEME"),
        (["*.0.*=q9"], "unknown scheme 'q9'"),
        (["q4_k_m"], "use 'q4_k' for all matrices, or --quantize PATTERN=SCHEME for each kind of matrix"),
    ],
    ids=["typo", "two", "two by star", "repeated", "no pattern", "no scheme", "empty", "unknown", "a mixture"],
)
def test_patterns_that_say_nothing(run, options, message):
    status, out, err = run("q", *(text for option in options for text in ("--quantize", option)))
    assert (status, out) == (2, "")
    assert message in err
    assert os.listdir() == ["s"]


def test_reasons_name_the_option(run):
    out = run("q", "--quantize", "*.0.*=none", "--quantize", "q8_0")[1]
    assert "2 kept: --quantize '*.0.*=none': model.layers.0." in out
    assert "2 kept: no pattern of --quantize matches: " in run("p", "--quantize", "*.0.*=q8_0")[1]


# ---- files that stay ----


def link(path):
    os.symlink("victim", path)


def hard(path):
    os.link("victim", path)


@pytest.mark.parametrize(
    "make", [os.mkdir, link, hard, getattr(os, "mkfifo", None)], ids=["folder", "link", "hard", "fifo"]
)
@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf", "x.npz", "x"])
@POSIX
def test_what_another_program_wrote_stays(run, name, make):
    with open("victim", "wb") as file:
        file.write(b"mine")
    make(name)
    if make is os.mkdir:
        with open(os.path.join(name, "notes.txt"), "wb") as file:
            file.write(b"mine")
    before = os.lstat(name)
    status, out, err = run(name)
    assert (status, out) == (1, "")
    assert (
        f"{name} already exists; pass --overwrite" in err or f"This is a file, but shards need a folder: {name}" in err
    )
    assert os.lstat(name)[:2] == before[:2]
    with open("victim", "rb") as file:
        assert file.read() == b"mine"


@pytest.mark.parametrize("path", ["s/model.safetensors", "s", "s/", "s/../s", "."])
def test_no_source_is_replaced_unasked(run, path):
    status, _, err = run(path)
    assert status == 1
    assert "already exists; pass --overwrite to replace it" in err
    assert load_file("s/model.safetensors").keys() == WEIGHTS.keys()


def test_a_folder_inside_the_source(run):
    assert run("s/inner")[0] == 0
    assert run("s/inner")[0] == 1
    assert len(safeload.load("s")) == len(safeload.load("s/inner")) == 4


def test_a_name_of_another_case_is_another_file_or_stays(run):
    save_file({"w": np.ones(2, np.float32)}, "OUT.safetensors", durable=False)
    run("out.safetensors")
    assert [*load_file("OUT.safetensors")] == ["w"]


@POSIX
def test_a_broken_link_is_no_folder(run):
    os.symlink("nowhere", "out")
    status, _, err = run("out")
    assert (status, err) == (1, "safeload: This is a file, but shards need a folder: out\n")
    assert not os.path.exists("nowhere")


def test_a_record_of_an_unfinished_conversion(run):
    """The command says how far it is, and what to pass; ``info`` too."""
    plan = safeload.plan_convert("s", "out", max_shard_size="5KB")
    for piece in plan.pieces[:3]:
        safeload.run_piece(piece)
    err = (
        "out holds an unfinished conversion: 3 of 4 shards are there; pass --resume to continue or --overwrite to "
        "start over"
    )
    assert run("out", "--max-shard-size", "5KB") == (1, "", f"safeload: {err}\n")
    with pytest.raises(safeload.FormatError, match="an unfinished conversion: 3 of 4 shards are there; repeat the"):
        safeload.open("out")
    status, out, _ = run("out", "--max-shard-size", "5KB", "--resume", "--json")
    assert (status, json.loads(out)["tensors"]) == (0, 4)
    assert len(os.listdir("out")) == 6
    assert "out already exists; pass --overwrite" in run("out", "--max-shard-size", "5KB")[2]
    assert "nothing to continue; pass --overwrite to replace it" in run("out", "--max-shard-size", "5KB", "--resume")[2]
