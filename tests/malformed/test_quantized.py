"""Quantized checkpoints with one fault each: refused with an error that names the tensor, never a wrong weight.

A fault in names, shapes or dtypes is found when the checkpoint is opened, one in values when they are read. What the
files store can be opened in any case.
"""

import json
import math
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from builders.quantized import FIXTURES
from builders.thorough import part_of

import safeload
from safeload import FormatError, QuantizedTensor, SafeloadError, UnsupportedError
from safeload.numpy import save_file

U8, I8, I32, I64, U32 = np.uint8, np.int8, np.int32, np.int64, np.uint32
F16, F32, F64, BF16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16
F8, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def write(folder, tensors, config=None, metadata=None):
    """A folder of one file."""
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata, durable=False)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def fixture_of(name):
    """The tensors and the config of a fixture, and the name of its first packed tensor with that of its codes."""
    fixture = FIXTURES[name]
    config = fixture.folder / "config.json"
    with safeload.open(fixture.path) as opened:
        values = opened.load().items()
    packed = next(name for name, value in values if isinstance(value, QuantizedTensor) and value.size)
    said = json.loads(config.read_text()) if config.exists() else None
    return {name: array.copy() for name, array in fixture.stored().items()}, said, packed


def opens_as_stored(folder, tensors):
    with safeload.open(folder, stored=True) as opened:
        assert set(opened) == set(tensors)
        for name, array in opened.load().items():
            assert array.tobytes() == np.ascontiguousarray(tensors[name]).tobytes()


def refusal_or(call):
    """What a call returns; the message if it is refused with an error of ours."""
    try:
        return call()
    except SafeloadError as error:
        return str(error)


# ---- what is found when a checkpoint is opened ----


def without(suffix):
    def change(tensors, config, packed):
        del tensors[packed + suffix]

    return change


def instead(suffix, make):
    """Another tensor, made of the one that ends in a suffix."""

    def change(tensors, config, packed):
        tensors[packed + suffix] = make(tensors[packed + suffix])

    return change


def of_module(suffix, make=None):
    """The same with a name that begins as the module's; None: it is missing."""

    def change(tensors, config, packed):
        name = packed.removesuffix("weight") + suffix
        if make is None:
            del tensors[name]
        else:
            tensors[name] = make(tensors[name])

    return change


def rows_of_scales(tensors, config, packed):
    tensors[packed + "_scale_inv"] = np.ones((len(tensors[packed]), 1), F32)


def added(suffix, array):
    def change(tensors, config, packed):
        tensors[packed + suffix] = array

    return change


def said(**values):
    def change(tensors, config, packed):
        config["quantization_config"].update(values)

    return change


def said_of_weights(**values):
    def change(tensors, config, packed):
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"].update(values)

    return change


BLOCKS = said_of_weights(strategy="block", block_structure=[64, 64], group_size=None)


def quantization(**values):
    def change(tensors, config, packed):
        for key in ("quantization", "quantization_config"):
            config[key].update(values)

    return change


def shaped(*shape):
    return lambda array: np.resize(array, shape)


def of_dtype(dtype):
    return lambda array: array.astype(F32).astype(dtype)


def state(kind="nf4", **values):
    """Other values in the JSON of bitsandbytes; None for a key that is not there."""

    def change(tensors, config, packed):
        name = f"{packed}.quant_state.bitsandbytes__{kind}"
        said = {**json.loads(tensors[name].tobytes()), **values}
        tensors[name] = text({key: value for key, value in said.items() if value is not None})

    return change


def text(said):
    return np.frombuffer((said if isinstance(said, str) else json.dumps(said)).encode(), U8)


NF4 = ".quant_state.bitsandbytes__nf4"

