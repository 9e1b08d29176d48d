"""The format of torch.save since torch 1.6: a zip archive of one pickle and its storages.

1. ``<prefix>/data.pkl`` is the pickle, ``<prefix>/data/<key>`` the storage of each key, as in memory;
   ``<prefix>/byteorder`` says "little" or "big" and may be missing (little). The prefix is free text.
2. Archives of torch.package have another layout: see package.py.
3. Local headers hold no sizes (a data descriptor follows the data): they are taken from the central directory. The data
   begins at the local header + 30 + the *local* name's length + the *local* extra field's length, padding in which
   aligns it.
4. torch never compresses storages; a compressed storage comes from another writer and cannot be mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...base.text import show
from ...engine.run.weight_file import WeightFile
from ...errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from ..registry import Candidate, Content, OpenRequest
from ..unpickle import run as unpickler
from ..unpickle.run import Unpickled, unpickle
from ..zip import Archive
from . import package as torch_package
from .globals import ALLOWED, Storage, read_persistent_id
from .storages import locate_entry
from .tensors import Made, content_of, make_table


def _find_pickle(archive: Archive, path: str) -> str:
    """The name of the pickle: ``data.pkl`` at depth one, else the only ``.pkl`` entry."""
    names = archive.entries
    found = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    found = found or [name for name in names if name.endswith(".pkl")]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(show(name) for name in (found or list(names))[:10])
    if found:
        raise FormatError(f"the zip archive has {len(found)} pickles that could be the checkpoint: {shown}", path)
    raise UnsupportedError(f"{path}: a zip archive without a pickle, so not a torch checkpoint; it holds {shown}")


def _is_script(archive: Archive, prefix: str) -> bool:
    return any(name.startswith(f"{prefix}code/") or name == f"{prefix}constants.pkl" for name in archive.entries)


def read(candidate: Candidate, wanted: OpenRequest) -> Content:
    """An open file with its table; see `read_table`."""
    return content_of(candidate.file, wanted, lambda wanted: read_table(candidate.archive, candidate.file, wanted))


def read_table(archive: Archive, file: WeightFile, wanted: OpenRequest) -> Made:
    """The tensors of an archive.

    Raises:
        FormatError, UnsupportedError, ForbiddenError, LimitError, TensorNotFoundError: see the modules used.
        OSError: the file cannot be read.
    """
    top = torch_package.top_of(archive)
    if top is not None:
        return _read_package(archive, file, wanted, top)
    name = _find_pickle(archive, file.path)
    prefix = name[: name.rindex("/") + 1] if "/" in name else ""
    storages: dict[str, Storage] = {}
    if archive.entries[name].size > unpickler.MAX_PICKLE:
        raise LimitError(f"{file.path}: the pickle {show(name)} has more than {unpickler.MAX_PICKLE} bytes")
    data, base = archive.read(name)

    def persistent(value: Any) -> Any:
        return read_persistent_id(value, storages)

    try:
        found = unpickle(data, ALLOWED, persistent, path=file.path, base=base, inert=wanted.inert)
    except ForbiddenError as error:
        if not _is_script(archive, prefix):
            raise
        raise UnsupportedError(
            f"{file.path}: this is a TorchScript archive: {str(error).removeprefix(file.path + ': ')}"
        ) from None
    return _make_table(archive, file, wanted, found, lambda storage: f"{prefix}data/{storage.key}", prefix)


def _read_package(archive: Archive, file: WeightFile, wanted: OpenRequest, top: str) -> Made:
    def entry_of(storage: Storage) -> str:
        return torch_package.entry_of(archive, storage, top)

    found, root = torch_package.Package(archive, file, top).read(wanted.root, wanted.inert)
    return _make_table(archive, file, wanted._replace(root=root), found, entry_of, top)


def _make_table(
    archive: Archive,
    file: WeightFile,
    wanted: OpenRequest,
    found: Unpickled,
    entry_of: Callable[[Storage], str],
    prefix: str,
) -> Made:
    begins: dict[Storage, int] = {}

    def locate(storage: Storage) -> int:
        begin = begins.get(storage)
        if begin is None:
            begin = begins[storage] = locate_entry(archive, storage, entry_of(storage), file.path)
        return begin

    archive.prefetch(archive.entries)
    order = _is_big_endian(archive, prefix, file.path)
    made = make_table(found, wanted, file.path, locate, big_endian=order)
    archive.check_overlap()
    return made


def _is_big_endian(archive: Archive, prefix: str, path: str) -> bool:
    name = f"{prefix}byteorder"
    if name not in archive.entries:
        return False
    size = archive.entries[name].size
    if size > len("little"):
        raise FormatError(f'byteorder has {size} bytes, expected "little" or "big"', path)
    order, begin = archive.read(name)
    if order not in (b"little", b"big"):
        raise FormatError(f'byteorder is {show(order)}, expected "little" or "big"', path, begin)
    return order == b"big"
