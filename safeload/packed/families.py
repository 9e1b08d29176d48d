"""The families of quantized tensors: a module each, listed here, with its rows at the end.

A row says which stored tensors belong together, by the suffixes of their names, and has the function that turns their
shapes and dtypes into a `Packing`, or explains why they do not fit. Shapes decide; the configuration should confirm.
The finder (`find`) tries the rows in order, and recognizes codes of unsupported formats by the same suffixes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from ..base import dtypes
from ..base.data import read_data
from ..base.packing import CODES, Packing
from ..base.preset import Preset

MODULES = [
    "quark", "modelopt", "bitnet", "gemma", "bitsandbytes", "mlx", "compressed_tensors", "gptq", "subclasses", "gguf",
    "floats", "refused",
]  # fmt: skip

FP8 = frozenset(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
# The suffix of compressed-tensors' sparse values, which mean nothing without their positions.
SPARSE = ".compressed"


class Stored(NamedTuple):
    """A tensor as a file stores it."""

    row: dtypes.Dtype
    shape: tuple[int, ...]  # logical shape


class Strays(NamedTuple):
    """Parts that look like weights without the rest of their tensor."""

    method: str  # ``quant_method`` under which they are a fault
    suffixes: tuple[str, ...]
    missing: str  # for messages
    ends: tuple[str, ...] = ("",)  # of the names of tensors; other names get ".weight"


# Of a format, and the names of the linear modules that stay unquantized.
Settings: TypeAlias = Callable[[Preset, Sequence[str]], dict[str, Any]]


class Family(NamedTuple):
    """A family of packed tensors, or a recognized quantization that safeload does not dequantize."""

    name: str
    main: str  # suffix of the name of the codes
    dtypes: frozenset[str]  # codes of the dtypes of the codes
    required: Mapping[str, tuple[str, ...]]  # suffixes of the parts in place of ``main``, preferred first
    describe: Callable[[Any], Packing] | None  # of a `PackedGroup`; may raise `Misfit`. None if ``reader`` is set
    optional: Mapping[str, tuple[str, ...]] = {}  # suffixes of parts that can be absent
    logical: str | None = None  # replaces ``main`` in the name of the packed tensor; None leaves it
    # required ``quant_method`` of the configuration; if set, only this row and fp8 apply to its codes
    method: str | None = None
    private: bool = False  # True if the names of parameters begin with "_" in the file: X._weight_qdata is X.weight
    telling: tuple[str, ...] = ()  # suffixes in place of ``main`` beside codes of any dtype
    wide: bool = False  # True if codes of any dtype are a single column
    described_in: tuple[str, ...] = ()  # suffixes of small parts, to read in a batch
    strays: Strays | None = None
    reader: str | None = None  # the tool that reads an unsupported quantization; ``name`` says why it is unsupported
    engine: str | None = None  # the engine that loads folders with this row's tensors, if we write them
    settings: Callable[[Preset, Sequence[str]], dict[str, Any]] | None = (
        None  # for config.json: see `engines.settings_of`
    )
    methods: tuple[str, ...] = ()  # of an unsupported quantization: values of ``quant_method``, ``format`` and so on

    def logical_name(self, codes: str) -> str | None:
        """Return the name of the packed tensor, or None for codes of another name."""
        name = codes if self.logical is None else codes[: len(codes) - len(self.main)] + self.logical
        if not self.private:
            return name
        module, dot, parameter = name.rpartition(".")
        return f"{module}{dot}{parameter[1:]}" if parameter.startswith("_") else None

    def parts_beside(self, codes: str, tensors: Collection[str]) -> dict[str, str] | None:
        """Return the names of the parts by role; None if a required part is missing."""
        stem = codes[: len(codes) - len(self.main)]
        names = {CODES: codes}
        for suffixes_by_role in (self.required, self.optional):
            for role, suffixes in suffixes_by_role.items():
                for suffix in suffixes:
                    if stem + suffix in tensors:
                        names[role] = stem + suffix
                        break
                else:
                    if suffixes_by_role is self.required:
                        return None
        return names


@cache
def families() -> tuple[Family, ...]:
    """Return all rows; their modules are imported here, because most checkpoints need none."""
    return tuple(row for name in MODULES for row in import_module(f".{name}", __package__).FAMILIES)


def filled(key: str, **fields: Any) -> dict[str, Any]:
    """Return settings of ``engines.json`` with some fields filled in, in the order of the engine's tool."""
    return {**read_data(__name__, "engines.json")["settings"][key], **fields}
