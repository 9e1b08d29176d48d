"""Operations work on the true weights of quantized checkpoints: each gives what it gives for the weights in float32."""

import json
import logging
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from builders.commands import run
from builders.inside import manifest
from builders.quantized import FIXTURES, IN_GGUF, each_kind, each_kind_with
from builders.rooms import without_room

import safeload
from safeload import Layout, QuantizedTensor, StackedTensor, UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

any_fixture, packed_fixtures = each_kind(), each_kind("bitnet_online")


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in got.items():
        assert (array.dtype, array.shape) == (want[name].dtype, want[name].shape)
        np.testing.assert_array_equal(array, want[name], err_msg=name)


def packed_of(opened):
    return [name for name, value in opened.load().items() if isinstance(value, QuantizedTensor)]


def first_packed(fixture):
    with safeload.open(fixture.path) as opened:
        return packed_of(opened)[0]


# ---- reading ----


@each_kind_with("histogram", {"plain": False, "histogram": True})
def test_stats(fixture, histogram):
    want = safeload.stats(fixture.expected(), histogram=histogram)
    with safeload.open(fixture.path) as opened:
        in_memory = safeload.stats(opened.load(), histogram=histogram)
        for threads in (1, 3):
            got = safeload.stats(fixture.path, histogram=histogram, threads=threads)
            assert got.keys() == want.keys()
            for name, one in got.items():
                assert one.dtype == opened.tensors[name].dtype
                for other in (want[name], in_memory[name]):
                    for a, b in zip(one[1:-1], other[1:-1], strict=True):  # without the bytes that they take
                        np.testing.assert_array_equal(a, b)


@packed_fixtures
def test_stats_of_one_packed_tensor(fixture):
    with safeload.open(fixture.path) as opened:
        name = packed_of(opened)[0]
        one, want = safeload.stats(opened[name]), safeload.stats(fixture.expected()[name])
        assert one.dtype == opened[name].scheme
        for a, b in zip(one[1:-1], want[1:-1], strict=True):
            np.testing.assert_array_equal(a, b)


@any_fixture
def test_diff_of_a_folder_and_its_weights(fixture):
    want = fixture.expected()
    with safeload.open(fixture.path) as opened:
        for a, b in ((fixture.path, want), (want, opened), (opened.load(), want), (fixture.path, opened)):
            report = safeload.diff(a, b)
            assert [report.only_a, report.only_b, report.shapes] == [[], [], {}]
            assert report.tensors.keys() == want.keys()
            assert not any(one.unequal for one in report.tensors.values())


@packed_fixtures
def test_diff_finds_a_difference(fixture):
    want = fixture.expected()
    name = next(name for name in packed_of(safeload.open(fixture.path)) if want[name].size > 5)
    at = tuple(length - 1 for length in want[name].shape)
    want[name] = want[name].copy()
    want[name][at] += 1
    one = safeload.diff(fixture.path, want).tensors[name]
    assert (one.unequal, one.index) == (1, at)


@packed_fixtures
def test_stack(fixture):
    want = fixture.expected()
    name = first_packed(fixture)
    layout = Layout("x", [StackedTensor("w", name)])
    for dtype in (np.float32, ml_dtypes.bfloat16):
        got = safeload.stack(fixture.path, layout, dtype=dtype)
        same(dict(got), {"w": want[name].astype(dtype)})
    for given in (fixture.path, safeload.load(fixture.path)):
        with pytest.raises(UnsupportedError, match="pass dtype= to stack its values"):
            safeload.stack(given, layout)
        same(dict(safeload.stack(given, layout, dtype="float64")), {"w": want[name].astype(np.float64)})


def test_stack_of_layers():
    fixture = FIXTURES["modelopt_nvfp4"]
    want = fixture.expected()
    pattern = next(name for name in want if ".0." in name and want[name].ndim == 2)
    names = sorted(name for name in want if name.split(".0.")[0] == pattern.split(".0.")[0] and name == pattern)
    layout = Layout("x", [StackedTensor("w", pattern)])
    got = safeload.stack(fixture.path, layout, dtype="float32")
    np.testing.assert_array_equal(got["w"], want[names[0]])


