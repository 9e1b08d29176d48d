"""Every name that other libraries import from safetensors' modules, beside upstream's."""

import importlib
import inspect
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as upstream

import safeload
import safeload.numpy as ours

pytestmark = pytest.mark.no_core

MODULES = {"safetensors": "safeload", **{f"safetensors.{name}": f"safeload.{name}" for name in ("numpy", "torch")}}
MODULES["safetensors.flax"] = "safeload.jax"
RAW = ["TensorSpec", "deserialize", "safe_open", "serialize", "serialize_file"]


@pytest.fixture(params=MODULES)
def pair(request):
    if request.param.endswith(("torch", "flax")):
        pytest.importorskip("torch" if request.param.endswith("torch") else "jax")
    return importlib.import_module(request.param), importlib.import_module(MODULES[request.param])


@pytest.fixture(autouse=True, scope="module")
def _untouched_afterwards():
    yield
    vars(ours).pop("_TYPES", None)


def is_incidental(value):
    """A module, or a name of typing and collections: upstream imports it for itself."""
    return inspect.ismodule(value) or getattr(value, "__module__", "") in ("typing", "collections")


def test_every_name_of_upstream_is_here(pair):
    theirs, mine = pair
    names = [name for name in dir(theirs) if not is_incidental(getattr(theirs, name))]
    assert len(names) > 8
    assert [name for name in names if not hasattr(mine, name)] == []
    assert [name for name in names if callable(getattr(theirs, name)) != callable(getattr(mine, name))] == []


def test_raw_names_are_one_object_in_every_module(pair):
    for name in RAW:
        if hasattr(pair[0], name):
            assert getattr(pair[1], name) is getattr(safeload, name)
            assert getattr(pair[1], name) is getattr(pair[1], name)


def test_an_unknown_name_is_an_attribute_error(pair):
    with pytest.raises(AttributeError, match=f"module '{pair[1].__name__}' has no attribute '_nothing'"):
        pair[1]._nothing  # noqa: B018


# ---- safeload.numpy ----

ARRAYS = {
    "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    "foreign": np.arange(6, dtype=">i4"),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "foreign and strided": np.arange(12, dtype=">f8")[::2],
    "scalar": np.array(1.5),
    "empty": np.zeros((0, 3), np.uint8),
    "bool": np.array([True, False]),
    "complex": np.array([1j], np.complex64),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
}


def test_safe_open_of_the_numpy_module_reads(tmp_path):
    ours.save_file(ARRAYS, tmp_path / "x")
    with ours.safe_open(tmp_path / "x", framework="np") as file:
        assert file.get_tensor("plain").sum() == 15


def test_types_are_upstreams_and_more():
    assert upstream._TYPES.items() <= ours._TYPES.items()
    assert ours._getdtype("F16") is np.float16
    assert ours._getdtype("BF16") is ml_dtypes.bfloat16
    with pytest.raises(KeyError):
        ours._getdtype("F4")


@pytest.fixture
def types():
    before = dict(ours._TYPES)
    yield ours._TYPES
    ours._TYPES.clear()
    ours._TYPES.update(before)


def test_load_follows_a_type_that_a_program_has_replaced(types):
    """As PaddlePaddle's libraries do, whose bfloat16 is uint16 in NumPy."""
    data = ours.save(ARRAYS)
    assert ours.load(data)["bfloat16"].dtype == ml_dtypes.bfloat16
    types.update({"BF16": np.uint16})
    assert ours.load(data)["bfloat16"].tolist() == ARRAYS["bfloat16"].view(np.uint16).tolist()
    assert ours.load(data, copy=False)["bfloat16"].dtype == np.uint16
    assert ours._view2np(safeload.deserialize(data))["bfloat16"].dtype == np.uint16
    assert ours._getdtype("BF16") is np.uint16
    assert ours.load(data)["plain"].dtype == np.float32


