"""Plans of conversions to a folder of shards: each shard is a piece."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...base.scheme import parse
from ...base.selecting import pairs_of
from ...base.text import show
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...formats.metadata import as_texts
from ..folders import journal, unfinished
from ..folders.destinations import Destination, replacement_of
from ..folders.folder import Folder
from ..folders.shards import divide, weight_map
from ..sources.catalog import Catalog, Given, has_names
from ..sources.codec import encode
from ..sources.plan import Plan
from ..sources.sources import FileVersion, Sources, path_in_plan
from .decide import ConversionPiece, ConversionPlan, PlannedConfig, PlannedSummary, runs_of
from .make import Outputs, prepare
from .request import ConvertOptions, ConvertRequest, open_sources, request_of
from .run_plan import versions_of
from .write import config_without_codes

if TYPE_CHECKING:
    from typing_extensions import Unpack


KEY, VERSION = "safeload_plan", 1

# Options with more text than this are in records as a digest: each shard has one.
_LONG = 200
_ID_DIGITS = 16


def plan_convert(
    src: Given | Sequence[Given],
    dst: Destination,
    *,
    overwrite: bool = False,
    resume: bool = False,
    **options: Unpack[ConvertOptions],
) -> Plan:
    """Plans a conversion to a folder of shards, for an engine that runs its pieces on several machines.

    Only the headers of the sources are read, and nothing is written. `run_piece` does one of ``plan.pieces``, on any
    machine that has the same files under the same paths, or reaches the same URLs; `finalize` completes the folder with
    what all of them have returned. ``convert(executor=...)`` does all of this where the engine has an executor.

    A plan is as trusted as code: who can write one can have files read and shards written.

    Args:
        src: the path or URL of a checkpoint, or a `Checkpoint` that `open` has made; or a list of these, whose tensors
            are merged.
        dst: the folder. It must be on a file system that all machines share, or in a store that all of them reach.
        overwrite: whether to replace what the folder has. Until `finalize` the shards of an existing checkpoint stay as
            they are: the new ones are written into a folder beside them, or in a store under other names.
        resume: whether to go on with a conversion that was interrupted: shards that are whole stay, by the records
            beside them. Without ``overwrite`` a folder that has other files, and none of its records, is refused.
        options: options of `convert`: dtype, quantize, layout, names, only, drop, keep, rename, metadata,
            max_shard_size (needed), format, extras and storage_options. Only those without secrets (``endpoint_url``,
            ``region``, ``anon``, ...) go into the plan.

    Returns:
        The plan: less than 100 KB for 1,000 tensors.

    Raises:
        FileExistsError: ``dst`` exists, and neither ``overwrite`` nor ``resume`` says what to do with it.
        ValueError: tensors in memory, no ``max_shard_size``, or ``resume`` of a conversion with other options.
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
        for one in (plan, *plan.pieces):
            one["storage_options"] = shared
    return plan


def planned(
    src: Given | Sequence[Given], dst: Destination, options: ConvertOptions, *, overwrite: bool, resume: bool
) -> tuple[Plan, Folder]:
    """Return the plan of a conversion, without storage options, and its destination; see `plan_convert`."""
    request = request_of(dst, options)
    if request.folder is None:
        raise ValueError("a single file is written by one process: max_shard_size= makes a folder of shards")
    sources: Any = src if has_names(src) else list(src)  # type: ignore[arg-type]
    call = _id_of([__version__, _options(request), unfinished.call_id(sources)])
    plan = _continued(request.folder, call) if overwrite and resume else None
    if plan is None:
        with ExitStack() as stack:
            catalog = stack.enter_context(open_sources(sources, request.options.get("storage_options")))
            outputs = prepare(stack, catalog, request)
            plan = _plan(outputs, request, request.folder, call, overwrite=overwrite, resume=resume)
    return plan, request.folder


