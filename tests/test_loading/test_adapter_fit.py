"""Which tensors adapters change, and in which order the axes of these are: told by names and shapes, or refused."""

import json
import shutil

import numpy as np
import pytest
from builders.adapters import LORA, assert_merged, assert_same, pair, write
from builders.clusters import signed
from builders.paths import DATA
from builders.random import rng

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.any_python

# Every layer of this model may be square: [out, in], or [in, out] where it is Conv1D.
SHAPES = {"square": (6, 6), "wide": (6, 18), "tall": (18, 6)}


def model_of(folder, shapes, model_type=None):
    """A base in a folder."""
    folder.mkdir(exist_ok=True)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", durable=False)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def lora_of(folder, layers, **config):
    """An adapter for layers, given by [out, in]."""
    parts = {}
    for k, (module, (rows, columns)) in enumerate(layers.items()):
        parts.update(pair(rows, columns, module=module, seed=k))
    return write(folder, parts, **config)


# ---- layers ----


@pytest.mark.parametrize(
    ("stored", "flag", "model_type", "transposed"),
    [
        # all of one class: the flag holds
        ({"a.q_proj": "square", "a.up": "tall"}, False, None, {"a.q_proj": False}),
        ({"a.q_proj": "square"}, False, "llama", {"a.q_proj": False}),
        ({"a.mixed": "square"}, True, None, {"a.mixed": True}),
        ({"a.mixed": "square", "a.other": "wide"}, True, None, {"a.mixed": True}),
        ({"a.c_proj": "square"}, False, None, {"a.c_proj": False}),
        # shapes say what the flag does not
        ({"a.up": "tall", "a.c_attn": "wide"}, False, None, {}),
        ({"a.up": "tall", "a.c_attn": "wide"}, True, None, {}),
        # layers of the same name, and of the names that only Conv1D has
        ({"h.attn.c_proj": "square", "h.mlp.c_proj": "wide", "up": "tall"}, False, None, {"h.attn.c_proj": True}),
        ({"h.attn.c_proj": "square", "h.c_attn": "wide", "up": "tall"}, False, None, {"h.attn.c_proj": True}),
        ({"h.attn.c_proj": "square", "h.c_attn": "tall", "up": "tall"}, False, None, {"h.attn.c_proj": False}),
        # the model says it
        ({"h.c_proj": "square", "score": "square"}, False, "gpt2", {"h.c_proj": True, "score": False}),
        ({"h.c_proj": "square", "score": "square"}, True, "gpt2", {"h.c_proj": True, "score": False}),
        # nothing does
        ({"h.c_proj": "square", "lm_head": "tall"}, False, None, "h.c_proj"),
        ({"h.c_proj": "square", "lm_head": "square"}, False, "mine", "h.c_proj"),
        ({"a.x": "square", "a.c_attn": "wide", "a.up": "tall"}, False, None, "a.x"),
        ({"a.x": "square", "a.y": "tall"}, True, None, "a.x"),
        ({"a.x": "square", "a.y": "wide"}, False, None, "a.x"),
        ({"h.c_proj": "square", "h.c_fc": "wide", "h.c_attn": "tall"}, True, None, "h.c_proj"),
    ],
)
def test_square_layers(stored, flag, model_type, transposed, tmp_path):
    """The stored shapes, with Linear [18, 6] as "tall" and Conv1D [6, 18] as "wide": both take 6 and give 18."""
    base = model_of(tmp_path / "base", {f"{name}.weight": SHAPES[kind] for name, kind in stored.items()}, model_type)
    given = {name: (6, 6) if kind == "square" else (18, 6) for name, kind in stored.items()}
    adapter = lora_of(tmp_path / "lora", given, fan_in_fan_out=flag)
    if isinstance(transposed, str):
        words = [f"{transposed}.lora_A.weight", f"{transposed}.weight", "[out, in] or [in, out]", "fan_in_fan_out"]
        with pytest.raises(safeload.UnsupportedError) as caught:
            safeload.load(base, adapters=adapter)
        assert all(word in str(caught.value) for word in words), caught.value
        assert ("config.json" in str(caught.value)) == (model_type is None)
        return
    merged, before = safeload.load(base, adapters=adapter), safeload.load(base)
    for k, (name, kind) in enumerate(stored.items()):
        a, b = pair(*given[name], seed=k).values()
        change = 2 * (b @ a)
        turned = kind == "wide" or transposed.get(name, False)
        assert_merged(merged[f"{name}.weight"], before[f"{name}.weight"] + (change.T if turned else change), 3)


