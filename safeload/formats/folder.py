"""Open folders of weight files, with and without an index, and lists of files; describe folders without weights."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ..core import registry
from ..core.files import LOCAL, Files, Location, identity_of, parse_json, read_at, read_if_there, read_json, read_whole
from ..core.foreign import DCP_SUFFIX
from ..core.names import names_below
from ..core.registry import DCP, GGUF, KERAS, SAFETENSORS, Format, Opened, OpenRequest, add, open_file
from ..core.safetensors import EARLY_WINDOW, window_for
from ..core.text import clip, dangling, error_about, is_bare, os_error, printable, show
from ..core.thread_group import HEADS
from ..core.weight_file import WeightFile, places_in
from ..errors import FormatError, MissingShardError, SafeloadError, UnsupportedError, missing_file
from ..formats import numbered
from ..models.module_names import adapter_note, refuse_adapters
from .numbered import FILE, INDEXED, ORBAX_METADATA, SET, STEMS, NumberedFiles, in_order, sets_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# An adapter of mlx-lm, whose trainer leaves those of earlier steps beside it (`0000100_adapters.safetensors`).
MLX_ADAPTER = "adapters.safetensors"
CONFIG = "config.json"
RESUME = ".safeload-resume"  # the subfolder of unfinished conversions, see `conversion.sink`

# The index of sharded Keras weights; its shards are beside it.
KERAS_INDEX_SUFFIX = ".weights.json"
# ZeRO's file with the name of the last step's folder, and its longest content.
_LATEST, _LONGEST_TAG = "latest", 1024
# Orbax writes this file beside or above the items of a step, and this text into the names of unfinished folders.
_ORBAX_STEP, _UNFINISHED = "_CHECKPOINT_METADATA", ".orbax-checkpoint-tmp"
# A step of Orbax' `CheckpointManager`: its number, after a prefix of the program's choice.
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})", re.ASCII | re.DOTALL)
# The index of a sharded Flax model, whose names have slashes instead of dots.
_FLAX_INDEX = ".msgpack.index.json"

# Suffixes of files, as opposed to folders.
_FILE_SUFFIXES = (".json", *sorted(registry.WEIGHT_SUFFIXES))

# Formats of training checkpoints, whose first file stands for the files of all processes, and these files.
_STANDING = (DCP, "deepspeed", "fsdp", "orbax")
_RANK_FILE = re.compile(
    rf"{numbered.DCP_SHARD.pattern}|.*_(?:model|optim)_states\.pt|(?:model|optim|extra_state)_world_size_.*\.pt",
    re.ASCII | re.DOTALL,
)


# ---- folders that are replaced while they are opened ----

# A writer replaces the index, or renames an old ``model.safetensors`` aside, before it changes ``config.json``, and
# puts an index into the folder if there is none (`conversion.sink`). So the files of a folder belong
# together if the index, or without one each weight file, is still the same once all of them and the config are open.


# A file that was read: its path and identity; None if only its presence is known, () if it was not there.
_Seen = Iterable[tuple[str, "tuple[Any, ...] | None"]]
_MOST_TRIES = 20


class _ReplacedError(FormatError):
    """Another program replaced a folder while it was opened."""


@contextmanager
def _settled(seen: _Seen, files: Files) -> Iterator[None]:
    """Report a file that has been replaced instead of the error that this led to."""
    try:
        yield
    except (FormatError, FileNotFoundError):
        _check_same(seen, files)
        raise


def _check_same(seen: _Seen, files: Files, opened: Iterable[Any] = ()) -> None:
    """Close open files, and refuse them, if a file that was read has been replaced since."""
    for path, identity in seen if files is LOCAL else ():
        try:
            now: tuple[Any, ...] | None = identity_of(os.lstat(path) if identity is None else os.stat(path))
        except OSError:
            now = ()
        if now != identity and (identity is not None or not now):
            for file in opened:
                file.close()
            raise _ReplacedError("another program replaced it while it was opened", path)


# ---- paths ----


def open_path(path: str, request: OpenRequest) -> Opened:
    """Open a folder, an ``index.json`` or a file; again if it is replaced meanwhile."""
    for _ in range(_MOST_TRIES):
        with suppress(_ReplacedError):
            return _open_path(path, request)
    return _open_path(path, request)


def _open_path(path: str, request: OpenRequest) -> Opened:
    files = request.files
    name = files.split(path)[1]
    is_json = name.endswith(".json")

    def open_one() -> Opened:
        return open_index(path, request) if is_json else open_parts(open_file(path, request), request)

    if files.remote and name.endswith(_FILE_SUFFIXES) and not path.endswith("/"):
        # Usually a file; asking whether it is a folder would take a request.
        with suppress(FileNotFoundError):
            return open_one()
    if files.is_folder(path):
        return open_folder(path, request)
    if is_json and not files.remote and not os.path.lexists(path):
        raise os_error(errno.ENOENT, path)
    return open_one()


def open_list(paths: Sequence[str], request: OpenRequest) -> Opened:
    """Open several paths as one checkpoint: the union of their tensors."""
    shown = request.files.shown
    opened: list[Opened] = []
    parts: set[str] = set()  # of split files: the first part opens all parts
    for path in paths:
        if request.files.absolute(path) in parts:
            continue
        opened.append(open_path(path, request))
        if opened[-1].format != opened[0].format:
            kinds = f"{shown(path)} is {opened[-1].format}, but {shown(paths[0])} is {opened[0].format}"
            text = "all files of a list must have one format; safeload.convert can merge sources of several formats"
            raise UnsupportedError(f"{kinds}: {text}")
        if opened[-1].format == GGUF and len(opened[-1].files) > 1:
            parts.update(file.place for file in opened[-1].files)
    joined = _union(shown(paths[0]), opened)
    refuse_adapters((each.file.path, each.places) for each in opened)
    config = next((each.config for each in opened if each.config is not None), None)
    return joined._replace(config=config, notes=[note for each in opened for note in each.notes])


def open_parts(first: Opened, request: OpenRequest) -> Opened:
    """Add the other parts to an open file if it is part of a split GGUF file."""
    gguf = registry.BY_NAME[GGUF]
    if first.format != GGUF or not gguf.load().is_part(first.file):
        return first
    files, metadata = gguf.load().open_parts(first.file, lambda path: open_file(path, request).file)
    return Opened(first.title, GGUF, files, _places(map(places_in, files)), metadata)


def _union(title: str, opened: Sequence[Opened]) -> Opened:
    """Join open files, which have no tensor in common."""
    where, metadata = _places(each.places for each in opened), _metadata(each.metadata for each in opened)
    return Opened(title, opened[0].format, [file for each in opened for file in each.files], where, metadata)


def _places(parts: Iterable[Mapping[str, tuple[WeightFile, int]]]) -> dict[str, tuple[WeightFile, int]]:
    where: dict[str, tuple[WeightFile, int]] = {}
    for part in parts:
        add(where, part)
    return where


def _metadata(parts: Iterable[Mapping[Any, Any]]) -> Mapping[Any, Any]:
    merged: Mapping[Any, Any] = {}
    for part in filter(None, parts):
        merged = {**merged, **part} if merged else part
    return merged


# ---- an index ----


def attempt(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function, and return a function that returns its result, or raises its error."""
    try:
        result = function()
    except Exception as error:
        failure = [error]

        def fail() -> Any:
            raise failure.pop()  # the traceback refers to this frame

        return fail
    return lambda: result


