"""``safeload info``: list the contents of files and folders."""

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
from .flags import in_options

# Maximum number of rows on a terminal.
_ROWS = 100
# Maximum number of values shown from a list in the metadata, such as a vocabulary; --json has all.
_ITEMS = 8

# Maximum number of reasons why known families cannot be dequantized.
_REASONS = 3

# Formats with a header before the first tensor.
_WITH_HEADER = ("safetensors", "gguf")

_EPILOG = f"""examples:
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

{STATUS}"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "info",
        help="list tensors and metadata",
        description="List the tensors of weight files, folders or an index.json without reading them: name, dtype, "
        "shape and size, totals per dtype and metadata. For a torch checkpoint, also list the "
        "classes and functions that its pickle references; none is imported or called.",
        epilog=_EPILOG,
    )
    add_path(parser, several=True)
    add_selection(parser, tuple(listing.KEYS), _ROWS)
    parser.add_argument("--tree", action="store_true", help="show a tree of modules with the sums of their tensors")
    parser.add_argument("--depth", metavar="N", type=positive, help="show at most N levels of the tree")
    parser.add_argument("--memory", action="store_true", help="show the size when loaded, as each dtype or scheme")
    parser.add_argument("--base", metavar="BASE", help="check if a LoRA adapter fits this model; exit status 1 if not")
    add_opening(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the contents of ``options.paths`` and return the exit status."""
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
    """Return the name of a folder (its path, if there are several), the path of a file, or a URL without secrets."""
    if len(options.paths) == 1 and os.path.isdir(path):
        return os.path.basename(os.path.abspath(path)) or path
    return shown(path)


def _sizes(opened: Checkpoint) -> dict[str, int]:
    """Return the size of each file when it was opened."""
    return {file.path: file.identity[0] for file in opened.weight_files}


def _per_dtype(infos: Sequence[TensorInfo]) -> dict[str, tuple[int, int, int]]:
    """Count tensors, elements and bytes per dtype, most bytes first."""
    totals: dict[str, tuple[int, int, int]] = {}
    for info in infos:
        count, elements, nbytes = totals.get(info.dtype, (0, 0, 0))
        totals[info.dtype] = count + 1, elements + info.size, nbytes + info.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1][2], item[0])))


def _parameters(infos: Sequence[TensorInfo]) -> int:
    return sum(info.size for info in infos)


def _headers(opened: Checkpoint) -> dict[str, int]:
    """Return the header size of each file, for formats with a header."""
    begins: dict[str, int] = {}
    if opened.format in _WITH_HEADER:
        for file in opened.weight_files:
            begins[file.path] = min((begin for begin, _ in file.table.byte_ranges()), default=file.size)
    return begins


def _memory(opened: Checkpoint) -> dict[str, int]:
    """Return the bytes of all loaded tensors by dtype or scheme; schemes only if they would quantize a tensor."""
    from ..operations.measure.sizes import sizes  # only here: importing it takes milliseconds

    loaded = sizes(opened)
    schemes = {name: nbytes for name, nbytes in loaded.schemes.items() if nbytes != loaded.dtypes.get("float32")}
    return {**loaded.dtypes, **schemes}


# ---- JSON ----


