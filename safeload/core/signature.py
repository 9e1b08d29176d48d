"""The argument ``verify=``: what files are compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import exported
from .files import PathLike


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


# The path of a manifest or signature, or True for the one next to the files, or for the digests of a cache.
Verify: TypeAlias = bool | PathLike | Signature | None
