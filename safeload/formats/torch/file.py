"""The format of torch.save since torch 1.6: a zip archive of one pickle and its storages.

1. ``<prefix>/data.pkl`` is the pickle, ``<prefix>/data/<key>`` the storage of each key, as in memory.
   ``<prefix>/byteorder`` is "little" or "big", and little if it is missing. The prefix is free text.
2. Archives of torch.package have another layout: see `Package`.
3. Local headers hold no sizes, because a data descriptor follows the data: sizes come from the central directory. The
   data begins at the local header + 30 + the length of the *local* name + the length of the *local* extra field, whose
   padding aligns the data.
4. torch never compresses storages. If another program did, the archive is unpacked into a temporary file.

torch.package writes a zip archive of code, data and pickles that share storages:

1. ``<top>/.data/version`` and ``<top>/.data/extern_modules`` are in every package.
2. ``save_pickle("package", "resource", value)`` makes ``<top>/package/resource``, with any suffix. Saved text, saved
   bytes and code are beside it. Pickles are recognised by their first bytes.
3. Storages are ``<top>/.data/<key>.storage``. In the pickles of scripts, the key includes that suffix.
4. An object that saves itself (``__reduce_package__``) is a persistent id ("reduce_package", number, function,
   arguments), before torch 1.11 without the number. The id of a script names its pickle,
   ``<top>/.data/ts_code/<id>/data.pkl``, and the tensors of that pickle take its place.

Tensor names begin with "package/resource" if there are several pickles.

Before torch 1.6, and still as an option, torch.save wrote no zip archive:

1. Five consecutive pickles: a magic number, the protocol 1001, facts about the machine, the object, and the list of
   storage keys.
2. For each key of that list: the number of elements (int64), then their bytes, little-endian on every machine
   (torch/csrc/utils/storage.cpp). Nothing is aligned.
3. The persistent id of a storage has six fields. The sixth describes a part of another storage, or is None.

Strings can come from Python 2. Bytes after the last storage are ignored, as in torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from ...core.foreign import is_binary_pickle, is_torch_legacy
from ...core.registry import Candidate, Content, OpenRequest, check_whole
from ...core.text import error_about, show
from ...core.weight_file import WeightFile
from ...core.zip import DEFLATED, MAX_INFLATED, STORED, Archive, unpacked
from ...errors import ForbiddenError, FormatError, LimitError, TensorNotFoundError, UnsupportedError
from .. import unpickle as unpickler
from ..unpickle import Fault, Foreign, Global, Inert, TruncatedError, Unpickled, check_foreign, describe, unpickle
from .globals import ALLOWED, Storage, read_persistent_id
from .tensors import SCRIPT, TensorPlaces, content_of, make_tables

# A class of TorchScript in its source, with the names of its parameters and buffers, and a name without escapes.
_CLASS = re.compile(rb"^class (\w+)\(Module\):\n  __parameters__ = \[(.*)\]\n  __buffers__ = \[(.*)\]$", re.MULTILINE)
_NAMES = re.compile(rb'(?:"[^"\\]*", )*')
# Bytes of all sources.
_MAX_SOURCES = 16 << 20


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of a file."""
    file = candidate.file
    if is_torch_legacy(candidate.head):
        return content_of(file, request, partial(_read_legacy, file))
    archive = candidate.archive
    # Another program may have compressed storages of a checkpoint; torch compresses only code.
    packed = [name for name, entry in archive.entries.items() if entry.method == DEFLATED and "data/" in name]
    prefix = f"{_find_pickle(archive, file.path)[1]}data/" if packed and top_of(archive) is None else None
    if prefix is None or not any(name.startswith(prefix) and not name.endswith("/") for name in packed):
        return content_of(file, request, lambda request: read_tables(archive, file, request))
    check_whole(file, "a compressed torch checkpoint must be unpacked as a whole")
    names = [name for name in archive.entries if name.startswith(prefix) and not name.endswith("/")]
    with unpacked(archive, names, file, "safeload-torch-") as (copy, begins):
        places = dict(zip(names, begins, strict=True))
        content = content_of(copy, request, lambda request: read_tables(archive, copy, request, places))
    for beside in content.others:
        beside.stand_for(file)
    return content


