"""Loading with dtype= and out=."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from builders.holes import extend
from builders.paths import DATA, SHARED
from builders.random import rng
from builders.terminal import press_ctrl_c

import safeload
from safeload import FormatError, UnsupportedError
from safeload.numpy import load_file, save_file

LARGER = SHARED / "safetensors"

FLOATS = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
TARGETS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = {name: np.abs(rng.standard_normal((17, 9))).astype(dtype) for name, dtype in FLOATS.items()}
    tensors |= {
        "large": rng.standard_normal((1100, 1000)).astype(ml_dtypes.bfloat16),
        "integers": np.arange(12).reshape(3, 4),
        "bool": np.array([True, False]),
        "complex": np.array([1 + 2j], np.complex64),
        "scalar": np.array(2.5, np.float16),
        "empty": np.empty((0, 3), np.float32),
    }
    path = tmp_path_factory.mktemp("loading") / "model.safetensors"
    save_file(tensors, path, durable=False)
    return path


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("dtype", TARGETS)
def test_loading_with_a_dtype_is_loading_then_astype(path, dtype, backend):
    plain = load_file(path)
    loaded = load_file(path, dtype=dtype, backend=backend)
    assert list(loaded) == list(plain)
    for name, array in plain.items():
        if name in ("integers", "bool", "complex"):
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)
            continue
        want = safeload.astype(array, dtype) if array.size else array.astype(loaded[name].dtype)
        assert loaded[name].dtype == want.dtype
        assert loaded[name].shape == want.shape
        np.testing.assert_array_equal(bits(loaded[name]), bits(want))
        flags = loaded[name].flags
        assert flags.writeable
        assert flags.aligned
        assert flags.c_contiguous


REAL = [DATA / "silero_vad_16k.safetensors", DATA / "fracast-int8.safetensors"]
REAL += sorted(LARGER.rglob("*.safetensors"))


@pytest.mark.parametrize("real", REAL, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_files_likewise(real, dtype):
    plain = load_file(real)
    for name, array in load_file(real, dtype=dtype).items():
        floating = plain[name].dtype.kind not in "iub"
        want = safeload.astype(plain[name], dtype) if floating else plain[name]
        assert array.dtype == want.dtype
        np.testing.assert_array_equal(bits(array), bits(want))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_give_the_same_bytes(path, threads):
    one = load_file(path, dtype="float32", threads=1)
    many = load_file(path, dtype="float32", threads=threads)
    assert all((bits(one[name]) == bits(many[name])).all() for name in one)


def test_every_door_takes_a_dtype(path):
    want = load_file(path, dtype="F32")["bf16"]
    with safeload.safe_open(path) as file:
        np.testing.assert_array_equal(file.get_tensors(dtype="F32")["bf16"], want)
    np.testing.assert_array_equal(safeload.load(path, ["bf16"], dtype=np.float32)["bf16"], want)
    with safeload.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.load(["bf16"], dtype="float32")["bf16"], want)
        assert checkpoint.last_load.bytes == want.nbytes
        assert checkpoint["bf16"].dtype == ml_dtypes.bfloat16


def test_what_needs_no_conversion_stays_a_view(path):
    with safeload.open(path) as checkpoint:
        loaded = checkpoint.load(["f32", "bf16"], dtype="float32")
        assert checkpoint.last_load.backend == "mmap"
        again = checkpoint.load(["f32", "bf16"], dtype="float32", backend="pread")
        assert all((loaded[name] == again[name]).all() for name in again)


def test_an_empty_shape_may_be_too_large_for_the_wider_dtype(tmp_path):
    """numpy counts an axis of no elements as one of 1, also for an array without a byte."""
    path = tmp_path / "empty.safetensors"
    save_file({"t": np.empty((0, 1 << 62), ml_dtypes.float8_e4m3fn)}, path)
    with safeload.open(path) as checkpoint:
        assert checkpoint.load()["t"].shape == (0, 1 << 62)
        for load in (checkpoint.load, lambda **options: safeload.load_quantized(path)):
            with pytest.raises(UnsupportedError, match=r"numpy .* does not support shape \[0, 4611686018427387904\]"):
                load(dtype="float32")
        assert safeload.stats(checkpoint)["t"].count == 0


def packed(code, count, bits_each):
    codes = rng.integers(0, 1 << bits_each, count)
    stream = ((codes[:, None] >> np.arange(bits_each)) & 1).astype(np.uint8).ravel()
    data = np.packbits(stream, bitorder="little")
    header = f'{{"x":{{"dtype":"{code}","shape":[{count // 8},8],"data_offsets":[0,{data.size}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + data.tobytes(), codes


@pytest.mark.parametrize(
    ("code", "name", "bits_each"),
    [("F4", "float4_e2m1fn", 4), ("F6_E2M3", "float6_e2m3fn", 6), ("F6_E3M2", "float6_e3m2fn", 6)],
)
@pytest.mark.parametrize("count", [8, 800, 2_000_000])
def test_packed_tensors_are_decoded(code, name, bits_each, count, tmp_path):
    content, codes = packed(code, count, bits_each)
    path = tmp_path / "x"
    path.write_bytes(content)
    got = load_file(path, dtype="float32")["x"]
    want = codes.astype(np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32).reshape(-1, 8)
    np.testing.assert_array_equal(got, want)
    assert load_file(path)["x"].dtype == np.uint8


@pytest.mark.parametrize("dtype", ["int8", "bool", "C64", "F4", "float8_e8m0fnu", "F8_E4M3FNUZ"])
def test_a_dtype_that_nothing_is_loaded_as_is_refused(path, dtype):
    with pytest.raises(UnsupportedError, match=r"cannot load as .*; supported: float64, float32, bfloat16"):
        load_file(path, dtype=dtype)


def test_no_dtype_at_all_is_a_type_error(path):
    with pytest.raises(TypeError, match="unknown dtype 'nonsense', expected one of"):
        load_file(path, dtype="nonsense")


# ---- out= ----


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_out_is_filled(path, dtype):
    want = load_file(path, dtype=dtype)
    out = {name: np.full_like(array, 1) for name, array in want.items()}
    loaded = load_file(path, dtype=dtype, out=out)
    for name, array in loaded.items():
        assert array is out[name]
        np.testing.assert_array_equal(bits(array), bits(want[name]))


def misfits(path):
    good = load_file(path)
    bf16 = good["bf16"]
    yield {**good, "more": np.zeros(1)}, ValueError, "'more' is not a tensor"
    yield {name: array for name, array in good.items() if name != "f16"}, ValueError, "no array for tensor 'f16'"
    yield (
        {**good, "bf16": bf16.astype(np.float32)},
        ValueError,
        "float32 [17, 9], but the tensor needs bfloat16 [17, 9]",
    )
    yield {**good, "bf16": bf16.T}, ValueError, "[9, 17], but the tensor needs"
    yield {**good, "bf16": np.zeros((17, 18), bf16.dtype)[:, ::2]}, ValueError, "must be C-contiguous"
    yield {**good, "bf16": np.frombuffer(bytes(306), bf16.dtype).reshape(17, 9)}, ValueError, "writable"
    yield {**good, "bf16": bf16.tolist()}, TypeError, "is a list"


def test_out_that_does_not_fit_is_refused_before_a_byte_is_written(path):
    for out, error, message in misfits(path):
        for array in out.values():
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = 1
        with pytest.raises(error) as caught:
            load_file(path, out=out)
        assert message in str(caught.value)
        assert all((np.asarray(array) == 1).all() for name, array in out.items() if name not in ("bf16", "more"))


SHARED = {
    "one array for both": lambda memory: (memory[:8], memory[:8]),
    "an element in common": lambda memory: (memory[:8], memory[7:15]),
    "one inside the other": lambda memory: (memory[:16].reshape(2, 8)[1], memory[4:12]),
    "in reverse": lambda memory: (memory[5:13], memory[:8]),
}


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_tied_tensors_may_share_an_array_of_out(dtype, tmp_path):
    """As in the arrays of an earlier load."""
    torch = pytest.importorskip("torch")
    weight = torch.randn(30, 20)
    torch.save({"a": weight, "b": weight, "c": weight * 2, "rows": weight[:30]}, tmp_path / "x.pt")
    expected = safeload.load(tmp_path / "x.pt", dtype=dtype)
    shared = np.empty((30, 20), dtype or np.float32)
    out = {"a": shared, "b": shared, "c": np.empty_like(shared), "rows": shared}
    safeload.load(tmp_path / "x.pt", dtype=dtype, out=out)
    assert all(np.array_equal(out[name], expected[name]) for name in out)
    shared[:] = 0
    with safeload.open(tmp_path / "x.pt") as checkpoint:
        assert len(list(checkpoint.stream(dtype=dtype, out=out))) == 4
        assert np.array_equal(shared, expected["a"])
        for call in (checkpoint.load, checkpoint.stream):
            with pytest.raises(ValueError, match="share memory"):
                call(dtype=dtype, out={**out, "c": shared})


@pytest.mark.parametrize("case", SHARED)
def test_arrays_of_out_that_share_memory_are_refused(case, tmp_path):
    """Only the last one filled would hold its tensor."""
    tensors = {"a": np.arange(8, dtype=np.float32), "b": np.ones(8, np.float32), "empty": np.empty(0, np.float32)}
    safeload.numpy.save_file(tensors, tmp_path / "x.safetensors")
    memory = np.full(32, 7, np.float32)
    a, b = SHARED[case](memory)
    out = {"a": a, "b": b, "empty": memory[8:8]}
    layout = safeload.Layout("same", [safeload.StackedTensor(name, name) for name in tensors])
    with safeload.open(tmp_path / "x.safetensors") as checkpoint:
        for fill in (
            lambda: load_file(tmp_path / "x.safetensors", out=out),
            lambda: checkpoint.load(out=out),
            lambda: checkpoint.stream(out=out),
            lambda: safeload.stack(tensors, layout, out=out),
        ):
            with pytest.raises(ValueError, match=r"out: '[ab]' and '[ab]' share memory"):
                fill()
    assert (memory == 7).all()


def test_neighbours_in_one_memory_are_filled(tmp_path):
    tensors = {"a": np.arange(8, dtype=np.float32), "b": np.ones(8, np.float32), "empty": np.empty(0, np.float32)}
    safeload.numpy.save_file(tensors, tmp_path / "x.safetensors")
    memory = np.full(16, 7, np.float32)
    load_file(tmp_path / "x.safetensors", out={"a": memory[8:], "b": memory[:8], "empty": memory[4:4]})
    np.testing.assert_array_equal(memory, np.concatenate([tensors["b"], tensors["a"]]))


# ---- failures, signals, memory ----


def test_a_file_that_was_truncated_names_tensor_and_byte(path, tmp_path):
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(path.read_bytes())
    with safeload.open(copy) as checkpoint:
        info = checkpoint.tensors["large"]
        os.truncate(copy, info.offset + 1000)
        with pytest.raises(FormatError, match="tensor 'large': the file ends at byte") as caught:
            checkpoint.load(["large"], dtype="float32")
        assert caught.value.path == str(copy)
        assert caught.value.offset == info.offset + 1000


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A 3 GB bf16 file of zeros that takes no disk."""
    count, size = 48, 32 << 20
    entries = (
        f'"{i}":{{"dtype":"BF16","shape":[{size}],"data_offsets":[{2 * i * size},{2 * (i + 1) * size}]}}'
        for i in range(count)
    )
    header = ("{" + ",".join(entries) + "}").encode()
    path = tmp_path_factory.mktemp("sparse") / "sparse.safetensors"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        extend(file, 8 + len(header) + 2 * count * size)
    return path


