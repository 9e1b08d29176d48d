"""Make the fixtures of Flax again, with flax's own writer.

    pip install flax==0.12.8 optax safetensors==0.8.0
    python make.py [FOLDER]

``<fixture>.safetensors`` holds what flax restores, under dotted names.
"""

import json
import sys
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import linen, serialization
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
DTYPES = (
    *(
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ),
    *("complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm()(linen.Embed(7, 6, param_dtype=jnp.bfloat16)(x))
        return linen.Dense(5)(linen.relu(linen.Dense(4)(x)))


def expect(path, data):
    """Write what flax restores from a file."""
    arrays = {}
    for name, value in flatten_dict(serialization.msgpack_restore(data), sep=".").items():
        if isinstance(value, (np.ndarray, np.generic)):
            arrays[name] = np.array(value)
    save_file(arrays, str(path.with_suffix(".safetensors")))


def write(name, data):
    path = FOLDER / name
    path.write_bytes(data)
    expect(path, data)


def train_state():
    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def main():
    rng = np.random.default_rng(0)
    state = train_state()
    write("train_state.msgpack", serialization.to_bytes(state))
    tree = {name: (rng.standard_normal((2, 3)) * 3).astype(np.dtype(getattr(ml_dtypes, name, name))) for name in DTYPES}
    tree |= {f"scalar_{name}": value.reshape(-1)[0] for name, value in tree.items()}
    tree |= {"empty": np.zeros((2, 0), np.float32), "zero_d": np.array(2.5), "list": [np.arange(3), {"a": np.ones(1)}]}
    tree |= {"step": 3, "rate": 0.5, "name": "bert", "none": None, "complex": 1 + 2j, "raw": b"\x00\xff", "yes": True}
    write("leaves.msgpack", serialization.to_bytes(tree))
    serialization.MAX_CHUNK_SIZE = 64
    tree = {"params": {"big": rng.standard_normal((7, 5)).astype(np.float32), "small": np.arange(3, dtype=np.int8)}}
    tree["params"]["bf16"] = rng.standard_normal(41).astype(ml_dtypes.bfloat16)
    write("chunked.msgpack", serialization.msgpack_serialize(tree))
    serialization.MAX_CHUNK_SIZE = 2**30
    # As transformers' flax_shard_checkpoint: names with slashes in the index.
    folder = FOLDER / "sharded"
    folder.mkdir(exist_ok=True)
    weights = flatten_dict({"params": serialization.to_state_dict(state.params)}, sep="/")
    names, weight_map = sorted(weights), {}
    for k in range(2):
        shard = f"flax_model-{k + 1:05d}-of-00002.msgpack"
        part = {name: weights[name] for name in names[k::2]}
        (folder / shard).write_bytes(serialization.to_bytes(unflatten_dict(part, sep="/")))
        weight_map |= dict.fromkeys(part, shard)
    size = sum(np.asarray(array).nbytes for array in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text('{"model_type": "bert"}\n')
    expect(FOLDER / "sharded.msgpack", serialization.to_bytes(unflatten_dict(weights, sep="/")))
    print(flax.__version__)


if __name__ == "__main__":
    main()
