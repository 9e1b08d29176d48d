"""Apply patches to files and to arrays in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from ...base import dtypes
from ...base.arrays import Array, as_array
from ...base.messages import error_about
from ...base.native import ffi
from ...engine.run.memory import address_of, check_spans
from ...errors import FormatError, SafeloadError, UnsupportedError, public, unsaved
from ...formats.safetensors.file import parse_head
from ...formats.safetensors.header import MAX_HEADER, Header
from ...stores.places import places_of
from ..folders.destinations import refuse_inputs
from ..folders.targets import FileSink, SaveDestination, target_of
from .edit_base import resolved
from .patch import HEADER, INDICES, KEY, VALUES, VERSION, PatchFacts, own_digest
from .patch_sides import (
    ContentDigest,
    Described,
    FileSide,
    PatchSide,
    Side,
    content_digest,
    opened,
    same_layout,
    side_of,
    unsigned,
)

_INDEX_CODES = ("I32", "I64")


@public
def apply_patch(
    base: PatchSide,
    patch: PatchSide,
    dst: SaveDestination | None = None,
    *,
    check: bool = True,
    overwrite: bool = False,
    durable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """Apply a patch of `make_patch` to a file, or to a dict of arrays in place.

    A file gets exactly the bytes of the new file; if the patch was made from a dict, a file keeps its metadata. It is
    replaced atomically, so arrays of an open checkpoint keep their values. In a dict, changed elements are written into
    the arrays; tensors whose dtype or shape changes are replaced, and tensors are added and removed. Everything is
    checked before the first element changes.

    Args:
        base: path or URL of a safetensors file, or a dict of NumPy arrays or torch tensors. Arrays must be writable and
            C-contiguous.
        patch: path or URL of the patch.
        dst: for a file: where the result goes, see `Writer`. None replaces the base.
        check: True to verify the digests of the patch, the base and the result, which takes time. TRL's own patches
            have no digests and need False. Names, dtypes, shapes and indices are checked in any case.
        overwrite: False to raise FileExistsError if ``dst`` exists.
        durable: False to skip the fsync of the file.
        storage_options: options of the filesystem behind URLs, see `open`.

    Returns:
        The digest of the result, which is the base of the next patch; None for a patch without digests.

    Raises:
        SafeloadError: the base is not the base of the patch.
        FormatError: the patch or the base is damaged or malformed.
        UnsupportedError: the patch has no digests, and ``check`` is True; the base is a folder, or an array that cannot
            change.
        ValueError: ``dst`` is given with a dict; the result would replace the patch; or arrays share memory, except
            an array whose two names change alike.
        OSError: a file cannot be read or written.

    Example:
        >>> import numpy as np, safeload
        >>> safeload.save({"w": np.zeros(4, np.float32)}, "old.safetensors")
        >>> safeload.save({"w": np.ones(4, np.float32)}, "new.safetensors")
        >>> report = safeload.make_patch("old.safetensors", "new.safetensors", "patch.safetensors")
        >>> safeload.apply_patch("old.safetensors", "patch.safetensors") == report.result
        True
        >>> from pathlib import Path
        >>> Path("old.safetensors").read_bytes() == Path("new.safetensors").read_bytes()
        True
    """
    if isinstance(base, Mapping) and dst is not None:
        raise ValueError("a dict of arrays is changed in place, so it takes no dst")
    refuse_inputs(base if dst is None else dst, [patch])
    with opened(patch, storage_options) as delta, side_of(base, "base", storage_options) as old:
        target: FileSink | None = None
        if not isinstance(base, Mapping):
            chosen = target_of(
                _own(base, storage_options) if dst is None else dst,
                overwrite=overwrite or dst is None,
                durable=durable,
                storage_options=storage_options,
            )
            if not isinstance(chosen, FileSink):
                raise ValueError("the result is a file: use the suffix .safetensors")
            target = chosen
        facts = _facts_of(delta, check=check)
        change = _Change(old, delta, facts)
        if check and facts is not None:
            digest = content_digest(old)
            if digest != facts.base:
                text = f"is not the base of {delta.place}: it has digest {digest}, not {facts.base}"
                raise SafeloadError(f"{old.place} {text}")
        if isinstance(base, Mapping):
            _change_arrays(base, change)
        elif target is not None:
            _write(change, target.open, facts.result if check and facts is not None else None)
    return None if facts is None else facts.result


def _own(base: Any, storage_options: Mapping[str, Any] | None) -> Any:
    """Return the base as destination: symbolic links are followed, but not into the Hub's cache."""
    (path,), files = places_of((base,), storage_options)
    return base if files.remote else resolved(path, force=True)


