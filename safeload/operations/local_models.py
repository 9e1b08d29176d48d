"""`local_models`: list the models on this machine."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from ..base.layout import table
from ..base.names import natural_key
from ..base.paths import PathLike, native_path, os_error
from ..base.results import Report
from ..base.text import plural, printable, size
from ..errors import SafeloadError, exported, one_line, public
from ..formats.folder import choose, listed_shards
from ..formats.foreign import DCP_SUFFIX
from ..formats.numbered import sets_of
from ..formats.registry import DCP, ROWS
from ..stores import hub_cache, ollama
from ..stores.files import LOCAL

HUB, OLLAMA, LM_STUDIO, FOLDER = "hub", "ollama", "lmstudio", "folder"

# Levels of folders to look into, and entries to look at in a named folder.
_LEVELS, MAX_ENTRIES = 16, 1_000_000
# Format by suffix. The content decides when a file is opened; a listing reads none.
_FORMATS = {suffix: row.family or row.name for row in reversed(ROWS) for suffix in row.suffixes}
_FORMATS[DCP_SUFFIX] = DCP
_INDEX = re.compile(r"\.index(\.[^.]+)?\.json$")
# Names of files with training state, which are not models.
_STATE = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
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
class LocalModels(Report, Sequence[LocalModel]):
    """The result of `safeload.local_models`: a sequence of `LocalModel`, sorted by name. ``str()`` is a table.

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

    def __init__(self, models: Iterable[LocalModel], notes: Iterable[str] = ()) -> None:
        self._models = sorted(models, key=lambda model: (natural_key(model.name), model.path))
        self.notes = list(notes)

    @overload
    def __getitem__(self, index: int) -> LocalModel: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LocalModel]: ...
    def __getitem__(self, index: int | slice) -> LocalModel | Sequence[LocalModel]:
        return self._models[index]

    def __len__(self) -> int:
        return len(self._models)

    def _values(self) -> Iterable[LocalModel]:
        return self._models

    def _about(self) -> Sequence[str]:
        return [plural(len(self), "model"), *self.notes]

    def lines(self, columns: int | None = 80) -> list[str]:
        if not self._models:
            return ["no models found", *map(printable, self.notes)]
        rows = [(printable(m.name), m.format, size(m.nbytes), _shown(m)) for m in self._models]
        lines = table(_HEAD, rows, right=frozenset((2,)), columns=columns)
        total = sum(model.nbytes for model in self._models)
        return [*lines, "", f"{plural(len(self), 'model')}, {size(total)}", *map(printable, self.notes)]


def _shown(model: LocalModel) -> str:
    return printable(model.path) + (f" ({printable(model.note)})" if model.note else "")


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
    for path in _lm_studio():
        models += _of_folder(path, LM_STUDIO, failures)
    for path in paths:
        models += _of_folder(path, FOLDER, failures)
    return LocalModels(dict.fromkeys(models), sorted({one_line(error) for error in failures}))


# ---- weights among the files of a folder ----


class _Weights(NamedTuple):
    """The files of a model in a folder."""

    file: str  # the file to open; empty for the folder itself
    names: Sequence[str]  # of its weight files
    format: str
    note: str = ""


def _format(name: str) -> str | None:
    return _FORMATS.get(f".{name.rpartition('.')[2]}")


def _weights(names: Sequence[str], folder: str) -> Iterator[_Weights]:
    """Find the models of a folder: the folder itself if it opens, else each file or set of shards."""
    files = [name for name in names if _format(name) is not None and not name.startswith(_STATE)]
    indexes = [name for name in names if _INDEX.search(name)]
    if not files and not indexes:
        return
    try:
        chosen = choose(names, folder)
    except SafeloadError:
        chosen = None
    if chosen is not None and chosen[0] in indexes:
        yield _indexed(chosen[0], names, folder)
    elif chosen is not None:
        sets = [numbered for numbered in sets_of(files) if chosen[0] in numbered.files.values()]
        yield _Weights("", sets[0].in_order if sets else chosen, _format(chosen[0]) or "")
    else:
        sets = sets_of(files)
        for numbered in sets:
            note = "" if numbered.complete else f"incomplete: {', '.join(numbered.missing(1))} is missing"
            yield _Weights(numbered.in_order[0], numbered.in_order, _format(numbered.suffix) or "", note)
        parts = {name for numbered in sets for name in numbered.files.values()}
        yield from (_Weights(name, [name], _format(name) or "") for name in files if name not in parts)


def _indexed(index: str, names: Sequence[str], folder: str) -> _Weights:
    """Find the shards of an index."""
    suffix = ".bin" if ".bin." in index else ".safetensors"
    form = _format(suffix) or ""
    try:
        shards = listed_shards(folder, index, LOCAL).names
    except (SafeloadError, OSError) as error:
        present = [name for name in names if name.endswith(suffix)]
        return _Weights("", present, form, f"damaged: {one_line(error)}")
    present = sorted(set(shards).intersection(names))
    missing = set(shards).difference(names)
    note = f"incomplete: {len(missing):,} of {plural(len(shards), 'shard')} missing" if missing else ""
    return _Weights("", present, form, note)


