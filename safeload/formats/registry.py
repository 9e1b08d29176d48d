"""The table of formats, one row per format, and the functions over it: open a file, describe a file, find a writer.

A row names a module of this package, which is imported on first use to keep ``import safeload`` fast. The module has

- ``read(candidate, request) -> Content``: the file with its table;
- ``write(tensors, metadata, path, *, overwrite, durable)`` if the row has ``writes``: write arrays, `QuantizedTensor`
  and their lazy forms atomically, and refuse unsupported tensors before anything is written;
- ``claims(candidate) -> bool`` if the row is ``ambiguous``: return whether a file has this format.

Rows of plug-ins are asked after all of these, see plugins.py.

Safetensors comes first: its files are opened by path, with one call of the C core and no earlier read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, NamedTuple, TypeAlias

from ..base.messages import error_about
from ..base.text import show
from ..engine.run.weight_file import WeightFile, open_without_table
from ..errors import FormatError, SafeloadError, UnsupportedError
from ..stores.files import LOCAL
from ..stores.store import WINDOW
from . import foreign
from .format import Candidate as Candidate
from .format import Content as Content
from .format import Format, module_of
from .format import OpenRequest as OpenRequest


def _begins(magic: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[: len(magic)] == magic


def _only(suffix: str, *preferred: str) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return a `Format.chooses`: the first preferred name, or all names with a suffix."""

    def choose(names: Sequence[str]) -> Sequence[str]:
        first = next((name for name in preferred if name in names), None)
        return [name for name in names if name.endswith(suffix)] if first is None else [first]

    return choose


_ZIP, _PICKLE = (
    "a zip archive (torch checkpoint or npz)",
    "a pickle (legacy torch checkpoint, torch.distributed's metadata, or numpy's)",
)
_TORCH, _TORCH_SUFFIXES = "torch checkpoints", (".pt", ".pth", ".ckpt", ".bin")

# The module of safetensors, which opens files by path.
_OPENED_BY_PATH = ".safetensors.file"

# fmt: off
ROWS = (
    Format("safetensors", "safetensors", "a safetensors file", foreign.is_safetensors, _OPENED_BY_PATH,
           (".safetensors",), writes=True, metadata=True),
    Format("torch zip", _TORCH, _ZIP, foreign.is_zip, ".torch.zip_file",
           _TORCH_SUFFIXES, nested=True, family="torch"),
    Format("torch legacy", _TORCH, _PICKLE, foreign.is_torch_legacy, ".torch.legacy_file",
           _TORCH_SUFFIXES, nested=True, family="torch", ranges=False),
    Format("pickle", "pickled NumPy arrays", _PICKLE, foreign.is_pickle, ".pickle_file",
           (".pdparams", ".pdopt"), nested=True, ranges=False),
    Format("gguf", "GGUF", "a GGUF file", _begins(b"GGUF"), ".gguf.file",
           (".gguf",), writes=True, metadata=True, public=True),
    Format("npz", "npz", _ZIP, foreign.is_zip, ".npz", (".npz",), writes=True, ambiguous=True),
    Format("npy", "npy", "an npy file", _begins(b"\x93NUMPY"), ".npy", (".npy",), writes=True),
    Format("dcp", "torch.distributed checkpoints", _PICKLE, foreign.is_binary_pickle, ".dcp.file",
            ambiguous=True, nested=True, parts=foreign.is_safetensors),
    Format("deepspeed", "DeepSpeed checkpoints", _ZIP, foreign.never, ".zero.file", nested=True, parts=foreign.is_zip),
    Format("fsdp", "FSDP rank files", _ZIP, foreign.never, ".fsdp", nested=True, parts=foreign.is_zip),
    Format("orbax", "Orbax checkpoints", "the metadata of an Orbax checkpoint", foreign.is_orbax, ".orbax.file",
           nested=True, parts=foreign.is_object),
    Format("keras", "Keras", "an HDF5 file", _begins(b"\x89HDF\r\n\x1a\n"), ".keras.file",
           (".h5", ".hdf5", ".keras"), nested=True),
    Format("flax", "Flax weights", "Flax weights in MessagePack", foreign.is_flax, ".flax", (".msgpack",), nested=True,
           own_names=True, chooses=_only(".msgpack", "flax_model.msgpack.index.json", "flax_model.msgpack")),
    Format("onnx", "ONNX", "an ONNX model", foreign.is_onnx, ".onnx.file", (".onnx",), nested=True,
           own_names=True, chooses=_only(".onnx", "model.onnx")),
    Format("moon", "MOON", "a MOON file", _begins(b"NOOM"), ".moon", (".moon",), (".bin",), writes=True, public=True),
)
# fmt: on