def _facts_of(patch: FileSide, *, check: bool) -> PatchFacts | None:
    """Return the facts of a patch, or None for a patch of TRL."""
    text = patch.metadata.get(KEY)
    if text is None:
        if check:
            raise UnsupportedError(f"{patch.place} has no digests, as patches of TRL: pass check=False to apply it")
        return None
    try:
        facts = PatchFacts(**json.loads(text))
        numbers = all(type(number) is int for number in (facts.version, facts.header, facts.size))
        numbers = numbers and isinstance(facts.exact, bool)
        valid = numbers and all(isinstance(digest, str) for digest in (facts.base, facts.result, facts.digest))
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise FormatError(f"the metadata {KEY} is malformed", patch.place)
    if facts.version != VERSION:
        text = f"is a patch of version {facts.version}, but this safeload reads version {VERSION}"
        raise UnsupportedError(f"{patch.place} {text}")
    if check and own_digest(patch, facts) != facts.digest:
        raise FormatError("the patch is damaged: its bytes do not have their digest", patch.place)
    return facts


class _Sparse(NamedTuple):
    """New elements of a tensor."""

    indices: Array  # ascending
    values: Array  # unsigned integers


class _Change:
    """The tensors of the result: each unchanged, whole, or with new elements."""

    def __init__(self, base: Side, patch: FileSide, facts: PatchFacts | None) -> None:
        self.base, self.patch = base, patch
        self.header, self.tensors = _result(base, patch, facts)
        self.sparse = {
            name.removesuffix(INDICES) for name in patch.tensors if name.endswith(INDICES) and name != HEADER
        }
        self.whole = {name.removesuffix(VALUES) for name in patch.tensors if name.endswith(VALUES)} - self.sparse
        known = {HEADER, *(name + INDICES for name in self.sparse)}
        known |= {name + VALUES for name in self.sparse | self.whole}
        for name in patch.tensors:
            if name not in known:
                raise self._fault(name, "belongs to no tensor of a patch")
        for name in self.sparse | self.whole:
            if name not in self.tensors:
                raise self._fault(name, "is not in the result")
        for name, tensor in self.tensors.items():
            self._check(name, tensor)

    def _fault(self, name: str, text: str) -> FormatError:
        return error_about(FormatError, text, path=self.patch.place, tensor=name)

    def _check(self, name: str, tensor: Described) -> None:
        if name in self.whole:
            values = self.patch.tensors[name + VALUES]
            if not same_layout(values, tensor):
                raise self._fault(name, f"is {_shown(tensor)} in the header, but its values are {_shown(values)}")
            return
        before = self.base.tensors.get(name)
        if before is None or not same_layout(before, tensor):
            present = "missing" if before is None else _shown(before)
            raise self._fault(name, f"must be {_shown(tensor)} in the base, where it is {present}")
        if name not in self.sparse:
            return
        indices, new = self.patch.tensors[name + INDICES], self.patch.tensors.get(name + VALUES)
        if new is None:
            raise self._fault(name, "has indices without values")
        if indices.row.code not in _INDEX_CODES or len(indices.shape) != 1:
            raise self._fault(name, f"needs flat I32 or I64 indices, got {_shown(indices)}")
        if new.row.number != tensor.row.number or new.shape != indices.shape or not tensor.sparse:
            text = f"is {_shown(tensor)}, but has values {_shown(new)} for indices {_shown(indices)}"
            raise self._fault(name, text)

    def elements(self, name: str) -> _Sparse:
        """Return the new elements of a tensor."""
        tensor = self.tensors[name]
        width = self.patch.tensors[name + INDICES].itemsize
        indices = self.patch.whole(name + INDICES).view(f"<i{width}")
        values = unsigned(self.patch.whole(name + VALUES), tensor.itemsize)
        if indices.size > 1 and not (indices[1:] > indices[:-1]).all():
            order = np.argsort(indices, kind="stable")
            indices, values = indices[order], values[order]
            if (indices[1:] == indices[:-1]).any():
                raise self._fault(name, "has an index twice")
        if indices.size and (indices[0] < 0 or indices[-1] >= tensor.elements):
            bad = indices[0] if indices[0] < 0 else indices[-1]
            raise self._fault(name, f"has {tensor.elements} elements, but the patch has index {bad}")
        return _Sparse(indices, values)

    def chunks(self, name: str) -> Iterator[Array]:
        """Iterate over the bytes of a tensor of the result."""
        if name in self.whole:
            yield from self.patch.chunks(name + VALUES)
            return
        if name not in self.sparse:
            yield from self.base.chunks(name)
            return
        indices, values = self.elements(name)
        first, itemsize = 0, self.tensors[name].itemsize
        for chunk in self.base.chunks(name):
            count = chunk.size // itemsize
            rows = slice(*np.searchsorted(indices, [first, first + count]))
            if rows.start < rows.stop:
                chunk = chunk.copy()
                unsigned(chunk, itemsize)[indices[rows] - first] = values[rows]
            yield chunk
            first += count


