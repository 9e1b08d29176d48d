"""``safeload edit``: change metadata and names in place."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..base.text import plural, show
from ..operations.saving.edit import edit, recover_edit
from ..operations.saving.edit_base import Edit
from .common import STATUS, shown
from .streams import refuse

_EPILOG = f"""examples:
  safeload edit model.safetensors --metadata author=me --metadata format
  safeload edit model.safetensors --rename lm_head.weight=head.weight --drop rope.freqs
  safeload edit model.gguf --metadata general.name='My model'
  safeload edit --recover model.safetensors

The header is rewritten in place if it has room; any other change makes a new file and renames it. After a crash the
file is the old one or the new one; if safeload reports an interrupted edit, run --recover.

{STATUS}"""

_RECOVERED = {
    "nothing": "no edit was interrupted",
    "old": "the interrupted edit was undone",
    "new": "the edit was complete",
}


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Change the metadata and the tensor names of a safetensors file or folder, and remove tensors; or "
        "change the metadata of a GGUF file."
    )
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="FILE", help="a safetensors or GGUF file, or a folder of safetensors shards")
    parser.add_argument(
        "--metadata",
        metavar="KEY[=VALUE]",
        action="append",
        default=[],
        help="set a metadata key, or remove it if there is no =; may be repeated",
    )
    parser.add_argument(
        "--rename", metavar="OLD=NEW", action="append", default=[], help="rename a tensor; may be repeated"
    )
    parser.add_argument("--drop", metavar="NAME", action="append", default=[], help="remove a tensor; may be repeated")
    parser.add_argument("--force", action="store_true", help="edit a file that has several hard links")
    parser.add_argument(
        "--recover",
        action="store_true",
        help="complete an interrupted edit and remove temporary files of killed processes; change nothing else",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Edit and return the exit status."""
    refuse(options.path, "edit changes files")
    changes = len(options.metadata) + len(options.rename) + len(options.drop)
    if options.recover == bool(changes):
        raise ValueError("pass either changes (--metadata, --rename, --drop) or --recover")
    if options.recover:
        print(f"{shown(options.path)}: {_RECOVERED[recover_edit(options.path)]}")
        return 0
    with edit(options.path, force=options.force) as file:
        for text in options.metadata:
            _set_metadata(file, text)
        for text in options.rename:
            file.rename(*_names(file, text))
        for name in options.drop:
            del file[name]
    print(f"{shown(options.path)}: {plural(changes, 'change')}")
    return 0


def _set_metadata(file: Edit, text: str) -> None:
    key, sign, value = text.partition("=")
    if sign:
        file.metadata[key] = _value(file.metadata, key, value)
    elif key in file.metadata:
        del file.metadata[key]
    else:
        raise ValueError(f"--metadata {show(key)}: there is no such key to remove; pass KEY=VALUE to add one")


def _value(metadata: Mapping[str, Any], key: str, text: str) -> Any:
    """Parse a value like the old value of its key; new values are text."""
    old = metadata.get(key)
    if old is None or isinstance(old, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    kinds: dict[type[Any], Any] = {bool: bool, int: int, float: (int, float), list: list, np.ndarray: list}
    kind = next(kind for kind in kinds if isinstance(old, kind))
    if not isinstance(value, kinds[kind]) or (kind is not bool and isinstance(value, bool)):
        noun = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a JSON list")
        raise ValueError(f"--metadata {show(key)}: expected {noun}, got {show(text)}")
    if isinstance(old, np.ndarray):
        return np.array(value, old.dtype)
    return float(value) if kind is float else value


def _names(file: Edit, text: str) -> tuple[str, str]:
    """Split OLD=NEW; a name may contain =."""
    ends = [k for k, character in enumerate(text) if character == "="]
    if not ends:
        raise ValueError(f"--rename takes OLD=NEW, got {show(text)}")
    end = next((k for k in ends if text[:k] in file), ends[0])
    return text[:end], text[end + 1 :]
