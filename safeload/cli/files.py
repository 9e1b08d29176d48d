"""The commands about whole files: ``safeload edit``, ``patch``, ``scan``, ``verify``, ``sign``, ``ls``, ``families``.

Each imports the function that it calls when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

from ..core.names import Selection, renamed
from ..core.showing import table
from ..core.text import plural, printable, show
from ..errors import NoMatchError, SafeloadError
from . import common
from .parsers import (
    CACHE,
    DASK,
    JSON,
    JSON_LINES,
    METADATA,
    OF_SEVERAL,
    POSITIVE,
    RECURSIVE,
    STORAGE_OPTION,
    THREADS,
    TRUSTED,
    argument,
    command,
    flag,
    one_of,
    repeated,
)

# ---- edit ----

_RECOVERED = {
    "nothing": "no edit was interrupted",
    "old": "the interrupted edit was undone",
    "new": "the edit was complete",
}


@command(
    "Change the metadata and the tensor names of a safetensors file or folder, and remove tensors; or "
    "change the metadata of a GGUF file.",
    r"""examples:
  safeload edit model.safetensors --metadata author=me --metadata format
  safeload edit model.safetensors --rename '^model\.' '' --drop 'rope.*'
  safeload edit model.gguf --metadata general.name='My model'
  safeload edit --recover model.safetensors

The header is rewritten in place if it has room; any other change makes a new file and renames it. After a crash the
file is the old one or the new one; if safeload reports an interrupted edit, run --recover.""",
    argument("path", "FILE", "a safetensors or GGUF file, or a folder of safetensors shards"),
    METADATA,
    repeated(
        "--rename",
        ("REGEX", "REPLACEMENT"),
        r"rename tensors like Python's re.sub: \1 is the first group",
        nargs=2,
        default=[],
    ),
    repeated("--drop", "PATTERN", "remove tensors by name, for example 'vision.*'", default=[]),
    flag("--force", "edit a file that has several hard links"),
    flag(
        "--recover",
        "complete an interrupted edit and remove temporary files of killed processes; change nothing else",
    ),
)
def edit(options: argparse.Namespace) -> int:
    """Edit ``options.path`` in place."""
    from ..editing.edit import edit, recover_edit

    common.refuse(options.path, "edit changes files")
    if options.recover == bool(options.metadata or options.rename or options.drop):
        raise ValueError("pass either changes (--metadata, --rename, --drop) or --recover")
    if options.recover:
        print(f"{common.shown(options.path)}: {_RECOVERED[recover_edit(options.path)]}")
        return 0
    with edit(options.path, force=options.force) as file:
        left = Selection(drop=options.drop).of([*file])
        dropped = {*file}.difference(left)
        new_names = _new_names(left, options.rename)
        for text in options.metadata:
            key, sign, value = text.partition("=")
            if sign:
                file.metadata[key] = _value(file.metadata, key, value)
            elif key in file.metadata:
                del file.metadata[key]
            else:
                raise ValueError(f"--metadata {show(key)}: there is no such key to remove; pass KEY=VALUE to add one")
        for name in dropped:
            del file[name]
        # By way of free names, because a new name can be the old name of another tensor.
        free = (name for k in count() if (name := f"renamed.{k}") not in file and name not in new_names.values())
        between = dict(zip(new_names, free, strict=False))
        for old, name in between.items():
            file.rename(old, name)
        for old, name in between.items():
            file.rename(name, new_names[old])
    changes = len(options.metadata) + len(dropped) + len(new_names)
    print(f"{common.shown(options.path)}: {plural(changes, 'change')}")
    return 0


def _value(metadata: Mapping[str, Any], key: str, text: str) -> Any:
    """Parse a value like the old value of its key; new values are text."""
    import numpy as np

    old = metadata.get(key)
    if old is None or isinstance(old, str):
        return text
    value = common.parsed(text)
    kinds: dict[type[Any], Any] = {bool: bool, int: int, float: (int, float), list: list, np.ndarray: list}
    kind = next(kind for kind in kinds if isinstance(old, kind))
    if not isinstance(value, kinds[kind]) or (kind is not bool and isinstance(value, bool)):
        noun = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a JSON list")
        raise ValueError(f"--metadata {show(key)}: expected {noun}, got {show(text)}")
    if isinstance(old, np.ndarray):
        return np.array(value, old.dtype)
    return float(value) if kind is float else value


def _new_names(names: list[str], renames: list[list[str]]) -> dict[str, str]:
    """Return the new names of the tensors that expressions rename, each of which must rename one."""
    new = dict(zip(names, names, strict=True))
    for pair in renames:
        step = renamed(new.values(), [(pair[0], pair[1])])
        if all(old == name for old, name in step.items()):
            raise NoMatchError(f"--rename {show(pair[0])} changes none of {plural(len(names), 'name')}")
        new = {name: step[now] for name, now in new.items()}
    return {old: name for old, name in new.items() if old != name}


# ---- patch ----


@command(
    "Make a patch from two safetensors files, or apply a patch.",
    """examples:
  safeload patch make step-100.safetensors step-200.safetensors patch.safetensors
  safeload patch apply step-100.safetensors patch.safetensors step-200.safetensors
  safeload patch apply model.safetensors patch.safetensors

