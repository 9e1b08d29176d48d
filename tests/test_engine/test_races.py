"""Threads that open, load, slice, stream, quantize, convert and close the same checkpoints, each in its own order.

test_concurrency.py says what must hold in each situation; this looks for situations that nobody has thought of, above
all where threads run at the same moment: on free-threaded Python. tests/long.sh hunts for a minute.
"""

import contextlib
import os
import pickle
import random
import subprocess
import sys
import sysconfig
import threading
import time

import numpy as np
import pytest
from builders.quantized import FIXTURES
from builders.random import rng
from builders.thorough import THOROUGH

import safeload
from safeload.numpy import load_file, save_file

SECONDS = 60 if THOROUGH else 0  # but everything once
THREADS = 8
# Packed tensors of three kinds: their tables, and what their configs say, are worked out when they are first needed.
PACKED = ("gptq4_g32_asym", "bnb_nf4_nested", "gguf_nvfp4")

STORED = {f"layer.{k}.weight": rng.standard_normal((32 + k, 256), np.float32).astype(np.float16) for k in range(8)}
AS_F32 = {name: array.astype(np.float32) for name, array in STORED.items()}
AS_INT8 = {name: safeload.quantize(array, "int8") for name, array in STORED.items()}
STATS = {name: float(array.max()) for name, array in AS_F32.items()}


def same(loaded, expected):
    return loaded.keys() == expected.keys() and all(np.array_equal(loaded[name], expected[name]) for name in expected)


class Shared:
    """A checkpoint for all threads, which any of them may close and replace by another one of the same content."""

    def __init__(self, path):
        self.path = path
        self.checkpoint = safeload.open(path)

    def replace(self):
        old, self.checkpoint = self.checkpoint, safeload.open(self.path)
        old.close()


def view(shared, one, scratch):
    name = one.choice(list(STORED))
    checkpoint = shared.checkpoint
    array = checkpoint[name]
    assert np.array_equal(array, STORED[name])
    assert checkpoint[name] is array


def load(shared, one, scratch):
    backend = one.choice(["mmap", "pread"])
    assert same(shared.checkpoint.load(backend=backend, threads=one.choice([1, 2])), STORED)


def load_converted(shared, one, scratch):
    assert same(shared.checkpoint.load(dtype="float32", threads=one.choice([1, 2])), AS_F32)


def open_and_load(shared, one, scratch):
    with safeload.open(shared.path) as checkpoint:
        assert same(checkpoint.load(), STORED)


def slice_rows(shared, one, scratch):
    name, row = one.choice(list(STORED)), one.randrange(32)
    assert np.array_equal(shared.checkpoint.get_slice(name)[row:, ::3], STORED[name][row:, ::3])


def describe(shared, one, scratch):
    checkpoint = shared.checkpoint
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        name: array.shape for name, array in STORED.items()
    }
    assert all(name in checkpoint for name in one.sample(list(STORED), 4))
    assert "layer.8.weight" not in checkpoint


def stream(shared, one, scratch):
    assert same(dict(shared.checkpoint.stream(ahead="64KiB", order=one.choice(["file", "given", "ready"]))), STORED)


def quantize(shared, one, scratch):
    name = one.choice(list(STORED))
    assert np.array_equal(safeload.quantize(shared.checkpoint[name], "int8").data, AS_INT8[name].data)


def convert(shared, one, scratch):
    safeload.convert(shared.path, scratch, dtype="float32", overwrite=True)
    assert same(load_file(scratch, backend="pread"), AS_F32)


def count(shared, one, scratch):
    assert {name: found.max for name, found in safeload.stats(shared.checkpoint).items()} == STATS


def pickled(shared, one, scratch):
    with pickle.loads(pickle.dumps(shared.checkpoint)) as checkpoint:
        assert same(checkpoint.load(dtype="float32"), AS_F32)


def restore(shared, one, scratch):
    fixture = FIXTURES[one.choice(PACKED)]
    with safeload.open(fixture.path) as checkpoint:
        assert same(checkpoint.load(dtype="float32"), fixture.expected())


def restore_shared(shared, one, scratch):
    kind = one.choice(PACKED)
    expected = FIXTURES[kind].expected()
    name = one.choice(list(expected))
    assert np.array_equal(shared.packed[kind].load([name], dtype="float32")[name], expected[name])


def close(shared, one, scratch):
    shared.replace()


WORKS = [view, load, load_converted, open_and_load, slice_rows, describe, stream, quantize, convert, count, pickled]
WORKS += [restore, restore_shared, close]


def unless_closed(work, *arguments):
    """Runs it, although another thread may close the checkpoint meanwhile."""
    try:
        work(*arguments)
    except ValueError as error:
        if "closed" not in str(error):
            raise


def hunt(number, shared, scratch, failed, end):
    """Runs everything in random order until the time is over or something has failed."""
    one = random.Random(number)
    try:
        while not failed:
            for work in one.sample(WORKS, len(WORKS)):
                unless_closed(work, shared, one, scratch)
            if time.monotonic() >= end:
                break
    except BaseException as error:
        failed.append(error)


def test_threads_in_any_order(tmp_path):
    save_file(STORED, tmp_path / "model.safetensors", durable=False)
    shared, failed = Shared(tmp_path / "model.safetensors"), []
    for kind in PACKED:
        FIXTURES[kind].expected()  # kept by the builder, for which threads should not race
    end = time.monotonic() + SECONDS
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    try:
        with contextlib.ExitStack() as stack:
            shared.packed = {kind: stack.enter_context(safeload.open(FIXTURES[kind].path)) for kind in PACKED}
            threads = [
                threading.Thread(target=hunt, args=(k, shared, tmp_path / f"{k}.safetensors", failed, end))
                for k in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failed:
                raise failed[0]
            for work in WORKS:  # and what they have left behind still works
                work(shared, random.Random(0), tmp_path / "alone.safetensors")
    finally:
        sys.setswitchinterval(interval)
        shared.checkpoint.close()


# Finds every module but those of frameworks, which need other packages, and imports them in 8 threads.
_IMPORT_ALL = """
import importlib, importlib.util, ml_dtypes, pathlib, random, sys, threading

root = pathlib.Path(importlib.util.find_spec("safeload").submodule_search_locations[0])
paths = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
names = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]
names = [name for name in names if "frameworks" not in name]
failed, together = [], threading.Barrier(8)

def load(seed):
    together.wait()
    for name in random.Random(seed).sample(names, len(names)):
        try:
            importlib.import_module(name)
        except ImportError as error:
            if " needs " not in str(error):  # of an optional package
                failed.append((name, repr(error)))
        except BaseException as error:
            failed.append((name, repr(error)))

threads = [threading.Thread(target=load, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = {"_cffi_backend", "numpy"} <= sys.modules.keys()
found = found and any(name.endswith("._core") for name in sys.modules if name.startswith(root.name))
print(len(names) > 100, found, sys._is_gil_enabled(), failed)
"""


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs free-threaded Python")
def test_threads_import_every_module_and_leave_the_gil_off():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-P", "-W", "error", "-c", _IMPORT_ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout == "True True False []\n"
