"""Check the arguments of a conversion, open its sources, and decide how each tensor of the result is made."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from ..core import dtypes, registry
from ..core.arrays import check_mapping
from ..core.checkpoint import file_notes_of, opened_as_stored, settings_of
from ..core.files import Location
from ..core.load import parse_target
from ..core.names import Patterns, Renames, Selection, check_matches
from ..core.opening import Verify
from ..core.packing import MLX, SCALE, SCHEMES
from ..core.progress import Progress
from ..core.registry import BY_NAME, KERAS, SAFETENSORS, WrittenName, row_of
from ..core.runtime import paused
from ..core.showing import Result
from ..core.tensors import LazyParts, Spans, Tensors
from ..core.text import PathLike, as_texts, debug, error_about, plural, printable, show, size, warning
from ..errors import FormatError, SafeloadError, UnsupportedError, VerificationError, exported
from ..formats.folder import CONFIG, read_config
from ..formats.gguf import scales_beside
from ..formats.mixtures import FILE_TYPE, with_file_type, with_updated_file_type
from ..models.choosing import choose
from ..models.diffusion import ARCHITECTURE, is_rearranged, model_of, with_renamed_shapes
from ..models.family import changed_by_mlx, engine_model_types, gguf_form, mlx_form
from ..models.layout import Layout
from ..models.module_names import adapter_note, refuse_adapters
from ..quant import codes, finder
from ..quant.families import Preset, preset_of, presets
from ..quant.quantization import QUANTIZATION, Quantization, is_kept_by, is_own, without_quantization
from .catalog import Catalog, Given, RestructuredCatalog, TensorDescription, has_names, is_path
from .destinations import Destination, check_writable, config_with, extras_of, is_folder, limit_of, sink_of, where
from .make import COPIED, MOVED, Decision, Outputs, merged, outputs_of, spans_of, stacked
from .quantize import WEIGHTS
from .rules import (
    TOWER_SCHEME,
    ConvertScheme,
    EngineRules,
    FileTypeRules,
    Keep,
    Planned,
    Rules,
    Summary,
    TowerRules,
    check_part,
    is_of_mlx,
    not_as_in_mlx,
    read_importance,
    rules_for,
    schema_of,
    tied_heads,
    unlike_mlx,
)
from .sink import Sink

# Options with which the result is no complete model.
_SELECTING = ("layout", "names", "only", "drop", "rename")
# Those with which a model is complete if the rest has all that llama.cpp needs.
_LEAVING_OUT = {"names", "only", "drop"}
# Options that need ``quantize``.
_OF_QUANTIZE = {
    "keep": "selects tensors that quantize= leaves unquantized",
    "imatrix": "has the importance of columns for quantize=",
    "requantize": "allows quantize= to round codes again",
    "exact": "keeps quantize= from changing the values of codes",
    "scale_dtype": "is the dtype of the scales of quantize=",
}


Part: TypeAlias = Literal["text", "vision"] | None


class ConvertOptions(TypedDict, total=False):
    """Options of `safeload.plan_convert`: the arguments of `safeload.convert` that determine the result."""

    dtype: Any
    quantize: ConvertScheme | None
    imatrix: PathLike | None
    requantize: bool
    exact: bool
    scale_dtype: Literal["float32"] | None
    part: Part
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
    # Arguments that do not change the result.
    overwrite: bool = False
    resume: bool = False
    threads: int | None = None
    progress: Progress = None
    verify: Verify = None
    record: bool = False

    def chosen(self, catalog: Catalog, more: Iterable[str] = ()) -> list[str]:
        """Return the selected tensors and the scales of their activations; patterns also match names in ``more``."""
        only, drop = self.options["only"], self.options["drop"]
        names = catalog.choose(self.options["names"], only, drop, [*more, *catalog.ignored])
        chosen, dropped = dict.fromkeys(names), Selection(None, drop)
        for scale in catalog.ignored if self.selecting else ():
            owner = finder.owner_of(scale, catalog)
            if owner in chosen and dropped.takes(scale):
                chosen[scale] = None
            elif owner is not None and not self.by_name:
                chosen.pop(scale, None)
        return [*chosen]


def request_of(dst: Destination, given: ConvertOptions, **others: Any) -> ConvertRequest:
    """Check all options, as far as possible without opening a source; ``others`` do not change the result."""
    for key in given.keys() - ConvertOptions.__annotations__.keys():
        raise TypeError(f"unexpected argument {show(key)}")
    options: Any = {**dict.fromkeys(ConvertOptions.__annotations__), "extras": True, **given}
    for key in ("names", "only", "drop", "keep", "ignore", "rename"):
        if options[key] is None:
            continue
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
    check_codes(options["requantize"], options["exact"])
    options |= {key: options[key] or None for key in ("requantize", "exact")}
    for key, about in _OF_QUANTIZE.items():
        if options[key] not in (None, False) and options["quantize"] is None:
            raise ValueError(f"{key}= {about}: pass quantize= too")
    place, max_shard_size = where(dst, options["storage_options"]), options["max_shard_size"]
    path = place.shown
    in_folder = max_shard_size is not None or is_folder(place, options["format"])
    format = _format_of(path, options, in_folder=in_folder)
    check_part(options, format, path)
    if in_folder and options["imatrix"] is not None:
        raise ValueError("imatrix= applies to a single file, such as model.gguf: safetensors folders have no mixtures")
    check_writable(place)
    folder = sink_of(place) if in_folder else None
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
    if options["scale_dtype"] is not None:
        if options["scale_dtype"] != _F32.name:
            raise ValueError(f"scale_dtype must be {_F32.name}, got {show(options['scale_dtype'])}")
        if preset is None or SCALE not in preset.parts or preset.parts[SCALE].dtype is not None:
            text = "scale_dtype= applies to formats whose scales have the dtype of the weights, such as w4a16"
            raise ValueError(f"{text}, got {show(options['quantize'])}")
    selecting = [key for key in _SELECTING if options[key] is not None]
    by_name, every = "names" in selecting or "only" in selecting, selecting in ([], ["rename"])
    return ConvertRequest(
        path, format, place, folder, limit, target, options, preset, selecting, by_name, every, **others
    )


def check_codes(requantize: object, exact: object) -> None:
    """Refuse arguments that contradict each other."""
    if requantize and exact:
        raise ValueError("requantize= rounds codes again, and exact= forbids it: pass only one of the two")


def _format_of(path: str, options: ConvertOptions, *, in_folder: bool) -> str:
    """Return the format to write: ``format=`` if given, else the format of the destination's suffix."""
    format = options["format"]
    usual = () if format is None else registry.written_suffixes(format)
    suffix = os.path.splitext(path)[1].lower()
    if in_folder:
        if format not in (None, SAFETENSORS):
            raise ValueError(
                f"{show(path)} becomes a folder of safetensors shards, got format={show(format)}; pass a file"
            )
        return SAFETENSORS
    known = ", ".join(registry.SUFFIXES)
    if format is not None:
        if suffix in registry.WEIGHT_SUFFIXES and suffix not in usual:
            advice = " or ".join(usual) or "another suffix"
            raise ValueError(f"{show(path)} has the suffix of a format other than {format}: use {advice}")
        return format
    if suffix in registry.SUFFIXES:
        return registry.SUFFIXES[suffix]
    for name, suffixes in registry.WRITTEN.items():
        if suffix in suffixes:
            if options["layout"] is not None:
                return name
            raise ValueError(
                f"{show(path)}: other programs read {suffix} as a torch file: use one of {known}, or pass "
                f'format="{name}" if you mean {BY_NAME[name].title}'
            )
    rows = registry.plugin_rows() if suffix else ()
    row = next((row for row in rows if row.writes and suffix in row.suffixes), None)
    if row is not None:
        return row.name
    raise ValueError(f"{show(path)}: the suffix must be one of {known}; for a folder, end the path with a slash")


