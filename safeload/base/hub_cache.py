"""Where huggingface_hub keeps downloaded repositories: https://huggingface.co/docs/huggingface_hub/guides/manage-cache."""

from __future__ import annotations

import os


def folder() -> str:
    """Return the folder of the cache, which may not exist."""
    for variable, inner in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if path := os.environ.get(variable):
            path = os.path.expanduser(os.path.expandvars(path))
            return os.path.join(path, inner) if inner else path
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "huggingface", "hub")


def repository(kind: str, name: str) -> str:
    """Return the folder of a repository.

    Args:
        kind: "model", "dataset" or "space".
        name: owner and name.
    """
    return os.path.join(folder(), f"{kind}s--{name.replace('/', '--')}")
