"""The families of models that safeload knows, a JSON file each in ``families``, read when first needed.

``FAMILIES.md`` describes their fields: of a family, and of its forms in llama.cpp, mlx-lm and as a vision tower,
``gguf``, ``mlx`` and ``mmproj``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..core.files import read_data
from ..core.forking import cached_property
from ..core.text import show, similar
from ..errors import exported, public
from .diffusion import ARCHITECTURE, is_of_tower
from .renamed import InMemory, in_memory
from .schema import (
    MAX_LAYERS,
    PLACEHOLDER,
    PREFIX,
    WEIGHT,
    Config,
    ConfigError,
    Schema,
    SchemaEntry,
    language_of,
    listed_in,
)

_FOLDER = Path(__file__).parent / "families"
# Fields that a family does not inherit.
_OWN = {"about", "architectures", "model_types", "formats", "keys", "like", "without", "engines", "omitted", "parallel"}
_FORMS = ("mlx", "gguf", "mmproj")
# Fields of these that a family does not inherit.
_OWN_FORM = {"classes", "nested", "text_type", "types"}
# Fields of ``gguf`` that are not attributes, or others.
_READ_OTHERWISE = {"keys", "rope", "windows", "defaults", "tensors", "layers", "more_layers", "classes", "without"}
_READ_OTHERWISE |= {"like", "counts"}

_Content = Mapping[str, Any]
# A class with the head of mlx-lm's models.
_GENERATES = "ForCausalLM"

# What messages call the metadata.
METADATA = "metadata"
U32, F32, BOOL, TEXT = "u32", "f32", "bool", "string"
TEXTS, NUMBERS, BOOLS, FLOATS = "array of strings", "array of numbers", "array of bools", "array of floats"

# Keys for the names and shapes of all tensors.
SIZES = ("block_count", "embedding_length", "attention.head_count")
# Types of keys of every file.
GENERAL_TYPES = {
    "general.architecture": TEXT,
    "general.name": TEXT,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.scores": NUMBERS,
    "tokenizer.ggml.token_type": NUMBERS,
    "tokenizer.ggml.merges": TEXTS,
    "tokenizer.ggml.bos_token_id": U32,
    "tokenizer.ggml.eos_token_id": U32,
    "tokenizer.ggml.unknown_token_id": U32,
    "tokenizer.ggml.padding_token_id": U32,
    "tokenizer.ggml.add_bos_token": BOOL,
    "tokenizer.ggml.add_eos_token": BOOL,
}
# Values of ``tokenizer.ggml.model``.
TOKENIZERS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "no_vocab", "none", "gemma4", "hybriddna")
NO_TOKENS = ("no_vocab", "none")

# llama.cpp's base of rotations for a file without ``rope.freq_base``.
USUAL_BASE = 10_000.0

# Numbers in names: at most a layer number and an expert number.
_NUMBERS = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,9})(?=\.)", re.ASCII)
PLACE = "{}"


class GgufKey(NamedTuple):
    """A metadata key."""

    types: tuple[str, ...]  # that llama.cpp accepts; the first is written
    config: tuple[str, ...] = ()  # keys with the value, in order of preference, ``a.b`` for b in the object a
    default: Any = None
    optional: bool = False  # it is not written without a value
    null: bool = False  # a config made from a file without the key has null there
    value: str | None = None  # an integer expression over the config in place of ``config``, which is for the way back
    each_layer: str | None = None  # expression of the number of layers: an array of the value for each, unless it is 0
    when: str | None = None  # an expression; the key is not written if it is 0
    values: Mapping[str, Any] = MappingProxyType({})  # what is written for each text of the config
    times: float = 1.0  # factor of a number
    size: int = 0  # items of a list, filled up with zeros


class GgufLayout(NamedTuple):
    """How a tensor of llama.cpp holds the values of a published tensor."""

    heads: tuple[str, ...] = ()  # keys of the number of heads: the rows of each half of a head alternate
    flat: bool = False  # all axes after the first are the columns
    number: str | None = None  # expression of the number of the layer in llama.cpp, if it differs
    rows: tuple[Mapping[str, Any], ...] = ()  # pieces of rows, the fields of `Piece`, in the order of llama.cpp
    columns: tuple[Mapping[str, Any], ...] = ()  # likewise
    items: str | None = None  # expression of the number of matrices that the rows are, or that are stacked
    shape: tuple[str, ...] | None = None  # expressions; None for that of the source
    function: str | None = None  # "negative_exp": -exp(x), or "softplus": log(1 + exp(x)), of each value
    times: tuple[Mapping[str, str], ...] = ()  # factors: "key" of the config, and "begin" and "end" of its rows
    add: float = 0.0  # to each value
    stack: bool = False  # the published tensor is one of the experts
    part: tuple[int, int] | None = None  # number of the part of the rows of each expert, and of the parts
    interleaved: bool = False  # rows of the parts alternate
    transposed: bool = False  # the published matrix of each expert is transposed
    inputs: str | None = None  # expression of its columns: a matrix with so many is not transposed
    row: bool = False  # the published tensor has an axis of size 1 more
    when: str | None = None  # an expression over the config; the published tensor goes elsewhere if it is 0

    @property
    def rearranges(self) -> bool:
        """True if the shape of the published tensor does not follow from that of llama.cpp's."""
        return bool(self.flat or self.rows or self.columns or self.items or self.shape or self.transposed)

    def of_experts(self, name: str) -> bool:
        """Return True if the published tensor has the matrices of all experts, in parts or transposed."""
        return self.part is not None or (self.transposed and is_of_experts(name))


