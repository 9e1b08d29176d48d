"""Kinds of adapters: a row for each says which tensors a module has, which shapes fit, and how they change a matrix.

A role is the end of a tensor's name in the files of PEFT and LyCORIS. The mathematics needs no configuration but the
settings in a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array
from ..quant.patterns import compiled

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by role
Arrays = Mapping[str, Array]  # by role

# Roles of an adapter's tensors.
A, B, MAGNITUDE, BIAS, VALUE = "A", "B", "magnitude", "bias", "value"
EMBEDDING_A, EMBEDDING_B = "embedding A", "embedding B"
TOKENS = "rows of tokens"
EMBEDDING_ROLES = frozenset((EMBEDDING_A, "oft_embedding_R"))  # of embeddings
# Norms of the rows or of the columns, by their shape, in place of PEFT's magnitudes (LyCORIS).
SCALE = "dora_scale"
CORE = "lora_mid"  # of a Tucker decomposition
# Roles beside the change of a module, or in place of values of the base.
_BESIDE = frozenset((MAGNITUDE, SCALE, BIAS, VALUE, TOKENS, "alpha"))


class Step(NamedTuple):
    """A change of a matrix: a product is added to rows, or rows are changed in place, and are then rescaled."""

    # Factors [rows, r] and [r, columns] of a product, or of two whose elements are multiplied.
    products: tuple[tuple[Array, Array], ...] = ()
    scaling: float = 1.0  # of the product
    # Changes rows in place, from the number of the first; the last array has their shape, for values between.
    change: Callable[[Array, int, Array], None] | None = None
    norms: Array | None = None  # new norms of the rows
    tiny: float = 0.0  # added to the rows' norms, by which rows are divided
    columns: Array | None = None  # factors of the columns
    first: int = 0  # row of the matrix at which the tensor begins


class Place(NamedTuple):
    """The matrix of a module."""

    shape: Shape  # of the tensor; the axes after the first are the columns
    by_columns: bool = False  # it is stored as [in, out]
    settings: Mapping[str, Any] = {}  # those of the row
    module: str = ""  # its name in PEFT

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def outer(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        rows, columns = self.sizes
        return (columns, rows) if self.by_columns else (rows, columns)


def _first(shape: Shape) -> int:
    return shape[0] if shape else 0


def _product(left: Array, right: Array, scaling: float, place: Place) -> Step:
    if place.by_columns:
        left, right = right.T, left.T
    return Step(((np.ascontiguousarray(left), np.ascontiguousarray(right)),), scaling)


def with_core(core: Array, right: Array) -> Array:
    """Return the product [r, columns] of the core of a Tucker decomposition, [r, r, kernel], and a factor [r, in]."""
    rank, inner = right.shape[:2]
    first = core.reshape(*core.shape[:2], -1).transpose(0, 2, 1).astype(np.float64)
    joined = first @ right.reshape(rank, inner)  # [r, kernel, in]
    result: Array = joined.transpose(0, 2, 1).reshape(len(core), -1).astype(right.dtype)
    return result


# ---- AdaLoRA and VeRA ----


def _adalora_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    (outputs, inputs), rank = place.outer, _first(shapes[A])
    return {A: (rank, inputs), B: (outputs, rank), "lora_E": (rank, 1)}


def _adalora(place: Place, scaling: float, parts: Arrays) -> Step:
    return _product(parts[B], parts[A] * parts["lora_E"], scaling, place)


def _vera_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    """The projections are those of the largest layer."""
    (outputs, inputs), rank = place.outer, _first(shapes["vera_lambda_d"])
    outer, inner = _first(shapes["vera_B"]), sum(shapes["vera_A"][1:2])
    projections = {"vera_A": (rank, max(inputs, inner)), "vera_B": (max(outputs, outer), rank)}
    return {"vera_lambda_b": (outputs,), "vera_lambda_d": (rank,), **projections}


def _vera(place: Place, scaling: float, parts: Arrays) -> Step:
    outputs, inputs = place.outer
    left = parts["vera_lambda_b"][:, None] * parts["vera_B"][:outputs]
    return _product(left, parts["vera_lambda_d"][:, None] * parts["vera_A"][:, :inputs], scaling, place)


# ---- LoHa and LoKr ----


def _pair_needs(shapes: Shapes, stem: str, number: int, sizes: Shape, kernel: Shape) -> dict[str, Shape]:
    """Return the shapes of two factors of a matrix with a kernel, and of their core in a Tucker decomposition."""
    a, b, core = f"{stem}_w{number}_a", f"{stem}_w{number}_b", f"{stem}_t{number}"
    (rows, columns), rank = sizes, _first(shapes[b])
    if core not in shapes:
        return {a: (rows, rank), b: (rank, columns * math.prod(kernel))}
    needed = (rank, rank, *kernel)
    if shapes[core] == (*needed, 1):  # as PEFT has it for 1-D convolutions
        needed = (*needed, 1)
    return {a: (rank, rows), b: (rank, columns), core: needed}


def _pair(parts: Arrays, stem: str, number: int) -> tuple[Array, Array]:
    left, right, core = parts[f"{stem}_w{number}_a"], parts[f"{stem}_w{number}_b"], parts.get(f"{stem}_t{number}")
    return (left, right) if core is None else (np.ascontiguousarray(left.T), with_core(core, right))


def _loha_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    first = _pair_needs(shapes, "hada", 1, place.shape[:2], place.shape[2:])
    return first | {role.replace("1", "2"): shape for role, shape in first.items()}


def _loha(place: Place, scaling: float, parts: Arrays) -> Step:
    """The change is the elementwise product of two products."""
    return Step((_pair(parts, "hada", 1), _pair(parts, "hada", 2)), scaling)


def _lokr_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    """If blocks do not divide the matrix, the first factor is needed whole."""
    product = (*shapes.get("lokr_w1_a", ())[:1], *shapes.get("lokr_w1_b", ())[1:])
    blocks = shapes.get("lokr_w1", product)
    counted = zip(place.shape, (*blocks, 1, 1)[:2], strict=False)
    outer = tuple(count if count and size % count == 0 else size for size, count in counted)
    inner = tuple(size // max(1, count) for size, count in zip(place.shape, outer, strict=False))
    needed: dict[str, Shape] = {}
    for number, sizes, kernel in ((1, outer, ()), (2, inner, place.shape[2:])):
        whole = f"lokr_w{number}" in shapes
        pair = {} if whole else _pair_needs(shapes, "lokr", number, sizes, kernel)
        needed |= {f"lokr_w{number}": (*sizes, *kernel)} if whole else pair
    return needed


def _lokr(place: Place, scaling: float, parts: Arrays) -> Step:
    """The change is the Kronecker product of two matrices, the second one with the kernel."""
    matrices = []
    for number in (1, 2):
        matrix = parts.get(f"lokr_w{number}")
        if matrix is None:
            left, right = _pair(parts, "lokr", number)
            # Not by BLAS, whose threads keep processors busy for milliseconds after a product.
            matrix = np.einsum("ir,rj->ij", left, right, dtype=np.float64).astype(right.dtype)
        matrices.append(matrix.reshape(len(matrix), -1))
    outer, inner = matrices[0] * scaling, matrices[1]
    if "lokr_w2" in parts and len(place.shape) == 3 and "peft_version" in place.settings:
        return Step(change=partial(_lokr_in_1d, outer, parts["lokr_w2"]))

    def change(rows: Array, first: int, buffer: Array) -> None:
        number, row = np.divmod(np.arange(first, first + len(rows)), len(inner))
        blocks = buffer.reshape(len(rows), outer.shape[1], inner.shape[1])
        np.multiply(outer[number][:, :, None], inner[row][:, None], out=blocks)
        rows += buffer

    return Step(change=change)


def _lokr_in_1d(outer: Array, inner: Array, rows: Array, first: int, _: Array) -> None:
    """Add PEFT's product for a 1-D convolution, which aligns the last axes: [1, a, b] with [c, d, k]."""
    shape = inner.shape[0], outer.shape[0] * inner.shape[1], outer.shape[1] * inner.shape[2]
    numbers = np.arange(first * rows.shape[1], (first + len(rows)) * rows.shape[1])
    number, row, column = np.unravel_index(numbers, shape)
    (row, row2), (column, column2) = np.divmod(row, inner.shape[1]), np.divmod(column, inner.shape[2])
    rows += (outer[row, column] * inner[number, row2, column2]).reshape(rows.shape)


