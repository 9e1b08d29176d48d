"""Names for the tensors in nested containers, and what is left of the containers without them.

A value is a graph: containers may be shared, or hold themselves. It is walked once, bottom up and without recursion;
what it would unfold to is counted before anything is unfolded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import LimitError, TensorNotFoundError, UnsupportedError
from .pickle_machine import Foreign, Global, Inert, show
from .torch_globals import Storage, Tensor

# Deepest nesting. Real files have about 10 levels, three for each module of a pickled network; repr and json fail at
# some 1,000.
MAX_NESTING = 200
# Values that what is no tensor may unfold to: a list in a list in a list, each twice, has 2^n.
MAX_VALUES = 10_000_000
# Tensors: names of the same one in a container that is shared count each. 10 times the most in a real model.
MAX_TENSORS = 5_000_000
# Characters of all names; as much as a safetensors header may have.
MAX_NAME_TEXT = 100_000_000

# A step of a name for what an inert object was given: by BUILD, and as arguments.
STATE, ARGS = "<state>", "<args>"
# In place of a container within itself.
CYCLE = "<cycle>"

_SCALARS = frozenset((type(None), bool, int, float, str, bytes, bytearray))
_NOTHING = object()

# A step and what it leads to.
Link = tuple[Any, Any]


class _Node:
    """What is known of a container.

    Attributes:
        value: the container; held so that its id stays its own.
        links: to all that is no scalar, without those that lead back.
        tensors: names below it.
        text: characters of these names.
        values: what the rest unfolds to.
        depth: levels below it.
        plain: the rest, as None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set; `_NOTHING` when all
            of it was tensors.
    """

    __slots__ = ("depth", "links", "plain", "tensors", "text", "value", "values")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.links: list[Link] = []
        self.tensors = self.text = self.values = self.depth = 0
        self.plain: Any = None


class Tree:
    """The containers of a value.

    Args:
        value: what the pickle made.
        path: of the file, for messages.

    Raises:
        LimitError: they are nested too deeply or unfold to too much.
        UnsupportedError: a tensor is in a set, where it has no name.
    """

    def __init__(self, value: Any, path: str) -> None:
        self._root = value
        self._path = path
        self._nodes: dict[int, _Node] = {}
        if _is_container(value):
            self._walk(value)

    def _walk(self, root: Any) -> None:
        nodes, above = self._nodes, {id(root)}
        waiting = [(_Node(root), iter(_links(root)))]
        while waiting:
            node, links = waiting[-1]
            for link in links:
                child = link[1]
                if not _is_container(child) or id(child) in nodes:
                    node.links.append(link)
                elif id(child) not in above:
                    node.links.append(link)
                    above.add(id(child))
                    waiting.append((_Node(child), iter(_links(child))))
                    break
            else:
                waiting.pop()
                above.discard(id(node.value))
                self._finish(node)
                nodes[id(node.value)] = node

    def _finish(self, node: _Node) -> None:
        """Sums up a container whose links are finished."""
        node.values = 1 + _length(node.value)
        for step, child in node.links:
            if type(child) is Tensor:
                node.tensors += 1
                node.text += len(step_text(step)) + 1
            elif _is_container(child):
                below = self._nodes[id(child)]
                node.tensors += below.tensors
                node.text += below.text + below.tensors * (len(step_text(step)) + 1)
                node.values += below.values
                node.depth = max(node.depth, below.depth + 1)
        for found, most, what in (
            (node.depth, MAX_NESTING, "levels of containers"),
            (node.values, MAX_VALUES, "values when shared containers are unfolded"),
            (node.tensors, MAX_TENSORS, "names of tensors"),
            (node.text, MAX_NAME_TEXT, "characters in the names of tensors"),
        ):
            if found > most:
                raise LimitError(f"{self._path}: the pickle has more than {most:,} {what}")
        node.plain = self._plain(node)

    def _plain(self, node: _Node) -> Any:
        """A container without its tensors."""
        value = node.value
        if type(value) in (set, frozenset):
            if node.tensors:
                raise UnsupportedError(f"{self._path}: a tensor in a set has no name")
            return {_leaf(item) for item in value}
        if type(value) in (list, tuple):
            if not node.links and not _links(value):
                return value
            items = [self._replace(item, node) for item in value]
            if node.tensors and all(item is _NOTHING for item in items):
                return _NOTHING
            return type(value)(None if item is _NOTHING else item for item in items)
        if type(value) is dict:
            if not node.links and not _links(value) and _SCALARS.issuperset(map(type, value)):
                return value
            pairs = {_leaf(key): self._replace(item, node) for key, item in value.items()}
        else:
            pairs = {"<global>": value.name}
            if value.args:
                pairs[ARGS] = self._replace(value.args, node)
            pairs.update((_leaf(key), self._replace(item, node)) for key, item in value.items.items())
            if value.state is not None:
                pairs[STATE] = self._replace(value.state, node)
        kept = {key: item for key, item in pairs.items() if item is not _NOTHING}
        return _NOTHING if node.tensors and not kept else kept

    def _replace(self, item: Any, above: _Node) -> Any:
        if type(item) in _SCALARS:
            return item
        if type(item) is Tensor:
            return _NOTHING
        if not _is_container(item):
            return _leaf(item)
        node = self._nodes.get(id(item))
        return CYCLE if node is None else node.plain

    @property
    def metadata(self) -> dict[Any, Any]:
        """All that is no tensor, nested as it was; a root that is no dict with the steps as keys."""
        root = self._root
        if not _is_container(root):
            return {} if type(root) is Tensor else {"value": _leaf(root)}
        plain = self._nodes[id(root)].plain
        if plain is _NOTHING:
            return {}
        if isinstance(plain, dict):
            return plain
        if isinstance(plain, (list, tuple)):
            whole = self._nodes[id(root)]
            return {str(k): item for k, item in enumerate(plain) if self._replace(root[k], whole) is not _NOTHING}
        return {"value": plain}

    def select(self, root: str) -> Any:
        """The container or tensor that a dotted name leads to.

        Raises:
            TensorNotFoundError: there is none; the message lists what is there.
        """
        waiting = [(self._root, root)]
        while waiting:
            value, rest = waiting.pop()
            if not _is_container(value):
                continue
            for step, child in reversed(_links(value)):
                text = step_text(step)
                if text == rest and (_is_container(child) or type(child) is Tensor):
                    return child
                if rest.startswith(text + "."):
                    waiting.append((child, rest[len(text) + 1 :]))
        there = self._list_containers()
        raise TensorNotFoundError(
            f"{self._path} has no container {root!r}; those with tensors are {', '.join(there) if there else 'none'}"
        )

    def _list_containers(self, most: int = 20) -> list[str]:
        """Containers that hold tensors, the outermost first."""
        if not _is_container(self._root):
            return []
        found: list[str] = []
        level = [("", self._nodes[id(self._root)])]
        while level and len(found) < most:
            below = []
            for prefix, node in level:
                for step, child in node.links:
                    inner = self._nodes.get(id(child)) if _is_container(child) else None
                    if inner is not None and inner.tensors:
                        name = prefix + step_text(step)
                        found.append(f"{show(name)[1:-1]} ({inner.tensors} tensor{'s' * (inner.tensors > 1)})")
                        below.append((f"{name}.", inner))
            level = below[:most]
        return [*found[:most], *(["..."] if len(found) > most else [])]

    def tensors(self, root: Any = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor and its name, in the order of the pickle.

        Args:
            root: where names start, from `select`; None for the whole.
        """
        start = self._root if root is None else root
        if type(start) is Tensor:
            yield "tensor", start
        if not _is_container(start):
            return
        waiting = [("", iter(self._nodes[id(start)].links))]
        while waiting:
            prefix, links = waiting[-1]
            for step, child in links:
                if type(child) is Tensor:
                    yield prefix + step_text(step), child
                elif _is_container(child) and self._nodes[id(child)].tensors:
                    waiting.append((f"{prefix}{step_text(step)}.", iter(self._nodes[id(child)].links)))
                    break
            else:
                waiting.pop()


