"""Describe checkpoints: tensors, metadata, adapters; as values, and as the listing of ``safeload info``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...base.layout import quantity, shorten, table, terminal_columns, terminal_rows, wrap
from ...base.listing import TensorInfos
from ...base.results import Result, plain
from ...base.selecting import Patterns, select
from ...base.table import TensorInfo
from ...base.text import clip, plural, printable, show, size
from ...base.url import is_url, shown
from ...checkpoint import Checkpoint, codes_of, settings_of, tensors_of
from ...engine.run.weight_file import WeightFile
from ...errors import exported, public
from ...formats.opening import Paths
from ...formats.registry import FormatName, UnknownGlobals
from ...loading import entry as loading
from ...models.diffusion import ARCHITECTURE, model_of
from ...packed.gptq import zeros_disagree
from ...packed.quantization import quantization_of
from . import adapters, listing

# Maximum number of rows on a terminal.
ROWS = 100
# Maximum number of values shown from a list in the metadata, such as a vocabulary; --json has all.
_ITEMS = 8


# Maximum number of reasons why known families cannot be dequantized.
_REASONS = 3

# Formats with a header before the first tensor.
_WITH_HEADER = ("safetensors", "gguf")

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")

# Longest text and largest number to show: larger values are garbage.
_TEXT, _NUMBER = 80, 10**12


class View(NamedTuple):
    """How to show a listing."""

    title: str
    columns: int | None  # the width; None cuts nothing
    rows: int | None = ROWS  # maximum number of rows; None shows all
    hint: str = ""  # the end of lines that count hidden rows
    sort: str | None = None  # one of `listing.KEYS`
    alone: bool = False  # give each tensor its own row
    tree: bool = False
    depth: int | None = None  # maximum number of levels of the tree
    memory: bool = False  # show the size when loaded
    words: Callable[[str], str] = str  # translates messages

    def rest(self, hidden: int, noun: str) -> str:
        """Return the line that counts hidden rows."""
        return f"... and {plural(hidden, noun)} more{self.hint}"


@exported()
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Info(Result):
    """The result of `safeload.info`, with a row per selected tensor. ``str()`` is the listing of ``safeload info``.

    Attributes:
        path: path or URL of the checkpoint, as messages should show it.
        format: format of its files.
        files: size of each file with tensors, by path.
        header_nbytes: bytes before the tensors; None for formats without a header.
        notes: the kind of a folder, and the weight files in it that were not opened.
        model: a line about the model from its config, such as "llama, 12 layers, hidden 512"; "" if unknown.
        metadata: metadata of the files, as in ``Checkpoint.metadata``.
        globals: classes and functions that a pickle references: True if they are on the allowlist.
        tensors: `TensorInfo` of the selected tensors, by name.
        selected: True if ``only`` or ``drop`` was given.
        tensor_count: number of all tensors.
        parameters: number of elements of all tensors.
        nbytes: bytes of all tensors, as stored.
        dtypes: number of tensors, elements and bytes of each dtype, most bytes first.
        memory: bytes of all tensors when loaded with a dtype or a quantization scheme, by its name.
        quantization: lines about packed tensors, and about codes that cannot be dequantized.
        adapter: `AdapterSummary` of a LoRA adapter; or the reason why it cannot be merged; None for other checkpoints.

    Example:
        >>> import safeload
        >>> info = safeload.info("tiny-llama")
        >>> info.model, info.parameters, info.memory["float32"]
        ('llama, 3 layers, hidden 64, vocabulary 96', 123328, 493312)
    """

    path: str
    format: str
    files: dict[str, int]
    header_nbytes: int | None
    notes: list[str]
    model: str
    metadata: Mapping[Any, Any]
    globals: dict[str, bool]
    tensors: Mapping[str, TensorInfo]
    selected: bool
    tensor_count: int
    parameters: int
    nbytes: int
    dtypes: dict[str, tuple[int, int, int]]
    memory: dict[str, int]
    quantization: list[str]
    adapter: adapters.Found

    _columns = ("name", "dtype", "shape", "nbytes", "parameters", "file", "offset", "parts")
    _notebook = _columns[:4]

    def _values(self) -> Iterable[Any]:
        for info in self.tensors.values():
            yield info.name, info.dtype, [*info.shape], info.nbytes, info.size, info.file, info.offset, [*info.parts]

    def _about(self) -> Sequence[str]:
        return [repr(self)[1:-1], *filter(None, [self.model, *self.quantization])]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values for ``json.dump``, as ``safeload info --json`` prints it."""
        infos = list(self.tensors.values())
        parameters, nbytes = sum(info.size for info in infos), sum(info.nbytes for info in infos)
        selected = {"tensor_count": len(infos), "parameters": parameters, "nbytes": nbytes}
        return {
            "path": self.path,
            "format": self.format,
            "files": [{"path": file, "nbytes": nbytes} for file, nbytes in self.files.items()],
            "header_nbytes": self.header_nbytes,
            "notes": [*self.notes],
            "model": self.model or None,
            "metadata": plain(self.metadata, lossless=True),
            "globals": {**self.globals},
            "tensor_count": self.tensor_count,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "memory": {**self.memory},
            "dtypes": {
                code: {"tensors": count, "elements": elements, "nbytes": nbytes}
                for code, (count, elements, nbytes) in self.dtypes.items()
            },
            "adapter": adapters.as_json(self.adapter),
            **({"selected": selected} if self.selected else {}),
            "tensors": [{**info._asdict(), "stored_nbytes": info.nbytes} for info in infos],
        }

    def __str__(self) -> str:
        view = View(title_of(self.path), terminal_columns(), terminal_rows(ROWS))
        return "\n".join(line for line, _ in lines(self, view))

    def __repr__(self) -> str:
        return f"<Info {show(self.path)}: {self.format}, {plural(self.tensor_count, 'tensor')}, {size(self.nbytes)}>"


