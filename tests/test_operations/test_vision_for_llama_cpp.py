"""Vision parts of models as files for llama.cpp's ``--mmproj``, compared with what its own converter writes."""

import json

import numpy as np
import pytest
from builders import llama_models
from builders.inside import main

import safeload
from safeload import gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MODELS = llama_models.listed("vision.json")
TYPES = {
    "f32": {"dtype": "float32"},
    "f16": {"dtype": "float16"},
    "bf16": {"dtype": "bfloat16"},
    "q8_0": {"quantize": "q8_0"},
}
PATCHES = "visual.patch_embed.proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model, with changes to the config of its tower, its config and its tensors."""

    def write(name, tower=(), *, tensors=None, files=None, **config):
        model = MODELS[name]
        changed = {**model["config"], "vision_config": {**model["config"]["vision_config"], **dict(tower)}, **config}
        own = {**llama_models.tensors_of(model), **(tensors or {})}
        own = {key: value for key, value in own.items() if value is not None}
        model = {**model, "config": changed, "files": model["files"] if files is None else files}
        return llama_models.write_folder(tmp_path / name, model, own)

    return write


def vision(source, destination, **options):
    safeload.convert(source, destination, part="vision", **options)
    return destination


def refused(source, match, error=safeload.SafeloadError, **options):
    destination = source.parent / "refused.gguf"
    with pytest.raises(error, match=match):
        vision(source, destination, **options)
    assert not destination.exists()


def changed(path, destination, tensors=(), **metadata):
    """Write a file with other tensors and metadata, None for none."""
    with safeload.open(path) as file:
        kept = {key: value for key, value in {**file.metadata, **metadata}.items() if value is not None}
        arrays = {key: value for key, value in {**file.load(), **dict(tensors)}.items() if value is not None}
    gguf.save_file(arrays, destination, kept)
    return destination


@pytest.mark.parametrize("name", MODELS)
def test_metadata_and_tensors_are_those_of_llama_cpp_in_its_order(name, folder, tmp_path):
    own = llama_models.described(vision(folder(name), tmp_path / "x.gguf", dtype="float32"))
    reference = MODELS[name]["reference"]
    assert [*own["metadata"].items()] == [*reference["metadata"].items()]
    assert [*own["tensors"]] == [*reference["tensors"]]
    assert llama_models.without_last_bits(own["tensors"], reference["tensors"]) == reference["tensors"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("outtype", TYPES)
def test_files_equal_those_of_llama_cpp_byte_for_byte(outtype, name, folder, tmp_path):
    path = vision(folder(name), tmp_path / "x.gguf", **TYPES[outtype])
    assert llama_models.digest_of(path) == MODELS[name]["digests"][outtype]


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_tensors_keep_their_dtype_by_default(name, folder, tmp_path):
    path = vision(folder(name), tmp_path / "x.gguf")
    assert llama_models.digest_of(path) == MODELS[name]["digests"]["bf16"]


@pytest.mark.parametrize("name", MODELS)
def test_the_result_passes_check(name, folder, tmp_path):
    report = safeload.check(vision(folder(name), tmp_path / "x.gguf"))
    assert (report.errors, report.notes) == ([], [])


def test_check_finds_a_missing_tensor_a_missing_key_and_a_wrong_shape(folder, tmp_path):
    path, other = vision(folder("qwen2_vl"), tmp_path / "x.gguf"), tmp_path / "y.gguf"
    missing = safeload.check(changed(path, other, {"v.blk.1.ffn_up.weight": None}))
    assert ["v.blk.1.ffn_up.weight" in str(finding) for finding in missing.errors] == [True]
    key = "clip.vision.attention.layer_norm_epsilon"
    assert [key in str(finding) for finding in safeload.check(changed(path, other, **{key: None})).errors] == [True]
    wrong = safeload.check(changed(path, other, {"mm.2.bias": np.ones(3, np.float32)}))
    assert ["mm.2.bias" in str(finding) for finding in wrong.errors] == [True]


def test_check_accepts_a_projector_that_it_does_not_know(folder, tmp_path):
    path = vision(folder("qwen2_vl"), tmp_path / "x.gguf")
    report = safeload.check(changed(path, tmp_path / "y.gguf", **{"clip.projector_type": "idefics3"}))
    assert report.errors == []
    assert "mmproj file: keys and tensors were not checked" in str(report.notes[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2_5_vl", "qwen2.5vl_merger (mmproj: the vision part), 4 layers"),
        ("gemma4", "gemma4v (mmproj: the vision part), 2 layers"),
        ("gemma4_audio", "gemma4v and gemma4a (mmproj: the vision and audio part), 1 layer"),
    ],
)
def test_info_names_the_part_and_the_projector(name, text, folder, tmp_path):
    line = str(safeload.info(vision(folder(name), tmp_path / "x.gguf"))).splitlines()[1]
    assert line == f"{text}, hidden 32"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "gemma3", "gemma4_audio", "llava"])
