"""quanto: codes of 8 bits with a scale for each row."""

import json

import numpy as np
import torch
from optimum.quanto import freeze, qfloat8_e4m3fn, qfloat8_e5m2, qint8, quantization_map, quantize

from .checkpoint import Checkpoint, fixture
from .restated import E4M3, raw, widened

SHAPES = {"q_proj": (24, 40), "down_proj": (10, 71)}


@fixture(
    "quanto",
    writer="optimum-quanto 0.2.7 `quantize`, `freeze`, `state_dict`, `quantization_map`",
    reader="optimum-quanto 0.2.7 `QTensor.dequantize`, scales cast to f32",
    shows="`X.weight._data` I8 and F8, `X.weight._scale` [out, 1], of a convolution too; `quanto_qmap.json`; scales of "
    "activations to ignore",
)
def quanto(ckpt: Checkpoint) -> None:
    tensors = {"model.norm.weight": ckpt.plain("model.norm.weight", ckpt.norm(40))}
    described = {}
    for kind, dtype in ((qint8, torch.bfloat16), (qfloat8_e4m3fn, torch.float16), (qfloat8_e5m2, torch.float32)):
        model = torch.nn.ModuleDict()
        for module, (rows, columns) in SHAPES.items():
            model[module] = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
        model["conv"] = torch.nn.Conv2d(6, 4, 3, bias=False, dtype=dtype)
        for one in model.values():
            one.weight.data = ckpt.normal(*one.weight.shape, dtype=dtype)
        quantize(model, weights=kind, activations=qint8 if kind is qint8 else None)
        freeze(model)
        prefix = f"model.{kind.name}."
        described |= {prefix + name: said for name, said in quantization_map(model).items()}
        state = model.state_dict()
        tensors |= {prefix + name: tensor for name, tensor in state.items()}
        for name, one in model.named_modules():
            if not name:
                continue
            weight = one.weight
            weight._scale = weight._scale.float()
            codes = state[f"{name}.weight._data"]
            numbers = raw(codes).astype(np.float32) if kind is qint8 else codes.float().numpy()
            if kind is qfloat8_e4m3fn:
                assert np.array_equal(numbers, E4M3[raw(codes)])
            ckpt.expect(
                f"{prefix}{name}.weight", weight.dequantize(), numbers * widened(state[f"{name}.weight._scale"])
            )
    ckpt.write(tensors, ckpt.config())
    (ckpt.folder / "quanto_qmap.json").write_text(json.dumps(described, indent=4))
