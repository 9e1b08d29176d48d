"""Tensors on the devices of torch."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..engine.progress import Progress
from . import torch_arrays
from .checkpoints import Selected, load_arrays, unconverted


def load(
    checkpoint: Checkpoint, selected: Selected, *, device: Any, threads: int | None, progress: Progress
) -> dict[str, Any]:
    """Tensors on a device by name, in the order of ``selected.names``.

    Args:
        checkpoint: an open one.
        selected: the tensors, by the dtype that they are loaded with.
        device: a `torch.device` that is available, neither the CPU nor "meta".
        threads: for reading.
        progress: of reading.

    Raises:
        SafeloadError, OSError: see `Checkpoint.load`.
    """
    raw = torch_arrays.raw_of(unconverted(checkpoint, selected))
    arrays = load_arrays(checkpoint, selected, threads=threads, progress=progress)
    return {name: tensor.to(device) for name, tensor in torch_arrays.from_arrays(arrays, raw).items()}