def test_ctrl_c_stops_a_long_load_at_once_and_leaks_nothing(sparse):
    threading.Timer(0.1, press_ctrl_c).start()
    before = time.perf_counter()

    def load_for_long():
        for _ in range(100):  # a fast machine may finish one load in time
            load_file(sparse, dtype="float32", names=[str(i) for i in range(16)])

    with pytest.raises(KeyboardInterrupt):
        load_for_long()
    assert time.perf_counter() - before < 5
    if sys.platform == "linux":
        assert str(sparse) not in [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]


def test_progress_is_reported_and_may_stop_the_load(sparse):
    seen = []
    load_file(sparse, dtype="float32", names=["0"], progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (64 << 20, 64 << 20)

    def stop(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        load_file(sparse, dtype="float32", names=["0"], progress=stop)


def test_another_python_thread_keeps_running_during_a_load(sparse):
    ticks, stop = 0, False

    def tick():
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    load_file(sparse, dtype="float32", names=[str(i) for i in range(2)], threads=1)
    seconds = time.perf_counter() - started
    stop = True
    thread.join()
    assert ticks > seconds * 1000 / 20  # at least one in 20 of the ticks that fit


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
def test_a_dtype_load_needs_the_result_and_little_more(sparse):
    script = """
        import sys
        from safeload.numpy import load_file
        def peak():  # ru_maxrss begins with the memory of the process that started this one
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
        load_file(sys.argv[1], dtype="float32", names=[])
        before = peak()
        arrays = load_file(sys.argv[1], dtype="float32", names=["0", "1"])
        print(peak() - before - sum(a.nbytes for a in arrays.values()) // 2**20)
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(script), str(sparse)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 64


def test_many_python_threads_load_different_files_at_once(tmp_path):
    files = []
    for i in range(8):
        array = rng.standard_normal((300, 1000)).astype(ml_dtypes.bfloat16)
        save_file({"x": array}, tmp_path / str(i), durable=False)
        files.append((tmp_path / str(i), array.astype(np.float32)))
    failures = []

    def work(path, want):
        for _ in range(10):
            got = load_file(path, dtype="float32", threads=2)["x"]
            if not (got == want).all():
                failures.append(path)

    threads = [threading.Thread(target=work, args=file) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
