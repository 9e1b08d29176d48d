"""The rules of the architecture as tests: what may include or import what (csrc/README.md)."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "safeload"

# Floors of groups of files. A file includes headers of the floors below it and, within its group, of itself and those
# named before it.
C_FLOORS = {
    0: [["sl_api", "safeload"]],
    1: [["base", "error"]],
    2: [["platform", "platform_posix", "platform_windows", "cpu", "arena"]],
    3: [
        ["utf8", "json"],
        ["reader"],
        ["sort"],
        ["copy2d"],
        [
            *("dtype", "scalar", "kernel", "kernel_scalar", "kernel_avx2", "kernel_avx512", "kernel_neon"),
            *("quant", "quant_scalar", "quant_x86", "quant_avx2", "quant_avx512", "quant_neon", "dequant"),
            *("stats", "stats_scalar", "stats_avx2", "stats_avx512", "stats_neon", "stats_histogram"),
        ],
    ],
    4: [["table"]],
    5: [["format_safetensors"], ["format_gguf"]],
    6: [["parallel", "job", "job_grid", "job_values", "job_stats"]],
    7: [["api"]],
}
C_PLACE = {
    stem: (floor, group, rank)
    for floor, groups in C_FLOORS.items()
    for group, stems in enumerate(groups)
    for rank, stem in enumerate(stems)
}
STANDARD_HEADERS = {"stdarg.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
# Instructions of a processor, not of a system.
INTRINSICS = {
    "cpu": {"cpuid.h", "intrin.h"},
    "copy2d": {"emmintrin.h"},
    "kernel_neon": {"arm_neon.h"},
    "quant_neon": {"arm_neon.h"},
    "stats_neon": {"arm_neon.h"},
}
for _stem in ("kernel_avx2", "kernel_avx512", "quant_x86", "quant_avx2", "quant_avx512", "stats_avx2", "stats_avx512"):
    INTRINSICS[_stem] = {"immintrin.h"}

_CLI = [f"cli.{name}" for name in ("common", "info", "check", "stats", "convert", "diff", "bench")]
_CLI += [f"cli.{name}" for name in ("report_plots", "report_page", "report")]

# Modules of one floor in the order in which they may import each other.
PYTHON_FLOORS = {
    0: ["_version", "errors", "text", "expressions", "log"],
    1: ["_native"],
    2: [
        "dtypes",
        "tensor",
        "files",
        "jobs",
        "slicing",
        "writer",
        "casting",
        "quantized",
        "strided",
        "lazy",
        "configuration",
    ],
    3: [
        *("formats", "formats.sniffing", "formats.safetensors", "formats.quantized"),
        *("formats.pickle_machine", "formats.pickle_keys", "formats.pickle_opcodes", "formats.unpickler"),
        "formats.numpy_globals",
        *("formats.torch_globals", "formats.flattening", "formats.numpy_arrays", "formats.torch_tensors"),
        *(
            "formats.archive",
            "formats.torch_storages",
            "formats.torch_package",
            "formats.torch_zip",
            "formats.torch_legacy",
            "formats.plain_pickle",
            "formats.moon",
            "formats.npz",
            "formats.gguf_values",
            "formats.gguf",
            "formats.gguf_writing",
            "formats.opening",
            "formats.folder",
        ),
    ],
    4: ["loading", "checkpoint", "handle"],
    5: [
        *("sources", "reading", "schema", "quantization", "stacking", "statistics", "conversion"),
        *("checks", "checks.findings", "checks.names", "checks.files", "checks.values"),
        *("validation", "manifest", "differences"),
    ],
    6: ["numpy", "moon", "gguf", "layouts", "__init__", *_CLI, "cli", "__main__"],
}
PYTHON_RANK = {name: (floor, k) for floor, names in PYTHON_FLOORS.items() for k, name in enumerate(names)}

C_FILES = sorted([*CSRC.glob("*.c"), *CSRC.glob("*.h")])
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def includes(path, brackets):
    return re.findall(rf"^\s*#\s*include\s*{brackets[0]}([^>\"]+){brackets[1]}", path.read_text(), re.MULTILINE)


def test_every_c_file_stands_on_a_floor():
    assert {path.stem for path in C_FILES} == set(C_PLACE)


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_c_includes_go_down(path):
    floor, group, rank = C_PLACE[path.stem]
    for header in includes(path, '""'):
        assert (CSRC / header).is_file(), header
        below, its_group, its_rank = C_PLACE[header.removesuffix(".h")]
        own = path.suffix == ".c" and header == f"{path.stem}.h"
        assert below < floor or own or (below == floor and its_group == group and its_rank < rank), header


def test_every_include_is_seen():
    """The two patterns above miss none: not by a macro, not by white space, not in another suffix."""
    for path in C_FILES:
        lines = [line for line in path.read_text().splitlines() if re.match(r"\s*#\s*include\b", line)]
        assert len(lines) == len(includes(path, '""')) + len(includes(path, "<>")), path.name


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_only_the_platform_files_know_the_system(path):
    if not path.stem.startswith("platform_"):
        assert set(includes(path, "<>")) <= STANDARD_HEADERS | INTRINSICS.get(path.stem, set())


def test_the_cdef_has_no_directive_but_integer_defines():
    for line in (CSRC / "sl_api.h").read_text().splitlines():
        if line.lstrip().startswith("#"):
            assert re.fullmatch(r"#define SL_\w+ -?\d+\s*(/\*.*)?", line), line


def without_comments(path):
    return re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def definitions(name, path):
    return len(re.findall(rf"^[a-z][^\n;]*\b{name}\([^;{{]*\)\s*{{", without_comments(path), re.MULTILINE))


def test_every_declared_function_is_defined_once_for_each_system():
    declared = re.findall(r"\b(sl_\w+)\([^;{]*\);", without_comments(CSRC / "sl_api.h"))
    assert len(declared) > 10
    sources = [path for path in C_FILES if not path.stem.startswith("platform_")]
    for system in ("posix", "windows"):
        for name in declared:
            found = [p.name for p in (*sources, CSRC / f"platform_{system}.c") for _ in range(definitions(name, p))]
            assert len(found) == 1, (name, system, found)


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


def imported(path):
    """Modules of ours that a file imports, in whatever way it says so."""
    package = ("safeload", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - (node.level - 1)]] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            assert name != "safeload" or isinstance(node, ast.ImportFrom), "the package imports itself from above"
            target = name.removeprefix("safeload.")
            if target != name and (target in PYTHON_RANK or target.startswith("_core")):
                yield target
            elif name == "safeload" and node.level == 0:
                yield "__init__"


def test_every_python_module_stands_on_a_floor():
    assert {module_name(path) for path in PYTHON_FILES} == set(PYTHON_RANK)


def test_the_binding_is_named_in_one_module_only():
    """So that no computed import reaches it either."""
    assert [path.name for path in PYTHON_FILES if re.search(r"(?<!numpy\.)\b_core\b", path.read_text())] == [
        "_native.py"
    ]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=module_name)
def test_python_imports_go_down(path):
    name = module_name(path)
    for target in imported(path):
        if target == name:  # a package that imports its own modules
            continue
        if target.startswith("_core"):
            assert name == "_native"
        else:
            assert PYTHON_RANK[target] < PYTHON_RANK[name], f"{name} imports {target}"


def test_every_bench_has_a_section_in_the_report():
    text = (ROOT / "benches" / "report.py").read_text()
    assert {path.stem for path in (ROOT / "benches").glob("bench_*.py")} == set(
        re.findall(r'^    "(bench_\w+)":', text, re.M)
    )


def test_import_brings_little_more_than_numpy():
    """What takes milliseconds comes when it is first needed: `import safeload` is to take 1.15 of numpy at most."""
    code = "import sys, numpy; before = set(sys.modules); import safeload; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    late = {"argparse", "json", "logging", "lzma", "ml_dtypes", "pathlib", "shutil", "textwrap", "zipfile"}
    assert not late & set(done.stdout.split())
