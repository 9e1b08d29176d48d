"""Make the table of a torch pickle: name the tensors in nested containers, and check each against its storage.

A value is a graph: containers can be shared or contain themselves. We walk it once, bottom up and without recursion.
Before we expand anything, we count its expanded size, with shared containers repeated. The rest of the containers is
metadata.

A tensor of shape n and strides s, in elements, uses the elements of its storage from ``offset`` to
``offset + sum((n - 1) * s)``. The arithmetic uses Python integers, which are exact.

Elements of NumPy arrays that a pickle stores as uncompressed bytes are read from the file directly. All other arrays,
and arrays whose byte order differs from the rest of the file, are written to an unnamed temporary file when we open it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from types import MappingProxyType
from typing import Any

from ...core import dtypes
from ...core.arrays import MAX_ARRAY, array_fits, c_strides
from ...core.registry import MAX_RANK, Content, OpenRequest
from ...core.runtime import paused
from ...core.table import ListedTable, Listing, Unknown, unreadable
from ...core.text import error_about, plural, show
from ...core.weight_file import WeightFile, open_temporary
from ...errors import ForbiddenError, FormatError, LimitError, SafeloadError, TensorNotFoundError, UnsupportedError
from ..unpickle import ADVICE, Foreign, Global, Inert, LargeBytes, Unpickled, describe
from .globals import ALLOWED, NumpyArray, NumpyDtype, PickledTensor, Storage

# Deepest nesting. Real files have about 10 levels, three per module of a pickled network; repr and json fail at about
# 1,000.
MAX_NESTING = 200
# Maximum number of values, besides tensors, after expansion: n nested lists, each with the next twice, become 2^n.
# Long text counts as one value per 100 characters, because JSON repeats it each time.
MAX_VALUES = 10_000_000
_LONG = 100
# Maximum number of tensor names; a tensor in a shared container counts once per name. The largest real model has a
# tenth.
MAX_TENSORS = 5_000_000
# Characters of all names: the size limit of a safetensors header.
MAX_NAME_TEXT = 100_000_000
# Limits of tensors and characters in proportion to the bytes of the pickle: tensors of a shared container get a name in
# each container that holds it. Real pickles take more than 30 bytes per tensor, and a name is shorter than its entry.
BYTES_A_TENSOR = 8
MAX_NAME_TEXT_A_BYTE = 20
# Tensors and characters that a pickle of any size can have.
_TENSORS_FREE, NAME_TEXT_FREE = 10_000, 1_000_000

# Containers of up to this many scalars are not remembered, but scanned again in each container above.
_FLAT = 4
# Characters of a file's name to show in metadata and messages, and containers in a message.
_SHOWN, _LISTED = 200, 20

# Parts of a name: the state that BUILD set on an inert object, and the arguments of its constructor.
STATE, ARGS = "<state>", "<args>"
# The parts of a pickled `torch.nn.Module` with tensors of its `state_dict`, in this order.
_MODULE = ("_parameters", "_buffers", "_modules")
# Classes of TorchScript.
SCRIPT = "__torch__."
# What `torch.compile` makes of a module, and the name of that module inside.
_COMPILED, _COMPILED_FROM = "torch._dynamo.eval_frame.OptimizedModule", "_orig_mod"
_GRAPH_MODULE = "torch.fx.graph_module.reduce_graph_module"  # called with the state of a `torch.fx.GraphModule`
# Arguments of a call to search for a storage, or to copy: many calls can share a tuple.
_FIRST_ARGS = 8

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_NOTHING = object()

_CONTAINERS = frozenset((dict, list, tuple, Inert, set, frozenset))
TENSORS = frozenset((PickledTensor, NumpyArray))

# A step (key or index) and the value behind it.
Link = tuple[Any, Any]
# Maximum size in bytes of a tensor that exceeds its storage by repeating elements (stride 0). Real examples are masks
# and positions of a few MiB. A converted or copied tensor takes its full size in memory.
MAX_REPEATED = 1 << 32

# Dtypes with the size of torch dtypes unknown to NumPy.
STAND_INS = {row.itemsize: row for row in map(ALLOWED.__getitem__, ("torch.uint8", "torch.uint16", "torch.uint32"))}


# ---- names in nested containers ----


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Node:
    value: Any  # keeps its id from being reused
    links: Sequence[Link] = ()  # to tensors, and to containers with tensors below
    tensors: int = 0  # names below
    text: int = 0  # characters of these names
    values: int = 0  # after expansion, without tensors
    depth: int = 0  # levels below
    plain: Any = None  # the rest as scalars, list, tuple, dict, set; `_NOTHING` if all values are tensors


class Tree:
    """The containers of a value; its limits grow with the ``size`` of the file or pickle in bytes."""

    def __init__(
        self,
        value: Any,
        path: str,
        size: int,
        members: Mapping[str, Collection[str]] = MappingProxyType({}),  # parameters and buffers by class of TorchScript
        tensors: frozenset[type[Any]] = TENSORS,  # types of tensors
    ) -> None:
        self._root = value
        self._script_members, self._tensors = members, tensors
        self._path = path
        self._nodes: dict[int, _Node] = {}
        self._texts: dict[int, str] = {}
        self._text_size = 0
        self._leaves: dict[int, Any] = {}
        self._modules: set[int] = set()
        self._members, self._most_members = 0, NAME_TEXT_FREE + size  # real members take bytes of the pickle each
        self._outside: list[_Node] = []  # with tensors of a module outside its state dict
        self._limits = (
            (MAX_NESTING, "levels of containers"),
            (MAX_VALUES, "values when shared containers are unfolded"),
            (min(MAX_TENSORS, _TENSORS_FREE + size // BYTES_A_TENSOR), "names of tensors"),
            (min(MAX_NAME_TEXT, NAME_TEXT_FREE + size * MAX_NAME_TEXT_A_BYTE), "characters in the names of tensors"),
        )
        nodes, above = self._nodes, {id(value)}
        waiting = [self._begin(value)] if type(value) in _CONTAINERS else []
        while waiting:
            node, links, rest = waiting[-1]
            for _, child in rest:
                key = id(child)
                if type(child) in _CONTAINERS and key not in nodes and key not in above and not _is_flat(child):
                    above.add(key)
                    waiting.append(self._begin(child))
                    break
            else:
                waiting.pop()
                above.discard(id(node.value))
                self._finish(node, links)
                nodes[id(node.value)] = node

    def _begin(self, value: Any) -> tuple[_Node, list[Link], Iterator[Link]]:
        """Return the node of a container and its links, after a module has got the names of its state dict."""
        if type(value) is Inert:
            if value.name == _GRAPH_MODULE and value.state is None and 0 < len(value.args) <= _FIRST_ARGS:
                value.state, value.args = value.args[0], value.args[1:]
            state = value.state if type(value.state) is dict else {}
            members = (part for part in map(state.get, _MODULE) if type(part) is dict)
            self._members += len(state) + sum(map(len, members))
            if self._members > self._most_members:
                raise self._too_many(self._most_members, "members of modules when shared states are unfolded")
            if _name_as_module(value, self._script_members.get(value.name)):
                self._modules.add(id(value))
        links = _links(value)
        return _Node(value), links, iter(links)

    def outside(self, named: Collection[int]) -> Iterator[str]:
        """Iterate over the names of module tensors outside their state dicts, without those with an id in ``named``."""
        pairs = islice((pair for node in self._outside for pair in self.tensors(node.value)), 1_000)
        return (name for name, tensor in pairs if id(tensor) not in named)

    def _finish(self, node: _Node, links: list[Link]) -> None:
        """Complete the node of a container after the nodes of the containers below."""
        length = len(node.value.items) + 2 if type(node.value) is Inert else len(node.value)
        node.values = 1 + length + _text_size(node.value) // _LONG
        kept: list[Link] = []
        for link in links:
            step, child = link
            if type(child) in self._tensors:
                node.tensors += 1
                node.text += len(step if type(step) is str else self._text(step)) + 1
                kept.append(link)
            elif type(child) in _CONTAINERS:
                below = self._nodes.get(id(child))
                if below is None:  # flat, or a cycle
                    node.depth = max(node.depth, 1)
                    node.values += 1 + _FLAT
                    continue
                if below.tensors and step is STATE and id(node.value) in self._modules:
                    self._outside.append(below)
                elif below.tensors:
                    node.tensors += below.tensors
                    node.text += below.text + below.tensors * (len(self._text(step)) + 1)
                    kept.append(link)
                node.values += below.values
                node.depth = max(node.depth, below.depth + 1)
        for count, (limit, unit) in zip((node.depth, node.values, node.tensors, node.text), self._limits, strict=True):
            if count > limit:
                raise self._too_many(limit, unit)
        node.links = kept or ()
        node.plain = self._plain(node, links)

    def _too_many(self, limit: int, unit: str) -> LimitError:
        return error_about(LimitError, f"the file has more than {limit:,} {unit}", path=self._path)

    def _text(self, step: Any) -> str:
        """Return a step as part of a name. The text is cached, because many containers have the same steps."""
        if type(step) is str or type(step) is int:  # an integer can be an index made here, and its id is reused
            return str(step)
        text = self._texts.get(id(step))
        if text is None:
            text = self._texts[id(step)] = str(self._leaf(step))
            self._text_size += len(text)
            if self._text_size > self._limits[-1][0]:  # for example keys that hold one long value in many tuples
                raise self._too_many(*self._limits[-1])
        return text

    def _leaf(self, value: Any) -> Any:
        """Return the metadata for a leaf other than a tensor, made once per object."""
        if type(value) in _SCALARS:
            return value
        if id(value) not in self._leaves:
            self._leaves[id(value)] = _describe(value)
        return self._leaves[id(value)]

    def _plain(self, node: _Node, links: list[Link]) -> Any:
        """Return a container without its tensors, or the container itself if it holds none."""
        value = node.value
        if type(value) in (set, frozenset):
            if node.tensors:
                raise error_about(UnsupportedError, "a tensor in a set has no name", path=self._path)
            return value if type(value) is set and not links else {self._leaf(item) for item in value}
        if type(value) in (list, tuple):
            if not links:
                return value
            items = [self._replace(item) for item in value]
            if node.tensors and all(item is _NOTHING for item in items):
                return _NOTHING
            return type(value)(None if item is _NOTHING else item for item in items)
        if type(value) is dict:
            if not links and _SCALARS.issuperset(map(type, value)):
                return value
            if links and self._tensors.issuperset(map(type, value.values())):
                return _NOTHING
            pairs = {self._leaf(key): self._replace(item) for key, item in value.items()}
        else:
            pairs = {"<global>": value.name}
            if value.args:
                pairs[ARGS] = self._replace(value.args)
            pairs.update((self._leaf(key), self._replace(item)) for key, item in value.items.items())
            if value.state is not None:
                pairs[STATE] = self._replace(value.state)
        kept = {key: item for key, item in pairs.items() if item is not _NOTHING}
        return _NOTHING if node.tensors and not kept else kept

    def _replace(self, item: Any) -> Any:
        if type(item) in _SCALARS:
            return item
        if type(item) in self._tensors or (type(item) is Inert and _holds_storage(item)):
            return _NOTHING
        if type(item) not in _CONTAINERS:
            return self._leaf(item)
        if (node := self._nodes.get(id(item))) is not None:
            return node.plain
        return item if _is_flat(item) else "<cycle>"  # a container that contains itself

    def metadata(self, root: Any = None) -> dict[Any, Any]:
        """Return everything below a value except tensors, nested as in the pickle; sequence indexes become keys."""
        value = self._root if root is None else root
        plain = self._replace(value)
        if plain is _NOTHING:
            return {}
        if isinstance(plain, dict):
            return plain
        if isinstance(plain, (list, tuple)):
            return {str(k): item for k, item in enumerate(plain) if self._replace(value[k]) is not _NOTHING}
        return {"value": plain}

    def plain(self) -> Any:
        """Return the whole value without tensors; None if it holds only tensors."""
        plain = self._replace(self._root)
        return None if plain is _NOTHING else plain

    def select(self, root: str) -> Any:
        """Return the container or tensor with a dotted name."""
        waiting = [(self._root, root)]
        while waiting:
            value, rest = waiting.pop()
            if type(value) not in _CONTAINERS:
                continue
            for step, child in reversed(_links(value)):
                text = self._text(step)
                if text == rest and (type(child) in _CONTAINERS or type(child) in self._tensors):
                    return child
                if rest.startswith(text + "."):
                    waiting.append((child, rest[len(text) + 1 :]))
        containers: list[str] = []  # with tensors, outermost first
        inner = deque([("", self._root)] if id(self._root) in self._nodes else [])
        while inner and len(containers) <= _LISTED:
            prefix, value = inner.popleft()
            for step, child in self._nodes[id(value)].links:
                if type(child) in _CONTAINERS:
                    name, count = prefix + self._text(step)[:_SHOWN], self._nodes[id(child)].tensors
                    containers.append(f"{show(name)[1:-1]} ({count} tensor{'s' * (count > 1)})")
                    inner.append((f"{name}.", child))
        containers[_LISTED:] = ["..."] * (len(containers) > _LISTED)
        text = f"no container {show(root)}; containers with tensors: {', '.join(containers) or 'none'}"
        raise error_about(TensorNotFoundError, text, path=self._path)

    def tensors(self, root: Any = None) -> Iterator[tuple[str, Any]]:
        """Iterate over names, relative to ``root``, and tensors in the order of the pickle."""
        start = self._root if root is None else root
        if type(start) in self._tensors:
            yield "tensor", start
        steps: list[str] = []  # not whole prefixes: a key can be as long as all names may be
        waiting = [iter(self._nodes[id(start)].links)] if id(start) in self._nodes else []
        while waiting:
            for step, child in waiting[-1]:
                if type(child) in self._tensors:
                    yield ".".join((*steps, self._text(step))), child
                else:
                    steps.append(self._text(step))
                    waiting.append(iter(self._nodes[id(child)].links))
                    break
            else:
                waiting.pop()
                if steps:
                    steps.pop()


def _is_flat(value: Any) -> bool:
    """Return True if a container is small and holds only scalars, and needs no node."""
    kind = type(value)
    if kind is Inert or kind is frozenset or len(value) > _FLAT or _text_size(value) > _LONG:
        return False
    return _SCALARS.issuperset(map(type, (*value, *value.values()) if kind is dict else value))


def _text_size(value: Any) -> int:
    """Return the length of the strings and bytes in a container."""
    kind = type(value)
    items = value.items.values() if kind is Inert else value.values() if kind is dict else value
    return sum([len(item) for item in items if type(item) is str or type(item) is bytes])


def _links(value: Any) -> list[Link]:
    """Return the steps from a container to its values, without scalars."""
    holder = value.items if type(value) is Inert else value
    pairs = holder.items() if type(holder) is dict else enumerate(holder)
    links = [(step, _linked(item)) for step, item in pairs if type(item) not in _SCALARS]
    if type(value) is Inert and value.args:
        links.insert(0, (ARGS, value.args))
    if type(value) is Inert and value.state is not None:
        links.append((STATE, value.state))
    return links


def _linked(item: Any) -> Any:
    """Return a value, or the tensor it stands for: an unknown function made it of a storage."""
    if type(item) is not Inert or not _holds_storage(item):
        return item
    shape = next((arg for arg in item.args[1:_FIRST_ARGS] if type(arg) is tuple), ())
    return PickledTensor(item, 0, shape, (), dtype=None, pending=item.name)


def _holds_storage(value: Inert) -> bool:
    """Return True if the arguments of a call, or the arguments within them, begin with a storage."""
    args = value.args[:_FIRST_ARGS]
    return any(type(arg) is Storage for group in (args, *args) if type(group) is tuple for arg in group[:_FIRST_ARGS])


def _name_as_module(value: Inert, members: Collection[str] | None) -> bool:
    """Give the tensors of a pickled `torch.nn.Module` the names of its `state_dict`; return False for other objects."""
    state = value.state
    if value.name == _COMPILED and state is None and not value.items and 0 < len(value.args) <= _FIRST_ARGS:
        value.items, value.args = {_COMPILED_FROM: value.args[0]}, value.args[1:]
        return True
    if type(state) is not dict or value.items:
        return False
    if value.name.startswith(SCRIPT):
        known = state if members is None else members
        entries = {
            key: item
            for key, item in state.items()
            if (type(item) in TENSORS and key in known) or (type(item) is Inert and item.name.startswith(SCRIPT))
        }
        rest = {key: item for key, item in state.items() if key not in entries}
    else:
        parts: list[Any] = [state.get(key) for key in _MODULE]
        if any(type(part) is not dict for part in parts):
            return False
        transient: Any = state.get("_non_persistent_buffers_set")
        hidden = transient if type(transient) in (set, frozenset) else ()
        parts[1] = {key: item for key, item in parts[1].items() if key not in hidden}
        entries = {key: item for part in parts for key, item in part.items() if item is not None}
        rest = {key: item for key, item in state.items() if key not in _MODULE}
        if len(hidden):
            rest[_MODULE[1]] = {key: item for key, item in state[_MODULE[1]].items() if key in hidden}
        if len(entries) < sum(item is not None for part in parts for item in part.values()):
            return False  # two members of the same name
    if any(type(key) is not str for key in entries):
        return False
    value.items, value.state = entries, rest
    return True


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is tuple or kind is frozenset:
        return kind(_describe(item) for item in value)
    if kind is Storage:
        key = value.key if len(value.key) <= _SHOWN else f"{value.key[:_SHOWN]}..."
        return f"<storage {key} of {value.count} elements of {value.type.name}>"
    if kind is Global or kind is NumpyDtype:
        return value.name
    return f"<global {value.name}>" if kind is Foreign or kind is Inert else f"<{kind.__name__.lower()}>"


# ---- the table ----


def content_of(file: WeightFile, request: OpenRequest, read: Callable[[OpenRequest], Content]) -> Content:
    """Run a pickle reader. Errors recommend ``unknown_globals="inert"`` only if that works."""
    try:
        with paused(file.size):  # a pickle can make an object per byte
            return read(request)
    except (ForbiddenError, UnsupportedError) as error:
        text, helps = str(error), False
        if ADVICE in text:
            with suppress(SafeloadError, OSError):
                helps = bool(read(request._replace(inert=True)).names)
        if helps or ADVICE not in text:
            raise
        raise type(error)(text.replace(ADVICE, ""), path=error.path) from None


def make_tables(
    pickled: Unpickled,
    request: OpenRequest,
    file: WeightFile,
    locate: Callable[[Storage], int],  # returns the offset of a storage in the file
    *,
    big_endian: bool = False,
) -> Content:
    """Give a file the table of its pickle; arrays that it cannot provide directly are in a temporary file beside it."""
    path = file.path
    tree = Tree(pickled.value, path, pickled.size, pickled.members)
    root = None if request.root is None else tree.select(request.root)
    by_id: dict[int, Listing] = {}
    listings: dict[str, Listing | None] = {}
    notes: list[str] = []
    tensors, arrays = TensorPlaces(path, locate), ArrayPlaces(pickled, path, big_endian=big_endian)
    embedded = TensorPlaces(path, lambda storage: arrays.put(storage.raw or b"", 1))
    for name, tensor in tree.tensors(root):
        if name in listings:
            raise FormatError(f"two tensors are named {show(name)}", path)
        if isinstance(tensor, NumpyArray):
            listing = arrays.place(name, tensor)
            if request.inert and listing is not None and listing.unknown is not None and not listing.unknown.is_tensor:
                notes.append(f"{show(name)} is left out: {listing.unknown.label} are no tensor")
            else:
                listings[name] = listing
        elif type(tensor.storage) is Storage and tensor.storage.raw is not None:
            listings[name] = None
            arrays.listings.append(embedded.place(name, tensor))
        elif (listing := by_id.get(id(tensor))) is not None:
            listings[name] = listing._replace(name=name)
        else:
            listings[name] = by_id[id(tensor)] = tensors.place(name, tensor)
    if outside := dict.fromkeys(tree.outside(by_id)):
        shown = f"{plural(len(outside), 'tensor')} that the state dict of its module does not have"
        notes.append(f"left out: {shown}, such as {show(next(iter(outside)))}")
    named_globals = dict.fromkeys(pickled.harmless, True) | dict.fromkeys(pickled.foreign, False)
    in_file = [listing for listing in listings.values() if listing is not None]
    file.table = ListedTable(in_file, tree.metadata(root), big_endian=big_endian, named_globals=named_globals)
    return Content(file, arrays.beside(file), list(listings), notes)


@dataclasses.dataclass(slots=True, eq=False)
class TensorPlaces:
    """The places of a pickle's tensors in their storages."""

    _path: str
    _storage_begin: Callable[[Storage], int]

    def place(self, name: str, tensor: PickledTensor) -> Listing:
        """Check a tensor against its storage and describe it."""
        storage, offset = tensor.storage, tensor.offset
        if type(tensor.pending) is str:
            shape: tuple[int, ...] = ()
            with suppress(FormatError):
                shape = self._integers(tensor.shape, "the shape", name)
            if len(shape) > MAX_RANK or not array_fits(shape, 1):
                shape = ()
            reason = "makes the tensor, and is unknown to safeload; save the values as a plain tensor"
            reason = storage if type(storage) is str else reason
            is_missing = reason.startswith("has no values")
            return unreadable(name, Unknown(tensor.pending, shape, reason, is_missing=is_missing))
        type_ = tensor.dtype or storage.type
        if type_.code is None or tensor.pending is not None:
            return self._special(name, tensor, type_)
        row = dtypes.BY_CODE[type_.code]
        itemsize = type_.itemsize
        count = _plain_count(tensor)
        if count and storage.part is None and (offset + count) * itemsize <= storage.nbytes:
            begin = self._locate(name, storage) + offset * itemsize
            listing = Listing(name, row, tensor.shape, begin, begin + count * itemsize)
            return self._logical(listing) if row.packed else listing
        shape = self._integers(tensor.shape, "the shape", name)
        strides = self._integers(tensor.strides, "the strides", name)
        (offset,) = self._integers((offset,), "the offset", name)
        if len(shape) != len(strides) or len(shape) > MAX_RANK:
            text = f"{len(shape)} axes and {len(strides)} strides; expected equal numbers of at most {MAX_RANK}"
            raise self._refusal(name, text)
        first, size = (0, storage.nbytes) if storage.part is None else (x * storage.type.itemsize for x in storage.part)
        begin = self._locate(name, storage) + first
        if not array_fits(shape, itemsize):
            raise self._refusal(name, f"shape {list(shape)} needs more bytes than any memory has")
        if 0 in shape:
            return self._logical(Listing(name, row, shape, begin, begin))
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if (last + 1) * itemsize > size:
            text = f"shape {list(shape)} with strides {list(strides)} from element {offset} uses "
            text += f"{(last + 1) * itemsize} bytes of storage {show(storage.key)}, which has {size}"
            raise self._refusal(name, text)
        if (full := prod(shape) * itemsize) > max(size, MAX_REPEATED):
            text = f": shape {list(shape)} repeats {size} bytes to {full}, the limit is {MAX_REPEATED}"
            raise error_about(LimitError, text, path=self._path, tensor=name)
        steps = tuple(stride * itemsize for stride in strides)
        if max((0, *steps)) > MAX_ARRAY:  # possible on an axis of one element, which never uses its stride
            raise self._refusal(name, f"strides {list(strides)} need more bytes than any memory has")
        begin += offset * itemsize
        end = begin + (last + 1 - offset) * itemsize
        in_order = steps == c_strides(shape, itemsize)
        return self._logical(Listing(name, row, shape, begin, end, None if in_order else steps))

    def _locate(self, name: str, storage: Storage) -> int:
        try:
            return self._storage_begin(storage)
        except FormatError as error:
            text = f": {error.args[0]}"
            raise error_about(FormatError, text, path=error.path, offset=error.offset, tensor=name) from None
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} (of tensor {show(name)})", path=error.path, tensor=name) from None

    def _logical(self, listing: Listing) -> Listing:
        """Return a listing with its logical shape: torch counts the bytes of the last axis if elements share them."""
        row, shape = listing.row, listing.shape
        if not row.packed:
            return listing
        if not shape or listing.strides is not None:
            text = "with strides or without an axis cannot be represented by an array"
            return unreadable(listing.name, Unknown(row.code, shape, text), listing.begin, listing.end)
        return listing._replace(shape=(*shape[:-1], shape[-1] * 8 // row.bits))

    def _special(self, name: str, tensor: PickledTensor, type_: Global) -> Listing:
        """Describe a tensor of a dtype unknown to NumPy, or with pending operations."""
        pending, stand_in = tensor.pending, type_ if type_.code is not None else STAND_INS[type_.itemsize]
        listing = self.place(name, dataclasses.replace(tensor, dtype=stand_in, pending=None))
        if type_.code is None:
            label, reason = type_.name.removeprefix("torch."), "cannot be represented by an array"
        elif isinstance(pending, Mapping) and (pending.get("conj") or pending.get("neg")):
            label = dtypes.BY_CODE[type_.code].name
            reason = "with a pending conjugation or negation must be saved after resolve_conj() and resolve_neg()"
        else:
            return listing
        return unreadable(name, Unknown(label, listing.shape, reason), listing.begin, listing.end)

    def _integers(self, values: Any, label: str, name: str) -> tuple[int, ...]:
        if type(values) not in (tuple, list):
            raise self._refusal(name, f"{label} must be a tuple of integers, got {describe(values)}")
        for value in values:
            if type(value) is not int:
                raise self._refusal(name, f"{label} must be integers, got {describe(value)}")
            if value < 0:
                raise self._refusal(name, f"{label} must not be negative, got {describe(value)}")
            if value > MAX_ARRAY:
                raise self._refusal(name, f"{label}: {describe(value)} needs more bytes than any memory has")
        return tuple(values)

    def _refusal(self, name: str, text: str) -> FormatError:
        return error_about(FormatError, f": {text}", path=self._path, tensor=name)


def _plain_count(tensor: PickledTensor) -> int:
    """Return the number of elements of a tensor in C order, as nearly all are; 0 if it has anything unusual."""
    shape, strides, offset = tensor.shape, tensor.strides, tensor.offset
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) > MAX_RANK:
        return 0
    values = (offset, *shape, *strides)
    plain = set(map(type, values)) == {int} and min(values) >= 0 and strides == c_strides(shape, 1)
    return prod(shape) if plain else 0


# ---- the elements of arrays ----

# Dtypes of arrays other than tensors.
_TEXTS = re.compile(r"Python objects|(object|str|bytes)|[<>|=]?[SUO][0-9]*", re.ASCII)


class ArrayPlaces:
    """The places of a pickle's arrays: in the file, or in a temporary file."""

    def __init__(self, pickled: Unpickled, path: str, *, big_endian: bool) -> None:
        self._pickled = pickled
        self._path = path
        self._big_endian = big_endian  # byte order of the file's other tensors
        self._chunks = [bytes(64)]  # zeros at first: the temporary file must not look like another format
        self._size = 64
        self._begins: dict[tuple[int, int], int] = {}
        self.listings: list[Listing] = []  # of the temporary file

    def place(self, name: str, array: NumpyArray) -> Listing | None:
        """Describe an array in the file; None if it goes into the temporary file."""
        dtype = array.dtype
        if dtype is None or dtype.row is None:
            label = "no dtype" if dtype is None else dtype.name
            is_tensor = _TEXTS.fullmatch(label) is None
            return unreadable(name, Unknown(label, array.shape, "is not a dtype of weights", is_tensor))
        if not array_fits(array.shape, dtype.itemsize):
            return unreadable(name, Unknown(dtype.name, array.shape, "elements need more bytes than any memory has"))
        strides = None if array.order is None else _strides(array, dtype.itemsize)
        swapped = dtype.itemsize > 1 and len(array.raw) > 0
        begin = None if swapped and dtype.big_endian != self._big_endian else self._in_file(array.raw)
        if begin is not None:
            return Listing(name, dtype.row, array.shape, begin, begin + len(array.raw), strides)
        begin = self.put(array.raw, dtype.row.swap if swapped and dtype.big_endian else 1)
        self.listings.append(Listing(name, dtype.row, array.shape, begin, begin + len(array.raw), strides))
        return None

    def _in_file(self, raw: bytes | bytearray | LargeBytes) -> int | None:
        """Return the offset of the bytes in the file; None if the file does not hold them unencoded."""
        base = self._pickled.base
        if base is None:
            return None
        if not raw:
            return base
        if type(raw) is LargeBytes:
            return base + raw.at
        at = self._pickled.places.get(id(raw))  # which may have been reused
        return None if at is None or self._pickled.data[at : at + len(raw)] != raw else base + at

    def put(self, raw: bytes | bytearray | LargeBytes, width: int) -> int:
        """Add bytes to the temporary file, once, and return their offset; numbers of ``width`` bytes are swapped."""
        key = (id(raw), width)
        if key not in self._begins:
            self._begins[key] = self._size
            data = bytes(raw)
            if width > 1:
                import numpy as np

                data = np.frombuffer(data, f">u{width}").astype(f"<u{width}").tobytes()
            self._chunks += (data, bytes(-len(data) % 64))
            self._size += len(data) + -len(data) % 64
        return self._begins[key]

    def beside(self, origin: WeightFile) -> list[WeightFile]:
        """Return the temporary file with its table, beside the file of the pickle, if any array needs it."""
        if not self.listings:
            return []
        file = open_temporary("safeload-pickle-", lambda out, _: out.writelines(self._chunks), shown=self._path)
        file.table = ListedTable(self.listings)
        file.stand_for(origin)
        return [file]


def _strides(array: NumpyArray, itemsize: int) -> tuple[int, ...] | None:
    """Return the strides in bytes; None for C order."""
    order: Any = array.order
    if 0 in array.shape or sum(dim > 1 for dim in array.shape) < 2:
        return None
    in_memory = c_strides(tuple(array.shape[axis] for axis in order), itemsize)
    strides = tuple(map(in_memory.__getitem__, map(order.index, range(len(order)))))
    return None if strides == c_strides(array.shape, itemsize) else strides
