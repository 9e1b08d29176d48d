"""Conversions in pieces: the same bytes as in one go, whoever does the pieces, however often, in whatever order."""

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders.clusters import RESUME, content, record_of, run_pieces, waiting
from builders.inside import atomic_file, local
from builders.quantized import FIXTURES
from builders.thorough import dealt

import safeload
from safeload import FormatError, Layout, Plan, StackedTensor, UnsupportedError
from safeload.errors import MissingShardError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

INDEX = "model.safetensors.index.json"


def scattered(stored, config, folder, shards=3):
    """A folder in which the parts of a packed tensor, which are neighbours, are in different shards."""
    folder.mkdir(parents=True)
    names = sorted(stored)
    weight_map = {name: f"model-{k % shards + 1:05}-of-{shards:05}.safetensors" for k, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: stored[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if config.exists():
        shutil.copy(config, folder / "config.json")
    return folder


def contents(folder):
    """The SHA-256 of each file, but for records."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).iterdir())
        if path.name != RESUME
    }


def in_pieces(src, dst, *, order=reversed, **options):
    """A conversion by its plan, which passes through JSON on the way, as do its pieces and results."""
    plan = json.loads(json.dumps(safeload.plan_convert(src, dst, **options)))
    results = [safeload.run_piece(json.loads(json.dumps(piece)), threads=2) for piece in order(plan["pieces"])]
    return safeload.finalize(plan, json.loads(json.dumps(results)))


def known(summary):
    """A summary without the source's tensors, which pieces do not report."""
    return summary and summary._replace(tensors=None)


def assert_same(src, tmp_path, **options):
    """In pieces and in one go."""
    want = safeload.convert(src, tmp_path / "want", **options)
    got = in_pieces(src, tmp_path / "got", **options)
    assert contents(tmp_path / "got") == contents(tmp_path / "want")
    assert [os.path.basename(file) for file in got.files] == [os.path.basename(file) for file in want.files]
    assert (got.format, got.tensors, got.nbytes) == (want.format, want.tensors, want.nbytes)
    assert known(got.summary) == known(want.summary)
    with ThreadPoolExecutor(3) as executor:
        again = safeload.convert(src, tmp_path / "executor", executor=executor, **options)
    assert contents(tmp_path / "executor") == contents(tmp_path / "want")
    assert known(again.summary) == known(want.summary)
    return got


@pytest.fixture
def copied(model, tmp_path):
    """A copy of `model` that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "model"))


LIMIT = "60KB"

# ---- the same bytes ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "f16", "only": "*norm*"},
        {"drop": ["*.mlp.*", "lm_head*"]},
        {"names": ["model.norm.weight", "model.embed_tokens.weight"]},
        {"quantize": "q8_0"},
        {"quantize": "int8", "dtype": "f32", "keep": "*.0.*"},
        {"quantize": {"*.mlp.*": "q4_0", "*": None}},
        {"rename": [(r"^model\.", "language_model."), (r"(\d+)", r"<\1>")], "dtype": "f16"},
        {"metadata": {"format": None, "note": "made in pieces"}},
        {"extras": False},
    ],
    ids=lambda options: ",".join(options) or "copied",
)
def test_a_model_in_pieces_is_the_model_in_one_go(model, tmp_path, options):
    assert_same(model, tmp_path, max_shard_size=LIMIT, **options)


# One of each family, and those whose codes or scales come in another form.
FAMILIES = [
    "bitnet_divided",
    "comfy_scaled_fp8",
    "ct_kimi",
    "ct_mixed",
    "ct_nvfp4",
    "ct_old_g_idx",
    "deepseek_v4",
    "fp8_block",
    "fp8_experts",
    "gpt_oss",
    "mistral_qscale",
    "mlx_affine4_g64",
    "mlx_experts",
    "modelopt_nvfp4_experts",
    "modelopt_nvfp4_hf_quant_config",
    "mxfp8",
]


@pytest.mark.parametrize(("name", "dtype"), dealt(FAMILIES, [None, "bfloat16"]))
def test_packed_weights_whose_scales_are_in_other_shards(name, dtype, tmp_path):
    fixture = FIXTURES[name]
    if len(list(fixture.folder.iterdir())) == 1:  # without a config.json, as ComfyUI's
        src = fixture.path
    else:
        src = scattered(fixture.stored(), fixture.folder / "config.json", tmp_path / "model")
        for path in fixture.folder.glob("hf_quant_config.json"):
            shutil.copy(path, src)
    want = safeload.convert(src, tmp_path / "want", dtype=dtype, max_shard_size=3000)
    got = in_pieces(src, tmp_path / "got", dtype=dtype, max_shard_size=3000)
    assert contents(tmp_path / "got") == contents(tmp_path / "want")
    assert (got.tensors, got.nbytes, len(got.files)) == (want.tensors, want.nbytes, len(want.files))


def test_stacked_layers(tmp_path):
    layers = {f"h.{k}.w": np.float32([[k, 1], [2, 3], [4, 5]]) for k in range(12)}
    save_file({name: layers[name] for name in sorted(layers)[:5]}, tmp_path / "a.safetensors")
    save_file({name: layers[name] for name in sorted(layers)[5:]}, tmp_path / "b.safetensors")
    src = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    layout = Layout("tiny", [StackedTensor("w", "h.{}.w", transpose=True), StackedTensor("last", "h.11.w")])
    assert_same(src, tmp_path, layout=layout, dtype="float16", max_shard_size=10)
    # What is left out of the plan is not among the layers that the pieces see.
    shutil.rmtree(tmp_path / "want")
    safeload.convert(src, tmp_path / "want", layout=Layout("w", layout.tensors[:1]), drop="h.1?.w", max_shard_size=1)
    in_pieces(src, tmp_path / "few", layout=Layout("w", layout.tensors[:1]), drop="h.1?.w", max_shard_size=1)
    assert contents(tmp_path / "few") == contents(tmp_path / "want")
    assert safeload.load(tmp_path / "few")["w"].shape == (10, 2, 3)


def test_other_formats(tmp_path, monkeypatch):
    pytest.importorskip("sybil")  # of the examples, whose files these are
    from builders.doc_examples import make_files

    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    np.savez_compressed("packed.npz", a=np.arange(9.0), b=np.ones((3, 4)))
    for k, name in enumerate(["tiny-q8_0.gguf", "packed.npz", "model.pth"]):
        if not os.path.exists(name):
            continue
        in_pieces(name, f"got{k}", dtype="f16", max_shard_size=100)
        safeload.convert(name, f"want{k}", dtype="f16", max_shard_size=100)
        assert contents(f"got{k}") == contents(f"want{k}")


def test_a_checkpoint_is_opened_as_it_was(copied, tmp_path):
    quantized = FIXTURES["fp8_block"]
    with safeload.open(quantized.path, stored=True) as opened:
        in_pieces(opened, tmp_path / "got", max_shard_size=1000)
    stored = safeload.load(tmp_path / "got", stored=True)
    assert stored.keys() == quantized.stored().keys()
    with safeload.open([copied / "model-00001-of-00003.safetensors"]) as opened:
        in_pieces(opened, tmp_path / "one", max_shard_size=LIMIT)
        assert len(safeload.open(tmp_path / "one")) == len(opened)


def test_an_index_that_leaves_out_tensors_of_its_shards(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros(4), "b": np.full(4, 7.0)}, folder / "one.safetensors")
    save_file({"a": np.ones(4), "c": np.ones(4)}, folder / "two.safetensors")
    weight_map = {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_same(folder, tmp_path, max_shard_size=1000)
    assert safeload.load(tmp_path / "got")["a"].tolist() == [1, 1, 1, 1]


def test_relative_paths_mean_the_folder_of_the_plan(copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = safeload.plan_convert("model", "made", dtype="f16", max_shard_size=LIMIT)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    safeload.finalize(plan, map(safeload.run_piece, plan.pieces))
    safeload.convert(copied, tmp_path / "want", dtype="f16", max_shard_size=LIMIT)
    assert contents(tmp_path / "made") == contents(tmp_path / "want")


@pytest.mark.parametrize("tensors", [{"empty": np.empty((0, 3))}, {"scalar": np.float32(3)}])
def test_next_to_nothing(tensors, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(tmp_path / "x.safetensors", tmp_path, max_shard_size=1)


# ---- plans ----


def test_a_plan_is_plain_data(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", dtype="f16", quantize="q8_0", max_shard_size=LIMIT)
    assert Plan(json.loads(json.dumps(plan))) == pickle.loads(pickle.dumps(plan)) == plan
    assert not (tmp_path / "made").exists()
    assert all(isinstance(piece, dict) and piece["version"] == safeload.__version__ for piece in plan.pieces)
    (one,) = plan.pieces[0]["sources"]
    for name, size, mtime, _ in one["files"]:
        found = (model / name).stat()
        assert (size, mtime) == (found.st_size, found.st_mtime_ns)
    assert re.fullmatch(r"<Plan '.*made': convert, \d+ pieces>", repr(plan))


def test_the_size_of_a_plan_follows_the_number_of_tensors_and_shards(tmp_path):
    """Under 100 KB for 1,000 tensors, for shards of 20 tensors and more."""
    sizes = []
    for count in (1000, 4000):
        names = [f"model.layers.{k // 40}.mlp.experts.{k % 40}.down_proj.weight" for k in range(count)]
        save_file(dict.fromkeys(names, np.zeros(16, np.float32)), tmp_path / f"{count}.safetensors")
        plan = safeload.plan_convert(tmp_path / f"{count}.safetensors", tmp_path / "made", max_shard_size=20 * 64)
        assert len(plan.pieces) == count // 20
        sizes.append(len(json.dumps(plan)))
        assert sizes[-1] < 100 * count
    assert sizes[1] < 4.1 * sizes[0]


def test_the_id_tells_options_sources_and_versions_apart(copied, tmp_path, monkeypatch):
    def id_of(dst="made", **options):
        return safeload.plan_convert(copied, tmp_path / dst, **{"max_shard_size": LIMIT, **options}).id

    first = id_of()
    assert id_of("elsewhere") == first  # where it goes makes no difference
    assert id_of(dtype="f16", only="*norm*") == id_of(dtype="float16", only=["*norm*"], metadata={})
    assert id_of(quantize="Q8_0") == id_of(quantize="q8_0")
    assert id_of(drop={"*norm*", "lm_head*"}) == id_of(drop=["*norm*", "lm_head*"])
    others = [id_of(dtype="f16"), id_of(max_shard_size="100KB"), id_of(metadata={"a": "b"}), id_of(only="*norm*")]
    others.append(id_of(quantize="q8_0", keep=lambda name: ".0." in name))
    others.append(id_of(quantize="q8_0", keep=lambda name: ".1." in name))
    os.utime(copied / "model-00003-of-00003.safetensors", ns=(1, 1))
    others.append(id_of())
    assert len({first, *others}) == len(others) + 1


def test_arguments_that_are_no_plan(copied, tmp_path):
    with pytest.raises(ValueError, match=r"pass the path of a folder"):
        safeload.plan_convert(copied, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"pass the path of a folder"):
        safeload.convert(copied, tmp_path / "x.safetensors", executor=ThreadPoolExecutor(1))
    with pytest.raises(ValueError, match=r"needs the path of a checkpoint.* a dict are only in this process"):
        safeload.convert({"a": np.ones(3)}, tmp_path / "x", max_shard_size=1, executor=ThreadPoolExecutor(1))
    with pytest.raises(ValueError, match=r"rename: plans and records are text, and cannot hold a function"):
        safeload.plan_convert(copied, tmp_path / "x", max_shard_size=1, rename=[("a", lambda match: "b")])
    with pytest.raises(ValueError, match=r"flags of 'a' inline, such as \(\?i\)"):
        safeload.plan_convert(copied, tmp_path / "x", max_shard_size=1, rename=[(re.compile("a", re.I), "b")])
    with pytest.raises(TypeError, match=r"must have a submit\(\) .*pass the client"):
        safeload.convert(copied, tmp_path / "x", max_shard_size=1, executor="tcp://127.0.0.1:8786")
    with pytest.raises(TypeError, match="unexpected"):
        safeload.plan_convert(copied, tmp_path / "x", max_shard_size=1, dtpye="f16")
    assert not (tmp_path / "x").exists()


def test_iterators_are_read_once(model, tmp_path):
    names = (name for name in ["model.norm.weight"])
    assert in_pieces(model, tmp_path / "made", names=names, max_shard_size=LIMIT).tensors == 1


class Names:
    """Names whose text, other than a list's, has the address of the object."""

    def __iter__(self):
        return iter(["model.norm.weight", "model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", [tuple, np.array, dict.fromkeys, lambda names: dict.fromkeys(names).keys(), iter])
def test_the_id_is_that_of_the_names_whatever_holds_them(model, tmp_path, kind):
    def plan(names):
        return safeload.plan_convert(model, tmp_path / "made", names=names, max_shard_size=LIMIT)

    assert plan(kind(list(Names()))).id == plan(Names()).id == plan(list(Names())).id


# ---- pieces ----


def test_a_piece_that_is_done_again_writes_nothing(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", dtype="f16", max_shard_size=LIMIT)
    first = [safeload.run_piece(piece) for piece in plan.pieces]
    assert all(result["written"] for result in first)
    before = stamps(waiting(tmp_path / "made"), "*")
    again = [safeload.run_piece(piece) for piece in plan.pieces]
    assert not any(result["written"] for result in again)
    for one, other in zip(first, again, strict=True):
        assert [one[key] for key in ("file", "size", "sha256")] == [other[key] for key in ("file", "size", "sha256")]
        path = waiting(tmp_path / "made") / one["file"]
        assert (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) == (one["size"], one["sha256"])
    assert before == stamps(waiting(tmp_path / "made"), "*")
    report = safeload.finalize(plan, [*again, *first])
    assert safeload.finalize(plan, first)[:5] == report[:5]


def test_a_piece_done_by_several_at_a_time(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", dtype="f32", max_shard_size=LIMIT)
    pieces = [*plan.pieces] * 4
    random.Random(0).shuffle(pieces)
    with ThreadPoolExecutor(6) as executor:
        results = list(executor.map(safeload.run_piece, pieces))
    safeload.finalize(plan, results)
    safeload.convert(model, tmp_path / "want", dtype="f32", max_shard_size=LIMIT)
    assert contents(tmp_path / "made") == contents(tmp_path / "want")


@pytest.mark.parametrize("same", [True, False])
def test_a_file_in_use_by_a_process_that_does_the_same_piece(model, tmp_path, monkeypatch, same):
    """Windows replaces no file that is open: what stands there must then be what was to be written."""
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    first = safeload.run_piece(plan.pieces[0])
    path = waiting(tmp_path / "made") / first["file"]
    if same:
        record_of(path).unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    replace = os.replace

    def refuse(source, target):
        if os.fspath(target) == os.fspath(path):
            raise PermissionError(13, "in use")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    if same:
        assert safeload.run_piece(plan.pieces[0])["sha256"] == first["sha256"]
    else:
        with pytest.raises(PermissionError):
            safeload.run_piece(plan.pieces[0])


def test_a_piece_never_maps_a_file(copied, tmp_path, monkeypatch):

    def refuse(*_):
        raise AssertionError("a piece maps a file")

    for src in (copied, FIXTURES["ct_pack_w4_g32_sym"].path, FIXTURES["mlx_affine4_g64"].path):
        for options in ({}, {"dtype": "f16"}, {"quantize": "q8_0", "requantize": True}):
            place = tmp_path / f"{Path(src).name}{len(options)}{options.get('dtype')}"
            plan = safeload.plan_convert(src, place, max_shard_size=LIMIT, **options)
            with monkeypatch.context() as patched:
                patched.setattr(local.LocalStore, "map", refuse)
                results = [safeload.run_piece(piece) for piece in plan.pieces]
            safeload.finalize(plan, results)


@pytest.mark.parametrize("change", ["bytes", "time", "gone", "config"])
def test_sources_that_are_no_longer_those_of_the_plan(tmp_path, change):
    fixture = FIXTURES["fp8_block"]
    src = scattered(fixture.stored(), fixture.folder / "config.json", tmp_path / "model")
    plan = safeload.plan_convert(src, tmp_path / "made", dtype="bfloat16", max_shard_size=1000)
    path = src / ("config.json" if change == "config" else "model-00002-of-00003.safetensors")
    if change == "bytes":
        with path.open("ab") as file:
            file.write(b"x")
    elif change == "gone":
        path.unlink()
    else:
        os.utime(path, ns=(1, 1))
    failed = []
    for piece in plan.pieces:
        if any(Path(name).name == path.name for one in piece["sources"] for name, *_ in one["files"]) or (
            change == "config" and any(one["configs"] for one in piece["sources"])
        ):
            with pytest.raises(MissingShardError if change == "gone" else FormatError) as caught:
                safeload.run_piece(piece)
            assert str(path) in str(caught.value)
            assert pickle.loads(pickle.dumps(caught.value)).path == str(path)
            if change == "gone":
                assert caught.value.tensor in fixture.expected()
            failed.append(piece)
    assert failed
    assert not list((tmp_path / "made").glob(f"{failed[0]['file']}*"))


def test_another_version_refuses(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    with pytest.raises(
        UnsupportedError, match=r"the plan was made by safeload 0\.0\.1, but this is safeload .* every worker"
    ):
        safeload.run_piece({**plan.pieces[0], "version": "0.0.1"})
    with pytest.raises(UnsupportedError, match=r"the plan was made by safeload 0\.0\.1"):
        safeload.finalize({**plan, "version": "0.0.1"}, results)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/tmp/x.safetensors", "", ".", "..", "a/b", "c:x", "a\\b", "a\0b"]
)
def test_a_piece_writes_into_its_folder_only(model, tmp_path, name):
    piece = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT).pieces[0]
    with pytest.raises(FormatError, match="bare names"):
        safeload.run_piece({**piece, "file": name})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda piece: piece.update(colour="red"),
        lambda piece: piece.pop("nbytes"),
        lambda piece: piece.update(nbytes="7"),
        lambda piece: piece["tensors"][0].update(names=[1]),
        lambda piece: piece["tensors"][0].update(dtype="F99"),
        lambda piece: piece["sources"][0].update(more=1),
        lambda piece: piece["sources"][0].update(files=[]),
        lambda piece: piece.update(sources=[7]),
        lambda piece: piece.update(id="0" * 16),
    ],
)
def test_a_piece_that_was_changed_is_refused(model, tmp_path, change):
    plan = json.loads(json.dumps(safeload.plan_convert(model, tmp_path / "made", dtype="f16", max_shard_size=LIMIT)))
    change(plan["pieces"][0])
    with pytest.raises(FormatError, match="invalid piece: it has changed since it was planned"):
        safeload.run_piece(plan["pieces"][0])
    with pytest.raises(FormatError, match=r"invalid plan: pieces\[0\]: it has changed since it was planned"):
        safeload.finalize(plan, [])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("key", ["tensors", "config", "overwrite", "options", "folder"])
def test_a_plan_that_was_changed_is_refused(model, tmp_path, key):
    plan = safeload.plan_convert(model, tmp_path / "made", dtype="f16", max_shard_size=LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    with pytest.raises(FormatError, match="invalid plan: it has changed since it was made"):
        safeload.finalize({**plan, key: 7}, results)


@pytest.mark.parametrize("call", ["..", "x", None, 7, "0" * 15])
def test_the_subfolder_of_a_piece_is_a_hash(model, tmp_path, call):
    piece = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT).pieces[0]
    with pytest.raises(FormatError, match="call must be 16 hexadecimal digits"):
        safeload.run_piece({**piece, "call": call})
    assert not (tmp_path / "made").exists()


def test_results_can_have_more_fields(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    results = [{**safeload.run_piece(piece), "worker": 7} for piece in plan.pieces]
    assert safeload.finalize(plan, results).tensors == len(safeload.open(model))


def damaged(piece, rng):
    """A piece with one value replaced or removed, somewhere."""
    copy = json.loads(json.dumps(piece))
    places = []

    def walk(value):
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            walk(value[key])

    walk(copy)
    holder, key = rng.choice(places)
    if rng.random() < 0.3:
        del holder[key]
    else:
        holder[key] = rng.choice([None, 7, -1, 1 << 70, "x", "", [], {}, [None], {"x": 1}, True, 0.5])
    return copy


def test_damaged_pieces_raise_what_bad_files_raise(model, tmp_path):
    rng = random.Random(19)
    plans = [
        safeload.plan_convert(model, tmp_path / "a", dtype="f16", rename=[("a", "b")], max_shard_size=LIMIT),
        safeload.plan_convert(FIXTURES["fp8_block"].path, tmp_path / "b", dtype="f16", max_shard_size=1000),
    ]
    refused = 0
    for k in range(400):
        plan = plans[k % 2]
        piece = damaged(rng.choice(plan.pieces), rng)
        if piece.get("folder") not in (str(tmp_path / "a"), str(tmp_path / "b")):
            piece["folder"] = rng.choice([str(tmp_path / "a"), piece.get("folder")])
            if isinstance(piece["folder"], str) and not piece["folder"].startswith(str(tmp_path)):
                continue
        try:
            safeload.run_piece(piece, threads=1)
        except (safeload.SafeloadError, OSError):
            refused += 1
        for folder in "ab":
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
    assert refused > 200


# ---- the end ----


@pytest.mark.parametrize("plan", [None, "plan.json", [], {}], ids=repr)
def test_finalize_needs_a_plan(plan):
    with pytest.raises(FormatError, match="plan"):
        safeload.finalize(plan, [])


def test_finalize_needs_every_piece(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    with pytest.raises(ValueError, match=rf"no result for 2 pieces of {len(results)}, such as 'model-00001-of"):
        safeload.finalize(plan, results[2:])
    other = safeload.plan_convert(model, tmp_path / "other", dtype="f16", max_shard_size=LIMIT)
    with pytest.raises(ValueError, match="no result for"):
        safeload.finalize(other, results)
    path = waiting(tmp_path / "made") / plan.pieces[1]["file"]
    path.replace(tmp_path / "away")
    with pytest.raises(FormatError, match="the shard is gone: run its piece again") as caught:
        safeload.finalize(plan, results)
    assert caught.value.path == str(path)
    path.write_bytes((tmp_path / "away").read_bytes() + b"x")
    with pytest.raises(FormatError):
        safeload.finalize(plan, results)
    (tmp_path / "away").replace(path)
    assert not (tmp_path / "made" / INDEX).exists()
    safeload.finalize(plan, results)
    assert safeload.check(tmp_path / "made").ok


def test_what_killed_workers_left_is_removed(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    left = tmp_path / "made" / f".{plan.pieces[0]['file']}.0123456789abcdef.tmp"
    other = tmp_path / "made" / ".someone-else.0123456789abcdef.tmp"
    for path in (left, other):
        path.write_text("half")
    safeload.finalize(plan, results)
    assert (left.exists(), other.exists()) == (False, True)


def test_a_process_killed_between_rename_and_record(model, tmp_path):
    """The shard is at its place, and nothing says that it is whole: it is written again."""
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    done = safeload.run_piece(plan.pieces[0])
    record_of(waiting(tmp_path / "made") / done["file"]).unlink()
    safeload.convert(model, tmp_path / "made", max_shard_size=LIMIT, resume=True)
    safeload.convert(model, tmp_path / "want", max_shard_size=LIMIT)
    assert contents(tmp_path / "made") == contents(tmp_path / "want")


# ---- resume ----


def stamps(folder, pattern="*.safetensors"):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob(pattern)}


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer", "another byte", "record gone", "record malformed"])
def test_resume_writes_what_is_not_whole(model, tmp_path, damage):
    options = {"dtype": "f16", "max_shard_size": LIMIT}
    made = tmp_path / "made"
    safeload.convert(model, tmp_path / "want", **options)
    run_pieces(model, made, **options)
    before = stamps(waiting(made))
    path = sorted(waiting(made).glob("*.safetensors"))[1]
    record = record_of(path)
    if damage == "gone":
        path.unlink()
    elif damage == "record gone":
        record.unlink()
    elif damage == "record malformed":
        record.write_text('{"piece": 7')
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes({"shorter": data[:-1], "longer": data + b"x", "another byte": data}[damage])
        os.utime(path, ns=(before[path.name][1],) * 2)
    report = safeload.convert(model, made, resume=True, **options)
    assert contents(made) == contents(tmp_path / "want")
    after = stamps(made)
    assert {name for name in before if before[name] != after[name]} == {path.name}
    assert report.tensors == len(safeload.open(model))


def test_a_first_call_with_resume_begins(model, tmp_path):
    assert safeload.convert(model, tmp_path / "new", max_shard_size=LIMIT, resume=True).tensors
    (tmp_path / "empty").mkdir()
    assert safeload.convert(model, tmp_path / "empty", max_shard_size=LIMIT, resume=True).tensors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "f32"}, r"with dtype='float16', but this call has dtype='float32'"),
        ({"max_shard_size": "100KB"}, r"with max_shard_size=60000, but this call has max_shard_size=100000"),
        ({"drop": "lm_head*"}, r"with drop=None, but this call has drop=\['lm_head\*'\]"),
        ({"metadata": {"a": "b"}}, r"with metadata=None, but this call has metadata={'a': 'b'}"),
    ],
)
def test_resume_of_another_conversion_names_the_option(model, tmp_path, changed, message):
    options = {"dtype": "f16", "max_shard_size": LIMIT}
    run_pieces(model, tmp_path / "made", **options)
    before = contents(tmp_path / "made")
    with pytest.raises(ValueError, match=rf"resume: .* {message}; pass overwrite=True to start over"):
        safeload.convert(model, tmp_path / "made", resume=True, **{**options, **changed})
    assert contents(tmp_path / "made") == before
    safeload.convert(model, tmp_path / "made", resume=True, overwrite=True, **{**options, **changed})
    safeload.convert(model, tmp_path / "want", **{**options, **changed})
    made, want = content(tmp_path / "made"), content(tmp_path / "want")
    assert {name: made[name] for name in want} == want


