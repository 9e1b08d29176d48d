"""Models of transformers as folders of mlx-lm, compared with what its own converter writes, and the way back."""

import json
import re

import numpy as np
import pytest
from builders import llama_models, mlx_models
from builders.engine_models import described
from builders.thorough import part_of

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

EXPECTED = mlx_models.expected()
ARGUMENTS = json.loads(mlx_models.ARGUMENTS.read_text())
# In the config of a language model inside another.
CHANGED_IN_PLACE = ("rope_parameters", "num_attention_heads", "num_key_value_heads")
# Each model in one of the formats, which take turns.
CASES = [(name, format) for k, name in enumerate(EXPECTED) for format in part_of([*EXPECTED[name]], k, 3)]


def plain(config):
    """A config without what mlx-lm changes in that of the language model while it loads a model."""
    inner = config.get("text_config", {})
    inner = {key: value for key, value in inner.items() if key not in CHANGED_IN_PLACE}
    return [(key, inner if key == "text_config" else value) for key, value in config.items()]


def written(folder):
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return described(folder / "model.safetensors"), config, index


@pytest.mark.parametrize(("name", "format"), CASES)
def test_folders_are_those_of_mlx_lm(name, format, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "out", quantize=format)
    tensors, config, index = written(tmp_path / "out")
    expected, config_of_mlx = EXPECTED[name][format], EXPECTED[name]["mlx"]["config"]
    assert index["metadata"] == expected["index"]
    assert index["weight_map"] == dict.fromkeys(sorted(tensors), "model.safetensors")
    if format == "mlx":
        assert tensors == expected["tensors"]
        assert plain(config) == plain(config_of_mlx)
    else:
        assert mlx_models.digest_of(tensors) == expected["tensors"]
        settings = dict.fromkeys(("quantization", "quantization_config"), expected["quantization"])
        assert plain(config) == plain(dict(sorted({**config_of_mlx, **settings}.items())))
    assert safeload.check(tmp_path / "out").ok


@pytest.mark.parametrize("name", EXPECTED)
def test_configs_have_all_arguments_of_mlx_lm(name, tmp_path):
    # As transformers 5 writes them, without the keys of published models that `mlx_models` adds.
    source = llama_models.write_folder(tmp_path / "source", mlx_models.listed()[name])
    safeload.convert(source, tmp_path / "out", quantize="mlx")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for part, arguments in zip((config, config.get("text_config")), ARGUMENTS[config["model_type"]], strict=False):
        assert {*arguments} - {*part} == set()


def test_a_family_like_another_has_its_own_matrices(tmp_path):
    """StarCoder has the layers of GPT-2, but not its Conv1D: mlx-lm neither turns nor renames its matrices."""
    source = llama_models.write_folder(tmp_path / "source", llama_models.listed()["gpt_bigcode"])
    safeload.convert(source, tmp_path / "out", quantize="mlx8")
    assert {*safeload.open(tmp_path / "out")} <= {*safeload.open(source)}
    name = "transformer.h.0.mlp.c_fc.weight"
    expected = safeload.load(source)[name].astype(np.float32)
    assert np.abs(safeload.load(tmp_path / "out", dtype="float32")[name] - expected).max() < 0.01


def test_layers_have_the_names_that_mlx_lm_knows(tmp_path):
    model = mlx_models.listed()["granite_hybrid"]
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    config = {**model["config"], "layer_types": [kinds.get(kind, kind) for kind in model["config"]["layer_types"]]}
    source = llama_models.write_folder(tmp_path / "source", {**model, "config": config})
    safeload.convert(source, tmp_path / "out", quantize="mlx")
    listed = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    assert {*listed} == {*kinds}
    assert safeload.check(tmp_path / "out").ok


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_images", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("format", ["mlx", "mlx4"])
def test_a_folder_equals_its_source_in_the_layout_of_mlx_lm(name, format, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "out", quantize=format)
    report = safeload.diff(source, tmp_path / "out")
    assert report.form == "layout of mlx-lm"
    assert (len(report.only_a), len(report.only_b), len(report.shapes)) == (0, 0, 0)
    assert all(text.startswith("as expected of") for text in report.judged.values())
    assert format != "mlx" or all(row.max <= 0.01 for row in report.tensors.values())  # norms plus 1 are rounded


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_equal_names_with_other_axes_are_compared_in_the_layout_of_mlx_lm(name, swapped, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "out", quantize="mlx")
    assert safeload.load(source).keys() == safeload.load(tmp_path / "out").keys()
    sides = (source, tmp_path / "out")
    report = safeload.diff(*(sides[::-1] if swapped else sides))
    assert (report.form, report.same) == ("layout of mlx-lm", True)


