"""`verify`: compare whole files with a manifest, a model signature or the digests of a cache; `sign` files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..conversion.sink import is_extra
from ..core.files import LOCAL, WINDOW, ByteStore, Files, Located, Location, blocks_of, caching
from ..core.memory import Cache, check_threads, thread_count
from ..core.opening import Verify
from ..core.progress import Meter, Progress
from ..core.registry import BY_NAME
from ..core.showing import Report, Row, table
from ..core.text import PathLike, more, os_error, plural, printable, size
from ..core.thread_group import each
from ..errors import SafeloadError, VerificationError, exported, one_line, public
from ..quant.quantization import BESIDE, find_quantization
from ..remote import ollama
from ..remote.places import places_of
from . import digests
from .verified import check_size, compare_digests, entry_of, walk

Status = Literal["ok", "changed", "missing", "not covered", "unreadable"]

# Settings beside weights that no conversion copies.
_SETTINGS = (*BESIDE, "adapter_config.json")
# Rows of a table on a terminal.
_ROWS = 100
_HEAD = ("file", "status", "size", "why")


@exported()
class FileCheck(NamedTuple):
    """A file in a `VerifyReport`.

    Attributes:
        file: path, relative to the model's folder.
        status: "ok", "changed", "missing", "not covered" or "unreadable".
        nbytes: size of the file; 0 if it is missing.
        reason: why it is not "ok".

    Example:
        >>> import safeload
        >>> from safeload.trust.verify import FileCheck
        >>> FileCheck("config.json", "ok", 512, "").status
        'ok'
    """

    file: str
    status: Status
    nbytes: int
    reason: str


@exported()
class VerifyReport(Report):
    """The result of `safeload.verify`. ``str()`` is a summary; the report is false if a file is not as expected.

    Attributes:
        path: the model.
        source: the manifest, signature or cache.
        proof: what a match proves: who signed the files, or "integrity only".
        files: `FileCheck` for each file, by name.

    Example:
        >>> import hashlib, json
        >>> from pathlib import Path
        >>> import safeload
        >>> content = Path("tiny-llama/config.json").read_bytes()
        >>> files = {"config.json": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
        >>> _ = Path("list.json").write_text(json.dumps({"safeload_manifest": 1, "files": files}))
        >>> report = safeload.verify("tiny-llama/config.json", "list.json")
        >>> report.ok, [file.status for file in report.files]
        (True, ['ok'])
    """

    _columns = FileCheck._fields
    _json = ("ok", "path", "source", "proof", "files")

    def __init__(self, path: str, source: str, proof: str, files: Sequence[FileCheck]) -> None:
        self.path, self.source, self.proof = path, source, proof
        self.files = list(files)

    @property
    def ok(self) -> bool:
        """True if every file is as expected, and there are no others."""
        return bool(self.files) and not self.faults

    @property
    def faults(self) -> list[FileCheck]:
        """The files that are not as expected."""
        return [file for file in self.files if file.status != "ok"]

    def __bool__(self) -> bool:
        return self.ok

    def _values(self) -> Iterable[FileCheck]:
        return self.files

    def _about(self) -> Sequence[str]:
        return [self.verdict]

    def _notable(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row["status"] != "ok"] or rows

    @property
    def verdict(self) -> str:
        """The result in a line."""
        faults, count = len(self.faults), plural(len(self.files), "file")
        if not self.files:
            return f"no files to verify against {printable(self.source)}"
        if faults:
            return f"{faults:,} of {count} {'does' if faults == 1 else 'do'} not match {printable(self.source)}"
        total = size(sum(file.nbytes for file in self.files))
        matches = "matches" if len(self.files) == 1 else "match"
        return f"{count} ({total}) {matches} {printable(self.source)}; {printable(self.proof)}"

    def lines(self, columns: int | None = 80) -> list[str]:
        faults = self.faults
        if not faults:
            return [self.verdict]
        rows = [
            (printable(f.file), f.status, size(f.nbytes) if f.nbytes else "", printable(f.reason))
            for f in faults[:_ROWS]
        ]
        lines = table(_HEAD, rows, right=frozenset((2,)), columns=columns)
        return [*lines, *more(len(faults), _ROWS), "", self.verdict]


@public
def verify(
    path: PathLike | Located,
    against: Verify = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Progress = None,
    cache: Cache = "keep",
) -> VerifyReport:
    """Compare the files of a model with a manifest, a model signature or the digests of a cache.

    Every file of a folder must be listed, and every listed file must exist. The manifest or signature itself, files of
    Git, and the paths that a signature ignores are left out, and nothing else. Symbolic links count as their target
    files. A file can change after this call: to load exactly the verified bytes, pass ``verify=`` to `load`.

    Args:
        path: a folder, a file, a URL or an ``ollama://`` name. For a file or an ``index.json``, all files are compared
            that opening it reads, such as shards and configurations, and the listed settings beside it.
        against: the path of a manifest written by ``safeload check --write-manifest``, or a `Signature`. None uses the
            manifest next to the files, or the digests of the Hub's cache or of ollama.
        storage_options: options of the filesystem behind a URL, see `open`.
        threads: number of threads, each of which hashes a file; None chooses it.
        progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).
        cache: "drop" leaves few pages of the files in the system's page cache, see `load`.

    Returns:
        The report. Its ``proof`` says what a match proves: a manifest or a cache proves integrity only.

    Raises:
        VerificationError: there is nothing to verify against; the signature has no key or belongs to another key; a
            manifest or signature is malformed.
        ModuleNotFoundError: a signature needs model-signing, which is not installed.
        OSError: the path, the manifest, the signature or a key cannot be read.

    Example:
        >>> import safeload
        >>> safeload.verify("tiny-llama", "tiny-llama.sha256.json").ok  # doctest: +SKIP
        True
    """
    check_threads(threads)
    (text,), files = places_of((path,), storage_options)
    if ollama.is_name(text):
        layers = sorted({layer.path for layer in ollama.find(text).layers})
        expected = digests.Expected(digests.OLLAMA)
        files, places = LOCAL, [(os.path.basename(layer), layer) for layer in layers]
    else:
        if not files.remote and not os.path.lexists(text):
            raise os_error(2, text)
        expected = digests.expected_of(text, files, True if against is None else against, storage_options)
        places = list(_places(text, expected, files))
    sizes = {place: _size(place, files) for _, place in places}
    total = sum(sizes.values())
    meter = Meter(progress, total)

    ordered = sorted(places, key=lambda item: -sizes[item[1]])
    checks = each(
        caching(cache)(partial(_checked, expected, files, meter)), ordered, max(1, thread_count(total, threads))
    )
    return VerifyReport(files.shown(text), expected.source, expected.proof, sorted(checks))


def digests_of(path: str, threads: int, document: str = "") -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of the files of a local model by name, for a manifest at ``document``."""
    nothing = digests.Expected(document, root=LOCAL.absolute(path), files={}, ignored=digests.GIT_PATHS)
    places = sorted(_places(path, nothing, LOCAL, settings=True))
    if not os.path.isdir(path):
        places = [(name, place) for name, place in places if os.path.isfile(place) and not _is_same(place, document)]
    entries = each(lambda item: entry_of(item[1]), places, max(1, threads))
    return {name: digest for (name, _), digest in zip(places, entries, strict=True)}


