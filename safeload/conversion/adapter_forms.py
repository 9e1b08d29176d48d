"""LoRA adapters in the form of llama.cpp: merged into both forms of a model; and adapters written for other programs.

A family's table says how llama.cpp and mlx-lm arrange each weight. A weight changes by B A: its rows are the rows of B,
its columns the columns of A.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..adapters import adapter as lora
from ..adapters import kinds
from ..adapters.adapter import Adapter, Fit, in_gguf
from ..adapters.base import AdapterTarget, Base, heads_of, never_read
from ..adapters.diffusion import layout_of
from ..adapters.merge import Change, Merge, collecting
from ..core import dtypes
from ..core.arrays import Array
from ..core.atomic_file import AtomicFile, Swap
from ..core.cast import astype
from ..core.checkpoint import Checkpoint, chosen, with_aliases
from ..core.files import Location, sync_folder
from ..core.load import parse_target
from ..core.opening import open_paths
from ..core.packing import SCHEMES
from ..core.progress import reporter
from ..core.registry import GGUF
from ..core.safetensors import writer
from ..core.text import error_about, show, similar
from ..errors import FormatError, SafeloadError, TensorNotFoundError, UnsupportedError
from ..formats import gguf, mixtures
from ..formats.folder import MLX_ADAPTER
from ..models.choosing import EMBEDDINGS, tied_heads
from ..models.diffusion import ARCHITECTURE, TYPE
from ..models.family import GgufForm, gguf_architectures, gguf_form, mlx_form
from ..models.layout import TOOLS
from ..models.module_names import stored_names
from ..models.renamed import ModelNames
from ..quant.finder import CONV1D_MODELS, is_conv1d
from .catalog import Catalog, is_path
from .destinations import ShardWriter, config_text, refuse_inputs
from .forms import counted, laid_out
from .llama_cpp.gguf_models import published, titled
from .llama_cpp.settings import ModelConfig
from .quantize import quantize
from .recipes import Arrangement, Move, TensorRecipe, TensorView
from .rules import is_of_mlx
from .sink import Sink

# The weight of which llama.cpp has A with a row for each token, and B of the other axis.
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"


class Product(NamedTuple):
    """A change of a weight: ``scaling * left @ right``, or such a product for each matrix of a stack."""

    left: Array  # [rows, r], of a stack [matrices, rows, r]
    right: Array  # [r, columns], of a stack [matrices, r, columns]
    scaling: float
    tensor: str  # of the adapter, for messages
    path: str  # of the adapter
    kernel: Sequence[int] = ()  # the sides of a convolution's kernel, joined with its inputs into columns
    # Tensors beside the factors by role, norms of rows as a vector; or the tensors of a kind without factors.
    more: Mapping[str, Array] = MappingProxyType({})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return *self.left.shape[:-1], self.right.shape[-1]

    @property
    def turned(self) -> Product:
        """The change of the transposed weight."""
        return self._replace(left=self.right.swapaxes(-1, -2), right=self.left.swapaxes(-1, -2))

    def refused(self, why: str) -> UnsupportedError:
        return error_about(UnsupportedError, f"of the adapter {why}", path=self.path, tensor=self.tensor)


_Products = dict[str, Product]  # by the weight that they change


# ---- adapters and their bases ----


def for_base(adapters: Sequence[Adapter], base: Any, problems: list[SafeloadError] | None = None) -> list[Adapter]:
    """Return adapters with the names and the order of a base, a checkpoint or a catalog, if either is of llama.cpp.

    ``problems`` gets the misfits; None raises the first.
    """
    catalog = Catalog.of(base)
    of_llama_cpp = catalog.format == GGUF and catalog.metadata.get(ARCHITECTURE) in gguf_architectures()
    result = []
    for adapter in adapters:
        if in_gguf(adapter) or of_llama_cpp:
            alone = copy(adapter)
            alone.weight = 1.0
            _, recipes, products = _in_llama_cpp(alone, catalog, problems)
            if recipes is None:
                _check_head(products, catalog, catalog.title)
            else:
                products = _taken_back(recipes, products, lambda name: catalog.about(name).shape)
            adapter = _arranged(adapter, products)
        result.append(adapter)
    return result


def _in_llama_cpp(
    adapter: Adapter, catalog: Catalog, problems: list[SafeloadError] | None = None
) -> tuple[str, Mapping[str, TensorRecipe] | None, _Products]:
    """Return a base's architecture, how llama.cpp has its tensors (None: as they are), and an adapter's changes."""
    stored = {name: tuple(catalog.about(name).shape) for name in catalog}
    if catalog.format == GGUF:
        architecture, recipes, shapes = str(catalog.metadata.get(ARCHITECTURE)), None, stored
    else:
        recipes, form = _recipes_of(catalog)
        architecture, shapes = form.architecture, {name: recipe.shape for name, recipe in recipes.items()}
    if in_gguf(adapter):
        own = adapter.checkpoint.metadata.get(ARCHITECTURE)
        if own != architecture:
            text = f"the adapter is for models of architecture {show(own)}, but {catalog.title} is {architecture}"
            raise UnsupportedError(f"{adapter.checkpoint.path}: {text}", path=adapter.checkpoint.path)
        return architecture, recipes, _of_llama_cpp(adapter, shapes, catalog.title, problems)
    if recipes is not None:
        changes = _changes_of(adapter, catalog.title, catalog.config, stored, problems)
        return architecture, recipes, _laid_out(recipes, changes)
    recipes_back, settings, _, _ = published(catalog)
    sizes = {name: recipe.shape for name, recipe in recipes_back.items()}
    changes = _changes_of(adapter, catalog.title, settings.whole, sizes, problems)
    return architecture, None, _taken_back(recipes_back, changes, stored.__getitem__)


def _check_head(products: _Products, names: Collection[str], title: str) -> None:
    """Refuse the change of an embedding that is the head too: llama.cpp computes no head with such factors."""
    if _EMBEDDING in products and _HEAD not in names:
        text = f"changes {_EMBEDDING}, which is the head of {title} too: the head would change with it"
        raise products[_EMBEDDING].refused(text)


def _recipes_of(catalog: Catalog) -> tuple[Mapping[str, TensorRecipe], GgufForm]:
    """Return how llama.cpp has the tensors of a model of transformers, and its family."""
    name, form = gguf_form(catalog.config)
    if form is None:
        has = "has no config.json that names a class" if name is None else f"is {show(name)}, which llama.cpp lacks"
        text = f"{catalog.title} {has}: `safeload families` lists the models whose tensors have names in GGUF"
        raise UnsupportedError(text, path=catalog.title)
    config = ModelConfig({**(catalog.config or {}), **counted(catalog, form)}, catalog.title, form)
    return laid_out(catalog, config, form).recipes, form


def _of_llama_cpp(
    adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], title: str, problems: list[SafeloadError] | None
) -> _Products:
    """Return the changes in an adapter of llama.cpp, which fit tensors of these shapes."""
    result: _Products = {}
    for module, parts in adapter.modules.items():
        first, second = parts[kinds.A], parts[kinds.B]
        name = first.removesuffix(".lora_a")
        a, b = _read(adapter, first, second)
        left, right = (a, b.T) if name == _EMBEDDING else (b, a)
        problem: str | None = None
        if name not in shapes:
            problem = f"of the adapter belongs to {show(name)}, which {title} does not have"
            problem += f"; similar names: {', '.join(near)}" if (near := similar(name, [*shapes])) else ""
        elif not (left.ndim == right.ndim > 1 and left.shape[-1] == right.shape[-2] > 0):
            problem = f"is {list(a.shape)} and {show(second)} is {list(b.shape)}: these are no factors of a matrix"
        elif (shape := (*left.shape[:-1], right.shape[-1])) != shapes[name] or left.shape[:-2] != right.shape[:-2]:
            problem = f"of the adapter changes a tensor of {list(shape)}, but {show(name)} of {title} is "
            problem += str(list(shapes[name]))
        if problem is None:
            scaling = adapter.scaling(module, left.shape[-1], first)
            result[name] = Product(left, right, scaling, first, adapter.checkpoint.path)
            continue
        kind = FormatError if name in shapes else TensorNotFoundError
        with collecting(problems):
            raise error_about(kind, problem, path=adapter.checkpoint.path, tensor=first)
    return result


def _read(adapter: Adapter, *names: str) -> tuple[Array, ...]:
    """Return tensors of an adapter in their dtype, or as float32 if they are in blocks or have two dtypes."""
    dtype = _dtype_of(adapter, names)
    for name in names:
        code = adapter.checkpoint.tensors[name].dtype
        if code in dtypes.BY_CODE and not dtypes.BY_CODE[code].floating:
            text = f"of the adapter is {code}: it must be floating"
            raise error_about(UnsupportedError, text, path=adapter.checkpoint.path, tensor=name)
    arrays = adapter.checkpoint.load(names, dtype=dtype, backend="pread")
    return tuple(arrays[name] for name in names)


def _dtype_of(adapter: Adapter, names: Iterable[str]) -> str:
    """Return the dtype in which factors are read without rounding them."""
    codes = {adapter.checkpoint.tensors[name].dtype for name in names}
    row = dtypes.BY_CODE.get(codes.pop())
    return "float32" if codes or row is None or row.packed or not row.floating else row.name


def _changes_of(
    adapter: Adapter,
    title: str,
    config: Mapping[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],  # of the base, by the names in its files
    problems: list[SafeloadError] | None,
    *,
    for_tools: bool = False,  # other kinds than LoRA have a form, too, and so have convolutions
) -> _Products:
    """Return the changes of an adapter of PEFT, MLX or a tool for diffusion models by stored names."""
    row, work = dtypes.BY_CODE["F32"], np.dtype(np.float32)
    heads = heads_of([adapter], config, shapes)
    for head, embedding in heads.untied.items():
        text = f"the adapter changes only one of {show(head)} and {show(embedding)}, which {title} ties"
        raise UnsupportedError(f"{text}: there is one tensor for both", path=adapter.checkpoint.path)

    def target(name: str) -> AdapterTarget:
        return AdapterTarget(name, shapes[name], row, work, never_read)

    base = Base(title, shapes, config, shapes.__getitem__, target, heads=heads.pairs)
    merge = Merge(base, [adapter], heads, problems=problems)
    return {
        name: _sum([_product(merge, change, name, shapes[name], for_tools=for_tools) for change in changes])
        for name, changes in merge.changes.items()
    }


# Parts of an adapter other than factors; the first ones have no names in any program.
_OTHERS = {
    kinds.VALUE: "replaces {} (modules_to_save)",
    kinds.TOKENS: "replaces rows of {} (trained tokens)",
    kinds.BIAS: "is added to {} (lora_bias)",
    **dict.fromkeys((kinds.MAGNITUDE, kinds.SCALE), "has the norms of {} (DoRA)"),
    kinds.CORE: "is the core of a Tucker decomposition for {}",
}
_OF_TOOLS = (kinds.MAGNITUDE, kinds.SCALE, kinds.CORE)


def _product(merge: Merge, change: Change, name: str, shape: tuple[int, ...], *, for_tools: bool) -> Product:
    """Return the change of a stored tensor as a product of its own rows and columns, or by the tensors of its kind."""
    adapter, roles = change.adapter, kinds.changing(change.parts)
    tensor, path = next(iter(change.parts.values())), adapter.checkpoint.path

    def refused(text: str, tensor: str = tensor) -> UnsupportedError:
        return error_about(UnsupportedError, f"of the adapter {text}", path=path, tensor=tensor)

    for role, why in _OTHERS.items():
        if role in change.parts and not (for_tools and role in _OF_TOOLS):
            text = f"{why.format(show(name))}: only products of factors have a form in other programs"
            raise refused(text, change.parts[role])
    if change.step is not None and not (for_tools and kinds.kind_of(roles) in kinds.OF_LYCORIS):
        raise refused(f"changes {show(name)} by another kind than LoRA, which has no form in other programs")
    kernel = shape[2:] if len(shape) > 3 or (len(shape) == 3 and not change.stacked) else ()
    if kernel and not for_tools:
        raise refused(f"changes {show(name)}, which is a convolution: only factors of matrices have a form")
    beside = (change.parts.keys() & _OF_TOOLS) | (frozenset() if change.step is None else roles)
    more = {role: _read(adapter, change.parts[role])[0] for role in change.parts if role in beside}
    for role in beside & {kinds.MAGNITUDE, kinds.SCALE}:
        if role == kinds.MAGNITUDE or more[role].shape[:1] != (1,) or shape[0] == 1:
            norms = more.pop(role).reshape(-1)
            more[kinds.MAGNITUDE] = norms if change.part is None else norms[change.part[1]]
    divides = change.divided is not None or (change.part is not None and more.keys() - {kinds.MAGNITUDE})
    if more and (divides or change.by_columns):
        raise refused(
            f"changes {show(name)}, whose rows are joined, divided or turned: only factors of LoRA can follow"
        )
    if change.step is not None:
        empty = np.zeros((shape[0], 0), np.float32), np.zeros((0, math.prod(shape[1:])), np.float32)
        return Product(*empty, change.scaling, tensor, path, kernel, more)
    left, right = merge.factors_of(change, _dtype_of(adapter, (change.parts[role] for role in roles - {kinds.CORE})))
    if change.part is not None:
        number, part = change.part
        left, right = left[number, part], right[number]
    elif not change.stacked:
        left, right = left[0], right[0]
    if change.divided is not None:
        rows = len(left)
        whole = np.zeros((shape[0], left.shape[-1]), left.dtype)
        whole[change.divided.number * rows : (change.divided.number + 1) * rows] = left
        left = whole
    return Product(left, right, change.scaling, tensor, path, kernel, more)


class _ArrangedAdapter(Adapter):
    """An adapter in memory with the names and the order of its base; its configuration has the scales of tensors."""

    def read_settings(self, config: Mapping[str, Any], path: str) -> None:
        self.fit = Fit({name.removesuffix(".weight"): name for name in config}, frozenset(), {})

    def parse_name(self, name: str) -> tuple[str, str]:
        module, _, role = name.rpartition(".lora_")
        return module.removesuffix(".weight"), role

    def scaling(self, module: str, rank: int | None, tensor: str) -> float:
        return float(self.config[module]) * self.weight


def _arranged(adapter: Adapter, products: _Products) -> Adapter:
    """Return an adapter with these changes and tensors in memory."""
    tensors = {}
    for name, product in products.items():  # as PEFT has the factors of stacks
        left, right = (part if part.ndim == 3 else part[None] for part in (product.left, product.right))
        tensors[f"{name}.lora_{kinds.A}"] = np.ascontiguousarray(right.reshape(-1, right.shape[-1]))
        tensors[f"{name}.lora_{kinds.B}"] = np.ascontiguousarray(left.transpose(1, 2, 0).reshape(left.shape[1], -1))
    file = BytesIO(writer(tensors, None).to_bytes())
    file.name = adapter.checkpoint.path
    checkpoint = Checkpoint(open_paths(file, None, None, "refuse"))
    scalings = {name: product.scaling for name, product in products.items()}
    return _ArrangedAdapter(checkpoint, adapter.weight, scalings, adapter.config_at)


# ---- files of adapters for llama.cpp ----

# Dtypes of factors to write; any other becomes float32.
_WRITTEN = ("F32", "F16", "BF16")
# Arguments for models alone.
_OF_MODELS = (
    *("imatrix", "requantize", "exact", "scale_dtype", "part", "layout", "keep", "ignore", "adapters", "raw"),
    *("max_shard_size", "resume", "executor", "verify", "record"),
)
_SELECTING = ("names", "only", "drop")
# Arguments without an effect on later steps.
_CONSUMED = dict.fromkeys((*_SELECTING, "dtype", "quantize", "layout"))


def _opened(
    stack: ExitStack, src: Any, given: Mapping[str, Any], paths: Iterable[Any], **refused: str
) -> tuple[Adapter, Catalog]:
    """Open the adapter and the base of a call of `convert`, which ``stack`` closes.

    Args:
        given: the arguments of the call.
        paths: of the result.
        refused: further arguments to refuse, with the kind of result to which each applies.
    """
    sources, target = src if isinstance(src, list) else [src], parse_target(given["dtype"])
    if len(sources) != 1 or not is_path(sources[0]):
        raise TypeError(f"base= needs the path of one adapter, got {show(src)}")
    refused = {**dict.fromkeys(_OF_MODELS, "models"), **refused}
    if refused["layout"] and given["layout"] in TOOLS:
        raise ValueError(f'layout="{given["layout"]}" writes one file: its path must end with .safetensors')
    for key, kind in refused.items():
        if kind and given[key]:
            raise ValueError(f"{key}= applies to {kind}: pass an adapter with base= without it")
    if target is not None and target.code not in _WRITTEN:
        raise ValueError(f"dtype must be float32, float16 or bfloat16 for an adapter, got {target.name}")
    options = given["storage_options"]
    checkpoint = stack.enter_context(
        Checkpoint(open_paths(sources[0], None, None, "refuse", True, storage_options=options))
    )
    if any(given[key] is not None for key in _SELECTING):
        tensors = chosen(checkpoint, given["names"], given["only"], given["drop"], None)
        checkpoint = with_aliases(checkpoint, {}, names=[tensor[0] for tensor in tensors])
    adapter = lora.adapter_of(checkpoint)
    catalog = stack.enter_context(Catalog.of(given["base"], options))
    files = [*adapter.checkpoint.weight_files, *catalog.weight_files]
    for path in paths:
        refuse_inputs(path, [adapter.config_at.path, *(file.path for file in files)])
    return adapter, catalog


def for_llama_cpp(src: Any, given: Mapping[str, Any], paths: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of an adapter for llama.cpp, and the options with which a conversion writes these."""
    scheme, target = given["quantize"], parse_target(given["dtype"])
    if scheme not in (None, "q8_0"):
        raise ValueError(f'quantize must be "q8_0" for an adapter, got {show(scheme)}')
    with ExitStack() as stack:
        adapter, catalog = _opened(stack, src, given, paths)
        architecture, recipes, products = _in_llama_cpp(adapter, catalog)
        _check_head(products, catalog if recipes is None else recipes, catalog.title)
        path, metadata = adapter.checkpoint.path, adapter.checkpoint.metadata
    alphas = {name: np.float32(product.scaling * product.left.shape[-1]) for name, product in products.items()}
    alpha = max(dict.fromkeys(alphas.values()), key=[*alphas.values()].count)
    if not all(alphas.values()):
        text = "lora_alpha is 0, which llama.cpp takes for a scale of 1"
        raise UnsupportedError(f"{path}: {text}", path=path)
    tensors: dict[str, Any] = {}
    for name, (left, right, *_) in products.items():
        if alphas[name] != alpha:  # the file has a single alpha
            left = left.astype(np.float32) * (alphas[name] / alpha)
        pair = (left, right.swapaxes(-1, -2)) if name == _EMBEDDING else (right, left)
        for end, factor in zip(("a", "b"), pair, strict=True):
            tensors[f"{name}.lora_{end}"] = _written(factor, target, scheme)
    name = path.replace("\\", "/").rstrip("/").rpartition("/")[2]
    keys = {
        ARCHITECTURE: architecture,
        TYPE: "adapter",
        "adapter.type": "lora",
        "general.name": metadata.get("general.name", titled(name)) if in_gguf(adapter) else titled(name),
        "adapter.lora.alpha": gguf.F32(alpha),
        mixtures.QUANTIZATION_VERSION: gguf.U32(mixtures.CURRENT_VERSION),
    }
    metadata = {**keys, **(given["metadata"] or {})}
    return tensors, {**_CONSUMED, "metadata": metadata, "raw": True}


