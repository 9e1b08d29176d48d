"""The table of dtypes against what numpy, ml_dtypes and gguf-py say of the same types."""

import gguf
import gguf.quants
import ml_dtypes
import numpy as np
import pytest
from builders.inside import dtypes, ffi, lib
from builders.random import rng

KINDS = {
    "f": lib.SL_KIND_FLOAT,
    "i": lib.SL_KIND_INT,
    "u": lib.SL_KIND_INT,
    "b": lib.SL_KIND_BOOL,
    "c": lib.SL_KIND_COMPLEX,
}


@pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.code)
def test_elements_are_of_the_kind_that_numpy_says(row):
    dtype = dtypes.element_dtype(row.number)
    assert row.kind == (KINDS[dtype.kind] if dtype.isbuiltin == 1 else lib.SL_KIND_FLOAT)  # all of ml_dtypes' here
    assert (row.floating, row.complex, row.blocked) == (row.kind == KINDS["f"], row.kind == KINDS["c"], False)
    assert row.scale_count == 0


@pytest.mark.parametrize("row", [row for row in dtypes.TABLE if not row.packed], ids=lambda row: row.code)
def test_another_byte_order_swaps_so_many_bytes(row):
    dtype = dtypes.element_dtype(row.number)
    raw = rng.integers(0, 256, 4 * dtype.itemsize, np.uint8)
    swapped = np.ascontiguousarray(raw.reshape(-1, row.swap)[:, ::-1]).reshape(-1)
    by_numpy = raw.view(dtype).byteswap() if dtype.isbuiltin == 1 else raw.view(f"u{dtype.itemsize}").byteswap()
    np.testing.assert_array_equal(swapped, by_numpy.view(np.uint8))


def test_ggml_numbers_are_gguf_pys():
    known = {int(number): number for number in gguf.GGMLQuantizationType}
    assert lib.sl_dtype_get(lib.SL_Q4_0_ABSMAX).ggml == -1  # is stored as Q4_0
    found = {row.ggml: row for row in dtypes.BY_NUMBER.values() if row.ggml >= 0}
    assert len(found) == sum(row.ggml >= 0 for row in dtypes.BY_NUMBER.values())
    assert len(set(known) & set(found)) >= 30
    for number in set(known) & set(found):
        row = found[number]
        assert known[number].name == row.code
        assert gguf.GGML_QUANT_SIZES[known[number]] == (
            (row.block, row.block_bytes) if row.blocked else (1, row.bits // 8)
        )


@pytest.mark.parametrize("row", dtypes.BLOCK_TYPES.values(), ids=lambda row: row.code)
def test_scales_of_blocks_lie_where_gguf_py_finds_them(row):
    """With all scales finite so is every value; with one of them NaN some value is not."""
    assert row.blocked
    assert row.scale_at + 2 * row.scale_count <= row.block_bytes
    if row.scale_count == 0 or row.code not in gguf.GGMLQuantizationType.__members__:
        pytest.skip("no float16 scales, or gguf-py does not have the type")
    number = gguf.GGMLQuantizationType(row.ggml)
    if number not in gguf.quants._type_traits:
        pytest.skip("gguf-py restores none")
    blocks = rng.integers(0, 256, (64, row.block_bytes), np.uint8)
    scales = blocks[:, row.scale_at : row.scale_at + 2 * row.scale_count]
    scales[...] = np.full((64, row.scale_count), 0.5, "<f2").view(np.uint8)
    assert np.isfinite(gguf.quants.dequantize(blocks, number)).all()
    for k in range(row.scale_count):
        bad = blocks.copy()
        bad[:, row.scale_at + 2 * k : row.scale_at + 2 * k + 2] = np.array([np.nan], "<f2").view(np.uint8)
        assert np.isnan(gguf.quants.dequantize(bad, number)).any(axis=1).all()


@pytest.mark.parametrize("row", dtypes.BLOCK_TYPES.values(), ids=lambda row: row.code)
def test_the_first_block_with_a_bad_scale_is_found(row):
    blocks = np.zeros((9, row.block_bytes), np.uint8)
    pointer = ffi.from_buffer(blocks)
    assert lib.sl_blocks_finite(row.number, pointer, 9) == 9
    for k in range(row.scale_count):
        for bad in (np.nan, np.inf, -np.inf):
            blocks[...] = 0
            blocks[5:7, row.scale_at + 2 * k : row.scale_at + 2 * k + 2] = np.array([bad], "<f2").view(np.uint8)
            assert lib.sl_blocks_finite(row.number, pointer, 9) == 5
    blocks[...] = 0xFF  # also a NaN among the scales of MXFP4 and NVFP4
    assert lib.sl_blocks_finite(row.number, pointer, 9) == (
        0 if row.scale_count or row.code in ("MXFP4", "NVFP4") else 9
    )


# ---- what people type ----

ALIASES = {
    "float16": ["f16", "fp16", "half", "float16", "torch.float16"],
    "bfloat16": ["bf16", "bfloat16", "torch.bfloat16"],
    "float32": ["f32", "fp32", "float32", "torch.float32"],
    "float64": ["f64", "fp64", "float64"],
    "float8_e4m3fn": ["fp8", "e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"],
    "float8_e5m2": ["e5m2", "float8_e5m2"],
}


@pytest.mark.parametrize("name", ALIASES)
def test_dtypes_have_the_names_that_people_type_in_any_case(name):
    for alias in ALIASES[name]:
        for text in (alias, alias.upper(), alias.title()):
            if text not in dtypes.BY_CODE:
                assert dtypes.parse(text).name == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((row.code, row.name) for row in dtypes.TABLE),
        *((row.name, row.name) for row in dtypes.TABLE),
        *[("float", "float64"), ("double", "float64"), ("single", "float32"), ("f2", "float16"), ("f4", "float32")],
        *[("f8", "float64"), ("i8", "int64"), ("u8", "uint64"), ("i4", "int32"), ("e", "float16"), ("?", "bool")],
        *[(float, "float64"), (np.float32, "float32"), (np.dtype(">f4"), "float32"), (ml_dtypes.bfloat16, "bfloat16")],
    ],
    ids=str,
)
def test_names_of_numpy_and_codes_keep_their_meaning(dtype, name):
    assert dtypes.parse(dtype).name == name


