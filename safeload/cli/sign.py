"""``safeload sign``: write a model signature."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..base.text import printable
from .common import STATUS, add_overwrite
from .streams import refuse

# The variable with the password of the key: arguments are visible to other users of the machine.
PASSWORD = "SAFELOAD_KEY_PASSWORD"

_EPILOG = f"""examples:
  openssl ecparam -name prime256v1 -genkey -noout -out release.pem
  openssl ec -in release.pem -pubout -out release.pub
  safeload sign Llama-3.2-1B/ --key release.pem
  safeload verify Llama-3.2-1B/ --key release.pub

The signature is an OpenSSF model signature, which `model_signing verify` accepts too. Signing needs the package
model-signing. The password of an encrypted key comes from the environment variable {PASSWORD}.

{STATUS}"""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Sign all files of a folder, or a file, with an elliptic-curve key: model.sig in the folder, or "
        "FILE.sig beside the file."
    )
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", help="a folder or a file")
    parser.add_argument("--key", metavar="FILE", required=True, help="private key, in PEM: P-256, P-384 or P-521")
    parser.add_argument(
        "--certificate", metavar="FILE", help="the signer's certificate, in PEM, to put into the signature"
    )
    parser.add_argument(
        "--chain", metavar="FILE", action="append", default=[], help="an intermediate certificate; may be repeated"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the signature; default: model.sig in the folder, or FILE.sig"
    )
    parser.add_argument(
        "--shard-size", metavar="BYTES", type=int, help="sign ranges of this size instead of whole files"
    )
    parser.add_argument("--symlinks", action="store_true", help="sign the files that symbolic links lead to")
    parser.add_argument(
        "--ignore", metavar="PATH", action="append", default=[], help="leave out a file or folder; may be repeated"
    )
    add_overwrite(parser, "replace the output even if it is not a signature")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the signature of ``options.path`` and return the exit status."""
    from ..operations.trust.sign import sign  # imported here: it would slow down the other commands

    refuse(options.path, "sign signs files")
    refuse(options.output, "--output needs a file")
    if options.shard_size is not None and options.shard_size < 1:
        raise ValueError(f"--shard-size must be at least 1, got {options.shard_size}")
    path = sign(
        options.path,
        key=options.key,
        certificate=options.certificate,
        chain=options.chain,
        password=os.environ.get(PASSWORD),
        output=options.output,
        shard_size=options.shard_size,
        symlinks=options.symlinks,
        ignore=options.ignore,
        overwrite=options.overwrite,
    )
    print(f"signed: {printable(path)}", file=sys.stderr)
    return 0
