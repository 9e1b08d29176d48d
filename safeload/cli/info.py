"""``safeload info``: lists the content of files and folders."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..base.layout import quantity, shorten, table, wrap
from ..base.selecting import select
from ..base.table import TensorInfo
from ..base.text import clip, plural, printable, size
from ..checkpoint import Checkpoint, codes_of, tensors_of
from ..errors import SafeloadError
from ..packed.gptq import zeros_disagree
from ..packed.quantization import quantization_of
from . import adapters, description, listing
from .common import (
    STATUS,
    add_command,
    add_json,
    add_opening,
    add_path,
    add_selection,
    columns,
    complain,
    expanded,
    most_rows,
    open_path,
    painter,
    positive,
    rest,
    shown,
)

# Most rows on a terminal.
_ROWS = 100
# Most values of a list in the metadata, such as a vocabulary, that are shown; --json has all.
_ITEMS = 8

# Most reasons for which tensors of known families are not dequantized.
_REASONS = 3

# Formats whose header is all that comes before the first tensor.
_WITH_HEADER = ("safetensors", "gguf")

_EPILOG = f"""examples:
  safeload info model.safetensors
  safeload info Llama-3.2-1B/ --tree --depth 2
  safeload info Llama-3.2-1B/ --only '*.mlp.*' --sort size
  safeload info Llama-3.2-1B/ --all | grep layers.5.
  safeload info *.safetensors --limit 5
  safeload info hf://openai-community/gpt2
  safeload info my-lora/ --base Llama-3.2-1B/
  safeload info lightning.ckpt --unknown-globals inert --root state_dict
  safeload info model.safetensors --json | jq '.tensors[0]'

Layers that are alike share one row: model.layers.{{0..31}}.mlp.up_proj.weight. --json has a line for each tensor,
or with several paths a line for each path.

{STATUS}"""


def register(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "info",
        help="list tensors and metadata",
        description="Lists the tensors of weight files, folders or an index.json without reading them: name, dtype, "
        "shape and size, totals per dtype, metadata, the memory they take when loaded; for a torch checkpoint also the "
        "classes and functions that its pickle names, none of which is imported or called.",
        epilog=_EPILOG,
    )
    add_path(parser, several=True)
    add_selection(parser, tuple(listing.KEYS), _ROWS)
    parser.add_argument("--tree", action="store_true", help="show modules with the sums of their tensors")
    parser.add_argument("--depth", metavar="N", type=positive, help="show N levels of the tree at most")
    parser.add_argument("--base", metavar="BASE", help="say whether a LoRA adapter fits this model; 1 if it does not")
    add_opening(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the content of ``options.paths``; returns the exit status."""
    options.paths = expanded(options.paths)
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
        adapter = adapters.about(path, opened, options)
        infos = opened.tensors
        infos = {name: infos[name] for name in select(infos, options.only, options.drop)}
        if options.json:
            _print_json(path, opened, list(infos.values()), adapter, options)
        else:
            paint = painter()
            for line, kind in _as_text(path, opened, list(infos.values()), adapter, options):
                print(paint(line, kind) if kind else line)
        return int(adapters.misfits(adapter))


def _title(path: str, options: argparse.Namespace) -> str:
    """A folder by its name alone, unless there are several paths; a file as it was given, a URL without secrets."""
    if len(options.paths) == 1 and os.path.isdir(path):
        return os.path.basename(os.path.abspath(path)) or path
    return shown(path)


def _sizes(opened: Checkpoint) -> dict[str, int]:
    """Bytes of each file when it was opened."""
    return {file.path: file.identity[0] for file in opened.weight_files}


def _per_dtype(infos: Sequence[TensorInfo]) -> dict[str, tuple[int, int, int]]:
    """Tensors, elements and bytes per dtype, most bytes first."""
    totals: dict[str, tuple[int, int, int]] = {}
    for info in infos:
        count, elements, nbytes = totals.get(info.dtype, (0, 0, 0))
        totals[info.dtype] = count + 1, elements + info.size, nbytes + info.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1][2], item[0])))


def _parameters(infos: Sequence[TensorInfo]) -> int:
    return sum(info.size for info in infos)


def _headers(opened: Checkpoint) -> dict[str, int]:
    """Bytes of each file before its first tensor, of formats that have a header there."""
    begins: dict[str, int] = {}
    if opened.format in _WITH_HEADER:
        for file in opened.weight_files:
            begins[file.path] = min((begin for begin, _ in file.table.byte_ranges()), default=file.size)
    return begins