def _written(factor: Array, target: dtypes.Dtype | None, scheme: str | None) -> Any:
    """Return a factor in the dtype or the blocks to write; llama.cpp's converter writes F16 where no blocks fit."""
    if scheme is not None and factor.shape[-1] % SCHEMES[scheme].block == 0:
        return quantize(np.ascontiguousarray(factor), "q8_0")
    row = dtypes.row_of(factor.dtype)
    kept = row.name if row is not None and row.code in _WRITTEN else "float32"
    return astype(
        np.ascontiguousarray(factor), "float16" if scheme is not None else kept if target is None else target.name
    )


# ---- folders of adapters, for PEFT and mlx-lm ----

_LAYER = re.compile(r".*?\.[0-9]+\.", re.ASCII)


def to_folder(src: Any, place: Location, given: Mapping[str, Any]) -> tuple[str, int, int]:
    """Write PEFT's adapter as mlx-lm's, or another as PEFT's; return its file, and the numbers of tensors and bytes."""
    if place.files.remote:
        raise ValueError(f"{place.shown} is a URL: the folder of an adapter is on a disk")
    sink = Sink(place.files, place.path)
    refused = {"quantize": "adapters for llama.cpp", "rename": "single files"}
    with ExitStack() as stack:
        adapter, catalog = _opened(stack, src, given, (), **refused)
        files = (*adapter.checkpoint.weight_files, *catalog.weight_files)
        refuse_folder_of([adapter.config_at.path, *(file.path for file in files)], place.path)
        if catalog.format == GGUF:
            raise UnsupportedError(f"{catalog.title}: the folder of an adapter needs a base with a config.json")
        stored = {name: tuple(catalog.about(name).shape) for name in catalog}
        as_peft = adapter.writer != "PEFT"
        if in_gguf(adapter):
            _, recipes, products = _in_llama_cpp(adapter, catalog)
            products = _taken_back(recipes or {}, products, stored.__getitem__)
        else:
            products = _changes_of(adapter, catalog.title, catalog.config, stored, None, for_tools=as_peft)
        factors, settings = (_as_peft if as_peft else _as_mlx)(products, catalog)
    target = parse_target(given["dtype"])
    metadata = {key: value for key, value in (given["metadata"] or {}).items() if value is not None}
    file = writer({name: _written(factor, target, None) for name, factor in factors.items()}, metadata or None)
    name = lora.WEIGHTS if as_peft else MLX_ADAPTER
    there = sorted(sink.names() & {name, lora.CONFIG})
    if there and not given["overwrite"]:
        raise FileExistsError(errno.EEXIST, "exists; overwrite=True replaces it", sink.shown(there[0]))
    with reporter(given["progress"], file.size) as report:
        write_folder(place.path, name, file, settings, overwrite=given["overwrite"])
        report(file.size)
    return sink.shown(name), len(factors), file.size


