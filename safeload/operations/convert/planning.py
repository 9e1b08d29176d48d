"""Plan conversions to a folder of shards, with a piece for each shard."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._version import __version__
from ...base.gc_pause import paused
from ...base.preset import preset_of
from ...base.scheme import parse
from ...base.selecting import pairs_of
from ...base.text import show
from ...checkpoint import folder_of
from ...errors import UnsupportedError, public
from ...formats.folder import CONFIG, INDEX, RESUME, SINGLE, is_weight_file
from ..folders import journal, unfinished
from ..folders.destinations import Destination, replacement_of
from ..folders.folder import Folder
from ..quantize.engine_layout import EngineCatalog
from ..sources.catalog import Catalog, Given, has_names
from ..sources.codec import decode, encode
from ..sources.piece_files import FileVersion, Sources, path_in_plan
from ..sources.plan import Plan
from .copies import Copies, copies_of
from .decide import ConversionPiece, ConversionPlan, PlannedConfig, PlannedSummary, TensorRun
from .make import prepare
from .request import ConvertOptions, ConvertRequest, is_restored, open_sources, request_of
from .run_plan import ONCE, versions_of
from .write import PlannedConversion, config_without_codes, warn_of_left_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LONGEST = 200  # characters of an option in a record; longer options are recorded as a digest
_ID_DIGITS = 16


@public
def plan_convert(
    src: Given | Sequence[Given],
    dst: Destination,
    *,
    overwrite: bool = False,
    resume: bool = False,
    **options: Unpack[ConvertOptions],
) -> Plan:
    """Plan a conversion to a folder of shards, for an engine that runs the pieces on several machines.

    Planning reads only the headers of the sources and writes nothing. `run_piece` runs a piece of ``plan.pieces`` on
    any machine that has the same files under the same paths, or can reach the same URLs. `finalize` completes the
    folder from the results of all pieces. If the engine has an executor, ``convert(executor=...)`` does all of this.

    You should trust a plan like code: whoever can write a plan can have files read and shards written.

    Args:
        src: the path or URL of a checkpoint, a `Checkpoint` from `open`, or a list of these to merge.
        dst: the folder. It must be on a shared file system, or in a store that all machines can reach.
        overwrite: True to replace the content of the folder. The shards of an existing checkpoint stay unchanged until
            `finalize`: new shards are written to a subfolder, or in a store under different names.
        resume: True to continue an interrupted conversion: shards that are complete according to their records stay.
            Without ``overwrite``, a folder with other files and no records of this conversion is refused.
        options: options of `convert`: dtype, quantize, layout, names, only, drop, keep, ignore, rename, metadata,
            adapters, max_shard_size, format, extras, raw and storage_options. The plan contains only storage options
            without secrets (``endpoint_url``, ``region``, ``anon``, ...).

    Returns:
        The plan: less than 100 KB for 1,000 tensors.

    Raises:
        FileExistsError: ``dst`` exists, and neither ``overwrite`` nor ``resume`` applies.
        ValueError: tensors are in memory, ``dst`` is a file, or ``resume`` has different options.
        SafeloadError, OSError: see `convert`.

    Example:
        >>> import safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> results = [safeload.run_piece(piece) for piece in plan.pieces]
        >>> safeload.finalize(plan, results).tensors
        30
    """
    plan, folder = planned(src, dst, options, overwrite=overwrite, resume=resume)
    shared = folder.location.files.public_options()
    if shared is not None:
        pieces = tuple(replace(piece, storage_options=shared) for piece in plan.pieces)
        plan = replace(plan, pieces=pieces, storage_options=shared)
    return Plan(encode(plan))


def planned(
    src: Given | Sequence[Given], dst: Destination, options: ConvertOptions, *, overwrite: bool, resume: bool
) -> tuple[ConversionPlan, Folder]:
    """Return the plan of a conversion, without storage options, and its destination; see `plan_convert`."""
    request = request_of(dst, options)
    if request.folder is None:
        raise ValueError(
            f"{show(request.path)} is a file, which is written at once: only folders of shards can be resumed or "
            "written by several processes; pass the path of a folder"
        )
    sources: Any = src if has_names(src) else list(src)  # type: ignore[arg-type]
    call = _id_of([__version__, _options(request), unfinished.call_id(sources)])
    plan = _continued(request.folder, call) if overwrite and resume else None
    if plan is None:
        with ExitStack() as stack:
            catalog = stack.enter_context(open_sources(sources, request))
            if is_restored(catalog, request):
                raise UnsupportedError(
                    f"{catalog.title}: the folder of a GGUF model is written at once, without resume= and "
                    "executor=; raw=True writes the tensors as they are"
                )
            with paused(len(catalog)):
                copies: PlannedConversion | None = copies_of(catalog, request, None)
                conversion = prepare(stack, catalog, request) if copies is None else copies
                plan = _plan(conversion, request, request.folder, call, overwrite=overwrite, resume=resume)
    return plan, request.folder


def _continued(folder: Folder, call: str) -> ConversionPlan | None:
    """Return the plan of an interrupted conversion of a folder onto itself, with all shards complete."""
    note = unfinished.continued(folder, call)
    if note is None or note.pieces is None or note.id is None:
        return None
    usual = {piece.id: piece.file for piece in note.pieces}
    present = folder.names()
    places = _complete_shards(folder, present, journal.recorded(folder, present), usual)
    options, prefix = note.options or {}, f"invalid {unfinished.NAME}"
    files = [*(name for _, name in places.values()), *([] if note.parameters is None else [INDEX])]
    pieces = []
    for piece in note.pieces:
        if piece.file not in places:
            raise ValueError(
                f"resume: {show(folder.shown(piece.file))} is gone, and the conversion has replaced its sources: "
                f"restore them, and delete {unfinished.NAME}"
            )
        place, name = places[piece.file]
        pieces.append(
            ConversionPiece(
                operation="convert",
                sources=(),
                file=name,
                nbytes=piece.nbytes,
                tensors=tuple(decode(TensorRun, run, prefix) for run in piece.tensors),
                continued=True,
                id=piece.id,
                plan=note.id,
                folder=place.place,
                options=options,
            )
        )
    return ConversionPlan(
        operation="convert",
        options=options,
        pieces=tuple(pieces),
        id=note.id,
        folder=folder.place,
        in_place=True,
        call=call,
        outdated=tuple(replacement_of(folder).outdated(files)),
        tensors=note.tensors,
        config=None if note.config is None else PlannedConfig(content=note.config),
        extras={},
        quantized=None if note.quantized is None else decode(PlannedSummary, note.quantized, prefix),
        schemes=note.schemes,
        parameters=note.parameters,
    )


def _plan(
    prepared: PlannedConversion, request: ConvertRequest, folder: Folder, call: str, *, overwrite: bool, resume: bool
) -> ConversionPlan:
    options = _options(request)
    adapters: tuple[Any, ...] = ()
    if request.options.get("adapters") is not None:
        from .merged import planned_adapters  # only here: most conversions merge nothing

        adapters = planned_adapters(_stored(prepared.catalog))
    pieces = _pieces(prepared, request, options, adapters)
    plan_id = _id_of([__version__, options, [piece.id for piece in pieces]])
    in_place = None
    if unfinished.is_source(folder, prepared.catalog):
        if folder.location.files.remote:
            unfinished.check_remote(folder)
        in_place = _id_of([call, encode(adapters) or None])
        if resume and ONCE & options.keys():
            _check_not_applied(folder, prepared.catalog, in_place)
    pieces = [replace(piece, plan=plan_id, options=options, in_place=in_place) for piece in pieces]
    places = _places(pieces, folder, overwrite=overwrite, resume=resume)
    pieces = [replace(piece, folder=places[piece.file][0].place, file=places[piece.file][1]) for piece in pieces]
    files = [*(piece.file for piece in pieces), *([] if prepared.parameters is None else [INDEX])]
    config = _config(prepared, request, in_place=in_place is not None)
    if config is None and overwrite:
        content = config_without_codes(prepared, folder, request.target)
        config = None if content is None else PlannedConfig(content=content)
    return ConversionPlan(
        operation="convert",
        options=options,
        pieces=tuple(pieces),
        id=plan_id,
        folder=folder.place,
        in_place=in_place is not None,
        call=None if in_place is None else call,
        outdated=tuple(replacement_of(folder).outdated(files) if overwrite else ()),
        tensors=prepared.tensor_count,
        config=config,
        extras={name: path_in_plan(location) for name, location in prepared.extras.items()},
        quantized=prepared.planned_summary,
        schemes=prepared.schemes,
        left_out=warn_of_left_out(prepared),
        parameters=prepared.parameters,
    )


def _pieces(
    prepared: PlannedConversion, request: ConvertRequest, options: Mapping[str, Any], adapters: tuple[Any, ...]
) -> list[ConversionPiece]:
    """Return a piece for each shard, without its plan and folder."""
    sources = Sources(_stored(prepared.catalog), "a conversion in pieces")
    shards = prepared.divided(request.limit)
    if not isinstance(prepared, Copies):  # a part of a quantized tensor can have the name of another tensor
        prepared.weight_map(shards)  # refuses two tensors with the same name
    renames = tuple((old, new) for old, new in _texts_of(request.options.get("rename")) or ())
    metadata = None if prepared.texts is None else dict(prepared.texts)
    pieces = []
    for file, shard in shards.items():
        piece = ConversionPiece(
            operation="convert",
            id="",
            plan="",
            folder="",
            sources=shard.sources_in(sources),
            file=file,
            nbytes=shard.nbytes,
            tensors=shard.runs,
            metadata=metadata,
            rename=renames,
            adapters=adapters,
            recipes=shard.recipes,
        )
        # A shard depends on the sources of its own piece, not on those of other pieces.
        pieces.append(replace(piece, id=_id_of([options, encode(piece)])))
    return pieces


def _stored(catalog: Catalog) -> Catalog:
    """Return the catalog with the names of the sources."""
    return catalog.base if isinstance(catalog, EngineCatalog) else catalog


def _config(prepared: PlannedConversion, request: ConvertRequest, *, in_place: bool) -> PlannedConfig | None:
    """Return the origin of the result's ``config.json``, and the changes to it."""
    if prepared.engine_rules is not None:
        return PlannedConfig(content=prepared.config)
    config = prepared.catalog.config
    if config is None:
        return None
    dtype = None if request.target is None else request.target.code
    restored = prepared.restored
    folder = next(
        (folder_of(checkpoint) for checkpoint in prepared.catalog.checkpoints if checkpoint.config is config), None
    )
    if folder is None or folder.files.remote or in_place:  # `finalize` replaces the config of a source in place
        return PlannedConfig(content=config, dtype=dtype, restored=restored)
    return PlannedConfig(source=FileVersion.of((folder / CONFIG).path), dtype=dtype, restored=restored)