def title_of(path: str) -> str:
    """Return the name of a folder, or the path of a file."""
    return os.path.basename(os.path.abspath(path)) or path if os.path.isdir(path) else path


def totals_of(infos: Iterable[TensorInfo]) -> dict[str, tuple[int, int, int]]:
    """Count tensors, elements and bytes per dtype, most bytes first."""
    totals: dict[str, tuple[int, int, int]] = {}
    for info in infos:
        count, elements, nbytes = totals.get(info.dtype, (0, 0, 0))
        totals[info.dtype] = count + 1, elements + info.size, nbytes + info.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1][2], item[0])))


def lines(info: Info, view: View) -> Iterator[tuple[str, str]]:
    """Yield the lines of the listing, each with its colour or ""."""
    width, infos = view.columns, list(info.tensors.values())
    totals = totals_of(infos)
    parameters, nbytes = (sum(total[k] for total in totals.values()) for k in (1, 2))
    for line in _head(info, view):
        yield line, ""
    if info.selected:
        count = f"{len(infos):,} of {plural(info.tensor_count, 'tensor')}"
        yield f"selected: {count}, {quantity(parameters, 'parameter')}, {size(nbytes)}", ""
    inner = None if width is None else width - 2
    if info.metadata:
        yield from (("", ""), ("metadata", "head"))
        for key, value in info.metadata.items():
            yield "  " + clip(printable(f"{key}: {_brief(value)}"), inner), ""
    if info.globals:
        yield from (("", ""), ("globals that the pickle references (nothing is imported or called)", "head"))
        named = list(info.globals.items())[: None if width is None else ROWS]
        for name, harmless in named:
            room = None if width is None else width - 30
            yield "  " + clip(printable(name), room) + ("" if harmless else "  not on the allowlist, kept inert"), ""
    if totals:
        yield "", ""
        rows = [(c, f"{n:,}", f"{e:,}", size(b)) for c, (n, e, b) in totals.items()]
        if len(rows) > 1:
            rows.append(("total", f"{len(infos):,}", f"{parameters:,}", size(nbytes)))
        head, *body = table(("dtype", "tensors", "elements", "size"), rows, right=frozenset((1, 2, 3)), columns=width)
        yield from ((head, "head"), *((line, "") for line in body), ("", ""))
        yield from _listing(infos, view)


def _listing(infos: Sequence[TensorInfo], view: View) -> Iterator[tuple[str, str]]:
    """Yield the tensors as a table or as a tree."""
    rows = listing.rows_of(infos, alone=view.alone)
    rows = listing.as_tree(rows, view.sort, view.depth) if view.tree else listing.ordered(rows, view.sort)
    first = rows[: view.rows]
    head, *body = listing.as_table(first, view.columns, tree=view.tree)
    yield head, "head"
    for line in body:
        yield line, ""
    if len(first) < len(rows) and view.tree:
        yield view.rest(len(rows) - len(first), "row"), ""
    elif len(first) < len(rows):
        yield view.rest(len(infos) - sum(row.number for row in first), "tensor"), ""


