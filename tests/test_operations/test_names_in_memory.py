"""Models under the names that transformers 5 gives tensors in memory: whole, equal, and converted as published ones."""

import json
import re
import shutil

import numpy as np
import pytest
from builders import llama_models, mlx_models

import safeload
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

MODELS = llama_models.listed()
# What transformers 5.24 renames, besides stacking experts.
MIXTRAL = [(".block_sparse_moe.", ".mlp.")]
GRANITE = [
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
]
RENAMES = {
    "mixtral": MIXTRAL,
    "minimax_m2": MIXTRAL,
    "phimoe": [*MIXTRAL, (".gate.weight", ".router.weight")],
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granite_hybrid_moe": GRANITE,
    "ernie4_5_moe": [("mlp.moe_statics.", "mlp.gate.moe_statics.")],
    "gpt_neox": [("embed_out.", "lm_head.")],
    "nemotron_h_moe": [("backbone.", "model.")],
    "lfm2_moe": [],
    "qwen3_moe": [],
    "qwen3_next": [],
    "deepseek_v3": [],
    "olmoe": [],
}
EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(w1|w2|w3|gate_proj|down_proj|up_proj)\.weight")
MODULES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def in_memory(name, tensors):
    """The tensors of a model as transformers holds them."""
    result, stacks = {}, {}
    for key, array in tensors.items():
        for old, new in RENAMES[name]:
            key = key.replace(old, new)
        match = EXPERT.fullmatch(key)
        if match is None:
            result[key] = array
        else:
            stacks.setdefault((match[1], MODULES.get(match[3], match[3])), {})[int(match[2])] = array
    for (block, module), experts in stacks.items():
        stack = np.stack([experts[k] for k in range(len(experts))])
        if module == "gate_proj":
            up = stacks[block, "up_proj"]
            stack = np.concatenate([stack, np.stack([up[k] for k in range(len(up))])], axis=1)
            result[f"{block}.gate_up_proj"] = stack
        elif module == "down_proj" or (block, "gate_proj") not in stacks:
            result[f"{block}.{module}"] = stack
    return result


@pytest.fixture
def folders(tmp_path):
    """A function that writes a model under both names."""

    def write(name):
        tensors = llama_models.tensors_of(MODELS[name])
        both = {"older": tensors, "newer": in_memory(name, tensors)}
        assert both["older"].keys() != both["newer"].keys()
        return [llama_models.write_folder(tmp_path / kind, MODELS[name], own) for kind, own in both.items()]

    return write


def findings(source, **options):
    report = safeload.check(source, values=False, **options)
    return report.schema, [finding.code for finding in (*report.errors, *report.warnings, *report.notes)]


@pytest.mark.parametrize("name", RENAMES)
def test_both_are_whole_and_equal(name, folders):
    older, newer = folders(name)
    schema, codes = findings(older)
    assert schema is not None
    assert findings(newer) == (schema, codes)
    for a, b in ((older, newer), (newer, older)):
        report = safeload.diff(a, b)
        assert report.same
        assert (report.only_a, report.only_b) == ([], [])
        assert report.tensors


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "granitemoe", "nemotron_h_moe"])
def test_what_is_missing_or_has_another_shape_is_found_under_names_in_memory(name, folders):
    _, newer = folders(name)
    tensors = load_file(newer / "model.safetensors")
    changed = sorted(
        {re.sub("[0-9]+", "#", key): key for key in tensors if not MODELS[name]["tensors"].get(key)}.values()
    )
    assert changed
    config = MODELS[name]["config"]
    for key in changed:
        without = {other: array for other, array in tensors.items() if other != key}
        report = safeload.check(without, config=config, values=False)
        assert report.errors, key
        longer = {**tensors, key: np.zeros((*tensors[key].shape[:-1], tensors[key].shape[-1] + 1), np.float32)}
        codes = {
            (finding.code, finding.tensor) for finding in safeload.check(longer, config=config, values=False).errors
        }
        assert ("schema.shape", key) in codes


# Language models inside, and their names in files of models that transformers 5.24 writes by rules of the whole model.
INSIDE = {
    "Cosmos3OmniForConditionalGeneration": (
        "qwen3",
        [
            ("^model.", ""),
            ("self_attn.([qkv])_proj", r"self_attn.to_\1"),
            ("o_proj", "to_out"),
            ("([qk])_norm", r"norm_\1"),
        ],
    ),
    "Kimi_K25ForConditionalGeneration": ("deepseek_v3", [("^", "language_model."), (".layers.", ".blocks.")]),
    "QianfanOCRForConditionalGeneration": ("qwen3", [("^", "language_model."), (".layers.", ".encoder.layers.")]),
    "Nemotron3_5TranscribeForConditionalGeneration": (
        "nemotron_h",
        [
            *[("^backbone", "model"), ("^", "llm."), ("norm_f", "norm"), ("embeddings", "embed_tokens")],
            ("mixer.(A_log|D|dt_bias)", r"mixer._fp32_params.\1"),
        ],
    ),
}


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("architecture", INSIDE)
def test_language_models_inside_have_the_names_of_the_whole_model(architecture, wrapper):
    name, changes = INSIDE[architecture]
    text = {key: value for key, value in MODELS[name]["config"].items() if key != "architectures"}
    config = {"architectures": [architecture], "model_type": "whole", "text_config": text}
    tensors = {"vision.blocks.0.weight": np.ones((2, 2), np.float32)}
    for key, array in llama_models.tensors_of(MODELS[name]).items():
        for old, new in changes:
            key = re.sub(old, new, key, count=1)
        tensors[wrapper + key] = array
    report = safeload.check(tensors, config=config, values=False)
    assert (report.schema, report.compared) == (name, len(tensors) - 1)
    assert [x.code for x in (*report.errors, *report.warnings, *report.notes)] == ["schema.unchecked"]
    for key in {re.sub("[0-9]+", "#", key): key for key in tensors if key != "vision.blocks.0.weight"}.values():
        lost = {other: array for other, array in tensors.items() if other != key}
        missing = [x for x in safeload.check(lost, config=config, values=False).errors if x.code == "schema.missing"]
        # Without the embedding, the place of the language model is unknown; a model inside can have another head.
        assert len(missing) == (not key.endswith(("embed_tokens.weight", "lm_head.weight")))
        longer = {**tensors, key: np.zeros((*tensors[key].shape, 2), np.float32)}
        wrong = [(x.code, x.tensor) for x in safeload.check(longer, config=config, values=False).errors]
        assert wrong == [("schema.shape", key)]


