"""Makes the tables of a checkpoint logical: each packed weight appears once, and its scales vanish into it.

Groups are formed over all files: a scale may be in another shard than its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.listed_table import ListedTable, Listing
from ..base.packing import CODES, Packed, Part
from ..base.text import plural, show
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, UnsupportedError
from . import gguf, quark, sparse
from .bitsandbytes import BESIDE as BESIDE_FOUR_BITS
from .bitsandbytes import GPTQMODEL_BESIDE, GPTQMODEL_STATE, STATES
from .checks import check
from .companions import IGNORED, unread
from .config import Quantization, quantization_of
from .config_files import config_of
from .contents import PackedContents
from .families import FAMILIES, IN_GGUF, Family
from .grid import Misfit, Refused
from .methods import COVERED
from .packed_group import FP8, PackedGroup, Stored

# Faults that one error lists.
_LISTED = 5

# What covered methods also write, and the table does not cover.
_UNCOVERED = frozenset(("marlin-24", "W4A16_AWQ", "W4A8_AWQ", "NVFP4_SVD", "MXFP4", "W4A8_MXFP4_FP8"))
# Dtypes of the codes of weights whose names do not say that they are packed.
_PACKING = frozenset(("U8", "I8", "U32"))
# Suffixes of the names of parts of bitsandbytes' codes.
_STRAYS = (*STATES.values(), *BESIDE_FOUR_BITS.values(), GPTQMODEL_STATE, *reversed(GPTQMODEL_BESIDE.values()))
# Markers of ComfyUI, whose 4-bit codes are in another order, and whose other codes may be rotated.
_COMFY = ("_quantization_metadata", ".comfy_quant")

_U8 = dtypes.BY_CODE["U8"]

# Location of a tensor: file and index in its table.
Place = tuple[WeightFile, int]


class Logical(NamedTuple):
    """What `find` found.

    Attributes:
        packed: packed tensors by the name of their codes, each with its logical name.
        hidden: names of parts and of ignored tensors, with the packed tensor that they belong to ("" for ignored ones).
        faults: what is missing or does not fit.
        refused: names of codes that are not dequantized, with the reason.
        apart: names of the companions of refused codes.
    """

    packed: dict[str, tuple[str, Packed]]
    hidden: dict[str, str]
    faults: list[str]
    refused: dict[str, str]
    apart: set[str]


def find(
    places: Mapping[str, Place], config: Mapping[str, Any] | None, marks: Iterable[str] = (), in_gguf: bool = False
) -> Logical:
    """The packed tensors of a checkpoint.

    Args:
        places: all tensors by name.
        config: parsed ``config.json``.
        marks: keys of the metadata of its files.
        in_gguf: whether the files are GGUF.

    Raises:
        UnsupportedError: a pattern of the configuration is not supported.
        OSError: a file cannot be read.
    """
    quantization = quantization_of(config)
    columns = {file: (file.table.rows, file.table.shapes) for file in {file for file, _ in places.values()}}
    tensors = {name: Stored(columns[file][0][index], columns[file][1][index]) for name, (file, index) in places.items()}
    found = Logical({}, {}, [], {}, set())
    if quantization is not None and quantization.get("transform_config"):
        return found  # weights in a rotated basis
    text = "" if quantization is None else quantization.text()
    contents = PackedContents(places, _part, (*STATES.values(), GPTQMODEL_STATE, ".weight_format", ".shape"))
    comfy = any(mark in marks for mark in _COMFY) or any(name.endswith(_COMFY[1]) for name in tensors)
    for name, stored in tensors.items():
        if comfy and stored.row.code not in FP8:
            continue
        _group(name, stored, tensors, places, quantization, text, contents, found, in_gguf)
    _settle(found)
    _refuse_unread(tensors, found)
    if in_gguf:
        found.packed.update((name, (name, one)) for name, one in gguf.ternary({file for file, _ in places.values()}))
    if found.packed:
        _hide_ignored(tensors, found)
    if quantization is not None and _is_covered(quantization):
        found.faults.extend(_without_scale(tensors, found, quantization))
        if quantization.method == "bitsandbytes":
            found.faults.extend(_strays(tensors, found, _STRAYS, str, "the quant_state or the codes are not"))
        if quantization.method == "compressed-tensors":
            what = "other parts of a sparse tensor are not"
            found.faults.extend(_strays(tensors, found, sparse.PARTS, sparse.owner_of, what))
    return found


def _is_covered(quantization: Quantization | None, name: str = "") -> bool:
    """Whether codes that fit no row of the table are a fault of the checkpoint.

    Args:
        quantization: of the checkpoint.
        name: of the codes; "" to ask about codes in general.
    """
    if quantization is None or quantization.method not in COVERED or quantization.unknown is not None:
        return False
    module = name.removesuffix(".weight")
    algorithm = quantization.algorithm(module) if quantization.method == "modelopt" else None
    if isinstance(algorithm, str) and algorithm.upper() in _UNCOVERED:
        return False
    layout = quantization.get("format")
    return not (isinstance(layout, str) and layout in _UNCOVERED)


def _group(
    name: str,
    stored: Stored,
    tensors: Mapping[str, Stored],
    places: Mapping[str, Place],
    quantization: Quantization | None,
    text: str,
    contents: PackedContents,
    found: Logical,
    in_gguf: bool,
) -> None:
    """Adds the group whose codes have this name, or the fault of one that does not fit."""
    fault = None
    for family in _families_of(stored.row.code, in_gguf):
        if not name.endswith(family.main):
            continue
        if family.method is not None and (quantization is None or quantization.method != family.method):
            continue
        names = _names_of(family, name, tensors)
        if names is None:
            continue
        logical = name.removesuffix(family.main) + family.logical if family.main else name
        group = PackedGroup(name, logical, names, tensors, quantization, text, contents)
        try:
            why = None if in_gguf else group.unknown()
            if why is not None:
                raise Refused(f"{why} (config.json) is not known to leave its values as they are")
            packed = check(group, family.describe(group))
        except Refused as refused:
            _refuse(found, name, str(refused), names.values())
            return
        except Misfit as misfit:
            fault = fault or f"tensor {show(logical)}: {misfit}"
            if family.method is not None and stored.row.code not in FP8:
                break
            continue
        if logical != name and logical in tensors:
            fault = f"tensor {show(logical)}: it is stored twice, as itself, and as {show(name)}"
            continue
        parts = {role: _part(places, part) for role, part in names.items()}
        if any(part is None for part in parts.values()):
            continue
        found.packed[name] = logical, Packed(packed, parts)  # type: ignore[arg-type]
        return
    if fault is not None and (in_gguf or _is_covered(quantization, name)):
        found.faults.append(fault)


@cache
def _families_of(code: str, in_gguf: bool) -> tuple[Family, ...]:
    """The families whose codes have a dtype."""
    return tuple(family for family in (IN_GGUF if in_gguf else FAMILIES) if code in family.dtypes)


def _settle(found: Logical) -> None:
    """Hides the parts. A part of another tensor is not packed itself, and two packed tensors do not share a name."""
    parts = {part.name for _, packed in found.packed.values() for role, part in packed.parts.items() if role != CODES}
    for name in parts & found.packed.keys():
        del found.packed[name]
    owners: dict[str, str] = {}
    for name, (logical, packed) in list(found.packed.items()):
        if owners.setdefault(logical, name) != name:
            found.faults.append(
                f"tensor {show(logical)}: it is stored twice, as {show(owners[logical])} and as {show(name)}"
            )
            del found.packed[name]
            continue
        found.hidden.update((part.name, logical) for part in packed.parts.values() if part.name != logical)


def _refuse(found: Logical, codes: str, reason: str, names: Iterable[str]) -> None:
    found.refused.setdefault(codes, reason)
    found.apart.update(names)


def _refuse_unread(tensors: Mapping[str, Stored], found: Logical) -> None:
    """Refuses codes beside a companion that changes values by its name, and that their family does not read."""
    owners = {logical: codes for codes, (logical, _) in found.packed.items()}
    if not owners:
        return
    unknown = (name for name in tensors if name not in found.packed and name not in found.hidden)
    for codes, name in list(unread(unknown, owners)):
        if codes in found.packed:
            logical, packed = found.packed.pop(codes)
            parts = [part.name for part in packed.parts.values()]
            for part in parts:
                found.hidden.pop(part, None)
            shown = show(name.removeprefix(logical.removesuffix(".weight")).lstrip("._"))
            _refuse(found, codes, f"{shown} beside its codes may change their values", [*parts, name])


def _names_of(family: Family, name: str, tensors: Mapping[str, Stored]) -> dict[str, str] | None:
    """Names of the parts by role; None if a required one is missing."""
    stem = name.removesuffix(family.main) if family.main else name
    names = {CODES: name}
    for kinds in (family.required, family.optional):
        for role, suffixes in kinds.items():
            for suffix in suffixes:
                if stem + suffix in tensors:
                    names[role] = stem + suffix
                    break
            else:
                if kinds is family.required:
                    return None
    return names


def _part(places: Mapping[str, Place], name: str) -> Part | None:
    """A stored tensor as a part; None if its bytes are not in C order and little-endian."""
    file, index = places[name]
    table = file.table
    if table.strides(index) is not None or table.big_endian(index):
        return None
    return Part(name, file, table.row(index), table.shape(index), *table.byte_range(index))


def _hide_ignored(tensors: Mapping[str, Stored], found: Logical) -> None:
    """Hides activation scales and the like."""
    for name in tensors:
        if name.rpartition(".")[2] in IGNORED and name not in found.packed:
            found.hidden.setdefault(name, "")


def _without_scale(tensors: Mapping[str, Stored], found: Logical, quantization: Quantization) -> list[str]:
    """Faults: codes without a scale, under a configuration that says that there are scales."""
    reported = {fault.split(": ", 1)[0] for fault in found.faults}
    faults = []
    for name, stored in tensors.items():
        if len(stored.shape) < 2 or any(name in names for names in (found.packed, found.hidden, found.refused)):
            continue
        if name in found.apart:
            continue
        packs = stored.row.code in _PACKING and name.endswith(("weight", "_proj"))
        words = ".weight" if quantization.method == quark.METHOD else ".qweight"
        packs = packs or (stored.row.code == "I32" and name.endswith(words))
        alone = packs or stored.row.code in FP8 or name.endswith(("_packed", "_blocks"))
        if alone and quantization.method == quark.METHOD and quark.unread(quantization, name) is not None:
            continue
        if alone and not _is_covered(quantization, name):
            continue
        if alone and f"tensor {show(name)}" not in reported and not _is_other_fault(name, reported):
            faults.append(
                f"tensor {show(name)} holds {stored.row.code} codes, but the checkpoint has no scale for them "
                f"({quantization} in config.json)"
            )
    return faults


def _strays(
    tensors: Mapping[str, Stored],
    found: Logical,
    suffixes: Sequence[str],
    owner_of: Callable[[str], str],
    what: str,
) -> list[str]:
    """Faults: parts without the rest, which may leave codes that look like weights."""
    reported = {fault.split(": ", 1)[0] for fault in found.faults}
    faults = []
    for name in tensors:
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is None or name in found.hidden or name in found.packed or name in found.apart:
            continue
        stem = name.removesuffix(suffix)
        owner = f"tensor {show(owner_of(stem))}"
        if owner not in reported and not any(stem + other in found.refused for other in suffixes):
            reported.add(owner)
            faults.append(f"{owner}: {show(name)} is there, but {what}")
    return faults


def _is_other_fault(name: str, reported: set[str]) -> bool:
    stems = [name.removesuffix(suffix) for suffix in ("_packed", "_blocks")]
    return any(f"tensor {show(stem)}" in reported for stem in (*stems, name.replace(".qweight", ".weight")))


# ---- tables ----


def make_logical(
    files: Sequence[WeightFile],
    where: Mapping[str, Place] | None,
    config: Mapping[str, Any] | None,
    title: str,
    complete: bool,
    in_gguf: bool = False,
) -> tuple[dict[str, Place] | None, dict[str, str], dict[str, Part], dict[str, str]]:
    """Gives open files tables in which each packed tensor appears once.

    Args:
        files: the files.
        where: file and index of each tensor; None for a single file.
        config: parsed ``config.json``; of the folder of a single file if it is None.
        title: the checkpoint, for errors.
        complete: whether the files are all of a checkpoint, so that a missing scale is an error.
        in_gguf: whether the files are GGUF, whose dtypes say what is packed: no configuration is looked for.

    Returns:
        The new ``where``; the names that are no longer listed, with the tensor that they belong to ("" for activation
        scales); activation scales by name; names of codes that are not dequantized, with the reason.

    Raises:
        FormatError: parts of packed tensors are missing, or do not fit.
    """
    places = dict(where) if where is not None else {n: (files[0], k) for k, n in enumerate(files[0].table.names)}
    if in_gguf:
        config = None
    elif config is None or quantization_of(config) is None:
        config = config_of(files, config, title)
    marks = [] if in_gguf else [key for file in files for key in file.table.metadata() or ()]
    try:
        found = find(places, config, marks, in_gguf)
    except UnsupportedError as error:
        raise UnsupportedError(f"{title}: {error}; stored=True opens the tensors as they are stored", title) from None
    if found.faults and (complete or in_gguf):
        for file in files:
            file.close()
        listed = "; ".join(found.faults[:_LISTED])
        more = len(found.faults) - _LISTED
        rest = f"; and {plural(more, 'more fault')}" if more > 0 else ""
        raise FormatError(f"{listed}{rest}. stored=True opens the tensors as they are stored", title)
    if not found.packed:
        return None if where is None else places, {}, {}, found.refused
    changed = {packed.parts[role].file for _, packed in found.packed.values() for role in packed.parts}
    changed |= {places[name][0] for name in found.hidden}
    aside = {name: _part(places, name) for name, whole in found.hidden.items() if not whole}
    ignored = {name: part for name, part in aside.items() if part is not None}
    for file in changed:
        unknown = file.table.unknown
        file.table = ListedTable(_listings(file, found), file.table.metadata())
        file.table.unknown = unknown
    if where is None:
        return None, found.hidden, ignored, found.refused
    result = {}
    for name, (file, index) in places.items():
        if name in found.hidden and name not in found.packed:
            continue
        logical = found.packed[name][0] if name in found.packed else name
        result[logical] = (file, file.table.find(logical) if file in changed else index)
    return result, found.hidden, ignored, found.refused


def _listings(file: WeightFile, found: Logical) -> Iterable[Listing]:
    table = file.table
    for name, row, shape, (begin, end) in zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True):
        if name in found.packed:
            logical, packed = found.packed[name]
            yield Listing(logical, _U8 if row.blocked else row, packed.packing.shape, begin, end, packed=packed)
        elif name not in found.hidden:
            index = table.find(name)
            yield Listing(name, row, shape, begin, end, table.strides(index), table.scale(index))
