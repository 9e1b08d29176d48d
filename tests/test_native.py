"""What tests/native expects the C core to find in files is what independent readers find there."""

import re

import gguf
import pytest
from builders.paths import DATA, TESTS
from safetensors import safe_open

pytestmark = pytest.mark.any_python

LINE = re.compile(r"  (\S+) (\w+) \[([\d, ]*)\] (\d+) (\d+) ([0-9a-f]{16})")


def expected():
    """File name to its tensors: name to dtype, shape, byte range and digest."""
    files = {}
    for line in (TESTS / "native" / "reader.expected").read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            tensors = files[line.rsplit(" ", 1)[0]] = {}
        elif found := LINE.fullmatch(line):
            name, dtype, dims, begin, end, digest = found.groups()
            tensors[name] = (dtype, [int(n) for n in dims.split(", ") if n], (int(begin), int(end)), int(digest, 16))
    return files


EXPECTED = expected()


def fnv1a(data):
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def test_every_file_is_listed():
    assert set(EXPECTED) == {path.name for path in DATA.glob("*.safetensors")} | {"types.gguf"}


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(".safetensors")])
def test_tensors_of_safetensors(name):
    path = DATA / name
    whole = path.read_bytes()
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(EXPECTED[name])
        for key, (dtype, shape, (begin, end), digest) in EXPECTED[name].items():
            tensor = file.get_slice(key)
            assert (tensor.get_dtype(), tensor.get_shape()) == (dtype, shape)
            assert file.get_tensor(key).tobytes() == whole[begin:end]
            assert fnv1a(whole[begin:end]) == digest


def test_tensors_of_gguf():
    path = TESTS / "native" / "types.gguf"
    whole = path.read_bytes()
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == list(EXPECTED["types.gguf"])
    for tensor in reader.tensors:
        dtype, shape, (begin, end), digest = EXPECTED["types.gguf"][tensor.name]
        assert tensor.tensor_type.name == dtype
        assert tensor.shape.tolist()[::-1] == shape
        assert (tensor.data_offset, tensor.n_bytes) == (begin, end - begin)
        assert fnv1a(whole[begin:end]) == digest
