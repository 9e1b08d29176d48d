"""Open a ZeRO checkpoint of DeepSpeed by its first file of model states.

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
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, array_over
from ..base.listed_table import Listing
from ..base.messages import error_about
from ..base.text import show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, MissingShardError, TensorNotFoundError, UnsupportedError
from ..stores.store import ByteStore
from .boxed import MAX_RANK, Box, BoxedListing, InFile, assemble
from .numbered import ZERO_MODEL, ZERO_OPTIMIZER, in_order, zero_models
from .rank_files import RankFile, open_rank
from .registry import Candidate, Content, OpenRequest
from .torch.flatten import Tree
from .torch.globals import PickledTensor
from .unpickle.machine import Inert, describe


class FlatPiece(NamedTuple):
    """Consecutive elements of a vector."""

    store: ByteStore
    begin: int  # first byte in the store
    length: int  # in elements


class FlatVector:
    """A vector of elements in pieces, one after another."""

    def __init__(self, pieces: Sequence[FlatPiece], itemsize: int) -> None:
        self._pieces = [piece for piece in pieces if piece.length]
        self._itemsize = itemsize
        self._starts: list[int] = []
        self.count = 0
        for piece in self._pieces:
            self._starts.append(self.count)
            self.count += piece.length

    def boxes(self, first: int, count: int, at: int = 0) -> Iterator[Box]:
        """Yield the boxes of elements [first, first + count) of the vector; elements beyond its end have none."""
        end = first + count  # `at` is the position of `first` in the parameter
        k = max(0, bisect_right(self._starts, first) - 1)
        while first < end and k < len(self._pieces):
            store, begin, size = self._pieces[k]
            skipped = first - self._starts[k]
            part = min(end - first, size - skipped)
            if part > 0:
                yield Box((at,), (part,), InFile(store, begin + skipped * self._itemsize))
                first += part
                at += part
            k += 1


# Files of model parallelism other than ZeRO: experts, pipeline stages.
_OTHER = re.compile(r"(?:layer_.*|expp_rank_.*|.*expert.*)[-_](?:model|optim)_states\.pt", re.ASCII)
_F32 = dtypes.BY_CODE["F32"]
_OPTIMIZER = "optimizer_state_dict"
_AUTO_EP = ("ds_autoep_layers", "autoep_layers")
# Globals outside the allowlist that these files name; they become placeholders.
_KNOWN = re.compile(r"deepspeed\.[\w.]+")
# Fields of the model states that describe the weights; the rest is metadata.
_WEIGHTS = frozenset(
    ("module", "param_shapes", "buffer_names", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
)


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Open the checkpoint that a file of model states belongs to."""
    checkpoint = _Zero(candidate.file, request)
    try:
        return checkpoint.read(request.root)
    except BaseException:
        checkpoint.close()
        raise


def _rank_of(name: str) -> int:
    """Return the number of the process in the name of a file."""
    match = ZERO_OPTIMIZER.fullmatch(name) or ZERO_MODEL.fullmatch(name)
    return 0 if match is None else int(match[1] or 0)


def _parallel(names: Sequence[str]) -> list[str]:
    """Return the files that only tensor, pipeline or expert parallelism writes."""
    divided = [
        name
        for name in names
        if (match := ZERO_MODEL.fullmatch(name) or ZERO_OPTIMIZER.fullmatch(name)) is not None and int(match[2]) > 0
    ]
    return divided + [name for name in names if _OTHER.fullmatch(name)]


