"""Plans of conversions to a folder of shards: each shard is a piece."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...base.scheme import parse
from ...base.selecting import pairs_of
from ...base.text import show
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...formats.metadata import as_texts
from ..folders import journal, unfinished
from ..folders.destinations import Destination
from ..folders.shard_folder import Folder
from ..folders.shards import divide, weight_map
from ..sources.catalog import Catalog, Given, has_names
from ..sources.plan import Plan, piece_of
from ..sources.sources import Sources, location_as_plain, source_of
from .decisions import runs_of
from .make import Outputs, prepare
from .request import ConvertOptions, ConvertRequest, open_sources, request_of
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
    shared = folder.public_options()
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
    plan = unfinished.continued(folder, call)
    if plan is None:
        return None
    plan.update({KEY: VERSION, "folder": folder.place})
    files = {piece["id"]: piece["file"] for piece in plan.pieces}
    present = folder.names()
    places = _found(folder, present, journal.recorded(folder, present), files)
    for piece in plan.pieces:
        if piece["file"] not in places:
            raise ValueError(
                f"resume: {show(folder.shown(piece['file']))} is gone, and the conversion has replaced its sources: "
                f"restore them, and delete {unfinished.NAME}"
            )
        place, name = places[piece["file"]]
        piece.update(plan=plan.id, folder=place.place, file=name, options=plan.get("options"))
    outdated = folder.outdated([piece["file"] for piece in plan.pieces])
    if outdated:
        plan["outdated"] = outdated
    return plan


def _plan(
    prepared: Outputs, request: ConvertRequest, folder: Folder, call: str, *, overwrite: bool, resume: bool
) -> Plan:
    sources = Sources(prepared.catalog, "a conversion in pieces")
    options = _options(request)
    shards = divide(prepared.tensors, request.limit)
    weight_map(shards)  # refuses two tensors of one name
    before = dict(zip(prepared.tensors, prepared.decisions.items(), strict=True))
    common = {"metadata": as_texts(prepared.metadata) or None, "rename": _texts_of(request.options.get("rename"))}
    if request.options.get("adapters") is not None:
        from .merged import as_plain  # only here: most conversions merge nothing

        common["adapters"] = as_plain(prepared.catalog)  # type: ignore[assignment]
    pieces = []
    for file, shard in shards.items():
        decisions = dict(before[name] for name in shard)
        read = sources.of(name for one in decisions.values() for name in one.sources)
        nbytes = sum(output.nbytes for output in shard.values())
        pieces.append(piece_of("convert", read, file=file, nbytes=nbytes, tensors=runs_of(decisions), **common))
    for piece in pieces:  # a shard depends on the sources of its own piece, not on those of others
        piece["id"] = _id_of([options, piece])
    plan = Plan({KEY: VERSION, "operation": "convert", "version": __version__, "options": options, "pieces": pieces})
    plan["id"] = _id_of([__version__, options, [piece["id"] for piece in pieces]])
    plan["folder"] = folder.place
    if unfinished.is_source(folder, prepared.catalog):
        if folder.files.remote:
            unfinished.check_remote(folder)
        plan.update(in_place=True, call=call)
        repeats = _id_of([call, common.get("adapters")])
        for piece in pieces:
            piece["in_place"] = repeats
        if resume and {"adapters", "rename"} & options.keys():
            _check_not_applied(folder, prepared.catalog, repeats)
    places = _places(plan, folder, overwrite=overwrite, resume=resume)
    for piece in pieces:
        place, name = places[piece["file"]]
        piece.update(plan=plan["id"], folder=place.place, file=name, options=options)
    outdated = folder.outdated([name for _, name in places.values()]) if overwrite else []
    if outdated:
        plan["outdated"] = outdated
    plan["tensors"] = prepared.tensor_count
    plan["config"] = _config(prepared, request, in_place="in_place" in plan)
    if plan["config"] is None and overwrite:
        config = config_without_codes(prepared, folder, request.target)
        plan["config"] = None if config is None else {"content": config}
    plan["extras"] = {name: location_as_plain(location) for name, location in prepared.extras.items()}
    summary = prepared.summary
    if summary is not None:
        told = {name for name, one in prepared.decisions.items() if one.kept is not None}
        plan["quantized"] = {
            "before": summary.bytes_before,
            "kept": {name: why for name, why in summary.kept.items() if name not in told},
        }
    return plan


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


def _config(prepared: Outputs, request: ConvertRequest, *, in_place: bool) -> dict[str, Any] | None:
    """Where the configuration comes from, and what `finalize` changes in it.

    Args:
        prepared: has the configuration.
        request: the checked options.
        in_place: whether `finalize` replaces the file that it comes from.
    """
    config = prepared.catalog.config
    if config is None:
        return None
    change = {"dtype": None if request.target is None else request.target.code, "restored": prepared.decider.restored}
    folder = next((one.folder for one in prepared.catalog.checkpoints if one.config is config), None)
    if folder is None or folder.files.remote or in_place:
        return {"content": config, **change}
    return {"source": source_of((folder / CONFIG).path), **change}


# ---- the destination ----


def _places(plan: Plan, folder: Folder, *, overwrite: bool, resume: bool) -> dict[str, tuple[Folder, str]]:
    """The folder that each piece writes into, and the name of its file there.

    That is where its shard is already, or else the usual name in the destination, unless the destination has other
    content.

    Raises:
        FileExistsError, ValueError: see `plan_convert`.
    """
    files = [piece["file"] for piece in plan.pieces]
    usual = {file: (folder, file) for file in files}
    present = folder.names()
    if not present:
        folder.check_free(overwrite)
        return usual
    begun = folder.waits(plan.id)
    records = journal.recorded(folder, present)
    ids = {piece["id"]: piece["file"] for piece in plan.pieces}
    ours = {file for file, record in records.items() if record["piece"] in ids}
    if resume and not overwrite:

        def may_be_written_again(file: str) -> bool:
            """A shard in the way whose sources changed: only as long as the folder is incomplete."""
            return begun or (INDEX not in present and journal.same_work(records[file], plan))

        others = [file for file in records if file not in ours]
        if ours:
            others = [file for file in others if file in files and not may_be_written_again(file)]
        if others:
            differs = journal.difference(records[others[0]], plan, others[0])
            raise ValueError(f"resume: {show(folder.shown(others[0]))} was written {differs}: pass overwrite=True")
        if not ours:
            _check_unfinished(folder, present, files)
        if SINGLE in present:
            message = f"Other programs load this file instead of {INDEX}: pass overwrite=True to remove it"
            raise FileExistsError(errno.EEXIST, message, folder.shown(SINGLE))
    elif not overwrite:
        if ours:
            message = "The conversion has begun: resume=True goes on, overwrite=True replaces it"
            raise FileExistsError(errno.EEXIST, message, folder.title)
        folder.check_free(overwrite)
    found = _found(folder, present, records, ids)
    replaces = begun or (overwrite and ("in_place" in plan or present & ({INDEX, *files} - ours)))
    return {**(folder.apart(plan.id, files) if replaces else usual), **found}


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
        if record is not None and record.get("in_place") == repeats and folder.holds(name, record):
            raise ValueError(
                f"resume: {show(folder.shown(name))} is a result of this call already, and nothing is left to do: "
                "pass overwrite=True without resume=True to apply it once more"
            )


def _found(
    folder: Folder, present: Set[str], records: Mapping[str, Mapping[str, Any]], ids: Mapping[str, str]
) -> dict[str, tuple[Folder, str]]:
    """Where the shards of a plan are that need not be written again; see `_kept`."""
    found: dict[str, tuple[Folder, str]] = {}
    for place in folder.asides():  # before the folder: `journal.move` copies the record of a shard before it moves it
        names = place.names()
        found = {**_kept(place, names, journal.recorded(place, names), ids), **found}
    return {**_kept(folder, present, records, ids), **found}


def _kept(
    place: Folder, names: Set[str], records: Mapping[str, Mapping[str, Any]], ids: Mapping[str, str]
) -> dict[str, tuple[Folder, str]]:
    """The shards in a folder that a plan need not write again, by their usual names.

    Args:
        place: the folder.
        names: its files.
        records: by the names of shards.
        ids: usual name of the shard of each piece, by the piece's id.
    """
    found: dict[str, tuple[Folder, str]] = {}
    for name, record in records.items():
        file = ids.get(record["piece"])
        if file is not None and name in names and name in place.names_for(file, record["plan"]):
            found[file] = place, name
    return found


def _check_unfinished(folder: Folder, present: Set[str], files: Sequence[str]) -> None:
    """Refuses to go on in a folder without records that has more than what workers leave that were killed early.

    Raises:
        FileExistsError: it has.
    """
    if INDEX in present:
        message = "The folder is complete, with no record of how: pass overwrite=True"
        raise FileExistsError(errno.EEXIST, message, folder.title)
    left = folder.leftovers([*files, *(file + journal.SUFFIX for file in files)])
    if present >= set(files) or not present <= {*files, *left}:
        message = "The folder has other files, and no record of this conversion: pass overwrite=True"
        raise FileExistsError(errno.EEXIST, message, folder.title)
