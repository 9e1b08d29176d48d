"""Rank files of FSDP: ``model_world_size_<N>_rank_<R>.pt``, in which each of N processes has pickled its shards.

1. Each file is an ordinary archive of `torch.save` with a dict of names and tensors. Beside it there may be
   ``optim_world_size_...`` and ``extra_state_world_size_...``, which hold no weights.
2. A DTensor is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, arguments, state)``. The third argument is
   the whole shape; the state has the process's ``_local_tensor`` and its ``_spec``: a ``mesh`` of processes and
   ``placements``, one for each axis of the mesh.
3. ``Shard(dim)`` divides an axis of the tensor like `torch.chunk`: ceil(n / parts) rows for each process, fewer or none
   for the last ones. Placements apply from left to right, each to the part that the last one left. ``Replicate``
   divides nothing.
4. The mesh has the position of the process, ``_coordinate_on_dim``, and its size: ``_layout``, or the tensor ``mesh``.
5. A ShardedTensor, of older FSDP, lists its local shards with their offsets and sizes.
6. Any other tensor is whole in each file.

The file of process 0 stands for all files. `RankFolder` and `RankFile` also read the files of ZeRO (zero.py).
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ..base.table import Listing
from ..base.text import error_about, show
from ..engine.run.weight_file import WeightFile, open_without_table
from ..errors import FormatError, LimitError, MissingShardError, TensorNotFoundError, UnsupportedError
from .boxed import MAX_RANK, Box, BoxedListing, DataFolder, Region, in_one_box
from .numbered import FSDP_RANK, in_order
from .registry import Candidate, Content, OpenRequest
from .torch.globals import SUBCLASS, PickledTensor
from .torch.tensors import MAX_NAME_TEXT_A_BYTE, NAME_TEXT_FREE, TensorPlaces, Tree
from .torch.zip_file import read_tensors
from .unpickle.machine import FROM_TYPE, Foreign, Inert, Unpickled, check_foreign, describe
from .zip import Archive

# Globals outside the allowlist that these files name; they become placeholders.
_KNOWN = re.compile(
    r"torch\.distributed\.[\w.]+|torch\._utils\._rebuild_wrapper_subclass|(?:__builtin__|builtins)\.getattr"
)
# Levels of dicts in a state dict.
MAX_DEPTH = 64
# Values that a pickle of any size can have; others take a byte at least.
VALUES_FREE = 10_000


# ---- files of processes: pickles that describe tensors in their archives ----


class RankFile(NamedTuple):
    """An open file of a process."""

    file: WeightFile
    pickled: Unpickled
    places: TensorPlaces

    @property
    def value(self) -> dict[Any, Any]:
        """The dict of the pickle."""
        value = self.pickled.value
        if type(value) is not dict:
            raise FormatError(f"expected a dict, got {describe(value)}", self.file.path)
        return value

    def field(self, name: str, kind: type[Any] | tuple[type[Any], ...], within: Any = None) -> Any:
        """Return a field of the pickle, or of a dict in it."""
        holder = self.value if within is None else within
        value = holder.get(name) if type(holder) is dict else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"the field {show(name)} is missing or malformed, got {describe(value)}", self.file.path)
        return value

    def unsupported(self, name: str, text: str) -> UnsupportedError:
        """Return the error for a tensor that safeload does not read."""
        return error_about(UnsupportedError, text, path=self.file.path, tensor=name)

    def fault(self, name: str, text: str) -> FormatError:
        """Return the error for a malformed tensor."""
        return error_about(FormatError, text, path=self.file.path, tensor=name)

    def listing(self, name: str, tensor: Any) -> Listing:
        """Return the place of a tensor."""
        if type(tensor) is not PickledTensor:
            raise self.fault(name, f"must be a tensor, got {describe(tensor)}")
        if type(tensor.pending) is dict and SUBCLASS in tensor.pending:  # it may be the part of a process
            kind = show(str(tensor.pending[SUBCLASS]).rpartition(".")[2])
            raise self.unsupported(name, f"is a {kind}, which safeload does not know")
        listing = self.places.place(name, tensor)
        if listing.unknown is not None:
            raise self.unsupported(name, f": {listing.unknown.label} {listing.unknown.reason}")
        if listing.row.packed:
            raise self.unsupported(name, f"is {listing.row.code}, which rank files are not known to hold")
        return listing

    def stored(self, listing: Listing) -> Region:
        """Return the elements of a tensor."""
        return Region(self.file.store, listing.begin, listing.strides)

    def whole(self, listing: Listing) -> BoxedListing:
        """Return a tensor in a single box."""
        return in_one_box(listing.row, listing.shape, self.stored(listing))


class RankFolder(DataFolder):
    """The folder of a checkpoint, and its open rank files."""

    def __init__(self, file: WeightFile, known: re.Pattern[str], request: OpenRequest) -> None:
        super().__init__(file)
        self._known, self._inert = known, request.inert

    def open_rank(self, name: str) -> RankFile:
        """Open a file and run its pickle; known globals become placeholders, and all if the request is inert."""
        file = open_without_table(self.join(name), files=self.files)
        self.stores[name] = file.store
        archive = Archive(file)
        archive.prefetch(archive.entries)
        pickled, places = read_tensors(archive, file, inert=True)
        named = dict.fromkeys(pickled.harmless, True)
        named |= {name: self._known.fullmatch(name) is not None for name in pickled.foreign}
        unknown = [name for name, harmless in named.items() if not harmless]
        check_foreign(unknown, file.path, self._inert, "the pickle references")
        self.named_globals |= named
        return RankFile(file, pickled, places)


# ---- the files of FSDP ----


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a rank file belongs to."""
    with RankFolder(candidate.file, _KNOWN, request) as folder:
        names = in_order(FSDP_RANK, folder.names, 1, 2)
        numbers = [tuple(map(int, match.groups())) for name in names if (match := FSDP_RANK.fullmatch(name))]
        sizes, present = sorted({size for size, _ in numbers}), {rank for _, rank in numbers}
        if len(sizes) != 1:
            text = f"rank files of jobs with {' and '.join(map(str, sizes[:5]))} processes: keep those of one job"
            raise error_about(UnsupportedError, text, path=folder.shown)
        missing = [rank for rank in range(min(sizes[0], len(names) + 1)) if rank not in present]
        if missing or len(names) != sizes[0]:
            first = missing[0] if missing else max(present)
            text = f"{len(names)} of {sizes[0]} rank files are there; the first problem is rank {first}"
            raise MissingShardError(text, folder.shown)
        return folder.joined(*_join([folder.open_rank(name) for name in names], request.root, folder.shown))