def _head(info: Info, view: View) -> Iterator[str]:
    """Yield the summary: files, parameters, model, quantization, memory."""
    width, sizes = view.columns, list(info.files.values())
    totals = [info.format, plural(info.tensor_count, "tensor")]
    if len(sizes) > 1:
        totals.insert(0, plural(len(sizes), "file"))
    if info.tensor_count:
        totals.append(quantity(info.parameters, "parameter"))
    totals.append(size(sum(sizes)))
    yield from _fit(f"{view.title}: {', '.join(totals)}", width)
    if len(sizes) > 1:
        room = None if width is None else width - 16
        files = [printable(os.path.basename(file)) for file in info.files][: view.rows]
        for name, nbytes in zip(shorten(files, room), sizes, strict=False):
            yield f"  {name}  {size(nbytes)}"
        if len(files) < len(sizes):
            yield f"  ... and {plural(len(sizes) - len(files), 'file')} more"
    memory = info.memory if view.memory else {}
    remarks = [
        *info.notes,
        *adapters.lines(info.adapter, view.rows, view.rest),
        info.model,
        *info.quantization,
        f"header: {size(info.header_nbytes)}" if info.header_nbytes is not None and info.tensor_count else "",
        f"memory: as {', '.join(f'{name} {size(n)}' for name, n in memory.items())}" if memory else "",
    ]
    for line in filter(None, remarks):
        yield from _fit(view.words(line), width)


def _fit(line: str, width: int | None) -> list[str]:
    """Wrap a line of prose to at most four lines on a terminal."""
    return [printable(line)] if width is None else wrap(clip(printable(line), 4 * width), width, hanging="  ")


