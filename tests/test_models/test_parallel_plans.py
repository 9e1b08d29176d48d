"""Plans that divide the tensors of a family among ranks: those of transformers."""

import re
from fnmatch import fnmatchcase

import pytest
from builders.inside import Config, model_families

PLANNED = [name for name, family in model_families.family_files().items() if family.parallel is not None]
# Modules that transformers leaves whole, or divides under the names that it has in memory.
_IN_MEMORY = (
    (r"block_sparse_moe", "mlp"),
    (r"experts\.\{expert\}\.(gate_proj|up_proj|w1|w3)", "experts.gate_up_proj"),
    (r"experts\.\{expert\}\.(down_proj|w2)", "experts.down_proj"),
)
_ALSO_DIVIDED = ("shared_expert", "lm_head")


def _divided(plan, name):
    axis, _ = next((own for text, own in plan.items() if fnmatchcase(name, text)), (None, None))
    return None if axis == "columns" and name.endswith(".bias") else axis


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_divides_modules_by_rows_then_by_columns(name):
    family = model_families.family_files()[name]
    axes = {_divided(family.parallel, entry.name.replace("{prefix}", "model.")) for entry in family.schema.entries}
    assert axes == {"rows", "columns", None}
    counts = {text for _, parts in family.parallel.values() if not isinstance(parts, int) for text in parts}
    values = Config({"num_attention_heads": 4, "num_key_value_heads": 2}, family.schema.defaults)
    assert {values.evaluate(text) for text in counts} == {4, 2}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_that_of_transformers(name):
    pytest.importorskip("torch")
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    family = model_families.family_files()[name]
    kinds = [kind for kind in family.model_types if kind in mapping]
    plan = getattr(mapping[kinds[0]], "base_model_tp_plan", None) if kinds else None
    if not plan:
        pytest.skip("transformers has no plan")
    styles = (("rows", "colwise"), ("rows", "packed_colwise"), ("columns", "rowwise"))
    theirs = {module: axis for module, style in plan.items() for axis, start in styles if style.startswith(start)}
    for entry in family.schema.entries:
        module = re.sub(r"\.(weight|bias)$", "", entry.name.replace("{prefix}", "")).replace("{}", "*")
        in_memory = module
        for pattern, replacement in _IN_MEMORY:
            in_memory = re.sub(pattern, replacement, in_memory)
        expected = theirs.get(module, theirs.get(in_memory))
        expected = None if expected == "columns" and entry.name.endswith(".bias") else expected
        if not any(part in module for part in _ALSO_DIVIDED):
            assert _divided(family.parallel, entry.name.replace("{prefix}", "model.")) == expected, entry.name
