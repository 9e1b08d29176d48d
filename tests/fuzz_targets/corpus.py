"""Corpora of the fuzz targets: one zip archive each in corpus/, an entry is an input.

usage: corpus.py unpack FOLDER     every corpus into FOLDER/<target>/
       corpus.py seeds FOLDER      what the tests' real and malformed files give, likewise
       corpus.py pack FOLDER       FOLDER/<target>/ into the archives
"""

import base64
import contextlib
import functools
import hashlib
import io
import json
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
TESTS = HERE.parent

# Larger seeds make slow fuzzing; a fault of the reader has never needed more.
LARGEST = 8192

# The oldest time that zip has: the same inputs give the same archive.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def read(target):
    """The committed inputs of a target."""
    path = CORPUS / f"{target}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def pack(target, inputs):
    with zipfile.ZipFile(CORPUS / f"{target}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted((hashlib.sha1(data).hexdigest(), data) for data in inputs):
            archive.writestr(zipfile.ZipInfo(name, _NO_TIME), data, zipfile.ZIP_DEFLATED)


# ---- seeds ----


def _headers():
    """Headers of the real safetensors files."""
    for path in sorted((TESTS / "data").glob("*.safetensors")):
        with path.open("rb") as file:
            yield file.read(struct.unpack("<Q", file.read(8))[0])


def _safetensors():
    from builders.malformed import ACCEPTED, CASES

    files = [*ACCEPTED.values(), *(case.content for case in CASES)]
    return [*files, *(data[8:] for data in files if data[8:9] == b"{"), *_headers()]


def _json():
    texts = [data for data in _safetensors() if data[:1] == b"{"]
    return [*texts, *_schemas()]


def _gguf():
    from builders.quantized import FIXTURES, IN_GGUF
    from malformed.test_gguf import CASES, GOOD

    packed = [FIXTURES[name].path.read_bytes() for name in IN_GGUF]
    return [GOOD, *packed, *(case.content for case in CASES.values())]


def _torch():
    from malformed.test_torch import CASES, GOOD, LEGACY

    real = [path.read_bytes() for path in (TESTS / "data" / "torch").iterdir()]
    return [GOOD, LEGACY, *real, *(content for content, _, _ in CASES.values() if not callable(content))]


def _pickle():
    from builders.torch_build import dump
    from malformed.test_torch import VALUE

    yield dump(VALUE)
    yield dump(VALUE, 4)
    yield from _arrays()
    for data in _torch():
        with contextlib.suppress(Exception), zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield from (archive.read(name) for name in archive.namelist() if name.endswith(".pkl"))


def _arrays():
    """Pickles of arrays of numpy, sound ones and each with one fault; of the costs the smallest."""
    import pickle

    from builders.torch_build import dump
    from test_formats.unpickle import test_pickle_costs, test_pickled_arrays

    for protocol in range(6):
        yield from (pickle.dumps({"w": array}, protocol) for array in test_pickled_arrays.ARRAYS.values())
        yield pickle.dumps(test_pickled_arrays.NESTED, protocol)
        yield pickle.dumps({name: value for name, (value, _) in test_pickled_arrays.SCALARS.items()}, protocol)
    yield from (dump({"bad": value}, 4) for value, _ in test_pickled_arrays.FAULTS.values())
    yield from (test_pickle_costs.PACKED["dict"](keys[:150]) for keys in test_pickle_costs.COLLIDING.values())
    yield from (data[:200] + b"." for data in test_pickle_costs.DENSE.values())


def _moon():
    head = struct.pack("<II", 0x4D4F4F4E, 2)
    one = struct.pack("<III", 1, 2, 6) + b"w" + struct.pack("<2Q", 2, 3) + bytes(range(12))
    scalar = struct.pack("<III", 2, 0, 1) + "\N{LATIN SMALL LETTER E WITH ACUTE}".encode() + b"\0\x3c"
    empty = struct.pack("<III", 1, 4, 0) + b"e" + struct.pack("<4Q", 0, 1, 2, 1 << 40)
    tiny = b"".join(struct.pack("<III", 1, 0, 1) + bytes((97 + k,)) + b"\0\0" for k in range(20))
    nul = struct.pack("<III", 3, 1, 0) + b"a\0b" + struct.pack("<Q", 0)
    return [head, head + one, head + one + scalar + empty, head + one + one, head + one[:-1], head + tiny, head + nul]


def _npy():
    from test_formats import test_npy

    yield from (content for content, _, _ in test_npy.FAULTS)
    for array in test_npy.ARRAYS.values():
        for version in ((1, 0), (2, 0), (3, 0)):
            yield test_npy.written(array, version)


def _npz():
    import numpy as np
    from test_formats import test_npz

    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f": np.asfortranarray(np.ones((3, 2), np.float16)),
        "b": np.array([True, False]),
        "big": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 3), np.int64),
        "text": np.array(["no weight"]),
        "0-d": np.complex64(1j),
    }
    files = [{"a": arrays["a"]}, {k: arrays[k] for k in ("a", "f", "b", "0-d")}, *({k: v} for k, v in arrays.items())]
    for save in (np.savez, np.savez_compressed):
        for chosen in files:
            out = io.BytesIO()
            save(out, **chosen)
            yield out.getvalue()
    none = io.BytesIO()
    np.savez(none)
    good = bytes(test_npz.archive({"a.npy": test_npz.good()}))
    yield from (none.getvalue(), good, good + good, good + b"more", b"more" + good, test_npz.overlapping(3, 100))
    yield bytes(test_npz.archive({"a\0b.npy": test_npz.good(), "c.npy": test_npz.good()}))


