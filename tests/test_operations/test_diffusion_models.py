"""Diffusion models become GGUF files for ComfyUI and checkpoints again (tests/data/comfyui)."""

import json

import numpy as np
import pytest
from builders import diffusion
from builders.diffusion import FILE_TYPES, INNER, MODELS, model, others
from builders.llama_quantize import digest
from builders.paths import DATA

import safeload
from safeload import FormatError, UnsupportedError, gguf
from safeload.models.diffusion import DIFFUSION_MODELS, QUANTIZED, SHAPE_KEY
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

EXPECTED = json.loads((DATA / "comfyui" / "files.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(tensors, **options):
    """The digest of a converted model; "x.gguf" has it."""
    save_file(tensors, "x.safetensors")
    safeload.convert("x.safetensors", "x.gguf", overwrite=True, **options)
    with open("x.gguf", "rb") as file:
        return digest(file.read())


def test_the_fixtures_have_every_architecture_and_file_type():
    assert {name.split()[0] for name in MODELS} == DIFFUSION_MODELS.keys()
    assert EXPECTED["converted"].keys() == MODELS.keys()
    assert EXPECTED["quantized"].keys() == set(QUANTIZED)
    assert all(row.keys() == set(FILE_TYPES) for row in EXPECTED["quantized"].values())


@pytest.mark.parametrize("name", MODELS)
def test_files_equal_those_of_comfyuis_converter(name):
    for dtype, expected in EXPECTED["converted"][name].items():
        assert convert(model(name, dtype)) == expected, dtype


@pytest.mark.parametrize("name", QUANTIZED)
def test_files_equal_those_of_comfyuis_llama_quantize(name):
    """In one step from the checkpoint, and in two steps as with ComfyUI-GGUF's tools."""
    tensors = model(name)
    for file_type, expected in EXPECTED["quantized"][name].items():
        assert convert(tensors, quantize=file_type) == expected, file_type
    convert(tensors)
    for file_type in ("q4_k_m", "q8_0", "q3_k_m"):
        safeload.convert("x.gguf", "y.gguf", quantize=file_type, overwrite=True)
        with open("y.gguf", "rb") as file:
            assert digest(file.read()) == EXPECTED["quantized"][name][file_type], file_type
