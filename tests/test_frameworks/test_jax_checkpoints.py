"""safeload.jax.load_checkpoint: every format with true weights, arrays of their own, bounded memory."""

import os
import subprocess
import sys

import numpy as np
import pytest
from builders import inside
from builders.http_server import Server
from builders.inside import tensors_of
from builders.paths import DATA
from builders.quantized import FIXTURES
from builders.random import rng

import safeload
import safeload.numpy

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")

from builders.inside import jax_arrays  # noqa: E402

from safeload.jax import load, load_checkpoint, load_file, save  # noqa: E402

MIB = 1 << 20


def same(array, expected):
    array, expected = np.asarray(array), np.asarray(expected)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=lambda fixture: fixture.name)
def test_packed_checkpoints_have_the_weights_that_numpy_has(fixture):
    expected = safeload.load(fixture.path, dtype="float32")
    loaded = load_checkpoint(fixture.path, dtype="float32")
    assert list(loaded) == list(expected)
    for name, array in expected.items():
        if array.dtype.itemsize < 8:
            same(loaded[name], array)


def test_without_a_dtype_packed_tensors_get_that_of_the_config():
    fixture = FIXTURES["fp8_block"]
    with safeload.open(fixture.path) as checkpoint:
        named = checkpoint.config["torch_dtype"]
        packed = [name for name, info in checkpoint.tensors.items() if len(info.parts) > 1]
    loaded = load_checkpoint(fixture.path)
    assert packed
    assert {str(loaded[name].dtype) for name in packed} == {named}
    expected = safeload.load(fixture.path, dtype=named)
    for name in packed:
        same(loaded[name], expected[name])
    stored = load_checkpoint(fixture.path, stored=True)
    assert set(stored) > set(loaded)
    with pytest.raises(safeload.UnsupportedError, match="scale"):
        load_checkpoint(fixture.path, stored=True, dtype="float32")


@pytest.mark.parametrize("group", [1, 3000, jax_arrays.GROUP])
def test_blocks_of_gguf_are_dequantized(tmp_path, monkeypatch, group):
    monkeypatch.setattr(jax_arrays, "GROUP", group)
    path = tmp_path / "model.gguf"
    weights = {"a": rng.normal(size=(8, 64)).astype(np.float32), "b": rng.normal(size=(4, 4, 32)).astype(np.float32)}
    safeload.convert({**weights, "c": np.float32([1, 2])}, path, quantize={"a": "q4_0", "b": "q8_0"})
    for dtype in ("float32", "bfloat16"):
        expected = safeload.load(path, dtype=dtype)
        loaded = load_checkpoint(path, dtype=dtype)
        assert list(loaded) == list(expected)
        for name, array in expected.items():
            same(loaded[name], array)
    with pytest.raises(safeload.UnsupportedError, match="pass dtype="):
        load_checkpoint(path)


