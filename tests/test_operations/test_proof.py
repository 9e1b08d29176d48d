"""`check` with a source: losses and changes of a conversion are errors with their cause; right ones have none."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from builders import models
from builders.inside import main
from builders.llama_models import plain, tensors_of, write_folder
from builders.llama_quantize import save_imatrix
from builders.thorough import examples, part_of

import safeload
from safeload.numpy import load_file, save_file

UP_0, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
K, EMBEDDING = "model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"
Q, UP, NORM = "model.layers.1.self_attn.q_proj.weight", "mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


def faults(result, source, **options):
    """Code, tensor and message of each error about the source."""
    report = safeload.check(result, original=source, **options)
    return [(f.code, f.tensor, f.message) for f in report.errors if f.code.startswith("source.")]


@pytest.fixture
def moe(tmp_path):
    """A model with experts, of 4 heads."""
    return write_folder(tmp_path / "moe", plain()["mixtral"])


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", plain()["llama3"])


def interleaved(x, heads):
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def scaled(x, part, factor):
    changed = x.copy()
    changed[part] *= x.dtype.type(factor)
    return changed


def result_of(folder, changed, tmp_path, kind):
    """The result of a converter that made a mistake: of a source with the mistake."""
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    save_file(changed, wrong / "model.safetensors")
    if kind == "folder":
        return wrong
    scheme, _, name = kind.partition(" ")
    destination = tmp_path / (name or "wrong.gguf")
    safeload.convert(wrong, destination, quantize=None if scheme == "f16" else scheme)
    return destination


KINDS = ["folder", "f16", "q8_0", "q4_0", "mlx4-g32 mlx", "fp8_dynamic fp8", "w4a16-g32 packed", "awq-g32 awq"]


def changes(heads):
    """Planted damages: tensor, operation, part of the message."""
    return {
        "interleaved": (Q, lambda x: interleaved(x, heads), "rows are interleaved"),
        "norm": (NORM, lambda x: x + x.dtype.type(1), "values differ by exactly 1"),
        "random": (Q, lambda x: np.random.default_rng(3).permuted(x.ravel()).reshape(x.shape), "unrelated"),
        "zero": (Q, np.zeros_like, "all values are 0"),
        "sign": (Q, lambda x: -x, "values have the other sign"),
        "scale": (Q, lambda x: x * x.dtype.type(2), "values are 2 times the source's"),
        "transposed": ("model.layers.1.self_attn.o_proj.weight", lambda x: x.T.copy(), "is transposed"),
        "halves": (Q, lambda x: np.roll(x, len(x) // 2, axis=0), "the halves of the rows changed places"),
        "rows": (
            Q,
            lambda x: np.concatenate([x[:5] * x.dtype.type(0), x[5:]]),
            "5 of 64 rows differ, the first is row 0",
        ),
        "part of a row": (Q, lambda x: scaled(x, (3, slice(32)), 2), "1 of 64 rows differ"),
        "row": (Q, lambda x: scaled(x, 3, 1.6), "1 of 64 rows differ"),
        "constant": (UP_0, lambda x: np.full_like(x, 0.5), "all values are 0."),
        "half": (UP_0, lambda x: x * x.dtype.type(0.5), "values are 0."),
        "columns": (DOWN, lambda x: x[:, ::-1].copy(), "columns are in another order"),
        "order of rows": (UP_0, lambda x: np.roll(x, 1, axis=0), "rows are in another order"),
        "keys": (K, lambda x: interleaved(x, heads // 2), "rows are interleaved"),
        "sign of down": (DOWN, lambda x: -x, "values have the other sign"),
        "norm - 1": (NORM, lambda x: x - x.dtype.type(1), "values differ by exactly 1"),
        "norm of zeros": (NORM, np.zeros_like, "all values are 0"),
        "norm of ones": (NORM, np.ones_like, "all values are 1"),
        "norm * 3": (NORM, lambda x: x * x.dtype.type(3), "values are 3 times the source's"),
        "norm of NaN": (NORM, lambda x: np.full_like(x, np.nan), "64 values are NaN or infinite"),
        "embedding": (EMBEDDING, lambda x: np.roll(x, 1, axis=0), "rows are in another order"),
        "sign of embedding": (EMBEDDING, lambda x: -x, "values have the other sign"),
        "random embedding": (
            EMBEDDING,
            lambda x: np.random.default_rng(4).permuted(x.ravel()).reshape(x.shape),
            "unrelated",
        ),
        "zero embedding": (EMBEDDING, np.zeros_like, "all values are 0"),
    }


PLANTED = [(name, kind) for k, name in enumerate(changes(4)) for kind in part_of(KINDS, k, 3)]


@pytest.mark.parametrize(("name", "kind"), PLANTED)
def test_a_changed_tensor_is_found_with_its_cause(name, kind, llama, tmp_path):
    heads = json.loads((llama / "config.json").read_text())["num_attention_heads"]
    tensor, operation, cause = changes(heads)[name]
    tensors = load_file(llama / "model.safetensors")
    result = result_of(llama, {**tensors, tensor: operation(tensors[tensor])}, tmp_path, kind)
    [(code, subject, message)] = faults(result, llama)
    assert (code, subject) == ("source.changed", tensor)
    assert cause in message


@pytest.mark.parametrize("kind", ["folder", "f16", "q4_0"])
def test_rows_that_a_gguf_file_interleaves_twice_or_never_are_told(kind, llama, tmp_path):
    if kind == "folder":
        pytest.skip("only GGUF files have interleaved rows")
    heads = json.loads((llama / "config.json").read_text())["num_attention_heads"]
    tensors = load_file(llama / "model.safetensors")
    twice = result_of(llama, {**tensors, Q: interleaved(tensors[Q], heads)}, tmp_path, kind)
    assert [message for *_, message in faults(twice, llama)] == ["rows are interleaved twice"]
    back = tensors[Q].reshape(heads, -1, 2, tensors[Q].shape[1]).swapaxes(1, 2).reshape(tensors[Q].shape)
    shutil.rmtree(tmp_path / "wrong")
    twice.unlink()
    never = result_of(llama, {**tensors, Q: np.ascontiguousarray(back)}, tmp_path, kind)
    assert [message for *_, message in faults(never, llama)] == ["rows are not interleaved"]


@pytest.mark.parametrize("kind", ["folder", "f16", "q8_0", "q4_0"])
def test_experts_and_layers_that_changed_places_are_named(kind, moe, tmp_path):
    tensors = load_file(moe / "model.safetensors")
    changed = dict(tensors)
    pair = [f"model.layers.1.block_sparse_moe.experts.{k}.w1.weight" for k in (1, 3)]
    changed[pair[0]], changed[pair[1]] = tensors[pair[1]], tensors[pair[0]]
    layers = [f"model.layers.{k}.self_attn.v_proj.weight" for k in (0, 1)]
    changed[layers[0]], changed[layers[1]] = tensors[layers[1]], tensors[layers[0]]
    messages = {subject: message for _, subject, message in faults(result_of(moe, changed, tmp_path, kind), moe)}
    assert messages == {
        **dict.fromkeys(pair, "experts 1 and 3 changed places"),
        **dict.fromkeys(layers, "layers 0 and 1 changed places"),
    }


def test_what_is_missing_is_grouped(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    more = {f"mtp.layers.0.{name}.weight": np.ones((4, 4), np.float32) for name in ("q_proj", "k_proj")}
    result = shutil.copytree(llama, tmp_path / "result")
    save_file({**tensors, **more}, llama / "model.safetensors")
    assert faults(result, llama) == [("source.lost", "mtp.*", "is missing: 2 tensors of the source")]
    save_file({name: x for name, x in tensors.items() if name != NORM}, result / "model.safetensors")
    assert ("source.lost:one".partition(":")[0], NORM, "is missing, but the source has it") in faults(result, llama)
    save_file(tensors, llama / "model.safetensors")
    save_file({**tensors, "extra.weight": np.ones(4, np.float32)}, result / "model.safetensors")
    assert faults(result, llama) == [("source.more", "extra.weight", "is not in the source")]
    save_file({**tensors, NORM: np.ones(7, np.float32)}, result / "model.safetensors")
    assert [code for code, *_ in faults(result, llama)] == ["source.shape"]


def test_what_the_form_leaves_out_is_a_note(tmp_path):
    model = plain()["llama3"]
    scale = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    folder = write_folder(tmp_path / "m", model, {**tensors_of(model), **scale})
    safeload.convert(folder, tmp_path / "m.gguf")
    report = safeload.check(tmp_path / "m.gguf", original=folder)
    assert report.ok
    [note] = [note for note in report.notes if note.code == "source.left_out"]
    assert "scales of the KV cache" in note.message


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "fp8_dynamic", "fp8_block", "mlx4", "mlx8", "bnb_nf4", "bnb_fp4"])
def test_right_folders_are_not_accused(scheme, tmp_path, monkeypatch):
    name, sizes = models.SMALL["llama"]
    monkeypatch.setitem(models.SMALL, "llama", (name, {**sizes, "hidden_size": 128, "intermediate_size": 256}))
    (tmp_path / "m").mkdir()
    folder = models.write_folder(tmp_path / "m", *models.small("llama", np.float32))
    safeload.convert(folder, tmp_path / "q", quantize=scheme)
    assert faults(tmp_path / "q", folder) == []


RIGHT = ["llama3", "qwen3_moe", "falcon_h1", "gemma2", "mamba2", "gpt_oss", "phi3_long", "deepseek_v3"]
SCHEMES = [None, "q4_0", "q4_k_m", "q2_k", "iq4_xs"]


@pytest.mark.parametrize(
    ("name", "scheme"), [(name, scheme) for k, name in enumerate(RIGHT) for scheme in part_of(SCHEMES, k, 2)]
)
def test_right_gguf_files_are_not_accused(name, scheme, tmp_path):
    folder = write_folder(tmp_path / name, plain()[name])
    safeload.convert(folder, tmp_path / "m.gguf", quantize=scheme)
    assert faults(tmp_path / "m.gguf", folder) == []
    if scheme is None:  # and back
        safeload.convert(tmp_path / "m.gguf", tmp_path / "back")
        assert faults(tmp_path / "back", tmp_path / "m.gguf") == []
        if name != "falcon_h1":  # its multipliers are rounded into the weights
            assert faults(tmp_path / "back", folder) == []


def test_codes_of_four_bits_in_bytes_are_judged_by_their_bits(tmp_path):
    """llm-compressor's W4AFP8 is "int-quantized": integers of 4 bits in bytes."""
    name, weights = "model.layers.0.mlp.up_proj", np.float32(np.random.default_rng(0).standard_normal((8, 256)))
    scales = np.abs(weights).reshape(8, 2, 128).max(axis=2) / 7.5
    codes = np.rint(weights / np.repeat(scales, 128, axis=1)).clip(-8, 7).astype(np.int8)
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown", "quantization_config": config}))
    wrong = codes.copy()
    wrong[3, 128:] *= -1
    for stored, expected in ((codes, []), (wrong, ["1 of 8 rows differ, the first is row 3"])):
        save_file({f"{name}.weight": stored, f"{name}.weight_scale": scales}, tmp_path / "model.safetensors")
        assert [text for *_, text in faults(tmp_path, {f"{name}.weight": weights})] == expected


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_scales_that_are_codes_are_not_accused(kind, tmp_path):
    """bitsandbytes rounds scales to the steps of the largest of 256, so blocks with a small one move further."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((64, 256), np.float32) * np.exp(rng.standard_normal((64, 1), np.float32))
    config = {"model_type": "unknown", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    save_file({UP_0: weights}, tmp_path / "m" / "model.safetensors")
    safeload.convert(tmp_path / "m", tmp_path / "q", quantize=f"bnb_{kind}")
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    tensors = dict(load_file(tmp_path / "q" / "model.safetensors"))
    scales = tensors[f"{UP_0}.absmax"]
    steps = [10.0 ** (k - 6) * (0.1 + 0.9 * (np.arange(2**k) + 0.5) / 2**k) for k in range(7)]
    table = np.sort(np.float32([*np.concatenate(steps), *-np.concatenate(steps), 0, 1]))
    offset = float(scales.mean())
    largest = np.abs(scales - offset).max()
    codes = np.abs((scales - offset)[:, None] / largest - table).argmin(axis=1).astype(np.uint8)
    name = f"{UP_0}.quant_state.bitsandbytes__{kind}"
    state = {**json.loads(tensors[name].tobytes()), "nested_blocksize": 256, "nested_offset": offset}
    tensors |= {
        name: np.frombuffer(json.dumps(state).encode(), np.uint8),
        f"{UP_0}.nested_absmax": np.float32([largest]),
        f"{UP_0}.nested_quant_map": table,
    }
    wrong = codes.copy()
    wrong[:4] = 255
    for each, expected in ((codes, []), (wrong, ["4 of 64 rows differ, the first is row 0"])):
        save_file({**tensors, f"{UP_0}.absmax": each}, tmp_path / "q" / "model.safetensors")
        assert [text for *_, text in faults(tmp_path / "q", tmp_path / "m")] == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_casts_are_not_accused(dtype, llama, tmp_path):
    safeload.convert(llama, tmp_path / "cast", dtype=dtype)
    assert faults(tmp_path / "cast", llama) == []


def test_importance_matrices_are_not_accused(llama, tmp_path):
    safeload.convert(llama, tmp_path / "plain.gguf", dtype="float32")
    save_imatrix(tmp_path / "imatrix.gguf", safeload.load(tmp_path / "plain.gguf"))
    for scheme in ("q4_0", "q4_k_m", "iq4_xs"):
        safeload.convert(llama, tmp_path / f"{scheme}.gguf", quantize=scheme, imatrix=tmp_path / "imatrix.gguf")
        assert faults(tmp_path / f"{scheme}.gguf", llama) == []


# ---- settings ----


def changed_json(path, *keys_and_value):
    content = json.loads(path.read_text())
    *keys, last, value = keys_and_value
    holder = content
    for key in keys:
        holder = holder[key]
    holder[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["folder", "fp8_dynamic fp8", "mlx4-g32 mlx"])
def test_another_config_or_tokenizer_of_a_folder_is_found(kind, llama, tmp_path):
    result = result_of(llama, load_file(llama / "model.safetensors"), tmp_path, kind)
    assert faults(result, llama) == []
    changed_json(result / "config.json", "rms_norm_eps", 0.5)
    config = json.loads((llama / "config.json").read_text())
    older = {**config.pop("rope_parameters"), "factor": 31.0}  # of transformers 4, which has the base outside
    older = {"rope_theta": older.pop("rope_theta"), "rope_scaling": older}
    (result / "config.json").write_text(json.dumps({**json.loads((result / "config.json").read_text()), **older}))
    changed_json(result / "config.json", "rope_parameters", None)
    changed_json(result / "config.json", "torch_dtype", "float8")  # says how values are stored, not which
    tokenizer = json.loads((result / "tokenizer.json").read_text())
    *_, first, second = tokenizer["model"]["vocab"]
    changed_json(result / "tokenizer.json", "model", "vocab", second, tokenizer["model"]["vocab"][first])
    changed_json(result / "tokenizer.json", "model", "merges", tokenizer["model"]["merges"][1:])
    changed_json(result / "tokenizer.json", "added_tokens", 0, "content", "<|other|>")
    assert {code for code, *_ in faults(result, llama)} == {"source.setting"}
    messages = [message for *_, message in faults(result, llama)]
    config = json.loads((llama / "config.json").read_text())
    merges, added = len(tokenizer["model"]["merges"]), tokenizer["added_tokens"][0]
    number = tokenizer["model"]["vocab"][second]
    assert set(messages) == {
        f"config.json: rms_norm_eps is 0.5, but {config['rms_norm_eps']} in the source",
        f"config.json: factor is 31.0, but {config['rope_parameters']['factor']} in the source",
        f"tokenizer.json: vocab[{second!r}] is {number - 1}, but {number} in the source",
        f"number of tokenizer.json: merges is {merges - 1}, but {merges} in the source",
        f"tokenizer.json: added token {added['id']} is '<|other|>', but {added['content']!r} in the source",
    }


def test_other_metadata_of_a_gguf_file_is_found_both_ways(llama, tmp_path, capsys):
    safeload.convert(llama, tmp_path / "m.gguf")
    with safeload.edit(tmp_path / "m.gguf") as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
        tokens[7], expected = "other", tokens[7]
        file.metadata["tokenizer.ggml.tokens"] = tokens
        file.metadata["llama.rope.freq_base"] = np.float32(10000)
        file.metadata["llama.attention.head_count_kv"] = np.uint32(3)
        del file.metadata["llama.attention.layer_norm_rms_epsilon"]
        file.metadata["general.name"] = "another name"
    settings = {
        "llama.rope.freq_base": ("10000.0", "500000.0"),
        "llama.attention.head_count_kv": ("3", "2"),
        "tokenizer.ggml.tokens[7]": ("'other'", repr(expected)),
    }
    missing = "llama.attention.layer_norm_rms_epsilon is missing, but 1e-06 in the source"
    texts = {f"{key} is {a}, but {b} in the source" for key, (a, b) in settings.items()}
    assert {message for *_, message in faults(tmp_path / "m.gguf", llama)} == texts | {missing}
    texts = {f"{key} is {b}, but {a} in the source" for key, (a, b) in settings.items()}
    assert {message for *_, message in faults(llama, tmp_path / "m.gguf")} == texts
    asked = ["--metadata", "llama.context_length=7", "--overwrite", "--check-result"]
    assert main(["convert", str(llama), str(tmp_path / "m.gguf"), *asked]) == 0
    capsys.readouterr()


def test_settings_that_cannot_be_compared_are_a_note(llama, tmp_path):
    safeload.convert(llama, tmp_path / "m.gguf")
    (llama / "tokenizer.json").unlink()
    report = safeload.check(tmp_path / "m.gguf", original=llama)
    assert report.ok
    assert "settings and tokenizer were not compared: " in [f.message for f in report.notes][-1]


# ---- calibrated writers ----


def on_grid(x, bits, scale):
    top = 2 ** (bits - 1) - 1
    return np.clip(np.round(x / scale), -top - 1, top) * scale


def by_gptq(weights, inputs, bits, group=128):
    """Frantar et al., algorithm 1: columns are rounded in turn, and the rest makes up for the error."""
    hessian = 2 * inputs.T @ inputs
    hessian += np.eye(len(hessian)) * 0.01 * np.diag(hessian).mean()
    inverse = np.linalg.cholesky(np.linalg.inv(hessian)).T
    weights, result = weights.astype(np.float64), np.zeros(weights.shape)
    for column in range(weights.shape[1]):
        if column % group == 0:
            scale = np.abs(weights[:, column : column + group]).max(axis=1) / (2 ** (bits - 1) - 1)
        result[:, column] = on_grid(weights[:, column], bits, scale)
        error = (weights[:, column] - result[:, column]) / inverse[column, column]
        weights[:, column:] -= np.outer(error, inverse[column, column:])
    return result.astype(np.float32)


def by_awq(weights, inputs, bits, group=128):
    """Lin et al.: columns with large inputs are multiplied before they are rounded, and divided after that."""
    factor = np.abs(inputs).mean(axis=0) ** 0.5
    factor /= np.sqrt(factor.max() * factor.min())
    blocks = (weights * factor).reshape(len(weights), -1, group)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / (2 ** (bits - 1) - 1)
    return np.float32(on_grid(blocks, bits, scale).reshape(weights.shape) / factor)


def damages(x, rng):
    """One block of a row: zeros, values of another block, the other sign, a scale that is twice as large."""
    for damage in (np.zeros_like, lambda block: rng.permuted(block), np.negative, lambda block: 2 * block):
        changed = x.copy()
        changed[7, 128:256] = damage(x[7, 128:256])
        yield changed


@pytest.mark.parametrize("writer", [by_gptq, by_awq])
@pytest.mark.parametrize("seed", range(examples(4)))
def test_one_damaged_block_of_a_calibrated_matrix_is_found(writer, seed, tmp_path):
    random = np.random.default_rng(seed)
    weights = np.float32(random.standard_t(6, (96, 1024)) * 0.02)
    inputs = random.standard_normal((2048, 64)) @ random.standard_normal((64, 1024))
    inputs = (inputs + random.standard_normal(inputs.shape) * 2) * np.exp(random.standard_normal(1024) * 0.7)
    name, quantized = "model.layers.0.mlp.up_proj.weight", writer(weights, inputs, 4)

    def changed(values):
        (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
        save_file({name: values}, tmp_path / "values.safetensors")
        safeload.convert(tmp_path / "values.safetensors", tmp_path / "out", quantize="w4a16", only="*", overwrite=True)
        report = safeload.check(tmp_path / "out", original={name: weights})
        assert report.ok == (not report.errors)
        return [f.message for f in report.errors if f.code == "source.changed"]

    assert changed(quantized) == []
    for damaged in damages(quantized, random):
        assert changed(damaged) == ["values of row 7 differ in columns 128 to 255"]


def smoothed(tensors, undone=(True,) * 6):
    """What AWQ and SmoothQuant do before they round: factors from norms, and from rows of up_proj, to columns."""
    rng, result = np.random.default_rng(5), {name: x.astype(np.float32) for name, x in tensors.items()}
    inputs = {"input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
    inputs["post_attention_layernorm"] = ["mlp.gate_proj", "mlp.up_proj"]
    for layer in ("model.layers.0.", "model.layers.1."):
        wanted = iter(undone)
        for norm, readers in inputs.items():
            factors = np.exp(rng.standard_normal(64) * 0.4).astype(np.float32)
            result[f"{layer}{norm}.weight"] /= factors
            for name in (f"{layer}{reader}.weight" for reader in readers):
                result[name] = result[name] * factors if next(wanted) else result[name]
        factors = np.exp(rng.standard_normal(96) * 0.4).astype(np.float32)
        result[f"{layer}mlp.up_proj.weight"] /= factors[:, None]
        result[f"{layer}mlp.down_proj.weight"] *= factors if next(wanted) else 1
    return {name: x.astype(tensors[name].dtype) for name, x in result.items()}


# Factors that are estimated from 32 rows of 4 bits are too coarse, but for scales of f16.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("mlx4", "w4a16", "awq"))])
def test_factors_that_other_tensors_undo_are_a_note(kind, llama, tmp_path):
    result = result_of(llama, smoothed(load_file(llama / "model.safetensors")), tmp_path, kind)
    report = safeload.check(result, original=llama)
    assert not [f for f in report.errors if f.code.startswith("source.")]
    (note,) = [f for f in report.notes if f.code == "source.rescaled"]
    assert note.message == "factors of 16 tensors are undone by other tensors, as after AWQ or SmoothQuant"


@pytest.mark.parametrize(("lost", "kind"), [(lost, kind) for lost in range(6) for kind in part_of(KINDS, lost, 3)])
def test_factors_that_a_tensor_does_not_undo_are_found(lost, kind, llama, tmp_path):
    undone = tuple(k != lost for k in range(6))
    result = result_of(llama, smoothed(load_file(llama / "model.safetensors"), undone), tmp_path, kind)
    found = {tensor for _, tensor, _ in faults(result, llama)}
    norms = ["input_layernorm"] * 3 + ["post_attention_layernorm"] * 2 + ["mlp.up_proj"]
    assert f"model.layers.0.{norms[lost]}.weight" in found


def scaled_by_norm(norm, factor, random, offset=0.0):
    """A norm and a matrix, and both after the matrix's columns were multiplied by factors, and the norm divided."""
    factors = np.where(np.arange(256) % 2, np.float32(factor), np.float32(1))
    norms = {f"model.layers.0.{norm}.weight": np.float32(random.standard_normal(256) * 0.2 + 1 - offset)}
    before = {"model.layers.0.mlp.up_proj.weight": np.float32(random.standard_normal((512, 256)))} | norms
    after = {name: x * factors if x.ndim == 2 else (x + offset) / factors - offset for name, x in before.items()}
    return before, {name: np.float32(x) for name, x in after.items()}


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("factor", [1.15, 1.5])
def test_factors_are_undone_in_norms_from_1_and_in_codes_that_look_calibrated(factor, offset, tmp_path):
    before, after = scaled_by_norm("input_layernorm", factor, np.random.default_rng(0), offset)
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    save_file(after, tmp_path / "model.safetensors")
    safeload.convert(tmp_path, tmp_path / "out", quantize="w4a16")
    assert faults(tmp_path / "out", before) == []
    after["model.layers.0.mlp.up_proj.weight"] = before["model.layers.0.mlp.up_proj.weight"]
    save_file(after, tmp_path / "model.safetensors")
    safeload.convert(tmp_path, tmp_path / "wrong", quantize="w4a16")
    assert [tensor for _, tensor, _ in faults(tmp_path / "wrong", before)] == ["model.layers.0.input_layernorm.weight"]


