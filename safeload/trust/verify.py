"""`verify`: compare a model with a manifest, a signature, a cache or another model, or write a manifest; `sign`.

A manifest has a SHA-256 for each file, which `trust.digests` reads, and for each tensor, to name the tensors that a
download or an edit has changed. It is JSON: ``{"safeload_manifest": 1, "tensors": {name: {"dtype", "shape", "sha256",
"restoring"}}, "files": {name: {"size", "sha256"}}}``.

- ``sha256`` of a tensor covers the elements in C order, little-endian, followed by the scales of int8 or by the
  remaining parts of a packed tensor. It does not depend on the file format.
- ``restoring``, for int8 and packed tensors, covers the settings for decoding stored bytes: the axis of scales, block
  sizes, conventions of zero points, and the dtype of each part. Early manifests lack it.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..conversion import origin
from ..conversion.catalog import Catalog, Given
from ..conversion.executors import Executor, check_executor, opened, pieces_of, run_pieces
from ..conversion.sink import is_extra
from ..core import dtypes
from ..core.checkpoint import open as open_checkpoint
from ..core.files import LOCAL, WINDOW, ByteStore, Files, Located, Location, blocks_of, caching
from ..core.jobs import native_order
from ..core.memory import Cache, check_threads, thread_count
from ..core.opening import Verify
from ..core.packing import Grid, Packing, Zeros
from ..core.progress import Meter, Progress
from ..core.quantized_tensor import QuantizedTensor
from ..core.registry import BY_NAME, WEIGHT_SUFFIXES
from ..core.showing import Report, Row, table
from ..core.source import file_pieces, source_pieces
from ..core.tensors import packed_of
from ..core.text import PathLike, debug, more, native_path, os_error, plural, printable, show, size, warning
from ..core.thread_group import each, in_order
from ..errors import SafeloadError, VerificationError, exported, one_line, public
from ..quant.quantization import BESIDE, find_quantization, mapping
from ..remote import ollama
from ..remote.places import places_of
from . import digests
from .digests import refused
from .verified import check_size, compare_digests, walk

Status = Literal["ok", "changed", "missing", "not covered", "unreadable"]

# Settings beside weights that no conversion copies.
_SETTINGS = (*BESIDE, "adapter_config.json")
_MODEL_PROOF = "equal to a model on this machine, which proves no more than that model does"
# The key of settings in the entry of a tensor.
RESTORING = "restoring"
# Fields of `Packing` outside ``restoring``: stored under other keys, or without effect on values.
_UNHASHED = ("family", "label", "shape", "config")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Rows of a table on a terminal.
_ROWS = 100
_HEAD = ("name", "status", "size", "why")


@exported()
class TensorCheck(NamedTuple):
    """A tensor in a `VerifyReport`.

    Attributes:
        tensor: name of the tensor.
        status: "ok", "changed", "missing" or "not covered".
        reason: why it is not "ok".
    """

    tensor: str
    status: Literal["ok", "changed", "missing", "not covered"]
    reason: str


@exported()
class FileCheck(NamedTuple):
    """A file in a `VerifyReport`.

    Attributes:
        file: path, relative to the model's folder.
        status: "ok", "changed", "missing", "not covered" or "unreadable".
        nbytes: size of the file; 0 if it is missing.
        reason: why it is not "ok".
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
        files: `FileCheck` for each file, by name; empty if only tensors were compared.
        tensors: `TensorCheck` for each compared tensor; empty if all files are as expected.

    Example:
        >>> import safeload
        >>> report = safeload.verify("tiny-llama", write="list.json")
        >>> report = safeload.verify("tiny-llama", "list.json")
        >>> report.ok, [file.status for file in report.files]
        (True, ['ok', 'ok', 'ok', 'ok'])
    """

    _columns = ("name", "kind", "status", "nbytes", "reason")
    _json = ("ok", "path", "source", "proof", "files", "tensors")

    def __init__(
        self, path: str, source: str, proof: str, files: Sequence[FileCheck], tensors: Sequence[TensorCheck] = ()
    ) -> None:
        self.path, self.source, self.proof = path, source, proof
        self.files, self.tensors = list(files), list(tensors)

    @property
    def ok(self) -> bool:
        """True if everything compared is as expected, and nothing is missing or added."""
        return bool(self.files or self.tensors) and not self.faults

    @property
    def faults(self) -> list[FileCheck | TensorCheck]:
        """The files and tensors that are not as expected."""
        checks: list[FileCheck | TensorCheck] = [*self.files, *self.tensors]
        return [check for check in checks if check.status != "ok"]

    def __bool__(self) -> bool:
        return self.ok

    def _values(self) -> Iterable[Any]:
        yield from ((file.file, "file", *file[1:]) for file in self.files)
        yield from ((check.tensor, "tensor", check.status, 0, check.reason) for check in self.tensors)

    def _about(self) -> Sequence[str]:
        return [self.verdict]

    def _notable(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row["status"] != "ok"] or rows

    @property
    def verdict(self) -> str:
        """The result in a line."""
        source, counts, faults = printable(self.source), [], 0
        for checks, noun in ((self.files, "file"), (self.tensors, "tensor")):
            bad = sum(check.status != "ok" for check in checks)
            if bad or (checks and self.ok):
                nbytes = sum(getattr(check, "nbytes", 0) for check in checks)
                total = f" ({size(nbytes)})" if nbytes and not bad else ""
                counts.append((f"{bad:,} of " if bad else "") + plural(len(checks), noun) + total)
            faults += bad
        if not counts:
            return f"no files to verify against {source}"
        if faults:
            return f"{' and '.join(counts)} {'does' if faults == 1 else 'do'} not match {source}"
        matches = "matches" if len(self.files) + len(self.tensors) == 1 else "match"
        return f"{' and '.join(counts)} {matches} {source}; {printable(self.proof)}"

    def lines(self, columns: int | None = 80) -> list[str]:
        faults = [
            (printable(name), status, size(nbytes) if nbytes else "", printable(reason))
            for name, _, status, nbytes, reason in self._values()
            if status != "ok"
        ]
        if not faults:
            return [self.verdict]
        lines = table(_HEAD, faults[:_ROWS], right=frozenset((2,)), columns=columns)
        return [*lines, *more(len(faults), _ROWS), "", self.verdict]


@public
def verify(
    path: PathLike | Located,
    against: Verify = None,
    *,
    write: PathLike | Literal[True] | None = None,
    tensors: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    threads: int | None = None,
    progress: Progress = None,
    cache: Cache = "keep",
) -> VerifyReport:
    """Compare a model with a manifest, a model signature, the digests of a cache or another model; or write a manifest.

    Every file of a folder must be listed, and every listed file must exist. The manifest or signature itself, files of
    Git, and the paths that a signature ignores are left out, and nothing else. Symbolic links count as their target
    files. If a weight file differs from a manifest or model, the tensors that changed are named, too. A file can change
    after this call: to load exactly the verified bytes, pass ``verify=`` to `load`.

    Args:
        path: a folder, a file, a URL or an ``ollama://`` name. For a file or an ``index.json``, all files are compared
            that opening it reads, such as shards and configurations, and the listed settings beside it.
        against: the path of a manifest; a `Signature`; or another model: a folder, a weight file, an index.json or the
            URL of one, whose digests are computed. None uses the manifest or signature next to the files, or the
            digests of the Hub's cache or of ollama. A manifest or model at a URL stands for its tensors, not its files.
        write: writes a manifest instead, with the size and SHA-256 of each file and the SHA-256 of each tensor: a path,
            or True for ``sha256.json`` in the folder or ``NAME.sha256.json`` beside a file. The manifest does not
            list itself. That of a URL lists tensors only.
        tensors: True to compare names, dtypes, shapes and stored values of the tensors, in whatever files they are.
        overwrite: for ``write``: True to replace a file that is not a manifest.
        storage_options: options of the filesystem behind a URL, see `open`.
        executor: computes the digests of tensors, see `check`.
        threads: number of threads, each of which hashes a file or tensor; None chooses it.
        progress: True shows a progress bar. A callable gets (bytes_done, bytes_total).
        cache: "drop" leaves few pages of the files in the system's page cache, see `load`.

    Returns:
        The report. Its ``proof`` says what a match proves: a manifest or a cache proves integrity only.

    Raises:
        VerificationError: there is nothing to verify against; the signature has no key or belongs to another key; a
            manifest or signature is malformed.
        FileExistsError: ``write`` names a file that is not a manifest.
        ModuleNotFoundError: a signature needs model-signing, which is not installed.
        OSError: the path, the manifest, the signature or a key cannot be read, or the manifest cannot be written.
        ValueError: ``against`` and ``write``, or ``write=True`` for a URL.

    Example:
        >>> import safeload
        >>> safeload.verify("tiny-llama", write="tiny-llama.sha256.json").source
        'tiny-llama.sha256.json'
        >>> safeload.verify("tiny-llama", "tiny-llama.sha256.json").ok
        True
    """
    check_threads(threads)
    check_executor(executor)
    (text,), files = places_of((path,), storage_options)
    if not (files.remote or ollama.is_name(text) or os.path.lexists(text)):
        raise os_error(2, text)

    def made_of(model: Any, names: Collection[str] = ()) -> Mapping[str, Any]:  # of all if none of these files is open
        with open_checkpoint(model, storage_options=storage_options, unknown_globals="inert") as checkpoint:
            if names and not any(file.place in names for file in checkpoint.weight_files):
                return {}
            return make(checkpoint, executor=executor, threads=threads, progress=progress)["tensors"]  # type: ignore[no-any-return]

    if write is not None and against is not None:
        raise ValueError("against= compares and write= writes a manifest: pass only one of them")
    with caching(cache):
        if write is not None:
            return _written(text, files, write, made_of, path, overwrite=overwrite, threads=threads)
        model = _model_at(against, storage_options)
        record = digests.document_beside(text, origin.ORIGIN_NAME)
        theirs: Any = None  # returns the tensors to compare with
        checks: list[FileCheck] = []
        if model is not None and not tensors and os.path.isfile(record) and not _is_beside(record, model):
            expected = digests.expected_of(text, files, record)
            checks = _source_checks(expected, model, threads)
        elif model is not None:
            theirs = partial(made_of, model)
            expected = _files_of_model(model, text, files, threads)
        elif ollama.is_name(text) and against is None:
            expected = digests.Expected(digests.OLLAMA)
        else:
            expected = digests.expected_of(text, files, against or True, storage_options, tensors=True)
            if expected.tensors is not None:
                theirs = partial(_checked_tensors, expected.tensors, expected.source)
        shown = files.shown(text)
        if theirs is None and tensors:
            raise refused(f"{expected.source} has no digests of tensors: pass a manifest or a model", shown)
        if theirs is not None and (tensors or ollama.is_name(text) or not expected.files):
            compared = compare(theirs(), made_of(path), expected.source)
            return VerifyReport(shown, expected.source, expected.proof, (), compared)
        if ollama.is_name(text):
            layers = sorted({layer.path for layer in ollama.find(text).layers})
            files, places = LOCAL, {os.path.basename(layer): layer for layer in layers}
        else:
            # Settings and shards beside a weight file are no part of another, nor of the result of a conversion.
            partial_list = expected.origin is not None or (expected.proof == _MODEL_PROOF and _is_alone(text, files))
            listed = _places(text, expected, files)
            places = {name: place for name, place in listed if not partial_list or expected.covers(place, files)}
        own = _checks(expected, places, files, threads, progress)
        compared = []
        changed = {files.absolute(places[check.file]) for check in own if check.status == "changed"}
        if changed and theirs is not None:
            with suppress(SafeloadError, OSError):  # the file itself is reported
                now = made_of(path, changed)
                known = theirs() if now else {}
                if not files.is_folder(text):  # a part of the model
                    known, now = ({name: side[name] for name in known if name in now} for side in (known, now))
                compared = compare(known, now, expected.source)
        missing = {(expected.files or {}).get(check.file): check.file for check in own if check.status == "missing"}
        checks += (_renamed(check, places[check.file], missing, files) for check in own)
        return VerifyReport(shown, expected.source, expected.proof, sorted(checks), compared)


def _checks(
    expected: digests.Expected, places: Mapping[str, str], files: Files, threads: int | None, progress: Progress = None
) -> list[FileCheck]:
    """Compare files by name, the largest first."""
    sizes = {name: _size(place, files) for name, place in places.items()}
    total = sum(sizes.values())
    check = partial(_checked, expected, files, Meter(progress, total))
    ordered = sorted(places.items(), key=lambda item: -sizes[item[0]])
    return each(check, ordered, thread_count(total, threads))


def _renamed(
    check: FileCheck, place: str, missing: Mapping[digests.ExpectedFile | None, str], files: Files
) -> FileCheck:
    """Say of an unlisted file which missing file has its content."""
    if check.status == "not covered" and not files.remote and check.nbytes in {c[-1].end for c in missing if c}:
        entry = origin.entry_of(Location(LOCAL, place))
        content = (digests.ExpectedRange(0, entry["size"], "sha256", entry["sha256"]),)
        if content in missing:
            return check._replace(reason=f"{check.reason}; its content is that of {missing[content]}")
    return check


def _is_beside(record: str, model: Location) -> bool:
    """Return True if a model has the same record: it is a copy, and no source."""
    other = digests.document_beside(model.path, origin.ORIGIN_NAME)
    return os.path.isfile(other) and filecmp.cmp(record, other, shallow=False)


def _source_checks(expected: digests.Expected, source: Location, threads: int | None) -> list[FileCheck]:
    """Compare a model with the source of the same files in a record of origin."""
    path = source.path
    if source.files.remote:
        raise refused("pass a source on this machine", source.shown)
    if not os.path.lexists(path):
        raise os_error(2, path)
    folder, name = (path, None) if os.path.isdir(path) else os.path.split(path)
    sources = mapping(expected.origin).get("sources")
    for recorded in sources if isinstance(sources, list) else ():
        entries = mapping(mapping(recorded).get("files")).items()
        hashed = {key: entry for key, entry in entries if name in (None, key) and "sha256" in mapping(entry)}
        listed = digests.files_of_manifest({"files": hashed}, expected.source)
        places = {path: path for path in (os.path.join(folder, key) for key in listed)}
        if any(map(os.path.lexists, places)):
            root = LOCAL.absolute(folder or os.curdir)
            return _checks(digests.Expected(expected.source, root=root, files=listed), places, LOCAL, threads)
    raise refused(f"{expected.source} records no source with these files", path)


def _model_at(against: Any, storage_options: Mapping[str, Any] | None) -> Location | None:
    """Return a model, told by its name: a folder, a weight file or an index; None for a document or no path."""
    if not isinstance(against, (str, os.PathLike)):
        return None
    (text,), files = places_of((against,), storage_options)
    name = text.partition("?")[0].lower()
    if name.endswith((".json", ".sig")):
        return Location(files, text) if name.endswith(".index.json") else None
    is_model = ollama.is_name(text) or os.path.splitext(name)[1] in WEIGHT_SUFFIXES or files.is_folder(text)
    return Location(files, text) if is_model else None


def _files_of_model(model: Location, path: str, files: Files, threads: int | None) -> digests.Expected:
    """Return the digests of another model's files; of a single weight file, under the name of another file."""
    listed: dict[str, dict[str, Any]] = {}
    if not (model.files.remote or ollama.is_name(model.path)):
        if not os.path.lexists(model.path):
            raise os_error(2, model.path)
        if _is_alone(model.path, model.files) and _is_alone(path, files):
            listed = {files.split(path)[1]: origin.entry_of(model)}
        else:
            listed = digests_of(model.path, threads)
    root = files.absolute(path) if files.is_folder(path) else files.split(files.absolute(path))[0]
    expected = digests.files_of_manifest({"files": listed}, model.shown)
    return digests.Expected(model.shown, _MODEL_PROOF, root, expected, digests.GIT_PATHS)


