"""A format as a row of the registry, and what its module gets and returns. Rows of plug-ins are of the same class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base import dtypes
from ..base.arrays import array_fits
from ..base.cached import cached_property
from ..base.gc_pause import paused
from ..base.listed_table import ListedTable, Listing
from ..base.messages import error_about
from ..base.paths import is_bare
from ..base.text import show
from ..engine.run.weight_file import WeightFile, open_without_table
from ..errors import FormatError, SafeloadError, exported
from ..stores.files import LOCAL, Files
from ..stores.store import WINDOW
from . import foreign

if TYPE_CHECKING:
    from .zip import Archive

# Folders above a file that a format reads besides, at most.
MAX_FOLDERS = 16
# Axes of a tensor, as in numpy 2.
_MAX_RANK = 64


# The modules of formats, by name. Threads contend for `functools.cache` without the GIL.
modules: dict[str, Any] = {}


def module_of(name: str) -> Any:
    """Return a module: absolute, or of this package if its name begins with a dot."""
    module = modules.get(name)
    return modules.setdefault(name, import_module(name, __package__)) if module is None else module


@exported("safeload.plugins")
class Format(NamedTuple):
    """A format: how to recognise its files, and the module that reads them.

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

    name: str  # value of `Checkpoint.format` and of ``format=``
    title: str  # name in the list of supported formats; equal titles are listed once
    kind: str  # completes "this is ...", as far as the first bytes tell
    matches: Callable[[bytes], bool]  # True if a file with these first bytes can have this format
    module: str  # reads and writes the format; imported when it is first needed
    suffixes: tuple[str, ...] = ()  # usual suffixes; `convert` selects a written format by them
    extra_suffixes: tuple[str, ...] = ()  # suffixes of another format; `convert` also needs ``format=`` or ``layout=``
    writes: bool = False
    ambiguous: bool = False  # other rows match the same first bytes, so `claims` of the module decides
    metadata: bool = False  # written files can hold metadata
    nested: bool = False  # has containers for ``root=`` to select
    family: str | None = None  # value of ``format=`` shared by several rows
    public: bool = False  # ``safeload.NAME`` is a module of functions for this format
    parts: Callable[[bytes], bool] | None = None  # matches files that stand for their folder, if the format is required
    ranges: bool = True  # False if reading the table takes most of the file
    own_names: bool = False  # True if names or shapes are not those of the model in PyTorch, so no schema applies
    # Returns the files to open in a folder, from the names of its files: one, or several that the caller must choose
    # from.
    chooses: Callable[[Sequence[str]], Sequence[str]] | None = None
    source: str = ""  # the distribution of a plug-in, set when it is loaded; empty for formats of safeload

    def load(self) -> Any:
        """Return the module of the format."""
        return module_of(self.module)

    def accepts(self, candidate: Candidate) -> bool:
        """Return True if a file has this format."""
        with self.guarded("recognise a file"):
            matches = self.matches(candidate.head)
            return bool(matches and (not self.ambiguous or self.load().claims(candidate)))

    def read(self, candidate: Candidate, request: OpenRequest) -> Content:
        """Return the content of a file of this format.

        Args:
            candidate: the open file.
            request: how to open it.

        Returns:
            The content: the file with its table.
        """
        with self.guarded(f"read {show(candidate.path)}"):
            content = self.load().read(candidate, request)
            if self.source and not isinstance(content, Content):
                raise TypeError(f"read() must return candidate.content(...), got {type(content).__name__}")
        result: Content = content
        return result

    def write(self, tensors: Mapping[str, Any], metadata: Mapping[Any, Any], path: str, *, overwrite: bool) -> None:
        """Write a file of this format.

        Args:
            tensors: arrays and lazy values by name.
            metadata: of the source.
            path: the destination.
            overwrite: False to raise FileExistsError if the destination exists.
        """
        with self.guarded(f"write {show(path)}"):
            self.load().write(tensors, metadata, path, overwrite=overwrite)

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
        names: list[str] = []
        elsewhere: dict[Candidate, list[Listing]] = {}

        def check() -> Iterator[Listing]:
            for tensor in tensors:
                holder = self if tensor.file is None else tensor.file
                listing = _listing(tensor, holder)
                names.append(tensor.name)
                if holder is self:
                    yield listing
                else:
                    elsewhere.setdefault(holder, []).append(listing)

        self.file.table = ListedTable(check(), metadata)
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise FormatError(f"two tensors are named {show(twice)}", self.path)
        for holder, listings in elsewhere.items():
            holder.file.table = ListedTable(listings)
            holder.file.stand_for(self.file, unpacked=False)
        for opened in self._opened:
            if opened not in elsewhere:
                opened.close()
        self._opened = []
        return Content(self.file, [holder.file for holder in elsewhere], names if elsewhere else (), notes)

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
    fits = len(lengths) <= _MAX_RANK and all(type(n) is int and n >= 0 for n in lengths)
    if not fits or not array_fits(lengths, max(1, row.bits // 8)) or prod(lengths) % row.block:
        text = f": no array of {row.code} can have the shape {show(list(lengths))}"
        raise error_about(FormatError, text, path=holder.path, tensor=name)
    end = offset + row.nbytes(prod(lengths))
    if type(offset) is not int or not 0 <= offset <= end <= holder.size:
        text = f": needs bytes {offset} to {end}, but the file has {holder.size}"
        raise error_about(FormatError, text, path=holder.path, tensor=name)
    return Listing(name, row, lengths, offset, end, big_endian=bool(big_endian) and row.swap > 1)


def place_beside(file: WeightFile, name: str) -> str | None:
    """Return the path of a name in the folder of a file or below; None if the name leads elsewhere."""
    steps = name.split("/")
    if not all(map(is_bare, steps)) or len(steps) > MAX_FOLDERS:
        return None
    place = file.files.split(file.place)[0]
    for step in steps:
        place = file.files.join(place, step)
    return place
