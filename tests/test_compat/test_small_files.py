"""Small files take few steps: counted, as no clock is to be trusted. And what is read ahead is right."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from builders import inside
from builders.calls import count_calls
from builders.quantized import FIXTURES

import safeload
from safeload.numpy import load, load_file, save, save_file

BACKENDS = ("mmap", "pread")


def many(count, size=4, dtype=np.float32):
    return {f"model.layers.{k:04}.weight": np.full(size, k % 100, dtype) for k in range(count)}


def calls_of(function):
    """Calls of Python and C functions that a call makes, after one that is not counted."""
    function()
    return count_calls(function)


def saved(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, durable=False)
    return path


def pair(tmp_path, counts, size=4):
    """Two files of so many tensors."""
    for count in counts:
        (tmp_path / str(count)).mkdir()
    return [saved(tmp_path / str(count), many(count, size)) for count in counts]


# Steps that must not become many more; versions of Python and numpy count a few more or less.
@pytest.mark.parametrize(("backend", "steps"), [("mmap", 75), ("pread", 85)])
def test_loading_takes_few_steps_and_none_per_tensor(tmp_path, backend, steps):
    few, more = pair(tmp_path, (150, 300))
    taken = calls_of(lambda: load_file(few, backend=backend))
    assert calls_of(lambda: load_file(more, backend=backend)) == taken <= steps


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted on CPython 3.11; 3.12 inlines comprehensions")
def test_a_small_file_loads_in_29_calls_into_safeload(tmp_path):
    path = saved(tmp_path, {"a": np.ones(4, np.float32), "b": np.ones((2, 3), np.float32)})
    package, calls = os.path.dirname(safeload.__file__) + os.sep, []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_qualname)

    load_file(path)
    sys.setprofile(note)
    try:
        load_file(path)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 29, calls


def test_a_small_tensor_is_saved_and_converted_in_few_steps():
    tensors = many(1, 16)
    assert calls_of(lambda: save(tensors)) <= 36
    for dtype in ("bfloat16", "float32"):
        assert calls_of(lambda dtype=dtype: safeload.astype(np.ones(16_384, np.float32), dtype)) <= 43


def test_loading_many_tensors_of_a_mapped_file_takes_no_step_per_tensor(tmp_path):
    few, more = pair(tmp_path, (1_000, 3_000), 64)
    taken = calls_of(lambda: load_file(few))
    assert calls_of(lambda: load_file(more)) == taken <= (98 if np.__version__ >= "1.26" else 103)


def test_loading_from_memory_takes_few_steps_and_none_per_tensor():
    one, few, more = (save(many(n)) for n in (1, 150, 300))
    assert calls_of(lambda: load(one)) <= 25
    taken = calls_of(lambda: load(few))
    assert calls_of(lambda: load(more)) == taken <= 50


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_of_an_open_file_takes_few_steps(tmp_path, backend):
    path = saved(tmp_path, many(300))

    def one():
        with safeload.safe_open(path, framework="np", backend=backend) as file:
            file.get_tensor("model.layers.0007.weight")

    assert calls_of(one) <= 75
    with safeload.safe_open(path, framework="np", backend=backend) as file:
        names = file.keys()
        for name in names:
            file.get_tensor(name)
        assert calls_of(lambda: [file.get_tensor(name) for name in names]) <= 14 * len(names)


def test_a_small_file_is_read_by_one_call_and_closed(tmp_path, monkeypatch):
    path = saved(tmp_path, many(3))
    monkeypatch.setattr(inside.local.LocalStore, "__init__", None)  # what keeps a file open
    for backend in BACKENDS:
        arrays = load_file(path, backend=backend)
        assert [array.tolist() for array in arrays.values()] == [[k] * 4 for k in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "nbytes", [1, 100 << 10, (127 << 10) - 8, 128 << 10, 1 << 20, (2 << 20) - 200, 2 << 20, 3 << 20]
)
def test_files_of_every_size_have_the_same_arrays(tmp_path, backend, nbytes):
    values = np.random.default_rng(nbytes).integers(0, 255, nbytes).astype(np.uint8)
    path = saved(tmp_path, {"a": values, "b": np.arange(3, dtype=np.int64)})
    before = path.read_bytes()
    arrays = load_file(path, backend=backend)
    content = load(before)
    for found in (arrays, content):
        assert (found["a"] == values).all()
        assert found["b"].tolist() == [0, 1, 2]
        assert all(a.flags.writeable and a.flags.aligned and a.flags.c_contiguous for a in found.values())
        found["a"][:] = 7
        assert found["b"].tolist() == [0, 1, 2]
    assert path.read_bytes() == before
    assert load(before)["a"][0] == values[0]


def test_odd_files_have_the_same_arrays(tmp_path):
    for tensors in (
        {},
        {"scalar": np.array(5, np.float64)},
        {"empty": np.zeros((0, 3), np.float32)},
        {"empty": np.zeros((0, 3), np.float32), "x": np.ones(3, np.float16), "y": np.ones(1, np.bool_)},
        {"a\nb": np.ones(2, np.int8), "": np.zeros(1, np.int16)},
    ):
        path = saved(tmp_path, tensors)
        for found in (load_file(path), load_file(path, backend="pread"), load(path.read_bytes())):
            assert set(found) == set(tensors)
            for name, array in tensors.items():
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                assert (found[name] == array).all()


def test_no_tensor_of_megabytes_of_content_keeps_all_of_it():
    tensors = {
        **{f"a{k:05}": np.full(100 << 8, k % 99, np.int32) for k in range(300)},
        "b": np.arange(1 << 20, dtype=np.int32),
        **{f"c{k}": np.full(3, k, np.int32) for k in range(5)},
    }
    data = save(tensors)
    found = load(data)
    assert list(found) == list(load(data, copy=False))
    assert all((found[name] == array).all() for name, array in tensors.items())
    owners = [array if array.base is None else array.base for name, array in found.items() if name != "b"]
    assert max(owner.nbytes for owner in owners) <= 16 << 20
    assert found["b"].base is not found["c0"].base
    found["a00000"][:] = -1
    assert found["a00001"][0] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_are_read_ahead_share_no_memory(tmp_path, backend):
    tensors = many(2_000, 40)
    with safeload.safe_open(saved(tmp_path, tensors), framework="np", backend=backend) as file:
        for names in (file.keys(), file.keys()[::-1], file.keys()[::3], file.keys()[::-7]):
            found = {name: file.get_tensor(name) for name in names}
            for name, array in found.items():
                assert (array == tensors[name]).all(), name
                array[...] = -1
            assert all(array.base is None for array in found.values())


def test_threads_that_read_one_file_get_their_own_tensors(tmp_path):
    tensors = many(3_000, 30)
    wrong = []
    with safeload.safe_open(saved(tmp_path, tensors), framework="np") as file:

        def read(names):
            wrong.extend(name for name in names if not (file.get_tensor(name) == tensors[name]).all())

        names = list(tensors)
        threads = [threading.Thread(target=read, args=(names[k:] + names[:k],)) for k in (0, 500, 1500, 2500)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.skipif(os.name == "nt", reason="Windows does not truncate an open file")
def test_a_file_that_is_cut_while_it_is_open_is_an_error_beyond_the_window(tmp_path):
    path = saved(tmp_path, many(5_000, 64))
    with safeload.safe_open(path, framework="np") as file:
        names = file.keys()
        for name in names[:3]:
            file.get_tensor(name)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(safeload.FormatError, match="truncated after it was opened") as caught:
            _ = [file.get_tensor(name) for name in names]
        assert str(path) in str(caught.value)


def hash_of(words):
    """The hash by which the C core finds names of 8 bytes (csrc/formats/table.c), of many at once."""
    odd = np.uint64(0x9E3779B97F4A7C15)
    hashes = (words ^ np.uint64(8 * 0x9E3779B97F4A7C15 % 2**64)) * odd
    hashes ^= hashes >> np.uint64(29)
    hashes *= odd
    return hashes ^ hashes >> np.uint64(29)


def names_that_collide(count):
    """Names of eight digits for one slot of 4,096, which is what a table of 1,025 to 2,048 names has."""
    digits = "".join(f"{k:04}" for k in range(10_000)).encode()
    halves = np.frombuffer(digits, "<u4").astype(np.uint64)
    names = []
    for first, half in enumerate(halves):
        hashes = hash_of(half | halves << np.uint64(32))
        names += [f"{first:04}{second:04}" for second in np.flatnonzero(hashes & np.uint64(4095) == 0)]
        if len(names) >= count:
            break
    return names[:count]


def test_hostile_names_are_found_and_duplicates_refused():
    names = names_that_collide(2_000)
    assert len(names) == 2_000
    names = [names[k * 777 % 2_000] for k in range(2_000)]  # so that a name is far from the one before it
    entry = '"%s":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'

    def content(names):
        text = "{" + ",".join(entry % (name, k, k + 1) for k, name in enumerate(names)) + "}"
        return len(text).to_bytes(8, "little") + text.encode() + bytes(k % 256 for k in range(len(names)))

    found = load(content(names))
    assert [int(array[0]) for array in found.values()] == [k % 256 for k in range(2_000)]
    assert list(found) == names
    with pytest.raises(safeload.FormatError, match=f"'{names[7]}': duplicate name"):
        load(content([*names, names[7]]))


@pytest.mark.parametrize("order", [1, -1, 8])
def test_names_in_any_order_are_found_and_listed_in_theirs(tmp_path, order):
    names = [f"h.{k}.mlp.w{k % 3}" for k in range(1_001)]
    names = [names[k * order % 1_001] for k in range(1_001)]
    entry = '"%s":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = "{" + ",".join(entry % (name, k, k + 1) for k, name in enumerate(names)) + "}"
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(k % 256 for k in range(1_001)))
    with safeload.safe_open(path, framework="np") as file:
        assert file.keys() == sorted(names)
        assert file.offset_keys() == names
        assert [int(file.get_tensor(name)[0]) for name in names] == [k % 256 for k in range(1_001)]
        assert "h.0.mlp.w00" not in file
        assert "" not in file


OWN = "own = lambda: {name for name in sys.modules if name.startswith('safeload')}\n"


def printed(code, *arguments):
    command = [sys.executable, "-I", "-c", "import sys, numpy\n" + OWN + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()


def test_the_functions_of_numpy_import_only_what_plain_files_need(tmp_path):
    code = """
