r"""Expected digests of files, from manifests by safeload, model signatures, and the caches of the Hub and of ollama.

1. A manifest of ours is a JSON object: ``{"safeload_manifest": 1, "tensors": {...}, "files": {name: {"size",
   "sha256"}}}``. Names are relative to the folder of the model, with slashes.
2. A model signature signs an in-toto statement: a JSON object with ``_type``, ``predicateType``, ``subject`` and
   ``predicate``.
3. Predicate ``https://model_signing/signature/v1.0``: ``predicate.serialization`` has ``method``, ``hash_type``,
   ``allow_symlinks``, ``ignore_paths`` and, for the method "shards", ``shard_size``. ``predicate.resources`` is a list
   of ``{"name", "algorithm", "digest"}``. For "files" the name is a path; for "shards" it is ``path:begin:end``, and
   the algorithm is ``sha256-sharded-<shard_size>``. ``subject`` has one entry, whose sha256 covers the digests in
   order.
4. Predicate ``https://model_signing/Digests/v0.1``: each entry of ``subject`` is a file with its sha256.
5. A model that is a single file has the name ".".
6. The Hub's cache names a file by its ETag: a SHA-256, or for small files the SHA-1 of a Git blob, which covers
   ``blob <size>\0`` and the content. ollama's blobs are called ``sha256-<digest>``.
7. A model signature is a bundle of Sigstore: a JSON object with ``mediaType``, ``verificationMaterial`` and
   ``dsseEnvelope``. The last has ``payload``, the statement in Base64, ``payloadType``
   ``application/vnd.in-toto+json`` and ``signatures``: exactly one. The model-signing library verifies it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..conversion.origin import MANIFEST_KEY, MANIFEST_VERSION, ORIGIN_KEY, ORIGIN_NAME, is_manifest
from ..core.files import LOCAL, MAX_JSON, Files, parse_json, read_at
from ..core.opening import Signature, Verify
from ..core.registry import WEIGHT_SUFFIXES
from ..core.text import PathLike, error_about, folder_names, needed, show
from ..errors import FormatError, VerificationError, one_line
from ..quant.quantization import mapping
from ..remote.places import places_of

# Key of the signed statement in a bundle.
SIGNATURE_KEY = "dsseEnvelope"
_PAYLOAD = "application/vnd.in-toto+json"
_PACKAGE = "model_signing"
SIGNATURE_NAME = "model.sig"
# Name of a manifest in the folder of its model, and suffix beside a file.
MANIFEST_NAME = "sha256.json"
# Algorithms by name, with the number of hexadecimal digits.
_ALGORITHMS = {"sha256": 64, "blake2b": 128, "blake3": 64}
_GIT_BLOB = "git-sha1"
_STATEMENT = "https://in-toto.io/Statement/v1"
_V1, _V01 = "https://model_signing/signature/v1.0", "https://model_signing/Digests/v0.1"
# The name of a model that is a single file.
_ALONE = "."
# Largest size that a manifest can state.
_LARGEST = 1 << 62
# Levels of folders between a file and the root of its model.
_LEVELS = 64
# Paths that model signatures always leave out.
GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
_BLOB = re.compile(r"(?:sha256-)?([0-9a-f]{64})|([0-9a-f]{40})", re.ASCII)
# First bytes that distinguish a manifest by safeload from other JSON.
_START = 64
# Largest number of JSON files beside weights to look at.
_MOST_BESIDE = 1000
# The caches that name files by their digests.
HUB, OLLAMA = "the Hub's cache", "ollama's store"
MANIFEST_PROOF = "integrity only: a manifest does not say who made it"
_SHARD = re.compile(r"(.+):([0-9]{1,18}):([0-9]{1,18})", re.DOTALL)


class ExpectedRange(NamedTuple):
    """The expected digest of bytes of a file."""

    begin: int
    end: int | None  # after the last byte; None for the end of the file
    algorithm: str
    digest: str  # hexadecimal


# The expected digests of a file: ascending ranges without gaps.
ExpectedFile: TypeAlias = tuple[ExpectedRange, ...]


class Expected(NamedTuple):
    """The expected files of a model: from a manifest or signature, or from a cache that names files by digests."""

    source: str  # the manifest, signature or cache, for messages
    proof: str = "integrity only: the cache says what was downloaded, not who made it"
    root: str = ""  # absolute path of the model's folder
    files: Mapping[str, ExpectedFile] | None = None  # by relative path, with slashes; None for a cache
    ignored: tuple[str, ...] = ()  # relative paths of files and folders that are left out
    skips_empty: bool = False  # empty files have no digest: the signature lists ranges
    tensors: Any = None  # of a manifest, not checked yet
    origin: Any = None  # of the record of a conversion, not checked yet

    def name_of(self, path: str, files: Files) -> str | None:
        """Return the path relative to the root; None if it leads elsewhere."""
        return name_below(self.root, files.absolute(path), files)

    def covers(self, path: str, files: Files) -> bool:
        """Return whether a file is listed, whether it exists or not."""
        return self.files is not None and self.name_of(path, files) in self.files

    def of(self, path: str, files: Files, place: str | None) -> ExpectedFile:
        """Return the expected content of a file; ``place`` is its path on this machine."""
        if self.files is None:
            expected, fault = None if place is None else digest_in_cache(place), "has no digest of this file"
        else:
            expected, fault = self.files.get(self.name_of(path, files) or ""), "does not cover this file"
        if expected is None:
            raise refused(f"{self.source} {fault}", files.shown(path))
        return expected

    def leaves_out(self, name: str) -> bool:
        """Return whether a relative path is ignored, itself or by its folder."""
        return any(name == path or name.startswith(f"{path}/") for path in self.ignored)


def name_below(folder: str, path: str, files: Files) -> str | None:
    """Return the path of a file relative to a folder, with slashes; None if it leads elsewhere."""
    names: list[str] = []
    while folder not in (path, path.rstrip("/\\")):
        above, name = files.split(path)
        if len(names) >= _LEVELS or above == path:
            return None
        names.append(name)
        path = above
    return "/".join(reversed(names))


def digest_in_cache(path: str) -> ExpectedFile | None:
    """Return the digest that a cache gives a local file by its name; None if the file is in no cache."""
    folder, name = os.path.split(os.path.realpath(path))
    blob = _BLOB.fullmatch(name) if os.path.basename(folder) == "blobs" else None
    return None if blob is None else (ExpectedRange(0, None, _GIT_BLOB if blob[2] else "sha256", blob[1] or name),)


def refused(text: str, path: str) -> VerificationError:
    """Return the error for a file that is not as expected, or for a malformed list of files."""
    return error_about(VerificationError, text, path=path)


def hash_of(algorithm: str, size: int) -> Any:
    """Return a hash for bytes of a file of this size; its ``update`` releases the GIL."""
    if algorithm in ("sha256", "blake2b"):
        return hashlib.new(algorithm)
    if algorithm == _GIT_BLOB:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return needed("blake3", "BLAKE3 digests need blake3").blake3()


# ---- manifests by safeload ----


def is_signature(head: bytes) -> bool:
    """Return True if a file with these first bytes can be a bundle of a model signature."""
    keys = rb'"(mediaType|verificationMaterial|dsseEnvelope|messageSignature)"'
    return re.match(rb"\s*\{\s*" + keys + rb"\s*:", head) is not None


def files_of_manifest(manifest: Mapping[str, Any], path: str) -> dict[str, ExpectedFile]:
    """Return the files of a manifest by safeload, by name."""
    listed = manifest.get("files")
    if listed is None:
        text = "the manifest lists tensors, but no files: write it again with `safeload verify PATH --write FILE`"
        raise refused(f"{text}, or compare its tensors with `safeload verify PATH --against FILE`", path)
    if not isinstance(listed, Mapping):
        raise refused(f"files must be an object, got {type(listed).__name__}", path)
    files: dict[str, ExpectedFile] = {}
    for name, entry in listed.items():
        check_name(name, path)
        size, digest = map(mapping(entry).get, ("size", "sha256"))
        if type(size) is not int or not 0 <= size < _LARGEST:
            raise refused(f"{show(name)}: size must be a number of bytes, got {show(size)}", path)
        files[name] = (ExpectedRange(0, size, "sha256", _digest(digest, "sha256", name, path)),)
    return files


def check_name(name: Any, path: str) -> str:
    """Check the relative path of a file."""
    good = isinstance(name, str) and name != "" and "\0" not in name and not re.match(r"[A-Za-z]:", name)
    if not good or any(part in ("", ".", "..") for part in name.split("/")):
        raise refused(f"expected the path of a file inside the model, got {show(name)}", path)
    return str(name)


def _digest(value: Any, algorithm: str, name: Any, path: str) -> str:
    digits = _ALGORITHMS[algorithm]
    text = value.lower() if isinstance(value, str) else ""
    if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
        raise refused(f"the {algorithm} of {show(name)} must have {digits} hexadecimal digits, got {show(value)}", path)
    return text


# ---- model signatures ----


def files_of_statement(statement: Mapping[str, Any], path: str) -> Expected:
    """Return the files of an in-toto statement, without their root."""
    if statement.get("_type") != _STATEMENT:
        raise refused(f"expected an in-toto statement, got {show(statement.get('_type'))}", path)
    kind, subjects = statement.get("predicateType"), statement.get("subject")
    settings: Any = {"method": "files"}
    resources: Any
    if kind == _V01:
        if not isinstance(subjects, list):
            raise refused("subject must be a list of files", path)
        resources = [{**mapping(item), "algorithm": "sha256", "digest": _sha256_of(item)} for item in subjects]
    elif kind == _V1:
        fields = mapping(statement.get("predicate"))
        settings, resources = fields.get("serialization"), fields.get("resources")
        if not isinstance(settings, Mapping) or not isinstance(resources, list):
            raise refused("the predicate must have serialization and resources", path)
    else:
        raise refused(f"the predicate {show(kind)} is not a known model signature", path)
    method = settings.get("method")
    if method not in ("files", "shards"):
        raise refused(f"the serialization {show(method)} is not known", path)
    files = {name: tuple(sorted(parts)) for name, parts in _ranges(resources, method == "shards", path).items()}
    if kind == _V1:
        root = hashlib.sha256(b"".join(bytes.fromhex(resource["digest"]) for resource in resources)).hexdigest()
        if not isinstance(subjects, list) or [*map(_sha256_of, subjects)] != [root]:
            raise refused("the subject does not match the digests of the files", path)
    ignored = settings.get("ignore_paths", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise refused("ignore_paths must be a list of paths", path)
    left_out = tuple(name.rstrip("/") for name in ignored if name.rstrip("/") not in ("", "."))
    for name, parts in files.items():
        for part, at in zip(parts, [0, *(part.end or 0 for part in parts)], strict=False):
            if part.begin != at:  # bytes without a signature
                raise refused(f"the ranges of {show(name)} overlap or leave a gap at byte {at:,}", path)
    return Expected(path, "", "", files, (*left_out, *GIT_PATHS), skips_empty=method == "shards")


def _sha256_of(subject: Any) -> Any:
    return mapping(mapping(subject).get("digest")).get("sha256")


def _ranges(resources: Iterable[Any], sharded: bool, path: str) -> dict[str, list[ExpectedRange]]:
    """Return the ranges of each file, and refuse duplicates."""
    ranges: dict[str, list[ExpectedRange]] = {}
    for resource in resources:
        fields = mapping(resource)
        name, begin, end, algorithm = fields.get("name"), 0, None, fields.get("algorithm")
        if sharded:
            shard = _SHARD.fullmatch(name) if isinstance(name, str) else None
            if shard is None or int(shard[2]) >= int(shard[3]):
                raise refused(f"expected a path and a range of bytes, got {show(name)}", path)
            name, begin, end = shard[1], int(shard[2]), int(shard[3])
            algorithm = re.sub(r"-sharded-\d{1,18}\Z", "", algorithm) if isinstance(algorithm, str) else algorithm
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            raise refused(f"the digest {show(algorithm)} of {show(name)} is not known", path)
        name = _ALONE if name == _ALONE else check_name(name, path)
        if not sharded and name in ranges:
            raise refused(f"{show(name)} is listed twice", path)
        digest = _digest(fields.get("digest"), algorithm, name, path)
        ranges.setdefault(name, []).append(ExpectedRange(begin, end, algorithm, digest))
    return ranges


# ---- their verification ----


def library() -> Any:
    """Return the model-signing library."""
    # Version 1.1.1 imports OpenSSL without requiring it.
    return needed(_PACKAGE, "model signatures need model-signing", "model-signing pyopenssl", "OpenSSL")


def signed_files(content: bytes, signature: Signature, shown: str) -> Expected:
    """Verify a signature, and return the files that it covers."""
    if not signature._proofs:
        text = "a signature without a key or certificate proves nothing: pass safeload.Signature(path, key=...)"
        raise refused(text, shown)
    for path in signature._proofs:
        check_readable(path)
    try:
        bundle = parse_json(content, "the signature", shown)
        statement = _statement(bundle, shown)
    except FormatError as error:
        raise refused(f"not a model signature: {error}", shown) from None
    signed = files_of_statement(statement, shown)
    kinds = mapping(bundle.get("verificationMaterial"))
    if signature.key is not None and "x509CertificateChain" in kinds:
        text = "the signature was made with a certificate, not with a key: pass certificate= (--certificate)"
        raise refused(text, shown)
    if signature.key is None and "publicKey" in kinds:
        raise refused("the signature was made with a key, not with a certificate: pass key= (--key)", shown)
    library()
    config = import_module(f"{_PACKAGE}.verifying").Config()
    capture = _Capture()
    # The library prints warnings.
    with tempfile.TemporaryDirectory(prefix="safeload-") as folder, redirect_stdout(sys.stderr):
        try:
            if signature.key is not None:
                config.use_elliptic_key_verifier(public_key=signature.key)
            else:
                config.use_certificate_verifier(certificate_chain=signature.certificates)
        except Exception as error:
            files = ", ".join(os.fspath(path) for path in signature._proofs)
            kind = "certificates" if signature.key is None else "a public key on the curve P-256, P-384 or P-521"
            reason = f": {one_line(error)}" if isinstance(error, (OSError, ValueError)) else ""
            raise VerificationError(f"{files}: expected {kind} in PEM{reason}", path=files) from None
        copy = Path(folder, SIGNATURE_NAME)  # the bytes that were read, whatever happens to the file meanwhile
        copy.write_bytes(content)
        try:
            config.set_hashing_config(capture).verify(folder, copy)
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise refused(f"the signature is not valid: {reason}", shown) from None
    shards, listed = signed.skips_empty, signed.files or {}
    parts = ((f"{name}:{part.begin}:{part.end}" if shards else name, part) for name in listed for part in listed[name])
    if capture.entries != {(name, part.digest) for name, part in parts}:
        raise refused("model-signing reads other files in this signature", shown)
    return signed._replace(proof=signature.proof)


def _statement(bundle: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """Return the statement in a bundle, not verified yet."""
    envelope = bundle.get(SIGNATURE_KEY)
    if not isinstance(envelope, Mapping):
        raise refused(f"not a model signature: {SIGNATURE_KEY} must be an object", shown)
    signatures, payload = envelope.get("signatures"), envelope.get("payload")
    if not isinstance(signatures, list) or len(signatures) != 1:
        count = len(signatures) if isinstance(signatures, list) else 0
        raise refused(f"expected exactly one signature, got {count}", shown)
    if envelope.get("payloadType") != _PAYLOAD or not isinstance(payload, str):
        raise refused(f"the payload is {show(envelope.get('payloadType'))}", shown)
    try:
        text = base64.b64decode(payload, validate=True)
    except ValueError:
        raise refused("the payload is not Base64", shown) from None
    return parse_json(text, "the statement", shown)


class _Capture:
    """Takes the place of the hashes of a model, to receive the verified ones: safeload hashes files itself."""

    def __init__(self) -> None:
        self.entries: set[tuple[str, str]] | None = None

    def hash(self, *_: Any, **__: Any) -> _Capture:
        return self

    def add_ignored_paths(self, **_: Any) -> None:
        """Ignore nothing: nothing is hashed."""

    def __eq__(self, expected: object) -> bool:
        descriptors: Iterable[Any] = expected.resource_descriptors()  # type: ignore[attr-defined]
        self.entries = {(item.identifier, item.digest.digest_hex) for item in descriptors}
        return True

    __hash__ = None  # type: ignore[assignment]


def check_readable(path: PathLike) -> None:
    """Refuse a model or key that cannot be opened, because the library's own errors do not name it."""
    if os.path.isfile(path) or not os.path.exists(path):  # a pipe can be opened only once, by the library
        LOCAL.open(os.fspath(path)).close()