A patch holds the changed elements, the new header and digests of both files: applied to its base it recreates the new
file byte for byte, and a different base is refused. Its layout is TRL's; TRL's own patches need --no-check.""",
    argument("action", None, "make a patch, or apply it", choices=("make", "apply")),
    argument("base", "BASE", "the old file, or its URL"),
    argument("second", "NEW|PATCH", "make: the new file; apply: the patch"),
    argument("destination", "DESTINATION", "make: the patch; apply: the result; default: replace BASE", nargs="?"),
    flag("--no-check", "apply: do not compare digests, which TRL's own patches lack"),
    flag("--overwrite", "replace an existing destination"),
)
def patch(options: argparse.Namespace) -> int:
    """Make or apply a patch."""
    from .. import apply_patch, make_patch

    base, second, destination, overwrite = options.base, options.second, options.destination, options.overwrite
    for path in (base, second, destination):
        common.refuse(path, "patch reads and writes files")
    if options.action == "make":
        if destination is None or options.no_check:
            raise ValueError("safeload patch make takes BASE NEW PATCH")
        print(f"{common.shown(destination)}: {make_patch(base, second, destination, overwrite=overwrite)}")
        return 0
    result = apply_patch(base, second, destination, check=not options.no_check, overwrite=overwrite)
    digest = "" if result is None or options.no_check else f", digest {result}"
    print(f"{common.shown(destination or base)}: patched{digest}")
    return 0


# ---- scan ----

# Exit status of wrong usage (EX_USAGE of sysexits.h), because 2 means dangerous.
_USAGE = 64
_COLOURS = {"harmless": "good", "unknown": "warning", "dangerous": "error"}


@command(
    "List every global that pickles in files name, with a verdict: harmless (on the allowlist), "
    "unknown or dangerous. Pickles are found in torch checkpoints, NumPy and joblib files, and inside zip and tar "
    "archives (.nemo, .keras, torch.package), nested, compressed, appended or at an offset. Nothing is executed "
    "or imported.",
    """examples:
  safeload scan model.pth
  safeload scan downloads/ other.nemo
  safeload scan hf://owner/name
  safeload scan model.pkl --json | jq -r '.findings[] | select(.verdict != "harmless") | .name'""",
    argument("paths", "PATH", "a file, a folder, a URL, or - for stdin; may be repeated", nargs="+"),
    flag("--all", "list harmless globals too; --json always lists them"),
    STORAGE_OPTION,
    JSON,
    lambda parser: parser.set_defaults(wrong_usage=_USAGE),
    status="0 everything is harmless, 1 something is unknown or cannot be read, 2 something is dangerous, 64 wrong "
    "usage. Of several paths, the worst counts.",
)
def scan(options: argparse.Namespace) -> int:
    """Print the findings about ``options.paths``."""
    from .. import ScanReport, scan

    total = ScanReport()
    for path in options.paths:
        try:
            report = scan(common.source(path), storage_options=options.storage_options)
        except (OSError, SafeloadError, ModuleNotFoundError) as error:
            common.complain(error)
            total.unreadable.append((common.shown(path), str(error)))
            continue
        total.add(report)
    if options.json:
        common.print_json(total.to_dict())
        return total.status
    lines = total.lines(common.columns(), harmless=options.all)
    verdict, colour = f"{total.verdict}:", _COLOURS[total.verdict]
    common.print_lines((line, colour) if line.startswith(verdict) else line for line in lines)
    return total.status


# ---- verify ----


@command(
    "Hash every file of a model, and compare it with a manifest, a model signature, another model, or the digests that "
    "the caches of the Hub and of ollama keep. Files that are missing, changed or not listed are named, and so are "
    "changed tensors. With --write, write the manifest: a SHA-256 of each file and of each tensor.",
    """examples:
  safeload verify Llama-3.2-1B/ --write
  safeload verify Llama-3.2-1B/ --write llama.sha256.json
  safeload verify Llama-3.2-1B/ --against llama.sha256.json
  safeload verify copy/ --against Llama-3.2-1B/
  safeload verify Llama-3.2-1B/ --key release.pub
  safeload verify model/ --against model.sig --certificate root.pem
  safeload verify hf://owner/name
  safeload verify ollama://llama3.2

