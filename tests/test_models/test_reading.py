"""The built-in schemas: each is well-formed, inherits what it does not say, and is chosen by name only."""

import ast
import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from builders.inside import Config, main, names_in
from builders.inside import model_families as families
from builders.models import BUILT_IN_SCHEMAS
from builders.paths import ROOT

import safeload

CONTENTS = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in (ROOT / "safeload" / "models" / "families").glob("*.json")
}
FIELDS = {
    *("about", "like", "without", "config", "layers", "more_layers", "architectures", "model_types"),
    *("formats", "keys", "prefixes", "defaults", "omitted", "counts", "tensors", "parallel", "engines"),
    *("mlx", "gguf", "mmproj"),
}
ENTRY_FIELDS = {"shape", "role", "optional", "when", "tied", "tied_when", "also", "architectures"}
GGUF_FIELDS = {
    *("architecture", "chosen_by", "without", "required", "keys", "defaults", "tensors", "activations", "assumes"),
    *("restores", "windows", "query_scale_by_width", "rope", "tied", "add_space_prefix", "end_of_turn"),
    *("classes", "renames", "left_out", "counted", "needs", "computed", "nested", "text_type"),
    *("when", "text_family", "shown_by", "tokens", "special_tokens", "per_layer", "tokenizer"),
    *(
        "suppress_tokens",
        "kept_layers",
        "layers",
        "more_layers",
        "complete",
        "pooling",
        "end_of_text",
        "end_of_turn_listed",
    ),
}
ROLES = {"embedding", "norm", "bias", "head", "buffer", "weight"}
PLACEHOLDER = re.compile(r"\{([a-z_]*)\}")

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
COMPARISONS = (ast.Eq, ast.Gt, ast.GtE, ast.LtE)
FUNCTIONS = {"len", "item", "contains", "starts", "times", "kind", "at", "root", "largest"}

# The name that messages list first.
SCHEMAS = {**BUILT_IN_SCHEMAS, **{f"gguf:{name}": form.schema for name, form in families.gguf_forms().items()}}


def keys_of(text):
    """The keys in an expression, in order; an assertion fails if it is not one."""
    assert isinstance(text, str)
    return list(keys_below(ast.parse(text, mode="eval").body))


def keys_below(node):
    operands = []
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield ast.unparse(node)
    elif isinstance(node, ast.BinOp):
        assert isinstance(node.op, ARITHMETIC)
        operands = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        assert len(node.ops) == 1
        assert isinstance(node.ops[0], COMPARISONS)
        operands = [node.left, *node.comparators]
    elif isinstance(node, ast.BoolOp):
        operands = node.values
    elif isinstance(node, ast.UnaryOp):
        assert isinstance(node.op, ast.Not)
        operands = [node.operand]
    elif isinstance(node, ast.Call):
        assert node.func.id in FUNCTIONS
        *arguments, last = node.args
        key = arguments[0]
        assert isinstance(key, (ast.Name, ast.Attribute))
        assert len(arguments) == 1 + (node.func.id == "kind")
        text = isinstance(last, ast.Constant) and isinstance(last.value, str)
        word = node.func.id in ("starts", "kind") or (node.func.id == "contains" and text)
        assert isinstance(last, ast.Name) or text or not word
        operands = arguments if word else [key, last]
    else:
        assert type(node.value) is int, ast.unparse(node)
    for operand in operands:
        yield from keys_below(operand)


