"""Codes are never taken for weights: every operation that needs numbers dequantizes or refuses them.

Layouts of the families: names, dtypes and shapes as their writers choose them, values random.
"""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.inside import families, main
from builders.random import rng
from builders.thorough import part_of

import safeload
from safeload import FormatError, Layout, StackedTensor, UnsupportedError
from safeload.numpy import load_file, save_file

F8, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16


def codes(dtype, *shape):
    if dtype is F8:
        return rng.integers(0, 120, shape, np.uint8).view(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


def floats(dtype, *shape):
    return rng.random(shape, np.float32).astype(dtype)


def state_of(**state):
    """The JSON of bitsandbytes."""
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def ternary(*shape):
    """Four codes of 0 to 2 in each byte."""
    return sum(rng.integers(0, 3, shape, np.uint8) << 2 * k for k in range(4))


P = "model.layers.0.mlp.up_proj"
U8, I8, I32, U32, F32, F16 = np.uint8, np.int8, np.int32, np.uint32, np.float32, np.float16

# Family: the tensor that holds codes, its scale as messages name it, quant_method in config.json, all tensors.
FAMILIES = {
    "deepseek": (f"{P}.weight", f"{P}.weight_scale_inv", "fp8", {
        f"{P}.weight": codes(F8, 320, 257), f"{P}.weight_scale_inv": floats(F32, 3, 3)}),
    "deepseek-e8m0": (f"{P}.weight", f"{P}.weight_scale_inv", "fp8", {
        f"{P}.weight": codes(F8, 256, 256), f"{P}.weight_scale_inv": floats(F32, 2, 2).astype(E8M0)}),
    "deepseek-v4": (f"{P}.weight", f"{P}.scale", "fp8", {
        f"{P}.weight": codes(I8, 64, 128), f"{P}.scale": floats(F32, 64, 8).astype(E8M0)}),
    "fused-experts": ("experts.gate_up_proj", "experts.gate_up_proj_scale_inv", "fp8", {
        "experts.gate_up_proj": codes(F8, 2, 256, 128), "experts.gate_up_proj_scale_inv": floats(F32, 2, 2, 1)}),
    "fbgemm": ("experts.down_proj", "experts.down_proj_scale", "fbgemm_fp8", {
        "experts.down_proj": codes(F8, 2, 32, 64), "experts.down_proj_scale": floats(F32, 2, 64, 1)}),
    "autofp8": (f"{P}.weight", f"{P}.weight_scale", "fp8", {
        f"{P}.weight": codes(F8, 64, 32), f"{P}.weight_scale": np.float32(0.5), f"{P}.input_scale": np.float32(1)}),
    "mistral": (f"{P}.weight", f"{P}.qscale_weight", None, {
        f"{P}.weight": codes(F8, 64, 32), f"{P}.qscale_weight": np.float32(0.5)}),
    "comfyui": (f"{P}.weight", f"{P}.scale_weight", None, {
        f"{P}.weight": codes(F8, 64, 32), f"{P}.scale_weight": np.float32(0.5), "scaled_fp8": codes(F8, 0)}),
    "compressed-tensors": (f"{P}.weight_packed", f"{P}.weight_scale", "compressed-tensors", {
        f"{P}.weight_packed": codes(I32, 64, 16), f"{P}.weight_scale": floats(BF16, 64, 4),
        f"{P}.weight_shape": np.int64([64, 128])}),
    "int8": (f"{P}.weight", f"{P}.weight_scale", "compressed-tensors", {
        f"{P}.weight": codes(I8, 64, 32), f"{P}.weight_scale": floats(F32, 64, 1)}),
    "nvfp4": (f"{P}.weight", f"{P}.weight_scale", "modelopt", {
        f"{P}.weight": codes(U8, 64, 32), f"{P}.weight_scale": codes(F8, 64, 4),
        f"{P}.weight_scale_2": np.float32(0.1)}),
    "gpt-oss": ("mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales", "mxfp4", {
        "mlp.experts.gate_up_proj_blocks": codes(U8, 2, 64, 4, 16),
        "mlp.experts.gate_up_proj_scales": codes(U8, 2, 64, 4)}),
    "gpt-oss-original": ("mlp1_weight.blocks", "mlp1_weight.scales", None, {
        "mlp1_weight.blocks": codes(U8, 2, 64, 4, 16), "mlp1_weight.scales": codes(U8, 2, 64, 4)}),
    "gptq": (f"{P}.qweight", f"{P}.scales", "gptq", {
        f"{P}.qweight": codes(I32, 16, 64), f"{P}.qzeros": codes(I32, 1, 8), f"{P}.scales": floats(F16, 1, 64),
        f"{P}.g_idx": np.zeros(128, I32)}),
    "awq": (f"{P}.qweight", f"{P}.scales", "awq", {
        f"{P}.qweight": codes(I32, 128, 8), f"{P}.qzeros": codes(I32, 1, 8), f"{P}.scales": floats(F16, 1, 64)}),
    "mlx": (f"{P}.weight", f"{P}.scales", None, {
        f"{P}.weight": codes(U32, 64, 16), f"{P}.scales": floats(BF16, 64, 2), f"{P}.biases": floats(BF16, 64, 2)}),
    "bitnet": (f"{P}.weight", f"{P}.weight_scale", "bitnet", {
        f"{P}.weight": ternary(16, 64), f"{P}.weight_scale": floats(BF16, 1)}),
    "bnb-4bit": (f"{P}.weight", f"{P}.weight.absmax", "bitsandbytes", {
        f"{P}.weight": codes(U8, 2048, 1), f"{P}.weight.absmax": codes(U8, 64),
        f"{P}.weight.quant_map": floats(F32, 16), f"{P}.weight.nested_absmax": floats(F32, 1),
        f"{P}.weight.nested_quant_map": floats(F32, 256), f"{P}.weight.quant_state.bitsandbytes__nf4": state_of(
            quant_type="nf4", blocksize=64, shape=[64, 64], nested_blocksize=256, nested_offset=0.25)}),
    "bnb-4bit-bf16": (f"{P}.weight", f"{P}.weight.quant_state.bitsandbytes__fp4", "bitsandbytes", {
        f"{P}.weight": codes(np.uint16, 1024, 1).view(BF16), f"{P}.weight.absmax": floats(F32, 64),
        f"{P}.weight.quant_map": floats(F32, 16), f"{P}.weight.quant_state.bitsandbytes__fp4": state_of(
            quant_type="fp4", blocksize=64, shape=[64, 64])}),
    "bnb-8bit": (f"{P}.weight", f"{P}.SCB", "bitsandbytes", {
        f"{P}.weight": codes(I8, 64, 32), f"{P}.SCB": floats(F32, 64), f"{P}.weight_format": np.uint8(0)}),
    "quanto": (f"{P}.weight._data", f"{P}.weight._scale", "quanto", {
        f"{P}.weight._data": codes(I8, 64, 32), f"{P}.weight._scale": floats(F32, 64, 1)}),
    "quanto-4bit": (f"{P}.weight._data._data", f"{P}.weight._scale", "quanto", {
        f"{P}.weight._data._data": codes(U8, 1024, 64), f"{P}.weight._scale": floats(F32, 1, 1024),
        f"{P}.weight._shift": floats(F32, 1, 1024)}),
    "eetq": (f"{P}.weight", f"{P}.weight_scales", "eetq", {
        f"{P}.weight": codes(I8, 64, 32), f"{P}.weight_scales": floats(F16, 32)}),
    "eetq-original": (f"{P}.qweight", f"{P}.weight_scales", None, {
        f"{P}.qweight": codes(I8, 64, 32), f"{P}.weight_scales": floats(F16, 32)}),
    "bnb-4bit-no-absmax": (f"{P}.weight", f"{P}.weight.quant_state.bitsandbytes__fp4", None, {
        f"{P}.weight": codes(U8, 2048, 1), f"{P}.weight.quant_state.bitsandbytes__fp4": codes(U8, 90)}),
}  # fmt: skip
PLAIN = {"model.norm.weight": floats(BF16, 64)}
ALL = list(FAMILIES)

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tiled(scale, rows, columns, shape):
    """A scale for each block of rows and columns."""
    return scale.astype(F32).repeat(rows, -2).repeat(columns, -1)[..., : shape[-2], : shape[-1]]


def nibbles(stored):
    """The low half of each byte first."""
    return np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1)


