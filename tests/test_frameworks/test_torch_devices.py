"""Tensors to a device of torch: the ring of buffers with stand-ins for a device, and a device where there is one."""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import weakref
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from builders import adapters, inside
from builders.inside import dtypes, entries_of, tensors_of
from builders.quantized import FIXTURES, FOLDER
from builders.threads import threads

import safeload
from safeload.numpy import load_file, save_file

torch = pytest.importorskip("torch")

from builders.inside import torch_arrays, torch_devices  # noqa: E402
from builders.late_device import Late  # noqa: E402

from safeload.torch import load_checkpoint  # noqa: E402
from safeload.torch import load_file as load_torch_file  # noqa: E402
from safeload.torch import save_file as save_torch_file  # noqa: E402

CPU = torch.device("cpu")
ACCELERATORS = [
    name for name in ("cuda", "xpu", "mps") if getattr(torch, name, None) and getattr(torch, name).is_available()
]


@pytest.fixture
def small_ring(monkeypatch):
    inside.tune(monkeypatch, staging_buffer=16384, smallest_staging_buffer=4096)


def entries(checkpoint, dtype=None, names=None):
    return entries_of(tensors_of(checkpoint, names), None if dtype is None else dtypes.BY_NAME[dtype])


def load(path, dtype=None, copies=None, **options):
    with safeload.open(path) as checkpoint:
        return torch_devices.load(entries(checkpoint, dtype), CPU, copies=copies, **options)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got, want):
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].shape == torch.Size(array.shape)
        assert str(got[name].dtype).removeprefix("torch.") == array.dtype.name
        assert bits(got[name]) == array.tobytes(), name


def model(path, count=9):
    random = np.random.default_rng(1)
    sizes = [(70, 130), (3,), (), (0, 4), (5000,), (1, 1), (90, 200), (17,), (64, 64)]
    kinds = [np.float32, ml_dtypes.bfloat16, np.int64, np.float16, np.float32, np.bool_, ml_dtypes.bfloat16, np.uint8]
    arrays = {}
    for k in range(count):
        array = (random.standard_normal(sizes[k % len(sizes)]) * 50).astype(np.float32)
        arrays[f"t{k:03}"] = array.astype(kinds[k % len(kinds)])
    save_file(arrays, path)
    return path


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float64", "float16"])
@pytest.mark.parametrize("copies", [None, Late], ids=["blocking", "late"])
def test_any_tensors_through_a_small_ring(tmp_path, small_ring, copies, dtype):
    path = model(tmp_path / "x.safetensors", 60)
    assert_same(load(path, dtype, copies and copies(0.0005)), load_file(path, dtype=dtype))


@pytest.mark.parametrize("name", FIXTURES)
def test_packed_tensors(name, small_ring):
    want = safeload.load(FOLDER / name, dtype="bfloat16")
    assert_same(load(FOLDER / name, "bfloat16"), want)


def test_a_buffer_is_not_filled_before_its_copies_are_done(tmp_path, small_ring):
    """If it were, a device that copies late would get bytes of the next tensors."""
    path = tmp_path / "x.safetensors"
    save_file({f"t{k:02}": np.full(4096, k, np.float32) for k in range(40)}, path)
    late = Late(0.005)
    assert_same(load(path, copies=late), load_file(path))
    assert 1 < len(late.buffers) <= 4
    assert late.finished == 1


@pytest.mark.parametrize(("threads", "count", "size"), [(1, 4, 1), (3, 5, 1), (4, 4, 2), (8, 5, 2), (16, 8, 2)])
def test_number_and_size_of_the_buffers(tmp_path, small_ring, threads, count, size):
    path = tmp_path / "x.safetensors"
    save_file({f"t{k:02}": np.full(4096, k, np.float32) for k in range(80)}, path)
    late = Late(0)
    assert_same(load(path, copies=late, threads=threads), load_file(path))
    assert 1 < len(late.buffers) <= count
    assert {buffer.numel() for buffer in late.buffers} == {size * 16384}


def test_a_wait_that_does_nothing_would_be_noticed(tmp_path, small_ring):
    """The claim of the test before can fail."""
    path = tmp_path / "x.safetensors"
    save_file({f"t{k:02}": np.full(4096, k, np.float32) for k in range(40)}, path)
    late = Late(0.005)
    late.wait = lambda number: None
    with pytest.raises(AssertionError):
        assert_same(load(path, copies=late), load_file(path))


