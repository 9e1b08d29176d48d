"""Name the tensors in nested containers, and return the rest of the containers as metadata.

A value is a graph: containers can be shared or contain themselves. We walk it once, bottom up and without recursion.
Before we expand anything, we count its expanded size, with shared containers repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from ...base.messages import error_about
from ...base.text import show
from ...errors import LimitError, TensorNotFoundError, UnsupportedError
from ..unpickle.machine import Foreign, Global, Inert
from ..unpickle.numpy_arrays import NumpyArray, NumpyDtype
from .globals import PickledTensor, Storage

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
# Stands for a container that contains itself.
CYCLE = "<cycle>"
# The parts of a pickled `torch.nn.Module` with tensors of its `state_dict`, in this order.
_MODULE = ("_parameters", "_buffers", "_modules")
_TRANSIENT = "_non_persistent_buffers_set"
# Classes of TorchScript.
SCRIPT = "__torch__."
# What `torch.compile` makes of a module, and the name of that module inside.
_COMPILED, _COMPILED_FROM = "torch._dynamo.eval_frame.OptimizedModule", "_orig_mod"
# Arguments of a call to search for a storage.
_FIRST_ARGS = 8

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_NOTHING = object()

_CONTAINERS = frozenset((dict, list, tuple, Inert, set, frozenset))
TENSORS = frozenset((PickledTensor, NumpyArray))

# A step (key or index) and the value behind it.
Link = tuple[Any, Any]


class _Node:
    """Facts about a container."""

    __slots__ = ("depth", "links", "plain", "tensors", "text", "value", "values")

    def __init__(self, value: Any) -> None:
        self.value = value  # keeps its id from being reused
        self.links: Sequence[Link] = ()  # to tensors, and to containers with tensors below
        # Names below, characters of these names, values after expansion without tensors, levels below.
        self.tensors = self.text = self.values = self.depth = 0
        self.plain: Any = None  # the rest as scalars, list, tuple, dict, set; `_NOTHING` if all values are tensors


class Tree:
    """The containers of a value; its limits grow with the ``size`` of the pickle in bytes.

    ``members`` are the names of parameters and buffers by class of TorchScript.
    """

    def __init__(
        self, value: Any, path: str, size: int, members: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> None:
        self._root = value
        self._script_members = members
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
        if type(value) in _CONTAINERS:
            self._walk(value)

    def _walk(self, root: Any) -> None:
        nodes, above = self._nodes, {id(root)}
        waiting = [self._begin(root)]
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
            state = value.state if type(value.state) is dict else {}
            members = (part for part in map(state.get, _MODULE) if type(part) is dict)
            self._members += len(state) + sum(map(len, members))
            if self._members > self._most_members:
                raise self._too_many(self._most_members, "members of modules when shared states are unfolded")
            if _name_as_module(value, self._script_members.get(value.name)):
                self._modules.add(id(value))
        links = _links(value)
        return _Node(value), links, iter(links)

    def outside(self, named: Collection[int], limit: int = 1_000) -> Iterator[str]:
        """Iterate over the names of module tensors outside their state dicts, without those with an id in ``named``."""
        for name, tensor in islice((pair for node in self._outside for pair in self.tensors(node.value)), limit):
            if id(tensor) not in named:
                yield name

    def _finish(self, node: _Node, links: list[Link]) -> None:
        """Complete the node of a container after the nodes of the containers below."""
        length = len(node.value.items) + 2 if type(node.value) is Inert else len(node.value)
        node.values = 1 + length + _text_size(node.value) // _LONG
        kept: list[Link] = []
        for link in links:
            step, child = link
            if type(child) in TENSORS:
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
        if kept:
            node.links = kept
        node.plain = self._plain(node, links)

    def _too_many(self, limit: int, unit: str) -> LimitError:
        return error_about(LimitError, f"the pickle has more than {limit:,} {unit}", path=self._path)

    def _text(self, step: Any) -> str:
        """Return a step as part of a name. The text is cached, because many containers have the same steps."""
        if type(step) is str or type(step) is int:  # an integer can be an index made here, and its id is reused
            return str(step)
        text = self._texts.get(id(step))
        if text is None:
            text = self._texts[id(step)] = str(self._leaf(step))
            self._text_size += len(text)
            limit, unit = self._limits[-1]
            if self._text_size > limit:  # for example keys that hold one long value in many tuples
                raise self._too_many(limit, unit)
        return text

    def _leaf(self, value: Any) -> Any:
        """Return the metadata for a leaf other than a tensor, made once per object."""
        if type(value) in _SCALARS:
            return value
        leaf = self._leaves.get(id(value), _NOTHING)
        if leaf is _NOTHING:
            leaf = self._leaves[id(value)] = _describe(value)
        return leaf

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
            if links and TENSORS.issuperset(map(type, value.values())):
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
        if type(item) in TENSORS or (type(item) is Inert and _holds_storage(item)):
            return _NOTHING
        if type(item) not in _CONTAINERS:
            return self._leaf(item)
        node = self._nodes.get(id(item))
        if node is not None:
            return node.plain
        return item if _is_flat(item) else CYCLE

    def metadata(self, root: Any = None) -> dict[Any, Any]:
        """Return everything below a value except tensors, nested as in the pickle; sequence indexes become keys."""
        value = self._root if root is None else root
        if type(value) not in _CONTAINERS:
            return {} if type(value) in TENSORS else {"value": self._leaf(value)}
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
                if text == rest and (type(child) in _CONTAINERS or type(child) in TENSORS):
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

    def tensors(self, root: Any = None) -> Iterator[tuple[str, PickledTensor | NumpyArray]]:
        """Iterate over names, relative to ``root``, and tensors in the order of the pickle."""
        start = self._root if root is None else root
        if type(start) in TENSORS:
            yield "tensor", start
        if id(start) not in self._nodes:
            return
        steps: list[str] = []
        waiting = [iter(self._nodes[id(start)].links)]
        while waiting:
            for step, child in waiting[-1]:
                if type(child) in TENSORS:
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
    if kind is Inert or len(value) > _FLAT or _text_size(value) > _LONG:
        return False
    if kind is dict and not _SCALARS.issuperset(map(type, value.values())):
        return False
    return kind is not frozenset and _SCALARS.issuperset(map(type, value))


def _text_size(value: Any) -> int:
    """Return the length of the strings and bytes in a container."""
    kind = type(value)
    items = value.items.values() if kind is Inert else value.values() if kind is dict else value
    return sum([len(item) for item in items if type(item) is str or type(item) is bytes])


def _links(value: Any) -> list[Link]:
    """Return the steps from a container to its values, without scalars."""
    kind = type(value)
    if kind is dict:
        return [(key, _linked(item)) for key, item in value.items() if type(item) not in _SCALARS]
    if kind is Inert:
        links = [(key, _linked(item)) for key, item in value.items.items() if type(item) not in _SCALARS]
        if value.args:
            links.insert(0, (ARGS, value.args))
        if value.state is not None:
            links.append((STATE, value.state))
        return links
    return [(k, _linked(item)) for k, item in enumerate(value) if type(item) not in _SCALARS]


def _linked(item: Any) -> Any:
    """Return a value, or the tensor it stands for: an unknown function made it of a storage."""
    if type(item) is not Inert or not _holds_storage(item):
        return item
    shape = next((arg for arg in item.args[1:_FIRST_ARGS] if type(arg) is tuple), ())
    return PickledTensor(item, 0, shape, (), dtype=None, pending=item.name)


def _holds_storage(value: Inert) -> bool:
    """Return True if the arguments of a call, or the arguments within them, begin with a storage."""
    args: list[Any] = list(value.args[:_FIRST_ARGS])
    args += [inner for arg in args if type(arg) is tuple for inner in arg[:_FIRST_ARGS]]
    return any(type(arg) is Storage for arg in args)


def _name_as_module(value: Inert, members: Collection[str] | None) -> bool:
    """Give the tensors of a pickled `torch.nn.Module` the names of its `state_dict`; return False for other objects."""
    state = value.state
    if value.name == _COMPILED and value.args and state is None and not value.items:
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
        transient: Any = state.get(_TRANSIENT)
        hidden = transient if type(transient) in (set, frozenset) else ()
        parts[1] = {key: item for key, item in parts[1].items() if key not in hidden}
        entries = {key: item for part in parts for key, item in part.items() if item is not None}
        rest = {key: item for key, item in state.items() if key not in _MODULE}
        if len(hidden):
            rest[_MODULE[1]] = {key: item for key, item in state[_MODULE[1]].items() if key in hidden}
        if len(entries) < sum(item is not None for part in parts for item in part.values()):
            return False  # two members of one name
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
    if kind is Foreign or kind is Inert:
        return f"<global {value.name}>"
    return f"<{kind.__name__.lower()}>"
