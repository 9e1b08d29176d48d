"""MLX folders of models that mlx-lm stores otherwise than transformers, and stray settings of MLX."""

import json
import logging
import shutil

import numpy as np
import pytest
from builders.quantized import FIXTURES

import safeload
from safeload.numpy import save_file

FIXTURE = FIXTURES["mlx_affine4_g64"]
# Models of which safeload does not know how mlx-lm stores them.
CHANGED = [
    *("falcon_h1", "jamba", "gptj", "gemma3n", "apertus", "baichuan_m1", "kimi_linear", "recurrent_gemma", "rwkv7"),
    *("step3p5", "plamo2", "some_new_model"),
]
# Models with other names or values in mlx-lm.
KNOWN = [
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "mamba", "mamba2", "falcon_mamba", "nemotron_h"),
    *("granitemoe", "granitemoehybrid", "gpt2", "gpt_neox", "gemma3", "gemma4", "qwen2_5_vl"),
]


@pytest.fixture
def folder(tmp_path):
    def write(**values):
        path = tmp_path / "mlx"
        shutil.copytree(FIXTURE.folder, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **values}))
        return path

    return write


@pytest.mark.parametrize("model_type", CHANGED)
def test_a_folder_for_transformers_is_refused_by_name(model_type, folder, tmp_path):
    source = folder(model_type=model_type)
    for options in ({"dtype": "bfloat16"}, {"quantize": "q8_0"}, {"dtype": "float32", "resume": True}):
        with pytest.raises(safeload.UnsupportedError, match=f"does not store '{model_type}' as transformers does"):
            safeload.convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("model_type", KNOWN)
def test_tensors_that_mlx_lm_does_not_have_are_refused_by_name(model_type, folder, tmp_path):
    source = folder(model_type=model_type)
    for options in (
        {"dtype": "bfloat16"},
        {"quantize": "q8_0"},
        {"quantize": "w4a16"},
        {"dtype": "float32", "resume": True},
    ):
        with pytest.raises(
            safeload.SafeloadError, match=r"such tensor.*raw=True|no class of its own|config.json lacks"
        ):
            safeload.convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2", "olmo2"]
)
def test_models_that_are_stored_alike_are_converted(model_type, folder, tmp_path, caplog):
    safeload.convert(folder(model_type=model_type), tmp_path / "out", dtype="bfloat16")
    assert caplog.records == []


def test_values_of_mlx_are_loaded_copied_and_written_on_request(folder, tmp_path, caplog):
    source = folder(model_type="qwen3_5")
    assert safeload.load(source, dtype="float32").keys() == FIXTURE.expected().keys()
    safeload.convert(source, tmp_path / "copy")
    safeload.convert(source, tmp_path / "raw", dtype="float32", raw=True)
    assert caplog.records == []
    safeload.convert(source, tmp_path / "x.safetensors", dtype="float32")
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "the result has MLX's names and values" in record.getMessage()


def test_another_engine_gets_nothing_from_an_unquantized_mlx_folder(tmp_path):
    source = tmp_path / "mlx"
    source.mkdir()
    save_file({"model.w.weight": np.ones((128, 128), np.float32)}, source / "model.safetensors", {"format": "mlx"})
    (source / "config.json").write_text(json.dumps({"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}))
    with pytest.raises(safeload.UnsupportedError, match="does not store 'lfm2'"):
        safeload.convert(source, tmp_path / "out", quantize="w4a16", only="*")
    with pytest.raises(safeload.UnsupportedError, match="transformers has no such tensor"):
        safeload.convert(source, tmp_path / "out", dtype="float16")
    assert safeload.convert(source, tmp_path / "copy").tensors == 1  # still a folder for MLX


@pytest.mark.parametrize("scheme", ["mlx4", "mlx8", "mlx-mxfp4"])
@pytest.mark.parametrize("model_type", ["falcon_h1", "jamba", "rwkv7"])
def test_writing_for_mlx_is_refused_by_name(scheme, model_type, tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    save_file({"model.layers.0.w.weight": np.ones((128, 128), np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    for options in ({}, {"only": "*"}):
        with pytest.raises(safeload.UnsupportedError, match=f"'{model_type}'"):
            safeload.convert(source, tmp_path / "out", quantize=scheme, **options)


# ---- settings of MLX that are stray ----

STRAY = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    "name", ["fp8_block", "fp8_experts", "ct_fp8_channel", "ct_pack_w4_g32_sym", "bnb_nf4", "deepseek_v4"]
)
def test_stray_settings_do_not_make_a_folder_mlx(name, tmp_path):
    fixture, path = FIXTURES[name], tmp_path / "x"
    shutil.copytree(fixture.folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization": STRAY}))
    found, want = safeload.load(path, dtype="float32"), fixture.expected()
    assert found.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(found[key], array)
    assert "mlx" not in str(safeload.info(path)).lower()