def _join(
    ranks: Sequence[RankFile], root: str | None, path: str
) -> tuple[dict[str, BoxedListing], Mapping[str, Any] | None]:
    """Return the tensors of all processes, and all other values of the first."""
    tensors: dict[str, BoxedListing] = {}
    boxes: dict[str, list[Box]] = {}
    rest: dict[str, Any] = {}
    for number, rank in enumerate(ranks):
        names: set[str] = set()
        parts, limit = 0, VALUES_FREE + rank.pickled.size
        for name, value in _items(rank.value, rank, root):
            if name in names:
                raise FormatError(f"two values are named {show(name)}", rank.file.path)
            names.add(name)
            listings = _parts(name, value, rank)
            if listings is None and not number:
                rest[name] = value
            for listing in listings or ():
                parts += 1
                if parts > limit:  # each takes a byte at least, unless tensors share a list
                    text = f"with {show(name)} its tensors have more than {limit:,} parts"
                    raise error_about(LimitError, text, path=rank.file.path)
                record = tensors.setdefault(name, listing._replace(boxes=boxes.setdefault(name, [])))
                if (record.row, record.shape) != (listing.row, listing.shape):
                    text = f"is {listing.row.code} {list(listing.shape)} here, but "
                    raise rank.fault(name, f"{text}{record.row.code} {list(record.shape)} in another file")
                boxes[name] += listing.boxes
    if root is not None and not tensors:
        raise error_about(TensorNotFoundError, f"no container {show(root)} with tensors", path=path)
    tree = Tree(rest, path, ranks[0].pickled.size)
    inner = next(tree.tensors(), None)
    if inner is not None:
        text = "is in a list or another object, where safeload does not look for parts of tensors"
        raise error_about(UnsupportedError, text, path=ranks[0].file.path, tensor=inner[0])
    return tensors, tree.metadata()


