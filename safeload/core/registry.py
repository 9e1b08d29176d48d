"""The formats, a row each; what a format's module gets and returns; opening and describing a file by its row.

A row names a module, which is imported on first use to keep ``import safeload`` fast; `Format` lists its functions. A
``write`` is atomic, and refuses unsupported tensors before anything is written.

Safetensors comes first: its files are opened by path, with one call of the C core and no earlier read. Rows of plug-ins
are `Format` objects too, found by entry points of the group ``safeload.formats`` under the name of the format. They are
asked only for files that no row of safeload claims, or by ``format=NAME``: entry points are looked up when the first
such file is met. A plug-in that cannot be used is left out with a warning, or is an error if it was asked for by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial, reduce
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

from ..errors import FormatError, SafeloadError, UnsupportedError, exported
from . import dtypes, foreign, text
from .arrays import array_fits
from .files import LOCAL, WINDOW, Files, unchanged
from .forking import cached_property
from .memory import Cache
from .names import grouped
from .runtime import paused
from .table import ListedTable, Listing
from .text import error_about, is_bare, show
from .weight_file import WeightFile, open_without_table, places_in

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .zip import Archive

# Folders above a file that a format reads besides, at most.
MAX_FOLDERS = 16
# Axes of a tensor: numpy 2 allows as many (NPY_MAXDIMS), as does the C core (SL_MAX_RANK).
MAX_RANK = 64


# The modules of formats and parts, by name. Threads contend for `functools.cache` without the GIL.
modules: dict[str, Any] = {}


def module_of(name: str) -> Any:
    """Return a module: absolute, or of this package if its name begins with a dot."""
    module = modules.get(name)
    if module is None:
        try:
            module = import_module(name, __package__)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != __package__.partition(".")[0]:
                raise
            raise UnsupportedError(f"this copy of safeload lacks {error.name}, which is needed here") from error
        module = modules.setdefault(name, module)
    return module


# What safetensors, opening and checkpoints use of the rest of the package, which they do not import: with `ROWS`,
# `CONTAINERS` and `OPENERS` the only names of it there. Any of its folders may be missing.
PARTS = {
    "adapter forms": "..conversion.adapter_forms",
    "adapters": "..models.module_names",
    "codes": "..quant.finder",
    "diffusion": "..models.diffusion",
    "digests": "..trust.digests",
    "edits": "..editing.edit_journal",
    "fetch": "..remote.fetch",
    "folders": "..formats.folder",
    "hub": "..remote.hub_cache",
    "merging": "..adapters.merge",
    "missing paths": "..remote.missing_path",
    "places": "..remote.places",
    "quantization": "..quant.quantization",
    "verified": "..trust.verified",
}

# What opens a URL by itself, by its beginning: module and function.
OPENERS = {"ollama://": ("..remote.ollama", "open_model")}


class _Absent:
    """A missing part: false, and an error where it is used."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(self._text)


def part(name: str) -> Any:
    """Return the module of a part, or `_Absent`."""
    try:
        return module_of(PARTS[name])
    except UnsupportedError as error:
        return _Absent(str(error))


text.explaining = partial(part, "missing paths")


