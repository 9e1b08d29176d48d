"""``safeload info``: list the contents of files and folders; and ``safeload get``: print the values of a tensor."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..core import arrays, dtypes, runtime, showing
from ..core.text import plural, printable, show
from . import common
from .parsers import JSON, OPENING, PATHS, POSITIVE, argument, command, flag, path, selection

# The rows that a terminal shows at most of a listing.
_ROWS = 100

# A terminal shows this many rows at each end of a tensor with more values than _VALUES; NumPy's defaults.
_EDGE = 3
_VALUES = 1000
# Maximum number of values in memory while a tensor is printed, unless a single row has more.
_BLOCK = 1 << 18


# ---- info ----


@command(
    "List the tensors of weight files, folders or an index.json without reading them: name, dtype, "
    "shape and size, totals per dtype and metadata. For a torch checkpoint, also list the "
    "classes and functions that its pickle references; none is imported or called.",
    """examples:
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

Equal layers share a row: model.layers.{0..31}.mlp.up_proj.weight. --json prints a line for each tensor; with
several paths, a line for each path.""",
    PATHS,
    *selection(("name", "dtype", "shape", "parameters", "size"), _ROWS),
    flag("--tree", "show a tree of modules with the sums of their tensors"),
    argument("--depth", "N", "show at most N levels of the tree", type=POSITIVE),
    flag("--memory", "show the size when loaded, as each dtype or scheme"),
    argument("--base", "BASE", "check if a LoRA adapter fits this model; exit status 1 if not"),
    *OPENING,
    JSON,
)
def info(options: argparse.Namespace) -> int:
    """Print the contents of ``options.paths``."""
    options.tree |= options.depth is not None
    if len(options.paths) == 1:
        return _show(options.paths[0], options)
    status = 0
    for number, place in enumerate(options.paths):
        if number and not options.json:
            print()
        try:
            status |= _show(place, options)
        except BrokenPipeError:
            raise
        except common.FAILURES as error:
            common.complain(error)
            status = 1
    return status


def _show(path: str, options: argparse.Namespace) -> int:
    """Print a listing or an object: on one line if there are several paths, else with a line for each tensor."""
    from ..checking.info import describe, lines, misfits, rows_of, title_of

    shown, is_only = common.shown(path), len(options.paths) == 1
    with common.open_path(path, options) as opened:
        same = common.given(options, "only drop base storage_options")
        memory = options.memory or options.json  # JSON always has the memory
        info = describe(shown, opened, memory=memory, **same)
    if options.json:
        with runtime.paused(len(info.tensors)):
            whole = info.to_dict()
            tensors = whole.pop("tensors")
            if options.sort:
                by_name = {tensor["name"]: tensor for tensor in tensors}
                rows = rows_of([*info.tensors.values()], alone=True, sort=options.sort)
                tensors = [by_name[row.name] for row in rows]
            tensors = tensors[: options.limit]
            if is_only:
                _print_object(whole, "tensors", tensors)
            else:
                print(json.dumps({**whole, "tensors": tensors}))
    else:
        listing = lines(
            info,
            title_of(shown) if is_only else shown,
            columns=common.columns(),
            rows=common.most_rows(options, _ROWS),
            hint=common.hint(options),
            alone=options.all,
            words=common.in_options,
            **common.given(options, "sort tree depth memory"),
        )
        common.print_lines(listing)
    return int(misfits(info.adapter))


def _print_object(head: dict[str, Any], key: str, items: Iterable[Any]) -> None:
    """Print a JSON object that ends with a list, with a line for each item."""
    sys.stdout.write(f'{json.dumps(head, indent=1)[:-2]},\n "{key}": [')
    separator, end = "", "]"
    for item in items:
        sys.stdout.write(f"{separator}\n  {json.dumps(item)}")
        separator, end = ",", "\n ]"
    sys.stdout.write(f"{end}\n}}\n")


# ---- get ----


def _rows_of(text: str) -> slice:
    first, colon, last = text.partition(":")
    try:
        if colon:
            return slice(*(int(bound) if bound.strip() else None for bound in (first, last)))
        row = int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B or A, such as 0:10, got {printable(text)}") from None
    return slice(row, row + 1 if row != -1 else None)


@command(
    "Print the values of a tensor, or of some of its rows; only those are read. A quantized tensor is "
    "dequantized to float32.",
    """examples:
  safeload get model.safetensors model.norm.weight
  safeload get Llama-3.2-1B/ model.embed_tokens.weight --rows 100:110
  safeload get hf://openai-community/gpt2 wte.weight --rows=-1
  safeload get model.gguf blk.0.attn_q.weight --rows 0:2 --all
  safeload get model.safetensors model.norm.weight --json | jq '.values | max'

