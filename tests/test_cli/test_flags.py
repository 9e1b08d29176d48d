"""Messages in a terminal name options, never arguments or functions of Python."""

import argparse
import ast
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from builders.inside import cli_common, main

import safeload
from safeload.numpy import save_file


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("File exists; pass overwrite=True to replace it", "File exists; pass --overwrite to replace it"),
        ("pass resume=True to continue or overwrite=True to", "pass --resume to continue or --overwrite to"),
        ('unknown_globals="inert" reads the tensors', "--unknown-globals inert reads the tensors"),
        ("raw=True writes the tensors as they are", "--raw writes the tensors as they are"),
        ("many hard links; pass force=True", "many hard links; pass --force"),
        ("pass imatrix=", "pass --imatrix"),
        ("against= compares and write= writes a manifest", "--against compares and --write writes a manifest"),
        ("verify= does not cover files that executor= reads", "--verify does not cover files that --dask reads"),
        ("a folder needs max_shard_size", "a folder needs --max-shard-size"),
        ("pass dtype= to dequantize it", "pass --dtype to dequantize it"),
        ("only='*.w' matches nothing", "only --only '*.w' matches nothing"[5:]),
        ("pass storage_options={'verify': PATH} to", "pass --storage-option verify=PATH to"),
        ('safeload.open("hf://a/b")', "hf://a/b"),
        ('safeload.load("s3://a/b", storage_options={}) reads it over the network', "pass s3://a/b"),
        (
            "2 files. Open one of them, or open several together with safeload.open(['a', ...])",
            "2 files. Open one of them",
        ),
        (
            'safeload.open("filecache::x", storage_options={}) keeps a copy',
            "filecache::x with --storage-option filecache.cache_storage=FOLDER keeps a copy",
        ),
        ("shape=(3, 4) and e=mc and --dtype=f16", "shape=(3, 4) and e=mc and --dtype=f16"),
        ("tensor 'a.dtype=b' is missing", "tensor 'a.dtype=b' is missing"),
    ],
)
def test_translations(text, want):
    assert cli_common.in_options(text) == want


# Messages of functions that no command calls, or about objects that a command line cannot hold.
ELSEWHERE = (
    "core/arrays.py", "core/files.py", "core/text.py", "core/names.py", "core/checkpoint.py",
    "core/quantized_tensor.py", "core/slice.py", "core/registry.py", "checking/stats.py",
    "conversion/quantize.py", "remote/missing_path.py", "remote/places.py",
)  # fmt: skip
DOORS = ("compat", "frameworks", "cli")
ARGUMENTS = (
    "storage_options|unknown_globals|max_shard_size|overwrite|resume|stored|dtype|only|drop|keep|root|format"
    "|imatrix|force|raw|executor|adapters"
)
PYTHON = re.compile(rf"(?<![\w-])(?:{ARGUMENTS})=(?!=)|safeload\.(?:open|load|convert)\b|\b(?:overwrite|resume)=True")


def example(part):
    """Return a word for a formatted value, in quotes if it is shown so."""
    value = part.value
    quoted = part.conversion == ord("r") or (isinstance(value, ast.Call) and ast.unparse(value.func) == "show")
    return "'x'" if quoted else "x"


def text_of(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else example(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def texts(path):
    """Yield the line numbers and texts of string literals with more than a word, except docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inner.update(id(node.value) for node in nodes if isinstance(node, ast.Expr))
    for node in nodes:
        if id(node) not in inner and " " in (text := text_of(node)):
            yield node.lineno, text


def test_no_message_of_a_command_names_python():
    root, wrong, count = Path(safeload.__file__).parent, [], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name in ELSEWHERE or name.startswith(DOORS) or "/" not in name:
            continue
        for line, text in texts(path):
            count += cli_common.in_options(text) != text
            if PYTHON.search(cli_common.in_options(text)):
                wrong.append(f"{name}:{line}: {cli_common.in_options(text)}")
    assert not wrong
    assert count > 25


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"w": np.ones((32, 32), np.float32)}, "m.safetensors", durable=False)
    with open("t.pkl", "wb") as file:
        pickle.dump({"w": np.ones((2, 2)), "args": argparse.Namespace(a=1)}, file)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["info", "t.pkl"], "--unknown-globals inert"),
        (["check", "t.pkl"], "--unknown-globals inert"),
        (["convert", "m.safetensors", "t.pkl", "new.safetensors"], "--unknown-globals inert"),
        (["convert", "m.safetensors", "m2.safetensors", "--keep", "*"], "--keep"),
        (["info", "m.safetensors", "--root", "x"], "--root"),
    ],
)
def test_advice_in_a_terminal(arguments, advice, folder, capsys):
    assert main(arguments) != 0
    out, err = capsys.readouterr()
    assert advice in out + err
    assert not PYTHON.search(out + err)


def test_warnings_begin_like_errors(folder, capsys):
    """Without --verbose, too."""
    assert main(["convert", "m.safetensors", "x.gguf", "--quantize", "q8_0"]) == 0
    assert capsys.readouterr().err.startswith("safeload: warning: x.gguf: no engine will load this file: ")