def test_torch_checkpoints_with_strides_and_shared_storages_load(tmp_path):
    torch = pytest.importorskip("torch")
    base = torch.arange(3 * 512 * 1024, dtype=torch.float32).reshape(3, 512, 1024)
    tensors = {"t": base[0].T, "part": base[1, ::2], "same": base[1, ::2], "b": base[2].to(torch.bfloat16)}
    path = tmp_path / "model.pt"
    torch.save(tensors, path)
    loaded = load_checkpoint(path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(np.asarray(loaded[name].astype("float32")), tensor.float().numpy())


def test_patterns_names_and_shards(tmp_path):
    weights = {f"layers.{k}.{kind}": rng.normal(size=(4, 8)).astype(np.float32) for k in range(4) for kind in "wb"}
    safeload.convert(weights, tmp_path / "model", max_shard_size=300)
    loaded = load_checkpoint(tmp_path / "model", only="layers.*.w", drop="layers.0.*")
    assert sorted(loaded) == ["layers.1.w", "layers.2.w", "layers.3.w"]
    for name, array in loaded.items():
        same(array, weights[name])
    assert list(load_checkpoint(tmp_path / "model", names=["layers.3.b", "layers.0.w"])) == ["layers.3.b", "layers.0.w"]
    with pytest.raises(ValueError, match="pass only one of them"):
        load_checkpoint(tmp_path / "model", names=["layers.3.b"], only="*")
    with pytest.raises(safeload.TensorNotFoundError):
        load_checkpoint(tmp_path / "model", only="nothing*")
    with pytest.raises(FileNotFoundError, match="lora"):
        load_checkpoint(tmp_path / "model", adapters="lora")


@pytest.mark.parametrize("group", [1, 100_000, jax_arrays.GROUP])
@pytest.mark.parametrize("pad", range(0, 64, 8))
def test_no_array_is_over_the_file(tmp_path, monkeypatch, pad, group):
    """Wherever the bytes begin: XLA takes memory at multiples of 64, whatever it is told."""
    monkeypatch.setattr(jax_arrays, "GROUP", group)
    path = tmp_path / "x.safetensors"
    arrays = {
        "large": rng.normal(size=(1024, 512)).astype(np.float32),
        "middle": rng.normal(size=(128, 512)).astype(np.float32),
        "small": rng.normal(size=(16, 4)).astype(np.float32),
    }
    safeload.numpy.save_file(arrays, path, {"pad": "x" * pad})
    results = [load_file(path), load_file(path, backend="pread"), load_checkpoint(path)]
    results.append(load_checkpoint(path, sharding=jax.devices()[0]))
    data = bytearray(path.read_bytes())
    results.append(load(data))
    data[-sum(a.nbytes for a in arrays.values()) :] = bytes(sum(a.nbytes for a in arrays.values()))
    path.write_bytes(data)
    for loaded in results:
        for name, expected in arrays.items():
            same(loaded[name], expected)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only XLA's CPU device uses the host's memory as it is")
def test_every_place_in_the_file_was_a_multiple_of_64_once(tmp_path):
    """The test above meets the case that it is for."""
    found = set()
    for pad in range(0, 64, 8):
        path = tmp_path / f"{pad}.safetensors"
        safeload.numpy.save_file({"large": np.zeros((1024, 512), np.float32)}, path, {"pad": "x" * pad})
        with safeload.open(path) as checkpoint:
            place = checkpoint.tensors["large"].offset % 64
            array = checkpoint["large"]
            over = jax.device_put(array).unsafe_buffer_pointer() == array.__array_interface__["data"][0]
            assert over == (place == 0)
            safe = jax_arrays.put([array], None, borrowed=True)[0]
            assert safe.unsafe_buffer_pointer() != array.__array_interface__["data"][0]
            found.add(place)
    assert 0 in found
    assert len(found) > 2


def test_a_single_array_keeps_no_pool_alive(tmp_path):
    """Small tensors are read into pools: an array of JAX over a pool would keep all of it."""
    path = tmp_path / "x.safetensors"
    arrays = {str(k): np.full((300, 256), k, np.float16) for k in range(50)}
    safeload.numpy.save_file(arrays, path)
    seen = {}
    original = jax_arrays.put

    def put(given, place, *, borrowed):
        made = original(given, place, borrowed=borrowed)
        for array, one in zip(made, given, strict=True):
            seen[one.nbytes] = seen.get(one.nbytes, False) or (
                array.unsafe_buffer_pointer() == one.__array_interface__["data"][0]
            )
        return made

    jax_arrays.put, kept = put, jax_arrays.put
    try:
        loaded = load_checkpoint(path, dtype="float32")
    finally:
        jax_arrays.put = kept
    assert seen == {300 * 256 * 4: False}
    for name, array in arrays.items():
        same(loaded[name], array.astype(np.float32))


MEMORY = inside.program("""
import sys, threading, time
import jax, numpy as np
import safeload.jax
from builders.inside import jax_arrays

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

jax.block_until_ready(jax.device_put(np.zeros(10)))
safeload.jax.load_checkpoint(sys.argv[1], names=["0"], dtype=sys.argv[2] or None)
before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
weights = safeload.jax.load_checkpoint(sys.argv[1], dtype=sys.argv[2] or None)
done = True
watcher.join()
print(peak - before - sum(array.nbytes for array in weights.values()))
""")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["", "float32", "bfloat16"])
def test_memory_is_the_result_and_a_bounded_amount(tmp_path, dtype):
    """Anonymous memory, of which the pages of the mapped file are no part."""
    path = tmp_path / "x.safetensors"
    safeload.numpy.save_file({str(k): np.ones((2 << 20) + k, np.float16) for k in range(128)}, path)  # 512 MiB
    done = subprocess.run([sys.executable, "-I", "-c", MEMORY, path, dtype], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * jax_arrays.GROUP + 64 * MIB


def test_files_without_tensors_and_names_given_twice(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({}, {"a": "b"}))
    assert load(path.read_bytes()) == load_file(path) == load_checkpoint(path) == {}
    assert load_checkpoint(path, sharding=jax.devices()[0], progress=lambda done, total: None) == {}
    path.write_bytes(save({"w": np.ones((1,) * 33, np.float32)}))
    assert load_checkpoint([path], names=(name for name in ["w", "w"]))["w"].ndim == 33
    with pytest.raises(TypeError, match="got a single str"):
        load_checkpoint(path, names="w")
    with pytest.raises(ZeroDivisionError):
        load_checkpoint(path, sharding=lambda name, array: 1 / 0)


def test_changes_of_the_loaded_numpy_arrays_do_not_reach_jax(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"w": np.ones((1024, 1024), np.float32)}))
    with safeload.open(path) as checkpoint:
        view = checkpoint["w"]
        loaded = load_checkpoint(path)["w"]
        view[:] = 5
        same(loaded, np.ones((1024, 1024), np.float32))


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    """Reading, not mapping: pages that are lost would kill the process."""
    path = tmp_path / "x.safetensors"
    safeload.numpy.save_file({"a": np.ones(1 << 20, np.float16), "b": np.ones(1 << 20, np.float16)}, path)
    with safeload.open(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(safeload.FormatError, match=r"x.safetensors"):
            jax_arrays.load([(tensors_of(checkpoint), None)], backend="pread")


def test_a_checkpoint_opens_as_safeload_opens_it():
    path = DATA / "torch" / "checkpoint.pt"
    want = safeload.load(path, root="model_state_dict")
    got = load_checkpoint(path, root="model_state_dict", format="torch")
    assert got.keys() == want.keys()
    module = DATA / "torch" / "package-module.pt"
    with pytest.raises(safeload.ForbiddenError):
        load_checkpoint(module)
    assert (
        load_checkpoint(module, unknown_globals="inert").keys() == safeload.load(module, unknown_globals="inert").keys()
    )


@pytest.mark.parametrize("options", [{}, {"only": "*norm*"}, {"sharding": jax.devices()[0]}])
def test_a_url_of_a_quantized_checkpoint(options):
    """The arrays of the local copy; each file is asked for with the options of the store."""
    pytest.importorskip("urllib3")
    folder = DATA / "quantized" / "fp8_block"
    options = {"dtype": "bfloat16", **options}
    with Server(folder) as server:
        url = server.url("/model.safetensors.index.json")
        there = load_checkpoint(url, storage_options={"headers": {"X-Key": "k"}}, **options)
        assert {request.headers.get("x-key") for request in server.requests} == {"k"}
    here = load_checkpoint(folder, **options)
    assert list(there) == list(here)
    for name, array in there.items():
        same(array, here[name])


@pytest.mark.parametrize("function", ["load_file", "safe_open"])
def test_drop_ins_take_no_urls(function):
    call = {"load_file": load_file, "safe_open": lambda url: safeload.safe_open(url, "flax")}[function]
    with pytest.raises(FileNotFoundError, match=r'this function reads local files: safeload\.load\("hf://a/b"\)'):
        call("hf://a/b")
