"""Describe the parts of a weight in memory as their family would describe them in a file."""

from __future__ import annotations

from collections.abc import Mapping

from ..base import dtypes, packing
from ..base.arrays import Array
from ..base.packing import Packing
from ..base.preset import Preset
from .families import Stored, families
from .grid import Misfit
from .packed_group import GroupContext, PackedGroup
from .quantization import Quantization


class _Contents:
    """The contents of small parts; see `contents.PackedContents`."""

    def __init__(self, parts: Mapping[str, Array]) -> None:
        self._parts = parts

    def __call__(self, name: str) -> bytes:
        return self._parts[name].tobytes()

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(self._parts[name].tolist())

    def note(self, name: str, key: str) -> str | None:
        return None


def names_of(preset: Preset, name: str) -> dict[str, str]:
    """Return the names of the parts of a weight by role, and its own under `packing.NAME`."""
    module = name.removesuffix(".weight")
    return {packing.NAME: name, **{role: module + part.suffix for role, part in preset.parts.items()}}


def packing_of(preset: Preset, name: str, parts: Mapping[str, Array], quantization: Quantization) -> Packing:
    """Return the packing of a weight."""
    names = names_of(preset, name)
    stored, contents = {}, {}
    for role, array in parts.items():
        row = dtypes.BY_CODE[preset.parts[role].dtype or dtypes.row_of(array.dtype).code]  # type: ignore[union-attr]
        stored[names[role]] = Stored(row, array.shape)
        contents[names[role]] = array
    context = GroupContext(stored, quantization, quantization.text(), _Contents(contents))  # type: ignore[arg-type]
    codes = names[packing.CODES]
    own = {role: text for role, text in names.items() if role != packing.NAME}
    for family in families():
        if family.describe is None or stored[codes].row.code not in family.dtypes or not codes.endswith(family.main):
            continue
        if family.method not in (None, quantization.method) or family.parts_beside(codes, stored) is None:
            continue
        try:
            return PackedGroup(codes, name, own, context).described(family)
        except Misfit:
            continue
    raise AssertionError(f"no family reads {preset.name}")
