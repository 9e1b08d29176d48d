"""torch's tensors and JAX's arrays from every public function: no write reaches a file or another load."""

import numpy as np
import pytest

import safeload
from safeload.numpy import save_file

VALUES = {f"t{k}": np.arange(5000, dtype=np.float32) + k for k in range(4)}


@pytest.fixture
def path(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def handled(path, framework):
    with safeload.safe_open(path, framework) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


TORCH = {
    "load_file": lambda torch, path: safeload.torch.load_file(path),
    "load_checkpoint": lambda torch, path: safeload.torch.load_checkpoint(path),
    "load": lambda torch, path: safeload.torch.load(path.read_bytes()),
    "safe_open": lambda torch, path: handled(path, "pt"),
}


@pytest.mark.parametrize("door", TORCH)
def test_torch_tensors_are_the_callers_own(path, door):
    torch = pytest.importorskip("torch")
    before = path.read_bytes()
    first, second = TORCH[door](torch, path), TORCH[door](torch, path)
    for name, tensor in first.items():
        tensor.fill_(-1)
        assert (tensor == -1).all()
        assert np.array_equal(second[name].numpy(), VALUES[name])
    assert path.read_bytes() == before


@pytest.mark.parametrize("door", ["load_file", "load_checkpoint"])
def test_jax_arrays_keep_their_values_when_the_file_changes(path, door):
    pytest.importorskip("jax")
    loaded = getattr(safeload.jax, door)(path)
    with path.open("r+b") as file:
        file.seek(-4 * sum(array.size for array in VALUES.values()), 2)
        file.write(bytes(4 * sum(array.size for array in VALUES.values())))
    for name, array in loaded.items():
        assert np.array_equal(np.asarray(array), VALUES[name])
        with pytest.raises((TypeError, ValueError, AttributeError)):
            array[0] = -1
