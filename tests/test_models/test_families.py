"""The list of families: what safeload knows of each, in Python and on the command line."""

import json
import re

import pytest
from builders.inside import main

import safeload

pytestmark = pytest.mark.no_core


def test_the_list_says_what_each_family_is_known_for():
    families = {family.name: family for family in safeload.families()}
    assert list(families) == sorted(families)
    assert families["llama"][2:4] != ((), ())
    known = {name: family[4:] for name, family in families.items()}
    assert known["qwen3_moe"] == (True, "qwen3moe", True, True, True, False)
    assert known["gemma"] == (False, "gemma", False, True, True, False)
    assert known["bert"] == (True, "", False, False, False, False)


def test_every_schema_of_the_list_has_its_name():
    names = [family.name for family in safeload.families() if family.schema]
    with pytest.raises(ValueError, match=re.escape(f"expected one of {', '.join(names)}")):
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
