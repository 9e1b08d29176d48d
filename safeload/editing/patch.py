"""Make and apply patches: the differences of two sets of tensors, in TRL's layout.

A patch is a safetensors file. A changed tensor has ``<name>.indices``, flat positions as int32 (int64 if it has more
elements), and ``<name>.values``, its new elements. A tensor that is new, or has another dtype or shape, or mostly other
values, has ``<name>.values`` alone. Patches of safeload also have

- ``safeload.header``: the header of the new file, without the spaces at its end;
- metadata ``safeload.patch``: JSON with the digests of base, result and patch, and the size of the new header.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..conversion.destinations import FileSink, SaveDestination, refuse_inputs, target_of
from ..conversion.save import check_name, checked_metadata, value_of
from ..core import dtypes
from ..core.arrays import Array, as_array, check_spans
from ..core.files import Located
from ..core.native import address_of, ffi
from ..core.registry import SAFETENSORS, OpenRequest, open_file
from ..core.safetensors import MAX_HEADER, Header, TensorToWrite, parse_head, source_of
from ..core.table import Table
from ..core.tensors import Lazy
from ..core.text import PathLike, error_about, plural, size
from ..core.weight_file import WeightFile
from ..errors import FormatError, SafeloadError, UnsupportedError, exported, public, unsaved
from ..remote.places import places_of
from .edit import resolved

# A side of a patch.
PatchSide: TypeAlias = PathLike | Located | Mapping[str, Any]

_KEY, _VERSION = "safeload.patch", 1
_HEADER, _INDICES, _VALUES = "safeload.header", ".indices", ".values"
_INDEX_CODES = ("I32", "I64")
_MAX_INT32 = (1 << 31) - 1
# Bytes of a tensor that are compared or copied at once; a multiple of every element.
_CHUNK = 32 << 20
_LENGTH = 8


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
    target = _file_target("a patch", dst, overwrite, durable, storage_options)
    refuse_inputs(dst, (base, new))
    with _side_of(base, "base", storage_options) as old, _side_of(new, "new", storage_options) as changed:
        tensors, report = _difference(old.tensors, changed.tensors)
        header = changed.header or _header_of(changed.tensors, None)
        tensors[_HEADER] = _in_memory(source_of(_HEADER, np.frombuffer(header.rstrip(b" "), np.uint8)))
        total = len(header) + sum(tensor.nbytes for tensor in changed.tensors.values())
        facts = _Facts(_VERSION, report.base, report.result, len(header), total, "", not isinstance(new, Mapping))
        texts = {
            "sparse": "True",
            "sparsity": f"{1 - report.changed / max(1, report.elements):.6f}",
            "changed_params": str(report.changed),
            **texts,
            _KEY: json.dumps({**facts._asdict(), "digest": _own_digest(tensors, facts)}),
        }
        # The writer reads the bytes of a tensor when its turn comes.
        stored = {
            name: TensorToWrite(*tensor[:3], Lazy(np.dtype(np.uint8), (tensor.nbytes,), tensor.whole))
            for name, tensor in tensors.items()
        }
        target.write(stored, texts, room=0)
    return report


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
    with _side_of(patch, None, storage_options) as delta, _side_of(base, "base", storage_options) as old:
        target = None
        if not isinstance(base, Mapping):
            place: Any = dst
            if dst is None:  # symbolic links are followed, but not into the Hub's cache
                (path,), files = places_of((base,), storage_options)
                place = base if files.remote else resolved(path, force=True)
            target = _file_target("the result", place, overwrite or dst is None, durable, storage_options)
        facts = _facts_of(delta, check=check)
        header, result = _result_of(old, delta, facts)
        if check and facts is not None:
            digest = _digest_of(tensor.line(name) for name, tensor in old.tensors.items())
            if digest != facts.base:
                text = f"is not the base of {delta.place}: it has digest {digest}, not {facts.base}"
                raise SafeloadError(f"{old.place} {text}")
        if isinstance(base, Mapping):
            _change_arrays(base, old.tensors, result)
        if target is not None:
            _write(target, header, result, old.file, facts=facts if check else None, patch=delta.place)
    return None if facts is None else facts.result


def _file_target(
    what: str, dst: SaveDestination, overwrite: bool, durable: bool, storage_options: Mapping[str, Any] | None
) -> FileSink:
    target = target_of(dst, overwrite=overwrite, durable=durable, storage_options=storage_options)
    if not isinstance(target, FileSink):
        raise ValueError(f"{what} is a file: use the suffix .safetensors")
    return target


# ---- tensors as plain bytes ----


class _Tensor(NamedTuple):
    """A tensor of a side, of a patch or of a result."""

    row: dtypes.Dtype
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[Array]]  # return the bytes, in arrays of `_CHUNK` bytes except for the last
    # Of a result: returns ascending indices and the values of new elements, and checks the indices.
    changes: Callable[[], tuple[Array, Array]] | None = None

    def __str__(self) -> str:
        return f"{self.row.code} {list(self.shape)}"

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtypes.array_dtype(self.row.number)

    @property
    def elements(self) -> int:
        """Number of elements that a patch can change."""
        return self.nbytes // self.dtype.itemsize

    def is_like(self, other: _Tensor | None) -> bool:
        """Return True if another tensor has the dtype and shape of this one."""
        return other is not None and (self.row.number, self.shape) == (other.row.number, other.shape)

    def whole(self) -> Array:
        return _joined([*self.chunks()])

    def array(self) -> Array:
        """Return a copy as an array; packed elements stay bytes."""
        data: Array = self.whole().copy()
        return data if self.row.packed else data.view(self.dtype).reshape(self.shape)

    def units(self, data: Array) -> Array:
        """Return bytes of this tensor as unsigned integers of its element size."""
        return data.view(f"u{self.dtype.itemsize}")

    def line(self, name: str, digest: Any = None) -> str:
        """Return the line of `_digest_of`; ``digest`` is the SHA-256 of the bytes if it is known."""
        if digest is None:
            digest = hashlib.sha256()
            for chunk in self.chunks():
                digest.update(chunk.data)
        return json.dumps([name, self.row.code, list(self.shape), digest.hexdigest()])


class _Side(NamedTuple):
    """The tensors of a file or dict."""

    place: str  # for messages
    tensors: dict[str, _Tensor]
    header: bytes = b""  # of a file, with its length
    metadata: Mapping[str, str] = {}
    file: WeightFile | None = None


@contextmanager
def _side_of(value: Any, place: str | None, storage_options: Mapping[str, Any] | None) -> Iterator[_Side]:
    """Open a side: a dict, which messages call ``place``, or a safetensors file; None refuses a dict."""
    if place is not None and isinstance(value, Mapping):
        keep: list[Any] = []  # lives until the block ends
        sources = ((check_name(name), source_of(name, value_of(name, array, keep))) for name, array in value.items())
        yield _Side(place, {name: _in_memory(source) for name, source in sources})
        return
    (path,), files = places_of((value,), storage_options)
    if not files.remote and os.path.isdir(path):
        raise UnsupportedError(f"{path} is a folder: patches are made and applied file by file")
    with closing(open_file(path, OpenRequest((SAFETENSORS,), files=files)).file) as file:
        header = bytes(file.read_at(0, _LENGTH + int.from_bytes(file.read_at(0, _LENGTH), "little")))
        yield _Side(files.shown(path), _tensors_of(file.table, file.read_at), header, file.table.metadata() or {}, file)


def _tensors_of(table: Table, read_at: Callable[[int, int], Any]) -> dict[str, _Tensor]:
    def chunks(begin: int, end: int) -> Iterator[Array]:
        return (np.frombuffer(read_at(at, min(_CHUNK, end - at)), np.uint8) for at in range(begin, end, _CHUNK))

    rows = zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True)
    return {
        name: _Tensor(row, tuple(shape), end - begin, partial(chunks, begin, end))
        for name, row, shape, (begin, end) in rows
    }


def _in_memory(source: TensorToWrite) -> _Tensor:
    def chunks() -> Iterator[Array]:
        pieces = []
        for _owner, address, nbytes, streamed in source.pieces():
            if nbytes:
                piece = np.frombuffer(ffi.buffer(ffi.cast("char *", address), nbytes), np.uint8)
                # Other memory stays valid as long as its source lives.
                pieces.append(piece.copy() if streamed else piece)
        whole = _joined(pieces)
        return (whole[at : at + _CHUNK] for at in range(0, whole.size, _CHUNK))

    return _Tensor(source.row, tuple(source.shape), source.nbytes, chunks)


def _joined(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint8), *arrays])


def _header_of(
    tensors: Mapping[str, _Tensor], metadata: Mapping[str, str] | None, *, keeps_order: bool = False
) -> bytes:
    numbers = bytes(tensor.row.number for tensor in tensors.values())
    shapes = [tensor.shape for tensor in tensors.values()]
    header = Header([*tensors], numbers, shapes, metadata, keeps_order=keeps_order)
    return bytes(ffi.buffer(header.memory, header.nbytes))


def _digest_of(lines: Iterable[str]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, whatever their order and the metadata."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


class _Facts(NamedTuple):
    """The metadata of a patch."""

    version: int
    base: str  # digest
    result: str  # digest
    header: int  # bytes of the new header, with its length and spaces
    size: int  # bytes of the new file
    digest: str  # of the patch
    exact: bool = True  # False if the new side is a dict, which has no metadata: the result keeps those of its base


def _own_digest(tensors: Mapping[str, _Tensor], facts: _Facts) -> str:
    """Return the digest of a patch: its tensors and its facts."""
    values = facts._replace(digest="")
    content = _digest_of(tensor.line(name) for name, tensor in tensors.items())
    text = json.dumps([*(values[:-1] if facts.exact else values), content])
    return hashlib.sha256(text.encode()).hexdigest()


# ---- making ----


def _difference(old: Mapping[str, _Tensor], new: Mapping[str, _Tensor]) -> tuple[dict[str, _Tensor], PatchReport]:
    """Compare two sides, tensor by tensor, and return the tensors of the patch."""
    tensors: dict[str, _Tensor] = {}
    # Single elements can change if both sides have the tensor, and elements are whole bytes.
    compared = {name for name, tensor in new.items() if tensor.is_like(old.get(name)) and not tensor.row.packed}
    lines = [tensor.line(name) for name, tensor in old.items() if name not in compared]
    new_lines, changed = [], 0
    for name, tensor in new.items():
        count = tensor.elements
        if name not in compared:
            new_lines.append(tensor.line(name))
        else:
            digests, positions, values = _compare(old[name], tensor)
            lines.append(old[name].line(name, digests[0]))
            new_lines.append(tensor.line(name, digests[1]))
            width = np.int32 if tensor.elements <= _MAX_INT32 else np.int64
            count = sum(map(len, values))
            if not count:
                continue
            if count * (np.dtype(width).itemsize + tensor.dtype.itemsize) < tensor.nbytes:
                tensors[name + _INDICES] = _in_memory(source_of(name, np.concatenate(positions).astype(width)))
                joined = np.concatenate(values)
                tensors[name + _VALUES] = _in_memory(TensorToWrite(tensor.row, (count,), joined.nbytes, joined))
        tensors.setdefault(name + _VALUES, tensor)
        changed += count
    return tensors, PatchReport(
        changed,
        sum(tensor.elements for tensor in new.values()),
        sum(name.endswith(_VALUES) for name in tensors),
        sum(tensor.nbytes for tensor in tensors.values()),
        _digest_of(lines),
        _digest_of(new_lines),
    )


def _compare(before: _Tensor, after: _Tensor) -> tuple[tuple[Any, Any], list[Array], list[Array]]:
    """Return the digests of both tensors, and positions and new values of the changed elements."""
    digests, first = (hashlib.sha256(), hashlib.sha256()), 0
    positions, values = [], []
    for old, new in zip(before.chunks(), after.chunks(), strict=True):
        digests[0].update(old.data)
        digests[1].update(new.data)
        elements = after.units(new)
        places = np.flatnonzero(before.units(old) != elements)
        if places.size:
            positions.append(places + first)
            values.append(elements[places])
        first += elements.size
    return digests, positions, values


# ---- applying ----


def _facts_of(patch: _Side, *, check: bool) -> _Facts | None:
    """Return the facts of a patch, or None for a patch of TRL."""
    text = patch.metadata.get(_KEY)
    if text is None:
        if check:
            raise UnsupportedError(f"{patch.place} has no digests, as patches of TRL: pass check=False to apply it")
        return None
    try:
        facts: _Facts | None = _Facts(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        facts = None
    if facts is None or [*map(type, facts)] != [int, str, str, int, int, str, bool]:
        raise FormatError(f"the metadata {_KEY} is malformed", patch.place)
    if facts.version != _VERSION:
        text = f"is a patch of version {facts.version}, but this safeload reads version {_VERSION}"
        raise UnsupportedError(f"{patch.place} {text}")
    if check and _own_digest(patch.tensors, facts) != facts.digest:
        raise FormatError("the patch is damaged: its bytes do not have their digest", patch.place)
    return facts


def _result_of(base: _Side, patch: _Side, facts: _Facts | None) -> tuple[bytes, dict[str, _Tensor]]:
    """Check a patch against its base; return the header and the tensors of the result, in file order."""

    def fault(name: str, text: str) -> FormatError:
        return error_about(FormatError, text, path=patch.place, tensor=name)

    header, layout = _head_of(base, patch, facts)
    result = {}
    for name in filter(_HEADER.__ne__, patch.tensors):
        stem, dot, suffix = name.rpartition(".")
        if dot + suffix not in (_INDICES, _VALUES):
            raise fault(name, "belongs to no tensor of a patch")
        if stem not in layout:
            raise fault(stem, "is not in the result")
    for name, tensor in layout.items():
        indices, values = patch.tensors.get(name + _INDICES), patch.tensors.get(name + _VALUES)
        if indices is None and values is not None:
            if not tensor.is_like(values):
                raise fault(name, f"is {tensor} in the header, but its values are {values}")
            result[name] = values
            continue
        before = base.tensors.get(name)
        if before is None or not tensor.is_like(before):
            raise fault(name, f"must be {tensor} in the base, where it is {before or 'missing'}")
        result[name] = before
        if indices is None:
            continue
        if values is None:
            raise fault(name, "has indices without values")
        if indices.row.code not in _INDEX_CODES or len(indices.shape) != 1:
            raise fault(name, f"needs flat I32 or I64 indices, got {indices}")
        if values.row.number != tensor.row.number or values.shape != indices.shape or tensor.row.packed:
            raise fault(name, f"is {tensor}, but has values {values} for indices {indices}")
        changes = partial(_changes, before, indices, values, partial(fault, name))
        result[name] = before._replace(chunks=partial(_changed_chunks, before, changes), changes=changes)
    return header, result


def _head_of(base: _Side, patch: _Side, facts: _Facts | None) -> tuple[bytes, Mapping[str, _Tensor]]:
    """Return the header of the result, and the layout of its tensors in file order."""
    if facts is None:
        return base.header, base.tensors
    stored = patch.tensors.get(_HEADER)
    if stored is None or stored.row.code != "U8":
        raise FormatError(f"the patch has no {_HEADER}", patch.place)
    if not _LENGTH <= stored.nbytes <= facts.header <= MAX_HEADER + _LENGTH:
        text = f"the patch says that the header has {facts.header} bytes, but has {stored.nbytes}"
        raise FormatError(text, patch.place)
    header = stored.whole().tobytes().ljust(facts.header)
    if not facts.header <= facts.size < 1 << 63:
        raise FormatError(f"the patch says that the result has {facts.size} bytes", patch.place)
    table = parse_head(header, facts.size, patch.place)
    layout = _tensors_of(table, lambda begin, nbytes: header[begin : begin + nbytes])
    if not facts.exact and base.metadata:
        header = _header_of(layout, base.metadata, keeps_order=True)
    return header, layout


def _changes(
    tensor: _Tensor, indices: _Tensor, values: _Tensor, fault: Callable[[str], FormatError]
) -> tuple[Array, Array]:
    places, new = indices.whole().view(f"<i{indices.dtype.itemsize}"), tensor.units(values.whole())
    if places.size > 1 and not (places[1:] > places[:-1]).all():
        order = np.argsort(places, kind="stable")
        places, new = places[order], new[order]
        if (places[1:] == places[:-1]).any():
            raise fault("has an index twice")
    if places.size and (places[0] < 0 or places[-1] >= tensor.elements):
        bad = places[0] if places[0] < 0 else places[-1]
        raise fault(f"has {tensor.elements} elements, but the patch has index {bad}")
    return places, new


def _changed_chunks(base: _Tensor, changes: Callable[[], tuple[Array, Array]]) -> Iterator[Array]:
    """Iterate over the bytes of a tensor with new elements."""
    indices, values = changes()
    first = 0
    for chunk in base.chunks():
        count = base.units(chunk).size
        rows = slice(*np.searchsorted(indices, [first, first + count]))
        if rows.start < rows.stop:
            chunk = chunk.copy()
            base.units(chunk)[indices[rows] - first] = values[rows]
        yield chunk
        first += count


def _write(
    target: FileSink,
    header: bytes,
    tensors: Mapping[str, _Tensor],
    base: WeightFile | None,
    *,
    facts: _Facts | None,  # has the expected digest
    patch: str,
) -> None:
    """Write the result, and compare it with its digest before it is put in place."""
    head, lines = np.frombuffer(header, np.uint8), []
    try:
        with target.open(head.size + sum(tensor.nbytes for tensor in tensors.values())) as file:
            file.write([(address_of(head), head.size)])
            for name, tensor in tensors.items():
                digest = hashlib.sha256()
                for chunk in tensor.chunks():
                    file.write([(address_of(chunk), chunk.size)])
                    if facts is not None:
                        digest.update(chunk.data)
                lines.append(tensor.line(name, digest))
            if facts is not None and _digest_of(lines) != facts.result:
                raise FormatError("the result does not have its digest", patch)
            if os.name == "nt" and base is not None:
                base.close()  # Windows does not replace open files
    except OSError as error:
        raise unsaved(error) from None


def _change_arrays(arrays: Mapping[str, Any], base: Mapping[str, _Tensor], result: Mapping[str, _Tensor]) -> None:
    """Change the arrays of a dict; everything is checked first."""
    removed = arrays.keys() - result.keys()
    replaced = {name: tensor for name, tensor in result.items() if not tensor.is_like(base.get(name))}
    if (removed or replaced) and not isinstance(arrays, MutableMapping):
        raise UnsupportedError("the patch adds, removes or replaces tensors: pass a dict")
    changes: dict[str, tuple[Array, Array]] = {}
    for name, tensor in result.items():
        if tensor.changes is not None:
            changes[name] = tensor.changes()
        elif name not in replaced and tensor is not base[name]:
            values = tensor.units(tensor.whole())
            changes[name] = np.arange(values.size), values
    puts = {name: _putter(name, arrays[name]) for name in changes}
    spans = {name: _span(arrays[name]) for name in result if name in arrays and name not in replaced}
    kept = {name: (indices.tobytes(), values.tobytes()) for name, (indices, values) in changes.items()}
    check_spans({name: span for name, span in spans.items() if span is not None}, kept, lambda: kept, "arrays")
    new = {name: tensor.array() for name, tensor in replaced.items()}
    if any(map(_is_torch, arrays.values())):
        from ..frameworks import torch_arrays

        new = {name: torch_arrays.from_array(array, name) for name, array in new.items()}
    for name, (indices, values) in changes.items():
        puts[name](indices, values)
    if isinstance(arrays, MutableMapping):
        for name in removed:
            del arrays[name]
        arrays.update(new)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _span(value: Any) -> tuple[int, int] | None:
    """Return address and size of a contiguous array or tensor; None if it cannot change in place."""
    if isinstance(value, np.ndarray):
        return (address_of(value), value.nbytes) if value.flags.c_contiguous and value.nbytes else None
    if _is_torch(value) and value.is_contiguous():
        return value.data_ptr(), value.numel() * value.element_size()
    return None


def _putter(name: str, value: Any) -> Callable[[Array, Array], None]:
    """Return a function that puts unsigned integers into the memory of an array."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous or not value.flags.writeable or not value.dtype.isnative:
            text = "must be writable, C-contiguous and of native byte order to change in place"
            raise error_about(UnsupportedError, text, tensor=name)
        return as_array(value, name).reshape(-1).view(f"u{value.dtype.itemsize}").__setitem__
    if _is_torch(value):
        from ..frameworks import torch_arrays

        return torch_arrays.putter(name, value)
    text = f"is {type(value).__name__}, which cannot change in place: pass NumPy arrays or torch tensors"
    raise error_about(UnsupportedError, text, tensor=name)
