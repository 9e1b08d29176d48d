"""Reprs of tensors by name: read-only dicts of descriptions, dicts of arrays, and tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn

from .table import TensorInfo
from .text import clip, more, plural, printable, size

# Maximum number of rows in a notebook, and of lines in a repr.
_ROWS, _LINES = 20, 8

# Maximum length of a name in a repr.
_NAME = 60


class TensorInfos(dict[str, TensorInfo]):
    """Descriptions of tensors by name, in a read-only dict; ``dict(infos)`` is a copy that can be changed."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("tensor descriptions are read-only")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorInfos, (dict(self),)

    def __repr__(self) -> str:
        return _screen(f"<{plural(len(self), 'tensor')}>", self)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _repr_html_(self) -> str:
        return as_html(plural(len(self), "tensor"), self.values(), len(self))


def _screen(head: str, tensors: Mapping[str, Any]) -> str:
    """Return a heading, the first tensors with dtype and shape, and the number of omitted tensors."""
    lines = [head]
    for name, tensor in islice(tensors.items(), _LINES):
        kind = getattr(tensor, "scheme", None) or getattr(tensor, "dtype", type(tensor).__name__)
        lines.append(f"  {clip(printable(str(name)), _NAME)}  {kind} {list(getattr(tensor, 'shape', ()))}")
    return "\n".join([*lines, *(f"  {line}" for line in more(len(tensors), _LINES))])


def as_html(title: str, infos: Iterable[TensorInfo], count: int) -> str:
    """Return a table of the first tensors for a notebook."""
    rows = [(info.name, info.dtype, str(list(info.shape)), size(info.nbytes)) for info in islice(infos, _ROWS)]
    return html.table(title, ("tensor", "dtype", "shape", "size"), rows, "".join(more(count, _ROWS)))


def dict_repr(kind: str, arrays: Mapping[str, Any], note: str = "") -> str:
    """Return the repr of a dict of arrays: its first names with dtypes and shapes."""
    return _screen(f"<{kind}: {plural(len(arrays), 'tensor')}{f', {note}' if note else ''}>", arrays)
