"""``-`` on the command line: stdin as a source, stdout as a destination."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from builders.inside import main
from builders.terminal import on_terminal
from builders.thorough import part_of

import safeload
from safeload.numpy import save_file

WEIGHTS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.float32)}
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no such streams")


class Stream(io.TextIOWrapper):
    """A standard stream of bytes, which a pipe cannot seek."""

    def __init__(self, data=b"", *, pipe=True, terminal=False):
        class Bytes(io.BytesIO):
            name = "<stdin>"

            def seekable(self):
                return not pipe

        super().__init__(Bytes(data), encoding="utf-8")
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command with m.safetensors on stdin; its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "m.safetensors", durable=False)

    def run(*arguments, data=None, **stream):
        stdin = Stream((tmp_path / "m.safetensors").read_bytes() if data is None else data, **stream)
        monkeypatch.setattr("sys.stdin", stdin)
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("pipe", [True, False])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-"], "<stdin>: safetensors, 2 tensors"),
        (["info", "-"], "<stdin>: safetensors, 2 tensors"),
        (["info", "--json", "-"], '"path": "<stdin>"'),
        (["info", "m.safetensors", "-"], "\n<stdin>: safetensors, 2 tensors"),
        (["get", "-", "b"], "1.0\n1.0\n1.0\n"),
        (["check", "-"], "<stdin>: safetensors, 2 tensors"),
        (["stats", "-", "--json"], '"path": "<stdin>"'),
        (["diff", "m.safetensors", "-"], "the same: 2 tensors"),
        (["scan", "-"], "harmless: 0 pickles in 1 file"),
        (["report", "-", "-o", "-"], "&lt;stdin&gt;"),
    ],
)
def test_a_source_is_stdin(run, arguments, text, pipe):
    status, out, _ = run(*arguments, pipe=pipe)
    assert (status, text in out) == (0, True)
    assert os.listdir() == ["m.safetensors"]


@POSIX
@pytest.mark.parametrize("device", ["/dev/stdin", "/dev/fd/0"])
def test_the_device_of_stdin_is_stdin_in_a_pipe_and_a_path_for_a_file(tmp_path, device):
    save_file(WEIGHTS, tmp_path / "m.safetensors", durable=False)

    def run(*arguments, **streams):
        done = subprocess.run([sys.executable, "-I", "-m", "safeload", *arguments], capture_output=True, **streams)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    data = (tmp_path / "m.safetensors").read_bytes()
    parity = device == "/dev/stdin"
    for command in part_of([[device], ["info", device], ["report", device, "-o", "-"]], parity, 2):
        status, out, _ = run(*command, input=data)
        assert (status, "safetensors" in out) == (0, True), command
    assert run("check", device, input=data)[1].startswith("<stdin>: safetensors, 2 tensors")
    with open(tmp_path / "m.safetensors", "rb") as file:
        assert run("info", device, stdin=file)[1].startswith(f"{device}: safetensors, 2 tensors")
    for pair in part_of([["-", device], [device, "-"]], parity, 2):
        assert "- is repeated" in run("diff", *pair, input=data)[2]
    status, _, err = run("verify", device, input=data)
    assert (status, f"verify compares files, not {device} for a stream" in err) == (2, True)


@pytest.mark.parametrize("pipe", [True, False])
def test_a_command_that_reads_twice_copies_a_pipe(run, pipe, tmp_path):
    assert run("check", "-", "--source", "m.safetensors", pipe=pipe)[0] == 0
    save_file({**WEIGHTS, "b": np.zeros(3, np.float32)}, "changed.safetensors", durable=False)
    changed = (tmp_path / "changed.safetensors").read_bytes()
    status, out, _ = run("check", "-", "--source", "m.safetensors", pipe=pipe, data=changed)
    assert (status, "source.changed" in out) == (1, True)


@pytest.mark.parametrize("pipe", [True, False])
def test_stdin_is_converted(run, pipe):
    status, out, err = run("convert", "-", "out.npz", pipe=pipe)
    assert (status, out.partition(":")[0], err) == (0, "out.npz", "")
    assert safeload.load("out.npz").keys() == WEIGHTS.keys()


@pytest.mark.parametrize(("options", "format"), [([], "safetensors"), (["--format", "npz"], "npz")])
def test_a_destination_is_stdout(run, monkeypatch, options, format):
    stdout = Stream()
    monkeypatch.setattr("sys.stdout", stdout)
    status, _, err = run("convert", "m.safetensors", "-", *options)
    assert (status, err.startswith(f"stdout: {format}, 2 tensors")) == (0, True)
    with safeload.open(io.BytesIO(stdout.buffer.getvalue())) as opened:
        assert opened.format == format
        assert all(np.array_equal(opened[name], value) for name, value in WEIGHTS.items())
    assert os.listdir() == ["m.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "m.safetensors", "-", "--json"], "- and --json both write to stdout; pass only one of them"),
        (["convert", "m.safetensors", "-", "--resume"], "--resume needs a folder as destination, got '-'"),
        (["convert", "m.safetensors", "-", "--max-shard-size", "1GB"], "--max-shard-size needs a folder"),
        (["convert", "-", "-", "out.npz"], "- is repeated, but stdin can be read only once"),
        (["diff", "-", "-"], "- is repeated, but stdin can be read only once"),
        (["info", "-", "-"], "- is repeated, but stdin can be read only once"),
        (["verify", "m.safetensors", "--write", "-"], "--write needs a file, not - for a stream"),
        (["edit", "-", "--drop", "b"], "edit changes files, not - for a stream"),
        (["edit", "-", "--recover"], "edit changes files, not - for a stream"),
        (["patch", "make", "m.safetensors", "m.safetensors", "-"], "patch reads and writes files, not - for a stream"),
        (["patch", "apply", "-", "m.safetensors"], "patch reads and writes files, not - for a stream"),
        (["sign", "-", "--key", "k.pem"], "sign signs files, not - for a stream"),
        (["sign", "m.safetensors", "--key", "k.pem", "-o", "-"], "--output needs a file, not - for a stream"),
        (["extract", "m.safetensors", "m.safetensors", "-o", "-"], "--output needs a folder, not - for a stream"),
        (["convert", "m.safetensors", "-", "--base", "m.safetensors"], "--base writes an adapter, which cannot go to"),
        (["verify", "-"], "verify compares files, not - for a stream"),
    ],
)
def test_other_streams_are_refused_and_no_file_is_created(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert os.listdir() == ["m.safetensors"]


@pytest.mark.parametrize("arguments", [["report", "-"], ["check", "-", "--source", "m.safetensors"], ["info", "-"]])
def test_a_pipe_with_another_format_is_not_read_to_its_end(run, arguments, monkeypatch):
    read = []
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **options: read.append("all"))
    status, _, err = run(*arguments, data=bytes(1 << 20))
    assert (status, read) == (1, [])
    assert "no known weight format starts with 00 00" in err
    assert os.listdir() == ["m.safetensors"]


def test_a_file_of_this_name_has_a_folder_in_its_path(run):
    path = os.path.join(os.curdir, "-")
    assert run("convert", "m.safetensors", path, "--format", "npz")[0] == 0
    assert run("info", path)[1].startswith(f"{path}: npz, 2 tensors")
    assert run("edit", "-", "--drop", "b")[2].endswith(f"for a file of this name pass {path!r}\n")


def test_a_terminal_and_a_closed_stdin_are_no_source(run, monkeypatch, capsys):
    status, _, err = run("info", "-", terminal=True)
    assert (status, "- reads stdin, which is a terminal" in err) == (2, True)
    monkeypatch.setattr("sys.stdin", None)
    assert main(["info", "-"]) == 2
    assert "- reads stdin, which is closed" in capsys.readouterr().err


def test_a_closed_stdout_is_no_destination(run, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    status, _, err = run("convert", "m.safetensors", "-")
    assert (status, "- writes to stdout, which is closed" in err) == (2, True)


@POSIX
def test_a_terminal_gets_no_binary_data(run):
    status, output = on_terminal("convert", "m.safetensors", "-")
    assert (status, "- writes binary data to stdout, which is a terminal" in output) == (2, True)


@POSIX
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "pipe"], "not a regular file: weights are mapped or read at offsets (pipe)"),
        (["diff", "m.safetensors", "pipe"], "not a regular file: weights are mapped or read at offsets (pipe)"),
        (["convert", "m.safetensors", "o.npz", "--verify", "pipe"], "not a regular file"),
        (["convert", "m.safetensors", "o.npz", "--adapter", "pipe"], "not a regular file"),
        (["convert", "m.safetensors", "o.npz", "--layout", "./pipe"], "the layout is not a regular file (./pipe)"),
        (["convert", "m.safetensors", "o.gguf", "--quantize", "q4_0", "--imatrix", "pipe"], "not a regular file"),
        (["check", "m.safetensors", "--config", "pipe"], "config.json is not a regular file (pipe)"),
        (["patch", "apply", "m.safetensors", "pipe", "o.safetensors"], "not a regular file"),
        (["edit", "pipe", "--drop", "b"], "only regular files can be edited"),
        (["scan", "pipe"], "not a regular file"),
        (["verify", "m.safetensors", "--against", "pipe"], "not a regular file"),
    ],
)
def test_a_named_pipe_is_refused_and_never_waited_for(run, arguments, message):
    os.mkfifo("pipe")
    status, out, err = run(*arguments)
    assert (status, message in out + err) == (2 if arguments[0] == "verify" else 1, True)
    assert sorted(os.listdir()) == ["m.safetensors", "pipe"]
