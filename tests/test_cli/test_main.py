"""The command line as a program: info, usage, help, streams that are closed or missing, other encodings."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
from builders import inside
from builders.inside import main
from builders.thorough import part_of
from builders.torch_build import Call, Ref, Storage, tensor, zip_file

import safeload
from safeload.numpy import save_file

TENSORS = {
    "model.embed.weight": np.zeros((1000, 64), np.float16),
    "model.norm.weight": np.ones(64, np.float32),
    "step": np.array(7, np.int64),  # numpy 1 on Windows would take int32
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    save_file(TENSORS, "model.safetensors", {"format": "np"}, durable=False)
    return tmp_path / "model.safetensors"


def run(capsys, *arguments):
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


GOOD = """\
model.safetensors: safetensors, 3 tensors, 64,065 parameters, 126 KiB
header: 256 B

metadata
  format: np

dtype  tensors  elements     size
F16          1    64,000  125 KiB
F32          1        64    256 B
I64          1         1      8 B
total        3    64,065  125 KiB

tensor              dtype  shape          size
step                I64    []              8 B
model.norm.weight   F32    [64]          256 B
model.embed.weight  F16    [1000, 64]  125 KiB
"""


def test_info_of_a_good_file(path, capsys):
    assert run(capsys, "info", "model.safetensors") == (0, GOOD, "")


def test_info_of_a_bad_file_is_one_clear_line(path, capsys):
    path.write_bytes(path.read_bytes()[:-1])
    status, out, err = run(capsys, "info", "model.safetensors")
    assert (status, out) == (1, "")
    assert err.startswith("safeload: tensor 'model.embed.weight': data_offsets [264, 128264) end past the data")
    assert err.endswith(")\n")
    assert err.count("\n") == 1


def test_info_of_a_missing_file(path, capsys):
    assert run(capsys, "info", "nothing") == (1, "", "safeload: No such file or directory: nothing\n")


def test_info_of_a_file_of_another_kind(path, capsys):
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    status, _, err = run(capsys, "info", "model.safetensors")
    assert status == 1
    assert "this is a Git LFS pointer: run `git lfs pull`" in err


@pytest.mark.parametrize("arguments", [[], ["info"], ["nonsense"], ["info", "--nonsense", "x"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "safeload" in capsys.readouterr().err


def test_info_as_json(path, capsys):
    status, out, _ = run(capsys, "info", "model.safetensors", "--json")
    assert status == 0
    value = json.loads(out)
    assert value["format"] == "safetensors"
    assert value["metadata"] == {"format": "np"}
    assert value["tensor_count"] == 3
    assert value["parameters"] == 64_065
    assert value["nbytes"] == 128_264
    assert value["files"] == [{"path": "model.safetensors", "nbytes": path.stat().st_size}]
    assert value["dtypes"]["F16"] == {"tensors": 1, "elements": 64_000, "nbytes": 128_000}
    assert value["tensors"][1] == {
        "name": "model.norm.weight",
        "dtype": "F32",
        "shape": [64],
        "nbytes": 256,
        "file": "model.safetensors",
        "offset": value["tensors"][0]["offset"] + 8,
        "parts": ["model.norm.weight"],
        "stored_nbytes": 256,
    }


def test_info_of_a_folder_lists_the_files(path, capsys):
    save_file({"more": np.zeros(3)}, path.parent / "model-2-of-2.safetensors", durable=False)
    path.rename(path.parent / "model-1-of-2.safetensors")
    status, out, _ = run(capsys, "info", path.parent)
    assert status == 0
    assert out.startswith(f"{path.parent.name}: 2 files, safetensors, 4 tensors, 64,068 parameters, ")
    assert "  model-1-of-2.safetensors  126 KiB\n  model-2-of-2.safetensors  " in out


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses such names")
def test_info_of_a_folder_says_what_was_passed_over(path, capsys):
    save_file({"more": np.zeros(3)}, path.parent / "oth\x1ber.safetensors", durable=False)
    status, out, _ = run(capsys, "info", path.parent)
    assert status == 0
    assert "skipped: oth\\x1ber.safetensors\n" in out


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("streams", "out", "error"), [(">&-", "", ""), ("2>&-", GOOD, ""), (">&- 2>&-", "", ""), ("<&- >&- 2>&-", "", "")]
)
def test_streams_that_are_not_there(streams, out, error, path):
    """In daemons, under pythonw, after >&-: no traceback, no message in the wrong place, the same status."""
    commands = [(["info", path], 0, out), (["info", "gone"], 1, ""), (["info"], 2, "")]
    for arguments, status, said in part_of(commands, len(streams) % 2, 2):
        line = " ".join(f'"{part}"' for part in (sys.executable, "-I", "-m", "safeload", *arguments))
        done = subprocess.run(f"{line} {streams}", shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (status, said if said == "" else done.stdout)
        assert (said == "") == (done.stdout == "")
        assert "Traceback" not in done.stderr
        if "2>" in streams:
            assert done.stderr == ""


@pytest.mark.parametrize("missing", ["None", "closed"])
def test_no_streams_at_all_in_process(missing, path, monkeypatch, tmp_path):
    for name in ("stdout", "stderr"):
        stream = None
        if missing == "closed":
            stream = io.StringIO()
            stream.close()
        monkeypatch.setattr(sys, name, stream)
    before = sys.stdout, sys.stderr
    for command in ("info", "check", "stats"):
        assert main([command, str(path)]) == 0
        assert main([command, str(tmp_path / "gone")]) == 1
    assert (sys.stdout, sys.stderr) == before
    monkeypatch.undo()


def test_names_and_metadata_are_escaped(tmp_path, capsys):
    save_file({"a\x1b[31m\n\u202eb": np.zeros(1)}, tmp_path / "x", {"k\x07": "v\x9b"}, durable=False)
    _, out, _ = run(capsys, "info", tmp_path / "x")
    assert "a\\x1b[31m\\n\\u202eb" in out
    assert "k\\x07: v\\x9b" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_an_empty_file_of_no_tensors(tmp_path, capsys):
    save_file({}, tmp_path / "x", durable=False)
    status, out, _ = run(capsys, "info", tmp_path / "x")
    assert (status, out.splitlines()) == (0, [f"{tmp_path / 'x'}: safetensors, 0 tensors, 16 B"])


def help_of(capsys, monkeypatch, *command):
    """The help of a command, or that of all, in lines that are not broken."""
    monkeypatch.setenv("COLUMNS", "10000")
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    return out


@pytest.mark.parametrize("command", ["info", "check", "stats", "convert", "diff", "report", "completion"])
def test_every_argument_is_explained(command, capsys, monkeypatch):
    """One line of plain words for each option and argument."""
    arguments = help_of(capsys, monkeypatch, command).partition(":\n  ")[2].partition("\n\nexamples:")[0]
    lines = iter(re.sub(r"\n {10,}", "   ", f"  {arguments}").splitlines())
    explained = dict(re.fullmatch(r"  (\S.*?)  +(\S.*)", line).groups() for line in lines if line[:1] == " ")
    assert len(explained) > 2
    for name, text in explained.items():
        assert not text.endswith(".") or text.endswith("...")
        for word in re.sub(r"\{.*?\}|--?[a-z0-9-]+|[\[\].,|]", " ", name).split():
            assert word.isupper(), name


# ---- start-up ----


def imported_by(*arguments):
    """The modules of a command's process, when it has printed its output."""
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr)); "
    code += "from safeload.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert done.stdout
    return done.stderr.split()


