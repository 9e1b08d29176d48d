"""The list of families: what safeload knows of each, in Python and on the command line."""

import csv
import json
import re

import numpy as np
import pytest
from builders import family_table
from builders.inside import main, model_families
from builders.paths import ROOT

import safeload

pytestmark = pytest.mark.no_core


def test_the_list_says_what_each_family_is_known_for():
    families = {family.name: family for family in safeload.families()}
    assert list(families) == sorted(families)
    assert families["llama"][2:4] != ((), ())
    known = {name: family[4:] for name, family in families.items()}
    assert known["qwen3_moe"] == (True, "qwen3moe", True, True, True, False)
    assert known["qwen2_vl"] == (True, "qwen2vl", False, True, True, True)
    assert known["gemma"] == (False, "gemma", False, True, True, False)
    assert known["bert"] == (True, "bert", False, False, True, False)


def test_every_schema_of_the_list_has_its_name():
    for name in [family.name for family in safeload.families() if family.schema]:
        safeload.check({"w": np.ones(2, np.float32)}, schema=name)
    with pytest.raises(ValueError, match=r"unknown schema 'unknown'; `safeload families` lists the schemas$"):
        safeload.check({}, schema="unknown")


def test_the_command_prints_the_list(capsys):
    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = ["family", "class", "schema", "llama.cpp", "way back", "MLX", "engines", "mmproj", "models"]
    assert re.split(" {2,}", lines[0].strip()) == head
    qwen = next(line for line in lines if line.startswith("qwen3_moe "))
    assert re.split(" {2,}", qwen)[1:8] == ["Qwen3MoeForCausalLM", "yes", "qwen3moe", *["yes"] * 3, "no"]
    assert lines[-1] == f"{len(safeload.families())} families"
    assert main(["families", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "families": [
            {**each._asdict(), "architectures": [*each.architectures], "model_types": [*each.model_types]}
            for each in safeload.families()
        ]
    }


def test_the_page_of_families_has_their_table():
    text = family_table.PAGE.read_text(encoding="utf-8")
    assert family_table.table() in text, "run `python -m builders.family_table` in tests/"
    backs = {row[0]: row[3] for row in family_table.rows() if row[2]}
    assert {*backs.values()} == {"yes"}


# ---- how many of the models that people download ----

DOWNLOADS = {
    row["model_type"]: float(row["downloads_millions"])
    for row in csv.DictReader(
        (ROOT / "tests" / "data" / "architectures" / "families.csv").read_text(encoding="utf-8").splitlines()
    )
}
# Published types that stand for a model around a language model, with the type of that.
AROUND = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4v": "glm4",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "kimi_k25": "deepseek_v3",
    "llava": "llama",
    "llava_next": "mistral",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


def config_of(model_type):
    inner = AROUND.get(model_type)
    return {"model_type": model_type, **({} if inner is None else {"text_config": {"model_type": inner}})}


def share_of(condition):
    """The share of the downloads of all models of the table for which a condition holds, in percent."""
    total = sum(DOWNLOADS.values())
    return 100 * sum(count for name, count in DOWNLOADS.items() if condition(config_of(name))) / total


def test_nine_in_ten_downloads_become_a_gguf():
    assert share_of(lambda config: model_families.gguf_form(config)[1] is not None) >= 90


def test_nine_in_ten_downloads_become_a_folder_for_mlx():
    assert share_of(lambda config: model_families.mlx_form(config) is not None) >= 90


def test_more_are_checked_by_a_schema():
    known = {model_type for family in safeload.families() if family.schema for model_type in family.model_types}
    assert (
        share_of(lambda config: {config["model_type"], config.get("text_config", config)["model_type"]} & known) >= 92
    )
