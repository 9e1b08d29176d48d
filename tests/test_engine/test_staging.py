"""Tensors in chunks through a ring of staging buffers: the same bytes as whole, in any size of buffer."""

import threading

import ml_dtypes
import numpy as np
import pytest
from builders.inside import Ring, dtypes, entries_of, staged, tensors_of
from builders.paths import DATA
from builders.quantized import FIXTURES, FOLDER, each_kind_with
from builders.threads import threads

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

MIB = 1 << 20
PLAIN = [path for path in (*DATA.glob("*.safetensors"), *DATA.glob("torch/*.pt*")) if path.name != "broken.pt"]
PLAIN.sort()
DTYPES = ("float32", "bfloat16")


def ring_of(size, count=3, wait=None):
    return Ring(size, count, wait=wait)


def entries(checkpoint, dtype):
    found = entries_of(tensors_of(checkpoint), None if dtype is None else dtypes.BY_NAME[dtype])
    return [entry for entry in found if entry.target is not None]


def collected(found, ring, threads=2, **options):
    """The bytes of each tensor as they come out of the ring, and what did not go through it."""
    got = {entry.name: np.full(entry.nbytes, 0xAA, np.uint8) for entry in found}
    alone = []
    for filled in staged(found, ring, threads, **options):
        assert filled.array.flags.c_contiguous
        memory = filled.array.reshape(-1).view(np.uint8)
        if filled.buffer is None:
            alone += [piece.name for piece in filled.pieces]
        for piece in filled.pieces:
            assert piece.at % 64 == 0
            bytes_ = memory[piece.at : piece.at + piece.nbytes]
            got[piece.name][piece.begin : piece.begin + piece.nbytes] = bytes_
    return got, alone


def values(value):
    return (value.data if isinstance(value, safeload.QuantizedTensor) else value).tobytes()


def assert_staged_as_loaded(path, dtype, size):
    with safeload.open(path, unknown_globals="inert") as checkpoint:
        want = checkpoint.load(dtype=dtype)
        found = entries(checkpoint, dtype)
        got, alone = collected(found, ring_of(size))
    assert {name: array.tobytes() for name, array in got.items()} == {e.name: values(want[e.name]) for e in found}
    return alone


@each_kind_with("dtype, size", {f"{dtype}-{size}": (dtype, size) for dtype in DTYPES for size in (4096, 1 << 16)})
def test_packed_tensors(fixture, dtype, size):
    assert_staged_as_loaded(fixture.folder, dtype, size)


@pytest.mark.parametrize("size", [4096, MIB])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_plain_tensors(path, dtype, size):
    assert_staged_as_loaded(path, dtype, size)


def test_blocks_of_ggml(tmp_path):
    path = tmp_path / "blocks.gguf"
    weights = {"w": np.random.default_rng(0).standard_normal((70, 256), np.float32)}
    for scheme in ("q4_0", "q5_1", "q8_0"):
        safeload.convert(weights, path, quantize=scheme, overwrite=True)
        assert assert_staged_as_loaded(path, "float32", 4096) == []


def test_only_what_is_strided_in_the_file_is_made_as_a_whole(tmp_path):
    torch = pytest.importorskip("torch")
    base = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    torch.save({"plain": base, "view": base[3:7], "transposed": base.t(), "empty": base[:0]}, tmp_path / "x.pt")
    assert assert_staged_as_loaded(tmp_path / "x.pt", None, 4096) == ["transposed"]
    assert_staged_as_loaded(tmp_path / "x.pt", "float16", 4096)


def test_a_row_that_does_not_fit_a_buffer_is_made_as_a_whole():
    with safeload.open(FOLDER / next(iter(FIXTURES))) as checkpoint:
        want = checkpoint.load(dtype="float32")
        packed = [entry for entry in entries(checkpoint, "float32") if entry.packed is not None]
        assert packed
        for entry in packed:
            for size, whole in ((8, [entry.name]), (4 * entry.nbytes, [])):
                got, alone = collected([entry], ring_of(size))
                assert alone == whole
                assert got[entry.name].tobytes() == values(want[entry.name])


