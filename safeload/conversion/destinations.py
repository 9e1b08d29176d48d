"""Find where results go: a file, a file object, or a folder of shards, here or in a store; and write shards there."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fnmatch import translate
from functools import partial
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard, cast

import numpy as np

from ..core import dtypes
from ..core.arrays import Array
from ..core.atomic_file import AtomicFile, Digest, check_place, existing_file
from ..core.described import pack
from ..core.files import LOCAL, Located, Location, identity_of
from ..core.native import ffi
from ..core.registry import SAFETENSORS, WEIGHT_SUFFIXES, WRITTEN
from ..core.safetensors import ROOM, FileWriter, source_of
from ..core.tensors import Lazy, LazyParts
from ..core.text import PathLike, absolute, native_path, parse_size, show, warning
from ..errors import RemotePermissionError, SafetensorError, UnsupportedError, unsaved
from ..formats.folder import CONFIG, INDEX, SINGLE
from ..models.choosing import with_dtype
from ..quant.quantization import OWN, QUANTIZATION, is_own, quantization_of, without_quantization
from ..remote import url as urls
from ..remote.places import is_file_object, places_of
from .sink import EXTRAS, NUMBERED, Sink, StoreSink, free_names, indexed_names, is_extra, is_file

# The destination of a conversion.
Destination: TypeAlias = PathLike | Located

# The default limit for shards, in bytes.
_USUAL_SIZE = 5_000_000_000

# A suffix begins with a letter: the names of models end in versions and sizes, such as "Qwen2.5-7B".
_SUFFIX = re.compile(r"\.(?:[a-z]\w*)?", re.ASCII)

# Other files that decide what weights are: configurations, indexes, manifests, signatures, metadata of DCP and Orbax.
_DOCUMENTS = re.compile("|".join(map(translate, (*EXTRAS, "*.json", "*.sig", "*.ocdbt", ".*", "_*"))))

# A URL as `pathlib` spells it.
_PATH_OF_URL = re.compile(rf"({'|'.join(urls.PLAIN)}):[/\\](?![/\\])")
# Bytes that a file object gets at once.
_PIECE = 4 << 20
# Bytes at the start of a file that identify safeload as its writer.
_HEAD = 4096


class BinaryWriter(Protocol):
    """A file object opened for writing in binary mode; ``seek`` and ``tell`` are used if it has them."""

    def write(self, data: bytes, /) -> Any:
        """Write bytes and return their number."""


# Where tensors are written: a file, a folder, a store or a file object.
SaveDestination: TypeAlias = Destination | BinaryWriter


def is_written_to(dst: SaveDestination) -> TypeGuard[BinaryWriter]:
    """Return True for file objects opened for writing; paths of fsspec have ``fs``."""
    path_like = isinstance(dst, (str, os.PathLike))
    return not path_like and callable(getattr(dst, "write", None)) and not hasattr(dst, "fs")


def limit_of(max_shard_size: int | str | None) -> int:
    """Return the limit for shards, in bytes."""
    return _USUAL_SIZE if max_shard_size is None else parse_size(max_shard_size, "max_shard_size")


def where(dst: Destination, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of a destination. ``file://`` URLs are local."""
    if not isinstance(dst, (str, os.PathLike)) and is_file_object(dst):
        raise TypeError(f"the destination must be a path, a URL or a store here, got {type(dst).__name__}")
    (text,), files = places_of((dst,), storage_options)
    path_like = isinstance(dst, (str, os.PathLike))
    if files is LOCAL or not urls.is_url(text):
        if path_like and not isinstance(dst, str) and _PATH_OF_URL.match(text):
            url = urls.shown(_PATH_OF_URL.sub(r"\1://", text))
            raise ValueError(f"{show(url)}: pathlib drops a slash of the URL; pass it as a str")
        return Location(LOCAL, text if files is LOCAL and path_like else native_path(text)[0])
    if path_like and len(urls.links(text)) == 1 and urls.scheme_of(text) == "file":
        return Location(LOCAL, native_path(urls.local_path(text))[0])
    return Location(files, text)


