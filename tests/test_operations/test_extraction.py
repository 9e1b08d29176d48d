"""LoRA adapters extracted from fine-tuned models: values, names, what is left out, files."""

import json
import logging
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from builders import llama_models, models
from builders.adapters import PREFIX, write
from builders.commands import run
from builders.remote import Served

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

Q, K = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
NORM = "model.norm.weight"


def with_spectrum(values, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((side, len(values))))[0] for side in (rows, columns))
    return ((u * values) @ v.T).astype(np.float32)


def product(folder, name):
    """The product of the factors of a matrix, in float64."""
    tensors = safeload.load(folder / "adapter_model.safetensors", dtype="float32")
    module = PREFIX + name.removesuffix(".weight")
    a, b = (tensors[f"{module}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
    return b.reshape(len(b), -1) @ a.reshape(len(a), -1)


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))


@pytest.fixture
def pair():
    """A base, and a fine-tuned model with a change of rank 3, a changed norm, and an unchanged matrix."""
    rng = np.random.default_rng(1)
    base = {name: rng.standard_normal((48, 40), np.float32) for name in (Q, K)}
    base[NORM] = np.ones(40, np.float32)
    change = with_spectrum([3, 2, 1], 48, 40)
    return base, {**base, Q: base[Q] + change, NORM: base[NORM] + 1}


# ---- values ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_merged_adapter_is_extracted_again(tmp_path, dtype):
    """In float32 within 1e-5; in every dtype the merge of the result is within a rounding of the fine-tuned model."""
    rng = np.random.default_rng(2)
    base = {name: rng.standard_normal((300, 200), np.float32) * 0.1 for name in (Q, K)}
    save_file({name: value.astype(dtype) for name, value in base.items()}, tmp_path / "base.safetensors")
    factors = {
        f"{name.removesuffix('.weight')}.lora_{side}.weight": rng.standard_normal(shape, np.float32) * 0.2
        for name in (Q, K)
        for side, shape in (("A", (4, 200)), ("B", (300, 4)))
    }
    adapter = write(tmp_path / "adapter", factors, r=4, lora_alpha=4)
    safeload.convert(tmp_path / "base.safetensors", tmp_path / "fine.safetensors", adapters=adapter)
    report = safeload.extract(tmp_path / "base.safetensors", tmp_path / "fine.safetensors", tmp_path / "again", rank=4)
    assert report.ranks == {Q: 4, K: 4}
    if dtype == "float32":
        for name in (Q, K):
            expected = product(adapter, name)
            assert np.linalg.norm(product(tmp_path / "again", name) - expected) < 1e-5 * np.linalg.norm(expected)
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "again")
    eps = float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    for name, value in safeload.load(tmp_path / "fine.safetensors", dtype="float32").items():
        assert (
            np.abs(merged[name].astype(np.float32) - value).max()
            <= (4 if dtype == "float32" else 1) * eps * np.abs(value).max()
        )


