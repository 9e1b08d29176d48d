"""Let Keras 3 write the fixtures: python -m make FOLDER, with keras, jax, h5py and safetensors installed.

``NAME.safetensors`` holds what Keras has in memory, under the names of the file: for Keras 3 by the paths that its own
store gives the variables, for the legacy files by ``layer_names`` and ``weight_names``.
"""

import os
import sys
import typing
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import h5py
import keras
import numpy as np
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from safetensors.numpy import save_file


class Recorder(saving_lib.H5IOStore):
    """Keras' store, which also keeps what it writes."""

    written: typing.ClassVar = {}

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        name = f"{self._h5_entry_group.name}/{key}".strip("/").replace("/", ".")
        self.written[name] = np.asarray(keras.ops.convert_to_numpy(value))


def model(mixed):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, name="first", activation="relu")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(0.5, seed=3)(x)
    outputs = keras.layers.Dense(3, name="last", dtype="bfloat16" if mixed else "float16")(x)
    made = keras.Model(inputs, outputs, name="m")
    made.compile("adam", "mse")
    made.optimizer.build(made.trainable_variables)
    numbers = np.random.default_rng(1)
    for variable in made.variables + made.optimizer.variables:
        if "float" in variable.dtype:
            variable.assign(keras.ops.cast(numbers.standard_normal(variable.shape), variable.dtype))
    return made


def legacy_names(group, prefix):
    """Names and what they stand for, in the order of the lists."""
    for layer in legacy_h5_format.load_attributes_from_hdf5_group(group, "layer_names"):
        for weight in legacy_h5_format.load_attributes_from_hdf5_group(group[layer], "weight_names"):
            yield f"{prefix}{layer}.{weight}".replace("/", "."), np.asarray(group[layer][weight])


def main(folder):
    keras.utils.set_random_seed(1)
    mixed, plain = model(True), model(False)
    saving_lib.H5IOStore, original = Recorder, saving_lib.H5IOStore
    mixed.save_weights(folder / "model.weights.h5")
    save_file(Recorder.written, folder / "model.weights.h5.safetensors")
    Recorder.written.clear()
    mixed.save(folder / "model.keras")
    save_file(Recorder.written, folder / "model.keras.safetensors")
    saving_lib.H5IOStore = original
    mixed.save_weights(folder / "sharded.weights.json", max_shard_size=200 / 1024**3)
    (folder / "sharded.weights.json.safetensors").write_bytes((folder / "model.weights.h5.safetensors").read_bytes())
    plain.save(folder / "legacy.h5")
    with h5py.File(folder / "legacy_weights.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, plain)
    # The layers hold what was written: each value is also compared with the model itself.
    for name, prefix in (("legacy.h5", "model_weights."), ("legacy_weights.h5", "")):
        with h5py.File(folder / name) as file:
            group = file[prefix.rstrip(".")] if prefix else file
            arrays = dict(legacy_names(group, prefix))
            for layer in plain.layers:
                for variable in layer.weights:
                    if variable.dtype != "uint32":
                        held = np.asarray(keras.ops.convert_to_numpy(variable))
                        assert any(held.tobytes() == array.tobytes() for array in arrays.values()), variable.path
            if "optimizer_weights" in file:
                for weight in legacy_h5_format.load_attributes_from_hdf5_group(
                    file["optimizer_weights"], "weight_names"
                ):
                    arrays[f"optimizer_weights.{weight}".replace("/", ".")] = np.asarray(
                        file["optimizer_weights"][weight]
                    )
        save_file(arrays, folder / f"{name}.safetensors")


main(Path(sys.argv[1]))