def _continued(folder: Folder, call: str) -> Plan | None:
    """The plan of an interrupted call that was replacing its own source; all of its shards are complete.

    Raises:
        ValueError: one of them is gone.
    """
    note = unfinished.continued(folder, call)
    if note is None or note.pieces is None:
        return None
    files = {piece.id: piece.file for piece in note.pieces}
    present = folder.names()
    places = _found(folder, present, journal.recorded(folder, present), files)
    options = note.options or {}
    pieces = []
    for piece in note.pieces:
        if piece.file not in places:
            raise ValueError(
                f"resume: {show(folder.shown(piece.file))} is gone, and the conversion has replaced its sources: "
                f"restore them, and delete {unfinished.NAME}"
            )
        place, name = places[piece.file]
        content = {"id": piece.id, "nbytes": piece.nbytes, "tensors": piece.tensors, "sources": [], "continued": True}
        where = {"plan": note.id, "folder": place.place, "file": name, "options": options}
        pieces.append({"operation": "convert", "version": __version__, **content, **where})
    plan = Plan(
        {
            KEY: VERSION,
            "operation": "convert",
            "version": __version__,
            "options": options,
            "pieces": pieces,
            "id": note.id,
            "folder": folder.place,
            "in_place": True,
            "call": call,
            "tensors": note.tensors,
            "extras": {},
        }
    )
    outdated = replacement_of(folder).outdated([name for _, name in places.values()])
    optional = {
        "outdated": outdated,
        "config": None if note.config is None else {"content": note.config},
        "quantized": note.quantized,
    }
    plan.update({key: value for key, value in optional.items() if value})
    return plan


def _plan(
    prepared: Outputs, request: ConvertRequest, folder: Folder, call: str, *, overwrite: bool, resume: bool
) -> Plan:
    sources = Sources(prepared.catalog, "a conversion in pieces")
    options = _options(request)
    shards = divide(prepared.tensors, request.limit)
    weight_map(shards)  # refuses two tensors of one name
    before = dict(zip(prepared.tensors, prepared.decisions.items(), strict=True))
    common: dict[str, Any] = {
        "metadata": as_texts(prepared.metadata) or None,
        "rename": tuple((old, new) for old, new in _texts_of(request.options.get("rename")) or ()),
    }
    if request.options.get("adapters") is not None:
        from .merged import planned_adapters  # only here: most conversions merge nothing

        common["adapters"] = planned_adapters(prepared.catalog)
    pieces = []
    for file, shard in shards.items():
        decisions = dict(before[name] for name in shard)
        piece = ConversionPiece(
            operation="convert",
            id="",  # this and the next two follow
            plan="",
            folder="",
            sources=sources.of(name for decision in decisions.values() for name in decision.sources),
            file=file,
            nbytes=sum(output.nbytes for output in shard.values()),
            tensors=runs_of(decisions),
            **common,
        )
        # A shard depends on the sources of its own piece, not on those of other pieces.
        pieces.append(replace(piece, id=_id_of([options, encode(piece)])))
    plan_id = _id_of([__version__, options, [piece.id for piece in pieces]])
    in_place = None
    if unfinished.is_source(folder, prepared.catalog):
        if folder.location.files.remote:
            unfinished.check_remote(folder)
        in_place = _id_of([call, encode(common.get("adapters"))])
        if resume and {"adapters", "rename"} & options.keys():
            _check_not_applied(folder, prepared.catalog, in_place)
    pieces = [replace(piece, plan=plan_id, options=options, in_place=in_place) for piece in pieces]
    places = _places(pieces, folder, overwrite=overwrite, resume=resume)
    pieces = [replace(piece, folder=places[piece.file][0].place, file=places[piece.file][1]) for piece in pieces]
    config = _config(prepared, request, in_place=in_place is not None)
    if config is None and overwrite:
        content = config_without_codes(prepared, folder, request.target)
        config = None if content is None else PlannedConfig(content=content)
    plan = ConversionPlan(
        operation="convert",
        options=options,
        pieces=tuple(pieces),
        id=plan_id,
        folder=folder.place,
        in_place=in_place is not None,
        call=None if in_place is None else call,
        outdated=tuple(replacement_of(folder).outdated([piece.file for piece in pieces]) if overwrite else ()),
        tensors=prepared.tensor_count,
        config=config,
        extras={name: path_in_plan(location) for name, location in prepared.extras.items()},
        quantized=_summary(prepared),
    )
    return Plan(encode(plan))