@each_kind_with("scheme", {scheme: scheme for scheme in ("q8_0", "q4_0", "int8")})
def test_load_quantized(fixture, scheme):
    want = fixture.expected()

    def keep(name):
        return want[name].ndim != 2 or not want[name].size or (scheme != "int8" and want[name].shape[-1] % 32)

    options = {"keep": keep, "tie_lm_head": False, "requantize": True}
    got, expected, in_memory = (
        safeload.load_quantized(given, scheme, **options) for given in (fixture.path, want, safeload.load(fixture.path))
    )
    for one in (got, in_memory):
        assert one.keys() == expected.keys()
        for name, value in one.items():
            if getattr(value, "scheme", None) == "nvfp4":  # blocks that are kept stay blocks, with their scale
                assert keep(name)
                np.testing.assert_array_equal(np.asarray(value), want[name])
                continue
            assert type(value) is type(expected[name])
            if one.summary.codes.get(name, "").startswith("codes of "):
                np.testing.assert_array_equal(np.asarray(value), want[name])
            elif isinstance(value, QuantizedTensor):
                assert value == expected[name]
            else:
                np.testing.assert_array_equal(value, expected[name])


@packed_fixtures
def test_quantization_error(fixture):
    want = fixture.expected()
    got = safeload.quantization_error(want, fixture.path)
    assert got.keys() == set(packed_of(safeload.open(fixture.path)))
    assert all(error.max_error == 0 for error in got.values())
    name = next(name for name in got if want[name].size)
    changed = {**want, name: want[name] + 1}
    assert safeload.quantization_error(changed, fixture.path)[name].max_error > 0.5


@any_fixture
def test_manifest_is_that_of_a_copy_in_one_file(fixture, tmp_path):
    made = manifest.make(fixture.path)
    safeload.convert(fixture.path, tmp_path / "x.safetensors")
    assert manifest.make(tmp_path / "x.safetensors") == made
    assert safeload.verify(tmp_path / "x.safetensors", fixture.path, tensors=True).ok
    with safeload.open(fixture.path) as opened:
        assert manifest.make(opened) == made
        for name, entry in made["tensors"].items():
            assert entry["shape"] == list(opened.tensors[name].shape)
            assert entry["dtype"] == opened.tensors[name].dtype