def _brief(value: Any) -> str:
    """Format a metadata value, cutting long lists."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, np.ndarray)) and len(value) > _ITEMS:
        return f"{len(value):,} values, {json.dumps(plain(value[:_ITEMS], lossless=True))[:-1]}, ..."
    return json.dumps(plain(value, lossless=True))


# ---- describing ----


@public
def info(
    path: Paths,
    *,
    only: Patterns = None,
    drop: Patterns = None,
    base: Paths | None = None,
    format: FormatName | None = None,
    root: str | None = None,
    unknown_globals: UnknownGlobals = "refuse",
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Info:
    """Describe a checkpoint without reading its tensors, as ``safeload info`` does.

    Args:
        path: whatever `open` opens: a weight file, a folder, an index.json, a URL, or a file object.
        only: shell pattern, or several, of the tensors to list, such as ``"*.mlp.*"``; None lists all.
        drop: shell pattern, or several, of tensors to leave out.
        base: the model of a LoRA adapter; ``adapter.fitting`` of the result shows if the adapter fits.
        format: required format, see `open`.
        root: nested container to take tensors from, see `open`.
        unknown_globals: see `open`.
        stored: True lists codes and scales of a quantized checkpoint as the files store them.
        storage_options: options of the filesystem behind a URL, see `open`.

    Returns:
        The description. It stays valid when the files are gone.

    Raises:
        TensorNotFoundError: a pattern matches no tensor.
        ValueError: ``base`` is given, but this is not an adapter.
        SafeloadError, OSError: see `open`.

    Example:
        >>> import safeload
        >>> safeload.info("tiny-llama")
        <Info 'tiny-llama': safetensors, 30 tensors, 241 KiB>
    """
    with loading.open(
        path,
        format=format,
        root=root,
        unknown_globals=unknown_globals,
        stored=stored,
        storage_options=storage_options,
    ) as opened:
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else opened.path
        text = shown(text) if is_url(text) else text  # without the secrets of a URL
        return describe(text, opened, only=only, drop=drop, base=base, storage_options=storage_options)


def describe(
    path: str,
    opened: Checkpoint,
    *,
    only: Patterns,
    drop: Patterns,
    base: Paths | None,
    storage_options: Mapping[str, Any] | None,
    memory: bool = True,
) -> Info:
    """Describe an open checkpoint; its ``memory`` takes milliseconds to compute."""
    infos = opened.tensors
    adapter = adapters.about(path, opened, base, storage_options)
    names = None if only is drop is None else select(infos, only, drop)
    return Info(
        path=path,
        format=opened.format,
        files={file.path: _size_of(file, opened) for file in opened.weight_files},
        header_nbytes=_header_nbytes(opened),
        notes=opened.notes,
        model=_model(opened.config, opened.metadata),
        metadata=opened.metadata,
        globals=opened.named_globals,
        tensors=infos if names is None else TensorInfos({name: infos[name] for name in names}),
        selected=names is not None,
        tensor_count=len(infos),
        parameters=sum(info.size for info in infos.values()),
        nbytes=opened.nbytes,
        dtypes=totals_of(infos.values()),
        memory=_memory(opened) if memory and infos else {},
        quantization=list(_quantization(opened)),
        adapter=adapter,
    )


def _size_of(file: WeightFile, opened: Checkpoint) -> int:
    """Return the size on disk: of the file itself if it holds tensors of others, such as external data of ONNX."""
    size: int = file.identity[0]
    return size if file.unpacked or file.path == opened.weight_files[0].path else file.size


def _header_nbytes(opened: Checkpoint) -> int | None:
    """Return the bytes of all headers, for formats with a header."""
    if opened.format not in _WITH_HEADER or not opened.weight_files:
        return None
    files = opened.weight_files
    return sum(min((begin for begin, _ in file.table.byte_ranges()), default=file.size) for file in files)


def _memory(opened: Checkpoint) -> dict[str, int]:
    """Return the bytes of all loaded tensors by dtype or scheme; schemes only if they would quantize a tensor."""
    from ..measure.sizes import sizes  # only here: importing it takes milliseconds

    loaded = sizes(opened)
    schemes = {name: nbytes for name, nbytes in loaded.schemes.items() if nbytes != loaded.dtypes.get("float32")}
    return {**loaded.dtypes, **schemes}


def _quantization(opened: Checkpoint) -> Iterator[str]:
    """Yield the labels of packed tensors, and the codes that cannot be dequantized."""
    quantization = None if quantization_of(opened.config) is None else settings_of(opened)
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
        refusals = {(entry.reason, entry.reader) for entry in codes.values() if entry.reader is not None}
        yield from sorted(f"they are {what}: {reader} reads it" for what, reader in refusals)
        reasons = Counter(entry.reason for entry in codes.values() if entry.reason is not None and entry.reader is None)
        yield from (
            f"not dequantized: {plural(tensors, 'tensor')}: {reason}"
            for reason, tensors in reasons.most_common(_REASONS)
        )


def _zeros_disagree(opened: Checkpoint) -> bool:
    """True if the zero points of the smallest weight follow another GPTQ format than configured."""
    groups = (file.table.packed.get(index) for _, file, index in tensors_of(opened))
    packed = [group for group in groups if group is not None and group.packing.zeros is not None]
    return bool(packed) and zeros_disagree(min(packed, key=lambda group: group.nbytes))


# ---- the model ----


def _model(config: Mapping[str, Any] | None, metadata: Mapping[Any, Any]) -> str:
    """Describe the model, such as "llama, 12 layers, hidden 512, vocabulary 32,000, bfloat16"; "" if unknown."""
    # Values of unexpected types are left out.
    if config is None:
        name = metadata.get(ARCHITECTURE)
        if not isinstance(name, str):
            return ""
        if model_of(metadata) is not None:
            return f"{name}, diffusion model"
        keys = ("block_count", "expert_count", "embedding_length", "vocab_size")
        sizes = [_number(metadata, f"{name}.{key}") for key in keys]
        dtype = None
    else:
        from ...models.choosing import LANGUAGE  # imported here: most files have no config.json

        inner = next((part for key in LANGUAGE if isinstance(part := config.get(key), Mapping)), {})
        both = {**inner, **config}
        name, dtype = _text(config, "model_type"), _text(both, "torch_dtype", "dtype")
        sizes = [_number(both, *keys) for keys in (_LAYERS, _EXPERTS, _HIDDEN, ("vocab_size",))]
    layers, experts, hidden, words = sizes
    parts = (
        clip(name or "", _TEXT),
        "" if layers is None else plural(layers, "layer"),
        f"{experts:,} experts" if experts else "",
        "" if hidden is None else f"hidden {hidden:,}",
        "" if words is None else f"vocabulary {words:,}",
        clip(dtype or "", _TEXT),
    )
    return ", ".join(filter(None, parts))


def _text(values: Mapping[Any, Any], *keys: str) -> str | None:
    return next((text for key in keys if isinstance(text := values.get(key), str)), None)


def _number(values: Mapping[Any, Any], *keys: str) -> int | None:
    numbers = (values.get(key) for key in keys)
    return next((int(v) for v in numbers if isinstance(v, int) and type(v) is not bool and 0 <= v < _NUMBER), None)