def test_a_file_can_be_compared_with_its_source(name, folder, tmp_path):
    source = folder(name)
    safeload.convert(source, tmp_path / "x.gguf", part="vision", dtype="float32")
    diff = safeload.diff(source, tmp_path / "x.gguf")
    assert (diff.only_a, diff.only_b, diff.shapes) == ([], [], {})
    assert all(row.unequal == 0 for row in diff.tensors.values())
    assert safeload.check(tmp_path / "x.gguf", original=source).errors == []


def test_the_program_writes_a_part_and_says_what_it_leaves_out(folder, tmp_path, capsys):
    source = folder("qwen2_vl")
    assert main(["convert", str(source), str(tmp_path / "x.gguf"), "--part", "vision", "--dtype", "float16"]) == 0
    assert "left out (vision part only): 'lm_head.weight', 'model.embed_tokens.weight'" in capsys.readouterr().err
    path = tmp_path / "x.gguf"
    assert llama_models.digest_of(path) == MODELS["qwen2_vl"]["digests"]["f16"]


def test_names_with_and_without_wrappers_give_the_same_file(folder, tmp_path):
    tensors = llama_models.tensors_of(MODELS["qwen2_vl"])
    inside = {f"model.{name}": array for name, array in tensors.items() if name.startswith("visual.")}
    source = folder("qwen2_vl", tensors={**dict.fromkeys(name[6:] for name in inside), **inside})
    path = vision(source, tmp_path / "x.gguf", dtype="float32")
    reference = MODELS["qwen2_vl"]["reference"]["tensors"]
    assert dict(llama_models.described(path)["tensors"]) == reference


def test_shards_and_a_single_file_give_the_same_file(folder, tmp_path):
    source = folder("gemma3")
    safeload.convert(source, tmp_path / "other" / "gemma3" / "", max_shard_size="20KB")
    for name in MODELS["gemma3"]["files"]:
        (tmp_path / "other" / "gemma3" / name).write_bytes((source / name).read_bytes())
    one, two = vision(source, tmp_path / "x.gguf"), vision(tmp_path / "other" / "gemma3", tmp_path / "y.gguf")
    three = vision(source / "model.safetensors", tmp_path / "z.gguf")
    assert one.read_bytes() == two.read_bytes() == three.read_bytes()


@pytest.mark.parametrize("name", ["llama3", "glm4", "qwen3"])
def test_families_without_a_tower_are_refused_by_name(name, tmp_path):
    model = llama_models.listed()[name]
    source = llama_models.write_folder(tmp_path / name, model)
    refused(source, f"'{model['config']['architectures'][0]}' has no vision part", safeload.UnsupportedError)


@pytest.mark.parametrize("destination", ["x.safetensors", "folder/", "x.npz"])
def test_other_formats_have_no_parts(destination, folder, tmp_path):
    with pytest.raises(ValueError, match=r"part= selects a part of a model for llama.cpp"):
        safeload.convert(folder("qwen2_vl"), f"{tmp_path}/{destination}", part="text")


def test_part_is_one_of_two_and_needs_a_model(folder, tmp_path):
    with pytest.raises(ValueError, match="part must be one of text, vision, got 'audio'"):
        safeload.convert(folder("qwen2_vl"), tmp_path / "x.gguf", part="audio")
    with pytest.raises(ValueError, match=r"has no config\.json that names a class"):
        safeload.convert({"w": np.ones(2, np.float32)}, tmp_path / "x.gguf", part="vision")
    with pytest.raises(ValueError, match="raw=True writes the tensors as they are"):
        safeload.convert(tmp_path / "qwen2_vl", tmp_path / "x.gguf", part="text", raw=True)
    with pytest.raises(ValueError, match="imatrix= has the importance of columns of the text part"):
        vision(tmp_path / "qwen2_vl", tmp_path / "x.gguf", quantize="q8_0", imatrix=tmp_path / "i.gguf")
    path = vision(tmp_path / "qwen2_vl", tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="is a GGUF file already"):
        safeload.convert(path, tmp_path / "y.gguf", part="vision")


@pytest.mark.parametrize("scheme", ["q4_k_m", "q4_0", "iq2_xs", {"*": "q8_0"}])
def test_quantized_towers_have_the_blocks_of_the_converter_only(scheme, folder):
    refused(folder("qwen2_vl"), "float32, float16, bfloat16 or q8_0", ValueError, quantize=scheme)


@pytest.mark.parametrize("name", MODELS)
def test_unknown_tensors_of_the_tower_are_refused_by_name(name, folder):
    first = next(key for key in MODELS[name]["tensors"] if "vis" in key)
    unknown = f"{first.partition('.')[0]}.{'' if first[:5] != 'model' else 'vision_tower.'}extra.weight"
    unknown = unknown.replace("vision_tower", "visual") if ".visual." in first else unknown
    refused(folder(name, tensors={unknown: np.ones((2, 2), np.float32)}), f"'{unknown}'")


