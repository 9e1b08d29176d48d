r"""Archives with weights: find the members, which are then read in place.

Tar archives, such as NeMo's ``.nemo``:

1. A member is a header of 512 bytes, then its bytes, filled up with zeros to a multiple of 512. Two blocks of zeros end
   the archive; only zeros follow, at most `MAX_END` bytes.
2. The header: name at 0 (100 bytes), size at 124 (12), checksum at 148 (8), kind at 156, name of a link at 157 (100),
   "ustar" at 257, a prefix of the name at 345 (155; only if "ustar" ends with NUL). Numbers are octal text. GNU's tar
   stores large sizes in base 256: 0x80, then a big-endian number.
3. The checksum is the sum of the header's bytes, with spaces in place of the checksum.
4. Kinds: "0", NUL and "7" are files, "5" folders. "x" describes the next member and "g" all following ones in records
   ``LENGTH KEY=VALUE\n`` (pax), of which ``path`` and ``size`` replace fields. "L" holds the name of the next member
   and "K" the name of its link (GNU).
5. Refused by name: links, devices, sparse members ("S", or keys ``GNU.sparse.*``), volumes of an archive ("M"), folders
   with a size, names that are absolute or lead out of the archive, two members of the same name. Readers disagree about
   them, or follow them.
6. Compressed archives are refused: no member could be read without unpacking all bytes before it.

llamafile, a program with a zip archive at its end, which holds a GGUF file:

1. The file begins like a program: "MZ" (Actually Portable Executable, Windows), ELF or Mach-O. It ends like a zip
   archive, whose offsets count from the beginning of the file (zip.py).
2. The GGUF is an entry, stored and aligned, so that programs map it. Compressed entries are parts of the program.
3. ``.args`` holds the program's default arguments, which may name another model; it is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from ..core.files import WINDOW, ByteStore, Files
from ..core.foreign import is_tar
from ..core.registry import Candidate, Opened, OpenRequest, joined_places, open_file
from ..core.table import ListedTable, Listing
from ..core.text import error_about, printable, show
from ..core.weight_file import WeightFile
from ..core.zip import STORED, Archive
from ..errors import FormatError, LimitError, SafeloadError, UnsupportedError, missing_file
from ..remote.remote_store import MemberStore, RemoteStore
from .folder import is_weight_file, listed, open_folder, open_parts
from .numbered import sets_of

# Members of an archive. Each costs a read; checkpoints have some hundred.
MAX_MEMBERS = 100_000
# Bytes of a pax record list or of a long name.
MAX_EXTENDED = 1 << 20
# Bytes after the last member: tar fills its last block, of 10 KiB or a few times as much.
MAX_END = 1 << 20
# Longest name of a member in characters, and most folders in a name.
MAX_NAME = 4096
MAX_DEPTH = 32

_BLOCK = 512
_FILES, _FOLDER = (b"0", b"\0", b"7"), b"5"
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"M": "the rest of a file that begins in another volume",
    b"D": "a folder of an incremental backup",
    b"V": "the label of a volume",
}
_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=", re.DOTALL)
# Keys of pax that change which bytes a member has, or how its name is encoded.
_SIZE, _PATH = b"size", b"path"
_SPARSE, _CHARSET = b"GNU.sparse.", b"hdrcharset"
# The suffix of models in a llamafile.
_SUFFIX = ".gguf"


def enter(candidate: Candidate, request: OpenRequest) -> Opened:
    """Open the weights in a tar archive, or the GGUF in a program; see `open_members`."""
    members, kind = (_tar_members, "a tar archive") if is_tar(candidate.head) else (_models, "a llamafile")
    return open_members(candidate.file, dict(members(candidate.file)), request, kind=kind)


# ---- tar ----


def _tar_members(file: WeightFile) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name, first byte and size of the files of an archive."""
    fault = partial(FormatError, path=file.path)
    seen: dict[str, bool] = {}  # names, and if they are folders
    for at, full, kind, size in _headers(file):
        is_folder = kind == _FOLDER
        name = full.removeprefix("./").rstrip("/" if is_folder else "")
        if is_folder and name == ".":
            name = ""
        reason = _name_fault(name) if name or not is_folder else None  # "" is the top folder
        if reason is not None:
            raise fault(f"the name of the tar member {show(full)} {reason}", offset=at)
        if kind not in (*_FILES, _FOLDER):
            text = f"tar member {show(full)} is of the unknown kind {show(kind.decode('latin-1'))}"
            if kind in _REFUSED:
                text = f"tar member {show(full)} is {_REFUSED[kind]}, which safeload does not follow"
            raise error_about(UnsupportedError, text, path=file.path)
        if is_folder and size:
            text = f"the tar member {show(full)} is a folder of {size:,} bytes: readers disagree about these"
            raise fault(text, offset=at)
        if name in seen and not (is_folder and seen[name]):
            raise fault(f"two tar members are named {show(name)}", offset=at)
        seen[name] = is_folder
        if not is_folder:
            yield name, (at + _BLOCK, size)
    for name in seen:
        folder = name.rpartition("/")[0]
        while folder:
            if seen.get(folder) is False:
                raise fault(f"the tar member {show(folder)} is a file, but {show(name)} lies in it")
            folder = folder.rpartition("/")[0]


