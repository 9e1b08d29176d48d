"""LoRA adapters of llama.cpp: merged, and written with the bytes of llama.cpp's own converter."""

import io
import json

import numpy as np
import pytest
from builders import adapters, llama_models
from builders.adapters import LORA, assert_merged, assert_same
from builders.commands import run

import safeload
from safeload import gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MODELS = llama_models.listed()
DIGESTS = llama_models.listed("adapters.json")
OPTIONS = {"f32": {"dtype": "float32"}, "f16": {"dtype": "float16"}, "bf16": {"dtype": "bfloat16"}}
# Files of the converter that differ: it turns factors of Conv1D as if they were those of Linear, does not permute q and
# k of Granite's hybrids, names the architecture of another variant, or has experts before the layers after them.
DIFFERENT = ("gpt2", "gpt2_untied", "granite_hybrid", "granite_hybrid_moe", "granite_hybrid_dense", "nemotron_h")
DIFFERENT += ("ernie4_5_moe",)
WRITTEN = [(name, outtype) for name, digests in DIGESTS.items() for outtype in digests if name not in DIFFERENT]
# Rows permuted, no change, joined q, k and v, stacked experts, [in, out], gate and up joined.
LAYOUTS = ("llama3", "gemma2", "qwen2", "mixtral", "qwen3_moe", "gpt2", "phi3", "bloom")
Q, A = "blk.0.attn_q.weight", "blk.0.attn_q.weight.lora_a"


@pytest.fixture
def model(tmp_path):
    return adapters.models_in(tmp_path, "my-lora")


def changed(entry, *, without=(), more=None, **config):
    """A model with another config and other tensors."""
    tensors = {name: shape for name, shape in entry["tensors"].items() if name not in without}
    return {**entry, "config": {**entry["config"], **config}, "tensors": {**tensors, **(more or {})}}


UNTIED = changed(MODELS["qwen2"], more={"lm_head.weight": [408, 64]}, tie_word_embeddings=False)


def rewritten(path, tensors=None, **metadata):
    """A GGUF file with other tensors and keys; dots in keys are double underscores."""
    with safeload.open(path) as file:
        keys = {**file.metadata, **{key.replace("__", "."): value for key, value in metadata.items()}}
        own = {**file.load(), **(tensors or {})}
    own = {name: value for name, value in own.items() if value is not None}
    gguf.save_file(own, path, {k: v for k, v in keys.items() if v is not None}, overwrite=True)
    return path


def written(base, adapter, **options):
    path = adapter.parent / "adapter.gguf"
    safeload.convert(adapter, path, base=base, overwrite=True, **options)
    return path


# ---- written ----


@pytest.mark.parametrize(("name", "outtype"), WRITTEN)
def test_files_have_the_bytes_of_the_converter(name, outtype, model):
    base, adapter = model(name)
    path = written(base, adapter, **OPTIONS.get(outtype, {"quantize": outtype}))
    assert llama_models.digest(path.read_bytes()) == DIGESTS[name][outtype]


def test_factors_keep_their_dtype(model):
    base, adapter = model("llama3", dtype=np.float16)
    with safeload.open(written(base, adapter)) as file:
        assert {tensor.dtype for tensor in file.tensors.values()} == {"F16"}
        assert (file.metadata["general.type"], file.metadata["adapter.lora.alpha"]) == ("adapter", 8)


def test_the_same_file_for_a_base_in_gguf(model, tmp_path):
    base, adapter = model("llama3")
    safeload.convert(base, tmp_path / "base.gguf")
    expected = written(base, adapter).read_bytes()
    assert written(tmp_path / "base.gguf", adapter).read_bytes() == expected


def test_into_a_file_object(model):
    base, adapter = model("llama3")
    file = io.BytesIO()
    with safeload.open(base) as opened:
        safeload.convert(adapter, file, base=opened, format="gguf")
    assert file.getvalue() == written(base, adapter).read_bytes()


def test_from_gguf_in_another_dtype(model):
    base, adapter = model("llama3")
    expected = written(base, adapter, dtype="float16").read_bytes()
    path = written(base, adapter)
    result = path.with_name("f16.gguf")
    safeload.convert(path, result, base=base, dtype="float16")
    assert result.read_bytes() == expected