def implied_shards(base: str, beside: Sequence[str]) -> list[str]:
    """Return the shards that an index of this name should list: a complete set, small enough to be opened at once."""
    for shards in sets_of(beside):
        if base == f"{shards.stem}{shards.suffix}.index.json":
            return shards.in_order if shards.complete and len(shards.files) <= HEADS - 2 else []
    return []


def open_index(path: str, request: OpenRequest, beside: Sequence[str] = ()) -> Opened:
    """Open every shard of an ``index.json``. The index is authoritative: tensors that it omits are ignored.

    Of a remote folder, the shards that the names ``beside`` the index imply are opened while it is read, so that fewer
    answers follow each other; those that it does not list are closed, and their errors are ignored.
    """
    files, shown = request.files, request.files.shown(path)
    folder, base = files.split(path)
    keras = base.endswith(KERAS_INDEX_SUFFIX)
    config = partial(read_config, folder, files)
    early: dict[str, Callable[[], Opened]] = {}  # by name: returns the open shard, or raises its error

    def open_early(name: str) -> None:
        early[name] = attempt(partial(open_file, files.join(folder, name), request._replace(window=EARLY_WINDOW)))

    def open_shard(file_name: str) -> Opened:
        try:
            if file_name in early:
                return early.pop(file_name)()
            window, root = window_for(file_name, names[file_name]), None if keras else request.root
            return open_file(files.join(folder, file_name), request._replace(window=window, root=root))
        except FileNotFoundError as error:
            subject = f"{error.filename}{dangling(error.filename)}"
            text = f"No such file or directory: {subject}; {base} lists it: was the download finished?"
            raise missing_file(error.filename, text) from None

    try:
        tasks: list[Callable[[], Any]] = [partial(read_whole, path, "index.json", files)]
        if implied := implied_shards(base, beside) if files.remote else []:
            tasks += [partial(attempt, config), *(partial(open_early, name) for name in implied)]
        (content, version), *rest = files.each(lambda task: task(), tasks)
        index, seen = parse_json(content, "index.json", shown), [(path, version)]
        with _settled(seen, files):
            names, metadata = parse_index(index, path, files)
            tasks = [partial(open_shard, file_name) for file_name in sorted(names)]
            tasks.append((lambda: None) if keras else [*rest, config][0])
            *shards, parsed = files.each(lambda task: task(), tasks)
            where = _listed_places(names, shards, shown, keras=keras)
            if keras:
                below = names_below({name: name.split(".") for name in where}, request.root, shown)
                where = {known: where[name] for name, known in below.items()}
    finally:
        for unlisted in early.values():
            with suppress(Exception):  # it could not be opened
                unlisted().close()
    opened = [file for shard in shards for file in shard.files]
    _check_same(seen, files, opened)
    format, place = shards[0].format if shards else SAFETENSORS, (files.absolute(path), version)
    merged = _metadata((*(shard.metadata for shard in shards), metadata))
    return Opened(shown, format, opened, where, merged, parsed, place)


