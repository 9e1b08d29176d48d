"""Describe checkpoints: tensors, metadata, adapters; as values, and as the listing of ``safeload info``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..core import checkpoint as loading
from ..core.checkpoint import Checkpoint, TensorInfos, codes_of, settings_of, tensors_of
from ..core.files import read_json
from ..core.names import Patterns, Selection, families, natural_key
from ..core.opening import Paths
from ..core.registry import FormatName, UnknownGlobals
from ..core.runtime import paused
from ..core.showing import Result, parts_of, plain, quantity, shorten, table, terminal_columns, terminal_rows, wrap
from ..core.table import TensorInfo
from ..core.text import clip, listed, plural, printable, show, size
from ..errors import FormatError, SafeloadError, UnsupportedError, exported, one_line, public
from ..models.diffusion import ARCHITECTURE, is_of_tower, model_of
from ..models.module_names import adapter_kind, is_merged
from ..quant.gptq import zeros_disagree
from ..quant.quantization import mapping, quantization_of
from ..remote.url import is_url, shown

if TYPE_CHECKING:  # these import more than `info` needs
    from ..adapters.adapter import Adapter
    from .findings import Finding

ROWS = 100  # at most, on a terminal
_ITEMS = 8  # values shown of a list in the metadata, such as a vocabulary; --json has all
_LEVELS = 32  # of the tree, which is walked recursively; deeper names stay whole
_REASONS = 3  # why known families cannot be dequantized
_MODULES, _NAMES = 12, 6  # module kinds, and tensor names, in a line about an adapter
_TEXT, _NUMBER = 80, 10**12  # the longest text and the largest number of a config: larger values are garbage

_WITH_HEADER = ("safetensors", "gguf")  # formats with a header before the first tensor
_COUNTS = ("tensors", "elements", "nbytes")  # of a dtype
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


@exported()
class AdapterFitting(NamedTuple):
    """How an adapter fits a base: ``adapter.fitting`` of `Info`.

    Attributes:
        base: path of the base.
        changed: number of base tensors that the adapter changes.
        packed: number of changed tensors that are packed, and dequantized when merged.
        total: number of base tensors.
        problems: messages about tensors that do not fit.

    Example:
        >>> import safeload
        >>> safeload.info("tiny-lora", base="tiny-llama").adapter.fitting.total
        30
    """

    base: str
    changed: int
    packed: int
    total: int
    problems: list[str]


@exported()
class AdapterSummary(NamedTuple):
    """An adapter, summarized: ``adapter`` of `Info`.

    Attributes:
        method: "LoRA", "rsLoRA", "DoRA" or "rsLoRA and DoRA", or other kinds: "AdaLoRA", "VeRA", "LoHa", "LoKr",
            "IA3", "OFT", "BOFT".
        writer: "PEFT", "MLX", "llama.cpp", or for diffusion models "kohya", "ComfyUI", "kohya or ComfyUI", "diffusers",
            "XLabs" or "LyCORIS".
        ranks: ranks of its modules, ascending; empty for IA3, OFT and BOFT.
        alphas: alphas of its modules, ascending; the scale factors of an MLX adapter. Kinds without alphas: empty.
        modules: number of modules by the last part of their names, most frequent first.
        embeddings: names of embeddings that it changes.
        parameters: name suffixes of changed tensors other than layer weights.
        replaced: base tensors that it stores whole.
        biases: number of biases that it adds to.
        config: its parsed configuration.
        fitting: how it fits the base: ``fitting.problems`` is empty if it does. None without a base.

    Example:
        >>> import safeload
        >>> adapter = safeload.info("tiny-lora", base="tiny-llama").adapter
        >>> adapter.method, adapter.ranks, adapter.fitting.problems
        ('LoRA', [4], [])
    """

    method: str
    writer: str
    ranks: list[int]
    alphas: list[float]
    modules: dict[str, int]
    embeddings: list[str]
    parameters: list[str]
    replaced: list[str]
    biases: int
    config: dict[str, Any]
    fitting: AdapterFitting | None


# An adapter; the reason why it cannot be merged; None for other checkpoints.
Found: TypeAlias = AdapterSummary | str | None


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
    adapter: Found

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
            **{key: getattr(self, key) for key in selected},
            "memory": {**self.memory},
            "dtypes": {code: dict(zip(_COUNTS, counts, strict=True)) for code, counts in self.dtypes.items()},
            "adapter": _adapter_json(self.adapter),
            **({"selected": selected} if self.selected else {}),
            "tensors": [{**info._asdict(), "stored_nbytes": info.nbytes} for info in infos],
        }

    def __str__(self) -> str:
        shown = lines(self, title_of(self.path), columns=terminal_columns(), rows=terminal_rows(ROWS))
        return "\n".join(line for line, _ in shown)

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
        path, format=format, root=root, unknown_globals=unknown_globals, stored=stored, storage_options=storage_options
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
    adapter = _adapter(path, opened, base, storage_options)
    names = None if only is drop is None else Selection(only, drop).of(infos)
    # Of other files than these the size is that of the tensors alone, such as external data of ONNX.
    whole = [file for file in opened.weight_files if file.unpacked or file.path == opened.weight_files[0].path]
    begins = (min((at for at, _ in file.table.byte_ranges()), default=file.size) for file in opened.weight_files)
    loaded: dict[str, int] = {}
    if memory and infos:
        from .sizes import sizes  # only here: importing it takes milliseconds

        measured = sizes(opened)
        loaded = {**measured.dtypes, **measured.smaller}
    return Info(
        path=path,
        format=opened.format,
        files={file.path: file.identity[0] if file in whole else file.size for file in opened.weight_files},
        header_nbytes=sum(begins) if opened.weight_files and opened.format in _WITH_HEADER else None,
        notes=[*opened.notes, *_origin_of(path)],
        model=_model(opened.config, opened.metadata),
        metadata=opened.metadata,
        globals=opened.named_globals,
        tensors=infos if names is None else TensorInfos({name: infos[name] for name in names}),
        selected=names is not None,
        tensor_count=len(infos),
        parameters=sum(info.size for info in infos.values()),
        nbytes=opened.nbytes,
        dtypes=totals_of(infos.values()),
        memory=loaded,
        quantization=list(_quantization(opened)),
        adapter=adapter,
    )


def _origin_of(path: str) -> list[str]:
    """Describe the record of origin beside a local model, if it has a readable one (see `conversion.origin`)."""
    place = os.path.join(path, "origin.json") if os.path.isdir(path) else f"{path}.origin.json"
    record: Mapping[str, Any] = {}
    with suppress(SafeloadError, OSError):
        if "://" not in path and os.path.isfile(place):
            record = mapping(read_json(place, "the record of origin").get("origin"))
    sources = record.get("sources")
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        return []
    names = (str(source.get("repository") or source.get("name") or source.get("url")) for source in sources)
    revisions = (f" at {source['revision']}" if source.get("revision") else "" for source in sources)
    options = "".join(f", {key}={show(value)}" for key, value in mapping(record.get("options")).items())
    listed_sources = ", ".join(map("".join, zip(names, revisions, strict=True)))
    return [f"converted from {listed_sources} by safeload {record.get('version')}{options}"]


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
        groups = (file.table.packed.get(index) for _, file, index in tensors_of(opened))
        with_zeros = [group for group in groups if group is not None and group.packing.zeros is not None]
        if with_zeros and zeros_disagree(min(with_zeros, key=lambda group: group.nbytes)):
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
        keys, dtype = ("block_count", "expert_count", "embedding_length", "vocab_size"), None
        sizes = [_number(metadata, f"{name}.{key}") for key in keys]
        if is_of_tower(metadata):  # sizes of each tower, and the types of their projectors
            towers = [tower for tower in ("vision", "audio") if metadata.get(f"{name}.has_{tower}_encoder") is True]
            tower = next(iter(towers), "vision")
            sizes = [_number(metadata, f"{name}.{tower}.{key}") for key in keys]
            types = (text_in(metadata, f"{name}.{part}projector_type") for part in ("", *(f"{t}." for t in towers)))
            name = f"{' and '.join(filter(None, types)) or name} (mmproj: the {' and '.join(towers) or tower} part)"
    else:
        from ..models.schema import language_of  # imported here: most files have no config.json

        both = {**language_of(config), **config}
        name, dtype = text_in(config, "model_type"), text_in(both, "torch_dtype", "dtype")
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


def text_in(values: Mapping[Any, Any], *keys: str) -> str | None:
    """Return the first text under the keys."""
    return next((text for key in keys if isinstance(text := values.get(key), str)), None)


def _number(values: Mapping[Any, Any], *keys: str) -> int | None:
    numbers = (values.get(key) for key in keys)
    return next((int(v) for v in numbers if isinstance(v, int) and type(v) is not bool and 0 <= v < _NUMBER), None)


# ---- the adapter ----


def _is_adapter(path: str, opened: Checkpoint, base: Paths | None) -> bool:
    """Recognize an adapter by its names; refuse a base for anything else."""
    adapter = any(".lora_" in name or name.startswith("base_model.model.") for name in opened)
    adapter = adapter or is_merged(adapter_kind(opened))
    if base is not None and not adapter:
        raise ValueError(f"base= needs a LoRA adapter, got {path}")
    return adapter


def _adapter(path: str, opened: Checkpoint, base: Paths | None, storage_options: Mapping[str, Any] | None) -> Found:
    try:
        return _summarized(opened, base, storage_options) if _is_adapter(path, opened, base) else None
    except (SafeloadError, OSError) as error:
        if base is not None:
            raise
        return None if isinstance(error, FileNotFoundError) else f"it cannot be merged: {one_line(error)}"


def _summarized(opened: Checkpoint, base: Paths | None, storage_options: Mapping[str, Any] | None) -> AdapterSummary:
    from ..adapters import adapter as files  # imported here: few files are adapters
    from ..adapters import kinds as parts
    from ..adapters.base import outermost

    adapter = files.adapter_of(opened)
    modules = adapter.modules
    factors = {name: module for name, module in modules.items() if parts.changing(module)}
    names = [outermost(name) for name in factors]
    kinds = Counter(adapter.ends.split(name)[-1] for name in names).most_common()
    ranks: Iterable[Any] = {adapter.rank(name) for name in factors}
    alphas: Iterable[float] = {adapter.alpha_of(name) for name in names if adapter.kind.alpha_key}
    if adapter.parameters:  # only a base has their names and numbers of matrices
        ranks, alphas = {adapter.default_rank, *adapter.ranks.values()}, {adapter.alpha, *adapter.alphas.values()}
    dora = any(module.keys() & {parts.MAGNITUDE, parts.SCALE} for module in factors.values())
    method = [name for name, used in (("rsLoRA", adapter.rslora), ("DoRA", dora)) if used]
    titles = dict.fromkeys(kind.title for module in factors.values() if (kind := parts.kind_of(module)) is not None)
    return AdapterSummary(
        " and ".join(method or titles) or adapter.kind.title,
        adapter.writer,
        sorted(filter(None, ranks)),
        sorted(alphas),
        dict(kinds),
        [name for name, module in factors.items() if module.keys() & parts.EMBEDDING_ROLES],
        list(adapter.parameters),
        [name for name, module in modules.items() if parts.VALUE in module],
        sum(parts.BIAS in module for module in modules.values()),
        dict(adapter.config),
        None if base is None else _fitted(adapter, base, storage_options)[0],
    )


def _fitted(
    adapter: Adapter, base: Paths, storage_options: Mapping[str, Any] | None
) -> tuple[AdapterFitting, list[SafeloadError]]:
    """Return how an adapter fits a base, and its tensors that do not."""
    from ..adapters.merge import fit

    errors: list[SafeloadError] = []
    with loading.open(base, storage_options=storage_options) as opened:
        _, merge = fit(opened, [adapter], errors)
        packed = sum(merge.base.target(name).row is None for name in merge.changes)
        messages = [str(error.args[0]).removeprefix(f"{error.path}: ") for error in errors]
        return AdapterFitting(opened.path, len(merge.changes), packed, len(opened), messages), errors


def misfits_of(source: Any, base: Paths, storage_options: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Find the tensors of an adapter, a path or an open checkpoint, that do not fit a base."""
    from ..adapters.adapter import adapter_of  # only here: importing these takes milliseconds
    from ..conversion.catalog import is_path
    from .findings import find

    reading = loading.open(source, storage_options=storage_options) if is_path(source) else nullcontext(source)
    with reading as opened:
        _is_adapter(opened.path, opened, base)
        try:
            _, problems = _fitted(adapter_of(opened), base, storage_options)
        except (FormatError, UnsupportedError) as error:
            problems = [error]
    for problem in problems:
        text, about = one_line(problem).removeprefix(f"{problem.path}: "), f"tensor {show(problem.tensor or '')} "
        yield find("adapter.base", problem.tensor, problem=text.removeprefix(about).removeprefix("of the adapter "))