@pytest.mark.parametrize("of_gguf", [False, True])
def test_other_scales_than_that_of_the_file(model, tmp_path, of_gguf):
    """rsLoRA has a scale of its own, and patterns one for some modules: a file has one alpha for all."""
    config = {"use_rslora": True, "alpha_pattern": {"q_proj": 3, "layers.1.self_attn.k_proj": 20}}
    base, adapter = model("llama3", **config)
    path = written(base, adapter)
    expected = safeload.load(base, adapters=adapter, dtype="float32")
    if of_gguf:
        safeload.convert(base, tmp_path / "base.gguf", dtype="float32")
        safeload.convert(base, tmp_path / "merged.gguf", adapters=adapter, dtype="float32")
        base, expected = tmp_path / "base.gguf", safeload.load(tmp_path / "merged.gguf")
    for name, value in safeload.load(base, adapters=path, dtype="float32").items():
        assert_merged(value, expected[name], 8)


# ---- merged ----


@pytest.mark.parametrize("name", LAYOUTS)
def test_merged_as_from_peft(name, model, tmp_path):
    """Into the folder of the model, and into its GGUF file; there from PEFT's folder too."""
    base, adapter = model(name)
    path = written(base, adapter)
    expected = safeload.load(base, adapters=(adapter, 0.7), dtype="float32")
    plain = safeload.load(base, dtype="float32")
    assert sum(not np.array_equal(value, plain[key]) for key, value in expected.items()) > 3
    assert_same(safeload.load(base, adapters=(path, 0.7), dtype="float32"), expected)
    safeload.convert(base, tmp_path / "base.gguf", dtype="float32")
    safeload.convert(base, tmp_path / "merged.gguf", adapters=(adapter, 0.7), dtype="float32")
    expected = safeload.load(tmp_path / "merged.gguf")
    for source in (path, adapter):
        assert_same(safeload.load(tmp_path / "base.gguf", adapters=(source, 0.7)), expected)


def test_a_file_of_the_converter(tmp_path):
    """Its blocks are those of q8_0, where rows are long enough."""
    base = llama_models.write_folder(tmp_path / "llama3", MODELS["llama3"])
    safeload.convert(base, tmp_path / "base.gguf", dtype="float32")
    path = LORA / "gguf" / "llama3.gguf"
    before, factors = safeload.load(tmp_path / "base.gguf"), safeload.load(path, dtype="float32")
    merged = safeload.load(tmp_path / "base.gguf", adapters=path)
    assert len(factors) == 2 * sum(not np.array_equal(before[name], merged[name]) for name in before)
    for name in before:
        if f"{name}.lora_a" in factors:
            change = 2 * (factors[f"{name}.lora_b"].astype(np.float64) @ factors[f"{name}.lora_a"])
            assert_merged(merged[name], before[name] + change, 8)


def test_a_quantized_base(model, tmp_path):
    base, adapter = model("llama3")
    path = written(base, adapter)
    safeload.convert(base, tmp_path / "q8.gguf", quantize="q8_0")
    with pytest.raises(safeload.UnsupportedError, match="is packed, and an adapter changes it: pass dtype="):
        safeload.load(tmp_path / "q8.gguf", adapters=path)
    merged = safeload.load(tmp_path / "q8.gguf", adapters=path, dtype="float32")
    assert_same(safeload.load(tmp_path / "q8.gguf", adapters=adapter, dtype="float32"), merged)
    safeload.convert(tmp_path / "q8.gguf", tmp_path / "again.gguf", adapters=path, quantize="q8_0")
    assert safeload.load(tmp_path / "again.gguf")[Q].scheme == "q8_0"


def test_the_scale_of_a_file_without_alpha_is_1(model):
    base, adapter = model("llama3", lora_alpha=4)  # alpha / r is 1
    path = rewritten(written(base, adapter), adapter__lora__alpha=None)
    expected = safeload.load(base, adapters=adapter)
    assert_same(safeload.load(base, adapters=path), expected)
    assert_same(safeload.load(base, adapters=rewritten(path, adapter__lora__alpha=np.float32(0))), expected)


