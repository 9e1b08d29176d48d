"""What a call has in use is free when it has returned: no circle of references waits for Python's garbage collection.

A file that is still open cannot be replaced on Windows, and the frames of an error keep the arrays of whoever called.
"""

import ast
import contextlib
import gc
import os
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from builders.http_server import Server
from builders.paths import DATA, ROOT

import safeload
from safeload import gguf
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.no_core, pytest.mark.any_python]

READING = {
    "open": safeload.open,
    "load": safeload.load,
    "as f32": lambda path: safeload.load(path, dtype="float32"),
    "pread": lambda path: safeload.load(path, backend="pread"),
    "stream": lambda path: list(safeload.open(path).stream()),
    "stats": safeload.stats,
    "check": safeload.check,
}
# One file of each kind, and one way for each of the packed checkpoints.
KINDS = (
    "silero_vad_16k.safetensors",
    "torch/checkpoint.pt",
    "torch/simple_legacy.pt",
    "torch/package-several.pt",
    "gguf/iq.gguf",
)
PACKED = sorted(path.name for path in (DATA / "quantized").iterdir() if path.is_dir())
CASES = [(name, way) for name in KINDS for way in READING]
CASES += [(f"quantized/{name}", list(READING)[k % len(READING)]) for k, name in enumerate(PACKED)]


class Held:
    """Stands for what a caller has in a local variable."""


@contextlib.contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def released(call):
    """Calls it in a function that holds something; returns the error, if there is one, as text."""

    def caller():
        held, error = Held(), None
        try:
            call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return weakref.ref(held), error

    with no_collection():
        reference, error = caller()
        assert reference() is None, "a circle of references keeps the caller's frame"
    return error


def open_below(folder):
    """The files that this process has open or mapped."""
    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_reading(name, way):
    released(lambda: READING[way](DATA / name))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_checkpoint_that_is_dropped_closes_its_files(tmp_path):
    gguf.save_file({"x": np.zeros((4, 32), np.float32)}, tmp_path / "a.gguf", {"key": 3})
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", x=np.zeros(4, np.float32))
    with no_collection():
        for path in sorted(tmp_path.iterdir()):
            opened = safeload.open(path)
            metadata = opened.metadata
            assert open_below(tmp_path), path
            del opened
            assert metadata is not None
            del metadata
            assert not open_below(tmp_path), path


def damaged(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def cut(data):
    del data[len(data) // 2 :]


def scribble(data):
    data[8:64] = b"\xff" * 56


@pytest.mark.parametrize("change", [cut, scribble, bytearray.clear])
@pytest.mark.parametrize(
    "name", ["silero_vad_16k.safetensors", "torch/checkpoint.pt", "gguf/iq.gguf", "torch/simple_legacy.pt"]
)
def test_a_damaged_file(name, change, tmp_path):
    path = tmp_path / os.path.basename(name)
    path.write_bytes((DATA / name).read_bytes())
    damaged(path, change)
    for call in (
        lambda: safeload.load(path),
        lambda: safeload.load(path, backend="pread"),
        lambda: load_file(path),
    ):
        assert released(call)
    released(lambda: safeload.check(path))
    assert released(lambda: safeload.convert(path, tmp_path / "x.npz"))


def test_what_is_not_there_or_not_possible(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.zeros((4, 4), np.float32), "n": np.zeros(4, np.int32)}, path)
    missing, npz = tmp_path / "missing", tmp_path / "x.npz"
    for call in (
        lambda: safeload.open(missing),
        lambda: safeload.load(path)["y"],
        lambda: safeload.open(path).get_slice("y"),
        lambda: safeload.load(path, names=["y"]),
        lambda: safeload.load(path, dtype="float99"),
        lambda: safeload.load(path, out={"x": np.zeros(3, np.float32)}),
        lambda: list(safeload.open(path).stream(names=["y"])),
        lambda: save_file({"x": np.zeros(3, np.float32)}, missing / "x"),
        lambda: save_file({"x": object()}, npz),
        lambda: safeload.convert(path, missing / "x" / "x.npz"),
        lambda: safeload.convert(path, path),
        lambda: safeload.convert(path, npz, quantize="q9"),
        lambda: safeload.diff(path, missing),
        lambda: safeload.stats(missing),
    ):
        assert released(call)


def test_a_store_that_refuses():
    pytest.importorskip("urllib3")
    with Server({"/x.safetensors": (DATA / "silero_vad_16k.safetensors").read_bytes(), "/y": b"no weights"}) as server:
        url = server.url("/x.safetensors")
        for call in (lambda: safeload.load(url), lambda: list(safeload.open(url).stream()), lambda: safeload.open(url)):
            assert released(call) is None
        for call in (lambda: safeload.load(server.url("/z.safetensors")), lambda: safeload.open(server.url("/y"))):
            assert released(call)


# ---- what makes such circles: an error whose traceback has a frame in which a variable has the error ----


def choices(value):
    """The expressions of which an expression has the value of one."""
    parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else getattr(value, "values", None)
    return [value] if parts is None else [choice for part in parts for choice in choices(part)]


def base(value):
    """What an attribute is an attribute of."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value


def raised_variables(function):
    """Lines that raise what a variable of the function has, and what its ``finally`` blocks delete around them."""
    own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}

    def visit(node, deleted):
        if isinstance(node, ast.Raise):
            names = {name.id for value in choices(node.exc) for name in [base(value)] if isinstance(name, ast.Name)}
            if names & own - deleted - {"self"}:
                yield node.lineno
        for name, values in ast.iter_fields(node):
            inside = deleted
            if isinstance(node, ast.Try) and name == "body":
                ends = [target for last in node.finalbody if isinstance(last, ast.Delete) for target in last.targets]
                inside = deleted | {target.id for target in ends if isinstance(target, ast.Name)}
            if isinstance(node, ast.ExceptHandler) and node.name is not None:
                inside = deleted | {node.name}  # Python deletes it
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, (ast.stmt, ast.excepthandler, ast.match_case)):
                    yield from visit(value, inside)

    yield from visit(function, frozenset())


def raised_in(text):
    functions = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [line for function in functions for line in raised_variables(function)]


def test_such_lines_are_found():
    assert raised_in("def f(e):\n raise e") == [2]
    assert raised_in("def f():\n try:\n  g()\n except E as e:\n  k = e\n raise k") == [6]
    assert raised_in("def f(k):\n raise k.error") == [2]
    assert raised_in("def f():\n try:\n  g()\n except E as e:\n  raise e") == []
    assert raised_in("def f(k):\n try:\n  raise k\n finally:\n  del k") == []
    assert raised_in("def f(k):\n raise k if k else E()") == [2]
    assert raised_in("def f(k):\n raise k(1)") == []


def test_no_variable_keeps_the_error_that_is_raised():
    modules = sorted((ROOT / "safeload").rglob("*.py"))
    found = {path.name: lines for path in modules if (lines := raised_in(path.read_text(encoding="utf-8")))}
    assert found == {}