def _sizes(paths: Iterable[str]) -> int:
    """Add up the sizes of files; files that cannot be looked at count as empty."""

    def nbytes(path: str) -> int:
        try:
            return os.stat(path).st_size
        except OSError:
            return 0

    return sum(map(nbytes, paths))


# ---- the places ----


def _of_hub(failures: list[OSError]) -> Iterator[LocalModel]:
    """List the snapshots of the Hub's cache."""
    for name, repository in hub_cache.repositories(failures):
        refs: dict[str, str] = {}
        for ref, commit in sorted(repository.refs().items(), key=lambda item: item[0] != "main"):
            refs.setdefault(commit, ref)
        for commit in repository.commits():
            ref = refs.get(commit, commit)
            at = "" if ref == "main" else f"@{ref.replace('/', '%2F')}"
            inner: dict[str, list[str]] = {}
            for path in sorted(repository.files(commit)):
                folder, _, file = path.rpartition("/")
                inner.setdefault(folder, []).append(file)
            for folder, files in inner.items():
                place = os.path.join(repository.path, "snapshots", commit, *filter(None, folder.split("/")))
                for weights in _weights(files, place):
                    below = "/".join(filter(None, (folder, weights.file)))
                    full = f"{name}{at}" + (f"/{below}" if below else "")
                    local = os.path.join(place, weights.file) if weights.file else place
                    yield LocalModel(
                        full,
                        HUB,
                        weights.format,
                        _sizes(os.path.join(place, file) for file in weights.names),
                        f"hf://{full}" if "/" in name else local,  # old names without an owner have no URL
                        weights.note,
                    )


def _of_ollama(failures: list[OSError]) -> Iterator[LocalModel]:
    """List the manifests of ollama."""
    seen: set[ollama.OllamaName] = set()
    for folder in ollama.folders():
        for name in ollama.names_in(folder, failures):
            if name in seen:
                continue
            seen.add(name)
            try:
                model = ollama.read(folder, name)
            except (SafeloadError, OSError) as error:
                yield LocalModel(_short(name), OLLAMA, "", 0, name.url, f"damaged: {one_line(error)}")
                continue
            if not model.weights:
                continue  # it runs on ollama's servers
            here = [layer.path for layer in model.weights if os.path.isfile(layer.path)]
            missing = len(model.weights) - len(here)
            note = f"incomplete: {missing:,} of {plural(len(model.weights), 'layer')} missing" if missing else ""
            yield LocalModel(_short(name), OLLAMA, model.format, _sizes(here), name.url, note)


def _short(name: ollama.OllamaName) -> str:
    return name.url.partition("://")[2]


def _lm_studio() -> list[str]:
    """Return the folders of LM Studio's models: of its settings, and the defaults of its versions."""
    home = os.path.expanduser("~")
    own = os.path.join(home, ".lmstudio")
    pointer = _text(os.path.join(home, ".lmstudio-home-pointer")).strip()
    if pointer and "\0" not in pointer:
        own = pointer
    folders = [os.path.join(own, "models"), os.path.join(home, ".cache", "lm-studio", "models")]
    try:
        settings = json.loads(_text(os.path.join(own, "settings.json")) or "{}")
    except (ValueError, RecursionError):
        settings = None
    chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
    if isinstance(chosen, str) and chosen and "\0" not in chosen:
        folders.insert(0, chosen)
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def _text(path: str) -> str:
    """Return the beginning of a small text file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(1 << 20) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""
    except (OSError, ValueError):
        return ""


def _of_folder(root: str, source: str, failures: list[OSError]) -> Iterator[LocalModel]:
    """List the models in a folder and its subfolders."""
    visited: set[tuple[int, int]] = set()
    waiting: list[tuple[str, ...]] = [()]
    left = MAX_ENTRIES
    while waiting and left > 0:
        parts = waiting.pop()
        folder = os.path.join(root, *parts)
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited and status.st_ino:
                continue
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                listed = sorted((entry.name, _is_folder(entry)) for entry in entries if entry.name[:1] != ".")
        except OSError as error:
            failures.append(error)
            continue
        left -= len(listed)
        if len(parts) < _LEVELS:
            waiting += [(*parts, name) for name, is_folder in reversed(listed) if is_folder]
        names = [name for name, is_folder in listed if not is_folder and os.path.isfile(os.path.join(folder, name))]
        for weights in _weights(names, folder):
            below = "/".join(filter(None, (*parts, weights.file)))
            yield LocalModel(
                below or os.path.basename(os.path.abspath(root)),
                source,
                weights.format,
                _sizes(os.path.join(folder, name) for name in weights.names),
                os.path.join(folder, weights.file) if weights.file else folder,
                weights.note,
            )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry leads to a folder; a link to itself leads nowhere."""
    try:
        return entry.is_dir()
    except OSError:
        return False