def is_of_experts(name: str) -> bool:
    """Return True for a tensor of llama.cpp or mlx-lm with the matrices or biases of all experts."""
    return any(part in name for part in ("_exps.", ".switch_mlp.", ".switch_glu.", ".experts."))


class GgufRope(NamedTuple):
    """Rotary embeddings."""

    types: tuple[str, ...]  # none for a model without rotations
    base: float = USUAL_BASE  # of a config without a base
    unless: float | None = None  # the base that is not written
    # Number of rotated elements to write: "head" for all of a head, "share" for a part of it, "partial" for a part and
    # the original context length, "keys" for that in the family's keys.
    dimensions: str | None = None
    share: float = 1.0  # of a config without ``partial_rotary_factor``
    parameters: tuple[str, ...] = ()  # more parameters of rotations, which the family's keys hold or that need none
    sliding: bool = False  # layers with a sliding window have a base of their own
    single_base: bool = False  # True if llama.cpp computes all layers with the same base, whatever the file says


class GgufWindows(NamedTuple):
    """Sliding windows."""

    full_every: int | None = None  # distance of layers without a window
    kind: str = "sliding_attention"  # of the others in ``layer_types``
    written: str | None = None  # key of the layers with a window
    ignored: bool = False  # True if llama.cpp attends to all positions
    also_full: tuple[str, ...] = ()  # more items of ``layer_types`` for layers without a window

    @property
    def kinds_without(self) -> tuple[str, ...]:
        """The layers without a window, as ``layer_types`` has them."""
        return ("full_attention", *self.also_full)