def _listed_places(
    names: Mapping[str, Sequence[str]], shards: Sequence[Opened], path: str, *, keras: bool
) -> dict[str, tuple[WeightFile, int]]:
    """Return the places of the tensors that an index lists for each shard; each must be there."""
    where: dict[str, tuple[WeightFile, int]] = {}
    for file_name, shard in zip(sorted(names), shards, strict=True):
        places, expected = shard.places, set(names[file_name])
        absent = expected - ({tensor.rpartition(".")[0] for tensor in places} if keras else places.keys())
        if absent:
            missing = next(filter(absent.__contains__, names[file_name])) if keras else min(absent)
            text = "should have variables in {}, but has none there" if keras else "should be in {}, but is not there"
            raise error_about(FormatError, text.format(show(file_name)[1:-1]), path=path, tensor=missing)
        if keras:
            add(where, places)
        else:
            whole = len(places) == len(expected)
            where.update(places if whole else {name: place for name, place in places.items() if name in expected})
    return where


def parse_index(index: Mapping[str, Any], path: str, files: Files) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the tensors of each shard, or of Keras its HDF5 groups, which can have several, and the metadata."""
    shown, keras, slashes = files.shown(path), path.endswith(KERAS_INDEX_SUFFIX), path.endswith(_FLAX_INDEX)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or (keras and not weight_map):
        message = f"weight_map must be an object{' with shards' * keras}, got {type(weight_map).__name__}"
        known = keras or "weight_map" in index
        raise FormatError(message if known else _not_an_index(path, index, files), shown)
    if metadata is not None and not isinstance(metadata, dict):
        if not keras:
            raise FormatError(f"metadata must be an object, got {type(metadata).__name__}", shown)
        metadata = None
    pairs: Iterable[tuple[str, Any]] = weight_map.items()
    if keras:
        pairs = [(name, file) for name, value in pairs for file in (value if isinstance(value, list) else [value])]
    names: dict[str, list[str]] = {}
    for tensor, file in pairs:
        if type(file) is not str or file not in names:
            if not isinstance(file, str) or not is_bare(file):  # files outside of the folder of an index are refused
                expected = "be the bare name of a file in the same folder" if file and isinstance(file, str) else ""
                text = f"weight_map[{show(tensor)}] must {expected or 'name a file'}, got {show(file)}"
                raise FormatError(text, shown, tensor=tensor)
            names[file] = []
        names[file].append(tensor.replace("/", ".") if slashes else tensor)
    if keras:
        names = {file: [".".join(filter(None, name.split("/"))) for name in groups] for file, groups in names.items()}
    return names, metadata or {}


# ---- a folder ----


class ExpectedShards(NamedTuple):
    """The shards that a folder should have."""

    folder: str
    listed_in: str | None  # name of the index that lists them; None for numbered files
    names: Mapping[str, Sequence[str]]  # names of shards, each with the tensors that the index lists for it
    total_size: int | None  # bytes of all tensors, as the index states


def listed_shards(folder: str, base: str, files: Files) -> ExpectedShards:
    """List the shards in the index of this name."""
    path = files.join(folder, base)
    names, metadata = parse_index(read_json(path, "index.json", files), path, files)
    total = metadata.get("total_size")
    return ExpectedShards(folder, base, names, total if type(total) is int else None)


class _Folder(NamedTuple):
    """A listed folder, and how to open it."""

    path: str
    names: Sequence[str]  # of its files
    folders: Sequence[str]  # names of its folders
    request: OpenRequest

    @property
    def files(self) -> Files:
        return self.request.files

    @property
    def shown(self) -> str:
        return self.files.shown(self.path)

    def unsupported(self, text: str) -> UnsupportedError:
        """Return the error for a folder with several possible models, or with none that safeload reads."""
        return error_about(UnsupportedError, text, path=self.shown)

    def ending(self, *suffixes: str) -> list[str]:
        return [name for name in self.names if name.endswith(suffixes)]

    def only(self, names: Sequence[str], kind: str) -> list[str]:
        """Return at most one name; several files of a kind are refused."""
        if len(names) > 1:
            raise self.unsupported(f"{len(names)} {kind}: {listed(names)}; open one of them")
        return [*names]


class FolderLayout(NamedTuple):
    """A row of `LAYOUTS`: where weights lie in a folder, and how they are opened."""

    formats: Collection[str]  # the row is tried if one of these is accepted; empty for any
    files: str  # as messages name them
    choose: Callable[[_Folder], Sequence[str]]  # returns what to open, or nothing
    open: Callable[[_Folder, Sequence[str]], Opened] | None = None  # None for `_open_files`


def open_folder(path: str, request: OpenRequest) -> Opened:
    """Open the weights that the first row of `LAYOUTS` chooses; ``request.formats`` excludes other formats."""
    visible = request.files.listing(path)
    names = [name for name, is_folder in visible if not is_folder]
    folders = [name for name, is_folder in visible if is_folder]
    folder, accepted = _Folder(path, names, folders, request), request.formats
    tried: list[str] = []
    for layout in _layouts(accepted):
        if accepted is None or not layout.formats or not set(layout.formats).isdisjoint(accepted):
            if chosen := layout.choose(folder):
                return (layout.open or _open_files)(folder, chosen)
            tried.append(layout.files)
    if chosen := _whole(folder, None):  # an index without its shards: the error names them
        return _open_files(folder, chosen)
    files, place = request.files, Location(request.files, path)
    unfinished = place / RESUME  # its shards wait for the end of a conversion
    for call, is_folder in files.listing(unfinished.path) if files.is_folder(unfinished.path) else ():
        waiting = [name for name, _ in files.listing((unfinished / call).path)] if is_folder else []
        _refuse_incomplete(sets_of(waiting), folder.shown, place, waiting=True)
    raise folder.unsupported(_no_weights(folder, tried))


def _layouts(formats: Sequence[str] | None) -> Iterator[FolderLayout]:
    """Iterate over all layouts in the order of preference, those of formats' rows last."""
    yield from LAYOUTS
    for row in chain(registry.ROWS, registry.plugin_rows()) if formats is None else map(registry.row_of, formats):
        if row.chooses is not None:
            opening = partial(_open_files, format=row.name) if row.source else None
            suffixes = ", ".join(f"*{suffix}" for suffix in row.suffixes)
            yield FolderLayout((), suffixes, partial(_by_row, row), opening)


