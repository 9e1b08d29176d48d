"""Names of the files of a ZeRO checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing

from ...base.paths import is_bare
from ...stores.files import Files
from ...stores.store import read_at

# Holds the name of the folder of the last step.
LATEST = "latest"
_LONGEST = 1024
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt", re.ASCII)
# Files of model parallelism other than ZeRO: experts, pipeline stages.
_OTHER = re.compile(r"(?:layer_.*|expp_rank_.*|.*expert.*)[-_](?:model|optim)_states\.pt", re.ASCII)


def tag_of(path: str, visible: Sequence[tuple[str, bool]], files: Files) -> str | None:
    """Return the folder that ``latest`` names; None if there is no such file or folder."""
    if (LATEST, False) not in visible:
        return None
    with closing(files.open(files.join(path, LATEST))) as store:
        tag = read_at(store, 0, _LONGEST).decode("utf-8", "replace").strip()
    if not is_bare(tag) or (tag, True) not in visible:
        return None
    folder = files.join(path, tag)
    return folder if is_checkpoint([name for name, _ in files.listing(folder)]) else None


def is_checkpoint(names: Sequence[str]) -> bool:
    """Return True if a folder has files of both kinds of states."""
    return bool(model_states(names) and optimizer_states(names))


def model_states(names: Sequence[str]) -> list[str]:
    """Return the files of model states, in the order of the processes."""
    matches = [match for name in names if (match := _MODEL.fullmatch(name)) is not None]
    return [match[0] for match in sorted(matches, key=lambda match: (int(match[2]), int(match[1] or 0), match[0]))]


def optimizer_states(names: Sequence[str]) -> list[str]:
    """Return the files of optimizer states, in the order of the processes."""
    matches = [match for name in names if (match := _OPTIMIZER.fullmatch(name)) is not None]
    return [match[0] for match in sorted(matches, key=lambda match: (int(match[2]), int(match[1]), match[0]))]


def rank_of(name: str) -> int:
    """Return the number of the process in the name of a file."""
    match = _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)
    return 0 if match is None else int(match[1] or 0)


def parallel(names: Sequence[str]) -> list[str]:
    """Return the files that only tensor, pipeline or expert parallelism writes."""
    divided = [
        name
        for name in names
        if (match := _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)) is not None and int(match[2]) > 0
    ]
    return divided + [name for name in names if _OTHER.fullmatch(name)]
