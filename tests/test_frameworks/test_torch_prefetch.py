"""`safe_open.prefetch`: plans, refusals and the loader, with a stand-in for the device."""

import gc
import os
import threading

import numpy as np
import pytest
from builders import inside
from builders.threads import threads

import safeload
from safeload.numpy import load_file, save_file

torch = pytest.importorskip("torch")

from builders.inside import torch_arrays, torch_devices  # noqa: E402
from builders.late_device import Late  # noqa: E402

SOURCE = {f"t{k:02}": np.arange(k * 300, k * 300 + 60 * (k % 5), dtype=np.float32).reshape(-1, 6) for k in range(40)}
SOURCE["scalar"] = np.float32(7)


@pytest.fixture
def device(monkeypatch):
    """A CUDA device that the CPU stands in for, and the copies to it."""
    late = Late(0.0005)
    monkeypatch.setattr(torch_arrays, "device_of", torch_arrays.parsed_device)
    monkeypatch.setattr(torch_devices, "Copies", lambda device, streams: late)
    inside.tune(monkeypatch, staging_buffer=16384, smallest_staging_buffer=4096)
    return late


@pytest.fixture
def path(tmp_path):
    save_file(SOURCE, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def prefetch(path, plan=None, **options):
    return safeload.safe_open(path, "pt").prefetch(plan, device="cuda:0", **options)


def assert_source(tensors, source=SOURCE):
    assert tensors.keys() == source.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.numpy(), source[name]), name
        assert tensor.shape == torch.Size(np.shape(source[name]))


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_iteration_gives_every_tensor_once(path, device, threads):
    with prefetch(path, threads=threads) as loader, safeload.safe_open(path) as file:
        assert loader.names() == file.offset_keys()
        assert len(loader) == len(SOURCE)
        assert_source(dict(loader))
        assert dict(loader) == {}
        assert repr(loader) == "<PrefetchLoader: 41 tensors, 0 left>"
    assert device.finished == 1


def test_take_in_any_order_and_once(path, device):
    with prefetch(path) as loader:
        last = loader.take("t39")
        assert_source({"t39": last, **dict(loader)})
        for name, text in (
            ("t39", "already delivered"),
            ("t00", "already delivered"),
            ("x", "not in the prefetch plan"),
        ):
            with pytest.raises(safeload.SafetensorError, match=f"'{name}'.*{text}"):
                loader.take(name)


def test_reading_begins_before_anything_is_taken(path, device):
    with prefetch(path) as loader:
        for _ in range(500):
            if device.tensors and not threads():
                break
            threading.Event().wait(0.01)
        assert len(device.tensors) == len(SOURCE)
        assert_source(dict(loader))


def test_a_plan_names_tensors_and_rows(path, device):
    plan = {"t14": slice(2, 5), "t09": slice(-3, None), "t11": slice(4, 4), "t13": slice(5, 2), "scalar": None}
    with prefetch(path, plan) as loader:
        assert loader.names() == [name for name in load_file(path) if name in plan]
        expected = {name: SOURCE[name] if rows is None else SOURCE[name][rows] for name, rows in plan.items()}
        assert_source({name: loader.take(name) for name in plan}, expected)
    assert len(device.buffers) <= 4, "few bytes need no more, whatever the number of threads"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({}, "selects no tensors"),
        ([], "maps names to None or a slice, got list"),
        ({"nope": None}, "does not contain"),
        ({1: None}, "keys must be tensor names, got int"),
        ({"t14": 3}, "must be None or a slice, got int for 't14'"),
        ({"t14": slice(0, 3, 2)}, "step 1, got 2 for 't14'"),
        ({"t14": slice(None, None, -1)}, "step 1, got -1"),
        ({"t14": slice(0, 3, 0)}, "invalid prefetch plan slice for 't14'"),
        ({"t14": slice(0, 41)}, "stop 41 for 't14' is out of range for 40 rows"),
        ({"t14": slice(-41, 3)}, "start -41 for 't14' is out of range"),
        ({"t14": slice(10**30, None)}, "out of range"),
        ({"t14": slice("a", 3)}, "must be integers or None"),
        ({"t14": slice(True, 3)}, "must be integers or None"),
        ({"scalar": slice(0, 1)}, "0-d tensor 'scalar'"),
    ],
)
def test_a_wrong_plan_is_refused_before_the_device_is_used(path, plan, text):
    with safeload.safe_open(path, "pt", "cuda:7") as file, pytest.raises(safeload.SafetensorError, match=text):
        file.prefetch(plan)


