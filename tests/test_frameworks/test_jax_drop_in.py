"""safeload.jax beside safetensors.flax: signatures, dtypes, values, bytes written, what is refused."""

import inspect
import json
import os
import pickle
import subprocess
import sys
import threading
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from builders.random import rng

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import safetensors.flax as upstream  # noqa: E402

import safeload  # noqa: E402
import safeload.jax as ours  # noqa: E402
import safeload.numpy  # noqa: E402

BACKENDS = ("mmap", "pread", "direct")
DTYPES = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
WIDE = {"I64": np.dtype(np.int64), "U64": np.dtype(np.uint64), "F64": np.dtype(np.float64)}


def random_array(dtype, shape):
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def same(array, expected):
    """Same dtype, shape and bytes."""
    array = np.asarray(array)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()


@contextmanager
def x64():
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.fixture
def every_dtype(tmp_path):
    """A file with tensors of every dtype that JAX has without x64: large, small, empty, scalar."""
    shapes = {"large": (300, 700), "small": (2, 3), "empty": (0, 4), "scalar": ()}
    arrays = {
        f"{code}.{kind}": random_array(dtype, shape) for code, dtype in DTYPES.items() for kind, shape in shapes.items()
    }
    path = tmp_path / "every.safetensors"
    safeload.numpy.save_file(arrays, path)
    return path, arrays


@pytest.mark.parametrize("name", ["load_file", "load", "save_file", "save"])
def test_functions_take_what_upstreams_take(name):
    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (ours, upstream))
    for found, wanted in zip(mine.values(), theirs.values(), strict=False):
        assert (found.name, found.kind, found.default) == (wanted.name, wanted.kind, wanted.default)
    assert all(found.kind is found.KEYWORD_ONLY for found in list(mine.values())[len(theirs) :])
    assert ours.safe_open is safeload.safe_open


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_loads_with_its_bits(every_dtype, backend):
    path, arrays = every_dtype
    loaded = ours.load_file(path, backend=backend)
    assert list(loaded) == list(safeload.numpy.load_file(path))
    for name, expected in arrays.items():
        assert isinstance(loaded[name], jax.Array)
        same(loaded[name], expected)


def test_every_dtype_loads_from_bytes(every_dtype):
    path, arrays = every_dtype
    data = bytearray(path.read_bytes())
    loaded = ours.load(data)
    data[:] = bytes(len(data))  # the arrays are not over it
    for name, expected in arrays.items():
        same(loaded[name], expected)


def test_results_are_upstreams_where_upstream_loads(tmp_path):
    arrays = {code: random_array(dtype, (7, 9)) for code, dtype in DTYPES.items() if not code.startswith("F8")}
    arrays |= {"I64": np.int64([-(2**40) - 3, 5, -1]), "U64": np.uint64([2**63 + 1, 7]), "F64": np.float64([0.1, 1.0])}
    path = tmp_path / "x.safetensors"
    safeload.numpy.save_file(arrays, path)
    mine, theirs = ours.load_file(path), upstream.load_file(path)
    assert list(mine) == list(theirs)
    for name, array in theirs.items():
        same(mine[name], np.asarray(array))
        assert (mine[name].devices(), mine[name].committed) == (array.devices(), array.committed)


def test_the_bytes_written_are_upstreams(tmp_path):
    tensors = {
        "b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "a": jnp.ones((3, 1, 2)),
        "c": jnp.array(3),
        "t": jnp.arange(6.0).reshape(2, 3).T,
        "e": jnp.zeros((0, 3), jnp.float8_e4m3fn),
        "n": np.float16([1, 2]),
    }
    before = dict(tensors)
    for metadata in (None, {"k": "v"}):
        written = ours.save(tensors, metadata)
        assert written == upstream.save(dict(tensors), metadata)
        ours.save_file(tensors, tmp_path / "x.safetensors", metadata)
        assert (tmp_path / "x.safetensors").read_bytes() == written
    assert all(tensors[name] is before[name] for name in before)  # upstream replaces them


def test_the_private_helpers_convert_dicts():
    given = {"a": np.ones((2, 3), np.float32)}
    made = ours._np2jnp(given)
    assert isinstance(made["a"], jax.Array)
    given["a"][:] = 2
    same(made["a"], np.ones((2, 3), np.float32))
    same(ours._jnp2np(made)["a"], np.ones((2, 3), np.float32))


