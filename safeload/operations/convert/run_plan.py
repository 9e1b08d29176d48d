"""Run the pieces of a conversion to a folder, and complete the folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple

from ...base.gc_pause import paused
from ...base.selecting import renamed
from ...base.text import plural, show
from ...engine.codes.pieces import in_order
from ...engine.run.digest import Digest
from ...engine.run.progress import Progress
from ...errors import FormatError, public
from ...formats.folder import CONFIG, INDEX, SINGLE
from ...formats.registry import SAFETENSORS
from ..folders import journal, unfinished
from ..folders.destinations import folder_at, replacement_of
from ..folders.folder import Folder, LocalFolder, homes_of, shared_identity
from ..folders.shards import (
    Beside,
    ShardWriter,
    config_with,
    open_shard,
    warn_of_schemes,
    write_beside,
    write_shard,
    writer_of,
)
from ..quantize.checkpoint import Summary
from ..quantize.engine_layout import restored
from ..sources import executors
from ..sources.catalog import Catalog
from ..sources.codec import decode, encode
from ..sources.executors import Executor
from ..sources.piece_files import config_from, location_of, opened, version_of
from ..sources.plan import INVALID_PLAN, check_version, decode_piece
from .copies import planned_copies
from .decide import ConversionPiece, ConversionPlan, ShardResult, casts_of, decisions_of, row_of
from .make import Maker
from .write import ConvertReport

# Options that change tensors of a folder again if they are applied to their own result.
ONCE = {"adapters", "rename"}


def run_all(
    plan: ConversionPlan,
    folder: Folder,
    storage_options: Mapping[str, Any] | None,
    *,
    executor: Executor | None,
    threads: int | None,
    progress: Progress,
) -> ConvertReport:
    """Run all pieces of a plan, each of which puts its shard in place and records it, and complete the folder."""
    pieces, sizes = [encode(piece) for piece in plan.pieces], [piece.nbytes for piece in plan.pieces]
    run = PieceRunner(folder, storage_options)
    with ExitStack() as stack:
        for place in {piece["folder"]: run.folder_of(piece) for piece in pieces}.values():
            stack.enter_context(replacement_of(place).undone())
        results = executors.run(run, pieces, executor, sizes=sizes, threads=threads, progress=progress)
    return complete(plan, results, folder, storage_options, at_once=True)


def run(
    piece: Mapping[str, Any],
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    folder: Folder | None = None,  # None to derive it from the piece
) -> dict[str, Any]:
    """Write the shard of a piece unless it is complete already; see `run_piece`."""
    started = time.perf_counter()
    decoded = decode_piece(ConversionPiece, piece)
    plan, file = decoded.plan, decoded.file
    if folder is None:
        folder = folder_at(decoded.folder, decoded.storage_options, storage_options)
    places = homes_of(folder)  # `finalize` may have moved the shard
    # The identity comes before the content is checked, so that a later change is noticed.
    local = () if folder.location.files.remote else places
    identity = next((identity for place in local if (identity := place.identity(file)) is not None), None)
    records = (journal.is_whole(place, file, decoded.id) for place in places)
    record = next((record for record in records if record is not None), None)
    if record is None and decoded.continued:
        message = "the shard does not match its record, and the conversion has replaced its sources: restore them"
        raise FormatError(message, folder.shown(file))
    if record is None:
        size, digest, identity = _write(decoded, folder, threads, storage_options)
        journal.write(folder, file, _record_of(decoded, size, digest))
    else:
        size, digest = record.size, record.sha256
    result = ShardResult(
        plan=plan,
        file=file,
        nbytes=decoded.nbytes,
        size=size,
        sha256=digest,
        identity=identity,
        written=record is None,
        seconds=round(time.perf_counter() - started, 3),
    )
    plain: dict[str, Any] = encode(result)
    return plain


def _record_of(piece: ConversionPiece, size: int, digest: str) -> journal.ShardRecord:
    return journal.ShardRecord(
        plan=piece.plan,
        version=piece.version,
        options=piece.options,
        piece=piece.id,
        sources=versions_of(piece),
        in_place=piece.in_place,
        size=size,
        sha256=digest,
    )


def versions_of(piece: ConversionPiece) -> list[list[Any]]:
    """Return bare name, size and version of each file of a piece."""
    versions = [version for source in piece.sources for version in source.versions()]
    if piece.adapters:
        from .merged import decode_adapters  # only here: most conversions merge nothing

        versions += [version_of(*file) for adapter in decode_adapters(piece.adapters) for file in adapter.files]
    return versions


class PieceRunner:
    """Calls `run` with the store and the options of this process. Pickling drops secrets, as in a plan."""

    def __init__(self, folder: Folder, storage_options: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._storage_options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceRunner, (self._folder, None)  # pieces carry the public options

    def folder_of(self, piece: Mapping[str, Any]) -> Folder:
        """Return the folder of a piece."""
        return self._folder if self._folder.location.files.remote else LocalFolder(piece["folder"])

    def __call__(self, piece: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        return run(piece, threads, self._storage_options, self.folder_of(piece))


def _writer(
    stack: ExitStack, piece: ConversionPiece, threads: int | None, storage_options: Mapping[str, Any] | None
) -> tuple[ShardWriter, int]:
    """Open the sources of a piece; return the writer of its shard and the bytes of its tensors."""
    casts, decisions = casts_of(piece), {}
    if casts is None:
        decisions = decisions_of(piece.tensors)
        reads = [name for decision in decisions.values() for name in decision.reads]
        catalog = _catalog(stack, piece, [*dict.fromkeys(reads)], storage_options)
    else:
        catalog = _catalog(stack, piece, [*casts], storage_options)
        copies = planned_copies(catalog, piece, casts, threads)
        if copies is not None:
            return copies.writer(_ignore), copies.nbytes
        decisions = decisions_of(piece.tensors)
    maker = Maker(catalog, decisions, SAFETENSORS, threads=threads)
    outputs = maker.outputs()
    new = renamed(outputs, piece.rename)
    maker.begin({new[name]: name for name in outputs})
    outputs = {new[name]: output for name, output in outputs.items()}
    total = sum(output.nbytes for output in outputs.values())
    return writer_of(outputs, piece.metadata, editable=piece.editable), total


def _catalog(
    stack: ExitStack, piece: ConversionPiece, reads: Sequence[str], storage_options: Mapping[str, Any] | None
) -> Catalog:
    """Open the tensors that a piece reads; ``reads`` has plan order, which numbers the first tensor of each file."""
    if not piece.adapters and not piece.recipes:
        return stack.enter_context(opened(piece.sources, reads, storage_options))
    names = [
        source
        for name in reads
        for source in (dict.fromkeys(piece.recipes[name].sources) if name in piece.recipes else (name,))
    ]
    if piece.adapters:
        from .merged import decode_adapters, reopened, stored_names  # only here: most conversions merge nothing

        adapters = decode_adapters(piece.adapters)
        stored = stack.enter_context(opened(piece.sources, stored_names(adapters, names), storage_options))
        catalog: Catalog = reopened(stack, stored, adapters, frozenset(names))
    else:
        catalog = stack.enter_context(opened(piece.sources, names, storage_options))
    return restored(catalog, piece.recipes, reads) if piece.recipes else catalog


def _ignore(nbytes: int) -> None:
    """Report no progress: a piece counts when it is complete."""


def _write(
    piece: ConversionPiece, folder: Folder, threads: int | None, storage_options: Mapping[str, Any] | None
) -> tuple[int, str, list[int] | None]:
    """Write a shard; return its size, SHA-256 and identity."""
    file = piece.file
    with ExitStack() as stack, Digest() as digest:
        with paused(sum(len(run.names) for run in piece.tensors)):
            writer, total = _writer(stack, piece, threads, storage_options)
        if total != piece.nbytes:
            raise FormatError(
                f"the shard was planned with {piece.nbytes:,} bytes of tensors, but has {total:,}",
                folder.shown(file),
            )
        identity = None
        try:
            with ExitStack() as written:
                shard = write_shard(written, writer, folder, file, overwrite=True, digest=digest)
            identity = None if folder.location.files.remote else shared_identity(shard.identity)
        except PermissionError:  # Windows: another process that runs this piece is reading the shard it just wrote
            if folder.location.files.remote or not folder.holds(file, writer.size, digest.hexdigest()):
                raise
        return writer.size, digest.hexdigest(), identity


@public
def finalize(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Complete the folder of a conversion after all of its pieces: write its config, its other files, and its index.

    First all local shards are read, on several threads, and their SHA-256 is compared with the results. Objects in a
    store are not read if they still have the uploaded version.

    Args:
        plan: a plan from `plan_convert`, or a dict with equal content.
        results: the results of `run_piece` for all pieces, in any order; duplicates are ignored.
        storage_options: for URLs: options outside the plan, such as keys.

    Returns:
        A report of the files written; ``seconds`` adds up the time of all pieces.

    Raises:
        ValueError: a piece has no result.
        FormatError: a shard is missing, or was changed after its piece; or the arguments are not a plan and its
            results.
        UnsupportedError: another version of safeload made the plan.
        OSError: a file cannot be written.

    Example:
        >>> import safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> safeload.finalize(plan, map(safeload.run_piece, plan.pieces)).tensors
        30
    """
    decoded = decode_plan(plan)
    folder = folder_at(decoded.folder, decoded.storage_options, storage_options)
    return complete(decoded, results, folder, storage_options)


