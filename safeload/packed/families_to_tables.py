"""Find packed tensors and make the tables of a checkpoint logical: a packed weight appears once, without its scales.

Groups are formed over all files: a scale can be in another shard than its weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from ..base import dtypes
from ..base.listed_table import ListedTable, Listing
from ..base.packing import CODES, Packed, Packing, Part
from ..base.text import plural, show, tensor_named
from ..engine.run.weight_file import WeightFile
from ..errors import FormatError, UnsupportedError
from .companions import IGNORED, is_zero_point, unread
from .contents import PackedContents
from .conv1d import as_stored, conv1d_model, is_named_conv1d
from .families import (
    FAMILIES,
    FP8,
    GPTQMODEL_PARTS,
    GPTQMODEL_STATE,
    IN_GGUF,
    SPARSE,
    SPARSE_PARTS,
    SPARSE_STEMS,
    STATE_PARTS,
    STATES,
    Family,
    Stored,
)
from .gguf import of_rows, ternary
from .grid import Misfit, Refused
from .methods import QUARK
from .packed_group import GroupContext, PackedGroup, check
from .quantization import Quantization, config_beside, config_inside, find_quantization
from .refused import quark_specs, unread_specs

# Faults listed in an error.
_LISTED = 5

# Dtypes of codes with ordinary names.
_PACKING = frozenset(("U8", "I8", "U32"))
# Suffixes of the parts of bitsandbytes' codes, and of sparse tensors. No such part means anything alone.
_STATE_SUFFIXES = (*STATES.values(), *STATE_PARTS.values(), GPTQMODEL_STATE, *reversed(GPTQMODEL_PARTS.values()))
_SPARSE_SUFFIXES = (SPARSE, *SPARSE_PARTS[:2])
# Suffixes of small descriptions, to read in a batch.
_DESCRIPTIONS = (*STATES.values(), GPTQMODEL_STATE, ".weight_format", ".shape")
# Markers of ComfyUI, which stores 4-bit codes in another order and can rotate wider codes, except fp8.
_COMFY_METADATA, _COMFY_SUFFIX = "_quantization_metadata", ".comfy_quant"

_U8 = dtypes.BY_CODE["U8"]

# Location of a tensor: file and index in its table.
Place = tuple[WeightFile, int]


class Logical(NamedTuple):
    """The tables of a checkpoint with packed tensors, see `make_logical`."""

    where: dict[str, Place] | None  # file and index of each tensor; None for a single file
    hidden: dict[str, str]  # unlisted names, with their packed tensor ("" for activation scales)
    ignored: dict[str, Part]  # activation scales by name
    refused: dict[str, str]  # unsupported codes, with the reason
    quantization: Quantization | None  # from the configuration, the files or their folders


def make_logical(
    files: Sequence[WeightFile],
    where: Mapping[str, Place] | None,
    quantization: Quantization | None,
    *,
    title: str,
    complete: bool,
    in_gguf: bool = False,
    config: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Logical:
    """Give open files tables in which each packed tensor appears once.

    A missing scale is an error if the files are a ``complete`` checkpoint.
    """
    places = dict(where) if where is not None else {n: (files[0], k) for k, n in enumerate(files[0].table.names)}
    if quantization is None and not in_gguf:
        quantization = find_quantization(files, title)
    marked = not in_gguf and any(_COMFY_METADATA in (file.table.metadata() or ()) for file in files)
    if quantization is not None and quantization.rival is not None and not any(map(_has_words, files)):
        quantization = quantization.rival  # the settings of MLX are stray
    conv1d = None
    if not in_gguf and any(map(is_named_conv1d, places)):
        conv1d = conv1d_model(config or config_inside(files[0]) or config_beside(files[0]))
    finder = _Finder(places, None if in_gguf else quantization, in_gguf=in_gguf, comfy=marked, model_type=conv1d)
    try:
        finder.run()
        finder.restore_shapes(shapes)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{title}: {error}; pass stored=True to open the tensors as stored", path=title
        ) from None
    if conv1d is not None:
        finder.turn([name for name, (logical, _) in finder.packed.items() if is_named_conv1d(logical)])
    if finder.faults and (complete or in_gguf):
        for file in files:
            file.close()
        listed = "; ".join(finder.faults[:_LISTED])
        more = len(finder.faults) - _LISTED
        rest = f"; and {plural(more, 'more fault')}" if more > 0 else ""
        raise FormatError(f"{listed}{rest}. Pass stored=True to open the tensors as stored", title)
    if not finder.packed and not finder.shapes:
        return Logical(None if where is None else places, {}, {}, finder.refused, quantization)
    changed = {packed.parts[role].file for _, packed in finder.packed.values() for role in packed.parts}
    changed |= {places[name][0] for name in (*finder.hidden, *finder.shapes)}
    aside = {name: _part(places, name) for name, owner in finder.hidden.items() if not owner}
    ignored = {name: part for name, part in aside.items() if part is not None}
    for file in changed:
        unknown = file.table.unknown
        file.table = ListedTable(_listings(file, finder), file.table.metadata())
        file.table.unknown = unknown
    if where is None:
        return Logical(None, finder.hidden, ignored, finder.refused, quantization)
    result = {}
    for name, (file, index) in places.items():
        if name in finder.hidden and name not in finder.packed:
            continue
        logical = finder.packed[name][0] if name in finder.packed else name
        result[logical] = (file, file.table.find(logical) if file in changed else index)
    return Logical(result, finder.hidden, ignored, finder.refused, quantization)


def _has_words(file: WeightFile) -> bool:
    """Return True if a file has tensors of the dtype of MLX's codes."""
    return any(row.code == "U32" for row in file.table.rows)