def is_folder(location: Location, format: str | None = None) -> bool:
    """Return True if a destination is a folder: an existing folder, or a path with a final slash or no suffix."""
    path = location.path
    if path.endswith("/") or not os.path.basename(path) or (not location.files.remote and os.path.isdir(path)):
        return True
    suffix = os.path.splitext(path)[1].lower()
    named = suffix in WEIGHT_SUFFIXES
    if location.files.remote:  # a URL is a folder unless it has the suffix of a weight file
        return not named
    # Other formats are files, even without a suffix.
    return not named and _SUFFIX.fullmatch(suffix) is None and format in (None, SAFETENSORS)


def sink_of(location: Location) -> Sink:
    """Return the sink of a destination folder, without listing it; refuse the name of a file."""
    name, suffix = os.path.splitext(location.shown)
    if suffix.lower() in WEIGHT_SUFFIXES and not is_folder(location):
        text = f"max_shard_size writes a folder, but {show(location.shown)} has the suffix of a file"
        raise ValueError(f"{text}: pass a folder such as {show(name + '/')}, or end the path with a slash")
    return sink_at(location)


def sink_at(location: Location) -> Sink:
    """Return the sink of a folder that was a destination before."""
    return (StoreSink if location.files.remote else Sink)(location.files, location.path)


def check_writable(location: Location) -> None:
    """Refuse a read-only store."""
    files: Any = location.files
    if files.remote:
        files.backend(location.path).check_writable(location.path)


def file_in_store(location: Location, *, overwrite: bool) -> tuple[StoreSink, str]:
    """Return the folder of a file to be written to a store, and its name there."""
    check_writable(location)
    parent, name = location.files.split(location.path)
    sink = StoreSink(location.files, parent)
    if not overwrite and is_file(location):
        raise existing_file(location.shown)
    if name == SINGLE and is_file(sink.location / INDEX):
        message = f"The shards of {INDEX} beside it would be read instead: remove them, or choose a new folder"
        raise existing_file(sink.shown(INDEX), message)
    return sink, name


# ---- saved tensors ----