class GgufForm:
    """How llama.cpp has a family: the fields of ``gguf``, with their defaults."""

    architecture: str
    required: tuple[str, ...]
    assumes: Mapping[str, tuple[Any, ...]]
    activations: Mapping[str, tuple[str, ...]]
    text_type: str
    text_family: str | None = None
    renames: Mapping[str, tuple[str, str]] = MappingProxyType({})
    left_out: Mapping[str, str] = MappingProxyType({})
    counted: Mapping[str, str] = MappingProxyType({})
    needs: Mapping[str, str] = MappingProxyType({})
    computed: Mapping[str, str | Mapping[str, Any]] = MappingProxyType({})
    per_layer: tuple[str, ...] = ()
    complete = False
    kept_layers: str | None = None
    query_scale_by_width: int | None = None
    restores: tuple[str, ...] = ()
    chosen_by: str | None = None
    when: str | None = None
    add_space_prefix = True
    tokens: Mapping[str, int] = MappingProxyType({})
    end_of_turn: str | None = None
    end_of_turn_listed = False
    end_of_text: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})
    suppress_tokens = False
    tied = False
    nested: Mapping[str, Any] = MappingProxyType({})
    shown_by: Mapping[str, tuple[str, Any, Any]] = MappingProxyType({})
    tokenizer: str | None = None
    pooling = False

    engine = "llama.cpp"
    blocks = "block_count"  # key of the number of layers
    leaves_out = False  # a published tensor that nothing needs is left out without a word

    def __init__(self, family: Mapping[str, Any], class_name: str, model_types: tuple[str, ...]) -> None:
        self._family = family
        self._content = content = family["gguf"]
        self.class_name, self.model_type = class_name, model_types[0]  # of transformers
        self.model_types = model_types
        own = {key: value for key, value in content.items() if key not in _READ_OTHERWISE}
        vars(self).update({"text_type": self.model_type, **own})
        self.keys = {key: GgufKey(**fields) for key, fields in content["keys"].items()}
        self.rope, self.windows = GgufRope(**content["rope"]), GgufWindows(**content["windows"])
        self.defaults: Mapping[str, int | str] = family["defaults"]  # of the config
        self.omitted: Mapping[str, Any] = family.get("omitted", {})
        self.usually_tied = bool(family["defaults"].get("tie_word_embeddings"))  # if a config lacks the key

    @property
    def title(self) -> str:
        """The name in llama.cpp."""
        return self.architecture

    @property
    def holder(self) -> str:
        """What has the tensors, in messages."""
        return f"{self.engine}'s {self.title}"

    @property
    def required_keys(self) -> list[str]:
        """The keys of the model, without the architecture, that llama.cpp refuses a file without."""
        epsilons = [name for name, key in self.keys.items() if name.endswith("_epsilon") and not key.optional]
        return ["context_length", *epsilons, *SIZES, *self.required]

    @property
    def of_text(self) -> GgufForm:
        """The form of the family as which a language model comes back."""
        return self if self.text_family is None else family_files()[self.text_family].gguf

    @property
    def embedding(self) -> str:
        """The published name of the embedding without its prefix."""
        name, usual = self._origin("token_embd.weight"), self._family.get("prefixes", ("",))[0]
        return name.removeprefix(usual) if usual and name.startswith(usual) else ".".join(name.split(".")[-2:])

    @property
    def head(self) -> str:
        """The published name of the head."""
        return self._origin("output.weight")

    @property
    def prefix(self) -> str:
        """The usual prefix of published names."""
        return self._origin("token_embd.weight").removesuffix(self.embedding)

    def _origin(self, name: str) -> str:
        """Return the first published tensor of a tensor in files of llama.cpp."""
        origin = self._family["gguf"]["tensors"].get(name, {}).get("from", "lm_head.weight")
        return origin if isinstance(origin, str) else next(iter(origin))

    def published_name(self, name: str) -> str:
        """Return a name as it stands in the table: with the usual prefix, and not as transformers has it in memory."""
        usual, *more = self._family.get("prefixes", ("",))
        text: str
        for text in (name, *(usual + name.removeprefix(prefix) for prefix in more if name.startswith(prefix))):
            pattern, numbers = without_numbers(text)
            if pattern in self.targets:
                return text
            if pattern in self._older:
                return with_numbers(self._older[pattern], numbers)
        return name

    @cached_property
    def published(self) -> Schema:
        """The published tensors."""
        return Schema.of(self.model_type, self._family)

    @cached_property
    def schema(self) -> Schema:
        """The tensors of a file."""
        names = ("defaults", "tensors", "layers", "more_layers", "counts")
        fields = {key: self._content[key] for key in names if key in self._content}
        return Schema.of(f"gguf:{self.title}", {"config": METADATA, "layers": "block_count", **fields})

    @cached_property
    def _in_memory(self) -> dict[str, InMemory]:
        """Where transformers has the published tensors, by name."""
        names = {source: None for sources in self.sources.values() for source in sources}
        return in_memory(self.class_name, self.model_type, names, self._family.get("prefixes", ("",)))

    @cached_property
    def _older(self) -> dict[str, str]:
        """The published tensors by their other names in memory."""
        return {place.alone: name for name, place in self._in_memory.items()}

    @cached_property
    def layouts(self) -> dict[str, dict[str, GgufLayout]]:
        """Published tensors of each tensor of a file, and stacks in memory, with their layouts.

        ``{}`` stands for numbers.
        """
        result = {name: dict(sources) for name, sources in self.sources.items()}
        for sources in result.values():
            for name, layout in [*sources.items()]:
                if layout.stack and (place := self._in_memory.get(name)) is not None and place.parts:
                    part = (place.part, place.parts) if place.parts > 1 else None
                    sources.setdefault(place.name, layout._replace(stack=False, items=None, part=part))
        return result

    @cached_property
    def sources(self) -> dict[str, dict[str, GgufLayout]]:
        """Published tensors of each tensor of a file."""
        return self._table()

    def _table(self) -> dict[str, dict[str, GgufLayout]]:
        origins = ((name, entry.get("from", {})) for name, entry in self._content.get("tensors", {}).items())
        tables = ((name, {origin: {}} if isinstance(origin, str) else origin) for name, origin in origins)
        return {
            PLACEHOLDER.sub(PLACE, name): {source: GgufLayout(**fields) for source, fields in table.items()}
            for name, table in tables
        }

    @cached_property
    def targets(self) -> dict[str, list[tuple[str, GgufLayout]]]:
        """The tensors of a file that each published tensor becomes a part of."""
        result: dict[str, list[tuple[str, GgufLayout]]] = {}
        for name, sources in self.layouts.items():
            for source, layout in sources.items():
                result.setdefault(source, []).append((name, layout))
        return result

    def parts_of(self, name: str) -> list[str]:
        """Return the tensors of a file that a published tensor becomes a part of."""
        pattern, numbers = without_numbers(name)
        return [place.replace(PLACE, (numbers or [""])[0]) for place, _ in self.targets.get(pattern, ())]

    def can_be_list(self, key: str) -> bool:
        """Return True if shapes follow from a key that is an array with an item for each layer."""
        return f"{key.replace('.', '_')}_list" in self._content["defaults"]

    def sizes(self, metadata: Mapping[Any, Any], names: Iterable[str], tokens: int | None) -> dict[str, Any]:
        """Return the integers of a file's metadata, and lists by layer, under the names of its schema."""
        sizes: dict[str, Any] = {}
        for key, fields in self.keys.items():
            name, value = key.replace(".", "_"), metadata.get(f"{self.architecture}.{key}")
            number, array = of_all_layers(value), value if isinstance(value, np.ndarray) else None
            if isinstance(number, int) and not isinstance(number, bool):
                sizes[name] = int(number)
            if array is not None and self.can_be_list(key) and len(array) <= MAX_LAYERS:
                sizes[f"{name}_list"] = array.tolist()
            if array is not None and fields.each_layer is not None:
                sizes[name] = array.tolist()
        if tokens is not None:
            sizes["vocab_size"] = tokens
        # Some files have the projections of q, k and v in a single matrix.
        sizes["attn_qkv"] = int(any(name.endswith(".attn_qkv.weight") for name in names))
        return sizes