def test_a_norm_that_no_matrix_reads_undoes_nothing(tmp_path):
    """GPTQModel 7.7 divides the norm of Gemma 2's attention by factors of the feed-forward, which reads another one."""
    before, after = scaled_by_norm("post_attention_layernorm", 1.5, np.random.default_rng(0), 1)
    save_file(after, tmp_path / "model.safetensors")
    assert faults(tmp_path, before) == []
    others = dict.fromkeys(("model.layers.0.post_feedforward_layernorm.weight",), np.zeros(256, np.float32))
    save_file(after | others, tmp_path / "model.safetensors")
    assert {tensor for _, tensor, _ in faults(tmp_path, before | others)} == before.keys()


def test_norms_that_were_rounded_as_sums_with_1_are_not_accused(tmp_path):
    norm = (np.random.default_rng(0).standard_normal(256) * 0.2).astype(ml_dtypes.bfloat16)
    rounded = (norm + norm.dtype.type(1)) - norm.dtype.type(1)
    assert (rounded != norm).any()
    save_file({"model.norm.weight": rounded, "model.bias": norm}, tmp_path / "model.safetensors")
    assert faults(tmp_path, {"model.norm.weight": norm, "model.bias": norm}) == []
    assert len(faults(tmp_path, {"model.norm.weight": norm, "model.bias": rounded})) == 1


