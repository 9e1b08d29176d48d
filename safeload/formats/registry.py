"""The formats, one row each, and what walks the rows: opening a file, saying what a file is, finding a writer.

A row names a module of this package, imported when it is first needed: what the readers import takes milliseconds that
every ``import safeload`` would pay. The module has

- ``read(candidate, wanted) -> Content``: the file with its table;
- ``write(tensors, metadata, path, *, overwrite, durable)`` where its row has ``writes``: arrays, `QuantizedTensor` and
  what makes them late, atomically; a tensor that the format cannot hold is refused before anything is written;
- ``claims(candidate) -> bool`` where its row has ``asks``: whether a file is its own though other rows have the same
  first bytes.

Safetensors comes first and is opened by its path: one call of the C core and no look at the file before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.file import WeightFile, open_descriptor
from ..errors import FormatError, UnsupportedError
from . import foreign

if TYPE_CHECKING:
    from .zip import Archive


class Format(NamedTuple):
    """One format.

    Attributes:
        name: what `Checkpoint.format` says and ``format=`` takes.
        title: what it is called in a list of what is read; rows of one title are named once.
        kind: what a file of it is, in "this is ..."; as much as its first bytes tell.
        told: whether the first bytes of a file are those of this format.
        module: what reads and writes it, below this package.
        suffixes: that its files usually have; those of a format that is written say what `convert` writes.
        writes: whether it can be written.
        asks: whether the module must look into the file, because other rows have the same first bytes.
        nested: whether it has containers that ``root=`` selects.
        family: another name that ``format=`` takes, for all rows that have it.
        public: whether ``safeload.NAME`` is a module of functions for it.
        peer: what ``safeload bench`` compares loading with, a key of its own; None where nothing else reads it.
    """

    name: str
    title: str
    kind: str
    told: Callable[[bytes], bool]
    module: str
    suffixes: tuple[str, ...] = ()
    writes: bool = False
    asks: bool = False
    nested: bool = False
    family: str | None = None
    public: bool = False
    peer: str | None = None

    def load(self) -> Any:
        """The module that reads and writes the format."""
        return _module(self.module)


def _begins(magic: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[: len(magic)] == magic


_ZIP, _PICKLE = "a zip archive (torch checkpoint or npz)", "a pickle (legacy torch checkpoint, or numpy's)"
_TORCH, _TORCH_SUFFIXES = "torch checkpoints", (".pt", ".pth", ".ckpt", ".bin")

# fmt: off
ROWS = (
    Format("safetensors", "safetensors", "a safetensors file", foreign.is_safetensors, "safetensors.file",
           (".safetensors",), writes=True, peer="safetensors.numpy"),
    Format("torch zip", _TORCH, _ZIP, foreign.is_zip, "torch.zip_file",
           _TORCH_SUFFIXES, nested=True, family="torch", peer="torch.load"),
    Format("torch legacy", _TORCH, _PICKLE, foreign.is_torch_legacy, "torch.legacy_file",
           _TORCH_SUFFIXES, nested=True, family="torch", peer="torch.load"),
    Format("pickle", "pickled arrays of numpy", _PICKLE, foreign.is_pickle, "unpickle.file", nested=True),
    Format("gguf", "GGUF", "a GGUF file", _begins(b"GGUF"), "gguf.file",
           (".gguf",), writes=True, public=True, peer="gguf.GGUFReader"),
    Format("npz", "npz", _ZIP, foreign.is_zip, "npz", (".npz",), writes=True, asks=True, peer="numpy.load"),
    Format("npy", "npy", "a npy file", _begins(b"\x93NUMPY"), "npy", (".npy",), writes=True, peer="numpy.load"),
    Format("moon", "MOON", "a MOON file", _begins(b"NOOM"), "moon", (".moon", ".bin"), writes=True, public=True),
)
# fmt: on

BY_NAME = {row.name: row for row in ROWS}
SAFETENSORS, TORCH_ZIP, TORCH_LEGACY, GGUF, NPZ = "safetensors", "torch zip", "torch legacy", "gguf", "npz"


def _choices() -> dict[str, tuple[str, ...]]:
    """What ``format=`` takes, and the formats that it means."""
    choices: dict[str, tuple[str, ...]] = {}
    for row in ROWS:
        if row.family is not None:
            choices[row.family] = (*choices.get(row.family, ()), row.name)
        choices[row.name] = (row.name,)
    return choices


FORMATS = _choices()

# The format that a suffix says `convert` is to write.
SUFFIXES = {suffix: row.name for row in ROWS if row.writes for suffix in row.suffixes}


@cache
def _module(name: str) -> Any:
    return import_module(f".{name}", __package__)


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


class Candidate:
    """An open file whose format is being found out.

    Attributes:
        file: without a table yet.
        head: its first `foreign.HEAD_SIZE` bytes.
    """

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.head = file.read_at(0, foreign.HEAD_SIZE)

    @cached_property
    def archive(self) -> Archive:
        """The directory of a zip archive, read once for all rows that ask for it.

        Raises:
            FormatError, LimitError, UnsupportedError: see `Archive`.
        """
        from .zip import Archive

        return Archive(self.file)


class Content(NamedTuple):
    """What a reader gives.

    Attributes:
        file: with its table: the candidate's, or a temporary file that stands for it.
        beside: a temporary file with more tensors; None as a rule.
        names: of the tensors of both in their order, where there is a second.
    """

    file: WeightFile
    beside: WeightFile | None = None
    names: Sequence[str] = ()


class Opened(NamedTuple):
    """An open file.

    Attributes:
        format: the name of its row.
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
            file: WeightFile = _module(BY_NAME[SAFETENSORS].module).open_file(path)
        except FormatError:
            with closing(open_descriptor(path)) as other:
                head = other.read_at(0, foreign.HEAD_SIZE)
            if wanted.formats is not None or foreign.is_safetensors(head):
                raise
            if not any(_told(head)):
                _refuse(path, head)
                raise
        else:
            if wanted.root is not None:
                file.close()
                raise UnsupportedError(f"{path}: root= selects a nested container, and safetensors has none")
            return Opened(SAFETENSORS, file)
    file = open_descriptor(path)
    try:
        candidate = Candidate(file)
        row = _find(candidate, wanted)
        return Opened(row.name, *row.load().read(candidate, wanted))
    except BaseException:
        file.close()
        raise