def _items(value: dict[Any, Any], rank: RankFile, root: str | None) -> Iterator[tuple[str, Any]]:
    """Iterate over dotted names and values, below a container."""
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    prefix = "" if root is None else f"{root}."
    values, text, size = 0, 0, rank.pickled.size  # shared dicts are unfolded wherever they occur
    while waiting:
        name, item, depth = waiting.pop()
        if type(item) is dict and (item or not depth):
            values, text = values + len(item), text + len(item) * (len(name) + 1)
            for count, limit, unit in (
                (depth, MAX_DEPTH, "levels of dicts"),
                (values, VALUES_FREE + size, "values when shared dicts are unfolded"),
                (text, NAME_TEXT_FREE + size * MAX_NAME_TEXT_A_BYTE, "characters in the names of values"),
            ):
                if count > limit:
                    raise error_about(LimitError, f"the pickle has more than {limit:,} {unit}", path=rank.file.path)
            for key, child in reversed(item.items()):
                if type(key) is not str and type(key) is not int:
                    raise FormatError(f"a name must be text, got {describe(key)}", rank.file.path)
                waiting.append((f"{name}.{key}" if depth else str(key), child, depth + 1))
        elif name.startswith(prefix):
            yield name[len(prefix) :], item


def _parts(name: str, value: Any, rank: RankFile) -> Iterable[BoxedListing] | None:
    """Return the parts of a tensor in the file of a process; None for other values."""
    if type(value) is PickledTensor:
        return [rank.whole(rank.listing(name, value))]
    if type(value) is not Inert or value.name != FROM_TYPE:
        return None
    kind = _kind(value.args[1])
    if kind == "DTensor":
        return [_dtensor(name, value, rank)]
    if kind == "ShardedTensor":
        return _sharded_tensor(name, value, rank)
    raise rank.unsupported(name, f"is a {show(kind or describe(value))}, which safeload does not know")


def _kind(value: Any) -> str:
    """Return the name of a class without its module, which has changed over time."""
    return str(value.name.rpartition(".")[2]) if type(value) in (Inert, Foreign) else ""


def _state(value: Any) -> Mapping[Any, Any]:
    """Return the attributes of a placeholder or of a state: a dict, or a tuple of a dict and of slots."""
    state = value.state if type(value) is Inert else value
    parts = state[1::-1] if type(state) is tuple else (state,)
    dicts = [part for part in parts if type(part) is dict]
    return dicts[0] if len(dicts) == 1 else ChainMap(*dicts)  # not copied: tensors can share a large state


def _shape(value: Any, name: str, rank: RankFile) -> tuple[int, ...]:
    valid = isinstance(value, (tuple, list)) and len(value) <= MAX_RANK
    if not valid or any(type(n) is not int or not 0 <= n < 1 << 62 for n in value):
        raise rank.fault(name, f": a shape or position must be up to {MAX_RANK} numbers, got {describe(value)}")
    return tuple(value)


