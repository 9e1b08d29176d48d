"""``safeload patch``: publish and apply the difference of two files."""

from __future__ import annotations

import argparse
from typing import Any

from ..operations.saving.apply import apply_patch
from ..operations.saving.patch import make_patch
from .common import STATUS, add_overwrite, shown
from .streams import refuse

_EPILOG = f"""examples:
  safeload patch make step-100.safetensors step-200.safetensors patch.safetensors
  safeload patch apply step-100.safetensors patch.safetensors step-200.safetensors
  safeload patch apply model.safetensors patch.safetensors

A patch holds the changed elements, the new header and digests of both files: applied to its base it recreates the new
file byte for byte, and a different base is refused. Its layout is TRL's; TRL's own patches need --no-check.

{STATUS}"""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = "Make a patch from two safetensors files, or apply a patch."
    parser.epilog = _EPILOG
    parser.add_argument("action", choices=("make", "apply"), help="make a patch, or apply it")
    parser.add_argument("base", metavar="BASE", help="the old file, or its URL")
    parser.add_argument("second", metavar="NEW|PATCH", help="make: the new file; apply: the patch")
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        nargs="?",
        help="make: the patch; apply: the result; default: replace BASE",
    )
    parser.add_argument(
        "--no-check", action="store_true", help="apply: do not compare digests, which TRL's own patches lack"
    )
    add_overwrite(parser, "replace an existing destination")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make or apply a patch and return the exit status."""
    destination = options.destination
    for path in (options.base, options.second, destination):
        refuse(path, "patch reads and writes files")
    if options.action == "make":
        if destination is None or options.no_check:
            raise ValueError("safeload patch make takes BASE NEW PATCH")
        report = make_patch(options.base, options.second, destination, overwrite=options.overwrite)
        print(f"{shown(destination)}: {report}")
        return 0
    result = apply_patch(
        options.base, options.second, destination, check=not options.no_check, overwrite=options.overwrite
    )
    digest = "" if result is None or options.no_check else f", digest {result}"
    print(f"{shown(destination or options.base)}: patched{digest}")
    return 0
