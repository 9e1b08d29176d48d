"""Run the pieces of a conversion to a folder, and complete the folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple

from ...base.selecting import renamed
from ...base.text import plural, show
from ...engine.codes.pieces import in_order
from ...engine.run.digest import Digest
from ...engine.run.progress import Progress
from ...errors import FormatError
from ...formats.folder import CONFIG, INDEX
from ...formats.registry import SAFETENSORS
from ..folders import journal, unfinished
from ..folders.destinations import of_piece
from ..folders.shard_folder import Folder, shared_identity
from ..folders.shards import Beside, config_with, write_beside, write_shard, writer_of
from ..quantize.checkpoint import Summary
from ..sources import executors
from ..sources.executors import Executor
from ..sources.plan import Plan, bare_name, check_version, field, texts
from ..sources.sources import config_from, location_of, opened
from .decisions import decisions_of, row_of
from .make import Maker
from .write import ConvertReport


def run_all(
    plan: Plan,
    folder: Folder,
    storage_options: Mapping[str, Any] | None,
    *,
    executor: Executor | None,
    threads: int | None,
    progress: Progress,
) -> ConvertReport:
    """Run all pieces of a plan and complete its folder.

    Each shard is put in place and recorded as soon as it is complete.
    """
    sizes = [piece["nbytes"] for piece in plan.pieces]
    run = PieceRunner(folder, storage_options)
    with ExitStack() as stack:
        for place in {piece["folder"]: run.folder_of(piece) for piece in plan.pieces}.values():
            stack.enter_context(place.undone())
        results = executors.run(run, plan.pieces, executor, sizes=sizes, threads=threads, progress=progress)
    return complete(plan, results, folder, storage_options, at_once=True)


def run(
    piece: Mapping[str, Any],
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    folder: Folder | None = None,
) -> dict[str, Any]:
    """Write the shard of a piece unless it is complete already; see `run_piece`.

    Args:
        storage_options: options of this process.
        folder: folder of the piece; None to derive it from the piece.
    """
    check_version(piece)
    started = time.perf_counter()
    field(piece, "id", str)
    plan, file, nbytes = field(piece, "plan", str), bare_name(field(piece, "file", str)), field(piece, "nbytes", int)
    folder = of_piece(piece, storage_options) if folder is None else folder
    places = folder.places(plan)  # `finalize` may have moved the shard
    record = next((record for place in places if (record := journal.is_whole(place, file, piece)) is not None), None)
    identity = next((identity for place in places if (identity := place.identity(file)) is not None), None)
    if record is None and piece.get("continued"):
        message = "the shard does not match its record, and the conversion has replaced its sources: restore them"
        raise FormatError(message, folder.shown(file))
    if record is None:
        size, digest, identity = _write(piece, folder, file, threads, storage_options)
        journal.write(folder, file, piece, size, digest)
    else:
        size, digest = record["size"], record["sha256"]
    return {
        "plan": plan,
        "file": file,
        "nbytes": nbytes,
        "size": size,
        "sha256": digest,
        "identity": identity,
        "written": record is None,
        "seconds": round(time.perf_counter() - started, 3),
    }


class PieceRunner:
    """Calls `run` with the store and the options of this process. Pickling drops secrets, as in a plan."""

    def __init__(self, folder: Folder, storage_options: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._storage_options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceRunner, (self._folder, None)  # pieces carry the public options

    def folder_of(self, piece: Mapping[str, Any]) -> Folder:
        """Return the folder of a piece."""
        return self._folder if self._folder.files.remote else of_piece(piece)

    def __call__(self, piece: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        return run(piece, threads, self._storage_options, self.folder_of(piece))


def _write(
    piece: Mapping[str, Any],
    folder: Folder,
    file: str,
    threads: int | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[int, str, list[int] | None]:
    """Write a shard; return its size, SHA-256 and identity."""
    decisions = decisions_of(piece)
    names = [name for decision in decisions.values() for name in decision.sources]
    with ExitStack() as stack, Digest() as digest:
        stored = names
        if piece.get("adapters") is not None:
            from .merged import reopened, stored_names  # only here: most conversions merge nothing

            stored = stored_names(piece["adapters"], names)
        catalog = stack.enter_context(opened(field(piece, "sources", list), stored, storage_options))
        if piece.get("adapters") is not None:
            catalog = reopened(stack, catalog, piece["adapters"], frozenset(names))
        outputs = Maker(catalog, decisions, SAFETENSORS, threads).outputs()
        new = renamed(outputs, _renames(piece))
        outputs = {new[name]: output for name, output in outputs.items()}
        total = sum(output.nbytes for output in outputs.values())
        if total != piece["nbytes"]:
            raise FormatError(
                f"the shard was planned with {piece['nbytes']:,} bytes of tensors, but has {total:,}",
                folder.shown(file),
            )
        writer, identity = writer_of(outputs, _metadata(piece)), None
        try:
            with ExitStack() as written:
                shard = write_shard(written, writer, folder, file, overwrite=True, digest=digest)
            identity = None if folder.files.remote else shared_identity(shard.identity)
        except PermissionError:  # Windows: another process that runs this piece is reading the shard it just wrote
            if folder.files.remote or not folder.holds(file, {"size": writer.size, "sha256": digest.hexdigest()}):
                raise
        return writer.size, digest.hexdigest(), identity


def _renames(piece: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of ``rename``."""
    pairs = field(piece, "rename", list) if "rename" in piece else []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or [type(text) for text in pair] != [str, str]:
            raise FormatError(f"invalid plan: rename must be pairs of text, got {show(pair)}")
    return [tuple(pair) for pair in pairs]


