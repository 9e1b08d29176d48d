"""Every way to write a file, each as an old and a new version, and what kills the process in the midst of one."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from faults import samples
from faults.shim import armed

import safeload
from safeload import gguf, moon
from safeload.numpy import save_file

OLD, NEW = 0, 1
TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.tmp")


@cache
def _tensors(version):
    return {name: array[:50] + np.float16(version) for name, array in samples.tensors().items()}


def _strided(version):
    return {name: np.asfortranarray(array)[::-1] for name, array in _tensors(version).items()}


def _quantized(version):
    return safeload.quantize(_tensors(version)["middle.weight"], "q8_0")


def _declared(path, version):
    tensors = _tensors(version)
    declared = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    with safeload.Writer(path, tensors=declared, overwrite=True) as writer:
        for name, array in tensors.items():
            writer.add(name, array)


def _patched(path, version):
    base, patch = (path.parent.parent / f"{name}-{version}.safetensors" for name in ("base", "patch"))
    if not base.exists():
        save_file(_tensors(5), base, durable=False)
        safeload.make_patch(base, _tensors(version), patch, overwrite=True, durable=False)
    safeload.apply_patch(base, patch, path, overwrite=True)


class Save(NamedTuple):
    """A file name; what writes it, given a path and a version; whether it is to survive a crash of the machine."""

    name: str
    write: Callable[[Path, int], None]
    durable: bool = True


SAVES = {
    "safetensors": Save("a.safetensors", lambda path, v: save_file(_tensors(v), path, {"version": str(v)})),
    "safetensors, strided": Save("a.safetensors", lambda path, v: save_file(_strided(v), path)),
    "safetensors, not durable": Save(
        "a.safetensors", lambda path, v: save_file(_tensors(v), path, durable=False), False
    ),
    "tensors as they come": Save(
        "a.safetensors", lambda path, v: safeload.save(iter(_tensors(v).items()), path, overwrite=True)
    ),
    "declared tensors": Save("a.safetensors", lambda path, v: _declared(path, v)),
    "in the background": Save(
        "a.safetensors",
        lambda path, v: safeload.save(_tensors(v), path, overwrite=True, background=True).result(),
    ),
    "a patch": Save("a.safetensors", lambda path, v: _patched(path, v)),
    "gguf": Save("a.gguf", lambda path, v: gguf.save_file({**_tensors(v), "q": _quantized(v)}, path)),
    "moon": Save("a.moon", lambda path, v: moon.save_file(_tensors(v), path)),
    "convert to npz": Save("a.npz", lambda path, v: safeload.convert(_tensors(v), path, overwrite=True)),
    "convert to gguf": Save(
        "a.gguf", lambda path, v: safeload.convert(_tensors(v), path, quantize="q4_0", overwrite=True)
    ),
}


def write_sources(folder):
    """What `convert_to_shards` converts: one-file checkpoints of both versions."""
    for version in (OLD, NEW):
        source = folder / f"source-{version}"
        source.mkdir()
        parts = {f"layer.{k}.weight": np.full((10, 1000 * (k + 1)), 10 * version + k, np.float32) for k in range(6)}
        save_file(parts, source / "model.safetensors", durable=False)
        (source / "config.json").write_text(f'{{"version": {version}}}')


def convert_to_shards(folder, version, size):
    """Writes a version beside its source: shards of at most so many bytes, an index, a config."""
    source = folder.parent / f"source-{version}"
    safeload.convert(source, folder, dtype="float16", max_shard_size=size, overwrite=True)


def contents(folder):
    """Name to bytes of all files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def empty(folder):
    """Makes a folder that is new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def killed(operation, folder, classes, action, nth):
    """Whether a child process dies at the nth call; otherwise it must end well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with armed(folder, classes, action, nth):
                operation()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
