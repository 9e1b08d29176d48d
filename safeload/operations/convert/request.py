"""The arguments of a conversion, checked, and its open sources."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
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
from ..quantize.rules import ConvertScheme, Keep
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
    options: ConvertOptions  # iterables as lists
    preset: Preset | None = None  # an engine's format; None for safeload's own schemes and without ``quantize``

    @property
    def selecting(self) -> str | None:
        """The first option that leaves out or renames tensors, so that no complete model results; or None."""
        return next((key for key in _SELECTING if self.options.get(key) is not None), None)

    @property
    def needs_model(self) -> bool:
        """True if the result is an engine's, unless options ask for single tensors."""
        options = self.options
        if self.preset is not None:
            return options.get("names") is None and options.get("only") is None
        return self.format == "gguf" and not options.get("raw") and self.selecting is None

    @property
    def every_tensor(self) -> bool:
        """True if no option leaves out tensors of the source."""
        options = self.options
        selects = options.get("names") is not None or options.get("only") is not None
        return not selects and options.get("drop") is None and options.get("layout") is None


def request_of(dst: Destination, options: ConvertOptions) -> ConvertRequest:
    """Check all options, as far as possible without opening a source."""
    for key in options.keys() - ConvertOptions.__annotations__.keys():
        raise TypeError(f"unexpected argument {show(key)}")
    options = _repeatable(options)
    if options.get("ignore") is not None:
        if options.get("keep") is not None:
            raise ValueError("ignore= is another name of keep=: pass one of them")
        options["keep"] = options["ignore"]
    options.pop("ignore", None)
    target = parse_target(options.get("dtype"))
    if options.get("keep") is not None and options.get("quantize") is None:
        raise ValueError("keep= selects tensors that quantize= leaves unquantized: pass quantize= too")
    if options.get("imatrix") is not None and options.get("quantize") is None:
        raise ValueError("imatrix= has the importance of columns for quantize=: pass quantize= too")
    place, max_shard_size = where(dst, options.get("storage_options")), options.get("max_shard_size")
    path = place.shown
    in_folder = max_shard_size is not None or is_folder(place, options.get("format"))
    format = _format_of(place, path, options, in_folder=in_folder)
    if in_folder and options.get("imatrix") is not None:
        raise ValueError("imatrix= applies to a single file, such as model.gguf: safetensors folders have no mixtures")
    folder = sink_of(place) if in_folder else None
    if folder is None and place.files.remote:
        check_writable(place)
    limit = limit_of(max_shard_size)
    quantize = options.get("quantize")
    preset = None if quantize is None else preset_of(quantize)
    if preset is not None:
        name, engine = preset.name, preset.engine
        if folder is None:
            raise ValueError(
                f"{name} writes a folder for {engine.title}, got the file {show(path)}: pass a path without "
                "a suffix, or one that ends with a slash"
            )
        if options.get("layout") is not None:
            raise ValueError(f"{name} keeps the names of {engine.title}: layout= does not apply")
        if target is not None and target.code not in WEIGHTS:
            raise ValueError(f"{name} quantizes float32, float16 or bfloat16, got {target.name}")
        limit = limit if max_shard_size is not None else engine.shard_size
    return ConvertRequest(path, format, place, folder, limit, target, options, preset)


def _repeatable(options: ConvertOptions) -> ConvertOptions:
    """Return the options with a list for each iterable, which can be read twice and written into a plan."""
    repeatable: dict[str, Any] = dict(options)
    for key in ("names", "only", "drop", "keep", "ignore", "rename"):
        value = repeatable.get(key)
        if value is None or isinstance(value, (str, list, tuple)):
            continue
        if isinstance(value, (set, frozenset)):
            repeatable[key] = sorted(value, key=str)  # processes iterate over a set in different orders
        elif isinstance(value, Mapping) and key == "rename":
            repeatable[key] = list(value.items())
        elif isinstance(value, Iterable):
            repeatable[key] = list(value)
    return repeatable  # type: ignore[return-value]


def _format_of(place: Location, path: str, options: ConvertOptions, *, in_folder: bool) -> str:
    """Return the format to write: ``format=`` if given, else the format of the destination's suffix."""
    format = options.get("format")
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
            if options.get("layout") is not None:
                return name
            raise ValueError(
                f"{show(path)}: other programs read {suffix} as a torch file: use one of {known}, or pass "
                f'format="{name}" if you mean {BY_NAME[name].title}'
            )
    row = next((row for row in plugin_rows() if row.writes and suffix in row.suffixes), None) if suffix else None
    if row is not None:
        return row.name
    raise ValueError(f"{show(path)}: the suffix must be one of {known}; for a folder, end the path with a slash")


