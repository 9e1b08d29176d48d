"""Progress bars: one owner for Python's ``progress=True`` and the command line."""

import io
import sys
import types

import numpy as np
import pytest
from builders.inside import jobs, progress

import safeload
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((1000, 1000), np.float32), "b": np.ones(10)}, path, durable=False)
    return path


@pytest.fixture(params=[True, False], ids=["tqdm", "no tqdm"])
def with_tqdm(request, monkeypatch):
    if request.param:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    return request.param


def calls(path, tmp_path):
    return {
        "load": lambda: safeload.load(path, dtype="float64", progress=True),
        "load mapped": lambda: safeload.load(path, progress=True),
        "load_file": lambda: load_file(path, backend="pread", progress=True),
        "stats": lambda: safeload.stats(path, progress=True),
        "quantized": lambda: safeload.load_quantized(path, progress=True),
        "convert": lambda: safeload.convert(path, tmp_path / "x.npz", progress=True),
        "diff": lambda: safeload.diff(path, path, progress=True),
        "validate": lambda: safeload.check(path, progress=True),
    }


CALLS = ["load", "load mapped", "load_file", "stats", "quantized", "convert", "diff", "validate"]


@pytest.mark.parametrize("call", CALLS)
def test_true_always_shows_a_bar_on_a_terminal(call, with_tqdm, path, tmp_path, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    calls(path, tmp_path)[call]()
    shown = stream.getvalue()
    assert "safeload: " in shown
    assert "100%" in shown
    assert shown.endswith("\n")


@pytest.mark.parametrize("call", CALLS)
def test_true_is_a_line_where_there_is_no_terminal(call, with_tqdm, path, tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    calls(path, tmp_path)[call]()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "\r" not in stream.getvalue()
    assert lines[0].startswith("safeload: ")
    assert lines[0].endswith(" s")


@pytest.mark.parametrize("stream", [None, "closed", Broken()], ids=["none", "closed", "broken"])
@pytest.mark.parametrize("call", CALLS)
def test_without_a_stderr_the_work_is_done(call, stream, with_tqdm, path, tmp_path, monkeypatch):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    calls(path, tmp_path)[call]()


@pytest.mark.parametrize("nothing", [None, False, np.False_])
def test_no_bar_unless_it_is_asked_for(nothing, path, capsys):
    safeload.load(path, dtype="float64", progress=nothing)
    assert capsys.readouterr().err == ""


def test_a_long_work_says_how_far_it_is_every_ten_seconds(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now))
    with progress.bar("work") as draw:
        for second in range(26):
            now = float(second)
            draw(second << 20, 25 << 20)
    assert capsys.readouterr().err == "work: 40% of 25 MiB\nwork: 80% of 25 MiB\nwork: 100% of 25 MiB in 25.0 s\n"


def test_failed_work_has_no_last_line(capsys):
    def work():
        with progress.bar("work") as draw:
            draw(1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert capsys.readouterr().err == ""


def test_a_notebook_gets_the_bar_of_notebooks(monkeypatch):
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    made = []

    class Bar:
        def __init__(self, total, **options):
            self.total, self.n = total, 0
            made.append(self)

        def update(self, step):
            self.n += step

        def close(self):
            self.total = None

    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(auto=sys.modules["tqdm.auto"]))
    with jobs.reporter(True, 10) as report:
        report(4)
        report(10)
    assert [(bar.n, bar.total) for bar in made] == [(10, None)]


def test_a_meter_that_is_never_full_leaves_its_bar_when_it_goes(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    meter = progress.Meter(True, 100)
    meter.add(50)
    del meter
    assert stream.getvalue() == "\rsafeload:  50%\n"