def _places(
    path: str, expected: digests.Expected, files: Files, *, settings: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name and path of each file of a model: all in a folder, or all that opening a file reads."""
    # Beside a file also its `settings`, or else those that are listed, and all of an index: a conversion reads them.
    read = files_read(path, files)
    if not files.is_folder(path):
        folder, base = files.split(path)
        yield base, path
        beside = {files.absolute(place): place for place in read}
        if expected.files is not None:
            near = {name.rpartition("/")[2] for name in expected.files}
            with suppress(OSError, SafeloadError):  # https has no folders
                near.update(name for name, is_folder in files.listing(folder or os.curdir) if not is_folder)
            for place in (files.join(folder, name) for name in sorted(near) if name in _SETTINGS or is_extra(name)):
                if settings or ".index." in base or expected.covers(place, files):
                    beside[files.absolute(place)] = place
        beside.pop(files.absolute(path), None)
        for place in beside.values():
            try:
                if not expected.covers(place, files):
                    files.open(place).close()
            except FileNotFoundError:
                continue
            except (OSError, SafeloadError):
                pass
            yield digests.name_below(folder, place, files) or files.shown(place), place
        return
    absolute = set(map(files.absolute, read))
    names: set[str] = set()
    inside = None if expected.files is None else expected.name_of(files.join(path, "x"), files)
    below = (inside or "").removesuffix("x")
    for name, place in walk(path, files):
        if _left_out(below + name, place, expected, files, files.absolute(place) in absolute):
            continue
        names.add(below + name)
        yield name, place
    for name in sorted(set(expected.files or ()) - names):
        if name.startswith(below):
            inner = name[len(below) :]
            yield inner, reduce(files.join, inner.split("/"), path)


class _Noted:
    """Files that record each path they open."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.paths: list[str] = []
        self.check_missing = self.paths.append

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str, window: int = WINDOW) -> ByteStore:
        self.paths.append(path)
        return self._files.open(path, window)


def files_read(path: str, files: Files) -> list[str]:
    """Return the paths read by opening a path; if it cannot be opened, the paths up to the fault."""
    from ..core.checkpoint import open as open_checkpoint  # only here: most files are compared without it

    noted: Any = _Noted(files)
    with (
        suppress(SafeloadError, OSError, ImportError),
        open_checkpoint(Location(noted, path), unknown_globals="inert") as checkpoint,
    ):
        row = BY_NAME.get(checkpoint.format)
        if row is not None and row.parts is not None and not files.is_folder(path):
            return [place for _, place in walk(files.split(path)[0], files)]
        find_quantization(checkpoint.weight_files, path)
    return list(noted.paths)