def of_all_layers(value: Any) -> Any:
    """Return the integer that an array has for every layer, or else the value of a key."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size and (value == value.flat[0]).all():
        return int(value.flat[0])
    return value


def without_numbers(name: str) -> tuple[str, list[str]]:
    """Return a name with ``{}`` for each number, and the numbers."""
    return _NUMBERS.sub(PLACE, name), _NUMBERS.findall(name)


def with_numbers(pattern: str, numbers: Iterable[str]) -> str:
    """Return a name with numbers for each ``{}``, as many as there are."""
    for number in numbers:
        pattern = pattern.replace(PLACE, number, 1)
    return pattern


def is_kept_f32(name: str) -> bool:
    """Return True if llama.cpp's converter writes a tensor of any number of axes as f32."""
    kept = (
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ffn_gate_inp_shexp.weight",
        "conv1d.weight",
        "shortconv.conv.weight",
        "position_embd.weight",
        "token_types.weight",
        "indexer.proj.weight",
    )
    return name.endswith(kept) or not name.endswith(".weight")


class MmprojForm(GgufForm):
    """How llama.cpp has a vision tower and its projector: the fields of ``mmproj``, with their defaults."""

    architecture = "clip"
    required = ()
    assumes: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    towers: tuple[str, ...]
    token_ids: Mapping[str, str] = MappingProxyType({})
    dtypes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, family: Mapping[str, Any], class_name: str, model_types: tuple[str, ...]) -> None:
        tower = {"rope": {"types": ()}, "windows": {}, "defaults": {}, **family["mmproj"]}
        own = {"gguf": tower, "defaults": {}, "omitted": tower.get("omitted", {})}
        super().__init__(own, class_name, model_types)

    @property
    def title(self) -> str:
        """The type of the projector."""
        keys = (self.keys.get(name) for name in PROJECTORS)
        return next(str(key.default) for key in keys if key is not None)

    @property
    def required_keys(self) -> list[str]:
        return [name for name, key in self.keys.items() if not key.optional and key.when is None]

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype of a tensor, as in ``dtypes``, that does not get the requested dtype, or None."""
        usual = "F32" if is_kept_f32(name) else None
        return next((dtype for text, dtype in self.dtypes.items() if fnmatchcase(name, text)), usual)


# Keys of the type of the projector; the second in files that have several towers.
PROJECTORS = ("projector_type", "vision.projector_type")


class MlxForm(GgufForm):
    """How mlx-lm has a family: its own table of tensors, and the keys of the config that llama.cpp's form names."""

    engine = "mlx-lm"
    leaves_out = True

    def __init__(self, family: Mapping[str, Any], class_name: str, model_types: tuple[str, ...]) -> None:
        super().__init__(family, class_name, model_types)
        self._content = content = family["mlx"]
        self.types: Mapping[str, str] = content.get("types") or dict.fromkeys(model_types, "")
        self.left_out = content.get("left_out", {})
        self.kept_layers = content.get("kept_layers")
        self.tied = content.get("tied", False)
        self.renames, self.counted, self.complete = {}, {}, False
        self.eight_bits: tuple[str, ...] = content.get("eight_bits", ())
        self.unquantized: Mapping[str, str] = content.get("unquantized", {})
        self.uncast: tuple[str, ...] = content.get("uncast", ())
        self.knows_rope_parameters: bool = content.get("knows_rope_parameters", False)
        self.newer_keys: Mapping[str, str] = content.get("newer_keys", {})
        self.older_values: Mapping[str, Mapping[str, str]] = content.get("older_values", {})
        self.needed_keys: tuple[str, ...] = content.get("needed_keys", ())
        self.in_every_layer: str | None = content.get("in_every_layer")

    @property
    def holder(self) -> str:
        return self.engine

    @property
    def of_text(self) -> MlxForm:
        return self if self.text_family is None else family_files()[self.text_family].mlx

    @cached_property
    def _entries(self) -> dict[str, SchemaEntry]:
        """The published tensors of a model that generates text, with ``{}`` for numbers."""
        named: dict[str, SchemaEntry] = {}
        for entry in self.published.entries:
            classes = entry.architectures
            if not classes or any(
                fnmatchcase(each, text) for each in (self.class_name, _GENERATES) for text in classes
            ):
                for name in (entry.name, *entry.also):
                    named.setdefault(PLACEHOLDER.sub(PLACE, name.replace(PREFIX, self.prefix)), entry)
        return named

    @cached_property
    def _published(self) -> dict[str, str]:
        """The role of each published tensor; without a schema, of llama.cpp's sources."""
        if self._entries:
            return {name: entry.role for name, entry in self._entries.items()}
        tensors = self._family["gguf"]["tensors"].values()
        sources = ((entry.get("from", {}), entry.get("role", WEIGHT)) for entry in tensors)
        return {name: role for origin, role in sources for name in ((origin,) if isinstance(origin, str) else origin)}

    @cached_property
    def sources(self) -> dict[str, dict[str, GgufLayout]]:
        """Published tensors of each tensor, with their layouts; others than in the table keep their names."""
        own = self._table()
        named = {source for sources in own.values() for source in sources}
        begins = self._content.get("renames", {}).items()
        for name in self._published:
            if name not in named and not any(fnmatchcase(name, text) for text in self.left_out):
                place = next((new + name.removeprefix(old) for old, new in begins if name.startswith(old)), name)
                own.setdefault(place, {})[name] = GgufLayout()
        return own

    def schema_of(self, model_type: str) -> Schema:
        """Return the tensors of a whole model of this type; no shape is known of rearranged ones."""
        start, known = self.types[model_type], self._entries
        entries = []
        for name, sources in self.layouts.items():
            source = next((source for source in sources if source in known), None)
            if source is None:
                continue
            entry, layout = known[source], sources[source]
            shape = None if layout.part is not None or layout.rows or layout.items else entry.shape
            if layout.transposed and shape is not None:
                shape = (*shape[:-2], shape[-1], shape[-2])
            if layout.stack and shape is not None:
                shape = (self.published.counts["expert"], *shape)
            when = " and ".join(f"({text})" for text in (entry.when, layout.when) if text is not None) or None
            tied = None if entry.tied is None else start + entry.tied.replace(PREFIX, self.prefix)
            place = start + (name if name != source else entry.name.replace(PREFIX, self.prefix))
            entries.append(SchemaEntry(place, shape, entry.role, entry.optional, when, tied, entry.tied_when))
        return replace(self.published, entries=tuple(entries), prefixes=("",), more_layers=None, architectures=())

    def role(self, name: str) -> str | None:
        """Return the role of a tensor of mlx-lm, without what stands before all names."""
        sources = self.layouts.get(without_numbers(name)[0])
        return None if sources is None else self._published.get(next(iter(sources)), WEIGHT)