@pytest.mark.parametrize(
    ("stored", "model_type", "transposed"),
    [
        ({"h.attn.c_proj": "square", "h.c_attn": "wide"}, "gpt2", True),
        ({"h.attn.c_proj": "square", "h.mlp.c_proj": "wide"}, None, True),
        ({"h.attn.c_proj": "square", "h.c_attn": "tall"}, "gpt2", False),  # as mlx-lm has GPT-2
        ({"h.attn.c_proj": "square"}, "gpt_bigcode", False),
        ({"h.attn.q_proj": "square"}, None, False),
        ({"h.attn.c_proj": "square"}, "gpt2", None),
        ({"h.attn.c_proj": "square"}, None, None),
    ],
)
def test_square_layers_of_mlx(stored, model_type, transposed, tmp_path):
    """mlx-lm turns the matrices of Conv1D, so an adapter of MLX fits either form: other layers tell which."""
    base = model_of(tmp_path / "base", {f"{name}.weight": SHAPES[kind] for name, kind in stored.items()}, model_type)
    tensors = {}
    for name, kind in stored.items():
        b, a = pair(6 if kind == "square" else 18, 6, module=name).values()
        tensors |= {f"{name}.lora_a": np.ascontiguousarray(b.T), f"{name}.lora_b": np.ascontiguousarray(a.T)}
    adapter = tmp_path / "mlx"
    adapter.mkdir()
    save_file(tensors, adapter / "adapters.safetensors", durable=False)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 2.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    if transposed is None:
        with pytest.raises(safeload.UnsupportedError, match=r"c_proj.weight' of .*\[out, in\] or \[in, out\]"):
            safeload.load(base, adapters=adapter)
        return
    merged, before = safeload.load(base, adapters=adapter), safeload.load(base)
    name = next(iter(stored))
    a, b = pair(6, 6).values()
    change = 2 * (b @ a)
    assert_merged(merged[f"{name}.weight"], before[f"{name}.weight"] + (change.T if transposed else change), 3)


def test_pieces_know_what_the_whole_base_tells(tmp_path):
    """A piece has some of the tensors: which are stored as [in, out], and what experts there are, is in the plan."""
    for case in ("mixed", "experts"):
        base = tmp_path / case
        base.mkdir()
        shutil.copy(LORA / f"{case}_base.safetensors", base / "model.safetensors")
        if case == "mixed":
            (base / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        safeload.convert(base, tmp_path / f"{case}-apart", max_shard_size=450)
        found = safeload.load(base, adapters=LORA / case)
        plan = safeload.plan_convert(
            tmp_path / f"{case}-apart", tmp_path / f"{case}-out", adapters=LORA / case, max_shard_size=450
        )
        plan = safeload.Plan(json.loads(json.dumps(plan)))
        assert len(plan.pieces) > 2
        safeload.finalize(plan, [safeload.run_piece(piece) for piece in plan.pieces])
        assert_same(safeload.load(tmp_path / f"{case}-out"), found)


# ---- parameters ----


def experts_of(folder, sizes, count=3, rank=2, **config):
    """An adapter for parameters of one module, from the outermost: (out, in) of each."""
    parts = {}
    for k, (rows, columns) in enumerate(sizes):
        module = "m.experts" + ".base_layer" * k
        parts.update(pair(rows, columns, rank=count * rank, module=module, seed=k))
    config = {"target_parameters": ["experts.up", "experts.down"], **config}
    return write(folder, parts, **config)


def change_of(rows, columns, count, seed, rank=2):
    """The changes of all experts, [experts, out, in]: with the einsum of PEFT."""
    a, b = pair(rows, columns, rank=count * rank, seed=seed).values()
    return 2 * np.einsum("ore,eri->eoi", b.reshape(rows, rank, count), a.reshape(count, rank, columns))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(14, 7), (1700, 1300)])