def read_tables(
    archive: Archive, file: WeightFile, request: OpenRequest, places: Mapping[str, int] | None = None
) -> Content:
    """Run the pickles of an archive; ``places`` are the first bytes of its storages if ``file`` holds these alone."""
    top = top_of(archive)
    if top is None:
        pickled, prefix = run_pickle(archive, file, inert=request.inert)
    else:
        pickled, root = Package(archive, file, top).read(request.root, request.inert)
        request, prefix = request._replace(root=root), top
    archive.prefetch(archive.entries)
    big_endian = _is_big_endian(archive, prefix, file.path)
    locate = _locator(archive, file.path, prefix, places, package=top is not None)
    if places is not None:
        pickled = pickled._replace(base=None)
    content = make_tables(pickled, request, file, locate, big_endian=big_endian)
    archive.check_overlap()
    return content


def read_tensors(archive: Archive, file: WeightFile) -> tuple[Unpickled, TensorPlaces]:
    """Run the pickle of an archive, with placeholders; return it, and the places of its tensors."""
    pickled, prefix = run_pickle(archive, file, inert=True)
    if _is_big_endian(archive, prefix, file.path):
        raise error_about(UnsupportedError, "the tensors are big-endian", path=file.path)
    return pickled, TensorPlaces(file.path, _locator(archive, file.path, prefix))


def run_pickle(archive: Archive, file: WeightFile, *, inert: bool) -> tuple[Unpickled, str]:
    """Return the object of an archive's pickle, and the prefix of its entries."""
    name, prefix = _find_pickle(archive, file.path)
    if archive.entries[name].size > unpickler.MAX_PICKLE:
        text = f"the pickle {show(name)} has more than {unpickler.MAX_PICKLE} bytes"
        raise error_about(LimitError, text, path=file.path)
    data, base = archive.read(name)
    persistent = partial(read_persistent_id, storages={})
    try:
        pickled = unpickle(data, ALLOWED, persistent, path=file.path, base=base, inert=inert)
        if any(name.startswith(SCRIPT) for name in pickled.foreign):
            pickled = pickled._replace(members=_members_of(archive, f"{prefix}code/"))
        return pickled, prefix
    except ForbiddenError as error:
        if not any(name.startswith(f"{prefix}code/") or name == f"{prefix}constants.pkl" for name in archive.entries):
            raise
        text = f"this is a TorchScript archive: {str(error).removeprefix(file.path + ': ')}"
        raise error_about(UnsupportedError, text, path=file.path) from None


def _members_of(archive: Archive, folder: str) -> dict[str, frozenset[str]]:
    """Return the parameters and buffers of each class of TorchScript, as far as its source can be read."""
    sources = [name for name in archive.entries if name.startswith(folder) and name.endswith(".py")]
    members: dict[str, frozenset[str]] = {}
    if sum(archive.entries[name].size for name in sources) > _MAX_SOURCES:
        return members
    archive.prefetch(sources)
    for name in sources:
        with suppress(FormatError, UnsupportedError, LimitError):
            module = name.removeprefix(folder).removesuffix(".py").replace("/", ".")
            for cls, *lists in _CLASS.findall(archive.read(name)[0]):
                if all(map(_NAMES.fullmatch, lists)):
                    names = b"".join(lists).decode("utf-8", "replace").split('"')[1::2]
                    members[f"{module}.{cls.decode()}"] = frozenset(names)
    return members


def _find_pickle(archive: Archive, path: str) -> tuple[str, str]:
    """Return the pickle, ``data.pkl`` at depth one or else the only ``.pkl`` entry, and the prefix of its folder."""
    names = archive.entries
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    pickles = pickles or [name for name in names if name.endswith(".pkl")]
    if len(pickles) == 1:
        folder, slash, _ = pickles[0].rpartition("/")
        return pickles[0], folder + slash
    shown = ", ".join(show(name) for name in (pickles or list(names))[:10])
    if pickles:
        raise FormatError(f"the zip archive has {len(pickles)} pickles that could be the checkpoint: {shown}", path)
    text = f"this is a zip archive without a pickle, so not a torch checkpoint; it holds {shown}"
    raise error_about(UnsupportedError, f"{text}; if these are weight files, unpack the archive", path=path)