def test_the_order_is_that_of_the_tensors(tmp_path):
    """Also where some are made as a whole between others."""
    torch = pytest.importorskip("torch")
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    torch.save({f"{k:02}": base.t() if k % 3 == 1 else base.clone() for k in range(12)}, tmp_path / "x.pt")
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        buffers = staged(entries(checkpoint, None), ring_of(1 << 16), 1)
        flat = [piece.name for filled in buffers for piece in filled.pieces]
    assert flat == [f"{k:02}" for k in range(12)]


def test_neighbours_in_a_buffer_are_one_piece(tmp_path):
    save_file({"w": np.arange(10_000, dtype=np.float32)}, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as checkpoint:
        pieces = [
            [(p.begin, p.nbytes, p.at) for p in f.pieces] for f in staged(entries(checkpoint, None), ring_of(16384), 1)
        ]
    assert pieces == [[(0, 16384, 0)], [(16384, 16384, 0)], [(32768, 7232, 0)]]


def test_a_buffer_is_filled_again_only_after_its_wait(tmp_path):
    """The caller copies from a buffer until `wait` returns: nothing may change in it before."""
    save_file({"w": np.arange(100_000, dtype=np.float32)}, tmp_path / "x.safetensors")
    free = [threading.Event() for _ in range(3)]

    def wait(number):
        assert threading.current_thread() is not threading.main_thread()
        assert free[number].wait(10)
        free[number].clear()

    got = np.empty(400_000, np.uint8)
    with safeload.open(tmp_path / "x.safetensors") as checkpoint:
        for filled in staged(entries(checkpoint, None), ring_of(32768, wait=wait), 1):
            for piece in filled.pieces:
                got[piece.begin : piece.begin + piece.nbytes] = filled.array[piece.at : piece.at + piece.nbytes]
            free[filled.buffer].set()
    np.testing.assert_array_equal(got.view(np.float32), np.arange(100_000, dtype=np.float32))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("workers", [2, 5])
def test_several_buffers_at_a_time(tmp_path, workers, ordered):
    save_file({f"t{k:02}": np.arange(k, k + 3000, dtype=np.float32) for k in range(50)}, tmp_path / "x.safetensors")
    waited = []
    ring = ring_of(16384, workers + 2, waited.append)
    with safeload.open(tmp_path / "x.safetensors") as checkpoint:
        found = entries(checkpoint, None)
        got, _ = collected(found, ring, workers=workers, ordered=ordered)
        assert {name: array.tobytes() for name, array in got.items()} == {
            name: array.tobytes() for name, array in checkpoint.load().items()
        }
    assert len(waited) >= 50 * 12000 // 16384 - (workers + 2), "every other time a buffer that was filled before"
    assert not threads()


def test_a_buffer_is_made_only_if_none_is_free(tmp_path):
    """To pin memory takes as long as to read it."""
    made = []
    ring = Ring(16384, 8, lambda number: made.append(number) or np.empty(16384, np.uint8))
    numbers = [ring.take()[0] for _ in range(2)]
    for number in numbers * 3:
        ring.free(number)
        assert ring.take()[0] == number
    assert made == numbers == [0, 1]


def test_an_error_names_the_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({f"t{k}": np.ones(5000, ml_dtypes.bfloat16) for k in range(8)}, path)
    with safeload.open(path) as checkpoint:
        found = entries(checkpoint, "float32")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 25_000)
        with pytest.raises(safeload.FormatError) as caught:
            collected(found, ring_of(16384))
    assert caught.value.tensor == "t5"
    assert not threads()


@pytest.mark.parametrize(("count", "threaded"), [(1000, False), (3 << 20, True)])
def test_a_writer_starts_a_thread_only_for_what_takes_longer(tmp_path, monkeypatch, count, threaded):
    """Starting one takes as long as converting a small file."""
    array = np.arange(count, dtype=np.float32)
    save_file({"a": array, "b": array[:999]}, tmp_path / "x.safetensors")
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread.name), start(thread))[1])
    safeload.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", dtype="bfloat16")
    assert ("safeload" in started) == threaded
    want = {"a": array.astype(ml_dtypes.bfloat16), "b": array[:999].astype(ml_dtypes.bfloat16)}
    got = safeload.load(tmp_path / "y.safetensors")
    assert {name: got[name].tobytes() for name in got} == {name: one.tobytes() for name, one in want.items()}
