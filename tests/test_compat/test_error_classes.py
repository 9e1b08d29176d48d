"""Errors are caught by the handlers that programs have for safetensors'."""

import copy
import errno
import os
import pickle
import signal
import sys
import traceback

import numpy as np
import pytest
import safetensors
import safetensors.numpy as upstream

import safeload
import safeload.numpy as ours
from safeload.errors import RemoteError, unsaved

pytestmark = pytest.mark.no_core

TENSORS = {"a": np.ones(3, np.float32)}


def new_in_missing_folder(folder):
    return folder / "no" / "x"


def folder_itself(folder):
    return folder


def below_a_file(folder):
    (folder / "file").write_bytes(b"")
    return folder / "file" / "x"


def long_name(folder):
    return folder / ("a" * 300)


def with_a_slash(folder):
    return f"{folder}/new/"


PLACES = [new_in_missing_folder, folder_itself, below_a_file, long_name, with_a_slash]


def numpy_save(path):
    ours.save_file(TENSORS, path)


def raw_save(path):
    safeload.serialize_file(ours._flatten(TENSORS, []), path)


def torch_save(path):
    torch = pytest.importorskip("torch")
    from safeload.torch import save_file

    save_file({"a": torch.ones(3)}, path)


def torch_save_model(path):
    torch = pytest.importorskip("torch")
    from safeload.torch import save_model

    save_model(torch.nn.Linear(2, 2), path)