def _locator(
    archive: Archive, path: str, prefix: str, places: Mapping[str, int] | None = None, *, package: bool = False
) -> Callable[[Storage], int]:
    """Return a function that finds the first byte of a storage in its entry."""

    @cache
    def locate(storage: Storage) -> int:
        name = f"{prefix}.data/{storage.key}.storage" if package else f"{prefix}data/{storage.key}"
        if package and name not in archive.entries and storage.key.endswith(".storage"):  # in a script
            name = name.removesuffix(".storage")
        info = archive.entries.get(name)
        if info is None or (places is not None and name not in places):
            raise FormatError(f"the archive has no entry for storage {show(storage.key)}", path)
        begin = archive.locate(name) if places is None else places[name]
        if places is None and (info.method != STORED or info.packed != info.size):
            archive.check_stored(name)
        if info.size != storage.nbytes:
            text = f"storage {show(storage.key)} has {info.size} bytes, but {storage.count} elements of "
            at = begin if places is None else None
            raise FormatError(f"{text}{storage.type.name} have {storage.nbytes}", path, at)
        return begin

    return locate


def _is_big_endian(archive: Archive, prefix: str, path: str) -> bool:
    name = f"{prefix}byteorder"
    if name not in archive.entries:
        return False
    if (size := archive.entries[name].size) > len("little"):
        raise FormatError(f'byteorder has {size} bytes, expected "little" or "big"', path)
    order, begin = archive.read(name)
    if order not in (b"little", b"big"):
        raise FormatError(f'byteorder is {show(order)}, expected "little" or "big"', path, begin)
    return order == b"big"


KIND = "a torch.package archive"

# The function that replaces the persistent id of a script.
_SCRIPT = "torch.jit._script.unpackage_script_module"
# Usual suffix of names for `save_pickle`. Entries without it can be anything that begins like a pickle.
SUFFIX = ".pkl"

_HOW = 'in a persistent id of "reduce_package"'


def top_of(zipped: Archive) -> str | None:
    """Return the top folder of a package, "" or with a trailing slash; None for other archives."""
    end = ".data/extern_modules"
    tops = (name.removesuffix(end) for name in zipped.entries if name.endswith(end) and name.count("/") <= 2)
    return next((top for top in tops if f"{top}.data/version" in zipped.entries and top[-1:] in ("", "/")), None)


