"""Where huggingface_hub keeps downloaded repositories: https://huggingface.co/docs/huggingface_hub/guides/manage-cache."""

from __future__ import annotations

import os

from ..errors import UnsupportedError
from .text import clip, error_about, printable

# Longest text of a ref.
_LONGEST_REF = 200


def folder() -> str:
    """Return the folder of the cache, which may not exist."""
    for variable, inner in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if path := os.environ.get(variable):
            path = os.path.expanduser(os.path.expandvars(path))
            return os.path.join(path, inner) if inner else path
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "huggingface", "hub")


def repository(kind: str, name: str) -> str:
    """Return the folder of a repository."""
    return os.path.join(folder(), f"{kind}s--{name.replace('/', '--')}")


def ref_of(path: str, *names: str) -> str:
    """Return the commit of a branch or tag in the folder of a repository; "" if it cannot be read."""
    place = os.path.join(path, "refs", *names)
    try:
        if os.path.isfile(place):  # a FIFO would block
            with open(place, encoding="ascii") as file:
                return file.read(_LONGEST_REF).strip()
    except (OSError, ValueError):
        pass
    return ""


def snapshot_of(path: str) -> str | None:
    """Return the snapshot for a repository folder: main's, or the only snapshot. None for any other folder."""
    snapshots = os.path.join(path, "snapshots")
    if not os.path.isdir(snapshots) or not os.path.isdir(os.path.join(path, "blobs")):
        return None
    main = ref_of(path, "main")
    if main and os.path.basename(main) == main and os.path.isdir(os.path.join(snapshots, main)):
        return os.path.join(snapshots, main)
    revisions = sorted(entry.name for entry in os.scandir(snapshots) if entry.is_dir())
    if len(revisions) > 1:
        listed = ", ".join(clip(printable(name), 100) for name in revisions[:20])
        text = f"{len(revisions)} snapshots: {listed}; open one of snapshots/"
        raise error_about(UnsupportedError, text, path=path)
    return os.path.join(snapshots, revisions[0]) if revisions else None