def _listings(file: WeightFile, finder: _Finder) -> Iterable[Listing]:
    table = file.table
    for name, row, shape, (begin, end) in zip(table.names, table.rows, table.shapes, table.byte_ranges(), strict=True):
        if name in finder.packed:
            logical, packed = finder.packed[name]
            yield Listing(logical, _U8 if row.blocked else row, packed.packing.shape, begin, end, packed=packed)
        elif name not in finder.hidden:
            index = table.find(name)
            own = finder.shapes.get(name, shape)
            yield Listing(name, row, own, begin, end, table.strides(index), table.scale(index))


def _part(places: Mapping[str, Place], name: str) -> Part | None:
    """Return a stored tensor as a part; None if its bytes are not in C order and little-endian."""
    file, index = places[name]
    table = file.table
    if table.strides(index) is not None or table.big_endian(index):
        return None
    return Part(name, file, table.row(index), table.shape(index), *table.byte_range(index))


# ---- finding packed tensors ----


class _Finder:
    """Finds the packed tensors of a checkpoint."""

    def __init__(
        self,
        places: Mapping[str, Place],
        quantization: Quantization | None,
        *,
        in_gguf: bool,
        comfy: bool,
        model_type: str | None,
    ) -> None:
        self.packed: dict[str, tuple[str, Packed]] = {}  # by the name of the codes: logical name and packed tensor
        self.shapes: dict[str, tuple[int, ...]] = {}  # original shapes of plain tensors that are stored as rows
        self.hidden: dict[str, str] = {}  # parts, with their packed tensor, and ignored tensors, with ""
        self.faults: list[str] = []  # missing or misfitting parts
        self.refused: dict[str, str] = {}  # unsupported codes, with the reason
        self._companions: set[str] = set()  # of refused codes
        self._families: dict[str, Sequence[Family]] = {}  # that the tensors can form, by the dtype of the codes
        self._ends = ""  # all names, each before a newline
        columns = {file: (file.table.rows, file.table.shapes) for file in {file for file, _ in places.values()}}
        self._tensors = {
            name: Stored(columns[file][0][index], columns[file][1][index]) for name, (file, index) in places.items()
        }
        self._places, self._quantization, self._in_gguf = places, quantization, in_gguf
        self._comfy = comfy or any(name.endswith(_COMFY_SUFFIX) for name in self._tensors)
        text = "" if model_type is None else json.dumps({"model_type": model_type})
        text = text if quantization is None else quantization.text(model_type)
        contents = PackedContents(places, _part, _DESCRIPTIONS)
        self._context = GroupContext(self._tensors, quantization, text, contents)

    def run(self) -> None:
        """Find all packed tensors and faults."""
        quantization = self._quantization
        if quantization is not None and quantization.is_rotated:
            return  # weights in a rotated basis
        for name, stored in self._tensors.items():
            if not self._comfy or stored.row.code in FP8:
                self._group(name, stored)
        self._hide_parts()
        self._refuse_unread()
        if self._in_gguf:
            files = {file for file, _ in self._places.values()}
            self.packed.update((name, (name, packed)) for name, packed in ternary(files))
        if self.packed:
            self._hide_ignored()
        if quantization is not None and quantization.is_covered():
            self._add_codes_without_scale(quantization)
            if quantization.method == "bitsandbytes":
                self._add_strays(_STATE_SUFFIXES, str, "but not the quant_state or the codes")
            if quantization.method == "compressed-tensors":
                self._add_strays(_SPARSE_SUFFIXES, _sparse_owner, "but not the other parts of a sparse tensor")

    def restore_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Add tensors that are stored as rows of another length."""
        for name, shape in shapes.items():
            file, index = self._places[name]
            across = shape[-1] % file.table.row(index).block and 0 not in shape  # blocks cross rows
            part = _part(self._places, name) if across else None
            if part is not None:
                self.packed[name] = name, of_rows(part, shape)
            elif name not in self.packed:
                self.shapes[name] = shape

    def _group(self, name: str, stored: Stored) -> None:
        """Add the packed tensor with codes of this name, or a fault if the codes fit no family."""
        fault, quantization = None, self._quantization
        for family in self._families_of(stored.row.code):
            if not name.endswith(family.main):
                continue
            names = self._names_of(family, name)
            if names is None:
                continue
            logical = name.removesuffix(family.main) + family.logical if family.main else name
            if family.private:
                module, dot, parameter = logical.rpartition(".")
                if not parameter.startswith("_"):
                    continue
                logical = f"{module}{dot}{parameter[1:]}"
            group = PackedGroup(name, logical, names, self._context)
            try:
                why = None if self._in_gguf else group.unknown()
                if why is not None:
                    raise Refused(f"{why} (config.json) can change their values in an unknown way")
                packed = check(group, _describer(family.describe)(group))
            except Refused as refused:
                self._refuse(name, str(refused), names.values())
                return
            except Misfit as misfit:
                fault = fault or f"tensor {show(logical)}: {misfit}"
                if family.method is not None and stored.row.code not in FP8:
                    break
                continue
            if logical != name and logical in self._tensors:
                fault = f"tensor {show(logical)}: stored twice, as itself and as {show(name)}"
                continue
            parts = {role: _part(self._places, part) for role, part in names.items()}
            if any(part is None for part in parts.values()):
                continue
            self.packed[name] = logical, Packed(packed, parts)  # type: ignore[arg-type]
            return
        if fault is not None and (self._in_gguf or (quantization is not None and quantization.is_covered(name))):
            self.faults.append(fault)

    def turn(self, names: Iterable[str]) -> None:
        """Give the weights of Conv1D layers the axes of their files, or refuse them."""
        for name in names:
            logical, packed = self.packed[name]
            stored = as_stored(packed.packing)
            if isinstance(stored, str):
                self._refuse(name, stored, self._remove(name)[1])
            else:
                self.packed[name] = logical, packed._replace(packing=stored)

    def _families_of(self, code: str) -> Sequence[Family]:
        """Return the families that codes of a dtype can belong to; they are few, and the tensors can be many."""
        families = self._families.get(code)
        if families is None:
            method = None if self._quantization is None else self._quantization.method
            families = self._families[code] = [
                family
                for family in _families_of(code, self._in_gguf)
                if family.method in (None, method) and all(map(self._has_suffix, family.required.values()))
            ]
        return families

    def _has_suffix(self, suffixes: Sequence[str]) -> bool:
        """Return False if no name of a tensor has any of these suffixes."""
        if not self._ends:
            self._ends = "\n".join([*self._tensors, ""])
        return any(f"{suffix}\n" in self._ends for suffix in suffixes)

    def _names_of(self, family: Family, name: str) -> dict[str, str] | None:
        """Return the names of the parts by role; None if a required part is missing."""
        stem = name.removesuffix(family.main) if family.main else name
        names = {CODES: name}
        for suffixes_by_role in (family.required, family.optional):
            for role, suffixes in suffixes_by_role.items():
                for suffix in suffixes:
                    if stem + suffix in self._tensors:
                        names[role] = stem + suffix
                        break
                else:
                    if suffixes_by_role is family.required:
                        return None
        return names

    def _refuse(self, codes: str, reason: str, names: Iterable[str]) -> None:
        self.refused.setdefault(codes, reason)
        self._companions.update(names)

    def _remove(self, codes: str) -> tuple[str, list[str]]:
        """Remove a packed tensor, and return its logical name and the names of its parts."""
        logical, packed = self.packed.pop(codes)
        parts = [part.name for part in packed.parts.values()]
        for part in parts:
            self.hidden.pop(part, None)
        return logical, parts

    def _hide_parts(self) -> None:
        """Hide the parts of packed tensors. A part is never packed itself, and logical names are unique."""
        parts = {
            part.name for _, packed in self.packed.values() for role, part in packed.parts.items() if role != CODES
        }
        for name in parts & self.packed.keys():
            del self.packed[name]
        owners: dict[str, str] = {}
        for name, (logical, packed) in list(self.packed.items()):
            if owners.setdefault(logical, name) != name:
                first = show(owners[logical])
                self.faults.append(f"tensor {show(logical)}: stored twice, as {first} and as {show(name)}")
                del self.packed[name]
                continue
            self.hidden.update((part.name, logical) for part in packed.parts.values() if part.name != logical)

    def _refuse_unread(self) -> None:
        """Refuse codes beside an unread companion if its name suggests a change of their values."""
        owners = {logical: codes for codes, (logical, _) in self.packed.items()}
        if not owners:
            return
        unknown = (name for name in self._tensors if name not in self.packed and name not in self.hidden)
        for codes, name in list(unread(unknown, owners)):
            if codes in self.packed:
                logical, parts = self._remove(codes)
                shown = show(name.removeprefix(logical.removesuffix(".weight")).lstrip("._"))
                self._refuse(codes, f"{shown} beside its codes can change their values", [*parts, name])

    def _hide_ignored(self) -> None:
        """Hide activation scales and similar companions."""
        for name in self._tensors:
            if name.rpartition(".")[2] in IGNORED and name not in self.packed:
                self.hidden.setdefault(name, "")

    # ---- faults of a covered configuration ----

    def _add_codes_without_scale(self, quantization: Quantization) -> None:
        reported = {fault.split(": ", 1)[0] for fault in self.faults}
        for name, stored in self._tensors.items():
            if len(stored.shape) < 2 or any(name in names for names in (self.packed, self.hidden, self.refused)):
                continue
            if name in self._companions or not _looks_like_codes(name, stored, quantization):
                continue
            if quantization.method == QUARK:
                specs = quark_specs(quantization, name)
                if unread_specs(quantization, name, specs) is not None:
                    continue
            if quantization.is_covered(name) and not _is_reported(name, reported):
                self.faults.append(
                    f"tensor {show(name)} holds {stored.row.code} codes, but the checkpoint has no scale for them "
                    f"({quantization} in config.json)"
                )

    def _add_strays(self, suffixes: Sequence[str], owner_of: Callable[[str], str], missing: str) -> None:
        """Add faults for parts without the rest of their tensor: codes left alone look like weights."""
        reported = {fault.split(": ", 1)[0] for fault in self.faults}
        for name in self._tensors:
            suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
            if suffix is None or name in self.hidden or name in self.packed or name in self._companions:
                continue
            stem = name.removesuffix(suffix)
            owner = tensor_named(owner_of(stem))
            if owner not in reported and not any(stem + other in self.refused for other in suffixes):
                reported.add(owner)
                self.faults.append(f"{owner}: the checkpoint has {show(name)}, {missing}")


@cache
def _families_of(code: str, in_gguf: bool) -> tuple[Family, ...]:
    """Return the families with codes of a dtype."""
    return tuple(family for family in (IN_GGUF if in_gguf else FAMILIES) if code in family.dtypes)


@cache
def _describer(path: str) -> Callable[[PackedGroup], Packing]:
    """Import the function named by `Family.describe`; checkpoints import only the families they need."""
    module, _, function = path.partition(".")
    describe: Callable[[PackedGroup], Packing] = getattr(import_module(f".{module}", __package__), function)
    return describe


def _looks_like_codes(name: str, stored: Stored, quantization: Quantization) -> bool:
    """Return True if a matrix without a scale must be codes under a covered configuration."""
    code = stored.row.code
    if code in FP8 or name.endswith(("_packed", "_blocks")):
        return not is_zero_point(name)
    if code == "I32":
        return name.endswith(".weight" if quantization.method == QUARK else ".qweight")
    return code in _PACKING and name.endswith(("weight", "_proj"))


def _is_reported(name: str, reported: set[str]) -> bool:
    stems = (name, name.removesuffix("_packed"), name.removesuffix("_blocks"), name.replace(".qweight", ".weight"))
    return any(tensor_named(stem) in reported for stem in stems)


def _sparse_owner(stem: str) -> str:
    """Return the name of the tensor whose sparse parts have this stem."""
    return stem if stem.endswith(SPARSE_STEMS[:-1]) else f"{stem}.weight"