# ---- options ----


def _id_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_DIGITS]


def _options(request: ConvertRequest) -> dict[str, Any]:
    """Return the options that distinguish plans, as plain data."""
    plain: dict[str, Any] = {**request.options, "max_shard_size": request.limit}
    plain["adapters"] = _adapters_of(plain.get("adapters"))
    plain.pop("format", None)  # a folder has safetensors shards
    plain.pop("raw", None)  # applies to GGUF
    plain.pop("storage_options", None)  # can be secret; the sources have the public options
    plain["dtype"] = None if request.target is None else request.target.name
    plain["rename"] = _texts_of(plain.get("rename"))
    plain["layout"] = None if plain.get("layout") is None else plain["layout"].to_json()
    quantize = plain.get("quantize")
    if isinstance(quantize, Mapping):
        plain["quantize"] = {pattern: scheme and parse(scheme) for pattern, scheme in quantize.items()}
    elif quantize is not None:
        preset = preset_of(quantize)
        plain["quantize"] = parse(quantize) if preset is None else preset.name
    if callable(plain.get("keep")):
        plain["keep"] = "a function"
    options = {}
    for key, value in plain.items():
        if value is None or (key == "extras" and value) or (key == "metadata" and not value):
            continue
        if key in ("only", "drop", "keep") and isinstance(value, str):
            value = [value]
        value = list(value) if isinstance(value, tuple) else value
        text = json.dumps(value, sort_keys=True, default=str)
        if len(text) > _LONGEST:
            value = f"{text[:40]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]})"
        options[key] = json.loads(json.dumps(value, default=str))
    return options