def adapter_of(llama, folder, scale=1.0):
    """A LoRA adapter of a projection."""
    folder.mkdir()
    columns = load_file(llama / "model.safetensors")[Q].shape[1]
    rng = np.random.default_rng(0)
    name = f"base_model.model.{Q.removesuffix('.weight')}"
    rows = load_file(llama / "model.safetensors")[Q].shape[0]
    save_file(
        {
            f"{name}.lora_A.weight": rng.standard_normal((4, columns)).astype(np.float32),
            f"{name}.lora_B.weight": (rng.standard_normal((rows, 4)) * scale).astype(np.float32),
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("destination", ["merged", "merged.gguf"])
def test_adapters_are_merged_into_the_source(destination, llama, tmp_path):
    adapter = adapter_of(llama, tmp_path / "lora")
    safeload.convert(llama, tmp_path / destination, adapters=adapter)
    assert faults(tmp_path / destination, llama, adapters=adapter) == []
    assert [(code, tensor) for code, tensor, _ in faults(tmp_path / destination, llama)] == [("source.changed", Q)]
    safeload.convert(llama, tmp_path / f"dropped-{destination}")
    dropped = faults(tmp_path / f"dropped-{destination}", llama, adapters=adapter)
    assert [(code, tensor) for code, tensor, _ in dropped] == [("source.changed", Q)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "awq-g32 awq"])
def test_adapters_that_rounding_hides_are_counted(kind, llama, tmp_path):
    """The change is smaller than the steps of 4 bits."""
    adapter = adapter_of(llama, tmp_path / "lora", 0.01)
    for times, start in {
        1: None,
        0: "the adapter is not merged",
        2: "the adapter is merged ",
        0.5: "the adapter is merged ",
    }.items():
        scaled = shutil.copytree(adapter, tmp_path / f"{times}")
        changed_json(scaled / "adapter_config.json", "lora_alpha", 4 * times)
        safeload.convert(llama, scaled / "merged", adapters=scaled, dtype="float32")
        result = result_of(llama, load_file(scaled / "merged" / "model.safetensors"), scaled, kind)
        found = [(tensor, message) for _, tensor, message in faults(result, llama, adapters=adapter)]
        assert [tensor for tensor, _ in found] == ([] if start is None else [Q])
        for _, message in found:
            assert message.startswith(start)
            assert times == 0 or abs(float(message.split()[-2]) - times) < 0.1


def test_the_commands_fail_on_what_changed(llama, tmp_path, capsys):
    adapter = adapter_of(llama, tmp_path / "lora")
    assert main(["convert", str(llama), str(tmp_path / "m.gguf"), "--quantize", "q4_0", "--check-result"]) == 0
    assert "compared with the source: no errors" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "m.gguf"), "--source", str(llama)]) == 0
    assert main(["check", str(tmp_path / "m.gguf"), "--source", str(llama), "--adapter", str(adapter)]) == 1
    assert f"error    {Q}" in capsys.readouterr().out
    for arguments in (["--only", "x"], ["--raw"], ["--rename", "a", "b"]):
        assert main(["convert", str(llama), str(tmp_path / "n.gguf"), "--check-result", *arguments]) == 2
    assert main(["check", str(llama), "--adapter", str(adapter)]) == 2
    assert not (tmp_path / "n.gguf").exists()


