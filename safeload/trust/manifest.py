"""The tensors of manifests: a SHA-256 for each, to name the tensors that a download or an edit has changed.

A manifest is JSON: ``{"safeload_manifest": 1, "tensors": {name: {"dtype", "shape", "sha256", "restoring"}}, "files":
{name: {"size", "sha256"}}}``. `verify` writes it and compares; `trust.digests` reads its files.

- ``sha256`` covers the elements in C order, little-endian, followed by the scales of int8 or by the remaining parts of
  a packed tensor. It does not depend on the file format.
- ``restoring``, for int8 and packed tensors, covers the settings for decoding stored bytes: the axis of scales, block
  sizes, conventions of zero points, and the dtype of each part. Early manifests lack it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ..conversion.catalog import Catalog, Given
from ..conversion.executors import Executor, opened, pieces_of, run_pieces
from ..conversion.origin import MANIFEST_KEY, MANIFEST_VERSION
from ..core import dtypes
from ..core.jobs import native_order
from ..core.memory import thread_count
from ..core.packing import Grid, Packing, Zeros
from ..core.progress import Meter, Progress
from ..core.quantized_tensor import QuantizedTensor
from ..core.source import file_pieces, source_pieces
from ..core.tensors import packed_of
from ..core.text import debug, plural, show, warning
from ..core.thread_group import in_order
from ..errors import exported
from .digests import refused

RESTORING = "restoring"

# Fields of `Packing` outside ``restoring``: stored under other keys, or without effect on values.
_UNHASHED = ("family", "label", "shape", "config")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@exported()
class TensorCheck(NamedTuple):
    """A tensor in a `VerifyReport`.

    Attributes:
        tensor: name of the tensor.
        status: "ok", "changed", "missing" or "not covered".
        reason: why it is not "ok".
    """

    tensor: str
    status: Literal["ok", "changed", "missing", "not covered"]
    reason: str


def make(
    given: Given, *, executor: Executor | None = None, threads: int | None = None, progress: Progress = None
) -> dict[str, Any]:
    """Make the manifest of a checkpoint; an executor reads groups of tensors elsewhere, with an identical result."""
    with Catalog.of(given) as catalog:
        sizes = catalog.sizes([*catalog])
        if executor is None:
            entries = _entries(catalog, sizes, threads, progress)
        else:
            pieces = pieces_of(sizes, catalog, operation="manifest")
            entries = run_pieces(run, pieces, executor, threads=threads, progress=progress).get("tensors", {})
        return {MANIFEST_KEY: MANIFEST_VERSION, "tensors": {name: entries[name] for name in sizes}}


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the entries of the tensors of a piece; see `run_piece`."""
    with opened(piece, storage_options) as (names, (catalog,)):
        return {"tensors": _entries(catalog, catalog.sizes(names), threads, None)}


def _entries(
    catalog: Catalog, sizes: Mapping[str, int], threads: int | None, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Return the entries of tensors, given their sizes in bytes."""
    total = sum(sizes.values())
    entry = partial(_entry, catalog, Meter(progress, total))
    return dict(zip(sizes, in_order(entry, sizes, thread_count(total, threads)), strict=True))


def _entry(catalog: Catalog, meter: Meter, name: str) -> dict[str, Any]:
    digest, (_, file, index) = hashlib.sha256(), catalog.place(name)
    packed = packed_of(file, index) if file is not None and file.table.quantized else None
    chunks: Iterator[memoryview]
    if packed is not None:  # its parts in the order of `QuantizedTensor.parts`
        dtype, shape = catalog.about(name).dtype, packed.packing.shape
        chunks = (chunk for part in packed.parts.values() for chunk in file_pieces(part.file, part.begin, part.end))
    elif isinstance(value := catalog.source(name, threads=1), QuantizedTensor):
        dtype, shape, (packed, _) = value.scheme, value.shape, value.restoring() or (None, None)
        arrays = (native_order(np.ascontiguousarray(array)) for array in value.parts.values() if array.size)
        chunks = (array.reshape(-1).view(np.uint8).data for array in arrays)
    else:  # big-endian and strided tensors were copied
        dtype, shape, chunks = value.row.code, value.shape, source_pieces(value)
    for chunk in chunks:
        digest.update(chunk)
        meter.add(len(chunk))
    entry = {"dtype": dtype, "shape": list(shape), "sha256": digest.hexdigest()}
    debug("sha256 of %s: %s", name, entry["sha256"])
    if packed is not None:  # default values are left out: a new field must not change existing digests
        settings = {key: value for key, value in _set_fields(packed.packing).items() if key not in _UNHASHED}
        parts = {
            role: [dtypes.array_dtype(part.row.number).name, part.end - part.begin]
            for role, part in packed.parts.items()
        }
        text = json.dumps({"packing": settings, "parts": parts}, sort_keys=True)
        entry[RESTORING] = hashlib.sha256(text.encode()).hexdigest()
    return entry


def _set_fields(fields: Packing | Grid | Zeros) -> dict[str, Any]:
    """Return the fields of a named tuple without default values, as plain values."""
    defaults, values = fields._field_defaults, fields._asdict()
    changed = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    return {key: _set_fields(value) if isinstance(value, (Grid, Zeros)) else value for key, value in changed.items()}


def checked(tensors: Any, path: str) -> Mapping[str, Any]:
    """Check the tensors of a manifest."""
    if not isinstance(tensors, Mapping):
        raise refused(f"tensors must be an object, got {type(tensors).__name__}", path)
    for name, entry in tensors.items():
        good = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
        if not good or not _is_digest(entry.get("sha256")):
            raise refused(f"the entry of {show(name)} must have dtype, shape and sha256", path)
        if RESTORING in entry and not _is_digest(entry[RESTORING]):
            message = f"{RESTORING!r} of {show(name)} must be a SHA-256, got {show(entry[RESTORING])}"
            raise refused(message, path)
    return tensors


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def compare(before: Mapping[str, Any], now: Mapping[str, Any], source: str) -> list[TensorCheck]:
    """Compare the tensors of ``source``, a manifest or model, with the tensors of now."""
    checks: list[TensorCheck] = []
    without_settings = 0  # early manifests lack digests of settings: a single warning reports them all
    for name, entry in before.items():
        current, reason = now.get(name), ""
        if current is None:
            checks.append(TensorCheck(name, "missing", f"{source} has it"))
            continue
        if (entry["dtype"], entry["shape"]) != (current["dtype"], current["shape"]):
            described, listed = (f"{row['dtype']} {row['shape']}" for row in (current, entry))
            reason = f"is {described}, but {listed} in {source}"
        elif entry["sha256"] != current["sha256"]:
            reason = f"expected sha256 {entry['sha256'][:16]}..., got {current['sha256'][:16]}..."
        elif RESTORING in current and RESTORING not in entry:
            without_settings += 1
        elif entry.get(RESTORING) != current.get(RESTORING):
            reason = "different settings decode its bytes, such as the axis of scales, block sizes or zero points"
        checks.append(TensorCheck(name, "changed" if reason else "ok", reason))
    checks += (TensorCheck(name, "not covered", f"{source} does not have it") for name in now if name not in before)
    if without_settings:
        text = "%s: an older safeload wrote it: it covers the bytes of %s, but not the settings that decode them"
        warning(text, source, plural(without_settings, "quantized tensor"))
    return checks
