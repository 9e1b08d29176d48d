"""LoRA adapters merged while loading, against what PEFT merges (tests/data/lora/make.py)."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from builders import inside
from builders.adapters import LORA as DATA
from builders.adapters import PREFIX, assert_merged, assert_same, pair, write
from builders.paths import ROOT
from builders.remote import Served
from builders.thorough import part_of

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

BASE = DATA / "base.safetensors"
CASES = sorted(path.parent.name for path in DATA.glob("*/adapter_config.json"))


@pytest.fixture
def base(tmp_path):
    rng = np.random.default_rng(1)
    weights = {"w.weight": rng.standard_normal((6, 5), np.float32), "other": np.arange(4, dtype=np.int64)}
    save_file(weights, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def base_of(case, tmp_path):
    """The base of a case; that of Linear and Conv1D with the config.json that tells them apart."""
    own = DATA / f"{case}_base.safetensors"
    if case != "mixed":
        return own if own.exists() else BASE
    shutil.copy(own, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_as_peft_merges(case, tmp_path):
    path = base_of(case, tmp_path)
    base, expected = safeload.load(path), safeload.load(DATA / f"{case}.safetensors")
    merged = safeload.load(path, adapters=DATA / case)
    assert list(merged) == list(base)
    assert {name for name in base if not np.array_equal(base[name], merged[name])} == set(expected)
    for name, value in expected.items():
        assert_merged(merged[name], value, 40)


def test_no_adapters_change_nothing(base):
    plain = safeload.load(base)
    for none in (None, [], ()):
        assert all(np.array_equal(value, plain[name]) for name, value in safeload.load(base, adapters=none).items())


def test_several_in_order_with_weights(base, tmp_path):
    one, two = write(tmp_path / "one", pair(seed=2)), write(tmp_path / "two", pair(seed=3))
    w = safeload.load(base)["w.weight"]
    merged = safeload.load(base, adapters=[(one, np.float32(0.5)), two])["w.weight"]
    expected = w.astype(np.float64)
    for seed, weight in ((2, 0.5), (3, 1)):
        a, b = pair(seed=seed).values()
        expected += weight * 2 * (b.astype(np.float64) @ a)
    assert_merged(merged, expected, 4)


@pytest.mark.parametrize("saved", [False, True])
def test_of_two_values_of_a_tensor_the_first_is_taken(tmp_path, saved):
    """The names are those of two implementations of a model."""
    one, two, small = (np.full((6, 5), value, np.float32) for value in (1, 2, 3))
    save_file({"embed_out.weight": small, "w.weight": small}, tmp_path / "base.safetensors")
    first = "embed_out.modules_to_save.weight" if saved else "embed_out.weight"
    tensors = {first: one, "lm_head.weight": two}
    path = write(tmp_path / "adapter", tensors, modules_to_save=["embed_out"] if saved else [])
    assert np.array_equal(safeload.load(tmp_path / "base.safetensors", adapters=path)["embed_out.weight"], one)
    factors = pair(module="lm_head")
    path = write(tmp_path / "factors", {**tensors, **factors}, modules_to_save=["embed_out"] if saved else [])
    merged = safeload.load(tmp_path / "base.safetensors", adapters=[path, path])["embed_out.weight"]
    a, b = factors.values()
    assert_merged(merged, one + 2 * (b.astype(np.float64) @ a), 40)


@pytest.mark.parametrize("module", ["mm_soft_emb_norm", "soft_prompts", "cloft_head"])
def test_names_that_contain_those_of_other_methods(module, base, tmp_path):
    """OFT is a method, soft is none."""
    save_file({**safeload.load(base), f"{module}.weight": np.ones(3, np.float32)}, tmp_path / "more.safetensors")
    adapter = write(tmp_path / "a", {**pair(), f"{module}.weight": np.full(3, 2, np.float32)})
    merged = safeload.load(tmp_path / "more.safetensors", adapters=adapter)
    assert np.array_equal(merged[f"{module}.weight"], np.full(3, 2, np.float32))


@pytest.mark.parametrize("dtype", [None, "float16", "float64"])
def test_rounds_once(tmp_path, dtype):
    """A change of less than the last bit of the base counts, if two of them are more."""
    small = np.float32([[2.0**-9]])
    one = {"w.lora_A.weight": small, "w.lora_B.weight": np.float32([[1]])}
    save_file({"w.weight": np.ones((1, 1), ml_dtypes.bfloat16)}, tmp_path / "base.safetensors")
    adapter = write(tmp_path / "a", one, r=1, lora_alpha=1)
    several = [adapter] * 4
    found = safeload.load(tmp_path / "base.safetensors", adapters=several, dtype=dtype)["w.weight"]
    assert found.dtype == (ml_dtypes.bfloat16 if dtype is None else np.dtype(dtype))
    assert float(found[0, 0]) == 1 + 2.0**-7


@pytest.mark.parametrize("rows", [700, 300_000])
def test_tiles_join(rows, tmp_path):
    """A tile has up to 4 Mi elements."""
    rng = np.random.default_rng(4)
    w = rng.standard_normal((rows, 30), np.float32)
    save_file({"w.weight": w}, tmp_path / "base.safetensors")
    adapter = write(tmp_path / "a", pair(rows, 30))
    a, b = pair(rows, 30).values()
    found = safeload.load(tmp_path / "base.safetensors", adapters=adapter)["w.weight"]
    assert_merged(found, w + 2 * (b.astype(np.float64) @ a), 3)


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "float64"])
def test_bits_do_not_depend_on_how_the_base_is_read(tmp_path, dtype):
    """From the file or from tiles in memory, on any number of threads, and with any instructions (test_core)."""
    rng = np.random.default_rng(7)
    rows = 70_000  # three tiles of 4 Mi elements
    w = rng.standard_normal((rows, 131), np.float32).astype(ml_dtypes.bfloat16)
    save_file({"w.weight": w}, tmp_path / "base.safetensors")
    adapters = [write(tmp_path / "a", pair(rows, 131)), (write(tmp_path / "b", pair(rows, 131, seed=1)), -0.3)]
    first = safeload.load(tmp_path / "base.safetensors", adapters=adapters, dtype=dtype, threads=1)["w.weight"]
    expected = w.astype(np.float64)
    for seed, weight in ((0, 2), (1, -0.6)):
        a, b = pair(rows, 131, seed=seed).values()
        expected += weight * (b.astype(np.float64) @ a)
    half = float(ml_dtypes.finfo(first.dtype).eps) / 2
    assert (np.abs(first.astype(np.float64) - expected) <= half * np.abs(expected) + 3e-6).all()
    out = {"w.weight": np.zeros((rows, 131), first.dtype)}
    safeload.load(tmp_path / "base.safetensors", adapters=adapters, dtype=dtype, threads=3, out=out)
    converted = tmp_path / "merged.safetensors"
    safeload.convert({"w.weight": w}, converted, adapters=adapters, dtype=dtype)
    store = Served({"mem://m/base.safetensors": (tmp_path / "base.safetensors").read_bytes()})  # fetched tile by tile
    tiled = safeload.load(store.at("mem://m/base.safetensors"), adapters=adapters, dtype=dtype)["w.weight"]
    assert len(store.requests) > 3
    for values in (out["w.weight"], safeload.load(converted)["w.weight"], tiled):
        assert_same({"w": values}, {"w": first})


@pytest.mark.parametrize("rank", [0, 1, 65])
def test_any_rank_and_scale_of_mlx(tmp_path, rank):
    rng = np.random.default_rng(9)
    w = rng.standard_normal((6, 5), np.float32)
    save_file({"w.weight": w}, tmp_path / "base.safetensors")
    folder = tmp_path / "mlx"
    folder.mkdir()
    a, b = rng.standard_normal((5, rank), np.float32), rng.standard_normal((rank, 6), np.float32)
    save_file({"w.lora_a": a, "w.lora_b": b}, folder / "adapters.safetensors")
    for scale in (-1.5, 1e30):
        config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        merged = safeload.load(tmp_path / "base.safetensors", adapters=folder)["w.weight"]
        expected = w + scale * (b.T.astype(np.float64) @ a.T)
        np.testing.assert_allclose(merged, expected, rtol=1e-4, atol=1e-4)
    huge = safeload.load(tmp_path / "base.safetensors", adapters=[(folder, 1e30)])["w.weight"]
    assert np.isfinite(huge).all() == (rank == 0)


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "q6_k"])
def test_a_gguf_base(tmp_path, scheme):
    w = np.random.default_rng(8).standard_normal((40, 512), np.float32)
    safeload.convert({"w.weight": w}, tmp_path / "base.gguf", quantize=scheme)
    true = safeload.load(tmp_path / "base.gguf", dtype="float32")["w.weight"]
    adapter = write(tmp_path / "a", pair(40, 512))
    a, b = pair(40, 512).values()
    merged = safeload.load(tmp_path / "base.gguf", adapters=adapter, dtype="bfloat16")["w.weight"]
    wide = safeload.load(tmp_path / "base.gguf", adapters=adapter, dtype="float32")["w.weight"]
    assert_merged(wide, true + 2 * (b.astype(np.float64) @ a), 3)
    assert_same({"w": merged}, {"w": wide.astype(ml_dtypes.bfloat16)})


def test_fills_arrays_of_the_caller(base, tmp_path):
    adapter = write(tmp_path / "a", pair())
    out = {"w.weight": np.zeros((6, 5), np.float32), "other": np.zeros(4, np.int64)}
    done = []
    merged = safeload.load(base, adapters=adapter, out=out, progress=lambda *at: done.append(at))
    assert merged["w.weight"] is out["w.weight"]
    assert out["w.weight"].any()
    assert done[-1] == (6 * 5 * 4 + 32,) * 2
    with pytest.raises(ValueError, match=r"w\.weight.*\[6, 5\]"):
        safeload.load(base, adapters=adapter, out={**out, "w.weight": np.zeros((5, 6), np.float32)})


def test_chooses_tensors(base, tmp_path):
    adapter = write(tmp_path / "a", pair())
    assert list(safeload.load(base, adapters=adapter, drop="w*")) == ["other"]
    assert list(safeload.load(base, ["w.weight"], adapters=adapter)) == ["w.weight"]


@pytest.mark.parametrize("name", ["fp8_block", "modelopt_nvfp4", "ct_old_w3_g32", "gptq3_act_order", "awq4_gemm"])
def test_packed_bases(name, tmp_path):
    folder = ROOT / "tests" / "data" / "quantized" / name
    true = safeload.load(folder, dtype="float32")
    with safeload.open(folder) as checkpoint:
        weight = next(
            k
            for k, one in checkpoint.tensors.items()
            if len(one.shape) == 2 and k.endswith(".weight") and isinstance(checkpoint[k], safeload.QuantizedTensor)
        )
    adapter = write(tmp_path / "a", pair(*true[weight].shape, module=weight.removesuffix(".weight")))
    merged = safeload.load(folder, adapters=adapter, dtype="float32")
    a, b = pair(*true[weight].shape).values()
    assert_merged(merged[weight], true[weight] + 2 * (b.astype(np.float64) @ a), 3)
    with pytest.raises(safeload.UnsupportedError, match="is packed, and an adapter changes it: pass dtype="):
        safeload.load(folder, adapters=adapter)


def write_mlx(folder, shapes, *, kind="lora", seed=5):
    """An adapter of MLX with a scale of 3, and its tensors."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    parts = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(parts, folder / "adapters.safetensors")
    config = {"fine_tune_type": kind, "lora_parameters": {"rank": 2, "scale": 3.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return parts


def test_mlx(tmp_path):
    rng = np.random.default_rng(5)
    w, e = rng.standard_normal((6, 5), np.float32), rng.standard_normal((9, 4), np.float32)
    save_file({"w.weight": w, "e.weight": e}, tmp_path / "base.safetensors")
    shapes = {"w.lora_a": (5, 2), "w.lora_b": (2, 6), "e.lora_a": (9, 2), "e.lora_b": (2, 4)}
    parts = write_mlx(tmp_path / "mlx", shapes)
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "mlx")
    assert_merged(merged["w.weight"], w + 3 * (parts["w.lora_b"].T @ parts["w.lora_a"].T), 3)
    assert_merged(merged["e.weight"], e + 3 * (parts["e.lora_a"] @ parts["e.lora_b"]), 3)


def test_mlx_keeps_a_norm_for_each_row_of_an_embedding(tmp_path):
    e = np.random.default_rng(6).standard_normal((9, 4), np.float32)
    save_file({"e.weight": e}, tmp_path / "base.safetensors")
    parts = write_mlx(tmp_path / "mlx", {"e.lora_a": (9, 2), "e.lora_b": (2, 4), "e.m": (9,)}, kind="dora")
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "mlx")["e.weight"]
    changed = e + 3 * (parts["e.lora_a"] @ parts["e.lora_b"])
    assert_merged(merged, changed * (parts["e.m"] / np.linalg.norm(changed, axis=1))[:, None], 9)


