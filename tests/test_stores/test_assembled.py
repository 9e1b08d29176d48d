"""Tensors in boxes: any tiling, any strides, any range; what does not tile is refused."""

import itertools
import time

import numpy as np
import pytest
from builders import inside
from builders.inside import boxed
from builders.random import rng
from builders.thorough import part_of

from safeload.errors import FormatError, LimitError


class Bytes:
    """A store in memory that counts what is read."""

    def __init__(self, content):
        self.content, self.size, self.version, self.reads = content, len(content), (len(content),), []

    def read_into(self, offset, memory):
        view = memoryview(memory).cast("B")
        assert 0 <= offset <= offset + len(view) <= self.size
        self.reads.append((offset, len(view)))
        view[:] = self.content[offset : offset + len(view)]

    def close(self):
        pass


class Unpacking:
    """A box that must be unpacked; it counts how often."""

    def __init__(self, part):
        self.part, self.count = part, 0

    def __call__(self):
        self.count += 1
        return np.ascontiguousarray(self.part).reshape(-1).view(np.uint8)


def tiling(shape):
    """A random tiling by cuts along random axes: uneven, and no product of cuts."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(int(rng.integers(0, 12))):
        offsets, sizes = boxes.pop(int(rng.integers(len(boxes))))
        axis = int(rng.integers(len(shape)))
        if sizes[axis] < 2:
            boxes.append((offsets, sizes))
            continue
        at = int(rng.integers(1, sizes[axis]))
        for begin, end in ((0, at), (at, sizes[axis])):
            part = offsets[axis] + begin, end - begin
            boxes.append(
                ((*offsets[:axis], part[0], *offsets[axis + 1 :]), (*sizes[:axis], part[1], *sizes[axis + 1 :]))
            )
    rng.shuffle(boxes)
    return [(tuple(map(int, offsets)), tuple(map(int, sizes))) for offsets, sizes in boxes]


def stored(part, kind):
    """A box in one of the ways that a file can hold it."""
    if kind == "unpacked":
        return Unpacking(part)
    if kind == "padded":  # rows further apart than their bytes, as in border chunks of array stores
        padded = np.zeros([n + 2 for n in part.shape], part.dtype)
        padded[tuple(map(slice, part.shape))] = part
        return boxed.Region(Bytes(b"xyz" + padded.tobytes()), 3, padded.strides)
    if kind == "transposed":
        return boxed.Region(Bytes(part.tobytes("F")), 0, np.array(part, order="F").strides)
    return boxed.Region(Bytes(b"12345" + part.tobytes()), 5)


def assembled(tensors, kinds=("plain",)):
    made = []
    for k, array in enumerate(tensors):
        boxes = []
        for offsets, sizes in tiling(array.shape) if array.ndim else [((), ())]:
            part = array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            boxes.append(boxed.Box(offsets, sizes, stored(part, kinds[int(rng.integers(len(kinds)))])))
        made.append(boxed.BoxedTensor(f"t{k}", array.shape, array.itemsize, boxes, "folder"))
    return boxed.AssembledStore("folder", made, [], (1,)), made


@pytest.mark.parametrize(
    "kinds", [("plain",), ("padded",), ("transposed",), ("unpacked",), ("plain", "padded", "unpacked")]
)
def test_every_range_of_random_tilings_has_the_bytes_of_the_whole(kinds):
    for _ in range(25):
        shapes = [tuple(map(int, rng.integers(1, 9, int(rng.integers(0, 4))))) for _ in range(3)]
        arrays = [rng.integers(0, 1 << 16, shape).astype(rng.choice(["u1", "<u2", "<u4"])) for shape in shapes]
        store, made = assembled(arrays, kinds)
        whole = bytearray(store.size)
        for array, tensor in zip(arrays, made, strict=True):
            whole[tensor.begin : tensor.begin + array.nbytes] = array.tobytes()
        assert store.read_at(0, store.size) == whole
        for _ in range(20):
            begin, end = sorted(map(int, rng.integers(0, store.size + 1, 2)))
            assert store.read_at(begin, end - begin) == whole[begin:end]
        for array, tensor in zip(arrays, made, strict=True):
            low = [int(rng.integers(n)) for n in array.shape]
            sizes = [int(rng.integers(1, n - k + 1)) for n, k in zip(array.shape, low, strict=True)]
            part = array[tuple(slice(k, k + n) for k, n in zip(low, sizes, strict=True))]
            target = np.empty((*part.shape, array.itemsize), np.uint8)
            store.read_box(tensor.begin, low, target)
            assert target.tobytes() == part.tobytes()


def test_a_slice_reads_only_the_boxes_and_rows_that_it_touches():
    array = np.arange(64 * 64, dtype="<u4").reshape(64, 64)
    stores, boxes = {}, []
    for row, column in itertools.product(range(0, 64, 16), repeat=2):
        stores[row, column] = Bytes(array[row : row + 16, column : column + 16].tobytes())
        boxes.append(boxed.Box((row, column), (16, 16), boxed.Region(stores[row, column], 0)))
    store = boxed.AssembledStore("folder", [boxed.BoxedTensor("w", (64, 64), 4, boxes, "folder")], [], (1,))
    target = np.empty((16, 2, 4), np.uint8)
    store.read_box(0, (16, 40), target)
    assert {key for key, box in stores.items() if box.reads} == {(16, 32)}
    store.read_at(5 * 64 * 4, 64 * 4)
    assert [stores[0, column].reads for column in range(0, 64, 16)] == [[(5 * 16 * 4, 16 * 4)]] * 4


def test_an_unpacked_box_is_unpacked_once_for_all_ranges_of_its_tensor():
    array = rng.integers(0, 255, (40, 50)).astype("u1")
    parts = [Unpacking(array[:, :25]), Unpacking(array[:, 25:])]
    boxes = [boxed.Box((0, 25 * k), (40, 25), part) for k, part in enumerate(parts)]
    store = boxed.AssembledStore("folder", [boxed.BoxedTensor("w", array.shape, 1, boxes, "folder")], [], (1,))
    assert b"".join(store.read_at(begin, 50) for begin in range(0, 2000, 50)) == array.tobytes()
    assert [part.count for part in parts] == [1, 1]


def test_only_the_boxes_of_a_tensor_stay_unpacked(monkeypatch):
    monkeypatch.setattr(inside.boxed, "_KEPT", 100)
    arrays = [rng.integers(0, 255, 1000).astype("u1") for _ in range(5)]
    tensors = [
        boxed.BoxedTensor(f"t{k}", (1000,), 1, [boxed.Box((0,), (1000,), Unpacking(array))], "folder")
        for k, array in enumerate(arrays)
    ]
    store = boxed.AssembledStore("folder", tensors, [], (1,))
    for tensor in tensors:
        store.read_at(tensor.begin, 1000)
    assert sum(elements.nbytes for elements in store._unpacked.values()) <= 1000


def test_thirty_thousand_unpacked_boxes_take_linear_time():
    array = np.arange(30_000, dtype="<u4")
    boxes = [boxed.Box((k,), (1,), Unpacking(array[k : k + 1])) for k in range(len(array))]
    store = boxed.AssembledStore("folder", [boxed.BoxedTensor("w", array.shape, 4, boxes, "folder")], [], (1,))
    began = time.process_time()
    assert store.read_at(0, 120_000) == array.tobytes()
    assert time.process_time() - began < 10


NOWHERE = boxed.Region(Bytes(b""), 0)
BAD = {
    "a hole": ((4, 4), [((0, 0), (2, 4)), ((3, 0), (1, 4))], "4 of 16 elements are in none of its 2 chunks"),
    "an overlap": ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 4))], r"chunks overlap: \[3, 4\] at \[0, 0\]"),
    "an overlap and a hole": ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], "chunks overlap"),
    "corners that overlap": ((4, 4), [((0, 0), (3, 3)), ((2, 2), (2, 2)), ((0, 3), (2, 1))], "chunks overlap"),
    "outside": ((4, 4), [((0, 0), (4, 5))], r"a chunk of \[4, 5\] at \[0, 0\] is not inside shape \[4, 4\]"),
    "beyond the end": ((4,), [((2,), (4,))], "is not inside"),
    "negative": ((4,), [((-1,), (5,))], "is not inside"),
    "of another rank": ((4, 4), [((0,), (4,))], "is not inside"),
    "nothing": ((4, 4), [], "16 of 16 elements"),
    "one element of many": ((1 << 40,), [((0,), (1,))], "elements are in none"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_tile_is_refused_by_tensor(case):
    shape, boxes, message = BAD[case]
    with pytest.raises(FormatError, match=message) as caught:
        boxed.BoxedTensor("the tensor", shape, 2, [boxed.Box(*box, NOWHERE) for box in boxes], "folder")
    assert (caught.value.tensor, caught.value.path) == ("the tensor", "folder")


def test_replicas_and_empty_boxes_are_dropped():
    boxes = [((0, 0), (2, 4)), ((2, 0), (0, 4)), ((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (0, 4))]
    assert len(boxed.BoxedTensor("w", (4, 4), 1, [boxed.Box(*box, NOWHERE) for box in boxes], "folder").boxes) == 2
    assert boxed.BoxedTensor("w", (0, 4), 1, [boxed.Box((0, 0), (0, 4), NOWHERE)], "folder").boxes == []
    assert len(boxed.BoxedTensor("w", (), 1, [boxed.Box((), (), NOWHERE)] * 3, "folder").boxes) == 1


def test_a_shape_beyond_any_memory_is_a_limit():
    with pytest.raises(LimitError, match="more bytes than any memory has"):
        boxed.BoxedTensor("w", (1 << 62, 4), 4, [boxed.Box((0, 0), (1 << 62, 4), NOWHERE)], "folder")


def pinwheel(k):
    """Boxes around a center: no cut along an axis separates them."""
    return [
        ((3 * k, 0), (1, 2)),
        ((3 * k, 2), (2, 1)),
        ((3 * k + 2, 1), (1, 2)),
        ((3 * k + 1, 0), (2, 1)),
        ((3 * k + 1, 1), (1, 1)),
    ]


def test_boxes_that_interlock_are_compared_one_by_one():
    boxes = [box for k in range(50) for box in pinwheel(k)]
    assert len(boxed.BoxedTensor("w", (150, 3), 1, [boxed.Box(*box, NOWHERE) for box in boxes], "folder").boxes) == 250
    boxes[7] = ((3, 2), (3, 1))
    with pytest.raises(FormatError, match="overlap"):
        boxed.BoxedTensor("w", (150, 3), 1, [boxed.Box(*box, NOWHERE) for box in boxes], "folder")


def test_too_many_interlocked_boxes_are_a_limit():
    size, rings = 1200, []  # each ring of four goes around the next
    for a, b in ((k, size - 1 - k) for k in range(size // 2)):
        side = b - a
        rings += [((a, a), (1, side)), ((a, b), (side, 1)), ((b, a + 1), (1, side)), ((a + 1, a), (side, 1))]
    with pytest.raises(LimitError, match="more than 2,048 of its chunks interlock"):
        boxed.BoxedTensor("w", (size, size), 1, [boxed.Box(*box, NOWHERE) for box in rings], "folder")
    assert (
        len(
            boxed.BoxedTensor(
                "w", (40, 40), 1, [boxed.Box((o[0] - 580, o[1] - 580), n, NOWHERE) for o, n in rings[4 * 580 :]], ""
            ).boxes
        )
        == 80
    )


@pytest.mark.parametrize("shape", part_of([(100_000,), (100_000, 3), (316, 316)], 1, 2))
def test_a_hundred_thousand_boxes_take_linear_time(shape):
    sizes = (1, 3) if shape == (100_000, 3) else (1,) * len(shape)
    starts = (range(0, length, step) for length, step in zip(shape, sizes, strict=True))
    boxes = [boxed.Box(index, sizes, NOWHERE) for index in itertools.product(*starts)]
    began = time.process_time()
    tensor = boxed.BoxedTensor("w", shape, 4, boxes, "folder")
    assert len(tensor.touched((0,) * len(shape), (1,) * len(shape))) == 1
    assert time.process_time() - began < 10