def test_experts_in_tiles(turned, rows, columns, tmp_path):
    """A tile has up to 4 Mi elements."""
    up = (3, columns, rows) if turned else (3, rows, columns)
    base = model_of(tmp_path / "base", {"m.experts.up": up, "m.experts.down": (3, columns, columns)})
    adapter = experts_of(tmp_path / "lora", [(columns, columns), (rows, columns)])
    merged, before = safeload.load(base, adapters=adapter), safeload.load(base)
    changes = {"down": change_of(columns, columns, 3, 0), "up": change_of(rows, columns, 3, 1)}
    for name, change in ((f"m.experts.{part}", change) for part, change in changes.items()):
        expected = before[name] + (change.swapaxes(1, 2) if turned else change)
        assert_merged(merged[name], expected, 4)
    safeload.convert(before, tmp_path / "out.safetensors", adapters=adapter)
    assert all(
        np.array_equal(value, merged[name]) for name, value in safeload.load(tmp_path / "out.safetensors").items()
    )


def test_packed_experts(tmp_path):
    folder, name = DATA / "quantized" / "gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"
    true = safeload.load(folder, dtype="float32")
    a, b = pair(64, 96, rank=4).values()
    parts = {f"{name.rpartition('.')[0]}.lora_{which}.weight": one for which, one in (("A", a), ("B", b))}
    adapter = write(tmp_path / "lora", parts, target_parameters=["0.mlp.experts.gate_up_proj"])
    merged = safeload.load(folder, adapters=adapter, dtype="float32")
    change = 2 * np.einsum("ore,eri->eio", b.reshape(64, 2, 2), a.reshape(2, 2, 96))
    assert_merged(merged[name], true[name] + change, 4)
    in_memory = safeload.load(folder)
    safeload.convert(in_memory, tmp_path / "out.safetensors", adapters=adapter, dtype="float32")
    assert np.array_equal(safeload.load(tmp_path / "out.safetensors")[name], merged[name])


def apart(weights):
    """The same weights as most files have them: experts one by one, and gate and up apart."""
    found = {}
    for name, value in weights.items():
        outer, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or "layers.1." in name:
            found[name] = value
            continue
        layers = ["down_proj"] if last == "down_proj" else ["gate_proj", "up_proj"]
        for expert, matrix in enumerate(value):
            parts = np.split(matrix, len(layers))
            found.update((f"{outer}.{expert}.{one}.weight", part) for one, part in zip(layers, parts, strict=True))
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


def test_experts_that_are_stored_one_by_one(tmp_path):
    """As PEFT merges the stacks that transformers makes of them; also in pieces."""
    base, adapter = LORA / "experts_base.safetensors", LORA / "experts"
    expected = apart({**safeload.load(base), **safeload.load(LORA / "experts.safetensors")})
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(apart(safeload.load(base)), folder / "model.safetensors", durable=False)
    merged = safeload.load(folder, adapters=adapter)
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert_merged(merged[name], value, 40)
    some = ["layers.0.experts.1.up_proj.weight", "layers.2.experts.0.down_proj.weight"]
    assert_same(safeload.load(folder, some, adapters=adapter), {name: merged[name] for name in some})
    safeload.convert(folder, tmp_path / "apart", max_shard_size=450)
    plan = safeload.plan_convert(tmp_path / "apart", tmp_path / "out", adapters=adapter, max_shard_size=450)
    plan = safeload.Plan(json.loads(json.dumps(plan)))
    safeload.finalize(plan, [safeload.run_piece(piece) for piece in plan.pieces])
    assert_same(safeload.load(tmp_path / "out"), merged)


