"""`local_models`: list the models on this machine."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..core.files import LOCAL, read_json
from ..core.foreign import DCP_SUFFIX
from ..core.names import grouped, natural_key
from ..core.registry import DCP, ROWS
from ..core.showing import Report, table
from ..core.text import PathLike, native_path, os_error, plural, printable, size
from ..errors import SafeloadError, exported, one_line, public
from ..formats.folder import choose, listed_shards
from ..formats.numbered import INDEX_NAME, TRAINING_STATE, sets_of
from ..remote import hub_cache, ollama

HUB, OLLAMA, LM_STUDIO, FOLDER = "hub", "ollama", "lmstudio", "folder"

# Levels of folders to look into, and entries to look at in a named folder.
_LEVELS, MAX_ENTRIES = 16, 1_000_000
# Format by suffix. The content decides when a file is opened; a listing reads none.
_FORMATS = {suffix: row.family or row.name for row in reversed(ROWS) for suffix in row.suffixes}
_FORMATS[DCP_SUFFIX] = DCP
_HEAD = ("model", "format", "size", "open")


@exported()
class LocalModel(NamedTuple):
    """A model on this machine.

    Attributes:
        name: name of the model, such as "owner/name" or "llama3.2:1b".
        source: "hub", "ollama", "lmstudio" or "folder".
        format: value of ``format=`` that its suffix promises, such as "safetensors", "gguf" or "torch".
        nbytes: bytes of its weight files here.
        path: argument of `safeload.open`: a path, or an ``hf://`` or ``ollama://`` name.
        note: what is missing or cannot be read; empty if the listing shows no fault.

    Example:
        >>> import safeload
        >>> [model] = [model for model in safeload.local_models("tiny-llama") if model.source == "folder"]
        >>> len(safeload.load(model.path))
        30
    """

    name: str
    source: str
    format: str
    nbytes: int
    path: str
    note: str = ""


@exported()
class LocalModels(Report, list[LocalModel]):
    """The result of `safeload.local_models`: a list of `LocalModel`, sorted by name. ``str()`` is a table.

    Attributes:
        notes: folders that could not be read, with the reasons.

    Example:
        >>> import safeload
        >>> [model] = [model for model in safeload.local_models("tiny-llama") if model.source == "folder"]
        >>> model.name, model.path, model.note
        ('tiny-llama', 'tiny-llama', '')
    """

    _columns = LocalModel._fields
    _json = (("models", list), "notes")

    def __init__(self, models: Iterable[LocalModel], failures: Iterable[OSError] = ()) -> None:
        super().__init__(sorted(models, key=lambda model: (natural_key(model.name), model.path)))
        self.notes = sorted({one_line(error) for error in failures})

    def _values(self) -> Iterable[LocalModel]:
        return self

    def _about(self) -> Sequence[str]:
        return [plural(len(self), "model"), *self.notes]

    def lines(self, columns: int | None = 80) -> list[str]:
        if not self:
            return ["no models found", *map(printable, self.notes)]
        rows = [
            (printable(name), form, size(nbytes), printable(f"{path} ({note})" if note else path))
            for name, _, form, nbytes, path, note in self
        ]
        lines = table(_HEAD, rows, right=frozenset((2,)), columns=columns)
        total = sum(model.nbytes for model in self)
        return [*lines, "", f"{plural(len(self), 'model')}, {size(total)}", *map(printable, self.notes)]


@public
def local_models(folders: PathLike | Iterable[PathLike] = ()) -> LocalModels:
    """List the models on this machine, without reading them.

    Looks into the cache of huggingface_hub, the models of ollama and LM Studio, and into ``folders``. Damaged or
    unreadable parts of a cache never stop the listing; they become notes. A model with a note should be downloaded
    again.

    Args:
        folders: more folders to search, with their subfolders. Links to folders are followed, but no folder is listed
            twice.

    Returns:
        The models, sorted by name. Each has a ``path`` for `safeload.open`.

    Raises:
        FileNotFoundError, NotADirectoryError: one of ``folders`` is not a folder.

    Example:
        >>> import safeload
        >>> models = safeload.local_models("tiny-llama")
        >>> [(model.format, model.nbytes) for model in models if model.source == "folder"]
        [('safetensors', 249680)]
    """
    named = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
    paths = [native_path(folder)[0] for folder in named]
    for path in paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise os_error(errno.ENOENT, path) from None
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    failures: list[OSError] = []
    models = [*_of_hub(failures), *_of_ollama(failures)]
    for path, source in (*((path, LM_STUDIO) for path in _lm_studio()), *((path, FOLDER) for path in paths)):
        models += _of_folder(path, source, failures)
    return LocalModels(dict.fromkeys(models), failures)


def tree_of(folder: str) -> LocalModels:
    """Return the models in a folder and its subfolders, for commands that examine each model."""
    failures: list[OSError] = []
    return LocalModels([*_of_folder(folder, FOLDER, failures)], failures)


# ---- weights among the files of a folder ----


def _format(name: str) -> str:
    return _FORMATS.get(f".{name.rpartition('.')[2]}", "")


def _models(
    folder: str, names: Sequence[str], title: str, source: str, *, on_hub: bool = False
) -> Iterator[LocalModel]:
    """List the models among the files of a folder, whose own model has the name ``title``."""

    def model(file: str, present: Iterable[str], form: str, note: str = "") -> LocalModel:
        name = "/".join(filter(None, (title, file))) or os.path.basename(os.path.abspath(folder))
        path = os.path.join(folder, file) if file else folder
        nbytes = _sizes(os.path.join(folder, shard) for shard in present)
        return LocalModel(name, source, form, nbytes, f"hf://{name}" if on_hub else path, note)

    files = [name for name in names if _format(name) and not name.startswith(TRAINING_STATE)]
    indexes = {name: index[2] for name in names if (index := INDEX_NAME.fullmatch(name)) is not None}
    try:
        chosen = choose(names, folder) if files or indexes else None
    except SafeloadError:
        chosen = None
    sets = sets_of(files)
    if chosen is None:
        for numbered in sets:
            note = "" if numbered.complete else f"incomplete: {', '.join(numbered.missing(1))} is missing"
            yield model(numbered.in_order[0], numbered.in_order, _format(numbered.suffix), note)
        parts = {name for numbered in sets for name in numbered.files.values()}
        yield from (model(name, [name], _format(name)) for name in files if name not in parts)
    elif chosen[0] not in indexes:
        shards = next((numbered.in_order for numbered in sets if chosen[0] in numbered.files.values()), chosen)
        yield model("", shards, _format(chosen[0]))
    else:
        suffix = indexes[chosen[0]]
        try:
            listed = set(listed_shards(folder, chosen[0], LOCAL).names)
        except (SafeloadError, OSError) as error:
            present, note = [name for name in names if name.endswith(suffix)], f"damaged: {one_line(error)}"
        else:
            present = sorted(listed.intersection(names))
            note = _incomplete(len(listed) - len(present), len(listed), "shard")
        yield model("", present, _format(suffix), note)


def _incomplete(missing: int, total: int, noun: str) -> str:
    return f"incomplete: {missing:,} of {plural(total, noun)} missing" if missing else ""


def _sizes(paths: Iterable[str]) -> int:
    """Add up the sizes of files; files that cannot be looked at count as empty."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += os.stat(path).st_size
    return total


