"""Formats by entry point: the example of the docs, folders, what a plug-in may not do, and broken plug-ins."""

import importlib
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from builders.http_server import Server
from builders.inside import registry
from builders.paths import ROOT

import safeload
from safeload.errors import FormatError, SafeloadError

pytestmark = pytest.mark.no_core

PAGE = ROOT / "docs" / "guide" / "own-formats.md"
WEIGHTS = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.float16([1, 2]), "c": np.array(7)}
HEAD = """
import numpy as np
from safeload.plugins import Format, StoredTensor
def row(**changes):
    fields = dict(name="own", title="Own", kind="an own file", matches=lambda head: head[:3] == b"OWN", module=__name__)
    return Format(**{**fields, **changes})
FORMAT = row()
def read(candidate, request):
    return candidate.content([StoredTensor("x", "uint8", (candidate.size,), 0)], {"size": candidate.size})
"""


@pytest.fixture
def forget(monkeypatch):
    """Looks for entry points anew, now and afterwards."""

    def clear():
        for function in (registry._entry_points, registry._load):
            function.cache_clear()
        registry.modules.clear()
        for name in ("toyformat", "ownformat", "otherformat"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    monkeypatch.delenv(registry.DISABLE, raising=False)
    clear()
    yield clear
    clear()


@pytest.fixture
def install(tmp_path, monkeypatch, forget):
    """Puts a distribution with an entry point on sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(code, *, name="own", module="ownformat", target="FORMAT", dist="safeload-own"):
        (site / f"{module}.py").write_text(textwrap.dedent(code))
        info = site / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[safeload.formats]\n{name} = {module}:{target}\n")
        forget()
        return site

    return put


@pytest.fixture
def toy(install):
    """The example of the page."""
    (code,) = re.findall(r"^```python\n# toyformat\.py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return install(code, name="toy", module="toyformat", dist="safeload-toy")


def own_file(tmp_path, content=b"OWN\0\0\0\0\0"):
    path = tmp_path / "file.own"
    path.write_bytes(content)
    return path


def check_weights(arrays):
    assert sorted(arrays) == sorted(WEIGHTS)
    for name, want in WEIGHTS.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), name


# ---- the example ----


def test_the_example_is_written_and_read(toy, tmp_path):
    path = tmp_path / "model.toy"
    safeload.convert(WEIGHTS, path, metadata={"by": "me"})
    with safeload.open(path) as opened:
        assert (opened.format, opened.metadata, list(opened)) == ("toy", {"by": "me"}, list(WEIGHTS))
        check_weights(opened.load())
        check_weights(dict(opened.stream()))
        assert opened.get_slice("a.weight")[1:, ::2].tolist() == [[4, 6], [8, 10]]
        assert opened.take("a.weight", [2, 0]).tolist() == WEIGHTS["a.weight"][[2, 0]].tolist()
        check_weights(pickle.loads(pickle.dumps(opened)).load())
    assert safeload.load(path, dtype="float16", format="toy")["a.weight"].dtype == np.float16
    assert "toy, 3 tensors" in str(safeload.info(path))
    assert not safeload.check(path).errors
    assert safeload.stats(path)["a.weight"].max == 11
    safeload.convert(path, tmp_path / "back.safetensors")
    check_weights(safeload.load(tmp_path / "back.safetensors"))
    safeload.convert(tmp_path / "back.safetensors", tmp_path / "again", format="toy")
    check_weights(safeload.load(tmp_path / "again"))
    check_weights(safeload.load(io.BytesIO(path.read_bytes())))
    with Server({"/m.toy": path.read_bytes()}) as server:
        check_weights(safeload.load(server.url("/m.toy")))


def test_other_processes_load_the_plug_in_too(toy, tmp_path):
    path = tmp_path / "model.toy"
    safeload.convert(WEIGHTS, path)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        safeload.convert(path, tmp_path / "out", max_shard_size=60, executor=executor)
        checkpoint = safeload.open(path)
        check_weights(executor.submit(safeload.Checkpoint.load, checkpoint).result())
    check_weights(safeload.load(tmp_path / "out"))


def test_the_command(toy, tmp_path):
    path = tmp_path / "model.toy"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(toy), *filter(None, sys.path)])}

    def run(*arguments):
        command = [sys.executable, "-m", "safeload", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=os.sep, env=environment, check=False)

    safeload.convert(WEIGHTS, tmp_path / "in.safetensors")
    assert run("convert", tmp_path / "in.safetensors", path, "--format", "toy").returncode == 0
    assert run("convert", tmp_path / "in.safetensors", tmp_path / "x.toy").returncode == 0
    result = run("info", path)
    assert "toy, 3 tensors" in result.stdout, result
    result = run("convert", path, tmp_path / "y", "--format", "toys")
    assert "invalid choice: 'toys'" in result.stderr, result


def test_files_of_the_example_are_hostile(toy, tmp_path):
    path = tmp_path / "model.toy"
    safeload.convert(WEIGHTS, path)
    whole = path.read_bytes()
    for size in range(4, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SafeloadError, match=r"model\.toy"):
            safeload.load(path)
    for old, new in (
        (b"[3, 4]", b"[3, 9]"),
        (b"[3, 4]", b"[3,-4]"),
        (b"float32", b"float99"),
        (b"float32", b"flo\0t32"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(SafeloadError, match=r"model\.toy"):
            safeload.open(path)


def test_an_exception_while_writing_leaves_nothing(install, tmp_path):
    code = """
    from safeload.plugins import as_array, atomic_file
    FORMAT = row(writes=True, suffixes=(".own",))
    def write(tensors, metadata, path, *, overwrite=True, durable=True):
        with atomic_file(path, overwrite=overwrite, durable=durable) as file:
            for value in tensors.values():
                file.write(as_array(value).tobytes())
            raise KeyError("x")
    """
    install(HEAD + textwrap.dedent(code))
    path = tmp_path / "out.own"
    with pytest.raises(SafeloadError, match=r"'own' of safeload-own 1\.0 cannot write .*out\.own.: KeyError: 'x'"):
        safeload.convert(WEIGHTS, path)
    assert not path.exists()
    with pytest.raises(SafeloadError, match=r'is q8_0, which this format does not store: pass dtype="float32"'):
        safeload.convert({"w": np.ones((2, 32), np.float32)}, path, quantize="q8_0")
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        safeload.convert(WEIGHTS, path)
    assert path.read_bytes() == b"old"


# ---- when a plug-in is asked ----

ALL = HEAD + 'FORMAT = row(matches=lambda head: True, suffixes=(".npz", ".own"), chooses=lambda names: names)\n'


def test_a_plug_in_shadows_no_format_of_safeload(install, tmp_path):
    install(ALL)
    for suffix in (".safetensors", ".npz", ".gguf", ".moon"):
        path = tmp_path / f"m{suffix}"
        safeload.convert({"w": np.ones((2, 32), np.float16)}, path)
        assert safeload.open(path).format == suffix[1:]
        assert safeload.open(path, format="own").format == "own"  # it was asked for
        path.rename(tmp_path / "renamed.own")
        assert safeload.open(tmp_path / "renamed.own").format == suffix[1:]
        (tmp_path / "renamed.own").unlink()
    safeload.convert(WEIGHTS, tmp_path / "folder" / "")
    assert safeload.open(tmp_path / "folder").format == "safetensors"
    path = own_file(tmp_path, b"unknown bytes")
    assert safeload.open(path).format == "own"
    with pytest.raises(FormatError):
        safeload.open(path, format="npz")


def test_files_of_safeload_look_for_no_plug_ins(toy, tmp_path):
    safeload.convert(WEIGHTS, tmp_path / "m.safetensors")
    np.savez(tmp_path / "m.npz", **WEIGHTS)
    program = f"""
import importlib.metadata, sys, safeload, os
importlib.metadata.entry_points = None  # no call is expected
for name in ("m.safetensors", "m.npz"):
    safeload.load(os.path.join({str(tmp_path)!r}, name))
safeload.convert(os.path.join({str(tmp_path)!r}, "m.npz"), os.path.join({str(tmp_path)!r}, "n.safetensors"))
assert "toyformat" not in sys.modules
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True, cwd=os.sep)


