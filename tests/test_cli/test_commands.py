"""Golden tests: stdout, stderr and exit status of each command on a good, a bad and a missing file."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builders.commands import run
from builders.models import small, write_folder
from builders.paths import DATA
from builders.terminal import on_terminal
from builders.torch_build import Call, Ref, Storage, tensor, zip_file

import safeload
from safeload.numpy import load_file, save_file

COMMANDS = ("info", "check", "stats", "convert", "diff")

X = np.float32([[-0.5, 0.25], [1, 2]])
GOOD = {"a.weight": X, "b": np.ones(4, ml_dtypes.bfloat16), "step": np.array([3, 4], np.int64)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """good.safetensors, nan.safetensors (well-formed, with a NaN) and cut.safetensors (a byte short)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    save_file(GOOD, "good.safetensors", durable=False)
    bad = X.copy()
    bad[1, 0] = np.nan
    save_file({**GOOD, "a.weight": bad}, "nan.safetensors", durable=False)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-1])
    return tmp_path


CUT = (
    "tensor 'b': data_offsets [32, 40) end past the data, which has 39 bytes: 1 of 280 bytes are missing; "
    "the file is truncated, or its header belongs to another file (cut.safetensors, byte 118)"
)


@pytest.fixture
def cut(folder):
    """The message about cut.safetensors, with the numbers of this file."""
    with pytest.raises(safeload.FormatError) as caught:
        safeload.open("cut.safetensors")
    return str(caught.value)


MISSING = "safeload: No such file or directory: missing\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file(command, folder, capsys):
    more = ["out.npz"] if command == "convert" else ["good.safetensors"] if command == "diff" else []
    assert run(capsys, command, "missing", *more) == (1, "", MISSING)
    if command == "diff":
        assert run(capsys, command, "good.safetensors", "missing") == (1, "", MISSING)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "check"])
def test_a_bad_file(command, folder, capsys, cut):
    more = ["out.npz"] if command == "convert" else ["good.safetensors"] if command == "diff" else []
    assert run(capsys, command, "cut.safetensors", *more) == (1, "", f"safeload: {cut}\n")


# ---- check ----


CHECK_GOOD = """\
good.safetensors: safetensors, 3 tensors, 10 parameters, 40 B
no errors
checked: 3 names, 10 values, # s
"""

CHECK_NAN = """\
nan.safetensors: safetensors, 3 tensors, 10 parameters, 40 B
1 error

error    a.weight  value.nan
         1 of 4 values is NaN, the first at [1, 0]

checked: 3 names, 10 values, # s
"""


def check(capsys, *arguments):
    """What it prints, with # for the seconds it took."""
    status, out, err = run(capsys, "check", *arguments)
    return status, re.sub(r"(?m)^(checked: .*, )[0-9]+\.[0-9] s$", r"\1# s", out), err


def test_check(folder, capsys, cut):
    assert check(capsys, "good.safetensors") == (0, CHECK_GOOD, "")
    assert check(capsys, "nan.safetensors") == (1, CHECK_NAN, "")
    status, out, err = run(capsys, "check", "cut.safetensors")
    assert (status, err) == (1, "")
    assert out.startswith("cut.safetensors\n1 error\n\nerror    file  file.format\n         tensor 'b'")
    assert " ".join(out.split()).endswith(" ".join(cut.split()))
    assert all(len(line) <= 80 for line in out.splitlines())