MODEL = "model.layers.0.mlp."
GATE_UP, DOWN, ROUTER = f"{MODEL}experts.gate_up_proj", f"{MODEL}experts.down_proj", f"{MODEL}gate.weight"
# Names of the model, and of each tensor in files; "{}" is the number of an expert.
STORED = {
    "mixtral": {
        GATE_UP: ["model.layers.0.block_sparse_moe.experts.{}.w1.weight", "...w3.weight"],
        DOWN: ["model.layers.0.block_sparse_moe.experts.{}.w2.weight"],
        ROUTER: ["model.layers.0.block_sparse_moe.gate.weight"],
    },
    "phimoe": {
        GATE_UP: ["model.layers.0.block_sparse_moe.experts.{}.w1.weight", "...w3.weight"],
        DOWN: ["model.layers.0.block_sparse_moe.experts.{}.w2.weight"],
        f"{MODEL}router.weight": ["model.layers.0.block_sparse_moe.gate.weight"],
    },
    "granite": {
        "h.0.block_sparse_moe.experts.gate_up_proj": ["h.0.block_sparse_moe.input_linear.weight"],
        "h.0.block_sparse_moe.experts.down_proj": ["h.0.block_sparse_moe.output_linear.weight"],
        "h.0.block_sparse_moe.router.weight": ["h.0.block_sparse_moe.router.layer.weight"],
    },
    "qwen": {
        GATE_UP: [MODEL + "experts.{}.gate_proj.weight", "...up_proj.weight"],
        DOWN: [MODEL + "experts.{}.down_proj.weight"],
        ROUTER: [ROUTER],
    },
    "lfm2": {
        "h.0.feed_forward.experts.gate_up_proj": ["h.0.feed_forward.experts.{}.w1.weight", "...w3.weight"],
        "h.0.feed_forward.experts.down_proj": ["h.0.feed_forward.experts.{}.w2.weight"],
        "h.0.feed_forward.gate.weight": ["h.0.feed_forward.gate.weight"],
    },
    "nemotron": {
        "h.0.mixer.experts.up_proj": ["h.0.mixer.experts.{}.up_proj.weight"],
        "h.0.mixer.experts.down_proj": ["h.0.mixer.experts.{}.down_proj.weight"],
        "h.0.mixer.gate.weight": ["h.0.mixer.gate.weight"],
    },
}


def stored_as(layout, tensors):
    """The tensors of a model under the names of files."""
    found = {}
    for name, templates in STORED[layout].items():
        value, first = tensors[name], templates[0]
        for template, part in zip(templates, np.split(value, len(templates), axis=-2), strict=True):
            full = template.replace("...", first.rpartition("}.")[0] + "}.")
            if "{}" in full:
                found.update((full.format(k), np.ascontiguousarray(matrix)) for k, matrix in enumerate(part))
            else:
                found[full] = part
    return found