def _open_files(folder: _Folder, chosen: Sequence[str], format: str | None = None) -> Opened:
    """Open the weight files or the index of a folder; with ``format``, as files of this format."""
    path, names, _, request = folder
    files = request.files
    config: Callable[[], dict[str, Any] | None] = partial(read_config, path, files)
    accepted = request if format is None else request._replace(formats=(format,))

    def opening() -> Opened:
        if len(chosen) == 1 or chosen[0].endswith(".gguf"):
            return open_parts(open_file(files.join(path, chosen[0]), accepted), accepted)
        return _union(files.shown(path), files.each(lambda name: open_file(files.join(path, name), accepted), chosen))

    if chosen[0].endswith(".json") and format is None:
        shards = open_index(files.join(path, chosen[0]), request, names)
    else:
        with _settled([(files.join(path, name), None) for name in chosen if name in names], files):
            tasks: list[Callable[[], Any]] = [opening, *[partial(attempt, config)] * files.remote]
            shards, *rest = files.each(lambda task: task(), tasks)  # remote files at once
            config = [*rest, config][0]
    used = {*chosen, *(files.split(file.place)[1] for file in shards.files)}
    if shards.format in _STANDING:
        used.update(folder.ending(DCP_SUFFIX) if format is None else filter(_RANK_FILE.fullmatch, names))
    parsed = config() if shards.config is None else shards.config
    if parsed is not None and shards.index_file is None:
        index = [] if INDEX in names else [(files.join(path, INDEX), ())]
        _check_same([*((file.place, file.identity) for file in shards.files), *index], files, shards.files)
    return shards._replace(config=parsed, notes=[*shards.notes, *_notes(folder, used, shards)])


