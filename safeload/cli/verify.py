"""``safeload verify``: compare files with a manifest, a model signature or the digests of a cache."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import STATUS, add_json, add_threads, bar, columns, painter, storage_options
from .streams import refuse

_EPILOG = f"""examples:
  safeload verify Llama-3.2-1B/ --against llama.sha256.json
  safeload verify Llama-3.2-1B/ --key release.pub
  safeload verify model/ --against model.sig --certificate root.pem
  safeload verify hf://owner/name
  safeload verify ollama://llama3.2

Without --against, safeload uses model.sig or a manifest next to the files, or the digests of a cache. A manifest
and a cache prove integrity only: they do not say who made the files. Signatures need the package model-signing.

{STATUS}"""


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = (
        "Hash every file of a model, and compare it with a model signature, with a manifest (check "
        "--write-manifest), or with the digests that the caches of the Hub and of ollama keep. Files that are "
        "missing, changed or not listed are named."
    )
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", help="a folder, a file, a URL, or an ollama:// name")
    parser.add_argument("--against", metavar="FILE", help="manifest or signature; default: the one next to the files")
    add_trusted(parser)
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        help="for URLs: an option of the filesystem; may be repeated",
    )
    add_threads(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_trusted(parser: Any) -> None:
    """Add the options for whom to trust: a key or certificates."""
    trusted = parser.add_mutually_exclusive_group()
    trusted.add_argument("--key", metavar="FILE", help="public key of the signer of the signature, in PEM")
    trusted.add_argument(
        "--certificate", metavar="FILE", action="append", help="certificate to trust, in PEM; may be repeated"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report about ``options.path`` and return the exit status."""
    from ..operations.trust.verify import verify  # imported here: it would slow down the other commands

    refuse(options.path, "verify compares files")
    with bar("verify") as progress:
        report = verify(
            options.path,
            _against(options),
            storage_options=storage_options(options),
            threads=options.threads,
            progress=progress,
        )
    if options.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        paint = painter()
        for line in report.lines(columns()):
            print(paint(line, "good" if report.ok else "error") if line == report.verdict else line)
    return 0 if report.ok else 1


def _against(options: argparse.Namespace) -> Any:
    """Return the document to verify against; with a key and without a file, the signature beside the model."""
    if options.against is None and (options.key is not None or options.certificate):
        from ..formats.verifying import signature_beside

        return against_of(signature_beside(options.path), options)
    return against_of(options.against, options)


def against_of(path: str | None, options: argparse.Namespace) -> Any:
    """Return a manifest or signature with the options of `add_trusted`, as `safeload.verify` takes it."""
    if path is None or (options.key is None and not options.certificate):
        return path
    from ..stores.signature import Signature

    return Signature(path, key=options.key, certificate=options.certificate)
