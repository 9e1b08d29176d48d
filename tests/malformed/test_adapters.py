"""LoRA adapters with one fault each: refused with an error that names file and tensor, whatever is asked of them."""

import json

import numpy as np
import pytest
from builders.adapters import PREFIX, pair, write
from builders.inside import main

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

F32 = np.float32
GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


@pytest.fixture
def base(tmp_path):
    weights = {
        "w.weight": np.ones((6, 5), F32),
        "w.bias": np.ones(6, F32),
        "c.weight": np.ones((6, 5, 3), F32),
        "m.experts": np.ones((3, 6, 5), F32),
        "n": np.ones((), F32),
    }
    save_file(weights, tmp_path / "base.safetensors", durable=False)
    return tmp_path / "base.safetensors"


def assert_refused(base, adapter, words, capsys):
    """By each function, and in info, which says it and goes on."""
    for call in (
        lambda: safeload.load(base, adapters=adapter),
        lambda: safeload.convert(base, base.parent / "out.safetensors", adapters=[(adapter, 0.5)]),
    ):
        with pytest.raises(safeload.SafeloadError) as caught:
            call()
        text = str(caught.value)
        assert all(word in text for word in words), text
        assert text.isprintable()
        assert len(text) < 1500
    assert not (base.parent / "out.safetensors").exists()
    assert main(["info", str(adapter)]) == 0
    assert main(["info", str(adapter), "--base", str(base)]) == 1
    said = "".join(capsys.readouterr())
    assert all(word in said for word in words), said


def deep(count):
    return '{"peft_type": "LORA", "x": ' + "[" * count + "]" * count + "}"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"", ["is not JSON"]),
        (b"\xff\xfe{}", ["adapter_config.json"]),
        (b"[]", ["must be a JSON object, got list"]),
        (b'{"peft_type": "LORA", "peft_type": "LORA"}', ["duplicate key 'peft_type'"]),
        (deep(100_000).encode(), ["adapter_config.json"]),
        (b'{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}', ["adapter_config.json"]),
        (b'{"peft_type": "LORA", "r": 2, "lora_alpha": 1e999}', ["adapter_config.json"]),
        ({}, ['there is no "peft_type"']),
        ({"peft_type": ["LORA"]}, ["\"peft_type\" is ['LORA']"]),
        ({**GOOD, "r": "2"}, ['"r" must be a positive integer', "'2'"]),
        ({**GOOD, "r": 2.0}, ['"r" must be a positive integer', "2.0"]),
        ({**GOOD, "r": None}, ['"r" must be a positive integer', "None"]),
        ({**GOOD, "r": 1 << 40}, ['"r" must be a positive integer']),
        ({**GOOD, "lora_alpha": "4"}, ['"lora_alpha" must be a number', "'4'"]),
        ({**GOOD, "lora_alpha": [4]}, ['"lora_alpha" must be a number']),
        ({**GOOD, "lora_alpha": 1e200}, ['"lora_alpha" must be a number']),
        ({**GOOD, "use_dora": 0}, ['"use_dora" must be true or false']),
        ({**GOOD, "fan_in_fan_out": "false"}, ['"fan_in_fan_out" must be true or false']),
        ({**GOOD, "rank_pattern": ["w"]}, ['"rank_pattern" must map patterns to numbers']),
        ({**GOOD, "rank_pattern": {"w": "2"}}, ['"w" must be a positive integer']),
        ({**GOOD, "alpha_pattern": {"w": None}}, ['"w" must be a number']),
        ({**GOOD, "alpha_pattern": {"(w+)+(?=x)": 3}}, ["alpha_pattern", "(w+)+(?=x)"]),
        ({**GOOD, "alpha_pattern": {"(" * 999: 3}}, ["alpha_pattern"]),
        ({**GOOD, "target_parameters": {"experts": 1}}, ['"target_parameters" must be a list of names']),
        ({**GOOD, "target_parameters": ["m.experts", 3]}, ['"target_parameters" must be a list of names']),
        ({**GOOD, "target_parameters": [""]}, ['"target_parameters" must be a list of names']),
        ({**GOOD, "modules_to_save": "lm_head"}, ['"modules_to_save" must be a list of names', "'lm_head'"]),
        ({**GOOD, "modules_to_save": [None]}, ['"modules_to_save" must be a list of names']),
        ({**GOOD, "ensure_weight_tying": "yes"}, ["ensure_weight_tying"]),
        ({**GOOD, "target_parameters": [f"x{k}" for k in range(10_001)]}, ["more than 10,000 names"]),
        ({"fine_tune_type": "full"}, ["got 'full'"]),
        ({"lora_parameters": 3}, ['"lora_parameters" must be an object']),
        ({"lora_parameters": {"scale": "20"}}, ['"scale" must be a number']),
    ],
)
def test_configurations(config, words, base, tmp_path, capsys):
    adapter = write(tmp_path / "a", pair())
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (adapter / "adapter_config.json").write_bytes(text)
    assert_refused(base, adapter, words, capsys)


