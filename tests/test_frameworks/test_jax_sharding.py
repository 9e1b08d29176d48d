"""Arrays divided among eight devices, and among two processes: each slice is read once, and nothing else."""

import os
import socket

import pytest
from builders.jax_devices import run, run_together
from builders.quantized import FIXTURES

pytest.importorskip("jax")

SMALL_GROUPS = "jax_arrays.GROUP = 1000\n"


needs_counts = pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs /proc")


@needs_counts
@pytest.mark.parametrize("groups", ["", SMALL_GROUPS], ids=["together", "by slices"])
def test_each_byte_is_read_once_for_every_sharding(tmp_path, groups):
    """Along one axis, two, none; also where several devices hold the same slice."""
    program = """
rng = np.random.default_rng(0)
path = folder + "/x.safetensors"
for spec in (P("x"), P(None, "y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("x", "y")), P(), P("x", None)):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn):
        for shape in ((64, 8192), (8192, 64), (8, 8)):
            w = rng.integers(-4, 5, shape).astype(dtype)
            safeload.numpy.save_file({"w": w}, path)
            place = NamedSharding(mesh, spec)
            for load, target in ((load_file, None), (load_checkpoint, None), (load_checkpoint, "float16")):
                expected = w.astype(target) if target and dtype is not np.int8 else w
                loaded, found = bytes_read(load, path, sharding=place, dtype=target)
                assert w.nbytes - SLACK <= found <= w.nbytes, (spec, w.dtype, w.shape, found, w.nbytes)
                same(loaded["w"], expected)
                placed(loaded["w"], place)
                for shard in loaded["w"].addressable_shards:
                    same(shard.data, expected[shard.index])
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


@pytest.mark.parametrize("groups", ["", SMALL_GROUPS], ids=["together", "by slices"])
def test_shardings_by_name_and_by_function(tmp_path, groups):
    program = """
path = folder + "/x.safetensors"
arrays = {"w": np.arange(32.0, dtype=np.float32).reshape(8, 4), "b": np.float32([1, 2, 3]), "s": np.float32(7),
          "e": np.zeros((0, 4), np.float16), "wide": np.arange(640.0).reshape(8, 80)}
safeload.numpy.save_file(arrays, path)
rows, everywhere, one = NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), jax.devices()[3]

seen = {}
def choose(name, array):
    seen[name] = (array.shape, str(array.dtype))
    return rows if len(array.shape) > 1 and array.shape[0] else one if name == "b" else everywhere

by_name = {"w": rows, "b": one, "s": everywhere, "e": everywhere, "wide": rows, "unused": one}
for sharding in (choose, by_name):
    loaded = load_checkpoint(path, sharding=sharding)
    assert list(loaded) == list(safeload.numpy.load_file(path))
    placed(loaded["w"], rows)
    placed(loaded["s"], everywhere)
    assert loaded["b"].devices() == {one} and loaded["b"].committed
    for name, array in arrays.items():
        same(loaded[name], array.astype(np.float32) if name == "wide" else array)
assert seen["wide"] == ((8, 80), "float32") and seen["s"] == ((), "float32") and seen["e"][1] == "float16"

some = load_checkpoint(path, sharding={**by_name, "b": None})
assert not some["b"].committed
for sharding, error, message in (
    ({"w": rows}, ValueError, "sharding has no entry for tensor"),
    (P("x"), TypeError, "NamedSharding(mesh, spec)"),
    (mesh, TypeError, "NamedSharding(mesh, spec)"),
    (NamedSharding, TypeError, "NamedSharding(mesh, spec)"),
    ("cpu", TypeError, "must be a jax.sharding.Sharding"),
    (lambda name, array: "x", TypeError, "must be a jax.sharding.Sharding"),
    ({**by_name, "b": rows}, ValueError, "tensor 'b' [3]: "),
    ({**by_name, "s": rows}, ValueError, "tensor 's' []: "),
    (NamedSharding(mesh, P(None, None, "x")), ValueError, "tensor '"),
):
    try:
        load_checkpoint(path, sharding=sharding)
    except error as found:
        assert message in str(found), found
    else:
        raise AssertionError(sharding)
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