def test_check_as_json(folder, capsys):
    status, out, _ = run(capsys, "check", "nan.safetensors", "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["errors"][0]["code"]) == (1, False, "value.nan")
    assert found["stats"]["a.weight"]["first_nan"] == [1, 0]
    status, out, _ = run(capsys, "check", "cut.safetensors", "--json")
    assert (status, json.loads(out)["errors"][0]["code"]) == (1, "file.format")


def test_check_of_the_structure(folder, capsys):
    status, out, _ = run(capsys, "check", "nan.safetensors", "--structure")
    assert status == 0
    assert out.splitlines()[1] == "no errors"
    assert "\nchecked: 3 names, no values, " in out


def test_check_with_options(folder, capsys):
    status, out, _ = run(capsys, "check", "good.safetensors", "--range", "-1", "1")
    assert status == 0
    assert "no errors, 1 warning" in out
    assert "outside [-1, 1]" in out
    assert run(capsys, "check", "good.safetensors", "--range", "-1", "1", "--strict")[0] == 1
    assert run(capsys, "check", "good.safetensors", "--parameters", "10")[0] == 0
    status, out, _ = run(capsys, "check", "good.safetensors", "--parameters", "11")
    assert status == 1
    assert "10 parameters, expected 11" in out
    for wrong in (["--schema", "lama"], ["--range", "2", "1"], ["--range", "x", "1"], ["--threads", "0"]):
        status, out, err = run(capsys, "check", "good.safetensors", *wrong)
        assert (status, out) == (2, "")
        assert "safeload" in err


def test_check_a_llama_folder(folder, capsys):
    config, tensors = small("llama-gqa")
    write_folder(folder, config, tensors)
    for name in ("good", "nan", "cut"):
        os.remove(f"{name}.safetensors")
    status, out, _ = check(capsys, ".")
    assert status == 0
    assert out == (
        ".: safetensors, 30 tensors, 123,328 parameters, 241 KiB, schema llama\nno errors\n"
        "checked: 30 names and shapes against schema llama, 123,328 values, # s\n"
    )
    config["num_key_value_heads"] = 4
    (folder / "other.json").write_text(json.dumps(config))
    status, out, _ = run(capsys, "check", ".", "--config", "other.json")
    assert status == 1
    assert "config.json says num_key_value_heads 4; all 6 tensors say 2" in out
    assert run(capsys, "check", ".", "--schema", "qwen2")[0] == 1
    assert "schema" not in run(capsys, "check", ".", "--schema", "none")[1]


def test_check_a_suspicious_file(folder, capsys):
    evil = Call(Ref("os", "system"), "touch marker")
    (folder / "evil.pt").write_bytes(zip_file({"w": tensor(Storage("0", np.float32([1, 2]))), "evil": evil}))
    status, out, _ = run(capsys, "check", "evil.pt")
    assert status == 1
    assert "file.forbidden" in out
    assert run(capsys, "check", "evil.pt", "--unknown-globals", "inert")[0] == 0
    assert not os.path.exists("marker")


# ---- manifests ----


def test_manifests(folder, capsys):
    status, out, err = run(capsys, "verify", "good.safetensors", "--write", "m.json")
    assert (status, out, err) == (0, "", "m.json: SHA-256 of 1 file and 3 tensors\n")
    manifest = json.loads((folder / "m.json").read_text())
    assert manifest["tensors"]["a.weight"]["dtype"] == "F32"
    assert run(capsys, "verify", "good.safetensors", "--against", "m.json")[0] == 0
    np.savez("good.npz", **{"a.weight": X, "step": GOOD["step"]})
    status, out, _ = run(capsys, "verify", "good.npz", "--against", "m.json", "--tensors", "--json")
    missing = [(check["status"], check["tensor"]) for check in json.loads(out)["tensors"] if check["status"] != "ok"]
    assert missing == [("missing", "b")]
    changed = {**GOOD, "b": np.ones(4, np.float32), "new": X}
    changed["step"] = np.array([3, 5])
    save_file(changed, "good.safetensors")
    status, out, _ = run(capsys, "verify", "good.safetensors", "--against", "m.json", "--tensors", "--json")
    assert status == 1
    assert {(check["status"], check["tensor"]) for check in json.loads(out)["tensors"]} == {
        ("ok", "a.weight"),
        ("changed", "b"),
        ("changed", "step"),
        ("not covered", "new"),
    }


def test_the_hash_is_that_of_the_bytes(folder, capsys):
    from hashlib import sha256

    tensors = {
        "big": np.arange(3_000_000, dtype=np.float32),
        "transposed": np.arange(12, dtype=np.int16).reshape(3, 4).T,
        "empty": np.zeros((0, 2)),
        "q": safeload.quantize(np.ones((2, 32), np.float32), "q4_0"),
        "i": safeload.quantize(np.ones((2, 32), np.float32), "int8", axis=0),
    }
    save_file(tensors, "x.safetensors")
    for threads in ("1", "3"):
        run(capsys, "verify", "x.safetensors", "--write", "m.json", "--threads", threads)
        found = json.loads((folder / "m.json").read_text())["tensors"]
        for name, x in tensors.items():
            if name == "q":
                data = x.data.tobytes()
            else:
                data = x.data.tobytes() + x.scale.tobytes() if name == "i" else np.ascontiguousarray(x).tobytes()
            assert found[name]["sha256"] == sha256(data).hexdigest(), name
            assert found[name]["shape"] == list(x.shape)


def test_a_strided_torch_tensor_has_the_hash_of_its_values(folder, capsys):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (folder / "x.pt").write_bytes(zip_file({"w": tensor(Storage("0", x.ravel()), (4, 3), (1, 4))}))
    save_file({"w": x.T}, "x.safetensors")
    run(capsys, "verify", "x.pt", "--write", "m.json")
    assert run(capsys, "verify", "x.safetensors", "--against", "m.json", "--tensors")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"safeload_manifest": 2, "tensors": {}}',
        '{"safeload_manifest": 1, "tensors": []}',
        '{"safeload_manifest": 1, "tensors": {"a": 1}}',
        '{"safeload_manifest": 1, "tensors": {"a": {"dtype": "F32", "shape": [], "sha256": "x"}}}',
    ],
)
def test_what_is_no_manifest(text, folder, capsys):
    (folder / "m.json").write_text(text)
    status, out, err = run(capsys, "verify", "good.safetensors", "--against", "m.json")
    assert (status, out) == (2, "")
    assert "m.json: " in err
    assert run(capsys, "verify", "good.safetensors", "--against", "missing")[0] == 2
    assert run(capsys, "verify", "good.safetensors", "--against", "m.json", "--write", "n.json")[0] == 2


