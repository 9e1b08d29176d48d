"""Streams of layers: each layer whole and once, in the order of the first tensors, in the memory of a layer."""

import copy
import gc
import io
import json
import pickle
import re
import threading

import numpy as np
import pytest
from builders.quantized import each_kind
from builders.random import rng
from builders.remote import Served

import safeload
import safeload.numpy
from safeload.errors import FormatError, TensorNotFoundError


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0"),
        ("model.layers.10.mlp.experts.3.w1.weight", "model.layers.10"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("blk.3.attn_q.weight", "blk.3"),
        ("encoder.block.2.layer.0.SelfAttention.q.weight", "encoder.block.2"),
        ("double_blocks.7.img_attn.qkv.weight", "double_blocks.7"),
        ("params/layers_4/kernel", "params/layers_4"),
        ("model.layers.0", "model.layers.0"),
        ("model.embed_tokens.weight", ""),
        ("lm_head.weight", ""),
        ("model.layers.x.w", ""),
        ("model.layers.00.w", ""),
        ("conv1.weight", ""),
        ("", ""),
    ],
)
def test_the_layer_of_a_name(name, layer):
    stored = safeload.numpy.save({name: np.ones(2, np.float32)})
    with safeload.open(io.BytesIO(stored)) as checkpoint:
        assert [(one, list(tensors)) for one, tensors in checkpoint.stream(by_layer=True)] == [(layer, [name])]


def layer_of(name):
    """The layer of a name of `model`, or of a fixture with layers of that spelling."""
    found = re.match(r"(?:.*?\.)?(?:layers|blk|double_blocks)\.\d+(?=\.)", name)
    return found[0] if found else ""


def model(layers=4, width=50):
    """Weights with a layer's tensors far apart, as some writers sort them."""
    names = ["embed", *(f"model.layers.{k}.a" for k in range(layers)), "norm"]
    names += [f"model.layers.{k}.b" for k in reversed(range(layers))]
    return {name: rng.standard_normal((width, k + 1)).astype(np.float32) for k, name in enumerate(names)}


