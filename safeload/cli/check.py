"""``safeload check``: validate a file or a folder."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..base.text import plural, printable
from ..base.url import is_url
from ..errors import FormatError
from .cluster import add_dask, cluster
from .common import (
    STATUS,
    add_json,
    add_opening,
    add_overwrite,
    add_path,
    add_patterns,
    add_threads,
    bar,
    columns,
    open_path,
    opening,
    painter,
    suggest,
)
from .flags import in_options
from .streams import read_again, refuse, source

if TYPE_CHECKING:
    from ..operations.folders.output import Output
    from ..operations.sources.executors import Executor
    from ..operations.validate.findings import CheckReport

_EPILOG = f"""examples:
  safeload check Llama-3.2-1B/
  safeload check model.safetensors --config config.json --schema llama
  safeload check suspicious.pth --unknown-globals inert --range -10 10
  safeload check Llama-3.2-1B/ --write-manifest llama.sha256.json
  safeload check Llama-3.2-1B/ --manifest llama.sha256.json --json | jq .errors

{STATUS} With --strict, warnings other than value.constant and value.zero count as errors."""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Find faults in weights: files that violate their format, missing shards, incomplete downloads, "
        "wrong CRC-32 in zip archives, NaN and infinity, names and shapes that differ from config.json, missing "
        "layers, bad scales of quantized tensors. Warn about values out of range, matrices of a single value and mixed "
        "dtypes. List the parts that could not be checked."
    )
    parser.epilog = _EPILOG
    add_path(parser)
    parser.add_argument("--config", metavar="FILE", help="use this config.json instead of the folder's own")
    schema = parser.add_argument(
        "--schema",
        metavar="NAME",
        default="auto",
        help='expected tensors: "auto" (from the config), "none", or the name of a schema',
    )
    suggest(schema, _schemas)
    parser.add_argument(
        "--range",
        metavar=("LOW", "HIGH"),
        nargs=2,
        type=float,
        help="warn about values outside this range; default: -128 to 128, for norms -4096 to 4096",
    )
    parser.add_argument("--parameters", metavar="N", type=int, help="expected number of elements in all tensors")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--scale", metavar="X", type=float, help="expected scale of int8 tensors")
    scale.add_argument(
        "--absmax", metavar="X", type=float, help="expected absmax of int8 tensors, 127 times their scale"
    )
    parser.add_argument(
        "--structure", action="store_true", help="check only files, names, shapes and sizes; read no values"
    )
    add_patterns(parser)
    parser.add_argument(
        "--strict", action="store_true", help="treat warnings as errors, except value.constant and value.zero"
    )
    manifest = parser.add_mutually_exclusive_group()
    manifest.add_argument("--manifest", metavar="FILE", help="compare the SHA-256 of each tensor with this file")
    manifest.add_argument("--write-manifest", metavar="FILE", help="write the SHA-256 of each tensor to this file")
    add_overwrite(parser, "replace the file of --write-manifest even if safeload did not write it")
    add_opening(parser)
    add_threads(parser)
    add_dask(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _schemas() -> list[str]:
    from ..models.family import with_schema  # imported here: only completion needs it

    return ["auto", "none", *with_schema()]


def run(options: argparse.Namespace) -> int:
    """Print the findings about ``options.path`` and return the exit status."""
    from ..operations.validate.findings import HARMLESS_WARNINGS

    output = _output(options)
    repeated = options.manifest is not None or output is not None
    reading = read_again(options.path) if repeated else nullcontext(source(options.path))
    with cluster(options.dask) as executor, reading as options.path:
        report = _report(options, executor, output)
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        paint = painter()
        for line in map(in_options, report.lines(columns())):
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
    refused = options.strict and any(finding.code not in HARMLESS_WARNINGS for finding in report.warnings)
    return 0 if report.ok and not refused else 1


def _output(options: argparse.Namespace) -> Output | None:
    """Return the file of --write-manifest, or None."""
    if options.write_manifest is None:
        return None
    from ..operations.folders.output import Output
    from ..stores.digests import is_manifest

    refuse(options.write_manifest, "--write-manifest needs a file")
    output = Output(
        "--write-manifest",
        options.write_manifest,
        "manifest",
        is_manifest,
        overwrite=options.overwrite,
        sources=(options.path, options.config),
    )
    output.check()
    return output


def _report(options: argparse.Namespace, executor: Executor | None, output: Output | None) -> CheckReport:
    """Validate ``options.path`` and compare it with its manifest."""
    # Imported here: they would slow down the other commands.
    from ..operations.validate.check import settings, validate_path
    from ..operations.validate.findings import find

    limits = {"parameters": options.parameters, "scale": options.scale, "absmax": options.absmax}
    if options.range is not None:
        limits["low"], limits["high"] = options.range
    schema = None if options.schema == "none" else options.schema
    with bar("check") as progress:
        request = settings(
            options.config,
            schema,
            limits,
            values=not options.structure,
            only=options.only,
            drop=options.drop,
            executor=executor,
            threads=options.threads,
            progress=progress,
        )
        report = validate_path(options.path, opening(options), request)
    if report.files and (options.manifest or output is not None):
        try:
            _manifest(report, options, executor, output)
        except FormatError as problem:
            if problem.path is not None and problem.path not in report.files:
                raise
            report.add([find("file.read", problem=problem)])
    return report


def _manifest(
    report: CheckReport, options: argparse.Namespace, executor: Executor | None, output: Output | None
) -> None:
    """Compare a checkpoint with a manifest, or write a manifest."""
    from ..operations.validate import manifest

    expected = manifest.read(options.manifest) if options.manifest else None
    with open_path(options.path, options) as opened, bar("sha256") as progress:
        current = manifest.make(opened, executor=executor, threads=options.threads, progress=progress)
    if expected is not None:
        report.add(manifest.compare(expected, current))
    if output is None:
        return
    if isinstance(options.path, str) and not is_url(options.path):
        from ..engine.run.threads import thread_count
        from ..formats.verifying import digests_of
        from ..operations.trust.verify import files_of

        threads = thread_count(1 << 40, options.threads)
        current["files"] = digests_of(options.path, threads, files_of(options.path), options.write_manifest)
    output.write(json.dumps(current, indent=1) + "\n", report.files)
    if not options.json:
        name = printable(os.path.basename(options.write_manifest))
        print(f"{name}: SHA-256 of {plural(len(current['tensors']), 'tensor')}", file=sys.stderr)