def _adapter_lines(found: Found, rows: int | None, rest: Callable[[int, str], str]) -> list[str]:
    """Return lines about an adapter, some of them empty; ``rest`` returns a line for the problems beyond ``rows``."""
    if not isinstance(found, AdapterSummary):
        return [found or ""]
    rank, alpha = ("rank", "scale") if found.writer == "MLX" else ("r", "alpha")
    kinds = [f"{count:,} {name}" for name, count in found.modules.items()]
    spans = ((rank, found.ranks), (alpha, found.alphas))
    scales = [f"{name} {_span(values)}" for name, values in spans if values]
    lines = [
        f"{found.method}: {', '.join(scales)}" if scales else "",
        f"changes {plural(sum(found.modules.values()), 'module')}: {listed(kinds, _MODULES)}" if kinds else "",
        f"parameters: {listed(found.parameters, _NAMES)}" if found.parameters else "",
        f"embeddings: {listed(found.embeddings, _NAMES)}" if found.embeddings else "",
        f"adds to {found.biases:,} bias{'es' if found.biases > 1 else ''}" if found.biases else "",
        f"replaces {plural(len(found.replaced), 'tensor')}: {listed(found.replaced, _NAMES)}" if found.replaced else "",
    ]
    fitting = found.fitting
    if fitting is not None and fitting.problems:
        lines.append(f"does not fit {fitting.base}: {plural(len(fitting.problems), 'problem')}")
        lines += [f"  {problem}" for problem in fitting.problems[:rows]]
        if rows is not None and len(fitting.problems) > rows:
            lines.append(f"  {rest(len(fitting.problems) - rows, 'problem')}")
    elif fitting is not None:
        packed = f", {fitting.packed:,} of them packed" if fitting.packed else ""
        lines.append(
            f"fits {fitting.base}: changes {fitting.changed:,} of its {plural(fitting.total, 'tensor')}{packed}"
        )
    return lines


