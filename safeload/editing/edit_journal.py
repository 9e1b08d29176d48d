"""The journal beside a file during an edit of its header in place, and its lock."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

from ..core.files import BLOCK, identity_of, lock, sync_folder
from ..errors import FormatError, SafeloadError

# The journal of NAME is ".NAME.safeload-edit".
_SUFFIX = ".safeload-edit"
_MAGIC = b"safeload edit 1\n"
# Largest header of a file that can be edited, without the bytes in front.
_MAX_HEADER = 128 << 20
# Seconds between the attempts of a reader while an editor may just be writing, and number of attempts.
_PAUSE, _ATTEMPTS = 0.05, 10
# First bytes of a file while its header is incomplete: no format begins like this.
BROKEN = b"\xff" * 8


def journal_of(path: str) -> str:
    """Return the path of a file's journal."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}{_SUFFIX}")


def editor_pauses(path: str) -> Iterator[None]:
    """Wait before each attempt to read a file with a broken header again: an editor may just be writing it."""
    for _ in range(_ATTEMPTS):
        if interrupted(path) is None:
            return
        time.sleep(_PAUSE)
        yield


def interrupted(path: str) -> FormatError | None:
    """Return the error for a file with a broken header and a journal, or None without a journal."""
    with suppress(OSError, ValueError):
        if os.path.lexists(journal_of(os.path.realpath(path))):
            return FormatError(f"an edit of its header was interrupted; run: safeload edit --recover {path}", path, 0)
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(file: Locked, old: bytes, new: bytes, *, durable: bool) -> None:
    """Write the journal of a file, with its old header."""
    identity, place = file.identity, journal_of(file.path)
    fields = {
        "device": identity.device, "inode": identity.inode, "size": identity.size, "header": len(old),
        "digest": _digest(old), "new_digest": _digest(new),
    }  # fmt: skip
    journal = open(place, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115  closed below
    try:
        with journal:
            journal.write(_MAGIC + json.dumps(fields).encode() + b"\n" + old)
            journal.flush()
            owner, descriptor = os.stat(file.path), journal.fileno()
            if hasattr(os, "fchown") and owner.st_uid != os.fstat(descriptor).st_uid:
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            if durable:
                os.fsync(descriptor)
        if durable:
            sync_folder(os.path.dirname(place))
    except BaseException:
        with suppress(OSError):
            os.unlink(place)
        raise


def _read(path: str) -> tuple[bytes, str] | None:
    """Return the old header and the digest of the new one; None if the journal, or its file's edit, never began."""
    place, file = journal_of(path), os.stat(path)
    status = os.lstat(place)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise FormatError("the journal of an edit must be a regular file", place)
    if hasattr(os, "getuid") and status.st_uid != file.st_uid:
        raise FormatError("the journal of an edit belongs to another owner than its file", place)
    if status.st_size > _MAX_HEADER + (1 << 16):
        raise FormatError(f"a journal has at most {_MAX_HEADER} bytes, got {status.st_size}", place)
    with open(place, "rb") as stream:
        data = stream.read()
    line, _, header = data.removeprefix(_MAGIC).partition(b"\n")
    try:
        fields = json.loads(line) if data.startswith(_MAGIC) else {}
        whole = len(header) == fields["header"] and _digest(header) == fields["digest"]
        edited, new = [fields["device"], fields["inode"], fields["size"]], fields["new_digest"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if whole and edited != [file.st_dev, file.st_ino, file.st_size]:
        raise FormatError("the journal of an edit names another device, inode or size than its file has", place)
    return (header, new) if whole else None


def remove(path: str) -> None:
    """Remove the journal of a file."""
    with suppress(FileNotFoundError):
        os.unlink(journal_of(path))


# ---- the lock ----


class Locked(io.FileIO):
    """A file opened for an edit, which no other edit can open."""

    def __init__(self, path: str) -> None:
        self.path = path
        while True:
            super().__init__(path, "r+")
            try:
                if not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                    raise SafeloadError(f"{path}: only regular files can be edited")
                if lock(self.fileno()) is False:
                    raise BlockingIOError(errno.EWOULDBLOCK, "another edit of this file is in progress", path)
                self.identity = identity_of(os.fstat(self.fileno()))
                if identity_of(os.stat(path))[2:] == self.identity[2:]:
                    return
            except BaseException:
                self.close()
                raise
            self.close()  # another edit has replaced the file meanwhile

    def __del__(self) -> None:
        self.close()  # before Python warns

    def check_unchanged(self) -> None:
        """Raise SafeloadError if another program has changed or replaced the file."""
        if identity_of(os.stat(self.path)) != self.identity:
            raise SafeloadError(f"{self.path} was changed by another program during the edit")

    def finish_reading(self) -> None:
        """Check that the file is unchanged before it is replaced; Windows does not replace open files."""
        self.check_unchanged()
        if os.name == "nt":
            self.close()

    def head(self, size: int) -> bytes:
        content = b""
        self.seek(0)
        while len(content) < size:
            chunk = self.read(size - len(content))
            if not chunk:
                raise FormatError(f"the file ends at byte {len(content)}", self.path, len(content))
            content += chunk
        return content

    def overwrite_header(self, old: bytes, new: bytes, *, durable: bool) -> None:
        """Overwrite the header so that it is invalid until it is complete."""
        begin = next((k for k in range(len(BROKEN), len(new)) if old[k] != new[k]), len(new)) if old else len(BROKEN)
        end = len(new)
        while old and end > begin and old[end - 1] == new[end - 1]:
            end -= 1
        steps = ((0, BROKEN), (begin, new[begin:end]), (0, new[: len(BROKEN)]))
        for k, (at, data) in enumerate(steps):
            view = memoryview(data)
            self.seek(at)
            while view:
                view = view[self.write(view) :]
            # A disk writes a block as a whole, so all steps in the first block need no order.
            if durable and (end > BLOCK or k == len(steps) - 1):
                getattr(os, "fdatasync", os.fsync)(self.fileno())


# ---- editing and recovering ----


def replace_header(file: Locked, old: bytes, new: bytes, *, durable: bool) -> None:
    """Replace the header by another of its size; after an error the old header stays unless the message says no."""
    write(file, old, new, durable=durable)
    try:
        file.overwrite_header(old, new, durable=durable)
    except BaseException as error:
        try:
            file.overwrite_header(b"", old, durable=durable)
        except OSError:
            message = f"the header is incomplete; run: safeload edit --recover {file.path}"
            if isinstance(error, OSError):
                raise OSError(error.errno, message, file.path) from None
            raise
        remove(file.path)
        raise
    remove(file.path)


def recover(file: Locked) -> str:
    """Complete an interrupted edit, and return what was done: "nothing", "old" or "new"."""
    try:
        journal = _read(file.path)
    except FileNotFoundError:
        return "nothing"
    old, new_digest = journal or (b"", "")
    present = file.head(len(old))
    is_new = _digest(present) == new_digest
    if not is_new and present != old:
        # The first bytes of an interrupted edit, in which a write may have been cut.
        size, begin = len(BROKEN), present[: len(BROKEN)]
        cuts = range(1, size + 1)
        if not any(begin in (BROKEN[:k] + old[k:size], old[: size - k] + BROKEN[size - k :]) for k in cuts):
            text = "another program has changed the file since its edit was interrupted: remove"
            raise FormatError(f"{text} {journal_of(file.path)}", file.path)
        file.overwrite_header(b"", old, durable=True)
    remove(file.path)
    return "new" if is_new else "old"