def _print_json(
    path: str, opened: Checkpoint, infos: Sequence[TensorInfo], adapter: adapters.Found, options: argparse.Namespace
) -> None:
    """Print an object, on one line if there are several paths, else with a line for each tensor."""
    whole = {**_as_json(path, opened), "adapter": adapters.as_json(adapter)}
    if options.only or options.drop:
        nbytes = sum(info.nbytes for info in infos)
        whole["selected"] = {"tensor_count": len(infos), "parameters": _parameters(infos), "nbytes": nbytes}
    if options.sort:
        by_name = {info.name: info for info in infos}
        infos = [by_name[row.name] for row in listing.ordered(listing.rows_of(infos, alone=True), options.sort)]
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
    """Yield the lines of the listing, each with its colour or ""."""
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
        yield from (("", ""), ("globals that the pickle references (nothing is imported or called)", "head"))
        named = list(opened.named_globals.items())[: None if width is None else _ROWS]
        for name, harmless in named:
            room = None if width is None else width - 30
            yield "  " + clip(printable(name), room) + ("" if harmless else "  not on the allowlist, kept inert"), ""
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
    """Yield the tensors as a table or as a tree."""
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
    """Yield the summary: files, parameters, model, quantization, memory."""
    infos = list(opened.tensors.values())
    sizes = list(_sizes(opened).values())
    totals = [opened.format, plural(len(infos), "tensor")]
    if len(opened.files) > 1:
        totals.insert(0, plural(len(opened.files), "file"))
    if infos:
        totals.append(quantity(_parameters(infos), "parameter"))
    totals.append(size(sum(sizes)))
    yield from _fit(f"{_title(path, options)}: {', '.join(totals)}", width)
    if len(opened.files) > 1:
        room = None if width is None else width - 16
        files = [printable(os.path.basename(file)) for file in opened.files][: most_rows(options, _ROWS)]
        for name, nbytes in zip(shorten(files, room), sizes, strict=False):
            yield f"  {name}  {size(nbytes)}"
        if len(files) < len(opened.files):
            yield f"  ... and {plural(len(opened.files) - len(files), 'file')} more"
    headers = _headers(opened) if infos else {}
    memory = _memory(opened) if infos and options.memory else {}
    lines = [
        *opened.notes,
        *adapters.lines(adapter, options),
        description.model(opened.config, opened.metadata),
        *_quantization(opened),
        f"header: {size(sum(headers.values()))}" if headers else "",
        f"memory: as {', '.join(f'{name} {size(n)}' for name, n in memory.items())}" if memory else "",
    ]
    for line in filter(None, lines):
        yield from _fit(in_options(line), width)


def _fit(line: str, width: int | None) -> list[str]:
    """Wrap a line of prose to at most four lines on a terminal."""
    return [printable(line)] if width is None else wrap(clip(printable(line), 4 * width), width, hanging="  ")


def _quantization(opened: Checkpoint) -> Iterator[str]:
    """Yield the labels of packed tensors, and the codes that cannot be dequantized."""
    quantization = quantization_of(opened.config)
    config = "" if quantization is None else f" ({quantization} in config.json)"
    packed = [info for info in opened.tensors.values() if len(info.parts) > 1]
    if packed:
        labels = ", ".join(sorted({info.dtype for info in packed}))
        stored, restored = sum(info.nbytes for info in packed), sum(4 * info.size for info in packed)
        count = f"{len(packed):,} of {plural(len(opened), 'tensor')}"
        yield f"quantized: {labels}{config}: {count}; {size(stored)} stored, {size(restored)} as float32"
        if _zeros_disagree(opened):
            yield "zero points: the format differs from the configuration and was recognized"
    codes = codes_of(opened)
    if codes:
        count = plural(len(codes), "tensor")
        yield f"codes{config}: {count} of a quantization that safeload cannot dequantize"
        refusals = {entry.refusal for entry in codes.values() if entry.refusal is not None}
        yield from sorted(f"they are {refusal.what}: {refusal.reader} reads it" for refusal in refusals)
        reasons = Counter(
            entry.reason for entry in codes.values() if entry.reason is not None and entry.refusal is None
        )
        yield from (
            f"not dequantized: {plural(tensors, 'tensor')}: {reason}"
            for reason, tensors in reasons.most_common(_REASONS)
        )


def _zeros_disagree(opened: Checkpoint) -> bool:
    """True if the zero points of the smallest weight follow another GPTQ format than configured."""
    groups = (file.table.packed(index) for _, file, index in tensors_of(opened))
    packed = [group for group in groups if group is not None and group.packing.zeros is not None]
    return bool(packed) and zeros_disagree(min(packed, key=lambda group: group.nbytes))


def _brief(value: Any) -> str:
    """Format a metadata value, cutting long lists."""
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
