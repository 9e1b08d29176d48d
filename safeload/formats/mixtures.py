"""llama.cpp's file types, the block type that llama-quantize chooses for each tensor, and its importance matrices.

The types of tensors are in ``mixtures.json``.

A file type has a base, and cells for the kinds of tensors that get another type: of the cells of a kind, the first
whose conditions all hold counts. A kind is found by a part of the name; the first match counts. Architectures can have
``kept_parts`` and ``eight_bit_parts`` of names of matrices that stay, and that have 8 bits in any file type;
``stacks_attention`` if only feed-forward stacks are experts; and ``layers_of_70b``, the layers of the models that
llama.cpp takes for 70B models. Source:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp (llama_tensor_get_type).

Tensors of diffusion models get the types of ComfyUI-GGUF's llama-quantize (``image_types.json``), also by kind. A cell
has the type of the first tensors of a kind, or of all, if it is not the base of the file type. ComfyUI-GGUF writes no
``refused`` file types; ``foreign`` parts of names belong to other models, or to other parts of a checkpoint. Source:
https://github.com/city96/ComfyUI-GGUF/blob/main/tools/lcpp.patch (img_tensor_get_type).

Importance matrices of llama-imatrix say for each tensor how much its columns matter.

Two formats. GGUF files hold two f32 tensors for each tensor NAME, and metadata:

1. ``NAME.in_sum2``: sums of squared inputs, ggml dimensions {columns, experts}; ``NAME.counts``: {1, experts}, how many
   inputs were added up. The importance is in_sum2 / count, or 1 where an expert's count is 0.
2. ``imatrix.datasets``: array of strings; ``imatrix.chunk_count`` and ``imatrix.chunk_size``: u32.

Files of the older format (.dat), little-endian:

1. i32 number of entries, at least 1.
2. For each entry: i32 length of the name and its bytes, i32 number of calls, i32 number of values (at least 1), and the
   values as f32. The importance is a value divided by the number of calls, if that is positive.
3. Optional: i32 number of chunks, i32 length and bytes of the name of a data set. Bytes behind it are ignored.

Source: https://github.com/ggml-org/llama.cpp/blob/master/common/imatrix-loader.cpp and tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array
from ..core.files import read_data
from ..core.packing import SCHEMES
from ..core.text import error_about, nearest, plural, show
from ..errors import FormatError, UnsupportedError
from ..models.diffusion import ARCHITECTURE, diffusion_models, model_of

_data = partial(read_data, __name__, "mixtures.json")
_image_data = partial(read_data, __name__, "image_types.json")

FILE_TYPE = "general.file_type"
# Its numbers of dtypes, in enum llama_ftype of https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h.
_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 32, "nvfp4": 39}
QUANTIZATION_VERSION = "general.quantization_version"
FILE_KEYS = (FILE_TYPE, QUANTIZATION_VERSION)
# The version of ggml's block layouts, which llama.cpp writes into every quantized file.
CURRENT_VERSION = 2

FLOAT16 = "float16"  # the type of rows that are not whole blocks of any fallback

# Kinds of tensors with rules beside the cells.
_OUTPUT, _EMBEDDING, _VALUE, _KEY, _REST = "output", "embedding", "value", "key", "rest"
_FEED_FORWARD = ("up", "gate", "down")
_OUTPUT_NAME = "output.weight"
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")

_BLOCK = re.compile(r"blk\.\s*([+-]?[0-9]{1,9})")


def _architecture(name: str) -> Mapping[str, Any]:
    row: Mapping[str, Any] = _data()["architectures"].get(name, {})
    return row


class ModelSizes(NamedTuple):
    """The sizes of a model on which types depend."""

    architecture: str
    layers: int
    heads: int = 0  # of the first layer
    kv_heads: int = 0  # of the first layer
    experts: int = 0
    extra_layers: int = 0  # of the layers, those for predicting several tokens

    @property
    def is_70b(self) -> bool:
        """True if llama.cpp takes the model for a 70B model."""
        if _architecture(self.architecture).get("layers_of_70b") != self.layers - self.extra_layers:
            return False
        return not self.architecture.startswith("llama") or (self.experts != 8 and self.heads != self.kv_heads)

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
        return cls(architecture, layers, heads, kv_heads, number("expert_count"), number("nextn_predict_layers"))


class FileType(NamedTuple):
    """A file type of llama.cpp's."""

    number: int  # ``general.file_type``
    base: str  # type of most tensors
    cells: Mapping[str, Any] = {}  # by kind
    falcon: Mapping[str, Any] = {}  # instead of `cells` for the kinds in it, in models of architecture falcon
    aliases: tuple[str, ...] = ()  # other names; "mxfp4" is safeload's own
    embedding: str | None = None  # type of the embedding beside a separate head; None for the base
    requires_imatrix: bool = False  # True if tensors of the base's type, except the ends, need an importance matrix
    experts_only: bool = False  # True if all but experts have 8 bits


