"""Plans: an operation over checkpoints as pieces, each of which any process with the same files can do.

Plans and pieces are plain data, as JSON has it: no code, no tensors. A piece names its tensors, and the files that hold
them, each with the size and the time of the last change that it had when the plan was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..._version import __version__
from ...base.text import plural, printable, show
from ...errors import FormatError, UnsupportedError
from .catalog import Catalog
from .codec import decode
from .sources import Source, opened

# Beginnings of messages.
INVALID_PLAN, INVALID_PIECE = "invalid plan", "invalid piece"

_AnyPiece = TypeVar("_AnyPiece", bound="Piece")
_AnyTensorPiece = TypeVar("_AnyTensorPiece", bound="TensorPiece")

# What `os.fspath` of a piece's file may not have: a piece writes only into the folder of its plan.
_NOT_BARE = frozenset("/\\:\0")


class Plan(dict[str, Any]):
    """A conversion as pieces: made by `plan_convert`, completed by `finalize`. A dict of plain data, as JSON has it.

    ``json.dumps`` and pickle take it; ``Plan(json.loads(text))`` is the same plan again.

    Example:
        >>> import json, safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> again = safeload.Plan(json.loads(json.dumps(plan)))
        >>> again == plan, again.pieces[0]["file"]
        (True, 'model-00001-of-00005.safetensors')
    """

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The pieces, each an argument of `run_piece`. They may be done in any order, anywhere, and more than once."""
        pieces: list[dict[str, Any]] = self._checked("pieces", list, "a list")
        return pieces

    @property
    def id(self) -> str:
        """Differs where options, sources, or safeload's version differ."""
        plan_id: str = self._checked("id", str, "a string")
        return plan_id

    def _checked(self, key: str, kind: type, described: str) -> Any:
        value = self.get(key)
        if not isinstance(value, kind):
            raise FormatError(f"{INVALID_PLAN}: {key} must be {described}, got {show(value)}")
        return value

    def __repr__(self) -> str:
        what = f"{self.get('operation')}, {plural(len(self.get('pieces', ())), 'piece')}"
        return f"<Plan {show(self.get('folder'))}: {what}>"


def bare_name(name: str) -> str:
    """The bare name of a file.

    Raises:
        FormatError: it leads elsewhere.
    """
    if not name or name in (".", "..") or not _NOT_BARE.isdisjoint(name):
        raise FormatError(f"a plan names files by bare names, got {show(name)}")
    return name


def check_version(plan: Any, what: str = INVALID_PLAN) -> None:
    """Refuse a plan, or a piece of one, that another version of safeload made.

    Raises:
        UnsupportedError: of another version.
        FormatError: it has no version.
    """
    version = plan.get("version") if isinstance(plan, Mapping) else None
    if not isinstance(version, str):
        raise FormatError(f"{what}: version must be a string, got {show(version)}")
    if version != __version__:
        raise UnsupportedError(
            f"safeload {printable(version)} made the plan, and this is safeload {__version__}: "
            "every worker needs the same version"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Piece:
    """A piece of an operation: the fields of all operations."""

    operation: str
    version: str = __version__
    sources: tuple[Source, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorPiece(Piece):
    """A piece that reads tensors."""

    names: tuple[str, ...]


def decode_piece(cls: type[_AnyPiece], plain: Any) -> _AnyPiece:
    """Return a piece that may come from anywhere.

    Raises:
        UnsupportedError: another version of safeload planned it.
        FormatError: a field is missing, unknown, or of the wrong type.
    """
    check_version(plain, INVALID_PIECE)
    return decode(cls, plain, INVALID_PIECE)


@contextmanager
def open_piece(
    cls: type[_AnyTensorPiece], plain: Any, storage_options: Mapping[str, Any] | None
) -> Iterator[tuple[_AnyTensorPiece, Catalog]]:
    """Decode a piece that reads tensors, and open its files; see `decode_piece` and `opened`."""
    piece = decode_piece(cls, plain)
    with opened(piece.sources, piece.names, storage_options) as catalog:
        yield piece, catalog