def _open_step(folder: _Folder, chosen: Sequence[str], *, config: bool) -> Opened:
    """Open a folder in this one; with ``config``, the ``config.json`` here describes it."""
    shards = open_folder(folder.files.join(folder.path, chosen[0]), folder.request)
    if not config or shards.config is not None:
        return shards
    return shards._replace(config=read_config(folder.path, folder.files))


def choose(names: Sequence[str], path: str) -> list[str] | None:
    """Choose the weight files of a folder, or its index, for a listing, like `open_folder`; None if it has none."""
    folder = _Folder(path, names, (), OpenRequest())
    return _whole(folder, None) or _consolidated(folder) or folder.ending(DCP_SUFFIX) or _gguf(folder) or None


def choose_whole(
    names: Sequence[str], path: str, suffixes: Sequence[str], folder: Location | None = None
) -> list[str] | None:
    """Choose the files of a checkpoint, see `whole_checkpoints`; by names alone without ``folder``."""
    whole = numbered.whole_checkpoints(names, suffixes)
    usual = [each for each in whole if each.kind == SET or (each.kind == FILE and each.stem in STEMS[each.suffix])]
    # Without the index, several files of other names would be refused: do not read it for that.
    if folder is not None and (usual or sum(each.kind == FILE for each in whole) < 2):
        whole = [each for each in whole if each.kind != INDEXED or not _is_stale(each.files[0], names, folder)]
    equal = [each for each in whole if each.rank == whole[0].rank]
    first_is_usual = bool(equal) and not equal[0].variant and (equal[0].kind == INDEXED or equal[0] in usual)
    if not first_is_usual and not any(each.kind == SET for each in whole):
        _refuse_incomplete(sets_of([name for name in names if name.endswith(tuple(suffixes))]), path, folder)
    if len(equal) < 2:
        return equal[0].files if equal else None
    files = [name for each in equal for name in each.files]
    if equal[0].kind == INDEXED:
        raise FormatError(f"more than one index: {listed(files)}; open one of them", path)
    if equal[0].kind == FILE and MLX_ADAPTER in files and _ADAPTER in names:
        return [MLX_ADAPTER]
    files = [name for name in names if name.endswith(equal[0].suffix)]
    shown = ", ".join(show(path.rstrip("/") + "/" + name) for name in files[:3]) + (", ..." if len(files) > 3 else "")
    variants = len({name.split(".")[0] for name in files}) == 1
    advice = "They look like variants of one model: open one of them by its path" if variants else "Open one of them"
    text = f"{len(files)} {equal[0].suffix} files and no index: {listed(files)}. {advice}"
    raise error_about(UnsupportedError, f"{text}, or open several together with safeload.open([{shown}])", path=path)


def _is_stale(index: str, names: Sequence[str], folder: Location) -> bool:
    """Return True if none of the shards of an index is in its folder; its name usually tells without reading it."""
    if any(shards.stem.split(".")[0] == index.split(".")[0] for shards in sets_of(names)):
        return False
    try:
        shards = listed_shards(folder.path, index, folder.files).names
    except (SafeloadError, OSError):  # opening it says more
        return False
    # Hidden files are not among the names.
    return bool(shards) and shards.keys().isdisjoint(names) and not any(name.startswith(".") for name in shards)


def _refuse_incomplete(
    sets: Sequence[NumberedFiles], path: str, folder: Location | None = None, waiting: bool = False
) -> None:
    for shards in sets:
        if shards.complete and not waiting:
            continue
        total = int(shards.total)
        present = sum(1 <= number <= total for number in shards.files)
        if folder is not None and folder.files.is_folder((folder / RESUME).path):
            message = "shards are there; repeat the conversion with resume=True to continue it"
            raise MissingShardError(f"an unfinished conversion: {present:,} of {total:,} {message}", path)
        missing = listed(shards.missing(5), 5) + (", ..." if total - present > 5 else "")
        text = f"{present:,} of {total:,} shards are there, {total - present:,} missing: {missing}"
        raise MissingShardError(text, path)


def _dcp_shards(folder: _Folder) -> list[str]:
    """Choose the sharded safetensors of torch.distributed, unless the folder has a model of transformers."""
    usual = SINGLE in folder.names or any(map(numbered.INDEX_NAME.fullmatch, folder.names))
    return [] if usual else in_order(numbered.DCP_SHARD, folder.names, 1, 2)[:1]


