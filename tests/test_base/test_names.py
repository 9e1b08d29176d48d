"""Names of tensors: their numbers, natural order, layers that are alike in one name."""

import json
import re
import time

import numpy as np
import pytest
from builders.inside import main

from safeload.numpy import save_file


@pytest.fixture
def rows(tmp_path, capsys):
    """Gives the rows of a listing: the name, and the number of tensors. Their kinds are their sizes."""

    def listed(names, kinds=None):
        header, end = {}, 0
        for name, size in zip(names, kinds or [1] * len(names), strict=True):
            header[name] = {"dtype": "I8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
        assert main(["info", str(path)]) == 0
        table = capsys.readouterr().out.rpartition("\ntensor  ")[2]
        found = re.findall(r"^(.*?) +I8 +\[\d+\](?: x ([\d,]+))? +[\d.]+ \w+$", table, re.M)
        assert len(found) == table.count("\n") - 1
        return [(name, int(number.replace(",", "") or 1)) for name, number in found]

    return listed


@pytest.fixture
def spelled(rows):
    return lambda names, kinds=None: [name for name, _ in rows(names, kinds)]


def test_layers_in_any_order_are_one_range(spelled):
    names = [f"model.layers.{k}.mlp.w" for k in (0, 1, 10, 11, *range(2, 10))]
    assert spelled(names) == ["model.layers.{0..11}.mlp.w"]


def test_layers_and_experts_are_two_ranges(rows):
    names = [f"h.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(12)]
    assert rows(names) == [("h.{0..2}.experts.{0..11}.w", 36)]


def test_layers_that_differ_have_ranges_of_their_own(spelled):
    names = [f"h.{k}.w" for k in range(6)]
    assert spelled(names, [5 if k == 1 else 9 for k in range(6)]) == ["h.{0,2..5}.w", "h.1.w"]


def test_combinations_that_are_missing_are_not_claimed(rows, spelled):
    names = [f"h.{layer}.{expert}.w" for layer in range(4) for expert in range(2 if layer == 2 else 3)]
    assert rows(names) == [("h.{0..1,3}.{0..2}.w", 9), ("h.2.{0..1}.w", 2)]
    assert spelled(["0.0", "1.1"]) == ["0.0", "1.1"]


@pytest.mark.parametrize(
    "name",
    ["", "w", "conv1.weight", "fc2", "ln_1.w", "01.w", "a.{}.b", "h.1e5.w", "h.-1.w", "h.٣.w", f"h.{10**9}.w"],
)
def test_other_numbers_are_text(name, spelled):
    assert spelled([name, f"{name}x"]) == [name, f"{name}x"]


def test_names_of_flax_and_names_that_are_numbers(spelled):
    assert spelled(["enc/layers_0/w", "enc/layers_1/w"]) == ["enc/layers_{0..1}/w"]
    assert spelled(["0", "2", "1"]) == ["{0..2}"]
    assert spelled(["a.0.{}", "a.1.{}", "a.{}.0"]) == ["a.{0..1}.{}", "a.{}.0"]


def test_families_stand_in_the_order_of_their_first_tensor(rows):
    names = ["embed", "h.1.b", "h.0.a", "h.0.b", "h.1.a", "norm"]
    assert rows(names) == [("embed", 1), ("h.{0..1}.b", 2), ("h.{0..1}.a", 2), ("norm", 1)]


def test_names_made_to_be_slow_are_not(rows):
    started = time.process_time()
    deep = ".".join("0" * 1000)
    names = [deep, "." * 100_000, "1" * 100_000, *(f"{k}.{k * k % 997}.{k % 7}.w" for k in range(20_000))]
    assert sum(number for _, number in rows(names)) == len(names)
    assert time.process_time() - started < 10


def in_order(names, tmp_path, capsys):
    """Names as the command line sorts them."""
    save_file(dict.fromkeys(names, np.zeros(1, np.float32)), tmp_path / "x.safetensors")
    assert main(["stats", "--sort", "name", "--json", str(tmp_path / "x.safetensors")]) == 0
    return [row["name"] for row in json.loads(capsys.readouterr().out)["tensors"]]


def test_natural_order(tmp_path, capsys):
    names = ["h.10.w", "h.9.w", "h.2.w", "h.2.b", "h", "h.02.b", "a9", "a10", f"h.{'9' * 5000}", ""]
    assert in_order(names, tmp_path, capsys) == [
        *("", "a9", "a10", "h", "h.02.b", "h.2.b", "h.2.w", "h.9.w", "h.10.w", f"h.{'9' * 5000}")
    ]


def test_names_that_are_hard_to_order_take_linear_time(tmp_path, capsys):
    names = [".".join("0" * 1000), "." * 100_000, "1" * 100_000]
    names += [f"{k}.{k * k % 997}.{k % 7}.w" for k in range(20_000)]
    started = time.process_time()
    assert sorted(in_order(names, tmp_path, capsys)) == sorted(names)
    assert time.process_time() - started < 20
