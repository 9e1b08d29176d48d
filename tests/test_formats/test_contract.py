"""What every format keeps to, whatever it is: the rows of core/registry.py, one after the other.

A new row needs nothing here but a maker of one file, and that only where its format is not written. The
tests assume that a format holds float16, arrays with any number of axes and any name; exceptions are in `held`,
`named` and `counts`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from builders.format_files import make
from builders.inside import registry
from builders.late_values import Late
from builders.paths import ROOT
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload.errors import FormatError, SafeloadError, UnsupportedError

WEIGHTS = {
    "model.layers.0.w": rng.standard_normal((3, 5)).astype(np.float16),
    "b": rng.standard_normal(7).astype(np.float16),
    "scalar": np.array(2.5, np.float16),
}
ODD_NAMES = ["schräg/é", "../x", "a b\tc", "\n", "'\"\\", "日本語", "🙂", "\u202ex", "x" * 60]

# Rows of which only a folder's names tell, not the first bytes: their tests are files of their own.
FOLDERS = ("deepspeed", "fsdp")
FILES = [row for row in registry.ROWS if row.name not in FOLDERS]
EVERY = pytest.mark.parametrize("row", FILES, ids=lambda row: row.name)
NAMED = pytest.mark.parametrize("row", registry.ROWS, ids=lambda row: row.name)
WRITTEN = pytest.mark.parametrize("row", [row for row in registry.ROWS if row.writes], ids=lambda row: row.name)


def held(row):
    """The weights that a file of a format can have: all, or one array under a name of its own."""
    return {"tensor": WEIGHTS["model.layers.0.w"]} if row.name == "npy" else WEIGHTS


def named(row, name):
    """Whether the format keeps names."""
    return row.name != "npy" or name == "tensor"


def counts(row):
    """Whether a file says how many tensors it has, so that one cut between two of them is an error."""
    return row.name != "moon"


def refusal(action):
    """Our error, if there is one."""
    try:
        action()
    except SafeloadError as error:
        return error
    return None


@EVERY
def test_a_file_opens_as_what_was_written(row, tmp_path):
    want = held(row)
    path = make(row, want, tmp_path / "file")
    for format in (None, row.name, row.family):
        if format is None or format in registry.FORMATS:
            with safeload.open(path, format=format) as opened:
                assert (opened.format, sorted(opened)) == (row.name, sorted(want))
                for name, array in want.items():
                    info = opened.tensors[name]
                    assert (info.dtype, info.shape) == ("F16", array.shape)
                    assert opened[name].dtype == array.dtype
                    np.testing.assert_array_equal(opened[name], array)


@EVERY
def test_a_file_says_what_it_is_where_another_format_is_wanted(row, tmp_path):
    path = make(row, held(row), tmp_path / "file")
    for wanted, formats in registry.FORMATS.items():
        required = registry.BY_NAME[formats[0]]
        if row.name in formats or (required.parts is not None and required.parts(path.read_bytes()[:512])):
            continue  # such a file may stand for its folder
        with pytest.raises(FormatError) as caught:
            safeload.open(path, format=wanted)
        assert (caught.value.path, caught.value.offset) == (str(path), 0)
        assert re.search(rf"this is {re.escape(row.kind)}, not (a )?{formats[0]}", str(caught.value))


@EVERY
def test_a_file_cut_anywhere_is_an_error_of_ours_with_path_and_byte(row, tmp_path):
    whole = make(row, held(row), tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    with safeload.open(tmp_path / "whole") as opened:
        order = list(opened)
    for size in part_of(list(range(len(whole))), FILES.index(row), 6):
        path.write_bytes(whole[:size])
        error = refusal(lambda: safeload.load(path))
        if error is None:  # padding was cut off, or a format without a count was cut between two tensors
            found = safeload.load(path)
            assert list(found) == order[: len(found)]
            assert all(np.array_equal(array, held(row)[name]) for name, array in found.items())
            assert len(found) == len(order) or not counts(row)
            del found  # Windows does not write to a mapped file
        elif isinstance(error, UnsupportedError):
            assert str(path) in str(error), size
        else:
            assert isinstance(error, FormatError)
            assert error.path == str(path), size
            assert error.offset is not None, (size, str(error))
            assert 0 <= error.offset <= size, (size, str(error))


@EVERY
def test_only_nested_formats_have_containers(row, tmp_path):
    path = make(row, held(row), tmp_path / "file")
    with pytest.raises(SafeloadError) as caught:
        safeload.open(path, root="nowhere")
    says = f"root= selects a nested container, but {row.name} has none"
    assert (says in str(caught.value)) == (not row.nested)


@EVERY
def test_the_first_bytes_tell(row, tmp_path):
    path = make(row, held(row), tmp_path / "file")
    head = path.read_bytes()[:512]
    assert row.matches(head)
    kinds = {other.kind for other in registry.ROWS if other.matches(head)}
    assert kinds == {row.kind}, "rows that share their first bytes say the same"
    for size in range(len(head) + 1):
        for other in registry.ROWS:
            assert isinstance(other.matches(head[:size]), bool)


@NAMED
def test_the_messages_and_the_pages_name_it(row, tmp_path, pytestconfig):
    assert row.title in registry.titles()
    page = tmp_path / "page.html"
    page.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(UnsupportedError, match=re.escape(f"this version reads {registry.titles()}")):
        safeload.open(page)
    with pytest.raises(ValueError, match=rf"expected one of .*\b{row.name}\b"):
        safeload.open(page, format="html")
    docs = pytestconfig.rootpath / "docs"
    guide = (docs / "guide" / "loading.md").read_text("utf-8")
    assert f'`"{row.name}"`' in guide
    assert row.family is None or f'`"{row.family}"`' in guide
    assert row.title in guide
    converting = (docs / "guide" / "converting.md").read_text("utf-8")
    assert not row.writes or all(f"`{suffix}`" in converting for suffix in row.suffixes)
    threats = (docs / "threat-model.md").read_text("utf-8")
    headings = " ".join(line for line in threats.splitlines() if line.startswith("### "))
    assert all(word in headings.casefold() for word in row.title.replace(" NumPy", "").casefold().split())


def test_the_golden_run_has_a_file_of_each_format():
    from golden.fixtures import WRITTEN

    assert {row.name for row in FILES} == set(WRITTEN)


@NAMED
def test_its_module_says_what_the_format_is(row):
    module = row.load()
    assert module.__doc__
    assert hasattr(module, "write") == row.writes
    rows = [other for other in registry.ROWS if other.module == row.module]
    assert hasattr(module, "claims") == any(other.ambiguous for other in rows)
    assert hasattr(module, "read")
    assert (row.name in dir(safeload)) == row.public


def test_names_and_suffixes_are_there_once():
    names = [row.name for row in registry.ROWS]
    assert (
        len({*names, *(row.family for row in registry.ROWS if row.family)})
        == len(registry.FORMATS)
        == len(set(names)) + 1
    )
    written = [suffix for row in registry.ROWS if row.writes for suffix in row.suffixes]
    assert written == list(registry.SUFFIXES)
    assert all(re.fullmatch(r"\.[a-z]+", suffix) for suffix in written)


def test_type_checkers_know_every_name():
    assert get_args(registry.FormatName) == tuple(registry.FORMATS)
    assert get_args(registry.WrittenName) == tuple(registry.WRITTEN)


# ---- what is written ----


@WRITTEN
def test_convert_writes_what_the_suffix_says(row, tmp_path):
    want = held(row)
    for suffix in row.suffixes:
        path = tmp_path / f"file{suffix.upper()}"
        safeload.convert(want, path)
        with safeload.open(path) as opened:
            assert (opened.format, sorted(opened)) == (row.name, sorted(want))


@WRITTEN
def test_no_tensors_at_all(row, tmp_path):
    path = tmp_path / "empty"
    if row.name == "npy":
        with pytest.raises(SafeloadError, match="holds one array, got 0"):
            make(row, {}, path)
        assert not path.exists()
        return
    make(row, {}, path)
    with safeload.open(path) as opened:
        assert (opened.format, len(opened), opened.nbytes, opened.load()) == (row.name, 0, 0, {})


@WRITTEN
@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_names_with_odd_characters_come_back(row, name, tmp_path):
    path = make(row, {name: WEIGHTS["b"]}, tmp_path / "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert list(safeload.load(path)) == [name if named(row, name) else "tensor"]


@WRITTEN
@pytest.mark.parametrize("name", ["", "\0", "a\0b", "\ud800", "x" * (1 << 17)], ids=lambda name: ascii(name[:8]))
def test_a_name_is_refused_or_comes_back(row, name, tmp_path):
    path = tmp_path / "file"
    error = refusal(lambda: make(row, {name: WEIGHTS["b"]}, path))
    if error is None:
        assert list(safeload.load(path)) == [name if named(row, name) else "tensor"]
    else:
        assert len(str(error)) < 500
        assert list(tmp_path.iterdir()) == []


@WRITTEN
def test_a_name_is_text(row, tmp_path):
    for name in (1, None, b"x", ("a",)):
        with pytest.raises(TypeError, match="str"):
            make(row, {name: WEIGHTS["b"]}, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@WRITTEN
@pytest.mark.parametrize("value", [[1.0, 2.0], "text", None, np.array(["a"]), np.array([None]), 1.5], ids=repr)
def test_what_is_no_array_of_numbers_is_refused(row, value, tmp_path):
    with pytest.raises((TypeError, SafeloadError), match="w"):
        make(row, {"w": value}, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@WRITTEN
def test_what_exists_stays_unless_it_may_be_overwritten(row, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        getattr(row.load(), row.writer)(held(row), {}, path, overwrite=False)
    assert path.read_bytes() == b"old"
    getattr(row.load(), row.writer)(held(row), {}, path, overwrite=True, durable=False)
    assert safeload.open(path).format == row.name


class OutOfWeightsError(Exception):
    pass


@WRITTEN
@pytest.mark.parametrize("before", [None, b"old"], ids=["new", "old"])
def test_a_failure_halfway_leaves_what_was_there(row, before, tmp_path):
    """Each time that a tensor is asked for its values, the last time by the writer."""
    left = 0

    def ask():
        nonlocal left
        left -= 1
        if left < 0:
            raise OutOfWeightsError
        return big

    path = tmp_path / ("file.safetensors" if row.name == "safetensors" else "file")
    if before is not None:
        path.write_bytes(before)
    big = np.zeros((300, 1000), np.float16)
    weights = {"a": big, "b": Late(big.dtype, big.shape, ask)}
    weights = weights if named(row, "b") else {"b": weights["b"]}
    for calls in range(10):
        left = calls
        try:
            safeload.convert(weights, path, format=row.name, raw=row.name == "gguf", overwrite=True)
        except OutOfWeightsError:
            assert [entry.read_bytes() for entry in tmp_path.iterdir()] == ([] if before is None else [before])
        else:
            break
    assert 0 < calls < 9
    assert [*safeload.load(path).values()][-1].tobytes() == big.tobytes()


@WRITTEN
def test_metadata_of_any_kind_is_kept_or_left_out(row, tmp_path):
    metadata = {"text": "é", "number": 3, 4: [1, 2], "none": None, "object": object(), "nan": float("nan")}
    path = tmp_path / "file"
    getattr(row.load(), row.writer)(held(row), metadata, path)
    with safeload.open(path) as opened:
        assert opened.metadata.get("text", "é") == "é"
        assert "object" not in opened.metadata


@WRITTEN
def test_a_writer_gives_the_same_bytes_twice(row, tmp_path):
    first, second = (make(row, held(row), tmp_path / name).read_bytes() for name in "ab")
    assert first == second


@WRITTEN
def test_arrays_are_written_as_they_look_not_as_they_lie(row, tmp_path):
    base = rng.standard_normal((4, 6)).astype(np.float16)
    views = (base.T, base[::-1, ::2], base.astype(">f2"), np.broadcast_to(base[0], (3, 6)), base[:0])
    for k, view in enumerate(views):
        (found,) = safeload.load(make(row, {"tensor": view}, tmp_path / f"file {k}")).values()
        assert found.shape == view.shape
        np.testing.assert_array_equal(found, view)


@EVERY
@pytest.mark.skipif(sys.platform != "linux", reason="no list of descriptors")
def test_a_file_that_is_refused_is_closed(row, tmp_path):
    path = make(row, held(row), tmp_path / "file")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refusal(lambda: safeload.open(path)) is not None
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert refusal(lambda: safeload.open(path)) is not None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_format_is_where_its_row_says():
    """To add one is a row and a module: nothing else of the package knows the name of the simplest two."""
    package = Path(safeload.__file__).parent
    allowed = {
        "moon": {"__init__.py", "formats/moon.py", "core/registry.py", "moon.py"},
        "npy": {
            "core/npy.py",
            "core/registry.py",
            "trust/scan.py",
        },  # `scan` parses its header
    }
    for name, places in allowed.items():
        assert name in registry.BY_NAME
        found = {
            path.relative_to(package).as_posix()
            for path in package.rglob("*.py")
            if re.search(rf"(?<![\w.]){name}(?!\w)", path.read_text("utf-8"), re.IGNORECASE)
        }
        assert found <= places, found - places


def test_a_new_format_is_a_file_and_a_line_in_the_list(tmp_path):
    """The format that the guide writes as a plug-in, in a copy of the package."""
    package = tmp_path / "safeload"
    shutil.copytree(Path(safeload.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    guide = (ROOT / "docs" / "guide" / "own-formats.md").read_text("utf-8")
    code = re.search(r"^```python\n# toyformat\.py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    (package / "formats" / "toy.py").write_text(code[1], "utf-8")
    registry = package / "core" / "registry.py"
    line = """Format("toy", "Toy files", "a Toy file", _begins(b"TOY1"), "..formats.toy", (".toy",),
                     writes=True, metadata=True, chooses=_only(".toy")),"""
    registry.write_text(registry.read_text("utf-8").replace("\n)\n# fmt: on", f"\n{line}\n)"), "utf-8")
    program = """
import safeload, safeload.errors, os, pickle
weights = safeload.load("m.safetensors")
safeload.convert("m.safetensors", "models/m.toy")
for path in ("models/m.toy", "models"):
    with safeload.open(path, format="toy") as opened:
        assert (opened.format, opened.metadata, list(opened)) == ("toy", {"by": "me"}, list(weights))
        assert all((opened[name] == array).all() for name, array in weights.items())
        assert opened.get_slice("b")[2] == weights["b"][2] and len(pickle.loads(pickle.dumps(opened))) == len(weights)
assert safeload.open("models").format == "toy" and safeload.check("models/m.toy").ok
try:
    safeload.open("folder")
except safeload.errors.UnsupportedError as error:
    assert str(error).endswith(", *.toy"), error
"""
    (tmp_path / "models").mkdir()
    (tmp_path / "folder").mkdir()
    safeload.convert(WEIGHTS, tmp_path / "m.safetensors", metadata={"by": "me"})
    run = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{program}"]
    subprocess.run(run, check=True, cwd=tmp_path)