def decode_plan(plan: Any) -> ConversionPlan:
    """Decode a plan from an untrusted source."""
    check_version(plan)
    return decode(ConversionPlan, plan, INVALID_PLAN)


class _Shard(NamedTuple):
    """A shard, according to the result of its piece."""

    piece: str  # id of the piece
    folder: Folder  # destination of the piece
    size: int  # in bytes
    sha256: str
    seconds: float
    identity: list[int] | None  # see `Folder.identity`; a shard with this identity need not be read

    def is_in(self, place: Folder, file: str) -> bool:
        """Return True if a file of a folder has the identity of this shard."""
        return self.identity is not None and place.identity(file) == self.identity


def complete(
    plan: ConversionPlan,
    results: Iterable[Mapping[str, Any]],
    folder: Folder,
    storage_options: Mapping[str, Any] | None,
    *,
    at_once: bool = False,  # True in the call that ran the pieces: trust shards with their reported identity
) -> ConvertReport:
    """Complete a folder like `finalize`."""
    shards = _shards_of(plan, results, folder, at_once=at_once)
    config = _config_of(plan)
    extras = {name: location_of(planned, storage_options) for name, planned in plan.extras.items()}
    indexed = plan.parameters is not None or [*shards] != [SINGLE]
    weight_map, total = _check_shards(shards, folder, indexed=indexed or config is not None)
    summary = _summary(plan, total)
    places = {file: shard.folder for file, shard in shards.items()}
    waiting = any(place.place != folder.place for place in places.values())
    replacement = replacement_of(folder)
    placed = [file for file, place in places.items() if place.place == folder.place]
    with ExitStack() as stack:
        beside = Beside(weight_map, total, config, extras, indexed, plan.parameters)
        stack.enter_context(replacement.after_index(plan.outdated))
        commit = write_beside(stack, beside, folder, replacement, overwrite=True, outdated=plan.outdated, placed=placed)
        if waiting or plan.in_place:
            stack.enter_context(unfinished.noted(folder, _note_of(plan, config)))
        commit(replacement.collected(plan.id, places))
    names = [*shards, INDEX, CONFIG, *extras]
    waited = [*places.values(), *journal.superseded(replacement.asides(), plan.version, plan.options)]
    replacement.tidy(plan.id, [*names, *(file + journal.RECORD for file in names)], waited)
    if waiting or plan.outdated or plan.in_place or not folder.location.files.remote:
        unfinished.forget(folder)  # once it is gone, the same call may refuse to continue
    if not (plan.in_place and ONCE & plan.options.keys()):  # there the records prevent a second time
        journal.clear(folder)
    warn_of_schemes(folder.location.shown, plan.schemes)
    nbytes, seconds = (sum(shard.size for shard in shards.values()), sum(shard.seconds for shard in shards.values()))
    files = [folder.shown(file) for file in shards]
    shown, count = folder.location.shown, plan.tensors
    return ConvertReport(shown, SAFETENSORS, files, count, nbytes, seconds, summary, plan.left_out)


