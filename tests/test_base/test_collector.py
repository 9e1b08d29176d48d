"""The garbage collector is paused while many objects are made, and restored as it was."""

import gc
import inspect
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import safeload
from safeload.numpy import save_file

MANY = 2000


def converting(path, count, action):
    """Convert tensors, and call a function when the first is renamed: in the pause, if they are many."""
    left = [action]

    def name(match):
        if left:
            left.pop()()
        return match[0]

    tensors = dict.fromkeys([f"t{k}" for k in range(count)], np.zeros(1, np.int8))
    safeload.convert(tensors, path, rename=[(".+", name)], overwrite=True)
    assert not left


@pytest.fixture(autouse=True)
def _restored():
    yield
    gc.enable()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def test_it_is_paused_for_many_objects_and_not_for_few(path):
    seen = []
    converting(path, MANY, lambda: seen.append(gc.isenabled()))
    assert gc.isenabled()
    converting(path, 10, lambda: seen.append(gc.isenabled()))
    assert seen == [False, True]


def test_it_is_restored_after_an_error_and_only_if_it_was_on(path):
    def interrupt():
        assert not gc.isenabled()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converting(path, MANY, interrupt)
    assert gc.isenabled()
    gc.disable()
    converting(path, MANY, lambda: None)
    assert not gc.isenabled()


def test_the_last_of_several_blocks_restores_it(tmp_path):
    inside, leave = threading.Event(), threading.Event()

    def stay():
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=converting, args=(tmp_path / "thread", MANY, stay))

    def inner():
        thread.start()
        assert inside.wait(30)

    def outer():
        converting(tmp_path / "inner", MANY, inner)
        assert not gc.isenabled()

    converting(tmp_path / "outer", MANY, outer)
    assert not gc.isenabled()  # the other thread is still in its block
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_meanwhile_collects_again(tmp_path):
    program = f"""
import gc, os, sys, threading, warnings
import numpy as np
import safeload
warnings.simplefilter("ignore")
MANY = {MANY}
{inspect.getsource(converting)}
inside, leave = threading.Event(), threading.Event()
def stay():
    inside.set()
    leave.wait(30)
thread = threading.Thread(target=converting, args=(sys.argv[1] + "/thread", MANY, stay))
thread.start()
inside.wait(30)
child = os.fork()
if child == 0:
    enabled = []
    converting(sys.argv[1] + "/child", MANY, lambda: enabled.append(gc.isenabled()))
    os._exit(0 if enabled == [False] and gc.isenabled() else 1)
status = os.waitpid(child, 0)[1]
leave.set()
thread.join()
assert gc.isenabled()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program, str(tmp_path)], capture_output=True, text=True)
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


def test_young_tuples_are_visited_in_a_pause_unless_the_program_has_disabled_the_collector(tmp_path):
    for count in (5000, 10):
        save_file({f"n{k}": np.zeros(1, np.int8) for k in range(count)}, tmp_path / f"{count}", durable=False)

    def runs_of(count):
        """The generations that are collected while tensors are described."""
        runs = []
        with safeload.open(tmp_path / f"{count}") as checkpoint:
            gc.callbacks.append(lambda phase, info: runs.append(info["generation"]) if phase == "start" else None)
            try:
                infos = checkpoint.tensors
            finally:
                gc.callbacks.pop()
        assert sorted(infos) == sorted(f"n{k}" for k in range(count))
        assert all(info.parts == (name,) for name, info in infos.items())
        return runs

    threshold = gc.get_threshold()
    gc.set_threshold(1 << 30)  # no collection but those that are asked for
    try:
        assert runs_of(5000) == ([] if "free-threading" in sys.version else [0])
        assert runs_of(10) == []
        gc.disable()
        assert runs_of(5000) == runs_of(10) == []
    finally:
        gc.set_threshold(*threshold)
