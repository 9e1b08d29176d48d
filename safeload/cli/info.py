"""``safeload info``: list the contents of files and folders."""

from __future__ import annotations

import argparse
import json
import sys

from ..base.runtime import paused
from ..errors import SafeloadError
from ..operations.inspect.info import KEYS, ROWS, Info, describe, lines, misfits, rows_of, title_of
from .common import (
    columns,
    complain,
    expanded,
    hint,
    in_options,
    most_rows,
    open_path,
    print_lines,
    shown,
    storage_options,
)
from .parsers import JSON, OPENING, PATHS, STATUS, argument, command, flag, positive, selection
from .streams import check_once


@command(
    "List the tensors of weight files, folders or an index.json without reading them: name, dtype, "
    "shape and size, totals per dtype and metadata. For a torch checkpoint, also list the "
    "classes and functions that its pickle references; none is imported or called.",
    f"""examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/ --tree --depth 2
  safeload info Llama-3.2-1B/ --only '*.mlp.*' --sort size
  safeload info Llama-3.2-1B/ --memory
  safeload info Llama-3.2-1B/ --all | grep layers.5.
  safeload info *.safetensors --limit 5
  safeload info hf://openai-community/gpt2
  safeload info my-lora/ --base Llama-3.2-1B/
  safeload info lightning.ckpt --unknown-globals inert --root state_dict
  safeload info model.safetensors --json | jq '.tensors[0]'

Equal layers share a row: model.layers.{{0..31}}.mlp.up_proj.weight. --json prints a line for each tensor; with
several paths, a line for each path.

{STATUS}""",
    PATHS,
    *selection(tuple(KEYS), ROWS),
    flag("--tree", "show a tree of modules with the sums of their tensors"),
    argument("--depth", metavar="N", type=positive, help="show at most N levels of the tree"),
    flag("--memory", "show the size when loaded, as each dtype or scheme"),
    argument("--base", metavar="BASE", help="check if a LoRA adapter fits this model; exit status 1 if not"),
    *OPENING,
    JSON,
)
def info(options: argparse.Namespace) -> int:
    """Print the contents of ``options.paths``."""
    options.paths = expanded(options.paths)
    check_once(options.paths)
    if options.depth is not None:
        options.tree = True
    if len(options.paths) == 1:
        return _show(options.paths[0], options)
    status = 0
    for number, path in enumerate(options.paths):
        if number and not options.json:
            print()
        try:
            status |= _show(path, options)
        except BrokenPipeError:
            raise
        except (SafeloadError, OSError, MemoryError, ModuleNotFoundError, ValueError) as error:
            complain(error)
            status = 1
    return status


def _show(path: str, options: argparse.Namespace) -> int:
    with open_path(path, options) as opened:
        info = describe(
            shown(path),
            opened,
            only=options.only or None,
            drop=options.drop or None,
            base=options.base,
            storage_options=storage_options(options),
            memory=options.memory or options.json,  # JSON always has it
        )
    if options.json:
        with paused(len(info.tensors)):
            _print_json(info, options)
    else:
        listing = lines(
            info,
            title_of(shown(path)) if len(options.paths) == 1 else shown(path),
            columns=columns(),
            rows=most_rows(options, ROWS),
            hint=hint(options),
            sort=options.sort,
            alone=options.all,
            tree=options.tree,
            depth=options.depth,
            memory=options.memory,
            words=in_options,
        )
        print_lines(listing)
    return int(misfits(info.adapter))


def _print_json(info: Info, options: argparse.Namespace) -> None:
    """Print an object, on one line if there are several paths, else with a line for each tensor."""
    whole = info.to_dict()
    tensors = whole.pop("tensors")
    if options.sort:
        by_name = {tensor["name"]: tensor for tensor in tensors}
        rows = rows_of([*info.tensors.values()], alone=True, sort=options.sort)
        tensors = [by_name[row.name] for row in rows]
    tensors = tensors[: options.limit]
    if len(options.paths) > 1:
        print(json.dumps({**whole, "tensors": tensors}))
        return
    lines = ",\n  ".join(map(json.dumps, tensors))
    listed = f"[\n  {lines}\n ]" if tensors else "[]"
    sys.stdout.write(f'{json.dumps(whole, indent=1)[:-2]},\n "tensors": {listed}\n}}\n')
