"""`Checkpoint.stream`: the tensors that `load` gives, in turn and in bounded memory, and an end without remains."""

import collections
import contextlib
import copy
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from builders import gguf_build, inside, torch_build
from builders.holes import extend
from builders.inside import buffer_pool
from builders.paths import DATA
from builders.quantized import FIXTURES, each_kind
from builders.random import rng
from builders.streams import sums
from builders.thorough import dealt
from builders.threads import threads

import safeload
from safeload import FormatError, QuantizedTensor, TensorNotFoundError, UnsupportedError
from safeload.numpy import save_file

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
quiet = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


TENSORS = {
    "a": rng.standard_normal((3, 5)).astype(np.float32),
    "large": rng.standard_normal((700, 1000)).astype(np.float32),
    "empty": np.empty((0, 4), np.float16),
    "scalar": np.array(7, np.int16),
    "half": rng.standard_normal((300, 1000)).astype(ml_dtypes.bfloat16),
    "bool": np.array([True, False, True]),
    "complex": np.array([1 + 2j], np.complex64),
    "byte": rng.integers(0, 255, 33).astype(np.uint8),
    "f8": rng.standard_normal((1, 7)).astype(ml_dtypes.float8_e4m3fn),
    "large2": rng.standard_normal((1000, 800)).astype(np.float16),
    "z": rng.standard_normal(11),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "model.safetensors"
    save_file(TENSORS, path, durable=False)
    return path


@pytest.fixture
def checkpoint(path):
    with safeload.open(path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    arrays = {f"layer.{k}": np.full((k + 1, 1000), k, np.float32) for k in range(12)}
    where = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        chosen = {name: array for k, (name, array) in enumerate(arrays.items()) if k % 3 == part}
        save_file(chosen, folder / file, durable=False)
        where |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def arrays_of(value):
    """The arrays of a tensor: one, or those of its codes and scales."""
    return list(value.parts.values()) if isinstance(value, QuantizedTensor) else [value]


def raw(value):
    """The values of a tensor as bytes, with dtype and shape."""
    if isinstance(value, QuantizedTensor):
        value = value.dequantize("float32")
    return value.dtype, value.shape, np.ascontiguousarray(value).tobytes()


def assert_private(found):
    """Every array is aligned, writable, contiguous, and shares no byte with another."""
    ranges = []
    for name, value in found:
        for array in arrays_of(value):
            assert array.flags.writeable, name
            assert array.flags.c_contiguous, name
            if array.size:
                begin = array.__array_interface__["data"][0]
                assert begin % 64 == 0, name
                ranges.append((begin, begin + array.nbytes, name))
    ranges.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(ranges):
        assert end <= begin, f"{first} and {second} share memory"


def assert_streams_what_is_loaded(checkpoint, **options):
    want = checkpoint.load(backend="pread", **options)
    for ahead in (100_000, "1GiB"):
        found = list(checkpoint.stream(ahead=ahead, **options))
        assert len(found) == len(want)
        assert {name: raw(value) for name, value in found} == {name: raw(value) for name, value in want.items()}
        assert all(type(value) is type(want[name]) for name, value in found)
        assert_private(found)
    # Dropped in turn, their memory goes to later ones, and never changes those that are kept.
    kept = [(name, value) for k, (name, value) in enumerate(checkpoint.stream(ahead=3 * MIB, **options)) if k % 3]
    assert all(raw(value) == raw(want[name]) for name, value in kept)
    assert_private(kept)


# ---- equal to load ----


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float64"])
def test_a_stream_has_what_load_has(checkpoint, dtype):
    assert_streams_what_is_loaded(checkpoint, dtype=dtype)
    assert [name for name, _ in checkpoint.stream(dtype=dtype)] == list(checkpoint)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_shards_likewise(shards, dtype):
    with safeload.open(shards) as checkpoint:
        assert_streams_what_is_loaded(checkpoint, dtype=dtype)


@each_kind()
def test_packed_checkpoints_likewise(fixture):
    with safeload.open(fixture.path) as checkpoint:
        assert_streams_what_is_loaded(checkpoint)
        assert_streams_what_is_loaded(checkpoint, dtype="bfloat16")


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_our_own_int8_likewise(dtype):
    with safeload.open(DATA / "fracast-int8.safetensors") as checkpoint:
        assert_streams_what_is_loaded(checkpoint, dtype=dtype)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_npz_likewise(tmp_path, dtype):
    arrays = {name: TENSORS[name] for name in ("a", "large", "empty", "scalar", "byte", "z")}
    np.savez(tmp_path / "x.npz", **arrays)
    np.savez_compressed(tmp_path / "y.npz", **arrays, f=np.asfortranarray(arrays["a"]))
    for name in ("x.npz", "y.npz"):
        with safeload.open(tmp_path / name) as checkpoint:
            assert_streams_what_is_loaded(checkpoint, dtype=dtype)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_gguf_likewise(tmp_path, dtype):
    blocks = rng.integers(0, 100, (4, 34), np.uint8)
    blocks[:, :2] = np.array([1.5], np.float16).view(np.uint8)
    data = blocks.tobytes().ljust(160, b"\0") + rng.standard_normal(32).astype(np.float32).tobytes()
    tensors = [gguf_build.tensor("q", (64, 2), 8, 0), gguf_build.tensor("f", (32,), 0, 160)]
    (tmp_path / "x.gguf").write_bytes(gguf_build.build((), tensors, data))
    with safeload.open(tmp_path / "x.gguf") as checkpoint:
        assert isinstance(dict(checkpoint.stream())["q"], QuantizedTensor)
        assert_streams_what_is_loaded(checkpoint, dtype=dtype)


def torch_tensors():
    """Contiguous, strided, transposed, tied, overlapping in part, scalar and empty."""
    large = torch_build.Storage("0", rng.standard_normal(400_000).astype(np.float32))
    small = torch_build.Storage("1", np.arange(60, dtype=np.float16))
    return torch_build.ordered(
        {
            "whole": torch_build.tensor(large),
            "tied": torch_build.tensor(large),
            "transposed": torch_build.tensor(large, (400, 1000), (1, 400)),
            "column": torch_build.tensor(large, (1000,), (400,), 3),
            "part": torch_build.tensor(small, (2, 5), offset=1),
            "steps": torch_build.tensor(small, (7, 2), (6, 3), 2),
            "scalar": torch_build.tensor(small, (), (), 5),
            "empty": torch_build.tensor(small, (0, 3)),
        }
    )


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["zip", "big-endian", "legacy"])
def test_torch_likewise_also_what_shares_storage(tmp_path, kind, dtype):
    content = {
        "zip": lambda: torch_build.zip_file(torch_tensors()),
        "big-endian": lambda: torch_build.zip_file(torch_tensors(), order="big"),
        "legacy": lambda: torch_build.legacy_file(torch_tensors()),
    }[kind]()
    (tmp_path / "x.pt").write_bytes(content)
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        assert_streams_what_is_loaded(checkpoint, dtype=dtype)


def test_repeated_elements_take_no_memory_and_none_of_another_tensor(tmp_path):
    storage = torch_build.Storage("0", np.arange(8, dtype=np.float32))
    items = {
        "huge": torch_build.tensor(storage, (1 << 27, 4), (0, 1)),
        "again": torch_build.tensor(storage, (1 << 20, 4), (0, 1)),
        "windows": torch_build.tensor(storage, (5, 4), (1, 1)),
        "plain": torch_build.tensor(storage, (8,), (1,)),
    }
    (tmp_path / "x.pt").write_bytes(torch_build.zip_file(torch_build.ordered(items)))
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        found = dict(checkpoint.stream(order="given"))
        assert list(found) == list(items)
        assert found["huge"].shape == (1 << 27, 4)
        assert (found["huge"][12345] == np.arange(4)).all()
        assert (found["windows"] == np.arange(5)[:, None] + np.arange(4)).all()
        found["again"][0] = 9
        found["windows"][4] = 9
        found["plain"][:] = 9
        assert (found["huge"][12345] == np.arange(4)).all()


# ---- which, and in what order ----


def names_of(stream):
    return [name for name, _ in stream]


def test_orders(checkpoint, shards):
    every = list(checkpoint)
    some = ["f8", "a", "large2", "z"]
    assert names_of(checkpoint.stream(some, order="given")) == some
    assert names_of(checkpoint.stream(reversed(every), order="given")) == every[::-1]
    in_file = [name for name in every if name in some]
    assert in_file != some
    assert names_of(checkpoint.stream(some)) == in_file
    assert names_of(checkpoint.stream(some, order="ready")) == in_file
    assert names_of(checkpoint.stream(order="given")) == every
    with safeload.open(shards) as several:
        assert names_of(several.stream(reversed(list(several)))) == list(several)
        mixed = [f"layer.{k}" for k in (11, 0, 4, 5, 3)]
        found = list(several.stream(mixed, order="given", dtype="bfloat16"))
        assert [(name, float(array[0, 0])) for name, array in found] == [(name, float(name[6:])) for name in mixed]


@pytest.mark.parametrize("order", ["File", "", None, 3, ["file"]])
def test_another_order_is_refused(checkpoint, order):
    with pytest.raises(ValueError, match='order must be "file", "given" or "ready"'):
        checkpoint.stream(order=order)


def test_names_and_patterns_are_those_of_load(checkpoint):
    assert names_of(checkpoint.stream(["a", "z", "a"], order="given")) == ["a", "z"]
    assert set(names_of(checkpoint.stream(only="large*"))) == {"large", "large2"}
    assert set(names_of(checkpoint.stream(drop=["*a*", "z"]))) == {name for name in TENSORS if "a" not in name} - {"z"}
    assert set(names_of(checkpoint.stream(["a", "z"], drop="z"))) == {"a"}
    assert list(checkpoint.stream([])) == []
    with pytest.raises(TensorNotFoundError, match="larg"):
        checkpoint.stream(["larg"])
    with pytest.raises(TensorNotFoundError, match="matches none"):
        checkpoint.stream(only="x*")
    with pytest.raises(ValueError, match="pass only one of them"):
        checkpoint.stream(["a"], only="a")
    with pytest.raises(TypeError, match="got a single str"):
        checkpoint.stream("a")


def test_a_file_without_tensors(tmp_path):
    save_file({}, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint:
        assert list(checkpoint.stream(progress=lambda *done: pytest.fail("nothing is taken"))) == []


def test_it_shows_what_is_left(checkpoint):
    stream = checkpoint.stream()
    assert (repr(stream), stream.__length_hint__()) == ("<TensorStream: 11 of 11 tensors left>", 11)
    next(stream)
    assert (repr(stream), stream.__length_hint__()) == ("<TensorStream: 10 of 11 tensors left>", 10)
    stream.close()
    assert repr(stream) == "<TensorStream: 0 of 11 tensors left>"


def test_what_streams_is_imported_with_the_first_stream(path):
    code = inside.program("""
import sys, safeload
safeload.safe_open(sys.argv[1]), safeload.load(sys.argv[1])
print(*sorted(m.rpartition(".")[2] for m in sys.modules if m.startswith("safeload.")))
print(safeload.open(sys.argv[1]).stream())
""")
    done = subprocess.run([sys.executable, "-I", "-c", code, str(path)], capture_output=True, text=True, check=True)
    imported, found = done.stdout.splitlines()
    assert not {"stream", "ahead", "recycled", "staging", "pieces"} & set(imported.split())
    assert not [name for name in imported.split() if name.startswith(("torch_", "jax_"))]
    assert found.startswith("<TensorStream: ")


# ---- memory ----


@pytest.mark.parametrize("ahead", [1, 2, 3, 7, True, " 5 kb ", "1.5KiB", "100MB", 10**30, "9" * 30 + "GB"])
def test_any_ahead_gives_the_same(checkpoint, ahead):
    found = dict(checkpoint.stream(ahead=ahead))
    assert {name: raw(array) for name, array in found.items()} == {name: raw(array) for name, array in TENSORS.items()}


@pytest.mark.parametrize(
    ("ahead", "error", "message"),
    [
        (0, ValueError, "must be at least 1 byte, got"),
        (-1, ValueError, "must be at least 1 byte, got"),
        ("0GB", ValueError, "must be at least 1 byte, got"),
        ("", ValueError, "is not a size such as"),
        ("-1GB", ValueError, "is not a size such as"),
        ("1 XB", ValueError, "is not a size such as"),
        (1.5, TypeError, "float"),
        (None, TypeError, "NoneType"),
        (b"1GB", TypeError, "bytes"),
    ],
)
def test_another_ahead_is_refused(checkpoint, ahead, error, message):
    with pytest.raises(error, match=message):
        checkpoint.stream(ahead=ahead)


def sparse(path, sizes, code="U8"):
    """A file of zeros that takes no disk, with tensors "0", "1" and so on of these sizes in bytes."""
    entries, at = [], 0
    for k, size in enumerate(sizes):
        width = {"U8": 1, "BF16": 2}[code]
        entries.append(f'"{k}":{{"dtype":"{code}","shape":[{size // width}],"data_offsets":[{at},{at + size}]}}')
        at += size
    header = ("{" + ",".join(entries) + "}").encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        extend(file, 8 + len(header) + at)
    return path


@linux
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
@pytest.mark.parametrize(
    ("sizes", "dtype", "ahead", "most"),
    [
        ([8 * MIB] * 16, None, 48 * MIB, 48 + 2 * 8),
        ([100_000] * 1500, None, 32 * MIB, 32 + 2 * 8),
        ([2 * MIB, 45 * MIB] * 4, None, 16 * MIB, 2 * 45),
        ([8 * MIB] * 16, "float32", 48 * MIB, 48 + 2 * 16),
    ],
    ids=["equal", "small", "larger than ahead", "converted"],
)
def test_memory_stays_within_ahead_and_two_tensors(tmp_path, sizes, dtype, ahead, most):
    script = """
        import sys, time, safeload
        def resident(key):
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith(key)) >> 10
        path, dtype, ahead = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
        checkpoint = safeload.open(path)
        for _ in zip(range(2), checkpoint.stream(["0"], dtype=dtype)): pass
        with open("/proc/self/clear_refs", "w") as file: file.write("5")  # the peak from here on
        before = resident("VmRSS")
        for k, (name, array) in enumerate(checkpoint.stream(dtype=dtype, ahead=ahead)):
            if k in (1, 9, 300): time.sleep(0.1)  # while it reads as far as it may
        print(resident("VmHWM") - before)
    """
    path = sparse(tmp_path / "x", sizes, "BF16" if dtype else "U8")
    command = [sys.executable, "-I", "-c", textwrap.dedent(script), str(path), dtype or "", str(ahead)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= most + 10


@linux
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped", "one array kept"])
def test_two_hundred_streams_leave_nothing_behind(tmp_path, end):
    def resident():
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def files():
        return len(os.listdir("/proc/self/fd"))

    kept = []
    with safeload.open(sparse(tmp_path / "x", [MIB // 4, 1, MIB // 4, 1])) as checkpoint:
        for k in range(210):
            stream = checkpoint.stream()
            if end == "exhausted":
                for _ in stream:
                    pass
            else:
                _, array = next(stream)
                next(stream)
            if end == "closed":
                stream.close()
            if end == "one array kept":
                kept = [array]
            array = stream = None
            if k == 10:
                before, opened = resident(), files()
        assert resident() - before < 12 * MIB
        assert files() == opened
    assert len(kept) <= 1


@pytest.fixture
def held(monkeypatch):
    """Sizes of the arrays of streams, and of what is kept for them, by address."""
    real, sizes = buffer_pool.short, {}

    class Memory:
        @staticmethod
        def sl_memory_alloc(size):
            address = real.sl_memory_alloc(size)
            sizes[address] = size
            return address

        @staticmethod
        def sl_memory_free(address, size):
            assert sizes.pop(address) == size
            real.sl_memory_free(address, size)

    monkeypatch.setattr(buffer_pool, "short", Memory)
    return sizes


def test_what_an_abandoned_stream_kept_is_freed_although_an_array_lives(tmp_path, held):
    with safeload.open(sparse(tmp_path / "x", [2 * MIB] * 20)) as checkpoint:
        arrays = [array for _, (_, array) in zip(range(6), checkpoint.stream(ahead=12 * MIB), strict=False)]
        assert sum(held.values()) == 12 * MIB
        del arrays[1:]
        assert sum(held.values()) == 2 * MIB
        arrays.clear()
        assert held == {}


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be truncated there")
@pytest.mark.parametrize("ahead", [1, "1GB"])
def test_an_error_that_was_handled_keeps_no_array(tmp_path, held, ahead):
    """Also where no garbage is collected."""
    with truncated(tmp_path, 2 * MIB, count=12, at=7.5) as checkpoint:
        gc.disable()
        try:
            with contextlib.suppress(FormatError):
                collections.deque(checkpoint.stream(ahead=ahead), maxlen=0)
            assert held == {}
        finally:
            gc.enable()


def test_a_strided_tensor_counts_with_the_range_that_it_is_read_from(tmp_path):
    """Its bytes are few, but all those between them are read."""
    storage = torch_build.Storage("0", np.zeros(3 * MIB, np.uint8))
    items = {f"{k}": torch_build.tensor(storage, (1024,), (3000,), k) for k in range(6)}
    (tmp_path / "x.pt").write_bytes(torch_build.zip_file(torch_build.ordered(items)))
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        stream = checkpoint.stream(ahead=8 * MIB)
        next(stream)
        assert stream._results.pending <= 8 * MIB
        assert len(stream._ready) + len(stream._results._sizes) <= 2
        stream.close()


def test_many_tiny_tensors(tmp_path):
    arrays = {f"layer.{k}.scale": np.full(k % 7, k % 251, np.uint8) for k in range(10_000)}
    save_file(arrays, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint:
        started = time.perf_counter()
        found = list(checkpoint.stream())
        assert time.perf_counter() - started < 5
        assert all(np.array_equal(array, arrays[name]) for name, array in found)
        assert_private(found)


# ---- errors ----


def truncated(tmp_path, size, count=40, at=25.5):
    """An open checkpoint of equal tensors whose file ends in the middle of one."""
    arrays = {f"t{k:02}": np.full(size, k % 251, np.uint8) for k in range(count)}
    save_file(arrays, tmp_path / "x", durable=False)
    checkpoint = safeload.open(tmp_path / "x")
    os.truncate(tmp_path / "x", checkpoint.tensors["t00"].offset + int(at * size))
    return checkpoint


def assert_fails(stream, error, before):
    """All before it arrives, then the error, and nothing afterwards. Returns the error."""
    found = []
    with pytest.raises(error) as caught:
        found.extend(stream_of(stream, found))
    assert names_of(found) == before
    assert threads() == []
    assert list(stream) == []
    return caught.value


def stream_of(stream, found):
    for pair in stream:
        found.append(pair)
    return []


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be truncated there")
@pytest.mark.parametrize(
    ("stored", "ahead"), dealt([*itertools.product([100, 3 * MIB], [None, "float32"])], [1, 6 * MIB, 1 << 30])
)
def test_a_truncated_file_fails_at_its_tensor(tmp_path, stored, ahead):
    size, dtype = stored
    with truncated(tmp_path, size) as checkpoint:
        stream = checkpoint.stream(ahead=ahead, dtype=dtype)
        error = assert_fails(stream, FormatError, [f"t{k:02}" for k in range(25)])
        assert error.tensor == "t25"
        assert error.path == str(tmp_path / "x")
        # What lies behind it in the caller's order comes first there.
        stream = checkpoint.stream(["t03", "t30", "t02", "t26"], ahead=ahead, order="given")
        assert assert_fails(stream, FormatError, ["t03"]).tensor == "t30"


def test_a_missing_tensor_among_many_small_ones_is_found_fast(tmp_path):
    if sys.platform == "win32":
        pytest.skip("an open file cannot be truncated there")
    arrays = {f"{k:04}": np.full(3, k % 251, np.uint8) for k in range(5000)}
    save_file(arrays, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint:
        os.truncate(tmp_path / "x", checkpoint.tensors["4990"].offset)
        started = time.perf_counter()
        assert assert_fails(checkpoint.stream(), FormatError, list(arrays)[:4990]).tensor == "4990"
        assert time.perf_counter() - started < 5


def test_a_scale_that_is_not_finite_fails_at_its_tensor(tmp_path):
    stored = FIXTURES["fp8_autofp8"].stored()
    scales = [name for name in stored if name.endswith("weight_scale")]
    for name in FIXTURES["fp8_autofp8"].folder.iterdir():
        if name.suffix == ".json" and "index" not in name.name:
            (tmp_path / name.name).write_bytes(name.read_bytes())
    with safeload.open(FIXTURES["fp8_autofp8"].path) as good:
        order = names_of(good.stream(dtype="float32"))
    bad = scales[len(scales) // 2]
    stored[bad] = np.full_like(stored[bad], np.nan)
    save_file(stored, tmp_path / "model.safetensors", durable=False)
    with safeload.open(tmp_path) as checkpoint:
        order = names_of(checkpoint.stream())
        weight = bad.removesuffix("_scale")
        error = assert_fails(checkpoint.stream(dtype="float32"), FormatError, order[: order.index(weight)])
        assert error.tensor == weight
        assert error.path == str(tmp_path / "model.safetensors")


def test_an_array_that_numpy_refuses_fails_at_its_tensor(tmp_path):
    arrays = {"a": np.ones(3, ml_dtypes.float8_e4m3fn), "b": np.empty((0, 1 << 62), ml_dtypes.float8_e4m3fn)}
    save_file(arrays, tmp_path / "x", durable=False)
    with safeload.open(tmp_path / "x") as checkpoint:
        stream = checkpoint.stream(["a", "b"], order="given", dtype="float32")
        assert "does not support shape" in str(assert_fails(stream, UnsupportedError, ["a"]))


def test_what_no_dtype_converts_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="unknown dtype"):
        safeload.open(DATA / "silero_vad_16k.safetensors").stream(dtype="float33")
    with pytest.raises(UnsupportedError, match="cannot load as int8"):
        safeload.open(DATA / "silero_vad_16k.safetensors").stream(dtype="int8")


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_threads(checkpoint, threads):
    assert {name: raw(array) for name, array in checkpoint.stream(threads=threads)} == {
        name: raw(array) for name, array in TENSORS.items()
    }


@pytest.mark.parametrize(
    ("threads", "error"), [(0, ValueError), (-1, ValueError), (10**9, ValueError), (1.5, TypeError)]
)
def test_other_numbers_of_threads_are_refused_at_once(checkpoint, threads, error):
    with pytest.raises(error):
        checkpoint.stream(threads=threads)


def test_a_number_of_threads_in_the_environment(checkpoint, monkeypatch):
    monkeypatch.setenv("SAFELOAD_NUM_THREADS", "2")
    assert len(list(checkpoint.stream())) == len(TENSORS)
    monkeypatch.setenv("SAFELOAD_NUM_THREADS", "many")
    assert_fails(checkpoint.stream(), ValueError, [])


# ---- out ----


def test_out_is_filled(checkpoint):
    for dtype in (None, "float64"):
        want = checkpoint.load(dtype=dtype)
        out = {name: np.full_like(array, 1) for name, array in want.items()}
        for give in (out, out.__getitem__):
            for name, array in checkpoint.stream(dtype=dtype, out=give):
                assert array is out[name]
                assert raw(array) == raw(want[name])
                array[...] = 0


def test_out_of_a_packed_checkpoint():
    with safeload.open(FIXTURES["mxfp8"].path) as checkpoint:
        want = checkpoint.load(dtype="float32")
        out = {name: np.zeros_like(array) for name, array in want.items()}
        for name, array in checkpoint.stream(dtype="float32", out=out):
            assert array is out[name]
            assert raw(array) == raw(want[name])
        with pytest.raises(ValueError, match="pass dtype= to dequantize it"):
            checkpoint.stream(out=out)


def test_out_of_tensors_that_share_storage(tmp_path):
    (tmp_path / "x.pt").write_bytes(torch_build.zip_file(torch_tensors(), order="big"))
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        want = checkpoint.load(backend="pread")
        out = {name: np.empty(array.shape, array.dtype) for name, array in want.items()}
        assert {name: raw(array) for name, array in checkpoint.stream(out=out)} == {
            name: raw(array) for name, array in want.items()
        }


def test_a_function_for_out_is_called_once_for_each_in_order_and_in_the_callers_thread(checkpoint):
    calls = []

    def give(name):
        calls.append((name, threading.get_ident()))
        return np.empty_like(TENSORS[name])

    stream = checkpoint.stream(out=give, ahead=1)
    next(stream)
    assert len(calls) < len(TENSORS)
    list(stream)
    assert calls == [(name, threading.get_ident()) for name in checkpoint]


def test_a_mapping_for_out_is_checked_at_once(checkpoint):
    good = {name: np.full_like(array, 1) for name, array in TENSORS.items()}
    bad = [
        ({name: array for name, array in good.items() if name != "half"}, ValueError, "no array for tensor 'half'"),
        ({**good, "more": good["a"]}, ValueError, "'more' is not a tensor of this stream"),
        ({**good, "a": good["a"].T}, ValueError, "the tensor needs float32"),
        ({**good, "a": [1]}, TypeError, "is a list"),
        ([good], TypeError, "out must be a mapping"),
        (3, TypeError, "out must be a mapping"),
    ]
    for out, error, message in bad:
        with pytest.raises(error, match=message):
            checkpoint.stream(out=out)
    assert all((array == 1).all() for array in good.values())


@pytest.mark.parametrize("ahead", [1, "1GB"])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (None, ValueError),
        (np.zeros(3), ValueError),
        ([1], TypeError),
        (KeyError("none"), KeyError),
        (StopIteration(), RuntimeError),
    ],
    ids=["None", "another shape", "a list", "an error", "StopIteration"],
)
def test_what_a_function_for_out_does_wrong_fails_at_its_tensor(checkpoint, wrong, error, ahead):
    names = list(checkpoint)

    def give(name):
        if name != names[2]:
            return np.empty_like(TENSORS[name])
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    assert_fails(checkpoint.stream(out=give, ahead=ahead), error, names[:2])


def test_out_functions_may_close_the_stream(checkpoint):
    def give(name):
        stream.close()
        return np.empty_like(TENSORS[name])

    stream = checkpoint.stream(out=give)
    with pytest.raises(ValueError, match="closed"):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize(("body", "message"), [("close", "closed"), ("__next__", "taken from|closed")])
def test_out_functions_are_told_what_they_must_not_do_while_others_are_read(checkpoint, body, message):
    """Never an error of the inside, such as a KeyError."""
    names = list(TENSORS)

    def give(name):
        if name == names[4]:
            getattr(stream, body)()
        return np.empty_like(TENSORS[name])

    stream = checkpoint.stream(names, order="given", ahead=1, out=give)
    with pytest.raises(ValueError, match=message):
        list(stream)
    assert list(stream) == []


# ---- progress ----


def test_progress_counts_what_is_taken(checkpoint):
    seen = []
    here = threading.get_ident()
    stream = checkpoint.stream(progress=lambda *done: seen.append((*done, threading.get_ident())))
    total = sum(array.nbytes for array in TENSORS.values())
    taken = 0
    for k, (_, array) in enumerate(stream, 1):
        taken += array.nbytes
        assert seen[-1] == (taken, total, here)
        assert len(seen) == k
    assert taken == total


@pytest.mark.parametrize("name", ["ct_pack_w4_g32_sym", "deepseek_v4"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_progress_ends_at_the_total_also_for_packed_tensors(name, dtype):
    seen = []
    with safeload.open(FIXTURES[name].path) as checkpoint:
        list(checkpoint.stream(dtype=dtype, progress=lambda *done: seen.append(done)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("error", [RuntimeError("StopIteration"), StopIteration()], ids=repr)
def test_an_error_in_a_report_ends_the_stream(checkpoint, error):
    def report(done, total):
        raise error

    stream = checkpoint.stream(progress=report)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(stream)
    assert threads() == []
    assert list(stream) == []


def test_a_report_may_close_the_stream(checkpoint):
    stream = checkpoint.stream(progress=lambda done, total: stream.close())
    assert next(stream)[0] == next(iter(checkpoint))
    assert threads() == []
    assert list(stream) == []


def test_a_bar_ends_with_the_stream_also_before_its_end(checkpoint, monkeypatch):
    events = []

    @contextlib.contextmanager
    def bar(label, *, leave=False):
        yield lambda done, total: events.append((done, total))
        events.append("closed")

    monkeypatch.setattr(inside.progress, "bar", bar)
    stream = checkpoint.stream(progress=True)
    next(stream)
    stream.close()
    stream.close()
    assert events[1:] == ["closed"]
    events.clear()
    list(checkpoint.stream(progress=True))
    assert events[-2][0] == events[-2][1]
    assert events.count("closed") == 1


# ---- the end ----


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A checkpoint of 3 GB that takes no disk."""
    return sparse(tmp_path_factory.mktemp("long") / "x", [32 * MIB] * 96)


def test_a_stream_stops_when_it_is_left(long):
    with safeload.open(long) as checkpoint:
        stream = checkpoint.stream()
        for _ in stream:
            break
        assert len(threads()) == 1
        stream.close()
        assert threads() == []
        stream.close()
        assert list(stream) == []
        for _ in checkpoint.stream():
            break
        gc.collect()
        assert threads() == []
        stream = checkpoint.stream()
        next(stream)
        stream.itself = stream
        del stream
        gc.collect()
        assert threads() == []
        checkpoint.stream().close()


def test_a_stream_closed_by_another_thread_says_so(long):
    with safeload.open(long) as checkpoint:
        stream = checkpoint.stream(dtype=None, threads=1)
        closer = threading.Timer(0.05, stream.close)
        closer.start()
        with contextlib.suppress(ValueError):
            for _ in stream:
                pass
        closer.join()
        assert stream.__length_hint__() == 0
        assert list(stream) == []


def test_a_checkpoint_that_is_closed(path):
    checkpoint = safeload.open(path)
    stream, late = checkpoint.stream(ahead=1), checkpoint.stream(ahead="1GB")
    next(stream)
    taken = [next(late)]
    checkpoint.close()
    with pytest.raises(ValueError, match="is closed"):
        list(stream)
    with contextlib.suppress(ValueError):  # what was read before arrives
        taken += late
    assert all(raw(array) == raw(TENSORS[name]) for name, array in taken)
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.stream()


def test_a_pickled_checkpoint_streams_and_a_stream_is_not_pickled(checkpoint):
    again = pickle.loads(pickle.dumps(checkpoint))
    assert names_of(again.stream()) == list(checkpoint)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickle the checkpoint"):
            copied(checkpoint.stream())


def test_streams_beside_each_other(checkpoint):
    for (name, array), (other, again) in zip(checkpoint.stream(), checkpoint.stream(ahead=1), strict=True):
        assert name == other
        assert raw(array) == raw(again) == raw(TENSORS[name])
        assert not np.shares_memory(array, again)


def test_threads_share_a_stream(tmp_path):
    """Each tensor goes to one of them, and none is lost."""
    arrays = {f"{k}": np.full(1000 + k, k, np.int32) for k in range(2000)}
    save_file(arrays, tmp_path / "x", durable=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with safeload.open(tmp_path / "x") as checkpoint:
            stream = checkpoint.stream(ahead=100_000)
            found = []
            threads = [threading.Thread(target=lambda: stream_of(stream, found)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(names_of(found)) == sorted(arrays)
    assert all(np.array_equal(array, arrays[name]) for name, array in found)


PROGRAM = """
    import _thread, os, signal, sys, threading, time, safeload
    def interrupt():
        if os.name == "nt":
            threading.Timer(0.1, _thread.interrupt_main).start()
        else:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    checkpoint = safeload.open(sys.argv[1])
    stream = checkpoint.stream(ahead="100MB")
    next(stream)
"""


def run_program(code, path, **options):
    command = [sys.executable, "-I", "-X", "dev", "-W", "error", "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(code)]
    started = time.monotonic()
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60, **options)
    assert time.monotonic() - started < (30 if os.name == "nt" else 10)  # starting Python under Wine takes seconds
    return done


@pytest.mark.no_core
@pytest.mark.parametrize(
    "code",
    ["", "sys.exit(0)", "stream.itself = stream; del stream", "sys.kept = stream", "kept = [next(stream)]; del stream"],
)
def test_a_program_ends_with_a_stream_that_is_half_consumed(long, code):
    done = run_program(code, long)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


INTERRUPTED = """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt()
    try:
        while True:
            stream = checkpoint.stream(ahead="100MB")
            for name, array in stream:
                BODY
    except KeyboardInterrupt:
        pass
    time.sleep(0)
    stream.close()
    assert [one.name for one in threading.enumerate() if one.name == "safeload"] == []
    print("interrupted", sum("x" == os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in
          os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")) if sys.platform == "linux" else 1)
"""


@pytest.mark.parametrize("body", ["pass", "time.sleep(0.5)", "array[::4096].sum()"])
def test_ctrl_c_ends_a_stream(long, body):
    done = run_program(INTERRUPTED.replace("BODY", body), long)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted 1\n", "")


# ---- fork ----


@forks
@quiet
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="its allocator may stay locked in a child")
def test_after_a_fork_the_stream_is_the_parents(path):
    with safeload.open(path) as checkpoint:
        for begun in (0, 3):
            stream = checkpoint.stream(ahead=MIB)
            taken = [next(stream) for _ in range(begun)]
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    signal.alarm(20)
                    try:
                        next(stream)
                    except RuntimeError as error:
                        status = 0 if "fork" in str(error) else 2
                    taken.clear()
                    if len(list(checkpoint.stream())) != len(TENSORS):
                        status = 3
                    stream.close()
                    del stream
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            taken += stream
            assert {name: raw(array) for name, array in taken} == {name: raw(array) for name, array in TENSORS.items()}


@forks
def test_a_child_that_ends_as_programs_do_does_not_hang(long):
    code = """
    import warnings
    warnings.simplefilter("ignore")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    next(stream)
    """
    done = run_program(code, long)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@quiet
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_processes_stream_beside_a_parent_that_streams(path, method):
    with safeload.open(path) as checkpoint:
        stream = checkpoint.stream(ahead=1)
        next(stream)
        with multiprocessing.get_context(method).Pool(2) as pool:
            first, second = pool.map_async(sums, [path] * 2).get(60)
        list(stream)
    assert first == second == sums(path)