def powers(exponents):
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def by_blocks(tensors):
    weight, scale = tensors
    return weight.astype(F32) * tiled(scale, 128, 128, weight.shape)


def by_broadcast(tensors):
    weight, scale = tensors[:2]
    return weight.astype(F32) * np.asarray(scale, F32)


def by_column(tensors):
    weight, scale = tensors
    return weight.astype(F32) * scale.swapaxes(1, 2)


def mxfp4(tensors):
    blocks, exponents = tensors
    return (E2M1[nibbles(blocks)] * powers(exponents)[..., None]).reshape(*blocks.shape[:2], -1)


def deepseek_v4(tensors):
    weight, scale = tensors
    return E2M1[nibbles(weight.view(U8))] * scale.astype(F32).repeat(32, 1)


def nvfp4(tensors):
    weight, scale, whole = tensors
    return E2M1[nibbles(weight)] * (scale.astype(F32) * whole).repeat(16, 1)


def int4(tensors):
    words, scale, _ = tensors
    return (nibbles(words.view(U8)).astype(F32) - 8) * scale.astype(F32).repeat(32, 1)


def planes(tensors):
    weight, scale = tensors
    codes = np.concatenate([weight >> 2 * k & 3 for k in range(4)])
    return (codes.astype(F32) - 1) * (1 / scale.astype(F32))