# ---- stats ----

STATS = """\
tensor    min  max   mean    std  peak  outliers  bad
step        3    4    3.5    0.5     8
a.weight -0.5    2  0.688  0.925  2.16
b           1    1      1      0     -
"""


def squeezed(text):
    return [line.split() for line in text.splitlines()]


def test_stats(folder, capsys):
    status, out, err = run(capsys, "stats", "good.safetensors")
    assert (status, squeezed(out), err) == (0, squeezed(STATS), "")
    status, out, _ = run(capsys, "stats", "nan.safetensors", "--only", "a*")
    assert squeezed(out)[1] == ["a.weight", "-0.5", "2", "0.583", "1.05", "1.91", "1"]
    _, out, _ = run(capsys, "stats", "good.safetensors", "--sort", "max")
    assert [row[0] for row in squeezed(out)] == ["tensor", "step", "a.weight", "b"]
    _, out, _ = run(capsys, "stats", "good.safetensors", "--sort", "name")
    assert [row[0] for row in squeezed(out)] == ["tensor", "a.weight", "b", "step"]


def test_stats_of_no_tensor(folder, capsys):
    status, out, err = run(capsys, "stats", "good.safetensors", "--only", "x.*", "--only", "y")
    assert (status, out, err) == (2, "", "safeload: --only 'x.*' matches none of 3 names\n")


def test_stats_as_json(folder, capsys):
    status, out, _ = run(capsys, "stats", "nan.safetensors", "--json", "--histogram", "--only", "a.*")
    (found,) = json.loads(out)["tensors"]
    assert status == 0
    assert (found["name"], found["dtype"], found["shape"], found["nan"]) == ("a.weight", "F32", [2, 2], 1)
    assert sum(found["histogram"]) == 3
    assert json.loads(run(capsys, "stats", "nan.safetensors", "--json")[1])["tensors"][1]["histogram"] is None