def _is_alone(path: str, files: Files) -> bool:
    """Return True for a weight file, which another file of any name can be compared with."""
    return not (files.is_folder(path) or path.endswith(".index.json"))


def _written(
    text: str,
    files: Files,
    write: PathLike | Literal[True],
    made_of: Callable[[Any], Mapping[str, Any]],
    path: Any,
    *,
    overwrite: bool,
    threads: int | None,
) -> VerifyReport:
    """Write the manifest of a model."""
    from ..conversion.destinations import Output  # only here: other calls write nothing

    local = not (files.remote or ollama.is_name(text))
    if write is True and not local:
        raise ValueError("write=True stands for a path beside the model, and this is a URL: pass the path")
    beside = os.path.join(text, digests.MANIFEST_NAME) if os.path.isdir(text) else f"{text}.{digests.MANIFEST_NAME}"
    target = beside if write is True else native_path(write)[0]
    output = Output("write=", target, "manifest", origin.is_manifest, overwrite, [text])
    output.check()
    document: dict[str, Any] = {origin.MANIFEST_KEY: origin.MANIFEST_VERSION}
    try:
        document["tensors"] = made_of(path)
    except SafeloadError as error:
        if not local:
            raise
        warning("%s lists files, but no tensors: %s", target, one_line(error))
    listed = digests_of(text, threads, target) if local else {}
    if local:
        document["files"] = listed
    output.write(json.dumps(document, indent=1) + "\n", [text])
    checks = [FileCheck(name, "ok", entry["size"], "") for name, entry in listed.items()]
    tensors = [TensorCheck(name, "ok", "") for name in document.get("tensors", ())]
    return VerifyReport(files.shown(text), target, digests.MANIFEST_PROOF, checks, tensors)


