"""Pieces on processes of this machine, by the standard library and by loky; and after their pool has broken down."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from builders.clusters import OPTIONS, RESUME, content, die_in, never_half, state, waiting

import safeload

SHARDS = [f"model-{k:05}-of-00006.safetensors" for k in range(1, 7)]


@pytest.mark.parametrize("method", [m for m in ("spawn", "forkserver") if m in multiprocessing.get_all_start_methods()])
def test_processes_make_the_folder_of_one(method, source, local, tmp_path):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as executor:
        safeload.convert(source, tmp_path / "bf16", executor=executor, **OPTIONS)
    assert content(tmp_path / "bf16") == local


def test_threads_make_the_folder_of_one(source, local, tmp_path):
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(source, tmp_path / "bf16", executor=executor, **OPTIONS)
    assert content(tmp_path / "bf16") == local


def test_loky_makes_the_folder_of_one(source, local, tmp_path):
    loky = pytest.importorskip("loky")
    executor = loky.ProcessPoolExecutor(2)
    try:
        safeload.convert(source, tmp_path / "bf16", executor=executor, **OPTIONS)
    finally:
        executor.shutdown()
    assert content(tmp_path / "bf16") == local


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_pool_that_breaks_down_is_resumed_and_what_is_whole_stays(source, local, tmp_path):
    out, spawn = tmp_path / "bf16", multiprocessing.get_context("spawn")
    with (
        never_half(out, {name: local[name] for name in SHARDS}),
        ProcessPoolExecutor(1, mp_context=spawn, initializer=die_in, initargs=(SHARDS[3],)) as executor,
        pytest.raises(BrokenProcessPool),
    ):
        safeload.convert(source, out, executor=executor, **OPTIONS)
    assert [*out.iterdir()] == [out / RESUME]
    before = {name: one for name, one in state(waiting(out)).items() if name in local}
    assert sorted(before) == SHARDS[:3]
    assert [name for name in state(waiting(out)) if name.endswith(".tmp")]  # of the process that was killed
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        safeload.convert(source, out, executor=executor, resume=True, **OPTIONS)
    after = state(out)
    assert {name: after[name] for name in before} == before
    assert content(out) == local


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_shard_that_was_damaged_meanwhile_is_made_again(source, local, tmp_path):
    out = tmp_path / "bf16"
    plan = safeload.plan_convert(source, out, **OPTIONS)
    for piece in plan.pieces[:3]:
        safeload.run_piece(piece)
    with open(waiting(out) / SHARDS[1], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    before = state(waiting(out))
    with ThreadPoolExecutor(2) as executor:
        safeload.convert(source, out, executor=executor, resume=True, **OPTIONS)
    after = state(out)
    assert {name for name in SHARDS[:3] if after[name] == before[name]} == {SHARDS[0], SHARDS[2]}
    assert content(out) == local