def test_the_environment_disables_plug_ins(toy, tmp_path, monkeypatch):
    path = tmp_path / "model.toy"
    safeload.convert(WEIGHTS, path)
    monkeypatch.setenv(registry.DISABLE, "1")
    with pytest.raises(FormatError, match="no known weight format starts with 54 4f 59 31"):
        safeload.open(path)
    with pytest.raises(ValueError, match="unknown format 'toy', expected one of safetensors"):
        safeload.open(path, format="toy")
    with pytest.raises(ValueError, match="unknown format 'toy'"):
        safeload.convert(WEIGHTS, tmp_path / "x", format="toy")
    monkeypatch.setenv(registry.DISABLE, "0")
    check_weights(safeload.load(path))


def test_a_format_that_a_module_claims(install, tmp_path):
    install(HEAD + "FORMAT = row(ambiguous=True)\ndef claims(candidate):\n    return candidate.read_at(3, 1) == b'!'\n")
    assert safeload.open(own_file(tmp_path, b"OWN!\0")).format == "own"
    for options in ({}, {"format": "own"}):
        with pytest.raises(FormatError, match="no known weight format starts with"):
            safeload.open(own_file(tmp_path, b"OWN?\0"), **options)
    with pytest.raises(SafeloadError, match="root= selects a nested container, but own has none"):
        safeload.open(own_file(tmp_path, b"OWN!\0"), root="x")


