"""Plan conversions to a folder of shards, with a piece for each shard."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...base import url as urls
from ...base.gc_pause import paused
from ...base.scheme import parse
from ...base.selecting import pairs_of
from ...base.text import show
from ...checkpoint import recipe_of
from ...engine.run.atomic_file import hidden_name
from ...errors import UnsupportedError, public
from ...formats.folder import INDEX, RESUME, SINGLE
from ...formats.numbered import PART
from ...packed.families import preset_of, presets
from ...stores.files import Location
from ..folders import journal
from ..folders.destinations import Destination
from ..folders.sink import Sink, free_names, indexed_names
from ..quantize.engine_layout import EngineCatalog
from ..sources.catalog import Catalog, Given, has_names
from ..sources.plan import DIGITS, Plan, digest_of
from ..sources.reading import TensorFiles
from .copies import Copies, copies_of
from .make import prepare
from .request import ConvertOptions, ConvertRequest, is_restored, open_sources, request_of
from .run_plan import sum_of, versions_of
from .write import PlannedConversion, config_without_codes, warn_of_left_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LONGEST = 200  # characters of an option in a record; longer options are recorded as a digest


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
            `finalize`: new shards wait in a subfolder, or in a store have different names.
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
    for content in (plan, *plan["pieces"]):
        content["storage_options"] = shared
    plan["sum"] = sum_of(plan)
    return Plan(plan)


def planned(
    src: Given | Sequence[Given], dst: Destination, options: ConvertOptions, *, overwrite: bool, resume: bool
) -> tuple[dict[str, Any], Sink]:
    """Return the plan of a conversion, without storage options, and its destination; see `plan_convert`."""
    request = request_of(dst, options)
    if request.folder is None:
        raise ValueError(
            f"{show(request.path)} is a file, which is written at once: only folders of shards can be resumed or "
            "written by several processes; pass the path of a folder"
        )
    sources: Any = src if has_names(src) else list(src)  # type: ignore[arg-type]
    call = digest_of([__version__, _options(request), _sources_of(sources)])
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


def _sources_of(src: Any) -> list[Any]:
    """Identify the sources of a call by their paths, to recognize a repeated call."""
    return [_source_id(source) for source in (src if isinstance(src, (list, tuple)) else [src])]


def _source_id(source: Any) -> Any:
    if hasattr(source, "weight_files"):  # an open checkpoint
        recipe = recipe_of(source)
        shown = [recipe.files.shown(path).rstrip("/") for path in recipe.paths]
        return shown[0] if (len(shown), recipe.root, recipe.stored) == (1, None, False) else [shown, recipe.root]
    if isinstance(source, Location):
        return source.shown.rstrip("/")
    text = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    if isinstance(text, str):
        return (urls.shown(text) if urls.is_url(text) else os.path.abspath(text)).rstrip("/")
    return f"{type(source).__name__} {getattr(source, 'path', '')}"


def _plan(
    prepared: PlannedConversion, request: ConvertRequest, folder: Sink, call: str, *, overwrite: bool, resume: bool
) -> dict[str, Any]:
    options = _options(request)
    pieces = _pieces(prepared, request, options)
    plan_id = digest_of([__version__, options, [piece["id"] for piece in pieces]])
    for piece in pieces:
        piece.update(plan=plan_id, call=call, folder=folder.place)
    _check_folder(pieces, folder, overwrite=overwrite, resume=resume)
    if resume:
        _check_not_applied(prepared.catalog, folder, call)
    if folder.location.files.remote:
        _choose_names(pieces, folder, overwrite=overwrite)
    config = prepared.config
    if config is None and overwrite:
        config = config_without_codes(prepared, folder, request.target)
    return {
        "safeload_plan": 2,
        "operation": "convert",
        "version": __version__,
        "id": plan_id,
        "call": call,
        "options": options,
        "folder": folder.place,
        "overwrite": overwrite,
        "storage_options": None,
        "pieces": pieces,
        "tensors": prepared.tensor_count,
        "config": config,
        "extras": {name: _planned(location) for name, location in prepared.extras.items()},
        "quantized": prepared.planned_summary,
        "schemes": [*prepared.schemes],
        "left_out": [*warn_of_left_out(prepared)],
        "parameters": prepared.parameters,
    }


def _planned(location: Location) -> list[Any]:
    """Return path and storage options of a file, without secrets."""
    return [location.files.public(location.files.absolute(location.path)), location.files.public_options()]


def _pieces(prepared: PlannedConversion, request: ConvertRequest, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a piece for each shard, without its plan and folder."""
    shards, catalog = prepared.divided(request.limit), _stored(prepared.catalog)
    if not isinstance(prepared, Copies):  # a part of a quantized tensor can have the name of another tensor
        prepared.weight_map(shards)  # refuses two tensors with the same name
    adapters: list[dict[str, Any]] = []
    if request.options.get("adapters") is not None:
        from .merged import planned_adapters  # only here: most conversions merge nothing

        adapters = planned_adapters(catalog)
    reads = [[*dict.fromkeys(shard.reads)] for shard in shards.values()]
    position = {name: k for k, name in enumerate(dict.fromkeys(chain.from_iterable(reads)))}
    side = TensorFiles(catalog, [*position], "a conversion in pieces")
    preset = options.get("quantize")
    pieces = []
    for (file, shard), names in zip(shards.items(), reads, strict=True):
        piece: dict[str, Any] = {
            "operation": "convert",
            "version": __version__,
            "options": options,
            "sources": side.sources([*map(position.__getitem__, names)]),
            "nbytes": shard.nbytes,
            "tensors": shard.runs,
            "metadata": None if prepared.texts is None else dict(prepared.texts),
            "rename": _texts_of(request.options.get("rename")) or [],
            "adapters": adapters,
            "recipes": json.loads(json.dumps(shard.recipes)),
            "editable": not isinstance(preset, str) or preset not in presets(),
        }
        # A shard depends on the sources of its own piece, not on those of other pieces.
        pieces.append({**piece, "id": digest_of(piece), "file": file, "storage_options": None})
    return pieces