def _note_of(plan: ConversionPlan, config: dict[str, Any] | None) -> unfinished.UnfinishedNote:
    """Return the note of a conversion with a future ``config.json``; see `unfinished`."""
    pieces = [
        unfinished.NotedPiece(id=piece.id, file=piece.file, nbytes=piece.nbytes, tensors=encode(piece.tensors))
        for piece in plan.pieces
    ]
    return unfinished.UnfinishedNote(
        id=plan.id,
        version=plan.version,
        options=plan.options,
        call=plan.call,
        tensors=plan.tensors,
        quantized=encode(plan.quantized),
        schemes=plan.schemes,
        parameters=plan.parameters,
        pieces=tuple(pieces) if plan.in_place else None,
        config=config if plan.in_place else None,
    )


def _shards_of(
    plan: ConversionPlan, results: Iterable[Mapping[str, Any]], folder: Folder, *, at_once: bool
) -> dict[str, _Shard]:
    """Return the shard of each piece by file name."""
    by_file = {}
    for plain in results:
        if isinstance(plain, Mapping) and plain.get("plan") == plan.id:
            result = decode(ShardResult, plain, "invalid result of a piece", extra=True)
            by_file[result.file] = result
    missing = [piece.file for piece in plan.pieces if piece.file not in by_file]
    if missing:
        count = f"{plural(len(missing), 'piece')} of {len(plan.pieces):,}"
        raise ValueError(f"no result for {count}, such as {show(missing[0])}: run them first")
    shards = {}
    for piece in plan.pieces:
        result = by_file[piece.file]
        place = folder if folder.location.files.remote else LocalFolder(piece.folder)
        identity = result.identity if at_once else None
        shards[piece.file] = _Shard(piece.id, place, result.size, result.sha256, result.seconds, identity)
    return shards


