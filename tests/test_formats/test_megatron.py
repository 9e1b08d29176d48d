"""Megatron's torch_dist: what Megatron wrote with 1, 2 and 4 processes, as a folder and in a .nemo archive."""

import os
import tarfile
from pathlib import Path

import pytest
from builders.paths import ROOT

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# tests/data/megatron/compare.sh lets Megatron write all fixtures anew.
DATA = Path(os.environ.get("SAFELOAD_MEGATRON_FIXTURES") or ROOT / "tests" / "data" / "megatron")


def check_tensors(arrays, want):
    assert sorted(arrays) == sorted(want)
    for name, array in want.items():
        got = arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_tensors_are_the_whole_ones(count, tmp_path):
    want = safeload.load(DATA / "expected.safetensors")
    folder = DATA / f"torch_dist_{count}"
    with safeload.open(folder) as opened:
        assert opened.format == "dcp"
        assert any("common.pt" in note for note in opened.notes)
        check_tensors(opened.load(), want)
        name = "decoder.layers.mlp.linear_fc2.weight"
        assert opened.get_slice(name)[1:3, 3:7].tobytes() == want[name][1:3, 3:7].tobytes()
        assert opened.take(name, [3, 0]).tobytes() == want[name][[3, 0]].tobytes()
    safeload.convert(folder, tmp_path / "out.safetensors")
    check_tensors(safeload.load(tmp_path / "out.safetensors"), want)
    assert not safeload.check(folder).errors
    with safeload.open(folder / "common.pt", unknown_globals="inert") as common:
        assert common.metadata["iteration"] == 7


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_nemo_archive_of_the_folder_opens(count, tmp_path):
    with tarfile.open(tmp_path / "m.nemo", "w") as archive:
        archive.add(ROOT / "README.md", "./model_config.yaml")
        archive.add(DATA / f"torch_dist_{count}", "./model_weights")
    with safeload.open(tmp_path / "m.nemo") as opened:
        assert opened.format == "dcp"
        check_tensors(opened.load(), safeload.load(DATA / "expected.safetensors"))
