"""Repositories in the cache of huggingface_hub.

1. ``models--<owner>--<name>``, ``datasets--...`` and ``spaces--...`` each hold a repository.
2. ``refs/<branch or tag>`` is a text file with a commit.
3. ``snapshots/<commit>/<path>`` is a file of a commit: a symbolic link to ``blobs/<etag>`` or, without symbolic links
   (Windows), the file itself. Files that were never downloaded are missing.
4. ``trees/<commit>.json`` lists all files of a commit with their sizes (huggingface_hub 2).
5. ``blobs/*.incomplete`` are unfinished downloads.

The cache is read, never written. Anything unreadable counts as absent: the Hub has it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from ..core.files import read_json
from ..core.text import clip, error_about, folder_names, printable
from ..errors import FormatError, UnsupportedError

# A full commit: its files never change.
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
# Names that can be looked up: no other component leads out of the cache.
_COMPONENT = re.compile(r"(?!\.{1,2}\Z)[^/\\:\x00]{1,255}", re.DOTALL)
_REPOSITORY = re.compile(r"[A-Za-z0-9._-]{1,96}(?:/[A-Za-z0-9._-]{1,96})?", re.ASCII)
_FOLDER = re.compile(r"models--([A-Za-z0-9._-]{1,200})", re.ASCII)
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)", re.ASCII | re.DOTALL)
# Where a path enters a repository: its kind and name, with "--" for "/", and a commit or blob.
_INSIDE = re.compile(r"(?<![^/])(models|datasets|spaces)--([^/]+)/(?:snapshots|blobs)(?![^/])/?([^/]*)", re.ASCII)
# Maximum number of files in a snapshot.
MAX_FILES = 100_000
_TREE_VERSION = 1
# Files that complete the weights of a folder: without them its weights could be misread.
_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHTS = (".safetensors", ".bin", ".gguf")
# Longest text of a small file, such as a commit or a path.
_LONGEST_TEXT = 4096


def hub_folder() -> str:
    """Return the folder of the cache, which may not exist."""
    for variable, inner in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if path := os.environ.get(variable):
            path = os.path.expanduser(os.path.expandvars(path))
            return os.path.join(path, inner) if inner else path
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "huggingface", "hub")


def text_of(path: str) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    with suppress(OSError, ValueError):
        if os.path.isfile(path):  # a FIFO would block
            with open(path, encoding="utf-8") as file:
                return file.read(_LONGEST_TEXT).strip()
    return ""


def snapshot_of(path: str) -> str | None:
    """Return the snapshot for a repository folder: main's, or the only snapshot. None for any other folder."""
    snapshots = os.path.join(path, "snapshots")
    if not os.path.isdir(snapshots) or not os.path.isdir(os.path.join(path, "blobs")):
        return None
    main = text_of(os.path.join(path, "refs", "main"))
    if main and os.path.basename(main) == main and os.path.isdir(os.path.join(snapshots, main)):
        return os.path.join(snapshots, main)
    revisions = sorted(entry.name for entry in os.scandir(snapshots) if entry.is_dir())
    if len(revisions) > 1:
        listed = ", ".join(clip(printable(name), 100) for name in revisions[:20])
        raise error_about(UnsupportedError, f"{len(revisions)} snapshots: {listed}; open one of snapshots/", path=path)
    return os.path.join(snapshots, revisions[0]) if revisions else None


def place_in_cache(path: str) -> tuple[str, str, str] | None:
    """Return kind, name, and commit or blob of a path in any cache; None for other paths."""
    match = _INSIDE.search(os.path.abspath(path).replace(os.sep, "/"))
    return None if match is None else (match[1], match[2].replace("--", "/", 1), match[3])


