"""The tensors of a checkpoint as rows: layers that are alike in one row, or as a tree of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..base.layout import BETWEEN_PARTS, table
from ..base.names import families, natural_key
from ..base.table import TensorInfo
from ..base.text import printable, size

# Most levels of modules; what is deeper stays in one name. The tree is walked by functions that call themselves.
_LEVELS = 32


class Row(NamedTuple):
    """One tensor, several that are alike, or in a tree the sum of a module.

    Attributes:
        name: name of the tensor, with braces for several, as in ``h.{0..11}.w``.
        dtype: dtype of each; "" for a module.
        shape: shape of each; None for a module.
        number: number of tensors.
        parameters: elements of all of them.
        nbytes: bytes of all of them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    number: int
    parameters: int
    nbytes: int


def _by_name(row: Row) -> Any:
    return natural_key(row.name)


# What rows can be sorted by: numbers from the largest.
KEYS: dict[str, Callable[[Row], Any]] = {
    "name": _by_name,
    "dtype": lambda row: (row.dtype, _by_name(row)),
    "shape": lambda row: tuple(-dim for dim in row.shape or ()),
    "parameters": lambda row: -row.parameters,
    "size": lambda row: -row.nbytes,
}


def rows_of(infos: Iterable[TensorInfo], *, alone: bool) -> list[Row]:
    """Rows in the order of the file; layers of the same dtype, shape and size share one.

    Args:
        infos: the tensors.
        alone: whether each tensor has a row of its own; they are in natural order.
    """
    infos = list(infos)
    if alone:
        rows = [Row(i.name, i.dtype, i.shape, 1, i.size, i.nbytes) for i in infos]
        return sorted(rows, key=_by_name)
    found = families([info.name for info in infos], [(i.dtype, i.shape, i.nbytes) for i in infos])
    return [
        Row(
            family.name,
            info.dtype,
            info.shape,
            family.number,
            family.number * info.size,
            family.number * info.nbytes,
        )
        for family in found
        for info in (infos[family.first],)
    ]


def ordered(rows: list[Row], key: str | None) -> list[Row]:
    """Rows sorted by one of `KEYS`; as they are without one."""
    return rows if key is None else sorted(rows, key=KEYS[key])


def as_table(rows: Sequence[Row], columns: int | None) -> list[str]:
    """The header and the lines of a listing."""
    cells = [(printable(row.name), row.dtype, _shape(row), size(row.nbytes)) for row in rows]
    return table(("tensor", "dtype", "shape", "size"), cells, right=frozenset((3,)), columns=columns)


def _shape(row: Row) -> str:
    if row.shape is None:
        return ""
    return str(list(row.shape)) + (f" x {row.number:,}" if row.number > 1 else "")


# ---- tree ----


class _Module:
    """A module: what is directly in it, in the order of the rows, and the sums of all below it.

    Attributes:
        row: the sums; of a tensor its own row.
        inner: modules and tensors in it, by the last part of their names.
    """

    def __init__(self, name: str) -> None:
        self.row = Row(name, "", None, 0, 0, 0)
        self.inner: dict[tuple[str, bool], _Module] = {}

    def add(self, parts: Sequence[str], row: Row) -> None:
        """Adds a tensor below it, whose remaining parts of the name are given."""
        own = self.row
        number, parameters, nbytes = (getattr(own, f) + getattr(row, f) for f in ("number", "parameters", "nbytes"))
        self.row = own._replace(number=number, parameters=parameters, nbytes=nbytes)
        leaf = len(parts) == 1
        # Rows of a tree are seldom of the same name: then the dtypes or shapes of some layers differ.
        key = parts[0] if not leaf else f"{parts[0]}\0{row.dtype}{row.shape}{row.nbytes}", leaf
        if leaf:
            module = self.inner[key] = _Module(parts[0])
            module.row = row._replace(name=parts[0])
        else:
            self.inner.setdefault(key, _Module(parts[0])).add(parts[1:], row)

    def joined(self) -> _Module:
        """The module, joined with the only one in it: "model.layers" instead of "layers" alone in "model"."""
        module = self
        while len(module.inner) == 1:
            (inner,) = module.inner.values()
            inner.row = inner.row._replace(name=module.row.name + inner.row.name)
            module = inner
        return module


def as_tree(rows: Iterable[Row], key: str | None, depth: int | None) -> list[Row]:
    """Rows of modules and tensors, indented by their level.

    Args:
        rows: the tensors.
        key: what the content of each module is sorted by, one of `KEYS`; None for the order of the rows.
        depth: the most levels; the sums of a module are those of all levels.
    """
    root = _Module("")
    for row in rows:
        root.add(BETWEEN_PARTS.split(row.name, _LEVELS), row)
    return list(_walk(root, key, depth, 0))


def _walk(module: _Module, key: str | None, depth: int | None, level: int) -> Iterable[Row]:
    inner = [one.joined() for one in module.inner.values()]
    if key is not None:
        inner.sort(key=lambda one: KEYS[key](one.row))
    for one in inner:
        name = one.row.name if one.row.shape is not None else one.row.name[:-1]
        yield one.row._replace(name="  " * level + name)
        if depth is None or level + 1 < depth:
            yield from _walk(one, key, depth, level + 1)


def tree_table(rows: Sequence[Row], columns: int | None) -> list[str]:
    """The header and the lines of a tree."""
    cells = [(printable(r.name), r.dtype, _shape(r), f"{r.parameters:,}", size(r.nbytes)) for r in rows]
    return table(("module", "dtype", "shape", "parameters", "size"), cells, right=frozenset((3, 4)), columns=columns)
