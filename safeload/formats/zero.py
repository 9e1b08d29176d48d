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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from ..base import dtypes
from ..base.arrays import Array, array_over
from ..base.table import Listing
from ..base.text import error_about, show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, MissingShardError, TensorNotFoundError, UnsupportedError
from ..stores.store import ByteStore
from .boxed import MAX_RANK, BoxedListing, Region, in_one_box, in_pieces
from .fsdp import RankFile, RankFolder
from .numbered import ZERO_MODEL, ZERO_OPTIMIZER, in_order, zero_models
from .registry import Candidate, Content, OpenRequest
from .torch.globals import PickledTensor
from .torch.tensors import Tree
from .unpickle.machine import Inert, describe

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
    with _Zero(candidate.file, _KNOWN, request) as checkpoint:
        return checkpoint.read(request.root)


def _ranks_of(names: Sequence[str]) -> list[int]:
    """Return the numbers of the processes in the names of files."""
    matches = (ZERO_OPTIMIZER.fullmatch(name) or ZERO_MODEL.fullmatch(name) for name in names)
    return [int(match[1] or 0) for match in matches if match is not None]


# Consecutive elements of float32: the store, the first byte in it, the number of elements.
_Piece: TypeAlias = tuple[ByteStore, int, int]


def _take(vector: deque[_Piece], count: int) -> list[tuple[Region, int]]:
    """Remove elements from the beginning of a vector in pieces, and return their places; fewer at its end."""
    taken: list[tuple[Region, int]] = []
    while count and vector:
        store, begin, size = vector.popleft()
        part = min(count, size)
        if part:
            taken.append((Region(store, begin), part))
        if part < size:
            vector.appendleft((store, begin + part * 4, size - part))
        count -= part
    return taken


class _Zero(RankFolder):
    """A checkpoint."""

    def read(self, root: str | None) -> Content:
        matches = [ZERO_MODEL.fullmatch(name) or ZERO_OPTIMIZER.fullmatch(name) for name in self.names]
        parallel = [match[0] for match in matches if match is not None and int(match[2]) > 0]
        parallel += filter(_OTHER.fullmatch, self.names)
        if parallel:
            raise self._unsupported(
                f"{show(parallel[0])} comes from tensor, pipeline or expert parallelism, which safeload does not join; "
                "convert the checkpoint to a universal one with DeepSpeed's ds_to_universal"
            )
        self._models = zero_models(self.names)
        self._stage3 = self._models[0].startswith("zero_pp_rank_")
        self._optimizers = in_order(ZERO_OPTIMIZER, self.names, 2, 1)
        self._model = self.open_rank(self._models[0])
        value = self._model.value
        if any(value.get(key) for key in _AUTO_EP):
            raise self._unsupported(
                "has experts that DeepSpeed's AutoEP divides among processes, which safeload does not join"
            )
        fields = self._model.field("module", dict)
        module = {
            name: tensor for name, tensor in fields.items() if type(name) is str and type(tensor) is PickledTensor
        }
        if root is None:
            tensors = self._masters(module)
        elif root != "module":
            raise error_about(TensorNotFoundError, f"no container {show(root)}; containers: module", path=self.shown)
        elif self._stage3:
            raise self._unsupported(
                'root="module": ZeRO 3 stores no 16-bit weights, only the partitions of the float32 weights'
            )
        else:
            tensors = {name: self._whole(name, tensor) for name, tensor in module.items()}
        rest = {key: item for key, item in value.items() if key not in _WEIGHTS}
        if len(module) < len(fields):  # states of modules other than tensors
            rest["module"] = {name: item for name, item in fields.items() if name not in module}
        return self.joined(tensors, Tree(rest, self._model.file.path, self._model.pickled.size).metadata())

    def _unsupported(self, text: str) -> UnsupportedError:
        return error_about(UnsupportedError, text, path=self.shown)

    def _whole(self, name: str, tensor: Any) -> BoxedListing:
        return self._model.whole(self._model.listing(name, tensor))

    def _masters(self, module: Mapping[str, Any]) -> dict[str, BoxedListing]:
        """Return buffers, frozen and trained weights, and aliases."""
        model, path = self._model, self._model.file.path
        groups: list[dict[str, tuple[int, ...]]] = []
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
            return self._model.whole(listing)
        return in_one_box(_F32, listing.shape, partial(_as_float32, self._model.file, listing))

    # ---- trained parameters ----

    def _trained(self, groups: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, BoxedListing]:
        ranks = [self.open_rank(name) for name in self._optimizers]
        if not ranks:
            raise MissingShardError("there are no files of optimizer states (*_optim_states.pt)", self.shown)
        states = [rank.field(_OPTIMIZER, dict) for rank in ranks]
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
        self,
        tensors: dict[str, BoxedListing],
        shapes: Mapping[str, tuple[int, ...]],
        parts: Sequence[deque[_Piece]],
        paddings: Sequence[int],
    ) -> int:
        """Add parameters that follow each other, each divided among all parts; return the elements of a part."""
        at, shortest = 0, min(map(_length, parts))
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            count = prod(shape)
            share = -(-count // len(parts))
            if at + share > shortest:
                text = f": its {share:,} elements at {at:,} reach beyond the partitions, which have {shortest:,}"
                raise error_about(FormatError, text, path=self.shown, tensor=name)
            pieces: list[tuple[Region, int]] = []
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
        valid = isinstance(values, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
        if not valid or len(values) != count:
            text = f"param_alignment_paddings of group {group} must be {count} numbers, got {describe(values)}"
            raise FormatError(text, self.shown)
        return list(values)

    # ---- frozen parameters of ZeRO 3 ----

    def _frozen_parts(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, BoxedListing]]:
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
    return sum(count for *_, count in pieces)


def _pieces(rank: RankFile, key: str, state: Any) -> list[_Piece]:
    """Return the flat vectors of a process."""
    pieces = []
    for k, vector in enumerate(rank.field(key, (list, tuple), state)):
        name = f"{key}.{k}"
        listing = rank.listing(name, vector)
        if listing.row is not _F32 or len(listing.shape) != 1 or listing.strides is not None:
            raise rank.fault(name, f"must be a vector of F32, got {listing.row.code} {list(listing.shape)}")
        pieces.append((rank.file.store, listing.begin, listing.shape[0]))
    return pieces


def _as_float32(file: WeightFile, listing: Listing) -> Array:
    _, row, shape, begin, end, strides, *_ = listing
    memory = bytearray(end - begin)
    file.store.read_into(begin, memory)
    values = array_over(memory, dtypes.array_dtype(row.number), shape, 0, strides)
    return np.ascontiguousarray(values.astype(np.float32)).reshape(-1).view(np.uint8)
