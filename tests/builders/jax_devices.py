"""Programs for JAX with eight devices, which only a new process can have, or with two processes."""

import os
import subprocess
import sys
from pathlib import Path

from builders import inside

# What every program begins with.
_PROLOGUE = inside.program("""
import sys
import jax, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import safeload, safeload.numpy
from builders.inside import jax_arrays
from safeload.jax import load_checkpoint, load_file, save, save_file

folder = sys.argv[1]
# Bytes that the system has read for this process; pages of mapped files do not count.
def read():
    with open("/proc/self/io") as counts:
        return int(next(counts).split()[1])

# What a function returns, and the bytes that it reads beside header and config.
def bytes_read(load, *arguments, **options):
    before = read()
    result = load(*arguments, **options)
    return result, max(0, read() - before - SLACK)

# What opening a file reads, and reading the count.
SLACK = 40 << 10

def same(array, expected):
    array = np.asarray(array)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape), (array.dtype, expected.dtype)
    assert array.tobytes() == expected.tobytes()

def placed(array, place):
    assert array.sharding == place, (array.sharding, place)
""")

_MESH = """
# Once before, so that no module is imported while bytes are counted.
first = sys.argv[1] + f"/first{jax.process_index()}.safetensors"
safeload.numpy.save_file({"w": np.zeros((8, 8), np.float32), "i": np.zeros((8, 8), np.int8)}, first)
for group in (0, jax_arrays.GROUP):
    jax_arrays.GROUP = group
    for spec in (P("z"), P(None, "z")):
        place = NamedSharding(Mesh(np.array(jax.local_devices()), ("z",)), spec)
        bytes_read(load_file, first, sharding=place)
        bytes_read(load_checkpoint, first, sharding=place, dtype="float16")
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
"""


def environment(devices: int) -> dict[str, str]:
    """The environment of a process with as many devices on its CPU."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run(program: str, folder: Path) -> str:
    """What a program prints that has eight devices; its argument is a folder."""
    command = [sys.executable, "-I", "-W", "error", "-c", _PROLOGUE + _MESH + program, str(folder)]
    done = subprocess.run(command, env=environment(8), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_together(program: str, folder: Path, port: int, processes: int = 2) -> list[str]:
    """What each of several processes prints that are one program with four devices each."""
    start = f"""
rank = int(sys.argv[2])
jax.distributed.initialize("localhost:{port}", {processes}, rank)
"""
    command = [sys.executable, "-I", "-c", _PROLOGUE + start + _MESH + program, str(folder)]
    running = [
        subprocess.Popen(
            [*command, str(rank)], env=environment(4), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(processes)
    ]
    try:
        results = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, errors) in zip(running, results, strict=True):
        assert process.returncode == 0, out + errors
    return [out for out, _ in results]