AT_OPENING = {
    "fp8: no scale": ("fp8_block", without("_scale_inv"), "has no scale for them .quantization_config fp8"),
    "fp8: a row of scales too few": (
        "fp8_block",
        instead("_scale_inv", lambda s: s[:, :-1]),
        r"do not fit .* in blocks of 128 x 128: expected \[",
    ),
    "fp8: a row of scales too many": ("fp8_block", instead("_scale_inv", lambda s: np.vstack([s, s])), "do not fit"),
    "fp8: scales of 3 axes": ("fp8_block", instead("_scale_inv", lambda s: s[None]), "do not fit"),
    "fp8: scales of 1 axis": ("fp8_block", instead("_scale_inv", lambda s: s.reshape(-1)), "do not fit .* expected"),
    "fp8: no scales in a part": ("fp8_block", instead("_scale_inv", lambda s: s[:0]), "do not fit|scales"),
    "fp8: scales of f64": ("fp8_block", instead("_scale_inv", of_dtype(F64)), "is F64"),
    "fp8: scales of i64": ("fp8_block", instead("_scale_inv", of_dtype(I64)), "is I64"),
    "fp8: scales of i8": ("fp8_block", instead("_scale_inv", of_dtype(I8)), "is I8"),
    "fp8: complex scales": ("fp8_block", instead("_scale_inv", lambda s: s.astype(np.complex64)), "is C64"),
    "fp8: bool scales": ("fp8_block", instead("_scale_inv", lambda s: s.astype(bool)), "is BOOL"),
    "fp8: other blocks": ("fp8_block", said(weight_block_size=[64, 64]), "blocks of 64 x 64: expected"),
    "fp8: wide blocks": ("fp8_block", said(weight_block_size=[2**30, 2**30]), "blocks of 1073741824 x"),
    "fp8: rows said to be blocks": ("fp8_block", rows_of_scales, r"scales \[\d+, 1\] .* blocks of 128 x 128: expected"),
    "fp8: experts of another number": (
        "fp8_experts",
        instead("_scale_inv", lambda s: s[:-1]),
        "different numbers of experts",
    ),
    "fbgemm: a row too few": ("fbgemm", instead("_scale", lambda s: s[:-1]), "do not fit"),
    "ct: no scale": ("ct_pack_w4_g32_sym", without("_scale"), "has no scale for them .*compressed-tensors"),
    "ct: words too wide": (
        "ct_pack_w4_g32_sym",
        instead("_packed", lambda w: np.hstack([w, w[:, :1]])),
        "config_groups",
    ),
    "ct: words too narrow": ("ct_pack_w4_g32_sym", instead("_packed", lambda w: w[:, :-1]), "config_groups"),
    "ct: words of 1 axis": ("ct_pack_w4_g32_sym", instead("_packed", lambda w: w.reshape(-1)), "not a matrix"),
    "ct: 8 bits": ("ct_pack_w4_g32_sym", said_of_weights(num_bits=8), "do not hold rows of .* codes of 8 bits"),
    "ct: groups of 64": (
        "ct_pack_w4_g32_sym",
        said_of_weights(group_size=64),
        "expected .* for groups of 64",
    ),
    "ct: a shape of more columns beside scales of rows": (
        "ct_pack_w4_channel_asym",
        instead("_shape", lambda s: s + np.int64([0, 2**40])),
        "do not hold",
    ),
    "ct: a shape of more rows beside scales of rows": (
        "ct_pack_w4_channel_asym",
        instead("_shape", lambda s: s + np.int64([1, 0])),
        "weight_shape .* fit",
    ),
    "ct: a negative shape beside scales of rows": (
        "ct_pack_w4_channel_asym",
        instead("_shape", lambda s: -s),
        "weight_shape .* fit",
    ),
    "ct: a shape of 3 axes": ("ct_pack_w4_g32_sym", instead("_shape", lambda s: np.int64([2, *s])), "do not hold|fit"),
    "ct: a shape of 1 axis": ("ct_pack_w4_g32_sym", instead("_shape", lambda s: s[:1]), "weight_shape"),
    "ct: a shape without axes": (
        "ct_pack_w4_g32_sym",
        instead("_shape", lambda s: s[0]),
        "must be a list of at most 8 integers",
    ),
    "ct: a shape of floats": (
        "ct_pack_w4_g32_sym",
        instead("_shape", of_dtype(F32)),
        "must be a list of at most 8 integers",
    ),
    "ct: a shape of 100 axes": (
        "ct_pack_w4_g32_sym",
        instead("_shape", shaped(100)),
        "must be a list of at most 8 integers",
    ),
    "ct: scales of other rows": ("ct_pack_w4_g32_sym", instead("_scale", lambda s: s[:-1]), "do not fit"),
    "ct: no groups": ("ct_pack_w4_g32_sym", instead("_scale", lambda s: s[:, :0]), "groups|do not fit"),
    "ct: U8 scales": ("ct_pack_w4_g32_sym", instead("_scale", of_dtype(U8)), "scales are U8"),
    "ct: zero points of other rows": (
        "ct_pack_w4_g128_asym",
        instead("_zero_point", lambda z: z[:-1]),
        "zero points are .* expected",
    ),
    "ct: zero points that are not packed": (
        "ct_pack_w4_g128_asym",
        instead("_zero_point", of_dtype(I8)),
        "zero points are .* expected",
    ),
    "ct: zero points of bool": ("ct_int8_g32_asym", instead("_zero_point", of_dtype(bool)), "is BOOL"),
    "ct: zero points of another shape": ("ct_int8_g32_asym", instead("_zero_point", lambda z: z[:1]), "zero points"),
    "ct: a short g_idx": ("ct_old_g_idx", instead("_g_idx", lambda g: g[:-1]), "g_idx is I32"),
    "ct: a g_idx of i64": ("ct_old_g_idx", instead("_g_idx", of_dtype(I64)), "g_idx is I64"),
    "ct: a g_idx of f32": ("ct_old_g_idx", instead("_g_idx", of_dtype(F32)), "g_idx is F32"),
    "ct: int8 in other groups": (
        "ct_int8_g32_asym",
        said_of_weights(group_size=48),
        "expected .* for groups of 48",
    ),
    "ct: int8 rows said to be blocks": (
        "ct_int8_channel",
        BLOCKS,
        r"scales \[\d+, 1\] .* blocks of 64 x 64",
    ),
    "ct: fp8 rows said to be blocks": ("ct_fp8_channel", BLOCKS, r"scales \[\d+, 1\] .* blocks of 64 x 64"),
    "ct: packed rows said to be blocks": ("ct_pack_w8_channel", BLOCKS, r"scales \[\d+, 1\] .* blocks of 64 x 64"),
    "ct: one scale said to be blocks": ("ct_fp8_tensor", BLOCKS, r"scales \[1\] .* blocks of 64 x 64"),
    "ct: fp8 blocks said to be rows": (
        "ct_fp8_block",
        said_of_weights(strategy="channel", block_structure=None),
        r"scales \[2, 2\] do not fit \[130, 140\]: expected \[130, 1\] for strategy channel",
    ),
    "ct: fp8 blocks said to be a tensor": (
        "ct_fp8_block",
        said_of_weights(strategy="tensor", block_structure=None),
        r"expected \[1, 1\] for strategy tensor",
    ),
    "ct: fp8 blocks of other sides": (
        "ct_fp8_block",
        said_of_weights(block_structure=[128, 64]),
        r"expected \[2, 3\] for blocks of 128 x 64",
    ),
    "ct: packed blocks of other sides": (
        "ct_pack_w8_block",
        said_of_weights(block_structure=[64, 64]),
        r"scales \[3, 3\] do not fit \[72, 131\]: expected \[2, 3\] for blocks of 64 x 64",
    ),
    "ct: packed blocks said to be groups": (
        "ct_pack_w8_block",
        said_of_weights(strategy="group", block_structure=None, group_size=64),
        "for groups of 64",
    ),
    "ct: packed blocks with few zero points": (
        "ct_pack_w4_block_asym",
        instead("_zero_point", lambda z: z[:1]),
        "zero points are .* expected",
    ),
    "ct: packed blocks with packed zero points": (
        "ct_pack_w4_block_asym",
        instead("_zero_point", of_dtype(I32)),
        "zero points are packed, but",
    ),
    **{
        f"{name}: asymmetric without zero points": (
            name,
            said_of_weights(symmetric=False),
            "missing, but symmetric is false",
        )
        for name in ("ct_pack_w4_g32_sym", "ct_pack_w8_block", "ct_int8_channel", "ct_naive_int4", "ct_fp8_block")
    },
    "ct: asymmetric, and its zero points are missing": (
        "ct_pack_w4_g128_asym",
        without("_zero_point"),
        "zero points are missing, but symmetric is false in config_groups",
    ),
    "awq: no qzeros": ("awq4_gemm", of_module("qzeros"), "its qzeros are missing"),
    "gptq: no qzeros": ("gptq4_g32_asym", of_module("qzeros"), "its qzeros are missing"),
    "ct: mxfp8 in groups of 16": ("ct_mxfp8", said_of_weights(group_size=16), "for groups of 16"),
    "ct: nvfp4 in groups of 32": (
        "ct_nvfp4",
        said_of_weights(group_size=32),
        "nvfp4 has groups of 16, but group_size is 32",
    ),
    "ct: mxfp4 in groups of 16": (
        "ct_mxfp4",
        said_of_weights(group_size=16),
        "mxfp4 has groups of 32, but group_size is 16",
    ),
    "ct: mxfp6 in groups of 64": ("ct_mxfp6", said_of_weights(group_size=64), "for groups of 64"),
    "ct: sparse rows said to be blocks": ("ct_sparse_24_fp8", BLOCKS, "blocks of 64 x 64"),
    "ct: nvfp4 without a global scale": ("ct_nvfp4", without("_global_scale"), "must be F8_E8M0 or U8, got F8_E4M3"),
    "ct: no global scale in it": (
        "ct_nvfp4",
        instead("_global_scale", lambda g: g[:0]),
        "global scales .0. do not fit",
    ),
    "ct: 5 global scales": (
        "ct_nvfp4",
        instead("_global_scale", lambda g: g.repeat(5)),
        "global scales .5. do not fit",
    ),
    "ct: a global scale of u8": ("ct_nvfp4", instead("_global_scale", of_dtype(U8)), "is U8"),
    "ct: scales of 8 columns": ("ct_nvfp4", instead("_scale", lambda s: s.repeat(2, 1)), "in blocks of 16"),
    "ct: mxfp6 cut": ("ct_mxfp6", instead("_packed", lambda w: w[:, :-1]), "do not fit|blocks"),
    "sparse: no values": ("ct_sparse", of_module("compressed"), "but not the other parts"),
    "sparse: no mask": ("ct_sparse", of_module("bitmask"), "but not the other parts"),
    "sparse: no shape": ("ct_sparse", of_module("shape"), "but not the other parts"),
    "sparse: no row_offsets": ("ct_sparse", of_module("row_offsets"), "its row_offsets are missing"),
    "sparse: a mask of fewer rows": ("ct_sparse", of_module("bitmask", lambda m: m[:-1]), r"expected U8 \[\d+, \d+\]"),
    "sparse: a mask of fewer columns": ("ct_sparse", of_module("bitmask", lambda m: m[:, 1:]), "expected U8"),
    "sparse: a mask of i8": ("ct_sparse", of_module("bitmask", of_dtype(I8)), "bitmask is I8"),
    "sparse: a row more": ("ct_sparse", of_module("shape", lambda s: s + I64([1, 0])), "bitmask is U8 .* expected U8"),
    "sparse: 8 columns more": ("ct_sparse", of_module("shape", lambda s: s + I64([0, 8])), "bitmask is U8 .* expected"),
    "sparse: a negative shape": ("ct_sparse", of_module("shape", lambda s: -s), "is not the shape of a weight"),
    "sparse: a shape of no axes": ("ct_sparse", of_module("shape", lambda s: s[:0]), "is not the shape of a weight"),
    "sparse: a shape of floats": (
        "ct_sparse",
        of_module("shape", of_dtype(F32)),
        "must be a list of at most 8 integers",
    ),
    "sparse: row_offsets of f32": ("ct_sparse", of_module("row_offsets", of_dtype(F32)), "row_offsets is F32"),
    "sparse: a row_offset less": (
        "ct_sparse",
        of_module("row_offsets", lambda s: s[1:]),
        r"row_offsets is I64 .* expected",
    ),
    "sparse: values of 3 axes": (
        "ct_sparse",
        of_module("compressed", lambda v: v[None, None]),
        "must be a list or a matrix",
    ),
    "sparse: values with a scale": (
        "ct_sparse",
        added("_scale", np.ones((13, 1), F32)),
        "BF16 values must not have a scale",
    ),
    "sparse: codes without a scale": ("ct_sparse_24_fp8", of_module("weight_scale"), "but their scale is missing"),
    "sparse: scales of other rows": ("ct_sparse_24_fp8", of_module("weight_scale", lambda s: s[1:]), "do not fit"),
    "sparse 2:4: three of six": ("ct_sparse_24", of_module("compressed", lambda v: v[:, 1:]), "two of every four"),
    "sparse 2:4: a shape of 3 axes": ("ct_sparse_24", of_module("shape", shaped(3, 1)), r"expected I64 \[2, 1\]"),
    "sparse 2:4: a mask of more columns": (
        "ct_sparse_24",
        of_module("bitmask", lambda m: m.repeat(2, 1)),
        "expected U8",
    ),
    "gpt-oss: no scales": ("gpt_oss", without("_scales"), "has no scale for them .*mxfp4"),
    "gpt-oss: blocks of 15 bytes": ("gpt_oss", instead("_blocks", lambda b: b[..., :-1]), "blocks must have 16 bytes"),
    "gpt-oss: fewer scales": ("gpt_oss", instead("_scales", lambda s: s[..., :-1]), "blocks must have 16 bytes"),
    "gpt-oss: scales of f32": ("gpt_oss", instead("_scales", of_dtype(F32)), "must be F8_E8M0, got F32"),
    "mlx: no scales": ("mlx_affine4_g64", lambda t, c, p: t.pop(p.replace("weight", "scales")), "no scale"),
    "mlx: no biases": (
        "mlx_affine4_g64",
        lambda t, c, p: t.pop(p.replace("weight", "biases")),
        "its biases are missing",
    ),
    "mlx: 8 bits": ("mlx_affine4_g64", quantization(bits=8), "do not hold 8 bits in groups of 64"),
    "mlx: groups of 32": ("mlx_affine4_g64", quantization(group_size=32), "do not hold 4 bits in groups of 32"),
    "mlx: affine mode": ("mlx_mxfp4", quantization(mode="affine"), "its biases are missing"),
    "bitnet: no scale": ("bitnet_times", without("_scale"), "holds U8 codes, .* has no scale"),
    "bitnet: two scales": (
        "bitnet_times",
        instead("_scale", lambda s: s.repeat(2)),
        "expected a matrix with a single scale",
    ),
    "bitnet: no element": ("bitnet_times", instead("_scale", lambda s: s[:0]), "expected a matrix with a single scale"),
    "bitnet: 3 axes": ("bitnet_times", instead("", lambda w: w[None]), "expected a matrix with a single scale"),
    "bitnet: scale of i32": ("bitnet_times", instead("_scale", of_dtype(I32)), "is I32"),
    "modelopt: no global scale": ("modelopt_nvfp4", without("_scale_2"), "holds U8 codes, .* has no scale"),
    "modelopt: scales of bf16": ("modelopt_nvfp4", instead("_scale", of_dtype(BF16)), "must be F8_E4M3, got BF16"),
    "modelopt: scales cut": ("modelopt_nvfp4", instead("_scale", lambda s: s[:, :-1]), "do not fit rows"),
    "modelopt: 7 global scales": ("modelopt_nvfp4", instead("_scale_2", lambda s: np.full(7, s)), "global scales .7."),
    "modelopt: factors cut": (
        "modelopt_nvfp4",
        lambda t, c, p: t.update({p.replace("weight", "pre_quant_scale"): np.ones(3, F32)}),
        "pre_quant_scale .3. does not fit",
    ),
    "bnb: no absmax": ("bnb_nf4", without(".absmax"), "'.*absmax' is missing beside '.*nf4'"),
    "bnb: no quant_map": ("bnb_nf4", without(".quant_map"), "'.*quant_map' is missing beside '.*nf4'"),
    "bnb: no quant_state": ("bnb_nf4", without(NF4), "holds U8 codes, but the checkpoint has no scale"),
    "bnb: no quant_state of wide codes": (
        "bnb_fp4_bf16",
        without(".quant_state.bitsandbytes__fp4"),
        "the checkpoint has '.*absmax', but not the quant_state or the codes",
    ),
    "bnb: no codes": ("bnb_nf4", without(""), "but not the quant_state or the codes"),
    "bnb: a state that is no JSON": ("bnb_nf4", instead(NF4, lambda s: s[:-1]), "is not JSON"),
    "bnb: a state of a list": ("bnb_nf4", added(NF4, text("[1]")), "must be a JSON object"),
    "bnb: a state with a key twice": ("bnb_nf4", added(NF4, text('{"a":1,"a":2}')), "duplicate key"),
    "bnb: a deep state": (
        "bnb_nf4",
        added(NF4, text('{"a":' * 99 + "1" + "}" * 99)),
        "nested more than 64 levels deep",
    ),
    "bnb: a long state": ("bnb_nf4", added(NF4, text({"a": "x" * 2000})), "must be U8 and have at most 1,024 bytes"),
    "bnb: an empty state": ("bnb_nf4", added(NF4, text("")), "is not JSON"),
    "bnb: a state of floats": ("bnb_nf4", added(NF4, np.ones(9, F32)), "must be U8"),
    "bnb: a state of another kind": ("bnb_nf4", state(quant_type="fp4"), "__nf4' has quant_type 'fp4', expected nf4"),
    "bnb: no shape": ("bnb_nf4", state(shape=None), "must be a list of lengths, got None"),
    "bnb: a shape of text": ("bnb_nf4", state(shape=["40", "72"]), "must be a list of lengths"),
    "bnb: a shape of bool": ("bnb_nf4", state(shape=[2880, True]), "must be a list of lengths"),
    "bnb: a negative shape": ("bnb_nf4", state(shape=[-40, -72]), "must be a list of lengths"),
    "bnb: a shape of fewer": ("bnb_nf4", state(shape=[39, 72]), "shape .39, 72.*1404 bytes .* got 1440 bytes"),
    "bnb: a shape of more": ("bnb_nf4", state(shape=[41, 72]), "shape .41, 72.*1476 bytes .* got 1440 bytes"),
    "bnb: a huge shape": ("bnb_nf4", state(shape=[2**62, 2**62]), "too many elements"),
    "bnb: a huge empty shape": ("bnb_nf4", state(shape=[0, 2**62, 2**62]), "too many elements"),
    "bnb: a shape of 100 axes": ("bnb_nf4", state(shape=[1] * 100), "must be a list of lengths"),
    "bnb: blocks of 0": ("bnb_nf4", state(blocksize=0), "blocksize in its quant_state must be an even length .* got 0"),
    "bnb: blocks of 63": (
        "bnb_nf4",
        state(blocksize=63),
        "blocksize in its quant_state must be an even length .* got 63",
    ),
    "bnb: long nested blocks": ("bnb_nf4_nested", state(nested_blocksize=2**30), "nested_blocksize .* got 1073741824"),
    "bnb: blocks of text": ("bnb_nf4", state(blocksize="64"), "blocksize .* got '64'"),
    "bnb: other blocks": ("bnb_nf4", state(blocksize=128), "absmax .45. does not fit shape .40, 72. in blocks of 128"),
    "bnb: absmax cut": ("bnb_nf4", instead(".absmax", lambda s: s[:-1]), "absmax .44. does not fit"),
    "bnb: absmax of u8": ("bnb_nf4", instead(".absmax", of_dtype(U8)), "'.*nested_absmax' is missing"),
    "bnb: absmax of i32": ("bnb_nf4", instead(".absmax", of_dtype(I32)), "absmax is I32"),
    "bnb: 17 numbers": ("bnb_nf4", instead(".quant_map", shaped(17)), r"quant_map is F32 \[17\], expected F32 \[16\]"),
    "bnb: numbers of i8": ("bnb_nf4", instead(".quant_map", of_dtype(I8)), "quant_map is I8"),
    "bnb: nested absmax cut": ("bnb_nf4_nested", instead(".nested_absmax", shaped(0)), r"nested_absmax is F32 \[0\]"),
    "bnb: no nested numbers": ("bnb_nf4_nested", without(".nested_quant_map"), "'.*nested_quant_map' is missing"),
    "bnb: no nested absmax": (
        "bnb_nf4_nested",
        without(".nested_absmax"),
        "absmax is U8, but '.*nested_absmax' is missing",
    ),
    "bnb: nested and f32": ("bnb_nf4_nested", instead(".absmax", of_dtype(F32)), "absmax is F32, but it must be U8"),
    "bnb: nested blocks of 0": ("bnb_nf4_nested", state(nested_blocksize=0), "nested_blocksize .* got 0"),
    "bnb: no offset": (
        "bnb_nf4_nested",
        state(nested_offset=None),
        "nested_offset .* must be a finite number, got None",
    ),
    "bnb: an offset of NaN": ("bnb_nf4_nested", state(nested_offset=math.nan), "nested_offset .* got nan"),
    "bnb: an offset of 1e300": ("bnb_nf4_nested", state(nested_offset=10**300), "nested_offset .* got 1000"),
    "bnb: an offset of text": ("bnb_nf4_nested", state(nested_offset="0"), "nested_offset .* got '0'"),
    "bnb: SCB cut": (
        "bnb_int8",
        lambda t, c, p: t.update({p.replace("weight", "SCB"): np.ones(3, F32)}),
        "SCB .3. does not fit codes",
    ),
    "gptqmodel: no absmax": ("gptqmodel_bnb_nf4", without("_absmax"), "'.*_absmax' is missing beside '.*_quant_state'"),
    "gptqmodel: no quant_map": ("gptqmodel_bnb_nf4", without("_quant_map"), "'.*_quant_map' is missing beside"),
    "gptqmodel: no quant_state": ("gptqmodel_bnb_nf4", without("_quant_state"), "but not the quant_state"),
    "gptqmodel: absmax cut": ("gptqmodel_bnb_nf4", instead("_absmax", lambda a: a[1:]), r"absmax \[44\] does not fit"),
    "gptqmodel: bytes that are no JSON": ("gptqmodel_bnb_nf4", instead("_quant_state", lambda s: s[1:]), "not .*JSON"),
    "gptqmodel: no kind": (
        "gptqmodel_bnb_nf4",
        instead("_quant_state", lambda s: text({**json.loads(s.tobytes()), "quant_type": ["nf4"]})),
        "has quant_type .*, expected nf4 or fp4",
    ),
    "gptqmodel: scb cut": ("gptqmodel_bnb_int8", instead("_scb", lambda s: s[1:]), "does not fit codes"),
    "gptqmodel: no scb": ("gptqmodel_bnb_int8", without("_scb"), "holds I8 codes, .* has no scale"),
    "bnb: no SCB": ("bnb_int8", lambda t, c, p: t.pop(p.replace("weight", "SCB")), "holds I8 codes, .* has no scale"),
    "two tensors of one name": (
        "ct_pack_w4_g32_sym",
        added("", np.ones((2, 2), F32)),
        "stored twice, as itself and as",
    ),
}
# Faults that concern the values of some modules: their codes open as they are stored.
OF_VALUES = {
    "mlx: an unknown mode": ("mlx_mxfp4", quantization(mode="nf4\x1b"), r"mode nf4\\x1b \(config.json\) can change"),
    "two packed tensors of one name": (
        "ct_pack_w4_g32_sym",
        lambda t, c, p: t.update({p + "_blocks": np.zeros((2, 3, 16), U8), p + "_scales": np.zeros((2, 3), U8)}),
        "'weight_scales' beside its codes can change their values",
    ),
}


