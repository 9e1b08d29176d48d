"""convert between everything that can be read and written."""

import io
import json
import os
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from builders.cuts import killed_at_the_end
from builders.inside import main, npy, registry
from builders.models import moondream
from builders.paths import DATA
from builders.random import rng
from builders.rooms import without_room
from builders.thorough import part_of
from builders.torch_build import Storage, tensor, zip_file

import safeload
from safeload import QuantizedTensor, RangeError, convert, quantize
from safeload.layouts import MOONDREAM2
from safeload.numpy import load_file, save_file


def model():
    return {
        "model.embed_tokens.weight": rng.standard_normal((50, 64)).astype(ml_dtypes.bfloat16),
        "model.layers.0.up_proj.weight": rng.standard_normal((96, 64)).astype(ml_dtypes.bfloat16),
        "model.layers.1.up_proj.weight": rng.standard_normal((96, 64)).astype(np.float16),
        "model.norm.weight": rng.standard_normal(64).astype(np.float32),
        "ids": np.arange(12, dtype=np.int64).reshape(3, 4),
        "empty": np.zeros((0, 3), np.float32),
    }


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file(model(), path, {"origin": "here"})
    return path


def same(got, want):
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        other = got[name]
        if isinstance(value, QuantizedTensor):
            assert other == value, name
        else:
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert other.tobytes() == value.tobytes(), name


def test_the_same_format(source, tmp_path):
    convert(source, tmp_path / "copy.safetensors")
    assert without_room(tmp_path / "copy.safetensors") == source.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "F8_E4M3"])
def test_another_dtype(source, tmp_path, dtype):
    convert(source, tmp_path / "out.safetensors", dtype=dtype, threads=3)
    same(load_file(tmp_path / "out.safetensors"), load_file(source, dtype=dtype))


def test_npz_and_back(source, tmp_path):
    with pytest.raises(safeload.UnsupportedError, match=r"'model.embed_tokens.weight' is bfloat16, .* pass dtype="):
        convert(source, tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()
    convert(source, tmp_path / "x.npz", dtype="float32")
    with np.load(tmp_path / "x.npz") as archive:
        same(dict(archive), load_file(source, dtype="float32"))
    convert(tmp_path / "x.npz", tmp_path / "back.safetensors")
    same(load_file(tmp_path / "back.safetensors"), load_file(source, dtype="float32"))


def test_moon_takes_float16_only(source, tmp_path):
    floats = [name for name in model() if name != "ids"]
    with pytest.raises(safeload.UnsupportedError, match="'ids' is int64"):
        convert(source, tmp_path / "x.moon", dtype="float16")
    with pytest.raises(safeload.UnsupportedError, match="bfloat16; MOON holds only float16"):
        convert(source, tmp_path / "x.moon", names=floats)
    convert(source, tmp_path / "x.moon", names=floats, dtype="float16")
    with safeload.open(tmp_path / "x.moon") as opened:
        assert list(opened) == floats
        same(dict(opened), load_file(source, names=floats, dtype="float16"))


@pytest.mark.parametrize("scheme", ["int8", "q4_0", "q8_0"])
def test_quantized(source, tmp_path, scheme):
    convert(source, tmp_path / "q.safetensors", quantize=scheme)
    with safeload.open(tmp_path / "q.safetensors") as opened:
        want = {
            name: quantize(array, scheme) if "up_proj" in name else array for name, array in model_of(source).items()
        }
        want["lm_head.weight"] = quantize(want["model.embed_tokens.weight"], scheme)  # the tied head
        same(dict(opened), want)
        assert opened.metadata == {"origin": "here"}
    convert(tmp_path / "q.safetensors", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "q.safetensors").read_bytes()
    convert(tmp_path / "q.safetensors", tmp_path / "restored.safetensors", dtype="float32")
    for name, array in load_file(tmp_path / "restored.safetensors").items():
        value = want[name]
        np.testing.assert_array_equal(array, value.dequantize() if isinstance(value, QuantizedTensor) else value)


def model_of(path):
    return {name: array.copy() for name, array in load_file(path).items()}


def test_mixed_precision_and_a_value_that_cannot_be(source, tmp_path):
    out = tmp_path / "q.safetensors"
    convert(source, out, quantize={"*.0.*": "q8_0", "*.1.*": None}, dtype="float32")
    with safeload.open(out) as opened:
        assert opened["model.layers.0.up_proj.weight"].scheme == "q8_0"
        assert opened["model.layers.1.up_proj.weight"].dtype == np.float32
    bad = model()
    bad["model.layers.0.up_proj.weight"][3, 5] = np.inf
    before = out.read_bytes()
    with pytest.raises(safeload.RangeError, match=r"'model.layers.0.up_proj.weight': element \[3, 5\]"):
        convert(bad, out, quantize="int8", overwrite=True)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.safetensors", "source.safetensors"]


@pytest.mark.parametrize(("limit", "count"), [(10_000, 3), ("30KB", 2), ("1GiB", 1), (1, 6)])
def test_shards_and_back(source, tmp_path, limit, count):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    folder = tmp_path / "shards"
    convert(source.parent, folder, max_shard_size=limit)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    if count == 1:
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    else:
        assert files == [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in model().values())
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}
    with safeload.open(folder) as opened:
        same(dict(opened), load_file(source))
        assert opened.config == {"model_type": "llama"}
    convert(folder, tmp_path / "back.safetensors")
    same(load_file(tmp_path / "back.safetensors"), load_file(source))
    assert "total_size" not in safeload.open(tmp_path / "back.safetensors").metadata  # the index's own, of other files
    with pytest.raises(FileExistsError):
        convert(source, folder, max_shard_size=limit)
    convert(source, folder, max_shard_size=limit, overwrite=True)