def test_a_container_of_the_result_is_compared(data, tmp_path, capsys):
    result = data / "torch" / "checkpoint.pt"
    safeload.convert(safeload.open(result, root="model_state_dict"), tmp_path / "m.safetensors")
    arguments = ["check", str(result), "--source", str(tmp_path / "m.safetensors")]
    assert main([*arguments, "--root", "model_state_dict"]) == 0
    assert main(arguments) == 1
    capsys.readouterr()


def test_a_source_of_another_model_is_an_error(llama, tmp_path):
    gpt2 = write_folder(tmp_path / "gpt2", plain()["gpt2"])
    safeload.convert(llama, tmp_path / "m.gguf")
    [(code, _, message)] = faults(tmp_path / "m.gguf", gpt2)
    assert code == "source.form"
    assert "is gpt2 in llama.cpp" in message


def test_wrong_arguments_are_refused(llama):
    with pytest.raises(ValueError, match="adapters= belongs to original="):
        safeload.check(llama, adapters="lora")
    with pytest.raises(ValueError, match="original= requires a checkpoint"):
        safeload.check(np.ones(3), original=llama)


def test_a_single_bit_of_a_large_scale_is_found(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    changed = tensors[Q].copy()
    changed[7, 9] = ml_dtypes.bfloat16(40)
    [(_, subject, message)] = faults(result_of(llama, {**tensors, Q: changed}, tmp_path, "q8_0"), llama)
    assert subject == Q
    assert "1 of 64 rows differ, the first is row" in message
