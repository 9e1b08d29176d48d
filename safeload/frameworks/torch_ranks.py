"""Load the part of a checkpoint that one process of a torch DeviceMesh holds, for `safeload.torch.load_checkpoint`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core import dtypes, memory, opening
from ..core.checkpoint import tensors_of
from ..core.load import load_tensors, parse_target
from ..core.names import check_matches
from ..core.progress import Meter, Progress
from ..core.quantized_tensor import read_box
from ..core.tensors import Entry, Tensors, entries_of
from ..core.text import plural, show, tensor_named
from ..errors import SafeloadError, UnsupportedError
from ..models.choosing import Pieces, tensor_parallel
from . import torch_arrays
from .checkpoints import Selected, selecting
from .torch_arrays import torch

try:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError as error:
    raise UnsupportedError(f"mesh= needs torch.distributed.tensor, which torch {torch.__version__} lacks") from error

# The tensor-parallel plan of the model's family, and the name of its dimension in a mesh of several.
PLAN = "tp"
# Ranges along each axis of a tensor, in sequence.
Runs: TypeAlias = list[list[tuple[int, int]]]


class Share(NamedTuple):
    """The part of a tensor that this process holds."""

    entry: Entry
    target: dtypes.Dtype | None
    shape: tuple[int, ...]  # of the whole tensor
    dtype: Any  # of torch
    placements: tuple[Any, ...]
    runs: Runs

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def replicated(self) -> list[int]:
        """The mesh dimensions along which all processes hold equal parts."""
        return [number for number, placement in enumerate(self.placements) if type(placement) is Replicate]


def load(
    path: opening.Paths,
    mesh: Any,
    placements: Any,
    *,
    device: Any,
    local: bool,
    broadcast: bool,
    threads: int | None,
    progress: Progress,
    **selection: Any,
) -> dict[str, Any]:
    """Load this process's part of each selected tensor; if any process fails, all of them raise."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process, rank {dist.get_rank()}, is not in {mesh}")
    shares: list[Share] = []
    parts: dict[str, Any] = {}
    failure: Exception | None = None
    place: Any = None
    try:
        memory.check_threads(threads)
        place = _device(device, mesh)
        with selecting(path, **selection) as selected:
            shares = _shares(selected, mesh, placements, local)
            read = [share for share in shares if not broadcast or not any(_coordinates(mesh, share.replicated))]
            parts = _read(selected, read, place, threads, progress)
    except Exception as error:  # all processes have to hear of it
        failure = error
    _agree(mesh, shares, failure)
    if broadcast and place.type != "meta":
        for share in shares:
            parts[share.entry.name] = _broadcast(share, parts.get(share.entry.name), mesh, place)
    if local:
        return {share.entry.name: parts[share.entry.name] for share in shares}
    return {
        share.entry.name: DTensor.from_local(
            parts[share.entry.name].contiguous(),
            mesh,
            share.placements,
            run_check=False,
            shape=torch.Size(share.shape),
            stride=torch.empty(share.shape, device="meta").stride(),
        )
        for share in shares
    }


def _coordinates(mesh: Any, numbers: Sequence[int]) -> list[int]:
    """Return the place of this process along some dimensions of the mesh."""
    coordinates = mesh.get_coordinate()
    return [coordinates[number] for number in numbers]


def _device(device: Any, mesh: Any) -> Any:
    """Return the device of the parts: "cpu", the default, stands for this process's device of the mesh."""
    parsed = torch_arrays.device_of(device)
    if parsed is None:
        parsed = torch.device(mesh.device_type)
        if parsed.type not in ("cpu", "meta"):
            parsed = torch.device(parsed.type, torch.get_device_module(parsed).current_device())
    elif parsed.type not in (mesh.device_type, "meta"):
        raise ValueError(f"device {parsed} does not fit a mesh of {mesh.device_type} devices")
    return parsed


# ---- the parts of this process ----