class FamilyFile:
    """The file of a family; what it inherits is read when needed, because most calls need no more than its tensors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own: _Content = read_data(__name__, f"families/{name}.json")
        self.about: str = self.own["about"]
        self.architectures: tuple[str, ...] = self.own.get("architectures", ())
        self.model_types: tuple[str, ...] = self.own.get("model_types", ())
        # A variant has classes, types and schema of the family that it is like.
        self.variant_of: str | None = self.own["like"] if "when" in self.of("gguf") else None
        self.has_schema = self.own.get("tensors", "like" in self.own or None) is not None and self.variant_of is None
        # Types of whole models, which can have another one inside.
        self.mlx_types: tuple[str, ...] = tuple(self.of("mlx").get("types", self.model_types))

    def of(self, form: str) -> _Content:
        """Return the fields of a form in the file itself."""
        fields: _Content = self.own.get(form, {})
        return fields

    @property
    def parallel(self) -> Mapping[str, tuple[str, Any]] | None:
        """How ranks divide the tensors: "rows" or "columns", and the parts, by pattern of their names."""
        plan = self.own.get("parallel")
        return family_files()[plan].parallel if isinstance(plan, str) else plan

    @cached_property
    def schema(self) -> Schema:
        """The published tensors, also under their names in memory."""
        also = {name: place.alone for name, place in self.in_memory.items() if place.alone != name}
        return Schema.of(self.name, _merged(self.name)).with_also(also)

    @cached_property
    def in_memory(self) -> dict[str, InMemory]:
        """Where transformers has the published tensors, by the names of the schema."""
        content, model_type = _merged(self.name), next(iter(self.model_types), "")
        named = next(iter(self.architectures), ""), model_type, content.get("tensors", ())
        return in_memory(*named, content.get("prefixes", ("",)))

    @cached_property
    def mlx(self) -> MlxForm:
        """The tensors in mlx-lm, if it has the family."""
        return MlxForm(_merged(self.name), self.architectures[0], self.model_types)

    @cached_property
    def gguf(self) -> GgufForm:
        """The tensors and keys in llama.cpp, if it has the family."""
        base = self if self.variant_of is None else family_files()[self.variant_of]
        return GgufForm(_merged(self.name), base.architectures[0], base.model_types)

    @cached_property
    def mmproj(self) -> MmprojForm:
        """The vision tower in llama.cpp, if it has the family's."""
        return MmprojForm(_merged(self.name), self.of("mmproj")["classes"][0], self.model_types)


