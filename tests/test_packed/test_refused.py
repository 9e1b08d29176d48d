"""Families that are not dequantized: they open as stored, and every operation says what they are and what reads them.

Names, dtypes and shapes as their writers store them, values random.
"""

import json

import numpy as np
import pytest
from builders.inside import families
from builders.random import rng

import safeload
from safeload import UnsupportedError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

P = "model.layers.0.mlp.up_proj"


def tensor(dtype, *shape):
    return rng.integers(0, 100, shape).astype(dtype)


# What messages call it, its reader, quant_method, the tensor of codes, all tensors by suffix.
CASES = {
    "exl2": ("EXL2", "ExLlamaV2", None, "q_weight", {
        "q_weight": tensor("i4", 20, 64), "q_scale": tensor("i4", 4, 8), "q_scale_max": tensor("f2", 4),
        "q_groups": tensor("i2", 8), "q_invperm": tensor("i4", 128), "q_perm": tensor("i4", 128)}),
    "exl3": ("EXL3", "ExLlamaV3", "exl3", "trellis", {
        "trellis": tensor("i2", 8, 4, 48), "suh": tensor("f2", 128), "svh": tensor("f2", 64)}),
    "qtip": ("QTIP", "QTIP", None, "trellis", {
        "trellis": tensor("i2", 32, 64), "SU": tensor("f2", 128), "SV": tensor("f4", 64), "tlut": tensor("f2", 64, 2)}),
    "quip": ("QuIP#", "QuIP#", None, "Qidxs", {
        "Qidxs": tensor("i2", 64, 16), "SU": tensor("f2", 128), "SV": tensor("f2", 64)}),
    "aqlm": ("AQLM", "aqlm", "aqlm", "codes", {
        "codes": tensor("i1", 64, 16, 1), "codebooks": tensor("f2", 1, 16, 1, 8), "scales": tensor("f2", 64, 1, 1, 1)}),
    "vptq": ("VPTQ", "vptq", "vptq", "indices", {
        "indices": tensor("i4", 1, 16, 12), "centroids.weight": tensor("f2", 1, 128), "perm": tensor("i2", 128),
        "weight_scale": tensor("f2", 128), "weight_bias": tensor("f2", 128)}),
    "spqr": ("SpQR", "spqr_quant", "spqr", "col_vals", {
        "dense_weights": tensor("i8", 32), "row_offsets": tensor("i4", 65), "col_vals": tensor("i4", 40)}),
    "marlin-24": ("Marlin's 2:4", "vLLM", "compressed-tensors", "weight_packed", {
        "weight_packed": tensor("i4", 4, 128), "scale_packed": tensor("f2", 1, 64), "meta": tensor("i2", 64, 8)}),
    "marlin": ("Marlin,", "vLLM", None, "B", {"B": tensor("i4", 8, 128), "s": tensor("f2", 1, 64)}),
    "hqq": ("HQQ", "hqq", None, "W_q", {
        "W_q": tensor("u1", 32, 64), "scale": tensor("f2", 64, 1), "zero": tensor("f2", 64, 1)}),
    "eetq": ("EETQ", "EETQ", "eetq", "weight", {"weight": tensor("i1", 64, 32), "weight_scales": tensor("f2", 32)}),
    "higgs": ("HIGGS", "flute", "higgs", "weight", {
        "weight": tensor("i2", 16, 64), "scales": tensor("f2", 64, 1), "tables": tensor("f2", 16)}),
    "bitblas": ("BitBLAS", "bitblas", "bitblas", "qweight", {
        "qweight": tensor("i1", 64, 64), "scales": tensor("f2", 64, 1), "zeros": tensor("f2", 1, 64)}),
    "ipex": ("IPEX", "intel", "ipex", "qweight", {
        "qweight": tensor("i4", 16, 64), "scales": tensor("f2", 1, 64), "qzeros": tensor("i4", 1, 8)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_operation_says_what_it_is_and_what_reads_it(tmp_path, case):
    what, reader, method, codes, tensors = CASES[case]
    stored = {f"{P}.{suffix}": value for suffix, value in tensors.items()}
    save_file({**stored, "norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    if method is not None:
        said = {"quantization_config": {"quant_method": method, "format": case}}
        (tmp_path / "config.json").write_text(json.dumps(said))
    name = f"{P}.{codes}"
    with safeload.open(tmp_path) as opened:
        assert opened[name].tobytes() == stored[name].tobytes()
        calls = [
            lambda: safeload.load(tmp_path, dtype="float32"),
            lambda: opened.load([name], dtype="bfloat16"),
            lambda: safeload.load_quantized(tmp_path, "q8_0"),
            lambda: safeload.stats(opened),
            lambda: safeload.diff(opened, opened),
            lambda: safeload.convert(tmp_path, tmp_path / "out.npz", dtype="float32"),
        ]
        for call in calls:
            with pytest.raises(UnsupportedError) as caught:
                call()
            assert f"'{name}' holds" in str(caught.value)
            assert f"This is {what}" in str(caught.value)
            assert reader in str(caught.value)


def test_a_rotated_basis(tmp_path):
    save_file({"a.weight_packed": tensor("i4", 8, 4), "a.weight_scale": tensor("f2", 8, 1)}, tmp_path / "x.safetensors")
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"config_groups": 1}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(UnsupportedError, match=r"'a.weight_packed' .*rotated basis \(transform_config\).*vLLM reads"):
        safeload.load(tmp_path, dtype="float32")


def test_no_method_has_two_rows():
    refusals = [row for row in families() if row.describe is None]
    methods = [method for row in refusals for method in row.methods]
    pairs = [(row.main, suffix) for row in refusals for suffix in row.required.get("scale", ())]
    assert len(set(methods)) == len(methods)
    assert len(set(pairs)) == len(pairs)


def test_mlx_without_a_configuration_is_decided_by_shapes_or_refused(tmp_path):
    """Twelve words for two groups hold 3 bits in groups of 64 or 6 in groups of 32; 20 words hold 5 bits only."""
    groups = np.ones((4, 2), np.float32)
    for words, labels in ((12, "mlx3 g64 or mlx6 g32"), (20, None)):
        path = tmp_path / f"{words}.safetensors"
        save_file({"w.weight": np.zeros((4, words), np.uint32), "w.scales": groups, "w.biases": groups}, path)
        if labels is None:
            assert safeload.load(path, dtype="float32")["w.weight"].shape == (4, 128)
            continue
        assert len(safeload.load(path)) == 3
        with pytest.raises(UnsupportedError, match=f"its shapes fit {labels}, and no config.json is there"):
            safeload.load(path, dtype="float32")