def _summary(prepared: Outputs) -> PlannedSummary | None:
    summary = prepared.summary
    if summary is None:
        return None
    in_pieces = {name for name, decision in prepared.decisions.items() if decision.kept is not None}
    kept = {name: why for name, why in summary.kept.items() if name not in in_pieces}
    return PlannedSummary(before=summary.bytes_before, kept=kept)


def _id_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_DIGITS]


def _options(request: ConvertRequest) -> dict[str, Any]:
    """The options that make one plan differ from another, as plain data."""
    plain: dict[str, Any] = {**request.options, "max_shard_size": request.limit}
    plain["adapters"] = _adapters_of(plain.get("adapters"))
    plain.pop("format", None)  # a folder has safetensors shards
    plain.pop("storage_options", None)  # may be secret; what is not is in the sources
    plain["dtype"] = None if request.target is None else request.target.name
    plain["rename"] = _texts_of(plain.get("rename"))
    plain["layout"] = None if plain.get("layout") is None else plain["layout"].to_json()
    quantize = plain.get("quantize")
    if isinstance(quantize, Mapping):
        plain["quantize"] = {pattern: one and parse(one) for pattern, one in quantize.items()}
    elif quantize is not None:
        plain["quantize"] = parse(quantize)
    if callable(plain.get("keep")):
        plain["keep"] = "a function"
    found = {}
    for key, value in plain.items():
        if value is None or (key == "extras" and value) or (key == "metadata" and not value):
            continue
        if key in ("only", "drop", "keep") and isinstance(value, str):
            value = [value]
        value = list(value) if isinstance(value, tuple) else value
        text = json.dumps(value, sort_keys=True, default=str)
        if len(text) > _LONG:
            value = f"{text[:40]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]})"
        found[key] = json.loads(json.dumps(value, default=str))
    return found


def _adapters_of(adapters: Any) -> list[list[Any]] | None:
    """Paths and weights; the files themselves are in the pieces."""
    if adapters is None:
        return None
    from ...loading.adapter import listed

    return [[str(path), weight] for path, weight in listed(adapters)] or None


def _texts_of(rename: Any) -> list[list[str]] | None:
    """The pairs of ``rename``, as plain data.

    Raises:
        ValueError: a function, or an expression with flags, which are not text.
    """
    if rename is None:
        return None
    pairs = []
    for pattern, replacement in pairs_of(rename):
        if isinstance(pattern, re.Pattern):
            if pattern.flags & ~re.UNICODE:
                raise ValueError(f"rename: a plan is text: write the flags of {show(pattern.pattern)} as (?i)...")
            pattern = pattern.pattern
        if not isinstance(replacement, str):
            raise ValueError("rename: a plan is text, and cannot hold a function")
        pairs.append([pattern, replacement])
    return pairs


def _config(prepared: Outputs, request: ConvertRequest, *, in_place: bool) -> PlannedConfig | None:
    """Where the configuration comes from, and what `finalize` changes in it.

    Args:
        prepared: has the configuration.
        request: the checked options.
        in_place: whether `finalize` replaces the file that it comes from.
    """
    config = prepared.catalog.config
    if config is None:
        return None
    dtype = None if request.target is None else request.target.code
    folder = next((one.folder for one in prepared.catalog.checkpoints if one.config is config), None)
    if folder is None or folder.files.remote or in_place:
        return PlannedConfig(content=config, dtype=dtype, restored=prepared.decider.restored)
    return PlannedConfig(source=FileVersion.of((folder / CONFIG).path), dtype=dtype, restored=prepared.decider.restored)


# ---- the destination ----