# The rows that are told by the first bytes; those that must look into the file first.
_TOLD = sorted(ROWS[1:], key=lambda row: not row.asks)


def _told(head: bytes) -> Iterator[Format]:
    """The rows but safetensors' whose first bytes these are."""
    return (row for row in _TOLD if row.told(head))


def _find(candidate: Candidate, wanted: Wanted) -> Format:
    """The row of a file, if it is one of those wanted.

    Raises:
        FormatError: it is of another format, or of none that is known.
        UnsupportedError: a format that is known and not read, or one without containers where one is wanted.
    """
    path, head = candidate.file.path, candidate.head
    row = next((row for row in _told(head) if not row.asks or row.load().claims(candidate)), None)
    if row is None:
        if not foreign.is_safetensors(head):
            _refuse(path, head, whatever=True)
        row = BY_NAME[SAFETENSORS]
    if wanted.formats is not None and row.name not in wanted.formats:
        raise FormatError(f"this is {_describe(head) or row.kind}, not {wanted.formats[0]}", path, 0)
    if wanted.root is not None and not row.nested:
        raise UnsupportedError(f"{path}: root= selects a nested container, and {row.name} has none")
    return row


def _describe(head: bytes) -> str | None:
    """What a file that is not safetensors is, by its first bytes; None when they say nothing."""
    return foreign.describe(head) or next((row.kind for row in _told(head)), None)


def describe_path(path: str) -> str | None:
    """What the file at ``path`` is, if it looks like another format than safetensors."""
    head = foreign.read_head(path)
    return None if foreign.is_safetensors(head) else _describe(head)


def titles() -> str:
    """The formats that are read, for messages."""
    *most, last = dict.fromkeys(row.title for row in ROWS)
    return f"{', '.join(most)} and {last}"


def _refuse(path: str, head: bytes, *, whatever: bool = False) -> None:
    """Raises for a file that is recognizably something else, or ``whatever`` it is."""
    kind = _describe(head)
    if kind is not None:
        raise UnsupportedError(f"{path}: this is {kind}; this version reads {titles()}") from None
    if whatever or (head.strip() and not path.endswith(".safetensors")):
        raise FormatError(f"no weight format that is known starts with {head[:16].hex(' ')}", path, 0) from None
