"""Fixtures of Orbax checkpoints, written by Orbax."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Fixtures of each number of processes; the test suite holds those of COMMITTED, tests/long.sh makes all.
KINDS = ("ocdbt2", "ocdbt3", "zarr2", "zarr3", "raw2", "raw3", "small", "manager")
COMMITTED = {1: KINDS, 2: ("ocdbt2", "zarr3"), 4: ("ocdbt2", "ocdbt3", "zarr2", "raw3", "small")}
OPTIONS = {
    "ocdbt2": {},
    "ocdbt3": {"use_zarr3": True},
    "zarr2": {"use_ocdbt": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "raw2": {"use_compression": False},
    "raw3": {"use_compression": False, "use_zarr3": True},
    "small": {"use_zarr3": True},  # with chunks of 64 bytes
    "manager": {},
}
DEVICES = 2  # of a process


def counted(jnp, shape, dtype):
    """Elements in order, all exact in the dtype."""
    import numpy as np

    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 97
    if dtype == "bool":
        numbers = numbers % 2 == 0
    elif "4" in dtype and dtype.startswith("int"):
        numbers = numbers % 16 - 8
    elif dtype.startswith("float8"):
        numbers = numbers % 16
    return numbers.astype(jnp.dtype(dtype))


def tree(jax, mesh):
    """Return a tree with every kind of leaf."""
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def shared(shape, dtype="float32", *axes):
        array, sharding = counted(jnp, shape, dtype), NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(shape, sharding, lambda index: array[index])

    params = {
        "rows": shared((16, 5), "bfloat16", "x"),
        "columns": shared((3, 16), "float32", None, "x"),
        "square": shared((16, 24, 2), "float16", "x", "y"),
        "both": shared((32, 3), "int32", ("x", "y")),
        "replicated": shared((3, 4), "uint8"),
        "scalar": shared((), "float32"),
        "mask": shared((5,), "bool"),
        "fp8": shared((4, 4), "float8_e4m3fn"),
        "fp8_e5": shared((4, 4), "float8_e5m2"),
        "int4": shared((3, 7), "int4"),
        "a.b/ü": shared((2, 2), "int8"),
        "mlp/~/linear": {"w": shared((8, 3), "float32", "x")},
        "zeros": shared((16, 4), "float32", "x"),
    }
    params["zeros"] = jax.tree.map(lambda array: array * 0, params["zeros"])
    state = [{"mu": shared((16, 5), "float32", "x"), "count": shared((), "int32")}, {}, None, (), []]
    alone = {"key": jax.random.key(3)} if jax.process_count() == 1 else {}
    return {
        **alone,
        "params": params,
        "opt_state": state,
        "host": np.arange(12, dtype=np.int64).reshape(3, 4),
        "step": 7,
        "rate": 0.5,
        "numpy_scalar": np.float32(2.5),
        "name": "text",
    }


def restored(value):
    """Return a leaf as a NumPy array, and the suffix of its key in the file of expected values."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype.isbuiltin == 1:
        return array, ""
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize), f"|{array.dtype.name}"


def whole(value):
    """Return all elements of an array of several processes; of a random key its numbers."""
    import jax
    from jax.experimental import multihost_utils

    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return multihost_utils.process_allgather(value, tiled=True) if hasattr(value, "addressable_shards") else value


def process(number, count, port, folder, kinds):
    """Run a process of the job."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    devices = DEVICES * count
    mesh = Mesh(np.array(jax.devices()).reshape(devices // 2, 2), ("x", "y"))
    for kind in kinds:
        state = tree(jax, mesh)
        path = Path(folder).resolve() / f"{kind}_{count}"
        save_args = None
        if kind == "small":
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=64), state)
        if kind == "manager":
            options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
            with ocp.CheckpointManager(path, options=options, item_names=("state", "extra")) as manager:
                items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), extra=ocp.args.JsonSave({"a": 1}))
                manager.save(3, args=items)
                back = manager.restore(3, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))["state"]
        else:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**OPTIONS[kind])) as checkpointer:
                checkpointer.save(path, args=ocp.args.PyTreeSave(state, save_args=save_args))
                back = checkpointer.restore(path, args=ocp.args.PyTreeRestore())
        arrays = {}
        for steps, value in jax.tree_util.tree_leaves_with_path(back):
            name = ".".join(str(getattr(step, "key", getattr(step, "idx", None))) for step in steps)
            if isinstance(value, (int, float)):  # Orbax restores scalars as those of Python, without their dtype
                value = np.asarray(value, np.asarray(state[name]).dtype)
            if not isinstance(value, str):
                array, suffix = restored(whole(value))
                arrays[name + suffix] = array
        if number == 0:
            np.savez_compressed(path.parent / f"restored_{kind}_{count}.npz", **arrays)


def finish(folder, count, kinds):
    """Keep a single file of restored values, which must be those of every kind of checkpoint."""
    import numpy as np

    first = None
    for kind in kinds:
        path = folder / f"restored_{kind}_{count}.npz"
        content = {name: (array.dtype, array.shape, array.tobytes()) for name, array in np.load(path).items()}
        first = first or content
        assert content == first, kind
        path.replace(folder / f"expected_{count}.npz")
        checkpoint = folder / f"{kind}_{count}"
        for name in checkpoint.rglob("_sharding"):
            name.unlink()  # large, and not read
        assert json.loads(next(checkpoint.rglob("_METADATA")).read_bytes())["tree_metadata"]
        shutil.make_archive(str(checkpoint), "zip", checkpoint)
        shutil.rmtree(checkpoint)


def make(folder, kinds_of):
    """Make the fixtures of each number of processes."""
    folder = Path(folder)
    for count, kinds in kinds_of.items():
        for kind in kinds:
            shutil.rmtree(folder / f"{kind}_{count}", ignore_errors=True)
        call = "import sys; from make.folders import process; n, c, p, f, *k = sys.argv[1:]; "
        call += "process(int(n), int(c), int(p), f, k)"
        command = [sys.executable, "-W", "ignore", "-c", call]
        jobs = [subprocess.Popen([*command, str(n), str(count), "29612", str(folder), *kinds]) for n in range(count)]
        codes = [job.wait() for job in jobs]
        assert codes == [0] * count, codes
        finish(folder, count, kinds)
