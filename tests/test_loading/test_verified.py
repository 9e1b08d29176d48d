"""``verify=`` of load, open, stream and convert: only verified bytes are handed out, and every other file is named."""

import hashlib
import json
import os
import pickle
import shutil
import sys
import tarfile

import numpy as np
import pytest
from builders import format_files, inside
from builders.http_server import Server
from builders.inside import main, registry, verified
from builders.paths import DATA

import safeload
from safeload import FormatError, VerificationError
from safeload.numpy import save, save_file

links = pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege on Windows")

WEIGHTS = {f"w{k}": np.arange(600, dtype=np.float32) + k for k in range(4)}


def manifest(path, target, **changes):
    """Write the manifest of a folder or file, and return its path."""
    found = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    root, files = (path.parent if path.is_file() else path), {}
    for one in found:
        data = one.read_bytes()
        files[one.relative_to(root).as_posix()] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content = {"safeload_manifest": 1, "tensors": {}, "files": {**files, **changes}}
    target.write_text(json.dumps(content))
    return target


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    safeload.convert(WEIGHTS, folder, max_shard_size=5000)
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


@pytest.fixture
def listed(model, tmp_path):
    return manifest(model, tmp_path / "list.json")


def same(arrays, expected=WEIGHTS):
    assert list(arrays) == list(expected)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name])
    return True


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# ---- what is handed out ----


@pytest.mark.parametrize("backend", ["mmap", "pread", "direct"])
def test_a_verified_load_is_the_load(model, listed, backend):
    assert same(safeload.load(model, verify=listed, backend=backend))
    assert same(safeload.load(str(model / "model.safetensors.index.json"), verify=str(listed)))
    assert list(safeload.load(model, verify=listed, only="w1")) == ["w1"]
    converted = safeload.load(model, verify=listed, dtype="float64", threads=2)
    assert converted["w3"].dtype == np.float64
    assert same(converted)
    out = {name: np.empty_like(array) for name, array in WEIGHTS.items()}
    assert same(safeload.load(model, verify=listed, out=out))


def test_false_verifies_nothing(model):
    assert same(safeload.load(model, verify=False))


def test_the_arrays_are_private_and_writable(model, listed):
    with safeload.open(model, verify=listed) as checkpoint:
        first = checkpoint.load()
        first["w0"][:] = 0
        assert same(checkpoint.load())  # read and hashed again
        assert checkpoint.last_load.backend == "pread"
        checkpoint["w1"][:] = 7
        assert checkpoint["w1"][0] == 7  # the same memory for each access
        assert same(checkpoint.load())


def test_every_way_to_read_gives_verified_values(model, listed):
    with safeload.open(model, verify=listed) as checkpoint:
        assert same(dict(checkpoint.stream()))
        assert dict(checkpoint.stream(by_layer=True)).keys() == {""}
        np.testing.assert_array_equal(checkpoint.take("w2", [3, 1]), WEIGHTS["w2"][[3, 1]])
        np.testing.assert_array_equal(checkpoint.get_slice("w2")[5:9], WEIGHTS["w2"][5:9])
        again = pickle.loads(pickle.dumps(checkpoint))
    with again:
        assert same(again.load())