def open_sources(src: Given | Sequence[Given], request: ConvertRequest, verify: Verify = None) -> Catalog:
    """Open the sources of a conversion."""
    if isinstance(src, Catalog):
        return Catalog.of(src, verify=verify)
    sources: list[Given] = [src] if has_names(src) else list(src)  # type: ignore[arg-type]
    if not sources:
        raise ValueError("src is an empty list: pass at least one source")
    raw, storage_options = request.options.get("raw"), request.options.get("storage_options")
    with ExitStack() as stack:
        catalog = Catalog.of(sources, storage_options, verify)
        stack.push(catalog)
        single = catalog.format == "gguf" and len(catalog.checkpoints) == 1 and not catalog.in_memory
        if single and (request.format == "gguf" or raw) and is_rearranged(catalog.metadata):
            catalog = catalog.as_stored()  # with the rows and the keys of the file
            stack.push(catalog)
        elif request.needs_model and len(sources) == 1 and is_path(sources[0]):
            model = _model_of_file(catalog, request, verify)
            if model is not None:
                stack.close()
                stack.push(model)
                catalog = model
        warn_of(catalog, request)
        stack.pop_all()
    return catalog


def _model_of_file(catalog: Catalog, request: ConvertRequest, verify: Verify) -> Catalog | None:
    """Return the open folder of a file, if the folder is a supported model in this file alone; else None.

    The Hub's models of one file are often passed as ``MODEL/model.safetensors``. An engine needs what lies beside it.
    """
    if catalog.folder is not None or catalog.config is not None or len(catalog.weight_files) != 1:
        return None
    if catalog.format == "gguf":
        return None
    file = catalog.weight_files[0]
    parent = file.files.split(file.place)[0]
    try:
        config = read_config(parent, file.files)
        if config is None or not _is_supported(config, catalog, request):
            return None
        place: Any = Location(file.files, parent) if file.files.remote else os.path.dirname(file.path) or os.curdir
        folder = Catalog.of(place, request.options.get("storage_options"), verify)
        if [other.place for other in folder.weight_files] == [file.place]:
            return folder
        with folder:
            return None  # its model is another one
    except VerificationError:
        raise
    except (SafeloadError, OSError) as error:
        log.debug("%s: not the model of its folder: %s", file.path, error)
        return None


def _is_supported(config: dict[str, Any], catalog: Catalog, request: ConvertRequest) -> bool:
    """Return True if an engine has the class in a config, and the tensors can be those of such a model."""
    from ..architectures.llama_cpp import source_of  # only here: most results need no model

    if request.preset is not None:
        known = config.get("model_type") in engine_model_types()
        return known and choose(config, catalog.format, dict.fromkeys(catalog).keys()) is not None
    return source_of(config) in gguf_forms() and any(name.endswith(_EMBEDDING) for name in catalog)


_MOST_ROOTS = 3  # containers in a warning
# Containers in which training frameworks store the state of an optimizer, after the names of outer containers.
_OPTIMIZER = re.compile(
    r"(?s:(.*?[./]|))(optim(?:izers?)?(?:_states?|_state_dict|_weights)?|opt_state|optimizer_\w+)[./]", re.ASCII
)


def warn_of(catalog: Catalog, request: ConvertRequest) -> None:
    """Warn if few users want the result: an adapter by itself, optimizer states, or a model in fp8 without scales."""
    for path, kind in refuse_adapters([(origin.path, origin) for origin in catalog.checkpoints]):
        if request.options.get("adapters") is None:
            log.warning("%s: %s", path, adapter_note(kind))
    target = request.target
    of_model = request.folder is not None and not {"model_type", "architectures"}.isdisjoint(catalog.config or {})
    if of_model and target is not None and target.code.startswith("F8"):
        log.warning(
            '%s: no library loads a model that is cast to %s without scales: use quantize="fp8_dynamic" or '
            'quantize="fp8_block" instead of dtype=',
            request.path,
            target.name,
        )
    _warn_of_optimizer(catalog, request)


def _warn_of_optimizer(catalog: Catalog, request: ConvertRequest) -> None:
    options = request.options
    if options.get("names") is not None or options.get("only") is not None or options.get("layout") is not None:
        return
    names = list(map(str, catalog))
    if "opt" not in "".join(names):
        return
    names = list(filter(Selection(None, options.get("drop")).takes, names))
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
    if request.format == "gguf" or request.options.get("raw") or catalog.format != "gguf":
        return False
    if model_of(catalog.metadata) is not None:
        return True
    return request.folder is not None and isinstance(catalog.metadata.get(ARCHITECTURE), str)


def extras_for(catalog: Catalog, request: ConvertRequest) -> dict[str, Location]:
    """Return the other files to copy into the destination folder, by name."""
    copies = request.folder is not None and request.options.get("extras", True)
    return extras_of(catalog.folder) if copies and catalog.folder is not None else {}


def metadata_for(catalog: Catalog, request: ConvertRequest) -> Mapping[Any, Any]:
    """Return the metadata of the result: the metadata of the sources, updated with ``metadata=``."""
    update, format = request.options.get("metadata"), request.format
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