@pytest.mark.parametrize("case", OF_VALUES)
def test_a_fault_of_values_is_found_when_they_are_read(case, tmp_path):
    name, change, message = OF_VALUES[case]
    tensors, config, packed = fixture_of(name)
    change(tensors, config, packed)
    write(tmp_path, tensors, config)
    with safeload.open(tmp_path) as opened, pytest.raises(UnsupportedError, match=message):
        opened.load(dtype="float32")
    opens_as_stored(tmp_path, tensors)


@pytest.mark.parametrize("case", AT_OPENING)
def test_a_fault_of_names_shapes_or_dtypes_is_found_at_opening(case, tmp_path):
    name, change, message = AT_OPENING[case]
    tensors, config, packed = fixture_of(name)
    change(tensors, config, packed)
    write(tmp_path, tensors, config)
    with pytest.raises(FormatError, match=message) as caught:
        safeload.open(tmp_path)
    text = str(caught.value)
    assert repr(packed) in text or repr(packed)[:-1] in text
    assert "Pass stored=True to open the tensors as stored" in text
    assert str(tmp_path) in text
    assert "\x1b" not in text
    assert len(text) < 4000
    opens_as_stored(tmp_path, tensors)
    # Alone, the file may be one of several. It opens, and what does not fit is not read as numbers.
    with safeload.open(tmp_path / "model.safetensors") as opened:
        opened.load()
        if case not in ("two tensors of one name", "bnb: no codes", "sparse: no values"):
            with pytest.raises((UnsupportedError, FormatError)):
                opened.load(dtype="float32")


