"""Plans: an operation over checkpoints as pieces, each of which any process with the same files can do.

Plans and pieces are plain data, as JSON has it: no code, no tensors. A piece names its tensors, and the files that hold
them, each with the size and the time of the last change that it had when the plan was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..._version import __version__
from ...base.text import plural, printable, show
from ...errors import FormatError, UnsupportedError

_T = TypeVar("_T")

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
        found: list[dict[str, Any]] = field(self, "pieces", list)
        return found

    @property
    def id(self) -> str:
        """Differs where options, sources, or safeload's version differ."""
        found: str = field(self, "id", str)
        return found

    def __repr__(self) -> str:
        what = f"{self.get('operation')}, {plural(len(self.get('pieces', ())), 'piece')}"
        return f"<Plan {show(self.get('folder'))}: {what}>"


def field(piece: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """A field of a plan or of one of its pieces.

    Raises:
        FormatError: it is missing, or of another type.
    """
    value = piece.get(key) if isinstance(piece, Mapping) else None
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"a piece of a plan has {show(key)}, {_KINDS[kind]}; found {show(value)}")
    return value


_KINDS: Mapping[type, str] = {str: "text", int: "an integer", float: "a number", list: "a list", dict: "an object"}


def texts(piece: Mapping[str, Any], key: str) -> list[str]:
    """A field that is a list of text; see `field`."""
    found = field(piece, key, list)
    for item in found:
        if not isinstance(item, str):
            raise FormatError(f"a piece of a plan has {show(key)}, a list of text; found {show(item)} in it")
    return found


def bare_name(name: str) -> str:
    """The bare name of a file.

    Raises:
        FormatError: it leads elsewhere.
    """
    if not name or name in (".", "..") or not _NOT_BARE.isdisjoint(name):
        raise FormatError(f"a piece of a plan writes files with bare names; found {show(name)}")
    return name


def check_version(piece: Mapping[str, Any]) -> None:
    """Refuses a plan, or a piece of it, that another version has made.

    Raises:
        UnsupportedError: of another version.
        FormatError: it is neither.
    """
    made = field(piece, "version", str)
    if made != __version__:
        raise UnsupportedError(
            f"safeload {printable(made)} made the plan, and this is safeload {__version__}: "
            "every worker needs the same version"
        )


def piece_of(operation: str, sources: Sequence[Mapping[str, Any]], **content: Any) -> dict[str, Any]:
    """A piece of an operation; fields that are None are left out."""
    given = {key: value for key, value in content.items() if value is not None}
    return {"operation": operation, "version": __version__, **given, "sources": list(sources)}


def as_plain(fields: Iterable[Any]) -> list[Any]:
    """The fields of a result as plain data: JSON has lists, and no tuples."""
    return [list(value) if isinstance(value, tuple) else value for value in fields]


def of_plain(fields: Iterable[Any]) -> list[Any]:
    """The inverse of `as_plain`."""
    return [tuple(value) if isinstance(value, (list, tuple)) else value for value in fields]
