"""Writes what ggml and llama-quantize make of the inputs in tests/builders: types.json, files.json and blocks.json.

usage: LLAMA_QUANTIZE=.../llama-quantize PYTHONPATH=tests python make.py .../libggml-base.so [FOLDER]
"""

import json
import sys
import tempfile
from pathlib import Path

from builders import ggml_inputs
from builders.llama_quantize import FILE_TYPES, digest, model, run, save_imatrix, types_of

from safeload import gguf

HERE = Path(__file__).resolve().parent

# Models whose tensors get all kinds of types: by the numbers of layers, heads for each key, and experts, odd rows, tied
# and fused tensors, and the architectures with rules of their own.
MODELS = [
    {"layers": 2},
    {"layers": 17, "kv_heads": 1},
    {"layers": 32, "kv_heads": 2, "tied": True},
    {"layers": 9, "fused": True},
    {"layers": 16, "experts": 8, "kv_heads": 1},
    {"layers": 10, "experts": 4, "tied": True},
    {"layers": 8, "architecture": "qwen2moe", "experts": 16},
    {"layers": 8, "width": 288, "inner": 512},
    {"layers": 8, "width": 256, "inner": 320, "kv_heads": 1},
    {"layers": 4, "width": 48, "inner": 40},
    {"layers": 80, "kv_heads": 1},
    {"layers": 80},
    {"layers": 80, "architecture": "qwen2", "kv_heads": 1},
    {"layers": 68, "architecture": "jais2"},
    {"layers": 18, "architecture": "falcon", "fused": True},
    {"layers": 6, "architecture": "gemma3", "more": [["per_layer_token_embd.weight", [2, 256]]]},
    {"layers": 6, "more": [["blk.0.attn_kv_b.weight", [2, 256]], ["blk.1.ssm_conv1d.weight", [2, 256]],
                           ["blk.2.attn_q_norm.weight", [2, 256]], ["blk.3.shortconv.conv.weight", [2, 256]],
                           ["blk.4.attn_v.scale", [2, 256]], ["blk.5.ffn_gate_shexp.weight", [2, 256]],
                           ["blk.0.attn_rel_b.weight", [2, 256]], ["rope.weight", [1, 256]]]},
]  # fmt: skip
# Models whose whole files are compared.
FILES = [
    {"rows": 8, "layers": 8, "kv_heads": 1},
    {"rows": 4, "layers": 3, "experts": 8, "dtype": "float16"},
    {"rows": 4, "layers": 2, "width": 288, "inner": 512, "tied": True},
]
LETTERS = "abcdefghijklmnopqrst"


def main(library, folder=HERE):
    names = ["", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl"]
    names += ["iq4_xs", "tq1_0", "tq2_0", "mxfp4"]
    letters = dict(zip(names, LETTERS, strict=False))
    types, files = [], []
    with tempfile.TemporaryDirectory() as work:
        for sizes in MODELS:
            tensors, metadata = model(**sizes)
            gguf.save_file(tensors, f"{work}/in.gguf", metadata)
            save_imatrix(f"{work}/imatrix.gguf", tensors)
            row = {"model": sizes}
            for imatrix, key in ((None, "types"), ("imatrix.gguf", "with_imatrix")):
                row[key] = {}
                for file_type in FILE_TYPES:
                    found = types_of(run("in.gguf", file_type, work, imatrix=imatrix))
                    assert found.keys() == tensors.keys(), (found.keys() ^ tensors.keys(), sizes)
                    text = "".join(letters[(kind or "").lower()] for kind in found.values())
                    if row["types"].get(file_type) != text:
                        row[key][file_type] = text
            types.append({**row, "order": digest("\n".join(found).encode())})
        for sizes in FILES:
            tensors, metadata = model(**sizes)
            gguf.save_file(tensors, f"{work}/in.gguf", metadata)
            for imatrix in (None, "imatrix.gguf", "imatrix.dat"):
                if imatrix is not None:
                    save_imatrix(f"{work}/{imatrix}", tensors, older=imatrix.endswith("dat"))
                row = {"model": sizes, "imatrix": imatrix, "digests": {}}
                for file_type in FILE_TYPES:
                    if imatrix is None and file_type == "q2_k_s":
                        continue
                    run("in.gguf", file_type, work, "out.gguf", imatrix)
                    row["digests"][file_type] = digest(Path(work, "out.gguf").read_bytes())
                files.append(row)
    blocks = {scheme: {} for scheme in ggml_inputs.TYPES}
    ggml = ggml_inputs.load(library)
    for scheme, kind, weights in ggml_inputs.cases():
        made = ggml_inputs.quantize(ggml, scheme, ggml_inputs.KINDS[kind], ggml_inputs.IMPORTANCE[weights])
        blocks[scheme].setdefault(kind, {})[weights] = digest(made.tobytes())
    content = {"types": {"letters": letters, "models": types}, "files": files, "blocks": blocks}
    for name, value in content.items():
        Path(folder, f"{name}.json").write_text(json.dumps(value, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
