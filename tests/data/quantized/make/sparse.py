"""compressed-tensors' sparse formats, of which version 0.12 was the last to write them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .checkpoint import ROOT, Checkpoint, fixture, name_of
from .restated import E4M3, groups, raw, widened

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
BF16 = torch.bfloat16


def dense(stored: dict[str, torch.Tensor], module: str) -> np.ndarray:
    """Values in their places; those of float8 and bf16 as their bits."""
    rows, columns = stored[f"{module}.shape"].flatten().tolist()
    mask = np.unpackbits(raw(stored[f"{module}.bitmask"]), axis=-1, bitorder="little")[:, :columns].astype(bool)
    values = raw(stored[f"{module}.compressed"]).reshape(-1)
    found = np.zeros((rows, columns), values.dtype)
    found[mask] = values
    return found


def restated(stored: dict[str, torch.Tensor], module: str) -> np.ndarray:
    """The weight as float32."""
    values, scale = dense(stored, module), stored.get(f"{module}.weight_scale")
    if scale is None:
        return widened(torch.from_numpy(values).view(stored[f"{module}.compressed"].dtype))
    if values.dtype == np.uint8:
        return E4M3[values] * widened(scale)
    zero = raw(stored[f"{module}.weight_zero_point"]).astype(np.int32)
    difference = (values.astype(np.int32) - groups(zero, values.shape[-1])).astype(np.float32)
    return difference * groups(widened(scale), values.shape[-1])


def pruned(ckpt: Checkpoint, shape: tuple[int, int], form: str, dtype: torch.dtype) -> torch.Tensor:
    """Weights of which two of each four are zero; or 60 %, those of a whole row, and none of another."""
    weight = ckpt.normal(*shape, dtype=dtype)
    if form == "sparse-24-bitmask":
        fours = weight.view(-1, 4)
        fours[torch.arange(len(fours))[:, None], fours.abs().argsort(1)[:, :2]] = 0
        return weight
    gone = torch.rand(shape, generator=ckpt.random) < 0.6
    gone[1], gone[2] = True, False
    weight[gone] = 0
    return weight


def sparse(
    name: str,
    shows: str,
    form: str,
    shapes: dict[str, tuple[int, int]],
    dtype: torch.dtype = BF16,
    **quantization: object,
) -> None:
    """Adds a fixture of version 0.12.2, which runs in a process of its own."""

    @fixture(
        name,
        writer="compressed-tensors 0.12.2 `ModelCompressor.compress`",
        reader=f"compressed-tensors 0.12.2 `{'sparse24_' * ('24' in form)}bitmask_decompress`"
        + (", `dequantize`, scales cast to f32" if quantization else ""),
        shows=shows,
    )
    def run(ckpt: Checkpoint) -> None:
        weights = {module: pruned(ckpt, shape, form, dtype) for module, shape in shapes.items()}
        weights["lm_head"] = ckpt.normal(8, 16, dtype=dtype)
        (ckpt.folder / "config.json").write_text(json.dumps(ckpt.config(torch_dtype=name_of(dtype))))
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder)
            save_file(weights, source / "weights.safetensors")
            (source / "arguments.json").write_text(json.dumps([form, quantization or None]))
            places = [os.path.abspath(os.environ["OLDER_COMPRESSED_TENSORS"]), os.environ.get("PYTHONPATH", "")]
            command = [sys.executable, "-m", "make.older_sparse", folder, str(ckpt.folder)]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
            subprocess.run(command, cwd=ROOT, env=env, check=True)
            found = load_file(source / "read.safetensors")
        stored = ckpt.read()
        ckpt.plain("lm_head.weight", stored["lm_head.weight"])
        for module in shapes:
            ckpt.expect(f"{module}.weight", found[f"{module}.weight"], restated(stored, module))
            if not quantization:
                assert torch.equal(found[f"{module}.weight"], weights[module].float())


sparse(
    "ct_sparse",
    "`sparse-bitmask`: bf16 values, a mask of bits, where rows begin; odd row lengths, a row of zeros and one without",
    "sparse-bitmask",
    {Q: (13, 77), DOWN: (10, 131)},
)
sparse(
    "ct_sparse_int8",
    "`sparse-bitmask` of I8 codes in groups of 32 with zero points, which a code of 0 has too; f16 scales",
    "sparse-bitmask",
    {Q: (13, 64), DOWN: (10, 96)},
    torch.float16,
    num_bits=8,
    strategy="group",
    group_size=32,
    symmetric=False,
)
sparse(
    "ct_sparse_24",
    "`sparse-24-bitmask`: a matrix of two values of each four columns, without `row_offsets`",
    "sparse-24-bitmask",
    {Q: (12, 76), DOWN: (10, 132)},
)
sparse(
    "ct_sparse_24_fp8",
    "`sparse-24-bitmask` of FP8 codes with one scale a row",
    "sparse-24-bitmask",
    {Q: (12, 76), DOWN: (10, 132)},
    num_bits=8,
    type="float",
    strategy="channel",
)