# ---- the places ----


def _of_hub(failures: list[OSError]) -> Iterator[LocalModel]:
    """List the snapshots of the Hub's cache."""
    for name, repository in hub_cache.repositories(failures):
        main_first = sorted(repository.refs().items(), key=lambda item: item[0] != "main")
        refs = {commit: ref for ref, commit in reversed(main_first)}  # the first ref of a commit
        for commit in repository.commits():
            ref = refs.get(commit, commit)
            at = "" if ref == "main" else f"@{ref.replace('/', '%2F')}"
            inner = grouped(sorted(repository.files(commit)), lambda path: path.rpartition("/")[0])
            for folder, paths in inner.items():
                parts, files = [*filter(None, folder.split("/"))], [path.rpartition("/")[2] for path in paths]
                place = os.path.join(repository.path, "snapshots", commit, *parts)
                # Old names without an owner have no URL.
                yield from _models(place, files, "/".join((f"{name}{at}", *parts)), HUB, on_hub="/" in name)


def _of_ollama(failures: list[OSError]) -> Iterator[LocalModel]:
    """List the manifests of ollama; the first folder with a name counts."""
    places = [(name, folder) for folder in ollama.folders() for name in ollama.names_in(folder, failures)]
    for name, folder in dict(reversed(places)).items():
        title = name.url.partition("://")[2]
        try:
            model = ollama.read(folder, name)
        except (SafeloadError, OSError) as error:
            yield LocalModel(title, OLLAMA, "", 0, name.url, f"damaged: {one_line(error)}")
            continue
        if model.weights:  # or it runs on ollama's servers
            here = [layer.path for layer in model.weights if os.path.isfile(layer.path)]
            note = _incomplete(len(model.weights) - len(here), len(model.weights), "layer")
            yield LocalModel(title, OLLAMA, model.format, _sizes(here), name.url, note)


def _lm_studio() -> list[str]:
    """Return the folders of LM Studio's models: of its settings, and the defaults of its versions."""
    home = os.path.expanduser("~")
    pointer = hub_cache.text_of(os.path.join(home, ".lmstudio-home-pointer"))
    own = pointer if pointer and "\0" not in pointer else os.path.join(home, ".lmstudio")
    chosen = None
    with suppress(SafeloadError, OSError):
        chosen = read_json(os.path.join(own, "settings.json"), "settings.json").get("downloadsFolder")
    defaults = os.path.join(own, "models"), os.path.join(home, ".cache", "lm-studio", "models")
    folders = [chosen, *defaults] if isinstance(chosen, str) else defaults
    return [folder for folder in dict.fromkeys(folders) if "\0" not in folder and os.path.isdir(folder)]


def _of_folder(root: str, source: str, failures: list[OSError]) -> Iterator[LocalModel]:
    """List the models in a folder and its subfolders."""
    visited: set[tuple[int, int]] = set()
    left = MAX_ENTRIES
    for folder, folders, files in os.walk(root, onerror=failures.append, followlinks=True):
        title = "" if folder == root else os.path.relpath(folder, root).replace(os.sep, "/")
        inner = sorted(name for name in folders if name[:1] != ".")
        names = sorted(name for name in files if name[:1] != ".")
        left -= len(inner) + len(names)
        searched = left > 0 and title.count("/") + bool(title) < _LEVELS
        folders[:] = inner if searched else ()
        if inner and not searched:
            reason = f"{MAX_ENTRIES:,} entries" if left <= 0 else f"{_LEVELS} levels"
            failures.append(OSError(f"{folder}: its folders were not searched, because the limit is {reason}"))
        try:
            status = os.stat(folder)
        except OSError as error:
            failures.append(error)
            status = None
        if status is None or (status.st_ino and (status.st_dev, status.st_ino) in visited):
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        names = [name for name in names if os.path.isfile(os.path.join(folder, name))]
        yield from _models(folder, names, title, source)
