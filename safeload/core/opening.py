"""Open the argument of `safeload.open`: a file, a folder, an ``index.json`` or a list. Remember how to reopen it.

``root=`` selects a container: the weights in an archive, or a nested dict of a training checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from ..errors import FormatError, exported
from . import foreign, registry
from .files import LOCAL, Files, Located, caching, compare, unchanged
from .registry import Opened, Recipe, UnknownGlobals, part
from .text import PathLike, debug, private_text, show
from .weight_file import WeightFile

# Absolute path of each file, and its identity when it was opened or the first fields of that identity.
Seen: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]


part("fetch")  # runs jobs on remote files; not imported later: a child forked during an import would hang

# The first argument of `safeload.open`.
Paths: TypeAlias = PathLike | Located | Sequence[PathLike | Located]


_UNKNOWN_GLOBALS = get_args(UnknownGlobals)


@exported()
@dataclass(frozen=True)
class Signature:
    """A model signature, and the key or the certificates to verify it with.

    ``safeload sign`` and the model-signing library write such signatures. Without a key or certificates a signature
    proves nothing and is refused.

    Attributes:
        path: the signature, such as "model/model.sig"; a path or a URL.
        key: file with the public key of the signer, in PEM.
        certificate: file, or list of files, with the certificates that you trust, in PEM. The signature holds the
            signer's own certificate.

    Example:
        >>> import safeload
        >>> signature = safeload.Signature("tiny-llama/model.sig", key="release.pub")
        >>> safeload.load("tiny-llama", verify=signature)  # doctest: +SKIP
    """

    path: PathLike
    key: PathLike | None = None
    certificate: PathLike | Sequence[PathLike] | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.certificate is not None:
            raise ValueError("a signature is verified with a key or with certificates, not with both")

    @property
    def certificates(self) -> list[PathLike]:
        """The files with trusted certificates."""
        if self.certificate is None:
            return []
        return [self.certificate] if isinstance(self.certificate, (str, os.PathLike)) else list(self.certificate)

    @property
    def _proofs(self) -> list[PathLike]:
        """The files to verify the signature with."""
        return self.certificates if self.key is None else [self.key]

    @property
    def proof(self) -> str:
        """The proof that a match gives: who signed the files, or integrity only."""
        files = ", ".join(os.fspath(path) for path in self._proofs)
        if self.key is not None:
            return f"signed with the key of {files}"
        return f"signed by a certificate that {files} vouches for"


# The path of a manifest or signature, or True for the one next to the files, or for the digests of a cache.
Verify: TypeAlias = bool | PathLike | Signature | None


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
    texts, files = _places_of(paths, storage_options)
    if not texts:
        raise ValueError("the list of paths is empty; pass at least one")
    if files is not LOCAL and not recipe.listed:
        opener = registry.OPENERS.get("".join(texts[0].partition("://")[:2]).lower())
        if opener is not None:
            opened: Opened = getattr(registry.module_of(opener[0]), opener[1])(texts[0], recipe, verify)
            return opened
    if verify is not None and verify is not False:
        expected = part("digests").expected_of(texts[0], files, verify, storage_options)
        files = part("verified").VerifiedFiles(files, expected)
    recipe = recipe._replace(files=files, paths=tuple(map(files.absolute, texts)))
    text = texts[0]
    if recipe.listed or files is not LOCAL:
        heads = getattr(files, "heads", None)  # of file objects only
        for name, head in () if heads is None else heads(foreign.HEAD_SIZE):
            registry.check_head(head, name)  # before pipes are read to their end, which may never come
        return _open_all(texts, recipe)
    if text.endswith(".json") and not foreign.is_safetensors(foreign.read_head(text)):
        return _open_all(texts, recipe)
    file = None
    with suppress(IsADirectoryError):  # errors of a folder must not have this error as their context
        file = registry.open_file(text, recipe.options)
    if file is None:
        hub = os.path.isdir(os.path.join(text, "snapshots")) and part("hub")  # perhaps a repository of the Hub's cache
        snapshot = hub.snapshot_of(text) if hub else None
        if snapshot is not None:
            recipe = recipe._replace(paths=(files.absolute(snapshot),))
        return _open_all((snapshot or text,), recipe)
    if file.format == registry.GGUF and registry.BY_NAME[registry.GGUF].load().is_part(file.file):
        return _open_all((text,), recipe, file)
    return file._replace(title=text, recipe=recipe)


def _places_of(paths: Sequence[Any], storage_options: Mapping[str, Any] | None) -> tuple[list[str], Files]:
    """Return callers' paths as text, and their store: mostly a local path, which needs no other module."""
    if len(paths) == 1:
        only = paths[0]
        if type(only) is not str and hasattr(type(only), "__fspath__") and not hasattr(only, "fs"):
            only = os.fspath(only)  # of `pathlib`
        if type(only) is str and "://" not in only and "::" not in only:  # else it can be a URL
            return [private_text(only)], LOCAL
    places: tuple[list[str], Files] = part("places").places_of(paths, storage_options)
    return places


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
    with caching(recipe.cache), unchanged(recipe.files, seen):
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
        opened.close()
        raise
    return opened


def reopen_subset(
    seen: Seen, config: dict[str, Any] | None, recipe: Recipe, unlisted: Mapping[str, Sequence[str]]
) -> Opened:
    """Open some files of a checkpoint again, without its index; only the paths of ``recipe`` are ignored."""
    shards: list[Opened] = []
    try:
        where: dict[str, tuple[WeightFile, int]] = {}
        shards = recipe.files.each(lambda place: registry.reopen_file(*place, recipe.options), seen)
        alone = len(shards) == 1 and not unlisted
        for shard, (path, _) in zip(shards, seen, strict=True) if not alone else ():
            excluded = frozenset(unlisted.get(path, ()))
            registry.add(where, {name: place for name, place in shard.places.items() if name not in excluded})
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    title = seen[0][0]
    if alone:  # the metadata describes quantized tensors
        return shards[0]._replace(title=title, config=config, notes=(), recipe=recipe)
    files = [file for shard in shards for file in shard.files]
    return Opened(title, shards[0].format, files, where, {}, config, recipe=recipe)


def _open_all(texts: Sequence[str], recipe: Recipe, part_of_split: Opened | None = None) -> Opened:
    """Open a list, a folder, an ``index.json`` or another file, or what the part of a split file belongs to; log it."""
    # Not imported before: json and pathlib would slow down every `import safeload`.
    files, options, folder = recipe.files, recipe.options, part("folders")
    title = files.shown(texts[0])
    opened: Opened
    if part_of_split is not None:
        opened = folder.open_parts(part_of_split, options)
    elif recipe.listed:
        title += f" and {len(texts) - 1} more" * (len(texts) > 1)
        opened = folder.open_list(texts, options)
    else:
        opened = folder.open_path(texts[0], options)
    count = len(opened.files)
    debug("opened %s: %d file%s", title, count, "" if count == 1 else "s")
    for note in opened.notes:
        debug("%s: %s", title, note)
    complete = opened.config is not None or opened.index_file is not None
    return opened._replace(title=title, recipe=recipe, complete=complete)
