"""Run the pieces of a conversion to a folder, and complete the folder."""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import NoneType
from typing import Any, NamedTuple

from ...base import url as urls
from ...base.gc_pause import paused
from ...base.selecting import renamed
from ...base.text import plural, show
from ...engine.codes.pieces import in_order
from ...engine.run.digest import Digest
from ...engine.run.progress import Progress
from ...errors import FormatError, public
from ...formats.folder import INDEX, SINGLE
from ...formats.registry import SAFETENSORS
from ...stores.files import Location
from ..folders import journal
from ..folders.destinations import sink_at
from ..folders.shards import ShardWriter, config_text, index_text, open_shard, warn_of_schemes, writer_of
from ..folders.sink import Sink, free_names, indexed_names, shared_identity
from ..quantize.checkpoint import Summary
from ..quantize.engine_layout import restored
from ..sources import executors
from ..sources.catalog import Catalog
from ..sources.executors import Executor, check_path, files_at
from ..sources.plan import DIGITS, INVALID_PIECE, INVALID_PLAN, bare_name, check_version, digest_of
from ..sources.reading import opened
from ..sources.recipes import recipe_from
from .copies import planned_copies
from .decide import casts_of, decisions_of
from .make import Maker
from .write import ConvertReport

# Fields that a piece gets from its plan; its id is a hash of all others.
_OF_PLAN = {"id", "plan", "call", "folder", "file", "storage_options"}


def run_all(
    plan: Mapping[str, Any],
    folder: Sink,
    storage_options: Mapping[str, Any] | None,
    *,
    executor: Executor | None,
    threads: int | None,
    progress: Progress,
) -> ConvertReport:
    """Run all pieces of a plan, each of which puts its shard in place and records it, and complete the folder."""
    pieces = plan["pieces"]
    sizes = [piece["nbytes"] for piece in pieces]
    run = PieceRunner(folder if folder.location.files.remote else None, storage_options)
    with folder.begin():
        try:
            results = executors.run(run, pieces, executor, sizes=sizes, threads=threads, progress=progress)
        except BaseException:
            if not folder.location.files.remote:
                journal.remove_empty(folder, [plan["call"]])
            raise
    return complete(plan, results, folder, storage_options, at_once=True)


def sum_of(plan: Mapping[str, Any]) -> str:
    """Return a hash of what a plan has beside its pieces, which have hashes of their own."""
    return digest_of({key: value for key, value in plan.items() if key not in ("pieces", "sum")})


def _check_piece(piece: Any, prefix: str = INVALID_PIECE) -> None:
    """Refuse a piece that is not what the plan had."""
    check_version(piece, prefix)
    bare_name(piece.get("file"))
    check_path(piece["folder"] if isinstance(piece.get("folder"), str) else "\0")
    if not isinstance(piece.get("plan"), str):
        raise FormatError(f"{prefix}: plan must be a string, got {show(piece.get('plan'))}")
    if digest_of({key: value for key, value in piece.items() if key not in _OF_PLAN}) != piece.get("id"):
        raise FormatError(f"{prefix}: it has changed since it was planned")
    if not (isinstance(piece.get("call"), str) and journal.is_call(piece["call"])):
        raise FormatError(f"{prefix}: call must be {DIGITS} hexadecimal digits, got {show(piece.get('call'))}")
    if not isinstance(piece.get("storage_options"), (dict, NoneType)):
        raise FormatError(f"{prefix}: storage_options must be an object, got {show(piece['storage_options'])}")