# ---- the digests to verify files with ----


def expected_of(
    path: str,
    files: Files,
    verify: Verify,
    storage_options: Mapping[str, Any] | None = None,
    *,
    tensors: bool = False,  # True to accept a manifest of tensors alone, without `files`
) -> Expected:
    """Return the expected digests of a model, of which ``path`` is the first file or the folder."""
    if getattr(files, "heads", None) is not None:
        raise VerificationError("a file object has no name that a manifest or signature could list: pass its path")
    if verify is True:
        return _beside(path, files, tensors=tensors)
    if not isinstance(verify, (str, os.PathLike, Signature)):
        raise TypeError(f"verify must be True, a path or a safeload.Signature, got {show(verify)}")
    signature = verify if isinstance(verify, Signature) else Signature(verify)
    (text,), beside = places_of((signature.path,), storage_options)
    return _expected(text, beside, signature if verify is signature else None, path, files, tensors=tensors)


def _expected(
    document: str, beside: Files, signature: Signature | None, path: str, files: Files, *, tensors: bool
) -> Expected:
    """Return the digests in a document: in a ``signature``, or in what it is by its keys if that is None."""
    source, folder = beside.shown(document), beside.split(beside.absolute(document))[0]
    with closing(beside.open(document)) as store:
        if store.size > MAX_JSON:
            text = f"the manifest or signature has {store.size:,} bytes, but the limit is {MAX_JSON:,}"
            raise refused(text, source)
        content = read_at(store, 0, store.size)
    if signature is None:
        ours, fields, fault = is_manifest(content[:_START]), dict[str, Any](), ""
        try:
            fields = parse_json(content, "the manifest" if ours else "the file", source)
        except FormatError as error:
            if ours:
                raise refused(f"not a manifest: {error}", source) from None
            fault = f": {error.args[0]}"
        if ours or MANIFEST_KEY in fields:
            if fields.get(MANIFEST_KEY) != MANIFEST_VERSION:
                raise refused(f"a manifest must have {MANIFEST_KEY!r}: {MANIFEST_VERSION}", source)
            of_tensors = fields.get("tensors")
            alone = tensors and fields.get("files") is None and of_tensors is not None
            listed = {} if alone else files_of_manifest(fields, source)
            root = _root(path, files, folder, listed)
            return Expected(
                source, MANIFEST_PROOF, root, listed, GIT_PATHS, tensors=of_tensors, origin=fields.get(ORIGIN_KEY)
            )
        if SIGNATURE_KEY not in fields:
            text = f"neither a manifest, as `safeload verify PATH --write FILE` writes it ({MANIFEST_KEY!r}), "
            raise refused(f"{text}nor an OpenSSF model signature ({SIGNATURE_KEY!r}){fault}", source)
        signature = Signature(document)
    signed = signed_files(content, signature, source)
    listed = dict(signed.files or {})
    if _ALONE in listed and not files.is_folder(path):
        listed[files.split(path)[1]] = listed.pop(_ALONE)
    return signed._replace(root=_root(path, files, folder, listed), files=listed)


