"""Checkpoints of FSDP and DeepSpeed ZeRO: files of processes, whose pickles describe tensors in their archives.

FSDP writes ``model_world_size_<N>_rank_<R>.pt``, in which each of N processes has pickled its shards; the file of
process 0 stands for all files:

1. Each file is an ordinary archive of `torch.save` with a dict of names and tensors. Beside it there may be
   ``optim_world_size_...`` and ``extra_state_world_size_...``, which hold no weights.
2. A DTensor is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, arguments, state)``. The third argument is
   the whole shape; the state has the process's ``_local_tensor`` and its ``_spec``: a ``mesh`` of processes and
   ``placements``, one for each axis of the mesh.
3. ``Shard(dim)`` divides an axis of the tensor like `torch.chunk`: ceil(n / parts) rows for each process, fewer or none
   for the last ones. Placements apply from left to right, each to the part that the last left. ``Replicate``
   divides nothing.
4. The mesh has the position of the process, ``_coordinate_on_dim``, and its size: ``_layout``, or the tensor ``mesh``.
5. A ShardedTensor, of older FSDP, lists its local shards with their offsets and sizes.
6. Any other tensor is whole in each file.

A ZeRO checkpoint is opened by its first file of model states:

1. ``<folder>/latest`` is the name of a folder in it, as text: the tag. The tag's folder has the files.
2. ZeRO 1 and 2: ``mp_rank_00_model_states.pt``; ZeRO 3: ``zero_pp_rank_<rank>_mp_rank_00_model_states.pt`` for each
   process. Each process also has ``[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt``.
3. Model states: ``module`` (16-bit weights and buffers; with ZeRO 3 empty parameters), ``buffer_names``,
   ``param_shapes`` (for each group a dict of names and shapes), ``frozen_param_shapes``, ``frozen_param_fragments``,
   ``shared_params`` {alias: name}, and much else.
4. ZeRO 1 and 2: ``optimizer_state_dict.single_partition_of_fp32_groups`` has a float32 vector for each group. The
   vectors of all processes of a group, in order, are the parameters of the group in order, each followed by
   ``param_alignment_paddings`` elements if these exist, and padded at the end. The totals must agree when both are
   rounded up to a multiple of twice the number of processes.
5. ZeRO 3: ``optimizer_state_dict.fp32_flat_groups``. The vectors of a process, in order, hold its part of each
   parameter, in the order of all groups: ceil(elements / processes) elements, the last part padded.
6. Frozen weights: ZeRO 1 and 2 in ``module``; ZeRO 3 a part in ``frozen_param_fragments`` of each process.
7. The result has what DeepSpeed's ``zero_to_fp32`` gives: buffers, floating ones as float32; frozen weights as stored;
   trained parameters as float32; aliases.
"""

from __future__ import annotations

import re
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes
from ..core.arrays import Array, array_over
from ..core.registry import Candidate, Content, OpenRequest
from ..core.table import Listing
from ..core.text import error_about, show
from ..core.weight_file import WeightFile, open_without_table
from ..core.zip import Archive
from ..errors import FormatError, LimitError, MissingShardError, TensorNotFoundError, UnsupportedError
from .boxed import MAX_RANK, Box, BoxedListing, DataFolder, Region, in_one_box, in_pieces
from .numbered import FSDP_RANK, ZERO_MODEL, ZERO_OPTIMIZER, in_order
from .torch.file import read_tensors
from .torch.globals import SUBCLASS, PickledTensor
from .torch.tensors import MAX_NAME_TEXT_A_BYTE, NAME_TEXT_FREE, TensorPlaces, Tree
from .unpickle import FROM_TYPE, Inert, Unpickled, check_foreign, class_of, describe

# Globals outside the allowlist that the files of FSDP and of ZeRO name; they become placeholders.
_KNOWN_FSDP = re.compile(
    r"torch\.distributed\.[\w.]+|torch\._utils\._rebuild_wrapper_subclass|(?:__builtin__|builtins)\.getattr"
)
_KNOWN_ZERO = re.compile(r"deepspeed\.[\w.]+")
# Levels of dicts in a state dict.
MAX_DEPTH = 64
# Values that a pickle of any size can have; every further value takes at least a byte.
VALUES_FREE = 10_000


