"""Arguments of `convert` with an adapter: each changes the result or the call, or is an error by its name."""

import inspect
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import adapters
from builders.commands import run
from builders.paths import DATA

import safeload

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

UNET = DATA / "lora_diffusion"
FORMS = ("PEFT", "MLX", "llama.cpp", "kohya", "diffusers", "object", "stream")


@pytest.fixture
def convert(tmp_path):
    """A function that converts an adapter to a form, and returns the bytes of the files written by name."""
    base, adapter = adapters.models_in(tmp_path, "peft")("llama3")
    safeload.convert(adapter, tmp_path / "mlx", base=base)
    unet = UNET / "unet_kohya.safetensors", UNET / "unet_base.safetensors"
    sources = {"PEFT": (tmp_path / "mlx", base), "MLX": (adapter, base), "llama.cpp": (adapter, base)}
    names = {"PEFT": "out", "MLX": "out", "llama.cpp": "a.gguf"}
    fixed = {"kohya": {"layout": "kohya"}, "diffusers": {"layout": "diffusers"}, "stream": {"layout": "kohya"}}

    def convert(form, folder, **options):
        source, model = (adapter, base) if form == "object" else sources.get(form, unet)
        (tmp_path / folder).mkdir()
        stream = io.BytesIO() if form in ("object", "stream") else None
        options = {**fixed.get(form, {}), **({"format": "gguf"} if form == "object" else {}), **options}
        place = tmp_path / folder / names.get(form, "a.safetensors") if stream is None else stream
        safeload.convert(source, place, base=model, **options)
        files = {path.name: path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file()}
        return files if stream is None else {"": stream.getvalue()}

    return convert


# A value of each argument that changes the result where it applies.
VALUES = {
    "dtype": "bfloat16",
    "quantize": "q8_0",
    "imatrix": "x.gguf",
    "requantize": True,
    "exact": True,
    "scale_dtype": "float32",
    "part": "vision",
    "layout": "auto",
    "names": ["no such tensor"],
    "only": ["*0*"],
    "drop": ["*[._]0[._]*"],
    "keep": "*",
    "ignore": "*",
    "rename": [("0", "7")],
    "metadata": {"key": "text"},
    "adapters": "x",
    "max_shard_size": "1KB",
    "format": "npz",
    "raw": True,
    "resume": True,
    "executor": None,
    "verify": True,
    "record": True,
}
# Arguments without a trace in the files: an adapter has no files to copy beside it, and its files are small.
NO_TRACE = {"extras": False, "storage_options": {"anon": True}, "overwrite": True, "threads": 1, "cache": "drop"}
# What errors say if not the name of the argument.
REFUSED = {"names": "no such tensor", "layout": "layout", "format": "npz"}
CONSUMED = {
    "PEFT": {"dtype", "only", "drop", "metadata"},
    "MLX": {"dtype", "only", "drop", "metadata"},
    "llama.cpp": {"dtype", "quantize", "only", "drop", "rename", "metadata"},
    "kohya": {"dtype", "only", "drop", "rename", "metadata"},
    "diffusers": {"dtype", "only", "drop", "rename", "metadata"},
    "object": {"dtype", "quantize", "only", "drop", "rename", "metadata"},
    "stream": {"dtype", "only", "drop", "rename", "metadata"},
}