def test_resume_after_the_sources_changed(copied, tmp_path):
    run_pieces(copied, tmp_path / "made", max_shard_size=LIMIT)
    safeload.convert(copied, tmp_path / "whole", max_shard_size=LIMIT)
    shutil.copy(tmp_path / "whole" / INDEX, tmp_path / "made")  # killed before the records were removed
    os.utime(copied / "model-00001-of-00003.safetensors", ns=(1, 1))
    with pytest.raises(
        ValueError,
        match=r"before its source 'model-00001-of-00003.safetensors' changed; pass overwrite=True to start over",
    ):
        safeload.convert(copied, tmp_path / "made", max_shard_size=LIMIT, resume=True)


def test_existing_folders(model, tmp_path):
    made = tmp_path / "made"
    safeload.convert(model, made, max_shard_size=LIMIT)
    with pytest.raises(FileExistsError):
        safeload.convert(model, made, max_shard_size=LIMIT, executor=ThreadPoolExecutor(1))
    with pytest.raises(FileExistsError, match="nothing to continue; pass overwrite=True to replace it"):
        safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    run_pieces(model, tmp_path / "begun", max_shard_size=LIMIT)
    with pytest.raises(FileExistsError, match=r"An unfinished conversion: 5 of 5 shards are there; pass resume=True"):
        safeload.convert(model, tmp_path / "begun", max_shard_size=LIMIT, executor=ThreadPoolExecutor(1))
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        safeload.plan_convert(model, tmp_path / "file", max_shard_size=LIMIT)