def _places(
    pieces: Sequence[ConversionPiece], folder: Folder, *, overwrite: bool, resume: bool
) -> dict[str, tuple[Folder, str]]:
    """The folder that each piece writes into, and the name of its file there.

    That is where its shard is already, or else the usual name in the destination, unless the destination has other
    content.

    Raises:
        FileExistsError, ValueError: see `plan_convert`.
    """
    files = [piece.file for piece in pieces]
    first = pieces[0]  # there is always a shard
    usual = {file: (folder, file) for file in files}
    present, replacement = folder.names(), replacement_of(folder)
    if not present:
        replacement.check_free(overwrite)
        return usual
    begun = replacement.begun(first.plan)
    records = journal.recorded(folder, present)
    ids = {piece.id: piece.file for piece in pieces}
    ours = {file for file, record in records.items() if record.piece in ids}
    if resume and not overwrite:

        def may_be_written_again(file: str) -> bool:
            """A shard in the way whose sources changed: only as long as the folder is incomplete."""
            same_work = journal.same_work(records[file], first.version, first.options)
            return begun or (INDEX not in present and same_work)

        others = [file for file in records if file not in ours]
        if ours:
            others = [file for file in others if file in files and not may_be_written_again(file)]
        if others:
            versions = [version for piece in pieces if piece.file == others[0] for version in versions_of(piece)]
            differs = journal.difference(records[others[0]], first.version, first.options, versions)
            raise ValueError(f"resume: {show(folder.shown(others[0]))} was written {differs}: pass overwrite=True")
        if not ours:
            _check_unfinished(folder, present, files)
        if SINGLE in present:
            message = f"Other programs load this file instead of {INDEX}: pass overwrite=True to remove it"
            raise FileExistsError(errno.EEXIST, message, folder.shown(SINGLE))
    elif not overwrite:
        if ours:
            message = "The conversion has begun: resume=True goes on, overwrite=True replaces it"
            raise FileExistsError(errno.EEXIST, message, folder.location.shown)
        replacement.check_free(overwrite)
    found = _found(folder, present, records, ids)
    replaces = begun or (overwrite and (first.in_place is not None or present & ({INDEX, *files} - ours)))
    return {**({file: replacement.aside(file, first.plan) for file in files} if replaces else usual), **found}


def _check_not_applied(folder: Folder, catalog: Catalog, repeats: str) -> None:
    """Refuse to apply to its own result what a conversion did to its own source.

    Args:
        folder: source and destination.
        catalog: the sources.
        repeats: the id that the records of such a result have.

    Raises:
        ValueError: a source is such a result.
    """
    for file in catalog.weight_files:
        name = file.files.split(file.place)[1]
        record = journal.read(folder, name)
        if record is None or record.in_place != repeats:
            continue
        if folder.holds(name, record.size, record.sha256, record.object):
            raise ValueError(
                f"resume: {show(folder.shown(name))} is a result of this call already, and nothing is left to do: "
                "pass overwrite=True without resume=True to apply it once more"
            )


def _found(
    folder: Folder, present: Set[str], records: Mapping[str, journal.ShardRecord], ids: Mapping[str, str]
) -> dict[str, tuple[Folder, str]]:
    """Where the shards of a plan are that need not be written again; see `_kept`."""
    found: dict[str, tuple[Folder, str]] = {}
    # Asides come before the folder: `Replacement.collect` copies the record of a shard before it moves the shard.
    for place in replacement_of(folder).asides():
        names = place.names()
        found = {**_kept(place, names, journal.recorded(place, names), ids), **found}
    return {**_kept(folder, present, records, ids), **found}


def _kept(
    place: Folder, names: Set[str], records: Mapping[str, journal.ShardRecord], ids: Mapping[str, str]
) -> dict[str, tuple[Folder, str]]:
    """The shards in a folder that a plan need not write again, by their usual names.

    Args:
        place: the folder.
        names: its files.
        records: by the names of shards.
        ids: usual name of the shard of each piece, by the piece's id.
    """
    found: dict[str, tuple[Folder, str]] = {}
    replacement = replacement_of(place)
    for name, record in records.items():
        file = ids.get(record.piece)
        if file is not None and name in names and name in (file, replacement.aside(file, record.plan)[1]):
            found[file] = place, name
    return found


def _check_unfinished(folder: Folder, present: Set[str], files: Sequence[str]) -> None:
    """Refuses to go on in a folder without records that has more than what workers leave that were killed early.

    Raises:
        FileExistsError: it has.
    """
    if INDEX in present:
        message = "The folder is complete, with no record of how: pass overwrite=True"
        raise FileExistsError(errno.EEXIST, message, folder.location.shown)
    left = replacement_of(folder).leftovers([*files, *(file + journal.RECORD for file in files)])
    if present >= set(files) or not present <= {*files, *left}:
        message = "The folder has other files, and no record of this conversion: pass overwrite=True"
        raise FileExistsError(errno.EEXIST, message, folder.location.shown)
