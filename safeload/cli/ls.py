"""``safeload ls``: list the models on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import add_json, columns, painter

_EPILOG = """examples:
  safeload ls
  safeload ls ~/models /data/checkpoints
  safeload ls --json | jq -r '.models[] | select(.format == "gguf") | .path'

Every path in the last column opens with `safeload info` and the other commands.

Exit status: 0 success, 1 a folder does not exist, 2 wrong usage."""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "List the models in the cache of the Hugging Face Hub, in ollama, in LM Studio and in the named "
        "folders: name, format, size, and the path that opens each. No weights are read."
    )
    parser.epilog = _EPILOG
    parser.add_argument("folders", metavar="FOLDER", nargs="*", help="a folder to search, with its subfolders")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the models and return the exit status."""
    from ..operations.local_models import local_models  # imported here: it would slow down the other commands

    models = local_models(options.folders)
    if options.json:
        print(json.dumps(models.to_dict(), indent=1))
        return 0
    paint = painter()
    for number, line in enumerate(models.lines(columns())):
        print(paint(line, "head") if not number and models else line)
    return 0
