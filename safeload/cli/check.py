"""The commands that read values: ``safeload check``, ``stats``, ``diff`` and ``report``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from ..core import names, packing
from ..core.showing import plain
from ..core.text import plural, printable, size
from . import common
from .parsers import (
    ADAPTER,
    CACHE,
    DASK,
    JSON,
    JSON_LINES,
    OF_SEVERAL,
    OPENING,
    PATHS,
    PATTERNS,
    RECURSIVE,
    STATUS,
    THREADS,
    argument,
    at_least,
    command,
    flag,
    one_of,
    path,
    selection,
)

if TYPE_CHECKING:
    from ..checking.findings import CheckReport

# Options of the commands that read all values.
_READING = (*OPENING, THREADS, CACHE, DASK)


# ---- check ----


def _schemas() -> list[str]:
    from ..models.family import with_schema  # imported here: only completion needs it

    return ["auto", "none", *with_schema()]


@command(
    "Find faults in weights: files that violate their format, missing shards, incomplete downloads, "
    "wrong CRC-32 in zip archives, NaN and infinity, names and shapes that differ from config.json, missing "
    "layers, bad scales of quantized tensors. Warn about values out of range, matrices of a single value and mixed "
    "dtypes. List the parts that could not be checked.",
    """examples:
  safeload check Llama-3.2-1B/
  safeload check model.safetensors --config config.json --schema llama
  safeload check suspicious.pth --unknown-globals inert --range -10 10
  safeload check llama.gguf --source Llama-3.2-1B/
  safeload check my-lora/ --base Llama-3.2-1B/
  safeload check -r models/ --json > results.jsonl
  safeload check Llama-3.2-1B/ --json | jq .errors""",
    PATHS,
    RECURSIVE,
    argument("--config", "FILE", "use this config.json instead of the folder's own"),
    argument(
        "--schema",
        "NAME",
        'expected tensors: "auto" (from the config), "none", or the name of a schema',
        suggested=_schemas,
        default="auto",
    ),
    argument(
        "--range",
        ("LOW", "HIGH"),
        "warn about values outside this range; default: -128 to 128, for norms -4096 to 4096",
        nargs=2,
        type=float,
    ),
    argument("--source", "SOURCE", "find what a conversion lost or changed of this source, with the cause"),
    ADAPTER,
    argument("--base", "BASE", "find what does not fit this model, if PATH is a LoRA adapter"),
    argument("--parameters", "N", "expected number of elements in all tensors", type=at_least(0)),
    one_of(
        argument("--scale", "X", "expected scale of int8 tensors", type=at_least(0, float)),
        argument("--absmax", "X", "expected absmax of int8 tensors, 127 times their scale", type=at_least(0, float)),
    ),
    flag("--structure", "check only files, names, shapes and sizes; read no values"),
    *PATTERNS,
    flag("--strict", "treat warnings as errors, except value.constant and value.zero"),
    *_READING,
    JSON_LINES,
    status=f"{STATUS} {OF_SEVERAL} With --strict, warnings other than value.constant and value.zero count as errors.",
)
def check(options: argparse.Namespace) -> int:
    """Print the findings about ``options.paths``."""
    from ..checking.check import settings, validate_path
    from ..checking.findings import HARMLESS_WARNINGS
    from ..checking.info import misfits_of

    common.refuse_several(options, "parameters", "source")
    if options.adapters is not None and options.source is None:
        raise ValueError("--adapter needs --source: the model into which the adapter was merged")
    limits = common.given(options, "parameters scale absmax")
    if options.range is not None:
        limits["low"], limits["high"] = options.range
    schema = None if options.schema == "none" else options.schema
    repeated = options.source is not None or options.base is not None

    def examine(path: str, executor: Any) -> common.Outcome:
        reading = common.read_again(path) if repeated else nullcontext(common.source(path))
        with reading as place:
            with common.bar("check") as progress:
                same = {"executor": executor, "progress": progress, **common.given(options, "config only drop threads")}
                request = settings(schema=schema, limits=limits, values=not options.structure, **same)
                report = validate_path(place, common.given(options, common.OPENED), request)
            if options.source is not None:
                add_losses(report, place, options)
            if options.base is not None:
                report.add(misfits_of(place, options.base, **common.given(options, "storage_options")))
        refused = options.strict and any(finding.code not in HARMLESS_WARNINGS for finding in report.warnings)
        line = common.in_options("; ".join([report.verdict, *map(str, report.errors[:1])]))
        return int(not report.ok or refused), line, report.to_dict, partial(_print_report, report)

    return common.for_each(options, examine)


def add_losses(report: CheckReport, path: Any, options: argparse.Namespace) -> None:
    """Add the losses and changes of a conversion of ``options.source``."""
    from .. import open
    from ..checking.proof import findings_of

    opened = open(path, **common.given(options, "root unknown_globals storage_options"))
    with opened as result, common.bar("compare") as progress:
        same = common.given(options, "only drop adapters storage_options threads")
        ignored = [text.partition("=")[0] for text in getattr(options, "metadata", None) or ()]
        report.add(findings_of(result, options.source, progress=progress, ignored=ignored, **same))


def _print_report(report: CheckReport) -> None:
    paint = common.painter()
    for line in map(common.in_options, report.lines(common.columns())):
        kind, rest = line[:7], line[7:]
        if kind.rstrip() in ("error", "warning", "note") and rest.startswith("  "):
            line = paint(kind, "dim" if kind.startswith("note") else kind.rstrip()) + rest
        elif line == report.verdict:
            line = paint(line, "error" if not report.ok else "warning" if report.warnings else "good")
        print(line)
    if report.tensors:
        if report.errors or report.warnings or report.notes:
            print()
        print(paint(f"checked: {printable(report.checked)}, {report.seconds:.1f} s", "dim"))


# ---- stats ----

_STATS_ROWS = 100  # on a terminal


@command(
    "Show minimum, maximum, mean and standard deviation of the finite values of each tensor, the peak (absmax / std), "
    "the share of outliers, and the numbers of NaN, infinite and zero values. Outliers reach the first power of two "
    "from 6 times the root mean square. Quantized tensors are dequantized first.",
    """examples:
  safeload stats model.safetensors
  safeload stats Llama-3.2-1B/ --only '*norm*' --sort absmax
  safeload stats Llama-3.2-1B/ --sort outliers --limit 20
  safeload stats model.safetensors --histogram --only 'h.0.*'
  safeload stats model.safetensors --json | jq '.tensors[] | select(.nan > 0)'""",
    PATHS,
    RECURSIVE,
    *selection(("name", "min", "max", "absmax", "mean", "std", "peak", "outliers", "nan", "inf", "zeros"), _STATS_ROWS),
    flag("--histogram", "also show the distribution of absolute values by powers of two"),
    *_READING,
    JSON_LINES,
    status=f"{STATUS} {OF_SEVERAL}",
)
def stats(options: argparse.Namespace) -> int:
    """Print the statistics of ``options.paths``."""
    return common.for_each(options, partial(_statistics, options))


def _statistics(options: argparse.Namespace, path: str, executor: Any) -> common.Outcome:
    from ..checking.stats import lines_of, stats

    with common.open_path(path, options) as opened, common.bar("stats") as progress:
        same = common.given(options, "only drop threads")
        results = stats(opened, histogram=True, executor=executor, progress=progress, **same)
    rows = list(results.items())
    if options.sort == "name":
        rows.sort(key=lambda row: names.natural_key(row[0]))
    elif options.sort is not None:
        rows.sort(key=lambda row: (not math.isnan(x := getattr(row[1], options.sort)), x), reverse=True)  # NaN last

    def as_json() -> dict[str, Any]:
        tensors = []
        for name, s in rows[: options.limit]:
            histogram = s.histogram if options.histogram else None
            spread = plain({"peak": s.peak, "outliers": s.outliers})
            tensors.append({"name": name, **s._replace(histogram=histogram).to_dict(), **spread})
        return {"path": common.shown(path), "tensors": tensors}

    def show() -> None:
        first = rows[: common.most_rows(options, _STATS_ROWS)]
        common.print_lines(lines_of(first, common.columns(), histogram=options.histogram))
        if len(first) < len(rows):
            print(f"... and {plural(len(rows) - len(first), 'tensor')} more{common.hint(options)}")

    return 0, results.summary, as_json, show


# ---- diff ----

_DIFF_ROWS = 40  # of each list on a terminal


@command(
    "List tensors that only one of two checkpoints has, and different shapes and dtypes. For each "
    "tensor in both, show the largest difference, the RMS difference, the relative change and the cosine; for each "
    "layer, the relative change. Tensors that differ only in the size of their first axis are compared up to the "
    "last common row. Formats and dtypes may differ; quantized tensors are dequantized first. A model of transformers "
    "and its GGUF file are compared under published names, and differences of quantized tensors are judged by format.",
    """examples:
  safeload diff old.safetensors new.safetensors
  safeload diff Llama-3.2-1B/ llama-q4_0.safetensors --only '*.mlp.*' --sort rms
  safeload diff Llama-3.2-1B/ llama-q4_k_m.gguf
  safeload diff model.pth model.safetensors --tolerance 1e-3 && echo close""",
    path("a"),
    path("b"),
    argument("--tolerance", "X", "ignore differences up to X, and different dtypes", type=at_least(0, float)),
    *selection(
        ("name", "max", "rms", "relative", "cosine", "unequal"),
        _DIFF_ROWS,
        "non-finite values, then the largest difference",
    ),
    *_READING,
    JSON,
    status="0 equal (with --tolerance: equal names and shapes, and values within the tolerance), 1 different, or a "
    "file is bad, 2 wrong usage.",
)
def diff(options: argparse.Namespace) -> int:
    """Print the differences between ``options.a`` and ``options.b``."""
    from .. import diff

    common.check_once([options.a, options.b])
    with (
        common.open_path(options.a, options) as a,
        common.open_path(options.b, options) as b,
        common.running(options, "diff") as how,
    ):
        report = diff(a, b, **common.given(options, "only drop stored"), **how)
    good = report.same if options.tolerance is None else report.within(options.tolerance)
    if options.json:
        judged = {} if options.tolerance is None else {"tolerance": options.tolerance, "within": good}
        common.print_json({**report.to_dict(), **judged})
    else:
        *lines, verdict = report.lines(
            common.columns(), common.most_rows(options, _DIFF_ROWS), options.sort, options.tolerance
        )
        common.print_lines([*lines, (verdict, "good" if good else "error")])
    return 0 if good else 1


# ---- report ----


@command(
    "Write one HTML page that works offline: findings of check, contents, size breakdown, size when "
    "loaded or quantized, absmax and standard deviation by layer, magnitude distribution, SHA-256 of the files, "
    "and with --quantize the quantization error.",
    """examples:
  safeload report model.safetensors -o report.html
  safeload report Llama-3.2-1B/ --quantize q4_0 -o llama.html
  safeload report 400GB/ --no-digest""",
    PATHS,
    RECURSIVE,
    argument(
        "-o --output",
        "FILE",
        "page to write, or - for stdout; default: report.html; for several models a folder; default: reports",
    ),
    flag("--overwrite", "replace the file of --output even if safeload did not write it"),
    argument(
        "--quantize",
        "SCHEME",
        f"also show the quantization error of each tensor: {', '.join(packing.SCHEMES)}",
        type=str.lower,
        choices=tuple(packing.SCHEMES),
    ),
    argument(
        "--no-digest",
        None,
        "omit SHA-256 digests, which need a second read; always omitted for URLs",
        dest="digest",
        action="store_false",
    ),
    *OPENING,
    THREADS,
    JSON_LINES,
    status=f"{STATUS} {OF_SEVERAL} A bad file gets a page, too. If SOURCE_DATE_EPOCH is set, it is the date on the "
    "page.",
)
def report(options: argparse.Namespace) -> int:
    """Write the page about ``options.paths``, or a folder with a page about each model."""
    from ..checking.report import is_page, page_of
    from ..conversion.destinations import Output

    alone = common.is_alone(options)
    to_stdout = options.output == common.STANDARD
    if to_stdout and not alone:
        raise ValueError("--output - writes a single page to stdout; pass a folder for several models")
    if to_stdout and options.json:
        raise ValueError("--output - and --json both write to stdout; pass only one of them")
    output_path = ("report.html" if alone else "reports") if options.output is None else options.output
    folder = None if alone else output_path
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
    written: set[str] = set()  # pages of this call

    def examine(path: str, _: Any) -> common.Outcome:
        target = output_path if folder is None else _page(folder, path, written)
        output = Output("--output", target, "report", is_page, options.overwrite, [path])
        if not to_stdout:
            output.check()
        with common.read_again(path) as place:
            choices = {"digest": options.digest, "threads": options.threads, "bars": common.bar}
            text, report = page_of(place, common.given(options, common.OPENED), options.quantize, **choices)
        nbytes = common.write_to_stdout(text) if to_stdout else output.write(text, report.files)

        def show() -> None:
            where, stream = ("stdout", sys.stderr) if to_stdout else (target, sys.stdout)
            print(f"{printable(where)}: {size(nbytes)}; {printable(report.source)}: {report.verdict}", file=stream)

        result = {"output": target, "nbytes": nbytes, "ok": report.ok}
        return int(not report.ok), f"{report.verdict}; {target}", lambda: result, show

    return common.for_each(options, examine)


def _page(folder: str, path: str, written: set[str]) -> str:
    """Return the path of a page about a model, which differs from the other pages of this call."""
    stem = re.sub(r"[^\w.-]+", "-", common.shown(path)).strip("-.") or "model"
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.html" for number in count(1))
    page = next(name for name in names if name not in written)
    written.add(page)
    return os.path.join(folder, page)