Without --against, safeload uses model.sig or a manifest next to the files, or the digests of a cache. A manifest
and a cache prove integrity only: they do not say who made the files. Signatures need the package model-signing.""",
    argument("paths", "PATH", "a folder, a file, a URL, or an ollama:// name; may be repeated", nargs="+"),
    RECURSIVE,
    one_of(
        argument("--against", "FILE", "manifest, signature or other model; default: the document next to the files"),
        argument(
            "--write",
            "FILE",
            "write a manifest; default: sha256.json in the folder, or NAME.sha256.json beside the file",
            nargs="?",
            const=True,
        ),
    ),
    flag("--tensors", "compare only tensors, in whatever files they are"),
    flag("--overwrite", "replace the file of --write even if safeload did not write it"),
    TRUSTED,
    STORAGE_OPTION,
    THREADS,
    DASK,
    CACHE,
    JSON_LINES,
    lambda parser: parser.set_defaults(failed=2),
    status="0 the same, 1 something differs, 2 a comparison is not possible, or wrong usage. " + OF_SEVERAL,
)
def verify(options: argparse.Namespace) -> int:
    """Print the report about ``options.paths``."""
    common.refuse_several(options, "against", *([] if options.write is True else ["write"]))
    common.refuse(options.write, "--write needs a file")
    return common.for_each(options, partial(_verified, options))


def _verified(options: argparse.Namespace, path: str, executor: Any) -> common.Outcome:
    from .. import verify

    common.refuse(path, "verify compares files")
    against = options.against
    if against is None and (options.key is not None or options.certificate):
        from ..trust.digests import signature_beside

        against = signature_beside(path)
    with common.bar("verify") as progress:
        same = common.given(options, "write tensors overwrite storage_options threads cache")
        report = verify(path, against_of(against, options), executor=executor, progress=progress, **same)
    colour = "good" if report.ok else "error"

    def show() -> None:
        lines = report.lines(common.columns())
        common.print_lines((line, colour) if line == report.verdict else line for line in lines)

    def written() -> None:
        counts = plural(len(report.files), "file"), plural(len(report.tensors), "tensor")
        print(f"{printable(report.source)}: SHA-256 of {' and '.join(counts)}", file=sys.stderr)

    first = (f"{check[0]} {check.status}" for check in report.faults[:1])
    line = "; ".join([report.verdict, *first])
    return int(not report.ok), line, report.to_dict, written if options.write is not None else show


def against_of(path: str | None, options: argparse.Namespace) -> Any:
    """Return a manifest or signature with the options of `TRUSTED`, as `safeload.verify` takes it."""
    if path is None or (options.key is None and not options.certificate):
        return path
    from .. import Signature

    return Signature(path, key=options.key, certificate=options.certificate)


# ---- sign ----

# The variable with the password of the key: arguments are visible to other users of the machine.
_PASSWORD = "SAFELOAD_KEY_PASSWORD"


@command(
    "Sign all files of a folder, or a file, with an elliptic-curve key: model.sig in the folder, or "
    "FILE.sig beside the file.",
    f"""examples:
  openssl ecparam -name prime256v1 -genkey -noout -out release.pem
  openssl ec -in release.pem -pubout -out release.pub
  safeload sign Llama-3.2-1B/ --key release.pem
  safeload verify Llama-3.2-1B/ --key release.pub