# The values of ``format=`` for type checkers: names and families of the rows.
FormatName: TypeAlias = Literal[
    "safetensors",
    "torch",
    "torch zip",
    "torch legacy",
    "pickle",
    "gguf",
    "npz",
    "npy",
    "dcp",
    "deepspeed",
    "fsdp",
    "orbax",
    "keras",
    "flax",
    "onnx",
    "moon",
]

BY_NAME = {row.name: row for row in ROWS}
SAFETENSORS, TORCH_ZIP, TORCH_LEGACY, GGUF, NPZ = "safetensors", "torch zip", "torch legacy", "gguf", "npz"
DCP, DEEPSPEED, FSDP, ORBAX = "dcp", "deepspeed", "fsdp", "orbax"
KERAS, PICKLE = "keras", "pickle"


def _choices() -> dict[str, tuple[str, ...]]:
    """Return the names of the formats for each value of ``format=``."""
    choices: dict[str, tuple[str, ...]] = {}
    for row in ROWS:
        if row.family is not None:
            choices[row.family] = (*choices.get(row.family, ()), row.name)
        choices[row.name] = (row.name,)
    return choices


FORMATS = _choices()

# Names that no plug-in may have.
RESERVED = frozenset(FORMATS)


def row_of(name: str) -> Format:
    """Return the row of a format, which may be a plug-in's."""
    row = BY_NAME.get(name) or _plugin(name)
    if row is None:
        raise ValueError(f"unknown format {show(name)}, expected one of {', '.join(FORMATS)}")
    return row


def written_suffixes(name: str) -> tuple[str, ...]:
    """Return the suffixes of files that `convert` writes in a format."""
    row = BY_NAME.get(name) or (None if name in RESERVED else _plugin(name))
    if row is None or not row.writes:
        raise ValueError(f"unknown format {show(name)}, expected one of {', '.join(WRITTEN)}")
    return (*row.suffixes, *row.extra_suffixes)


