"""Folders of quantizations that are not dequantized: operations and `safeload info` name them, and what reads them."""

import json
import re

import numpy as np
import pytest
from builders.inside import main

import safeload
from safeload import UnsupportedError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

F16, F32, I16, I32, I8, U8 = np.float16, np.float32, np.int16, np.int32, np.int8, np.uint8

# As the writers store a matrix of 64 rows and 128 columns: name, shape and dtype, of which the first are the codes.
FILES = {
    "EXL2": (
        {},
        {"q_weight": ((16, 64), I32), "q_scale": ((4, 8), I32), "q_scale_max": ((4,), F16), "q_groups": ((8,), I16),
         "q_invperm": ((128,), I16)},
    ),
    "EXL3": ({}, {"trellis": ((8, 4, 64), I16), "suh": ((128,), F16), "svh": ((64,), F16)}),
    "QTIP": ({}, {"trellis": ((32, 32), I16), "SU": ((128,), F16), "SV": ((64,), F32), "tlut": ((512, 2), F16)}),
    "QuIP#": ({}, {"Qidxs": ((64, 16), I16), "SU": ((128,), F16), "SV": ((64,), F16)}),
    "AQLM": ({}, {"codes": ((64, 16, 1), I16), "codebooks": ((1, 256, 1, 8), F16), "scales": ((64, 1, 1, 1), F16)}),
    "VPTQ": ({}, {"indices": ((1, 8, 24), I32), "centroids.weight": ((1, 2048), F16)}),
    "HQQ": ({}, {"W_q": ((32, 128), U8), "scale": ((128, 1), F16), "zero": ((128, 1), F16)}),
    "Marlin": ({}, {"B": ((8, 128), I32), "s": ((1, 64), F16), "workspace": ((16,), I32)}),
    "Marlin's 2:4 sparse codes": (
        {},
        {"weight_packed": ((4, 128), I32), "scale_packed": ((1, 64), F16), "meta": ((8, 64), I16)},
    ),
    "EETQ": ({"quant_method": "eetq"}, {"weight": ((128, 64), I8), "weight_scales": ((64,), F16)}),
    "HIGGS": ({"quant_method": "higgs"}, {"weight": ((32, 64), I16), "scales": ((2, 64), F16)}),
    "FP-Quant": ({"quant_method": "fp_quant"}, {"qweight": ((64, 64), U8), "scales": ((64, 4), U8)}),
    "BitBLAS": (
        {"quant_method": "gptq", "checkpoint_format": "bitblas", "bits": 4, "group_size": 32},
        {"qweight": ((64, 64), I8), "scales": ((64, 4), F16)},
    ),
    "IPEX": (
        {"quant_method": "gptq", "checkpoint_format": "ipex", "bits": 4, "group_size": 32},
        {"qweight": ((16, 64), I32), "scales": ((4, 64), F16)},
    ),
    "llm-awq": (
        {"quant_method": "awq", "version": "llm-awq", "bits": 4, "group_size": 32},
        {"qweight": ((16, 128), I16), "scales": ((4, 64), F16)},
    ),
    "AWQ's gemv_fast": (
        {"quant_method": "awq", "version": "gemv_fast", "bits": 4, "group_size": 32},
        {"qweight": ((16, 128), I16), "scales": ((4, 64), F16)},
    ),
    "modelopt's AWQ": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        {"weight": ((32, 128), U8), "weight_scale": ((64, 1), F32)},
    ),
    "ComfyUI's": (
        {},
        {"weight": ((64, 64), U8), "weight_scale": ((128, 8), U8), "comfy_quant": ((20,), U8)},
    ),
    "compressed-tensors in a rotated basis": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"R1": {}}},
        {"weight_packed": ((64, 16), I32), "weight_scale": ((64, 4), F16), "weight_shape": ((2,), I32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_it_is_named_where_its_codes_would_be_weights(name, tmp_path, capsys):
    config, stored = FILES[name]
    arrays = {f"a.{suffix}": np.ones(shape, dtype) for suffix, (shape, dtype) in stored.items()}
    save_file({**arrays, "b": np.ones(3, F32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    codes = next(iter(arrays))
    got = safeload.load(tmp_path)
    assert got.keys() == {*arrays, "b"}
    for operation in (
        lambda: safeload.load(tmp_path, dtype="float32"),
        lambda: safeload.stats(tmp_path),
        lambda: safeload.diff(tmp_path, tmp_path),
        lambda: safeload.load_quantized(tmp_path, "int8"),
        lambda: safeload.convert(tmp_path, tmp_path / "x.safetensors", dtype="float32"),
    ):
        with pytest.raises(UnsupportedError, match=rf"This is {re.escape(name)}.* reads it") as caught:
            operation()
        assert caught.value.tensor == codes
    assert main(["info", str(tmp_path)]) == 0
    assert re.search(rf"they are {re.escape(name)}.* reads it", " ".join(capsys.readouterr().out.split()))
