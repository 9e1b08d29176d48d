"""``safeload info``: lists the content of a file or a folder."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..base.table import TensorInfo
from ..base.text import clip, jsonable, plural, printable, size, table, width
from ..checkpoint import Checkpoint
from ..packed.config import quantization_of
from .common import STATUS, add_command, add_json, add_opening, add_path, open_path, painter

# With more tensors than this the table shows the first ones; --all shows every row.
_ROWS = 100
# Most values of a list in the metadata, such as a vocabulary, that are shown; --json has all.
_ITEMS = 8

# Beginnings of the lines that are headings.
_HEADS = ("metadata", "globals that", "dtype  ", "tensor  ")

_EPILOG = f"""examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/
  safeload info lightning.ckpt --unknown-globals inert --root state_dict
  safeload info model.safetensors --json | jq '.tensors[0]'

{STATUS}"""


def register(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "info",
        help="list tensors and metadata",
        description="Lists the tensors of a weight file, a folder or an index.json without reading them: name, dtype, "
        "shape and size, totals per dtype, metadata; for a torch checkpoint also the classes and functions that its "
        "pickle names, none of which is imported or called.",
        epilog=_EPILOG,
    )
    add_path(parser)
    parser.add_argument("--all", action="store_true", help=f"show every tensor, even if there are more than {_ROWS}")
    add_opening(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the content of ``options.path``; returns the exit status."""
    with open_path(options.path, options) as opened:
        if options.json:
            print(json.dumps(_as_json(opened), indent=1))
        else:
            paint = painter()
            for line in _as_text(opened, every_row=options.all):
                print(paint(line, "head") if line.startswith(_HEADS) else line)
    return 0


def _per_dtype(opened: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """Tensors, elements and bytes per dtype, most bytes first."""
    totals: dict[str, tuple[int, int, int]] = {}
    for info in opened.tensors.values():
        count, elements, nbytes = totals.get(info.dtype, (0, 0, 0))
        totals[info.dtype] = count + 1, elements + math.prod(info.shape), nbytes + info.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1][2], item[0])))


def _as_json(opened: Checkpoint) -> dict[str, Any]:
    totals = _per_dtype(opened)
    return {
        "format": opened.format,
        "files": [{"path": path, "nbytes": os.path.getsize(path)} for path in opened.files],
        "metadata": jsonable(opened.metadata),
        "globals": opened.named_globals,
        "tensor_count": len(opened),
        "parameters": sum(elements for _, elements, _ in totals.values()),
        "nbytes": opened.nbytes,
        "dtypes": {
            code: {"tensors": count, "elements": elements, "nbytes": nbytes}
            for code, (count, elements, nbytes) in totals.items()
        },
        "tensors": [{**info._asdict(), "stored_nbytes": info.nbytes} for info in opened.tensors.values()],
    }


def _as_text(opened: Checkpoint, *, every_row: bool) -> Iterator[str]:
    """The lines of the listing: files, notes, metadata, globals of a pickle, totals per dtype, tensors."""
    columns = width()
    infos = list(opened.tensors.values())
    file_bytes = sum(os.path.getsize(path) for path in opened.files)
    files = printable(opened.files[0]) if len(opened.files) == 1 else f"{len(opened.files)} files"
    yield f"{files}: {opened.format}, {plural(len(infos), 'tensor')}, {size(file_bytes)}"
    if len(opened.files) > 1:
        for path in opened.files[:_ROWS]:
            yield f"  {clip(printable(os.path.basename(path)), columns - 16)}  {size(os.path.getsize(path))}"
    for note in (*opened.notes, *_quantization(opened)):
        yield clip(note, 4 * columns)
    if opened.metadata:
        yield ""
        yield "metadata"
        for key, value in opened.metadata.items():
            yield "  " + clip(printable(f"{key}: {_brief(value)}"), columns - 2)
    if opened.named_globals:
        yield ""
        yield "globals that the pickle names (nothing is imported or called)"
        for name, harmless in list(opened.named_globals.items())[:_ROWS]:
            yield "  " + clip(printable(name), columns - 30) + ("" if harmless else "  off the list, kept inert")
    totals = _per_dtype(opened)
    if totals:
        yield ""
        rows = [(c, f"{n:,}", f"{e:,}", size(b)) for c, (n, e, b) in totals.items()]
        if len(rows) > 1:
            parts = totals.values()
            rows.append(("total", f"{len(infos):,}", f"{sum(p[1] for p in parts):,}", size(sum(p[2] for p in parts))))
        yield from table(("dtype", "tensors", "elements", "size"), rows, right=frozenset((1, 2, 3)), columns=columns)
        yield ""
        shown = infos if every_row else infos[:_ROWS]
        yield from table(
            ("tensor", "dtype", "shape", "size"), [_row(info) for info in shown], right=frozenset((3,)), columns=columns
        )
        if len(shown) < len(infos):
            yield f"... and {plural(len(infos) - len(shown), 'tensor')} more; --all shows every one"


def _quantization(opened: Checkpoint) -> Iterator[str]:
    """What is quantized: the labels of packed tensors, or which codes this version does not dequantize."""
    said = quantization_of(opened.config)
    config = "" if said is None else f" ({said} in config.json)"
    packed = [info for info in opened.tensors.values() if len(info.parts) > 1]
    if packed:
        labels = ", ".join(sorted({info.dtype for info in packed}))
        stored, restored = sum(info.nbytes for info in packed), sum(4 * math.prod(info.shape) for info in packed)
        count = f"{len(packed):,} of {plural(len(opened), 'tensor')}"
        yield printable(f"quantized: {labels}{config}: {count}; {size(stored)} stored, {size(restored)} as float32")
    codes = opened.codes()
    if codes:
        count = plural(len(codes), "tensor")
        yield printable(f"codes without their values{config}: {count} of a quantization that is not dequantized")


def _brief(value: Any) -> str:
    """A value of the metadata; only the beginning of a long list."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, np.ndarray)) and len(value) > _ITEMS:
        return f"{len(value):,} values, {json.dumps(jsonable(value[:_ITEMS]))[:-1]}, ..."
    return json.dumps(jsonable(value))


def _row(info: TensorInfo) -> tuple[str, ...]:
    return printable(info.name), info.dtype, str(list(info.shape)), size(info.nbytes)
