"""Open the argument of `safeload.open`: a file, a folder, an ``index.json`` or a list. Remember how to reopen it.

``root=`` selects a container: the weights in an archive, or a nested dict of a training checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from ..base import log
from ..base.paths import PathLike, snapshot_of
from ..base.table import ListedTable, Listing
from ..base.text import error_about, printable, show
from ..engine.read.load import LoadOptions
from ..engine.run import fetch as _fetch  # noqa: F401  not later: a child forked during an import would hang
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, UnsupportedError
from ..stores.files import LOCAL, rather_changed
from ..stores.local import compare
from ..stores.ollama import is_name
from ..stores.places import Located, places_of
from . import foreign, registry
from .registry import FormatName, Opened, OpenRequest, Recipe, UnknownGlobals

if TYPE_CHECKING:
    from ..stores.members import MemberFiles
    from .verifying import Verify

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


def open_paths(
    path: Paths,
    format: str | None,
    root: str | None,
    unknown_globals: UnknownGlobals,
    stored: bool = False,
    *,
    storage_options: Mapping[str, Any] | None = None,
    verify: Verify = None,
) -> Opened:
    """Open the files of a path; see `safeload.open` for arguments and errors."""
    if format is not None:
        registry.formats_of(format)
    if unknown_globals != "refuse" and unknown_globals not in _UNKNOWN_GLOBALS:
        raise ValueError(f'unknown_globals must be "refuse" or "inert", got {show(unknown_globals)}')
    recipe = Recipe((), isinstance(path, (list, tuple)), format, root, unknown_globals, stored)
    paths: Any = path if recipe.listed else (path,)
    texts, files = places_of(paths, storage_options)
    if not texts:
        raise ValueError("the list of paths is empty; pass at least one")
    if not recipe.listed and files is not LOCAL and is_name(texts[0]):
        return _open_ollama(texts[0], recipe, verify)
    if verify is not None and verify is not False:
        from ..stores.verified import VerifiedFiles  # few programs verify
        from .verifying import expected_of

        files = VerifiedFiles(files, expected_of(texts, files, verify, storage_options))  # type: ignore[assignment]
    recipe = recipe._replace(files=files, paths=tuple(map(files.absolute, texts)))
    text = texts[0]
    if recipe.listed or files is not LOCAL:
        heads = getattr(files, "heads", None)  # of file objects only
        for name, head in () if heads is None else heads(foreign.HEAD_SIZE):
            registry.check_head(head, name)  # before pipes are read to their end, which may never come
        return _open_all(texts, recipe)
    if text.endswith(".json") and not foreign.is_safetensors(foreign.read_head(text)):
        return _open_all(texts, recipe)
    opened = None
    with suppress(IsADirectoryError):  # errors of a folder must not have this error as their context
        opened = registry.open_file(text, recipe.options)
    if opened is None:
        snapshot = snapshot_of(text)
        if snapshot is not None:
            recipe = recipe._replace(paths=(files.absolute(snapshot),))
        return _open_all((snapshot or text,), recipe)
    if opened.format == registry.GGUF:
        from .gguf import is_part

        if is_part(opened.file):
            from . import folder

            return _logged(text, recipe, folder.open_parts(opened, recipe.options))
    return opened._replace(title=text, recipe=recipe)


def _open_ollama(url: str, recipe: Recipe, verify: Verify) -> Opened:
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
        schemes = ((file.table.metadata() or {}).get("quant_type") for file in opened.files)
        scheme = None if recipe.stored else next((scheme for scheme in schemes if scheme is not None), None)
        if scheme is not None:
            _close(opened)
            text = f"ollama has quantized this model for MLX ({show(scheme)}), which safeload does not decode"
            raise error_about(UnsupportedError, f"{text}; stored=True opens the codes", path=url)
    return opened._replace(title=model.name.url, notes=[*opened.notes, *model.notes])


def _close(*opened: Opened) -> None:
    for each in opened:
        for file in each.files:
            file.close()


def seen_of(files: Iterable[WeightFile], index_file: tuple[str, tuple[Any, ...]] | None) -> Seen:
    """Return the paths and identities to compare in `reopen`."""
    seen = tuple((file.place, file.identity) for file in files)
    return seen if index_file is None else (*seen, index_file)


def pickled(recipe: Recipe, seen: Seen) -> tuple[tuple[Any, ...], Seen]:
    """Return the arguments of `reopen` for another process, without secrets."""
    public = recipe.files.public
    # The other process can be on another machine, where device and inode mean nothing.
    portable = tuple((public(path), tuple(identity[:2])) for path, identity in seen)
    return tuple(recipe._replace(paths=tuple(map(public, recipe.paths)))), portable


def reopen(recipe: Recipe, seen: Seen) -> Opened:
    """Open the files of a path again."""
    for path, identity in seen:
        recipe.files.check_unchanged(path, identity)
    with rather_changed(recipe.files, seen):
        opened = _open_all(recipe.paths, recipe)
    try:
        again = seen_of(opened.files, opened.index_file)
        if [path for path, _ in again] != [path for path, _ in seen]:
            raise FormatError(
                "the folder has changed since it was opened: its weights are in different files", recipe.paths[0]
            )
        for (path, identity), (_, before) in zip(again, seen, strict=True):
            compare(identity, before, recipe.files.shown(path))
    except BaseException:
        _close(opened)
        raise
    return opened


def reopen_subset(
    seen: Seen, config: dict[str, Any] | None, recipe: Recipe, unlisted: Mapping[str, Sequence[str]]
) -> Opened:
    """Open some files of a checkpoint again, without its index; only the paths of ``recipe`` are ignored."""
    from . import folder

    shards: list[Opened] = []
    try:
        where: dict[str, tuple[WeightFile, int]] = {}
        shards = recipe.files.each(lambda place: registry.reopen_file(*place, recipe.options), seen)
        alone = len(shards) == 1 and not unlisted
        for shard, (path, _) in zip(shards, seen, strict=True) if not alone else ():
            excluded = frozenset(unlisted.get(path, ()))
            folder.add(where, {name: place for name, place in shard.places.items() if name not in excluded})
    except BaseException:
        _close(*shards)
        raise
    title = seen[0][0]
    if alone:  # the metadata describes quantized tensors
        return shards[0]._replace(title=title, config=config, notes=(), recipe=recipe)
    files = [file for shard in shards for file in shard.files]
    return Opened(title, shards[0].format, files, where, {}, config, recipe=recipe)


def _open_all(texts: Sequence[str], recipe: Recipe) -> Opened:
    """Open a list, a folder, an ``index.json`` or another file."""
    from . import folder  # json and pathlib would slow down every `import safeload`

    files, options = recipe.files, recipe.options
    title = files.shown(texts[0])
    if recipe.listed:
        title += f" and {len(texts) - 1} more" * (len(texts) > 1)
        return _logged(title, recipe, folder.open_list(texts, options))
    return _logged(title, recipe, folder.open_path(texts[0], options))


def _logged(title: str, recipe: Recipe, opened: Opened) -> Opened:
    """Log and return the open files of a folder, a list or an index."""
    count = len(opened.files)
    log.debug("opened %s: %d file%s", title, count, "" if count == 1 else "s")
    for note in opened.notes:
        log.debug("%s: %s", title, note)
    complete = opened.config is not None or opened.index_file is not None
    return opened._replace(title=title, recipe=recipe, complete=complete)


# ---- the weights in an archive ----

# Suffixes of files that are read with others, or that describe them.
_PARTS = (".distcp", ".json")


def open_members(
    container: WeightFile, members: dict[str, tuple[int, int]], request: OpenRequest, *, kind: str
) -> Opened:
    """Open the weights in a container, an archive of files; ``kind`` names it in messages, with its article.

    1. A container is not a format: the checkpoint has the format of its members. Containers in containers are refused.
    2. The weights are the only weight file of its folder, or else the folder, opened like any other. Of the folders
       with weights those nearest to the top count. If several remain, ``root=`` names one: the path of a file or folder
       in the container.
    3. Tensors that lie unpacked in members lie at a known place in the container, so the table is the container's own,
       and its arrays are views like those of any file. What a member must join or unpack is a file beside it.
    """
    from ..stores.members import MemberFiles  # few files are archives
    from . import folder

    files = MemberFiles(container.store, container.path, members)
    path, request = _choose(container, files, request._replace(files=files), kind)
    if files.is_folder(path):
        shards = folder.open_folder(path, request)
    else:
        shards = folder.open_parts(registry.open_file(path, request), request)
    return _onto(container, shards, path)


def _choose(container: WeightFile, files: MemberFiles, request: OpenRequest, kind: str) -> tuple[str, OpenRequest]:
    """Return the path of the weights, and the request for it."""
    from .folder import is_weight_file, listed
    from .numbered import is_set

    unsupported = partial(error_about, UnsupportedError, path=container.path)
    inside = [(folder, name) for folder in files.folders for name, is_folder in files.listing(folder) if not is_folder]
    root = None if request.root is None else request.root.removeprefix("./").rstrip("/")
    if root and root in {files.join(*place) for place in inside}:
        return root, request._replace(root=None)
    if root and files.is_folder(root):
        inside = [(folder, name) for folder, name in inside if f"{folder}/".startswith(f"{root}/")]
        request = request._replace(root=None)
    weights: dict[str, list[str]] = {}
    for folder, name in inside:
        if is_weight_file(name):
            weights.setdefault(folder, []).append(name)
    if not weights:
        names_inside = listed([files.join(*place) for place in inside]) or "nothing"
        raise unsupported(f"this is {kind} without weights: it holds {names_inside}")
    depths = {folder: folder.count("/") + 1 if folder else 0 for folder in weights}
    top = min(depths.values())
    folder, *rest = nearest = [folder for folder, depth in depths.items() if depth == top]
    if rest:
        shown = listed([name or "." for name in nearest])
        raise unsupported(f"weights in {len(nearest):,} folders: {shown}; choose one with root=")
    names = weights[folder]
    if len(names) == 1 and not names[0].endswith(_PARTS):
        return files.join(folder, names[0]), request
    if all(name.endswith(".gguf") for name in names) and not is_set(names):
        shown = listed([files.join(folder, name) for name in names])
        raise unsupported(f"it holds {len(names):,} GGUF files: {shown}; choose one with root=")
    return folder, request


def _onto(container: WeightFile, opened: Opened, path: str) -> Opened:
    """Return members' tensors as those of their container."""
    from ..stores.members import MemberStore

    beside = [file for file in opened.files if not isinstance(file.store, MemberStore)]
    if len(beside) > 1:
        for file in beside:
            file.close()
        text = f"{len(beside):,} of its files must be unpacked: extract {printable(path) or 'them'} first"
        raise error_about(UnsupportedError, text, path=container.path)
    listings: list[Listing] = []
    for name, (file, index) in opened.places.items():
        if not isinstance(file.store, MemberStore):
            continue
        table = file.table  # the place of a member is in the container
        if index in table.scales or index in table.packed:
            raise FormatError("a member has scales before they were looked for", file.path)
        begin, end = (byte + file.store.begin for byte in table.byte_range(index))
        row, shape, strides = table.row(index), table.shape(index), table.strides.get(index)
        listings.append(Listing(name, row, shape, begin, end, strides, big_endian=index in table.big_endian))
    tables = [file.table for file in opened.files]
    named = {name: harmless for table in tables for name, harmless in table.named_globals.items()}
    container.table = ListedTable(listings, opened.metadata, named_globals=named)
    container.table.unknown = {name: unknown for table in tables for name, unknown in table.unknown.items()}
    container.table.ternary = {name: shape for table in tables for name, shape in table.ternary.items()}
    for file in beside:
        file.path = container.path
        file.stand_for(container, unpacked=file.unpacked)
    files = [container, *beside]
    where = registry.joined_places(files, opened.places) if beside else None
    return opened._replace(title=container.path, files=files, where=where, index_file=None)
