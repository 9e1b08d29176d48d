"""llama.cpp's file types: the block type that llama-quantize chooses for each tensor, as data.

A file type has a base, and cells for the kinds of tensors that get another type. Source:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp (llama_tensor_get_type).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...base.messages import error_about
from ...base.scheme import SCHEMES
from ...base.text import nearest, show
from ...errors import UnsupportedError
from ...models.diffusion import ARCHITECTURE, model_of

FILE_TYPE = "general.file_type"
QUANTIZATION_VERSION = "general.quantization_version"
# The version of ggml's block layouts, which llama.cpp writes into every quantized file.
CURRENT_VERSION = 2

FLOAT16 = "float16"  # the type of rows that are not whole blocks of any fallback

# Kinds of tensors, by a part of the name; the first match counts.
_OUTPUT, _EMBEDDING, _VALUE, _KEY, _ATTENTION_OUTPUT = "output", "embedding", "value", "key", "attention output"
_UP, _GATE, _DOWN, _REST = "up", "gate", "down", "rest"
_KINDS = {
    "attn_qkv.weight": _VALUE,
    "attn_kv_b.weight": _VALUE,
    "attn_v.weight": _VALUE,
    "attn_k.weight": _KEY,
    "attn_q.weight": _REST,
    "attn_output.weight": _ATTENTION_OUTPUT,
    "ffn_up": _UP,
    "ffn_gate": _GATE,
    "ffn_down": _DOWN,
}
_OUTPUT_NAME = "output.weight"
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")

# Matrices that stay as they are: whole names, and parts of names.
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
_KEPT_PARTS = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
_GLM5 = "glm5-next"
_KEPT_PARTS_OF = {
    _GLM5: (
        "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate",
        "indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight",
        "ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight",
    ),
}  # fmt: skip
# Matrices of at least 8 bits, whatever the file type.
_EIGHT_BIT_PARTS_OF = {_GLM5: ("attn_q_a", "attn_q_b", "nextn.eh_proj")}
_FALCON = "falcon"
# Architectures in which only feed-forward stacks become MXFP4; in others every stack is an expert's.
_STACKED_ATTENTION = ("bailingmoe3",)

# Layers of the models that llama.cpp takes for 70B models, by architecture.
_70B_LAYERS = {"llama": 80, "llama-embed": 80, "deci": 80, "olmo": 80, "qwen2": 80, "jais2": 68}

_BLOCK = re.compile(r"blk\.\s*([+-]?[0-9]{1,9})")


class ModelSizes(NamedTuple):
    """The sizes of a model on which types depend."""

    architecture: str
    layers: int
    heads: int = 0  # of the first layer
    kv_heads: int = 0  # of the first layer
    experts: int = 0
    extra_layers: int = 0  # of the layers, those for predicting several tokens

    @property
    def shared_heads(self) -> int:
        """Query heads for each head of keys and values."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """True if llama.cpp takes the model for a 70B model."""
        layers = self.layers - self.extra_layers
        if _70B_LAYERS.get(self.architecture) != layers:
            return False
        of_llama = self.architecture.startswith("llama")
        return not of_llama or (self.experts != 8 and self.heads != self.kv_heads)

    @classmethod
    def of(cls, metadata: Mapping[Any, Any]) -> ModelSizes | None:
        """Return the sizes in GGUF metadata, or None if the file holds no model; diffusion models have no layers."""
        architecture = metadata.get(ARCHITECTURE)
        if not isinstance(architecture, str):
            return None

        def number(key: str) -> int:
            value = metadata.get(f"{architecture}.{key}", 0)
            if isinstance(value, (list, tuple, np.ndarray)):
                value = value[0] if len(value) else 0
            return int(value) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else 0

        if model_of(metadata) is not None:
            return cls(architecture, 0)
        layers, heads = number("block_count"), number("attention.head_count")
        if layers <= 0:
            return None
        absent = f"{architecture}.attention.head_count_kv" not in metadata
        kv_heads = heads if absent else number("attention.head_count_kv")
        extra = number("nextn_predict_layers")
        return cls(architecture, layers, heads, kv_heads, number("expert_count"), extra)


class _Rank(NamedTuple):
    """A tensor's place among the tensors of its kind."""

    number: int
    total: int
    sizes: ModelSizes
    imatrix: bool  # True if there is an importance matrix


