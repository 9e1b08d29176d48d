"""Conversions in pieces: plan a folder with a piece for each shard, run pieces anywhere, and complete the folder.

Plans and pieces are plain data, as JSON has it: no code, no tensors. A piece names its tensors, how each is made, and
their files, with the size of each file and the time of its last change when the plan was made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple
from functools import partial
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

from .._version import __version__
from ..core.atomic_file import Digest, existing_file, hidden_name
from ..core.checkpoint import recipe_of
from ..core.files import Location
from ..core.load import parse_target
from ..core.memory import thread_count
from ..core.registry import SAFETENSORS, OpenRequest, open_file
from ..core.runtime import paused
from ..core.text import plural, printable, show
from ..core.thread_group import in_order
from ..errors import FormatError, UnsupportedError, exported, public
from ..formats.folder import CONFIG, INDEX, RESUME, SINGLE
from ..formats.numbered import PART
from ..models.layout import Layout, StackedTensor
from ..quant.families import presets
from ..remote import url as urls
from . import decide, executors, origin
from .catalog import Catalog, Given, RestructuredCatalog
from .decide import ConvertOptions, ConvertReport, ConvertRequest
from .destinations import Destination, config_text, index_text, sink_at, warn_of_schemes, weight_map
from .executors import INVALID_PIECE, INVALID_PLAN, Executor, TensorFiles, field_of, opened, place_at
from .forms import arranged
from .make import Outputs, decisions_of, outputs_of, planned_adapters, reads_of, reopened, runs_of, stacked
from .origin import digest_of
from .rules import Summary
from .sink import CALL, DIGITS, Sink, find_shard, free_names, indexed_names, shared_identity

if TYPE_CHECKING:
    from typing_extensions import Unpack

# File names with these characters can lead out of the folder of a plan.
_NOT_BARE = frozenset("/\\:\0")
# Fields that a piece gets from its plan; its id is a hash of the remaining fields.
_OF_PLAN = {"id", "plan", "call", "folder", "file", "storage_options"}
# Fields of the result of a piece that complete its plan.
_RESULT: dict[str, Any] = {
    "file": str,
    "size": int,
    "sha256": str,
    "seconds": (int, float),
    "identity": (list, tuple, NoneType),
}


@exported()
class Plan(dict[str, Any]):
    """A conversion divided into pieces, as a dict of plain data: `plan_convert` makes it, `finalize` completes it.

    A plan can be pickled or written as JSON; ``Plan(json.loads(text))`` restores it.

    Example:
        >>> import json, safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> again = safeload.Plan(json.loads(json.dumps(plan)))
        >>> again == plan, again.pieces[0]["file"]
        (True, 'model-00001-of-00005.safetensors')
    """

    @property
    @public
    def pieces(self) -> list[dict[str, Any]]:
        """Arguments for `run_piece`. Pieces can run in any order, on any machine, and more than once."""
        return field_of(self, "pieces", list, "a list", INVALID_PLAN)

    @property
    @public
    def id(self) -> str:
        """A hash of the options, the sources and safeload's version."""
        return field_of(self, "id", str, "a string", INVALID_PLAN)

    def __repr__(self) -> str:
        pieces = plural(len(self.get("pieces", ())), "piece")
        return f"<Plan {show(self.get('folder'))}: {self.get('operation')}, {pieces}>"


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
    with ExitStack() as stack:
        plan, folder, _, _ = _planned(stack, src, decide.request_of(dst, options, overwrite=overwrite, resume=resume))
    shared = folder.location.files.public_options()
    for content in (plan, *plan["pieces"]):
        content["storage_options"] = shared
    plan["sum"] = _sum_of(plan)
    return Plan(plan)


def convert_in_pieces(
    src: Given | Sequence[Given], request: ConvertRequest, executor: Executor | None
) -> ConvertReport:
    """Plan a conversion, run all of its pieces, each of which writes its shard and its record, and complete it."""
    own, record = request.options["storage_options"], None
    with ExitStack() as hashing, ExitStack() as stack:
        plan, folder, shards, stored = _planned(stack, src, request)
        if request.record:
            record = origin.recorder(hashing, shards[0].catalog, request)
        pieces, remote = plan["pieces"], folder.location.files.remote
        if executor is None:
            run = PieceRunner(folder, own, dict(zip([piece["id"] for piece in pieces], shards, strict=True)))
        else:
            stack.close()  # workers open the sources themselves
            run = PieceRunner(folder if remote else None, own)
        with folder.begin():
            try:
                results = executors.run(run, pieces, executor, threads=request.threads, progress=request.progress)
            except BaseException:
                if not remote:
                    folder.remove_empty([plan["call"]])
                raise
        return _complete(plan, results, folder, own, stored, record=record)