# ---- the way back ----

# Models of text and images whose language model has no class with a head, and the type of one that computes alike.
ALIKE = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
# Norms that mlx-lm stores with 1 added, which rounds them.
RAISED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
ADDS_1 = ("qwen3_next", "qwen3_5_images", "qwen3_5_moe_images")
# Parts of the names of towers, and of layers for multi-token prediction.
LEFT_OUT = ("vision", "visual", "multi_modal", "embed_audio", "mtp.", "model.layers.2.")


def bare(name):
    return name.replace("language_model.", "").removeprefix("transformer.")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ("qwen3_vl_moe", "ernie4_5_moe")])
def test_the_way_back_gives_the_tensors_of_transformers(name, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "mlx", quantize="mlx")
    safeload.convert(tmp_path / "mlx", tmp_path / "back", dtype="bfloat16")
    first, back = ({bare(k): v for k, v in safeload.load(path).items()} for path in (source, tmp_path / "back"))
    assert back.keys() <= first.keys()
    for key, value in back.items():
        if name in ADDS_1 and key.endswith(RAISED) and "linear_attn" not in key:
            np.testing.assert_allclose(value.astype(np.float32), first[key].astype(np.float32), atol=2**-7)
        else:
            np.testing.assert_array_equal(value.view(np.uint16), first[key].view(np.uint16), key)
    lost = first.keys() - back.keys()
    assert [key for key in lost if not any(part in key for part in LEFT_OUT)] == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not config.keys() & {"quantization", "quantization_config", "text_config"}
    assert config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel"))
    assert safeload.check(tmp_path / "back").ok


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt2", "lfm2_moe", "mamba2"])
def test_codes_are_dequantized_on_the_way_back(name, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "mlx", quantize="mlx8")
    safeload.convert(tmp_path / "mlx", tmp_path / "back", dtype="float32")
    first, back = ({bare(k): v for k, v in safeload.load(path).items()} for path in (source, tmp_path / "back"))
    for key, value in back.items():
        assert np.abs(value - first[key].astype(np.float32)).max() < 0.01, key
    assert safeload.check(tmp_path / "back").ok


@pytest.mark.parametrize("name", ALIKE)
def test_language_models_without_a_class_become_one_that_computes_alike(name, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "mlx", quantize="mlx")
    safeload.convert(tmp_path / "mlx", tmp_path / "back", dtype="bfloat16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == ALIKE[name]
    safeload.convert(source, tmp_path / "one.gguf")
    safeload.convert(tmp_path / "back", tmp_path / "two.gguf")
    one, two = (safeload.load(tmp_path / f"{part}.gguf") for part in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[key], two[key]) for key in one)


def test_tensors_that_mlx_lm_leaves_out_are_missing(tmp_path):
    safeload.convert(mlx_models.write(tmp_path / "source", "ernie4_5_moe"), tmp_path / "mlx", quantize="mlx")
    with pytest.raises(safeload.FormatError, match=r"tensors are missing: the config needs '.*e_score_correction_bias"):
        safeload.convert(tmp_path / "mlx", tmp_path / "back", dtype="bfloat16")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_neox", "lfm2"])
def test_other_engines_and_llama_cpp_get_what_they_make_of_transformers_models(name, tmp_path):
    source = mlx_models.write(tmp_path / "source", name)
    safeload.convert(source, tmp_path / "mlx", quantize="mlx")
    safeload.convert(source, tmp_path / "one.gguf")
    safeload.convert(tmp_path / "mlx", tmp_path / "two.gguf")
    assert safeload.diff(tmp_path / "one.gguf", tmp_path / "two.gguf").same