# ---- files of processes: pickles that describe tensors in their archives ----


class RankFile(NamedTuple):
    """An open file of a process."""

    file: WeightFile
    pickled: Unpickled
    places: TensorPlaces

    @property
    def value(self) -> dict[Any, Any]:
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
        return error_about(UnsupportedError, text, path=self.file.path, tensor=name)

    def fault(self, name: str, text: str) -> FormatError:
        return error_about(FormatError, text, path=self.file.path, tensor=name)

    def listing(self, name: str, tensor: Any) -> Listing:
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
        pickled, places = read_tensors(archive, file)
        foreign = {name: self._known.fullmatch(name) is not None for name in pickled.foreign}
        check_foreign([name for name in foreign if not foreign[name]], file.path, self._inert)
        self.named_globals |= dict.fromkeys(pickled.harmless, True) | foreign
        return RankFile(file, pickled, places)


# ---- FSDP ----


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a file belongs to."""
    if request.formats == ("deepspeed",):  # no file has one of the two formats without being asked for it
        with _Zero(candidate.file, _KNOWN_ZERO, request) as checkpoint:
            return checkpoint.read(request.root)
    with RankFolder(candidate.file, _KNOWN_FSDP, request) as folder:
        names = in_order(FSDP_RANK, folder.names, 1, 2)
        numbers = [tuple(map(int, match.groups())) for name in names if (match := FSDP_RANK.fullmatch(name))]
        sizes, present = sorted({size for size, _ in numbers}), {rank for _, rank in numbers}
        if len(sizes) != 1:
            text = f"rank files of jobs with {' and '.join(map(str, sizes[:5]))} processes: keep those of one job"
            raise folder.error(UnsupportedError, text)
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
                record = tensors.setdefault(name, listing._replace(boxes=[]))
                if (record.row, record.shape) != (listing.row, listing.shape):
                    text = f"is {listing.row.code} {list(listing.shape)} here, but "
                    raise rank.fault(name, f"{text}{record.row.code} {list(record.shape)} in another file")
                record.boxes.extend(listing.boxes)
    if root is not None and not tensors:
        raise error_about(TensorNotFoundError, f"no container {show(root)} with tensors", path=path)
    tree = Tree(rest, path, ranks[0].pickled.size)
    if (inner := next(tree.tensors(), None)) is not None:
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
    kind = class_of(value.args[1])
    if kind == "DTensor":
        return [_dtensor(name, value, rank)]
    if kind == "ShardedTensor":
        return _sharded_tensor(name, value, rank)
    raise rank.unsupported(name, f"is a {show(kind or describe(value))}, which safeload does not know")


def _state(value: Any) -> Mapping[Any, Any]:
    """Return the attributes of a placeholder or of a state: a dict, or a tuple of a dict and of slots."""
    state = value.state if type(value) is Inert else value
    parts = state[1::-1] if type(state) is tuple else (state,)
    dicts = [part for part in parts if type(part) is dict]
    return dicts[0] if len(dicts) == 1 else ChainMap(*dicts)  # not copied: tensors can share a large state


def _are_counts(value: Any, most: int | None = MAX_RANK) -> bool:
    """Return True for up to ``most`` numbers of elements."""
    known = isinstance(value, (tuple, list)) and (most is None or len(value) <= most)
    known = known and {int}.issuperset(map(type, value))
    return known and 0 <= min(value, default=0) <= max(value, default=0) < 1 << 62


def _shape(value: Any, name: str, rank: RankFile) -> tuple[int, ...]:
    if not _are_counts(value):
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
        kind = class_of(placement)
        if kind == "Replicate":
            continue
        dim = _state(placement).get("dim")
        if kind != "Shard" or type(dim) is not int or not -len(shape) <= dim < len(shape):
            shown = show(kind or describe(placement))
            raise rank.unsupported(name, f"is placed as {shown} of axis {describe(dim)}, which safeload does not join")
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


# ---- ZeRO ----

# Files of model parallelism other than ZeRO: experts, pipeline stages.
_OTHER = re.compile(r"(?:layer_.*|expp_rank_.*|.*expert.*)[-_](?:model|optim)_states\.pt", re.ASCII)
_F32 = dtypes.BY_CODE["F32"]
# Fields of the model states that describe the weights; the rest is metadata.
_WEIGHTS = frozenset(
    ("module", "param_shapes", "buffer_names", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
)


def _ranks_of(names: Sequence[str]) -> list[int]:
    """Return the numbers of the processes in the names of files."""
    matches = (ZERO_OPTIMIZER.fullmatch(name) or ZERO_MODEL.fullmatch(name) for name in names)
    return [int(match[1] or 0) for match in matches if match is not None]


# Consecutive elements of float32 and their number; shapes of parameters by name.
_Piece: TypeAlias = tuple[Region, int]
_Shapes: TypeAlias = dict[str, tuple[int, ...]]


def _take(vector: deque[_Piece], count: int) -> list[_Piece]:
    """Remove elements from the beginning of a vector in pieces, and return these; fewer at its end."""
    taken: list[_Piece] = []
    while count and vector:
        region, size = vector.popleft()
        part = min(count, size)
        if part:
            taken.append((region, part))
        if part < size:
            vector.appendleft((region._replace(begin=region.begin + part * 4), size - part))
        count -= part
    return taken


class _Zero(RankFolder):
    def read(self, root: str | None) -> Content:
        matches = [ZERO_MODEL.fullmatch(name) or ZERO_OPTIMIZER.fullmatch(name) for name in self.names]
        parallel = [match[0] for match in matches if match is not None and int(match[2]) > 0]
        parallel += filter(_OTHER.fullmatch, self.names)
        if parallel:
            text = "comes from tensor, pipeline or expert parallelism, which safeload does not join"
            advice = "convert the checkpoint to a universal one with DeepSpeed's ds_to_universal"
            raise self.error(UnsupportedError, f"{show(parallel[0])} {text}; {advice}")
        self._models = in_order(ZERO_MODEL, self.names, 2, 1)
        if not self._models:
            raise MissingShardError("there are no files of model states (*_model_states.pt)", self.shown)
        self._stage3 = self._models[0].startswith("zero_pp_rank_")
        self._optimizers = in_order(ZERO_OPTIMIZER, self.names, 2, 1)
        self._model = self.open_rank(self._models[0])
        value = self._model.value
        if value.get("ds_autoep_layers") or value.get("autoep_layers"):
            text = "has experts that DeepSpeed's AutoEP divides among processes, which safeload does not join"
            raise self.error(UnsupportedError, text)
        fields = self._model.field("module", dict)
        module = {name: item for name, item in fields.items() if type(name) is str and type(item) is PickledTensor}
        if root is None:
            tensors = self._masters(module)
        elif root != "module":
            raise self.error(TensorNotFoundError, f"no container {show(root)}; containers: module")
        elif self._stage3:
            text = 'root="module": ZeRO 3 stores no 16-bit weights, only the partitions of the float32 weights'
            raise self.error(UnsupportedError, text)
        else:
            tensors = {name: self._whole(name, tensor) for name, tensor in module.items()}
        rest = {key: item for key, item in value.items() if key not in _WEIGHTS}
        if len(module) < len(fields):  # states of modules other than tensors
            rest["module"] = {name: item for name, item in fields.items() if name not in module}
        return self.joined(tensors, Tree(rest, self._model.file.path, self._model.pickled.size).metadata())

    def _whole(self, name: str, tensor: Any) -> BoxedListing:
        return self._model.whole(self._model.listing(name, tensor))

    def _masters(self, module: Mapping[str, Any]) -> dict[str, BoxedListing]:
        """Return buffers, frozen and trained weights, and aliases."""
        model, path = self._model, self._model.file.path
        groups: list[_Shapes] = []
        trained: set[str] = set()
        for fields in model.field("param_shapes", (list, tuple)):
            shapes = self._shapes(fields)
            if not trained.isdisjoint(shapes):
                raise FormatError("two groups of param_shapes have a parameter of the same name", path)
            groups.append(shapes)
            trained.update(shapes)
        shared = model.value.get("shared_params") or {}
        if type(shared) is not dict or any(type(name) is not str for pair in shared.items() for name in pair):
            raise FormatError(f"shared_params must map names to names, got {describe(shared)}", path)
        buffers = model.field("buffer_names", (list, tuple))
        if any(type(name) is not str for name in buffers):
            raise FormatError(f"buffer_names must be names, got {describe(buffers)}", path)
        buffers = frozenset(buffers)
        tensors = {name: self._buffer(name, module[name]) for name in module if name in buffers}
        frozen = model.value.get("frozen_param_shapes") or {}
        if self._stage3:
            tensors.update(self._frozen_parts(self._shapes(frozen)))
        else:
            untrained = [n for n in module if n not in trained and n not in tensors and n not in shared]
            tensors.update({name: self._whole(name, module[name]) for name in untrained})
            fragments = model.value.get("frozen_param_fragments") or {}
            for name in self._shapes(frozen):
                if name not in tensors and type(fragments) is dict:
                    tensors[name] = self._whole(name, fragments.get(name))
        tensors.update(self._trained(groups))
        tensors.update({alias: tensors[name] for alias, name in shared.items() if name in tensors})
        return tensors

    def _shapes(self, shapes: Any) -> _Shapes:
        """Return checked shapes by name."""
        if type(shapes) is not dict:
            raise FormatError(f"shapes must be a dict, got {describe(shapes)}", self._model.file.path)
        for name, shape in shapes.items():
            if type(name) is not str or not _are_counts(shape):
                text = f"shape {describe(shape)} of parameter {describe(name)} is malformed"
                raise FormatError(text, self._model.file.path)
        return {name: tuple(shape) for name, shape in shapes.items()}

    def _buffer(self, name: str, tensor: Any) -> BoxedListing:
        listing = self._model.listing(name, tensor)
        if not listing.row.floating or listing.row is _F32:
            return self._model.whole(listing)
        return in_one_box(_F32, listing.shape, partial(_as_float32, self._model.file, listing))

    # ---- trained parameters ----

    def _trained(self, groups: Sequence[_Shapes]) -> dict[str, BoxedListing]:
        ranks = [self.open_rank(name) for name in self._optimizers]
        if not ranks:
            raise MissingShardError("there are no files of optimizer states (*_optim_states.pt)", self.shown)
        states = [rank.field("optimizer_state_dict", dict) for rank in ranks]
        stage = states[0].get("zero_stage")
        stage = stage.args[0] if type(stage) is Inert and len(stage.args) == 1 else stage
        if type(stage) is not int or not 0 <= stage <= 3 or (stage == 3) != self._stage3:
            raise FormatError(f"zero_stage {describe(stage)} does not fit the names of the files", ranks[0].file.path)
        count = states[0].get("partition_count")
        if isinstance(count, (list, tuple)) and count and all(type(n) is int for n in count):
            count = max(count)
        numbers = _ranks_of(self._optimizers)
        if count != len(ranks) or numbers != list(range(len(ranks))):
            text = f"partition_count is {describe(count)}, but there are files of {len(ranks)} processes: "
            raise MissingShardError(text + ", ".join(map(str, numbers[:20])), self.shown)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        vectors = [_pieces(rank, key, state) for rank, state in zip(ranks, states, strict=True)]
        tensors: dict[str, BoxedListing] = {}
        if stage == 3:
            joined = {name: shape for shapes in groups for name, shape in shapes.items()}
            at = self._divide(tensors, joined, list(map(deque, vectors)), (0,) * len(joined))
            totals = [_length(pieces) for pieces in vectors]
            if any(total != at for total in totals):
                text = f"a process holds {at:,} elements of all parameters, but its vectors have {totals[:8]}"
                raise FormatError(text, self.shown)
            return tensors
        if any(len(pieces) != len(groups) for pieces in vectors):
            text = f"{key} has {[len(pieces) for pieces in vectors[:8]]} vectors for {len(groups)} groups of parameters"
            raise FormatError(text, self.shown)
        for k, shapes in enumerate(groups):
            paddings = self._paddings(states[0].get("param_alignment_paddings"), k, len(shapes))
            vector = deque(pieces[k] for pieces in vectors)
            total, multiple = _length(vector), 2 * len(ranks)
            at = self._divide(tensors, shapes, [vector], paddings)
            if -(-at // multiple) != -(-total // multiple):
                raise FormatError(f"the parameters have {at:,} elements, their partitions {total:,}", self.shown)
        return tensors

    def _divide(
        self, tensors: dict[str, BoxedListing], shapes: _Shapes, parts: Sequence[deque[_Piece]], paddings: Sequence[int]
    ) -> int:
        """Add parameters that follow each other, each divided among all parts; return the elements of a part."""
        at, shortest = 0, min(map(_length, parts))
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            count = prod(shape)
            share = -(-count // len(parts))
            if at + share > shortest:
                text = f": its {share:,} elements at {at:,} reach beyond the partitions, which have {shortest:,}"
                raise self.error(FormatError, text, name)
            pieces: list[_Piece] = []
            for k, part in enumerate(parts):
                size = max(0, min(share, count - k * share))
                pieces += _take(part, size)
                _take(part, share + padding - size)
            tensors[name] = in_pieces(_F32, shape, pieces)
            at += share + padding
        return at

    def _paddings(self, paddings: Any, group: int, count: int) -> Sequence[int]:
        if paddings is None:
            return (0,) * count
        values: Any = paddings[group] if isinstance(paddings, (list, tuple)) and group < len(paddings) else None
        if not _are_counts(values, most=None) or len(values) != count:
            text = f"param_alignment_paddings of group {group} must be {count} numbers, got {describe(values)}"
            raise FormatError(text, self.shown)
        return list(values)

    # ---- frozen parameters of ZeRO 3 ----

    def _frozen_parts(self, shapes: _Shapes) -> Iterator[tuple[str, BoxedListing]]:
        if not shapes:
            return
        processes = len(self._optimizers)
        if _ranks_of(self._models) != list(range(processes)):
            text = f"frozen weights need the model states of {processes} processes, got {len(self._models)}"
            raise MissingShardError(text, self.shown)
        ranks = [self._model, *map(self.open_rank, self._models[1:])]
        fragments = [rank.field("frozen_param_fragments", dict) for rank in ranks]
        for name, shape in shapes.items():
            count = prod(shape)
            share = -(-count // processes)
            listings = [rank.listing(name, parts.get(name)) for rank, parts in zip(ranks, fragments, strict=True)]
            for rank, listing in zip(ranks, listings, strict=True):
                row = listings[0].row
                if listing.row is not row or listing.shape != (share,) or listing.strides is not None:
                    text = f": its fragment must be {share} elements of {row.code}, got {list(listing.shape)}"
                    raise rank.fault(name, text)
            stored = (rank.stored(listing) for rank, listing in zip(ranks, listings, strict=True))
            sizes = (min(share, count - begin) for begin in range(0, count, share or 1))
            yield name, in_pieces(listings[0].row, shape, zip(stored, sizes, strict=False))


def _length(pieces: Iterable[_Piece]) -> int:
    return sum(count for _, count in pieces)


def _pieces(rank: RankFile, key: str, state: Any) -> list[_Piece]:
    """Return the flat vectors of a process."""
    pieces = []
    for k, vector in enumerate(rank.field(key, (list, tuple), state)):
        name = f"{key}.{k}"
        listing = rank.listing(name, vector)
        if listing.row is not _F32 or len(listing.shape) != 1 or listing.strides is not None:
            raise rank.fault(name, f"must be a vector of F32, got {listing.row.code} {list(listing.shape)}")
        pieces.append((rank.stored(listing), listing.shape[0]))
    return pieces


def _as_float32(file: WeightFile, listing: Listing) -> Array:
    _, row, shape, begin, end, strides, *_ = listing
    memory = bytearray(end - begin)
    file.store.read_into(begin, memory)
    values = array_over(memory, dtypes.array_dtype(row.number), shape, 0, strides)
    return np.ascontiguousarray(values.astype(np.float32)).reshape(-1).view(np.uint8)
