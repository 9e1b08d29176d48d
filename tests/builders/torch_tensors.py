"""Tensors of torch of every dtype and of the shapes that tests go wrong with."""

from __future__ import annotations

from typing import Any


def every_dtype() -> dict[str, Any]:
    """One tensor of each dtype that safetensors and this torch have, by the safetensors code."""
    import torch

    generator = torch.Generator().manual_seed(7)
    names = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
        "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
        "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64", "F4": "float4_e2m1fn_x2",
    }  # fmt: skip
    tensors = {}
    for code, name in names.items():
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        size = torch.empty(0, dtype=dtype).element_size()
        data = torch.randint(0, 2 if code == "BOOL" else 256, (5, 6 * size), dtype=torch.uint8, generator=generator)
        tensors[code] = data.view(dtype)
    return tensors


def bits(tensor: Any) -> tuple[Any, ...]:
    """What two tensors have in common that are the same: dtype, shape, strides and bytes."""
    import torch

    data = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    if tensor.numel():
        data.copy_(tensor.detach().flatten())
        data = data.view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), bytes(data.tolist())
