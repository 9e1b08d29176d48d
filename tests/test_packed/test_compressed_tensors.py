"""compressed-tensors: integers packed in blocks, and configurations whose strategy decides how scales are read."""

import json

import ml_dtypes
import numpy as np
import pytest
from builders.thorough import dealt

import safeload
from safeload import FormatError
from safeload.numpy import save_file

NAME = "model.layers.0.mlp.down_proj"


def config_of(**weights):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, **weights}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", durable=False)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def words_of(codes, bits):
    """Codes as a stream of bits, the first in the lowest; rows fill whole words."""
    stream = (codes[..., None] >> np.arange(bits) & 1).reshape(*codes.shape[:-1], -1).astype(np.uint8)
    padding = [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)]
    return np.packbits(np.pad(stream, padding), axis=-1, bitorder="little").view(np.int32)


def in_blocks(shape, block, bits, dtype=np.float32, zeros=False):
    """Tensors with random codes in blocks, and their values."""
    rng = np.random.default_rng([*shape, *block, bits])
    numbers = rng.integers(0, 1 << bits, shape) - (1 << bits - 1)
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    scales = (rng.random(grid, np.float32) + 0.5).astype(dtype)
    points = rng.integers(-(1 << bits - 1), 1 << bits - 1, grid, np.int8) if zeros else np.zeros(grid, np.int8)
    spread = [
        array.repeat(block[0], -2).repeat(block[1], -1)[..., : shape[-2], : shape[-1]]
        for array in (scales.astype(np.float32), points.astype(np.float32))
    ]
    tensors = {
        f"{NAME}.weight_packed": words_of(numbers + (1 << bits - 1), bits),
        f"{NAME}.weight_scale": scales,
        f"{NAME}.weight_shape": np.int64(shape),
    }
    if zeros:
        tensors[f"{NAME}.weight_zero_point"] = points
    return tensors, (numbers.astype(np.float32) - spread[1]) * spread[0]


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(
    ("place", "bits"),
    dealt([
        ((64, 128), (32, 64)), ((33, 65), (32, 64)), ((31, 63), (32, 64)), ((1, 1), (32, 64)), ((5, 7), (1, 1)),
        ((40, 96), (128, 128)), ((40, 96), (1, 32)), ((40, 96), (40, 1)), ((3, 33, 50), (16, 32)),
    ], [1, 3, 4, 8]),
    ids=str,
)  # fmt: skip
def test_packed_integers_in_blocks(place, bits, zeros, tmp_path):
    shape, block = place
    dtype = (np.float32, ml_dtypes.bfloat16, np.float16)[bits % 3]
    tensors, want = in_blocks(shape, block, bits, dtype, zeros)
    config = config_of(num_bits=bits, strategy="block", block_structure=list(block), symmetric=not zeros)
    folder = write(tmp_path / "x", tensors, config)
    np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], want, strict=True)
    with safeload.open(folder) as opened:
        assert opened[f"{NAME}.weight"] == opened.load()[f"{NAME}.weight"]
        rows = opened.get_slice(f"{NAME}.weight")
        for index in np.s_[:1], np.s_[-1], np.s_[1:17], np.s_[::3, ..., 2:]:
            np.testing.assert_array_equal(rows[index], want[index])
    safeload.convert(folder, tmp_path / "y.safetensors", dtype="float32")
    np.testing.assert_array_equal(safeload.load(tmp_path / "y.safetensors")[f"{NAME}.weight"], want)
    safeload.convert(folder, tmp_path / "z.safetensors")
    np.testing.assert_array_equal(safeload.load(tmp_path / "z.safetensors", dtype="float32")[f"{NAME}.weight"], want)


def test_the_strategy_that_fits_is_taken_from_several_groups(tmp_path):
    """A class name as a target leaves open which group a module belongs to; the shape of its scales tells."""
    tensors, want = in_blocks((64, 128), (32, 64), 8)
    config = config_of(strategy="channel")
    config["config_groups"]["group_1"] = config_of(strategy="block", block_structure=[32, 64])["config_groups"][
        "group_0"
    ]
    folder = write(tmp_path / "x", tensors, config)
    np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], want)
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "block_structure": [60, 127]}
    write(folder, tensors, config)
    with pytest.raises(
        FormatError, match=r"scales \[2, 2\] of \[64, 128\] fit more than one of config_groups: blocks of 60 x 127"
    ):
        safeload.open(folder)


