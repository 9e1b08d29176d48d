"""Plans and pieces of plain tensors take columns; plans, files and refusals are those of tensor by tensor."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import inside
from builders.calls import count_calls
from builders.clusters import RESUME
from builders.executors import processes
from builders.mixed_tensors import DTYPES, SHAPES, many, tensor
from builders.models import small, write_folder
from builders.paths import DATA
from builders.quantized import FIXTURES
from builders.random import rng
from builders.thorough import dealt

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.inner, pytest.mark.no_core]

INDEX = "model.safetensors.index.json"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RESUME}


@pytest.fixture
def file(tmp_path):
    save_file(many(63), tmp_path / "model.safetensors", {"origin": "here", "z": "1"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def folder(file, tmp_path):
    """Shards, one of them without tensors, and a tensor that the index does not list."""
    folder = tmp_path / "folder"
    safeload.convert(file, folder, max_shard_size=20_000)
    save_file({}, folder / "none.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop("y.11.é")
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text('{"torch_dtype": "float32", "model_type": "none"}')
    return folder


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints to merge, with different names."""
    save_file(many(21, "a."), tmp_path / "a.safetensors", {"a": "1"})
    save_file(many(42, "b."), tmp_path / "b.safetensors", {"b": "2"})
    return [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Plans, runs and completes a conversion in columns and tensor by tensor, and compares everything."""

    def run(source, *, columns=True, max_shard_size=9_000, **options):
        results = []
        for way in ("columns", "tensors"):
            place = tmp_path / "out"
            shutil.rmtree(place, ignore_errors=True)
            with monkeypatch.context() as patch:
                if way == "tensors":
                    inside.tune(patch, spans_of=lambda *_: None)
                elif columns:
                    inside.tune(patch, tensor_maker=None)
                plan = safeload.plan_convert(source, place, max_shard_size=max_shard_size, **options)
                plan = json.loads(json.dumps(plan))
                pieces = [json.loads(json.dumps(piece)) for piece in plan["pieces"]]
                report = safeload.finalize(plan, [safeload.run_piece(piece) for piece in reversed(pieces)])
            results.append((plan, contents(place), report.tensors, report.nbytes))
        assert results[0] == results[1]
        whole = tmp_path / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        safeload.convert(source, whole, max_shard_size=max_shard_size, **options)
        assert results[0][1] == contents(whole)
        return results[0][0]

    return run


@pytest.mark.parametrize(
    ("options", "source"),
    dealt(
        [
            {},
            {"dtype": "bfloat16"},
            {"dtype": "float64", "only": "*y.*"},
            {"drop": ["*x.*", "*1*"], "extras": False},
            {"only": "*x.*", "rename": [("^(.*)x", r"\1a"), (r"\d", "9\\g<0>")]},
            {"metadata": {"more": "1", "z": None, "safeload.quantized": "{}"}},
            {"max_shard_size": "5GB", "dtype": "float16"},
        ],
        ["file", "folder", "pair"],
    ),
    ids=lambda part: str(part)[:50],
)
def test_plan_and_bytes_are_those_of_tensor_by_tensor(both, request, source, options):
    plan = both(request.getfixturevalue(source), **options)
    assert len(plan["pieces"]) == 1 if options.get("max_shard_size") == "5GB" else len(plan["pieces"]) > 1


def test_names_in_their_given_order(both, file, folder, pair):
    for source in (file, folder, pair):
        with safeload.open(source) as opened:
            names = list(opened)[::-3]
        both(source, names=names)


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors"])
def test_blocks_are_dequantized(both, tmp_path, suffix):
    tensors = {f"{k}.{scheme}": tensor("float32", (k, 512)) for k in range(5) for scheme in ("q4_0", "q6_k")}
    quantize = {"*.q4_0": "q4_0", "*.q6_k": "q6_k"}
    tensors |= {"large.q4_0": tensor("float16", (64, 512)), "bias": tensor("float16", (7,))}
    safeload.convert(tensors, tmp_path / f"source{suffix}", quantize=quantize, format=suffix[1:])
    for options in ({"dtype": "float16"}, {"dtype": "float64", "rename": [("q", "x")], "drop": "2*"}):
        both(tmp_path / f"source{suffix}", **options)
    both(tmp_path / f"source{suffix}")  # blocks that stay as they are


@pytest.mark.parametrize("quantize", ["q4_0", "q4_k", {"*1*": "q8_0", "*2*": "q6_k", "x.*": "iq4_nl"}], ids=str)
def test_tensors_are_quantized_to_blocks(both, file, tmp_path, quantize):
    """Beside integers, other kept tensors, and blocks of the same type."""
    tensors = {f"x.{k}": tensor("float32", (2, 32 * k)) for k in range(1, 20)}
    tensors |= {"x.large": tensor("float16", (3, 16, 512)), "norm.weight": tensor("float32", (64,))}
    blocks = {f"already.{k}.weight": tensor("float32", (k, 256)) for k in range(1, 9)}
    save_file(tensors, tmp_path / "tensors.safetensors")
    safeload.convert(blocks, tmp_path / "blocks.gguf", quantize="q4_0")
    sources = [file, tmp_path / "tensors.safetensors", *([tmp_path / "blocks.gguf"] if quantize == "q4_0" else [])]
    both(sources, quantize=quantize)
    both(sources, quantize=quantize, dtype="bfloat16", rename=[("^x", "z")], keep="x.1*", drop="*3*")


def test_no_tensor_and_only_empty_tensors(both, tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    with pytest.raises(safeload.SafeloadError, match="no tensor to convert"):
        safeload.plan_convert(tmp_path / "none.safetensors", tmp_path / "made")
    save_file({f"{k}": np.empty((k, 0), np.float32) for k in range(5)}, tmp_path / "empty.safetensors")
    both(tmp_path / "empty.safetensors", dtype="float16")


def test_other_formats(both, tmp_path):
    tensors = {f"{k}": tensor(DTYPES[k % 3], SHAPES[k % 7]) for k in range(40)}
    np.savez(tmp_path / "source.npz", **tensors)
    both(tmp_path / "source.npz", max_shard_size=500)
    floats = {name: array.astype(np.float32) for name, array in tensors.items() if array.size}
    safeload.convert(floats, tmp_path / "source.gguf")
    both(tmp_path / "source.gguf", dtype="float16", max_shard_size=500)
    both([tmp_path / "source.gguf", *([] if os.name == "nt" else [folder_of_one(tmp_path)])], max_shard_size=500)


def test_a_path_with_several_files(both):
    """Chunked arrays of Flax are read through a file of their own, over the same path."""
    both(DATA / "flax" / "chunked.msgpack", dtype="float64", max_shard_size=200)


def folder_of_one(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    save_file({"own": np.arange(3.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"dtype": "float64"}')
    return folder


# ---- what columns do not hold ----


def test_a_mixture_of_quantized_and_plain_tensors(both, tmp_path):
    """Pieces without quantized tensors take columns, though their plan does not."""
    tensors = {f"{k:02}.weight": rng.standard_normal((64, 64)).astype(np.float32) for k in range(6)}
    tensors |= {f"norm.{k:02}": np.ones(64, np.float32) for k in range(100)}
    save_file(tensors, tmp_path / "model.safetensors")
    for options in ({"quantize": "q8_0"}, {"quantize": "int8", "keep": "0[1-3]*", "dtype": "float16"}):
        both(tmp_path / "model.safetensors", columns=False, **options)
    safeload.convert(tmp_path / "model.safetensors", tmp_path / "int8", quantize="int8")
    for options in ({}, {"dtype": "float16"}, {"only": "norm*"}):
        both(tmp_path / "int8", columns=False, **options)


@pytest.mark.parametrize("name", ["fp8_block", "mlx_affine4_g64"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_packed_tensors(both, name, dtype):
    both(FIXTURES[name].path, columns=False, dtype=dtype, max_shard_size=3000)


def test_a_tied_head_and_the_formats_of_engines(both, tmp_path):
    """A head is read under the name of its embedding; headers of engines have no room for changes."""
    write_folder(tmp_path, *small("llama-tied"), shards=2)
    both(tmp_path, columns=False, quantize="q8_0", max_shard_size="40KB")
    both(tmp_path, columns=False, quantize="fp8_dynamic", max_shard_size="40KB")
    both(tmp_path, dtype="float32", max_shard_size="40KB")


def test_tensors_over_the_same_bytes(both, tmp_path):
    torch = pytest.importorskip("torch")
    shared = torch.arange(12, dtype=torch.float32)
    torch.save({"a": shared, "b": shared, "c": shared[2:5], "d": torch.ones(3)}, tmp_path / "model.pt")
    both(tmp_path / "model.pt", columns=False, dtype="float16", max_shard_size=10)


# ---- pieces that were changed ----


def refusal(piece):
    try:
        safeload.run_piece(piece)
    except Exception as error:  # compared below
        return type(error), str(error)
    return None


@pytest.mark.parametrize("index", range(12))
def test_a_forged_piece_is_refused_as_tensor_by_tensor(tmp_path, monkeypatch, index):
    tensors = {"f": np.ones(4, np.float32), "g": np.ones(4, np.float32), "i": np.ones(4, np.int64)}
    save_file(tensors, tmp_path / "x.safetensors")
    piece = safeload.plan_convert(tmp_path / "x.safetensors", tmp_path / "out", dtype="float16").pieces[0]
    runs, sources = piece["tensors"], piece["sources"]
    assert sorted(run["names"] for run in runs) == [["f", "g"], ["i"]]
    changes = [
        {"tensors": [*runs, {"names": ["nothing"]}]},
        {"tensors": [*runs, {"names": ["f"], "dtype": "F32"}]},  # twice; the last one counts
        {"tensors": [{"names": ["f", "g", "i"], "dtype": "F16"}]},
        {"tensors": [{"names": ["f", "g", "i"], "dtype": "Q4_0"}]},
        {"tensors": [{"names": ["f", "g"], "dtype": "F4"}, {"names": ["i"]}]},
        {"tensors": [{"names": ["f", "g"], "dtype": "I32"}, {"names": ["i"]}]},
        {"tensors": [{"names": ["f", 7]}]},
        {"tensors": []},
        {"nbytes": 7},
        {"rename": [["f", "g"]]},
        {"sources": []},
        {"sources": [{**sources[0], "files": [[*sources[0]["files"][0][:2], 5, 0]]}]},
    ]
    forged = {**piece, **changes[index]}
    errors = [refusal(forged)]
    inside.tune(monkeypatch, spans_of=lambda *_: None)
    errors.append(refusal(forged))
    assert errors[0] == errors[1] is not None
    assert issubclass(errors[0][0], (safeload.SafeloadError, ValueError))
    assert not list((tmp_path / "out").glob("*"))


def test_a_file_that_has_changed_or_is_gone(file, tmp_path):
    piece = safeload.plan_convert(file, tmp_path / "out").pieces[0]
    os.utime(file, ns=(1, 1))
    assert refusal(piece)[0] is safeload.FormatError
    file.unlink()
    assert issubclass(refusal(piece)[0], safeload.FormatError)


# ---- speed, counted ----


@pytest.mark.parametrize("layout", ["file", "shards"])
def test_a_plan_and_its_piece_take_no_step_per_tensor(tmp_path, layout):
    counts = []
    for count in (400, 2400):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"model.{k}": np.full(3, k, np.float32) for k in range(count)}, path)
        source = path
        if layout == "shards":
            source = tmp_path / f"{count}"
            safeload.convert(path, source, max_shard_size=count * 12 // 4)
        out = tmp_path / f"out{count}"
        with safeload.open(source) as opened:
            plan = safeload.plan_convert(opened, out, dtype="float16")
            steps = [count_calls(lambda opened=opened, out=out: safeload.plan_convert(opened, out, dtype="float16"))]
        steps.append(count_calls(lambda plan=plan: safeload.run_piece(plan.pieces[0], threads=1)))
        counts.append(steps)
    for few, more in zip(*counts, strict=True):
        assert more - few < 100


def test_a_piece_of_a_few_tensors_does_not_decode_the_rest_of_its_file(tmp_path):
    save_file({f"model.{k:05}": np.full(3, k, np.float32) for k in range(20_000)}, tmp_path / "x.safetensors")
    steps = []
    for count in (20, 500):
        plan = safeload.plan_convert(tmp_path / "x.safetensors", tmp_path / f"{count}", max_shard_size=12 * count)
        safeload.run_piece(plan.pieces[6], threads=1)
        steps.append(count_calls(lambda plan=plan: safeload.run_piece(plan.pieces[7], threads=1)))
    assert abs(steps[1] - steps[0]) < 100
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(tmp_path / "x.safetensors", tmp_path / "threads", max_shard_size=60_000, executor=executor)
    safeload.convert(tmp_path / "x.safetensors", tmp_path / "whole", max_shard_size=60_000)
    assert contents(tmp_path / "threads") == contents(tmp_path / "whole")


@pytest.mark.skipif(os.name == "nt", reason="starts processes")
def test_processes(pair, tmp_path):
    with processes(1) as executor:
        safeload.convert(pair, tmp_path / "out", dtype="f16", max_shard_size="20KB", executor=executor)
    safeload.convert(pair, tmp_path / "whole", dtype="f16", max_shard_size="20KB")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
