"""The table of formats, one row each, and the functions over it: opening a file, describing a file, finding a writer.

A row names a module of this package, which is imported on first use: the imports of the readers take milliseconds,
which every ``import safeload`` would pay. The module has

- ``read(candidate, wanted) -> Content``: the file with its table;
- ``write(tensors, metadata, path, *, overwrite, durable)`` if its row has ``writes``: writes arrays, `QuantizedTensor`
  and their lazy forms atomically; a tensor that the format cannot hold is refused before anything is written;
- ``claims(candidate) -> bool`` if its row has ``asks``: whether the file has this format, although files of other rows
  begin with the same bytes.

Safetensors comes first and is opened by its path, with one call of the C core and no earlier read of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ..base.cached import cached_property
from ..base.gc_pause import paused
from ..engine.run.weight_file import WeightFile, open_without_table
from ..errors import FormatError, UnsupportedError
from ..stores.files import LOCAL, Files
from ..stores.remote import WINDOW, RemoteStore
from . import foreign

if TYPE_CHECKING:
    from .zip import Archive


class Format(NamedTuple):
    """One format.

    Attributes:
        name: value of `Checkpoint.format` and of ``format=``.
        title: its name in the list of supported formats; rows with the same title are listed once.
        kind: description of a file in "this is ...", as far as the first bytes tell.
        told: whether the first bytes of a file are those of this format.
        module: the module that reads and writes it, relative to this package.
        suffixes: usual suffixes of its files; if the format is written, they select it in `convert`.
        shared: suffixes of another format, which `convert` writes only with ``format=`` or ``layout=``.
        writes: whether it can be written.
        asks: whether the module must look into the file, because other rows have the same first bytes.
        metadata: whether files that are written have room for metadata.
        nested: whether it has containers that ``root=`` selects.
        family: another value of ``format=``, which stands for all rows that have it.
        public: whether ``safeload.NAME`` is a module of functions for it.
        peer: the reader that ``safeload bench`` compares loading with, a key of its table; None where no other exists.
        ranges: whether its table can be read without reading most of the file.
    """

    name: str
    title: str
    kind: str
    told: Callable[[bytes], bool]
    module: str
    suffixes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    writes: bool = False
    asks: bool = False
    metadata: bool = False
    nested: bool = False
    family: str | None = None
    public: bool = False
    peer: str | None = None
    ranges: bool = True

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
           (".safetensors",), writes=True, metadata=True, peer="safetensors.numpy"),
    Format("torch zip", _TORCH, _ZIP, foreign.is_zip, "torch.zip_file",
           _TORCH_SUFFIXES, nested=True, family="torch", peer="torch.load"),
    Format("torch legacy", _TORCH, _PICKLE, foreign.is_torch_legacy, "torch.legacy_file",
           _TORCH_SUFFIXES, nested=True, family="torch", peer="torch.load", ranges=False),
    Format("pickle", "pickled arrays of numpy", _PICKLE, foreign.is_pickle, "pickle_file", nested=True, ranges=False),
    Format("gguf", "GGUF", "a GGUF file", _begins(b"GGUF"), "gguf.file",
           (".gguf",), writes=True, metadata=True, public=True, peer="gguf.GGUFReader"),
    Format("npz", "npz", _ZIP, foreign.is_zip, "npz", (".npz",), writes=True, asks=True, peer="numpy.load"),
    Format("npy", "npy", "an npy file", _begins(b"\x93NUMPY"), "npy", (".npy",), writes=True, peer="numpy.load"),
    Format("moon", "MOON", "a MOON file", _begins(b"NOOM"), "moon", (".moon",), (".bin",), writes=True, public=True),
)
# fmt: on

# The values of ``format=`` for type checkers: the names and families of the rows.
FormatName: TypeAlias = Literal[
    "safetensors", "torch", "torch zip", "torch legacy", "pickle", "gguf", "npz", "npy", "moon"
]

BY_NAME = {row.name: row for row in ROWS}
SAFETENSORS, TORCH_ZIP, TORCH_LEGACY, GGUF, NPZ = "safetensors", "torch zip", "torch legacy", "gguf", "npz"


def _choices() -> dict[str, tuple[str, ...]]:
    """The values of ``format=``, and the formats that each stands for."""
    choices: dict[str, tuple[str, ...]] = {}
    for row in ROWS:
        if row.family is not None:
            choices[row.family] = (*choices.get(row.family, ()), row.name)
        choices[row.name] = (row.name,)
    return choices


FORMATS = _choices()

# Usual suffixes of files that hold weights.
WEIGHT_SUFFIXES = frozenset(suffix for row in ROWS for suffix in row.suffixes)

# The format that `convert` writes for a suffix.
SUFFIXES = {suffix: row.name for row in ROWS if row.writes for suffix in row.suffixes}

# The values of ``format=`` of `convert`, and the suffixes that its files may have.
WrittenName: TypeAlias = Literal["safetensors", "gguf", "npz", "npy", "moon"]
WRITTEN = {row.name: (*row.suffixes, *row.shared) for row in ROWS if row.writes}


@cache
def _module(name: str) -> Any:
    return import_module(f".{name}", __package__)


class OpenRequest(NamedTuple):
    """How to open files.

    Attributes:
        formats: accepted formats; None for any.
        root: name of the nested container to read; None for all.
        inert: whether unknown globals of a pickle are accepted, as placeholders.
        files: where paths lead.
    """

    formats: tuple[str, ...] | None = None
    root: str | None = None
    inert: bool = False
    files: Files = LOCAL


class Candidate:
    """An open file whose format is being detected.

    Attributes:
        file: the file, which has no table yet.
        head: its first `foreign.HEAD_SIZE` bytes.
    """

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.head = file.read_at(0, foreign.HEAD_SIZE)

    @cached_property
    def archive(self) -> Archive:
        """The directory of a zip archive, read once for all rows that need it.

        Raises:
            FormatError, LimitError, UnsupportedError: see `Archive`.
        """
        from .zip import Archive

        with paused(self.file.size):  # each entry is an object of some bytes
            return Archive(self.file)


class Content(NamedTuple):
    """The result of a reader.

    Attributes:
        file: the candidate's file with its table, or a temporary file that replaces it.
        beside: a temporary file with more tensors; usually None.
        names: names of the tensors of both files in order; empty without a second file.
    """

    file: WeightFile
    beside: WeightFile | None = None
    names: Sequence[str] = ()


class Opened(NamedTuple):
    """An open file.

    Attributes:
        format: the name of its row.
        file: the file with its table.
        beside: a temporary file with more tensors; usually None.
        names: names of the tensors of both files in order; empty without a second file.
    """

    format: str
    file: WeightFile
    beside: WeightFile | None = None
    names: Sequence[str] = ()

    @property
    def files(self) -> list[WeightFile]:
        """The file, and the temporary file if there is one."""
        return [self.file] if self.beside is None else [self.file, self.beside]

    @property
    def where(self) -> dict[str, tuple[WeightFile, int]] | None:
        """File and index of each tensor; None for a single file."""
        if self.beside is None:
            return None
        places = {name: (file, index) for file in self.files for index, name in enumerate(file.table.names)}
        return {name: places[name] for name in self.names}

    @property
    def metadata(self) -> Mapping[Any, Any]:
        """The metadata of the file."""
        return self.file.table.metadata() or {}


def open_file(path: str, wanted: OpenRequest) -> Opened:
    """Opens a file; no tensor is read.

    Raises:
        FormatError: the file breaks its format.
        UnsupportedError: the format is not supported, or is not one of ``wanted``.
        OSError: the file cannot be opened or read.
    """
    if wanted.files is LOCAL and (wanted.formats is None or SAFETENSORS in wanted.formats):
        try:
            file: WeightFile = _module(BY_NAME[SAFETENSORS].module).open_file(path)
        except FormatError:
            with closing(open_without_table(path)) as other:  # not `read_head`: a disk that fails is the error to show
                head = other.read_at(0, foreign.HEAD_SIZE)
                if wanted.formats is not None or foreign.is_safetensors(head):
                    raise
                if not any(_told(head)):
                    _refuse(other, head)
                    raise
        else:
            if wanted.root is not None:
                file.close()
                raise UnsupportedError(f"{path}: root= selects a nested container, and safetensors has none")
            return Opened(SAFETENSORS, file)
    file = open_without_table(path, files=wanted.files)
    try:
        candidate = Candidate(file)
        row = _find(candidate, wanted)
        if not row.ranges:
            check_whole(file, f"{row.kind} must be read as a whole")
        opened = Opened(row.name, *row.load().read(candidate, wanted))
        if isinstance(file.store, RemoteStore):
            file.store.settle()
    except BaseException:
        file.close()
        raise
    return opened


def check_whole(file: WeightFile, why: str) -> None:
    """Refuses a file on the network that must be read as a whole, unless it came with the first request.

    Raises:
        UnsupportedError: the message begins with the reason, and says what to do.
    """
    if file.remote and file.size > WINDOW:
        how = (
            f'safeload.open("filecache::{file.path}", storage_options={{}}) keeps a copy on this machine (fsspec does)'
        )
        raise UnsupportedError(f"{file.path}: {why}, which is not done over the network: {how}", path=file.path)


# The rows recognised by the first bytes; those that must look into the file come first.
_TOLD = sorted(ROWS[1:], key=lambda row: not row.asks)


def _told(head: bytes) -> Iterator[Format]:
    """The rows, except safetensors, whose files begin with these bytes."""
    return (row for row in _TOLD if row.told(head))


def _find(candidate: Candidate, wanted: OpenRequest) -> Format:
    """The row of a file, which must be one of ``wanted``.

    Raises:
        FormatError: the file has another format, or an unknown one.
        UnsupportedError: the format is not supported, or has no containers and ``wanted.root`` asks for one.
    """
    path, head = candidate.file.path, candidate.head
    row = next((row for row in _told(head) if not row.asks or row.load().claims(candidate)), None)
    if candidate.file.files is not LOCAL and foreign.is_safetensors(head):
        row = BY_NAME[SAFETENSORS]  # whose first bytes, the size of its header, may be those of another format
    if row is None:
        if not foreign.is_safetensors(head):
            _refuse(candidate.file, head, whatever=candidate.file.files is LOCAL)
        row = BY_NAME[SAFETENSORS]
    if wanted.formats is not None and row.name not in wanted.formats:
        kind = _describe(head, path) or foreign.Kind(row.kind)
        raise FormatError(kind.sentence(wanted.formats[0]), path, 0)
    if wanted.root is not None and not row.nested:
        raise UnsupportedError(f"{path}: root= selects a nested container, and {row.name} has none")
    return row


def _describe(head: bytes, path: str) -> foreign.Kind | None:
    """Describes a file other than safetensors by its first bytes and its name; None where they do not tell."""
    told = (foreign.Kind(row.kind) for row in _told(head))
    return foreign.describe(head, path) or next(told, None) or foreign.describe_text(head)


def explain(path: str) -> FormatError | None:
    """The error for a file that does not look like a sound safetensors file; None where its own error says more."""
    try:
        with closing(open_without_table(path)) as file:
            head = file.read_at(0, foreign.HEAD_SIZE)
            kind = None if foreign.is_safetensors(head) else _describe(head, path)
            if kind is None:
                return foreign.unfinished(file)
    except (OSError, FormatError):  # the caller reports the error that led here
        return None
    if not kind.advice and any(_told(head)):
        kind = kind._replace(advice="safeload.open reads other formats too")
    return FormatError(kind.sentence("a safetensors file"), path, 0)


def titles() -> str:
    """The supported formats, for messages."""
    *most, last = dict.fromkeys(row.title for row in ROWS)
    return f"{', '.join(most)} and {last}"


def _refuse(file: WeightFile, head: bytes, *, whatever: bool = False) -> None:
    """Raises for a file that is recognisably of another format; with ``whatever``, for any file."""
    path, kind = file.path, _describe(head, file.path)
    if kind is not None and kind.damaged:
        raise FormatError(kind.sentence(), path, 0) from None
    if kind is not None:
        what = kind.sentence() if kind.advice else f"{kind.sentence()}; this version reads {titles()}"
        raise UnsupportedError(f"{path}: {what}") from None
    error = foreign.unfinished(file)
    if error is not None:
        try:
            raise error from None
        finally:
            del error  # which refers to this frame
    if whatever or (head.strip() and not path.endswith(".safetensors")):
        raise FormatError(f"no known weight format starts with {head[:16].hex(' ')}", path, 0) from None