def test_tensors_of_64_bits_follow_jax_enable_x64(tmp_path):
    arrays = {code: np.array([1, 2, 3], dtype) for code, dtype in WIDE.items()}
    path = tmp_path / "wide.safetensors"
    safeload.numpy.save_file(arrays, path)
    for load in (ours.load_file, ours.load_checkpoint):
        assert {str(array.dtype) for array in load(path).values()} == {"int32", "uint32", "float32"}
        with x64():
            for name, array in load(path).items():
                same(array, arrays[name])


def test_integers_that_do_not_fit_are_wrapped_as_upstream_does_or_refused(tmp_path):
    path = tmp_path / "wide.safetensors"
    for value in (np.int64([1, 2**31]), np.int64([-(2**31) - 1]), np.uint64([2**32])):
        safeload.numpy.save_file({"w": value}, path)
        same(ours.load_file(path)["w"], np.asarray(upstream.load_file(path)["w"]))
        with pytest.raises(safeload.RangeError, match=r"tensor 'w': JAX would make it u?int32.*jax_enable_x64"):
            ours.load_checkpoint(path)
        with x64():
            same(ours.load_checkpoint(path)["w"], value)
    safeload.numpy.save_file({"w": np.int64([-(2**31), 2**31 - 1])}, path)
    same(ours.load_checkpoint(path)["w"], np.int32([-(2**31), 2**31 - 1]))


def test_float64_is_refused_as_a_dtype_that_jax_does_not_have(tmp_path):
    path = tmp_path / "x.safetensors"
    safeload.numpy.save_file({"w": np.float32([1, 2])}, path)
    for load in (ours.load_file, ours.load_checkpoint):
        with pytest.raises(safeload.UnsupportedError, match="jax_enable_x64"):
            load(path, dtype="float64")
        with x64():
            same(load(path, dtype="float64")["w"], np.float64([1, 2]))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.float16, np.float32])
def test_dtype_converts_while_loading(tmp_path, dtype):
    arrays = {"w": rng.normal(size=(100, 30)).astype(np.float32), "i": np.int32([1, 2])}
    path = tmp_path / "x.safetensors"
    safeload.numpy.save_file(arrays, path)
    expected = safeload.numpy.load_file(path, dtype=dtype)
    for name, array in ours.load_file(path, dtype=dtype).items():
        same(array, expected[name])


def test_names_choose_and_order(every_dtype):
    path, arrays = every_dtype
    names = ["U8.small", "BF16.large", "F32.scalar"]
    loaded = ours.load_file(path, names=names)
    assert list(loaded) == names
    same(loaded["BF16.large"], arrays["BF16.large"])
    assert ours.load_file(path, names=[]) == {}
    with pytest.raises(safeload.TensorNotFoundError, match=r"U8.smal"):
        ours.load_file(path, names=["U8.smal"])


def test_progress_ends_at_the_size_of_the_arrays(every_dtype):
    path, arrays = every_dtype
    seen = []
    ours.load_file(path, progress=lambda done, total: seen.append((done, total)))
    total = sum(array.nbytes for array in arrays.values())
    assert seen[-1] == (total, total)


def test_bytes_of_four_and_six_bits_are_raw_unless_decoded(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "f4.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes([0x21, 0x43, 0x65, 0x87]))
    same(ours.load_file(path)["w"], np.uint8([[0x21, 0x43], [0x65, 0x87]]))
    same(ours.load_file(path, dtype="float32")["w"], np.float32([[0.5, 1, 1.5, 2], [3, 4, 6, -0.0]]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "tensor 'w' is a list, not a JAX or NumPy array: numpy.asarray"),
        (3, "tensor 'w' is an int, not a JAX or NumPy array"),
        ({"deeper": 1}, "safeload.flatten"),
        (None, "tensor 'w' is None"),
        ("text", "tensor 'w' is a str"),
    ],
)
def test_what_is_no_array_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        ours.save({"w": value})


def test_a_torch_tensor_is_sent_to_the_module_for_torch():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"safeload.torch"):
        ours.save({"w": torch.ones(2)})


