"""Names of the files of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

METADATA = ".metadata"
_RANK = re.compile(r"__([0-9]{1,9})\.metadata", re.ASCII)
SHARD = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors", re.ASCII)


def ranks_of(names: Sequence[str]) -> list[str]:
    """Return the metadata files of a checkpoint without collectives, in the order of the processes."""
    matches = [match for name in names if (match := _RANK.fullmatch(name)) is not None]
    return [match[0] for match in sorted(matches, key=lambda match: (int(match[1]), match[0]))]


def shards_of(names: Sequence[str]) -> list[str]:
    """Return the sharded safetensors of a checkpoint, in the order of processes and numbers."""
    matches = [match for name in names if (match := SHARD.fullmatch(name)) is not None]
    return [match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])))]