def _planned(
    stack: ExitStack, src: Given | Sequence[Given], request: ConvertRequest
) -> tuple[dict[str, Any], Sink, list[Outputs], dict[str, str]]:
    """Return a plan without storage options, its destination, its open shards, and the file of each stored tensor."""
    folder, overwrite, resume = request.folder, request.overwrite, request.resume
    if folder is None:
        raise ValueError(
            f"{show(request.path)} is a file, which is written at once: only folders of shards can be resumed or "
            "written by several processes; pass the path of a folder"
        )
    plain, catalog = origin.plain_options(request), decide.open_sources(stack, src, request)
    sources = [
        [[recipe.files.shown(path).rstrip("/") for path in recipe.paths], recipe.root, recipe.stored]
        for recipe in map(recipe_of, catalog.checkpoints)
    ]
    call = digest_of([__version__, plain, sources])
    if decide.is_restored(catalog, request):
        raise UnsupportedError(
            f"{catalog.title}: the folder of a GGUF model is written at once, without resume= and "
            "executor=; raw=True writes the tensors as they are"
        )
    with paused(len(catalog)):
        outputs = decide.prepare(stack, catalog, request)
        summary = outputs.summary
        shards = outputs.divided(request.limit)
        # Refuses two tensors with the same name.
        stored = weight_map({file: shard.stored for file, shard in shards.items()})
        pieces = _pieces(outputs, shards, request, plain)
        plan_id = digest_of([__version__, plain, [piece["id"] for piece in pieces]])
        for piece in pieces:
            piece.update(plan=plan_id, call=call, folder=folder.place)
        folder.check_free(overwrite=overwrite or resume)
        remote = folder.location.files.remote
        records = folder.records() if resume or remote else {}
        if resume and not overwrite:
            _check_folder(pieces, folder, records)
        if resume:
            _check_not_applied(outputs.catalog, folder, call, records.get(call, {}))
        if remote:
            _choose_names(pieces, folder, records.get(call, {}), overwrite=overwrite)
            files = dict(zip(shards, [piece["file"] for piece in pieces], strict=True))
            stored = {name: files[file] for name, file in stored.items()}
        plan = {
            "safeload_plan": 2,
            "operation": "convert",
            "version": __version__,
            "id": plan_id,
            "call": call,
            "options": plain,
            "folder": folder.place,
            "overwrite": overwrite,
            "storage_options": None,
            "pieces": pieces,
            "tensors": outputs.tensor_count,
            "config": decide.config_for(outputs, folder, request),
            "extras": {  # without secrets
                name: [place.files.public(place.files.absolute(place.path)), place.files.public_options()]
                for name, place in outputs.files.items()
                if isinstance(place, Location)
            },
            "quantized": None if summary is None else [*summary[:1], *summary[3:4], *summary[5:]],
            "schemes": [*outputs.schemes],
            "left_out": [*outputs.left_out],
            "parameters": outputs.parameters,
        }
    return plan, folder, [*shards.values()], stored


