"""Codes of quantized models in conversions to other formats: copied, moved or refused."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import code_layouts as layouts
from builders import llama_models
from builders.engine_models import DTYPES, write_experts, write_model
from builders.inside import presets
from builders.paths import DATA
from builders.schemes import ENGINE_FORMATS
from builders.thorough import THOROUGH, part_of

import safeload
from safeload.errors import FormatError, SafeloadError, UnsupportedError
from safeload.numpy import load_file

FORMATS = [*ENGINE_FORMATS, *(f"mlx{bits}-g{group}" for bits in (2, 3, 8) for group in (32, 128))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense = {dtype: write_model(folder / dtype, dtype) for dtype in DTYPES}
    return {**dense, "qwen3_moe": write_experts(folder / "experts", "qwen3_moe")}


# ---- the same format ----


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for k, name in enumerate(FORMATS) for model in part_of([*DTYPES, "qwen3_moe"], k, 2)],
)
def test_the_format_a_folder_has_already_changes_no_byte(models, tmp_path, name, model):
    if model == "qwen3_moe" and name in ("mlx2-g128", "mlx3-g128", "mlx8-g128"):
        pytest.skip("its experts have too few columns")
    safeload.convert(models[model], tmp_path / "first", quantize=name)
    report = safeload.convert(tmp_path / "first", tmp_path / "second", quantize=name)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    assert not report.summary.quantized
    assert f"kept: is already {name}" in str(report)
    safeload.convert(tmp_path / "first", tmp_path / "pieces", quantize=name, resume=True)
    assert contents(tmp_path / "pieces") == contents(tmp_path / "first")
    stored = safeload.load(tmp_path / "first")
    for key, value in safeload.load_quantized(tmp_path / "first", name).items():
        equal = value == stored[key]
        assert equal if isinstance(equal, bool) else equal.all(), key


@pytest.mark.parametrize("name", ["w4a16", "mlx4", "bnb_nf4", "deepseek_fp8"])
def test_what_the_first_conversion_has_ignored_stays_so(models, tmp_path, name):
    safeload.convert(models["bfloat16"], tmp_path / "first", quantize=name, ignore="*q_proj")
    report = safeload.convert(tmp_path / "first", tmp_path / "second", quantize=name)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    reason = f"is not quantized in the folder, which is already {name}"
    assert report.summary.kept["model.layers.0.self_attn.q_proj.weight"] == reason


def test_a_weight_that_is_ignored_now_is_dequantized(models, tmp_path):
    safeload.convert(models["bfloat16"], tmp_path / "first", quantize="w4a16")
    safeload.convert(tmp_path / "first", tmp_path / "second", quantize="w4a16", ignore="*q_proj")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert second.keys() - first.keys() == {"model.layers.0.self_attn.q_proj.weight"}
    assert all(np.array_equal(first[key], second[key]) for key in first.keys() & second.keys())
    ignored = json.loads((tmp_path / "second/config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored
    safeload.convert(tmp_path / "first", tmp_path / "plain", dtype="bfloat16")
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(second[name], load_file(tmp_path / "plain/model.safetensors")[name])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ct_pack_w4_g128_asym", "w4a16_asym"), ("ct_fp8_channel", "fp8_dynamic"), ("ct_fp8_block", "fp8_block"),
        ("ct_nvfp4", "nvfp4a16"), ("ct_mxfp4", "mxfp4a16"), ("ct_int8_channel", "w8a8"), ("fp8_block", "deepseek_fp8"),
        ("mlx_affine4_g64", "mlx4"), ("mlx_affine4_g128", "mlx4-g128"), ("mlx_affine8_g32", "mlx8-g32"),
        ("mlx_mxfp4", "mlx-mxfp4"), ("mlx_mxfp8", "mlx-mxfp8"), ("mlx_nvfp4", "mlx-nvfp4"),
        ("ct_mxfp8", "mxfp8a16"), ("awq4_gemm", "awq-g32"),
    ],
)  # fmt: skip
def test_weights_by_the_real_writers_are_copied(tmp_path, kind, name):
    source = DATA / "quantized" / kind
    report = safeload.convert(source, tmp_path / "out", quantize=name, only="*")
    copied = [key for key, why in report.summary.kept.items() if why == f"is already {name}"]
    assert copied
    ours, theirs = safeload.load(tmp_path / "out", stored=True), safeload.load(source, stored=True)
    for key in ours:
        if key.startswith(tuple(name.removesuffix("weight") for name in copied)):
            assert ours[key].dtype == theirs[key].dtype
            assert ours[key].tobytes() == theirs[key].tobytes()


# ---- other formats: the table ----

MOVED, NEAR = "moved", "near"  # NEAR: codes and scales stay, a bias or a factor is rounded once
SHAPE = (1024, 1024) if THOROUGH else (64, 256)
ZEROS = ("w4a16_asym-g32", "awq-g32", "gptq_asym-g32", "gptq8-g32")
FOUR = ("w4a16-g32", "gptq-g32", *ZEROS, "mlx4-g32", "mlx8-g32", "q4_0", "q4_1", "q8_0")
SYMMETRIC = dict.fromkeys(FOUR, MOVED)
ASYMMETRIC = {**dict.fromkeys((*ZEROS, "q8_0", "mlx8-g32"), MOVED), "mlx4-g32": NEAR, "q4_1": NEAR}


def sources():
    """Each layout, and what becomes of its codes in other formats; formats that are not named are refused."""
    made = {}
    for dtype in ("F16", "BF16"):
        half = {key: how for key, how in SYMMETRIC.items() if dtype == "F16" or not key.startswith("q")}
        asym = {key: how for key, how in ASYMMETRIC.items() if dtype == "F16" or not key.startswith("q")}
        made |= {
            f"ct sym g32 {dtype}": (layouts.compressed(dtype, 32, 1, SHAPE), SYMMETRIC | half),
            f"ct asym g32 {dtype}": (layouts.compressed(dtype, 32, 2, SHAPE, symmetric=False), ASYMMETRIC | asym),
            f"mlx4 g32 {dtype}": (
                layouts.mlx(dtype, 32, 3, SHAPE),
                {"q4_1": MOVED, "mlx8-g32": MOVED, "mlx4-g32": MOVED},
            ),
            f"mlx4 g32 zeros {dtype}": (layouts.mlx(dtype, 32, 4, SHAPE, zero=8), SYMMETRIC),
            f"mlx8 g32 middle {dtype}": (
                layouts.mlx(dtype, 32, 5, SHAPE, bits=8, zero=128),
                dict.fromkeys(("q8_0", "mlx8-g32", "gptq8-g32"), MOVED),
            ),
            f"int8 rows {dtype}": (
                layouts.int8_rows(dtype, 6, SHAPE),
                dict.fromkeys(("q8_0", "mlx8-g32", "w8a16", "w8a8", "gptq8", "gptq8-g32"), MOVED),
            ),
        }
    made |= {
        "awq g32": (layouts.awq("F16", 32, 7, SHAPE), ASYMMETRIC),
        "awq g128": (
            layouts.awq("F16", 128, 8, SHAPE),
            ASYMMETRIC | {**dict.fromkeys(("w4a16_asym", "w8a16", "awq", "gptq8"), MOVED), "mlx4": NEAR},
        ),
        "awq middle": (layouts.awq("F16", 32, 9, SHAPE, zero=8), SYMMETRIC),
        "gptq g32": (layouts.gptq("F16", 32, 10, SHAPE), ASYMMETRIC),
        "gptq v2 g32": (layouts.gptq("F16", 32, 11, SHAPE, version="gptq_v2"), ASYMMETRIC),
        "gptq sym g128": (
            layouts.gptq("F16", 128, 12, SHAPE, zero=8),
            SYMMETRIC | dict.fromkeys(("w4a16", "w4a16_asym", "w8a16", "mlx4", "awq", "gptq8", "w4afp8"), MOVED),
        ),
        "gptq8 sym g128": (
            layouts.gptq("F16", 128, 13, SHAPE, bits=8, zero=128),
            dict.fromkeys(("w8a16", "q8_0", "mlx8-g32", "gptq8", "gptq8-g32"), MOVED),
        ),
        "gptq act-order": (layouts.gptq("F16", 32, 14, SHAPE, order="reversed"), {}),
        "ct f32": (layouts.compressed("F32", 32, 15, SHAPE), dict.fromkeys(("w4a16-g32", "gptq-g32", *ZEROS), MOVED)),
        "ct asym f32": (layouts.compressed("F32", 32, 16, SHAPE, symmetric=False), dict.fromkeys(ZEROS, MOVED)),
        "int4 in bytes": (layouts.compressed_bytes("F16", 32, 27, SHAPE), SYMMETRIC),
        "int4 in bytes asym": (layouts.compressed_bytes("F16", 32, 28, SHAPE, symmetric=False), ASYMMETRIC),
        "int4 in bytes g128": (
            layouts.compressed_bytes("F16", 128, 29, SHAPE),
            SYMMETRIC | dict.fromkeys(("w4a16", "w4a16_asym", "w8a16", "mlx4", "awq", "gptq8", "w4afp8"), MOVED),
        ),
        "mxfp4": (layouts.mxfp4(17, SHAPE), dict.fromkeys(("mlx-mxfp4", "mlx8-g32", "gptq8-g32"), MOVED)),
        "mxfp4 near 1": (
            layouts.mxfp4(18, SHAPE, 116, 130),
            dict.fromkeys(("mlx-mxfp4", "mlx8-g32", "gptq8-g32", "q8_0", "nvfp4a16"), MOVED),
        ),
        "nvfp4 divided": (layouts.nvfp4(19, SHAPE, 37.5, modelopt=False), {"nvfp4a16": MOVED}),
        "nvfp4 multiplied": (layouts.nvfp4(20, SHAPE, 0.0137, modelopt=True), {"nvfp4a16": NEAR}),
        "nvfp4 power": (layouts.nvfp4(21, SHAPE, 2.0**-7, modelopt=True), {"nvfp4a16": MOVED}),
        "fp8 tensor": (
            layouts.fp8(22, SHAPE, (0, 0)),
            dict.fromkeys(("fp8_dynamic", "fp8_block", *(["deepseek_fp8"] if THOROUGH else [])), MOVED),  # whole blocks
        ),
        "fp8 rows": (layouts.fp8(23, SHAPE, (1, 0)), {"fp8_dynamic": MOVED}),
        "fp8 rows of powers": (
            layouts.fp8(24, SHAPE, (1, 0), powers=True),
            dict.fromkeys(("fp8_dynamic", "mlx-mxfp8", "mxfp8a16"), MOVED),
        ),
        "fp8 blocks": (layouts.fp8(25, (256, 256), (128, 128)), {"fp8_block": MOVED, "deepseek_fp8": MOVED}),
        "fp8 blocks of powers": (
            layouts.fp8(26, (256, 256), (128, 128), powers=True),
            dict.fromkeys(("fp8_block", "deepseek_fp8", "mlx-mxfp8", "mxfp8a16"), MOVED),
        ),
    }
    return made


SOURCES = sources()
TARGETS = (
    *FOUR, "w4a16", "w4a16_asym", "w8a16", "w8a8", "mlx4", "mlx-mxfp4", "mlx-nvfp4", "mlx-mxfp8", "nvfp4a16",
    "fp8_dynamic", "fp8_block", "deepseek_fp8", "bnb_nf4", "q5_0", "awq", "gptq8", "w4afp8", "mxfp8a16",
)  # fmt: skip
NAME = f"{layouts.NAME}.weight"
BITS = {"int8": 8, "mlx8": 8, "gptq8": 8, "fp8": 8}  # of the first words of sources; else 4
CELLS = part_of([(source, target) for source in SOURCES for target in TARGETS], 0, 5)


@pytest.mark.parametrize(("source", "target"), CELLS)
def test_each_cell_of_the_table(tmp_path, source, target):
    made, table = SOURCES[source]
    values = layouts.write(tmp_path / "source", made)
    np.testing.assert_array_equal(safeload.load(tmp_path / "source", dtype="float32")[NAME], values)
    arguments = {"quantize": {NAME: target} if target[0] == "q" else target}
    how = table.get(target, "never")
    if how in ("never", NEAR):
        with pytest.raises(UnsupportedError, match=f"{NAME}|no tensor is left"):
            safeload.convert(tmp_path / "source", tmp_path / "out", **arguments, exact=True)
    if how == "never":
        own = presets()[target].bits if target in presets() else int(re.search("[0-9]+", target)[0])
        fewer = own < BITS.get(source.split()[0], 4)
        if fewer and target != "deepseek_fp8":  # rounded again, as `requantize=True` always does
            report = safeload.convert(tmp_path / "source", tmp_path / "out", **arguments)
            assert report.summary.codes[NAME].startswith("rounded again from ")
            return
        with pytest.raises(UnsupportedError, match=r"requantize=True|no tensor is left"):
            safeload.convert(tmp_path / "source", tmp_path / "out", **arguments)
        return
    report = safeload.convert(tmp_path / "source", tmp_path / "out", **arguments)
    read = safeload.load(tmp_path / "out", dtype="float32")[NAME]
    if report.summary.kept.get(NAME, "").startswith("is already"):
        assert how == MOVED
    else:
        assert report.summary.codes[NAME].startswith("codes of ")
        assert ("rounded by up to" in report.summary.codes[NAME]) == (how == NEAR)
    if how == MOVED:
        np.testing.assert_array_equal(read, values)
        safeload.convert(tmp_path / "source", tmp_path / "exact", **arguments, exact=True)
        assert contents(tmp_path / "exact") == contents(tmp_path / "out")
    else:
        np.testing.assert_allclose(read, values, rtol=0, atol=8e-3 * float(np.abs(values).max()))
        assert (read != values).any()
    quantized = safeload.load_quantized(tmp_path / "source", arguments["quantize"])
    np.testing.assert_array_equal(np.asarray(quantized[NAME]), read)


def test_a_scale_that_the_format_cannot_hold_is_refused(tmp_path):
    parts, config, values = layouts.compressed("BF16", 32, 1, SHAPE)
    parts["weight_scale"][3, 2] = 2.0**-30  # a number of float16 only from 2**-24 on
    layouts.write(tmp_path / "source", (parts, config, values))
    with pytest.raises(UnsupportedError, match=f"{NAME}.* its scales are BF16, and not exact in F16"):
        safeload.convert(tmp_path / "source", tmp_path / "out", quantize={NAME: "q4_0"})


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("made", "part", "target"),
    [
        (layouts.compressed("F16", 32, 1, SHAPE), "weight_scale", "gptq-g32"),
        (layouts.mlx("F16", 32, 2, SHAPE), "biases", "mlx8-g32"),
    ],
)
def test_a_number_beside_codes_that_is_not_finite_is_an_error_by_name(tmp_path, made, part, target, number):
    parts, config, values = made
    broken = parts[part].copy()
    broken[3, 2] = number
    layouts.write(tmp_path / "source", ({**parts, part: broken}, config, values))
    for options in ({}, {"requantize": True}):
        with pytest.raises(SafeloadError, match=rf"{layouts.NAME}.*(no finite number|nan|inf)"):
            safeload.convert(tmp_path / "source", tmp_path / "out", quantize=target, **options)


def test_zero_points_that_are_no_codes_are_refused_and_can_be_rounded_again(tmp_path):
    parts, config, values = layouts.compressed("F16", 32, 1, SHAPE)
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "tensor", "symmetric": False}
    scale = np.float16([0.01])
    parts |= {"weight_scale": scale, "weight_zero_point": np.int8([12])}  # of codes from -8 to 7
    layouts.write(tmp_path / "source", (parts, config, values))
    with pytest.raises(UnsupportedError, match=f"{NAME}.*its zero points are not codes"):
        safeload.convert(tmp_path / "source", tmp_path / "out", quantize="w4a16_asym-g32")
    report = safeload.convert(tmp_path / "source", tmp_path / "out", quantize="w4a16_asym-g32", requantize=True)
    assert report.summary.codes == {NAME: "rounded again from int4 tensor asym"}


def test_bytes_that_are_no_codes_of_their_bits_are_an_error_by_name(tmp_path):
    parts, config, values = layouts.compressed_bytes("F16", 32, 1, SHAPE)
    parts["weight"][3, 2] = 8
    layouts.write(tmp_path / "source", (parts, config, values))
    with pytest.raises(FormatError, match=f"{NAME}.*holds codes of -8 to 8, but they are said to have 4 bits"):
        safeload.convert(tmp_path / "source", tmp_path / "out", quantize="w4a16-g32")


def test_codes_are_rounded_again_on_request(tmp_path):
    layouts.write(tmp_path / "source", SOURCES["awq g32"][0])
    report = safeload.convert(tmp_path / "source", tmp_path / "out", quantize="w4a16-g32", requantize=True)
    assert report.summary.codes == {NAME: "rounded again from awq4 g32"}
    assert "1 quantized to w4a16-g32, rounded again from awq4 g32" in str(report)
    safeload.convert(tmp_path / "source", tmp_path / "plain", dtype="float32")
    safeload.convert(tmp_path / "plain", tmp_path / "expected", quantize="w4a16-g32", dtype="float16")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    parts = [key for key in ours if key.startswith(layouts.NAME)]
    assert parts
    assert all(np.array_equal(ours[key], theirs[key]) for key in parts)
    with pytest.raises(ValueError, match="pass only one of the two"):
        safeload.convert(tmp_path / "source", tmp_path / "x", quantize="w4a16-g32", requantize=True, exact=True)
    with pytest.raises(ValueError, match="pass quantize= too"):
        safeload.convert(tmp_path / "source", tmp_path / "x", dtype="float16", exact=True)


@pytest.mark.parametrize("way", ["pieces", "executor"])
@pytest.mark.parametrize(("source", "target"), [("awq g32", "w4a16_asym-g32"), ("gptq g32", "mlx4-g32")])
def test_pieces_move_the_codes_of_one_process(tmp_path, way, source, target):
    layouts.write(tmp_path / "source", SOURCES[source][0])
    one = safeload.convert(tmp_path / "source", tmp_path / "one", quantize=target)
    how = {"resume": True}
    if way == "executor":
        how = {"executor": ThreadPoolExecutor(1)}
    report = safeload.convert(tmp_path / "source", tmp_path / "out", quantize=target, **how)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert report.summary.codes == one.summary.codes


def test_scales_get_the_dtype_that_is_asked_for_if_it_is_exact(tmp_path):
    layouts.write(tmp_path / "source", layouts.awq("F16", 32, 1, SHAPE))
    safeload.convert(tmp_path / "source", tmp_path / "wide", quantize="w4a16_asym-g32", dtype="float32")
    stored = safeload.load(tmp_path / "wide", stored=True)
    assert stored[f"{layouts.NAME}.weight_scale"].dtype == np.float32
    safeload.convert(tmp_path / "source", tmp_path / "same", quantize="w4a16_asym-g32", dtype="bfloat16")
    stored = safeload.load(tmp_path / "same", stored=True)
    assert stored[f"{layouts.NAME}.weight_scale"].dtype == np.float16  # not exact in bfloat16
    a, b = (safeload.load(tmp_path / name, dtype="float32")[NAME] for name in ("wide", "same"))
    np.testing.assert_array_equal(a, b)


def test_the_dtype_in_the_config_follows_the_scales(tmp_path):
    source = SOURCES["awq g32"][0]
    for dtype, expected in (("float16", "float16"), ("bfloat16", "bfloat16")):  # of the norm
        layouts.write(tmp_path / "source", source, dtype)
        config = json.loads((tmp_path / "source/config.json").read_text())
        (tmp_path / "source/config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
        safeload.convert(tmp_path / "source", tmp_path / dtype, quantize="w4a16_asym-g32")
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == expected


@pytest.mark.parametrize("scheme", ["w4a16_asym", "awq", "gptq_asym", "mlx4"])
def test_a_refusal_names_the_format_with_groups_that_fit(scheme, tmp_path):
    layouts.write(tmp_path / "source", SOURCES["awq g32"][0], "float16")
    with pytest.raises(UnsupportedError, match=f"they move to {scheme}-g32; requantize=True rounds them again"):
        safeload.convert(tmp_path / "source", tmp_path / "out", quantize=scheme)
    assert safeload.convert(tmp_path / "source", tmp_path / "out", quantize=f"{scheme}-g32")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("source", ["mxfp4", "nvfp4 multiplied"])
def test_codes_of_a_checkpoint_are_no_blocks_of_the_same_name(tmp_path, source, dtype):
    scheme = source.split()[0]
    values = layouts.write(tmp_path / "source", SOURCES[source][0])
    if scheme == "nvfp4":  # blocks have no place for the scale of the tensor
        with pytest.raises(UnsupportedError, match=f"{NAME}.*cannot move to nvfp4"):
            safeload.convert(tmp_path / "source", tmp_path / "out", quantize=scheme, dtype=dtype)
        return
    report = safeload.convert(tmp_path / "source", tmp_path / "out", quantize=scheme, dtype=dtype)
    assert report.summary.codes == {NAME: f"codes of {scheme}"}
    assert safeload.open(tmp_path / "out").tensors[NAME].dtype == scheme.upper()
    np.testing.assert_array_equal(safeload.load(tmp_path / "out", dtype="float32")[NAME], values)


# ---- towards GGUF and from it ----


@pytest.mark.parametrize("target", ["x.gguf", "x.safetensors"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"raw": True}])
def test_blocks_with_the_scale_of_a_tensor_stay_if_their_type_is_asked_for(tmp_path, target, options):
    source, blocks = (
        DATA / "quantized" / "gguf_nvfp4" / "model.gguf",
        ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"],
    )
    report = safeload.convert(source, tmp_path / target, quantize="nvfp4", **options)
    assert [name for name, why in report.summary.kept.items() if why == "is already nvfp4"] == blocks
    before, after = (safeload.load(path, stored=True) for path in (source, tmp_path / target))
    for name in blocks:
        scale = name.replace("weight", "scale")
        assert after[name].data.tobytes() == before[name].data.tobytes()
        assert after[scale].tobytes() == before[scale].tobytes()


def test_codes_do_not_move_if_columns_change_places(tmp_path):
    pytest.importorskip("tokenizers")
    model = llama_models.listed()["qwen3_5"]  # with columns of linear_attn.out_proj in another order
    source = llama_models.write_folder(tmp_path / "source", model, llama_models.tensors_of(model))
    safeload.convert(source, tmp_path / "first", quantize="w8a8", dtype="float16")
    with pytest.raises(UnsupportedError, match="cannot move to q8_0: its values are rearranged") as caught:
        safeload.convert(tmp_path / "first", tmp_path / "x.gguf", quantize="q8_0")
    name = caught.value.tensor
    report = safeload.convert(tmp_path / "first", tmp_path / "x.gguf", quantize="q8_0", requantize=True)
    fates = report.summary.codes
    assert fates["blk.0.ssm_out.weight"] == fates[name] == "rounded again from int8 row"
    assert {fate for other, fate in fates.items() if "ssm" not in other} == {"codes of int8 row"}


@pytest.mark.parametrize(("first", "scheme"), [("w4a16-g32", "q4_0"), ("w4a16_asym-g32", "q8_0"), ("w8a8", "q8_0")])
def test_codes_move_to_llama_cpp_and_back(tmp_path, first, scheme):
    pytest.importorskip("tokenizers")
    model = llama_models.listed()["llama3"]  # with rows of queries in another order
    source = llama_models.write_folder(tmp_path / "source", model, llama_models.tensors_of(model))
    safeload.convert(source, tmp_path / "first", quantize=first, dtype="float16")
    report = safeload.convert(tmp_path / "first", tmp_path / "x.gguf", quantize=scheme)
    assert sum(how.startswith("codes of ") for how in report.summary.codes.values()) == 14
    safeload.convert(tmp_path / "x.gguf", tmp_path / "plain", dtype="float32")
    expected, plain = safeload.load(tmp_path / "first", dtype="float32"), safeload.load(tmp_path / "plain")
    moved = [name for name in expected if name.endswith("_proj.weight")]
    assert len(moved) == 14
    for name in moved:
        np.testing.assert_array_equal(plain[name], expected[name])
    back = "w4a16-g32" if scheme == "q4_0" else "mlx8-g32"
    safeload.convert(tmp_path / "x.gguf", tmp_path / "back", quantize=back, exact=True)
    again = safeload.load(tmp_path / "back", dtype="float32")
    for name in moved:
        np.testing.assert_array_equal(again[name], expected[name])
    if first == back:
        ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "first"))
        parts = [key for key in ours if "_proj.weight_" in key]
        assert parts
        assert all(np.array_equal(ours[key], theirs[key]) for key in parts)