def open_sources(stack: ExitStack, src: Given | Sequence[Given], request: ConvertRequest) -> Catalog:
    """Open the sources of a conversion, which ``stack`` closes."""
    sources: list[Given] = [src] if has_names(src) else list(src)  # type: ignore[arg-type]
    if not sources:
        raise ValueError("src is an empty list: pass at least one source")
    format, raw = request.format, request.options["raw"]
    catalog = Catalog.of(sources, request.options["storage_options"], request.verify)
    stack.push(catalog)
    single = catalog.format == "gguf" and len(catalog.checkpoints) == 1 and not catalog.in_memory
    # An engine needs a whole model, unless options ask for single tensors.
    whole = not request.by_name if request.preset else format == "gguf" and not raw and not request.selecting
    if single and (format == "gguf" or raw) and is_rearranged(catalog.metadata):
        # With the rows and the keys of the file.
        catalog = Catalog([stack.enter_context(opened_as_stored(catalog.checkpoints[0]))])
    elif whole and len(sources) == 1 and is_path(sources[0]):
        catalog = stack.enter_context(_model_of_file(catalog, request))
    checkpoints, target = catalog.checkpoints, request.target
    for path, kind in refuse_adapters(zip(map(attrgetter("path"), checkpoints), checkpoints, strict=True)):
        if request.options["adapters"] is None:
            warning("%s: %s", path, adapter_note(kind))
    of_model = request.folder is not None and not {"model_type", "architectures"}.isdisjoint(catalog.config or {})
    if of_model and target is not None and target.code.startswith("F8"):
        warning(
            '%s: no library loads a model that is cast to %s without scales: use quantize="fp8_dynamic" or '
            'quantize="fp8_block" instead of dtype=',
            request.path,
            target.name,
        )
    _warn_of_optimizer(catalog, request)
    return catalog


