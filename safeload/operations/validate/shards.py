"""Find all missing and damaged shards of a folder that does not open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ...base import hub_cache
from ...base.missing_path import dangling
from ...base.text import clip, plural, printable, show
from ...errors import (
    ForbiddenError,
    LimitError,
    MissingShardError,
    SafeloadError,
    UnsupportedError,
    one_line,
)
from ...formats.folder import CONFIG, RESUME, ExpectedShards, choose_whole, listed_shards, read_config
from ...formats.numbered import MOST_MISSING, PART, STEMS, NumberedFiles, sets_of
from ...formats.registry import WEIGHT_SUFFIXES, OpenRequest, open_file
from ...stores.files import Files, Location
from .findings import Finding, find

# Rules about unreadable files, by error class.
_REFUSALS = (
    (MissingShardError, "index.shard:opening"),
    (ForbiddenError, "file.forbidden"),
    (UnsupportedError, "file.unsupported"),
    (LimitError, "file.limit"),
    (SafeloadError, "file.format"),
)

# The advice lists at most this many files, each with at most this many characters.
_LISTED, _NAME_LENGTH = 20, 100


def refusal(problem: SafeloadError | OSError) -> Finding:
    """Return the finding for an error that opening raised."""
    if isinstance(problem, OSError):
        return find("file.read", problem=one_line(problem))
    return find(next(rule for kind, rule in _REFUSALS if isinstance(problem, kind)), problem=problem)


class CheckedShard(NamedTuple):
    """The check of a single shard."""

    name: str
    fault: Finding | None
    nbytes: int = 0  # bytes of its tensors
    missing: bool = False
    opens: bool = False  # its tensors can be checked


class ShardCheck(NamedTuple):
    """The checks of all shards of a folder."""

    faults: list[Finding]
    good: list[Location]
    advice: list[Finding]  # a note that lists the files to fetch again
    config: Mapping[str, Any] | None

    @classmethod
    def of(cls, path: str, files: Files, opening: Mapping[str, Any]) -> ShardCheck | None:
        """Check each shard that a path needs; return None if it does not need several files."""
        index: list[CheckedShard] = []
        try:
            expected = expected_shards(path, files)
        except (SafeloadError, OSError) as problem:
            name = files.split(str(getattr(problem, "path", None) or path))[1]
            index = [CheckedShard(name, refusal(problem))]
            try:
                expected = expected_shards(path, files, indexed=False)
            except (SafeloadError, OSError):  # the error of opening says it
                return None
        if expected is None:
            return None
        faults: list[Finding] = []
        config, broken_config = None, False
        try:
            config = read_config(expected.folder, files)
        except (SafeloadError, OSError) as problem:
            broken_config = True
            faults.append(refusal(problem))
        inert = opening.get("unknown_globals") == "inert"
        request = OpenRequest(None, opening.get("root"), inert, files)
        shards = [*index, *files.each(lambda name: _check_shard(name, expected, request), sorted(expected.names))]
        faults += [shard.fault for shard in shards if shard.fault is not None]
        good = [Location(files, files.join(expected.folder, shard.name)) for shard in shards if shard.opens]
        advice = list(_advice(shards, expected, broken_config, _is_unfinished(expected.folder, files)))
        return cls(faults, good, advice, config)


def _is_unfinished(folder: str, files: Files) -> bool:
    """True if a folder has the records of a conversion that did not end."""
    try:
        return files.is_folder(files.join(folder, RESUME))
    except (SafeloadError, OSError):  # https lists no folders
        return False


def _check_shard(name: str, expected: ExpectedShards, request: OpenRequest) -> CheckedShard:
    """Open a shard, and compare its tensors with the index."""
    files = request.files
    try:
        opened = open_file(files.join(expected.folder, name), request)
    except FileNotFoundError as problem:
        listed = f", but {expected.listed_in} lists it" if expected.listed_in is not None else ""
        subject = f"{show(name)[1:-1]}{link}," if (link := dangling(problem.filename)) else show(name)[1:-1]
        return CheckedShard(name, find("index.shard", name=subject, listed=listed), missing=True)
    except (SafeloadError, OSError) as problem:
        return CheckedShard(name, refusal(problem))
    with ExitStack() as stack:
        for file in opened.files:
            stack.callback(file.close)
        tables = [file.table for file in opened.files]
        nbytes = sum(table.nbytes for table in tables)
        absent = [tensor for tensor in expected.names[name] if all(table.find(tensor) < 0 for table in tables)]
    if not absent:
        return CheckedShard(name, None, nbytes, opens=True)
    listed = f"{plural(len(expected.names[name]), 'tensor')} that {expected.listed_in} lists"
    first = show(min(absent))
    fault = find("index.tensor", name=show(name)[1:-1], absent=len(absent), listed=listed, first=first)
    return CheckedShard(name, fault, nbytes, opens=True)


def _advice(
    shards: Sequence[CheckedShard], expected: ExpectedShards, broken_config: bool, unfinished: bool
) -> Iterator[Finding]:
    """Yield the note that lists the files to fetch again, or says to resume a conversion."""
    bad = [shard for shard in shards if shard.fault is not None]
    if not bad:
        return
    names = [shard.name for shard in bad] + ([CONFIG] if broken_config else [])
    listed = ", ".join(clip(printable(name), _NAME_LENGTH) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    message = f"{len(bad):,} of {plural(len(shards), 'shard')} {'is' if len(bad) == 1 else 'are'} missing or damaged"
    if expected.total_size is not None and all(shard.missing for shard in bad):
        absent = expected.total_size - sum(shard.nbytes for shard in shards)
        message += f" ({absent:,} bytes)" if absent > 0 else ""
    if unfinished:
        advice = "this is an unfinished conversion: repeat it with resume=True"
    else:
        advice = f"fetch again: {listed}{more}"
    yield find("index.fetch", problem=message, advice=advice)


def expected_shards(path: str, files: Files, *, indexed: bool = True) -> ExpectedShards | None:
    """List the shards that a folder, an ``index.json`` or a part of a GGUF file needs; None if it is a single file."""
    path = path if files.remote else hub_cache.snapshot_of(path) or path
    folder, base = files.split(path)
    numbered: NumberedFiles | None
    if base.endswith(".json"):
        if indexed:
            return listed_shards(folder, base, files)
        path = folder
    if files.is_folder(path):
        names = [name for name, is_folder in files.listing(path) if not is_folder]
        names = [name for name in names if indexed or not name.endswith(".json")]
        try:
            chosen = choose_whole(names, path, [*STEMS], Location(files, path)) or choose_whole(names, path, [*STEMS])
            chosen = chosen or []
        except MissingShardError:
            chosen = []
        if len(chosen) == 1:
            return listed_shards(path, chosen[0], files) if chosen[0].endswith(".json") else None
        sets = [numbered for numbered in sets_of(names) if numbered.suffix.endswith(tuple(WEIGHT_SUFFIXES))]
        folder, numbered = path, next((each for each in sets if each.in_order == chosen), None)
        numbered = sets[0] if numbered is None and len(sets) == 1 else numbered
    else:
        part = PART.fullmatch(base)
        if part is None or part[4] != ".gguf":
            return None
        names = [name for name, is_folder in files.listing(folder) if not is_folder]
        numbered = next((numbered for numbered in sets_of(names) if base in numbered.files.values()), None)
    if numbered is None or int(numbered.total) > len(numbered.files) + MOST_MISSING:
        return None
    return ExpectedShards(folder, None, dict.fromkeys([*numbered.in_order, *numbered.missing()], ()), None)