def test_missing_tensors_are_named(folder):
    refused(folder("qwen3_vl", tensors={"model.visual.merger.norm.weight": None}), "'v.post_ln.weight'")


@pytest.mark.parametrize(
    ("name", "tower", "match"),
    [
        ("qwen2_vl", {"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ("qwen2_vl", {"spatial_merge_size": 4}, "spatial_merge_size is 4"),
        ("qwen2_vl", {"in_channels": 4}, "in_channels is 4"),
        ("qwen2_vl", {"hidden_act": "relu"}, "no activation 'relu' for qwen2vl_merger"),
        ("qwen2_vl", {"depth": 4}, "tensors are missing: llama.cpp needs 'v.blk.3"),
        ("qwen2_vl", {"patch_size": 5}, "patch_embed.proj.weight"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [0, 3]}, r"fullatt_block_indexes is \[0, 3\]"),
        ("qwen2_5_vl", {"fullatt_block_indexes": "all"}, "fullatt_block_indexes"),
        ("qwen2_5_vl", {"window_size": 56}, "window_size is 56"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0]}, "deepstack_visual_indexes"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 0]}, "is a second v.deepstack.0"),
        ("qwen3_vl", {"num_position_embeddings": 17}, "num_position_embeddings is 17, which is no square"),
        ("qwen3_vl", {"num_position_embeddings": -1}, "num_position_embeddings"),
        ("gemma3", {"num_channels": 1}, "num_channels is 1"),
        ("gemma3", {"patch_size": "big"}, "patch_size"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size is 2"),
        ("gemma4", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("gemma4", {"head_dim": 8}, "head_dim is 8"),
        ("llava", {"model_type": "clip_vision_model"}, "no vision tower 'clip_vision_model'"),
        ("mistral3", {"rope_parameters": {"rope_theta": 500.0}}, "rope_theta is 500.0"),
    ],
)
def test_settings_that_change_the_tower_are_refused_by_name(name, tower, match, folder):
    refused(folder(name, tower), match)


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("gemma4", {"audio_config": {"hidden_size": 8}}, r"tensors are missing: llama.cpp needs 'a\.blk\.0"),
        ("gemma4", {"audio_config": {"hidden_size": 8, "attention_chunk_size": 9}}, "attention_chunk_size is 9"),
        ("gemma3", {"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16"),
        ("llava", {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("llava", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
        ("qwen2_vl", {"vision_config": None}, "vision_config must be an object, got None"),
        ("qwen2_vl", {"vision_config": {"num_heads": []}}, "num_heads"),
    ],
)
def test_settings_of_the_whole_model_are_refused_by_name(name, config, match, folder):
    refused(folder(name, **config), match)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "preprocessor_config.json: image_mean is missing"),
        ({"preprocessor_config.json": {"image_mean": [0.5], "image_std": "x"}}, "processor.image_std must be of type"),
        (
            {"preprocessor_config.json": {"image_mean": [None], "image_std": [1]}},
            "must be a number, got None",
        ),
    ],
)
def test_the_image_processor_is_needed_and_checked(files, match, folder):
    refused(folder("qwen2_vl", files=files), match)


def test_the_break_token_is_needed_for_pixtral(folder):
    processor = {"preprocessor_config.json": MODELS["mistral3"]["files"]["preprocessor_config.json"]}
    refused(folder("mistral3", files=processor), r"has no token \[IMG_BREAK\]")
    beyond = {"added_tokens_decoder": {"9999": {"content": "[IMG_BREAK]", "special": True}}}
    other = {**processor, "tokenizer_config.json": beyond}
    source = folder("llava", files=other)
    refused(source, "rows or columns, from which 9,999 to 10,000 cannot be taken")


def test_the_text_part_is_the_default(tmp_path):
    model = llama_models.listed()["qwen2_vl"]
    source = llama_models.write_folder(tmp_path / "qwen2_vl", model)
    pytest.importorskip("tokenizers")
    safeload.convert(source, tmp_path / "x.gguf", part="text")
    safeload.convert(source, tmp_path / "y.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_a_file_of_a_tower_does_not_become_a_folder(folder, tmp_path):
    path = vision(folder("qwen2_vl"), tmp_path / "x.gguf")
    with pytest.raises(safeload.UnsupportedError, match="'clip' cannot become a folder for transformers"):
        safeload.convert(path, tmp_path / "folder/")


def test_every_list_of_families_names_the_towers(capsys):
    assert main(["families", "--json"]) == 0
    listed = {row["name"]: row["mmproj"] for row in json.loads(capsys.readouterr().out)["families"]}
    assert {name for name, written in listed.items() if written} == {
        "gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    }  # fmt: skip
