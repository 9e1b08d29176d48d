"""Records of origin: sources, call and files of a conversion, as JSON beside the result.

The record is the manifest of the result with one more key: ``{"safeload_manifest": 1, "files": {name: {"size",
"sha256"}}, "origin": {"version", "options", "sources"}}``. So `verify` needs no code of its own to find and compare it.
It stands beside the result, because a file cannot hold its own digest, and so that every format has the same record:
``origin.json`` in a folder, ``NAME.origin.json`` beside a file.

A source has a ``name`` without folders, or a ``url`` without credentials, and its ``files`` by relative name, with size
and ``sha256``; a file at a URL has the ``version`` that its store states instead, because it would be read twice. A
source from the Hub has ``repository`` and ``revision``. Paths of this machine appear nowhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from contextvars import copy_context
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias

from .._version import __version__
from ..core.checkpoint import Checkpoint, folder_of, index_of, recipe_of
from ..core.files import LOCAL, Location, sha256_of
from ..core.names import pairs_of
from ..core.packing import parse_scheme
from ..core.registry import SAFETENSORS
from ..core.text import show
from ..errors import SafeloadError
from ..quant.quantization import BESIDE
from ..remote.hub_cache import COMMIT, place_in_cache
from .sink import DIGITS, LARGEST_EXTRA, is_extra

if TYPE_CHECKING:  # the commands that verify import this module, but not these
    from .catalog import Catalog
    from .decide import ConvertRequest

MANIFEST_KEY, MANIFEST_VERSION = "safeload_manifest", 1
ORIGIN_KEY, ORIGIN_NAME = "origin", "origin.json"
# Returns the record of a result, given size and SHA-256 of its files.
Record: TypeAlias = Callable[[Mapping[str, Mapping[str, Any]]], bytes]
_THREADS = 4  # that hash sources
_LONGEST = 200  # characters of an option in a record; longer options are recorded as a digest
_COMMIT = re.compile(r"hf://([^@]+)@([0-9a-f]{40})(?:/|\Z)", re.ASCII)


def is_manifest(head: bytes) -> bool:
    """Return True if a file with these first bytes is a manifest or record by safeload."""
    return re.match(rb'\s*\{\s*"%s"\s*:' % MANIFEST_KEY.encode(), head) is not None


def entry_of(place: Location | bytes, tick: Callable[[int], object] = bool) -> dict[str, Any]:
    """Return size and SHA-256 of a file or of its content; ``tick`` gets the bytes of each piece."""
    if isinstance(place, bytes):
        return {"size": len(place), "sha256": hashlib.sha256(place).hexdigest()}
    with closing(place.files.open(place.path)) as store:
        return {"size": store.size, "sha256": sha256_of(store, place.shown, tick)}


def recorder(stack: ExitStack, catalog: Catalog, request: ConvertRequest) -> Record:
    """Hash the sources on threads while they are converted; the record waits for their description."""
    options, arguments = {**plain_options(request), "format": request.format}, dict[str, Any](request.options)
    if arguments["raw"]:
        options["raw"] = True
    if arguments["max_shard_size"] is None:
        del options["max_shard_size"]
    options |= {key: _names_in(arguments[key]) for key in ("adapters", "imatrix") if key in options}  # paths
    stopped, pool = Event(), ThreadPoolExecutor(_THREADS, "safeload-digest")

    def tick(_: int) -> None:
        if stopped.is_set():
            raise InterruptedError

    stack.callback(pool.shutdown, cancel_futures=True)
    stack.callback(stopped.set)
    sources = []
    for checkpoint in catalog.checkpoints:
        about, places = _about(checkpoint), _files_of(checkpoint)
        files: dict[str, Any] = {
            name: pool.submit(copy_context().run, entry_of, place, tick) for name, place in places.items()
        }
        for file in checkpoint.weight_files if not places else ():
            version = next(iter(file.identity[1:]), None)
            files[os.path.basename(file.path)] = {"size": file.size, "version": "" if version is None else str(version)}
        sources.append({**about, "files": files})
    if catalog.in_memory:
        sources.append({"name": "tensors in memory", "files": {}})

    def record(files: Mapping[str, Mapping[str, Any]]) -> bytes:
        for source in sources:
            listed = source["files"]
            source["files"] = {
                name: entry.result() if isinstance(entry, Future) else entry for name, entry in sorted(listed.items())
            }
        origin = {"version": __version__, "options": options, "sources": sources}
        content = {MANIFEST_KEY: MANIFEST_VERSION, "files": dict(sorted(files.items())), ORIGIN_KEY: origin}
        return (json.dumps(content, indent=1, default=str) + "\n").encode("utf-8", "backslashreplace")

    return record


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name a source: without folders and credentials."""
    file = next(iter(checkpoint.weight_files), None)
    if file is None or not file.files.remote:
        about = {"name": os.path.basename(os.path.abspath(checkpoint.path))}
        kind, repository, revision = place_in_cache(checkpoint.path) or ("", "", "")
        if kind != "models" or "/" not in repository or not COMMIT.fullmatch(revision):
            return about
    else:
        recipe = recipe_of(checkpoint)
        url = recipe.files.shown(recipe.paths[0])
        with suppress(SafeloadError):  # at the commit that was read
            url = recipe.files.public(recipe.files.absolute(recipe.paths[0]))
        about, match = {"url": url.partition("?")[0]}, _COMMIT.match(url)
        if match is None:
            return about
        repository, revision = match[1], match[2]
    return {**about, "repository": repository, "revision": revision}