@pytest.mark.parametrize("same_names", [True, False])
def test_an_existing_checkpoint_is_what_it_was_until_the_end(model, tmp_path, same_names):
    made = tmp_path / "made"
    safeload.convert(model, made, max_shard_size=LIMIT if same_names else "100KB")
    before = contents(made)
    options = {"metadata": {"new": "yes"}, "max_shard_size": LIMIT, "overwrite": True}
    plan = safeload.plan_convert(model, made, **options)
    results = [safeload.run_piece(piece) for piece in plan.pieces[:2]]
    assert {name: digest for name, digest in contents_of_files(made).items() if name in before} == before
    again = safeload.plan_convert(model, made, resume=True, **options)
    assert again == plan
    results = [safeload.run_piece(piece) for piece in again.pieces]
    assert [result["written"] for result in results] == [False, False, *[True] * (len(results) - 2)]
    safeload.finalize(again, results)
    safeload.convert(model, tmp_path / "want", metadata={"new": "yes"}, max_shard_size=LIMIT)
    want, after = content(tmp_path / "want"), content(made)
    assert {name: after[name] for name in want} == want
    assert not [path for path in made.iterdir() if path.is_dir()]
    assert len(safeload.open(made)) == len(safeload.open(model))


def contents_of_files(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


# ---- executors ----


def test_a_piece_that_fails_leaves_what_is_whole(copied, tmp_path):
    """The shard with NaN for a length is found when it is read; the others stay, and resume needs only that one."""
    options = {"dtype": "f16", "max_shard_size": LIMIT}
    safeload.convert(copied, tmp_path / "want", **options)
    path = copied / "model-00002-of-00003.safetensors"
    whole, stamp = path.read_bytes(), path.stat().st_mtime_ns

    class Failing(ThreadPoolExecutor):
        """Cuts the source when the second piece is submitted, as a file system that loses a server does."""

        count = 0

        def submit(self, function, run, piece, *rest):
            self.count += 1
            if self.count == 2:
                path.unlink()
            return super().submit(function, run, piece, *rest)

    with Failing(1) as executor, pytest.raises(MissingShardError, match=r"the file of tensor '.*' .*is gone"):
        safeload.convert(copied, tmp_path / "made", executor=executor, **options)
    before = stamps(waiting(tmp_path / "made"))
    assert before
    assert [path.name for path in (tmp_path / "made").iterdir()] == [RESUME]
    assert not list((tmp_path / "made").rglob("*.tmp"))
    path.write_bytes(whole)
    os.utime(path, ns=(stamp, stamp))
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(copied, tmp_path / "made", executor=executor, resume=True, **options)
    assert contents(tmp_path / "made") == contents(tmp_path / "want")
    after = stamps(tmp_path / "made")
    assert {name: after[name] for name in before} == before


def test_a_call_without_executor_or_resume_leaves_nothing_when_it_fails(copied, tmp_path):
    def fail(done, total):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        safeload.convert(copied, tmp_path / "made", dtype="f16", max_shard_size=LIMIT, progress=fail)
    assert not (tmp_path / "made").exists()
    safeload.convert(copied, tmp_path / "made", dtype="f16", max_shard_size=LIMIT)
    assert not (tmp_path / "made" / RESUME).exists()


def test_progress_counts_pieces(model, tmp_path):
    seen = []
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(
            model, tmp_path / "made", max_shard_size=LIMIT, executor=executor, progress=lambda *pair: seen.append(pair)
        )
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {seen[-1][0]} == {sum(x.nbytes for x in safeload.load(model).values())}


class Handle:
    """A future that has only what is used of one: Dask's and MPI's are not those of the standard library."""

    def __init__(self, function, args):
        self._call, self._callbacks, self.cancelled = (function, args), [], False

    def run(self):
        self._value = self._call[0](*self._call[1])
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def result(self):
        return self._value

    def cancel(self):
        self.cancelled = True
        return True


class Handles:
    """Does the pieces when the last one is there, the last one first; refuses what comes after ``room`` pieces."""

    def __init__(self, count, room=None):
        self.futures, self._count, self._room = [], count, room

    def submit(self, function, *args):
        if len(self.futures) == self._room:
            raise RuntimeError("no more workers")
        self.futures.append(Handle(function, args))
        if len(self.futures) == self._count:
            threading.Timer(0.05, lambda: [future.run() for future in reversed(self.futures)]).start()
        return self.futures[-1]


def test_futures_of_any_kind_in_any_order(model, tmp_path):
    count = len(safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT).pieces)
    safeload.convert(model, tmp_path / "made", max_shard_size=LIMIT, executor=Handles(count))
    safeload.convert(model, tmp_path / "want", max_shard_size=LIMIT)
    assert contents(tmp_path / "made") == contents(tmp_path / "want")
    broken = Handles(count, room=2)
    with pytest.raises(RuntimeError, match="no more workers"):
        safeload.convert(model, tmp_path / "other", max_shard_size=LIMIT, executor=broken)
    assert [future.cancelled for future in broken.futures] == [True, True]


