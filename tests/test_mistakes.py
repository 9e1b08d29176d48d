"""What a user gets wrong, and what the message then says: one row for each mistake."""

import json
import os
import pickle
import struct
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from builders import gguf_build
from builders.inside import main

import safeload
from safeload.numpy import load_file, save_file

pytestmark = pytest.mark.no_core

W = np.arange(256, dtype=np.float32).reshape(4, 64)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with one good file, and a home and a cache of the Hub of its own."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(home))
    for variable in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    save_file({"w": W, "embed": W}, "good.safetensors", durable=False)
    return tmp_path


def message(call, *kinds):
    """The message of the error that a call raises, which is of these kinds."""
    with pytest.raises(kinds or Exception) as caught:
        call()
    return str(caught.value)


def assert_says(text, *parts):
    """The message contains these parts; none that begins with "not: "."""
    for part in parts:
        if part.startswith("not: "):
            assert part[5:] not in text
        else:
            assert part in text


# ---- paths ----

HUB = 'for a repository of the Hugging Face Hub: safeload.open("hf://meta-llama/Llama-3.2-1B")'
PATHS = {
    "a plain name": ("missing.safetensors", ["not: ;"]),
    "a repository": ("meta-llama/Llama-3.2-1B", [HUB]),
    "a repository after hf:": ("hf:meta-llama/Llama-3.2-1B", [HUB]),
    "an old name after hf:": ("hf:gpt2", ['safeload.open("hf://gpt2")']),
    "a repository and a slash": ("meta-llama/Llama-3.2-1B/", [HUB]),
    "a folder that is here": ("home/Llama-3.2-1B", ["not: Hugging Face"]),
    "a file in a folder": ("checkpoints/model.safetensors", ["not: Hugging Face"]),
    "a drive": ("C:/models/a.gguf", ["not: URL", "not: download"]),
    "~ and no file": ("~/a.gguf", ["`~` is not expanded: os.path.expanduser gives ", "which does not exist either"]),
    "~": ("~/b.gguf", ["`~` is not expanded: os.path.expanduser gives ", "b.gguf", "not: nothing"]),
    "a pattern": ("*.safetensors", ["patterns are not expanded: pass safeload.open a list such as sorted(glob.glob"]),
    "a pattern without a match": (
        "*.nothing",
        ["patterns are not expanded, and no file matches this pattern", "not: list"],
    ),
    "an index": ("model.safetensors.index.json", ["not: ;"]),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_leads_nowhere(case, here):
    path, parts = PATHS[case]
    (here / "home" / "b.gguf").touch()
    ways = [safeload.open, safeload.load, lambda path: safeload.convert(path, "out.npz"), safeload.check]
    texts = {message(lambda way=way: way(path), FileNotFoundError) for way in [*ways, load_file]}
    (text,) = texts  # the same from all of them
    shown = (
        os.fspath(path).replace(os.sep, "/").partition("?")[0].replace("me:password@", "").replace("s3:/b", "s3://b")
    )
    assert text.startswith(f"No such file or directory: {shown}")
    assert_says(text, *parts)


LOCAL = "this function reads local files: safeload.load("
NETWORK = " reads it over the network"
URLS = {
    "hf://": ("hf://a/b@v1", [f'{LOCAL}"hf://a/b@v1"){NETWORK}']),
    "a page of the Hub": ("https://huggingface.co/a/b", [f'{LOCAL}"hf://a/b"){NETWORK}']),
    "a data set of the Hub": ("https://huggingface.co/datasets/a/b", ['load("hf://datasets/a/b")']),
    "a link of the Hub": (
        "https://huggingface.co/a/b/resolve/v1/x/c.safetensors?download=true",
        ['load("hf://a/b@v1/x/c.safetensors")'],
    ),
    "a URL": ("https://example.org/a b.gguf", [f'{LOCAL}"https://example.org/a b.gguf"){NETWORK}']),
    "a signed URL": (
        "https://me:password@example.org/a.gguf?sig=secret" + "x" * 300,
        ["https://example.org/a.gguf;", f"{LOCAL}URL)", "not: secret", "not: password"],
    ),
    "a URL of JSON": ("https://example.org/config.json", ["this function reads local files", "not: safeload.load"]),
    "file://": ("file:///a/b.gguf", ["pass the path itself, '/a/b.gguf'"]),
    "s3://": ("s3://bucket/a.gguf", ['load("s3://bucket/a.gguf")']),
    "an unknown scheme": ("ipfs://x", ['load("ipfs://x", storage_options={})']),
    "a broken URL": ("https://[x/", [LOCAL]),
}


@pytest.mark.parametrize("case", URLS)
def test_drop_ins_take_no_urls(case, here):
    """Nor does anything that reads a file beside weights."""
    path, parts = URLS[case]
    ways = [
        load_file,
        lambda path: safeload.safe_open(path, "np"),
        lambda path: safeload.check({}, config=path),
        safeload.Layout.from_json,
    ]
    (text,) = {message(lambda way=way: way(path), FileNotFoundError) for way in ways}
    assert text.startswith("No such file or directory: " + path.partition("?")[0].replace("me:password@", ""))
    assert_says(text, *parts)


def test_a_url_through_pathlib_is_recognised(here):
    text = message(lambda: safeload.open(Path("s3://bucket/a.gguf")), FileNotFoundError)
    assert_says(
        text, "s3://bucket/a.gguf; pass a URL as str, because pathlib changes it: ", 'load("s3://bucket/a.gguf")'
    )


@pytest.mark.parametrize("path", [r"http:\\me:s3cr3t@host/a", r"https:\me:s3cr3t@host/a", r"S3:\\key:s3cr3t@b/a"])
def test_a_url_with_backslashes_shows_no_secret(path, here):
    for way in (
        lambda: safeload.open(path),
        lambda: load_file(path),
        lambda: safeload.convert({"w": W}, path + ".safetensors"),
    ):
        with pytest.raises(OSError, match="://") as caught:
            way()
        assert "s3cr3t" not in f"{caught.value} {caught.value!r} {caught.value.filename}"


def test_the_pattern_of_the_message_works(here):
    assert list(safeload.open(sorted(here.glob("*.safetensors")))) == ["embed", "w"]


def test_a_repository_in_the_cache_is_named(here):
    cache = here / "cache" / "models--owner--name"
    commits = first, other = "b" * 40, "a" * 40
    for commit in commits:
        (cache / "snapshots" / commit).mkdir(parents=True)
        save_file({"w": W}, cache / "snapshots" / commit / "model.safetensors", durable=False)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(first)
    text = message(lambda: safeload.open("owner/name"), FileNotFoundError)
    folder = str(cache / "snapshots" / first)
    assert_says(text, f"huggingface_hub's cache has this repository: safeload.open({folder!r})", "not: download")
    assert list(safeload.open(folder)) == ["w"]
    (cache / "snapshots" / first / "model.safetensors").unlink()
    assert_says(message(lambda: safeload.open("owner/name")), repr(str(cache / "snapshots" / other)))
    newest = cache / "snapshots" / ("c" * 40)
    newest.mkdir()
    for seconds in (-60, 60):  # of the other commit, relative to this one
        save_file({"w": W}, newest / "model.safetensors", durable=False)
        os.utime(cache / "snapshots" / other, (newest.stat().st_mtime + seconds,) * 2)
        expected = newest if seconds < 0 else cache / "snapshots" / other
        assert_says(message(lambda: safeload.open("owner/name")), repr(str(expected)))
    (newest / "model.safetensors").unlink()
    (cache / "snapshots" / other / "model.safetensors").unlink()
    assert_says(message(lambda: safeload.open("owner/name")), "hf://owner/name", "not: cache")


def test_the_command_line_says_it_too(here, capsys):
    assert main(["info", "owner/name"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert_says(err, "safeload: No such file or directory: owner/name; for a repository of the Hugging Face Hub")


def test_a_missing_file_is_a_plain_file_not_found_error(here):
    with pytest.raises(FileNotFoundError) as caught:
        load_file("missing")
    error = caught.value
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (str(one), one.filename, one.errno) == ("No such file or directory: missing", "missing", 2)
        assert (type(one).__module__, type(one).__qualname__) == ("builtins", "FileNotFoundError")
    program = "import safeload; safeload.open('missing')"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "FileNotFoundError: No such file or directory: missing"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_content_of_a_file_is_not_a_path(kind, here):
    data = kind((here / "good.safetensors").read_bytes() * 1000)
    for way in (safeload.open, load_file):
        text = message(lambda way=way: way(data), TypeError)
        assert_says(text, "expected a path, got the content of a file", "safeload.numpy.load(data)")
        assert len(text) < 300


# ---- files that are something else: real beginnings ----

TFLITE = bytes.fromhex("1c00000054464c33140020001c001800140010000c0000000800040014000000")
TF_INDEX = bytes.fromhex("00000608011a020801001c0e") + b"_CHECKPOINTABLE_OBJECT_GRAPH\x08\x07\x12\x00"
SAVED_MODEL = bytes.fromhex("080112cb530a980d12e80c0a5e0a10") + b"AssignVariableOp\x12\x0c\x0a\x08resource"
LLAMA2 = struct.pack("<7i", 288, 768, 6, 6, 6, 32000, 256) + W.tobytes()[4:]
LLAMA2_NEW = struct.pack("<II", 0x616B3432, 1) + W.tobytes()
HDF5 = bytes.fromhex("894844460d0a1a0a000000000008080004001000000000000000000000000000ffffffffffffffff")
RESTRICTED = b"Access to model meta-llama/Llama-3.2-1B is restricted and you are not in the authorized list. Visit\nit."
GOOD = 300


def large():
    """A file with a header of more than 4,096 bytes."""
    return {f"blocks.{k}.weight": W for k in range(GOOD)}


CONTENTS = {
    "TFLite": ("model.tflite", TFLITE, ["this is a TensorFlow Lite model", "tf.lite.Interpreter(path)"]),
    "an index of TensorFlow": (
        "m.index",
        TF_INDEX,
        ["the index of a TensorFlow checkpoint", "tf.train.load_"],
    ),
    "data of TensorFlow": (
        "m.data-00000-of-00001",
        W.tobytes()[4:],
        ["the data of a TensorFlow checkpoint", "tf.train.load_checkpoint"],
    ),
    "SavedModel": ("saved_model.pb", SAVED_MODEL, ["this is a TensorFlow SavedModel", "tf.saved_model", "not: ONNX"]),
    "llama2.c": ("stories15M.bin", LLAMA2, ["this is a llama2.c checkpoint", "numpy.memmap"]),
    "llama2.c with a magic": ("stories15M.bin", LLAMA2_NEW, ["this is a llama2.c checkpoint"]),
    "Keras": ("model.weights.h5", HDF5, ["this is an HDF5 file"]),
    "GGML": ("ggml-base.bin", b"lmgg" + W.tobytes(), ["a GGML file from before GGUF", "llama.cpp or whisper.cpp"]),
    "gzip": ("model.gz", b"\x1f\x8b\x08\0", ["gzip-compressed: decompress it first"]),
    "zlib": ("model.joblib", b"x\x5e\xab\x56", ["zlib-compressed", "joblib.load"]),
    "text that begins like zlib": ("a.txt", b"x^2 + 1", ["this is text: 'x^2 + 1'"]),
    "Git LFS": ("model.gguf", b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS pointer: run `git lfs pull`"]),
    "HTML": ("model.gguf", b"<!DOCTYPE html><html>", ["this is an HTML page (a failed download?)"]),
    "a listing": (
        "model.gguf",
        b"<html><head><title>Index of /m/</title></head>",
        ["this is an HTML page that lists a folder"],
    ),
    "XML": ("model.gguf", b"<?xml version='1.0'?><Error/>", ["this is an XML page (a failed download?)"]),
    "text": ("model.gguf", RESTRICTED, ["this is text: 'Access to model meta-llama/Llama-3.2-1B is", "Visit it.'"]),
    "a long text": ("model.gguf", b"no " * 99999, ["this is text: 'no no", "...'"]),
    "text of a terminal": ("model.gguf", b"\x1b[31mAccess", ["not: \x1b", "no known weight format starts with 1b 5b"]),
    "text cut in a character": ("model.gguf", "é".encode() * 400, ["this is text: 'éé"]),
    "text of PowerShell": ("model.gguf", "Not Found".encode("utf-16"), ["this is text: 'Not Found'"]),
    "text with a mark": ("model.gguf", b"\xef\xbb\xbfNot Found", ["this is text: 'Not Found'"]),
    "JSON": ("model.gguf", b'{"error":"Repository not found"}', ['this is JSON: \'{"error":"Repository not found"}\'']),
    "zeros": ("model.gguf", bytes(10_000), ["zeros from byte 0 to the end: the download is not finished"]),
    "many zeros": ("model.gguf", bytes(3 << 20), ["zeros from byte 0 on: the download is not finished"]),
    "empty": ("model.gguf", b"", ["this is an empty file"]),
    "none of these": ("model.xyz", b"\xff" * 99, ["no known weight format starts with ff ff"]),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_a_file_that_is_something_else(case, here, capsys):
    if case == "Keras":
        pytest.importorskip("h5py")
    name, content, parts = CONTENTS[case]
    (here / name).write_bytes(content)
    text = message(lambda: safeload.open(name), safeload.SafeloadError)
    assert_says(text, name, *parts)
    assert len(text) < 400
    assert main(["info", name]) == 1
    assert capsys.readouterr().err == f"safeload: {text}\n"


BY_NAME_OR_UNKNOWN = ("data of TensorFlow", "none of these", "text of a terminal")


@pytest.mark.parametrize("case", [case for case in CONTENTS if case not in BY_NAME_OR_UNKNOWN])
def test_load_file_says_what_a_file_is_too(case, here):
    _, content, parts = CONTENTS[case]
    (here / "model.safetensors").write_bytes(content)
    text = message(lambda: load_file("model.safetensors"), safeload.FormatError)
    what, _, advice = parts[0].partition(": ")
    assert_says(text, what, advice, "not: header too large")
    assert what.startswith("zeros") or ", not a safetensors file" in text


def test_another_format_is_not_for_load_file(here):
    np.save("model.npy", W)
    np.savez("model.npz", w=W)
    safeload.gguf.save_file({"w": W}, "model.gguf")
    for name, what in (("model.npy", "an npy file"), ("model.npz", "a zip archive"), ("model.gguf", "a GGUF file")):
        text = message(lambda name=name: load_file(name), safeload.FormatError)
        assert_says(text, f"this is {what}", "not a safetensors file: safeload.open reads other formats too")
        np.testing.assert_array_equal(next(iter(safeload.open(name).values())), W)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("begin", [9, 513, 4096])
def test_a_file_that_was_allocated_and_not_written(begin, name, here):
    save_file(large(), name, durable=False)
    content = (here / name).read_bytes()
    (here / name).write_bytes(content[:begin] + bytes(len(content) - begin))
    for way in (safeload.open, load_file):
        with pytest.raises(safeload.FormatError) as caught:
            way(name)
        assert_says(str(caught.value), f"zeros from byte {begin} to the end: the download is not finished", name)
        assert caught.value.offset == begin


def test_zeros_in_a_header_alone_are_no_download(here):
    save_file(large(), "model.safetensors", durable=False)
    content = (here / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    (here / "model.safetensors").write_bytes(content[:4096] + bytes(8 + length - 4096) + content[8 + length :])
    assert_says(message(lambda: load_file("model.safetensors")), "JSON", "byte 4096", "not: download")


# ---- pickles ----


@pytest.fixture
def estimator(monkeypatch):
    """A class that pickles as one of scikit-learn, and one that pickles as joblib's."""
    made = []
    classes = (("sklearn.linear_model._logistic", "LogisticRegression"), ("joblib.numpy_pickle", "Wrapper"))
    for parent in ("sklearn", "sklearn.linear_model", "joblib"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for module, name in classes:
        kind = type(name, (), {"__module__": module})
        fake = types.ModuleType(module)
        setattr(fake, name, kind)
        monkeypatch.setitem(sys.modules, module, fake)
        made.append(kind)
    return made


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_scikit_learn(protocol, estimator, here):
    model = estimator[0]()
    model.coef_ = W
    (here / "model.pkl").write_bytes(pickle.dumps(model, protocol))
    text = message(lambda: safeload.open("model.pkl"), safeload.ForbiddenError)
    assert_says(text, "this is a scikit-learn model (LogisticRegression), not weights", 'unknown_globals="inert"')
    opened = safeload.open("model.pkl", unknown_globals="inert")  # as the message says
    np.testing.assert_array_equal(opened["<state>.coef_"], W)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_file_of_joblib(protocol, estimator, here):
    model = estimator[0]()
    model.coef_ = estimator[1]()
    (here / "model.joblib").write_bytes(pickle.dumps(model, protocol))
    for option in ("refuse", "inert"):
        text = message(lambda option=option: safeload.open("model.joblib", unknown_globals=option))
        assert_says(text, "a joblib file with a scikit-learn model (LogisticRegression)", "not: unknown_globals")


def test_a_pickle_without_arrays_is_not_sent_on(estimator, here):
    (here / "model.pkl").write_bytes(pickle.dumps({"model": estimator[0]()}))
    assert_says(message(lambda: safeload.open("model.pkl")), "LogisticRegression", "not: inert")


def test_pickled_arrays_open(here):
    (here / "w.pkl").write_bytes(pickle.dumps({"w": W}))
    np.testing.assert_array_equal(safeload.load("w.pkl")["w"], W)


# ---- names of dtypes and schemes ----


def dtype_and_name(values):
    return {array.dtype.name for array in values.values()}


@pytest.mark.parametrize("dtype", ["bf16", "BF16", "Bfloat16", "torch.bfloat16"])
def test_dtypes_are_taken_as_people_write_them(dtype, here, capsys):
    assert dtype_and_name(safeload.load("good.safetensors", dtype=dtype)) == {"bfloat16"}
    assert dtype_and_name(load_file("good.safetensors", dtype=dtype)) == {"bfloat16"}
    assert safeload.astype(W, dtype).dtype.name == "bfloat16"
    assert main(["convert", "good.safetensors", "out.safetensors", "--dtype", dtype]) == 0
    assert dtype_and_name(load_file("out.safetensors")) == {"bfloat16"}


DTYPES = {
    "flaot32": (TypeError, ["unknown dtype 'flaot32': did you mean 'float32'?", "not: expected"]),
    "float8": (TypeError, ["did you mean 'float8_e4m3fn' or 'float8_e5m2'?"]),
    "nonsense": (TypeError, ["expected one of float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2"]),
    "int8": (safeload.UnsupportedError, ["cannot load as int8; supported: float64, float32, bfloat16", "not: int16"]),
    "q4_0": (TypeError, ["it is a quantization scheme, see safeload.load_quantized"]),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_that_loading_does_not_take(dtype, here, capsys):
    kind, parts = DTYPES[dtype]
    ways = [lambda: safeload.load("good.safetensors", dtype=dtype), lambda: load_file("good.safetensors", dtype=dtype)]
    for way in (*ways, lambda: safeload.convert("good.safetensors", "out.safetensors", dtype=dtype)):
        text = message(way, kind)
        assert_says(text, *parts)
        listed = text.partition("expected one of ")[2].split(", ")
        assert len(set(listed)) == len(listed)
    with pytest.raises(SystemExit, match="2"):
        main(["convert", "good.safetensors", "out.safetensors", "--dtype", dtype])
    expected = f"--dtype: {text}; see" if "quantize=" not in text else f"--quantize {dtype} to convert; see"
    assert_says(capsys.readouterr().err, expected)


@pytest.mark.parametrize("scheme", ["Q4_0", "q4_0", "Q8_0", "INT8", "Int8", "Q5_1"])
def test_schemes_are_taken_in_any_case(scheme, here, capsys):
    want = scheme.lower()
    assert safeload.quantize(W, scheme) == safeload.quantize(W, want)
    for given in (scheme, {"w": scheme, "*": None}):
        made = safeload.load_quantized("good.safetensors", given)
        assert (made["w"].scheme, made.summary.quantized) == (want, {"w": want})
    assert set(safeload.quantization_error("good.safetensors", made)) == {"w"}
    safeload.convert("good.safetensors", "out.safetensors", quantize=scheme)
    assert safeload.load("out.safetensors")["w"] == made["w"]
    assert main(["convert", "good.safetensors", "line.safetensors", "--quantize", scheme]) == 0
    assert safeload.load("line.safetensors")["w"] == made["w"]


WRITTEN = "int8, q4_0, q8_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, nvfp4, tq1_0, tq2_0"
SCHEMES = {
    "Q4_K_M": ["scheme 'Q4_K_M' is a llama.cpp mixture: use 'q4_k' for all matrices, or "],
    "q4km": ["unknown scheme 'q4km': did you mean 'q4_k_m', "],
    "IQ3_M": ["unknown scheme 'IQ3_M'"],
    "iq2_xs": [f"IQ2_XS can only be read; writable schemes are {WRITTEN}"],
    "int4": ["unknown scheme 'int4': did you mean 'w4a16', 'q4_0', 'q4_k', 'mlx4' or 'bnb_nf4'?"],
    "q40": ["unknown scheme 'q40': did you mean 'q4_0', "],
    "bf16": ["unknown scheme 'bf16': it is a dtype; pass it as "],
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_that_is_not_written(scheme, here, capsys):
    ways = [
        lambda: safeload.quantize(W, scheme),
        lambda: safeload.load_quantized("good.safetensors", scheme),
        lambda: safeload.load_quantized("good.safetensors", {"*": scheme}),
        lambda: safeload.convert("good.safetensors", "out.safetensors", quantize=scheme),
    ]
    for way in ways:
        assert_says(message(way, ValueError), *SCHEMES[scheme])
    assert main(["convert", "good.safetensors", "out.safetensors", "--quantize", scheme]) == 2
    assert_says(capsys.readouterr().err, *SCHEMES[scheme])


def test_a_scheme_that_is_no_text_is_a_value_error(here):
    for scheme in (None, 4, ["q4_0"]):
        text = message(lambda scheme=scheme: safeload.load_quantized("good.safetensors", scheme), ValueError)
        assert_says(text, "unknown scheme", "`safeload convert --help` lists all schemes")


# ---- names of tensors, slices ----


def test_a_pattern_among_names(here):
    safeload.convert({"model.layers.0.w": W, "model.norm": W}, "model.safetensors")
    for names in (["model.layers.0.*"], ["model.layers.?.w"], ["model.norm", "*"]):
        with safeload.open("model.safetensors") as opened:
            ways = [
                lambda names=names: load_file("model.safetensors", names=names),
                lambda names=names: opened.load(names),
            ]
            for way in ways:
                text = message(way, safeload.TensorNotFoundError)
                assert_says(
                    text,
                    f"File does not contain tensor {names[-1]}: names are exact; only= of safeload.load takes patterns",
                )
    text = message(lambda: safeload.load("model.safetensors", "model.norm"), TypeError)
    assert_says(text, "got a single str: pass a list, such as [name]")
    text = message(lambda: load_file("model.safetensors", names=["model.[norm"]), safeload.TensorNotFoundError)
    assert_says(text, "similar names: model.norm", "not: patterns")


@pytest.mark.parametrize("rows", [[1, 2], np.array([1, 2]), [True] * 4, 1.5, "a"], ids=repr)
def test_a_slice_of_what_slices_do_not_take(rows, here):
    with safeload.open("good.safetensors") as opened:
        text = message(lambda: opened.get_slice("w")[rows], IndexError)
        assert_says(
            text, "get_slice supports integers, slices, ... and None; got a", "checkpoint.take(name, rows) reads rows"
        )
        if not isinstance(rows, (float, str)):
            assert opened["w"][rows].shape[1:] == (64,)  # as the message says
    with safeload.safe_open("good.safetensors") as opened:
        assert_says(message(lambda: opened.get_slice("w")[:, rows]), "as in get_tensor(name)[rows]")


FRAMEWORKS = {
    "mlx": ["load NumPy arrays", "mlx.core.array(array)"],
    "tf": ["load NumPy arrays", "tf.convert_to_tensor(array)"],
    "nonsense": ['framework nonsense is invalid: use "numpy", "pt" or "jax"'],
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_framework(framework, here):
    text = message(lambda: safeload.safe_open("good.safetensors", framework), safeload.SafetensorError)
    assert_says(text, *FRAMEWORKS[framework])


# ---- saving ----


def foreign_array(library, name, dtype):
    """An array of another library, as far as messages look at it."""
    return type(name, (), {"__module__": library, "dtype": dtype, "__array__": lambda self: W})()


ARRAYS = {
    "a nested dict": ({"b": W}, ["tensor 'a' is a dict, not a NumPy array", "safeload.flatten(tree)"]),
    "a list": ([1.0, 2.0], ["tensor 'a' is a list, not a NumPy array", "numpy.asarray(x)"]),
    "a ragged list": ([[1.0], [2.0, 3.0]], ["tensor 'a' is a list, not a NumPy array", "not: asarray"]),
    "a list of text": (["x"], ["tensor 'a' is a list", "not: asarray"]),
    "an int": (1, ["tensor 'a' is an int, not a NumPy array", "numpy.asarray(x)"]),
    "a large int": (10**400, ["tensor 'a' is an int, not a NumPy array", "not: asarray"]),
    "text": ("x", ["tensor 'a' is a str, not a NumPy array", "not: asarray"]),
    "None": (None, ["tensor 'a' is None, not a NumPy array", "not: asarray"]),
    "JAX": (foreign_array("jaxlib._jax", "ArrayImpl", "float32"), ["tensor 'a' is an ArrayImpl", "numpy.asarray(x)"]),
    "torch": (
        foreign_array("torch", "Tensor", "torch.float32"),
        ["tensor 'a' is a Tensor", "x.detach().cpu().numpy()"],
    ),
    "torch, bf16": (
        foreign_array("torch", "Tensor", "torch.bfloat16"),
        [".view(torch.int16).numpy().view(ml_dt"],
    ),
    "a parameter": (foreign_array("torch.nn.parameter", "Parameter", "torch.float16"), ["is a Parameter", ".detach()"]),
}
SAVERS = {
    "safetensors": lambda tensors: save_file(tensors, "out.safetensors"),
    "gguf": lambda tensors: safeload.gguf.save_file(tensors, "out.gguf"),
    "moon": lambda tensors: safeload.moon.save_file(tensors, "out.moon"),
}


# What safetensors files of these are saved with.
MODULES = {"JAX": "jax", "torch": "torch", "torch, bf16": "torch", "a parameter": "torch"}


@pytest.mark.parametrize("case", ARRAYS)
@pytest.mark.parametrize("format", SAVERS)
def test_a_value_that_is_no_array(format, case, here):
    value, parts = ARRAYS[case]
    if format == "safetensors" and case in MODULES:
        parts = [f"use save and save_file of safeload.{MODULES[case]}"]
    text = message(lambda: SAVERS[format]({"a": value}), TypeError)
    assert_says(text, *(part if format != "gguf" else part.replace("numpy array", "numpy array or") for part in parts))
    if "numpy.asarray(x)" in parts:  # leads no further
        safeload.numpy.save({"a": np.asarray(value)})
    assert not list(here.glob("out.*"))


def test_convert_of_a_nested_dict(here):
    for name in ("out.safetensors", "out.gguf", "out.npz"):
        text = message(lambda name=name: safeload.convert({"a": {"b": W}}, name), TypeError)
        assert_says(text, *ARRAYS["a nested dict"][1])


@pytest.mark.parametrize(("array", "dtype"), [(np.array(["xy"]), "<U2"), (np.array([b"xyz"]), "|S3")], ids=["U", "S"])
def test_text_is_called_by_its_code(array, dtype, here):
    for way in (save_file, lambda tensors, path: safeload.convert(tensors, path)):
        assert_says(message(lambda way=way: way({"a": array}, "out.safetensors")), f"dtype '{dtype}' cannot be saved")
    assert_says(message(lambda: safeload.convert({"a": array}, "out.npz")), f"{dtype}", "not: pass dtype")


# ---- folders, and the JSON files in them ----


def filled(folder, files):
    """A folder with these files: JSON for a dict, else bytes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json.dumps(content).encode() if isinstance(content, dict) else content)


ORBAX = {"_CHECKPOINT_METADATA": b"{}", "manifest.ocdbt": b"", "d/1f01": b""}
SAVED = {"saved_model.pb": SAVED_MODEL, "variables/variables.index": TF_INDEX}
FOLDERS = {
    "Orbax": (ORBAX, ["this is an Orbax checkpoint without _METADATA, because it is unfinished or old"]),
    "SavedModel": (SAVED, ["this is a TensorFlow SavedModel: tf.saved_model.load(folder)"]),
    "TensorFlow": (
        {"checkpoint": b"", "ckpt-1.index": TF_INDEX, "ckpt-1.data-00000-of-00001": b""},
        ["this is a TensorFlow checkpoint: tf.train.load_checkpoint(folder)"],
    ),
    "diffusers": (
        {"model_index.json": {}, "unet/model.safetensors": b"", "vae/model.safetensors": b"", "scheduler/x.json": {}},
        ["this is a diffusers pipeline with weights in unet, vae: open one of them"],
    ),
    "variants": (
        {"diffusion.safetensors": b"", "diffusion.fp16.safetensors": b""},
        ["They look like variants of one model: open one of them by its path"],
    ),
    "nothing": ({"README.md": b"", "config.json": {}}, ["no weights here; found README.md, config.json"]),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_does_not_open(case, here, capsys):
    files, parts = FOLDERS[case]
    filled(here / "model", files)
    text = message(lambda: safeload.open("model"), safeload.UnsupportedError)
    assert_says(text, "model: ", *parts)
    assert main(["info", "model"]) == 1
    shown = text.partition(", or open several together")[0]  # in Python
    assert capsys.readouterr().err == f"safeload: {shown}\n"


JSONS = {
    "config.json": ({"model_type": "llama"}, "a model's config.json"),
    "tokenizer.json": ({"version": "1.0"}, "a tokenizer"),
    "generation_config.json": ({}, "a model's generation_config.json"),
    "adapter_config.json": ({}, "the configuration of an adapter"),
    "my.json": ({"architectures": ["LlamaForCausalLM"]}, "a model's config.json"),
}


@pytest.mark.parametrize("name", JSONS)
def test_a_json_file_that_is_no_index(name, here):
    content, what = JSONS[name]
    filled(here / "model", {name: content})
    text = message(lambda: safeload.open(f"model/{name}"), safeload.FormatError)
    assert_says(text, f"this is {what}, not an index: no weights beside it", f"model/{name}")
    save_file({"w": W}, "model/model.safetensors", durable=False)
    text = message(lambda: safeload.open(f"model/{name}"), safeload.FormatError)
    assert_says(text, f"this is {what}, not an index: open its folder")
    assert list(safeload.open("model")) == ["w"]


ADAPTERS = {
    "LoRA": (
        {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "meta-llama/Llama-3.2-1B"},
        "a LoRA adapter (PEFT, r 8) of meta-llama/Llama-3.2-1B: changes to the weights of a base model",
    ),
    "MLX": (
        {"fine_tune_type": "dora", "lora_parameters": {"rank": 4, "scale": 20.0}, "model": "me/base"},
        "a DoRA adapter (MLX, r 4) of me/base: changes to the weights of a base model",
    ),
    "nothing said": ({}, "an adapter (PEFT): changes to the weights"),
    "hostile": (
        {"peft_type": "\x1b[31m", "r": "8", "base_model_name_or_path": "x" * 1000},
        "a \\x1b[31m adapter (PEFT) of x",
    ),
    "no JSON": (b"{", "an adapter (PEFT): changes to the weights"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_called_that(case, here, capsys):
    config, note = ADAPTERS[case]
    filled(here / "adapter", {"adapter_config.json": config})
    save_file({"base_model.model.q.lora_A.weight": W}, "adapter/adapter_model.safetensors", durable=False)
    (said,) = safeload.open("adapter").notes
    assert said.startswith(note)
    assert len(said) < 300
    assert main(["info", "adapter"]) == 0
    assert said[:60] in capsys.readouterr().out


def test_variants_beside_the_model_are_passed_over(here):
    filled(here / "model", {"model.fp16.safetensors": b""})
    save_file({"w": W}, "model/model.safetensors", durable=False)
    assert safeload.open("model").notes == ["skipped: model.fp16.safetensors"]


def test_a_part_of_a_split_gguf_opens_all(here):
    parts = [f"model/model-0000{k}-of-00002.gguf" for k in (1, 2)]
    filled(here, {name: gguf_build.part(k, 2, 2, [f"w{k}"]) for k, name in enumerate(parts)})
    for path in (*parts, "model"):
        with safeload.open(path) as opened:  # Windows keeps a file that is deleted until it is closed
            assert sorted(opened) == ["w0", "w1"]
    (here / parts[0]).unlink()
    for path in (parts[1], "model"):
        assert_says(message(lambda path=path: safeload.open(path), safeload.FormatError), "model-00001-of-00002.gguf")


def test_codes_of_awq_are_not_weights(here):
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv_fast"}}
    filled(here / "model", {"config.json": config})
    codes = {"w.qweight": np.zeros((64, 4), np.int32), "w.qzeros": np.zeros((2, 4), np.int32)}
    save_file({**codes, "w.scales": np.ones((2, 32), np.float16)}, "model/model.safetensors", durable=False)
    text = message(lambda: safeload.load("model", dtype="float32"), safeload.UnsupportedError)
    assert_says(text, "w.qweight", "codes", "quant_method awq, version gemv_fast")


# ---- names that are no text ----

NOT_TEXT = pytest.mark.parametrize("name", [0, b"w", None, ("w", 1), 1.5])


@NOT_TEXT
@pytest.mark.parametrize("source", ["good.safetensors", "sharded", "z.npz"])
def test_a_name_to_read_must_be_text(here, name, source):
    safeload.convert({"w": W, "embed": W}, "sharded", max_shard_size="1.5KB")
    np.savez("z.npz", w=W, embed=W)
    opened = safeload.open(source)
    wanted = f"a tensor name must be str, got {type(name).__name__}"
    for call in (
        lambda: opened[name],
        lambda: opened.get(name),
        lambda: opened.get_slice(name),
        lambda: opened.load([name]),
        lambda: list(opened.stream(["w", name])),
        lambda: safeload.stats(source, names=[name]),
    ):
        assert message(call, TypeError) == wanted
    assert name not in opened
    assert "is not a tensor of this load" in message(lambda: safeload.load(source, out={name: W, "x": W}), ValueError)
    assert "names must be an iterable of names" in message(lambda: opened.load(0), TypeError)


@NOT_TEXT
@pytest.mark.parametrize("suffix", ["safetensors", "npz", "npy", "gguf", "moon", "folder"])
def test_a_name_to_write_must_be_text(here, name, suffix):
    tensors = {name: W.astype(np.float16)}
    wanted = f"a tensor name must be str, got {type(name).__name__}"
    given = {"max_shard_size": "1KB"} if suffix == "folder" else {}
    assert message(lambda: safeload.convert(tensors, f"x.{suffix}", **given), TypeError) == wanted
    assert message(lambda: save_file(tensors, "y.safetensors"), TypeError) == wanted
    assert not list(here.glob("[xy].*"))


@NOT_TEXT
def test_a_name_in_a_dict_must_be_text(here, name):
    tensors = {"w": W, name: W}
    layout = safeload.Layout("l", [safeload.StackedTensor("w", "w")])
    for call in (
        lambda: safeload.diff(tensors, "good.safetensors"),
        lambda: safeload.diff("good.safetensors", tensors),
        lambda: safeload.stats(tensors),
        lambda: safeload.stack(tensors, layout),
        lambda: safeload.check(tensors),
        lambda: safeload.load_quantized(tensors, "int8"),
    ):
        assert message(call, TypeError) == f"a tensor name must be str, got {type(name).__name__}"


# ---- names of modules, and patterns of a part ----


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda path: safeload.open(path)["model.layers.0"], "; 3 names begin with it, such as model.layers.0."),
        (lambda path: safeload.open(path)["model"], "; 6 names begin with it, such as model.layers."),
        (lambda path: safeload.load(path, only="layers.0"), "it must match whole names; '*layers.0*' matches 3"),
        (lambda path: safeload.load(path, only="model.layers.[0-9]"), "names; 'model.layers.[0-9]*' matches 6"),
        (lambda path: safeload.load(path, drop="weight"), "names; '*weight' matches 4"),
        (
            lambda path: safeload.load(path, only=r"model\.layers\.\d+\.a.*"),
            "a shell pattern, not a regular expression",
        ),
        (lambda path: safeload.load(path, only="^model"), "a shell pattern, not a regular expression"),
    ],
)
def test_a_part_of_a_name_is_answered_with_the_names_that_have_it(call, text, here):
    names = [f"model.layers.{k}.{part}" for k in range(2) for part in ("a.weight", "a.bias", "b.weight")]
    save_file(dict.fromkeys(names, W), "layers.safetensors", durable=False)
    assert text in message(lambda: call("layers.safetensors"), safeload.TensorNotFoundError)