def _left_out(name: str, path: str, expected: digests.Expected, files: Files, is_read: bool) -> bool:
    """Return True if a file does not belong to the model: ignored by the signature, or the document itself."""
    if expected.files is None or name in expected.files:
        return False
    if is_read:
        return name.partition("/")[0] not in digests.GIT_PATHS and expected.leaves_out(name)
    if expected.leaves_out(name) or files.shown(path) == expected.source:
        return True
    if files.remote or not os.path.exists(path):  # a link that leads nowhere
        return False
    return _is_same(path, expected.source) or (expected.skips_empty and os.path.getsize(path) == 0)


def _is_same(path: str, document: str) -> bool:
    """Return True if an existing file is this manifest or signature, which can be missing."""
    return os.path.exists(document) and os.path.samefile(path, document)


def _size(place: str, files: Files) -> int:
    with suppress(OSError):
        return 0 if files.remote else os.stat(place).st_size
    return 0


def _checked(expected: digests.Expected, files: Files, meter: Meter, file: tuple[str, str]) -> FileCheck:
    """Compare a file, which has a name and a path."""
    (name, place), shown = file, files.shown(file[1])
    if expected.files is not None and not expected.covers(place, files):
        return FileCheck(name, "not covered", _size(place, files), f"{expected.source} does not list it")
    try:
        store = files.open(place)
    except FileNotFoundError:
        return FileCheck(name, "missing", 0, f"{expected.source} lists it")
    except (OSError, SafeloadError) as error:
        return FileCheck(name, "unreadable", 0, one_line(error))
    with closing(store):
        status: Status = "not covered"
        try:
            content = expected.of(place, files, getattr(store, "place", None))
            status = "changed"
            check_size(content, store.size, path=shown, source=expected.source)
            compare_digests(blocks_of(store, shown, meter.add), content, store.size, path=shown, source=expected.source)
        except VerificationError as error:
            return FileCheck(name, status, store.size, str(error).removeprefix(f"{shown}: "))
        except (OSError, SafeloadError) as error:
            return FileCheck(name, "unreadable", store.size, one_line(error))
    return FileCheck(name, "ok", store.size, "")


# ---- signing ----


def sign(
    path: str,
    *,
    key: str,  # file with a private elliptic-curve key, in PEM
    certificate: str | None = None,  # file with the signer's certificate, which the signature then holds
    chain: Sequence[str] = (),  # files with the certificates between `certificate` and a trusted one
    password: str | None = None,  # of the key
    output: str | None = None,  # None for model.sig in the folder, or beside the file with .sig appended
    shard_size: int | None = None,  # bytes of the ranges to sign one by one; None to sign whole files
    symlinks: bool = False,  # True to sign the files that symbolic links lead to; otherwise links are refused
    ignore: Sequence[str] = (),  # paths of files and folders, relative to the model
    overwrite: bool = False,  # True to replace a file that is not a signature
) -> str:
    """Sign the files of a folder, or a file, with model-signing, and return the path of the signature."""
    from ..conversion.destinations import Output, refuse_inputs  # only here: `verify` writes nothing

    if certificate is not None and password is not None:
        raise ValueError("model-signing takes no password for the key of a certificate: decrypt the key first")
    if chain and certificate is None:
        raise ValueError("a chain of certificates needs the signer's certificate")
    for file in (key, *([] if certificate is None else [certificate]), *chain):
        digests.check_readable(file)
    target = output or (os.path.join(path, digests.SIGNATURE_NAME) if os.path.isdir(path) else f"{path}.sig")
    refuse_inputs(target, (key, certificate, *chain))
    written = Output("--output", target, "signature", digests.is_signature, overwrite=overwrite, sources=())
    if written.check() and overwrite and not written.is_ours():
        signed = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        refuse_inputs(target, [path, *(file for file in signed if not file.endswith(".sig"))])
    os.stat(path)
    digests.library()
    hashing = import_module("model_signing.hashing").Config()
    if shard_size is not None:
        hashing.use_shard_serialization(shard_size=shard_size)
    hashing.set_allow_symlinks(symlinks)
    inside = os.path.relpath(os.path.abspath(target), os.path.abspath(path))
    hashing.set_ignored_paths(paths=[*ignore, *([] if inside.startswith("..") or inside == "." else [inside])])
    config = import_module("model_signing.signing").Config().set_hashing_config(hashing)
    with tempfile.TemporaryDirectory(prefix="safeload-") as folder:
        temporary = Path(folder, digests.SIGNATURE_NAME)
        try:
            with redirect_stdout(None):
                if certificate is None:
                    secret = None if password is None else password.encode()  # bytes, whatever its types say
                    config.use_elliptic_key_signer(private_key=key, password=secret)
                else:
                    config.use_certificate_signer(
                        private_key=key, signing_certificate=certificate, certificate_chain=chain or [certificate]
                    )
                config.sign(os.path.abspath(path), temporary)
        except (ValueError, TypeError) as error:
            raise SafeloadError(f"{path} cannot be signed: {one_line(error)}", path=path) from None
        except AttributeError as error:  # of a key without a curve, such as an RSA key
            if error.name != "curve":
                raise
            text = f"{path} cannot be signed: {key} is not a key on the curve P-256, P-384 or P-521"
            raise SafeloadError(text, path=path) from None
        written.write(temporary.read_text(encoding="utf-8"))
    return target