def _model_of_file(catalog: Catalog, request: ConvertRequest) -> Catalog:
    """Return the open folder in place of the only weight file of a model: an engine needs what lies beside it."""
    alone = catalog.folder is None and catalog.config is None and len(catalog.weight_files) == 1
    if not alone or catalog.format == "gguf":
        return catalog
    file = catalog.weight_files[0]
    parent = file.files.split(file.place)[0]
    try:
        config = read_config(parent, file.files)
        if config is None:
            return catalog
        if request.preset is not None:
            known = config.get("model_type") in engine_model_types()
            known = mlx_form(config) is not None if request.preset.engine.stacks_experts else known
            supported = known and choose(config, catalog.format, dict.fromkeys(catalog).keys()) is not None
            supported |= isinstance(config.get("model_type"), str) and not request.preset.engine.stacks_experts
        else:
            form = gguf_form(config)[1]
            supported = form is not None and any(name.endswith(form.embedding) for name in catalog)
        if not supported:  # by the engine, or the tensors cannot be those of such a model
            return catalog
        place: Any = Location(file.files, parent) if file.files.remote else os.path.dirname(file.path) or os.curdir
        folder = Catalog.of(place, request.options["storage_options"], request.verify)
        same = [other.place for other in folder.weight_files] == [file.place]  # else it has another model
        with catalog if same else folder:
            return folder if same else catalog
    except VerificationError:
        raise
    except (SafeloadError, OSError) as error:
        debug("%s: not the model of its folder: %s", file.path, error)
        return catalog


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
    warning(
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
    for_transformers = request.folder is not None and isinstance(catalog.metadata.get(ARCHITECTURE), str)
    return for_transformers or model_of(catalog.metadata) is not None


def metadata_for(catalog: Catalog, request: ConvertRequest) -> Mapping[Any, Any]:
    """Return the metadata of the result: the metadata of the sources, updated with ``metadata=``."""
    update, format = request.options["metadata"], request.format
    if not update:
        return catalog.metadata
    check_mapping(update, "metadata", "str to str")
    for key, value in update.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata: keys must be str, got {show(key)}")
        if value is not None and not row_of(format).metadata:
            raise ValueError(f"{format} files have no metadata, but metadata= has {show(key)}")
        if value is not None and not as_texts({key: value}):
            raise TypeError(f"metadata: {format} cannot store {show(key)} of type {type(value).__name__}")
    metadata = {**catalog.metadata, **update}
    return {key: value for key, value in metadata.items() if key not in update or value is not None}


_F32 = dtypes.BY_CODE["F32"]
_ROUND_AGAIN = "requantize=True rounds them again, dtype= dequantizes them"
_UNPLANNED = Planned(None)
# Names of the stacked experts of a layer in mlx-lm.
_MLX_EXPERTS = re.compile(r"\.(?:switch_mlp|experts)\.(?:gate_proj|up_proj|down_proj|fc1|fc2)\.weight\Z")
# Dtypes of the weights of a model of llama.cpp.
_LLAMA_CPP_DTYPES = ("F32", "F16", "BF16")


class _ConvertFields(NamedTuple):
    destination: str
    format: str
    files: list[str]
    tensors: int
    nbytes: int
    seconds: float
    summary: Summary | None
    left_out: Sequence[str] = ()


@exported()
class ConvertReport(Result, _ConvertFields):
    """The result of `convert`. ``str()`` gives the text that ``safeload convert`` prints.

    It has a single row, with the number of files; ``summary`` has rows about tensors.

    Attributes:
        destination: path of the file or the folder.
        format: format of the files.
        files: paths of the files with tensors.
        tensors: number of tensors.
        nbytes: bytes of the files.
        seconds: duration of the conversion.
        summary: the quantized tensors, and why each other tensor was kept; None without ``quantize``.
        left_out: what the sources hold besides the tensors in ``files``, such as texts of an npz archive: a sentence
            each.

    Example:
        >>> import numpy as np, safeload
        >>> print(safeload.convert({"w": np.ones((2, 64), np.float32)}, "w.safetensors", quantize="q8_0"))
        w.safetensors: safetensors, 1 tensor, 4.3 KiB
        512 bytes became 136 (3.76 times smaller)
             1 quantized to q8_0: w
    """

    __slots__ = ()

    _columns = ("destination", "format", "files", "tensors", "nbytes", "seconds")
    _json = _ConvertFields._fields

    def _values(self) -> Iterable[Any]:
        return [(self.destination, self.format, len(self.files), self.tensors, self.nbytes, self.seconds)]

    def _about(self) -> Sequence[str]:
        return [repr(self)[1:-1], *(line.strip() for line in str(self).splitlines()[1:])]

    def __str__(self) -> str:
        lines = [
            f"{self.destination}: {self._totals()}",
            *([] if self.summary is None else str(self.summary).splitlines()),
            *self.left_out,
        ]
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        return f"<ConvertReport {show(self.destination)}: {self._totals()}>"

    def _totals(self) -> str:
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        return f"{self.format}, {plural(self.tensors, 'tensor')}, {size(self.nbytes)}{files}"


def prepare(stack: ExitStack, catalog: Catalog, request: ConvertRequest) -> Outputs:
    """Merge adapters, which ``stack`` closes, decide about every tensor, and name the outputs."""
    options = request.options
    if options["adapters"] is not None:
        with_config = request.folder is not None
        catalog = merged(stack, catalog, options["adapters"], options["storage_options"], with_config=with_config)
    selected, rest = _selected(catalog, request)
    try:
        catalog, request = _as_model(selected, rest), rest
    except FormatError as error:
        if rest is request or error.tensor is None or error.tensor in selected:
            raise
        text = f"{request.selecting[0]}= would leave no complete model: {error}; pass raw=True to write single tensors"
        raise ValueError(text) from None
    with paused(len(catalog)):
        return Decider(catalog, _in_names_of(catalog, request)).outputs()


def _selected(catalog: Catalog, request: ConvertRequest) -> tuple[Catalog, ConvertRequest]:
    """Return the tensors that options select for a model of llama.cpp, and the request without these options."""
    of_model = request.format == "gguf" and not request.options["raw"] and catalog.format != "gguf"
    leaves_out = bool(request.selecting) and {*request.selecting} <= _LEAVING_OUT
    if not (of_model and leaves_out) or gguf_form(catalog.config)[1] is None:
        return catalog, request
    options: Any = {**request.options, **dict.fromkeys(_LEAVING_OUT)}
    selected = catalog.selected(request.chosen(catalog))
    return selected, request._replace(options=options, selecting=[], by_name=False, every_tensor=True)


def _left_out(
    catalog: Catalog, objects: Mapping[str, str], lost: Sequence[str] = (), *, empty: bool
) -> tuple[str, ...]:
    """Warn of what the sources hold besides the converted tensors, and return a sentence each."""
    notes = [
        note
        for checkpoint in catalog.checkpoints
        for note in (checkpoint.notes if empty else file_notes_of(checkpoint))
    ]
    if not (notes or objects or lost or empty):
        return ()
    lines = [*lost, *(f"{show(name)} is left out: {label} is not a tensor" for name, label in objects.items())]
    if empty:
        about = "".join(f"; {line}" for line in (*lines, *notes))
        raise SafeloadError(f"{catalog.title}: no tensor to convert{about}", path=catalog.title)
    lines += [note for note in notes if "left out" in note or "not opened" in note]
    for line in lines:
        warning("%s: %s", catalog.title, line)
    return tuple(lines)


def _as_model(catalog: Catalog, request: ConvertRequest) -> Catalog:
    """Return the tensors that an engine needs, if the result is the file of an engine."""
    preset, target, restored = request.preset, request.target, is_restored(catalog, request)
    leaves_mlx = _leaves_mlx(catalog, request)
    if leaves_mlx or preset is not None:
        from .forms import arranged, from_mlx  # only here: other results need no form of a model
    if leaves_mlx:
        catalog = from_mlx(catalog)
    if preset is not None and not restored:
        return catalog if request.by_name else arranged(catalog, preset)
    if not restored and (request.format != "gguf" or request.options["raw"]):
        return catalog
    from .llama_cpp import gguf_models  # only here: most results need no architecture

    if restored and model_of(catalog.metadata) is not None:
        return gguf_models.from_comfyui(catalog, request.chosen(catalog))
    in_gguf = catalog.format == "gguf"
    unnamed = not restored and gguf_form(catalog.config)[0] is None
    diffusion = gguf_models.recognized(catalog) if unnamed and not in_gguf else None
    part = request.options["part"]
    if part is not None and (unnamed or in_gguf):
        why = "is a GGUF file already" if in_gguf else "has no config.json that names a class"
        raise ValueError(f"part= selects a part of a model of transformers, but {catalog.title} {why}")
    if unnamed and diffusion is None:
        return catalog
    if request.selecting:
        raise ValueError(
            f"{request.selecting[0]}= would leave no complete model: pass raw=True to write single tensors"
        )
    if restored:
        model = gguf_models.from_llama_cpp(catalog)
        return model if preset is None else arranged(model, preset)
    if target is not None and target.code not in _LLAMA_CPP_DTYPES:
        engine = "llama.cpp" if diffusion is None else "ComfyUI"
        raise UnsupportedError(f'{engine} does not compute with {target.name}: pass dtype="float32" or "bfloat16"')
    if part == "vision":
        return gguf_models.tower_to_llama_cpp(catalog, target, quantized=request.options["quantize"] is not None)
    if diffusion is not None:
        return gguf_models.to_comfyui(catalog, diffusion)
    return catalog if in_gguf else gguf_models.to_llama_cpp(catalog, blocks=target is None)


def _in_names_of(catalog: Catalog, request: ConvertRequest) -> ConvertRequest:
    """Return the request with names of the result in place of patterns that match names of the source only."""
    if not isinstance(catalog, RestructuredCatalog) or catalog.for_engine:
        return request
    options: ConvertOptions = {**request.options}
    quantize, keep = options["quantize"], options["keep"]
    if isinstance(quantize, Mapping):
        options["quantize"] = {name: to for key, to in quantize.items() for name in catalog.matching(key)}
    if keep is not None and not callable(keep):
        options["keep"] = [name for pattern in keep for name in catalog.matching(pattern)]
    return request._replace(options=options)


def _leaves_mlx(catalog: Catalog, request: ConvertRequest) -> bool:
    """Return True if a model of mlx-lm becomes one of transformers or of another engine, which needs all tensors."""
    options = request.options
    converts = request.target is not None or options["quantize"] is not None or request.format == "gguf"
    whole = options["layout"] is None and request.every_tensor
    for_mlx = request.preset is not None and request.preset.engine.stacks_experts
    in_folder = request.folder is not None or request.format == "gguf"
    return converts and whole and in_folder and not (for_mlx or options["raw"]) and is_of_mlx(catalog)


def _check_mlx(catalog: Catalog, request: ConvertRequest) -> None:
    """Refuse to write a folder for transformers from an MLX model that mlx-lm stores otherwise; warn of a file."""
    if not is_of_mlx(catalog) or request.options["raw"] or not changed_by_mlx(catalog.config):
        return
    if request.folder is not None:
        raise unlike_mlx(catalog)
    why = not_as_in_mlx((catalog.config or {}).get("model_type"))
    warning("%s: %s: the result has MLX's names and values", request.path, why)


def _warn_of_stacks(catalog: Catalog, names: Mapping[str, str], path: str) -> None:
    """Warn of dequantized experts under MLX names, because no other library loads these."""
    experts = (
        (new, catalog.place(name)) for name, new in names.items() if _MLX_EXPERTS.search(new) and name in catalog
    )
    packed = ((new, place.file.table.packed.get(place.number)) for new, place in experts if place.file is not None)
    stacks = [new for new, tensor in packed if tensor is not None and tensor.packing.family == MLX]
    if stacks:
        more = f" and {plural(len(stacks) - 1, 'more tensor')}" if stacks[1:] else ""
        warning(
            "%s: the experts of a layer are stacked as in MLX (%s%s), and transformers and vLLM do not load these "
            "names. Convert the original checkpoint instead of the MLX one, or split the stacks",
            path,
            show(stacks[0]),
            more,
        )


def _parameters_of(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of parameters as mlx-lm counts them: of modules that have no modules."""
    modules = {name: name.rpartition(".")[0] for name in shapes}
    outer = {module[:k] for module in modules.values() for k, letter in enumerate(module) if letter == "."}
    return sum(math.prod(shape) for name, shape in shapes.items() if modules[name] not in outer)


class Decider:
    """Decides how tensors are converted, and keeps a record for the summary."""

    def __init__(
        self,
        catalog: Catalog,
        request: ConvertRequest,
        *,
        ties: bool | None = None,  # for a result in memory, which leaves nothing out: whether it has tied heads
    ) -> None:
        options, format, converts = request.options, request.format, request.target is not None
        self._catalog, self._request, self._target = catalog, request, request.target
        self._matrix = None if options["imatrix"] is None else read_importance(options["imatrix"])
        self._rules: Rules | EngineRules | None = None  # None quantizes nothing
        self._scale = None if options["scale_dtype"] is None else _F32
        self._quantized: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        self._codes: dict[str, str] = {}  # the fate of the codes of a quantized source
        self._fallbacks: Counter[tuple[str, str]] = Counter()  # matrices by requested scheme and its fallback
        tied: Mapping[str, str] = {}
        whole = options["names"] is None
        if options["quantize"] is not None:
            converts, schema = True, schema_of(catalog)
            if request.preset is not None:
                self._rules = EngineRules(request.preset, options["keep"], catalog, schema, chosen=request.by_name)
                self._rules.scale = self._scale
            else:
                model = format == "gguf" and not options["raw"]
                rules = rules_for(catalog, options["quantize"], options["keep"], self._matrix, model=model)
                rules = TowerRules(TOWER_SCHEME, options["keep"]) if options["part"] == "vision" else rules
                if isinstance(rules, FileTypeRules) and options["layout"] is not None:
                    needs = f"which file type {rules.file_type} needs"
                    raise ValueError(f"layout= has no llama.cpp names, {needs}: pass raw=True")
                self._rules, rules.schema, rules.fixed = rules, schema, catalog.fixed
                # llama.cpp ties the head itself, and a restored model has all of its tensors.
                if not isinstance(rules, FileTypeRules) and not isinstance(catalog, RestructuredCatalog):
                    tied = tied_heads(catalog, schema) if whole and ties is not False else {}
        self._engine = self._rules if isinstance(self._rules, EngineRules) else None
        # Entries other than tensors, with their types. Selecting such an entry by its exact name is an error.
        self._left_out: dict[str, str] = {}
        self._heads: dict[str, str] = {}
        self._ignored: list[str] = []
        names: Sequence[str]
        copies = self._rules is None and format == SAFETENSORS and options["layout"] is None
        tensors = catalog.plain(blocks=True) if copies else None
        if tensors is not None:  # nothing is tied, ignored or unreadable
            tensors = tensors if request.every_tensor else tensors.named(request.chosen(catalog))
            names = tensors.names
        else:
            chosen = dict.fromkeys(request.chosen(catalog, tied))
            unknown = catalog.unknown() if whole and ties is None else {}
            self._left_out = {k: entry.label for k, entry in unknown.items() if k in chosen and not entry.is_tensor}
            self._heads = {head: embedding for head, embedding in tied.items() if head in chosen}
            self._ignored = [name for name in catalog.ignored if name in chosen]
            beside = {*self._heads, *self._left_out, *(name for name in self._ignored if name not in catalog)}
            names = [name for name in chosen if name not in beside]
            every = request.every_tensor and not self._left_out
            tensors = catalog.plain(None if every else names, blocks=True)
            tensors = None if tensors is None else tensors.named(names)
        self._tensors = tensors
        self._spans = self._copied(tensors) if copies and tensors is not None else None
        self._descriptions = {} if self._spans is not None else catalog.descriptions(names, tensors)
        if isinstance(self._rules, FileTypeRules):
            self._rules.prepare(self._descriptions)
        if self._engine is not None:
            self._descriptions = {k: v for k, v in self._descriptions.items() if not self._engine.drops(k)}
            names = [*self._descriptions]
        self._source = next(filter(None, map(settings_of, catalog.checkpoints)), None)
        # Scales of the KV cache in the result, or a sentence about its missing scales.
        base = catalog.base if isinstance(catalog, RestructuredCatalog) and not catalog.for_engine else None
        ignored: Iterable[str] = self._ignored if base is None else base.ignored
        changes = format and (converts or base is not None)
        cache = [name for name in ignored if name.endswith(finder.KV_CACHE)] if changes else []
        algorithm = None if self._source is None else self._source.values.get("kv_cache_quant_algo")
        holds = self._engine is not None and self._engine.engine.kv_cache and algorithm in (None, "FP8")
        self._cache, self._lost = cache if holds else [], list[str]()
        ends = (*finder.KV_CACHE, *finder.MARKS)
        self._scales = [name for name in ignored if not name.endswith(ends)] if format else []
        why = "llama.cpp has no place for them" if format == "gguf" else "the weights are not quantized for an engine"
        self._lose([] if holds else cache, "the KV cache", why)
        self._restored = converts and tensors is None and any(tensor.packed for tensor in self._descriptions.values())
        unnamed = catalog.format == KERAS and not options["raw"]  # in a copy nothing would tell codes from weights
        coded = tensors is None or dtypes.may_hold_codes(tensors.columns.numbers)
        if coded and (converts or format != SAFETENSORS or unnamed):
            cause = f"the format {format}" if self._target is None else "dtype="
            cause = cause if self._rules is None else "quantize="
            finder.refuse(catalog.codes, names, f"convert with {cause}")

    def _copied(self, tensors: Tensors) -> Spans | None:
        """Return the spans if tensors are only copied and cast, or blocks dequantized."""
        targets = numbers = tensors.spans.sources
        if self._target is not None:
            targets = numbers.copy()
            for number in {*numbers.tolist()}:
                targets[numbers == number] = dtypes.BY_NUMBER[number].loaded_as(self._target).number
        return spans_of(tensors, targets)

    def outputs(self) -> Outputs:
        """Decide about all tensors, and about what the result has beside them."""
        catalog, request, rules, engine, matrix = self._catalog, self._request, self._rules, self._engine, self._matrix
        options, format, layout = request.options, request.format, request.options["layout"]
        own = options["metadata"] or {}
        if options["keep"] is not None:
            self.check_kept()
        if layout is None and self._tensors is None:
            catalog.refuse_unknown(self._descriptions)
        # Results that are dequantized, or quantized for an engine other than MLX.
        changes = self._restored if engine is None else not engine.engine.stacks_experts
        if changes:
            _check_mlx(catalog, request)
        laid = None if layout is None else stacked(catalog, self._descriptions, layout, self._target)
        decisions = self.of_tensors() if laid is None else self._of_layout(laid)
        if isinstance(rules, Rules) and rules.patterns:
            check_matches("quantize", rules.patterns, {*self._descriptions, *self._heads, *decisions})
        converts = self._target is not None or rules is not None
        if options["adapters"] is not None and not converts and layout is None:
            for name in decisions:  # none is a tied head
                catalog.check_kept(name)
        outputs = outputs_of(
            catalog if laid is None else laid,
            decisions,
            format,
            rename=options["rename"],
            threads=request.threads,
            tensors=self._tensors if laid is None else None,
            spans=self._spans,
            descriptions=self._descriptions if laid is None else None,
            matrix=matrix,
        )
        names = dict(zip(outputs.reads, outputs.names, strict=True)) if outputs.made else {}
        for name, output in zip(outputs.reads, outputs.made, strict=False):
            packing = output.packing if isinstance(output, LazyParts) else None
            module, renamed = name.removesuffix(".weight"), names[name].removesuffix(".weight")
            if packing is not None and names[name] != name and not is_kept_by(packing.config, module, renamed):
                raise UnsupportedError(
                    f"rename: tensor {show(name)} stays packed, and the quantization in its config.json names module "
                    f"{show(module)}: pass dtype= to dequantize it",
                    tensor=name,
                )
        if changes and self._restored:
            _warn_of_stacks(catalog, names, request.path)
        for (requested, scheme), count in self._fallbacks.items():
            warning(
                "%s: %s got %s instead of %s, because rows are not whole blocks of %d elements",
                request.path,
                plural(count, "tensor"),
                scheme,
                requested,
                SCHEMES[requested].block,
            )
        metadata = metadata_for(catalog, request)
        if format == "gguf":
            if options["rename"] is not None:
                metadata = with_renamed_shapes(metadata, names)
            chosen = (converts and not isinstance(rules, FileTypeRules)) or isinstance(catalog, RestructuredCatalog)
            if chosen and FILE_TYPE not in own and options["part"] != "vision":
                metadata = with_updated_file_type(metadata, outputs.made, copies=rules is None)
            if isinstance(rules, Rules):
                keys = {} if matrix is None else matrix.metadata()
                if isinstance(rules, FileTypeRules):
                    metadata, keys = with_file_type(metadata, rules.file_type, keys.items()), {}
                metadata = {**metadata, **keys, **{key: value for key, value in own.items() if value is not None}}
        described = engine is not None and not self._quantized and engine.is_described(self._descriptions.values())
        config = parameters = None
        files: dict[str, Location | bytes] = {**catalog.texts}
        if request.folder is not None:
            restored = self._restored and not described
            target = self._target or self._dtype_of_scales(decisions)
            config = config_with(catalog.config, target, restored=restored, schemes=outputs.schemes)
            if options["extras"] and catalog.folder is not None:
                files = {**extras_of(catalog.folder), **files}
        if engine is not None:
            metadata = {"format": engine.engine.metadata, **own}
            if not described:
                config = engine.config({**(config or {}), **self._described()}, self._quantized, self._kept, names)
            if engine.engine.always_indexed:
                parameters = _parameters_of({names.get(k, k): self._descriptions[k].shape for k in decisions})
        return outputs._replace(
            metadata=metadata,
            editable=engine is None,
            left_out=_left_out(catalog, self._left_out, self._lost, empty=not outputs.names and not self._ignored),
            config=config,
            files=files,
            summary=None if rules is None else self.summary(outputs.nbytes),
            parameters=parameters,
            restored=self._restored and engine is None,
        )

    def _described(self) -> dict[str, Any]:
        """Return the quantization of the source for a config, without a KV cache whose scales the result lacks."""
        if self._source is None:
            return {}
        lost = {} if self._cache else {"kv_cache_scheme": None, "kv_cache_quant_algo": None}
        return {QUANTIZATION: {**self._source.values, "quant_method": self._source.method, **lost}}

    def _dtype_of_scales(self, decisions: Mapping[str, Decision]) -> dtypes.Dtype | None:
        """Return the dtype of scales that have moved, for the config, if all unquantized tensors have it too."""
        moved = {decision.dtype for decision in decisions.values() if decision.codes == MOVED}
        plain = {self._descriptions[name].row.code for name in self._kept if self._descriptions[name].floating}
        if self._engine is None or moved not in ({"F16"}, {"BF16"}) or not plain <= moved:
            return None
        return dtypes.BY_CODE[str(moved.pop())]

    def check_kept(self) -> None:
        """Refuse patterns of ``keep`` that match nothing."""
        if self._rules is not None:
            self._rules.kept.check([*self._descriptions, *self._heads])

    def summary(self, nbytes: int) -> Summary:
        heads = {head: self._catalog.about(self._heads[head]) for head in self._heads if head in self._quantized}
        before = sum([tensor.nbytes for tensor in self._descriptions.values()])
        tensors = {
            name: (about.code, about.shape, about.nbytes) for name, about in {**self._descriptions, **heads}.items()
        }
        return Summary(
            before,
            nbytes,
            self._quantized,
            self._kept,
            tensors,
            self._codes,
            "" if self._engine is None else self._engine.rule,
        )

    def quantization(self) -> Quantization:
        """Return the quantization of a folder for an engine, as its reader would parse it."""
        assert self._engine is not None
        return self._engine.quantization(self._quantized)

    def of_tensors(self) -> dict[str, Decision]:
        """Decide about tensors under their own names, and about tied heads."""
        names: Iterable[str] = self._descriptions
        if isinstance(self._rules, FileTypeRules):
            names = self._rules.ordered(names)
        decisions = {name: self._decide(name, self._descriptions[name]) for name in names}
        if self._engine is not None:
            if not (self._quantized or self._engine.already) and self._engine.preset.parts:
                about = ((why, self._catalog.about(self._heads.get(name, name))) for name, why in self._kept.items())
                counts = Counter(why for why, tensor in about if len(tensor.shape) > 1)
                name, reason = max(self._kept.items(), key=lambda kept: counts[kept[1]], default=("", ""))
                by = "is kept by " if reason.startswith("keep=") else ""
                why = f": tensor {show(name)} {by}{reason}" if reason else ""
                raise UnsupportedError(f"{self._engine.preset.name}: no tensor is left to quantize{why}")
            for name in self._quantized:  # weights that the engine fuses share a scale
                partners = self._engine.partners(name, self._quantized)
                decisions[name] = decisions[name]._replace(partners=partners if len(partners) > 1 else ())
        decisions.update(self._scales_beside(decisions))
        if isinstance(self._catalog, RestructuredCatalog):
            changed = [name for name, decision in decisions.items() if decision != Decision()]
            for scale in (scale for name in changed for scale in self._catalog.beside(name)):
                del decisions[scale], self._descriptions[scale]
                self._kept.pop(scale, None)
        for head, embedding in self._heads.items():
            tensor = self._catalog.about(embedding)
            if tensor.quantized or not tensor.floating:
                continue
            scheme = self._planned(head, tensor).scheme
            if scheme is not None:
                decisions[head] = Decision(scheme=scheme, source=embedding)
            elif embedding not in self._descriptions:  # a reader has no embedding in the result to tie the head to
                decisions[head] = self._decide(embedding, tensor)._replace(source=embedding)
        return decisions

    def _scales_beside(self, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        """Return the scales that stay, beside codes that are copied, and note the others."""
        if not (self._ignored or self._cache or self._scales):
            return {}
        copied = {
            source
            for name, decision in decisions.items()
            if decision == Decision() and self._descriptions[name].quantized
            for source in self._catalog.sources_of(name)
        }
        stay = self._cache
        if self._rules is None and self._target is None and self._request.format in (SAFETENSORS, "gguf"):
            stay = self._ignored
        elif self._engine is None and self._request.format:
            stay = [name for name in self._ignored if finder.owner_of(name, copied) is not None]
        lost = (name for name in self._scales if finder.owner_of(name, copied) is None)
        self._lose({*lost} - {*stay}, "activations", "their weights are converted")
        return dict.fromkeys(stay, Decision())

    def _lose(self, scales: Collection[str], of: str, why: str) -> None:
        """Note scales missing from the result."""
        if scales:
            why = why if self._engine is None else f"{self._engine.preset.name} has no place for them"
            self._lost.append(f"{plural(len(scales), 'scale')} of {of} left out, such as {show(min(scales))}: {why}")

    def _of_layout(self, laid: RestructuredCatalog) -> dict[str, Decision]:
        finder.refuse(
            self._catalog.codes, (each for name in laid for each in laid.sources_of(name)), "convert with layout="
        )
        if self._rules is None:
            return dict.fromkeys(laid, Decision())
        return {name: Decision(scheme=self._planned(name, laid.about(name)).scheme) for name in laid}

    def _planned(self, name: str, tensor: TensorDescription) -> Planned:
        """Apply the rules to a tensor and record the outcome for the summary."""
        assert self._rules is not None
        planned = self._rules.plan(name, tensor)
        factor, _ = scales_beside(name)
        if planned.scheme == "nvfp4" and self._request.format == "gguf" and factor in self._descriptions:
            planned = Planned(None, f"would have {factor} as the factor of its blocks")
        if planned.scheme is None:
            self._kept[name] = planned.reason
        else:
            self._quantized[name] = planned.scheme
            if planned.requested is not None:
                self._fallbacks[planned.requested, planned.scheme] += 1
        return planned

    def _moves(self, name: str, scheme: str) -> bool:
        with suppress(codes.Immovable):
            codes.plan(self._catalog.coded(name), codes.holds(scheme))
            return True
        return False

    def _moved(self, name: str, label: str, scheme: str) -> Decision | None:
        """Decide to move the codes of a source, or return None to round them again, if that is allowed."""
        options, requested = self._request.options, self._scale or self._target
        try:
            code = None if requested is None else requested.code
            move = codes.plan(self._catalog.coded(name), codes.holds(scheme), code)
        except codes.Immovable as reason:
            if options["exact"] or not (options["requantize"] or codes.bits_of(scheme) < codes.bits_of(label)):
                advice = "dtype= dequantizes it" if options["exact"] else _ROUND_AGAIN
                fits = next((s for s in presets() if s.startswith(f"{scheme}-") and self._moves(name, s)), None)
                advice = advice if fits is None else f"they move to {fits}; {advice}"
                text = f"is {label}, whose codes cannot move to {scheme}: {reason}; {advice}"
                raise error_about(UnsupportedError, text, tensor=name) from None
            self._codes[name] = f"rounded again from {label}"
            return None
        if move.error and options["exact"]:
            text = f"is {label}: {scheme} would change the numbers beside its codes by up to {move.error:.2g}"
            raise error_about(UnsupportedError, f"{text}, which exact= forbids", tensor=name)
        changed = f", numbers beside them rounded by up to {move.error:.0e}" if move.error else ""
        self._codes[name] = f"codes of {label}{changed}"
        return Decision(move.scale if move.scale in WEIGHTS else "F32", scheme, codes=MOVED)

    def _decide(self, name: str, tensor: TensorDescription) -> Decision:
        row = tensor.row if self._request.format else tensor.element  # in memory, nothing need be stored
        planned = _UNPLANNED if self._rules is None else self._planned(name, tensor)
        label = None if planned.scheme is None else self._catalog.scheme(name)
        if planned.scheme is not None and label is not None:
            decision = self._moved(name, label, planned.scheme)
            if decision is not None:
                return decision
        if self._engine is not None:
            if planned.already:
                return Decision(scheme=self._engine.already[name], codes=COPIED)
            if planned.scheme is not None:
                row = self._scale or self._engine.weight_dtype(tensor, self._target)
                return Decision(row.code, planned.scheme)
            target = self._engine.kept_dtype(tensor, self._target)
            changes = target is not row and (tensor.floating or tensor.scheme is not None)
            return Decision(target.code if changes and target is not None else None)
        if planned.scheme is not None or planned.dtype is not None:
            return Decision(planned.dtype, planned.scheme)
        if row is None:
            return Decision()
        described = self._rules is not None and tensor.codes is None  # by a config, which the result does not have
        if tensor.scheme is not None and (planned.already or (self._target is None and not described)):
            return Decision()
        row = _F32 if tensor.packed else row
        if self._target is not None and (row.floating or tensor.scheme is not None):
            row = self._target
        if self._request.format == "gguf" and row.floating and row.block_bytes > 1:
            # llama.cpp aborts on norms of any other dtype, ComfyUI does not. The writer refuses unsupported dtypes.
            norm = len(tensor.shape) < 2 and (tensor.row is _F32 or model_of(self._catalog.metadata) is None)
            row = _F32 if norm else dtypes.BY_CODE[self._catalog.fixed.get(name, row.code)]
        unchanged = row is tensor.row and tensor.scheme is None
        if unchanged and self._request.format == SAFETENSORS and row not in dtypes.SAFETENSORS:
            raise dtypes.not_stored(row.name, name)
        return Decision(None if unchanged else row.code)


# ---- a config.json in the destination when the source has none ----


def config_for(outputs: Outputs, folder: Sink, request: ConvertRequest) -> dict[str, Any] | None:
    """Return the new ``config.json`` of a folder: the old one, mended, if the source has none; None leaves it."""
    if outputs.config is not None or not request.overwrite:
        return outputs.config
    config, stale = old_config(outputs, folder)
    if config is None or not (stale or outputs.schemes):
        return None
    if stale:
        warning(
            "%s: removed the quantization of the old weights, because the new weights have none and their source has "
            "no %s",
            folder.shown(CONFIG),
            CONFIG,
        )
    return config_with(config, request.target, restored=stale, schemes=outputs.schemes)


def old_config(outputs: Outputs, folder: Sink) -> tuple[dict[str, Any] | None, bool]:
    """Return a folder's ``config.json``, and whether the new weights lack the quantization that it describes."""
    # None if it cannot be read, or if the new weights can be the codes that it describes.
    config = None
    with suppress(FormatError, OSError):
        if (outputs.restored or not outputs.may_hold_codes) and CONFIG in folder.names():
            config = folder.read_json(CONFIG, CONFIG)
    if config is None or (is_own(config) and outputs.schemes):
        return config, False
    return config, without_quantization(config) != config