def _adapters_of(adapters: Any) -> list[list[Any]] | None:
    """Return paths and weights; the pieces have the files."""
    if adapters is None:
        return None
    from ...loading.adapter import listed

    return [[str(path), weight] for path, weight in listed(adapters)] or None


def _texts_of(rename: Any) -> list[list[str]] | None:
    """Return the pairs of ``rename`` as plain data."""
    if rename is None:
        return None
    pairs = []
    for pattern, replacement in pairs_of(rename):
        if isinstance(pattern, re.Pattern):
            if pattern.flags & ~re.UNICODE:
                raise ValueError(
                    f"rename: a plan stores patterns as text; write the flags of {show(pattern.pattern)} inline, "
                    "such as (?i)"
                )
            pattern = pattern.pattern
        if not isinstance(replacement, str):
            raise ValueError("rename: a plan is text, and cannot hold a function")
        pairs.append([pattern, replacement])
    return pairs


# ---- the destination ----


class _Place(NamedTuple):
    """A shard in a folder: the destination, or a subfolder in which shards wait."""

    folder: Folder
    name: str


def _places(pieces: Sequence[ConversionPiece], folder: Folder, *, overwrite: bool, resume: bool) -> dict[str, _Place]:
    """Return the place of each shard by its usual name: in the folder, or aside if the folder has other content."""
    first = pieces[0]  # there is always a shard
    files = [piece.file for piece in pieces]
    present, replacement = folder.names(), replacement_of(folder)
    if not present:
        replacement.check_free(overwrite)
        return {file: _Place(folder, file) for file in files}
    begun = replacement.begun(first.plan)
    records = journal.recorded(folder, present)
    ids = {piece.id: piece.file for piece in pieces}
    ours = {file for file, record in records.items() if record.piece in ids}
    if not overwrite:
        if resume:
            _check_resumable(pieces, folder, present, records, begun=begun)
        else:
            replacement.check_free(overwrite)
    places = {file: _Place(folder, file) for file in files}
    models = {name for name in present - ours if name == CONFIG or is_weight_file(name)}
    if begun or (overwrite and (first.in_place is not None or models)):
        asides = replacement.asides_of(files, first.plan)
        places = {file: _Place(*place) for file, place in asides.items()}
    return {**places, **_complete_shards(folder, present, records, ids)}  # a complete shard keeps its place