@pytest.mark.parametrize("name", RENAMES)
def test_both_become_the_same_gguf(name, folders, tmp_path):
    pytest.importorskip("tokenizers")
    files = []
    for source in folders(name):
        safeload.convert(source, tmp_path / f"{source.name}.gguf")
        with safeload.open(tmp_path / f"{source.name}.gguf") as file:
            files.append({key: (x.dtype, x.shape, file.load([key])[key].tobytes()) for key, x in file.tensors.items()})
    assert files[0] == files[1]


@pytest.mark.parametrize("name", RENAMES)
def test_engines_get_published_names(name, folders, tmp_path):
    for source in folders(name):
        safeload.convert(source, tmp_path / f"{source.name}-fp8", quantize="fp8_dynamic")
    older, newer = (load_file(tmp_path / f"{kind}-fp8" / "model.safetensors") for kind in ("older", "newer"))
    # Transformers holds all tensors below another module here, which engines and their tables accept.
    newer = {key.replace("model.", "backbone.", 1) if name == "nemotron_h_moe" else key: x for key, x in newer.items()}
    assert older.keys() == newer.keys()
    assert all(older[key].tobytes() == newer[key].tobytes() for key in older)


@pytest.mark.parametrize("name", [name for name in RENAMES if name in mlx_models.expected()])
def test_both_become_the_same_folder_of_mlx(name, tmp_path):
    older = mlx_models.write(tmp_path / "older", name)
    newer = shutil.copytree(older, tmp_path / "newer")
    save_file(in_memory(name, load_file(older / "model.safetensors")), newer / "model.safetensors")
    format = next(format for format in mlx_models.expected()[name] if format != "mlx")
    results = []
    for source in (older, newer):
        safeload.convert(source, tmp_path / f"{source.name}-mlx", quantize=format)
        tensors = load_file(tmp_path / f"{source.name}-mlx" / "model.safetensors")
        results.append({key: (x.dtype, x.shape, x.tobytes()) for key, x in tensors.items()})
    assert results[0] == results[1]


def folder(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def numbers(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


W, V, IDS = numbers(4, 4), numbers(6, 4), np.arange(3)
UNKNOWN = {
    "renamed": (
        {"architectures": ["ViTModel"], "model_type": "vit_like"},
        {"encoder.layer.0.attention.attention.query.weight": W, "layernorm.weight": W[0], "ids": IDS},
        {"layers.0.attention.q_proj.weight": W, "layernorm.weight": W[0], "ids": IDS},
    ),
    "divided": (
        {"architectures": ["Dinov2Model"], "model_type": "dinov2"},
        {"encoder.layer.0.mlp.weights_in.weight": V, "encoder.layer.0.mlp.weights_out.weight": W},
        {
            "encoder.layer.0.mlp.gate_proj.weight": V[:3],
            "encoder.layer.0.mlp.up_proj.weight": V[3:],
            "encoder.layer.0.mlp.down_proj.weight": W,
        },
    ),
    "joined": (
        {"architectures": ["Molmo2TextModel"], "model_type": "molmo2_text"},
        {"wte.embedding": V, "wte.new_embedding": W, "ln_f.weight": W[0]},
        {"embed_tokens.weight": np.concatenate([V, W]), "ln_f.weight": W[0]},
    ),
    "language model": (
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"},
        {"language_model.model.norm.weight": W[0], "language_model.lm_head.weight": V, "vision_tower.x.weight": W},
        {"model.language_model.norm.weight": W[0], "lm_head.weight": V, "model.vision_tower.x.weight": W},
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_models_of_other_families_are_compared(case, tmp_path):
    config, older, newer = UNKNOWN[case]
    a, b = (folder(tmp_path / kind, config, own) for kind, own in (("a", older), ("b", newer)))
    for first, second in ((a, b), (b, a)):
        report = safeload.diff(first, second)
        assert report.same
        assert report.form == "names of transformers"
    changed = {**newer, next(iter(newer)): next(iter(newer.values())) + 1}
    report = safeload.diff(a, folder(tmp_path / "c", config, changed))
    assert [name for name, x in report.tensors.items() if x.unequal] == [next(iter(newer))]


def test_what_transformers_computes_stays_under_its_names(tmp_path):
    config = {"architectures": ["Molmo2TextModel"], "model_type": "molmo2_text"}
    older = {"layers.0.self_attn.att_proj.weight": V, "layers.0.self_attn.attn_out.weight": W}
    newer = {"layers.0.self_attn.q_proj.weight": W, "layers.0.self_attn.o_proj.weight": W}
    report = safeload.diff(folder(tmp_path / "a", config, older), folder(tmp_path / "b", config, newer))
    assert report.only_a == ["layers.0.self_attn.att_proj.weight"]
    assert report.only_b == ["layers.0.self_attn.q_proj.weight"]
    assert [*report.tensors] == ["layers.0.self_attn.o_proj.weight"]