# ---- folders ----

FOLDER = (
    HEAD
    + """
FORMAT = row(chooses=lambda names: [name for name in names if name == "weights.list"])
def read(candidate, request):
    tensors = [StoredTensor("head", "uint8", (3,), 0)]
    for line in candidate.read_at(0, candidate.size).decode().splitlines()[1:]:
        part = candidate.beside(line)
        tensors.append(StoredTensor(line, "<i2", (part.size // 2,), 0, file=part))
    return candidate.content(tensors, notes=["a folder of our own"])
"""
)


def test_a_folder(install, tmp_path):
    install(FOLDER)
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights.list").write_bytes(b"OWN\na.part\nsub/b.part\n")
    parts = {"a.part": np.arange(4, dtype="<i2"), "sub/b.part": np.arange(9, dtype="<i2")}
    for name, array in parts.items():
        (folder / name).write_bytes(array.tobytes())
    (folder / "config.json").write_text("{}")
    for path in (folder, folder / "weights.list"):
        with safeload.open(path) as opened:
            assert (opened.format, list(opened)) == ("own", ["head", *parts])
            assert opened.notes[0] == "a folder of our own"
            assert opened["sub/b.part"].tolist() == list(range(9))
            assert opened.tensors["a.part"].file == str(folder / "a.part")
            assert pickle.loads(pickle.dumps(opened))["a.part"].tolist() == list(range(4))
    assert safeload.open(folder, format="own").config == {}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        safeload.convert(folder, tmp_path / "out", max_shard_size=20, executor=executor)
    assert safeload.load(tmp_path / "out")["sub/b.part"].tolist() == list(range(9))
    with Server(tmp_path) as server:
        assert safeload.load(server.url("/m/weights.list"))["a.part"].tolist() == list(range(4))
    (folder / "a.part").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.part"):
        safeload.open(folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "a\\b", "c:x"])
def test_a_folder_is_not_left(install, tmp_path, name):
    install(FOLDER)
    path = own_file(tmp_path, f"OWN\n{name}\n".encode())
    with pytest.raises(FormatError, match="expected the name of a file in the same folder, got"):
        safeload.open(path)


# ---- broken plug-ins ----

