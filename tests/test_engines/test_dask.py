"""Pieces on a Dask cluster: equal to one process, with a worker killed, with faults, and resumed after a breakdown."""

import json
import os
import shutil
import time
from contextlib import contextmanager

import numpy as np
import pytest
from builders.clusters import NAMES, OPTIONS, content, die_in, die_while_reading, never_half, state, waiting
from builders.inside import manifest

import safeload
from safeload.numpy import load_file, save_file

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")


@contextmanager
def two_processes():
    """A cluster that starts workers again when they die."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, protocol="tcp://", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client():
    with two_processes() as client:
        yield client


@pytest.fixture
def doomed():
    """A cluster of its own for workers that die."""
    with two_processes() as client:
        yield client


def whole(local):
    return {name: data for name, data in local.items() if name.endswith(".safetensors")}


def test_a_worker_is_killed_and_the_folder_is_that_of_one_process(doomed, source, local, tmp_path):
    out, note = tmp_path / "bf16", tmp_path / "note.json"
    dies = sorted(whole(local))[2]
    doomed.run(die_in, dies, str(note))
    before = set(doomed.run(os.getpid).values())
    with never_half(out, whole(local)):
        report = safeload.convert(source, out, executor=doomed, **OPTIONS)
    assert content(out) == local  # and no temporary file
    assert report.tensors == 13
    seen = json.loads(note.read_text())
    assert [name for name in seen if name.startswith(f".{dies}.") and name.endswith(".tmp")], "it was not in the middle"
    assert dies not in seen
    assert set(doomed.run(os.getpid).values()) != before


def test_a_piece_that_kills_its_worker_ends_the_run_and_resume_goes_on(
    doomed, client, source, local, tmp_path, monkeypatch
):
    """What is whole stays the file that it is; the rest is made."""
    out, dies = tmp_path / "bf16", sorted(whole(local))[5]
    doomed.run(die_in, dies)
    monkeypatch.setattr(doomed.cluster.scheduler, "allowed_failures", 0)
    with never_half(out, whole(local)), pytest.raises(distributed.scheduler.KilledWorker):
        safeload.convert(source, out, executor=doomed, **OPTIONS)
    before = {name: one for name, one in state(waiting(out)).items() if name in whole(local)}
    assert before
    assert dies not in before
    assert not state(out)
    with pytest.raises(FileExistsError, match="resume=True"):
        safeload.convert(source, out, executor=client, **OPTIONS)
    safeload.convert(source, out, executor=client, resume=True, **OPTIONS)
    after = state(out)
    assert {name: after[name] for name in before} == before
    assert content(out) == local


def test_a_run_is_resumed_by_one_process_and_by_the_cluster(client, source, local, tmp_path):
    for out in (tmp_path / "here", tmp_path / "there"):
        piece = safeload.plan_convert(source, out, **OPTIONS).pieces[1]
        there = out.name == "there"
        done = safeload.run_piece(piece) if there else client.submit(safeload.run_piece, piece, pure=False).result()
        assert done["written"]
        before = {name: one for name, one in state(waiting(out)).items() if name in local}
        executor = client if there else None
        safeload.convert(source, out, executor=executor, resume=True, **OPTIONS)
        after = state(out)
        assert {name: after[name] for name in before} == before
        assert content(out) == local


@pytest.mark.parametrize("scheme", ["q8_0", "int8"])
def test_quantizing(client, source, tmp_path, scheme):
    options = {"quantize": scheme, "requantize": True, "max_shard_size": "300KB"}
    here = safeload.convert(source, tmp_path / "here", **options)
    there = safeload.convert(source, tmp_path / "there", executor=client, **options)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert there.summary == here.summary._replace(tensors=None)  # which pieces do not report
    assert [os.path.basename(file) for file in there.files] == [os.path.basename(file) for file in here.files]


def test_a_source_that_is_gone_or_has_changed_names_shard_and_tensor(client, source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    plan = safeload.plan_convert(copy, tmp_path / "out", **OPTIONS)
    scales = copy / "model-00004-of-00004.safetensors"
    os.utime(scales, (1, 1))
    with pytest.raises(safeload.FormatError, match=r"changed.*model-00004-of-00004") as changed:
        client.submit(safeload.run_piece, plan.pieces[0], pure=False).result()
    assert changed.value.path == str(scales)
    scales.unlink()
    with pytest.raises(safeload.FormatError, match="is gone") as gone:
        client.submit(safeload.run_piece, plan.pieces[0], pure=False).result()
    assert (gone.value.path, type(gone.value).__name__) == (str(scales), "MissingShardError")
    assert gone.value.tensor in NAMES
    assert gone.value.tensor in str(gone.value)
    assert not list(tmp_path.rglob("out/**/*.safetensors"))


def test_a_piece_that_raises_names_shard_and_tensor_and_leaves_nothing_of_it(client, source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    path = copy / "model-00002-of-00004.safetensors"
    tensors = load_file(path)
    bad = NAMES[4]
    tensors[f"{bad}_scale_inv"] = tensors[f"{bad}_scale_inv"].copy()
    tensors[f"{bad}_scale_inv"][1, 2] = np.inf
    save_file(tensors, path)
    out = tmp_path / "out"
    with pytest.raises(safeload.SafeloadError) as caught:
        safeload.convert(copy, out, executor=client, **OPTIONS)
    assert bad in str(caught.value)
    assert str(path) in str(caught.value)
    # The other worker goes on to the end of its piece: Dask cannot stop it, and does not say that it runs.
    for _ in range(500):
        if not [*out.rglob("*.tmp")]:
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"a temporary file is left: {sorted(state(out))}")
    assert "model.safetensors.index.json" not in state(out)


def test_a_worker_of_another_version_refuses(client, source, tmp_path):
    plan = safeload.plan_convert(source, tmp_path / "out", **OPTIONS)
    with pytest.raises(safeload.UnsupportedError, match=r"made by safeload 9\.9.* every worker needs the same"):
        client.submit(safeload.run_piece, {**plan.pieces[0], "version": "9.9"}, pure=False).result()
    assert not (tmp_path / "out").exists()


def test_two_workers_do_one_piece_at_the_same_time(client, source, local, tmp_path):
    plan = safeload.plan_convert(source, tmp_path / "out", **OPTIONS)
    with never_half(tmp_path / "out", whole(local)):
        futures = [
            client.submit(safeload.run_piece, piece, workers=[worker], pure=False)
            for piece in plan.pieces
            for worker in client.scheduler_info()["workers"]
        ]
        results = client.gather(futures)
    assert len(results) == 12
    safeload.finalize(plan, results)
    assert content(tmp_path / "out") == local


class Keeping:
    """An executor that keeps its futures, as a notebook may: as long as one lives, Dask remembers its result."""

    def __init__(self, executor):
        self.executor, self.futures = executor, []

    def submit(self, function, /, *arguments):
        self.futures.append(self.executor.submit(function, *arguments))
        return self.futures[-1]


def test_the_same_conversion_again_is_run_again_also_without_pure(client, source, local, tmp_path):
    """Dask would answer from what it remembers, and the folder would be empty."""
    out, executor = tmp_path / "out", Keeping(client.get_executor())
    for _ in range(2):
        safeload.convert(source, out, executor=executor, **OPTIONS)
        assert content(out) == local
        shutil.rmtree(out)


def test_workers_with_two_threads(source, local, tmp_path):
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        safeload.convert(source, tmp_path / "out", executor=client, threads=2, **OPTIONS)
    assert content(tmp_path / "out") == local


def test_progress_counts_the_bytes_of_pieces(client, source, tmp_path):
    seen = []
    safeload.convert(
        source,
        tmp_path / "out",
        executor=client,
        progress=lambda done, total: seen.append((done, total)),
        **OPTIONS,
    )
    assert len(seen) == 6
    assert seen == sorted(seen)
    assert seen[-1] == (12 * 256 * 384 * 2 + 768,) * 2


def test_an_executor_that_was_shut_down_refuses(client, source, tmp_path):
    executor = client.get_executor(pure=False)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        safeload.convert(source, tmp_path / "out", executor=executor, **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_stats_differences_findings_and_manifests_are_those_of_one_process(client, source, local, tmp_path):
    other = tmp_path / "other"
    safeload.convert(source, other, quantize="q8_0", requantize=True, max_shard_size="300KB")
    here, there = safeload.stats(source, histogram=True), safeload.stats(source, histogram=True, executor=client)
    assert list(there) == list(here)
    for name in here:
        assert there[name]._replace(histogram=None) == here[name]._replace(histogram=None)
        np.testing.assert_array_equal(there[name].histogram, here[name].histogram)
    with safeload.open(source) as opened:
        assert manifest.make(opened, executor=client) == manifest.make(opened)
    differences = safeload.diff(source, other, executor=client)
    assert differences.to_json() == safeload.diff(source, other).to_json()
    assert not differences.same
    found = [safeload.check(other, executor=one).to_json() for one in (client, None)]
    for one in found:
        one.pop("seconds", None)
    assert found[0] == found[1]


def test_what_reads_goes_on_when_a_worker_is_killed(doomed, source, tmp_path):
    """Workers that end themselves before the second of their pieces."""
    note = tmp_path / "note"
    doomed.run(die_while_reading, str(note))
    assert safeload.stats(source, executor=doomed) == safeload.stats(source)
    assert note.exists()
