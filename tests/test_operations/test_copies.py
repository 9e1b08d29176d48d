"""Plain tensors are converted to safetensors in columns, with the bytes that tensor by tensor has."""

import json
import os
import threading

import numpy as np
import pytest
from builders import inside
from builders.mixed_tensors import many, tensor
from builders.remote import Served
from builders.rooms import without_room
from builders.thorough import dealt

import safeload
from safeload.errors import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.inner, pytest.mark.any_python]

SCHEMES = ("q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl", "mxfp4", "tq1_0")


def written(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def unordered(path, tensors):
    """A file whose bytes are in the order of the dict, as safetensors itself writes none."""
    header, data = {}, b""
    codes = {"float32": "F32", "float16": "F16", "int64": "I64"}
    for name, array in tensors.items():
        code = codes[array.dtype.name]
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    return written(path, header, data)


@pytest.fixture
def model(tmp_path):
    save_file(many(300), tmp_path / "model.safetensors", {"origin": "here", "z": "1"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def folder(model, tmp_path):
    safeload.convert(model, tmp_path / "folder", max_shard_size=100_000)
    (tmp_path / "folder" / "config.json").write_text('{"torch_dtype": "float32", "model_type": "none"}')
    return tmp_path / "folder"


def contents(path):
    return {one.name: one.read_bytes() for one in path.iterdir()} if path.is_dir() else path.read_bytes()


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Converts in columns and tensor by tensor, and returns what each has written, with its report."""

    def run(source, suffix=".safetensors", **options):
        found = []
        for name in ("columns", "tensors"):
            place = tmp_path / f"{name}{suffix}"
            with monkeypatch.context() as patch:
                inside.tune(patch, **({"spans_of": lambda *_: None} if name == "tensors" else {"tensor_maker": None}))
                report = safeload.convert(source, place, overwrite=True, **options)
            found.append((contents(place), report._replace(destination="", files=len(report.files), seconds=0)))
        return found

    return run


@pytest.mark.parametrize(
    ("options", "source"),
    dealt(
        [
            {},
            {"dtype": "bfloat16"},
            {"dtype": "float32"},
            {"dtype": "float64", "only": "y.*"},
            {"drop": ["x.*", "*1*"]},
            {"only": "x.*", "rename": [("^x", "a"), (r"\d", "9\\g<0>")]},
            {"metadata": {"more": "1", "z": None}},
            {"threads": 1},
        ],
        ["model", "folder"],
    ),
    ids=str,
)
def test_the_bytes_are_those_of_tensor_by_tensor(both, request, source, options):
    path = request.getfixturevalue(source)
    for suffix, more in ((".safetensors", {}), ("", {"max_shard_size": 30_000})):
        one, other = both(path, suffix, **options, **more)
        assert one == other


def test_names_in_their_given_order(both, model):
    names = list(load_file(model))[::-3]
    one, other = both(model, names=names)
    assert one == other
    one, other = both(model, "", names=names, max_shard_size=9_000)
    assert one == other


def test_tensors_in_any_order_and_across_buffers(both, tmp_path):
    """More than 4 MiB are read ahead, in buffers of a quarter of the bytes."""
    tensors = {f"{k * 37 % 101}": tensor(("float32", "float16", "int64")[k % 3], (k * 97 % 900,)) for k in range(101)}
    tensors["large"] = tensor("float32", (2_000_001,))  # several buffers
    tensors |= {f"after.{k}": tensor("float16", (k * 997 % 9001,)) for k in range(40)}
    source = unordered(tmp_path / "source.safetensors", tensors)
    for options in ({}, {"dtype": "float16"}, {"dtype": "float64"}):
        one, other = both(source, **options)
        assert one == other


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
def test_blocks_are_dequantized(both, tmp_path, suffix):
    """And those that stay as they are. Blocks have 32 or 256 elements; a large tensor takes several buffers."""
    tensors = {f"{k}.{scheme}": tensor("float32", (k, 3, 512)) for k in range(4) for scheme in SCHEMES}
    tensors |= {"large.q4_k": tensor("float32", (9000, 256)), "large.q8_0": tensor("float16", (3, 1_600_000))}
    tensors |= {"bias": tensor("float32", (5,)), "ids": tensor("int64", (3,))}
    quantize = {f"*.{scheme}": scheme for scheme in SCHEMES}
    safeload.convert(tensors, tmp_path / f"source{suffix}", quantize=quantize, format=suffix[1:])
    for options in ({}, {"dtype": "bfloat16"}, {"dtype": "float32", "only": "*[024]*", "rename": [("q", "x")]}):
        for name, more in ((".safetensors", {}), ("", {"max_shard_size": 30_000})):
            one, other = both(tmp_path / f"source{suffix}", name, **options, **more)
            assert one == other


def test_other_formats(both, model, tmp_path):
    plain = {name.strip(): array for name, array in load_file(model).items() if array.dtype.kind in "fiub"}
    plain = {f"{k}": array for k, array in enumerate(plain.values())}
    np.savez(tmp_path / "source.npz", **plain)
    one, other = both(tmp_path / "source.npz")
    assert one == other


def test_no_tensor_at_all(both, tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    for suffix, more in ((".safetensors", {}), ("", {"max_shard_size": 30_000})):
        with pytest.raises(SafeloadError, match="no tensor to convert"):
            both(tmp_path / "none.safetensors", suffix, **more)


def test_behind_a_url(model, tmp_path):
    served = Served({"mem://x/model.safetensors": model.read_bytes()})
    with safeload.open(served.at("mem://x/model.safetensors")) as opened:
        safeload.convert(opened, tmp_path / "out.safetensors")
    assert without_room(tmp_path / "out.safetensors") == model.read_bytes()
    assert len(served.requests) < 10


def test_errors_are_the_same(model, tmp_path):
    out = tmp_path / "out.safetensors"
    with pytest.raises(safeload.TensorNotFoundError, match="only='nothing"):
        safeload.convert(model, out, only="nothing*")
    with pytest.raises(ValueError, match="the same name 'a'"):
        safeload.convert(model, out, rename=("(?s)^.+$", "a"))
    with pytest.raises(SafeloadError, match="lone surrogate"):
        safeload.convert(model, out, rename=("^x", "\udc80"))
    written(tmp_path / "f4.safetensors", {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1")
    with pytest.raises(UnsupportedError, match="F4"):
        safeload.convert(tmp_path / "f4.safetensors", out)
    assert not out.exists()


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be made shorter")
def test_a_file_that_became_shorter_leaves_nothing(model, tmp_path):
    with safeload.open(model) as opened:
        os.truncate(model, model.stat().st_size - 20)
        with pytest.raises(FormatError, match=r"model\.safetensors") as caught:
            safeload.convert(opened, tmp_path / "out.safetensors")
    assert caught.value.tensor is not None
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_progress_ends_with_all_bytes(model, tmp_path):
    for dtype, place, more in (
        (None, "a.safetensors", {}),
        ("float64", "b.safetensors", {}),
        (None, "c", {"max_shard_size": 5000}),
    ):
        seen = []
        safeload.convert(model, tmp_path / place, dtype=dtype, progress=lambda *at, seen=seen: seen.append(at), **more)
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 0


def test_no_thread_is_left(model, tmp_path):
    large = {"large": np.ones((3000, 1000), np.float32)}  # read ahead on a thread
    before = threading.active_count()

    most = []

    def stop(done, total):
        most.append(threading.active_count())
        raise KeyError("stop")

    safeload.convert([model, large], tmp_path / "large.safetensors")
    with pytest.raises(KeyError):
        safeload.convert(tmp_path / "large.safetensors", tmp_path / "a.safetensors", progress=stop)
    assert max(most) > before
    assert threading.active_count() == before
    assert not (tmp_path / "a.safetensors").exists()


# ---- writing small arrays together ----


def test_small_arrays_are_written_together(tmp_path):
    """The bytes are those of arrays that are written one by one, whatever is between them."""
    tensors = many(200)
    sizes = (1, 3000, 65_535, 65_536, 65_537)  # a small one has up to 64 KiB, and 1 MiB of them are written together
    tensors |= {f"of {size} {k}": np.full(size, k, np.uint8) for k in range(30) for size in sizes}
    assert sum(array.nbytes for array in tensors.values() if array.nbytes <= 65_536) > 3 << 20
    tensors["transposed"] = np.arange(12, dtype=np.float32).reshape(3, 4).T
    tensors["big-endian"] = np.arange(5, dtype=">f4")
    tensors["large"] = np.arange(100_000, dtype=np.float32)
    save_file(tensors, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    assert safeload.numpy.save(tensors) == content
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert header.keys() == tensors.keys()
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        array = tensors[name]
        one = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
        assert content[start:][slice(*entry["data_offsets"])] == one.tobytes()
    assert start + end == len(content)
