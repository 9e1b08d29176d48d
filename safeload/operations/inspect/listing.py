"""List tensors in rows: equal layers share a row, or modules form a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
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


def as_table(rows: Sequence[Row], columns: int | None, *, tree: bool) -> list[str]:
    """Return the header and the lines of a listing; a ``tree`` has modules, and a column of parameters."""
    header: tuple[str, ...] = ("tensor", "dtype", "shape", "size")
    with paused(len(rows)):
        cells: list[tuple[str, ...]]
        if tree:
            header = ("module", "dtype", "shape", "parameters", "size")
            cells = [(printable(r.name), r.dtype, _shape(r), f"{r.parameters:,}", size(r.nbytes)) for r in rows]
        else:
            cells = [(printable(row.name), row.dtype, _shape(row), size(row.nbytes)) for row in rows]
        return table(header, cells, right=frozenset(range(3, len(header))), columns=columns)


def _shape(row: Row) -> str:
    return "" if row.shape is None else str([*row.shape]) + (f" x {row.number:,}" if row.number > 1 else "")


# ---- tree ----


def as_tree(rows: Iterable[Row], key: str | None, depth: int | None) -> list[Row]:
    """Return rows of modules and tensors, indented by level and sorted by ``key``; sums include all levels."""
    return list(_walk([(BETWEEN_PARTS.split(row.name, _LEVELS), row) for row in rows], key, depth, 0))


def _walk(rows: Sequence[tuple[Sequence[str], Row]], key: str | None, depth: int | None, level: int) -> Iterator[Row]:
    """Yield the rows of a module, given the parts of their names below it."""
    groups: dict[Any, list[tuple[Sequence[str], Row]]] = {}
    for k, (parts, row) in enumerate(rows):
        # Rows of tensors can share a name, if dtypes or shapes of layers differ.
        groups.setdefault(parts[0] if len(parts) > 1 else k, []).append((parts, row))
    nodes: list[tuple[Row, list[tuple[Sequence[str], Row]]]] = []
    for inside in groups.values():
        if len(inside) == 1:
            ((parts, row),) = inside
            nodes.append((row._replace(name="".join(parts)), []))
            continue
        # A module with an only child is joined with it: "model.layers" instead of "layers" in "model".
        columns = zip(*(parts[:-1] for parts, _ in inside), strict=False)  # as long as the shortest name
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        number, parameters, nbytes = map(sum, zip(*(row[3:] for _, row in inside), strict=True))
        own = Row("".join(common), "", None, number, parameters, nbytes)
        nodes.append((own, [(parts[len(common) :], row) for parts, row in inside]))
    if key is not None:
        nodes.sort(key=lambda node: KEYS[key](node[0]))
    for row, inside in nodes:
        yield row._replace(name="  " * level + (row.name[:-1] if inside else row.name))
        if depth is None or level + 1 < depth:
            yield from _walk(inside, key, depth, level + 1)
