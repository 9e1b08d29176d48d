"""The examples of README.md, of docs/ and of docstrings are run, and their output compared with what is shown."""

import ast
import doctest
import inspect
import pkgutil
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from builders.doc_examples import FLAGS, PAGES, ROOT, examples_of, failure_of, make_files
from builders.doc_stores import stores
from builders.quantized import FIXTURES

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# Languages of blocks that are not run; "sh" is for what needs a network or a large model.
NOT_RUN = {"sh", "json", "text", "toml", "yaml", "python"}  # test_plugins.py runs the Python of own-formats.md

# Pages about packages that tests do not otherwise need.
NEEDS = {
    "torch.md": ("torch",),
    "jax.md": ("jax",),
    "several-machines.md": ("distributed", "loky"),
    "remote.md": ("urllib3", "huggingface_hub", "s3fs", "moto.server"),
}
# Modules whose examples need a package; those of its frameworks cannot even be imported without it.
FRAMEWORKS = ("torch", "jax")

# Its examples put safeload in the place of safetensors.
INSTALL = safeload.install_as_safetensors
WHOLE_PROGRAMS = (ROOT / "docs" / "whole-programs.md", f"{INSTALL.__module__}.{INSTALL.__name__}")

as_numpy_2_prints = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="written with numpy 2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.fixture
def folder(files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def before_other_imports():
    """Another test of this process may have imported safetensors."""
    imported = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "safetensors"}
    try:
        yield
    finally:
        sys.modules.update(imported)


def setting(subject, folder):
    """Where the examples of a page or docstring run."""
    if subject in WHOLE_PROGRAMS:
        return before_other_imports()
    return stores(folder) if subject == ROOT / "docs" / "remote.md" else nullcontext()


@as_numpy_2_prints
@pytest.mark.skipif(shutil.which("bash") is None, reason="console examples are run by bash")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_of_a_page_do_what_they_show(page, folder):
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    with setting(page, folder):
        failures = [failure for example in examples_of(page) if (failure := failure_of(example))]
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_run_or_of_a_language_that_cannot_be(page):
    opened = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.MULTILINE)[::2]
    assert set(opened) <= {"pycon", "console", *NOT_RUN} | {text for text in opened if text.startswith("{")}


def framework_of(module):
    """The package that a module of safeload needs, None for most."""
    last = module.split(".")[-1]
    return next((name for name in FRAMEWORKS if last == name or last.startswith(f"{name}_")), None)


def installed():
    return [name for name in FRAMEWORKS if find_spec(name) is not None]


class _Finder(doctest.DocTestFinder):
    """Finds classes in the file that defines them; their ``__module__`` is the door that users import them from."""

    def _from_module(self, module, thing):
        if not inspect.isclass(thing):
            return super()._from_module(module, thing)
        return re.search(rf"^class {thing.__name__}\b", inspect.getsource(module), re.MULTILINE) is not None


def _tests_of_docstrings():
    finder = _Finder(exclude_empty=True)
    names = ["safeload", *sorted(module.name for module in pkgutil.walk_packages(safeload.__path__, "safeload."))]
    for name in names:
        if name.endswith(("__main__", "_core")) or framework_of(name) not in (None, *installed()):
            continue
        if ">>> " in Path(find_spec(name).origin).read_text("utf-8"):  # few modules have one, and importing takes long
            yield from (test for test in finder.find(import_module(name)) if test.examples)


_DOCSTRINGS = list(_tests_of_docstrings())


def test_the_examples_of_every_docstring_are_found():
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for name, tests in groupby(_DOCSTRINGS, key=lambda test: test.globs["__name__"]):
        tree = ast.parse(Path(find_spec(name).origin).read_text("utf-8"))
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, defined)]
        assert len(list(tests)) == sum(">>> " in text for text in texts), name


@as_numpy_2_prints
@pytest.mark.parametrize("test", _DOCSTRINGS, ids=lambda test: test.name)
def test_examples_of_docstrings_do_what_they_show(test, folder):
    said = []
    with setting(test.name, folder):
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)


# What readers type into the search of the site, which ranks titles and headings first.
SEARCHED = """
    conda cookbook dask duplicates faq fork gguf gpu hub install int8 interrupted jax llama.cpp lora machine merge
    metadata mpi nested network notebook offline pickle pin public quantized ray rename resume s3 shards sigbus
    slurm threads torch url wheels windows
"""


@pytest.mark.parametrize("term", SEARCHED.split())
def test_what_readers_search_for_is_in_a_heading(term):
    pages = [page.read_text("utf-8") for page in PAGES if page.parent != ROOT]
    text = re.sub(r"^```.*?^```$", "", "\n".join(pages), flags=re.MULTILINE | re.DOTALL)
    assert re.search(rf"^#+ .*\b{re.escape(term)}\b", text, re.MULTILINE | re.IGNORECASE)