@pytest.mark.parametrize(
    ("stored", "wanted", "widens"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "float64", True),
        ("float32", "bfloat16", False),
        ("float8_e4m3fn", "float32", False),
        ("bfloat16", "bfloat16", False),
    ],
)
def test_the_device_converts_where_that_moves_fewer_bytes(tmp_path, small_ring, stored, wanted, widens):
    path = tmp_path / "x.safetensors"
    values = np.concatenate([np.random.default_rng(0).standard_normal(9000), [np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e-6]])
    save_file({"w": safeload.astype(values.astype(np.float32), stored)}, path)
    late, seen = Late(0), []
    assert_same(
        load(path, wanted, late, progress=lambda done, total: seen.append((done, total))),
        load_file(path, dtype=wanted),
    )
    assert late.converted == ([(getattr(torch, stored), getattr(torch, wanted))] if widens else [])
    moved = values.size * torch.empty(0, dtype=getattr(torch, stored if widens else wanted)).element_size()
    assert seen[-1] == (moved, moved)


class Module:
    """What `Copies` asks of a device's module in torch, with a log of the calls."""

    def __init__(self):
        self.log = []
        self.caller = self.Stream("caller")
        self.Stream.log = self.Event.log = self.log

    class Stream:
        def __init__(self, device):
            self.name = device if device == "caller" else "own"

        def wait_stream(self, other):
            self.log.append(("wait", self.name, other.name))

        def synchronize(self):
            self.log.append(("synchronize", self.name))

    class Event:
        def record(self, stream):
            self.log.append(("record", stream.name))

        def synchronize(self):
            self.log.append(("event", threading.current_thread() is threading.main_thread()))

    def current_stream(self, device):
        return self.caller

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(("enter", stream.name))
        yield
        self.log.append(("leave", stream.name))


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "the system refuses to pin"])
def test_the_steps_of_a_device_with_streams(tmp_path, small_ring, monkeypatch, pins):
    """No such device may be here: this shows the order of the calls, not that a driver does them."""
    path = tmp_path / "x.safetensors"
    save_file({f"t{k:02}": np.full(4096, k, ml_dtypes.bfloat16) for k in range(20)}, path)
    module, empty, pinned, recorded = Module(), torch.empty, [], []

    def allocate(*arguments, pin_memory=False, **options):
        if pin_memory:
            if not pins:
                raise RuntimeError("cannot pin")
            pinned.append(arguments)
        elif options.get("device") == CPU:
            module.log.append(("allocate", "caller"))
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(stream.name))
    copies = torch_devices.Copies(CPU, True)
    assert_same(load(path, "float32", copies), load_file(path, dtype="float32"))
    log = module.log
    assert 0 < len(pinned) <= 4 if pins else not pinned
    assert recorded == ["own"] * 20, "memory that is converted from may be used again only after that"
    assert log.count(("allocate", "caller")) == 40, "each tensor's memory, as copied and as F32"
    assert log.count(("record", "own")) == 10
    assert 10 - 4 <= log.count(("event", False)) < 10, "for each buffer that is filled again"
    assert log[-1] == ("synchronize", "own")
    steps = [entry for entry in log if entry[0] in ("allocate", "wait", "enter")]
    for before, after in pairwise(steps):
        assert (before[0], after[0]) != ("allocate", "enter"), "the caller's stream may still use what the memory held"


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_small_neighbours_are_copied_to_the_device_together(tmp_path, monkeypatch, dtype):
    """Pieces of up to 64 KiB."""
    path = tmp_path / "x.safetensors"
    generator = np.random.default_rng(2)
    sizes = [*range(1, 40), 1_500_000, 5, 7, 1_500_000, *range(1, 20)]
    save_file({f"t{k:03}": generator.standard_normal(n).astype(np.float16) for k, n in enumerate(sizes)}, path)
    module, copied = Module(), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    together = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, parts: copied.append(len(to)) or together(to, parts))
    loaded = load(path, dtype, torch_devices.Copies(CPU, True))
    assert_same(loaded, load_file(path, dtype=dtype))
    assert copied
    assert sum(copied) > 50
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_each_tensor_has_a_storage_of_its_own(tmp_path, small_ring):
    for tensor in load(model(tmp_path / "x.safetensors", 30)).values():
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tied_weights_stay_tied_and_are_copied_once(tmp_path, small_ring):
    shared = torch.randn(300, 20)
    torch.save({"embed": shared, "head": shared, "part": shared[:2], "turned": shared.t()}, tmp_path / "x.pt")
    seen = []
    got = load(tmp_path / "x.pt", progress=lambda done, total: seen.append(total))
    assert got["embed"].data_ptr() == got["head"].data_ptr()
    assert got["part"].data_ptr() != got["embed"].data_ptr()
    for name, want in {"embed": shared, "head": shared, "part": shared[:2], "turned": shared.t()}.items():
        assert torch.equal(got[name], want)
    assert seen[-1] == (300 * 20 * 2 + 2 * 20) * 4