class CachedRepository:
    """A repository in the cache; it may not exist."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def of(cls, kind: str, name: str) -> CachedRepository:
        """Return a repository, which is empty if its name has no place in the cache."""
        folder = os.path.join(hub_folder(), f"{kind}s--{name.replace('/', '--')}")
        return cls(folder if _REPOSITORY.fullmatch(name) else os.devnull)

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a revision as the cache knows it."""
        if COMMIT.fullmatch(revision):
            return revision
        if not all(map(_COMPONENT.fullmatch, revision.split("/"))):
            return None
        commit = text_of(os.path.join(self.path, "refs", *revision.split("/")))
        return commit if COMMIT.fullmatch(commit) else None

    def refs(self) -> dict[str, str]:
        names = ["/".join(name) for name in _walk(os.path.join(self.path, "refs"))]
        return {name: commit for name in names if (commit := self.commit_of(name)) is not None}

    def commits(self) -> list[str]:
        """Return the commits with a snapshot."""
        return [*filter(COMMIT.fullmatch, folder_names(os.path.join(self.path, "snapshots"), []))]

    def file(self, commit: str, path: str) -> str | None:
        """Return the local path of a file of a commit; None if it was not downloaded."""
        parts = path.split("/")
        if not COMMIT.fullmatch(commit) or not all(map(_COMPONENT.fullmatch, parts)):
            return None
        local = os.path.join(self.path, "snapshots", commit, *parts)
        return local if os.path.isfile(local) else None

    def files(self, commit: str) -> frozenset[str]:
        """Return the paths of the downloaded files of a commit."""
        folder = os.path.join(self.path, "snapshots", commit)
        return frozenset("/".join(parts) for parts in _walk(folder) if os.path.isfile(os.path.join(folder, *parts)))

    def tree(self, commit: str) -> dict[str, int] | None:
        """Return the sizes of all files of a commit; None if the cache has no list of them."""
        if not COMMIT.fullmatch(commit):
            return None
        try:
            listed = read_json(os.path.join(self.path, "trees", f"{commit}.json"), "the list of files")
        except (OSError, FormatError):
            return None
        files = listed.get("files")
        if listed.get("format_version") != _TREE_VERSION or not isinstance(files, dict) or not files:
            return None
        sizes: dict[str, int] = {}
        for name, entry in files.items():
            size = entry.get("size") if isinstance(entry, dict) else None
            if type(size) is not int or size < 0 or not all(map(_COMPONENT.fullmatch, name.split("/"))):
                return None
            sizes[name] = size
        return sizes

    def is_complete(self, commit: str) -> bool:
        """Return whether the weights at the top of a snapshot and their configuration seem complete, without a tree."""
        names = {name for name in self.files(commit) if "/" not in name}
        if not names.intersection(_CONFIGS):
            return False
        if any(name.endswith(".incomplete") for name in folder_names(os.path.join(self.path, "blobs"), [])):
            return False
        indexes = [name for name in names if ".index." in name and name.endswith(".json")]
        for index in indexes:
            try:
                shards = read_json(os.path.join(self.path, "snapshots", commit, index), index).get("weight_map")
            except (OSError, FormatError):
                return False
            if not isinstance(shards, dict) or not all(isinstance(x, str) and x in names for x in shards.values()):
                return False
        if indexes:
            return True
        weights = [name for name in names if name.endswith(_WEIGHTS)]
        sets = [match for name in weights if (match := _SHARD.fullmatch(name))]
        return bool(weights) and all(
            f"{match[1]}-{number:05}-of-{match[3]}{match[4]}" in names
            for match in sets
            for number in range(1, min(int(match[3]), len(names) + 1) + 1)
        )


def repositories(failures: list[OSError]) -> Iterator[tuple[str, CachedRepository]]:
    """Iterate over the models in the cache, by owner and name."""
    folder = hub_folder()
    for match in filter(None, map(_FOLDER.fullmatch, folder_names(folder, failures))):
        yield match[1].replace("--", "/", 1), CachedRepository(os.path.join(folder, match[0]))


def _walk(folder: str) -> Iterator[tuple[str, ...]]:
    """Iterate over the files below a folder, as components; links to folders are not followed."""
    count = 0
    for place, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        if count > MAX_FILES:
            return
        folders[:] = filter(_COMPONENT.fullmatch, folders)
        parts = () if place == folder else os.path.relpath(place, folder).split(os.sep)
        yield from ((*parts, name) for name in names if _COMPONENT.fullmatch(name))
