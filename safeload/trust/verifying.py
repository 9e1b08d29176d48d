"""Choose what to verify files against: a manifest, a signature, or the digests of a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from ..core.files import LOCAL, Files
from ..core.json_file import MAX_JSON, parse_json
from ..core.signature import Signature, Verify
from ..core.store import read_at, sha256_of
from ..core.text import show
from ..errors import FormatError, LimitError, SafeloadError, VerificationError
from ..remote.places import places_of
from . import digests
from .digests import GIT_PATHS, MANIFEST_KEY, SIGNATURE_KEY, Expected, is_manifest, refused, signed_files

_HUB, _OLLAMA = "the Hub's cache", "ollama's store"
_MANIFEST_PROOF = "integrity only: a manifest does not say who made it"
# First bytes that distinguish a manifest by safeload from other JSON.
_START = 64
# Largest number of JSON files beside weights to look at.
_MOST_BESIDE = 1000
# Levels of folders.
_LEVELS = 32
# Suffixes of remote paths that are files, so that no request asks.
_FILE_SUFFIXES = (".safetensors", ".json", ".gguf", ".bin", ".pt", ".pth", ".npz", ".npy", ".ckpt")


def expected_of(
    texts: Sequence[str], files: Files, verify: Verify, storage_options: Mapping[str, Any] | None = None
) -> Expected:
    """Return the expected digests of paths."""
    if getattr(files, "heads", None) is not None:
        raise VerificationError("a file object has no name that a manifest or signature could list: pass its path")
    if not texts:
        raise ValueError("the list of paths is empty; pass at least one")
    path = texts[0]
    if verify is True:
        return _beside(path, files)
    if not isinstance(verify, (str, os.PathLike, Signature)):
        raise TypeError(f"verify must be True, a path or a safeload.Signature, got {show(verify)}")
    signature = verify if isinstance(verify, Signature) else Signature(verify)
    (text,), beside = places_of((signature.path,), storage_options)
    return _expected(text, beside, signature if verify is signature else None, path, files)


def _expected(document: str, beside: Files, signature: Signature | None, path: str, files: Files) -> Expected:
    """Return the digests in a document: in a ``signature``, or in what it is by its keys if that is None."""
    source, folder = beside.shown(document), beside.split(beside.absolute(document))[0]
    with closing(beside.open(document)) as store:
        if store.size > MAX_JSON:
            text = f"the manifest or signature has {store.size:,} bytes, but the limit is {MAX_JSON:,}"
            raise refused(text, source)
        content = read_at(store, 0, store.size)
    if signature is None:
        ours, fields, fault = is_manifest(content[:_START]), dict[str, Any](), ""
        try:
            fields = parse_json(content, "the manifest" if ours else "the file", source)
        except FormatError as error:
            if ours:
                raise refused(f"not a manifest: {error}", source) from None
            fault = f": {error.args[0]}"
        if ours or MANIFEST_KEY in fields:
            if fields.get(MANIFEST_KEY) != digests.MANIFEST_VERSION:
                raise refused(f"a manifest must have {MANIFEST_KEY!r}: {digests.MANIFEST_VERSION}", source)
            listed = digests.files_of_manifest(fields, source)
            if listed is None:
                text = "the manifest lists tensors, but no files: write it again with safeload check --write-manifest"
                raise refused(f"{text}, or compare tensors with safeload check --manifest", source)
            return Expected(source, _MANIFEST_PROOF, _root(path, files, folder, listed), listed, GIT_PATHS)
        if SIGNATURE_KEY not in fields:
            text = f"neither a manifest, as `safeload check PATH --write-manifest FILE` writes it ({MANIFEST_KEY!r}), "
            raise refused(f"{text}nor an OpenSSF model signature ({SIGNATURE_KEY!r}){fault}", source)
        signature = Signature(document)
    signed = signed_files(content, signature, source)
    root = _root(path, files, folder, signed.files or {})
    return signed._replace(root=root, alone="" if files.is_folder(path) else files.absolute(path))


def _root(path: str, files: Files, folder: str, names: Mapping[str, Any]) -> str:
    """Return the folder that names are relative to: the model's, or the signature's if it lists the model below it."""
    own, top = _folder_of(path, files), folder.rstrip("/\\")
    if own.startswith(f"{top}/") or (os.sep != "/" and own.startswith(folder + os.sep)):
        inner = own[len(top) + 1 :].replace(os.sep, "/")
        if any(name.startswith(f"{inner}/") for name in names):
            return top
    return own


def _folder_of(path: str, files: Files) -> str:
    """Return the absolute path of a model's folder."""
    place = files.absolute(path)
    is_file = place.endswith(_FILE_SUFFIXES) and files.remote
    folder = place if not is_file and files.is_folder(path) else files.split(place.rstrip("/"))[0]
    return folder.rstrip("/\\") or folder