def run(
    piece: Mapping[str, Any],
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    folder: Sink | None = None,  # None to derive it from the piece
) -> dict[str, Any]:
    """Write the shard of a piece unless it is complete already; see `run_piece`."""
    started = time.perf_counter()
    _check_piece(piece)
    call, file = piece["call"], piece["file"]
    if folder is None:
        folder = sink_at(piece["folder"], piece.get("storage_options"), storage_options)
    whole = journal.whole(folder, call, file, piece["id"])
    if whole is None:
        if folder.location.files.remote:
            _check_free(piece, folder)
        size, digest, identity = _write(piece, folder, threads, storage_options)
        journal.write(folder, call, file, _record_of(piece, size, digest))
    else:
        record, place, name = whole
        size, digest = record["size"], record["sha256"]
        identity = None if folder.location.files.remote else place.identity(name)
    return {
        "plan": piece["plan"],
        "file": file,
        "nbytes": piece["nbytes"],
        "size": size,
        "sha256": digest,
        "identity": identity,
        "written": whole is None,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _check_free(piece: Mapping[str, Any], folder: Sink) -> None:
    """Refuse to replace a shard of a finished checkpoint, or of another conversion, in a store."""
    file, shown = piece["file"], folder.shown(piece["file"])
    finished = file in indexed_names(folder) or (file == SINGLE and SINGLE in folder.names())
    if finished and journal.read(folder, piece["call"], file) is None:
        raise FileExistsError(errno.EEXIST, "A finished checkpoint has a shard of this name: plan again", shown)
    if any(file in records for call, records in journal.records(folder).items() if call != piece["call"]):
        raise FormatError("another conversion has written the shard: plan again with overwrite=True", shown)


def _record_of(piece: Mapping[str, Any], size: int, digest: str) -> dict[str, Any]:
    return {
        "piece": piece["id"],
        "version": piece["version"],
        "options": piece["options"],
        "sources": versions_of(piece),
        "size": size,
        "sha256": digest,
    }


def versions_of(piece: Mapping[str, Any]) -> list[list[Any]]:
    """Return bare name, size and version of each file of a piece."""
    files = [file for source in piece["sources"] for file in (*source["files"], *source["configs"])]
    files += [file for adapter in piece["adapters"] for file in adapter["files"]]
    return [[urls.shown(path).replace("\\", "/").rpartition("/")[2], *rest[:2]] for path, *rest in files]


class PieceRunner:
    """Calls `run` with the store and the options of this process. Pickling drops secrets, as in a plan."""

    def __init__(self, folder: Sink | None, storage_options: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._storage_options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceRunner, (self._folder, None)  # pieces carry the public options

    def __call__(self, piece: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        return run(piece, threads, self._storage_options, self._folder)


def _writer(
    stack: ExitStack, piece: Mapping[str, Any], threads: int | None, storage_options: Mapping[str, Any] | None
) -> tuple[ShardWriter, int]:
    """Open the sources of a piece; return the writer of its shard and the bytes of its tensors."""
    casts = casts_of(piece)
    if casts is not None:
        catalog = _catalog(stack, piece, [*casts], storage_options)
        copies = planned_copies(catalog, piece, casts, threads)
        if copies is not None:
            return copies.writer(_ignore), copies.nbytes
    decisions = decisions_of(piece["tensors"])
    if casts is None:
        reads = [name for decision in decisions.values() for name in decision.reads]
        catalog = _catalog(stack, piece, [*dict.fromkeys(reads)], storage_options)
    maker = Maker(catalog, decisions, SAFETENSORS, threads=threads)
    outputs = maker.outputs()
    new = renamed(outputs, piece["rename"])
    maker.begin({new[name]: name for name in outputs})
    outputs = {new[name]: output for name, output in outputs.items()}
    total = sum(output.nbytes for output in outputs.values())
    return writer_of(outputs, piece["metadata"], editable=piece["editable"]), total


def _catalog(
    stack: ExitStack, piece: Mapping[str, Any], reads: Sequence[str], storage_options: Mapping[str, Any] | None
) -> Catalog:
    """Open the tensors that a piece reads; ``reads`` has plan order, which numbers the first tensor of each file."""
    recipes = {name: recipe_from(plain) for name, plain in piece["recipes"].items()}
    names = [source for name in reads for source in (recipes[name].sources if name in recipes else (name,))]
    adapters = piece["adapters"]
    if adapters:
        from .merged import reopened, stored_names  # only here: most conversions merge nothing

        stored = stored_names(adapters, names)
        _, (catalog,) = stack.enter_context(opened({**piece, "names": stored}, storage_options))
        catalog = reopened(stack, catalog, adapters, frozenset(names))
    else:
        _, (catalog,) = stack.enter_context(opened({**piece, "names": names}, storage_options))
    return restored(catalog, recipes, reads) if recipes else catalog


def _ignore(nbytes: int) -> None:
    """Report no progress: a piece counts when it is complete."""


def _write(
    piece: Mapping[str, Any], folder: Sink, threads: int | None, storage_options: Mapping[str, Any] | None
) -> tuple[int, str, list[int] | None]:
    """Write a shard; return its size, SHA-256 and identity."""
    file = piece["file"]
    if not folder.location.files.remote:
        folder = journal.subfolder(folder, piece["call"])
    with ExitStack() as stack, Digest() as digest:
        with paused(sum(len(run["names"]) for run in piece["tensors"])):
            writer, total = _writer(stack, piece, threads, storage_options)
        if total != piece["nbytes"]:
            raise FormatError(
                f"the shard was planned with {piece['nbytes']:,} bytes of tensors, but has {total:,}",
                folder.shown(file),
            )
        identity = None
        try:
            with folder.writing(file, writer.size, digest=digest) as shard:
                writer.write_to(shard)
                shard.seal()
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
        >>> safeload.finalize(plan, map(safeload.run_piece, plan["pieces"])).tensors
        30
    """
    check_version(plan, INVALID_PLAN)
    for name in plan["extras"] if isinstance(plan.get("extras"), dict) else ():
        bare_name(name)
    pieces = plan.get("pieces")
    if not isinstance(pieces, (list, tuple)) or sum_of(plan) != plan.get("sum"):
        raise FormatError(f"{INVALID_PLAN}: it has changed since it was made")
    for k, piece in enumerate(pieces):
        _check_piece(piece, f"{INVALID_PLAN}: pieces[{k}]")
    folder = sink_at(plan["folder"], plan["storage_options"], storage_options)
    return complete(plan, results, folder, storage_options)


class _Result(NamedTuple):
    """The result of a piece."""

    file: str
    size: int
    sha256: str
    seconds: float
    identity: list[Any] | None  # see `Sink.identity`


class _Shard(NamedTuple):
    """A complete shard."""

    place: Sink  # the destination, or the subfolder where it waits
    file: str  # its name there
    name: str  # its name in the destination
    waits: bool  # True if it is in the subfolder
    result: _Result


def complete(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    folder: Sink,
    storage_options: Mapping[str, Any] | None,
    *,
    at_once: bool = False,  # True in the call that ran the pieces: trust shards with their reported identity
) -> ConvertReport:
    """Complete a folder like `finalize`."""
    shards = _shards_of(plan, results, folder, at_once=at_once)
    files: dict[str, bytes | Location] = {
        name: Location(files_at(path, planned, storage_options), path)
        for name, (path, planned) in plan["extras"].items()
    }
    names = [shard.name for shard in shards]
    weight_map, total = _headers_of(shards, folder)
    if plan["parameters"] is not None or names != [SINGLE]:
        files[INDEX] = index_text(weight_map, total, plan["parameters"])
    waiting = [(shard.name, shard.place.shown(shard.file)) for shard in shards if shard.waits]
    with folder.begin(overwrite=plan["overwrite"], config=config_text(plan["config"])):
        folder.commit(files, waiting, [shard.name for shard in shards if not shard.waits])
    journal.clear(folder, None if plan["overwrite"] else [plan["call"]])
    warn_of_schemes(folder.location.shown, plan["schemes"])
    done = [shard.result for shard in shards]
    nbytes, seconds = sum(result.size for result in done), sum(result.seconds for result in done)
    shown = folder.location.shown
    paths = [folder.shown(name) for name in names]
    return ConvertReport(
        shown, SAFETENSORS, paths, plan["tensors"], nbytes, seconds, _summary(plan, total), tuple(plan["left_out"])
    )


def _shards_of(
    plan: Mapping[str, Any], results: Iterable[Mapping[str, Any]], folder: Sink, *, at_once: bool
) -> list[_Shard]:
    """Return the shards of a plan, compared with the results of its pieces."""
    by_file = {}
    for plain in results:
        if isinstance(plain, Mapping) and plain.get("plan") == plan["id"]:
            fields = [plain.get(key) for key in _Result._fields]
            kinds: Any = (str, int, str, (int, float), (list, tuple, NoneType))
            if not all(map(isinstance, fields, kinds)):
                raise FormatError(f"invalid result of a piece: {show(dict(plain))}")
            result = _Result._make(fields)
            by_file[result.file] = result
    missing = [piece["file"] for piece in plan["pieces"] if piece["file"] not in by_file]
    if missing:
        count = f"{plural(len(missing), 'piece')} of {len(plan['pieces']):,}"
        raise ValueError(f"no result for {count}, such as {show(missing[0])}: run them first")
    done, remote = [by_file[piece["file"]] for piece in plan["pieces"]], folder.location.files.remote

    def find(result: _Result) -> tuple[Sink, str]:
        return _place_of(plan, result, folder, trusted=at_once)

    nbytes = sum(result.size for result in done)
    places = folder.location.files.each(find, done) if remote else [*in_order(find, done, None, nbytes)]
    waiting = [file for place, file in places if place is not folder]
    placed = {file for place, file in places if place is folder}
    names = free_names(folder, waiting, folder.names() - placed)
    shards = [
        _Shard(place, file, file if file in placed else names[file], file not in placed, result)
        for (place, file), result in zip(places, done, strict=True)
    ]
    if not plan["overwrite"]:
        _check_alone([shard.name for shard in shards], placed, folder)
    return shards


def _check_alone(names: Sequence[str], placed: Collection[str], folder: Sink) -> None:
    """Refuse a folder that another conversion has completed."""
    present = folder.names()
    for name in {INDEX, SINGLE} & present:
        if not (indexed_names(folder) >= {*names} if name == INDEX else name in placed or name not in names):
            raise FileExistsError(errno.EEXIST, "File exists; pass overwrite=True to replace it", folder.shown(name))


def _place_of(plan: Mapping[str, Any], result: _Result, folder: Sink, *, trusted: bool) -> tuple[Sink, str]:
    """Return the place of a shard that has the content of its result."""
    remote, file = folder.location.files.remote, result.file
    record = journal.read(folder, plan["call"], file) if remote else None
    usual = folder if remote else journal.subfolder(folder, plan["call"])
    # A shard that is in the folder already need not come from the subfolder again.
    for place, name in reversed(journal.places(folder, plan["call"], file)):
        known = trusted and result.identity is not None and place.identity(name) == result.identity
        if known or place.holds(name, result.size, result.sha256, None if record is None else record.get("object")):
            return place, name
    if file in usual.names():
        text = f"not what its piece wrote: run its piece again (expected SHA-256 {result.sha256[:16]}...)"
    else:
        text = "gone: run its piece again, on a machine that shares this folder"
    raise FormatError(f"the shard is {text}", usual.shown(file))


def _headers_of(shards: Sequence[_Shard], folder: Sink) -> tuple[dict[str, str], int]:
    """Return the shard of each tensor, and the bytes of all tensors."""

    def header(shard: _Shard) -> tuple[list[str], int]:
        with closing(open_shard(shard.place, shard.file)) as weight_file:
            return weight_file.table.names, weight_file.table.nbytes

    headers = folder.location.files.each(header, shards)
    weight_map: dict[str, str] = {}
    for shard, (names, _) in zip(shards, headers, strict=True):
        weight_map.update(dict.fromkeys(names, shard.name))
    return weight_map, sum(nbytes for _, nbytes in headers)


def _summary(plan: Mapping[str, Any], total: int) -> Summary | None:
    """Return the summary of a plan, given the bytes of its result."""
    if plan["quantized"] is None:
        return None
    decisions = {
        name: decision for piece in plan["pieces"] for name, decision in decisions_of(piece["tensors"]).items()
    }
    quantized = {name: decision.scheme for name, decision in decisions.items() if decision.scheme is not None}
    kept = {name: decision.kept for name, decision in decisions.items() if decision.kept is not None}
    return Summary(plan["quantized"]["before"], total, quantized, {**kept, **plan["quantized"]["kept"]})