# ---- IA3 ----


def feeds_forward(shape: Shape, module: str, settings: Mapping[str, Any]) -> bool:
    """Return whether factors of a module belong to its inputs; only a matrix shows it."""
    if len(shape) == 2 and shape != (1, 1):
        return shape[0] == 1
    names = settings["feedforward_modules"] or []
    if isinstance(names, str):
        return compiled(names, "feedforward_modules").matches(module)
    return module.endswith(tuple(names))


def _ia3_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    shape = shapes["ia3_l"]
    feeds = feeds_forward(shape, place.module, place.settings)
    if len(place.shape) == 1:  # the bias
        return {"ia3_l": shape if math.prod(shape) == place.shape[0] else (place.shape[0], 1)}
    if len(place.shape) == 2:
        outputs, inputs = place.outer
        return {"ia3_l": (1, inputs) if feeds else (outputs, 1)}
    rows, inner = place.shape[:2]
    groups = sum(shape[1:2]) // max(1, inner) if feeds else 0
    size = inner * (groups if groups and rows % groups == 0 else 1) if feeds else rows
    return {"ia3_l": (1, size, *(1 for _ in place.shape[2:]))}


def _ia3(place: Place, scaling: float, parts: Arrays) -> Step:
    """Rows or columns have factors; in a convolution with groups each group has its own for its columns."""
    factors = parts["ia3_l"].T if place.by_columns else parts["ia3_l"]
    if len(place.shape) != 2:
        shape = parts["ia3_l"].shape
        feeds = len(place.shape) > 1 and feeds_forward(shape, place.module, place.settings)
        factors = factors.reshape(-1, place.shape[1] if feeds else 1)
        factors = np.repeat(factors, math.prod(place.shape[2:]), axis=1) if feeds else factors
    count = place.shape[0]

    def change(rows: Array, first: int, buffer: Array) -> None:
        numbers = np.arange(first, first + len(rows)) * len(factors) // count
        rows *= factors[numbers] if len(factors) > 1 else factors

    return Step(change=change)