@cache
def family_files() -> dict[str, FamilyFile]:
    """Return all families by name."""
    return {name: FamilyFile(name) for name in sorted(path.stem for path in _FOLDER.glob("*.json"))}


@cache
def _merged(name: str) -> _Content:
    """Return the content of a family's file, merged with the family that it is like."""
    own = family_files()[name].own
    inherited = _merged(own["like"]) if "like" in own else {}
    tower = own.get("mmproj", {}).get("like")
    if tower is not None:
        inherited = {**inherited, "mmproj": _merged(tower)["mmproj"]}
    forms = {key: inherited[key] for key in _FORMS if key in own and key in inherited}
    base = {key: value for key, value in inherited.items() if key not in {*_OWN, *_FORMS}}
    base |= {key: {k: v for k, v in form.items() if k not in _OWN_FORM} for key, form in forms.items()}
    return _over(base, own) if base else own


def _over(base: _Content, own: _Content) -> dict[str, Any]:
    """Merge two objects: null removes a value, and ``without`` leaves names out of the tables of the first."""
    result = dict(base)
    for key in base.keys() & ("tensors", "keys") if "without" in own else ():
        patterns, table = own["without"], base[key].items()
        result[key] = {k: v for k, v in table if not any(fnmatchcase(k, text) for text in patterns)}
    for key, value in own.items():
        inherited = result.get(key)
        if isinstance(value, Mapping):
            value = _over(inherited if isinstance(inherited, Mapping) else {}, value)
        result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def _having(*forms: str) -> list[FamilyFile]:
    """Return the families with these forms in their files."""
    return [family for family in family_files().values() if family.own.keys() >= {*forms}]