class ObjectFile:
    """A binary file object, from its current position on."""

    def __init__(self, file: Any) -> None:
        if isinstance(file, io.TextIOBase):
            raise TypeError("expected a file object opened in binary mode, got a text file")
        if getattr(file, "closed", False):
            raise ValueError("the file object is closed")
        self._file = file
        self._start: int | None = None
        with suppress(AttributeError, OSError, io.UnsupportedOperation):
            if file.seekable():
                self._start = int(file.tell())
        self.in_order = self._start is None  # True if it cannot seek

    def seek(self, position: int) -> None:
        if self._start is not None:
            self._file.seek(self._start + position)

    def write(self, pieces: list[tuple[int, int]]) -> None:
        """Write copies of memory, because an object may keep its argument."""
        for address, size in pieces:
            for begin in range(0, size, _PIECE):
                count = min(_PIECE, size - begin)
                self._write(ffi.buffer(ffi.cast("char *", address + begin), count)[:])

    def _write(self, data: bytes) -> None:
        """Write all bytes, even if the object takes only some at a time."""
        while data:
            count = self._file.write(data)
            if count is None and isinstance(self._file, io.RawIOBase):
                raise BlockingIOError(errno.EAGAIN, "the file object does not block and takes no more bytes")
            if not isinstance(count, int):  # objects other than Python's may return nothing
                return
            if not 0 < count <= len(data):
                raise OSError(errno.EIO, f"the file object wrote {count} of {len(data)} bytes")
            data = data[count:]

    @contextmanager
    def open(self, size: int | None) -> Iterator[Any]:
        """Yield a file: this one, or for an unknown size a temporary one, which is copied."""
        if size is None:
            with self.staging("spool.safetensors") as path, AtomicFile(path, 0, durable=False) as file:
                yield file
            return
        with self._undone():
            yield self
            self.seek(size)

    @contextmanager
    def staging(self, name: str) -> Iterator[str]:
        """Yield a path in a temporary folder, and copy the file that is written there."""
        with tempfile.TemporaryDirectory(prefix="safeload-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, name)
            yield path
            with self._undone(), open(path, "rb") as complete:
                while data := complete.read(_PIECE):
                    self._write(data)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Cut the file to its old size after an error, if the tensors were written at its end."""
        end = None
        if self._start is not None:
            end = int(self._file.seek(0, os.SEEK_END) or self._file.tell())
            self._file.seek(self._start)
        try:
            yield
        except BaseException:
            if end is not None and end <= (self._start or 0):
                with suppress(Exception):  # the first error is raised
                    self._file.seek(self._start)
                    self._file.truncate()
            raise


class FileSink(NamedTuple):
    """A single file."""

    # Returns a context with a file of this size, whose end puts it in place. A file of unknown size, None, can seek.
    open: Callable[[int | None], AbstractContextManager[Any]]
    in_order: bool = False  # True if a file of known size cannot seek

    def write(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None, *, room: int = ROOM) -> None:
        writer = FileWriter(*pack(tensors, metadata), room=room)
        try:
            with self.open(writer.size) as file:
                writer.write_to(file)
        except OSError as error:
            raise unsaved(error) from None


def target_of(
    dst: SaveDestination,
    max_shard_size: int | str | None = None,
    *,
    overwrite: bool,
    durable: bool,
    storage_options: Mapping[str, Any] | None,
) -> FileSink | Sink:
    """Return the checked target of a save."""
    if is_written_to(dst):
        if max_shard_size is not None:
            raise ValueError("max_shard_size writes a folder, but the destination is a file object")
        file = ObjectFile(dst)
        return FileSink(file.open, file.in_order)
    location = where(cast(Destination, dst), storage_options)
    path, remote = location.path, location.files.remote
    if not remote:  # the path must be valid until the end, even if the working directory changes
        if not path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        path = absolute(path) + ("/" if path.endswith(("/", os.sep)) and len(path) > 1 else "")
        location = Location(location.files, path)
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            return _local_file(path, overwrite=overwrite, durable=durable)  # a device or a pipe
    if max_shard_size is not None or is_folder(location):
        check_writable(location)
        sink = sink_of(location)
        sink.check_free(overwrite=overwrite)
        return sink
    if os.path.splitext(path)[1].lower() not in WRITTEN[SAFETENSORS]:
        raise ValueError(
            f"{show(location.shown)}: tensors are saved as safetensors: use the suffix .safetensors, or end the path "
            "with a slash for a folder"
        )
    if not remote:
        return _local_file(path, overwrite=overwrite, durable=durable)
    store, name = file_in_store(location, overwrite=overwrite)
    return FileSink(lambda size: store.writing(name, size or 0))


def _local_file(path: str, *, overwrite: bool, durable: bool) -> FileSink:
    in_order = os.path.exists(path) and not os.path.isfile(path)
    old = [] if in_order else old_shards(path, overwrite)
    if not os.path.lexists(path):
        check_place(path)

    @contextmanager
    def file(size: int | None) -> Iterator[AtomicFile]:
        with AtomicFile(path, size or 0, overwrite=overwrite or in_order, durable=durable) as file:
            yield file
        remove_shards(old)

    return FileSink(file, in_order)


# ---- files that must stay ----


def refuse_inputs(path: Any, inputs: Iterable[Any], *, beside: Iterable[Any] = ()) -> None:
    """Refuse to write over a local file that is read, or that `_read_with` finds, whatever its spelling or links."""
    place = _local(path)
    if place is not None and not os.path.isfile(place):
        return
    for file in chain(inputs, () if place is None else _read_with(beside, os.stat(place).st_ino)):
        local = _local(file)
        with suppress(OSError):
            if isinstance(file, str) and file == path if place is None else local and os.path.samefile(place, local):
                raise ValueError(f"{path} would replace {file}, which is read: choose another path")


def _read_with(sources: Iterable[Any], inode: int) -> Iterator[str]:
    """Yield a file of this inode, and links, in a folder, beside an index, or as a document beside a weight file."""
    folders: dict[str, bool] = {}
    for source in filter(None, map(_local, sources)):
        folder, name = os.path.split(source)
        if not os.path.isfile(source):
            if os.path.isdir(source):
                folders[source] = True
        elif name.endswith(".index.json") or not _is_document(name):
            folders[folder] = folders.get(folder, False) or name.endswith(".index.json")
    for folder, whole in folders.items():
        with os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                if (entry.inode() == inode or entry.is_symlink()) and (whole or _is_document(entry.name)):
                    yield os.path.join(folder, entry.name)


def _is_document(name: str) -> bool:
    return _DOCUMENTS.match(name) is not None and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES


def _local(path: Any) -> str | None:
    """Return the path of a local file, also of a ``file://`` URL; None for anything else."""
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) and not hasattr(path, "fs") else "\0"
    if "\0" in text:
        return None
    if not urls.is_url(text):
        return text
    return urls.local_path(text) if urls.scheme_of(text) == "file" else None