def _headers(file: WeightFile) -> Iterator[tuple[int, str, bytes, int]]:
    """Yield offset, name, kind and size of each member, with the names and sizes that pax and GNU give."""
    fault, at = partial(FormatError, path=file.path), 0
    pax: dict[bytes, bytes] = {}
    long_name: bytes | None = None
    for count in range(MAX_MEMBERS + 1):
        block = file.read_at(at, _BLOCK)
        if len(block) < _BLOCK:
            raise fault("the tar archive is cut off: blocks of zeros must end it", offset=file.size)
        if not block.strip(b"\0"):
            if pax or long_name is not None:
                raise fault("the tar archive ends after the description of a member", offset=at)
            left = file.size - at  # such as another archive, which only some readers see
            if left > MAX_END:
                raise fault(f"{left:,} bytes follow the end of the tar archive, the limit is {MAX_END:,}", offset=at)
            if left < 2 * _BLOCK:
                raise fault("the tar archive is cut off: two blocks of zeros must end it", offset=file.size)
            if file.read_at(at, left).strip(b"\0"):
                raise fault("bytes other than zeros follow the end of the tar archive", offset=at)
            return
        if count == MAX_MEMBERS:
            raise error_about(LimitError, f"the tar archive has more than {MAX_MEMBERS:,} members", path=file.path)
        if block[257:262] != b"ustar":
            raise fault("a tar header has no magic number: the archive is damaged or cut off", offset=at)
        checksum, sums = _number(block[148:156], "checksum", file.path, at + 148), _sums(block)
        if checksum not in sums:
            raise fault(f"the checksum of a tar header is {checksum}, expected {sums[0]}", offset=at + 148)
        size, kind = _number(block[124:136], "size", file.path, at + 124), block[156:157]
        if kind in (b"x", b"g", b"L", b"K"):
            if size > MAX_EXTENDED:
                text = f"the description of a tar member has {size:,} bytes, the limit is {MAX_EXTENDED:,}"
                raise error_about(LimitError, text, path=file.path)
            content = file.read_at(at + _BLOCK, size)
            if len(content) < size:
                raise fault("the tar archive is cut off within the description of a member", offset=file.size)
            if kind == b"x":
                pax = records(content, file.path, at)
            elif kind == b"g":
                described = records(content, file.path, at)
                for key in (_PATH, _SIZE):
                    if key in described:
                        raise fault(f"a global tar header sets the {key.decode()} of all members", offset=at)
            elif kind == b"L":
                long_name = content.partition(b"\0")[0]
        else:
            if _SIZE in pax:
                if not re.fullmatch(rb"[0-9]{1,18}", pax[_SIZE]):
                    raise fault(f"the size of a tar member must be a number, got {show(pax[_SIZE])}", offset=at)
                size = int(pax[_SIZE])
            yield at, _name(block, pax, long_name, file.path, at), kind, size
            pax, long_name = {}, None
        if at + _BLOCK + size > file.size:
            raise fault(f"a tar member of {size:,} bytes reaches beyond the end of the file", offset=at)
        at += _BLOCK + size + -size % _BLOCK