def _files_of(checkpoint: Checkpoint) -> dict[str, Location]:
    """Return the local files that decide the result, by relative name; none at a URL."""
    weights = checkpoint.weight_files
    if any(file.files is not LOCAL for file in weights):
        return {}
    folder, index = folder_of(checkpoint), index_of(checkpoint)
    if folder is None:
        return {os.path.basename(file.place): Location(LOCAL, file.place) for file in weights}
    root = os.path.abspath(folder.path)
    beside = [name for name in sorted(os.listdir(root)) if name in BESIDE or is_extra(name)]
    paths = [*(file.place for file in weights), *([] if index is None else [index.path])]
    paths += (path for name in beside if os.path.isfile(path := os.path.join(root, name)))
    return {
        os.path.relpath(os.path.abspath(path), root).replace(os.sep, "/").removeprefix("../"): Location(LOCAL, path)
        for path in paths
    }


def with_record(
    record: Record,
    files: Mapping[str, bytes | Location],  # beside the shards, see `Sink.commit`
    shards: Mapping[str, Mapping[str, Any]],  # size and SHA-256
) -> dict[str, bytes | Location]:
    """Return the files beside the shards of a folder, and its record."""
    listed = {name: entry_of(content) for name, content in files.items()}
    small = {name: entry for name, entry in listed.items() if entry["size"] <= LARGEST_EXTRA}  # the rest is not copied
    return {**files, ORIGIN_NAME: record({**shards, **small})}


def _names_in(value: Any) -> Any:
    """Return the last part of each path in an option."""
    if isinstance(value, (list, tuple)):
        return [*map(_names_in, value)]
    return os.path.basename(os.fspath(value).rstrip("/\\")) if isinstance(value, (str, os.PathLike)) else value


def digest_of(value: Any) -> str:
    """Return a short hash of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def plain_options(request: ConvertRequest) -> dict[str, Any]:
    """Return the options that distinguish plans, as plain data."""
    from ..adapters.adapter import listed  # only here: readers of records merge nothing

    given, preset = request.options, request.preset
    quantize: Any = given["quantize"]
    if isinstance(quantize, Mapping):
        quantize = {pattern: scheme and parse_scheme(scheme) for pattern, scheme in quantize.items()}
    elif quantize is not None:
        quantize = parse_scheme(quantize) if preset is None else preset.name
    plain = {
        **given,
        "dtype": None if request.target is None else request.target.name,
        "quantize": quantize,
        "layout": None if given["layout"] is None else given["layout"].to_json(),
        "keep": "a function" if callable(given["keep"]) else given["keep"],
        "rename": texts_of(given["rename"]) or None,
        "metadata": given["metadata"] or None,
        "adapters": [[str(path), weight] for path, weight in listed(given["adapters"])] or None,
        "max_shard_size": request.limit,
        "extras": given["extras"] and None,
        # A folder has safetensors shards, `raw` applies to GGUF, and the sources have the options that are not secret.
        **dict.fromkeys(("format", "raw", "storage_options")),
    }
    options = {}
    for key, value in plain.items():
        text = json.dumps(value, sort_keys=True, default=str)
        if len(text) > _LONGEST:
            options[key] = f"{text[:40]}... (SHA-256 {digest_of(value)})"
        elif value is not None:
            options[key] = json.loads(text)
    return options


def texts_of(rename: Any) -> list[list[str]]:
    """Return the pairs of ``rename`` as plain data."""
    pairs = []
    for pattern, replacement in pairs_of(rename):
        if isinstance(pattern, re.Pattern):
            if pattern.flags & ~re.UNICODE:
                text = "rename: plans and records store patterns as text; write the flags of"
                raise ValueError(f"{text} {show(pattern.pattern)} inline, such as (?i)")
            pattern = pattern.pattern
        if not isinstance(replacement, str):
            raise ValueError("rename: plans and records are text, and cannot hold a function")
        pairs.append([pattern, replacement])
    return pairs


# Formats whose writers hash a file while they write it in order; a file of another format is read again.
HASHED = (SAFETENSORS, "gguf")
