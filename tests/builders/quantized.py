"""Quantized checkpoints that their own writers made, and the weights that their own readers found in them.

`tests/data/quantized/README.md` says what each of them shows; `tests/data/quantized/make` made them.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from builders.paths import DATA

FOLDER = DATA / "quantized"
EXPECTED = FOLDER / "expected"


class Fixture(NamedTuple):
    """One of the checkpoints.

    Attributes:
        name: of its folder.
        folder: with ``config.json`` if there is one, and the weights.
    """

    name: str
    folder: Path

    @property
    def path(self) -> Path:
        """What to open: the folder, or its only file where the writer makes single files without a config."""
        files = list(self.folder.iterdir())
        return files[0] if len(files) == 1 else self.folder

    def expected(self) -> dict[str, np.ndarray]:
        """The true weights as float32 by logical name, plain tensors included; read-only."""
        return dict(_read(EXPECTED / f"{self.name}.npz"))

    def stored(self) -> dict[str, np.ndarray]:
        """The tensors of the files as they are, scales and all."""
        from safeload.numpy import load_file

        files = sorted(self.folder.rglob("*.safetensors"))
        return {name: array for file in files for name, array in load_file(file).items()}


def weight_quant() -> dict[str, np.ndarray]:
    """What training with BitNet's ``WeightQuant`` computes with, for the master weights of ``bitnet_online``."""
    return dict(_read(EXPECTED / "bitnet_online.weight_quant.npz"))


@cache
def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        arrays = dict(file)
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


FIXTURES: dict[str, Fixture] = {
    folder.name: Fixture(folder.name, folder)
    for folder in sorted(FOLDER.iterdir())
    if (EXPECTED / f"{folder.name}.npz").exists()
}