@pytest.fixture
def folder(tmp_path):
    """Shards of which each holds a part of every layer."""
    weights, where = model(), {}
    for k, part in enumerate((lambda n: n.endswith("b"), lambda n: not n.endswith("b"))):
        shard = {name: array for name, array in weights.items() if part(name)}
        file = f"model-{k + 1:05}-of-00002.safetensors"
        safeload.numpy.save_file(shard, tmp_path / file)
        where.update(dict.fromkeys(shard, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tmp_path


def grouped(weights):
    groups = {}
    for name, array in weights.items():
        groups.setdefault(layer_of(name), {})[name] = array
    return groups


def check(layers, weights):
    """Whether pairs are all layers of the weights, each whole and once."""
    layers = list(layers)
    assert len(layers) == len(dict(layers))
    expected = grouped(weights)
    assert dict(layers).keys() == expected.keys()
    for layer, tensors in layers:
        assert tensors.keys() == expected[layer].keys()
        assert all(np.array_equal(tensors[name], array) for name, array in expected[layer].items())
    return [layer for layer, _ in layers]


def test_layers_are_whole_across_shards_in_the_order_of_their_first_tensors(folder):
    with safeload.open(folder) as checkpoint:
        weights = checkpoint.load()
        order = check(checkpoint.stream(by_layer=True), weights)
        first = [layer_of(name) for name, _ in checkpoint.stream()]
        assert order == list(dict.fromkeys(first))
        given = ["model.layers.2.b", "norm", "model.layers.0.a", "model.layers.2.a"]
        assert check(
            checkpoint.stream(given, by_layer=True, order="given"), {name: weights[name] for name in given}
        ) == ["model.layers.2", "", "model.layers.0"]


def test_a_selection_has_its_layers_alone(folder):
    with safeload.open(folder) as checkpoint:
        weights = checkpoint.load()
        chosen = {name: array for name, array in weights.items() if name.startswith("model.layers.1")}
        assert check(checkpoint.stream(only="model.layers.1.*", by_layer=True), chosen) == ["model.layers.1"]
        inner = {name: array for name, array in weights.items() if "layers" in name}
        assert "" not in check(checkpoint.stream(drop=["norm", "embed"], by_layer=True), inner)
        assert list(checkpoint.stream([], by_layer=True)) == []
        with pytest.raises(TensorNotFoundError):
            checkpoint.stream(["none"], by_layer=True)


def test_layers_are_converted_and_fill_arrays(folder):
    with safeload.open(folder) as checkpoint:
        expected = checkpoint.load(dtype="float16")
        check(checkpoint.stream(dtype="float16", by_layer=True), expected)
        out = {name: np.empty_like(array) for name, array in checkpoint.load().items()}
        for _, tensors in checkpoint.stream(out=out, by_layer=True):
            assert all(out[name] is array for name, array in tensors.items())
        check(grouped(out).items(), checkpoint.load())


@pytest.mark.parametrize("ahead", [1, 3000, "1GiB"])
def test_any_limit_on_reading_ahead_gives_whole_layers(ahead, folder):
    with safeload.open(folder) as checkpoint:
        check(checkpoint.stream(by_layer=True, ahead=ahead), checkpoint.load())


@each_kind()
def test_layers_of_quantized_checkpoints(fixture):
    with safeload.open(fixture.path) as checkpoint:
        stored, layers = dict(checkpoint.stream()), dict(checkpoint.stream(by_layer=True))
        assert {name for tensors in layers.values() for name in tensors} == set(stored)
        for layer, tensors in layers.items():
            assert {layer_of(name) for name in tensors} == {layer}
            for name, value in tensors.items():
                plain = isinstance(value, np.ndarray)
                assert value.tobytes() == stored[name].tobytes() if plain else value == stored[name], name


def test_layers_of_a_remote_folder_take_as_many_requests_as_its_tensors(folder):
    served = Served.folder(folder)
    with safeload.open(served.at("mem://model")) as checkpoint, safeload.open(folder) as local:
        served.requests.clear()
        check(checkpoint.stream(by_layer=True), local.load())
        assert len(served.requests) <= 2 * len(local)


def test_a_layer_at_a_time_is_in_memory(tmp_path):
    import tracemalloc

    weights = {f"layers.{k}.{part}": np.zeros((1000, 256), np.float32) for part in "ab" for k in range(20)}
    safeload.numpy.save_file(weights, tmp_path / "m.safetensors")
    with safeload.open(tmp_path / "m.safetensors") as checkpoint:
        tracemalloc.start()
        try:
            for _, tensors in checkpoint.stream(by_layer=True, ahead="1MiB"):
                del tensors
            assert tracemalloc.get_traced_memory()[1] < 8 * 1_024_000
        finally:
            tracemalloc.stop()


def test_an_error_comes_in_its_turn_and_ends_the_stream(tmp_path):
    weights = {f"layers.{k}.w": np.ones((100_000, 3), np.float32) for k in range(4)}
    path = tmp_path / "m.safetensors"
    safeload.numpy.save_file(weights, path)
    with safeload.open(path) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda info: info.offset)
        with path.open("r+b") as file:
            file.truncate(last.offset + 10)
        stream, layers = checkpoint.stream(by_layer=True), []
        with pytest.raises(FormatError):
            layers.extend(layer for layer, _ in stream)
        assert layers == ["layers.0", "layers.1", "layers.2"]
        assert list(stream) == []


def test_a_stream_says_what_is_left_and_stays_in_its_process(folder):
    with safeload.open(folder) as checkpoint:
        stream = checkpoint.stream(by_layer=True)
        assert repr(stream) == "<LayerStream: 5 of 5 layers left>"
        next(stream)
        assert stream.__length_hint__() == 4
        for function in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot copy or pickle a LayerStream"):
                function(stream)
        stream.close()
        assert list(stream) == []
        del stream
        gc.collect()
        with pytest.raises(ValueError, match='order="ready" yields single tensors'):
            checkpoint.stream(by_layer=True, order="ready")


def test_threads_share_a_stream_of_layers(folder):
    with safeload.open(folder) as checkpoint:
        stream, layers = checkpoint.stream(by_layer=True), []
        threads = [threading.Thread(target=lambda: layers.extend(stream)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(layers, checkpoint.load())


def test_progress_counts_the_bytes_of_layers(folder):
    done = []
    with safeload.open(folder) as checkpoint:
        for _ in checkpoint.stream(by_layer=True, progress=lambda now, total: done.append((now, total))):
            pass
        assert done[-1] == (checkpoint.nbytes, checkpoint.nbytes)
