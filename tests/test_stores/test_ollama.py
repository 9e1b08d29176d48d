"""ollama:// names: layers of ollama's models, opened where ollama keeps them, and nothing else."""

import hashlib
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from builders.inside import RemoteFiles, ollama

import safeload
import safeload.gguf
from safeload import FormatError, UnsupportedError
from safeload.errors import MissingShardError
from safeload.numpy import save

MEDIA = "application/vnd.ollama.image."
WEIGHTS = {"blk.0.w": np.arange(64, dtype=np.float32).reshape(2, 32)}


class Store:
    """A folder as ollama lays it out: server/manifest and types/model in https://github.com/ollama/ollama."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, content):
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def layer(self, kind, content, **fields):
        return {"mediaType": MEDIA + kind, **self.blob(content), **fields}

    def add(self, place, layers, **fields):
        path = self.folder / "manifests" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        media = "application/vnd.docker.distribution.manifest.v2+json"
        config = {"mediaType": "application/vnd.docker.container.image.v1+json", **self.blob(b"{}")}
        manifest = {"schemaVersion": 2, "mediaType": media, "config": config, "layers": layers, **fields}
        path.write_text(json.dumps(manifest))
        return path

    def path(self, layer):
        return str(self.folder / "blobs" / layer["digest"].replace(":", "-"))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    return Store(tmp_path / "models")


@pytest.fixture
def gguf(tmp_path):
    safeload.gguf.save_file(WEIGHTS, tmp_path / "x.gguf")
    return (tmp_path / "x.gguf").read_bytes()


LIBRARY = "registry.ollama.ai/library"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("ollama://llama3.2", f"{LIBRARY}/llama3.2/latest"),
        ("ollama://llama3.2:1b-q4_K_M", f"{LIBRARY}/llama3.2/1b-q4_K_M"),
        ("OLLAMA://me/model", "registry.ollama.ai/me/model/latest"),
        ("ollama://hf.co/Owner/Model-GGUF:Q4_K_M", "hf.co/Owner/Model-GGUF/Q4_K_M"),
        ("ollama://registry.ollama.ai/library/x:latest", f"{LIBRARY}/x/latest"),
    ],
)
def test_a_name_opens_the_model_layer(url, place, store, gguf):
    layer = store.layer("model", gguf)
    store.add(place, [store.layer("template", b"{{ .Prompt }}"), layer, store.layer("license", b"MIT")])
    with safeload.open(url) as checkpoint:
        assert (checkpoint.format, checkpoint.files, checkpoint.notes) == ("gguf", [store.path(layer)], [])
        np.testing.assert_array_equal(checkpoint["blk.0.w"], WEIGHTS["blk.0.w"])
    np.testing.assert_array_equal(safeload.load(url)["blk.0.w"], WEIGHTS["blk.0.w"])
    assert ollama.parse(ollama.parse(url).url) == ollama.parse(url)


@pytest.mark.parametrize(
    "name",
    ["", "/", "x/", "/x", "a//b", "..", "../x", "a/..", "./x", "x:..", "x:.", "x:", ":x", "a:b:c", "a/b/c/d", "a b",
     "a%2Fb", "a\\b", "C:\\x", "a@b", "me:secret@host/x", "localhost:5000/a/b", "x?y", "x#y", "é", "x\0", "a" * 129],
)  # fmt: skip
def test_what_is_no_name_is_refused(name, store):
    with pytest.raises(UnsupportedError, match=r"expected ollama://\[host/\]\[namespace/\]model\[:tag\]") as caught:
        ollama.find(f"ollama://{name}")
    assert "secret" not in str(caught.value)


def test_adapters_and_projectors_are_notes(store, gguf):
    layers = [store.layer(kind, kind.encode()) for kind in ("adapter", "projector")]
    store.add(f"{LIBRARY}/x/latest", [store.layer("model", gguf), *layers])
    with safeload.open("ollama://x") as checkpoint:
        assert checkpoint.notes == [
            f"adapter in another layer, not opened: {store.path(layers[0])}",
            f"projector in another layer, not opened: {store.path(layers[1])}",
        ]


def test_tensor_layers_are_one_checkpoint(store):
    tensors = {"a": np.ones(3, np.float32), "e.0": np.zeros(2, np.int32), "e.1": np.ones(2, np.int32)}
    layers = [
        store.layer("tensor", save({"a": tensors["a"]}), name="a"),
        store.layer("tensor", save({name: tensors[name] for name in ("e.0", "e.1")}), name="e"),  # a group
        store.layer("json", b"{}", name="config.json"),
    ]
    store.add(f"{LIBRARY}/x/latest", layers)
    with safeload.open("ollama://x") as checkpoint:
        assert (checkpoint.format, len(checkpoint.files)) == ("safetensors", 2)
        assert {name: array.tolist() for name, array in checkpoint.items()} == {
            name: array.tolist() for name, array in tensors.items()
        }
        with pickle.loads(pickle.dumps(checkpoint)) as again:
            assert set(again) == set(tensors)


def test_tensors_that_only_ollama_names_or_decodes_are_refused(store):
    layers = [store.layer("tensor", save({"data": np.full(3, k, np.float32)}), name=f"w{k}") for k in range(2)]
    store.add(f"{LIBRARY}/old/latest", layers)
    with pytest.raises(UnsupportedError, match='ollama://old: the layers of this model name every tensor "data"'):
        safeload.open("ollama://old")
    codes = {"w": np.zeros((2, 4), np.uint32), "w.scale": np.ones((2, 1), np.float16)}
    layer = store.layer("tensor", save(codes, metadata={"quant_type": "int4", "group_size": "32"}), name="w")
    store.add(f"{LIBRARY}/mlx/latest", [layer])
    with pytest.raises(UnsupportedError, match=r"for MLX \('int4'\).*stored=True"):
        safeload.open("ollama://mlx")
    with safeload.open("ollama://mlx", stored=True) as checkpoint:
        assert set(checkpoint) == set(codes)


HEX = "0" * 64


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, "layers must be an array"),
        ({}, "layers must be an array"),
        ([5], "a layer must be an object"),
        ([{}], "a digest must be sha256: and 64"),
        ([{"digest": "sha256:../../../etc/passwd"}], "a digest must be"),
        ([{"digest": f"sha256:{HEX}0"}], "a digest must be"),
        ([{"digest": f"md5:{HEX}"}], "a digest must be"),
        ([{"digest": f"sha256:{HEX}\n"}], "a digest must be"),
        ([{"digest": f"sha256:{HEX}"}], "mediaType must be a string"),
        ([{"digest": f"sha256:{HEX}", "mediaType": "x"}], "size must be a number"),
        ([{"digest": f"sha256:{HEX}", "mediaType": "x", "size": True}], "size must be a number"),
        ([{"digest": f"sha256:{HEX}", "mediaType": "x", "size": -1}], "size must be a number"),
        ([{"digest": f"sha256:{HEX}", "mediaType": f"{MEDIA}model", "size": 5}], "is missing"),
    ],
)
def test_a_malformed_manifest_is_an_error(layers, message, store):
    store.add(f"{LIBRARY}/x/latest", layers)
    with pytest.raises(FormatError, match=message):
        safeload.open("ollama://x")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"layers": [], "layers": []}'])
def test_a_manifest_that_is_no_object_is_an_error(content, store):
    store.add(f"{LIBRARY}/x/latest", []).write_bytes(content)
    with pytest.raises(FormatError):
        safeload.open("ollama://x")


def test_a_model_is_whole_and_single(store, gguf):
    layer = store.layer("model", gguf)
    store.add(f"{LIBRARY}/none/latest", [store.layer("template", b"x")])
    store.add(f"{LIBRARY}/two/latest", [layer, store.layer("model", b"GGUF")])
    store.add(f"{LIBRARY}/both/latest", [layer, store.layer("tensor", save({}), name="x")])
    store.add(f"{LIBRARY}/cut/latest", [{**layer, "size": len(gguf) + 1}])
    for name, message in {"none": "no layer with weights", "two": "2 model layers", "both": "1 tensor layer"}.items():
        with pytest.raises(UnsupportedError, match=message):
            safeload.open(f"ollama://{name}")
    with pytest.raises(FormatError, match=f"must have {len(gguf) + 1} bytes as its manifest says, but has {len(gguf)}"):
        safeload.open("ollama://cut")
    store.add(f"{LIBRARY}/gone/latest", [{**layer, "digest": f"sha256:{HEX}"}])
    with pytest.raises(MissingShardError, match="a layer of ollama://gone is missing"):
        safeload.open("ollama://gone")


def test_a_missing_model_is_named_with_those_that_are_there(store, gguf):
    with pytest.raises(FileNotFoundError, match="ollama has no models in"):
        safeload.open("ollama://x")
    store.add(f"{LIBRARY}/y/7b", [store.layer("model", gguf)])
    with pytest.raises(FileNotFoundError, match="No such model: ollama://x; ollama has ollama://y:7b"):
        safeload.open("ollama://x")


def test_a_name_is_never_taken_from_a_file(store, gguf, tmp_path):
    layer = store.layer("model", gguf)
    store.add(f"{LIBRARY}/x/latest", [layer])
    for attempt in (
        lambda: safeload.open(["ollama://x"]),
        lambda: RemoteFiles({}).open("ollama://x"),
        lambda: safeload.open("filecache::ollama://x", storage_options={}),
        lambda: safeload.convert(WEIGHTS, "ollama://new"),
    ):
        with pytest.raises(UnsupportedError, match=r"ollama:// name stands alone|fsspec does not know the scheme"):
            attempt()
    plan = safeload.plan_convert("ollama://x", tmp_path / "out", max_shard_size="1GB")
    text = json.dumps(plan.to_json()) if hasattr(plan, "to_json") else repr(pickle.dumps(plan))
    assert "ollama://" not in text
    assert layer["digest"].partition(":")[2] in text


def test_commands_and_workers_take_names(store, gguf, tmp_path):
    store.add(f"{LIBRARY}/x/latest", [store.layer("model", gguf)])
    assert safeload.check("ollama://x").source == "ollama://x"
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        safeload.convert("ollama://x", tmp_path / "out", max_shard_size="1GB", executor=pool)
    np.testing.assert_array_equal(safeload.load(tmp_path / "out")["blk.0.w"], WEIGHTS["blk.0.w"])


def test_models_are_looked_for_where_ollama_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", ' "/a b" ')
    assert ollama.folders() == ["/a b"]
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.setattr(ollama.sys, "platform", "linux")
    own = str(tmp_path / ".ollama" / "models")
    assert ollama.folders()[:2] == [own, "/usr/share/ollama/.ollama/models"]
    monkeypatch.setattr(ollama.sys, "platform", "darwin")
    assert ollama.folders() == [own]


def test_a_file_of_this_name_in_a_store_is_a_file():
    fsspec = pytest.importorskip("fsspec")
    import safeload.remote

    filesystem = fsspec.filesystem("memory")
    with filesystem.open("/ollama", "wb") as file:
        file.write(save({"a": np.ones(3, np.float32)}))
    with safeload.open(safeload.remote.of_fsspec(filesystem, "ollama")) as checkpoint:
        assert list(checkpoint) == ["a"]