def old_shards(path: str, overwrite: bool) -> list[str]:
    """Refuse an existing file; return the index and the shards that would be read instead of ``model.safetensors``."""
    if not overwrite and os.path.lexists(path):
        raise existing_file(path)
    old: list[str] = []
    usual = os.path.basename(path) != SINGLE and not os.path.islink(path)
    for place in () if usual else {os.path.abspath(path), os.path.realpath(path)}:
        folder = Sink(LOCAL, os.path.dirname(place))
        index = folder.shown(INDEX)
        if os.path.basename(place) != SINGLE or not os.path.isfile(index):
            continue
        if not overwrite:
            raise existing_file(
                index, f"The checkpoint of {INDEX} exists beside {SINGLE}; pass overwrite=True to replace it"
            )
        old += [index, *map(folder.shown, sorted(filter(NUMBERED.fullmatch, indexed_names(folder))))]
    return old


def remove_shards(old: Iterable[str]) -> None:
    """Remove `old_shards`, once the new file is in place."""
    for path in old:
        is_index = os.path.basename(path) == INDEX  # readers find the old shards as long as it stays
        with nullcontext() if is_index else suppress(OSError):
            os.unlink(path)


def check_shards(old: Collection[str], read: Iterable[str], *, every_tensor: bool) -> None:
    """Refuse to remove shards of the source if the new file does not get all of their tensors."""
    shards = [path for path in old if path.endswith(".safetensors") and os.path.exists(path)]
    identities = {identity_of(os.stat(path))[2:] for path in read if os.path.exists(path)}
    lost = [path for path in shards if identity_of(os.stat(path))[2:] in identities]
    if lost and not (every_tensor and len(lost) == len(shards)):
        raise existing_file(
            lost[0],
            f"{SINGLE} would replace all shards of {INDEX}, which are the source, but not get all of their "
            "tensors: choose another folder",
        )


# ---- text files ----


