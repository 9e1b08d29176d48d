"""A cluster of programs, `dask scheduler` and `dask worker`, and the option --dask of the commands."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from builders import inside
from builders.clusters import OPTIONS, content, die_in
from builders.inside import main
from builders.paths import TESTS

import safeload

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")

ARGUMENTS = ("--dtype", OPTIONS["dtype"], "--max-shard-size", OPTIONS["max_shard_size"])


class Programs:
    """A scheduler and workers, as one types them."""

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "scheduler.json"
        self.running = []
        self.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", ":0")
        self.address = None
        while self.address is None:
            assert self.running[0].poll() is None, "the scheduler has ended"
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # it is written in place
                self.address = json.loads(self.file.read_text())["address"]
            time.sleep(0.02)

    def start(self, what, *arguments, **variables):
        command = [sys.executable, "-m", "dask", what, "--scheduler-file", str(self.file), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        environment |= variables
        with open(self.folder / "log.txt", "ab") as log:
            self.running.append(subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log))
        return self.running[-1]

    def worker(self, **variables):
        return self.start("worker", "--nthreads", "1", "--no-nanny", "--no-dashboard", **variables)

    def client(self):
        return distributed.Client(self.address, set_as_default=False)

    def stop(self):
        for process in reversed(self.running):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    started = Programs(tmp_path_factory.mktemp("programs"))
    try:
        started.worker()
        started.worker()
        yield started
    finally:
        started.stop()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder, in this process: importing Dask takes a second."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main([*map(str, arguments)])
        return (status, *capsys.readouterr())

    return run


IMPATIENT = inside.program(
    "import sys; from builders.inside import cli_common, main; cli_common._TIMEOUT = 3; sys.exit(main())"
)


def program(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_worker_is_killed_under_the_command(programs, source, local, tmp_path, command):
    """For good: the other one does the rest."""
    dies, note = "model-00003-of-00006.safetensors", programs.folder / "note.json"
    with programs.client() as client:
        client.wait_for_workers(2)
        client.run(die_in, dies, str(note))
    running = program("convert", source, "bf16", *ARGUMENTS, "--dask", programs.address, cwd=tmp_path)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    assert re.fullmatch(r"bf16: safetensors, 13 tensors, .* in 6 files\n", out)
    assert content(tmp_path / "bf16") == local
    assert dies not in json.loads(note.read_text())
    assert sorted(process.poll() or 0 for process in programs.running) == [-signal.SIGKILL, 0, 0]


def test_results_are_taken_from_the_client(programs, source, local, command, monkeypatch, tmp_path):
    """The futures of Dask's executor unpack the result as an error if the worker that holds it dies meanwhile."""
    monkeypatch.delattr(distributed.Client, "get_executor")
    assert command("convert", source, "bf16", *ARGUMENTS, "--dask", programs.file)[0] == 0
    assert content(tmp_path / "bf16") == local


def test_the_scheduler_file_does_as_the_address(programs, source, local, tmp_path, command):
    assert command("convert", source, tmp_path / "bf16", *ARGUMENTS, "--dask", programs.file)[0] == 0
    assert content(tmp_path / "bf16") == local


def test_a_conversion_that_was_begun_is_resumed(programs, source, local, tmp_path, command):
    out = tmp_path / "bf16"
    safeload.run_piece(safeload.plan_convert(source, out, **OPTIONS).pieces[0])
    arguments = ("convert", source, "bf16", *ARGUMENTS, "--dask", programs.address)
    advice = "pass --resume to continue or --overwrite to start over"
    said = f"safeload: bf16 holds an unfinished conversion: 1 of 6 shards are there; {advice}\n"
    assert command(*arguments) == (1, "", said)
    status, _, err = command(*arguments, "--resume", "--dtype", "float16")
    assert status == 2
    assert "was written with dtype='bfloat16', but this call has dtype='float16'; pass --overwrite to start" in err
    assert command(*arguments, "--resume")[0] == 0
    assert content(out) == local


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "fp8"),
        ("verify", "fp8", "--against", "manifest.json", "--tensors"),
        ("stats", "fp8"),
        ("diff", "fp8", "int8.safetensors"),
    ],
    ids=["check", "verify --tensors", "stats", "diff"],
)
def test_the_other_commands_print_what_one_process_prints(programs, source, tmp_path, command, arguments):
    shutil.copytree(source, tmp_path / "fp8")
    safeload.convert(source, tmp_path / "int8.safetensors", quantize="int8", requantize=True)
    if "--tensors" in arguments:
        written = ("verify", "fp8", "--write", "manifest.json", "--dask", programs.address)
        assert command(*written)[0] == 0
    here = command(*arguments, "--json")
    there = command(*arguments, "--json", "--dask", programs.address)
    assert (there[0], there[2]) == (here[0], "")
    assert [line for line in there[1].splitlines() if '"seconds"' not in line] == [
        line for line in here[1].splitlines() if '"seconds"' not in line
    ]
    assert len(there[1]) > 500


