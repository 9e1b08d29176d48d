"""Rows of reading: each tensor as stored, as loaded, as float32, and the first and last of its rows."""

from pathlib import Path
from typing import Any

import safeload

from . import fixtures
from .rows import Rows, attempt, of_error, of_json, of_value


def of_fixture(fixture: fixtures.Fixture, work: Path) -> Rows:
    """All rows of what is opened."""
    subject = f"reads/{fixture.name}"
    try:
        path = fixture.make(work)
        checkpoint = safeload.open(path, **fixture.options)
    except Exception as error:
        yield f"{subject}/open", of_error(error)
        return
    with checkpoint, safeload.open(path, **fixture.options, stored=True) as stored:
        yield f"{subject}/open", f"{checkpoint.format}, {len(checkpoint)} tensors, {checkpoint.nbytes} bytes"
        yield f"{subject}/metadata", attempt(lambda: of_json(dict(checkpoint.metadata)))
        loaded = {name: attempt(lambda name=name: of_value(checkpoint[name], 16)) for name in sorted(checkpoint)}
        for name, text in loaded.items():
            yield f"{subject}/{name}", f"{text}; {views(checkpoint, name)}"
        for name in sorted(stored):
            text = attempt(lambda name=name: of_value(stored[name], 16))
            if text != loaded.get(name):
                yield f"{subject}/stored/{name}", f"{stored.tensors[name].dtype} {text}"


def of_model(fixture: fixtures.Fixture, work: Path) -> Rows:
    """One row for all tensors."""
    subject = f"reads/{fixture.name}"
    yield subject, attempt(lambda: short(safeload.load(fixture.make(work))))


def short(tensors: dict[str, Any]) -> str:
    """A digest of each tensor, as short as a list of them can be."""
    return " ".join(f"{name}={of_value(value, 8).rpartition(' ')[2]}" for name, value in tensors.items())


def views(checkpoint: safeload.Checkpoint, name: str) -> str:
    """Short digests of a tensor read in other ways; its stored dtype first."""
    calls = {
        "float32": lambda: checkpoint.load([name], dtype="float32")[name],
        "bfloat16": lambda: checkpoint.load([name], dtype="bfloat16")[name],
        "pread": lambda: checkpoint.load([name], backend="pread")[name],
        "first": lambda: checkpoint.get_slice(name)[:1],
        "last": lambda: checkpoint.get_slice(name)[-1:],
    }
    info = checkpoint.tensors[name]
    if not info.shape or not info.shape[0]:
        del calls["first"], calls["last"]
    texts = {kind: attempt(lambda call=call: of_value(call(), 8).rpartition(" ")[2]) for kind, call in calls.items()}
    return f"{info.dtype} " + " ".join(f"{kind}={text}" for kind, text in texts.items())


def of_adapter(name: str, work: Path) -> Rows:
    """A base with an adapter merged, in the base's dtype and in others; of other tools and kinds as float32 alone."""
    adapter, base = fixtures.ADAPTERS[name]
    for dtype in ("float32",) if "/" in name else (None, "float32", "bfloat16"):
        try:
            merged = safeload.load(base, adapters=adapter, dtype=dtype)
        except Exception as error:
            yield f"reads/lora/{name}/{dtype}", of_error(error)
            continue
        for key, value in sorted(merged.items()):
            yield f"reads/lora/{name}/{dtype}/{key}", of_value(value, 16)