def test_the_guide_lists_every_code_of_a_finding():
    sources = (ROOT / "safeload" / "checking").glob("*.py")
    kinds = "adapter|folder|gguf|file|index|model|schema|array|layers|value|quantization|tensor|dtype|head|source"
    used = {code for path in sources for code in re.findall(rf'"((?:{kinds})\.[a-z_]+)"', path.read_text("utf-8"))}
    page = (ROOT / "docs" / "guide" / "validating.md").read_text("utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z]+\.[a-z_]+)`", rows)) == used - {"index.json"}


def test_the_guide_lists_every_label_of_a_packed_tensor():
    """Numbers in labels, such as the length of a group, may be others."""
    found = set()
    for fixture in FIXTURES.values():
        with safeload.open(fixture.path) as checkpoint:
            found |= {re.sub(r"\d+", "0", info.dtype) for info in checkpoint.tensors.values() if len(info.parts) > 1}
    page = (ROOT / "docs" / "guide" / "quantized-checkpoints.md").read_text("utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| "))
    assert len(found) > 12
    assert found <= {re.sub(r"\d+", "0", text) for text in re.findall(r"`([^`]+)`", rows)}


def _limits():
    """Name to values of the constants of the code: those of several formats share a name."""
    found = {}
    for path in (*(ROOT / "safeload").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]")):
        text = path.read_text("utf-8").replace("(uint64_t)", "")
        for name, value in re.findall(
            r"^(?:#define )?((?:SL_[A-Z]+_)?MAX_\w+|\w*MOST\w*|WHOLE)(?: =)? \(?([0-9_]+(?: << \d+)?)\b",
            text,
            re.MULTILINE,
        ):
            number, _, shift = value.replace("_", "").partition(" << ")
            found.setdefault(name, set()).add(int(number) << int(shift or 0))
    return found


def test_the_threat_model_has_the_limits_of_the_code():
    page = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
    units = {"": 1, " MiB": 1 << 20, " GiB": 1 << 30}
    limits = _limits()
    said = re.findall(r"([\d,]+)( [MG]iB)?[a-z ]*\(`(\w+)`\)", page)
    assert len(said) == len(re.findall(r"\(`[A-Z_]+`\)", page)) > 15
    wrong = [
        (name, number) for number, unit, name in said if int(number.replace(",", "")) * units[unit] not in limits[name]
    ]
    assert not wrong


def _public():
    """Every public function and class, and the public methods of these, by name."""
    modules = [
        safeload,
        safeload.numpy,
        safeload.torch,
        safeload.jax,
        safeload.remote,
        safeload.gguf,
        safeload.moon,
        safeload.plugins,
    ]
    for place, name in [(module, name) for module in modules for name in module.__all__]:
        value = getattr(place, name)
        if callable(value):
            yield f"{place.__name__}.{name}", value
        for method in vars(value) if inspect.isclass(value) and not issubclass(value, BaseException) else ():
            function = getattr(value, method)
            internal = method.startswith("_") or ":meta private:" in (inspect.getdoc(function) or "")
            if callable(function) and not internal:
                yield f"{place.__name__}.{name}.{method}", getattr(value, method)


def test_every_public_name_says_what_it_takes_gives_and_raises():
    for public, thing in _public():
        text = inspect.getdoc(thing)
        assert text, public
        if inspect.isclass(thing):
            continue  # its attributes are what its constructor takes
        signature = inspect.signature(thing)
        parameters = [name for name in signature.parameters if name != "self"]
        if len(parameters) > 1:  # of a single one the summary tells
            missing = [name for name in parameters if not re.search(rf"^ +{name}: ", text, re.MULTILINE)]
            assert not missing, public
            assert "Returns:" in text or signature.return_annotation == "None", public


def _documented():
    """The functions and classes of the reference, each with the sessions on its page."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = page.read_text("utf-8")
        sessions = "".join(re.findall(r"^```pycon$(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        for name in re.findall(r"^\.\. auto(?:function|class|exception):: ([\w.]+)", text, re.MULTILINE):
            yield name, sessions


def test_everything_in_the_reference_has_an_example():
    """In its docstring or on its page: the tests above run both."""
    entries = list(_documented())
    assert len(entries) > 100
    for name, sessions in entries:
        module, _, last = name.rpartition(".")
        docstring = inspect.getdoc(getattr(import_module(module), last))
        assert ">>> " in docstring or re.search(rf"\b{re.escape(last)}\b", sessions), name


def test_the_reference_has_every_public_name():
    reference = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^\.\. \w+:: ([\w.]+)", reference, re.MULTILINE))
    names = {f"safeload.{name}" for name in safeload.__all__ if not name.startswith("_")}
    places = ("numpy", "torch", "jax", "remote", "gguf", "moon", "plugins", "layouts")
    for module in (getattr(safeload, place) for place in places):
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert names <= listed
