"""safeload info of a LoRA adapter: what it is, what it changes, whether it fits a base."""

import json

import numpy as np
import pytest
from builders.adapters import LORA, pair, write
from builders.inside import main

import safeload
from safeload.numpy import save_file


@pytest.fixture
def base(tmp_path):
    save_file({"w.weight": np.ones((6, 5), np.float32), "b.weight": np.ones(4, np.float32)}, tmp_path / "b.safetensors")
    return tmp_path / "b.safetensors"


def info(capsys, *arguments):
    try:
        status = main(["info", *map(str, arguments)])
    except SystemExit as error:
        status = error.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("plain", ["LoRA: r 3, alpha 5", "changes 3 modules: 1 head, 1 image, 1 point"]),
        ("dora", ["DoRA: r 3, alpha 5", "changes 5 modules: 2 up, 1 embed, 1 image, 1 point", "embeddings: embed"]),
        ("rslora", ["rsLoRA: r 4, alpha 8", "changes 3 modules: 2 up, 1 head", "adds to 3 biases"]),
        ("patterns", ["LoRA: r 2 to 4, alpha 1.5 to 6", "changes 5 modules: 2 down, 2 up, 1 embed", "head.bias"]),
        ("experts", ["LoRA: r 2 to 3, alpha 5 to 6", "changes 7 modules: 6 experts, 1 gate", "gate_up_proj"]),
    ],
)
def test_what_an_adapter_is(case, lines, capsys):
    base = LORA / (f"{case}_base.safetensors" if case == "experts" else "base.safetensors")
    status, out, _ = info(capsys, LORA / case, "--base", base)
    assert status == 0
    assert all(f"\n{line}" in out or f", {line}" in out or f".{line}" in out for line in lines), out
    assert f"\nfits {base}: changes " in out


def test_what_an_adapter_of_mlx_is(tmp_path, capsys):
    save_file(
        {"w.lora_a": np.ones((5, 2), np.float32), "w.lora_b": np.ones((2, 6), np.float32)}, tmp_path / "a.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 2, "scale": 20.0}}))
    assert "\nLoRA: rank 2, scale 20\nchanges 1 module: 1 w\n" in info(capsys, tmp_path)[1]


def test_as_json(base, tmp_path, capsys):
    given = {"base_model_name_or_path": "me/base", "modules_to_save": ["b"]}
    adapter = write(tmp_path / "a", {**pair(), "b.weight": np.ones(4, np.float32)}, **given)
    found = json.loads(info(capsys, adapter, "--base", base, "--json")[1])["adapter"]
    assert found == {
        "merged": True,
        "method": "LoRA",
        "writer": "PEFT",
        "ranks": [2],
        "alphas": [4],
        "modules": {"w": 1},
        "embeddings": [],
        "parameters": [],
        "replaced": ["b.weight"],
        "biases": 0,
        **given,
        "base": {"fits": True, "base": str(base), "changed": 2, "packed": 0, "total": 2, "problems": []},
    }
    assert json.loads(info(capsys, base, "--json")[1])["adapter"] is None


def test_what_does_not_fit_is_listed(base, tmp_path, capsys):
    adapter = write(tmp_path / "a", {**pair(rows=7), **pair(module="v"), **pair(module="x.y")})
    status, out, _ = info(capsys, adapter, "--base", base)
    assert status == 1
    assert f"\ndoes not fit {base}: 3 problems\n  tensor 'base_model.model." in out
    for words in (
        "'base_model.model.v.lora_A.weight' of the adapter belongs to 'v.weight', which",
        "'base_model.model.x.y.lora_A.weight' of the adapter belongs to 'x.y.weight', which",
        "'base_model.model.w.lora_B.weight' of the adapter is [7, 2], but 'w.weight' of",
    ):
        assert f"\n  tensor {words}" in out
    status, out, _ = info(capsys, adapter, base.parent / "a", "--base", base, "--json")
    assert status == 1
    assert [json.loads(line)["adapter"]["base"]["fits"] for line in out.splitlines()] == [False, False]


def test_hundreds_of_problems_are_listed_at_once(tmp_path, capsys):
    """Similar names are sought for the first of them: that takes milliseconds for each."""
    save_file(
        {f"layer.{k}.weight": np.ones(1, np.float32) for k in range(1500)}, tmp_path / "b.safetensors", durable=False
    )
    parts = {name: value for k in range(300) for name, value in pair(1, 1, module=f"other.{k}").items()}
    status, out, _ = info(capsys, write(tmp_path / "a", parts), "--base", tmp_path / "b.safetensors")
    assert status == 1
    assert out.count("\n  tensor ") == 300
    assert out.count("similar names") <= 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "HRA"}, "it cannot be merged: "),
        ({"r": "many"}, "it cannot be merged: "),
        ({"alpha_pattern": {"(?=w)": 2}}, "it cannot be merged: "),
        ({"use_dora": True}, "has no magnitude, which contradicts 'use_dora'"),
    ],
)
def test_what_is_not_merged_is_listed_all_the_same(config, words, base, tmp_path, capsys):
    adapter = write(tmp_path / "a", pair(), **config)
    status, out, _ = info(capsys, adapter)
    assert status == 0
    assert words in out
    assert "w.lora_A.weight" in out
    assert json.loads(info(capsys, adapter, "--json")[1])["adapter"]["merged"] is False
    assert info(capsys, adapter, "--base", base)[0] == 1