# ---- OFT and BOFT ----

# Limit on the powers of a matrix that approximate a rotation.
_MAX_TERMS = 1000


def _cayley(skew: Array) -> Array:
    """Return the rotations (I - S) / (I + S) of skew-symmetric matrices."""
    identity = np.eye(skew.shape[-1])
    rotations: Array = np.linalg.solve(identity + skew, identity - skew)
    return rotations


def _neumann(skew: Array, terms: int, halved: bool) -> Array:
    """Approximate `_cayley` by a power series; PEFT halves the last power since version 0.18."""
    halved = halved and terms > 2
    last = max(3, terms - 1) if halved else terms - 1
    power = np.broadcast_to(np.eye(skew.shape[-1]), skew.shape)
    result = power.copy()
    for exponent in range(1, last + 1):
        power = power @ skew
        result += power if halved and exponent == last else 2 * power
    return np.asarray(result)


def _within(matrices: Array, radius: float) -> Array:
    """Shrink matrices to a norm of at most ``radius`` over the root of their number (``coft``)."""
    norms, limit = np.sqrt(np.sum(matrices**2, axis=(1, 2), keepdims=True)), radius / math.sqrt(max(1, len(matrices)))
    with np.errstate(all="ignore"):
        shrunk: Array = np.where(norms <= limit, matrices, matrices * (limit / norms))
        return shrunk


