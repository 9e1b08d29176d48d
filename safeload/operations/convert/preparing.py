"""What a conversion begins with: its arguments, checked, and what becomes of each tensor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypedDict

from ...base import dtypes, log
from ...base.arrays import check_mapping
from ...base.gc_pause import paused
from ...base.packing import MLX
from ...base.selecting import Patterns, Renames, check_matches, renamed
from ...base.text import parse_size, plural, show
from ...engine.read.lazy import LazyPacked
from ...engine.read.load import parse_target
from ...errors import UnsupportedError
from ...formats.gguf import file_type
from ...formats.metadata import as_texts
from ...formats.registry import BY_NAME, SAFETENSORS, SUFFIXES, WEIGHT_SUFFIXES, WRITTEN, WrittenName
from ...models.layout import Layout
from ...packed.config import is_kept_by
from ...stores.files import Location
from ..folders import unfinished
from ..folders.destinations import USUAL_SIZE, Destination, of, where
from ..folders.shard_folder import Folder
from ..folders.shards import Output, extras_of
from ..quantize.checkpoint import Keep, Rules, Scheme
from ..sources.catalog import Catalog, Given, has_names
from .conversion import Conversion, Some
from .decisions import Decision
from .making import Maker

# Names that mlx-lm gives to the stacked experts of a layer.
_MLX_EXPERTS = re.compile(r"\.(?:switch_mlp|experts)\.(?:gate_proj|up_proj|down_proj|fc1|fc2)\.weight\Z")


class ConvertOptions(TypedDict, total=False):
    """Options of `safeload.plan_convert`: those of `safeload.convert` that say what the result is."""

    dtype: Any
    quantize: Scheme | None
    layout: Layout | None
    names: Iterable[str] | None
    only: Patterns
    drop: Patterns
    keep: Keep
    rename: Renames
    metadata: Mapping[str, Any] | None
    adapters: Any
    max_shard_size: int | str | None
    format: WrittenName | None
    extras: bool
    storage_options: Mapping[str, Any] | None


class ConvertRequest(NamedTuple):
    """The checked options of a conversion.

    Attributes:
        path: of the destination, as messages have it.
        format: of the result.
        folder: the destination, if it is a folder.
        limit: most bytes of a shard of a folder.
        target: dtype for floating tensors; None to leave it.
        options: as given.
    """

    path: str
    format: str
    folder: Folder | None
    limit: int
    target: dtypes.Dtype | None
    options: ConvertOptions


def wanted_of(dst: Destination, options: ConvertOptions) -> ConvertRequest:
    """Checks the options that need no source.

    Raises:
        TypeError, ValueError: wrong arguments.
        UnsupportedError: a destination that cannot be written to.
        FileNotFoundError: a repository that does not exist.
    """
    for key in options.keys() - ConvertOptions.__annotations__.keys():
        raise TypeError(f"unexpected argument {show(key)}")
    target = parse_target(options.get("dtype"))
    if options.get("keep") is not None and options.get("quantize") is None:
        raise ValueError("keep= says what quantize= leaves unquantized: pass quantize= too")
    place, most = where(dst, options.get("storage_options")), options.get("max_shard_size")
    format = _format_of(place, options)
    folder = None if most is None and not place.files.remote else of(place)
    limit = parse_size(USUAL_SIZE if most is None else most, "max_shard_size")
    return ConvertRequest(place.shown, format, folder, limit, target, options)


class Prepared(NamedTuple):
    """A conversion whose every tensor is decided, and named; nothing is read yet.

    Attributes:
        catalog: the sources.
        work: has decided.
        decisions: what becomes of each tensor of the result, by its name before ``rename``.
        outputs: the tensors by name.
        metadata: of the result.
        extras: other files to copy into a folder, by name.
    """

    catalog: Catalog
    work: Conversion
    decisions: dict[str, Decision]
    outputs: dict[str, Output]
    metadata: Mapping[Any, Any]
    extras: dict[str, Location]

    @property
    def tensors(self) -> int:
        """Number of tensors of the result."""
        return sum(name not in self.catalog.ignored for name in self.decisions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(output.nbytes for output in self.outputs.values())


def prepare(
    stack: ExitStack, src: Given | Sequence[Given], wanted: ConvertRequest, threads: int | None = None
) -> Prepared:
    """Opens the sources, and decides.

    Args:
        stack: closes the sources.
        src: see `convert`.
        wanted: the checked options.
        threads: for reading and converting; None: chosen automatically.

    Raises:
        SafeloadError, ValueError, OSError: see `convert`.
    """
    options = wanted.options
    quantize, keep = options.get("quantize"), options.get("keep")
    rules = None if quantize is None else Rules(quantize, keep)
    catalog = stack.enter_context(catalog_of(src, options.get("storage_options")))
    if options.get("adapters") is not None:
        from .merged import merged  # only here: most conversions merge nothing

        with_config = wanted.folder is not None
        catalog = merged(stack, catalog, options["adapters"], options.get("storage_options"), with_config=with_config)
    with paused(len(catalog)):
        return _prepared(catalog, wanted, rules, threads)


def _prepared(catalog: Catalog, wanted: ConvertRequest, rules: Rules | None, threads: int | None) -> Prepared:
    options, format = wanted.options, wanted.format
    keep, layout = options.get("keep"), options.get("layout")
    some = Some(options.get("names"), options.get("only"), options.get("drop"))
    work = Conversion(catalog, some, wanted.target, rules, format)
    if not callable(keep):
        check_matches("keep", keep, work.names)
    decisions = work.of_layout(layout) if layout is not None else work.of_tensors()
    if wanted.target is None and rules is None:
        for source in {source for one in decisions.values() for source in one.sources if one.stack is None}:
            catalog.check_kept(source)
    outputs = Maker(catalog, decisions, format, threads).outputs()
    names = renamed(outputs, options.get("rename"))
    for name, output in outputs.items():
        _check_rename(name, names[name], output)
    if work.restored:
        _warn_of_stacks(catalog, names, wanted.path)
    outputs = {names[name]: output for name, output in outputs.items()}
    metadata = metadata_for(catalog, wanted)
    changed = wanted.target is not None or rules is not None
    if format == "gguf" and changed and file_type.KEY not in (options.get("metadata") or {}):
        metadata = file_type.updated(metadata, outputs.values())
    return Prepared(catalog, work, decisions, outputs, metadata, extras_for(catalog, wanted))


def _warn_of_stacks(catalog: Catalog, names: Mapping[str, str], path: str) -> None:
    """Warn of dequantized experts that keep the names of MLX, because no other library loads them."""
    stacks = [new for name, new in names.items() if _MLX_EXPERTS.search(new) and _of_mlx(catalog, name)]
    if stacks:
        more = f" and {plural(len(stacks) - 1, 'more tensor')}" if stacks[1:] else ""
        log.warning(
            "%s: the experts of a layer are stacked as in MLX (%s%s): transformers and vLLM do not load them under "
            "these names. Convert the checkpoint that the MLX one was made from, or split the stacks",
            path,
            show(stacks[0]),
            more,
        )


def _of_mlx(catalog: Catalog, name: str) -> bool:
    """Whether a file of MLX holds a tensor packed."""
    file, number = catalog.place(name)[1:] if name in catalog else (None, 0)
    packed = None if file is None else file.table.packed(number)
    return packed is not None and packed.packing.family == MLX


def extras_for(catalog: Catalog, wanted: ConvertRequest) -> dict[str, Location]:
    """Other files to copy into the folder that a conversion makes, by name."""
    folder = catalog.folder if wanted.options.get("extras", True) and wanted.folder is not None else None
    return {} if folder is None else extras_of(folder)


def _format_of(place: Location, options: ConvertOptions) -> str:
    """The format to write: ``format=``, or else the one that the suffix of the destination selects.

    Raises:
        ValueError: an unknown format or suffix, or a suffix of files of another format.
    """
    format, path, sharded = options.get("format"), place.shown, options.get("max_shard_size") is not None
    if format is not None and format not in WRITTEN:
        raise ValueError(f"format must be one of {', '.join(WRITTEN)}, got {show(format)}")
    suffix = os.path.splitext(path)[1].lower()
    if place.files.remote or sharded:
        if format not in (None, SAFETENSORS):
            raise ValueError(f"{show(path)} becomes a folder of safetensors shards, got format={show(format)}")
        if sharded and not place.files.remote and any(suffix in suffixes for suffixes in WRITTEN.values()):
            raise ValueError(f"max_shard_size writes a folder, but {show(path)} has the suffix of a file")
        return SAFETENSORS
    known = ", ".join(SUFFIXES)
    if format is not None:
        if suffix in WEIGHT_SUFFIXES and suffix not in WRITTEN[format]:
            usual = " or ".join(WRITTEN[format])
            raise ValueError(f"{show(path)} has the suffix of another format than {format}: use {usual}")
        return format
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    for name, suffixes in WRITTEN.items():
        if suffix in suffixes:
            if options.get("layout") is not None:
                return name
            raise ValueError(
                f"{show(path)}: other programs take {suffix} for a torch file: use one of {known}, or pass "
                f'format="{name}" if you mean {BY_NAME[name].title}'
            )
    raise ValueError(f"{show(path)}: the suffix must be one of {known}; a folder needs max_shard_size")


def catalog_of(src: Given | Sequence[Given], storage_options: Mapping[str, Any] | None) -> Catalog:
    """The sources of a conversion, open."""
    if isinstance(src, Catalog):
        return Catalog.of(src)
    given: list[Given] = [src] if has_names(src) else list(src)  # type: ignore[arg-type]
    if not given:
        raise ValueError("there is nothing to convert: no source")
    unfinished.check_given(given)
    catalog = Catalog.of(given, storage_options)
    try:
        unfinished.check_opened(catalog)
    except BaseException:
        with catalog:
            raise
    return catalog


def _check_rename(name: str, new: str, output: Output) -> None:
    """Refuses a new name of a packed tensor under which its configuration would describe it in another way.

    Raises:
        UnsupportedError: the configuration has an entry for its module.
    """
    if new == name or not isinstance(output, LazyPacked):
        return
    module, renamed_module = name.removesuffix(".weight"), new.removesuffix(".weight")
    if not is_kept_by(output.packing.config, module, renamed_module):
        raise UnsupportedError(
            f"rename: tensor {show(name)} stays packed, and the quantization in its config.json names module "
            f"{show(module)}: pass dtype= to dequantize it",
            tensor=name,
        )


def metadata_for(catalog: Catalog, wanted: ConvertRequest) -> Mapping[Any, Any]:
    """The metadata of the result: that of the sources, with what the caller adds, replaces and removes.

    Raises:
        TypeError: it is not a mapping of text.
        ValueError: the format has no metadata to add to.
    """
    own, given, format = catalog.metadata, wanted.options.get("metadata"), wanted.format
    if not given:
        return own
    check_mapping(given, "metadata", "text to text")
    merged = dict(own)
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata: a key is text, found {show(key)}")
        if value is None:
            merged.pop(key, None)
        elif not BY_NAME[format].metadata:
            raise ValueError(f"{format} files have no metadata, but metadata= has {show(key)}")
        elif not as_texts({key: value}):
            raise TypeError(f"metadata: {show(key)} is of type {type(value).__name__}, which {format} does not hold")
        else:
            merged[key] = value
    return merged
