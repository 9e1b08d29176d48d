"""Nothing takes longer for each tensor where there are more of them, whatever the order of their names."""

import contextlib
import gc
import io
import os
import random
import sys
import time

import numpy as np
import pytest
from builders.inside import main, validated_zeros
from builders.thorough import THOROUGH, dealt

import safeload
from safeload.numpy import load_file, save_file

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# Eight times as many tensors may take 24 times as long: what grows with the square would take 64 times as long.
FEW = 10_000 if THOROUGH else 1000
TIMES, MOST = 8, 24
# Those that make one tensor after the other take fewer.
FEWER = dict.fromkeys(("convert to gguf", "quantize"), FEW // 5)
# Windows' clock of a process ticks 64 times a second.
TICK = 1 / 64 if os.name == "nt" else 0.001


def streamed(path, out):
    with safeload.open(path) as opened:
        return sum(array.size for _, array in opened.stream())


def infos(path, out):
    with safeload.open(path) as opened:
        return len(str(dict(opened.tensors)))


def printed(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*map(str, arguments)]) == 0
    return out.getvalue()


OPERATIONS = {
    "open": lambda path, out: list(safeload.open(path)),
    "load": lambda path, out: load_file(path),
    "load, pread": lambda path, out: load_file(path, backend="pread"),
    "stream": streamed,
    "info": infos,
    "command info": lambda path, out: printed("info", path),
    "command info of JSON": lambda path, out: printed("info", path, "--json"),
    "convert": lambda path, out: safeload.convert(path, out, overwrite=True),
    "convert a selection": lambda path, out: safeload.convert(path, out, only="*7*", overwrite=True),
    "convert to gguf": lambda path, out: safeload.convert(path, out.with_suffix(".gguf"), overwrite=True),
    "quantize": lambda path, out: safeload.convert(path, out, quantize="int8", overwrite=True),
    "diff": lambda path, out: safeload.diff(path, path),
    "stats": lambda path, out: safeload.stats(path),
    "validate": lambda path, out: safeload.check(path),
    "save": lambda path, out: save_file({f"x{k}": np.ones(3) for k in range(len(list(safeload.open(path))))}, out),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files of few and of many tensors: names in ascending order, and in no order."""
    folder = tmp_path_factory.mktemp("linear")
    found = {}
    for order in ("ascending", "none"):
        for count in (FEW, TIMES * FEW, FEW // 5, TIMES * FEW // 5):
            names = [f"model.layers.{k}.weight" for k in range(count)]
            if order == "none":
                random.Random(count).shuffle(names)
            # Of two dtypes, so that the order of the bytes is not that of the names either.
            tensors = {name: np.full((2, 3), k, (np.float32, np.int64)[k % 2]) for k, name in enumerate(names)}
            found[order, count] = folder / f"{order}-{count}.safetensors"
            save_file(tensors, found[order, count], durable=False)
    return found


def seconds(operation, path, out, enough=0.0):
    """The processor's time, the least of three, or the first that is short enough."""
    least = float("inf")
    for _ in range(3):
        started = time.process_time()
        operation(path, out)
        least = min(least, time.process_time() - started)
        if least < enough:
            break
    return least


@pytest.mark.parametrize("collects", [True, False] if THOROUGH else [True], ids=["gc on", "gc off"][: 1 + THOROUGH])
@pytest.mark.parametrize(("name", "order"), dealt(OPERATIONS, ["ascending", "none"]))
def test_nothing_grows_faster_than_linearly(name, order, collects, sources, tmp_path):
    operation, out, least = OPERATIONS[name], tmp_path / "out.safetensors", FEWER.get(name, FEW)
    operation(sources[order, least], out)  # what the first call imports
    enabled = gc.isenabled()
    try:
        if not collects:
            gc.disable()
        few = seconds(operation, sources[order, least], out)
        most = MOST * max(few, TICK)
        many = seconds(operation, sources[order, TIMES * least], out, enough=most)
    finally:
        if enabled:
            gc.enable()
    assert many < most, f"{least} tensors take {few:.4f} s, {TIMES} times as many {many:.4f} s"


def test_zeros_in_many_tensors_are_judged_in_linear_time(tmp_path):
    """The file of 300 GB in test_scale.py takes too long to compare it with one that is an eighth as large."""

    def judge(count, out):
        places = [validated_zeros.StoredRange(4096 * k, 4096 * (k + 1), str(k), str(k), 4096, 1) for k in range(count)]
        finding = validated_zeros.finding_of(0, 4096 * count, places, unwritten=True, where="", role=lambda name: None)
        assert "blocks of the file are lost" in finding.message

    few = seconds(judge, 500, tmp_path)
    assert seconds(judge, 4000, tmp_path, enough=MOST * few) < MOST * few


def test_what_grows_faster_is_found(tmp_path):
    """Or the test above could not fail."""

    def square(path, out):
        names = [str(k) for k in range(path)]
        return sum(name in names for name in names)

    few, many = (seconds(square, count, tmp_path) for count in (500, 4000))
    assert many > MOST * few


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts the calls of CPython")
@pytest.mark.parametrize("options", [[], ["--all"]])
def test_a_listing_takes_few_calls_for_a_tensor_and_none_for_its_characters(options, tmp_path):
    """Calls of Python functions: escaping each character of each name took 60 for each name."""

    def calls(count):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"block.{k}_{'x' * 40}.{k}.weight": np.zeros(1, np.int8) for k in range(count)}, path, durable=False)
        number = 0

        def counted(frame, event, argument):
            nonlocal number
            number += event == "call"

        printed("info", path, *options)
        sys.setprofile(counted)
        try:
            assert printed("info", path, *options).count("weight") == count
        finally:
            sys.setprofile(None)
        return number

    assert calls(400) - calls(200) <= 200 * 50