def _beside(path: str, files: Files) -> Expected:
    """Return the digests next to the files: of a signature, a manifest or a cache."""
    steps = [] if files.remote else os.path.abspath(path).split(os.sep)
    snapshots = [k for k, step in enumerate(steps[:-1]) if step == "snapshots"]  # of the Hub's cache
    if path.startswith("hf://") or any(os.path.isdir(os.sep.join([*steps[:k], "blobs"])) for k in snapshots):
        return Expected(_HUB)
    if files.remote:
        text = "nothing to verify against: for a URL, pass the path of a manifest or a safeload.Signature"
        raise refused(text, files.shown(path))
    if digests.digest_in_cache(path) is not None:
        return Expected(_OLLAMA)
    signature = signature_beside(path)
    if os.path.lexists(signature):
        return _expected(signature, LOCAL, Signature(signature), path, files)
    manifests = list(_manifests_in(path if os.path.isdir(path) else os.path.dirname(path)))
    if len(manifests) == 1:
        return _expected(manifests[0], LOCAL, None, path, files)
    text = f"nothing to verify against: no {digests.SIGNATURE_NAME}, manifest or cache has digests of it. "
    text += "To write a manifest of trusted files, run `safeload check PATH --write-manifest FILE`"
    if manifests:
        names = ", ".join(show(os.path.basename(name)) for name in manifests[:4])
        text = f"{len(manifests)} manifests beside it: {names}; pass one of them"
    raise refused(text, files.shown(path))


def signature_beside(path: str) -> str:
    """Return where the signature of a model stands: ``model.sig`` in its folder, or beside a file of the same name."""
    if "://" in path:
        return f"{path.rstrip('/')}/{digests.SIGNATURE_NAME}"
    if os.path.isdir(path):
        return os.path.join(path, digests.SIGNATURE_NAME)
    alone = f"{path}.sig"
    return alone if os.path.lexists(alone) else os.path.join(os.path.dirname(path), digests.SIGNATURE_NAME)


def _manifests_in(folder: str) -> Iterator[str]:
    """Iterate over the manifests by safeload in a local folder, judging by their first bytes."""
    with suppress(OSError):
        names = [name for name in sorted(os.listdir(folder or ".")) if name.endswith(".json")]
        for path in (os.path.join(folder, name) for name in names[:_MOST_BESIDE]):
            with suppress(OSError):
                if os.path.isfile(path):  # a pipe could block
                    with open(path, "rb") as file:
                        start = file.read(_START)
                    if is_manifest(start):
                        yield path


def walk(
    root: str, files: Files, failed: Callable[[str, Exception], object] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the relative name and the path of each file below a folder, hidden files too if they are local."""
    # `failed` gets each folder that cannot be listed, or is too deep, and the error; None raises the error.
    visited: set[tuple[int, int]] = set()
    waiting = [("", root, 0)]
    while waiting:
        before, folder, level = waiting.pop()
        try:
            if not files.remote:
                status = os.stat(folder)
                if status.st_ino and (status.st_dev, status.st_ino) in visited:  # a link to a folder above
                    continue
                visited.add((status.st_dev, status.st_ino))
                listing = [(name, os.path.isdir(os.path.join(folder, name))) for name in sorted(os.listdir(folder))]
            else:
                listing = files.listing(folder)
        except (OSError, SafeloadError) as error:
            if failed is None:
                raise
            failed(files.shown(folder), error)
            continue
        folders = [name for name, is_folder in listing if is_folder]
        if folders and level >= _LEVELS:
            path, message = files.shown(folder), f"folders are nested more than {_LEVELS} levels deep"
            if failed is None:
                raise LimitError(message, path=path)
            failed(path, LimitError(message, path=path))
            folders = []
        waiting += [(f"{before}{name}/", files.join(folder, name), level + 1) for name in reversed(folders)]
        yield from ((f"{before}{name}", files.join(folder, name)) for name, is_folder in listing if not is_folder)


def entry_of(path: str, tick: Callable[[int], object] = bool) -> dict[str, Any]:
    """Return size and SHA-256 of a local file; ``tick`` gets the bytes of each piece."""
    with closing(LOCAL.open(path)) as store:
        return {"size": store.size, "sha256": sha256_of(store, path, tick)}