def test_stats_with_histograms_and_on_a_wide_terminal(folder, capsys, monkeypatch):
    _, out, _ = run(capsys, "stats", "good.safetensors", "--histogram", "--only", "a.*")
    assert out.splitlines()[2].split()[0] == "2^-2"
    assert out.splitlines()[2].split()[-1] == "2^2"
    save_file({"zero": np.zeros(3)}, "zero.safetensors")
    assert "all values are zero" in run(capsys, "stats", "zero.safetensors", "--histogram")[1]
    monkeypatch.setenv("COLUMNS", "140")
    _, out, _ = run(capsys, "stats", "zero.safetensors")
    assert squeezed(out)[0] == [
        "tensor",
        "dtype",
        "shape",
        "min",
        "max",
        "absmax",
        "mean",
        "std",
        "peak",
        "outliers",
        "zeros",
        "NaN",
        "Inf",
    ]
    assert squeezed(out)[1] == ["zero", "F64", "[3]", "0", "0", "0", "0", "0", "-", "3"]


def test_stats_of_many_tensors(folder, capsys):
    save_file({f"t{i:03}": np.ones(1) for i in range(150)}, "x.safetensors")
    assert len(run(capsys, "stats", "x.safetensors")[1].splitlines()) == 151
    _, out, _ = run(capsys, "stats", "x.safetensors", "--limit", "3", "--sort", "name")
    assert [line.split()[0] for line in out.splitlines()] == ["tensor", "t000", "t001", "t002", "..."]
    assert out.endswith("... and 147 tensors more\n")


# ---- diff ----

DIFF = """\
a: good.safetensors
b: other.safetensors

only in b
  new

different dtype
  bfloat16 and float32: 1 tensor, b

different values  max    rms  relative    cosine  unequal
a.weight          0.5   0.25    RELATV  0.993399        1

different: 1 differs in value, 1 only in b, 1 differs in dtype; 3 tensors compared
"""


def test_diff(folder, capsys):
    status, out, err = run(capsys, "diff", "good.safetensors", "good.safetensors")
    assert (status, err) == (0, "")
    assert out == "a: good.safetensors\nb: good.safetensors\n\nthe same: 3 tensors\n"
    other = {**GOOD, "a.weight": X + np.float32([[0, 0], [0.5, 0]]), "b": np.ones(4, np.float32), "new": X}
    save_file(other, "other.safetensors")
    status, out, err = run(capsys, "diff", "good.safetensors", "other.safetensors")
    assert (status, err) == (1, "")
    cosine = float((X * other["a.weight"]).sum() / np.linalg.norm(X) / np.linalg.norm(other["a.weight"]))
    relative = f"{0.5 / float(np.linalg.norm(X)):.3g}"
    assert squeezed(out) == squeezed(DIFF.replace("0.993399", f"{cosine:.6f}").replace("RELATV", relative))
    del other["new"]
    save_file(other, "other.safetensors")
    status, out, _ = run(capsys, "diff", "good.safetensors", "nan.safetensors", "--json")
    assert status == 1
    assert json.loads(out)["tensors"]["a.weight"]["nonfinite"] == 1


def test_diff_of_some_tensors(folder, capsys):
    save_file({**GOOD, "a.weight": X + 1, "step": np.array([5, 6], np.int64), "new": X}, "other.safetensors")
    files = "good.safetensors", "other.safetensors"
    assert run(capsys, "diff", *files, "--only", "b")[0] == 0
    _, out, _ = run(capsys, "diff", *files, "--only", "[as]*", "--sort", "name", "--limit", "1")
    assert "a.weight" in out
    assert "step" not in out
    assert "only in b" not in out
    assert "... and 1 more" in out
    assert run(capsys, "diff", *files, "--only", "new")[0] == 1
    status, _, err = run(capsys, "diff", *files, "--only", "nothing*")
    assert (status, err) == (2, "safeload: --only 'nothing*' matches none of 4 names\n")