def _root(path: str, files: Files, folder: str, names: Mapping[str, Any]) -> str:
    """Return the folder that names are relative to: the model's, or the signature's if it lists the model below it."""
    place = files.absolute(path)
    is_file = files.remote and place.endswith((*WEIGHT_SUFFIXES, ".json"))  # no request asks
    own = place if not is_file and files.is_folder(path) else files.split(place.rstrip("/"))[0]
    own, top = own.rstrip("/\\") or own, folder.rstrip("/\\")
    if own.startswith(f"{top}/") or (os.sep != "/" and own.startswith(folder + os.sep)):
        inner = own[len(top) + 1 :].replace(os.sep, "/")
        if any(name.startswith(f"{inner}/") for name in names):
            return top
    return own


def _beside(path: str, files: Files, *, tensors: bool) -> Expected:
    """Return the digests next to the files: of a signature, a manifest or a cache."""
    signature = signature_beside(path)
    own = [document_beside(path, name) for name in (MANIFEST_NAME, ORIGIN_NAME)]
    manifest = None if files.remote or os.path.lexists(signature) else next(filter(os.path.isfile, own), None)
    if manifest is not None:
        return _expected(manifest, LOCAL, None, path, files, tensors=tensors)
    above = () if files.remote else Path(os.path.abspath(path)).parents
    beside_blobs = (os.path.isdir(folder.with_name("blobs")) for folder in above if folder.name == "snapshots")
    if path.startswith("hf://") or any(beside_blobs):  # or in the Hub's cache
        return Expected(HUB)
    if files.remote:
        text = "nothing to verify against: for a URL, pass the path of a manifest or a safeload.Signature"
        raise refused(text, files.shown(path))
    if digest_in_cache(path) is not None:
        return Expected(OLLAMA)
    if os.path.lexists(signature):
        return _expected(signature, LOCAL, Signature(signature), path, files, tensors=tensors)
    manifests = list(_manifests_in(path if os.path.isdir(path) else os.path.dirname(path)))
    if len(manifests) == 1:
        return _expected(manifests[0], LOCAL, None, path, files, tensors=tensors)
    text = f"nothing to verify against: no {SIGNATURE_NAME}, manifest or cache has digests of it. "
    text += "To write a manifest of trusted files, run `safeload verify PATH --write`"
    if manifests:
        names = ", ".join(show(os.path.basename(name)) for name in manifests[:4])
        text = f"{len(manifests)} manifests beside it: {names}; pass one of them"
    raise refused(text, files.shown(path))


def signature_beside(path: str) -> str:
    """Return where the signature of a model stands: ``model.sig`` in its folder, or beside a file of the same name."""
    if "://" in path:
        return f"{path.rstrip('/')}/{SIGNATURE_NAME}"
    return document_beside(path, SIGNATURE_NAME, ".sig")


def document_beside(path: str, name: str, suffix: str = "") -> str:
    """Return the path of a document in the folder of a model; of a file also with its name and a suffix."""
    if os.path.isdir(path):
        return os.path.join(path, name)
    alone = f"{path}{suffix or f'.{name}'}"
    return alone if os.path.lexists(alone) else os.path.join(os.path.dirname(path), name)


def _manifests_in(folder: str) -> Iterator[str]:
    """Iterate over the manifests by safeload in a local folder, judging by their first bytes."""
    names = [name for name in folder_names(folder or ".", []) if name.endswith(".json")]
    for path in (os.path.join(folder, name) for name in names[:_MOST_BESIDE]):
        with suppress(OSError):
            if os.path.isfile(path):  # a pipe could block
                with open(path, "rb") as file:
                    start = file.read(_START)
                if is_manifest(start):
                    yield path
