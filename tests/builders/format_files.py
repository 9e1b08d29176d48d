"""A file of each format of core/registry.py."""

import pickle

import pytest

from builders import dcp_build, flax_build, onnx_build, orbax_build, torch_build
from builders.torch_build import Storage, tensor


def torch_file(make):
    """One of torch_build's makers as a writer."""

    def write(weights, path):
        path.write_bytes(make({name: tensor(Storage(name, a.ravel()), a.shape) for name, a in weights.items()}))

    return write


def keras_file(weights, path):
    """A file of HDF5 whose names have no groups."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in weights.items():
            file[name] = array


# Formats that are read and not written.
MAKERS = {
    "torch zip": torch_file(torch_build.zip_file),
    "torch legacy": torch_file(torch_build.legacy_file),
    "dcp": dcp_build.single,
    "orbax": orbax_build.single,
    "keras": keras_file,
    "flax": flax_build.single,
    "onnx": onnx_build.single,
    "pickle": lambda weights, path: path.write_bytes(pickle.dumps(weights)),
}


def make(row, weights, path):
    """Write a file of the format, and return its path."""
    if row.writes:
        getattr(row.load(), row.writer)(weights, {}, path)
    else:
        MAKERS[row.name](weights, path)
    return path