@pytest.mark.parametrize("groups", ["", SMALL_GROUPS, "jax_arrays.GROUP = 0\n"], ids=["together", "some", "by slices"])
def test_a_sharding_that_does_not_fit_names_tensor_shape_and_spec_before_anything_is_read(tmp_path, groups):
    program = """
from safeload.jax import load_file
path = f"{sys.argv[1]}/norm.safetensors"
safeload.numpy.save_file(
    {"scale": np.ones((), np.float32), "model.norm.weight": np.ones(6, np.float32), "w": np.ones((8, 6), np.float32)},
    path,
)
single = Mesh(jax.devices()[:1], ("x",))
whole, halves = Mesh(jax.devices(), ("x",)), Mesh(np.array(jax.devices()[:2]), ("x",))
cases = [
    *((m, P("x", None), "'scale' []", "2 axes, the tensor has 0 axes") for m in (single, halves, whole)),
    *((m, P(None, None), "'model.norm.weight' [6]", "2 axes, the tensor has 1 axis") for m in (single, halves, whole)),
    *((m, P(None, "x"), "'model.norm.weight' [6]", "2 axes") for m in (single, halves, whole)),
    *((m, P(None, None, "x"), "'w' [8, 6]", "3 axes, the tensor has 2 axes") for m in (single, halves, whole)),
    (whole, P("x"), "'model.norm.weight' [6]", "evenly divide"),
    (whole, P(None, "x"), "'w' [8, 6]", "evenly divide"),
]
for mesh, spec, tensor, reason in cases:
    name = tensor.split("'")[1]
    sharding, reads = NamedSharding(mesh, spec), []
    for place in (sharding, lambda key, array: sharding if key == name else None, {"scale": None, "w": None,
                  "model.norm.weight": None, name: sharding}):
        for load in (load_checkpoint, load_file):
            for names in (None, [name]):
                if place is sharding and names is None:
                    continue  # an earlier tensor may be refused
                try:
                    load(path, sharding=place, names=names, progress=lambda done, total: reads.append(done))
                except ValueError as error:
                    text = str(error)
                    assert text.startswith(f"tensor {tensor}: "), text
                    assert str(spec) in text or f"spec={spec!r}" in text, text
                    assert reason in text, text
                    assert not any(reads), reads
                else:
                    raise AssertionError((spec, tensor))
for mesh in (single, halves, whole):  # what fits still loads
    for spec in (P(), P(None)):
        load_checkpoint(path, sharding=NamedSharding(mesh, spec), names=["model.norm.weight", "w"])
    load_checkpoint(path, sharding=NamedSharding(mesh, P()))
    load_checkpoint(path, sharding=NamedSharding(mesh, P("x", None)), names=["w"])
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


@pytest.mark.parametrize("groups", ["", SMALL_GROUPS, "jax_arrays.GROUP = 0\n"], ids=["together", "some", "by slices"])
def test_packed_tensors_have_their_true_weights_on_every_device(tmp_path, groups):
    folders = [str(fixture.path) for fixture in FIXTURES.values()]
    program = f"""
for path in {folders!r}:
    expected = safeload.load(path, dtype="float32")
    def choose(name, array):
        rows = "x" if array.shape and array.shape[0] % 4 == 0 else None
        columns = "y" if len(array.shape) > 1 and array.shape[-1] % 2 == 0 else None
        middle = [None] * (len(array.shape) - 2)
        spec = P(rows, *middle, columns) if len(array.shape) > 1 else P(rows) if array.shape else P()
        return NamedSharding(mesh, spec)
    for name, array in load_checkpoint(path, dtype="float32", sharding=choose).items():
        if array.dtype.itemsize == expected[name].dtype.itemsize:
            same(array, expected[name])
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