def raw(path, code, shape, data):
    header = f'{{"x":{{"dtype":"{code}","shape":{list(shape)},"data_offsets":[0,{len(data)}]}}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_rows_of_packed_elements(tmp_path, device):
    path = raw(tmp_path / "x", "F4", (4, 8), bytes(range(16)))
    with prefetch(path, {"x": slice(1, 3)}) as loader:
        rows = loader.take("x")
    assert rows.dtype is torch.float4_e2m1fn_x2
    assert rows.view(torch.uint8).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    for code, shape, data, text in (
        ("F4", (4,), b"12", "a row is not a whole number of bytes"),
        ("F6_E2M3", (4,), b"123", "F6_E2M3"),
        ("F4", (2, 3), b"123", "pairs of F4"),
    ):
        plan = {"x": slice(0, 1)} if "row" in text else None
        with pytest.raises(safeload.SafeloadError, match=text):
            prefetch(raw(tmp_path / "y", code, shape, data), plan)


def test_refusals(path):
    with safeload.safe_open(path, "np") as file, pytest.raises(safeload.SafetensorError, match='framework="pt"'):
        file.prefetch()
    with safeload.safe_open(path, "pt") as file:
        for device, shown in ((None, "cpu"), ("cpu", "cpu"), ("meta", "meta"), ("xpu:1", "xpu:1")):
            with pytest.raises(safeload.SafetensorError, match=f"cuda devices, not {shown}"):
                file.prefetch(device=device)
        with pytest.raises(safeload.SafetensorError, match="device nonsense is invalid"):
            file.prefetch(device="nonsense")
        with pytest.raises(ValueError, match="threads must be >= 1, got 0"):
            file.prefetch(device="cuda", threads=0)
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="device cuda is not available"):
                file.prefetch(device="cuda")
    with pytest.raises(safeload.SafetensorError, match="closed"):
        file.prefetch(device="cuda")


def test_close_frees_what_was_not_taken(path, device):
    loader = prefetch(path)
    stream = iter(loader)
    kept = dict([next(stream)])
    loader.close()
    for call in (lambda: next(stream), lambda: loader.take("t20"), lambda: dict(loader)):
        with pytest.raises(safeload.SafetensorError, match="closed"):
            call()
    loader.close()
    assert not threads()
    gc.collect()
    alive = {tensor.data_ptr() for weak in device.tensors if (tensor := weak()) is not None}
    assert alive <= {tensor.data_ptr() for tensor in kept.values()}
    assert_source(kept, {name: SOURCE[name] for name in kept})


def test_a_loader_that_is_dropped_ends_its_thread(path, device):
    loader = prefetch(path)
    loader.take("t00")
    del loader
    gc.collect()
    assert not threads()


def test_a_cut_file_is_named(path, device):
    with safeload.safe_open(path, "pt") as file:
        os.truncate(path, path.stat().st_size // 2)
        with file.prefetch(device="cuda:0") as loader, pytest.raises(safeload.FormatError, match=r"x\.safetensors"):
            dict(loader)


def test_several_loaders_and_threads(path, device):
    """Each tensor goes to a single thread."""
    with safeload.safe_open(path, "pt") as file:
        loader = file.prefetch(device="cuda:0")
    results = [{} for _ in range(4)]
    workers = [threading.Thread(target=lambda result=result: result.update(loader)) for result in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(map(len, results)) == len(SOURCE)
    assert_source({name: tensor for result in results for name, tensor in result.items()})
    loader.close()
