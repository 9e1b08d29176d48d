"""`sign`: write a model signature with the model-signing library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from ...errors import SafeloadError, one_line
from ...stores.digests import SIGNATURE_NAME, check_readable, is_signature, library
from ..convert.destinations import Output, refuse_inputs


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
    """Sign the files of a folder, or a file, and return the path of the signature."""
    if certificate is not None and password is not None:
        raise ValueError("model-signing takes no password for the key of a certificate: decrypt the key first")
    if chain and certificate is None:
        raise ValueError("a chain of certificates needs the signer's certificate")
    for file in (key, *([] if certificate is None else [certificate]), *chain):
        check_readable(file)
    target = output or (os.path.join(path, SIGNATURE_NAME) if os.path.isdir(path) else f"{path}.sig")
    refuse_inputs(target, (key, certificate, *chain))
    written = Output("--output", target, "signature", is_signature, overwrite=overwrite, sources=())
    if written.check() and overwrite and not written.is_ours():
        signed = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        refuse_inputs(target, [path, *(file for file in signed if not file.endswith(".sig"))])
    os.stat(path)
    library()
    hashing = import_module("model_signing.hashing").Config()
    if shard_size is not None:
        hashing.use_shard_serialization(shard_size=shard_size)
    hashing.set_allow_symlinks(symlinks)
    inside = os.path.relpath(os.path.abspath(target), os.path.abspath(path))
    hashing.set_ignored_paths(paths=[*ignore, *([] if inside.startswith("..") or inside == "." else [inside])])
    config = import_module("model_signing.signing").Config().set_hashing_config(hashing)
    with tempfile.TemporaryDirectory(prefix="safeload-") as folder:
        temporary = Path(folder, SIGNATURE_NAME)
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
        text = temporary.read_text(encoding="utf-8")
    written.write(text)
    return target