@pytest.mark.parametrize("only", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_embedding_and_head(only, model, tmp_path):
    base, adapter = model("qwen2", entry=UNTIED, only=only)
    path = written(base, adapter)
    expected = safeload.load(base, adapters=adapter)
    assert_same(safeload.load(base, adapters=path), expected)
    safeload.convert(base, tmp_path / "base.gguf")
    safeload.convert(base, tmp_path / "merged.gguf", adapters=adapter)
    assert_same(safeload.load(tmp_path / "base.gguf", adapters=path), safeload.load(tmp_path / "merged.gguf"))


@pytest.mark.parametrize("of_gguf", [False, True])
def test_stacks_of_experts_in_memory(of_gguf, model, tmp_path):
    """transformers 5 has the experts of a layer in one parameter, files have them one by one."""
    entry = MODELS["qwen3_moe"]
    base, _ = model("qwen3_moe")
    config = entry["config"]
    experts, width, inner = config["num_local_experts"], config["hidden_size"], config["moe_intermediate_size"]
    tensors = {}
    for end, rows, columns in (("base_layer.", 2 * inner, width), ("", width, inner)):
        module = f"model.layers.0.mlp.experts.{end}"
        a, b = adapters.factors(module, rows, columns, 2 * experts)
        tensors |= {f"{module}lora_A.weight": a, f"{module}lora_B.weight": b}
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = adapters.write(tmp_path / "stacks", tensors, target_parameters=targets)
    path = written(base, adapter)
    expected = safeload.load(base, adapters=adapter)
    if of_gguf:
        safeload.convert(base, tmp_path / "base.gguf")
        safeload.convert(base, tmp_path / "merged.gguf", adapters=adapter)
        base, expected = tmp_path / "base.gguf", safeload.load(tmp_path / "merged.gguf")
        assert_same(safeload.load(base, adapters=adapter), expected)
    assert_same(safeload.load(base, adapters=path), expected)


def test_several_of_several_writers(model):
    base, adapter = model("llama3")
    expected = safeload.load(base, adapters=[(adapter, 0.5), adapter], dtype="float32")
    assert_same(safeload.load(base, adapters=[(written(base, adapter), 0.5), adapter], dtype="float32"), expected)


# ---- commands ----


def test_commands(model, tmp_path, capsys):
    base, adapter = model("llama3")
    path = tmp_path / "adapter.gguf"
    assert run(capsys, "convert", adapter, path, "--base", base)[0] == 0
    status, out, _ = run(capsys, "info", path, "--base", base)
    assert status == 0
    assert "LoRA: r 4, alpha 8" in out
    assert "changes 14 modules: 2 ffn_down, 2 ffn_gate, 2 ffn_up" in out
    assert f"fits {base}: changes 14 of its" in out
    assert safeload.info(path).adapter.writer == "llama.cpp"
    assert run(capsys, "check", path, "--base", base)[0] == 0
    assert run(capsys, "convert", base, tmp_path / "merged", "--adapter", f"{path}=0.5")[0] == 0
    assert_same(safeload.load(tmp_path / "merged"), safeload.load(base, adapters=(adapter, 0.5)))


def test_what_does_not_fit_is_listed(model):
    base, adapter = model("llama3")
    path = written(base, adapter)
    a = safeload.load(path)[A]
    rewritten(path, {A: None, A.replace("attn_q", "attn_z"): a, A.replace("_a", "_b"): None})
    b = np.ones((64, 4), np.float32)
    rewritten(path, {A.replace("attn_q", "attn_z").replace("lora_a", "lora_b"): b})
    rewritten(path, {"blk.1.ffn_down.weight.lora_b": np.ones((65, 4), np.float32)})
    problems = safeload.info(path, base=base).adapter.fitting.problems
    assert len(problems) == 2
    assert "similar names: blk.0.attn_v.weight" in problems[1] + problems[0]
    codes = [error.code for error in safeload.check(path, base=base).errors]
    assert codes == ["adapter.base"] * 2


# ---- refusals ----


def refused(match, base, path, error=safeload.SafeloadError):
    with pytest.raises(error, match=match):
        safeload.load(base, adapters=path)


@pytest.mark.parametrize(
    ("match", "tensors", "metadata"),
    [
        ("general.type must be 'adapter' for llama.cpp, got 'model'", {}, {"general__type": "model"}),
        ("adapter.type must be 'lora' for llama.cpp, got 'control'", {}, {"adapter__type": "control"}),
        (
            "activates the adapter after some tokens only",
            {},
            {"adapter__alora__invocation_tokens": np.array([1], np.uint32)},
        ),
        ("is for models of architecture 'qwen2', but .* is llama", {}, {"general__architecture": "qwen2"}),
        ('"adapter.lora.alpha" must be a number', {}, {"adapter__lora__alpha": "8"}),
        ("has no counterpart: A and B belong together", {A: None}, {}),
        ("is no factor of LoRA, and llama.cpp does not read it", {"blk.0.attn_norm.weight": np.ones(64)}, {}),
        ("these are no factors of a matrix", {A: np.ones((3, 64), np.float32)}, {}),
        ("these are no factors of a matrix", {f"token_embd.weight.lora_{x}": np.ones(64) for x in "ab"}, {}),
        ("is I8: it must be floating", {A: np.ones((4, 64), np.int8)}, {}),
        (r"changes a tensor of \[64, 63\], but .* is \[64, 64\]", {A: np.ones((4, 63), np.float32)}, {}),
        ("blk.9.x.weight', which .* does not have", {f"blk.9.x.weight.lora_{x}": np.ones((4, 4)) for x in "ab"}, {}),
    ],
    ids=[
        "type",
        "method",
        "tokens",
        "architecture",
        "alpha",
        "half",
        "norm",
        "ranks",
        "vectors",
        "integers",
        "shape",
        "unknown",
    ],
)
@pytest.mark.parametrize("of_gguf", [False, True])
def test_files_that_do_not_fit(match, tensors, metadata, of_gguf, model, tmp_path):
    base, adapter = model("llama3")
    path = rewritten(written(base, adapter), tensors, **metadata)
    if of_gguf:
        safeload.convert(base, tmp_path / "base.gguf")
        base = tmp_path / "base.gguf"
    refused(match, base, path)


def test_bases_without_names_in_gguf(model, tmp_path):
    base, adapter = model("llama3")
    path = written(base, adapter)
    refused("has no config.json that names a class", base / "model.safetensors", path, safeload.UnsupportedError)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["OtherModel"]}))
    refused("is 'OtherModel', which llama.cpp lacks", base, path, safeload.UnsupportedError)


