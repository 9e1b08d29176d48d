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
    assert known["qwen3_moe"] == (True, "qwen3moe", True, True)
    assert known["gemma"] == (False, "gemma", False, True)
    assert known["bert"] == (True, "", False, False)


def test_every_schema_of_the_list_has_its_name():
    names = [family.name for family in safeload.families() if family.schema]
    with pytest.raises(ValueError, match=re.escape(f"expected one of {', '.join(names)}")):
        safeload.check({}, schema="unknown")


def test_the_command_prints_the_list(capsys):
    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["family", "schema", "llama.cpp", "engines", "MLX", "models"]
    assert lines[-1] == f"{len(safeload.families())} families"
    assert main(["families", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "families": [
            {**each._asdict(), "architectures": [*each.architectures], "model_types": [*each.model_types]}
            for each in safeload.families()
        ]
    }
