"""Codes of a quantized folder that move to another layout, against a copy of the folder; both wait for the disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import files
import numpy as np
import pytest
from compare import Comparison, race, release

import safeload
import safeload.numpy

HIDDEN, INNER, HEADS, LAYERS, VOCABULARY = 4096, 14336, 32, 9, 2048
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5,
    "num_key_value_heads": HEADS // 4, "vocab_size": VOCABULARY,
    "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    },
}  # fmt: skip
PEER = "shutil.copyfile of each file, fsync"


@pytest.fixture(scope="session")
def awq() -> Path:
    """Nine layers of Llama-3-8B's shapes as AWQ, 1.05 GB in a shard."""
    folder, rng = files.CACHE / f"awq-v{files.VERSION}", np.random.default_rng(40)
    if (folder / "config.json").exists():
        return folder
    ends = ("model.embed_tokens.weight", (VOCABULARY, HIDDEN)), ("lm_head.weight", (VOCABULARY, HIDDEN))
    tensors = {name: np.ones(shape, np.float16) for name, shape in (*ends, ("model.norm.weight", (HIDDEN,)))}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}{norm}.weight"] = np.ones(HIDDEN, np.float16)
        for module, (rows, columns) in SHAPES.items():
            low, high, groups = -(1 << 31), (1 << 31) - 1, columns // 128
            scales = rng.random((groups, rows), np.float32) * np.float32(0.01) + np.float32(0.001)
            tensors |= {
                f"{stem}{module}.qweight": rng.integers(low, high, (columns, rows // 8), np.int32),
                f"{stem}{module}.qzeros": rng.integers(low, high, (groups, rows // 8), np.int32),
                f"{stem}{module}.scales": scales.astype(np.float16),
            }
    folder.mkdir(parents=True, exist_ok=True)
    safeload.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_awq_to_compressed_tensors(awq: Path, tmp_path: Path, table, report) -> None:
    def ours() -> Path:
        safeload.convert(awq, tmp_path / "ours", quantize="w4a16_asym")
        return tmp_path / "ours"

    def copied() -> Path:
        folder = tmp_path / "copy"
        folder.mkdir()
        for file in awq.iterdir():
            shutil.copyfile(file, folder / file.name)
            files.sync(folder / file.name)
        return folder

    def check(ours: Path, copied: Path) -> None:
        name = "model.layers.8.mlp.down_proj.weight"
        moved, source = (safeload.load(folder, dtype="float32", only=name)[name] for folder in (ours, copied))
        assert np.array_equal(moved, source)

    def prepare() -> None:
        for folder in ("ours", "copy"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        files.warm(awq / "model.safetensors")
        os.sync()
        release()

    prepare()
    sides = {"ours": ours, PEER: copied}
    checked = {name: side() for name, side in sides.items()}
    check(*checked.values())
    samples = race(sides, 7, prepare=prepare, warm=False)
    job = "1.05 GB of AWQ to w4a16_asym"
    row = table.add(job, PEER, Comparison(samples["ours"], samples[PEER]), at_most=1.5)
    report(ours, [row], rounds=1, prepare=prepare)
