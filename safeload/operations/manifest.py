"""SHA-256 of every tensor, so that a corrupted download or a changed tensor is named.

A manifest is JSON: ``{"safeload_manifest": 1, "tensors": {name: {"dtype", "shape", "sha256"}}}``. The hash
covers the bytes of the elements in C order, little-endian, and then those of the scales of quantized int8, or of the
other parts of packed tensors, so that the same tensors in another file format have the same hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..base import log
from ..base.paths import PathLike, native_path
from ..base.text import show
from ..engine.jobs import native_order
from ..engine.pieces import Meter, in_order, source_pieces
from ..engine.progress import Progress
from ..engine.quantized_tensor import QuantizedTensor
from ..engine.source import Source
from ..errors import FormatError
from .catalog import Catalog, Given
from .validate.findings import Finding, error

KEY, VERSION = "safeload_manifest", 1

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def make(given: Given, *, threads: int | None = None, progress: Progress = None) -> dict[str, Any]:
    """Makes the manifest of a checkpoint. Tensors are read on several threads, a piece at a time.

    Raises:
        FormatError: a file ends too early, with path and offset.
        OSError: a file cannot be read.
    """
    with Catalog.of(given) as catalog:
        names = list(catalog)
        total = sum(catalog.about(name).nbytes for name in names)
        meter = Meter(progress, total)

        def entry(name: str) -> dict[str, Any]:
            found = _entry(catalog.source(name), meter)
            log.debug("sha256 of %s: %s", name, found["sha256"])
            return found

        entries = in_order(entry, names, threads, total)
        return {KEY: VERSION, "tensors": dict(zip(names, entries, strict=True))}


def _entry(value: Source | QuantizedTensor, meter: Meter) -> dict[str, Any]:
    digest = hashlib.sha256()
    dtype = value.scheme if isinstance(value, QuantizedTensor) else value.row.code
    pieces = _array_pieces(value) if isinstance(value, QuantizedTensor) else source_pieces(value)
    for piece in pieces:
        digest.update(piece)
        meter.add(len(piece))
    return {"dtype": dtype, "shape": list(value.shape), "sha256": digest.hexdigest()}


def _array_pieces(value: QuantizedTensor) -> Iterator[memoryview]:
    for array in value.parts.values():
        if array.size:
            yield native_order(np.ascontiguousarray(array)).reshape(-1).view(np.uint8).data


def read(path: PathLike) -> dict[str, Any]:
    """Reads a manifest.

    Raises:
        FormatError: the file is not a manifest.
        OSError: it cannot be read.
    """
    from ..stores.json_file import read_json

    text = native_path(path)[0]
    found: dict[str, Any] = read_json(text, "the manifest")
    tensors = found.get("tensors")
    if found.get(KEY) != VERSION or not isinstance(tensors, dict):
        raise FormatError(f'a manifest must be {{"{KEY}": {VERSION}, "tensors": {{...}}}}', text)
    for name, entry in tensors.items():
        good = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
        if not good or not isinstance(entry.get("sha256"), str) or not _SHA256.fullmatch(entry["sha256"]):
            raise FormatError(f"manifest: the entry of {show(name)} must have dtype, shape and sha256", text)
    return found


def compare(said: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Finding]:
    """Finds what has changed since a manifest was written.

    Args:
        said: the manifest.
        found: the manifest of the current file.
    """
    before, now = said["tensors"], found["tensors"]
    for name, entry in before.items():
        other = now.get(name)
        if other is None:
            yield error("manifest.missing", name, "is in the manifest, but not in the file")
        elif (entry["dtype"], entry["shape"]) != (other["dtype"], other["shape"]):
            message = f"is {other['dtype']} {other['shape']}, but {entry['dtype']} {entry['shape']} in the manifest"
            yield error("manifest.changed", name, message)
        elif entry["sha256"] != other["sha256"]:
            message = f"has SHA-256 {other['sha256'][:16]}..., but {entry['sha256'][:16]}... in the manifest"
            yield error("manifest.changed", name, message)
    for name in now:
        if name not in before:
            yield error("manifest.unexpected", name, "is in the file, but not in the manifest")