import safeload.numpy
imported = own()
safeload.numpy.load_file(sys.argv[1])
safeload.numpy.load(open(sys.argv[1], "rb").read())
print(len(imported), *sorted(own() - imported), "small")
safeload.numpy.load_file(sys.argv[2])
print(*own())
"""
    small, large = pair(tmp_path, (3, 3_000), 64)
    count, then, *modules = printed(code, small, large)
    assert int(count) <= 18
    assert then == "small"
    assert inside.path("jobs") in modules
    assert len(modules) <= 56
    assert not [name for name in modules if "codes" in name or "remote" in name or "quantized" in name]


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
def test_without_a_free_descriptor_the_first_load_fails_and_the_next_works(tmp_path):
    code = """
import errno, os, resource, safeload.numpy
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
def free():
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        return taken
held = free()
count = len(held)
os.close(held.pop())  # for the file, but not for a module
for path in sys.argv[1:]:
    try:
        safeload.numpy.load_file(path)
        print("loaded")
    except OSError as error:
        print(error.errno == errno.EMFILE)
os.close(held.pop())
held += free()
print(len(held) == count)
for descriptor in held:
    os.close(descriptor)
print(len(safeload.numpy.load_file(sys.argv[2])))
"""
    small, large = pair(tmp_path, (3, 3_000), 64)
    assert printed(code, small, large) == ["loaded", "True", "True", "3000"]


def test_reading_imports_nothing_that_opening_did_not():
    """A child that is forked while a thread imports a module would wait for its lock for ever."""
    code = """