def _shown(tensor: Described) -> str:
    return f"{tensor.row.code} {list(tensor.shape)}"


def _result(base: Side, patch: FileSide, facts: PatchFacts | None) -> tuple[bytes, dict[str, Described]]:
    """Return the header of the result, and its tensors in file order."""
    if facts is None:
        return base.header, base.tensors
    if HEADER not in patch.tensors or patch.tensors[HEADER].row.code != "U8":
        raise FormatError(f"the patch has no {HEADER}", patch.place)
    stored = patch.tensors[HEADER].nbytes
    if not 8 <= stored <= facts.header <= MAX_HEADER + 8:
        raise FormatError(f"the patch says that the header has {facts.header} bytes, but has {stored}", patch.place)
    header = patch.whole(HEADER).tobytes() + b" " * (facts.header - stored)
    if not facts.header <= facts.size < 1 << 63:
        raise FormatError(f"the patch says that the result has {facts.size} bytes", patch.place)
    table = parse_head(header, facts.size, patch.place)
    rows = zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True)
    if not facts.exact and isinstance(base, FileSide) and base.metadata:
        numbers = bytes(row.number for row in table.rows)
        kept = Header(table.names, numbers, table.shapes, base.metadata, keeps_order=True)
        header = bytes(ffi.buffer(kept.memory, kept.nbytes))
    return header, {name: Described(row, tuple(shape), end - begin) for name, row, shape, (begin, end) in rows}


# ---- files ----


def _write(change: _Change, file_of: Callable[[int], AbstractContextManager[Any]], result: str | None) -> None:
    """Write the result, and compare it with its digest before it is put in place."""
    size = len(change.header) + sum(tensor.nbytes for tensor in change.tensors.values())
    header = np.frombuffer(change.header, np.uint8)
    content = ContentDigest()
    try:
        with file_of(size) as file:
            file.write([(address_of(header), header.size)])
            for name, tensor in change.tensors.items():
                digest = hashlib.sha256()
                for chunk in change.chunks(name):
                    file.write([(address_of(chunk), chunk.size)])
                    if result is not None:
                        digest.update(chunk.data)
                content.add(name, tensor, digest.hexdigest())
            if result is not None and content.hexdigest() != result:
                raise FormatError("the result does not have its digest", change.patch.place)
            _give_way(change.base)
    except OSError as error:
        raise unsaved(error) from None