class Package:
    """The pickles of a package; see `top_of` for ``top``."""

    def __init__(self, zipped: Archive, file: WeightFile, top: str) -> None:
        self._archive = zipped
        self._file = file
        self._top = top
        self._path = file.path
        self._storages: dict[str, dict[str, Storage]] = {}  # by type: tensors can view a storage as several types
        self._scripts: dict[str, list[Inert]] = {}
        self._objects: dict[str, Inert] = {}  # by number: objects that saved themselves
        self._read = [0, 0]  # bytes of compressed and of stored pickles

    def read(self, root: str | None, inert: bool) -> tuple[Unpickled, str | None]:
        """Return the objects of the pickles, by name if several, and ``root`` without the name of a pickle."""
        names = self._find()
        if not names:
            raise error_about(UnsupportedError, f"this is {KIND} without a pickle", path=self._path)
        if chosen := [name for name in names if root is not None and (root == name or root.startswith(f"{name}."))]:
            names = chosen[:1]
            root = None if root == names[0] else (root or "")[len(names[0]) + 1 :]
        elif root is not None and len(names) > 1:
            shown = ", ".join(show(name)[1:-1] for name in names[:20]) + ", ..." * (len(names) > 20)
            text = f"no container {show(root)}; the pickles are {shown}"
            raise error_about(TensorNotFoundError, text, path=self._path)
        run = ((name, self._unpickle(name, self._persistent)) for name in names)
        pickles = {name: pickled for name, pickled in run if pickled is not None}
        if not pickles:
            raise error_about(UnsupportedError, f"this is {KIND} without a readable pickle", path=self._path)
        parts = [*pickles.values(), *self._read_scripts()]
        foreign = sorted({name for part in parts for name in part.foreign})
        check_foreign(foreign, self._path, inert, f"this is {KIND}; its pickles reference")
        harmless = sorted({name for part in parts for name in part.harmless})
        value = {name: pickled.value for name, pickled in pickles.items()}
        if len(pickles) == 1:
            (value,) = value.values()
        return Unpickled(value, sum(part.size for part in parts), harmless, foreign), root

    def _find(self) -> list[str]:
        """Return the names of the pickles; of scripts only if no other pickle could refer to them."""
        data = f"{self._top}.data/"
        names = [
            name.removeprefix(self._top)
            for name in self._archive.entries
            if name.startswith(self._top) and not name.startswith(data) and self._is_pickle(name)
        ]
        self._archive.check_overlap()  # before any is read, because entries could share bytes
        scripts = f"{data}ts_code/"
        return names or [
            name.removeprefix(self._top)
            for name in self._archive.entries
            if name.startswith(scripts) and name.endswith("/data.pkl") and name.count("/", len(scripts)) == 1
        ]

    def _is_pickle(self, name: str) -> bool:
        info = self._archive.entries[name]
        if info.size < 3 or name.endswith((".py", "/")):
            return False
        if info.method == STORED:
            head = self._file.read_at(self._archive.locate(name), 2)
        elif info.method == DEFLATED:
            head = next(self._archive.inflate(name), b"")
        else:
            return name.endswith(SUFFIX)
        return is_binary_pickle(head)

    def _unpickle(self, name: str, persistent: Callable[[Any], Any]) -> Unpickled | None:
        """Run a pickle; return None if the bytes only begin like a pickle."""
        whole = self._top + name
        info = self._archive.entries[whole]
        self._read[info.method == STORED] += info.size
        for size, limit in zip(self._read, (MAX_INFLATED, unpickler.MAX_PICKLE), strict=True):
            if size > limit:
                text = f"the pickles of the package have more than {limit} bytes"
                raise error_about(LimitError, text, path=self._path)
        data, base = self._archive.read(whole)
        try:
            pickled = unpickle(data, ALLOWED, persistent, path=self._path, base=base, inert=True)
        except FormatError:
            if name.endswith(SUFFIX):
                raise
            return None
        return pickled._replace(data=b"", places={})  # otherwise the bytes of all pickles would stay in memory

    def _persistent(self, value: Any) -> Any:
        if type(value) is not tuple or not value or value[0] != "reduce_package":
            return self._storage(value)
        if len(value) not in (3, 4) or type(value[-1]) is not tuple or type(value[-2]) not in (Foreign, Inert):
            raise Fault(f"expected a number, a function and its arguments {_HOW}")
        number, function, args = (None, *value[1:])[-3:]
        if number is not None and type(number) is not int:
            raise Fault(f"the number must be an integer, got {describe(number)}, {_HOW}")
        value = self._objects.get(str(number)) if number is not None else None
        if value is None:
            value = Inert(function.name, args)
            if number is not None:
                self._objects[str(number)] = value
            if function.name == _SCRIPT and len(args) == 1 and type(args[0]) is str:
                self._scripts.setdefault(args[0], []).append(value)
        return value

    def _storage(self, value: Any) -> Any:
        kind = value[1] if type(value) is tuple and len(value) > 1 else None
        name = kind.name if isinstance(kind, (Global, Foreign, Inert)) else ""
        return read_persistent_id(value, self._storages.setdefault(name, {}))

    def _read_scripts(self) -> Iterator[Unpickled]:
        """Run the pickles of the named scripts and put each in place of its persistent id."""
        for key, placeholders in self._scripts.items():
            name = f".data/ts_code/{key}/data.pkl"
            if self._top + name not in self._archive.entries:
                raise FormatError(f"the package has no entry for script {show(key)}", self._path)
            script = self._unpickle(name, self._storage)
            assert script is not None  # the name has `SUFFIX`
            value = script.value
            for placeholder in placeholders:
                if type(value) is Inert:
                    placeholder.name, placeholder.args = value.name, value.args
                    placeholder.items, placeholder.state = value.items, value.state
                else:
                    placeholder.state = value
            yield script


# ---- files from before torch 1.6 ----

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001

# Bytes to read first for a pickle; each further attempt reads eight times as many.
_WINDOW = 1 << 16
# Bytes to read first of a local file that should be a single pickle.
_WHOLE = 64 << 20


