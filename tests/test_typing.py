"""What mypy makes of calls: which overload is meant, and which text is no choice."""

import ast
import functools
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from builders.inside import SCHEMES, presets, registry
from builders.inside import quantizing as quantize
from builders.public import functions

import safeload

pytestmark = pytest.mark.no_core

PROGRAM = """
import numpy as np, safeload
array = np.zeros((2, 32), np.float32)
with safeload.open("x") as opened:
    reveal_type(safeload.stats(opened))
reveal_type(safeload.stats(array))
reveal_type(safeload.stats([1.0]))
reveal_type(safeload.stats("x", names=["a"]))
reveal_type(safeload.stats({"a": array}))
reveal_type(safeload.quantization_error(array, safeload.quantize(array, "int8")))
reveal_type(safeload.quantization_error("x", safeload.load_quantized("x", {"*": "q8_0", "a": None})))
reveal_type(safeload.load("x"))
reveal_type(safeload.load("x", dtype="float32", backend="pread", root="model"))
reveal_type(opened.load(dtype=np.float32))
reveal_type(opened.load(dtype=None, threads=2))
safeload.quantize(array, "int9")
safeload.quantize(array, "q4_0", rounding="up")
safeload.load_quantized("x", "q9")
safeload.open("x", unknown_globals="run", format="zip")
opened.load(dtype="float32", backend="gpu")
reveal_type(opened["a"])
reveal_type(opened.stream())
reveal_type(opened.stream(dtype="float32"))
reveal_type(opened.stream(by_layer=True, dtype="float32"))
reveal_type(next(opened.stream(by_layer=True, dtype="float32"))[1]["a"])
reveal_type(safeload.info("x"))
reveal_type(safeload.report("x", "y.html"))
reveal_type(safeload.check("x").stats)
reveal_type(safeload.torch.load_file("x"))
opened["a"].astype("float32")
"""

TYPING = Path(__file__).parent / "typing"
# What people write, and the package that it needs.
USERS = {"user.py": "numpy", "torch_user.py": "torch", "jax_user.py": "jax"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Mypy's: numpy's types take seconds."""
    return str(tmp_path_factory.mktemp("mypy"))


def test_the_types_of_results_and_of_choices(cache, tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "program.py").write_text(PROGRAM)
    found, problems, _ = api.run(["--strict", "--cache-dir", cache, str(tmp_path / "program.py")])
    assert not problems
    lines = found.splitlines()
    kinds = [line.partition('Revealed type is "')[2] for line in lines if "Revealed" in line]
    assert [kind.strip('"').partition("[")[0].rpartition(".")[2] for kind in kinds] == [
        *("StatsTable", "tuple", "tuple", "StatsTable", "StatsTable", "tuple", "QuantizationTable"),
        *("dict", "dict", "dict", "dict", "TensorLike", "TensorStream", "TensorStream", "LayerStream", "ndarray"),
        *("Info", "CheckReport", "StatsTable", "dict"),
    ], lines
    assert ["numpy" in kind for kind in kinds[7:11]] == [False, True, True, False], lines
    assert ["numpy" in kind for kind in kinds[12:15]] == [False, True, True], lines
    refused = [line.split(":")[1] for line in lines if "error:" in line]
    assert refused == ["16", "17", "18", "19", "19", "20", "30"], lines


@pytest.mark.parametrize("user", USERS)
def test_mypy_accepts_what_people_write(user, cache):
    api = pytest.importorskip("mypy.api")
    pytest.importorskip(USERS[user])
    found, problems, status = api.run(["--strict", "--cache-dir", cache, str(TYPING / user)])
    assert status == 0, found + problems


@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_pyright_accepts_what_people_write(mode, tmp_path):
    users = [user for user, package in USERS.items() if importlib.util.find_spec(package)]
    pyright = next(filter(None, map(shutil.which, ("basedpyright", "pyright"))), None)
    if pyright is None:
        pytest.skip("pyright is not installed")
    settings = {
        "typeCheckingMode": mode,
        "include": [str(TYPING / user) for user in users],
        "extraPaths": [str(Path(safeload.__file__).parents[1])],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [pyright, "-p", str(tmp_path), "--pythonpath", sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_choices_of_types_are_the_rows():
    assert set(typing.get_args(quantize.SchemeName)) == set(SCHEMES)
    assert set(typing.get_args(quantize.Rounding)) == {
        rounding for row in SCHEMES.values() for rounding in row.roundings
    }
    assert set(typing.get_args(registry.FormatName)) == set(registry.FORMATS)
    choices = typing.get_type_hints(safeload.convert)["quantize"]
    assert {*presets()} < {name for choice in typing.get_args(choices) for name in typing.get_args(choice)}


def test_type_checkers_see_every_public_name():
    """`__init__.pyi` names the modules that `__init__.py` imports from."""
    *imports, names = ast.parse(Path(safeload.__file__).with_suffix(".pyi").read_text("utf-8")).body
    seen = {alias.asname: line.module for line in imports for alias in line.names}
    modules = dict.fromkeys(safeload._MODULES)
    assert seen == {"__version__": "_version", **modules, **safeload._MODULE_OF}
    assert ast.literal_eval(names.value) == sorted(safeload.__all__)


@functools.cache
def definitions(path):
    """The functions that a file defines, by qualified name; of overloads the last, which is the function itself."""
    found = {}

    def visit(node, prefix):
        for child in getattr(node, "body", ()):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(Path(path).read_text("utf-8")), "")
    return found


def written(function):
    """Name, kind and presence of a default of each argument, as type checkers read them."""
    arguments = definitions(function.__code__.co_filename)[function.__qualname__].args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    for k, argument in enumerate(positional):
        kind = "POSITIONAL_ONLY" if k < len(arguments.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        yield argument.arg, kind, k >= required
    if arguments.vararg:
        yield arguments.vararg.arg, "VAR_POSITIONAL", False
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, "KEYWORD_ONLY", default is not None
    if arguments.kwarg:
        yield arguments.kwarg.arg, "VAR_KEYWORD", False


def test_signatures_at_runtime_are_those_that_type_checkers_read():
    """The stub only imports names, so type checkers read the definitions; a decorator must not hide an argument."""
    compared = 0
    for name, function in functions():
        parameters = inspect.signature(function).parameters.values()
        runtime = [(p.name, p.kind.name, p.default is not p.empty) for p in parameters]
        assert runtime == list(written(inspect.unwrap(function))), name
        compared += 1
    assert compared > 200