def _give_way(base: Side) -> None:
    """Close the base on Windows, which does not replace open files."""
    if os.name == "nt" and isinstance(base, FileSide):
        base.close()


# ---- arrays ----


def _change_arrays(arrays: Mapping[str, Any], change: _Change) -> None:
    """Change the arrays of a dict; everything is checked first."""
    removed = [name for name in arrays if name not in change.tensors]
    replaced = [
        name
        for name in change.whole
        if name not in change.base.tensors or not same_layout(change.base.tensors[name], change.tensors[name])
    ]
    if (removed or replaced) and not isinstance(arrays, MutableMapping):
        raise UnsupportedError("the patch adds, removes or replaces tensors: pass a dict")
    changes: dict[str, _Sparse] = {}
    for name in change.tensors:  # in file order
        if name in change.sparse:
            changes[name] = change.elements(name)
        elif name in change.whole and name not in replaced:
            values = unsigned(change.patch.whole(name + VALUES), change.tensors[name].itemsize)
            changes[name] = _Sparse(np.arange(values.size), values)
    puts = {name: _writable(name, arrays[name]) for name in changes}
    spans = {name: _span(arrays[name]) for name in change.tensors if name in arrays and name not in replaced}
    kept = {name: (sparse.indices.tobytes(), sparse.values.tobytes()) for name, sparse in changes.items()}
    check_spans({name: span for name, span in spans.items() if span is not None}, kept, kept, "arrays")
    new = {name: _new_array(change, name) for name in replaced}
    for name, (indices, values) in changes.items():
        puts[name](indices, values)
    if isinstance(arrays, MutableMapping):
        as_tensors = any(type(value).__module__.partition(".")[0] == "torch" for value in arrays.values())
        for name in removed:
            del arrays[name]
        arrays.update({name: _like(as_tensors, array, name) for name, array in new.items()})


def _span(value: Any) -> tuple[int, int] | None:
    """Return address and size of a contiguous array or tensor; None if it cannot change in place."""
    if isinstance(value, np.ndarray):
        return (address_of(value), value.nbytes) if value.flags.c_contiguous and value.nbytes else None
    if type(value).__module__.partition(".")[0] == "torch" and value.is_contiguous():
        return value.data_ptr(), value.numel() * value.element_size()
    return None


def _like(as_tensors: bool, array: Array, name: str) -> Any:
    if not as_tensors:
        return array
    from ...frameworks import torch_arrays

    return torch_arrays.from_array(array, name)


def _new_array(change: _Change, name: str) -> Array:
    tensor = change.tensors[name]
    data = change.patch.whole(name + VALUES)
    if tensor.row.packed:
        packed: Array = data.copy()
        return packed
    array: Array = data.copy().view(dtypes.array_dtype(tensor.row.number)).reshape(tensor.shape)
    return array


def _writable(name: str, value: Any) -> Callable[[Array, Array], None]:
    """Return a function that puts unsigned integers into the memory of an array."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous or not value.flags.writeable or not value.dtype.isnative:
            text = "must be writable, C-contiguous and of native byte order to change in place"
            raise error_about(UnsupportedError, text, tensor=name)
        flat = as_array(value, name).reshape(-1).view(f"u{value.dtype.itemsize}")

        def put(indices: Array, values: Array) -> None:
            flat[indices] = values

        return put
    if type(value).__module__.partition(".")[0] == "torch":
        from ...frameworks import torch_arrays

        return torch_arrays.putter(name, value)
    text = f"is {type(value).__name__}, which cannot change in place: pass NumPy arrays or torch tensors"
    raise error_about(UnsupportedError, text, tensor=name)