def test_a_square_embedding_of_mlx_is_known_by_its_name(tmp_path):
    w = np.random.default_rng(6).standard_normal((5, 5), np.float32)
    save_file({"embed_tokens.weight": w, "w.weight": w}, tmp_path / "base.safetensors")
    shapes = {
        f"{name}.lora_{part}": shape for name in ("embed_tokens", "w") for part, shape in (("a", (5, 2)), ("b", (2, 5)))
    }
    parts = write_mlx(tmp_path / "mlx", shapes)
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "mlx")
    assert_merged(
        merged["embed_tokens.weight"], w + 3 * (parts["embed_tokens.lora_a"] @ parts["embed_tokens.lora_b"]), 3
    )
    assert_merged(merged["w.weight"], w + 3 * (parts["w.lora_a"] @ parts["w.lora_b"]).T, 3)


@pytest.mark.parametrize("packed", [False, True])
def test_stacks_of_experts_of_mlx(tmp_path, packed):
    base, name = tmp_path / "base.safetensors", "x.switch_mlp.up_proj"
    if packed:
        base, name = ROOT / "tests/data/quantized/mlx_experts", "model.layers.0.mlp.switch_mlp.up_proj"
        name = name.replace("up_proj", "down_proj")
    else:
        save_file({f"{name}.weight": np.random.default_rng(6).standard_normal((3, 6, 5), np.float32)}, base)
    w = safeload.load(base, dtype="float32")[f"{name}.weight"]
    experts, rows, columns = w.shape
    parts = write_mlx(tmp_path / "mlx", {f"{name}.lora_a": (experts, 2, columns), f"{name}.lora_b": (experts, rows, 2)})
    merged = safeload.load(base, adapters=tmp_path / "mlx", dtype="float32")[f"{name}.weight"]
    assert_merged(merged, w + 3 * (parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"]), 3)
    safeload.convert(base, tmp_path / "out/", adapters=tmp_path / "mlx", dtype="float32")
    assert np.array_equal(safeload.load(tmp_path / "out")[f"{name}.weight"], merged)
    write_mlx(tmp_path / "old", {f"{name}.lora_a": (experts * 2, columns), f"{name}.lora_b": (experts, rows, 2)})
    with pytest.raises(safeload.FormatError, match=rf"it needs \[{experts}, {columns}, {columns}\]"):
        safeload.load(base, adapters=tmp_path / "old", dtype="float32")
    shapes = {f"{name}.lora_a": (experts, 2, columns), f"{name}.lora_b": (experts, rows, 2), f"{name}.m": (rows,)}
    write_mlx(tmp_path / "dora", shapes, kind="dora")
    with pytest.raises(safeload.UnsupportedError, match="for which MLX has no DoRA"):
        safeload.load(base, adapters=tmp_path / "dora", dtype="float32")


@pytest.mark.parametrize(("layer", "stack"), [("w2", "down_proj"), ("up_proj", "up_proj")])
def test_stacks_of_mlx_change_experts_that_are_stored_apart(tmp_path, layer, stack):
    base, name = tmp_path / "base.safetensors", f"x.switch_mlp.{stack}"
    rng = np.random.default_rng(6)
    experts = {f"x.experts.{k}.{layer}.weight": rng.standard_normal((6, 5), np.float32) for k in range(3)}
    save_file({**experts, "x.gate.weight": rng.standard_normal((3, 5), np.float32)}, base)
    parts = write_mlx(tmp_path / "mlx", {f"{name}.lora_a": (3, 2, 5), f"{name}.lora_b": (3, 6, 2)})
    merged = safeload.load(base, adapters=tmp_path / "mlx")
    for k, (weight, value) in enumerate(experts.items()):
        assert_merged(merged[weight], value + 3 * (parts[f"{name}.lora_b"][k] @ parts[f"{name}.lora_a"][k]), 3)
    safeload.convert(base, tmp_path / "out/", adapters=tmp_path / "mlx", max_shard_size=200, resume=True)
    assert_same(safeload.load(tmp_path / "out"), merged)
    write_mlx(tmp_path / "more", {f"{name}.lora_a": (4, 2, 5), f"{name}.lora_b": (4, 6, 2)})
    with pytest.raises(safeload.FormatError, match=r"is \[3, 6, 5\]: it needs \[3, 2, 5\]"):
        safeload.load(base, adapters=tmp_path / "more")
    del experts["x.experts.0." + layer + ".weight"]
    save_file(experts, base)
    with pytest.raises(safeload.TensorNotFoundError, match=rf"'{name}\.weight', which .* does not have"):
        safeload.load(base, adapters=tmp_path / "mlx")


def test_the_folder_of_an_mlx_training(tmp_path):
    """The trainer saves adapters.safetensors and a copy of every hundred steps."""
    w = np.random.default_rng(6).standard_normal((6, 5), np.float32)
    save_file({"w.weight": w}, tmp_path / "base.safetensors")
    parts = write_mlx(tmp_path / "mlx", {"w.lora_a": (5, 2), "w.lora_b": (2, 6)})
    early = {name: value / 2 for name, value in parts.items()}
    for step in (100, 200):
        save_file(early, tmp_path / f"mlx/{step:07}_adapters.safetensors")
    change = 3 * (parts["w.lora_b"].T @ parts["w.lora_a"].T)
    for adapter, factor in (("mlx", 1), ("mlx/0000100_adapters.safetensors", 0.25)):
        merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / adapter)["w.weight"]
        assert_merged(merged, w + factor * change, 3)
    kind, skipped = safeload.open(tmp_path / "mlx").notes
    assert kind.startswith("a LoRA adapter (MLX, r 2)")
    assert skipped == "skipped: 0000100_adapters.safetensors, 0000200_adapters.safetensors"
    (tmp_path / "mlx/adapter_config.json").unlink()
    with pytest.raises(safeload.UnsupportedError, match=r"3 \.safetensors files and no index"):
        safeload.open(tmp_path / "mlx")


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("v", "layers.0.v", True),
        ("v", "v", True),
        ("v", "layers.0.uv", False),
        ("0.v", "layers.0.v", True),
        ("0.v", "layers.10.v", False),
        ("0.v", "layers.0xv", True),  # "." is any character, as PEFT has it
        ("layers.0.v", "layers.0.v", True),
        ("a.layers.0.v", "layers.0.v", False),
        ("^layers.0.v", "layers.0.v", True),
        ("^0.v", "layers.0.v", False),
        ("(v|w)", "layers.0.w", True),
        (r"layers\.[0-3]\.v", "model.layers.2.v", True),
    ],
)
def test_patterns_are_the_ends_of_names(tmp_path, pattern, module, matches):
    assert matches == bool(re.fullmatch(rf"(.*\.)?({pattern})" if pattern[0] != "^" else pattern[1:], module))
    save_file({f"{module}.weight": np.zeros((6, 5), np.float32)}, tmp_path / "base.safetensors")
    parts = pair(module=module)
    change = parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
    adapter = write(tmp_path / "a", parts, alpha_pattern={pattern: 20})
    merged = safeload.load(tmp_path / "base.safetensors", adapters=adapter)[f"{module}.weight"]
    assert_merged(merged, (10 if matches else 2) * change, 3)


