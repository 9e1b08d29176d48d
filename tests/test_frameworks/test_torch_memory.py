"""The memory of tensors: views of the file, storages of their own, and nothing that outlives them."""

import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from builders.torch_tensors import bits, every_dtype

torch = pytest.importorskip("torch")

import safeload  # noqa: E402
import safeload.torch as ours  # noqa: E402

BACKENDS = ["mmap", "pread", "direct"]
TENSORS = every_dtype()
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def path(tmp_path):
    ours.save_file({**TENSORS, "empty": torch.zeros(0, 3), "large": torch.ones(1 << 18)}, tmp_path / "weights")
    return tmp_path / "weights"


def loads_of(path):
    """The tensors of a file by every way of loading it onto the CPU."""
    yield ours.load(path.read_bytes())
    yield ours.load_checkpoint(path)
    plain = [name for name in TENSORS if name not in ("F8_E8M0", "F4")]
    yield ours.load_file(path, dtype="float16", names=plain)
    for backend in BACKENDS:
        yield ours.load_file(path, backend=backend)
        with ours.safe_open(path, "pt", backend=backend) as file:
            yield file.get_tensors()
            yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - upstream's interface
            yield {name: file.get_slice(name)[...] for name in file.keys()}  # noqa: SIM118


def test_every_tensor_has_a_storage_of_its_own_at_offset_0(path):
    for tensors in loads_of(path):
        assert len(ours._find_shared_tensors(tensors)) == sum(1 for x in tensors.values() if x.numel())
        for name, tensor in tensors.items():
            assert tensor.storage_offset() == 0, name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
            assert ours._is_complete(tensor), name
            assert tensor.is_contiguous(), name
            assert tensor.is_leaf, name
            assert not tensor._is_view(), name
            assert tensor.stride() == torch.empty(tensor.shape).stride(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_changes_no_file_and_no_other_tensor(backend, path):
    before = path.read_bytes()
    with ours.safe_open(path, "pt", backend=backend) as file:
        first = [
            ours.load_file(path, backend=backend)["large"],
            file.get_tensor("large"), file.get_tensor("large"), file.get_tensors()["large"],
            file.get_slice("large")[:], file.get_slice("large")[:], file.get_slice("large")[1000:],
            file.get_slice("large")[:10], file.get_slice("large")[5:15],
        ]  # fmt: skip
        for number, tensor in enumerate(first):
            tensor.fill_(number + 2)
        for number, tensor in enumerate(first):
            assert (tensor == number + 2).all()
        assert (file.get_tensor("large") == 1).all()
        assert (file.get_slice("large")[:20] == 1).all()
    assert path.read_bytes() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_default_device_or_dtype_changes_nothing(backend, path):
    want = {name: bits(tensor) for name, tensor in ours.load_file(path).items()}
    data = path.read_bytes()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            loads = [*loads_of(path), ours.load(data)]
        torch.set_default_device("meta")
        loads += [*loads_of(path), ours.load_file(path, backend=backend)]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for tensors in loads:
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
    for tensors in (loads[0], loads[-1]):
        assert {name: bits(tensor) for name, tensor in tensors.items()} == want


def test_gradients_and_inference_mode(path):
    tensors = ours.load_file(path)
    for name in ("F32", "BF16"):
        weight = tensors[name].requires_grad_()
        (weight.float() * 2).sum().backward()
        assert (weight.grad == 2).all()
        with torch.no_grad():
            weight.add_(1)
    with torch.inference_mode():
        inside = ours.load_file(path)
    assert bits(inside["BF16"]) == bits(ours.load_file(path)["BF16"])


def maps(path):
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(path))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@linux
@pytest.mark.parametrize("name", ["BF16", "F32", "F4", "large"])
def test_a_mapping_lives_as_long_as_its_last_tensor_and_no_descriptor_longer_than_the_call(name, path):
    before = descriptors()
    tensors = ours.load_file(path)
    assert descriptors() == before
    tensor = tensors.pop(name)
    del tensors
    gc.collect()
    assert maps(path)
    rows = tensor[:2].clone(), tensor.untyped_storage()
    del tensor
    gc.collect()
    assert maps(path)  # a storage keeps it too
    del rows
    gc.collect()
    assert not maps(path)


