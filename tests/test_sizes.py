"""The size of each folder of safeload, which may only fall: ``python tests/test_sizes.py --lower`` rewrites the table.

Lines include docstrings and blanks; statements are nodes of the syntax tree without docstrings, so packing two lines
into one gains nothing. Raise a row by hand, in a commit that gives the reason.
"""

import ast
import functools
import json
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("sizes.json")
PACKAGE = Path(__file__).resolve().parents[1] / "safeload"
# A table this many lines above the code would hide growth.
SLACK = 300
TOTAL = "total"
LOWER = "python tests/test_sizes.py --lower"


def statements(node):
    """The number of statements below a node; none stands inside an expression."""
    count = 0
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            docstring = isinstance(child, ast.Expr) and isinstance(getattr(child.value, "value", None), str)
            count += isinstance(child, ast.stmt) and not docstring
            count += statements(child)
    return count


@functools.cache
def sizes(package=PACKAGE):
    """Lines and statements of each folder directly below a package, of its own modules (".") and in total."""
    rows = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        folder, *rest = path.relative_to(package).parts
        own = len(text.splitlines()), statements(ast.parse(text))
        for name in (folder if rest else ".", TOTAL):
            lines, count = rows.get(name, (0, 0))
            rows[name] = (lines + own[0], count + own[1])
    return rows


def table():
    return {name: tuple(row) for name, row in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def label(name):
    """What a message calls a row."""
    return {TOTAL: "safeload/ as a whole", ".": "safeload/ itself"}.get(name, f"{name}/")


def above(found, allowed):
    """What is larger than its row, or has none."""
    return [
        f"{label(name)} has {size:,} {unit}, the table allows {limit:,}: simplify, or raise the row and say why"
        for name, row in found.items()
        for size, limit, unit in zip(row, allowed.get(name, (0, 0)), ("lines", "statements"), strict=True)
        if size > limit
    ]


def generous(found, allowed):
    """Rows that leave too much room, and those of folders that are gone."""
    return [
        f"{label(name)} has {found.get(name, (0,))[0]:,} lines, the table allows {limit:,}: {LOWER}"
        for name, (limit, _) in allowed.items()
        if name not in found or limit > found[name][0] + SLACK
    ]


def lowered(found, allowed):
    """The table where each row is at most what there is; growth stays above its row."""
    return {
        name: [min(pair) for pair in zip(found[name], row, strict=True)]
        for name, row in allowed.items()
        if name in found
    }


def test_no_folder_grows():
    assert above(sizes(), table()) == []


def test_the_table_is_close():
    assert generous(sizes(), table()) == []


def test_a_longer_folder_is_found(tmp_path):
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "a.py").write_text('"""A module."""\n\nif True:\n    x = 1\nelse:\n    y = lambda: 2\n')
    (tmp_path / "b.py").write_text("match 1:\n    case 1:\n        pass\ntry:\n    x = 1\nexcept OSError:\n    pass\n")
    found = sizes(tmp_path)
    assert found == {"room": (6, 3), ".": (7, 5), TOTAL: (13, 8)}
    assert above(found, found) == generous(found, found) == []
    assert above(found, {**found, "room": (5, 3)}) == [
        "room/ has 6 lines, the table allows 5: simplify, or raise the row and say why"
    ]
    assert len(above(found, {**found, "room": (6, 2)})) == len(above(found, {TOTAL: (13, 8), ".": (7, 5)})) - 1 == 1
    assert len(generous(found, {**found, "room": (6 + SLACK + 1, 3)})) == 1
    assert len(generous(found, {**found, "gone": (1, 1)})) == 1
    assert lowered(found, {**found, "room": (9, 1), "gone": (1, 1)}) == {"room": [6, 1], ".": [7, 5], TOTAL: [13, 8]}


def main(arguments):
    if arguments not in ([], ["--lower"]):
        sys.exit("usage: python tests/test_sizes.py [--lower]")
    found, allowed = sizes(), table()
    if arguments:
        rows = [f"  {json.dumps(name)}: {row}" for name, row in lowered(found, allowed).items()]
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    rows = [f"{name:<12}{lines:>8,}{count:>8,}" for name, (lines, count) in sorted(found.items())]
    print("\n".join([*rows, *above(found, allowed)]))


if __name__ == "__main__":
    main(sys.argv[1:])