def test_codes_without_their_scales_are_refused(tmp_path, monkeypatch):
    """Those that are packed for a kernel: on a device as on the CPU."""
    monkeypatch.setattr(torch_arrays, "device_of", lambda device: CPU if device == "there" else None)
    codes = {
        "m.qweight": np.ones((8, 64), np.int32),
        "m.scales": np.ones((1, 64), np.float16),
        "m.qzeros": np.ones((1, 8), np.int32),
        "m.g_idx": np.zeros(64, np.int32),
    }
    save_file(codes, tmp_path / "model.safetensors")
    said = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}
    config = {"quantization_config": said, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for device in ("there", "cpu"):
        with pytest.raises(safeload.UnsupportedError, match="gptq, checkpoint_format marlin"):
            load_checkpoint(tmp_path, device=device, dtype="float32")
        assert_same(load_checkpoint(tmp_path, device=device), load_file(tmp_path / "model.safetensors"))


def test_adapters_are_merged_in_the_dtype_of_the_call(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_arrays, "device_of", lambda device: CPU if device == "there" else None)
    weights = {"w.weight": np.ones((6, 5), np.float32), "other": np.ones(4, np.float32)}
    save_file(weights, tmp_path / "base.safetensors")
    adapter = adapters.write(tmp_path / "adapter", adapters.pair())
    for dtype in (None, "bfloat16"):
        there, here = (
            load_checkpoint(tmp_path / "base.safetensors", device=device, dtype=dtype, adapters=adapter)
            for device in ("there", "cpu")
        )
        assert {name: tensor.dtype for name, tensor in there.items()} == {name: here[name].dtype for name in here}
        assert all(torch.equal(there[name], here[name]) for name in weights)


def test_buffers_are_freed_by_the_end_of_the_load(tmp_path, small_ring):
    """Pinned memory that waits for the garbage collector would be missing in the next load."""
    path = model(tmp_path / "x.safetensors", 60)
    late = Late(0)
    gc.collect()
    gc.disable()
    try:
        load(path, copies=late)
        buffers = [weakref.ref(buffer) for buffer in late.buffers]
        late.buffers.clear()
        assert len(buffers) > 1
        assert [buffer for buffer in buffers if buffer() is not None] == []
    finally:
        gc.enable()


def test_an_empty_load(tmp_path):
    save_file({}, tmp_path / "x.safetensors")
    assert load(tmp_path / "x.safetensors") == {}
    save_file({"e": np.empty((0, 3), np.float32)}, tmp_path / "y.safetensors")
    assert load(tmp_path / "y.safetensors")["e"].shape == (0, 3)


@pytest.mark.parametrize("failing", ["memory", "file", "progress"])
def test_an_error_leaves_nothing_behind(tmp_path, small_ring, failing):
    path = model(tmp_path / "x.safetensors", 60)
    late = Late(0.001)
    options = {}
    if failing == "memory":
        made = late.empty
        late.empty = lambda shape, dtype: (
            made(shape, dtype) if len(late.tensors) < 20 else _raise(torch.OutOfMemoryError())
        )
        kind = torch.OutOfMemoryError
    elif failing == "progress":
        options = {"progress": lambda done, total: _raise(ZeroDivisionError()) if done > 100_000 else None}
        kind = ZeroDivisionError
    else:
        kind = safeload.FormatError
    with safeload.open(path) as checkpoint:
        found = entries(checkpoint)
        if failing == "file":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
        with pytest.raises(kind):
            torch_devices.load(found, CPU, copies=late, **options)
    assert late.finished == 1, "the device may still copy from buffers that are freed"
    assert not threads()
    gc.collect()
    assert len(late.tensors) > 5
    assert [weak() for weak in late.tensors if weak() is not None] == []


def _raise(error):
    raise error


def test_a_device_that_does_not_exist(tmp_path):
    path = model(tmp_path / "x.safetensors")
    for device in ("nonsense", "cuda:77", "cpu:9x", -3):
        with pytest.raises(safeload.SafeloadError, match=str(device).partition(":")[0]):
            load_torch_file(path, device=device)
        with pytest.raises(safeload.SafeloadError, match=str(device).partition(":")[0]):
            load_checkpoint(path, device=device)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_is_that_of_the_ring(tmp_path):
    """A file of 2 GiB to the device "meta", whose tensors have no memory, takes 64 MiB and what torch itself takes."""
    path = tmp_path / "x.safetensors"
    script = inside.program(f"""
import json, struct, sys, torch, safeload
sizes = [600 << 20, 900 << 20, 500 << 20, 1 << 20, 47 << 20]
header, at = {{}}, 0
for k, size in enumerate(sizes):
    header[f"t{{k}}"] = {{"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}}
    at += size
text = json.dumps(header).encode()
with open({str(path)!r}, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + at)
from builders.inside import entries_of, tensors_of, torch_devices
meta = torch.device("meta")
def peak():  # ru_maxrss begins with the memory of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
with safeload.open({str(path)!r}) as checkpoint:
    found = entries_of(tensors_of(checkpoint), None)
    torch_devices.load(found[3:4], meta, threads=2)
    before = peak()
    made = torch_devices.load(found, meta, threads=2)
    print(peak() - before, [tuple(t.shape) for t in made.values()] == [(size // 2,) for size in sizes])
""")
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    grown, right = done.stdout.split()
    assert right == "True"
    assert int(grown) < 64 + 16, "MiB"


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device, and counts its copies on the host."""

    alive = most = 0

    @property
    def device(self):
        return torch.device("cuda")

    def to(self, *arguments):
        assert arguments == ("cpu",)
        copy = self.as_subclass(torch.Tensor).clone()
        Elsewhere.alive += 1
        Elsewhere.most = max(Elsewhere.most, Elsewhere.alive)
        weakref.finalize(copy.untyped_storage(), lambda: setattr(Elsewhere, "alive", Elsewhere.alive - 1))
        return copy


def test_tensors_of_a_device_are_saved_one_after_the_other(tmp_path):
    """All of them on the host at a time would be as much memory again as the device has."""
    plain = {f"t{k:02}": torch.full((500, 70), float(k), dtype=torch.bfloat16) for k in range(20)}
    plain["conj"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    there = {name: tensor.as_subclass(Elsewhere) for name, tensor in plain.items()}
    save_torch_file(there, tmp_path / "x.safetensors", {"a": "b"})
    assert 1 <= Elsewhere.most <= 2
    got = load_torch_file(tmp_path / "x.safetensors")
    assert got.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(got[name], tensor)


@pytest.mark.skipif(not ACCELERATORS, reason="there is no accelerator")
@pytest.mark.parametrize("device", ACCELERATORS)
class TestOnAnAccelerator:
    @pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
    def test_files(self, tmp_path, device, dtype, small_ring):
        path = model(tmp_path / "x.safetensors", 200)
        got = load_torch_file(path, device=device, dtype=dtype)
        assert {tensor.device.type for tensor in got.values()} == {device}
        assert_same({name: tensor.cpu() for name, tensor in got.items()}, load_file(path, dtype=dtype))

    def test_large_tensors(self, tmp_path, device):
        path = tmp_path / "x.safetensors"
        save_file({f"t{k}": np.arange(k, k + 20_000_000, dtype=np.float32) for k in range(5)}, path)
        got = load_torch_file(path, device=device)
        assert_same({name: tensor.cpu() for name, tensor in got.items()}, load_file(path))

    @pytest.mark.parametrize("name", list(FIXTURES)[:12])
    def test_packed_checkpoints(self, device, name):
        got = load_checkpoint(FOLDER / name, device=device, dtype="bfloat16")
        assert_same({name: t.cpu() for name, t in got.items()}, safeload.load(FOLDER / name, dtype="bfloat16"))

    def test_saving(self, tmp_path, device):
        tensors = {f"t{k}": torch.full((300, 40), float(k), device=device) for k in range(9)}
        save_torch_file(tensors, tmp_path / "x.safetensors")
        assert_same({n: t.cpu() for n, t in tensors.items()}, load_file(tmp_path / "x.safetensors"))

    def test_too_large_for_it(self, tmp_path, device):
        path = tmp_path / "x.safetensors"
        size = 1 << 42
        with path.open("wb") as file:
            header = b'{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
        with pytest.raises(RuntimeError):
            load_torch_file(path, device=device)