def test_mlx_to_mlx_keeps_its_names(tmp_path):
    source = mlx_models.write(tmp_path / "source", "lfm2_moe")
    safeload.convert(source, tmp_path / "plain", quantize="mlx")
    safeload.convert(tmp_path / "plain", tmp_path / "mlx4", quantize="mlx4")
    safeload.convert(source, tmp_path / "expected", quantize="mlx4")
    assert written(tmp_path / "mlx4") == written(tmp_path / "expected")


@pytest.mark.parametrize("options", [{"resume": True}, {"max_shard_size": "100KB", "resume": True}])
@pytest.mark.parametrize("format", ["mlx", "mlx4"])
def test_pieces_write_the_same_folder(format, options, tmp_path):
    source = mlx_models.write(tmp_path / "source", "qwen3_5_images")
    shards = {key: value for key, value in options.items() if key != "resume"}
    safeload.convert(source, tmp_path / "one", quantize=format, **shards)
    safeload.convert(source, tmp_path / "out", quantize=format, **options)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_the_way_back_in_pieces(tmp_path):
    source = mlx_models.write(tmp_path / "source", "lfm2")
    safeload.convert(source, tmp_path / "mlx", quantize="mlx4")
    safeload.convert(tmp_path / "mlx", tmp_path / "one", dtype="bfloat16", max_shard_size="50KB")
    safeload.convert(tmp_path / "mlx", tmp_path / "out", dtype="bfloat16", max_shard_size="50KB", resume=True)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("name", "fault"), [("qwen3_5_images", "conv"), ("deepseek_v3", "heads"), ("lfm2", "unknown")])
def test_tensors_that_do_not_fit_are_refused_by_name(name, fault, tmp_path):
    safeload.convert(mlx_models.write(tmp_path / "source", name), tmp_path / "mlx", quantize="mlx")
    tensors = safeload.load(tmp_path / "mlx")
    if fault == "conv":  # as transformers has it
        key = next(key for key in tensors if key.endswith("conv1d.weight"))
        tensors[key] = np.ascontiguousarray(tensors[key].swapaxes(1, 2))
    elif fault == "heads":
        key = next(key for key in tensors if key.endswith("embed_q.weight"))
        tensors[key] = tensors[key][1:]
    else:
        key = "model.layers.0.strange.weight"
        tensors[key] = tensors["model.embed_tokens.weight"]
    safeload.save(tensors, tmp_path / "mlx" / "model.safetensors", metadata={"format": "mlx"}, overwrite=True)
    with pytest.raises(safeload.SafeloadError, match=re.escape(bare(key))):
        safeload.convert(tmp_path / "mlx", tmp_path / "back", dtype="bfloat16")


@pytest.mark.parametrize("fault", ["missing", "axes", "unknown"])
def test_check_finds_faults_of_folders_for_mlx(fault, tmp_path):
    safeload.convert(mlx_models.write(tmp_path / "source", "qwen3_5_images"), tmp_path / "mlx", quantize="mlx")
    tensors = safeload.load(tmp_path / "mlx")
    name = "language_model.model.layers.0.linear_attn.conv1d.weight"
    if fault == "axes":
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    elif fault == "missing":
        del tensors[name]
    else:
        tensors[name := "language_model.model.layers.0.strange.weight"] = tensors["language_model.model.norm.weight"]
    safeload.save(tensors, tmp_path / "mlx" / "model.safetensors", metadata={"format": "mlx"}, overwrite=True)
    assert name in str(safeload.check(tmp_path / "mlx").errors)


def test_a_head_that_the_config_wants_must_be_there(tmp_path):
    source = mlx_models.write(tmp_path / "source", "qwen3_next")
    tensors = safeload.load(source)
    del tensors["lm_head.weight"]
    safeload.save(tensors, source / "model.safetensors", overwrite=True)
    with pytest.raises(safeload.FormatError, match=r"lm_head.*is missing, and tie_word_embeddings is not true"):
        safeload.convert(source, tmp_path / "out", quantize="mlx")
