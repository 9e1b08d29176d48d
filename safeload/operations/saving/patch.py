"""Make patches: the differences of two sets of tensors, in TRL's layout.

A patch is a safetensors file. A changed tensor has ``<name>.indices``, flat positions as int32 (int64 if it has more
elements), and ``<name>.values``, its new elements. A tensor that is new, or has another dtype or shape, or mostly other
values, has ``<name>.values`` alone. Patches of safeload also have

- ``safeload.header``: the header of the new file, without the spaces at its end;
- metadata ``safeload.patch``: JSON with the digests of base, result and patch, and the size of the new header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array
from ...base.text import plural, size
from ...engine.read.lazy import Lazy
from ...engine.run.memory import address_of
from ...errors import exported, public
from ...formats.safetensors.file import Memory
from ..folders.destinations import refuse_inputs
from ..folders.targets import FileSink, SaveDestination, target_of
from .patch_sides import (
    ContentDigest,
    DictSide,
    PatchSide,
    Side,
    content_digest,
    same_layout,
    sha256_of,
    side_of,
    unsigned,
)
from .writer import checked_metadata

KEY, VERSION = "safeload.patch", 1
HEADER, INDICES, VALUES = "safeload.header", ".indices", ".values"
_MAX_INT32 = (1 << 31) - 1


@exported()
class PatchReport(NamedTuple):
    """The result of `make_patch`.

    Attributes:
        changed: elements with new values.
        elements: elements of all tensors of the new file.
        tensors: tensors in the patch.
        nbytes: bytes of the patch's tensors.
        base: digest of the base.
        result: digest of the result; the base of the next patch of a chain.

    Example:
        >>> import numpy as np, safeload
        >>> old = {"w": np.zeros(1000, np.float32)}
        >>> new = {"w": np.where(np.arange(1000) == 7, np.float32(1), old["w"])}
        >>> print(safeload.make_patch(old, new, "step-1.safetensors"))
        1 of 1,000 elements in 1 tensor changed: 8 B
    """

    changed: int
    elements: int
    tensors: int
    nbytes: int
    base: str
    result: str

    def __str__(self) -> str:
        if not self.tensors:
            return f"no change in {plural(self.elements, 'element')}"
        tensors = plural(self.tensors, "tensor")
        return f"{self.changed:,} of {self.elements:,} elements in {tensors} changed: {size(self.nbytes)}"


@public
def make_patch(
    base: PatchSide,
    new: PatchSide,
    dst: SaveDestination,
    *,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    durable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> PatchReport:
    """Write the difference of two safetensors files, or dicts of arrays, as a patch for `apply_patch`.

    Elements are compared by their bytes, so NaN and -0.0 are exact too. `apply_patch` recreates the new file byte for
    byte, with its metadata and order. Making a patch takes the memory of the changed elements.

    A patch has TRL's layout: ``<name>.indices`` and ``<name>.values`` for each changed tensor. It also holds the new
    header, and digests of base and result, which do not depend on metadata or the order of tensors.

    Args:
        base: the old tensors: a path, a URL or a dict of arrays. Folders have to be patched file by file.
        new: the new tensors, in either form.
        dst: a ".safetensors" path, URL or binary file object, see `Writer`.
        metadata: str to str, for the header of the patch, such as a version.
        overwrite: False to raise FileExistsError if the destination exists.
        durable: False to skip the fsync of the file.
        storage_options: options of the filesystem behind URLs, see `open`.

    Returns:
        A report of the changes, with the digests.

    Raises:
        FormatError: a file is not valid safetensors.
        UnsupportedError: a folder, or a file of another format.
        FileExistsError: ``dst`` exists and ``overwrite`` is not set.
        ValueError: ``dst`` is one of the two files.
        OSError: a file cannot be read or written.

    Example:
        >>> import numpy as np, safeload
        >>> weights = {"w": np.zeros(1000, np.float32)}
        >>> trained = {"w": np.where(np.arange(1000) % 100, weights["w"], np.float32(1))}
        >>> safeload.make_patch(weights, trained, "step.safetensors").changed
        10
        >>> digest = safeload.apply_patch(weights, "step.safetensors")
        >>> weights["w"].sum()
        np.float32(10.0)
    """
    texts = checked_metadata(metadata) or {}
    target = target_of(dst, overwrite=overwrite, durable=durable, storage_options=storage_options)
    if not isinstance(target, FileSink):
        raise ValueError("a patch is a file: use the suffix .safetensors")
    refuse_inputs(dst, (base, new))
    with side_of(base, "base", storage_options) as old, side_of(new, "new", storage_options) as changed:
        difference = _Difference(old, changed)
        tensors, report = difference.tensors, difference.report()
        header = changed.header
        tensors[HEADER] = np.frombuffer(header.rstrip(b" "), np.uint8)
        total = len(header) + sum(tensor.nbytes for tensor in changed.tensors.values())
        exact = not isinstance(new, Mapping)
        facts = PatchFacts(VERSION, report.base, report.result, len(header), total, "", exact)
        facts = facts._replace(digest=own_digest(DictSide(tensors, "patch"), facts))
        texts = {
            "sparse": "True",
            "sparsity": f"{1 - report.changed / max(1, report.elements):.6f}",
            "changed_params": str(report.changed),
            **texts,
            KEY: json.dumps(facts._asdict()),
        }
        target.write(tensors, texts, room=0)
    return report


class _Difference:
    """Compare two sides, tensor by tensor."""

    def __init__(self, old: Side, new: Side) -> None:
        self.tensors: dict[str, Any] = {}  # of the patch
        self._changed = self._count = 0
        self._digests = ContentDigest(), ContentDigest()
        self._keep: list[Array] = []
        for name, tensor in new.tensors.items():
            before = old.tensors.get(name)
            if before is not None and same_layout(before, tensor) and tensor.sparse:
                self._compare(old, new, name)
            else:
                self._take(new, name)
                if before is not None:
                    self._digests[0].add(name, before, sha256_of(old, name))
        for name, tensor in old.tensors.items():
            if name not in new.tensors:
                self._digests[0].add(name, tensor, sha256_of(old, name))

    def _compare(self, old: Side, new: Side, name: str) -> None:
        """Find the changed elements of a tensor, which both sides have."""
        tensor, first = new.tensors[name], 0
        hashes = hashlib.sha256(), hashlib.sha256()
        positions, values = [], []
        for before, after in zip(old.chunks(name), new.chunks(name), strict=True):
            hashes[0].update(before.data)
            hashes[1].update(after.data)
            elements = unsigned(after, tensor.itemsize)
            places = np.flatnonzero(unsigned(before, tensor.itemsize) != elements)
            if places.size:
                positions.append(places + first)
                values.append(elements[places])
            first += elements.size
        for digest, done in zip(self._digests, hashes, strict=True):
            digest.add(name, tensor, done.hexdigest())
        count = sum(map(len, values))
        if not count:
            self._count += tensor.elements
            return
        width = np.int32 if tensor.elements <= _MAX_INT32 else np.int64
        if count * (np.dtype(width).itemsize + tensor.itemsize) >= tensor.nbytes:
            self._store(new, name)
        else:
            self.tensors[name + INDICES] = np.concatenate(positions).astype(width)
            data = np.concatenate(values)
            self._keep.append(data)
            self.tensors[name + VALUES] = Memory(tensor.row, (count,), address_of(data), data.nbytes)
        self._count += tensor.elements
        self._changed += count

    def _take(self, new: Side, name: str) -> None:
        """Add a whole tensor that has no counterpart."""
        tensor = new.tensors[name]
        self._digests[1].add(name, tensor, sha256_of(new, name))
        self._store(new, name)
        self._count += tensor.elements
        self._changed += tensor.elements

    def _store(self, new: Side, name: str) -> None:
        tensor = new.tensors[name]
        if tensor.row.packed:  # an array would lose the dtype
            data = new.whole(name)
            self._keep.append(data)
            address = address_of(data) if data.size else 0
            self.tensors[name + VALUES] = Memory(tensor.row, tensor.shape, address, tensor.nbytes)
            return
        dtype = dtypes.array_dtype(tensor.row.number)

        def make() -> Array:
            array: Array = new.whole(name).view(dtype).reshape(tensor.shape)
            return array

        self.tensors[name + VALUES] = Lazy(dtype, tensor.shape, make)

    def report(self) -> PatchReport:
        """Return the counts and digests."""
        base, result = (digest.hexdigest() for digest in self._digests)
        names = {name.removesuffix(VALUES) for name in self.tensors if name.endswith(VALUES)}
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        return PatchReport(self._changed, self._count, len(names), nbytes, base, result)


class PatchFacts(NamedTuple):
    """The metadata of a patch."""

    version: int
    base: str  # digest
    result: str  # digest
    header: int  # bytes of the new header, with its length and spaces
    size: int  # bytes of the new file
    digest: str  # of the patch
    exact: bool = True  # False if the new side is a dict, which has no metadata: the result keeps those of its base


def own_digest(patch: Side, facts: PatchFacts) -> str:
    """Return the digest of a patch: its tensors and its facts."""
    values = facts._replace(digest="")
    text = json.dumps([*(values[:-1] if facts.exact else values), content_digest(patch)])
    return hashlib.sha256(text.encode()).hexdigest()
