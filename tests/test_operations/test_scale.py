"""Files larger than memory, sparse on disk: a folder of 1 TB in 200 shards, a single file of 300 GB."""

import json
import os
import subprocess
import sys

import pytest
from builders import inside
from builders.thorough import THOROUGH

import safeload

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="peak RSS is read from /proc"),
    pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's memory counts too"),
    pytest.mark.any_python,
    pytest.mark.no_core,
]

SHARDS, TENSORS = 200, 500 if THOROUGH else 250  # of each shard
SHAPE = (512_000 // TENSORS, 5120)  # of BF16: 10 or 20 MiB, so 1.05 TB in all

# Each step is timed in a process of its own, since peak memory never sinks.
_STEPS = inside.program("""
import json, sys, time
import numpy, ml_dtypes  # what every use of bfloat16 imports
import safeload
from safeload import check

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

path, last = sys.argv[1:]
found = {}
before, started = peak(), time.process_time()

def step(name, value):
    global started
    found[name] = [value, time.process_time() - started]
    started = time.process_time()

opened = safeload.open(path)
step("open", opened.nbytes)
step("list", sum(info.nbytes for info in opened.tensors.values()))
step("slice", opened.get_slice(last)[-1, 5:8].astype("float32").tolist())
step("view", opened[last].shape)
report = safeload.check(path, values=False)
step("validate", [report.ok, report.tensors])
found["memory"] = peak() - before
print(json.dumps(found))
""")


def sparse(path, names, marks=()):
    """A safetensors file of zeros that takes no room; ``marks`` are (offset from its end, bytes)."""
    size = 2 * SHAPE[0] * SHAPE[1]
    entries = {
        name: {"dtype": "BF16", "shape": SHAPE, "data_offsets": [k * size, (k + 1) * size]}
        for k, name in enumerate(names)
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + len(names) * size)
        for offset, mark in marks:
            file.seek(-offset, os.SEEK_END)
            file.write(mark)
    return len(names) * size


def steps(path, last):
    done = subprocess.run(
        [sys.executable, "-I", "-c", _STEPS, str(path), last], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def check(found, nbytes, count):
    assert found["open"][0] == found["list"][0] == nbytes
    assert found["slice"][0] == [0, 0, 1.5]
    assert found["view"][0] == list(SHAPE)
    assert found["validate"][0] == [False, count]  # these files are holes: blocks that were never written
    # Seconds of the processor, where reading all bytes would take minutes at best.
    assert sum(step[1] for name, step in found.items() if name != "memory") < 30
    # 247 MiB for 100,000 tensors with Python 3.11, 259 with 3.10: half of it validate's, a sixth the descriptions.
    assert found["memory"] < (300 << 20) * count / 100_000


# 1.5 as BF16 in the last row, at its eighth element.
MARK = (2 * (SHAPE[1] - 7), b"\xc0\x3f")


def room(path, nbytes):
    """Skips where the file system has no sparse files of that size."""
    try:
        with (path / "probe").open("wb") as file:
            file.truncate(nbytes)
        if (path / "probe").stat().st_blocks > 1000:
            pytest.skip("the file system has no sparse files")
    except OSError as error:
        pytest.skip(f"the file system has no file of {nbytes >> 30} GiB: {error}")
    finally:
        (path / "probe").unlink(missing_ok=True)


def test_a_folder_of_a_terabyte(tmp_path, record_property):
    room(tmp_path, 6 << 30)
    weight_map, nbytes = {}, 0
    for shard in range(SHARDS):
        names = [f"model.layers.{shard}.mlp.experts.{k}.up_proj.weight" for k in range(TENSORS)]
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        nbytes += sparse(tmp_path / file, names, [MARK])
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert nbytes > 10**12
    found = steps(tmp_path, names[-1])
    record_property("steps", found)
    check(found, nbytes, SHARDS * TENSORS)


def test_a_file_of_300_gb(tmp_path, record_property):
    room(tmp_path, 320 << 30)
    names = [f"model.layers.{k}.mlp.up_proj.weight" for k in range(14_400 if TENSORS == 250 else 28_700)]
    nbytes = sparse(tmp_path / "m.safetensors", names, [MARK])
    assert nbytes > 300 * 10**9
    found = steps(tmp_path / "m.safetensors", names[-1])
    record_property("steps", found)
    check(found, nbytes, len(names))


def test_a_shard_that_is_cut_is_named_without_reading_the_others(tmp_path):
    room(tmp_path, 6 << 30)
    for shard in range(3):
        sparse(tmp_path / f"model-{shard + 1:05}-of-00003.safetensors", [f"{shard}.{k}" for k in range(TENSORS)])
    os.truncate(tmp_path / "model-00002-of-00003.safetensors", 5 << 30)
    report = safeload.check(tmp_path, values=False)
    assert not report.ok
    assert report.errors[0].code == "file.format"
    assert "model-00002-of-00003.safetensors" in report.errors[0].message