@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("saved", [False, True], ids=["LoRA of the router", "saved router"])
def test_names_of_the_model_and_of_files(layout, saved, tmp_path):
    """As if the files had the names, and the stacks, of the model; also patterns match the names of the model."""
    gate_up, down, router = STORED[layout]
    shapes = {gate_up: (3, 14, 6), down: (3, 6, 7), router: (3, 6)}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for folder, weights in (("model", tensors), ("files", stored_as(layout, tensors))):
        (tmp_path / folder).mkdir()
        save_file(weights, tmp_path / folder / "model.safetensors", durable=False)
    outer, gate = gate_up.rpartition(".")[0], router.removesuffix(".weight")
    parts = {
        **pair(6, 7, rank=6, module=outer, seed=1),
        **pair(14, 6, rank=6, module=outer + ".base_layer", seed=2),
        **({router: np.ones((3, 6), np.float32)} if saved else pair(3, 6, module=gate, seed=3)),
    }
    ends = [name.partition("0.")[2] for name in (gate_up, down, router)]
    config = {"modules_to_save": [gate]} if saved else {"alpha_pattern": {ends[0]: 7, ends[2]: 5}}
    adapter = write(tmp_path / "lora", parts, target_parameters=ends[: 2 if saved else 3], **config)
    expected = stored_as(layout, safeload.load(tmp_path / "model", adapters=adapter))
    merged = safeload.load(tmp_path / "files", adapters=adapter)
    assert not np.array_equal(expected[STORED[layout][router][0]], tensors[router])
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert_merged(merged[name], value, 6)
    plan = safeload.plan_convert(tmp_path / "files", tmp_path / "out", adapters=adapter, max_shard_size=300)
    for pieces in (plan.pieces, json.loads(json.dumps(plan))["pieces"]):
        safeload.finalize(plan, [safeload.run_piece(piece) for piece in pieces])
        assert_same(safeload.load(tmp_path / "out"), merged)
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [0, ["w1"], 1, 1, "m"],
        [1, "w1", 1, 1, "m"],
        [1, [1], 1, 1, "m"],
        [True, ["w1"], 1, 1, "m"],
        [1, ["w1"], 1, 1],
        3,
    ],
)
def test_a_piece_with_a_stack_that_is_none(wrong, tmp_path):
    save_file(apart(safeload.load(LORA / "experts_base.safetensors")), tmp_path / "b.safetensors", durable=False)
    plan = safeload.plan_convert(
        tmp_path / "b.safetensors", tmp_path / "out", adapters=LORA / "experts", max_shard_size="1MB"
    )
    stacks = plan.pieces[0]["adapters"][0]["apart"]
    stacks[next(iter(stacks))] = wrong
    with pytest.raises(safeload.FormatError, match="invalid piece: "):
        safeload.run_piece(plan.pieces[0])


def test_a_piece_with_the_stack_of_another_model(tmp_path):
    """The core would read rows behind the adapter's own."""
    adapter, stored = (
        experts_of(tmp_path / "lora", [(14, 7)], target_parameters=["experts.down_proj"]),
        "m.experts.0.down_proj.weight",
    )
    pieces = []
    for rows in (14, 9_999):
        experts = {stored.replace("0", str(k)): np.zeros((rows, 7), np.float32) for k in range(3)}
        save_file(experts, tmp_path / f"{rows}.safetensors", durable=False)
        options = {"adapters": adapter} if rows == 14 else {}
        pieces.append(
            safeload.plan_convert(tmp_path / f"{rows}.safetensors", tmp_path / f"{rows}/", **options).pieces[0]
        )
    forged = signed({**pieces[1], "adapters": pieces[0]["adapters"]})
    with pytest.raises(safeload.FormatError, match=r"is \[9999, 7\], but the stack .* needs \[14, 7\]") as caught:
        safeload.run_piece(forged)
    assert caught.value.tensor == stored


def test_a_piece_with_more_experts_than_fit_in_memory(tmp_path):
    """The experts are not counted before the first is looked at."""
    adapter = experts_of(tmp_path / "lora", [(14, 7)], target_parameters=["experts.down_proj"])
    experts = {f"m.experts.{k}.down_proj.weight": np.zeros((14, 7), np.float32) for k in range(3)}
    save_file(experts, tmp_path / "b.safetensors", durable=False)
    piece = safeload.plan_convert(tmp_path / "b.safetensors", tmp_path / "out", adapters=adapter).pieces[0]
    (stack,) = piece["adapters"][0]["apart"].values()
    stack[0] = 1 << 60
    with pytest.raises(safeload.FormatError, match=f"a multiple of {1 << 60} rows"):
        safeload.run_piece(signed(piece))


def test_square_experts_of_a_model_that_is_known(tmp_path):
    adapter = experts_of(tmp_path / "lora", [(7, 7)], target_parameters=["experts.down"])
    base = model_of(tmp_path / "base", {"m.experts.down": (3, 7, 7)}, "gpt_oss")
    merged, before = safeload.load(base, adapters=adapter), safeload.load(base)
    expected = before["m.experts.down"] + change_of(7, 7, 3, 0).swapaxes(1, 2)
    assert_merged(merged["m.experts.down"], expected, 4)


