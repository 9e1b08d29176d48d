"""Does the pieces of a conversion to a folder, and completes the folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from ..base.selecting import renamed
from ..base.text import plural, show
from ..engine.atomic_file import leftovers
from ..engine.digest import Digest
from ..errors import FormatError
from ..formats.folder import CONFIG, INDEX
from ..formats.safetensors.file import open_file
from . import journal
from .convert_report import ConvertReport
from .decisions import decisions_of, row_of
from .making import Maker
from .plan import Plan, bare_name, check_version, field
from .quantize_checkpoint import Summary
from .shards import Beside, config_with, write_beside, write_shard
from .sources import config_from, location_of, opened


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes a shard, or finds that it is whole; see `run_piece`."""
    check_version(piece)
    started = time.perf_counter()
    plan = field(piece, "plan", str)
    folder, file = field(piece, "folder", str), bare_name(field(piece, "file", str))
    path, nbytes = os.path.join(folder, file), field(piece, "nbytes", int)
    record = journal.is_whole(path, piece)
    target = os.path.dirname(folder)
    if record is None and folder == journal.aside(target, plan):  # `finalize` may have moved it
        record = journal.is_whole(os.path.join(target, file), piece)
    if record is None:
        size, digest = _write(piece, path, threads, storage_options)
        journal.write(path, piece, size, digest)
    else:
        size, digest = record["size"], record["sha256"]
    seconds = time.perf_counter() - started
    return {
        "plan": plan,
        "file": file,
        "nbytes": nbytes,
        "size": size,
        "sha256": digest,
        "written": record is None,
        "seconds": round(seconds, 3),
    }


def _write(
    piece: Mapping[str, Any], path: str, threads: int | None, storage_options: Mapping[str, Any] | None
) -> tuple[int, str]:
    decisions = decisions_of(piece)
    names = [name for one in decisions.values() for name in one.sources]
    with ExitStack() as stack, Digest() as digest:
        catalog = stack.enter_context(opened(field(piece, "sources", list), names, storage_options))
        outputs = Maker(catalog, decisions, "safetensors", threads).outputs()
        new = renamed(outputs, _pairs(piece))
        outputs = {new[name]: output for name, output in outputs.items()}
        total = sum(output.nbytes for output in outputs.values())
        if total != piece["nbytes"]:
            raise FormatError(
                f"the shard was planned with {piece['nbytes']:,} bytes of tensors, and has {total:,}", path
            )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        size = -1
        try:
            with ExitStack() as written:
                size = write_shard(written, outputs, _metadata(piece), path, overwrite=True, digest=digest)
        except PermissionError:  # Windows: a process that does the same piece reads the shard that it has just written
            if not journal.has(path, size, digest.hexdigest()):
                raise
        return size, digest.hexdigest()


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
    plan = Plan(plan)
    check_version(plan)
    places = {field(piece, "file", str): field(piece, "folder", str) for piece in plan.pieces}
    done = {field(one, "file", str): one for one in results if isinstance(one, Mapping) and one.get("plan") == plan.id}
    left = [file for file in places if file not in done]
    if left:
        raise ValueError(f"{plural(len(left), 'piece')} of {len(places):,} without a result: {show(left[0])}")
    sizes = {file: field(done[file], "size", int) for file in places}
    seconds = sum(field(done[file], "seconds", float) for file in places)
    folder, tensors = field(plan, "folder", str), field(plan, "tensors", int)
    config, extras = _config_of(plan), field(plan, "extras", dict)
    extras = {bare_name(name): location_of(plain, storage_options) for name, plain in extras.items()}
    files, total = _stored(plan.id, places, folder, sizes)
    summary, aside = _summary(plan, total), journal.aside(folder, plan.id)
    with ExitStack() as stack:
        # First, as it may fail: an existing checkpoint is then still whole.
        write_beside(stack, Beside(files, total, config, extras), folder, overwrite=True)
        for file, place in places.items():
            for source in {place, aside} - {folder}:  # also what it left there when it was interrupted
                journal.move(file, source, folder)
    _tidy(folder, aside, [*places, INDEX, CONFIG, *extras])
    shards = [os.path.join(folder, file) for file in places]
    return ConvertReport(folder, "safetensors", shards, tensors, sum(sizes.values()), seconds, summary)


def _stored(plan: str, places: Mapping[str, str], folder: str, sizes: Mapping[str, int]) -> tuple[dict[str, str], int]:
    """The file of each tensor, and the bytes of all, read off the headers of the shards.

    Raises:
        FormatError: a shard is not there, or not as its piece has left it.
    """
    for place in {*places.values(), folder}:
        with suppress(OSError):
            os.listdir(place)  # on NFS: what this machine remembers of the folder may be seconds old
    files: dict[str, str] = {}
    total = 0
    for file, place in places.items():
        path = os.path.join(place, bare_name(file))
        record = journal.read(path)
        if not os.path.exists(path):
            moved = os.path.join(folder, file)
            record = journal.read(moved)
            if record is not None and record["plan"] == plan:  # `finalize` was interrupted
                path = moved
        elif record is not None and record["plan"] != plan:
            raise FormatError("another conversion has written the shard since: run its piece again", path)
        try:
            shard = open_file(path, brief=True)
        except FileNotFoundError:
            raise FormatError(
                "the shard is gone: run its piece again, on a machine that shares this folder", path
            ) from None
        try:
            if shard.size != sizes[file]:
                raise FormatError(f"the shard has {shard.size:,} bytes, its piece wrote {sizes[file]:,}", path)
            files.update(dict.fromkeys(shard.table.names, file))
            total += sum(shard.table.sizes())
        finally:
            shard.close()
    return files, total


def _tidy(folder: str, aside: str, files: Sequence[str]) -> None:
    """Removes what killed processes have left of these files, and the folder that they were written in before."""
    with suppress(OSError):  # another process has removed it, or Windows has it open
        for place in (folder, aside):
            for path in leftovers(place, [*files, *(file + journal.SUFFIX for file in files)]):
                os.unlink(path)
        os.rmdir(aside)


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
