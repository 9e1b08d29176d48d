"""What messages and notes say about a folder: what it is, which of its files hold weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.text import clip, printable
from ..errors import FormatError, SafeloadError
from ..stores.files import Files
from ..stores.json_file import read_json
from .registry import WEIGHT_SUFFIXES

# Files that mark a diffusers pipeline and a PEFT adapter.
_PIPELINE, _ADAPTER = "model_index.json", "adapter_config.json"
# How adapters are spelled that PEFT writes in capitals.
_SPELLED = {"LORA": "LoRA", "ADALORA": "AdaLoRA"}

# Suffixes of files that hold weights: messages and notes list these files.
_SUFFIXES = {*WEIGHT_SUFFIXES, ".h5", ".msgpack"}
_WEIGHTS = re.compile(rf".*({'|'.join(map(re.escape, sorted(_SUFFIXES)))}|\.index(\.\w+)?\.json)", re.DOTALL)
# Prefixes of files that trainers leave beside weights.
_STATE = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
# Most names that a message lists, and most characters of each.
_LISTED, _NAME = 20, 100

# Checkpoints of other libraries: a pattern of the name of a file, and what the folder is.
_FOREIGN = (
    # https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
    (r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt", "an Orbax checkpoint: orbax.checkpoint reads it"),
    (r"saved_model\.pb", "a TensorFlow SavedModel: tf.saved_model.load(folder).variables gives its weights"),
    (r".*\.data-\d{5}-of-\d{5}", "a TensorFlow checkpoint: tf.train.load_checkpoint(folder) reads it"),
    (r"flax_model.*\.msgpack", "a Flax model: flax.serialization.msgpack_restore(data) reads its file"),
    (r"tf_model\.h5", "a Keras model: h5py.File(path) reads its file"),
)
# JSON files beside weights: name, keys that only they have, and what they are.
_JSON = (
    ("config.json", {"model_type", "architectures"}, "a model's config.json"),
    (_ADAPTER, {"peft_type"}, "the configuration of an adapter"),
    (_PIPELINE, {"_class_name"}, "the configuration of a diffusers pipeline"),
    ("tokenizer.json", {"added_tokens", "pre_tokenizer"}, "a tokenizer"),
    ("tokenizer_config.json", {"tokenizer_class"}, "the configuration of a tokenizer"),
    ("generation_config.json", {"eos_token_id", "bos_token_id"}, "a model's generation_config.json"),
)


def listed(names: Sequence[str], most: int = _LISTED) -> str:
    """Names of files for a message."""
    return ", ".join(map(_shown, names[:most])) + (" ..." if len(names) > most else "")


def _with_weights(path: str, folders: Sequence[str], files: Files) -> list[str]:
    """The subfolders that contain weights."""
    some = folders[: 32 if files.remote else 1000]
    found = files.each(lambda name: _has_weights(files.join(path, name), files), some)
    return [name for name, has in zip(some, found, strict=True) if has]


def _has_weights(folder: str, files: Files) -> bool:
    try:
        return any(_WEIGHTS.fullmatch(name) for name, _ in files.listing(folder))
    except (OSError, SafeloadError):
        return False


def no_weights(path: str, names: Sequence[str], folders: Sequence[str], files: Files) -> str:
    """The message for a folder without weights that can be opened: what it is, or what is in it."""
    inner = _with_weights(path, folders, files)
    path = files.shown(path)
    if _PIPELINE in names and inner:
        return f"{path}: a diffusers pipeline, its weights are in {listed(inner)}: open one of them"
    kind = next((kind for mark, kind in _FOREIGN if any(re.fullmatch(mark, name) for name in names)), None)
    if kind is not None:
        return f"{path}: this is {kind}"
    there = f"{path}: no weights here; found {listed(sorted([*names, *folders])) or 'nothing'}"
    return f"{there}. There are weights in {listed(inner)}: open one of them" if inner else there


def not_an_index(path: str, content: Mapping[str, Any], files: Files) -> str | None:
    """What a JSON file is that is not an index, by its name or its keys; None where unknown."""
    folder, base = files.split(path)
    kind = next((kind for mark, keys, kind in _JSON if base == mark or keys & content.keys()), None)
    if kind is None:
        return None
    return f"this is {kind}, not an index: " + (
        "open the folder that it is in" if _has_weights(folder, files) else "there are no weights beside it"
    )


def _adapter(config: str, files: Files) -> str:
    """What an adapter is, as far as its configuration says."""
    try:
        said = read_json(config, _ADAPTER, files)
    except (FormatError, OSError):
        return "an adapter (PEFT)"
    kind, rank, base = said.get("peft_type"), said.get("r"), said.get("base_model_name_or_path")
    name = f"a {_shown(_SPELLED.get(kind, kind))} adapter (PEFT" if isinstance(kind, str) else "an adapter (PEFT"
    name += f", r {rank})" if isinstance(rank, int) and 0 < rank < 1 << 20 else ")"
    return f"{name} of {_shown(base)}" if isinstance(base, str) and base else name


def _shown(text: str) -> str:
    return clip(printable(text), _NAME)


def notes_of(names: Sequence[str], folders: Sequence[str], used: set[str], path: str, files: Files) -> list[str]:
    """What kind of folder was opened, and which of its files were not; ``used`` are the names of those that were."""
    notes = []
    if _ADAPTER in names:
        kind = _adapter(files.join(path, _ADAPTER), files)
        notes.append(f"{kind}: changes to the weights of a base model, not a model of its own")
    if _PIPELINE in names:
        notes.append(
            f"a diffusers pipeline, with more weights in {listed(_with_weights(path, folders, files)) or 'no folder'}"
        )
    others = (name for name in names if name not in used and not name.startswith(_STATE))
    over = [name for name in others if _WEIGHTS.fullmatch(name)]
    if over:
        notes.append(f"passed over: {listed(over)}")
    if any(name.startswith("consolidated") for name in over):
        notes.append("consolidated files hold the same weights under their publisher's own names: open them by path")
    return notes
