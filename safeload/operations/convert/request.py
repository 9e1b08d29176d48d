"""The arguments of a conversion, checked, and its open sources."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ...base import dtypes, log
from ...base.arrays import check_mapping
from ...base.paths import PathLike
from ...base.selecting import Patterns, Renames, Selection
from ...base.text import plural, show
from ...engine.read.load import parse_target
from ...errors import SafeloadError, VerificationError
from ...formats.folder import read_config
from ...formats.metadata import as_texts
from ...formats.registry import (
    BY_NAME,
    SAFETENSORS,
    SUFFIXES,
    WEIGHT_SUFFIXES,
    WRITTEN,
    WrittenName,
    plugin_rows,
    row_of,
    written_suffixes,
)
from ...models.choosing import choose
from ...models.diffusion import ARCHITECTURE, is_rearranged, model_of
from ...models.family import engine_model_types, gguf_forms
from ...models.layout import Layout
from ...models.module_names import adapter_note, refuse_adapters
from ...packed.families import Preset, preset_of
from ...stores.files import Location
from ..folders.destinations import Destination, check_writable, is_folder, limit_of, sink_of, where
from ..folders.shards import extras_of
from ..folders.sink import Sink
from ..quantize.encoding import WEIGHTS
from ..quantize.file_types import ConvertScheme
from ..quantize.keeping import Keep
from ..sources.catalog import Catalog, Given, has_names, is_path

if TYPE_CHECKING:
    from ...formats.verifying import Verify


_EMBEDDING = "embed_tokens.weight"
# Options with which the result is no complete model.
_SELECTING = ("layout", "names", "only", "drop", "rename")


class ConvertOptions(TypedDict, total=False):
    """Options of `safeload.plan_convert`: the arguments of `safeload.convert` that determine the result."""

    dtype: Any
    quantize: ConvertScheme | None
    imatrix: PathLike | None
    layout: Layout | None
    names: Iterable[str] | None
    only: Patterns
    drop: Patterns
    keep: Keep
    ignore: Keep
    rename: Renames
    metadata: Mapping[str, Any] | None
    adapters: Any
    max_shard_size: int | str | None
    format: WrittenName | None
    extras: bool
    raw: bool
    storage_options: Mapping[str, Any] | None


class ConvertRequest(NamedTuple):
    """The checked options of a conversion."""

    path: str  # destination, as messages show it
    format: str  # format of the result
    place: Location  # destination
    folder: Sink | None  # the destination if it is a folder
    limit: int  # largest size of a shard in bytes
    target: dtypes.Dtype | None  # dtype for floating tensors; None leaves floats unchanged
    options: ConvertOptions  # with every key, and lists for iterables
    preset: Preset | None  # an engine's format; None for safeload's own schemes and without ``quantize``
    selecting: list[str]  # options that leave out or rename tensors, so that no complete model results
    by_name: bool  # True if options name the tensors of the result
    every_tensor: bool  # True if no option leaves out tensors of the source

    def chosen(self, catalog: Catalog, more: Iterable[str] = ()) -> list[str]:
        """Return the names of the selected tensors; patterns can also match the names in ``more``."""
        return catalog.choose(self.options["names"], self.options["only"], self.options["drop"], more)


def request_of(dst: Destination, given: ConvertOptions) -> ConvertRequest:
    """Check all options, as far as possible without opening a source."""
    for key in given.keys() - ConvertOptions.__annotations__.keys():
        raise TypeError(f"unexpected argument {show(key)}")
    options: Any = {**dict.fromkeys(ConvertOptions.__annotations__), "extras": True, **given}
    for key in ("names", "only", "drop", "keep", "ignore", "rename"):
        # Lists can be read twice and written into a plan. Processes iterate over a set in different orders.
        value = options[key].items() if key == "rename" and isinstance(options[key], Mapping) else options[key]
        value = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        if isinstance(value, str):
            options[key] = value if key in ("names", "rename") else [value]
        elif isinstance(value, Iterable) and not isinstance(value, tuple):
            options[key] = [*value]
    if options["ignore"] is not None:
        if options["keep"] is not None:
            raise ValueError("ignore= is another name of keep=: pass one of them")
        options["keep"], options["ignore"] = options["ignore"], None
    target = parse_target(options["dtype"])
    if options["keep"] is not None and options["quantize"] is None:
        raise ValueError("keep= selects tensors that quantize= leaves unquantized: pass quantize= too")
    if options["imatrix"] is not None and options["quantize"] is None:
        raise ValueError("imatrix= has the importance of columns for quantize=: pass quantize= too")
    place, max_shard_size = where(dst, options["storage_options"]), options["max_shard_size"]
    path = place.shown
    in_folder = max_shard_size is not None or is_folder(place, options["format"])
    format = _format_of(place, path, options, in_folder=in_folder)
    if in_folder and options["imatrix"] is not None:
        raise ValueError("imatrix= applies to a single file, such as model.gguf: safetensors folders have no mixtures")
    folder = sink_of(place) if in_folder else None
    if folder is None and place.files.remote:
        check_writable(place)
    limit, preset = limit_of(max_shard_size), None if options["quantize"] is None else preset_of(options["quantize"])
    if preset is not None:
        name, engine = preset.name, preset.engine
        if folder is None:
            raise ValueError(
                f"{name} writes a folder for {engine.title}, got the file {show(path)}: pass a path without "
                "a suffix, or one that ends with a slash"
            )
        if options["layout"] is not None:
            raise ValueError(f"{name} keeps the names of {engine.title}: layout= does not apply")
        if target is not None and target.code not in WEIGHTS:
            raise ValueError(f"{name} quantizes float32, float16 or bfloat16, got {target.name}")
        limit = limit if max_shard_size is not None else engine.shard_size
    selecting = [key for key in _SELECTING if options[key] is not None]
    by_name, every = "names" in selecting or "only" in selecting, selecting in ([], ["rename"])
    return ConvertRequest(path, format, place, folder, limit, target, options, preset, selecting, by_name, every)


def _format_of(place: Location, path: str, options: ConvertOptions, *, in_folder: bool) -> str:
    """Return the format to write: ``format=`` if given, else the format of the destination's suffix."""
    format = options["format"]
    usual = () if format is None else written_suffixes(format)
    suffix = os.path.splitext(path)[1].lower()
    if in_folder:
        if format not in (None, SAFETENSORS):
            raise ValueError(
                f"{show(path)} becomes a folder of safetensors shards, got format={show(format)}; pass a file"
            )
        of_file = any(suffix in suffixes for suffixes in WRITTEN.values())
        if of_file and not place.files.remote and not is_folder(place):
            raise ValueError(f"max_shard_size writes a folder, but {show(path)} has the suffix of a file")
        return SAFETENSORS
    known = ", ".join(SUFFIXES)
    if format is not None:
        if suffix in WEIGHT_SUFFIXES and suffix not in usual:
            advice = " or ".join(usual) or "another suffix"
            raise ValueError(f"{show(path)} has the suffix of a format other than {format}: use {advice}")
        return format
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    for name, suffixes in WRITTEN.items():
        if suffix in suffixes:
            if options["layout"] is not None:
                return name
            raise ValueError(
                f"{show(path)}: other programs read {suffix} as a torch file: use one of {known}, or pass "
                f'format="{name}" if you mean {BY_NAME[name].title}'
            )
    row = next((row for row in plugin_rows() if row.writes and suffix in row.suffixes), None) if suffix else None
    if row is not None:
        return row.name
    raise ValueError(f"{show(path)}: the suffix must be one of {known}; for a folder, end the path with a slash")


