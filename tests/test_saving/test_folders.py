"""Folders that get a new model: names of shards, modes, and what else is in them."""

import json
import os
from contextlib import suppress

import numpy as np
import pytest

import safeload
from safeload.numpy import save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def model(value, count=4):
    return {f"w{k}": np.full(200, value, np.float32) for k in range(count)}


def save(folder, value, count=4, **options):
    safeload.save(model(value, count), folder, max_shard_size=1000, overwrite=True, **options)


def shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def numbered(count, total):
    return [f"model-{k + 1:05}-of-{total:05}.safetensors" for k in range(count)]


def value_of(folder):
    (value,) = {float(value) for array in safeload.load(folder).values() for value in array}
    return value


def test_a_shard_gets_the_next_total_whose_names_are_free(tmp_path):
    for value, total in enumerate([4, 5, 4, 5]):
        save(tmp_path / "m", value)
        assert shards(tmp_path / "m") == numbered(4, total)
        assert value_of(tmp_path / "m") == value
        assert not [name for name in os.listdir(tmp_path / "m") if name.startswith(".")]


@pytest.mark.parametrize("taken", ["model-00002-of-00002.safetensors", "model-2-of-2.safetensors"])
def test_a_name_of_another_program_is_taken(tmp_path, taken):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / taken).write_bytes(b"mine")
    save(tmp_path / "m", 1, 2)
    assert (tmp_path / "m" / taken).read_bytes() == b"mine"
    assert {*shards(tmp_path / "m")} == {taken, *numbered(2, 3)}
    assert value_of(tmp_path / "m") == 1


def test_a_folder_with_the_name_of_a_shard_is_taken(tmp_path):
    (tmp_path / "m" / numbered(1, 3)[0]).mkdir(parents=True)
    save(tmp_path / "m", 1, 3)
    assert value_of(tmp_path / "m") == 1


@pytest.mark.parametrize("counts", [(4, 1), (1, 4), (1, 1), (2, 4), (4, 2), (9, 3)], ids=str)
def test_any_number_of_shards_replaces_any_other(tmp_path, counts):
    save(tmp_path / "m", 0, counts[0])
    save(tmp_path / "m", 1, counts[1])
    assert value_of(tmp_path / "m") == 1
    assert len(safeload.load(tmp_path / "m")) == counts[1]
    index = tmp_path / "m" / INDEX
    assert index.exists() == (counts[1] > 1)
    named = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE]
    assert shards(tmp_path / "m") == named


@pytest.mark.parametrize("count", [1, 3])
def test_the_index_of_another_stem_is_the_old_model(tmp_path, count):
    """It comes before ``model.safetensors`` for a reader, so it goes with its shards."""
    save(tmp_path / "m", 0)
    for path in [*(tmp_path / "m").iterdir()]:
        path.write_bytes(path.read_bytes().replace(b'"model-', b'"other-'))
        path.rename(path.with_name(path.name.replace("model", "other")))
    assert value_of(tmp_path / "m") == 0
    save(tmp_path / "m", 1, count)
    assert value_of(tmp_path / "m") == 1
    assert not [*(tmp_path / "m").glob("other*")]


def test_arrays_of_the_old_model_keep_their_values(tmp_path):
    save(tmp_path / "m", 0)
    opened = safeload.open(tmp_path / "m")
    arrays = {name: opened[name] for name in opened}
    save(tmp_path / "m", 1)
    assert all((array == 0).all() for array in arrays.values())
    opened.close()


def test_a_model_is_saved_over_itself(tmp_path):
    save(tmp_path / "m", 3)
    safeload.save(safeload.load(tmp_path / "m"), tmp_path / "m", max_shard_size=2000, overwrite=True)
    assert value_of(tmp_path / "m") == 3
    assert shards(tmp_path / "m") == numbered(2, 2)


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes and links")
def test_a_private_model_stays_private(tmp_path):
    for first, second in ((4, 4), (1, 3), (3, 1)):
        save(tmp_path / "m", 0, first)
        for path in (tmp_path / "m").iterdir():
            path.chmod(0o600)
        save(tmp_path / "m", 1, second)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "m").glob("*.safetensors")} == {0o600}


@pytest.mark.skipif(os.name == "nt", reason="POSIX links")
def test_a_cache_behind_links_stays(tmp_path):
    """A snapshot of the Hub's cache consists of links to blobs."""
    (tmp_path / "blobs").mkdir()
    save(tmp_path / "m", 0)
    for path in [*(tmp_path / "m").glob("*.safetensors")]:
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(tmp_path / "blobs" / path.name)
    save(tmp_path / "m", 1)
    assert value_of(tmp_path / "m") == 1
    assert {float(safeload.load(path)["w0"][0]) for path in (tmp_path / "blobs").glob("*1-of-*")} == {0}


def test_a_changed_config_comes_with_its_codes(tmp_path):
    """A reader of the folder at any step finds both of one version; here at the end."""
    source = tmp_path / "source"
    source.mkdir()
    for version in (0, 1, 2):
        save_file(model(version), source / SINGLE)
        (source / "config.json").write_text(json.dumps({"version": version}))
        for limit in (1000, None):
            safeload.convert(source, tmp_path / "m", max_shard_size=limit, overwrite=True)
            assert value_of(tmp_path / "m") == version
            assert safeload.open(tmp_path / "m").config["version"] == version
            assert not [name for name in os.listdir(tmp_path / "m") if name.startswith(".")]


def test_a_late_piece_changes_no_finished_model(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file({f"t{k}": np.full(1000, k, np.float32) for k in range(4)}, source / SINGLE)
    first = safeload.plan_convert(source, tmp_path / "m", dtype="float16", max_shard_size=2000)
    second = safeload.plan_convert(source, tmp_path / "m", dtype="bfloat16", max_shard_size=2000)
    safeload.finalize(first, [safeload.run_piece(piece) for piece in first.pieces])
    with suppress(safeload.SafeloadError, FileExistsError):
        safeload.run_piece(second.pieces[0])
    with safeload.open(tmp_path / "m") as checkpoint:
        assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F16"}


def test_shards_of_an_unfinished_conversion_are_no_model(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file(model(1), source / SINGLE)
    (source / "config.json").write_text("{}")
    plan = safeload.plan_convert(source, tmp_path / "m", max_shard_size=1000)
    for piece in plan.pieces:
        safeload.run_piece(piece)
    with pytest.raises(safeload.SafeloadError):
        safeload.open(tmp_path / "m")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 1000}, {"background": True}], ids=str)
@pytest.mark.parametrize("value", [3, [1.0], None, "x"], ids=repr)
def test_what_is_no_array_is_refused_as_for_a_file(value, options, tmp_path):
    for destination in (tmp_path / "x.safetensors", f"{tmp_path}/new/"):
        if isinstance(destination, str) or "max_shard_size" not in options:
            with pytest.raises(TypeError, match=r"tensor 'a' is .*, not a NumPy array"):
                safeload.save({"w0": np.ones(3), "a": value}, destination, **options)
    assert not list(tmp_path.rglob("*.safetensors"))