def test_quantized_shards(source, tmp_path):
    convert(source, tmp_path / "shards", quantize="int8", max_shard_size=7000)
    want = {n: quantize(a, "int8") if "up_proj" in n else a for n, a in model_of(source).items()}
    want["lm_head.weight"] = quantize(want["model.embed_tokens.weight"], "int8")
    same(dict(safeload.open(tmp_path / "shards")), want)


def test_torch_and_dicts_and_checkpoints(tmp_path):
    archive = tmp_path / "m.pth"
    archive.write_bytes(zip_file({"w": tensor(Storage("0", np.ones(2, np.float32))), "step": 7}))
    convert(archive, tmp_path / "m.safetensors")
    with safeload.open(archive) as opened:
        same(load_file(tmp_path / "m.safetensors"), dict(opened))
        convert(opened, tmp_path / "n.safetensors")
        convert(dict(opened), tmp_path / "o.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "n.safetensors").read_bytes()
    assert safeload.open(tmp_path / "m.safetensors").metadata == {"step": "7"}


def test_every_torch_file_becomes_safetensors(data, tmp_path):
    for path in sorted((data / "torch").rglob("*.p*")):
        try:
            with safeload.open(path) as opened:
                want = {name: np.ascontiguousarray(array) for name, array in opened.items()}
        except safeload.SafeloadError:
            continue
        out = tmp_path / f"{path.stem}.safetensors"
        convert(path, out, overwrite=True)
        got = load_file(out)
        assert got.keys() == want.keys()
        for name, array in want.items():
            assert got[name].tobytes() == array.tobytes()


def test_several_sources_are_merged(tmp_path):
    one_file, two = tmp_path / "1.safetensors", tmp_path / "2.npz"
    save_file({"a": np.ones(3, np.float32)}, one_file, {"x": "1", "y": "1"})
    npy.write_archive({"b": np.zeros(2)}, None, two)
    convert([one_file, two], tmp_path / "both.safetensors")
    same(load_file(tmp_path / "both.safetensors"), {"a": np.ones(3, np.float32), "b": np.zeros(2)})
    npy.write_archive({"a": np.zeros(2)}, None, two)
    with pytest.raises(safeload.SafeloadError, match=r"tensor 'a' is in both .*1\.safetensors and .*2\.npz"):
        convert([one_file, two], tmp_path / "no.safetensors")


def test_names(source, tmp_path):
    convert(source, tmp_path / "x.safetensors", names=["ids"])
    assert list(load_file(tmp_path / "x.safetensors")) == ["ids"]
    with pytest.raises(safeload.TensorNotFoundError, match="nope"):
        convert(source, tmp_path / "y.safetensors", names=["ids", "nope"])


def test_moondream_to_moon(tmp_path):
    tensors = {name: array.astype(np.float32) for name, array in moondream().items()}
    save_file(tensors, tmp_path / "m.safetensors")
    convert(tmp_path, tmp_path / "moondream.bin", layout=MOONDREAM2, dtype="float16")
    with safeload.open(tmp_path / "moondream.bin") as opened:
        assert list(opened) == [tensor.name for tensor in MOONDREAM2.tensors]
        want = safeload.stack(tensors, MOONDREAM2, dtype="float16")
        same(dict(opened), want)
    convert(tmp_path / "m.safetensors", tmp_path / "q.safetensors", layout=MOONDREAM2, quantize={"t_fc1_w": "int8"})
    got = safeload.open(tmp_path / "q.safetensors")["t_fc1_w"]
    assert got == quantize(safeload.stack(tensors, MOONDREAM2)["t_fc1_w"], "int8", axis=0)


@pytest.mark.parametrize(
    ("arguments", "kind", "fragment"),
    [
        ({"dst": "x.unknown"}, ValueError, "the suffix must be one of"),
        ({"dst": "x.pth"}, ValueError, "the suffix must be"),
        ({"dst": "x.safetensors", "max_shard_size": "1GB"}, ValueError, "a folder"),
        ({"dst": "y", "max_shard_size": "many"}, ValueError, "'many' is not a size"),
        ({"dst": "y", "max_shard_size": 0}, ValueError, "at least 1 byte"),
        ({"dst": "x.npz", "dtype": "int32"}, safeload.UnsupportedError, "int32"),
        ({"dst": "x.safetensors", "quantize": "iq3_s"}, ValueError, "writable schemes are int8"),
        ({"dst": "x.safetensors", "threads": 0}, ValueError, "threads"),
        ({"dst": "source.safetensors"}, FileExistsError, "pass overwrite=True to replace it"),
        ({"dst": "x.safetensors", "src": []}, ValueError, "src is an empty list"),
    ],
)
def test_wrong_arguments(source, tmp_path, arguments, kind, fragment):
    arguments = {"src": source, **arguments}
    with pytest.raises(kind, match=fragment):
        convert(arguments.pop("src"), tmp_path / arguments.pop("dst"), **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["source.safetensors"]


HALF = {"w": np.ones((2, 2), np.float16)}


@pytest.mark.parametrize(
    ("dst", "options", "fragment"),
    [
        (
            "pytorch_model.bin",
            {},
            r"read \.bin as a torch file: use one of \.safetensors, .*\.moon, .*format=\"moon\"",
        ),
        ("MODEL.BIN", {}, "torch file"),
        ("x.bin", {"dtype": "float16", "only": "w"}, "torch file"),
        ("x.bin", {"format": "gguf"}, "the suffix of a format other than gguf: use .gguf"),
        ("x.bin", {"format": "safetensors"}, "use .safetensors"),
        ("x.pt", {"format": "moon"}, r"use \.moon or \.bin"),
        ("x.safetensors", {"format": "npz"}, "use .npz"),
        ("x.moon", {"format": "torch"}, "unknown format 'torch', expected one of safetensors, gguf, npz, npy, moon"),
        ("x", {"format": "moon", "max_shard_size": "1GB"}, "folder of safetensors shards, got format='moon'"),
        ("x.bin", {"max_shard_size": "1GB"}, "the suffix of a file"),
        ("memory://made/x", {"format": "gguf"}, "folder of safetensors shards, got format='gguf'"),
    ],
)
def test_a_format_that_contradicts_the_name_is_refused(tmp_path, dst, options, fragment):
    with pytest.raises(ValueError, match=fragment):
        convert(HALF, dst if "://" in dst else tmp_path / dst, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dst", "format"),
    [
        ("x.bin", "moon"),
        ("pytorch_model.BIN", "moon"),
        ("x", "moon"),
        ("x", "safetensors"),
        ("x.part", "gguf"),
        ("x.npz", "npz"),
        ("v1.5", "npy"),
    ],
)
def test_a_format_without_its_suffix(tmp_path, dst, format):
    assert convert(HALF, tmp_path / dst, format=format).format == format
    assert safeload.open(tmp_path / dst).format == format


def test_a_folder_takes_its_only_format(tmp_path):
    save_file(HALF, tmp_path / "x.safetensors")
    plans = [
        safeload.plan_convert(tmp_path / "x.safetensors", tmp_path / "out", max_shard_size=99, **more)
        for more in ({}, {"format": "safetensors"})
    ]
    assert plans[0].id == plans[1].id
    with pytest.raises(ValueError, match="got format='npz'"):
        safeload.plan_convert(tmp_path / "x.safetensors", tmp_path / "out", max_shard_size=99, format="npz")


def test_onto_itself(source):
    # Windows does not replace mapped files.
    want = load_file(source, dtype="float16", backend="pread" if os.name == "nt" else "mmap")
    convert(source, source, dtype="float16", overwrite=True)
    same(load_file(source), want)


def test_progress(source, tmp_path):
    seen = []
    convert(source, tmp_path / "x.safetensors", progress=lambda done, total: seen.append((done, total)))
    total = sum(array.nbytes for array in model().values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_file_that_shrinks(source, tmp_path):
    with safeload.open(source) as opened:
        os.truncate(source, os.path.getsize(source) - 100)
        with pytest.raises(safeload.FormatError) as caught:
            convert(opened, tmp_path / "x.safetensors")
    assert caught.value.path == str(source)
    assert [p.name for p in tmp_path.iterdir()] == ["source.safetensors"]


# ---- whole processes ----

_MEASURE = """
import sys
import safeload

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

small, small_out, large, out, options = sys.argv[1:]
safeload.convert(small, small_out, **eval(options))  # imports 170 modules, which take 12 MiB, or 14 without the GIL
before = peak()
safeload.convert(large, out, **eval(options))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """134 MB in tensors of 16 MiB."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    block = np.resize(rng.standard_normal(100_003).astype(ml_dtypes.bfloat16), (2048, 4096))
    save_file({f"model.layers.{k}.up_proj.weight": block for k in range(8)}, path, durable=False)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="peak RSS is read from /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer holds freed memory back")
@pytest.mark.parametrize(
    ("name", "options"),
    part_of(
        [
            ("x.safetensors", {"dtype": "float16"}),
            ("x.safetensors", {"quantize": "q4_0"}),
            ("x.safetensors", {"quantize": "int8"}),
            ("x.npz", {"dtype": "float16"}),
            ("x.moon", {"dtype": "float16"}),
            ("x", {"max_shard_size": "50MB"}),
        ],
        1,
        2,
    ),
)
def test_memory_is_one_tensor_and_little_more(large, tmp_path, name, options):
    paths = DATA / "silero_vad_16k.safetensors", tmp_path / f"small-{name}", large, tmp_path / name
    command = [sys.executable, "-I", "-c", _MEASURE, *map(str, paths), repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (32 << 20) + (64 << 20)


@pytest.mark.no_core
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_killed_at_any_moment_there_is_no_half_file(tmp_path):
    """Before its first byte, between its tensors, and about when it gets its name."""
    source, out = tmp_path / "source.safetensors", tmp_path / "x.safetensors"
    block = np.full((1024, 2048), 1.5, ml_dtypes.bfloat16)
    save_file({f"model.layers.{k}.up_proj.weight": block for k in range(8)}, source, durable=False)
    finished, moments = 0, ((0, 0.02), (0.2, 0), (0.5, 0), (0.8, 0), (1, 0), (1, 0.01))
    for share, seconds in moments:

        def work(report):
            report(0)
            convert(source, out, dtype="float32", overwrite=True, progress=lambda done, total: report(done / total))

        with killed_at_the_end(work) as reports:
            while float(reports.readline()) < share:
                pass
            time.sleep(seconds)
        if out.exists():
            finished += 1
            loaded = load_file(out)
            assert len(loaded) == 8
            assert all((array == 1.5).all() for array in loaded.values())
            out.unlink()
    assert finished < len(moments)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"metadata": {}}),
        ({"drop": "a*"}, {"drop": ["a*"]}),
        ({"quantize": "int8", "keep": "a*"}, {"quantize": "int8", "keep": ("a*",)}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
    ],
    ids=["no metadata", "one pattern", "patterns", "names of a dtype"],
)
def test_options_that_mean_the_same_make_the_same_plan(one, other, tmp_path):
    """So that what Python began the command line can resume."""
    save_file({"a1": np.ones((32, 32), np.float32), "b": np.ones((64, 32), np.float32)}, tmp_path / "x.safetensors")
    plans = [
        safeload.plan_convert(tmp_path / "x.safetensors", tmp_path / "out", max_shard_size="1KB", **options)
        for options in (one, other)
    ]
    assert plans[0] == plans[1]


