"""Policies for gates: requirements for a model in a TOML or JSON file, beyond those of `check`.

A policy is a table with these keys, all of which may be missing:

1. ``pickles``: "none" refuses every pickle, "harmless" allows those that `scan` calls harmless.
2. ``nan``: false requires that the values of all tensors were read; NaN and infinity are errors anyway.
3. ``schema``: true requires a known architecture; a list names the allowed ones.
4. ``formats``, ``dtypes``: lists of what is allowed, as `info` names them.
5. ``signed_by`` or ``certificates``: the public key, or the trusted certificates, of a model signature, relative to the
   policy; ``signature``: the signature, relative to the model.
6. ``license``: true requires that a license is stated in the metadata, the config or the model card; a list names the
   allowed ones.
7. ``warnings``: false makes warnings errors, except value.constant and value.zero.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from typing import Any, NamedTuple

from ...base.text import plural, show
from ...checkpoint import Checkpoint
from ...errors import FormatError, SafeloadError, one_line
from ...formats.verifying import signature_beside
from ...stores.files import Files
from ...stores.json_file import parse_json, read_content
from ...stores.places import places_of
from ...stores.signature import Signature
from ...stores.store import read_at
from ..validate.findings import HARMLESS_WARNINGS, CheckReport, Finding, error
from .scan import scan
from .verify import verify

# Keys of metadata and of a config that state a license; lists of the model card can follow on several lines.
_LICENSE_KEYS = ("license", "general.license", "modelspec.license")
_CARD, _MOST_OF_CARD = "README.md", 1 << 20
_LICENSE_LINE = re.compile(r"^license:[ \t]*(.*)$", re.MULTILINE)
_ITEM = re.compile(r"[ \t]*-[ \t]+(.+)")
# Findings listed for each rule.
_LISTED = 20


class Policy(NamedTuple):
    """The rules of a policy; None if a rule is missing."""

    pickles: str | None = None
    nan: bool | None = None
    schema: bool | list[str] | None = None
    formats: list[str] | None = None
    dtypes: list[str] | None = None
    signed_by: str | None = None
    certificates: list[str] | None = None
    signature: str | None = None
    license: bool | list[str] | None = None
    warnings: bool | None = None


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


# What each key accepts, and its description for messages.
_ACCEPTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "pickles": (lambda value: value in ("none", "harmless"), '"none" or "harmless"'),
    "nan": (lambda value: value is False, "false"),
    "schema": (lambda value: value is True or _is_names(value), "true or a list of schemas"),
    "formats": (_is_names, "a list of formats"),
    "dtypes": (_is_names, "a list of dtypes"),
    "signed_by": (lambda value: isinstance(value, str) and bool(value), "the path of a public key"),
    "certificates": (_is_names, "a list of paths of certificates"),
    "signature": (lambda value: isinstance(value, str) and bool(value), "the path of a signature"),
    "license": (lambda value: value is True or _is_names(value), "true or a list of licenses"),
    "warnings": (lambda value: value is False, "false"),
}


def read_policy(path: str) -> Policy:
    """Read a policy.

    Raises:
        ValueError: it is not TOML or JSON, or has an unknown key or a wrong value.
        FormatError: it is not a regular file, or too large.
        OSError: it cannot be read.
    """
    content, _ = read_content(path, "the policy")
    rules = _parse(path, content)
    for key, value in rules.items():
        if key not in _ACCEPTED:
            raise ValueError(f"{path}: unknown key {show(key)}, expected one of {', '.join(_ACCEPTED)}")
        accepts, description = _ACCEPTED[key]
        if not accepts(value):
            raise ValueError(f"{path}: {key} must be {description}, got {show(value)}")
    if "signed_by" in rules and "certificates" in rules:
        raise ValueError(f"{path}: a signature has a key (signed_by) or certificates, not both")
    if "signature" in rules and not {"signed_by", "certificates"} & rules.keys():
        raise ValueError(f"{path}: signature needs signed_by or certificates: without a key it proves nothing")
    folder = os.path.dirname(path)
    if "signed_by" in rules:
        rules["signed_by"] = os.path.join(folder, rules["signed_by"])
    if "certificates" in rules:
        rules["certificates"] = [os.path.join(folder, name) for name in rules["certificates"]]
    return Policy(**rules)


def _parse(path: str, content: bytes) -> dict[str, Any]:
    if path.endswith(".json"):
        try:
            return parse_json(content, "the policy", path)
        except FormatError as problem:
            raise ValueError(str(problem)) from None
    if not path.endswith(".toml"):
        raise ValueError(f"{path}: a policy is a .toml or .json file")
    if sys.version_info < (3, 11):
        raise ValueError(f"{path}: TOML needs Python 3.11 or later; write the policy as JSON")
    try:
        rules: dict[str, Any] = import_module("tomllib").loads(content.decode())
        return rules
    except ValueError as problem:
        raise ValueError(f"{path}: not TOML: {problem}") from None


def check_policy(path: str, policy: Policy, report: CheckReport, opening: Mapping[str, Any], *, complete: bool) -> None:
    """Add errors to a report for each rule that a model breaks.

    Args:
        path: of the model.
        report: of `check`.
        opening: keyword arguments of `safeload.open`.
        complete: False if `check` was told to leave out values.
    """
    options = opening.get("storage_options")
    if policy.pickles is not None:
        report.add(_pickles(path, policy.pickles, options))
    if policy.nan is False:
        report.add(_values(report, complete))
    if policy.schema is not None:
        report.add(_schema(report, policy.schema))
    if policy.formats is not None and report.format not in policy.formats:
        text = f"the format is {report.format or 'unknown'}, but the policy allows {', '.join(policy.formats)}"
        report.add([error("policy.format", None, text)])
    if policy.dtypes is not None or policy.license is not None:
        report.add(_opened(path, policy, opening))
    if policy.signed_by is not None or policy.certificates is not None:
        report.add(_signature(path, policy, options))
    if policy.warnings is False:
        refused = [finding for finding in report.warnings if finding.code not in HARMLESS_WARNINGS]
        report.add(
            error("policy.warning", finding.tensor, f"{finding.message} ({finding.code})") for finding in refused
        )


def _pickles(path: str, allowed: str, options: Mapping[str, Any] | None) -> Iterator[Finding]:
    scanned = scan(path, storage_options=options)
    if allowed == "none" and scanned.pickles:
        yield error("policy.pickle", None, f"{plural(scanned.pickles, 'pickle')} here, but the policy allows none")
    bad = [finding for finding in scanned.findings if finding.verdict != "harmless"]
    for finding in bad[:_LISTED]:
        yield error("policy.pickle", None, f"{finding.where}: {finding.name} is {finding.verdict}: {finding.reason}")
    for where, reason in scanned.unreadable[:_LISTED]:
        yield error("policy.pickle", None, f"{where} cannot be searched for pickles: {reason}")


def _values(report: CheckReport, complete: bool) -> Iterator[Finding]:
    unchecked = [finding for finding in report.notes if finding.code == "quantization.unchecked"]
    if not complete:
        yield error("policy.nan", None, "the policy requires that all values are read, but some were left out")
    for finding in unchecked:
        yield error("policy.nan", finding.tensor, f"values that could be NaN were not checked: {finding.message}")


def _schema(report: CheckReport, allowed: bool | list[str]) -> Iterator[Finding]:
    if report.schema is None or not report.compared:
        yield error("policy.schema", None, "no schema describes this model, but the policy requires one")
    elif isinstance(allowed, list) and report.schema not in allowed:
        text = f"the model is {report.schema}, but the policy allows {', '.join(allowed)}"
        yield error("policy.schema", None, text)


def _opened(path: str, policy: Policy, opening: Mapping[str, Any]) -> list[Finding]:
    """Return the findings about dtypes and licenses, for which the checkpoint is opened."""
    from ...loading.entry import open as open_checkpoint

    findings: list[Finding] = []
    try:
        with open_checkpoint(path, **opening) as checkpoint:
            if policy.dtypes is not None:
                findings += _dtypes(checkpoint, policy.dtypes)
            licenses = [] if policy.license is None else _licenses_in(checkpoint)
    except (SafeloadError, OSError) as problem:
        return [error("policy.unread", None, f"dtypes and licenses are unknown: {one_line(problem)}")]
    if policy.license is not None:
        (text,), files = places_of((path,), opening.get("storage_options"))
        findings += _license([*licenses, *_licenses_of_card(text, files)], policy.license)
    return findings


def _dtypes(checkpoint: Checkpoint, allowed: list[str]) -> Iterator[Finding]:
    known = {name.lower() for name in allowed}
    for info in checkpoint.tensors.values():
        if info.dtype.lower() not in known:
            yield error("policy.dtype", info.name, f"is {info.dtype}, but the policy allows {', '.join(allowed)}")


def _licenses_in(checkpoint: Checkpoint) -> list[str]:
    stated = []
    for source in (checkpoint.metadata, checkpoint.config or {}):
        for key in _LICENSE_KEYS:
            value = source.get(key) if isinstance(source, Mapping) else None
            stated += [value] if isinstance(value, str) and value.strip() else []
    return stated


def _licenses_of_card(path: str, files: Files) -> list[str]:
    """Return the licenses in the front matter of the README.md beside a model."""
    try:
        folder = path if files.is_folder(path) else files.split(path)[0]
        with closing(files.open(files.join(folder, _CARD))) as store:
            text = read_at(store, 0, min(store.size, _MOST_OF_CARD)).decode(errors="replace")
    except (OSError, SafeloadError):
        return []
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---":
        return []
    end = next((k for k, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), 0)
    head = "\n".join(lines[1:end])
    match = _LICENSE_LINE.search(head)
    if match is None:
        return []
    if match[1].strip():
        return [name.strip().strip("\"'") for name in match[1].strip().strip("[]").split(",")]
    names = []
    for line in head[match.end() :].lstrip("\n").split("\n"):
        item = _ITEM.fullmatch(line)
        if item is None:
            break
        names.append(item[1].strip().strip("\"'"))
    return names


def _license(stated: list[str], allowed: bool | list[str]) -> Iterator[Finding]:
    if not stated:
        text = "no license in the metadata, in config.json or in the model card, but the policy requires one"
        yield error("policy.license", None, text)
    elif isinstance(allowed, list):
        known = {name.lower() for name in allowed}
        for name in dict.fromkeys(stated):
            if name.lower() not in known:
                text = f"the license is {show(name)}, but the policy allows {', '.join(allowed)}"
                yield error("policy.license", None, text)


def _signature(path: str, policy: Policy, options: Mapping[str, Any] | None) -> Iterator[Finding]:
    place = signature_beside(path)
    if policy.signature is not None:
        folder = path if os.path.isdir(path) or "://" in path else os.path.dirname(path)
        place = f"{folder.rstrip('/')}/{policy.signature}" if folder else policy.signature
    try:
        signature = Signature(place, key=policy.signed_by, certificate=policy.certificates)
        verified = verify(path, signature, storage_options=options)
    except (SafeloadError, OSError) as problem:
        yield error("policy.signature", None, one_line(problem))
        return
    for file in verified.faults[:_LISTED]:
        yield error("policy.signature", None, f"{file.file}: {file.status}: {file.reason}")
