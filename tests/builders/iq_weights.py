"""The weights of tests/data/gguf/iq.gguf before ggml quantized them."""

import numpy as np

METADATA = {
    "general.architecture": "llama",
    "general.name": "grids",
    "general.quantization_version": 2,
    "llama.block_count": 1,
    "quantize.imatrix.file": "imatrix.dat",
}

# The type of each matrix.
TYPES = {
    "blk.0.attn_q.weight": "iq2_xxs",
    "blk.0.attn_k.weight": "iq2_xs",
    "blk.0.attn_v.weight": "iq2_s",
    "blk.0.attn_output.weight": "iq3_xxs",
    "blk.0.ffn_down.weight": "iq3_s",
    "blk.0.ffn_gate.weight": "iq1_s",
    "blk.0.ffn_up.weight": "iq1_m",
}


def weights() -> dict[str, np.ndarray]:
    """Each as float32 by name: matrices [3, 512], then a norm [512]."""
    random = np.random.RandomState(22)  # whose numbers never change
    found = {name: (random.standard_normal((3, 512)) * 0.05).astype(np.float32) for name in TYPES}
    return {**found, "output_norm.weight": random.standard_normal(512).astype(np.float32)}