class WrittenNames(tuple[str, ...]):
    """The names of the written formats; those of plug-ins are members too, but are not listed."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        row = _plugin(name) if isinstance(name, str) and name not in RESERVED else None
        return row is not None and row.writes


def _plugin(name: str) -> Format | None:
    from . import plugins  # only here and below: most files need none

    return plugins.find(name, RESERVED)


def formats_of(name: str) -> tuple[str, ...]:
    """Return the names of the formats for a value of ``format=``; see `row_of` for errors."""
    return FORMATS.get(name) or (row_of(name).name,)


def plugin_rows() -> Iterator[Format]:
    """Iterate over the rows of all plug-ins."""
    from . import plugins

    return plugins.rows(RESERVED)


def may_claim(head: bytes) -> bool:
    """Return True if a plug-in can read a file with these first bytes."""
    from . import plugins

    return any(plugins.matches(row, head) for row in plugins.rows(RESERVED))


def _claimed_by_plugin(candidate: Candidate) -> Format | None:
    from . import plugins

    return plugins.claim(candidate, RESERVED)


# Usual suffixes of weight files.
WEIGHT_SUFFIXES = frozenset(suffix for row in ROWS for suffix in row.suffixes)

# The format to write for a suffix.
SUFFIXES = {suffix: row.name for row in ROWS if row.writes for suffix in row.suffixes}

# The values of ``format=`` of `convert`, and the suffixes of its files.
WrittenName: TypeAlias = Literal["safetensors", "gguf", "npz", "npy", "moon"]
WRITTEN = {row.name: (*row.suffixes, *row.extra_suffixes) for row in ROWS if row.writes}


class Container(NamedTuple):
    """A kind of archive whose members are weight files.

    The module has ``enter(candidate, request) -> Opened`` and, without ``entries``, ``claims(candidate) -> bool``.
    """

    kind: str  # completes "this is ..."
    matches: Callable[[bytes], bool]  # True if a file with these first bytes can be one
    module: str  # relative to this package
    # A zip archive with any of these, or with these suffixes; most are torch's, which need no module.
    entries: tuple[str, ...] = ()
    suffix: str = ""

    def claims(self, candidate: Candidate) -> bool:
        """Return True if a file with these first bytes is a container of this kind."""
        if self.entries or self.suffix:
            names = candidate.archive.entries
            if any(name in names for name in self.entries):
                return True
            first = next(iter(names), "")
            torch = first.endswith("/data.pkl")  # with as many names as tensors
            return bool(self.suffix) and not torch and any(name.lower().endswith(self.suffix) for name in names)
        claimed: bool = module_of(self.module).claims(candidate)
        return claimed


CONTAINERS = (
    Container("a tar archive", foreign.is_tar, ".tar"),
    Container("a program with a zip archive (llamafile)", foreign.is_program, ".llamafile"),
    Container("a zip archive with a GGUF file", foreign.is_zip, ".llamafile", suffix=".gguf"),
    Container("a zip archive of Keras", foreign.is_zip, ".keras.archive", ("model.weights.h5", "model.weights.npz")),
)


class Opened(NamedTuple):
    """An open file."""

    format: str  # the name of its row
    file: WeightFile  # with its table
    others: Sequence[WeightFile] = ()  # files with more tensors: unpacked, assembled, or beside the file
    names: Sequence[str] = ()  # tensors of all files in order; empty without other files
    notes: Sequence[str] = ()  # about other content of the file
    config: dict[str, Any] | None = None  # parsed ``config.json`` in a container

    @property
    def files(self) -> list[WeightFile]:
        return [self.file, *self.others]

    @property
    def where(self) -> dict[str, tuple[WeightFile, int]] | None:
        """File and index of each tensor; None for a single file."""
        if not self.others:
            return None
        places = {name: (file, index) for file in self.files for index, name in enumerate(file.table.names)}
        return {name: places[name] for name in self.names}

    @property
    def metadata(self) -> Mapping[Any, Any]:
        return self.file.table.metadata() or {}


# Formats whose readers take only the table from a file.
_TABLE_ONLY = (SAFETENSORS, GGUF)


def open_file(path: str, request: OpenRequest) -> Opened:
    """Open a file without reading its tensors."""
    formats, _, _, files, window = request
    if files is LOCAL and (formats is None or SAFETENSORS in formats):
        opened = _open_safetensors(path, request)
        if opened is not None:
            return opened
    file = open_without_table(path, files=files, window=window)
    candidate = None
    try:
        if file.verified:
            file.store.begin()  # type: ignore[attr-defined]
        candidate = Candidate(file)
        opened = _open_candidate(candidate, request)
        file.settle()
    except BaseException as error:
        with closing(candidate or file):
            if file.verified and isinstance(error, SafeloadError):
                file.store.verify()  # type: ignore[attr-defined]  # a file that differs is the better reason
        raise
    return opened


def _open_candidate(candidate: Candidate, request: OpenRequest) -> Opened:
    """Open a file by the container or the row that it is."""
    own = request.formats is None or not RESERVED.isdisjoint(request.formats)  # else a plug-in was asked for
    container = _container(candidate) if own else None
    file = candidate.file
    if container is not None:
        if file.verified:
            file.store.verify()  # type: ignore[attr-defined]  # before anything is unpacked
        opened: Opened = module_of(container.module).enter(candidate, request)
        return opened
    row = find_row(candidate, request)
    if file.verified and row.name not in _TABLE_ONLY:
        file.store.verify()  # type: ignore[attr-defined]
    if not row.ranges:
        check_whole(file, f"{row.kind} must be read as a whole")
    return Opened(row.name, *row.read(candidate, request))


def _open_safetensors(path: str, request: OpenRequest) -> Opened | None:
    """Open a local safetensors file; None if it begins like another supported format."""
    try:
        file: WeightFile = module_of(_OPENED_BY_PATH).open_file(path)
    except FormatError:
        with closing(open_without_table(path)) as again:  # not `read_head`, which would hide a failing disk
            head = again.read_at(0, foreign.HEAD_SIZE)
            if foreign.is_safetensors(head):
                raise
            if not any(row.matches(head) for row in CONTAINERS if not row.entries and not row.suffix):
                if request.formats is not None:
                    raise
                if not any(_matching(head)) and _claimed_by_plugin(Candidate(again)) is None:
                    _refuse(again, head)
                    raise
        return None
    if request.root is not None:
        file.close()
        raise error_about(UnsupportedError, _no_containers(SAFETENSORS), path=path)
    return Opened(SAFETENSORS, file)


def _no_containers(format: str) -> str:
    return f"root= selects a nested container, but {format} has none"


def check_whole(file: WeightFile, reason: str) -> None:
    """Refuse to read a whole file over the network, unless the first request returned all of it."""
    if file.remote and not file.store.here and file.size > WINDOW:  # type: ignore[attr-defined]
        advice = f'safeload.open("filecache::{file.path}", storage_options={{}}) keeps a copy on this machine (fsspec)'
        text = f"{reason}, which safeload does not do over the network: {advice}"
        raise error_about(UnsupportedError, text, path=file.path)


# The rows recognised by the first bytes; ambiguous rows come first.
_BY_HEAD = sorted(ROWS[1:], key=lambda row: not row.ambiguous)


def _matching(head: bytes) -> Iterator[Format]:
    """Iterate over the rows, except safetensors, that match the first bytes of a file."""
    return (row for row in _BY_HEAD if row.matches(head))


def _container(candidate: Candidate) -> Container | None:
    """Return the kind of container that a file is, or None."""
    head, file = candidate.head, candidate.file
    if foreign.is_safetensors(head) or file.path.endswith(foreign.DCP_SUFFIX):
        return None
    container = next((row for row in CONTAINERS if row.matches(head) and row.claims(candidate)), None)
    if container is not None and _is_member(file):
        text = f"this is {container.kind} in another archive: extract it first"
        raise error_about(UnsupportedError, text, path=file.path)
    return container


def _is_member(file: WeightFile) -> bool:
    from ..stores.members import MemberFiles  # only here: few files are archives

    return isinstance(file.files, MemberFiles)


def find_row(candidate: Candidate, request: OpenRequest) -> Format:
    """Return the row of a file, which ``request`` must accept."""
    path, head = candidate.file.path, candidate.head
    if path.endswith(foreign.DCP_SUFFIX):
        raise error_about(UnsupportedError, foreign.DCP_PART.sentence(), path=path)
    row = next((row for row in _matching(head) if not row.ambiguous or row.load().claims(candidate)), None)
    required = None if request.formats is None or len(request.formats) > 1 else row_of(request.formats[0])
    if required is not None and (
        required.accepts(candidate) if required.source else required.parts is not None and required.parts(head)
    ):
        row = required
    elif candidate.file.files is not LOCAL and foreign.is_safetensors(head):
        row = BY_NAME[SAFETENSORS]  # its first bytes, the header's size, can equal the magic number of another format
    if row is None and request.formats is None and not foreign.is_safetensors(head):
        row = _claimed_by_plugin(candidate)
    if row is None:
        if not foreign.is_safetensors(head):
            _refuse(candidate.file, head, always=candidate.file.files is LOCAL)
        row = BY_NAME[SAFETENSORS]
    if request.formats is not None and row.name not in request.formats:
        kind = _describe(head, path) or foreign.Kind(row.kind)
        raise FormatError(kind.sentence(request.formats[0]), path, 0)
    if request.root is not None and not row.nested:
        raise error_about(UnsupportedError, _no_containers(row.name), path=path)
    return row


def _describe(head: bytes, path: str) -> foreign.Kind | None:
    """Describe a file other than safetensors by its first bytes and its name; None if they do not tell."""
    kinds = (foreign.Kind(row.kind) for row in _matching(head))
    return foreign.describe(head, path) or next(kinds, None) or foreign.describe_text(head)


def explain(path: str) -> FormatError | None:
    """Return the error for a file that is not safetensors or not complete; None if the parser's error says more."""
    try:
        with closing(open_without_table(path)) as file:
            head = file.read_at(0, foreign.HEAD_SIZE)
            kind = None if foreign.is_safetensors(head) else _describe(head, path)
            if kind is None:
                return foreign.unfinished(file)
    except (OSError, FormatError):  # the caller reports its own error
        return None
    if not kind.advice and any(_matching(head)):
        kind = kind._replace(advice="safeload.open reads other formats too")
    return FormatError(kind.sentence("a safetensors file"), path, 0)