def digests_of(path: str, threads: int | None, document: str = "") -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of the files of a local model by name, for a manifest at ``document``."""
    nothing = digests.Expected(document, root=LOCAL.absolute(path), files={}, ignored=digests.GIT_PATHS)
    places = sorted(_places(path, nothing, LOCAL, settings=True))
    if not os.path.isdir(path):
        places = [(name, place) for name, place in places if os.path.isfile(place) and not _is_same(place, document)]
    entries = each(lambda item: origin.entry_of(Location(LOCAL, item[1])), places, thread_count(1 << 40, threads))
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


# ---- the tensors of manifests ----


def make(
    given: Given, *, executor: Executor | None = None, threads: int | None = None, progress: Progress = None
) -> dict[str, Any]:
    """Make the manifest of a checkpoint; an executor reads groups of tensors elsewhere, with an identical result."""
    with Catalog.of(given) as catalog:
        sizes = catalog.sizes([*catalog])
        if executor is None:
            entries = _entries(catalog, sizes, threads, progress)
        else:
            pieces = pieces_of(sizes, catalog, operation="manifest")
            entries = run_pieces(run, pieces, executor, threads=threads, progress=progress).get("tensors", {})
        return {origin.MANIFEST_KEY: origin.MANIFEST_VERSION, "tensors": {name: entries[name] for name in sizes}}


def run(
    piece: Mapping[str, Any], threads: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the entries of the tensors of a piece; see `run_piece`."""
    with opened(piece, storage_options) as (names, (catalog,)):
        return {"tensors": _entries(catalog, catalog.sizes(names), threads, None)}


