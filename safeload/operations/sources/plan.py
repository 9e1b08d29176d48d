"""Plans: operations on checkpoints, divided into pieces. Any process with the same files can run a piece.

Plans and pieces are plain data, as JSON has it: no code, no tensors. A piece names its tensors and their files,
with the size of each file and the time of its last change when the plan was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..._version import __version__
from ...base.text import plural, printable, show
from ...errors import FormatError, UnsupportedError, exported, public
from .executors import check_path

# Prefixes of messages.
INVALID_PLAN, INVALID_PIECE = "invalid plan", "invalid piece"

DIGITS = 16  # of `digest_of`
# File names with these characters can lead out of the folder of a plan.
_NOT_BARE = frozenset("/\\:\0")


@exported()
class Plan(dict[str, Any]):
    """A conversion divided into pieces, as a dict of plain data: `plan_convert` makes it, `finalize` completes it.

    A plan can be pickled or written as JSON; ``Plan(json.loads(text))`` restores it.

    Example:
        >>> import json, safeload
        >>> plan = safeload.plan_convert("tiny-llama", "half", dtype="float16", max_shard_size="64KB")
        >>> again = safeload.Plan(json.loads(json.dumps(plan)))
        >>> again == plan, again.pieces[0]["file"]
        (True, 'model-00001-of-00005.safetensors')
    """

    @property
    @public
    def pieces(self) -> list[dict[str, Any]]:
        """Arguments for `run_piece`. Pieces can run in any order, on any machine, and more than once."""
        pieces: list[dict[str, Any]] = self._checked("pieces", list, "a list")
        return pieces

    @property
    @public
    def id(self) -> str:
        """A hash of the options, the sources and safeload's version."""
        plan_id: str = self._checked("id", str, "a string")
        return plan_id

    def _checked(self, key: str, kind: type, kind_name: str) -> Any:
        value = self.get(key)
        if not isinstance(value, kind):
            raise FormatError(f"{INVALID_PLAN}: {key} must be {kind_name}, got {show(value)}")
        return value

    def __repr__(self) -> str:
        content = f"{self.get('operation')}, {plural(len(self.get('pieces', ())), 'piece')}"
        return f"<Plan {show(self.get('folder'))}: {content}>"


def bare_name(name: Any) -> str:
    """Return a file name, unless it leads out of its folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or not _NOT_BARE.isdisjoint(name):
        raise FormatError(f"{INVALID_PLAN}: files must have bare names, got {show(name)}")
    check_path(name)
    return name


def check_version(plan: Any, prefix: str = INVALID_PLAN) -> None:
    """Refuse a plan, piece or note of another version of safeload."""
    version = plan.get("version") if isinstance(plan, Mapping) else None
    if not isinstance(version, str):
        raise FormatError(f"{prefix}: version must be a string, got {show(version)}")
    if version != __version__:
        raise UnsupportedError(
            f"the plan was made by safeload {printable(version)}, but this is safeload {__version__}: "
            "every worker needs the same version"
        )


def digest_of(value: Any) -> str:
    """Return a short hash of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
