"""Opens adapters, and finds in their names which tensors of the base they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any, NamedTuple

from ..base.messages import error_about
from ..base.paths import PathLike
from ..base.text import show
from ..checkpoint import Checkpoint
from ..errors import FormatError, UnsupportedError
from ..formats.opening import open_paths
from ..stores.files import Location
from ..stores.json_file import read_json
from ..stores.places import Located
from .adapter_settings import CONFIG, AdapterSettings, parse

# What `adapters=` takes: a path, a path and its weight, or several of these in order.
One = PathLike | Located | tuple[PathLike | Located, float]
Adapters = One | Sequence[One] | None

A, B, MAGNITUDE, BIAS, VALUE = "A", "B", "magnitude", "bias", "value"
EMBEDDING_A, EMBEDDING_B = "embedding A", "embedding B"

_PREFIX = "base_model.model."
_PEFT = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_B.bias": BIAS,
    ".lora_embedding_A": EMBEDDING_A,
    ".lora_embedding_B": EMBEDDING_B,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
}
_MLX = {".lora_a": A, ".lora_b": B, ".m": MAGNITUDE}
# Each part, and those of which it needs one.
_PARTNERS = {
    A: {B},
    B: {A},
    EMBEDDING_A: {EMBEDDING_B},
    EMBEDDING_B: {EMBEDDING_A},
    BIAS: {B},
    MAGNITUDE: {B, EMBEDDING_B},
}
# Parts of names that PEFT wraps around a module, and what belongs to other methods and tools.
_SAVED, _UNUSED = ".modules_to_save.", ".original_module."
_WRAPPED = (".base_layer.", _SAVED)
_FOREIGN = ("lora_down", "lora_up", "lora.down", "lora.up", "lora_unet_", "lora_te", "_lora.", "hada_", "lokr_")
_NOT_LORA = ("trainable_tokens", "token_adapter", "lora_", "ia3_", "vera_", "prompt_", "oft_", "boft_", "ranknum")


class Adapter:
    """An open adapter.

    Args:
        checkpoint: its tensors, open.
        weight: factor of its changes.

    Attributes:
        checkpoint: its tensors.
        settings: its configuration.
        config: the configuration as it is written.
        config_at: where that is.
        weight: factor of its changes.
        modules: for each module the names of tensors by what they are.

    Raises:
        FormatError: a file breaks its format; A without its B.
        UnsupportedError: a method other than LoRA, or names of other tools.
        OSError: a file cannot be read; there is no ``adapter_config.json``.
    """

    def __init__(self, checkpoint: Checkpoint, weight: float = 1.0) -> None:
        self.checkpoint, self.weight = checkpoint, weight
        file = checkpoint.weight_files[0]
        _check_names(checkpoint)
        self.config_at = Location(file.files, file.files.join(file.files.split(file.place)[0], CONFIG))
        self.config = read_json(self.config_at.path, CONFIG, file.files)
        self.settings: AdapterSettings = parse(self.config, self.config_at.shown)
        self.modules = _modules(checkpoint, self.settings)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of its tensors."""
        return self.checkpoint.tensors[name].shape

    def is_copy(self, name: str) -> bool:
        """Whether a tensor of the base is replaced in a copy of its module, which PEFT trained in its place."""
        stored = self.modules.get(name, {}).get(VALUE)
        if stored is None or self.settings.mlx:
            return False
        return _SAVED in stored or name.rpartition(".")[0].endswith(tuple(self.settings.saved))

    def rank(self, module: str) -> int:
        """The rank of a module that has factors, all matrices of a stack together."""
        parts = self.modules[module]
        shape = self.shape(parts[A if A in parts else EMBEDDING_A])
        return sum(shape[1:2] if self.settings.mlx else shape[:1])


class Weighted(NamedTuple):
    """An adapter as it was given."""

    path: Any
    weight: float


