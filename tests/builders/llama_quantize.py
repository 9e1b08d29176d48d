"""Tiny models as GGUF files, importance matrices for them, and what llama-quantize makes of them.

Values come from a hash of their index, so that they are equal with every version of NumPy. `LLAMA_QUANTIZE` in the
environment is the path of a llama-quantize, which only the makers of fixtures and long.sh need.
"""

import hashlib
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np

from safeload import gguf

PROGRAM = os.environ.get("LLAMA_QUANTIZE")
# All file types that safeload writes; q2_k_s needs an importance matrix.
FILE_TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m"),
    *("q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4_moe"),
)


def noise(count, seed):
    """About normal numbers: sums of four uniform ones, with exact arithmetic."""
    index = np.arange(4 * count, dtype=np.uint64) + np.uint64(seed * 7_919 + 1)
    with np.errstate(over="ignore"):
        for shift in (np.uint64(31), np.uint64(29), np.uint64(33)):
            index = (index ^ (index >> shift)) * np.uint64(0x9E3779B97F4A7C15)
    uniform = (index >> np.uint64(40)).astype(np.float64) * 2.0**-24 - 0.5
    return uniform.reshape(count, 4).sum(axis=1)


def model(
    architecture="llama",
    layers=2,
    heads=4,
    kv_heads=4,
    experts=0,
    width=256,
    inner=256,
    rows=2,
    tied=False,
    fused=False,
    more=(),
    extra_layers=0,
    dtype="float32",
):
    """Tensors and metadata of a model, of which only the lengths of rows are true to its sizes."""
    number = np.uint32
    sizes = {"block_count": layers, "context_length": 64, "embedding_length": width, "feed_forward_length": inner}
    sizes |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    sizes |= {"expert_count": experts, "expert_used_count": 1} if experts else {}
    sizes |= {"nextn_predict_layers": extra_layers} if extra_layers else {}
    metadata = {"general.architecture": architecture, "general.name": "tiny", "general.file_type": number(0)}
    metadata |= {f"{architecture}.{key}": number(value) for key, value in sizes.items()}
    metadata[f"{architecture}.attention.layer_norm_rms_epsilon"] = np.float32(1e-5)
    metadata[f"{architecture}.attention.layer_norm_epsilon"] = np.float32(1e-5)
    metadata["tokenizer.ggml.model"] = "no_vocab"
    shapes = {"token_embd.weight": (rows, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (rows, width)
    stack = (experts,) if experts else ()
    suffix = "_exps" if experts else ""
    for layer in range(layers):
        attention = ("attn_qkv",) if fused else ("attn_q", "attn_k", "attn_v")
        own = dict.fromkeys((*attention, "attn_output"), (rows, width))
        own |= {f"ffn_{name}{suffix}": (*stack, rows, width) for name in ("gate", "up")}
        own[f"ffn_down{suffix}"] = (*stack, rows, inner)
        own |= dict.fromkeys(("attn_norm", "ffn_norm"), (width,))
        if experts:
            own["ffn_gate_inp"] = (experts, width)
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    shapes |= dict(more)
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = (noise(int(np.prod(shape)), seed) * 0.05).astype(np.float32).reshape(shape)
        plain = len(shape) < 2 or "ffn_gate_inp" in name
        tensors[name] = values if plain else values.astype(dtype)
    return tensors, metadata


def importance_of(tensors):
    """Sums of squares and counts for each matrix, with an expert that no token reached."""
    entries = {}
    for seed, (name, value) in enumerate(tensors.items()):
        if value.ndim < 2 or "ffn_gate_inp" in name or name == "token_embd.weight":
            continue
        experts = value.shape[0] if value.ndim > 2 else 1
        sums = np.square(noise(experts * value.shape[-1], 1000 + seed)).astype(np.float32) * np.float32(512)
        counts = np.full((experts, 1), 512, np.float32)
        if experts > 1:
            counts[1] = 0
        entries[name] = sums.reshape(experts, -1), counts
    return entries


def save_imatrix(path, tensors, *, older=False):
    """An importance matrix for a model, in GGUF or in the older format."""
    entries = importance_of(tensors)
    if older:
        content = struct.pack("<i", len(entries))
        for name, (sums, _) in entries.items():
            raw = name.encode()
            content += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", 3, sums.size) + sums.tobytes()
        Path(path).write_bytes(content + struct.pack("<ii", 3, 8) + b"wiki.txt")
        return
    parts = {}
    for name, (sums, counts) in entries.items():
        parts[f"{name}.in_sum2"], parts[f"{name}.counts"] = sums, counts
    metadata = {"general.type": "imatrix", "imatrix.datasets": ["wiki.txt", "more.txt"]}
    metadata |= {"imatrix.chunk_count": np.uint32(9), "imatrix.chunk_size": np.uint32(512)}
    gguf.save_file(parts, path, metadata)


def run(source, file_type, folder, destination=None, imatrix=None):
    """What llama-quantize prints, without a destination for a dry run."""
    command = [PROGRAM]
    command += [] if destination else ["--dry-run"]
    command += [] if imatrix is None else ["--imatrix", imatrix]
    command += [source, *([destination] if destination else []), file_type.upper()]
    done = subprocess.run([*command, "2"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return done.stdout + done.stderr


def types_of(text):
    """The type of each tensor according to a dry run; that of the source if it stays."""
    lines = re.findall(r"^\[ *\d+/ *\d+\] (\S+) +- \[.*?\], type = +(\w+), (.*)$", text, re.MULTILINE)
    return {name: (re.findall(r"\((\w+)\)", rest) or [None])[-1] if "->" in rest else None for name, _, rest in lines}


def digest(content):
    return hashlib.sha256(content).hexdigest()[:16]
