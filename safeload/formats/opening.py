"""Open the argument of `safeload.open`: a file, a folder, an ``index.json`` or a list. Remember how to reopen it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from ..base import hub_cache, log
from ..base.messages import error_about
from ..base.paths import PathLike
from ..base.text import plural, show
from ..engine.read.load import LoadOptions
from ..engine.run import fetch as _fetch  # noqa: F401  not later: a child forked during an import would hang
from ..engine.run.weight_file import WeightFile, places_in
from ..errors import FormatError, UnsupportedError
from ..stores.files import LOCAL, Files, Location, rather_changed
from ..stores.local import compare
from ..stores.ollama import is_name
from ..stores.places import Located, places_of
from . import foreign, registry
from .registry import FormatName, OpenRequest

if TYPE_CHECKING:
    from . import folder
    from .verifying import Verify

# How to treat a pickle with classes or functions outside the allowlist.
UnknownGlobals: TypeAlias = Literal["refuse", "inert"]

# Absolute path of each file, and its identity when it was opened or the first fields of that identity.
Seen: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]


# The first argument of `safeload.open`.
Paths: TypeAlias = PathLike | Located | Sequence[PathLike | Located]


_UNKNOWN_GLOBALS = get_args(UnknownGlobals)


class OpenOptions(LoadOptions, total=False):
    """Options of `safeload.load`: options of `Checkpoint.load` and of `safeload.open`."""

    format: FormatName | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool
    adapters: Any
    storage_options: Mapping[str, Any] | None
    verify: Verify


class Recipe(NamedTuple):
    """How a checkpoint was opened; see `safeload.open` for the options. Pickled with the checkpoint."""

    paths: tuple[str, ...]  # absolute
    listed: bool  # the caller passed a list
    format: str | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool = False
    files: Files = LOCAL  # the store that the paths lead to

    def __repr__(self) -> str:
        return f"<Recipe {', '.join(map(self.files.shown, self.paths))}>"  # paths can hold the secrets of URLs

    @property
    def options(self) -> OpenRequest:
        """Options for opening each file."""
        _, _, format, root, unknown_globals, _, files = self
        formats = None if format is None else registry.formats_of(format)
        return OpenRequest(formats, root, unknown_globals == "inert", files)


class OpenedPath(NamedTuple):
    """The open files of a path."""

    title: str  # the path as messages show it
    format: str  # of the first file
    files: list[WeightFile]
    where: dict[str, tuple[WeightFile, int]] | None  # file and index of each tensor; None for a single file
    metadata: Mapping[Any, Any]  # of all files and the index, merged
    config: dict[str, Any] | None = None  # parsed ``config.json`` of a folder
    index_file: tuple[str, tuple[Any, ...]] | None = None  # path and identity of the index
    notes: Sequence[str] = ()  # the kind of folder, and skipped files
    recipe: Recipe | None = None  # how to open the path again, if known
    complete: bool = False  # the files should be a whole checkpoint, and a missing part is an error

    def __repr__(self) -> str:
        return f"<OpenedPath {self.title}>"  # the path of an index can hold the secrets of its URL


def open_paths(
    path: Paths,
    format: str | None,
    root: str | None,
    unknown_globals: UnknownGlobals,
    stored: bool = False,
    *,
    storage_options: Mapping[str, Any] | None = None,
    verify: Verify = None,
) -> OpenedPath:
    """Open the files of a path; see `safeload.open` for arguments and errors."""
    if format is not None:
        registry.formats_of(format)
    if unknown_globals != "refuse" and unknown_globals not in _UNKNOWN_GLOBALS:
        raise ValueError(f'unknown_globals must be "refuse" or "inert", got {show(unknown_globals)}')
    if isinstance(path, (list, tuple)):
        texts, files = places_of(path, storage_options)
        if verify is not None and verify is not False:
            files = _verified(texts, files, verify, storage_options)
        _check_heads(files)
        return _open_list(texts, Recipe((), True, format, root, unknown_globals, stored, files))
    (text,), files = places_of((path,), storage_options)  # type: ignore[arg-type]
    if verify is not None and verify is not False:
        if is_name(text):
            return _open_ollama(text, Recipe((), False, format, root, unknown_globals, stored, files), verify)
        files = _verified([text], files, verify, storage_options)
    recipe = Recipe((files.absolute(text),), False, format, root, unknown_globals, stored, files)
    if files is not LOCAL:
        if is_name(text):
            return _open_ollama(text, recipe)
        _check_heads(files)
        return _open_shards(text, recipe)
    if text.endswith(".json") and not foreign.is_safetensors(foreign.read_head(text)):
        return _open_shards(text, recipe)
    opened = None
    with suppress(IsADirectoryError):  # errors of a folder must not have this error as their context
        opened = registry.open_file(text, recipe.options)
    if opened is None:
        snapshot = hub_cache.snapshot_of(text)
        if snapshot is not None:
            recipe = recipe._replace(paths=(files.absolute(snapshot),))
        return _open_shards(snapshot or text, recipe)
    kind, file, others, _, notes, config = opened
    if kind == registry.GGUF:
        from .gguf.split import is_part

        if is_part(file):
            from . import folder

            return _logged(text, recipe, folder.open_parts(opened, recipe.options))
    where, metadata = opened.where if others else None, file.table.metadata() or {}
    return OpenedPath(text, kind, [file, *others], where, metadata, config, notes=notes, recipe=recipe)


def _verified(texts: Sequence[str], files: Files, verify: Verify, storage_options: Mapping[str, Any] | None) -> Files:
    from .verifying import verified_files  # few programs verify

    return verified_files(texts, files, verify, storage_options)


def _open_ollama(url: str, recipe: Recipe, verify: Verify = None) -> OpenedPath:
    """Open the layers of a model of ollama by their paths."""
    from ..stores import ollama

    model = ollama.find(url)
    paths = list(dict.fromkeys(layer.path for layer in model.weights))
    arguments = recipe.format, recipe.root, recipe.unknown_globals, recipe.stored
    if model.format == registry.GGUF:
        opened = open_paths(paths[0], *arguments, verify=verify)
    else:
        with closing(registry.open_file(paths[0], recipe.options._replace(files=LOCAL)).file) as first:
            if list(first.table.names) == ["data"] and model.weights[0].name != "data":
                text = 'the layers of this model name every tensor "data", as ollama did at first'
                raise error_about(UnsupportedError, f"{text}; pull or create the model again", path=url)
        opened = open_paths(paths, *arguments, verify=verify)
        if not recipe.stored:
            _check_plain(opened, url)
    return opened._replace(title=model.name.url, notes=[*opened.notes, *model.notes])


def _check_plain(opened: OpenedPath, url: str) -> None:
    """Refuse layers with tensors that ollama has quantized for MLX."""
    for file in opened.files:
        scheme = (file.table.metadata() or {}).get("quant_type")
        if scheme is not None:
            for open_file in opened.files:
                open_file.close()
            text = f"ollama has quantized this model for MLX ({show(scheme)}), which safeload does not decode"
            raise error_about(UnsupportedError, f"{text}; stored=True opens the codes", path=url)


def _check_heads(files: Files) -> None:
    """Refuse pipes with unknown content before they are read to their end, which may never come."""
    heads = getattr(files, "heads", None)  # of file objects only
    for name, head in () if heads is None else heads(foreign.HEAD_SIZE):
        registry.check_head(head, name)


def seen_of(files: Iterable[WeightFile], index_file: tuple[str, tuple[Any, ...]] | None) -> Seen:
    """Return the paths and identities to compare in `reopen`."""
    seen = tuple((file.place, file.identity) for file in files)
    return seen if index_file is None else (*seen, index_file)


def index_of(recipe: Recipe | None, index_file: tuple[str, tuple[Any, ...]] | None) -> Location | None:
    """Return the location of the index of a checkpoint; None if it was opened without an index."""
    files = LOCAL if recipe is None else recipe.files
    return None if index_file is None else Location(files, index_file[0])


def folder_of(
    recipe: Recipe | None, index_file: tuple[str, tuple[Any, ...]] | None, weight_files: Iterable[WeightFile]
) -> Location | None:
    """Return the folder of a checkpoint, opened directly or by its index; None for files."""
    index = index_of(recipe, index_file)
    if index is not None:
        return Location(index.files, index.files.split(index.path)[0])
    if recipe is None or recipe.listed:
        return None
    files, path = recipe.files, recipe.paths[0]
    # Remotely, `is_folder` would take a request.
    file = any(file.place == path for file in weight_files) if files.remote else not files.is_folder(path)
    return None if file else Location(files, path)


def pickled(recipe: Recipe, seen: Seen) -> tuple[tuple[Any, ...], Seen]:
    """Return the arguments of `reopen` for another process, without secrets."""
    public = recipe.files.public
    # The other process can be on another machine, where device and inode mean nothing.
    portable = tuple((public(path), tuple(identity[:2])) for path, identity in seen)
    return tuple(recipe._replace(paths=tuple(map(public, recipe.paths)))), portable


def reopen(recipe: Recipe, seen: Seen) -> OpenedPath:
    """Open the files of a path again."""
    for path, identity in seen:
        recipe.files.check_unchanged(path, identity)
    with rather_changed(recipe.files, seen):
        opened = _open_again(recipe)
    try:
        again = seen_of(opened.files, opened.index_file)
        if [path for path, _ in again] != [path for path, _ in seen]:
            raise FormatError(
                "the folder has changed since it was opened: its weights are in different files", recipe.paths[0]
            )
        for (path, identity), (_, before) in zip(again, seen, strict=True):
            compare(identity, before, recipe.files.shown(path))
    except BaseException:
        for file in opened.files:
            file.close()
        raise
    return opened


def _open_again(recipe: Recipe) -> OpenedPath:
    if recipe.files is not LOCAL:
        return _open_list(recipe.paths, recipe) if recipe.listed else _open_shards(recipe.paths[0], recipe)
    paths, listed, format, root, unknown_globals, stored, _ = recipe
    return open_paths(list(paths) if listed else paths[0], format, root, unknown_globals, stored)


def reopen_subset(
    seen: Seen, config: dict[str, Any] | None, recipe: Recipe, unlisted: Mapping[str, Sequence[str]]
) -> OpenedPath:
    """Open some files of a checkpoint again, without its index; only the paths of ``recipe`` are ignored."""
    from . import folder

    shards: list[registry.Opened] = []
    try:
        where: dict[str, tuple[WeightFile, int]] = {}

        def open_shard(place: tuple[str, tuple[Any, ...]]) -> registry.Opened:
            path, identity = place
            recipe.files.check_unchanged(path, identity)
            with rather_changed(recipe.files, [place]):
                shard = registry.open_file(path, recipe.options)
            compare(shard.file.identity, identity, shard.file.path)
            return shard

        shards = recipe.files.each(open_shard, seen)
        alone = len(shards) == 1 and not unlisted
        for shard, (path, _) in zip(shards, seen, strict=True) if not alone else ():
            excluded = frozenset(unlisted.get(path, ()))
            places = shard.where or places_in(shard.file)
            if excluded:
                places = {name: place for name, place in places.items() if name not in excluded}
            folder.add(where, places)
    except BaseException:
        for shard in shards:
            for file in shard.files:
                file.close()
        raise
    files = [file for shard in shards for file in shard.files]
    if alone:  # the metadata describes quantized tensors
        shard = shards[0]
        return OpenedPath(seen[0][0], shard.format, files, shard.where or None, shard.metadata, config, recipe=recipe)
    return OpenedPath(seen[0][0], shards[0].format, files, where, {}, config, recipe=recipe)


def _open_list(texts: Sequence[str], recipe: Recipe) -> OpenedPath:
    if not texts:
        raise ValueError("the list of paths is empty; pass at least one")
    from . import folder

    first = recipe.files.shown(texts[0])
    title = first if len(texts) == 1 else f"{first} and {len(texts) - 1} more"
    recipe = recipe._replace(paths=tuple(map(recipe.files.absolute, texts)))
    return _logged(title, recipe, folder.open_list(texts, recipe.options))


def _open_shards(path: str, recipe: Recipe) -> OpenedPath:
    """Open a folder, an ``index.json`` or another file."""
    kept = getattr(recipe.files, "kept", None)  # of files behind URLs only
    with nullcontext() if kept is None else kept(path):
        from . import folder  # json and pathlib would slow down every `import safeload`

        return _logged(recipe.files.shown(path), recipe, folder.open_path(path, recipe.options))


def _logged(title: str, recipe: Recipe, shards: folder.Shards) -> OpenedPath:
    """Log and return the open files of a folder, a list or an index."""
    log.debug("opened %s: %s", title, plural(len(shards.files), "file"))
    for note in shards.notes:
        log.debug("%s: %s", title, note)
    complete = shards.config is not None or shards.index_file is not None
    return OpenedPath(title, *shards, recipe=recipe, complete=complete)
