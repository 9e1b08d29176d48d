"""What people write with safeload.jax. Type checkers that find JAX accept every line; tests run none of it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import safeload
from safeload import jax as arrays
from safeload.jax import load_file


def in_jax(path: Path, place: NamedSharding) -> bytes:
    weights: dict[str, jax.Array] = load_file(path, backend="pread", dtype=jnp.bfloat16, sharding=place, names=["w"])
    weights = {**weights, **arrays.load_checkpoint([path], dtype=np.float32)}
    weights |= arrays.load_checkpoint(path, sharding={"w": place, "v": None}, only="model.*")

    def choose(name: str, x: jax.ShapeDtypeStruct) -> NamedSharding | None:
        return place if x.ndim == 2 else None

    weights |= arrays.load_checkpoint(path, sharding=choose)
    with safeload.safe_open(path, framework="flax") as file:
        weights["rows"] = file.get_slice("w")[:2]
    arrays.save_file(weights, path, {"format": "flax"}, overwrite=True)
    tree = safeload.nest(weights)
    print(jax.tree.map(jnp.shape, tree))
    return arrays.save(arrays.load(path.read_bytes()))