def test_manifest_finds_a_changed_scale(tmp_path):
    fixture = FIXTURES["fp8_block"]
    folder = tmp_path / "x"
    shutil.copytree(fixture.path, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, array in tensors.items():
            if name.endswith("_scale_inv"):
                tensors[name] = array * 2
        save_file(tensors, file)
    faults = safeload.verify(folder, fixture.path, tensors=True).faults
    assert {check.tensor for check in faults} == set(packed_of(safeload.open(folder)))


@any_fixture
def test_validate_finds_no_fault(fixture):
    with safeload.open(fixture.path) as opened:
        for given in (fixture.path, opened, opened.load()):
            for values in (True, False):
                report = safeload.check(given, schema=None, values=values)
                assert report.ok, str(report)
                assert report.stats.keys() == (fixture.expected().keys() if values else set())


# ---- writing ----


@any_fixture
def test_a_file_without_dtype_keeps_the_stored_bytes_and_opens_alone(fixture, tmp_path):
    want, stored = fixture.expected(), fixture.stored()
    safeload.convert(fixture.path, tmp_path / "a.safetensors")
    save_file(safeload.load(fixture.path), tmp_path / "b.safetensors")
    with safeload.open(fixture.path) as opened:
        parts = {part for value in opened.load().values() if isinstance(value, QuantizedTensor) for part in value.parts}
        plain = [name for name, value in opened.items() if not isinstance(value, QuantizedTensor)]
        labels = {name: info.dtype for name, info in opened.tensors.items()}
    for name in ("a.safetensors", "b.safetensors"):
        path = tmp_path / name
        raw = safeload.load(path, stored=True)
        # A conversion also keeps what only activations need.
        assert raw.keys() == (stored.keys() if name == "a.safetensors" else parts | set(plain))
        for part, array in raw.items():
            assert (array.dtype, array.shape) == (stored[part].dtype, stored[part].shape)
            assert array.tobytes() == stored[part].tobytes()
        same(safeload.load(path, dtype="float32"), want)
        with safeload.open(path) as opened:
            assert {name: info.dtype for name, info in opened.tensors.items()} == labels
        safeload.convert(path, tmp_path / f"again.{name}")
        assert without_room(tmp_path / f"again.{name}") == without_room(path)


@packed_fixtures
def test_one_packed_tensor_in_a_file_opens_alone(fixture, tmp_path):
    want = fixture.expected()
    with safeload.open(fixture.path) as opened:
        for k, name in enumerate(packed_of(opened)):
            path = tmp_path / f"{k}.safetensors"
            save_file({name: opened[name]}, path)
            same(safeload.load(path, dtype="float32"), {name: want[name]})
            safeload.convert(opened, path, names=[name], overwrite=True)
            same(safeload.load(path, dtype="float32"), {name: want[name]})


@packed_fixtures
def test_rows_of_a_packed_tensor_in_a_file_open_alone(fixture, tmp_path):
    want = fixture.expected()
    with safeload.open(fixture.path) as opened:
        for name in packed_of(opened):
            value = opened[name]
            if value.shape[0] < 2 or value.ndim < 3:
                continue
            save_file({name: value[1:]}, tmp_path / "x.safetensors")
            same(safeload.load(tmp_path / "x.safetensors", dtype="float32"), {name: want[name][1:]})


@each_kind_with("suffix", {suffix: suffix for suffix in ("npz", "moon", "gguf")}, "bitnet_online", *IN_GGUF)
def test_formats_without_packed_tensors_refuse_them(fixture, suffix, tmp_path):
    for given in (fixture.path, safeload.load(fixture.path)):
        with pytest.raises(UnsupportedError, match=r"pass dtype=") as caught:
            safeload.convert(given, tmp_path / f"x.{suffix}", raw=True)
        assert not os.listdir(tmp_path)
        assert "codes" not in str(caught.value)


@each_kind("bitnet_online", *IN_GGUF)
def test_save_functions_refuse_them(fixture, tmp_path):
    packed = {name: value for name, value in safeload.load(fixture.path).items() if isinstance(value, QuantizedTensor)}
    for module in (safeload.gguf, safeload.moon):
        with pytest.raises(UnsupportedError, match=r"dequantize|dtype="):
            module.save_file(packed, tmp_path / "x")
    assert not os.listdir(tmp_path)


@each_kind_with("suffix", {suffix: suffix for suffix in ("safetensors", "npz", "gguf")})
def test_a_file_with_dtype_has_the_weights(fixture, suffix, tmp_path):
    want = {name: array for name, array in fixture.expected().items() if array.size}
    for dtype in ("float32", "float16"):
        path = tmp_path / f"{dtype}.{suffix}"
        safeload.convert(fixture.path, path, dtype=dtype, names=list(want), raw=True)
        got = safeload.load(path)
        assert got.keys() == want.keys()
        for name, array in got.items():
            assert array.dtype == ("float32" if suffix == "gguf" and array.ndim < 2 else dtype)
            np.testing.assert_array_equal(array, want[name].astype(array.dtype))
        same(safeload.load(path, dtype="float32"), {n: a.astype(got[n].dtype).astype("f4") for n, a in want.items()})


def test_moon_with_dtype(tmp_path):
    fixture = FIXTURES["fp8_block"]
    safeload.convert(fixture.path, tmp_path / "x.moon", dtype="float16")
    got = safeload.load(tmp_path / "x.moon")
    for name, array in fixture.expected().items():
        np.testing.assert_array_equal(got[name], array.astype(np.float16))


KEYS = ("quantization_config", "compression_config", "quantization")


def mentions(config):
    return any(key in KEYS or (isinstance(value, dict) and mentions(value)) for key, value in config.items())


@any_fixture
def test_a_folder_with_dtype_says_nothing_of_a_quantization(fixture, tmp_path):
    want = fixture.expected()
    out = tmp_path / "out"
    safeload.convert(fixture.path, out, dtype="bfloat16", raw=True, max_shard_size="20KB")
    source = fixture.path / "config.json"
    if source.exists() and fixture.name != "bitnet_online":  # nothing of that was packed: it is as it was
        assert not mentions(json.loads((out / "config.json").read_text()))
    got = safeload.load(out)
    same(got, {name: array.astype(ml_dtypes.bfloat16) for name, array in want.items()})
    index = out / "model.safetensors.index.json"
    if not (out / "model.safetensors").exists():
        assert json.loads(index.read_text())["weight_map"].keys() == want.keys()
    assert safeload.check(out, schema=None).ok


@any_fixture
def test_a_folder_without_dtype_keeps_config_and_bytes(fixture, tmp_path):
    out = tmp_path / "out"
    safeload.convert(fixture.path, out, raw=True, max_shard_size=3000)
    source = fixture.path / "config.json"
    if source.exists():
        assert json.loads((out / "config.json").read_text()) == json.loads(source.read_text())
    same(safeload.load(out, dtype="float32"), fixture.expected())
    stored = fixture.stored()
    for name, array in safeload.load(out, stored=True).items():
        assert array.tobytes() == stored[name].tobytes()
    safeload.convert(out, tmp_path / "again.safetensors")
    same(safeload.load(tmp_path / "again.safetensors", dtype="float32"), fixture.expected())


@packed_fixtures
def test_each_shard_of_a_folder_opens_alone(fixture, tmp_path):
    """Parts of a tensor are in one shard, with the quantization in its metadata."""
    want = fixture.expected()
    safeload.convert(fixture.path, tmp_path / "out", raw=True, max_shard_size=1)
    for shard in sorted((tmp_path / "out").glob("*.safetensors")):
        moved = tmp_path / "moved" / shard.name
        moved.parent.mkdir(exist_ok=True)
        shutil.copy(shard, moved)
        got = safeload.load(moved, dtype="float32")
        weights = {name: array for name, array in got.items() if name in want}
        same(weights, {name: want[name] for name in weights})


@pytest.mark.parametrize("nested", ["text_config", "thinker_config"])
@pytest.mark.parametrize("key", KEYS)
def test_nested_quantizations_are_dropped(nested, key, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES["ct_pack_w4_g32_sym"].path, folder)
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    said = {**said, "bits": 4, "group_size": 32} if key == "quantization" else said
    if key == "quantization":
        config["quantization_config"] = json.loads(json.dumps(said))
    config[nested] = {"deeper": {key: said, "a": [1, {"b": 2}]}, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    safeload.convert(folder, tmp_path / "out", dtype="float32", max_shard_size="1MB")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not mentions(made)
    assert made[nested] == {"deeper": {"a": [1, {"b": 2}]}, "torch_dtype": "float32"}
    same(safeload.load(tmp_path / "out"), FIXTURES["ct_pack_w4_g32_sym"].expected())


@each_kind_with("suffix", {suffix: suffix for suffix in ("gguf", "safetensors")}, "bitnet_online")
def test_quantize(fixture, suffix, tmp_path):
    want = fixture.expected()
    name = next((name for name in packed_of(safeload.open(fixture.path)) if want[name].shape[-1] % 32 == 0), None)
    if name is None or not want[name].size:
        pytest.skip("no rows of whole blocks of 32")
    path = tmp_path / f"x.{suffix}"
    report = safeload.convert(fixture.path, path, quantize="q8_0", requantize=True, names=[name], raw=True)
    expected = safeload.load_quantized({name: want[name]}, "q8_0")[name]
    got = safeload.load(path)[name]
    if report.summary.codes.get(name, "").startswith("codes of "):
        np.testing.assert_array_equal(np.asarray(got), want[name])
    elif isinstance(expected, QuantizedTensor):
        assert got == expected
    else:
        np.testing.assert_array_equal(got, expected)


def test_quantize_equals_quantized_weights(tmp_path):
    for kind in ("modelopt_nvfp4", "ct_kimi", "mlx_affine4_g64"):
        fixture = FIXTURES[kind]
        want = fixture.expected()
        paths = tmp_path / f"{kind}-a.gguf", tmp_path / f"{kind}-b.gguf"
        for given, path in zip((want, fixture.path), paths, strict=True):
            options = {"dtype": "float32", "quantize": "q8_0", "requantize": True}
            report = safeload.convert(given, path, names=list(want), raw=True, **options)
        a, b = map(safeload.load, paths)
        assert a.keys() == b.keys()
        quantized = [name for name, value in a.items() if isinstance(value, QuantizedTensor)]
        assert quantized
        for name in quantized:
            moved = report.summary.codes.get(name, "").startswith("codes of ")
            assert np.array_equal(np.asarray(b[name]), want[name]) if moved else a[name] == b[name]


def test_overwriting_in_place(tmp_path):
    fixture = FIXTURES["ct_pack_w4_g32_sym"]
    path = tmp_path / "x.safetensors"
    safeload.convert(fixture.path, path)
    with pytest.raises(FileExistsError):
        safeload.convert(fixture.path, path)
    names = list(safeload.load(path))
    safeload.convert(path, path, overwrite=True)
    assert list(safeload.load(path)) == names
    same(safeload.load(path, dtype="float32"), fixture.expected())
    save_file(safeload.load(path, backend="pread"), path)  # Windows replaces no file that is mapped
    same(safeload.load(path, dtype="float32"), fixture.expected())
    safeload.convert(path, path, dtype="float32", overwrite=True)
    same(safeload.load(path), fixture.expected())


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_overwriting_a_folder_in_place(dtype, tmp_path):
    fixture = FIXTURES["fp8_block"]
    folder = tmp_path / "x"
    safeload.convert(fixture.path, folder, max_shard_size="30KB")
    safeload.convert(folder, folder, dtype=dtype, max_shard_size="30KB", overwrite=True)
    got = safeload.load(folder, dtype="float32")
    same(got, {n: a if dtype is None else a.astype(dtype).astype("f4") for n, a in fixture.expected().items()})


def test_several_sources(tmp_path):
    a, b = FIXTURES["fp8_autofp8"], {"extra.weight": np.ones((4, 4), np.float32)}
    safeload.convert([a.path, b], tmp_path / "x.safetensors", dtype="float32")
    same(safeload.load(tmp_path / "x.safetensors"), {**a.expected(), **b})
    safeload.convert([a.path, b], tmp_path / "y.safetensors")
    got = safeload.load(tmp_path / "y.safetensors", dtype="float32")
    same(got, {**a.expected(), **b})


def test_files_of_different_quantizations_are_not_read_as_one(tmp_path):
    """The same codes and scales mean one thing in one of them, and another in the other."""
    names = ("bitnet_times", "bitnet_divided")
    for name in names:
        (tmp_path / name).mkdir()
        shutil.copy(FIXTURES[name].path / "config.json", tmp_path / name)
        stored = {f"{name}.{part}": array for part, array in FIXTURES[name].stored().items()}
        save_file(stored, tmp_path / name / "model.safetensors")
        safeload.convert(tmp_path / name / "model.safetensors", tmp_path / f"{name}.safetensors")
    beside = [tmp_path / name / "model.safetensors" for name in names]
    inside = [tmp_path / f"{name}.safetensors" for name in names]
    for paths in (beside, inside, inside[::-1], [beside[0], inside[1]]):
        with pytest.raises(UnsupportedError, match="different quantization configurations"):
            safeload.open(paths)
        assert len(safeload.load(paths, stored=True)) == sum(len(FIXTURES[name].stored()) for name in names)
    same(safeload.load([beside[0]], dtype="float32"), safeload.load(inside[0], dtype="float32"))
    save_file({"other": np.ones((3, 3), np.int32)}, tmp_path / "plain.safetensors")
    for paths in ([beside[0], tmp_path / "plain.safetensors"], [tmp_path / "plain.safetensors", beside[0]]):
        assert "other" in safeload.load(paths, dtype="float32")


def test_the_quantization_in_a_file_wins_over_a_config_beside_it(tmp_path):
    for name, other in (("fp8_experts", "fp8_block"), ("comfy_scaled_fp8", "bitnet_times")):
        (tmp_path / name).mkdir()
        safeload.convert(FIXTURES[name].path, tmp_path / name / "x.safetensors")
        shutil.copy(FIXTURES[other].path / "config.json", tmp_path / name)
        same(safeload.load(tmp_path / name / "x.safetensors", dtype="float32"), FIXTURES[name].expected())


@pytest.mark.parametrize("name", ["comfy_quant_fp8", "comfy_scaled_fp8"])
def test_what_no_config_describes_is_renamed(tmp_path, name):
    safeload.convert(FIXTURES[name].path, tmp_path / "x.safetensors", rename=[("^", "again.")])
    want = {f"again.{old}": array for old, array in FIXTURES[name].expected().items()}
    same(safeload.load(tmp_path / "x.safetensors", dtype="float32"), want)


# ---- the command line ----


@packed_fixtures
def test_info(fixture, capsys):
    status, out, _ = run(capsys, "info", fixture.path, "--all")
    assert status == 0
    stored = fixture.stored()
    with safeload.open(fixture.path) as opened:
        names = packed_of(opened)
        labels = sorted({opened.tensors[name].dtype for name in names})
        line = next(line for line in out.splitlines() if line.startswith("quantized: "))
        assert line.startswith(f"quantized: {', '.join(labels)}")
        assert f"{len(names):,} of {len(opened):,} tensors" in line
        status, out, _ = run(capsys, "info", fixture.path, "--json")
        assert status == 0
        found = json.loads(out)
        assert found["parameters"] == sum(array.size for array in fixture.expected().values())
        for entry in found["tensors"]:
            value = opened[entry["name"]]
            assert entry["dtype"] == opened.tensors[entry["name"]].dtype
            assert tuple(entry["shape"]) == value.shape
            if entry["name"] in names:
                assert set(entry["parts"]) == value.parts.keys()
                assert entry["stored_nbytes"] == sum(stored[part].nbytes for part in entry["parts"])
            else:
                assert entry["stored_nbytes"] == value.nbytes
    status, out, _ = run(capsys, "info", fixture.path, "--stored", "--json")
    assert status == 0
    with safeload.open(fixture.path, stored=True) as opened:
        assert {entry["name"] for entry in json.loads(out)["tensors"]} == opened.keys()


@pytest.mark.parametrize("name", ["fp8_block", "ct_old_w5_g32_asym", "gpt_oss", "bitnet_falcon", "mlx_experts"])
def test_the_other_commands(name, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    fixture = FIXTURES[name]
    want = fixture.expected()
    status, out, _ = run(capsys, "stats", fixture.path)
    assert status == 0
    assert all(name in out for name in want)
    status, _, err = run(capsys, "check", fixture.path, "--schema", "none")
    assert status == 0, err
    status, _, err = run(capsys, "convert", fixture.path, tmp_path / "x.safetensors", "--dtype", "float32")
    assert status == 0, err
    same(safeload.load(tmp_path / "x.safetensors"), want)
    status, out, err = run(capsys, "diff", fixture.path, tmp_path / "x.safetensors")
    assert f"; {len(want)} tensors compared" in out, err
    assert "in value" not in out
    status, _, err = run(capsys, "convert", fixture.path, tmp_path / "x.npz")
    assert status != 0
    assert "--dtype" in err or "dtype=" in err
    run(capsys, "report", fixture.path, "-o", tmp_path / "r.html")  # 1 where the small config lacks keys of its schema
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert all(label in page for label in {info.dtype for info in safeload.open(fixture.path).tensors.values()})


# ---- names of MLX ----


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32", "max_shard_size": "1MB"}, True),
        ({"dtype": "float32", "max_shard_size": "1MB", "resume": True}, True),
        ({"quantize": "int8", "requantize": True}, True),
        ({"dtype": "float32", "rename": {"switch_mlp": "m"}}, False),
        ({"dtype": "float32", "drop": "*switch_mlp*"}, False),
        ({"max_shard_size": "1MB"}, False),
        ({}, False),
    ],
)
def test_dequantized_experts_of_mlx_are_warned_of(options, warns, tmp_path, caplog):
    """Other libraries expect experts one by one; codes that stay packed are still a checkpoint of MLX."""
    out = tmp_path / ("out" if "max_shard_size" in options else "out.safetensors")
    with caplog.at_level(logging.WARNING, "safeload"):
        safeload.convert(FIXTURES["mlx_experts"].path, out, **options)
    assert ("switch_mlp.gate_proj.weight' and 1 more tensor" in caplog.text) == warns
    assert ("do not load these names" in caplog.text) == warns


def test_other_experts_are_not_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "safeload"):
        for name in ("gpt_oss", "fp8_experts", "ct_pack_experts"):
            safeload.convert(FIXTURES[name].path, tmp_path / f"{name}.safetensors", dtype="float32")
    assert not caplog.text