def without(tensors, end):
    return {name: value for name, value in tensors.items() if not name.endswith(end)}


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (without(pair(), "lora_B.weight"), {}, ["w.lora_A.weight", "has no counterpart"]),
        (without(pair(), "lora_A.weight"), {}, ["w.lora_B.weight", "has no counterpart"]),
        ({"w.lora_B.bias": np.ones(6, F32)}, {}, ["w.lora_B.bias", "has no counterpart"]),
        (pair(rank=3), {}, ["has rank 3", "says 2"]),
        ({**pair(), "w.lora_B.weight": np.ones((6, 3), F32)}, {}, ["w.lora_B.weight", "[6, 3]", "needs [6, 2]"]),
        (pair(rank=0), {}, ["has rank 0"]),
        ({**pair(), "w.lora_A.weight": np.ones((), F32)}, {}, ["w.lora_A.weight", "is []", "two axes"]),
        ({**pair(), "w.lora_A.weight": np.ones(10, F32)}, {}, ["w.lora_A.weight", "[10]", "two axes"]),
        ({**pair(), "w.lora_B.weight": np.ones((6, 2, 1), F32)}, {}, ["w.lora_B.weight", "[6, 2, 1]"]),
        ({**pair(), "w.lora_A.weight": np.ones((2, 5), np.int32)}, {}, ["w.lora_A.weight", "I32", "floating"]),
        ({**pair(), "w.lora_A.weight": np.ones((2, 5), np.complex64)}, {}, ["w.lora_A.weight", "C64", "floating"]),
        ({**pair(module="w.bias")}, {}, ["w.bias.weight", "does not have"]),
        ({**pair(6, 5, module="c")}, {}, ["c.lora_A.weight", "[2, 5]", "[6, 5, 3]", "needs [2, 5, 3]"]),
        (pair(module="../../etc"), {}, ["'../../etc.weight'", "does not have"]),
        (pair(module="/etc/passwd"), {}, ["'/etc/passwd.weight'", "does not have"]),
        (pair(module=""), {}, ["'.weight'", "does not have"]),
        (pair(module="w\x1b[31m"), {}, ["\\x1b[31m", "does not have"]),
        (pair(module="w" * 500), {}, ["does not have"]),
        (pair(module=".base_layer" * 500), {"target_parameters": ["experts"]}, ["does not have"]),
        ({"lora_A.weight": np.ones((2, 5), F32)}, {}, ["lora_A.weight", "a method other than LoRA"]),
        ({"": np.ones(3, F32)}, {}, [f"'{PREFIX}'", "does not have"]),
        ({"n.lora_A.weight": np.ones((2, 5), F32), **pair(module="n")}, {}, ["n.weight", "does not have"]),
        ({"w.modules_to_save.w.bias": np.ones(5, F32)}, {}, ["does not have"]),
        ({**pair(), "w.modules_to_save.base_layer.bias": np.ones(5, F32)}, {}, ["[5]", "w.bias", "[6]"]),
        ({**pair(), "w.lora_B.bias": np.ones((), F32)}, {"lora_bias": True}, ["w.lora_B.bias", "is []"]),
        ({**pair(), "w.lora_magnitude_vector": np.ones(5, F32)}, {"use_dora": True}, ["[5]", "6 norms"]),
        (
            {**pair(), "w.lora_magnitude_vector": np.ones(6, F32), "w.lora_magnitude_vector.weight": np.ones(6, F32)},
            {"use_dora": True},
            ["lora_magnitude_vector.weight", "the same part of one module"],
        ),
        (pair(rank=7, module="m"), {"target_parameters": ["m.experts"]}, ["m.lora_A.weight", "multiple of 3 rows"]),
        (pair(rank=0, module="m"), {"target_parameters": ["m.experts"]}, ["has rank 0"]),
        (pair(5, 7, rank=6, module="m"), {"target_parameters": ["experts"]}, ["m.lora_A.weight", "needs [6, 5]"]),
    ],
)
def test_tensors(tensors, config, words, base, tmp_path, capsys):
    assert_refused(base, write(tmp_path / "a", tensors, **config), words, capsys)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"])
def test_values_that_are_not_finite_are_named(part, value, base, tmp_path, caplog):
    """`check` has an error, with and without a base; a merge warns."""
    extra = {"lora_B.bias": {"lora_bias": True}, "lora_magnitude_vector": {"use_dora": True}}.get(part, {})
    parts = pair()
    parts.update({f"w.{part}": np.ones(6, F32)} if extra else {})
    parts[f"w.{part}"] = parts[f"w.{part}"].copy()
    parts[f"w.{part}"].flat[3] = value
    adapter = write(tmp_path / "a", parts, **extra)
    name, index = f"{PREFIX}w.{part}", [*map(int, np.unravel_index(3, parts[f"w.{part}"].shape))]
    for options in ({}, {"base": base}):
        (error,) = safeload.check(adapter, **options).errors
        assert (error.tensor, error.code) == (name, "value.nan" if np.isnan(value) else "value.inf")
        assert f"the first at {index}" in error.message
    for merge in (safeload.load, lambda source, **more: safeload.convert(source, tmp_path / "m.safetensors", **more)):
        caplog.clear()
        merge(base, adapters=adapter)
        (record,) = caplog.records
        assert f"tensor '{name}' of the adapter has a NaN or an infinity at {index}" in record.getMessage()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_values_that_are_not_numbers_are_merged_as_they_are(value, base, tmp_path):
    """They are values as any other; no warning of numpy's comes of them."""
    parts = {**pair(), "w.lora_magnitude_vector": np.full(6, value, F32)}
    parts["w.lora_B.weight"][0] = value
    merged = safeload.load(base, adapters=write(tmp_path / "a", parts, use_dora=True))
    assert merged["w.weight"].shape == (6, 5)


def test_a_base_is_never_looked_for(base, tmp_path):
    path = str(tmp_path / "nothing")
    adapter = write(
        tmp_path / "a", pair(), base_model_name_or_path=path, revision="../x", auto_mapping={"parent": "os"}
    )
    assert safeload.load(base, adapters=adapter)["w.weight"].shape == (6, 5)