def test_a_type_of_another_size_is_refused_by_the_tensors_name(types):
    types["BF16"] = np.float32
    with pytest.raises(ValueError, match=r"tensor 'bfloat16' is BF16, 2 bytes per element: _TYPES\['BF16'\] has 4"):
        ours.load(ours.save(ARRAYS))


def test_flatten_describes_the_values_that_arrays_show():
    keep = []
    specs = ours._flatten(ARRAYS, keep)
    assert len(keep) == 2 + (sys.byteorder == "little")
    assert safeload.serialize(specs) == ours.save(ARRAYS)
    plain = {name: ARRAYS[name] for name in ("plain", "foreign", "scalar", "bool", "complex")}
    alive = []
    assert safetensors.serialize(upstream._flatten(plain, alive)) == safeload.serialize(ours._flatten(plain, keep))


def test_flatten_refuses_what_cannot_be_saved():
    with pytest.raises(safeload.SafetensorError, match="tensor 'x': dtype 'object'"):
        ours._flatten({"x": np.array([None])}, [])


def test_view2np_gives_what_load_gives():
    data = ours.save(ARRAYS)
    found = ours._view2np(safeload.deserialize(data))
    assert found.keys() == ARRAYS.keys()
    for name, array in ours.load(data).items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)


@pytest.mark.parametrize("code", ["=f4", "<f4", ">f4", "u1", "?", "<c8", ">i8"])
def test_is_little_endian_says_what_upstreams_says(code):
    array = np.zeros(1, code)
    assert ours._is_little_endian(array) == upstream._is_little_endian(array)


# ---- safeload.torch ----


def tensors(torch):
    whole = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    kinds = [torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
    return {
        "whole": whole,
        "scalar": torch.tensor(2.5),
        "a parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.zeros(0, 2),
        **{str(kind): torch.arange(4).to(kind) for kind in kinds},
        "transposed": whole.mT,
        "every second": whole[..., ::2],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }


def test_to_ndarray_has_the_bytes_of_the_values():
    torch = pytest.importorskip("torch")
    from safetensors.torch import _to_ndarray

    import safeload.torch

    for name, tensor in tensors(torch).items():
        array, owner = safeload.torch._to_ndarray(tensor)
        resolved = tensor.detach().resolve_conj().contiguous()
        assert (array.dtype, array.ndim) == (np.uint8, 1), name
        assert array.tobytes() == safeload.torch.save({"x": resolved})[-array.nbytes :][: array.nbytes], name
        assert owner.nbytes == array.nbytes, name
        if tensor.is_contiguous() and tensor.numel() and not tensor.is_conj():
            assert array.tobytes() == _to_ndarray(tensor)[0].tobytes(), name
            assert array.ctypes.data == tensor.data_ptr(), name  # no copy


def test_to_ndarray_refuses_what_has_no_bytes_of_the_format():
    torch = pytest.importorskip("torch")
    import safeload.torch

    with pytest.raises(KeyError, match="dtype 'complex128'"):
        safeload.torch._to_ndarray(torch.ones(1, dtype=torch.complex128))
    with pytest.raises(NotImplementedError, match="meta"):
        safeload.torch._to_ndarray(torch.ones(1, device="meta"))


def test_evaluate_tensors_for_save_refuses_what_upstream_refuses():
    torch = pytest.importorskip("torch")
    from safetensors.torch import _evaluate_tensors_for_save

    import safeload.torch

    x = torch.ones(4)
    for value in ([], {"a": 1}, {"a": x.to_sparse()}, {"a": x, "b": x}):
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            _evaluate_tensors_for_save(value)
        with pytest.raises(theirs.type):
            safeload.torch._evaluate_tensors_for_save(value)
    assert safeload.torch._evaluate_tensors_for_save({"a": x}) is None


def test_small_floats_of_torch_are_upstreams():
    pytest.importorskip("torch")
    theirs, mine = importlib.import_module("safetensors.torch"), importlib.import_module("safeload.torch")
    names = [name for name in dir(theirs) if name.startswith("_float")]
    assert len(names) == 6
    assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