def _memory(opened: Checkpoint) -> dict[str, int]:
    """Bytes of all tensors once loaded, by dtype or scheme; without schemes if no tensor would be quantized."""
    from ..operations.measure.sizes import sizes  # imported here: it would add milliseconds to other commands

    found = sizes(opened)
    schemes = {name: nbytes for name, nbytes in found.schemes.items() if nbytes != found.dtypes.get("float32")}
    return {**found.dtypes, **schemes}


# ---- JSON ----


def _print_json(
    path: str, opened: Checkpoint, infos: Sequence[TensorInfo], adapter: adapters.Found, options: argparse.Namespace
) -> None:
    """Prints one object: on one line if there are several, else with a line for each tensor."""
    whole = {**_as_json(path, opened), "adapter": adapters.as_json(adapter)}
    if options.only or options.drop:
        nbytes = sum(info.nbytes for info in infos)
        whole["selected"] = {"tensor_count": len(infos), "parameters": _parameters(infos), "nbytes": nbytes}
    if options.sort:
        alone = {info.name: info for info in infos}
        infos = [alone[row.name] for row in listing.ordered(listing.rows_of(infos, alone=True), options.sort)]
    tensors = [{**info._asdict(), "stored_nbytes": info.nbytes} for info in infos[: options.limit]]
    if len(options.paths) > 1:
        print(json.dumps({**whole, "tensors": tensors}))
        return
    lines = ",\n  ".join(map(json.dumps, tensors))
    listed = f"[\n  {lines}\n ]" if tensors else "[]"
    sys.stdout.write(f'{json.dumps(whole, indent=1)[:-2]},\n "tensors": {listed}\n}}\n')


def _as_json(path: str, opened: Checkpoint) -> dict[str, Any]:
    infos = list(opened.tensors.values())
    headers = _headers(opened)
    return {
        "path": shown(path),
        "format": opened.format,
        "files": [{"path": file, "nbytes": nbytes} for file, nbytes in _sizes(opened).items()],
        "header_nbytes": sum(headers.values()) if headers else None,
        "notes": opened.notes,
        "model": description.model(opened.config, opened.metadata) or None,
        "metadata": _jsonable(opened.metadata),
        "globals": opened.named_globals,
        "tensor_count": len(infos),
        "parameters": _parameters(infos),
        "nbytes": opened.nbytes,
        "memory": _memory(opened),
        "dtypes": {
            code: {"tensors": count, "elements": elements, "nbytes": nbytes}
            for code, (count, elements, nbytes) in _per_dtype(infos).items()
        },
    }


# ---- text ----