def test_blocks_of_gguf_and_tensors_of_torch_are_sliced(tmp_path):
    program = """
jax_arrays.GROUP = 1000
rng = np.random.default_rng(0)
path = folder + "/model.gguf"
weights = {"a": rng.normal(size=(64, 64)).astype(np.float32), "b": rng.normal(size=(4, 8, 32)).astype(np.float32)}
safeload.convert(weights, path, quantize={"a": "q4_0", "b": "q8_0"})
expected = safeload.load(path, dtype="bfloat16")
for spec in (P("x"), P("x", "y"), P(None, "y")):
    for name, array in load_checkpoint(path, dtype="bfloat16", sharding=NamedSharding(mesh, spec)).items():
        same(array, expected[name])
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    base = torch.arange(64 * 128, dtype=torch.float32).reshape(64, 128)
    torch.save({"t": base.T, "part": base[::2]}, folder + "/model.pt")
    for spec in (P("x"), P("x", "y"), P(None, "y")):
        loaded = load_checkpoint(folder + "/model.pt", sharding=NamedSharding(mesh, spec))
        same(loaded["t"], base.T.contiguous().numpy())
        same(loaded["part"], base[::2].contiguous().numpy())
print("done")
"""
    assert run(program, tmp_path) == "done\n"


@pytest.mark.parametrize("groups", ["", "jax_arrays.GROUP = 0\n"], ids=["together", "by slices"])
def test_elements_that_share_bytes_are_divided_raw_or_decoded(tmp_path, groups):
    program = """
import json
entries = {"w": {"dtype": "F4", "shape": [16, 8], "data_offsets": [0, 64]},
           "v": {"dtype": "F6_E2M3", "shape": [16, 8], "data_offsets": [64, 160]}}
header = json.dumps(entries).encode()
path = folder + "/x.safetensors"
with open(path, "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header + bytes(range(160)))
for options in ({}, {"dtype": "float32"}):
    expected = safeload.load(path, **options)
    for spec in (P("x"), P("x", "y"), P()):
        for name, array in load_checkpoint(path, sharding=NamedSharding(mesh, spec), **options).items():
            same(array, expected[name])
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


def test_default_devices_and_kinds_of_memory_are_respected(tmp_path):
    program = """
path = folder + "/x.safetensors"
w = np.ones((512, 1024), np.float32)
safeload.numpy.save_file({"w": w, "s": w[0, :8]}, path)
third = jax.devices()[3]
with jax.default_device(third):
    for load in (load_file, load_checkpoint):
        for array in load(path).values():
            assert array.devices() == {third} and not array.committed
    with safeload.safe_open(path, "flax") as file:
        assert file.get_tensor("w").devices() == {third}
for kind in {memory.kind for memory in third.addressable_memories()}:
    for place in (NamedSharding(mesh, P("x"), memory_kind=kind), SingleDeviceSharding(third, memory_kind=kind)):
        loaded = load_checkpoint(path, names=["w"], sharding=place)["w"]
        placed(loaded, place)
        same(loaded, w)
print("done")
"""
    assert run(program, tmp_path) == "done\n"


@pytest.mark.parametrize("groups", ["", SMALL_GROUPS], ids=["together", "by slices"])
def test_no_shard_is_over_the_file_or_bytes_of_the_caller(tmp_path, groups):
    program = """
path = folder + "/x.safetensors"
w = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
for pad in range(0, 64, 8):
    safeload.numpy.save_file({"w": w, "v": w[:8]}, path, {"pad": "x" * pad})
    loaded = [load_checkpoint(path, sharding=NamedSharding(mesh, spec)) for spec in (P("x"), P("x", "y"), P())]
    loaded.append(load_checkpoint(path, sharding=jax.devices()[5]))
    loaded.append(load_checkpoint(path, sharding=SingleDeviceSharding(jax.devices()[6])))
    with open(path, "r+b") as file:
        file.seek(-w.nbytes, 2)
        file.write(bytes(w.nbytes))
    for weights in loaded:
        same(weights["w"], w)
        same(weights["v"], w[:8])
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("groups", ["", "jax_arrays.GROUP = 1 << 20\n"], ids=["together", "by slices"])
def test_a_slice_keeps_no_others_alive(tmp_path, groups):
    """Rows that do not begin at multiples of 64: XLA uses the memory of the first slice and copies the others."""
    program = """
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

path = folder + "/x.safetensors"
safeload.numpy.save_file({str(k): np.ones((8, (1 << 16) + 3), np.float16) for k in range(64)}, path)
for spec in (P(("x", "y")), P("x"), P("y")):
    before = anonymous()
    weights = load_checkpoint(path, sharding=NamedSharding(mesh, spec), dtype="float32")
    grown = anonymous() - before
    size = sum(array.nbytes for array in weights.values())  # of one copy; XLA may make one for each replica
    copies = 8 // len(jax_arrays.slices(NamedSharding(mesh, spec), weights["0"].shape))
    assert grown < size * copies + (48 << 20), (spec, grown, size, copies)
    del weights
print("done")
"""
    assert run(groups + program, tmp_path) == "done\n"