def test_an_embedding_that_is_the_head_too(model, tmp_path):
    """llama.cpp ends with an assertion on such an adapter."""
    base, adapter = model("qwen2", entry=UNTIED, only=("embed_tokens",))
    path = written(base, adapter)
    tied = llama_models.write_folder(tmp_path / "tied", MODELS["qwen2"])
    safeload.convert(tied, tmp_path / "tied.gguf")
    refused("changes token_embd.weight, which is the head", tmp_path / "tied.gguf", path, safeload.UnsupportedError)
    merged = safeload.load(tied, adapters=path)
    assert set(merged) - set(safeload.load(tied)) == {"lm_head.weight"}
    with pytest.raises(safeload.UnsupportedError, match=r"changes token_embd\.weight, which is the head"):
        safeload.convert(path, tmp_path / "again.gguf", base=tied)


PEFT = {
    "embedding of a tied head": ("only one of 'lm_head.weight' and 'model.embed_tokens.weight'", ("embed_tokens",), {}),
    "alpha 0": ("lora_alpha is 0, which llama.cpp takes for a scale of 1", None, {"lora_alpha": 0}),
    "invocation tokens": ("is a variant of LoRA", None, {"alora_invocation_tokens": [1]}),
    "other method": ("safeload merges adapters of the kinds", None, {"peft_type": "PROMPT_TUNING"}),
}


def test_other_kinds_have_no_form_for_llama_cpp(model, tmp_path):
    base, adapter = model("qwen2")
    name = "model.layers.0.self_attn.q_proj"
    rows = safeload.open(base).tensors[f"{name}.weight"].shape[0]
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "feedforward_modules": []}))
    scale = {f"base_model.model.{name}.ia3_l": np.ones((rows, 1), np.float32)}
    safeload.save(scale, adapter / "adapter_model.safetensors", overwrite=True)
    with pytest.raises(safeload.UnsupportedError, match="by another kind than LoRA"):
        safeload.convert(adapter, tmp_path / "a.gguf", base=base)


