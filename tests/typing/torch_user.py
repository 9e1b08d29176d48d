"""What people write with safeload.torch. Type checkers that find torch accept every line; tests run none of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import safeload
from safeload import torch as tensors


def in_torch(path: Path, model: nn.Module) -> bytes:
    weights: dict[str, torch.Tensor] = tensors.load_file(path, "cuda:0", dtype="bf16", names=["w"], progress=True)
    weights = {**weights, **tensors.load_checkpoint([path], device=torch.device(1), only="model.*", dtype=np.float32)}
    with safeload.safe_open(path, framework="pt", device="cpu") as file:
        weights["rows"] = file.get_slice("w")[:2]
    tensors.save_file({name: x.contiguous() for name, x in weights.items()}, path, {"format": "pt"})
    tensors.save_model(model, path, metadata={"step": "1"})
    missing, unexpected = tensors.load_model(model, path, strict=False)
    print(sorted(missing), unexpected[:1])
    return tensors.save(tensors.load(path.read_bytes()))


def on_ranks(path: Path, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    placements = {"*norm*": Replicate(), "*.w": [Shard(0)], "*": "tp"}
    parts = tensors.load_checkpoint(path, mesh=mesh, placements="tp", local=True, device="cuda")
    return parts | tensors.load_checkpoint(path, mesh=mesh, placements=placements, broadcast=True)


def as_an_attribute(path: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = safeload.torch.load_checkpoint(path, dtype="bf16")
    return weights | safeload.torch.load_file(path)