def _whole(folder: _Folder, location: Location | None) -> list[str]:
    """Choose the files of transformers or diffusers."""
    accepted = folder.request.formats
    suffixes = [".safetensors"] * (accepted is None or SAFETENSORS in accepted)
    suffixes += [".bin"] * (accepted is None or not set(_TORCH).isdisjoint(accepted))
    return choose_whole(folder.names, folder.shown, suffixes, location) or []


def _consolidated(folder: _Folder) -> list[str]:
    """Choose Meta's single file of a folder."""
    parts = [name for name in folder.names if fnmatchcase(name, "consolidated.*.pth")]
    if len(parts) > 1:
        text = f"{len(parts)} files {listed(parts[:1])} to {listed(parts[-1:])} are model-parallel"
        advice = "each holds a slice of every tensor. Open them one by one, or convert them to a single file first"
        raise folder.unsupported(f"{text}: {advice}")
    return parts


def _zero_step(folder: _Folder) -> list[str]:
    """Choose the folder of ZeRO's states that ``latest`` names."""
    if _LATEST not in folder.names:
        return []
    with closing(folder.files.open(folder.files.join(folder.path, _LATEST))) as store:
        tag = read_at(store, 0, _LONGEST_TAG).decode("utf-8", "replace").strip()
    if not is_bare(tag) or tag not in folder.folders:
        return []
    inside = [name for name, _ in folder.files.listing(folder.files.join(folder.path, tag))]
    return [tag] if _zero(folder._replace(names=inside)) else []


def _zero(folder: _Folder) -> list[str]:
    """Choose the first of ZeRO's model states if the folder also has the optimizer's."""
    names = folder.names
    return in_order(numbered.ZERO_MODEL, names, 2, 1)[:1] if any(map(numbered.ZERO_OPTIMIZER.fullmatch, names)) else []


def _gguf(folder: _Folder) -> list[str]:
    """Choose the only GGUF file of a folder, or the first part of the only split file."""
    files = folder.ending(".gguf")
    sets = sets_of(files)
    single = set(files) - {name for shards in sets for name in shards.files.values()}
    firsts = folder.only(sorted([*single, *(shards.files[min(shards.files)] for shards in sets)]), "GGUF files")
    _refuse_incomplete(sets, folder.shown)
    return firsts


def _paddle(folder: _Folder) -> list[str]:
    """Choose Paddle's index, its single file, its shards, or the only ``.pdparams`` of a folder."""
    for name in ("model_state.pdparams.index.json", "model_state.pdparams"):
        if name in folder.names:
            return [name]
    chosen = folder.ending(".pdparams")
    sets = sets_of(chosen)
    if len(sets) == 1 and sets[0].complete:
        return sets[0].in_order
    _refuse_incomplete(sets, folder.shown)
    return folder.only(chosen, "Paddle files")


def _orbax_step(folder: _Folder) -> list[str]:
    """Choose the only Orbax checkpoint in a folder of steps or items."""
    checkpoints: list[str] = []
    for name, inner in _listings(folder.path, _finished(folder.folders), folder.files):
        names = [text for text, _ in inner]
        complete = ORBAX_METADATA in names
        if not complete and (_ORBAX_STEP in names or _STEP.fullmatch(name)):
            items = _finished([text for text, is_folder in inner if is_folder])
            inside = _listings(folder.files.join(folder.path, name), items, folder.files)
            complete = any(text == ORBAX_METADATA for _, listing in inside for text, _ in listing)
        if complete:
            checkpoints.append(name)
    if len(checkpoints) > 1:
        numbers = {name: match for name in checkpoints if (match := _STEP.fullmatch(name)) is not None}
        ordered = sorted(checkpoints, key=lambda name: (int(numbers[name][1]) if name in numbers else -1, name))
        shown = ", ".join(printable(name) for name in ordered[-_MAX_LISTED:])
        what = "steps" if len(numbers) == len(ordered) else "checkpoints"
        text = f"this folder has {len(ordered):,} Orbax {what}: {'... ' if len(ordered) > _MAX_LISTED else ''}{shown}; "
        raise folder.unsupported(f"{text}open one of them, such as {printable(ordered[-1])}")
    return checkpoints


def _finished(folders: Sequence[str]) -> list[str]:
    return [name for name in folders if _UNFINISHED not in name]


def _listings(path: str, folders: Sequence[str], files: Files) -> list[tuple[str, list[tuple[str, bool]]]]:
    """List folders in a folder, as far as they can be listed; a remote folder takes a request."""
    folders = folders[: 64 if files.remote else 4_096]
    return list(zip(folders, files.each(lambda name: _listing(files.join(path, name), files), folders), strict=True))


def _listing(path: str, files: Files) -> list[tuple[str, bool]]:
    try:
        return files.listing(path)
    except (OSError, SafeloadError):
        return []


