"""Paths from callers, for messages and for the C core; why a path may not exist; where the Hub's files are kept."""

from __future__ import annotations

import errno
import os
import re
import sys

from ..errors import UnsupportedError, missing_file
from .text import clip, error_about, printable, show

PathLike = str | os.PathLike[str]

# In bytes: the limit of Windows, which is far above PATH_MAX of other systems.
_LONGEST_PATH = 65_536
# How the C core takes paths: as `os.fsencode` encodes them, a closure for whose cells threads contend without the GIL,
# but on Windows in strict UTF-8.
_SYSTEM = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_ENCODING, _ERRORS = map(sys.intern, ("utf-8", "strict") if os.name == "nt" else _SYSTEM)
# PATH_MAX of Linux. Bytes are rarely a path; by mistake they can be the content of a file.
_LONGEST_BYTES = 4096
# Errors if a path does not exist: a signed URL is too long, and "owner/name" may have a file "owner".
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
# Windows' ERROR_INVALID_NAME and ERROR_BAD_PATHNAME for a URL: EINVAL in Python, ENOENT in the C core.
_INVALID = (123, 161)


def native_path(path: PathLike) -> tuple[str, bytes]:
    """Return a path as text for messages and encoded for the C core."""
    if isinstance(path, (bytes, bytearray, memoryview)) and (
        not isinstance(path, bytes) or len(path) > _LONGEST_BYTES or 0 in path
    ):
        raise TypeError(
            f"expected a path, got the content of a file ({type(path).__name__} of length {len(path):,}): "
            "load it with safeload.numpy.load(data)"
        )
    fs_path = os.fspath(path)
    text = fs_path if isinstance(fs_path, str) else os.fsdecode(fs_path)
    try:
        encoded = text.encode(_ENCODING, _ERRORS)
    except UnicodeEncodeError:
        raise ValueError(f"lone surrogate in path {show(text)}") from None
    if b"\0" in encoded:
        raise ValueError(f"embedded null byte in path {show(text)}")
    if len(encoded) > _LONGEST_PATH:
        raise os_error(errno.ENAMETOOLONG, show(text))
    return text, encoded


def private_text(path: str) -> str:
    """Return a copy of a path unless `native_path` refuses it: threads would contend for a caller's without the GIL."""
    return native_path(path)[1].decode(_ENCODING, _ERRORS)


def os_error(number: int, path: str | None) -> OSError:
    """Return the ``OSError`` subclass for an errno; if the path does not exist, the message explains why."""
    if number in _MISSING and path is not None:
        link = dangling(path)
        if link:
            return missing_file(path, f"No such file or directory: {path}{link}")
        known = describe(path)
        if known is not None:
            return missing_file(known[0], f"No such file or directory: {known[0]}; {known[1]}")
    if number == errno.ENOENT:
        return missing_file(path, f"No such file or directory: {path}")
    return OSError(number, os.strerror(number), path)


def unwritable(error: OSError, path: str) -> OSError:
    """Return the error to raise for a failed write; for a URL it says, without secrets, how to write there."""
    if error.errno not in _MISSING and getattr(error, "winerror", None) not in _INVALID:
        return error
    known = of_url(path, writes=True)
    return error if known is None else missing_file(known[0], f"No such file or directory: {known[0]}; {known[1]}")


def folder_names(folder: str, failures: list[OSError]) -> list[str]:
    """Return the sorted names in a folder, none if it is missing; add an error to the failures."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        failures.append(error)
        return []


def absolute(path: str) -> str:
    """Return a path that stays valid when the working directory changes."""
    if path.startswith("/") and os.name != "nt":  # the fast path, because every open calls this
        return path
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory has been deleted
        return path


def is_bare(name: str) -> bool:
    """Return True for the bare name of a file: metadata and indexes must not refer to files outside its folder."""
    return bool(name) and name not in (".", "..") and not any(c in "\0/\\:" or "\ud800" <= c <= "\udfff" for c in name)


# ---- downloaded repositories: https://huggingface.co/docs/huggingface_hub/guides/manage-cache ----

# Longest text of a ref.
_LONGEST_REF = 200


def hub_folder() -> str:
    """Return the folder of the cache, which may not exist."""
    for variable, inner in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if path := os.environ.get(variable):
            path = os.path.expanduser(os.path.expandvars(path))
            return os.path.join(path, inner) if inner else path
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "huggingface", "hub")


def hub_repository(kind: str, name: str) -> str:
    """Return the folder of a repository."""
    return os.path.join(hub_folder(), f"{kind}s--{name.replace('/', '--')}")


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


# ---- explanations of paths that do not exist: a URL, a repository of the Hub, a glob, or an unexpanded ``~`` ----

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


def dangling(path: object) -> str:
    """Describe a link without a target, as an addition to its path; "" for any other path."""
    try:
        if isinstance(path, str) and os.path.islink(path) and not os.path.exists(path):
            return f", a link to {printable(os.readlink(path))}, which does not exist"
    except (OSError, ValueError):
        pass
    return ""


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
    from .url import is_url, of_page, shown  # here and below: only after a call has failed, so others pay nothing

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
    import glob

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
    """Return the folder of a repository with weights in huggingface_hub's local cache, or None."""
    cache = hub_repository("model", repository)
    folders = os.path.join(cache, "snapshots")
    try:
        revisions = sorted(os.listdir(folders), key=lambda name: os.path.getmtime(os.path.join(folders, name)))
        for name in filter(None, (ref_of(cache, "main"), *reversed(revisions))):
            folder = os.path.join(folders, name)
            if os.path.basename(name) == name and any(file.endswith(_WEIGHTS) for file in os.listdir(folder)):
                return folder
    except (OSError, ValueError):
        pass
    return None
