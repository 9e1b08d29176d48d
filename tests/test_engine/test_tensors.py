"""Columns of tensors: each says what the tables of the files say of one tensor after the other."""

import numpy as np
import pytest
from builders.inside import Tensors

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.inner

SHAPES = [(), (0,), (3,), (2, 3), (1, 0, 2), (2, 2, 2)]
DTYPES = [np.float32, np.int8, np.float16, np.uint64]


@pytest.fixture
def opened(tmp_path):
    rng = np.random.default_rng(7)
    paths = []
    for k in range(3):
        names = [f"{k}.{n}" for n in range(rng.integers(1, 12))]
        arrays = {name: np.zeros(SHAPES[rng.integers(6)], DTYPES[rng.integers(4)]) for name in names}
        save_file(arrays, tmp_path / f"{k}.safetensors")
        paths.append(tmp_path / f"{k}.safetensors")
    checkpoints = [safeload.open(path) for path in paths]
    yield [checkpoint.weight_files[0] for checkpoint in checkpoints]
    for checkpoint in checkpoints:
        checkpoint.close()


def check(tensors, expected):
    assert list(tensors) == expected
    assert len(tensors) == len(expected) == len(tensors.names)
    numbers, shapes, begins, ends = tensors.columns
    _, file, first, sizes, dtypes, _ = tensors.spans
    for k, (_, weights, index) in enumerate(expected):
        table = weights.table
        assert (numbers[k], shapes[k]) == (table.row(index).number, table.shape(index))
        assert (begins[k], ends[k]) == table.byte_range(index)
        assert tensors.files[file[k]] is weights
        assert (first[k], sizes[k], dtypes[k]) == (begins[k], ends[k] - begins[k], numbers[k])


def test_columns_of_many_files(opened):
    rng = np.random.default_rng(8)
    every = [row for file in opened for row in Tensors.in_file(file)]
    for count in (0, 1, 2, len(every)):
        rows = [every[k] for k in rng.permutation(len(every))[:count]]
        tensors = Tensors.of(iter(rows))
        assert Tensors.of(tensors) is tensors
        check(tensors, rows)
        check(tensors.pick(range(1, count)), rows[1:])
        check(tensors.pick(np.arange(count)[::-1]), rows[::-1])
        check(tensors.named([name for name, _, _ in rows[::-1]]), rows[::-1])
        assert tensors.named(tensors.names) is tensors
        apart = tensors.by_file()
        assert [own.files for own in apart] == [[file] for file in dict.fromkeys(file for _, file, _ in rows)]
        for own in apart:
            check(own, [row for row in rows if row[1] is own.files[0]])


def test_columns_of_one_file(opened):
    file = opened[0]
    names = file.table.names
    check(Tensors.in_file(file), [(name, file, k) for k, name in enumerate(names)])
    check(
        Tensors.in_file(file, [names[-1], names[0], names[-1]]),
        [(names[-1], file, len(names) - 1), (names[0], file, 0)],
    )
    with pytest.raises(safeload.TensorNotFoundError, match="does not contain tensor absent"):
        Tensors.in_file(file, ["absent"])


@pytest.mark.parametrize("ranks", ["equal", "mixed", "scalars"])
@pytest.mark.parametrize("count", [5, 400])
@pytest.mark.parametrize("newline", [False, True])
def test_neighbours_in_a_file(tmp_path, ranks, count, newline):
    """Neighbours are a range, whose columns are decoded without the rest; other names are found singly."""
    shapes = {"equal": [(2, 3), (0, 1)], "mixed": SHAPES, "scalars": [()]}[ranks]
    names = [f"{k:04}{chr(10) if newline and k == 3 else ''}" for k in range(count)]
    save_file({name: np.zeros(shapes[k % len(shapes)], np.int8) for k, name in enumerate(names)}, tmp_path / "x")
    for begin, end in ((0, count), (0, 3), (1, count - 1), (2, 5), (count - 1, count), (3, 3)):
        with safeload.open(tmp_path / "x") as opened:
            file = opened.weight_files[0]
            tensors = Tensors.in_file(file, names[begin:end])
            assert newline or isinstance(tensors.indices, range) == (end - begin > 1)
            check(tensors, [(name, file, begin + k) for k, name in enumerate(names[begin:end])])
            back = Tensors.in_file(file, names[begin:end][::-1])
            check(back, [(name, file, begin + k) for k, name in enumerate(names[begin:end])][::-1])
    with safeload.open(tmp_path / "x") as opened, pytest.raises(safeload.TensorNotFoundError, match="nothing"):
        Tensors.in_file(opened.weight_files[0], [*names[:2], "nothing"])
