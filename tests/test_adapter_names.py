"""Names in adapters: wrappers of modules, names of the adapter itself, and methods and tools that are not merged."""

import json

import numpy as np
import pytest

import safeload
from safeload.numpy import save_file

A, B = np.ones((1, 4), np.float32), np.ones((4, 1), np.float32)
Q = "model.layers.0.q_proj"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a base and an adapter, and merges them."""
    monkeypatch.chdir(tmp_path)

    def write(names, base=(f"{Q}.weight",), peft="LORA", tensors=(), base_tensors=(), **config):
        matrices = {name: np.zeros((4, 4), np.float32) for name in base}
        save_file({**matrices, **dict(base_tensors)}, "base.safetensors")
        (tmp_path / "adapter").mkdir()
        factors = {name: A if "_A" in name.replace("_a", "_A") else B for name in names}
        save_file({**factors, **dict(tensors)}, "adapter/adapter_model.safetensors")
        settings = {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], **config}
        text = json.dumps(settings if peft is None else {"peft_type": peft, **settings})
        (tmp_path / "adapter/adapter_config.json").write_text(text)
        return safeload.load("base.safetensors", adapters="adapter")

    return write


SPELLINGS = {
    "PEFT": "base_model.model.{q}.lora_{x}.weight",
    "default": "base_model.model.{q}.lora_{x}.default.weight",
    "another name": "base_model.model.{q}.lora_{x}.my-task_2.weight",
    "compiled": "_orig_mod.base_model.model.{q}.lora_{x}.weight",
    "compiled inside": "base_model.model._orig_mod.{q}.lora_{x}.weight",
    "DataParallel": "module.base_model.model.{q}.lora_{x}.default.weight",
    "FSDP": "_fsdp_wrapped_module.base_model.model.model._fsdp_wrapped_module.layers.0.q_proj.lora_{x}.default.weight",
    "checkpointed": "base_model.model.model.layers.0._checkpoint_wrapped_module.q_proj.lora_{x}.weight",
    "compiled layer": "base_model.model.model.layers.0._orig_mod.q_proj.lora_{x}.weight",
    "compiled factor": "base_model.model.{q}.lora_{x}._orig_mod.weight",
    "nested": "module._orig_mod.base_model.model.module.{q}._orig_mod.lora_{x}.default.weight",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("base", [f"{Q}.weight", f"_orig_mod.{Q}.weight", "model.layers.0._orig_mod.q_proj.weight"])
def test_wrappers_are_left_out(spelling, base, write):
    merged = write([SPELLINGS[spelling].format(q=Q, x=x) for x in "AB"], [base])
    assert (merged[base] == 1).all()


def test_a_module_that_is_called_module_is_found(write):
    names = [f"base_model.model.net.module.q_proj.lora_{x}.weight" for x in "AB"]
    assert (write(names, ["net.module.q_proj.weight", "other.weight"])["net.module.q_proj.weight"] == 1).all()


def test_embeddings_magnitudes_and_saved_modules_have_the_name_of_the_adapter(write):
    names = [f"base_model.model.{Q}.lora_{x}.default.weight" for x in "AB"]
    vector = {f"base_model.model.{Q}.lora_magnitude_vector.default.weight": np.full(4, 2, np.float32)}
    saved = {"base_model.model.score.modules_to_save.default.weight": np.full((4, 4), 3, np.float32)}
    embedding = {
        "base_model.model.embed.lora_embedding_A.default": A,
        "base_model.model.embed.lora_embedding_B.default": B,
    }
    base = [f"{Q}.weight", "score.weight", "embed.weight"]
    merged = write(names, base, tensors={**saved, **embedding}, modules_to_save=["score"])
    assert {name: float(x[0, 0]) for name, x in merged.items()} == {base[0]: 1, base[1]: 3, base[2]: 1}
    assert vector  # DoRA has its own tests of values


def test_magnitudes_have_the_name_of_the_adapter(write):
    names = [f"base_model.model.{Q}.lora_{x}.default.weight" for x in "AB"]
    vector = {f"base_model.model.{Q}.lora_magnitude_vector.default.weight": np.full(4, 2, np.float32)}
    assert (write(names, tensors=vector, use_dora=True)[f"{Q}.weight"] == 1).all()  # 2 * 1 / |(1, 1, 1, 1)|


def test_biases_reach_a_base_with_wrappers(write):
    bias = {f"base_model.model.{Q}.lora_B.default.bias": np.full(4, 2, np.float32)}
    names = [f"base_model.model.{Q}.lora_{x}.default.weight" for x in "AB"]
    base = {f"_orig_mod.{Q}.bias": np.zeros(4, np.float32)}
    merged = write(names, [f"_orig_mod.{Q}.weight"], tensors=bias, base_tensors=base, lora_bias=True)
    assert (merged[f"_orig_mod.{Q}.bias"] == 2).all()


def test_two_adapters_in_one_file_are_refused(write):
    names = [
        f"base_model.model.{module}.lora_{x}.{own}.weight" for module, own in (("a", "one"), ("b", "two")) for x in "AB"
    ]
    with pytest.raises(safeload.UnsupportedError, match="several adapters in one file: 'one', 'two'"):
        write(names, ["a.weight", "b.weight"])


def test_names_that_collide_without_wrappers_are_refused(write):
    names = [f"base_model.model.{wrapper}{Q}.lora_{x}.weight" for wrapper in ("", "_orig_mod.") for x in "AB"]
    with pytest.raises(safeload.FormatError, match="are the same part of one module"):
        write(names)


def test_base_names_that_collide_without_wrappers_are_refused(write):
    names = [f"base_model.model.{Q}.lora_{x}.weight" for x in "AB"]
    with pytest.raises(safeload.FormatError, match="have one name without their wrappers"):
        write(names, [f"_orig_mod.{Q}.weight", f"module.{Q}.weight"])


def test_mlx_names_lose_wrappers(write):
    tensors = {f"module.{Q}.lora_a": B, f"module.{Q}.lora_b": A}
    merged = write([], peft=None, tensors=tensors, lora_parameters={"rank": 1, "scale": 1.0})
    assert (merged[f"{Q}.weight"] == 1).all()


# ---- methods and tools that are not merged ----

KINDS = {
    "an IA3 adapter": ["x.ia3_l"],
    "a VeRA adapter": ["x.vera_lambda_b"],
    "an OFT adapter": ["lora_unet_x.oft_blocks", "x.oft_R.weight"],
    "a BOFT adapter": ["x.boft_R"],
    "an AdaLoRA adapter": ["x.lora_E"],
    "a LoRA adapter of llama.cpp (GGUF)": ["blk.0.attn_q.weight.lora_a", "token_embd.weight.lora_b"],
}
SAMPLES = [(kind, name) for kind, names in KINDS.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), SAMPLES)
def test_what_is_not_merged_is_named(kind, name, tmp_path):
    save_file({"x.weight": np.zeros((4, 4), np.float32)}, tmp_path / "base.safetensors")
    save_file({name: A}, tmp_path / "a.safetensors")
    with pytest.raises(safeload.UnsupportedError) as caught:
        safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "a.safetensors")
    assert kind in str(caught.value)
    assert repr(name) in str(caught.value)
    (note,) = safeload.info(tmp_path / "a.safetensors").notes
    advice = "pass it as adapters= with its base" if "GGUF" in kind else "safeload does not merge it"
    assert note == f"{kind}: changes to the weights of a base model, not a complete model; {advice}"


# Names of factors of diffusion models.
DIFFUSION = {
    "diffusers": [
        ("transformer.transformer_blocks.0.attn.to_q", ".lora_A.weight", ".lora_B.weight"),
        ("unet.down_blocks.0.attn.to_q", ".lora.down.weight", ".lora.up.weight"),
        ("text_encoder.text_model.q_proj", ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
        ("unet.down_blocks.0.attn1.processor.to_q", "_lora.down.weight", "_lora.up.weight"),
    ],
    "ComfyUI": [("diffusion_model.double_blocks.0.img_attn.qkv", ".lora_A.weight", ".lora_B.weight")],
    "kohya": [
        ("lora_unet_down_blocks_0", ".lora_down.weight", ".lora_up.weight"),
        ("lora_te1_text_model", ".lora_down.weight", ".lora_up.weight"),
    ],
    "kohya or ComfyUI": [("double_blocks.0.img_attn.qkv", ".lora_down.weight", ".lora_up.weight")],
    "XLabs": [("double_blocks.0.processor", ".qkv_lora1.down.weight", ".qkv_lora1.up.weight")],
}


@pytest.mark.parametrize(("tool", "names"), [(tool, names) for tool, forms in DIFFUSION.items() for names in forms])
def test_adapters_of_diffusion_models_need_such_a_base(tool, names, tmp_path):
    save_file({"x.weight": np.zeros((4, 4), np.float32)}, tmp_path / "base.safetensors")
    module, *ends = names
    save_file(dict(zip([module + end for end in ends], (A, B), strict=True)), tmp_path / "a.safetensors")
    with pytest.raises(safeload.UnsupportedError) as caught:
        safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "a.safetensors")
    assert f"belongs to an adapter of {tool}, which needs a diffusion model" in str(caught.value)
    (note,) = safeload.info(tmp_path / "a.safetensors").notes
    assert note.startswith(f"a LoRA adapter of {tool}: changes to the weights of a base model")
    assert safeload.info(tmp_path / "a.safetensors").to_dict()["adapter"]["writer"] == tool


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("a LoHa", "base_model.model.x.hada_w2_b"),
        ("a LoKr", "base_model.model.x.lokr_w2_a"),
        ("an IA3", "base_model.model.x.ia3_l"),
        ("a VeRA", "base_model.vera_A"),
        ("a VeRA", "base_model.model.x.vera_lambda_b"),
        ("an OFT", "base_model.model.x.oft_R.weight"),
        ("a BOFT", "base_model.model.x.boft_s"),
        ("an AdaLoRA", "base_model.model.x.lora_E"),
    ],
)
def test_what_is_merged_needs_its_configuration(kind, name, tmp_path):
    save_file({"x.weight": np.zeros((4, 4), np.float32)}, tmp_path / "base.safetensors")
    save_file({name: A}, tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        safeload.load(tmp_path / "base.safetensors", adapters=tmp_path / "a.safetensors")
    (note,) = safeload.info(tmp_path / "a.safetensors").notes
    assert note.startswith(f"{kind} adapter (PEFT): ")
    assert note.endswith("pass it as adapters= with its base")


# The methods of PEFT 0.21.2 that are not merged, and writings of methods that PEFT does not know.
METHODS = (
    "ADAMSS ADAPTION_PROMPT BEFT C3A CARTRIDGE CPT DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA LILY LN_TUNING "
    "MISS MULTITASK_PROMPT_TUNING OSF PEANUT POLY PREFIX_TUNING PROMPT_TUNING PSOFT PVERA P_TUNING RANDLORA ROAD "
    "SHADOW SHIRA SUPERTUNING TINYLORA UNILORA VBLORA WAVEFT XLORA lora QLORA"
)


@pytest.mark.parametrize("method", METHODS.split())
def test_methods_of_peft_are_refused_by_name(method, write, tmp_path):
    """Even if all their tensors have the names of LoRA."""
    names = [f"base_model.model.{Q}.lora_{x}.weight" for x in "AB"]
    with pytest.raises(
        safeload.UnsupportedError, match=f"\"peft_type\" is '{method}'. safeload merges adapters of the kinds LoRA,"
    ):
        write(names, peft=method)
    found = safeload.info(tmp_path / "adapter").to_dict()["adapter"]
    assert (found["merged"], method in found["why"]) == (False, True)


@pytest.mark.parametrize("method", ["RANDLORA", "TINYLORA"])
def test_the_setting_names_a_method_whose_tensors_all_layers_share(method, write):
    with pytest.raises(safeload.UnsupportedError, match=f"\"peft_type\" is '{method}'. safeload merges adapters"):
        write([f"base_model.{method.lower()}_A"], peft=method)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.weight",
        "backbone.w",
        "module.weight",
        "model.lora_rank",
        "encoder.alpha",
        "base_model.w",
        "road.w",
    ],
)
def test_other_checkpoints_get_no_note(name, tmp_path):
    save_file({name: A}, tmp_path / "a.safetensors")
    assert safeload.open(tmp_path / "a.safetensors").notes == []
