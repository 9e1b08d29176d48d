"""Folders for engines of models that no family knows: weights are chosen by name and shape."""

import json

import ml_dtypes
import numpy as np
import pytest
from builders.engine_models import described, matrix
from builders.inside import main
from builders.paths import DATA

import safeload
from safeload.errors import UnsupportedError
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.any_python

# What `model_free_ptq` of llmcompressor 0.14.0.1 with compressed-tensors 0.20.1 writes of the model below.
EXPECTED = json.loads((DATA / "engines/any_model.json").read_text())
RULE = "no family known for qwen9: every matrix but norms, embeddings, head, routers"
BF16 = ml_dtypes.bfloat16
HIDDEN, LAYER = 256, "model.layers.0."
MATRICES = {
    "model.embed_tokens.weight": (64, HIDDEN),
    "lm_head.weight": (64, HIDDEN),
    LAYER + "attn.Wqkv.weight": (384, HIDDEN),
    LAYER + "mixer.in_proj.weight": (512, HIDDEN),
    LAYER + "moe.gate.weight": (16, HIDDEN),
    LAYER + "moe.router.layer.weight": (16, HIDDEN),
    LAYER + "moe.shared_expert.up.weight": (128, HIDDEN),
}
KEPT = {
    "model.embed_tokens.weight": "is an embedding",
    "lm_head.weight": "is the head",
    LAYER + "moe.gate.weight": "is a router",
    LAYER + "moe.router.layer.weight": "is a router",
    LAYER + "norm.weight": "is a norm",
    LAYER + "mixer.conv1d.weight": "is 3-D, not 2-D",
    LAYER + "mixer.A_log": "is a buffer",
}
EXPERTS = LAYER + "moe.experts."
COUNT, WIDTH = 3, 128


def weights():
    result = {name: matrix(*shape, seed).astype(BF16) for seed, (name, shape) in enumerate(MATRICES.items())}
    result[LAYER + "norm.weight"] = np.ones(HIDDEN, BF16)
    result[LAYER + "mixer.conv1d.weight"] = np.ones((512, 1, 4), BF16)
    result[LAYER + "mixer.A_log"] = np.ones((64, 16), np.float32)
    return result


def experts():
    """Fused as in transformers, and one by one."""
    up = np.stack([matrix(2 * WIDTH, HIDDEN, 50 + k) for k in range(COUNT)]).astype(BF16)
    down = np.stack([matrix(HIDDEN, WIDTH, 90 + k) for k in range(COUNT)]).astype(BF16)
    apart = {}
    for k in range(COUNT):
        parts = {"gate_proj": up[k, :WIDTH], "up_proj": up[k, WIDTH:], "down_proj": down[k]}
        apart |= {f"{EXPERTS}{k}.{part}.weight": array.copy() for part, array in parts.items()}
    return {EXPERTS + "gate_up_proj": up, EXPERTS + "down_proj": down}, apart


def write(folder, tensors, **settings):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9", "torch_dtype": "bfloat16", **settings}
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **config}))
    return folder


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8_block", "nvfp4a16", "deepseek_fp8", "bnb_nf4"])
def test_every_matrix_with_few_exceptions_is_quantized(tmp_path, name):
    source = write(tmp_path / "source", weights())
    report = safeload.convert(source, tmp_path / "out", quantize=name)
    assert report.summary.quantized.keys() == MATRICES.keys() - KEPT.keys()
    assert report.summary.kept == KEPT
    assert report.summary.rule == RULE
    assert str(report).endswith(RULE)
    chosen = safeload.convert(source, tmp_path / "chosen", quantize=name, only=[*report.summary.quantized])
    assert chosen.summary.rule == ""
    ours, theirs = (described(tmp_path / folder / "model.safetensors") for folder in ("out", "chosen"))
    assert all(ours[key] == value for key, value in theirs.items())
    assert safeload.check(tmp_path / "out").ok
    pieces = safeload.convert(source, tmp_path / "pieces", quantize=name, resume=True)
    assert pieces.summary.rule == RULE
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "pieces" / path.name).read_bytes() == path.read_bytes()
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    left = {module for value in settings.values() if isinstance(value, list) for module in value}
    assert {"lm_head", f"{LAYER}moe.gate", f"{LAYER}moe.router.layer"} <= left
    alone = safeload.convert(source / "model.safetensors", tmp_path / "alone", quantize=name)
    assert alone.summary == report.summary