def number(field: bytes) -> int | None:
    """Return the number in a field of a header, or None."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.strip(b" \0")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _sums(block: bytes) -> tuple[int, int]:
    """Return the checksum of a header, and the checksum with signed bytes, as some old programs compute it."""
    summed = block[:148] + b" " * 8 + block[156:]
    return sum(summed), sum(summed) - 256 * sum(byte > 127 for byte in summed)


def is_header(block: bytes) -> bool:
    """Return True if a content begins with the checksum of a header."""
    checksum = number(block[148:156])
    return len(block) >= _BLOCK and bool(checksum) and checksum in _sums(block)


def _number(field: bytes, label: str, path: str, at: int) -> int:
    value = number(field)
    if value is None:
        shown = "a negative number" if field[0] == 0xFF else show(field)
        raise FormatError(f"the {label} in a tar header must be an octal number, got {shown}", path, at)
    return value


def _name(block: bytes, pax: Mapping[bytes, bytes], long_name: bytes | None, path: str, at: int) -> str:
    if _PATH in pax and long_name is not None:
        raise FormatError("a tar member has a name of pax and a name of GNU tar: readers disagree", path, at)
    name = pax.get(_PATH, long_name)
    if name is None:
        name = block[:100].partition(b"\0")[0]
        prefix = block[345:500].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and prefix:
            name = prefix + b"/" + name
    elif b"\0" in name:
        raise FormatError("the name of a tar member contains NUL", path, at)
    return name.decode("utf-8", "surrogateescape")


def records(content: bytes, path: str, at: int) -> dict[bytes, bytes]:
    """Parse the records of a pax header."""
    parsed: dict[bytes, bytes] = {}
    begin = 0
    while begin < len(content):
        match = _RECORD.match(content, begin)
        end = begin + int(match[1]) if match is not None else 0
        if match is None or not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
            raise FormatError("the description of a tar member is malformed", path, at + _BLOCK + begin)
        key, value = match[2], content[match.end() : end - 1]
        if key.startswith(_SPARSE):
            raise error_about(UnsupportedError, f"a tar member is a sparse file ({show(key)})", path=path)
        if key == _CHARSET and value != b"ISO-IR 10646 2000 UTF-8":
            raise error_about(UnsupportedError, f"names in the tar archive are encoded as {show(value)}", path=path)
        parsed[key] = value
        begin = end
    return parsed


# ---- llamafile ----


def claims(candidate: Candidate) -> bool:
    """Return True if a program ends with an archive that holds a GGUF file."""
    with suppress(SafeloadError):
        return any(name.lower().endswith(_SUFFIX) for name in Archive(candidate.file, appended=True).entries)
    return False


def _models(file: WeightFile) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name, first byte and size of the models in a program."""
    archive = Archive(file, appended=True)
    for name, entry in archive.entries.items():
        if not name.lower().endswith(_SUFFIX):
            continue
        if (fault := _name_fault(name)) is not None:
            raise FormatError(f"the name of the zip entry {show(name)} {fault}", file.path, max(0, entry.at))
        if entry.method != STORED:
            text = f"zip entry {show(name)} is compressed: extract it with unzip, and open the result"
            raise error_about(UnsupportedError, text, path=file.path)
        archive.check_stored(name)
        yield name, (archive.locate(name), entry.size)
    archive.check_overlap()


# ---- the weights in an archive ----

# Suffixes of files that are parts or descriptions of a checkpoint.
_READ_WITH_OTHERS = (".distcp", ".json")


def _name_fault(name: str) -> str | None:
    """Return why a member must not have a name, or None if it may."""
    parts = name.split("/")
    if len(name) > MAX_NAME or len(parts) > MAX_DEPTH:
        return f"is longer than {MAX_NAME:,} characters, or more than {MAX_DEPTH} folders deep"
    if "\0" in name or "\\" in name:
        return "contains NUL or a backslash"
    if name.startswith("/") or (len(name) > 1 and name[1] == ":"):
        return "is absolute"
    if ".." in parts:
        return "leads out of the archive"
    return "is not normalized" if "" in parts or "." in parts else None


class MemberFiles(Files):
    """The members of a container by their names, which have no `_name_fault`; "" is the folder at the top."""

    remote = inside = True  # nothing here is a path of this machine

    def __init__(self, container: ByteStore, path: str, members: Mapping[str, tuple[int, int]]) -> None:
        self._container = container
        self._path = path
        self.members = members
        self.waits = isinstance(container, RemoteStore) and not container.here
        self._folders: dict[str, dict[str, bool]] = {"": {}}  # names in each folder, and if they are folders
        for name in members:
            parts, folder = name.split("/"), ""
            for k, part in enumerate(parts, 1):
                self._folders.setdefault(folder, {}).setdefault(part, k < len(parts))
                folder = self.join(folder, part)

    def __repr__(self) -> str:
        return f"<MemberFiles {self._path}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r}: members of an open container cannot be pickled")

    def is_local(self, path: str) -> bool:
        return False

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        member = self.members.get(path)
        if member is None:
            raise missing_file(self.shown(path), f"No such member: {self.shown(path)}")
        return MemberStore(self._container, member, self.shown(path))

    def is_folder(self, path: str) -> bool:
        return path in self._folders

    def listing(self, folder: str) -> list[tuple[str, bool]]:
        return sorted((name, kind) for name, kind in self._folders[folder].items() if not name.startswith("."))

    def join(self, folder: str, name: str) -> str:
        return f"{folder}/{name}" if folder else name

    def split(self, path: str) -> tuple[str, str]:
        return path.rpartition("/")[::2]

    def shown(self, path: str) -> str:
        return f"{self._path}/{path}" if path else self._path

    def public(self, path: str) -> str:
        raise UnsupportedError(f"{self.shown(path)}: a member has no path of its own")

    def public_options(self) -> dict[str, Any] | None:
        raise UnsupportedError(f"{self!r}: members have no paths of their own")