def _shares(selected: Selected, mesh: Any, placements: Any, local: bool) -> list[Share]:
    """Return the parts of the selected tensors in their order."""
    checkpoint, merge, chosen_names, groups = selected
    if isinstance(placements, str):
        placements = {"*": placements}
    if not isinstance(placements, Mapping) or not all(isinstance(pattern, str) for pattern in placements):
        kinds = f'map name patterns to Shard, Replicate, "{PLAN}" or lists of placements, or be "{PLAN}"'
        raise TypeError(f"placements must {kinds}, got {show(placements)}")
    check_matches("placements", list(placements), chosen_names)
    plan: Mapping[str, Pieces] = {}
    if any(isinstance(value, str) and value == PLAN for value in placements.values()):
        plan = tensor_parallel(checkpoint.config, list(checkpoint), checkpoint.path)
    by_name = {}
    for members, dtype in groups:
        target = parse_target(dtype)
        for entry in entries_of(tensors_of(checkpoint, members), target):
            if merge is not None and entry.name in merge:
                row, grown = merge.target_row(entry.name, dtype), tuple(merge.base.target(entry.name).shape)
                shape, kind = torch_arrays.described(entry.name, row, grown)
            else:
                shape, kind = torch_arrays.of_entry(entry)
            pattern = next((text for text in placements if fnmatchcase(entry.name, text)), None)
            value = [Replicate()] * mesh.ndim if pattern is None else placements[pattern]
            try:
                if isinstance(value, str):
                    divided, runs = _by_plan(value, shape, mesh, plan.get(entry.name), local)
                else:
                    divided, runs = _by_placements(value, shape, mesh)
            except (TypeError, ValueError, UnsupportedError) as error:
                about = f"{tensor_named(entry.name)} {list(shape)}, placements {show(value)}, mesh {list(mesh.shape)}"
                raise type(error)(f"{about}: {error}") from None
            by_name[entry.name] = Share(entry, target, shape, kind, divided, runs)
    return [by_name[name] for name in chosen_names]


def _by_placements(value: Any, shape: tuple[int, ...], mesh: Any) -> tuple[tuple[Any, ...], Runs]:
    """Return checked placements, and the ranges of this process: each `Shard` divides the part of earlier ones."""
    placements = value if isinstance(value, (list, tuple)) else [value]
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            name = type(placement).__name__
            raise TypeError(f'{name} is not supported, expected Shard, Replicate or "{PLAN}"')
    if len(placements) != mesh.ndim:
        expected = plural(mesh.ndim, "placement")
        raise ValueError(f"expected {expected}, one for each dimension of the mesh, got {len(placements)}")
    runs: Runs = [[(0, size)] for size in shape]
    checked = []
    for number, placement in enumerate(placements):
        if type(placement) is Shard:
            dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
            if not 0 <= dim < len(shape):
                raise ValueError(f"dim {placement.dim} is out of range for {plural(len(shape), 'dimension')}")
            placement = Shard(dim)
            runs[dim] = _chunk(runs[dim], mesh, number)
        checked.append(placement)
    return tuple(checked), runs


def _by_plan(
    value: str, shape: tuple[int, ...], mesh: Any, pieces: Pieces | None, local: bool
) -> tuple[tuple[Any, ...], Runs]:
    """Return placements and ranges by the family's plan; placements do not describe a cut of several pieces."""
    if value != PLAN:
        raise ValueError(f'unknown plan, expected "{PLAN}"')
    named = list(mesh.mesh_dim_names or ())
    if mesh.ndim > 1 and PLAN not in named:
        raise ValueError(f'a mesh of several dimensions needs one with the name "{PLAN}"')
    number = named.index(PLAN) if PLAN in named else 0
    placements: list[Any] = [Replicate()] * mesh.ndim
    runs: Runs = [[(0, size)] for size in shape]
    if pieces is None or not shape or (len(shape) == 1 and not pieces.rows):  # a bias is added after columns are summed
        return tuple(placements), runs
    ranks, dim = mesh.size(number), max(0, len(shape) - 2) if pieces.rows else len(shape) - 1
    if min(pieces.sizes) < 1 or shape[dim] % sum(pieces.sizes):
        parts = " + ".join(map(str, pieces.sizes))
        raise ValueError(f"by the config, axis {dim} is {parts} equal parts, which do not divide {shape[dim]}")
    unit = shape[dim] // sum(pieces.sizes)
    fused = len(pieces.sizes) > 1
    for count in pieces.sizes if pieces.heads else (unit,) if fused else ():
        if count % ranks:
            unit_name = "head" if pieces.heads else "row"
            advice = ": pass a mapping with Replicate() for these tensors" if pieces.heads else ""
            raise UnsupportedError(f"{plural(count, unit_name)} cannot be divided among {ranks} ranks{advice}")
    if fused and not local:
        raise UnsupportedError(
            "its parts are cut one by one, which no placement of a DTensor describes: pass local=True"
        )
    edges = [unit * sum(pieces.sizes[:k]) for k in range(len(pieces.sizes) + 1)]
    runs[dim] = [run for edge in pairwise(edges) for run in _chunk([edge], mesh, number)]
    placements[number] = Shard(dim)
    return tuple(placements), runs