A terminal abbreviates long tensors, as NumPy does, unless --all is passed. A pipe gets every value, and nothing else: a
line for each row, and an empty line between matrices.""",
    path(),
    argument("name", "NAME", "the exact name of a tensor"),
    argument(
        "--rows",
        "A:B",
        "rows from A up to but not including B, or a single row A, counted from 0 along the first axis; negative "
        "numbers count from the end (--rows=-5:)",
        type=_rows_of,
    ),
    common.dtype('convert floating values first, to a dtype such as "float32"'),
    flag("--all", "print every value on a terminal, too"),
    *OPENING,
    JSON,
)
def get(options: argparse.Namespace) -> int:
    """Print the tensor ``options.name`` of ``options.path``."""
    with common.open_path(options.path, options) as opened:
        tensor: Any = opened.get_slice(options.name)  # raises if there is no such tensor
        info = opened.tensors[options.name]
        if (row := dtypes.BY_CODE.get(info.dtype)) is not None and row.packed:  # elements share bytes
            tensor = opened.load([info.name], dtype=options.dtype or "float32")[info.name]
        elif options.dtype is not None:
            tensor = opened.get_slice(info.name, dtype=options.dtype)
        rows = _range(tensor.shape, options.rows, info.name)
        if options.json:
            shape = [len(rows), *tensor.shape[1:]] if tensor.shape else []
            head: dict[str, Any] = {"name": info.name, "dtype": dtypes.shown(tensor.dtype), "shape": shape}
            if options.rows is not None:
                head["rows"] = [rows.start, rows.stop]
            if tensor.shape:
                lines = (_plain(np.asarray(row)) for block in _blocks(tensor, rows) for row in _numbers(block))
                _print_object(head, "values", lines)
            else:
                value = json.dumps(_plain(_numbers(np.asarray(tensor[...]))))
                print(f'{json.dumps(head, indent=1)[:-2]},\n "values": {value}\n}}')
        elif common.columns() is None:
            _print_all(tensor, rows)
        else:
            part = "" if options.rows is None else f", rows {rows.start:,}:{rows.stop:,}"
            common.print_lines([(printable(f"{info.name}: {info.dtype} {list(info.shape)}{part}"), "head")])
            if options.all:
                _print_all(tensor, rows)
            else:
                print(_abbreviated(tensor, rows))
    return 0


def _range(shape: tuple[int, ...], rows: slice | None, name: str) -> range:
    """Return the positions of ``rows``, by default of all."""
    if rows is None:
        return range(shape[0] if shape else 0)
    if not shape:
        raise ValueError(f"--rows: {show(name)} is a scalar")
    selected = range(*rows.indices(shape[0]))
    if not selected and rows.start is not None and rows.stop == rows.start + 1:
        raise ValueError(f"--rows {rows.start}: {show(name)} has {plural(shape[0], 'row')}")
    return range(selected.start, max(selected.start, selected.stop))


def _blocks(tensor: Any, rows: range) -> Iterator[arrays.Array]:
    """Yield the rows of a tensor in blocks of bounded size."""
    if not tensor.shape:
        yield np.asarray(tensor[...]).reshape(1)
        return
    step = max(1, _BLOCK // max(1, math.prod(tensor.shape[1:])))
    for start in range(rows.start, rows.stop, step):
        yield tensor[start : min(start + step, rows.stop)]


def _numbers(values: arrays.Array) -> arrays.Array:
    """Return values of a dtype that prints the shortest exact decimals: ml_dtypes rounds to six digits."""
    row = dtypes.row_of(values.dtype)
    return values.astype(np.float32) if row is not None and row.floating and row.bits < 32 else values


def _print_all(tensor: Any, rows: range) -> None:
    """Print a line for each row along the last axis, and an empty line before each further matrix."""
    begin = True
    for block in (block for block in _blocks(tensor, rows) if block.size):
        shape = (1, block.size, 1) if block.ndim == 1 else (-1, *block.shape[-2:])
        for matrix in _numbers(block.reshape(shape)):
            text = "\n".join(" ".join(map(str, line)) for line in matrix)
            print(f"\n{text}" if block.ndim > 2 and not begin else text)
            begin = False


def _abbreviated(tensor: Any, rows: range) -> str:
    """Return the values as NumPy prints them; of many rows, only the first and the last are read."""
    if not tensor.shape:
        return str(_numbers(np.asarray(tensor[...])))
    threshold = _VALUES
    if len(rows) > 2 * _EDGE + 1 and len(rows) * math.prod(tensor.shape[1:]) > _VALUES:
        # NumPy replaces the middle row by dots.
        ends = tensor[rows.start : rows.start + _EDGE + 1], tensor[rows.stop - _EDGE : rows.stop]
        values, threshold = np.concatenate(ends), 0
    else:
        values = tensor[rows.start : rows.stop]
    return np.array2string(_numbers(values), threshold=threshold, edgeitems=_EDGE, max_line_width=showing.width())


def _plain(values: arrays.Array) -> Any:
    """Return an array as lists for JSON: complex numbers as pairs, NaN and infinity as text."""
    if values.dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    finite = values.dtype.kind != "f" or bool(np.isfinite(values).all())
    return values.tolist() if finite else showing.plain(values, lossless=True)