def test_many_faults_are_counted(tmp_path):
    weights = {f"layer.{k:03}.weight": np.zeros((4, 4), F8) for k in range(50)}
    write(tmp_path, weights, {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(FormatError, match=r"'layer.000.weight'.*'layer.004.weight'.*; and 45 more faults") as caught:
        safeload.open(tmp_path)
    assert len(str(caught.value)) < 1500


# ---- what is found when values are read ----


def at(index, value):
    """A tensor with one other element."""

    def make(array):
        array = array.copy()
        array[index] = value
        return array

    return make


def bits_at(index, value):
    def make(array):
        array = array.copy()
        array.view(U8)[index] = value
        return array

    return make


AT_READING = {
    "fp8: NaN": ("fp8_block", instead("_scale_inv", at((0, 1), np.nan)), r"its scale is nan at \[0, 1\]"),
    "fp8: infinity": ("fp8_block", instead("_scale_inv", at((0, 0), -np.inf)), r"its scale is -inf at \[0, 0\]"),
    "fp8: NaN of bf16": ("fp8_block_bf16_scale", instead("_scale_inv", at((0, 0), np.nan)), r"nan at \[0, 0\]"),
    "fp8: E8M0 255": ("fp8_block_e8m0", instead("_scale_inv", bits_at((0, 1), 255)), r"nan at \[0, 1\]"),
    "fp8: U8 255": ("fp8_block_u8", instead("_scale_inv", at((0, 1), 255)), r"nan at \[0, 1\]"),
    "fp8: NaN for a row": ("fbgemm", instead("_scale", at((3, 0), np.nan)), r"nan at \[3, 0\]"),
    "fp8: NaN for an expert": ("fp8_experts", instead("_scale_inv", at((1, 0, 0), np.nan)), r"nan at \[1, 0, 0\]"),
    "fp8: NaN for all": ("fp8_autofp8", instead("_scale", lambda s: s * F32(np.nan)), "its scale is nan"),
    "ct: NaN": ("ct_pack_w4_g32_sym", instead("_scale", at((2, 1), np.nan)), r"nan at \[2, 1\]"),
    "ct: a shape of fewer columns": (
        "ct_pack_w4_g32_sym",
        instead("_shape", lambda s: s - np.int64([0, 1])),
        "its stored shape is .*, but its codes and scales have",
    ),
    "ct: a shape of more rows": (
        "ct_pack_w4_g32_sym",
        instead("_shape", lambda s: s + np.int64([1, 0])),
        "its stored shape is",
    ),
    "ct: a shape of many columns": (
        "ct_pack_w4_g32_sym",
        instead("_shape", lambda s: s + np.int64([0, 2**40])),
        "its stored shape is",
    ),
    "ct: a negative shape": ("ct_pack_w4_g32_sym", instead("_shape", lambda s: -s), "its stored shape is"),
    "ct: a group too large": (
        "ct_old_g_idx",
        instead("_g_idx", at(5, 1000)),
        "column 5 is in group 1000, but there are",
    ),
    "ct: a negative group": ("ct_old_g_idx", instead("_g_idx", at(5, -2)), "column 5 is in group -2"),
    "ct: no group for one column": ("ct_old_g_idx", instead("_g_idx", at(0, -1)), "column 0 is in group -1"),
    "ct: NaN of nvfp4": ("ct_nvfp4", instead("_scale", bits_at((1, 0), 0x7F)), r"nan at \[1, 0\]"),
    "ct: a global scale of 0": ("ct_nvfp4", instead("_global_scale", lambda g: g * 0), r"its scale is (inf|nan)"),
    "ct: a global NaN": ("ct_nvfp4", instead("_global_scale", lambda g: g * F32(np.nan)), "its global is nan"),
    "ct: exponent 255": ("ct_mxfp4", instead("_scale", at((0, 0), 255)), r"nan at \[0, 0\]"),
    "gpt-oss: exponent 255": ("gpt_oss", instead("_scales", at((1, 2, 0), 255)), r"nan at \[1, 2, 0\]"),
    "mlx: NaN": (
        "mlx_affine4_g64",
        lambda t, c, p: t[p.replace("weight", "scales")].__setitem__((1, 1), np.nan),
        r"scale is nan",
    ),
    "mlx: NaN bias": (
        "mlx_affine4_g64",
        lambda t, c, p: t[p.replace("weight", "biases")].__setitem__((1, 1), np.nan),
        r"its bias is nan at \[1, 1\]",
    ),
    "gptq: a group that does not exist": (
        "gptq3_act_order",
        lambda t, c, p: t[p.replace("weight", "g_idx")].__setitem__(5, 2),
        "column 5 is in group 2, but there are 2 groups",
    ),
    "gptq: NaN": (
        "gptq4_g32_asym",
        lambda t, c, p: t[p.replace("weight", "scales")].__setitem__((1, 1), np.nan),
        r"scale is nan at \[1, 1\]",
    ),
    "awq: infinity": (
        "awq4_gemv",
        lambda t, c, p: t[p.replace("weight", "scales")].__setitem__((1, 1), np.inf),
        r"scale is inf at \[1, 1\]",
    ),
    "sparse: a place too many": (
        "ct_sparse",
        of_module("bitmask", at((1, 3), 1)),
        "row 1 has places for 1 values in its mask, but 0 are stored",
    ),
    "sparse: a place too few": (
        "ct_sparse",
        of_module("bitmask", at((2, 3), 0xFE)),
        r"row 2 has places for (76|130) values in its mask, but (77|131) are stored",
    ),
    "sparse: a value too few": ("ct_sparse", of_module("compressed", lambda v: v[:-1]), r"row (12|9) has places for"),
    "sparse: a value too many": ("ct_sparse", of_module("compressed", lambda v: np.append(v, v[:1])), "row (12|9) has"),
    "sparse: no values at all": (
        "ct_sparse",
        of_module("compressed", lambda v: v[:0]),
        r"row 1 begins at value \d+ of 0",
    ),
    "sparse: rows that begin beyond the values": (
        "ct_sparse",
        of_module("row_offsets", at(4, 1 << 40)),
        "row 4 begins at value 1099511627776 of",
    ),
    "sparse: rows that begin before them": (
        "ct_sparse",
        of_module("row_offsets", at(4, -1)),
        "row 4 begins at value -1",
    ),
    "sparse: rows that descend": ("ct_sparse", of_module("row_offsets", at(2, 0)), "row 2 begins at value 0 of"),
    "sparse: a first row that begins later": ("ct_sparse", of_module("row_offsets", lambda s: s + 1), "row 0 begins"),
    "sparse: a row that begins later": (
        "ct_sparse",
        of_module("row_offsets", lambda s: s + np.arange(len(s)).clip(3, 4) - 3),
        "row 3 has places for",
    ),
    "sparse: NaN": ("ct_sparse_24_fp8", of_module("weight_scale", at((2, 0), np.nan)), r"nan at \[2, 0\]"),
    "sparse 2:4: a place too many": (
        "ct_sparse_24",
        of_module("bitmask", at((5, 0), 0xFF)),
        r"row 5 has places for (42|70) values in its mask, but (38|66) are stored",
    ),
    "sparse 2:4: another shape": ("ct_sparse_24", of_module("shape", lambda s: s - 1), "its stored shape is"),
    "bitnet: code 3": ("bitnet_times", instead("", at((1, 5), 0b11)), r"row 1, column 5 has code 3"),
    "bitnet: code 3 of the last plane": ("bitnet_times", instead("", at((0, 2), 0b11000000)), r"column 2 has code 3"),
    "bitnet: a scale of 0 that divides": ("bitnet_divided", instead("_scale", lambda s: s * 0), "its scale is inf"),
    "bitnet: a scale of infinity": ("bitnet_times", instead("_scale", lambda s: s * F32(np.inf)), "its scale is inf"),
    "bnb: NaN": ("bnb_nf4", instead(".absmax", at(9, np.nan)), r"its scale is nan at \[0, 9\]"),
    "bnb: a NaN number": ("bnb_nf4", instead(".quant_map", at(9, np.nan)), r"its table is nan at \[9\]"),
    "bnb: a nested NaN": (
        "bnb_nf4_nested",
        instead(".nested_absmax", at(0, np.inf)),
        r"its nested_scale is inf at \[0\]",
    ),
    "bnb: a nested NaN number": (
        "bnb_nf4_nested",
        instead(".nested_quant_map", at(3, -np.inf)),
        r"its nested_table is -inf at \[3\]",
    ),
    "bnb: nested scales that overflow": (
        "bnb_nf4_nested",
        lambda t, c, p: t.update({f"{p}.nested_absmax": F32([3e38]), f"{p}.nested_quant_map": np.full(256, 2, F32)}),
        r"its scale is inf at \[0, 0\]",
    ),
    "bnb: SCB of NaN": (
        "bnb_int8",
        lambda t, c, p: t[p.replace("weight", "SCB")].__setitem__(2, np.nan),
        r"its scale is nan at \[2, 0\]",
    ),
    "modelopt: NaN": ("modelopt_nvfp4", instead("_scale", bits_at((0, 0), 0xFF)), r"nan at \[0, 0\]"),
    "modelopt: a NaN factor": (
        "modelopt_nvfp4_awq",
        lambda t, c, p: [a.__setitem__(0, np.nan) for n, a in t.items() if n.endswith("pre_quant_scale")],
        "its factors",
    ),
}


@pytest.mark.parametrize("case", AT_READING)
def test_a_fault_of_values_is_found_by_whatever_reads_them(case, tmp_path):
    name, change, message = AT_READING[case]
    tensors, config, packed = fixture_of(name)
    change(tensors, config, packed)
    write(tmp_path, tensors, config)
    opens_as_stored(tmp_path, tensors)
    out = tmp_path / "out"
    with safeload.open(tmp_path) as opened:
        values = opened.load()
        broken = packed if name != "modelopt_nvfp4_awq" else None
        calls = [
            lambda: opened.load(dtype="float32"),
            lambda: opened.load(dtype="bfloat16", threads=1),
            lambda: safeload.stats(opened),
            lambda: safeload.stats(values),
            lambda: safeload.diff(opened, FIXTURES[name].expected()),
            lambda: safeload.convert(opened, f"{out}.safetensors", dtype="float32"),
            lambda: safeload.convert(values, f"{out}.npz", dtype="float16", names=list(values)),
        ]
        if broken is not None:
            calls += [
                lambda: opened.get_slice(broken)[...],
                lambda: values[broken].dequantize(),
                lambda: np.asarray(values[broken]),
            ]
        for call in calls:
            with pytest.raises(FormatError, match=message) as caught:
                call()
            assert caught.value.tensor is not None
            assert repr(caught.value.tensor) in str(caught.value)
        assert not safeload.check(opened, schema=None).ok
    assert sorted(path.name for path in tmp_path.iterdir()) in (
        ["config.json", "model.safetensors"],
        ["model.safetensors"],
    )


def test_code_3_is_at_a_byte_of_the_file(tmp_path):
    tensors, config, packed = fixture_of("bitnet_times")
    tensors[packed][2, 7] |= 0b1100
    write(tmp_path, tensors, config)
    with safeload.open(tmp_path, stored=True) as opened:
        begin = opened.tensors[packed].offset + 2 * tensors[packed].shape[1] + 7
    row = 2 + len(tensors[packed])
    with pytest.raises(FormatError, match=f"tensor '{packed}': row {row}, column 7 has code 3") as caught:
        safeload.load(tmp_path, dtype="float32")
    assert (caught.value.tensor, caught.value.offset) == (packed, begin)
    assert caught.value.path == str(tmp_path / "model.safetensors")


def test_validate_reports_scales_that_no_writer_stores(tmp_path):
    for k, value in enumerate((np.nan, np.inf, -1.0)):
        tensors, config, packed = fixture_of("fp8_block")
        tensors[f"{packed}_scale_inv"][0, 1] = value
        folder = tmp_path / str(k)
        folder.mkdir()
        write(folder, tensors, config)
        report = safeload.check(folder, schema=None)
        found = [one for one in report.errors if one.code == "quantization.scale"]
        assert [one.tensor for one in found] == [packed]
        assert "the first is" in found[0].message
        assert report.errors == found  # once, and the other tensors are read
        assert packed not in report.stats
        assert len(report.stats) == report.tensors - 1


# ---- configurations of any content ----

JUNK = [
    None,
    0,
    -1,
    1,
    3,
    10**30,
    -(10**30),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[31m",
    [],
    {},
    [1],
    [0, 0],
    [-1, 4],
    [1, 2, 3],
    [128, 128.0],
    ["128", "128"],
    [[1], [2]],
    [10**30, 10**30],
    {"a": 1},
    True,
    False,
    "128x128",
    "0x0",
    "1x",
    "x1",
    "\u0661x\u0662",
    "\u00b2x3",
    "9" * 5000,
    "group",
    "channel",
    "mxfp8",
    4,
    8,
    32,
    {"weights": []},
    {"weights": {}},
    {"g": {"weights": {"num_bits": "4", "group_size": 0}, "targets": "re:.*"}},
    ["re:("],
    ["re:" + "(a*)*" * 300],
    {
        "g": {"weights": {"num_bits": [4]}},
        "h": {"weights": {"num_bits": {}}, "targets": [1, None, ["re:.*"], "re:[z-a]"]},
    },
]


def places(value, way=()):
    """The ways to everything in a configuration."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*way, key)
        yield from places(inner, (*way, key))


@pytest.mark.parametrize(
    "name",
    [
        "fp8_block",
        "ct_pack_w4_g32_sym",
        "ct_mixed",
        "ct_int8_g32_asym",
        "ct_fp8_block",
        "ct_kimi",
        "mlx_experts",
        "bitnet_times",
        "modelopt_nvfp4",
        "mlx_mxfp4",
    ],
)
def test_no_configuration_makes_it_raise_anything_else(name, tmp_path):
    fixture = FIXTURES[name]
    want = fixture.expected()
    tensors, config, _ = fixture_of(name)
    write(tmp_path, tensors)
    roots = ("quantization_config", "quantization", "text_config")
    ways = [way for way in places(config) if way[0] in roots]
    assert ways
    for k, way in enumerate(ways):
        for value in part_of(JUNK, k, 16 if len(ways) > 12 else 6):
            changed = json.loads(json.dumps(config))
            holder = changed
            for key in way[:-1]:
                holder = holder[key]
            holder[way[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(changed))
            got = refusal_or(lambda: safeload.load(tmp_path, dtype="float32"))
            if isinstance(got, str):
                assert len(got) < 4000
                assert "\x1b" not in got
            else:
                assert all(got[one].shape == want[one].shape for one in want if one in got)
    opens_as_stored(tmp_path, tensors)


@pytest.mark.parametrize("depth", [3, 30, 60])
def test_nested_configurations_do_not_recurse(depth, tmp_path):
    tensors, config, _ = fixture_of("fp8_block")
    nested = config["quantization_config"]
    for _ in range(depth):
        nested = {"text_config": nested, "other": [nested] if depth < 5 else 1}
    write(tmp_path, tensors, nested)
    refusal = refusal_or(lambda: safeload.open(tmp_path).close())
    assert refusal is None or "levels" in refusal
    opens_as_stored(tmp_path, tensors)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"x"',
        "{}",
        '{"quantization_config": 3}',
        '{"quantization_config": {}}',
        "[" * 10_000,
        '{"quantization_config": {"quant_method": "bitnet", "quant_method": "fp8"}}',
        "9" * 10_000,
        '{"a": "\\ud800"}',
        '{"quantization_config": {"quant_method": ["fp8"]}}',
        '{"quantization_config": {"config_groups": {"g": 1}}}',
    ],
    ids=range(15),
)
def test_a_quantization_in_the_metadata_may_be_anything(text, tmp_path):
    tensors, _, packed = fixture_of("fp8_block")
    write(tmp_path, tensors, None, {"safeload.quantization": text, "safeload.quantized": '{"x": {"parts": {}}}'})
    path = tmp_path / "model.safetensors"
    got = refusal_or(lambda: safeload.load(path, dtype="float32"))
    if isinstance(got, str):
        assert "safeload.quantization" in got or "codes" in got
    else:
        np.testing.assert_array_equal(got[packed], FIXTURES["fp8_block"].expected()[packed])
    opens_as_stored(path, tensors)


# ---- shapes of any rank and size ----

SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (0, 0),
    (0, 5),
    (5, 0),
    (1, 1),
    (3, 4),
    (0, 3, 4),
    (2, 0, 4),
    (2, 3, 0),
    (2, 3, 4),
    (1, 1, 1, 1, 1),
    (2, 1, 2, 3, 4),
    (2, 0, 2, 3, 4),
    (1,) * 12,
]
SCALES = [
    (),
    (0,),
    (1,),
    (7,),
    (1, 1),
    (5, 1),
    (3, 1),
    (0, 1),
    (2, 1, 1),
    (2, 3, 1),
    (2, 3),
    (2, 1, 2, 3, 1),
    (1,) * 12,
]
CONFIGS = [
    None,
    *({"quantization_config": {"quant_method": m}} for m in ("fp8", "bitnet", "compressed-tensors", "mlx")),
]


@pytest.mark.parametrize("dtype", [F8, U8, I8, U32, I32], ids=["f8", "u8", "i8", "u32", "i32"])
@pytest.mark.parametrize(
    "names",
    [
        ("x.weight", "x.weight_scale"),
        ("x.weight", "x.scales"),
        ("x_packed", "x_scale"),
        ("x.weight", "x.scale"),
        ("x_blocks", "x_scales"),
    ],
    ids=range(5),
)
def test_shapes(dtype, names, tmp_path):
    place = (F8, U8, I8, U32, I32).index(dtype) + ord(names[0][1]) + len(names[1])
    for k, shape in enumerate(SHAPES):
        for j, scale in enumerate(part_of(SCALES, k + place, 12)):
            scales = np.ones(scale, (F32, U8, E8M0)[(j + k) % 3])
            tensors = {names[0]: np.zeros(shape, dtype), names[1]: scales}
            for config in CONFIGS[(j + k) % 3 :: 3]:
                (tmp_path / "config.json").unlink(missing_ok=True)
                write(tmp_path, tensors, config)
                loads_or_is_refused(tmp_path)
                opens_as_stored(tmp_path, tensors)


def loads_or_is_refused(folder):
    got = refusal_or(lambda: safeload.load(folder, dtype="float32"))
    if isinstance(got, str):
        return
    with safeload.open(folder) as opened:
        for name, array in got.items():
            assert array.shape == tuple(opened.tensors[name].shape)
            if isinstance(opened[name], QuantizedTensor):
                np.testing.assert_array_equal(opened.get_slice(name)[...], array)
                assert opened[name].size == array.size
        said = refusal_or(lambda: safeload.stats(opened))
        assert not isinstance(said, str) or " holds " in said


def declare(path, tensors):
    """A file whose data is a hole."""
    header, begin = {}, 0
    for name, (dtype, shape, item) in tensors.items():
        end = begin + int(math.prod(shape) * item)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + begin)


@pytest.mark.skipif(os.name == "nt", reason="Wine maps no file of that size")
def test_a_tensor_of_2_to_the_40_elements_opens_and_its_rows_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    try:
        declare(path, {"w.weight": ("F8_E4M3", (1 << 20, 1 << 20), 1), "w.weight_scale": ("F32", (1 << 20, 1), 4)})
    except OSError:
        pytest.skip("the file system has no holes of this size")
    with safeload.open(path) as opened:
        assert opened.tensors["w.weight"].shape == (1 << 20, 1 << 20)
        one = opened.get_slice("w.weight")
        for index in ((5, slice(0, 3)), (-1, slice(None, 4)), (slice(7, 9), 0)):
            assert not one[index].any()
        assert opened["w.weight"].size == 1 << 40
        assert not opened["w.weight"][:2].dequantize().any()


@pytest.mark.parametrize("shape", [(0, 1 << 60), (1 << 62, 0), (0, 1 << 31, 1 << 31), (1 << 40, 0, 1 << 40)])
@pytest.mark.parametrize(
    ("dtype", "name", "scale"),
    [
        ("F8_E4M3", "w.weight", "w.weight_scale"),
        ("U8", "w.weight", "w.weight_scale"),
        ("U32", "w.weight", "w.scales"),
        ("I32", "w_packed", "w_scale"),
        ("U8", "w_packed", "w_scale"),
        ("I8", "w.weight", "w.scale"),
    ],
)
def test_empty_tensors_of_any_size(shape, dtype, name, scale, tmp_path):
    item = {"U32": 4, "I32": 4}.get(dtype, 1)
    for scales in ((1,), (*shape[:-1], 1), (*shape[:-1], 0), shape):
        if math.prod(scales) > 1 << 20:
            continue
        path = tmp_path / "model.safetensors"
        for config in CONFIGS:
            (tmp_path / "config.json").write_text(json.dumps(config or {}))
            declare(path, {name: (dtype, shape, item), scale: ("F32", scales, 4), f"{name}_2": ("F32", (), 4)})
            for given in (path, tmp_path):
                for dtype_ in (None, "float32"):
                    refusal_or(lambda given=given, dtype=dtype_: safeload.load(given, dtype=dtype))


# ---- plain models ----

PLAIN = {
    "scales of f32": {
        "x.weight": np.ones((4, 4), F32),
        "x.scales": np.ones((4, 1), F32),
        "x.biases": np.ones((4, 1), F32),
    },
    "a norm called scale": {"norm.scale": np.ones(4, F32), "norm.weight": np.ones(4, BF16)},
    "an image and its scale": {"image": np.zeros((4, 4), U8), "image_scale": np.ones(1, F32)},
    "a layer and its scale": {"layer_scale": np.ones(4, F32), "layer": np.ones((4, 4), F16)},
    "int64 words": {"x.weight": np.ones((4, 4), I64), "x.weight_scale": np.ones((4, 1), F32)},
    "only scales": {"x.weight_scale": np.ones((4, 1), F32), "x.scales": np.ones(3, F16)},
    "masks": {"mask": np.ones((4, 4), bool), "mask_scale": np.ones(1, F32)},
    "complex": {"x": np.ones((4, 4), np.complex64), "x_scale": np.ones(1, F32)},
    "ids": {"position_ids": np.arange(5, dtype=I32), "position_ids_scale": np.ones(1, F32)},
    "ignored names": {"k_scale": np.ones(1, F32), "input_scale": np.ones(1, F32), "w": np.ones(2, F32)},
}


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize(
    "config", [None, {"quantization_config": {"quant_method": "fp8"}}, {"hidden_size": 4}], ids=range(3)
)
def test_a_plain_model_stays_plain(case, config, tmp_path):
    tensors = PLAIN[case]
    write(tmp_path, tensors, config)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        got = safeload.load(path)
        assert got.keys() == tensors.keys()
        for name, array in got.items():
            assert (array.dtype, array.shape) == (tensors[name].dtype, tensors[name].shape)


@pytest.mark.parametrize(
    "strange", ["x.weight", "", ".weight", "_packed", ".", "\u00e9.weight", "a" * 5000 + ".weight", "\n.weight"]
)
def test_names_of_any_text(strange, tmp_path):
    tensors = {strange: np.zeros((4, 4), F8), f"{strange}_scale": np.ones((4, 1), F32)}
    write(tmp_path, tensors)
    assert [*safeload.load(tmp_path, dtype="float32")] == [strange]
    opens_as_stored(tmp_path, tensors)
    tensors[f"{strange.removesuffix('.weight')}.scales"] = np.ones(4, F32)
    write(tmp_path, tensors)
    with pytest.raises(UnsupportedError, match="'scales' beside its codes can change their values"):
        safeload.load(tmp_path, dtype="float32")
    opens_as_stored(tmp_path, tensors)


def test_a_file_that_lost_its_scales_names_the_part(tmp_path):
    tensors, config, packed = fixture_of("fp8_block")
    write(tmp_path, tensors, config)
    part = f"{packed}_scale_inv"
    with safeload.open(tmp_path, stored=True) as opened:
        begin = opened.tensors[part].offset
    with safeload.open(tmp_path) as opened:
        os.truncate(tmp_path / "model.safetensors", begin + 2)
        with pytest.raises(FormatError, match="ends at byte") as caught:
            opened.load([packed], dtype="float32")
    assert caught.value.path == str(tmp_path / "model.safetensors")
    assert caught.value.tensor == part
