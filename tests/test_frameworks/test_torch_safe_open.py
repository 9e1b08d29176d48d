"""safe_open(framework="pt"): what it gives is what safetensors gives, by upstream's rules for each backend."""

import pytest
from builders import inside
from builders.torch_tensors import bits, every_dtype

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import safetensors  # noqa: E402

import safeload  # noqa: E402
import safeload.torch as ours  # noqa: E402
from safeload import SafetensorError, TensorNotFoundError  # noqa: E402

BACKENDS = ["mmap", "pread", "direct"]
TENSORS = {
    **every_dtype(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "cube": torch.arange(2 * 3 * 4, dtype=torch.bfloat16).reshape(2, 3, 4),
    "large": torch.arange(300 * 200.0).reshape(300, 200),
    "vector": torch.arange(40_000.0),
}

KEYS = [
    slice(None), slice(0, 99), slice(1, 2), slice(3, 1), slice(-2, None), slice(None, -1), slice(None, None, 2),
    slice(1, None, 3), 0, 1, -1, 9, -9, ..., (..., 0), (0, ...), (slice(None), 1), (slice(None), slice(1, 3)),
    (0, 1), (0, 0, 0, 0), (), None, (None, 0), (0, None), (slice(None), None), [], [0, 1], [-1], (slice(None), [0, 1]),
    True, False, torch.tensor([1, 0]), torch.tensor(1), np.array([0, 1]), np.int64(1), slice(None, None, -1), "x", 1.5,
    slice(np.int64(1), None), slice("a", None), slice(1.5, None), slice(None, None, 0), (..., ...), (slice(None), -1),
    (0, slice(None), slice(1, 3)), torch.tensor([True, False]), [True, False], (slice(1, 250), slice(3, 150, 2)),
    slice(10, 39_000), 10**30, slice(0, 10**18),
]  # fmt: skip


def outcome(call):
    try:
        return bits(call())[:2] + bits(call())[3:]
    except Exception as error:
        return error


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("open") / "x"
    ours.save_file(TENSORS, path, {"format": "pt"})
    return path


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_says_and_gives_what_upstream_says_and_gives(framework, backend, path):
    with safeload.safe_open(path, framework, "cpu", backend=backend) as mine:
        theirs = safetensors.safe_open(path, framework, backend="pread" if backend == "direct" else backend)
        assert mine.keys() == theirs.keys()
        assert mine.offset_keys()[-5:] == theirs.offset_keys()[-5:]
        assert mine.metadata() == theirs.metadata() == {"format": "pt"}
        for name in mine.keys():  # noqa: SIM118 - upstream's interface
            assert mine.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert mine.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            if name != "F4" or backend == "mmap":  # upstream fails
                assert bits(mine.get_tensor(name)) == bits(theirs.get_tensor(name)), name
        all_of_it = mine.get_tensors()
        assert {name: bits(tensor) for name, tensor in all_of_it.items()} == {
            name: bits(tensor) for name, tensor in TENSORS.items()
        }


@pytest.mark.parametrize("key", KEYS, ids=lambda key: str(key)[:60])
def test_slices_of_a_mapped_file_follow_torchs_indexing(key, path):
    with safeload.safe_open(path, "pt") as mine, safetensors.safe_open(path, "pt") as theirs:
        for name, tensor in TENSORS.items():
            got = outcome(lambda name=name: mine.get_slice(name)[key])
            want = outcome(lambda tensor=tensor: tensor[key])
            if isinstance(want, Exception):
                assert (type(got), str(got)) == (type(want), str(want)), name
                continue
            assert got == want, name
            if name != "F4":  # upstream fails
                assert want == outcome(lambda name=name: theirs.get_slice(name)[key]), name
            part = mine.get_slice(name)[key]
            assert part.storage_offset() == 0


@pytest.mark.parametrize("key", KEYS, ids=lambda key: str(key)[:60])
def test_slices_by_pread_follow_upstreams_rules_where_these_are_right(key, path):
    with (
        safeload.safe_open(path, "pt", backend="pread") as mine,
        safetensors.safe_open(path, "pt", backend="pread") as theirs,
        safeload.safe_open(path, "np") as arrays,
    ):
        for name in ("F32", "BF16", "scalar", "cube", "large", "vector"):
            got = outcome(lambda name=name: mine.get_slice(name)[key])
            want = outcome(lambda name=name: theirs.get_slice(name)[key])
            if not isinstance(want, Exception) and not isinstance(key, bool):
                assert got == want, name
            elif isinstance(got, Exception):
                with pytest.raises(type(got)):
                    arrays.get_slice(name)[key]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_is_not_there(backend, path):
    with safeload.safe_open(path, "pt", backend=backend) as file:
        for call in (file.get_tensor, file.get_slice):
            with pytest.raises(TensorNotFoundError, match="does not contain tensor f32"):
                call("f32")
    with pytest.raises(SafetensorError, match="closed"):
        file.get_tensor("F32")


def test_tensors_are_converted_on_request(path):
    with safeload.safe_open(path, "pt") as file, pytest.raises(safeload.UnsupportedError):
        file.get_tensors(dtype="int8")
    ours.save_file({"x": TENSORS["BF16"]}, path.parent / "bf16")
    with safeload.safe_open(path.parent / "bf16", "pt") as file:
        assert torch.equal(
            file.get_tensors(dtype=torch.float32)["x"].nan_to_num(), TENSORS["BF16"].float().nan_to_num()
        )
        out = {"x": np.empty((5, 6), np.float32)}
        tensor = file.get_tensors(dtype="f32", out=out)["x"]
        assert tensor.data_ptr() == out["x"].ctypes.data


def test_the_handle_of_an_open_file_object(path):
    with open(path, "rb") as f:
        file = safeload._safe_open_handle(f, framework="pt")
    assert bits(file.get_tensor("BF16")) == bits(TENSORS["BF16"])


def test_many_slices_of_one_tensor_need_few_mappings(path):
    with safeload.safe_open(path, "pt") as file:
        rows = [file.get_slice("large")[k] for k in range(300)]
        assert torch.equal(torch.stack(rows), TENSORS["large"])
        halves = [file.get_slice("large")[k : k + 150] for k in (0, 150)]
        halves[0].fill_(7)
        assert torch.equal(halves[1], TENSORS["large"][150:])
        assert torch.equal(torch.stack(rows), TENSORS["large"])


def test_where_the_system_refuses_a_mapping_everything_is_read(path, monkeypatch):
    def refuse(store):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(inside.local.LocalStore, "map", refuse)
    with safeload.safe_open(path, "pt") as file:
        for name, tensor in TENSORS.items():
            assert bits(file.get_tensor(name)) == bits(tensor)
            assert bits(file.get_slice(name)[...]) == bits(tensor)
        assert torch.equal(file.get_slice("large")[50:, 3:], TENSORS["large"][50:, 3:])
    assert bits(ours.load_file(path)["BF16"]) == bits(TENSORS["BF16"])