def _by_row(row: Format, folder: _Folder) -> list[str]:
    """Choose the only file that the row of a format chooses."""
    with row.guarded(f"choose a file of {show(folder.shown)}"):
        files = [name for name in row.chooses(folder.names) if name in folder.names]  # type: ignore[misc]
    return folder.only(sorted(files), f"files of {row.title}")


_TORCH = ("torch zip", "torch legacy")
# The first row that chooses files wins.
# fmt: off
LAYOUTS = (
    FolderLayout((DCP,), "shard-*-model-*.safetensors", _dcp_shards, partial(_open_files, format=DCP)),
    FolderLayout((SAFETENSORS, *_TORCH), "*.safetensors, pytorch_model*.bin",
                 lambda folder: _whole(folder, Location(folder.files, folder.path))),
    FolderLayout(_TORCH, "consolidated.*.pth", _consolidated),
    FolderLayout((DCP,), "*.distcp", lambda folder: folder.ending(DCP_SUFFIX) and (
                 in_order(numbered.DCP_RANK, folder.names, 1)[:1] or [numbered.DCP_METADATA])),
    FolderLayout(("deepspeed",), "latest", _zero_step, partial(_open_step, config=True)),
    FolderLayout(("deepspeed",), "*_model_states.pt", _zero, partial(_open_files, format="deepspeed")),
    FolderLayout(("fsdp",), "model_world_size_*.pt", lambda folder: in_order(
                 numbered.FSDP_RANK, folder.names, 1, 2)[:1], partial(_open_files, format="fsdp")),
    FolderLayout(("orbax",), ORBAX_METADATA, lambda folder: [ORBAX_METADATA] * (ORBAX_METADATA in folder.names),
                 partial(_open_files, format="orbax")),
    FolderLayout((GGUF,), "*.gguf", _gguf),
    FolderLayout((KERAS,), "*.keras, *.h5", lambda folder: folder.only(
                 folder.ending(KERAS_INDEX_SUFFIX) or folder.ending(".keras", ".h5", ".hdf5"), "Keras files")),
    FolderLayout(("pickle",), "*.pdparams", _paddle),
    FolderLayout((), "*.nemo, *.llamafile",
                 lambda folder: names if len(names := folder.ending(".nemo", ".llamafile")) == 1 else []),
    FolderLayout(("orbax",), "STEP/_METADATA", _orbax_step, partial(_open_step, config=False)),
)
# fmt: on


def read_config(path: str, files: Files) -> dict[str, Any] | None:
    """Read the ``config.json`` of a folder, or return None if it does not exist."""
    return read_if_there(files.join(path, CONFIG), CONFIG, files)


# ---- messages and notes ----

# Files that identify a diffusers pipeline and an adapter.
_PIPELINE, _ADAPTER = "model_index.json", "adapter_config.json"
# Spelling of adapter types; PEFT stores capitals, MLX none.
_SPELLING = {"LORA": "LoRA", "lora": "LoRA", "dora": "DoRA"}
_SPELLING |= {"ADALORA": "AdaLoRA", "VERA": "VeRA", "LOHA": "LoHa", "LOKR": "LoKr"}

# Names of weight files.
_SUFFIXES = {*registry.WEIGHT_SUFFIXES, DCP_SUFFIX}
_WEIGHT_FILE = re.compile(rf".*({'|'.join(map(re.escape, sorted(_SUFFIXES)))}|\.index(\.\w+)?\.json)", re.DOTALL)
# Maximum number of names in a message, and of characters in a name.
_MAX_LISTED, _MAX_NAME = 20, 100

# Checkpoints of other libraries: a pattern for a file name, and the kind of folder.
_FOREIGN = (
    # https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
    (
        r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt",
        "an Orbax checkpoint without _METADATA, because it is unfinished or old: orbax.checkpoint reads old ones",
    ),
    (
        r"data\.pkl",
        "an unzipped torch checkpoint: open the zip file that it was extracted from, or zip it again, for example with "
        "zip -0 -r model.pt FOLDER",
    ),
    (r"saved_model\.pb", "a TensorFlow SavedModel: tf.saved_model.load(folder).variables gives its weights"),
    (r".*\.data-\d{5}-of-\d{5}", "a TensorFlow checkpoint: tf.train.load_checkpoint(folder) reads it"),
)
# JSON files beside weights: name, distinctive keys, and kind.
_JSON = (
    ("config.json", {"model_type", "architectures"}, "a model's config.json"),
    (_ADAPTER, {"peft_type"}, "the configuration of an adapter"),
    (_PIPELINE, {"_class_name"}, "the configuration of a diffusers pipeline"),
    ("tokenizer.json", {"added_tokens", "pre_tokenizer"}, "a tokenizer"),
    ("tokenizer_config.json", {"tokenizer_class"}, "the configuration of a tokenizer"),
    ("generation_config.json", {"eos_token_id", "bos_token_id"}, "a model's generation_config.json"),
)