HALF = "3 tensors; 1 not equal, the largest difference is 0.5 (a.weight)"
FAR = "different: 1 differs by more than"


@pytest.mark.parametrize(
    ("change", "tolerance", "verdict"),
    [
        ({}, "0", "the same: 3 tensors"),
        ({}, "1e-3", "the same: 3 tensors"),
        ({"a.weight": X + np.float32(0.5)}, "0.5", f"within 0.5: {HALF}"),
        ({"a.weight": X + np.float32(0.5)}, "inf", f"within inf: {HALF}"),
        ({"a.weight": X + np.float32(0.5)}, "0.4", f"{FAR} 0.4; 3 tensors compared"),
        ({"a.weight": X * np.nan}, "inf", f"{FAR} inf; 3 tensors compared"),
        ({"b": np.ones(4, np.float64)}, "0", "within 0: 3 tensors with equal values; 1 differs in dtype"),
        ({"new": X}, "1", "different: 1 only in b; 3 tensors compared"),
        ({"a.weight": X[:1]}, "1", "different: 1 differs in shape; 2 tensors compared"),
    ],
)
def test_the_words_of_a_tolerance_agree_with_the_exit_status(folder, capsys, change, tolerance, verdict):
    save_file({**GOOD, **change}, "other.safetensors")
    arguments = "diff", "good.safetensors", "other.safetensors", "--tolerance", tolerance
    status, out, _ = run(capsys, *arguments)
    assert out.splitlines()[-1] == verdict
    assert status == verdict.startswith("different")
    again, out, _ = run(capsys, *arguments, "--json")
    assert again == status
    assert json.loads(out)["within"] == (status == 0)


@pytest.mark.parametrize("tolerance", ["-1", "nan", "x"])
def test_a_tolerance_is_a_number_of_at_least_0(folder, capsys, tolerance):
    status, _, err = run(capsys, "diff", "good.safetensors", "good.safetensors", f"--tolerance={tolerance}")
    fault = "invalid float value: 'x'" if tolerance == "x" else f"must be >= 0, got {tolerance}"
    assert (status, f"argument --tolerance: {fault};" in err) == (2, True)


# ---- convert ----


def test_convert(folder, capsys):
    status, out, err = run(capsys, "convert", "good.safetensors", "out.safetensors", "--dtype", "float32")
    assert (status, err) == (0, "")
    assert out.startswith("out.safetensors: safetensors, 3 tensors, ")
    assert load_file("out.safetensors")["b"].dtype == np.float32


def test_convert_takes_a_part_of_a_torch_checkpoint(data, folder, capsys):
    checkpoint = data / "torch" / "checkpoint.pt"
    status, _, err = run(capsys, "convert", checkpoint, "out.safetensors", "--root", "model_state_dict")
    assert (status, err) == (0, "")
    assert sorted(load_file("out.safetensors")) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    foreign = {"state_dict": {"w": tensor(Storage("0", np.ones(4, np.float32)), (4,))}, "by": Call(Ref("my", "Class"))}
    (folder / "foreign.pt").write_bytes(zip_file(foreign))
    assert run(capsys, "convert", "foreign.pt", "w.npz")[0] == 1
    status, _, err = run(capsys, "convert", "foreign.pt", "w.npz", "--unknown-globals", "inert", "--root", "state_dict")
    assert (status, err) == (0, "")
    assert list(safeload.load("w.npz")) == ["w"]


# ---- all of them ----