@pytest.mark.parametrize("case", PEFT)
def test_what_llama_cpp_has_no_form_for(case, model, tmp_path):
    match, only, config = PEFT[case]
    base, adapter = model("qwen2", only=only, **config)
    with pytest.raises(safeload.UnsupportedError, match=match):
        written(base, adapter)
    assert not (tmp_path / "adapter.gguf").exists()


PARTS = {
    "norms": ("has the norms of .* \\(DoRA\\)", "self_attn.q_proj.lora_magnitude_vector", (64,), {"use_dora": True}),
    "copy": ("replaces .* \\(modules_to_save\\)", "model.norm.weight", (64,), {"modules_to_save": ["norm"]}),
    "bias": ("is added to .* \\(lora_bias\\)", "self_attn.q_proj.lora_B.bias", (64,), {"lora_bias": True}),
    "tokens": (
        "replaces rows of .* \\(trained tokens\\)",
        "model.embed_tokens.token_adapter.trainable_tokens_delta",
        (2, 64),
        {"trainable_token_indices": [1, 2]},
    ),
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("of_gguf", [False, True])
def test_parts_of_adapters_that_are_no_factors(case, of_gguf, model, tmp_path):
    """Neither written, nor merged into a GGUF base."""
    match, name, shape, config = PARTS[case]
    name = name if name.startswith("model") else f"model.layers.0.{name}"
    base, _ = model("qwen2")
    a, b = adapters.factors("q", 64, 64, 2)
    q = "model.layers.0.self_attn.q_proj"
    tensors = {f"{q}.lora_A.weight": a, f"{q}.lora_B.weight": b, name: np.ones(shape, np.float32)}
    adapter = adapters.write(tmp_path / "other", tensors, **config)
    if of_gguf:
        safeload.convert(base, tmp_path / "base.gguf")
        refused(match, tmp_path / "base.gguf", adapter, safeload.UnsupportedError)
    else:
        with pytest.raises(safeload.UnsupportedError, match=match):
            written(base, adapter)


def test_experts_of_several_ranks(model, tmp_path):
    base, _ = model("mixtral")
    tensors = {}
    for expert, rank in ((0, 2), (1, 3)):
        module = f"model.layers.0.block_sparse_moe.experts.{expert}.w1"
        a, b = adapters.factors(module, 96, 64, rank)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    adapter = adapters.write(tmp_path / "other", tensors, rank_pattern={"experts.1.w1": 3})
    with pytest.raises(safeload.UnsupportedError, match="has another rank than other experts"):
        written(base, adapter)


def test_some_experts(model, tmp_path):
    """The others do not change."""
    base, _ = model("mixtral")
    module = "model.layers.0.block_sparse_moe.experts.1.w1"
    a, b = adapters.factors(module, 96, 64, 2)
    adapter = adapters.write(tmp_path / "one", {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})
    assert_same(safeload.load(base, adapters=written(base, adapter)), safeload.load(base, adapters=adapter))


def test_heads_that_llama_cpp_divides(model):
    base, adapter = model("deepseek_v2", only=("kv_b_proj",))
    with pytest.raises(safeload.UnsupportedError, match="is divided by heads in the other form"):
        written(base, adapter)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ('must end with ".gguf" or ".safetensors"', {"dst": "adapter.bin"}),
        ('needs layout="kohya" or layout="diffusers", got None', {"dst": "adapter.safetensors"}),
        ('quantize must be "q8_0" for an adapter', {"quantize": "q4_k"}),
        ("dtype must be float32, float16 or bfloat16 for an adapter", {"dtype": "float64"}),
        ("adapters= applies to models", {"adapters": "other"}),
        ("keep= applies to models", {"keep": ["*"], "quantize": "q8_0"}),
    ],
    ids=["suffix", "names", "scheme", "dtype", "adapters", "keep"],
)
def test_options_of_models(match, options, model, tmp_path):
    base, adapter = model("llama3")
    options = dict(options)
    path = tmp_path / options.pop("dst", "adapter.gguf")
    with pytest.raises(ValueError, match=match):
        safeload.convert(adapter, path, base=base, **options)
    assert not path.exists()


def test_not_in_pieces(model, tmp_path):
    """A piece has too few tensors to find the rows of the others."""
    base, adapter = model("llama3")
    path = written(base, adapter)
    with pytest.raises(safeload.UnsupportedError, match="is not merged in pieces"):
        safeload.convert(base, tmp_path / "merged", adapters=path, resume=True)