def open_members(
    container: WeightFile, members: dict[str, tuple[int, int]], request: OpenRequest, *, kind: str
) -> Opened:
    """Open the weights in a container, an archive of files; ``kind`` names it in messages, with its article.

    1. A container is not a format: the checkpoint has the format of its members. Containers in containers are refused.
    2. The weights are the only weight file of its folder, or else the folder, opened like any other. Of the folders
       with weights those nearest to the top count. If several remain, ``root=`` names one: the path of a file or folder
       in the container.
    3. Tensors that lie unpacked in members lie at a known place in the container, so the table is the container's own,
       and its arrays are views like those of any file. Members that must be joined or unpacked are files beside it.
    """
    files = MemberFiles(container.store, container.path, members)
    path, request = _choose(container, files, request._replace(files=files), kind)
    opened = open_folder(path, request) if files.is_folder(path) else open_parts(open_file(path, request), request)
    return _onto(container, opened, path)


def _choose(container: WeightFile, files: MemberFiles, request: OpenRequest, kind: str) -> tuple[str, OpenRequest]:
    """Return the path of the weights, and the request for it."""
    unsupported = partial(error_about, UnsupportedError, path=container.path)
    paths = sorted(files.members, key=lambda path: (path.count("/"), files.split(path)))  # from the top down
    paths = [path for path in paths if not files.split(path)[1].startswith(".")]
    root = None if request.root is None else request.root.removeprefix("./").rstrip("/")
    if root and root in paths:
        return root, request._replace(root=None)
    if root and files.is_folder(root):
        paths = [path for path in paths if path.startswith(f"{root}/")]
        request = request._replace(root=None)
    weights: dict[str, list[str]] = {}  # names by folder
    for folder, name in map(files.split, paths):
        if is_weight_file(name):
            weights.setdefault(folder, []).append(name)
    if not weights:
        raise unsupported(f"this is {kind} without weights: it holds {listed(paths) or 'nothing'}")
    top, *below = weights
    nearest = [top, *(folder for folder in below if top and folder.count("/") == top.count("/"))]
    if len(nearest) > 1:
        raise unsupported(f"weights in {len(nearest):,} folders: {listed(nearest)}; choose one with root=")
    names = weights[top]
    if len(names) == 1 and not names[0].endswith(_READ_WITH_OTHERS):
        return files.join(top, names[0]), request
    is_set = [len(shards.files) for shards in sets_of(names)] == [len(names)]
    if all(name.endswith(".gguf") for name in names) and not is_set:
        shown = listed([files.join(top, name) for name in names])
        raise unsupported(f"it holds {len(names):,} GGUF files: {shown}; choose one with root=")
    return top, request


def _onto(container: WeightFile, opened: Opened, path: str) -> Opened:
    """Return members' tensors as those of their container."""
    beside = [file for file in opened.files if not isinstance(file.store, MemberStore)]
    if len(beside) > 1:
        for file in beside:
            file.close()
        text = f"{len(beside):,} of its files must be unpacked: extract {printable(path) or 'them'} first"
        raise error_about(UnsupportedError, text, path=container.path)
    listings: list[Listing] = []
    for name, (file, index) in opened.places.items():
        if not isinstance(file.store, MemberStore):
            continue
        table = file.table  # the place of a member is in the container
        if index in table.scales or index in table.packed:
            raise FormatError("a member has scales before they were looked for", file.path)
        begin, end = (byte + file.store.begin for byte in table.byte_range(index))
        row, shape, strides = table.row(index), table.shape(index), table.strides.get(index)
        listings.append(Listing(name, row, shape, begin, end, strides, big_endian=index in table.big_endian))
    tables = [file.table for file in opened.files]
    named = {name: harmless for table in tables for name, harmless in table.named_globals.items()}
    container.table = ListedTable(listings, opened.metadata, named_globals=named)
    container.table.unknown = {name: unknown for table in tables for name, unknown in table.unknown.items()}
    container.table.ternary = {name: shape for table in tables for name, shape in table.ternary.items()}
    for file in beside:
        file.path = container.path
        file.stand_for(container, unpacked=file.unpacked)
    files = [container, *beside]
    where = joined_places(files, opened.places) if beside else None
    return opened._replace(title=container.path, files=files, where=where, index_file=None)
