"""Conversions and comparisons of many tensors give what each tensor alone gives: at once, in pieces, from memory."""

import json
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders.executors import Plain
from builders.mixed_tensors import many
from builders.random import rng

import safeload
from safeload import SafeloadError
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    save_file(many(200), tmp_path / "model.safetensors", {"origin": "here"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def mixed(tmp_path):
    """A folder of fp8 blocks, a file of int8 with scales and a file of plain tensors."""
    folder = tmp_path / "fp8"
    folder.mkdir()
    codes = rng.standard_normal((256, 128)).astype(ml_dtypes.float8_e4m3fn)
    packed = {f"layers.{k}.up_proj.weight": codes for k in range(3)}
    packed |= {f"{name}_scale_inv": np.full((2, 1), 0.5 + k, np.float32) for k, name in enumerate(list(packed))}
    save_file(packed, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization, "dtype": "bfloat16"}))
    wide = {f"layers.{k}.down_proj.weight": rng.standard_normal((8, 64)).astype(np.float32) for k in range(5)}
    safeload.convert(wide, tmp_path / "int8.safetensors", quantize="int8", keep="layers.0*")
    plain = {name: array for name, array in many(30, "plain.").items() if "float8" not in array.dtype.name}
    save_file(plain, tmp_path / "plain.safetensors")
    return [folder, tmp_path / "int8.safetensors", tmp_path / "plain.safetensors"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- values and shards ----


@pytest.mark.parametrize("threads", [1, 3])
def test_every_tensor_is_converted_as_it_is_alone(model, tmp_path, threads):
    tensors = load_file(model)
    for dtype in (None, "float32", "bfloat16"):
        safeload.convert(model, tmp_path / "out.safetensors", dtype=dtype, threads=threads, overwrite=True)
        converted = load_file(tmp_path / "out.safetensors")
        assert converted.keys() == tensors.keys()
        for name, array in tensors.items():
            is_float = array.dtype.kind in "fV" or "float" in array.dtype.name
            alone = safeload.astype(array, dtype) if dtype and is_float else array
            assert equal(converted[name], alone), (name, dtype)


@pytest.mark.parametrize("limit", [1, 5000, 20_000, 10**9])
def test_shards_have_canonical_names_and_take_tensors_in_order_up_to_the_limit(model, tmp_path, limit):
    safeload.convert(model, tmp_path / "out", max_shard_size=limit)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if len(names) == 1:
        assert names == ["model.safetensors"]
        assert not (tmp_path / "out" / INDEX).exists()
        return
    assert names == [f"model-{k:05}-of-{len(names):05}.safetensors" for k in range(1, len(names) + 1)]
    index = json.loads((tmp_path / "out" / INDEX).read_text("utf-8"))
    shards = [load_file(tmp_path / "out" / name) for name in names]
    listed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    assert index["weight_map"] == listed
    assert set(listed) == set(load_file(model))
    sizes = [sum(array.nbytes for array in shard.values()) for shard in shards]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(
        size <= limit or sum(array.nbytes > 0 for array in shard.values()) == 1
        for size, shard in zip(sizes, shards, strict=True)
    )


@pytest.mark.parametrize("scheme", ["int8", "q8_0", "q4_0"])
def test_small_tensors_are_quantized_as_each_is_alone(tmp_path, scheme):
    tensors = {f"layers.{k}.weight": rng.standard_normal((4 + k % 3, 64)).astype(np.float32) for k in range(40)}
    suffix = ".safetensors" if scheme == "int8" else ".gguf"
    safeload.convert(tensors, tmp_path / f"all{suffix}", quantize=scheme)
    together = safeload.load(tmp_path / f"all{suffix}", dtype="float32")
    for name, array in tensors.items():
        safeload.convert({name: array}, tmp_path / f"one{suffix}", quantize=scheme, overwrite=True)
        assert equal(together[name], safeload.load(tmp_path / f"one{suffix}", dtype="float32")[name])


# ---- pieces ----

MIXTURES = {
    "copies": {},
    "dequantized": {"dtype": "bfloat16"},
    "requantized": {"dtype": "float16", "quantize": {"layers.0.*": "int8"}, "requantize": True},
    "one tensor": {"only": "layers.1.up_proj.weight", "dtype": "float32"},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_pieces_make_the_folder_of_one_call(mixed, tmp_path, name):
    """On an executor, and planned, with pieces and results that go through JSON."""
    options = {"max_shard_size": 9000, **MIXTURES[name]}
    safeload.convert(mixed, tmp_path / "whole", **options)
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(mixed, tmp_path / "pieces", executor=executor, **options)
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    plan = safeload.plan_convert(mixed, tmp_path / "planned", **options)
    results = [safeload.run_piece(json.loads(json.dumps(piece))) for piece in reversed(plan.pieces)]
    safeload.finalize(plan, json.loads(json.dumps(results)))
    assert contents(tmp_path / "planned") == contents(tmp_path / "whole")


def test_statistics_differences_and_findings_in_pieces_are_those_of_one_call(mixed, tmp_path):
    executor = Plain()
    with safeload.open(mixed[1:]) as checkpoint:
        arrays = {name: array for name, array in checkpoint.load(dtype="float32").items() if array.dtype.kind != "c"}
        save_file({name: array.astype(np.float32) * 2 for name, array in arrays.items()}, tmp_path / "b.safetensors")
        pieces, whole = (safeload.stats(checkpoint, histogram=True, executor=each) for each in (executor, None))
        assert repr([*pieces.items()]) == repr([*whole.items()])
        for other in (checkpoint, tmp_path / "b.safetensors"):
            pieces, whole = (safeload.diff(checkpoint, other, executor=each).to_dict() for each in (executor, None))
            assert pieces == whole
        pieces, whole = (safeload.check(checkpoint, executor=each) for each in (executor, None))
    assert (pieces.errors, pieces.warnings, repr(pieces.stats)) == (whole.errors, whole.warnings, repr(whole.stats))
    assert executor.pieces


@pytest.mark.parametrize("piece", [None, 7, [], "x", {}, {"operation": "convert"}, {"operation": "nothing"}])
def test_what_is_no_piece_is_refused(piece):
    with pytest.raises((SafeloadError, ValueError, TypeError)):
        safeload.run_piece(piece)


def test_a_piece_without_one_of_its_fields_does_harm_to_nothing(model, tmp_path):
    """It is refused by name, or the field was optional: then the shard has the values of the source."""
    plan = safeload.plan_convert(model, tmp_path / "out", max_shard_size=20_000)
    source, refused = load_file(model), 0
    for field in plan.pieces[0]:
        piece = {name: value for name, value in json.loads(json.dumps(plan.pieces[0])).items() if name != field}
        try:
            safeload.run_piece(piece)
        except (SafeloadError, ValueError):
            refused += 1
        for path in tmp_path.glob("out/**/*.safetensors"):
            assert all(equal(array, source[name]) for name, array in load_file(path).items())
    assert refused > 2


# ---- sources that break ----


def test_a_source_that_becomes_shorter_is_named_and_leaves_nothing(model, tmp_path):
    with safeload.open(model) as checkpoint:
        with model.open("r+b") as file:
            file.truncate(model.stat().st_size // 2)
        with pytest.raises(SafeloadError, match=r"model\.safetensors"):
            safeload.convert(checkpoint, tmp_path / "out.safetensors")
        with pytest.raises(SafeloadError, match=r"model\.safetensors"):
            safeload.stats(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_progress_ends_with_all_bytes(model, tmp_path):
    seen = []
    safeload.convert(model, tmp_path / "out.safetensors", progress=lambda done, total: seen.append((done, total)))
    size = sum(array.nbytes for array in load_file(model).values())
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


# ---- differences ----


@pytest.mark.parametrize("threads", [1, 3])
def test_one_changed_element_is_found_wherever_it_is(model, tmp_path, threads):
    """In files and in memory; every other tensor stays equal."""
    a = load_file(model)
    for name in [name for name, array in a.items() if array.size and array.dtype.kind in "fiu"][::17]:
        b = dict(a)
        b[name] = a[name].copy()
        at = int(rng.integers(a[name].size))
        b[name].reshape(-1)[at] = 3 if a[name].reshape(-1)[at] != 3 else 4
        save_file(b, tmp_path / "b.safetensors")
        for other in (tmp_path / "b.safetensors", b):
            report = safeload.diff(model, other, threads=threads)
            unequal = {key: row.unequal for key, row in report.tensors.items() if row.unequal}
            assert unequal == {name: 1}
            assert report.tensors[name].index == tuple(map(int, np.unravel_index(at, a[name].shape)))
            assert not report.same


def test_the_same_tensors_in_another_layout_are_equal(model, tmp_path):
    safeload.convert(model, tmp_path / "folder", max_shard_size=10_000)
    save_file(dict(reversed(load_file(model).items())), tmp_path / "other.safetensors")
    for other in (tmp_path / "folder", tmp_path / "other.safetensors", load_file(model)):
        assert safeload.diff(model, other).same
