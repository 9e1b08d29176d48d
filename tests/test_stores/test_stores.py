"""Byte stores: what the package asks of one, and what it does where a store is not a local file."""

import numpy as np
import pytest
from builders.inside import local, open_without_table

import safeload
from safeload.errors import FormatError
from safeload.numpy import save_file

WEIGHTS = {"a": np.arange(6, dtype=np.float16), "b": np.ones((2, 3), np.float16)}


class Plain:
    """The four members, and nothing else."""

    def __init__(self, data):
        self.data, self.closed = data, False
        self.size, self.version = len(data), (len(data), "v1")

    def read_into(self, offset, memory):
        view = memoryview(memory).cast("B")
        if offset + len(view) > self.size:
            raise FormatError("the store ends too early", offset=self.size)
        view[:] = self.data[offset : offset + len(view)]

    def close(self):
        self.closed = True


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(WEIGHTS, path, durable=False)
    return path


def of_both_kinds(path):
    yield local.open_local(path)
    yield Plain(path.read_bytes())


def test_a_store_fills_memory_of_every_kind(path):
    data = path.read_bytes()
    for store in of_both_kinds(path):
        assert store.size == store.version[0] == len(data)
        for memory in (bytearray(5), memoryview(bytearray(5)), np.empty(5, np.uint8)):
            store.read_into(3, memory)
            assert bytes(memory) == data[3:8]
        assert local.read_at(store, store.size - 2, 10) == data[-2:]
        assert local.read_at(store, store.size + 2, 10) == local.read_at(store, 0, 0) == b""
        with pytest.raises(FormatError):
            store.read_into(store.size - 1, bytearray(2))
        store.close()


def test_a_closed_local_file_is_not_read(path):
    store = local.open_local(path)
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.read_into(0, bytearray(1))


def test_messages_name_the_path_that_is_shown(path):
    file = open_without_table(path, shown="model.npz")
    assert (file.path, file.place) == ("model.npz", str(path))
    file.close()
    with pytest.raises(ValueError, match=r"^model\.npz is closed"):
        file.read_at(0, 1)


def test_only_a_local_file_has_a_mapping(path):
    for given, backend in ((path, "mmap"), (Plain(path.read_bytes()), "remote")):
        with safeload.open(given) as opened:
            loaded = opened.load(backend="mmap")
            assert opened.last_load.backend == backend
        for name, array in WEIGHTS.items():
            np.testing.assert_array_equal(loaded[name], array)


def test_a_table_is_read_from_a_store_without_a_descriptor(tmp_path):
    np.savez(tmp_path / "a.npz", **WEIGHTS)
    store = Plain((tmp_path / "a.npz").read_bytes())
    with safeload.open(store) as opened:
        assert (opened.format, list(opened)) == ("npz", list(WEIGHTS))
        assert str(opened.path) == "store://Plain"
        np.testing.assert_array_equal(opened.load(["a"])["a"], WEIGHTS["a"])
        assert safeload.check(opened).errors == []  # it has no holes that the file system could name
    assert store.closed