def refuse_folder_of(sources: Iterable[str], folder: str) -> None:
    """Refuse a folder that holds what is read: with an adapter's files, it would be a model and an adapter."""
    for source in filter(os.path.exists, sources if os.path.isdir(folder) else ()):
        if os.path.samefile(os.path.dirname(source) or os.curdir, folder):
            raise ValueError(f"{folder} has {source}, which is read: choose another folder")


def write_folder(folder: str, name: str, file: ShardWriter, config: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write the weights of an adapter and its configuration: a reader finds the old adapter, none, or the new one."""
    text = config_text(config)
    weights, settings = (os.path.join(folder, each) for each in (name, lora.CONFIG))
    existed, new = os.path.isdir(folder), partial(AtomicFile, overwrite=overwrite, follow=False)
    os.makedirs(folder, exist_ok=True)
    try:
        with new(weights, file.size) as first, new(settings, len(text)) as second, Swap() as swap:
            file.write_to(first)
            with second.stream() as stream:
                stream.write(text)
            if os.path.lexists(settings):
                swap.hide(settings)  # nobody may read the old settings with the new weights
            for each in (first, second):
                each.seal()
                swap.put(str(each.temporary), each.path, overwrite=overwrite)
            first.temporary = second.temporary = None  # they are in place
            sync_folder(folder)
            swap.finish([])
    except BaseException:
        if not existed:
            with suppress(OSError):
                os.rmdir(folder)
        raise


def _as_mlx(products: _Products, catalog: Catalog) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the factors and the settings of an adapter for mlx-lm, which has a single rank and scale."""
    config = catalog.config or {}
    form = mlx_form(config)
    if form is None:
        kind = show(config.get("model_type"))
        raise UnsupportedError(f"{catalog.title}: model_type {kind} is not known to have a form in mlx-lm")
    settings = ModelConfig(config, catalog.title, form)
    if not is_of_mlx(catalog):
        start, recipes = form.types[config["model_type"]], laid_out(catalog, settings, form).recipes
        products = {start + name: product for name, product in _laid_out(recipes, products).items()}
    rank = max(product.left.shape[-1] for product in products.values())
    factors, keys = dict[str, Array](), dict[str, None]()
    alike = _alike([*products.values()])
    for name, (left, right, *_) in zip(products, alike, strict=True):
        stacked, more = [(0, 0)] * (left.ndim - 2), (0, rank - left.shape[-1])
        left, right = np.pad(left, [*stacked, (0, 0), more]), np.pad(right, [*stacked, more, (0, 0)])
        embeds, module = f".{name}".endswith(EMBEDDINGS), name.removesuffix(".weight")
        pair = (right, left) if stacked else (left, right) if embeds else (right.T, left.T)
        factors[f"{module}.lora_a"], factors[f"{module}.lora_b"] = pair
        keys[_LAYER.sub("", module, count=1)] = None
    about = {"rank": rank, "scale": alike[0].scaling, "dropout": 0.0, "keys": [*keys]}
    return factors, {"fine_tune_type": "lora", "num_layers": settings.size(form.blocks), "lora_parameters": about}


_Modules = dict[str, tuple[Product, dict[str, Array]]]  # changes and their tensors by role, by module


def _modules_of(products: _Products, catalog: Catalog) -> _Modules:
    """Return changes by module of transformers or Diffusers, with tensors in the shapes of PEFT."""
    config = catalog.config or {}
    known = ModelNames(config, stored_names(catalog, catalog.title))
    in_memory = {stored: name for name, stored in known.places.items() if isinstance(stored, str)}
    tied = {*tied_heads(config, [*catalog]).values()}
    modules: _Modules = {}
    for name, product in products.items():
        module = in_memory.get(name, name).removesuffix(".weight")
        if product.left.ndim > 2 or name not in in_memory:
            raise product.refused(f"changes {show(name)}, which is no module of transformers")
        if name in tied:
            raise product.refused(f"changes {show(name)}, which is the head too: PEFT's modules change alone")
        a, b, embeds, more = product.right, product.left, f".{name}".endswith(EMBEDDINGS), dict(product.more)
        ones = tuple(1 for _ in product.kernel)
        if embeds and more:
            raise product.refused(f"changes the embedding {show(name)}, for which only factors of LoRA have a form")
        if product.kernel and kinds.MAGNITUDE in more:
            more[kinds.MAGNITUDE] = more[kinds.MAGNITUDE].reshape(1, -1, *ones)
        if kinds.kind_of(more) is None:  # it has factors
            if embeds or _is_turned(module, config):
                a, b = b.T, a.T
            if product.kernel:
                sides = ones if kinds.CORE in more else product.kernel
                a, b = a.reshape(len(a), -1, *sides), b.reshape(*b.shape, *ones)
            roles = (kinds.EMBEDDING_A, kinds.EMBEDDING_B) if embeds else (kinds.A, kinds.B)
            more = {**dict(zip(roles, (a, b), strict=True)), **more}
        modules[module] = product, more
    return modules


def _is_turned(module: str, config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in CONV1D_MODELS and is_conv1d(module)


_PEFT = {
    kinds.A: "lora_A.weight",
    kinds.B: "lora_B.weight",
    kinds.EMBEDDING_A: "lora_embedding_A",
    kinds.EMBEDDING_B: "lora_embedding_B",
    kinds.MAGNITUDE: "lora_magnitude_vector",
}


def _as_peft(products: _Products, catalog: Catalog) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors and the settings of an adapter for PEFT."""
    modules = _modules_of(products, catalog)
    kind, settings = _kind_in_peft(modules)
    ranks = {module: _rank_of(parts) for module, (_, parts) in modules.items()}
    if kind == "LOKR":
        ranks = _divide_as_peft(modules, settings)
    if kind == "LORA":
        turned = {_is_turned(module, catalog.config or {}) for module in modules}
        settings = {"fan_in_fan_out": turned == {True}, **settings, "bias": "none"}
    alphas = {module: product.scaling * ranks[module] for module, (product, _) in modules.items()}
    rank, alpha = (max(dict.fromkeys(each.values()), key=[*each.values()].count) for each in (ranks, alphas))
    tensors = {
        f"{lora.PREFIX}{module}.{_PEFT.get(role, role)}": value
        for module, (_, parts) in modules.items()
        for role, value in parts.items()
    }
    return tensors, {
        "peft_type": kind,
        "r": rank,
        str(kinds.KINDS[kind].alpha_key): alpha,
        "target_modules": [*ranks],
        "rank_pattern": {module: each for module, each in ranks.items() if each != rank},
        "alpha_pattern": {module: each for module, each in alphas.items() if each != alpha},
        **settings,
        "inference_mode": True,
    }


def _rank_of(parts: Mapping[str, Array]) -> int:
    """Return the rank of a module; 0 if its tensors do not show it."""
    return kinds.rank_of({role: value.shape for role, value in parts.items()}) or 0


def _kind_in_peft(modules: _Modules) -> tuple[str, dict[str, Any]]:
    """Return PEFT's name of the kind of all modules, with settings; refuse tensors without a place in PEFT."""
    row = kinds.kind_of(next(iter(modules.values()))[1])
    kind = next(name for name, each in kinds.KINDS.items() if each is row)
    dora, cores = set[bool](), set[bool]()  # whether modules have norms, and kernels cores
    for module, (product, parts) in modules.items():
        sides, has_core = {*product.kernel}, bool(parts.keys() & {"hada_t1", "lokr_t2"})
        dora.add(kinds.MAGNITUDE in parts)
        if sides - {1} and "lokr_w2" not in parts:
            cores.add(has_core)
        some_norms = len(dora) > 1 or (True in dora and kind != "LORA")
        deep = len(product.kernel) > 2 and kind != "LORA"
        faults = {
            "by another kind than other modules: a folder of PEFT has one": kinds.kind_of(parts) is not row,
            "with the core of a Tucker decomposition, which PEFT's LoRA lacks": kinds.CORE in parts,
            "with norms of its columns: PEFT's DoRA has norms of rows": kinds.SCALE in parts,
            "where others do not alike: PEFT has norms (DoRA) for LoRA alone, and for all modules": some_norms,
            "which is a 3-D convolution: PEFT has LoRA alone for these": deep,
            "with a core for a kernel of 1: PEFT has none there": has_core and sides == {1},
            "with or without a core: PEFT has cores for all kernels (use_effective_conv2d) or none": len(cores) > 1,
        }
        for text in (text for text, fails in faults.items() if fails):
            raise product.refused(f"changes {show(module)} {text}")
    if kind == "LORA":
        return kind, {"use_dora": True} if True in dora else {}
    return kind, {"use_effective_conv2d": True in cores}


def _divide_as_peft(modules: _Modules, settings: dict[str, Any]) -> dict[str, int]:
    """Set the settings from which PEFT computes the shapes of these LoKr, and return the ranks."""
    both = settings["decompose_both"] = any("lokr_w1_a" in parts for _, parts in modules.values())
    sizes: dict[str, tuple[Sequence[int], Sequence[int]]] = {}  # of both matrices
    for module, (product, parts) in modules.items():
        whole = parts.get("lokr_w1")
        outer = (len(parts["lokr_w1_a"]), parts["lokr_w1_b"].shape[1]) if whole is None else whole.shape
        inputs = product.right.shape[1] // math.prod(product.kernel)
        sizes[module] = outer, (len(product.left) // outer[0], inputs // outer[1])
    factors = dict.fromkeys((-1, *(side for outer, _ in sizes.values() for side in outer)))
    unlike = {factor: [m for m in sizes if not _divides(factor, *sizes[m])] for factor in factors}
    settings["decompose_factor"], undivided = min(unlike.items(), key=lambda each: len(each[1]))
    for module in undivided:
        text = f"divides {show(module)} into other blocks than PEFT, whose decompose_factor is that of all modules"
        raise modules[module][0].refused(text)
    ranks = {}
    for module, (product, parts) in modules.items():
        outer, inner = sizes[module]
        least = -(-max(inner) // 2), -(-max(outer) // 2) if both else 1  # ranks from which matrices have no factors
        rank = ranks[module] = _rank_of(parts) or max(least)
        if tuple(rank >= each for each in least) != ("lokr_w2" in parts, "lokr_w1" in parts):
            text = (
                f"has other factors for {show(module)} than PEFT with rank {rank}, which decides by the sizes of blocks"
            )
            raise product.refused(text)
    return ranks


def _divides(factor: int, outer: Sequence[int], inner: Sequence[int]) -> bool:
    """Return whether PEFT divides both sides of a matrix like this with a ``decompose_factor``."""
    return all(_factorized(a * b, factor) == (a, b) for a, b in zip(outer, inner, strict=True))


def _factorized(size: int, factor: int) -> tuple[int, int]:
    """Return both sizes of a side as chosen by PEFT; LyCORIS exchanges these if a factor is beyond the root."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    limit = math.isqrt(size) if factor == -1 else min(factor, math.isqrt(size))
    outer = next(each for each in range(limit, 0, -1) if size % each == 0)
    return outer, size // outer


# ---- files of adapters for tools of diffusion models ----

_KOHYA = {kinds.A: "lora_down.weight", kinds.B: "lora_up.weight", kinds.CORE: "lora_mid.weight"}


def for_tools(src: Any, given: Mapping[str, Any], paths: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an adapter's tensors under the names of a tool, and the options with which a conversion writes these."""
    if (layout := given["layout"]) not in TOOLS:
        raise ValueError(f'an adapter in one file needs layout="kohya" or layout="diffusers", got {show(layout)}')
    with ExitStack() as stack:
        adapter, catalog = _opened(stack, src, given, paths, layout="", quantize="adapters for llama.cpp")
        component, prefix = layout_of(catalog) or ("", "")
        of_diffusers = layout == "diffusers" or component == "unet"  # kohya names the others as a single file does
        if not component or (prefix is None) != of_diffusers:
            known = "sd1, sdxl, sd3, flux or wan in the layout of Diffusers"
            known = known if of_diffusers or not component else "sd3, flux or wan in the layout of a single file"
            raise UnsupportedError(f"{catalog.title}: names of {layout} need {known}", path=catalog.title)
        shapes = {name: tuple(catalog.about(name).shape) for name in catalog}
        products = _changes_of(adapter, catalog.title, None, shapes, None, for_tools=True)
        for name in (name for name in products if not name.startswith(prefix or "")):
            text = f"changes {show(name)}, a text encoder: pass the diffusion model alone as base"
            raise products[name].refused(text)
        if layout == "kohya":
            tensors, metadata = _as_kohya(_modules_of(products, catalog), prefix or ""), {}
        else:
            factors, settings = _as_peft(products, catalog)
            if settings["peft_type"] != "LORA":
                title, first = kinds.KINDS[settings["peft_type"]].title, next(iter(products.values()))
                raise first.refused(f"is a {title}, which pipelines of Diffusers do not load: pass a folder for PEFT")
            tensors = {f"{component}.{name.removeprefix(lora.PREFIX)}": factor for name, factor in factors.items()}
            about = {f"{component}.{key}": value for key, value in settings.items()}
            metadata = {"lora_adapter_metadata": json.dumps(about)}
    target = parse_target(given["dtype"])
    for name in (name for name in tensors if not name.endswith(".alpha")):
        tensors[name] = _written(tensors[name], target, None)
    return tensors, {**_CONSUMED, "metadata": {"format": "pt", **metadata, **(given["metadata"] or {})}}


def _as_kohya(modules: _Modules, prefix: str) -> dict[str, Any]:
    """Return tensors with the names and the shapes of kohya and LyCORIS."""
    tensors: dict[str, Any] = {}
    for module, (product, parts) in modules.items():
        rank = _rank_of(parts)
        if not rank and product.scaling != 1:
            text = f"is a LoKr without factors, of which LyCORIS ignores the scale, {product.scaling:g}"
            raise product.refused(text)
        outer = f"lora_unet_{module.removeprefix(prefix).replace('.', '_')}"  # whatever the class of the model
        tensors[f"{outer}.alpha"] = np.full((), product.scaling * (rank or 1), np.float32)
        if kinds.MAGNITUDE in parts:
            norms = parts.pop(kinds.MAGNITUDE)
            parts[kinds.SCALE] = norms.reshape(-1, 1, *(1 for _ in product.kernel))
        tensors |= {f"{outer}.{_KOHYA.get(role, role)}": value for role, value in parts.items()}
    return tensors


# ---- products through recipes ----


def _laid_out(recipes: Mapping[str, TensorRecipe], products: _Products) -> _Products:
    """Return the changes of tensors that recipes make, in the order of the changes of their sources."""
    order = {name: k for k, name in enumerate(products)}
    result: dict[str, tuple[int, Product]] = {}
    placed = set[str]()
    for target, recipe in recipes.items():
        parts: dict[int | None, list[Product]] = {}
        for move in (move for move in recipe.moves if move.source in products):
            moved = _moved(_part_of(products[move.source], move.read), move, back=False)
            parts.setdefault(move.written.item, []).append(moved)
        if parts:
            sources = products.keys() & recipe.sources
            result[target] = min(map(order.__getitem__, sources)), _joined(parts, recipe.shape)
            placed |= sources
    for name in products.keys() - placed:
        raise products[name].refused(f"changes {show(name)}, which the other form of the model leaves out")
    return {name: result[name][1] for name in sorted(result, key=lambda name: result[name][0])}


def _taken_back(
    recipes: Mapping[str, TensorRecipe], products: _Products, shape: Callable[[str], Sequence[int]]
) -> _Products:
    """Return the changes of the sources of tensors that recipes make; ``shape`` returns that of a source."""
    parts: dict[str, dict[int | None, list[Product]]] = {}
    for target, product in products.items():
        if not recipes[target].moves:
            raise product.refused(f"changes {show(target)}, which is computed from the config")
        for move in recipes[target].moves:
            sizes = tuple(shape(move.source))
            item = sizes if move.read.item is None else sizes[1:]
            moved = _moved(_part_of(product, move.written), move, back=True, shape=item)
            whole = _whole_of(moved, move.read, item)
            parts.setdefault(move.source, {}).setdefault(move.read.item, []).append(whole)
    return {source: _joined(items, tuple(shape(source))) for source, items in parts.items()}


def _part_of(product: Product, view: TensorView) -> Product:
    """Return the change of a part of a tensor."""
    if view.item is not None:
        product = product._replace(left=product.left[view.item], right=product.right[view.item])
    product = product.turned if view.transposed else product
    return product._replace(left=product.left[..., view.rows, :])


def _whole_of(product: Product, view: TensorView, shape: Sequence[int]) -> Product:
    """Return the change of a matrix, of which a part changes."""
    rows = shape[-1 if view.transposed else -2]
    if view.rows != slice(None):
        left = np.zeros((rows, product.left.shape[-1]), product.left.dtype)
        left[view.rows] = product.left
        product = product._replace(left=left)
    return product.turned if view.transposed else product


def _moved(product: Product, move: Move, *, back: bool, shape: Sequence[int] = ()) -> Product:
    """Return a change with rows and columns arranged as a move arranges the weight, or ``back`` in their own order."""
    arrangement = move.arrangement
    if arrangement is None:
        return product
    if arrangement.function is not None or arrangement.shape is not None or product.left.ndim > 2:
        how = "computed" if arrangement.function is not None else "divided by heads"
        raise product.refused(f"changes {show(move.source)}, which is {how} in the other form: no factors can follow")
    if arrangement.inverse == back:
        left, right = product.left, product.right
        left = left if arrangement.rows is None else left[arrangement.rows]
        right = right if arrangement.columns is None else right[:, arrangement.columns]
        product = product._replace(left=left, right=right)
        return _multiplied(product.turned if arrangement.transposed else product, arrangement, back=False)
    product = _multiplied(product, arrangement, back=True)
    product = product.turned if arrangement.transposed else product
    left, right = product.left, product.right
    if arrangement.rows is not None:
        left = np.zeros((shape[0], left.shape[1]), left.dtype)
        left[arrangement.rows] = product.left
    if arrangement.columns is not None:
        right = np.zeros((len(right), math.prod(shape[1:])), right.dtype)
        right[:, arrangement.columns] = product.right
    return product._replace(left=left, right=right)


def _multiplied(product: Product, arrangement: Arrangement, *, back: bool) -> Product:
    """Return a change with its rows multiplied like the rows of the weight."""
    if not arrangement.factors:
        return product
    left = product.left.astype(np.float32)
    for begin, end, factor in arrangement.factors:
        left[begin:end] *= np.float32(1 / factor if back else factor)
    return product._replace(left=left)


def _joined(parts: Mapping[int | None, Sequence[Product]], shape: tuple[int, ...]) -> Product:
    """Return the change of a tensor from those of its items, or of the whole tensor (None)."""
    if None in parts:
        product = _sum(parts[None])
    else:
        items = {item: _sum(group) for item, group in parts.items()}
        product = next(iter(items.values()))
        if len({each.left.shape for each in items.values()}) > 1:
            raise product.refused("has another rank than other experts, which are one tensor in the other form")
        alike = _alike([*items.values()])
        kinds = {part.dtype for each in alike for part in each[:2]}
        dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
        left, right = (np.zeros((shape[0], *part.shape), dtype) for part in product[:2])
        for item, each in zip(items, alike, strict=True):
            left[item], right[item] = each.left, each.right
        product = product._replace(left=left, right=right, scaling=alike[0].scaling)
    if product.shape != shape:
        text = f"changes a matrix of {list(product.shape)}, which is {list(shape)} in the other form"
        raise product.refused(f"{text}: no factors can follow")
    return product


def _alike(products: Sequence[Product]) -> Sequence[Product]:
    """Return changes with equal scalings."""
    if len({product.scaling for product in products}) == 1:
        return products
    scaled = ((each, each.left.astype(np.float32) * np.float32(each.scaling)) for each in products)
    return [each._replace(left=left, right=each.right.astype(np.float32), scaling=1.0) for each, left in scaled]


def _sum(products: Sequence[Product]) -> Product:
    """Return the sum of changes of a weight."""
    if len(products) == 1:
        return products[0]
    if (other := next((each for each in products if each.more), None)) is not None:
        raise other.refused("is one of several changes of a weight, of which only LoRA has a sum")
    alike = _alike(products)
    left, right = np.concatenate([each.left for each in alike], -1), np.concatenate([each.right for each in alike], -2)
    return alike[0]._replace(left=left, right=right)