_Condition = Callable[[_Rank], bool]


def _always(place: _Rank) -> bool:
    return True


def _first(count: int) -> _Condition:
    return lambda place: place.number < count


def _first_part(parts: int) -> _Condition:
    return lambda place: place.number < place.total // parts


def _more_bits(place: _Rank) -> bool:
    number, eighth = place.number, place.total // 8
    return number < eighth or number >= 7 * place.total // 8 or (number - eighth) % 3 == 2


def _shares_heads(place: _Rank) -> bool:
    return place.sizes.shared_heads >= 4


def _has_imatrix(place: _Rank) -> bool:
    return place.imatrix


def _eight_experts(place: _Rank) -> bool:
    return place.sizes.experts == 8


def _both(first: _Condition, second: _Condition) -> _Condition:
    return lambda place: first(place) and second(place)


def _neither(condition: _Condition) -> _Condition:
    return lambda place: not condition(place)


# For each kind: conditions in order with their types; the base if none holds.
_Cells = Mapping[str, tuple[tuple[_Condition, str], ...]]
_NO_CELLS: _Cells = {}


class FileType(NamedTuple):
    """A file type of llama.cpp's."""

    number: int  # ``general.file_type``
    base: str  # type of most tensors
    cells: _Cells = _NO_CELLS
    falcon: _Cells = _NO_CELLS  # instead of `cells` for the kinds in it, in models of architecture falcon
    requires_imatrix: bool = False  # True if tensors of the base's type, except the ends, need an importance matrix


def _eight(other: str | None = None) -> tuple[tuple[_Condition, str], ...]:
    """Return the cell of attention outputs: q5_k with eight experts, else another type."""
    return ((_eight_experts, "q5_k"), *(() if other is None else ((_always, other),)))


_FOUR_BIT_CURVE: _Cells = {
    _VALUE: ((_shares_heads, "q5_k"),),
    _DOWN: ((_both(_first_part(8), _neither(_has_imatrix)), "q5_k"),),
    _ATTENTION_OUTPUT: _eight(),
}
_FALCON_PLAIN: _Cells = {_ATTENTION_OUTPUT: ()}

#: By name; `ALIASES` has further names.
FILE_TYPES = {
    "q4_0": FileType(2, "q4_0", {_DOWN: ((_both(_has_imatrix, _first_part(8)), "q4_1"),)}),
    "q4_1": FileType(3, "q4_1"),
    "q8_0": FileType(7, "q8_0"),
    "q5_0": FileType(8, "q5_0", {_DOWN: ((_both(_has_imatrix, _first_part(8)), "q5_1"),)}),
    "q5_1": FileType(9, "q5_1"),
    "q2_k": FileType(
        10, "q2_k",
        {
            _VALUE: ((_shares_heads, "q4_k"), (_always, "q3_k")),
            _DOWN: ((_always, "q3_k"),),
            _ATTENTION_OUTPUT: _eight("q3_k"),
        },
        _FALCON_PLAIN,
    ),
    "q3_k_s": FileType(11, "q3_k", {_ATTENTION_OUTPUT: _eight()}, _FALCON_PLAIN),
    "q3_k_m": FileType(
        12, "q3_k",
        {
            _VALUE: ((_first(2), "q5_k"), (_always, "q4_k")),
            _DOWN: ((_first_part(16), "q5_k"), (_always, "q4_k")),
            _ATTENTION_OUTPUT: _eight("q4_k"),
        },
        {_DOWN: ((_first_part(16), "q5_k"), (_more_bits, "q4_k")), _ATTENTION_OUTPUT: ()},
    ),
    "q3_k_l": FileType(
        13, "q3_k",
        {
            _VALUE: ((_always, "q5_k"),),
            _DOWN: ((_always, "q5_k"),),
            _ATTENTION_OUTPUT: ((_neither(_eight_experts), "q5_k"),),
        },
        {_DOWN: ((_always, "q4_k"),), _ATTENTION_OUTPUT: ((_always, "q4_k"),)},
    ),
    "q4_k_s": FileType(
        14, "q4_k",
        {_VALUE: ((_first(4), "q5_k"),), _DOWN: ((_first_part(8), "q5_k"),), _ATTENTION_OUTPUT: _eight()},
        {_DOWN: (), _ATTENTION_OUTPUT: ()},
    ),
    "q4_k_m": FileType(
        15, "q4_k",
        {_VALUE: ((_more_bits, "q6_k"),), _DOWN: ((_more_bits, "q6_k"),), _ATTENTION_OUTPUT: _eight()},
        {_DOWN: ((_first_part(16), "q6_k"), (_more_bits, "q5_k")), _ATTENTION_OUTPUT: ()},
    ),
    "q5_k_s": FileType(16, "q5_k"),
    "q5_k_m": FileType(17, "q5_k", {_VALUE: ((_more_bits, "q6_k"),), _DOWN: ((_more_bits, "q6_k"),)}),
    "q6_k": FileType(18, "q6_k"),
    "q2_k_s": FileType(
        21, "q2_k",
        {_VALUE: ((_shares_heads, "q4_k"),), _DOWN: ((_first_part(8), "q4_k"),)},
        requires_imatrix=True,
    ),
    "iq4_nl": FileType(25, "iq4_nl", _FOUR_BIT_CURVE, _FALCON_PLAIN),
    "iq4_xs": FileType(30, "iq4_xs", _FOUR_BIT_CURVE, _FALCON_PLAIN),
    "tq1_0": FileType(36, "tq1_0"),
    "tq2_0": FileType(37, "tq2_0"),
    "mxfp4_moe": FileType(38, "mxfp4"),
}  # fmt: skip
_EXPERTS_ONLY = "mxfp4_moe"
# Types of the embedding beside a separate head, where it is not the base.
_EMBEDDING_TYPES = {"tq1_0": "q4_k", "tq2_0": "q4_k"}
#: Other names of file types. llama-quantize has the first three.
ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4": _EXPERTS_ONLY}
#: File types that are not the name of a block type.
MIXTURES = tuple(name for name in FILE_TYPES if name not in SCHEMES)


