"""Explanations of paths that do not exist: a URL, a repository of the Hub, a glob, or an unexpanded ``~``.

They are looked up only after a call has failed, so other calls pay nothing.
"""

from __future__ import annotations

import glob
import os
import re

from .hub_cache import CachedRepository
from .url import is_url, of_page, shown

# A scheme has at least two letters, unlike a Windows drive. `pathlib` turns "https://host" into "https:/host".
_URL = r"(?s:([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*))"
# Schemes that work without `storage_options`, and all schemes recognized even with a single slash.
_PLAIN = {"hf", "http", "https", "s3", "gs", "az"}
_SCHEMES = {*_PLAIN, "file", "ftp", "gcs", "abfs", "abfss"}

# "owner/name" by the Hub's rules (huggingface_hub.utils.validate_repo_id); old names have no owner.
_REPOSITORY = r"(?a:(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95})"
# The suffix of a file, which repositories rarely have.
_FILE = r"\.[a-z][a-z0-9]{1,10}$"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pth", ".pt", "model_index.json")


def describe(path: str) -> tuple[str, str] | None:
    """Explain a path that does not exist. None if there is no explanation."""
    if (url := of_url(path)) is not None:
        return url
    if path.startswith("hf:") and re.fullmatch(_REPOSITORY, path[len("hf:") :]) is not None:
        return path, f'for a repository of the Hugging Face Hub: safeload.open("hf://{path[len("hf:") :]}")'
    advice = _of_home(path) or _of_pattern(path) or _of_hub(path)
    return None if advice is None else (path, advice)


# ---- URLs ----


def of_url(path: str, *, writes: bool = False) -> tuple[str, str] | None:
    """Explain a URL that a function for local files reads or writes."""
    verb, advice = "reads", "safeload.load(URL, storage_options={}) reads it over the network"
    if writes:
        verb, advice = "writes", "safeload.convert(..., URL) writes folders in stores"
    backslashes = os.name == "nt" or path.partition(":")[0].lower() in _SCHEMES
    match = re.fullmatch(_URL, path.replace("\\", "/") if backslashes else path)
    if match is None or not (match[2] or match[1].lower() in _SCHEMES):
        return (shown(path), f"this function {verb} local files: {advice}") if is_url(path) else None
    scheme, rest = match[1].lower(), match[3]
    if scheme == "file":
        rest = shown(f"file://{rest}").removeprefix("file://")
        local = rest if rest.startswith("/") or match[2] else f"/{rest}"
        return None if writes else (f"file:/{match[2]}{rest}", f"this is a URL: pass the path itself, {local!r}")
    url = shown(f"{scheme}://{rest}")
    why = f"this function {verb} local files" if match[2] else "pass a URL as str, because pathlib changes it"
    if writes:
        return url, f"{why}: {advice}"
    if url.endswith(".json") and not url.endswith("index.json"):
        return url, why  # no weights
    page = of_page(url)
    argument = "URL" if url != f"{scheme}://{rest}" and page is None else f'"{page or url}"'
    options = "" if scheme in _PLAIN else ", storage_options={}"
    return url, f"{why}: safeload.load({argument}{options}) reads it over the network"


# ---- local paths ----


def _of_home(path: str) -> str | None:
    if not path.startswith("~"):
        return None
    expanded = os.path.expanduser(path)
    exists = "" if os.path.exists(expanded) else ", which does not exist either"
    return f"`~` is not expanded: os.path.expanduser gives {expanded!r}{exists}" if expanded != path else None


def _of_pattern(path: str) -> str | None:
    if not glob.has_magic(path):
        return None
    if glob.has_magic(os.path.dirname(path)):  # searching for a match could take long
        return "patterns are not expanded: pass a list of paths" if "*" in path else None
    if next(glob.iglob(path), None) is None:
        return "patterns are not expanded, and no file matches this pattern" if "*" in path else None
    return "patterns are not expanded: pass safeload.open a list such as sorted(glob.glob(...))"


def _of_hub(path: str) -> str | None:
    path = (path.replace("\\", "/") if os.name == "nt" else path).removesuffix("/")
    if re.fullmatch(_REPOSITORY, path) is None:
        return None
    snapshot = _cached(path)
    if snapshot is not None:
        return f"huggingface_hub's cache has this repository: safeload.open({snapshot!r})"
    owner, slash, _ = path.partition("/")
    if not slash or os.path.exists(owner) or re.search(_FILE, path):
        return None
    return f'for a repository of the Hugging Face Hub: safeload.open("hf://{path}")'


def _cached(repository: str) -> str | None:
    """Return the newest commit with weights in huggingface_hub's local cache, main's if it has some, or None."""
    cached = CachedRepository.of("model", repository)
    folders = {commit: os.path.join(cached.path, "snapshots", commit) for commit in cached.commits()}
    newest_first = sorted(folders, key=lambda commit: os.lstat(folders[commit]).st_mtime, reverse=True)
    for commit in filter(None, (cached.commit_of("main"), *newest_first)):
        if any(name.endswith(_WEIGHTS) and "/" not in name for name in cached.files(commit)):
            return folders[commit]
    return None
