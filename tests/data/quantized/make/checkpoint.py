"""What a fixture is: the folder that a writer leaves, and the arrays that its reader finds in it."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .restated import widened

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = ROOT / "expected"
INDEX = "model.safetensors.index.json"


def name_of(dtype: torch.dtype) -> str:
    """A dtype as ``config.json`` names it."""
    return str(dtype).removeprefix("torch.")


class Checkpoint:
    """One fixture while it is made: an empty folder to write to, and the expected arrays by logical name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = ROOT / name
        self.expected: dict[str, np.ndarray] = {}
        # Seeded by the name, so that a fixture does not depend on which others are made with it.
        self.random = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**63)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        EXPECTED.mkdir(exist_ok=True)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, std: float = 0.02) -> torch.Tensor:
        """Weights as they are after training, about: normal, with some rows and a few single values much larger."""
        values = torch.randn(shape, generator=self.random) * std
        values *= torch.exp(torch.randn((*shape[:-1], 1), generator=self.random) * 0.5)
        values[torch.rand(shape, generator=self.random) < 0.002] *= 8
        return values.to(dtype)

    def norm(self, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weights of a norm: near one, not quantized by any scheme."""
        return (1 + torch.randn(size, generator=self.random) * 0.1).to(dtype)

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is stored as it is: expected as float32. Returns it, to be written."""
        self.expected[name] = widened(tensor)
        return tensor

    def expect(self, name: str, by_reader: torch.Tensor | np.ndarray, restated: np.ndarray) -> None:
        """An array that the reader found, which the arithmetic written in numpy must find too."""
        found = by_reader.detach().numpy() if isinstance(by_reader, torch.Tensor) else by_reader
        assert found.dtype == restated.dtype == np.float32, (name, found.dtype, restated.dtype)
        assert found.shape == restated.shape, (name, found.shape, restated.shape)
        assert np.isfinite(found).all(), name
        assert np.array_equal(found, restated), f"{name}: {np.mean(found != restated):.1%} differ"
        assert np.unique(found).size > 2, f"{name}: has nearly no different values"
        self.expected[name] = np.ascontiguousarray(found)

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None = None,
        *,
        second: Callable[[str], bool] | None = None,
        file: str = "model.safetensors",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Writes ``config.json`` and one file, or two and an index if ``second`` chooses tensors for the second."""
        if config is not None:
            (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        note = {"format": "pt", **(metadata or {})}
        if second is None:
            save_file({n: t.contiguous() for n, t in tensors.items()}, self.folder / file, note)
            return
        where = {n: f"model-0000{1 + bool(second(n))}-of-00002.safetensors" for n in sorted(tensors)}
        for shard in sorted(set(where.values())):
            save_file({n: tensors[n].contiguous() for n in where if where[n] == shard}, self.folder / shard, note)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def read(self) -> dict[str, torch.Tensor]:
        """The stored tensors of all files, as safetensors itself reads them."""
        stored: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            stored.update(load_file(path))
        return stored

    def finish(self) -> None:
        """Writes the expected arrays."""
        assert self.expected, self.name
        np.savez_compressed(EXPECTED / f"{self.name}.npz", **dict(sorted(self.expected.items())))

    def config(self, quantization: Mapping[str, Any] | None = None, **others: Any) -> dict[str, Any]:
        """A ``config.json`` of a small llama, with ``quantization_config`` if there is one."""
        base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **others}
        return base if quantization is None else {**base, "quantization_config": dict(quantization)}


class Fixture(NamedTuple):
    """How a fixture is made, and its line in the table of the README."""

    make: Callable[[Checkpoint], None]
    writer: str
    reader: str
    shows: str


FIXTURES: dict[str, Fixture] = {}


def fixture(
    name: str, *, writer: str, reader: str, shows: str
) -> Callable[[Callable[[Checkpoint], None]], Callable[[Checkpoint], None]]:
    """Registers the function that makes a fixture."""

    def register(make: Callable[[Checkpoint], None]) -> Callable[[Checkpoint], None]:
        assert name not in FIXTURES, name
        FIXTURES[name] = Fixture(make, writer, reader, shows)
        return make

    return register
