"""One file of any format: told from its first bytes, opened, refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from ..base.file import WeightFile, open_descriptor
from ..errors import ForbiddenError, FormatError, SafeloadError, UnsupportedError
from . import foreign as sniffing
from .safetensors import file as safetensors

SAFETENSORS, TORCH_ZIP, TORCH_LEGACY = "safetensors", "torch zip", "torch legacy"
GGUF, MOON, NPZ, NPY, PICKLE = "gguf", "moon", "npz", "npy", "pickle"

# What `format=` insists on, and the formats that it means.
FORMATS = {
    SAFETENSORS: (SAFETENSORS,),
    "torch": (TORCH_ZIP, TORCH_LEGACY),
    TORCH_ZIP: (TORCH_ZIP,),
    TORCH_LEGACY: (TORCH_LEGACY,),
    GGUF: (GGUF,),
    MOON: (MOON,),
    NPZ: (NPZ,),
    NPY: (NPY,),
    PICKLE: (PICKLE,),
}


# Formats that their first bytes tell, and whose reader needs nothing but the file.
_PLAIN = {MOON: sniffing.is_moon, GGUF: sniffing.is_gguf, NPY: sniffing.is_npy}

_ABLE = "safetensors, torch checkpoints, pickled arrays of numpy, GGUF, npz, npy and MOON"


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
        beside: a temporary file with more tensors; None as a rule.
        names: of the tensors of both in their order, where there is a second.
    """

    format: str
    file: WeightFile
    beside: WeightFile | None = None
    names: Sequence[str] = ()

    @property
    def files(self) -> list[WeightFile]:
        """The file, and the one beside it."""
        return [self.file] if self.beside is None else [self.file, self.beside]

    @property
    def where(self) -> dict[str, tuple[WeightFile, int]] | None:
        """File and index of each tensor; None where there is one file."""
        if self.beside is None:
            return None
        places = {name: (file, index) for file in self.files for index, name in enumerate(file.table.names)}
        return {name: places[name] for name in self.names}

    @property
    def metadata(self) -> Mapping[Any, Any]:
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
            with closing(open_descriptor(path)) as other:
                head = other.read_at(0, sniffing.HEAD_SIZE)
            if wanted.formats is not None or sniffing.is_safetensors(head):
                raise
            if not sniffing.is_other(head):
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
        if not sniffing.is_other(head):
            _refuse(path, head, _ABLE, whatever=True)
        if sniffing.is_zip(head):
            return _open_zip(file, wanted)
        for format, is_it in _PLAIN.items():
            if is_it(head):
                return _open_plain(file, format, wanted)
        return _open_pickle(file, TORCH_LEGACY if sniffing.is_torch_legacy(head) else PICKLE, wanted)
    except BaseException:
        file.close()
        raise


# The formats below are read in Python. What they import takes milliseconds that every import would pay.


def _open_plain(file: WeightFile, format: str, wanted: Wanted) -> Opened:
    _check_format(file, format, wanted)
    if format == MOON:
        from . import moon

        file.table = moon.read_table(file)
    elif format == NPY:
        from . import npy

        file.table = npy.read_table(file)
    else:
        from .gguf import read as gguf

        file.table = gguf.read_table(file)
    return Opened(format, file)


def _open_pickle(file: WeightFile, format: str, wanted: Wanted) -> Opened:
    """A pickle that is no entry of an archive."""
    _check_format(file, format, wanted)
    if format == PICKLE:
        from .unpickle.file import read_table
    else:
        from .torch.legacy_file import read_table
    return _read_pickle(file, format, wanted, lambda options: read_table(file, options))


def _read_pickle(file: WeightFile, format: str, wanted: Wanted, read: Callable[[Any], Any]) -> Opened:
    """What a reader of pickles gives. An error advises to keep globals inert only where that has been tried."""
    from .torch.tensors import Options
    from .unpickle.run import ADVICE

    options = Options(wanted.root, wanted.inert)
    try:
        made = read(options)
    except (ForbiddenError, UnsupportedError) as error:
        if ADVICE not in str(error) or _helps(read, options._replace(inert=True)):
            raise
        raise type(error)(str(error).replace(ADVICE, "")) from None
    file.table = made.table
    if made.beside is not None:
        made.beside.stand_for(file)
    return Opened(format, file, made.beside, made.names)


def _helps(read: Callable[[Any], Any], options: Any) -> bool:
    try:
        return bool(read(options).names)
    except (SafeloadError, OSError):
        return False


def _open_zip(file: WeightFile, wanted: Wanted) -> Opened:
    """A zip archive of torch or of numpy, which its entries tell apart."""
    from . import npz
    from .zip import Archive

    archive = Archive(file)
    format = NPZ if npz.is_npz(archive) else TORCH_ZIP
    _check_format(file, format, wanted)
    if format == NPZ:
        opened = npz.open_archive(archive, file)
        if opened is not file:
            opened.stand_for(file)
        return Opened(format, opened)
    from .torch.zip_file import read_table

    return _read_pickle(file, format, wanted, lambda options: read_table(archive, file, options))


def _check_format(file: WeightFile, format: str, wanted: Wanted) -> None:
    if wanted.formats is not None and format not in wanted.formats:
        kind = sniffing.describe(file.read_at(0, sniffing.HEAD_SIZE))
        raise FormatError(f"this is {kind}, not {wanted.formats[0]}", file.path, 0)
    if wanted.root is not None and format in (GGUF, MOON, NPZ, NPY):
        raise UnsupportedError(f"{file.path}: root= selects a nested container, and {format} has none")


def _refuse(path: str, head: bytes, able: str, *, whatever: bool = False) -> None:
    """Raises for a file that is recognizably something else, or ``whatever`` it is."""
    kind = sniffing.describe(head)
    if kind is not None:
        raise UnsupportedError(f"{path}: this is {kind}; this version reads {able}") from None
    if whatever or (head.strip() and not path.endswith(".safetensors")):
        raise FormatError(f"no weight format that is known starts with {head[:16].hex(' ')}", path, 0) from None
