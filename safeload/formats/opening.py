"""Opens the argument of `safeload.open`: a file, a folder, an ``index.json`` or a list; remembers how to reopen it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from ..base import log
from ..base.paths import PathLike
from ..base.text import plural, show
from ..engine.read.load import LoadOptions
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError
from ..stores.files import LOCAL, Files, Location, rather_changed
from ..stores.local import compare
from ..stores.places import Located, places_of
from . import foreign, registry
from .registry import FormatName, OpenRequest

if TYPE_CHECKING:
    from . import folder

# What to do with a pickle that names classes or functions outside the list of harmless ones.
UnknownGlobals: TypeAlias = Literal["refuse", "inert"]

# Absolute path of each file, and its identity when it was opened or the beginning of that.
Seen: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]


# What `safeload.open` opens.
Paths: TypeAlias = PathLike | Located | Sequence[PathLike | Located]


_UNKNOWN_GLOBALS = get_args(UnknownGlobals)


class OpenOptions(LoadOptions, total=False):
    """Options of `safeload.load`: those of `safeload.open` and of `Checkpoint.load`."""

    format: FormatName | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool
    adapters: Any
    storage_options: Mapping[str, Any] | None


class Recipe(NamedTuple):
    """How a checkpoint was opened; stored when it is pickled.

    Attributes:
        paths: absolute paths.
        listed: whether the paths were given as a list.
        format: see `safeload.open`.
        root: see `safeload.open`.
        unknown_globals: see `safeload.open`.
        stored: see `safeload.open`.
        files: where the paths lead.
    """

    paths: tuple[str, ...]
    listed: bool
    format: str | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool = False
    files: Files = LOCAL

    def __repr__(self) -> str:
        return f"<Recipe {', '.join(map(self.files.shown, self.paths))}>"  # paths hold the secrets of URLs

    @property
    def options(self) -> OpenRequest:
        """Options for opening each of the files."""
        formats = None if self.format is None else registry.FORMATS[self.format]
        return OpenRequest(formats, self.root, self.unknown_globals == "inert", self.files)


class Found(NamedTuple):
    """The opened files of a path.

    Attributes:
        title: the path, as messages name it.
        format: of the first file.
        files: the open files.
        where: name of each tensor to its file and its index in that file; None for a single file.
        metadata: of all files and of the index, merged.
        config: parsed ``config.json`` of a folder, else None.
        index_file: path and identity of the index, else None.
        notes: what kind of folder it is, and which of its files were skipped.
        recipe: how to open it again; None where that is unknown.
        complete: whether the files are all of a checkpoint: what is missing from it is then an error.
    """

    title: str
    format: str
    files: list[WeightFile]
    where: dict[str, tuple[WeightFile, int]] | None
    metadata: Mapping[Any, Any]
    config: dict[str, Any] | None = None
    index_file: tuple[str, tuple[Any, ...]] | None = None
    notes: Sequence[str] = ()
    recipe: Recipe | None = None
    complete: bool = False

    def __repr__(self) -> str:
        return f"<Found {self.title}>"  # the path of an index holds the secrets of its URL


def find(
    path: Paths,
    format: str | None,
    root: str | None,
    unknown_globals: UnknownGlobals,
    stored: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Found:
    """Opens the files of a path; see `safeload.open` for arguments and errors."""
    if format is not None and format not in registry.FORMATS:
        raise ValueError(f"unknown format {show(format)}, expected one of {', '.join(registry.FORMATS)}")
    if unknown_globals not in _UNKNOWN_GLOBALS:
        raise ValueError(f'unknown_globals is {show(unknown_globals)}, but must be "refuse" or "inert"')
    if isinstance(path, (list, tuple)):
        texts, files = places_of(path, storage_options)
        return _find_list(texts, Recipe((), True, format, root, unknown_globals, stored, files))
    (text,), files = places_of((path,), storage_options)  # type: ignore[arg-type]
    recipe = Recipe((files.absolute(text),), False, format, root, unknown_globals, stored, files)
    if files is not LOCAL:
        return _find_shards(text, recipe)
    if text.endswith(".json") and not foreign.is_safetensors(foreign.read_head(text)):
        return _find_shards(text, recipe)
    opened = None
    with suppress(IsADirectoryError):  # what a folder raises has nothing to do with this
        opened = registry.open_file(text, recipe.options)
    if opened is None:
        return _find_shards(text, recipe)
    if opened.format == registry.GGUF:
        from .gguf.split import is_part

        if is_part(opened.file):
            from . import folder

            return _found(text, recipe, folder.open_parts(opened, recipe.options))
    return Found(text, opened.format, opened.files, opened.where, opened.metadata, recipe=recipe)


def seen_of(files: Iterable[WeightFile], index_file: tuple[str, tuple[Any, ...]] | None) -> Seen:
    """What `reopen` compares: see `Found` for the arguments."""
    seen = tuple((file.place, file.identity) for file in files)
    return seen if index_file is None else (*seen, index_file)


def index_of(recipe: Recipe | None, index_file: tuple[str, tuple[Any, ...]] | None) -> Location | None:
    """Where the index is that a checkpoint was opened by; see `Found` for the arguments."""
    files = LOCAL if recipe is None else recipe.files
    return None if index_file is None else Location(files, index_file[0])


def folder_of(
    recipe: Recipe | None, index_file: tuple[str, tuple[Any, ...]] | None, weight_files: Iterable[WeightFile]
) -> Location | None:
    """The folder that a checkpoint was opened by, as itself or by its index; None for files."""
    index = index_of(recipe, index_file)
    if index is not None:
        return Location(index.files, index.files.split(index.path)[0])
    if recipe is None or recipe.listed:
        return None
    files, path = recipe.files, recipe.paths[0]
    # Asking a store on the network would take a request.
    file = any(file.place == path for file in weight_files) if files.remote else not files.is_folder(path)
    return None if file else Location(files, path)


def pickled(recipe: Recipe, seen: Seen) -> tuple[tuple[Any, ...], Seen]:
    """What `reopen` takes as another process gets it: without secrets.

    Raises:
        UnsupportedError: a path leads nowhere without them.
    """
    public = recipe.files.public
    # The process may be on another machine, where device and inode mean nothing.
    kept = tuple((public(path), tuple(known[:2])) for path, known in seen)
    return tuple(recipe._replace(paths=tuple(map(public, recipe.paths)))), kept


def reopen(recipe: Recipe, seen: Seen) -> Found:
    """Opens the files of a path again.

    Raises:
        FormatError: they have changed since.
        SafeloadError, OSError: see `safeload.open`.
    """
    for path, identity in seen:
        recipe.files.check_unchanged(path, identity)
    with rather_changed(recipe.files, seen):
        found = _find_again(recipe)
    try:
        again = seen_of(found.files, found.index_file)
        if [path for path, _ in again] != [path for path, _ in seen]:
            raise FormatError(
                "the folder has changed since it was opened: other files are its weights", recipe.paths[0]
            )
        for (path, identity), (_, before) in zip(again, seen, strict=True):
            compare(identity, before, recipe.files.shown(path))
    except BaseException:
        for file in found.files:
            file.close()
        raise
    return found


def _find_again(recipe: Recipe) -> Found:
    if recipe.files is not LOCAL:
        return _find_list(recipe.paths, recipe) if recipe.listed else _find_shards(recipe.paths[0], recipe)
    paths, listed, format, root, unknown_globals, stored, _ = recipe
    return find(list(paths) if listed else paths[0], format, root, unknown_globals, stored)


def find_some(
    seen: Seen, config: dict[str, Any] | None, recipe: Recipe, unlisted: Mapping[str, Sequence[str]]
) -> Found:
    """Opens some of the files of a checkpoint again, without its index: enough for some of its tensors.

    Args:
        seen: the files, as they were.
        config: the parsed ``config.json`` of the checkpoint; None without one.
        recipe: how the checkpoint was opened; its paths are not used.
        unlisted: by path, names of tensors that are in a file, but not in the checkpoint.

    Raises:
        FormatError: a file has changed since.
        SafeloadError, OSError: see `safeload.open`.
    """
    from . import folder

    opened: list[registry.Opened] = []
    try:
        where: dict[str, tuple[WeightFile, int]] = {}

        def open_one(place: tuple[str, tuple[Any, ...]]) -> registry.Opened:
            path, identity = place
            recipe.files.check_unchanged(path, identity)
            with rather_changed(recipe.files, [place]):
                one = registry.open_file(path, recipe.options)
            compare(one.file.identity, identity, one.file.path)
            return one

        opened = recipe.files.each(open_one, seen)
        for one, (path, _) in zip(opened, seen, strict=True):
            without = frozenset(unlisted.get(path, ()))
            places = one.where or {name: (one.file, k) for k, name in enumerate(one.file.table.names)}
            folder.add(where, {name: place for name, place in places.items() if name not in without})
    except BaseException:
        for one in opened:
            for file in one.files:
                file.close()
        raise
    files = [file for one in opened for file in one.files]
    return Found(seen[0][0], opened[0].format, files, where, {}, config, recipe=recipe)


def _find_list(texts: Sequence[str], recipe: Recipe) -> Found:
    if not texts:
        raise ValueError("there is nothing to open: the list of paths is empty")
    from . import folder

    first = recipe.files.shown(texts[0])
    name = first if len(texts) == 1 else f"{first} and {len(texts) - 1} more"
    recipe = recipe._replace(paths=tuple(map(recipe.files.absolute, texts)))
    return _found(name, recipe, folder.open_list(texts, recipe.options))


def _find_shards(path: str, recipe: Recipe) -> Found:
    """Opens a folder or an ``index.json``."""
    from . import folder  # only here: json and pathlib take milliseconds that every import would pay

    return _found(recipe.files.shown(path), recipe, folder.open_path(path, recipe.options))


def _found(path: str, recipe: Recipe, shards: folder.Shards) -> Found:
    """Logs and returns the files of a folder, a list or an index."""
    log.debug("opened %s: %s", path, plural(len(shards.files), "file"))
    for note in shards.notes:
        log.debug("%s: %s", path, note)
    complete = shards.config is not None or shards.index_file is not None
    return Found(path, *shards, recipe=recipe, complete=complete)