def _pieces(
    outputs: Outputs, shards: Mapping[str, Outputs], request: ConvertRequest, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a piece for each shard, without its plan and folder."""
    catalog, reads = outputs.catalog, [reads_of(shard.reads, shard.decided) for shard in shards.values()]
    stored, arranged_from = catalog, None
    if isinstance(catalog, RestructuredCatalog):  # a worker arranges the tensors again
        stored, arranged_from, sources_of = catalog.base, catalog.config, catalog.sources_of
        reads = [[*dict.fromkeys(source for name in names for source in sources_of(name))] for names in reads]
    adapters = planned_adapters(stored)
    position = {name: k for k, name in enumerate(dict.fromkeys(chain.from_iterable(reads)))}
    texts, side = outputs.texts, TensorFiles(stored, [*position], "a conversion in pieces", outputs.spans)
    layout, pieces = request.options["layout"], []
    for (file, shard), names in zip(shards.items(), reads, strict=True):
        content = {
            "operation": "convert",
            "version": __version__,
            "options": options,
            "sources": side.sources([*map(position.__getitem__, names)]),
            "nbytes": shard.nbytes,
            "tensors": runs_of(shard),
            "metadata": None if texts is None else dict(texts),
            "rename": origin.texts_of(request.options["rename"]),
            "adapters": adapters,
            "names": names if stored is not catalog else None,  # of the sources if tensors are arranged or stacked
            "layout": None if layout is None else [astuple(x) for x in layout.tensors if x.name in {*shard.reads}],
            "arranged_from": arranged_from,
            "editable": shard.editable,
        }
        piece = json.loads(json.dumps(content))
        # A shard depends on the sources of its own piece, not on the sources of other pieces.
        pieces.append({**piece, "id": digest_of(piece), "file": file, "storage_options": None})
    return pieces


# ---- the destination ----


# The records of shards by file name, as `Sink.record` returns them.
_Records: TypeAlias = Mapping[str, Mapping[str, Any]]


def _check_folder(pieces: Sequence[dict[str, Any]], folder: Sink, records: Mapping[str, _Records]) -> None:
    """Refuse to continue in a folder with other content, or another conversion; ``records`` are by call."""
    names, first = folder.names(), pieces[0]
    own, complete = records.get(first["call"], {}), bool(names & {INDEX, SINGLE})
    if not names or (own and not complete):
        return
    if own and SINGLE in names and all(piece["file"] != SINGLE for piece in pieces):
        text = f"Other programs load this file instead of {INDEX}: pass overwrite=True to remove it"
        raise existing_file(folder.shown(SINGLE), text)
    earlier = next(filter(None, (own, *records.values())), None)
    if earlier is None:
        what = "complete checkpoint: there is nothing to continue" if complete else "no record of this conversion"
        message = f"The folder has {'a ' if complete else 'other files, and '}{what}; pass overwrite=True to replace it"
        begun = {RESUME, *({piece["file"] for piece in pieces} if folder.location.files.remote else ())}
        if any(name not in begun and hidden_name(name) is None for name in names):
            raise existing_file(folder.location.shown, message)
    elif not complete or any(own.get(piece["file"], {}).get("piece") != piece["id"] for piece in pieces):
        changed = [piece for piece in pieces if earlier.get(piece["file"], {}).get("piece") not in (None, piece["id"])]
        file = changed[0]["file"] if changed else next(iter(earlier))
        versions = [version for piece in changed[:1] for version in versions_of(piece)]
        difference = _difference(earlier[file], first["options"], versions)
        raise ValueError(
            f"resume: {show(folder.shown(file))} was written {difference}; pass overwrite=True to start over"
        )


def _check_not_applied(catalog: Catalog, folder: Sink, call: str, records: _Records) -> None:
    """Refuse to convert the result of an interrupted call, which replaced its own source, once more."""
    read = {file.files.public(file.place) for file in catalog.weight_files}
    for file, record in records.items():
        for name in [name for place, name in folder.places(call, file) if place is folder]:
            path = (Location(folder.location.files, folder.place) / name).path
            if path in read and folder.holds(name, record["size"], record["sha256"], record.get("object")):
                raise ValueError(
                    f"resume: {show(folder.shown(name))} is already the result of this call: "
                    "pass overwrite=True without resume=True to apply it again"
                )


def _difference(record: Mapping[str, Any], options: Mapping[str, Any], sources: Sequence[Sequence[Any]]) -> str:
    """Explain why a call cannot keep a recorded shard: a different version, option or source."""
    if record.get("version") != __version__:
        return f"with safeload {printable(str(record.get('version')))}, but this is {__version__}"
    before = record.get("options")
    before = before if isinstance(before, dict) else {}
    for key in (*options, *before):
        if before.get(key) != options.get(key):
            return printable(f"with {key}={show(before.get(key))}, but this call has {key}={show(options.get(key))}")
    before = record.get("sources")
    before = [source for source in before if isinstance(source, list) and source] if isinstance(before, list) else []
    changed = [source[0] for source in sources if list(source) not in before]
    if changed and changed[0] in [source[0] for source in before]:
        return f"before its source {show(changed[0])} changed"
    return "from other sources, or they have changed since"


def _choose_names(pieces: Sequence[dict[str, Any]], folder: Sink, own: _Records, *, overwrite: bool) -> None:
    """Name the shards in a store as an interrupted call did, or by free names."""
    taken: set[str] = set()
    if own or overwrite:  # or else the folder has only shards of this call
        totals, indexed = {part[3] for file in own if (part := PART.fullmatch(file))}, indexed_names(folder)
        parts = ((name, PART.fullmatch(name)) for name in folder.names())
        taken = {name for name, part in parts if part is None or part[3] not in totals or name in indexed}
    kept = {record["piece"]: file for file, record in own.items()}
    free = free_names(folder, [piece["file"] for piece in pieces if piece["id"] not in kept], taken)
    for piece in pieces:
        piece["file"] = kept.get(piece["id"]) or free[piece["file"]]


# ---- pieces ----


def _sum_of(plan: Mapping[str, Any]) -> str:
    """Return a hash of what a plan has beside its pieces, which have hashes of their own."""
    return digest_of({key: value for key, value in plan.items() if key not in ("pieces", "sum")})


def _check_bare(name: Any) -> None:
    """Refuse a file name that leads out of its folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or not _NOT_BARE.isdisjoint(name):
        raise FormatError(f"{INVALID_PLAN}: files must have bare names, got {show(name)}")
    executors.check_path(name)


def _check_piece(piece: Any, prefix: str = INVALID_PIECE) -> None:
    """Refuse a piece that is not a valid piece of a plan."""
    executors.check_version(piece, prefix)
    _check_bare(piece.get("file"))
    executors.check_path(piece["folder"] if isinstance(piece.get("folder"), str) else "\0")
    field_of(piece, "plan", str, "a string", prefix)
    if digest_of({key: value for key, value in piece.items() if key not in _OF_PLAN}) != piece.get("id"):
        raise FormatError(f"{prefix}: it has changed since it was planned")
    if not (isinstance(piece.get("call"), str) and CALL.fullmatch(piece["call"])):
        raise FormatError(f"{prefix}: call must be {DIGITS} hexadecimal digits, got {show(piece.get('call'))}")
    field_of(piece, "storage_options", (dict, NoneType), "an object", prefix)


def run(
    piece: Mapping[str, Any],
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    folder: Sink | None = None,  # None to derive it from the piece
    outputs: Outputs | None = None,  # the tensors of the shard; None to open its sources
) -> dict[str, Any]:
    """Write the shard of a piece unless it is complete already; see `run_piece`."""
    started = time.perf_counter()
    if outputs is None:
        _check_piece(piece)
    if folder is None:
        folder = sink_at(place_at(piece["folder"], piece.get("storage_options"), storage_options))
    call, file, remote = piece["call"], piece["file"], folder.location.files.remote
    record, whole = folder.record(call, file), None
    if record is not None and record["piece"] == piece["id"]:  # where it waits first: old shards are not hashed for it
        whole = find_shard(folder.places(call, file), record)
    if record is not None and whole is not None:
        identity = None if remote else whole[0].identity(whole[1])
    else:
        if remote:  # a shard of a finished checkpoint, or of another conversion, stays
            shown = folder.shown(file)
            finished = file in indexed_names(folder) or (file == SINGLE and SINGLE in folder.names())
            if finished and record is None:
                raise existing_file(shown, "A finished checkpoint has a shard of this name: plan again")
            if any(file in records for other, records in folder.records().items() if other != call):
                raise FormatError("another conversion has written the shard: plan again with overwrite=True", shown)
        place, identity = folder if remote else folder.waiting(call), None
        with ExitStack() as stack, Digest() as digest:
            with paused(sum(len(each["names"]) for each in piece["tensors"])):
                if outputs is None:
                    outputs = _outputs_of(stack, piece, threads, storage_options)
                writer = outputs.writer(lambda nbytes: None)  # a piece counts when it is complete
            if outputs.nbytes != piece["nbytes"]:
                raise FormatError(
                    f"the shard was planned with {piece['nbytes']:,} bytes of tensors, but has {outputs.nbytes:,}",
                    place.shown(file),
                )
            try:
                with place.writing(file, writer.size, digest=digest) as shard:
                    writer.write_to(shard)
                    shard.seal()
                identity = None if remote else shared_identity(shard.identity)
            except PermissionError:  # Windows: another process that runs this piece is reading the shard it just wrote
                if remote or not place.holds(file, writer.size, digest.hexdigest()):
                    raise
            record = {"piece": piece["id"], "version": piece["version"], "options": piece["options"]}
            record |= {"sources": versions_of(piece), "size": writer.size, "sha256": digest.hexdigest()}
        folder.write_record(call, file, record)
    return {
        **{key: piece[key] for key in ("plan", "file", "nbytes")},
        **{key: record[key] for key in ("size", "sha256")},
        "identity": identity,
        "written": whole is None,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _outputs_of(
    stack: ExitStack, piece: Mapping[str, Any], threads: int | None, storage_options: Mapping[str, Any] | None
) -> Outputs:
    """Open the sources of a piece, and return the tensors of its shard."""
    decisions, adapters = decisions_of(piece["tensors"]), piece["adapters"]
    names = piece["names"] or reads_of([*decisions], [*decisions.values()])
    heads = {head: embedding for adapter in adapters for head, embedding in adapter["untied"].items()}
    stored = [heads.get(name, name) for name in names] if heads else names  # a tied head is stored as its embedding
    _, (catalog,) = stack.enter_context(opened({**piece, "names": stored}, storage_options))
    if adapters:
        untied = {name: heads[name] for name in names if name in heads and heads[name] in catalog}
        catalog = reopened(stack, catalog, adapters, untied)
    if piece["layout"] is not None:
        layout, target = Layout("", [StackedTensor(*x) for x in piece["layout"]]), piece["options"].get("dtype")
        catalog = stacked(catalog, catalog.descriptions(names), layout, parse_target(target))
    elif piece["arranged_from"] is not None:
        catalog.config = piece["arranged_from"]
        catalog = arranged(catalog, presets()[piece["options"]["quantize"]], results=decisions)
    outputs = outputs_of(catalog, decisions, SAFETENSORS, rename=piece["rename"], threads=threads)
    return outputs._replace(metadata=piece["metadata"] or {}, editable=piece["editable"])


def versions_of(piece: Mapping[str, Any]) -> list[list[Any]]:
    """Return bare name, size and version of each file of a piece."""
    files = [file for source in piece["sources"] for file in (*source["files"], *source["configs"])]
    files += [file for adapter in piece["adapters"] for file in adapter["files"]]
    return [[urls.shown(path).replace("\\", "/").rpartition("/")[2], *rest[:2]] for path, *rest in files]


class PieceRunner:
    """Calls `run` with the store and the options of this process. Pickling drops secrets, as in a plan."""

    def __init__(
        self,
        folder: Sink | None,
        storage_options: Mapping[str, Any] | None,
        shards: Mapping[str, Outputs] | None = None,  # by the ids of pieces, while their sources are open
    ) -> None:
        self._folder, self._storage_options, self._shards = folder, storage_options, shards or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceRunner, (self._folder, None)  # pieces carry the public options

    def __call__(self, piece: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        return run(piece, threads, self._storage_options, self._folder, self._shards.get(piece["id"]))


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
    executors.check_version(plan, INVALID_PLAN)
    for name in plan["extras"] if isinstance(plan.get("extras"), dict) else ():
        _check_bare(name)
    pieces = plan.get("pieces")
    if not isinstance(pieces, (list, tuple)) or _sum_of(plan) != plan.get("sum"):
        raise FormatError(f"{INVALID_PLAN}: it has changed since it was made")
    for k, piece in enumerate(pieces):
        _check_piece(piece, f"{INVALID_PLAN}: pieces[{k}]")
    folder = sink_at(place_at(plan["folder"], plan["storage_options"], storage_options))
    return _complete(plan, results, folder, storage_options)


def _complete(
    plan: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    folder: Sink,
    storage_options: Mapping[str, Any] | None,
    planned: Mapping[str, str] | None = None,  # in the call that ran the pieces: the shard of each stored tensor
    *,
    record: origin.Record | None = None,
) -> ConvertReport:
    """Complete a folder like `finalize`. The call that ran the pieces trusts shards with their reported identity."""
    results = [result for result in results if isinstance(result, Mapping) and result.get("plan") == plan["id"]]
    for result in results:
        if not all(isinstance(result.get(key), kinds) for key, kinds in _RESULT.items()):
            raise FormatError(f"invalid result of a piece: {show(dict(result))}")
    by_file, expected = {result["file"]: result for result in results}, [piece["file"] for piece in plan["pieces"]]
    missing = [file for file in expected if file not in by_file]
    if missing:
        count = f"{plural(len(missing), 'piece')} of {len(expected):,}"
        raise ValueError(f"no result for {count}, such as {show(missing[0])}: run them first")
    done, find = [by_file[file] for file in expected], partial(_place_of, plan, folder, planned is not None)
    size, each = sum(result["size"] for result in done), folder.location.files.each
    shards = each(find, done) if folder.location.files.remote else [*in_order(find, done, thread_count(size, None))]
    placed = {file for place, file in shards if place is folder}
    free = free_names(folder, [file for place, file in shards if place is not folder], folder.names() - placed)
    names = [file if place is folder else free[file] for place, file in shards]
    for name in () if plan["overwrite"] else {INDEX, SINGLE} & folder.names():  # of another conversion
        if not (indexed_names(folder) >= {*names} if name == INDEX else name in placed or name not in names):
            raise existing_file(folder.shown(name))
    if planned is None:
        stored = {
            tensor: name for name, tensors in zip(names, each(_names_in, shards), strict=True) for tensor in tensors
        }
    else:
        name_of = dict(zip(expected, names, strict=True))
        stored = {tensor: name_of[file] for tensor, file in planned.items()}
    files: dict[str, bytes | Location] = {
        name: place_at(path, public, storage_options) for name, (path, public) in plan["extras"].items()
    }
    if plan["config"] is not None:
        files[CONFIG] = config_text(plan["config"])
    total = sum(piece["nbytes"] for piece in plan["pieces"])
    if plan["parameters"] is not None or names != [SINGLE]:
        files[INDEX] = index_text(stored, total, plan["parameters"])
    moves = zip(names, shards, strict=True)
    waiting = [(name, place.shown(file)) for name, (place, file) in moves if place is not folder]
    if record is not None:
        contents = [{key: result[key] for key in ("size", "sha256")} for result in done]
        files = origin.with_record(record, files, dict(zip(names, contents, strict=True)))
    with folder.begin(overwrite=plan["overwrite"], config=files.get(CONFIG)):
        folder.commit(files, waiting, placed)
    folder.clear_records(None if plan["overwrite"] else [plan["call"]])
    shown, paths = folder.location.shown, [folder.shown(name) for name in names]
    warn_of_schemes(shown, plan["schemes"])
    summary = None
    if plan["quantized"] is not None:
        before, kept, codes, rule = plan["quantized"]
        decisions = decisions_of(chain.from_iterable(piece["tensors"] for piece in plan["pieces"]))
        schemes = {
            name: each.scheme for name, each in decisions.items() if each.scheme is not None and name not in kept
        }
        summary = Summary(before, total, schemes, kept, codes=codes, rule=rule)
    seconds, left_out = sum(result["seconds"] for result in done), tuple(plan["left_out"])
    return ConvertReport(shown, SAFETENSORS, paths, plan["tensors"], size, seconds, summary, left_out)


def _names_in(shard: tuple[Sink, str]) -> list[str]:
    location = shard[0].location / shard[1]
    with closing(open_file(location.path, OpenRequest((SAFETENSORS,), files=location.files)).file) as weight_file:
        return weight_file.table.names


def _place_of(plan: Mapping[str, Any], folder: Sink, trusted: bool, result: Mapping[str, Any]) -> tuple[Sink, str]:
    """Return the place of a shard that has the content of its result."""
    call, file, remote = plan["call"], result["file"], folder.location.files.remote
    record = folder.record(call, file) if remote else None
    content = {**result, "object": None if record is None else record.get("object")}
    # A shard that is in the folder already need not come from the subfolder again.
    place = find_shard(reversed(folder.places(call, file)), content, result["identity"] if trusted else None)
    if place is not None:
        return place
    usual = folder if remote else folder.waiting(call)
    if file in usual.names():
        text = f"not what its piece wrote: run its piece again (expected SHA-256 {result['sha256'][:16]}...)"
    else:
        text = "gone: run its piece again, on a machine that shares this folder"
    raise FormatError(f"the shard is {text}", usual.shown(file))
