"""List tensors in rows: equal layers share a row, or modules form a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...base.gc_pause import paused
from ...base.layout import BETWEEN_PARTS, table
from ...base.names import families, natural_key
from ...base.table import TensorInfo
from ...base.text import printable, size

# Maximum depth of the tree, which is walked recursively; deeper names stay whole.
_LEVELS = 32


class Row(NamedTuple):
    """A tensor, a group of equal tensors, or the sum of a module."""

    name: str  # with braces for a group, such as ``h.{0..11}.w``
    dtype: str  # "" for a module
    shape: tuple[int, ...] | None  # of each tensor; None for a module
    number: int  # of tensors
    parameters: int  # of all tensors
    nbytes: int  # of all tensors


def _by_name(row: Row) -> Any:
    return natural_key(row.name)


# Sort keys; numbers in descending order.
KEYS: dict[str, Callable[[Row], Any]] = {
    "name": _by_name,
    "dtype": lambda row: (row.dtype, _by_name(row)),
    "shape": lambda row: tuple(-dim for dim in row.shape or ()),
    "parameters": lambda row: -row.parameters,
    "size": lambda row: -row.nbytes,
}


def rows_of(infos: Iterable[TensorInfo], *, alone: bool) -> list[Row]:
    """Return rows in file order, with equal layers in one row; if ``alone``, a row per tensor in natural order."""
    infos = list(infos)
    with paused(len(infos)):
        if alone:
            rows = [Row(i.name, i.dtype, i.shape, 1, i.size, i.nbytes) for i in infos]
            return sorted(rows, key=_by_name)
        groups = families([info.name for info in infos], [(i.dtype, i.shape, i.nbytes) for i in infos])
        return [
            Row(
                family.name,
                info.dtype,
                info.shape,
                family.number,
                family.number * info.size,
                family.number * info.nbytes,
            )
            for family in groups
            for info in (infos[family.first],)
        ]


def ordered(rows: list[Row], key: str | None) -> list[Row]:
    """Sort rows by one of `KEYS`, if any."""
    return rows if key is None else sorted(rows, key=KEYS[key])


def as_table(rows: Sequence[Row], columns: int | None) -> list[str]:
    """Return the header and the lines of a listing."""
    with paused(len(rows)):
        cells = [(printable(row.name), row.dtype, _shape(row), size(row.nbytes)) for row in rows]
        return table(("tensor", "dtype", "shape", "size"), cells, right=frozenset((3,)), columns=columns)


def _shape(row: Row) -> str:
    if row.shape is None:
        return ""
    return str(list(row.shape)) + (f" x {row.number:,}" if row.number > 1 else "")


# ---- tree ----


class _Module:
    """A node of the tree."""

    def __init__(self, name: str) -> None:
        self.row = Row(name, "", None, 0, 0, 0)  # sums over the module, or the row of a tensor
        self.inner: dict[tuple[str, bool], _Module] = {}  # children by the last part of their names

    def add(self, parts: Sequence[str], row: Row) -> None:
        """Add a tensor; ``parts`` is the rest of its name."""
        own = self.row
        number, parameters, nbytes = (getattr(own, f) + getattr(row, f) for f in ("number", "parameters", "nbytes"))
        self.row = own._replace(number=number, parameters=parameters, nbytes=nbytes)
        leaf = len(parts) == 1
        # Two rows have one name only if dtypes or shapes of layers differ.
        key = parts[0] if not leaf else f"{parts[0]}\0{row.dtype}{row.shape}{row.nbytes}", leaf
        if leaf:
            module = self.inner[key] = _Module(parts[0])
            module.row = row._replace(name=parts[0])
        else:
            self.inner.setdefault(key, _Module(parts[0])).add(parts[1:], row)

    def joined(self) -> _Module:
        """Join the module with an only child: "model.layers" instead of "layers" in "model"."""
        module = self
        while len(module.inner) == 1:
            (inner,) = module.inner.values()
            inner.row = inner.row._replace(name=module.row.name + inner.row.name)
            module = inner
        return module


def as_tree(rows: Iterable[Row], key: str | None, depth: int | None) -> list[Row]:
    """Return rows of modules and tensors, indented by level and sorted by ``key``; sums include all levels."""
    root = _Module("")
    for row in rows:
        root.add(BETWEEN_PARTS.split(row.name, _LEVELS), row)
    return list(_walk(root, key, depth, 0))


def _walk(module: _Module, key: str | None, depth: int | None, level: int) -> Iterable[Row]:
    children = [child.joined() for child in module.inner.values()]
    if key is not None:
        children.sort(key=lambda child: KEYS[key](child.row))
    for child in children:
        name = child.row.name if child.row.shape is not None else child.row.name[:-1]
        yield child.row._replace(name="  " * level + name)
        if depth is None or level + 1 < depth:
            yield from _walk(child, key, depth, level + 1)


def tree_table(rows: Sequence[Row], columns: int | None) -> list[str]:
    """Return the header and the lines of a tree."""
    cells = [(printable(r.name), r.dtype, _shape(r), f"{r.parameters:,}", size(r.nbytes)) for r in rows]
    return table(("module", "dtype", "shape", "parameters", "size"), cells, right=frozenset((3, 4)), columns=columns)
