"""Shards that are not what pieces wrote: finalize says so, and changes nothing."""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.clusters import record_of, run_pieces, waiting

import safeload
from safeload import FormatError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

LIMIT = "60KB"


def contents(folder):
    """The SHA-256 of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def another_byte(made, results):
    with (made / results[0]["file"]).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def same_time(made, results):
    path = made / results[0]["file"]
    stamp = path.stat().st_mtime_ns
    another_byte(made, results)
    os.utime(path, ns=(stamp, stamp))


def in_anothers_place(made, results):
    by_size = {}
    for result in results:
        by_size.setdefault(result["size"], []).append(result["file"])
    first, second = next(files for files in by_size.values() if len(files) > 1)[:2]
    shutil.copyfile(made / first, made / second)


def without_record(made, results):
    another_byte(made, results)
    record_of(made / results[0]["file"]).unlink()


def with_its_record(made, results):
    """Another process may record whatever it wrote: the results count."""
    another_byte(made, results)
    record = record_of(made / results[0]["file"])
    digest = hashlib.sha256((made / results[0]["file"]).read_bytes()).hexdigest()
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": digest}))


def name_of_a_tensor(made, results):
    path = made / results[0]["file"]
    path.write_bytes(path.read_bytes().replace(b"t0", b"x0"))


@pytest.mark.parametrize("over", [False, True], ids=["new", "over a checkpoint"])
@pytest.mark.parametrize(
    "change", [another_byte, same_time, in_anothers_place, without_record, with_its_record, name_of_a_tensor]
)
def test_finalize_compares_shards_with_what_pieces_wrote(tmp_path, change, over):
    source, made = tmp_path / "source.safetensors", tmp_path / "made"
    save_file({f"t{k}": np.full((16, 16), k, np.float32) for k in range(4)}, source)
    if over:
        safeload.convert(source, made, max_shard_size="1KB")
    plan = safeload.plan_convert(source, made, max_shard_size="1KB", metadata={"a": "b"}, overwrite=over)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    change(waiting(made), results)
    before = contents(made)
    with pytest.raises(FormatError, match=r"not what its piece wrote: run its piece again \(expected SHA-256 "):
        safeload.finalize(plan, results)
    assert contents(made) == before
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    safeload.finalize(plan, results)
    found = safeload.load(made)
    assert {name: float(array[0, 0]) for name, array in found.items()} == {f"t{k}": k for k in range(4)}


def test_finalize_refuses_results_with_the_digest_of_another_shard(model, tmp_path):
    plan = safeload.plan_convert(model, tmp_path / "made", max_shard_size=LIMIT)
    results = [safeload.run_piece(piece) for piece in plan.pieces]
    results[0]["sha256"], results[1]["sha256"] = results[1]["sha256"], results[0]["sha256"]
    with pytest.raises(FormatError, match="not what its piece wrote"):
        safeload.finalize(plan, results)


class Meddling(ThreadPoolExecutor):
    """Another program changes the first shard when its piece is done."""

    def __init__(self, made, change):
        super().__init__(1)
        self.made, self.change = made, change

    def submit(self, function, *rest):
        def call():
            result = function(*rest)
            if self.change is not None:
                self.change(waiting(self.made), [result])
                self.change = None
            return result

        return super().submit(call)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="counts the reads of Linux")
@pytest.mark.parametrize("change", [another_byte, without_record, None])
def test_convert_reads_shards_again_only_if_their_identity_has_changed(model, tmp_path, monkeypatch, change):
    hashed = []
    preadv, sources = os.preadv, {path.stat().st_ino for path in model.iterdir()}

    def counted(descriptor, buffers, offset):
        count, file = preadv(descriptor, buffers, offset), os.fstat(descriptor).st_ino
        if offset == 0 and bytes(buffers[0][8:9]) == b"{" and file not in sources:  # the first bytes of a shard
            hashed.append(file)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    with Meddling(tmp_path / "made", change) as executor:
        if change is None:
            safeload.convert(model, tmp_path / "made", max_shard_size=LIMIT, executor=executor)
            assert not hashed
            run_pieces(model, tmp_path / "begun", max_shard_size=LIMIT)
            safeload.convert(model, tmp_path / "begun", max_shard_size=LIMIT, resume=True)
            assert len(hashed) == len(set(hashed)) == len(list((tmp_path / "made").glob("*.safetensors")))
        else:
            with pytest.raises(FormatError, match="not what its piece wrote"):
                safeload.convert(model, tmp_path / "made", max_shard_size=LIMIT, executor=executor)
            assert len(hashed) == 1


@pytest.mark.parametrize("case", ["whole", "another byte", "another size", "missing"])
def test_a_local_shard_is_hashed_whatever_its_record_says_of_an_object(model, tmp_path, case):
    made, want = tmp_path / "made", tmp_path / "want"
    plan = run_pieces(model, made, max_shard_size=LIMIT)
    results = [{"file": piece["file"]} for piece in plan.pieces]
    shard = waiting(made) / results[0]["file"]
    if case == "another byte":
        same_time(waiting(made), results)
    status, record = shard.stat(), json.loads(record_of(shard).read_text())
    record["object"] = [status.st_size, status.st_mtime_ns]
    record["size"] += case == "another size"
    record_of(shard).write_text(json.dumps(record))
    if case == "missing":
        shard.unlink()
    safeload.convert(model, made, max_shard_size=LIMIT, resume=True)
    safeload.convert(model, want, max_shard_size=LIMIT)
    assert contents(made) == contents(want)
    assert ((made / shard.name).stat().st_mtime_ns == status.st_mtime_ns) == (case == "whole")