@pytest.mark.parametrize("name", CONTENTS)
def test_the_json_of_a_family_is_well_formed(name):
    content = CONTENTS[name]
    assert content["about"]
    assert content.keys() <= FIELDS
    assert content.get("like") in (None, *CONTENTS)
    for field in ("architectures", "model_types", "formats", "keys", "prefixes", "without"):
        assert isinstance(content.get(field, []), list)
        assert all(isinstance(text, str) for text in content.get(field, []))
    assert all("{" not in prefix for prefix in content.get("prefixes", ()))
    assert all(type(value) in (int, str) for value in content.get("defaults", {}).values())
    inherited = BUILT_IN_SCHEMAS[content["like"]].entries if "like" in content else ()
    for pattern in content.get("without", ()):
        assert any(entry.name == pattern or fnmatchcase(entry.name, pattern) for entry in inherited), pattern
    for entry in (content.get("tensors") or {}).values():
        assert entry.keys() <= ENTRY_FIELDS
        assert type(entry.get("optional", False)) in (bool, str)
        assert all(isinstance(entry.get(field, []), list) for field in ("also", "architectures"))


def test_a_model_type_is_of_a_single_family():
    listed = [model_type for content in CONTENTS.values() for model_type in content.get("model_types", ())]
    assert [model_type for model_type, count in Counter(listed).items() if count > 1] == []


MMPROJ_FIELDS = {
    *(
        "like",
        "classes",
        "without",
        "omitted",
        "keys",
        "blocks",
        "towers",
        "token_ids",
        "dtypes",
        "renames",
        "left_out",
    ),
    *("activations", "assumes", "needs", "layers", "counts", "defaults", "tensors"),
}


@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if "mmproj" in content])
def test_the_tower_of_llama_cpp_is_well_formed(name):
    own, form = CONTENTS[name]["mmproj"], families.family_files()[name].mmproj
    assert own.keys() <= MMPROJ_FIELDS
    for entry in own.get("tensors", {}).values():
        assert entry.keys() <= ENTRY_FIELDS | {"from"}
        assert entry["shape"]
    layouts = [layout for sources in form.layouts.values() for layout in sources.values()]
    parts = [(key.value, key.each_layer, key.when) for key in form.keys.values()]
    for text in (
        *form.needs.values(),
        *(layout.number for layout in layouts),
        *(part for each in parts for part in each),
    ):
        assert text is None or text.isdigit() or [*keys_of(text)]
    assert {*form.dtypes.values()} <= {"F32", "F16", "F16 or F32"}
    assert {form.blocks, "has_vision_encoder", "vision.image_mean"} <= form.keys.keys()
    for pattern in own.get("dtypes", {}):
        assert own["dtypes"][pattern] is None or any(fnmatchcase(text, pattern) for text in form.layouts), pattern