def test_resume_goes_on_where_a_conversion_stopped(folder, capsys):
    options = ("--max-shard-size", "10", "--dtype", "float16")
    plan = safeload.plan_convert("good.safetensors", "out", max_shard_size=10, dtype="float16")
    safeload.run_piece(plan.pieces[0])
    (waiting,) = Path("out").rglob(plan.pieces[0]["file"])
    before = waiting.stat().st_mtime_ns
    assert run(capsys, "convert", "good.safetensors", "out", *options)[2] == (
        "safeload: out holds an unfinished conversion: 1 of 3 shards are there; pass --resume to continue or "
        "--overwrite to start over\n"
    )
    status, _, err = run(capsys, "convert", "good.safetensors", "out", *options[:2], "--resume")
    assert status == 2
    assert err.endswith(
        "was written with dtype='float16', but this call has dtype=None; pass --overwrite to start over\n"
    )
    status, out, err = run(capsys, "convert", "good.safetensors", "out", *options, "--resume")
    assert (status, err) == (0, "")
    assert out.startswith("out: safetensors, 3 tensors, ")
    assert os.stat(os.path.join("out", plan.pieces[0]["file"])).st_mtime_ns == before


@pytest.mark.parametrize("option", [("--resume",), ("--dask", "tcp://127.0.0.1:1")], ids=["resume", "dask"])
def test_what_is_for_folders_is_refused_for_a_file(option, folder, capsys):
    status, out, err = run(capsys, "convert", "good.safetensors", "out.safetensors", *option)
    assert (status, out) == (2, "")
    assert err == f"safeload: {option[0]} needs a folder as destination, got 'out.safetensors'\n"