@pytest.mark.parametrize("resume", [False, True])
def test_fused_experts_are_divided_if_their_shapes_show_the_order(tmp_path, resume):
    fused, apart = experts()
    options = {"quantize": "w8a8", "max_shard_size": "150KB", "resume": resume}
    safeload.convert(write(tmp_path / "apart", {**weights(), **apart}), tmp_path / "expected", **options)
    safeload.convert(write(tmp_path / "fused", {**weights(), **fused}), tmp_path / "out", **options)
    ours, theirs = (
        {key: array for file in (tmp_path / name).glob("*.safetensors") for key, array in load_file(file).items()}
        for name in ("out", "expected")
    )
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key].view(np.uint8), theirs[key].view(np.uint8)) for key in ours if ours[key].ndim)


@pytest.mark.parametrize("name", EXPECTED)
def test_folders_hold_what_llm_compressor_writes(tmp_path, name):
    source = write(tmp_path / "source", {**weights(), **experts()[0]})
    safeload.convert(source, tmp_path / "out", quantize=name)
    assert described(tmp_path / "out/model.safetensors") == EXPECTED[name]


def test_fused_experts_in_another_order_are_refused_by_name(tmp_path):
    fused, _ = experts()
    turned = {name: np.ascontiguousarray(array.swapaxes(1, 2)) for name, array in fused.items()}
    source = write(tmp_path / "source", {**weights(), **turned})
    with pytest.raises(UnsupportedError, match=r"experts\.(gate_up_proj|down_proj)' is 3-D.*ignore="):
        safeload.convert(source, tmp_path / "out", quantize="w8a8")
    report = safeload.convert(source, tmp_path / "out", quantize="w8a8", ignore="*experts*")
    assert EXPERTS + "down_proj" in report.summary.kept


@pytest.mark.parametrize("name", ["w4a16-g32", "deepseek_fp8", "awq-g32"])
@pytest.mark.parametrize(
    ("class_name", "model_type", "stored", "loaded"),
    [
        ("GPTNeoXForCausalLM", "gpt_neox", "embed_out", "lm_head"),
        ("LlavaForConditionalGeneration", "llava", "language_model.lm_head", "lm_head"),
        (
            "LlavaForConditionalGeneration",
            "llava",
            "language_model.model.layers.0.self_attn.q_proj",
            "model.language_model.layers.0.self_attn.q_proj",
        ),
    ],
    ids=["head", "head of a part", "layer of a part"],
)
def test_unquantized_modules_have_the_names_of_transformers_too(tmp_path, name, class_name, model_type, stored, loaded):
    weights = {f"{module}.weight": matrix(128, HIDDEN, 1).astype(BF16) for module in (stored, "layers.0.dense")}
    source = write(tmp_path / "source", weights, architectures=[class_name], model_type=model_type)
    safeload.convert(source, tmp_path / "out", quantize=name, ignore=f"{stored}.weight")
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    left = {module for value in settings.values() if isinstance(value, list) for module in value}
    assert {stored, loaded} <= left


def test_parameters_that_are_no_weights_of_modules_stay_in_known_families_too(tmp_path):
    mixer = "backbone.layers.0.mixer."
    shapes = {f"{mixer}in_proj.weight": (1024, HIDDEN), f"{mixer}A_log": (512, 16)}
    tensors = {name: np.ones(shape, BF16) for name, shape in shapes.items()}
    settings = {"hidden_size": HIDDEN, "state_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "expand": 2}
    source = write(tmp_path / "source", tensors, architectures=["MambaForCausalLM"], model_type="mamba", **settings)
    report = safeload.convert(source, tmp_path / "out", quantize="w8a8")
    assert report.summary.quantized.keys() == {f"{mixer}in_proj.weight"}
    assert report.summary.kept[f"{mixer}A_log"] == "is a buffer"


def test_mlx_needs_a_family(tmp_path, capsys):
    source = write(tmp_path / "source", weights())
    for only in (None, "*"):  # no selection helps, so no message advises one
        with pytest.raises(UnsupportedError, match="mlx-lm does not store 'qwen9' as transformers does") as caught:
            safeload.convert(source, tmp_path / "out", quantize="mlx4", only=only)
        assert "only=" not in str(caught.value)
        assert ("does not support model_type 'qwen9'" in str(caught.value)) == (only is None)
    assert main(["convert", str(source), str(tmp_path / "out"), "--quantize", "fp8_dynamic"]) == 0
    assert RULE in capsys.readouterr().out