@exported("safeload.plugins")
class Format(NamedTuple):
    """A format: how to recognise its files, and the module that opens each.

    The module has ``read(candidate, request) -> Content``. If the format ``writes``, it also has ``write(tensors,
    metadata, path, *, overwrite, durable)``; if it is ``ambiguous``, ``claims(candidate) -> bool``.

    Attributes:
        name: the value of ``format=``, and of ``format`` of an open checkpoint.
        title: name in lists of formats, such as "Toy files".
        kind: completes "this is ...", such as "a Toy file".
        matches: returns True if a file with these first bytes (at most 512) can have this format.
        module: name of the module, imported when it is first needed.
        suffixes: usual suffixes; `convert` selects a written format by them.
        writes: whether the module has ``write``.
        ambiguous: whether the module has ``claims``, which decides if ``matches`` returns True.
        metadata: whether written files can hold metadata.
        nested: whether ``root=`` can select containers.
        own_names: whether tensors have other names or shapes than in PyTorch, so that `check` applies no schema.
        ranges: False if reading the table takes most of the file, which is then not opened over the network.
        chooses: returns the files to open in a folder, from the names of its files: one, or several to choose from.
        source: the distribution of a plug-in; set by safeload. Unlisted fields are for built-in formats.
    """

    name: str
    title: str
    kind: str
    matches: Callable[[bytes], bool]
    module: str
    suffixes: tuple[str, ...] = ()
    extra_suffixes: tuple[str, ...] = ()  # suffixes of another format; `convert` also needs ``format=`` or ``layout=``
    writes: bool = False
    ambiguous: bool = False
    metadata: bool = False
    nested: bool = False
    family: str | None = None  # value of ``format=`` shared by several rows
    public: bool = False  # ``safeload.NAME`` is a module of functions for this format
    parts: Callable[[bytes], bool] | None = None  # matches files that stand for their folder, if the format is required
    ranges: bool = True
    own_names: bool = False
    chooses: Callable[[Sequence[str]], Sequence[str]] | None = None
    source: str = ""
    writer: str = "write"  # the module's function that writes

    def load(self) -> Any:
        """Return the module of the format."""
        return module_of(self.module)

    def accepts(self, candidate: Candidate) -> bool:
        """Return True if a file has this format."""
        with self.guarded("recognise a file"):
            return bool(self.matches(candidate.head) and (not self.ambiguous or self.load().claims(candidate)))

    def read(self, candidate: Candidate, request: OpenRequest) -> Content:
        """Return the content of a file of this format.

        Args:
            candidate: the open file.
            request: how to open it.

        Returns:
            The content: the file with its table.
        """
        with self.guarded(f"read {show(candidate.path)}"):
            content: Content = self.load().read(candidate, request)
            if self.source and not isinstance(content, Content):
                raise TypeError(f"read() must return candidate.content(...), got {type(content).__name__}")
        return content

    def write(
        self, tensors: Mapping[str, Any], metadata: Mapping[Any, Any], path: str, *, overwrite: bool, **options: Any
    ) -> None:
        """Write a file of this format.

        Args:
            tensors: arrays and lazy values by name.
            metadata: of the source.
            path: the destination.
            overwrite: False to raise FileExistsError if the destination exists.
            options: of `AtomicFile`, for formats whose writers take them.
        """
        with self.guarded(f"write {show(path)}"):
            getattr(self.load(), self.writer)(tensors, metadata, path, overwrite=overwrite, **options)

    @contextmanager
    def guarded(self, action: str) -> Iterator[None]:
        """Turn foreign exceptions of a plug-in into errors that name its distribution.

        Raises:
            SafeloadError: a plug-in has failed.
        """
        try:
            yield
        except (SafeloadError, OSError):
            raise
        except Exception as error:
            if not self.source:
                raise
            text = f"the plug-in {show(self.name)} of {self.source} cannot {action}: {type(error).__name__}: "
            raise SafeloadError(text + show(str(error))[1:-1]) from error


@exported("safeload.plugins")
class OpenRequest(NamedTuple):
    """How to open files.

    Attributes:
        root: name of the container to read, if the format is ``nested``; None for all.
    """

    formats: tuple[str, ...] | None = None  # accepted formats; None for any
    root: str | None = None  # name of the nested container to read; None for all
    inert: bool = False  # accept unknown globals of a pickle as placeholders
    files: Files = LOCAL  # the store of the paths
    window: int = WINDOW  # bytes of the first request for a remote file