def _entries(
    catalog: Catalog, sizes: Mapping[str, int], threads: int | None, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Return the entries of tensors, given their sizes in bytes."""
    total = sum(sizes.values())
    entry = partial(_entry, catalog, Meter(progress, total))
    return dict(zip(sizes, in_order(entry, sizes, thread_count(total, threads)), strict=True))


def _entry(catalog: Catalog, meter: Meter, name: str) -> dict[str, Any]:
    digest, (_, file, index) = hashlib.sha256(), catalog.place(name)
    packed = packed_of(file, index) if file is not None and file.table.quantized else None
    chunks: Iterator[memoryview]
    if packed is not None:  # its parts in the order of `QuantizedTensor.parts`
        dtype, shape = catalog.about(name).dtype, packed.packing.shape
        chunks = (chunk for part in packed.parts.values() for chunk in file_pieces(part.file, part.begin, part.end))
    elif isinstance(value := catalog.source(name, threads=1), QuantizedTensor):
        dtype, shape, (packed, _) = value.scheme, value.shape, value.restoring() or (None, None)
        arrays = (native_order(np.ascontiguousarray(array)) for array in value.parts.values() if array.size)
        chunks = (array.reshape(-1).view(np.uint8).data for array in arrays)
    else:  # big-endian and strided tensors were copied
        dtype, shape, chunks = value.row.code, value.shape, source_pieces(value)
    for chunk in chunks:
        digest.update(chunk)
        meter.add(len(chunk))
    entry = {"dtype": dtype, "shape": list(shape), "sha256": digest.hexdigest()}
    debug("sha256 of %s: %s", name, entry["sha256"])
    if packed is not None:  # default values are left out: a new field must not change existing digests
        settings = {key: value for key, value in _set_fields(packed.packing).items() if key not in _UNHASHED}
        parts = {
            role: [dtypes.array_dtype(part.row.number).name, part.end - part.begin]
            for role, part in packed.parts.items()
        }
        text = json.dumps({"packing": settings, "parts": parts}, sort_keys=True)
        entry[RESTORING] = hashlib.sha256(text.encode()).hexdigest()
    return entry


def _set_fields(fields: Packing | Grid | Zeros) -> dict[str, Any]:
    """Return the fields of a named tuple without default values, as plain values."""
    defaults, values = fields._field_defaults, fields._asdict()
    changed = {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}
    return {key: _set_fields(value) if isinstance(value, (Grid, Zeros)) else value for key, value in changed.items()}


def _checked_tensors(tensors: Any, path: str) -> Mapping[str, Any]:
    """Check the tensors of a manifest."""
    if not isinstance(tensors, Mapping):
        raise refused(f"tensors must be an object, got {type(tensors).__name__}", path)
    for name, entry in tensors.items():
        good = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
        if not good or not _is_digest(entry.get("sha256")):
            raise refused(f"the entry of {show(name)} must have dtype, shape and sha256", path)
        if RESTORING in entry and not _is_digest(entry[RESTORING]):
            message = f"{RESTORING!r} of {show(name)} must be a SHA-256, got {show(entry[RESTORING])}"
            raise refused(message, path)
    return tensors


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def compare(before: Mapping[str, Any], now: Mapping[str, Any], source: str) -> list[TensorCheck]:
    """Compare the tensors of ``source``, a manifest or model, with the tensors of now."""
    checks: list[TensorCheck] = []
    without_settings = 0  # early manifests lack digests of settings: a single warning reports them all
    for name, entry in before.items():
        current, reason = now.get(name), ""
        if current is None:
            checks.append(TensorCheck(name, "missing", f"{source} has it"))
            continue
        if (entry["dtype"], entry["shape"]) != (current["dtype"], current["shape"]):
            described, listed = (f"{row['dtype']} {row['shape']}" for row in (current, entry))
            reason = f"is {described}, but {listed} in {source}"
        elif entry["sha256"] != current["sha256"]:
            reason = f"expected sha256 {entry['sha256'][:16]}..., got {current['sha256'][:16]}..."
        elif RESTORING in current and RESTORING not in entry:
            without_settings += 1
        elif entry.get(RESTORING) != current.get(RESTORING):
            reason = "different settings decode its bytes, such as the axis of scales, block sizes or zero points"
        checks.append(TensorCheck(name, "changed" if reason else "ok", reason))
    checks += (TensorCheck(name, "not covered", f"{source} does not have it") for name in now if name not in before)
    if without_settings:
        text = "%s: an older safeload wrote it: it covers the bytes of %s, but not the settings that decode them"
        warning(text, source, plural(without_settings, "quantized tensor"))
    return checks


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
    for file in (path, key, *([] if certificate is None else [certificate]), *chain):
        digests.check_readable(file)
    target = output or (os.path.join(path, digests.SIGNATURE_NAME) if os.path.isdir(path) else f"{path}.sig")
    refuse_inputs(target, (key, certificate, *chain))
    written = Output("--output", target, "signature", digests.is_signature, overwrite=overwrite, sources=())
    if written.check() and overwrite and not written.is_ours():
        signed = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        refuse_inputs(target, [path, *(file for file in signed if not file.endswith(".sig"))])
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
