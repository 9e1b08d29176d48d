"""Does the pieces of a conversion to a folder, and completes the folder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from ...base.selecting import renamed
from ...base.text import plural, show
from ...engine.codes.pieces import in_order
from ...engine.run.digest import Digest
from ...errors import FormatError
from ...formats.folder import CONFIG, INDEX
from ..folders import journal, unfinished
from ..folders.destinations import of_piece
from ..folders.shard_folder import Folder, shared_identity
from ..folders.shards import Beside, config_with, write_beside, write_shard, writer_of
from ..quantize.checkpoint import Summary
from ..sources.plan import Plan, bare_name, check_version, field, texts
from ..sources.sources import config_from, location_of, opened
from .convert_report import ConvertReport
from .decisions import decisions_of, row_of
from .making import Maker


def run(
    piece: Mapping[str, Any],
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    folder: Folder | None = None,
) -> dict[str, Any]:
    """Writes a shard, or finds that it is whole; see `run_piece`.

    Args:
        piece: of a plan.
        threads: for reading and converting; None: chosen automatically.
        storage_options: of this process.
        folder: the piece's, where it is at hand.
    """
    check_version(piece)
    started = time.perf_counter()
    field(piece, "id", str)
    plan, file, nbytes = field(piece, "plan", str), bare_name(field(piece, "file", str)), field(piece, "nbytes", int)
    folder = of_piece(piece, storage_options) if folder is None else folder
    found = (journal.is_whole(place, file, piece) for place in folder.places(plan))  # `finalize` may have moved it
    identity = next((known for place in folder.places(plan) if (known := place.identity(file)) is not None), None)
    record = next((one for one in found if one is not None), None)
    if record is None and piece.get("continued"):
        message = "the shard is not what its record says, and the conversion has replaced its sources: restore them"
        raise FormatError(message, folder.shown(file))
    if record is None:
        size, digest, identity = _write(piece, folder, file, threads, storage_options)
        journal.write(folder, file, piece, size, digest)
    else:
        size, digest = record["size"], record["sha256"]
    seconds = time.perf_counter() - started
    return {
        "plan": plan,
        "file": file,
        "nbytes": nbytes,
        "size": size,
        "sha256": digest,
        "identity": identity,
        "written": record is None,
        "seconds": round(seconds, 3),
    }


class PieceRunner:
    """`run` with the store and the options of this process. A pickle leaves out the secrets, as a plan does.

    Args:
        folder: the destination.
        storage_options: for sources behind URLs.
    """

    def __init__(self, folder: Folder, storage_options: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._storage_options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceRunner, (self._folder, None)  # pieces have the public ones

    def folder_of(self, piece: Mapping[str, Any]) -> Folder:
        """The folder of a piece."""
        return self._folder if self._folder.files.remote else of_piece(piece)

    def __call__(self, piece: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        """Does a piece."""
        return run(piece, threads, self._storage_options, self.folder_of(piece))


def _write(
    piece: Mapping[str, Any],
    folder: Folder,
    file: str,
    threads: int | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[int, str, list[int] | None]:
    decisions = decisions_of(piece)
    names = [name for one in decisions.values() for name in one.sources]
    with ExitStack() as stack, Digest() as digest:
        stored = names
        if piece.get("adapters") is not None:
            from .merged import reopened, stored_names  # only here: most conversions merge nothing

            stored = stored_names(piece["adapters"], names)
        catalog = stack.enter_context(opened(field(piece, "sources", list), stored, storage_options))
        if piece.get("adapters") is not None:
            catalog = reopened(stack, catalog, piece["adapters"], frozenset(names))
        outputs = Maker(catalog, decisions, "safetensors", threads).outputs()
        new = renamed(outputs, _pairs(piece))
        outputs = {new[name]: output for name, output in outputs.items()}
        total = sum(output.nbytes for output in outputs.values())
        if total != piece["nbytes"]:
            raise FormatError(
                f"the shard was planned with {piece['nbytes']:,} bytes of tensors, and has {total:,}",
                folder.shown(file),
            )
        writer, identity = writer_of(outputs, _metadata(piece)), None
        try:
            with ExitStack() as written:
                shard = write_shard(written, writer, folder, file, overwrite=True, digest=digest)
            identity = None if folder.files.remote else shared_identity(shard.identity)
        except PermissionError:  # Windows: a process that does the same piece reads the shard that it has just written
            if folder.files.remote or not folder.holds(file, {"size": writer.size, "sha256": digest.hexdigest()}):
                raise
        return writer.size, digest.hexdigest(), identity


def _pairs(piece: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of ``rename``."""
    given = field(piece, "rename", list) if "rename" in piece else []
    for pair in given:
        if not isinstance(pair, (list, tuple)) or [type(text) for text in pair] != [str, str]:
            raise FormatError(f"a piece of a plan renames by pairs of text, found {show(pair)}")
    return [tuple(pair) for pair in given]