def jax_save(path):
    jnp = pytest.importorskip("jax.numpy")
    from safeload.jax import save_file

    save_file({"a": jnp.ones(3)}, path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("save", [numpy_save, raw_save, torch_save, torch_save_model, jax_save])
def test_saving_fails_with_the_systems_class_and_safetensors(save, place, tmp_path):
    path = place(tmp_path)
    with pytest.raises(safetensors.SafetensorError):
        upstream.save_file(TENSORS, path)
    with pytest.raises(safeload.SafetensorError) as caught:
        save(path)
    error = caught.value
    assert isinstance(error, OSError)
    assert type(OSError(error.errno, "")) in type(error).__mro__  # FileNotFoundError and its like
    assert (error.filename, error.path) == (str(path), str(path))
    assert str(error) == f"[Errno {error.errno}] {os.strerror(error.errno)}: {str(path)!r}"
    assert os.listdir(tmp_path) == (["file"] if place is below_a_file else [])


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits of file sizes")
def test_a_file_that_the_system_refuses_to_hold(tmp_path):
    """As a full disk or a quota does."""
    import resource

    ours.save_file(TENSORS, tmp_path / "x")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(safeload.SafetensorError) as caught:
            ours.save_file({"a": np.ones(5000)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.EFBIG
    assert ours.load_file(tmp_path / "x")["a"].sum() == 3


def test_a_file_that_is_not_to_be_replaced(tmp_path):
    ours.save_file(TENSORS, tmp_path / "x")
    with pytest.raises(FileExistsError) as caught:
        ours.save_file(TENSORS, tmp_path / "x", overwrite=False)
    assert isinstance(caught.value, safeload.SafetensorError)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EPIPE, errno.EAGAIN, errno.EINTR])
def test_an_error_of_saving_survives_pickle_and_copy_and_keeps_its_name(number):
    plain = OSError(number, os.strerror(number), "x")
    if sys.version_info >= (3, 11):
        plain.add_note("a note")
    error = unsaved(plain)
    assert unsaved(error) is error
    for twin in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(twin, type(plain))
        assert isinstance(twin, safeload.SafetensorError)
        assert (str(twin), twin.errno, twin.filename, twin.path) == (str(plain), number, "x", "x")
        assert traceback.format_exception_only(twin) == traceback.format_exception_only(plain)


@pytest.mark.parametrize(
    "arguments",
    [(errno.EACCES, "x", "a", None, "b"), (errno.ENOSPC, "x"), (errno.EIO, "x", b"a"), ("text",), (), (0, "x", "a")],
)
def test_an_error_of_saving_keeps_the_names_of_both_files_and_its_arguments(arguments):
    system = OSError(*arguments)
    error = unsaved(system)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert isinstance(same, safeload.SafetensorError)
        assert (str(same), same.args, same.errno) == (str(system), system.args, system.errno)
        assert (same.filename, same.filename2) == (system.filename, system.filename2)


def test_errors_of_stores_and_without_numbers_stay_what_they_are():
    remote = RemoteError("broken", "https://host/x")
    assert unsaved(remote) is remote
    assert str(unsaved(OSError("no number"))) == "no number"
    assert isinstance(unsaved(OSError("no number")), safeload.SafetensorError)


@pytest.mark.parametrize("framework", ["np", "jax", "pt", "nonsense"])
@pytest.mark.parametrize("device", ["cuda", "nonsense", 0])
def test_safe_open_with_a_device_fails_as_upstreams(framework, device, tmp_path):
    ours.save_file(TENSORS, tmp_path / "x")
    if framework in ("pt", "jax"):
        pytest.importorskip("torch" if framework == "pt" else "jax")
    try:
        with safetensors.safe_open(tmp_path / "x", framework, device=device) as file:
            file.get_tensor("a")
    except Exception as error:
        kinds = [kind for kind in (RuntimeError, ValueError, TypeError, OSError) if isinstance(error, kind)]
        with pytest.raises(safeload.SafetensorError) as caught:
            safeload.safe_open(tmp_path / "x", framework, device=device).get_tensor("a")
        assert all(isinstance(caught.value, kind) for kind in kinds)


DEVICES = ["cuda", "cuda:0", "cuda:99", 0, 1, 99, "mps", "npu", "mlu", "musa", "xla", "nonsense", "", "cpu:1", -1, 3.5,
           [], 10**30, "ipu", "cuda:-1", "cuda:x", "CUDA"]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_device_that_is_missing_or_wrong_is_caught_as_upstreams(device, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as their_load_file

    import safeload.torch

    ours.save_file(TENSORS, tmp_path / "x")
    try:
        their_load_file(tmp_path / "x", device)
    except Exception as error:
        kinds = [kind for kind in (RuntimeError, ValueError, TypeError, OSError) if isinstance(error, kind)]
    else:
        pytest.skip("this machine has it")
    doors = [
        lambda: safeload.torch.load_file(tmp_path / "x", device),
        lambda: safeload.torch.load_checkpoint(tmp_path / "x", device=device),
        lambda: safeload.torch.load_model(torch.nn.Linear(1, 1), tmp_path / "x", device=device),
        lambda: safeload.safe_open(tmp_path / "x", "pt", device).get_tensor("a"),
        lambda: safeload.safe_open(tmp_path / "x", "pt", device).get_tensors(),
        lambda: safeload.safe_open(tmp_path / "x", "pt", device).get_slice("a")[:],
    ]
    for door in doors:
        with pytest.raises(safeload.SafetensorError) as caught:
            door()
        assert all(isinstance(caught.value, kind) for kind in (RuntimeError, *kinds))
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_program_falls_back_to_the_cpu(tmp_path):
    torch = pytest.importorskip("torch")
    from safeload.torch import load_file

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ours.save_file(TENSORS, tmp_path / "x")
    try:
        weights = load_file(tmp_path / "x", device="cuda")
    except RuntimeError:
        weights = load_file(tmp_path / "x")
    assert weights["a"].sum() == 3


@pytest.mark.filterwarnings(
    "ignore:(The PyTorch API of MaskedTensors|Accessing the data pointer of FakeTensor):UserWarning"
)
@pytest.mark.parametrize("kind", ["fake", "masked"])
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(kind):
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from safeload.torch import save

    if kind == "fake":
        with FakeTensorMode():
            tensor = torch.ones(3)
    else:
        tensor = torch.masked.masked_tensor(torch.ones(3), torch.ones(3) > 0)
    with pytest.raises((RuntimeError, safeload.SafetensorError), match=r"tensor 'layer\.weight'"):
        save({"b": torch.ones(1), "layer.weight": tensor})
