"""LoRA adapters of diffusion models merged while loading, against what Diffusers fuses (tests/data/lora_diffusion)."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.commands import run
from builders.paths import DATA

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

FOLDER = DATA / "lora_diffusion"
CASES = sorted(path.stem for path in (FOLDER / "merged").iterdir())


def in_single(tensors, model):
    """Tensors of Diffusers as those of a single file, as far as all of their parts are there."""
    places = json.loads((FOLDER / f"{model}_single.json").read_text())
    single = {}
    for name, runs in places.items():
        pieces = [[runs, None, None]] if isinstance(runs, str) else runs
        if all(piece[0] in tensors for piece in pieces):
            single[name] = np.concatenate([tensors[stored][first:last] for stored, first, last in pieces])
    return single


def layouts(case, tmp_path):
    """Yield each layout of a base with a function that brings tensors of Diffusers into it."""
    model = case.partition("_")[0]
    path = FOLDER / f"{model}_base.safetensors"
    yield path, dict
    save_file(in_single(safeload.load(path), model), tmp_path / "single.safetensors")
    yield tmp_path / "single.safetensors", lambda tensors: in_single(tensors, model)


@pytest.mark.parametrize("case", CASES)
def test_as_diffusers_fuses_in_both_layouts(case, tmp_path):
    base, fused = safeload.load(FOLDER / f"{case.partition('_')[0]}_base.safetensors", dtype="float32"), {}
    fused = {**base, **safeload.load(FOLDER / "merged" / f"{case}.safetensors")}
    for path, layout in layouts(case, tmp_path):
        merged = safeload.load(path, adapters=FOLDER / f"{case}.safetensors", dtype="float32")
        before, expected = layout(base), layout(fused)
        assert merged.keys() == expected.keys()
        for name, value in expected.items():
            same = np.array_equal(value, before[name])
            assert np.array_equal(merged[name], before[name]) == same, name
            bound = (
                0 if same else 8 * np.finfo(np.float32).eps * (np.abs(value).max() + np.abs(before[name]).max() + 64)
            )
            assert np.abs(merged[name] - value).max() <= bound, name


# ---- by name ----

FLUX = FOLDER / "flux_base.safetensors"
IMG = "double_blocks.0.img_attn.proj"


def factors(module, *, down=".lora_down.weight", up=".lora_up.weight", rank=2, rows=8, columns=8, **more):
    rng = np.random.default_rng(rank)
    tensors = {
        f"{module}{down}": rng.standard_normal((rank, columns)),
        f"{module}{up}": rng.standard_normal((rows, rank)),
    }
    return {name: value.astype(np.float32) for name, value in tensors.items()} | more


def saved(tmp_path, tensors, metadata=None):
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    return tmp_path / "a.safetensors"


def change_of(name, adapter, base=FLUX):
    """The change of a tensor of the base."""
    return safeload.load(base, adapters=adapter)[name].astype(np.float64) - safeload.load(base)[name].astype(np.float64)


SPELLINGS = {
    "kohya": ("lora_unet_double_blocks_0_img_attn_proj", ".lora_down.weight", ".lora_up.weight"),
    "kohya, diffusers' names": ("lora_unet_transformer_blocks_0_attn_to_out_0", ".lora_down.weight", ".lora_up.weight"),
    "OneTrainer": ("lora_transformer_transformer_blocks_0_attn_to_out_0", ".lora_down.weight", ".lora_up.weight"),
    "ComfyUI": (f"diffusion_model.{IMG}", ".lora_A.weight", ".lora_B.weight"),
    "ComfyUI, kohya's ends": (f"diffusion_model.{IMG}", ".lora_down.weight", ".lora_up.weight"),
    "no prefix": (IMG, ".lora_down.weight", ".lora_up.weight"),
    "no prefix, diffusers' ends": (IMG, ".lora_A.weight", ".lora_B.weight"),
    "no prefix, diffusers": ("transformer_blocks.0.attn.to_out.0", ".lora_A.weight", ".lora_B.weight"),
    "diffusers": ("transformer.transformer_blocks.0.attn.to_out.0", ".lora_A.weight", ".lora_B.weight"),
    "old diffusers": ("transformer.transformer_blocks.0.attn.to_out.0", ".lora.down.weight", ".lora.up.weight"),
    "XLabs": ("double_blocks.0.processor.proj_lora1", ".down.weight", ".up.weight"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_module_changes_it(spelling, tmp_path):
    module, down, up = SPELLINGS[spelling]
    tensors = factors(module, down=down, up=up)
    a, b = tensors.values()
    change = change_of("transformer_blocks.0.attn.to_out.0.weight", saved(tmp_path, tensors))
    assert np.abs(change - (b @ a)).max() < 0.01  # the base is float16


@pytest.mark.parametrize(("alpha", "factor"), [(None, 1), (2, 1), (1, 0.5), (-4.0, -2)])
def test_alpha_over_rank_is_the_factor_and_one_without_alpha(alpha, factor, tmp_path):
    module = f"diffusion_model.{IMG}"
    more = {} if alpha is None else {f"{module}.alpha": np.array(alpha, np.float32)}
    tensors = factors(module, **more)
    a, b = (value for name, value in tensors.items() if "lora" in name)
    change = change_of("transformer_blocks.0.attn.to_out.0.weight", saved(tmp_path, tensors))
    assert np.abs(change - factor * (b @ a)).max() < 0.01


def test_settings_without_the_name_of_a_part_are_those_of_all_modules(tmp_path):
    module = "transformer_blocks.0.attn.to_out.0"
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": {module: 2}, "alpha_pattern": {module: 6}}
    tensors = factors(module, down=".lora_A.weight", up=".lora_B.weight")
    folder = tmp_path / "by save_lora_adapter"
    folder.mkdir()
    save_file(tensors, folder / "pytorch_lora_weights.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
    a, b = tensors.values()
    for adapter in (folder, folder / "pytorch_lora_weights.safetensors"):
        assert np.abs(change_of(f"{module}.weight", adapter) - 3 * (b @ a)).max() < 0.02


def test_several_adapters_add_up_with_their_weights(tmp_path):
    whole = saved(tmp_path, factors("lora_unet_double_blocks_0_img_attn_qkv", rows=24))
    name = "transformer_blocks.0.attn.to_k.weight"
    alone = change_of(name, whole)
    both = change_of(name, [(whole, 0.5), (FOLDER / "flux_diffusers.safetensors", -1)])
    other = change_of(name, FOLDER / "flux_diffusers.safetensors")
    assert np.abs(both - (0.5 * alone - other)).max() < 0.05


def test_an_adapter_of_the_whole_and_one_of_a_part_do_not_mix_in_a_joined_weight(tmp_path):
    save_file(in_single(safeload.load(FLUX), "flux"), tmp_path / "single.safetensors")
    whole = saved(tmp_path, factors("lora_unet_double_blocks_0_img_attn_qkv", rows=24))
    with pytest.raises(safeload.UnsupportedError, match="changed as a whole by one adapter and in parts by another"):
        safeload.load(tmp_path / "single.safetensors", adapters=[whole, FOLDER / "flux_diffusers.safetensors"])


TEXT = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"


def test_text_encoders_that_the_base_lacks_are_left_out_with_a_warning(tmp_path, caplog):
    adapter = saved(tmp_path, {**factors(TEXT), **factors(f"lora_unet_{IMG.replace('.', '_')}")})
    assert change_of("transformer_blocks.0.attn.to_out.0.weight", adapter).any()
    assert f"left out 1 of 2 modules, such as that of '{TEXT}.lora_down.weight'" in caplog.text
    alone = saved(tmp_path, factors(TEXT))
    with pytest.raises(safeload.UnsupportedError, match="does not have, as do all its others"):
        safeload.load(FLUX, adapters=alone)


@pytest.mark.parametrize("end", ["weight", "bias"])
def test_text_encoders_of_a_single_file_change_with_it(end, tmp_path):
    """The second one of SDXL joins what adapters change apart."""
    base = in_single(safeload.load(FOLDER / "unet_base.safetensors"), "unet")
    first, second = "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.q_proj", "conditioner."
    second += "embedders.1.model.transformer.resblocks.0.attn"
    base |= {f"{first}.weight": np.zeros((8, 8), np.float32), f"{second}.in_proj_weight": np.zeros((24, 8), np.float32)}
    base |= {f"{first}.bias": np.zeros(8, np.float32), f"{second}.in_proj_bias": np.zeros(24, np.float32)}
    save_file(base, tmp_path / "base.safetensors")
    forms = {"down": ".lora_A.weight", "up": ".lora_B.weight"}
    layer = "text_model.encoder.layers.0.self_attn"
    one = factors(f"text_encoder.{layer}.q_proj", **forms)
    two = factors(f"text_encoder_2.{layer}.v_proj", **forms, rank=3)
    bias = {f"text_encoder_2.{layer}.v_proj.lora_B.bias": np.arange(8, dtype=np.float32)}
    merged = safeload.load(tmp_path / "base.safetensors", adapters=saved(tmp_path, one | two | bias))
    if end == "bias":
        assert (merged[f"{second}.in_proj_bias"] == [0] * 16 + list(range(8))).all()
        return
    a, b = one.values()
    np.testing.assert_allclose(merged[f"{first}.weight"], b @ a, rtol=1e-4, atol=1e-5)
    a, b = two.values()
    np.testing.assert_allclose(merged[f"{second}.in_proj_weight"][16:], b @ a, rtol=1e-4, atol=1e-5)
    assert not merged[f"{second}.in_proj_weight"][:16].any()


def test_dora_of_the_parts_of_a_joined_weight(tmp_path):
    """Each part of a whole module has its own magnitudes."""
    module = "lora_unet_double_blocks_0_img_attn_qkv"
    magnitude = np.arange(1, 25, dtype=np.float32)
    adapter = saved(tmp_path, factors(module, rows=24, **{f"{module}.dora_scale": magnitude[:, None]}))
    merged = safeload.load(FLUX, adapters=adapter, dtype="float32")
    parts = [merged[f"transformer_blocks.0.attn.to_{part}.weight"] for part in "qkv"]
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(parts), axis=1), magnitude, rtol=1e-5)


def test_loha_of_a_joined_weight_changes_its_parts(tmp_path):
    rng = np.random.default_rng(5)
    shapes = {"hada_w1_a": (24, 2), "hada_w1_b": (2, 8), "hada_w2_a": (24, 2), "hada_w2_b": (2, 8)}
    parts = {role: rng.standard_normal(shape, np.float32) for role, shape in shapes.items()}
    module = "lora_unet_double_blocks_0_img_attn_qkv"
    adapter = saved(tmp_path, {f"{module}.{role}": value for role, value in parts.items()})
    change = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    save_file(in_single(safeload.load(FLUX), "flux"), tmp_path / "single.safetensors")
    base = safeload.load(tmp_path / "single.safetensors", dtype="float32")["double_blocks.0.img_attn.qkv.weight"]
    apart = safeload.load(FLUX, adapters=adapter, dtype="float32")
    merged = in_single(apart, "flux")["double_blocks.0.img_attn.qkv.weight"]
    np.testing.assert_allclose(merged, base + change, rtol=1e-5, atol=1e-5)
    whole = safeload.load(tmp_path / "single.safetensors", adapters=adapter, dtype="float32")
    np.testing.assert_allclose(whole["double_blocks.0.img_attn.qkv.weight"], base + change, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_an_upsampler_has_the_number_of_sd1_or_of_sdxl(number, tmp_path):
    base, name = FOLDER / "unet_base.safetensors", "up_blocks.0.upsamplers.0.conv.weight"
    before = safeload.load(base, dtype="float32")[name]
    rows, columns, *kernel = before.shape
    module = f"lora_unet_output_blocks_2_{number}_conv"
    down, up = np.ones((1, columns, *kernel), np.float32), np.ones((rows, 1, 1, 1), np.float32)
    tensors = {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
    after = safeload.load(base, adapters=saved(tmp_path, tensors), dtype="float32")[name]
    np.testing.assert_allclose(after - before, 1, rtol=1e-5)


REFUSED = {
    "LoHa": (
        {f"diffusion_model.{IMG}.hada_w1_a": np.ones((2, 2), np.float32)},
        "but LoHa has hada_w1_a and hada_w1_b",
    ),
    "LoKr": ({"lora_unet_x.lokr_w1": np.ones((2, 2), np.float32)}, "lokr_w1, but LoKr has lokr_w1"),
    "OFT": (factors(IMG, **{"lora_unet_x.oft_blocks": np.ones((2, 2), np.float32)}), "belongs to an OFT adapter"),
    "Tucker": (factors(IMG, **{f"{IMG}.lora_mid.weight": np.ones((2, 2, 3, 3), np.float32)}), "and a convolution"),
    "difference": (
        factors(IMG, **{f"{IMG}.diff_b": np.ones(8, np.float32)}),
        "diff_b' of the adapter is no part",
    ),
    "norm": (
        factors(IMG, **{"norm.weight": np.ones(8, np.float32)}),
        "'norm.weight' of the adapter is no part",
    ),
    "no counterpart": ({f"{IMG}.lora_down.weight": np.ones((2, 8), np.float32)}, "has no counterpart"),
    "alpha alone": (factors(IMG, **{"x.alpha": np.float32(1).reshape(())}), "'x.alpha' of the adapter has no factors"),
    "alpha 0": (factors(IMG, **{f"{IMG}.alpha": np.zeros((), np.float32)}), "is 0: kohya takes it for the rank"),
    "alpha nan": (
        factors(IMG, **{f"{IMG}.alpha": np.full((), np.nan, np.float32)}),
        "one finite number, got nan",
    ),
    "two alphas": (factors(IMG, **{f"{IMG}.alpha": np.ones(2, np.float32)}), "must be one finite number"),
    "unknown module": (factors("double_blocks.7.img_attn.proj"), "'double_blocks.7.img_attn.proj.weight', which"),
    "unknown part": (
        factors("transformer_2.x"),
        "'transformer_2.x.weight'",
    ),
    "shape": (factors(IMG, columns=6), r"is \[2, 6\], but .* it needs \[2, 8\]"),
    "turned": (factors("single_blocks.0.linear2", rows=40, columns=8), r"it needs \[2, 40\]"),
    "integers": (factors(IMG, **{f"{IMG}.lora_down.weight": np.ones((2, 8), np.int8)}), "is I8: it must be floating"),
    "inputs scaled": (factors(IMG, **{f"{IMG}.dora_scale": np.ones((1, 7), np.float32)}), "it needs norms of rows"),
    "same part": (
        factors(IMG) | factors(IMG, down=".lora_A.weight", up=".lora_B.weight"),
        "are the same part of one module",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case, tmp_path):
    tensors, message = REFUSED[case]
    with pytest.raises(safeload.SafeloadError, match=message):
        safeload.load(FLUX, adapters=saved(tmp_path, tensors))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "'lora_adapter_metadata' is no JSON"),
        ("[]", "'lora_adapter_metadata' must be an object"),
        ('{"transformer.r": 3}', "has rank 2, but the metadata of the file says 3"),
        ('{"transformer.r": 2, "transformer.use_qalora": true}', '"use_qalora" is a variant of LoRA'),
        ('{"transformer.r": 2, "transformer.peft_type": "VERA"}', "must be \"LORA\", got 'VERA'"),
        ('{"transformer.r": 2, "transformer.lora_alpha": "x"}', '"lora_alpha" must be a number'),
    ],
)
def test_settings_of_diffusers_that_do_not_fit(text, message, tmp_path):
    tensors = factors("transformer.transformer_blocks.0.attn.to_out.0", down=".lora_A.weight", up=".lora_B.weight")
    adapter = saved(tmp_path, tensors, {"lora_adapter_metadata": text})
    with pytest.raises(safeload.SafeloadError, match=message):
        safeload.load(FLUX, adapters=adapter)


def test_an_alpha_beside_settings_of_diffusers_is_refused(tmp_path):
    module = "transformer.transformer_blocks.0.attn.to_out.0"
    tensors = factors(
        module, down=".lora_A.weight", up=".lora_B.weight", **{f"{module}.alpha": np.ones((), np.float32)}
    )
    adapter = saved(tmp_path, tensors, {"lora_adapter_metadata": '{"transformer.r": 2}'})
    with pytest.raises(safeload.UnsupportedError, match="gives an alpha, and so does the metadata"):
        safeload.load(FLUX, adapters=adapter)


def test_two_tensors_of_one_spelling_are_refused(tmp_path):
    base = safeload.load(FLUX)
    base["transformer_blocks.0.attn.to.out.0.weight"] = base["transformer_blocks.0.attn.to_out.0.weight"]
    save_file(base, tmp_path / "base.safetensors")
    adapter = saved(tmp_path, factors("lora_unet_transformer_blocks_0_attn_to_out_0"))
    with pytest.raises(safeload.UnsupportedError, match="several tensors of the base have this name"):
        safeload.load(tmp_path / "base.safetensors", adapters=adapter)


# ---- other doors ----


@pytest.mark.parametrize("layout", ["diffusers", "single"])
def test_conversions_in_pieces_write_what_load_gives(layout, tmp_path):
    path = FLUX
    if layout == "single":
        save_file(in_single(safeload.load(FLUX), "flux"), tmp_path / "single.safetensors")
        path = tmp_path / "single.safetensors"
    adapter = FOLDER / ("flux_kohya.safetensors" if layout == "diffusers" else "flux_diffusers.safetensors")
    expected = safeload.load(path, adapters=adapter)
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(path, tmp_path / "out", adapters=adapter, max_shard_size="4KB", executor=executor)
    found = safeload.load(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_info_and_check_name_what_an_adapter_changes(tmp_path):
    found = safeload.info(FOLDER / "wan_kohya.safetensors", base=FOLDER / "wan_base.safetensors").to_dict()["adapter"]
    assert (found["writer"], found["ranks"], found["alphas"], found["base"]["fits"]) == ("kohya", [2], [1.0], True)
    assert safeload.check(FOLDER / "wan_kohya.safetensors", base=FOLDER / "wan_base.safetensors").ok
    report = safeload.check(FOLDER / "wan_kohya.safetensors", base=FLUX)
    assert not report.ok
    assert "adapter.base" in str(report.to_dict())


# ---- under the names of other tools ----

LORA = ("flux_diffusers", "flux_kohya", "flux_xlabs", "sd3_diffusers", "unet_kohya", "wan_comfyui", "wan_kohya")


@pytest.mark.parametrize("tool", ["kohya", "diffusers", "PEFT"])
@pytest.mark.parametrize("case", LORA)
def test_names_of_another_tool_change_the_same(case, tool, tmp_path):
    model = case.partition("_")[0]
    base = FOLDER / f"{model}_base.safetensors"
    if tool == "kohya" and model != "unet":  # the names of a single file
        save_file(in_single(safeload.load(base), model), tmp_path / "single.safetensors")
        base = tmp_path / "single.safetensors"
    result = f"{tmp_path}/peft/" if tool == "PEFT" else tmp_path / "a.safetensors"
    safeload.convert(FOLDER / f"{case}.safetensors", result, base=base, layout=None if tool == "PEFT" else tool)
    before = safeload.load(base, adapters=FOLDER / f"{case}.safetensors", dtype="float32")
    after = safeload.load(base, adapters=result, dtype="float32")
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    assert safeload.info(result).to_dict()["adapter"]["writer"] == tool


@pytest.mark.parametrize("tool", ["kohya", "diffusers"])
def test_factors_keep_their_bits_under_other_names(tool, tmp_path):
    base, module = FOLDER / "unet_base.safetensors", "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    alpha = {"lora_unet_x.alpha".replace("x", module.replace(".", "_")): np.full((), 3, np.float32)}
    source = factors("lora_unet_" + module.replace(".", "_"), rank=4, **alpha)
    safeload.convert(saved(tmp_path, source), tmp_path / "b.safetensors", base=base, layout=tool)
    a, b = (value for name, value in source.items() if ".lora_" in name)
    with safeload.open(tmp_path / "b.safetensors") as file:
        written = {name.rpartition(".lora_")[2]: file[name] for name in file if ".lora_" in name}
        pair = ("down", "up") if tool == "kohya" else ("A", "B")
        assert [*map(np.array_equal, (written[f"{end}.weight"] for end in pair), (a, b))] == [True, True]
        if tool == "kohya":
            (alpha,) = (file[name] for name in file if name.endswith(".alpha"))
            assert (alpha.shape, float(alpha)) == ((), 3.0)
        else:
            settings = json.loads(file.metadata["lora_adapter_metadata"])
            assert (settings["unet.r"], settings["unet.lora_alpha"]) == (4, 3.0)


def test_the_other_way_and_back_gives_equal_bytes(tmp_path):
    base, paths = FOLDER / "unet_base.safetensors", [FOLDER / "unet_old_diffusers.safetensors"]
    for k, tool in enumerate(("kohya", "diffusers", "kohya", "diffusers")):
        paths.append(tmp_path / f"{k}.safetensors")
        safeload.convert(paths[-2], paths[-1], base=base, layout=tool)
    assert paths[1].read_bytes() == paths[3].read_bytes()
    assert paths[2].read_bytes() == paths[4].read_bytes()


NO_FORM = {
    "no model": ("x_base.safetensors", "unet_kohya", "diffusers", "names of diffusers need sd1, sdxl"),
    "single file": ("flux_base.safetensors", "flux_kohya", "kohya", "need sd3, flux or wan in the layout of a single"),
    "core": (
        "unet_base.safetensors",
        "unet_locon",
        "diffusers",
        "with the core of a Tucker decomposition",
    ),
    "LoHa": ("unet_base.safetensors", "unet_loha", "diffusers", "is a LoHa, which pipelines of Diffusers do not load"),
    "LoKr": ("unet_base.safetensors", "unet_lokr", "diffusers", "is a LoKr, which pipelines of Diffusers do not load"),
    "tool": ("unet_base.safetensors", "unet_kohya", "comfyui", "needs layout=.*, got 'comfyui'"),
}


@pytest.mark.parametrize("case", NO_FORM)
def test_what_other_tools_have_no_names_for(case, tmp_path):
    name, adapter, tool, message = NO_FORM[case]
    save_file({"x.weight": np.zeros((4, 4), np.float32)}, tmp_path / "x_base.safetensors")
    base = tmp_path / name if name.startswith("x_") else FOLDER / name
    with pytest.raises((safeload.SafeloadError, ValueError), match=message):
        safeload.convert(FOLDER / f"{adapter}.safetensors", tmp_path / "a.safetensors", base=base, layout=tool)
    assert not (tmp_path / "a.safetensors").exists()


# ---- other kinds under the names of other tools ----

UNET, SQUARE = FOLDER / "unet_base.safetensors", "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
WIDE, KERNEL = "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj", "mid_block.resnets.0.conv1"  # 64 x 8, 3 x 3
KINDS = ("unet_dora", "unet_loha", "unet_lokr", "unet_locon", "unet_locon_dora")


def random(seed=0, **shapes):
    """Tensors of a module by role."""
    rng = np.random.default_rng(seed)
    return {role: rng.standard_normal(shape, np.float32) for role, shape in shapes.items()}


def of_lycoris(modules, alpha=None):
    """A file of LyCORIS, with the tensors of each module."""
    alphas = {} if alpha is None else {"alpha": np.full((), alpha, np.float32)}
    lycoris = {"lycoris_" + module.replace(".", "_"): {**parts, **alphas} for module, parts in modules.items()}
    return {f"{module}.{role}": value for module, parts in lycoris.items() for role, value in parts.items()}


def loha(rows, columns, rank=2):
    return random(hada_w1_a=(rows, rank), hada_w1_b=(rank, columns), hada_w2_a=(rows, rank), hada_w2_b=(rank, columns))


def tucker(rank=2):
    sides = {f"hada_w{number}_{end}": (rank, 8) for number in (1, 2) for end in "ab"}
    return random(**sides, hada_t1=(rank, rank, 3, 3), hada_t2=(rank, rank, 3, 3))


def lora(rows=8, columns=8, rank=2, kernel=(), **more):
    ones = [1] * len(kernel)
    parts = random(down=(rank, columns, *kernel), up=(rows, rank, *ones))
    return {f"lora_{role}.weight": value for role, value in parts.items()} | random(1, **more)


LYCORIS = {
    "LoHa": {SQUARE: loha(8, 8), WIDE: loha(64, 8, 3), "mid_block.attentions.0.proj_in": loha(8, 8)},
    "LoHa core": {SQUARE: loha(8, 8), KERNEL: tucker()},
    "LoHa kernel": {KERNEL: loha(8, 72)},
    "LoKr": {
        SQUARE: random(lokr_w1=(2, 2), lokr_w2_a=(4, 1), lokr_w2_b=(1, 4)),
        WIDE: random(lokr_w1=(8, 2), lokr_w2_a=(8, 3), lokr_w2_b=(3, 4)),
    },
    "LoKr factor": {WIDE: random(lokr_w1=(4, 4), lokr_w2_a=(16, 2), lokr_w2_b=(2, 2))},
    "LoKr both": {WIDE: random(lokr_w1_a=(8, 2), lokr_w1_b=(2, 2), lokr_w2_a=(8, 2), lokr_w2_b=(2, 4))},
    "LoKr whole": {WIDE: random(lokr_w1=(8, 2), lokr_w2=(8, 4))},
    "LoKr core": {KERNEL: random(lokr_w1=(2, 2), lokr_t2=(1, 1, 3, 3), lokr_w2_a=(1, 4), lokr_w2_b=(1, 4))},
    "LoKr kernel": {KERNEL: random(lokr_w1=(2, 2), lokr_w2=(4, 4, 3, 3))},
    "DoRA": {SQUARE: lora(dora_scale=(8, 1)), KERNEL: lora(kernel=(3, 3), dora_scale=(8, 1, 1, 1))},
}


def factors_in(path):
    """All tensors but alphas, without the axes of 1."""
    arrays = (value for name, value in safeload.load(path).items() if not name.endswith(".alpha"))
    return sorted((np.squeeze(value).shape, value.tobytes()) for value in arrays)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("alpha", [None, 3])
@pytest.mark.parametrize("case", LYCORIS)
def test_kinds_of_lycoris_are_those_of_peft(case, alpha, turned, tmp_path):
    """Factors keep their bits there and back, in whatever order a file has them."""
    tensors = of_lycoris(LYCORIS[case], alpha)
    source = saved(tmp_path, dict(reversed(tensors.items())) if turned else tensors)
    before = safeload.load(UNET, adapters=source, dtype="float32")
    steps = {"peft": None, "kohya.safetensors": "kohya", "again": None}
    for name, layout in steps.items():
        target = f"{tmp_path / name}/" if layout is None else tmp_path / name
        safeload.convert(source, target, base=UNET, layout=layout)
        source = tmp_path / name
        after = safeload.load(UNET, adapters=source, dtype="float32")
        for tensor, value in before.items():
            np.testing.assert_allclose(after[tensor], value, rtol=1e-6, atol=1e-6, err_msg=tensor)
        assert factors_in(source) == factors_in(tmp_path / "a.safetensors")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "peft" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def settings(path):
    text = json.loads((path / "adapter_config.json").read_text())
    return {key: value for key, value in text.items() if key not in ("target_modules", "inference_mode")}


def test_settings_let_peft_compute_the_shapes(tmp_path):
    plain = {"rank_pattern": {}, "alpha_pattern": {}, "use_effective_conv2d": False}
    lokr = {"peft_type": "LOKR", "decompose_both": False, "decompose_factor": -1, **plain}
    ranks = {"rank_pattern": {WIDE: 3}, "alpha_pattern": {WIDE: 3.0}}
    expected = {
        "LoHa core": {"peft_type": "LOHA", "r": 2, "alpha": 2.0, **plain, "use_effective_conv2d": True},
        "LoKr": {**lokr, "r": 1, "alpha": 1.0, **ranks},
        "LoKr factor": {**lokr, "r": 2, "alpha": 2.0, "decompose_factor": 4},
        "LoKr both": {**lokr, "r": 2, "alpha": 2.0, "decompose_both": True},
        "LoKr whole": {**lokr, "r": 4, "alpha": 4.0},  # a smaller rank would have factors
    }
    for case, values in expected.items():
        safeload.convert(saved(tmp_path, of_lycoris(LYCORIS[case])), tmp_path / case, base=UNET)
        assert settings(tmp_path / case) == values, case


@pytest.mark.parametrize("case", KINDS)
def test_other_kinds_keep_their_bits_under_names_of_kohya(case, tmp_path):
    source, results = FOLDER / f"{case}.safetensors", [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for result in results:
        safeload.convert(source, result, base=UNET, layout="kohya")
    assert results[0].read_bytes() == results[1].read_bytes()
    assert factors_in(results[0]) == factors_in(source)
    before, after = (safeload.load(UNET, adapters=path, dtype="float32") for path in (source, results[0]))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", ["unet_dora", "unet_locon_dora"])
def test_norms_under_the_names_of_diffusers(case, tmp_path):
    source, result = FOLDER / f"{case}.safetensors", tmp_path / "a.safetensors"
    safeload.convert(source, result, base=UNET, layout="diffusers")
    assert json.loads(safeload.open(result).metadata["lora_adapter_metadata"])["unet.use_dora"] is True
    assert factors_in(result) == factors_in(source)
    before, after = (safeload.load(UNET, adapters=path, dtype="float32") for path in (source, result))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_norms_of_a_whole_weight_follow_its_rows(tmp_path):
    """A single file has q, k and v as one weight, Diffusers each on its own."""
    parts = {f"{IMG.replace('proj', 'qkv')}.{role}": value for role, value in lora(24, 8, dora_scale=(24, 1)).items()}
    source = saved(tmp_path, parts)
    safeload.convert(source, tmp_path / "peft", base=FLUX)
    tensors = safeload.load(tmp_path / "peft")
    own = (next(name for name in tensors if f"to_{part}.lora_magnitude" in name) for part in "qkv")
    assert np.array_equal(
        np.concatenate([tensors[name] for name in own]), parts[f"{IMG.replace('proj', 'qkv')}.dora_scale"][:, 0]
    )
    before, after = (safeload.load(FLUX, adapters=path, dtype="float32") for path in (source, tmp_path / "peft"))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


NO_PLACE = {
    "columns": (
        {SQUARE: lora(dora_scale=(1, 8))},
        None,
        "with norms of its columns: PEFT's DoRA has norms of rows",
    ),
    "some norms": (
        {SQUARE: lora(dora_scale=(8, 1)), WIDE: lora(64)},
        None,
        r"norms \(DoRA\) for LoRA alone, and for all",
    ),
    "norms of LoHa": ({SQUARE: loha(8, 8) | random(dora_scale=(8, 1))}, None, r"norms \(DoRA\) for LoRA alone"),
    "two kinds": ({SQUARE: loha(8, 8), WIDE: lora(64)}, None, "by another kind than other modules"),
    "some cores": ({"mid_block.resnets.1.conv1": loha(8, 72), KERNEL: tucker()}, None, "use_effective_conv2d"),
    "other blocks": ({WIDE: random(lokr_w1=(2, 4), lokr_w2=(32, 2))}, None, "into other blocks than PEFT"),
    "other factors": (
        {WIDE: random(lokr_w1=(8, 2), lokr_w2_a=(8, 4), lokr_w2_b=(4, 4))},
        None,
        "with rank 4, which decides",
    ),
    "LoKr": (
        {WIDE: random(lokr_w1=(8, 2), lokr_w2=(8, 4))},
        "diffusers",
        "is a LoKr, which pipelines of Diffusers do not",
    ),
}


@pytest.mark.parametrize("case", NO_PLACE)
def test_kinds_without_a_place_in_a_tool(case, tmp_path):
    modules, layout, message = NO_PLACE[case]
    target = tmp_path / ("out" if layout is None else "out.safetensors")
    with pytest.raises(safeload.UnsupportedError, match=message):
        safeload.convert(saved(tmp_path, of_lycoris(modules)), target, base=UNET, layout=layout)
    assert not target.exists()


def test_a_scale_that_lycoris_ignores_is_refused(tmp_path):
    safeload.convert(saved(tmp_path, of_lycoris(LYCORIS["LoKr whole"])), tmp_path / "peft", base=UNET)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({**config, "alpha": 2.0}))
    with pytest.raises(safeload.UnsupportedError, match=r"of which LyCORIS ignores the scale, 0\.5"):
        safeload.convert(tmp_path / "peft", tmp_path / "b.safetensors", base=UNET, layout="kohya")


def test_rows_that_are_joined_have_no_form_but_for_lora(tmp_path):
    """Norms of the rows beside those of q would have to be those of the base."""
    module = "transformer_blocks.0.attn.to_q"
    save_file(in_single(safeload.load(FLUX), "flux"), tmp_path / "single.safetensors")
    for parts in (lora(dora_scale=(8, 1)), loha(8, 8)):
        source = saved(tmp_path, of_lycoris({module: parts}))
        with pytest.raises(safeload.UnsupportedError, match="whose rows are joined, divided or turned"):
            safeload.convert(source, tmp_path / "b.safetensors", base=tmp_path / "single.safetensors", layout="kohya")


def test_the_program_writes_the_names_of_a_tool(tmp_path, capsys):
    command = ["convert", FOLDER / "unet_kohya.safetensors", tmp_path / "a.safetensors"]
    command += ["--base", FOLDER / "unet_base.safetensors"]
    status, _, errors = run(capsys, *command, "--layout", "diffusers")
    assert status == 0, errors
    assert all(name.startswith("unet.") for name in safeload.open(tmp_path / "a.safetensors"))
    status, _, errors = run(capsys, *command, "--overwrite")
    assert (status, "needs --layout kohya or --layout diffusers" in errors) == (2, True)
    assert ", 1 attn1_to_k" in run(capsys, "info", FOLDER / "unet_kohya.safetensors")[1]


METHODS = {
    "unet_kohya": "LoRA",
    "unet_dora": "DoRA",
    "unet_locon_dora": "DoRA",
    "unet_loha": "LoHa",
    "unet_lokr": "LoKr",
}


@pytest.mark.parametrize("case", METHODS)
def test_the_method_is_told_with_and_without_a_base(case):
    adapter, base = FOLDER / f"{case}.safetensors", FOLDER / "unet_base.safetensors"
    assert safeload.info(adapter).to_dict()["adapter"]["method"] == METHODS[case]
    assert safeload.info(adapter, base=base).to_dict()["adapter"]["method"] == METHODS[case]
    assert not safeload.check(adapter, base=base).errors


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("a.safetensors", {"layout": "kohya"}, 'layout="kohya" names the tool of an adapter, which needs base='),
        (
            "folder/",
            {"layout": "kohya", "base": FLUX},
            'layout="kohya" writes one file: its path must end with .safet',
        ),
        ("a.gguf", {"layout": "diffusers", "base": FLUX}, 'layout="diffusers" writes one file: its path must end'),
    ],
)
def test_names_of_a_tool_need_a_base_and_a_file(target, options, message, tmp_path, capsys):
    source, text = FOLDER / "flux_kohya.safetensors", str(tmp_path / target) + "/" * target.endswith("/")
    with pytest.raises(ValueError, match=message):
        safeload.convert(source, text, **options)
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    status, _, errors = run(capsys, "convert", source, text, *words)
    assert (status, message.partition(" ")[2].replace("base=", "--base") in errors) == (2, True), errors
    with pytest.raises(TypeError, match=r"layout must be a safeload\.Layout"):
        safeload.convert(FLUX, tmp_path / "a.safetensors", layout="mixtral")
    assert not any(tmp_path.iterdir())