def _chunk(runs: list[tuple[int, int]], mesh: Any, number: int) -> list[tuple[int, int]]:
    """Return this process's part of ranges along a dimension of the mesh, as `torch.chunk` divides."""
    size = -(-sum(stop - start for start, stop in runs) // mesh.size(number))
    skipped = size * _coordinates(mesh, [number])[0]
    chunk = []
    for start, stop in runs:
        first, last = min(stop, start + skipped), min(stop, start + skipped + size)
        skipped -= first - start
        size -= last - first
        if last > first:
            chunk.append((first, last))
    return chunk


# ---- read and share ----


def _read(
    selected: Selected, shares: Sequence[Share], place: Any, threads: int | None, progress: Progress
) -> dict[str, Any]:
    """Return the parts by name; names of equal file bytes (tied weights) share a part."""
    _, merge, *_ = selected
    if place.type == "meta":
        return {share.entry.name: torch.empty(share.local_shape, dtype=share.dtype, device=place) for share in shares}
    parts: dict[str, Any] = {}
    known: dict[Any, Any] = {}
    mappings: dict[Any, Any] = {}
    sizes = [math.prod(share.local_shape) * share.dtype.itemsize for share in shares]
    meter = Meter(progress, sum(sizes))
    try:
        for share, size in zip(shares, sizes, strict=True):
            (entry, target, shape, kind, _, runs), name = share, share.entry.name
            changed = merge is not None and name in merge
            key: Any = name
            if not changed:
                own = entry.strided or entry.packed is not None  # its bytes alone do not determine it
                key = entry._replace(name="", at=entry.at if own else 0, packed=None), str(runs)
            if key not in known:
                whole: Any = None
                to = None if target is None else target.name
                if merge is not None and changed:
                    whole = merge.values(name, merge.target_row(name, to), threads=threads)
                elif share.local_shape == shape:
                    whole = load_tensors(
                        Tensors.of([entry.tensor]), backend="mmap", dtype=to, threads=threads, mappings=mappings
                    )[0][name]
                array = whole if share.local_shape == shape else _part(share, whole)
                raw = kind if array.dtype == np.uint8 and kind is not torch.uint8 else None
                known[key] = torch_arrays.from_array(array, name, raw).to(place)
            parts[name] = known[key] if key == name else known[key].view(share.local_shape)
            meter.add(size)
    finally:
        meter.close()
    return parts


def _part(share: Share, whole: Any) -> Any:
    """Return the ranges of this process from a file, or from the whole tensor."""
    entry, pieces = share.entry, []
    for ranges in product(*share.runs):
        box = tuple(slice(*run) for run in ranges)
        piece = read_box(entry.file, entry.at, box, share.target, entry.name) if whole is None else whole[box]
        pieces.append(piece)
    if not pieces:
        return np.empty(share.local_shape, entry.dtype if whole is None else whole.dtype)
    axis = next((k for k, runs in enumerate(share.runs) if len(runs) > 1), 0)
    return np.concatenate(pieces, axis) if len(pieces) > 1 or whole is not None else pieces[0]


def _agree(mesh: Any, shares: Sequence[Share], failure: Exception | None) -> None:
    """Raise on all processes if one has failed, or if they would hold parts of different tensors."""
    listed = [(share.entry.name, share.shape, str(share.dtype), str(share.placements)) for share in shares]
    digest = hashlib.sha256(str(listed).encode()).hexdigest()
    reports = {dist.get_rank(): (digest, failure and f"{type(failure).__name__}: {failure}")}
    for number in range(mesh.ndim):
        gathered: list[Any] = [None] * mesh.size(number)
        dist.all_gather_object(gathered, reports, group=mesh.get_group(number))
        reports = {rank: report for each in gathered for rank, report in each.items()}
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # which would keep this frame, and all arrays in it
    failed = {rank: text for rank, (_, text) in sorted(reports.items()) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        more = f" ({plural(len(failed) - 1, 'more rank')} failed)" if len(failed) > 1 else ""
        raise SafeloadError(f"loading failed on rank {rank}{more}: {text}")
    if len({digest for digest, _ in reports.values()}) > 1:
        raise SafeloadError("the ranks of the mesh opened different tensors, or passed different arguments")


def _broadcast(share: Share, part: Any, mesh: Any, place: Any) -> Any:
    """Return a part on all processes that hold it, from the first along each dimension that replicates it."""
    numbers = share.replicated
    if part is None:
        part = torch.empty(share.local_shape, dtype=share.dtype, device=place)
    if not part.numel():
        return part
    part = part.contiguous()
    raw = part.reshape(-1).view(torch.uint8)
    for done, number in enumerate(numbers, 1):
        if not any(_coordinates(mesh, numbers[done:])):  # other processes receive it along a later dimension
            group = mesh.get_group(number)
            dist.broadcast(raw, dist.get_global_rank(group, 0), group)
    return part