def step_text(step: Any) -> str:
    """A key as part of a name."""
    return step if type(step) is str else str(_leaf(step))


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind is dict or kind is list or kind is tuple or kind is Inert or kind is set or kind is frozenset


def _length(value: Any) -> int:
    return len(value.items) + 2 if type(value) is Inert else len(value)


def _links(value: Any) -> list[Link]:
    """Steps from a container to all in it that is no scalar."""
    kind = type(value)
    if kind is dict:
        return [(key, item) for key, item in value.items() if type(item) not in _SCALARS]
    if kind is Inert:
        links = [(key, item) for key, item in value.items.items() if type(item) not in _SCALARS]
        if value.args:
            links.insert(0, (ARGS, value.args))
        if value.state is not None:
            links.append((STATE, value.state))
        return links
    return [(k, item) for k, item in enumerate(value) if type(item) not in _SCALARS]


def _leaf(value: Any) -> Any:
    """What stands in metadata for a value that is no container and no tensor."""
    kind = type(value)
    if kind in _SCALARS or kind is tuple or kind is frozenset:
        return value if kind is not tuple and kind is not frozenset else kind(_leaf(item) for item in value)
    if kind is Storage:
        return f"<storage {value.key} of {value.count} elements of {value.type.name}>"
    if kind is Global:
        return value.name
    if kind is Foreign or kind is Inert:
        return f"<global {value.name}>"
    return f"<{kind.__name__.lower()}>"
