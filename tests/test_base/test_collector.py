"""The garbage collector is paused while many objects are made, and restored as it was."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from builders import inside
from builders.inside import collected_young, paused

import safeload
from safeload.numpy import save_file


@pytest.fixture(autouse=True)
def _restored():
    yield
    gc.enable()


def test_it_is_paused_for_many_objects_and_not_for_few():
    with paused(100_000):
        assert not gc.isenabled()
    assert gc.isenabled()
    with paused(10):
        assert gc.isenabled()


def test_it_is_restored_after_an_error_and_only_if_it_was_on():
    with pytest.raises(KeyboardInterrupt), paused(100_000):
        raise KeyboardInterrupt
    assert gc.isenabled()
    gc.disable()
    with paused(100_000):
        pass
    assert not gc.isenabled()


def test_the_last_of_several_blocks_restores_it():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with paused(100_000):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with paused(100_000), paused(100_000):
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()  # the other thread is still in its block
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_meanwhile_collects_again():
    program = inside.program("""
import gc, os, threading
from builders.inside import collected_young, paused
inside, leave = threading.Event(), threading.Event()
def other():
    with paused(100_000):
        inside.set()
        leave.wait(30)
thread = threading.Thread(target=other)
thread.start()
inside.wait(30)
child = os.fork()
if child == 0:
    with paused(100_000):
        paused_too = not gc.isenabled()
    os._exit(0 if paused_too and gc.isenabled() else 1)
status = os.waitpid(child, 0)[1]
leave.set()
thread.join()
assert gc.isenabled()
raise SystemExit(os.waitstatus_to_exitcode(status))
""")
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_describing_many_tensors_runs_no_full_collection_and_shares_equal_shapes(tmp_path):
    save_file({f"t{k}": np.zeros(1 + k % 3, np.int8) for k in range(20_000)}, tmp_path / "x", durable=False)
    runs = []
    with safeload.open(tmp_path / "x") as checkpoint:
        gc.collect()
        gc.callbacks.append(lambda phase, info: runs.append(info["generation"]) if phase == "start" else None)
        try:
            infos = checkpoint.weight_files[0].infos()
            during = [*runs]
        finally:
            gc.callbacks.pop()
    assert len(infos) == 20_000
    assert all(info.shape == (1 + int(info.name[1:]) % 3,) and info.parts == (info.name,) for info in infos)
    assert len({id(info.shape) for info in infos}) == 3
    assert 2 not in during  # the oldest generation


def test_young_tuples_are_visited_in_a_pause_unless_the_program_has_disabled_the_collector():
    runs = []
    names = [f"n{k}" for k in range(5000)]
    gc.callbacks.append(lambda phase, info: runs.append(info["generation"]) if phase == "start" else None)
    try:
        with paused(5000):
            tuples = list(collected_young(zip(names), 5000))
        visited, runs[:] = [*runs], []
        gc.disable()
        with paused(5000):
            assert list(collected_young(zip(names), 5000)) == tuples
        assert list(collected_young(zip(names), 10)) == tuples
        assert not runs
    finally:
        gc.callbacks.pop()
    assert visited == ([] if "free-threading" in sys.version else [0])
    assert tuples == [(name,) for name in names]