def _stored(catalog: Catalog) -> Catalog:
    """Return the catalog with the names of the sources."""
    return catalog.base if isinstance(catalog, EngineCatalog) else catalog


# ---- options ----


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
            value = f"{text[:40]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:DIGITS]})"
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


def _check_folder(pieces: Sequence[dict[str, Any]], folder: Sink, *, overwrite: bool, resume: bool) -> None:
    """Refuse to write into a folder with other content, or to continue another conversion."""
    names = folder.names()
    folder.check_free(overwrite or resume)
    if overwrite or not resume or not names:
        return
    records = journal.records(folder)
    first, own = pieces[0], records.get(pieces[0]["call"], {})
    complete = bool(names & {INDEX, SINGLE})
    if own and not complete:
        return
    if own and SINGLE in names and all(piece["file"] != SINGLE for piece in pieces):
        message = f"Other programs load this file instead of {INDEX}: pass overwrite=True to remove it"
        raise FileExistsError(errno.EEXIST, message, folder.shown(SINGLE))
    earlier = next(filter(None, (own, *records.values())), None)
    if earlier is None:
        what = "complete checkpoint: there is nothing to continue" if complete else "no record of this conversion"
        message = f"The folder has {'a ' if complete else 'other files, and '}{what}; pass overwrite=True to replace it"
        begun = {RESUME, *({piece["file"] for piece in pieces} if folder.location.files.remote else ())}
        if any(name not in begun and hidden_name(name) is None for name in names):
            raise FileExistsError(errno.EEXIST, message, folder.location.shown)
    elif not complete or any(own.get(piece["file"], {}).get("piece") != piece["id"] for piece in pieces):
        changed = [piece for piece in pieces if earlier.get(piece["file"], {}).get("piece") not in (None, piece["id"])]
        file = changed[0]["file"] if changed else next(iter(earlier))
        versions = [version for piece in changed[:1] for version in versions_of(piece)]
        difference = journal.difference(earlier[file], __version__, first["options"], versions)
        raise ValueError(
            f"resume: {show(folder.shown(file))} was written {difference}; pass overwrite=True to start over"
        )


def _check_not_applied(catalog: Catalog, folder: Sink, call: str) -> None:
    """Refuse to convert the result of an interrupted call, which replaced its own source, once more."""
    read = {file.files.public(file.place) for file in catalog.weight_files}
    for file, record in journal.records(folder).get(call, {}).items():
        for place, name in journal.places(folder, call, file):
            path = (Location(folder.location.files, folder.place) / name).path
            if (
                place is folder
                and path in read
                and place.holds(name, record["size"], record["sha256"], record.get("object"))
            ):
                raise ValueError(
                    f"resume: {show(folder.shown(name))} is already the result of this call: "
                    "pass overwrite=True without resume=True to apply it again"
                )


def _choose_names(pieces: Sequence[dict[str, Any]], folder: Sink, *, overwrite: bool) -> None:
    """Name the shards in a store as an interrupted call did, or by free names."""
    own, taken = journal.records(folder).get(pieces[0]["call"], {}), set()
    if own or overwrite:  # or else the folder has only shards of this call
        totals, indexed = {part[3] for file in own if (part := PART.fullmatch(file))}, indexed_names(folder)
        parts = ((name, PART.fullmatch(name)) for name in folder.names())
        taken = {name for name, part in parts if part is None or part[3] not in totals or name in indexed}
    kept = {record["piece"]: file for file, record in own.items()}
    free = free_names(folder, [piece["file"] for piece in pieces if piece["id"] not in kept], taken)
    for piece in pieces:
        piece["file"] = kept.get(piece["id"]) or free[piece["file"]]
