"""What mypy makes of calls: which overload is meant, and which text is no choice."""

import typing

import pytest

from safeload.base import scheme
from safeload.operations import quantize

PROGRAM = """
import numpy as np, safeload
array = np.zeros((2, 32), np.float32)
with safeload.open("x") as opened:
    reveal_type(safeload.stats(opened))
reveal_type(safeload.stats(array))
reveal_type(safeload.stats([1.0]))
reveal_type(safeload.stats("x", names=["a"]))
reveal_type(safeload.stats({"a": array}))
reveal_type(safeload.quantization_error(array, safeload.quantize(array, "int8")))
reveal_type(safeload.quantization_error("x", safeload.load_quantized("x", {"*": "q8_0", "a": None})))
safeload.quantize(array, "int9")
safeload.quantize(array, "q4_0", rounding="up")
safeload.load_quantized("x", "q9")
safeload.open("x", unknown_globals="run")
"""


def test_the_types_of_results_and_of_choices(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "program.py").write_text(PROGRAM)
    found, problems, _ = api.run(["--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "program.py")])
    assert not problems
    lines = found.splitlines()
    kinds = [line.partition('Revealed type is "')[2] for line in lines if "Revealed" in line]
    assert [kind.partition("[")[0].rpartition(".")[2] for kind in kinds] == [
        *("dict", "tuple", "tuple", "dict", "dict", "tuple", "dict"),
    ], lines
    refused = [line.split(":")[1] for line in lines if "error:" in line]
    assert refused == ["12", "13", "14", "15"], lines


def test_the_choices_of_types_are_the_rows():
    assert set(typing.get_args(quantize.SchemeName)) == set(scheme.SCHEMES)
    assert set(typing.get_args(quantize.Rounding)) == set(scheme.ROUNDINGS)