def open_sources(
    stack: ExitStack, src: Given | Sequence[Given], request: ConvertRequest, verify: Verify = None
) -> Catalog:
    """Open the sources of a conversion, which ``stack`` closes."""
    sources: list[Given] = [src] if has_names(src) else list(src)  # type: ignore[arg-type]
    if not sources:
        raise ValueError("src is an empty list: pass at least one source")
    format, raw = request.format, request.options["raw"]
    catalog = Catalog.of(sources, request.options["storage_options"], verify)
    stack.push(catalog)
    single = catalog.format == "gguf" and len(catalog.checkpoints) == 1 and not catalog.in_memory
    # An engine needs a whole model, unless options ask for single tensors.
    whole = not request.by_name if request.preset else format == "gguf" and not raw and not request.selecting
    if single and (format == "gguf" or raw) and is_rearranged(catalog.metadata):
        catalog = catalog.as_stored()  # with the rows and the keys of the file
        stack.push(catalog)
    elif whole and len(sources) == 1 and is_path(sources[0]):
        model = _model_of_file(catalog, request, verify)
        if model is not None:
            with catalog:
                catalog = model
            stack.push(catalog)
    checkpoints, target = catalog.checkpoints, request.target
    for path, kind in refuse_adapters(zip(map(attrgetter("path"), checkpoints), checkpoints, strict=True)):
        if request.options["adapters"] is None:
            log.warning("%s: %s", path, adapter_note(kind))
    of_model = request.folder is not None and not {"model_type", "architectures"}.isdisjoint(catalog.config or {})
    if of_model and target is not None and target.code.startswith("F8"):
        log.warning(
            '%s: no library loads a model that is cast to %s without scales: use quantize="fp8_dynamic" or '
            'quantize="fp8_block" instead of dtype=',
            request.path,
            target.name,
        )
    _warn_of_optimizer(catalog, request)
    return catalog


