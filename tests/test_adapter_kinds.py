"""Kinds of adapters besides LoRA, against what PEFT merges in float64 (tests/data/kinds/make.py)."""

import json
import shutil

import numpy as np
import pytest
from builders.adapters import assert_same, write
from builders.inside import main
from builders.paths import DATA
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

KINDS = DATA / "kinds"
BASE = KINDS / "base.safetensors"
CASES = sorted(path.parent.name for path in KINDS.glob("*/adapter_config.json"))
# Errors of these are relative to the largest value, others to the sum of the absolute terms.
ROTATED = ("oft", "boft", "dora")


def rewritten(case, folder, change):
    """A copy of a case with other values."""
    shutil.copytree(KINDS / case, folder)
    tensors = safeload.load(folder / "adapter_model.safetensors")
    save_file({name: change(value) for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def absolute_terms(case, tmp_path):
    """The sums of the absolute terms: every value in place of itself is its absolute value."""
    save_file({name: np.abs(value, dtype=np.float64) for name, value in safeload.load(BASE).items()}, tmp_path / "a")
    return safeload.load(tmp_path / "a", adapters=rewritten(case, tmp_path / "absolute", np.abs))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_as_peft_merges(case, dtype, tmp_path):
    base, expected = safeload.load(BASE), safeload.load(KINDS / f"{case}.safetensors")
    save_file({name: value.astype(dtype) for name, value in base.items()}, tmp_path / "base.safetensors")
    merged = safeload.load(tmp_path / "base.safetensors", adapters=KINDS / case)
    assert {name for name in base if not np.array_equal(base[name], merged[name])} == set(expected)
    terms = {} if case.startswith(ROTATED) else absolute_terms(case, tmp_path)
    for name, value in expected.items():
        assert merged[name].dtype == dtype
        # PEFT computes some scalings in float32.
        ulps = np.finfo(np.float32).eps * (8 if dtype == np.float32 else 1)
        bound = ulps * (terms[name] if terms else 5 * np.abs(value).max())
        assert (np.abs(merged[name] - value) <= bound).all(), name


@pytest.mark.parametrize("case", ["loha", "lokr", "vera", "adalora"])
def test_weights_scale_the_change(case, tmp_path):
    base = safeload.load(BASE)
    merged = safeload.load(BASE, adapters=[(KINDS / case, 0.75), (KINDS / case, -0.25)])
    for name, value in safeload.load(KINDS / f"{case}.safetensors").items():
        np.testing.assert_allclose(merged[name], base[name] + (value - base[name]) / 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["ia3", "oft", "boft"])
def test_kinds_that_multiply_have_no_weight(case):
    with pytest.raises(
        safeload.UnsupportedError, match=r"multiplies '.*': the weight of its adapter must be 1, not 0\.5"
    ):
        safeload.load(BASE, adapters=(KINDS / case, 0.5))


def test_kinds_are_merged_in_order(tmp_path):
    first = safeload.load(BASE, adapters=KINDS / "oft")
    save_file(first, tmp_path / "first.safetensors")
    one = safeload.load(tmp_path / "first.safetensors", adapters=[KINDS / "loha", KINDS / "ia3"])
    assert_same(safeload.load(BASE, adapters=[KINDS / "oft", KINDS / "loha", KINDS / "ia3"]), one)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", ["loha", "lokr", "ia3", "oft"])
def test_tiles_join(kind, dtype, tmp_path):
    """A large weight has the same values as its halves."""
    rows, columns = 9000, 256
    w = rng.standard_normal((rows, columns), np.float32)
    tall = {"hada_w1_a": 2, "hada_w2_a": 2, "ia3_l": 1}
    wide = {"hada_w1_b": (2, columns), "hada_w2_b": (2, columns)}
    shapes = {
        "loha": {**{role: (rows, size) for role, size in tall.items() if "hada" in role}, **wide},
        "lokr": {"lokr_w1": (9, 4), "lokr_w2": (1000, 64)},
        "ia3": {"ia3_l": (rows, 1)},
        "oft": {"oft_R.weight": (32, 28)},
    }[kind]
    config = {"peft_type": kind.upper(), **({"use_cayley_neumann": True} if kind == "oft" else {})}
    config |= {"r": 2, "alpha": 2} if kind.startswith("lo") else {}
    parts = {f"w.{role}": rng.standard_normal(shape, np.float32) / 8 for role, shape in shapes.items()}
    halves = []
    for k, part in enumerate(np.split(w, 3)):
        own = dict(parts)
        for role in set(tall) & set(shapes):
            own[f"w.{role}"] = np.split(parts[f"w.{role}"], 3)[k]
        if kind == "lokr":
            own["w.lokr_w1"] = np.split(parts["w.lokr_w1"], 3)[k]
        save_file({"w.weight": part}, tmp_path / f"{k}.safetensors")
        adapter = write(tmp_path / f"a{k}", own, config)
        halves.append(safeload.load(tmp_path / f"{k}.safetensors", adapters=adapter, dtype=dtype)["w.weight"])
    save_file({"w.weight": w}, tmp_path / "w.safetensors")
    whole = safeload.load(tmp_path / "w.safetensors", adapters=write(tmp_path / "a", parts, config), dtype=dtype)
    np.testing.assert_allclose(
        whole["w.weight"].astype(np.float32),
        np.concatenate(halves).astype(np.float32),
        rtol=0,
        atol=1e-2 if dtype else 1e-5,
    )


def test_convert_in_pieces(tmp_path):
    merged = safeload.load(BASE, adapters=KINDS / "ia3")
    safeload.convert(BASE, tmp_path / "out/", adapters=KINDS / "ia3", max_shard_size=600, resume=True)
    assert_same(safeload.load(tmp_path / "out", list(merged)), merged)


def random(*shape):
    return rng.standard_normal(shape, np.float32) / 4


# Adapters of a weight [12, 8]: configuration, and tensors by role.
OF_12_8 = {
    "DoRA": (
        {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": True},
        {"lora_A.weight": (2, 8), "lora_B.weight": (12, 2), "lora_magnitude_vector": (12,)},
    ),
    "LoHa": (
        {"peft_type": "LOHA", "r": 2, "alpha": 2},
        {"hada_w1_a": (12, 2), "hada_w1_b": (2, 8), "hada_w2_a": (12, 2), "hada_w2_b": (2, 8)},
    ),
    "LoKr": ({"peft_type": "LOKR"}, {"lokr_w1": (4, 2), "lokr_w2": (3, 4)}),
    "IA3": ({"peft_type": "IA3"}, {"ia3_l": (12, 1)}),
    "BOFT": ({"peft_type": "BOFT"}, {"boft_R": (1, 2, 4, 4), "boft_s": (12, 1)}),
}


@pytest.mark.parametrize("kind", OF_12_8)
def test_layers_that_files_divide_otherwise(kind, tmp_path):
    """Files have gate_up_proj in two tensors, and q_proj, k_proj and v_proj in one."""
    config, shapes = OF_12_8[kind]
    parts, w = {role: random(*shape) for role, shape in shapes.items()}, random(12, 8)

    def merged(name, module, stored, architecture=None):
        folder = tmp_path / name
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        if architecture is not None:
            model_type, name_of_class = architecture
            text = json.dumps({"model_type": model_type, "architectures": [name_of_class]})
            (folder / "config.json").write_text(text)
        adapter = write(
            tmp_path / f"{name} adapter", {f"{module}.{role}": part for role, part in parts.items()}, config
        )
        return safeload.load(folder, adapters=adapter)

    whole = merged("whole", "w", {"w.weight": w})["w.weight"]
    layer = "language_model.model.layers.0.mlp"
    names = [f"{layer}.{name}_proj.weight" for name in ("gate", "up")]
    halves = merged(
        "joined",
        "model.language_model.layers.0.mlp.gate_up_proj",
        dict(zip(names, np.split(w, 2), strict=True)),
        ("minimax_m3_vl", "MiniMaxM3VLForConditionalGeneration"),
    )
    np.testing.assert_allclose(np.concatenate([halves[name] for name in names]), whole, rtol=0, atol=1e-6)
    stored = {"encoder.layers.0.attn.Wqkv.weight": np.concatenate([w, w + 1, w - 1])}
    thirds = merged("divided", "layers.0.self_attn.k_proj", stored, ("nomic_bert", "NomicBertModel"))
    found = np.split(thirds["encoder.layers.0.attn.Wqkv.weight"], 3)
    own = merged("own", "w", {"w.weight": w + 1})["w.weight"]
    for value, expected in zip(found, [w, own, w - 1], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


def test_a_saved_state_dict_has_the_name_of_the_adapter(tmp_path):
    tensors = safeload.load(KINDS / "vera" / "adapter_model.safetensors")
    shutil.copytree(KINDS / "vera", tmp_path / "a")
    save_file({f"{name}.mine": value for name, value in tensors.items()}, tmp_path / "a/adapter_model.safetensors")
    assert_same(safeload.load(BASE, adapters=tmp_path / "a"), safeload.load(BASE, adapters=KINDS / "vera"))


# ---- what is refused ----

ONES = np.ones


def f32(*shape):
    return np.full(shape, 0.5, np.float32)


LOHA = {"peft_type": "LOHA", "r": 2, "alpha": 2}
W = {"w.hada_w1_a": f32(6, 2), "w.hada_w1_b": f32(2, 5), "w.hada_w2_a": f32(6, 2), "w.hada_w2_b": f32(2, 5)}
OFT = {"peft_type": "OFT", "use_cayley_neumann": True, "peft_version": "0.21.2"}
REFUSED = {
    "incomplete LoHa": (
        LOHA,
        {k: v for k, v in W.items() if "w2_b" not in k},
        ["hada_w1_a", "but LoHa has", "hada_w2_b"],
    ),
    "one core": (LOHA, {**W, "w.hada_t1": f32(2, 2)}, ["hada_t1", "hada_t2"]),
    "rank": (
        LOHA,
        {k: f32(*(3 if n == 2 else n for n in v.shape)) for k, v in W.items()},
        ["has rank 3", "'r'", "says 2"],
    ),
    "shape": (LOHA, {**W, "w.hada_w2_b": f32(2, 4)}, ["w.hada_w2_b", "[2, 4]", "it needs [2, 5]"]),
    "setting": ({**LOHA, "use_tucker_of_tomorrow": True}, W, ['"use_tucker_of_tomorrow" is True', "LoHa"]),
    "fan_in_fan_out": ({**LOHA, "fan_in_fan_out": True}, W, ['"fan_in_fan_out" is True']),
    "a tensor of LoRA": (LOHA, {**W, "v.lora_A.weight": f32(2, 5)}, ["v.lora_A.weight", "a method other than LoHa"]),
    "integers": (LOHA, {**W, "w.hada_w1_a": ONES((6, 2), np.int8)}, ["hada_w1_a", "I8", "must be floating"]),
    "a factor that does not divide": (
        {"peft_type": "LOKR"},
        {"w.lokr_w1": f32(4, 5), "w.lokr_w2": f32(1, 1)},
        ["lokr_w1", "[4, 5]", "it needs [6, 5]"],
    ),
    "a factor of a number with a remainder": (
        {"peft_type": "LOKR"},
        {"w.lokr_w1": f32(3, 2), "w.lokr_w2": f32(2, 2)},
        ["lokr_w1", "[3, 2]", "it needs [3, 5]"],
    ),
    "LoKr's second factor": (
        {"peft_type": "LOKR"},
        {"w.lokr_w1": f32(3, 5), "w.lokr_w2": f32(2, 2)},
        ["lokr_w2", "it needs [2, 1]"],
    ),
    "IA3 of another size": ({"peft_type": "IA3"}, {"w.ia3_l": f32(7, 1)}, ["ia3_l", "[7, 1]", "it needs [6, 1]"]),
    "projections": (
        {"peft_type": "VERA", "r": 2},
        {"w.vera_lambda_b": f32(6), "w.vera_lambda_d": f32(2)},
        ["vera_lambda_b", "vera_A and vera_B", "save_projection=True"],
    ),
    "AdaLoRA's ranks": (
        {"peft_type": "ADALORA", "init_r": 2, "rank_pattern": {"w.lora_E": 1}},
        {"w.lora_A": f32(2, 5), "w.lora_B": f32(6, 2), "w.lora_E": f32(2, 1)},
        ['"rank_pattern" must map names to lists'],
    ),
    "AdaLoRA's rank": (
        {"peft_type": "ADALORA", "init_r": 2, "rank_pattern": {"w.lora_E": [True, False]}},
        {"w.lora_A": f32(2, 5), "w.lora_B": f32(6, 2), "w.lora_E": f32(2, 1)},
        ["has rank 2", "'rank_pattern'", "says 1"],
    ),
    "AdaLoRA without its values": (
        {"peft_type": "ADALORA", "init_r": 2},
        {"w.lora_A": f32(2, 5), "w.lora_B": f32(6, 2)},
        ["w.lora_A", "AdaLoRA has A and B and lora_E"],
    ),
    "AdaLoRA's variants": (
        {"peft_type": "ADALORA", "use_rslora": True},
        {"w.lora_A": f32(2, 5), "w.lora_B": f32(6, 2), "w.lora_E": f32(2, 1)},
        ['"use_rslora" is True', "AdaLoRA"],
    ),
    "OFT of PEFT 0.13": ({"peft_type": "OFT"}, {"w.oft_r": f32(2, 3, 3)}, ["w.oft_r", "PEFT 0.13"]),
    "OFT without a formula": (
        {"peft_type": "OFT"},
        {"w.oft_R.weight": f32(1, 10)},
        ['"use_cayley_neumann" and "peft_version"', "ambiguous"],
    ),
    "terms": ({**OFT, "num_cayley_neumann_terms": 1001}, {"w.oft_R.weight": f32(1, 10)}, ["num_cayley_neumann_terms"]),
    "blocks": (OFT, {"w.oft_R.weight": f32(2, 1)}, ["oft_R", "[2, 1]", "it needs [1, 10]"]),
    "shared blocks": ({**OFT, "block_share": True}, {"w.oft_R.weight": f32(5, 0)}, ["it needs [1, 0]"]),
    "a factor of a butterfly": (
        {"peft_type": "BOFT", "boft_n_butterfly_factor": 3},
        {"w.boft_R": f32(2, 1, 5, 5), "w.boft_s": f32(6, 1)},
        ["boft_R", "it needs [1, 1, 5, 5]"],
    ),
    "BOFT without a scale": ({"peft_type": "BOFT"}, {"w.boft_R": f32(1, 1, 5, 5)}, ["boft_R", "boft_s"]),
}


@pytest.fixture
def base(tmp_path):
    save_file({"w.weight": f32(6, 5), "v.weight": f32(5, 5)}, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case, base, tmp_path):
    config, tensors, words = REFUSED[case]
    with pytest.raises(safeload.SafeloadError) as caught:
        safeload.load(base, adapters=write(tmp_path / "a", tensors, config))
    assert all(word in str(caught.value) for word in words), caught.value


def test_square_weights_of_both_orders_are_refused(base, tmp_path):
    save_file({"a.weight": f32(5, 5), "b.weight": f32(5, 4)}, tmp_path / "square.safetensors")
    adapter = write(tmp_path / "a", {"a.ia3_l": f32(5, 1), "b.ia3_l": f32(4, 1)}, {"peft_type": "IA3"})
    with pytest.raises(safeload.UnsupportedError, match=r"a\.ia3_l' of the adapter changes 'a\.weight'.*\[in, out\]\?"):
        safeload.load(tmp_path / "square.safetensors", adapters=adapter)


# ---- the other doors ----

TITLES = {
    "loha": ("a LoHa", "LoHa: r 2 to 3, alpha 3 to 5"),
    "lokr": ("a LoKr", "LoKr: r 1, alpha 3"),
    "ia3": ("an IA3", "changes 7 modules"),
    "oft": ("an OFT", "changes 6 modules"),
    "boft": ("a BOFT", "changes 5 modules"),
    "vera": ("a VeRA", "VeRA: r 5"),
    "adalora": ("an AdaLoRA", "AdaLoRA: r 2 to 3, alpha 3"),
}


@pytest.mark.parametrize("case", TITLES)
def test_info_and_check(case, capsys):
    kind, line = TITLES[case]
    assert main(["info", str(KINDS / case), "--base", str(BASE)]) == 0
    printed = capsys.readouterr().out
    assert f"{kind} adapter (PEFT" in printed
    assert "pass it as --adapter with its base" in printed
    assert line in printed
    assert "fits " in printed
    assert safeload.check(KINDS / case, base=BASE).ok


def test_check_names_what_does_not_fit(base, tmp_path):
    adapter = write(tmp_path / "a", {**W, "w.hada_w2_b": f32(2, 4)}, LOHA)
    (error,) = safeload.check(adapter, base=base).errors
    assert error.code == "adapter.base"
    assert "it needs [2, 5]" in str(error)