# ---- what does not fit ----


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            pair(module="v"),
            ["base_model.model.v.lora_A.weight", "v.weight", "does not have", "similar names: w.weight"],
        ),
        (pair(rows=7), ["w.lora_B.weight", "[7, 2]", "w.weight", "[6, 5]", "needs [6, 2]"]),
        (pair(columns=4), ["w.lora_A.weight", "[2, 4]", "[6, 5]", "needs [2, 5]"]),
        (pair(rank=3), ["has rank 3", "'r'", "says 2"]),
        ({"w.lora_A.weight": np.ones((2, 5), np.float32)}, ["w.lora_A.weight", "has no counterpart"]),
        ({**pair(), "w.lora_B.bias": np.ones(6, np.float32)}, ["w.lora_B.bias", "w.bias", "no bias in the base"]),
        ({"w.weight": np.ones((5, 6), np.float32)}, ["[5, 6]", "[6, 5]", "replaces"]),
        ({"other": np.ones(4, np.float32)}, ["other", "I64"]),
        (
            {"w.trainable_tokens_delta": np.ones((1, 5), np.float32)},
            ["trainable_tokens_delta", "0 rows, those of adapter_config.json"],
        ),
        ({}, ["has no tensors"]),
        (
            {**pair(), "w.lora_embedding_A": np.ones((2, 6)), "w.lora_embedding_B": np.ones((5, 2))},
            ["w.lora_A.weight", "w.lora_embedding_A", "in two ways"],
        ),
        ({**pair(), "w.lora_magnitude_vector": np.ones(6, np.float32)}, ["a magnitude", "use_dora"]),
    ],
)
def test_what_does_not_fit_is_named(base, tmp_path, tensors, words):
    with pytest.raises(safeload.SafeloadError) as caught:
        safeload.load(base, adapters=write(tmp_path / "a", tensors))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"peft_type": "HRA"}, safeload.UnsupportedError, "'HRA'"),
        ({"target_parameters": "x"}, safeload.FormatError, "target_parameters"),
        ({"target_parameters": ["x" * 1001]}, safeload.UnsupportedError, "of 1,000 characters"),
        ({"use_qalora": True}, safeload.UnsupportedError, "use_qalora"),
        ({"layer_replication": [[0, 2]]}, safeload.UnsupportedError, "layer_replication"),
        ({"r": 0}, safeload.FormatError, '"r"'),
        ({"r": True}, safeload.FormatError, '"r"'),
        ({"lora_alpha": "x"}, safeload.FormatError, '"lora_alpha"'),
        ({"lora_alpha": 10**400}, safeload.FormatError, '"lora_alpha"'),
        ({"rank_pattern": {"w": -1}}, safeload.FormatError, '"w"'),
        ({"rank_pattern": []}, None, ""),
        ({"rank_pattern": 1}, safeload.FormatError, '"rank_pattern"'),
        ({"rank_pattern": {"(?=w)": 2}}, safeload.UnsupportedError, "rank_pattern"),
        ({"alpha_pattern": {f"(a|b{k})": 2 for k in range(300)}}, safeload.UnsupportedError, "more than 256 patterns"),
        ({"use_rslora": "yes"}, safeload.FormatError, '"use_rslora"'),
        ({"use_dora": True}, safeload.FormatError, "no magnitude"),
    ],
)
def test_configurations(base, tmp_path, config, error, words):
    adapter = write(tmp_path / "a", pair(), **config)
    if error is None:
        safeload.load(base, adapters=adapter)
        return
    with pytest.raises(error) as caught:
        safeload.load(base, adapters=adapter)
    assert words in str(caught.value)