def _as_text(
    path: str, opened: Checkpoint, infos: Sequence[TensorInfo], adapter: adapters.Found, options: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """The lines of the listing, each with its colour or ""."""
    width = columns()
    for line in _head(path, opened, width, adapter, options):
        yield line, ""
    if options.only or options.drop:
        count = f"{len(infos):,} of {plural(len(opened), 'tensor')}"
        nbytes = sum(info.nbytes for info in infos)
        yield f"selected: {count}, {quantity(_parameters(infos), 'parameter')}, {size(nbytes)}", ""
    inner = None if width is None else width - 2
    if opened.metadata:
        yield from (("", ""), ("metadata", "head"))
        for key, value in opened.metadata.items():
            yield "  " + clip(printable(f"{key}: {_brief(value)}"), inner), ""
    if opened.named_globals:
        yield from (("", ""), ("globals that the pickle names (nothing is imported or called)", "head"))
        named = list(opened.named_globals.items())[: None if width is None else _ROWS]
        for name, harmless in named:
            room = None if width is None else width - 30
            yield "  " + clip(printable(name), room) + ("" if harmless else "  off the list, kept inert"), ""
    totals = _per_dtype(infos)
    if totals:
        yield "", ""
        rows = [(c, f"{n:,}", f"{e:,}", size(b)) for c, (n, e, b) in totals.items()]
        if len(rows) > 1:
            parts = totals.values()
            rows.append(("total", f"{len(infos):,}", f"{sum(p[1] for p in parts):,}", size(sum(p[2] for p in parts))))
        head, *lines = table(("dtype", "tensors", "elements", "size"), rows, right=frozenset((1, 2, 3)), columns=width)
        yield from ((head, "head"), *((line, "") for line in lines), ("", ""))
        yield from _listing(infos, width, options)


def _listing(infos: Sequence[TensorInfo], width: int | None, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The tensors as a table or as a tree."""
    rows = listing.rows_of(infos, alone=options.all)
    show: Callable[[Sequence[listing.Row], int | None], list[str]]
    if options.tree:
        rows, show = listing.as_tree(rows, options.sort, options.depth), listing.tree_table
    else:
        rows, show = listing.ordered(rows, options.sort), listing.as_table
    first = rows[: most_rows(options, _ROWS)]
    head, *lines = show(first, width)
    yield head, "head"
    for line in lines:
        yield line, ""
    if len(first) < len(rows):
        if options.tree:
            yield rest(len(rows) - len(first), "row", options), ""
        else:
            yield rest(len(infos) - sum(row.number for row in first), "tensor", options), ""


def _head(
    path: str, opened: Checkpoint, width: int | None, adapter: adapters.Found, options: argparse.Namespace
) -> Iterator[str]:
    """What it is: files, parameters, model, quantization, memory."""
    infos = list(opened.tensors.values())
    sizes = list(_sizes(opened).values())
    what = [opened.format, plural(len(infos), "tensor")]
    if len(opened.files) > 1:
        what.insert(0, plural(len(opened.files), "file"))
    if infos:
        what.append(quantity(_parameters(infos), "parameter"))
    what.append(size(sum(sizes)))
    yield from _fit(f"{_title(path, options)}: {', '.join(what)}", width)
    if len(opened.files) > 1:
        room = None if width is None else width - 16
        files = [printable(os.path.basename(file)) for file in opened.files][: most_rows(options, _ROWS)]
        for name, nbytes in zip(shorten(files, room), sizes, strict=False):
            yield f"  {name}  {size(nbytes)}"
        if len(files) < len(opened.files):
            yield f"  ... and {plural(len(opened.files) - len(files), 'file')} more"
    headers = _headers(opened) if infos else {}
    memory = _memory(opened) if infos else {}
    lines = [
        *opened.notes,
        *adapters.lines(adapter, options),
        description.model(opened.config, opened.metadata),
        *_quantization(opened),
        f"header: {size(sum(headers.values()))}" if headers else "",
        f"memory: as {', '.join(f'{name} {size(n)}' for name, n in memory.items() if name != 'bfloat16')}"
        if memory
        else "",
    ]
    for line in filter(None, lines):
        yield from _fit(line, width)


def _fit(line: str, width: int | None) -> list[str]:
    """A line of prose, wrapped on a terminal and of four lines there at most."""
    return [printable(line)] if width is None else wrap(clip(printable(line), 4 * width), width, hanging="  ")


def _quantization(opened: Checkpoint) -> Iterator[str]:
    """What is quantized: the labels of packed tensors, or which codes this version does not dequantize."""
    said = quantization_of(opened.config)
    config = "" if said is None else f" ({said} in config.json)"
    packed = [info for info in opened.tensors.values() if len(info.parts) > 1]
    if packed:
        labels = ", ".join(sorted({info.dtype for info in packed}))
        stored, restored = sum(info.nbytes for info in packed), sum(4 * info.size for info in packed)
        count = f"{len(packed):,} of {plural(len(opened), 'tensor')}"
        yield f"quantized: {labels}{config}: {count}; {size(stored)} stored, {size(restored)} as float32"
        if _zeros_disagree(opened):
            yield "zero points: not stored as the configuration says, but understood"
    codes = codes_of(opened)
    if codes:
        count = plural(len(codes), "tensor")
        yield f"codes without their values{config}: {count} of a quantization that is not dequantized"
        refusals = {one.refusal for one in codes.values() if one.refusal is not None}
        yield from sorted(f"they are {one.what}: {one.reader} reads it" for one in refusals)
        reasons = Counter(one.reason for one in codes.values() if one.reason is not None and one.refusal is None)
        yield from (
            f"not dequantized: {plural(tensors, 'tensor')}: {reason}"
            for reason, tensors in reasons.most_common(_REASONS)
        )


def _zeros_disagree(opened: Checkpoint) -> bool:
    """Whether zero points are those of another format of GPTQ: of one weight, since a writer stores all alike."""
    found = (file.table.packed(index) for _, file, index in tensors_of(opened))
    packed = [one for one in found if one is not None and one.packing.zeros is not None]
    return bool(packed) and zeros_disagree(min(packed, key=lambda one: one.nbytes))


def _brief(value: Any) -> str:
    """A value of the metadata; only the beginning of a long list."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, np.ndarray)) and len(value) > _ITEMS:
        return f"{len(value):,} values, {json.dumps(_jsonable(value[:_ITEMS]))[:-1]}, ..."
    return json.dumps(_jsonable(value))


def _jsonable(value: Any) -> Any:
    """Convert metadata to JSON values: keys to str, arrays, tuples and sets to lists, bytes to hexadecimal."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _jsonable(value.tolist())
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_jsonable(item) for item in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