def bnb(tensors):
    weight, scale, table, *nested = tensors
    if nested[1:]:
        scale = nested[1][scale] * nested[0] + np.float32(0.25)
    high_first = nibbles(weight.view(U8)).reshape(-1, 2)[:, ::-1].reshape(64, 64)
    return table[high_first] * scale.repeat(64).reshape(64, 64)


def bnb_int8(tensors):
    weight, scale, _ = tensors
    return weight.astype(F32) * scale[:, None] * np.float32(1 / 127)


def gptq(tensors):
    words, zeros, scale, groups = tensors
    codes = nibbles(np.ascontiguousarray(words.T).view(U8)).T.astype(F32)
    zero = ((nibbles(zeros.view(U8)) + 1) & 15).astype(F32)
    return ((codes - zero[groups]) * scale.astype(F32)[groups]).T


def awq(tensors):
    words, zeros, scale = tensors
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of each column
    codes, zero = (nibbles(x.view(U8)).reshape(len(x), -1, 8)[..., order].reshape(len(x), -1) for x in (words, zeros))
    return ((codes.astype(F32) - zero.astype(F32)) * scale.astype(F32)).T


# The families that are dequantized: name and weights of the packed tensor, by the formula of the writer's arithmetic.
SUPPORTED = {
    family: (name, formula([np.asarray(tensor) for tensor in FAMILIES[family][3].values()]))
    for family, name, formula in [
        ("deepseek", f"{P}.weight", by_blocks),
        ("deepseek-e8m0", f"{P}.weight", by_blocks),
        ("deepseek-v4", f"{P}.weight", deepseek_v4),
        ("fused-experts", "experts.gate_up_proj", by_blocks),
        ("fbgemm", "experts.down_proj", by_column),
        ("autofp8", f"{P}.weight", by_broadcast),
        ("mistral", f"{P}.weight", by_broadcast),
        ("comfyui", f"{P}.weight", by_broadcast),
        ("compressed-tensors", f"{P}.weight", int4),
        ("int8", f"{P}.weight", by_broadcast),
        ("nvfp4", f"{P}.weight", nvfp4),
        ("gpt-oss", "mlp.experts.gate_up_proj", lambda tensors: mxfp4(tensors).swapaxes(1, 2)),
        ("gpt-oss-original", "mlp1_weight", mxfp4),
        ("gptq", f"{P}.weight", gptq),
        ("awq", f"{P}.weight", awq),
        ("bitnet", f"{P}.weight", planes),
        ("bnb-4bit", f"{P}.weight", bnb),
        ("bnb-4bit-bf16", f"{P}.weight", bnb),
        ("bnb-8bit", f"{P}.weight", bnb_int8),
        ("quanto", f"{P}.weight", by_broadcast),
    ]
}
# Those that are not, and MLX's without a configuration, which leaves it open what the words hold.
REFUSED = [family for family in ALL if family not in SUPPORTED]