@pytest.mark.parametrize("name", sorted(registry.BY_NAME.keys() - {"moon", "deepspeed", "fsdp"}))
def test_every_format_is_verified(name, tmp_path):
    row = registry.BY_NAME[name]
    path = tmp_path / "one" / f"weights{(row.suffixes or ('.bin',))[0] if row.writes else '.bin'}"
    path.parent.mkdir()
    weights = {"w": np.arange(64, dtype=np.float32).reshape(2, 32)}
    if name == "dcp":
        path = path.parent / ".metadata"
    format_files.make(row, weights, path)
    source = path.parent if name == "dcp" else path
    plain, listed = safeload.load(source), manifest(path.parent, tmp_path / "list.json")
    arrays = safeload.load(source, verify=listed)
    assert list(arrays) == list(plain)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, plain[key])
    for file in [file for file in path.parent.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        flip(file)
        with pytest.raises(VerificationError, match=rf"{file.name}: the file differs"):
            safeload.load(source, verify=listed)
        file.write_bytes(content)


def test_files_in_an_archive_are_verified(tmp_path):
    path = tmp_path / "model.nemo"
    (tmp_path / "model.safetensors").write_bytes(save(WEIGHTS))
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "model.safetensors", "model.safetensors")
    listed = manifest(path, tmp_path / "list.json")
    assert same(safeload.load(path, verify=listed))
    for at in (0, 600, -1, path.stat().st_size // 2):
        flip(path, at)
        with pytest.raises(VerificationError, match=r"model\.nemo: the file differs"):
            safeload.open(path, verify=listed)
        flip(path, at)


@pytest.mark.parametrize("place", ["dcp/plain_2", "deepspeed/zero2_1", "fsdp/line_2"])
def test_folders_of_training_checkpoints_are_verified(place, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(DATA / place, folder)
    listed = manifest(folder, tmp_path / "list.json")
    plain = safeload.load(folder)
    arrays = safeload.load(folder, verify=listed)
    assert all(np.array_equal(arrays[name], plain[name]) for name in plain)
    files = (path for path in folder.rglob("*") if path.is_file() and not path.match("optim_world_size_*"))  # not read
    sizes = {path: path.stat().st_size for path in files}
    for path in sorted(sizes, key=sizes.get)[-3:]:
        for at in (0, sizes[path] // 4, sizes[path] // 2, -1):
            flip(path, at)
            with pytest.raises(VerificationError, match=path.name):
                safeload.load(folder, verify=listed)
            with pytest.raises(VerificationError):
                list(safeload.open(folder, verify=listed).values())
            flip(path, at)


def test_quantized_checkpoints_are_verified(tmp_path):
    folder = DATA / "quantized" / "modelopt_nvfp4"
    listed = manifest(folder, tmp_path / "list.json")
    plain, arrays = (safeload.load(folder, dtype="float32", verify=verify) for verify in (None, listed))
    assert all(np.array_equal(arrays[name], plain[name]) for name in plain)
    packed = safeload.load(folder, verify=listed)
    assert all(
        np.array_equal(packed[name].dequantize(), plain[name]) for name in packed if hasattr(packed[name], "parts")
    )


def count_hashes(monkeypatch):
    """A list with an item for each hash of a file or of a part of it that is begun."""
    count, new = [], hashlib.new
    monkeypatch.setattr(hashlib, "new", lambda *algorithm: count.append(algorithm) or new(*algorithm))
    return count


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_memory_that_was_dropped_is_read_and_hashed_again(model, listed, kept, monkeypatch):
    monkeypatch.setattr(inside.verified, "_KEPT", kept)
    monkeypatch.setattr(inside.verified, "_FEWEST", 1)
    with safeload.open(model, verify=listed) as checkpoint:
        for _ in range(2):
            assert same(dict(checkpoint.stream(ahead=1)))
        flip(model / checkpoint.tensors["w0"].file.rpartition(os.sep)[2])
        if kept:
            assert same(dict(checkpoint.stream()))
        else:
            with pytest.raises(VerificationError, match="differs"):
                dict(checkpoint.stream())


def test_files_that_are_used_in_turn_are_not_hashed_each_time(model, listed, monkeypatch):
    count = count_hashes(monkeypatch)
    monkeypatch.setattr(inside.verified, "_KEPT", 64)
    monkeypatch.setattr(inside.verified, "_FEWEST", 1)
    with safeload.open(model, verify=listed) as checkpoint:
        for at in range(100):
            for name in WEIGHTS:
                assert checkpoint.get_slice(name)[at] == WEIGHTS[name][at]
    assert 0 < len(count) < 40


def test_two_threads_get_memory_of_their_own(model, listed, monkeypatch):
    """While one has the memory that its views share, the other gets copies."""
    inner = []
    forget = verified.VerifiedStore.forget

    def and_load(store):
        if not inner:  # views exist, and the memory is still lent
            inner.append(None)
            inner.append(checkpoint.load())
        forget(store)

    monkeypatch.setattr(verified.VerifiedStore, "forget", and_load)
    with safeload.open(model, verify=listed) as checkpoint:
        outer = checkpoint.load()
        outer["w0"][:] = -1
        assert same(inner[1])
        inner[1]["w1"][:] = -1
        assert outer["w1"][0] == WEIGHTS["w1"][0]
        assert same(checkpoint.load())


def test_a_part_of_a_large_file_does_not_keep_it_in_memory(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"small": np.ones(4, np.float32), "large": np.zeros(1 << 16, np.float32)}, path)
    small = safeload.load(path, only="small", verify=manifest(path, tmp_path / "list.json"))["small"]
    assert small.base is None or small.base.nbytes < 1 << 12


def test_one_read_serves_views_and_copies(tmp_path, monkeypatch):
    """Unaligned tensors are copied from the memory that the views share: the file is read once."""
    path = tmp_path / "m.safetensors"
    header = {
        "a": {"dtype": "F32", "shape": [4000], "data_offsets": [0, 16000]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [16000, 16001]},
        "c": {"dtype": "F32", "shape": [2], "data_offsets": [16001, 16009]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + np.arange(4000, dtype="<f4").tobytes() + b"\1" + bytes(8))
    count = count_hashes(monkeypatch)
    arrays = safeload.load(path, verify=manifest(path, tmp_path / "list.json"))
    assert arrays["a"][3999] == 3999
    assert arrays["c"].tolist() == [0, 0]
    assert len(count) == 1


# ---- faults ----


def test_one_flipped_byte_in_any_file_is_named(model, listed):
    for path in sorted(model.iterdir()):
        content = path.read_bytes()
        for at in (0, len(content) // 2, -1):
            flip(path, at)
            with pytest.raises(VerificationError, match=rf"{path.name}: the file differs from .*list.json") as caught:
                safeload.load(model, verify=listed)
            assert caught.value.path == str(path)
            path.write_bytes(content)
    assert same(safeload.load(model, verify=listed))


def test_only_hashes_whole_files(model, listed):
    path = sorted(model.glob("*.safetensors"))[0]
    with safeload.open(path) as checkpoint:
        first, *_, last = checkpoint
    assert first != last
    flip(path)  # a byte of the last tensor
    with pytest.raises(VerificationError, match=path.name):
        safeload.load(model, verify=listed, only=first)


def test_a_stream_yields_what_it_has_verified(tmp_path):
    """The files before the bad one, in full, then the error. Files of this size are not hashed when they are opened."""
    weights = {f"w{k}": np.full(1 << 16, k, np.float32) for k in range(4)}
    safeload.convert(weights, tmp_path / "model", max_shard_size="600KB")
    listed = manifest(tmp_path / "model", tmp_path / "list.json")
    first, last = sorted((tmp_path / "model").glob("*.safetensors"))
    flip(last)
    with safeload.open(tmp_path / "model", verify=listed) as checkpoint:
        stream = checkpoint.stream(ahead=1)
        with safeload.open(first) as good:
            for name in good:
                yielded, array = next(stream)
                assert yielded == name
                np.testing.assert_array_equal(array, weights[name])
        with pytest.raises(VerificationError, match=last.name):
            next(stream)


@pytest.mark.parametrize("size", ["cut", "longer", "empty"])
def test_a_file_of_another_size_is_named(model, listed, size):
    path = next(model.glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-1], "longer": content + b"\0", "empty": b""}[size])
    with pytest.raises(VerificationError, match=rf"{path.name}: the file has [\d,]+ bytes, but {len(content):,} in"):
        safeload.load(model, verify=listed)


def test_a_consumed_file_must_be_listed(model, listed):
    (model / "hf_quant_config.json").write_text("{}")
    (model / "unrelated.txt").write_text("x")
    manifest(model, listed)
    content = json.loads(listed.read_text())
    for name in ("config.json", "model.safetensors.index.json", next(model.glob("*.safetensors")).name):
        files = {key: entry for key, entry in content["files"].items() if key != name}
        listed.write_text(json.dumps({**content, "files": files}))
        with pytest.raises(VerificationError, match=rf"{name}: .*list.json does not cover this file"):
            safeload.load(model, verify=listed)


def test_a_listed_configuration_must_be_there(model, listed):
    """Without it, values could be read differently."""
    os.remove(model / "config.json")
    with pytest.raises(VerificationError, match=r"config.json: the file is missing, but .*list.json lists it"):
        safeload.load(model, verify=listed)


def test_a_missing_shard_is_named(model, listed):
    path = next(model.glob("*.safetensors"))
    path.unlink()
    with pytest.raises(VerificationError, match=rf"{path.name}: the file is missing"):
        safeload.load(model, verify=listed)


def test_a_weight_file_that_was_added_is_not_read(model, listed):
    (model / "model.safetensors").write_bytes(save({"w0": np.zeros(600, np.float32)}))
    with pytest.raises(VerificationError, match=r"model.safetensors: .*does not cover"):  # it comes before the index
        safeload.load(model, verify=listed)
    os.rename(model / "model.safetensors.index.json", model / "x.txt")
    with pytest.raises(VerificationError, match=r"model.safetensors: .*does not cover"):
        safeload.load(model, verify=listed)


def test_a_file_in_another_case_is_not_covered(model, listed):
    content = json.loads(listed.read_text())
    content["files"]["CONFIG.json"] = content["files"].pop("config.json")
    listed.write_text(json.dumps(content))
    with pytest.raises(VerificationError, match=r"config.json: .*does not cover"):
        safeload.load(model, verify=listed)


# ---- files that change ----


def test_a_file_that_changes_after_it_was_hashed_changes_no_tensor(model, listed, monkeypatch):
    verify = verified.VerifiedStore.verify

    def and_change(store, **options):
        verify(store, **options)
        for path in model.glob("*.safetensors"):
            path.write_bytes(bytes(path.stat().st_size))  # in place: a mapping would show it

    copy = {path: path.read_bytes() for path in model.glob("*.safetensors")}
    with safeload.open(model, verify=listed) as checkpoint:
        for name in WEIGHTS:
            for path, content in copy.items():
                path.write_bytes(content)
            monkeypatch.setattr(verified.VerifiedStore, "verify", and_change)
            np.testing.assert_array_equal(checkpoint.load([name])[name], WEIGHTS[name])
            monkeypatch.undo()


def test_a_header_that_was_read_is_the_header_that_is_hashed(tmp_path):
    """And a second try cannot succeed with tensors of the first header."""
    path = tmp_path / "m.safetensors"
    good = save({"a": np.zeros(1 << 16, np.float32), "b": np.ones(1 << 16, np.float32)})
    evil = good.replace(b'"a"', b'"X"').replace(b'"b"', b'"a"').replace(b'"X"', b'"b"')
    assert len(evil) == len(good)
    path.write_bytes(good)
    listed = manifest(path, tmp_path / "list.json")
    path.write_bytes(evil)
    with safeload.open(path, verify=listed) as checkpoint:
        path.write_bytes(good)
        for _ in range(2):
            with pytest.raises(VerificationError, match="differs"):
                checkpoint.load()


@links
def test_a_symbolic_link_that_was_swapped_is_found(model, listed, tmp_path):
    path = next(model.glob("*.safetensors"))
    shutil.move(path, tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    assert same(safeload.load(model, verify=listed))
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(VerificationError, match=path.name):
        safeload.load(model, verify=listed)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_in_place_of_a_file_does_not_hang(model, listed):
    os.remove(model / "config.json")
    os.mkfifo(model / "config.json")
    with pytest.raises(FormatError, match="not a regular file"):
        safeload.load(model, verify=listed)


# ---- what to verify against ----


def test_true_uses_the_manifest_beside_the_files(model, tmp_path):
    manifest(model, model / "x.sha256.json")
    assert same(safeload.load(model, verify=True))
    assert list(safeload.load(next(model.glob("*.safetensors")), verify=True))
    manifest(model, model / "y.json")
    with pytest.raises(VerificationError, match=r"2 manifests beside it: 'x.sha256.json', 'y.json'; pass one"):
        safeload.load(model, verify=True)


def test_there_must_be_something_to_verify_against(model):
    with pytest.raises(VerificationError, match="nothing to verify against"):
        safeload.load(model, verify=True)
    with pytest.raises(VerificationError, match="nothing to verify against"):
        safeload.load(next(model.glob("*.safetensors")), verify=True)
    with pytest.raises(FileNotFoundError):
        safeload.load(model, verify=model / "missing.json")


def test_a_signature_without_a_key_proves_nothing(model):
    (model / "model.sig").write_text('{"dsseEnvelope": {}}')
    for verify in (True, model / "model.sig", safeload.Signature(model / "model.sig")):
        with pytest.raises(VerificationError, match="without a key or certificate proves nothing"):
            safeload.load(model, verify=verify)


@pytest.mark.parametrize(
    "content",
    [
        '{"weight_map": {"w": "a"}}',
        "{}",
        "[]",
        "",
        '"dsseEnvelope"',
        "e3b0c44298fc1c14  model.safetensors\n",
        "{",
        "\0\x80",
    ],
)
def test_other_files_are_neither_a_manifest_nor_a_signature(content, model, tmp_path, capsys):
    path = tmp_path / "w.json"
    path.write_text(content)
    neither = "w.json: neither a manifest, as `safeload verify PATH --write FILE` writes it .* nor an OpenSSF model"
    for use in (lambda: safeload.load(model, verify=path), lambda: safeload.verify(model, path)):
        with pytest.raises(VerificationError, match=neither):
            use()
    assert main(["verify", str(model), "--against", str(path)]) == 2
    assert "neither a manifest" in capsys.readouterr().err


def test_a_manifest_with_keys_in_another_order_is_a_manifest(model, listed):
    listed.write_text(json.dumps(json.loads(listed.read_text()), sort_keys=True))
    assert not listed.read_text().startswith('{"safeload_manifest"')
    assert safeload.verify(model, listed).ok


def test_a_manifest_of_tensors_alone_is_refused(model, tmp_path):
    old = tmp_path / "old.json"
    old.write_text('{"safeload_manifest": 1, "tensors": {}}')
    with pytest.raises(VerificationError, match="lists tensors, but no files"):
        safeload.load(model, verify=old)


def test_a_manifest_above_the_model_names_files_from_there(model, tmp_path):
    listed = manifest(tmp_path, tmp_path / "list.json")
    assert "model/config.json" in json.loads(listed.read_text())["files"]
    assert same(safeload.load(model, verify=listed))
    flip(model / "config.json")
    with pytest.raises(VerificationError, match=r"config.json: the file differs"):
        safeload.load(model, verify=listed)


@pytest.mark.parametrize("verify", [3, b"x", ["list.json"]])
def test_other_things_are_refused(model, verify):
    with pytest.raises(TypeError, match="verify must be True, a path or a safeload"):
        safeload.load(model, verify=verify)


def test_adapters_are_not_covered(model, listed):
    with pytest.raises(ValueError, match="does not cover adapters"):
        safeload.load(model, verify=listed, adapters="lora")


def test_file_objects_have_no_names(model, listed):
    with open(next(model.glob("*.safetensors")), "rb") as file, pytest.raises(VerificationError, match="has no name"):
        safeload.load(file, verify=listed)


def test_a_list_of_files_is_verified(model, listed):
    paths = sorted(model.glob("*.safetensors"))
    assert same(safeload.load(paths, verify=listed))
    flip(paths[-1])
    with pytest.raises(VerificationError, match=paths[-1].name):
        safeload.load(paths, verify=listed)


# ---- caches ----


@links
def test_the_cache_of_the_hub_is_verified_by_its_etags(tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    weights, config = save(WEIGHTS), b'{"model_type": "none"}'
    etags = {
        "model.safetensors": (hashlib.sha256(weights).hexdigest(), weights),
        "config.json": (hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest(), config),
    }
    for name, (etag, content) in etags.items():
        (repository / "blobs" / etag).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{etag}")
    assert same(safeload.load(snapshot, verify=True))
    report = safeload.verify(snapshot)
    assert report.ok
    assert "integrity only" in report.proof
    for name in etags:
        blob = (snapshot / name).resolve()
        flip(blob)
        with pytest.raises(VerificationError, match=rf"{name}: the file differs from the Hub's cache"):
            safeload.load(snapshot, verify=True)
        assert [file.file for file in safeload.verify(snapshot).faults] == [name]
        flip(blob)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(weights)  # no link: nothing says what it should be
    with pytest.raises(VerificationError, match="the Hub's cache has no digest of this file"):
        safeload.load(snapshot, verify=True)


def test_models_of_ollama_are_verified_by_the_names_of_their_blobs(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    content = tmp_path / "m.gguf"
    safeload.convert({"blk.0.w": np.arange(64, dtype=np.float32).reshape(2, 32)}, content)
    digest = hashlib.sha256(content.read_bytes()).hexdigest()
    blob = tmp_path / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    shutil.move(content, blob)
    place = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    place.parent.mkdir(parents=True)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": blob.stat().st_size,
    }
    place.write_text(json.dumps({"layers": [layer]}))
    assert list(safeload.load("ollama://m", verify=True)) == ["blk.0.w"]
    assert safeload.verify("ollama://m").ok
    flip(blob)
    with pytest.raises(VerificationError, match="differs from ollama's store"):
        safeload.load("ollama://m", verify=True)
    assert not safeload.verify("ollama://m").ok


# ---- URLs ----


def test_urls_are_verified(model, listed):
    with Server(model) as server:
        url = server.url("/model.safetensors.index.json")
        assert same(safeload.load(url, verify=listed))
        with safeload.open(url, verify=listed) as checkpoint:
            assert same(dict(checkpoint.stream(dtype="float64")))
        with pytest.raises(VerificationError, match="for a URL, pass the path of a manifest"):
            safeload.load(url, verify=True)
        flip(next(model.glob("*.safetensors")))
        with pytest.raises(VerificationError, match=r"http://.*safetensors: the file differs"):
            safeload.load(url, verify=listed)
    with Server(model) as server:
        assert not safeload.verify(server.url(f"/{next(model.glob('*.safetensors')).name}"), listed).ok


# ---- other functions ----


def test_convert_publishes_only_what_was_verified(model, listed, tmp_path):
    (model / "tokenizer.json").write_text("{}")
    manifest(model, listed)
    out = tmp_path / "out"
    safeload.convert(model, out, dtype="float16", verify=listed)
    assert same(safeload.load(out, dtype="float32"))
    assert (out / "tokenizer.json").read_text() == "{}"
    for path in (model / "tokenizer.json", model / "config.json", sorted(model.glob("*.safetensors"))[-1]):
        flip(path)
        with pytest.raises(VerificationError, match=path.name):
            safeload.convert(model, tmp_path / "bad", dtype="float16", verify=listed)
        assert not any(tmp_path.glob("bad/*"))
        flip(path)
    for options in ({"resume": True}, {"executor": object()}, {"adapters": "lora"}):
        with pytest.raises(ValueError, match="verify= does not cover"):
            safeload.convert(model, tmp_path / "bad", verify=listed, **options)
    with pytest.raises(ValueError, match="verify= needs paths"):
        safeload.convert(WEIGHTS, tmp_path / "bad", verify=listed)


def test_torch_verifies(model, listed):
    torch = pytest.importorskip("torch")
    from safeload.torch import load_checkpoint, load_model

    tensors = load_checkpoint(model, verify=listed)
    assert same({name: tensor.numpy() for name, tensor in tensors.items()})
    module = torch.nn.ParameterDict({name: torch.empty(600) for name in WEIGHTS})
    load_model(module, str(model), verify=listed)
    assert same({name: module[name].detach().numpy() for name in WEIGHTS})
    flip(next(model.glob("*.safetensors")))
    with pytest.raises(VerificationError):
        load_checkpoint(model, verify=listed)
    with pytest.raises(VerificationError):
        load_model(module, str(model), verify=listed)


def test_jax_verifies(model, listed):
    pytest.importorskip("jax")
    from safeload.jax import load_checkpoint

    assert same({name: np.asarray(array) for name, array in load_checkpoint(model, verify=listed).items()})
    flip(next(model.glob("*.safetensors")))
    with pytest.raises(VerificationError):
        load_checkpoint(model, verify=listed)
