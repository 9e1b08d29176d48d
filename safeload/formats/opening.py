"""One file of any format: told from its first bytes, opened, refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import FormatError, UnsupportedError
from ..files import WeightFile, open_descriptor
from ..tensor import ListedTable
from . import safetensors, sniffing

SAFETENSORS, TORCH_ZIP, TORCH_LEGACY, MOON = "safetensors", "torch zip", "torch legacy", "moon"

# What `format=` insists on, and the formats that it means.
FORMATS = {
    SAFETENSORS: (SAFETENSORS,),
    "torch": (TORCH_ZIP, TORCH_LEGACY),
    TORCH_ZIP: (TORCH_ZIP,),
    TORCH_LEGACY: (TORCH_LEGACY,),
    MOON: (MOON,),
}


_ABLE = "safetensors, torch checkpoints and MOON"


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
            if _format_of(head) is None:
                _refuse(path, head, _ABLE)
                raise
        else:
            if wanted.root is not None:
                file.close()
                raise UnsupportedError(f"{path}: root= selects a nested container, and safetensors has none")
            return Opened(SAFETENSORS, file)
    file = open_descriptor(path)
    try:
        head = file.read_at(0, sniffing.HEAD_SIZE)
        format = _format_of(head)
        if format is None:
            _refuse(path, head, _ABLE, whatever=True)
        elif wanted.formats is not None and format not in wanted.formats:
            raise FormatError(f"this is {sniffing.describe(head)}, not {wanted.formats[0]}", path, 0)
        else:
            file.table = _read_table(format, file, wanted)
            return Opened(format, file)
    except BaseException:
        file.close()
        raise
    raise AssertionError("a file is opened or refused")


def _format_of(head: bytes) -> str | None:
    """Which of the formats that are read in Python a file is, by its first bytes."""
    if sniffing.is_moon(head):
        return MOON
    if sniffing.is_torch(head):
        return TORCH_ZIP if sniffing.is_zip(head) else TORCH_LEGACY
    return None


def _read_table(format: str, file: WeightFile, wanted: Wanted) -> ListedTable:
    # What these import takes milliseconds that every import would pay.
    if format == MOON:
        from . import moon

        if wanted.root is not None:
            raise UnsupportedError(f"{file.path}: root= selects a nested container, and MOON has none")
        return moon.read_table(file)
    if format == TORCH_ZIP:
        from .torch_zip import read_table
    else:
        from .torch_legacy import read_table
    from .torch_tensors import Options

    return read_table(file, Options(wanted.root, wanted.inert))


def _refuse(path: str, head: bytes, able: str, *, whatever: bool = False) -> None:
    """Raises for a file that is recognizably something else, or ``whatever`` it is."""
    kind = sniffing.describe(head)
    if kind is not None:
        raise UnsupportedError(f"{path}: this is {kind}; this version reads {able}") from None
    if whatever or (head.strip() and not path.endswith(".safetensors")):
        raise FormatError(f"no weight format that is known starts with {head[:16].hex(' ')}", path, 0) from None