def _check_resumable(
    pieces: Sequence[ConversionPiece],
    folder: Folder,
    present: Set[str],
    records: Mapping[str, journal.ShardRecord],
    *,
    begun: bool,  # True if shards of the plan wait aside
) -> None:
    """Refuse to continue unless the folder's content comes from an interrupted call with the same options."""
    first, files = pieces[0], [piece.file for piece in pieces]
    ids = {piece.id for piece in pieces}
    foreign = [file for file, record in records.items() if record.piece not in ids]
    if len(foreign) < len(records):
        # A shard of changed sources can be written again as long as the folder is incomplete.
        outdated = [
            file
            for file in foreign
            if begun or (INDEX not in present and journal.same_work(records[file], first.version, first.options))
        ]
        foreign = [file for file in foreign if file in files and file not in outdated]
    if foreign:
        versions = [version for piece in pieces if piece.file == foreign[0] for version in versions_of(piece)]
        difference = journal.difference(records[foreign[0]], first.version, first.options, versions)
        raise ValueError(
            f"resume: {show(folder.shown(foreign[0]))} was written {difference}; pass overwrite=True to start over"
        )
    if not records:
        _check_unrecorded(folder, present, files)
    if SINGLE in present and SINGLE not in files:
        message = f"Other programs load this file instead of {INDEX}: pass overwrite=True to remove it"
        raise FileExistsError(errno.EEXIST, message, folder.shown(SINGLE))


def _check_unrecorded(folder: Folder, present: Set[str], files: Sequence[str]) -> None:
    """Refuse to continue in a folder without records if it has more than the leftovers of killed workers."""
    if present & {INDEX, SINGLE}:
        _refuse_complete(folder)
    leftovers = replacement_of(folder).leftovers([*files, *(file + journal.RECORD for file in files)])
    if present >= set(files) or not present <= {RESUME, *files, *leftovers}:
        message = "The folder has other files, but no record of this conversion; pass overwrite=True to replace them"
        raise FileExistsError(errno.EEXIST, message, folder.location.shown)


def _refuse_complete(folder: Folder) -> None:
    message = "The folder has a complete checkpoint: there is nothing to continue; pass overwrite=True to replace it"
    raise FileExistsError(errno.EEXIST, message, folder.location.shown)


def _check_not_applied(folder: Folder, catalog: Catalog, in_place: str) -> None:
    """Refuse to apply a conversion onto itself twice; ``in_place`` is its id in the records of its result."""
    for file in catalog.weight_files:
        name = file.files.split(file.place)[1]
        record = journal.read(folder, name)
        if record is None or record.in_place != in_place:
            continue
        if folder.holds(name, record.size, record.sha256, record.object):
            raise ValueError(
                f"resume: {show(folder.shown(name))} is already the result of this call: "
                "pass overwrite=True without resume=True to apply it again"
            )


def _complete_shards(
    folder: Folder, present: Set[str], records: Mapping[str, journal.ShardRecord], ids: Mapping[str, str]
) -> dict[str, _Place]:
    """Return the places of complete shards by their usual names; ``ids`` gives these by piece id."""
    places: dict[str, _Place] = {}
    # Asides come before the folder: `Replacement.collect` copies the record of a shard before it moves the shard.
    for aside in replacement_of(folder).asides():
        names = aside.names()
        places = {**_recorded_shards(aside, names, journal.recorded(aside, names), ids), **places}
    return {**_recorded_shards(folder, present, records, ids), **places}


def _recorded_shards(
    place: Folder, names: Set[str], records: Mapping[str, journal.ShardRecord], ids: Mapping[str, str]
) -> dict[str, _Place]:
    """Return the shards in a single folder; see `_complete_shards`."""
    shards: dict[str, _Place] = {}
    for name, record in records.items():
        file = ids.get(record.piece)
        if file is not None and name in names and is_weight_file(name):
            shards[file] = _Place(place, name)
    return shards
