"""Quantized checkpoints of other packages: one tensor for each weight, with the values that their readers compute."""

import copy
import json
import math
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from builders.quantized import FIXTURES, IN_GGUF, each_kind, each_kind_with, every_fixture

import safeload
from safeload import QuantizedTensor, TensorNotFoundError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core

any_fixture = each_kind()
some_fixtures = pytest.mark.parametrize(
    "fixture",
    [
        FIXTURES[name]
        for name in (
            "fp8_block", "fp8_experts", "ct_old_g_idx_asym", "ct_pack_experts", "deepseek_v4", "gpt_oss",
            "bitnet_times", "mlx_nvfp4_global_scale", "modelopt_nvfp4_awq", "modelopt_nvfp4_llama4", "fbgemm_llama4",
        )
    ],
    ids=lambda fixture: fixture.name,
)  # fmt: skip

# Published checkpoints that are not packed.
PLAIN = ("bitnet_online",)


def packed_of(opened):
    return [name for name, value in opened.load().items() if isinstance(value, QuantizedTensor)]


def same(got, want):
    """Equal values; their bits too, except the sign of zero, which readers do not agree on."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


# ---- values ----


@every_fixture
def test_float32_is_what_the_reader_of_the_family_computes(fixture):
    is_expected(safeload.load(fixture.path, dtype="float32"), fixture)


@each_kind_with(
    "backend, threads", {"mmap": ("mmap", 3), "one": ("pread", 1), "pread": ("pread", 3), "direct": ("direct", 3)}
)
def test_backends_and_threads_change_no_value(fixture, backend, threads):
    is_expected(safeload.load(fixture.path, dtype="float32", backend=backend, threads=threads), fixture)


def is_expected(got, fixture):
    want = fixture.expected()
    assert got.keys() == want.keys()
    for name, array in got.items():
        same(array, want[name])
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned


@each_kind_with("dtype", {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64})
def test_other_dtypes_are_float32_rounded_once(fixture, dtype):
    got, want = safeload.load(fixture.path, dtype=dtype), fixture.expected()
    with np.errstate(over="ignore"):
        for name, array in got.items():
            same(array, want[name].astype(dtype))


@any_fixture
def test_out_is_filled(fixture):
    want = fixture.expected()
    out = {name: np.full(array.shape, 7, np.float32) for name, array in want.items()}
    got = safeload.load(fixture.path, dtype="float32", out=out)
    for name, array in want.items():
        assert got[name] is out[name]
        same(out[name], array)


def test_out_of_what_does_not_fit_is_refused_before_anything_is_written():
    want = FIXTURES["fp8_block"].expected()
    out = {name: np.full(array.shape, 7, np.float32) for name, array in want.items()}
    last = next(name for name in reversed(want) if want[name].ndim == 2)
    for wrong in (np.zeros(want[last].shape, np.float16), np.zeros((3, 3), np.float32), want[last].T.copy().T):
        with pytest.raises(ValueError, match="out: "):
            safeload.load(FIXTURES["fp8_block"].path, dtype="float32", out={**out, last: wrong})
    with safeload.open(FIXTURES["fp8_block"].path) as opened, pytest.raises(ValueError, match="pass dtype="):
        opened.load([last], out={last: out[last]})
    assert all((array == 7).all() for array in out.values())


@any_fixture
def test_progress_ends_with_everything(fixture):
    seen = []
    safeload.load(fixture.path, dtype="float32", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


# ---- as they are stored ----


@each_kind_with("backend", {backend: backend for backend in ("mmap", "pread", "direct")})
def test_without_dtype_packed_tensors_hold_what_is_stored(fixture, backend):
    want, stored = fixture.expected(), fixture.stored()
    with safeload.open(fixture.path) as opened:
        loaded = opened.load(backend=backend)
        assert loaded.keys() == want.keys() == set(opened) == opened.tensors.keys()
        assert any(isinstance(value, QuantizedTensor) for value in loaded.values()) == (fixture.name not in PLAIN)
        for name, value in loaded.items():
            info = opened.tensors[name]
            assert tuple(info.shape) == value.shape == want[name].shape
            if not isinstance(value, QuantizedTensor):
                assert value.tobytes() == stored[name].tobytes()
                continue
            assert (value.ndim, value.size) == (want[name].ndim, want[name].size)
            assert value.scheme == info.dtype == repr(value).split(" [")[0].removeprefix("<QuantizedTensor ")
            assert value.nbytes == sum(stored[part].nbytes for part in value.parts)
            assert (value.scale, value.axis) == (None, None)
            assert len(value.parts) > 1
            for part, array in value.parts.items():
                assert array.dtype == stored[part].dtype
                assert array.shape == stored[part].shape
                assert array.tobytes() == stored[part].tobytes()
            assert value.data is next(iter(value.parts.values()))
            same(value.dequantize(), want[name])
            same(np.asarray(value), want[name])
            assert value == opened[name]


@any_fixture
def test_every_stored_tensor_is_plain_or_a_part_or_ignored(fixture):
    """Nothing is lost without a word: what is hidden is in a part, or scales activations."""
    stored = fixture.stored()
    with safeload.open(fixture.path) as opened:
        shown = set()
        for name, value in opened.load().items():
            shown |= value.parts.keys() if isinstance(value, QuantizedTensor) else {name}
        for name in stored.keys() - shown:
            with pytest.raises(TensorNotFoundError, match="scales activations, not weights; open with stored=True"):
                opened.load([name])


@each_kind(*IN_GGUF)
def test_stored_shows_the_tensors_of_the_files(fixture):
    want = fixture.stored()
    with safeload.open(fixture.path, stored=True) as opened:
        for one in (opened, pickle.loads(pickle.dumps(opened)), copy.deepcopy(opened), copy.copy(opened)):
            assert set(one) == want.keys()
            for name, array in one.load().items():
                assert array.dtype == want[name].dtype
                assert array.tobytes() == want[name].tobytes()
    assert safeload.load(fixture.path, stored=True).keys() == want.keys()


@each_kind("gguf_i2_s")
def test_a_hidden_part_is_named(fixture):
    with safeload.open(fixture.path) as opened:
        for name in packed_of(opened):
            for part in opened[name].parts.keys() - opened.keys():
                message = f"{part!r} is a part of {name!r}; open with stored=True"
                for ask in (
                    lambda part=part: opened.load([part]),
                    lambda part=part: opened[part],
                    lambda part=part: opened.get_slice(part),
                    lambda part=part, name=name: opened.load([name, part], dtype="float32"),
                ):
                    with pytest.raises(TensorNotFoundError, match="is a part of") as caught:
                        ask()
                    assert message in str(caught.value)
                    assert caught.value.tensor == part
                assert part not in opened
                assert part not in opened.tensors


@any_fixture
def test_packed_tensors_by_name(fixture):
    want = fixture.expected()
    with safeload.open(fixture.path) as opened:
        for name in opened:
            got = opened.load([name], dtype="float32")
            assert list(got) == [name]
            same(got[name], want[name])
        backwards = list(reversed(list(opened)))
        assert list(opened.load(backwards)) == backwards
        assert list(opened.load(backwards, dtype="float64")) == backwards


@any_fixture
def test_drop_ins_read_what_is_stored(fixture):
    for file in sorted(fixture.folder.rglob("*.safetensors")):
        with safeload.safe_open(file) as opened:
            assert set(opened.keys()) == load_file(file).keys()


# ---- quantized tensors ----


@some_fixtures
def test_packed_tensors_are_values(fixture):
    with safeload.open(fixture.path) as opened, safeload.open(fixture.path) as other:
        names = packed_of(opened)
        for name in names:
            value = opened[name]
            for made in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value), other[name]):
                assert made == value
                assert made.parts.keys() == value.parts.keys()
                assert made.scheme == value.scheme
                np.testing.assert_array_equal(made.dequantize(), value.dequantize())
            with pytest.raises(ValueError, match="dequantizing makes one"):
                value.__array__(copy=False)
            assert np.asarray(value, np.float64).dtype == np.float64
            with pytest.raises(TypeError):
                hash(value)
            changed = copy.deepcopy(value)
            changed.data.reshape(-1).view(np.uint8)[0] ^= 1
            assert changed != value
        for a in names:
            for b in names:
                assert (opened[a] == opened[b]) == (a == b)


@some_fixtures
@pytest.mark.parametrize("threads", [1, 3])
def test_dequantize_takes_dtype_and_out(fixture, threads):
    with safeload.open(fixture.path) as opened:
        for name in packed_of(opened):
            value, want = opened[name], fixture.expected()[name]
            same(value.dequantize(np.float16, threads=threads), want.astype(np.float16))
            out = np.empty(want.shape, np.float64)
            assert value.dequantize("float64", out=out, threads=threads) is out
            same(out, want.astype(np.float64))
            for wrong in ("int8", "int32", "bool", "complex64"):
                with pytest.raises(safeload.UnsupportedError, match="cannot dequantize"):
                    value.dequantize(wrong)
            with pytest.raises(ValueError, match="out"):
                value.dequantize(out=np.empty(3, np.float32))


@any_fixture
def test_rows_of_whole_blocks_are_the_rows_of_the_values(fixture):
    with safeload.open(fixture.path) as opened:
        for name in packed_of(opened):
            value, want = opened[name], fixture.expected()[name]
            length, taken = want.shape[0], 0
            cuts = sorted({0, 1, 2, 32, 64, 128, length // 2, length - 1, length} & set(range(length + 1)))
            for a in cuts:
                for b in cuts:
                    try:
                        rows = value[a:b]
                    except ValueError as error:
                        refusal = str(error)
                    else:
                        refusal = None
                    if refusal is not None:
                        assert "whole blocks" in refusal or "cannot be sliced" in refusal
                        continue
                    taken += 1
                    assert isinstance(rows, QuantizedTensor)
                    assert (rows.scheme, rows.shape) == (value.scheme, want[a:b].shape)
                    same(rows.dequantize(), want[a:b])
                    assert pickle.loads(pickle.dumps(rows)) == rows
                    same(rows[:].dequantize(), want[a:b])
            sliceable = not (want.ndim == 2 and value.scheme in ("ternary",))
            assert taken > 1 or not sliceable or value.scheme.endswith("asym"), value
            with pytest.raises(ValueError, match="step 1"):
                value[::2]
            for index in (0, ..., (slice(0, 1), 0), None, [0]):
                with pytest.raises(TypeError, match="only be sliced along its first axis"):
                    value[index]


def test_rows_that_are_not_whole_blocks_are_refused():
    with safeload.open(FIXTURES["fp8_block"].path) as opened:
        name = next(name for name in packed_of(opened) if opened[name].shape[0] > 128)
        value = opened[name]
        want = value.dequantize()
        np.testing.assert_array_equal(value[128:].dequantize(), want[128:])
        np.testing.assert_array_equal(value[:128][:].dequantize(), want[:128])
        for wrong in (slice(1, None), slice(0, 130), slice(64, 128)):
            with pytest.raises(ValueError, match="are not whole blocks of 128 rows"):
                value[wrong]


# ---- slices ----

INDICES = [
    (), 0, -1, ..., slice(None), slice(1, 3), slice(-3, None), slice(None, None, 2), slice(None, None, -1), slice(5, 1),
    slice(5, 1, -2), slice(10**9, None), (slice(1, 3), 1), (..., 0), (0, ...), (slice(None), slice(1, 9, 3)),
    (1, slice(None, 2)), (None, slice(1, 2)), (slice(1, 2), None), (None, ..., None), (0, None, slice(0, 2)),
    (..., slice(None, None, -2)), (-2, -1), (slice(0, 0), ...), np.int64(1), (0, ..., 0), (slice(None), -1),
    (slice(3, 4), slice(2, 1)), (slice(7, None, 5), ..., slice(0, 2)),
]  # fmt: skip


@any_fixture
def test_slices_are_what_numpy_takes_of_the_values(fixture):
    with safeload.open(fixture.path) as opened:
        for name in packed_of(opened):
            one, want = opened.get_slice(name), fixture.expected()[name]
            assert (one.shape, one.dtype, len(one)) == (want.shape, np.float32, len(want))
            for index in INDICES:
                same(one[index], np.ascontiguousarray(want[index]).reshape(want[index].shape))
            for wrong in (want.shape[0], -want.shape[0] - 1, (0,) * (want.ndim + 1), (..., ...)):
                with pytest.raises(IndexError):
                    one[wrong]


@some_fixtures
def test_slices_have_a_dtype_and_pickle(fixture):
    with safeload.open(fixture.path) as opened:
        for name in packed_of(opened):
            want = fixture.expected()[name]
            for dtype in (np.float16, ml_dtypes.bfloat16, "float64"):
                one = opened.get_slice(name, dtype=dtype)
                for again in (one, pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
                    assert (again.dtype, again.shape) == (np.dtype(dtype), want.shape)
                    assert repr(again) == repr(one)
                    same(again[1:3], want.astype(dtype)[1:3])
            for wrong in ("int8", "q8_0", "complex64"):
                with pytest.raises((safeload.UnsupportedError, TypeError)):
                    opened.get_slice(name, dtype=wrong)
        plain = next((name for name in opened if name not in packed_of(opened)), None)
        if plain is not None:
            whole = opened.load([plain], dtype="float16")[plain]
            same(opened.get_slice(plain, dtype="float16")[..., :1], whole[..., :1])
        one = opened.get_slice(packed_of(opened)[0])
    with pytest.raises(ValueError, match="closed"):
        one[0]
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(one)


@some_fixtures
def test_slices_of_stored_tensors_are_codes(fixture):
    stored = fixture.stored()
    with safeload.open(fixture.path, stored=True) as opened:
        for name, array in stored.items():
            got = opened.get_slice(name)[...]
            assert got.dtype == array.dtype
            assert got.tobytes() == array.tobytes()


# ---- descriptions ----


@any_fixture
def test_sizes_are_those_of_the_stored_tensors(fixture):
    stored = fixture.stored()
    with safeload.open(fixture.path) as opened:
        shown = 0
        for name, value in opened.load().items():
            parts = value.parts if isinstance(value, QuantizedTensor) else [name]
            shown += sum(stored[part].nbytes for part in parts)
        assert opened.nbytes == shown
        assert math.prod([len(opened)]) == len(list(opened))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("fp8_block", {"fp8 128x128"}),
        ("fp8_block_u8", {"fp8 128x128"}),
        ("fp8_autofp8", {"fp8 tensor"}),
        ("fbgemm", {"fp8 row"}),
        ("ct_pack_w4_g32_sym", {"int4 g32"}),
        ("ct_pack_w4_g128_asym", {"int4 g128 asym"}),
        ("ct_pack_w3_channel", {"int3 row"}),
        ("ct_pack_w4_tensor", {"int4 tensor"}),
        ("ct_int8_channel", {"int8 row"}),
        ("ct_naive_int4", {"int4 row"}),
        ("ct_kimi", {"int4 g32"}),
        ("ct_nvfp4", {"nvfp4"}),
        ("modelopt_nvfp4", {"nvfp4"}),
        ("mlx_nvfp4", {"nvfp4"}),
        ("gpt_oss", {"mxfp4"}),
        ("ct_mxfp6", {"mxfp6"}),
        ("ct_mxfp8", {"mxfp8"}),
        ("mxfp8", {"mxfp8"}),
        ("mlx_affine4_g64", {"mlx4 g64"}),
        ("bitnet_times", {"ternary"}),
        ("bitnet_falcon", {"ternary"}),
        ("deepseek_v4", {"fp8 128x128", "mxfp4"}),
    ],
)
def test_labels(name, labels):
    with safeload.open(FIXTURES[name].path) as opened:
        assert {opened[one].scheme for one in packed_of(opened)} == labels


def test_checkpoints_pickle_with_what_they_were_opened_with(tmp_path):
    for stored in (False, True):
        with safeload.open(FIXTURES["gpt_oss"].path, stored=stored) as opened:
            again = pickle.loads(pickle.dumps(opened))
            assert list(again) == list(opened)
            assert again.tensors == opened.tensors
            again.close()


def test_metadata_does_not_repeat_what_the_tensors_say(tmp_path):
    source = FIXTURES["ct_pack_w4_g32_sym"].path
    safeload.convert(source, tmp_path / "x.safetensors")
    with safeload.open(tmp_path / "x.safetensors") as opened:
        assert not any(key.startswith("safeload.") for key in opened.metadata)
        assert any(isinstance(value, QuantizedTensor) for value in opened.load().values())
    with safeload.open(source) as opened:
        assert opened.config == json.loads((source / "config.json").read_text())


def test_the_configuration_is_kept_once_for_all_tensors(tmp_path):
    """A checkpoint of experts has 70,000 packed tensors, and its config names hundreds of modules."""
    tensors = {f"{k}.weight": np.zeros((4, 4), ml_dtypes.float8_e4m3fn) for k in range(50)}
    scales = {f"{k}.weight_scale_inv": np.ones((1, 1), np.float32) for k in range(50)}
    save_file({**tensors, **scales}, tmp_path / "model.safetensors", durable=False)
    config = {"quant_method": "fp8", "modules_to_not_convert": [f"module.{k}" for k in range(1000)]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with safeload.open(tmp_path) as opened:
        assert len({id(value.packing.config) for value in opened.load().values()}) == 1


def test_rows_of_a_tensor_with_several_global_scales_are_refused(tmp_path):
    fixture = FIXTURES["modelopt_nvfp4"]
    with safeload.open(fixture.path) as opened:
        name = next(name for name in packed_of(opened) if opened[name].shape[0] % 2 == 0)
    stored = fixture.stored()
    stored[f"{name}_scale_2"] = np.float32([1, 2])  # one for each half of the rows
    save_file(stored, tmp_path / "model.safetensors", durable=False)
    value = safeload.load(tmp_path)[name]
    with pytest.raises(ValueError, match="cannot be sliced"):
        value[value.shape[0] // 2 :]
    with safeload.open(tmp_path) as opened:
        same(opened.get_slice(name)[-3:], value.dequantize()[-3:])


@pytest.mark.parametrize("change", ["another scale rule", "no quantization"])
def test_a_configuration_that_has_changed_is_found_when_a_checkpoint_is_opened_again(change, tmp_path):
    """The same codes would have other values."""
    folder = tmp_path / "x"
    shutil.copytree(FIXTURES["bitnet_times"].path, folder)
    with safeload.open(folder) as opened:
        held = pickle.dumps([opened, opened.get_slice(packed_of(opened)[0])])
        assert len(pickle.loads(held)) == 2
        config = json.loads((folder / "config.json").read_text())
        if change == "no quantization":
            del config["quantization_config"]
        else:
            del config["quantization_config"]["linear_class"]
        (folder / "config.json").write_text(json.dumps(config))
        for again in (lambda: pickle.loads(held), lambda: copy.copy(opened), lambda: copy.deepcopy(opened)):
            with pytest.raises(safeload.FormatError, match=r"the quantization in config.json has changed"):
                again()


@pytest.mark.parametrize("name", ["fp8_block", "ct_pack_w4_g32_sym", "gpt_oss", "deepseek_v4"])
def test_files_of_a_folder_in_any_order_and_alone(name):
    """Scales are in the other shard: a list of both is the checkpoint, one of them alone refuses numbers."""
    fixture = FIXTURES[name]
    shards = sorted(fixture.path.glob("*.safetensors"))
    for paths in (shards, shards[::-1], next(fixture.path.glob("*.index.json"))):
        got = safeload.load(paths, dtype="float32")
        assert got.keys() == fixture.expected().keys()
        for one, array in got.items():
            same(array, fixture.expected()[one])
    codes = shards[0]
    assert not any(isinstance(value, QuantizedTensor) for value in safeload.load(codes).values())
    with pytest.raises(safeload.UnsupportedError, match="codes, whose scale"):
        safeload.load(codes, dtype="float32")


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_folder_of_links_and_of_files_that_cannot_be_written(tmp_path):
    fixture = FIXTURES["fp8_block"]
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for k, file in enumerate(fixture.path.iterdir()):
        shutil.copy(file, tmp_path / str(k))
        (tmp_path / str(k)).chmod(0o444)
        (folder / file.name).symlink_to(tmp_path / str(k))
    folder.chmod(0o555)
    got = safeload.load(folder, dtype="float32")
    folder.chmod(0o755)
    for name, array in fixture.expected().items():
        same(got[name], array)


def test_many_threads_load_one_checkpoint():
    fixture = FIXTURES["mlx_experts"]
    want = fixture.expected()
    with safeload.open(fixture.path) as opened, ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda threads: opened.load(dtype="float32", threads=threads), [1, 2, 3, None] * 8):
            for name, array in got.items():
                same(array, want[name])


def test_what_is_left_of_a_closed_checkpoint():
    fixture = FIXTURES["fp8_block"]
    with safeload.open(fixture.path) as opened:
        held = [opened.load(backend=backend) for backend in ("mmap", "pread", "direct")]
    for values in held:
        for name, value in values.items():
            same(np.asarray(value, np.float32), fixture.expected()[name])


def test_codes_are_not_converted_in_a_slice_either():
    with safeload.open(FIXTURES["fp8_block"].path, stored=True) as opened:
        name = next(name for name in opened if name.endswith("_scale_inv")).removesuffix("_scale_inv")
        assert opened.get_slice(name)[:1].dtype == ml_dtypes.float8_e4m3fn
        with pytest.raises(safeload.UnsupportedError, match="dtype="):
            opened.get_slice(name, dtype="float32")