# ---- command line ----


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs ``safeload convert`` in the folder of the test; its exit status, stdout and stderr."""

    def run(*arguments):
        status = main(["convert", *map(str, arguments)])
        return (status, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    return run


def test_command_line(source, tmp_path, command):
    status, out, err = command(source, "out.safetensors", "--dtype", "float16")
    assert (status, out, err) == (0, "out.safetensors: safetensors, 6 tensors, 35 KiB\n", "")
    same(load_file(tmp_path / "out.safetensors"), load_file(source, dtype="float16"))
    status, out, err = command(source, "out.safetensors")
    assert (status, out, err) == (1, "", "safeload: out.safetensors already exists; pass --overwrite to replace it\n")
    status, out, _ = command(source, "shards", "--max-shard-size", "10KB", "--quantize", "int8", "--json")
    assert status == 0
    assert json.loads(out)["tensors"] == 7  # with the tied head
    status, out, err = command(source, "x.pth")
    assert status == 2
    assert err.startswith("safeload: 'x.pth': the suffix must be one of")
    status, out, err = command(tmp_path / "missing", "x.npz")
    assert (status, out) == (1, "")
    assert err == f"safeload: No such file or directory: {tmp_path / 'missing'}\n"
    (tmp_path / "bad.safetensors").write_bytes(source.read_bytes()[:-7])
    status, out, err = command("bad.safetensors", "x.npz")
    assert (status, out) == (1, "")
    assert "truncated" in err
    status, out, err = command(source, "x.npz", "--name", "ids", "--name", "empty")
    assert (status, out) == (0, "x.npz: npz, 2 tensors, 598 B\n")


def test_layouts_on_the_command_line(tmp_path, command):
    save_file(moondream(), tmp_path / "m.safetensors")
    status, out, err = command("m.safetensors", "m.bin", "--layout", "moondream2")
    assert (status, err) == (0, "")
    assert out.startswith("m.bin: moon, 36 tensors")
    status, _, err = command("m.safetensors", "n.bin", "--dtype", "float16")
    assert status == 2
    assert err.endswith(f"{', '.join(registry.SUFFIXES)}, or pass --format moon if you mean MOON\n")
    status, out, err = command("m.safetensors", "n.bin", "--dtype", "float16", "--format", "moon")
    assert (status, out.split(",")[0]) == (0, "n.bin: moon"), err
    (tmp_path / "layout.json").write_text('{"name": "x", "tensors": [{"name": "n", "source": "model.text.wte"}]}')
    status, out, err = command("m.safetensors", "n.npz", "--layout", "layout.json")
    assert (status, err) == (0, "")
    assert list(np.load(tmp_path / "n.npz")) == ["n"]


# ---- GGUF ----


def test_gguf_and_back(source, tmp_path):
    convert(source, tmp_path / "x.gguf")
    with safeload.open(tmp_path / "x.gguf") as opened:
        same(opened, load_file(source))
        assert dict(opened.metadata) == {"origin": "here"}
    convert(tmp_path / "x.gguf", tmp_path / "back.safetensors")
    assert without_room(tmp_path / "back.safetensors") == source.read_bytes()
    convert(tmp_path / "x.gguf", tmp_path / "y.gguf")
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()


def test_gguf_is_quantized_as_llama_cpp_does(source, tmp_path):
    convert(source, tmp_path / "x.gguf", quantize={"*up_proj*": "q4_0", "*embed*": "q8_0", "*": None})
    got, plain = safeload.load(tmp_path / "x.gguf"), load_file(source)
    name = "model.layers.0.up_proj.weight"
    assert got[name] == quantize(plain[name], "q4_0", rounding="ggml")
    assert got["model.norm.weight"].tobytes() == plain["model.norm.weight"].tobytes()
    convert(tmp_path / "x.gguf", tmp_path / "y.gguf")  # blocks go as they are
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    convert(tmp_path / "x.gguf", tmp_path / "x.safetensors")
    same(safeload.load(tmp_path / "x.safetensors"), got)


@pytest.mark.parametrize("first", ["int8", "q4_0", "q8_0"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("scheme", ["int8", "q4_0", "q8_0"])
def test_a_quantized_source_is_quantized_as_asked(tmp_path, first, dtype, scheme):
    """What is of the scheme already stays byte for byte, q4_0 moves to q8_0; the rest is dequantized first."""
    weights = {f"model.layers.{k}.up_proj.weight": rng.standard_normal((32, 64)).astype(np.float32) for k in range(2)}
    before = safeload.load_quantized(weights, {"*.0.*": first, "*": None})
    save_file(before, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype=dtype, quantize=scheme, requantize=True)
    got = safeload.load(tmp_path / "b.safetensors")
    for name, value in before.items():
        if not isinstance(value, QuantizedTensor):
            want = quantize(value, scheme)
        else:
            want = value if first == scheme else quantize(value.dequantize(), scheme)
        if isinstance(value, QuantizedTensor) and (first, scheme) == ("q4_0", "q8_0"):
            np.testing.assert_array_equal(got[name].dequantize(), value.dequantize())
        else:
            assert got[name] == want, name
    again = safeload.load_quantized(tmp_path / "a.safetensors", scheme, requantize=True)
    assert all(again[name] == value for name, value in got.items())
    assert again.summary.quantized.keys() | again.summary.kept.keys() == got.keys()


def test_quantized_tensors_that_are_left_become_the_dtype(tmp_path):
    weights = {"model.embed_tokens.weight": np.ones((32, 64), np.float32), "up.weight": np.ones((32, 64), np.float32)}
    save_file({name: quantize(x, "q8_0") for name, x in weights.items()}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="float16", quantize="q4_0")
    got = safeload.load(tmp_path / "b.safetensors")
    assert got["model.embed_tokens.weight"].dtype == np.float16
    assert got["up.weight"].scheme == "q4_0"
    assert "lm_head.weight" not in got  # only a floating embedding makes a quantized head
    convert(tmp_path / "a.safetensors", tmp_path / "c.safetensors", quantize="q4_0")
    assert safeload.load(tmp_path / "c.safetensors")["model.embed_tokens.weight"].scheme == "q8_0"


def test_what_cannot_be_dequantized_is_refused_by_name(tmp_path):
    blocks = QuantizedTensor("q8_k", (2, 256), np.zeros((2, 292), np.uint8))
    for call in (
        lambda: convert({"blk.0.w": blocks}, tmp_path / "x.safetensors", quantize="q4_0"),
        lambda: safeload.load_quantized({"blk.0.w": blocks}, "q4_0"),
    ):
        with pytest.raises(safeload.UnsupportedError, match=r"tensor .blk\.0\.w. is q8_k"):
            call()
    assert not list(tmp_path.iterdir())


GGUF_NAMES = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight", "output_norm.weight")


@pytest.mark.parametrize(
    ("metadata", "output", "tied"),
    [
        ({"general.architecture": "llama"}, False, True),
        ({"general.architecture": "llama"}, True, False),
        ({"general.architecture": "gemma-embedding"}, False, False),
        ({}, False, True),
    ],
)
def test_heads_and_embeddings_of_gguf(tmp_path, caplog, metadata, output, tied):
    """convert and load_quantized agree: the embedding is left, a tied head is quantized from it."""
    tensors = {
        name: rng.standard_normal((64, 32) if "norm" not in name else 32).astype(np.float32) for name in GGUF_NAMES
    }
    if output:
        tensors["output.weight"] = rng.standard_normal((64, 32)).astype(np.float32)
    safeload.gguf.save_file(tensors, tmp_path / "a.gguf", metadata)
    loaded = safeload.load_quantized(tmp_path / "a.gguf", "q8_0")
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", quantize="q8_0")
    got = safeload.load(tmp_path / "b.gguf")
    assert got.keys() == loaded.keys() == tensors.keys() | ({"output.weight"} if tied or output else set())
    assert got["token_embd.weight"].dtype == np.float32
    assert {n for n, v in got.items() if isinstance(v, QuantizedTensor)} == loaded.summary.quantized.keys()
    if tied:
        assert got["output.weight"] == quantize(tensors["token_embd.weight"], "q8_0")
    convert(tmp_path / "a.gguf", tmp_path / "c.gguf", quantize="q8_0", names=GGUF_NAMES)
    assert safeload.load(tmp_path / "c.gguf").keys() == set(GGUF_NAMES)  # the names that were asked for
    assert ("no general.architecture" in caplog.text) == (not metadata)


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_vectors_in_gguf_are_float32(tmp_path, dtype, source):
    """llama.cpp aborts on norms of any other dtype."""
    tensors = {"v": np.linspace(0, 1, 7).astype(source), "m": np.ones((2, 4), source), "s": np.array(0.5, source)}
    convert(tensors, tmp_path / "x.gguf", dtype=dtype)
    got = safeload.load(tmp_path / "x.gguf")
    assert (got["v"].dtype, got["s"].dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(got["v"], tensors["v"].astype(np.float32))
    assert got["m"].dtype == (source if dtype is None else safeload.astype(np.ones(1), dtype).dtype)
    convert(tensors, tmp_path / "x.safetensors", dtype=dtype)
    assert load_file(tmp_path / "x.safetensors")["v"].dtype == got["m"].dtype


def test_a_gguf_file_that_no_engine_loads_is_told_so(source, tmp_path, caplog, command):
    convert(source, tmp_path / "x.gguf", dtype="float16")
    (record,) = caplog.records
    for part in ("x.gguf: no engine will load", "no general.architecture", "model.norm.weight is a Hugging Face name"):
        assert part in record.getMessage()
    caplog.clear()
    good = {"blk.0.attn_q.weight": np.ones((2, 2), np.float32)}
    safeload.gguf.save_file(good, tmp_path / "y.gguf", {"general.architecture": "llama"})
    convert(tmp_path / "y.gguf", tmp_path / "z.gguf")
    convert(source, tmp_path / "z.safetensors")
    assert not caplog.records
    status, _, err = command(source, "w.gguf", "--dtype", "float16")
    assert status == 0
    assert err.startswith(
        "safeload: warning: w.gguf: no engine will load this file: the metadata has no general.architecture"
    )


CONFIG = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 8,
    "text_config": {"dtype": "bfloat16", "rope": {"dtype": "linear"}},
    "label2id": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("config", "dtype", "want"),
    [
        (CONFIG, None, CONFIG),
        (
            CONFIG,
            "F16",
            {**CONFIG, "torch_dtype": "float16", "text_config": {"dtype": "float16", "rope": {"dtype": "linear"}}},
        ),
        ({"dtype": "bfloat16"}, "float32", {"dtype": "float32"}),
        ({"torch_dtype": None}, "float32", {"torch_dtype": "float32"}),
        ({}, "float8_e5m2", {"torch_dtype": "float8_e5m2"}),
        (
            {"text_config": {"torch_dtype": "bfloat16"}},
            "float32",
            {"text_config": {"torch_dtype": "float32"}, "torch_dtype": "float32"},
        ),
    ],
    ids=range(6),
)
def test_the_config_of_a_folder_is_true_of_it(tmp_path, config, dtype, want):
    (tmp_path / "in").mkdir()
    save_file(model(), tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "in", tmp_path / "out", dtype=dtype, max_shard_size="10KB")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == want
    assert json.loads((tmp_path / "in" / "config.json").read_text()) == config


def test_the_command_line_prints_what_was_quantized(source, tmp_path, command):
    status, out, err = command(source, "q.safetensors", "--quantize", "q8_0")
    assert (status, err) == (0, "")
    assert (
        out.splitlines()[1] == f"{sum(x.nbytes for x in model().values()):,} bytes became 23,208 (1.35 times smaller)"
    )
    assert "     3 quantized to q8_0: model.layers.0.up_proj.weight, ..." in out
    assert "     1 kept: matches *embed*: model.embed_tokens.weight" in out
    status, out, _ = command(source, "r.safetensors", "--quantize", "q8_0", "--json")
    assert json.loads(out)["quantized"]["lm_head.weight"] == "q8_0"
    assert json.loads(out)["kept"]["ids"] == "is int64, not floating"


def test_what_gguf_does_not_have(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(safeload.UnsupportedError, match=r"'a' is float8_e4m3fn, .* pass dtype="):
        convert({"a": np.zeros(3, ml_dtypes.float8_e4m3fn)}, path)
    with pytest.raises(safeload.UnsupportedError, match="'b' is bool"):
        convert({"b": np.zeros(3, bool)}, path)
    with pytest.raises(safeload.UnsupportedError, match="'c' is int8 with scales"):
        convert({"c": quantize(np.ones((2, 2)), "int8")}, path)
    assert not path.exists()
    convert({"a": np.ones(3, ml_dtypes.float8_e4m3fn)}, path, dtype="float16")
    assert safeload.load(path)["a"].tolist() == [1, 1, 1]


def test_metadata_from_and_to_gguf(tmp_path):
    values = {"s": "text", "n": np.uint32(3), "f": 0.5, "b": True, "t": ["a", "b"], "i": np.arange(2, dtype=np.int8)}
    safeload.gguf.save_file({"w": np.ones(2, np.float32)}, tmp_path / "x.gguf", values)
    convert(tmp_path / "x.gguf", tmp_path / "y.gguf")
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()
    convert(tmp_path / "x.gguf", tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        texts = {"s": "text", "n": "3", "f": "0.5", "b": "true", "t": '["a", "b"]', "i": "[0, 1]"}
        assert opened.metadata == texts
    foreign = {"step": 3, "nested": {"lr": 0.5}, "mixed": ["a", 1], "none": None, "big": 2**70, "object": {1, 2}}
    (tmp_path / "x.pt").write_bytes(zip_file({"w": tensor(Storage("0", np.ones(2, np.float32))), **foreign}))
    convert(tmp_path / "x.pt", tmp_path / "z.gguf")
    assert safeload.open(tmp_path / "z.gguf").metadata == {
        "step": 3,
        "nested": '{"lr": 0.5}',
        "mixed": '["a", 1]',
        "none": "null",
        "big": str(2**70),
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out.safetensors", {}),
        ("out.safetensors", {"dtype": "float16"}),
        ("out.safetensors", {"quantize": "q8_0"}),
        ("out.safetensors", {"only": ""}),
        ("out.safetensors", {"names": [""]}),
        ("out.gguf", {"metadata": {"general.architecture": "test"}}),
        ("out.npz", {"dtype": "float16"}),
        ("out", {"max_shard_size": 300}),
        ("out", {"max_shard_size": 300, "quantize": "int8"}),
        ("out", {"max_shard_size": 300, "resume": True}),
    ],
)
def test_a_tensor_without_a_name(tmp_path, name, options):
    tensors = {"": np.arange(64, dtype=np.float32).reshape(2, 32), "x": np.ones((2, 32), np.float32)}
    save_file(tensors, tmp_path / "source.safetensors")
    convert(tmp_path / "source.safetensors", tmp_path / name, **options)
    got = safeload.load(tmp_path / name, dtype="float32")
    assert np.allclose(got[""], tensors[""], atol=0.3)
    assert len(got) == (1 if {"only", "names"} & {*options} else 2)


def test_rename_may_not_leave_a_tensor_without_a_name(tmp_path):
    with pytest.raises(ValueError, match="leaves tensor 'x' without a name"):
        convert({"": np.ones(2), "x": np.ones(2)}, tmp_path / "out.safetensors", rename=[("x", "")])


# ---- file objects ----


@pytest.mark.parametrize("options", [{}, {"format": "gguf", "raw": True}, {"format": "npz"}, {"quantize": "q8_0"}])
def test_a_file_object_gets_the_file_from_its_position_on(tmp_path, options):
    weights = {"w": np.arange(64, dtype=np.float32).reshape(2, 32)}
    path = tmp_path / f"x.{options.get('format', 'safetensors')}"
    safeload.convert(weights, path, **options)
    file = io.BytesIO(b"head")
    file.seek(0, os.SEEK_END)
    report = safeload.convert(weights, file, **options)
    assert file.getvalue() == b"head" + path.read_bytes()
    assert (report.destination, report.files, report.nbytes) == ("<BytesIO>", ["<BytesIO>"], path.stat().st_size)


def test_a_file_object_is_unchanged_if_the_conversion_fails():
    file = io.BytesIO()
    with pytest.raises(RangeError, match="is nan"):
        safeload.convert({"w": np.full((2, 32), np.nan, np.float32)}, file, quantize="q8_0")
    assert file.getvalue() == b""


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (io.StringIO, {}, TypeError, "opened in binary mode, got a text file"),
        (io.BytesIO, {"max_shard_size": 10}, ValueError, "need a folder, but the destination is a file object"),
        (io.BytesIO, {"resume": True}, ValueError, "need a folder, but the destination is a file object"),
        (io.BytesIO, {"format": "torch"}, ValueError, "unknown format 'torch', expected one of"),
    ],
)
def test_file_objects_are_refused_by_name(make, options, error, message):
    with pytest.raises(error, match=message):
        safeload.convert({"w": np.ones(3, np.float32)}, make(), **options)
