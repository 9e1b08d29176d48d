"""The rules of the architecture as tests: what may include or import what (csrc/README.md)."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from builders import inside
from builders.paths import ROOT
from builders.sources import source
from builders.thorough import THOROUGH

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

CSRC = ROOT / "csrc"
CC, NM = shutil.which(os.environ.get("CC", "cc")), shutil.which("nm")
PACKAGE = ROOT / "safeload"

# Folders of csrc/ from the bottom up; those of one line do not know each other. The public headers stand below all of
# them, in this order, api.c above.
C_LAYERS = ["base", "platform", "kernels", "formats jobs"]
GROUND = ["sl_api.h", "safeload.h"]
TOP = {"api.c"}
SYSTEM_FILES = {"platform/posix.c", "platform/windows.c"}
STANDARD_HEADERS = {"stdarg.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
# Instructions of a processor, not of a system.
INTRINSICS = {
    "platform/cpu.c": {"cpuid.h", "intrin.h"},
    "kernels/codes.c": {"arm_neon.h", "emmintrin.h"},
    "kernels/copy2d.c": {"arm_neon.h", "emmintrin.h"},
    "kernels/isa.h": {"arm_neon.h", "immintrin.h"},
    "kernels/stream.c": {"emmintrin.h"},
}

# Packages and modules of safeload from the ground up: each imports only what stands on a lower line, lazy imports and
# those for types included; inside a package there is no circle. That is the whole rule.
PYTHON_LAYERS = (
    ("_version", "errors"),
    ("core",),
    ("models",),
    ("quant",),
    ("remote",),
    ("formats",),
    ("adapters",),
    ("frameworks",),
    ("compat",),
    ("conversion",),
    ("trust",),
    ("editing",),
    ("checking",),
    ("numpy", "torch", "jax", "gguf", "moon", "plugins", "layouts", "cluster", "as_safetensors"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
PYTHON_RANK = {name: rank for rank, names in enumerate(PYTHON_LAYERS) for name in names}

# The folder that may import nothing else of the package, and what it stands on.
CORE = re.compile(r"_version|errors|core\..*")

# The public modules. Tests reach all others through tests/builders/inside.py.
DOORS = {"numpy", "torch", "jax", "gguf", "moon", "plugins", "remote", "layouts", "cluster", "errors", "as_safetensors"}
INNER = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
INNER = {*INNER, "_core"} - DOORS - {"__init__", "__main__", "_version"}
# Names and seams that tests/builders/inside.py lists, and files with the mark `inner`: lower these when they shrink.
INSIDE_NAMES = 92  # one more since the tokenizer of llama.cpp is two modules
INNER_FILES = 11
# Methods that show a result and are written by hand: lower this, too.
SHOWN_BY_HAND = 33  # one more since adapters are extracted

C_FILES = sorted([*CSRC.rglob("*.c"), *CSRC.rglob("*.h")])
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def includes(path, brackets):
    pattern = rf"^\s*#\s*include\s*{brackets[0]}([^>\"]+){brackets[1]}"
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)


def c_name(path):
    return path.relative_to(CSRC).as_posix()


def c_layer(name):
    """The number of the layer that a file stands in."""
    if name in GROUND:
        return GROUND.index(name) - len(GROUND)
    if name in TOP:
        return len(C_LAYERS)
    return next(number for number, folders in enumerate(C_LAYERS) if name.partition("/")[0] in folders.split())


def assert_goes_down(name, target):
    """A file uses what stands in lower layers, and in its own folder."""
    same_folder = "/" in name and name.partition("/")[0] == target.partition("/")[0]
    assert c_layer(target) < c_layer(name) or same_folder, f"{name} uses {target}"


def circle(arrows):
    """Files that use each other, in order; none where there is no circle."""
    done, path = set(), []

    def walk(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for target in sorted(arrows[name]):
            if found := walk(target):
                return found
        path.pop()
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := walk(name))), [])


def test_every_c_file_stands_in_a_layer():
    folders = {folder for line in C_LAYERS for folder in line.split()}
    for name in map(c_name, C_FILES):
        assert name in {*GROUND, *TOP} or (name.partition("/")[0] in folders and name.count("/") == 1), name


def test_c_includes_go_down():
    for path in C_FILES:
        for header in includes(path, '""'):
            assert (CSRC / header).is_file(), f"{path}: {header} is not a path from csrc/"
            assert_goes_down(c_name(path), header)


def test_c_includes_make_no_circle():
    assert circle({c_name(path): includes(path, '""') for path in C_FILES}) == []


def symbols(objects, *options):
    """The symbols of each object file, by its path."""
    done = subprocess.run([NM, "-P", "-A", *options, *objects], capture_output=True, text=True, check=True)
    names = {object: set() for object in objects}
    for line in done.stdout.splitlines():
        path, _, symbol = line.partition(": ")
        names[Path(path)].add(symbol.split()[0])
    return names


def calls(folder):
    """For each source the sources that define what it calls or reads, as the linker sees them."""
    sources = {c_name(path): folder / f"{k}.o" for k, path in enumerate(C_FILES) if path.suffix == ".c"}
    # Compiled once: the compiler spends most of its time on this header. Other processors do not have it.
    header = folder / "intrinsics.h"
    header.write_text("#include <immintrin.h>\n", encoding="utf-8")
    subprocess.run([CC, "-O0", header, "-o", f"{header}.gch"], stderr=subprocess.DEVNULL, check=False)
    for name, object in sources.items():
        intrinsic = Path(f"{header}.gch").exists() and "kernels/isa.h" in includes(CSRC / name, '""')
        before = ["-include", header] if intrinsic else []
        subprocess.run([CC, "-O0", *before, "-I", CSRC, "-c", CSRC / name, "-o", object], check=True)
    defined, used = (symbols(sources.values(), *options) for options in (["-g", "--defined-only"], ["-u"]))
    owners = {symbol: name for name, object in sources.items() for symbol in defined[object]}
    return {name: {owners[s] for s in used[object] if s in owners} for name, object in sources.items()}


@pytest.mark.skipif(not THOROUGH, reason="compiles the core once more: the step lint of .ci/run does it")
@pytest.mark.skipif(CC is None or NM is None or sys.platform == "win32", reason="needs a C compiler and nm")
@pytest.mark.ahead(function=calls)
def test_c_calls_go_down(begun_ahead):
    """And make no circle."""
    calls = begun_ahead
    assert "jobs/job.c" in calls["jobs/op_copy.c"]  # or nothing has been found
    for name, targets in calls.items():
        for target in targets:
            assert_goes_down(name, target)
    assert circle(calls) == []


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_every_c_file_begins_with_what_it_is():
    untitled = [path for path in C_FILES if not re.match(r"/\* [A-Z]", path.read_text(encoding="utf-8"))]
    assert untitled == []


def test_every_include_is_seen():
    """The two patterns above miss none: not by a macro, not by white space, not in another suffix."""
    for path in C_FILES:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"\s*#\s*include\b", line)]
        assert len(lines) == len(includes(path, '""')) + len(includes(path, "<>")), path.name


def test_only_the_platform_files_know_the_system():
    for path in C_FILES:
        if c_name(path) not in SYSTEM_FILES:
            assert set(includes(path, "<>")) <= STANDARD_HEADERS | INTRINSICS.get(c_name(path), set()), path


def test_the_cdef_has_no_directive_but_integer_defines():
    for line in (CSRC / "sl_api.h").read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#"):
            assert re.fullmatch(r"#define SL_\w+ -?\d+\s*(/\*.*)?", line), line


def without_comments(path):
    return re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def definitions(name, path):
    return len(re.findall(rf"^[a-z][^\n;]*\b{name}\([^;{{]*\)\s*{{", without_comments(path), re.MULTILINE))


def test_every_declared_function_is_defined_once_for_each_system():
    declared = re.findall(r"\b(sl_\w+)\([^;{]*\);", without_comments(CSRC / "sl_api.h"))
    assert len(declared) > 10
    sources = [path for path in C_FILES if c_name(path) not in SYSTEM_FILES]
    for system in ("posix", "windows"):
        for name in declared:
            found = [p.name for p in (*sources, CSRC / "platform" / f"{system}.c") for _ in range(definitions(name, p))]
            assert len(found) == 1, (name, system, found)


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


PYTHON_NAMES = frozenset(map(module_name, PYTHON_FILES))


@functools.cache
def imported(path):
    """Modules of ours that a file imports, in whatever way it says so."""
    return tuple(_imports(path))


def _imports(path):
    package = ("safeload", *path.relative_to(PACKAGE).parts[:-1])
    for node in source(path).imports:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = [*package[: len(package) - (node.level - 1)]] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            assert name != "safeload" or isinstance(node, ast.ImportFrom), "the package imports itself from above"
            target = name.removeprefix("safeload.")
            if target != name and (target in PYTHON_NAMES or target.startswith("_core")):
                yield target
            elif name == "safeload" and node.level == 0:
                yield "__init__"


def layer_of(name):
    """The line of the list that a module stands on, by its package."""
    return PYTHON_RANK[name.partition(".")[0]]


def test_every_python_module_stands_on_a_layer():
    assert {name.partition(".")[0] for name in PYTHON_NAMES} == set(PYTHON_RANK)


def test_the_binding_is_named_in_one_module_only():
    """So that no computed import reaches it either."""
    named = re.compile(r"(?<!numpy\.)\b_core\b")
    assert [path.name for path in PYTHON_FILES if named.search(path.read_text(encoding="utf-8"))] == ["native.py"]


def test_python_imports_go_down():
    for path in PYTHON_FILES:
        name = module_name(path)
        for target in imported(path):
            if target.startswith("_core"):
                assert name == "core.native"
            elif target.partition(".")[0] != name.partition(".")[0]:
                assert layer_of(target) < layer_of(name), f"{name} imports {target}"


def test_the_core_imports_nothing_else_of_the_package():
    """It finds the rest by the rows of the registry, which are strings; lazy imports and those for types count."""
    core = {name for name in PYTHON_NAMES if CORE.fullmatch(name)}
    packages = {module_name(path) for path in PYTHON_FILES if path.name == "__init__.py"}
    for path in PYTHON_FILES:
        name = module_name(path)
        if name in core:
            outward = set(imported(path)) - core - packages
            assert not {target for target in outward if not target.startswith("_core")}, name


def test_the_core_names_the_rest_in_rows_of_the_registry_only():
    named = re.compile(r'"\.{1,2}[a-z_]+(?:\.[a-z_]+)+"|"\.\.[a-z_]+"|import_module\(')
    core = [path for path in PYTHON_FILES if CORE.fullmatch(module_name(path))]
    found = {module_name(path) for path in core if named.search(path.read_text(encoding="utf-8"))}
    # `text` and `progress` name optional packages.
    assert found == {"core.registry", "core.runtime", "core.text", "core.progress"}


def test_no_circle_inside_a_package():
    graph = {module_name(path): {t for t in imported(path) if not t.startswith("_core")} for path in PYTHON_FILES}
    packages = {module_name(path) for path in PYTHON_FILES if path.name == "__init__.py"}
    # An import of a module names its package too, whose __init__ has nothing in it.
    TopologicalSorter({name: targets - packages - {name} for name, targets in graph.items()}).prepare()
    for path in PYTHON_FILES:
        if path.name == "__init__.py" and path.parent not in (PACKAGE, PACKAGE / "cli", PACKAGE / "remote"):
            assert source(path).body == 1, f"{path}: a docstring and nothing else"


READMES = pytest.mark.parametrize("readme", sorted(PACKAGE.glob("*/README.md")), ids=lambda readme: readme.parent.name)


@READMES
def test_the_readme_of_a_folder_names_files_that_are_there(readme):
    for name in re.findall(r"`([\w/]+\.py)`", readme.read_text("utf-8")):
        assert (readme.parent / name).is_file() or (PACKAGE / name).is_file(), name


@READMES
def test_the_readme_of_a_folder_names_the_folders_that_are_imported(readme):
    folder, line = readme.parent, re.search(r"\*\*May import\*\* ([^.]*)", readme.read_text("utf-8"))[1]
    named = set(re.findall(r"`(\w+)`", line))
    allowed = {path.name for path in PACKAGE.iterdir()} - named if line.startswith("all folders") else named
    found = {module.partition(".")[0] for path in folder.rglob("*.py") for module in imported(path)}
    assert {name for name in found if (PACKAGE / name).is_dir()} - {folder.name} <= allowed


def test_a_name_beside_its_file_is_in_that_file():
    for page in (ROOT / "CONTRIBUTING.md", *PACKAGE.glob("*/README.md")):
        for name, file in re.findall(r"`(\w+)`\s\(`([\w/]+\.py)`\)", page.read_text("utf-8")):
            path = next(path for folder in (page.parent, ROOT, PACKAGE) if (path := folder / file).is_file())
            assert re.search(rf"\b{name}\b", path.read_text("utf-8")), f"{page}: {name} is not in {file}"


def test_only_the_catalog_tells_a_checkpoint_from_a_dict():
    asks = re.compile(r"isinstance\([^)]*\bCheckpoint\b")
    found = {module_name(path) for path in PYTHON_FILES if asks.search(path.read_text(encoding="utf-8"))}
    assert found == {"conversion.catalog"}


def test_nobody_uses_a_private_member_of_a_checkpoint():
    """In modules that have one: a look at the text, which knows no types."""
    own = set(re.findall(r"\bself\.(_[a-z]\w*)", (PACKAGE / "core/checkpoint.py").read_text(encoding="utf-8")))
    assert len(own) > 5
    for path in PYTHON_FILES:
        if path != PACKAGE / "core/checkpoint.py" and {"core.checkpoint", "conversion.catalog"} & set(imported(path)):
            used = re.findall(r"\b(?!self\b|cls\b)\w+\.(_[a-z]\w*)", path.read_text(encoding="utf-8"))
            assert not own & set(used), path


def test_a_module_has_at_most_1000_lines():
    lengths = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PYTHON_FILES}
    assert {name: length for name, length in lengths.items() if length > 1000} == {}


def test_a_function_has_at_most_5_positional_parameters():
    """Without self."""
    functions = [(module_name(path), *function) for path in PYTHON_FILES for function in source(path).positional]
    assert len(functions) > 1000
    assert [(module, name) for module, name, parameters in functions if parameters > 5] == []


def test_the_name_of_a_class_without_underscore_is_used_once():
    places = {}
    for path in PYTHON_FILES:
        for name, line in source(path).classes:
            if not name.startswith("_"):
                places.setdefault(name, []).append(f"{module_name(path)}:{line}")
    assert len(places) > 100
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_results_derive_what_they_show():
    """From their columns, see core/showing.py: few classes write one of these methods by hand."""
    shown = {"rows", "to_dict", "lines", "__str__", "_repr_html_"}
    by_hand = [
        f"{module_name(path)}: {kind}.{method}"
        for path in PYTHON_FILES
        for kind, method in source(path).methods
        if method in shown
    ]
    assert "core.showing: Result.rows" in by_hand
    assert len(by_hand) <= SHOWN_BY_HAND, by_hand


def test_a_listing_of_the_package_fits_twelve_lines():
    names = {path.name for path in PACKAGE.iterdir() if path.name[0] not in "_." and path.suffix != ".so"}
    assert len(names - {"py.typed"}) <= 24, names


def test_every_bench_is_run_by_the_report():
    text = (ROOT / "benches" / "report.py").read_text(encoding="utf-8")
    names = re.search(r"^BENCHES = \((.*?)^\)", text, re.M | re.S)[1]
    assert {path.stem for path in (ROOT / "benches").glob("bench_*.py")} == set(re.findall(r'"(bench_\w+)"', names))


def test_import_brings_little_more_than_numpy():
    """What takes milliseconds comes when it is first needed, also where `open` and `safe_open` are."""
    code = "import sys, numpy; before = set(sys.modules); import safeload; safeload.open, safeload.safe_open; "
    code += "print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    late = {"argparse", "json", "logging", "lzma", "ml_dtypes", "pathlib", "shutil", "textwrap", "zipfile"}
    assert not late & set(done.stdout.split())


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_only_the_frameworks_import_other_libraries(library):
    pattern = re.compile(rf"^\s*(?:import|from) {library}\b|import_module\([\"']{library}", re.MULTILINE)
    found = {module_name(path) for path in PYTHON_FILES if pattern.search(path.read_text(encoding="utf-8"))}
    assert all(name.startswith(f"frameworks.{library}_") for name in found), found


@pytest.mark.parametrize("engine", ["distributed", "dask", "loky", "mpi4py", "ray"])
def test_only_the_option_of_the_command_line_imports_an_engine(engine):
    pattern = re.compile(rf"^\s*(?:import|from) {engine}\b|import_module\([\"']{engine}", re.MULTILINE)
    found = {module_name(path) for path in PYTHON_FILES if pattern.search(path.read_text(encoding="utf-8"))}
    assert found == ({"cli.common"} if engine == "distributed" else set())


def test_import_alone_brings_no_numpy():
    """The module of a public name is imported with its first access."""
    code = "import sys, safeload; print('numpy' in sys.modules, 'numpy' in dir(safeload), len(safeload.__all__))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["False", "True"]


# ---- the tests ----


@functools.cache
def texts_of_tests():
    """The text of each program under tests/ but the one that may import inner modules."""
    paths = [path for path in sorted((ROOT / "tests").rglob("*")) if path.suffix in (".py", ".sh")]
    names = {path.relative_to(ROOT / "tests").as_posix(): path for path in paths}
    del names["builders/inside.py"]
    return {name: path.read_text(encoding="utf-8") for name, path in names.items()}


def inner_imports(text):
    """What a program under tests/ names of the inside: in imports, in texts of other programs and in patches."""
    text = text.replace("[safeload.formats]", "")  # the public group of entry points of plug-ins
    rooms = "|".join(sorted(INNER))
    remote = "|".join(path.stem for path in (PACKAGE / "remote").glob("[a-z]*.py"))  # below a public door
    found = [match[0] for match in re.finditer(rf"\bsafeload\.(?:({rooms})\b|remote\.({remote})\b)", text)]
    for match in re.finditer(r"from safeload import (\([^)]*\)|[^\n;]*)", text):
        found += [f"safeload {name}" for name in re.findall(r"(?<!as )\b\w+", match[1]) if name in INNER]
    return found


def test_only_one_file_of_the_tests_imports_the_inside():
    """So that a module that moves changes one file; ask `builders.inside` for a name, or test through a public one."""
    assert {"core", "formats", "trust", "conversion", "cli", "_core"} < INNER
    texts = texts_of_tests()
    assert len(texts) > 300
    assert {name: found for name, text in texts.items() if (found := inner_imports(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from SAFELOAD.core import dtypes",
        "import SAFELOAD.core.jobs as jobs",
        "from SAFELOAD import (\n    Checkpoint,\n    core,\n)",
        "    importlib.import_module('SAFELOAD.remote.places')",
        'monkeypatch.setattr("SAFELOAD.adapters.merge._TILE", 4)',
        'PROGRAM = "import sys; from SAFELOAD.cli import main; main()"',
        "SAFELOAD.conversion.destinations.Output",
    ],
)
def test_an_import_of_the_inside_is_found(text):
    assert inner_imports(text.replace("SAFELOAD", "safeload"))


def test_public_names_are_not_the_inside():
    text = (
        "import safeload.numpy, safeload.errors\nfrom safeload import Checkpoint, load as base, torch\nsafeload.check()"
    )
    assert inner_imports(text) == []


def defines(place):
    """Whether a module below safeload exists and has an attribute, by its text: some need torch to be imported."""
    module, _, attributes = place.partition(":")
    if module == "_core":
        return not attributes
    path = PACKAGE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    defined = r"^ *(?:def|class) {0}\b|^[\w, ]*\b{0}\b.* = |^[\w, ]*\b{0}: |import .*\b{0}\b|^    {0},"
    return all(re.search(defined.format(name), text, re.M) for name in attributes.split(".") if name)


def test_the_list_of_the_inside_only_shrinks():
    assert len(inside.NAMES) + len(inside.SEAMS) == INSIDE_NAMES
    assert [name for name, place in inside.NAMES.items() if not defines(place)] == []
    assert [name for name, places in inside.SEAMS.items() if not all(map(defines, places))] == []
    assert len({*inside.NAMES.values()}) == len(inside.NAMES)


def test_every_name_of_the_inside_is_used():
    used = set()
    for text in filter(re.compile(r"\binside\b").search, texts_of_tests().values()):
        for match in re.finditer(r"from builders\.inside import (\([^)]*\)|[^\n;]*)", text):
            used.update(re.findall(r"\w+", match[1]))
        used.update(re.findall(r"\binside\.(\w+)", text))
        for match in re.finditer(r"\binside\.(?:path|preload)\b([^)]*)\)", text):
            used.update(re.findall(r"\w+", match[1]))
        for match in re.finditer(r"\binside\.tune\((.*?)\)\n", text, re.S):
            used.update(re.findall(r"(\w+)=", match[1]))
    assert [name for name in (*inside.NAMES, *inside.SEAMS) if name not in used] == []


def test_few_files_are_about_machinery_that_goes():
    """A new test of the inside belongs to none of them: state what users see."""
    pattern = re.compile(r"\bmark\." + r"inner\b")
    marked = [name for name, text in texts_of_tests().items() if pattern.search(text)]
    assert len(marked) <= INNER_FILES, marked