def test_a_cluster_without_workers_is_said_and_waited_for(source, local, tmp_path, command):
    started = Programs(tmp_path)
    try:
        arguments = ("convert", source, tmp_path / "bf16", *ARGUMENTS, "--dask", started.address)
        running = program(*arguments)
        assert running.stderr.readline() == f"safeload: --dask {started.address}: waiting for a worker\n"
        started.worker()
        assert "Traceback" not in running.communicate(timeout=30)[1]
        assert running.returncode == 0
    finally:
        started.stop()
    assert content(tmp_path / "bf16") == local


def test_control_c_ends_the_command_and_resume_goes_on(source, local, tmp_path, command):
    started = Programs(tmp_path)
    arguments = ("convert", source, tmp_path / "bf16", *ARGUMENTS, "--dask", started.address)
    try:
        running = program(*arguments)
        running.stderr.readline()  # it waits for a worker
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=10)
        assert out == ""
        assert "Traceback" not in err
        assert running.returncode == 130
        started.worker()
        assert command(*arguments, "--resume")[0] == 0
    finally:
        started.stop()
    assert content(tmp_path / "bf16") == local


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ModuleNotFoundError('No module named x', name='x')",
            "No module named x; install safeload and its packages on every worker",
        ),
        ("__version__ = '9.9'", r"expected safeload \S+, got 9.9"),
    ],
    ids=["no safeload", "another version"],
)
def test_workers_with_another_safeload_are_refused_before_they_begin(code, said, source, tmp_path, command):
    """Dask itself would wait forever for a worker that can read the first piece."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "safeload.py").write_text(code)
    started = Programs(tmp_path)
    try:
        started.worker(PYTHONPATH=str(tmp_path / "installed"))
        with started.client() as client:
            client.wait_for_workers(1)
        status, _, err = command("convert", source, "bf16", *ARGUMENTS, "--dask", started.address)
    finally:
        started.stop()
    assert status == 1
    assert re.fullmatch(rf"safeload: --dask {started.address}: worker tcp://[\d.:]+: {said}.*\n", err)
    assert not (tmp_path / "bf16").exists()


def test_a_scheduler_that_dies_is_one_line(source, tmp_path):
    started = Programs(tmp_path)
    try:
        running = program("convert", source, tmp_path / "bf16", *ARGUMENTS, "--dask", started.address)
        running.stderr.readline()  # it waits for a worker
        started.running[0].kill()
        said = f"safeload: --dask {started.address}: the connection to the scheduler was lost\n"
        assert running.communicate(timeout=60) == ("", said)
        assert running.returncode == 1
    finally:
        started.stop()


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("tpc://127.0.0.1:8786", 2, "--dask tpc://127.0.0.1:8786: unknown address scheme 'tpc'"),
        ("tls://127.0.0.1:8786", 2, "--dask tls://127.0.0.1:8786: TLS expects"),
        ("localhost", 1, "No such file or directory: localhost"),
        ("scheduler.json", 1, "No such file or directory: scheduler.json"),
        ("tokenizer.json", 1, "not a Dask scheduler file: it has no address (tokenizer.json)"),
    ],
)
def test_what_is_not_an_address_is_one_line(address, status, said, source, tmp_path, command, monkeypatch):
    monkeypatch.setattr(inside.cli_common, "_TIMEOUT", 1)
    (tmp_path / "tokenizer.json").write_text("{}")
    done = command("convert", source, "bf16", *ARGUMENTS, "--dask", address)
    assert (done[0], done[1]) == (status, "")
    assert done[2].startswith(f"safeload: {said}")
    assert done[2].count("\n") == 1
    assert not (tmp_path / "bf16").exists()


def test_a_scheduler_file_that_is_not_there_yet_is_waited_for(programs, source, local, tmp_path, command):
    written = programs.file.read_text()

    def write():
        for text in (written[:20], written):
            time.sleep(0.2)
            (tmp_path / "later.json").write_text(text)

    writer = threading.Thread(target=write)
    writer.start()
    assert command("convert", source, "bf16", *ARGUMENTS, "--dask", "later.json")[0] == 0
    writer.join()
    assert content(tmp_path / "bf16") == local


def test_an_address_that_nobody_answers(source, tmp_path, monkeypatch, command):
    monkeypatch.setattr(inside.cli_common, "_TIMEOUT", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        said = f"safeload: --dask {address}: no scheduler answered in 1 seconds\n"
        assert command("convert", source, "bf16", *ARGUMENTS, "--dask", address) == (1, "", said)