The signature is an OpenSSF model signature, which `model_signing verify` accepts too. Signing needs the package
model-signing. The password of an encrypted key comes from the environment variable {_PASSWORD}.""",
    argument("path", "PATH", "a folder or a file"),
    argument("--key", "FILE", "private key, in PEM: P-256, P-384 or P-521", required=True),
    argument("--certificate", "FILE", "the signer's certificate, in PEM, to put into the signature"),
    repeated("--chain", "FILE", "an intermediate certificate", default=[]),
    argument("-o --output", "FILE", "the signature; default: model.sig in the folder, or FILE.sig"),
    argument("--shard-size", "BYTES", "sign ranges of this size instead of whole files", type=POSITIVE),
    flag("--symlinks", "sign the files that symbolic links lead to"),
    repeated("--ignore", "PATH", "leave out a file or folder", default=[]),
    flag("--overwrite", "replace the output even if it is not a signature"),
)
def sign(options: argparse.Namespace) -> int:
    """Write the signature of ``options.path``."""
    from ..trust.verify import sign

    common.refuse(options.path, "sign signs files")
    common.refuse(options.output, "--output needs a file")
    same = common.given(options, "key certificate chain output shard_size symlinks ignore overwrite")
    path = sign(options.path, password=os.environ.get(_PASSWORD), **same)
    print(f"signed: {printable(path)}", file=sys.stderr)
    return 0


# ---- ls ----


@command(
    "List the models in the cache of the Hugging Face Hub, in ollama, in LM Studio and in the named "
    "folders: name, format, size, and the path that opens each. No weights are read.",
    """examples:
  safeload ls
  safeload ls ~/models /data/checkpoints
  safeload ls --json | jq -r '.models[] | select(.format == "gguf") | .path'

Every path in the last column opens with `safeload info` and the other commands.""",
    argument("folders", "FOLDER", "a folder to search, with its subfolders", nargs="*"),
    JSON,
    status="0 success, 1 a folder does not exist, 2 wrong usage.",
)
def ls(options: argparse.Namespace) -> int:
    """Print the models."""
    from .. import local_models

    models = local_models(options.folders)
    if options.json:
        common.print_json(models.to_dict())
    else:
        first, *lines = models.lines(common.columns())
        common.print_lines([(first, "head" if models else ""), *lines])
    return 0


# ---- families ----

_HEAD = ("family", "class", "schema", "llama.cpp", "way back", "MLX", "engines", "mmproj", "models")
_YES = {True: "yes", False: ""}


@command(
    "List the families of models that safeload knows: the class of transformers, whether check has a schema of the "
    "tensors, the architecture in GGUF files for llama.cpp, whether these become folders for transformers again, "
    "whether folders of mlx-lm can be written and converted back, whether models can be written in the formats of "
    "engines, and whether vision parts are written for llama.cpp (mmproj).",
    """examples:
  safeload families
  safeload families --json | jq -r '.families[] | select(.gguf != "") | .architectures[0]'""",
    JSON,
    status="0 success, 2 wrong usage.",
)
def families(options: argparse.Namespace) -> int:
    """Print the families."""
    from .. import families

    known = families()
    if options.json:
        common.print_json({"families": [family._asdict() for family in known]})
        return 0
    rows = [
        (
            *(f.name, next(iter(f.architectures), ""), _YES[f.schema], f.gguf, _YES[f.way_back], _YES[f.mlx]),
            *(_YES[f.engines], "yes" if f.mmproj else "no", f.about),
        )
        for f in known
    ]
    head, *lines = table(_HEAD, rows, right=frozenset(), columns=common.columns())
    common.print_lines([(head, "head"), *lines, "", f"{len(known)} families"])
    return 0
