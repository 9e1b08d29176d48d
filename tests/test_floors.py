"""The rules of the architecture as tests: what may include or import what (csrc/README.md)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "safeload"

C_FLOORS = {
    0: ["sl_api", "safeload"],
    1: ["base", "error"],
    2: ["platform", "platform_posix", "platform_windows", "cpu", "arena"],
    3: [
        "json",
        "sort",
        "dtype",
        "kernel",
        "kernel_scalar",
        "kernel_avx2",
        "kernel_avx512",
        "kernel_neon",
    ],
    4: ["table"],
    5: ["format_safetensors"],
    6: ["parallel", "job"],
    7: ["api"],
}
C_FLOOR_OF = {name: floor for floor, names in C_FLOORS.items() for name in names}
STANDARD_HEADERS = {"stdarg.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
# Instructions of a processor, not of a system.
INTRINSICS = {"cpu": {"cpuid.h", "intrin.h"}, "kernel_avx2": {"immintrin.h"}, "kernel_avx512": {"immintrin.h"}}
INTRINSICS["kernel_neon"] = {"arm_neon.h"}

# Modules of one floor in the order in which they may import each other.
PYTHON_FLOORS = {
    0: ["_version", "errors"],
    1: ["_native"],
    2: ["dtypes", "tensor", "files", "jobs", "slicing", "writer", "casting", "configuration"],
    3: ["formats", "formats.sniffing", "formats.safetensors", "formats.folder"],
    4: ["loading", "checkpoint", "handle"],
    6: ["numpy", "__init__", "cli.text", "cli.info", "cli", "__main__"],
}
PYTHON_RANK = {name: (floor, k) for floor, names in PYTHON_FLOORS.items() for k, name in enumerate(names)}

C_FILES = sorted([*CSRC.glob("*.c"), *CSRC.glob("*.h")])
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def includes(path, brackets):
    return re.findall(rf"^\s*#\s*include\s*{brackets[0]}([^>\"]+){brackets[1]}", path.read_text(), re.MULTILINE)


def test_every_c_file_stands_on_a_floor():
    assert {path.stem for path in C_FILES} == set(C_FLOOR_OF)


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_c_includes_go_down(path):
    floor = C_FLOOR_OF[path.stem]
    for header in includes(path, '""'):
        stem = header.removesuffix(".h")
        assert C_FLOOR_OF[stem] < floor or (C_FLOOR_OF[stem] == floor and stem in C_FLOORS[floor]), header


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_only_the_platform_files_know_the_system(path):
    if not path.stem.startswith("platform_"):
        assert set(includes(path, "<>")) <= STANDARD_HEADERS | INTRINSICS.get(path.stem, set())


def test_the_cdef_has_no_directive_but_integer_defines():
    for line in (CSRC / "sl_api.h").read_text().splitlines():
        if line.lstrip().startswith("#"):
            assert re.fullmatch(r"#define SL_\w+ -?\d+\s*(/\*.*)?", line), line


def test_every_declared_function_is_defined_once():
    text = re.sub(r"/\*.*?\*/", "", (CSRC / "sl_api.h").read_text(), flags=re.DOTALL)
    declared = re.findall(r"(sl_\w+)\([^;{]*\);", text)
    source = "\n".join(p.read_text() for p in CSRC.glob("*.c") if p.name != "platform_windows.c")
    assert len(declared) > 10
    for name in declared:
        assert len(re.findall(rf"^[a-z][^\n;]*\b{name}\([^;]*?\) {{", source, re.MULTILINE)) == 1, name


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


def imported(path):
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = list(package[: len(package) - (node.level - 1)])
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if target in PYTHON_RANK or target == "_core":
                yield target
            for alias in node.names:
                full = f"{target}.{alias.name}".strip(".")
                if full in PYTHON_RANK:
                    yield full


def test_every_python_module_stands_on_a_floor():
    assert {module_name(path) for path in PYTHON_FILES} == set(PYTHON_RANK)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=module_name)
def test_python_imports_go_down(path):
    name = module_name(path)
    for target in imported(path):
        if target == name:  # a package that imports its own modules
            continue
        if target == "_core":
            assert name == "_native"
        else:
            assert PYTHON_RANK[target] < PYTHON_RANK[name], f"{name} imports {target}"
