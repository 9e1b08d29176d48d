"""Checkpoints by the names of their files: sets with numbers (``P-00001-of-00003.safetensors``), indexes and files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

# A name in a set: what comes before the numbers, the number, the number of files, the suffix with a variant before it.
PART = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})((?:\.[\w-]+)?\.[a-z]+)", re.ASCII | re.DOTALL)
# A set with more missing files is not listed: its names are wrong.
MOST_MISSING = 10_000

# Files of transformers and diffusers: an index is named STEM.SUFFIX.index[.VARIANT].json, a file STEM[.VARIANT].SUFFIX,
# a shard STEM[.VARIANT]-n-of-m[.VARIANT].SUFFIX. Suffixes in the order of preference, with their usual stems likewise.
INDEX_NAME = re.compile(r"(.+)(\.safetensors|\.bin)\.index(?:\.([^.]+))?\.json", re.DOTALL)
STEMS = {
    ".safetensors": ("model", "diffusion_pytorch_model"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model", "adapter_model", "model"),
}
FILE, INDEXED, SET = "file", "index", "set"
DCP_METADATA, ORBAX_METADATA = ".metadata", "_METADATA"
# Files of processes: torch.distributed's metadata and sharded safetensors, ZeRO's states, FSDP's parts.
DCP_RANK = re.compile(r"__([0-9]{1,9})\.metadata", re.ASCII)
DCP_SHARD = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors", re.ASCII)
ZERO_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt", re.ASCII)
ZERO_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt", re.ASCII
)
FSDP_RANK = re.compile(r"model_world_size_([0-9]{1,9})_rank_([0-9]{1,9})\.pt", re.ASCII)
# Prefixes of files with training state.
TRAINING_STATE = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")


def in_order(pattern: re.Pattern[str], names: Sequence[str], *groups: int) -> list[str]:
    """Return the names that match a pattern, in the order of the numbers in these groups."""
    matches = [match for name in names if (match := pattern.fullmatch(name)) is not None]
    return [match[0] for match in sorted(matches, key=lambda match: (*(int(match[k] or 0) for k in groups), match[0]))]


class NumberedFiles(NamedTuple):
    """Files with numbers in their names: ``P-00001-of-00003.safetensors``."""

    stem: str  # before the numbers
    total: str  # expected number of files, as the names give it
    suffix: str  # after the numbers
    files: dict[int, str]  # name by number

    @property
    def complete(self) -> bool:
        return len(self.files) == max(self.files) == int(self.total) and min(self.files) == 1

    def missing(self, limit: int = MOST_MISSING) -> list[str]:
        width = len(self.total) if len(self.total) < 5 else 5
        numbers = (k for k in range(1, int(self.total) + 1) if k not in self.files)
        return [f"{self.stem}-{k:0{width}}-of-{self.total}{self.suffix}" for k in islice(numbers, limit)]

    @property
    def in_order(self) -> list[str]:
        return [self.files[number] for number in sorted(self.files)]


def sets_of(names: Sequence[str], pattern: re.Pattern[str] = PART) -> list[NumberedFiles]:
    """Group files with numbers in their names; ``pattern`` has the groups of `PART`."""
    sets: dict[tuple[str, str, str], NumberedFiles] = {}
    for name in names:
        if (match := pattern.fullmatch(name)) is not None and int(match[3]) > 0:
            key = match[1], match[3], match[4]
            sets.setdefault(key, NumberedFiles(*key, {})).files[int(match[2])] = name
    return list(sets.values())


class Whole(NamedTuple):
    """A checkpoint in a folder, by its file names."""

    kind: str  # a file, an index or a set of shards
    suffix: str
    stem: str
    variant: str
    files: list[str]  # to open

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """The smallest is preferred: without a variant, by suffix, by stem, by kind."""
        stems = STEMS[self.suffix]
        usual = self.stem in stems and self.kind != SET  # libraries read no set without its index
        place = stems.index(self.stem) if usual else len(stems)
        file_first = usual and self.stem != "diffusion_pytorch_model"  # as transformers; diffusers reads the index
        kinds = (FILE, INDEXED) if file_first else (INDEXED, SET, FILE)
        return self.variant != "", [*STEMS].index(self.suffix), place, kinds.index(self.kind)


def whole_checkpoints(names: Sequence[str], suffixes: Sequence[str]) -> list[Whole]:
    """List the checkpoints of transformers and diffusers in a folder, the preferred checkpoint first.

    Without a variant before variants, safetensors before torch; then ``model.safetensors``, its index;
    diffusion_pytorch_model's index, its file; any other index, a complete set, any other safetensors file.
    """
    whole: list[Whole] = []

    def add(kind: str, suffix: str, stem: str, variant: str, files: list[str]) -> None:
        usual = next((usual for usual in STEMS[suffix] if stem.startswith(f"{usual}.")), None)
        if usual is not None:
            stem, variant = usual, stem.removeprefix(f"{usual}.")
        if kind != FILE or suffix != ".bin" or stem in STEMS[suffix]:  # other .bin files can be anything
            whole.append(Whole(kind, suffix, stem, variant, files))

    for name in names:
        if (index := INDEX_NAME.fullmatch(name)) is not None and index[2] in suffixes:
            add(INDEXED, index[2], index[1], index[3] or "", [name])
    for suffix in suffixes:
        excluded = TRAINING_STATE if suffix == ".bin" else ()
        files = [name for name in names if name.endswith(suffix) and not name.startswith(excluded)]
        numbered = sets_of(files)
        for shards in numbered:
            if shards.complete:
                add(SET, suffix, shards.stem, shards.suffix.removesuffix(suffix).removeprefix("."), shards.in_order)
        for name in set(files).difference(*(shards.files.values() for shards in numbered)):
            add(FILE, suffix, name.removesuffix(suffix), "", [name])
    return sorted(whole, key=lambda each: (each.rank, each.files))


def other_form(names: Sequence[str]) -> list[list[str]]:
    """Return the file and the index of the preferred checkpoint in a folder, if the folder has both."""
    whole = whole_checkpoints(names, [*STEMS])
    first = [each for each in whole if each.kind != SET and each[1:4] == whole[0][1:4]]
    return [each.files for each in first] if len(first) > 1 and first[0] is whole[0] else []
