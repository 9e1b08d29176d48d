"""Models of two versions in folders, what writes the new one over the old one, and programs that read what is left."""

import itertools
import json
import zlib

import numpy as np
from builders.thorough import THOROUGH
from faults.shim import CREATE, RENAME, SYNC, UNLINK

import safeload
from safeload.numpy import load_file

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
CHANGES = RENAME | UNLINK | CREATE | SYNC
SHARD = 1200


def model(version, kind=np.float32):
    return {f"w{k}": np.full(200, version, kind) for k in range(4)}


def shards(folder):
    safeload.save(model(0), folder, max_shard_size=SHARD)


def single(folder):
    safeload.save(model(0), folder)


def write_with_writer(folder, source):
    with safeload.Writer(folder, max_shard_size=SHARD, overwrite=True) as writer:
        for name, array in model(1).items():
            writer.add(name, array)


def edit(folder, source):
    with safeload.edit(folder) as file:
        for name, array in model(1).items():
            file[name] = array


def taken(folder, files):
    """The tensors that a program takes which tries these files in turn; None if it finds none."""
    for name in files:
        path = folder / name
        if not path.exists():
            continue
        if name.endswith(".safetensors"):
            return load_file(path)
        if name == "pytorch_model.bin":
            return safeload.load(path)
        places = json.loads(path.read_text())["weight_map"]
        return {tensor: load_file(folder / file)[tensor] for tensor, file in places.items()}
    return None


def versions_of(folder, readers):
    """The version that each reader finds; None for an error."""
    found = []
    for reader in readers:
        try:
            tensors = reader(folder)
        except (OSError, safeload.SafeloadError, KeyError):
            tensors = None
        values = {float(value) for array in (tensors or {}).values() for value in np.unique(array)}
        assert len(values) <= 1, f"tensors of two models: {values}"
        assert tensors is None or len(tensors) == 4
        found.append(values.pop() if values else None)
    return found


def calls(name, step):
    """The calls to try of an operation: all of them when there is time, else some, others for each operation."""
    step = 1 if THOROUGH else step
    return itertools.count(1 + zlib.crc32(name.encode()) % step, step)