def _dtensor(name: str, value: Inert, rank: RankFile) -> BoxedListing:
    """Return the part of a DTensor in a file."""
    _, _, arguments, state = value.args
    shape = _shape(arguments[2] if type(arguments) is tuple and len(arguments) > 2 else None, name, rank)
    fields = _state(state)
    listing = rank.listing(name, fields.get("_local_tensor"))
    spec = _state(fields.get("_spec"))
    mesh = _state(spec.get("mesh"))
    sizes, position = _mesh_sizes(mesh, name, rank), _shape(mesh.get("_coordinate_on_dim"), name, rank)
    placements = spec.get("placements")
    if type(placements) is not tuple or not len(placements) == len(sizes) == len(position):
        raise rank.fault(name, f": {describe(placements)} placements on a mesh of {list(sizes)} at {list(position)}")
    _check_order(spec.get("shard_order"), name, rank)
    offsets, lengths = [0] * len(shape), list(shape)
    for placement, parts, index in zip(placements, sizes, position, strict=True):
        kind = _kind(placement)
        if kind == "Replicate":
            continue
        dim = _state(placement).get("dim")
        if kind != "Shard" or type(dim) is not int or not -len(shape) <= dim < len(shape):
            text = f"is placed as {show(kind or describe(placement))} of axis {describe(dim)}, "
            text += "which safeload does not join"
            raise rank.unsupported(name, text)
        step = -(-lengths[dim] // parts) if parts else 0
        begin = min(index * step, lengths[dim])
        offsets[dim] += begin
        lengths[dim] = min(step, lengths[dim] - begin)
    if listing.shape != tuple(lengths):
        raise rank.fault(name, f": this process should have {lengths} of {list(shape)}, but has {list(listing.shape)}")
    return BoxedListing(listing.row, shape, [Box(tuple(offsets), tuple(lengths), rank.stored(listing))])


def _mesh_sizes(mesh: Mapping[Any, Any], name: str, rank: RankFile) -> tuple[int, ...]:
    """Return the number of processes along each axis of a mesh."""
    layout = _state(mesh.get("_layout"))
    if "axes" in layout and isinstance(layout["axes"], (tuple, list)) and len(layout["axes"]) <= MAX_RANK:
        axes = [_state(axis).get("shape") for axis in layout["axes"]]
    elif "shape" in layout:
        axes = list(layout["shape"]) if isinstance(layout["shape"], (tuple, list)) else [layout["shape"]]
    elif type(mesh.get("mesh")) is PickledTensor:
        axes = list(_shape(mesh["mesh"].shape, name, rank))
    else:
        raise rank.unsupported(name, "has a mesh of unknown size")
    return tuple(prod(_shape(axis if isinstance(axis, (tuple, list)) else (axis,), name, rank)) for axis in axes)


def _check_order(order: Any, name: str, rank: RankFile) -> None:
    """Refuse an order of placements other than from left to right."""
    for entry in order[: MAX_RANK + 1] if isinstance(order, (tuple, list)) else ():
        axes: Any = entry.args[1] if type(entry) is Inert and len(entry.args) == 2 and len(order) <= MAX_RANK else None
        ordered = isinstance(axes, tuple) and len(axes) <= MAX_RANK and all(type(axis) is int for axis in axes)
        if not ordered or list(axes) != sorted(axes):
            raise rank.unsupported(name, "divides an axis in another order than its mesh, which safeload does not join")


def _sharded_tensor(name: str, value: Inert, rank: RankFile) -> Iterator[BoxedListing]:
    """Yield the local shards of a ShardedTensor."""
    state = value.args[3]
    if type(state) is not tuple or len(state) < 2 or type(state[0]) is not list:
        raise rank.fault(name, f": the state of a ShardedTensor must begin with its shards, got {describe(state)}")
    shape = _shape(_state(state[1]).get("size"), name, rank)
    for shard in state[0]:
        fields = _state(shard)
        listing = rank.listing(name, fields.get("tensor"))
        about = _state(fields.get("metadata"))
        offsets = _shape(about.get("shard_offsets"), name, rank)
        if listing.shape != _shape(about.get("shard_sizes"), name, rank):
            raise rank.fault(name, f": its shard should be {about.get('shard_sizes')}, but is {list(listing.shape)}")
        yield BoxedListing(listing.row, shape, [Box(offsets, listing.shape, rank.stored(listing))])