def parse(name: object) -> str:
    """Return the name of a file type in lower case, without aliases.

    Raises:
        ValueError: unknown.
    """
    lower = name.lower() if isinstance(name, str) else ""
    lower = ALIASES.get(lower, lower)
    if lower in FILE_TYPES:
        return lower
    close = nearest(lower, FILE_TYPES)
    raise ValueError(
        f"unknown file type {show(name)}"
        + (f": did you mean {close[0]!r}?" if close else f", expected one of {', '.join(FILE_TYPES)}")
    )


def sort_key(name: str) -> tuple[int, bytes]:
    """Return the key of llama-quantize's order: by layer, then by name."""
    return _layer_of(name, -1), name.encode("utf-8", "surrogateescape")


def _layer_of(name: str, default: int) -> int:
    match = _BLOCK.match(name)
    return default if match is None else int(match[1])


class TensorType(NamedTuple):
    """The type of a tensor in a file of a file type."""

    type: str | None  # a block type or `FLOAT16`; None keeps the type of the source
    requested: str | None = None  # the type before the fallback, if rows are not whole blocks
    requires_imatrix: bool = False


def axes_of(shape: tuple[int, ...]) -> int:
    """Return ggml's number of axes, which ignores leading axes of size 1."""
    leading = next((k for k, size in enumerate(shape) if size != 1), len(shape))
    return max(1, len(shape) - leading)


def is_quantized(name: str, shape: tuple[int, ...], architecture: str) -> bool:
    """Return True if llama-quantize quantizes a tensor."""
    if axes_of(shape) not in (2, 3) or not name.endswith("weight") or name in _KEPT_NAMES:
        return False
    return not any(part in name for part in (*_KEPT_PARTS, *_KEPT_PARTS_OF.get(architecture, ())))


def choose(
    file_type: str, shapes: Mapping[str, tuple[int, ...]], sizes: ModelSizes, *, imatrix: bool = False
) -> dict[str, TensorType]:
    """Return the type of each tensor in a file of a file type, in llama-quantize's order.

    Args:
        file_type: its name, see `parse`.
        shapes: the shapes of all tensors by GGUF name, outermost axis first; tensors of the rest of a model count,
            because types depend on a tensor's place among its kind.
        sizes: sizes of the model.
        imatrix: True if there is an importance matrix.

    Raises:
        UnsupportedError: a model with experts has a feed-forward tensor outside its layers.
    """
    return _Chooser(parse(file_type), shapes, sizes, imatrix).run()