def _check_shards(shards: Mapping[str, _Shard], folder: Folder, *, indexed: bool) -> tuple[dict[str, str], int]:
    """Read the headers of all shards; return the shard of each tensor, if ``indexed``, and the bytes of all tensors."""
    for place in {place.place: place for place in (*(shard.folder for shard in shards.values()), folder)}.values():
        with suppress(OSError):
            place.names()  # listing refreshes the NFS client's directory cache, which can be seconds old

    def header(file: str) -> tuple[list[str], int]:
        return _header_of(file, shards[file], folder, indexed=indexed)

    if folder.location.files.remote:
        headers = folder.location.files.each(header, [*shards])
    else:
        unread = sum(shard.size for file, shard in shards.items() if not shard.is_in(shard.folder, file))
        headers = list(in_order(header, shards, None, unread))
    weight_map: dict[str, str] = {}
    for file, (names, _) in zip(shards, headers, strict=True):
        weight_map.update(dict.fromkeys(names, file))
    return weight_map, sum(nbytes for _, nbytes in headers)


def _header_of(file: str, shard: _Shard, folder: Folder, *, indexed: bool) -> tuple[list[str], int]:
    """Check a shard; return its tensor names, if an index needs them, and the bytes of its tensors."""
    place, record = shard.folder, journal.read(shard.folder, file)
    if record is not None and record.piece != shard.piece:
        raise FormatError("another conversion has written the shard since: run its piece again", place.shown(file))
    try:
        weight_file = open_shard(place, file)
    except FileNotFoundError:
        moved = None if place.place == folder.place else journal.read(folder, file)
        if place.place == folder.place or (moved is not None and moved.piece != shard.piece):
            raise _gone(place, file) from None
        place, record = folder, moved  # `finalize` was interrupted, or is repeated
        try:
            weight_file = open_shard(folder, file)
        except FileNotFoundError:
            raise _gone(shard.folder, file) from None
    with closing(weight_file):
        if weight_file.size != shard.size:
            message = f"the shard has {weight_file.size:,} bytes, but its piece wrote {shard.size:,}"
            raise FormatError(message, weight_file.path)
        version = None if record is None else record.object
        recorded = record is None or record.sha256 == shard.sha256
        if not recorded or not (shard.is_in(place, file) or place.holds(file, shard.size, shard.sha256, version)):
            raise FormatError(
                f"the shard is not what its piece wrote: run its piece again (expected SHA-256 {shard.sha256[:16]}...)",
                weight_file.path,
            )
        return weight_file.table.names if indexed else [], weight_file.table.nbytes


def _gone(place: Folder, file: str) -> FormatError:
    advice = "run its piece again, on a machine that shares this folder"
    return FormatError(f"the shard is gone: {advice}", place.shown(file))


def _config_of(plan: ConversionPlan) -> dict[str, Any] | None:
    """Return the ``config.json`` of the result."""
    planned = plan.config
    if planned is None:
        return None
    config = config_from(planned.source if planned.content is None else planned.content)
    target = None if planned.dtype is None else row_of(planned.dtype)
    return config_with(config, target, restored=planned.restored, schemes=plan.schemes)


def _summary(plan: ConversionPlan, total: int) -> Summary | None:
    """Return the summary of a plan, given the bytes of its result."""
    if plan.quantized is None:
        return None
    decisions = {name: decision for piece in plan.pieces for name, decision in decisions_of(piece.tensors).items()}
    quantized = {name: decision.scheme for name, decision in decisions.items() if decision.scheme is not None}
    kept = {name: decision.kept for name, decision in decisions.items() if decision.kept is not None}
    return Summary(plan.quantized.before, total, quantized, {**kept, **plan.quantized.kept})