def test_a_base_is_for_adapters(base, tmp_path, capsys):
    status, _, error = info(capsys, base, "--base", base)
    assert status == 2
    assert "--base needs a LoRA adapter" in error
    adapter = write(tmp_path / "a", pair())
    assert info(capsys, adapter, "--base", tmp_path / "nothing")[0] == 1
    (adapter / "adapter_config.json").unlink()
    status, _, error = info(capsys, adapter, "--base", base)
    assert status == 1
    assert "adapter_config.json" in error
    assert info(capsys, adapter)[0] == 0


def test_check_finds_what_does_not_fit_a_base(base, tmp_path, capsys):
    good, bad = write(tmp_path / "good", pair()), write(tmp_path / "bad", {**pair(rows=7), **pair(module="v")})
    assert safeload.check(good, base=base).ok
    with safeload.open(bad) as opened:
        report = safeload.check(opened, base=base)
    found = {finding.tensor: finding.message for finding in report.errors if finding.code == "adapter.base"}
    assert found.keys() == {f"base_model.model.{end}.weight" for end in ("w.lora_B", "v.lora_A")}
    assert "is [7, 2], but 'w.weight' of" in found["base_model.model.w.lora_B.weight"]
    assert found["base_model.model.v.lora_A.weight"].startswith("belongs to 'v.weight', which ")
    capsys.readouterr()
    assert main(["check", str(good), "--base", str(base)]) == 0
    assert main(["check", str(bad), "--base", str(base)]) == 1
    assert "adapter.base" in capsys.readouterr().out
    assert main(["check", "--json", str(bad), "--base", str(base)]) == 1
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [error["code"] for error in errors] == ["adapter.base"] * 2


def test_check_of_an_adapter_that_cannot_be_read_is_a_finding(base, tmp_path):
    adapter = write(tmp_path / "a", pair(), use_dora=True)
    assert "which contradicts 'use_dora'" in safeload.check(adapter, base=base).errors[0].message


def test_check_with_a_base_is_for_adapters(base, tmp_path):
    for source in (base, {"w": np.ones(2)}, np.ones(2)):
        with pytest.raises(ValueError, match="base= "):
            safeload.check(source, base=base)
    with pytest.raises(FileNotFoundError):
        safeload.check(write(tmp_path / "a", pair()), base=tmp_path / "nothing")
