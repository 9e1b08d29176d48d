"""convert(overwrite=True) over a checkpoint: no reader may find the old weights, and nothing else is lost."""

import json
import os

import numpy as np
import pytest
from builders.conversions import at_once, on_an_executor, planned, resumed

import safeload
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OLD = {f"l.{k}.w": np.zeros((8, 8), np.float32) for k in range(6)}
NEW = {name: np.ones((8, 8), np.float32) for name in OLD}
BAD = {**NEW, "z.w": np.full((8, 8), np.inf, np.float32)}
SIZE = 600  # two tensors a shard
POSIX = pytest.mark.skipif(os.name == "nt", reason="not on Windows")

WAYS = pytest.mark.parametrize("way", [at_once, resumed, on_an_executor, planned])


@pytest.fixture
def new(tmp_path):
    save_file(NEW, tmp_path / "new.safetensors")
    return tmp_path / "new.safetensors"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("notes.txt", "pytorch_model.bin", "consolidated.safetensors", "model-00001-of-00009.txt"):
        (folder / name).write_bytes(b"mine")
    return folder


def single(folder):
    save_file(OLD, folder / SINGLE)


def shards(folder, size=SIZE, **options):
    safeload.convert(OLD, folder / "made", max_shard_size=size, **options)
    for path in (folder / "made").iterdir():
        path.rename(folder / path.name)
    (folder / "made").rmdir()


def recorded(folder):
    save_file(OLD, folder / "source")
    safeload.convert(folder / "source", folder / "made", max_shard_size=300, resume=True)
    for path in (folder / "made").iterdir():
        path.rename(folder / path.name)
    (folder / "made").rmdir()
    (folder / "source").unlink()


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.read_bytes() != b"mine")


def is_new(folder):
    assert safeload.load(folder)["l.0.w"][0, 0] == 1
    for path in folder.glob("*.safetensors"):
        if path.read_bytes() != b"mine":
            assert all((array == 1).all() for array in load_file(path).values()), path
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@WAYS
@pytest.mark.parametrize("old", [single, shards, lambda folder: shards(folder, 300), recorded])
def test_the_old_checkpoint_is_gone(model, new, way, old):
    old(model)
    mine = {name for name, data in content(model).items() if data == b"mine"}
    for _ in range(2):
        before = content(model)
        way(new, model, max_shard_size=SIZE, overwrite=True)
        is_new(model)
        total = 4 if "model-00001-of-00003.safetensors" in before else 3  # a shard never replaces a file
        kept = {f"model-0000{k}-of-0000{total}.safetensors" for k in (1, 2, 3)} | {INDEX}
        # Pieces keep a shard that has their bytes already.
        assert set(names(model)) in (kept, {name for name in before if name in names(model)})
        assert mine <= content(model).keys()


@WAYS
def test_onto_itself(model, way):
    single(model)
    way(model, model, dtype="float16", max_shard_size="1KB", overwrite=True)
    assert safeload.load(model)["l.0.w"].dtype == np.float16
    assert INDEX not in content(model)


NAMED = [
    "config.json",
    "notes.txt",
    "consolidated.safetensors",
    "../beside-00001-of-00001.safetensors",
    "..",
    "",
    7,
    None,
]


def test_an_old_index_cannot_name_other_files(model, new):
    beside = model.parent / "beside-00001-of-00001.safetensors"
    beside.write_bytes(b"mine")
    (model / "config.json").write_bytes(b"{}")
    (model / "x-00001-of-00001.safetensors").mkdir()
    weight_map = dict(enumerate([*NAMED, str(beside), "x-00001-of-00001.safetensors"]))
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    before = content(model)
    safeload.convert(new, model, max_shard_size=SIZE, overwrite=True)
    assert all(content(model)[name] == data for name, data in before.items() if name != INDEX)
    assert beside.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": {}}}'])
def test_a_broken_index_is_replaced(model, new, text):
    (model / INDEX).write_text(text)
    safeload.convert(new, model, max_shard_size=SIZE, overwrite=True)
    is_new(model)


@WAYS
@pytest.mark.parametrize("index", ['{"weight_map": {"w": "model-00001-of-00001.safetensors"}}', "{"])
def test_a_single_file_beside_an_index_is_replaced_only_if_asked(model, new, way, index):
    single(model)
    (model / INDEX).write_text(index)
    before = content(model)
    with pytest.raises(FileExistsError):
        way(new, model, max_shard_size=SIZE)
    assert content(model) == before
    way(new, model, max_shard_size=SIZE, overwrite=True)
    is_new(model)
    assert SINGLE not in names(model)