import safeload
late = []
for folder in sys.argv[1:]:
    with safeload.open(folder) as checkpoint:
        before = own()
        checkpoint.load(dtype="float32")
        checkpoint.load()
    late += sorted(own() - before)
print(*late, "end")
"""
    assert printed(code, *(fixture.folder for fixture in FIXTURES.values())) == ["end"]


def file_of(name, shape, dtype="F32", itemsize=4, pad="", metadata=""):
    """A file with a single tensor, whose name is written as JSON says."""
    size = itemsize * int(np.prod(shape, dtype=np.int64))
    text = f'{{{metadata}"{name}":{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[0,{size}]}}}}{pad}'.encode()
    return len(text).to_bytes(8, "little") + text + (bytes(range(251)) * (size // 251 + 1))[:size]


LONE = {
    "scalar": file_of("x", ()),
    "rank 8": file_of("x", (1, 2, 1, 3, 1, 1, 2, 1), pad=" " * 3),
    "rank 9": file_of("x", (1, 2, 1, 3, 1, 1, 2, 1, 1)),
    "128 bytes": file_of("é" * 64, (3,)),
    "129 bytes": file_of("é" * 64 + "x", (3,)),
    "escapes": file_of(r"a\u00e9\"\n", (3,)),
    "no name": file_of("", (3,)),
    "metadata": file_of("x", (5,), metadata='"__metadata__":{"a":"b"},'),
    "empty": file_of("x", (0, 3)),
    "bfloat16": file_of("x", (7,), "BF16", 2),
    "large": file_of("x", (1 << 20,), "F64", 8),
    "unaligned": file_of("x", (5,), pad=" "),
    "all unaligned": file_of("x", (5,), pad="  "),
}


@pytest.mark.parametrize("data", LONE.values(), ids=LONE)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("copy", [True, False])
def test_a_single_tensor_in_memory_equals_the_file(data, kind, copy, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    ((name, array),) = load(kind(data), copy=copy).items()
    ((expected, reference),) = load_file(path, backend="pread").items()
    assert name == expected
    assert (array.dtype, array.shape) == (reference.dtype, reference.shape)
    assert array.tobytes() == reference.tobytes()
    assert array.flags.aligned
    if copy:
        array[...] = 0  # writable, and no view of the caller's bytes
        assert load(data)[name].tobytes() == reference.tobytes()


FAULTS = [b"", b"\0" * 7, b"\1" + b"\0" * 7 + b"{", LONE["rank 8"][:-1], LONE["scalar"] + b"\0"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_single_tensor_in_memory_are_named(fault):
    with pytest.raises(safeload.FormatError) as plain:
        load(fault)
    with pytest.raises(safeload.FormatError) as viewed:
        load(memoryview(fault), copy=False)
    assert str(plain.value) == str(viewed.value) != ""


def test_the_copy_of_a_single_tensor_cannot_be_resized():
    array = load(LONE["rank 8"])["x"]
    with pytest.raises((BufferError, AttributeError)):
        array.base.obj.clear()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted on CPython 3.11")
def test_a_single_tensor_in_memory_takes_few_steps():
    data = file_of("model.layers.0.weight", (16,))
    assert calls_of(lambda: load(data)) <= 12
