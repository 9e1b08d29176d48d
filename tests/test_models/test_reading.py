"""Schemas that extend others: what they take over, and what is wrong with one."""

import json
import re

import pytest
from builders.inside import Config, reading
from builders.paths import ROOT

import safeload

BASE = {
    "name": "base",
    "about": "a base",
    "architectures": ["BaseForCausalLM"],
    "model_types": ["base"],
    "prefixes": ["model.", ""],
    "layers": "n",
    "defaults": {"m": "2 * d", "biases": 0},
    "tensors": {
        "{prefix}embed.weight": {"shape": ["v", "d"], "role": "embedding"},
        "{prefix}h.{}.w": {"shape": ["m", "d"]},
        "{prefix}h.{}.b": {"shape": ["m"], "role": "bias", "when": "biases"},
        "{prefix}h.{}.c": {"shape": ["d"], "role": "bias"},
    },
}
CONFIG = {"n": 2, "d": 5, "v": 9}


def write(folder, name, **content):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, **content}))
    return path


def test_a_schema_that_extends_another(tmp_path):
    write(tmp_path, **BASE)
    path = write(
        tmp_path,
        "other",
        extends="base.json",
        layers="layers",
        without=["{prefix}h.{}.c", "*embed*"],
        defaults={"m": 7, "e": 3},
        counts={"expert": "e"},
        tensors={
            "{prefix}h.{}.b": {"when": None},
            "{prefix}h.{}.w": {"shape": ["d", "m"]},
            "{prefix}h.{}.e.{expert}": {"shape": ["?"], "optional": True},
        },
    )
    other = reading.load(path)
    assert (other.name, other.about, other.architectures, other.model_types) == ("other", "", (), ())
    assert other.prefixes == ("model.", "")
    assert [(entry.name, entry.role) for entry in other.entries] == [
        ("{prefix}h.{}.w", "weight"),
        ("{prefix}h.{}.b", "bias"),
        ("{prefix}h.{}.e.{expert}", "weight"),
    ]
    wanted = other.expand({"layers": 2, "d": 5}, ())
    assert {name: one.shape for name, one in wanted.items()} == {
        **{f"model.h.{k}.w": (5, 7) for k in range(2)},
        **{f"model.h.{k}.b": (7,) for k in range(2)},
        **{f"model.h.{k}.e.{e}": (None,) for k in range(2) for e in range(3)},
    }
    assert [(one.stack, one.layer) for one in wanted.values() if one.name.endswith("e.2")] == [
        ("model.h.", 0),
        ("model.h.", 1),
    ]
    third = reading.load(write(tmp_path, "third", extends="other.json", tensors={"{prefix}h.{}.b": {"shape": None}}))
    assert third.expand({"layers": 1, "d": 5}, ())["model.h.0.b"].shape is None


def test_a_schema_extends_a_built_in_one():
    mine = reading.parse({"name": "llama", "extends": "llama", "tensors": {"lm_head.bias": {"shape": ["vocab_size"]}}})
    assert len(mine.entries) == len(reading.built_in()["llama"].entries) + 1
    assert mine.role("model.layers.3.mlp.up_proj.weight") == "weight"
    assert mine.architectures == ()