def test_a_dtype_of_torch_is_known_by_its_name():
    class dtype:  # noqa: N801 - as torch calls it
        __module__ = "torch"

        def __init__(self, name):
            self.name = name

        def __str__(self):
            return f"torch.{self.name}"

    for name in ("float16", "bfloat16", "float32", "float8_e5m2", "int64"):
        assert dtypes.parse(dtype(name)).name == name
    with pytest.raises(TypeError, match="unknown dtype"):
        dtypes.parse(dtype("qint8"))


def test_a_scalar_type_of_jax_is_known_by_its_dtype():
    class Scalar(type):  # as jax.numpy.bfloat16 is made
        dtype = np.dtype(ml_dtypes.bfloat16)

    assert dtypes.parse(Scalar("bfloat16", (), {"dtype": Scalar.dtype})).name == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "end"),
    [
        ("flaot32", ": did you mean 'float32'?"),
        ("Float_16", ": did you mean 'float16'?"),
        ("bfloat", ": did you mean 'bfloat16'?"),
        ("float8", ": did you mean 'float8_e5m2' or 'float8_e4m3fn'?"),
        ("int4", ", expected one of float8_e5m2, float8_e4m3fn, float16, bfloat16"),
        ("", ", expected one of float8_e5m2, float8_e4m3fn, float16, bfloat16"),
        ("x" * 10**6, "..., expected one of float8_e5m2, float8_e4m3fn, float16, bfloat16"),
        (7, ", expected one of float8_e5m2, float8_e4m3fn, float16, bfloat16"),
        ("Q8_0", ": it is a quantization scheme, see safeload.load_quantized"),
        ("q6_k", ": it is a quantization scheme"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_unknown_dtype_is_answered_with_the_nearest_that_works(dtype, end):
    among = [dtypes.BY_NAME[name] for name in ("float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float32")]
    with pytest.raises(TypeError) as caught:
        dtypes.parse(dtype, among)
    assert str(caught.value).startswith("unknown dtype ")
    assert end in str(caught.value)
    assert len(str(caught.value)) < 400