@cache
def file_types() -> Mapping[str, FileType]:
    """Return the file types by name, without aliases."""
    return {name: FileType(**row) for name, row in _data()["file_types"].items()}


def _type_in(
    cells: Iterable[Mapping[str, Any]], base: str, place: tuple[int, int], sizes: ModelSizes, imatrix: bool
) -> str:
    """Return the type in the first cell that applies at a place: a number, and the total."""
    number, total = place
    eighth = total // 8
    for cell in cells:
        if (
            number < cell.get("first", math.inf)
            and ("first_part" not in cell or number < total // cell["first_part"])
            # the first or last eighth, or the third of three between them
            and (not cell.get("more_bits") or not eighth <= number < 7 * total // 8 or (number - eighth) % 3 == 2)
            and (not cell.get("shares_heads") or sizes.heads >= 4 * sizes.kv_heads > 0)
            and cell.get("eight_experts") in (None, sizes.experts == 8)
            and cell.get("imatrix") in (None, imatrix)
        ):
            return str(cell["type"])
    return base


def mixtures() -> tuple[str, ...]:
    """Return the file types that are not the name of a block type."""
    return tuple(name for name in file_types() if name not in SCHEMES)


@cache
def _by_name() -> Mapping[str, str]:
    rows = file_types().items()
    return {**{name: name for name, _ in rows}, **{alias: name for name, row in rows for alias in row.aliases}}


def is_known(name: str) -> bool:
    """Return True for a name or alias of a file type in lower case."""
    return name in _by_name()


def parse(name: object) -> str:
    """Return the name of a file type in lower case, without aliases."""
    lower = name.lower() if isinstance(name, str) else ""
    if is_known(lower):
        return _by_name()[lower]
    close = nearest(lower, file_types())
    advice = f": did you mean {close[0]!r}?" if close else f", expected one of {', '.join(file_types())}"
    raise ValueError(f"unknown file type {show(name)}{advice}")


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
    return max(1, len(shape) - next((k for k, size in enumerate(shape) if size != 1), len(shape)))


def is_quantized(name: str, shape: tuple[int, ...], architecture: str) -> bool:
    """Return True if llama-quantize quantizes a tensor."""
    if axes_of(shape) not in (2, 3) or not name.endswith("weight") or name in _data()["kept_names"]:
        return False
    kept = (*_data()["kept_parts"], *_architecture(architecture).get("kept_parts", ()))
    return not any(part in name for part in kept)


def choose(
    file_type: str, shapes: Mapping[str, tuple[int, ...]], sizes: ModelSizes, *, imatrix: bool = False
) -> dict[str, TensorType]:
    """Return the type of each tensor in a file of a file type, in llama-quantize's order.

    Shapes are needed of all tensors of the model, because types depend on a tensor's place among its kind.
    """
    row, architecture = file_types()[parse(file_type)], _architecture(sizes.architecture)
    falcon, ends = sizes.architecture == "falcon", (_OUTPUT_NAME, *EMBEDDINGS)
    names = sorted(shapes, key=sort_key)
    parts: Mapping[str, str] = _data()["kinds"]
    kinds = {name: next((kind for part, kind in parts.items() if part in name), _REST) for name in names}
    kinds.update((name, _EMBEDDING if _OUTPUT_NAME in shapes else _OUTPUT) for name in EMBEDDINGS if name in kinds)
    if _OUTPUT_NAME in kinds:
        kinds[_OUTPUT_NAME] = _OUTPUT
    totals = {_VALUE: sum(kind == _VALUE for kind in kinds.values())}
    counters: Counter[str] = Counter()

    def type_of(name: str, kind: str, shape: tuple[int, ...]) -> str:
        """Return the type without regard to the length of rows."""
        if any(part in name for part in architecture.get("eight_bit_parts", ())):
            return "q8_0"
        if kind == _OUTPUT:
            whole = shape[-1] % SCHEMES[row.base].block == 0
            return "q8_0" if row.experts_only or falcon or not whole or row.base == "q8_0" else "q6_k"
        if row.experts_only:
            experts = len(shape) > 2 and shape[-3] > 1
            stacked = kind in _FEED_FORWARD or "stacks_attention" not in architecture
            return row.base if experts and stacked else "q8_0"
        if kind == _EMBEDDING:
            return row.embedding or row.base
        number = counters[kind]
        counters[kind] += 1
        if kind in _FEED_FORWARD and sizes.experts > 1:
            number = _layer_of(name, -1)
            if not 0 <= number < sizes.layers:
                text = f"is in none of the {sizes.layers} layers, but llama.cpp's file types depend on the layer of an "
                raise error_about(UnsupportedError, f"{text}expert's tensor", tensor=name)
        cells = row.falcon if falcon and kind in row.falcon else row.cells
        place = number, totals.get(kind, sizes.layers)
        chosen = _type_in(cells.get(kind, ()), row.base, place, sizes, imatrix)
        if kind == _VALUE and sizes.is_70b and chosen in ("q3_k", "q4_k"):
            chosen = "q5_k"
        return "q8_0" if kind in (_VALUE, _KEY) and sizes.experts == 8 else chosen

    types: dict[str, TensorType] = {}
    for name in names:
        shape = shapes[name]
        if not is_quantized(name, shape, sizes.architecture):
            types[name] = TensorType(None)
            continue
        chosen = type_of(name, kinds[name], shape)
        fallback = SCHEMES[chosen].of_rows(shape[-1]) or FLOAT16
        requires = row.requires_imatrix and fallback == row.base and name not in ends
        types[name] = TensorType(fallback, None if fallback == chosen else chosen, requires)
    return types


def with_file_type(metadata: Mapping[Any, Any], file_type: str, more: Iterable[tuple[str, Any]] = ()) -> dict[Any, Any]:
    """Return metadata of a file of a file type, with keys in llama-quantize's order.

    In files of diffusion models, which an older llama-quantize writes, keys stay in their places.
    """
    last = {
        QUANTIZATION_VERSION: np.uint32(CURRENT_VERSION),
        FILE_TYPE: np.uint32(file_types()[parse(file_type)].number),
        **dict(more),
    }
    if model_of(metadata) is not None:
        return {**metadata, **last}
    return {**{key: value for key, value in metadata.items() if key not in last}, **last}


def number_of(name: str) -> int | None:
    """Return the file type number of a file of one dtype or block type, or None if it has no number."""
    # K-quants have a number for each mixture; the lowest is that of a single type (S).
    mixtures = [row.number for row in file_types().values() if row.base == name]
    return min(mixtures) if mixtures else _NUMBERS.get(name)


def with_updated_file_type(
    metadata: Mapping[Any, Any], tensors: Iterable[Any], *, copies: bool = False
) -> Mapping[Any, Any]:
    """Return metadata with its file type number, if it has one, updated for the tensors to write.

    Like llama.cpp's converter, it names the blocks of a source that are only copied even if they are few.
    """
    if FILE_TYPE not in metadata:
        return metadata
    elements: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            elements[getattr(tensor, "scheme", None) or tensor.dtype.name] += math.prod(tensor.shape)
    # The type of most weights decides. If it has no number, the metadata loses the key.
    commonest = max(elements, key=elements.__getitem__, default=None)
    if copies:
        commonest = next((blocks for blocks in ("nvfp4", "mxfp4") if blocks in elements), commonest)
    number = number_of(commonest or "")
    if number is not None and model_of(metadata) is not None:
        return {**metadata, FILE_TYPE: np.uint32(number)}  # in its place
    rest = {key: value for key, value in metadata.items() if key != FILE_TYPE}
    return rest if number is None else {**rest, FILE_TYPE: np.uint32(number)}


# ---- diffusion models ----


def choose_for_image(file_type: str, shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, TensorType]:
    """Return the type of each tensor; it depends on the place among its kind, so ``shapes`` must be in file order."""
    row, data = file_types()[file_type], _image_data()
    if file_type in data["refused"]:
        listed = ", ".join(name for name in file_types() if name not in data["refused"])
        raise UnsupportedError(f"file type {file_type} has no rules for diffusion models, expected one of {listed}")
    unquantized = diffusion_models()[architecture].unquantized or ()
    counters: Counter[str] = Counter()
    types: dict[str, TensorType] = {}
    for name, shape in shapes.items():
        excepted = any(name == part[1:] if part.startswith("=") else part in name for part in unquantized)
        if excepted or axes_of(shape) != 2 or not is_quantized(name, shape, architecture):
            types[name] = TensorType(None)
            continue
        part = next((part for part in data["foreign"] if part in name), None)
        if part is not None:
            raise error_about(UnsupportedError, f"is no tensor of {architecture}, because of {part}", tensor=name)
        kind = next((kind for kind, parts in data["kinds"].items() if any(part in name for part in parts)), "")
        place = counters[kind], len(shapes)
        counters[kind] += 1
        cells = data["cells"].get(file_type, {}).get(kind, ())
        chosen = _type_in(cells, row.base, place, ModelSizes(architecture, 0), False)
        whole = shape[-1] % SCHEMES[chosen].block == 0
        requires = whole and row.requires_imatrix and chosen == row.base
        types[name] = TensorType(chosen if whole else FLOAT16, None, requires)
    return types


# ---- importance matrices ----

SUMS, COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
KEYS = (_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE)

# The shortest entry of the older format: three numbers and a value.
_SHORTEST_ENTRY = 16
# Bytes of a text in metadata written by llama-quantize.
_LONGEST_TEXT = 127
_I32 = struct.Struct("<i")


class ImportanceMatrix(NamedTuple):
    """The importance of columns."""

    path: str
    vectors: Mapping[str, Array]  # by tensor name: f32 [columns * experts]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def metadata(self) -> dict[str, Any]:
        """Return the keys that llama-quantize writes into a file quantized with this matrix."""
        keys: dict[str, Any] = {"quantize.imatrix.file": _clipped(self.path)}
        if self.datasets:
            keys["quantize.imatrix.dataset"] = _clipped(self.datasets[0])
        keys["quantize.imatrix.entries_count"] = np.uint32(len(self.vectors))
        if self.chunks > 0:
            keys["quantize.imatrix.chunks_count"] = np.uint32(self.chunks)
        return keys


def _clipped(text: str) -> str:
    return text.encode("utf-8", "replace")[:_LONGEST_TEXT].decode("utf-8", "ignore")


def checked(path: str, vectors: Mapping[str, Array], datasets: tuple[str, ...], chunks: int) -> ImportanceMatrix:
    """Return the matrix if all its numbers are finite and not negative."""
    if not vectors:
        raise FormatError("the importance matrix has no entries", path)
    for name, vector in vectors.items():
        if (bad := ~(np.isfinite(vector) & (vector >= 0))).any():
            at = int(np.argmax(bad))
            text = f"importance of {show(name)} is {vector[at]} at {at}, expected a finite number >= 0"
            raise FormatError(text, path)
    return ImportanceMatrix(path, vectors, datasets, chunks)


def of_gguf(path: str, tensors: Mapping[str, Array], metadata: Mapping[Any, Any]) -> ImportanceMatrix:
    """Return the matrix in the tensors of a GGUF file."""
    if missing := [key for key in KEYS if key not in metadata]:
        raise FormatError(f"not an importance matrix: the metadata has no {missing[0]}", path)
    names = [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]
    if alone := {name.removesuffix(COUNTS) for name in tensors if name.endswith(COUNTS)} ^ set(names):
        raise FormatError(f"{show(min(alone))} has only one of {SUMS} and {COUNTS}", path)
    vectors = {name: _of_sums(name, tensors[name + SUMS], tensors[name + COUNTS], path) for name in names}
    datasets = metadata[_DATASETS]
    texts = tuple(map(str, datasets)) if isinstance(datasets, (list, tuple, np.ndarray)) else ()
    chunks = metadata[_CHUNK_COUNT]
    if isinstance(chunks, bool) or not isinstance(chunks, (int, np.integer)) or not 0 <= chunks < 1 << 32:
        raise FormatError(f"{_CHUNK_COUNT} must be an unsigned integer of 32 bits, got {show(chunks)}", path)
    return checked(path, vectors, texts, int(chunks))


def _of_sums(name: str, sums: Array, counts: Array, path: str) -> Array:
    if not all(isinstance(array, np.ndarray) and array.dtype == np.float32 for array in (sums, counts)):  # no codes
        raise FormatError(f"sums and counts of {show(name)} must be float32", path)
    if counts.size == 0 or sums.size == 0 or sums.size % counts.size:
        raise FormatError(f"{show(name)} has {sums.size} sums and {plural(counts.size, 'count')}", path)
    if not np.isfinite(counts).all():
        raise FormatError(f"a count of {show(name)} is not finite", path)
    whole = np.trunc(counts + np.copysign(np.float32(0.5), counts)).reshape(-1, 1)
    rows = sums.reshape(counts.size, -1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        means = rows / np.where(whole > 0, whole, np.float32(1))
    return np.ascontiguousarray(np.where(whole > 0, means, np.float32(1)), np.float32).reshape(-1)


def of_dat(path: str, content: bytes) -> ImportanceMatrix:
    """Return the matrix in a file of the older format."""
    at = 0

    def take(size: int, what: str) -> bytes:
        nonlocal at
        left = len(content) - at
        if not 0 <= size <= left:
            raise FormatError(f"{what} at byte {at:,} needs {size:,} bytes, but {left:,} are left", path)
        at += size
        return content[at - size : at]

    def number(what: str) -> int:
        return int(_I32.unpack(take(_I32.size, what))[0])

    count = number("the number of entries")
    if not 1 <= count <= (len(content) - at) // _SHORTEST_ENTRY:
        raise FormatError(f"neither GGUF nor an importance matrix: {count:,} entries in {len(content):,} bytes", path)
    vectors: dict[str, Array] = {}
    for index in range(count):
        what = f"entry {index}"
        raw = take(number(what), what)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"the name of {what} is not UTF-8", path) from None
        calls, values = number(what), number(what)
        if values < 1:
            raise FormatError(f"{what} has {values} values", path)
        vector = np.frombuffer(take(4 * values, what), "<f4").astype(np.float32)
        if name in vectors:
            raise FormatError(f"two entries for {show(name)}", path)
        with np.errstate(over="ignore", invalid="ignore"):
            vectors[name] = vector / np.float32(calls) if calls > 0 else vector
    chunks = number("the number of chunks") if len(content) - at >= _I32.size else 0
    size = number("the data set") if len(content) - at >= _I32.size else 0
    datasets = (take(size, "the data set").decode("utf-8", "replace"),) if 0 < size <= len(content) - at else ()
    return checked(path, vectors, datasets, chunks)