def test_a_missing_head_is_explained(tmp_path):
    save_file({"model.embed_tokens.weight": np.ones((6, 5), np.float32)}, tmp_path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapter = write(tmp_path / "a", pair(module="lm_head"))
    with pytest.raises(safeload.TensorNotFoundError, match="config does not tie one to the embedding"):
        safeload.load(tmp_path, adapters=adapter)


def test_arguments(base, tmp_path):
    adapter = write(tmp_path / "a", pair())
    for weight in (float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="finite"):
            safeload.load(base, adapters=(adapter, weight))
    for wrong in (3, {"a": 1}, [None], [(adapter, "1")]):
        with pytest.raises(TypeError, match="adapters must be a path"):
            safeload.load(base, adapters=wrong)
    saved = write(tmp_path / "saved", {"w.weight": np.ones((6, 5), np.float32)})
    with pytest.raises(safeload.UnsupportedError, match=r"must be 1, not 0\.5"):
        safeload.load(base, adapters=(saved, 0.5))
    with pytest.raises(safeload.UnsupportedError, match=r"must be 1, not 0\.5$"):  # drop= has no names of adapters
        safeload.convert(base, tmp_path / "merged.safetensors", adapters=(saved, 0.5))


def test_foreign_names_and_missing_settings(base, tmp_path):
    save_file({"lora_unet_w.oft_blocks": np.ones((2, 2), np.float32)}, tmp_path / "oft.safetensors")
    with pytest.raises(safeload.UnsupportedError, match="an OFT adapter"):
        safeload.load(base, adapters=tmp_path / "oft.safetensors")
    adapter = write(tmp_path / "a", pair())
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_config"):
        safeload.load(base, adapters=adapter)


def test_pickled_adapters(base, tmp_path):
    torch = pytest.importorskip("torch")
    one = write(tmp_path / "a", pair())
    two = tmp_path / "b"
    shutil.copytree(one, two)
    (two / "adapter_model.safetensors").unlink()
    tensors = {PREFIX + name: torch.from_numpy(value) for name, value in pair().items()}
    torch.save(tensors, two / "adapter_model.bin")
    first, second = (safeload.load(base, adapters=one)["w.weight"] for one in (one, two))
    assert np.array_equal(first, second)


def test_a_changed_base_is_warned_of(base, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "safeload"):
        safeload.load(base, adapters=write(tmp_path / "a", pair(), init_lora_weights="pissa_niter_4"))
    assert "changes the base" in caplog.text


# ---- the other doors ----


@pytest.fixture
def llama(tmp_path):
    """A base of bfloat16 in a folder, an adapter for two of its tensors, and the merged tensors."""
    rng = np.random.default_rng(7)
    shapes = {"a.weight": (64, 32), "b.weight": (32, 64), "norm.weight": (32,)}
    weights = {
        name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    adapter = write(tmp_path / "lora", {**pair(64, 32, module="a"), **pair(32, 64, module="b")})
    return folder, adapter, safeload.load(folder, adapters=adapter)


def test_convert(llama, tmp_path):
    folder, adapter, expected = llama
    safeload.convert(folder, tmp_path / "one.safetensors", adapters=adapter)
    assert_same(safeload.load(tmp_path / "one.safetensors"), expected)
    safeload.convert(folder, tmp_path / "npz.npz", adapters=adapter, dtype="float32", drop="norm*")
    wide = safeload.load(folder, adapters=adapter, dtype="float32", drop="norm*")
    assert_same(safeload.load(tmp_path / "npz.npz"), wide)
    in_memory = safeload.load(folder)
    safeload.convert(in_memory, tmp_path / "memory.safetensors", adapters=[adapter])
    assert_same(safeload.load(tmp_path / "memory.safetensors"), expected)


def test_convert_quantizes_what_is_merged(llama, tmp_path):
    folder, adapter, _ = llama
    wide = safeload.load(folder, adapters=adapter, dtype="float32")
    safeload.convert(folder, tmp_path / "q.gguf", adapters=adapter, quantize="q8_0", only="a.weight", raw=True)
    found = safeload.load(tmp_path / "q.gguf")["a.weight"]
    assert found == safeload.quantize(wide["a.weight"], "q8_0")


def test_convert_in_pieces(llama, tmp_path):
    folder, adapter, expected = llama
    for name, options in {"at_once": {}, "resumed": {"resume": True}}.items():
        safeload.convert(folder, tmp_path / name, adapters=[(adapter, 1)], max_shard_size=4096, **options)
        assert_same(safeload.load(tmp_path / name, list(expected)), expected)
    plan = safeload.plan_convert(folder, tmp_path / "plan", adapters=adapter, max_shard_size=4096)
    plan = safeload.Plan(json.loads(json.dumps(plan)))
    other = safeload.plan_convert(folder, tmp_path / "plan", adapters=(adapter, 0.5), max_shard_size=4096)
    assert plan.id != other.id
    safeload.finalize(plan, [safeload.run_piece(piece) for piece in plan.pieces])
    assert_same(safeload.load(tmp_path / "plan", list(expected)), expected)


def test_pieces_refuse_an_adapter_that_has_changed(llama, tmp_path):
    folder, adapter, _ = llama
    plan = safeload.plan_convert(folder, tmp_path / "plan", adapters=adapter, max_shard_size=4096)
    write(adapter, {**pair(64, 32, module="a", rank=2), "b.weight": np.ones((32, 64), np.float32)})
    with pytest.raises(safeload.FormatError, match="changed"):
        safeload.run_piece(plan.pieces[0])


def test_convert_restores_a_packed_base(tmp_path):
    folder = ROOT / "tests" / "data" / "quantized" / "fp8_block"
    true = safeload.load(folder, dtype="float32")
    weight = next(name for name, value in safeload.load(folder).items() if isinstance(value, safeload.QuantizedTensor))
    adapter = write(tmp_path / "a", pair(*true[weight].shape, module=weight.removesuffix(".weight")))
    with pytest.raises(safeload.UnsupportedError, match="pass dtype="):
        safeload.convert(folder, tmp_path / "out", adapters=adapter, max_shard_size="1GB")
    safeload.convert(folder, tmp_path / "out", adapters=adapter, max_shard_size="1GB", dtype="float32")
    assert_same(safeload.load(tmp_path / "out"), safeload.load(folder, adapters=adapter, dtype="float32"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_command_line(llama, tmp_path, capsys):
    from builders.inside import main

    folder, adapter, _ = llama
    assert main(["convert", str(folder), str(tmp_path / "out.safetensors"), "--adapter", f"{adapter}=0.5"]) == 0
    assert_same(safeload.load(tmp_path / "out.safetensors"), safeload.load(folder, adapters=(adapter, 0.5)))


def test_torch(llama):
    torch = pytest.importorskip("torch")
    from safeload.torch import load_checkpoint

    folder, adapter, expected = llama
    found = load_checkpoint(folder, adapters=adapter)
    for name, value in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert np.array_equal(found[name].float().numpy(), value.astype(np.float32))
    assert load_checkpoint(folder, adapters=adapter, device="meta")["a.weight"].shape == (64, 32)


def test_jax(llama):
    pytest.importorskip("jax")
    from safeload.jax import load_checkpoint

    folder, adapter, expected = llama
    assert_same({name: np.asarray(one) for name, one in load_checkpoint(folder, adapters=adapter).items()}, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own memory counts too")
@pytest.mark.parametrize(("base", "function"), part_of([("plain", "load"), ("fp8", "load"), ("fp8", "convert")], 0, 2))
def test_memory_is_the_result_and_tiles(base, function, tmp_path):
    """A packed or plain base is never in memory in float32 as a whole; the excess does not grow with its size."""
    shape = (8192, 4096)  # 64 MiB of bfloat16, 128 MiB of float32
    folder = tmp_path / "base"
    folder.mkdir()
    weights = {"w.weight": np.zeros(shape, ml_dtypes.bfloat16)}
    if base == "fp8":
        scales = np.ones([size // 128 for size in shape], np.float32)
        weights = {"w.weight": np.zeros(shape, ml_dtypes.float8_e4m3fn), "w.weight_scale_inv": scales}
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", durable=False)
    adapter = write(tmp_path / "a", pair(*shape))
    script = inside.program("""
        import sys
        import safeload
        from safeload import convert
        def peak():  # ru_maxrss begins with the memory of the process that started this one
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
        base, adapter, function = sys.argv[1:]
        safeload.load(base, [])
        before = peak()
        if function == "load":
            found = safeload.load(base, adapters=adapter, dtype="bfloat16")
        else:
            safeload.convert(base, base + ".safetensors", adapters=adapter, dtype="bfloat16")
        print(peak() - before)
    """)
    command = [sys.executable, "-I", "-c", textwrap.dedent(script), str(folder), str(adapter), function]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 64 + 96  # 107 and 114 where this was written


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1)])
def test_the_smallest(tmp_path, shape):
    save_file({"w.weight": np.ones(shape, np.float32)}, tmp_path / "base.safetensors")
    adapter = write(tmp_path / "a", pair(*shape))
    assert safeload.load(tmp_path / "base.safetensors", adapters=adapter)["w.weight"].shape == shape