class Output(NamedTuple):
    """A text file to write. `check` refuses a path before the work starts, `write` checks it again."""

    argument: str  # or option, that names the file
    path: str
    kind: str  # "report" or "manifest", for messages
    recognises: Callable[[bytes], bool]  # tells by the first bytes if safeload wrote this kind of file
    overwrite: bool  # allows to replace any file except a source
    sources: Iterable[Any]  # that are read

    def check(self, sources: Iterable[str] = ()) -> bool:
        """Return True for a file that may be replaced or a device, False if there is no file."""
        path = self.path
        try:
            existing = os.stat(path)
        except FileNotFoundError:
            if urls.is_url(path):
                raise ValueError(f"{self.argument} needs a local file, got {urls.shown(path)}") from None
            check_place(path)
            return False
        if stat.S_ISDIR(existing.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if stat.S_ISCHR(existing.st_mode) or stat.S_ISFIFO(existing.st_mode):
            return True
        empty = stat.S_ISREG(existing.st_mode) and not existing.st_size
        ours = empty or self.is_ours()
        read = [*self.sources, *sources]
        refuse_inputs(path, read, beside=() if ours else read)  # its own file may be in a source folder
        if not ours and not self.overwrite:
            raise self._exists()
        return True

    def write(self, text: str, sources: Iterable[str] = ()) -> int:
        """Write the file atomically and return its size in bytes."""
        replaces = self.check(sources)
        encoded = text.encode("utf-8", "backslashreplace")  # lone surrogates come from paths
        try:
            with AtomicFile(self.path, len(encoded), overwrite=replaces) as file, file.stream() as stream:
                return stream.write(encoded)
        except FileExistsError:  # created since
            raise self._exists() from None

    def _exists(self) -> FileExistsError:
        return existing_file(
            self.path, f"File exists and is not a safeload {self.kind}; pass overwrite=True to replace it"
        )

    def is_ours(self) -> bool:
        """True if safeload wrote the existing file as this kind of file."""
        with open(self.path, "rb", buffering=0) as file:
            return self.recognises(file.read(_HEAD))


# ---- shards ----

# A tensor for a writer.
AnyTensor = Lazy | LazyParts


def config_with(
    config: Mapping[str, Any] | None, target: dtypes.Dtype | None, *, restored: bool, schemes: Collection[str]
) -> dict[str, Any] | None:
    """Return the ``config.json`` for converted weights, nested parts included; ``restored`` if dequantized."""
    if config is None:
        return None
    if restored or is_own(config):
        config = without_quantization(config)
    result = dict(config) if target is None else with_dtype(config, target)
    if schemes and quantization_of(result) is None:
        result[QUANTIZATION] = {"quant_method": OWN, "schemes": sorted(schemes)}
    return result


def warn_of_schemes(path: str, schemes: Collection[str]) -> None:
    """Warn that other libraries cannot load a folder with safeload's quantized tensors."""
    if schemes:
        warning(
            "%s: only safeload reads the quantized tensors (%s); transformers, vLLM and other engines do not load them",
            path,
            ", ".join(sorted(schemes)),
        )


def extras_of(folder: Location) -> dict[str, Location]:
    """Return the files for other libraries beside the weights; none if a store cannot list folders."""
    try:
        listed = folder.files.listing(folder.path)
    except (UnsupportedError, RemotePermissionError):  # https, or a key without permission to list
        return {}
    return {
        name: location
        for name, is_folder in listed
        if not is_folder and is_extra(name) and os.path.splitext(name)[1] not in WEIGHT_SUFFIXES
        if (location := folder / name).files.remote or os.path.isfile(location.path)
    }


def shard_bounds(sizes: Sequence[int] | Array, limit: int) -> dict[str, slice]:
    """Return the range of tensors in each shard by file name: ``model.safetensors`` for a single shard."""
    ends = np.cumsum(sizes, dtype=np.int64)
    bounds, begin, done = [], 0, 0
    while begin < len(ends):
        # A tensor larger than the limit gets its own shard.
        end = max(begin + 1, int(np.searchsorted(ends, done + limit, side="right")))
        bounds.append(slice(begin, end))
        begin, done = end, int(ends[end - 1])
    bounds = bounds or [slice(0, 0)]  # an empty shard
    if len(bounds) == 1:
        return {SINGLE: bounds[0]}
    return {f"model-{k + 1:05}-of-{len(bounds):05}.safetensors": rows for k, rows in enumerate(bounds)}


def weight_map(stored: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the shard of each stored tensor, given the names in each shard; refuse a name in two shards."""
    files = {name: file for file, names in stored.items() for name in names}
    if len(files) < sum(map(len, stored.values())):
        name = next(name for file, names in stored.items() for name in names if files[name] != file)
        raise SafetensorError(
            f"two tensors would be stored as {show(name)}, which is also a part of a quantized tensor"
        )
    return files


def writer_of(
    outputs: Mapping[str, AnyTensor], metadata: Mapping[str, str] | None, *, editable: bool = True
) -> ShardWriter:
    """Return the writer of a shard; an ``editable`` header has room for changes, unlike the headers of engines."""
    return FileWriter(*pack(outputs, metadata, in_folder=True), room=ROOM if editable else 0)


class ShardWriter(Protocol):
    """A shard to write; its tensors need not exist yet."""

    size: int  # bytes of the file

    def write_to(self, file: AtomicFile) -> None: ...


def write_shards(
    shards: Mapping[str, Callable[[], ShardWriter]],  # each is called when its turn comes
    files: Mapping[str, bytes | Location],  # see `Sink.commit`
    sink: Sink,
    *,
    overwrite: bool,
    # Adds the record of origin to ``files``, given size and SHA-256 of the shards.
    record: Callable[[Mapping[str, Any]], Mapping[str, bytes | Location]] | None = None,
) -> int:
    """Write a folder of shards and the files beside them, and return the bytes of the shards."""
    written, entries = 0, dict[str, Any]()
    with sink.begin(overwrite=overwrite, config=files.get(CONFIG)):
        for name, shard in shards.items():
            writer = shard()
            with nullcontext() if record is None else Digest() as digest:
                with sink.file(name, writer.size, digest) as file:
                    writer.write_to(file)
                entries[name] = digest and {"size": writer.size, "sha256": digest.hexdigest()}
            written += writer.size
        sink.commit(files if record is None else record(entries))
    if overwrite:
        sink.clear_records()
    return written


def write_tensors(
    sink: FileSink | Sink,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None,
    *,
    limit: int,  # bytes of a shard in a folder
    overwrite: bool,
) -> None:
    """Write all tensors of a file or folder."""
    if isinstance(sink, FileSink):
        sink.write(tensors, metadata)
        return
    items = [*tensors.items()]
    # Values that are no tensors are refused before anything is written.
    sizes = [tensor.nbytes if hasattr(tensor, "nbytes") else source_of(name, tensor).nbytes for name, tensor in items]
    bounds = shard_bounds(sizes, limit)
    names = free_names(sink, [*bounds])
    shards = {names[file]: dict(items[rows]) for file, rows in bounds.items()}
    writers = {file: partial(writer_of, shard, metadata) for file, shard in shards.items()}
    files = weight_map({file: pack(shard, None, in_folder=True)[0] for file, shard in shards.items()})
    index = {} if [*shards] == [SINGLE] else {INDEX: index_text(files, sum(sizes))}
    write_shards(writers, index, sink, overwrite=overwrite)


def config_text(config: Mapping[str, Any]) -> bytes:
    """Return the content of a ``config.json``."""
    return (json.dumps(dict(config), indent=2) + "\n").encode()


def index_text(
    weight_map: Mapping[str, str],  # the shard of each tensor
    total_size: int,  # bytes of all tensors
    parameters: int | None = None,  # "total_parameters", as MLX has it
) -> bytes:
    """Return the index as ``json.dumps(..., indent=2)`` would write it, but five times faster."""
    rows = ",\n".join([f"    {quoted(name)}: {quoted(file)}" for name, file in sorted(weight_map.items())])
    inside = f"{{\n{rows}\n  }}" if rows else "{}"
    more = "" if parameters is None else f',\n    "total_parameters": {parameters}'
    metadata = f'{{\n    "total_size": {total_size}{more}\n  }}'
    return f'{{\n  "metadata": {metadata},\n  "weight_map": {inside}\n}}\n'.encode()