# ---- schemas ----


@cache
def with_schema() -> dict[str, FamilyFile]:
    """Return the families with a schema by name."""
    return {name: family for name, family in family_files().items() if family.has_schema}


_LISTED = "`safeload families` lists the schemas"


def load(name: Any) -> Schema:
    """Return a schema by name.

    Raises:
        ValueError: there is no such schema, or the name is a path or the content of a schema.
    """
    if not isinstance(name, str):
        raise ValueError(f"schema must be the name of a built-in schema, got {show(name)}; {_LISTED}")
    if name in with_schema():
        return family_files()[name].schema
    advice = ""
    if name.endswith(".json") or not {"/", "\\"}.isdisjoint(name):
        advice = ": only built-in schemas are supported, no files"
    else:
        plain = name.lower().replace("-", "_").replace(".", "_")
        for close in similar(plain[:100], [*with_schema()])[:1]:
            advice = f", did you mean {show(close)}?"
    raise ValueError(f"unknown schema {show(name)}{advice}; {_LISTED}")


# ---- engines ----


def engine_model_types() -> list[str]:
    """Return the ``model_type`` of the models that all engines support."""
    return [name for family in _having("engines") for name in family.model_types]


def mlx_form(config: Mapping[str, Any] | None) -> MlxForm | None:
    """Return how mlx-lm has a model, or None if nothing is known of its tensors there."""
    config = config or {}
    whole, inner = config.get("model_type"), language_of(config).get("model_type")
    families = [each for each in _having("mlx", "gguf") if whole in each.mlx_types]
    families.sort(key=lambda family: inner not in family.model_types)
    return families[0].mlx if families else None


def mlx_model_types() -> set[str]:
    """Return the types of the models that can be written for mlx-lm."""
    return {name for family in _having("mlx", "gguf") for name in family.mlx_types}


def changed_by_mlx(config: Mapping[str, Any] | None) -> bool:
    """Return True if mlx-lm may store other values, axes or names for a model than transformers."""
    form, model_type = mlx_form(config), (config or {}).get("model_type")
    if form is not None:
        kept = all(sources.get(name) == GgufLayout() for name, sources in form.layouts.items())
        return not kept or form.types[str(model_type)] != ""
    known = (family.model_types for family in _having("mlx") if "gguf" not in family.own)
    return isinstance(model_type, str) and not any(model_type in names for names in known)


# ---- llama.cpp ----


@cache
def gguf_forms() -> dict[str, GgufForm]:
    """Return the families that llama.cpp has, by the class that stands for each."""
    return {family.architectures[0]: family.gguf for family in _having("gguf") if not family.variant_of}


@cache
def _families_by_class() -> dict[str, FamilyFile]:
    families = [family for family in _having("gguf") if family.variant_of is None]
    more = {name: family for family in families for name in family.of("gguf").get("classes", ())}
    return {**more, **{family.architectures[0]: family for family in families}}


def _for_config(family: FamilyFile, config: Mapping[str, Any]) -> GgufForm:
    """Return the variant of a family that a config needs, or the family itself."""
    for variant in family_files().values():
        if variant.variant_of == family.name:
            form = variant.gguf
            with suppress(ConfigError):  # if the config is faulty, the family says so
                if Config(config, form.defaults).evaluate(form.when or "0"):
                    return form
    return family.gguf


