"""Quantized checkpoints that their own writers made, and the weights that their own readers found in them.

`tests/data/quantized/README.md` says what each of them shows; `tests/data/quantized/make` made them.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from builders.paths import DATA
from builders.thorough import THOROUGH, part_of

FOLDER = DATA / "quantized"
EXPECTED = FOLDER / "expected"


# The fixtures that are GGUF files, which hold no config and no array of blocks that numpy could have.
IN_GGUF = ("gguf_i2_s", "gguf_nvfp4")


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
        """The tensors of the files as they are, scales and all; of GGUF files the bytes of blocks."""
        from safeload import load
        from safeload.numpy import load_file

        if self.name in IN_GGUF:
            arrays: dict[str, np.ndarray] = {}
            for name, value in load(self.path, stored=True).items():
                array = value if isinstance(value, np.ndarray) else value.data
                if self.name == "gguf_i2_s" and array.dtype == np.uint8:  # the scale is behind the codes
                    rows = len(self.expected()[name])
                    arrays[f"{name}_scale"] = array[-32:-28].view("<f4").reshape(())
                    array = array[:-32].reshape(rows, -1)
                arrays[name] = array
            return arrays
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

# One of each kind of layout, scales, zeros, biases, names and shapes: what an operation does to the weights of these it
# does to those of all. The weights themselves are compared in all of them.
KINDS = (
    "awq4_gemm", "awq4_gemv", "bitnet_divided", "bitnet_online", "bitnet_times", "bnb_fp4_bf16", "bnb_int8",
    "bnb_nf4_nested", "comfy_quant_fp8", "comfy_scaled_fp8", "ct_fp8_channel", "ct_int8_g32_asym", "ct_mixed",
    "ct_mxfp6", "ct_nvfp4", "ct_old_g_idx_asym", "ct_old_w5_g32_asym", "ct_pack_experts", "ct_pack_w3_g32_asym",
    "ct_pack_w4_block_asym", "ct_pack_w4_g32_sym", "ct_sparse", "ct_sparse_24_fp8", "deepseek_v4", "fbgemm_llama4",
    "fp8_block", "fp8_block_u8", "fp8_experts", "gguf_i2_s",
    "gguf_nvfp4", "gpt_oss", "gpt_oss_original", "gptq3_act_order", "gptq_dynamic_raw_zeros", "gptqmodel_bnb_int8",
    "gptqmodel_bnb_nf4", "mistral_qscale",
    "mlx_affine3_g64", "mlx_experts", "mlx_nvfp4_global_scale", "modelopt_fp8_blocks", "modelopt_nvfp4_awq",
    "modelopt_nvfp4_experts", "quark_integers",
)  # fmt: skip

every_fixture = pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES.keys())


def _kinds(test: Callable, left_out: Sequence[str]) -> list[str]:
    """All fixtures when there is time, otherwise every second of `KINDS`: of some tests these, of others the rest."""
    names = [name for name in (FIXTURES if THOROUGH else KINDS) if name not in left_out]
    return part_of(names, zlib.crc32(test.__name__.encode()), 2)


def each_kind(*left_out: str) -> Callable[[Callable], Callable]:
    """Parametrizes ``fixture`` with `KINDS`, or with all fixtures when there is time, but for those left out."""

    def decorate(test: Callable) -> Callable:
        names = _kinds(test, left_out)
        return pytest.mark.parametrize("fixture", [FIXTURES[name] for name in names], ids=names)(test)

    return decorate


def each_kind_with(names: str, values: Mapping[str, object], *left_out: str) -> Callable[[Callable], Callable]:
    """Parametrizes ``fixture`` and other names, whose values are dealt out to the kinds; every pair when there is time.

    Args:
        names: separated by commas, as `pytest.mark.parametrize` takes them.
        values: a value for each id, or a tuple where there are several names.
        left_out: fixtures that are not tried.
    """

    def decorate(test: Callable) -> Callable:
        cases = []
        for k, fixture in enumerate(_kinds(test, left_out)):
            for id in part_of(list(values), k % len(values), len(values)):
                more = values[id] if "," in names else (values[id],)
                cases.append(pytest.param(FIXTURES[fixture], *more, id=f"{fixture}-{id}"))
        return pytest.mark.parametrize(f"fixture, {names}", cases)(test)

    return decorate