def _model_of_file(catalog: Catalog, request: ConvertRequest, verify: Verify) -> Catalog | None:
    """Return the open folder of a file, if the folder is a supported model in this file alone; else None.

    The Hub's models of one file are often passed as ``MODEL/model.safetensors``. An engine needs what lies beside it.
    """
    if catalog.folder is not None or catalog.config is not None or len(catalog.weight_files) != 1:
        return None
    if catalog.format == "gguf":
        return None
    from ..architectures.llama_cpp import source_of  # only here: most results need no model

    file = catalog.weight_files[0]
    parent = file.files.split(file.place)[0]
    try:
        config = read_config(parent, file.files)
        if config is None:
            return None
        if request.preset is not None:
            known = config.get("model_type") in engine_model_types()
            supported = known and choose(config, catalog.format, dict.fromkeys(catalog).keys()) is not None
        else:
            supported = source_of(config) in gguf_forms() and any(name.endswith(_EMBEDDING) for name in catalog)
        if not supported:  # by the engine, or the tensors cannot be those of such a model
            return None
        place: Any = Location(file.files, parent) if file.files.remote else os.path.dirname(file.path) or os.curdir
        folder = Catalog.of(place, request.options["storage_options"], verify)
        if [other.place for other in folder.weight_files] == [file.place]:
            return folder
        with folder:
            return None  # its model is another one
    except VerificationError:
        raise
    except (SafeloadError, OSError) as error:
        log.debug("%s: not the model of its folder: %s", file.path, error)
        return None


_MOST_ROOTS = 3  # containers in a warning
# Containers in which training frameworks store the state of an optimizer, after the names of outer containers.
_OPTIMIZER = re.compile(
    r"(?s:(.*?[./]|))(optim(?:izers?)?(?:_states?|_state_dict|_weights)?|opt_state|optimizer_\w+)[./]", re.ASCII
)


def _warn_of_optimizer(catalog: Catalog, request: ConvertRequest) -> None:
    names = list(map(str, catalog))
    if request.by_name or request.options["layout"] is not None or "opt" not in "".join(names):
        return
    names = list(filter(Selection(None, request.options["drop"]).takes, names))
    states = [match for match in map(_OPTIMIZER.match, names) if match is not None]
    if not states or len(states) == len(names):
        return
    containers = list(dict.fromkeys(match[0] for match in states))
    outer = states[0][1]
    beside = (name.removeprefix(outer) for name in names if name.startswith(outer) and not _OPTIMIZER.match(name))
    roots = Counter(re.split("[./]", name, maxsplit=1)[0] for name in beside if re.search("[./]", name))
    shown = [f"root={show(outer + root)}" for root, _ in roots.most_common(_MOST_ROOTS)]
    nested = catalog.format in BY_NAME and BY_NAME[catalog.format].nested
    advice = [*(shown if nested else ()), f"drop={show(containers[0] + '*')}"]
    log.warning(
        "%s: %s of %s belong to an optimizer (%s): %s leaves them out",
        catalog.title,
        f"{len(states):,}",
        plural(len(names), "tensor"),
        ", ".join(container[:-1] for container in containers[:_MOST_ROOTS]),
        " or ".join(advice),
    )


def is_restored(catalog: Catalog, request: ConvertRequest) -> bool:
    """Return True if a GGUF model becomes a folder for transformers, or a diffusion model in any other format."""
    if request.format == "gguf" or request.options["raw"] or catalog.format != "gguf":
        return False
    if model_of(catalog.metadata) is not None:
        return True
    return request.folder is not None and isinstance(catalog.metadata.get(ARCHITECTURE), str)


def extras_for(catalog: Catalog, request: ConvertRequest) -> dict[str, Location]:
    """Return the other files to copy into the destination folder, by name."""
    copies = request.folder is not None and request.options["extras"]
    return extras_of(catalog.folder) if copies and catalog.folder is not None else {}


def metadata_for(catalog: Catalog, request: ConvertRequest) -> Mapping[Any, Any]:
    """Return the metadata of the result: the metadata of the sources, updated with ``metadata=``."""
    update, format = request.options["metadata"], request.format
    if not update:
        return catalog.metadata
    check_mapping(update, "metadata", "str to str")
    metadata = dict(catalog.metadata)
    for key, value in update.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata: keys must be str, got {show(key)}")
        if value is None:
            metadata.pop(key, None)
        elif not row_of(format).metadata:
            raise ValueError(f"{format} files have no metadata, but metadata= has {show(key)}")
        elif not as_texts({key: value}):
            raise TypeError(f"metadata: {format} cannot store {show(key)} of type {type(value).__name__}")
        else:
            metadata[key] = value
    return metadata