def gguf_form(config: Mapping[str, Any] | None) -> tuple[str | None, GgufForm | None]:
    """Return the class that a config names, that of its language model first, and the family of this class.

    A class is None if the config names none; its family is None if llama.cpp has none.
    """
    if config is None:
        return None, None
    known, inner = _families_by_class(), language_of(config)
    named = [text[:100] for each in (inner, config) for text in map(str, listed_in(each)[:1])]
    model_type = inner.get("model_type") if isinstance(inner.get("model_type"), str) else None
    of_type = [
        family
        for family in dict.fromkeys(known.values() if model_type is not None else ())
        if model_type in (*family.model_types, family.of("gguf").get("text_type"))
    ]
    for name in named:
        if name in known:
            own = known[name]
            if inner is config or name not in listed_in(config):
                of_type = []  # the class is the language model's own
            of_type.sort(key=lambda family: family.gguf.architecture != own.gguf.architecture)
            return name, _for_config((*of_type, own)[0], inner)
    if named or model_type is None:
        return (named[-1] if named else None), None
    family = next((family for family in of_type if model_type in family.model_types), None)
    if family is None:
        return f"model_type {show(model_type)}", None
    return family.architectures[0], _for_config(family, inner)


@cache
def gguf_architectures() -> dict[str, GgufForm]:
    """Return the family after which each architecture of llama.cpp is named, not those that it runs alike."""
    # With `chosen_by`, llama.cpp runs a family as the family it is like.
    forms = ((family, family.of("gguf")) for family in _having("gguf"))
    named = [family for family, own in forms if "architecture" in own and own.get("chosen_by") is None]
    named.sort(key=lambda family: not family.variant_of)  # a family goes before the variant of another
    return {family.gguf.architecture: family.gguf for family in named}


def mmproj_form(config: Mapping[str, Any] | None) -> MmprojForm | None:
    """Return the vision tower of the class that a config names, or None if llama.cpp has none."""
    named = listed_in(config)[:1]
    families = (each for each in _having("mmproj") if set(named) & {*each.of("mmproj").get("classes", ())})
    return next((family.mmproj for family in families), None)


@cache
def _projectors() -> dict[str, MmprojForm]:
    """Return the vision towers by title."""
    return {family.mmproj.title: family.mmproj for family in _having("mmproj")}


def gguf_form_of(metadata: Mapping[Any, Any]) -> GgufForm | None:
    """Return what a file of llama.cpp has: a language model or a vision tower; or None."""
    if is_of_tower(metadata):
        title = next(filter(None, (metadata.get(f"{MmprojForm.architecture}.{key}") for key in PROJECTORS)), None)
        return _projectors().get(title) if isinstance(title, str) else None
    architecture = metadata.get(ARCHITECTURE)
    return gguf_architectures().get(architecture) if isinstance(architecture, str) else None


# ---- for users ----


@exported()
class ModelFamily(NamedTuple):
    """A family of models.

    Attributes:
        name: name of the family; of its schema, if it has one.
        about: the models of the family.
        architectures: names in ``architectures`` of a config.json.
        model_types: values of ``model_type`` in a config.json.
        schema: True if `safeload.check` knows its tensors.
        gguf: architecture that `safeload.convert` writes to GGUF files and reads from them; "" if llama.cpp is not
            supported.
        engines: True if whole models can be written in the formats of engines, such as "w4a16".
        mlx: True if folders of mlx-lm can be converted to other formats, and written if the family has a class.
        way_back: True if `safeload.convert` makes folders for transformers of GGUF files.
        mmproj: True if `safeload.convert` writes the vision part for llama.cpp too, with ``part="vision"``.

    Example:
        >>> import safeload
        >>> {family.name: family.gguf for family in safeload.families()}["qwen3_moe"]
        'qwen3moe'
    """

    name: str
    about: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    schema: bool
    gguf: str
    engines: bool
    mlx: bool
    way_back: bool
    mmproj: bool


@public
def families() -> list[ModelFamily]:
    """List the families of models that safeload knows, and for what, sorted by name.

    Models of other families load and convert too, but their tensors are not compared with a schema.

    Example:
        >>> import safeload
        >>> [family.name for family in safeload.families() if family.gguf == "llama"]
        ['internlm3', 'llama', 'mistral', 'mixtral']
    """
    return [
        ModelFamily(
            name,
            family.about,
            family.architectures,
            family.model_types,
            schema=family.has_schema,
            gguf=family.gguf.architecture if "gguf" in family.own else "",
            engines="engines" in family.own,
            mlx="mlx" in family.own,
            way_back="gguf" in family.own,
            mmproj="mmproj" in family.own,
        )
        for name, family in family_files().items()
        if family.variant_of is None
    ]