def _oft_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    """If blocks do not divide the columns, a single block is needed."""
    role = next(role for role in shapes if role in ("oft_R", "oft_embedding_R", "oft_r"))
    rows, columns = place.sizes
    last = shapes[role][-1] if shapes[role] else 0
    size = last if role == "oft_r" else (1 + math.isqrt(1 + 8 * last)) // 2
    size = size if size and columns % size == 0 else columns
    count = 1 if place.settings["block_share"] else columns // max(1, size)
    if role == "oft_r":
        return {role: (count, size, size), "oft_s": (rows, 1)}
    return {role: (count, size * (size - 1) // 2)}


def _oft_problem(roles: Collection[str], config: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Return why settings do not tell the rotations, which PEFT computes since version 0.16."""
    if not {"oft_R", "oft_embedding_R"} & set(roles):
        return None
    neumann, terms = "use_cayley_neumann", "num_cayley_neumann_terms"
    developed = re.match(r"0\.(\d|1[0-7])\.", str(settings["peft_version"]), re.ASCII)
    if neumann not in config or (settings[neumann] and developed):
        return f'"{neumann}" and "peft_version" of released versions of PEFT are needed: rotations are ambiguous'
    return f'"{terms}" is more than {_MAX_TERMS}' if settings[terms] > _MAX_TERMS else None


def _oft(place: Place, scaling: float, parts: Arrays) -> Step:
    settings, (rows, columns) = place.settings, place.sizes
    scale = parts.get("oft_s")
    if scale is not None:  # PEFT 0.14 and 0.15
        whole = parts["oft_r"].astype(np.float64)
        blocks = columns // whole.shape[-1]
        if settings["coft"]:
            whole = _within(whole, settings["eps"] * math.ceil(rows / blocks) ** 2)
        return _rotation([_cayley((whole - whole.transpose(0, 2, 1)) / 2)], scale, columns, scale.dtype)
    packed = parts["oft_R" if "oft_R" in parts else "oft_embedding_R"]
    size = (1 + math.isqrt(1 + 8 * packed.shape[1])) // 2
    skew = np.zeros((len(packed), size, size))
    above, right = np.triu_indices(size, 1)
    skew[:, above, right] = packed
    skew -= skew.transpose(0, 2, 1)
    if settings["coft"]:
        skew = _within(skew, settings["eps"])
    if settings["use_cayley_neumann"]:
        turns = _neumann(skew, int(settings["num_cayley_neumann_terms"]), settings["peft_version"] is not None)
    else:
        turns = _cayley(skew)
    return _rotation([turns if "oft_R" in parts else turns.transpose(0, 2, 1)], None, columns, packed.dtype)


def _boft_needs(shapes: Shapes, place: Place) -> dict[str, Shape]:
    """With an even size of blocks, each further factor needs twice as many of them."""
    rows, columns = place.sizes
    factors, size = _first(shapes["boft_R"]), shapes["boft_R"][-1] if shapes["boft_R"] else 0
    # Without CUDA, PEFT trains one factor whatever the setting.
    factors = factors if factors in (1, place.settings["boft_n_butterfly_factor"]) else 1
    size = size if size and columns % size == 0 else columns
    if factors > 1 and (size % 2 or columns // size % (1 << (factors - 1))):
        factors = 1
    scale = (rows, 1) if len(place.shape) == 2 else (1, rows)
    return {"boft_R": (factors, columns // max(1, size), size, size), "boft_s": scale}


def _boft(place: Place, scaling: float, parts: Arrays) -> Step:
    whole = parts["boft_R"].astype(np.float64)
    turns = [_cayley((blocks - blocks.transpose(0, 2, 1)) / 2) for blocks in whole]
    scale = parts["boft_s"].reshape(-1, 1)
    return _rotation(turns, scale, place.sizes[1], scale.dtype)


def _rotation(turns: Collection[Array], scale: Array | None, columns: int, dtype: np.dtype[Any]) -> Step:
    """Return a step: rotate blocks of columns, a factor of a butterfly after another, and scale the rows."""
    factors = []
    for number, blocks in enumerate(turns):
        size = blocks.shape[-1]
        halves = np.arange(columns)
        if number:  # the even halves of blocks come before the odd ones
            halves = halves.reshape(-1, 1 << number, 2, size // 2).transpose(0, 2, 1, 3).reshape(-1)
        factors.append((np.ascontiguousarray(blocks.transpose(0, 2, 1), dtype), halves))

    def change(rows: Array, first: int, buffer: Array) -> None:
        for number, (blocks, order) in enumerate(factors):
            values = rows[:, np.argsort(order)] if number else rows
            apart = values.reshape(len(rows), -1, blocks.shape[-1]).transpose(1, 0, 2)
            turned = (apart @ blocks).transpose(1, 0, 2).reshape(rows.shape)
            rows[...] = turned[:, order] if number else turned
        if scale is not None:
            rows *= scale[first : first + len(rows)]

    return Step(change=change)


# ---- the table ----


def _known(names: str) -> frozenset[str]:
    """Return names with general settings, such as for training."""
    general = "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode bias "
    targets = "target_modules exclude_modules layers_to_transform layers_pattern modules_to_save init_weights "
    return frozenset((general + targets + names).split())


def _forms(*texts: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(text.split()) for text in texts)


class AdapterKind(NamedTuple):
    """A kind of adapters."""

    title: str
    forms: tuple[frozenset[str], ...]  # the roles of a module, without `_BESIDE`
    # The shapes that fit a place, and the step there from the tensors and the scaling; None for LoRA, see `merge.py`.
    needs: Callable[[Shapes, Place], dict[str, Shape]] | None = None
    step: Callable[[Place, float, Arrays], Step] | None = None
    known: frozenset[str] | None = None  # settings beside `settings`; all others are refused. None to know all
    rank_key: tuple[str, int] | None = None  # with PEFT's default
    alpha_key: str | None = None  # without it, the weight of the adapter alone scales the change
    settings: Mapping[str, Any] = {}  # other settings with an effect on values, with PEFT's defaults
    scales: bool = True  # the weight of an adapter may be other than 1
    # Why an adapter cannot be merged, from the roles in its modules, its whole configuration and its settings.
    problem: Callable[[Collection[str], Mapping[str, Any], Mapping[str, Any]], str | None] | None = None

    def fits(self, shapes: Shapes, place: Place) -> bool:
        """Return whether a module has the shapes of its place."""
        needed = {} if self.needs is None else self.needs(shapes, place)
        return all(shapes[role] == shape for role, shape in needed.items())


_LORA = (frozenset((A, B)), frozenset((A, B, CORE)), frozenset((EMBEDDING_A, EMBEDDING_B)))
_HADA = "hada_w1_a hada_w1_b hada_w2_a hada_w2_b"
_OUTER, _INNER = ("lokr_w1", "lokr_w1_a lokr_w1_b"), ("lokr_w2", "lokr_w2_a lokr_w2_b", "lokr_w2_a lokr_w2_b lokr_t2")
_LOKR = _forms(*(f"{outer} {inner}" for outer in _OUTER for inner in _INNER))
_OF_LYCORIS = "r alpha rank_pattern alpha_pattern rank_dropout module_dropout use_effective_conv2d "
_OF_LOKR = _known(_OF_LYCORIS + "decompose_both decompose_factor rank_dropout_scale")
_OF_ADALORA = _known(
    "r init_r lora_alpha rank_pattern fan_in_fan_out lora_dropout init_lora_weights target_r tinit tfinal deltaT beta1 "
    "beta2 orth_reg_weight total_step megatron_core megatron_config qalora_group_size loftq_config ensure_weight_tying"
)
_OF_VERA = _known("r fan_in_fan_out vera_dropout d_initial projection_prng_key save_projection")
_OFT = {"coft": False, "eps": 6e-5, "block_share": False, "peft_version": None}
_OFT |= {"use_cayley_neumann": True, "num_cayley_neumann_terms": 5}
_OF_OFT = _known("r oft_block_size module_dropout")
_BOFT = {"boft_n_butterfly_factor": 1}
_OF_BOFT = _known("boft_block_size boft_block_num boft_dropout")
_OF_IA3 = _known("fan_in_fan_out init_ia3_weights")
_IA3 = {"feedforward_modules": None}
# PEFT's and LyCORIS's LoKr differ in 1-D convolutions; only PEFT has this setting.
_VERSION = {"peft_version": None}
# Roles of tensors for all modules.
SHARED = ("vera_A", "vera_B")
_VERA = _forms(f"vera_lambda_b vera_lambda_d {' '.join(SHARED)}")
# Roles whose first axis is the rank; the first in a module counts.
_RANKED = (A, EMBEDDING_A, "vera_lambda_d", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")

KINDS: Mapping[str, AdapterKind] = {
    "LORA": AdapterKind("LoRA", _LORA, rank_key=("r", 8), alpha_key="lora_alpha"),
    "ADALORA": AdapterKind(
        "AdaLoRA", _forms(f"{A} {B} lora_E"), _adalora_needs, _adalora, _OF_ADALORA, ("init_r", 12), "lora_alpha"
    ),
    "VERA": AdapterKind("VeRA", _VERA, _vera_needs, _vera, _OF_VERA, ("r", 256)),
    "LOHA": AdapterKind(
        "LoHa", _forms(_HADA, f"{_HADA} hada_t1 hada_t2"), _loha_needs, _loha, _known(_OF_LYCORIS), ("r", 8), "alpha"
    ),
    "LOKR": AdapterKind("LoKr", _LOKR, _lokr_needs, _lokr, _OF_LOKR, ("r", 8), "alpha", _VERSION),
    "IA3": AdapterKind("IA3", _forms("ia3_l"), _ia3_needs, _ia3, _OF_IA3, settings=_IA3, scales=False),
    "OFT": AdapterKind(
        "OFT",
        _forms("oft_R", "oft_embedding_R", "oft_r oft_s"),
        _oft_needs,
        _oft,
        _OF_OFT,
        settings=_OFT,
        scales=False,
        problem=_oft_problem,
    ),
    "BOFT": AdapterKind("BOFT", _forms("boft_R boft_s"), _boft_needs, _boft, _OF_BOFT, settings=_BOFT, scales=False),
}

OF_LYCORIS = (KINDS["LOHA"], KINDS["LOKR"])


def rank_of(shapes: Shapes) -> int | None:
    """Return the rank of a module, or None if its tensors do not show it."""
    return next((_first(shapes[role]) for role in _RANKED if role in shapes), None)


def changing(parts: Collection[str]) -> frozenset[str]:
    """Return the roles of a module behind a change of a weight."""
    return frozenset(parts) - _BESIDE


def kind_of(parts: Collection[str]) -> AdapterKind | None:
    """Return the kind with a form of exactly these roles."""
    roles = changing(parts)
    return next((kind for kind in KINDS.values() if roles in kind.forms), None)