def test_futures_that_cannot_be_cancelled_hide_no_error(model, tmp_path, monkeypatch):
    """Dask's client refuses to send anything once its scheduler is gone."""

    def refuse(self):
        raise ConnectionError("the client is closed")

    monkeypatch.setattr(Handle, "cancel", refuse)
    with pytest.raises(RuntimeError, match="no more workers"):
        safeload.convert(model, tmp_path / "made", max_shard_size=LIMIT, executor=Handles(4, room=2))


def test_processes(model, tmp_path):
    """A program that converts on processes of its own, started by spawn."""
    program = f"""
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import safeload
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        safeload.convert({str(model)!r}, "made", dtype="f16", max_shard_size="{LIMIT}", executor=executor)
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, "-I", "program.py"], cwd=tmp_path, check=True, timeout=120)
    safeload.convert(model, tmp_path / "want", dtype="f16", max_shard_size=LIMIT)
    assert contents(tmp_path / "made") == contents(tmp_path / "want")


def test_a_digest_of_large_and_small_writes():
    blocks = [np.random.default_rng(k).bytes(size) for k, size in enumerate((5, 0, 3 << 20, 1, 1 << 20))]
    with atomic_file.Digest() as digest:
        for block in blocks:
            array = np.frombuffer(block, np.uint8)
            with digest.adding([(array.ctypes.data, array.size)] if array.size else [(0, 0)]):
                pass
        assert digest.hexdigest() == hashlib.sha256(b"".join(blocks)).hexdigest()


@pytest.mark.parametrize("key", ["folder", "file", "extras"])
def test_a_plan_with_a_path_that_no_system_has_is_refused(tmp_path, key):
    source = tmp_path / "source"
    safeload.save({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}, source / "", max_shard_size=20)
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    plan = safeload.plan_convert(source, tmp_path / "out", dtype="float16", max_shard_size=10)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    if key == "file":
        with pytest.raises(FormatError, match="invalid plan: lone surrogate in path"):
            safeload.run_piece({**plan.pieces[0], "file": "\ud800.safetensors"})
        return
    changed = {
        "folder": "/\ud800",
        "extras": {"tokenizer.json": "/\ud800"},
    }
    with pytest.raises((FormatError, ValueError), match="invalid plan: it has changed"):
        safeload.finalize({**plan, key: changed[key]}, results)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: safeload.open(path),
        lambda path: safeload.save({"a": np.ones(4)}, path),
        lambda path: safeload.convert({"a": np.ones(4)}, f"{path}.npz"),
        lambda path: safeload.Layout.from_json(path),
        lambda path: safeload.check({"a": np.ones(4)}, config=path),
    ],
)
def test_a_path_with_a_lone_surrogate_is_refused_by_name(call):
    with pytest.raises(ValueError, match=r"lone surrogate in path 'a\\ud800") as caught:
        call("a\ud800")
    assert not isinstance(caught.value, UnicodeError)