def _adapter_json(found: Found) -> dict[str, Any] | None:
    if found is None or isinstance(found, str):
        return None if found is None else {"merged": False, "why": found}
    keys = ("base_model_name_or_path", "modules_to_save")
    plain = {"merged": True, **found._asdict(), **{key: found.config.get(key) for key in keys}}
    del plain["config"], plain["fitting"]
    if found.fitting is not None:
        plain["base"] = {"fits": not found.fitting.problems, **found.fitting._asdict()}
    return plain


def misfits(found: Found) -> bool:
    """True if a base was given and the adapter does not fit."""
    return isinstance(found, AdapterSummary) and found.fitting is not None and bool(found.fitting.problems)


def _span(values: list[Any]) -> str:
    low, high = f"{values[0]:g}", f"{values[-1]:g}"
    return low if low == high else f"{low} to {high}"


# ---- the listing ----


class Row(NamedTuple):
    """A tensor, a group of equal tensors, or the sum of a module."""

    name: str  # with braces for a group, such as ``h.{0..11}.w``
    dtype: str  # "" for a module
    shape: tuple[int, ...] | None  # of each tensor; None for a module
    number: int  # of tensors
    parameters: int  # of all tensors
    nbytes: int  # of all tensors


# Sort keys; numbers in descending order.
KEYS: dict[str, Callable[[Row], Any]] = {
    "name": lambda row: natural_key(row.name),
    "dtype": lambda row: (row.dtype, natural_key(row.name)),
    "shape": lambda row: tuple(-dim for dim in row.shape or ()),
    "parameters": lambda row: -row.parameters,
    "size": lambda row: -row.nbytes,
}