def titles() -> str:
    """Return the supported formats as text for messages."""
    *titles, last = dict.fromkeys(row.title for row in ROWS)
    return f"{', '.join(titles)} and {last}"


def _refuse(file: WeightFile, head: bytes, *, always: bool = False) -> None:
    """Raise if the file is recognisably of another format; if ``always``, raise for any file."""
    path = file.path
    _refuse_kind(head, path)
    error = foreign.unfinished(file)
    if error is not None:
        try:
            raise error from None
        finally:
            del error  # it refers to this frame
    if always or (head.strip() and not path.endswith(".safetensors")):
        raise _unknown(head, path) from None


def _refuse_kind(head: bytes, path: str) -> None:
    kind = _describe(head, path)
    if kind is not None and kind.damaged:
        raise FormatError(kind.sentence(), path, 0) from None
    if kind is not None:
        text = kind.sentence() if kind.advice else f"{kind.sentence()}; this version reads {titles()}"
        raise error_about(UnsupportedError, text, path=path) from None


# First bytes of a file while `safeload.edit` writes its header.
_BROKEN = b"\xff" * 8


def _unknown(head: bytes, path: str) -> FormatError:
    if head.startswith(_BROKEN):
        from ..stores.edit_journal import interrupted  # few files are broken

        error = interrupted(path)
        if error is not None:
            return error
    return FormatError(f"no known weight format starts with {head[:16].hex(' ')}", path, 0)


def check_head(head: bytes, path: str) -> None:
    """Refuse a file by its first `foreign.HEAD_SIZE` bytes if it cannot have a supported format."""
    containers = (row for row in CONTAINERS if row.matches(head))
    if not foreign.is_safetensors(head) and not any(_matching(head)) and not any(containers):
        if may_claim(head):
            return
        _refuse_kind(head, path)
        raise _unknown(head, path)
