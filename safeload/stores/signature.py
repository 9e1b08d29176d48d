"""OpenSSF model signatures: bundles of Sigstore around a signed statement. The model-signing library verifies them.

1. A bundle is a JSON object with ``mediaType``, ``verificationMaterial`` and ``dsseEnvelope``.
2. ``dsseEnvelope`` has ``payload`` (Base64), ``payloadType`` ``application/vnd.in-toto+json`` and ``signatures``:
   exactly one.
3. The payload is a statement; see `digests`.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from ..base.absent import needed
from ..base.paths import PathLike
from ..base.text import show
from ..errors import FormatError, VerificationError, exported, one_line
from .digests import Expected, files_of_statement, refused
from .json_file import parse_json

# Key of the signed statement in a bundle.
SIGNATURE_KEY = "dsseEnvelope"
_PAYLOAD = "application/vnd.in-toto+json"
_PACKAGE = "model_signing"


@exported()
@dataclass(frozen=True)
class Signature:
    """A model signature, and the key or the certificates to verify it with.

    ``safeload sign`` and the model-signing library write such signatures. Without a key or certificates a signature
    proves nothing and is refused.

    Attributes:
        path: the signature, such as "model/model.sig"; a path or a URL.
        key: file with the public key of the signer, in PEM.
        certificate: file, or list of files, with the certificates that you trust, in PEM. The signature holds the
            signer's own certificate.

    Example:
        >>> import safeload
        >>> signature = safeload.Signature("tiny-llama/model.sig", key="release.pub")
        >>> safeload.load("tiny-llama", verify=signature)  # doctest: +SKIP
    """

    path: PathLike
    key: PathLike | None = None
    certificate: PathLike | Sequence[PathLike] | None = None

    def __post_init__(self) -> None:
        if self.key is not None and self.certificate is not None:
            raise ValueError("a signature is verified with a key or with certificates, not with both")

    @property
    def certificates(self) -> list[PathLike]:
        """The files with trusted certificates."""
        if self.certificate is None:
            return []
        return [self.certificate] if isinstance(self.certificate, (str, os.PathLike)) else list(self.certificate)

    @property
    def _proofs(self) -> list[PathLike]:
        """The files to verify the signature with."""
        return self.certificates if self.key is None else [self.key]

    @property
    def proof(self) -> str:
        """What a match proves."""
        files = ", ".join(os.fspath(path) for path in self._proofs)
        if self.key is not None:
            return f"signed with the key of {files}"
        return f"signed by a certificate that {files} vouches for"


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
    material = bundle.get("verificationMaterial")
    kinds: Collection[str] = material if isinstance(material, Mapping) else ()
    if signature.key is not None and "x509CertificateChain" in kinds:
        text = "the signature was made with a certificate, not with a key: pass certificate= (--certificate)"
        raise refused(text, shown)
    if signature.key is None and "publicKey" in kinds:
        raise refused("the signature was made with a key, not with a certificate: pass key= (--key)", shown)
    if _verified_entries(content, signature, shown) != signed.entries():
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
    except (binascii.Error, ValueError):
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
    """Refuse a key that cannot be opened, because the library's own errors do not name it.

    A pipe can be opened only once, so the library opens it.
    """
    if stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "rb"):
            pass


def _verified_entries(content: bytes, signature: Signature, shown: str) -> set[tuple[str, str]] | None:
    """Return name and digest of each resource after the library has verified the signature."""
    from importlib import import_module

    library()
    config = import_module(f"{_PACKAGE}.verifying").Config()
    capture = _Capture()
    with tempfile.TemporaryDirectory(prefix="safeload-") as folder:
        path = os.path.join(folder, "model.sig")  # the bytes that were read, whatever happens to the file meanwhile
        with open(path, "xb") as file:
            file.write(content)
        try:
            with redirect_stdout(sys.stderr):  # it prints warnings
                try:
                    if signature.key is not None:
                        config.use_elliptic_key_verifier(public_key=signature.key)
                    else:
                        config.use_certificate_verifier(certificate_chain=signature.certificates)
                except Exception as error:
                    files = ", ".join(os.fspath(path) for path in signature._proofs)
                    keys = "a public key on the curve P-256, P-384 or P-521"
                    kind = "certificates" if signature.key is None else keys
                    reason = f": {one_line(error)}" if isinstance(error, (OSError, ValueError)) else ""
                    raise VerificationError(f"{files}: expected {kind} in PEM{reason}", path=files) from None
                config.set_hashing_config(capture).verify(folder, path)
        except VerificationError:
            raise
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise refused(f"the signature is not valid: {reason}", shown) from None
    return capture.entries