def _quantized():
    int8 = {"scheme": "int8", "shape": [2, 4], "axis": 0}
    blocks = {"scheme": "q4_0", "shape": [3, 64], "axis": None}
    for described in ({"w": int8}, {"w": int8, "b": blocks}, {"w": {**int8, "axis": None}}, {"w_scale": int8}, {}, []):
        yield json.dumps(described).encode()


def _grouping():
    from builders.quantized import FIXTURES

    for fixture in FIXTURES.values():
        described = {}
        for path in sorted(fixture.folder.rglob("*.safetensors")):
            with path.open("rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                data = file.read()
            described |= {name: [e["dtype"], e["shape"]] for name, e in header.items() if name != "__metadata__"}
            for name in header:
                if ".quant_state." in name:
                    described[name].append(data[slice(*header[name]["data_offsets"])].decode())
        if not described:  # a GGUF file, which other targets change
            continue
        config = fixture.folder / "config.json"
        said = json.loads(config.read_text()) if config.exists() else None
        kept = ("quantization_config", "quantization", "text_config")
        trimmed = None if said is None else {key: said[key] for key in kept if key in said}
        # The first module is enough: what is shorter is changed more often where it matters.
        first = sorted(described, key=lambda name: "weight" not in name)[0].rpartition(".")[0]
        chosen = {name: entry for name, entry in described.items() if name.startswith(first)} or described
        yield json.dumps({"config": trimmed, "tensors": chosen}).encode()


def _adapters():
    from builders.adapters import LORA

    def described(path):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        return {name: [entry["dtype"], entry["shape"]] for name, entry in header.items() if name != "__metadata__"}

    kept = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out")
    kept += ("rank_pattern", "alpha_pattern", "target_parameters")
    for path in sorted(LORA.glob("*/adapter_config.json")):
        said = json.loads(path.read_text())
        own = LORA / f"{path.parent.name}_base.safetensors"
        seed = {
            "adapter": {key: said[key] for key in kept if said.get(key)},
            "config": {"model_type": "gpt2"},
            "base": described(own if own.exists() else LORA / "base.safetensors"),
            "tensors": described(path.parent / "adapter_model.safetensors"),
        }
        yield json.dumps(seed).encode()
        if path.parent.name == "experts":  # a layer of them one by one
            for stack, layers, shape in (("gate_up", ("gate", "up"), [5, 8]), ("down", ("down",), [8, 5])):
                del seed["base"][f"layers.0.experts.{stack}_proj"]
                names = (f"layers.0.experts.{k}.{layer}_proj.weight" for k in range(3) for layer in layers)
                seed["base"].update((name, ["F32", shape]) for name in names)
            yield json.dumps(seed).encode()
    parts = {"w.lora_a": ["F32", [5, 2]], "w.lora_b": ["F16", [2, 6]], "w.m": ["F32", [6]]}
    for tensors in (parts, {name: entry for name, entry in parts.items() if name != "w.m"}):
        kind = {"fine_tune_type": "dora" if len(tensors) == 3 else "lora", "lora_parameters": {"scale": 2.0}}
        yield json.dumps({"adapter": kind, "base": {"w.weight": ["BF16", [6, 5]]}, "tensors": tensors}).encode()


def _index():
    good = {"a": "one.safetensors", "b": "two.safetensors"}
    indexes = [
        {"weight_map": good},
        {"metadata": {"total_size": 19}, "weight_map": good},
        *({"weight_map": {"a": file}} for file in ("../one.safetensors", "no", "config.json", "", None, 3)),
    ]
    return [json.dumps(index).encode() for index in indexes]


def _imatrix():
    from builders.llama_quantize import model, save_imatrix

    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for sizes in ({"layers": 1, "width": 2, "inner": 3}, {"layers": 1, "width": 2, "inner": 2, "experts": 2}):
            for older in (False, True):
                path = Path(folder, "imatrix")
                save_imatrix(path, model(**sizes)[0], older=older)
                seeds.append(path.read_bytes())
    return [*seeds, *(seed[: len(seed) // 2] for seed in seeds)]


def _gguf_split():
    from builders.gguf_build import STRING, entry, part

    good = part(0, 2, 2, ["a"])
    named = [entry("general.name", STRING, "x")]
    wrong = [
        (1, 2, 2, ["a"]),
        (0, 3, 2, ["a"]),
        (0, 2, 9, ["a"]),
        (0, 2, 2, ["b"]),
        (0, 2, None, ["a"]),
        (0, 1, 1, ["a"]),
    ]
    return [good, part(0, 2, 1, []), part(0, 2, 2, ["a"], more=named), *(part(*numbers) for numbers in wrong)]


def _config():
    from builders.models import SMALL, small

    return [json.dumps(small(kind)[0]).encode() for kind in SMALL]


def _sentencepiece():
    from builders.inside import sentencepiece

    pieces = [
        sentencepiece.VocabularyPiece(text, -float(k), k % 6 + 1)
        for k, text in enumerate(("<unk>", "a", "b", "ab", "\u2581", "é"))
    ]
    return [sentencepiece.serialized(pieces[:count], count % 2 == 0, {"bos": 1}) for count in range(1, 7)]


def _tokenizer():
    yield b"{}"
    for name in ("llama3", "qwen2"):
        content = json.loads((TESTS / "data" / "llama_cpp" / name / "tokenizer.json").read_text(encoding="utf-8"))
        model = content["model"]
        model["vocab"] = {chr(97 + k): k for k in range(20)} | {"ab": 20, "abc": 21}
        model["merges"] = [["a", "b"], ["ab", "c"]]
        for k, token in enumerate(content["added_tokens"]):
            token["id"] = 30 + k
        content["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
        yield json.dumps(content).encode()
        content["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        content["pre_tokenizer"] = None
        model["byte_fallback"] = True
        yield json.dumps(content).encode()


def _model_config():
    from builders import llama_models

    return [json.dumps(model["config"]).encode() for model in llama_models.listed().values()]


def _schemas():
    import safeload  # those of the installed one: the sources may not be here

    folder = Path(safeload.__file__).parent / "models" / "schemas"
    return [path.read_bytes() for path in sorted(folder.glob("*.json"))]


def _url():
    hosts = [
        "host",
        "h.example:8443",
        "[::1]",
        "[fe80::1%25eth0]:80",
        "127.0.0.1",
        "b\u00fccher.example",
        "xn--bcher-kva.de",
    ]
    tails = ["", "/", "/a/./b/../c%2Fd", "/a%20b/\u00e9?X-Amz-Signature=SIGNATURE&e=%2f", "/a@b::c#part", "/%2e%2E/x?#"]
    users = ["", "user:PASSWORD@", "user:PASS/WORD@", "PASSWORD@", "a@b:PASSWORD@", ":%40@"]
    urls = [f"https://{user}{hosts[0]}{tails[3]}" for user in users]
    urls += [f"{scheme}://{host}{tails[k % 6]}" for k, host in enumerate(hosts) for scheme in ("http", "HTTPS")]
    urls += [f"https://host{tail}" for tail in tails]
    urls += [
        "s3://bucket/key?versionId=1",
        "gs://b/k#12",
        "az://box@account.dfs/k",
        "hf://owner/name@refs/pr/1/k",
        "file:///a%23b",
    ]
    urls += [
        "simplecache::https://user:PASSWORD@host/a?b",
        "zip://a/b::filecache::s3://bucket/c.zip",
        "s3://arn:aws:s3:us:1:x/k",
    ]
    urls += ["//host/x", "/x?y", "../x", "https:/host", "https://", "C:\\a", "https://a\\@b/", "https://a\tb/", "?x"]
    return [url.encode() for url in urls]


# The first bytes of files that safeload knows but does not read, by their offset.
FOREIGN = {
    0: [
        *(b"version https://git-lfs", b"\x1f\x8b", b"(\xb5/\xfd", b"BZh", b"\xfd7zXZ\0", b'\x04"M\x18'),
        *(b"7z\xbc\xaf'\x1c", b"Rar!\x1a\x07", b"|TZR|\n", b"\x12\x01\0\0\0\0\0\0", b"sys_info\0", b"storages\0"),
        *(b"tensors\0", b"pickle\0", b"MZqFpD", b"\x7fELF", b"PK\x05\x06", b"\0\0\x06\x08", b"lmgg", b"fmgg", b"tjgg"),
        b"24ka",
    ],
    4: [b"ET12", b"TFL3"],
    257: [b"ustar"],
}


def _any():
    from builders.malformed import build
    from malformed import test_gguf, test_torch

    good = [build(), test_gguf.GOOD, test_torch.GOOD, test_torch.LEGACY, *_moon(), *_npz(), *_npy(), *_arrays()]
    return [
        *good,
        *(one[:8] for one in good),
        b"",
        b"<!DOCTYPE html>",
        *(bytes(at) + head for at, heads in FOREIGN.items() for head in heads),
    ]


def _dcp():
    from builders import dcp_build
    from builders.torch_build import dump
    from test_formats import test_dcp

    yield dump(dcp_build.sample().metadata(), 4)
    for change, _, _ in test_dcp.FAULTS.values():
        made = dcp_build.sample()
        change(made)
        yield dump(made.metadata(), 4)


def _dcp_data():
    from builders import dcp_build

    content = bytes(dcp_build.sample().files["__0_0.distcp"])
    return [content, *(content[:size] for size in (0, 100, 1000, len(content) - 1)), content[::-1]]


def _fsdp():
    from builders.torch_build import zip_file
    from test_formats import test_fsdp

    files = sorted((TESTS / "data" / "fsdp").glob("*/model_*.pt"))
    return [
        *(path.read_bytes() for path in files),
        *(zip_file(values[0]) for values, _, _ in test_fsdp.FAULTS.values()),
    ]


def _zero():
    from builders.torch_build import zip_file
    from test_formats import test_zero

    files = sorted((TESTS / "data" / "deepspeed").glob("*/*/*_model_states.pt"))
    return [
        *(path.read_bytes() for path in files),
        *(zip_file(value) for value, _, _ in test_zero.MODEL_FAULTS.values()),
    ]


def _zero_optimizer():
    from builders.torch_build import zip_file
    from test_formats import test_zero

    files = sorted((TESTS / "data" / "deepspeed").glob("*/*/*_optim_states.pt"))
    bent = (zip_file(value) for value, _, _ in test_zero.OPTIMIZER_FAULTS.values())
    return [*(path.read_bytes() for path in files), *bent]


def _orbax():
    from builders import orbax_build
    from test_formats import test_orbax

    yield json.dumps(orbax_build.sample().metadata).encode()
    for change, _, _ in test_orbax.TREE_FAULTS.values():
        made = orbax_build.sample()
        change(made)
        yield json.dumps(made.metadata).encode()


def _orbax_manifest():
    from builders import orbax_build
    from test_formats import test_orbax

    bodies = [manifest(bytes(99)) for _, manifest, _, _, _ in test_orbax.NODE_FAULTS]
    return [orbax_build.manifest_body((0, 4, 9), [("ocdbt.process_0/", "d/0")], 1), *bodies]


def _orbax_node():
    from builders import orbax_build
    from test_formats import test_orbax

    made = orbax_build.sample()
    entries = sorted(made.values().items(), key=lambda pair: pair[0].encode())
    whole = orbax_build.leaf(entries, [("", "d/0")])
    return [whole, *(body for _, _, body, _, _ in test_orbax.NODE_FAULTS)]


def _orbax_array():
    from test_formats import test_orbax

    for make, faults in (test_orbax.CASES[0], test_orbax.CASES[2]):
        for change, _, _ in [(lambda made: None, None, None), *faults.values()]:
            made = make()
            change(made)
            for described in made.arrays.values():
                yield json.dumps(described).encode()


def _tar():
    import tarfile

    from builders import torch_build
    from builders.torch_build import Storage, tensor
    from test_formats import test_containers

    from safeload.numpy import save

    weights = save({"w": np.arange(160, dtype=np.float32)})
    torch_file = torch_build.zip_file({"w": tensor(Storage("0", np.ones(4, np.float32)))})
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for files in ({"m.safetensors": weights}, {"a" * 120 + "/b.ckpt": torch_file, "a": None, "note": b"text"}):
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w", format=format) as archive:
                for name, content in files.items():
                    info = tarfile.TarInfo(name)
                    info.size, info.type = len(content or b""), tarfile.DIRTYPE if content is None else tarfile.REGTYPE
                    archive.addfile(info, io.BytesIO(content or b""))
            yield out.getvalue()[:4096]
            if format == tarfile.USTAR_FORMAT and "m.safetensors" in files:
                for change, _, _ in test_containers.FAULTS.values():
                    yield bytes(change(bytearray(out.getvalue()[:2560])))


def _llamafile():
    from malformed import test_gguf
    from test_formats import test_containers

    content = test_gguf.GOOD
    for name in ("m.gguf", "../m.gguf", "models/m.gguf", "m-00001-of-00002.gguf"):
        yield test_containers.llamafile_bytes(
            {name: content, ".args": b"-m"}, align=64, program=b"MZqFpD='" + bytes(99)
        )
    yield test_containers.llamafile_bytes(
        {"a.gguf": content, "b.gguf": content}, align=64, program=b"\x7fELF" + bytes(99)
    )


def _keras():
    import h5py

    def file(make, **options):
        out = io.BytesIO()
        with h5py.File(out, "w", **options) as opened:
            make(opened)
        return out.getvalue()

    def make(opened):
        opened["layers/a/vars/0"] = np.arange(6, dtype=np.float32)
        opened.create_dataset("c", data=np.eye(6), chunks=(4, 4), compression="gzip", shuffle=True, fletcher32=True)
        opened.attrs["backend"] = "jax"

    def listed(opened):
        group = opened.create_group("model_weights/x")
        opened["model_weights"].attrs["layer_names"] = [b"x"]
        group.attrs["weight_names"] = [b"w"]
        group["w"] = np.ones(2, bool)

    for options in ({}, {"libver": "latest"}):
        for one in (make, listed):
            content = file(one, **options)
            yield content
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w") as archive:
                archive.writestr("config.json", "{}")
                archive.writestr("model.weights.h5", content)
            yield out.getvalue()


def _paddle():
    import pickle

    from test_formats import test_paddle

    for protocol in (2, 4):
        yield pickle.dumps(test_paddle.parts_of(test_paddle.ARRAY, (40, 2)), protocol)
        for make, _, _ in test_paddle.FAULTS.values():
            yield pickle.dumps(make(), protocol)


def _flax():
    from builders.flax_build import pack
    from test_formats import test_flax

    files = sorted((TESTS / "data" / "flax").rglob("*.msgpack"))
    faults = (content for content, _, _ in test_flax.FAULTS.values())
    bent = (content if isinstance(content, bytes) else pack({"first": test_flax.A, **content}) for content in faults)
    return [*(path.read_bytes() for path in files), *bent]


def _onnx():
    from builders.onnx_build import sample
    from test_formats import test_onnx

    files = sorted((TESTS / "data" / "onnx").rglob("*.onnx"))
    faults = [*test_onnx.FAULTS.values(), *test_onnx.LATE.values()]
    return [sample(), *(path.read_bytes() for path in files), *(fault[0] for fault in faults)]


def _signed_list():
    bundles = [path.read_bytes() for path in sorted((TESTS / "data" / "signatures").glob("*.sig"))]
    yield from bundles
    for bundle in bundles:
        yield base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"])
    digest = "0" * 64
    yield json.dumps({"safeload_manifest": 1, "files": {"a/b": {"size": 3, "sha256": digest}}}).encode()


SEEDS = {
    "tar": _tar,
    "llamafile": _llamafile,
    "keras": _keras,
    "paddle": _paddle,
    "json": _json,
    "safetensors": _safetensors,
    "gguf": _gguf,
    "any": _any,
    "torch": _torch,
    "pickle": _pickle,
    "moon": _moon,
    "npz": _npz,
    "npy": _npy,
    "gguf_values": _gguf,
    "imatrix": _imatrix,
    "quantized": _quantized,
    "grouping": _grouping,
    "adapters": _adapters,
    "index": _index,
    "dcp": _dcp,
    "dcp_data": _dcp_data,
    "fsdp": _fsdp,
    "zero": _zero,
    "zero_optimizer": _zero_optimizer,
    "orbax": _orbax,
    "orbax_manifest": _orbax_manifest,
    "orbax_node": _orbax_node,
    "orbax_array": _orbax_array,
    "flax": _flax,
    "onnx": _onnx,
    "gguf_split": _gguf_split,
    "config": _config,
    "sentencepiece": _sentencepiece,
    "tokenizer": _tokenizer,
    "model_config": _model_config,
    "url": _url,
    "signed_list": _signed_list,
}


@functools.cache
def seeds(target):
    """The inputs that the tests' own files give a target."""
    return sorted({data for data in SEEDS[target]() if len(data) <= LARGEST})


def main(command, folder):
    for target in SEEDS:
        place = Path(folder) / target
        if command == "pack":
            if place.is_dir():
                pack(target, {path.read_bytes() for path in place.iterdir()})
            continue
        place.mkdir(parents=True, exist_ok=True)
        for data in read(target) if command == "unpack" else seeds(target):
            (place / hashlib.sha1(data).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("unpack", "seeds", "pack"):
        sys.exit(__doc__)
    sys.path.append(str(TESTS))
    main(*sys.argv[1:])
