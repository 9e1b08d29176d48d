"""The report of `safeload.diff`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ...base.layout import shorten, table
from ...base.names import natural_key
from ...base.text import clip, plural, printable, show


class TensorDiff(NamedTuple):
    """How far the values of one tensor are from those of another of the same shape.

    NaN in both, or the same infinity in both, counts as equal. An element that is finite in only one of them is counted
    in ``unequal`` and ``nonfinite``, and excluded from the other numbers.

    Attributes:
        max: largest absolute difference; exact for integers, and an int if both tensors hold integers that differ.
        index: index of that difference, one integer for each axis; None if nothing differs.
        rms: root of the mean square of the differences.
        cosine: cosine of the angle between the two as vectors; 1 if they are equal, nan if one of them is zero.
        unequal: number of elements that differ.
        nonfinite: number of those that are NaN or infinite in only one of the two, or infinite with different signs.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> one, other = {"x": np.float32([1, 2])}, {"x": np.float32([1, 2.5])}
        >>> safeload.diff(one, other).tensors["x"].max
        0.5
    """

    max: float
    index: tuple[int, ...] | None  # type: ignore[assignment]
    rms: float
    cosine: float
    unequal: int
    nonfinite: int


# Keys that sort names and differences.
_ORDERS: dict[str, Callable[[tuple[str, TensorDiff]], Any]] = {
    "name": lambda row: natural_key(row[0]),
    "max": lambda row: -row[1].max,
    "rms": lambda row: -row[1].rms,
    "cosine": lambda row: -2.0 if math.isnan(row[1].cosine) else row[1].cosine,
    "unequal": lambda row: -row[1].unequal,
}


def _near(difference: TensorDiff, tolerance: float) -> bool:
    return difference.max <= tolerance and not difference.nonfinite


class DiffReport:
    """The result of `safeload.diff`. ``str()`` is a table.

    Attributes:
        a: title of the first checkpoint, as in messages.
        b: title of the second.
        only_a: names that are only in a.
        only_b: names that are only in b.
        shapes: name to both shapes where they differ; values of these tensors are not compared.
        dtypes: name to both dtypes where they differ.
        tensors: name to `TensorDiff` for every tensor in both that has the same shape.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "half.safetensors", dtype="float16")
        <ConvertReport 'half.safetensors': safetensors, 30 tensors, 244 KiB>
        >>> report = safeload.diff("tiny-llama", "half.safetensors")
        >>> report.same, report.within(0.001)
        (False, True)
    """

    def __init__(self, a: str, b: str) -> None:
        self.a = a
        self.b = b
        self.only_a: list[str] = []
        self.only_b: list[str] = []
        self.shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.dtypes: dict[str, tuple[str, str]] = {}
        self.tensors: dict[str, TensorDiff] = {}

    @property
    def same(self) -> bool:
        """Whether names, shapes, dtypes and values are equal."""
        return self.within(0.0) and not self.dtypes

    def within(self, tolerance: float) -> bool:
        """Whether names and shapes are equal and values differ by no more than ``tolerance``. Dtypes may differ."""
        structure = self.only_a or self.only_b or self.shapes
        return not structure and all(_near(difference, tolerance) for difference in self.tensors.values())

    @property
    def unequal(self) -> dict[str, TensorDiff]:
        """The tensors whose values differ, largest difference first."""
        found = [(name, d) for name, d in self.tensors.items() if d.unequal]
        return dict(sorted(found, key=lambda item: (-item[1].nonfinite, -item[1].max)))

    def lines(
        self,
        columns: int | None = 80,
        rows: int | None = None,
        sort: str | None = None,
        tolerance: float | None = None,
    ) -> list[str]:
        """The report as text.

        Args:
            columns: width in characters; None where names must not be cut.
            rows: the most rows of each list; the rest are only counted. None for all.
            sort: "name", "max", "rms", "cosine" or "unequal": orders the tensors whose values differ, numbers from the
                worst. None for the order of `unequal`.
            tolerance: the last line says whether the checkpoints agree `within` this; None if they must be `same`.

        Returns:
            Lines without line ends.
        """
        lines = [clip(f"a: {printable(self.a)}", columns), clip(f"b: {printable(self.b)}", columns)]

        def block(title: str, entries: list[str]) -> None:
            if entries:
                lines.extend(("", title))
                room = None if columns is None else columns - 2
                lines.extend(f"  {entry}" for entry in shorten(entries[:rows], room))
                if rows is not None and len(entries) > rows:
                    lines.append(f"  ... and {len(entries) - rows:,} more")

        block("only in a", [printable(name) for name in self.only_a])
        block("only in b", [printable(name) for name in self.only_b])
        block("other shape", [f"{printable(n)}: {list(a)} and {list(b)}" for n, (a, b) in self.shapes.items()])
        pairs: dict[tuple[str, str], list[str]] = {}
        for name, pair in self.dtypes.items():
            pairs.setdefault(pair, []).append(name)
        block(
            "other dtype",
            [f"{a} and {b}: {plural(len(names), 'tensor')}, {printable(names[0])}" for (a, b), names in pairs.items()],
        )
        unequal = self.unequal
        if sort is not None:
            unequal = dict(sorted(unequal.items(), key=_ORDERS[sort]))
        if unequal:
            shown = list(unequal.items())[:rows]
            cells: list[tuple[str, ...]] = [
                (printable(n), f"{d.max:.3g}", f"{d.rms:.3g}", f"{d.cosine:.6f}", f"{d.unequal:,}", f"{d.nonfinite:,}")
                for n, d in shown
            ]
            header: tuple[str, ...] = ("other values", "max", "rms", "cosine", "unequal", "not finite")
            if not any(d.nonfinite for d in unequal.values()):
                header, cells = header[:-1], [row[:-1] for row in cells]
            lines.append("")
            lines += table(header, cells, right=frozenset(range(1, len(header))), columns=columns)
            if len(shown) < len(unequal):
                lines.append(f"... and {len(unequal) - len(shown):,} more")
        lines.append("")
        lines.append(self._verdict(tolerance))
        return lines

    def _verdict(self, tolerance: float | None) -> str:
        limit = 0.0 if tolerance is None else tolerance
        near = sum(_near(difference, limit) for difference in self.tensors.values())
        values = "equal values" if tolerance is None else f"values within {tolerance:g}"
        if self.same:
            verdict = "the same"
        else:
            verdict = f"within {tolerance:g}" if tolerance is not None and self.within(tolerance) else "different"
        return f"{verdict}: {near:,} of {plural(len(self.tensors), 'tensor')} in both have {values}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<DiffReport {show(self.a)}, {show(self.b)}: {self.lines()[-1]}>"

    def to_json(self) -> dict[str, Any]:
        """The whole report, for ``json.dump``; values that are not finite are null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {
            "same": self.same,
            **{name: getattr(self, name) for name in ("a", "b", "only_a", "only_b")},
            "shapes": {name: [list(shape) for shape in pair] for name, pair in self.shapes.items()},
            "dtypes": {name: list(pair) for name, pair in self.dtypes.items()},
            "tensors": {
                name: {key: plain(value) for key, value in found._asdict().items()}
                for name, found in self.tensors.items()
            },
        }