SPECTRA = {
    "random numbers": lambda n: np.linalg.svd(np.random.default_rng(3).standard_normal((n, n)))[1],
    "slow decay": lambda n: np.arange(1, n + 1) ** -0.3,
    "fast decay": lambda n: 0.7 ** np.arange(n),
    "steps": lambda n: np.repeat([100, 10, 1, 0.1], n // 4),
}


@pytest.mark.parametrize("shape", [(300, 200), (160, 640), (30, 700)], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_error_is_near_the_least(spectrum, shape, tmp_path):
    values = SPECTRA[spectrum](min(shape) // 4 * 4)
    change = with_spectrum(values, *shape)
    base = {Q: np.zeros(shape, np.float32)}
    for rank in (1, 6):
        report = safeload.extract(base, {Q: change}, tmp_path / str(rank), rank=rank)
        _, s, _ = np.linalg.svd(change.astype(np.float64))
        least = np.linalg.norm(s[rank:]) / np.linalg.norm(s)
        measured = np.linalg.norm(change - product(tmp_path / str(rank), Q)) / np.linalg.norm(s)
        assert report.errors[Q] == pytest.approx(measured, rel=1e-4, abs=1e-6)
        assert report.changes[Q] == pytest.approx(np.linalg.norm(s), rel=1e-6)
        assert report.kept == pytest.approx(1 - measured**2, rel=1e-4)
        assert least - 1e-6 <= measured <= 1.01 * least + 1e-6


def test_equal_calls_write_equal_bytes(tmp_path):
    rng = np.random.default_rng(4)
    base, fine = ({name: rng.standard_normal((256, 200), np.float32) for name in (Q, K)} for _ in range(2))
    for place, only in (("one", None), ("two", None), ("q", Q)):
        safeload.extract(base, fine, tmp_path / place, rank=4, only=only)
    one, two = ((tmp_path / place / "adapter_model.safetensors").read_bytes() for place in ("one", "two"))
    assert one == two
    assert np.array_equal(product(tmp_path / "q", Q), product(tmp_path / "one", Q))


@pytest.mark.parametrize("power", [-130, -60, 60, 120])
def test_squares_do_not_leave_float32(power, tmp_path):
    change = with_spectrum([2, 1, 0.5], 48, 40).astype(np.float64) * 2.0**power
    base = {Q: np.zeros((48, 40), np.float32)}
    report = safeload.extract(base, {Q: change.astype(np.float32)}, tmp_path / "a", rank=3)
    assert report.changes[Q] == pytest.approx(np.linalg.norm(change), rel=1e-3)
    assert report.errors[Q] < 1e-3
    assert np.linalg.norm(product(tmp_path / "a", Q) - change) < 1e-3 * np.linalg.norm(change)


def test_float64_is_compared_as_float64(tmp_path):
    base = {Q: np.ones((48, 40))}
    fine = {Q: base[Q] + 1e-10 * with_spectrum([2, 1], 48, 40)}
    report = safeload.extract(base, fine, tmp_path / "a", rank=2)
    assert report.errors[Q] < 1e-5


def test_a_change_of_smaller_rank_gets_its_rank(pair, tmp_path):
    base, fine = {**pair[0], K: np.zeros((48, 40), np.float32)}, dict(pair[1])
    fine[K] = with_spectrum([1, 1], 48, 40)
    report = safeload.extract(base, fine, tmp_path / "a", rank=30, only="*_proj.weight")
    assert report.ranks == {Q: 3, K: 2}  # rounding errors of the sum are no ranks
    config = config_of(tmp_path / "a")
    assert (config["r"], config["lora_alpha"]) == (3, 3)
    assert config["rank_pattern"] == config["alpha_pattern"] == {K.removesuffix(".weight"): 2}
    save_file(base, tmp_path / "base.safetensors")
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "a")
    np.testing.assert_allclose(merged[K], fine[K], atol=1e-6)


def test_dtypes_of_factors(pair, tmp_path):
    for dtype in ("float32", "bfloat16", "float16"):
        report = safeload.extract(*pair, tmp_path / dtype, rank=3, dtype=dtype)
        tensors = safeload.load(tmp_path / dtype)
        assert {array.dtype.name for array in tensors.values()} == {dtype}
        assert report.errors[Q] < 4 * float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    large = {Q: np.full((48, 40), 1e30, np.float32)}
    with pytest.raises(safeload.UnsupportedError, match=f"'{Q}' has factors beyond float16; pass another dtype"):
        safeload.extract({Q: pair[0][Q]}, large, tmp_path / "large", dtype="float16")
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got 'int8'"):
        safeload.extract(*pair, tmp_path / "int8", dtype="int8")


def test_memory_is_that_of_a_few_matrices(tmp_path):
    rng = np.random.default_rng(5)
    shape, count = (512, 1024), 12
    for name in ("base", "fine"):
        tensors = {f"l.{k}.weight": rng.standard_normal(shape, np.float32) for k in range(count)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    matrix = shape[0] * shape[1] * 4
    tracemalloc.start()
    safeload.extract(tmp_path / "base.safetensors", tmp_path / "fine.safetensors", tmp_path / "a", rank=4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * matrix  # of 24; the error is measured in float64


# ---- what gets factors ----


def test_the_rest_is_named_or_stored_whole(tmp_path, caplog):
    config, tensors = models.small("llama")
    base = models.write_folder(tmp_path, config, tensors)
    fine = {name: (value.astype(np.float32) + 0.125).astype(value.dtype) for name, value in tensors.items()}
    with caplog.at_level(logging.WARNING, "safeload"):
        report = safeload.extract(base, fine, tmp_path / "plain", rank=8)
    (record,) = caplog.records
    assert "not in the adapter, although changed: " in record.getMessage()
    assert "with_rest=True" in record.getMessage()
    assert {"is an embedding", "is a norm"} == {*report.left_out.values()}
    assert report.ranks.keys() | report.left_out.keys() == tensors.keys()
    caplog.clear()
    report = safeload.extract(base, fine, tmp_path / "whole", rank=8, with_rest=True)
    assert not caplog.records
    assert report.left_out == {}
    merged = safeload.load(base, adapters=tmp_path / "whole", dtype="float32")
    for name, value in fine.items():
        np.testing.assert_allclose(merged[name], value.astype(np.float32), atol=4e-3, err_msg=name)
    assert safeload.check(tmp_path / "whole", base=base).ok


def test_a_bias_beside_factors_and_tensors_outside_modules(tmp_path):
    rng = np.random.default_rng(6)
    base = {"l.weight": rng.standard_normal((8, 6), np.float32), "l.bias": np.zeros(8, np.float32)}
    base |= {"m.bias": np.zeros(3, np.float32), "probe": np.zeros((2, 3, 4), np.float32), "ids": np.arange(4)}
    base["soft_emb_norm.weight"] = np.ones(3, np.float32)  # not of OFT
    fine = {name: value + 1 for name, value in base.items()}
    report = safeload.extract(base, fine, tmp_path / "a", with_rest=True)
    reasons = {"l.bias": "is a bias", "m.bias": "is a bias", "probe": "is 3-D", "soft_emb_norm.weight": "is a norm"}
    for name, reason in report.whole.items():
        assert reason in (reasons[name], "is 1-D"), name
    assert report.whole.keys() == reasons.keys()
    assert report.left_out == {"ids": "is I64, not floating"}
    stored = {name.removeprefix(PREFIX) for name in safeload.load(tmp_path / "a")}
    assert {"l.base_layer.bias", "m.bias", "probe"} <= stored
    save_file(base, tmp_path / "base.safetensors")
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "a")
    for name in fine.keys() - {"ids"}:
        np.testing.assert_allclose(merged[name], fine[name], atol=1e-6)


def test_shapes_and_names_that_differ(pair, tmp_path):
    base, fine = dict(pair[0]), dict(pair[1])
    base["only.a"], fine["only.b"] = np.ones(2, np.float32), np.ones(2, np.float32)
    base["e.weight"], fine["e.weight"] = np.ones((4, 3), np.float32), np.ones((5, 3), np.float32)
    report = safeload.extract(base, fine, tmp_path / "a")
    whole = {NORM: "is a norm", "e.weight": "is [5, 3], but [4, 3] in the base"}
    alone = {"only.a": "is only in the base", "only.b": "is not in the base"}
    assert report.left_out == {**whole, **alone}
    report = safeload.extract(base, fine, tmp_path / "b", with_rest=True)
    assert (report.whole, report.left_out) == (whole, alone)
    assert report.described["only.a"] == ("F32", (2,), 8)


def test_a_larger_vocabulary_is_stored_whole(tmp_path):
    config, tensors = models.small("llama")
    base = models.write_folder(tmp_path, config, tensors)
    fine = {name: value.astype(np.float32) for name, value in tensors.items()}
    larger = [name for name in fine if name.startswith(("lm_head", "model.embed_tokens"))]
    for name in larger:
        fine[name] = np.concatenate([fine[name], np.ones((2, fine[name].shape[1]), np.float32)])
    attention = next(name for name in fine if name.endswith("q_proj.weight"))
    fine[attention] = fine[attention] + 1
    report = safeload.extract(base, fine, tmp_path / "a", with_rest=True)
    assert report.whole.keys() == {*larger}
    merged = safeload.load(base, adapters=tmp_path / "a", dtype="float32")
    for name, value in fine.items():
        np.testing.assert_allclose(merged[name], value, atol=1e-6, err_msg=name)


def test_a_tied_head_is_not_changed_twice(tmp_path):
    config, tensors = models.small("llama")
    embedding = tensors["model.embed_tokens.weight"]
    tensors = {**tensors, "lm_head.weight": embedding}
    base = models.write_folder(tmp_path, {**config, "tie_word_embeddings": True}, tensors)
    fine = {name: (value.astype(np.float32) + 0.25).astype(value.dtype) for name, value in tensors.items()}
    report = safeload.extract(base, fine, tmp_path / "a", with_rest=True)
    assert report.left_out == {"lm_head.weight": "is tied to model.embed_tokens.weight"}
    merged = safeload.load(base, adapters=tmp_path / "a")
    assert np.array_equal(merged["lm_head.weight"], fine["lm_head.weight"])


@pytest.mark.parametrize("kernel", [(3, 3), (2, 3, 3)], ids=str)
def test_convolutions(kernel, tmp_path):
    rng = np.random.default_rng(7)
    shape = (12, 8, *kernel)
    base = {"conv.weight": rng.standard_normal(shape, np.float32), "deep.weight": np.ones((12, 1, *kernel), np.float32)}
    change = with_spectrum([2, 1], 12, 8 * int(np.prod(kernel))).reshape(shape)
    fine = {"conv.weight": base["conv.weight"] + change, "deep.weight": base["deep.weight"] + 1}
    report = safeload.extract(base, fine, tmp_path / "a", rank=2)
    assert report.left_out == {"deep.weight": f"is {2 + len(kernel)}-D"}
    tensors = safeload.load(tmp_path / "a")
    shapes = {name.removeprefix(f"{PREFIX}conv."): array.shape for name, array in tensors.items()}
    assert shapes == {"lora_A.weight": (2, 8, *kernel), "lora_B.weight": (12, 2, *(1 for _ in kernel))}
    save_file(base, tmp_path / "base.safetensors")
    merged = safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "a")
    np.testing.assert_allclose(merged["conv.weight"], fine["conv.weight"], atol=1e-5)


def test_weights_stored_as_in_out(tmp_path):
    """GPT-2's files also lack the prefix that its class with a head adds."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 2, "n_embd": 8}
    rng = np.random.default_rng(8)
    sizes = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}
    base = {f"h.0.{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
    base |= {"wte.weight": np.ones((9, 8), np.float32), "wpe.weight": np.ones((5, 8), np.float32)}
    base |= {f"{name}.weight": np.ones(8, np.float32) for name in ("ln_f", "h.0.ln_1", "h.0.ln_2")}
    fine = {name: value + with_spectrum([1], *value.shape) for name, value in base.items() if value.ndim == 2}
    (tmp_path / "base").mkdir()
    folder = models.write_folder(tmp_path / "base", config, base)
    report = safeload.extract(folder, {**base, **fine}, tmp_path / "a", rank=1)
    assert report.left_out == dict.fromkeys(("wpe.weight", "wte.weight"), "is an embedding")
    config = config_of(tmp_path / "a")
    assert config["fan_in_fan_out"] is True
    assert config["target_modules"] == ["c_attn", "c_fc", "c_proj"]
    shapes = {name: array.shape for name, array in safeload.load(tmp_path / "a").items()}
    assert shapes[f"{PREFIX}transformer.h.0.attn.c_attn.lora_A.weight"] == (1, 8)
    merged = safeload.load(folder, adapters=tmp_path / "a")
    for name in report.ranks:
        np.testing.assert_allclose(merged[name], fine[name], atol=1e-5)


def test_targets_are_short_only_if_they_name_no_other_module(tmp_path):
    rng = np.random.default_rng(9)
    names = ["v.0.mlp", "v.0.q", "v.1.q", "m.0", "m.2", "l.0.mlp.up", "l.0.o", "l.1.o", "l.0.norm"]
    base = {f"{name}.weight": rng.standard_normal((6, 5), np.float32) for name in names}
    same = ("l.1.o", "l.0.norm")
    fine = {name: value + (name.removesuffix(".weight") not in same) for name, value in base.items()}
    safeload.extract(base, fine, tmp_path / "a", rank=1)
    # The name mlp is that of another module, 0 of a layer; the second o did not change.
    assert config_of(tmp_path / "a")["target_modules"] == ["2", "l.0.o", "m.0", "q", "up", "v.0.mlp"]


@pytest.mark.parametrize("form", ["q8_0", "gguf"])
def test_quantized_bases_are_dequantized(form, tmp_path):
    config, tensors = models.small("llama", np.float32)
    source = models.write_folder(tmp_path, config, tensors)
    base = tmp_path / ("base.gguf" if form == "gguf" else "base.safetensors")
    safeload.convert(source, base, quantize="q8_0", raw=True)
    fine = {name: value + 0.5 for name, value in tensors.items()}
    safeload.extract(base, fine, tmp_path / "a", rank=500, with_rest=True)
    merged = safeload.load(base, adapters=tmp_path / "a", dtype="float32")
    for name, value in fine.items():
        np.testing.assert_allclose(merged[name], value, atol=1e-5, err_msg=name)


def test_a_file_of_llama_cpp_is_read_as_the_model_of_transformers(tmp_path):
    pytest.importorskip("tokenizers")
    model = llama_models.listed()["llama3"]
    base = llama_models.write_folder(tmp_path / "base", model)
    before = safeload.load(base)
    after = {name: (value.astype(np.float32) + 0.25).astype(value.dtype) for name, value in before.items()}
    fine = llama_models.write_folder(tmp_path / "fine", model, after)
    for name in ("base", "fine"):
        safeload.convert(tmp_path / name, tmp_path / f"{name}.gguf")
    places = {}
    for a, b in ((base, fine), (base, tmp_path / "fine.gguf"), (tmp_path / "base.gguf", tmp_path / "fine.gguf")):
        place = tmp_path / f"of {a.name} and {b.name} lora"
        safeload.extract(a, b, place, rank=4, with_rest=True)
        places[place.name] = (place / "adapter_model.safetensors").read_bytes()
    assert len({*places.values()}) == 1, [*places]


def test_names_of_transformers_4_and_5_are_paired(tmp_path):
    model = llama_models.listed()["mixtral"]
    base = llama_models.write_folder(tmp_path / "base", model)
    fine = {name: (value.astype(np.float32) + 0.25).astype(value.dtype) for name, value in safeload.load(base).items()}
    newer = {name.replace(".block_sparse_moe.", ".mlp."): value for name, value in fine.items()}
    for place, tensors in (("older", fine), ("newer", newer)):
        own = llama_models.write_folder(tmp_path / place, model, tensors)
        report = safeload.extract(base, own, tmp_path / f"{place}-lora", rank=4)
        assert not {"is only in the base", "is not in the base"} & {*report.left_out.values()}
    older, newer = (safeload.load(tmp_path / f"{place}-lora") for place in ("older", "newer"))
    assert older.keys() == newer.keys()
    assert any(".mlp.experts.0.w1.lora_A" in name for name in older)
    for name, array in older.items():
        assert np.array_equal(array, newer[name])
    assert safeload.info(tmp_path / "older-lora", base=base).adapter.fitting.problems == []


def test_sources_behind_urls_and_in_other_formats(pair, tmp_path):
    base, fine = pair
    save_file(base, tmp_path / "base.safetensors")
    safeload.convert(fine, tmp_path / "fine.npz")
    store = Served({"mem://m/base.safetensors": (tmp_path / "base.safetensors").read_bytes()})
    safeload.extract(base, fine, tmp_path / "one", rank=3)
    safeload.extract(store.at("mem://m/base.safetensors"), tmp_path / "fine.npz", tmp_path / "two", rank=3)
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


# ---- errors ----


def test_equal_models_have_no_adapter(pair, tmp_path):
    base, fine = pair
    with pytest.raises(safeload.SafeloadError, match="dict equals dict: there is no change to extract"):
        safeload.extract(base, {name: value.copy() for name, value in base.items()}, tmp_path / "a")
    with pytest.raises(safeload.SafeloadError, match="there is no change"):
        safeload.extract(base, fine, tmp_path / "a", only=K)
    with pytest.raises(safeload.UnsupportedError, match=f"but in 1 changed tensor such as '{NORM}', which is a norm"):
        safeload.extract(base, fine, tmp_path / "a", drop="*q_proj*")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_is_named(pair, side, value, tmp_path):
    models = [dict(each) for each in pair]
    models[side][K] = models[side][K].copy()
    models[side][K][7, 3] = value
    with pytest.raises(safeload.FormatError, match=rf"'{K}' has a NaN or an infinity at \[7, 3\]"):
        safeload.extract(*models, tmp_path / "a")


def test_a_change_beyond_float32_is_named(tmp_path):
    large = np.full((4, 4), 3e38, np.float32)
    with pytest.raises(safeload.UnsupportedError, match=f"'{Q}' has a change beyond float32"):
        safeload.extract({Q: -large}, {Q: large}, tmp_path / "a")


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, None])
def test_ranks(rank, pair, tmp_path):
    with pytest.raises(ValueError, match="rank must be an integer >= 1"):
        safeload.extract(*pair, tmp_path / "a", rank=rank)


def test_patterns_that_match_nothing(pair, tmp_path):
    with pytest.raises(safeload.TensorNotFoundError, match="matches none of 3 names"):
        safeload.extract(*pair, tmp_path / "a", only="*.v_proj.weight")


# ---- files ----


def test_what_is_there_stays_unless_asked(pair, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    safeload.extract(*pair, folder, rank=2)  # an empty folder
    first = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it"):
        safeload.extract(*pair, folder, rank=3)
    assert (folder / "adapter_model.safetensors").read_bytes() == first
    safeload.extract(*pair, folder, rank=3, overwrite=True)
    assert config_of(folder)["r"] == 3
    assert (folder / "README.md").read_text() == "mine"
    assert sorted(os.listdir(folder)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="an adapter needs a folder"):
        safeload.extract(*pair, tmp_path / "file", overwrite=True)
    with pytest.raises(ValueError, match="extract writes a local folder, got 's3://bucket/a'"):
        safeload.extract(*pair, "s3://bucket/a")
    with pytest.raises(ValueError, match=r"writes a folder, but '.*out\.safetensors' has the suffix of a file"):
        safeload.extract(*pair, tmp_path / "out.safetensors")


@pytest.mark.parametrize("side", ["base", "fine"])
def test_an_adapter_is_not_written_into_a_source(pair, side, tmp_path):
    for name, tensors in zip(("base", "fine"), pair, strict=True):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    with pytest.raises(ValueError, match="which is read: choose another folder"):
        safeload.extract(tmp_path / "base", tmp_path / "fine", tmp_path / side, overwrite=True)
    assert os.listdir(tmp_path / side) == ["model.safetensors"]


def test_an_interrupted_call_writes_nothing(pair, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        safeload.extract(*pair, tmp_path / "a", progress=interrupt)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("call", [*range(6)])
def test_the_old_adapter_survives_a_failing_rename(call, pair, tmp_path, monkeypatch):
    """At every step a reader finds the old files, or no settings."""
    folder = tmp_path / "a"
    safeload.extract(*pair, folder, rank=1)
    old = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    calls, rename, replace = [], os.rename, os.replace

    def failing(function):
        def step(*arguments, **options):
            calls.append(arguments)
            if (folder / "adapter_config.json").exists():
                assert (folder / "adapter_model.safetensors").read_bytes() == old["adapter_model.safetensors"]
            if len(calls) == call + 1:
                raise OSError(5, "broken")
            return function(*arguments, **options)

        return step

    monkeypatch.setattr(os, "rename", failing(rename))
    monkeypatch.setattr(os, "replace", failing(replace))
    try:
        safeload.extract(*pair, folder, rank=3, overwrite=True)
    except OSError:
        assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == old
    else:
        assert len(calls) <= call
        assert config_of(folder)["r"] == 3
    assert len(os.listdir(folder)) == 2


def test_a_failed_first_write_leaves_no_folder(pair, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        safeload.extract(*pair, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_base_is_named_as_peft_loads_it(pair, tmp_path):
    for name in "bf":
        (tmp_path / name).mkdir()
    base, fine = (models.write_folder(tmp_path / name, {}, each) for name, each in zip("bf", pair, strict=True))
    safeload.extract(base, fine, tmp_path / "a", rank=1)
    assert config_of(tmp_path / "a")["base_model_name_or_path"] == str(base)
    safeload.extract(*pair, tmp_path / "c", rank=1)
    assert config_of(tmp_path / "c")["base_model_name_or_path"] is None


# ---- results and the command ----


def test_the_report(pair, tmp_path):
    report = safeload.extract(*pair, tmp_path / "a", rank=3)
    title, kept, left_out, _, head, row = str(report).splitlines()
    assert title == f"{tmp_path / 'a'}: LoRA of rank 3 for 1 matrix, {report.nbytes / 1024:.3g} KiB"
    assert (kept, left_out) == (
        "kept of the change of these matrices: 100 %",
        f"not in the adapter: is a norm: 1 tensor, {NORM}",
    )
    assert head.split() == ["tensor", "shape", "rank", "change", "error"]
    assert row.split() == [Q, "[48,", "40]", "3", f"{report.changes[Q]:.4g}", f"{report.errors[Q]:.4g}"]
    rows = report.rows()
    assert [(row["name"], row["status"], row["rank"], row["reason"]) for row in rows] == [
        (Q, "factored", 3, ""),
        (NORM, "left out", 0, "is a norm"),
    ]
    assert json.loads(json.dumps(report.to_dict()))["left_out"] == {NORM: "is a norm"}
    assert "is a norm" in report._repr_html_()
    assert report.nbytes == (tmp_path / "a" / "adapter_model.safetensors").stat().st_size
    assert os.path.basename(report.destination) == "a"


def test_progress_ends_at_the_total(pair, tmp_path):
    seen = []
    safeload.extract(*pair, tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for model in pair for value in model.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_command(pair, tmp_path, capsys):
    for name, tensors in zip(("base", "fine"), pair, strict=True):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    both = tmp_path / "base.safetensors", tmp_path / "fine.safetensors"
    status, out, err = run(capsys, "extract", *both, "-o", tmp_path / "a", "--rank", 2)
    assert status == 0
    assert out.startswith(f"{tmp_path / 'a'}: LoRA of rank 2 for 1 matrix, ")
    assert f"{Q}  [48, 40]" in out
    assert "--with-rest stores norms, biases and embeddings whole" in err
    status, out, err = run(capsys, "extract", *both, "-o", tmp_path / "a")
    assert (status, out) == (1, "")
    assert "already exists; pass --overwrite to replace it" in err
    options = ("--with-rest", "--dtype", "bfloat16", "--overwrite", "--drop", K, "--json")
    status, out, err = run(capsys, "extract", *both, "-o", tmp_path / "a", *options)
    assert (status, err) == (0, "")
    assert json.loads(out)["whole"] == {NORM: "is a norm"}
    status, _, err = run(capsys, "extract", both[0], both[0], "-o", tmp_path / "b")
    assert status == 1
    assert "there is no change to extract" in err
    assert run(capsys, "extract", *both)[0] == 2
    assert run(capsys, "extract", *both, "-o", tmp_path / "b", "--rank", 0)[0] == 2