def lines(
    info: Info,
    title: str,
    *,
    columns: int | None,  # the width; None cuts nothing
    rows: int | None = ROWS,  # maximum number of rows; None shows all
    hint: str = "",  # the end of lines that count hidden rows
    sort: str | None = None,  # one of `KEYS`
    alone: bool = False,  # give each tensor its own row
    tree: bool = False,
    depth: int | None = None,  # maximum number of levels of the tree
    memory: bool = False,  # show the size when loaded
    words: Callable[[str], str] = str,  # translates messages
) -> Iterator[tuple[str, str]]:
    """Yield the lines of the listing, each with its colour or ""."""
    infos, sizes = list(info.tensors.values()), list(info.files.values())
    totals = totals_of(infos)
    parameters, nbytes = (sum(total[k] for total in totals.values()) for k in (1, 2))

    def rest(hidden: int, noun: str) -> str:
        return f"... and {plural(hidden, noun)} more{hint}"

    def wrapped(line: str) -> Iterator[tuple[str, str]]:  # prose takes at most four lines on a terminal
        line = printable(line)
        for part in [line] if columns is None else wrap(clip(line, 4 * columns), columns, hanging="  "):
            yield part, ""

    counts = [
        plural(len(sizes), "file") if len(sizes) > 1 else "",
        info.format,
        plural(info.tensor_count, "tensor"),
        quantity(info.parameters, "parameter") if info.tensor_count else "",
        size(sum(sizes)),
    ]
    yield from wrapped(f"{title}: {', '.join(filter(None, counts))}")
    if len(sizes) > 1:
        files = [printable(os.path.basename(file)) for file in info.files][:rows]
        for name, total in zip(shorten(files, None if columns is None else columns - 16), sizes, strict=False):
            yield f"  {name}  {size(total)}", ""
        if len(files) < len(sizes):
            yield f"  ... and {plural(len(sizes) - len(files), 'file')} more", ""
    loaded = ", ".join(f"{name} {size(total)}" for name, total in info.memory.items()) if memory else ""
    remarks = [
        *info.notes,
        *_adapter_lines(info.adapter, rows, rest),
        info.model,
        *info.quantization,
        f"header: {size(info.header_nbytes)}" if info.header_nbytes is not None and info.tensor_count else "",
        f"memory: as {loaded}" if loaded else "",
    ]
    for line in filter(None, remarks):
        yield from wrapped(words(line))
    if info.selected:
        count = f"{len(infos):,} of {plural(info.tensor_count, 'tensor')}"
        yield f"selected: {count}, {quantity(parameters, 'parameter')}, {size(nbytes)}", ""
    if info.metadata:
        yield from (("", ""), ("metadata", "head"))
        for key, value in info.metadata.items():
            yield "  " + clip(printable(f"{key}: {_brief(value)}"), None if columns is None else columns - 2), ""
    if info.globals:
        yield from (("", ""), ("globals that the pickle references (nothing is imported or called)", "head"))
        for name, harmless in list(info.globals.items())[: None if columns is None else ROWS]:
            shown = clip(printable(name), None if columns is None else columns - 30)
            yield f"  {shown}{'' if harmless else '  not on the allowlist, kept inert'}", ""
    if not totals:
        return
    sums = [(code, f"{n:,}", f"{count:,}", size(total)) for code, (n, count, total) in totals.items()]
    if len(sums) > 1:
        sums.append(("total", f"{len(infos):,}", f"{parameters:,}", size(nbytes)))
    yield "", ""
    yield from _table(("dtype", "tensors", "elements", "size"), sums, 1, columns)
    yield "", ""
    every = rows_of(infos, alone=alone, sort=None if tree else sort)
    if tree:
        every = list(_walk([(parts_of(row.name, _LEVELS), row) for row in every], sort, depth, 0))
    first = every[:rows]
    with paused(len(first)):
        header = ("module", "dtype", "shape", "parameters", "size") if tree else ("tensor", "dtype", "shape", "size")
        cells = [
            (printable(row.name), row.dtype, _shape(row), *((f"{row.parameters:,}",) if tree else ()), size(row.nbytes))
            for row in first
        ]
        table_lines = _table(header, cells, 3, columns)
    yield from table_lines
    if len(first) < len(every):
        hidden = len(every) - len(first) if tree else len(infos) - sum(row.number for row in first)
        yield rest(hidden, "row" if tree else "tensor"), ""