def _metadata(piece: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the metadata of a shard."""
    if "metadata" not in piece:
        return None
    metadata = field(piece, "metadata", dict)
    return {key: field(metadata, key, str) for key in metadata}


def finalize(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Complete the folder of a conversion after all of its pieces: write its config, its other files, and its index.

    First all local shards are read, on several threads, and their SHA-256 is compared with the results. Objects in a
    store are not read if they still have the version that their piece uploaded.

    Args:
        plan: a plan that `plan_convert` made, or a dict with the same content.
        results: the results of `run_piece` for all pieces, in any order; duplicates are ignored.
        storage_options: for URLs: options that the plan cannot carry, such as keys.

    Returns:
        A report of the files written; ``seconds`` adds up the time of all pieces.

    Raises:
        ValueError: a piece has no result.
        FormatError: a shard is missing or differs from the one that its piece wrote; or the arguments are not a plan
            and its results.
        UnsupportedError: another version of safeload made the plan.
        OSError: a file cannot be written.

    Example:
        >>> import safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> safeload.finalize(plan, map(safeload.run_piece, plan.pieces)).tensors
        30
    """
    if not isinstance(plan, Mapping):
        raise FormatError(f"a plan must be an object, got {show(plan)}")
    return complete(plan, results, of_piece(plan, storage_options), storage_options)


class _Shard(NamedTuple):
    """A shard as the result of its piece describes it."""

    piece: str  # id of the piece
    folder: Folder  # the folder that the piece writes to
    size: int  # in bytes
    sha256: str
    seconds: float
    identity: list[int] | None  # a shard that still has it need not be read; see `Folder.identity`

    def is_in(self, place: Folder, file: str) -> bool:
        """Return True if the identity shows that a file of a folder is still this shard."""
        return self.identity is not None and place.identity(file) == self.identity


def complete(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    folder: Folder,
    storage_options: Mapping[str, Any] | None,
    *,
    at_once: bool = False,
) -> ConvertReport:
    """Complete a folder like `finalize`.

    Args:
        folder: the folder of the plan.
        at_once: True in the call that ran the pieces: shards that still have their reported identity are not read.
    """
    plan = Plan(plan)
    check_version(plan)
    shards = _shards_of(plan, results, folder, at_once=at_once)
    tensors = field(plan, "tensors", int)
    config, extras = _config_of(plan), field(plan, "extras", dict)
    extras = {bare_name(name): location_of(plain, storage_options) for name, plain in extras.items()}
    outdated = [bare_name(name) for name in texts(plan, "outdated")] if "outdated" in plan else []
    weight_map, total = _check_shards(shards, folder)
    summary = _summary(plan, total)
    places = {file: shard.folder for file, shard in shards.items()}
    waiting = any(place.place != folder.place for place in places.values())
    with ExitStack() as stack, ExitStack() as first:
        # The other files come first: if copying them fails, an existing checkpoint is still complete.
        beside = Beside(weight_map, total, config, extras)
        write_beside(stack, beside, folder, overwrite=True, outdated=outdated, extras=first)
        first.close()
        if waiting or "in_place" in plan:
            unfinished.note(folder, plan, config)
        for file, source, target in folder.moves(plan.id, places):
            journal.move(file, source, target)
    names = [*shards, INDEX, CONFIG, *extras]
    waited = [*places.values(), *journal.superseded(folder, plan)]
    folder.tidy(plan.id, [*names, *(file + journal.SUFFIX for file in names)], waited)
    if waiting or outdated or "in_place" in plan or not folder.files.remote:
        unfinished.forget(folder)  # last: once it is gone, the same call may refuse to continue
    nbytes, seconds = (sum(shard.size for shard in shards.values()), sum(shard.seconds for shard in shards.values()))
    files = [folder.shown(file) for file in shards]
    return ConvertReport(folder.title, SAFETENSORS, files, tensors, nbytes, seconds, summary)


def _shards_of(plan: Plan, results: Iterable[Mapping[str, Any]], folder: Folder, *, at_once: bool) -> dict[str, _Shard]:
    """Return the shard of each piece by file name.

    Raises:
        ValueError: a piece has no result.
    """
    runner = PieceRunner(folder, None)
    by_file = {
        field(result, "file", str): result
        for result in results
        if isinstance(result, Mapping) and result.get("plan") == plan.id
    }
    pieces = {bare_name(field(piece, "file", str)): piece for piece in plan.pieces}
    missing = [file for file in pieces if file not in by_file]
    if missing:
        raise ValueError(f"{plural(len(missing), 'piece')} of {len(pieces):,} without a result: {show(missing[0])}")
    return {
        file: _Shard(
            field(piece, "id", str),
            runner.folder_of(piece),
            field(by_file[file], "size", int),
            field(by_file[file], "sha256", str),
            field(by_file[file], "seconds", float),
            by_file[file].get("identity") if at_once else None,
        )
        for file, piece in pieces.items()
    }


def _check_shards(shards: Mapping[str, _Shard], folder: Folder) -> tuple[dict[str, str], int]:
    """Read the headers of all shards; return the shard of each tensor and the bytes of all tensors.

    Args:
        folder: the destination.

    Raises:
        FormatError: a shard is missing, or differs from the one that its piece wrote.
    """
    for place in {place.place: place for place in (*(shard.folder for shard in shards.values()), folder)}.values():
        with suppress(OSError):
            place.names()  # listing refreshes the NFS client's directory cache, which can be seconds old

    def header(file: str) -> tuple[list[str], int]:
        return _header_of(file, shards[file], folder)

    if folder.files.remote:
        headers = folder.files.each(header, [*shards])
    else:
        unread = sum(shard.size for file, shard in shards.items() if not shard.is_in(shard.folder, file))
        headers = list(in_order(header, shards, None, unread))
    weight_map = {name: file for file, (names, _) in zip(shards, headers, strict=True) for name in names}
    return weight_map, sum(nbytes for _, nbytes in headers)


def _header_of(file: str, shard: _Shard, folder: Folder) -> tuple[list[str], int]:
    """Check a shard; return its tensor names and the bytes of its tensors."""
    place, record = shard.folder, journal.read(shard.folder, file)
    if record is not None and record["piece"] != shard.piece:
        raise FormatError("another conversion has written the shard since: run its piece again", place.shown(file))
    try:
        weight_file = place.open_shard(file)
    except FileNotFoundError:
        moved = None if place.place == folder.place else journal.read(folder, file)
        if moved is None or moved["piece"] != shard.piece:  # otherwise `finalize` was interrupted
            advice = "run its piece again, on a machine that shares this folder"
            raise FormatError(f"the shard is gone: {advice}", place.shown(file)) from None
        place, record = folder, moved
        weight_file = folder.open_shard(file)
    with closing(weight_file):
        if weight_file.size != shard.size:
            message = f"the shard has {weight_file.size:,} bytes, its piece wrote {shard.size:,}"
            raise FormatError(message, weight_file.path)
        expected = {**(record or {}), "size": shard.size, "sha256": shard.sha256}
        recorded = record is None or record["sha256"] == shard.sha256
        if not recorded or not (shard.is_in(place, file) or place.holds(file, expected)):
            raise FormatError(
                f"the shard is not what its piece wrote: run its piece again (expected SHA-256 {shard.sha256[:16]}...)",
                weight_file.path,
            )
        return [*weight_file.table.names], sum(weight_file.table.sizes())


def _config_of(plan: Plan) -> dict[str, Any] | None:
    """Return the ``config.json`` that a plan describes."""
    if plan.get("config") is None:
        return None
    recipe = field(plan, "config", dict)
    config = field(recipe, "content", dict) if "content" in recipe else config_from(recipe.get("source"))
    target = None if recipe.get("dtype") is None else row_of(field(recipe, "dtype", str))
    return None if config is None else config_with(config, target, restored=bool(recipe.get("restored")))


def _summary(plan: Plan, total: int) -> Summary | None:
    """Return the summary of a plan whose result has ``total`` bytes."""
    if plan.get("quantized") is None:
        return None
    recipe = field(plan, "quantized", dict)
    decisions = {name: decision for piece in plan.pieces for name, decision in decisions_of(piece).items()}
    quantized = {name: decision.scheme for name, decision in decisions.items() if decision.scheme is not None}
    kept = {name: decision.kept for name, decision in decisions.items() if decision.kept is not None}
    return Summary(field(recipe, "before", int), total, quantized, {**kept, **field(recipe, "kept", dict)})