def _metadata(piece: Mapping[str, Any]) -> dict[str, str] | None:
    """The metadata of a shard."""
    if "metadata" not in piece:
        return None
    found = field(piece, "metadata", dict)
    return {key: field(found, key, str) for key in found}


def finalize(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Completes the folder of a conversion whose pieces are all done: its config, other files, and last its index.

    Before it writes anything it reads all local shards, on several threads, and compares their SHA-256 with the
    results. Objects in a store whose version is still the one that their piece uploaded are not read.

    Args:
        plan: made by `plan_convert`; or a dict of the same content.
        results: what `run_piece` has returned for each piece, in any order; duplicates do no harm.
        storage_options: for URLs: options that the plan cannot carry, such as keys.

    Returns:
        What was written; ``seconds`` is the time of all pieces together.

    Raises:
        ValueError: a piece has no result.
        FormatError: a shard is not there, or not as its piece has left it; or these are not a plan and its results.
        UnsupportedError: another version of safeload has made the plan.
        OSError: a file cannot be written.

    Example:
        >>> import safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> safeload.finalize(plan, map(safeload.run_piece, plan.pieces)).tensors
        30
    """
    if not isinstance(plan, Mapping):
        raise FormatError(f"a plan is an object; found {show(plan)}")
    return complete(plan, results, of_piece(plan, storage_options), storage_options)


def complete(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    folder: Folder,
    storage_options: Mapping[str, Any] | None,
    *,
    at_once: bool = False,
) -> ConvertReport:
    """`finalize` for a folder that is at hand.

    Args:
        plan: see `finalize`.
        results: see `finalize`.
        folder: of the plan.
        storage_options: see `finalize`.
        at_once: the call that ran the pieces is still running: shards whose identity their piece reported are not read
            again.
    """
    plan = Plan(plan)
    check_version(plan)
    runner = PieceRunner(folder, None)
    places = {bare_name(field(piece, "file", str)): runner.folder_of(piece) for piece in plan.pieces}
    ids = {field(piece, "file", str): field(piece, "id", str) for piece in plan.pieces}
    done = {field(one, "file", str): one for one in results if isinstance(one, Mapping) and one.get("plan") == plan.id}
    left = [file for file in places if file not in done]
    if left:
        raise ValueError(f"{plural(len(left), 'piece')} of {len(places):,} without a result: {show(left[0])}")
    sizes = {file: field(done[file], "size", int) for file in places}
    digests = {file: field(done[file], "sha256", str) for file in places}
    seconds = sum(field(done[file], "seconds", float) for file in places)
    tensors = field(plan, "tensors", int)
    config, extras = _config_of(plan), field(plan, "extras", dict)
    extras = {bare_name(name): location_of(plain, storage_options) for name, plain in extras.items()}
    outdated = [bare_name(name) for name in texts(plan, "outdated")] if "outdated" in plan else []
    known = {file: done[file].get("identity") for file in places} if at_once else {}
    files, total = _stored(ids, places, folder, sizes, digests, known)
    summary = _summary(plan, total)
    waiting = any(place.place != folder.place for place in places.values())
    with ExitStack() as stack, ExitStack() as first:
        # First, as it may fail: an existing checkpoint is then still whole.
        write_beside(
            stack, Beside(files, total, config, extras), folder, overwrite=True, outdated=outdated, extras=first
        )
        first.close()
        if waiting or "in_place" in plan:
            unfinished.note(folder, plan, config)
        for file, source, target in folder.moves(plan.id, places):
            journal.move(file, source, target)
    names = [*places, INDEX, CONFIG, *extras]
    waited = [*places.values(), *journal.superseded(folder, plan)]
    folder.tidy(plan.id, [*names, *(file + journal.SUFFIX for file in names)], waited)
    if waiting or outdated or "in_place" in plan or not folder.files.remote:
        unfinished.forget(folder)  # last: without it the same call may refuse to continue
    shards = [folder.shown(file) for file in places]
    return ConvertReport(folder.title, "safetensors", shards, tensors, sum(sizes.values()), seconds, summary)


def _stored(
    ids: Mapping[str, str],
    places: Mapping[str, Folder],
    folder: Folder,
    sizes: Mapping[str, int],
    digests: Mapping[str, str],
    known: Mapping[str, Any],
) -> tuple[dict[str, str], int]:
    """The file of each tensor, and the bytes of all, read off the headers of the shards.

    Args:
        ids: of the piece of each shard.
        places: the folder of each shard.
        folder: the destination.
        sizes: bytes of each shard, as its piece wrote it.
        digests: SHA-256 of each shard, as its piece wrote it.
        known: identities of shards that need not be read again; see `Folder.identity`.

    Raises:
        FormatError: a shard is not there, or not as its piece has left it.
    """
    for place in {place.place: place for place in [*places.values(), folder]}.values():
        with suppress(OSError):
            place.names()  # on NFS: what this machine remembers of the folder may be seconds old

    def header(file: str) -> tuple[list[str], int]:
        place = places[file]
        record = journal.read(place, file)
        if record is not None and record["piece"] != ids[file]:
            raise FormatError("another conversion has written the shard since: run its piece again", place.shown(file))
        try:
            shard = place.open_shard(file)
        except FileNotFoundError:
            moved = None if place.place == folder.place else journal.read(folder, file)
            if moved is None or moved["piece"] != ids[file]:  # else `finalize` was interrupted
                advice = "run its piece again, on a machine that shares this folder"
                raise FormatError(f"the shard is gone: {advice}", place.shown(file)) from None
            place, record = folder, moved
            shard = folder.open_shard(file)
        try:
            if shard.size != sizes[file]:
                raise FormatError(f"the shard has {shard.size:,} bytes, its piece wrote {sizes[file]:,}", shard.path)
            seen = {**(record or {}), "size": sizes[file], "sha256": digests[file]}
            same = record is None or record["sha256"] == digests[file]
            if not same or not (is_known(place, file) or place.holds(file, seen)):
                expected = f"expected SHA-256 {digests[file][:16]}..."
                raise FormatError(
                    f"the shard is not what its piece wrote: run its piece again ({expected})", shard.path
                )
            return [*shard.table.names], sum(shard.table.sizes())
        finally:
            shard.close()

    def is_known(place: Folder, file: str) -> bool:
        return known.get(file) is not None and place.identity(file) == known[file]

    if folder.files.remote:
        headers = folder.files.each(header, [*places])
    else:
        unread = sum(sizes[file] for file, place in places.items() if not is_known(place, file))
        headers = list(in_order(header, places, None, unread))
    found = dict(zip(places, headers, strict=True))
    return {name: file for file, (names, _) in found.items() for name in names}, sum(size for _, size in found.values())


def _config_of(plan: Plan) -> dict[str, Any] | None:
    if plan.get("config") is None:
        return None
    said = field(plan, "config", dict)
    config = field(said, "content", dict) if "content" in said else config_from(said.get("source"))
    target = None if said.get("dtype") is None else row_of(field(said, "dtype", str))
    return None if config is None else config_with(config, target, restored=bool(said.get("restored")))


def _summary(plan: Plan, total: int) -> Summary | None:
    if plan.get("quantized") is None:
        return None
    said = field(plan, "quantized", dict)
    decisions = {name: one for piece in plan.pieces for name, one in decisions_of(piece).items()}
    quantized = {name: one.scheme for name, one in decisions.items() if one.scheme is not None}
    kept = {name: one.kept for name, one in decisions.items() if one.kept is not None}
    return Summary(field(said, "before", int), total, quantized, {**kept, **field(said, "kept", dict)})
