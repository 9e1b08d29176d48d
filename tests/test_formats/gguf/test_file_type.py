"""``general.file_type`` of converted files: what most weights are."""

import numpy as np
import pytest

import safeload
from safeload import gguf

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

KEY = "general.file_type"


@pytest.fixture
def source(tmp_path):
    tensors = {"a.weight": np.ones((8, 512), np.float32), "b.weight": np.ones((4, 256), np.float32)}
    tensors["norm.weight"] = np.ones(100_000, np.float32)
    gguf.save_file(tensors, tmp_path / "source.gguf", {KEY: np.uint32(0), "general.name": "x"})
    return tmp_path / "source.gguf"


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 0),
        ({"dtype": "float16"}, 1),
        ({"dtype": "bfloat16"}, 32),
        ({"quantize": "q4_0"}, 2),
        ({"quantize": "q8_0"}, 7),
        ({"quantize": "q4_k"}, 14),
        ({"quantize": "q6_k"}, 18),
        ({"quantize": {"a.*": "q5_k", "*": "q8_0"}}, 16),
        ({"quantize": "q4_k", "metadata": {KEY: np.uint32(15)}}, 15),
    ],
)
def test_it_says_what_most_weights_are(source, tmp_path, options, number):
    safeload.convert(source, tmp_path / "out.gguf", **options)
    metadata = safeload.open(tmp_path / "out.gguf").metadata
    assert (metadata[KEY], metadata["general.name"]) == (number, "x")


def test_it_is_left_out_where_there_is_no_number(source, tmp_path):
    safeload.convert(source, tmp_path / "out.gguf", dtype="float64")
    assert KEY not in safeload.open(tmp_path / "out.gguf").metadata


def test_it_is_not_invented(tmp_path):
    gguf.save_file({"a.weight": np.ones((2, 256), np.float32)}, tmp_path / "in.gguf")
    safeload.convert(tmp_path / "in.gguf", tmp_path / "out.gguf", quantize="q4_k")
    assert KEY not in safeload.open(tmp_path / "out.gguf").metadata