@exported("safeload.plugins")
class StoredTensor(NamedTuple):
    """A tensor of a file, in C order, for `Candidate.content`.

    Attributes:
        name: unique in the file.
        dtype: a NumPy dtype, or a name such as "bfloat16" or "F8_E4M3".
        shape: outermost axis first.
        offset: the first byte in the file.
        file: holds the elements; None for the file that is read.
        big_endian: byte order of the elements.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    file: Candidate | None = None
    big_endian: bool = False


@exported("safeload.plugins")
class Content(NamedTuple):
    """The result of a reader."""

    file: WeightFile  # the candidate's file with its table, or a temporary file that replaces it
    others: Sequence[WeightFile] = ()  # files with more tensors: unpacked, assembled, or beside the file
    names: Sequence[str] = ()  # tensors of all files in order; empty without other files
    notes: Sequence[str] = ()  # about other content of the file


@exported("safeload.plugins")
class Candidate:
    """An open file, before its format is known.

    Attributes:
        head: the first 512 bytes, or fewer.
    """

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.head = file.read_at(0, foreign.HEAD_SIZE)
        self._opened: list[Candidate] = []

    @property
    def path(self) -> str:
        """The path of the file, for messages."""
        return self.file.path

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.file.size

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes of the file, fewer at its end.

        Args:
            offset: the first byte.
            size: the number of bytes.

        Returns:
            The bytes; at most ``size``.
        """
        return self.file.read_at(offset, size)

    @cached_property
    def archive(self) -> Archive:
        """The directory of a zip archive, read once for all rows."""
        from .zip import Archive

        with paused(self.file.size):  # each entry becomes an object
            return Archive(self.file)

    def beside(self, name: str) -> Candidate:
        """Open another file in the folder of this one, or below.

        Raises:
            FormatError: the name leads elsewhere.
            FileNotFoundError: there is no such file.
            OSError: the file cannot be opened.
        """
        place = place_beside(self.file, name)
        if place is None:
            raise FormatError(f"expected the name of a file in the same folder, got {show(name)}", self.path)
        other = Candidate(open_without_table(place, files=self.file.files))
        self._opened.append(other)
        return other

    def content(
        self, tensors: Iterable[StoredTensor], metadata: Mapping[str, Any] | None = None, *, notes: Sequence[str] = ()
    ) -> Content:
        """Check the places of the tensors and return the content of the file.

        Args:
            tensors: in the order that `Checkpoint` shows; they may overlap.
            metadata: everything else in the file.
            notes: sentences for ``Checkpoint.notes``.

        Returns:
            The content, for ``read`` to return.

        Raises:
            FormatError: two tensors have the same name, or a tensor lies outside its file.
            TypeError: a dtype is unknown.
        """
        names: dict[str, None] = {}
        elsewhere: dict[Candidate, list[Listing]] = {}

        def check() -> Iterator[Listing]:
            for tensor in tensors:
                holder = self if tensor.file is None else tensor.file
                listing = _listing(tensor, holder)
                if tensor.name in names:
                    raise FormatError(f"two tensors are named {show(tensor.name)}", self.path)
                names[tensor.name] = None
                if holder is self:
                    yield listing
                else:
                    elsewhere.setdefault(holder, []).append(listing)

        self.file.table = ListedTable(check(), metadata)
        for holder, listings in elsewhere.items():
            holder.file.table = ListedTable(listings)
            holder.file.stand_for(self.file, unpacked=False)
        for opened in self._opened:
            if opened not in elsewhere:
                opened.close()
        self._opened = []
        return Content(self.file, [holder.file for holder in elsewhere], [*names] if elsewhere else (), notes)

    def close(self) -> None:
        """Close the file and all files opened by `beside`."""
        for opened in self._opened:
            opened.close()
        self.file.close()