def folder_of(tmp_path, family, *, config=True):
    """A folder of the family: with its config.json, the scales in a shard of their own."""
    name, _, method, tensors = FAMILIES[family]
    folder = tmp_path / family
    folder.mkdir()
    first = {name: tensors[name], **PLAIN}
    second = {other: value for other, value in tensors.items() if other != name}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, content in files.items():
        save_file({key: np.asarray(value) for key, value in content.items()}, folder / file)
    weight_map = {key: file for file, content in files.items() for key in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config and method is not None:
        said = {"model_type": "other", "torch_dtype": "bfloat16", "quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(said))
    return folder


def refused(family, *, method=True):
    """The refusal: it names tensor, scale and quant_method."""
    name, scale, said, _ = FAMILIES[family]
    more = rf".*quant_method {said} in config.json" if method and said else ""
    return pytest.raises(UnsupportedError, match=rf"'{name}' holds .* codes, whose scale is '{scale}'{more}")


LAYOUTS = {name: Layout("x", [StackedTensor("w", entry[0])]) for name, entry in FAMILIES.items()}


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_entry_point_gives_the_weights(tmp_path, family):
    folder, (name, want) = folder_of(tmp_path, family), SUPPORTED[family]
    layout = Layout("x", [StackedTensor("w", name)])
    got = safeload.load(folder, dtype="float32")
    assert got.keys() == {name, *PLAIN}
    np.testing.assert_array_equal(got[name], want)
    with safeload.open(folder) as opened:
        values = opened.load()
        assert values[name].shape == want.shape
        for given in part_of([folder, opened, values], [*SUPPORTED].index(family), 3):
            assert safeload.stats(given)[name][1:-1] == safeload.stats(want)[1:-1]  # without the bytes that they take
            assert not safeload.diff(given, {name: want}).tensors[name].unequal
            np.testing.assert_array_equal(safeload.stack(given, layout, dtype="float32")["w"], want)
            np.testing.assert_array_equal(
                safeload.load_quantized(given, "int8", requantize=True)[name].data,
                safeload.load_quantized({name: want}, "int8")[name].data,
            )
            assert safeload.quantization_error({name: want}, {name: values[name]})[name].max_error == 0
            for suffix in ("npz", "gguf", "safetensors"):
                safeload.convert(given, tmp_path / f"x.{suffix}", dtype="float32", raw=True, overwrite=True)
                np.testing.assert_array_equal(safeload.load(tmp_path / f"x.{suffix}")[name], want)
                if suffix != "safetensors":
                    with pytest.raises(UnsupportedError, match="pass dtype="):
                        safeload.convert(given, tmp_path / f"x.{suffix}", raw=True, overwrite=True)
            safeload.convert(given, tmp_path / "x.safetensors", layout=layout, dtype="float32", overwrite=True)
            np.testing.assert_array_equal(safeload.load(tmp_path / "x.safetensors")["w"], want)


@pytest.mark.parametrize("family", SUPPORTED)
def test_no_operation_takes_stored_codes_for_numbers(tmp_path, family):
    """Asked for what is stored, and in arrays, where nothing belongs together."""
    folder = folder_of(tmp_path, family)
    name = FAMILIES[family][0]
    with safeload.open(folder, stored=True) as opened:
        assert set(opened) == {*FAMILIES[family][3], *PLAIN}
        for given, method in ((opened, True), (opened.load(), False)):
            calls = {
                "load": lambda: opened.load(dtype="float32"),
                "load_quantized": lambda given=given: safeload.load_quantized(given, "q8_0"),
                "stats": lambda given=given: safeload.stats(given),
                "diff": lambda given=given: safeload.diff(given, given),
                "stack": lambda given=given: safeload.stack(given, LAYOUTS[family], dtype="float32"),
                "convert": lambda given=given: safeload.convert(given, tmp_path / "x.npz", dtype="float32"),
                "convert gguf": lambda given=given: safeload.convert(given, tmp_path / "x.gguf", raw=True),
            }
            for label, call in calls.items():
                with refused(family, method=method and label != "load"):
                    call()
                    pytest.fail(f"{label} took codes for weights")
        assert opened[name].tobytes() == np.asarray(FAMILIES[family][3][name]).tobytes()


@pytest.mark.parametrize("family", REFUSED)
def test_no_entry_point_takes_codes_of_a_folder_for_numbers(tmp_path, family):
    folder, out = folder_of(tmp_path, family), tmp_path / "out"
    name = FAMILIES[family][0]
    plain = {"model.norm.weight": PLAIN["model.norm.weight"]}
    with safeload.open(folder) as opened:
        values = dict(opened.items())
        calls = {
            "load": lambda: safeload.load(folder, dtype="float32"),
            "load names": lambda: opened.load([name], dtype="bfloat16"),
            "load_quantized": lambda: safeload.load_quantized(folder, "q8_0"),
            "load_quantized of a checkpoint": lambda: safeload.load_quantized(opened, "int8"),
            "stats": lambda: safeload.stats(folder),
            "stats names": lambda: safeload.stats(opened, names=[name]),
            "diff": lambda: safeload.diff(folder, folder),
            "diff with a dict": lambda: safeload.diff({name: np.zeros(values[name].shape, F32)}, opened),
            "stack": lambda: safeload.stack(folder, LAYOUTS[family]),
            "stack as f32": lambda: safeload.stack(folder, LAYOUTS[family], dtype="float32"),
            "convert dtype": lambda: safeload.convert(folder, f"{out}.safetensors", dtype="float16"),
            "convert quantize": lambda: safeload.convert(folder, f"{out}.safetensors", quantize="q8_0"),
            "convert layout": lambda: safeload.convert(folder, f"{out}.safetensors", layout=LAYOUTS[family]),
            "convert shards": lambda: safeload.convert(folder, out, dtype="float16", max_shard_size=1000),
            "convert gguf": lambda: safeload.convert(folder, f"{out}.gguf", raw=True),
            "convert npz": lambda: safeload.convert(folder, f"{out}.npz"),
            "convert moon": lambda: safeload.convert(folder, f"{out}.moon", dtype="float16"),
            "convert two": lambda: safeload.convert([folder, {"other": np.ones(3)}], f"{out}.gguf", raw=True),
        }
        for label, call in calls.items():
            with refused(family):
                call()
                pytest.fail(f"{label} took codes for weights")
        in_memory = {
            "load_quantized": lambda: safeload.load_quantized(values, "q8_0"),
            "stats": lambda: safeload.stats(values),
            "diff": lambda: safeload.diff(values, values),
            "stack": lambda: safeload.stack(values, LAYOUTS[family]),
            "convert": lambda: safeload.convert(values, f"{out}.safetensors", dtype="float32"),
            "quantization_error": lambda: safeload.quantization_error(
                values, {name: safeload.quantize(np.ones((2, 32)), "q8_0")}
            ),
        }
        for label, call in in_memory.items():
            with refused(family, method=False):
                call()
                pytest.fail(f"{label} of a dict took codes for weights")
        assert sorted(path.name for path in tmp_path.iterdir()) == [family]
        # What needs no codes works, and what is stored stays readable.
        assert opened.load(list(plain), dtype="float32")["model.norm.weight"].dtype == np.float32
        assert safeload.stats(opened, names=list(plain)).keys() == plain.keys()
        assert opened[name].dtype == np.asarray(FAMILIES[family][3][name]).dtype
        assert opened.get_slice(name)[:1].shape[0] == 1
        assert safeload.load(folder)[name].tobytes() == np.asarray(FAMILIES[family][3][name]).tobytes()


@pytest.mark.parametrize("family", ALL)
def test_convert_keeps_what_is_stored(tmp_path, family):
    folder = folder_of(tmp_path, family)
    safeload.convert(folder, tmp_path / "one.safetensors")
    safeload.convert(folder, tmp_path / "shards", max_shard_size=1000)
    want = {**FAMILIES[family][3], **PLAIN}
    for copy in ("one.safetensors", "shards"):
        got = safeload.load(tmp_path / copy, stored=True)
        assert {key: value.tobytes() for key, value in got.items()} == {
            key: np.asarray(value).tobytes() for key, value in want.items()
        }
        if family in SUPPORTED:
            name, weights = SUPPORTED[family]
            np.testing.assert_array_equal(safeload.load(tmp_path / copy, dtype="float32")[name], weights)
            continue
        with refused(family, method=copy == "shards"):
            safeload.load(tmp_path / copy, dtype="float32")
    if FAMILIES[family][2] is not None:
        assert (tmp_path / "shards" / "config.json").read_text().split() == (
            json.dumps(json.loads((folder / "config.json").read_text()), indent=2).split()
        )


@pytest.mark.parametrize("command", ["stats", "diff", "convert"])
def test_the_command_line_exits_with_1(tmp_path, capsys, command):
    folder = folder_of(tmp_path, "eetq")
    more = {"stats": [], "diff": [folder], "convert": [tmp_path / "x.safetensors", "--dtype", "float32"]}[command]
    assert main([command, str(folder), *map(str, more)]) == 1
    said = capsys.readouterr().err
    assert f"'{P}.weight' holds I8 codes, whose scale is '{P}.weight_scales' (quant_method eetq" in said


@pytest.mark.parametrize("family", ["deepseek", "autofp8", "comfyui", "mistral", "bnb-4bit-bf16"])
def test_drop_ins_refuse_to_convert_floating_codes(tmp_path, family):
    path = tmp_path / "x.safetensors"
    save_file({key: np.asarray(value) for key, value in FAMILIES[family][3].items()}, path)
    name = FAMILIES[family][0]
    for call in (
        lambda: load_file(path, dtype="float32"),
        lambda: load_file(path, names=[name], dtype="float32"),
        lambda: safeload.safe_open(path).get_tensors(dtype="float32"),
    ):
        with refused(family, method=False) as caught:
            call()
        assert "safeload.load" in str(caught.value)
    assert load_file(path)[name].dtype == FAMILIES[family][3][name].dtype
    others = [key for key in FAMILIES[family][3] if key not in (name, "scaled_fp8")]
    assert load_file(path, names=others, dtype="float64").keys() == set(others)


@pytest.mark.parametrize("family", ["gptq", "awq", "mlx", "int8", "bnb-8bit"])
def test_drop_ins_leave_integers_alone(tmp_path, family):
    path = tmp_path / "x.safetensors"
    save_file({key: np.asarray(value) for key, value in FAMILIES[family][3].items()}, path)
    got = load_file(path, dtype="float32")
    assert got[FAMILIES[family][0]].dtype.kind in "iu"


def test_the_scale_of_a_shard_that_is_opened_alone(tmp_path):
    folder = folder_of(tmp_path, "deepseek", config=False)
    shard = folder / "model-00001-of-00002.safetensors"
    calls = [
        lambda: safeload.load(shard, dtype="float32"),
        lambda: safeload.load_quantized(shard, "int8"),
        lambda: safeload.stats(shard),
        lambda: safeload.convert(shard, tmp_path / "x.npz"),
        lambda: load_file(shard, dtype="float32"),
    ]
    for call in calls:
        with refused("deepseek", method=False):
            call()
    assert safeload.load(shard)[FAMILIES["deepseek"][0]].dtype == F8
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    for broken in ('{"weight_map": {"a": "x"}}', '{"weight_map": [1]}', "{"):
        (folder / "model.safetensors.index.json").write_text(broken)
        safeload.load(shard, dtype="float32")  # nothing says that it is more than a plain file


@pytest.mark.parametrize("scale", [np.float32(0.1), 0.1, [0.1], memoryview(floats(F32, 1))])
def test_a_scale_in_a_dict_may_be_no_array(tmp_path, scale):
    given = {"a.weight": codes(F8, 64, 32), "a.weight_scale": scale, "junk": object(), "b": np.ones(2, F32)}
    refusal = pytest.raises(UnsupportedError, match=r"'a.weight' holds F8_E4M3 codes, whose scale is 'a.weight_scale'")
    with refusal:
        safeload.stats(given, names=["a.weight"])
    with refusal:
        safeload.diff({"a.weight": np.zeros((64, 32), F32)}, given)
    del given["junk"]
    with refusal:
        safeload.load_quantized(given, "int8")
    with refusal:
        safeload.convert(given, tmp_path / "out.safetensors", dtype="float32")


def test_a_config_names_codes_without_a_scale(tmp_path):
    """In the folder, and in one file of it opened alone: the scale is in a shard that is not there."""
    weights = {f"{P}.weight": codes(F8, 64, 32)}
    save_file(weights, tmp_path / "model.safetensors")
    assert safeload.load(tmp_path, dtype="float32")[f"{P}.weight"].max() < 448  # a plain fp8 tensor
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    for config in ({"quantization_config": {"quant_method": "fp8"}}, {"compression_config": {"format": "fp8"}}, nested):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=rf"'{P}.weight' holds F8_E4M3 codes, but the checkpoint has no scale"):
            safeload.open(tmp_path)
        assert safeload.load(tmp_path, stored=True).keys() == weights.keys()
        with pytest.raises(UnsupportedError, match=r"whose scale is not here \(quant_method fp8 in config.json\)"):
            safeload.load(tmp_path / "model.safetensors", dtype="float32")
        with pytest.raises(UnsupportedError, match=r"safeload\.load"):
            load_file(tmp_path / "model.safetensors", dtype="float32")
    for config in ({"quantization_config": None}, {"quantization_config": {}}, {"quantization": "none"}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        safeload.load(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text("{ not JSON")
    safeload.load(tmp_path / "model.safetensors", dtype="float32")  # nobody asked for the folder


def test_integers_that_a_config_names(tmp_path):
    """A quantized folder may have masks and position ids: only what is named as weights is codes."""
    tensors = {
        f"{P}.qweight": codes(I32, 16, 64),
        "model.position_ids": codes(I32, 1, 64),
        "mask": codes(U8, 1, 1, 8, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    others = ["mask", "model.position_ids"]
    assert_no_codes(tmp_path, tensors)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with safeload.open(tmp_path, stored=True) as opened:
        assert opened.load(others, dtype="float32").keys() == safeload.stats(opened, names=others).keys() == {*others}
        for call in (lambda: opened.load(dtype="float32"), lambda: safeload.stats(opened)):
            with pytest.raises(UnsupportedError, match=rf"'{P}\.qweight' holds I32 codes"):
                call()


def assert_no_codes(path, tensors):
    """Each stored tensor is taken for its numbers, from a file and from a dict."""
    loaded = safeload.load(path, dtype="float32", stored=True)
    assert loaded.keys() == safeload.stats(tensors).keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name].astype(F32), tensor.astype(F32))


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": codes(F8, 8, 8)},
        {"w": codes(F8, 8, 8), "other_scale": floats(F32, 1)},
        {"w.weight": codes(F8, 8, 8), "w.scale": floats(F32, 8)},  # a parameter of a norm, no grid of blocks
        {"w.weight": codes(F8, 8, 8), "w.scale": floats(F32, 8, 8)},
        {"w.weight": floats(F32, 8, 8), "w.weight_scale": floats(F32, 8, 1)},
        {"w.weight": floats(F16, 8, 8), "w.scales": floats(F16, 8, 1)},
        {"w_scale": codes(I8, 4), "w": floats(F32, 4)},
        {"w.weight": codes(F8, 4, 4), "w.weight_scale": floats(F32, 5, 5)},  # it cannot scale so few codes
        {"w.weight": codes(F8, 4, 4), "w.weight_scale": codes(np.int64, 4, 1)},
        {"layer.weight.qweight": codes(I8, 8, 8), "layer.weight.scale": floats(F32, 8, 1)},  # fracast's own
        {"w.weight": codes(F8, 4, 4), "w.weight_quantizer.scale": floats(F32, 5, 5)},
    ],
    ids=range(11),
)
def test_what_are_no_codes(tensors, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    assert_no_codes(tmp_path / "x.safetensors", tensors)


@pytest.mark.parametrize("shape", [(8, 8), (8, 1), (1,)])
def test_a_scale_of_quark_may_have_an_element_per_code(shape, tmp_path):
    """Its name ends as that of a norm's parameter, which has one per column."""
    tensors = {"w.weight": codes(F8, 8, 8), "w.weight_quantizer.scale": floats(F32, *shape)}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match=r"'w.weight' holds .* codes, whose scale is 'w.weight_quantizer.scale'"):
        safeload.load(tmp_path / "x.safetensors", stored=True, dtype="float32")


@pytest.mark.parametrize("family", [row for row in families() if row.required], ids=lambda family: family.name[:60])
def test_codes_of_each_family_are_recognized_by_their_names(family, tmp_path):
    name = f"{P}.weight" if family.main == "" else P + family.main
    stem = name.removesuffix(family.main)
    code = "U8" if "U8" in family.dtypes else min(family.dtypes)
    rows = {name: code}
    for role, suffixes in family.required.items():
        rows[stem + suffixes[0]] = "F32" if role == "scale" else "U8"
    header, end = {}, 0
    for tensor, dtype in rows.items():
        begin, end = end, end + inside.dtypes.BY_CODE[dtype].bits  # bytes of 8 elements
        header[tensor] = {"dtype": dtype, "shape": [8, 1], "data_offsets": [begin, end]}
    text, path = json.dumps(header).encode(), tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    with safeload.open(path, stored=True) as opened:
        if ".scale" in family.required.get("scale", ()):  # of norms too
            opened.load(dtype="float32")
            return
        with pytest.raises(UnsupportedError, match=rf"'{re.escape(name)}' holds {code} (codes|values)"):
            opened.load(dtype="float32")


def test_int8_of_our_own_is_no_riddle(tmp_path):
    """Its scales are known from the metadata."""
    weights = safeload.load_quantized({"w": floats(F32, 64, 64)}, "int8")
    save_file(weights, tmp_path / "q.safetensors")
    assert safeload.load(tmp_path / "q.safetensors", dtype="float32")["w"].dtype == np.float32
    assert safeload.stats(tmp_path / "q.safetensors")["w"].absmax <= 1
    safeload.convert(tmp_path / "q.safetensors", tmp_path / "f.safetensors", dtype="float32")
    safeload.diff(tmp_path / "q.safetensors", weights)