@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if "gguf" in content])
def test_the_form_of_llama_cpp_is_well_formed(name):
    own, form = CONTENTS[name]["gguf"], families.family_files()[name].gguf
    assert own.keys() <= GGUF_FIELDS
    inherited = families.family_files()[CONTENTS[name]["like"]].gguf if "like" in CONTENTS[name] else form
    for pattern in own.get("without", ()):
        assert any(fnmatchcase(text, pattern) for text in (*inherited.layouts, *inherited.keys)), pattern
    for entry in own.get("tensors", {}).values():
        assert entry.keys() <= ENTRY_FIELDS | {"from"}
    keys = form.keys
    for text in (
        *form.needs.values(),
        *(part for key in keys.values() for part in (key.value, key.each_layer, key.when)),
    ):
        assert text is None or text.isdigit() or keys_of(text)
    assert sum(name.endswith("_epsilon") and not key.optional for name, key in keys.items()) == 1
    assert {*form.required, *form.restores} <= {*keys, *form.assumes}
    assert {*keys_of(form.chosen_by or "0")} <= {key.replace(".", "_") for key in keys}
    assert all(keys_of(text) for text in (*form.needs.values(), form.kept_layers or "layer"))
    for entry in form.computed.values():
        fields = {"value": entry} if isinstance(entry, str) else entry
        assert fields.keys() <= {"value", "values", "each_layer"}
        assert all(keys_of(fields[key]) or fields[key] == "0" for key in ("value", "each_layer") if key in fields)
    assert form.usually_tied or not form.tied
    assert not form.of_text.class_name.endswith("TextModel")  # which has no head
    # The sizes of a file are numbers of its metadata.
    shapes = [size.removesuffix("?") for entry in form.schema.entries for size in entry.shape or ()]
    sizes = {key for size in shapes if size for key in keys_of(size)} | form.schema.defaults.keys()
    named = {key.replace(".", "_") for key in keys} | {"attn_qkv", "vocab_size", "layer"}
    assert sizes <= named | form.schema.defaults.keys()
    for target, sources in form.layouts.items():
        for source, layout in sources.items():
            assert source.count("{}") == target.count("{}") + layout.stack
            assert {*layout.heads} <= keys.keys()
    published = families.family_files()[name]
    if published.has_schema:  # every tensor of the schema has a place, or is one that llama.cpp computes
        assumed = Config({key: values[0] for key, values in form.assumes.items()}, published.schema.defaults)
        entries = [entry for entry in published.schema.entries if not entry.optional]
        entries = [
            entry
            for entry in entries
            if not form.assumes.keys() & names_in(entry.when or "") or assumed.evaluate(entry.when, 0)
        ]
        entries = [
            entry for entry in entries if any(fnmatchcase(form.class_name, k) for k in entry.architectures or "*")
        ]
        names = {entry.name.replace("{prefix}", published.schema.prefixes[0]) for entry in entries}
        names = {re.sub(r"\{[a-z]+\}", "{}", text) for text in names if not text.startswith(("score.", "qa_outputs."))}
        missing = {text for text in names if text not in form.targets and not text.endswith(".bias")}
        dense = {f"model.layers.{{}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        has_dense = name.endswith("_moe") or name in ("mellum", "qwen3_next")  # which llama.cpp does not have
        assert missing <= (dense if has_dense else {"lm_head.weight"} if form.tied else set())


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_well_formed(name):
    schema = SCHEMAS[name]
    slots = {*schema.counts, *([""] if schema.layers is not None else [])}
    texts = [schema.layers, schema.more_layers, *schema.counts.values()]
    texts += [entry.optional for entry in schema.entries if isinstance(entry.optional, str)]
    texts += [value for value in schema.defaults.values() if isinstance(value, str)]
    assert schema.entries
    for entry in schema.entries:
        assert entry.role in ROLES
        for text in (entry.name, *entry.also):
            bare = text.removeprefix("{prefix}")
            placeholders = PLACEHOLDER.findall(bare)
            assert placeholders == PLACEHOLDER.findall(entry.name.removeprefix("{prefix}"))
            assert len(placeholders) <= 2
            assert set(placeholders) <= slots
            assert not re.search(r"[0-9}]\{|\}[0-9]", bare), "two numbers side by side"
        sizes = [size.removesuffix("?") for size in entry.shape or () if size != "?"]
        for size in sizes:
            assert names_in(size) == keys_of(size)
        if "{" not in entry.name.removeprefix("{prefix}"):
            assert all("layer" not in keys_of(text) for text in (*sizes, entry.when) if text)
        texts += [*sizes, entry.when, entry.tied_when]
        assert entry.tied is None or any(entry.tied == other.name for other in schema.entries)
    for text in filter(None, texts):
        keys_of(text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_default_depends_on_itself(name):
    defaults = SCHEMAS[name].defaults

    def visit(key, above):
        assert key not in above, (*above, key)
        if isinstance(defaults.get(key), str):
            for other in keys_of(defaults[key]):
                visit(other, (*above, key))

    for key in defaults:
        visit(key, ())


def test_a_schema_inherits_what_it_does_not_say():
    llama, qwen2, qwen3, moe, gpt_oss = (SCHEMAS[k] for k in ("llama", "qwen2", "qwen3", "qwen2_moe", "gpt_oss"))
    assert moe.prefixes == qwen2.prefixes == llama.prefixes
    assert (moe.layers, moe.config) == (llama.layers, llama.config)
    assert moe.architectures[0] == "Qwen2MoeForCausalLM"
    assert not set(moe.architectures) & set(qwen2.architectures)
    assert {**llama.defaults, **qwen2.defaults}.keys() <= moe.defaults.keys()
    entries = {schema.name: {entry.name: entry for entry in schema.entries} for schema in (llama, qwen2, moe, gpt_oss)}
    name = "{prefix}layers.{}.self_attn.q_proj.bias"
    # Null removes a condition, a field replaces one, and the others stay.
    assert [entries[k][name].when for k in ("llama", "qwen2", "qwen2_moe")] == ["attention_bias", None, "qkv_bias"]
    assert len({entries[k][name].shape for k in ("llama", "qwen2", "qwen2_moe")}) == 1
    assert not any(".mlp.gate_proj" in text or "inv_freq" in text for text in entries["gpt_oss"])
    assert "{prefix}layers.{}.self_attn.q_norm.weight" in {entry.name for entry in qwen3.entries}


def test_numbers_in_names():
    schema = SCHEMAS["qwen3_moe"]
    found = schema.find("model.layers.12.mlp.experts.3.up_proj.weight")
    assert (found.numbers, found.layer, found.stack) == ((12, 3), 12, "model.layers.")
    assert SCHEMAS["vit"].find("decoder.0.weight").layer is None
    assert SCHEMAS["gpt2"].find("h.7.ln_1.weight").numbers == (7,)
    for number in ("07", "#", "", "\uff13", "9" * 5000):
        assert SCHEMAS["gpt2"].find(f"h.{number}.ln_1.weight") is None
    for name in ("decoder.1.weight", "decoder.00.weight", "decoder.#.weight"):
        assert SCHEMAS["vit"].find(name) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lama", "llama"),
        ("Llama", "llama"),
        ("qwen3-moe", "qwen3_moe"),
        ("deepseek-v3", "deepseek_v3"),
        ("gpt-oss", "gpt_oss"),
        ("T5", "t5"),
        ("GPT2", "gpt2"),
        ("llama.", "llama"),
        ("resnet", None),
        ("", None),
    ],
)
def test_a_name_that_is_not_one_of_a_schema(name, near):
    with pytest.raises(ValueError, match=r"; `safeload families` lists the schemas$") as caught:
        safeload.check({"w": np.ones(2)}, schema=name)
    assert (f", did you mean {near!r}?" if near else f"unknown schema {name!r}; `safeload") in str(caught.value)