def test_divided_and_copied_arrays_are_saved_whole(tmp_path):
    program = """
path = folder + "/x.safetensors"
w = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
specs = (P("x"), P(None, "y"), P("x", "y"), P(), P(("x", "y")))
tensors = {str(spec): jax.device_put(w.astype(kind), NamedSharding(mesh, spec))
           for spec in specs for kind in (np.float32, ml_dtypes.bfloat16)}
tensors["scalar"] = jax.device_put(np.float32(3), NamedSharding(mesh, P()))
tensors["empty"] = jax.device_put(w[:0], NamedSharding(mesh, P("x")))
expected = safeload.numpy.save({name: np.asarray(array) for name, array in tensors.items()})
assert save(tensors) == expected
save_file(tensors, path)
assert open(path, "rb").read() == expected
for name, array in load_file(path).items():
    same(array, np.asarray(tensors[name]))
print("done")
"""
    assert run(program, tmp_path) == "done\n"


@needs_counts
def test_two_processes_read_only_their_own_slices(tmp_path):
    """As on a cluster: a process has half of the devices, and opens the same file."""
    program = """
rng = np.random.default_rng(0)
path = f"{folder}/{rank}.safetensors"
w = rng.normal(size=(64, 4096)).astype(np.float32)
safeload.numpy.save_file({"w": w, "s": w[0, 0].reshape(())}, path)
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
assert jax.process_count() == 2 and len(jax.local_devices()) == 4
# Devices of a process are two of the four rows of the mesh: half of the rows, or all columns.
turned = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("x", "y"))
for on, spec, share in ((mesh, P("x"), 2), (mesh, P("x", "y"), 2), (mesh, P(("x", "y")), 2), (mesh, P(None, "y"), 1),
                        (mesh, P(), 1), (turned, P(None, "y"), 2), (turned, P("x", "y"), 2)):
    place = NamedSharding(on, spec)
    for dtype in (None, "bfloat16"):
        kind = np.float32 if dtype is None else ml_dtypes.bfloat16
        loaded, found = bytes_read(load_checkpoint, path, names=["w"], sharding=place, dtype=dtype)
        # Slices of columns are not read but copied from the mapped file.
        wanted = 0 if on is turned else w.nbytes // share
        assert max(0, wanted - SLACK) <= found <= wanted, (spec, found, wanted)
        placed(loaded["w"], place)
        for shard in loaded["w"].addressable_shards:
            same(shard.data, w[shard.index].astype(kind))
everywhere = NamedSharding(mesh, P())
scalar = load_checkpoint(path, names=["s"], sharding=everywhere)["s"]
same(scalar.addressable_data(0), w[0, 0].reshape(()))
there = NamedSharding(Mesh(np.array(jax.devices())[:4], ("x",)), P("x"))
try:
    loaded, found = bytes_read(load_checkpoint, path, names=["w"], sharding=there)
except ValueError as error:
    assert rank == 1 and "enable_empty_arrays" in str(error)  # of older JAX
else:
    assert len(loaded["w"].addressable_shards) == (4 if rank == 0 else 0)
    assert found > w.nbytes - SLACK if rank == 0 else found == 0, found
try:
    save(load_checkpoint(path, names=["w"], sharding=NamedSharding(mesh, P("x"))))
except ValueError as error:
    assert "process_allgather" in str(error)
else:
    raise AssertionError
assert save({"s": scalar}) == safeload.numpy.save({"s": w[0, 0].reshape(())})
print("done")
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert run_together(program, tmp_path, port) == ["done\n", "done\n"]