def pickle_at(
    file: WeightFile,
    offset: int,
    storages: dict[str, Storage] | None,
    inert: bool,
    table: Mapping[str, Global] = ALLOWED,
    *,
    whole: bool = False,  # True if the pickle should reach to the end of the file
) -> Unpickled:
    """Run the pickle at an offset of the file; `Unpickled.size` tells where it ends."""
    persistent = partial(read_persistent_id, storages=storages)
    size = max(_WINDOW, min(file.size - offset, _WHOLE)) if whole and not file.remote else _WINDOW
    while True:
        data = file.read_at(offset, size)
        complete = offset + size >= file.size
        try:
            return unpickle(data, table, persistent, path=file.path, base=offset, inert=inert, complete=complete)
        except TruncatedError:
            if complete:
                raise
        if size >= unpickler.MAX_PICKLE:
            text = f"the pickle at byte {offset} has more than {unpickler.MAX_PICKLE} bytes"
            raise error_about(LimitError, text, path=file.path)
        size *= 8


def _read_legacy(file: WeightFile, request: OpenRequest) -> Content:
    pickled, begins = _parse(file, request.inert)

    def locate(storage: Storage) -> int:
        if storage.key not in begins:
            raise FormatError(f"storage {show(storage.key)} is not in the file's list of storages", file.path)
        return begins[storage.key]

    return make_tables(pickled, request, file, locate)


def storage_in(content: bytes, path: str) -> Storage:
    """Return the storage behind a file in memory."""
    file: Any = SimpleNamespace(path=path, size=len(content), read_at=lambda at, size: content[at : at + size])
    pickled, begins = _parse(file, inert=False)
    storage = pickled.value
    if type(storage) is not Storage or storage.part is not None or storage.key not in begins:
        raise UnsupportedError(f"a torch file in the pickle holds {describe(storage)}, expected a storage", path=path)
    begin = begins[storage.key]
    storage.raw = content[begin : begin + storage.nbytes]
    return storage


def _parse(file: WeightFile, inert: bool) -> tuple[Unpickled, dict[str, int]]:
    """Return the object of a file, and the first byte of each storage by key."""
    magic = pickle_at(file, 0, None, inert)
    if magic.value != MAGIC or type(magic.value) is not int:
        raise FormatError(f"the file begins with {describe(magic.value)}, not with torch's magic number", file.path, 0)
    at = magic.size
    protocol = pickle_at(file, at, None, inert=False)
    if protocol.value != PROTOCOL:
        raise FormatError(f"protocol is {describe(protocol.value)}, but only {PROTOCOL} is supported", file.path, at)
    at += protocol.size
    at += pickle_at(file, at, None, inert=False).size  # facts about the machine, unused
    storages: dict[str, Storage] = {}
    pickled = pickle_at(file, at, storages, inert)
    at += pickled.size
    keys = pickle_at(file, at, None, inert=False)
    if type(keys.value) is not list:
        raise FormatError(f"the storage keys must be a list, got {describe(keys.value)}", file.path, at)
    return pickled, _walk(file, at + keys.size, keys.value, storages)


def _walk(file: WeightFile, at: int, keys: list[Any], storages: dict[str, Storage]) -> dict[str, int]:
    """Check the storages in file order; return the offset of the first byte of each by key."""
    begins: dict[str, int] = {}
    for key in keys:
        storage = storages.get(key) if type(key) is str else None
        if storage is None or key in begins:
            fault = "is a duplicate" if type(key) is str and key in begins else "is not used in the pickle"
            raise FormatError(f"key {describe(key)} in the list of storages {fault}", file.path, at)
        head = file.read_at(at, 8)
        count = int.from_bytes(head, "little", signed=True)
        if len(head) < 8 or count * storage.type.itemsize > file.size - at - 8:
            message = f"storage {show(key)}: {count if len(head) == 8 else 'an unknown number of'} elements of "
            message += f"{storage.type.itemsize} bytes extend past the end of the file, which has {file.size} bytes"
            raise FormatError(message, file.path, at)
        if count != storage.count:
            message = f"storage {show(key)} has {count} elements, but the pickle says {storage.count}"
            raise FormatError(message, file.path, at)
        begins[key] = at + 8
        at += 8 + count * storage.type.itemsize
    return begins