# Presses Ctrl-C when a process looks for its Nth module; 0 prints the names.
PRESSING = """
import os, runpy, signal, sys
class Finder:
    names, press = [], int(sys.argv.pop(1))
    def find_spec(name, path=None, target=None):
        Finder.names.append(name)
        if len(Finder.names) == Finder.press:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
try:
    runpy.run_module("safeload", run_name="__main__", alter_sys=True)
finally:
    if not Finder.press:
        print(*Finder.names, sep="\\n", file=sys.stderr)
"""


def pressed(number, *arguments, ignored=False):
    """Run a command with Ctrl-C at the Nth module; return status, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PRESSING, str(number), *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends a process of Windows at once")
def test_control_c_while_modules_are_imported_prints_no_traceback(path):
    names = pressed(0, "info", path)[2].split()
    assert {"argparse", "numpy", "datetime"} < set(names)  # NumPy makes an ImportError of an interrupt in datetime
    first = names.index("safeload.__main__") + 1
    ours = next(name for name in names if name.startswith(f"{CLI}."))
    for name in (names[first], "argparse", ours, "datetime", names[-1]):
        status, _, err = pressed(names.index(name) + 1, "info", path)
        assert (status in (130, -signal.SIGINT), err) == (True, ""), name
    status, out, err = pressed(names.index("datetime") + 1, "info", path, ignored=True)
    assert (status, out.count("tensor") > 0, err) == (0, True, "")


CLI = inside.path("main").rpartition(".")[0]


def modules_of_commands(modules):
    return {name for name in modules if name.startswith(f"{CLI}.")}


def ours(modules):
    return [name for name in modules if name.split(".")[0] == "safeload"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_version_and_help_import_no_numpy_and_no_command(arguments, path):
    modules = imported_by(*arguments)
    # argparse itself imports dataclasses from 3.14 on, to choose colours.
    code = "import argparse, sys; argparse.ArgumentParser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    late = {"numpy", "logging", "dataclasses", "json"}
    assert not late.difference(done.stdout.split()) & set(modules)
    assert not [name for name in ours(modules) if name.endswith("._core")]
    assert len(ours(modules)) <= 13
    two = [modules_of_commands(imported_by(command, path)) for command in ("info", "check")]
    assert modules_of_commands(modules) <= two[0] & two[1]  # what commands share
    assert two[0] != two[1]


def test_a_command_imports_only_what_it_runs(path):
    modules = imported_by("info", path)
    others = modules_of_commands(imported_by("check", path))
    assert len(modules_of_commands(modules)) == len(others) == 3  # the parsers, what commands share, and its own
    assert len(modules_of_commands(modules) - others) == 1
    assert len(ours(modules)) <= 121
    late = tuple(map(inside.path, ("families", "destinations", "executors", "torch_zip", "mixtures")))
    assert not [name for name in ours(modules) if name.startswith(late)]
    assert "ml_dtypes" not in modules
    # NumPy imports some of these on some platforms.
    code = "import numpy, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert not {"pathlib", "urllib.parse", "zipfile"} & set(modules).difference(done.stdout.split())


def test_every_command_parses(capsys, monkeypatch):
    top = help_of(capsys, monkeypatch)
    listed = {}
    for heading in ("look", "check", "change", "publish"):
        section = re.search(rf"^{heading}:\n((?:  .*\n)+)", top, re.MULTILINE)[1]
        listed |= dict(re.fullmatch(r"  (\S+) +(\S.*)", line).groups() for line in section.splitlines())
    assert len(listed) >= 14
    assert "completion" not in listed  # it has a help, but is for packagers
    for name in (*listed, "completion"):
        text = help_of(capsys, monkeypatch, name)
        assert help_of(capsys, monkeypatch, name) == text  # its arguments are added once
        assert text.startswith(f"usage: safeload {name} ")
        description, examples = text.split("\n\n")[1], text.partition("\n\nexamples:\n")[2]
        assert description[0].isupper()
        assert f"safeload {name} " in examples or f"safeload {name}\n" in examples
        assert "Exit status: 0 " in examples
    (offered,) = re.findall(r'offered="(info .*?)"', completion(capsys, "bash"))
    assert offered.split() == [*listed, "completion"]


def completion(capsys, shell):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


# ---- commands that are mistyped or left out ----


def wrong(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_a_path_alone_means_info(path, capsys):
    assert run(capsys, path.name) == (0, GOOD, "")
    for arguments in (["--json", path.name], [path.name, "--json"], ["--", path.name], [path.parent]):
        assert run(capsys, *arguments)[0] == 0
    (path.parent / "weights").mkdir()
    status, out, err = run(capsys, "weights")
    assert (status, out) == (1, "")
    assert err.startswith("safeload: weights: no weights here; found nothing; looked for ")
    for gone in ("gone.safetensors", "gone/", "~/gone"):
        status, out, err = run(capsys, gone)
        assert (status, out) == (1, "")
        assert err.startswith("safeload: No such file or directory: ")
    (path.parent / "check").write_bytes(path.read_bytes())
    assert wrong(capsys, "check")[0].startswith("safeload check: error: ")  # the name of a command stays one
    assert run(capsys, f".{os.sep}check")[0] == 0


def test_a_mistyped_command_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = "; see safeload --help"
    assert wrong(capsys, "chek", "x") == [f"safeload: error: unknown command 'chek', did you mean 'check'?{end}"]
    instead = "safeload: error: unknown command 'quantize', use: safeload convert SOURCE DESTINATION --quantize SCHEME"
    assert wrong(capsys, "quantize", "x") == [instead + end]
    assert wrong(capsys, "x\x1b")[0].startswith(
        r"safeload: error: unknown command 'x\x1b', expected one of info, get, stats, "
    )
    assert wrong(capsys)[0] == "usage: safeload [-h] [--version] [-v] COMMAND ..."
    assert "publish:" in wrong(capsys)
    assert wrong(capsys, "-v") == [f"safeload: error: which command?{end}"]


def test_a_mistyped_option_is_one_line(capsys):
    (line,) = wrong(capsys, "info", "x", "--tre=1", "y")
    assert line.startswith("safeload info: error: ")
    assert line.endswith("; see safeload info --help")
    end = "; see safeload stats --help"
    (line,) = wrong(capsys, "stats", "x", "--sotr")
    assert line.endswith(f"unrecognized arguments: --sotr, did you mean '--sort'?{end}")
    # An abbreviation could become ambiguous with the next new option.
    assert wrong(capsys, "stats", "x", "--sor")[0].endswith(f"--sor, did you mean '--sort'?{end}")
    # Dashes do not count as common letters, and options of other programs have a counterpart.
    assert wrong(capsys, "convert", "x", "y", "--outfile")[0].endswith(
        "unrecognized arguments: --outfile; see safeload convert --help"
    )
    for theirs, ours in {"--lora": "--adapter", "--outtype": "--dtype", "--max_shard_size": "--max-shard-size"}.items():
        assert f"{theirs}, did you mean {ours!r}?" in wrong(capsys, "convert", "x", "y", theirs)[0]
    assert "did you mean" not in wrong(capsys, "info", "x", "--lora")[0]
    assert wrong(capsys, "--verb", "info", "x")[0].startswith("safeload: error: ")
    end = "; see safeload get --help"
    assert wrong(capsys, "get", "x", "y", "z\x1b") == [rf"safeload get: error: unrecognized arguments: z\x1b{end}"]
    assert wrong(capsys, "--nonsense", "info")[0].startswith("safeload: error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "a"],
        ["convert", "a", "b", "--format", "zip"],
        ["convert", "a", "b", "--threads", "0"],
        ["convert", "a", "b", "--rename", "x"],
        ["check", "a", "--threads", "many"],
        ["info", "a", "--sort", "colour"],
        ["info", "a", "--limit", "-1"],
        ["diff", "a"],
        ["get"],
        ["edit", "--metadata", "k=v"],
        ["edit", "a", "--metadata", "=v"],
        ["convert", "a", "b", "--metadata", ""],
        ["patch", "a", "b"],
        ["report"],
        ["verify", "a", "--nonsense"],
        ["sign"],
        ["ls", "--json", "--what"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(arguments, capsys):
    (line,) = wrong(capsys, *arguments)
    assert line.endswith(f"; see safeload {arguments[0]} --help")


def test_wrong_usage_of_scan_is_one_line_with_its_own_status(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["scan", "--nonsense"])
    assert caught.value.code == 64
    assert capsys.readouterr().err.count("\n") == 1


def test_options_stand_anywhere(path, capsys):
    _, plain, _ = run(capsys, "info", path, "--all", "--limit", "2")
    for arguments in (
        ["--limit", "2", path, "--all"],
        ["--all", "--limit=2", path],
        ["--all", "--limit", "2", "--", path],
    ):
        assert run(capsys, "info", *arguments) == (0, plain, "")
    assert run(capsys, "info", path, "--all", path)[0] == 0


def test_verbose_prints_what_the_logger_gets(path, capsys):
    folder = path.parent
    for arguments in (["-v", "info", folder], ["info", folder, "--verbose"], ["-v", folder], [folder, "-v"]):
        status, _, err = run(capsys, *arguments)
        assert status == 0
        assert err == f"safeload: debug: opened {folder}: 1 file\n"
    assert run(capsys, "info", folder)[2] == ""
    path.rename(folder / "a.safetensors")
    save_file(TENSORS, folder / "model.safetensors", durable=False)
    assert "safeload: debug: validate " in run(capsys, "-v", "check", folder)[2]


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"safeload {safeload.__version__}\n"


def test_help_has_an_example(capsys):
    for arguments in (["--help"], ["info", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert "safeload info model.safetensors" in capsys.readouterr().out


SCRIPT = os.path.join(sysconfig.get_path("scripts"), "safeload" + sysconfig.get_config_var("EXE"))
installed = pytest.mark.skipif(
    os.name == "nt" and not os.path.exists(SCRIPT), reason="only pip makes scripts for Windows"
)


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-I", "-m", "safeload"], pytest.param([SCRIPT], marks=installed)],
    ids=["module", "script"],
)
def test_the_module_and_the_script_run_the_same(command, path):
    done = subprocess.run([*command, "info", path.name], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, GOOD, "")


def test_a_terminal_of_another_encoding_is_no_failure(path):
    save_file({"\N{SNOWMAN}" * 60: np.zeros(1)}, path, durable=False)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "safeload", "info", path.name]
    done = subprocess.run(command, capture_output=True, env=environment, cwd=path.parent)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2603" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="head")
def test_a_closed_pipe_ends_it_quietly(tmp_path):
    save_file({f"t{i}": np.zeros(1) for i in range(20_000)}, tmp_path / "x", durable=False)
    command = f'"{sys.executable}" -I -m safeload info --all "{tmp_path / "x"}" | head -n 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "20,000 tensors" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_info_of_a_torch_checkpoint(data, tmp_path, capsys):
    path = data / "torch" / "checkpoint.pt"
    status, out, _ = run(capsys, "info", path)
    assert status == 0
    assert "torch zip, 5 tensors" in out
    assert "epoch: 42" in out
    assert "  torch._utils._rebuild_tensor_v2\n" in out
    status, out, _ = run(capsys, "info", path, "--json", "--root", "model_state_dict")
    found = json.loads(out)
    assert found["format"] == "torch zip"
    assert found["globals"]["torch.FloatStorage"] is True
    assert found["metadata"] == {}
    assert json.loads(run(capsys, "info", path, "--json")[1])["metadata"] == {"epoch": 42, "loss": 0.123}
    assert next(iter(found["tensors"]))["name"] == "fc1.weight"
    status, _, err = run(capsys, "info", path, "--root", "nothing")
    assert status == 1
    assert "containers with tensors: model_state_dict" in err


def test_info_of_a_suspicious_file(tmp_path, capsys):
    evil = Call(Ref("os", "system"), "touch marker")
    value = {
        "w": tensor(Storage("0", np.zeros(2, np.float32))),
        "evil": evil,
        "odd": {(1, 2): {3}, b"k": b"\xff", 1: float("nan"), "t": (1, None)},
    }
    path = tmp_path / "evil.pt"
    path.write_bytes(zip_file(value, protocol=4))
    status, out, err = run(capsys, "info", path)
    assert (status, out) == (1, "")
    assert "not on the allowlist: os.system" in err
    status, out, _ = run(capsys, "info", path, "--unknown-globals", "inert")
    assert status == 0
    assert "  os.system  not on the allowlist, kept inert\n" in out
    _, out, _ = run(capsys, "info", path, "--unknown-globals", "inert", "--json")
    found = json.loads(out)
    assert found["globals"]["os.system"] is False
    assert found["metadata"]["odd"] == {"(1, 2)": [3], "b'k'": "ff", "1": "nan", "t": [1, None]}
    assert found["metadata"]["evil"] == {"<global>": "os.system", "<args>": ["touch marker"]}
