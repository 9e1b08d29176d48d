"""GPTQ, auto-round and AWQ: what shapes and configurations decide, and what is refused or wrong."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.executors import Plain
from builders.packed_codes import AWQ_ORDER, COLUMNS, pack, stream, words
from builders.quantized import FIXTURES

import safeload
from safeload import FormatError, UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core

IN, OUT, SIZE = 96, 64, 48


def parts_of(codes, zeros, scales, bits, added=1, groups=None):
    """The tensors of GPTQ for codes [in, out] and zero points [groups, out]."""
    stored = (zeros.astype(np.int64) - added & (1 << bits) - 1).astype(np.uint8)
    parts = {
        "qweight": pack(codes[None], COLUMNS, bits)[0].view("<i4"),
        "qzeros": stream(stored, bits).view("<i4"),
        "scales": scales,
    }
    if groups is not None:
        parts["g_idx"] = groups.astype(np.int32)
    return {f"a.{name}": array for name, array in parts.items()}


def made(bits=4, *, added=1, size=SIZE, groups=None, zero=None, shape=(IN, OUT), seed=0):
    """Tensors of random codes, and the weights by the formula."""
    rng = np.random.default_rng([seed, bits])
    own = np.arange(shape[0]) // size if groups is None else groups
    codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    count = int(own.max()) + 1
    zeros = rng.integers(1, 1 << bits, (count, shape[1]), dtype=np.uint8)
    if zero is not None:
        zeros[:] = zero
    scales = (rng.random((count, shape[1]), np.float32) + 0.5).astype(np.float16)
    values = (codes.astype(np.float32) - zeros[own]) * scales.astype(np.float32)[own]
    return parts_of(codes, zeros, scales, bits, added, groups), np.ascontiguousarray(values.T)


def write(folder, tensors, file="config.json", **said):
    while folder.exists():  # Windows does not replace mapped files
        folder = folder.with_name(f"{folder.name}x")
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", durable=False)
    config = {"quantization_config": said} if file == "config.json" else said
    (folder / file).write_text(json.dumps(config))
    return folder


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "sym": False}
# auto-round without loading the model: it stored zero points less one until 0.16, whatever packing_format says.
MODEL_FREE = {"quant_method": "auto-round", "packing_format": "auto_round", "model_free": True}


def weight(folder):
    return safeload.load(folder, dtype="float32")["a.weight"]


# ---- zero points ----


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
        ({"quant_method": "auto-round"}, 1),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, 1),
        ({"quant_method": "intel/auto-round", "packing_format": "auto_round"}, 0),
        ({"quant_method": "auto-round", "backend": "auto_round:gptq:exllamav2"}, 1),
        ({"quant_method": "auto-round", "backend": "auto_round:exllamav2"}, 0),
        ({"quant_method": "auto-round", "backend": "auto_round:gptqmodel"}, 0),
        ({**MODEL_FREE, "autoround_version": "0.15.1"}, 1),
        ({**MODEL_FREE, "autoround_version": "0.16.0"}, 0),
    ],
)
def test_the_configuration_says_what_zero_points_mean(said, added, tmp_path):
    tensors, want = made(added=added)
    np.testing.assert_array_equal(weight(write(tmp_path / "x", tensors, **{**GPTQ, **said})), want)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored", [0, 1])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
def test_zero_points_of_symmetric_weights_say_it_themselves(bits, stored, said, tmp_path, capsys):
    tensors, want = made(bits, added=stored, zero=1 << bits - 1)
    folder = write(tmp_path / "x", tensors, **{**GPTQ, "bits": bits, "sym": True, "checkpoint_format": said})
    np.testing.assert_array_equal(weight(folder), want)
    from builders.inside import main

    assert main(["info", str(folder)]) == 0
    disagree = (said == "gptq") != (stored == 1)
    assert ("zero points: the format differs from the configuration" in capsys.readouterr().out) == disagree
    notes = safeload.check(folder).notes
    assert [(one.code, one.tensor) for one in notes] == ([("quantization.zero", "a.weight")] if disagree else [])


def test_zero_points_that_only_look_symmetric(tmp_path):
    """One of another value, or weights that are not symmetric: the configuration counts."""
    tensors, want = made(added=0, zero=7)
    folder = write(tmp_path / "x", tensors, **{**GPTQ, "checkpoint_format": "gptq_v2"})
    np.testing.assert_array_equal(weight(folder), want)
    tensors["a.qzeros"] = tensors["a.qzeros"].copy()
    tensors["a.qzeros"][1, -1] ^= 1
    folder = write(folder, tensors, **{**GPTQ, "sym": True, "checkpoint_format": "gptq_v2"})
    np.testing.assert_array_equal(weight(folder)[:-8], want[:-8])


def test_a_part_of_symmetric_weights_is_read_as_the_whole(tmp_path):
    """The other rows say that zero points are not all alike."""
    tensors, _ = made(added=0)
    tensors["a.qzeros"] = tensors["a.qzeros"].copy()
    tensors["a.qzeros"][:, :4] = 0x77777777
    said = {**GPTQ, "sym": True, "checkpoint_format": "gptq_v2"}
    folder = write(tmp_path / "x", tensors, **said)
    with safeload.open(folder) as opened:
        want, value = np.asarray(opened["a.weight"]), opened["a.weight"]
        np.testing.assert_array_equal(value[:32].dequantize(), want[:32])
        np.testing.assert_array_equal(value[:32][8:24].dequantize(), want[8:24])
        np.testing.assert_array_equal(opened.get_slice("a.weight")[:32], want[:32])
        with pytest.raises(ValueError, match="are not whole blocks of 8 rows"):
            value[4:12]


def test_a_zero_point_of_zero_wraps_and_is_reported(tmp_path):
    tensors, want = made()
    zeros = tensors["a.qzeros"] = tensors["a.qzeros"].copy()
    zeros[0, 0] |= 15  # stored as -1
    folder = write(tmp_path / "x", tensors, **GPTQ)
    got = weight(folder)
    codes = load_file(folder / "model.safetensors")["a.qweight"].view(np.uint32)[0, 0] & 15
    assert got[0, 0] == np.float32(codes) * np.float32(tensors["a.scales"][0, 0])
    np.testing.assert_array_equal(got[1:], want[1:])
    for given in (folder, dict(safeload.load(folder))):
        found = safeload.check(given).warnings
        assert [(one.code, one.tensor) for one in found] == [("quantization.zero", "a.weight")]
        assert found[0].message.startswith("1 zero point is 0, stored as -1")
    in_pieces = safeload.check(folder, executor=Plain())
    assert in_pieces.warnings == found
    assert in_pieces.stats == safeload.check(folder).stats != {}
    folder = write(folder, tensors, **{**GPTQ, "checkpoint_format": "gptq_v2"})
    assert not safeload.check(folder).warnings


def test_negative_scales_are_sound(tmp_path):
    """auto-round stores them: the least code, not the largest, stands for the value of largest magnitude."""
    tensors, want = made()
    tensors["a.scales"] = -tensors["a.scales"]
    folder = write(tmp_path / "x", tensors, **GPTQ)
    np.testing.assert_array_equal(weight(folder), -want)
    assert not safeload.check(folder).errors
    tensors["a.scales"][0, 0] = np.inf
    (found,) = safeload.check(write(folder, tensors, **GPTQ)).errors
    assert (found.code, found.tensor) == ("quantization.scale", "a.weight")


# ---- groups, sizes, places of the configuration ----


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_any_map_of_groups(bits, tmp_path):
    groups = np.random.default_rng(bits).integers(0, 5, IN)
    groups[0] = 4
    tensors, want = made(bits, groups=groups)
    said = {**GPTQ, "quant_method": "auto-round", "bits": bits, "group_size": 20, "desc_act": True}
    np.testing.assert_array_equal(weight(write(tmp_path / "x", tensors, **said)), want)


@pytest.mark.parametrize("rows", [2048, 2112, 4160, 5440])
def test_any_map_of_groups_in_tiles_of_any_height(rows, tmp_path):
    """With act-order, tiles have up to 2,048 rows, and equal heights if they are several."""
    groups = np.random.default_rng(rows).integers(0, rows // 64, rows)
    groups[0] = rows // 64 - 1
    tensors, truth = made(groups=groups, shape=(rows, 136))
    folder = write(tmp_path / "x", tensors, **{**GPTQ, "group_size": 64, "desc_act": True})
    assert np.array_equal(weight(folder), truth)
    packed = safeload.load(folder, backend="pread")["a.weight"]
    for threads in (1, 3):
        assert np.array_equal(packed.dequantize(threads=threads), truth)


@pytest.mark.parametrize("value", [-1, 2, -(2**31), 2**31 - 1])
def test_a_group_that_does_not_exist(value, tmp_path):
    tensors, _ = made(groups=np.arange(IN) // SIZE)
    tensors["a.g_idx"][5] = value
    folder = write(tmp_path / "x", tensors, **GPTQ)
    with pytest.raises(FormatError, match=rf"'a.weight': column 5 is in group {value}, but there are 2 groups"):
        weight(folder)
    tensors["a.g_idx"][:] = -1
    with pytest.raises(FormatError, match="column 0 is in group -1"):
        weight(write(folder, tensors, **GPTQ))


@pytest.mark.parametrize(
    ("size", "label"), [(-1, "gptq4 row"), (96, "gptq4 row"), (1024, "gptq4 row"), (40, "gptq4 g40")]
)
def test_sizes_of_groups(size, label, tmp_path):
    tensors, want = made(size=IN if size < 0 else size)
    folder = write(tmp_path / "x", tensors, **{**GPTQ, "group_size": size})
    np.testing.assert_array_equal(weight(folder), want)
    assert safeload.open(folder)["a.weight"].scheme == ("gptq4 g40" if size == 40 else "gptq4 row")
    for dtype in (ml_dtypes.bfloat16, np.float32):  # of the scales
        changed = {**tensors, "a.scales": tensors["a.scales"].astype(dtype)}
        assert weight(write(folder, changed, **{**GPTQ, "group_size": size})).shape == (OUT, IN)


def test_the_configuration_beside_older_files(tmp_path):
    tensors, want = made()
    write(tmp_path / "x", tensors, "quantize_config.json", bits=4, group_size=SIZE, sym=False, desc_act=False)
    np.testing.assert_array_equal(weight(tmp_path / "x"), want)
    np.testing.assert_array_equal(weight(tmp_path / "x" / "model.safetensors"), want)
    safeload.convert(tmp_path / "x", tmp_path / "y.safetensors")
    np.testing.assert_array_equal(weight(tmp_path / "y.safetensors"), want)
    for text in ("[]", "{", "{}", '{"bits": 4, "bits": 3}'):
        (tmp_path / "x" / "quantize_config.json").write_text(text)
        with pytest.raises(UnsupportedError, match="holds I32 codes, whose scale"):
            weight(tmp_path / "x")
    fixture = FIXTURES["awq4_gemm"]
    folder = tmp_path / "awq"
    shutil.copytree(fixture.folder, folder)
    (folder / "config.json").unlink()
    said = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(said))
    for name, array in safeload.load(folder, dtype="float32").items():
        np.testing.assert_array_equal(array, fixture.expected()[name])


def test_patterns_of_single_modules(tmp_path):
    """The first that matches counts, also in a file alone."""
    tensors, want = made(8)
    first, _ = made(4)
    both = {**tensors, **{name.replace("a.", "layers.1.b."): array for name, array in first.items()}}
    patterns = {"+:^a$": {"bits": 8}, "-:z.*": {}, "a": {"bits": 2}, ".*": {"bits": 4}}
    folder = write(tmp_path / "x", both, **{**GPTQ, "bits": 3}, dynamic=patterns)
    np.testing.assert_array_equal(weight(folder), want)
    safeload.convert(folder, tmp_path / "one.safetensors")
    np.testing.assert_array_equal(weight(tmp_path / "one.safetensors"), want)
    with pytest.raises(FormatError, match=r"hold 8 bits, but bits is 3 \(quantization_config gptq\)"):
        safeload.open(write(folder, tensors, **{**GPTQ, "bits": 3}, dynamic={"b": {"bits": 8}}))
    with pytest.raises(FormatError, match="dynamic excludes the module from quantization"):
        safeload.open(write(folder, tensors, **GPTQ, dynamic={"-:.*": {}}))
    with pytest.raises(UnsupportedError, match="dynamic: the pattern"):
        safeload.open(write(folder, tensors, **GPTQ, dynamic={"-:(?!a)": {}}))
    for odd in (None, [], "a", {"a": None}, {"a": 3}):
        folder = write(folder, tensors, **{**GPTQ, "bits": 8}, dynamic=odd)
        np.testing.assert_array_equal(weight(folder), want)
    said = {**GPTQ, "quant_method": "auto-round", "bits": 4}
    for own in ({"a": {"bits": 8}}, {".*a$": {"bits": 8}}, {"^a": {"bits": 8}, "b": {"bits": 16}}):
        np.testing.assert_array_equal(weight(write(folder, tensors, **said, extra_config=own)), want)
    with pytest.raises(FormatError, match="extra_config excludes the module from quantization"):
        safeload.open(write(folder, tensors, **said, extra_config={"a": {"bits": 16}}))


# ---- AWQ ----


def awq(size=32, *, zeros=True, seed=0):
    rng = np.random.default_rng([9, seed])
    codes, count = rng.integers(0, 16, (IN, OUT), dtype=np.uint8), IN // size
    points = rng.integers(0, 16, (count, OUT), dtype=np.uint8)
    scales = (rng.random((count, OUT), np.float32) + 0.5).astype(np.float16)
    tensors = {"a.qweight": words(codes[None], 4, AWQ_ORDER)[0].view("<i4"), "a.scales": scales}
    if zeros:
        tensors["a.qzeros"] = words(points[None], 4, AWQ_ORDER)[0].view("<i4")
    points = points if zeros else points * 0 + 8
    return tensors, ((codes.astype(np.float32) - points.repeat(size, 0)) * scales.astype(np.float32).repeat(size, 0)).T


def test_awq_without_a_configuration_or_zero_points(tmp_path):
    tensors, want = awq()
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(weight(tmp_path), want)  # shapes say all
    tensors, want = awq(zeros=False)
    folder = write(tmp_path / "x", tensors, quant_method="awq", zero_point=False, group_size=32)
    np.testing.assert_array_equal(weight(folder), want)
    np.testing.assert_array_equal(safeload.open(folder)["a.weight"][8:16].dequantize(), want[8:16])
    with pytest.raises(FormatError, match="its qzeros are missing"):
        safeload.open(write(folder, tensors, quant_method="awq", group_size=32))


def test_gptq_without_a_configuration_stays_stored(tmp_path):
    tensors, _ = made()
    save_file(tensors, tmp_path / "model.safetensors")
    assert safeload.load(tmp_path).keys() == tensors.keys()
    with pytest.raises(UnsupportedError, match="holds I32 codes, whose scale"):
        weight(tmp_path)


# ---- large grids ----


@pytest.mark.parametrize("name", ["gptq4_g32_asym", "gptq3_act_order", "awq4_gemm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranges_of_columns_from_files_and_memory(name, dtype, monkeypatch):
    fixture = FIXTURES[name]
    inside.tune(monkeypatch, grid_bytes=1)
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for key, array in safeload.load(fixture.path, dtype=dtype, backend="pread").items():
        np.testing.assert_array_equal(array, fixture.expected()[key].astype(target))
    with safeload.open(fixture.path) as opened:
        for key, value in opened.load().items():
            if isinstance(value, safeload.QuantizedTensor):
                np.testing.assert_array_equal(value.dequantize(dtype), fixture.expected()[key].astype(target))


# ---- refused, and wrong ----


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"checkpoint_format": "marlin"}, "gptq, checkpoint_format marlin"),
        ({"checkpoint_format": "bitblas"}, "gptq, checkpoint_format bitblas"),
        ({"checkpoint_format": "ipex"}, "gptq, checkpoint_format ipex"),
        ({"checkpoint_format": "gptq_marlin_24"}, "gptq, checkpoint_format gptq_marlin_24"),
        ({"checkpoint_format": 3}, "gptq, checkpoint_format 3"),
        ({"pack_dtype": "int16"}, "gptq, pack_dtype int16"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "awq, version gemv_fast"),
        ({"quant_method": "awq", "version": "llm-awq"}, "awq, version llm-awq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "packing_format auto_round:fp8"),
        ({"quant_method": "auto-round", "packing_format": "x" * 10**5}, "packing_format xxx"),
        ({"quant_method": "auto-round", "backend": "auto_round:marlin"}, "backend auto_round:marlin"),
        ({**MODEL_FREE, "sym": False}, "autoround_version is missing"),
        ({**MODEL_FREE, "sym": False, "autoround_version": "next"}, "autoround_version is missing"),
        ({"quant_method": "auto-round", "rotation_config": {"block": 32}}, "auto-round"),
    ],
    ids=range(14),
)
def test_other_arrangements_are_refused_by_name(said, reason, tmp_path):
    tensors, _ = made()
    folder = write(tmp_path / "x", tensors, **{**GPTQ, **said})
    assert safeload.load(folder).keys() == tensors.keys()
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        weight(folder)


def test_planar_codes_and_other_words_are_refused(tmp_path):
    tensors, _ = made(5)
    with pytest.raises(UnsupportedError, match="holds I32 codes"):
        weight(write(tmp_path / "x", tensors, **{**GPTQ, "bits": 5}))
    tensors, _ = made()
    for dtype in (np.int16, np.int8):
        changed = {**tensors, "a.qweight": tensors["a.qweight"].astype(dtype)}
        assert safeload.load(write(tmp_path / "x", changed, **GPTQ)).keys() == tensors.keys()
        with pytest.raises(UnsupportedError, match=r"'a.qweight' holds I\d+ codes"):
            weight(tmp_path / "x")


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize(("bits", "out"), [(4, 4), (4, 12), (2, 20), (8, 2), (4, 16)])
def test_zero_points_that_end_within_a_word(bits, out, sym, tmp_path):
    """auto-round without a model pads them to whole words: a router with few experts has as many rows."""
    zero = 1 << bits - 1 if sym else None
    padded, want = made(bits, shape=(IN, -(-out // 16) * 16), zero=zero)
    tensors = {
        **padded,
        "a.qweight": padded["a.qweight"][:, :out].copy(),
        "a.scales": padded["a.scales"][:, :out].copy(),
    }
    tensors["a.qzeros"] = padded["a.qzeros"][:, : -(-out * bits // 32)].copy()
    folder = write(tmp_path / "x", tensors, **{**GPTQ, "bits": bits, "sym": sym, "quant_method": "auto-round"})
    np.testing.assert_array_equal(weight(folder), want[:out])
    with safeload.open(folder) as opened:
        np.testing.assert_array_equal(opened.get_slice("a.weight")[1:3, 5:50], want[1:out][:2, 5:50])


def without(name):
    return lambda tensors: {key: array for key, array in tensors.items() if key != name}


def changed(name, of):
    return lambda tensors: {**tensors, f"a.{name}": np.ascontiguousarray(of(tensors[f"a.{name}"]))}


@pytest.mark.parametrize(
    ("change", "said", "message"),
    [
        (without("a.scales"), {}, "'a.qweight' holds I32 codes, but the checkpoint has no scale"),
        (without("a.qzeros"), {}, "its qzeros are missing"),
        (changed("qzeros", lambda x: x[:1]), {}, r"qzeros \[1, 8\] and scales \[2, 64\] do not fit"),
        (changed("qzeros", lambda x: x[:, :5]), {}, "do not fit each other"),
        (changed("qzeros", lambda x: x.astype(np.int64)), {}, "qzeros are I64, expected I32"),
        (
            changed("qweight", lambda x: x[:, :60]),
            {},
            r"scales \[2, 64\] are neither GPTQ's nor AWQ's",
        ),
        (changed("qweight", lambda x: x[:0]), {}, "do not form a matrix"),
        (changed("qweight", lambda x: x[None]), {}, "do not form a matrix"),
        (changed("scales", lambda x: x.astype(np.int32)), {}, "a.scales is I32, expected one of BF16, F16, F32"),
        (changed("g_idx", lambda x: x[:-1]), {}, r"g_idx is I32 \[95\], expected I32 \[96\]"),
        (changed("g_idx", lambda x: x.astype(np.int64)), {}, r"g_idx is I64 \[96\], expected I32 \[96\]"),
        (dict, {"bits": 8}, r"hold 4 bits, but bits is 8 \(quantization_config gptq\)"),
        (dict, {"group_size": 32}, r"scales \[2, 64\] do not fit rows of 96 in groups of 32 \(group_size\)"),
        (dict, {"group_size": 2**70}, r"do not fit rows of 96 in groups of \d+ \(group_size\)"),
        (dict, {"quant_method": "awq"}, "have the layout of GPTQ, but quant_method is 'awq'"),
        (lambda _: awq()[0], {}, "have the layout of AWQ, but quant_method is 'gptq'"),
        (lambda _: awq()[0], {"quant_method": "awq", "bits": 3}, "hold 4 bits, but bits is 3"),
        (lambda _: awq()[0], {"quant_method": "awq", "group_size": 64}, r"in groups of 64 \(group_size\)"),
    ],
    ids=range(18),
)
def test_what_is_missing_or_does_not_fit_is_an_error_of_open(change, said, message, tmp_path):
    tensors = change(made(groups=np.arange(IN) // SIZE)[0])
    folder = write(tmp_path / "x", tensors, **{**GPTQ, **said})
    with pytest.raises(FormatError, match=message):
        safeload.open(folder)
    assert safeload.load(folder, stored=True).keys() == tensors.keys()


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("scales", lambda x: x[:, :8], r"do not fit rows of 192 in groups of 64 \(group_size\)|GPTQ|neither"),
        ("qzeros", lambda x: x[:, :1], "neither GPTQ's nor AWQ's"),
        ("qweight", lambda x: x[:, :12], None),
    ],
)
def test_rows_of_gemv_that_do_not_fit(key, change, message, tmp_path):
    stored = FIXTURES["awq4_gemv"].stored()
    name = next(name for name in stored if name.endswith(key))
    stored[name] = np.ascontiguousarray(change(stored[name]))
    said = json.loads((FIXTURES["awq4_gemv"].folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(FormatError, match=message):
        safeload.open(write(tmp_path / "x", stored, **said))
    del said["group_size"]
    with pytest.raises(FormatError):
        safeload.open(write(tmp_path / "x", FIXTURES["awq4_gemv"].stored(), **said))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1, 1), (0, 5)])
@pytest.mark.parametrize("part", ["qzeros", "scales", "qweight", "g_idx"])
@pytest.mark.parametrize("name", ["gptq3_act_order", "awq4_gemm", "awq4_gemv"])
def test_parts_of_any_shape_are_refused_by_name(name, part, shape, tmp_path):
    """A scalar has no last axis to count."""
    stored = FIXTURES[name].stored()
    key = next((key for key in stored if key.endswith(part)), None)
    if key is None:
        pytest.skip("AWQ has no such part")
    stored[key] = np.zeros(shape, stored[key].dtype)
    said = json.loads((FIXTURES[name].folder / "config.json").read_text())["quantization_config"]
    folder = write(tmp_path / "x", stored, **said)
    with pytest.raises(FormatError, match=re.escape(key.rpartition(".")[0])):
        safeload.open(folder)


def test_hostile_numbers_of_a_configuration(tmp_path):
    tensors, want = made()
    for odd in (2**62, 10**400, 0, True, 4.0, "4", [4], None, {}):
        folder = write(tmp_path / "x", tensors, **{**GPTQ, "sym": odd, "group_size": 0 if odd == 0 else SIZE})
        np.testing.assert_array_equal(weight(folder), want)
        folder = write(folder, tensors, **{**GPTQ, "bits": odd, "checkpoint_format": None, "format": ""})
        if type(odd) is int:
            with pytest.raises(FormatError, match="hold 4 bits, but bits is"):
                safeload.open(folder)
        else:
            np.testing.assert_array_equal(weight(folder), want)