@pytest.mark.parametrize(
    "structure", [[32], [32, 0], [32.0, 64], "32x", "9" * 500 + "x1", {}, None, [True, 64]], ids=lambda s: str(s)[:20]
)
def test_a_block_structure_that_is_none_is_an_error(structure, tmp_path):
    tensors, _ = in_blocks((64, 128), (32, 64), 8)
    folder = write(tmp_path / "x", tensors, config_of(strategy="block", block_structure=structure))
    with pytest.raises(FormatError, match=f"tensor '{NAME}.weight': .* do not fit"):
        safeload.open(folder)
    assert safeload.load(folder, stored=True).keys() == tensors.keys()


def test_a_structure_as_early_versions_write_it(tmp_path):
    tensors, want = in_blocks((64, 128), (32, 64), 8)
    folder = write(tmp_path / "x", tensors, config_of(strategy="block", block_structure="32x64"))
    np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], want)


def test_a_g_idx_beside_blocks_is_an_error(tmp_path):
    tensors, _ = in_blocks((64, 128), (32, 64), 8)
    tensors[f"{NAME}.weight_g_idx"] = np.zeros(128, np.int32)
    folder = write(tmp_path / "x", tensors, config_of(strategy="block", block_structure=[32, 64]))
    with pytest.raises(FormatError, match="it has a g_idx, but its scales are per block"):
        safeload.open(folder)


# ---- zero points ----


def test_zero_points_of_symmetric_codes_must_be_0(tmp_path):
    """Early versions store zero points that are 0; versions since do not read them."""
    for bits in 4, 8:
        tensors, want = in_blocks((64, 128), (32, 64), bits, zeros=False)
        tensors[f"{NAME}.weight_zero_point"] = np.zeros((2, 2), np.int8)
        config = config_of(num_bits=bits, strategy="block", block_structure=[32, 64])
        folder = write(tmp_path / f"zero{bits}", tensors, config)
        np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], want)
        tensors[f"{NAME}.weight_zero_point"][1, 1] = 3
        folder = write(tmp_path / f"other{bits}", tensors, config)
        assert safeload.open(folder).tensors[f"{NAME}.weight"].shape == (64, 128)
        message = rf"tensor '{NAME}.*its zero points are not all 0, but the configuration says symmetric \(3\)"
        for read in (
            lambda folder: safeload.load(folder, dtype="float32"),
            lambda folder: safeload.open(folder)[f"{NAME}.weight"].dequantize(),
            lambda folder: safeload.open(folder).get_slice(f"{NAME}.weight")[40:],
            lambda folder: safeload.convert(folder, tmp_path / "x.safetensors", dtype="float32"),
            safeload.stats,
        ):
            with pytest.raises(FormatError, match=message):
                read(folder)
        assert not safeload.check(folder).ok


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("awq", {"zero_point": True}),
        ("auto-round", {"sym": False}),
        ("gptq", {"sym": False}),
    ],
    ids=["awq", "auto-round", "gptq"],
)
def test_plain_int8_of_a_configuration_with_zero_points(method, said, tmp_path):
    tensors = {f"{NAME}.weight": np.ones((8, 8), np.int8), f"{NAME}.weight_scale": np.ones((8, 1), np.float32)}
    folder = write(tmp_path / "x", tensors, {"quant_method": method, **said})
    with pytest.raises((FormatError, safeload.UnsupportedError)) as caught:
        safeload.load(folder, dtype="float32")
    assert NAME in str(caught.value)
    key, value = next(iter(said.items()))
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method, key: not value}}))
    assert safeload.load(folder, dtype="float32")[f"{NAME}.weight"].all()


def test_modules_of_equal_shapes_have_the_strategies_of_their_own_groups(tmp_path):
    """What one group says of a shape is not taken for the other's."""
    tensors, want = {}, {}
    block, row = in_blocks((8, 64), (4, 64), 8), in_blocks((8, 64), (4, 32), 8)
    config = config_of(strategy="block", block_structure=[4, 64])
    config["config_groups"]["group_0"]["targets"] = ["re:.*a"]
    config["config_groups"]["group_1"] = config_of(strategy="block", block_structure=[4, 32])["config_groups"][
        "group_0"
    ]
    config["config_groups"]["group_1"]["targets"] = ["re:.*b"]
    for module, (made, values) in {"x.a": block, "x.b": row}.items():
        tensors |= {name.replace(NAME, module): array for name, array in made.items()}
        want[f"{module}.weight"] = values
    got = safeload.load(write(tmp_path / "x", tensors, config), dtype="float32")
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values)
    tensors["x.b.weight_scale"] = tensors["x.a.weight_scale"]
    with pytest.raises(FormatError, match=r"'x.b.weight': scales \[2, 1\] do not fit \[8, 64\]: expected \[2, 2\]"):
        safeload.open(write(tmp_path / "y", tensors, config))