@pytest.mark.parametrize(
    ("shapes", "sizes", "config", "words"),
    [
        ({"down": (3, 7, 7)}, [(7, 7)], {"target_parameters": ["down"]}, ["[experts, in, out]", "m.experts.down"]),
        (
            {"down": (3, 7, 5), "up": (3, 7, 5)},
            [(7, 5), (7, 5)],
            {},
            ["neither shapes nor names tell", "experts.up"],
        ),
        ({"down": (3, 7, 5), "up": (3, 14, 7)}, [(7, 5)], {}, ["has 1 of this module", "names 2 tensors"]),
        ({"down": (3, 7, 5), "up": (3, 14, 7)}, [(7, 5), (9, 9)], {}, ["base_layer.lora_A", "[6, 9]", "it needs"]),
        ({"down": (3, 7, 5)}, [(7, 5), (14, 7)], {}, ["belongs to 'm.experts.up'", "does not have"]),
        ({"0.down.weight": (7, 5)}, [(7, 5)], {}, ["'m.experts.up'", "experts are stored one by one, under names"]),
        ({"down": (4, 7, 5)}, [(7, 5)], {"target_parameters": ["down"]}, ["a multiple of 4 rows"]),
        ({"down": (0, 7, 5)}, [(7, 5)], {"target_parameters": ["down"]}, ["a multiple of 0 rows"]),
        ({"down": (1, 5, 7)}, [(7, 5)], {"target_parameters": ["down"]}, ["[1, 5, 7]", "needs [6, 7]"]),
        ({"down": (3, 1, 7, 5)}, [(7, 5)], {"target_parameters": ["down"]}, ["two or three axes"]),
        ({"down": (3, 7, 5)}, [(7, 5)], {"target_parameters": ["down"], "r": 3}, ["has rank 2", "says 3"]),
        ({"up": (9,), "weight": (7, 5)}, [(7, 5)], {"target_parameters": ["other"]}, ["has rank 6", "says 2"]),
    ],
)
def test_parameters_that_do_not_fit(shapes, sizes, config, words, tmp_path):
    base = model_of(tmp_path / "base", {f"m.experts.{name}": shape for name, shape in shapes.items()})
    with pytest.raises(safeload.SafeloadError) as caught:
        safeload.load(base, adapters=experts_of(tmp_path / "lora", sizes, **config))
    assert all(word in str(caught.value) for word in words), caught.value


def test_parameters_have_neither_dora_nor_biases(tmp_path):
    base = model_of(tmp_path / "base", {"m.experts.down": (3, 7, 5), "m.experts.bias": (7,)})
    parts = {**pair(7, 5, rank=6, module="m.experts"), "m.experts.lora_magnitude_vector": np.ones(7, np.float32)}
    dora = write(tmp_path / "dora", parts, target_parameters=["experts.down"], use_dora=True)
    parts = {**pair(7, 5, rank=6, module="m.experts"), "m.experts.lora_B.bias": np.ones(7, np.float32)}
    bias = write(tmp_path / "bias", parts, target_parameters=["experts.down"], lora_bias=True)
    for adapter in (dora, bias):
        with pytest.raises(safeload.UnsupportedError, match="neither DoRA nor lora_bias"):
            safeload.load(base, adapters=adapter)


def test_one_tensor_is_not_both_a_stack_and_a_convolution(tmp_path):
    base = model_of(tmp_path / "base", {"m.weight": (3, 7, 5)})
    a, b = np.ones((2, 7, 5), np.float32), np.ones((3, 2, 1), np.float32)
    convolution = write(tmp_path / "convolution", {"m.lora_A.weight": a, "m.lora_B.weight": b})
    stack = write(tmp_path / "stack", pair(7, 5, rank=6, module="m"), target_parameters=["m.weight"])
    with pytest.raises(safeload.UnsupportedError, match=r"'m\.weight' is a stack"):
        safeload.load(base, adapters=[convolution, stack])
