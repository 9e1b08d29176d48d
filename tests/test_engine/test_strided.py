"""Tensors with strides, sharing bytes, not aligned, big-endian; every way to load them."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from builders.torch_build import Storage, in_order, tensor, zip_file

import safeload
from safeload import astype, errors

pytestmark = pytest.mark.any_python

MIB = 1 << 20


class Builder:
    """A torch checkpoint, and what its tensors are."""

    def __init__(self, path, *, big_endian=False, shift=0):
        self.path, self.shift = path, shift
        self.order = "big" if big_endian else "little"
        self.storages, self.value = [], {}
        self.want, self.strides, self.ranges = {}, {}, {}

    def storage(self, array):
        """Stores an array's bytes; returns what tensors are made over."""
        self.storages.append(Storage(str(len(self.storages)), array))
        return self.storages[-1]

    def tensor(self, name, storage, offset=0, shape=None, strides=None):
        """A tensor over elements of a storage."""
        array, item = storage.array, storage.array.itemsize
        shape = array.shape if shape is None else shape
        self.strides[name] = np.empty(shape, array.dtype).strides if strides is None else [s * item for s in strides]
        self.strides[name] = tuple(self.strides[name])
        elements = tuple(s // item for s in self.strides[name])
        last = sum((n - 1) * s for n, s in zip(shape, elements, strict=True))
        self.ranges[name] = (storage.key, offset, offset + last + 1)
        self.want[name] = np.lib.stride_tricks.as_strided(array[offset:], shape, self.strides[name]).copy()
        self.value[name] = tensor(storage, shape, elements, offset)

    def open(self):
        self.data = zip_file(self.value, order=self.order, shift=self.shift)
        self.path.write_bytes(self.data)
        return safeload.open(self.path)


def build(path, **options):
    b = Builder(path, **options)
    random = np.random.default_rng(3)
    f32 = random.standard_normal(1000).astype(np.float32)
    at = b.storage(f32)
    b.tensor("flat", at)
    b.tensor("matrix", at, 8, (20, 30))
    b.tensor("transposed", at, 8, (30, 20), (1, 30))
    b.tensor("every other", at, 1, (10, 7), (40, 2))
    b.tensor("expanded", at, 5, (4, 3), (0, 1))
    b.tensor("unit axes", at, 0, (1, 6, 1), (999, 1, 77))
    b.tensor("scalar", at, 999, ())
    bf16 = random.standard_normal(64).astype(ml_dtypes.bfloat16)
    at = b.storage(bf16)
    b.tensor("bf16", at, 0, (8, 8))
    b.tensor("bf16.T", at, 0, (8, 8), (1, 8))
    f64 = random.standard_normal(49)
    b.tensor("f64", b.storage(f64), 0, (5, 5), (10, 2))
    c64 = (f64[:20] + 1j * f64[20:40]).astype(np.complex64)
    b.tensor("c64", b.storage(c64), 0, (4, 5))
    i16 = np.arange(24, dtype=np.int16)
    b.tensor("i16", b.storage(i16), 0, (2, 3, 4), (1, 2, 6))
    u8 = np.arange(11, dtype=np.uint8)
    b.tensor("u8", b.storage(u8))
    large = random.standard_normal(MIB).astype(np.float16)
    at = b.storage(large)
    b.tensor("large", at, 0, (1024, 1024))
    b.tensor("large.T", at, 0, (1024, 1024), (1, 1024))
    return b


KINDS = {
    "little": {},
    "big": {"big_endian": True},
    "unaligned": {"shift": 3},
    "big unaligned": {"big_endian": True, "shift": 1},
}


@pytest.fixture(params=KINDS)
def built(request, tmp_path):
    return build(tmp_path / "raw.bin", **KINDS[request.param])


def same(got, want, name):
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    assert got.flags.aligned, name
    assert got.flags.writeable, name
    assert got.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_each_tensor_is_what_its_strides_say(built, backend):
    with built.open() as checkpoint:
        loaded = checkpoint.load(backend=backend)
        assert list(loaded) == list(built.want)
        for name, want in built.want.items():
            same(loaded[name], want, name)
            same(checkpoint.load([name], backend=backend)[name], want, name)
            same(checkpoint[name], want, name)
            if name != "unit axes" or backend != "mmap":
                assert loaded[name].strides == built.strides[name], name


def sharing(arrays):
    return {
        frozenset((a, b)) for a, b in itertools.combinations(arrays, 2) if np.may_share_memory(arrays[a], arrays[b])
    }


def shared_in_file(built):
    return {
        frozenset((a, b))
        for (a, (s0, b0, e0)), (b, (s1, b1, e1)) in itertools.combinations(built.ranges.items(), 2)
        if s0 == s1 and b0 < e1 and b1 < e0
    }


def test_what_shares_bytes_shares_memory(built):
    want = shared_in_file(built)
    with built.open() as checkpoint:
        for backend in ("mmap", "pread", "direct"):
            assert sharing(checkpoint.load(backend=backend)) == want
        one_by_one = {name: checkpoint[name] for name in reversed(built.want)}
        assert sharing(one_by_one) == want
        one_by_one["matrix"][0, 1] = 5
        assert checkpoint["transposed"][1, 0] == 5
        assert checkpoint["flat"][9] == 5
    assert built.path.read_bytes() == built.data


def test_converted_tensors_are_contiguous_and_alone(built):
    with built.open() as checkpoint:
        loaded = checkpoint.load(dtype="float32")
        out = {name: np.full_like(array, 3, order="C") for name, array in loaded.items()}
        checkpoint.load(dtype="float32", out=out)
        for name, want in built.want.items():
            if want.dtype.kind not in "iuc":
                want = astype(want, "float32")
            if built.want[name].dtype != np.float32 and want.dtype == np.float32:
                assert loaded[name].flags.c_contiguous, name
            same(loaded[name], want, name)
            same(out[name], want, name)
        assert not any("bf16" in pair or "large" in pair for pair in sharing(loaded))
        assert not sharing(out)


def test_out_is_filled(built):
    with built.open() as checkpoint:
        out = {name: np.zeros_like(want, order="C") for name, want in built.want.items()}
        loaded = checkpoint.load(out=out)
        for name, want in built.want.items():
            assert loaded[name] is out[name]
            same(out[name], want, name)


INDICES = [
    (),
    (0,),
    (-1,),
    (slice(None, None, -1),),
    (slice(1, 3),),
    (..., 0),
    (..., slice(None, None, 2)),
    (..., slice(1, None)),
    (slice(2, 1),),
    (None, ...),
    (slice(0, None, 10**18),),
    (slice(0, 3), slice(None, None, -2)),
    (1, slice(1, 4)),
]


def test_slices_are_numpys(built):
    with built.open() as checkpoint:
        for index, (name, want) in itertools.product(INDICES, built.want.items()):
            try:
                expected = np.array(want[index])
            except IndexError:
                with pytest.raises(IndexError):
                    checkpoint.get_slice(name)[index]
                continue
            got = checkpoint.get_slice(name)[index]
            same(got, expected, (name, index))
            assert got.flags.c_contiguous, (name, index)


def test_sizes_are_those_of_the_elements(built):
    with built.open() as checkpoint:
        assert {name: info.nbytes for name, info in checkpoint.tensors.items()} == {
            name: want.nbytes for name, want in built.want.items()
        }
        assert checkpoint.nbytes == sum(want.nbytes for want in built.want.values())


def test_a_refused_mapping_is_read_and_still_shared(built, monkeypatch):
    with built.open() as checkpoint:

        def refuse(**_):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(checkpoint.weight_files[0].store, "map", refuse)
        loaded = checkpoint.load()
        assert checkpoint.last_load.backend == "pread"
        assert sharing(loaded) == shared_in_file(built)
        for name, want in built.want.items():
            same(loaded[name], want, name)


def test_a_file_that_ends_early_names_the_tensor(built):
    with built.open() as checkpoint:
        flat = built.data.index(in_order(built.want["flat"], built.order))
        with built.path.open("r+b") as file:
            file.truncate(flat + 100)
        with pytest.raises(errors.FormatError, match=rf"^tensor '.*: the file ends at byte {flat + 100}, "):
            checkpoint.load(["flat"], backend="pread")


def test_progress_counts_each_byte_of_a_block_once(tmp_path):
    built = build(tmp_path / "raw.bin")
    seen = []
    with built.open() as checkpoint:
        checkpoint.load(backend="pread", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(storage.array.nbytes for storage in built.storages)


def test_tensors_that_hang_together(tmp_path):
    """They are read as one block, and nothing else is."""
    ranges = [(10, 20), (0, 5), (5, 10), (19, 30), (29, 31), (40, 40), (0, 1)]
    storage = Storage("0", np.arange(41, dtype=np.uint8).repeat(MIB))
    value = {str(k): tensor(storage, ((e - b) * MIB,), (1,), b * MIB) for k, (b, e) in enumerate(ranges)}
    (tmp_path / "x.pt").write_bytes(zip_file(value))
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        loaded = checkpoint.load(backend="pread")
        for k, (begin, end) in enumerate(ranges):
            np.testing.assert_array_equal(loaded[str(k)][::MIB], np.arange(begin, end))
            steps = []
            alone = checkpoint.load([str(k)], backend="pread", progress=lambda *step, steps=steps: steps.append(step))
            np.testing.assert_array_equal(alone[str(k)], loaded[str(k)])
            assert not steps or steps[-1] == ((end - begin) * MIB,) * 2
        assert list(checkpoint) == list("0123456")
        assert "3" in checkpoint
        assert "7" not in checkpoint
        with pytest.raises(errors.TensorNotFoundError):
            checkpoint["7"]
    blocks = {}
    for name, array in loaded.items():
        while isinstance(array.base, np.ndarray):
            array = array.base
        blocks.setdefault(id(array), []).append(name)
    assert sorted(blocks.values()) == [["0", "3", "4"], ["1", "6"], ["2"], ["5"]]