def test_numbers_in_names():
    schema = reading.parse(
        {
            "name": "x",
            "layers": "n",
            "counts": {"expert": "e"},
            "tensors": {"a.{}.b.0.c.{expert}": {"shape": ["1"]}, "a.0.x1": {"shape": []}, "h{}.w2": {"shape": []}},
        }
    )
    found = schema.find("a.12.b.0.c.3")
    assert (found.numbers, found.layer, found.stack) == ((12, 3), 12, "a.")
    assert schema.find("a.0.x1").layer is None
    assert schema.find("h7.w2").numbers == (7,)
    for name in (
        "a.12.b.1.c.3",
        "a.012.b.0.c.3",
        "a.1.x1",
        "a.#.b.#.c.#",
        "a.0.x#",
        "h.w2",
        "h07.w2",
        "a.1.b.0.c.\uff13",
    ):
        assert schema.find(name) is None
    assert schema.find(f"h{'9' * 5000}.w2") is None
    assert schema.expand({"n": 0, "e": 5}, ()).keys() == {"a.0.x1"}
    assert len(schema.expand({"n": 3, "e": 5}, ())) == 19


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extends": "lama"}, r"extends is 'lama', expected .*one of bert, .*, did you mean 'llama'\?"),
        (
            {"extends": "missing.json"},
            "extends is 'missing.json', expected a file.json beside this one, or one of bert",
        ),
        ({"extends": "../base.json"}, "extends is '../base.json', expected a file.json beside"),
        ({"extends": "/etc/x.json"}, "extends is '/etc/x.json', expected"),
        ({"extends": "C:base.json"}, "extends is 'C:base.json', expected"),
        ({"extends": 5}, "extends is 5, expected"),
        ({"extends": "x\x1b[31m"}, r"extends is 'x\\x1b\[31m', expected"),
        ({"extends": "me.json"}, "extends: 'me.json' -> 'me.json' is a cycle"),
        ({"extends": "one.json"}, "extends: 'one.json' -> 'two.json' -> 'one.json' is a cycle"),
        ({"extends": "long0.json"}, "'long8.json' is longer than 8"),
        (
            {"extends": "base.json", "without": ["{prefix}h.{}.q"]},
            "without: '{prefix}h.{}.q' matches no tensor of schema",
        ),
        ({"extends": "base.json", "without": "a"}, "without must be a list of strings"),
        ({"extends": "base.json", "without": ["*"]}, "tensors must be a nonempty object"),
        ({"extends": "base.json", "defaults": {"m": 1.5}}, "integers and expressions"),
        ({"extends": "base.json", "tensors": {"{prefix}h.{}.w": 5}}, r"'{prefix}h.{}.w' must be an object with shape"),
        ({"extends": "base.json", "tensors": {"new": {"role": "norm"}}}, "'new' must be an object with shape"),
        ({"extends": "base.json", "layers": 3}, "expected an expression, got 3"),
        ({"extends": "bad.json"}, "unknown field 'tensor'"),
        ({"extends": "broken.json"}, "broken.json"),
        ({"without": ["x"], "tensors": {"x": {"shape": []}}}, "without requires extends"),
    ],
)
def test_what_is_wrong_with_a_schema_that_extends_another(change, reason, tmp_path):
    write(tmp_path, **BASE)
    write(tmp_path, "one", extends="two.json")
    write(tmp_path, "two", extends="one.json")
    write(tmp_path, "bad", tensor={})
    (tmp_path / "broken.json").write_text("{")
    for k in range(9):
        write(tmp_path, f"long{k}", extends=f"long{k + 1}.json")
    with pytest.raises(safeload.FormatError, match=reason) as caught:
        reading.load(write(tmp_path, "me", **change))
    assert caught.value.path.startswith(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Llama", "llama"),
        ("qwen3-moe", "qwen3_moe"),
        ("deepseek-v3", "deepseek_v3"),
        ("gpt-oss", "gpt_oss"),
        ("T5", "t5"),
        ("GPT2", "gpt2"),
        ("resnet", None),
        ("", None),
    ],
)
def test_a_name_that_is_not_one_of_a_schema(name, near):
    with pytest.raises(ValueError, match=r"; expected a JSON file or one of bert, .*, llama, .*, whisper$") as caught:
        reading.load(name)
    assert (f", did you mean {near!r}?" if near else "; expected") in str(caught.value)


def test_the_guide_lists_every_schema():
    page = (ROOT / "docs" / "guide" / "validating.md").read_text("utf-8")
    table = page.partition("| models | schemas |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[2])]
    assert sorted(listed) == sorted(reading.names())


def test_defaults_that_need_each_other_twice_take_linear_time():
    defaults = {f"k{n}": f"k{n + 1} + k{n + 1}" for n in range(50)} | {"k50": 1}
    assert Config({}, defaults).evaluate("k0 // k1") == 2


def test_a_number_of_400_digits_is_a_wrong_value():
    with pytest.raises(ValueError, match="64 bits"):
        Config({"big": 10**400}, {}).evaluate("times(big, 3)")
