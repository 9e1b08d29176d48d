"""``safeload families``: list the known families of models."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .. import families
from ..base.layout import table
from .common import add_json, columns, painter

_HEAD = ("family", "schema", "llama.cpp", "engines", "MLX", "models")
_YES = {True: "yes", False: ""}

_EPILOG = """examples:
  safeload families
  safeload families --json | jq -r '.families[] | select(.gguf != "") | .architectures[0]'

Exit status: 0 success, 2 wrong usage."""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "List the families of models that safeload knows: whether check has a schema of the tensors, the architecture "
        "in GGUF files for llama.cpp, whether whole models can be written in the formats of engines, and whether "
        "folders of mlx-lm can be converted back."
    )
    parser.epilog = _EPILOG
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the families and return the exit status."""
    known = families()
    if options.json:
        print(json.dumps({"families": [family._asdict() for family in known]}, indent=1))
        return 0
    paint = painter()
    rows = [(f.name, _YES[f.schema], f.gguf, _YES[f.engines], _YES[f.mlx], f.about) for f in known]
    head, *lines = table(_HEAD, rows, right=frozenset(), columns=columns())
    print(paint(head, "head"), *lines, "", f"{len(known)} families", sep="\n")
    return 0
