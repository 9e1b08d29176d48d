"""Each call that changes a directory in turn, refused or the last of its process, while a folder gets a new model.

Three readers look at what is left: safeload; one that takes ``model.safetensors`` before the index (transformers); one
that takes the index (diffusers). Each finds the old model, the new model or an error: never tensors of two models, and
never tensors of one beside the ``config.json`` of the other. After an error the old model is there.
"""

import errno
import itertools
import json
import threading

import numpy as np
import pytest
from builders import torch_build
from builders.thorough import THOROUGH, part_of
from faults.folders import (
    CHANGES,
    CONFIG,
    INDEX,
    SHARD,
    SINGLE,
    calls,
    edit,
    model,
    shards,
    single,
    taken,
    versions_of,
    write_with_writer,
)
from faults.saves import contents, empty, killed
from faults.shim import FAIL, KILL, KILL_AFTER, MOST_CALLS, armed

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def set_without_index(folder):
    shards(folder)
    (folder / INDEX).unlink()


def another_stem(folder):
    shards(folder)
    for path in [*folder.iterdir()]:
        text = path.read_bytes()
        path.with_name(path.name.replace("model", "other")).write_bytes(
            text.replace(b"model-", b"other-") if path.name == INDEX else text
        )
        path.unlink()


def torch_file(folder):
    storages = {name: torch_build.Storage(name, array) for name, array in model(0).items()}
    state = torch_build.ordered({name: torch_build.tensor(storages[name], (200,)) for name in storages})
    (folder / "pytorch_model.bin").write_bytes(torch_build.zip_file(state))


def codes(folder):
    safeload.save({f"{name}.qweight": array for name, array in model(0, np.int32).items()}, folder)


OLD = {
    "shards": shards,
    "single": single,
    "set without index": set_without_index,
    "another stem": another_stem,
    "torch": torch_file,
    "codes": codes,
}


def apply(folder, source):
    safeload.apply_patch(folder / SINGLE, source / "patch.safetensors")


NEW = {
    "save": lambda folder, source: safeload.save(model(1), folder, max_shard_size=SHARD, overwrite=True),
    "save one": lambda folder, source: safeload.save(model(1), folder, overwrite=True),
    "Writer": write_with_writer,
    "convert": lambda folder, source: safeload.convert(source, folder, max_shard_size=SHARD, overwrite=True),
    "convert to one": lambda folder, source: safeload.convert(source, folder, overwrite=True),
    "resume": lambda folder, source: safeload.convert(
        source, folder, max_shard_size=SHARD, overwrite=True, resume=True
    ),
    "edit": edit,
    "patch": apply,
}
CASES = [*itertools.product([name for name in NEW if name not in ("edit", "patch")], OLD)]
CASES += [("edit", "shards"), ("edit", "single"), ("patch", "single")]


@pytest.fixture(params=part_of(CASES, 3, 8), ids=" over ".join)
def case(request, tmp_path):
    """The folder, what restores it, and what replaces it."""
    new, old = request.param
    folder, source = tmp_path / "place" / "folder", tmp_path / "source"
    source.mkdir()
    save_file(model(1), source / SINGLE, durable=False)
    (source / CONFIG).write_text('{"version": 1}')
    save_file(model(0), tmp_path / "old.safetensors", durable=False)
    safeload.make_patch(tmp_path / "old.safetensors", source / SINGLE, source / "patch.safetensors", durable=False)

    def restore():
        empty(folder.parent)
        folder.mkdir()
        OLD[old](folder)
        config = {"version": 0, **({"quantization_config": GPTQ} if old == "codes" else {})}
        (folder / CONFIG).write_text(json.dumps(config))

    restore()
    before = contents(folder)

    def again():
        empty(folder)
        for name, content in before.items():
            (folder / name).write_bytes(content)

    return folder, again, lambda: NEW[new](folder, source), new


READERS = [
    lambda folder: safeload.load(folder, backend="pread"),
    lambda folder: taken(folder, [SINGLE, INDEX, "pytorch_model.bin"]),
    lambda folder: taken(folder, [INDEX, SINGLE]),
]


def versions(folder, new):
    """The version that each reader finds, which is that of ``config.json`` too; None for an error."""
    found = versions_of(folder, READERS)
    if "convert" in new or new == "resume":
        for version in found:
            assert version is None or json.loads((folder / CONFIG).read_text())["version"] == version
    return found


@pytest.mark.parametrize("action", [KILL, KILL_AFTER] if THOROUGH else [KILL])
def test_a_kill_at_any_moment_leaves_the_old_model_the_new_one_or_none(case, action):
    folder, restore, replace, new = case
    old = versions(folder, new)
    for nth in calls(case[3], 18):
        assert nth < MOST_CALLS
        restore()
        died = killed(replace, folder, CHANGES, action, nth)
        found = versions(folder, new)
        if not died:
            assert found[0] == 1
            break
        assert all(version in (None, 1, before) for version, before in zip(found, old, strict=True))


def test_a_failure_at_any_call_leaves_the_old_model(case):
    folder, restore, replace, new = case
    old = versions(folder, new)
    for nth in calls(case[3], 18):
        assert nth < MOST_CALLS
        restore()
        with armed(folder, CHANGES, FAIL, nth, errno.EIO) as shot:
            try:
                replace()
                failed = False
            except OSError:
                failed = True
        found = versions(folder, new)
        if failed and new in ("edit", "patch") and shot.trace[nth - 1 :] == [[f"S {folder}", ""]]:
            assert found in (old, [1, *found[1:]])  # the new file is complete, but its name may not be on the disk
        else:
            assert found == old if failed else found[0] == 1, shot.trace[nth - 1 :]
        if not shot.hit:
            assert not failed
            return


def test_a_reader_beside_it_finds_one_model(tmp_path):
    safeload.save(model(0), tmp_path / "m", max_shard_size=SHARD)
    found, done = [], threading.Event()

    def read():
        while not done.is_set():
            values = {float(array[0]) for array in safeload.load(tmp_path / "m", backend="pread").values()}
            found.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for k in range(200 if THOROUGH else 15):
            safeload.save(model(k), tmp_path / "m", max_shard_size=SHARD, overwrite=True, durable=False)
    finally:
        done.set()
        reader.join()
    assert all(len(values) == 1 for values in found)
