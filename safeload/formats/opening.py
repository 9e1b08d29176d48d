"""One file of any format: told from its first bytes, opened, refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import FormatError, UnsupportedError
from ..files import WeightFile, open_descriptor
from . import safetensors, sniffing

SAFETENSORS, TORCH_ZIP, TORCH_LEGACY = "safetensors", "torch zip", "torch legacy"

# What `format=` insists on, and the formats that it means.
FORMATS = {
    SAFETENSORS: (SAFETENSORS,),
    "torch": (TORCH_ZIP, TORCH_LEGACY),
    TORCH_ZIP: (TORCH_ZIP,),
    TORCH_LEGACY: (TORCH_LEGACY,),
}


class Wanted(NamedTuple):
    """How to open files.

    Attributes:
        formats: those that will do; None for any.
        root: name of the nested container to take; None for all.
        inert: whether foreign globals of a pickle may be there, as placeholders.
    """

    formats: tuple[str, ...] | None = None
    root: str | None = None
    inert: bool = False


class Opened(NamedTuple):
    """An open file.

    Attributes:
        format: a key of `FORMATS`, but not "torch".
        file: the file with its table.
    """

    format: str
    file: WeightFile

    @property
    def metadata(self) -> dict[Any, Any]:
        """What it says besides its tensors."""
        return self.file.table.metadata() or {}


def open_file(path: str, wanted: Wanted) -> Opened:
    """Opens a file; no tensor is read.

    Raises:
        FormatError: it breaks its format.
        UnsupportedError: no format that is read, or not the one wanted.
        OSError: the system's own errors.
    """
    if wanted.formats is None or SAFETENSORS in wanted.formats:
        try:
            # First as what it most likely is: one call and no look at the path before it.
            file = safetensors.open_file(path)
        except FormatError:
            head = sniffing.read_head(path)
            if wanted.formats is not None or sniffing.is_safetensors(head):
                raise
            if not sniffing.is_torch(head):
                _refuse(path, head, "safetensors and torch checkpoints")
                raise
        else:
            if wanted.root is not None:
                file.close()
                raise UnsupportedError(f"{path}: root= selects a nested container, and safetensors has none")
            return Opened(SAFETENSORS, file)
    file = open_descriptor(path)
    try:
        return _open_torch(path, file, wanted)
    except BaseException:
        file.close()
        raise


def _open_torch(path: str, file: WeightFile, wanted: Wanted) -> Opened:
    head = file.read_at(0, sniffing.HEAD_SIZE)
    if not sniffing.is_torch(head):
        _refuse(path, head, "torch checkpoints", whatever=True)
    format = TORCH_ZIP if sniffing.is_zip(head) else TORCH_LEGACY
    if wanted.formats is not None and format not in wanted.formats:
        raise FormatError(f"this is {sniffing.describe(head)}, not {wanted.formats[0]}", path, 0)
    # Only here: what these import takes milliseconds that every import would pay.
    from . import torch_legacy, torch_zip
    from .torch_tensors import Options

    read = torch_zip.read_table if format == TORCH_ZIP else torch_legacy.read_table
    file.table = read(file, Options(wanted.root, wanted.inert))
    return Opened(format, file)


def _refuse(path: str, head: bytes, able: str, *, whatever: bool = False) -> None:
    """Raises for a file that is recognizably something else, or ``whatever`` it is."""
    kind = sniffing.describe(head)
    if kind is not None:
        raise UnsupportedError(f"{path}: this is {kind}; this version reads {able}") from None
    if whatever or (head.strip() and not path.endswith(".safetensors")):
        raise FormatError(f"no weight format that is known starts with {head[:16].hex(' ')}", path, 0) from None