class _Zero:
    """The open files of a checkpoint."""

    def __init__(self, file: WeightFile, request: OpenRequest) -> None:
        self._file = file
        self._files = file.files
        self._inert = request.inert
        self._folder, _ = self._files.split(file.place)
        self._path = self._files.shown(self._folder)
        listing = [name for name, is_folder in self._files.listing(self._folder) if not is_folder]
        parallel = _parallel(listing)
        if parallel:
            text = (
                f"{show(parallel[0])} comes from tensor, pipeline or expert parallelism, which safeload does not join; "
            )
            text += "convert the checkpoint to a universal one with DeepSpeed's ds_to_universal"
            raise error_about(UnsupportedError, text, path=self._path)
        self._model_names = zero_models(listing)
        self._optimizer_names = in_order(ZERO_OPTIMIZER, listing, 2, 1)
        self._opened: list[RankFile] = []
        self._model = self._open(self._model_names[0])

    def close(self) -> None:
        for rank in self._opened:
            rank.file.close()

    def _open(self, name: str) -> RankFile:
        rank = open_rank(self._files, self._files.join(self._folder, name), _KNOWN, inert=self._inert)
        self._opened.append(rank)
        return rank

    def read(self, root: str | None) -> Content:
        value = self._model.value
        for key in _AUTO_EP:
            if value.get(key):
                text = "has experts that DeepSpeed's AutoEP divides among processes, which safeload does not join"
                raise error_about(UnsupportedError, text, path=self._path)
        fields = self._model.field("module", dict)
        module = {
            name: tensor for name, tensor in fields.items() if type(name) is str and type(tensor) is PickledTensor
        }
        tensors = self._module(module) if root == "module" else self._masters(module, root)
        rest = {key: item for key, item in value.items() if key not in _WEIGHTS}
        if len(module) < len(fields):  # states of modules other than tensors
            rest["module"] = {name: item for name, item in fields.items() if name not in module}
        metadata = Tree(rest, self._model.file.path, self._model.pickled.size).metadata()
        named = {name: harmless for rank in self._opened for name, harmless in rank.named_globals.items()}
        stores = [rank.file.store for rank in self._opened]
        return Content(assemble(self._file, self._folder, tensors, stores, metadata=metadata, named_globals=named))

    def _module(self, module: Mapping[str, Any]) -> dict[str, BoxedListing]:
        """Return the 16-bit weights as stored."""
        if self._stage3:
            text = 'root="module": ZeRO 3 stores no 16-bit weights, only the partitions of the float32 weights'
            raise error_about(UnsupportedError, text, path=self._path)
        return {name: _whole(self._model, self._model.listing(name, tensor)) for name, tensor in module.items()}

    @property
    def _stage3(self) -> bool:
        return self._model_names[0].startswith("zero_pp_rank_")

    def _masters(self, module: Mapping[str, Any], root: str | None) -> dict[str, BoxedListing]:
        """Return buffers, frozen and trained weights, and aliases."""
        if root is not None:
            text = f"no container {show(root)}; containers: module"
            raise error_about(TensorNotFoundError, text, path=self._path)
        groups: list[dict[str, tuple[int, ...]]] = []
        trained: set[str] = set()
        for fields in self._model.field("param_shapes", (list, tuple)):
            shapes = self._shapes(fields)
            if not trained.isdisjoint(shapes):
                raise FormatError("two groups of param_shapes have a parameter of the same name", self._model.file.path)
            groups.append(shapes)
            trained.update(shapes)
        shared = self._model.value.get("shared_params") or {}
        if type(shared) is not dict or any(type(name) is not str for pair in shared.items() for name in pair):
            raise FormatError(f"shared_params must map names to names, got {describe(shared)}", self._model.file.path)
        buffer_names = self._model.field("buffer_names", (list, tuple))
        if any(type(name) is not str for name in buffer_names):
            raise FormatError(f"buffer_names must be names, got {describe(buffer_names)}", self._model.file.path)
        buffer_names = frozenset(buffer_names)
        tensors = {name: self._buffer(name, module[name]) for name in module if name in buffer_names}
        if self._stage3:
            tensors.update(self._frozen_parts())
        else:
            frozen = (name for name in module if name not in trained and name not in tensors and name not in shared)
            tensors.update({name: _whole(self._model, self._model.listing(name, module[name])) for name in [*frozen]})
            fragments = self._model.value.get("frozen_param_fragments") or {}
            for name in self._shapes(self._model.value.get("frozen_param_shapes") or {}):
                if name not in tensors and type(fragments) is dict:
                    tensors[name] = _whole(self._model, self._model.listing(name, fragments.get(name)))
        tensors.update(self._trained(groups))
        tensors.update({alias: tensors[name] for alias, name in shared.items() if name in tensors})
        return tensors

    def _shapes(self, shapes: Any) -> dict[str, tuple[int, ...]]:
        """Return checked shapes by name."""
        if type(shapes) is not dict:
            raise FormatError(f"shapes must be a dict, got {describe(shapes)}", self._model.file.path)
        for name, shape in shapes.items():
            valid = isinstance(shape, (tuple, list)) and len(shape) <= MAX_RANK
            if type(name) is not str or not valid or any(type(n) is not int or not 0 <= n < 1 << 62 for n in shape):
                text = f"shape {describe(shape)} of parameter {describe(name)} is malformed"
                raise FormatError(text, self._model.file.path)
        return {name: tuple(shape) for name, shape in shapes.items()}

    def _buffer(self, name: str, tensor: Any) -> BoxedListing:
        listing = self._model.listing(name, tensor)
        if not listing.row.floating or listing.row is _F32:
            return _whole(self._model, listing)
        box = Box((0,) * len(listing.shape), listing.shape, _AsFloat32(self._model.file, listing))
        return BoxedListing(_F32, listing.shape, [box])

    # ---- trained parameters ----

    def _trained(self, groups: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, BoxedListing]:
        ranks = [self._open(name) for name in self._optimizer_names]
        if not ranks:
            raise MissingShardError("there are no files of optimizer states (*_optim_states.pt)", self._path)
        states = [rank.field(_OPTIMIZER, dict) for rank in ranks]
        stage = states[0].get("zero_stage")
        stage = stage.args[0] if type(stage) is Inert and len(stage.args) == 1 else stage
        if type(stage) is not int or not 0 <= stage <= 3 or (stage == 3) != self._stage3:
            text = f"zero_stage {describe(stage)} does not fit the names of the files"
            raise FormatError(text, ranks[0].file.path)
        count = states[0].get("partition_count")
        if isinstance(count, (list, tuple)) and count and all(type(n) is int for n in count):
            count = max(count)
        numbers = [_rank_of(name) for name in self._optimizer_names]
        if count != len(ranks) or numbers != list(range(len(ranks))):
            text = f"partition_count is {describe(count)}, but there are files of {len(ranks)} processes: "
            raise MissingShardError(text + ", ".join(map(str, numbers[:20])), self._path)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        vectors = [
            _pieces(rank, rank.field(key, (list, tuple), state), key) for rank, state in zip(ranks, states, strict=True)
        ]
        if stage == 3:
            parts = [FlatVector(pieces, 4) for pieces in vectors]
            return dict(self._divided({name: shape for shapes in groups for name, shape in shapes.items()}, parts))
        if any(len(pieces) != len(groups) for pieces in vectors):
            text = f"{key} has {[len(pieces) for pieces in vectors[:8]]} vectors for {len(groups)} groups of parameters"
            raise FormatError(text, self._path)
        paddings = states[0].get("param_alignment_paddings")
        tensors: dict[str, BoxedListing] = {}
        for k, shapes in enumerate(groups):
            vector = FlatVector([pieces[k] for pieces in vectors], 4)
            tensors.update(self._joined(shapes, vector, self._paddings(paddings, k, len(shapes)), len(ranks)))
        return tensors

    def _paddings(self, paddings: Any, group: int, count: int) -> Sequence[int]:
        if paddings is None:
            return (0,) * count
        values: Any = paddings[group] if isinstance(paddings, (list, tuple)) and group < len(paddings) else None
        valid = isinstance(values, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
        if not valid or values is None or len(values) != count:
            text = f"param_alignment_paddings of group {group} must be {count} numbers, got {describe(values)}"
            raise FormatError(text, self._path)
        return list(values)

    def _joined(
        self, shapes: Mapping[str, tuple[int, ...]], vector: FlatVector, paddings: Sequence[int], processes: int
    ) -> Iterator[tuple[str, BoxedListing]]:
        """Yield the parameters of a group (ZeRO 1 and 2)."""
        at = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            count = prod(shape)
            if at + count > vector.count:
                raise self._too_short(name, count, at, vector.count)
            yield name, BoxedListing(_F32, shape, list(vector.boxes(at, count)), flat=True)
            at += count + padding
        multiple = 2 * processes
        if -(-at // multiple) != -(-vector.count // multiple):
            raise FormatError(f"the parameters have {at:,} elements, their partitions {vector.count:,}", self._path)

    def _divided(
        self, shapes: Mapping[str, tuple[int, ...]], parts: Sequence[FlatVector]
    ) -> Iterator[tuple[str, BoxedListing]]:
        """Yield parameters divided among all processes (ZeRO 3)."""
        at, processes = 0, len(parts)
        shortest = min(part.count for part in parts)
        for name, shape in shapes.items():
            count = prod(shape)
            share = -(-count // processes)
            if at + share > shortest:
                raise self._too_short(name, share, at, shortest)
            boxes: list[Box] = []
            for rank, part in enumerate(parts):
                begin = rank * share
                if begin < count:
                    boxes += part.boxes(at, min(share, count - begin), begin)
            yield name, BoxedListing(_F32, shape, boxes, flat=True)
            at += share
        if any(part.count != at for part in parts):
            counts = [part.count for part in parts[:8]]
            raise FormatError(
                f"a process holds {at:,} elements of all parameters, but its vectors have {counts}", self._path
            )

    def _too_short(self, name: str, count: int, at: int, total: int) -> FormatError:
        text = f": its {count:,} elements at {at:,} reach beyond the partitions, which have {total:,}"
        return error_about(FormatError, text, path=self._path, tensor=name)

    # ---- frozen parameters of ZeRO 3 ----

    def _frozen_parts(self) -> Iterator[tuple[str, BoxedListing]]:
        shapes = self._model.value.get("frozen_param_shapes") or {}
        if not shapes:
            return
        shapes = self._shapes(shapes)
        processes = len(self._optimizer_names)
        if [_rank_of(name) for name in self._model_names] != list(range(processes)):
            text = f"frozen weights need the model states of {processes} processes, got {len(self._model_names)}"
            raise MissingShardError(text, self._path)
        ranks = [self._model, *map(self._open, self._model_names[1:])]
        fragments = [rank.field("frozen_param_fragments", dict) for rank in ranks]
        for name, shape in shapes.items():
            count = prod(shape)
            share = -(-count // processes)
            boxes: list[Box] = []
            row: dtypes.Dtype | None = None
            for number, (rank, parts) in enumerate(zip(ranks, fragments, strict=True)):
                listing = rank.listing(name, parts.get(name))
                row = listing.row if row is None else row
                if listing.row is not row or listing.shape != (share,) or listing.strides is not None:
                    text = f": its fragment must be {share} elements of {row.code}, got {list(listing.shape)}"
                    raise error_about(FormatError, text, path=rank.file.path, tensor=name)
                begin = number * share
                if begin < count:
                    boxes.append(Box((begin,), (min(share, count - begin),), rank.stored(listing)))
            if row is not None:
                yield name, BoxedListing(row, shape, boxes, flat=True)


def _whole(rank: RankFile, listing: Listing) -> BoxedListing:
    """Return a tensor in a single box."""
    return BoxedListing(
        listing.row, listing.shape, [Box((0,) * len(listing.shape), listing.shape, rank.stored(listing))]
    )


def _pieces(rank: RankFile, vectors: Sequence[Any], key: str) -> list[FlatPiece]:
    """Return the flat vectors of a process."""
    pieces = []
    for k, vector in enumerate(vectors):
        name = f"{key}.{k}"
        listing = rank.listing(name, vector)
        if listing.row is not _F32 or len(listing.shape) != 1 or listing.strides is not None:
            text = f"must be a vector of F32, got {listing.row.code} {list(listing.shape)}"
            raise error_about(FormatError, text, path=rank.file.path, tensor=name)
        pieces.append(FlatPiece(rank.file.store, listing.begin, listing.shape[0]))
    return pieces


class _AsFloat32:
    """A small tensor that is converted as it is read; see `BoxSource`."""

    def __init__(self, file: WeightFile, listing: Listing) -> None:
        self._file = file
        self._listing = listing

    def region(self) -> None:
        return None

    def unpack(self) -> Array:
        _, row, shape, begin, end, strides, *_ = self._listing
        memory = bytearray(end - begin)
        self._file.store.read_into(begin, memory)
        values = array_over(memory, dtypes.array_dtype(row.number), shape, 0, strides)
        converted: Array = np.ascontiguousarray(values.astype(np.float32))
        return converted.reshape(-1).view(np.uint8)