def test_keys_traced_and_donated_arrays_are_refused_by_name():
    with pytest.raises(TypeError, match="tensor 'k' holds random keys"):
        ours.save({"k": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"tensor 'w' is a jax\.ShapeDtypeStruct, which has no values"):
        ours.save({"w": jax.ShapeDtypeStruct((2,), np.float32)})
    with pytest.raises(TypeError, match="tensor 'w' is traced"):
        jax.jit(lambda x: ours.save({"w": x}))(jnp.ones(2))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ValueError, match="tensor 'w' has been deleted"):
        ours.save({"w": gone})
    with pytest.raises(safeload.SafetensorError, match="int4"):
        ours.save({"w": jnp.zeros(2, jnp.int4)})


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    ours.save_file({"w": jnp.ones(2)}, path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        ours.save_file({"a": jnp.ones(2), "w": object()}, path)
    with pytest.raises(FileExistsError):
        ours.save_file({"a": jnp.ones(2)}, path, overwrite=False)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_load_takes_content_and_names_what_takes_a_path(tmp_path):
    for path in ("x.safetensors", tmp_path):
        with pytest.raises(TypeError, match="load_checkpoint"):
            ours.load(path)
    with pytest.raises(safeload.FormatError):
        ours.load(b"short")


def test_a_broken_file_gives_the_error_of_the_format(tmp_path, every_dtype):
    path, _ = every_dtype
    data = path.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in (0, 4, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        for load in (ours.load_file, ours.load_checkpoint):
            with pytest.raises(safeload.SafetensorError):
                load(cut)
    for load in (ours.load_file, ours.load_checkpoint):
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "none.safetensors")


def test_results_go_through_jit_grad_donation_and_pickle(tmp_path):
    path = tmp_path / "x.safetensors"
    value = rng.normal(size=(512, 1024)).astype(np.float32)
    safeload.numpy.save_file({"w": value}, path)
    for backend in BACKENDS:
        weights = ours.load_file(path, backend=backend)
        np.testing.assert_array_equal(jax.jit(lambda tree: tree["w"] * 2)(weights), value * 2)
        np.testing.assert_array_equal(jax.grad(lambda tree: tree["w"].sum())(weights)["w"], np.ones_like(value))
        same(pickle.loads(pickle.dumps(weights))["w"], value)
        donated = jax.jit(lambda x: x + 1, donate_argnums=0)(weights["w"])
        np.testing.assert_array_equal(donated, value + 1)
    same(ours.load_file(path)["w"], value)


def test_loading_inside_a_traced_function_gives_values(tmp_path):
    path = tmp_path / "x.safetensors"
    arrays = {"large": rng.normal(size=(512, 1024)).astype(np.float32), "small": np.float32([1, 2])}
    safeload.numpy.save_file(arrays, path)
    loads = [ours.load_file, ours.load_checkpoint, lambda path: ours.load(path.read_bytes())]

    def traced(x):
        for load in loads:
            loaded = load(path)
            for name, expected in arrays.items():
                same(loaded[name], expected)
        return x + loaded["small"]

    np.testing.assert_array_equal(jax.jit(traced)(np.ones(2, np.float32)), [2, 3])


def test_a_guard_against_implicit_transfers_lets_loads_through(every_dtype):
    path, arrays = every_dtype
    with jax.transfer_guard("disallow"):
        for loaded in (ours.load_file(path), ours.load_checkpoint(path), ours.load(path.read_bytes())):
            assert len(loaded) == len(arrays)
            ours.save(loaded)


def test_several_threads_load_the_same_file(every_dtype):
    path, arrays = every_dtype
    results, errors = [], []

    def load():
        try:
            results.append(ours.load_file(path))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for loaded in results:
        for name, expected in arrays.items():
            same(loaded[name], expected)


def test_nested_parameters_go_by_flatten_and_nest():
    tree = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "layers": [{"w": jnp.ones(2)}]}
    with pytest.raises(TypeError, match=r"safeload.flatten"):
        ours.save(tree)
    back = safeload.nest(ours.load(ours.save(safeload.flatten(tree))))
    assert jax.tree.structure(back["dense"]) == jax.tree.structure(tree["dense"])
    np.testing.assert_array_equal(back["dense"]["kernel"], tree["dense"]["kernel"])


def test_importing_safeload_and_looking_at_it_imports_no_jax():
    code = """
import inspect, sys, safeload, safeload.jax
inspect.getmembers(safeload)
assert "jax" in dir(safeload) and safeload.jax.load_file
print("jax" in sys.modules, "jaxlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    "call", ["load_file('x')", "load(b'')", "load_checkpoint('x')", "save({})", "save_file({}, 'x')"]
)
def test_without_jax_the_error_says_what_to_install(call, tmp_path):
    code = f"""
import sys
sys.modules["jax"] = None
import safeload.jax
try:
    safeload.jax.{call}
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "pip install jax" in done.stdout


def test_a_folder_is_an_error_that_names_the_function_for_folders(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        ours.load_file(tmp_path)
    assert str(caught.value) == f"Is a directory: {tmp_path}; safeload.jax.load_checkpoint loads folders"