def _listing(tensor: StoredTensor, holder: Candidate) -> Listing:
    """Check a tensor of a plug-in: wrong places would read foreign memory."""
    name, dtype, shape, offset, _, big_endian = tensor
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor must be str, got {show(name)}")
    row = dtypes.parse(dtype)
    lengths = tuple(shape)
    fits = len(lengths) <= MAX_RANK and all(type(n) is int and n >= 0 for n in lengths)
    if not fits or not array_fits(lengths, max(1, row.bits // 8)) or prod(lengths) % row.block:
        text = f": no array of {row.code} can have the shape {show(list(lengths))}"
        raise error_about(FormatError, text, path=holder.path, tensor=name)
    end = offset + row.nbytes(prod(lengths))
    if type(offset) is not int or not 0 <= offset <= end <= holder.size:
        text = f": needs bytes {offset} to {end}, but the file has {holder.size}"
        inside = offset in range(holder.size + 1)
        raise error_about(FormatError, text, path=holder.path, offset=offset if inside else None, tensor=name)
    return Listing(name, row, lengths, offset, end, big_endian=bool(big_endian) and row.swap > 1)


def place_beside(file: WeightFile, name: str) -> str | None:
    """Return the path of a name in the folder of a file or below; None if the name leads elsewhere."""
    steps = name.split("/")
    if not all(map(is_bare, steps)) or len(steps) > MAX_FOLDERS:
        return None
    return reduce(file.files.join, steps, file.files.split(file.place)[0])


# ---- the rows ----


def _begins(*magic: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(magic)


def _only(suffix: str, *preferred: str) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return a `Format.chooses`: the first preferred name, or all names with a suffix."""

    def choose(names: Sequence[str]) -> Sequence[str]:
        first = next((name for name in preferred if name in names), None)
        return [name for name in names if name.endswith(suffix)] if first is None else [first]

    return choose


_ZIP = "a zip archive (torch checkpoint or npz)"
_PICKLE = "a pickle (legacy torch checkpoint, torch.distributed's metadata, or numpy's)"
_TORCH, _TORCH_SUFFIXES = "torch checkpoints", (".pt", ".pth", ".ckpt", ".bin")

# The module of safetensors, which opens files by path.
_OPENED_BY_PATH = ".safetensors"

# fmt: off
ROWS = (
    Format("safetensors", "safetensors", "a safetensors file", foreign.is_safetensors, _OPENED_BY_PATH,
           (".safetensors",), writes=True, metadata=True),
    Format("torch zip", _TORCH, _ZIP, foreign.is_zip, "..formats.torch.file",
           _TORCH_SUFFIXES, nested=True, family="torch"),
    Format("torch legacy", _TORCH, _PICKLE, foreign.is_torch_legacy, "..formats.torch.file",
           _TORCH_SUFFIXES, nested=True, family="torch", ranges=False),
    Format("pickle", "pickled NumPy arrays", _PICKLE, lambda head: foreign.is_text_pickle(head) or (
           foreign.is_binary_pickle(head) and not foreign.is_torch_legacy(head)), "..formats.pickle_file",
           (".pdparams", ".pdopt"), nested=True, ranges=False),
    Format("gguf", "GGUF", "a GGUF file", _begins(b"GGUF"), "..formats.gguf",
           (".gguf",), writes=True, metadata=True, public=True),
    Format("npz", "npz", _ZIP, foreign.is_zip, ".npy", (".npz",), writes=True, ambiguous=True,
           writer="write_archive"),
    Format("npy", "npy", "an npy file", _begins(b"\x93NUMPY"), ".npy", (".npy",), writes=True),
    Format("dcp", "torch.distributed checkpoints", _PICKLE, foreign.is_binary_pickle, "..formats.dcp",
            ambiguous=True, nested=True, parts=foreign.is_safetensors),
    Format("deepspeed", "DeepSpeed checkpoints", _ZIP, _begins(), "..formats.rank_files",
           nested=True, parts=foreign.is_zip),
    Format("fsdp", "FSDP rank files", _ZIP, _begins(), "..formats.rank_files", nested=True, parts=foreign.is_zip),
    Format("orbax", "Orbax checkpoints", "the metadata of an Orbax checkpoint",
           lambda head: foreign.is_object(head) and b'"tree_metadata"' in head, "..formats.orbax",
           nested=True, parts=foreign.is_object),
    Format("keras", "Keras", "an HDF5 file", _begins(b"\x89HDF\r\n\x1a\n"), "..formats.keras",
           (".h5", ".hdf5", ".keras"), nested=True),
    Format("flax", "Flax weights", "Flax weights in MessagePack", foreign.is_flax, "..formats.flax",
           (".msgpack",), nested=True, own_names=True,
           chooses=_only(".msgpack", "flax_model.msgpack.index.json", "flax_model.msgpack")),
    Format("onnx", "ONNX", "an ONNX model", foreign.is_onnx, "..formats.onnx", (".onnx",), nested=True,
           own_names=True, chooses=_only(".onnx", "model.onnx")),
    Format("moon", "MOON", "a MOON file", _begins(b"NOOM"), "..formats.moon",
           (".moon",), (".bin",), writes=True, public=True),
)
# fmt: on

# The values of ``format=`` for type checkers, as in `FORMATS` below; a new row adds its name here.
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
DCP, KERAS = "dcp", "keras"


# The names of the formats for each value of ``format=``.
FORMATS = {
    value: tuple(other.name for other in ROWS if value in (other.family, other.name))
    for row in ROWS
    for value in filter(None, (row.family, row.name))
}

# Usual suffixes of weight files.
WEIGHT_SUFFIXES = frozenset(suffix for row in ROWS for suffix in row.suffixes)

# The format to write for a suffix.
SUFFIXES = {suffix: row.name for row in ROWS if row.writes for suffix in row.suffixes}

# The values of ``format=`` of `convert`, as in `WRITTEN`, and the suffixes of its files.
WrittenName: TypeAlias = Literal["safetensors", "gguf", "npz", "npy", "moon"]
WRITTEN = {row.name: (*row.suffixes, *row.extra_suffixes) for row in ROWS if row.writes}


def row_of(name: str, *, written: bool = False) -> Format:
    """Return the row of a format, which may be a plug-in's, and must be written if ``written``."""
    row = BY_NAME.get(name) or _plugin(name)
    if row is None or (written and not row.writes):
        raise ValueError(f"unknown format {show(name)}, expected one of {', '.join(WRITTEN if written else FORMATS)}")
    return row


def formats_of(name: str) -> tuple[str, ...]:
    """Return the names of the formats for a value of ``format=``; see `row_of` for errors."""
    return FORMATS.get(name) or (row_of(name).name,)


def written_suffixes(name: str) -> tuple[str, ...]:
    """Return the suffixes of files that `convert` writes in a format."""
    row = row_of(name, written=True)
    return (*row.suffixes, *row.extra_suffixes)


class WrittenNames(tuple[str, ...]):
    """The names of the written formats; those of plug-ins are members too, but are not listed."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        row = _plugin(name) if isinstance(name, str) else None
        return row is not None and row.writes


def titles() -> str:
    """Return the supported formats as text for messages."""
    *titles, last = dict.fromkeys(row.title for row in ROWS)
    return f"{', '.join(titles)} and {last}"


# ---- plug-ins ----

DISABLE = "SAFELOAD_NO_PLUGINS"


@cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points  # only here: it takes milliseconds, and few files need it

    return grouped(entry_points(group="safeload.formats"), lambda point: point.name)


def _enabled() -> dict[str, list[EntryPoint]]:
    return _entry_points() if os.environ.get(DISABLE, "") in ("", "0") else {}


@cache
def _load(name: str) -> Format | str:
    """Return the format of a plug-in, or why it cannot be used."""
    points = _entry_points()[name]
    dists = [point.dist for point in points]
    sources = [f"{dist.metadata['Name']} {dist.version}" if dist else "an unknown distribution" for dist in dists]
    subject = f"the plug-in {show(name)} of {' and '.join(sources)} cannot be used"
    if name in FORMATS:
        return f"{subject}: safeload has a format of this name"
    if len(points) > 1:
        return f"{subject}: only one distribution may have a plug-in of this name"
    try:
        row = points[0].load()
    except Exception as error:
        return f"{subject}: {type(error).__name__}: {show(str(error))[1:-1]}"
    if not isinstance(row, Format):
        return f"{subject}: expected a safeload.plugins.Format, got {type(row).__name__}"
    texts = (row.title, row.kind, row.module, *row.suffixes)
    if not callable(row.matches) or not all(isinstance(text, str) and text for text in texts):
        return f"{subject}: title, kind, module and suffixes must be text, and matches a function"
    if row.name != name:
        return f"{subject}: its format has another name, {show(row.name)}"
    return row._replace(source=sources[0], family=None, public=False, parts=None, extra_suffixes=())


def _plugin(name: str) -> Format | None:
    """Return the plug-in of a name, or None if there is none."""
    if name in FORMATS or name not in _enabled():
        return None
    row = _load(name)
    if isinstance(row, str):
        raise SafeloadError(row)
    return row


def plugin_rows() -> Iterator[Format]:
    """Iterate over the usable plug-ins in the order of their names; warn about the rest."""
    for name in sorted(_enabled()):
        row = _load(name)
        if isinstance(row, str):
            warnings.warn(row, RuntimeWarning, stacklevel=2)
        else:
            yield row


def _claiming(recognise: Callable[[Format], bool]) -> Format | None:
    """Return the first plug-in that recognises a file; warn about those that fail."""

    def recognised(row: Format) -> bool:
        try:
            with row.guarded("recognise a file"):
                return bool(recognise(row))
        except SafeloadError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            return False

    return next(filter(recognised, plugin_rows()), None)


# ---- opening a file ----


class Container(NamedTuple):
    """A kind of archive whose members are weight files; the module has ``enter(candidate, request) -> Opened``."""

    kind: str  # completes "this is ..."
    matches: Callable[[bytes], bool]  # True if a file with these first bytes can be one
    module: str  # relative to this package
    claims: Callable[[Candidate], bool] = lambda _: True  # True if a file with these first bytes is one


def _holds_gguf(candidate: Candidate) -> bool:
    names = candidate.archive.entries
    torch = next(iter(names), "").endswith("/data.pkl")  # with as many names as tensors
    return not torch and any(name.lower().endswith(".gguf") for name in names)


# Programs of Windows, Linux and macOS, and Actually Portable Executables.
_PROGRAM = _begins(b"MZ", b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
CONTAINERS = (
    Container("a tar archive", foreign.is_tar, "..formats.archives"),
    Container(
        "a program with a zip archive (llamafile)",
        _PROGRAM,
        "..formats.archives",
        lambda candidate: bool(module_of("..formats.archives").claims(candidate)),
    ),
    Container("a zip archive with a GGUF file", foreign.is_zip, "..formats.archives", _holds_gguf),
    Container(
        "a zip archive of Keras",
        foreign.is_zip,
        "..formats.keras",
        lambda candidate: not candidate.archive.entries.keys().isdisjoint(("model.weights.h5", "model.weights.npz")),
    ),
)


# How to treat a pickle with classes or functions outside the allowlist.
UnknownGlobals: TypeAlias = Literal["refuse", "inert"]


class Recipe(NamedTuple):
    """How a checkpoint was opened; see `safeload.open` for the options. Pickled with the checkpoint."""

    paths: tuple[str, ...]  # absolute
    listed: bool  # the caller passed a list
    format: str | None
    root: str | None
    unknown_globals: UnknownGlobals
    stored: bool = False
    files: Files = LOCAL  # the store that the paths lead to
    writable: bool = True
    cache: Cache = "keep"

    def __repr__(self) -> str:
        return f"<Recipe {', '.join(map(self.files.shown, self.paths))}>"  # paths can hold the secrets of URLs

    @property
    def options(self) -> OpenRequest:
        """Options for opening each file."""
        _, _, format, root, unknown_globals, _, files, *_ = self
        formats = None if format is None else formats_of(format)
        return OpenRequest(formats, root, unknown_globals == "inert", files)


class Opened(NamedTuple):
    """An open checkpoint: a file, or the files of a folder, an index or a list."""

    title: str  # the path as messages show it
    format: str  # the name of the row of the first file
    files: list[WeightFile]  # with their tables
    where: dict[str, tuple[WeightFile, int]] | None  # file and index of each tensor; None for a single file
    metadata: Mapping[Any, Any]  # of all files and the index, merged
    config: dict[str, Any] | None = None  # parsed ``config.json`` of a folder or a container
    index_file: tuple[str, tuple[Any, ...]] | None = None  # path and identity of the index
    notes: Sequence[str] = ()  # the kind of folder, other content, and skipped files
    recipe: Recipe | None = None  # how to open the path again, if known
    complete: bool = False  # the files should be a whole checkpoint, and a missing part is an error

    def __repr__(self) -> str:
        return f"<Opened {self.title}>"  # the path of an index can hold the secrets of its URL

    def close(self) -> None:
        for file in self.files:
            file.close()

    @property
    def file(self) -> WeightFile:
        return self.files[0]

    @property
    def places(self) -> Mapping[str, tuple[WeightFile, int]]:
        """File and index of each tensor."""
        return places_in(self.files[0]) if self.where is None else self.where


def opened_file(format: str, content: Content) -> Opened:
    """Return an `Opened` with the content of a file."""
    file, beside, names, notes = content
    files = [file, *beside]
    where = joined_places(files, names) if beside else None
    return Opened(file.path, format, files, where, file.table.metadata() or {}, notes=notes)


def joined_places(files: Sequence[WeightFile], names: Iterable[str]) -> dict[str, tuple[WeightFile, int]]:
    """Return the places of tensors that are in one of several files each, in the order of the names."""
    places = {name: (file, k) for file in files for k, name in enumerate(file.table.names)}
    return {name: places[name] for name in names}


def add(where: dict[str, tuple[WeightFile, int]], places: Mapping[str, tuple[WeightFile, int]]) -> None:
    """Add the tensors of a file to ``where``."""
    if not where.keys().isdisjoint(places.keys()):
        name = next(name for name in places if name in where)
        first, second = where[name][0].path, places[name][0].path
        raise error_about(FormatError, f"is in both {first} and {second}", path=second, tensor=name)
    where.update(places)


_NO_CONTAINERS = "root= selects a nested container, but {} has none"

# Formats whose readers take only the table from a file.
_TABLE_ONLY = (SAFETENSORS, GGUF)


def open_file(path: str, request: OpenRequest) -> Opened:
    """Open a file without reading its tensors."""
    formats, _, _, files, window = request
    parsed = False  # by the parser of safetensors, which refused it
    if files is LOCAL and (formats is None or SAFETENSORS in formats):
        try:
            file: WeightFile = module_of(_OPENED_BY_PATH).open_file(path, explained=False)
        except FormatError:
            parsed = True
        else:
            return _of_safetensors(file, request)
    file = open_without_table(path, files=files, window=window)
    candidate = None
    try:
        if file.verified:
            file.store.opening = True  # type: ignore[attr-defined]
        candidate = Candidate(file)
        opened = _open_candidate(candidate, request, parsed)
        file.settle()
    except BaseException as error:
        with closing(candidate or file):
            if file.verified and isinstance(error, SafeloadError):
                file.store.verify()  # type: ignore[attr-defined]  # a file that differs is the better reason
        raise
    if opened is None:
        candidate.close()
        opened = _of_safetensors(module_of(_OPENED_BY_PATH).open_file(path), request)
    return opened


def _of_safetensors(file: WeightFile, request: OpenRequest) -> Opened:
    if request.root is not None:
        file.close()
        raise error_about(UnsupportedError, _NO_CONTAINERS.format(SAFETENSORS), path=file.path)
    return Opened(file.path, SAFETENSORS, [file], None, file.table.metadata() or {})


def reopen_file(path: str, identity: tuple[Any, ...], request: OpenRequest) -> Opened:
    """Open a file again, if it is still the same."""
    with unchanged(request.files, [(path, identity)]):
        opened = open_file(path, request)
    opened.file.check_identity(identity)
    return opened


def _open_candidate(candidate: Candidate, request: OpenRequest, parsed: bool) -> Opened | None:
    """Open a file by its container or row; None if it is ``parsed`` and only the parser of safetensors says more."""
    file, formats, head = candidate.file, request.formats, candidate.head
    if parsed and (
        foreign.is_safetensors(head) or (formats is not None and not _PROGRAM(head) and not foreign.is_tar(head))
    ):
        return None
    is_plugin = formats is not None and FORMATS.keys().isdisjoint(formats)
    container = None if is_plugin else _container(candidate)
    row = find_row(candidate, request, parsed=parsed) if container is None else None
    if parsed and row is BY_NAME[SAFETENSORS]:
        return None
    if file.verified and (row is None or row.name not in _TABLE_ONLY):
        file.store.verify()  # type: ignore[attr-defined]  # before anything is unpacked
    if row is None:
        opened: Opened = module_of(container.module).enter(candidate, request)  # type: ignore[union-attr]
        return opened
    if not row.ranges:
        check_whole(file, f"{row.kind} must be read as a whole")
    return opened_file(row.name, row.read(candidate, request))


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
    if container is not None and file.files.inside:
        text = f"this is {container.kind} in another archive: extract it first"
        raise error_about(UnsupportedError, text, path=file.path)
    return container


def find_row(candidate: Candidate, request: OpenRequest, *, parsed: bool = False) -> Format:
    """Return the row of a file, which ``request`` must accept; if it is ``parsed``, safetensors has refused it."""
    path, head = candidate.path, candidate.head
    local, formats = candidate.file.files is LOCAL, request.formats
    if path.endswith(foreign.DCP_SUFFIX):
        raise error_about(UnsupportedError, foreign.DCP_PART.sentence(), path=path)
    row = next((row for row in _matching(head) if not row.ambiguous or row.load().claims(candidate)), None)
    required = row_of(formats[0]) if formats is not None and len(formats) == 1 else None
    if required is not None and (
        required.accepts(candidate) if required.source else required.parts is not None and required.parts(head)
    ):
        row = required
    elif foreign.is_safetensors(head) and (row is None or not local):
        row = BY_NAME[SAFETENSORS]  # its first bytes, the header's size, can equal the magic number of another format
    elif row is None and formats is None:
        row = _claiming(lambda row: row.accepts(candidate))
    if row is None:
        _refuse(head, path, candidate.file, always=local and (not parsed or _PROGRAM(head)))
        row = BY_NAME[SAFETENSORS]  # whose parser says more
        if parsed:
            return row
    if formats is not None and row.name not in formats:
        kind = _describe(head, path) or foreign.Kind(row.kind)
        raise FormatError(kind.sentence(formats[0]), path, 0)
    if request.root is not None and not row.nested:
        raise error_about(UnsupportedError, _NO_CONTAINERS.format(row.name), path=path)
    return row


def _describe(head: bytes, path: str) -> foreign.Kind | None:
    """Describe a file other than safetensors by its first bytes and its name; None if they do not tell."""
    kinds = (foreign.Kind(row.kind) for row in _matching(head))
    return foreign.describe(head, path) or next(kinds, None) or foreign.describe_text(head)


def explain(path: str) -> FormatError | None:
    """Return the error for a file that is edited, not safetensors or not complete; None if the parser's says more."""
    edits = part("edits")
    interrupted: FormatError | None = edits.interrupted(path) if edits else None
    if interrupted is not None:
        return interrupted
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


# First bytes of a file while `safeload.edit` writes its header.
_BROKEN = b"\xff" * 8


def _refuse(head: bytes, path: str, file: WeightFile | None, *, always: bool) -> None:
    """Refuse a file that is recognisably of another format; if ``always``, any file."""
    kind = _describe(head, path)
    if kind is not None and kind.damaged:
        raise FormatError(kind.sentence(), path, 0)
    if kind is not None:
        text = kind.sentence() if kind.advice else f"{kind.sentence()}; this version reads {titles()}"
        raise error_about(UnsupportedError, text, path=path)
    error: SafeloadError | None = None if file is None else foreign.unfinished(file)
    if error is None and (always or (head.strip() and not path.endswith(".safetensors"))):
        edits = part("edits") if head.startswith(_BROKEN) else None
        error = edits.interrupted(path) if edits else None
        error = error or FormatError(f"no known weight format starts with {head[:16].hex(' ')}", path, 0)
    try:
        if error is not None:
            raise error
    finally:
        del error  # it refers to this frame


def check_head(head: bytes, path: str) -> None:
    """Refuse a file by its first `foreign.HEAD_SIZE` bytes if it cannot have a supported format."""
    containers = any(row.matches(head) for row in CONTAINERS)
    known = foreign.is_safetensors(head) or any(_matching(head)) or containers
    if not known and _claiming(lambda row: row.matches(head)) is None:
        _refuse(head, path, None, always=True)
