"""What is read from a store on the network: which bytes, in how many requests, into whose memory."""

import json
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import SCHEMES, dtypes, fetch, jobs, restore
from builders.remote import Served

import safeload.numpy
from safeload.errors import FormatError, RemoteError

pytestmark = pytest.mark.any_python

F32 = dtypes.BY_CODE["F32"].number
URL = "mem://model/model.safetensors"
HEAD = 128 << 10


def served(tensors, **options):
    """A checkpoint of one file in memory, opened, whose requests are forgotten."""
    store = Served({URL: safeload.numpy.save(tensors)}, **options)
    opened = safeload.open(store.at(URL))
    store.requests.clear()
    return store, opened


def numbers(count, dtype=np.float32, first=0):
    return np.arange(first, first + count, dtype=np.int64).astype(np.int32).view(np.float32).astype(dtype)


def same(found, want):
    assert list(found) == list(want)
    for name, array in want.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes()


LARGE = {"a": np.arange(6 << 20, dtype=np.int32), "b": np.arange(100, dtype=np.int64), "c": np.arange(1 << 20) * 1.0}


def test_all_tensors_come_in_ranges_of_8_mib_that_meet():
    store, opened = served(LARGE)
    same(opened.load(), dict(opened.load(backend="pread")))
    assert opened.last_load.backend == "remote"
    store.requests.clear()
    found = opened.load()
    assert {name: found[name].tobytes() for name in LARGE} == {name: a.tobytes() for name, a in LARGE.items()}
    assert store.nbytes() == sum(a.nbytes for a in LARGE.values())
    assert max(end - begin for _, begin, end in store.requests) == fetch.RANGE
    assert len(store.requests) == -(-store.nbytes() // fetch.RANGE)


def test_one_tensor_reads_its_bytes_and_no_other():
    store, opened = served(LARGE)
    info = opened.tensors["c"]
    assert opened.load(["c"])["c"].tobytes() == LARGE["c"].tobytes()
    assert store.requests == [(URL, info.offset, info.offset + info.nbytes)]


def test_a_slice_reads_its_rows():
    store, opened = served({"w": LARGE["a"].reshape(3072, 2048)})
    begin = opened.tensors["w"].offset
    np.testing.assert_array_equal(opened.get_slice("w")[5:7], LARGE["a"].reshape(3072, 2048)[5:7])
    assert store.requests == [(URL, begin + 5 * 8192, begin + 7 * 8192)]


def test_an_item_is_read_once_and_kept():
    store, opened = served(LARGE)
    assert opened["c"] is opened["c"]
    assert len(store.requests) == 1


def test_a_file_that_came_with_the_first_request_is_not_asked_for_again():
    tensors = {"w": np.arange(1000.0)}
    store = Served({URL: safeload.numpy.save(tensors)})
    with safeload.open(store.at(URL)) as opened:
        np.testing.assert_array_equal(opened["w"], tensors["w"])
    assert store.requests == [(URL, 0, len(store.content[URL]))]


@pytest.mark.parametrize(("gap", "requests"), [(1 << 14, 1), (1 << 19, 1), (3 << 20, 2)])
def test_tensors_with_little_between_them_come_together(gap, requests):
    tensors = {"a": np.zeros(1 << 20, np.uint8), "gap": np.zeros(gap, np.uint8), "z": np.ones(1 << 20, np.uint8)}
    store, opened = served(tensors)
    found = opened.load(["a", "z"])
    assert found["a"].tobytes() == tensors["a"].tobytes()
    assert found["z"].tobytes() == tensors["z"].tobytes()
    assert len(store.requests) == requests


def test_small_tensors_far_apart_do_not_bring_what_is_between_them():
    tensors = {f"{k:03}": np.full(1 << (18 if k % 2 else 10), k, np.uint8) for k in range(20)}
    store, opened = served(tensors)
    found = opened.load(only="*[02468]")
    assert all(found[name].tobytes() == tensors[name].tobytes() for name in found)
    assert store.nbytes() < 20 << 10


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_conversion_reads_each_byte_once_and_has_the_bits_of_a_local_load(dtype, tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"w{k}": rng.standard_normal((k * 1000 + 1, 513)).astype(ml_dtypes.bfloat16) for k in (0, 1, 2, 9)}
    safeload.numpy.save_file(tensors, tmp_path / "a.safetensors")
    store, opened = served(tensors)
    same(opened.load(dtype=dtype), safeload.load(tmp_path / "a.safetensors", dtype=dtype))
    assert store.nbytes() == opened.nbytes


def test_the_arrays_of_the_caller_are_filled_in_place():
    store, opened = served(LARGE)
    out = {name: np.empty_like(array) for name, array in LARGE.items()}
    found = opened.load(out=out)
    assert all(found[name] is out[name] for name in out)
    same({name: found[name] for name in LARGE}, LARGE)
    assert store.nbytes() == sum(a.nbytes for a in LARGE.values())


def test_scales_and_codes_of_a_folder_come_in_few_requests(tmp_path):
    rng = np.random.default_rng(0)
    tensors, weight_map = {}, {}
    for k in range(40):
        tensors[f"model.layers.{k}.weight"] = rng.standard_normal((256, 256)).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"model.layers.{k}.weight_scale_inv"] = rng.random((2, 2)).astype(np.float32)
    shards = {"1": [n for n in tensors if n.endswith("weight")], "2": [n for n in tensors if not n.endswith("weight")]}
    for shard, names in shards.items():  # the scales in a file of their own
        safeload.numpy.save_file({name: tensors[name] for name in names}, tmp_path / f"{shard}.safetensors")
        weight_map.update(dict.fromkeys(names, f"{shard}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    store = Served.folder(tmp_path)
    opened = safeload.open(store.at("mem://model"))
    store.requests.clear()
    same(opened.load(dtype="float32"), safeload.load(tmp_path, dtype="float32"))
    assert len(store.requests) <= 2
    name = "model.layers.7.weight"
    np.testing.assert_array_equal(
        opened.get_slice(name)[130:140], safeload.load(tmp_path, [name], dtype="float32")[name][130:140]
    )


def test_staging_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(inside.fetch, "WINDOW", 1 << 20)
    monkeypatch.setattr(inside.fetch, "_STAGED", 3 << 20)
    most = 0
    take = fetch.Fetch._take

    def watched(self, nbytes):
        nonlocal most
        memory = take(self, nbytes)
        most = max(most, self._staged)
        return memory

    monkeypatch.setattr(fetch.Fetch, "_take", watched)
    store, opened = served({f"w{k}": np.full(1 << 18, k, ml_dtypes.bfloat16) for k in range(40)}, latency=0.001)
    found = opened.load(dtype="float32")
    assert all((found[f"w{k}"] == k).all() for k in range(40))
    assert 0 < most <= 3 << 20
    assert store.nbytes() == opened.nbytes


def test_many_requests_are_in_flight_and_no_thread_is_left(monkeypatch):
    monkeypatch.setattr(inside.fetch, "RANGE", 1 << 20)
    store, opened = served({f"w{k}": np.full(1 << 17, k, np.int64) for k in range(40)}, latency=0.05)
    before = threading.active_count()
    opened.load()
    assert 8 <= store.most <= 32
    assert threading.active_count() == before


def test_a_stream_hides_latency_and_keeps_the_order():
    tensors = {f"w{k:02}": np.full(1 << 19, k, np.int64) for k in range(32)}
    store, opened = served(tensors, latency=0.05)
    names = []
    for name, array in opened.stream(ahead=128 << 20):
        names.append(name)
        assert (array == int(name[1:])).all()
    assert names == sorted(tensors)
    assert store.most > 2


def test_a_stream_gives_what_is_ready_first():
    store, opened = served({f"w{k}": np.full(1 << 21, k, np.int64) for k in range(4)})
    waiting = threading.Event()
    first = opened.tensors["w0"].offset

    def slow(begin, end):
        if begin == first:
            waiting.wait(5)

    store.failing[URL] = slow
    stream = opened.stream(order="ready", ahead=128 << 20)
    name, _ = next(stream)
    assert name != "w0"
    waiting.set()
    assert {name, *(name for name, _ in stream)} == {"w0", "w1", "w2", "w3"}


def refuse(position):
    def fail(begin, end):
        if begin <= position < end:
            raise RemoteError("the server returned 500", URL, begin, end)

    return fail


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_an_error_names_tensor_url_and_range(dtype):
    store, opened = served({f"w{k}": np.full(1 << 21, k, np.float32) for k in range(8)})
    at = opened.tensors["w5"].offset
    store.failing[URL] = refuse(at)
    with pytest.raises(
        RemoteError, match=rf"^tensor 'w5': the server returned 500 \({URL}, bytes \[{at}, \d+\)\)$"
    ) as e:
        opened.load(dtype=dtype)
    assert isinstance(e.value, OSError)
    assert e.value.tensor == "w5"
    store.failing.clear()
    assert (opened.load(["w5"])["w5"] == 5).all()


def test_a_stream_gives_all_before_a_tensor_that_cannot_be_read():
    store, opened = served({f"w{k}": np.full(1 << 19, k, np.float32) for k in range(8)})
    store.failing[URL] = refuse(opened.tensors["w5"].offset)
    stream = opened.stream()
    assert [next(stream)[0] for _ in range(4)] == ["w0", "w1", "w2", "w3"]
    with pytest.raises(RemoteError, match="tensor 'w4'"):  # the first one in the range, which begins with it
        next(stream)


def test_nothing_is_written_after_an_error(monkeypatch):
    """Threads that still read leave the caller's memory alone."""
    monkeypatch.setattr(inside.fetch, "RANGE", 1 << 20)
    store, opened = served({f"w{k}": np.full(1 << 18, k, np.int64) for k in range(8)})
    hold = threading.Event()
    last = opened.tensors["w7"].offset

    def fail(begin, end):
        if begin >= last:
            raise RemoteError("broken", URL, begin, end)
        hold.wait(3)

    store.failing[URL] = fail
    out = {f"w{k}": np.zeros(1 << 18, np.int64) for k in range(8)}
    with pytest.raises(RemoteError):
        opened.load(out=out)
    hold.set()
    time.sleep(0.2)
    assert not any(array.any() for array in out.values())


class SlowCore:
    """The C core, whose time slices take longer than the call waits for its threads."""

    def __init__(self, core):
        self._core = core
        self.begun = threading.Event()

    def __getattr__(self, name):
        return getattr(self._core, name)

    def sl_jobs_run(self, *arguments):
        status = self._core.sl_jobs_run(*arguments)
        self.begun.set()
        time.sleep(0.03)
        return status


def test_nothing_is_converted_after_ctrl_c(monkeypatch):
    shape = 4096, 4096
    tensors = {
        "model.w.weight": np.full(shape, 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn),
        "model.w.weight_scale_inv": np.ones((32, 32), np.float32),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    store = Served({URL: safeload.numpy.save(tensors), "mem://model/config.json": json.dumps(config).encode()})
    opened = safeload.open(store.at(URL))
    core = SlowCore(jobs.lib)
    monkeypatch.setattr(jobs, "lib", core)
    inside.tune(monkeypatch, job_slice_ms=1, interrupt_grace=0.0)
    out = {"model.w.weight": np.zeros(shape, np.float32)}

    def stop(done, total):
        if core.begun.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened.load(out=out, dtype="float32", progress=stop)
    seen = np.count_nonzero(out["model.w.weight"])
    assert 0 < seen < out["model.w.weight"].size
    time.sleep(0.3)
    assert np.count_nonzero(out["model.w.weight"]) == seen


def sharded_fp8(folder, scale):
    codes = np.full((256, 256), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    safeload.numpy.save_file({"w.weight": codes}, folder / "codes.safetensors")
    safeload.numpy.save_file({"w.weight_scale_inv": scale}, folder / "scales.safetensors")
    weight_map = {"w.weight": "codes.safetensors", "w.weight_scale_inv": "scales.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    store = Served.folder(folder, head=8)
    return store, safeload.open(store.at("mem://model"))


def test_a_scale_that_is_not_finite_has_the_error_of_a_local_file(tmp_path):
    _, opened = sharded_fp8(tmp_path, np.array([[1, 1], [1, np.inf]], np.float32))
    with pytest.raises(FormatError) as local:
        safeload.load(tmp_path, dtype="float32")
    with pytest.raises(FormatError) as there:
        opened.load(dtype="float32")
    assert there.value.args == local.value.args
    assert there.value.path == "mem://model/scales.safetensors"


@pytest.mark.parametrize("local", ["codes", "scales"])
def test_codes_and_scales_may_be_on_this_machine_and_in_a_store(tmp_path, local):
    store, _ = sharded_fp8(tmp_path, np.full((2, 2), 3, np.float32))
    paths = [
        str(tmp_path / f"{name}.safetensors") if name == local else store.at(f"mem://model/{name}.safetensors")
        for name in ("codes", "scales")
    ]
    same(safeload.load(paths, dtype="float32"), safeload.load(tmp_path, dtype="float32"))


def test_a_part_in_a_store_that_has_no_bytes_is_not_waited_for(tmp_path):
    _, opened = sharded_fp8(tmp_path, np.full((2, 2), 3, np.float32))
    scales = next(file for file in opened.weight_files if "scales" in file.path)
    local = safeload.open(tmp_path)
    out = np.zeros((256, 256), np.float32)
    (packed,) = [file.table.packed.get(0) for file in local.weight_files if file.table.packed.get(0) is not None]
    empty = packed.parts["scale"]._replace(name="empty", file=scales, begin=0, end=0)
    (job,) = restore.restore_jobs(packed, out.ctypes.data, F32, "w")
    job = job._replace(packed=WithPart(job.packed, empty))
    jobs.Batch([job]).run()
    assert (out == safeload.load(tmp_path, dtype="float32")["w.weight"]).all()


class WithPart:
    """Packed codes with one more part, which they do not need."""

    def __init__(self, packed, part):
        self._packed, self._part = packed, part

    def __getattr__(self, name):
        return getattr(self._packed, name)

    def stored(self):
        return {**self._packed.stored(), "more": (self._part.file, self._part.begin, self._part.end)}


@pytest.mark.parametrize("last", ["codes", "scales"])
def test_an_error_of_a_value_names_the_file_of_the_codes_whichever_part_comes_last(tmp_path, last):
    store, opened = sharded_fp8(tmp_path, np.full((2, 2), 1e38, np.float32))  # 448e38 is infinite
    safeload.numpy.save_file(
        {"w.weight": np.full((256, 256), 448, ml_dtypes.float8_e4m3fn)}, tmp_path / "codes.safetensors"
    )
    store.content["mem://model/codes.safetensors"] = (tmp_path / "codes.safetensors").read_bytes()
    store.failing[f"mem://model/{last}.safetensors"] = lambda begin, end: time.sleep(0.1)
    with pytest.raises(safeload.RangeError) as there:
        safeload.load_quantized(opened, "q8_0", requantize=True)
    assert there.value.path == "mem://model/codes.safetensors"


def test_every_file_is_asked_whether_it_has_changed():
    store, opened = served(LARGE)
    opened.load()
    assert store.confirmed == [URL]


def test_a_change_is_an_error_before_anyone_has_the_bytes(monkeypatch):
    _, opened = served(LARGE)

    def changed(self):
        raise FormatError("the file has changed since it was opened", self.path)

    monkeypatch.setattr("builders.remote.ServedStore.confirm", changed)
    with pytest.raises(FormatError, match="has changed"):
        opened.load()
    with pytest.raises(FormatError, match="has changed"):
        next(opened.stream())


def test_progress_counts_all_bytes():
    _, opened = served(LARGE)
    seen = []
    opened.load(progress=lambda done, total: seen.append((done, total)))
    total = sum(a.nbytes for a in LARGE.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_what_progress_raises_ends_the_load(monkeypatch):
    monkeypatch.setattr(inside.fetch, "RANGE", 1 << 20)
    store, opened = served({f"w{k}": np.full(1 << 18, k, np.int64) for k in range(20)}, latency=0.1)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened.load(progress=stop)
    assert len(store.requests) < 38


def test_quantizing_names_the_element_of_the_whole_tensor():
    values = np.zeros((4096, 1024), np.float32)
    values[4000, 7] = np.nan
    _, opened = served({"w": values})
    with pytest.raises(safeload.RangeError, match=r"element \[4000, 7\] is nan"):
        safeload.load_quantized(opened, "q8_0", requantize=True)


@pytest.mark.parametrize(
    ("scheme", "rounding"),
    [(scheme, rounding) for scheme, row in SCHEMES.items() for rounding in (None, *row.roundings)],
)
def test_quantizing_gives_the_bytes_of_local_values(scheme, rounding, monkeypatch):
    monkeypatch.setattr(inside.fetch, "RANGE", 1 << 20)
    values = np.random.default_rng(1).standard_normal((40, 12 << 10), np.float32)  # more than one request
    store, opened = served({"w": values})
    found = safeload.load_quantized(opened, scheme, rounding=rounding)["w"]
    assert len(store.requests) > 1
    assert (found.data == safeload.quantize(values, scheme, rounding=rounding).data).all()


def test_no_tensors_and_no_bytes():
    assert served({})[1].load() == {}
    _, opened = served({"a": np.zeros((0, 3)), "b": np.float32(4)})
    assert opened.load()["b"] == 4
    assert opened.load(["a"])["a"].shape == (0, 3)