@pytest.mark.parametrize("make", [Path, str, lambda path: "./llama", lambda path: "llama.json"])
def test_a_path_is_no_schema(make, tmp_path):
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(CONTENTS["llama"]))
    with pytest.raises(ValueError, match=r"built-in schema.*; `safeload families` lists the schemas$"):
        safeload.check({"w": np.ones(2)}, schema=make(path))


@pytest.mark.parametrize("schema", [CONTENTS["llama"], {}, ["llama"], True, 0, b"llama"])
def test_the_content_of_a_schema_is_no_schema(schema):
    with pytest.raises(ValueError, match=r"name of a built-in schema, got .*; `safeload families` lists") as caught:
        safeload.check({"w": np.ones(2)}, schema=schema)
    assert len(str(caught.value)) < 800


def test_the_command_refuses_a_schema_file(tmp_path, capsys):
    safeload.save({"w": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "mine.json").write_text("{}")
    assert main(["check", str(tmp_path / "a.safetensors"), "--schema", str(tmp_path / "mine.json")]) == 2
    assert (
        "only built-in schemas are supported, no files; `safeload families` lists the schemas"
        in capsys.readouterr().err
    )


def test_the_guide_lists_every_schema():
    page = (ROOT / "docs" / "guide" / "validating.md").read_text("utf-8")
    table = page.partition("| models | schemas |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[2])]
    assert sorted(listed) == sorted(BUILT_IN_SCHEMAS)


def test_defaults_that_need_each_other_twice_take_linear_time():
    defaults = {f"k{n}": f"k{n + 1} + k{n + 1}" for n in range(50)} | {"k50": 1}
    assert Config({}, defaults).evaluate("k0 // k1") == 2