@linux
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_open_file_leaves_neither_mapping_nor_descriptor(backend, path):
    before = descriptors()
    with ours.safe_open(path, "pt", backend=backend) as file:
        large, part, rest = file.get_tensor("large"), file.get_slice("large"), file.get_slice("large")[10:]
        small = file.get_slice("BF16")[1:, :2]
    assert (part[5:9] == 1).all()
    assert large.sum() == rest.sum() + 10
    del large, rest, part, file
    gc.collect()
    assert descriptors() == before
    assert not maps(path)
    assert small.shape == (4, 2)


@linux
def test_memory_stays_flat_until_a_tensor_is_touched(tmp_path):
    """1.5 GB in a sparse file: 24 tensors."""
    header = ",".join(
        f'"w{k}":{{"dtype":"BF16","shape":[4096,8192],"data_offsets":[{k << 26},{(k + 1) << 26}]}}' for k in range(24)
    )
    text = f"{{{header}}}".encode().ljust(4088)
    with open(tmp_path / "x", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(4096 + (24 << 26))
    code = """
import resource, sys, torch, safeload, safeload.torch as ours
path = sys.argv[1]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
ours.load_file(path)["w0"][:1].float().sum()
with safeload.safe_open(path, "pt") as file: file.get_slice("w0")[:9].sum()
before = resident()
tensors = ours.load_file(path)
other = ours.load_checkpoint(path)
with safeload.safe_open(path, "pt") as file:
    slices = [file.get_slice(name)[: 2048] for name in file.keys()]
    got = [file.get_tensor(name) for name in file.keys()]
flat = resident() - before
tensors["w3"].sum()
print(flat, resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, tmp_path / "x"], capture_output=True, text=True, check=True
    )
    flat, touched = map(int, done.stdout.split())
    assert flat < 20
    assert touched >= 60


def test_threads_load_at_once(path):
    want = {name: bits(tensor) for name, tensor in ours.load_file(path).items()}
    problems = []
    with ours.safe_open(path, "pt") as file:

        def work():
            try:
                for _ in range(5):
                    assert {name: bits(tensor) for name, tensor in ours.load_file(path).items()} == want
                    assert bits(file.get_tensor("BF16")) == want["BF16"]
                    mine = file.get_slice("large")[:]
                    mine.add_(1)
                    assert (mine == 2).all()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_slices_and_tensors_are_pickled(backend, path):
    with ours.safe_open(path, "pt", torch.device("cpu"), backend=backend) as file:
        again = pickle.loads(pickle.dumps(file))
        assert bits(again.get_tensor("BF16")) == bits(file.get_tensor("BF16"))
        part = pickle.loads(pickle.dumps(file.get_slice("BF16")))
        assert bits(part[2:4]) == bits(file.get_slice("BF16")[2:4])
        if backend == "mmap":
            assert part[[0, 2]].shape == (2, 6)  # torch's rules, as before
    tensors = ours.load_file(path, backend=backend)
    # Torch itself pickles no tensor of its newer dtypes except by torch.save.
    for name, tensor in pickle.loads(pickle.dumps({n: tensors[n] for n in ("F32", "BF16", "I8", "large")})).items():
        assert bits(tensor) == bits(tensors[name])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_tensors_and_open_files_work_after_fork(path):
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, safeload.torch as ours
path = sys.argv[1]
tensors = ours.load_file(path)
file = ours.safe_open(path, "pt")
part = file.get_slice("large")
child = os.fork()
if child == 0:
    tensors["large"].fill_(5)
    same = bool((file.get_tensor("large") == 1).all() and (part[:7] == 1).all())
    os._exit(0 if same and (ours.load_file(path)["large"] == 1).all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), float(tensors["large"][0]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, path], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["0", "1.0"]


def test_module_level_names_are_those_of_numpys_loader(path):
    """A tensor shows the very memory that safeload.numpy would show: nothing is copied on the way."""
    array = safeload.load(path)["large"]
    tensor = torch.from_numpy(array)
    assert tensor.data_ptr() == array.ctypes.data
    from builders.inside import torch_arrays

    assert torch_arrays.from_arrays({"x": array})["x"].data_ptr() == array.ctypes.data
    for tensor in TENSORS.values():
        assert torch_arrays.to_array(tensor).ctypes.data == tensor.data_ptr()


def test_a_read_only_array_is_copied():
    import numpy as np
    from builders.inside import torch_arrays

    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = torch_arrays.from_array(array, "x")
    tensor.fill_(1)
    assert array.tolist() == [0, 1, 2]