UNUSABLE = {
    "an import error": ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named"),
    "a syntax error": ("def", "SyntaxError"),
    "an exit": ("raise RuntimeError('no\\x1b[2J')", "RuntimeError: no"),
    "no object": ("x = 1", "AttributeError: module 'ownformat' has no attribute 'FORMAT'"),
    "another type": ("FORMAT = 3", "expected a safeload.plugins.Format, got int"),
    "another name": (f"{HEAD}\nFORMAT = row(name='other')", "its format has another name, 'other'"),
    "no function": (f"{HEAD}\nFORMAT = row(matches=b'OWN')", "must be text, and matches a function"),
    "no text": (f"{HEAD}\nFORMAT = row(suffixes=(1,))", "title, kind, module and suffixes must be text"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_plug_in_that_cannot_be_used_is_named(install, case, tmp_path):
    code, text = UNUSABLE[case]
    install(code)
    path = own_file(tmp_path)
    says = rf"the plug-in 'own' of safeload-own 1\.0 cannot be used: .*{re.escape(text)}"
    with pytest.raises(SafeloadError, match=says) as caught:
        safeload.open(path, format="own")
    assert "\x1b" not in str(caught.value)
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(FormatError, match="no known weight format"):
        safeload.open(path)
    safeload.convert(WEIGHTS, tmp_path / "m.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safeload.load(tmp_path / "m.safetensors")


def test_names_that_are_taken(install, tmp_path):
    install(HEAD.replace('name="own"', 'name="npz"'), name="npz")
    path = own_file(tmp_path)
    says = "'npz' of safeload-own 1.0 cannot be used: safeload has a format of this name"
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(FormatError, match="no known weight format"):
        safeload.open(path)
    np.savez(tmp_path / "m.npz", **WEIGHTS)
    check_weights(safeload.load(tmp_path / "m.npz", format="npz"))


def test_two_distributions_with_one_name(install, tmp_path):
    install(HEAD)
    install(HEAD, module="otherformat", dist="safeload-other")
    both = r"'own' of safeload-o\w+ 1.0 and safeload-o\w+ 1.0 cannot be used: only one distribution may have a plug-in"
    with pytest.raises(SafeloadError, match=both):
        safeload.open(own_file(tmp_path), format="own")
    with pytest.warns(RuntimeWarning, match=both), pytest.raises(FormatError):
        safeload.open(own_file(tmp_path))


ASKED = {
    "matches": ("FORMAT = row(matches=lambda head: head['x'])", "cannot recognise a file: TypeError"),
    "claims": (
        "FORMAT = row(ambiguous=True)\ndef claims(candidate):\n    raise KeyError('k')",
        "a file: KeyError: 'k'",
    ),
    "no claims": ("FORMAT = row(ambiguous=True)", "has no attribute 'claims'"),
    "no module": ("FORMAT = row(ambiguous=True, module='not_there')", "cannot recognise a file: ModuleNotFoundError"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_plug_in_that_fails_when_asked_is_passed_over(install, case, tmp_path):
    code, text = ASKED[case]
    install(HEAD + code)
    path = own_file(tmp_path)
    says = rf"the plug-in 'own' of safeload-own 1\.0 .*{re.escape(text)}"
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(FormatError, match="no known weight format"):
        safeload.open(path)
    with pytest.raises(SafeloadError, match=says):
        safeload.open(path, format="own")


X = 'candidate.content([StoredTensor("x", "uint8", (8,), 0)])'
READ = {
    "KeyError": ("raise KeyError('k')", "cannot read .*file.own.: KeyError: 'k'"),
    "MemoryError": ("raise MemoryError", "cannot read .*file.own.: MemoryError: "),
    "RecursionError": ("read(candidate, request)", "cannot read .*: RecursionError"),
    "None": ("return None", r"TypeError: read\(\) must return candidate.content\(...\), got NoneType"),
    "a dict": ("return {'x': np.zeros(3)}", r"TypeError: read\(\) must return .*, got dict"),
    "beyond the end": (f"return {X.replace('(8,)', '(9,)')}", r"'x': needs bytes 0 to 9, .* has 8 \(.*, byte 0\)"),
    "before the begin": (f"return {X.replace(', 0)', ', -1)')}", "tensor 'x': needs bytes -1 to 7, but the file has 8"),
    "half an offset": (f"return {X.replace(', 0)', ', 0.5)')}", "tensor 'x': needs bytes 0.5 to 8.5"),
    "an offset of text": (f"return {X.replace(', 0)', ', None)')}", "cannot read .*TypeError"),
    "a huge shape": (f"return {X.replace('(8,)', '(1 << 62, 1 << 62)')}", "no array of U8 can have the shape"),
    "a huge empty shape": (f"return {X.replace('(8,)', '(1 << 62, 1 << 62, 0)')}", "no array of U8 can have the shape"),
    "a negative shape": (f"return {X.replace('(8,)', '(-2, -4)')}", "no array of U8 can have the shape"),
    "a shape of floats": (f"return {X.replace('(8,)', '(8.0,)')}", "no array of U8 can have the shape"),
    "many axes": (f"return {X.replace('(8,)', '(1,) * 65')}", "no array of U8 can have the shape"),
    "half a byte": (f"""return {X.replace('"uint8", (8,)', '"F4", (3,)')}""", "no array of F4 can have the shape"),
    "an unknown dtype": (f"return {X.replace('uint8', 'float7')}", "TypeError: unknown dtype 'float7'"),
    "objects": (f"""return {X.replace('"uint8"', "object")}""", "TypeError: unknown dtype"),
    "a name of a number": (f"""return {X.replace('"x"', "3")}""", "TypeError: the name of a tensor must be str, got 3"),
    "a name twice": (f"return {X.replace(']', ']*2')}", "two tensors are named 'x'"),
    "an error of ours": (
        "from safeload.errors import FormatError; raise FormatError('bent', candidate.path, 3)",
        "bent",
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_plug_in_that_fails_to_read_gives_an_error_of_ours(install, case, tmp_path):
    code, text = READ[case]
    install(f"{HEAD}\ndef read(candidate, request):\n    {code}\n")
    path = own_file(tmp_path)
    with pytest.raises(SafeloadError, match=text) as caught:
        safeload.open(path)
    assert ("safeload-own 1.0" in str(caught.value)) == (not isinstance(caught.value, FormatError))
    assert str(path) in str(caught.value)


def test_moon_is_a_row_of_the_same_class():

    assert type(registry.BY_NAME["moon"]) is safeload.plugins.Format
    assert registry.BY_NAME["moon"].source == ""