def listed(adapters: Any) -> list[Weighted]:
    """The adapters that an argument names, in order.

    Raises:
        TypeError: it is something else than paths, and pairs of a path and a number.
        ValueError: a weight that is not finite.
    """
    if adapters is None:
        return []
    several = adapters if isinstance(adapters, (list, tuple)) and not _is_pair(adapters) else [adapters]
    found = []
    for one in several:
        path, weight = one if _is_pair(one) else (one, 1.0)
        if isinstance(path, (list, tuple, Mapping, bool, int, float)) or path is None:
            raise TypeError(f"adapters is a path, a pair (path, weight) or a list of these, found {show(one)}")
        if not abs(weight) <= 1e30:  # a NaN is not either
            raise ValueError(f"adapters: the weight of {show(path)} is {show(weight)}, not a finite number")
        found.append(Weighted(path, float(weight)))
    return found


def _is_pair(value: Any) -> bool:
    number = value[1] if isinstance(value, tuple) and len(value) == 2 else None
    return isinstance(number, Real) and not isinstance(number, bool)


def opened(
    stack: ExitStack, adapters: Iterable[Weighted], storage_options: Mapping[str, Any] | None = None
) -> list[Adapter]:
    """Opens adapters; the stack closes them."""
    found = []
    for path, weight in adapters:
        checkpoint = stack.enter_context(
            Checkpoint(open_paths(path, None, None, "refuse", True, storage_options=storage_options))
        )
        found.append(Adapter(checkpoint, weight))
    return found


def _check_names(checkpoint: Checkpoint) -> None:
    """Refuses the names of other tools, before a missing configuration is."""
    name = next((name for name in checkpoint if any(part in name for part in _FOREIGN)), None)
    if name is not None and not name.startswith(_PREFIX):
        text = "is named as diffusers and kohya do, not as PEFT or MLX: convert the adapter to PEFT first"
        raise error_about(UnsupportedError, text, path=checkpoint.path, tensor=name)


def _modules(checkpoint: Checkpoint, settings: AdapterSettings) -> dict[str, dict[str, str]]:
    """Names of an adapter's tensors, by module of the base and by what they are; of whole tensors by their own name."""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint:
        if _UNUSED in name:  # the base's own values, beside those that replace them
            continue
        module, part = _parsed(name, settings, checkpoint.path)
        known = found.setdefault(module, {})
        if part == VALUE and _SAVED in name and part in known:  # PEFT writes a saved module's trained bias twice
            continue
        if part in known and not (part == VALUE and _SAVED in known[part]):
            both = f"tensors {show(known[part])} and {show(name)}"
            raise FormatError(f"{both} of the adapter are the same part of one module", checkpoint.path, tensor=name)
        known[part] = name
    if not found:
        raise FormatError("the adapter has no tensors", checkpoint.path)
    for parts in found.values():
        if {A, EMBEDDING_A} <= parts.keys():
            both = f"tensors {show(parts[A])} and {show(parts[EMBEDDING_A])}"
            raise FormatError(f"{both} of the adapter change one module in two ways", checkpoint.path)
        for part, partners in _PARTNERS.items():
            if part in parts and not partners & parts.keys():
                text = "of the adapter stands alone: A and B belong together"
                raise error_about(FormatError, text, path=checkpoint.path, tensor=parts[part])
        if parts.keys() & {A, EMBEDDING_A} and settings.dora != (MAGNITUDE in parts):
            name = next(iter(parts.values()))
            what = "no magnitude" if settings.dora else "a magnitude"
            key = "fine_tune_type" if settings.mlx else "use_dora"
            raise FormatError(f"the module of tensor {show(name)} has {what}, against {show(key)}", checkpoint.path)
    return found


def _parsed(name: str, settings: AdapterSettings, path: str) -> tuple[str, str]:
    if settings.mlx:
        rest, suffixes = name, _MLX
    elif name.startswith(_PREFIX):
        rest, suffixes = name.removeprefix(_PREFIX), _PEFT
    else:
        text = f"does not begin with {show(_PREFIX)}, as PEFT writes it"
        raise error_about(UnsupportedError, text, path=path, tensor=name)
    for suffix, part in suffixes.items():
        if rest.endswith(suffix):
            return rest.removesuffix(suffix), part
    if any(part in rest for part in _NOT_LORA):
        text = "of the adapter belongs to another method than LoRA, which PEFT merges"
        raise error_about(UnsupportedError, text, path=path, tensor=name)
    for wrapped in _WRAPPED:
        while wrapped in rest:  # one inside the other
            rest = rest.replace(wrapped, ".")
    return rest, VALUE