def _table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: int, columns: int | None
) -> list[tuple[str, str]]:
    """Return the lines of a table, of which the first ``left`` columns are text, each with its colour or ""."""
    head, *body = table(header, rows, right=frozenset(range(left, len(header))), columns=columns)
    return [(head, "head"), *((line, "") for line in body)]


def _shape(row: Row) -> str:
    return "" if row.shape is None else str([*row.shape]) + (f" x {row.number:,}" if row.number > 1 else "")


def _brief(value: Any) -> str:
    """Format a metadata value, cutting long lists."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, np.ndarray)) and len(value) > _ITEMS:
        return f"{len(value):,} values, {json.dumps(plain(value[:_ITEMS], lossless=True))[:-1]}, ..."
    return json.dumps(plain(value, lossless=True))


def rows_of(infos: Sequence[TensorInfo], *, alone: bool, sort: str | None) -> list[Row]:
    """Return rows in file order, with equal layers in one row; if ``alone``, a row per tensor in natural order."""
    with paused(len(infos)):
        if alone:
            rows = sorted((Row(i.name, i.dtype, i.shape, 1, i.size, i.nbytes) for i in infos), key=KEYS["name"])
        else:
            kinds = [(i.dtype, i.shape, i.nbytes) for i in infos]
            rows = [
                Row(name, *infos[first][1:3], number, number * infos[first].size, number * infos[first].nbytes)
                for name, first, number in families([i.name for i in infos], kinds)
            ]
        return rows if sort is None else sorted(rows, key=KEYS[sort])


def _walk(rows: Sequence[tuple[Sequence[str], Row]], key: str | None, depth: int | None, level: int) -> Iterator[Row]:
    """Yield the rows of a module, given the parts of their names below it."""
    groups: dict[Any, list[tuple[Sequence[str], Row]]] = {}
    for k, (parts, row) in enumerate(rows):
        # Rows of tensors can share a name, if dtypes or shapes of layers differ.
        groups.setdefault(parts[0] if len(parts) > 1 else k, []).append((parts, row))
    nodes: list[tuple[Row, list[tuple[Sequence[str], Row]]]] = []
    for inside in groups.values():
        if len(inside) == 1:
            ((parts, row),) = inside
            nodes.append((row._replace(name="".join(parts)), []))
            continue
        # A module with an only child is joined with it: model.layers instead of layers in model.
        columns = zip(*(parts[:-1] for parts, _ in inside), strict=False)  # as long as the shortest name
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        number, parameters, nbytes = map(sum, zip(*(row[3:] for _, row in inside), strict=True))
        own = Row("".join(common), "", None, number, parameters, nbytes)
        nodes.append((own, [(parts[len(common) :], row) for parts, row in inside]))
    if key is not None:
        nodes.sort(key=lambda node: KEYS[key](node[0]))
    for row, inside in nodes:
        yield row._replace(name="  " * level + (row.name[:-1] if inside else row.name))
        if depth is None or level + 1 < depth:
            yield from _walk(inside, key, depth, level + 1)