def _kind_of(name: str, tied: bool) -> str:
    if name == _OUTPUT_NAME:
        return _OUTPUT
    if name in EMBEDDINGS:
        return _OUTPUT if tied else _EMBEDDING
    return next((kind for part, kind in _KINDS.items() if part in name), _REST)


class _Chooser:
    def __init__(self, file_type: str, shapes: Mapping[str, tuple[int, ...]], sizes: ModelSizes, imatrix: bool) -> None:
        self._name = file_type
        self._row = FILE_TYPES[file_type]
        self._shapes = {name: shapes[name] for name in sorted(shapes, key=sort_key)}
        self._sizes = sizes
        self._imatrix = imatrix
        tied = _OUTPUT_NAME not in shapes
        self._kinds = {name: _kind_of(name, tied) for name in self._shapes}
        self._values = sum(kind == _VALUE for kind in self._kinds.values())
        self._counters: Counter[str] = Counter()

    def run(self) -> dict[str, TensorType]:
        return {name: self._type(name, shape) for name, shape in self._shapes.items()}

    def _type(self, name: str, shape: tuple[int, ...]) -> TensorType:
        if not is_quantized(name, shape, self._sizes.architecture):
            return TensorType(None)
        chosen = self._chosen(name, shape)
        fallback = SCHEMES[chosen].of_rows(shape[-1]) or FLOAT16
        ends = name == _OUTPUT_NAME or name in EMBEDDINGS
        requires = self._row.requires_imatrix and fallback == self._row.base and not ends
        return TensorType(fallback, None if fallback == chosen else chosen, requires)

    def _chosen(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type without regard to the length of rows."""
        kind, row, sizes = self._kinds[name], self._row, self._sizes
        if any(part in name for part in _EIGHT_BIT_PARTS_OF.get(sizes.architecture, ())):
            return "q8_0"
        if kind == _OUTPUT:
            whole = shape[-1] % SCHEMES[row.base].block == 0
            eight = self._name == _EXPERTS_ONLY or sizes.architecture == _FALCON or not whole or row.base == "q8_0"
            return "q8_0" if eight else "q6_k"
        if self._name == _EXPERTS_ONLY:
            experts = len(shape) > 2 and shape[-3] > 1
            if sizes.architecture in _STACKED_ATTENTION:
                experts = experts and kind in (_UP, _GATE, _DOWN)
            return row.base if experts else "q8_0"
        if kind == _EMBEDDING:
            return _EMBEDDING_TYPES.get(self._name, row.base)
        place = _Rank(*self._index(name, kind), sizes, self._imatrix)
        cells = row.falcon if sizes.architecture == _FALCON and kind in row.falcon else row.cells
        chosen = next((to for condition, to in cells.get(kind, ()) if condition(place)), row.base)
        if kind == _VALUE and sizes.is_70b and chosen in ("q3_k", "q4_k"):
            chosen = "q5_k"
        return "q8_0" if kind in (_VALUE, _KEY) and sizes.experts == 8 else chosen

    def _index(self, name: str, kind: str) -> tuple[int, int]:
        """Return the index of a tensor among its kind, and their number."""
        index = self._counters[kind]
        self._counters[kind] += 1
        if kind == _VALUE:
            return index, self._values
        layers = self._sizes.layers
        if kind in (_UP, _GATE, _DOWN) and self._sizes.experts > 1:
            index = _layer_of(name, -1)
            if not 0 <= index < layers:
                text = f"is in none of the {layers} layers, but llama.cpp's file types depend on the layer of an "
                raise error_about(UnsupportedError, f"{text}expert's tensor", tensor=name)
        return index, layers


def with_file_type(metadata: Mapping[Any, Any], file_type: str, more: Iterable[tuple[str, Any]] = ()) -> dict[Any, Any]:
    """Return metadata of a file of a file type, with keys in llama-quantize's order.

    In files of diffusion models, which an older llama-quantize writes, keys stay in their places.
    """
    last = {
        QUANTIZATION_VERSION: np.uint32(CURRENT_VERSION),
        FILE_TYPE: np.uint32(FILE_TYPES[parse(file_type)].number),
        **dict(more),
    }
    if model_of(metadata) is not None:
        return {**metadata, **last}
    return {**{key: value for key, value in metadata.items() if key not in last}, **last}