@pytest.mark.parametrize("pattern", [r"re:.*\.(?!b)a$", r"re:x\.[a-c]{1}", r"re:x\.\ba\b"])
def test_shapes_choose_among_groups_if_a_target_has_unsupported_syntax(pattern, tmp_path):
    tensors, want = in_blocks((8, 64), (8, 64), 4)
    config = config_of(num_bits=4, strategy="block", block_structure=[8, 64])
    config["config_groups"]["group_0"]["targets"] = [pattern]
    other = config_of(num_bits=4, strategy="block", block_structure=[4, 64])["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = other
    folder = write(tmp_path / "x", tensors, config)
    np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], want)
    other["weights"].update(block_structure=[16, 64])  # a single scale too
    with safeload.open(write(tmp_path / "y", tensors, config)) as opened:
        np.testing.assert_array_equal(opened.load(dtype="float32")[f"{NAME}.weight"], want)
    other["weights"].update(block_structure=[2, 64])
    tensors[f"{NAME}.weight_scale"] = np.ones((3, 1), np.float32)
    with pytest.raises(FormatError, match=r"expected \[1, 1\] or \[4, 1\]"):
        safeload.open(write(tmp_path / "z", tensors, config))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32], ids=str)
@pytest.mark.parametrize("divided", [False, True], ids=["alone", "global"])
def test_fp4_in_groups_of_16_with_the_scales_of_scale_dtype(dtype, divided, tmp_path):
    """llm-compressor with its own QuantizationArgs: `strategy` group has no global scale."""
    rng = np.random.default_rng(16)
    nibbles, scales = rng.integers(0, 16, (8, 64), np.uint8), (rng.random((8, 4)) + 0.5).astype(dtype)
    tensors = {f"{NAME}.weight_packed": nibbles[:, ::2] | nibbles[:, 1::2] << 4, f"{NAME}.weight_scale": scales}
    factors, floats = scales.astype(np.float32), np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    if divided:
        tensors[f"{NAME}.weight_global_scale"] = np.float32([3.7])
        factors = factors / np.float32(3.7)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if divided else "group", "group_size": 16}
    config = {**config_of(**weights), "format": "nvfp4-pack-quantized"}
    folder = write(tmp_path / "x", tensors, config)
    want = np.concatenate([floats, -floats])[nibbles] * factors.repeat(16, 1)
    np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], want)
    with safeload.open(folder) as opened:
        assert opened[f"{NAME}.weight"].scheme == ("nvfp4" if divided else "fp4 g16")
    config["config_groups"]["group_0"]["weights"]["group_size"] = 32
    with pytest.raises(FormatError, match="groups of 16, but group_size is 32"):
        safeload.open(write(tmp_path / "y", tensors, config))


def test_an_uncompressed_folder_keeps_its_weights_and_zero_points(tmp_path):
    """`save_pretrained(save_compressed=False)` stores the parameters of a quantization beside whole weights."""
    weight = np.arange(32, dtype=np.float32).reshape(4, 8).astype(ml_dtypes.bfloat16)
    tensors = {
        f"{NAME}.weight": weight,
        f"{NAME}.weight_scale": np.full((4, 1), 0.25, ml_dtypes.bfloat16),
        f"{NAME}.weight_zero_point": np.ones((4, 1), ml_dtypes.float8_e4m3fn),
    }
    config = {**config_of(type="float", strategy="channel"), "format": "dense", "quantization_status": "frozen"}
    got = safeload.load(write(tmp_path / "x", tensors, config), dtype="float32")
    assert got.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(got[name], array.astype(np.float32))


def test_negative_scales_of_auto_round(tmp_path):
    """It gives the largest magnitude to the lowest code, -128, so a scale can be negative."""
    tensors = {
        f"{NAME}.weight": np.int8([[-128, 3], [7, -128]]), f"{NAME}.weight_scale": np.float16([[-0.5], [0.25]]),
    }  # fmt: skip
    config = {**config_of(strategy="channel"), "format": "int-quantized"}
    folder = write(tmp_path / "x", tensors, config)
    np.testing.assert_array_equal(safeload.load(folder, dtype="float32")[f"{NAME}.weight"], [[64, -1.5], [1.75, -32]])
    assert not safeload.check(folder).errors
