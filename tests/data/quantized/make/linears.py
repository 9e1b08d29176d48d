"""A model of nothing but Linear layers, and scales for them: for both versions of compressed-tensors."""

import torch
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam


def model_of(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree with a Linear for each weight, by the name of its module."""
    root = torch.nn.Module()
    for name, weight in weights.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        parent.add_module(last, linear)
    return root


def observe(module: torch.nn.Linear) -> None:
    """Scales and zero points from the least and the largest value, as llm-compressor's `memoryless_minmax` observer."""
    args, weight = module.quantization_scheme.weights, module.weight.data
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(*weight.float().aminmax())
        module.weight_global_scale.data.copy_(global_scale)
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "channel":
        parts = weight.unsqueeze(1)
    elif args.strategy == "block":
        high, wide = args.block_structure
        rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
        padded = torch.nn.functional.pad(
            weight, (0, columns * wide - weight.shape[1], 0, rows * high - weight.shape[0])
        )
        parts = padded.reshape(rows, high, columns, wide).transpose(1, 2).flatten(-2)
    elif hasattr(module, "weight_g_idx"):
        # GPTQ takes the columns in the order of what they matter, here their size, and groups them in that order.
        order = weight.float().abs().sum(0).argsort(descending=True)
        module.weight_g_idx.data[order] = (torch.arange(len(order)) // args.group_size).int()
        parts = weight[:, order].unflatten(-1, (-1, args.group_size))
    else:
        parts = weight.unflatten(-1, (-1, args.group_size))
    weight_scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale)
    module.weight_scale.data = weight_scale.reshape(module.weight_scale.shape).to(weight.dtype)
    # What would come of activations that reach 12.5.
    for scale, value in {"input_global_scale": 6 * 448 / 12.5, "input_scale": 12.5 / 448}.items():
        if hasattr(module, scale):
            getattr(module, scale).data.fill_(value)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape)
