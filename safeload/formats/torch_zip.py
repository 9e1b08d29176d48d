"""What torch.save writes since torch 1.6: a zip archive of one pickle and its storages.

1. ``<prefix>/data.pkl`` is the pickle, ``<prefix>/data/<key>`` the storage of each key, as it is in memory;
   ``<prefix>/byteorder`` says "little" or "big" and may be missing (little). The prefix is free text.
2. torch.package puts storages into ``<prefix>/.data/<key>.storage`` and names its pickle otherwise.
3. Local headers hold no sizes (a data descriptor follows the data): they are taken from the central directory. The data
   begins at the local header + 30 + the *local* name's length + the *local* extra field's length, padding in which
   aligns it.
4. Storages are never compressed by torch; what is compressed has been packed by someone else and cannot be mapped.
"""

from __future__ import annotations

from typing import Any

from ..errors import ForbiddenError, FormatError, LimitError, UnsupportedError
from ..files import WeightFile
from ..tensor import ListedTable
from . import unpickler
from .archive import Archive
from .pickle_machine import show
from .torch_globals import ALLOWED, Storage, read_persistent_id
from .torch_tensors import Options, make_table
from .unpickler import unpickle


def _find_pickle(archive: Archive, path: str) -> str:
    """The name of the pickle: ``data.pkl`` at depth one, else the archive's only one."""
    names = archive.entries
    found = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    found = found or [name for name in names if name.endswith(".pkl")]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(show(name) for name in (found or list(names))[:10])
    if found:
        raise FormatError(f"the zip archive has {len(found)} pickles that could be the checkpoint: {shown}", path)
    raise UnsupportedError(f"{path}: a zip archive without a pickle, so no torch checkpoint; it holds {shown}")


def _kind(archive: Archive, prefix: str) -> str | None:
    """What else than torch.save may have written the archive."""
    if any(name.startswith(f"{prefix}code/") or name == f"{prefix}constants.pkl" for name in archive.entries):
        return "a TorchScript archive"
    if any(name.endswith(".data/extern_modules") for name in archive.entries):
        return "a torch.package archive"
    return None


def read_table(archive: Archive, file: WeightFile, options: Options) -> ListedTable:
    """The tensors of an archive.

    Raises:
        FormatError, UnsupportedError, ForbiddenError, LimitError, TensorNotFoundError: see the modules used.
        OSError: the file cannot be read.
    """
    name = _find_pickle(archive, file.path)
    prefix = name[: name.rindex("/") + 1] if "/" in name else ""
    package = f"{name[: name.find('/') + 1]}.data/"
    storages: dict[str, Storage] = {}
    begins: dict[str, int] = {}

    def persistent(value: Any) -> Any:
        return read_persistent_id(value, storages)

    def locate(storage: Storage) -> int:
        begin = begins.get(storage.key)
        if begin is None:
            begin = begins[storage.key] = _locate_storage(archive, storage, prefix, package, file.path)
        return begin

    if archive.entries[name].file_size > unpickler.MAX_PICKLE:
        raise LimitError(f"{file.path}: the pickle {show(name)} has more than {unpickler.MAX_PICKLE} bytes")
    data, base = archive.read(name)
    kind = _kind(archive, prefix)
    try:
        found = unpickle(data, ALLOWED, persistent, path=file.path, base=base, inert=options.inert)
    except ForbiddenError as error:
        if kind is None:
            raise
        raise UnsupportedError(f"{file.path}: this is {kind}: {str(error).removeprefix(file.path + ': ')}") from None
    table = make_table(found, options, file.path, locate, big_endian=_is_big_endian(archive, prefix, file.path))
    archive.check_overlap()
    return table


def _locate_storage(archive: Archive, storage: Storage, prefix: str, package: str, path: str) -> int:
    for name in (f"{prefix}data/{storage.key}", f"{package}{storage.key}.storage"):
        if name in archive.entries:
            break
    else:
        raise FormatError(f"the archive has no entry for storage {show(storage.key)}", path)
    begin = archive.locate(name)
    archive.check_stored(name)
    size = archive.entries[name].file_size
    if size != storage.nbytes:
        raise FormatError(
            f"storage {show(storage.key)} has {size} bytes, but {storage.count} elements of {storage.type.name} have "
            f"{storage.nbytes}",
            path,
            begin,
        )
    return begin


def _is_big_endian(archive: Archive, prefix: str, path: str) -> bool:
    name = f"{prefix}byteorder"
    if name not in archive.entries:
        return False
    size = archive.entries[name].file_size
    if size > len("little"):
        raise FormatError(f'byteorder has {size} bytes, wanted is "little" or "big"', path)
    order, begin = archive.read(name)
    if order not in (b"little", b"big"):
        raise FormatError(f'byteorder is {show(order)}, wanted is "little" or "big"', path, begin)
    return order == b"big"