@pytest.mark.parametrize("form", FORMS)
def test_no_argument_is_ignored(form, convert):
    plain, calls = convert(form, "plain"), []
    parameters = inspect.signature(safeload.convert).parameters.keys() - {"src", "dst", "base", "progress"}
    assert parameters == VALUES.keys() | NO_TRACE.keys()
    convert(form, "progress", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    for key, value in NO_TRACE.items():
        assert convert(form, key, **{key: value}) == plain, key
    for key, value in VALUES.items():
        options = {key: ThreadPoolExecutor(1) if key == "executor" else value}
        if key in CONSUMED[form]:
            assert convert(form, key, **options) != plain, key
        else:
            with pytest.raises((ValueError, safeload.TensorNotFoundError), match=REFUSED.get(key, f"{key}=")):
                convert(form, key, **options)


@pytest.mark.parametrize("form", FORMS)
def test_names_are_those_of_the_adapter(form, convert, tmp_path):
    """Selected tensors give the same file whichever argument selects them; half a module is refused."""
    diffusion = form in ("kohya", "diffusers", "stream")
    pattern, half = ("*attn1*", "*.lora_down.weight") if diffusion else ("*q_proj*", "*lora_[aA]*")
    source = UNET / "unet_kohya.safetensors" if diffusion else tmp_path / ("mlx" if form == "PEFT" else "peft")
    inside = [*safeload.load(source, only=pattern)]
    outside = [name for name in safeload.open(source) if name not in inside]
    chosen = convert(form, "only", only=pattern)
    assert chosen != convert(form, "whole")
    assert convert(form, "names", names=inside) == convert(form, "drop", drop=outside) == chosen
    with pytest.raises(safeload.FormatError, match="A and B belong together"):
        convert(form, "half", only=half)


def test_selected_modules_are_those_in_the_settings_of_peft(convert, tmp_path):
    convert("PEFT", "some", only="*q_proj*")
    assert all("q_proj" in name for name in safeload.open(tmp_path / "some" / "out"))
    base = tmp_path / "llama3"
    merged = safeload.load(base, adapters=tmp_path / "some" / "out", dtype="float32")
    before = safeload.load(base, dtype="float32")
    changed = {name for name, value in merged.items() if not np.array_equal(value, before[name])}
    assert changed == {name for name in before if "q_proj.weight" in name}


def test_a_folder_of_a_store_is_refused(tmp_path):
    base, adapter = adapters.models_in(tmp_path, "peft")("llama3")
    with pytest.raises(ValueError, match="is a URL: the folder of an adapter is on a disk"):
        safeload.convert(adapter, "https://127.0.0.1:9/out/", base=base)


FLAGS = {
    "--max-shard-size 1KB": "--max-shard-size",
    "--resume": "--resume",
    "--record": "--record",
    "--rename q z": "--rename",
    "--raw": "--raw",
    "--part vision": "--part",
    "--keep x": "--keep",
    "--exact": "--exact",
    "--requantize": "--requantize",
    "--quantize q8_0": "--quantize",
    "--check-result": "--check-result",
    "--dask tcp://127.0.0.1:9": "--dask",
    "--verify x.json": "",
    "--format npz": "npz",
    "--stored": "",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_of_the_program_are_refused(flags, tmp_path, capsys):
    base, adapter = adapters.models_in(tmp_path, "peft")("llama3")
    command = ["convert", adapter, tmp_path / "out", "--base", base, *flags.split(" ")]
    status, _, errors = run(capsys, *command)
    assert (status in (1, 2), FLAGS[flags] in errors, (tmp_path / "out").exists()) == (True, True, False), errors


EXTRACTED = {"rank": 1, "dtype": "float16", "with_rest": True, "only": "*0*", "drop": "*0*"}


def test_extract_ignores_no_argument(tmp_path):
    rng = np.random.default_rng(0)
    base = {f"{k}.weight": np.zeros((8, 8), np.float32) for k in range(2)} | {"norm.weight": np.zeros(8, np.float32)}
    fine = {name: rng.standard_normal(value.shape, np.float32) for name, value in base.items()}

    def extract(name, **options):
        safeload.extract(base, fine, tmp_path / name, **options)
        return [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]

    plain, calls = extract("plain"), []
    parameters = inspect.signature(safeload.extract).parameters.keys() - {"base", "fine", "dst"}
    without_trace = {"threads": 1, "storage_options": {"anon": True}, "overwrite": True}
    assert parameters == {"progress", *EXTRACTED, *without_trace}
    for key, value in EXTRACTED.items():
        assert extract(key, **{key: value}) != plain, key
    for key, value in without_trace.items():
        assert extract(key, **{key: value}) == plain, key
    with pytest.raises(FileExistsError):
        extract("plain")
    assert extract("plain", overwrite=True) == plain
    extract("progress", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