def is_weight_file(name: str) -> bool:
    """Return True if a name is that of a weight file or of an index."""
    return _WEIGHT_FILE.fullmatch(name) is not None


def listed(names: Sequence[str], limit: int = _MAX_LISTED) -> str:
    """Return the first names as text for messages."""
    return ", ".join(map(_shown, names[:limit])) + (" ..." if len(names) > limit else "")


def _shown(text: str) -> str:
    return clip(printable(text), _MAX_NAME)


def _with_weights(folder: _Folder) -> list[str]:
    """Return the subfolders with weights."""
    listings = _listings(folder.path, folder.folders[: 32 if folder.files.remote else 1000], folder.files)
    return [name for name, listing in listings if any(is_weight_file(text) for text, _ in listing)]


def _no_weights(folder: _Folder, tried: Sequence[str]) -> str:
    """Return the message for a folder without supported weights: its kind, or its contents and the rows tried."""
    path, names, folders, _ = folder
    inner = _with_weights(folder)
    if _PIPELINE in names and inner:
        return f"this is a diffusers pipeline with weights in {listed(inner)}: open one of them"
    if path.rstrip("/").endswith(".mlpackage"):
        return "this is a Core ML package: coremltools.models.MLModel(folder) reads it"
    kind = next((kind for mark, kind in _FOREIGN if any(re.fullmatch(mark, name) for name in names)), None)
    if kind is not None:
        return f"this is {kind}"
    text = f"no weights here; found {listed(sorted([*names, *folders])) or 'nothing'}"
    text += f"; looked for {', '.join(filter(None, tried))}"
    return f"{text}. Subfolders with weights: {listed(inner)}; open one of them" if inner else text


def _not_an_index(path: str, content: Mapping[str, Any], files: Files) -> str:
    """Return the message for a JSON file that is not an index; its name and keys may tell its kind."""
    folder, base = files.split(path)
    kind = next((kind for mark, keys, kind in _JSON if base == mark or keys & content.keys()), None)
    if kind is None:
        return "an index of shards must have a weight_map, and this JSON object has none"
    weights = any(is_weight_file(name) for name, _ in _listing(folder, files))
    advice = "open its folder" if weights else "no weights beside it"
    return f"this is {kind}, not an index: {advice}"


def _adapter(config: str, files: Files) -> str:
    """Describe an adapter by its configuration."""
    try:
        settings = read_json(config, _ADAPTER, files)
    except (FormatError, OSError):
        return "an adapter (PEFT)"
    kind, rank, base = (settings.get(key) for key in ("peft_type", "r", "base_model_name_or_path"))
    writer, trained = "PEFT", settings.get("lora_parameters")
    if kind is None and isinstance(trained, Mapping):
        kind, rank = settings.get("fine_tune_type", "lora"), trained.get("rank")
        base, writer = settings.get("model"), "MLX"
    article = "an" if kind in ("ADALORA", "IA3", "OFT") else "a"
    kind = f"{article} {_shown(_SPELLING.get(kind, kind))}" if isinstance(kind, str) else "an"
    name = f"{kind} adapter ({writer}"
    name += f", r {rank})" if isinstance(rank, int) and 0 < rank < 1 << 20 else ")"
    return f"{name} of {_shown(base)}" if isinstance(base, str) and base else name


def _notes(folder: _Folder, used: set[str], shards: Opened) -> list[str]:
    """Return the kind of an open folder, and its unused weight files."""
    names, files = folder.names, folder.request.files
    notes = []
    # A complete model can lie beside the configuration of an adapter.
    if _ADAPTER in names and (
        any(name.startswith("adapter") and name != _ADAPTER for name in used)
        or any(".lora_" in tensor for tensor in shards.places)
    ):
        notes.append(adapter_note(_adapter(files.join(folder.path, _ADAPTER), files)))
    if _PIPELINE in names:
        notes.append(f"a diffusers pipeline, with more weights in {listed(_with_weights(folder)) or 'no folder'}")
    unused = (name for name in names if name not in used and not name.startswith(numbered.TRAINING_STATE))
    skipped = [name for name in unused if is_weight_file(name)]
    if skipped:
        notes.append(f"skipped: {listed(skipped)}")
    if any(name.startswith("consolidated") for name in skipped):
        notes.append("consolidated files hold the same weights under their publisher's own names: open them by path")
    return notes