def test_a_single_file_that_comes_meanwhile(tmp_path, new):
    plan = safeload.plan_convert(new, tmp_path / "out", max_shard_size=SIZE)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    single(tmp_path / "out")
    with pytest.raises(FileExistsError, match="Other programs load this file"):
        safeload.finalize(plan, results)
    with pytest.raises(FileExistsError, match="pass overwrite=True to remove it"):
        safeload.convert(new, tmp_path / "out", max_shard_size=SIZE, resume=True)
    assert INDEX not in content(tmp_path / "out")
    safeload.convert(new, tmp_path / "out", max_shard_size=SIZE, resume=True, overwrite=True)
    is_new(tmp_path / "out")


def stop_at(monkeypatch, last, stop):
    """Calls a function instead of the first call that would give a file this name."""
    for call in (os.replace, os.link):

        def renamed(source, target, *rest, call=call, **options):
            if os.path.basename(target) == last:
                stop()
            call(source, target, *rest, **options)

        monkeypatch.setattr(os, call.__name__, renamed)


@WAYS
@pytest.mark.parametrize("last", [INDEX, "config.json"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_stop_before_the_index_brings_it_back(model, new, way, last, error, monkeypatch):
    (new.parent / "config.json").write_text("{}")
    single(model)
    before = (model / SINGLE).read_bytes()

    def stop():
        raise error("stop")

    stop_at(monkeypatch, last, stop)
    with pytest.raises(error):
        way(new.parent, model, max_shard_size=SIZE, overwrite=True)
    assert (model / SINGLE).read_bytes() == before
    assert INDEX not in content(model)
    monkeypatch.undo()
    way(new.parent, model, max_shard_size=SIZE, overwrite=True)
    is_new(model)


@POSIX
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", [at_once, planned])
@pytest.mark.parametrize("last", ["model-00002-of-00003.safetensors", "config.json", INDEX])
def test_a_kill_leaves_no_mixture(model, new, way, last, monkeypatch):
    """The process dies while it puts the files in place: no reader finds old weights beside the new config, or both."""
    (new.parent / "config.json").write_text('{"new": 1}')
    single(model)
    child = os.fork()
    if child == 0:
        try:
            stop_at(monkeypatch, last, lambda: os._exit(9))
            way(new.parent, model, max_shard_size=SIZE, overwrite=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = content(model)
    if last.startswith("model-0") and way is planned:  # while a piece runs
        assert (INDEX in left, SINGLE in left) == (False, True)
    else:  # the index comes first: files that it names are missing
        assert (INDEX in left, SINGLE in left) == (last != INDEX, last == INDEX)
    if SINGLE not in left:
        with pytest.raises((safeload.SafeloadError, FileNotFoundError)):
            safeload.open(model)
    way(new.parent, model, max_shard_size=SIZE, overwrite=True)
    assert not [*model.glob(".*.tmp")]
    is_new(model)


def test_a_failed_conversion_removes_nothing(model):
    single(model)
    before = content(model)
    with pytest.raises(safeload.RangeError):
        safeload.convert(BAD, model, max_shard_size=SIZE, quantize="int8", overwrite=True)
    assert content(model) == before


@POSIX
def test_links_and_folders(model, new):
    save_file(OLD, model.parent / "blob")
    os.symlink(model.parent / "blob", model / SINGLE)
    before = (model.parent / "blob").read_bytes()
    safeload.convert(new, model, max_shard_size=SIZE, overwrite=True)
    is_new(model)
    os.mkdir(model / SINGLE)  # which no program loads
    safeload.convert(new, model, max_shard_size=SIZE, overwrite=True)
    os.rmdir(model / SINGLE)
    assert (model.parent / "blob").read_bytes() == before


# ---- a single file over shards ----


def test_a_single_file_replaces_shards(model, new):
    for old in (shards, recorded):
        old(model)
        before = content(model)
        with pytest.raises(FileExistsError, match=rf"beside {SINGLE}; pass overwrite=True"):
            safeload.convert(new, model / SINGLE)
        assert content(model) == before
        safeload.convert(new, model / SINGLE, overwrite=True)
        assert names(model) == [SINGLE]
        is_new(model)
        (model / SINGLE).unlink()


@pytest.mark.parametrize(
    "options", [{"only": "l.0.w"}, {"drop": "l.0.w"}, {"names": ["l.0.w"]}, {"only": "l.*", "quantize": "int8"}]
)
@pytest.mark.parametrize("source", ["", INDEX, "model-00002-of-00003.safetensors"])
def test_shards_that_are_the_source_stay_if_tensors_would_be_lost(model, source, options):
    shards(model)
    before = content(model)
    options = {} if source.endswith(".safetensors") else options
    with pytest.raises(FileExistsError, match="which are the source, but not get all"):
        safeload.convert(model / source, model / SINGLE, overwrite=True, **options)
    assert content(model) == before


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("source", ["", INDEX, "shards", "open"])
def test_shards_become_one_file(model, source, dtype):
    shards(model)
    before = content(model)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        safeload.convert(model, model / SINGLE, dtype=dtype)
    assert content(model) == before
    if source == "shards":
        source = [model / name for name in names(model) if name.endswith(".safetensors")]
    elif source == "open":
        source = safeload.open(model)
    else:
        source = model / source
    safeload.convert(source, model / SINGLE, overwrite=True, dtype=dtype)
    assert names(model) == [SINGLE]
    for name, value in load_file(model / SINGLE).items():
        np.testing.assert_array_equal(value, OLD[name])


@WAYS
def test_a_set_without_an_index_is_the_old_checkpoint(model, new, way):
    shards(model)
    (model / INDEX).unlink()
    way(new, model, max_shard_size="1MB", overwrite=True)
    assert {name for name in names(model) if name.startswith("model") and name.endswith(".safetensors")} == {SINGLE}
    is_new(model)


@WAYS
@pytest.mark.parametrize("old", [single, shards, lambda folder: shards(folder, 300)])
def test_a_single_shard_replaces_the_old_checkpoint(model, new, way, old):
    """Readers prefer an index, and other programs model.safetensors: both go, or change, together."""
    old(model)
    mine = {name for name, data in content(model).items() if data == b"mine"}
    for _ in range(2):
        way(new, model, overwrite=True)
        is_new(model)
        assert [name for name in names(model) if name.startswith("model")] == [SINGLE]
        assert mine <= content(model).keys()


@WAYS
def test_shards_replace_a_single_shard(model, new, way):
    way(new, model, overwrite=True)
    way(new, model, overwrite=True, max_shard_size=SIZE)
    is_new(model)
    assert SINGLE not in names(model)


@pytest.mark.parametrize("stray", ["model-00002-of-00009.safetensors", "other.safetensors"])
def test_shards_of_no_checkpoint_stay(model, new, stray):
    (model / stray).write_bytes(b"mine")
    safeload.convert(new, model, max_shard_size="1MB", overwrite=True)
    assert (model / stray).read_bytes() == b"mine"


def test_shards_stay_if_the_file_cannot_be_written(model):
    shards(model)
    before = content(model)
    with pytest.raises(safeload.RangeError):
        safeload.convert(BAD, model / SINGLE, quantize="int8", overwrite=True)
    assert content(model) == before


def test_an_index_of_the_single_file(model, new):
    single(model)
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(OLD, SINGLE)}))
    safeload.convert(model, model / SINGLE, overwrite=True, dtype="float16")
    assert names(model) == [SINGLE]
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(OLD, SINGLE)}))
    safeload.convert(new, model, max_shard_size=SIZE, overwrite=True)
    is_new(model)
    assert SINGLE not in names(model)


@POSIX
def test_a_single_file_by_another_spelling(model, new, monkeypatch):
    shards(model)
    os.symlink(model / SINGLE, model.parent / "link.safetensors")
    monkeypatch.chdir(model)
    for path in (SINGLE, "./model.safetensors", "../model/model.safetensors", model.parent / "link.safetensors"):
        with pytest.raises(
            FileExistsError, match=INDEX if path != model.parent / "link.safetensors" else "pass overwrite=True"
        ):
            safeload.convert(new, path)
    safeload.convert(new, model.parent / "link.safetensors", overwrite=True)
    assert names(model) == [SINGLE]


@pytest.mark.parametrize("name", ["other.safetensors", "model.gguf", "model.npz"])
def test_other_names_leave_the_checkpoint(model, new, name):
    shards(model)
    before = content(model)
    safeload.convert(new, model / name)
    assert {key: content(model)[key] for key in before} == before