@pytest.mark.parametrize("command", ["check", "stats", "diff", "convert"])
def test_dask_that_is_not_installed_is_one_line(command, folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    more = {"diff": ["nan.safetensors"], "convert": ["out", "--max-shard-size", "1KB"]}.get(command, [])
    status, out, err = run(capsys, command, "good.safetensors", *more, "--dask", "tcp://127.0.0.1:8786")
    assert (status, out) == (1, "")
    assert err == "safeload: --dask needs Dask, which is not installed: pip install distributed\n"


@pytest.mark.parametrize("command", [*COMMANDS, "report", "completion"])
def test_help_has_an_example_and_fits(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"examples:\n  safeload {command} " in out
    assert "Exit status: 0" in out
    assert all(len(line) <= 80 for line in out.splitlines()), [line for line in out.splitlines() if len(line) > 80]


@pytest.mark.parametrize("command", ["info", "check", "stats", "diff"])
def test_names_are_escaped_and_whole_in_a_pipe_and_lines_fit_a_terminal(command, folder, capsys, monkeypatch):
    name = "evil\x1b[2J\n" + "very.long." * 20
    save_file({name: np.float32([np.nan, 500])}, "x.safetensors")
    save_file({name: np.float32([1, 2])}, "y.safetensors")
    arguments = command, "x.safetensors", *(["y.safetensors"] if command == "diff" else [])
    _, out, _ = run(capsys, *arguments)
    assert "\x1b" not in out
    assert r"evil\x1b[2J\n" + name[9:] in out
    monkeypatch.setenv("NO_COLOR", "1")
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        _, out, _ = run(capsys, *arguments)
        assert "\x1b" not in out
        assert r"evil\x1b[2J\n" in out or columns == 40
        if columns > 40 or command != "diff":
            assert all(len(line) <= columns for line in out.splitlines())


@pytest.mark.skipif(os.name == "nt", reason="no pseudoterminals")
def test_a_symbol_that_a_terminal_does_not_have_is_a_plain_one(folder):
    save_file({f"layer{k}.{'part.' * 20}weight": np.float32([k, 500]) for k in range(3)}, "x.safetensors")
    program = (sys.executable, "-m", "safeload", "stats", "x.safetensors", "--histogram")
    for encoding, ellipsis, bars in (("ascii", "~", "2^1 8      8 2^9"), ("utf-8", "…", "2^1 █      █ 2^9")):
        status, shown = on_terminal(program=program, PYTHONIOENCODING=encoding)
        assert status == 0
        assert bars in shown
        assert ellipsis in shown


@pytest.mark.skipif(os.name == "nt", reason="no pseudoterminals")
def test_colours_and_bars_on_a_terminal(folder):
    status, shown = on_terminal("check", "nan.safetensors", NO_COLOR=None)
    assert status == 1
    assert "\x1b[31;1merror  \x1b[0m  a.weight" in shown
    _, shown = on_terminal("check", "good.safetensors", NO_COLOR=None)
    assert "\x1b[32mno errors\x1b[0m" in shown
    _, shown = on_terminal("diff", "good.safetensors", "nan.safetensors")
    assert "diff: " in shown  # the bar
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb", "NO_COLOR": None}):
        _, shown = on_terminal("check", "nan.safetensors", **plain)
        assert "\x1b[31" not in shown


def test_the_plain_bar(folder, monkeypatch, capsys):
    from builders.inside import cli_common as common

    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with common.bar("work") as draw:
        draw(1, 4)
        draw(4, 4)
    shown = capsys.readouterr().err
    assert shown.startswith("\rwork:  25%\rwork: 100%\r")
    assert shown.endswith("\r")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with common.bar("work") as draw:
        assert draw is None


@pytest.mark.skipif(os.name == "nt", reason="head")
@pytest.mark.parametrize("command", ["check", "stats", "diff"])
def test_a_closed_pipe(command, folder):
    save_file({f"tensor.{i}": np.float32([np.nan, i]) for i in range(3000)}, "x.safetensors")
    save_file({f"tensor.{i}": np.float32([1, 2]) for i in range(3000)}, "y.safetensors")
    more = "y.safetensors --all" if command == "diff" else "--all" if command == "stats" else "--json"
    line = f'"{sys.executable}" -I -m safeload {command} x.safetensors {more} | head -n 1'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    # A faulty file must not pass, with pipefail, because nobody read why.
    process = subprocess.Popen([*line.replace('"', "").split(" |")[0].split()], stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE


def test_control_c(folder, capsys, monkeypatch):

    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(safeload.Checkpoint, "__enter__", interrupted)
    assert run(capsys, "check", "good.safetensors") == (130, "", "")


# ---- what a shell does ----


def test_two_dashes_end_the_options(folder, capsys):
    save_file(GOOD, "-x.safetensors")
    status, out, err = run(capsys, "info", "--", "-x.safetensors")
    assert (status, err) == (0, "")
    assert out.startswith("-x.safetensors: safetensors, 3 tensors")


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGTERM or SIGHUP")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_conversion_that_a_signal_ends_leaves_no_file(tmp_path, name):
    number = getattr(signal, name)
    with open(tmp_path / "big.safetensors", "wb") as file:
        size = 4 << 30
        header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    command = [sys.executable, "-m", "safeload", "convert", "big.safetensors", "half.safetensors", "--dtype", "float16"]
    # The tests themselves may run under nohup, which children inherit.
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None and len(os.listdir(tmp_path)) == 1:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert os.listdir(tmp_path) == ["big.safetensors"]


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGHUP")
def test_a_command_under_nohup_keeps_ignoring_a_closed_terminal():
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv[1:] = ['completion', 'bash']; "
        "from safeload.__main__ import main; main(); assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN; "
        "assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL"
    )
    subprocess.run([sys.executable, "-I", "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_a_shard_that_is_missing_is_called_that(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "convert", str(DATA / "silero_vad_16k.safetensors"), "m", "--max-shard-size", "500KB")[0] == 0
    shard = sorted(name for name in os.listdir("m") if name.endswith(".safetensors"))[1]
    os.unlink(f"m/{shard}")
    status, _, err = run(capsys, "info", "m")
    assert status == 1
    assert f"m{os.sep}{shard}; model.safetensors.index.json lists it: was the download finished?" in err
    with pytest.raises(FileNotFoundError) as caught:
        safeload.open("m")
    assert caught.value.filename == f"m{os.sep}{shard}"
    assert caught.value.__suppress_context__
